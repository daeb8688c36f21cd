import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbench.core.errors import UsageError
from kvbench.probes.measured_tiers import measurable_tier
from kvbench.tiers.spec import TierSpec, parse_tier_spec

text = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=20).filter(str.strip)
sizes = st.none() | st.integers(1, 2**50)
paths = text.map(lambda name: "/" + name.lstrip("/")).filter(lambda path: path != "/")
plain_specs = st.one_of(
    st.builds(TierSpec, scheme=st.sampled_from(["hbm", "dram"]), size_bytes=sizes),
    st.builds(
        TierSpec,
        scheme=st.just("dram"),
        size_bytes=sizes,
        options=st.sampled_from([(("shared", "ranks"),), (("headroom", "1.5"), ("idle", "30s"))]),
    ),
    st.builds(
        TierSpec,
        scheme=st.just("file"),
        location=paths,
        size_bytes=sizes,
        io=st.sampled_from([None, "psync", "aio", "io_uring"]),
        direct=st.none() | st.booleans(),
        fsync=st.sampled_from([None, "none", "fdatasync", "fsync", "group"]),
        options=st.sampled_from([(), (("depth", "16"),), (("depth", "4"), ("timeout", "30s"))]),
    ),
    st.builds(
        TierSpec,
        scheme=st.just("s3"),
        location=text,
        options=text.map(lambda value: (("region", value),)) | st.just(()),
    ),
    st.just(TierSpec(scheme="null")),
)
throttles = st.sampled_from([(("bandwidth", "7GB/s"),), (("bandwidth", "7GB/s"), ("latency", "100us"))])
specs = st.recursive(
    plain_specs,
    lambda inner: st.builds(TierSpec, scheme=st.just("throttled"), inner=inner, options=throttles),
    max_leaves=3,
)


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert parse_tier_spec("file:~/kv").location == "/home/somebody/kv"
    assert parse_tier_spec("file:~").location == "/home/somebody"
    assert parse_tier_spec("file:./~/kv").location == "./~/kv"


@given(specs)
def test_what_a_tier_prints_parses_back_to_the_same_tier(spec: TierSpec) -> None:
    assert parse_tier_spec(str(spec)) == spec


@given(st.text() | st.text("dramfile:/?&=()%,tholed0169GiB").map(lambda tail: f"file:{tail}"))
@example("throttled(" * 2000 + ")" * 2000)
@example("faulty(dram:,)")
@example("file:/a?size=")
@example("file:%00")
def test_any_text_is_a_tier_or_one_line_of_refusal(garbage: str) -> None:
    try:
        spec = parse_tier_spec(garbage)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert parse_tier_spec(str(spec)) == spec


def test_every_spelling_of_the_design_is_read() -> None:
    assert parse_tier_spec("dram:64GiB") == TierSpec(scheme="dram", size_bytes=64 * 2**30)
    assert parse_tier_spec("file:/mnt/nvme?size=1TiB&io=io_uring&direct=1&fsync=fdatasync") == TierSpec(
        scheme="file", location="/mnt/nvme", size_bytes=2**40, io="io_uring", direct=True, fsync="fdatasync"
    )
    s3 = parse_tier_spec("s3://bucket/prefix?endpoint=http://127.0.0.1:8333")
    assert (s3.location, s3.options) == ("bucket/prefix", (("endpoint", "http://127.0.0.1:8333"),))
    assert parse_tier_spec("redis://127.0.0.1:6379/0").location == "127.0.0.1:6379/0"
    assert parse_tier_spec("mooncake://127.0.0.1:50051?protocol=tcp").options == (("protocol", "tcp"),)
    assert parse_tier_spec("null:").scheme == "null"
    throttled = parse_tier_spec("throttled(faulty(dram:1GiB, load_fail=0.1), bandwidth=7GB/s, latency=100us)")
    assert throttled.options == (("bandwidth", "7GB/s"), ("latency", "100us"))
    assert throttled.inner is not None
    assert throttled.inner.inner == TierSpec(scheme="dram", size_bytes=2**30)


@pytest.mark.parametrize(
    ("spelling", "part"),
    [
        ("file:/mnt?sise=1GiB", "did you mean 'size'?"),
        ("file:/mnt?io=psyc", "did you mean 'psync'?"),
        ("flie:/mnt", "did you mean 'file'?"),
        ("file:/mnt?direct=yes", "direct is 1"),
        ("file:/mnt?io=mmap&direct=1", "drop one of them"),
        ("file:/mnt?size=64M", "64MiB"),
        ("file:/mnt?size=1GiB&size=2GiB", "twice"),
        ("file:", "names no directory"),
        ("dram:0B", "size of zero"),
        ("dram:1GiB?share=a", "did you mean 'shared'?"),
        ("hbm:1GiB?pin=1", "takes no keys"),
        ("dram=50GB/s", "modelled tier"),
        ("throttled(dram:1GiB, bandwith=7GB/s)", "did you mean 'bandwidth'?"),
        ("throttled(dram:1GiB, bandwidth=7)", "GB/s"),
        ("throttled:dram", "wraps nothing"),
        ("s3:bucket", "no '//'"),
        ("null:here", "takes nothing"),
        ("hbn:1GiB", "did you mean 'hbm'?"),
        ("dram:1GiB?shared=a/b", "shared is a name"),
        ("dram:1GiB?headroom=0.5", "from 1 to 16"),
        ("dram:1GiB?idle=0s", "idle=0s leaves no time"),
        ("file:/mnt?depht=4", "did you mean 'depth'?"),
        ("file:/mnt?depth=0", "depth is a whole number from 1 on"),
        ("file:/mnt?timeout=5", "duration '5'"),
        ("file:/mnt?fsync=grup", "did you mean 'group'?"),
        ("faulty(null:, lod_fail=0.1)", "did you mean 'load_fail'?"),
        ("faulty(null:, load_fail=1.5)", "load_fail is a share from 0 to 1"),
        ("faulty(null:, slow=0.1)", "like slow=0.1:50ms"),
        ("faulty(null:, down=20s-10s)", "like down=10s-20s"),
        ("faulty(null:, seed=-1)", "seed is a whole number"),
        ("faulty(null:, after=5, until=5)", "before they begin"),
        ("faulty(null:, until=0)", "before they begin"),
        ("file:/mnt?depth=4097", "at most 4096"),
    ],
)
def test_a_wrong_spelling_is_refused_with_the_way_out(spelling: str, part: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_tier_spec(spelling)
    assert part in str(refusal.value)


@pytest.mark.parametrize(
    "spelling",
    ["s3://bucket", "redis://h:1/0", "mooncake://h:1", "null:", "throttled(dram:1GiB, latency=1ms)", "file:/m?io=gds"],
)
def test_a_tier_that_cannot_be_measured_yet_is_refused_with_those_that_can(spelling: str) -> None:
    with pytest.raises(UsageError, match=r"this version measures (dram and file|io=psync and io=mmap)"):
        measurable_tier(spelling)
