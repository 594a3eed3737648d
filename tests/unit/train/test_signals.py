"""Signals are noted, however many come, and handlers are given back."""

from __future__ import annotations

import os
import signal

import pytest

from refusion_train.train.signals import SIGNALS, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_are_noted_and_handlers_given_back(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.requested
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err == f"\n{number.name}: finishing the step, then saving\n"
