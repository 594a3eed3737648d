"""The shipped classes: what `generate` takes and returns, and a forward that takes positions as positions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from brute_force import MASK, VOCAB, dense_logits, tiny_model
from transformers import GenerationConfig

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(0, sharpness=0.8)


def _permuted(count: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(5, VOCAB, (1, count)), torch.randperm(count)[None]


def test_permuted_positions_are_not_taken_for_packed_sequences(model: Any) -> None:
    """Plain causal attention in physical order, without any mask given; the stock class gets this wrong."""
    from transformers import Qwen3ForCausalLM

    tokens, positions = _permuted()
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = dense_logits(model, tokens[0].tolist(), positions[0].tolist(), causal)
    got = model(tokens, position_ids=positions, use_cache=False).logits[0]
    assert torch.allclose(got, expected, atol=1e-5)
    stock = Qwen3ForCausalLM.forward(model, tokens, position_ids=positions, use_cache=False).logits[0]
    assert not torch.allclose(stock, expected, atol=1e-2), "transformers has changed; the guard may go"


def test_the_forward_of_a_masked_diffusion_model_sees_both_ways() -> None:
    model = tiny_model(2, objective="mdm")
    tokens = torch.tensor([[5, MASK, 7, MASK], [0, 9, MASK, 10]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])
    got = model(tokens, attention_mask=mask, position_ids=positions).logits
    for row, first in ((0, 0), (1, 1)):
        count = 4 - first
        seen = torch.ones(count, count, dtype=torch.bool)
        expected = dense_logits(model, tokens[row, first:].tolist(), list(range(count)), seen)
        assert torch.allclose(got[row, first:], expected, atol=1e-5)


def test_output_and_statistics(model: Any) -> None:
    out = model.generate(PROMPT, max_new_tokens=10, slot_size=4, return_dict_in_generate=True)
    assert out.sequences.shape == (1, 14)
    assert out.sequences[:, :4].equal(PROMPT)
    assert not (out.sequences == MASK).any()
    assert model.last_stats["forwards"] == out.forwards.item()
    assert out.tokens_per_forward.item() == pytest.approx(10 / out.forwards.item())
    assert model.last_stats["new_tokens"] == out.new_tokens.item() == 10
    # The last slot was decoded whole and cut.
    whole = model.generate(PROMPT, max_new_tokens=12, slot_size=4)
    assert whole[:, :14].equal(out.sequences)


def test_shorter_rows_are_padded_on_the_right(model: Any) -> None:
    batch = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [12, 13, 14, 5]])
    plain = model.generate(batch, max_new_tokens=8, slot_size=4)
    end = int(plain[1, 6])
    out = model.generate(
        batch, max_new_tokens=8, slot_size=4, eos_token_id=[end], pad_token_id=3, return_dict_in_generate=True
    )
    for row in range(3):
        tokens = out.sequences[row, 4:].tolist()
        count = int(out.new_tokens[row])
        assert end not in tokens[: count - 1]
        assert set(tokens[count:]) <= {3}
        assert tokens[count - 1] == end or count == 8


def test_sampling_is_a_function_of_the_seed_and_the_row(model: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "slot_size": 4, "do_sample": True, "temperature": 2.0}
    batch = PROMPT.repeat(3, 1)
    first = model.generate(batch, seed=1, **options)
    assert first.equal(model.generate(batch, seed=1, **options))
    assert not first.equal(model.generate(batch, seed=2, **options))
    assert not first[0].equal(first[1]), "rows of a batch draw their own samples"
    # Another neighbour changes nothing.
    other = torch.cat([batch[:1], torch.tensor([[9, 9, 9, 9]]), batch[2:]])
    again = model.generate(other, seed=1, **options)
    assert again[0].equal(first[0]) and again[2].equal(first[2])
    greedy = model.generate(PROMPT, max_new_tokens=12, slot_size=4)
    assert greedy.equal(model.generate(PROMPT, max_new_tokens=12, slot_size=4, do_sample=False, temperature=2.0))
    assert greedy.equal(model.generate(PROMPT, max_new_tokens=12, slot_size=4, temperature=1.0, top_p=1e-9))


def test_samples_follow_temperature_and_top_p() -> None:
    from refusion_train.hf.runner import _sample
    from refusion_train.hf.settings import Settings

    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20_000, 1)
    random = torch.Generator().manual_seed(0)

    def shares(**options: float) -> list[float]:
        uniform = torch.rand(len(logits), 1, generator=random, dtype=torch.float64)
        drawn = _sample(logits, Settings(mask_id=-1, **options), uniform)  # type: ignore[arg-type]
        return (torch.bincount(drawn, minlength=4) / len(logits)).tolist()

    assert shares(temperature=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.015)
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    assert shares(temperature=0.5) == pytest.approx((squared / squared.sum()).tolist(), abs=0.015)
    # 0.5 alone is under 0.7; with the second token it is reached.
    assert shares(temperature=1.0, top_p=0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.015)


def test_updates_show_slots_filling_in(model: Any) -> None:
    updates: list[Any] = []
    out = model.generate(
        PROMPT, max_new_tokens=12, slot_size=4, slot_threshold=0.3, token_threshold=0.2, on_update=updates.append
    )
    assert len(updates) == model.last_stats["forwards"]
    assert [u.forwards for u in updates] == list(range(1, len(updates) + 1))
    for before, after in itertools.pairwise(updates):
        assert sum(after.decided) >= sum(before.decided)
        assert all(a == b for a, b, d in zip(after.tokens, before.tokens, before.decided, strict=True) if d)
    assert not any(updates[0].decided) and all(updates[-1].decided)
    assert updates[-1].tokens == out[0, 4:].tolist()


@pytest.mark.parametrize("decoding", ["plan_and_infill", "left_to_right"])
def test_a_streamer_gets_the_text_in_order(model: Any, decoding: str) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.got += value.reshape(-1).tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    out = model.generate(PROMPT, max_new_tokens=12, decoding=decoding, streamer=streamer, eos_token_id=[9, 13])
    assert streamer.got == out[0].tolist()
    assert streamer.ended
    with pytest.raises(ValueError, match="one sequence"):
        model.generate(PROMPT.repeat(2, 1), streamer=streamer)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slot_siz": 4}, ["slot_siz", "did you mean 'slot_size'"]),
        ({"num_beams": 4}, ["num_beams=4"]),
        ({"decoding": "mdm"}, ["decoding=mdm", "objective.name=slots"]),
        ({"max_length": 4}, ["max_length=4"]),
        ({"max_new_tokens": 4000}, ["max_new_tokens=4000", "256 positions"]),
        ({"max_new_tokens": 12, "slot_size": 4, "num_blocks": 2}, ["num_blocks=2"]),
        ({"attention_mask": torch.ones(1, 3)}, ["attention_mask"]),
    ],
)
def test_what_cannot_work_is_refused(model: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        model.generate(PROMPT, **options)
    for word in words:
        assert word in str(caught.value)


def test_options_of_transformers_are_understood(model: Any) -> None:
    plain = model.generate(PROMPT, max_new_tokens=8, slot_size=4)
    assert plain.equal(model.generate(inputs=PROMPT, max_length=12, slot_size=4, use_cache=True, num_beams=1))
    config = GenerationConfig(max_new_tokens=8, slot_size=4)
    assert plain.equal(model.generate(PROMPT, generation_config=config))
    assert model.generate(PROMPT, generation_config=config, max_new_tokens=4).shape == (1, 8)


def test_a_length_that_nobody_asked_for_fits_the_positions() -> None:
    model = tiny_model(0, sharpness=0.8)
    model.config.max_position_embeddings = 30
    # 26 positions are left behind the prompt, of which 24 are whole slots in two blocks.
    assert model.generate(PROMPT, slot_size=4, num_blocks=2).shape == (1, 28)
    assert model.generate(PROMPT, decoding="left_to_right").shape == (1, 30)
    assert model.generate(PROMPT, slot_size=4, generation_config=GenerationConfig(max_new_tokens=64)).shape == (1, 28)
    for options in ({"max_new_tokens": 32}, {"slot_size": 32}):
        with pytest.raises(ValueError, match="30 positions"):
            model.generate(PROMPT, **options)


def test_first_tokens_from_the_left_need_a_model_trained_for_it() -> None:
    model = tiny_model(0, sharpness=0.8, cross_slot_targets=False)
    with pytest.raises(ValueError, match="cross_slot_targets"):
        model.generate(PROMPT, max_new_tokens=8, first_from_ar=True)
    model.generate(PROMPT, max_new_tokens=8)


def test_an_empty_prompt(model: Any) -> None:
    empty = torch.zeros(1, 0, dtype=torch.long)
    assert model.generate(empty, max_new_tokens=8, slot_size=4).shape == (1, 8)
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(empty, max_new_tokens=8, decoding="left_to_right")


def test_an_ordinary_language_model_decodes_left_to_right() -> None:
    model = tiny_model(0, objective="ar")
    assert model.generate(PROMPT, max_new_tokens=5).shape == (1, 9)
    with pytest.raises(ValueError, match="plan_and_infill does not suit"):
        model.generate(PROMPT, max_new_tokens=5, decoding="plan_and_infill")


def test_bfloat16(model: Any) -> None:
    import copy

    half = copy.deepcopy(model).to(torch.bfloat16)
    out = half.generate(PROMPT, max_new_tokens=8, slot_size=4)
    assert out.shape == (1, 12) and not (out == MASK).any()
