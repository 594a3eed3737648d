"""Metrics on disk: one row a step, none twice after a resume, valid JSON whatever the numbers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from refusion_train import telemetry
from refusion_train.config import Config
from refusion_train.errors import DataError, TrainingError
from refusion_train.telemetry import Telemetry


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config(run_dir=str(tmp_path))
    config.train.steps = 10
    config.train.tensorboard = False
    return config


def row(step: int, loss: float = 1.0) -> dict:
    return {
        "step": step, "tokens": step * 10, "supervised_tokens": step, "loss": loss, "loss_ar": 0.0, "loss_mdm": loss,
        "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 5.0, "step_s": 2.0, "memory_mb": 3.0, "mdm_buckets": [1.0, None],
    }  # fmt: skip


def rows(config: Config) -> list[dict]:
    return [json.loads(line) for line in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]


def test_a_resume_cuts_what_will_come_again(config: Config) -> None:
    with Telemetry(config, first_step=0, active=True) as reports:
        for step in (1, 2, 3):
            reports.step(row(step))
            reports.validation({"step": step, "val_nelbo": 1.0})
    file = Path(config.run_dir, "metrics.jsonl")
    file.write_text(file.read_text() + '{"step": 2, "lo')  # killed in the midst of a row
    with Telemetry(config, first_step=2, active=True) as reports:
        reports.step(row(3, loss=7.0))
    assert [(entry["step"], "loss" in entry) for entry in rows(config)] == [
        (1, True), (1, False), (2, True), (2, False), (3, True)
    ]  # fmt: skip
    assert rows(config)[-1]["loss"] == 7.0


def test_a_start_from_the_beginning_cuts_everything(config: Config) -> None:
    with Telemetry(config, first_step=0, active=True) as reports:
        reports.step(row(1))
    with Telemetry(config, first_step=0, active=True):
        pass
    assert rows(config) == []


def test_what_is_not_a_number_is_null(config: Config) -> None:
    with Telemetry(config, first_step=0, active=True) as reports:
        reports.step({**row(1, loss=float("nan")), "grad_norm": float("inf")})
    assert "NaN" not in Path(config.run_dir, "metrics.jsonl").read_text()
    assert rows(config)[0]["loss"] is None and rows(config)[0]["grad_norm"] is None


def test_a_disk_that_takes_no_more_is_one_line(config: Config) -> None:
    with Telemetry(config, first_step=0, active=True) as reports:
        reports.step(row(1))
        with open("/dev/full", "wb", buffering=0) as full:
            reports._rows.close()
            reports._rows = full
            with pytest.raises(TrainingError, match="No space left on device") as caught:
                reports.step(row(2))
    assert config.run_dir in str(caught.value) and "\n" not in str(caught.value)
    assert [entry["step"] for entry in rows(config)] == [1]


def test_only_the_active_rank_writes(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    with Telemetry(config, first_step=0, active=False) as reports:
        reports.step(row(1))
        reports.validation({"step": 1, "val_nelbo": 1.0})
        reports.say("text")
    assert not list(Path(config.run_dir).iterdir())
    assert capsys.readouterr().out == ""


def test_validations_can_be_found_again(config: Config) -> None:
    assert not telemetry.has_validation(config.run_dir, 0)
    with Telemetry(config, first_step=0, active=True) as reports:
        reports.step(row(1))
        reports.validation({"step": 2, "val_nelbo": 1.0})
    assert [telemetry.has_validation(config.run_dir, step) for step in (1, 2)] == [False, True]


def test_plain_lines_without_a_terminal(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config.train.log_interval = 3
    with Telemetry(config, first_step=0, active=True) as reports:
        for step in range(1, 11):
            reports.step(row(step))
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["3/10", "6/10", "9/10", "10/10"]
    assert "loss 1.0000" in printed[0] and "5 tokens/s" in printed[0]


def test_a_progress_bar_on_a_terminal(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Telemetry(config, first_step=4, active=True) as reports:
        reports.step(row(5, loss=2.5))
        reports.say("a line")
    assert "5/10" in terminal.getvalue() and "2.5000" in terminal.getvalue() and "a line" in terminal.getvalue()


def test_tensorboard_shows_each_step_once(config: Config) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config.train.tensorboard = True
    for first, last, loss in ((0, 4, 1.0), (2, 6, 5.0)):
        with Telemetry(config, first_step=first, active=True) as reports:
            for step in range(first + 1, last + 1):
                reports.step(row(step, loss))
            reports.validation({"step": last, "val_nelbo": loss})
    events = EventAccumulator(str(Path(config.run_dir, "tensorboard")))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 1.0), (3, 5.0), (4, 5.0), (5, 5.0), (6, 5.0)]
    assert "mdm_buckets/0" in events.Tags()["scalars"] and "mdm_buckets/1" not in events.Tags()["scalars"]
    assert [(event.step, event.value) for event in events.Scalars("validation/nelbo")][-1] == (6, 5.0)


def test_an_error_is_left_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry.leave_error(ValueError("nowhere to leave it"))
    monkeypatch.setenv(telemetry.ERROR_FILE, str(tmp_path / "error"))
    telemetry.leave_error(DataError("shard 3"))
    left = json.loads((tmp_path / "error").read_text())
    assert left["expected"] and left["error"] == "shard 3" and not left["consequence"]
    telemetry.leave_error(ValueError("first\nsecond"), consequence=True)
    left = json.loads((tmp_path / "error").read_text())
    assert not left["expected"] and left["error"] == "ValueError: first" and left["consequence"]


def test_warnings_are_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.show_warnings()
    telemetry.show_warnings()
    logging.getLogger("refusion_train.checkpoint.store").warning("checkpoint %s is odd", "x")
    assert capsys.readouterr().err == "warning: checkpoint x is odd\n"


def test_memory_is_in_megabytes() -> None:
    assert 20 < telemetry.peak_memory_mb() < 20_000


def test_what_was_read_of_each_source_is_told_now_and_then(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config.train.steps, config.train.tensorboard = 120, True
    sources = {"web": {"tokens": 70, "share": 0.7, "epochs": 0.25}, "code": {"tokens": 30, "share": 0.3, "epochs": 2.0}}
    with Telemetry(config, first_step=0, active=True) as reports:
        for step in range(1, 121):
            reports.step({**row(step), "sources": sources})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("read so far")]
    assert lines == ["read so far: web 70.0% (0.25 epochs), code 30.0% (2 epochs)"] * 3  # steps 50, 100 and 120
    assert rows(config)[-1]["sources"] == sources
    events = EventAccumulator(config.run_dir + "/tensorboard")
    events.Reload()
    assert events.Scalars("sources/web/share")[-1].value == pytest.approx(0.7)
    assert events.Scalars("sources/code/epochs")[-1].step == 120
