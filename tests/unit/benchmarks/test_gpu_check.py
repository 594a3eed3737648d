"""The check that people run on a machine with GPUs goes through all its steps, and says so when there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_check.py"


def _run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def test_without_a_gpu_it_says_so():
    done = _run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    assert "no GPU here" in done.stdout


def test_a_rehearsal_goes_through_all_steps(tmp_path: Path):
    done = _run("--rehearse", "--steps", "4", "--new-tokens", "8", "--json", str(tmp_path / "figures.json"),
                "model.num_layers=1", CUDA_VISIBLE_DEVICES="")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything agrees" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["loss_last"] < figures["loss_first"]
    assert figures["logits, permuted positions"] < 1e-5
    assert figures["left_to_right_tokens_per_s"] > 0 and figures["plan_and_infill_tokens_per_s"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_everything_agrees():
    done = _run("--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
