"""Shards do not depend on the number of workers, nor on when and how often the build was killed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

import data_tools
from data_tools import chunks, sinks
from data_tools.build_shards import build_shards
from refusion_train.errors import DataError

ROOT = Path(data_tools.__file__).parent.parent
SETTINGS = {"val_fraction": 0.2, "shard_bytes": 200_000, "block_tokens": 20_000}
ORDERS: dict[str, dict[str, object]] = {
    "plain": {},
    "dedup": {"dedup": True, "min_tokens": 10},
    "shuffle": {"dedup": True, "shuffle": 7},
}

# Small chunks and a checkpoint behind each, so that a kill meets every state.
PROGRAM = """
import json, sys
import data_tools.chunks, data_tools.sinks
data_tools.chunks.CHUNK_BYTES = 20_000
data_tools.sinks._EMIT_TOKENS = 5_000
from data_tools.build_shards import build_shards
if __name__ == "__main__":
    corpus, tokenizer, out, workers, options = sys.argv[1:]
    build_shards([corpus], tokenizer, out, workers=int(workers), progress=False, **json.loads(options))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 400 kB in files of several kinds, with equal documents and broken lines."""
    folder = tmp_path_factory.mktemp("kills") / "corpus"
    folder.mkdir()
    rng = random.Random(3)
    words = ["the cat", "<s>", "\n", "\t", "é", "🙂", "\u2581", "sees a dog.", "def f(x):\n    return x"]
    texts = [f"{i}:" + "".join(rng.choices(words, k=1 + i % 90)) for i in range(900)]
    texts += texts[100:300]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[50] = "broken"
    (folder / "1.jsonl").write_text("\n".join(lines[:600]) + "\n")
    (folder / "3.json").write_text("[" + ",\n".join(lines[600:]) + "]")
    for i in range(30):
        (folder / f"2-{i:02d}.txt").write_text(f"text {i} " + texts[i] * 3)
    return folder


def sums(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def start(corpus: Path, tokenizer: Path, out: Path, workers: int, **options: object) -> subprocess.Popen[bytes]:
    words = [str(corpus), str(tokenizer), str(out), str(workers), json.dumps({**SETTINGS, **options})]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *words], cwd=ROOT)


@pytest.fixture(scope="module", params=list(ORDERS))
def whole(
    request: pytest.FixtureRequest, corpus: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, object]]:
    """An undisturbed build by one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    options = {**SETTINGS, **ORDERS[request.param]}
    report = build_shards([str(corpus)], str(tiny_tokenizer), str(out), workers=1, progress=False, **options)  # type: ignore[arg-type]
    assert len(list((out / "train").glob("*.tar"))) >= 3 and report.broken == 1
    if options.get("dedup"):
        assert report.duplicates >= 190
    return out, ORDERS[request.param]


@pytest.mark.parametrize(("whole", "workers"), [("plain", 2), ("plain", 5), ("shuffle", 2)], indirect=["whole"])
def test_the_number_of_workers_changes_nothing(
    whole: tuple[Path, dict[str, object]], corpus: Path, tiny_tokenizer: Path, tmp_path: Path, workers: int
) -> None:
    assert start(corpus, tiny_tokenizer, tmp_path / "out", workers, **whole[1]).wait() == 0
    assert sums(tmp_path / "out") == sums(whole[0])


