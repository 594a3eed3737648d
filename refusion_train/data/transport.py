"""Files behind URLs: whole, or a range of their bytes; again after a failure, and never waited for without end.

fsspec reads the URL (s3://, gs://, http(s)://, and what else it has a package for); `pipe:COMMAND {file}` reads what a
shell command writes. No order of training depends on anything here: the jitter has a generator of its own.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import re
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from refusion_train.data import pipe
from refusion_train.errors import DataError, RefusionError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
_TICK = 0.2  # seconds between two looks at whether nobody wants the bytes any more
_AHEAD = 4  # chunks
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# Of the answers "your fault" of HTTP, those that may be another the next time.
_PASSING = (408, 421, 425, 429)
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp",
             "az": "adlfs", "abfs": "adlfs"}  # fmt: skip


@dataclass(frozen=True)
class Patience:
    """How long a server may take. attempts: in all; the rest in seconds: before the second attempt (then twice as long
    each time, up to `longest_wait`, times 0.5 to 1.5 by chance), until it is connected, and without a single byte."""

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 30.0
    connect: float = 15.0
    stall: float = 60.0


class NoRanges(Exception):
    """The server (or the command) gives files only whole."""


class Damaged(Exception):
    """What arrived is not what was written; the text says which part of it."""


class Closed(RefusionError):
    """Nobody wants the bytes any more."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names something that is not a folder of this machine's file systems."""
    text = os.fspath(path)
    return text.startswith("pipe:") or ("://" in text and not text.startswith("file://"))


def local_path(path: str | os.PathLike[str]) -> Path:
    """The folder of a path that is no URL, or a file:// one."""
    return Path(os.fspath(path).removeprefix("file://"))


def shown(url: str) -> str:
    """A URL for messages, without the passwords and signatures that may be in it."""
    return re.sub(r"//[^/@]*@", "//", url) if url.startswith("pipe:") else re.sub(r"//[^/@]*@|\?.*", _hidden, url)


def _hidden(match: re.Match[str]) -> str:
    return "//" if match[0].startswith("//") else ""


def join(url: str, name: str) -> str:
    """The URL of a file in a folder: before a query, if there is one; in place of `{file}` of a command."""
    if url.startswith("pipe:"):
        return pipe.command(url, name)
    query = urlsplit(url).query if url.startswith(("http://", "https://")) else ""
    folder = url.removesuffix(f"?{query}") if query else url
    return f"{folder.rstrip('/')}/{name}{f'?{query}' if query else ''}"


