"""A folder that appears whole or not at all, and never in the place of something else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from refusion_train.errors import DataError

_LOCK = ".lock"


@contextlib.contextmanager
def new_folder(out: str | os.PathLike[str], overwrite: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields `OUT.partial`, empty; when the block ends well it becomes `out`, otherwise it is removed.

    What a killed process left in `OUT.partial` is cleared; while another process writes there, DataError.
    `out` may exist if it is empty, or, with `overwrite`, if `is_ours(out)` says that it is of the same making; it is
    replaced only at the end. Raises DataError otherwise, and when the disk refuses.
    """
    target = Path(out)
    partial, old = (target.with_name(f"{target.name}.{ending}") for ending in ("partial", "old"))
    try:
        if old.is_dir() and not target.exists():
            os.rename(old, target)  # a process was killed between the two renames below
        _check_target(target, overwrite, is_ours)
        partial.mkdir(parents=True, exist_ok=True)
        with open(partial / _LOCK, "w") as lock:
            _take(lock.fileno(), target)
            _clear(partial)
            try:
                yield partial
                _check_target(target, overwrite, is_ours)
                if target.is_dir() and any(target.iterdir()):
                    os.rename(target, old)
                os.rename(partial, target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            (target / _LOCK).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise DataError(f"cannot write '{target}': {error.strerror or error}; nothing was changed there") from None


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
