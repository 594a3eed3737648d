"""Training through its real main, on real processes: the same numbers however it is split, stopped and continued."""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import math
from pathlib import Path

import numpy as np
import pytest
from groups import (
    checkpoints,
    continue_from,
    failed_group,
    losses,
    rows,
    train_group,
    training_rows,
    validation_rows,
)  # fmt: skip
from processes import run

from refusion_train.checkpoint import store
from refusion_train.config import Config, load
from refusion_train.train.evaluate import evaluate_checkpoint

KEYS = [
    "step", "tokens", "supervised_tokens", "loss", "loss_ar", "loss_mdm", "grad_norm", "lr", "tokens_per_s", "step_s",
    "memory_mb", "epoch", "skipped", "mdm_buckets",
]  # fmt: skip


def test_a_run_reports_and_saves(undisturbed: Config) -> None:
    found = training_rows(undisturbed)
    assert [row["step"] for row in found] == list(range(1, 11))
    assert all(list(row) == KEYS for row in found)
    assert [row["tokens"] for row in found] == [512 * step for step in range(1, 11)]
    assert [row["lr"] for row in found[:2]] == [5e-3, 1e-2] and found[-1]["lr"] == pytest.approx(1e-3)
    for row in found:
        assert row["loss"] == pytest.approx(row["loss_ar"] + row["loss_mdm"])
        assert row["skipped"] == 0 and row["grad_norm"] > 0 and 100 < row["memory_mb"] < 10_000
        assert 0 < row["supervised_tokens"] <= row["tokens"]
        assert row["epoch"] == pytest.approx(row["tokens"] / 16_196)
        assert len(row["mdm_buckets"]) == 10 and any(value is not None for value in row["mdm_buckets"])
    assert checkpoints(undisturbed) == [f"step-{step:08d}" for step in (2, 4, 6, 8, 10)]
    assert [row["step"] for row in validation_rows(undisturbed)] == [0, 4, 8, 10]


def test_validation_falls_and_is_consistent(undisturbed: Config) -> None:
    found = validation_rows(undisturbed)
    names = ["step", "val_nelbo", "val_bits_per_byte", "val_in_slot_ar", "val_left_to_right"]
    assert all(list(row) == names for row in found)
    for name in names[1:]:
        assert found[-1][name] < 0.9 * found[0][name]
    untrained = found[0]
    assert untrained["val_left_to_right"] == pytest.approx(math.log(320), rel=0.02)
    # An untrained model knows nothing, masked or not: the bound of the masked part is the same, up to its noise.
    assert untrained["val_nelbo"] == pytest.approx(math.log(320), rel=0.15)
    # 2310 tokens of 3754 bytes; all but the begin tokens are response.
    assert untrained["val_bits_per_byte"] == pytest.approx(untrained["val_nelbo"] / math.log(2) * 2310 / 3754, rel=0.05)


def test_the_resolved_configuration_is_kept(undisturbed: Config) -> None:
    kept = load(Path(undisturbed.run_dir, "config.yaml"))
    assert kept.model.vocab_size == 320
    assert kept.train == undisturbed.train and kept.data == undisturbed.data


