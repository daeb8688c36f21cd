"""Stand-in for SGLang's kernel package, of which PyPI has no build for CPUs.

On a CPU without AMX SGLang computes dense models in plain torch and calls none of these kernels; HiCache's `direct`
copies are the exception, and are written here in torch. Results made with it carry the label "stubbed kernel package".
"""

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import torch

KVBENCH_STUB = True
__version__ = "0.4.10"
__path__: list[str] = []


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _refusing(name)


def _refusing(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} is not in the stand-in; install SGLang's kernels for this model")

    kernel.__name__ = name
    return kernel


copy_all_layer_kv_cache_cpu = _refusing("copy_all_layer_kv_cache_cpu")


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies tokens of every layer between pools of the same layout."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies tokens of every layer from a layer-first pool into a page-first one (pages, layers, page, …)."""
    num_layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for index, target in enumerate(dst_ptrs):
        for layer in range(num_layers):
            source = src_ptrs[index * num_layers + layer]
            target[pages, layer] = source[src_indices].view(len(pages), page_size, *source.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies tokens of one layer from a page-first pool into a layer-first one."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(len(dst_indices), *target.shape[1:])


class _Runtime:
    """The calls of cudart with which SGLang registers host memory: meaningless without a GPU, so they succeed."""

    cudaError = type("cudaError", (), {"success": 0})

    def cudaHostRegister(self, *_: Any) -> int:
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:
        return 0

    def cudaGetErrorString(self, _: int) -> str:
        return "stand-in"


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same constructor without `pin_memory`, which needs a driver."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _install() -> None:
    torch.cuda.cudart = _Runtime
    torch.cpu.Stream.synchronize = lambda _: None
    torch.cpu.Event.elapsed_time = lambda _, __: 0.0
    # SGLang imports these three only on CUDA but calls them by bare name, so they have to be builtins.
    for copy in (transfer_kv_direct, transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
        setattr(builtins, copy.__name__, copy)
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor


if not torch.cuda.is_available():
    _install()
