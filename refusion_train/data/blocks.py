"""A block as bytes: where its arrays lie, how they are taken from a shard, and whether they are as written."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np

from refusion_train.data.shard_index import BlockInfo
from refusion_train.data.shard_writer import crc32

LENGTH_DTYPE = np.dtype("<i4")
_ALIGNED = 64  # arrays of a shard begin at multiples of this, and shall in a part of it


class Arrays(NamedTuple):
    """tokens: uint16 or uint32 [tokens]; lengths, prompts: int32 [documents]."""

    tokens: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray


def extent(info: BlockInfo, dtype: np.dtype, tokens: bool = True) -> tuple[int, int]:
    """First byte and end, in the shard, of all arrays of a block, or of those without its tokens."""
    documents = info.documents * LENGTH_DTYPE.itemsize
    spans = [(info.lengths_offset, documents), (info.prompts_offset, documents)]
    if tokens:
        spans.append((info.tokens_offset, info.tokens * dtype.itemsize))
    start = min(offset for offset, _ in spans)
    return start - start % _ALIGNED, max(offset + size for offset, size in spans)


def view(data: np.ndarray, base: int, offset: int, count: int, dtype: np.dtype) -> np.ndarray | None:
    """An array at `offset` of the shard, of which `data` (uint8) holds what begins at `base`. None: it is not there."""
    start = offset - base
    end = start + count * dtype.itemsize
    if start < 0 or count < 0 or end > len(data):
        return None
    return np.asarray(data[start:end]).view(dtype)


def documents_of(data: np.ndarray, base: int, info: BlockInfo) -> tuple[np.ndarray, np.ndarray] | None:
    """Lengths and prompts of the documents of a block. None: the index places them outside the shard."""
    lengths = view(data, base, info.lengths_offset, info.documents, LENGTH_DTYPE)
    prompts = view(data, base, info.prompts_offset, info.documents, LENGTH_DTYPE)
    return None if lengths is None or prompts is None else (lengths, prompts)


def arrays_of(data: np.ndarray, base: int, info: BlockInfo, dtype: np.dtype) -> Arrays | None:
    """All arrays of a block. None: the index places one of them outside the shard."""
    tokens = view(data, base, info.tokens_offset, info.tokens, dtype)
    documents = documents_of(data, base, info)
    return None if tokens is None or documents is None else Arrays(tokens, *documents)


def fault_of(info: BlockInfo, arrays: Arrays) -> str | None:
    """What of a block is not as it was written, or None."""
    tokens, lengths, prompts = arrays
    if crc32(tokens) != info.crc32:
        return "tokens"
    if crc32(lengths, prompts) != info.documents_crc32:
        return "document lengths"
    if int(lengths.sum(dtype=np.int64)) != info.tokens or bool(((prompts < 0) | (prompts > lengths)).any()):
        return "document lengths (which do not fit its tokens)"
    return None


def is_whole(array: np.ndarray) -> bool:
    """Whether the file that `array` is mapped from is as long as it was when it was mapped.

    To read behind the end of a mapped file ends the process by a signal (SIGBUS). So this is asked before every copy;
    who shortens a file in the microseconds after it still kills the rank, and the next start finds the damage.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return not isinstance(owner, mmap.mmap) or owner.size() >= len(owner)
