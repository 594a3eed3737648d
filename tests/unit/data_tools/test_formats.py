"""Every kind of input gives its documents, from the begin and from any place, and says what is wrong in it."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import data_tools
from data_tools import chunks
from data_tools.chunks import Place, read_chunks
from data_tools.documents import Broken, Fields, find_files
from data_tools.records import Item, items_of
from refusion_train.errors import ConfigError, DataError

ROOT = Path(data_tools.__file__).parent.parent
TEXTS = [f'{i} é\n\t"{"x" * (i % 50)}" \u2028' for i in range(400)]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def tar_of(members: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def parquet_of(columns: dict[str, list[object]], rows: int = 100) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer, row_group_size=rows)
    return buffer.getvalue()


def json_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


CONTENTS = {
    ".jsonl": json_lines(TEXTS),
    ".json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    ".tar": tar_of([(f"{i:04d}.txt", text.encode()) for i, text in enumerate(TEXTS[:200])]
                   + [(f"x/{i:04d}.json", json.dumps({"text": text}).encode()) for i, text in enumerate(TEXTS[200:])]),
    ".parquet": parquet_of({"id": list(range(400)), "text": list(TEXTS)}),
}  # fmt: skip


def read(
    path: Path, fields: Fields | None = None, start: Place | None = None, **options: object
) -> list[Item | Broken]:
    fields = fields or Fields()
    found = read_chunks(find_files([str(path)], **options), fields, start)  # type: ignore[arg-type]
    return [item for chunk in found for item in items_of(chunk, fields, 1 << 20)]


def texts_of(items: list[Item | Broken]) -> list[str]:
    return [item.texts[0] for item in items if isinstance(item, Item)]


KINDS = [(kind, compression) for kind in CONTENTS for compression in COMPRESS if kind != ".parquet" or not compression]


@pytest.mark.parametrize(("kind", "compression"), KINDS)
def test_documents_from_the_begin_and_from_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, compression: str
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    path = tmp_path / f"a{kind}{compression}"
    path.write_bytes(COMPRESS[compression](CONTENTS[kind]))
    files = find_files([str(path)])
    whole = list(read_chunks(files, Fields()))
    assert texts_of([item for chunk in whole for item in items_of(chunk, Fields(), 1 << 20)]) == TEXTS
    assert len(whole) > 3 and whole[-1].position == path.stat().st_size
    done = 0
    for chunk in whole[::3]:
        rest = read(path, start=chunk.after)
        done = len(TEXTS) - len(texts_of(rest))
        assert texts_of(rest) == TEXTS[done:]
    assert done > 200


def test_json_that_is_no_list(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, texts, reason in [
        ('{"text": "one"}', ["one"], None),
        ('{"text": "one"}\n{"text": "two"}', ["one", "two"], None),
        ("[]", [], None),
        (' [ {"text": "one"} , {"text": "two"} ] ', ["one", "two"], None),
        ("5", [], "neither a JSON list nor an object"),
        ('[{"text": "one"}, {"text": "tw', ["one"], "not valid JSON from here on"),
        ('[{"text": "one"}, 7, {"text": "\\ud800"}, {"text": "two"}]', ["one", "two"], "not a JSON object but int"),
    ]:
        path.write_text(content)
        found = read(path)
        assert texts_of(found) == texts
        broken = [item for item in found if isinstance(item, Broken)]
        assert (reason is None) == (not broken)
        assert reason is None or broken[0].reason == reason
    assert [item.line for item in found] == [1, 2, 3, 4]


def test_fields_with_dots_and_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": {"b": "in"}, "q": "Q", "r": "R"}\n{"a.b": "flat", "q": "Q2", "r": 5}\n')
    (tmp_path / "b.parquet").write_bytes(parquet_of({"a": [{"b": "deep", "c": 1}], "q": ["Q3"], "r": [None]}))
    assert texts_of(read(tmp_path, Fields("a.b"))) == ["in", "flat", "deep"]
    found = read(tmp_path, Fields(prompt="q", response="r"))
    assert isinstance(found[0], Item) and found[0].texts == ("Q", "R")
    assert [str(item).split(":", 1)[1] for item in found[1:]] == [
        "2: field 'r' is not a string but int", "1: field 'r' is not a string but NoneType"
    ]  # fmt: skip
    found = read(tmp_path / "b.parquet", Fields("nothing"))
    assert [item.reason for item in found if isinstance(item, Broken)] == ["no column 'nothing' (columns: a, q, r)"]
    for wrong in (Fields(prompt="a"), Fields(prompt="a", response="b", messages="c")):
        with pytest.raises(ConfigError):
            wrong.check()


def test_what_is_wrong_is_noted_and_what_can_be_kept_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a\\u0000b"}\n{"text": "x", "text": "y"}\n{"text": "says \\"text\\" and \\"text\\"", "n": {"n": 1}}\n'
    )
    (tmp_path / "b.tar").write_bytes(tar_of([("k.txt", b"1"), ("k.txt", b"2"), ("k.jpg", b"3"), ("l.txt", b"\xff")]))
    found = read(tmp_path)
    assert texts_of(found) == ["a\0b", "y", 'says "text" and "text"', "1", "2"]
    assert [(Path(item.file).name, item.line, item.kind) for item in found if isinstance(item, Broken)] == [
        ("a.jsonl", 1, "nul"), ("a.jsonl", 2, "duplicate_key"), ("k.txt", 1, "duplicate_key"), ("k.jpg", 1, "not_text"),
        ("l.txt", 1, "broken"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [".tar", ".parquet"])
def test_a_file_cut_short_or_of_rubbish(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a{kind}"
    for content in (CONTENTS[kind][: len(CONTENTS[kind]) // 2 + 100], b"rubbish" * 1000):
        path.write_bytes(content)
        found = read(path)
        assert isinstance(found[-1], Broken) and "damaged" in found[-1].reason
        assert texts_of(found) == TEXTS[: len(found) - 1]


def test_lines_longer_than_the_limit_take_no_memory_and_lose_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    long = json_lines(["y" * 50_000])
    data = json_lines(TEXTS[:5]) + long + json_lines(TEXTS[5:20]) + long[:-1]
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    held = []
    for path in sorted(tmp_path.iterdir()):
        found = []
        for chunk in read_chunks(find_files([str(path)]), Fields(), limit=5000):
            held.append(chunk.bytes)
            found += items_of(chunk, Fields(), 5000)
        assert texts_of(found) == TEXTS[:20]
        assert [item.line for item in found if isinstance(item, Broken)] == [6, 22]
    assert max(held) < 10_000


def through_pipe(data: bytes, *words: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], input=data, capture_output=True, cwd=ROOT, check=False)  # type: ignore[return-value]


STDIN = """
import sys, json
from data_tools import chunks
chunks.CHUNK_BYTES = 400
from data_tools.documents import Fields, find_files, Broken
from data_tools.records import items_of
found, limit = [], 5000
for chunk in chunks.read_chunks(find_files(["-"]), Fields(), chunks.Place(*json.loads(sys.argv[1])), limit):
    texts = [None if isinstance(i, Broken) else i.texts[0] for i in items_of(chunk, Fields(), limit)]
    a = chunk.after
    found.append([texts, [a.file, a.offset, a.line, a.digest]])
