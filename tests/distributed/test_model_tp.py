"""Two tensor-parallel processes compute what one does: initial weights, logits, loss, statistics and every gradient."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "model"))

# shape of the model, sequence parallelism, recomputation
CASES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "tied": ({}, False, "none"),
    "untied": (dict(tie_embeddings=False), False, "none"),
    "without q/k norm": (dict(qk_norm=False), False, "none"),
    "biases": (dict(qk_norm=False, qkv_bias=True), False, "none"),
    "sequence, biases": (dict(qk_norm=False, qkv_bias=True), True, "none"),
    "second rank holds only padding": (dict(vocab_size=30), False, "none"),
    "selective recomputation": ({}, False, "selective"),
    "sequence": ({}, True, "none"),
    "sequence, untied": (dict(tie_embeddings=False), True, "none"),
    "sequence, second rank holds only padding": (dict(vocab_size=30), True, "none"),
    "sequence, selective recomputation": ({}, True, "selective"),
    "sequence, full recomputation": ({}, True, "full"),
}


def compute(tensor: int) -> dict[str, dict[str, Any]]:
    """Everything to compare of each case: this rank's part of weights and gradients, and what should be the same.

    The groups are those of every case, so they are joined once.
    """
    import torch.distributed as dist
    from model_cases import make_batch, make_config, make_model, on_device

    from refusion_train.model import loss as loss_module
    from refusion_train.parallel.groups import destroy, init_groups

    # Several chunks of rows, and not as many of them if a rank went by its share of the vocabulary without padding.
    loss_module.CHUNK_BYTES["cpu"] = 64 * 20 * 4
    results, groups = {}, None
    for case, (shape, sequence, recompute) in CASES.items():
        config = make_config(**shape)
        config.parallel.tensor, config.parallel.sequence = tensor, sequence and tensor > 1
        config.train.recompute = recompute
        groups = groups or init_groups(config)
        model, batch = make_model(config, groups), on_device(make_batch(config.model.vocab_size or 0))
        logits = model.logits(batch).detach()
        loss, stats = model(batch)
        (loss * 2).backward()
        parts: dict[str, list[tuple[Any, torch.Tensor, torch.Tensor]]] = {}
        for name, pieces in model.pieces().items():
            parameter = model.get_parameter(name)
            grad = parameter.grad
            assert grad is not None, f"{name} has no gradient"
            if parameter.tensor_partial:
                dist.all_reduce(grad, group=groups.tp_group)
            assert parameter.tensor_model_parallel == (tensor > 1 and "norm" not in name), name
            for piece in pieces:
                values = piece.take(parameter.detach()).clone(), piece.take(grad).clone()
                parts.setdefault(piece.name, []).append((piece, *values))
        results[case] = {"logits": logits, "loss": loss.detach(), "stats": stats, "parts": parts}
    destroy()
    return results


def assemble(ranks: list[dict[str, Any]]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Full weights and gradients from the parts of all ranks; what several hold must be the same on each."""
    full: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for rank in ranks:
        for name, parts in rank["parts"].items():
            for piece, *values in parts:
                tensors = full.setdefault(
                    name, (torch.full(piece.shape, torch.nan), torch.full(piece.shape, torch.nan))
                )
                for tensor, value in zip(tensors, values, strict=True):
                    before = tensor[piece.slices]
                    if not before.isnan().any():
                        torch.testing.assert_close(value, before, atol=1e-6, rtol=1e-5, msg=f"{name} differs by rank")
                    tensor[piece.slices] = value
    return full


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Every case on one process and on the ranks of two."""
    return run(compute, 1, 1)[0], run(compute, 2, 2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_agree_with_one(results: tuple[dict[str, Any], list[dict[str, Any]]], case: str) -> None:
    wanted, got = results[0][case], [rank[case] for rank in results[1]]
    for rank in got:
        torch.testing.assert_close(rank["logits"], wanted["logits"], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(rank["loss"], wanted["loss"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(rank["stats"], wanted["stats"], atol=1e-5, rtol=1e-6)
    exact, full = assemble([wanted]), assemble(got)
    assert exact.keys() == full.keys()
    for name, (weight, grad) in full.items():
        assert torch.equal(weight, exact[name][0]), f"the initial {name} depends on the layout"
        torch.testing.assert_close(
            grad, exact[name][1], atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
