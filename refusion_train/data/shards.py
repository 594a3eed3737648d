"""Datasets on disk: plain WebDataset tars of token blocks, written whole or not at all, read by memory map.

A sample of a tar is a block of many documents: `KEY.tokens.npy` (uint16 or uint32, documents one after another),
`KEY.lengths.npy` and `KEY.prompts.npy` (int32, one value per document). `webdataset.WebDataset(url).decode()` reads
them as they are. Here the arrays are found by the offsets in index.json, so that a block is a view of the mapped
file, and a block's checksum is verified when it is first touched.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from refusion_train.data.shard_index import (
    INDEX_FILE,
    TOKENIZER_FOLDER,
    BlockInfo,
    Index,
    ShardInfo,
    dataset_fingerprint,
)
from refusion_train.data.tokenizer import META_FILE, MODEL_FILE, TokenizerInfo
from refusion_train.errors import DataError

SHARD_BYTES = 256 << 20
BLOCK_TOKENS = 1 << 19
_TAR_BLOCK = 512


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
        if _crc32(tokens) != info.crc32:
            what = "tokens"
        elif _crc32(lengths, prompts) != info.documents_crc32:
            what = "document lengths"
        elif int(lengths.sum(dtype=np.int64)) != info.tokens or bool(((prompts < 0) | (prompts > lengths)).any()):
            what = "document lengths (which do not fit its tokens)"
        else:
            return
        raise DataError(
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


class ShardWriter:
    """The write side: documents in, in order; a dataset folder out, whole or not at all.

    Everything goes into `PATH.partial`; `close` writes index.json last and renames the folder to `path`. As a context
    manager it closes at the end and removes what it wrote when an exception passes.
    Shards are a function of the documents, `prefix`, `shard_bytes` and `block_tokens` alone.

    `shard_bytes`: a new tar is begun before a block that would make it larger; `block_tokens`: likewise for blocks (a
    longer document is a block of its own). `tokenizer_folder`: copied to `PATH/tokenizer`.
    Attributes: `path`, `documents` (added so far).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        prefix: str,
        tokenizer: TokenizerInfo,
        shard_bytes: int = SHARD_BYTES,
        block_tokens: int = BLOCK_TOKENS,
        tokenizer_folder: str | os.PathLike[str] | None = None,
    ):
        if shard_bytes < 1 or block_tokens < 1:
            raise DataError(f"shard_bytes={shard_bytes} and block_tokens={block_tokens} must be at least 1")
        self.path = Path(path)
        if self.path.exists():
            raise DataError(f"'{path}' exists already; choose another folder or remove it")
        self._folder = self.path.with_name(self.path.name + ".partial")
        self._prefix, self._tokenizer = prefix, tokenizer
        self._shard_bytes, self._block_tokens = shard_bytes, block_tokens
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._shards: list[ShardInfo] = []
        self._tar: _TarFile | None = None
        self._blocks: list[BlockInfo] = []
        self.documents = 0
        self._clear_block()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        if tokenizer_folder is not None:
            (self._folder / TOKENIZER_FOLDER).mkdir()
            for name in (MODEL_FILE, META_FILE):
                shutil.copyfile(Path(tokenizer_folder) / name, self._folder / TOKENIZER_FOLDER / name)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def add(self, tokens: np.ndarray, prompt: int, text_bytes: int) -> None:
        """Append a document. `tokens`: integer [n], begin and end tokens included; `prompt`: tokens of its prompt;
        `text_bytes`: UTF-8 bytes of its text."""
        assert tokens.ndim == 1, f"tokens of a document must have one dimension, not {tokens.ndim}"
        assert 0 <= prompt <= len(tokens), f"prompt of {prompt} tokens in a document of {len(tokens)}"
        if self._lengths and self._tokens_in_block + len(tokens) > self._block_tokens:
            self._flush()
        self._parts.append(tokens)
        self._lengths.append(len(tokens))
        self._prompts.append(prompt)
        self._tokens_in_block += len(tokens)
        self.documents += 1
        self._text_bytes += text_bytes

    def close(self) -> Index:
        """Write what is left and the index, and move the folder into place.

        Raises DataError if `path` came into being meanwhile.
        """
        self._flush()
        self._close_tar()
        totals = {name: sum(getattr(s, name) for s in self._shards) for name in ("documents", "tokens", "text_bytes")}
        index = Index(
            tokenizer={"fingerprint": self._tokenizer.fingerprint, "kind": self._tokenizer.kind},
            vocab_size=self._tokenizer.vocab_size,
            dtype=self._dtype.name,
            special_ids=self._tokenizer.special_ids,
            fingerprint=dataset_fingerprint(self._tokenizer.fingerprint, self._shards),
            shards=tuple(self._shards),
            **totals,
        )
        index.write(self._folder)
        if self.path.exists():
            raise DataError(f"'{self.path}' came into being meanwhile; the new dataset is in '{self._folder}'")
        os.rename(self._folder, self.path)
        return index

    def abort(self) -> None:
        """Remove everything written so far."""
        if self._tar is not None:
            self._tar.file.close()
            self._tar = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _clear_block(self) -> None:
        self._parts: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._prompts: list[int] = []
        self._tokens_in_block = self._text_bytes = 0

    def _flush(self) -> None:
        """Write the documents collected as one sample."""
        if not self._lengths:
            return
        whole = np.concatenate(self._parts)
        assert not whole.size or 0 <= whole.min() <= whole.max() < self._tokenizer.vocab_size, (
            f"token ids from {whole.min()} to {whole.max()} do not fit a vocabulary of {self._tokenizer.vocab_size}"
        )
        tokens = whole.astype(self._dtype)
        lengths, prompts = np.array(self._lengths, "<i4"), np.array(self._prompts, "<i4")
        arrays = {"tokens": tokens, "lengths": lengths, "prompts": prompts}
        size = sum(_TarFile.size_of(array) for array in arrays.values())
        if self._tar is not None and self._tar.size + size > self._shard_bytes:
            self._close_tar()
        if self._tar is None:
            self._tar = _TarFile(self._folder / f"{self._prefix}-{len(self._shards):06d}.tar")
        key = f"{self._prefix}-{len(self._shards):06d}-{len(self._blocks):06d}"
        offsets = {name: self._tar.add(f"{key}.{name}.npy", array) for name, array in arrays.items()}
        self._blocks.append(
            BlockInfo(
                key=key,
                documents=len(lengths),
                tokens=len(tokens),
                text_bytes=self._text_bytes,
                crc32=_crc32(tokens),
                documents_crc32=_crc32(lengths, prompts),
                **{f"{name}_offset": offset for name, offset in offsets.items()},
            )
        )
        self._clear_block()

    def _close_tar(self) -> None:
        if self._tar is None:
            return
        size, sha256 = self._tar.close()
        totals = {name: sum(getattr(b, name) for b in self._blocks) for name in ("documents", "tokens", "text_bytes")}
        name = f"{self._prefix}-{len(self._shards):06d}.tar"
        self._shards.append(ShardInfo(name=name, bytes=size, sha256=sha256, blocks=tuple(self._blocks), **totals))
        self._blocks = []
        self._tar = None


