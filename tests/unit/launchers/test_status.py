"""`refusion status` from a run folder, with a queue that answers, with none, and with one that does not answer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from launchers import attempt, slurm, status
from refusion_train.cli import run as refusion


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder in the midst of training: 40 of 100 steps."""
    folder = tmp_path / "a run"
    (folder / "checkpoints" / "step-00000030").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000030" / "manifest.json").touch()
    rows = [{"step": n, "loss": 5 - n / 100, "tokens_per_s": 1000.0 + n, "step_s": 60.0} for n in range(1, 41)]
    rows.insert(20, {"step": 20, "val_nelbo": 3.0})
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 41, "lo')
    (folder / "config.yaml").write_text("train: {steps: 100}\n")
    return folder


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put commands of Slurm on PATH that are shell scripts."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def submitted(run: Path, job: str = "12") -> None:
    (run / "slurm").mkdir()
    (run / "slurm" / "submitted.json").write_text(json.dumps({"job": job, "steps": 200}))


def test_a_run_folder_is_enough(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert refusion(["status", str(run)]) == 0
    captured = capsys.readouterr()
    line = captured.out.splitlines()[1]
    assert "40 of 100" in line and "4.6000" in line and "1,020" in line and "30 (" in line
    assert captured.err == ""


def test_the_end_is_expected_by_the_pace_of_late(run: Path) -> None:
    told = status.standing(run, "", "")
    assert told.end is not None and told.end.timestamp() == pytest.approx(time.time() + 60 * 60, abs=60)
    assert (told.step, told.checkpoint, told.attempts, told.last) == (40, 30, 0, "")


def test_the_queue_is_shown(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(run)
    other = "echo '11|RUNNING||node9|1:00'"  # older versions show other jobs too
    programs(tmp_path / "bin", monkeypatch, squeue=f"{other}; echo '12|PENDING|Resources||3:00:00'")
    attempt.begin(run, "12", 0, "node1", 3)
    attempt.end(run, "12", 0, 1, 3)
    assert refusion(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert "PENDING (Resources)" in out and "40 of 200" in out
    assert "attempt 1 ended" in out and "failed (srun ended with code 1; see the log)" in out


@pytest.mark.parametrize("said", ["echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "exit 0"])
def test_a_job_that_has_left(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    submitted(run)
    programs(tmp_path / "bin", monkeypatch, squeue=said)
    assert refusion(["status", str(run)]) == 0
    assert "not in the queue" in capsys.readouterr().out


@pytest.mark.parametrize(
    "said",
    ["sleep 60", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"],
)
def test_no_answer_is_one_line_and_the_folder_is_shown(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    monkeypatch.setattr(slurm, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(slurm.call, "__defaults__", (0.5,))
    submitted(run)
    programs(tmp_path / "bin", monkeypatch, squeue=said)
    assert refusion(["status", str(run), str(run)]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("40 of 200") == 2
    assert len(captured.err.splitlines()) == 1 and "controller does not answer" in captured.err


def test_my_jobs_are_found_by_their_folders(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(run)
    answer = (
        f"case \"$*\" in *--me*) echo '12|{run}/slurm'; echo '13|/home/me' ;; *) echo '12|RUNNING||n1|5:00' ;; esac"
    )
    programs(tmp_path / "bin", monkeypatch, squeue=answer)
    assert refusion(["status"]) == 0
    out = capsys.readouterr().out
    assert out.count("RUNNING on n1, 5:00 left") == 1


@pytest.mark.parametrize(
    ("ratios", "named"),
    [([1.5, 1.4, 1.6], True), ([1.1, 1.1, 1.1], False), ([9.0, None, None], False), ([1.5, None, 1.5], True)],
)
def test_a_slow_rank_is_named_if_it_stays_slow(ratios: list[float | None], named: bool) -> None:
    """None: another rank is the slowest, by nothing."""
    times = {"slowest_host": "n7", "slowest_rank_s": 3.0, "other_ranks_s": 2.0}
    rows = [
        {"step": n, "slowest_rank": 5 if ratio else 1, "slowest_ratio": ratio or 1.01, **times}
        for n, ratio in enumerate(ratios)
    ]
    line = status.slow_rank([{"step": 0}, *rows])
    assert (line == "rank 5 on n7 takes 1.50 times as long as the others: 3 s a step, they take 2 s") is named
    assert bool(line) is named


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusion(["status", str(tmp_path / "nothing")]) == 2
    assert "no run folder" in capsys.readouterr().err
