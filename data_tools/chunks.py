"""Files as pieces of bounded size that workers can turn into documents on their own, and places to go on from.

A chunk holds bytes as they stand in the files, cut between documents. Chunks are a function of the files and of the
place where reading begins, so that whoever goes on behind a chunk reads what an undisturbed reader reads.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson

from data_tools.documents import MAX_DOCUMENT_BYTES, Broken, CorpusFile, Fields
from data_tools.streams import STDIN, Damage, Stream, decompressed, open_raw, skip
from refusion_train.errors import DataError

CHUNK_BYTES = 2 << 20
_CHUNK_PARTS = 4096
_MOST_ROWS = 4096
_TAR_BUFFER = 64 << 10
_MEMBERS = {".txt": "text", ".text": "text", ".json": "record"}


@dataclass(slots=True)
class Part:
    """Bytes of one file. `kind`: "text" (a document), "lines" (JSON lines, the first is number `line`), "record" (one
    JSON object) or "rows" (an Arrow record batch, the first row is number `line`)."""

    kind: str
    file: str
    source: int
    line: int
    data: bytes


@dataclass(frozen=True)
class Place:
    """Where to go on: number of the file, and in it `offset` (bytes of the decompressed stream, or row groups) and
    `line` (lines, members, list entries or rows before it)."""

    file: int = 0
    offset: int = 0
    line: int = 0
    # Of standard input: sha256 of all before `offset`, to notice another one.
    digest: str = ""


@dataclass(slots=True)
class Chunk:
    """`parts`: among them, in its place, what the reader itself found to be wrong; `after`: the place behind them;
    `position`: bytes of the files so far."""

    number: int
    parts: list[Part | Broken] = field(default_factory=list)
    after: Place = field(default_factory=Place)
    position: int = 0
    bytes: int = 0


# A reader of one file yields what it finds, the place behind that, and how many bytes of the file have been read.
_Found = Iterator[tuple["Part | Broken", Place, int]]


def read_chunks(
    files: Sequence[CorpusFile], fields: Fields, start: Place | None = None, limit: int = MAX_DOCUMENT_BYTES
) -> Iterator[Chunk]:
    """All of `files` from `start` on. `limit`: longest line or document in bytes, others are Broken.

    Raises DataError for a file that cannot be opened or an error of the disk.
    """
    start = start or Place()
    chunk = Chunk(0)
    before = sum(file.bytes for file in files[: start.file])
    for number in range(start.file, len(files)):
        file = files[number]
        for item, place, position in _read_file(file, number, start if number == start.file else Place(number), fields,
                                                limit):  # fmt: skip
            chunk.parts.append(item)
            chunk.bytes += len(item.data) if isinstance(item, Part) else 0
            chunk.after, chunk.position = place, before + position
            if chunk.bytes >= CHUNK_BYTES or len(chunk.parts) >= _CHUNK_PARTS:
                yield chunk
                chunk = Chunk(chunk.number + 1, after=place, position=before + position)
        before += file.bytes
        chunk.after, chunk.position = Place(number + 1), before
    if chunk.parts:
        yield chunk


def _read_file(file: CorpusFile, number: int, start: Place, fields: Fields, limit: int) -> _Found:
    try:
        if file.kind == "parquet":
            yield from _parquet(file, number, start, fields)
            return
        raw = open_raw(file.path)
        try:
            reader = {"lines": _lines, "json": _json_list, "tar": _tar, "text": _text}[file.kind]
            yield from reader(_Input(file, number, raw, start, limit))
        finally:
            if file.path != STDIN:
                raw.close()
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from None


class _Input:
    """One file being read: its decompressed stream from the start on, and places in it."""

    def __init__(self, file: CorpusFile, number: int, raw: BinaryIO, start: Place, limit: int):
        self.file, self.number, self.limit, self.raw = file, number, limit, raw
        self.offset, self.line = start.offset, start.line
        self.path = "standard input" if file.path == STDIN else file.path
        self._hash = hashlib.sha256() if file.path == STDIN else None
        self._start = start
        self._stream: Stream = decompressed(raw, file.compression)
        self.tail = b""  # of what was read last

    def skip(self) -> None:
        """Go to the start's offset. Raises Damage if it cannot be reached, DataError for another standard input."""
        if not self._start.offset:
            return
        if self._hash is None and not self.file.compression:
            self.raw.seek(self._start.offset)
            return
        skip(self, self._start.offset)
        if self._hash is not None and self._start.digest not in ("", self._hash.hexdigest()):
            raise DataError(
                "standard input is not what the interrupted run had read; give the same again, or begin anew with "
                "--fresh"
            )

    def read(self, size: int, /) -> bytes:
        data = self._seen(self._stream.read(size))
        self.tail = (self.tail + data[-tarfile.BLOCKSIZE :])[-tarfile.BLOCKSIZE :]
        return data

    def readline(self, size: int) -> bytes:
        """The rest of a line, at most `size` bytes of it; of standard input only."""
        return self._seen(self.raw.readline(size))

    def place(self) -> Place:
        """The place at `offset`; of standard input exactly the bytes before it must have been read."""
        return Place(self.number, self.offset, self.line, self._hash.hexdigest() if self._hash else "")

    def end(self) -> Place:
        return Place(self.number + 1)

    def position(self) -> int:
        return 0 if self.file.path == STDIN else self.raw.tell()

    def part(self, kind: str, data: bytes) -> Part:
        return Part(kind, self.path, self.file.source, self.line + 1, data)

    def broken(self, reason: str) -> Broken:
        return Broken(self.path, self.line + 1, reason)

    def too_long(self) -> Broken:
        return self.broken(f"longer than {self.limit} bytes")

    def _seen(self, data: bytes) -> bytes:
        if self._hash is not None:
            self._hash.update(data)
        return data


