"""`refusion export --verify`: it passes what is right, finds what is not, and leaves nothing of what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import make_checkpoint, model_shape

from refusion_train.cli import run as command
from refusion_train.config import ObjectiveConfig
from refusion_train.convert import export
from refusion_train.convert.verify import TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "objective"), [("float32", "slots"), ("bfloat16", "slots"), ("float16", "slots"), ("float32", "mdm")]
)
def test_what_is_right_is_told(
    dtype: str, objective: str, tiny_dataset: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape(), ObjectiveConfig(name=objective))
    words = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf"), "--dtype", dtype, "--verify"]
    assert command(words) == 0
    line, folder = capsys.readouterr().out.strip().split("\n")
    assert folder == str(tmp_path / "hf") and dtype in line
    difference = float(line.split("at most ")[1].split()[0])
    largest = float(line.split("largest logit ")[1].split(",")[0])
    assert 0 < difference < TOLERANCE[getattr(torch, dtype)] * largest
    if dtype == "bfloat16":
        assert difference > 1e-3, "rounding the weights must show"


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("model.layers.1.self_attn.q_norm.weight", lambda part: part * 1.2),
        ("model.layers.0.mlp.up_proj.weight", lambda part: part.flip(0)),
        ("model.layers.1.self_attn.k_proj.weight", lambda part: part.flip(0)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mistake_is_found(
    name: str, mistake: Any, dtype: str, tiny_dataset: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape())
    right = export._reader

    def wrong(checkpoint: Any) -> Any:
        read = right(checkpoint)
        return lambda asked, rows: mistake(read(asked, rows)) if asked == name else read(asked, rows)

    monkeypatch.setattr(export, "_reader", wrong)
    words = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf"), "--dtype", dtype, "--verify"]
    assert command(words) == 1
    (line,) = capsys.readouterr().err.strip().split("\n")
    assert "logits differ by" in line and dtype in line and "nothing was exported" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
