"""The golden vectors of the paper's code: layouts exactly, losses within 1e-5.

A scripted stand-in for `random.Random` gives out the recorded draws, so that the order of draws is tested as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refusion_train.config import ObjectiveConfig
from refusion_train.objective import CLEAN, IGNORE, MASKED, Batch, PackedDocuments, document_key, make_objective

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden_slots.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
MASK, PAD = GOLDEN["mask_token_id"], GOLDEN["pad_token_id"]


class Script:
    """Gives out one row's recorded draws; refuses any other order of asking."""

    def __init__(self, row: dict[str, Any]):
        self.row = row
        slots = -(-(row["total_len"] - row["prompt_len"]) // row["slot_size"])
        self.uniforms = iter([row["t"]] + [0.0 if slot in row["masked_slots"] else 0.999999 for slot in range(slots)])
        self.asked: list[str] = []

    def choice(self, seq: list[int]) -> int:
        assert not self.asked and self.row["slot_size"] in seq, "the slot size is the first draw"
        self.asked.append("choice")
        return self.row["slot_size"]

    def random(self) -> float:
        assert self.asked in (["choice"], ["choice", "random"]), "uniforms come after the slot size, before the shuffle"
        self.asked = ["choice", "random"]
        return next(self.uniforms)

    def shuffle(self, x: list[int]) -> None:
        assert self.asked == ["choice", "random"] and next(self.uniforms, None) is None, "the shuffle is the last draw"
        self.asked.append("shuffle")
        assert sorted(x) == sorted(self.row["clean_order"]), "only clean slots are shuffled"
        x[:] = self.row["clean_order"]


def corrupt(case: dict[str, Any], **options: Any) -> tuple[Batch, np.ndarray]:
    rows, width = len(case["rows"]), case["seq_len"]
    packed = PackedDocuments(
        tokens=np.array(case["token_ids"], np.int32),
        starts=np.arange(rows, dtype=np.int64) * width,
        lengths=np.array([row["total_len"] for row in case["rows"]], np.int64),
        prompts=np.array([row["prompt_len"] for row in case["rows"]], np.int64),
        keys=np.zeros(rows, np.uint64),
    )
    config = ObjectiveConfig(
        rng="reference", cross_slot_targets=False, normalization="micro_batch", eps=GOLDEN["eps"], **options
    )
    batch = Batch.empty(rows, width)
    scripts = [Script(row) for row in case["rows"]]
    p = make_objective(config, MASK, PAD).corrupt_reference(batch, packed, scripts)
    assert all(script.asked == ["choice", "random", "shuffle"] for script in scripts)
    return batch, p


def losses(batch: Batch, logits: np.ndarray) -> tuple[float, float]:
    """AR and MDM parts from float64 cross entropies, our weights and our normalisers; the batch is all there is."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    label = np.where(batch.labels == IGNORE, 0, batch.labels)
    weighted = -np.take_along_axis(log_probability, label[..., None], -1)[..., 0] * batch.loss_weight
    clean, _, documents = batch.counts.sum(0)
    parts = (
        (weighted[batch.target_kind == CLEAN].sum(), clean),
        (weighted[batch.target_kind == MASKED].sum(), documents),
    )
    ar, mdm = (float(total / count) if count else 0.0 for total, count in parts)
    return ar, mdm


@pytest.mark.parametrize("name", CASES)
def test_layout(name: str) -> None:
    case = CASES[name]
    batch, p = corrupt(case)
    expected = {key: np.array(value) for key, value in case["expected"].items()}
    np.testing.assert_array_equal(batch.input_ids, expected["input_ids"])
    np.testing.assert_array_equal(batch.labels, expected["labels"])
    np.testing.assert_array_equal(batch.target_kind == MASKED, expected["masked"])
    np.testing.assert_array_equal(batch.target_kind != 0, expected["labels"] != IGNORE)
    real = batch.document_ids == 0
    np.testing.assert_array_equal(real, case["attention_mask"])
    np.testing.assert_array_equal(batch.position_ids[real], expected["position_ids"][real])
    assert not batch.position_ids[~real].any()
    np.testing.assert_array_equal(p.astype(np.float32), expected["p_mask"].astype(np.float32))  # theirs is float32


@pytest.mark.parametrize("name", CASES)
def test_losses(name: str) -> None:
    case = CASES[name]
    batch, _ = corrupt(case)
    ar, mdm = losses(batch, np.array(case["logits"], np.float64))
    expected = case["loss"]
    without_clean_target = expected["ar"] is None
    assert ar == 0 if without_clean_target else abs(ar - expected["ar"]) < 1e-5
    assert abs(mdm - expected["mdm"]) < 1e-5
    if not without_clean_target:
        assert abs(ar + mdm - expected["total"]) < 1e-5


def test_two_cases_have_no_clean_target() -> None:
    assert sum(case["loss"]["ar"] is None for case in CASES.values()) == 2


def _rows(seed: int) -> PackedDocuments:
    rng = np.random.default_rng(0)
    return PackedDocuments(
        rng.integers(5, 99, (2, 64)).astype(np.int32),
        np.array([0, 20, 64, 74], np.int64),
        np.array([20, 44, 10, 40], np.int64),
        np.array([2, 0, 10, 4], np.int64),
        document_key(seed, 0, np.arange(4), 0),
    )


def test_a_run_with_the_reference_order_is_reproducible() -> None:
    """One generator per row, seeded by its first document's key: a row does not depend on the rows beside it."""
    config = ObjectiveConfig(rng="reference", slot_sizes=[4, 8])
    objective = make_objective(config, MASK, PAD)
    packed = _rows(1)
    batch = objective.corrupt(packed)
    assert batch.equals(make_objective(config, MASK, PAD, "numpy").corrupt(packed))
    assert not batch.equals(objective.corrupt(_rows(2)))
    for row in range(2):
        alone, *_ = packed.some_rows(row, row + 1)
        assert objective.corrupt(alone).equals(batch.rows(row, row + 1)), f"row {row}"
    assert not batch.target_kind[1, :10].any()  # a document that is only a prompt
    assert batch.counts[:, 1:].tolist() == [[62, 2], [36, 1]]


def test_reference_order_takes_weights_and_a_noise_grid() -> None:
    config = ObjectiveConfig(rng="reference", slot_sizes=[4, 7], slot_weights=[0.0, 1.0], cross_slot_targets=False)
    batch = make_objective(config, MASK, PAD).corrupt(_rows(1), np.array([0.0, 1.0, 0.5, 0.5]))
    second = batch.document_ids[0] == 1
    assert (batch.target_kind[0][second] == MASKED).all()
    first = batch.target_kind[0][~second]
    assert (first[:2] == 0).all() and (first == 0).sum() == 2 + 3  # slots of 7, 7 and 4 tokens end without a target
