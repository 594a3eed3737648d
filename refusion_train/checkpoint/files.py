"""The bytes of a checkpoint: an item of `torch.distributed.checkpoint` (DCP) is its elements, row-major, and no more.

DCP's own files pickle every item with `torch.save`, whose CRC and copies hold the interpreter lock for as long as a
training step, and they are read an item at a time, whole, where a rank wants a slice of it. Here writing hashes and
hands over very large blocks, so that a thread that writes beside training hardly ever asks for the lock, and reading
takes the rows and columns that are wanted. Planning, agreement among ranks and `.metadata` remain DCP's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

WRITE_BYTES = 256 << 20  # hashed, and then written, at a time, each without the interpreter lock
ALIGNMENT = 4096  # of memory and of places in a file, for writing past the page cache
READ_BYTES = 8 << 20  # the buffer through which slices are read


@dataclass(frozen=True)
class Place:
    """Where the elements of an item lie; `.metadata` holds one for each. Renaming breaks the checkpoints that exist."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def description(size: int, digest: str) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": size, "sha256": digest}


# ------------------------------------------------------------------------------------------------------- writing


class HashingWriter(FileSystemWriter):
    """Writes this rank's items into one file, synced to disk, and knows its hash without reading it again.

    written: name -> description of the file; empty if this rank has nothing to write.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written: dict[str, dict[str, Any]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As DCP asks for it. Raises OSError."""
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan, planner) if plan.items else [])
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        file = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        size = 0

        def tensors() -> Iterator[torch.Tensor]:  # one by one: an entry may make them when it is asked
            nonlocal size
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor), f"{item.index.fqn} is not a tensor"
                place = Place(file, size, tuple(tensor.shape), tensor.dtype)
                results.append(WriteResult(item.index, tensor.nbytes, place))
                size += tensor.nbytes
                yield tensor.detach().cpu().contiguous()

        digest = hashlib.sha256()
        with open(Path(self.path) / file, "wb", buffering=0) as stream:
            for stretch in _joined(tensors()):
                memory, address = _bytes_of(stretch), stretch.data_ptr()
                for start in range(0, len(memory), WRITE_BYTES):
                    block = memory[start : start + WRITE_BYTES]
                    digest.update(block)
                    _write_all(stream.fileno(), block, address + start)
            os.fsync(stream.fileno())
        self.written[file] = description(size, digest.hexdigest())
        return results


def _joined(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The elements of contiguous tensors, in order; those that lie behind each other in memory (a snapshot) in one."""
    stretch: torch.Tensor | None = None
    for tensor in (tensor.reshape(-1) for tensor in tensors):
        if stretch is not None and _follows(stretch, tensor):
            stretch = stretch.as_strided((len(stretch) + len(tensor),), (1,), stretch.storage_offset())
            continue
        if stretch is not None:
            yield stretch
        stretch = tensor
    if stretch is not None:
        yield stretch


def _follows(first: torch.Tensor, second: torch.Tensor) -> bool:
    same = first.dtype == second.dtype and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and second.storage_offset() == first.storage_offset() + len(first)


def _write_all(descriptor: int, memory: memoryview, address: int) -> None:
    """Append `memory`, which begins at `address`; past the page cache as far as both are aligned, as a snapshot is.

    Going through the page cache costs a copy, and pushes out the shards that training reads.
    """
    done, place, direct = 0, os.lseek(descriptor, 0, os.SEEK_CUR), True
    while done < len(memory):
        stop = done + (len(memory) - done) // ALIGNMENT * ALIGNMENT
        direct = direct and stop > done and (address + done) % ALIGNMENT == 0 and (place + done) % ALIGNMENT == 0
        direct = _set_direct(descriptor, direct)
        try:
            done += os.write(descriptor, memory[done : stop if direct else None])
        except OSError:
            if not direct:
                raise
            direct = False  # not every file system can
    _set_direct(descriptor, False)


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Have writes go past the page cache, or not; whether they do."""
    flag = getattr(os, "O_DIRECT", 0)
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    after = before | flag if direct else before & ~flag
    try:
        if after != before:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, after)
    except OSError:
        return False
    return direct and flag != 0


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------------------------- reading


class SliceReader(FileSystemReader):
    """Reads of stored items the rows and columns that are wanted, through a buffer of READ_BYTES.

    One reader may serve several loads; it reads `.metadata` once.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As DCP asks for it. Raises OSError, and ValueError for a file that ends early."""
        per_file: dict[str, list[tuple[Place, ReadItem]]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            per_file.setdefault(place.file, []).append((place, item))
        for file, items in per_file.items():
            with open(Path(self.path) / file, "rb", buffering=0) as stream:
                for place, item in sorted(items, key=lambda pair: pair[0].offset):
                    target = planner.resolve_tensor(item).detach()
                    _read_slice(stream.fileno(), place, tuple(item.storage_offsets), target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _read_slice(descriptor: int, place: Place, offsets: tuple[int, ...], target: torch.Tensor) -> None:
    """Fill `target`, of any strides and device, with the slice of its shape that begins at `offsets` of an item."""
    assert len(place.shape) <= 2, f"an item of shape {place.shape} has more than rows and columns"
    stored_columns = place.shape[-1] if place.shape else 1
    first_row, first_column = (0, 0, *offsets)[-2:]
    rows, columns = (1, 1, *target.shape)[-2:]
    target = target.view(rows, columns) if target.ndim < 2 else target
    at_once = max(1, READ_BYTES // max(1, columns * place.dtype.itemsize))
    buffer = torch.empty(min(rows, at_once), columns, dtype=place.dtype)
    for row in range(0, rows, at_once):
        block = buffer[: min(at_once, rows - row)]
        start = place.offset + ((first_row + row) * stored_columns + first_column) * place.dtype.itemsize
        if columns == stored_columns:
            _read_into(descriptor, _bytes_of(block), start)
        else:
            for number, line in enumerate(block):
                _read_into(descriptor, _bytes_of(line), start + number * stored_columns * place.dtype.itemsize)
        target[row : row + len(block)].copy_(block)


def _read_into(descriptor: int, memory: memoryview, start: int) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], start + done)
        if count == 0:
            raise ValueError(f"the file ends {len(memory) - done} bytes early")
        done += count


def hash_file(file: Path) -> dict[str, Any]:
    """The description of a file that is there."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return description(stream.tell(), digest)
