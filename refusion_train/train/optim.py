"""What AdamW is told: which parameters decay, and the learning rate of every step.

The optimizer itself belongs to the engine (ZeRO shards its state); here are the decisions, as plain functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from refusion_train.config import TrainConfig


def param_groups(modules: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups: matrices and embeddings decay; vectors (norm weights, biases) do not.

    Order is that of the modules; a parameter that several modules share is listed once; an empty group is left out.
    """
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad))
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def learning_rate(train: TrainConfig, step: int) -> float:
    """Learning rate of optimizer step `step` (0 is the first), a function of the configuration alone.

    With w = warmup_steps, n = steps, m = lr * min_lr_ratio and s = step + 1 (the rate is that at the step's end):
        warm-up    lr * s / w                                        while s <= w
        constant   lr
        cosine     m + (lr - m) * (1 + cos(pi * (s - w) / (n - w))) / 2                (arXiv 1608.03983)
        wsd        lr until the last d = round(decay_fraction * n) steps (never in the warm-up), then linear:
                   lr + (m - lr) * (s - (n - d)) / d                                  (arXiv 2404.06395)
    cosine and wsd end exactly at m on the last step, and stay there if a run goes on.
    """
    done, warmup = step + 1, train.warmup_steps
    if done <= warmup:
        return train.lr * done / warmup
    lowest = train.lr * train.min_lr_ratio
    if train.schedule == "cosine":
        progress = _progress(done, warmup, train.steps)
        return lowest + (train.lr - lowest) * (1 + math.cos(math.pi * progress)) / 2
    if train.schedule == "wsd":
        start = max(train.steps - round(train.decay_fraction * train.steps), warmup)
        return train.lr + (lowest - train.lr) * _progress(done, start, train.steps)
    assert train.schedule == "constant", f"no schedule {train.schedule}"
    return train.lr


def _progress(done: int, start: int, end: int) -> float:
    """How much of start..end is done, between 0 and 1; a stretch of no length is not begun before its end."""
    if end <= start:
        return float(done > end)
    return min(max((done - start) / (end - start), 0.0), 1.0)
