"""Processes of one training group on this host: started together, stopped together, none left behind.

Rank 0 writes to the console; the others write to files that are shown when something fails. A rank that dies takes
the group down within seconds: the others would wait for it for ever. A signal to the launcher is passed on once, so
that all ranks can finish their step and save. Should the launcher itself be killed, the kernel ends its ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_train.telemetry import ERROR_FILE

STOPPED = 75  # EX_TEMPFAIL: stopped by a signal after saving; the same as of a single process
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_POLL_S = 0.05
_LAST_WORDS_S = 3.0  # for the others to report, once it is known why a rank has failed
_CAUSE_S = 10.0  # for a rank to end that others have lost: its own error tells why
_STRAGGLER_S = 60.0  # for the rest to end once a rank has ended well
_PORT_TRIES = 3
_PORT_TAKEN = ("eaddrinuse", "address already in use")
_LINES_SHOWN = 30


def launch(argv: list[str], nproc: int) -> int:
    """Run `refusion ARGV` as a group of `nproc` processes on this host; return the exit code of the group.

    The processes find each other through RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; cores are divided
    among them (OMP_NUM_THREADS, unless it is set). Code: 0 if all ended well; 75 if they stopped for a signal; else
    that of the rank that failed first (1 if it was killed), whose error is printed last.
    """
    return run_group([sys.executable, "-m", "refusion_train.cli", *argv], nproc)


def run_group(command: list[str], nproc: int) -> int:
    """`launch` for any command line."""
    for attempt in range(1, _PORT_TRIES + 1):
        logs = Path(tempfile.mkdtemp(prefix="refusion-ranks-"))
        with stop_signals() as received, _reserved_port() as port:
            ranks = [_start(command, rank, nproc, port, logs) for rank in range(nproc)]
            try:
                failed = _wait(ranks, received)
            finally:
                _kill(ranks)
        cause = _cause(ranks) if failed else None
        if cause is not None and cause.port_taken and attempt < _PORT_TRIES:
            shutil.rmtree(logs)
            continue
        return _report(cause, ranks, logs, received)
    raise AssertionError("the last try has returned")


@dataclass
class _Rank:
    """One process of the group."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None
    error_file: Path
    ended: float | None = None
    killed_by_us: bool = False

    @property
    def error(self) -> dict[str, Any]:
        """What the rank has left about its failure; empty if nothing."""
        try:
            return json.loads(self.error_file.read_text())
        except (OSError, ValueError):
            return {}

    @property
    def failed(self) -> bool:
        return self.process.returncode not in (None, 0, STOPPED)

    @property
    def died(self) -> bool:
        """Whether a signal that is not ours ended it."""
        return self.process.returncode is not None and self.process.returncode < 0 and not self.killed_by_us

    @property
    def lost_partner(self) -> bool:
        """Whether its error is the consequence of another rank's."""
        return bool(self.error.get("consequence"))

    @property
    def port_taken(self) -> bool:
        return any(words in self.error.get("error", "").lower() for words in _PORT_TAKEN)


# ------------------------------------------------------------------------------------------------- start and wait


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(command: list[str], rank: int, nproc: int, port: int, logs: Path) -> _Rank:
    threads = max(1, cores() // nproc)
    error_file = logs / f"rank-{rank}.error"
    environment = {
        "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **os.environ,
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), ERROR_FILE: str(error_file),
    }  # fmt: skip
    log = logs / f"rank-{rank}.log" if rank else None
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open(log, "wb")) if log else None
        # A session of its own: an interrupt typed at the terminal comes through us, once.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, preexec_fn=end_with(os.getpid()),
        )  # fmt: skip
    return _Rank(rank, process, log, error_file)


