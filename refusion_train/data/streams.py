"""The order of the data, and where in it a run stands.

The order is a pure function of (seed, dataset, streams, shuffle_blocks): ranks, threads and micro-batches do not enter.
A dataset is a list of units (blocks, or ranges of documents of a block). Every epoch has its own permutation of the
units, and the permutations one after another are one endless sequence g = 0, 1, 2, ... Of `streams` streams, stream s
takes the units g = s mod streams. It reads them in windows of `shuffle_blocks` units that end with the epoch,
shuffles the documents of a window among each other, and cuts its rows from that. All permutations are orders of keyed
hashes, so nothing has to be drawn, or remembered, to know what comes at a given place.

A block that cannot be read may be left out: its documents keep their places in the order of the window, without a
token. So the same damage gives the same rows whoever reads them, and once it is mended every place is still right.

So every stream stands at one place of its own sequence, and the places in all datasets are the cursor of a run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from refusion_train.data.packing import Cut, CutShort, RowPacker, Span, Tape, cut, hash_dataset, lay_tape
from refusion_train.errors import DataError
from refusion_train.objective import noise

if TYPE_CHECKING:
    from refusion_train.config import Config
    from refusion_train.data.shards import ShardSet

# So many tokens of a window are read and cut at a time: enough for long arrays, and 0.25 MiB of memory for a stream.
TOKENS_CUT_AHEAD = 1 << 16
UNITS_PER_STREAM = 8  # with fewer, a stream's share of an epoch would be coarse: blocks are then split
_DAMAGED_IN_A_ROW = 64  # units without a token after which a stream looks whether the dataset has any
_UNIT_SALT, _DOCUMENT_SALT = 0x756E6974, 0x646F63  # keep the hashes of different purposes apart


@dataclass
class Cursor:
    """Where a run stands in its data; free of any layout of ranks.

    step:   steps done, which is also the number of the next one
    places: for each dataset, by its fingerprint, int64 [streams, 3]; for each stream: its window (the place of the
            window's first unit in the stream's sequence of units), the document in the window's order, and the token
            in the document. -1: not known here. A dataset that is not read any more keeps its places.
    order:  what the places depend on besides (see `DataOrder.identity`); empty: not checked
    """

    step: int
    places: dict[str, np.ndarray] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and text for a JSON file."""
        places = {fingerprint: streams.tolist() for fingerprint, streams in self.places.items()}
        return {"step": self.step, "places": places, "order": dict(self.order)}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Cursor:
        """Inverse of `to_dict`; reads cursors of a single dataset as they once were, too (`streams`, and in `order` the
        `dataset`). Raises DataError if `state` is something else."""
        try:
            order = dict(state.get("order", {}))
            places = state["places"] if "places" in state else {order.pop("dataset"): state["streams"]}
            arrays = {str(f): np.asarray(p, dtype=np.int64).reshape(len(p), 3) for f, p in places.items()}
            return cls(int(state["step"]), arrays, order)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the saved place in the data is not readable ({error}); use another checkpoint") from None

    def check(self, order: dict[str, int]) -> None:
        """Raise DataError if the places were taken in another order of data than this one."""
        for key, value in order.items():
            saved = self.order.get(key, value)
            if saved != value:
                raise DataError(
                    f"the run was at a place in other data: {key} was {saved} and is now {value}; restore it, or start "
                    "a new run_dir"
                )
        for streams in self.places.values():
            if streams.shape != (order["data.streams"], 3):
                raise DataError(
                    f"the saved place in the data has {len(streams)} streams, data.streams={order['data.streams']}; "
                    "a run keeps its data.streams for life"
                )


def merge_cursors(cursors: Sequence[Cursor]) -> Cursor:
    """The cursor of the whole run from those of all data-parallel ranks after the same step."""
    assert cursors, "merge_cursors needs the cursor of at least one rank"
    first = cursors[0]
    assert all((c.step, c.order, c.places.keys()) == (first.step, first.order, first.places.keys()) for c in cursors), (
        "cursors of different steps or runs cannot be joined"
    )
    places = {name: np.max([cursor.places[name] for cursor in cursors], axis=0) for name in first.places}
    assert all(streams.min(initial=0) >= 0 for streams in places.values()), (
        "the cursors of some data-parallel ranks are missing"
    )
    return Cursor(first.step, places, dict(first.order))


