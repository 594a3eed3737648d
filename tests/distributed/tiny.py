"""A model small enough to train in a second, random batches for it, and runs of it on any layout of ranks."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from processes import run

from refusion_train.checkpoint import store
from refusion_train.checkpoint.layout import restore, tensors_to_save
from refusion_train.checkpoint.sharded import ShardedEntry
from refusion_train.config import Config, ModelConfig
from refusion_train.model.batch import DeviceBatch, to_device
from refusion_train.model.loss import STAT_INDEX
from refusion_train.model.slot_model import SlotModel, build_model_chunks
from refusion_train.objective.batch import Batch
from refusion_train.parallel.engine import Engine
from refusion_train.parallel.groups import Groups, destroy, init_groups

VOCABULARY = 250  # padded to 256: the padding is part of what is tested
DECAY = 0.1

Layout = dict[str, Any]  # changes of a configuration: see tiny_config


def tiny_config(**changes: Any) -> Config:
    """Four layers, grouped queries, q/k norm; 8 rows of 32 tokens a step. `changes`: parallel__tensor=2."""
    config = Config()
    config.model = ModelConfig(
        hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48,
        vocab_size=VOCABULARY, init_std=0.1,
    )  # fmt: skip
    config.data.sequence_length, config.data.streams = 32, 8
    config.train.global_batch_size, config.train.micro_batch_size = 8, 2
    config.train.precision, config.train.lr, config.train.weight_decay = "fp32", 1e-3, DECAY
    for name, value in changes.items():
        section, key = name.split("__")
        assert hasattr(getattr(config, section), key), f"no key {section}.{key}"
        setattr(getattr(config, section), key, value)
    return config


def layout_of(words: str) -> Layout:
    """The changes that a short name stands for: 'tp2 sp pp2 vp2 zero2 full' and the like.

    'first3' and 'last1' are layers of the ends; 'rows4': rows of a micro-batch.
    """
    keys = {
        "tp": "parallel__tensor", "pp": "parallel__pipeline", "vp": "parallel__virtual_pipeline",
        "zero": "parallel__zero_stage", "first": "parallel__pipeline_first", "last": "parallel__pipeline_last",
        "layers": "model__num_layers", "rows": "train__micro_batch_size",
    }  # fmt: skip
    changes: Layout = {}
    for word in words.split():
        name = word.rstrip("0123456789")
        if name in keys:
            changes[keys[name]] = int(word[len(name) :])
        elif name in ("selective", "full"):
            changes["train__recompute"] = word
        elif name == "untied":
            changes["model__tie_embeddings"] = False
        else:
            assert name in ("sp", "dp"), f"'{word}' is no part of a layout"
            changes |= {"parallel__sequence": True} if name == "sp" else {}
    return changes


def processes_of(words: str) -> int:
    """Ranks of a layout; 1 is one of them."""
    return math.prod(int(word[2:]) for word in words.split() if word[:2] in ("tp", "pp", "dp"))


def global_batch(config: Config, step: int) -> tuple[Batch, np.ndarray]:
    """Rows of several documents with permuted positions and targets of both kinds, and their final weights."""
    random = np.random.default_rng(1000 + step)
    rows, length = config.train.global_batch_size, config.data.sequence_length
    starts = np.zeros((rows, length), dtype=bool)
    for row in starts:
        row[random.choice(np.arange(1, length), 2, replace=False)] = True
    kinds = random.integers(0, 3, (rows, length)).astype(np.uint8)
    if step == 1:
        kinds[1::2] = 0  # the second of two data-parallel ranks has nothing to predict
    batch = Batch(
        input_ids=random.integers(0, VOCABULARY, (rows, length)),
        position_ids=np.stack([random.permutation(length) for _ in range(rows)]),
        document_ids=np.cumsum(starts, axis=1, dtype=np.int32),
        labels=random.integers(0, VOCABULARY, (rows, length)),
        loss_weight=np.ones((rows, length), np.float32),
        target_kind=kinds,
        noise_bucket=random.integers(0, 10, (rows, length)).astype(np.uint8),
        counts=np.zeros((rows, 3)),
    )
    weights = random.random((rows, length)) * (kinds != 0)
    return batch, (weights / weights.sum()).astype(np.float32)


def micro_batches(config: Config, step: int, dp_rank: int, dp_size: int) -> list[DeviceBatch]:
    """This data-parallel rank's rows of the global batch of a step, in micro-batches."""
    batch, weights = global_batch(config, step)
    mine = np.arange(config.train.global_batch_size)[dp_rank::dp_size]
    size = config.train.micro_batch_size
    parts = [mine[start : start + size] for start in range(0, len(mine), size)]
    return [to_device(_rows(batch, part), weights[part], torch.device("cpu")) for part in parts]


