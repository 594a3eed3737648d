"""A rank that is slowed by a sleep in its step is named in the metrics and by `refusion status`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from groups import Group, Outcome, training_rows

from launchers import status
from refusion_train.config import Config
from refusion_train.train.stragglers import slowest

SLEEP_S = 0.3


def _slow_in_forward() -> None:
    from refusion_train.model.slot_model import SlotModel

    _slow(SlotModel, "forward")


def _slow_in_reading() -> None:
    from refusion_train.data.loader import TrainLoader

    _slow(TrainLoader, "__next__")


def _slow(owner: type, name: str) -> None:
    """Rank 1 sleeps in a method."""
    if os.environ["RANK"] != "1":
        return
    method = getattr(owner, name)

    def slowed(*arguments: Any, **named: Any) -> Any:
        time.sleep(SLEEP_S)
        return method(*arguments, **named)

    setattr(owner, name, slowed)


@pytest.mark.parametrize(
    ("ranks", "layout", "prepare"),
    [
        (2, {}, _slow_in_reading),
        (2, {"zero_stage": 2}, _slow_in_forward),
        (4, {"pipeline": 2}, _slow_in_forward),
    ],
    ids=["reading", "zero2", "pipeline"],
)
def test_the_slow_rank_is_found(
    tiny_config: Config, ranks: int, layout: dict[str, int], prepare: Callable[[], None]
) -> None:
    for key, value in layout.items():
        setattr(tiny_config.parallel, key, value)
    tiny_config.train.steps, tiny_config.train.micro_batch_size, tiny_config.train.log_interval = 6, 4, 2
    assert Group(tiny_config, ranks, prepare).wait() == [Outcome(0)] * ranks
    found = [row for row in training_rows(tiny_config) if "slowest_rank" in row]
    assert [row["step"] for row in found] == [4, 6], "the first step is not counted, the second is told of by the third"
    for row in found:
        assert (row["slowest_rank"], row["slowest_host"]) == (1, socket.gethostname())
        assert row["slowest_rank_s"] > SLEEP_S > row["other_ranks_s"], "the others' waiting was counted"
        assert row["slowest_ratio"] == pytest.approx(row["slowest_rank_s"] / row["other_ranks_s"])
    told = status.standing(Path(tiny_config.run_dir), "", "")
    assert told.slow.startswith(f"rank 1 on {socket.gethostname()} takes ")


def test_only_ranks_with_the_same_work_are_compared() -> None:
    places = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]
    found = slowest(np.array([1.0, 5.0, 1.1, 5.5, 1.0, 10.0]), places)
    assert (found["slowest_rank"], found["slowest_host"]) == (5, "c")
    assert (found["other_ranks_s"], found["slowest_ratio"]) == (5.25, pytest.approx(10 / 5.25))


@pytest.mark.parametrize("means", [[1.0, 9.0], [np.nan, np.nan, np.nan, np.nan]])
def test_nothing_to_compare_is_nothing_to_say(means: list[float]) -> None:
    places = [("a", 0), ("a", 1)] if len(means) == 2 else [("a", 0)] * 4
    assert slowest(np.array(means), places) == {}