def _text(source: _Input) -> _Found:
    data: list[bytes] = []
    size = 0
    try:
        while size <= source.limit and (block := source.read(source.limit + 1 - size)):
            data.append(block)
            size += len(block)
    except Damage as error:
        yield source.broken(f"the compressed file is damaged ({error})"), source.end(), source.position()
        return
    found = source.too_long() if size > source.limit else source.part("text", b"".join(data))
    yield found, source.end(), source.position()


def _lines(source: _Input) -> _Found:
    """Whole lines, about CHUNK_BYTES at a time; every place that is given out lies behind a line."""
    try:
        source.skip()
        yield from _lines_of_pipe(source) if source.file.path == STDIN else _lines_of_file(source)
    except Damage as error:
        reason = f"the compressed file is damaged from here on ({error})"
        yield source.broken(reason), source.end(), source.position()


def _lines_of_file(source: _Input) -> _Found:
    carry: list[bytes] = []  # the begin of a line
    held = 0
    while block := source.read(CHUNK_BYTES):
        cut = block.rfind(b"\n") + 1
        if cut and held <= source.limit:
            yield _emit(source, b"".join((*carry, block[:cut])))
            carry, held = [block[cut:]], len(block) - cut
        elif cut:  # the end of a line that is too long
            first = block.find(b"\n") + 1
            yield _pass_over(source, held + first)
            if cut > first:
                yield _emit(source, block[first:cut])
            carry, held = [block[cut:]], len(block) - cut
        else:
            held += len(block)
            carry = [*carry, block] if held <= source.limit else []
    if held > source.limit:
        yield _pass_over(source, held)
    elif held:
        yield _emit(source, b"".join(carry))


def _lines_of_pipe(source: _Input) -> _Found:
    """A pipe cannot be read again, so nothing is read beyond the last line that is given out."""
    while block := source.read(CHUNK_BYTES):
        more = b"" if block.endswith(b"\n") else source.readline(source.limit + 1)
        if len(more) <= source.limit:
            yield _emit(source, block + more)
            continue
        cut = block.rfind(b"\n") + 1
        length = len(block) - cut + len(more)
        while not more.endswith(b"\n") and (more := source.readline(1 << 20)):
            length += len(more)
        before = _emit(source, block[:cut])[0] if cut else None
        found, place, position = _pass_over(source, length)
        if before is not None:
            yield before, place, position
        yield found, place, position


def _emit(source: _Input, data: bytes) -> tuple[Part, Place, int]:
    part = source.part("lines", data)
    source.offset += len(data)
    source.line += data.count(b"\n") + (not data.endswith(b"\n"))
    return part, source.place(), source.position()


def _pass_over(source: _Input, length: int) -> tuple[Broken, Place, int]:
    found = source.too_long()
    source.offset += length
    source.line += 1
    return found, source.place(), source.position()


def _json_list(source: _Input) -> _Found:
    """The entries of a JSON list, or objects one after another, as records. Going on reads the file from its begin."""
    done, source.line = source.line, 0
    try:
        for value in _json_values(source):
            if source.line >= done:
                yield source.part("record", _dumped(value)), Place(source.number, 0, source.line + 1), source.position()
            source.line += 1
    except Damage as error:
        reason = f"the compressed file is damaged from here on ({error})"
        yield source.broken(reason), source.end(), source.position()
    except _NotJson as error:
        yield source.broken(str(error)), source.end(), source.position()


class _NotJson(Exception):
    """Text that is no JSON, or not of the shape that is read."""


