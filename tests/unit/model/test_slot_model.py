"""The whole model against `transformers` and against itself: the same function, whatever the batch or the switches."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from model_cases import (
    CPU,
    gradients,
    logical,
    make_batch,
    make_config,
    make_model,
    on_device,
    reference_logits,
    reference_loss,
    transformers_model,
)

from refusion_train.errors import ConfigError
from refusion_train.model.batch import DeviceBatch, to_device
from refusion_train.model.loss import STAT_INDEX
from refusion_train.model.slot_model import SlotModel, build_model_chunks, stage_shape
from refusion_train.parallel.groups import Groups


@pytest.mark.parametrize(
    ("qk_norm", "qkv_bias"), [(True, False), (False, False), (False, True)], ids=["qk_norm", "plain", "biases"]
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_agrees_with_transformers(groups: Groups, qk_norm: bool, qkv_bias: bool, tied: bool) -> None:
    """Logits, loss and every gradient, with permuted positions and several documents per row."""
    config = make_config(qk_norm=qk_norm, qkv_bias=qkv_bias, tie_embeddings=tied)
    model, batch = make_model(config, groups), make_batch()
    reference = transformers_model(config, logical(model))
    expected = reference_logits(reference, batch)
    real = torch.from_numpy(batch.document_ids >= 0)
    logits = model.logits(on_device(batch))
    assert expected.abs().max() > 1, "logits are too small to compare"
    torch.testing.assert_close(logits[real], expected[real], atol=1e-4, rtol=0)

    loss, _ = model(on_device(batch))
    loss.backward()
    wanted = reference_loss(expected, batch)
    wanted.backward()
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
    ours = gradients(model)
    for name, parameter in reference.named_parameters():
        grad = ours.pop(name)
        if grad.shape != parameter.shape:
            assert not grad[parameter.shape[0] :].any(), f"padded rows of {name} have a gradient"
            grad = grad[: parameter.shape[0]]
        torch.testing.assert_close(grad, parameter.grad, atol=2e-5, rtol=1e-4, msg=lambda text, name=name: name + text)
    assert not ours, f"no counterpart of {list(ours)}"


def test_positions_matter(groups: Groups) -> None:
    """The comparison above would pass without rotary angles if positions had no effect."""
    model, batch = make_model(make_config(), groups), make_batch()
    other = copy.deepcopy(batch)
    other.position_ids[:] = np.arange(batch.position_ids.shape[1])
    assert (model.logits(on_device(batch)) - model.logits(on_device(other))).abs().max() > 1e-2


def test_bidirectional_sees_the_whole_document(groups: Groups) -> None:
    """Against `transformers` with a dense mask of equal documents."""
    config = make_config()
    model, batch = make_model(config, groups, bidirectional=True), make_batch()
    reference = transformers_model(config, logical(model))
    ids = torch.from_numpy(batch.document_ids)
    mask = (ids[:, None, :, None] == ids[:, None, None, :]).float().log()
    expected = reference(
        input_ids=torch.from_numpy(batch.input_ids), position_ids=torch.from_numpy(batch.position_ids),
        attention_mask=mask, use_cache=False,
    ).logits  # fmt: skip
    real = ids >= 0
    torch.testing.assert_close(model.logits(on_device(batch))[real], expected[real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_documents_do_not_see_each_other(groups: Groups, bidirectional: bool) -> None:
    model, batch = make_model(make_config(), groups, bidirectional), make_batch()
    before = model.logits(on_device(batch))
    changed = (0, slice(10, 20))
    batch.input_ids[changed] = (batch.input_ids[changed] + 1) % 50
    batch.position_ids[changed] = batch.position_ids[changed][::-1]
    after = model.logits(on_device(batch))
    assert (before[changed] != after[changed]).any(dim=-1).all(), "the change has no effect"
    kept = torch.ones(before.shape[:2], dtype=torch.bool)
    kept[changed] = False
    assert torch.equal(before[kept], after[kept])


def test_causal_in_physical_order(groups: Groups) -> None:
    model, batch = make_model(make_config(), groups), make_batch()
    before = model.logits(on_device(batch))
    batch.input_ids[1, 12] = (batch.input_ids[1, 12] + 1) % 50
    after = model.logits(on_device(batch))
    assert torch.equal(before[1, :12], after[1, :12])
    assert (before[1, 12:20] != after[1, 12:20]).any(dim=-1).all()


def kept_bytes(model: SlotModel, batch: DeviceBatch) -> int:
    """Bytes of activations that a forward pass keeps for the backward pass."""
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = model(batch)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    del loss
    return sum(size for pointer, size in storages.items() if pointer not in weights)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qk_norm", "plain"])
def test_recomputation_changes_nothing(groups: Groups, recompute: str, qk_norm: bool) -> None:
    config, batch = make_config(qk_norm=qk_norm), on_device(make_batch())
    plain = make_model(config, groups)
    loss, stats = plain(batch)
    loss.backward()
    config.train.recompute = recompute
    thrifty = make_model(config, groups)
    assert kept_bytes(thrifty, batch) < 0.8 * kept_bytes(plain, batch), "recomputation keeps as much"
    other_loss, other_stats = thrifty(batch)
    other_loss.backward()
    assert torch.equal(loss, other_loss) and torch.equal(stats, other_stats)
    wanted = gradients(plain)
    for name, grad in gradients(thrifty).items():
        torch.testing.assert_close(grad, wanted[name], atol=1e-6, rtol=1e-5)


def test_without_a_target_the_loss_is_zero_and_backward_runs(groups: Groups) -> None:
    model, batch = make_model(make_config(), groups), make_batch()
    batch.target_kind[:] = 0
    loss, stats = model(on_device(batch))
    assert loss.item() == 0 and not stats.any()
    loss.backward()
    assert all(not grad.any() for grad in gradients(model).values())


def test_split_into_micro_batches_has_the_same_gradient(groups: Groups) -> None:
    config, batch = make_config(), make_batch()
    whole, halves = make_model(config, groups), make_model(config, groups)
    loss, stats = whole(on_device(batch))
    loss.backward()
    sums = torch.zeros_like(stats)
    for row in range(2):
        part = batch.rows(row, row + 1)
        half, numbers = halves(to_device(part, part.loss_weight, CPU))
        half.backward()
        sums += numbers
    torch.testing.assert_close(sums, stats, atol=0, rtol=1e-6)
    wanted = gradients(whole)
    for name, grad in gradients(halves).items():
        torch.testing.assert_close(grad, wanted[name], atol=1e-6, rtol=1e-5)


def test_initial_weights_are_a_function_of_seed_and_name(groups: Groups) -> None:
    config = make_config()
    first, again = (logical(build_model_chunks(config, groups, False)[0]) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    config.model.num_layers, config.model.vocab_multiple = 2, 128
    shallow = logical(build_model_chunks(config, groups, False)[0])
    for name, value in shallow.items():
        same = value[:64] if name == "model.embed_tokens.weight" else value
        if "o_proj" in name or "down_proj" in name:  # their scale depends on the depth
            same = same / 2**0.5
        torch.testing.assert_close(same, first[name], atol=1e-6, rtol=1e-6)
    config.seed = 4
    other = logical(build_model_chunks(config, groups, False)[0])
    assert all(value.dim() == 1 or not torch.equal(value, shallow[name]) for name, value in other.items())
    assert not first["model.embed_tokens.weight"][50:].any()


def test_initial_scale(groups: Groups) -> None:
    weights = logical(build_model_chunks(make_config(init_std=0.02), groups, False)[0])
    for name, value in weights.items():
        if value.dim() == 1:
            assert torch.equal(value, torch.ones_like(value))
            continue
        wanted = 0.02 / 8**0.5 if "o_proj" in name or "down_proj" in name else 0.02
        used = value[:50] if "embed" in name else value
        assert abs(used.std().item() / wanted - 1) < 0.1, f"{name} has deviation {used.std()}"


def test_bf16_is_close_to_fp32(groups: Groups) -> None:
    config, batch = make_config(init_std=0.05), on_device(make_batch())
    exact, exact_stats = make_model(config, groups)(batch)
    config.train.precision = "bf16"
    model = make_model(config, groups)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    loss, stats = model(batch)
    loss.backward()
    assert loss.dtype == torch.float32 and stats.dtype == torch.float64
    assert abs(loss.item() / exact.item() - 1) < 0.01
    assert abs(stats[STAT_INDEX["ce_clean"]] / exact_stats[STAT_INDEX["ce_clean"]] - 1) < 0.01
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_needs_a_vocabulary(groups: Groups) -> None:
    config = make_config(vocab_size=None)
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        build_model_chunks(config, groups, False)


def test_stage_shape_is_one_run_of_tokens() -> None:
    assert stage_shape(make_config()) == {"seq_length": 96, "micro_batch_size": 1}
