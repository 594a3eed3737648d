"""The lock on a run folder: who is kept out, and who goes on although it is held."""

from __future__ import annotations

import errno
import fcntl
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from refusion_train.errors import ConfigError
from refusion_train.train import folder as locks


def held(run: Path, stack: ExitStack, text: str) -> None:
    lock: IO[str] = stack.enter_context(open(run / locks.LOCK, "w"))  # noqa: SIM115 - it is one
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(text)
    lock.flush()


def job(monkeypatch: pytest.MonkeyPatch, number: str, start: int) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", number)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(start))
    monkeypatch.setattr(locks, "PATIENCE_S", 0.3)


def test_it_is_given_back_and_says_who_had_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, "12", 3)
    for _ in range(2):
        with ExitStack() as stack:
            locks.hold(tmp_path, stack)
    text = (tmp_path / locks.LOCK).read_text()
    assert text.startswith("process ") and text.endswith(", Slurm job 12 start 3\n")


@pytest.mark.parametrize(
    "text", ["process 1 on a", "process 1 on a, Slurm job 12 start 1", "process 1 on a, Slurm job 11 start 0"]
)
def test_others_are_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Also a second training of the same start, as two commands in one interactive job are."""
    job(monkeypatch, "12", 1)
    with ExitStack() as stack:
        held(tmp_path, stack, text)
        with pytest.raises(ConfigError, match="in use by another training \\(process 1 on a"):
            locks.hold(tmp_path, stack)


def test_a_later_start_of_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job(monkeypatch, "12", 1)
    with ExitStack() as stack:
        held(tmp_path, stack, "process 1 on a, Slurm job 12 start 0")
        locks.hold(tmp_path, stack)
    assert "still locked by an earlier start" in caplog.text


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    with ExitStack() as stack:
        locks.hold(tmp_path, stack)
    assert "has no locks" in caplog.text
