"""`refusion compare` from nothing to its report, stopped on the way and called again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refusion_train.cli import run as command
from refusion_train.errors import ConfigError

WORDS = (
    "train.steps=4", "train.validation_interval=2", "train.global_batch_size=1", "train.micro_batch_size=1",
    "data.streams=1", "seeds=[5]", "documents=300", "prompts=2", "slot_sizes=[8]", "train.validation_rows=2",
)  # fmt: skip


@pytest.mark.slow
def test_a_comparison_is_made_once_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "compare"
    arms = ["--arm", "slots", "--arm", "ar", "--arm", "mdm"]
    words = ["compare", "cpu", "--dir", str(folder), "--jobs", "2", *arms, *WORDS]
    assert command(words) == 0
    report = (folder / "report.md").read_text()
    for name in ("curves.png", "speed.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG" and name in report
    for line in ("| slots | slots of 8 |", "| slots | left to right |", "| ar | left to right |", "| mdm | mdm |"):
        assert line in report
    assert "4 steps and 2,076 tokens; seeds 5" in report, "every arm saw as many tokens"
    first = [_rows(folder / f"{arm}-5")[0] for arm in ("slots", "ar")]
    assert first[0]["val_left_to_right"] == pytest.approx(first[1]["val_left_to_right"], abs=1e-6), "equal weights"
    assert all(row["prompts"] == 2 for row in json.loads((folder / "decoding-5.json").read_text()))
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.parent != folder}
    assert command(words) == 0, "nothing is done twice"
    assert made == {path: path.stat().st_mtime_ns for path in made}
    capsys.readouterr()
    assert command([*words, "prompts=3"]) == ConfigError.exit_code
    assert "holds another comparison" in capsys.readouterr().err


def _rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
