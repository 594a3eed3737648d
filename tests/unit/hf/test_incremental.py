"""Cached forwards against forwards of the stock model without a cache, and batches against single rows, in float32.

With `exact_kv` everything committed was computed by one causal pass in physical order, so at every forward the cache
must give what the stock class gives for the committed tokens and the new ones, at their true positions.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from brute_force import MASK, VOCAB, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from refusion_train.hf import cache as caching
from refusion_train.hf import runner

TOKENS = [token for token in range(VOCAB) if token != MASK]


class Recorder:
    """Stands in for the runner's forward: compares each with the stock model, row by row and run by run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = 0
        self.worst = 0.0
        monkeypatch.setattr(runner, "forward", self)

    def begin(self) -> None:
        # Of the row that is decoded: committed and scratch tokens and positions, by place.
        self.places: dict[int, tuple[int, int]] = {}

    def __call__(self, model: Any, cache: Any, queries: list[caching.Query]) -> torch.Tensor:
        hidden = caching.forward(model, cache, queries)
        (query,), committed = queries, cache.length
        row = 0
        for start, origin, count in zip(query.starts, query.origins, query.runs, strict=True):
            for index in range(count):
                self.places[committed + start + index] = (query.tokens[row + index], query.positions[row + index])
            seen = [*range(committed), *range(committed + origin, committed + start + count)]
            tokens, positions = zip(*(self.places[place] for place in seen), strict=True)
            stock = Qwen3ForCausalLM.forward(
                model, torch.tensor([tokens]), position_ids=torch.tensor([positions]), use_cache=False,
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            ).logits[0, -count:]  # fmt: skip
            off = (model.lm_head(hidden[row : row + count]) - stock).abs().max().item()
            self.worst = max(self.worst, off)
            row += count
        self.states += 1
        return hidden


def _options(rng: random.Random) -> dict[str, Any]:
    size, blocks = rng.choice([1, 2, 4, 5]), rng.choice([1, 1, 2])
    return {
        "max_new_tokens": size * blocks * rng.choice([1, 2, 3]), "slot_size": size, "num_blocks": blocks,
        "slot_threshold": rng.choice([0.2, 0.3, 0.5, 0.9]), "token_threshold": rng.choice([0.01, 0.1, 0.3, 0.6]),
        "correction": rng.choice(["ar", "redraft"]), "first_from_ar": rng.random() < 0.6,
        "eos_token_id": rng.sample(TOKENS, rng.choice([0, 1, 2])), "join_slots": rng.random() < 0.6,
    }  # fmt: skip


def test_every_cached_forward_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    seed = 0
    while recorder.states < 250:
        rng = random.Random(seed)
        model = tiny_model(seed, sharpness=rng.choice([0.6, 0.8, 1.0])).float()
        recorder.begin()
        prompt = [rng.choice(TOKENS) for _ in range(rng.choice([0, 1, 5, 9]))]
        model.generate(torch.tensor([prompt], dtype=torch.long), exact_kv=True, **_options(rng))
        seed += 1
    assert recorder.worst < 1e-4, f"{recorder.states} forwards, the worst is off by {recorder.worst}"


def test_moved_keys_are_those_of_the_row_behind_what_is_committed() -> None:
    cache = caching.KeyValueCache(tiny_model(0, sharpness=0.8), 12, rows=2)
    cache.storage.copy_(torch.arange(cache.storage.numel()).reshape(cache.storage.shape))
    before, row = cache.storage.clone(), cache.rows[1]
    row.commit(2)
    row.move(4, 1, 5)  # places 6 to 10 to 3 to 7: they overlap
    assert cache.storage[:, :, 1, 3:8].equal(before[:, :, 1, 6:11])
    assert cache.storage[:, :, 1, :3].equal(before[:, :, 1, :3]) and cache.storage[:, :, 0].equal(before[:, :, 0])


@pytest.mark.parametrize("decoding", ["plan_and_infill", "left_to_right", "mdm"])
def test_a_batch_of_eight_is_its_rows(decoding: str) -> None:
    """Prompts of different lengths, end tokens at different places, both corrections: the same tokens and forwards."""
    lengths = set()
    for seed in range(6):
        rng = random.Random(seed)
        objective = "mdm" if decoding == "mdm" else "slots"
        model = tiny_model(seed, objective=objective, sharpness=0.8).float()
        options = {**_options(rng), "decoding": decoding, "exact_kv": bool(seed % 2)}
        if decoding == "mdm":
            del options["first_from_ar"]
        options["max_new_tokens"] = 2 * options["slot_size"] * options["num_blocks"]
        prompts = [[rng.choice(TOKENS) for _ in range(rng.randint(1, 20))] for _ in range(8)]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        together = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
        alone = [model.generate(torch.tensor([p]), return_dict_in_generate=True, **options) for p in prompts]
        assert together.forwards.tolist() == [one.forwards.item() for one in alone]
        for row, prompt, one, count in zip(together.sequences, prompts, alone, together.new_tokens, strict=True):
            assert row[longest : longest + count].tolist() == one.sequences[0, len(prompt) :].tolist()
        lengths.update(together.new_tokens.tolist())
    assert len(lengths) > 3, "rows do not finish at different times"


_MODEL = tiny_model(1, sharpness=0.8).float()
_ODD = st.sampled_from([0, -1, 1, 2.5, float("nan"), True, "x", 10**7])
_CHOICES: dict[str, Any] = {
    "decoding": st.sampled_from(["plan_and_infill", "left_to_right", "mdm"]), "max_new_tokens": st.integers(1, 24),
    "slot_size": st.integers(1, 9), "num_blocks": st.integers(1, 4), "slot_threshold": st.floats(0, 1),
    "token_threshold": st.floats(0, 1), "correction": st.sampled_from(["ar", "redraft"]), "exact_kv": st.booleans(),
    "first_from_ar": st.booleans(), "join_slots": st.booleans(),
    "temperature": st.sampled_from([0, 1e-46, 0.7, 1, 50.0]), "top_p": st.sampled_from([1e-9, 0.5, 1]),
    "seed": st.integers(0, 2**63 - 1),
    "do_sample": st.booleans(), "eos_token_id": st.integers(0, VOCAB - 1),
}  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries({}, optional=_CHOICES), st.lists(st.sampled_from(TOKENS), max_size=9),
    st.none() | st.tuples(st.sampled_from([*sorted(_CHOICES), "steps", "confidence_threshold"]), _ODD),
)  # fmt: skip
def test_options_work_or_are_refused_in_one_line(options: dict[str, Any], prompt: list[int], odd: Any) -> None:
    if odd is not None and odd[0] not in ("exact_kv", "first_from_ar", "join_slots", "do_sample", "eos_token_id"):
        options[odd[0]] = odd[1]
    options.setdefault("max_new_tokens", 8)
    ids = torch.tensor([prompt, prompt], dtype=torch.long)
    try:
        out = _MODEL.generate(ids, return_dict_in_generate=True, **options)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
        return
    again = _MODEL.generate(ids, **options)
    assert again.equal(out.sequences), "a seed means one response"
    for row, count in zip(out.sequences[:, len(prompt) :], out.new_tokens.tolist(), strict=True):
        tokens = row[:count].tolist()
        assert MASK not in tokens and 1 <= count <= options["max_new_tokens"]
        end = options.get("eos_token_id")
        assert end not in tokens[:-1]
        assert count == options["max_new_tokens"] or tokens[-1] == end
