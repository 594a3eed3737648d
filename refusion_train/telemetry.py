"""What a run tells the world: the console, RUN/metrics.jsonl, TensorBoard, and its last words to the launcher.

Only one rank reports (`active`); on the others every call does nothing. metrics.jsonl has one object per optimizer
step and one per validation; `step` in it counts steps done, so step n is the last one within checkpoint n. When a
run goes on from checkpoint n, what was reported of later steps is cut, so that no step is there twice.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refusion_train.config import Config
from refusion_train.errors import RefusionError, TrainingError
from refusion_train.plan.compute import gpu_of_device

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
_SOURCES_INTERVAL = 50  # lines of the console between two of them that tell what was read of each source
ERROR_FILE = "REFUSION_ERROR_FILE"  # environment: where a rank leaves its error for the launcher that started it


class Telemetry:
    """Reports one run. Use it as a context manager.

    first_step: steps done before this process started; later rows of an earlier process are cut.
    """

    def __init__(self, config: Config, *, first_step: int, active: bool) -> None:
        self._total = config.train.steps
        self._interval = config.train.log_interval
        self._active = active
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._writer: Any = None
        self._rows: Any = None
        if not active:
            return
        self._run_dir = Path(config.run_dir)
        self._started, self._first_step = time.monotonic(), first_step
        with self._writing():
            cut_metrics(self._run_dir / METRICS, first_step)
            # Unbuffered: what could not be written must not be tried again when the file is closed.
            self._rows = open(self._run_dir / METRICS, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            if config.train.tensorboard:
                from torch.utils.tensorboard.writer import SummaryWriter

                self._writer = SummaryWriter(str(self._run_dir / TENSORBOARD), purge_step=first_step + 1)
        if sys.stdout.isatty():
            self._start_progress(first_step)

    def step(self, row: dict[str, Any]) -> None:
        """Report one optimizer step: a row as `train.step` makes it."""
        if not self._active:
            return
        self._write(row)
        step = row["step"]
        if self._writer is not None and step % self._interval == 0:
            self._to_tensorboard(row, "train")
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, loss=_number(row["loss"]), speed=_speed(row))
        elif step % self._interval == 0 or step == self._total:
            self.say(self._line(row))
        if "sources" in row and (step % (_SOURCES_INTERVAL * self._interval) == 0 or step == self._total):
            shares = (f"{n} {s['share']:.1%} ({s['epochs']:.3g} epochs)" for n, s in row["sources"].items())
            self.say(f"read so far: {', '.join(shares)}")

    def validation(self, row: dict[str, Any]) -> None:
        """Report one validation: `step` and the `val_*` numbers."""
        if not self._active:
            return
        self._write(row)
        if self._writer is not None:
            self._to_tensorboard(row, "validation")
        numbers = "  ".join(f"{key.removeprefix('val_')} {_number(v)}" for key, v in row.items() if key != "step")
        self.say(f"validation after step {row['step']}: {numbers}")

    def say(self, text: str) -> None:
        """Print one line, above the progress bar if there is one."""
        if not self._active:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """End the bar and write out everything."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with self._writing():
                writer.close()
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, row: dict[str, Any]) -> None:
        with self._writing():
            self._rows.write(json.dumps(_finite(row), allow_nan=False).encode() + b"\n")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A disk that is full or gone is the user's to mend: one line."""
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"cannot write reports to {self._run_dir}: {error.strerror or error}; mend that and run again: "
                "the run goes on from its last checkpoint"
            ) from error

    def _to_tensorboard(self, row: dict[str, Any], section: str) -> None:
        with self._writing():
            self._add_scalars(row, section)

    def _add_scalars(self, row: dict[str, Any], section: str) -> None:
        for key, value in row.items():
            if isinstance(value, list):  # a curve per noise bucket
                for i, entry in enumerate(value):
                    if entry is not None:
                        self._writer.add_scalar(f"{key}/{i}", entry, row["step"])
            elif isinstance(value, dict):  # a group of curves per source
                for name, numbers in value.items():
                    for what, number in numbers.items():
                        self._writer.add_scalar(f"{key}/{name}/{what}", number, row["step"])
            elif key != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(f"{section}/{key.removeprefix('val_')}", value, row["step"])

    def _start_progress(self, first_step: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s  left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=self._total, completed=first_step, loss="-", speed="-")
        self._progress.start()

    def _line(self, row: dict[str, Any]) -> str:
        per_step = (time.monotonic() - self._started) / max(1, row["step"] - self._first_step)
        left = int(per_step * (self._total - row["step"]))
        return (
            f"step {row['step']}/{self._total}  loss {_number(row['loss'])}  ar {_number(row['loss_ar'])}  "
            f"mdm {_number(row['loss_mdm'])}  grad norm {_number(row['grad_norm'])}  lr {row['lr']:.2e}  "
            f"{_speed(row)} tokens/s  left {left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        )


def cut_metrics(file: Path, last_step: int) -> None:
    """Cut `file` before the first row of a later step; rows are in order, so that what is left is what is wanted.

    A half-written row goes too.
    """
    if not file.exists():
        return
    kept = 0
    with open(file, "rb+") as rows:
        for line in rows:
            if not line.endswith(b"\n") or _step_of(line) > last_step:
                break
            kept += len(line)
        rows.truncate(kept)


def has_validation(run_dir: str | os.PathLike[str], step: int) -> bool:
    """Whether the run's metrics hold a validation after `step`."""
    file = Path(run_dir) / METRICS
    if not file.exists():
        return False
    with open(file, "rb") as rows:
        return any(b'"val_' in line and _step_of(line) == step for line in rows)


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list) else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _speed(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_s']:,.0f}"


# ------------------------------------------------------------------------------------------------------ measuring


def peak_memory_mb() -> float:
    """Peak memory of this process in MB (10^6 bytes): allocated on the GPU if there is one, else resident."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def peak_flops() -> float | None:
    """Dense bf16 FLOP/s of this process's GPU, if it is a known one."""
    import torch

    if not torch.cuda.is_available():
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name())
    return None if gpu is None else gpu.flops


# ------------------------------------------------------------------------------------------- warnings and last words


class _ToStderr(logging.Handler):
    """Prints to whatever sys.stderr is at the time, so that lines stand above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr, flush=True)


def show_warnings() -> None:
    """Print the package's warnings on stderr, one line each; not those of libraries about their own code."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|deepspeed|megatron)\.")
    logger = logging.getLogger("refusion_train")
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr(logging.WARNING))


def leave_error(error: BaseException, *, consequence: bool = False) -> None:
    """Leave this rank's error, with the time, for the launcher, so that it can tell the cause from the consequences.

    consequence: the error is that another rank has gone. The launcher may have put {rank} into the file's name.
    """
    file = os.environ.get(ERROR_FILE)
    if not file:
        return
    ours = isinstance(error, RefusionError)
    first_line = next(iter(str(error).strip().splitlines()), "")
    text = str(error) if ours else f"{type(error).__name__}: {first_line}"
    code = error.exit_code if isinstance(error, RefusionError) else 1
    content = {"time": time.time(), "expected": ours, "consequence": consequence, "error": text, "code": code}
    Path(file.replace("{rank}", os.environ.get("RANK", "0"))).write_text(json.dumps(content), encoding="utf-8")
