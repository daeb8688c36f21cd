"""Lets vLLM's OffloadingConnector run on a host without GPU: replaces only what copies pages.

Stock vLLM builds its worker from CUDA or XPU streams and refuses elsewhere. These specs keep vLLM's scheduler, CPU
tier, tiering, secondary tiers (fs, obj, p2p) and metrics, and copy pages with memmove. Loaded by vLLM through its
extension point, which it calls experimental (read and run against vLLM 0.32):

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"spec_name": "HostTieringSpec", "spec_module_path": "vllm_host_offload", "cpu_bytes_to_use": 67108864}}'
"""

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies pages between vLLM's KV cache and the offload region, in the calling thread.

    A chunk of the region holds `blocks_per_chunk` pages of one tensor. `region` is the memory that secondary tiers read
    and write; None: private memory of one tier.
    """

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, num_chunks: int, region: Any = None) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._group_refs = kv_caches.group_data_refs
        self._region = region
        self._device = [canonical.tensor for canonical in kv_caches.tensors]
        self._host = [
            torch.zeros((num_chunks, canonical.page_size_bytes * blocks_per_chunk), dtype=torch.int8)
            if region is None
            else region.create_next_worker_view(canonical.page_size_bytes * blocks_per_chunk)
            for canonical in kv_caches.tensors
        ]
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies from the KV cache into the region."""
        return self._run(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copies from the region into the KV cache."""
        return self._run(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[Any]:
        """Results of the jobs since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Any) -> None:
        """Returns at once: a job is done when its submit returns."""

    def shutdown(self) -> None:
        """Lets go of the memory."""
        self._device.clear()
        self._host.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _run(self, job_id: int, device_spec: Any, host_spec: Any, *, store: bool) -> bool:
        begin_s = time.perf_counter()
        num_bytes = 0
        for device_address, host_address, size in self._pages(device_spec, host_spec):
            if store:
                ctypes.memmove(host_address, device_address, size)
            else:
                ctypes.memmove(device_address, host_address, size)
            num_bytes += size
        self._finished.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - begin_s))
        return True

    def _pages(self, device_spec: Any, host_spec: Any) -> Iterator[tuple[int, int, int]]:
        """Addresses of every page of a job in the KV cache and in the region, and its bytes.

        Blocks come grouped by KV cache group; the first block of a group may lie inside a chunk.
        """
        per_chunk = self._blocks_per_chunk
        device_start = host_start = 0
        for group, (count, first) in enumerate(zip(device_spec.group_sizes, device_spec.block_indices, strict=False)):
            if count == 0:
                continue
            skipped = first % per_chunk
            for ref in self._group_refs[group]:
                device, host = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
                device_stride = device.stride(0) * device.element_size()
                page_bytes = host.shape[1] // per_chunk
                for index in range(count):
                    chunk, within = divmod(index + skipped, per_chunk)
                    yield (
                        device.data_ptr() + int(device_spec.block_ids[device_start + index]) * device_stride,
                        host.data_ptr()
                        + int(host_spec.block_ids[host_start + chunk]) * host.stride(0)
                        + within * page_bytes,
                        ref.page_size_bytes,
                    )
            device_start += count
            host_start += -(-(count + skipped) // per_chunk)


class HostCPUSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """One lower tier: DRAM."""

    def get_worker(self, kv_caches: Any) -> MemcpyWorker:
        """The worker, made once."""
        worker: MemcpyWorker | None = self.__dict__.get("_worker")
        if worker is None:
            worker = self._worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return worker


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """DRAM as the primary tier with vLLM's own secondary tiers below it."""

    def get_worker(self, kv_caches: Any) -> MemcpyWorker:
        """The worker, made once, over the region that the secondary tiers use."""
        worker: MemcpyWorker | None = self.__dict__.get("_worker")
        if worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            worker = self._worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
        return worker
