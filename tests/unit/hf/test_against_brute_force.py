"""The decoders with cache against decoders that recompute everything, on random models in float64.

Tokens and numbers of forwards must be identical. Covers prompts of every length, end tokens anywhere in a slot,
both corrections, exact and concatenated keys, serial blocks, q/k norm and none.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from brute_force import MASK, VOCAB, BruteForce, dense_logits, tiny_model
from transformers import Qwen3ForCausalLM

TOKENS = [token for token in range(VOCAB) if token != MASK]
SEEN: Counter[str] = Counter()


def _case(seed: int) -> tuple[Any, list[int], tuple[int, ...], int, dict[str, Any]]:
    rng = random.Random(seed)
    model = tiny_model(seed, sharpness=rng.choice([0.6, 0.8, 1.0]), family=rng.choice(["qwen3", "llama"]))
    size, blocks = rng.choice([1, 2, 4, 5]), rng.choice([1, 1, 2])
    region = size * blocks * rng.choice([1, 2, 3])
    prompt = [rng.choice(TOKENS) for _ in range(rng.choice([0, 1, 5, 9]))]
    ends = tuple(rng.sample(TOKENS, rng.choice([0, 1, 2, 3])))
    settings = {
        "slot_size": size,
        "num_blocks": blocks,
        "slot_threshold": rng.choice([0.2, 0.3, 0.5, 0.9]),
        "token_threshold": rng.choice([0.01, 0.1, 0.3, 0.6]),
        "correction": rng.choice(["ar", "redraft"]),
        "exact_kv": rng.random() < 0.5,
        "first_from_ar": rng.random() < 0.6,
    }
    return model, prompt, ends, region, settings


def _generate(model: Any, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], list[int]]:
    """Decode prompts as one left-padded batch; responses without padding, and forwards."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], dtype=torch.long).reshape(len(prompts), -1)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]).reshape(len(prompts), -1)
    options.setdefault("join_slots", False)
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
    counts = out.new_tokens.tolist()
    rows = [row[longest : longest + count].tolist() for row, count in zip(out.sequences, counts, strict=True)]
    return rows, out.forwards.tolist()


@pytest.mark.parametrize("seeds", [range(first, first + 12) for first in range(0, 72, 12)])
def test_plan_and_infill(seeds: range) -> None:
    for seed in seeds:
        model, prompt, ends, region, settings = _case(seed)
        brute = BruteForce(model, prompt, region, ends=ends, **settings)
        expected = brute.run()
        got, forwards = _generate(model, [prompt], max_new_tokens=region, eos_token_id=list(ends), **settings)
        assert got[0] == expected, f"seed {seed}: {settings}"
        assert forwards == [brute.forwards], f"seed {seed}: {settings}"
        SEEN.update(brute.events)


def test_every_path_was_taken() -> None:
    if not SEEN:
        pytest.skip("runs after test_plan_and_infill in the same process")
    for event in (
        "infill", "infill of several", "leading run", "run of several", "best slot only", "first token from the left",
        "cut in a slot", "slot dropped behind an end", "slot dropped in infill", "slot before an end still to do",
    ):  # fmt: skip
        assert SEEN[event] > 0, f"no case of: {event}"


@pytest.mark.parametrize("correction", ["ar", "redraft"])
def test_rows_of_a_batch_are_those_decoded_alone(correction: str) -> None:
    model = tiny_model(3, sharpness=0.8)
    prompts = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
    options = {"slot_size": 4, "slot_threshold": 0.3, "token_threshold": 0.1, "correction": correction}
    rows, forwards = _generate(model, prompts, max_new_tokens=12, eos_token_id=[9, 14], exact_kv=True, **options)
    for row, prompt, count in zip(rows, prompts, forwards, strict=True):
        brute = BruteForce(model, prompt, 12, ends=(9, 14), exact_kv=True, **options)
        assert row == brute.run()
        assert count == brute.forwards


@pytest.mark.parametrize("seed", range(6))
def test_left_to_right_is_the_stock_greedy_generate(seed: int) -> None:
    model = tiny_model(seed, sharpness=0.8)
    stock = Qwen3ForCausalLM(model.config).double().eval()
    stock.load_state_dict(model.state_dict())
    stock.generation_config.eos_token_id = [7]
    # The mask token may not be emitted; the stock class is told so in its own words.
    prompt = torch.tensor([[5, 6, 9, 11]])
    expected = stock.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0, suppress_tokens=[MASK])
    out = model.generate(
        prompt, max_new_tokens=20, decoding="left_to_right", eos_token_id=7, return_dict_in_generate=True
    )
    assert out.sequences.tolist() == expected.tolist()
    assert out.forwards.tolist() == out.new_tokens.tolist()


