"""Made-up traffic of a known shape, one session at a time and without end."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from kvbench.workloads.distributions import Distribution, Popularity
from kvbench.workloads.drafts import Context, Draft, Scaling, Session, Sessions, Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Single requests: one of `groups` prefixes, then tokens of their own."""

    groups: int
    alpha: float
    prefix_tokens: Distribution
    unique_tokens: Distribution
    output_tokens: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Conversations: the prompt of a turn is the one before it, its answer, and what the user says next."""

    system_prompts: int
    alpha: float
    system_tokens: Distribution
    turns: Distribution
    user_tokens: Distribution
    output_tokens: Distribution
    think: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Rag:
    """Single requests: a system prompt, some documents drawn by popularity, a question.

    `ranked` puts the more popular document first, as a service does that wants prefixes to be shared; `shuffled` is the
    order of relevance, which differs from question to question.
    """

    system_tokens: Distribution
    documents: int
    alpha: float
    document_tokens: Distribution
    documents_per_request: Distribution
    order: Literal["ranked", "shuffled"]
    question_tokens: Distribution
    output_tokens: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Tool loops: each step's prompt is the one before it, the call that was answered, and the tool's result.

    With `branch_chance` a step starts a sub-agent, for which the next step waits. Its context is `fresh` (its own
    system prompt, shared by all sub-agents, and a task) or `inherited` (all that its parent had).
    """

    kinds: int
    alpha: float
    system_tokens: Distribution
    task_tokens: Distribution
    steps: Distribution
    tool_result_tokens: Distribution
    output_tokens: Distribution
    tool_time: Distribution
    branch_chance: float
    branch_steps: Distribution
    branch_context: Literal["fresh", "inherited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongDocuments:
    """Questions about long documents: `rounds` asks about each in turn, again and again; `popular` draws one."""

    documents: int
    alpha: float
    order: Literal["rounds", "popular"]
    document_tokens: Distribution
    question_tokens: Distribution
    output_tokens: Distribution


Made = SharedPrefix | Chats | Rag | Agents | LongDocuments


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Sessions of several kinds, each drawn by its weight."""

    weights: tuple[float, ...]
    names: tuple[str, ...]
    parts: tuple[Made, ...]


def sessions(traffic: Made | Mixed, *, name: str, seed: int, scaling: Scaling) -> Sessions:
    """Sessions without end; the same for the same name, seed and traffic, however many are taken."""
    if isinstance(traffic, Mixed):
        streams = [
            sessions(part, name=f"{name}/{label}", seed=seed, scaling=scaling)
            for label, part in zip(traffic.names, traffic.parts, strict=True)
        ]
        choice = Random(f"{seed}/{name}/which")
        while True:
            yield next(choice.choices(streams, traffic.weights)[0])
    makers: dict[type, Callable[[_Maker], Sessions]] = {
        SharedPrefix: _shared_prefix,
        Chats: _chats,
        Rag: _rag,
        Agents: _agents,
        LongDocuments: _long_documents,
    }
    yield from makers[type(traffic)](_Maker(traffic, name, seed, scaling))


class _Maker:
    """What the generators share: names of texts, draws, scaled lengths."""

    def __init__(self, traffic: Made, name: str, seed: int, scaling: Scaling) -> None:
        self.traffic, self.name, self.seed, self.scaling = traffic, name, seed, scaling
        self.texts = Texts(seed, name)
        self.random = Random(f"{seed}/{name}/sessions")
        self._sizes: dict[tuple[str, int], int] = {}
        self._sessions = 0

    def tokens(self, distribution: Distribution) -> int:
        return self.scaling.text(distribution.draw(self.random))

    def answer(self, distribution: Distribution) -> int:
        return self.scaling.answer(distribution.draw(self.random))

    def count(self, distribution: Distribution, least: int = 1) -> int:
        return max(least, round(distribution.draw(self.random)))

    def size(self, scope: str, number: int, distribution: Distribution) -> int:
        """Tokens of the shared text `number`, drawn once and from a stream of its own."""
        known = self._sizes.get((scope, number))
        if known is None:
            known = self.scaling.text(distribution.draw(Random(f"{self.seed}/{self.name}/{scope}/{number}")))
            self._sizes[scope, number] = known
        return known

    def session_name(self) -> str:
        self._sessions += 1
        return f"{self.name}-{self._sessions}"


def _shared_prefix(maker: _Maker) -> Sessions:
    traffic = maker.traffic
    assert isinstance(traffic, SharedPrefix)
    popularity = Popularity(traffic.groups, traffic.alpha)
    while True:
        group = popularity.draw(maker.random)
        context = Context()
        context.say(maker.texts.named("prefix", group), maker.size("prefix", group, traffic.prefix_tokens))
        context.say(maker.texts.fresh("unique"), maker.tokens(traffic.unique_tokens))
        yield [context.ask(max_tokens=maker.answer(traffic.output_tokens), group=f"prefix-{group}", source=maker.name)]


def _chats(maker: _Maker) -> Sessions:
    traffic = maker.traffic
    assert isinstance(traffic, Chats)
    popularity = Popularity(traffic.system_prompts, traffic.alpha)
    while True:
        system = popularity.draw(maker.random)
        context, drafts = Context(), list[Draft]()
        context.say(maker.texts.named("system", system), maker.size("system", system, traffic.system_tokens))
        name = maker.session_name()
        for turn in range(maker.count(traffic.turns)):
            if turn:
                context.answered(drafts[-1], turn - 1)
            context.say(maker.texts.fresh("user"), maker.tokens(traffic.user_tokens))
            drafts.append(
                context.ask(
                    answer_key=maker.texts.fresh("answer"),
                    max_tokens=maker.answer(traffic.output_tokens),
                    after=(turn - 1,) if turn else (),
                    think_s=traffic.think.draw(maker.random) if turn else 0.0,
                    session=name,
                    turn=turn,
                    group=f"system-{system}",
                    source=maker.name,
                )
            )
        yield drafts


def _rag(maker: _Maker) -> Sessions:
    traffic = maker.traffic
    assert isinstance(traffic, Rag)
    popularity = Popularity(traffic.documents, traffic.alpha)
    while True:
        wanted = min(maker.count(traffic.documents_per_request, least=0), traffic.documents)
        found = _distinct(popularity, wanted, maker.random)
        context = Context()
        context.say(maker.texts.named("system", 0), maker.size("system", 0, traffic.system_tokens))
        for document in sorted(found) if traffic.order == "ranked" else found:
            context.say(
                maker.texts.named("document", document), maker.size("document", document, traffic.document_tokens)
            )
        context.say(maker.texts.fresh("question"), maker.tokens(traffic.question_tokens))
        yield [context.ask(max_tokens=maker.answer(traffic.output_tokens), group="rag", source=maker.name)]


def _distinct(popularity: Popularity, wanted: int, random: Random) -> list[int]:
    """That many different things in the order in which they were drawn.

    With a steep law the last ones would hardly ever come up: after 100 draws for each, the most popular ones are taken.
    """
    found: dict[int, None] = {}
    for _ in range(100 * wanted):
        if len(found) == wanted:
            break
        found[popularity.draw(random)] = None
    rank = 0
    while len(found) < wanted:
        found[rank] = None
        rank += 1
    return list(found)


def _agents(maker: _Maker) -> Sessions:
    traffic = maker.traffic
    assert isinstance(traffic, Agents)
    popularity = Popularity(traffic.kinds, traffic.alpha)
    while True:
        kind = popularity.draw(maker.random)
        context, drafts = Context(), list[Draft]()
        context.say(maker.texts.named("system", kind), maker.size("system", kind, traffic.system_tokens))
        context.say(maker.texts.fresh("task"), maker.tokens(traffic.task_tokens))
        name = maker.session_name()
        _steps(maker, traffic, drafts, context, name, maker.count(traffic.steps), after=(), may_branch=True)
        yield drafts


def _steps(
    maker: _Maker,
    traffic: Agents,
    drafts: Session,
    context: Context,
    name: str,
    steps: int,
    *,
    after: tuple[int, ...],
    may_branch: bool,
) -> None:
    """Appends the steps of one agent to its session; `after` is what its first step waits for."""
    for step in range(steps):
        context_for_branch = context.copy()
        drafts.append(
            context.ask(
                answer_key=maker.texts.fresh("call"),
                max_tokens=maker.answer(traffic.output_tokens),
                after=after,
                think_s=traffic.tool_time.draw(maker.random) if after else 0.0,
                session=name,
                turn=step,
                group="agent" if may_branch else "subagent",
                source=maker.name,
            )
        )
        here = len(drafts) - 1
        after = (here,)
        if may_branch and step + 1 < steps and maker.random.random() < traffic.branch_chance:
            inner = context_for_branch
            if traffic.branch_context == "fresh":
                inner = Context()
                inner.say(maker.texts.named("sub-system", 0), maker.size("sub-system", 0, traffic.system_tokens))
            inner.say(maker.texts.fresh("task"), maker.tokens(traffic.task_tokens))
            branch = f"{name}/{here}"
            count = maker.count(traffic.branch_steps)
            _steps(maker, traffic, drafts, inner, branch, count, after=(here,), may_branch=False)
            after = (here, len(drafts) - 1)
        context.answered(drafts[here], here)
        context.say(maker.texts.fresh("result"), maker.tokens(traffic.tool_result_tokens))


def _long_documents(maker: _Maker) -> Sessions:
    traffic = maker.traffic
    assert isinstance(traffic, LongDocuments)
    popularity = Popularity(traffic.documents, traffic.alpha)
    asked = 0
    while True:
        document = asked % traffic.documents if traffic.order == "rounds" else popularity.draw(maker.random)
        asked += 1
        context = Context()
        context.say(maker.texts.named("document", document), maker.size("document", document, traffic.document_tokens))
        context.say(maker.texts.fresh("question"), maker.tokens(traffic.question_tokens))
        yield [
            context.ask(max_tokens=maker.answer(traffic.output_tokens), group=f"document-{document}", source=maker.name)
        ]
