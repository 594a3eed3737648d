"""Datasets on disk: plain WebDataset tars of token blocks, written whole or not at all, read by memory map.

A sample of a tar is a block of many documents: `KEY.tokens.npy` (uint16 or uint32, documents one after another),
`KEY.lengths.npy` and `KEY.prompts.npy` (int32, one value per document). `webdataset.WebDataset(url).decode()` reads
them as they are. Here the arrays are found by the offsets in index.json, so that a block is a view of the mapped
file, and a block's checksum is verified when it is first touched.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from refusion_train.data.shard_index import (
    INDEX_FILE,
    TOKENIZER_FOLDER,
    BlockInfo,
    Index,
    ShardInfo,
)
from refusion_train.data.shard_writer import BLOCK_TOKENS, SHARD_BYTES, ShardWriter, crc32
from refusion_train.errors import DataError

__all__ = [
    "BLOCK_TOKENS", "INDEX_FILE", "SHARD_BYTES", "TOKENIZER_FOLDER", "Block", "HasFingerprint", "ShardSet",
    "ShardWriter", "check_tokenizer",
]  # fmt: skip


class HasFingerprint(Protocol):
    """A tokenizer, as far as shards need to know it."""

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class Block:
    """The documents of one sample: document d is `tokens[offsets[d]:offsets[d + 1]]`, its prompt `prompts[d]` long."""

    tokens: np.ndarray  # uint16 or uint32 [tokens], a read-only view of the mapped shard
    offsets: np.ndarray  # int64 [documents + 1]
    prompts: np.ndarray  # int32 [documents]
    first_document: int  # number of its first document in the dataset
    shard: str  # name of the shard, for messages
    key: str  # key of the sample, for messages


class ShardSet:
    """The read side of a dataset. Thread-safe. Open with `ShardSet.open`.

    Attributes: `path`, `index`, `fingerprint`, `blocks` (number of blocks over all shards), `first_documents`
    (int64 [blocks + 1], number of each block's first document).
    """

    def __init__(self, path: str, index: Index):
        self.path = path
        self.index = index
        self.fingerprint = index.fingerprint
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self._blocks = [(s, block) for s, shard in enumerate(index.shards) for block in shard.blocks]
        self.blocks = len(self._blocks)
        documents = np.array([block.documents for _, block in self._blocks], np.int64)
        self.first_documents = np.concatenate(([0], np.cumsum(documents)))
        self._maps: dict[int, np.ndarray] = {}
        self._verified = bytearray(self.blocks)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ShardSet:
        """Open the dataset in folder `path`.

        Raises DataError: no index, an index of another version or damaged, a shard missing or of the wrong size.
        """
        folder = Path(path)
        dataset = cls(os.fspath(path), Index.read(folder))
        for shard in dataset.index.shards:
            dataset._check_size(shard)
        return dataset

    def __len__(self) -> int:
        return self.blocks

    def block_info(self, i: int) -> BlockInfo:
        """What the index says of block `i`, without touching the shard."""
        return self._blocks[i][1]

    def block(self, i: int) -> Block:
        """Block `i`, 0 <= i < blocks. Its checksums are verified the first time this process asks for it.

        Raises DataError, naming shard and block, when the file is gone, has another size or has changed.
        """
        number, info = self._blocks[i]
        shard = self.index.shards[number]
        # A mapped file that has been cut short would end the process by a signal: look before touching.
        self._check_size(shard)
        mapped = self._map(number, shard)
        tokens = self._array(mapped, info.tokens_offset, info.tokens, self._dtype, shard, info)
        lengths = self._array(mapped, info.lengths_offset, info.documents, np.dtype("<i4"), shard, info)
        prompts = self._array(mapped, info.prompts_offset, info.documents, np.dtype("<i4"), shard, info)
        if not self._verified[i]:
            self._verify(shard, info, tokens, lengths, prompts)
            self._verified[i] = 1
        offsets = np.zeros(info.documents + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Block(tokens, offsets, prompts, int(self.first_documents[i]), shard.name, info.key)

    def lengths(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths and prompt lengths of the documents of block `i`, int32, without touching its tokens.

        Raises DataError as `block` does, but for tokens that have changed.
        """
        number, info = self._blocks[i]
        shard = self.index.shards[number]
        self._check_size(shard)
        mapped = self._map(number, shard)
        lengths = self._array(mapped, info.lengths_offset, info.documents, np.dtype("<i4"), shard, info)
        prompts = self._array(mapped, info.prompts_offset, info.documents, np.dtype("<i4"), shard, info)
        if crc32(lengths, prompts) != info.documents_crc32:
            raise self._damage(shard, info, "document lengths")
        return lengths, prompts

    def locate(self, document: int) -> tuple[int, int]:
        """Block of a document and its place in that block; `document` is its number in the dataset."""
        if not 0 <= document < self.index.documents:
            raise DataError(f"{self.path}: no document {document}; there are {self.index.documents}, counted from 0")
        block = int(np.searchsorted(self.first_documents, document, side="right")) - 1
        return block, document - int(self.first_documents[block])

    def _check_size(self, shard: ShardInfo) -> None:
        path = os.path.join(self.path, shard.name)
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise DataError(
                f"{self.path}: shard {shard.name} is missing ({error.strerror}); restore it or build the dataset again"
            ) from None
        if size != shard.bytes:
            raise DataError(
                f"{self.path}: shard {shard.name} has {size} bytes, {INDEX_FILE} says {shard.bytes} "
                f"({'truncated' if size < shard.bytes else 'changed'}); restore it or build the dataset again"
            )

    def _map(self, number: int, shard: ShardInfo) -> np.ndarray:
        with self._lock:
            if number not in self._maps:
                path = os.path.join(self.path, shard.name)
                try:
                    self._maps[number] = np.memmap(path, dtype=np.uint8, mode="r")
                except (OSError, ValueError) as error:
                    raise DataError(f"{self.path}: shard {shard.name} cannot be mapped: {error}") from None
            return self._maps[number]

    def _array(
        self, mapped: np.ndarray, offset: int, count: int, dtype: np.dtype, shard: ShardInfo, info: BlockInfo
    ) -> np.ndarray:
        end = offset + count * dtype.itemsize
        if offset < 0 or count < 0 or end > len(mapped):
            raise DataError(f"{self.path}: {INDEX_FILE} places block {info.key} outside shard {shard.name}")
        return np.asarray(mapped[offset:end]).view(dtype)

    def _verify(
        self, shard: ShardInfo, info: BlockInfo, tokens: np.ndarray, lengths: np.ndarray, prompts: np.ndarray
    ) -> None:
        if crc32(tokens) != info.crc32:
            what = "tokens"
        elif crc32(lengths, prompts) != info.documents_crc32:
            what = "document lengths"
        elif int(lengths.sum(dtype=np.int64)) != info.tokens or bool(((prompts < 0) | (prompts > lengths)).any()):
            what = "document lengths (which do not fit its tokens)"
        else:
            return
        raise self._damage(shard, info, what)

    def _damage(self, shard: ShardInfo, info: BlockInfo, what: str) -> DataError:
        return DataError(
            f"{self.path}: shard {shard.name}, block {info.key}: the {what} are not those that were written "
            "(checksum); restore the shard or build the dataset again"
        )


def check_tokenizer(dataset: ShardSet, tokenizer: HasFingerprint) -> None:
    """Raise DataError unless `tokenizer` is the one that made the shards."""
    made_by = dataset.index.tokenizer["fingerprint"]
    if tokenizer.fingerprint != made_by:
        raise DataError(
            f"wrong tokenizer for the shards: '{dataset.path}' was made with {made_by}, the tokenizer given is "
            f"{tokenizer.fingerprint}; use the one in {os.path.join(dataset.path, TOKENIZER_FOLDER)} or build the "
            "shards again"
        )
