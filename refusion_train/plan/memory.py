"""Bytes on each rank: what stays, what comes and goes, and when the most is needed.

This follows what `parallel.engine` really does with DeepSpeed 0.19. With ZeRO 1, and in any pipeline, the gradients of
all micro-batches of a step add up whole, in float32, on the parameters, and are reduced once, after the schedule. ZeRO
2 and 3 without a pipeline reduce them in every backward pass, so that only a rank's shard adds up.
`benchmarks/memory.py` measures all of it.

N: elements of a rank's piece of the model; D: data-parallel size; e: bytes of a weight (4, or 2 in bf16).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from refusion_train.config import Config
from refusion_train.plan import activations
from refusion_train.plan.parameters import Stage, padded_vocabulary, vocabulary

FP32 = 4
# Elements that are reduced or gathered together (parallel.engine.BUCKET).
BUCKET = 1 << 26
# DeepSpeed's defaults at stage 3: weights whose next use is nearer than this stay; others are fetched ahead so far.
REUSE_DISTANCE, PREFETCH = 1_000_000_000, 50_000_000
# Size of the float32 logits of a chunk on a GPU (model.loss.CHUNK_BYTES).
LOGITS_CHUNK = 512 << 20
# ids, positions, and per supervised token its place, label, weight, kind and bucket
_BATCH_BYTES = 8 + 8 + 8 + 8 + 4 + 1 + 1


@dataclass(frozen=True)
class Held:
    """What stays on a rank between steps, and its gradients, in bytes: the part that `benchmarks/memory.py` measures.

    weights: what the model computes with; optimizer: float32 masters and Adam's two moments; gradients: what adds up
    over the micro-batches of a step, whole or in shards; gradient_shard: what is left of them for the update.
    """

    weights: int
    optimizer: int
    gradients: int
    gradient_shard: int


@dataclass(frozen=True)
class StageMemory:
    """Memory of the fullest rank of a stage, in bytes.

    gathered: weights of other ranks while they are used (ZeRO 3); activations: kept for the backward pass; logits: a
    chunk of them and its gradient; head: gradients of the head, made in the forward pass; working: temporaries of one
    layer; buckets: for the reduction. `phases`: the need of each phase of a step, of which not everything above is
    there at the same time; peak: the largest.
    """

    stage: int
    weights: int
    gathered: int
    gradients: int
    gradient_shard: int
    optimizer: int
    activations: int
    logits: int
    head: int
    working: int
    buckets: int
    batches: int
    phases: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes when the most is needed."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """When that is."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "peak": self.peak, "peak_phase": self.peak_phase}


# -------------------------------------------------------------------------------------------------- held by the engine


def reduces_early(config: Config) -> bool:
    """Whether gradients are reduced in every backward pass, and not once per step."""
    return config.parallel.zero_stage > 1 and config.parallel.pipeline == 1