class Remote:
    """A folder behind a URL. Thread-safe.

    Raises DataError, on making it, when no package for this kind of URL is installed.
    """

    def __init__(self, url: str, patience: Patience | None = None) -> None:
        self.url = url
        self.name = shown(url)
        self.patience = patience or Patience()
        self.closed = threading.Event()
        self.ranges = not url.startswith("pipe:")
        self._chance = random.Random()  # of its own, seeded by the system
        if url.startswith("pipe:"):
            pipe.command(url, "x")  # refuses a command without {file}
        else:
            self._fs = _filesystem(url, self.patience)

    def close(self) -> None:
        """End all waiting: fetches under way raise `Closed`."""
        self.closed.set()

    def read(self, name: str) -> bytes:
        """A small file, whole. Raises FileNotFoundError when there is none, DataError when it cannot be had."""
        return self.fetch(name, None, lambda chunks: b"".join(chunks), name)

    def fetch(self, name: str, span: tuple[int, int] | None, take: Callable[[Iterator[bytes]], T], what: str) -> T:
        """take(chunks) of a file, or of its bytes from span[0] up to span[1]; repeated if the bytes do not arrive or if
        `take` raises `Damaged` or EOFError. `what`: what is fetched, for messages.

        Raises NoRanges; FileNotFoundError; Closed; DataError (URL, what, attempts, last reason).
        """
        attempts = self.patience.attempts
        attempt = 0
        while True:
            attempt += 1
            try:
                with closing(self._arriving(name, span)) as chunks:
                    return take(chunks)
            except (NoRanges, RefusionError, FileNotFoundError):
                raise
            except Exception as error:
                reason = _reason(error, self.patience)
                if attempt == attempts or not _may_pass(error):
                    times = f"{attempt} attempt{'s' * (attempt > 1)}"
                    raise DataError(
                        f"{self.name}: {what} could not be fetched ({times}; the last: {reason}); see that it is there "
                        "and can be read, then run again"
                    ) from (error if isinstance(error, Damaged) else None)
            wait = self._wait(attempt)
            logger.warning(
                "%s: %s: %s; attempt %d of %d, the next in %.1f s", self.name, what, reason, attempt, attempts, wait
            )
            if self.closed.wait(wait):
                raise Closed(f"{self.name}: closed while {what} was fetched")

    def _wait(self, attempt: int) -> float:
        longest = min(self.patience.first_wait * 2 ** (attempt - 1), self.patience.longest_wait)
        return longest * self._chance.uniform(0.5, 1.5)

    def _arriving(self, name: str, span: tuple[int, int] | None) -> Generator[bytes]:
        """The bytes as they come. A thread of its own reads them: not every file system has timeouts that hold."""
        channel: queue.Queue[Any] = queue.Queue(_AHEAD)
        gone = threading.Event()
        threading.Thread(target=self._read_into, args=(name, span, channel, gone), name="fetch", daemon=True).start()
        try:
            yield from self._take_from(channel)
        finally:
            gone.set()

    def _take_from(self, channel: queue.Queue[Any]) -> Iterator[bytes]:
        limit = self.patience.connect + self.patience.stall
        waited = 0.0
        while True:
            try:
                item = channel.get(timeout=_TICK)
            except queue.Empty:
                waited += _TICK
                if self.closed.is_set():
                    raise Closed(f"{self.name}: closed") from None
                if waited >= limit:
                    raise TimeoutError from None
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            waited, limit = 0.0, self.patience.stall
            yield item

    def _read_into(
        self, name: str, span: tuple[int, int] | None, channel: queue.Queue[Any], gone: threading.Event
    ) -> None:
        def put(item: Any) -> bool:
            while not gone.is_set():
                try:
                    channel.put(item, timeout=_TICK)
                    return True
                except queue.Full:
                    continue
            return False

        try:
            with closing(self._chunks(name, span, gone)) as chunks:
                for chunk in chunks:
                    if not put(chunk):
                        return
            put(None)
        except BaseException as error:
            put(error)

    def _chunks(self, name: str, span: tuple[int, int] | None, gone: threading.Event) -> Generator[bytes]:
        target = join(self.url, name)
        if self.url.startswith("pipe:"):
            if span is not None:
                raise NoRanges
            yield from pipe.read(target, self.patience.connect + self.patience.stall, gone)
        elif target.startswith(("http://", "https://")):
            yield from _http_chunks(self._fs, target, span)
        elif span is not None:
            yield self._fs.cat_file(self._fs._strip_protocol(target), start=span[0], end=span[1])
        else:
            with self._fs.open(self._fs._strip_protocol(target), "rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk


def _filesystem(url: str, patience: Patience) -> Any:
    import fsspec

    protocol = url.split("://", 1)[0].split("::", 1)[0]
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        try:
            from aiohttp import ClientTimeout
        except ImportError:
            raise DataError(_missing(url, protocol)) from None
        # Its own default ends a transfer after five minutes, however well it goes.
        timeout = ClientTimeout(total=None, connect=patience.connect, sock_read=patience.stall)
        options["client_kwargs"] = {"timeout": timeout}
    try:
        return fsspec.core.url_to_fs(url, **options)[0]
    except ImportError:
        raise DataError(_missing(url, protocol)) from None
    except ValueError as error:  # a protocol that nobody knows
        raise DataError(
            f"{shown(url)} cannot be read: {_first_line(error)}; give a folder or a URL of a known kind"
        ) from None


def _missing(url: str, protocol: str) -> str:
    package = _PACKAGES.get(protocol)
    remedy = f"pip install {package}" if package else "install the package that fsspec names for it"
    return f"{shown(url)} needs a package for {protocol}:// that is not installed; {remedy}"


def _http_chunks(fs: Any, url: str, span: tuple[int, int] | None) -> Iterator[bytes]:
    headers = {"Accept-Encoding": "identity"}
    if span is not None:
        headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
    # A given size spares the question for it.
    with fs.open(url, "rb", block_size=0, size=1, headers=headers) as file:
        if span is not None and file.r.status != 206:
            raise NoRanges
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _may_pass(error: BaseException) -> bool:
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _PASSING
    return not isinstance(error, _FINAL)


def _reason(error: BaseException, patience: Patience) -> str:
    status = getattr(error, "status", None)
    if isinstance(status, int) and status:
        return f"the server answered {status} {getattr(error, 'message', '')}".rstrip()
    if isinstance(error, TimeoutError):
        return f"no answer for {patience.stall:g} s"
    if type(error).__name__ == "ClientPayloadError":  # of aiohttp, which is not always there
        return "the answer ended early"
    if isinstance(error, (Damaged, EOFError)):
        return _first_line(error)
    return f"{type(error).__name__}: {shown(_first_line(error))}".rstrip(": ")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
