import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import UsageError
from kvbench.engines.arms import parse_arm, parse_arms
from kvbench.engines.base import ArmTier


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("off", []),
        ("recompute", []),
        ("l1", [("hbm", None)]),
        ("hbm", [("hbm", None)]),
        ("l1=64MiB", [("hbm", "64MiB")]),
        ("l1+l2=16GiB", [("hbm", None), ("dram", "16GiB")]),
        ("hbm+dram+file", [("hbm", None), ("dram", None), ("file", None)]),
        ("l1+l2=1GiB+l3=/mnt/a+b", [("hbm", None), ("dram", "1GiB"), ("file", "/mnt/a+b")]),
        ("l1+l4=s3://b/p?x=1+2", [("hbm", None), ("remote", "s3://b/p?x=1+2")]),
        ("l1+lmcache=1GiB", [("hbm", None), ("lmcache", "1GiB")]),
    ],
)
def test_an_arm_is_a_chain_of_tiers(text: str, tiers: list[tuple[str, str | None]]) -> None:
    assert parse_arm(text).tiers == tuple(ArmTier(name=name, value=value) for name, value in tiers)


def test_an_arm_can_be_a_server_that_is_up_with_a_name_of_its_own() -> None:
    assert (parse_arm("on=http://127.0.0.1:8000/").name, parse_arm("on=http://127.0.0.1:8000/").url) == (
        "on",
        "http://127.0.0.1:8000",
    )
    assert parse_arm("http://h:1/v1").url == "http://h:1/v1"


def test_an_arm_can_have_a_short_name() -> None:
    arm = parse_arm("hbm+dram@hbm=20MiB+dram=32MiB")
    assert arm.name == "hbm+dram"
    assert [tier.value for tier in arm.tiers] == ["20MiB", "32MiB"]
    assert parse_arm("on=http://u@h:1").name == "on"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lmcach", "did you mean"),
        ("l1+l1", "twice"),
        ("l2+l1", "out of order"),
        ("l1=", "no value"),
        ("", "unknown tier"),
    ],
)
def test_a_wrong_arm_is_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_arm(text)


def test_two_arms_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="named twice"):
        parse_arms(["l1", "l1"])


@given(st.text())
def test_any_text_is_an_arm_or_a_usage_error(text: str) -> None:
    try:
        arm = parse_arm(text)
    except UsageError:
        return
    assert arm.name
