"""How long this rank computes in a step, apart from what it waits for others: what tells a slow rank from its partners.

All ranks of a step end at the same time, because they wait for each other: their own times tell them apart.
megatron-core's schedules call `timers` around the forward and the backward pass of each micro-batch, between what they
send to and receive from other stages. On a GPU these are marks in its stream, read once a step when the host has waited
for the device anyway: no wait is added.

Not told apart: what happens within these passes. Tensor-parallel partners wait for each other in every layer, so all
of a group are as slow as its slowest. With ZeRO 2 and 3 without pipeline gradients are reduced within the backward
pass: then the forward pass alone is counted. With ZeRO 3 this too waits for the others, when it gathers weights.
"""

from __future__ import annotations

import time
from typing import Any

import torch

FORWARD, BACKWARD = "forward-compute", "backward-compute"  # as megatron-core calls them


class Clock:
    """megatron-core's `timers` (`ModelParallelConfig.timers`), of which it keeps the passes `counted`."""

    def __init__(self, device: torch.device, counted: tuple[str, ...] = (FORWARD, BACKWARD)) -> None:
        self._passes: _Passes = _DevicePasses() if device.type == "cuda" else _HostPasses()
        self._counted = counted

    def __call__(self, name: str, log_level: int | None = None) -> _Passes | _Nothing:
        """The timer of that name; called at its start and at its stop."""
        return self._passes if name in self._counted else _NOTHING

    def take(self) -> float:
        """Seconds of the passes since the last call. Cheap where the host has waited for the device since."""
        return self._passes.take()


class _Nothing:
    """A timer that is not kept."""

    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...


_NOTHING = _Nothing()


class _HostPasses:
    """Passes that the host computes itself, or waits for."""

    def __init__(self) -> None:
        self._began, self._sum = 0.0, 0.0

    def start(self, barrier: bool = False) -> None:
        self._began = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        self._sum += time.perf_counter() - self._began

    def take(self) -> float:
        taken, self._sum = self._sum, 0.0
        return taken


class _DevicePasses:
    """Passes on a GPU, which the host only orders. Events are used again."""

    def __init__(self) -> None:
        self._free: list[Any] = []
        self._marks: list[Any] = []  # start, stop, start, stop, ...

    def start(self, barrier: bool = False) -> None:
        self._mark()

    def stop(self, barrier: bool = False) -> None:
        self._mark()

    def _mark(self) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def take(self) -> float:
        if not self._marks:
            return 0.0
        self._marks[-1].synchronize()
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        taken = sum(start.elapsed_time(stop) for start, stop in pairs) / 1000  # milliseconds
        self._free, self._marks = self._free + self._marks, []
        return taken


_Passes = _HostPasses | _DevicePasses
