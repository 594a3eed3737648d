"""Compressed files as streams of bytes that say where they are damaged, after giving all that comes before.

The libraries' own file objects lose what comes just before a damage, or take a file that was cut short for its end.
"""

from __future__ import annotations

import bz2
import lzma
import sys
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

import zstandard

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
STDIN = "-"
# A small feed, because a few compressed bytes can expand to thousands of times as many.
_FEED = 8 << 10
_ERRORS = (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError)


class Damage(Exception):
    """A stream that cannot be read any further."""


class Stream(Protocol):
    """Bytes one after another. `read` gives at most `size` bytes, fewer at will, none at the end; Damage."""

    def read(self, size: int, /) -> bytes: ...


def open_raw(path: str) -> BinaryIO:
    """A file, or standard input."""
    return sys.stdin.buffer if path == STDIN else open(path, "rb", buffering=0)


def decompressed(raw: BinaryIO, compression: str) -> Stream:
    """The contents of `raw`; `compression`: "" or one of COMPRESSIONS."""
    if not compression:
        return raw
    padding = {".gz": b"\0", ".xz": b"\0"}.get(compression, b"")
    return _Decompressed(raw, _DECODERS[compression], padding)


def skip(stream: Stream, size: int) -> None:
    """Read `size` bytes and forget them. Raises Damage when there are fewer."""
    while size > 0:
        data = stream.read(min(size, 1 << 20))
        if not data:
            raise Damage("it ends too early")
        size -= len(data)


def _zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


_DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".zst": _zstd,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
}


class _Decompressed:
    """Bytes of a file of any number of members or frames. `padding`: what may stand between them."""

    def __init__(self, raw: BinaryIO, new_decoder: Callable[[], Any], padding: bytes):
        self._raw, self._new_decoder, self._padding = raw, new_decoder, padding
        self._decoder: Any = None  # None: at the beginning of a member
        self._feed = b""
        self._ready = memoryview(b"")
        self._damage: Damage | None = None

    def read(self, size: int, /) -> bytes:
        parts: list[memoryview] = []
        while size > 0:
            if not self._ready and not self._fill():
                break
            part = self._ready[:size]
            self._ready = self._ready[size:]
            parts.append(part)
            size -= len(part)
        if not parts and self._damage is not None:
            raise self._damage
        return b"".join(parts)

    def _fill(self) -> bool:
        """Make bytes ready; False at the end or at a damage."""
        while not self._ready and self._damage is None:
            self._feed = self._feed or self._raw.read(_FEED)
            if self._decoder is None and self._padding and self._feed:
                self._feed = self._feed.lstrip(self._padding)
                if not self._feed:
                    continue
            if not self._feed:
                if self._decoder is not None:
                    self._damage = Damage("it ends too early")
                return False
            self._decode()
        return bool(self._ready)

    def _decode(self) -> None:
        decoder = self._decoder = self._decoder or self._new_decoder()
        feed, self._feed = self._feed, b""
        try:
            self._ready = memoryview(decoder.decompress(feed))
        except _ERRORS as error:
            self._damage = Damage(str(error))
            return
        if decoder.eof:
            self._feed, self._decoder = decoder.unused_data, None
