"""The ReFusion objective (arXiv 2512.13586, section 3): whole slots masked, clean slots shuffled in front of them.

Two steps: draws (which slots are masked, in which order the clean ones stand) and the layout that follows from them.
The draws come from counter-based noise, or, for parity with the paper's code, from a `random.Random`. Arrays over all
slots of the batch, in order of documents and of slots in each, have length S; arrays over documents have length n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from refusion_train.objective import noise
from refusion_train.objective.batch import (
    CLEAN,
    CLEAN_TARGETS,
    DOCUMENTS,
    NONE,
    RESPONSE_TOKENS,
    Batch,
    PackedDocuments,
)
from refusion_train.objective.layout import (
    CLEAN_PART,
    fill_documents,
    fill_regions,
    fill_tokens,
    move_runs,
    ranges,
    region_table,
)

_MAX_DOCUMENTS = 1 << (64 - noise.ORDER_BITS)


class RandomLike(Protocol):
    """What `reference_draws` needs of a `random.Random`."""

    def choice(self, seq: list[int], /) -> int: ...
    def choices(self, population: list[int], weights: list[float]) -> list[int]: ...
    def random(self) -> float: ...
    def shuffle(self, x: list[int], /) -> None: ...


@dataclass
class SlotTable:
    """Where each slot lies."""

    counts: np.ndarray  # int64 [n] slots of each document
    document: np.ndarray  # int64 [S]
    index: np.ndarray  # int64 [S] number of the slot in its document
    lengths: np.ndarray  # int64 [S]
    sources: np.ndarray  # int64 [S] offset of its first token in the packed tokens

    @classmethod
    def cut(cls, packed: PackedDocuments, sizes: np.ndarray) -> SlotTable:
        """Cut each response in slots of sizes (int64 [n]); the last slot may be shorter."""
        responses = packed.lengths - packed.prompts
        counts = -(-responses // sizes)
        document = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        size = sizes[document]
        offset = index * size
        lengths = np.minimum(size, responses[document] - offset)
        offset += (packed.starts + packed.prompts)[document]
        return cls(counts, document, index, lengths, offset)


@dataclass
class SlotDraws:
    """The random decisions about each slot."""

    masked: np.ndarray  # bool [S]
    order: np.ndarray  # uint64 [S] < 2**40: clean slots stand in ascending order of it, equal ones by index
    prefix: np.ndarray | None  # int64 [S] clean tokens at the head of a masked slot; None: no partial slots


def draw_sizes(keys: np.ndarray, sizes: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Slot size of each document: int64 [n]. thresholds: float64 [len(sizes) - 1] cumulative shares."""
    return sizes[np.searchsorted(thresholds, noise.uniform(noise.mix(keys, noise.SIZE)), side="right")]


def size_thresholds(weights: list[float] | None, count: int) -> np.ndarray:
    """Cumulative shares of `count` slot sizes without the last, 1: float64 [count - 1]. weights: None: uniform."""
    shares = np.cumsum(np.asarray(weights or [1.0] * count, np.float64))
    return shares[:-1] / shares[-1]


def draw_plain(keys: np.ndarray, probability: float) -> np.ndarray:
    """Which documents are trained plainly left to right: bool [n]."""
    return noise.uniform(noise.mix(keys, noise.PLAIN)) < probability


def draw_times(keys: np.ndarray) -> np.ndarray:
    """t ~ U[0, 1) of each document: float64 [n]."""
    return noise.uniform(noise.mix(keys, noise.TIME))


def draw_slots(keys: np.ndarray, table: SlotTable, p: np.ndarray, partial: float) -> SlotDraws:
    """Counter-based draws of every slot. p: float64 [n] mask probability; partial: share of partly masked slots."""
    key = keys[table.document]
    counter = table.index.astype(np.uint64) << noise.INDEX_SHIFT
    masked = noise.uniform(noise.mix(key, counter | noise.MASK)) < p[table.document]
    order = noise.mix(key, counter | noise.ORDER) >> noise.ORDER_SHIFT
    if not partial:
        return SlotDraws(masked, order, None)
    chosen = masked & (table.lengths > 1) & (noise.uniform(noise.mix(key, counter | noise.PARTIAL)) < partial)
    bound = np.maximum(table.lengths - 1, 1).astype(np.uint64)
    prefix = 1 + noise.below(noise.mix(key, counter | noise.PREFIX), bound).astype(np.int64)
    return SlotDraws(masked, order, np.where(chosen, prefix, 0))


