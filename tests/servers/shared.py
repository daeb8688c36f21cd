"""One real server of each kind for the whole test run, started by whoever wants it first, ended with the process."""

import atexit
import contextlib
import functools
import os
import tempfile
from pathlib import Path

from tests.servers import start
from tests.servers.processes import Server
from tests.servers.start import MooncakeStore

_running = contextlib.ExitStack()
atexit.register(_running.close)


@functools.cache
def redis() -> Server:
    return _running.enter_context(start.redis(_folder("redis")))


@functools.cache
def etcd() -> Server:
    return _running.enter_context(start.etcd(_folder("etcd")))


@functools.cache
def s3() -> Server:
    """Any credentials do, but a client wants some; those of the whole run are set here."""
    os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "any"
    return _running.enter_context(start.seaweedfs(_folder("seaweedfs")))


@functools.cache
def mooncake() -> MooncakeStore:
    return _running.enter_context(start.mooncake(_folder("mooncake"), segments=2))


def _folder(name: str) -> Path:
    return Path(
        _running.enter_context(tempfile.TemporaryDirectory(prefix=f"kvbench-{name}-", ignore_cleanup_errors=True))
    )
