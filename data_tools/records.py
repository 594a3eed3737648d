"""Chunks to documents: parsing what the reader cut out, and saying what is wrong in it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from data_tools.chat import ChatTemplate
from data_tools.chunks import Chunk, Part
from data_tools.documents import Broken, Fields


@dataclass(slots=True)
class Item:
    """One document: `texts` is (text,), or (prompt, response); of a chat as its template writes them."""

    texts: tuple[str, ...]
    file: str
    line: int
    source: int


def items_of(chunk: Chunk, fields: Fields, limit: int, chat: ChatTemplate | None = None) -> Iterator[Item | Broken]:
    """The documents of a chunk in order, and what is wrong. `limit`: longest line in bytes; `chat`: how the messages
    of a chat become text. Empty documents come out as they are."""
    parser = _Parser(fields, limit, chat)
    for part in chunk.parts:
        if isinstance(part, Broken):
            yield part
        else:
            yield from getattr(parser, part.kind)(part)


class _Parser:
    """A method per kind of part."""

    def __init__(self, fields: Fields, limit: int, chat: ChatTemplate | None):
        self._fields, self._limit, self._chat = fields, limit, chat
        names = {name for root in fields.roots for name in (root, *root.split("."))}
        self._names = names
        self._quoted = [f'"{name}"'.encode() for name in names]

    def text(self, part: Part) -> Iterator[Item | Broken]:
        # The byte order mark is a mark of the encoding, not a part of the text.
        data = part.data.removeprefix(codecs.BOM_UTF8)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            yield Broken(part.file, line, f"byte 0x{data[error.start]:02x} is not UTF-8 ({error.reason})")
            return
        yield from self._item((text,), part.file, part.line, part.source)

    def record(self, part: Part) -> Iterator[Item | Broken]:
        yield from self._json(part.data, part.file, part.line, part.source)

    def lines(self, part: Part) -> Iterator[Item | Broken]:
        data = part.data.removeprefix(codecs.BOM_UTF8) if part.line == 1 else part.data
        for number, line in enumerate(data.split(b"\n"), part.line):
            if len(line) > self._limit:
                yield Broken(part.file, number, f"longer than {self._limit} bytes")
            elif line and not line.isspace():
                yield from self._json(line, part.file, number, part.source)

    def rows(self, part: Part) -> Iterator[Item | Broken]:
        import pyarrow

        (batch,) = pyarrow.ipc.open_stream(part.data)
        try:
            for number, record in enumerate(batch.to_pylist(), part.line):
                yield from self._record(record, part.file, number, part.source)
        except UnicodeDecodeError:  # find the row
            for place in range(batch.num_rows):
                try:
                    record = batch.slice(place, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    yield Broken(part.file, part.line + place, f"not UTF-8 ({error.reason})")
                else:
                    yield from self._record(record, part.file, part.line + place, part.source)

    def _json(self, data: bytes, file: str, line: int, source: int) -> Iterator[Item | Broken]:
        try:
            record = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            yield Broken(file, line, f"not valid JSON (column {error.colno}: {error.msg})")
            return
        if any(data.count(name) > 1 for name in self._quoted) and (name := self._twice(data)):
            yield Broken(file, line, f"field '{name}' stands there twice; the last one counts", "duplicate_key")
        yield from self._record(record, file, line, source)

    def _record(self, record: Any, file: str, line: int, source: int) -> Iterator[Item | Broken]:
        if not isinstance(record, dict):
            yield Broken(file, line, f"not a JSON object but {type(record).__name__}")
            return
        values = [_find(record, root) for root in self._fields.roots]
        for root, value in zip(self._fields.roots, values, strict=True):
            if value is _MISSING:
                names = ", ".join(list(record)[:6]) or "none"
                yield Broken(file, line, f"no field '{root}' (fields: {names:.100})")
                return
            if self._chat is None and not isinstance(value, str):
                yield Broken(file, line, f"field '{root}' is not a string but {type(value).__name__}")
                return
        if self._chat is not None:
            try:
                values = list(self._chat.render(values[0]))
            except ValueError as error:
                yield Broken(file, line, f"field '{self._fields.messages}': {error}")
                return
        yield from self._item(tuple(values), file, line, source)

    def _item(self, texts: tuple[str, ...], file: str, line: int, source: int) -> Iterator[Item | Broken]:
        zeros = sum(text.count("\0") for text in texts)
        if zeros:
            yield Broken(file, line, f"{zeros} NUL characters; kept", "nul")
        yield Item(texts, file, line, source)

    def _twice(self, data: bytes) -> str | None:
        """A name that an object has twice, of those that are read."""
        twice: list[str] = []

        def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, value in pairs:
                if name in found and name in self._names:
                    twice.append(name)
                found[name] = value
            return found

        json.loads(data, object_pairs_hook=look)
        return twice[0] if twice else None


_MISSING = object()


def _find(record: Any, path: str) -> Any:
    """The value at a path: a name as it stands first, then its parts between dots."""
    if path in record:
        return record[path]
    for name in path.split("."):
        if not isinstance(record, dict) or name not in record:
            return _MISSING
        record = record[name]
    return record