def reference_draws(
    rng: RandomLike, response: int, sizes: list[int], weights: list[float] | None, eps: float, t: float | None = None
) -> tuple[int, float, list[bool], list[int]]:
    """Draws of one document in the order of the paper's code: slot size, t, one uniform per slot, shuffle.

    response: tokens of the response; t: used in place of the drawn one (which is drawn all the same).
    Returns (slot size, mask probability p, masked per slot, clean slots in shuffled order).
    """
    size = rng.choice(sizes) if weights is None else rng.choices(sizes, weights=weights)[0]
    drawn = rng.random()
    p = (1 - eps) * (drawn if t is None else t) + eps
    masked = [rng.random() < p for _ in range(-(-response // size))]
    clean = [slot for slot, is_masked in enumerate(masked) if not is_masked]
    rng.shuffle(clean)
    return size, p, masked, clean


def finish_plain(batch: Batch, packed: PackedDocuments, plain: np.ndarray) -> None:
    """Make of documents (bool [n]) that were laid out as a single clean slot what `baselines.corrupt_ar` makes of them.

    The prompt's last token predicts the response's first, whether or not targets cross slots. The documents leave the
    counts that normalise masked targets, which they cannot have: see docs/objective.md.
    """
    responses = np.where(plain, packed.lengths - packed.prompts, 0)
    row = packed.starts // max(1, packed.tokens.shape[1])
    for column, values in ((RESPONSE_TOKENS, responses), (DOCUMENTS, responses > 0)):
        batch.counts[:, column] -= np.bincount(row, weights=values, minlength=len(batch.counts))
    behind = (responses > 0) & (packed.prompts > 0)
    last = (packed.starts + packed.prompts - 1)[behind]
    kind = batch.target_kind.reshape(-1)
    new = np.bincount(row[behind], weights=kind[last] == NONE, minlength=len(batch.counts))
    batch.counts[:, CLEAN_TARGETS] += new
    kind[last], batch.loss_weight.reshape(-1)[last] = CLEAN, 1
    batch.labels.reshape(-1)[last] = packed.tokens.reshape(-1)[last + 1]


def masked_weights(p: np.ndarray, responses: np.ndarray, normalization: str) -> np.ndarray:
    """Weight of a masked target before normalisation: float32 [n]; 1/p for `token`, else 1/(p * response length)."""
    scale = p if normalization == "token" else p * np.maximum(responses, 1)
    return (1.0 / scale).astype(np.float32)


def noise_buckets(p: np.ndarray) -> np.ndarray:
    """Tenth of [0, 1] that p lies in: uint8 [n], 0..9."""
    return np.minimum(9, (10 * p).astype(np.int64)).astype(np.uint8)


def physical_order(table: SlotTable, draws: SlotDraws) -> np.ndarray:
    """Slots as they stand in the rows: int64 [S]; per document the clean ones by `order`, then the masked ones."""
    assert len(table.counts) <= _MAX_DOCUMENTS, f"more than {_MAX_DOCUMENTS} documents in one batch"
    clean, masked = np.flatnonzero(~draws.masked), np.flatnonzero(draws.masked)
    key = (table.document[clean].astype(np.uint64) << np.uint64(noise.ORDER_BITS)) | draws.order[clean]
    clean = clean[np.argsort(key, kind="stable")]
    # A clean slot stands behind the masked ones of earlier documents, a masked one behind the clean ones up to its own.
    masked_counts = np.bincount(table.document[masked], minlength=len(table.counts))
    masked_before = (np.cumsum(masked_counts) - masked_counts)[table.document[clean]]
    clean_before = np.cumsum(table.counts - masked_counts)[table.document[masked]]
    order = np.empty(len(table.document), np.int64)
    order[np.arange(len(clean)) + masked_before] = clean
    order[np.arange(len(masked)) + clean_before] = masked
    return order


def lay_out(
    batch: Batch,
    packed: PackedDocuments,
    table: SlotTable,
    draws: SlotDraws,
    weights: np.ndarray,
    buckets: np.ndarray,
    *,
    cross_slot_targets: bool,
    mask_id: int,
) -> None:
    """Write the corrupted rows that follow from the draws into `batch`.

    weights float32 [n], buckets uint8 [n]: of the documents' masked targets.
    """
    n = len(packed.starts)
    order = physical_order(table, draws)
    lengths = table.lengths[order]
    masked_so_far = np.concatenate(([0], np.cumsum(table.lengths * draws.masked)))
    masked_tokens = np.diff(masked_so_far[np.concatenate(([0], np.cumsum(table.counts)))])
    regions = region_table(packed, masked_tokens)
    fill_regions(batch, packed, regions, cross_slot_targets, weights, buckets)
    # Runs that move together: what stands before a document's response, then its slots; last the padding at the end.
    still = regions[:, :CLEAN_PART].sum(axis=1)
    runs, shifts = np.empty(len(order) + n + 1, np.int64), np.zeros(len(order) + n + 1, np.int64)
    slot_run = np.arange(1, len(order) + 1) + table.document
    runs[slot_run] = lengths
    runs[np.cumsum(table.counts + 1) - table.counts - 1] = still[:-1]
    runs[-1] = still[-1]
    begin = np.cumsum(lengths) - lengths + np.cumsum(still)[table.document]
    shifts[slot_run] = table.sources[order] - begin
    source = move_runs(packed.tokens.size, runs, shifts)
    fill_documents(batch, packed, source)

    kind, weight = batch.target_kind.reshape(-1), batch.loss_weight.reshape(-1)
    untargeted = ~draws.masked[order]
    if cross_slot_targets:  # only the document's last token has no next one
        untargeted &= order == np.repeat(np.cumsum(table.counts) - 1, table.counts)
    ends = (begin + lengths)[untargeted] - 1
    kind[ends], weight[ends] = NONE, 0
    if draws.prefix is not None:
        heads = ranges(begin, draws.prefix[order])
        kind[heads], weight[heads], batch.noise_bucket.reshape(-1)[heads] = CLEAN, 1, 0
    fill_tokens(batch, packed, source, mask_id)
