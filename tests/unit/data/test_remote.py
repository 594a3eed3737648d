"""Shards behind a real HTTP server that fails in many ways: what comes is right, or an error says what is not."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from http_shards import Site, cut, flip, reset, serve, slow, stall, status
from test_shards import make_documents, read, write

from refusion_train.data.cache import Cache
from refusion_train.data.remote import RemoteOptions
from refusion_train.data.shard_index import INDEX_FILE
from refusion_train.data.shards import ShardSet
from refusion_train.data.transport import Patience, is_url, join, shown
from refusion_train.errors import DataError

FAST = Patience(attempts=4, first_wait=0.02, longest_wait=0.1, connect=1.0, stall=0.4)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A dataset of several shards, of several blocks each, at URL/data."""
    write(tmp_path / "www" / "data", make_documents(200))
    with serve(tmp_path / "www") as site:
        yield site


def options(tmp_path: Path, cache_bytes: int = 10_000_000, patience: Patience = FAST) -> RemoteOptions:
    return RemoteOptions(str(tmp_path / "cache"), cache_bytes / 1e9, patience)


def opened(site: Site, tmp_path: Path, **changes: int) -> ShardSet:
    return ShardSet.open(f"{site.url}/data", options(tmp_path, **changes))


def local(site: Site) -> list[tuple[list[int], int]]:
    return read(ShardSet.open(site.folder / "data"))


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.bin"))