def _rows(batch: Batch, index: np.ndarray) -> Batch:
    return Batch(**{name: values[index] for name, values in vars(batch).items()})


def param_groups(chunks: list[SlotModel]) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = list(dict.fromkeys(p for chunk in chunks for p in chunk.parameters()))
    decaying, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    return [{"params": decaying, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]


def start(config: Config) -> tuple[Groups, Engine]:
    """Join the group and build the engine."""
    groups = init_groups(config, timeout_s=120)
    return groups, Engine(config, groups, build_model_chunks(config, groups, bidirectional=False), param_groups)


def one_step(engine: Engine, step: int) -> tuple[float, float]:
    """Loss and gradient norm of an optimizer step."""
    groups = engine.groups
    engine.forward_backward(micro_batches(engine.config, step, groups.dp_rank, groups.dp_size))
    result = engine.step(engine.config.train.lr)
    return result.statistics[STAT_INDEX["loss"]].item(), result.grad_norm


@dataclass
class Curve:
    """What a run showed. curve: float64 [steps, 2], loss and norm; parts: what this rank would save, copied."""

    curve: np.ndarray
    parts: dict[str, tuple[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]]]


def train(config: Config, first: int = 0, last: int = 10, root: str | None = None) -> Curve:
    """Steps first..last on this layout. With `root`, a folder of checkpoints: from that of `first`, and saved."""
    _, engine = start(config)
    if root is not None and first:
        restore(engine, lambda tensors: store.load(Path(root, store.step_name(first)), tensors))
        assert engine.optimizer_steps == first, f"{engine.optimizer_steps} steps restored instead of {first}"
    curve = [one_step(engine, step) for step in range(first, last)]
    tensors = tensors_to_save(engine)
    if root is not None and last > first:
        store.save(root, last, tensors, {}, keep=100)
    parts = {
        name: (tuple(entry.shape), {offsets: part.clone() for offsets, part in entry.parts.items()})
        for name, entry in tensors.items()
        if isinstance(entry, ShardedEntry)
    }
    destroy()
    return Curve(np.array(curve), parts)


def assemble(results: list[Curve]) -> dict[str, torch.Tensor]:
    """The whole logical tensors from what all ranks would save; every element must come from exactly one rank."""
    tensors: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    for result in results:
        for name, (shape, parts) in result.parts.items():
            tensors.setdefault(name, torch.zeros(shape))
            counts.setdefault(name, torch.zeros(shape))
            for offsets, part in parts.items():
                place = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
                tensors[name][place] = part
                counts[name][place] += 1
    for name, count in counts.items():
        assert (count == 1).all(), f"{name}: elements are saved {count.min():.0f} to {count.max():.0f} times"
    return tensors


def train_plainly(config: Config, steps: int = 10) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """The reference: one process, torch's AdamW and clipping, no DeepSpeed, no schedule, no accumulation.

    Loss and norm of every step, and the final logical weights.
    """
    groups = init_groups(config)
    (model,) = build_model_chunks(config, groups, bidirectional=False)
    train = config.train
    optimizer = torch.optim.AdamW(param_groups([model]), lr=train.lr, betas=(train.beta1, train.beta2))
    curve = []
    for step in range(steps):
        batch, weights = global_batch(config, step)
        loss, _ = model(to_device(batch, weights, torch.device("cpu")))
        optimizer.zero_grad()
        loss.backward()
        limit = train.clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    parameters = dict(model.named_parameters())
    weights = {
        piece.name: piece.take(parameters[name].detach()).clone()
        for name, parts in model.pieces().items()
        for piece in parts
    }
    destroy()
    return np.array(curve), weights


@functools.cache
def _reference(changes: tuple[tuple[str, Any], ...]) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    (result,) = run(train_plainly, 1, tiny_config(**dict(changes)))
    return result


def reference(**changes: Any) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """What `train_plainly` says of a model; of `changes` those of the layout are left out."""
    model = {name: value for name, value in changes.items() if name.startswith("model__")}
    return _reference(tuple(sorted(model.items())))


def distance(results: list[Curve], layout: Layout) -> tuple[float, float]:
    """Largest differences from the reference: of losses and norms over all ranks, and of final weights."""
    curve, weights = reference(**layout)
    tensors = assemble(results)
    assert {name for name in tensors if name.endswith(".master")} == {f"{name}.master" for name in weights}
    return (
        max(float(np.abs(result.curve - curve).max()) for result in results),
        max(float((tensors[f"{name}.master"] - weights[name]).abs().max()) for name in weights),
    )
