"""The language-model head and its loss in one: weighted cross entropy of the supervised rows, chunk by chunk.

Full logits in float32 would be the largest tensor of a training step ([tokens, vocabulary]). Here a chunk of rows at
a time goes through the matrix, the softmax and back: since the loss is a plain weighted sum, the gradient of a chunk
is known as soon as its logits are, so the forward pass leaves behind the gradients themselves (as in Liger's fused
linear cross entropy, arXiv 2410.10989) and the backward pass only scales them.
The vocabulary may be split over tensor-parallel ranks: maxima, sums and target logits are then exchanged, per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from refusion_train.objective.batch import CLEAN, MASKED

BUCKETS = 10
# Sums over supervised tokens; see `loss_statistics`.
STAT_NAMES: list[str] = [
    "loss",
    "ce_clean",
    "ce_masked",
    "weighted_clean",
    "weighted_masked",
    "count_clean",
    "count_masked",
    *(f"bucket_ce_{i}" for i in range(BUCKETS)),
    *(f"bucket_count_{i}" for i in range(BUCKETS)),
]
STAT_INDEX: dict[str, int] = {name: index for index, name in enumerate(STAT_NAMES)}

# Size of a chunk's logits in bytes: within a core's cache on CPU, large enough to fill a GPU.
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the vocabulary that this tensor-parallel rank holds."""

    start: int  # id of the first row
    size: int  # rows that mean something; those after them are padding and take no part in the softmax
    group: dist.ProcessGroup | None  # ranks that hold the rest; None: there is no rest


class LanguageModelHead(torch.nn.Module):
    """Matrix from hidden states to the vocabulary, with the weighted cross entropy of its targets.

    It owns its matrix, or registers the embedding's (tied embeddings on a single stage), so that ZeRO-3 gathers it.
    """

    def __init__(self, weight: torch.nn.Parameter, part: VocabularyPart) -> None:
        """`weight`: [rows of this rank, hidden]."""
        super().__init__()
        self.weight = weight
        self.part = part

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """sum(weights * cross entropy), a float32 scalar, and the cross entropy [m] in float32, detached.

        hidden: [m, hidden], the supervised rows only (m may be 0); labels: int64 [m]; weights: float32 [m].
        """
        loss, entropy = _HeadLoss.apply(  # type: ignore[misc]
            hidden, self.weight, labels, weights, self.part, torch.is_grad_enabled()
        )
        return loss, entropy

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., rows of this rank that mean something] of hidden states, with their gradient graph."""
        return hidden @ self.weight[: self.part.size].t()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        part: VocabularyPart,
        differentiate: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        want_hidden, want_weight = (differentiate and wanted for wanted in ctx.needs_input_grad[:2])
        matrix = weight[: part.size]
        rows = hidden.shape[0]
        entropy = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if want_weight else None
        # By the rows with padding, so that ranks that hold different shares of it exchange the same chunks.
        for start in range(0, rows, chunk := chunk_rows(weight.shape[0], hidden.device)):
            span = slice(start, start + chunk)
            logits, normaliser, entropy[span] = _softmax_terms(hidden[span] @ matrix.t(), labels[span], part)
            if grad_hidden is None and grad_weight is None:
                continue
            grad = _logit_gradient(logits, normaliser, labels[span], weights[span], part).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, matrix, out=grad_hidden[span])
            if grad_weight is not None:
                _accumulate(grad_weight[: part.size], grad, hidden[span])
            del logits, grad  # before the next chunk's are made
        ctx.grads = grad_hidden, grad_weight
        ctx.mark_non_differentiable(entropy)
        return torch.dot(weights, entropy), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grads[0]
        grad_hidden, grad_weight = ctx.grads
        ctx.grads = None
        for grad in (grad_hidden, grad_weight):
            if grad is not None:
                grad.mul_(scale)
        return grad_hidden, grad_weight, None, None, None, None


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Rows per chunk, so that its float32 logits take about CHUNK_BYTES."""
    return max(16, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * max(1, vocabulary)))


def _softmax_terms(
    logits: torch.Tensor, labels: torch.Tensor, part: VocabularyPart
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """exp(logits - max) of this rank [m, size] float32, their sum over the whole vocabulary [m], cross entropy [m]."""
    logits = logits.float()
    if part.size:
        largest = logits.amax(dim=1)
    else:
        largest = logits.new_full((logits.shape[0],), -torch.inf)
    if part.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=part.group)
    logits.sub_(largest[:, None])
    target = _at_labels(logits, labels, part)
    total = logits.exp_().sum(dim=1)
    if part.group is not None:
        both = torch.stack((target, total))
        dist.all_reduce(both, group=part.group)
        target, total = both.unbind()
    return logits, total, total.log() - target


def _at_labels(logits: torch.Tensor, labels: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """The logit of each row's label, 0 where another rank holds it."""
    if part.group is None:
        return logits.gather(1, labels[:, None]).squeeze(1)
    if not part.size:
        return logits.new_zeros(labels.shape)
    inside, local = _locate(labels, part)
    return logits.gather(1, local[:, None]).squeeze(1) * inside


def _locate(labels: torch.Tensor, part: VocabularyPart) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a label is this rank's, and its column here (0 if it is not)."""
    local = labels - part.start
    inside = (local >= 0) & (local < part.size)
    return inside, local * inside


def _logit_gradient(
    exponentials: torch.Tensor,
    normaliser: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    part: VocabularyPart,
) -> torch.Tensor:
    """weight * (softmax - onehot(label)), in place of the exponentials."""
    grad = exponentials.mul_((weights / normaliser)[:, None])
    if part.group is None:
        return grad.scatter_add_(1, labels[:, None], -weights[:, None])
    if not part.size:
        return grad
    inside, local = _locate(labels, part)
    return grad.scatter_add_(1, local[:, None], (-weights * inside)[:, None])


def _accumulate(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """total += grad^T hidden, the product in the model's dtype, the sum in float32."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), hidden)
    else:
        total += grad.t() @ hidden


def loss_statistics(
    loss: torch.Tensor, entropy: torch.Tensor, weights: torch.Tensor, kinds: torch.Tensor, buckets: torch.Tensor
) -> torch.Tensor:
    """Sums over the supervised tokens of a micro-batch, float64 [len(STAT_NAMES)], without waiting for the device.

    loss: the scalar; entropy, weights: float32 [m]; kinds, buckets: uint8 [m].
    `ce_*`: cross entropy; `weighted_*`: weight * cross entropy (their sum is the loss); `count_*`: tokens;
    `bucket_*`: cross entropy and tokens of masked targets by noise bucket.
    """
    entropy, kinds, masked = entropy.double(), kinds.long(), kinds == MASKED
    slots = buckets.long() + BUCKETS * (~masked).long()
    ones = torch.ones_like(entropy)

    def sums(index: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float64, device=values.device).scatter_add_(0, index, values)

    by_kind = torch.stack([sums(kinds, values, MASKED + 1) for values in (entropy, entropy * weights, ones)])
    by_bucket = [sums(slots, values, 2 * BUCKETS)[:BUCKETS] for values in (entropy, ones)]
    return torch.cat((loss.detach().double()[None], by_kind[:, CLEAN : MASKED + 1].reshape(-1), *by_bucket))
