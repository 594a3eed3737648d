"""`plan`: everything that can be said about a run before any process starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from refusion_train.config import Config, validate
from refusion_train.errors import ConfigError
from refusion_train.layouts import data_parallel_size
from refusion_train.plan import activations, compute
from refusion_train.plan.communication import Traffic, traffic
from refusion_train.plan.compute import Gpu
from refusion_train.plan.memory import StageMemory, stage_memory
from refusion_train.plan.mixture import DatasetSize, MixedSize
from refusion_train.plan.parameters import ParameterCounts, Stage, count, stages, vocabulary

GIB = 1 << 30
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """Who is where: rank = tensor rank + tensor * (data rank + data * stage). micro_batches: of a step, per rank."""

    world_size: int
    tensor: int
    sequence: bool
    pipeline: int
    virtual_pipeline: int
    data: int
    zero_stage: int
    micro_batch_size: int
    micro_batches: int
    layers: list[int]
    ranks: list[str]


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs per token, of the model and of recomputation, and what they depend on.

    attended: length of a token's document piece, averaged over tokens; measured_length: whether it comes from the
    dataset (else one document per row: an upper bound).
    """

    flops_per_token: float
    attention_flops_per_token: float
    recompute_flops_per_token: float
    supervised_fraction: float
    attended: float
    measured_length: bool


@dataclass(frozen=True)
class Duration:
    """Tokens of a run and, where dataset and GPU are known, passes over the data and days (at `mfu`).

    source_epochs: passes over each of several sources.
    """

    tokens_per_step: int
    steps: int
    tokens: int
    epochs: float | None
    mfu: float
    tokens_per_s: float | None
    days: float | None
    source_epochs: dict[str, float] | None = None


@dataclass(frozen=True)
class Plan:
    """See `plan`. memory: one per stage; activations: by recompute mode, of the stage that keeps the most."""

    layout: Layout
    parameters: ParameterCounts
    memory: list[StageMemory]
    activations: dict[str, int]
    bubble: float
    traffic: list[Traffic]
    arithmetic: Arithmetic
    duration: Duration
    gpu: Gpu | None
    gpu_memory_gib: float | None

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank needs."""
        return max(stage.peak for stage in self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether that is less than a GPU has to give; None if its memory is not known."""
        return None if self.gpu_memory_gib is None else self.peak <= usable_bytes(self.gpu_memory_gib)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        return {
            **asdict(self),
            "memory": [stage.to_dict() for stage in self.memory],
            "peak": self.peak,
            "fits": self.fits,
        }


def usable_bytes(gpu_memory_gib: float) -> int:
    """What of a GPU's memory tensors can have: less 1.5 GiB for CUDA, NCCL and kernels, and 5 % that stay unused
    between the allocator's blocks."""
    return int((gpu_memory_gib - 1.5) * 0.95 * GIB)


def bubble(pipeline: int, virtual: int, micro_batches: int) -> float:
    """Idle time of the pipeline as a share of its working time: (p - 1) / (v m).

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, for 1F1B (v = 1) and the interleaved schedule; stages are
    taken to be equally long.
    """
    return (pipeline - 1) / (virtual * micro_batches)


def plan(
    config: Config,
    world_size: int,
    *,
    gpu: str | None = None,
    gpu_memory_gib: float | None = None,
    mfu: float = 0.4,
    dataset: DatasetSize | None = None,
) -> Plan:
    """What a run of `config` on `world_size` ranks holds, computes and sends.

    gpu: one of `compute.GPU_NAMES`, for memory and speed; gpu_memory_gib: instead of what that GPU has; mfu: share of
    the GPU's peak that the model's FLOPs reach; dataset: its size, for the vocabulary, epochs and lengths of documents.
    Raises ConfigError for a layout that cannot work, an unknown GPU, or a vocabulary that is not known.
    """
    if world_size < 1:
        raise ConfigError(f"--world-size {world_size} must be at least 1")
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu} must lie between 0 and 1")
    validate(config, world_size)
    config = with_vocabulary(config, dataset)
    device = None if gpu is None else compute.gpu_named(gpu)
    if gpu_memory_gib is None and device is not None:
        gpu_memory_gib = device.memory_gib
    every = stages(config)
    layout = _layout(config, world_size, every)
    arithmetic = arithmetic_of(config, dataset)
    return Plan(
        layout=layout,
        parameters=count(config),
        memory=[stage_memory(config, stage, layout.data, layout.micro_batches) for stage in every],
        activations={
            mode: max(activations.stage_bytes(config, stage, layout.micro_batches, mode) for stage in every)
            for mode in RECOMPUTE
        },
        bubble=bubble(layout.pipeline, layout.virtual_pipeline, layout.micro_batches),
        traffic=traffic(config, every, layout.data, layout.micro_batches),
        arithmetic=arithmetic,
        duration=_duration(config, world_size, arithmetic, device, mfu, dataset),
        gpu=device,
        gpu_memory_gib=gpu_memory_gib,
    )


def with_vocabulary(config: Config, dataset: DatasetSize | None) -> Config:
    """The configuration with `model.vocab_size` set, from the dataset if need be; `config` itself is not changed."""
    import copy

    if config.model.vocab_size is None and dataset is not None:
        config = copy.deepcopy(config)
        config.model.vocab_size = dataset.vocab_size
    vocabulary(config.model)
    return config


def arithmetic_of(config: Config, dataset: DatasetSize | None) -> Arithmetic:
    """FLOPs per token. Without a dataset, or with an empty one, a row is taken to be one document."""
    row = config.data.sequence_length
    known = dataset is not None and dataset.documents > 0
    length = dataset.tokens / dataset.documents if dataset is not None and known else float(row)
    attended = compute.attended_length(length, row) if known else float(row)
    supervised = compute.supervised_fraction(config.objective, length)
    total = compute.flops_per_token(config, vocabulary(config.model), supervised, attended)
    return Arithmetic(
        flops_per_token=total,
        attention_flops_per_token=compute.attention_flops(config, attended),
        recompute_flops_per_token=compute.recompute_flops(config, attended),
        supervised_fraction=supervised,
        attended=attended,
        measured_length=known,
    )


def _layout(config: Config, world_size: int, every: list[Stage]) -> Layout:
    parallel, train = config.parallel, config.train
    data = data_parallel_size(config, world_size)
    per_stage = parallel.tensor * data
    return Layout(
        world_size=world_size,
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        data=data,
        zero_stage=parallel.zero_stage,
        micro_batch_size=train.micro_batch_size,
        micro_batches=train.global_batch_size // (data * train.micro_batch_size),
        layers=[stage.layers for stage in every],
        ranks=[_span(stage.number * per_stage, (stage.number + 1) * per_stage - 1) for stage in every],
    )


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _duration(
    config: Config, world_size: int, arithmetic: Arithmetic, gpu: Gpu | None, mfu: float, dataset: DatasetSize | None
) -> Duration:
    per_step = config.train.global_batch_size * config.data.sequence_length
    tokens = per_step * config.train.steps
    speed = None if gpu is None else world_size * gpu.flops * mfu / arithmetic.flops_per_token
    return Duration(
        tokens_per_step=per_step,
        steps=config.train.steps,
        tokens=tokens,
        epochs=tokens / dataset.tokens if dataset is not None and dataset.tokens else None,
        mfu=mfu,
        tokens_per_s=speed,
        days=None if gpu is None else compute.days(tokens * arithmetic.flops_per_token, world_size, gpu, mfu),
        source_epochs=dataset.epochs if isinstance(dataset, MixedSize) else None,
    )
