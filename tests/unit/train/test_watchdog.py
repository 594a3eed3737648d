"""A process that gets nowhere ends by itself, and says where it was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refusion_train.train.watchdog import Watchdog

HANGS = {
    "waits": "threading.Event().wait()",
    "holds the interpreter": "ctypes.PyDLL(None).sleep(60)",
}


def _hang(code: str, errors: Path) -> subprocess.CompletedProcess[str]:
    program = f"""
import ctypes, os, threading
os.environ['REFUSION_ERROR_FILE'] = {str(errors)!r}
from refusion_train.train import watchdog
watchdog._LATER_S = 0.5
def in_the_step():
    {code}
with watchdog.Watchdog(0.5 / 60) as watch:
    watch.beat(7)
    in_the_step()
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize("how", HANGS)
def test_it_ends_what_hangs_and_shows_the_stack(how: str, tmp_path: Path) -> None:
    result = _hang(HANGS[how], tmp_path / "error")
    assert result.returncode == 1
    assert "in in_the_step" in result.stderr, "the stack shows where"
    if how == "waits":
        assert "rank 0: no step was completed for" in result.stderr and "after step 7" in result.stderr
        assert json.loads((tmp_path / "error").read_text())["code"] == 1


def test_it_lets_be_what_goes_on_or_has_ended() -> None:
    with Watchdog(0.6 / 60) as watch:
        for step in range(10):
            time.sleep(0.1)
            watch.beat(step)
    with Watchdog(None):
        pass
    time.sleep(1.0)
    assert not watch._thread.is_alive()
