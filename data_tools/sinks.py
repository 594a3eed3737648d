"""Where encoded documents go: straight into the datasets, or into a spool from which they come in another order.

A spool is needed for what only the whole corpus decides: which documents are duplicates, and a global shuffle. It
takes as much disk as the shards, and memory for one of its buckets. Sinks say where they stand (`state`) and go back
there (`restore`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from data_tools.encode import DIGEST_BYTES, Encoded
from refusion_train.data.shard_index import TOKENIZER_FOLDER, Index
from refusion_train.data.shard_writer import TarSequence, token_dtype
from refusion_train.data.tokenizer import Tokenizer

TRAIN, VALIDATION = "train", "validation"

State = tuple[dict[str, Any], dict[str, np.ndarray]]


class Sink(Protocol):
    """`documents`: added so far; `tokens`: likewise."""

    documents: int
    tokens: int

    def add(self, encoded: Encoded) -> None: ...
    def state(self) -> State: ...
    def restore(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None: ...


class DatasetSink:
    """Documents into FOLDER/train and FOLDER/validation, and counts per source."""

    def __init__(
        self, folder: Path, journal: Path, names: list[str], infix: str, tokenizer: Tokenizer, shard_bytes: int,
        block_tokens: int,
    ):  # fmt: skip
        self.names = names
        self.documents = self.tokens = 0
        self._folder = folder
        self._writers: dict[str, TarSequence] = {}
        # Per dataset and source: documents, tokens, bytes of text.
        self._counts: dict[str, dict[int, list[int]]] = {name: {} for name in names}
        for name in names:
            (folder / name).mkdir(exist_ok=True)
            if not (folder / name / TOKENIZER_FOLDER).is_dir():
                tokenizer.save(folder / name / TOKENIZER_FOLDER)
            self._writers[name] = TarSequence(
                folder / name, name + infix, tokenizer.info, shard_bytes, block_tokens, journal / f"{name}.shards"
            )

    def add(self, encoded: Encoded) -> None:
        ends = np.concatenate(([0], np.cumsum(encoded.lengths, dtype=np.int64)))
        sides = encoded.validation
        # Documents of one side that stand together are added together.
        borders = [0, *(np.flatnonzero(sides[1:] != sides[:-1]) + 1).tolist(), len(sides)]
        for first, stop in itertools.pairwise(borders):
            if first == stop:
                continue
            name = VALIDATION if sides[first] else TRAIN
            part = slice(first, stop)
            self._writers[name].add_batch(
                encoded.tokens[ends[first] : ends[stop]], encoded.lengths[part], encoded.prompts[part],
                encoded.text_bytes[part],
            )  # fmt: skip
            self._count(name, encoded, part)
        self.documents += len(encoded)
        self.tokens += len(encoded.tokens)

    def _count(self, name: str, encoded: Encoded, part: slice) -> None:
        sources = encoded.sources[part]
        for source in np.unique(sources).tolist():
            here = sources == source
            counts = self._counts[name].setdefault(source, [0, 0, 0])
            counts[0] += int(here.sum())
            counts[1] += int(encoded.lengths[part][here].sum(dtype=np.int64))
            counts[2] += int(encoded.text_bytes[part][here].sum())

    def state(self) -> State:
        state: dict[str, Any] = {"documents": self.documents, "tokens": self.tokens, "writers": {}, "counts": {}}
        arrays: dict[str, np.ndarray] = {}
        for name, writer in self._writers.items():
            state["writers"][name], parts = writer.state()
            arrays.update({f"{name}.{key}": array for key, array in parts.items()})
            state["counts"][name] = [[source, *counts] for source, counts in self._counts[name].items()]
        return state, arrays

    def restore(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.documents, self.tokens = state["documents"], state["tokens"]
        for name, writer in self._writers.items():
            prefix = f"{name}."
            writer.restore(
                state["writers"][name],
                {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)},
            )
            self._counts[name] = {source: list(counts) for source, *counts in state["counts"][name]}

    def documents_of(self, name: str) -> int:
        return self._writers[name].documents

    def finish(self, build: dict[str, Any], sources: list[str], leave_out: set[str]) -> dict[str, Index]:
        """Write the indexes; datasets in `leave_out` (empty ones) are not made."""
        indexes = {}
        for name, writer in self._writers.items():
            if name in leave_out:
                continue
            rows = [
                dict(zip(("name", "documents", "tokens", "text_bytes"), (sources[source], *counts), strict=True))
                for source, counts in sorted(self._counts[name].items())
            ]
            indexes[name] = writer.finish({"build": build, "sources": tuple(rows)})
        return indexes

    def abort(self) -> None:
        for writer in self._writers.values():
            writer.abort()


_DOCUMENT = np.dtype(
    [("key", "<u8"), ("ordinal", "<u8"), ("start", "<u8"), ("text_bytes", "<i8"), ("length", "<i4"), ("prompt", "<i4"),
     ("source", "<i4"), ("validation", "?")]
)  # fmt: skip
_DIGEST = np.dtype([("a", "<u8"), ("b", "<u8"), ("ordinal", "<u8")])
_BUCKET_BITS, _DIGEST_FILES = 7, 128
_BUCKET_DOCUMENTS = 1 << 20
_EMIT_TOKENS = 1 << 20


class Spool:
    """Documents on disk in buckets, to come out in the order of `seed` (None: in the order they came), without those
    whose digest an earlier one had, if they have digests.

    The order is that of a keyed hash of each document's number; a bucket holds the documents whose hashes begin alike
    (without a seed: a run of documents).
    """

    def __init__(self, folder: Path, vocab_size: int, seed: int | None):
        folder.mkdir(exist_ok=True)
        self._folder, self._seed = folder, seed
        self._dtype = token_dtype(vocab_size)
        self._files: dict[str, IO[bytes]] = {}
        self._sizes: dict[str, int] = {}  # bytes of each file
        self._unsaved: set[str] = set()  # files with bytes that may not be on the disk
        self.documents = self.tokens = self.duplicates = 0

    def add(self, encoded: Encoded) -> None:
        count = len(encoded)
        if not count:
            return
        ordinals = np.arange(self.documents, self.documents + count, dtype=np.uint64)
        keys = _keys(ordinals, self._seed)
        if self._seed is None:
            buckets = ordinals // np.uint64(_BUCKET_DOCUMENTS)
        else:
            buckets = keys >> np.uint64(64 - _BUCKET_BITS)
        records = np.zeros(count, _DOCUMENT)
        records["key"], records["ordinal"], records["length"] = keys, ordinals, encoded.lengths
        records["prompt"], records["text_bytes"] = encoded.prompts, encoded.text_bytes
        records["source"], records["validation"] = encoded.sources, encoded.validation
        ends = np.concatenate(([0], np.cumsum(encoded.lengths, dtype=np.int64)))
        for bucket in np.unique(buckets).tolist():
            chosen = np.flatnonzero(buckets == bucket)
            part = records[chosen]
            name = f"{bucket:06d}.tokens"
            done = self._sizes.get(name, 0) // self._dtype.itemsize
            part["start"] = done + np.concatenate(([0], np.cumsum(part["length"][:-1], dtype=np.int64)))
            self._append(name, np.concatenate([encoded.tokens[ends[i] : ends[i + 1]] for i in chosen.tolist()]))
            self._append(f"{bucket:06d}.documents", part)
        self._add_digests(encoded.digests, ordinals)
        self.documents += count
        self.tokens += len(encoded.tokens)

    def _add_digests(self, digests: np.ndarray, ordinals: np.ndarray) -> None:
        if not len(digests):
            return
        assert digests.shape[1] == DIGEST_BYTES, f"digests of {digests.shape[1]} bytes"
        halves = np.ascontiguousarray(digests).view("<u8")
        records = np.zeros(len(digests), _DIGEST)
        records["a"], records["b"], records["ordinal"] = halves[:, 0], halves[:, 1], ordinals
        files = records["a"] % np.uint64(_DIGEST_FILES)
        for number in np.unique(files).tolist():
            self._append(f"{number:03d}.digests", records[files == number])

    def state(self) -> State:
        for name in self._unsaved & self._files.keys():
            self._files[name].flush()
            os.fsync(self._files[name].fileno())
        self._unsaved.clear()
        return {"documents": self.documents, "tokens": self.tokens, "sizes": self._sizes}, {}

    def restore(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.close()
        self.documents, self.tokens, self._sizes = state["documents"], state["tokens"], dict(state["sizes"])
        for path in self._folder.iterdir():
            if path.name in self._sizes:
                os.truncate(path, self._sizes[path.name])
            else:
                path.unlink()

    def emit(self, start: tuple[int, int] = (0, 0)) -> Iterator[tuple[Encoded, tuple[int, int]]]:
        """The documents in their final order, a million tokens or so at a time, each with the place behind it; `start`:
        such a place. Nothing can be added any more."""
        self.close()
        dropped = self._find_duplicates()
        buckets = sorted(int(name.partition(".")[0]) for name in self._sizes if name.endswith(".tokens"))
        for number in range(start[0], len(buckets)):
            name = f"{buckets[number]:06d}"
            records = np.fromfile(self._folder / f"{name}.documents", _DOCUMENT)
            if dropped is not None:
                records = records[dropped[records["ordinal"]] == 0]
            records = records[np.lexsort((records["ordinal"], records["key"]))]
            tokens = np.memmap(self._folder / f"{name}.tokens", self._dtype, "r")
            first = start[1] if number == start[0] else 0
            ends = np.cumsum(records["length"], dtype=np.int64)
            while first < len(records):
                before = int(ends[first - 1]) if first else 0
                stop = max(first + 1, int(np.searchsorted(ends, before + _EMIT_TOKENS, side="right")))
                yield _encoded(records[first:stop], tokens), (number, stop)
                first = stop

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _append(self, name: str, array: np.ndarray) -> None:
        if self._seed is None and name not in self._files and name.endswith(".tokens"):
            # A run of documents is over: its files are not needed any more.
            for old in [old for old in self._files if not old.endswith(".digests")]:
                self._files[old].flush()
                os.fsync(self._files[old].fileno())
                self._files.pop(old).close()
        if name not in self._files:
            self._files[name] = open(self._folder / name, "ab")  # noqa: SIM115 - closed by `close`
        data = np.ascontiguousarray(array)
        self._unsaved.add(name)
        self._files[name].write(data.view(np.uint8).data)
        self._sizes[name] = self._sizes.get(name, 0) + data.nbytes

    def _find_duplicates(self) -> np.ndarray | None:
        """One byte per document, 1 where an earlier one has the same digest; on disk. Counts `duplicates`."""
        names = [name for name in self._sizes if name.endswith(".digests")]
        if not names:
            return None
        dropped = np.memmap(self._folder / "dropped", np.uint8, "w+", shape=(self.documents,))
        self.duplicates = 0
        for name in sorted(names):
            records = np.fromfile(self._folder / name, _DIGEST)
            records = records[np.lexsort((records["ordinal"], records["b"], records["a"]))]
            same = (records["a"][1:] == records["a"][:-1]) & (records["b"][1:] == records["b"][:-1])
            dropped[records["ordinal"][1:][same]] = 1
            self.duplicates += int(same.sum())
        return dropped


def _keys(ordinals: np.ndarray, seed: int | None) -> np.ndarray:
    """uint64 keys by which documents are ordered: their numbers, or with a seed a hash of them (splitmix64)."""
    if seed is None:
        return ordinals
    with np.errstate(over="ignore"):
        value = ordinals * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_mixed(seed))
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def _mixed(seed: int) -> int:
    """A seed spread over 64 bits, so that neighbouring seeds give unrelated orders."""
    import hashlib

    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")


def _encoded(records: np.ndarray, tokens: np.ndarray) -> Encoded:
    places = zip(records["start"].tolist(), records["length"].tolist(), strict=True)
    parts = [tokens[start : start + length] for start, length in places]
    return Encoded(
        np.concatenate(parts), records["length"], records["prompt"], records["text_bytes"], records["validation"],
        records["source"], np.empty((0, DIGEST_BYTES), np.uint8),
    )  # fmt: skip
