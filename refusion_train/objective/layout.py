"""Fast assembly of corrupted rows in numpy: decisions are made on runs of tokens, then expanded to tokens once.

There are about ten times fewer slots than tokens, and fewer documents still; so tables of runs are built first, and a
handful of `np.repeat`s make tokens of them. No Python loop runs over documents, slots or tokens.
"""

from __future__ import annotations

import functools

import numpy as np

from refusion_train.objective.batch import CLEAN, IGNORE, MASKED, NONE, Batch, PackedDocuments

# Columns of the table of regions: what a document consists of, in physical order. Row n holds the last padding only.
PADDING, PROMPT, PROMPT_END, CLEAN_PART, MASKED_PART = range(5)


@functools.lru_cache(maxsize=4)
def offsets(count: int) -> np.ndarray:
    """0..count-1 as int64, shared and read-only: batches of a run have the same size."""
    values = np.arange(count)
    values.flags.writeable = False
    return values


def ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """first[i], first[i] + 1, ... (count[i] of them) for all i, concatenated: int64."""
    return np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)


def gaps(packed: PackedDocuments) -> np.ndarray:
    """Padding tokens in front of each document and after the last one: int64 [n + 1]."""
    borders = np.empty(len(packed.starts) + 1, np.int64)
    borders[:-1] = packed.starts
    borders[-1] = packed.tokens.size
    borders[1:] -= packed.starts + packed.lengths
    return borders


def fill_documents(batch: Batch, packed: PackedDocuments, source: np.ndarray) -> None:
    """Write document_ids, position_ids and the count columns of whole documents.

    source: int64 [b*s] packed offset of each token; no token leaves its document.
    """
    rows, length = packed.tokens.shape
    n = len(packed.starts)
    row = packed.starts // max(1, length)
    runs = np.empty(2 * n + 1, np.int64)
    runs[0::2], runs[1::2] = gaps(packed), packed.lengths
    ids = np.full(2 * n + 1, -1, np.int32)
    ids[1::2] = np.arange(n) - np.searchsorted(row, row)
    batch.document_ids.reshape(-1)[:] = np.repeat(ids, runs)
    begin = np.cumsum(runs) - runs
    np.subtract(source, np.repeat(begin, runs), out=batch.position_ids.reshape(-1))
    if runs[0::2].any():
        batch.position_ids[batch.document_ids < 0] = 0
    responses = packed.lengths - packed.prompts
    batch.counts[:, 1] = np.bincount(row, weights=responses, minlength=rows)
    batch.counts[:, 2] = np.bincount(row, weights=responses > 0, minlength=rows)


def fill_padding(batch: Batch, packed: PackedDocuments) -> None:
    """Write what is outside documents (the compiled kernels write only documents)."""
    between = gaps(packed)
    if not between.any():
        return
    ends = np.concatenate(([0], packed.starts + packed.lengths))
    padding = ranges(ends, between)
    batch.input_ids.reshape(-1)[padding] = packed.tokens.reshape(-1)[padding]
    batch.position_ids.reshape(-1)[padding] = 0
    batch.document_ids.reshape(-1)[padding] = -1
    batch.labels.reshape(-1)[padding] = IGNORE
    batch.loss_weight.reshape(-1)[padding] = 0
    batch.target_kind.reshape(-1)[padding] = NONE
    batch.noise_bucket.reshape(-1)[padding] = 0


def region_table(packed: PackedDocuments, masked_tokens: np.ndarray) -> np.ndarray:
    """Tokens of each region: int64 [n + 1, 5]. masked_tokens: int64 [n]."""
    table = np.zeros((len(packed.starts) + 1, 5), np.int64)
    table[:, PADDING] = gaps(packed)
    body = table[:-1]
    body[:, PROMPT_END] = packed.prompts > 0
    body[:, PROMPT] = packed.prompts - body[:, PROMPT_END]
    body[:, CLEAN_PART] = packed.lengths - packed.prompts - masked_tokens
    body[:, MASKED_PART] = masked_tokens
    return table


def fill_regions(
    batch: Batch,
    packed: PackedDocuments,
    table: np.ndarray,
    prompt_target: bool,
    weights: np.ndarray,
    buckets: np.ndarray,
) -> None:
    """Write target_kind, loss_weight and noise_bucket, each constant in a region.

    prompt_target: whether a prompt's last token predicts the response's first. weights float32 [n], buckets uint8 [n]:
    of masked targets.
    """
    kinds = np.zeros(table.shape, np.uint8)
    kinds[:, CLEAN_PART], kinds[:, MASKED_PART] = CLEAN, MASKED
    if prompt_target:
        kinds[:-1, PROMPT_END] = np.where(packed.lengths > packed.prompts, CLEAN, NONE)
    weight = (kinds == CLEAN).astype(np.float32)
    weight[:-1, MASKED_PART] = weights
    bucket = np.zeros(table.shape, np.uint8)
    bucket[:-1, MASKED_PART] = buckets
    runs = table.reshape(-1)
    for values, out in ((kinds, batch.target_kind), (weight, batch.loss_weight), (bucket, batch.noise_bucket)):
        out.reshape(-1)[:] = np.repeat(values.reshape(-1), runs)


def move_runs(total: int, lengths: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """The packed offset of each of `total` physical tokens: int64 [total].

    lengths: int64 [m] consecutive runs that cover all tokens; shifts: int64 [m] how far from here each run's tokens
    lie in the packed order.
    """
    assert lengths.sum() == total, f"runs cover {lengths.sum()} of {total} tokens"
    source = np.repeat(shifts, lengths)
    source += offsets(total)
    return source


def fill_tokens(batch: Batch, packed: PackedDocuments, source: np.ndarray, mask_id: int) -> None:
    """Write input_ids and labels from target_kind and the packed offset of each token (int64 [b*s], overwritten)."""
    flat = packed.tokens.reshape(-1).astype(np.int64)
    inputs, labels, kind = batch.input_ids.reshape(-1), batch.labels.reshape(-1), batch.target_kind.reshape(-1)
    flat.take(source, out=inputs, mode="clip")
    np.putmask(inputs, kind == MASKED, mask_id)
    clean = kind == CLEAN
    source += clean
    flat.take(source, out=labels, mode="clip")
    np.putmask(labels, kind == NONE, IGNORE)
    batch.counts[:, 0] = clean.reshape(batch.labels.shape).sum(axis=1)
