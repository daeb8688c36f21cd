"""Workload files, such as `workloads/demo.yaml`, and traces that are named directly, as plain dataclasses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.units import parse_duration, parse_request_rate
from kvbench.results.data import data_folder
from kvbench.results.written_file import quantity, read_plan_file, validated_plan
from kvbench.workloads.arrivals import Arrival, checked_arrival
from kvbench.workloads.base import History
from kvbench.workloads.distributions import Constant, Distribution, parse_distribution
from kvbench.workloads.traffic import Agents, Chats, LongDocuments, Made, Mixed, Rag, SharedPrefix

if TYPE_CHECKING:
    from pydantic import BaseModel

VERSION = 1
MOST_REQUESTS = 10_000_000
_EXAMPLE = "workloads/demo.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """Requests that were recorded; without a format, the one that the file looks like."""

    path: Path
    format_name: str | None = None
    block_tokens: int | None = None
    output_tokens: int | None = None
    timing: Literal["recorded", "think"] | None = None


Traffic = Made | Mixed | TraceFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What traffic, when, and how much of it. `why` and `shape` say why it exists and where its shape comes from."""

    name: str
    why: str
    shape: str
    seed: int
    num_requests: int | None
    duration_s: float | None
    arrival: Arrival
    history: History
    scale: float
    max_prompt_tokens: int | None
    max_output_tokens: int | None
    traffic: Traffic
    source: str


def workload_names() -> tuple[str, ...]:
    """The workloads that come with kvbench."""
    return tuple(sorted(path.stem for path in data_folder("workloads").glob("*.yaml")))


