"""A model runner as the scheduler drives it."""

from collections.abc import Sequence

from kvbench.engines.builtin.generation import Generation, ServedModel, Tokenizer
from kvbench.engines.builtin.runner import ModelInfo, ModelRunner, RunningSequence, Sampling


class ServedRunner:
    """`ModelRunner` in the scheduler's words."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.served = served_model(runner.info)
        self.eos_ids: Sequence[int] = runner.info.eos_ids
        self.tokenizer: Tokenizer = runner.tokenizer

    def begin(self, generation: Generation) -> RunningSequence:
        """Looks the prompt's prefix up and begins to load it."""
        return self._runner.start(
            generation.prompt_ids,
            request_id=generation.request_id,
            max_tokens=generation.max_tokens,
            sampling=Sampling(temperature=generation.temperature, top_p=generation.top_p, seed=generation.seed),
            ignore_eos=generation.ignore_eos,
            cache_salt=generation.cache_salt,
        )

    def prefill_step(self, sequence: RunningSequence, max_tokens: int) -> bool:
        """Computes up to `max_tokens` more of the prompt."""
        return self._runner.prefill_step(sequence, max_tokens)

    def decode_step(self, sequences: Sequence[RunningSequence]) -> None:
        """One more token for each."""
        self._runner.decode_step(sequences)

    def finish(self, sequence: RunningSequence, *, cancelled: bool) -> None:
        """Frees a sequence."""
        self._runner.finish(sequence, cancelled=cancelled)

    def settle(self) -> None:
        """Hands over what is due to be stored."""
        self._runner.settle()

    def close(self) -> None:
        """Frees the model."""
        self._runner.close()


def served_model(info: ModelInfo) -> ServedModel:
    """What clients may know of it. A token's bytes are those of all layers that keep one row per token."""
    return ServedModel(
        name=info.name,
        vocab_size=info.vocab_size,
        max_context_tokens=info.max_tokens,
        page_tokens=info.page_tokens,
        kv_bytes_per_token=float(sum(info.kv_bytes_per_token.values())),
        block_bytes=info.block_bytes,
        architecture=info.architecture,
        num_parameters=info.num_parameters,
        kv_bytes_per_token_by_kind=dict(info.kv_bytes_per_token),
        state_bytes=info.state_bytes,
        dtype=info.dtype,
        device=info.device,
        weights=info.weights,
    )
