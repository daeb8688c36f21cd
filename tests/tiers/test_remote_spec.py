"""Spellings of the remote tiers: read, printed again, and refused with the way out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import UsageError
from kvbench.core.units import GIB
from kvbench.tiers.registry import open_tier
from kvbench.tiers.remote_settings import remote_settings
from kvbench.tiers.spec import TierSpec, parse_tier_spec

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=12)
TIMES = st.sampled_from([(), (("timeout", "2s"),), (("timeout", "50ms"), ("deadline", "1s"))])
SPECS = st.one_of(
    st.builds(
        TierSpec,
        scheme=st.sampled_from(["s3", "redis", "mooncake"]),
        location=TEXT,
        size_bytes=st.none() | st.integers(1, 2**50),
        options=TIMES,
    ),
    st.builds(
        TierSpec,
        scheme=st.just("nixl"),
        plugin=st.just("posix"),
        location=TEXT.map(lambda name: "/" + name.lstrip("/")),
        direct=st.none() | st.booleans(),
        options=st.sampled_from([(), (("io", "uring"),), (("io", "posix_aio"), ("buffer", "64MiB"))]),
    ),
    st.builds(
        TierSpec,
        scheme=st.just("nixl"),
        plugin=st.just("obj"),
        location=TEXT.filter(lambda name: name.strip("/")).filter(str.strip),
        size_bytes=st.none() | st.integers(1, 2**50),
        options=st.sampled_from([(), (("endpoint", "http://127.0.0.1:8333"), ("region", "eu-1"))]),
    ),
)


@given(SPECS)
def test_what_a_remote_tier_prints_parses_back_to_the_same_tier(spec: TierSpec) -> None:
    assert parse_tier_spec(str(spec)) == spec


def test_each_spelling_of_a_remote_tier_is_read() -> None:
    assert parse_tier_spec("nixl+posix:/mnt/nvme?io=uring&direct=1&size=1GiB") == TierSpec(
        scheme="nixl", plugin="posix", location="/mnt/nvme", size_bytes=GIB, direct=True, options=(("io", "uring"),)
    )
    obj = parse_tier_spec("nixl+obj://bucket/prefix?endpoint=http://127.0.0.1:8333")
    assert (obj.plugin, obj.location) == ("obj", "bucket/prefix")
    mooncake = parse_tier_spec("mooncake://127.0.0.1:50051?protocol=tcp&segment=1GiB&buffer=64MiB&replicas=2")
    assert dict(mooncake.options) == {"protocol": "tcp", "segment": "1GiB", "buffer": "64MiB", "replicas": "2"}
    assert parse_tier_spec("throttled(nixl+posix:/mnt, latency=1ms)").inner == parse_tier_spec("nixl+posix:/mnt")


def test_a_batch_has_four_times_the_time_of_a_call_unless_told_otherwise() -> None:
    plain, told = (
        remote_settings(parse_tier_spec(text)) for text in ("s3://b", "s3://b?timeout=100ms&deadline=10s&concurrency=3")
    )
    assert (plain.timeout_s, plain.deadline_s, plain.concurrency) == (5.0, 20.0, 8)
    assert (told.timeout_s, told.deadline_s, told.concurrency) == (0.1, 10.0, 3)


@pytest.mark.parametrize(
    ("spelling", "part"),
    [
        ("nixl:/mnt", "write it like nixl+posix:/mnt/nvme"),
        ("nixl+posx:/mnt", "did you mean 'posix'?"),
        ("nixl+:/mnt", "unknown plugin"),
        ("nixl+posix:", "names no directory"),
        ("nixl+posix:/m?endpoint=http://x", "endpoint means nothing to nixl+posix"),
        ("nixl+posix:/m?io=urng", "did you mean 'uring'?"),
        ("nixl+posix:/m?direct=yes", "direct is 1"),
        ("nixl+posix:/m?bufer=1MiB", "did you mean 'buffer'?"),
        ("nixl+obj:bucket", "names no bucket"),
        ("nixl+obj://", "names no bucket"),
        ("nixl+obj://b?io=uring", "io means nothing to nixl+obj"),
        ("nixl", "names no plugin"),
        ("s3://b?endpoint=127.0.0.1:8333", "endpoint is a URL like"),
        ("s3://b?endpoint=http://127.0.0.1:99999", "endpoint is a URL like"),
        ("s3://b?endpoint=http://:8333", "endpoint is a URL like"),
        ("s3://b?concurrency=100000", "at most 4096"),
        ("s3://b?timeout=0s", "timeout=0s leaves no time"),
        ("s3://b?deadline=5", "duration '5'"),
        ("s3://b?concurrency=0", "concurrency is a whole number from 1 on"),
        ("s3://b?endpint=http://x", "did you mean 'endpoint'?"),
        ("redis://h?timeuot=1s", "did you mean 'timeout'?"),
        ("mooncake://h:1?protocol=tpc", "did you mean 'tcp'?"),
        ("mooncake://h:1?replicas=two", "replicas is a whole number from 1 on"),
        ("mooncake://h:1?segment=1G", "1GiB"),
        ("mooncake://h:1?buffer=0B", "buffer of zero"),
    ],
)
def test_a_wrong_spelling_is_refused_with_the_way_out(spelling: str, part: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_tier_spec(spelling)
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("spelling", "part"),
    [
        ("redis://h:notaport/0", "HOST:PORT"),
        ("redis://user:secret@h:99999/0", "HOST:PORT"),
        ("redis://h:6379/kv", "number of a database"),
        ("redis://h:6379/0%3Fsocket_timeout=9", "number of a database"),
        ("redis://:6379", "HOST:PORT"),
        ("s3:///prefix", "names no bucket"),
    ],
)
def test_an_address_that_the_client_would_misread_is_refused(spelling: str, part: str) -> None:
    with pytest.raises(UsageError) as refusal:
        open_tier(spelling, block_bytes=4096)
    assert part in str(refusal.value)
    assert "secret" not in str(refusal.value)
