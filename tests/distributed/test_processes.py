"""The helper itself: results by rank, the error of the rank that failed first, and a limit on time."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from processes import RankError, run

from refusion_train.config import Config
from refusion_train.parallel.groups import destroy, init_groups


def _sum_of_ranks(offset: int) -> tuple[int, float, int]:
    groups = init_groups(Config())
    total = torch.tensor(float(groups.rank + offset))
    dist.all_reduce(total)
    destroy()
    return groups.rank, total.item(), int(os.environ["LOCAL_RANK"])


def test_results_come_in_order_of_rank():
    assert run(_sum_of_ranks, 2, 10) == [(0, 21.0, 0), (1, 21.0, 1)]


def _one_fails() -> None:
    groups = init_groups(Config())
    if groups.rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def test_the_error_of_the_failing_rank_is_shown():
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:(.|\n)*ValueError: rank one has had enough"):
        run(_one_fails, 2)


def _dies() -> None:
    if os.environ["RANK"] == "0":
        os._exit(3)
    time.sleep(60)


def test_a_dead_process_is_noticed():
    with pytest.raises(RankError, match="rank 0 of 2 failed:\nthe process ended"):
        run(_dies, 2)


def test_time_is_limited():
    started = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 still run after 1 s"):
        run(time.sleep, 2, 60, timeout_s=1)
    assert time.monotonic() - started < 10, "the processes were waited for"
