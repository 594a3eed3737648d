"""Weights of targets: normalised over the global batch, however it is split; nothing is ever divided by 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from refusion_train.config import ObjectiveConfig
from refusion_train.model.loss import STAT_NAMES
from refusion_train.objective.batch import CLEAN, MASKED, NONE, Batch
from refusion_train.schedules import LAST, objective_at
from refusion_train.train.step import bucket_losses, kind_scales, losses, weigh

CPU = torch.device("cpu")


def batch_of(kinds: list[list[int]], counts: list[list[float]], weight: float = 1.0) -> Batch:
    target_kind = np.array(kinds, np.uint8)
    batch = Batch.empty(*target_kind.shape)
    batch.input_ids[:] = 5
    batch.position_ids[:] = np.arange(target_kind.shape[1])
    batch.document_ids[:] = 0
    batch.target_kind[:] = target_kind
    batch.labels[:] = np.where(target_kind == NONE, -100, 7)
    batch.loss_weight[:] = np.where(target_kind == NONE, 0.0, weight)
    batch.noise_bucket[:] = 0
    batch.counts[:] = np.array(counts, np.float64)
    return batch


def step_of(*micro_batches: Batch) -> Any:
    return SimpleNamespace(micro_batches=list(micro_batches))


def weights(devices: list[Any]) -> list[float]:
    return [weight for batch in devices for weight in batch.weights.tolist()]


def test_scales_by_normalization() -> None:
    counts = np.array([8.0, 20.0, 4.0])
    for normalization, masked in (("token", 20.0), ("document", 4.0), ("micro_batch", 4.0)):
        objective = ObjectiveConfig(normalization=normalization, ar_weight=2.0, mdm_weight=3.0)
        scales = kind_scales(objective, counts)
        assert scales.dtype == np.float32
        assert scales.tolist() == pytest.approx([0.0, 2.0 / 8.0, 3.0 / masked])


@pytest.mark.parametrize("normalization", ["token", "document", "micro_batch"])
def test_a_part_without_targets_is_zero(normalization: str) -> None:
    objective = ObjectiveConfig(normalization=normalization)
    assert kind_scales(objective, np.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    [device] = weigh(step_of(batch_of([[NONE, MASKED]], [[0, 1, 1]])), objective, np.array([0.0, 1.0, 1.0]), 1, CPU)
    assert device.weights.tolist() == [1.0]
    [device] = weigh(step_of(batch_of([[NONE, NONE]], [[0, 0, 0]])), objective, np.zeros(3), 1, CPU)
    assert device.weights.tolist() == []


def test_weights_do_not_depend_on_the_split() -> None:
    kinds = [[CLEAN, MASKED, NONE], [CLEAN, CLEAN, MASKED], [MASKED, MASKED, MASKED], [NONE, NONE, CLEAN]]
    counts = [[1, 2, 1], [2, 3, 2], [0, 3, 1], [1, 1, 1]]
    total = np.array(counts, np.float64).sum(axis=0)
    whole, objective = batch_of(kinds, counts, weight=1.5), ObjectiveConfig(ar_weight=0.5, mdm_weight=2.0)
    together = weights(weigh(step_of(whole), objective, total, 1, CPU))
    apart = weights(weigh(step_of(*(whole.rows(i, i + 1) for i in range(4))), objective, total, 1, CPU))
    assert together == apart
    assert together[:2] == pytest.approx([1.5 * 0.5 / 4, 1.5 * 2.0 / 9])


def test_micro_batch_means_are_averaged() -> None:
    objective = ObjectiveConfig(normalization="micro_batch")
    first, second = batch_of([[CLEAN, CLEAN]], [[2, 2, 1]]), batch_of([[MASKED, CLEAN]], [[1, 2, 1]])
    got = weights(weigh(step_of(first, second), objective, np.array([99.0, 99.0, 99.0]), 2, CPU))
    assert got == pytest.approx([1 / 2 / 4, 1 / 2 / 4, 1 / 1 / 4, 1 / 1 / 4])  # 2 micro-batches on each of 2 ranks


def test_parts_are_reported_without_their_weights() -> None:
    totals = dict.fromkeys(STAT_NAMES, 0.0) | {"loss": 7.0, "weighted_clean": 1.0, "weighted_masked": 6.0}
    objective = ObjectiveConfig(ar_weight=0.5, mdm_weight=3.0)
    assert losses(totals, objective) == {"loss": 7.0, "loss_ar": 2.0, "loss_mdm": 2.0}
    assert losses(totals, ObjectiveConfig(ar_weight=0.0, mdm_weight=0.0)) == {
        "loss": 7.0, "loss_ar": 0.0, "loss_mdm": 0.0
    }  # fmt: skip


def test_weights_of_a_step_are_those_of_the_schedule() -> None:
    """An independent interpolation gives the factors at every step; constant ones give the bits of a number."""
    ar, mdm = [[0, 0.0], [4, 0.3], [10, 1.0]], [[6, 2.0], [8, 0.5]]
    objective, counts = ObjectiveConfig(ar_weight=ar, mdm_weight=mdm), np.array([8.0, 20.0, 4.0])
    for step in range(13):
        wanted = [np.interp(step, [at for at, _ in points], [value for _, value in points]) for points in (ar, mdm)]
        got = kind_scales(objective_at(objective, step), counts)
        assert got.tolist() == pytest.approx([0.0, wanted[0] / 8, wanted[1] / 20], rel=1e-6)
    assert objective_at(objective, LAST) == ObjectiveConfig(ar_weight=1.0, mdm_weight=0.5)
    for given in ([[3, 0.7]], [[0, 0.7], [5, 0.7]]):
        now = objective_at(ObjectiveConfig(ar_weight=given, slot_weights=[[0, [1, 2, 3, 4.1]], [9, [1, 2, 3, 4.1]]]), 4)
        assert now == ObjectiveConfig(ar_weight=0.7, slot_weights=[1, 2, 3, 4.1])
    plain = ObjectiveConfig(slot_weights=[1, 2, 3, 4])
    assert objective_at(plain, 3) is plain


def test_buckets_are_means_and_empty_ones_are_none() -> None:
    totals = dict.fromkeys(STAT_NAMES, 0.0) | {"bucket_ce_3": 6.0, "bucket_count_3": 4.0}
    assert bucket_losses(totals) == [None, None, None, 1.5, None, None, None, None, None, None]
    totals["bucket_ce_3"] = float("nan")
    assert bucket_losses(totals)[3] is None
