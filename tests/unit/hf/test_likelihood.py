"""Likelihoods of an exported model are those of `refusion evaluate`: the same noise, the same sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from brute_force import MASK, VOCAB, tiny_model

from refusion_train.config import ObjectiveConfig
from refusion_train.data.loader import stratified_noise
from refusion_train.hf.corruption import PASSES, Masking, corrupt, document_key, noise_level
from refusion_train.hf.likelihood import likelihood
from refusion_train.objective import CLEAN, MASKED, make_objective
from refusion_train.objective import noise as hashes
from refusion_train.objective.batch import PackedDocuments

SIZES, WEIGHTS = [2, 4, 8], [1.0, 2.0, 1.0]


def _documents() -> list[tuple[list[int], int]]:
    """Tokens and prompt length; short last slots, one document shorter than a slot, one that is only a prompt."""
    random = np.random.default_rng(0)
    lengths = [(23, 0), (17, 5), (1, 0), (3, 3), (40, 1), (2, 1)]
    return [(random.integers(5, VOCAB, length).tolist(), prompt) for length, prompt in lengths]


def _packed(tokens: list[int], prompt: int, key: int) -> PackedDocuments:
    return PackedDocuments(
        np.array([tokens], np.int32), np.array([0]), np.array([len(tokens)]), np.array([prompt]),
        np.array([key], np.uint64),
    )  # fmt: skip


def _masking(name: str) -> Masking:
    return Masking(name, MASK, tuple(SIZES), tuple(WEIGHTS), 1e-3)


def _objective(name: str) -> Any:
    config = ObjectiveConfig(name=name, slot_sizes=SIZES, slot_weights=WEIGHTS, cross_slot_targets=False)
    return make_objective(config, MASK, 0, backend="numpy")


@pytest.mark.parametrize("name", ["slots", "mdm"])
def test_a_document_is_shown_as_in_training(name: str) -> None:
    differing = 0
    for number, (tokens, prompt) in enumerate(_documents() * 5):
        key = document_key(number, number)
        t = float(noise_level(number % PASSES, number))
        seen = corrupt(tokens, prompt, _masking(name), key, t)
        batch = _objective(name).corrupt(_packed(tokens, prompt, key), t=np.array([t]))
        assert seen.tokens == batch.input_ids[0].tolist()
        assert seen.positions == batch.position_ids[0].tolist()
        assert sorted(seen.masked) == np.flatnonzero(batch.target_kind[0] == MASKED).tolist()
        assert sorted(seen.follows) == np.flatnonzero(batch.target_kind[0] == CLEAN).tolist()
        weights = batch.loss_weight[0][seen.masked]
        assert np.allclose(weights, 1 / seen.p)
        differing += seen.tokens != tokens
    assert differing > 10


def test_keys_and_levels_are_those_of_training() -> None:
    for number, document in [(0, 0), (3, 17), (7, 2**40)]:
        assert document_key(number, document) == int(hashes.document_key(0, number, document, 0))
        documents = np.array([document])
        assert noise_level(number, document) == stratified_noise(number, PASSES)(documents)[0]


@pytest.mark.parametrize("name", ["slots", "mdm"])
def test_the_sums_are_those_of_the_objective(name: str) -> None:
    """By the batches of training and plain cross entropy, pass by pass."""
    model = tiny_model(1, objective=name, slot_sizes=SIZES, slot_weights=WEIGHTS)
    for document, (tokens, prompt) in enumerate(_documents()):
        nelbo = in_slot = 0.0
        for number in range(PASSES):
            t = np.array([noise_level(number, document)])
            batch = _objective(name).corrupt(_packed(tokens, prompt, document_key(number, document)), t=t)
            logits = (
                model(
                    torch.from_numpy(batch.input_ids),
                    position_ids=torch.from_numpy(batch.position_ids),
                    use_cache=False,
                )
                .logits[0]
                .detach()
            )
            entropy = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels[0]), reduction="none")
            nelbo += float((entropy * batch.loss_weight[0] * (batch.target_kind[0] == MASKED)).sum()) / PASSES
            in_slot -= float((entropy * (batch.target_kind[0] == CLEAN)).sum())
        got = model.likelihood(torch.tensor([tokens]), prompt_length=prompt, documents=[document])[0]
        assert got.nelbo == pytest.approx(nelbo, rel=1e-6, abs=1e-9)
        assert got.response_tokens == len(tokens) - prompt
        if name == "slots":
            assert got.in_slot == pytest.approx(in_slot, rel=1e-6, abs=1e-9)
        else:
            assert np.isnan(got.in_slot) and np.isnan(got.left_to_right)


def test_left_to_right_is_what_the_stock_forward_says() -> None:
    from transformers import Qwen3ForCausalLM

    model = tiny_model(1, slot_sizes=SIZES)
    rows = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    padded, whole = model.likelihood(rows, attention_mask=mask, prompt_length=[1, 2])
    for got, tokens, prompt in ((padded, rows[0, 2:], 1), (whole, rows[1], 2)):
        logits = Qwen3ForCausalLM.forward(model, tokens[None]).logits[0].log_softmax(-1)
        expected = sum(logits[i - 1, tokens[i]].item() for i in range(prompt, len(tokens)))
        assert got.left_to_right == pytest.approx(expected) and got.left_to_right_tokens == len(tokens) - prompt
    alone = model.likelihood(rows[:1, 2:], prompt_length=1, documents=[0])[0]
    assert alone == padded
    with pytest.raises(ValueError, match="2 rows"):
        model.likelihood(rows, prompt_length=[1])
    with pytest.raises(ValueError, match="slot_sizes"):
        tiny_model(1).likelihood(rows)


def test_a_language_model_has_left_to_right_only() -> None:
    got = likelihood(tiny_model(0, objective="ar"), [5, 6, 7], 0, _masking("ar"))
    assert got.left_to_right_tokens == 2 and np.isnan(got.nelbo) and np.isnan(got.in_slot)
