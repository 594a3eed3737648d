"""What goes wrong in a long run: kills at any moment, signals, damaged checkpoints, a full disk, numbers that explode.

Whatever happens, the next start goes on from the last good checkpoint and ends as if nothing had happened.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from groups import (
    STOP_SIGNALS,
    TIMEOUT_S,
    Group,
    Outcome,
    checkpoints,
    continue_from,
    count_rows,
    failed_group,
    losses,
    rows,
    train_group,
    training_rows,
    validation_rows,
    wait_until,
)  # fmt: skip
from torch.distributed.checkpoint.filesystem import FileSystemReader

from refusion_train.checkpoint import store
from refusion_train.config import Config, to_yaml

ROOT = Path(__file__).resolve().parents[2]


def same_as(undisturbed: Config, config: Config) -> None:
    """The run has ended like the undisturbed one: every loss once, the same validation, the same checkpoint."""
    assert losses(config) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert validation_rows(config)[-1] == pytest.approx(validation_rows(undisturbed)[-1], abs=1e-6)
    assert checkpoints(config)[-1] == checkpoints(undisturbed)[-1]


# -------------------------------------------------------------------------------------------- the command, killed


class Command:
    """`refusion train --nproc 2` in a process of its own."""

    def __init__(self, config: Config, folder: Path) -> None:
        file = folder / "config.yaml"
        file.write_text(to_yaml(config))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "refusion_train.cli", "train", str(file), "--nproc", "2"],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait_until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"the command has ended, or hangs: {self.process.communicate()}")
            time.sleep(0.01)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, in order."""
        ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(self.process.pid).children()}
        return [ranks[rank] for rank in sorted(ranks)]

    def end(self) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        output, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, output, errors


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_killed_rank_takes_the_command_down_and_the_next_goes_on(
    undisturbed: Config, again: Config, tmp_path: Path
) -> None:
    continue_from(undisturbed, again, 2)
    again.train.steps = 100_000  # whatever step it is killed in
    again.train.validation_interval, again.checkpoint.interval = 0, 100_000
    already = count_rows(again)
    command = Command(again, tmp_path)
    command.wait_until(lambda: count_rows(again) > already)
    ranks = command.ranks()
    assert len(ranks) == 2
    began = time.monotonic()
    ranks[1].kill()
    code, _, errors = command.end()
    assert code == 1 and time.monotonic() - began < 30
    assert all(gone(rank) for rank in ranks)
    assert "rank 1 was killed by signal 9, SIGKILL" in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors
    again.train, again.checkpoint = undisturbed.train, undisturbed.checkpoint
    train_group(again, 2)
    same_as(undisturbed, again)


def test_signals_to_the_command_save_and_exit_with_75(undisturbed: Config, again: Config, tmp_path: Path) -> None:
    continue_from(undisturbed, again, 2)
    again.checkpoint.interval = 1000
    again.train.validation_interval = 1  # gives the signal time to come before the last step
    already = count_rows(again)
    command = Command(again, tmp_path)
    command.wait_until(lambda: count_rows(again) > already)
    ranks = command.ranks()
    for _ in range(3):
        command.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    code, output, errors = command.end()
    assert code == 75, (output, errors)
    assert "SIGTERM: finishing the step, then saving" in errors and "run again to go on" in output
    assert all(gone(rank) for rank in ranks)
    assert 2 <= len(losses(again)) < 10 and checkpoints(again)[-1] == f"step-{len(losses(again)):08d}"
    train_group(again, 2)
    same_as(undisturbed, again)


# ------------------------------------------------------------------------------------------- the group, killed


def test_kills_at_any_moment(undisturbed: Config, again: Config) -> None:
    """In steps, validations and checkpoint writes, wherever it hits; with a checkpoint after every step."""
    again.checkpoint.interval, again.checkpoint.keep = 1, 3
    rng = random.Random(1)
    kills = 0
    while kills < 5 and count_rows(again) < 12:  # of 14 at the end
        known = count_rows(again)
        group = Group(again, 2)
        wait_until(lambda known=known: count_rows(again) > known, group)
        time.sleep(rng.uniform(0.0, 0.1))
        group.kill()
        kills += 1
    assert kills >= 2
    train_group(again, 2)
    same_as(undisturbed, again)


