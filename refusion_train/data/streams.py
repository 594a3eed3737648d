"""The order of the data, and where in it a run stands.

The order is a pure function of (seed, dataset, streams, shuffle_blocks): ranks, threads and micro-batches do not enter.
A dataset is a list of units (blocks, or ranges of documents of a block). Every epoch has its own permutation of the
units, and the permutations one after another are one endless sequence g = 0, 1, 2, ... Of `streams` streams, stream s
takes the units g = s mod streams. It reads them in windows of `shuffle_blocks` units that end with the epoch,
shuffles the documents of a window among each other, and cuts its rows from that. All permutations are orders of keyed
hashes, so nothing has to be drawn, or remembered, to know what comes at a given place.

So every stream stands at one place of its own sequence, and all places together are the cursor of a run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from refusion_train.data.packing import Cut, RowPacker, Span, Tape, cut, hash_dataset, lay_tape
from refusion_train.errors import DataError
from refusion_train.objective import noise

if TYPE_CHECKING:
    from refusion_train.config import Config
    from refusion_train.data.shards import ShardSet

# So many tokens of a window are read and cut at a time: enough for long arrays, and 0.25 MiB of memory for a stream.
TOKENS_CUT_AHEAD = 1 << 16
UNITS_PER_STREAM = 8  # with fewer, a stream's share of an epoch would be coarse: blocks are then split
_UNIT_SALT, _DOCUMENT_SALT = 0x756E6974, 0x646F63  # keep the hashes of different purposes apart


@dataclass
class Cursor:
    """Where a run stands in its data; free of any layout of ranks.

    step:    steps done, which is also the number of the next one
    streams: int64 [streams, 3]; for each stream: its window (the place of the window's first unit in the stream's
             sequence of units), the document in the window's order, and the token in the document. -1: not known here
    order:   what the places refer to (see `DataOrder.identity`); empty: not checked
    """

    step: int
    streams: np.ndarray
    order: dict[str, int | str] = field(default_factory=dict)

    @classmethod
    def start(cls, streams: int) -> Cursor:
        """The beginning of the data."""
        return cls(0, np.zeros((streams, 3), dtype=np.int64))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and text for a JSON file."""
        return {"step": self.step, "streams": self.streams.tolist(), "order": dict(self.order)}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Cursor:
        """Inverse of `to_dict`. Raises DataError if `state` is something else."""
        try:
            streams = np.asarray(state["streams"], dtype=np.int64).reshape(len(state["streams"]), 3)
            return cls(int(state["step"]), streams, dict(state.get("order", {})))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the saved place in the data is not readable ({error}); use another checkpoint") from None


def merge_cursors(cursors: Sequence[Cursor]) -> Cursor:
    """The cursor of the whole run from those of all data-parallel ranks after the same step."""
    assert cursors, "merge_cursors needs the cursor of at least one rank"
    step, order = cursors[0].step, cursors[0].order
    assert all(c.step == step and c.order == order for c in cursors), (
        "cursors of different steps or runs cannot be joined"
    )
    streams = np.max([cursor.streams for cursor in cursors], axis=0)
    assert streams.min(initial=0) >= 0, "the cursors of some data-parallel ranks are missing"
    return Cursor(step, streams, dict(order))


