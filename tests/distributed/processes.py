"""Run a function on N gloo processes and get every rank's result, or the failing rank's error.

Processes are forked from a server that has imported torch, megatron-core and DeepSpeed once, so that a group starts
in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

_PRELOAD = ["torch", "torch.distributed.checkpoint", "megatron.core", "deepspeed"]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}


class RankError(AssertionError):
    """A rank raised, died or was too slow; the text holds its traceback."""


def run(function: Callable[..., Any], count: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call `function(*args)` on `count` processes whose environment is that of torchrun; results in order of rank.

    function, its arguments and its results travel by pickle: a function at module level, tensors, plain data.
    The function itself joins the group (`init_groups`). CUDA is hidden. When a rank fails, all are stopped and
    RankError shows the error of the rank that failed first; after `timeout_s` seconds it names the ranks still running.
    """
    _start_server()
    context = multiprocessing.get_context("forkserver")
    port = _free_port()
    call = pickle.dumps((function, args))  # by value: torch's own way leaves tensors in the sender's memory
    processes, pipes = [], []
    for rank in range(count):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(theirs, call, rank, count, port), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    try:
        return _collect(pipes, timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _start_server() -> None:
    """Start the server that processes are forked from, with the environment that its imports look at."""
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        multiprocessing.forkserver.set_forkserver_preload(_PRELOAD)
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _collect(pipes: list[multiprocessing.connection.Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} of {len(pipes)} still run after {timeout_s:.0f} s")
        messages = {waiting[pipe]: _receive(pipe) for pipe in ready}  # pyright: ignore[reportArgumentType]
        failures = {rank: (when, text) for rank, (when, text, _) in messages.items() if text is not None}
        if failures:
            rank = min(failures, key=lambda rank: failures[rank][0])
            raise RankError(f"rank {rank} of {len(pipes)} failed:\n{failures[rank][1]}")
        results.update({rank: result for rank, (_, _, result) in messages.items()})
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: multiprocessing.connection.Connection) -> tuple[float, str | None, Any]:
    """(time, traceback or None, result) of a rank; a rank that died without a word failed last."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return float("inf"), "the process ended without a result (killed?)", None


def _main(
    pipe: multiprocessing.connection.Connection,
    call: bytes,
    rank: int,
    count: int,
    port: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **_ENVIRONMENT)
    import torch

    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(call)
        message = pickle.dumps((time.time(), None, function(*args)))
    except BaseException:
        message = pickle.dumps((time.time(), traceback.format_exc(), None))
    pipe.send_bytes(message)
    pipe.close()
    # A rank that failed leaves the others in the middle of a collective: end without waiting for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
