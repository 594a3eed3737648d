"""Every shim that lets megatron-core and DeepSpeed run on a machine without CUDA.

megatron-core allocates on "cuda" in a few hard-coded places and saves the CUDA generator's state around
recomputation. Where there is no CUDA, `install` points those places at the CPU; where there is, it does nothing,
so the path taken on a GPU is the untouched one. Nothing else in the package may patch another library.
"""

from __future__ import annotations

import os
import types
from typing import Any

import torch


def cuda_present() -> bool:
    """Whether this process computes on CUDA."""
    return torch.cuda.is_available()


def install() -> None:
    """Make megatron-core and DeepSpeed usable without CUDA. Does nothing with CUDA, nor the second time.

    Call it before a process group, a model or a DeepSpeed engine is made.
    """
    if cuda_present():
        return
    # DeepSpeed looks for an accelerator when it is first imported; it would find none and guess.
    os.environ["DS_ACCELERATOR"] = "cpu"
    # megatron-core passes this as `device=` to its allocations (rotary tables, linear layers, point-to-point buffers).
    _replace(torch.cuda, "current_device", _current_device)
    _replace(torch.cuda, "synchronize", _nothing)
    _install_schedules()
    _install_recompute()


def _replace(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner.__name__}.{name} is gone; this version needs another shim"
    setattr(owner, name, value)


def _current_device() -> str:
    return "cpu"


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _install_schedules() -> None:
    """The schedules count tokens in `torch.zeros(..., device="cuda")`: give them a torch whose zeros stay here."""
    from megatron.core.pipeline_parallel import schedules

    if isinstance(schedules.torch, _TorchOnCpu):
        return
    _replace(schedules, "torch", _TorchOnCpu("torch"))


class _TorchOnCpu(types.ModuleType):
    """`torch`, except that `zeros` on "cuda" allocates on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*shape: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*shape, device="cpu" if device == "cuda" else device, **kwargs)


def _install_recompute() -> None:
    """Recomputation saves and restores the CUDA generator, which does not exist here.

    The CPU generator is saved by megatron-core itself, so recomputation stays exact.
    """
    from megatron.core.tensor_parallel import random

    _replace(random, "_get_cuda_rng_state", _empty_state)
    _replace(random, "_set_cuda_rng_state", _nothing)


def _empty_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def forbid_builds(deepspeed: Any) -> None:
    """Keep DeepSpeed (the module) from compiling an extension for inference on CPU, which takes over a minute."""
    if cuda_present():
        return
    operators = deepspeed.ops.__compatible_ops__
    name = "deepspeed_shm_comm"
    assert name in operators, f"DeepSpeed no longer lists {name}; this version needs another shim"
    operators[name] = False
