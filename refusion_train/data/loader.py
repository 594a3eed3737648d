"""Batches for training and validation, made from shards: streams, packing and corruption put together.

A training step is `global_batch_size` rows. Row j of step i is the next row of stream (i * global_batch_size + j) mod
streams of a source (see `mixture`), and data-parallel rank r of n holds the rows j = r mod n; so a rank needs only the
streams s = r mod n, and rows, noise and cursors are the same on any number of ranks, threads and micro-batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from refusion_train.config import SourceConfig
from refusion_train.data.mixture import Blend, Shares, Source
from refusion_train.data.packing import Cut, CutShort, Pieces, RowPacker, Span, Tape, cut, hash_dataset, lay_tape
from refusion_train.data.prefetch import Prefetcher
from refusion_train.data.shards import ShardSet
from refusion_train.data.streams import Cursor, Damage, DataOrder, Stream, merge_cursors
from refusion_train.errors import DataError
from refusion_train.hf.corruption import noise_level

if TYPE_CHECKING:
    from refusion_train.config import Config
    from refusion_train.objective import Objective
    from refusion_train.objective.batch import Batch, PackedDocuments

__all__ = ["Cursor", "StepBatch", "TrainLoader", "ValidationLoader", "merge_cursors"]

VALIDATION_SEED = 0  # not the run's seed: runs are compared on the same noise


@dataclass
class StepBatch:
    """One rank's part of one global batch.

    step:          0 for the first step of the run
    micro_batches: views of `micro_batch_size` rows each
    counts:        float64 [3], sums over this rank's rows of `Batch.counts`
    tokens:        tokens on this rank, padding not counted
    cursor:        the state after this step; the entries of other ranks' streams are -1 (see `merge_cursors`)
    epoch:         tokens of all steps up to this one, over all ranks, in passes over all datasets
    pieces:        where the rows come from
    names:         of the sources
    damage:        blocks that were left out, noticed while this step was read (they may be so again and again)
    """

    step: int
    micro_batches: list[Batch]
    counts: np.ndarray
    tokens: int
    cursor: Cursor
    epoch: float
    pieces: Pieces
    names: Sequence[str]
    damage: Sequence[Damage] = ()

    @property
    def source_tokens(self) -> np.ndarray:
        """Tokens on this rank from each source, int64 [sources]."""
        sums = np.bincount(self.pieces.datasets, weights=self.pieces.lengths, minlength=len(self.names))
        return sums.astype(np.int64)

    @property
    def checksum(self) -> int:
        """A number of 32 bits that ranks with the same rows have alike."""
        p = self.pieces
        return zlib.crc32(np.stack([p.rows, p.datasets, p.documents, p.offsets, p.lengths, p.epochs]).tobytes())

    @property
    def documents(self) -> list[tuple[int, int, int, int, int]]:
        """Each piece of a document: (row on this rank, document, first token, end, epoch)."""
        p = self.pieces
        columns = (p.rows, p.documents, p.offsets, p.offsets + p.lengths, p.epochs)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def describe(self, limit: int = 20) -> str:
        """One line for an error report: documents (numbers in the dataset) with their token ranges, row by row."""
        documents = self.documents
        names = [f"{name} " for name in self.names] if len(self.names) > 1 else [""]
        sources = [names[number] for number in self.pieces.datasets[:limit].tolist()]
        parts = [
            f"{source}{number}[{start}:{stop}]"
            for source, (_, number, start, stop, _) in zip(sources, documents[:limit], strict=True)
        ]
        more = f" and {len(documents) - limit} more" if len(documents) > limit else ""
        return f"step {self.step}, documents {', '.join(parts)}{more}"


class TrainLoader:
    """The endless sequence of this rank's `StepBatch`es, from the start or from a cursor.

    sources: what to read, or a lone dataset; config: `seed`, `data.*` and the batch sizes of `train.*`; objective: how
    to corrupt; cursor: the merged state of an earlier run, of any number of ranks and with any of its sources.
    Raises DataError for a dataset without tokens and for a cursor of other data; while iterating, for damaged shards
    (with `data.on_error: skip` only if a dataset has nothing else).
    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        sources: ShardSet | Sequence[Source],
        config: Config,
        objective: Objective,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor | None = None,
    ) -> None:
        feed = StepFeed(sources, config, objective, dp_rank, dp_size, cursor)
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
    damage: list[Damage]


