"""The engine trains the same model as plain torch on one process; steps that must not count do not.

Tensor and pipeline parallelism are in test_layouts."""

from __future__ import annotations

import math
import os
import tempfile
import time
from typing import Any

import numpy as np
import pytest
import torch
from processes import RankError, run
from tiny import Curve, Layout, distance, micro_batches, one_step, reference, start, tiny_config, train, train_plainly

from refusion_train.config import Config
from refusion_train.errors import ConfigError, TrainingError
from refusion_train.model.loss import STAT_INDEX
from refusion_train.parallel.groups import destroy, init_groups
from refusion_train.parallel.reduce import PartialGradients

LAYOUTS: list[tuple[int, Layout]] = [
    *((processes, {"parallel__zero_stage": stage}) for processes in (1, 2) for stage in (1, 2, 3)),
    (1, {"train__micro_batch_size": 1}),
    (1, {"train__micro_batch_size": 4}),
    (2, {"train__micro_batch_size": 1, "parallel__zero_stage": 2}),
    (2, {"train__micro_batch_size": 4, "parallel__zero_stage": 3}),
    (2, {"parallel__zero_stage": 2, "train__recompute": "full"}),
    (2, {"parallel__zero_stage": 3, "train__recompute": "selective"}),
    (2, {"model__tie_embeddings": False, "parallel__zero_stage": 3}),
]


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS, ids=str)
def test_data_parallel_ranks_agree_with_plain_torch(processes: int, layout: Layout):
    results = run(train, processes, tiny_config(**layout))
    curve, weights = distance(results, layout)
    assert curve < 1e-5, "losses or gradient norms differ"
    assert weights < 1e-4, "final weights differ"


def test_the_reference_learns_and_clips():
    curve, _ = reference()
    assert curve[:, 1].min() > 1.0, "norms must exceed train.clip, or clipping is not tested"
    unclipped, _ = run(train_plainly, 1, tiny_config(train__clip=0.0), 3)[0]
    assert np.abs(unclipped - curve[:3]).max() > 1e-6, "clipping makes no difference"
    (result,) = run(train, 1, tiny_config(train__clip=0.0), 0, 3)
    assert np.abs(result.curve - unclipped).max() < 1e-5, "train.clip=0 is not without clipping"


def _gradients_between_micro_batches(config: Config) -> list[int]:
    """Elements of gradients that lie on the parameters when each micro-batch begins."""
    groups, engine = start(config)
    found = []

    def count(*_: Any) -> None:
        held = [g for c in engine.chunks for p in c.parameters() for g in (p.grad, getattr(p, "grad_accum", None))]
        found.append(sum(g.numel() for g in held if g is not None))

    engine.chunks[0].decoder.register_forward_pre_hook(count)
    engine.forward_backward(micro_batches(config, 0, groups.dp_rank, groups.dp_size))
    destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_zero_1_keeps_whole_gradients_between_micro_batches(stage: int, precision: str):
    config = tiny_config(parallel__zero_stage=stage, train__precision=precision)
    for first, second in run(_gradients_between_micro_batches, 2, config):
        assert first == 0
        assert second > 20_000 if stage == 1 else second == 0


# ------------------------------------------------------------------------------------------- faults that must show


def _train_without_partial_sums(config: Config) -> Curve:
    PartialGradients.sum = PartialGradients.sum_in_backward = lambda self: None  # in this process only
    return train(config)


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__tensor": 2},
        {"parallel__tensor": 2, "parallel__zero_stage": 3},
        {"parallel__tensor": 2, "parallel__sequence": True, "model__qk_norm": False},
        {"parallel__pipeline": 2},
    ],
    ids=["q/k norm", "q/k norm in the backward pass", "norms with sequence parallel", "tied embedding"],
)
def test_without_the_sums_of_partial_gradients_the_comparison_fails(layout: Layout):
    expected = reference(**layout)[0]
    results = run(_train_without_partial_sums, 2, tiny_config(**layout))
    assert max(np.abs(result.curve - expected).max() for result in results) > 1e-4


# ------------------------------------------------------------------------------------------- steps that are skipped


