"""Schedules against their formulas, and which parameters decay."""

from __future__ import annotations

import math

import pytest
from torch import nn

from refusion_train.config import TrainConfig
from refusion_train.train.optim import learning_rate, param_groups


def settings(schedule: str, **changes) -> TrainConfig:
    values = {"steps": 100, "warmup_steps": 10, "lr": 2.0, "min_lr_ratio": 0.1, "decay_fraction": 0.2, **changes}
    return TrainConfig(schedule=schedule, **values)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warmup_is_linear_and_never_zero(schedule: str) -> None:
    train = settings(schedule)
    assert [learning_rate(train, step) for step in (0, 1, 4, 9)] == pytest.approx([0.2, 0.4, 1.0, 2.0])
    assert learning_rate(settings(schedule, warmup_steps=0), 0) == pytest.approx(2.0, rel=1e-3)


def test_cosine() -> None:
    train = settings("cosine")
    assert learning_rate(train, 54) == pytest.approx(0.2 + 1.8 / 2)  # half-way between warm-up and end
    assert learning_rate(train, 24) == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * 15 / 90)) / 2)
    assert learning_rate(train, 99) == pytest.approx(0.2)
    assert learning_rate(train, 500) == pytest.approx(0.2)
    rates = [learning_rate(train, step) for step in range(9, 100)]
    assert rates == sorted(rates, reverse=True)


def test_warmup_stable_decay() -> None:
    train = settings("wsd")
    assert {learning_rate(train, step) for step in range(9, 80)} == {2.0}
    assert learning_rate(train, 89) == pytest.approx(1.1)  # half of the last 20 steps
    assert learning_rate(train, 94) == pytest.approx(2.0 - 1.8 * 15 / 20)
    assert learning_rate(train, 99) == pytest.approx(0.2)
    assert learning_rate(train, 500) == pytest.approx(0.2)


def test_wsd_never_decays_within_the_warmup() -> None:
    train = settings("wsd", decay_fraction=1.0)
    assert learning_rate(train, 9) == pytest.approx(2.0)
    assert learning_rate(train, 54) == pytest.approx(1.1)
    assert {learning_rate(settings("wsd", decay_fraction=0.0), step) for step in range(9, 100)} == {2.0}


def test_constant() -> None:
    assert {learning_rate(settings("constant"), step) for step in range(9, 300)} == {2.0}


def test_a_warmup_longer_than_the_run() -> None:
    assert learning_rate(settings("cosine", warmup_steps=200), 99) == pytest.approx(1.0)
    assert learning_rate(settings("cosine", warmup_steps=100), 99) == pytest.approx(2.0)


def test_matrices_decay_and_vectors_do_not() -> None:
    first, second = nn.Sequential(nn.Embedding(4, 2), nn.LayerNorm(2)), nn.Linear(2, 3)
    second.weight.requires_grad_(False)
    tied = nn.Linear(2, 4, bias=False)
    tied.weight = first[0].weight
    groups = param_groups([first, second, tied], 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [id(p) for p in groups[0]["params"]] == [id(first[0].weight)]
    assert [id(p) for p in groups[1]["params"]] == [id(p) for p in (first[1].weight, first[1].bias, second.bias)]


def test_an_empty_group_is_left_out() -> None:
    assert len(param_groups([nn.Embedding(4, 2)], 0.1)) == 1
