"""Corpora as documents: which files, in which order, and every broken line named."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools import chunks
from data_tools.corpus import Corpus
from data_tools.documents import Broken, Document, find_files
from refusion_train.errors import DataError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: str, content: bytes | str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(*inputs: str, **options: object) -> list[Document | Broken]:
    return list(Corpus(find_files(inputs), **options))  # type: ignore[arg-type]


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


# --------------------------------------------------------------------------------------------------------- files


def test_folders_globs_and_files_give_each_file_once_in_order(folder: Path) -> None:
    for name in ("b/2.txt", "b/1.jsonl", "a.txt", "b/c/3.txt.gz", "b/c/4.jsonl.zst", "b/skip.py", "b/.hidden.txt"):
        put(name, b"")
    put("b/.git/x.txt", b"")
    found = [file.path for file in find_files(["b", "a.txt", "b/*.txt", "./a.txt", "**/*.py"])]
    assert found == ["a.txt", "b/1.jsonl", "b/2.txt", "b/c/3.txt.gz", "b/c/4.jsonl.zst", "b/skip.py"]
    kinds = {file.path: (file.kind, file.compression) for file in find_files(["b"])}
    assert kinds == {
        "b/1.jsonl": ("lines", ""),
        "b/2.txt": ("text", ""),
        "b/c/3.txt.gz": ("text", ".gz"),
        "b/c/4.jsonl.zst": ("lines", ".zst"),
    }
    both = [[file.path for file in find_files(names)] for names in (["b/c", "a.txt"], ["a.txt", "b/c"])]
    assert both[0] == both[1]


def test_linked_folders_are_read_once_even_in_a_circle(folder: Path) -> None:
    put("data/x/1.txt", b"1")
    os.symlink("../data", "data/circle")
    os.symlink("data", "link")
    assert [file.path for file in find_files(["link"])] == ["link/x/1.txt"]
    assert len(find_files(["link", "data"])) == 1


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("nowhere.txt", "input 'nowhere.txt' is no file or folder"),
        ("*.nothing", "matches no file"),
        ("empty", r"folder 'empty' holds no .txt, .jsonl, .json, .parquet, .tar file .* 'empty/\*\*/\*.py'"),
        ("x.arrow", r"'x.arrow': .arrow files are not read; convert it to .parquet"),
        ("x.parquet.gz", r"'x.parquet.gz': a compressed .parquet file is not read; unpack it"),
    ],
)
def test_inputs_that_cannot_be_read(folder: Path, item: str, message: str) -> None:
    (folder / "empty").mkdir()
    for name in ("x.arrow", "x.parquet.gz"):
        put(name, b"")
    with pytest.raises(DataError, match=message):
        find_files([item])
    with pytest.raises(DataError, match="no input given"):
        find_files([])


def test_a_file_that_vanishes_is_an_error(folder: Path) -> None:
    files = find_files([put("a.txt", b"a")])
    os.unlink("a.txt")
    with pytest.raises(DataError, match=r"a.txt: cannot be read: No such file"):
        list(Corpus(files))


# ----------------------------------------------------------------------------------------------------- documents


def test_text_files_are_documents_as_they_stand(folder: Path) -> None:
    put("1.txt", " \r\n\ttext\n\n")
    put("2.txt", b"")
    put("3.txt", b"\xef\xbb\xbfmarked")
    put("4.txt.gz", gzip.compress("漢字\n".encode()))
    assert read("*.txt*") == [
        Document(" \r\n\ttext\n\n", "1.txt", 1),
        Document("", "2.txt", 1),
        Document("marked", "3.txt", 1),
        Document("漢字\n", "4.txt.gz", 1),
    ]


def test_json_lines_with_every_kind_of_broken_line(folder: Path) -> None:
    good = {"text": "a\nb", "other": 1}
    content = b"\xef\xbb\xbf" + lines(good, {"body": "x", "n": 1}) + b'{"text": "cut\n' + b"\n  \n"
    content += lines([1], {"text": 5}, {"text": ""}) + b'{"text": "\xff"}\n{"text": "\\ud800"}\n{"text": "last"}'
    put("a.jsonl", content)
    found = read("a.jsonl")
    assert [item.line for item in found] == [1, 2, 3, 6, 7, 8, 9, 10, 11]
    assert [item.text for item in found if isinstance(item, Document)] == ["a\nb", "", "last"]
    reasons = {item.line: str(item) for item in found if isinstance(item, Broken)}
    assert reasons[2] == "a.jsonl:2: no field 'text' (fields: body, n)"
    assert reasons[3].startswith("a.jsonl:3: not valid JSON (column ")
    assert reasons[6] == "a.jsonl:6: not a JSON object but list"
    assert reasons[7] == "a.jsonl:7: field 'text' is not a string but int"
    assert "not valid JSON" in reasons[9] and "not valid JSON" in reasons[10]
    assert [item.text for item in read("a.jsonl", text_field="body") if isinstance(item, Document)] == ["x"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(), max_size=8), st.sampled_from(["", ".gz", ".zst"]), st.integers(0, 3))
def test_any_texts_through_json_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], compression: str, parts: int
) -> None:
    data = lines(*({"text": text} for text in texts))
    # Files of several members or frames, as tools that compress in parallel write them.
    cuts = [len(data) * i // (parts + 1) for i in range(parts + 2)]
    pieces = [data[a:b] for a, b in itertools.pairwise(cuts)]
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression]
    path = tmp_path_factory.mktemp("lines") / f"a.jsonl{compression}"
    path.write_bytes(b"".join(map(compress, pieces)))
    found = read(str(path))
    assert [item.text for item in found if isinstance(item, Document)] == texts == [item.text for item in found]  # type: ignore[union-attr]


def test_text_that_is_not_utf8_names_the_line(folder: Path) -> None:
    put("bad.txt", b"one\ntwo\nth\xe9ree\n")
    assert [str(item) for item in read("bad.txt")] == ["bad.txt:3: byte 0xe9 is not UTF-8 (invalid continuation byte)"]


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_truncated_compressed_file_is_not_taken_for_whole(folder: Path, compression: str) -> None:
    records = [{"text": f"{i} {os.urandom(20).hex()}"} for i in range(5000)]
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}[compression]
    whole = compress(lines(*records))
    put(f"a.jsonl{compression}", whole[: len(whole) * 2 // 3])
    *documents, last = read(f"a.jsonl{compression}")
    assert [item.text for item in documents if isinstance(item, Document)] == [
        record["text"] for record in records[: len(documents)]
    ]
    assert isinstance(last, Broken) and "the compressed file is damaged from here on" in last.reason
    assert last.line == len(documents) + 1 > 100


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst"])
def test_a_file_that_is_not_compressed_at_all(folder: Path, name: str) -> None:
    (item,) = read(put(name, b"this is no compressed file\n"))
    assert isinstance(item, Broken) and item.line == 1 and "damaged" in item.reason


def test_a_flipped_byte_in_gzip_is_noticed(folder: Path) -> None:
    whole = bytearray(gzip.compress(lines(*({"text": os.urandom(20).hex()} for _ in range(100)))))
    whole[-6] ^= 1  # the checksum itself
    put("a.jsonl.gz", bytes(whole))
    found = read("a.jsonl.gz")
    assert isinstance(found[-1], Broken) and "damaged" in found[-1].reason


def test_padding_after_gzip_is_no_damage_but_rubbish_is(folder: Path) -> None:
    whole = gzip.compress(lines({"text": "a"}))
    put("a.jsonl.gz", whole + bytes(20_000) + whole + bytes(20_000))
    assert [item.text for item in read("a.jsonl.gz") if isinstance(item, Document)] == ["a", "a"]
    put("a.jsonl.gz", whole + b"rubbish")
    good, bad = read("a.jsonl.gz")
    assert isinstance(good, Document) and isinstance(bad, Broken) and bad.line == 2


def test_what_is_too_long_is_broken_and_the_next_line_is_not(folder: Path) -> None:
    limit = 100
    fits = b'{"text": "' + b"x" * (limit - 12) + b'"}\n'
    assert len(fits) == limit + 1  # with its newline
    put("a.jsonl", fits + b" " * limit + fits + b'{"text": "' + b"y" * 5000 + b'"}\n' + lines({"text": "after"}))
    found = read("a.jsonl", max_document_bytes=limit)
    assert [type(item).__name__ for item in found] == ["Document", "Broken", "Broken", "Document"]
    assert str(found[2]) == "a.jsonl:3: longer than 100 bytes"
    assert found[3] == Document("after", "a.jsonl", 4)
    put("long.txt", b"x" * 101)
    assert [str(item) for item in read("long.txt", max_document_bytes=limit)] == ["long.txt:1: longer than 100 bytes"]
    put("fits.txt", b"x" * 100)
    assert read("fits.txt", max_document_bytes=limit) == [Document("x" * 100, "fits.txt", 1)]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_position_grows_to_the_total(folder: Path, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 50_000)
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression]
    for name in ("a", "b"):
        put(f"{name}.jsonl{compression}", compress(lines(*({"text": os.urandom(50).hex()} for _ in range(5000)))))
    corpus = Corpus(find_files(["*.jsonl*"]))
    positions = list(_positions(corpus))
    assert positions == sorted(positions)
    assert len(set(positions)) > 4 and positions[0] < corpus.total_bytes / 2
    assert corpus.position == corpus.total_bytes == sum(path.stat().st_size for path in folder.iterdir())


def _positions(corpus: Corpus) -> Iterator[int]:
    for _ in corpus:
        yield corpus.position
