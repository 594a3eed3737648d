"""Bytes that ranks send each other in a step, by kind.

Counted as ring algorithms send them (Thakur et al. 2005; as in NCCL), per rank, with S the bytes of the whole tensor
and n the ranks of the group: all-gather and reduce-scatter (n - 1) / n S, all-reduce twice that. Which collectives a
layer makes is megatron-core's; what ZeRO sends was counted on the running engine. Numbers of a few bytes per step
(norms, statistics, counts) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from refusion_train.config import Config
from refusion_train.plan import activations
from refusion_train.plan.memory import FP32, REUSE_DISTANCE, held, reduces_early
from refusion_train.plan.parameters import Stage, padded_vocabulary

TENSOR, PIPELINE, TIED, ZERO_REDUCE, ZERO_GATHER = (
    "tensor", "pipeline", "tied embeddings", "zero reduce", "zero gather",
)  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """One kind of communication: by which operation, and bytes that one rank of each stage sends in a step."""

    kind: str
    operation: str
    per_rank: list[int]

    @property
    def largest(self) -> int:
        """Bytes of the rank that sends the most."""
        return max(self.per_rank, default=0)


def ring(size: float, ranks: int) -> float:
    """Bytes that each of `ranks` sends in an all-gather or a reduce-scatter of `size` bytes in all."""
    return size * (ranks - 1) / ranks


def traffic(config: Config, stages: list[Stage], data: int, micro_batches: int) -> list[Traffic]:
    """Every kind of communication that the layout has. `data`: data-parallel size; micro_batches: on a rank."""
    parallel = config.parallel
    kinds: list[Traffic] = []

    def add(kind: str, operation: str, per_rank: list[float]) -> None:
        if any(per_rank):
            kinds.append(Traffic(kind, operation, [round(size) for size in per_rank]))

    collective = "reduce-scatter + all-gather" if parallel.sequence else "all-reduce"
    add(TENSOR, collective, [tensor_bytes(config, stage, micro_batches) for stage in stages])
    add(PIPELINE, "send", [pipeline_bytes(config, stage, micro_batches) for stage in stages])
    add(TIED, "all-reduce", [tied_bytes(config, stage) for stage in stages])
    reduce = "reduce-scatter" if parallel.zero_stage == 3 else "all-reduce"
    add(ZERO_REDUCE, reduce, [reduce_bytes(config, stage, data, micro_batches) for stage in stages])
    add(ZERO_GATHER, "all-gather", [gather_bytes(config, stage, data, micro_batches) for stage in stages])
    return kinds


def tensor_bytes(config: Config, stage: Stage, micro_batches: int) -> float:
    """Sums over tensor-parallel ranks. S = e T h, the hidden states of a micro-batch.

    Per layer (Shoeybi et al. 2019, arXiv 1909.08053): 2 all-reduces of S forward and 2 backward. With sequence
    parallelism (arXiv 2205.05198) each is a reduce-scatter and an all-gather, and the backward pass gathers the inputs
    of the two column-parallel matrices again. Full recomputation repeats the forward part.
    Embedding: S once forward (sequence parallel: and once backward, each a half). Head: S once backward, of the
    supervised rows, here all (sequence parallel: forward and backward, each a half); maximum, target and sum of the
    softmax, 12 bytes per row. Once per step the partial gradients of norms (q and k; with sequence parallelism all).
    """
    tensor, sequence, model = config.parallel.tensor, config.parallel.sequence, config.model
    if tensor == 1:
        return 0.0
    tokens = activations.micro_batch_tokens(config)
    half = ring(activations.element_bytes(config) * tokens * model.hidden_size, tensor)
    again = 4 if config.train.recompute == "full" else 0
    halves = stage.layers * (4 + (6 if sequence else 4) + again)
    halves += 2 * stage.embedding + 2 * stage.head
    softmax = 2 * ring(12 * tokens, tensor) * stage.head
    per_head = 2 * model.head_dim * model.qk_norm
    partial = stage.layers * (per_head + 2 * model.hidden_size * sequence) + model.hidden_size * stage.head * sequence
    return micro_batches * (halves * half + softmax) + 2 * ring(FP32 * partial, tensor)


def pipeline_bytes(config: Config, stage: Stage, micro_batches: int) -> float:
    """Hidden states to the next chunk and their gradient to the one before: e T h / r for each micro-batch."""
    if config.parallel.pipeline == 1:
        return 0.0
    chunks = len(stage.chunks)
    forward, backward = chunks - stage.head, chunks - (stage.number == 0)
    return float(micro_batches * (forward + backward) * activations.residual_bytes(config))


def tied_bytes(config: Config, stage: Stage) -> float:
    """The float32 gradient of the tied embedding, summed over the first and the last stage once per step."""
    both = config.model.tie_embeddings and config.parallel.pipeline > 1 and (stage.embedding or stage.head)
    rows = padded_vocabulary(config.model) // config.parallel.tensor
    return 2 * ring(FP32 * rows * config.model.hidden_size, 2) if both else 0.0


def reduce_bytes(config: Config, stage: Stage, data: int, micro_batches: int) -> float:
    """Gradients over data-parallel ranks in float32, once per step or for each micro-batch (`memory.reduces_early`).

    ZeRO 1 and 2: an all-reduce of everything (DeepSpeed's default joins the shards of several ranks in a bucket, and
    sums it on all of them); ZeRO 3: a reduce-scatter.
    """
    once = ring(FP32 * stage.local(config.parallel.tensor), data)
    times = micro_batches if reduces_early(config) else 1
    return times * (once if config.parallel.zero_stage == 3 else 2 * once)


def gather_bytes(config: Config, stage: Stage, data: int, micro_batches: int) -> float:
    """Weights over data-parallel ranks.

    ZeRO 1 and 2: once, after the update. ZeRO 3: matrices in every forward pass, and again in the backward pass those
    whose two uses are further apart than REUSE_DISTANCE elements; vectors once, after the update.
    """
    element, tensor = activations.element_bytes(config), config.parallel.tensor
    if config.parallel.zero_stage < 3:
        return ring(held(config, stage, data).weights, data)
    matrices, vectors = sum(stage.sizes(tensor, matrix=True)), sum(stage.sizes(tensor, matrix=False))
    again = max(0, matrices - REUSE_DISTANCE // 2)
    return ring(element * (vectors + micro_batches * (matrices + again)), data)
