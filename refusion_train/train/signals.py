"""Signals that ask a run to stop: noted when they come, acted upon between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED = 75  # exit code (EX_TEMPFAIL of sysexits.h): saved before the end, run again to go on


class StopSignals:
    """While entered, SIGTERM, SIGINT and SIGUSR1 set `requested` and do nothing else, however often they come."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.requested and os.environ.get("RANK", "0") == "0":
            # Not print: the signal may have come in the midst of one.
            os.write(2, f"\n{signal.Signals(number).name}: finishing the step, then saving\n".encode())
        self.requested = True
