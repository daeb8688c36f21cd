"""What an unlimited cache would reuse: the longest prefix that each prompt shares with an earlier one."""

from array import array

from kvbench.workloads.base import Reuse

DEFINITION = (
    "longest prefix shared with an earlier request of the plan, in tokens; unlimited cache, first accesses counted, "
    "no warm-up left out"
)
DEFINITION_WITH_ANSWERS = (
    "longest prefix shared with an earlier request of the plan and the answer to it, in tokens; unlimited cache, "
    "first accesses counted, no warm-up left out"
)


class PrefixTree:
    """All prompts so far as a tree of pieces. Exact: no hash stands for a prefix, a node is its path from the root."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int, int], int] = {}  # (parent, key, tokens) -> node
        self._longest: dict[tuple[int, int], int] = {}  # (parent, key) -> most tokens of that text seen there
        self.tokens = 0

    def add(self, keys: "array[int]", lengths: "array[int]") -> int:
        """Tokens of this prompt's longest prefix that was there before; the prompt is there from now on."""
        nodes, longest = self._nodes, self._longest
        node, shared, sharing = 0, 0, True
        for key, tokens in zip(keys, lengths, strict=True):
            there = nodes.get((node, key, tokens))
            if there is None:
                known = longest.get((node, key), 0)
                overlap = min(known, tokens)
                if sharing:
                    shared += overlap
                    sharing = False
                if tokens > known:
                    longest[node, key] = tokens
                    self.tokens += tokens - known
                there = len(nodes) + 1
                nodes[node, key, tokens] = there
            elif sharing:
                shared += tokens
            node = there
        return shared


class ReuseCount:
    """The figures of a plan while it is made."""

    def __init__(self, *, with_answers: bool) -> None:
        self._tree = PrefixTree()
        self._with_answers = with_answers
        self._hits = self._prompts = self._outputs = self._requests = self._requests_with_hit = 0

    def add(self, keys: "array[int]", lengths: "array[int]", *, answer_key: int, max_tokens: int) -> int:
        """Tokens that this prompt shares with earlier ones; the answer counts as cached where the next turn has it."""
        shared = self._tree.add(keys, lengths)
        if self._with_answers:
            self._tree.add(keys + array("Q", [answer_key]), lengths + array("I", [max_tokens]))
        self._hits += shared
        self._prompts += sum(lengths)
        self._outputs += max_tokens
        self._requests += 1
        self._requests_with_hit += shared > 0
        return shared

    def figures(self) -> Reuse:
        return Reuse(
            hit_tokens=self._hits,
            prompt_tokens=self._prompts,
            output_tokens=self._outputs,
            num_requests=self._requests,
            num_requests_with_hit=self._requests_with_hit,
            definition=DEFINITION_WITH_ANSWERS if self._with_answers else DEFINITION,
        )