class _TarFile:
    """A tar of .npy files that knows the offset of each array's data and its own sha256; no times, no owners."""

    def __init__(self, path: Path):
        self.file = open(path, "xb")  # noqa: SIM115 - closed by `close`, or by ShardWriter.abort
        self.size = 0
        self._sha256 = hashlib.sha256()

    def add(self, name: str, array: np.ndarray) -> int:
        """Append `array` as member `name`; returns the offset of its raw data."""
        header = _npy_header(array)
        member = tarfile.TarInfo(name)
        member.size = len(header) + array.nbytes
        self._write(member.tobuf(tarfile.USTAR_FORMAT))
        self._write(header)
        offset = self.size
        self._write(array.data.cast("B") if array.size else b"")
        self._write(bytes(-self.size % _TAR_BLOCK))
        return offset

    def close(self) -> tuple[int, str]:
        """Write the end marker and flush to the disk; returns bytes and sha256 (hexadecimal)."""
        self._write(bytes(2 * _TAR_BLOCK))
        self._write(bytes(-self.size % tarfile.RECORDSIZE))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return self.size, self._sha256.hexdigest()

    @staticmethod
    def size_of(array: np.ndarray) -> int:
        """Bytes that a member with this array takes."""
        content = len(_npy_header(array)) + array.nbytes
        return _TAR_BLOCK + content + -content % _TAR_BLOCK

    def _write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self._sha256.update(data)
        self.size += len(data)


def _crc32(*arrays: np.ndarray) -> int:
    """CRC-32 of the raw bytes of contiguous arrays, one after another."""
    value = 0
    for array in arrays:
        value = zlib.crc32(array.data, value)
    return value


def _npy_header(array: np.ndarray) -> bytes:
    """The .npy header of a one-dimensional array; a multiple of 64 bytes, so that the data is aligned."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, np.lib.format.header_data_from_array_1_0(array))
    return buffer.getvalue()
