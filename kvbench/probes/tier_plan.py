"""Read a plan of tier stacks, `probes/tiers.yaml`, and spread it into cases."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from kvbench.core.errors import UsageError
from kvbench.core.units import MIB, parse_bytes, parse_duration
from kvbench.probes.plan_file import plan_path, replaced_keys, written_plan
from kvbench.probes.segments import KvShape, kv_shape
from kvbench.results.written_file import quantity, validated_plan
from kvbench.tiers.registry import default_name
from kvbench.tiers.spec import TierSpec, parse_tier_spec
from kvbench.tiers.tiered import WritePolicy

if TYPE_CHECKING:
    from pydantic import BaseModel

_EXAMPLE = "probes/tiers.yaml"
_BETWEEN_TIERS = re.compile(r"\s+\+\s+")
_LISTS = ("stacks", "policies", "batch", "concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """Which stacks to drive, with blocks of which model, and how long; sizes and times are upper bounds."""

    name: str
    question: str
    stacks: tuple[tuple[TierSpec, ...], ...]
    policies: tuple[WritePolicy, ...]
    model: str
    tp: int
    page_tokens: int
    blocks: int
    batches: tuple[int, ...]
    mixed_batch: int
    concurrency: tuple[int, ...]
    load_share_ratio: float
    queue_bytes: int
    threshold: int
    repeats: int
    warmups: int
    pool_bytes: int
    file_bytes: int
    time_s: float
    timeout_s: float
    total_s: float

    def shape(self) -> KvShape:
        """The cache whose pages are the blocks."""
        return kv_shape(self.model, tp=self.tp, page_tokens=self.page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTierCase:
    """One child's work: tier number `tier` of a stack by itself, or the stack under a policy."""

    stack: tuple[TierSpec, ...]
    concurrency: int
    tier: int | None = None
    policy: WritePolicy | None = None

    @property
    def tier_names(self) -> tuple[str, ...]:
        """What the tiers are called: their schemes, numbered where one occurs twice."""
        return tier_names(self.stack)

    @property
    def name(self) -> str:
        """What sets this case apart, for people: `file alone, ×4`."""
        what = f"{self.tier_names[self.tier]} alone" if self.tier is not None else f"{self.policy}"
        return f"{what}, ×{self.concurrency}" if self.concurrency != 1 else what


def tier_names(stack: Sequence[TierSpec]) -> tuple[str, ...]:
    """The scheme of each tier; the second `file` is `file-2`."""
    seen: Counter[str] = Counter()
    names = []
    for spec in stack:
        scheme = default_name(spec)
        seen[scheme] += 1
        names.append(scheme if seen[scheme] == 1 else f"{scheme}-{seen[scheme]}")
    return tuple(names)


def stack_text(stack: Sequence[TierSpec]) -> str:
    """`hbm:64MiB + dram:256MiB`."""
    return " + ".join(map(str, stack))


def parse_stack(text: str) -> tuple[TierSpec, ...]:
    """The tiers of `hbm:64MiB + dram:256MiB + file:/mnt/nvme`, nearest first."""
    stack = tuple(parse_tier_spec(part) for part in _BETWEEN_TIERS.split(text.strip()))
    if len(stack) > 8:
        raise UsageError(f"a stack of {len(stack)} tiers is more than a tiered store takes; name at most 8")
    return stack


def is_tier_plan(name_or_path: str) -> bool:
    """Whether the plan is one of tier stacks rather than of transfers."""
    return "stacks" in written_plan(plan_path(name_or_path))


def load_tier_plan(name_or_path: str, settings: Sequence[str] = ()) -> TierPlan:
    """The plan of that name in `probes/`, or in that file; each setting `key=value` replaces a key of it."""
    path = plan_path(name_or_path)
    schema = _schema()
    replaced = replaced_keys(settings, tuple(schema.model_fields), lists=_LISTS, uncut=("stacks",))
    written = {**written_plan(path), **replaced}
    plan: TierPlan = validated_plan(written, schema, source=str(path), example=_EXAMPLE).as_plan(path.stem)
    return plan


def planned_tier_cases(plan: TierPlan) -> list[PlannedTierCase]:
    """Every tier by itself, then every stack under every policy; what two stacks share is measured once."""
    alone: dict[tuple[str, bool, int], PlannedTierCase] = {}
    policies: list[PlannedTierCase] = []
    for stack in plan.stacks:
        for concurrency in plan.concurrency:
            for number, spec in enumerate(stack):
                case = PlannedTierCase(stack=stack, tier=number, concurrency=concurrency)
                alone.setdefault((str(spec), number == 0, concurrency), case)
            differing = plan.policies if len(stack) > 1 else plan.policies[:1]  # a first tier takes all anyway
            policies += [PlannedTierCase(stack=stack, policy=one, concurrency=concurrency) for one in differing]
    return [*alone.values(), *policies]


@cache
def _schema() -> "type[BaseModel]":
    """The file's form. Built on first use, because pydantic takes longer to import than `kvbench --help` may run."""
    from typing import Annotated

    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

    size = Annotated[int, BeforeValidator(quantity(parse_bytes, "64MiB")), Field(gt=0)]
    duration = Annotated[float, BeforeValidator(quantity(parse_duration, "6s")), Field(gt=0, le=86400)]
    count = Annotated[int, Field(ge=1, le=1 << 20)]
    callers = Annotated[int, Field(ge=1, le=256)]

    class Plan(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

        question: Annotated[str, Field(min_length=1)]
        stacks: list[str] = Field(min_length=1)
        policies: list[Literal["write-through", "write-through-selective", "write-back"]] = Field(min_length=1)
        model: str
        tp: count = 1
        page_tokens: count = 16
        blocks: count
        batch: list[count] = Field(min_length=1)
        mixed_batch: count = 4
        concurrency: list[callers] = Field(default=[1], min_length=1)
        load_share: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.5
        queue: size = 32 * MIB
        threshold: count = 2
        repeats: count = 400
        warmups: Annotated[int, Field(ge=0, le=1000)] = 1
        pool: size = 256 * MIB
        file: size = 512 * MIB
        time: duration
        timeout: duration
        total: duration

        @field_validator("stacks")
        @classmethod
        def spelled_right(cls, stacks: list[str]) -> list[str]:
            for text in stacks:
                try:
                    parse_stack(text)
                except UsageError as error:
                    raise ValueError(str(error)) from error
            return stacks

        def as_plan(self, name: str) -> TierPlan:
            return TierPlan(
                name=name,
                question=" ".join(self.question.split()),
                stacks=tuple(parse_stack(text) for text in self.stacks),
                policies=tuple(dict.fromkeys(self.policies)),
                model=self.model,
                tp=self.tp,
                page_tokens=self.page_tokens,
                blocks=self.blocks,
                batches=tuple(sorted(set(self.batch))),
                mixed_batch=self.mixed_batch,
                concurrency=tuple(dict.fromkeys(self.concurrency)),
                load_share_ratio=self.load_share,
                queue_bytes=self.queue,
                threshold=self.threshold,
                repeats=self.repeats,
                warmups=self.warmups,
                pool_bytes=self.pool,
                file_bytes=self.file,
                time_s=self.time,
                timeout_s=self.timeout,
                total_s=self.total,
            )

    return Plan
