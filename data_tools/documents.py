"""Corpora as one ordered sequence of documents: which files, in which order, and what is wrong in them.

Understood: text files (one document each) and JSON lines (one document a line), both also as .gz and .zst. Files come
in the order of their paths. What cannot be read is never dropped silently: it comes out as a `Broken`, in its place.
"""

from __future__ import annotations

import codecs
import glob
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, BinaryIO, Protocol

import orjson
import zstandard

from refusion_train.errors import DataError

# A longer document or line is broken: it bounds the memory that one document can take.
MAX_DOCUMENT_BYTES = 256 << 20

_LINES_SUFFIX = ".jsonl"
_FOLDER_SUFFIXES = (".txt", _LINES_SUFFIX)
_COMPRESSIONS = (".gz", ".zst")
_REFUSED = {
    ".json": "if it holds one object a line, name it .jsonl",
    ".parquet": "convert it to .jsonl",
    ".bz2": "recompress it as .gz or .zst",
    ".xz": "recompress it as .gz or .zst",
    ".zip": "unpack it",
    ".tar": "unpack it",
}
# A small feed, because a few bytes of zstd can expand to thousands of times as many.
_FEED, _BUFFER = 8 << 10, 256 << 10


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus. `lines`: JSON lines, else one text; `compression`: "", ".gz" or ".zst"; `bytes`: on disk."""

    path: str
    lines: bool
    compression: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Document:
    """One text and where it came from (`line` counts from 1)."""

    text: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A line, or the rest of a file from it on, that holds no readable document."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def find_files(inputs: Sequence[str]) -> list[CorpusFile]:
    """The files that `inputs` (files, globs, folders) name, each once, sorted by path.

    A folder gives its .txt and .jsonl files, also compressed, at any depth, without hidden ones; a file that is
    named, or that a glob matches, may have any suffix and is text unless it is .jsonl.
    Raises DataError for an input that names nothing or a kind of file that cannot be read.
    """
    if not inputs:
        raise DataError("no input given; name files, folders or globs such as 'corpus/**/*.txt'")
    found: dict[str, str] = {}
    for item in inputs:
        for path in _expand(item):
            found.setdefault(os.path.realpath(path), path)
    return [_describe(path) for path in sorted(found.values())]


class Corpus:
    """Iterates over the documents of files. `total_bytes` and `position` (both of the files on disk) measure progress.

    `text_field`: the field of a JSON line that holds the text. Whatever cannot be read is yielded as `Broken`;
    empty texts are yielded as documents. Raises DataError for a file that cannot be opened or an error of the disk.
    """

    def __init__(
        self, files: Sequence[CorpusFile], text_field: str = "text", max_document_bytes: int = MAX_DOCUMENT_BYTES
    ):
        self.files = list(files)
        self.total_bytes = sum(file.bytes for file in self.files)
        self._text_field = text_field
        self._limit = max_document_bytes
        self._done_bytes = 0
        self._raw: BinaryIO | None = None

    @property
    def position(self) -> int:
        """Bytes of the files that have been read so far."""
        return self._done_bytes + (self._raw.tell() if self._raw is not None else 0)

    def __iter__(self) -> Iterator[Document | Broken]:
        self._done_bytes = 0
        for file in self.files:
            try:
                with open(file.path, "rb") as raw:
                    self._raw = raw
                    stream = _decompressed(raw, file.compression)
                    yield from self._lines(file, stream) if file.lines else self._text(file, stream)
            except OSError as error:
                raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from None
            finally:
                self._raw = None
            self._done_bytes += file.bytes

    def _lines(self, file: CorpusFile, stream: IO[bytes]) -> Iterator[Document | Broken]:
        number = 0
        while True:
            number += 1
            try:
                line = stream.readline(self._limit + 1)
                too_long = len(line) > self._limit and not line.endswith(b"\n")
                if too_long:
                    _skip_line(stream)
            except _Damage as error:
                yield Broken(file.path, number, f"the compressed file is damaged from here on ({error})")
                return
            if not line:
                return
            if too_long:
                yield Broken(file.path, number, f"longer than {self._limit} bytes")
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.isspace():
                yield self._parse(line, file.path, number)

    def _parse(self, line: bytes, path: str, number: int) -> Document | Broken:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            return Broken(path, number, f"not valid JSON (column {error.colno}: {error.msg})")
        if not isinstance(record, dict):
            return Broken(path, number, f"not a JSON object but {type(record).__name__}")
        text = record.get(self._text_field)
        if isinstance(text, str):
            return Document(text, path, number)
        if self._text_field not in record:
            fields = ", ".join(list(record)[:6]) or "none"
            return Broken(path, number, f"no field '{self._text_field}' (fields: {fields:.100})")
        return Broken(path, number, f"field '{self._text_field}' is not a string but {type(text).__name__}")

    def _text(self, file: CorpusFile, stream: IO[bytes]) -> Iterator[Document | Broken]:
        try:
            data = stream.read(self._limit + 1)
        except _Damage as error:
            yield Broken(file.path, 1, f"the compressed file is damaged ({error})")
            return
        if len(data) > self._limit:
            yield Broken(file.path, 1, f"longer than {self._limit} bytes")
            return
        try:
            # The byte order mark is a mark of the encoding, not a part of the text.
            yield Document(data.removeprefix(codecs.BOM_UTF8).decode("utf-8"), file.path, 1)
        except UnicodeDecodeError as error:
            data = data.removeprefix(codecs.BOM_UTF8)
            line = data.count(b"\n", 0, error.start) + 1
            yield Broken(file.path, line, f"byte 0x{data[error.start]:02x} is not UTF-8 ({error.reason})")


def _skip_line(stream: IO[bytes]) -> None:
    """Read on to the end of the line in bounded pieces."""
    while (piece := stream.readline(1 << 20)) and not piece.endswith(b"\n"):
        pass


def _expand(item: str) -> list[str]:
    if os.path.isdir(item):
        paths = list(_walk(item))
        if not paths:
            raise DataError(
                f"folder '{item}' holds no .txt or .jsonl file (or .gz or .zst of them); "
                f"name other text files by a glob such as '{item}/**/*.py'"
            )
        return paths
    if os.path.isfile(item):
        return [item]
    paths = [path for path in glob.glob(item, recursive=True) if os.path.isfile(path)]
    if not paths:
        kind = "matches no file" if glob.has_magic(item) else "is no file or folder"
        raise DataError(f"input '{item}' {kind}; check the path")
    return paths


def _walk(folder: str) -> Iterator[str]:
    """Readable files below `folder`, through links too, but never the same folder twice."""
    seen: set[str] = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and real not in seen)
        if real in seen:
            continue
        seen.add(real)
        for name in names:
            plain, _ = _split_compression(name)
            if plain.lower().endswith(_FOLDER_SUFFIXES) and not name.startswith("."):
                yield os.path.join(here, name)


def _split_compression(path: str) -> tuple[str, str]:
    for suffix in _COMPRESSIONS:
        if path.lower().endswith(suffix):
            return path[: -len(suffix)], suffix
    return path, ""


def _describe(path: str) -> CorpusFile:
    plain, compression = _split_compression(path)
    suffix = os.path.splitext(plain)[1].lower()
    if suffix in _REFUSED:
        raise DataError(f"input '{path}': {suffix} files are not read; {_REFUSED[suffix]}")
    return CorpusFile(path, suffix == _LINES_SUFFIX, compression, os.path.getsize(path))


class _Damage(Exception):
    """A compressed stream that cannot be decoded any further."""


class _Decoder(Protocol):
    """What zlib's and zstandard's decompression objects share: one member or frame each."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _decompressed(raw: BinaryIO, compression: str) -> IO[bytes]:
    if compression == ".gz":
        return io.BufferedReader(_Decompressed(raw, lambda: zlib.decompressobj(wbits=31), padding=b"\0"), _BUFFER)
    if compression == ".zst":
        context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        return io.BufferedReader(_Decompressed(raw, lambda: context.decompressobj()), _BUFFER)
    return raw


