"""Groups of training processes for tests: quick to start, open to signals and kills, their words kept.

They run `train.loop.train` as the command line does, in processes that are forked from a server which has imported
everything once; a test of faults can end them at any moment.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
import pytest

from refusion_train.config import Config
from refusion_train.errors import RefusionError

TIMEOUT_S = 180.0  # generous: other things may run on the machine


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its exit code (negative: a signal) and the one line of its error."""

    code: int
    error: str = ""


class Group:
    """`count` ranks that train `config`; `output` is what rank 0 has printed.

    prepare: a function at module level that every rank calls first, to plant a fault.
    """

    def __init__(self, config: Config, count: int, prepare: Callable[[], None] | None = None) -> None:
        processes._start_server()
        context = multiprocessing.get_context("forkserver")
        folder = Path(config.run_dir).parent
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = [folder / f"output-{time.monotonic_ns()}-{rank}" for rank in range(count)]
        port = processes._free_port()
        self._pipes, self._processes = [], []
        for rank in range(count):
            mine, theirs = context.Pipe(duplex=False)
            place = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), **processes._ENVIRONMENT,
            }  # fmt: skip
            arguments = theirs, config, place, str(self._logs[rank]), prepare, os.getpid()
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    @property
    def output(self) -> str:
        return self._logs[0].read_text() if self._logs[0].exists() else ""

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all."""
        for process in self._processes if rank is None else [self._processes[rank]]:
            os.kill(process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def wait(self) -> list[Outcome]:
        """Wait for the end of all ranks; after too long they are killed and the test fails."""
        deadline = time.monotonic() + TIMEOUT_S
        outcomes = []
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            outcome = None
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                try:
                    outcome = pipe.recv()
                except EOFError:  # it was killed
                    process.join()
                    outcome = Outcome(process.exitcode or 0)
            if outcome is None:
                self.kill()
                pytest.fail(f"ranks still ran after {TIMEOUT_S:.0f} s; output:\n{self.output[-3000:]}")
            outcomes.append(outcome)
        for process in self._processes:
            process.join()
        return outcomes


def _rank(
    pipe: multiprocessing.connection.Connection,
    config: Config,
    place: dict[str, str],
    log: str,
    prepare: Callable[[], None] | None,
    tests: int,
) -> None:
    threading.Thread(target=_end_with, args=(tests,), daemon=True).start()
    os.environ.update(place)
    with open(log, "wb", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    from refusion_train.train.loop import train

    try:
        if prepare is not None:
            prepare()
        outcome = Outcome(train(config))
    except RefusionError as error:
        outcome = Outcome(error.exit_code, str(error))
    except BaseException:
        import traceback

        outcome = Outcome(1, traceback.format_exc())
    pipe.send(outcome)
    os._exit(0)


def _end_with(pid: int) -> None:
    """Leave no rank behind when the tests themselves are killed."""
    while Path(f"/proc/{pid}").exists():
        time.sleep(1.0)
    os._exit(1)


def train_group(config: Config, count: int) -> str:
    """Train to the end on `count` ranks; what rank 0 printed."""
    group = Group(config, count)
    outcomes = group.wait()
    assert outcomes == [Outcome(0)] * count, f"{outcomes}\n{group.output[-3000:]}"
    return group.output


def failed_group(config: Config, count: int) -> Outcome:
    """Train on `count` ranks, all of which must fail in the same way."""
    group = Group(config, count)
    outcomes = group.wait()
    assert len(set(outcomes)) == 1 and outcomes[0].code in (1, 2), f"{outcomes}\n{group.output[-3000:]}"
    assert "\n" not in outcomes[0].error, f"more than one line:\n{outcomes[0].error}"
    return outcomes[0]


def wait_until(condition: Callable[[], Any], group: Group, every_s: float = 0.002) -> None:
    """Wait for something that running ranks bring about."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if not group.alive or time.monotonic() > deadline:
            outcomes = group.wait()
            pytest.fail(f"the group has ended, or hangs: {outcomes}\n{group.output[-3000:]}")
        time.sleep(every_s)


def rows(config: Config) -> list[dict[str, Any]]:
    """All rows of the run's metrics."""
    return [json.loads(line) for line in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]


def count_rows(config: Config) -> int:
    """Whole rows written so far; the run may be going on."""
    file = Path(config.run_dir, "metrics.jsonl")
    return file.read_text().count("\n") if file.exists() else 0


def training_rows(config: Config) -> list[dict[str, Any]]:
    return [row for row in rows(config) if "loss" in row]


def validation_rows(config: Config) -> list[dict[str, Any]]:
    return [row for row in rows(config) if "loss" not in row]


def losses(config: Config) -> list[float]:
    """Training loss of every step, each of which must be there once and in order."""
    found = training_rows(config)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1)), "steps are missing or there twice"
    return [row["loss"] for row in found]


def checkpoints(config: Config) -> list[str]:
    """Names of all folders of checkpoints, unfinished ones included."""
    return sorted(folder.name for folder in Path(config.run_dir, "checkpoints").iterdir())


def continue_from(source: Config, config: Config, step: int) -> Config:
    """Make the run folder of `config` a copy of that of `source` as it was after its checkpoint of `step`."""
    shutil.copytree(source.run_dir, config.run_dir)
    for folder in Path(config.run_dir, "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    return config


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