def load_workload(
    name_or_path: str | Path, *, trace_format: str | None = None, block_tokens: int | None = None
) -> Workload:
    """A workload by name, by the path of its YAML file, or a trace by its path (a file or a folder).

    `trace_format` and `block_tokens` are for a trace that is named by its path.
    """
    given = str(name_or_path)
    path = Path(given)
    is_trace = path.exists() and not given.endswith((".yaml", ".yml"))
    if not is_trace and (trace_format or block_tokens):
        raise UsageError(f"{given}: the format and block size of a trace are for a trace file; a workload has its own")
    if given.endswith((".yaml", ".yml")):
        return _read(path)
    if is_trace:
        return _trace_workload(path, trace_format, block_tokens)
    if "/" in given or path.suffix:
        raise KvbenchError(f"{given}: there is no such file; name a trace, a workload's .yaml, or {_names()}")
    names = workload_names()
    if given not in names:
        close = get_close_matches(given, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {_names()}, or give a path"
        raise UsageError(f"workload {given!r} is not known; {hint}")
    return _read(data_folder("workloads") / f"{given}.yaml")


def _names() -> str:
    return ", ".join(workload_names())


def _trace_workload(path: Path, trace_format: str | None, block_tokens: int | None) -> Workload:
    from kvbench.workloads.traces.formats import detected_format
    from kvbench.workloads.traces.formats import trace_format as named_format

    known = named_format(trace_format) if trace_format else detected_format(path)
    starts = Arrival(process="trace") if known.timing == "recorded" else Arrival(process="poisson", rate_per_s=1.0)
    return Workload(
        name=path.name.removesuffix(".gz").rsplit(".", 1)[0],
        why="a trace that was named directly",
        shape=f"{path}, a {known.name} trace",
        seed=0,
        num_requests=None,
        duration_s=None,
        arrival=starts,
        history="synthetic",
        scale=1.0,
        max_prompt_tokens=None,
        max_output_tokens=None,
        traffic=TraceFile(path=path, format_name=known.name, block_tokens=block_tokens),
        source=str(path),
    )


def _read(path: Path) -> Workload:
    written = read_plan_file(path, example=_EXAMPLE)
    if isinstance(written, Mapping) and written.get("version", VERSION) != VERSION:
        raise UsageError(
            f"{path}: version {written['version']!r} is not known; this kvbench reads version {VERSION}, "
            "a newer file needs a newer kvbench"
        )
    workload: Workload = validated_plan(written, _schema(), source=str(path), example=_EXAMPLE).as_workload(path)
    return workload


def _tokens(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 24:
        raise ValueError(f"{value!r} is not a number of tokens (a whole number up to {1 << 24})")
    return float(value)


def _spread_of(value: Callable[[object], float], most: float) -> Callable[[object], Distribution]:
    def convert(written: object) -> Distribution:
        return parse_distribution(written, value, most)

    return convert


def _alpha(value: object) -> float:
    """`uniform`, or `{zipf: 1.0}`, as the exponent of the popularity."""
    if value == "uniform":
        return 0.0
    if isinstance(value, Mapping) and set(value) == {"zipf"}:
        alpha = value["zipf"]
        if isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 <= alpha <= 10:
            return float(alpha)
    raise ValueError(f"{value!r} is neither uniform nor {{zipf: 1.0}} with an exponent from 0 to 10")


@cache
def _schema() -> "type[BaseModel]":
    """The file's form. Built on first use, because pydantic takes longer to import than `kvbench --help` may run."""
    from typing import Annotated

    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

    Lengths = Annotated[Any, BeforeValidator(_spread_of(_tokens, 1 << 24))]
    Counts = Annotated[Any, BeforeValidator(_spread_of(_tokens, 1000))]
    Pauses = Annotated[Any, BeforeValidator(_spread_of(quantity(parse_duration, "2s"), 1e9))]
    Seconds = Annotated[float, BeforeValidator(quantity(parse_duration, "60s")), Field(gt=0, le=1e7)]
    Rate = Annotated[float, BeforeValidator(quantity(parse_request_rate, "2/s"))]
    Alpha = Annotated[float, BeforeValidator(_alpha)]
    Count = Annotated[int, Field(ge=1, le=1_000_000)]
    Block = Annotated[int, Field(ge=1, le=1 << 20)]

    class Strict(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    class ArrivalModel(Strict):
        process: Literal["constant", "poisson", "gamma", "at-once", "trace", "closed"]
        rate: Rate | None = None
        burstiness: float | None = None
        cv: float | None = None
        ramp: Seconds | None = None
        speedup: float | None = None
        spread_ties: bool | None = None
        concurrency: int | None = None

        @model_validator(mode="after")
        def _fits(self) -> "ArrivalModel":
            known = {
                "constant": {"rate", "ramp"},
                "poisson": {"rate", "ramp"},
                "gamma": {"rate", "ramp", "burstiness", "cv"},
                "at-once": set(),
                "trace": {"speedup", "spread_ties"},
                "closed": {"concurrency"},
            }[self.process]
            for name in type(self).model_fields:
                if name != "process" and name not in known and getattr(self, name) is not None:
                    allowed = ", ".join(sorted(known)) or "no other key"
                    raise ValueError(f"process {self.process!r} takes {allowed}, not {name!r}")
            if self.burstiness is not None and self.cv is not None:
                raise ValueError("give burstiness or cv, not both: burstiness is 1 / cv²")
            try:
                self.as_arrival()
            except UsageError as error:
                raise ValueError(str(error)) from error
            return self

        def as_arrival(self) -> Arrival:
            if self.cv is not None and not 0 < self.cv < 1e6:
                raise UsageError(f"cv is {self.cv:g}; give a number above zero")
            shape = self.burstiness if self.burstiness is not None else 1 / self.cv**2 if self.cv else 1.0
            return checked_arrival(
                Arrival(
                    process=self.process,
                    rate_per_s=self.rate,
                    burstiness=shape,
                    ramp_s=self.ramp or 0.0,
                    speedup=1.0 if self.speedup is None else self.speedup,
                    spread_ties=bool(self.spread_ties),
                    concurrency=self.concurrency,
                )
            )

    class SharedPrefixModel(Strict):
        groups: Count
        popularity: Alpha = 0.0
        prefix_tokens: Lengths
        unique_tokens: Lengths
        output_tokens: Lengths

        def as_traffic(self) -> Made:
            return SharedPrefix(alpha=self.popularity, **_fields(self))

    class SessionsModel(Strict):
        system_prompts: Count = 1
        popularity: Alpha = 0.0
        system_tokens: Lengths
        turns: Counts
        user_tokens: Lengths
        output_tokens: Lengths
        think: Pauses

        def as_traffic(self) -> Made:
            return Chats(alpha=self.popularity, **_fields(self))

    class RagModel(Strict):
        system_tokens: Lengths
        documents: Count
        popularity: Alpha = 0.0
        document_tokens: Lengths
        documents_per_request: Counts
        order: Literal["ranked", "shuffled"]
        question_tokens: Lengths
        output_tokens: Lengths

        def as_traffic(self) -> Made:
            return Rag(alpha=self.popularity, **_fields(self))

    class AgentsModel(Strict):
        kinds: Count = 1
        popularity: Alpha = 0.0
        system_tokens: Lengths
        task_tokens: Lengths
        steps: Counts
        tool_result_tokens: Lengths
        output_tokens: Lengths
        tool_time: Pauses
        branch_chance: Annotated[float, Field(ge=0, le=1)] = 0.0
        branch_steps: Counts = Constant(1.0)
        branch_context: Literal["fresh", "inherited"] = "fresh"

        def as_traffic(self) -> Made:
            return Agents(alpha=self.popularity, **_fields(self))

    class LongDocumentsModel(Strict):
        documents: Count
        order: Literal["rounds", "popular"] = "rounds"
        popularity: Alpha = 0.0
        document_tokens: Lengths
        question_tokens: Lengths
        output_tokens: Lengths

        def as_traffic(self) -> Made:
            return LongDocuments(alpha=self.popularity, **_fields(self))

    class TraceModel(Strict):
        path: str
        format: str | None = None
        block_tokens: Block | None = None
        output_tokens: Block | None = None
        timing: Literal["recorded", "think"] | None = None

    class PartModel(Strict):
        weight: Annotated[float, Field(gt=0, le=1e9)]
        shared_prefix: SharedPrefixModel | None = None
        sessions: SessionsModel | None = None
        rag: RagModel | None = None
        agents: AgentsModel | None = None
        long_documents: LongDocumentsModel | None = None

        @model_validator(mode="after")
        def _is_one(self) -> "PartModel":
            _only(self, _MADE)
            return self

    class WorkloadModel(Strict):
        version: Literal[1]
        why: str
        shape: str
        seed: Annotated[int, Field(ge=0, le=1 << 62)] = 0
        requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] | None = None
        duration: Seconds | None = None
        arrival: ArrivalModel
        history: Literal["synthetic", "engine"] = "synthetic"
        scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
        max_prompt_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
        max_output_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
        shared_prefix: SharedPrefixModel | None = None
        sessions: SessionsModel | None = None
        rag: RagModel | None = None
        agents: AgentsModel | None = None
        long_documents: LongDocumentsModel | None = None
        mixed: Annotated[list[PartModel], Field(min_length=1, max_length=64)] | None = None
        trace: TraceModel | None = None

        @model_validator(mode="after")
        def _is_one(self) -> "WorkloadModel":
            _only(self, (*_MADE, "mixed", "trace"))
            if self.arrival.process == "trace" and self.trace is None:
                raise ValueError("only a trace has recorded times: give another arrival process")
            if self.trace is None and self.requests is None and self.duration is None:
                raise ValueError("give requests (how many) or duration (for how long sessions start)")
            if self.requests is None and self.trace is None and self.arrival.process in ("closed", "at-once"):
                raise ValueError(
                    f"arrival {self.arrival.process!r} has no times to count the duration by: give requests"
                )
            return self

        def as_workload(self, path: Path) -> Workload:
            return Workload(
                name=path.stem,
                why=" ".join(self.why.split()),
                shape=" ".join(self.shape.split()),
                seed=self.seed,
                num_requests=self.requests,
                duration_s=self.duration,
                arrival=self.arrival.as_arrival(),
                history=self.history,
                scale=self.scale,
                max_prompt_tokens=self.max_prompt_tokens,
                max_output_tokens=self.max_output_tokens,
                traffic=self._traffic(path),
                source=str(path),
            )

        def _traffic(self, path: Path) -> Traffic:
            if self.trace is not None:
                one = self.trace
                return TraceFile(
                    path=path.parent / one.path,
                    format_name=one.format,
                    block_tokens=one.block_tokens,
                    output_tokens=one.output_tokens,
                    timing=one.timing,
                )
            if self.mixed is not None:
                kinds = [_only(part, _MADE) for part in self.mixed]
                return Mixed(
                    weights=tuple(part.weight for part in self.mixed),
                    names=tuple(f"{number}-{kind}" for number, kind in enumerate(kinds)),
                    parts=tuple(getattr(part, kind).as_traffic() for part, kind in zip(self.mixed, kinds, strict=True)),
                )
            made: Made = getattr(self, _only(self, _MADE)).as_traffic()
            return made

    return WorkloadModel


_MADE = ("shared_prefix", "sessions", "rag", "agents", "long_documents")


def _only(model: object, kinds: tuple[str, ...]) -> str:
    """The one kind of traffic that is given."""
    given = [kind for kind in kinds if getattr(model, kind) is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(kinds)} (found {', '.join(given) or 'none'})")
    return given[0]


def _fields(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name) for name in type(model).model_fields if name != "popularity"}


def with_arrival(
    workload: Workload,
    *,
    rate_per_s: float | None = None,
    concurrency: int | None = None,
    speedup: float | None = None,
    spread_ties: bool | None = None,
) -> Workload:
    """The same traffic at other times.

    A rate makes a closed loop, recorded times or all-at-once into a Poisson process of that rate, and only changes the
    rate of a process that has one. A concurrency makes it a closed loop.
    """
    arrival = workload.arrival
    if rate_per_s is not None and concurrency is not None:
        raise UsageError("give a rate (open loop) or a concurrency (closed loop), not both")
    if concurrency is not None:
        arrival = Arrival(process="closed", concurrency=concurrency)
    elif rate_per_s is not None:
        timed = arrival.process in ("constant", "poisson", "gamma")
        arrival = (
            replace(arrival, rate_per_s=rate_per_s) if timed else Arrival(process="poisson", rate_per_s=rate_per_s)
        )
    recorded = arrival.process == "trace"
    if (spread_ties is not None and not recorded) or (
        speedup is not None and not recorded and not isinstance(workload.traffic, TraceFile)
    ):
        raise UsageError(f"speedup and spread_ties are for recorded times, and the arrival here is {arrival}")
    if speedup is not None and arrival.rate_per_s is not None and rate_per_s is None:
        # A trace of conversations without their starts: they begin so much faster too, unless a rate was named.
        arrival = replace(arrival, rate_per_s=arrival.rate_per_s * speedup)
    if speedup is not None:
        arrival = replace(arrival, speedup=speedup)
    if spread_ties is not None:
        arrival = replace(arrival, spread_ties=spread_ties)
    return replace(workload, arrival=checked_arrival(arrival))
