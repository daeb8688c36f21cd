"""Read a transfer plan, such as `probes/h2d.yaml`, and spread it into cases."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Literal

from kvbench.core.errors import UsageError
from kvbench.core.units import MIB, parse_bandwidth, parse_bytes, parse_duration
from kvbench.probes.executions.registry import EXECUTIONS
from kvbench.probes.plan_file import EXAMPLE, plan_path, replaced_keys, written_plan
from kvbench.probes.segments import LAYOUTS, KvShape, Layout, kv_shape
from kvbench.results.probe import ProbeDirection
from kvbench.results.written_file import quantity, validated_plan
from kvbench.tiers.file_engines.registry import ENGINES
from kvbench.tiers.spec import TierSpec, parse_tier_spec

if TYPE_CHECKING:
    from pydantic import BaseModel

FsyncMode = Literal["none", "fdatasync", "batch"]
Beside = Literal["nothing", "compute"]

_FAMILIES: dict[str, tuple[ProbeDirection, ...]] = {
    "dram": ("h2h", "h2d", "d2h", "duplex"),
    "null": ("h2h",),
    "file": ("load", "store"),
    "redis": ("load", "store"),
    "s3": ("load", "store"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorLine:
    """A rate from a data sheet that the plan's plot is held against."""

    name: str
    bytes_per_s: float
    source: str
    direction: ProbeDirection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What to move, how, and how often; `pool_bytes`, `file_bytes` and the times are upper bounds.

    A size is one transfer, a segment a piece of it: a page of KV, a block of a file, a value in a store. `stand_ins`
    are measured instead of CUDA executions on a host without a GPU, and are labelled so. `concurrency` 0 stands for
    all devices.
    """

    name: str
    question: str
    paths: tuple[TierSpec, ...]
    directions: tuple[ProbeDirection, ...]
    sizes_bytes: tuple[int, ...]
    segments_bytes: tuple[int, ...]
    executions: tuple[str, ...]
    stand_ins: tuple[str, ...]
    layouts: tuple[Layout, ...]
    engines: tuple[str, ...]
    direct: tuple[bool, ...]
    fsync: tuple[FsyncMode, ...]
    huge_pages: tuple[bool, ...]
    concurrency: tuple[int, ...]
    beside: tuple[Beside, ...]
    repeats: int
    warmups: int
    pool_bytes: int
    file_bytes: int
    time_s: float
    timeout_s: float
    total_s: float
    model: str | None
    tp: int
    page_tokens: int
    anchors: tuple[AnchorLine, ...]

    def shape(self) -> KvShape | None:
        """The cache that layouts are made of, or None where every layout is `scattered`."""
        if all(layout == "scattered" for layout in self.layouts):
            return None
        if self.model is None:
            raise UsageError(
                f"plan {self.name}: layout {self.layouts[0]} needs a model for its page; add --model qwen3-235b-a22b"
            )
        return kv_shape(self.model, tp=self.tp, page_tokens=self.page_tokens)


def load_transfer_plan(name_or_path: str, settings: Sequence[str] = ()) -> TransferPlan:
    """The plan of that name in `probes/`, or in that file; each setting `key=value` replaces a key of it."""
    path = plan_path(name_or_path)
    written = written_plan(path)
    schema = _schema()
    replaced = replaced_keys(settings, tuple(schema.model_fields), lists=_LISTS, uncut=("paths",))
    if "model" in replaced and "layouts" not in {**written, **replaced}:
        replaced["layouts"] = list(LAYOUTS[1:])  # a model brings page shapes; without a layout they would not be used
    written = {**written, **replaced}
    plan: TransferPlan = validated_plan(written, schema, source=str(path), example=EXAMPLE).as_plan(path.stem)
    return plan


_LISTS = (
    "paths", "directions", "sizes", "segments", "executions", "stand_ins", "layouts", "engines", "direct", "fsync",
    "huge_pages", "concurrency", "beside",
)  # fmt: skip


@cache
def _schema() -> "type[BaseModel]":
    """The file's form. Built on first use, because pydantic takes longer to import than `kvbench --help` may run."""
    from typing import Annotated

    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

    size = Annotated[int, BeforeValidator(quantity(parse_bytes, "64MiB")), Field(gt=0)]
    duration = Annotated[float, BeforeValidator(quantity(parse_duration, "6s")), Field(gt=0, le=86400)]
    bandwidth = Annotated[float, BeforeValidator(quantity(parse_bandwidth, "7GB/s"))]
    count = Annotated[int, Field(ge=1, le=1 << 20)]

    class Strict(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    class Line(Strict):
        name: str
        rate: bandwidth
        source: str
        direction: Literal["h2h", "h2d", "d2h", "duplex", "load", "store"] | None = None

    class Plan(Strict):
        question: Annotated[str, Field(min_length=1)]
        paths: list[str] = Field(min_length=1)
        directions: list[Literal["h2h", "h2d", "d2h", "duplex", "load", "store"]] = Field(min_length=1)
        sizes: list[size] = Field(min_length=1)
        segments: list[size] = Field(default=[])
        executions: list[str] = Field(default=[])
        stand_ins: list[str] = Field(default=[])
        layouts: list[Literal["scattered", "layer-first", "page-first", "page-first-direct"]] = Field(
            default=["scattered"], min_length=1
        )
        engines: list[str] = Field(default=["psync"], min_length=1)
        direct: list[int] = Field(default=[1], min_length=1)
        fsync: list[Literal["none", "fdatasync", "batch"]] = Field(default=["none"], min_length=1)
        huge_pages: list[int] = Field(default=[0], min_length=1)
        concurrency: list[int | Literal["all"]] = Field(default=[1], min_length=1)
        beside: list[Literal["nothing", "compute"]] = Field(default=["nothing"], min_length=1)
        repeats: count = 9
        warmups: Annotated[int, Field(ge=1, le=1000)] = 1
        pool: size
        file: size = 256 * MIB
        time: duration
        timeout: duration
        total: duration
        model: str | None = None
        tp: count = 1
        page_tokens: count = 64
        anchors: list[Line] = Field(default=[])

        @field_validator("executions", "stand_ins", "engines")
        @classmethod
        def known(cls, names: list[str]) -> list[str]:
            for name in names:
                if name not in EXECUTIONS and name not in ENGINES:
                    close = difflib.get_close_matches(name, [*EXECUTIONS, *ENGINES], n=1)
                    hint = f", did you mean {close[0]}?" if close else ""
                    raise ValueError(f"{name} is not known{hint} (known: {', '.join([*EXECUTIONS, *ENGINES])})")
            return names

        @field_validator("direct", "huge_pages")
        @classmethod
        def switch(cls, values: list[int]) -> list[int]:
            if not set(values) <= {0, 1}:
                raise ValueError("each is 1 (yes) or 0 (no)")
            return values

        @field_validator("concurrency")
        @classmethod
        def positive(cls, values: list[int | str]) -> list[int | str]:
            for value in values:
                if isinstance(value, int) and not 1 <= value <= 1024:
                    raise ValueError(f"{value} is not between 1 and 1024, nor `all` for every device")
            return values

        @model_validator(mode="after")
        def directions_fit_paths(self) -> "Plan":
            for text in self.paths:
                try:
                    family = family_of(parse_tier_spec(text))
                except UsageError as error:
                    raise ValueError(str(error)) from error
                for direction in self.directions:
                    if direction not in _FAMILIES[family]:
                        raise ValueError(
                            f"path {text} has no direction {direction}; it has {', '.join(_FAMILIES[family])}"
                        )
                if family == "dram" and not self.executions:
                    raise ValueError(f"path {text} needs executions, such as host-block or cuda-batch")
            return self

        def as_plan(self, name: str) -> TransferPlan:
            return TransferPlan(
                name=name,
                question=" ".join(self.question.split()),
                paths=tuple(parse_tier_spec(text) for text in self.paths),
                directions=tuple(self.directions),
                sizes_bytes=tuple(sorted(set(self.sizes))),
                segments_bytes=tuple(sorted(set(self.segments))),
                executions=tuple(self.executions),
                stand_ins=tuple(self.stand_ins),
                layouts=tuple(self.layouts),
                engines=tuple(self.engines),
                direct=tuple(bool(value) for value in self.direct),
                fsync=tuple(self.fsync),
                huge_pages=tuple(bool(value) for value in self.huge_pages),
                concurrency=tuple(0 if value == "all" else int(value) for value in self.concurrency),
                beside=tuple(self.beside),
                repeats=self.repeats,
                warmups=self.warmups,
                pool_bytes=self.pool,
                file_bytes=self.file,
                time_s=self.time,
                timeout_s=self.timeout,
                total_s=self.total,
                model=self.model,
                tp=self.tp,
                page_tokens=self.page_tokens,
                anchors=tuple(
                    AnchorLine(name=line.name, bytes_per_s=line.rate, source=line.source, direction=line.direction)
                    for line in self.anchors
                ),
            )

    return Plan


def family_of(spec: TierSpec) -> str:
    """The scheme inside every wrapper, if transfers to it can be measured."""
    if spec.inner is not None:
        inner = family_of(spec.inner)
        if spec.scheme != "throttled" or inner not in ("null", "dram"):
            raise UsageError(f"path {spec}: only throttled(null:, …) and throttled(dram:, …) can be probed")
        return inner
    if spec.scheme not in _FAMILIES:
        raise UsageError(f"path {spec} cannot be probed; use one of {', '.join(_FAMILIES)}, or throttled(null:, …)")
    return spec.scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """One child's work: a path in one direction by one method, over all points (transfer and segment bytes)."""

    spec: TierSpec
    family: str
    direction: ProbeDirection
    method: str
    layout: Layout
    concurrency: int
    direct: bool | None = None
    fsync: FsyncMode | None = None
    huge_pages: bool = False
    beside: Beside = "nothing"
    stands_in_for: str | None = None
    points: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """What sets this case apart, for people: `host-gather h2h, page-first, ×2`."""
        parts = [f"{self.method} {self.direction}"]
        parts += [str(self.spec)] if self.spec.inner is not None else []
        parts += [self.layout] if self.layout != "scattered" else []
        parts += [] if self.direct is None else ["direct" if self.direct else "buffered"]
        parts += [f"fsync {self.fsync}"] if self.fsync not in (None, "none") else []
        parts += ["huge pages"] if self.huge_pages else []
        parts += [f"×{self.concurrency or 'all'}"] if self.concurrency != 1 else []
        parts += [f"beside {self.beside}"] if self.beside != "nothing" else []
        return ", ".join(parts)


def planned_cases(plan: TransferPlan, *, has_gpu: bool) -> Iterator[PlannedCase]:
    """Every combination that makes sense; CUDA executions come first, then what stands in for them without a GPU."""
    for spec in plan.paths:
        family = family_of(spec)
        if family in ("dram", "null"):
            # what stands in for h2d also stands in for d2h: measured once
            once: dict[str, PlannedCase] = {}
            for case in _copies(plan, spec, family, has_gpu=has_gpu):
                once.setdefault(case.name, case)
            yield from once.values()
        elif family == "file":
            yield from _file_cases(plan, spec)
        else:
            for direction in plan.directions:
                for concurrency in plan.concurrency:
                    yield PlannedCase(
                        spec=spec,
                        family=family,
                        direction=direction,
                        method=family,
                        layout="scattered",
                        concurrency=max(concurrency, 1),
                        points=_points(plan),
                    )


def _copies(plan: TransferPlan, spec: TierSpec, family: str, *, has_gpu: bool) -> Iterator[PlannedCase]:
    for direction in plan.directions:
        methods: list[tuple[str, ProbeDirection, ProbeDirection | None]] = [
            (name, direction, None) for name in (("null",) if family == "null" else plan.executions)
        ]
        if not has_gpu and direction != "h2h":
            methods += [(name, "h2h", direction) for name in plan.stand_ins]
        for name, way, stands_in_for in methods:
            for layout in plan.layouts:
                for concurrency in plan.concurrency:
                    for beside in plan.beside:
                        copiers = concurrency or (2 if stands_in_for else 0)
                        yield PlannedCase(
                            spec=spec,
                            family=family,
                            direction=way,
                            method=name,
                            layout=layout,
                            concurrency=copiers * 2 if stands_in_for == "duplex" else copiers,
                            beside=beside,
                            stands_in_for=stands_in_for,
                            points=_points(plan, whole=name.endswith("-block") or layout != "scattered"),
                        )


def _file_cases(plan: TransferPlan, spec: TierSpec) -> Iterator[PlannedCase]:
    for direction in plan.directions:
        engines = plan.engines if spec.io is None else (spec.io,)
        syncs: tuple[FsyncMode, ...] = plan.fsync if direction == "store" else ("none",)
        for engine, fsync, huge_pages, concurrency in product(engines, syncs, plan.huge_pages, plan.concurrency):
            # a mapping always goes through the page cache
            for direct in sorted({value and engine != "mmap" for value in _directs(plan, spec)}, reverse=True):
                yield PlannedCase(
                    spec=spec,
                    family="file",
                    direction=direction,
                    method=engine,
                    layout="scattered",
                    concurrency=max(concurrency, 1),
                    direct=direct,
                    fsync=fsync,
                    huge_pages=huge_pages,
                    points=_points(plan),
                )


def _directs(plan: TransferPlan, spec: TierSpec) -> Sequence[bool]:
    return plan.direct if spec.direct is None else (spec.direct,)


def _points(plan: TransferPlan, *, whole: bool = False) -> tuple[tuple[int, int], ...]:
    """Transfer and segment sizes: every segment that fits; whole transfers where nothing is cut."""
    if whole or not plan.segments_bytes:
        return tuple((size, size) for size in plan.sizes_bytes)
    return tuple(
        (size - size % segment, segment)
        for size in plan.sizes_bytes
        for segment in plan.segments_bytes
        if segment <= size
    )


def throttle_of(spec: TierSpec) -> Mapping[str, float] | None:
    """The constants of a `throttled(…)` path: bytes per second, seconds per transfer, seconds per segment."""
    if spec.scheme != "throttled":
        return None
    options = dict(spec.options)
    found: dict[str, float] = {}
    if "bandwidth" in options:
        found["bytes_per_s"] = parse_bandwidth(options["bandwidth"])
    if "latency" in options:
        found["fixed_s"] = parse_duration(options["latency"])
    if "segment_latency" in options:
        found["per_segment_s"] = parse_duration(options["segment_latency"])
    return found
