import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import UsageError
from kvbench.core.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_flop,
    format_flop_rate,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    parse_flop_rate,
    parse_request_rate,
)

BYTE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}
positive = st.floats(min_value=1e-8, max_value=1e5)


@given(st.integers(min_value=0, max_value=2**80), st.sampled_from(sorted(BYTE_UNITS)))
def test_a_whole_number_of_any_unit_is_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * BYTE_UNITS[unit]
    assert parse_bytes(f" {number} {unit} ") == number * BYTE_UNITS[unit]


@given(st.integers(min_value=0, max_value=1023), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_a_printed_whole_size_reads_back(number: int, unit: str) -> None:
    size_bytes = number * BYTE_UNITS[unit]
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@given(positive)
def test_a_printed_duration_reads_back_to_three_figures(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.006)


@given(st.floats(min_value=1.0, max_value=1e15))
def test_a_printed_bandwidth_reads_back(bytes_per_s: float) -> None:
    assert parse_bandwidth(format_bandwidth(bytes_per_s)) == pytest.approx(bytes_per_s, rel=0.006)


@given(st.floats(min_value=1e9, max_value=1e18))
def test_a_printed_compute_rate_reads_back(flop_per_s: float) -> None:
    assert parse_flop_rate(format_flop_rate(flop_per_s)) == pytest.approx(flop_per_s, rel=0.006)


@given(st.text(max_size=30))
def test_any_text_is_a_value_or_a_usage_error(text: str) -> None:
    for parse in (parse_bytes, parse_bandwidth, parse_duration, parse_flop_rate):
        try:
            assert parse(text) >= 0
        except UsageError as error:
            assert repr(text) in str(error)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("64MiB", 67_108_864), ("1.5TB", 1_500_000_000_000), ("0.5KiB", 512), ("1e3B", 1000), ("0B", 0)],
)
def test_sizes_people_write(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("50GB/s", 50e9), ("12GiB/s", 12 * 2**30), ("400Gbit/s", 50e9), ("5.00 kB/s", 5000.0)]
)
def test_bandwidths_people_write(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "seconds"), [("100us", 1e-4), ("100µs", 1e-4), ("1.5ms", 1.5e-3), ("2s", 2.0), ("1 min", 60.0)]
)
def test_durations_people_write(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


def test_64M_is_refused_with_both_readings() -> None:
    with pytest.raises(UsageError, match="did you mean 64MiB or 64MB"):
        parse_bytes("64M")


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "64", "1.2.3MiB", "0.3B", "1e400B", "1e308TiB", "nanB", "infB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0GB/s", "50GB", "50", "50Gb/s", "1e400GB/s", "-1GB/s"])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["0", "0TFLOP/s", "989TFLOP", "989T", "1e400"])
def test_what_is_no_compute_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_flop_rate(text)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (format_bytes(1_577_058_304), "1.47 GiB"),
        (format_bytes(12_616_466_432), "11.75 GiB"),
        (format_bytes(512), "512 B"),
        (format_bandwidth(50e9), "50.00 GB/s"),
        (format_duration(0.031541), "31.5 ms"),
        (format_duration(0.391236), "391 ms"),
        (format_duration(0.0), "0 s"),
        (format_duration(7200.0), "2.00 h"),
        (format_flop(386_932_186_021_888), "0.39 PFLOP"),
        (format_flop_rate(989e12), "989 TFLOP/s"),
        (format_count(1_048_576), "1.05 M"),
        (format_count(32_768), "32,768"),
        (format_count(235.1e9), "235.10 B"),
    ],
)
def test_numbers_print_as_people_read_them(printed: str, expected: str) -> None:
    assert printed == expected


@pytest.mark.parametrize(("text", "per_s"), [("2/s", 2.0), ("30/min", 0.5), ("7200 /h", 2.0), ("5/ms", 5000.0)])
def test_a_request_rate_is_per_second(text: str, per_s: float) -> None:
    assert parse_request_rate(text) == pytest.approx(per_s)


@pytest.mark.parametrize("text", ["2", "2s", "0/s", "2/fortnight", "x/s", "1e999/s"])
def test_a_request_rate_without_its_time_or_above_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="rate"):
        parse_request_rate(text)