def size_of(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def test_blocks_come_by_ranges_once(site: Site, tmp_path: Path) -> None:
    dataset = opened(site, tmp_path)
    block = dataset.block(3)
    assert not block.tokens.flags.writeable and block.tokens.dtype == np.uint16
    assert np.shares_memory(block.tokens, dataset.block(3).tokens)
    (asked,) = site.asked("tar")
    assert site.sent < dataset.block_info(3).tokens * 2 + os.path.getsize(site.folder / "data" / INDEX_FILE) + 5000
    assert asked[1] is not None
    assert read(dataset) == local(site)
    assert len(site.asked("tar")) == dataset.blocks
    assert read(opened(site, tmp_path)) == local(site)  # as another process would
    assert len(site.asked("tar")) == dataset.blocks


def test_no_file_stays_open(site: Site, tmp_path: Path) -> None:
    dataset = opened(site, tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    blocks = [dataset.block(i) for i in range(dataset.blocks)]
    assert len(os.listdir("/proc/self/fd")) <= before + 4  # connections
    assert len(blocks) == dataset.blocks > 4


@pytest.mark.parametrize("fault", [status(500), status(503), status(429), reset, cut, flip, stall(1.0)])
def test_what_passes_is_tried_again(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: object
) -> None:
    state = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    site.faults = [("tar", fault), ("tar", fault), ("index", fault)]  # type: ignore[list-item]
    dataset = opened(site, tmp_path)
    assert read(dataset) == local(site)
    assert not site.faults
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state  # type: ignore[union-attr]
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) <= 3 and all("attempt" in record.getMessage() for record in warned)


@pytest.mark.parametrize(
    ("fault", "attempts", "reason"),
    [
        (status(500), 4, "the server answered 500"),
        (status(403), 1, "the server answered 403"),
        (cut, 4, "ended early"),
        (flip, 4, "checksum"),
        (stall(1.0), 4, "no answer for 0.4 s"),
    ],
)
def test_what_stays_is_an_error(site: Site, tmp_path: Path, fault: object, attempts: int, reason: str) -> None:
    dataset = opened(site, tmp_path)
    info = dataset.block_info(1)
    site.always = [("tar", fault)]  # type: ignore[list-item]
    with pytest.raises(DataError) as error:
        dataset.block(1)
    text = str(error.value)
    assert reason in text and f"{attempts} attempt" in text and "\n" not in text
    assert f"{site.url}/data: shard train-000000.tar, block {info.key}" in text
    assert len(site.asked("tar")) == attempts
    site.always = []
    assert read(dataset) == local(site)  # and then it goes on
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_missing_shard_and_a_missing_dataset(site: Site, tmp_path: Path) -> None:
    dataset = opened(site, tmp_path)
    (site.folder / "data" / dataset.index.shards[1].name).unlink()
    with pytest.raises(DataError, match=r"shard train-000001.tar, block .*: the shard is missing"):
        read(dataset)
    with pytest.raises(DataError, match=f"no dataset at '{site.url}/other': index.json is missing"):
        ShardSet.open(f"{site.url}/other", options(tmp_path))


def test_a_dataset_that_changes_is_never_mixed(site: Site, tmp_path: Path) -> None:
    dataset = opened(site, tmp_path)
    dataset.block(0)
    shutil.rmtree(site.folder / "data")
    write(site.folder / "data", make_documents(200, seed=1))
    with pytest.raises(DataError, match="another one by now"):
        dataset.block(1)
    assert read(opened(site, tmp_path)) == local(site)  # the new one, whose blocks have the same names and numbers
    assert len({file.parent for file in cached(tmp_path)}) == 2


def test_a_server_without_ranges(site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site.ranges = False
    dataset = opened(site, tmp_path)
    assert read(dataset) == local(site)
    assert [file.stat().st_size for file in cached(tmp_path)] == [shard.bytes for shard in dataset.index.shards]
    assert len(site.asked("tar")) <= len(dataset.index.shards) + 1  # one asked for a range
    assert sum("whole shards" in record.getMessage() for record in caplog.records) == 1
    site.always = [("tar", flip)]
    with pytest.raises(DataError, match=r"shard train-000000.tar, block .*sha256"):
        ShardSet.open(f"{site.url}/data", RemoteOptions(str(tmp_path / "other"), 1, FAST)).block(0)


def test_a_damaged_entry_is_fetched_again(site: Site, tmp_path: Path) -> None:
    opened(site, tmp_path).block(0)
    (entry,) = cached(tmp_path)
    data = bytearray(entry.read_bytes())
    data[100] ^= 1
    entry.write_bytes(data)
    assert read(opened(site, tmp_path)) == local(site)


def test_the_cache_keeps_to_its_size(site: Site, tmp_path: Path) -> None:
    dataset = opened(site, tmp_path, cache_bytes=25_000)  # two blocks and a half
    blocks = []
    for i in range(dataset.blocks):
        blocks.append(dataset.block(i))
        assert size_of(cached(tmp_path)) <= 25_000
    documents = [document for block in blocks for document in np.split(block.tokens, block.offsets[1:-1])]
    assert [document.tolist() for document in documents] == [tokens for tokens, _ in local(site)]  # evicted, still open
    del blocks, documents
    site.requests.clear()
    dataset.block(dataset.blocks - 1)
    assert not site.requests  # what came last is still there
    for file in cached(tmp_path):
        file.unlink()  # by somebody else
    assert read(dataset) == local(site)


def test_only_entries_are_removed_and_the_oldest_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000, "sha256:abc")
    (tmp_path / "mine.bin").write_bytes(bytes(5000))
    (cache.folder / "note.txt").write_bytes(bytes(5000))

    def make(key: str) -> None:
        with cache.making(key, 300, threading.Event()) as part:
            assert part is not None
            part.write(bytes(300))
            part.finish()

    for key in "abc":
        make(key)
        time.sleep(0.01)
    assert cache.open("a", 300) is not None  # used: now b is the oldest
    make("d")
    assert [key for key in "abcd" if (cache.folder / f"{key}.bin").exists()] == ["a", "c", "d"]
    assert (tmp_path / "mine.bin").exists() and (cache.folder / "note.txt").exists()


def test_prepared_blocks_are_there_and_failures_are_kept(site: Site, tmp_path: Path) -> None:
    dataset = opened(site, tmp_path)
    site.always = [("tar", slow(0.1))]
    began = time.monotonic()
    dataset.prepare([0, 1, 2, 3, 0])
    assert time.monotonic() - began < 0.1
    for i in range(4):
        dataset.block(i)
    assert time.monotonic() - began < 0.35  # one after another takes 0.4
    assert len(site.asked("tar")) == 4
    site.always = [("tar", status(403))]
    dataset.prepare([5])
    while len(site.asked("tar")) < 5:
        time.sleep(0.01)
    time.sleep(0.2)
    site.always = []
    with pytest.raises(DataError, match="403"):
        dataset.block(5)
    dataset.block(5)
    ShardSet.open(site.folder / "data").prepare([0, 1])  # a hint that a folder does not need


def test_a_stalled_server_holds_nobody_up(site: Site, tmp_path: Path) -> None:
    dataset = opened(site, tmp_path, patience=Patience())  # type: ignore[arg-type]
    site.always = [("tar", stall(30))]
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            dataset.block(0)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    time.sleep(0.3)
    assert dataset.remote is not None
    dataset.remote.close()
    thread.join(2)
    assert not thread.is_alive() and "closed" in str(failed[0])


def _read_all(url: str, folder: str, limit: int, seed: int, results: object) -> None:
    dataset = ShardSet.open(url, RemoteOptions(folder, limit / 1e9, FAST))
    order = np.random.default_rng(seed).permutation(np.repeat(np.arange(dataset.blocks), 4))
    total = sum(int(dataset.block(i).tokens.sum(dtype=np.int64)) for i in order.tolist())
    results.put(total)  # type: ignore[attr-defined]


def test_processes_share_a_small_cache(site: Site, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    words = (f"{site.url}/data", str(tmp_path / "cache"), 40_000)
    children = [context.Process(target=_read_all, args=(*words, seed, results)) for seed in range(2)]
    for child in children:
        child.start()
    most = 0
    while any(child.is_alive() for child in children):
        sizes = []
        for file in (tmp_path / "cache").rglob("*.bin"):
            try:
                sizes.append(file.stat().st_size)
            except FileNotFoundError:
                continue
        most = max(most, sum(sizes))
        time.sleep(0.002)
    expected = 4 * sum(sum(tokens) for tokens, _ in local(site))
    assert [results.get(timeout=5) for _ in children] == [expected] * 2
    assert 0 < most <= 40_000 + 2 * 10_000


def test_a_killed_process_leaves_nothing(site: Site, tmp_path: Path) -> None:
    site.always = [("tar", stall(60))]
    context = multiprocessing.get_context("spawn")
    words = (f"{site.url}/data", str(tmp_path / "cache"), 10_000_000, 0, context.Queue())
    child = context.Process(target=_read_all, args=words)
    child.start()
    while not list((tmp_path / "cache").rglob("*.part")):
        assert child.is_alive()
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert list((tmp_path / "cache").rglob("*.part"))
    site.always = []
    dataset = opened(site, tmp_path)
    assert not list((tmp_path / "cache").rglob("*.part"))
    assert read(dataset) == local(site)
    assert int((tmp_path / "cache" / "usage").read_text()) == size_of(cached(tmp_path))


def test_a_full_disk_is_a_clear_error(site: Site, tmp_path: Path) -> None:
    program = f"""
import resource
from refusion_train.data.remote import RemoteOptions
from refusion_train.data.shards import ShardSet
dataset = ShardSet.open({site.url + "/data"!r}, RemoteOptions({str(tmp_path / "cache")!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
dataset.block(0)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "cannot be used: File too large; free space there, lower data.cache_gb" in run.stderr.splitlines()[-1]
    assert not list((tmp_path / "cache").rglob("*.part"))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache of remote data .*data.cache_dir"):
        ShardSet.open(f"{site.url}/data", RemoteOptions(str(tmp_path / "file"), 1, FAST))


@pytest.mark.parametrize("kind", ["file", "memory", "pipe"])
def test_other_kinds_of_urls(site: Site, tmp_path: Path, kind: str) -> None:
    import fsspec

    folder = site.folder / "data"
    urls = {"file": f"file://{folder}", "memory": "memory://remote-test/data", "pipe": f"pipe:cat {folder}/{{file}}"}
    if kind == "memory":
        fsspec.filesystem("memory").put(str(folder), "/remote-test/data", recursive=True)
    assert read(ShardSet.open(urls[kind], options(tmp_path))) == local(site)
    assert bool(cached(tmp_path)) == (kind != "file")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/x", "pip install s3fs"),
        ("gs://bucket/x", "pip install gcsfs"),
        ("nonsense://x", "Protocol not known"),
        ("pipe:cat x", "put {file} where"),
        ("pipe:cat no-such-folder/{file}", "No such file"),
        ("http://127.0.0.1:9/x", "index.json could not be fetched"),
    ],
)
def test_urls_that_cannot_be_read(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        ShardSet.open(url, options(tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_urls_and_names() -> None:
    assert is_url("s3://b/x") and is_url("pipe:cat {file}") and not is_url("/a/b") and not is_url("file:///a")
    assert join("https://h/d/?sig=1", "a.tar") == "https://h/d/a.tar?sig=1"
    assert join("s3://b/d", "a.tar") == "s3://b/d/a.tar"
    assert join("pipe:cat /d/{file}", "a b;c") == "cat /d/'a b;c'"
    assert shown("https://me:secret@h/d?sig=1") == "https://h/d"
    assert shown("s3://b/d") == "s3://b/d"
