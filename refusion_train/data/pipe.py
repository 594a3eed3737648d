"""What a shell command writes, as a file: the `pipe:` paths of WebDataset, with `{file}` for the name of the file."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator

from refusion_train.errors import DataError

_CHUNK_BYTES = 1 << 20
_TICK = 0.2


def command(url: str, name: str) -> str:
    """The command that writes a file. Raises DataError when the path has no `{file}`."""
    if "{file}" not in url:
        raise DataError(f"'{url}' does not say which file to write; put {{file}} where its name belongs")
    return url.removeprefix("pipe:").replace("{file}", shlex.quote(name))


def read(words: str, stall: float, gone: threading.Event) -> Iterator[bytes]:
    """What the shell command writes. It is killed when the reader goes away or `gone` is set.

    Raises TimeoutError (nothing for `stall` seconds), FileNotFoundError (failed without a byte), OSError (failed).
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            words, shell=True, stdout=subprocess.PIPE, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True
        )
        assert process.stdout is not None, "the command's output is a pipe"
        some = False
        try:
            while chunk := _next_chunk(process.stdout.fileno(), stall, gone):
                some = True
                yield chunk
            code = process.wait(stall)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            process.stdout.close()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            kind = OSError if some else FileNotFoundError
            raise kind(f"the command ended with {code}{f': {lines[-1]}' if lines else ''}")


def _next_chunk(descriptor: int, stall: float, gone: threading.Event) -> bytes:
    """The next bytes; none at the end, or when nobody wants them."""
    end = time.monotonic() + stall
    readable = select.poll()  # select() cannot do with numbers above 1023
    readable.register(descriptor, select.POLLIN | select.POLLHUP)
    while not gone.is_set():
        if readable.poll(_TICK * 1000):
            return os.read(descriptor, _CHUNK_BYTES)
        if time.monotonic() > end:
            raise TimeoutError
    return b""
