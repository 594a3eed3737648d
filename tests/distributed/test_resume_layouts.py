"""A checkpoint of any layout goes on in any other as if nothing had happened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from processes import run
from tiny import assemble, one_step, start, tiny_config, train
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from refusion_train.checkpoint.layout import restore, tensors_to_save
from refusion_train.parallel.groups import destroy

Layout = dict[str, Any]

# One step on each, from the checkpoint of the one before.
CHAIN: list[tuple[int, Layout]] = [
    (2, {"parallel__zero_stage": 2}),
    (1, {"parallel__zero_stage": 1}),
    (2, {"parallel__zero_stage": 3}),
    (1, {"parallel__zero_stage": 1, "train__micro_batch_size": 4}),
    (2, {"parallel__tensor": 2, "parallel__sequence": True}),
    (2, {"parallel__zero_stage": 1}),
    (2, {"parallel__pipeline": 2, "parallel__virtual_pipeline": 2}),
    (1, {"parallel__zero_stage": 3}),
    (2, {"parallel__pipeline": 2}),
    (2, {"parallel__tensor": 2, "parallel__zero_stage": 3}),
]


@pytest.mark.parametrize(("tie_embeddings", "chain"), [(True, CHAIN), (False, CHAIN[-4:])], ids=["tied", "untied"])
def test_a_run_that_changes_its_layout_at_every_step(tie_embeddings: bool, chain: list[tuple[int, Layout]], tmp_path):
    undisturbed = run(train, 1, tiny_config(model__tie_embeddings=tie_embeddings), 0, len(chain))[0]
    previous, results = None, []
    for step, (processes, layout) in enumerate(chain):
        config = tiny_config(model__tie_embeddings=tie_embeddings, **layout)
        folder = str(tmp_path / str(step))
        results = run(train, processes, config, step, step + 1, previous, folder)
        for result in results:
            difference = np.abs(result.curve[0] - undisturbed.curve[step])
            assert difference[0] < 1e-6, f"loss of step {step}, after going on as {layout}"
            assert difference[1] < 5e-6, f"gradient norm of step {step}, after going on as {layout}"
        previous = folder
    for (name, mine), (other, expected) in zip(
        sorted(assemble(results).items()), sorted(assemble([undisturbed]).items()), strict=True
    ):
        assert name == other
        assert (mine - expected).abs().max() < 1e-5, name


State = dict[str, torch.Tensor]


def _save(config: Any, folder: str) -> tuple[State, tuple[float, float]]:
    """Two steps, saved; the state at that point and the result of the next step."""
    _, engine = start(config)
    for step in range(2):
        one_step(engine, step)
    save(tensors_to_save(engine), checkpoint_id=folder)
    state = _state(engine)
    following = one_step(engine, 2)
    destroy()
    return state, following


def _restore(config: Any, folder: str) -> tuple[State, tuple[float, float]]:
    """The same of a fresh engine that was filled from the checkpoint."""
    _, engine = start(config)
    restore(engine, lambda tensors: load(tensors, checkpoint_id=folder))
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_same_layout_restores_the_same_bits_in_bf16(stage: int, tmp_path):
    config = tiny_config(train__precision="bf16", parallel__zero_stage=stage)
    saved, restored = run(_save, 2, config, str(tmp_path)), run(_restore, 2, config, str(tmp_path))
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


def test_a_bf16_run_goes_on_in_float32(tmp_path):
    folder = str(tmp_path / "bf16")
    half = run(train, 2, tiny_config(train__precision="bf16", parallel__zero_stage=3), 0, 3, None, folder)
    again = run(train, 1, tiny_config(), 3, 3, folder)
    before, after = assemble(half), assemble(again)
    assert all(torch.equal(before[name], after[name]) for name in before), "masters and moments are kept to the bit"
