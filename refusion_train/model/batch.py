"""From a corrupted micro-batch in numpy to what the model needs on its device.

All index work (which rows carry a target, where documents start) is done here on the host, so that the model never
has to wait for a count from the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from refusion_train.objective.batch import NONE, Batch


@dataclass
class DeviceBatch:
    """One micro-batch of b rows of s tokens on a device; rows lie behind each other wherever it is flattened."""

    input_ids: torch.Tensor  # int64 [b, s]
    position_ids: torch.Tensor  # int64 [b, s], position within the document
    boundaries: torch.Tensor  # int32 [n + 1], cumulative starts of documents in the flattened [b * s]; padding is a run
    rows: torch.Tensor  # int64 [m], flattened indices of the supervised positions, ascending
    labels: torch.Tensor  # int64 [m]
    weights: torch.Tensor  # float32 [m], final: the loss is sum(weight * cross entropy)
    kinds: torch.Tensor  # uint8 [m], CLEAN or MASKED
    buckets: torch.Tensor  # uint8 [m], noise bucket of masked targets


def to_device(batch: Batch, weights: np.ndarray, device: torch.device) -> DeviceBatch:
    """Move a micro-batch to `device`.

    `weights`: float32 [b, s], the final weight of every target (after global normalisation); others are ignored.
    """
    rows = np.flatnonzero(batch.target_kind.reshape(-1) != NONE)

    def move(values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    return DeviceBatch(
        input_ids=move(batch.input_ids),
        position_ids=move(batch.position_ids),
        boundaries=move(document_boundaries(batch.document_ids)),
        rows=move(rows),
        labels=move(batch.labels.reshape(-1)[rows]),
        weights=move(weights.reshape(-1)[rows].astype(np.float32, copy=False)),
        kinds=move(batch.target_kind.reshape(-1)[rows]),
        buckets=move(batch.noise_bucket.reshape(-1)[rows]),
    )


def document_boundaries(document_ids: np.ndarray) -> np.ndarray:
    """Cumulative starts, int32 [n + 1], of the runs of equal ids in the flattened rows [b, s]; rows never join."""
    flat = document_ids.reshape(-1)
    change = np.empty(flat.size, dtype=bool)
    np.not_equal(flat[1:], flat[:-1], out=change[1:])
    change[:: document_ids.shape[1]] = True
    return np.append(np.flatnonzero(change), flat.size).astype(np.int32)
