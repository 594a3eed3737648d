"""What a long build must remember to go on after it was killed: its job, and where it stood at the last checkpoint.

Both lie in the folder being written, under `.journal`. A checkpoint is one file, written aside, flushed to the disk and
renamed, so there is always a whole one; what was written behind it is cut off when the build goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from refusion_train.errors import DataError

JOURNAL = ".journal"
_JOB, _CHECKPOINT = "job.json", "checkpoint.npz"
_STATE = "state"


class Journal:
    """The journal of the build in `folder`. Attribute `folder`: for files that only a build needs."""

    def __init__(self, folder: Path):
        self.folder = folder / JOURNAL

    def begin(self, job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """State and arrays of the last checkpoint of the same job; None, with a new journal, if there is none.

        Raises DataError, naming what changed, if the checkpoint is of another job.
        """
        if not (self.folder / _CHECKPOINT).is_file():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            _write(self.folder / _JOB, json.dumps(job).encode())
            return None
        try:
            before = json.loads((self.folder / _JOB).read_bytes())
            with np.load(self.folder / _CHECKPOINT, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            state = json.loads(arrays.pop(_STATE).tobytes())
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"'{self.folder}' is damaged ({error}); begin anew with --fresh") from None
        changes = changes_of(before, json.loads(json.dumps(job)))
        if changes:
            more = f" and {len(changes) - 3} more changes" if len(changes) > 3 else ""
            raise DataError(
                f"'{self.folder.parent}' holds an interrupted build of another kind: {'; '.join(changes[:3])}{more}; "
                "give what it was begun with, or begin anew with --fresh"
            )
        return state, arrays

    def save(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Replace the checkpoint. What it refers to must be on the disk already."""
        temporary = self.folder / f"{_CHECKPOINT}.tmp"
        packed = np.frombuffer(json.dumps(state).encode(), np.uint8)
        with open(temporary, "wb") as file:
            np.savez(file, **{_STATE: packed}, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / _CHECKPOINT)
        _sync_folder(self.folder)


def has_checkpoint(folder: Path) -> bool:
    """Whether a build in this folder can go on."""
    return (folder / JOURNAL / _CHECKPOINT).is_file()


def hash_of(value: Any) -> str:
    """sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def changes_of(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two jobs, in words."""
    changes = []
    for name in before["options"].keys() | now["options"].keys():
        old, new = before["options"].get(name), now["options"].get(name)
        if old != new:
            changes.append(f"{name} was {old}, is {new}")
    names = [name for name in ("tokenizer", "encoder") if before[name] != now[name]]
    changes += [f"the {name} was {before[name]}, is {now[name]}" for name in names]
    old_files, new_files = ({entry[0]: entry[1:] for entry in job["inputs"]} for job in (before, now))
    for path in sorted(old_files.keys() | new_files.keys()):
        if path not in new_files:
            changes.append(f"input '{path}' is gone")
        elif path not in old_files:
            changes.append(f"input '{path}' is new")
        elif old_files[path] != new_files[path]:
            old, new = old_files[path][0], new_files[path][0]
            changes.append(f"input '{path}' changed ({f'{old} to {new} bytes' if old != new else 'a later date'})")
    return sorted(changes)


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