def test_a_kill_in_the_midst_of_a_checkpoint_write(undisturbed: Config, again: Config) -> None:
    unfinished = Path(again.run_dir, "checkpoints", "step-00000006.tmp")
    for _ in range(5):  # it takes a few milliseconds only
        continue_from(undisturbed, again, 4)
        group = Group(again, 2)
        wait_until(lambda: unfinished.exists() or unfinished.with_suffix("").exists(), group, every_s=0.0)
        group.signal(signal.SIGSTOP)
        hit = unfinished.exists()
        group.kill()
        if hit:
            break
        shutil.rmtree(again.run_dir)
    assert checkpoints(again)[-1] == "step-00000006.tmp", "the write was over before it could be stopped"
    train_group(again, 2)
    same_as(undisturbed, again)
    assert not list(Path(again.run_dir, "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_one_rank_stops_all(undisturbed: Config, again: Config, number: signal.Signals) -> None:
    continue_from(undisturbed, again, 2)
    again.checkpoint.interval = 1000
    again.train.validation_interval = 1  # gives the signal time to come before the last step
    already = count_rows(again)
    group = Group(again, 2)
    wait_until(lambda: count_rows(again) > already, group)
    for _ in range(3):
        group.signal(number, rank=1)
    assert group.wait() == [Outcome(75)] * 2
    stopped = len(losses(again))
    assert 2 <= stopped < 10 and checkpoints(again)[-1] == f"step-{stopped:08d}"
    train_group(again, 1)
    same_as(undisturbed, again)


# ------------------------------------------------------------------------------------------------------- the disk


def test_a_damaged_checkpoint_is_passed_over(undisturbed: Config, again: Config) -> None:
    continue_from(undisturbed, again, 6)
    damaged = next(Path(again.run_dir, "checkpoints", "step-00000006").glob("__1_*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 64
    damaged.write_bytes(content)
    printed = train_group(again, 2)
    warnings = [line for line in printed.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and "step-00000006" in warnings[0] and damaged.name in warnings[0]
    assert "going on from" in printed and "step-00000004" in printed
    same_as(undisturbed, again)


def test_no_good_checkpoint_is_an_error(undisturbed: Config, again: Config) -> None:
    continue_from(undisturbed, again, 2)
    Path(again.run_dir, "checkpoints", "step-00000002", "manifest.json").unlink()
    before = rows(again)
    outcome = failed_group(again, 2)
    assert outcome.code == 1 and "none of the 1 checkpoints" in outcome.error
    assert rows(again) == before


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 3 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system to fill: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_one_line_and_nothing_is_lost(undisturbed: Config, again: Config, small_disk: Path) -> None:
    """The disk fills while the second rank writes its part; space is made, and the run goes on."""
    again.run_dir = str(small_disk / "run")
    continue_from(undisturbed, again, 2)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 300_000))
    outcome = failed_group(again, 2)
    assert outcome.code == 1
    assert "step-00000004" in outcome.error and "No space left on device" in outcome.error
    assert checkpoints(again) == ["step-00000002"]
    ballast.unlink()
    again.checkpoint.keep = 2
    train_group(again, 2)
    assert losses(again) == pytest.approx(losses(undisturbed), abs=1e-6)


def no_large_files() -> None:
    """The second rank cannot write its part of a checkpoint."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_rank_that_cannot_write_stops_all(undisturbed: Config, again: Config, asynchronous: bool) -> None:
    continue_from(undisturbed, again, 2)
    again.checkpoint.asynchronous = asynchronous
    group = Group(again, 2, no_large_files)
    outcomes = group.wait()
    assert outcomes[0] == outcomes[1] and outcomes[0].code == 1, f"{outcomes}\n{group.output}"
    assert "step-00000004: rank 1: File too large" in outcomes[0].error and "\n" not in outcomes[0].error
    assert checkpoints(again) == ["step-00000002"] and "saved" not in group.output
    assert len(losses(again)) < 10


def endless_write() -> None:
    """The first rank never gets its part of a checkpoint onto the disk."""
    if os.environ["RANK"] == "0":
        os.fsync = lambda _: time.sleep(1000)


def test_a_rank_that_dies_during_a_save_takes_the_others_along(undisturbed: Config, again: Config) -> None:
    again.checkpoint.interval, again.train.steps, again.train.validation_interval = 2, 100_000, 0
    group = Group(again, 2, endless_write)
    wait_until(lambda: checkpoints(again) == ["step-00000002.tmp"] if count_rows(again) > 2 else False, group)
    began = time.monotonic()
    group.signal(signal.SIGKILL, rank=1)
    first, second = group.wait()
    assert second.code == -signal.SIGKILL
    assert first.code == 1 and "another process of the group has gone" in first.error
    assert time.monotonic() - began < 30
    again.train.steps, again.train.validation_interval = undisturbed.train.steps, undisturbed.train.validation_interval
    train_group(again, 2)
    same_as(undisturbed, again)


# ------------------------------------------------------------------------------------------------- the numbers


def test_steps_that_are_not_finite_are_skipped_and_in_the_end_fatal(again: Config) -> None:
    again.train.lr, again.train.warmup_steps, again.train.max_bad_steps = 1e36, 0, 3
    again.train.validation_interval = 0
    group = Group(again, 2)
    outcomes = group.wait()
    assert {outcome.code for outcome in outcomes} == {1}
    found = training_rows(again)
    first_bad = next(row["step"] for row in found if row["skipped"])
    assert [row["skipped"] for row in found] == [max(0, row["step"] - first_bad + 1) for row in found]
    assert all(row["grad_norm"] is None for row in found if row["skipped"])
    for outcome in outcomes:
        assert f"step {first_bad + 2}: loss or gradient is not finite" in outcome.error
        assert "documents" in outcome.error and "train.max_bad_steps=3" in outcome.error
    warnings = [line for line in group.output.splitlines() if line.startswith("warning:")]
    assert [f"step {first_bad + i}:" in line for i, line in enumerate(warnings)] == [True, True]


def poison_one_step() -> None:
    """The second step of this process has infinite weights on rank 1."""
    from refusion_train.train import step

    weigh, calls = step.weigh, []

    def poisoned(*arguments: Any) -> list[Any]:
        calls.append(1)
        batches = weigh(*arguments)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            batches[0].weights[:1] = float("inf")
        return batches

    step.weigh = poisoned


def weights(config: Config, step: int) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint."""
    folder = Path(config.run_dir, "checkpoints", store.step_name(step))
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in described.items()}
    store.load(folder, tensors)
    return tensors


def test_a_skipped_step_changes_nothing(undisturbed: Config, again: Config) -> None:
    """One loss on one rank is not finite: no rank updates, and the run goes on."""
    continue_from(undisturbed, again, 2)
    again.checkpoint.interval = 1
    group = Group(again, 2, poison_one_step)
    assert group.wait() == [Outcome(0)] * 2, group.output
    found = training_rows(again)
    assert [row["skipped"] for row in found] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert found[3]["loss"] is None and found[3]["grad_norm"] is None and found[4]["loss"] is not None
    assert found[3]["tokens"] == undisturbed.train.global_batch_size * 64 * 4  # the data are used up all the same
    before, after, later = (weights(again, step) for step in (3, 4, 5))
    assert before.keys() == after.keys() and len(before) > 20
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(torch.equal(after[name], later[name]) for name in before)
    warning = next(line for line in group.output.splitlines() if line.startswith("warning: step 4:"))
    assert "data-parallel rank 1: documents" in warning and "data-parallel rank 0" not in warning