@dataclass(frozen=True)
class Damage:
    """A block that was left out because it could not be read. documents, tokens: what it holds according to the index;
    reason: the error, which names dataset, shard and block."""

    fingerprint: str
    block: int
    documents: int
    tokens: int
    reason: str


class DataOrder:
    """Which documents come where, in every stream and for all epochs. Shared by the streams of a rank.

    number: of the dataset among those that are read together; skip: leave out what cannot be read, instead of raising.
    damage: what was left out, in the order of reading, for the owner to take away.
    Raises DataError for a dataset without a token.
    """

    def __init__(
        self, dataset: ShardSet, seed: int, streams: int, shuffle_blocks: int, number: int = 0, skip: bool = False
    ) -> None:
        if dataset.index.tokens == 0 or dataset.index.documents == 0:
            raise DataError(f"{dataset.path}: the dataset holds no tokens; build it from a corpus that has text")
        self.dataset = dataset
        self.seed = seed
        self.streams = streams
        self.shuffle_blocks = shuffle_blocks
        self.number, self.skip = number, skip
        self.damage: list[Damage] = []
        self.bos_id = dataset.index.special_ids.get("bos")
        self.dataset_hash = hash_dataset(dataset.fingerprint)
        documents = np.diff(dataset.first_documents)
        self.unit_block, self.unit_start, self.unit_stop = split_units(documents, UNITS_PER_STREAM * streams)
        self.units = self.unit_block.size
        # Neighbouring streams are in the same epoch or the next, unless there are fewer units than streams.
        self._remembered = 4 + -(-streams // self.units)
        self._permutations: OrderedDict[int, np.ndarray] = OrderedDict()

    @classmethod
    def of(cls, dataset: ShardSet, config: Config, number: int = 0) -> DataOrder:
        """The order that a configuration asks for."""
        skip = config.data.on_error == "skip"
        return cls(dataset, config.seed, config.data.streams, config.data.shuffle_blocks, number, skip)

    @property
    def identity(self) -> dict[str, int]:
        """What the places of a cursor depend on, whatever the dataset. Row length and batch size are not among it: they
        may change."""
        return {"seed": self.seed, "data.streams": self.streams, "data.shuffle_blocks": self.shuffle_blocks}

    def epoch(self, stream: int, place: int) -> int:
        """The epoch that a place in a stream's sequence of units belongs to."""
        return (stream + place * self.streams) // self.units

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
        units, stop = self._window_units(stream, first)
        blocks = self.unit_block[units].tolist()
        self.dataset.prepare(blocks)
        self.dataset.prepare(self.unit_block[self._window_units(stream, stop)[0]].tolist())
        spans = [
            self._span(block, start, end)
            for block, start, end in zip(
                blocks, self.unit_start[units].tolist(), self.unit_stop[units].tolist(), strict=True
            )
        ]
        epoch = self.epoch(stream, first)
        return lay_tape(spans, self.bos_id, epoch, _key(self.seed, _DOCUMENT_SALT, epoch), self.number), stop

    def _window_units(self, stream: int, first: int) -> tuple[np.ndarray, int]:
        """The units of a window, int64, and the place behind it."""
        epoch = self.epoch(stream, first)
        end_of_epoch = -(-((epoch + 1) * self.units - stream) // self.streams)
        stop = min(first + self.shuffle_blocks, end_of_epoch)
        places = stream + np.arange(first, stop, dtype=np.int64) * self.streams
        return self.permutation(epoch)[places % self.units], stop

    def _span(self, block: int, start: int, stop: int) -> Span:
        try:
            return Span(self.dataset.block(block), start, stop)
        except DataError as error:
            if not self.skip:
                raise
            self.leave_out(block, str(error))
            return Span(None, start, stop, int(self.dataset.first_documents[block]))

    def leave_out(self, block: int, reason: str) -> None:
        """Note that a block could not be read."""
        info = self.dataset.block_info(block)
        self.damage.append(Damage(self.dataset.fingerprint, block, info.documents, info.tokens, reason))

    def lost(self, error: CutShort, first_document: int) -> DataError:
        """Of a block in use, by the number of its first document: note that it is left out, or the error to raise."""
        named = DataError(f"{self.dataset.path}: {error}; restore it or build the dataset again")
        if self.skip:
            self.leave_out(self.dataset.locate(first_document)[0], str(named))
        return named

    def check_readable(self) -> None:
        """Raise DataError if there is no block at all that can be read: nothing to go on with."""
        reason = "they hold no tokens"
        for block in np.unique(self.unit_block).tolist():
            try:
                if self.dataset.block(block).tokens.size:
                    return
            except DataError as error:
                reason = str(error)
        raise DataError(f"{self.dataset.path}: every block is damaged or gone; the last one: {reason}")


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
        self._fresh = False  # cut for the very column where the row stands
        self._without_tokens = 0  # units in a row that could not be read

    @property
    def place(self) -> tuple[int, int, int]:
        """The stream's entry of a cursor: window, document in the window, token in the document."""
        if self._tape is None:
            return self._first, self._document, self._offset
        if self._position == self._tape.tokens:
            return self._next_first, 0, 0
        return self._first, *self._tape.locate(self._position)

    def used_up(self, epochs: int | None) -> bool:
        """Whether the stream's share of so many epochs has been read."""
        return epochs is not None and self.order.epoch(self.stream, self.place[0]) >= epochs

    def fill(self, packer: RowPacker, row: int, column: int = 0, epochs: int | None = None) -> int:
        """Fill a row from `column` on with the next tokens, of so many epochs at most; returns where it ends."""
        while column < packer.length:
            if self._tape is None or self._position == self._tape.tokens:
                if self.used_up(epochs):
                    return column
                self._advance()
                continue
            # What was cut ahead is for rows from column 0 on; another stream may have filled the beginning of this one.
            if self._cut is None or self._part == len(self._cut.ends) or (column and not self._fresh):
                whole_rows = max(TOKENS_CUT_AHEAD // packer.length, 1) * packer.length
                stop = min(self._position - column + whole_rows, self._tape.tokens)
                try:
                    self._cut, self._part = cut(self._tape, self._position, stop, column, packer.length), 0
                    self._fresh = True
                except CutShort as error:
                    self._leave_out(error)
                    continue
            size = packer.fill(row, column, self._cut, self._part)
            self._position += size
            self._part, self._fresh = self._part + 1, False
            column += size
        return column

    def _advance(self) -> None:
        """Open the first window, or the next."""
        if self._tape is None:
            self._resume()
            return
        lost = all(block is None for block in self._tape.blocks)
        self._without_tokens = self._without_tokens + len(self._tape.blocks) if lost else 0
        if self._without_tokens >= _DAMAGED_IN_A_ROW:  # is there anything else?
            self.order.check_readable()
            self._without_tokens = 0
        self._open(self._next_first)

    def _leave_out(self, error: CutShort) -> None:
        """Go on without a block that is not there any more, or raise what is wrong with it."""
        tape = self._tape
        assert tape is not None, "a block of no tape was lost"
        content = tape.blocks[error.block]
        assert content is not None, "a block was lost twice"
        named = self.order.lost(error, content.first_document)
        if not self.order.skip:
            raise named from None
        self._tape, self._position = tape.without(error.block, self._position)
        self._cut = None

    def _open(self, first: int) -> Tape:
        self._tape, self._next_first = self.order.window(self.stream, first)
        self._first, self._position = first, 0
        self._cut = None
        return self._tape

    def _resume(self) -> None:
        """Open the window of the place given at the start and go to its document and token."""
        document, offset = self._document, self._offset
        tape = self._open(self._first)
        if document or offset:
            lengths = np.diff(tape.bounds)
            known = 0 <= document < lengths.size and offset >= 0
            gone = known and tape.blocks[tape.source[document]] is None  # go on behind it
            if not gone and not (known and offset < lengths[document]):
                raise DataError(
                    f"{self.order.dataset.path}: stream {self.stream} has no token {offset} in document {document} of "
                    f"its window at unit {self._first}; the checkpoint belongs to other data"
                )
            self._position = int(tape.bounds[document]) + (0 if gone else offset)


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
