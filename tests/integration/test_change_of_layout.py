"""The command, on real shards: a run that goes on with another layout is the run that never stopped."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
from groups import losses, train_group, training_rows, validation_rows

from refusion_train.checkpoint import store
from refusion_train.config import Config, to_yaml


def _refusion(file: Path, count: int, *words: str) -> None:
    """`refusion train FILE --nproc COUNT WORDS`, to its end."""
    result = subprocess.run(
        [sys.executable, "-m", "refusion_train.cli", "train", str(file), "--nproc", str(count), *words],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, f"{words}: exit code {result.returncode}\n{result.stdout}\n{result.stderr}"


@pytest.mark.slow
def test_from_tensor_and_pipeline_to_zero_2(tiny_config: Config, tmp_path: Path) -> None:
    tiny_config.train.schedule, tiny_config.train.steps, tiny_config.train.lr = "constant", 8, 3e-3
    undisturbed = copy.deepcopy(tiny_config)
    undisturbed.run_dir = str(tmp_path / "undisturbed")
    train_group(undisturbed, 1)
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_config))
    _refusion(file, 4, "train.steps=4", "parallel.tensor=2", "parallel.pipeline=2")
    tiny_config.parallel.zero_stage, tiny_config.train.micro_batch_size = 2, 4
    printed = train_group(tiny_config, 2)
    assert "going on from" in printed and "step-00000004" in printed
    assert len(losses(tiny_config)) == 8
    assert losses(tiny_config) == pytest.approx(losses(undisturbed), abs=1e-5)
    for mine, theirs in zip(training_rows(tiny_config), training_rows(undisturbed), strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-5)
        assert (mine["tokens"], mine["supervised_tokens"]) == (theirs["tokens"], theirs["supervised_tokens"])
    assert validation_rows(tiny_config)[-1] == pytest.approx(validation_rows(undisturbed)[-1], abs=1e-5)
    ends = [store.read_state(store.resolve(config.run_dir)) for config in (tiny_config, undisturbed)]
    assert ends[0]["step"] == 8 and ends[0]["cursor"] == ends[1]["cursor"]
