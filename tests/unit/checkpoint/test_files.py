"""The bytes of checkpoints: what is read is what was written, and no more than what was asked for."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import random
import tempfile
from pathlib import Path

import psutil
import pytest
import torch

from refusion_train.checkpoint import files, store
from refusion_train.checkpoint.sharded import ShardedEntry
from refusion_train.checkpoint.snapshot import HostMemory
from refusion_train.errors import CheckpointError

ROWS, COLUMNS = 3000, 700  # 8.4 MB in float32


def numbered(rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix in two cuts, a vector, a number and one in half precision; written from a snapshot."""
    whole = numbered()
    tensors = {
        "matrix": ShardedEntry((ROWS, COLUMNS), {(0, 0): whole[:1000], (1000, 0): whole[1000:]}),
        "vector": ShardedEntry((9,), {(0,): torch.arange(9.0)}),
        "number": torch.tensor(7),
        "half": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    }
    return store.save(tmp_path_factory.mktemp("saved"), 1, HostMemory().take(tensors), {}, keep=1)


def read(folder: Path, parts: dict[tuple[int, int], torch.Tensor]) -> int:
    """Read rectangles of the matrix; how many bytes this process took from files."""
    before = psutil.Process().io_counters().read_chars
    store.load(folder, {"matrix": ShardedEntry((ROWS, COLUMNS), parts)})
    return psutil.Process().io_counters().read_chars - before


@pytest.mark.parametrize(
    "rows, columns",
    [(slice(0, ROWS), slice(0, COLUMNS)), (slice(990, 1010), slice(0, COLUMNS)), (slice(0, ROWS), slice(350, 700)),
     (slice(999, 2000), slice(3, 5)), (slice(2999, 3000), slice(699, 700))],
)  # fmt: skip
def test_a_slice_is_read_and_nothing_else(saved: Path, rows: slice, columns: slice) -> None:
    expected = numbered()[rows, columns]
    target = torch.zeros(expected.shape)
    count = read(saved, {(rows.start, columns.start): target})
    assert torch.equal(target, expected)
    assert count < expected.nbytes + 30_000, "more was read than asked for (besides .metadata)"


def test_targets_may_have_any_strides(saved: Path) -> None:
    target = torch.zeros(COLUMNS, ROWS)
    read(saved, {(0, 0): target.T[:2000], (2000, 0): target.T[2000:]})
    assert torch.equal(target.T, numbered())


def test_other_ranks_and_types(saved: Path) -> None:
    tensors = {"number": torch.tensor(0), "half": torch.zeros(3, 4, dtype=torch.bfloat16), "vector": torch.zeros(9)}
    store.load(saved, tensors)
    assert tensors["number"].item() == 7 and tensors["half"].flatten().tolist() == list(range(12))
    assert tensors["vector"].tolist() == list(range(9))


def test_hashes_are_of_what_lies_on_disk(saved: Path) -> None:
    data = saved / "__0_0.distcp"
    assert data.stat().st_size == ROWS * COLUMNS * 4 + 9 * 4 + 8 + 24
    assert files.hash_file(data)["sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()
    store.check(saved)  # against the manifest, whose hashes were made while writing


def test_a_file_that_ends_early_is_one_line(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".distcp" else None])
    with pytest.raises(CheckpointError, match="ends") as caught:
        read(folder, {(0, 0): torch.zeros(5, COLUMNS)})
    assert "\n" not in str(caught.value)


def test_a_snapshot_is_one_stretch_of_memory_that_is_used_again(saved: Path) -> None:
    memory, live = HostMemory(), numbered(4, 6)
    entry = ShardedEntry((4, 6), {(0, 0): live[:1], (1, 0): live[1:, :3], (1, 3): live[1:, 3:]})
    first = list(memory.take({"a": entry, "b": entry})["a"].parts.values())
    assert [len(stretch) for stretch in files._joined(first)] == [24]
    again = list(memory.take({"a": entry})["a"].parts.values())
    assert again[0].data_ptr() == first[0].data_ptr()
    assert [len(stretch) for stretch in files._joined([live[:1], live[2:], torch.ones(3)])] == [6, 12, 3]


@pytest.mark.parametrize("folder", ["disk", "memory"])
@pytest.mark.parametrize("first", [0, 1, 4096, 5000])
@pytest.mark.parametrize("size", [1, 4095, 4096, 3 * 4096 + 7])
def test_what_is_aligned_goes_past_the_page_cache_and_all_arrives(
    folder: str, first: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that begin and end anywhere, one after the other into one file, also where a file system cannot do it."""
    memory = mmap.mmap(-1, 1 << 16)
    memory[:] = random.Random(0).randbytes(1 << 16)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    write, ways = os.write, []

    def noted(descriptor: int, part: memoryview) -> int:
        ways.append((len(part), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)))
        return write(descriptor, part)

    monkeypatch.setattr(os, "write", noted)
    pieces = [(0, first), (8192, size), (4096 * 7, 4096 * 2), (3, 4096)]
    base = tmp_path if folder == "disk" or not os.path.isdir("/dev/shm") else Path("/dev/shm")
    with tempfile.NamedTemporaryFile(dir=base, buffering=0) as stream:
        for start, length in pieces:
            part = tensor[start : start + length]
            files._write_all(stream.fileno(), files._bytes_of(part), part.data_ptr())
        os.fsync(stream.fileno())
        written = Path(stream.name).read_bytes()
    assert written == b"".join(memory[start : start + length] for start, length in pieces)
    if folder == "disk" and first % 4096 == 0 and size >= 4096:
        assert (size // 4096 * 4096, True) in ways, "nothing went past the page cache"
