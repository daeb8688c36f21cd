"""One real server of each kind for the whole test run, started by the first test that wants it."""

from collections.abc import Iterator

import pytest

from tests.servers import start
from tests.servers.processes import Server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start.redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start.etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server
