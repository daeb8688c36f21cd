import io
from typing import Any

import pytest
from rich.console import Console

from kvbench.probes.tier_probe import tier_provenance
from kvbench.report import tier_probe as drawn
from kvbench.results.document import Document, new_document
from kvbench.results.host import Host
from kvbench.results.tier_probe import (
    EdgeCheck,
    MixedLoads,
    PolicyCase,
    TierCase,
    TierPhase,
    TierProbeResult,
    TierSample,
)

BLOCK_BYTES = 1_000_000


def samples(phase: TierPhase, count: int, seconds: float, *, blocks: int = 4, **changes: Any) -> tuple[TierSample, ...]:
    """`count` calls from `seconds` on, each 1 % of it longer than the one before."""
    return tuple(
        TierSample(
            phase=phase,
            bytes=blocks * BLOCK_BYTES,
            blocks=blocks,
            seconds=seconds * (1 + 0.01 * at),
            **changes,
        )
        for at in range(count)
    )


def tier(name: str, **changes: Any) -> TierCase:
    settings: dict[str, Any] = {
        "name": f"{name} alone", "stack": "hbm:1GiB + file:/x", "spec": name, "tier": name, "concurrency": 1,
        "synchronous": False, "status": "ok", "reason": None, "elapsed_s": 1.0, "checked_on_load": True,
        "checksum_bytes_per_s": 1e10, "cold": True, "cold_evidence": "made up",
        "samples": (*samples("store", 400, 0.004, call_s=0.001), *samples("load", 400, 0.002)),
    }  # fmt: skip
    return TierCase(**(settings | changes))


def policy(**changes: Any) -> PolicyCase:
    edge = EdgeCheck(
        source="request", target="hbm", blocks=8, bytes=8_000_000, expected_blocks=8, expected_bytes=8_000_000,
        seconds=0.01,
    )  # fmt: skip
    mixed = MixedLoads(
        tier="file",
        stored_bytes=5,
        stored_s=1.0,
        samples=(*samples("idle", 400, 0.002), *samples("saturated", 400, 0.003, queue_ratio=0.9)),
    )
    settings: dict[str, Any] = {
        "name": "write-back", "stack": "hbm:1GiB + file:/x", "policy": "write-back", "concurrency": 1, "status": "ok",
        "reason": None, "elapsed_s": 1.0, "blocks": 8, "repeated_blocks": 4, "edges": (edge,), "mixed": (mixed,),
        "samples": samples("store", 8, 0.004, call_s=0.001),
    }  # fmt: skip
    return PolicyCase(**(settings | changes))


@pytest.fixture
def document(host: Host) -> Any:
    def new(tiers: tuple[TierCase, ...], policies: tuple[PolicyCase, ...] = ()) -> Document[TierProbeResult]:
        result = TierProbeResult(
            plan="tiers", question="What does it carry?", model="made-up", tp=8, page_tokens=16,
            block_bytes=BLOCK_BYTES, block_shape="16 tokens × 1 layer", load_share_ratio=0.5, queue_bytes=1 << 25,
            tiers=tiers, policies=policies,
        )  # fmt: skip
        return new_document(result, command_line=("kvbench",), provenance=tier_provenance(result), host=host)

    return new


def printed(document: Document[TierProbeResult]) -> str:
    out = io.StringIO()
    drawn.terminal(document, Console(file=out, width=110))
    return out.getvalue()


def test_the_first_screen_has_each_tier_then_loads_per_policy_then_bytes_per_edge(document: Any) -> None:
    text = printed(document((tier("hbm"), tier("file")), (policy(),)))
    order = ["Loads in calls of up to 4 blocks carry", "Each tier by itself", "Loads beside stores, per policy"]
    order += ["Bytes per edge while storing", "Loads that take longer, write-back", "Checksums"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    # 400 loads from 2 ms on, evenly spaced by 20 µs: p50 at 2 + 199.5 · 0.02, p99 at 2 + 395.01 · 0.02
    assert "5.99 ms" in text
    assert "9.90 ms" in text
    assert "1.50 / 1.50 / 1.50" in text
    assert "at most 1.50 times as long (p99, from file, write-back)" in " ".join(text.split())
    assert "all are blocks × bytes" in text


@pytest.mark.parametrize(("count", "shown"), [(367, "max 9.32 ms"), (368, "9.27 ms")])
def test_below_368_loads_there_is_no_p99_but_a_maximum(document: Any, count: int, shown: str) -> None:
    text = printed(document((tier("file", samples=samples("load", count, 0.002)),)))
    assert shown in text


def test_bytes_that_differ_are_the_first_thing_a_reader_sees(document: Any) -> None:
    edge = EdgeCheck(
        source="hbm", target="file", blocks=7, bytes=7_000_000, expected_blocks=8, expected_bytes=8_000_000, seconds=0
    )
    wrong = document((tier("file"),), (policy(edges=(edge,)),))
    assert "1 DIFFER" in printed(wrong)
    assert "1 DIFFER" in drawn.html(wrong)


def test_a_failed_case_and_nothing_at_all_are_said_in_words(document: Any) -> None:
    broken = tier("file", status="failed", reason="the disk is gone", samples=())
    text = printed(document((tier("hbm"), broken), (policy(status="failed", reason="it too", mixed=(), edges=()),)))
    assert "file alone failed: the disk is gone" in text
    assert "write-back failed: it too" in text
    assert printed(document((broken,))).startswith("Nothing was measured: the disk is gone.")


def test_a_page_holds_a_plot_per_policy_and_escapes_what_it_is_given(document: Any) -> None:
    page = drawn.html(document((tier("<script>"),), (policy(), policy(name="write-through"))))
    assert page.count("<svg") == 2
    assert "<script>alone" not in page
    assert "Loads that take longer, write-through" in page
