"""Datasets on disk: plain WebDataset tars of token blocks, written whole or not at all, read by memory map.

A sample of a tar is a block of many documents: `KEY.tokens.npy` (uint16 or uint32, documents one after another),
`KEY.lengths.npy` and `KEY.prompts.npy` (int32, one value per document). `webdataset.WebDataset(url).decode()` reads
them as they are. Here the arrays are found by the offsets in index.json, so that a block is a view of the mapped
file, and a block's checksum is verified when it is first touched. A dataset may also lie behind a URL: then the mapped
files are those of a cache (remote.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from refusion_train.data.blocks import Arrays, arrays_of, documents_of, fault_of, is_whole
from refusion_train.data.remote import RemoteBlocks, RemoteOptions, open_remote
from refusion_train.data.shard_index import (
    INDEX_FILE,
    TOKENIZER_FOLDER,
    BlockInfo,
    Index,
    ShardInfo,
)
from refusion_train.data.shard_writer import BLOCK_TOKENS, SHARD_BYTES, ShardWriter, crc32
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.data.transport import is_url, local_path, shown
from refusion_train.errors import DataError

if TYPE_CHECKING:
    from refusion_train.config import DataConfig

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

    def __init__(self, path: str, index: Index, remote: RemoteBlocks | None = None):
        self.path = path
        self.index = index
        self.fingerprint = index.fingerprint
        self.remote = remote
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self._blocks = index.blocks
        self.blocks = len(self._blocks)
        documents = np.array([block.documents for _, block in self._blocks], np.int64)
        self.first_documents = np.concatenate(([0], np.cumsum(documents)))
        self._maps: dict[int, np.ndarray] = {}
        self._verified = bytearray(self.blocks)
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], options: RemoteOptions | None = None, check_shards: bool = True
    ) -> ShardSet:
        """Open the dataset in a folder, or behind a URL (then `options` say how, and shards are looked at when needed).

        Raises DataError: no index, an index of another version or damaged, a shard missing or of the wrong size
        (check_shards: False leaves that to `block`).
        """
        if is_url(path):
            index, remote = open_remote(os.fspath(path), options)
            return cls(shown(os.fspath(path)), index, remote)
        folder = local_path(path)
        dataset = cls(os.fspath(folder), Index.read(folder))
        for shard in dataset.index.shards if check_shards else ():
            dataset._check_size(shard)
        return dataset

    @classmethod
    def of_run(cls, path: str, data: DataConfig) -> ShardSet:
        """Open a dataset as a run wants it: with its cache, and shards looked at first if damage is to stop it."""
        return cls.open(path, RemoteOptions.of(data), check_shards=data.on_error == "stop")

    def __len__(self) -> int:
        return self.blocks

    @property
    def location(self) -> str:
        """The folder, absolute, or the URL."""
        return self.path if self.remote is not None else os.path.realpath(self.path)

    def block_info(self, i: int) -> BlockInfo:
        """What the index says of block `i`, without touching the shard."""
        return self._blocks[i][1]

    def prepare(self, blocks: Sequence[int]) -> None:
        """A hint that these blocks will be read soon: what is remote is fetched in the background.

        Raises nothing: what cannot be fetched is raised by `block`.
        """
        if self.remote is not None:
            self.remote.prepare(blocks)

    def block(self, i: int) -> Block:
        """Block `i`, 0 <= i < blocks. Its checksums are verified the first time this process asks for it.

        Raises DataError, naming shard and block, when the file is gone, has another size or has changed, or when it
        cannot be fetched.
        """
        number, info = self._blocks[i]
        shard = self.index.shards[number]
        arrays = self._arrays(i, shard, info)
        if not self._verified[i]:
            fault = fault_of(info, arrays)
            if fault is not None and self.remote is not None:  # what arrived was in order: the cache's disk was not
                self.remote.discard(i)
                arrays = self._arrays(i, shard, info)
                fault = fault_of(info, arrays)
            if fault is not None:
                raise self._damage(shard, info, fault)
            self._verified[i] = 1
        offsets = np.zeros(info.documents + 1, np.int64)
        np.cumsum(arrays.lengths, out=offsets[1:])
        first = int(self.first_documents[i])
        return Block(arrays.tokens, offsets, arrays.prompts, first, shard.name, info.key)

    def lengths(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths and prompt lengths of the documents of block `i`, int32, without touching its tokens.

        Raises DataError as `block` does, but for tokens that have changed.
        """
        number, info = self._blocks[i]
        shard = self.index.shards[number]
        data, base = self._map(number, shard) if self.remote is None else self.remote.documents(i)
        found = documents_of(data, base, info)
        if found is None:
            raise self._outside(shard, info)
        if crc32(*found) != info.documents_crc32:
            raise self._damage(shard, info, "document lengths")
        return found

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that lies with the dataset; None if there is none. Raises DataError when it is damaged."""
        if self.remote is not None:
            return self.remote.tokenizer()
        folder = Path(self.path) / TOKENIZER_FOLDER
        return Tokenizer.load(folder) if folder.is_dir() else None

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

    def _arrays(self, i: int, shard: ShardInfo, info: BlockInfo) -> Arrays:
        data, base = self._map(self._blocks[i][0], shard) if self.remote is None else self.remote.block(i)
        arrays = arrays_of(data, base, info, self._dtype)
        if arrays is None:
            raise self._outside(shard, info)
        return arrays

    def _map(self, number: int, shard: ShardInfo) -> tuple[np.ndarray, int]:
        """The bytes of a shard, uint8, and the place in it of the first of them."""
        # A mapped file that has been cut short would end the process by a signal: look before touching.
        self._check_size(shard)
        with self._lock:
            if number in self._maps and not is_whole(self._maps[number]):
                del self._maps[number]  # cut short, and then put right by another file of the same name
            if number not in self._maps:
                path = os.path.join(self.path, shard.name)
                try:
                    self._maps[number] = np.memmap(path, dtype=np.uint8, mode="r")
                except (OSError, ValueError) as error:
                    raise DataError(f"{self.path}: shard {shard.name} cannot be mapped: {error}") from None
            return self._maps[number], 0

    def _outside(self, shard: ShardInfo, info: BlockInfo) -> DataError:
        return DataError(f"{self.path}: {INDEX_FILE} places block {info.key} outside shard {shard.name}")

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
            f"{tokenizer.fingerprint}; use the one in {dataset.path.rstrip('/')}/{TOKENIZER_FOLDER} or build the "
            "shards again"
        )
