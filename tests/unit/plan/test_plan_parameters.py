"""Counts of parameters: against transformers, against the table of names, and over stages and ranks."""

from __future__ import annotations

import math

import pytest

from refusion_train.config import Config, load
from refusion_train.errors import ConfigError
from refusion_train.plan.parameters import count, layer_weights, padded_vocabulary, stages

PUBLISHED = {"qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-8b": 8_190_735_360}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_shapes_have_the_parameters_of_qwen3(name: str) -> None:
    """The same number from transformers' own model of that shape, and in every split in stages."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = load(name)
    model = config.model
    with torch.device("meta"):
        reference = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=151_936, hidden_size=model.hidden_size, num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_heads, num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim,
                intermediate_size=model.ffn_size, tie_word_embeddings=model.tie_embeddings,
            )
        )  # fmt: skip
    expected = sum(parameter.numel() for parameter in reference.parameters())
    assert count(config).total == expected == PUBLISHED[name]
    config.parallel.pipeline = 4
    assert sum(count(config).per_stage) == expected


def test_counts_agree_with_the_table_of_names() -> None:
    from refusion_train.convert.names import logical_shapes, padded_vocab_size

    for tied in (True, False):
        for qk_norm, qkv_bias in ((True, False), (False, False), (False, True)):
            config = _small(tied)
            config.model.qk_norm, config.model.qkv_bias = qk_norm, qkv_bias
            counts = count(config)
            elements = sum(math.prod(shape) for shape in logical_shapes(config.model).values())
            assert counts.total + counts.padding == elements
            assert padded_vocabulary(config.model) == padded_vocab_size(config.model)


def test_padding_is_counted_apart() -> None:
    config = _small(tied=False)
    counts = count(config)
    assert counts.padding == 2 * 12 * 64
    assert counts.embedding == 2 * 500 * 64
    assert counts.per_rank == [counts.total + counts.padding]


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_hold_every_parameter_and_copies(tied: bool) -> None:
    config = _small(tied)
    config.parallel.pipeline, config.parallel.tensor = 2, 2
    counts, model = count(config), config.model
    copy = 512 * 64 if tied else 0
    vectors = 4 * (2 * model.hidden_size + 2 * model.head_dim) + model.hidden_size
    assert 2 * sum(counts.per_rank) == counts.total + counts.padding + copy + vectors
    assert counts.total == count(_small(tied)).total


def test_uneven_stages_hold_their_layers() -> None:
    config = _small(tied=True)
    config.model.num_layers, config.parallel.pipeline, config.parallel.virtual_pipeline = 28, 4, 2
    config.parallel.pipeline_first, config.parallel.pipeline_last = 6, 6
    every = stages(config)
    assert [stage.layers for stage in every] == [6, 8, 8, 6] and [stage.chunks for stage in every][1] == (4, 4)
    counts, per_layer = count(config), sum(weight.size for weight in layer_weights(config.model))
    assert counts.per_stage[1] - counts.per_stage[3] == 2 * per_layer - config.model.hidden_size
    config.parallel.pipeline_first = config.parallel.pipeline_last = None
    config.parallel.virtual_pipeline = 1
    assert count(config).total == counts.total


def test_unknown_vocabulary_is_refused() -> None:
    config = _small(tied=True)
    config.model.vocab_size = None
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        count(config)


def _small(tied: bool) -> Config:
    config = Config()
    model = config.model
    model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim = 64, 4, 4, 2, 32
    model.ffn_size, model.vocab_size, model.tie_embeddings = 160, 500, tied
    return config