def forked(corpus: Path, tokenizer: Path, out: Path, options: dict[str, object]) -> int:
    """The build in a child of this process, which starts at once; its process id."""
    child = os.fork()
    if not child:
        try:
            chunks.CHUNK_BYTES, sinks._EMIT_TOKENS = 20_000, 20_000
            sinks._BUCKET_BITS, sinks._DIGEST_FILES = 2, 4  # every file is flushed at every checkpoint
            build_shards(
                [str(corpus)], str(tokenizer), str(out), workers=1, progress=False, checkpoint_seconds=0,
                **{**SETTINGS, **options},  # type: ignore[arg-type]
            )  # fmt: skip
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def test_killed_at_ten_random_moments_and_then_finished(
    whole: tuple[Path, dict[str, object]], corpus: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    rng, seconds = random.Random(len(whole[1])), 0.0
    for name in ("cold", "warm"):
        begun = time.monotonic()
        assert os.waitpid(forked(corpus, tiny_tokenizer, tmp_path / name, whole[1]), 0)[1] == 0
        seconds = time.monotonic() - begun
    kills = went_on = builds = 0
    while kills < 10 or not builds:
        out = tmp_path / f"out{builds}"
        checkpoint = tmp_path / f"out{builds}.partial" / ".journal" / "checkpoint.npz"
        child = forked(corpus, tiny_tokenizer, out, whole[1])
        if kills < 10:
            time.sleep(seconds * rng.uniform(0.1, 0.6))
            os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] == 0:  # it was faster than the kill, or not killed any more
            assert sums(out) == sums(whole[0])
            builds += 1
        else:
            kills += 1
            went_on += checkpoint.exists()
    assert went_on >= 2
    if not (tmp_path / f"out{builds}").exists():
        assert os.waitpid(forked(corpus, tiny_tokenizer, tmp_path / f"out{builds}", whole[1]), 0)[1] == 0
        assert sums(tmp_path / f"out{builds}") == sums(whole[0])
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("whole", ["shuffle"], indirect=True)  # the case that has all steps
@pytest.mark.parametrize("point", range(8))
def test_killed_at_every_kind_of_step(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, whole: tuple[Path, dict[str, object]], point: int
) -> None:
    """Before and after flushes, renames and the like, somewhere in the build; then finished."""
    names = [(os, "fsync"), (os, "replace"), (os, "rename"), (np, "savez")]
    owner, name = names[point // 2]
    real, out, calls = getattr(owner, name), tmp_path / "out", 0
    nth = random.Random(point).randint(1, 6) if name != "rename" else 1

    def deadly(*arguments, **options):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == nth and not point % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)
    try:
        child = forked(corpus, tiny_tokenizer, out, whole[1])
    finally:
        setattr(owner, name, real)
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    assert killed
    assert os.waitpid(forked(corpus, tiny_tokenizer, out, whole[1]), 0)[1] == 0
    assert sums(out) == sums(whole[0])


def test_workers_end_with_their_parent(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    import psutil

    process = start(corpus, tiny_tokenizer, tmp_path / "out", 2)
    children: list[psutil.Process] = []
    for _ in range(600):
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        if len(children) >= 3:  # the two workers and their resource tracker
            break
        time.sleep(0.02)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


@pytest.fixture
def interrupted(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A copy of the corpus and a build of it that stopped behind its first checkpoint."""
    mine = tmp_path / "corpus"
    mine.mkdir()
    for path in corpus.iterdir():
        (mine / path.name).write_bytes(path.read_bytes())
    process = start(mine, tiny_tokenizer, tmp_path / "out", 1, checkpoint_seconds=0)
    while not (tmp_path / "out.partial" / ".journal" / "checkpoint.npz").exists():
        assert process.poll() is None, "the build ended before its first checkpoint"
        time.sleep(0.005)
    process.kill()
    process.wait()
    return mine, [str(mine)]


def test_what_changed_is_named(interrupted: tuple[Path, list[str]], tiny_tokenizer: Path, tmp_path: Path) -> None:
    mine, inputs = interrupted
    options = {**SETTINGS, "progress": False}
    out = str(tmp_path / "out")

    def build(**changes: object) -> None:
        build_shards(inputs, str(tiny_tokenizer), out, **{**options, **changes})  # type: ignore[arg-type]

    with pytest.raises(DataError, match=r"an interrupted build of another kind: val_fraction was 0.2, is 0.3; give"):
        build(val_fraction=0.3)
    with pytest.raises(DataError, match=r"max_tokens was None, is 100; min_tokens was 0, is 5"):
        build(max_tokens=100, min_tokens=5)
    with open(mine / "1.jsonl", "a") as file:
        file.write("\n")
    os.utime(mine / "3.json", (1, 1))
    (mine / "new.txt").write_text("new")
    with pytest.raises(DataError, match=r"input '.*1.jsonl' changed \(\d+ to \d+ bytes\); input '.*3.json' changed .*"):
        build()
    assert (tmp_path / "out.partial").is_dir()  # a refusal costs nothing
    build(fresh=True)
    assert (tmp_path / "out" / "train" / "index.json").exists()


def test_finished_inputs_are_not_read_again(
    interrupted: tuple[Path, list[str]], tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, int]] = []
    real = chunks._read_file

    def noted(file, number, start, *rest):  # type: ignore[no-untyped-def]
        opened.append((Path(file.path).name, start.offset))
        return real(file, number, start, *rest)

    monkeypatch.setattr(chunks, "_read_file", noted)
    build_shards(interrupted[1], str(tiny_tokenizer), str(tmp_path / "out"), progress=False, **SETTINGS)  # type: ignore[arg-type]
    assert opened[0][0] != "1.jsonl" or opened[0][1] > 0
