"""Documents into rows of a fixed length, without padding between them.

Rows are cut from tapes: a `Tape` is a run of documents laid end to end in a given order, without copying them. A row
takes the next `length` tokens; where a row ends within a document, the document is cut, and each piece is from then on
a document of its own (positions from 0, no attention to the other piece, its own noise). What remains of a tape goes
to the next row, so no token is lost and none is padding.

Python sees pieces in arrays of many rows, never one by one; the copying is compiled and holds no GIL.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from refusion_train.data.blocks import is_whole
from refusion_train.errors import DataError
from refusion_train.objective import noise
from refusion_train.objective.batch import PackedDocuments

if TYPE_CHECKING:
    from refusion_train.data.shards import Block


@dataclass(frozen=True)
class Tape:
    """Documents end to end: n documents that lie in a few blocks of tokens.

    None of them is empty but those of blocks that cannot be read: they keep their places, without a token.

    blocks:    where the tokens are; None: a block that cannot be read
    source:    int64 [n]    which of the blocks holds the document
    begins:    int64 [n]    where it begins there
    bounds:    int64 [n+1]  where it begins on the tape; the last one is the length of the tape
    prompts:   int64 [n]    tokens of its prompt
    documents: int64 [n]    its number in the dataset
    epoch:     which pass over the dataset these documents belong to (it goes into their noise)
    dataset:   number of the dataset among those that are read together
    """

    blocks: list[Block | None]
    source: np.ndarray
    begins: np.ndarray
    bounds: np.ndarray
    prompts: np.ndarray
    documents: np.ndarray
    epoch: int
    dataset: int = 0

    @property
    def tokens(self) -> int:
        """Length of the tape in tokens."""
        return int(self.bounds[-1])

    def locate(self, position: int) -> tuple[int, int]:
        """Document (its place in the order of the tape) and token within it at a position before the end."""
        document = int(self.bounds.searchsorted(position, "right")) - 1
        return document, position - int(self.bounds[document])

    def without(self, block: int, position: int) -> tuple[Tape, int]:
        """The tape without the tokens of one of its blocks, and where on it the text at `position` goes on."""
        document, offset = self.locate(position) if position < self.tokens else (self.source.size, 0)
        lengths = np.diff(self.bounds)
        lengths[self.source == block] = 0
        bounds = np.zeros(self.bounds.size, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        blocks = [None if number == block else kept for number, kept in enumerate(self.blocks)]
        inside = document < self.source.size and self.source[document] != block
        return replace(self, blocks=blocks, bounds=bounds), int(bounds[document]) + (offset if inside else 0)


@dataclass(frozen=True)
class Span:
    """Documents `start` to `stop` (numbered within it) of a block. block: None if it cannot be read; then
    `first_document` is the number of its first document in the dataset."""

    block: Block | None
    start: int
    stop: int
    first_document: int = 0


def lay_tape(
    spans: Sequence[Span], bos_id: int | None, epoch: int, shuffle_key: int | None = None, dataset: int = 0
) -> Tape:
    """Lay the documents of the spans end to end, in their order or in the order of a keyed hash.

    Empty documents are left out. A document without a prompt that begins with `bos_id` has that token for its prompt.
    `shuffle_key`: uint64; the place of a document is the place of hash(shuffle_key, document number) among all of them.
    """
    begins, lengths, prompts, documents = [], [], [], []
    for span in spans:
        block, inside = span.block, slice(span.start, span.stop)
        if block is None:
            nothing = np.zeros(span.stop - span.start, dtype=np.int64)
            for part in (begins, lengths, prompts):
                part.append(nothing)
            documents.append(span.first_document + np.arange(span.start, span.stop, dtype=np.int64))
            continue
        begin = np.asarray(block.offsets[inside], dtype=np.int64)
        length = np.asarray(block.offsets[span.start + 1 : span.stop + 1], dtype=np.int64) - begin
        prompt = np.asarray(block.prompts[inside], dtype=np.int64)
        kept = np.flatnonzero(length)
        begin, length, prompt = begin[kept], length[kept], prompt[kept]
        if bos_id is not None:
            prompt = np.where((prompt == 0) & (block.tokens[begin] == bos_id), 1, prompt)
        begins.append(begin)
        lengths.append(length)
        prompts.append(prompt)
        documents.append(block.first_document + span.start + kept)
    begin, length, prompt, document = (_join(part) for part in (begins, lengths, prompts, documents))
    source = np.repeat(np.arange(len(spans)), [part.size for part in begins])
    if shuffle_key is not None:
        order = np.argsort(noise.mix(np.uint64(shuffle_key), document.astype(np.uint64)), kind="stable")
        begin, length, prompt, document, source = (part[order] for part in (begin, length, prompt, document, source))
    bounds = np.zeros(length.size + 1, dtype=np.int64)
    np.cumsum(length, out=bounds[1:])
    return Tape([span.block for span in spans], source, begin, bounds, prompt, document, epoch, dataset)


# Rows of `Cut.table`.
COLUMN, LENGTH, PROMPT, DOCUMENT, OFFSET = range(5)


@dataclass(frozen=True)
class Cut:
    """A range of a tape, read and cut into pieces at the ends of documents and rows.

    tokens:    int32, all tokens of the range
    table:     int64 [5, pieces]; for each piece its column in the row, its length, the length of its prompt, the number
               of its document in the dataset, its first token in the document
    ends:      for each row the pieces up to its end (the first and the last row may be partial)
    positions: for each row the tokens up to its end
    epoch:     that of the tape
    dataset:   that of the tape
    """

    tokens: np.ndarray
    table: np.ndarray
    ends: list[int]
    positions: list[int]
    epoch: int
    dataset: int


class CutShort(DataError):
    """A mapped shard has become shorter. `block`: which of the tape's blocks cannot be read for it."""

    def __init__(self, block: int, content: Block) -> None:
        super().__init__(f"shard {content.shard}, block {content.key}: the file has been cut short while it was read")
        self.block = block


