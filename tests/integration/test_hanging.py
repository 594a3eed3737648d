"""A rank that hangs in the middle of training: with train.timeout_minutes the whole group ends, and can go on."""

from __future__ import annotations

import time

import pytest
from groups import Group, losses, train_group

from refusion_train.config import Config


def hang_on_rank_1() -> None:
    """Rank 1 waits for ever before its fifth step."""
    import os

    from refusion_train.train import loop

    if os.environ["RANK"] != "1":
        return
    step, done = loop.train_step, []

    def hanging(*arguments: object) -> object:
        done.append(1)
        if len(done) == 5:
            time.sleep(600)
        return step(*arguments)  # type: ignore[arg-type]

    loop.train_step = hanging  # type: ignore[assignment]


def test_a_rank_that_hangs_ends_the_group(undisturbed: Config, again: Config) -> None:
    again.train.timeout_minutes = 15 / 60
    group = Group(again, 2, hang_on_rank_1)
    assert [outcome.code for outcome in group.wait()] == [1, 1]
    for log in group._logs:
        assert "no step was completed for" in log.read_text(), "both ranks show their stacks before either ends"
    assert "in train_step" in group.output, "rank 0 shows where it waits"
    assert "train_step" in group._logs[1].read_text() or "hanging" in group._logs[1].read_text()
    again.train.timeout_minutes = None
    train_group(again, 2)
    assert losses(again) == pytest.approx(losses(undisturbed), abs=1e-6)
