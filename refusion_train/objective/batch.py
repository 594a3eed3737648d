"""The two forms of a micro-batch on the host: packed documents before corruption, corrupted rows after it.

Both are structures of numpy arrays, so that they cross threads without copies and need no torch.
Shapes: b or rows: rows of a batch; s or length: tokens of a row; n: documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NONE, CLEAN, MASKED = 0, 1, 2  # target_kind: no target, next-token target, masked target
IGNORE = -100  # label of a position without target
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
    counts: np.ndarray  # float64 [b, 3] per row: clean targets, response tokens, documents with a response

    @classmethod
    def empty(cls, rows: int, length: int) -> Batch:
        """Uninitialised arrays of the right shapes and dtypes."""
        shape = (rows, length)
        return cls(
            input_ids=np.empty(shape, np.int64),
            position_ids=np.empty(shape, np.int64),
            document_ids=np.empty(shape, np.int32),
            labels=np.empty(shape, np.int64),
            loss_weight=np.empty(shape, np.float32),
            target_kind=np.empty(shape, np.uint8),
            noise_bucket=np.empty(shape, np.uint8),
            counts=np.zeros((rows, 3), np.float64),
        )

    def rows(self, start: int, stop: int) -> Batch:
        """Rows start..stop-1, as views."""
        return Batch(*(getattr(self, name)[start:stop] for name in self.__dataclass_fields__))