def _greedy_next(model: Any, tokens: list[int]) -> tuple[int, torch.Tensor]:
    count = len(tokens)
    logits = dense_logits(model, tokens, list(range(count)), torch.ones(count, count, dtype=torch.bool).tril())[-1]
    logits[MASK] = -torch.inf
    return int(logits.argmax()), logits.softmax(-1)


@pytest.mark.parametrize("seed", range(3))
def test_serial_slots_at_threshold_one_are_greedy_within_each_slot(seed: int) -> None:
    """With one slot a block and no draft accepted, `correction: ar` is left to right but for the first tokens."""
    model = tiny_model(seed, sharpness=0.8)
    prompt, size, slots = [5, 6, 7], 4, 3
    rows, forwards = _generate(
        model, [prompt], max_new_tokens=size * slots, slot_size=size, num_blocks=slots, token_threshold=1.0
    )
    for index in range(size * slots):
        if index % size:
            assert rows[0][index] == _greedy_next(model, prompt + rows[0][:index])[0]
    # Per slot a plan (the first with the prompt), a verifying pass and one round for each token but the first.
    assert forwards == [slots * (2 + size - 1)]


@pytest.mark.parametrize("seed", range(3))
def test_serial_slots_accept_only_what_is_probable_left_to_right(seed: int) -> None:
    model = tiny_model(seed, sharpness=0.8)
    prompt, size, threshold = [5, 6, 7], 4, 0.2
    rows, _ = _generate(model, [prompt], max_new_tokens=12, slot_size=size, num_blocks=3, token_threshold=threshold)
    for index in (i for i in range(12) if i % size):
        best, probabilities = _greedy_next(model, prompt + rows[0][:index])
        assert rows[0][index] == best or probabilities[rows[0][index]] > threshold


def _make_masks_say(sure: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is predicted at a mask has this probability."""
    from refusion_train.hf import runner

    class Unsure(runner.Row):
        def answer(self, seen: runner.Prediction) -> None:
            if isinstance(self.asked, runner.Query):
                rows = self.asked.wanted or range(len(self.asked.tokens))
                at = [self.asked.tokens[row] for row in rows]
                seen.probabilities = [sure if t == MASK else p for t, p in zip(at, seen.probabilities, strict=True)]
            super().answer(seen)

    monkeypatch.setattr(runner, "Row", Unsure)


@pytest.mark.parametrize("seed", range(3))
def test_where_masks_know_nothing_slots_are_left_to_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens always from the left, nothing accepted: the whole decoder is greedy left to right."""
    model = tiny_model(seed, sharpness=0.8)
    prompt = torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=12, decoding="left_to_right", eos_token_id=9)
    _make_masks_say(0.0, monkeypatch)
    got = model.generate(prompt, max_new_tokens=12, slot_size=4, token_threshold=1.0, eos_token_id=9)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_one_run_of_all_slots_is_left_to_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots chosen, first tokens from the left: what is accepted above one half is the likeliest token."""
    model = tiny_model(seed, sharpness=1.5)
    prompt, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 24, "return_dict_in_generate": True}
    expected = model.generate(prompt, decoding="left_to_right", eos_token_id=9, **options)
    _make_masks_say(1e-9, monkeypatch)
    got = model.generate(
        prompt, slot_size=4, slot_threshold=0.0, token_threshold=0.5, join_slots=True, eos_token_id=9, **options
    )
    assert got.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_masked_diffusion(seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_model(seed, objective="mdm", sharpness=0.8)
    blocks, block = rng.choice([1, 2, 3]), rng.choice([4, 5])
    region, forwards = blocks * block, rng.choice([2, 3, block])
    prompt = [rng.choice(TOKENS) for _ in range(rng.choice([0, 1, 6]))]
    ends = set(rng.sample(TOKENS, rng.choice([0, 2])))
    tokens: list[int] = [MASK] * region
    stop, count = region, 0
    for first in range(0, region, block):
        for step in range(forwards):
            open_ = [i for i in range(first, min(first + block, stop)) if tokens[i] == MASK]
            if not open_:
                break
            sequence = prompt + tokens[:stop]
            seen = torch.ones(len(sequence), len(sequence), dtype=torch.bool)
            logits = dense_logits(model, sequence, list(range(len(sequence))), seen)[len(prompt) :]
            logits[:, MASK] = -torch.inf
            probabilities = logits.softmax(-1)
            count += 1
            surest = sorted(open_, key=lambda i: -round(float(probabilities[i].max()), 6))
            for i in surest[: len(range(step, block, forwards))]:
                tokens[i] = int(probabilities[i].argmax())
                if tokens[i] in ends:
                    stop = min(stop, i + 1)
    got, used = _generate(
        model, [prompt], max_new_tokens=region, num_blocks=blocks, steps=forwards * blocks, eos_token_id=sorted(ends)
    )
    assert got[0] == tokens[:stop]
    assert used == [count]