def cut(tape: Tape, start: int, stop: int, column: int, length: int) -> Cut:
    """Cut positions `start` to `stop` (more than none) for rows of `length`; `start` comes to lie in `column`.

    Raises CutShort when a block's file has been shortened.
    """
    first = int(tape.bounds.searchsorted(start, "right")) - 1
    last = int(tape.bounds.searchsorted(stop, "left"))
    row_ends = np.arange(start + length - column, stop, length)
    edges = np.sort(np.concatenate([[start], tape.bounds[first + 1 : last], row_ends, [stop]]))
    edges = edges[np.flatnonzero(np.diff(edges, prepend=-1))]  # a document may end where a row ends
    begins = edges[:-1]
    document = tape.bounds.searchsorted(begins, "right") - 1
    table = np.empty((5, begins.size), dtype=np.int64)
    table[COLUMN] = (begins - start + column) % length
    table[LENGTH] = edges[1:] - begins
    table[OFFSET] = begins - tape.bounds[document]
    table[PROMPT] = np.minimum(np.maximum(tape.prompts[document] - table[OFFSET], 0), table[LENGTH])
    table[DOCUMENT] = tape.documents[document]
    tokens = np.empty(stop - start, dtype=np.int32)
    copy = fastest_copy()
    source, reads = tape.source[document], tape.begins[document] + table[OFFSET]
    for number in np.flatnonzero(np.bincount(source)).tolist():
        own = np.flatnonzero(source == number)
        block = tape.blocks[number]
        assert block is not None, "a block that cannot be read has tokens on the tape"
        if not is_whole(block.tokens):
            raise CutShort(number, block)
        copy(block.tokens, reads[own], table[LENGTH, own], begins[own] - start, tokens)
    positions = np.append(row_ends, stop)
    return Cut(
        tokens, table, edges.searchsorted(positions).tolist(), (positions - start).tolist(), tape.epoch, tape.dataset
    )


def copy_pieces(
    source: np.ndarray, begins: np.ndarray, lengths: np.ndarray, places: np.ndarray, target: np.ndarray
) -> None:
    """target[place : place + length] = source[begin : begin + length] for every piece (int64 arrays [n])."""
    for begin, length, place in zip(begins.tolist(), lengths.tolist(), places.tolist(), strict=True):
        target[place : place + length] = source[begin : begin + length]


