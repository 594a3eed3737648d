"""Fast assembly of corrupted rows in numpy: rows are described as segments, then expanded to tokens once.

A segment is a run of tokens that move together and share everything: a prompt, a slot, a stretch of padding. There are
about ten times fewer segments than tokens, so all decisions are made on segments, and a handful of `np.repeat`s make
tokens of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refusion_train.objective.batch import CLEAN, IGNORE, MASKED, NONE, Batch, PackedDocuments


@dataclass
class Segments:
    """Consecutive runs in physical order that cover all tokens of the rows; m segments, some may have length 0."""

    lengths: np.ndarray  # int64 [m]
    sources: np.ndarray  # int64 [m] offset in the packed tokens of the segment's first token
    kinds: np.ndarray  # uint8 [m] target kind of all its tokens
    weights: np.ndarray  # float32 [m]
    buckets: np.ndarray  # uint8 [m]

    @classmethod
    def zeros(cls, count: int) -> Segments:
        """`count` segments of length 0 without targets."""
        return cls(
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.zeros(count, np.uint8),
            np.zeros(count, np.float32),
            np.zeros(count, np.uint8),
        )


def gaps(packed: PackedDocuments) -> np.ndarray:
    """Padding tokens in front of each document and after the last one: int64 [n + 1]."""
    borders = np.empty(len(packed.starts) + 1, np.int64)
    borders[:-1] = packed.starts
    borders[-1] = packed.tokens.size
    borders[1:] -= packed.starts + packed.lengths
    return borders


def fill_documents(batch: Batch, packed: PackedDocuments) -> np.ndarray:
    """Write document_ids and the count columns of whole documents; returns each token's document start, int64 [b*s].

    Padding: document -1, start = the token's own offset (so that offset - start is its position 0).
    """
    rows, length = packed.tokens.shape
    n = len(packed.starts)
    row = packed.starts // max(1, length)
    first = np.searchsorted(row, np.arange(rows))
    runs = np.empty(2 * n + 1, np.int64)
    runs[0::2], runs[1::2] = gaps(packed), packed.lengths
    ids = np.full(2 * n + 1, -1, np.int32)
    ids[1::2] = np.arange(n) - first[row]
    batch.document_ids.reshape(-1)[:] = np.repeat(ids, runs)
    begin = np.zeros(2 * n + 1, np.int64)
    begin[1::2] = packed.starts
    responses = packed.lengths - packed.prompts
    batch.counts[:, 1] = np.bincount(row, weights=responses, minlength=rows)
    batch.counts[:, 2] = np.bincount(row, weights=responses > 0, minlength=rows)
    start = np.repeat(begin, runs)
    if runs[0::2].any():
        padding = np.flatnonzero(batch.document_ids.reshape(-1) < 0)
        start[padding] = padding
    return start


def fill_tokens(
    batch: Batch, packed: PackedDocuments, segments: Segments, without_target: np.ndarray, mask_id: int
) -> None:
    """Write every other field of the batch from segments.

    without_target: int64 offsets in physical order whose target is taken away again (the end of a clean slot).
    Masked segments show mask_id and predict their own tokens; clean ones predict the next token of the document.
    """
    lengths = segments.lengths
    total = packed.tokens.size
    assert lengths.sum() == total, f"segments cover {lengths.sum()} of {total} tokens"
    start = fill_documents(batch, packed)
    source = np.repeat(segments.sources - (np.cumsum(lengths) - lengths), lengths)
    source += np.arange(total)
    np.subtract(source, start, out=batch.position_ids.reshape(-1))

    kind = np.repeat(segments.kinds, lengths)
    kind[without_target] = NONE
    batch.target_kind.reshape(-1)[:] = kind
    weight = np.repeat(segments.weights, lengths)
    weight[without_target] = 0
    batch.loss_weight.reshape(-1)[:] = weight
    batch.noise_bucket.reshape(-1)[:] = np.repeat(segments.buckets, lengths)

    flat = packed.tokens.reshape(-1)
    masked = kind == MASKED
    here = flat.take(source)
    inputs, labels = batch.input_ids.reshape(-1), batch.labels.reshape(-1)
    inputs[:] = here
    np.copyto(inputs, mask_id, where=masked)
    source += 1
    labels[:] = flat.take(source, mode="clip")
    np.copyto(labels, here, where=masked)
    np.copyto(labels, IGNORE, where=kind == NONE)
    batch.counts[:, 0] = np.count_nonzero(batch.target_kind == CLEAN, axis=1)
