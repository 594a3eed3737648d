"""Whose a run folder is: one run's, and of one training at a time.

The lock on it is a `flock`: the system gives it back when the process ends, however that comes. Local disks and NFS
(version 4, or 3 with its lock daemon) keep it between hosts, Lustre only when mounted with `flock`. Two things follow:

- A node that has failed may keep its lock on a server for minutes. A later start of the same Slurm job knows that the
  earlier one is over, because Slurm runs a job once at a time: it waits a while, then goes on with a warning.
- Where a file system has no locks, that is said and training goes on; jobs of `refusion submit` are kept apart by
  their batch script, which asks the queue who has the folder (`launchers.attempt`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from refusion_train.config import Config
from refusion_train.errors import ConfigError
from refusion_train.telemetry import METRICS

logger = logging.getLogger(__name__)

LOCK, CONFIG = ".lock", "config.yaml"
CHECKPOINTS = "checkpoints"  # as in checkpoint.store, which imports torch
PATIENCE_S = 60.0  # for the lock of an earlier start of the same job
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def refuse_another_run(config: Config, folder: Path) -> None:
    """Raise ConfigError if `folder` holds a run that `checkpoint.resume: none` must not touch."""
    if config.checkpoint.resume != "none":
        return
    for name in (CHECKPOINTS, METRICS, CONFIG):
        if (folder / name).exists():
            raise ConfigError(
                f"run_dir={config.run_dir} holds a run already ({name}) and checkpoint.resume=none; give another "
                "run_dir, or checkpoint.resume=auto to go on with it"
            )


def hold(folder: Path, stack: ExitStack) -> None:
    """Lock an existing run folder until `stack` is closed.

    Raises ConfigError if another training has it.
    """
    lock = stack.enter_context(open(folder / LOCK, "a+"))  # noqa: SIM115 - it is one
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = _read(lock)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("the file system of %s has no locks; see to it that no second training uses it", folder)
            return
        if not _is_earlier_start(holder):
            raise ConfigError(
                f"run_dir={folder} is in use by another training ({holder or 'unknown'}); wait for it, "
                "or give another run_dir"
            )
        if time.monotonic() - began > PATIENCE_S:
            logger.warning(
                "%s is still locked by an earlier start of this job (%s); going on without it", folder, holder
            )
            return
        time.sleep(0.5)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}{_job()}\n")
    lock.flush()


def _read(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip()


def _job() -> str:
    number = os.environ.get("SLURM_JOB_ID")
    return f", Slurm job {number} start {os.environ.get('SLURM_RESTART_COUNT', '0')}" if number else ""


def _is_earlier_start(holder: str) -> bool:
    """Whether the lock's holder is a start, before this one, of the Slurm job that this process belongs to."""
    match = re.search(r"Slurm job (\S+) start (\d+)$", holder)
    if match is None or match[1] != os.environ.get("SLURM_JOB_ID"):
        return False
    return int(match[2]) < int(os.environ.get("SLURM_RESTART_COUNT", "0"))
