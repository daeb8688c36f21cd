"""The shared servers as fixtures."""

import pytest

from tests.servers import shared
from tests.servers.processes import Server
from tests.servers.start import MooncakeStore


@pytest.fixture(scope="session")
def redis_server() -> Server:
    return shared.redis()


@pytest.fixture(scope="session")
def etcd_server() -> Server:
    return shared.etcd()


@pytest.fixture(scope="session")
def s3_server() -> Server:
    return shared.s3()


@pytest.fixture(scope="session")
def mooncake_store() -> MooncakeStore:
    return shared.mooncake()
