"""Index work on the host: document boundaries and the rows that carry a target."""

from __future__ import annotations

import numpy as np
import torch
from model_cases import CPU, make_batch

from refusion_train.model.batch import document_boundaries, to_device


def test_boundaries_of_documents_rows_and_padding() -> None:
    ids = np.array([[0, 0, 1, 1, 1, -1], [-1, -1, -1, -1, -1, -1], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 3, 3]], np.int32)
    boundaries = document_boundaries(ids)
    assert boundaries.dtype == np.int32
    # the last document of a row and the first of the next have the same number 0 but never join
    assert boundaries.tolist() == [0, 2, 5, 6, 12, 18, 19, 20, 21, 24]


def test_to_device_keeps_supervised_positions() -> None:
    batch = make_batch()
    final = batch.loss_weight * 3
    moved = to_device(batch, final, CPU)
    rows, columns = np.nonzero(batch.target_kind)
    assert moved.rows.tolist() == (rows * 48 + columns).tolist()
    assert moved.labels.tolist() == batch.labels[rows, columns].tolist()
    assert torch.equal(moved.weights, torch.from_numpy(final[rows, columns]))
    assert moved.kinds.tolist() == batch.target_kind[rows, columns].tolist()
    assert moved.buckets.tolist() == batch.noise_bucket[rows, columns].tolist()
    assert moved.input_ids.dtype == moved.position_ids.dtype == moved.labels.dtype == torch.int64
    assert (moved.weights.dtype, moved.kinds.dtype) == (torch.float32, torch.uint8)
    assert moved.boundaries.tolist() == [0, 10, 20, 21, 48, 68, 73, 90, 96]
