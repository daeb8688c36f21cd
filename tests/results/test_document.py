from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench import __version__
from kvbench.core.provenance import Origin
from kvbench.results.document import Document, mask_secrets, numbers_without_origin
from kvbench.results.host_paths import HostPaths

Factory = Callable[..., Document[HostPaths]]


def test_a_new_document_says_what_it_is_and_when_it_was_made(new_host_paths: Factory) -> None:
    east = timezone(timedelta(hours=5))
    document = new_host_paths(clock=lambda: datetime(2026, 11, 29, 17, 30, 1, 999, tzinfo=east))
    assert (document.kind, document.schema_version) == ("host-paths", 1)
    assert document.kvbench_version == __version__
    assert document.created_at == "2026-11-29T12:30:01Z"


def test_without_a_clock_and_a_host_a_document_describes_this_moment_and_machine(new_host_paths: Factory) -> None:
    from kvbench.results.document import utc_now

    document = new_host_paths(clock=utc_now, host=None)
    assert datetime.fromisoformat(document.created_at) <= datetime.now(UTC)
    assert document.host.num_cpus >= 1


@pytest.mark.parametrize(
    ("argument", "masked"),
    [
        ("redis://user:pw@127.0.0.1:6379/0", "redis://***@127.0.0.1:6379/0"),
        ("s3://b/p?endpoint=http://h:1&secret_key=abc&x=1", "s3://b/p?endpoint=http://h:1&secret_key=***&x=1"),
        (
            "throttled(s3://b?session_token=abc, bandwidth=7GB/s)",
            "throttled(s3://b?session_token=***, bandwidth=7GB/s)",
        ),
        ("file:/mnt/nvme?size=1TiB&io=io_uring", "file:/mnt/nvme?size=1TiB&io=io_uring"),
        ("--tokens", "--tokens"),
    ],
)
def test_passwords_in_a_command_line_are_masked(argument: str, masked: str, new_host_paths: Factory) -> None:
    assert new_host_paths(command_line=["kvbench", argument]).command_line == ("kvbench", masked)


@given(st.text())
def test_masking_twice_changes_nothing_more(argument: str) -> None:
    assert mask_secrets(mask_secrets(argument)) == mask_secrets(argument)


def test_every_number_of_the_example_has_an_origin(host_paths: Document[HostPaths]) -> None:
    assert numbers_without_origin(host_paths) == ()


def test_a_number_without_an_origin_is_named(host_paths: Document[HostPaths]) -> None:
    origin = Origin(provenance="measured", source="test")
    known = replace(host_paths, provenance={"fixed_s": origin, "paths.bytes_per_s": origin, "samples.bytes": origin})
    assert numbers_without_origin(known) == ("paths.residual_ratio", "paths.concurrency", "paths.samples.seconds")
