"""The write side of a dataset: documents in, in order; tars of token blocks and index.json out.

`TarSequence` makes the tars and can say at any document where it stands (`state`), so that a killed process goes on
from there (`restore`) and ends with the same bytes. `ShardWriter` is the same for those who write a whole folder at
once: it appears when it is complete or not at all.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import zlib
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from refusion_train.data.shard_index import (
    TOKENIZER_FOLDER,
    BlockInfo,
    Index,
    ShardInfo,
    dataset_fingerprint,
    shard_from_dict,
)
from refusion_train.data.tokenizer import TokenizerInfo, copy_tokenizer
from refusion_train.errors import DataError

SHARD_BYTES = 256 << 20
BLOCK_TOKENS = 1 << 19
_TAR_BLOCK = 512
_HASH_BYTES = 8 << 20


class _Documents(NamedTuple):
    """Documents of the block under way, as they were handed over. `text_bytes`: of all of them."""

    tokens: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    text_bytes: int


class TarSequence:
    """Documents to `FOLDER/PREFIX-000000.tar` and so on; the folder must exist.

    The tars are a function of the documents, `prefix`, `shard_bytes` and `block_tokens` alone: not of how the
    documents are handed over, nor of interruptions. `shard_bytes`: a new tar is begun before a block that would make it
    larger; `block_tokens`: likewise for blocks (a longer document is a block of its own).
    `log`: a file that gets a line per finished tar, needed for `state` and `restore`.
    Attributes: `documents`, `tokens` (added so far).
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        tokenizer: TokenizerInfo,
        shard_bytes: int = SHARD_BYTES,
        block_tokens: int = BLOCK_TOKENS,
        log: Path | None = None,
    ):
        if shard_bytes < 1 or block_tokens < 1:
            raise DataError(f"shard_bytes={shard_bytes} and block_tokens={block_tokens} must be at least 1")
        self._folder, self._prefix, self._tokenizer = folder, prefix, tokenizer
        self._shard_bytes, self._block_tokens = shard_bytes, block_tokens
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._shards: list[ShardInfo] = []
        self._tar: _TarFile | None = None
        self._blocks: list[BlockInfo] = []
        self._log_path = log
        self._log = open(log, "ab") if log is not None else None  # noqa: SIM115 - closed by `finish` or `abort`
        self.documents = self.tokens = 0
        self._clear_block()

    def add_batch(self, tokens: np.ndarray, lengths: np.ndarray, prompts: np.ndarray, text_bytes: np.ndarray) -> None:
        """Append documents. tokens: integer [sum of lengths]; lengths, prompts, text_bytes: integer [documents]."""
        assert tokens.ndim == 1, f"tokens of documents must have one dimension, not {tokens.ndim}"
        assert bool(((prompts >= 0) & (prompts <= lengths)).all()), "a prompt is longer than its document"
        ends = np.cumsum(lengths, dtype=np.int64)
        assert (int(ends[-1]) if len(ends) else 0) == len(tokens), "lengths do not add up to the tokens"
        first = start = 0
        while first < len(lengths):
            room = self._block_tokens - self._tokens_in_block
            stop = int(np.searchsorted(ends, start + room, side="right"))
            if stop == first and self._documents_in_block:
                self._flush()
                continue
            stop = max(stop, first + 1)  # a document longer than a block is a block of its own
            end = int(ends[stop - 1])
            sizes = int(text_bytes[first:stop].sum())
            self._parts.append(_Documents(tokens[start:end], lengths[first:stop], prompts[first:stop], sizes))
            self._documents_in_block += stop - first
            self._tokens_in_block += end - start
            first, start = stop, end
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Where it stands, as JSON values and arrays; all that was written is on the disk when this returns."""
        assert self._log is not None, "a sequence without a log has no state"
        self._log.flush()
        os.fsync(self._log.fileno())
        if self._tar is not None:
            self._tar.sync()
        state = {
            "shards": len(self._shards),
            "log_bytes": self._log.tell(),
            "tar_bytes": self._tar.size if self._tar is not None else None,
            "blocks": [asdict(block) for block in self._blocks],
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": sum(part.text_bytes for part in self._parts),
        }
        return state, self._joined_parts()

    def restore(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Go back to a state that `state` gave, of a sequence with the same arguments: later bytes are cut off.

        Raises DataError when the files do not hold what the state says.
        """
        assert self._log is not None and self._log_path is not None, "a sequence without a log cannot be restored"
        self._log.truncate(state["log_bytes"])
        self._log.seek(state["log_bytes"])
        with open(self._log_path, "rb") as log:
            self._shards = [shard_from_dict(json.loads(line)) for line in log]
        if len(self._shards) != state["shards"]:
            raise DataError(f"'{self._log_path}' does not hold the {state['shards']} shards that were written")
        self._blocks = [BlockInfo(**block) for block in state["blocks"]]
        kept = {shard.name for shard in self._shards}
        if state["tar_bytes"] is not None:
            path = self._folder / self._tar_name()
            kept.add(path.name)
            self._tar = _TarFile.resume(path, state["tar_bytes"])
        for path in self._folder.glob(f"{self._prefix}-*.tar"):
            if path.name not in kept:
                path.unlink()
        self.documents, self.tokens = state["documents"], state["tokens"]
        self._clear_block()
        if len(arrays["lengths"]):
            self._parts = [_Documents(arrays["tokens"], arrays["lengths"], arrays["prompts"], state["text_bytes"])]
            self._documents_in_block, self._tokens_in_block = len(arrays["lengths"]), len(arrays["tokens"])

    def finish(self, extra: dict[str, Any] | None = None) -> Index:
        """Write what is left and index.json. `extra`: optional fields of the index (build, sources)."""
        self._flush()
        self._close_tar()
        if self._log is not None:
            self._log.close()
        totals = {name: sum(getattr(s, name) for s in self._shards) for name in ("documents", "tokens", "text_bytes")}
        index = Index(
            tokenizer={"fingerprint": self._tokenizer.fingerprint, "kind": self._tokenizer.kind},
            vocab_size=self._tokenizer.vocab_size,
            dtype=self._dtype.name,
            special_ids=self._tokenizer.special_ids,
            fingerprint=dataset_fingerprint(self._tokenizer.fingerprint, self._shards),
            shards=tuple(self._shards),
            **totals,
            **(extra or {}),
        )
        index.write(self._folder)
        return index

    def abort(self) -> None:
        """Close the files, whatever they hold."""
        if self._tar is not None:
            self._tar.file.close()
            self._tar = None
        if self._log is not None:
            self._log.close()

    def _clear_block(self) -> None:
        self._parts: list[_Documents] = []
        self._documents_in_block = self._tokens_in_block = 0

    def _joined_parts(self) -> dict[str, np.ndarray]:
        """The block under way as the arrays of a sample."""
        return {
            "tokens": _joined([part.tokens for part in self._parts], self._dtype),
            "lengths": _joined([part.lengths for part in self._parts], np.dtype("<i4")),
            "prompts": _joined([part.prompts for part in self._parts], np.dtype("<i4")),
        }

    def _tar_name(self) -> str:
        return f"{self._prefix}-{len(self._shards):06d}.tar"

    def _flush(self) -> None:
        """Write the documents collected as one sample."""
        if not self._documents_in_block:
            return
        for part in self._parts:
            assert not part.tokens.size or 0 <= part.tokens.min() <= part.tokens.max() < self._tokenizer.vocab_size, (
                f"token ids from {part.tokens.min()} to {part.tokens.max()} do not fit a vocabulary of "
                f"{self._tokenizer.vocab_size}"
            )
        arrays = self._joined_parts()
        tokens, lengths, prompts = arrays["tokens"], arrays["lengths"], arrays["prompts"]
        size = sum(_TarFile.size_of(array) for array in arrays.values())
        if self._tar is not None and self._tar.size + size > self._shard_bytes:
            self._close_tar()
        if self._tar is None:
            self._tar = _TarFile(self._folder / self._tar_name())
        key = f"{self._prefix}-{len(self._shards):06d}-{len(self._blocks):06d}"
        offsets = {name: self._tar.add(f"{key}.{name}.npy", array) for name, array in arrays.items()}
        self._blocks.append(
            BlockInfo(
                key=key,
                documents=len(lengths),
                tokens=len(tokens),
                text_bytes=sum(part.text_bytes for part in self._parts),
                crc32=crc32(tokens),
                documents_crc32=crc32(lengths, prompts),
                **{f"{name}_offset": offset for name, offset in offsets.items()},
            )
        )
        self._clear_block()

    def _close_tar(self) -> None:
        if self._tar is None:
            return
        size, sha256 = self._tar.close()
        totals = {name: sum(getattr(b, name) for b in self._blocks) for name in ("documents", "tokens", "text_bytes")}
        shard = ShardInfo(name=self._tar_name(), bytes=size, sha256=sha256, blocks=tuple(self._blocks), **totals)
        if self._log is not None:
            self._log.write(json.dumps(asdict(shard)).encode() + b"\n")
        self._shards.append(shard)
        self._blocks = []
        self._tar = None


