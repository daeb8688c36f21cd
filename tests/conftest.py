from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, settings

from kvbench.core.provenance import Origin, Warning_
from kvbench.results.document import Document, new_document
from kvbench.results.host import Host
from kvbench.results.host_paths import HostPaths, Limit, MeasuredPath, TransferSample
from tests.servers.fixtures import etcd_server, redis_server, s3_server

__all__ = ["etcd_server", "redis_server", "s3_server"]

# A deadline per example would fail a correct test on a machine whose CPUs others share; what is bounded is the run.
settings.register_profile("kvbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvbench")

SYNTHETIC = Origin(provenance="synthetic", source="made up for a test")


@pytest.fixture
def host() -> Host:
    return Host(
        cpu="Example CPU",
        num_cpus=8,
        memory_bytes=64 * 2**30,
        os="Example Linux",
        python="3.11.7",
        gpus=(),
        no_gpu_reason="no GPU on this host",
    )


@pytest.fixture
def measured_path() -> MeasuredPath:
    return MeasuredPath(
        tier="dram",
        spec="dram:1GiB",
        direction="load",
        source="private host memory",
        destination="torch cpu tensor",
        fixed_s=2e-5,
        bytes_per_s=8e9,
        residual_ratio=0.03,
        concurrency=1,
        samples=tuple(TransferSample(bytes=size, seconds=2e-5 + size / 8e9) for size in (2**20, 2**22, 2**24)),
        cold=True,
        cold_evidence="buffers were touched before",
        warnings=(Warning_(code="few-samples", message="only three samples", remedy="measure more"),),
    )


@pytest.fixture
def new_host_paths(host: Host, measured_path: MeasuredPath) -> Callable[..., Document[HostPaths]]:
    """Makes a host-paths document; keyword arguments replace fields of `new_document`."""

    def new(**changes: object) -> Document[HostPaths]:
        result = HostPaths(
            paths=(measured_path,),
            limits=(
                Limit(name="host_total", value=1.2e10, origin=SYNTHETIC),
                Limit(name="alpha_h2d", value=1e-5, origin=SYNTHETIC),
                Limit(name="sockets", value=2.0, origin=SYNTHETIC),
            ),
        )
        names = ("fixed_s", "bytes_per_s", "residual_ratio", "concurrency", "samples.bytes", "samples.seconds")
        settings: dict[str, object] = {
            "command_line": ("kvbench", "probe"),
            "provenance": dict.fromkeys(names, SYNTHETIC),
            "warnings": (Warning_(code="pageable", message="host memory is pageable", remedy="pin it"),),
            "clock": lambda: datetime(2026, 11, 29, 12, 0, tzinfo=UTC),
            "host": host,
        }
        return new_document(result, **(settings | changes))  # type: ignore[arg-type]

    return new


@pytest.fixture
def host_paths(new_host_paths: Callable[..., Document[HostPaths]]) -> Document[HostPaths]:
    return new_host_paths()