def _copy_tokens(
    source: np.ndarray, begins: np.ndarray, lengths: np.ndarray, places: np.ndarray, target: np.ndarray
) -> None:
    """`copy_pieces` for the compiler. Unsigned indices: signed ones may count from the end, which costs the vectors."""
    for i in range(begins.size):
        begin, place = np.uint64(begins[i]), np.uint64(places[i])
        for k in range(np.uint64(lengths[i])):
            target[place + k] = source[begin + k]


@functools.cache
def fastest_copy() -> Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]:
    """`copy_pieces`, compiled (0.3 s, so it is not worth a cache on disk) and without the GIL where numba imports."""
    try:
        from numba import njit
    except ImportError:
        return copy_pieces
    return njit(nogil=True)(_copy_tokens)


@dataclass(frozen=True)
class Pieces:
    """Where the content of a group of rows comes from: one entry a piece, in the order of the rows.

    rows: int64 [n] row; documents: int64 [n] number in the dataset; offsets: int64 [n] first token of the piece within
    the document; lengths: int64 [n] tokens; epochs: int64 [n] pass over the dataset; datasets: int64 [n] which one.
    """

    rows: np.ndarray
    documents: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    epochs: np.ndarray
    datasets: np.ndarray


class RowPacker:
    """Fills rows from tapes, then hands them over as `PackedDocuments`.

    Fill the rows in ascending order and every row from left to right. Rows, or ends of rows, that are never filled hold
    `pad_id` and belong to no document.
    """

    def __init__(self, rows: int, length: int, pad_id: int = 0) -> None:
        self.length = length
        self.tokens = np.full((rows, length), pad_id, dtype=np.int32)
        self._tables: list[np.ndarray] = []
        self._rows: list[int] = []
        self._epochs: list[int] = []
        self._datasets: list[int] = []

    def fill(self, row: int, column: int, content: Cut, part: int) -> int:
        """Put row `part` of a cut into `row` from `column` on; returns how many tokens that is."""
        piece, position = (content.ends[part - 1], content.positions[part - 1]) if part else (0, 0)
        size = content.positions[part] - position
        self.tokens[row, column : column + size] = content.tokens[position : position + size]
        self._tables.append(content.table[:, piece : content.ends[part]])
        self._rows.append(row)
        self._epochs.append(content.epoch)
        self._datasets.append(content.dataset)
        return size

    def finish(self, seed: int, *dataset_hashes: int) -> tuple[PackedDocuments, Pieces]:
        """The rows, with the noise key of every piece, and where the pieces come from.

        The key hashes (seed, epoch, document, offset of the piece in the document): a function of what the piece is,
        so that it is the same after a resume too. `dataset_hashes`: of every dataset, see `hash_dataset`.
        """
        table = np.concatenate([np.empty((5, 0), dtype=np.int64), *self._tables], axis=1)
        counts = [part.shape[1] for part in self._tables]
        rows = np.repeat(np.asarray(self._rows, dtype=np.int64), counts)
        epochs = np.repeat(np.asarray(self._epochs, dtype=np.int64), counts)
        datasets = np.repeat(np.asarray(self._datasets, dtype=np.int64), counts)
        documents = document_ids(np.asarray(dataset_hashes, dtype=np.uint64)[datasets], table[DOCUMENT])
        packed = PackedDocuments(
            tokens=self.tokens,
            starts=rows * self.length + table[COLUMN],
            lengths=table[LENGTH],
            prompts=table[PROMPT],
            keys=noise.document_key(seed, epochs, documents, table[OFFSET]),
        )
        return packed, Pieces(rows, table[DOCUMENT], table[OFFSET], table[LENGTH], epochs, datasets)


def hash_dataset(fingerprint: str) -> int:
    """A dataset's fingerprint as a 64-bit number."""
    return int.from_bytes(hashlib.sha256(fingerprint.encode()).digest()[:8], "little")


def document_ids(dataset_hashes: np.ndarray | int, documents: np.ndarray) -> np.ndarray:
    """uint64 identity of documents over all datasets: hash of the dataset (one, or [n]) and the number in it, [n]."""
    return noise.mix(np.asarray(dataset_hashes, dtype=np.uint64), documents.astype(np.uint64))


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
