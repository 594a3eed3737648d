"""A checkpoint of any layout goes on in any other as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run
from tiny import assemble, layout_of, one_step, processes_of, reference, start, tiny_config, train

from refusion_train.checkpoint import store
from refusion_train.checkpoint.layout import restore, tensors_to_save
from refusion_train.config import Config
from refusion_train.parallel.groups import destroy

# Each from the checkpoint of the one before.
FIVE_STEPS_EACH = ["tp2 pp2", "dp2 zero2", "pp2 vp2", "tp2 sp dp2 zero3", "rows4"]
ONE_STEP_EACH = ["dp2 zero2", "rows4", "dp2 zero3", "pp2 first3", "zero3", "tp2 sp pp2", "tp2 zero3", "pp4"]


@pytest.mark.parametrize(
    ("tied", "chain", "steps"),
    [(True, FIVE_STEPS_EACH, 5), (False, FIVE_STEPS_EACH, 5), (True, ONE_STEP_EACH, 1)],
    ids=["tied", "untied", "every step"],
)
def test_a_run_that_changes_its_layout_again_and_again(tied: bool, chain: list[str], steps: int, tmp_path: Path):
    model = {"model__tie_embeddings": tied}
    undisturbed = run(train, 1, tiny_config(**model), 0, steps * len(chain))[0]
    results = []
    for number, words in enumerate(chain):
        first, last = number * steps, (number + 1) * steps
        config = tiny_config(**model, **layout_of(words))
        results = run(train, processes_of(words), config, first, last, str(tmp_path))
        for result in results:
            difference = np.abs(result.curve - undisturbed.curve[first:last]).max()
            assert difference < 1e-5, f"steps {first} to {last}, after going on as {words}"
    final, expected = assemble(results), assemble([undisturbed])
    assert final.keys() == expected.keys()
    for name, tensor in final.items():
        assert (tensor - expected[name]).abs().max() < 1e-4, name


State = dict[str, torch.Tensor]


def _save(config: Any, folder: str) -> tuple[State, tuple[float, float]]:
    """Two steps, saved; the state at that point and the result of the next step."""
    _, engine = start(config)
    for step in range(2):
        one_step(engine, step)
    store.save(folder, 2, tensors_to_save(engine), {}, keep=1)
    state = _state(engine)
    following = one_step(engine, 2)
    destroy()
    return state, following


def _restore(config: Any, folder: str) -> tuple[State, tuple[float, float]]:
    """The same of a fresh engine that was filled from the checkpoint."""
    _, engine = start(config)
    restore(engine, lambda tensors: store.load(Path(folder, store.step_name(2)), tensors))
    state = _state(engine)
    following = one_step(engine, 2)
    assert engine.optimizer_steps == 3
    destroy()
    return state, following


def _state(engine: Any) -> State:
    """Copies of masters and moments, and of the weights that are computed with."""
    state = {f"{n.name}.{key}": value.clone() for n in engine.owned() for key, value in n.owned.state.items()}
    for chunk in engine.chunks:
        for name, parameter in chunk.named_parameters():
            state[f"{name}.weight"] = getattr(parameter, "ds_tensor", parameter).detach().float().clone()
    return state


@pytest.mark.parametrize("words", ["dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2 pp2"])
def test_the_same_layout_restores_the_same_bits_in_bf16(words: str, tmp_path: Path):
    config, count = tiny_config(train__precision="bf16", **layout_of(words)), processes_of(words)
    saved, restored = run(_save, count, config, str(tmp_path)), run(_restore, count, config, str(tmp_path))
    for (before, expected), (after, following) in zip(saved, restored, strict=True):
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert following == pytest.approx(expected, abs=1e-6)


def _restore_nothing(config: Any) -> tuple[int, int]:
    """A fresh engine filled with what it has: as many steps, and entries for all three states."""
    _, engine = start(config)
    tensors = tensors_to_save(engine)
    restore(engine, lambda _: None)
    destroy()
    return engine.optimizer_steps, len(tensors)


def test_before_the_first_step_there_is_a_whole_state():
    ((steps, entries),) = run(_restore_nothing, 1, tiny_config())
    assert steps == 0
    assert entries == 3 * (1 + 4 * 11 + 1) + 1


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_run_goes_on_in_another_precision(before: str, after: str, tmp_path: Path):
    """Masters and moments are kept to the bit; the steps after it are those of the other precision."""
    layouts = {"bf16": "dp2 zero3", "fp32": "tp2 pp2"}
    saved = assemble(run(train, processes_of(layouts[before]), _in(before, layouts[before]), 0, 3, str(tmp_path)))
    same = assemble(run(train, processes_of(layouts[after]), _in(after, layouts[after]), 3, 3, str(tmp_path)))
    assert saved.keys() == same.keys()
    assert all(torch.equal(saved[name], same[name]) for name in saved)
    results = run(train, processes_of(layouts[after]), _in(after, layouts[after]), 3, 6, str(tmp_path))
    assert np.abs(results[0].curve - reference()[0][3:6]).max() < 2e-2


def _in(precision: str, words: str) -> Config:
    return tiny_config(train__precision=precision, **layout_of(words))
