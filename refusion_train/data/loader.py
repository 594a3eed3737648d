"""Batches for training and validation, made from shards: streams, packing and corruption put together.

A training step is `global_batch_size` rows. Row j of step i is the next row of stream (i * global_batch_size + j) mod
streams, and data-parallel rank r of n holds the rows j = r mod n; so a rank needs only the streams s = r mod n, and
rows, noise and cursors are the same on any number of ranks, threads and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from refusion_train.data.packing import Pieces, RowPacker, Span, Tape, cut, hash_dataset, lay_tape
from refusion_train.data.prefetch import Prefetcher
from refusion_train.data.streams import Cursor, DataOrder, Stream, merge_cursors
from refusion_train.errors import DataError
from refusion_train.hf.corruption import noise_level

if TYPE_CHECKING:
    from refusion_train.config import Config
    from refusion_train.data.shards import ShardSet
    from refusion_train.objective import Objective
    from refusion_train.objective.batch import Batch, PackedDocuments

__all__ = ["Cursor", "StepBatch", "TrainLoader", "ValidationLoader", "merge_cursors"]

VALIDATION_SEED = 0  # not the run's seed: runs are compared on the same noise


@dataclass
class StepBatch:
    """One rank's part of one global batch.

    step:          0 for the first step of the run
    micro_batches: views of `micro_batch_size` rows each
    counts:        float64 [3], sums over this rank's rows: clean targets, response tokens, documents with a response
    tokens:        tokens on this rank, padding not counted
    cursor:        the state after this step; the entries of other ranks' streams are -1 (see `merge_cursors`)
    epoch:         tokens of all steps up to this one, over all ranks, in passes over the dataset
    pieces:        where the rows come from
    """

    step: int
    micro_batches: list[Batch]
    counts: np.ndarray
    tokens: int
    cursor: Cursor
    epoch: float
    pieces: Pieces

    @property
    def documents(self) -> list[tuple[int, int, int, int, int]]:
        """Each piece of a document: (row on this rank, document, first token, end, epoch)."""
        p = self.pieces
        columns = (p.rows, p.documents, p.offsets, p.offsets + p.lengths, p.epochs)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def describe(self, limit: int = 20) -> str:
        """One line for an error report: documents (numbers in the dataset) with their token ranges, row by row."""
        documents = self.documents
        parts = [f"{number}[{start}:{stop}]" for _, number, start, stop, _ in documents[:limit]]
        more = f" and {len(documents) - limit} more" if len(documents) > limit else ""
        return f"step {self.step}, documents {', '.join(parts)}{more}"


class TrainLoader:
    """The endless sequence of this rank's `StepBatch`es, from the start or from a cursor.

    dataset: what to read; config: `seed`, `data.*` and the batch sizes of `train.*`; objective: how to corrupt;
    cursor: the merged state of an earlier run, of any number of ranks.
    Raises DataError for a dataset without tokens and for a cursor of other data; while iterating, for damaged shards.
    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        dataset: ShardSet,
        config: Config,
        objective: Objective,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor | None = None,
    ) -> None:
        feed = StepFeed(dataset, config, objective, dp_rank, dp_size, cursor)
        self._batches = Prefetcher(feed.take, feed.make, config.data.workers, config.data.prefetch)

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        return next(self._batches)

    def close(self) -> None:
        """End the threads. Batches already prepared are dropped; they will come again from the last cursor used."""
        self._batches.close()

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass
class _Taken:
    """The rows of one step before corruption."""

    step: int
    packed: PackedDocuments
    pieces: Pieces
    cursor: Cursor


class StepFeed:
    """The two stages of a step: `take` packs the next rows and advances the streams, `make` corrupts them."""

    def __init__(
        self,
        dataset: ShardSet,
        config: Config,
        objective: Objective,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor | None = None,
    ) -> None:
        streams, self.global_batch = config.data.streams, config.train.global_batch_size
        self.micro_batch = config.train.micro_batch_size
        assert 0 <= dp_rank < dp_size, f"data-parallel rank {dp_rank} is not within 0..{dp_size - 1}"
        assert streams % dp_size == 0, f"data.streams={streams} is not a multiple of the data-parallel size {dp_size}"
        assert self.global_batch % (dp_size * self.micro_batch) == 0, (
            f"train.global_batch_size={self.global_batch} is not a multiple of train.micro_batch_size * data-parallel "
            f"size = {self.micro_batch} * {dp_size}"
        )
        self.order = DataOrder.of(dataset, config)
        cursor = cursor if cursor is not None else Cursor.start(streams)
        self.order.check(cursor)
        own = range(dp_rank, streams, dp_size)
        assert cursor.streams[own].min() >= 0, "the cursor lacks this rank's streams; merge the cursors of all ranks"
        self.streams = {stream: Stream(self.order, stream, cursor.streams[stream]) for stream in own}
        self.places = np.full((streams, 3), -1, dtype=np.int64)
        self.places[own] = cursor.streams[own]
        self.rows = range(dp_rank, self.global_batch, dp_size)
        self.step = cursor.step
        self.objective = objective
        self.seed = config.seed
        self.length = config.data.sequence_length
        self.tokens = dataset.index.tokens

    def take(self) -> _Taken:
        packer = RowPacker(len(self.rows), self.length)
        touched = set()
        for row, j in enumerate(self.rows):
            number = (self.step * self.global_batch + j) % len(self.places)
            self.streams[number].fill(packer, row)
            touched.add(number)
        for number in touched:
            self.places[number] = self.streams[number].place
        packed, pieces = packer.finish(self.seed, self.order.dataset_hash)
        step, self.step = self.step, self.step + 1
        return _Taken(step, packed, pieces, Cursor(self.step, self.places.copy(), dict(self.order.identity)))

    def make(self, taken: _Taken) -> StepBatch:
        batch = self.objective.corrupt(taken.packed)
        rows = len(self.rows)
        return StepBatch(
            step=taken.step,
            micro_batches=[batch.rows(i, i + self.micro_batch) for i in range(0, rows, self.micro_batch)],
            counts=batch.counts.sum(axis=0),
            tokens=rows * self.length,
            cursor=taken.cursor,
            epoch=(taken.step + 1) * self.global_batch * self.length / self.tokens,
            pieces=taken.pieces,
        )


