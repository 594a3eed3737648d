"""Groups of real processes: what they are given, how they end, and that none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launchers import local

ROOT = Path(__file__).resolve().parents[3]
RANK = "import json, os, signal, sys, time; rank = int(os.environ['RANK'])\n"


def command(script: str) -> list[str]:
    return [sys.executable, "-c", RANK + textwrap.dedent(script)]


def start_launcher(script: str, nproc: int) -> subprocess.Popen[str]:
    """A launcher in a process of its own, so that it can be signalled and killed."""
    code = f"import sys; from launchers.local import run_group; sys.exit(run_group({command(script)!r}, {nproc}))"
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(files: list[Path], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"not all of {files} appeared"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pids: list[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.02)


def test_every_rank_gets_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    script = f"""
        from pathlib import Path
        text = ' '.join(os.environ[name] for name in {names!r}.split())
        Path({str(tmp_path)!r}, f'{{rank}}').write_text(text)
    """
    assert local.run_group(command(script), 3) == 0
    places = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert [place[:5] for place in places] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len({place[5] for place in places}) == 1
    assert {place[6] for place in places} == {threads}


def test_threads_that_are_set_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    script = f"open({str(tmp_path / 'threads')!r}, 'w').write(os.environ['OMP_NUM_THREADS'])"
    assert local.run_group(command(script), 1) == 0
    assert (tmp_path / "threads").read_text() == "7"


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((75, 75), 75), ((0, 2), 2), ((1, 0), 1)])
def test_exit_codes(codes: tuple[int, int], expected: int) -> None:
    assert local.run_group(command(f"sys.exit({codes}[rank])"), 2) == expected


def test_a_killed_rank_takes_the_group_down(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    script = """
        if rank == 1:
            print('the last words of one', flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    assert local.run_group(command(script), 3) == 1
    assert time.monotonic() - began < 15
    last = capfd.readouterr().err.strip().splitlines()
    assert "rank 1 was killed by signal 9, SIGKILL" in last[-1]
    assert "the last words of one" in last


def test_the_cause_is_told_from_its_consequences(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 loses its partner and says so first; rank 1, which broke, takes its time to end."""
    assert local._LAST_WORDS_S < 4 < local._CAUSE_S
    script = """
        sys.path.insert(0, '.')
        from refusion_train.telemetry import leave_error
        from refusion_train.errors import TrainingError
        if rank == 0:
            leave_error(TrainingError('lost a partner'), consequence=True)
            sys.exit(1)
        time.sleep(4)
        leave_error(ValueError('a broken row'))
        print('Traceback of one')
        sys.exit(1)
    """
    assert local.run_group(command(script), 2) == 1
    last = capfd.readouterr().err.strip().splitlines()
    assert "rank 1 failed with exit code 1 (ValueError: a broken row)" in last[-1]
    assert "Traceback of one" in last


def test_an_error_for_the_user_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
        sys.path.insert(0, '.')
        from refusion_train.telemetry import leave_error
        from refusion_train.errors import ConfigError
        leave_error(ConfigError(f'a.b=1 is wrong'))
        print('refusion: error: a.b=1 is wrong', file=sys.stderr)
        sys.exit(2)
    """
    assert local.run_group(command(script), 2) == 2
    assert capfd.readouterr().err.strip() == "refusion: error: a.b=1 is wrong"


def test_an_error_for_the_user_on_another_rank_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
        sys.path.insert(0, '.')
        from refusion_train.telemetry import leave_error
        from refusion_train.errors import DataError
        if rank == 1:
            leave_error(DataError(f'shard 7 is truncated'))
            sys.exit(1)
        time.sleep(600)
    """
    assert local.run_group(command(script), 2) == 1
    assert capfd.readouterr().err.strip() == "refusion: error: rank 1: shard 7 is truncated"


def test_a_taken_port_is_tried_again(tmp_path: Path) -> None:
    script = f"""
        sys.path.insert(0, '.')
        from refusion_train.telemetry import leave_error
        from pathlib import Path
        if rank == 0 and not Path({str(tmp_path)!r}, 'tried').exists():
            Path({str(tmp_path)!r}, 'tried').touch()
            leave_error(RuntimeError('server socket failed, EADDRINUSE'))
            sys.exit(1)
    """
    assert local.run_group(command(script), 2) == 0


def test_the_port_is_reserved_until_a_rank_listens_on_it() -> None:
    with local._reserved_port() as port, socket.socket() as listener:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, torch's store among them
        listener.bind(("127.0.0.1", port))
        listener.listen()


@pytest.mark.parametrize("number", local.SIGNALS)
def test_signals_are_passed_on_once(tmp_path: Path, number: signal.Signals) -> None:
    script = f"""
        got = []
        signal.signal({int(number)}, lambda *_: got.append(1))
        open(os.path.join({str(tmp_path)!r}, f'ready-{{rank}}'), 'w').close()
        while not got:
            time.sleep(0.01)
        time.sleep(1)
        sys.exit(75 if len(got) == 1 else 1)
    """
    launcher = start_launcher(script, 2)
    wait_for([tmp_path / "ready-0", tmp_path / "ready-1"])
    for _ in range(3):
        launcher.send_signal(number)
        time.sleep(0.1)
    assert launcher.wait(timeout=20) == 75, launcher.stderr and launcher.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_ranks_listen_is_a_stop_too(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM ends them then; of SIGINT the command makes its own exit code, 130."""
    script = f"""
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        open({str(tmp_path)!r} + f'/ready-{{rank}}', 'w').close()
        time.sleep(600)
    """
    launcher = start_launcher(script, 2)
    wait_for([tmp_path / "ready-0", tmp_path / "ready-1"])
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=20)
    assert launcher.returncode == 75, said
    assert said.strip() == f"stopped by {number.name} before the training began"


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    script = f"""
        path = os.path.join({str(tmp_path)!r}, f'pid-{{rank}}')
        open(path + '.tmp', 'w').write(str(os.getpid()))
        os.rename(path + '.tmp', path)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    """
    launcher = start_launcher(script, 2)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    wait_for(files)
    pids = [int(file.read_text()) for file in files]
    assert all(alive(pid) for pid in pids)
    launcher.kill()
    launcher.wait()
    wait_gone(pids)