def _train_with_a_bad_step(config: Config, kind: str) -> tuple[list[Any], np.ndarray]:
    """Five steps, of which the third meets something that is not finite on the last rank only."""
    groups, engine = start(config)
    skipped, curve = [], []
    bad_rank = groups.rank == groups.world_size - 1
    for step in range(5):
        batches = micro_batches(config, step, groups.dp_rank, groups.dp_size)
        hook = None
        if step == 2 and kind == "loss" and groups.dp_rank == groups.dp_size - 1:
            batches[-1].weights[0] = math.nan
        if step == 2 and kind in ("nan", "inf") and bad_rank:
            factor = math.nan if kind == "nan" else math.inf
            hook = engine.chunks[-1].decoder.layers[0].mlp.linear_fc2.weight.register_hook(lambda g, f=factor: g * f)
        before = _state(engine)
        engine.forward_backward(batches)
        result = engine.step(config.train.lr)
        if hook is not None:
            hook.remove()
        skipped.append(result.skipped)
        if result.skipped:
            assert result.grad_norm == math.inf
            assert engine.optimizer_steps == 2, "the skipped step was counted"
            for old, new in zip(before, _state(engine), strict=True):
                assert torch.equal(old, new), "a skipped step changed masters, moments or weights"
        else:
            curve.append((result.statistics[STAT_INDEX["loss"]].item(), result.grad_norm))
    assert engine.optimizer_steps == 4
    destroy()
    return skipped, np.array(curve)


def _state(engine: Any) -> list[torch.Tensor]:
    """Copies of all that a step changes on this rank: masters, moments, and the weights that are computed with."""
    kept = [tensor.clone() for named in engine.owned() for tensor in named.owned.state.values()]
    weights = [getattr(p, "ds_tensor", p).detach().clone() for chunk in engine.chunks for p in chunk.parameters()]
    return kept + weights


def _train_without_step_two(config: Config) -> np.ndarray:
    _, engine = start(config)
    curve = [one_step(engine, step) for step in (0, 1, 3, 4)]
    destroy()
    return np.array(curve)


BAD: list[tuple[str, Layout]] = [
    ("loss", {"parallel__zero_stage": 1}),
    ("nan", {"parallel__zero_stage": 2}),
    ("nan", {"parallel__zero_stage": 3}),
    ("inf", {"parallel__zero_stage": 1, "train__precision": "bf16"}),
    ("nan", {"parallel__zero_stage": 2, "train__precision": "bf16"}),
    ("loss", {"parallel__zero_stage": 3, "train__precision": "bf16"}),
    ("inf", {"parallel__tensor": 2}),
    ("loss", {"parallel__pipeline": 2}),
]


@pytest.mark.parametrize(("kind", "layout"), BAD, ids=str)
def test_a_bad_value_on_one_rank_skips_the_step_on_all(kind: str, layout: Layout):
    config = tiny_config(**layout)
    results = run(_train_with_a_bad_step, 2, config, kind)
    expected = run(_train_without_step_two, 2, config)[0]
    for skipped, curve in results:
        assert skipped == [False, False, True, False, False]
        assert np.abs(curve - expected).max() < 1e-5, "steps after the skipped one are not those of a run without it"


# ------------------------------------------------------------------------------------------------------- precision


def _bf16_gradients(config: Config) -> tuple[float, float, bool]:
    """Norm of the first gradient, share of its elements that bf16 could not hold, and whether masters are float32."""
    groups, engine = start(config)
    engine.forward_backward(micro_batches(config, 0, groups.dp_rank, groups.dp_size))
    gradients = torch.cat([part.reshape(-1) for _, part in engine._zero.gradients()])
    assert gradients.dtype == torch.float32
    kept = (gradients.bfloat16().float() != gradients).float().mean().item()
    norm = engine.step(1e-3).grad_norm
    master = torch.cat([named.owned.state["master"] for named in engine.owned()])
    finer = bool((master.bfloat16().float() != master).any())
    destroy()
    return norm, kept, finer


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_accumulates_and_keeps_masters_in_float32(stage: int):
    config = tiny_config(train__precision="bf16", train__micro_batch_size=1, parallel__zero_stage=stage)
    exact = reference()[0][0, 1]
    for norm, kept, finer in run(_bf16_gradients, 2, config):
        assert norm == pytest.approx(exact, rel=5e-3)
        assert kept > 0.5, "sums of micro-batches were rounded to bf16"
        assert finer, "masters were rounded to bf16"


