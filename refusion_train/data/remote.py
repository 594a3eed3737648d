"""Blocks of a dataset behind a URL: fetched by byte ranges into the cache, in the background if asked for in time.

What arrives is checked before it becomes an entry of the cache: a block by the CRCs of its arrays, a whole shard (where
the server has no ranges) by its sha256.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from refusion_train.data.blocks import arrays_of, documents_of, extent, fault_of
from refusion_train.data.cache import Cache, Part
from refusion_train.data.shard_index import TOKENIZER_FOLDER, BlockInfo, Index, ShardInfo
from refusion_train.data.shard_writer import crc32
from refusion_train.data.tokenizer import Tokenizer, files_of
from refusion_train.data.transport import Closed, Damaged, NoRanges, Patience, Remote
from refusion_train.errors import DataError

if TYPE_CHECKING:
    from refusion_train.config import DataConfig

logger = logging.getLogger(__name__)

THREADS = 8  # that fetch, for each dataset; started when there is something to do
_MOST_PREPARED = 256  # blocks
_CACHE_GB = 20.0

Bytes = tuple[np.ndarray, int]  # uint8, and the place in the shard of the first of them


@dataclass(frozen=True)
class RemoteOptions:
    """Where what is fetched is kept, and how long to wait for it; `data.cache_dir` and `data.cache_gb` of a run."""

    cache_dir: str | None = None
    cache_gb: float = _CACHE_GB
    patience: Patience = field(default_factory=Patience)

    @classmethod
    def of(cls, data: DataConfig) -> RemoteOptions:
        """Those of a configuration."""
        return cls(data.cache_dir, data.cache_gb)

    @property
    def root(self) -> Path:
        """The folder of the cache: `cache_dir`, or that of the user ($XDG_CACHE_HOME, else ~/.cache)."""
        if self.cache_dir is not None:
            return Path(self.cache_dir)
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "refusion"


def open_remote(url: str, options: RemoteOptions | None = None) -> tuple[Index, RemoteBlocks]:
    """Index and blocks of the dataset behind a URL. Raises DataError: no dataset there, or the cache cannot be used."""
    options = options or RemoteOptions()
    remote = Remote(url, options.patience)
    index = Index.read_from(remote)
    logger.info("%s: what is fetched is kept in %s, up to %g GB", remote.name, options.root, options.cache_gb)
    return index, RemoteBlocks(remote, index, options)


class RemoteBlocks:
    """The bytes of the blocks of a remote dataset. Thread-safe. Threads end with the object, and with the process."""

    def __init__(self, remote: Remote, index: Index, options: RemoteOptions) -> None:
        self._remote, self._index = remote, index
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self._blocks = index.blocks
        self._cache = Cache(options.root, int(options.cache_gb * 1e9), index.fingerprint)
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}  # under way, and those that failed before anyone asked
        self._open: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()
        largest = max((stop - start for start, stop in map(self._extent, range(len(self._blocks)))), default=1)
        self._most_prepared = max(1, min(_MOST_PREPARED, self._cache.limit // (2 * largest)))
        self._pool = _Pool()
        weakref.finalize(self, _stop, self._pool, remote)

    def close(self) -> None:
        """Give up all that is under way; who waits for it gets a `Closed`."""
        _stop(self._pool, self._remote)

    def block(self, i: int) -> Bytes:
        """The bytes of block `i` (or of its whole shard), from the cache or fetched.

        Raises DataError, naming URL, shard and block, when they cannot be had or are damaged.
        """
        with self._lock:
            job = self._jobs.get(i)
        if job is None:
            found = self._at_hand(i)
            if found is not None:
                return found
        job = self._start(i, urgent=True)
        try:
            return job.result()
        finally:
            self._forget(i, job)

    def prepare(self, blocks: Sequence[int]) -> None:
        """Fetch blocks in the background, as far as there is room. What fails is raised by `block`."""
        for i in dict.fromkeys(int(block) for block in blocks):
            with self._lock:
                if i in self._jobs:
                    continue
                if len(self._jobs) >= self._most_prepared:
                    return
            if self._at_hand(i) is None:
                self._start(i, urgent=False)

    def documents(self, i: int) -> Bytes:
        """The bytes of lengths and prompts of block `i`, not kept; raises as `block` does."""
        found = self._at_hand(i)
        if found is not None:
            return found
        number, info = self._blocks[i]
        start, stop = extent(info, self._dtype, tokens=False)

        def take(chunks: Iterator[bytes]) -> np.ndarray:
            data = np.frombuffer(_exactly(chunks, stop - start), np.uint8)
            arrays = documents_of(data, start, info)
            if arrays is None or crc32(*arrays) != info.documents_crc32:
                raise Damaged("the document lengths are not those that were written (checksum)")
            return data

        shard = self._index.shards[number]
        if self._remote.ranges:
            with contextlib.suppress(NoRanges), self._explained(shard, info):
                return self._remote.fetch(shard.name, (start, stop), take, _what(shard, info)), start
            self._without_ranges()
        return self.block(i)

    def discard(self, i: int) -> None:
        """What the cache holds of block `i` is damaged: fetch it again when it is asked for."""
        for key, _ in (self._block_entry(i), self._shard_entry(i)):
            self._open.pop(key, None)
            self._cache.remove(key)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that lies with the dataset, from a copy in the cache; None if there is none.

        Raises DataError when it cannot be fetched or is damaged.
        """
        folder = self._cache.folder / TOKENIZER_FOLDER
        if folder.is_dir():
            try:
                return Tokenizer.load(folder)
            except DataError:
                shutil.rmtree(folder, ignore_errors=True)
        files = {}
        for name in files_of(self._index.tokenizer["kind"]):
            with contextlib.suppress(FileNotFoundError):
                files[name] = self._remote.read(f"{TOKENIZER_FOLDER}/{name}")
        if not files:
            return None
        with tempfile.TemporaryDirectory(dir=self._cache.folder, prefix=f"{TOKENIZER_FOLDER}-") as aside:
            copy = Path(aside) / TOKENIZER_FOLDER
            copy.mkdir()
            for name, content in files.items():
                (copy / name).write_bytes(content)
            Tokenizer.load(copy)
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(copy, folder)
        return Tokenizer.load(folder)

    @contextlib.contextmanager
    def downloaded(self, shard: ShardInfo) -> Iterator[Path]:
        """A folder, gone afterwards, that holds a whole shard; only its size is checked. Raises DataError."""
        with tempfile.TemporaryDirectory(prefix="refusion-") as folder:

            def take(chunks: Iterator[bytes]) -> None:
                with open(Path(folder) / "shard", "wb", buffering=0) as file:
                    for chunk in chunks:
                        try:
                            file.write(chunk)
                        except OSError as error:  # not the server's fault
                            raise DataError(f"{folder}: {error.strerror}; give another folder (TMPDIR)") from None
                    if file.tell() != shard.bytes:
                        raise EOFError(f"{file.tell()} bytes arrived, index.json says {shard.bytes}")

            with self._explained(shard, None):
                self._remote.fetch(shard.name, None, take, _what(shard, None))
            os.rename(Path(folder) / "shard", Path(folder) / os.path.basename(shard.name))
            yield Path(folder)

    # ------------------------------------------------------------------------------------------------ entries

    def _extent(self, i: int) -> tuple[int, int]:
        return extent(self._blocks[i][1], self._dtype)

    def _block_entry(self, i: int) -> tuple[str, int]:
        """Key and size of the entry of a block."""
        start, stop = self._extent(i)
        return f"{self._blocks[i][0]:06d}-{start}-{stop}", stop - start

    def _shard_entry(self, i: int) -> tuple[str, int]:
        number = self._blocks[i][0]
        return f"{number:06d}", self._index.shards[number].bytes

    def _at_hand(self, i: int) -> Bytes | None:
        """What is open already, or in the cache."""
        ranges = self._remote.ranges  # another thread may find out at any time
        key, size = self._block_entry(i) if ranges else self._shard_entry(i)
        data = self._open.get(key)
        if data is None:
            data = self._cache.open(key, size)
            if data is None:
                return None
            self._open[key] = data
        return data, self._extent(i)[0] if ranges else 0

    def _obtain(self, entry: tuple[str, int], fetch: Callable[[Part], None]) -> np.ndarray:
        """An entry of the cache; if there is none, it is made by one thread of one process."""
        key, size = entry
        while not self._remote.closed.is_set():
            data = self._cache.open(key, size)
            if data is None:
                with self._cache.making(key, size, self._remote.closed) as part:
                    if part is None:
                        continue
                    fetch(part)
                    data = part.finish()
            self._open[key] = data
            return data
        raise Closed(f"{self._remote.name}: closed")

    # -------------------------------------------------------------------------------------------------- fetching

    def _start(self, i: int, urgent: bool) -> _Job:
        with self._lock:
            job = self._jobs.get(i)
            if job is None:
                job = self._jobs[i] = _Job()
            elif not urgent or job.begun:
                return job
        blocks: weakref.ref[RemoteBlocks] = weakref.ref(self)  # the pool's threads must not keep it alive
        self._pool.put(lambda: _run(blocks, i, job), urgent)
        return job

    def _forget(self, i: int, job: _Job) -> None:
        with self._lock:
            if self._jobs.get(i) is job:
                del self._jobs[i]

    def _fetch(self, i: int) -> Bytes:
        number, info = self._blocks[i]
        shard = self._index.shards[number]
        start, stop = self._extent(i)
        if start < 0 or stop > shard.bytes:
            raise DataError(f"{self._remote.name}: index.json places block {info.key} outside shard {shard.name}")
        if self._remote.ranges:
            with contextlib.suppress(NoRanges):
                return self._obtain(self._block_entry(i), lambda part: self._fetch_block(part, i)), start
            self._without_ranges()
        return self._obtain(self._shard_entry(i), lambda part: self._fetch_shard(part, shard, info)), 0

    def _fetch_block(self, part: Part, i: int) -> None:
        number, info = self._blocks[i]
        shard = self._index.shards[number]
        start, stop = self._extent(i)

        def take(chunks: Iterator[bytes]) -> None:
            data = _exactly(chunks, stop - start)
            arrays = arrays_of(np.frombuffer(data, np.uint8), start, info, self._dtype)
            assert arrays is not None, "the extent of a block holds its arrays"
            fault = fault_of(info, arrays)
            if fault is not None:
                raise Damaged(f"the {fault} are not those that were written (checksum)")
            part.begin()
            part.write(data)

        with self._explained(shard, info):
            self._remote.fetch(shard.name, (start, stop), take, _what(shard, info))

    def _fetch_shard(self, part: Part, shard: ShardInfo, info: BlockInfo) -> None:
        def take(chunks: Iterator[bytes]) -> None:
            part.begin()
            digest, size = hashlib.sha256(), 0
            for chunk in chunks:
                size += len(chunk)
                if size > shard.bytes:
                    raise Damaged(f"it has more than the {shard.bytes} bytes that index.json says")
                digest.update(chunk)
                part.write(chunk)
            if size != shard.bytes:
                raise EOFError(f"{size} of {shard.bytes} bytes arrived")
            if digest.hexdigest() != shard.sha256:
                raise Damaged("it is not the shard that was written (sha256)")

        with self._explained(shard, info):
            self._remote.fetch(shard.name, None, take, _what(shard, info))

    def _without_ranges(self) -> None:
        with self._lock:
            first, self._remote.ranges = self._remote.ranges, False
        if first:
            logger.warning(
                "%s: the server gives no parts of files (HTTP ranges), so whole shards are fetched; "
                "data.cache_gb should hold all %.3g GB of them",
                self._remote.name, sum(shard.bytes for shard in self._index.shards) / 1e9,
            )  # fmt: skip

    @contextlib.contextmanager
    def _explained(self, shard: ShardInfo, info: BlockInfo | None) -> Iterator[None]:
        """A shard that is missing or damaged may be one of another dataset by now."""
        try:
            yield
        except FileNotFoundError:
            if self._has_changed():
                raise self._changed(_what(shard, info)) from None
            raise DataError(
                f"{self._remote.name}: {_what(shard, info)}: the shard is missing; restore it or build the dataset "
                "again"
            ) from None
        except DataError as error:
            if isinstance(error.__cause__, Damaged) and self._has_changed():
                raise self._changed(_what(shard, info)) from None
            raise

    def _has_changed(self) -> bool:
        try:
            return Index.read(self._remote.url, Patience(attempts=1)).fingerprint != self._index.fingerprint
        except DataError:
            return False

    def _changed(self, what: str) -> DataError:
        return DataError(
            f"{self._remote.name}: {what}: the dataset there is another one by now than when it was opened "
            "(fingerprint); restore it, or start anew with the new one"
        )


