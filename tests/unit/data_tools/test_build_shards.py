"""Building datasets: every text comes back, nothing is half-written, lost silently or overwritten."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

import data_tools
from data_tools import chunks
from data_tools.build_shards import BuildReport, build_shards, goes_to_validation
from data_tools.report import PROBLEMS_FILE
from refusion_train.data.shards import ShardSet, check_tokenizer
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import ConfigError, DataError

ROOT = Path(data_tools.__file__).parent.parent


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["the cat", "<s>", "</s>", "<mask>", "\n", "\t", "  ", "é", "🙂", "\u2581", "<0x0A>", "sees a dog."]
    return [f"{i}:" + "".join(rng.choices(words, k=rng.randint(1, 60))) for i in range(count)]


def write_lines(path: Path, texts: list[str]) -> None:
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(data))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three files of JSON lines in three compressions, two texts and an empty one; 300 documents with text."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = make_texts(298)
    write_lines(folder / "1.jsonl", [*texts[:100], ""])
    write_lines(folder / "2.jsonl.gz", texts[100:200])
    write_lines(folder / "3.jsonl.zst", texts[200:])
    (folder / "4.txt").write_bytes(b" leading\r\nspace")
    (folder / "5.txt").write_bytes(b"\n\ttrailing\n\n")
    (folder / "6.txt").write_bytes(b"")
    return folder


EXPECTED = [*make_texts(298), " leading\r\nspace", "\n\ttrailing\n\n"]


@pytest.fixture
def build(tmp_path: Path, corpus: Path, tiny_tokenizer: Path):  # type: ignore[no-untyped-def]
    def run(*inputs: str, out: str = "out", **options: object) -> BuildReport:
        options = {"shard_bytes": 20_000, "block_tokens": 2000, "progress": False, **options}
        return build_shards(inputs or (str(corpus),), str(tiny_tokenizer), str(tmp_path / out), **options)  # type: ignore[arg-type]

    return run


def texts_of(path: Path) -> list[str]:
    """Decoded documents, with begin and end tokens checked."""
    dataset = ShardSet.open(path)
    tokenizer = Tokenizer.load(path / "tokenizer")
    check_tokenizer(dataset, tokenizer)
    control = set(tokenizer.special_ids.values())
    texts = []
    for i in range(dataset.blocks):
        block = dataset.block(i)
        for start, end in zip(block.offsets[:-1], block.offsets[1:], strict=True):
            ids = block.tokens[start:end].tolist()
            assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
            assert control.isdisjoint(ids[1:-1]), "text became a control token"
            texts.append(tokenizer.decode(ids))
        assert not block.prompts.any()
    return texts


def test_every_text_comes_back_in_order(build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    report = build()
    assert texts_of(tmp_path / "out" / "train") == EXPECTED
    assert sorted(os.listdir(tmp_path / "out")) == ["problems.txt", "train"]  # of the two empty documents
    assert sorted(os.listdir(tmp_path)) == ["corpus", "out"]
    assert (report.documents, report.empty, report.broken) == (300, 2, 0)
    assert report.text_bytes == sum(len(text.encode()) for text in EXPECTED)
    (index,) = report.datasets.values()
    assert index == ShardSet.open(tmp_path / "out" / "train").index
    assert len(index.shards) > 1
    summary = report.summary()
    assert "300 documents" in summary and "2 empty documents were left out" in summary and "broken" not in summary


def test_the_size_of_chunks_changes_nothing(build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    reference = list(build().datasets.values())
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 700)
    other = list(build(out="two").datasets.values())
    assert [index.shards for index in other] == [index.shards for index in reference]
    for file in sorted((tmp_path / "out" / "train").glob("*.tar")):
        assert file.read_bytes() == (tmp_path / "two" / "train" / file.name).read_bytes()


def test_building_imports_no_torch(tmp_path: Path, corpus: Path, tiny_tokenizer: Path) -> None:
    program = (
        "import sys; from data_tools.build_shards import build_shards; import data_tools.inspect\n"
        "build_shards([sys.argv[1]], sys.argv[2], sys.argv[3], progress=False)\n"
        "data_tools.inspect.verify(sys.argv[3], progress=False)\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    arguments = [str(corpus), str(tiny_tokenizer), str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, cwd=ROOT)


# ---------------------------------------------------------------------------------------------------- validation


def test_validation_is_chosen_by_the_text_alone(build, tmp_path: Path, corpus: Path) -> None:  # type: ignore[no-untyped-def]
    report = build(val_fraction=0.2)
    train, validation = texts_of(tmp_path / "out" / "train"), texts_of(tmp_path / "out" / "validation")
    assert sorted(train + validation) == sorted(EXPECTED)
    assert train == [text for text in EXPECTED if not goes_to_validation(text.encode(), 0.2)]
    assert 30 <= len(validation) <= 90
    assert list(report.datasets) == [str(tmp_path / "out" / "train"), str(tmp_path / "out" / "validation")]
    # More inputs, another order: what was in validation stays there.
    write_lines(corpus / "0.jsonl", make_texts(50, seed=1))
    build(out="more", val_fraction=0.2)
    assert set(validation) <= set(texts_of(tmp_path / "more" / "validation"))
    assert set(train).isdisjoint(texts_of(tmp_path / "more" / "validation"))


def test_a_larger_fraction_contains_a_smaller_one() -> None:
    texts = [str(i).encode() for i in range(4000)]
    small, large = ({text for text in texts if goes_to_validation(text, f)} for f in (0.1, 0.3))
    assert small < large
    assert 320 < len(small) < 480 and 1050 < len(large) < 1350
    assert not any(goes_to_validation(text, 0.0) for text in texts)


def test_a_part_without_documents_is_an_error(build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="val_fraction=1e-09 of 300 documents leaves none for validation"):
        build(val_fraction=1e-9)
    assert os.listdir(tmp_path) == ["corpus"]


# -------------------------------------------------------------------------------------------------- broken input


def test_broken_lines_are_counted_and_all_named(build, tmp_path: Path, corpus: Path) -> None:  # type: ignore[no-untyped-def]
    good = make_texts(3, seed=2)
    with open(corpus / "9.jsonl", "wb") as file:
        file.write(json.dumps({"text": good[0]}).encode() + b"\n")
        file.write(b"{broken\n" * 30)
        file.write(json.dumps({"text": good[1]}).encode() + b'\n{"text": "\xff"}\n')
        file.write(json.dumps({"text": good[2]}).encode() + b"\n")
    (corpus / "8.txt").write_bytes(b"a\n\xff")
    report = build()
    assert texts_of(tmp_path / "out" / "train") == EXPECTED + good
    assert (report.documents, report.broken, len(report.examples)) == (303, 32, 20)
    listed = (tmp_path / "out" / PROBLEMS_FILE).read_text().splitlines()
    assert len(listed) == 34 and sum("empty document" in line for line in listed) == 2
    listed = [line for line in listed if "empty document" not in line]
    assert listed[0] == f"{corpus / '8.txt'}:2: byte 0xff is not UTF-8 (invalid start byte)"
    assert listed[1].startswith(f"{corpus / '9.jsonl'}:2: not valid JSON")
    assert listed[-1].startswith(f"{corpus / '9.jsonl'}:33: ")
    assert "32 broken lines were left out\n2 empty documents were left out\nall of these are in " in report.summary()
    with pytest.raises(DataError, match=r"8.txt:2: byte 0xff is not UTF-8 .*; leave out --strict"):
        build(str(corpus / "8.txt"), out="strict", strict=True)
    with pytest.raises(DataError, match=r"1.jsonl:101: empty document; leave out --strict"):
        build(out="strict", strict=True)
    assert not list(tmp_path.glob("strict*"))


def test_a_truncated_gzip_gives_what_can_be_read(build, tmp_path: Path, corpus: Path) -> None:  # type: ignore[no-untyped-def]
    whole = (corpus / "2.jsonl.gz").read_bytes()
    (corpus / "2.jsonl.gz").write_bytes(whole[:-200])
    report = build()
    texts = texts_of(tmp_path / "out" / "train")
    assert 100 + len(EXPECTED[200:]) < len(texts) < 300
    assert report.broken == 1 and "2.jsonl.gz" in report.examples[1].file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": ""}\n', r"no document in the corpus of 1 files \(1 empty documents, 0 broken lines\)"),
        (b"\n", r"no document in the corpus of 1 files \(0 empty documents, 0 broken lines\)"),
        (b'{"body": "x"}\n', r"1 broken lines\); first broken line: .*a.jsonl:1: no field 'text' \(fields: body\)"),
    ],
)
def test_a_corpus_without_documents(build, tmp_path: Path, content: bytes, message: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        build(str(tmp_path / "a.jsonl"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, "val_fraction=1.0 must be at least 0 and less than 1"),
        ({"val_fraction": -0.1}, "val_fraction=-0.1"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"shard_bytes": 0}, "shard_bytes=0 must be at least 1"),
        ({"block_tokens": 0}, "block_tokens=0 must be at least 1"),
    ],
)
def test_wrong_options(build, options: dict[str, object], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_a_missing_tokenizer_is_an_error(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer in"):
        build_shards([str(corpus)], str(tmp_path), str(tmp_path / "out"), progress=False)


# -------------------------------------------------------------------------------------------------------- output


def test_nothing_is_overwritten_silently(build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    build()
    before = ShardSet.open(tmp_path / "out" / "train").fingerprint
    with pytest.raises(DataError, match="exists already"):
        build(val_fraction=0.1)
    assert build().already  # the same again is no error and writes nothing
    build(val_fraction=0.1, overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["problems.txt", "train", "validation"]
    assert ShardSet.open(tmp_path / "out" / "train").fingerprint != before
    (tmp_path / "out" / "thesis.doc").write_text("all of my work")
    with pytest.raises(DataError, match="holds other things than this command writes; --overwrite does not touch it"):
        build(overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="exists already"):
        build(out="file")
    with pytest.raises(DataError, match="holds other things"):
        build(out="file", overwrite=True)
    (tmp_path / "empty").mkdir()
    build(out="empty")
    assert sorted(os.listdir(tmp_path)) == ["corpus", "empty", "file", "out"]


def test_a_failed_replacement_leaves_the_old_dataset(build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    build()
    (tmp_path / "bad.jsonl").write_text("bad\n")
    with pytest.raises(DataError, match="no document"):
        build(str(tmp_path / "bad.jsonl"), overwrite=True)
    assert texts_of(tmp_path / "out" / "train") == EXPECTED
    assert not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_one_clear_line(build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write '.*out': No space left on device"):
        build()
    assert os.listdir(tmp_path) == ["corpus"]


def test_two_builds_into_one_folder_at_once(build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "train").mkdir()
    with open(tmp_path / "out.partial" / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another process is writing '.*out' now"):
            build()
        assert (tmp_path / "out.partial" / "train").is_dir()
    build()
    assert sorted(os.listdir(tmp_path)) == ["corpus", "out"]


KILL = """
import os, signal, sys
from data_tools.build_shards import build_shards
import data_tools.output, refusion_train.data.shard_index, refusion_train.data.shard_writer as shards
calls = 0
def deadly(function, nth):
    def wrapper(*arguments, **options):
        global calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return wrapper
