import pytest

from kvbench.results.host import Gpu, discover_gpus


@pytest.fixture
def gpus() -> tuple[Gpu, ...]:
    """The host's GPUs; a test that needs one is skipped with NVML's own reason where there is none."""
    found = discover_gpus()
    if isinstance(found, str):
        pytest.skip(found)
    return found