class _Decompressed(io.RawIOBase):
    """Decompressed bytes of a file of any number of members (.gz) or frames (.zst); `_Damage` where it is damaged.

    zstandard's own stream reader takes a file that was cut short for its end, which would lose documents silently, and
    gzip's loses what comes before the damage. `padding`: what may stand between members.
    """

    def __init__(self, raw: BinaryIO, new_decoder: Callable[[], _Decoder], padding: bytes = b""):
        self._raw, self._new_decoder, self._padding = raw, new_decoder, padding
        self._decoder: _Decoder | None = None  # None: at the beginning of a member
        self._feed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            self._feed = self._feed or self._raw.read(_FEED)
            if self._decoder is None and self._padding:
                more = len(self._feed) > 0
                self._feed = self._feed.lstrip(self._padding)
                if more and not self._feed:
                    continue
            if not self._feed:
                if self._decoder is None:
                    return 0
                raise _Damage("it ends too early")
            self._decode()
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decode(self) -> None:
        decoder = self._decoder = self._decoder or self._new_decoder()
        feed, self._feed = self._feed, b""
        try:
            self._ready = memoryview(decoder.decompress(feed))
        except (zlib.error, zstandard.ZstdError) as error:
            raise _Damage(str(error)) from None
        if decoder.eof:
            self._feed, self._decoder = decoder.unused_data, None
