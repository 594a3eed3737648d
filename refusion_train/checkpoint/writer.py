"""Saving while training goes on: a snapshot is taken, then a thread writes it as `store.save` does.

The thread has a process group of its own, over the host, which nothing else uses: whatever its collectives wait for,
those of training do not, and there is one thread per rank and one save at a time, so their order is that of the saves.
It hashes and writes without the interpreter lock. (A lower priority would do harm: whenever the thread takes the lock
on a busy machine, training would wait for a thread that does not get to run.)

Whether a save has ended is known to a rank at once, but acted upon when all ranks know it: they compare `ended` in
an exchange that they make anyway, and then `collect` together. So all report a failure at the same step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from refusion_train.checkpoint import store
from refusion_train.checkpoint.snapshot import HostMemory
from refusion_train.errors import CheckpointError

GIVE_UP_S = 5.0  # for a save to end by itself when a rank has gone


class Writer:
    """Saves the checkpoints below `root`, one after the other, keeping the `keep` newest. Used alike on all ranks.

    group: over all ranks, on the host (gloo), used by nothing else; None without torch.distributed.
    """

    def __init__(self, root: Path, keep: int, group: dist.ProcessGroup | None) -> None:
        self._root, self._keep, self._group = root, keep, group
        self._memory = HostMemory()
        self._job: _Job | None = None

    @property
    def step(self) -> int | None:
        """The step that is being saved, or whose outcome has not been collected; None: no such."""
        return None if self._job is None else self._job.step

    @property
    def ended(self) -> bool:
        """Whether there is an outcome to `collect`. Raises what only this rank can know of (a bug, a lost rank)."""
        if self._job is None or self._job.thread.is_alive():
            return False
        if self._job.error is not None and not isinstance(self._job.error, CheckpointError):
            raise self._job.error
        return True

    def save(self, step: int, tensors: dict[str, Any], part: Any, join: Callable[[list[Any]], dict[str, Any]]) -> None:
        """Begin to save; the state of now, to the bit. Returns when the tensors may change.

        tensors: as for `store.save`. part: anything of this rank that pickles; join: makes of the parts of all ranks
        the contents of state.json, later, in the thread. The save before must have been collected.
        """
        assert self._job is None, f"step {self.step} is still being saved; collect it before the next"
        self._job = _Job(step, self._memory.take(tensors), part, join, self._write)

    def collect(self) -> Path:
        """Wait for the save to end; its folder. Collective with respect to errors, which all ranks have alike.

        Raises CheckpointError if it could not be written: then nothing of it is left, and earlier ones are untouched.
        """
        job, self._job = self._job, None
        assert job is not None, "nothing is being saved"
        job.thread.join()
        if job.error is not None:
            raise job.error
        assert job.folder is not None, "a save has ended with neither a folder nor an error"
        return job.folder

    def give_up(self, partner_lost: bool) -> Path | None:
        """Before the process ends for an error: finish what is being written; its folder if it came to that.

        partner_lost: the group is broken; the write cannot be finished, and is left half done if it does not end by
        itself. What is left has no checkpoint's name, and the next save clears it. Raises CheckpointError as `collect`.
        """
        if self._job is None:
            return None
        if partner_lost:
            self._job.thread.join(GIVE_UP_S)
            if self._job.thread.is_alive() or not isinstance(self._job.error, CheckpointError | None):
                return None
        return self.collect()

    def _write(
        self, job: _Job, tensors: dict[str, Any], part: Any, join: Callable[[list[Any]], dict[str, Any]]
    ) -> None:
        state = join(store.gather(part, self._group))
        job.folder = store.save(self._root, job.step, tensors, state, self._keep, self._group)


class _Job:
    """A save in its thread. When that has ended there is a folder or an error."""

    def __init__(self, step: int, tensors: dict[str, Any], part: Any, join: Any, write: Any) -> None:
        self.step = step
        self.folder: Path | None = None
        self.error: BaseException | None = None
        # Daemon: an exit for a lost rank does not wait for it.
        self.thread = threading.Thread(
            target=self._run, args=(write, tensors, part, join), name=f"save-{step}", daemon=True
        )
        self.thread.start()

    def _run(self, write: Any, *arguments: Any) -> None:
        try:
            write(self, *arguments)
        except BaseException as error:
            self.error = error