class _Job(Future[Bytes]):
    """The bytes of a block to come. It may wait in the pool's queue twice, and is done once."""

    def __init__(self) -> None:
        super().__init__()
        self._claim = threading.Lock()

    @property
    def begun(self) -> bool:
        return self._claim.locked()

    def begin(self) -> bool:
        """Whether the caller is the one who does it."""
        return self._claim.acquire(blocking=False)


class _Pool:
    """Daemon threads that work off a queue; urgent work first. They do not keep a process from ending."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._threads = self._idle = 0
        self._stopped = False

    def put(self, work: Callable[[], None], urgent: bool) -> None:
        with self._changed:
            if urgent:
                self._queue.appendleft(work)
            else:
                self._queue.append(work)
            if self._idle < len(self._queue) and self._threads < THREADS and not self._stopped:
                self._threads += 1
                threading.Thread(target=self._serve, name=f"fetch-{self._threads}", daemon=True).start()
            self._changed.notify()

    def stop(self) -> None:
        """No thread begins anything but to refuse what waits."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._stopped or self._queue)
                self._idle -= 1
                if not self._queue:
                    return
                work = self._queue.popleft()
            work()
            del work


def _run(reference: weakref.ref[RemoteBlocks], i: int, job: _Job) -> None:
    if not job.begin():
        return
    blocks = reference()
    if blocks is None:
        job.set_exception(Closed("the dataset is closed"))
        return
    try:
        job.set_result(blocks._fetch(i))
        blocks._forget(i, job)
    except BaseException as error:
        job.set_exception(error)


def _stop(pool: _Pool, remote: Remote) -> None:
    remote.close()
    pool.stop()


def _exactly(chunks: Iterator[bytes], size: int) -> bytearray:
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > size:
            raise Damaged(f"more than the {size} bytes asked for arrived")
    if len(data) < size:
        raise EOFError(f"{len(data)} of {size} bytes arrived")
    return data


def _what(shard: ShardInfo, info: BlockInfo | None) -> str:
    return f"shard {shard.name}" + (f", block {info.key}" if info is not None else "")
