import re

from hypothesis import given
from hypothesis import strategies as st

from kvbench.engines.builtin.generation import PromptUse
from kvbench.engines.builtin.metrics import Buckets, Counters, Family, Histogram, exposition, tier_tokens
from kvbench.engines.metrics_text import read_metrics

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp")), max_size=12)
VALUE = st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 2**50)


@given(st.dictionaries(TEXT, VALUE, min_size=1, max_size=5))
def test_what_is_printed_reads_back(values: dict[str, float]) -> None:
    samples = tuple(((("place", label), ("of", 'a"b')), value) for label, value in values.items())
    page = exposition([Family("kvbench:x_total", "counter", 'help with \\ and\nlines "', samples)])
    help_, kind, *rows = page.rstrip("\n").split("\n")
    assert help_ == '# HELP kvbench:x_total help with \\\\ and\\nlines "'
    assert kind == "# TYPE kvbench:x_total counter"
    found = {}
    for row in rows:
        match = re.fullmatch(r'kvbench:x_total\{of="a\\"b",place="((?:[^"\\\n]|\\\\|\\"|\\n)*)"\} (\S+)', row)
        assert match is not None, row
        found[re.sub(r"\\(.)", lambda escaped: escaped[1].replace("n", "\n"), match[1])] = float(match[2])
    assert found == values


@given(st.lists(st.floats(0, 10), max_size=30))
def test_a_bucket_counts_the_values_up_to_its_bound(values: list[float]) -> None:
    histogram = Histogram((0.5, 1.0, 5.0))
    for value in values:
        histogram.observe(value)
    expected = [(str(bound), sum(value <= bound for value in values)) for bound in (0.5, 1.0, 5.0)]
    assert histogram.cumulative() == [*expected, ("+Inf", len(values))]
    page = exposition([Family("h", "histogram", "h", (((), histogram),))])
    assert read_metrics(page).total("h_count") == len(values)
    assert read_metrics(page).by_label("h_bucket", "le")["+Inf"] == len(values)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 50)), max_size=10))
def test_every_prompt_token_has_one_source_and_asks_each_tier_that_is_farther(
    prompts: list[tuple[int, int, int]],
) -> None:
    bounds = (1.0,)
    counters = Counters(Buckets(ttft=bounds, itl=bounds, e2e=bounds, queue=bounds))
    for hbm, dram, computed in prompts:
        by_tier = {tier: tokens for tier, tokens in (("hbm", hbm), ("dram", dram)) if tokens}
        use = PromptUse(prompt_tokens=hbm + dram + computed, cached_tokens=hbm + dram, cached_tokens_by_tier=by_tier)
        counters.prompt_done(use, 0.1)
    queries, hits = tier_tokens(counters, ["hbm", "dram"])
    assert sum(counters.prompt_tokens_by_source.values()) == counters.prompt_tokens
    assert hits == {"hbm": sum(hbm for hbm, _, _ in prompts), "dram": sum(dram for _, dram, _ in prompts)}
    assert queries == {"hbm": counters.prompt_tokens, "dram": counters.prompt_tokens - hits["hbm"]}
    assert sum(histogram.count for histogram in counters.ttft_by_source.values()) == len(prompts)