@pytest.mark.parametrize(
    ("count", "micro_batch", "stage"), [(1, 4, 1), (2, 1, 2), (2, 4, 3), (4, 2, 1)], ids=lambda value: str(value)
)
def test_the_split_does_not_matter(
    undisturbed: Config, again: Config, count: int, micro_batch: int, stage: int
) -> None:
    again.train.micro_batch_size, again.parallel.zero_stage = micro_batch, stage
    again.checkpoint.interval, again.data.workers = 1000, count % 3
    train_group(again, count)
    assert losses(again) == pytest.approx(losses(undisturbed), abs=1e-5)
    for mine, theirs in zip(validation_rows(again), validation_rows(undisturbed), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_going_on_with_another_data_parallel_size(undisturbed: Config, again: Config) -> None:
    continue_from(undisturbed, again, 4)
    again.train.micro_batch_size, again.parallel.zero_stage = 4, 2
    printed = train_group(again, 1)
    assert "going on from" in printed and "step-00000004" in printed
    assert losses(again) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert rows(again)[-1] == pytest.approx(rows(undisturbed)[-1], abs=1e-6)
    assert training_rows(again)[-1]["supervised_tokens"] == training_rows(undisturbed)[-1]["supervised_tokens"]
    state = [store.read_state(store.resolve(config.run_dir)) for config in (again, undisturbed)]
    assert state[0]["cursor"] == state[1]["cursor"]


def test_a_curriculum_goes_on_where_it_stopped(undisturbed: Config, again: Config, tmp_path: Path) -> None:
    """Stopped in the middle of all its schedules: every number is the same to the bit; validation is no part of it."""
    schedules = {"ar_weight": [[0, 1.0], [6, 0.25]], "mdm_weight": [[2, 0.0], [5, 2.0]]}
    again.objective = dataclasses.replace(
        again.objective, slot_weights=[[1, [1, 0, 0]], [8, [1, 1, 1]]], ar_probability=0.3, **schedules
    )
    again.train.steps, again.checkpoint.interval = 6, 3
    train_group(again, 2)
    found = training_rows(again)
    for step, row in enumerate(found):
        ar, mdm = (np.interp(step, *np.array(points).T) for points in schedules.values())
        assert row["loss"] == pytest.approx(ar * row["loss_ar"] + mdm * row["loss_mdm"]), f"step {step}"
        assert (row["loss_mdm"] > 0) == (mdm > 0)
    other = copy.deepcopy(again)
    other.run_dir = str(tmp_path / "other" / "run")
    continue_from(again, other, 3)
    assert "changes" not in train_group(other, 2)
    timings = ("tokens_per_s", "step_s", "memory_mb")
    assert [{**row, **dict.fromkeys(timings)} for row in training_rows(other)] == [
        {**row, **dict.fromkeys(timings)} for row in found
    ]
    # Validation masks every document, with the slot sizes that the schedule ends at: those of the other run.
    assert validation_rows(again)[0] == pytest.approx(validation_rows(undisturbed)[0], abs=1e-6)


def test_a_finished_run_says_so(undisturbed: Config, again: Config) -> None:
    continue_from(undisturbed, again, 10)
    before = rows(again)
    assert "is finished: 10 steps" in train_group(again, 2)
    assert rows(again) == before


def test_a_validation_that_was_cut_short_is_made_up_for(undisturbed: Config, again: Config) -> None:
    continue_from(undisturbed, again, 10)
    metrics = Path(again.run_dir, "metrics.jsonl")
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    train_group(again, 2)
    assert rows(again)[-1] == pytest.approx(rows(undisturbed)[-1], abs=1e-6)
    assert len(rows(again)) == len(rows(undisturbed))


def test_more_steps_may_be_added_and_old_checkpoints_go(undisturbed: Config, again: Config) -> None:
    continue_from(undisturbed, again, 10)
    again.train.steps, again.train.lr, again.checkpoint.keep = 12, 2e-3, 2
    printed = train_group(again, 2)
    assert "going on from step-00000010 with changes: train.steps 10 -> 12, train.lr 0.01 -> 0.002" in printed
    assert len(losses(again)) == 12
    assert checkpoints(again) == ["step-00000010", "step-00000012"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 8), ("data.sequence_length", 32), ("train.global_batch_size", 16), ("model.ffn_size", 96)],
)
def test_a_change_that_makes_another_run_is_refused(undisturbed: Config, again: Config, key: str, value: int) -> None:
    continue_from(undisturbed, again, 4)
    owner: object = again
    *sections, name = key.split(".")
    for section in sections:
        owner = getattr(owner, section)
    old = getattr(owner, name)
    setattr(owner, name, value)
    before = rows(again)
    outcome = failed_group(again, 1)
    assert outcome.code == 2 and f"{key}={value} cannot replace {key}={old}" in outcome.error
    assert rows(again) == before


def test_other_data_are_refused(undisturbed: Config, again: Config) -> None:
    continue_from(undisturbed, again, 4)
    again.data.train = again.data.validation
    outcome = failed_group(again, 1)
    assert outcome.code == 2 and "is not the data of this run" in outcome.error


def test_resume_none_refuses_a_run(undisturbed: Config, again: Config) -> None:
    continue_from(undisturbed, again, 4)
    again.checkpoint.resume = "none"
    before = rows(again), checkpoints(again)
    outcome = failed_group(again, 2)
    assert outcome.code == 2 and "holds a run already" in outcome.error and "checkpoint.resume=none" in outcome.error
    assert (rows(again), checkpoints(again)) == before


def test_a_folder_in_use_is_refused(again: Config) -> None:
    Path(again.run_dir).mkdir()
    with open(Path(again.run_dir, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 17 on elsewhere")
        lock.flush()
        outcome = failed_group(again, 2)
    assert outcome.code == 2 and "in use by another training (process 17 on elsewhere)" in outcome.error


@pytest.mark.parametrize(
    ("objective", "validated"),
    [("ar", ["val_left_to_right", "val_bits_per_byte"]), ("mdm", ["val_nelbo", "val_bits_per_byte"])],
)
def test_the_other_objectives(again: Config, objective: str, validated: list[str]) -> None:
    again.objective.name, again.train.precision = objective, "bf16"
    train_group(again, 2)
    first, last = validation_rows(again)[0], validation_rows(again)[-1]
    assert list(first) == ["step", *validated]
    assert last[validated[0]] < 0.9 * first[validated[0]]
    absent = "loss_mdm" if objective == "ar" else "loss_ar"
    assert {row[absent] for row in training_rows(again)} == {0.0}


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("train", None, "data.train is not set"),
        ("train", "/nowhere", "/nowhere"),
        ("validation", "/nowhere", "/nowhere"),
    ],
)
def test_wrong_data_are_one_line(again: Config, key: str, value: str | None, text: str) -> None:
    setattr(again.data, key, value)
    outcome = failed_group(again, 2)
    assert text in outcome.error and not Path(again.run_dir).exists()


def test_a_vocabulary_that_is_too_small_is_refused(again: Config) -> None:
    again.model.vocab_size = 300
    outcome = failed_group(again, 1)
    assert outcome.code == 2 and "model.vocab_size=300 is less than the 320 token ids" in outcome.error


@pytest.mark.parametrize("count", [1, 2])
def test_evaluation_of_a_checkpoint_repeats_the_validation(undisturbed: Config, again: Config, count: int) -> None:
    again.model.vocab_size = None
    results = run(evaluate_checkpoint, count, again, undisturbed.run_dir)
    assert {"step": 10, **results[0]} == pytest.approx(validation_rows(undisturbed)[-1], abs=1e-6)
    assert all(result == results[0] for result in results)