print(json.dumps(found))
"""


def test_standard_input_and_going_on_with_it() -> None:
    data = json_lines(TEXTS[:50]) + json_lines(["y" * 50_000]) + json_lines(TEXTS[50:100])
    whole = json.loads(through_pipe(data, "[0, 0, 0]", code=STDIN).stdout)
    texts = [text for part, _ in whole for text in part]
    assert texts == [*TEXTS[:50], None, *TEXTS[50:100]] and len(whole) > 5
    for number in (2, len(whole) - 2):
        rest = json.loads(through_pipe(data, json.dumps(whole[number][1]), code=STDIN).stdout)
        after = sum(len(part) for part, _ in whole[: number + 1])
        assert [text for part, _ in rest for text in part] == texts[after:]
    other = through_pipe(data.replace(b"0 ", b"1 ", 1), json.dumps(whole[2][1]), code=STDIN)
    assert b"standard input is not what the interrupted run had read" in other.stderr  # type: ignore[operator]


def test_the_format_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(json_lines(["one"]))
    assert texts_of(read(tmp_path / "a.log", input_format="jsonl")) == ["one"]
    assert texts_of(read(tmp_path / "a.log")) == ['{"text": "one"}\n']
    with pytest.raises(ConfigError, match="input_format=csv is not one of txt, jsonl"):
        find_files([str(tmp_path)], "csv")
    with pytest.raises(ConfigError, match="parquet cannot be read from standard input"):
        find_files(["-"], "parquet")
    with pytest.raises(DataError, match="damaged"):
        (tmp_path / "b.parquet").write_bytes(b"")
        found = read(tmp_path / "b.parquet")
        assert isinstance(found[0], Broken)
        raise DataError(found[0].reason)


def test_places_of_several_files_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 500)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(TEXTS[i] * 5)
        (tmp_path / f"{i}.z.jsonl").write_bytes(json_lines(TEXTS[i * 10 : i * 10 + 10]))
    files = find_files([str(tmp_path)])
    found = list(read_chunks(files, Fields()))
    places = [(chunk.after.file, chunk.after.offset) for chunk in found]
    assert places == sorted(places) and len(set(places)) > 5 and places[-1] == (10, 0)
    positions = [chunk.position for chunk in found]
    assert all(a <= b for a, b in itertools.pairwise(positions)) and positions[-1] == sum(f.bytes for f in files)
