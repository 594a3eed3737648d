"""A folder of bounded size for what was fetched, shared by all processes and threads of a machine.

    CACHE/usage                     bytes of all entries, as text; its lock (flock) guards adding and evicting
    CACHE/refusion-DATASET/KEY.bin  an entry, whole
    CACHE/refusion-DATASET/KEY.part an entry in the making, locked (flock) by who makes it

Locks end with their process, so a `.part` that nobody locks is what a killed process left. An entry is opened by
mapping it, and stays readable for those who have it open when it is evicted. The time of modification of an entry is
when it was last opened; the oldest is evicted first. Nothing but files of these names is ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from refusion_train.errors import DataError

ENTRY, PART = ".bin", ".part"
_USAGE = "usage"
_FOLDER = re.compile(r"refusion-[0-9a-f]+")
_SPARE = 20  # a share of 1/20 is evicted beyond what is needed, so that not every entry looks through the folder
_POLL_SECONDS = 0.05


class _Found(NamedTuple):
    used: int  # time of last use in ns
    size: int
    path: str


class Cache:
    """The entries of one dataset in the folder `root`, which holds no more than `limit` bytes of all datasets together,
    beyond what is being fetched. Thread-safe.

    `dataset`: its fingerprint. Raises DataError when the folder cannot be made or written.
    """

    def __init__(self, root: Path, limit: int, dataset: str) -> None:
        self.root, self.limit = root, limit
        self.folder = root / f"refusion-{dataset.rpartition(':')[2][:32]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._usage() as usage:
                usage.write(self._evict(self.limit))  # also what killed processes left
        except OSError as error:
            raise self._trouble(error) from None

    def open(self, key: str, size: int) -> np.ndarray | None:
        """An entry as uint8 [size], mapped read-only; None if there is none."""
        path = self.folder / f"{key}{ENTRY}"
        try:
            if os.stat(path).st_size != size:
                self.remove(key)
                return None
            mapped = _map(path)
            os.utime(path)
        except FileNotFoundError:  # never there, or removed by others at this moment
            return None
        except OSError as error:
            raise self._trouble(error) from None
        return mapped

    def remove(self, key: str) -> None:
        """Take an entry out, for example because it is damaged."""
        path = self.folder / f"{key}{ENTRY}"
        with contextlib.suppress(FileNotFoundError), self._usage() as usage:
            size = os.stat(path).st_size
            os.unlink(path)
            usage.write(usage.read() - size)

    @contextlib.contextmanager
    def making(self, key: str, size: int, give_up: threading.Event) -> Iterator[Part | None]:
        """The right to make an entry of `size` bytes; waits for others who are making it. None: they have made it, or
        `give_up` is set. The entry comes into being with `Part.finish`, else nothing is left of it.

        Raises DataError when the disk is full or the folder cannot be written.
        """
        try:
            descriptor = self._lock_part(key, give_up)
        except OSError as error:
            raise self._trouble(error) from None
        if descriptor is None:
            yield None
            return
        part = Part(self, key, size, descriptor)
        try:
            part.reserve()
            yield part
        finally:
            part.close()

    def _lock_part(self, key: str, give_up: threading.Event) -> int | None:
        path, entry = self.folder / f"{key}{PART}", self.folder / f"{key}{ENTRY}"
        while not give_up.is_set():
            if entry.exists():
                return None
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not _try_lock(descriptor):
                os.close(descriptor)
                give_up.wait(_POLL_SECONDS)
            elif not _is_at(descriptor, path):  # finished or removed between opening and locking
                os.close(descriptor)
            elif entry.exists():
                os.unlink(path)
                os.close(descriptor)
            else:
                return descriptor
        return None

    @contextlib.contextmanager
    def _usage(self) -> Iterator[_Usage]:
        self.root.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        descriptor = os.open(self.root / _USAGE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield _Usage(descriptor)
        finally:
            os.close(descriptor)

    def _evict(self, target: int) -> int:
        """Remove what is oldest until no more than `target` bytes are left, and what killed processes left.

        Returns the bytes that are left. Call it with `_usage` locked.
        """
        entries, total = [], 0
        for found in self._files():
            if found.path.endswith(PART) and _remove_if_abandoned(found.path):
                continue
            total += found.size
            if found.path.endswith(ENTRY):
                entries.append(found)
        for entry in sorted(entries):
            if total <= target:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
            total -= entry.size
        return total

    def _files(self) -> Iterator[_Found]:
        """All entries, whole and in the making, of all datasets."""
        for folder in self.root.iterdir():
            if not _FOLDER.fullmatch(folder.name):
                continue
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
                for file in files:
                    if file.name.endswith((ENTRY, PART)):
                        with contextlib.suppress(FileNotFoundError):
                            stat = file.stat(follow_symlinks=False)
                            yield _Found(stat.st_mtime_ns, stat.st_size, file.path)

    def _trouble(self, error: OSError) -> DataError:
        return DataError(
            f"the cache of remote data in '{self.root}' cannot be used: {error.strerror or error}; free space there, "
            "lower data.cache_gb, or give another folder (data.cache_dir)"
        )


class Part:
    """An entry in the making; see `Cache.making`."""

    def __init__(self, cache: Cache, key: str, size: int, descriptor: int) -> None:
        self._cache, self._size, self._descriptor = cache, size, descriptor
        self._path, self._entry = (cache.folder / f"{key}{suffix}" for suffix in (PART, ENTRY))
        self._reserved = 0
        self._finished = False

    def reserve(self) -> None:
        """Make room: evict what is too much, and take the space on the disk."""
        try:
            with self._cache._usage() as usage:
                total = usage.read() + self._size
                if total > self._cache.limit:
                    spare = self._cache.limit // _SPARE
                    total = self._cache._evict(self._cache.limit - self._size - spare) + self._size
                os.posix_fallocate(self._descriptor, 0, self._size)
                usage.write(total)
                self._reserved = self._size
        except OSError as error:
            raise self._cache._trouble(error) from None

    def begin(self) -> None:
        """Write from the start (again)."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)

    def write(self, data: bytes | bytearray) -> None:
        """Append. Raises DataError when the disk does not take it."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise self._cache._trouble(error) from None

    def finish(self) -> np.ndarray:
        """What was written becomes an entry; returns it as `Cache.open` does."""
        try:
            mapped = _map(self._path)
            os.rename(self._path, self._entry)
        except OSError as error:
            raise self._cache._trouble(error) from None
        self._finished = True
        return mapped

    def close(self) -> None:
        """Let others have it; if it was not finished, remove it."""
        if not self._finished:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
                with self._cache._usage() as usage:
                    usage.write(usage.read() - self._reserved)
        os.close(self._descriptor)


class _Usage:
    """The number in the usage file, which is locked. Too high a number is mended by the next look at the folder."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int:
        text = os.pread(self._descriptor, 32, 0).strip()
        return int(text) if text.isdigit() else 0

    def write(self, total: int) -> None:
        os.pwrite(self._descriptor, f"{max(total, 0):<20}\n".encode(), 0)


def _map(path: Path) -> np.ndarray:
    import pyarrow

    # Unlike an mmap object, this holds no file open: a run has hundreds of blocks at hand.
    with pyarrow.memory_map(os.fspath(path)) as file:
        return np.frombuffer(file.read_buffer(), np.uint8)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that lies there now."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _remove_if_abandoned(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not _try_lock(descriptor):
                return False
            if _is_at(descriptor, Path(path)):
                os.unlink(path)
        finally:
            os.close(descriptor)
    return True
