"""The stretches of a job, one after the other: what RUN/attempts.jsonl tells, and whether another may follow.

The batch script calls `begin` before the ranks start and `end` after them; between two stretches nothing of ours
runs, so all that is known lies in the run folder. Needs the standard library only, and so starts at once.

    {"event": "begin", "attempt": 2, "job": "17", "restart": 1, "time": "...", "nodes": "node[1-2]", "step": 40}
    {"event": "end", "attempt": 2, "job": "17", "time": "...", "code": 75, "why": "stopped", "reason": "...",
     "step": 80, "next": "again"}

`step` is that of the newest checkpoint. why: finished; stopped (by a signal, saved); interrupted (Slurm ended the
stretch: preemption, requeue, scancel); failed; configuration (exit code 2); lost (no end was written, as
after a node failure; noted by the next begin).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

ATTEMPTS = "attempts.jsonl"
FOLDER = "slurm"  # in the run folder: batch script, configuration, logs
HOLDER = "holder"  # in it: number of the job that the run folder belongs to
INTERRUPTED = "interrupted"  # in an attempt's folder: the batch script was told to end
LOG = "output.log"
AGAIN, FAILED, CONFIGURATION = 75, 1, 2
_CHECKPOINT = re.compile(r"step-(\d{8,})")
_SIGNALLED = {128 + number for number in (2, 10, 15)}  # INT, USR1, TERM before the ranks had begun to listen


def read(run: Path) -> list[dict[str, Any]]:
    """All events of a run, oldest first; a line that a kill has cut short is left out."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run / ATTEMPTS).read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def newest_step(run: Path) -> int:
    """Step of the newest whole checkpoint, by its name; 0 if there is none."""
    steps = [0]
    with contextlib.suppress(FileNotFoundError):
        for folder in (run / "checkpoints").iterdir():
            match = _CHECKPOINT.fullmatch(folder.name)
            if match and (folder / "manifest.json").exists():
                steps.append(int(match[1]))
    return max(steps)


def folder_of(run: Path, job: str, restart: int) -> Path:
    """Where a stretch keeps its log and the errors of its ranks."""
    return run / FOLDER / f"{job}-{restart}"


def begin(run: Path, job: str, restart: int, nodes: str, max_stalls: int, holder: str = "", state: str = "") -> int:
    """Take the run folder for this job and note the start; 0 if the ranks may start, else 1 after saying why.

    holder, state: the job that had the folder when the script looked, and its state in the queue ("" if it is in none).
    """
    problem = _take(run / FOLDER / HOLDER, job, holder, state)
    if problem:
        return _refuse(f"{run} {problem}")
    events, step = read(run), newest_step(run)
    last = events[-1] if events else {}
    if last.get("event") == "begin":
        told = (folder_of(run, str(last["job"]), last["restart"]) / INTERRUPTED).exists()
        reason = "ended by Slurm" if told else "no end was written: a node failed, or the batch script was killed"
        ended = {"code": None, "why": "interrupted" if told else "lost", "reason": reason, "step": step}
        _append(run, {"event": "end", "attempt": last["attempt"], "job": last["job"], "time": _now(), **ended})
        events = read(run)
    attempt = 1 + max((event["attempt"] for event in events), default=0)
    if stalls(events, job) >= max_stalls:
        reason = _stalled(max_stalls, step)
        ended = {"code": None, "why": "failed", "reason": reason, "step": step, "next": "none"}
        _append(run, {"event": "end", "attempt": attempt - 1, "job": job, "time": _now(), **ended})
        release(run, job)
        return _refuse(reason)
    started = {"job": job, "restart": restart, "time": _now(), "nodes": nodes, "step": step}
    _append(run, {"event": "begin", "attempt": attempt, **started})
    print(f"attempt {attempt} of {run}: job {job} on {nodes}, from step {step}", flush=True)
    return 0


