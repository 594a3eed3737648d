"""Which rank is slow: every rank's own time, compared with that of the ranks that do the same work.

One slow rank slows all, and then all take equally long. Own time is what a rank does before it waits: getting its
batch, putting it on the device, and the passes that `parallel.clock` counts. It travels with the numbers that all
ranks exchange before every step, so it costs no collective of its own.
"""

from __future__ import annotations

import math
import socket
from typing import Any

import numpy as np
import torch.distributed as dist

from refusion_train.checkpoint import store
from refusion_train.parallel.groups import Groups


class RankTimes:
    """Own time of this rank, and what all of them say. Making it is collective.

    interval: steps between two reports (train.log_interval).
    """

    def __init__(self, groups: Groups, host_group: dist.ProcessGroup | None, interval: int) -> None:
        self._places: list[tuple[str, int]] = store.gather((socket.gethostname(), groups.pp_rank), host_group)
        self._interval = interval
        self._sum, self._steps, self._first, self._current = 0.0, 0, True, 0.0

    def add(self, seconds: float) -> None:
        """Own time in the step that is going on."""
        self._current += seconds

    def end_step(self) -> None:
        """The step is done. The first of this process, which builds and warms up, is not counted."""
        if not self._first:
            self._sum += self._current
            self._steps += 1
        self._first, self._current = False, 0.0

    @property
    def mean(self) -> float:
        """Seconds a step since the last report; NaN before there was a step."""
        return self._sum / self._steps if self._steps else math.nan

    def report(self, step: int, means: np.ndarray) -> dict[str, Any]:
        """For the row of a step, if it is due: the slowest rank. means: float64 [ranks], every rank's `mean`.

        The keys: slowest_rank, slowest_host, slowest_rank_s (seconds a step, of the steps since the last report),
        other_ranks_s (median of the others of its pipeline stage), slowest_ratio (of both). Nothing if no two ranks
        do the same work.
        """
        if step % self._interval:
            return {}
        self._sum, self._steps = 0.0, 0
        return slowest(means, self._places)


def slowest(means: np.ndarray, places: list[tuple[str, int]]) -> dict[str, Any]:
    """The rank that takes longest compared with the others of its stage. means: float64 [ranks]; places: host, stage.

    Stages differ in their work, so that of another stage says nothing.
    """
    stages = np.array([stage for _, stage in places])
    found: dict[str, Any] = {}
    for rank, (host, stage) in enumerate(places):
        alike = stages == stage
        alike[rank] = False
        others = float(np.median(means[alike])) if alike.any() else math.nan
        ratio = float(means[rank]) / others if others > 0 else math.nan
        if ratio > found.get("slowest_ratio", 0.0):
            found = {
                "slowest_rank": rank, "slowest_host": host, "slowest_rank_s": float(means[rank]),
                "other_ranks_s": others, "slowest_ratio": ratio,
            }  # fmt: skip
    return found
