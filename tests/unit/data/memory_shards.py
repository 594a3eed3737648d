"""A dataset in memory with the reading side of a ShardSet, so that properties can be tried on many small datasets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from refusion_train.data.shards import ShardSet, ShardWriter
from refusion_train.data.tokenizer import TokenizerInfo

BOS, EOS, PAD, MASK = 2, 3, 0, 4


@dataclass
class MemoryBlock:
    tokens: np.ndarray
    offsets: np.ndarray
    prompts: np.ndarray
    first_document: int


@dataclass
class MemoryShards:
    """documents: token arrays; a block holds `per_block` of them; opened: numbers of the blocks read so far."""

    documents: list[np.ndarray]
    prompts: list[int]
    per_block: int = 3
    fingerprint: str = "sha256:00"
    path: str = "memory"
    opened: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = []
        for first in range(0, len(self.documents), self.per_block):
            part = self.documents[first : first + self.per_block]
            offsets = np.concatenate([[0], np.cumsum([len(d) for d in part])]).astype(np.int64)
            tokens = np.concatenate([*part, np.zeros(0, np.uint16)]).astype(np.uint16)
            prompts = np.asarray(self.prompts[first : first + self.per_block], np.int32)
            self._blocks.append(MemoryBlock(tokens, offsets, prompts, first))
        self.first_documents = np.minimum(np.arange(len(self._blocks) + 1) * self.per_block, len(self.documents))
        tokens = sum(len(d) for d in self.documents)
        entries = [SimpleNamespace(documents=len(b.prompts), tokens=len(b.tokens)) for b in self._blocks]
        self.index = SimpleNamespace(
            documents=len(self.documents),
            tokens=tokens,
            text_bytes=4 * tokens,
            special_ids={"bos": BOS, "eos": EOS, "pad": PAD, "unk": 1, "mask": MASK},
            shards=[SimpleNamespace(blocks=entries)],
        )

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def prepare(self, blocks: Sequence[int]) -> None:
        assert all(0 <= block < self.blocks for block in blocks), "a hint of blocks that there are not"

    def block(self, i: int) -> MemoryBlock:
        with self._lock:
            self.opened.append(i)
        return self._blocks[i]


def write_shards(path: Path, data: MemoryShards, block_tokens: int, shard_bytes: int = 1 << 16) -> ShardSet:
    """The same documents as a dataset on disk, in many small blocks."""
    special_ids = data.index.special_ids
    info = TokenizerInfo(fingerprint="sha256:t", kind="sentencepiece", vocab_size=1 << 16, special_ids=special_ids)
    with ShardWriter(path, "train", info, shard_bytes, block_tokens) as writer:
        for document, prompt in zip(data.documents, data.prompts, strict=True):
            writer.add(document, prompt, 4 * len(document))
    return ShardSet.open(path)


def numbered(lengths: list[int], per_block: int = 3, prompts: list[int] | None = None) -> MemoryShards:
    """Documents whose tokens tell document and place as far as 16 bits go: 5 + (7919 * document + place) mod 60000."""
    documents = [(5 + (7919 * i + np.arange(n)) % 60000).astype(np.uint16) for i, n in enumerate(lengths)]
    return MemoryShards(documents, prompts if prompts is not None else [0] * len(lengths), per_block)
