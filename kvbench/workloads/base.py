"""What traffic becomes before it is sent: planned requests, their prompts, and what an unlimited cache would reuse."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.core.provenance import Warning_

if TYPE_CHECKING:
    from kvbench.workloads.workload import Workload

Loop = Literal["open", "closed"]
History = Literal["synthetic", "engine"]

NO_ANSWERS: Mapping[int, Sequence[int]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as a recipe: piece `i` is the first `lengths[i]` tokens of the endless text that `keys[i]` names.

    Two prompts share exactly the pieces that are equal from the start on. The recipe is small (12 bytes for each
    piece), so a plan of millions of tokens can be pickled to the processes that send it; see `prompts.py` for the
    tokens. `answers` says which pieces stand for what the engine answered: (piece, index of the request that was
    answered). It is empty unless the workload says `history: engine`.
    """

    keys: "array[int]"
    lengths: "array[int]"
    vocab_size: int
    first_token_id: int = 0
    answers: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return sum(self.lengths)

    def token_ids(self, answers: Mapping[int, Sequence[int]] = NO_ANSWERS) -> "array[int]":
        """The token ids as 32-bit unsigned integers; `answers` has the engine's own token ids by request index.

        An answer that is missing (a failed request, `history: synthetic`) is the planned synthetic one. With an answer
        that is shorter or longer than planned, so is the prompt.
        """
        from kvbench.workloads.prompts import token_ids

        return token_ids(self, answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request: when, what, how many tokens back, and what an unlimited cache would have of it.

    When: `at_s` seconds after the start; or, where that is None, `think_s` after the last of the requests in `after`
    ended; or, where `after` is empty too, as soon as one of the plan's `concurrency` slots is free (closed loop). A
    slot is taken by the request with `root == index` and is free again when all requests with that `root` ended.
    """

    index: int
    at_s: float | None
    think_s: float = 0.0
    after: tuple[int, ...] = ()
    root: int
    session: str | None = None
    turn: int = 0
    recipe: Prompt
    max_tokens: int
    group: str | None = None
    shared_prefix_tokens: int
    source: str

    @property
    def prompt(self) -> "array[int]":
        """The token ids, made anew on each call; with `history: engine` use `recipe.token_ids(answers)`."""
        return self.recipe.token_ids()

    @property
    def prompt_tokens(self) -> int:
        return len(self.recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What a cache that never evicts would have: the ceiling of every tier of every size.

    A request's hit is the longest prefix that it shares with an earlier request of the plan, counted in tokens (not in
    pages), every first access included in the denominator, nothing left out as warm-up. Earlier means in plan order:
    requests that are in flight together cannot always share.
    """

    hit_tokens: int
    prompt_tokens: int
    output_tokens: int
    num_requests: int
    num_requests_with_hit: int
    definition: str

    @property
    def hit_ratio(self) -> float | None:
        """hit_tokens / prompt_tokens; None for a plan without a prompt."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def working_set_tokens(self) -> int:
        """Distinct prefix tokens of all prompts: what has to be kept so that every hit is one."""
        return self.prompt_tokens - self.hit_tokens

    def working_set_bytes(self, kv_bytes_per_token: int) -> int:
        """KV of the distinct prefix tokens, without the answers' own KV and without a partly filled last page."""
        return self.working_set_tokens * kv_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """All requests of one run in the order in which they were planned, picklable, the same for every arm.

    `loop` is `closed` only where it was asked for; then `concurrency` is the number of slots. `arrival` says in words
    how the times came about. After `duration_s` no session starts; None where the number of requests ends the run.
    `made_from` is the workload with all that was asked for besides (another rate, scale, seed, …); None for a plan that
    was put together by hand.
    """

    name: str
    seed: int
    requests: tuple[PlannedRequest, ...]
    vocab_size: int
    loop: Loop
    concurrency: int | None
    arrival: str
    history: History
    reuse: Reuse
    duration_s: float | None = None
    made_from: "Workload | None" = None
    warnings: tuple[Warning_, ...] = ()