def end_with(parent: int) -> Callable[[], None] | None:
    """What a new process does first: ask the kernel to kill it when its parent is gone (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_parent_death_signal = 1

    def ask() -> None:
        prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it went before we asked
            os._exit(1)

    return ask


def _wait(ranks: list[_Rank], received: list[int]) -> bool:
    """Wait for all ranks, passing on the first signal; return whether the group has failed. Some may still run then."""
    forwarded = False
    while True:
        if received and not forwarded:
            forwarded = True
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.process.send_signal(received[0])
        running = _collect(ranks)
        if any(rank.failed for rank in ranks):
            _let_speak(ranks)
            return True
        if not running:
            return False
        first_end = min((rank.ended for rank in ranks if rank.ended is not None), default=None)
        if first_end is not None and time.monotonic() - first_end > _STRAGGLER_S:
            return True
        time.sleep(_POLL_S)


def _collect(ranks: list[_Rank]) -> list[_Rank]:
    """Note who has ended; return who still runs."""
    for rank in ranks:
        if rank.ended is None and rank.process.poll() is not None:
            rank.ended = time.monotonic()
    return [rank for rank in ranks if rank.ended is None]


def _let_speak(ranks: list[_Rank]) -> None:
    """After a first failure: wait for the others to end on their own, longer while all we have is consequences."""
    began = time.monotonic()
    while _collect(ranks):
        known = any(rank.failed and not rank.lost_partner for rank in ranks)
        if time.monotonic() - began > (_LAST_WORDS_S if known else _CAUSE_S):
            return
        time.sleep(_POLL_S)


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.killed_by_us = True
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Signals that ask the group to stop, in the order in which they come, instead of ending the launcher."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port, kept from others while the group meets: bound but not listening, so rank 0 may still take it."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]


# --------------------------------------------------------------------------------------------------------- report


def _cause(ranks: list[_Rank]) -> _Rank | None:
    """The rank whose failure the others' follow from.

    A rank that was killed cannot have lost a partner first; of the others the one that met its error first, unless
    that error is to have lost a partner. An error that several ranks share is rank 0's, who has printed it.
    """
    died = [rank for rank in ranks if rank.died]
    if died:
        return died[0]
    failed = [rank for rank in ranks if rank.failed and not rank.killed_by_us]
    if not failed:
        return None
    first = min(failed, key=lambda rank: (rank.lost_partner, rank.error.get("time", float("inf")), rank.ended or 0.0))
    same = [rank for rank in failed if rank.error and rank.error.get("error") == first.error.get("error")]
    return min(same, key=lambda rank: rank.rank, default=first)


def _report(cause: _Rank | None, ranks: list[_Rank], logs: Path, received: list[int]) -> int:
    """Print what went wrong, the cause last; return the group's exit code."""
    codes = [rank.process.returncode for rank in ranks]
    if all(code in (0, STOPPED) for code in codes):
        shutil.rmtree(logs, ignore_errors=True)
        return max(codes)
    if cause is None:
        hung = ", ".join(str(rank.rank) for rank in ranks if rank.killed_by_us)
        return _fail(f"rank {hung} did not end within {_STRAGGLER_S:.0f} s of the others and was killed", 1)
    code = cause.process.returncode
    if received and code in (-received[0], 128 + received[0]):  # ended by it, or with the code that shells give that
        shutil.rmtree(logs, ignore_errors=True)
        print(f"stopped by {signal.Signals(received[0]).name} before the training began", file=sys.stderr, flush=True)
        return STOPPED
    error, several = cause.error, len(ranks) > 1
    if error.get("expected") or (cause.log is None and not cause.died):
        if cause.log is not None:  # the console has not seen it yet
            _fail(f"rank {cause.rank}: {error['error']}", code)
        shutil.rmtree(logs, ignore_errors=True)
        return code
    _show_log(cause)
    others = f"; the other {'rank was' if len(ranks) == 2 else 'ranks were'} ended" if several else ""
    kept = f"; output of the ranks: {logs}" if several else ""
    return _fail(f"rank {cause.rank} {_ending(code, error)}{others}{kept}", code if code > 0 else 1)


def _ending(code: int, error: dict[str, Any]) -> str:
    if code >= 0:
        return f"failed with exit code {code}" + (f" ({error['error']})" if error else "")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = " (perhaps by the system for want of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code}, {name}{hint}"


def _show_log(rank: _Rank) -> None:
    if rank.log is None or not rank.log.exists():
        return
    lines = rank.log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
    if lines:
        print(f"----- last output of rank {rank.rank}", *lines, "-----", sep="\n", file=sys.stderr, flush=True)


def _fail(message: str, code: int) -> int:
    print(f"refusion: error: {message}", file=sys.stderr, flush=True)
    return code
