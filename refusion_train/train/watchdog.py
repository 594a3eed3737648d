"""The end of a run that hangs: where no step is completed for too long, every rank shows where it is and ends.

A collective that waits for a rank that waits for something else never ends by itself, and a batch system sees a job
that runs. A thread watches; should the interpreter itself be stuck, a timer in C (faulthandler's) does the same a
little later.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

from refusion_train.errors import TrainingError
from refusion_train.telemetry import leave_error

_LATER_S = 30.0  # the timer in C waits so much longer than the thread
_GRACE_S = 5.0  # between the first rank's stacks and its end, which ends the others' collectives


class Watchdog:
    """While entered, ends this process with exit code 1 when `beat` is not called for `minutes`; None: never.

    Every rank has one. Python stacks of all threads go to stderr first, and one line for the launcher. Then it waits
    a little: the end of one rank breaks the collectives of the others, and they too must have shown their stacks.
    """

    def __init__(self, minutes: float | None) -> None:
        self._limit_s = None if minutes is None else minutes * 60
        self._last, self._step = time.monotonic(), 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, step: int) -> None:
        """Something was completed: the time starts anew. step: steps done."""
        self._last, self._step = time.monotonic(), step
        if self._limit_s is not None:
            faulthandler.dump_traceback_later(self._limit_s + _LATER_S, exit=True)

    def __enter__(self) -> Watchdog:
        if self._limit_s is not None:
            self.beat(0)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._limit_s is not None:
            self._end.set()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        assert self._limit_s is not None, "there is nothing to watch"
        while not self._end.wait(min(1.0, self._limit_s / 10)):
            if time.monotonic() - self._last > self._limit_s:
                self._give_up()

    def _give_up(self) -> None:
        where = f"after step {self._step}" if self._step else "since the start"
        error = TrainingError(
            f"no step was completed for {time.monotonic() - self._last:.0f} s {where} (train.timeout_minutes); the "
            "stacks of this rank are in its log"
        )
        print(f"refusion: error: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        leave_error(error)
        time.sleep(_GRACE_S)
        os._exit(error.exit_code)
