"""Bubbles, FLOPs, lengths and durations: published settings, simulations and the real objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from refusion_train.config import Config, ObjectiveConfig
from refusion_train.errors import ConfigError
from refusion_train.plan import compute, mixed, plan

# Megatron-LM's script for table 1 of arXiv 2104.04473 (examples/sc21/run_table_1.sh): pipeline, micro-batch, global
# batch, layers, hidden, heads, hosts of 8, layers per chunk (None: one chunk) -> chunks, micro-batches. Tensor: 8.
MEGATRON = {
    "39B": (2, 4, 1536, 48, 8192, 64, 64, None, 1, 12),
    "76B": (4, 2, 1792, 60, 10240, 80, 128, 5, 3, 28),
    "145B": (8, 2, 2304, 80, 12288, 96, 192, 5, 2, 48),
    "310B": (16, 1, 2160, 96, 16384, 128, 240, 3, 2, 144),
    "530B": (35, 1, 2520, 105, 20480, 128, 315, 1, 3, 280),
    "1T": (64, 1, 3072, 128, 25600, 160, 384, None, 1, 512),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_bubble_of_published_settings(name: str) -> None:
    pipeline, micro_batch, batch, layers, hidden, heads, hosts, per_chunk, chunks, micro_batches = MEGATRON[name]
    config = Config()
    model = config.model
    model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads = hidden, layers, heads, heads
    model.head_dim, model.ffn_size, model.vocab_size = hidden // heads, 4 * hidden, 51_200
    config.data.sequence_length = 2048
    config.train.micro_batch_size, config.train.global_batch_size = micro_batch, batch
    config.parallel.tensor, config.parallel.pipeline = 8, pipeline
    config.parallel.virtual_pipeline = 1 if per_chunk is None else layers // pipeline // per_chunk
    config.data.streams = hosts * 8 // (8 * pipeline)
    found = plan(config, hosts * 8)
    assert found.layout.virtual_pipeline == chunks
    assert found.layout.micro_batches == micro_batches
    assert found.bubble == (pipeline - 1) / (chunks * micro_batches)


def test_flops_by_hand() -> None:
    config = _config()
    layer = 64 * (2 * 4 * 32 + 2 * 2 * 32) + 3 * 64 * 160
    assert compute.flops_per_token(config, 500, 0.0) == 6 * 2 * layer
    assert compute.flops_per_token(config, 500, 0.5) - compute.flops_per_token(config, 500, 0.0) == 6 * 0.5 * 500 * 64
    # 2 layers, 4 heads of 32: 2 products of 2 * 128 FLOPs with half of 100 keys, three times.
    causal = 2 * 3 * 2 * (2 * 128) * 50
    assert compute.attention_flops(config, 100) == causal
    assert compute.flops_per_token(config, 500, 1.0, 100) - compute.flops_per_token(config, 500, 1.0) == causal
    config.objective.name = "mdm"
    assert compute.attention_flops(config, 100) == 2 * causal
    config.train.recompute = "full"
    assert compute.recompute_flops(config, 100) == 2 * 2 * layer + 2 * causal / 3
    config.train.recompute = "none"
    assert compute.recompute_flops(config, 100) == 0


@pytest.mark.parametrize("length", [1, 10, 63, 101, 999])
def test_attended_length_is_that_of_packed_documents(length: int, row: int = 64) -> None:
    """Documents of equal length behind each other, cut at the ends of rows; token-weighted mean of the pieces."""
    cuts = np.union1d(np.arange(0, length * row * 50 + 1, length), np.arange(0, length * row * 50 + 1, row))
    pieces = np.diff(cuts).astype(float)
    assert compute.attended_length(length, row) == pytest.approx((pieces**2).sum() / pieces.sum(), rel=0.02)


@pytest.mark.parametrize(
    ("objective", "prompt"),
    [
        ({}, 1), ({}, 0), ({}, 30), ({"cross_slot_targets": False}, 1),
        ({"cross_slot_targets": False, "slot_sizes": [2, 8], "slot_weights": [3, 1]}, 1),
        ({"partial_slot_probability": 0.5}, 1), ({"ar_probability": 0.3}, 1), ({"ar_probability": 0.3}, 0),
        ({"cross_slot_targets": False, "slot_sizes": [2], "ar_probability": 0.6}, 1),
        ({"name": "mdm"}, 1), ({"name": "ar"}, 1), ({"name": "ar"}, 0),
    ],
)  # fmt: skip
def test_supervised_fraction_is_that_of_the_objective(objective: dict[str, Any], prompt: int, length: int = 32) -> None:
    from refusion_train.objective import make_objective
    from refusion_train.objective.batch import PackedDocuments
    from refusion_train.objective.noise import document_key

    documents = 20_000
    starts = np.arange(documents) * length
    settings = ObjectiveConfig(**objective)
    packed = PackedDocuments(
        tokens=np.full((documents, length), 9, np.int32), starts=starts, lengths=np.full(documents, length),
        prompts=np.full(documents, prompt), keys=document_key(3, 0, np.arange(documents, dtype=np.uint64), 0),
    )  # fmt: skip
    batch = make_objective(settings, 1, 0, backend="numpy").corrupt(packed)
    measured = np.count_nonzero(batch.target_kind) / batch.target_kind.size
    assert compute.supervised_fraction(settings, length, prompt) == pytest.approx(measured, abs=0.006)


def test_a_document_without_response_has_no_targets() -> None:
    assert compute.supervised_fraction(ObjectiveConfig(), 5, 5) == 0


@dataclass
class _Index:
    documents: int = 1000
    tokens: int = 500_000
    vocab_size: int = 300


def test_the_dataset_gives_vocabulary_epochs_and_lengths() -> None:
    config = _config()
    config.model.vocab_size = None
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        plan(config, 1)
    found = plan(config, 1, dataset=_Index())
    assert config.model.vocab_size is None
    assert found.parameters.embedding == 300 * 64
    assert found.duration.tokens == 10 * 8 * 256
    assert found.duration.epochs == 10 * 8 * 256 / 500_000
    assert found.arithmetic.attended == compute.attended_length(500, 256)
    config.model.vocab_size = 500
    unknown = plan(config, 1)
    assert unknown.arithmetic.attended == 256 and unknown.duration.epochs is None
    assert plan(config, 1, dataset=_Index(documents=0, tokens=0)).arithmetic.attended == 256


def test_a_mixture_has_passes_of_each_source_and_the_documents_that_are_read() -> None:
    config = _config()
    config.model.vocab_size = None
    config.data.train = [{"path": "shards/long", "weight": 3}, {"path": "shards/short", "weight": 1, "epochs": 1}]
    sizes = [_Index(1000, 1_000_000), _Index(10, 1000)]
    found = plan(config, 1, dataset=mixed(config, sizes))
    tokens = 10 * 8 * 256
    assert found.duration.source_epochs == pytest.approx({"long": (tokens - 1000) / 1_000_000, "short": 1.0})
    assert found.parameters.embedding == 300 * 64
    mean = tokens / ((tokens - 1000) / 1000 + 10)  # as many documents of each as are read
    assert found.arithmetic.attended == pytest.approx(compute.attended_length(mean, 256))
    assert mixed(config, sizes[:1]) is sizes[0]


def test_days_and_speed() -> None:
    config = _config()
    found = plan(config, 2, gpu="h100", mfu=0.5).duration
    flops = plan(config, 2).arithmetic.flops_per_token
    assert found.tokens_per_s == pytest.approx(2 * 989e12 * 0.5 / flops)
    assert found.days is not None and found.tokens_per_s is not None
    assert found.days * 86_400 * found.tokens_per_s == pytest.approx(found.tokens)
    assert plan(config, 2).duration.days is None
    # 1e24 FLOPs on 1024 A100 at half of 312 TFLOP/s: 6.26e6 s
    assert compute.days(1e24, 1024, compute.gpu_named("A100"), 0.5) == pytest.approx(72.45, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda config: plan(config, 0), "--world-size 0"),
        (lambda config: plan(config, 1, mfu=1.5), "--mfu 1.5"),
        (lambda config: plan(config, 1, gpu="H10"), "H100"),
        (lambda config: plan(config, 3), "train.global_batch_size"),
    ],
)
def test_what_cannot_be_planned(call: Any, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as error:
        config = _config()
        config.data.streams = 24
        call(config)
    assert "\n" not in str(error.value)


def test_devices_are_recognised() -> None:
    names = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA A100-SXM4-80GB": "A100"}
    names |= {"NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA A100-PCIE-40GB": "A100-40GB"}
    for device, gpu in names.items():
        found = compute.gpu_of_device(device)
        assert found is not None and found.name == gpu
    assert compute.gpu_of_device("Some other") is None


def _config() -> Config:
    config = Config()
    model = config.model
    model.hidden_size, model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim = 64, 2, 4, 2, 32
    model.ffn_size, model.vocab_size = 160, 500
    config.data.sequence_length, config.train.steps, config.train.global_batch_size = 256, 10, 8
    return config