class DataOrder:
    """Which documents come where, in every stream and for all epochs. Shared by the streams of a rank.

    Raises DataError for a dataset without a token.
    """

    def __init__(self, dataset: ShardSet, seed: int, streams: int, shuffle_blocks: int) -> None:
        if dataset.index.tokens == 0 or dataset.index.documents == 0:
            raise DataError(f"{dataset.path}: the dataset holds no tokens; build it from a corpus that has text")
        self.dataset = dataset
        self.seed = seed
        self.streams = streams
        self.shuffle_blocks = shuffle_blocks
        self.bos_id = dataset.index.special_ids.get("bos")
        self.dataset_hash = hash_dataset(dataset.fingerprint)
        documents = np.array(
            [block.documents for shard in dataset.index.shards for block in shard.blocks], dtype=np.int64
        )
        self.unit_block, self.unit_start, self.unit_stop = split_units(documents, UNITS_PER_STREAM * streams)
        self.units = self.unit_block.size
        # Neighbouring streams are in the same epoch or the next, unless there are fewer units than streams.
        self._remembered = 4 + -(-streams // self.units)
        self._permutations: OrderedDict[int, np.ndarray] = OrderedDict()

    @classmethod
    def of(cls, dataset: ShardSet, config: Config) -> DataOrder:
        """The order that a configuration asks for."""
        return cls(dataset, config.seed, config.data.streams, config.data.shuffle_blocks)

    @property
    def identity(self) -> dict[str, int | str]:
        """What the places of a cursor depend on. Row length and batch size are not among it: they may change."""
        return {
            "seed": self.seed,
            "dataset": self.dataset.fingerprint,
            "data.streams": self.streams,
            "data.shuffle_blocks": self.shuffle_blocks,
        }

    def check(self, cursor: Cursor) -> None:
        """Raise DataError if the cursor was taken in another order of data than this one."""
        for key, value in self.identity.items():
            saved = cursor.order.get(key, value)
            if saved != value:
                raise DataError(
                    f"the run was at a place in other data: {key} was {saved} and is now {value}; "
                    f"restore it ({self.dataset.path}), or start a new run_dir"
                )
        if cursor.streams.shape != (self.streams, 3):
            raise DataError(
                f"the saved place in the data has {len(cursor.streams)} streams, data.streams={self.streams}; "
                "a run keeps its data.streams for life"
            )

    def permutation(self, epoch: int) -> np.ndarray:
        """int64 [units]: the units in the order of an epoch."""
        if epoch in self._permutations:
            self._permutations.move_to_end(epoch)
            return self._permutations[epoch]
        key = _key(self.seed, _UNIT_SALT, epoch)
        order = np.argsort(noise.mix(np.uint64(key), np.arange(self.units, dtype=np.uint64)), kind="stable")
        self._permutations[epoch] = order
        if len(self._permutations) > self._remembered:
            self._permutations.popitem(last=False)
        return order

    def window(self, stream: int, first: int) -> tuple[Tape, int]:
        """The shuffled documents of a stream's window whose first unit has place `first`, and the place of the next."""
        epoch = (stream + first * self.streams) // self.units
        end_of_epoch = -(-((epoch + 1) * self.units - stream) // self.streams)
        stop = min(first + self.shuffle_blocks, end_of_epoch)
        places = stream + np.arange(first, stop, dtype=np.int64) * self.streams
        units = self.permutation(epoch)[places % self.units]
        spans = [
            Span(self.dataset.block(block), start, end)
            for block, start, end in zip(
                self.unit_block[units].tolist(),
                self.unit_start[units].tolist(),
                self.unit_stop[units].tolist(),
                strict=True,
            )
        ]
        return lay_tape(spans, self.bos_id, epoch, _key(self.seed, _DOCUMENT_SALT, epoch)), stop


class Stream:
    """One stream at one place; rows are taken from it in turn. Windows are opened when they are needed."""

    def __init__(self, order: DataOrder, stream: int, place: Iterable[int] = (0, 0, 0)) -> None:
        self.order = order
        self.stream = stream
        self._first, self._document, self._offset = (int(number) for number in place)
        self._next_first = self._first
        self._tape: Tape | None = None
        self._position = 0
        self._cut: Cut | None = None  # what is read of the tape
        self._part = 0  # its next row

    @property
    def place(self) -> tuple[int, int, int]:
        """The stream's entry of a cursor: window, document in the window, token in the document."""
        if self._tape is None:
            return self._first, self._document, self._offset
        if self._position == self._tape.tokens:
            return self._next_first, 0, 0
        return self._first, *self._tape.locate(self._position)

    def fill(self, packer: RowPacker, row: int) -> None:
        """Fill a row with the next tokens."""
        column = 0
        while column < packer.length:
            tape = self._tape if self._tape is not None else self._resume()
            if self._position == tape.tokens:
                self._open(self._next_first)
                continue
            if self._cut is None or self._part == len(self._cut.ends):
                whole_rows = max(TOKENS_CUT_AHEAD // packer.length, 1) * packer.length
                stop = min(self._position - column + whole_rows, tape.tokens)
                self._cut, self._part = cut(tape, self._position, stop, column, packer.length), 0
            size = packer.fill(row, column, self._cut, self._part)
            self._position += size
            self._part += 1
            column += size

    def _open(self, first: int) -> Tape:
        self._tape, self._next_first = self.order.window(self.stream, first)
        self._first, self._position = first, 0
        self._cut = None
        return self._tape

    def _resume(self) -> Tape:
        """Open the window of the place given at the start and go to its document and token."""
        document, offset = self._document, self._offset
        tape = self._open(self._first)
        if document or offset:
            lengths = np.diff(tape.bounds)
            if not (0 <= document < lengths.size and 0 <= offset < lengths[document]):
                raise DataError(
                    f"{self.order.dataset.path}: stream {self.stream} has no token {offset} in document {document} of "
                    f"its window at unit {self._first}; the checkpoint belongs to other data"
                )
            self._position = int(tape.bounds[document]) + offset
        return tape


def split_units(documents: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks, or parts of blocks, so that there are at least `wanted` of them if the documents allow it.

    documents: int64 [blocks], number of documents of each. Returns int64 [units] each: block, first document within the
    block, end (exclusive). Every document is in one unit; no unit is empty.
    """
    blocks = np.flatnonzero(documents)
    sizes = documents[blocks]
    parts = np.minimum(sizes, -(-wanted // max(blocks.size, 1)))
    block = np.repeat(blocks, parts)
    size, count = np.repeat(sizes, parts), np.repeat(parts, parts)
    part = np.arange(block.size) - np.repeat(np.cumsum(parts) - parts, parts)
    return block, part * size // count, (part + 1) * size // count


def _key(seed: int, salt: int, epoch: int) -> int:
    """Key of all hashes of one purpose in one epoch."""
    return int(noise.mix(noise.mix(np.uint64(seed), np.uint64(salt)), np.uint64(epoch)))
