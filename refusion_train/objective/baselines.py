"""The two objectives that ReFusion is compared with: left-to-right (`ar`) and token-level masked diffusion (`mdm`).

Both keep the tokens in their original order. Shapes as in batch.py; n: documents.
"""

from __future__ import annotations

import numpy as np

from refusion_train.objective import noise
from refusion_train.objective.batch import CLEAN, IGNORE, MASKED, NONE, Batch, PackedDocuments
from refusion_train.objective.layout import fill_documents, offsets, ranges


def corrupt_ar(batch: Batch, packed: PackedDocuments) -> None:
    """Next-token prediction of the response; the prompt's last token predicts the response's first."""
    _copy_tokens(batch, packed)
    flat, labels, kind = packed.tokens.reshape(-1), batch.labels.reshape(-1), batch.target_kind.reshape(-1)
    # Sources of targets: from the prompt's last token (or the first token) up to the last but one.
    first = packed.starts + np.maximum(packed.prompts - 1, 0)
    count = packed.starts + packed.lengths - 1 - first
    target = ranges(first, count)
    kind[target] = CLEAN
    labels[target] = flat[target + 1]
    batch.loss_weight.reshape(-1)[target] = 1
    batch.counts[:, 0] = (batch.target_kind != NONE).sum(axis=1)


def corrupt_mdm(
    batch: Batch, packed: PackedDocuments, p: np.ndarray, weights: np.ndarray, buckets: np.ndarray, *, mask_id: int
) -> None:
    """Each response token masked with probability p and predicted in place (arXiv 2502.09992).

    p float64 [n]; weights float32 [n], buckets uint8 [n]: of the documents' masked targets.
    """
    _copy_tokens(batch, packed)
    flat, labels, kind = packed.tokens.reshape(-1), batch.labels.reshape(-1), batch.target_kind.reshape(-1)
    responses = packed.lengths - packed.prompts
    offset = ranges(packed.starts + packed.prompts, responses)
    document = np.repeat(np.arange(len(responses)), responses)
    index = (offset - np.repeat(packed.starts + packed.prompts, responses)).astype(np.uint64)
    value = noise.uniform(noise.mix(packed.keys[document], (index << noise.INDEX_SHIFT) | noise.TOKEN))
    masked = value < p[document]
    target, document = offset[masked], document[masked]
    kind[target] = MASKED
    labels[target] = flat[target]
    batch.input_ids.reshape(-1)[target] = mask_id
    batch.loss_weight.reshape(-1)[target] = weights[document]
    batch.noise_bucket.reshape(-1)[target] = buckets[document]


def _copy_tokens(batch: Batch, packed: PackedDocuments) -> None:
    """Rows as they are, without any target."""
    fill_documents(batch, packed, offsets(packed.tokens.size))
    batch.input_ids[:] = packed.tokens
    batch.labels.fill(IGNORE)
    batch.loss_weight.fill(0)
    batch.target_kind.fill(NONE)
    batch.noise_bucket.fill(0)
