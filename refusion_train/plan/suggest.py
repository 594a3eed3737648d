"""Layouts that fit: every sensible one is planned, what needs too much memory goes, the rest is put in order of speed.

The order rests on an estimate of a step's time, meant for comparing layouts and for nothing else: arithmetic of the
slowest stage at a common efficiency and the adding up of its gradients, stretched by the pipeline's bubble, plus the
time on the wire of tensor-parallel and ZeRO traffic as if nothing overlapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from refusion_train.config import Config, ParallelConfig, validate
from refusion_train.errors import ConfigError
from refusion_train.layouts import accepts
from refusion_train.plan import compute
from refusion_train.plan.activations import element_bytes
from refusion_train.plan.communication import PIPELINE, TENSOR, Traffic, traffic
from refusion_train.plan.compute import Gpu
from refusion_train.plan.memory import FP32, stage_memory
from refusion_train.plan.mixture import DatasetSize
from refusion_train.plan.parameters import Stage, stages, vocabulary
from refusion_train.plan.planner import (
    RECOMPUTE,
    Arithmetic,
    arithmetic_of,
    bubble,
    usable_bytes,
    with_vocabulary,
)

GPUS_PER_HOST = 8
MICRO_BATCHES = (1, 2, 4, 8, 16)
VIRTUAL = (1, 2, 3, 4, 5, 6, 7, 8)
# Speeds and links when no GPU is named.
_DEFAULT_GPU = "H100"


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits. overrides: the words for the command line; peak: bytes of the fullest rank; step_s: estimated
    seconds per step, for the order only."""

    tensor: int
    sequence: bool
    pipeline: int
    virtual_pipeline: int
    data: int
    zero_stage: int
    micro_batch_size: int
    recompute: str
    peak: int
    bubble: float
    step_s: float
    overrides: list[str]


def suggest(
    config: Config,
    world_size: int,
    gpu_memory_gib: float | None = None,
    *,
    gpu: str | None = None,
    mfu: float = 0.4,
    dataset: DatasetSize | None = None,
    limit: int | None = 10,
) -> list[Suggestion]:
    """The layouts for `world_size` GPUs that fit, the fastest first; empty if none does.

    Model, objective, data and global batch stay as they are. Tried: tensor within a host of 8 (with sequence
    parallelism), pipeline, virtual pipeline, and for each of these the fastest that fits of micro-batch sizes, ZeRO
    stages and recomputation.
    gpu: for its memory (unless gpu_memory_gib is given) and speeds; mfu: efficiency of the arithmetic alone.
    Raises ConfigError if neither memory nor GPU is given, or for a configuration that no layout can mend.
    """
    device = compute.gpu_named(gpu or _DEFAULT_GPU)
    if gpu_memory_gib is None and gpu is None:
        raise ConfigError("give --gpu or --gpu-memory, so that it is known what a layout must fit into")
    memory = usable_bytes(device.memory_gib if gpu_memory_gib is None else gpu_memory_gib)
    validate(replace(config, parallel=ParallelConfig()))  # the layout is what is sought
    config = with_vocabulary(config, dataset)
    best: dict[tuple[int, int, int], Suggestion] = {}
    for shape, data, every in _shapes(config, world_size):
        entry = _lightest(shape, data, every, memory, device, mfu, dataset)
        if entry is not None:
            key = entry.tensor, entry.pipeline, entry.virtual_pipeline
            best[key] = min(best.get(key, entry), entry, key=_order)
    # Stages are equal here; a configuration that says otherwise must be told.
    uneven = [f"parallel.{key}=null" for key in ("pipeline_first", "pipeline_last") if getattr(config.parallel, key)]
    return [replace(entry, overrides=entry.overrides + uneven) for entry in sorted(best.values(), key=_order)[:limit]]


def _order(entry: Suggestion) -> tuple[float, ...]:
    """Fastest first; of those within a percent the one in fewer pieces, then the one that needs less memory."""
    pieces = entry.tensor * entry.pipeline * entry.virtual_pipeline
    return (round(100 * math.log(entry.step_s)), pieces, entry.zero_stage, entry.peak)