def test_bf16_follows_the_float32_curve():
    results = run(train, 2, tiny_config(train__precision="bf16", parallel__zero_stage=2))
    assert np.abs(results[0].curve - reference()[0]).max() < 2e-2


# ------------------------------------------------------------------------------------------------------ evaluation


def _train_and_evaluate(config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Curve with evaluations in between, statistics of an evaluation and of training on the same rows."""
    groups, engine = start(config)
    curve = []
    for step in range(4):
        batches = micro_batches(config, step, groups.dp_rank, groups.dp_size)
        evaluated = engine.forward_backward(batches, forward_only=True)
        engine.forward_backward(micro_batches(config, 99, groups.dp_rank, groups.dp_size)[:1], forward_only=True)
        trained = engine.forward_backward(batches)
        result = engine.step(config.train.lr)
        curve.append((result.statistics[STAT_INDEX["loss"]].item(), result.grad_norm))
    engine.forward_backward(batches, forward_only=True)
    destroy()
    return np.array(curve), evaluated.numpy(), trained.numpy()


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__zero_stage": 3},
        {"parallel__tensor": 2},
        {"parallel__pipeline": 2},
        {"parallel__pipeline": 2, "parallel__virtual_pipeline": 2},
    ],
    ids=str,
)
def test_evaluation_gives_the_same_sums_and_leaves_training_alone(layout: Layout):
    results = run(_train_and_evaluate, 2, tiny_config(**layout))
    for curve, evaluated, trained in results:
        assert np.abs(curve - reference()[0][:4]).max() < 1e-5
        np.testing.assert_allclose(evaluated, trained, rtol=1e-5, atol=1e-6)
        assert evaluated[STAT_INDEX["loss"]] > 0, "no statistics on a rank that does not compute the loss"


# -------------------------------------------------------------------------------------------- set-up and tear-down


def _fail_in_the_middle(config: Config) -> None:
    groups, engine = start(config)
    one_step(engine, 0)
    batches = micro_batches(config, 2, groups.dp_rank, groups.dp_size)
    if groups.rank == 1:
        batches[-1].labels = batches[-1].labels[:-1]
    engine.forward_backward(batches)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_fails_does_not_wait_for_the_others(stage: int):
    reference()  # the first group of processes takes longer to start
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 failed"):
        run(_fail_in_the_middle, 2, tiny_config(parallel__zero_stage=stage))
    assert time.monotonic() - started < 60, "the error came only after a collective had timed out"


def _what_is_printed(config: Config) -> str:
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        _, engine = start(config)
        one_step(engine, 0)
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        file.seek(0)
        destroy()
        return file.read().decode()


def test_nothing_is_printed():
    assert run(_what_is_printed, 1, tiny_config(parallel__zero_stage=3)) == [""]


def _alone_twice(config: Config) -> list[float]:
    """Without a launcher's environment, and again in the same process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return [train(config, 0, 1).curve[0, 0] for _ in range(2)]


def test_a_single_process_needs_no_launcher():
    (losses,) = run(_alone_twice, 1, tiny_config())
    assert losses[0] == losses[1] == pytest.approx(reference()[0][0, 0], abs=1e-6)


def test_a_wrong_layout_is_refused_before_any_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT not set"):
        init_groups(tiny_config())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="3 processes cannot be divided"):
        init_groups(tiny_config(parallel__tensor=2))
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE='many'"):
        init_groups(tiny_config())
    assert not torch.distributed.is_initialized()


def test_processes_that_do_not_find_each_other(monkeypatch: pytest.MonkeyPatch):
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=r"rank 1 did not meet all 2 processes .* 127\.0\.0\.1:1 within 2 s"):
        init_groups(tiny_config(), timeout_s=2)
