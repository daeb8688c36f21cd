import pytest

from kvbench.results.host import Gpu

pytestmark = pytest.mark.live


def test_nvml_and_torch_see_the_same_gpus(gpus: tuple[Gpu, ...]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("the installed torch cannot use a GPU")
    visible = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    assert visible <= {gpu.name for gpu in gpus}
    assert all(gpu.memory_bytes > 2**30 and gpu.driver for gpu in gpus)
