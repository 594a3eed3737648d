"""The two forms of a micro-batch on the host: packed documents before corruption, corrupted rows after it.

Both are structures of numpy arrays, so that they cross threads without copies and need no torch.
Shapes: b or rows: rows of a batch; s or length: tokens of a row; n: documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NONE, CLEAN, MASKED = 0, 1, 2  # target_kind: no target, next-token target, masked target
IGNORE = -100  # label of a position without target
_FIELDS = (
    ("input_ids", np.int64),
    ("position_ids", np.int64),
    ("labels", np.int64),
    ("document_ids", np.int32),
    ("loss_weight", np.float32),
    ("target_kind", np.uint8),
    ("noise_bucket", np.uint8),
)  # widest first, so that each starts at a multiple of its own size
CLEAN_TARGETS, RESPONSE_TOKENS, DOCUMENTS = 0, 1, 2  # columns of Batch.counts


@dataclass
class PackedDocuments:
    """Documents laid out in `rows` rows of `length` tokens, before corruption.

    Documents are in ascending order, do not overlap and do not cross a row's end; what they leave free is padding.
    """

    tokens: np.ndarray  # int32 [rows, length]; padding holds pad_id
    starts: np.ndarray  # int64 [n] offset of each document in tokens.reshape(-1)
    lengths: np.ndarray  # int64 [n], 0 allowed
    prompts: np.ndarray  # int64 [n] prompt tokens of each document, 0..length
    keys: np.ndarray  # uint64 [n] noise key of each document, see noise.document_key

    def check(self) -> None:
        """Assert shapes, dtypes and the order of documents."""
        assert self.tokens.ndim == 2 and self.tokens.dtype == np.int32, (
            f"tokens must be int32 [rows, length], got {self.tokens.dtype} {self.tokens.shape}"
        )
        n = self.starts.shape
        for name, dtype in (("starts", np.int64), ("lengths", np.int64), ("prompts", np.int64), ("keys", np.uint64)):
            array = getattr(self, name)
            assert array.dtype == dtype and array.ndim == 1 and array.shape == n, (
                f"{name} must be {np.dtype(dtype)} {n}, got {array.dtype} {array.shape}"
            )
        if not n[0]:
            return
        ends = self.starts + self.lengths
        assert self.starts[0] >= 0 and (self.starts[1:] >= ends[:-1]).all() and ends[-1] <= self.tokens.size, (
            "documents must be in ascending order, without overlap, inside the rows"
        )
        assert self.lengths.min() >= 0, "a document has a negative length"
        assert self.prompts.min() >= 0 and (self.prompts <= self.lengths).all(), (
            "a document's prompt must be between 0 and its length"
        )
        width = max(1, self.tokens.shape[1])
        crosses = self.starts // width != (ends - 1) // width
        assert not (crosses & (self.lengths > 0)).any(), "a document crosses a row's end"

    def some_rows(self, start: int, stop: int) -> tuple[PackedDocuments, int, int]:
        """Rows start..stop-1 (views where possible), and the range of documents that lie in them."""
        width = self.tokens.shape[1]
        first, last = (int(i) for i in np.searchsorted(self.starts, (start * width, stop * width)))
        part = slice(first, last)
        starts = self.starts[part] - start * width
        rows = PackedDocuments(self.tokens[start:stop], starts, self.lengths[part], self.prompts[part], self.keys[part])
        return rows, first, last

    def select(self, keep: np.ndarray) -> PackedDocuments:
        """The same rows with only the documents that `keep` (bool [n]) marks; the others become padding."""
        return PackedDocuments(self.tokens, self.starts[keep], self.lengths[keep], self.prompts[keep], self.keys[keep])


@dataclass
class Batch:
    """Corrupted rows: everything the model and the loss need to know of the objective."""

    input_ids: np.ndarray  # int64 [b, s] in physical order
    position_ids: np.ndarray  # int64 [b, s] original position within the document; padding 0
    document_ids: np.ndarray  # int32 [b, s] 0.. within the row over non-empty documents; padding -1
    labels: np.ndarray  # int64 [b, s]; IGNORE where there is no target
    loss_weight: np.ndarray  # float32 [b, s] before global normalisation; 0 where there is no target
    target_kind: np.ndarray  # uint8 [b, s] NONE, CLEAN or MASKED
    noise_bucket: np.ndarray  # uint8 [b, s] min(9, int(10 * p)) of the document at masked targets, else 0
    # float64 [b, 3] per row: clean targets; of documents that are not plain: response tokens, documents with a response
    counts: np.ndarray

    @classmethod
    def empty(cls, rows: int, length: int) -> Batch:
        """Uninitialised arrays of the right shapes and dtypes; counts are 0.

        They are parts of one block, widest first: an allocator hands out one block of the same size again and again,
        where many smaller ones go back to the system and cost more in page faults than the corruption itself.
        """
        size = rows * length
        block = np.empty(size * sum(np.dtype(dtype).itemsize for _, dtype in _FIELDS), np.uint8)
        arrays, start = {}, 0
        for name, dtype in _FIELDS:
            stop = start + size * np.dtype(dtype).itemsize
            arrays[name] = block[start:stop].view(dtype).reshape(rows, length)
            start = stop
        return cls(**arrays, counts=np.zeros((rows, 3), np.float64))

    def rows(self, start: int, stop: int) -> Batch:
        """Rows start..stop-1, as views."""
        return Batch(*(getattr(self, name)[start:stop] for name in self.__dataclass_fields__))

    def equals(self, other: Batch) -> bool:
        """Whether all arrays agree exactly, in shape, dtype and values."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
