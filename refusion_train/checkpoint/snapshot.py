"""A copy of this rank's state in memory of the host, from which a checkpoint is written while training goes on.

The memory is as large as what this rank writes (its optimizer state: 12 bytes per parameter that it owns) and is kept
and used again: fresh pages would cost more than the copying. With CUDA it is pinned, so that the copy runs at the speed
of the bus.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch

from refusion_train.checkpoint.sharded import ShardedEntry


class HostMemory:
    """Memory for one snapshot at a time: taking the next one overwrites the last."""

    def __init__(self) -> None:
        self._floats = torch.empty(0, dtype=torch.float32)

    def take(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Copy `tensors` (ShardedEntry, or small plain tensors); when it returns the originals may change."""
        parts = [part for entry in tensors.values() if isinstance(entry, ShardedEntry) for part in entry.parts.values()]
        needed = sum(part.numel() for part in parts)
        if needed > len(self._floats):
            self._floats = _allocate(needed)
        at, copied = 0, {}
        for name, entry in tensors.items():
            if not isinstance(entry, ShardedEntry):
                copied[name] = entry.detach().to("cpu", copy=True)
                continue
            copies = {}
            for offsets, part in entry.parts.items():
                copies[offsets] = self._floats[at : at + part.numel()].view(part.shape)
                copies[offsets].copy_(part, non_blocking=True)
                at += part.numel()
            copied[name] = ShardedEntry(tuple(entry.shape), copies)
        if any(part.is_cuda for part in parts):
            torch.cuda.current_stream().synchronize()
        return copied


def _allocate(count: int) -> torch.Tensor:
    """Uninitialised float32 [count], in large pages if there are such, pinned if there is CUDA."""
    memory = mmap.mmap(-1, count * torch.float32.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    floats = torch.frombuffer(memory, dtype=torch.float32)
    if torch.cuda.is_available():
        # Not pin_memory=True, which rounds up to a power of two. It stays registered as long as the process lives.
        failed = torch.cuda.cudart().cudaHostRegister(floats.data_ptr(), floats.nbytes, 0)  # type: ignore[union-attr]
        assert int(failed) == 0, f"{floats.nbytes} bytes of memory cannot be pinned (CUDA error {failed})"
    return floats