class ShardWriter:
    """A dataset folder, whole or not at all: everything goes into `PATH.partial`, which `close` renames to `path`.

    As a context manager it closes at the end and removes what it wrote when an exception passes. `prefix`,
    `shard_bytes`, `block_tokens`: as for `TarSequence`. `tokenizer_folder`: copied to `PATH/tokenizer`.
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
        self.path = Path(path)
        if self.path.exists():
            raise DataError(f"'{path}' exists already; choose another folder or remove it")
        self._folder = self.path.with_name(self.path.name + ".partial")
        self._files = TarSequence(self._folder, prefix, tokenizer, shard_bytes, block_tokens)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        if tokenizer_folder is not None:
            copy_tokenizer(Path(tokenizer_folder), self._folder / TOKENIZER_FOLDER)

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return self._files.documents

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
        self._files.add_batch(tokens, np.array([len(tokens)]), np.array([prompt]), np.array([text_bytes]))

    def close(self) -> Index:
        """Write what is left and the index, and move the folder into place.

        Raises DataError if `path` came into being meanwhile.
        """
        index = self._files.finish()
        if self.path.exists():
            raise DataError(f"'{self.path}' came into being meanwhile; the new dataset is in '{self._folder}'")
        os.rename(self._folder, self.path)
        return index

    def abort(self) -> None:
        """Remove everything written so far."""
        self._files.abort()
        shutil.rmtree(self._folder, ignore_errors=True)


class _TarFile:
    """A tar of .npy files that knows the offset of each array's data and its own sha256; no times, no owners."""

    def __init__(self, path: Path):
        self.file = open(path, "xb")  # noqa: SIM115 - closed by `close`, or by TarSequence.abort
        self.size = 0
        self._sha256 = hashlib.sha256()

    @classmethod
    def resume(cls, path: Path, size: int) -> _TarFile:
        """Go on behind the first `size` bytes of a tar; they are read once for the checksum."""
        tar = cls.__new__(cls)
        try:
            tar.file = open(path, "r+b")  # noqa: SIM115
        except OSError as error:
            raise DataError(f"'{path}' cannot be continued: {error.strerror}; begin again with --fresh") from None
        tar._sha256 = hashlib.sha256()
        tar.size = 0
        while tar.size < size and (data := tar.file.read(min(_HASH_BYTES, size - tar.size))):
            tar._sha256.update(data)
            tar.size += len(data)
        if tar.size != size:
            raise DataError(f"'{path}' is shorter than the {size} bytes written; begin again with --fresh")
        tar.file.truncate(size)
        return tar

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

    def sync(self) -> None:
        """Everything written so far is on the disk when this returns."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> tuple[int, str]:
        """Write the end marker and flush to the disk; returns bytes and sha256 (hexadecimal)."""
        self._write(bytes(2 * _TAR_BLOCK))
        self._write(bytes(-self.size % tarfile.RECORDSIZE))
        self.sync()
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


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 (little endian) that holds every id of the vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def crc32(*arrays: np.ndarray) -> int:
    """CRC-32 of the raw bytes of contiguous arrays, one after another."""
    value = 0
    for array in arrays:
        value = zlib.crc32(array.data, value)
    return value


def _joined(arrays: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate(arrays) if arrays else np.empty(0, dtype), dtype)


def _npy_header(array: np.ndarray) -> bytes:
    """The .npy header of a one-dimensional array; a multiple of 64 bytes, so that the data is aligned."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, np.lib.format.header_data_from_array_1_0(array))
    return buffer.getvalue()
