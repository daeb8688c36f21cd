"""A model as the cost formulas see it: its layers, embeddings and what they add up to."""

from dataclasses import dataclass

from kvbench.core.layers import Attention, LatentAttention, Layer, RecurrentState


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shape of one decoder-only model.

    `extra_params` are weights outside the layers beside embedding and LM head (final norm and the like).
    `state_dtype` is what the checkpoint asks for its recurrent state, None where it leaves that to the engine.
    `weight_dtype` is what the published checkpoint computes its linear layers in (bf16, fp8_block, mxfp4, …).
    """

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    layers: tuple[Layer, ...]
    extra_params: int = 0
    state_dtype: str | None = None
    weight_dtype: str = "bf16"
    max_context_tokens: int | None = None

    def matmul_params_per_token(self) -> int:
        """Matmul parameters one token touches; what prefill of a prefix multiplies with (no LM head)."""
        return sum(layer.matmul_params() for layer in self.layers)

    def total_params(self) -> int:
        """All weights; the LM head counts once where it is tied to the embedding."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.extra_params + sum(layer.total_params() for layer in self.layers)

    def layer_kinds(self) -> dict[str, int]:
        """How many layers of each kind, in the order they first appear: `{"full": 18, "window": 18}`."""
        kinds: dict[str, int] = {}
        for layer in self.layers:
            kinds[layer_kind(layer)] = kinds.get(layer_kind(layer), 0) + 1
        return kinds

    def heads(self) -> int:
        """Query heads of the widest attention layer; 1 for a model without attention."""
        return max((m.heads for m in self.mixers() if not isinstance(m, RecurrentState)), default=1)

    def kv_heads(self) -> int | None:
        """KV heads of the widest attention layer; None where no layer stores K and V per head (MLA, recurrent)."""
        return max((m.kv_heads for m in self.mixers() if isinstance(m, Attention)), default=None)

    def mixers(self) -> list[Attention | LatentAttention | RecurrentState]:
        """The token mixers that exist, in layer order."""
        return [layer.mixer for layer in self.layers if layer.mixer is not None]


def layer_kind(layer: Layer) -> str:
    """One word for a layer's cache: full, window, chunked, shared, mla, dsa, none, or the recurrent kind."""
    match layer.mixer:
        case None:
            return "none"
        case RecurrentState(kind=kind):
            return kind
        case LatentAttention(indexer=indexer):
            return "dsa" if indexer else "mla"
        case Attention(stores_kv=False):
            return "shared"
        case Attention(window_tokens=None, chunk_tokens=None):
            return "full"
        case Attention(window_tokens=None):
            return "chunked"
        case _:
            return "window"