def held(config: Config, stage: Stage, data: int) -> Held:
    """Weights, optimizer state and gradients of the fullest data-parallel rank of a stage.

    ZeRO 1, 2 (Rajbhandari et al. 2020, arXiv 1910.02054): matrices and vectors lie in a flat tensor each, padded to a
    multiple of 2 D. weights e N; masters and moments 3 x 4 N / D; gradients 4 N, then 4 N / D. (In fp32 a parameter
    that is cut by the border of a shard keeps its whole gradient.)
    ZeRO 3: every parameter is cut in D equal parts, the last one padded: e N / D, and vectors are whole as well;
    masters and moments 3 x 4 N / D; gradients 4 N / D.
    """
    tensor, element = config.parallel.tensor, activations.element_bytes(config)
    groups = [stage.sizes(tensor, matrix=True), stage.sizes(tensor, matrix=False)]
    elements = sum(map(sum, groups))
    if config.parallel.zero_stage == 3:
        shard = sum(-(-size // data) for sizes in groups for size in sizes)
        weights, left = element * (shard + sum(groups[1])), shard
    else:
        padded = [-(-sum(sizes) // (2 * data)) * 2 * data for sizes in groups]
        shard, weights = sum(padded) // data, element * sum(padded)
        left = shard if config.train.precision == "bf16" else _largest_overlap(groups, padded, data)
    return Held(weights, 3 * FP32 * shard, FP32 * (left if reduces_early(config) else elements), FP32 * left)


def _largest_overlap(groups: list[list[int]], padded: list[int], data: int) -> int:
    """Elements of all parameters that reach into the shard of a rank, on the rank where these are most.

    groups: sizes of parameters that lie behind each other, cut in `data` equal shards of `padded` elements together.
    """
    totals = [0] * data
    for sizes, length in zip(groups, padded, strict=True):
        position = 0
        for size in sizes:
            first, last = position * data // length, (position + size - 1) * data // length
            for rank in range(first, last + 1):
                totals[rank] += size
            position += size
    return max(totals)


def gathered_bytes(config: Config, stage: Stage, data: int) -> int:
    """Weights of other ranks that are whole at a time, ZeRO 3 only.

    The embedding stays from its forward pass to the end. Another matrix stays from its forward to its backward pass if
    fewer than REUSE_DISTANCE elements are used in between, which are those of the layers behind it, twice; it is
    fetched PREFETCH elements ahead of its use.
    """
    if config.parallel.zero_stage < 3 or data == 1:
        return 0
    embedding, *others = stage.sizes(config.parallel.tensor, matrix=True)
    near = min(sum(others), REUSE_DISTANCE // 2 + PREFETCH + max(others))
    return activations.element_bytes(config) * (embedding + near)


# ------------------------------------------------------------------------------------------------- comes and goes


def logits_bytes(config: Config, stage: Stage) -> int:
    """The logits of a chunk of supervised rows at their worst (model.loss): 0 where there is no head.

    A chunk is float32, and in bf16 it comes from a product of 2 bytes, and its gradient is rounded to 2.
    """
    if not stage.head:
        return 0
    columns = -(-vocabulary(config.model) // config.parallel.tensor)
    rows, tokens = max(16, LOGITS_CHUNK // (FP32 * columns)), activations.micro_batch_tokens(config)
    per_element = FP32 + (2 if config.train.precision == "bf16" else 0)
    return per_element * columns * min(rows, tokens)


def head_bytes(config: Config, stage: Stage) -> int:
    """What the head makes in its forward pass: the float32 gradient of its matrix, supervised rows and their
    gradient, and in bf16 the product of a chunk before it is added."""
    if not stage.head:
        return 0
    rows = activations.element_bytes(config) * activations.micro_batch_tokens(config) * config.model.hidden_size
    product = 2 * _vocabulary_elements(config) if config.train.precision == "bf16" else 0
    return FP32 * _vocabulary_elements(config) + product + 2 * rows


def working_bytes(config: Config, stage: Stage) -> int:
    """Temporaries of the backward pass of one layer, at the feed-forward part, where they are largest.

    e T (4 f / t + 3 h): gradients of product, gate and up, their factors, and of hidden states; the gradient of the
    largest matrix, in bf16 also before it becomes float32; with sequence parallelism a gathered input (e T h). What
    recomputation makes again: one product (selective, twice e T f / t) or all of a layer without recomputation (full).
    """
    model, tensor, element = config.model, config.parallel.tensor, activations.element_bytes(config)
    if not stage.layers:
        return 0
    tokens = activations.micro_batch_tokens(config)
    recompute = config.train.recompute
    factors = 4 + 2 * (recompute == "selective")
    working = element * tokens * (factors * model.ffn_size // tensor + 3 * model.hidden_size)
    matrix = max(weight.local(tensor) for weight in stage.weights if weight.name not in ("embedding", "head"))
    working += matrix * (FP32 + (element if element < FP32 else 0))
    if config.parallel.sequence:
        working += element * tokens * model.hidden_size
    if recompute == "full":
        working += activations.layer_bytes(config, "none")
    return working


def bucket_bytes(config: Config, stage: Stage) -> int:
    """One bucket of float32 gradients; the engine makes none larger than the rank's piece of the model."""
    elements = stage.local(config.parallel.tensor)
    return FP32 * min(BUCKET, elements + elements % 2)


def _vocabulary_elements(config: Config) -> int:
    return padded_vocabulary(config.model) // config.parallel.tensor * config.model.hidden_size


# --------------------------------------------------------------------------------------------------------- together


def stage_memory(config: Config, stage: Stage, data: int, micro_batches: int) -> StageMemory:
    """Memory of the fullest rank of a stage; `data`: data-parallel size, `micro_batches`: of a step on a rank.

    Phases:
    start       the model as built, and its flat copy (ZeRO 1, 2) or its shards (ZeRO 3)
    schedule    forward and backward passes: see `_schedule`, and where they are reduced early `_reducing`
    reduction   once per step: activations are gone; whole gradients, a flat copy of a bucket, the shard that is filled
    update      the shard, in fp32 also flat, and with ZeRO 1 in bf16 what is left of whole gradients
    """
    kept = held(config, stage, data)
    parts = {
        "gathered": gathered_bytes(config, stage, data),
        "activations": activations.stage_bytes(config, stage, micro_batches),
        "logits": logits_bytes(config, stage),
        "head": head_bytes(config, stage),
        "working": working_bytes(config, stage),
        "buckets": bucket_bytes(config, stage),
        "batches": _BATCH_BYTES * micro_batches * activations.micro_batch_tokens(config),
    }
    phases = _phases(config, stage, kept, parts, micro_batches)
    return StageMemory(stage.number, **asdict(kept), **parts, phases=phases)


def _phases(config: Config, stage: Stage, kept: Held, parts: dict[str, int], micro_batches: int) -> dict[str, int]:
    element, zero3 = activations.element_bytes(config), config.parallel.zero_stage == 3
    bf16 = config.train.precision == "bf16"
    whole = element * stage.local(config.parallel.tensor)
    # ZeRO 3 keeps its bucket for good.
    standing = kept.weights + kept.optimizer + parts["batches"] + (parts["buckets"] if zero3 else 0)
    flat = kept.gradient_shard if zero3 or not bf16 else 0
    rest = parts["buckets"] if bf16 and config.parallel.zero_stage == 1 else 0
    phases = {
        "start": whole + (kept.weights if zero3 else whole) + kept.optimizer // 3,
        "schedule": standing + parts["gathered"] + _schedule(config, stage, kept, parts, micro_batches),
        "update": standing + kept.gradient_shard + flat + rest,
    }
    if not reduces_early(config):
        copied = max(parts["buckets"], _largest(config, stage))
        phases["reduction"] = standing + kept.gradients + copied + kept.gradient_shard
    return phases


def _schedule(config: Config, stage: Stage, kept: Held, parts: dict[str, int], micro_batches: int) -> int:
    """Gradients, activations and temporaries at the worst moment of the schedule.

    Either activations are fullest, when the head or the last layer is at work (and when that is before the first
    backward pass of the step, there are no gradients yet), or the embedding, the last of a backward pass, gets a dense
    gradient in the model's dtype that becomes float32, while the activations of that pass are gone. With tied
    embeddings on one stage the gradient that the head made waits for this one.
    """
    passes = activations.passes_in_flight(config, stage.number, micro_batches)
    matrix = _vocabulary_elements(config)
    tied_here = stage.head and stage.embedding and config.model.tie_embeddings
    waiting = FP32 * matrix if tied_here else 0
    before_backward = passes == micro_batches * config.parallel.virtual_pipeline
    gradients = 0 if before_backward and config.parallel.zero_stage < 3 else kept.gradients
    last = kept.gradients + parts["activations"] * (passes - 1) // passes + waiting
    last += (activations.element_bytes(config) + FP32) * matrix if stage.embedding else 0
    moments = [
        gradients + parts["activations"] + parts["logits"] + parts["head"],
        gradients + parts["activations"] + waiting + parts["working"],
        last,
    ]
    if reduces_early(config):
        moments += _reducing(config, stage, kept, parts, waiting)
    return max(moments)


def _reducing(config: Config, stage: Stage, kept: Held, parts: dict[str, int], waiting: int) -> list[int]:
    """Moments of a backward pass that is reduced at once: ZeRO 2 and 3 without a pipeline.

    A bucket is there from the first gradient on. When it is full it is copied flat, and the activations of the layers
    whose gradients it holds are gone. A matrix larger than a bucket is copied by itself: an untied head while
    activations are full, the embedding at the end. In fp32 ZeRO 2 puts the shards of two micro-batches side by side.
    """
    bucket = 0 if config.parallel.zero_stage == 3 else parts["buckets"]
    again = kept.gradients if config.parallel.zero_stage == 2 and config.train.precision == "fp32" else 0
    shard, matrix = kept.gradients + again, FP32 * _vocabulary_elements(config)
    filled = min(1.0, parts["buckets"] / (FP32 * stage.local(config.parallel.tensor)))
    left = round(parts["activations"] * (1 - filled))
    moments = [
        kept.gradients + parts["activations"] + waiting + parts["working"] + bucket,
        shard + left + waiting + parts["working"] + bucket + parts["buckets"],
        shard + bucket + max(parts["buckets"], matrix) + matrix,
    ]
    if not config.model.tie_embeddings and matrix > parts["buckets"]:
        moments.append(shard + parts["activations"] + 2 * matrix + bucket)
    return moments


def _largest(config: Config, stage: Stage) -> int:
    return FP32 * max(weight.local(config.parallel.tensor) for weight in stage.weights)