def _shapes(config: Config, world_size: int) -> Iterator[tuple[Config, int, list[Stage]]]:
    """Every layout that can be right, without recomputation and with ZeRO 1; its data-parallel size, stages."""
    layers = config.model.num_layers
    for tensor in (size for size in (1, 2, 4, 8) if size <= min(GPUS_PER_HOST, world_size)):
        for pipeline in (size for size in range(1, layers + 1) if world_size % (tensor * size) == 0):
            for virtual in VIRTUAL if pipeline > 1 else (1,):
                parallel = replace(
                    config.parallel, tensor=tensor, sequence=tensor > 1, pipeline=pipeline, virtual_pipeline=virtual,
                    pipeline_first=None, pipeline_last=None, zero_stage=1,
                )  # fmt: skip
                every: list[Stage] | None = None
                for micro_batch in MICRO_BATCHES:
                    train = replace(config.train, micro_batch_size=micro_batch, recompute="none")
                    shape = replace(config, parallel=parallel, train=train)
                    if accepts(shape, world_size):
                        every = every or stages(shape)
                        yield shape, world_size // (tensor * pipeline), every


def _lightest(
    shape: Config, data: int, every: list[Stage], memory: int, gpu: Gpu, mfu: float, dataset: DatasetSize | None
) -> Suggestion | None:
    """The fastest of the ways to make a layout fit: ZeRO stages and recomputation; None if there is none."""
    micro_batches = shape.train.global_batch_size // (data * shape.train.micro_batch_size)
    zero_stages = (1,) if data == 1 else (1, 2, 3) if shape.parallel.pipeline == 1 else (1, 2)
    found = []
    for zero_stage in zero_stages:
        for recompute in RECOMPUTE:
            parallel = replace(shape.parallel, zero_stage=zero_stage)
            trial = replace(shape, parallel=parallel, train=replace(shape.train, recompute=recompute))
            peak = max(stage_memory(trial, stage, data, micro_batches).peak for stage in every)
            if peak <= memory:
                found.append(_suggestion(trial, data, every, peak, gpu, mfu, arithmetic_of(trial, dataset)))
                break  # more recomputation is slower
    return min(found, key=_order, default=None)


def _suggestion(
    config: Config, data: int, every: list[Stage], peak: int, gpu: Gpu, mfu: float, costs: Arithmetic
) -> Suggestion:
    parallel, train = config.parallel, config.train
    micro_batches = train.global_batch_size // (data * train.micro_batch_size)
    idle = bubble(parallel.pipeline, parallel.virtual_pipeline, micro_batches)
    keys = {
        "parallel.tensor": parallel.tensor, "parallel.sequence": str(parallel.sequence).lower(),
        "parallel.pipeline": parallel.pipeline, "parallel.virtual_pipeline": parallel.virtual_pipeline,
        "parallel.zero_stage": parallel.zero_stage, "train.micro_batch_size": train.micro_batch_size,
        "train.recompute": train.recompute,
    }  # fmt: skip
    return Suggestion(
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        data=data,
        zero_stage=parallel.zero_stage,
        micro_batch_size=train.micro_batch_size,
        recompute=train.recompute,
        peak=peak,
        bubble=idle,
        step_s=step_seconds(config, every, data, micro_batches, idle, gpu, mfu, costs),
        overrides=[f"{key}={value}" for key, value in keys.items()],
    )


def step_seconds(
    config: Config,
    every: list[Stage],
    data: int,
    micro_batches: int,
    idle: float,
    gpu: Gpu,
    mfu: float,
    costs: Arithmetic,
) -> float:
    """Estimated seconds per step; see the top of this file."""
    model, parallel = config.model, config.parallel
    head = 6.0 * model.hidden_size * vocabulary(model) * costs.supervised_fraction
    per_layer = (costs.flops_per_token - head + costs.recompute_flops_per_token) / model.num_layers
    slowest = max(stage.layers * per_layer + stage.head * head for stage in every)
    tokens = micro_batches * config.train.micro_batch_size * config.data.sequence_length
    arithmetic = slowest * tokens / parallel.tensor / (gpu.flops * mfu)
    # A gradient is written and read again, and the sum of it read and written, at each micro-batch.
    largest = max(stage.local(parallel.tensor) for stage in every)
    adding = micro_batches * largest * 2 * (element_bytes(config) + FP32) / (gpu.memory_gb_s * 1e9)
    one_host = parallel.tensor * parallel.pipeline * data <= GPUS_PER_HOST
    beyond = gpu.link_gb_s if one_host else gpu.network_gb_s
    sent = traffic(config, every, data, micro_batches)
    wire = sum(
        _seconds(kind, gpu.link_gb_s if kind.kind == TENSOR else beyond) for kind in sent if kind.kind != PIPELINE
    )
    return (arithmetic + adding) * (1 + idle) + wire


def _seconds(kind: Traffic, gb_per_s: float) -> float:
    return kind.largest / (gb_per_s * 1e9)