owner, name, nth = sys.argv[1:4]
owner = {"writer": shards.TarSequence, "index": refusion_train.data.shard_index.Index, "os": os}[owner]
setattr(owner, name, deadly(getattr(owner, name), int(nth)))
build_shards(
    [sys.argv[4]], sys.argv[5], sys.argv[6], val_fraction=0.3, shard_bytes=20000, block_tokens=2000, progress=False,
    overwrite=sys.argv[7] == "replace",
)
"""


@pytest.mark.parametrize(
    "point",
    [
        ("writer", "_flush", 3),
        ("writer", "_close_tar", 2),
        ("index", "write", 2),
        ("os", "rename", 1),
    ],
    ids=lambda point: "-".join(map(str, point)),
)
def test_a_killed_build_leaves_no_dataset_and_is_no_obstacle(  # type: ignore[no-untyped-def]
    build, tmp_path: Path, corpus: Path, tiny_tokenizer: Path, point: tuple[str, str, int]
) -> None:
    arguments = [*map(str, point), str(corpus), str(tiny_tokenizer), str(tmp_path / "out"), "new"]
    run = subprocess.run([sys.executable, "-c", KILL, *arguments], cwd=ROOT, check=False)
    assert run.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    report = build(val_fraction=0.3)
    assert report.documents == 300
    assert sorted(os.listdir(tmp_path)) == ["corpus", "out"]
    reference = build(out="undisturbed", val_fraction=0.3)
    assert list(reference.datasets.values()) == list(report.datasets.values())


def test_killed_between_taking_away_the_old_and_placing_the_new(  # type: ignore[no-untyped-def]
    build, tmp_path: Path, corpus: Path, tiny_tokenizer: Path
) -> None:
    build()
    arguments = ["os", "rename", "2", str(corpus), str(tiny_tokenizer), str(tmp_path / "out"), "replace"]
    run = subprocess.run([sys.executable, "-c", KILL, *arguments], cwd=ROOT, check=False)
    assert run.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["corpus", "out.old", "out.partial"]
    assert build().already  # the old one is back in its place
    assert texts_of(tmp_path / "out" / "train") == EXPECTED
    build(overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["corpus", "out"]