def _json_values(source: _Input) -> Iterator[Any]:
    """The values, decoded one after another from a buffer that holds little more than one."""
    decoder = json.JSONDecoder()
    # Bytes that are not UTF-8 become surrogates here, and the record that holds them says so itself.
    utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    buffer, place, begun, in_list, want = "", 0, False, False, CHUNK_BYTES
    while True:
        block = source.read(want)
        buffer = buffer[place:] + utf8.decode(block, not block)
        place = _skip_space(buffer, 0)
        if not begun and place < len(buffer):
            begun, in_list = True, buffer[place] == "["
            if buffer[place] not in "[{":
                raise _NotJson("neither a JSON list nor an object")
            place += in_list
        while True:
            place = _skip_space(buffer, place)
            if in_list and buffer[place : place + 1] == "]":
                return
            try:
                value, end = decoder.raw_decode(buffer, place)
            except (json.JSONDecodeError, RecursionError):
                break
            place_after = _skip_space(buffer, end)
            if place_after == len(buffer) and block and in_list:
                break  # a number may go on, and the comma is not here yet
            yield value
            want = CHUNK_BYTES
            place = place_after + (buffer[place_after : place_after + 1] == ",")
        if not block:
            if in_list or place < len(buffer):
                raise _NotJson("not valid JSON from here on")
            return
        if len(buffer) - place > source.limit:
            raise _NotJson(f"longer than {source.limit} bytes, or not valid JSON from here on")
        want = max(want, len(buffer) - place)  # a long entry is not decoded again for every little block


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t", "\r", "\n"):
        place += 1
    return place


def _dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):  # a lone surrogate, or a number that is too large: the record says so itself
        return json.dumps(value).encode()


def _tar(source: _Input) -> _Found:
    """Members .txt and .json as documents and records; others are counted."""
    base, names = source.offset, set[int]()
    try:
        source.skip()
        # "r|": from a stream, without going back.
        with tarfile.open(fileobj=source, mode="r|", bufsize=_TAR_BUFFER) as tar:  # type: ignore[call-overload]
            for member in tar:
                after = base + member.offset_data + member.size + -member.size % tarfile.BLOCKSIZE
                place = Place(source.number, after, source.line + 1)
                if member.isfile():
                    for found in _member(source, tar, member, names):
                        yield found, place, source.position()
                source.line += 1
                tar.members = []  # type: ignore[attr-defined] - they would pile up
        # The library takes an end in the middle of a header for the end of the archive.
        if not source.read(1) and source.tail[-tarfile.BLOCKSIZE :] != bytes(tarfile.BLOCKSIZE):
            raise Damage("it ends without an end mark")
    except (Damage, tarfile.TarError) as error:
        yield source.broken(f"the tar is damaged from here on ({error})"), source.end(), source.position()


def _member(source: _Input, tar: tarfile.TarFile, member: tarfile.TarInfo, names: set[int]) -> Iterator[Part | Broken]:
    path = f"{source.path}/{member.name}"
    kind = _MEMBERS.get(os.path.splitext(member.name)[1].lower())
    if kind is None:
        yield Broken(path, 1, "neither .txt nor .json", "not_text")
        return
    if hash(member.name) in names:
        yield Broken(path, 1, "a member of this name was there before; both are documents", "duplicate_key")
    names.add(hash(member.name))
    if member.size > source.limit:
        yield Broken(path, 1, f"longer than {source.limit} bytes")
        return
    content = tar.extractfile(member)
    assert content is not None, "a regular member of a tar has contents"
    yield Part(kind, path, source.file.source, 1, content.read())


def _parquet(file: CorpusFile, number: int, start: Place, fields: Fields) -> _Found:
    """Record batches of the columns that are wanted, row group by row group."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file.path}: reading .parquet needs pyarrow; pip install pyarrow") from None
    end = Place(number + 1)
    row, group = start.line, start.offset
    try:
        with pyarrow.parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20) as table:
            columns = _columns(table, fields)
            if not columns:
                names = ", ".join(table.schema_arrow.names[:6]) or "none"
                yield Broken(file.path, 1, f"no column '{fields.roots[0]}' (columns: {names:.100})"), end, file.bytes
                return
            groups = table.metadata.num_row_groups
            base = sum(table.metadata.row_group(i).num_rows for i in range(start.offset))
            for group in range(start.offset, groups):
                passed = start.line if group == start.offset else 0
                row = base
                position = file.bytes * (group + 1) // groups
                for batch in table.iter_batches(_rows_of(table, group), [group], columns, use_threads=False):
                    row += batch.num_rows
                    if row - base > passed:
                        part = Part("rows", file.path, file.source, row - batch.num_rows + 1, _serialized(batch))
                        yield part, Place(number, group, row - base), position
                base = row
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).strip().split("\n")[0]
        yield Broken(file.path, row + 1, f"the file is damaged from row group {group} on ({reason})"), end, file.bytes


def _columns(table: Any, fields: Fields) -> list[str]:
    """The leaf columns at or below the paths that are wanted; a name with dots may be one column or nested."""
    known = [table.schema.column(i).path for i in range(len(table.schema))]
    return [path for path in known if any(path == root or path.startswith(root + ".") for root in fields.roots)]


def _rows_of(table: Any, group: int) -> int:
    """Rows of a batch: about a chunk's worth of text."""
    metadata = table.metadata.row_group(group)
    per_row = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
    return max(1, min(_MOST_ROWS, CHUNK_BYTES // per_row))


def _serialized(batch: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