class StepFeed:
    """The two stages of a step: `take` packs the next rows and advances the streams, `make` corrupts them."""

    def __init__(
        self,
        sources: ShardSet | Sequence[Source],
        config: Config,
        objective: Objective,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor | None = None,
    ) -> None:
        if not isinstance(sources, Sequence):
            sources = [Source("", sources, SourceConfig(sources.path))]
        streams, self.global_batch = config.data.streams, config.train.global_batch_size
        self.micro_batch = config.train.micro_batch_size
        assert 0 <= dp_rank < dp_size, f"data-parallel rank {dp_rank} is not within 0..{dp_size - 1}"
        assert streams % dp_size == 0, f"data.streams={streams} is not a multiple of the data-parallel size {dp_size}"
        assert self.global_batch % (dp_size * self.micro_batch) == 0, (
            f"train.global_batch_size={self.global_batch} is not a multiple of train.micro_batch_size * data-parallel "
            f"size = {self.micro_batch} * {dp_size}"
        )
        self.names = [source.name for source in sources]
        self.orders = [DataOrder.of(source.dataset, config, number) for number, source in enumerate(sources)]
        self.fingerprints = [source.dataset.fingerprint for source in sources]
        self.shares = Shares([source.config for source in sources], config.seed, self.global_batch)
        cursor = cursor if cursor is not None else Cursor(0)
        cursor.check(self.orders[0].identity)
        if cursor.places and not cursor.places.keys() & set(self.fingerprints):
            raise DataError(
                f"the run was at a place in other data: dataset {', '.join(cursor.places)}, not "
                f"{', '.join(self.fingerprints)}; restore it, or start a new run_dir"
            )
        own = np.arange(dp_rank, streams, dp_size)
        self.places = {name: places.copy() for name, places in cursor.places.items()}
        for fingerprint in self.fingerprints:
            saved = cursor.places.get(fingerprint, np.zeros((streams, 3), dtype=np.int64))
            assert saved[own].min() >= 0, "the cursor lacks this rank's streams; merge the cursors of all ranks"
            self.places[fingerprint] = np.full((streams, 3), -1, dtype=np.int64)
            self.places[fingerprint][own] = saved[own]
        epochs = [source.config.epochs for source in sources]
        places = [self.places[fingerprint] for fingerprint in self.fingerprints]
        self.blends = {
            number: Blend([Stream(o, number, p[number]) for o, p in zip(self.orders, places, strict=True)], epochs)
            for number in own.tolist()
        }
        self.rows = range(dp_rank, self.global_batch, dp_size)
        self.step = cursor.step
        self.objective = objective
        self.seed = config.seed
        self.length = config.data.sequence_length
        self.streams = streams
        self.tokens = sum(source.dataset.index.tokens for source in sources)

    def take(self) -> _Taken:
        packer = RowPacker(len(self.rows), self.length)
        draws = self.shares.rows_of(self.step)
        touched = set()
        for row, j in enumerate(self.rows):
            number = (self.step * self.global_batch + j) % self.streams
            self.blends[number].fill(packer, row, draws[j])
            touched.add(number)
        for number in touched:
            for fingerprint, stream in zip(self.fingerprints, self.blends[number].streams, strict=True):
                self.places[fingerprint][number] = stream.place
        packed, pieces = packer.finish(self.seed, *(order.dataset_hash for order in self.orders))
        step, self.step = self.step, self.step + 1
        places = {name: streams.copy() for name, streams in self.places.items()}
        damage = [entry for order in self.orders for entry in order.damage]
        for order in self.orders:
            order.damage = []
        return _Taken(step, packed, pieces, Cursor(self.step, places, self.orders[0].identity), damage)

    def make(self, taken: _Taken) -> StepBatch:
        batch = self.objective.corrupt(taken.packed, step=taken.step)
        rows = len(self.rows)
        return StepBatch(
            step=taken.step,
            micro_batches=[batch.rows(i, i + self.micro_batch) for i in range(0, rows, self.micro_batch)],
            counts=batch.counts.sum(axis=0),
            tokens=rows * self.length,
            cursor=taken.cursor,
            epoch=(taken.step + 1) * self.global_batch * self.length / self.tokens,
            pieces=taken.pieces,
            names=self.names,
            damage=taken.damage,
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

    With `data.on_error: skip` blocks that cannot be read are left out: what lies in a row behind them moves up, and the
    end of the row is padding. `damage`: of the last iteration; `filled`: its tokens on this rank.

    max_rows: use only the first so many rows.
    t:    noise level for each document in place of its own draw: one number, an array indexed by the number of the
          document in the dataset, or a function of these numbers (int64 [n] -> float64 [n]); see `stratified_noise`
    draw: which of several independent draws of masks and slot sizes; the same for all documents

    rows, tokens: what is covered over all ranks. text_bytes: the UTF-8 bytes of the text covered, as the share of
    tokens covered times the bytes of the whole set (exact if all rows are used); see `bytes_of`.
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
        self._last_tape: tuple[int, Tape | None] | None = None
        self._skip = config.data.on_error == "skip"
        self.damage: dict[int, Damage] = {}
        self.filled = 0
        self._length = config.data.sequence_length
        self._micro_batch = config.train.micro_batch_size
        # Interleaved pipeline stages take micro-batches only in groups of their number.
        self._group = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
        sizes = [block.tokens for shard in index.shards for block in shard.blocks]
        self._bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        all_rows = -(-index.tokens // self._length)
        self.rows = all_rows if max_rows is None else min(max_rows, all_rows)
        self.tokens = min(self.rows * self._length, index.tokens)
        self.text_bytes = self.bytes_of(self.tokens)
        self._dataset_hash = hash_dataset(dataset.fingerprint)
        self._bos_id, self._pad_id = index.special_ids.get("bos"), index.special_ids.get("pad") or 0

    def bytes_of(self, tokens: int) -> float:
        """UTF-8 bytes of so many tokens of the set, on average."""
        index = self._dataset.index
        return index.text_bytes * (tokens / index.tokens)

    def __len__(self) -> int:
        """Micro-batches per rank."""
        own = -(-self.rows // self._ranks)
        return -(-own // (self._micro_batch * self._group)) * self._group

    def __iter__(self) -> Iterator[Batch]:
        self.damage, self.filled, self._last_tape = {}, 0, None
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
        column = 0
        for block in range(int(self._bounds.searchsorted(start, "right")) - 1, len(self._bounds) - 1):
            base, end = int(self._bounds[block]), int(self._bounds[block + 1])
            if base >= stop:
                break
            first, last = max(start, base), min(stop, end)
            if last > first:
                content = self._read(block, first - base, last - base, column)
                if content is not None:
                    column += packer.fill(row, column, content, 0)
        self.filled += column

    def _read(self, block: int, start: int, stop: int, column: int) -> Cut | None:
        """Tokens `start` to `stop` of a block; None: it cannot be read and is left out."""
        try:
            tape = self._tape(block)
            return None if tape is None else cut(tape, start, stop, column, self._length)
        except DataError as error:
            reason = f"{self._dataset.path}: {error}" if isinstance(error, CutShort) else str(error)
            if not self._skip:
                raise DataError(reason) from None
            info = self._dataset.block_info(block)
            self.damage[block] = Damage(self._dataset.fingerprint, block, info.documents, info.tokens, reason)
            self._last_tape = block, None
            return None

    def _tape(self, block: int) -> Tape | None:
        """The documents of a block; the last one used is kept, as the next row mostly lies in the same."""
        if self._last_tape is None or self._last_tape[0] != block:
            self._dataset.prepare(range(block, min(block + 2, len(self._bounds) - 1)))
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
