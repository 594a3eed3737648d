"""The table of names: every part of every tensor is held exactly once in every layout and comes back unchanged."""

from __future__ import annotations

import itertools

import pytest
import torch
from model_cases import make_config, transformers_model

from refusion_train.config import ModelConfig
from refusion_train.convert.names import join, logical_shapes, padded_vocab_size, pieces, split


def parameters(model: ModelConfig, tp: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a rank that holds all layers, as megatron-core makes them."""
    hidden, heads, groups, dim = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attention.linear_qkv.weight": ((heads + 2 * groups) * dim // tp, hidden),
        "self_attention.linear_proj.weight": (hidden, heads * dim // tp),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * model.ffn_size // tp, hidden),
        "mlp.linear_fc2.weight": (hidden, model.ffn_size // tp),
    }
    if model.qkv_bias:
        layer["self_attention.linear_qkv.bias"] = ((heads + 2 * groups) * dim // tp,)
    if model.qk_norm:
        layer |= {"self_attention.q_layernorm.weight": (dim,), "self_attention.k_layernorm.weight": (dim,)}
    shapes = {"embedding.weight": (padded_vocab_size(model) // tp, hidden)}
    for number in range(model.num_layers):
        shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    if not model.tie_embeddings:
        shapes["head.weight"] = shapes["embedding.weight"]
    return shapes


def shape_of(**changes: int | bool) -> ModelConfig:
    return make_config(num_heads=8, num_kv_heads=4, head_dim=6, **changes).model


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("qk_norm", "tied"), list(itertools.product([True, False], repeat=2)))
def test_split_then_join_is_the_identity(tp: int, qk_norm: bool, tied: bool) -> None:
    model = shape_of(qk_norm=qk_norm, qkv_bias=not qk_norm, tie_embeddings=tied)
    for rank in range(tp):
        for name, shape in parameters(model, tp).items():
            parts = pieces(name, model, rank, tp, layer_offset=0)
            parameter, copy = torch.randn(shape), torch.full(shape, torch.nan)
            taken = split(parameter, parts)
            assert sum(part.numel() for part in taken.values()) == parameter.numel()
            join(copy, parts, taken)
            assert torch.equal(copy, parameter), name


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_hold_every_element_exactly_once(tp: int, tied: bool) -> None:
    """From full tensors to the ranks and back: nothing is lost, nothing is there twice, replicas are whole."""
    model = shape_of(tie_embeddings=tied, qkv_bias=tied)
    full = {name: torch.randn(shape) for name, shape in logical_shapes(model).items()}
    back = {name: torch.full(shape, torch.nan) for name, shape in logical_shapes(model).items()}
    seen = {name: torch.zeros(shape) for name, shape in logical_shapes(model).items()}
    for rank in range(tp):
        for name, shape in parameters(model, tp).items():
            parts = pieces(name, model, rank, tp, layer_offset=0)
            parameter = torch.empty(shape)
            join(parameter, parts, full, full=True)
            for part in parts:
                assert part.shape == tuple(full[part.name].shape), part.name
                back[part.name][part.slices] = part.take(parameter)
                seen[part.name][part.slices] += 1
                assert part.replicated == ("norm" in part.name)
    for name, value in full.items():
        assert torch.equal(back[name], value), name
        assert (seen[name] == (tp if "norm" in name else 1)).all(), name


def test_rows_of_the_joint_matrices() -> None:
    """By hand: 2 groups of 2 heads of width 1; rank 1 of 2 holds queries 2 and 3, key 1, value 1."""
    model = ModelConfig(
        hidden_size=1, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=1, ffn_size=4, vocab_size=8, vocab_multiple=4
    )
    parts = pieces("decoder.layers.0.self_attention.linear_qkv.weight", model, tp_rank=1, tp_size=2, layer_offset=2)
    names = [f"model.layers.2.self_attn.{kind}_proj.weight" for kind in "qkv"]
    full = {name: torch.arange(1.0, 5)[:, None] * 10**i for i, name in enumerate(names)}
    rank = torch.zeros(4, 1)
    join(rank, parts, full, full=True)
    assert rank.flatten().tolist() == [3, 4, 20, 200]

    whole = torch.arange(8.0)[:, None]  # q0 q1 k0 v0 q2 q3 k1 v1
    parts = pieces("decoder.layers.0.self_attention.linear_qkv.weight", model, 0, 1, layer_offset=2)
    assert [value.flatten().tolist() for value in split(whole, parts).values()] == [[0, 1, 4, 5], [2, 6], [3, 7]]

    gate_up = pieces("decoder.layers.1.mlp.linear_fc1.weight", model, tp_rank=1, tp_size=2, layer_offset=0)
    taken = split(torch.arange(4.0)[:, None], gate_up)
    assert {name: value.flatten().tolist() for name, value in taken.items()} == {
        "model.layers.1.mlp.gate_proj.weight": [0, 1],
        "model.layers.1.mlp.up_proj.weight": [2, 3],
    }
    assert gate_up[0].slices == (slice(2, 4), slice(None))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("qk_norm", "qkv_bias"), [(True, False), (False, False), (False, True)])
def test_names_and_shapes_are_those_of_transformers(tied: bool, qk_norm: bool, qkv_bias: bool) -> None:
    config = make_config(tie_embeddings=tied, qk_norm=qk_norm, qkv_bias=qkv_bias, vocab_multiple=50)
    shapes = logical_shapes(config.model)
    reference = transformers_model(config, {name: torch.zeros(shape) for name, shape in shapes.items()})
    assert shapes == {name: tuple(parameter.shape) for name, parameter in reference.named_parameters()}


def test_last_stage_copy_has_the_name_of_the_embedding() -> None:
    model = shape_of(tie_embeddings=True)
    assert pieces("head.weight", model, 0, 1, 0) == pieces("embedding.weight", model, 0, 1, 0)
    untied = shape_of(tie_embeddings=False)
    assert pieces("head.weight", untied, 0, 1, 0)[0].name == "lm_head.weight"


def test_vocabulary_is_padded_alike_in_every_layout() -> None:
    assert padded_vocab_size(shape_of()) == 64
    assert padded_vocab_size(shape_of(vocab_size=64)) == 64
    assert padded_vocab_size(shape_of(vocab_size=65)) == 128


@pytest.mark.parametrize("name", ["pooler.weight", "decoder.layers.0.self_attention.linear_proj.bias"])
def test_unknown_parameter(name: str) -> None:
    with pytest.raises(KeyError):
        pieces(name, shape_of(), 0, 1, 0)


def test_put_refuses_a_wrong_shape() -> None:
    (part,) = pieces("decoder.final_layernorm.weight", shape_of(), 0, 1, 0)
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        part.put(torch.zeros(32), torch.zeros(31))
