"""Folders and files that appear whole or not at all, folders never in the place of something else; pictures."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from refusion_train.errors import ConfigError, DataError

_LOCK = ".lock"


@contextlib.contextmanager
def new_folder(out: str | os.PathLike[str], overwrite: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields `OUT.partial`, empty; when the block ends well it becomes `out`, otherwise it is removed.

    What a killed process left in `OUT.partial` is cleared; while another process writes there, DataError.
    `out` may exist if it is empty, or, with `overwrite`, if `is_ours(out)` says that it is of the same making; it is
    replaced only at the end. Raises DataError otherwise, and when the disk refuses.
    """
    with resumable_folder(out, overwrite, is_ours, lambda _: False, ()) as partial:
        yield partial


@contextlib.contextmanager
def resumable_folder(
    out: str | os.PathLike[str],
    overwrite: bool,
    is_ours: Callable[[Path], bool],
    can_go_on: Callable[[Path], bool],
    leftovers: Sequence[str],
) -> Iterator[Path]:
    """As `new_folder`, but what a killed process left in `OUT.partial` stays if `can_go_on` says so of it, and so it
    stays when the block fails. `leftovers`: folders in it that are removed when `out` is complete."""
    target = Path(out)
    partial, old = (target.with_name(f"{target.name}.{ending}") for ending in ("partial", "old"))
    try:
        recover(target)
        _check_target(target, overwrite, is_ours)
        partial.mkdir(parents=True, exist_ok=True)
        with open(partial / _LOCK, "w") as lock:
            _take(lock.fileno(), target)
            if not can_go_on(partial):
                _clear(partial)
            try:
                yield partial
                _check_target(target, overwrite, is_ours)
                if target.is_dir() and any(target.iterdir()):
                    os.rename(target, old)
                os.rename(partial, target)
            except BaseException:
                if not can_go_on(partial):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            clean(target, leftovers)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        kept = (
            f"; what was done is kept in '{partial}'"
            if partial.exists() and can_go_on(partial)
            else "; nothing was changed there"
        )
        raise DataError(f"cannot write '{target}': {error.strerror or error}{kept}") from None


def clean(out: str | os.PathLike[str], leftovers: Sequence[str]) -> None:
    """Remove from a complete folder what only its making needed."""
    for name in leftovers:
        shutil.rmtree(Path(out) / name, ignore_errors=True)
    (Path(out) / _LOCK).unlink(missing_ok=True)


def recover(out: str | os.PathLike[str]) -> None:
    """Put the old folder back if a process was killed between taking it away and placing the new one."""
    target = Path(out)
    old = target.with_name(f"{target.name}.old")
    if old.is_dir() and not target.exists():
        os.rename(old, target)


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Have `write` write a file aside, then put it in the place of `path`. Raises DataError when the disk refuses."""
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")
    try:
        write(partial)
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"cannot write '{target}': {error.strerror or error}") from None


def new_figure(width: float, height: float) -> Any:
    """An empty picture of so many inches. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib; pip install 'refusion-train[plot]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _check_target(target: Path, overwrite: bool, is_ours: Callable[[Path], bool]) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise DataError(f"'{target}' exists already; choose another folder, or replace it with --overwrite")
    if not target.is_dir() or not is_ours(target):
        raise DataError(f"'{target}' holds other things than this command writes; --overwrite does not touch it")


def _take(lock: int, target: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"another process is writing '{target}' now; wait for it or choose another folder") from None
    except OSError:
        return  # a file system without locks: go on without


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
