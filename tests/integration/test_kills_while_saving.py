"""kill -9 at twenty random moments of saving: what bears a checkpoint's name is whole, and the run goes on from it.

One process, which makes starts cheap and sums of floats the same to the bit; `test_faults` kills groups of several.
"""

from __future__ import annotations

import copy
import os
import random
import time
from pathlib import Path

import pytest
from groups import Group, losses, train_group, wait_until

from refusion_train.checkpoint import store
from refusion_train.config import Config

KILLS, STEPS = 20, 80
SLOWER_S = 0.02  # a save syncs six files and folders one after the other, and so takes some 0.15 s


def slow_disk() -> None:
    """Make this process wait for every sync, so that a save has moments to hit."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(SLOWER_S)
        fsync(descriptor)
        time.sleep(SLOWER_S)

    os.fsync = slow


@pytest.mark.slow
def test_kills_while_saving(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config
    config.train.steps, config.data.workers = STEPS, 0
    undisturbed = copy.deepcopy(config)
    undisturbed.run_dir = str(tmp_path / "undisturbed" / "run")
    train_group(undisturbed, 1)
    config.checkpoint.interval, config.checkpoint.keep = 1, 2
    root = store.checkpoints_of(config.run_dir)
    rng, midst, reached = random.Random(5), 0, set()
    for _ in range(KILLS):
        group = Group(config, 1, slow_disk)
        before = {folder.name for folder in root.glob("*")}
        wait_until(lambda before=before: {folder.name for folder in root.glob("*")} - before, group, every_s=0.001)
        time.sleep(rng.uniform(0.0, 0.3))
        group.kill()
        midst += bool(list(root.glob("*.tmp")))
        for folder in store.folders(root):
            store.check(folder)
            reached.add(folder.name)
    assert midst >= KILLS // 3, f"only {midst} kills hit a save"
    assert 2 < len(reached) < STEPS, f"{len(reached)} checkpoints were seen; too few, or the run was over"
    config.checkpoint.interval = 1000
    assert "going on from" in train_group(config, 1)
    assert losses(config) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert not list(root.glob("*.tmp"))
