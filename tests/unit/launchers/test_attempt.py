"""What is noted of a job's stretches, when another may follow, and who has the run folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import attempt


def saved(run: Path, step: int) -> None:
    """Make the run look as if it had a checkpoint."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


def stretch(run: Path, code: int, restart: int = 0, job: str = "7", step: int | None = None, told: bool = False) -> int:
    """One stretch of a job: its start, a checkpoint, Slurm's wish to end it, its end. The verdict."""
    folder = attempt.folder_of(run, job, restart)
    folder.mkdir(parents=True, exist_ok=True)
    assert attempt.begin(run, job, restart, "node1", 3) == 0
    if step is not None:
        saved(run, step)
    if told:
        (folder / attempt.INTERRUPTED).touch()
    return attempt.end(run, job, restart, code, 3)


def ends(run: Path) -> list[tuple[str, int, str]]:
    return [(e["why"], e["step"], e.get("next", "")) for e in attempt.read(run) if e["event"] == "end"]


def test_a_run_of_several_stretches(tmp_path: Path) -> None:
    assert stretch(tmp_path, 75, 0, step=10) == 75
    assert stretch(tmp_path, 143, 1, step=20, told=True) == 75
    assert stretch(tmp_path, 1, 2, step=30) == 75
    assert stretch(tmp_path, 0, 3, step=40) == 0
    assert ends(tmp_path) == [
        ("stopped", 10, "again"), ("interrupted", 20, "slurm"), ("failed", 30, "again"), ("finished", 40, "none"),
    ]  # fmt: skip
    begun = [(e["attempt"], e["restart"], e["step"]) for e in attempt.read(tmp_path) if e["event"] == "begin"]
    assert begun == [(1, 0, 0), (2, 1, 10), (3, 2, 20), (4, 3, 30)]
    assert not (tmp_path / "slurm" / "holder").exists()


def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    assert stretch(tmp_path, 2) == 2
    assert ends(tmp_path) == [("configuration", 0, "none")]


def test_three_in_a_row_without_progress_are_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [stretch(tmp_path, 1, 0), stretch(tmp_path, 75, 1), stretch(tmp_path, 137, 2)] == [75, 75, 1]
    assert "3 attempts in a row have ended at step 0" in attempt.read(tmp_path)[-1]["reason"]
    assert stretch(tmp_path, 1, 0, job="8") == 75, "a new submission has its own count"


def test_progress_and_interruptions_are_no_stall(tmp_path: Path) -> None:
    assert stretch(tmp_path, 1, 0) == stretch(tmp_path, 1, 1) == 75
    assert stretch(tmp_path, 1, 2, step=5) == 75
    for restart in range(3, 9):
        assert stretch(tmp_path, 143, restart, told=True) == 75
    assert stretch(tmp_path, 1, 9) == stretch(tmp_path, 1, 10) == 75
    assert stretch(tmp_path, 1, 11) == 1


def test_lost_stretches_are_noted_by_the_next_and_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [attempt.begin(tmp_path, "7", restart, "node1", 3) for restart in range(3)] == [0, 0, 0]
    assert attempt.begin(tmp_path, "7", 3, "node1", 3) == 1
    assert [why for why, _, _ in ends(tmp_path)][:3] == ["lost"] * 3
    assert "3 attempts in a row" in capsys.readouterr().err


def test_a_lost_stretch_that_slurm_ended_is_called_so(tmp_path: Path) -> None:
    attempt.begin(tmp_path, "7", 0, "node1", 3)
    folder = attempt.folder_of(tmp_path, "7", 0)
    folder.mkdir(parents=True)
    (folder / attempt.INTERRUPTED).touch()
    attempt.begin(tmp_path, "7", 1, "node1", 3)
    assert [why for why, _, _ in ends(tmp_path)] == ["interrupted"]


def test_the_cause_is_told_from_the_ranks_errors(tmp_path: Path) -> None:
    folder = attempt.folder_of(tmp_path, "7", 0)
    folder.mkdir(parents=True)
    for rank, error, consequence, time in ((0, "lost a partner", True, 1.0), (5, "a broken shard", False, 2.0)):
        content = {"error": error, "consequence": consequence, "time": time, "code": 1}
        (folder / f"rank-{rank}.error").write_text(json.dumps(content))
    assert stretch(tmp_path, 1) == 75
    assert attempt.read(tmp_path)[-1]["reason"] == "rank 5: a broken shard"
    (folder / "rank-5.error").write_text(json.dumps({"error": "lr=-1", "time": 0.0, "code": 2}))
    assert stretch(tmp_path, 1) == 2, "torchrun makes 1 of every code"


def test_a_line_that_was_cut_short_harms_no_other(tmp_path: Path) -> None:
    stretch(tmp_path, 75)
    with open(tmp_path / attempt.ATTEMPTS, "a") as file:
        file.write('{"event": "beg')
    stretch(tmp_path, 75, 1)
    assert [event["attempt"] for event in attempt.read(tmp_path)] == [1, 1, 2, 2]


def test_half_a_checkpoint_is_no_step(tmp_path: Path) -> None:
    saved(tmp_path, 20)
    for name in ("step-00000040", "step-00000030.tmp"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert attempt.newest_step(tmp_path) == 20


def test_a_folder_that_another_job_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attempt.begin(tmp_path, "7", 0, "node1", 3) == 0
    assert attempt.begin(tmp_path, "8", 0, "node1", 3, holder="7", state="RUNNING") == 1
    assert "is in use by job 7 (RUNNING)" in capsys.readouterr().err
    assert attempt.begin(tmp_path, "8", 0, "node1", 3) == 1, "taken after the script had looked"
    assert [event["job"] for event in attempt.read(tmp_path)] == ["7"]
    assert attempt.begin(tmp_path, "8", 0, "node1", 3, holder="7", state="") == 0, "7 has left the queue"
    assert attempt.begin(tmp_path, "7", 1, "node1", 3, holder="8", state="RUNNING") == 1


def test_it_starts_without_heavy_imports(tmp_path: Path) -> None:
    code = f"""import sys; from launchers import attempt
attempt.main(['begin', {str(tmp_path)!r}, '--job', '1'])
assert not {{'torch', 'numpy', 'omegaconf', 'typer'}} & set(sys.modules), 'heavy'"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
