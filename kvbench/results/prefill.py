"""Measured prefill of a few layers of a model, and what all of its layers would take."""

from dataclasses import dataclass
from statistics import median

from kvbench.core.provenance import Warning_

TRUSTED_EXTRAPOLATION = 4
"""How many times the largest measured token count a prediction may reach before it carries a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSample:
    """One timed forward of `tokens` tokens, or one layer's part of it."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Fit t(N) = c0 + c1·N + c2·N² in seconds over N tokens, no coefficient negative.

    c0 is the fixed cost of a call, c1·N the matrix products and c2·N² the attention. `residual_ratio` is the median of
    |measured - fitted| / measured over the samples.
    """

    c0_s: float
    c1_s: float
    c2_s: float
    residual_ratio: float
    samples: tuple[PrefillSample, ...]

    def seconds(self, tokens: int) -> float:
        """Time for a prefill of `tokens` tokens; zero for none, because nothing runs then."""
        return self.c0_s + self.c1_s * tokens + self.c2_s * tokens**2 if tokens > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKindTiming:
    """Cost of one layer of a kind, taken on `measured_layers`, and every layer of the full model built like them."""

    kind: str
    layer_indices: tuple[int, ...]
    measured_layers: tuple[int, ...]
    cost: PrefillCost

    @property
    def num_layers(self) -> int:
        return len(self.layer_indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutForward:
    """A larger prefill of the shortened model that the fit never saw, against what the fit says about it."""

    predicted_s: float
    samples: tuple[PrefillSample, ...]

    @property
    def tokens(self) -> int:
        return self.samples[0].tokens

    @property
    def measured_s(self) -> float:
        return median(sample.seconds for sample in self.samples)

    @property
    def predicted_over_measured(self) -> float:
        return self.predicted_s / self.measured_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillMeasurement:
    """Prefill of a shortened model with random weights: causal forward that fills the KV cache, no LM head.

    `overhead` is what a forward spends outside its layers (embedding, masks, rotary tables, last norm). `device` is
    `cpu` or `cuda:0`; `threads` are the CPU threads of torch. `layers` covers every layer of the full model once.
    """

    model_type: str
    device: str
    device_name: str
    dtype: str
    threads: int
    attention: str
    torch_version: str
    transformers_version: str
    layers: tuple[LayerKindTiming, ...]
    overhead: PrefillCost
    held_out: HeldOutForward | None
    warnings: tuple[Warning_, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(kind.num_layers for kind in self.layers)

    @property
    def max_measured_tokens(self) -> int:
        fitted = max(sample.tokens for sample in self.overhead.samples)
        return max(fitted, self.held_out.tokens) if self.held_out else fitted

    @property
    def residual_ratio(self) -> float:
        """The worst of the layer kinds, because each stands for layers that no other kind describes."""
        return max(kind.cost.residual_ratio for kind in self.layers)

    def seconds(self, tokens: int) -> float:
        """Time of a prefill of `tokens` tokens through all layers of the full model, without the LM head."""
        return self.overhead.seconds(tokens) + sum(kind.num_layers * kind.cost.seconds(tokens) for kind in self.layers)

    def extrapolation_warning(self, tokens: int) -> Warning_ | None:
        """A warning when `tokens` lies further beyond the measured range than the fit is trusted."""
        if tokens <= TRUSTED_EXTRAPOLATION * self.max_measured_tokens:
            return None
        return Warning_(
            code="prefill-extrapolated",
            message=f"prefill of {tokens} tokens is extrapolated from at most {self.max_measured_tokens} measured",
            remedy="measure with larger token counts, or read the result as an order of magnitude",
        )
