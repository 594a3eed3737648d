"""One undisturbed run that the tests of this folder compare with and continue from."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))  # the helper that starts processes

from refusion_train.config import Config


@pytest.fixture(scope="session")
def undisturbed(_tiny_template: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """10 steps on 2 ranks, ZeRO 1, fp32; checkpoints after 2, 4, ..., 10, validation after 0, 4, 8, 10. Read only."""
    from groups import train_group

    config = copy.deepcopy(_tiny_template)
    config.run_dir = str(tmp_path_factory.mktemp("undisturbed") / "run")
    config.train.steps, config.train.validation_interval = 10, 4
    config.checkpoint.interval, config.checkpoint.keep = 2, 10
    train_group(config, 2)
    return config