Noise = float | np.ndarray | Callable[[np.ndarray], np.ndarray]


def stratified_noise(number: int, passes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Noise levels of pass `number` of `passes`, for `ValidationLoader`: t in [number, number + 1) / passes.

    Within this stratum the documents (int64 [n], numbers in the dataset) spread evenly (multiples of the golden ratio),
    so that a mean over all passes and documents is a quadrature over all noise levels, and always the same one.
    """
    return lambda documents: noise_level(number, documents, passes)


class ValidationLoader:
    """Micro-batches of a validation set: documents in their order, each once, with the same noise every time.

    The rows are the same on any number of ranks: row r is tokens r*length to (r+1)*length of the set, on data-parallel
    rank r mod n; the last row is padded. Every rank yields the same number of micro-batches (as the collectives of a
    forward need it); rows that only make this up hold padding, no target, and counts of 0. Iterate as often as needed.

    max_rows: use only the first so many rows.
    t:    noise level for each document in place of its own draw: one number, an array indexed by the number of the
          document in the dataset, or a function of these numbers (int64 [n] -> float64 [n]); see `stratified_noise`
    draw: which of several independent draws of masks and slot sizes; the same for all documents

    rows, tokens: what is covered over all ranks. text_bytes: the UTF-8 bytes of the text covered, as the share of
    tokens covered times the bytes of the whole set (exact if all rows are used).
    Raises DataError for a set without tokens.
    """

    def __init__(
        self,
        dataset: ShardSet,
        config: Config,
        objective: Objective,
        dp_rank: int = 0,
        dp_size: int = 1,
        *,
        max_rows: int | None = None,
        t: Noise | None = None,
        draw: int = 0,
    ) -> None:
        index = dataset.index
        if index.tokens == 0:
            raise DataError(f"{dataset.path}: the validation set holds no tokens; build it from a corpus that has text")
        assert 0 <= dp_rank < dp_size, f"data-parallel rank {dp_rank} is not within 0..{dp_size - 1}"
        self._dataset, self._objective = dataset, objective
        self._rank, self._ranks = dp_rank, dp_size
        self._t, self._draw = t, draw
        self._last_tape: tuple[int, Tape] | None = None
        self._length = config.data.sequence_length
        self._micro_batch = config.train.micro_batch_size
        # Interleaved pipeline stages take micro-batches only in groups of their number.
        self._group = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
        sizes = [block.tokens for shard in index.shards for block in shard.blocks]
        self._bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        all_rows = -(-index.tokens // self._length)
        self.rows = all_rows if max_rows is None else min(max_rows, all_rows)
        self.tokens = min(self.rows * self._length, index.tokens)
        self.text_bytes = index.text_bytes * (self.tokens / index.tokens)
        self._dataset_hash = hash_dataset(dataset.fingerprint)
        self._bos_id, self._pad_id = index.special_ids.get("bos"), index.special_ids.get("pad") or 0

    def __len__(self) -> int:
        """Micro-batches per rank."""
        own = -(-self.rows // self._ranks)
        return -(-own // (self._micro_batch * self._group)) * self._group

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            packer = RowPacker(self._micro_batch, self._length, self._pad_id)
            for row in range(self._micro_batch):
                self._fill(packer, row, (number * self._micro_batch + row) * self._ranks + self._rank)
            packed, pieces = packer.finish(VALIDATION_SEED, self._dataset_hash)
            yield self._objective.corrupt(packed, t=self._noise(pieces.documents))

    def _fill(self, packer: RowPacker, row: int, number: int) -> None:
        """Row `number` of the set; nothing if there is no such row."""
        start, stop = number * self._length, min((number + 1) * self._length, self.tokens)
        if number >= self.rows:
            return
        for block in range(int(self._bounds.searchsorted(start, "right")) - 1, len(self._bounds) - 1):
            base, end = int(self._bounds[block]), int(self._bounds[block + 1])
            if base >= stop:
                break
            if end > max(base, start):
                tape = self._tape(block)
                first = max(start, base)
                content = cut(tape, first - base, min(stop, end) - base, first - start, self._length)
                packer.fill(row, first - start, content, 0)

    def _tape(self, block: int) -> Tape:
        """The documents of a block; the last one used is kept, as the next row mostly lies in the same."""
        if self._last_tape is None or self._last_tape[0] != block:
            content = self._dataset.block(block)
            span = Span(content, 0, len(content.prompts))
            self._last_tape = block, lay_tape([span], self._bos_id, self._draw)
        return self._last_tape[1]

    def _noise(self, documents: np.ndarray) -> np.ndarray | None:
        if self._t is None:
            return None
        if callable(self._t):
            return np.asarray(self._t(documents), dtype=np.float64)
        if isinstance(self._t, np.ndarray):
            return self._t[documents].astype(np.float64)
        return np.full(documents.size, self._t, dtype=np.float64)
