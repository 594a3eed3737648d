"""A real HTTP server for tests of remote data: a folder with ranges, that fails in the ways that servers do."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Fault = Callable[["Handler", bytes], bool]  # the answer that it should give -> whether it was answered otherwise


@dataclass
class Site:
    """faults: for the next requests of files whose name matches, one each, in order; always: for all that match.

    requests: name, first byte and end of each (None: the whole file), and bytes sent of the body.
    """

    url: str
    folder: Path
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    always: list[tuple[str, Fault]] = field(default_factory=list)
    ranges: bool = True
    requests: list[tuple[str, int | None, int | None]] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, name: str) -> Fault | None:
        with self.lock:
            for i, (pattern, fault) in enumerate(self.faults):
                if re.search(pattern, name):
                    del self.faults[i]
                    return fault
        return next((fault for pattern, fault in self.always if re.search(pattern, name)), None)

    def asked(self, pattern: str) -> list[tuple[str, int | None, int | None]]:
        return [request for request in self.requests if re.search(pattern, request[0])]


class Handler(BaseHTTPRequestHandler):
    """Answers GET; see `Site`."""

    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.lstrip("/").partition("?")[0]
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.site.ranges else None
        first, end = (int(span[1]), int(span[2]) + 1) if span else (None, None)
        with self.site.lock:
            self.site.requests.append((name, first, end))
        try:
            content = (self.site.folder / name).read_bytes()
        except OSError:
            self.send_error(404)
            return
        body = content[first:end]
        fault = self.site.fault(name)
        if fault is not None and fault(self, body):
            self.close_connection = True
            return
        self.begin(206 if span else 200, len(body))
        self.wfile.write(body)
        with self.site.lock:
            self.site.sent += len(body)

    def begin(self, status: int, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        if status == 206:
            self.send_header("Content-Range", f"bytes 0-{size - 1}/*")
        self.end_headers()


def status(code: int) -> Fault:
    """An error of the server."""

    def answer(handler: Handler, body: bytes) -> bool:
        handler.send_error(code)
        return True

    return answer


def reset(handler: Handler, body: bytes) -> bool:
    """The connection ends without an answer."""
    handler.connection.close()
    return True


def cut(handler: Handler, body: bytes) -> bool:
    """Half of the body arrives."""
    handler.begin(206, len(body))
    handler.wfile.write(body[: len(body) // 2])
    handler.wfile.flush()
    return True


def flip(handler: Handler, body: bytes) -> bool:
    """A bit in the middle of the body is another one."""
    damaged = bytearray(body)
    damaged[len(body) // 3] ^= 4
    handler.begin(206 if handler.headers.get("Range") and handler.site.ranges else 200, len(body))
    handler.wfile.write(damaged)
    return True


def stall(seconds: float) -> Fault:
    """Half of the body arrives, and then nothing for a while."""

    def answer(handler: Handler, body: bytes) -> bool:
        handler.begin(206, len(body))
        handler.wfile.write(body[: len(body) // 2])
        handler.wfile.flush()
        time.sleep(seconds)
        return True

    return answer


def slow(seconds: float) -> Fault:
    """The right answer, later."""

    def answer(handler: Handler, body: bytes) -> bool:
        time.sleep(seconds)
        return False

    return answer


@contextmanager
def serve(folder: Path) -> Iterator[Site]:
    """Serve a folder on a free port of this machine."""
    handler = type("SiteHandler", (Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # clients that go away are what is tested
    site = Site(f"http://127.0.0.1:{server.server_address[1]}", folder)
    handler.site = site
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
