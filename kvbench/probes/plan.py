"""Read a measurement plan, such as `probes/measure.yaml`, into plain dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvbench.core.units import parse_bytes, parse_duration
from kvbench.probes.device_memory import PAGE_BYTES
from kvbench.results.data import data_folder
from kvbench.results.written_file import quantity, read_plan_file, validated_plan

if TYPE_CHECKING:
    from pydantic import BaseModel

_EXAMPLE = "probes/measure.yaml"

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How to time loads from one tier; `pool_bytes`, `file_bytes` and `time_s` are upper bounds."""

    sizes_bytes: tuple[int, ...]
    repeats: int
    warmups: int
    concurrency: int
    pool_bytes: int
    file_bytes: int
    time_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """How to time prefills: token counts to fit and one to check with, for each kind of device."""

    dtype: str
    max_layers_per_kind: int
    tokens: Mapping[DeviceKind, tuple[int, ...]]
    check_tokens: Mapping[DeviceKind, int]
    repeats: int
    time_s: float
    timeout_s: float
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePlan:
    """What one measurement of this host does, and how long it may take in all."""

    question: str
    load: LoadPlan
    prefill: PrefillPlan
    total_s: float


def load_measure_plan(path: Path | None = None) -> MeasurePlan:
    """The plan in a YAML file; without a path the one that `--measure` uses."""
    source = path or data_folder("probes") / "measure.yaml"
    written = read_plan_file(source, example=_EXAMPLE)
    plan: MeasurePlan = validated_plan(written, _schema(), source=str(source), example=_EXAMPLE).as_plan()
    return plan


@cache
def _schema() -> "type[BaseModel]":
    """The file's form. Built on first use, because pydantic takes longer to import than `kvbench --help` may run."""
    from typing import Annotated

    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

    size = Annotated[int, BeforeValidator(quantity(parse_bytes, "64MiB")), Field(gt=0)]
    duration = Annotated[float, BeforeValidator(quantity(parse_duration, "6s")), Field(gt=0, le=86400)]
    count = Annotated[int, Field(ge=1, le=1 << 24)]

    class Strict(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    class Load(Strict):
        sizes: list[size] = Field(min_length=2)
        repeats: count
        warmups: Annotated[int, Field(ge=0, le=1000)]
        concurrency: Annotated[int, Field(ge=1, le=1024)]
        pool: size
        file: size
        time: duration
        timeout: duration

        @field_validator("sizes")
        @classmethod
        def whole_pages(cls, sizes: list[int]) -> list[int]:
            for number in sizes:
                if number % PAGE_BYTES:
                    raise ValueError(f"{number} is no multiple of {PAGE_BYTES} bytes, which direct reads need")
            if len(set(sizes)) < 2:
                raise ValueError("a fit needs at least two different sizes")
            return sorted(set(sizes))

    class Prefill(Strict):
        dtype: Literal["auto", "float32", "bfloat16", "float16"]
        max_layers_per_kind: count
        tokens: dict[Literal["cpu", "cuda"], Annotated[list[count], Field(min_length=3)]]
        check_tokens: dict[Literal["cpu", "cuda"], count]
        repeats: count
        time: duration
        timeout: duration
        memory: size | None = None

        @model_validator(mode="after")
        def both_devices(self) -> "Prefill":
            for device in ("cpu", "cuda"):
                tokens = self.tokens.get(device, [])
                if len(set(tokens)) < 3:
                    raise ValueError(f"tokens.{device} needs at least three different counts for the fit")
                if self.check_tokens.get(device, 0) <= max(tokens):
                    raise ValueError(f"check_tokens.{device} must be larger than every count of tokens.{device}")
            return self

    class Measure(Strict):
        question: Annotated[str, Field(min_length=1)]
        load: Load
        prefill: Prefill
        total: duration

        def as_plan(self) -> MeasurePlan:
            load, prefill = self.load, self.prefill
            return MeasurePlan(
                question=self.question,
                load=LoadPlan(
                    sizes_bytes=tuple(load.sizes),
                    repeats=load.repeats,
                    warmups=load.warmups,
                    concurrency=load.concurrency,
                    pool_bytes=load.pool,
                    file_bytes=load.file,
                    time_s=load.time,
                    timeout_s=load.timeout,
                ),
                prefill=PrefillPlan(
                    dtype=prefill.dtype,
                    max_layers_per_kind=prefill.max_layers_per_kind,
                    tokens={device: tuple(sorted(set(counts))) for device, counts in prefill.tokens.items()},
                    check_tokens=dict(prefill.check_tokens),
                    repeats=prefill.repeats,
                    time_s=prefill.time,
                    timeout_s=prefill.timeout,
                    memory_bytes=prefill.memory,
                ),
                total_s=self.total,
            )

    return Measure
