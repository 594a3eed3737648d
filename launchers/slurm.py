"""Slurm's commands, each with a timeout, and what they tell about jobs.

Every client of Slurm waits for ever when its controller cannot be reached, so none is called without a limit; an
error is one line that says what to do. Nothing here needs accounting (sacct).
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from refusion_train.errors import RefusionError

TIMEOUT_S = 10.0
SUBMIT_TIMEOUT_S = 60.0


class SlurmError(RefusionError):
    """A command of Slurm that is missing, refuses, or gets no answer."""


class Unreachable(SlurmError):
    """The controller does not answer."""


@dataclass(frozen=True)
class Job:
    """A job as the queue shows it. left: until its time limit, as Slurm writes it."""

    number: str
    state: str
    reason: str
    nodes: str
    left: str


def call(words: list[str], timeout_s: float = TIMEOUT_S) -> str:
    """Run one command and return its output and warnings. Raises SlurmError (Unreachable after `timeout_s`)."""
    try:
        done = subprocess.run(
            words, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise SlurmError(f"{words[0]} is not here; run this on a host of the cluster, where Slurm is set up") from None
    except subprocess.TimeoutExpired:
        raise _unreachable(words[0], f"within {timeout_s:.0f} s") from None
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode:
        if "contact slurm controller" in said or "Connection refused" in said:
            raise _unreachable(words[0], said.splitlines()[-1])
        raise SlurmError(f"{words[0]}: {' / '.join(said.splitlines()) or f'exit code {done.returncode}'}")
    return said


def ping() -> None:
    """Raise Unreachable unless the controller answers."""
    try:
        call(["scontrol", "ping"])
    except Unreachable:
        raise
    except SlurmError as error:
        raise _unreachable("scontrol ping", str(error)) from None


def submit(words: list[str]) -> str:
    """`sbatch WORDS`; the number of the job. Raises SlurmError."""
    try:
        said = call(["sbatch", "--parsable", *words], SUBMIT_TIMEOUT_S)
    except Unreachable as error:
        raise Unreachable(f"{error}; the job may be in the queue all the same: look at `squeue --me`") from None
    return said.splitlines()[-1].split(";")[0]


def jobs(number: str) -> list[Job]:
    """What the controller knows of a job: each element of an array, "17_3" of "17". Raises SlurmError."""
    try:
        said = call(["squeue", "--noheader", "--array", f"--jobs={number}", "--states=all", "--format=%i|%T|%r|%N|%L"])
    except Unreachable:
        raise
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    found = [Job(*fields) for fields in (line.split("|") for line in said.splitlines()) if len(fields) == 5]
    return [job for job in found if number in (job.number, job.number.partition("_")[0])]


def job(number: str) -> Job | None:
    """A job that is in the queue or runs; None if it has left. Raises SlurmError."""
    return next(iter(jobs(number)), None)


LEFT_QUEUE = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
)  # fmt: skip


def active(number: str) -> Job | None:
    """The same, but not what has ended though the controller still remembers it; of an array any other element."""
    return next((job for job in jobs(number) if job.state not in LEFT_QUEUE), None)


def my_jobs() -> list[tuple[str, str]]:
    """Number and working folder of every job of this user that is in the queue. Raises SlurmError."""
    said = call(["squeue", "--noheader", "--me", "--format=%A|%Z"])
    return [(number, folder) for number, bar, folder in (line.partition("|") for line in said.splitlines()) if bar]


def _unreachable(command: str, how: str) -> Unreachable:
    return Unreachable(f"Slurm's controller does not answer ({command}: {how}); is it up? `scontrol ping` tells")


def _environment() -> dict[str, str]:
    """This process's, without what belongs to a job that it may itself be in."""
    keep = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and (name in keep or not name.startswith("SLURM_"))
    }