def end(run: Path, job: str, restart: int, code: int, max_stalls: int) -> int:
    """Note how a stretch ended. 0: the run is finished; 75: the job should run again; 1 or 2: it should not.

    code: that of srun. After an interruption 75 is returned as well; it is for Slurm to run the job again, or not.
    """
    folder, step = folder_of(run, job, restart), newest_step(run)
    interrupted = (folder / INTERRUPTED).exists()
    errors = rank_errors(folder)
    if code == 0:
        why, reason = "finished", "all steps are done"
    elif interrupted:
        why, reason = "interrupted", "Slurm ended it (preemption, requeue or scancel)"
    elif code == AGAIN or (code in _SIGNALLED and not errors):
        why, reason = "stopped", "saved after a signal" if code == AGAIN else "a signal came before the training began"
    elif code == CONFIGURATION or _only_configuration(errors):
        why, reason = "configuration", errors[0]["text"] if errors else "see the log"
    else:
        why, reason = "failed", errors[0]["text"] if errors else f"srun ended with code {code}; see the log"
    events = read(run)
    attempt = max((event["attempt"] for event in events if event["event"] == "begin"), default=1)
    ended = {"event": "end", "attempt": attempt, "job": job, "time": _now(), "code": code, "why": why, "reason": reason}
    verdict = {"finished": 0, "configuration": CONFIGURATION}.get(why, AGAIN)
    if verdict == AGAIN and why != "interrupted" and stalls([*events, {**ended, "step": step}], job) >= max_stalls:
        verdict = FAILED
        ended["reason"] = f"{_stalled(max_stalls, step)} The last: {reason}"
    following = "slurm" if why == "interrupted" else "again" if verdict == AGAIN else "none"
    _append(run, {**ended, "step": step, "next": following})
    if verdict != AGAIN:
        release(run, job)
    print(f"attempt {attempt} ended at step {step}: {why} ({ended['reason']})", flush=True)
    return verdict


def stalls(events: list[dict[str, Any]], job: str) -> int:
    """How many of the newest stretches of a job, one after the other, have brought no newer checkpoint.

    Those that Slurm ended do not count, and do not break the row.
    """
    count, begun = 0, {event["attempt"]: event for event in events if event["event"] == "begin"}
    for event in reversed(events):
        if event["event"] != "end" or event["job"] != job or event["attempt"] not in begun:
            continue
        if event["why"] == "interrupted":
            continue
        if event["why"] in ("finished", "configuration") or event["step"] > begun[event["attempt"]]["step"]:
            break
        count += 1
    return count


def rank_errors(folder: Path) -> list[dict[str, Any]]:
    """What ranks have left about their failures: the cause first, those who lost a partner last."""
    found = []
    for file in folder.glob("rank-*.error"):
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(file.read_text())
            content["text"] = f"{file.stem.replace('-', ' ')}: {content['error']}"
            found.append(content)
    return sorted(found, key=lambda content: (content.get("consequence", False), content.get("time", 0.0)))


def release(run: Path, job: str) -> None:
    """Give the run folder back, if this job has it."""
    file = run / FOLDER / HOLDER
    with contextlib.suppress(OSError):
        if file.read_text().strip() == job:
            file.unlink()


def _only_configuration(errors: list[dict[str, Any]]) -> bool:
    """Whether the cause is one that another start would meet again; torchrun hides the exit code."""
    return bool(errors) and errors[0].get("code") == CONFIGURATION


def _take(file: Path, job: str, holder: str, state: str) -> str:
    """Make the folder this job's; why not, if another has it. Creating a file is atomic on network file systems too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(file, "x") as taken:
            taken.write(job)
        return ""
    except FileExistsError:
        found = file.read_text().strip()
    if found == job:
        return ""
    if found != holder and found:
        return f"was taken by job {found} at this moment; submit again when that has ended"
    if found and state:
        return (
            f"is in use by job {found} ({state}); wait for it and submit again, stop it with `scancel {found}`, or "
            "give another run_dir"
        )
    aside = file.with_name(f"{HOLDER}.{job}")
    aside.write_text(job)
    os.replace(aside, file)
    return ""


def _stalled(count: int, step: int) -> str:
    return (
        f"{count} attempts in a row have ended at step {step} without a newer checkpoint; mend the cause and submit "
        "again."
    )


def _append(run: Path, event: dict[str, Any]) -> None:
    with open(run / ATTEMPTS, "a+b") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":  # cut short by a kill
            file.write(b"\n")
        file.write(json.dumps(event).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _refuse(message: str) -> int:
    print(f"refusion: error: {message}", file=sys.stderr, flush=True)
    return FAILED


def main(argv: list[str] | None = None) -> int:
    """`python -m launchers.attempt begin|end RUN ...`, for the batch script."""
    parser = argparse.ArgumentParser(
        prog="python -m launchers.attempt", description="For batch scripts: note a start or an end."
    )
    parser.add_argument("what", choices=("begin", "end"))
    parser.add_argument("run", type=Path)
    parser.add_argument("--job", required=True)
    parser.add_argument("--restart", type=int, default=0)
    parser.add_argument("--max-stalls", type=int, default=3)
    parser.add_argument("--nodes", default="")
    parser.add_argument("--holder", default="")
    parser.add_argument("--state", default="")
    parser.add_argument("--code", type=int, default=0)
    given = parser.parse_args(argv)
    if given.what == "begin":
        return begin(given.run, given.job, given.restart, given.nodes, given.max_stalls, given.holder, given.state)
    return end(given.run, given.job, given.restart, given.code, given.max_stalls)


if __name__ == "__main__":
    sys.exit(main())
