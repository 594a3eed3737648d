"""`refusion status`: how runs stand, from their folders and, where there is one, from Slurm's queue.

The folder alone says where a run is; the queue adds whether it waits, runs, or has gone. No accounting is asked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launchers import attempt, slurm
from launchers.batch import submitted
from launchers.submit import element
from refusion_train.errors import ConfigError
from refusion_train.telemetry import METRICS

_TAIL = 1 << 16  # bytes of the metrics that are read: the last rows
_ROWS = 50  # of these, for the speed
_EVERY_S = 10.0
_SLOW = 1.2  # a rank that takes so many times as long as the others is named


@dataclass(frozen=True)
class Standing:
    """What is known of a run. queue: state of its job; loss, tokens_per_s, end: None before the first step; last: how
    the last attempt has ended; slow: a rank that slows the others; then: the jobs that follow."""

    run: Path
    job: str
    queue: str
    step: int
    steps: int | None
    loss: float | None
    tokens_per_s: float | None
    checkpoint: int
    checkpoint_age_s: float | None
    end: datetime | None
    attempts: int
    last: str
    slow: str
    then: str


def show(runs: list[Path], watch: bool) -> int:
    """Print how the runs stand (all of this user's jobs if none is named), once or again and again.

    Returns 0; 1 if Slurm was to be asked and gave no answer.
    """
    for run in runs:
        if not run.is_dir():
            raise ConfigError(f"no run folder {run}")
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    while True:
        told, problem = standings(runs)
        if watch and console.is_terminal:
            console.clear()
        if told:
            console.print(table(told))
            for standing in told:
                for line in filter(None, (standing.last, standing.slow, standing.then)):
                    console.print(f"{standing.run}: {line}", markup=False, soft_wrap=True)
        elif not problem:
            console.print("no job of yours in the queue was made by `refusion submit`; name a run folder")
        if problem:
            print(f"refusion: warning: {problem}", file=sys.stderr, flush=True)
        if not watch:
            return 1 if problem else 0
        time.sleep(_EVERY_S)


def standings(runs: list[Path]) -> tuple[list[Standing], str]:
    """How each run stands, and one line about Slurm if it gave no answer. Slurm is then not asked again."""
    problem = ""
    if not runs:
        try:
            folders = [Path(folder) for _, folder in slurm.my_jobs()]
        except slurm.SlurmError as error:
            return [], str(error)
        runs = [f.parent for f in dict.fromkeys(folders) if f.name == attempt.FOLDER and _is_run(submitted(f.parent))]
    told = []
    for run in itertools.chain.from_iterable(map(_elements, runs)):
        queues: dict[str, str] = {}
        note = submitted(run)
        job, then = str(note.get("job", "")), note.get("then", {})
        for number in filter(None, (job, *then.values())):
            try:
                found = None if problem else slurm.job(number)
                queues[number] = "?" if problem else "not in the queue" if found is None else describe(found)
            except slurm.SlurmError as error:
                problem, queues[number] = str(error), "?"
        told.append(standing(run, job, queues.get(job, ""), {f"{n} (job {j})": queues[j] for n, j in then.items()}))
    return told, problem


def _is_run(note: dict[str, Any]) -> bool:
    """Whether a note of a submission is of a training, or a sweep of them."""
    return "steps" in note or "sweep" in note


def _elements(run: Path) -> list[Path]:
    """The runs of a sweep; of anything else the run itself."""
    return [run / element(number) for number in range(submitted(run).get("sweep", 0))] or [run]


def describe(job: slurm.Job) -> str:
    """State of a job in the queue, with what it waits for or where it runs."""
    if job.state == "PENDING":
        return f"PENDING ({job.reason})"
    return f"RUNNING on {job.nodes}, {job.left} left" if job.state == "RUNNING" else job.state


def standing(run: Path, job: str, queue: str, then: dict[str, str] | None = None) -> Standing:
    """What the run folder tells. then: jobs that follow, with their state in the queue."""
    rows, events = last_rows(run), attempt.read(run)
    steps, newest = _steps(run), attempt.newest_step(run)
    row = rows[-1] if rows else {}
    file = run / "checkpoints" / f"step-{newest:08d}" / "manifest.json"
    age = time.time() - file.stat().st_mtime if newest and file.exists() else None
    ended = [event for event in events if event["event"] == "end"]
    begun = [event for event in events if event["event"] == "begin"]
    last = ""
    if ended:
        at = "" if ended[-1]["attempt"] == 0 else f"attempt {ended[-1]['attempt']} "
        last = f"{at}ended {ended[-1]['time']}, step {ended[-1]['step']}: {ended[-1]['why']} ({ended[-1]['reason']})"
    step = max(row.get("step", 0), newest if not rows else 0)
    return Standing(
        run=run, job=job, queue=queue or "-", step=step, steps=steps, loss=row.get("loss"),
        tokens_per_s=_median([r["tokens_per_s"] for r in rows[-_ROWS:]]), checkpoint=newest, checkpoint_age_s=age,
        end=_expected_end(run, rows, steps), attempts=len(begun), last=last, slow=slow_rank(rows),
        then=", ".join(f"{name}: {state}" for name, state in (then or {}).items()),
    )  # fmt: skip


def last_rows(run: Path) -> list[dict[str, Any]]:
    """The newest training rows of the run's metrics; a row that is being written is left out."""
    try:
        with open(run / METRICS, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and "tokens_per_s" in row:
                found.append(row)
    return found


def slow_rank(rows: list[dict[str, Any]]) -> str:
    """A line about the rank that most of the newest rows name as the slowest, if it is clearly slower than others."""
    told = [row for row in rows[-_ROWS:] if "slowest_rank" in row]
    if not told:
        return ""
    rank = statistics.mode(row["slowest_rank"] for row in told)
    of_rank = [row for row in told if row["slowest_rank"] == rank]
    ratio = statistics.median(row["slowest_ratio"] for row in of_rank)
    if ratio < _SLOW or 2 * len(of_rank) <= len(told):
        return ""
    return (
        f"rank {rank} on {of_rank[-1]['slowest_host']} takes {ratio:.2f} times as long as the others: "
        f"{of_rank[-1]['slowest_rank_s']:.3g} s a step, they take {of_rank[-1]['other_ranks_s']:.3g} s"
    )


def _steps(run: Path) -> int | None:
    """train.steps of the run: of its job, or of the configuration that it keeps."""
    steps = submitted(run).get("steps")
    if steps is not None:
        return int(steps)
    import yaml

    with contextlib.suppress(OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return int(yaml.safe_load((run / "config.yaml").read_text())["train"]["steps"])
    return None


def _expected_end(run: Path, rows: list[dict[str, Any]], steps: int | None) -> datetime | None:
    """When the last step would be done if it went on as it did, from the time of the last row."""
    pace = _median([row["step_s"] for row in rows[-_ROWS:] if row.get("step_s")])
    if pace is None or steps is None or rows[-1]["step"] >= steps:
        return None
    wrote = datetime.fromtimestamp((run / METRICS).stat().st_mtime)
    return wrote + timedelta(seconds=pace * (steps - rows[-1]["step"]))


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def table(told: list[Standing]) -> Table:
    """One row a run."""
    made = Table(box=None, pad_edge=False)
    for name in ("run", "job", "queue", "step", "loss", "tokens/s", "checkpoint", "expected end", "attempts"):
        made.add_column(name, overflow="fold")
    for one in told:
        saved = "-" if not one.checkpoint else f"{one.checkpoint} ({_age(one.checkpoint_age_s)} ago)"
        steps = "" if one.steps is None else f" of {one.steps}"
        made.add_row(
            str(one.run), one.job or "-", one.queue, f"{one.step}{steps}",
            "-" if one.loss is None else f"{one.loss:.4f}",
            "-" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
            saved, "-" if one.end is None else f"{one.end:%Y-%m-%d %H:%M}", str(one.attempts),
        )  # fmt: skip
    return made


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
