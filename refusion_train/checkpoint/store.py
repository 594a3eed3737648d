"""Checkpoints on disk that are either whole or not there: written aside, hashed, described last, renamed into place.

    CHECKPOINTS/step-00001000/*.distcp .metadata   logical tensors (torch.distributed.checkpoint; `files` has their
                                                   bytes), of any layout of ranks
                              state.json           step, tokens, cursor, resolved configuration, dataset fingerprint
                              manifest.json        size and sha256 of every other file, written last

A folder is written as `step-00001000.tmp`; only the last rename gives it its name, so a kill at any moment leaves
either the old state or the new one. Reading trusts nothing: sizes and hashes are checked against the manifest, and
what fails is passed over, with a warning that names it, for the checkpoint before.

Everything that several ranks do together (`save`, `on_first_rank`, `on_every_rank`) ends the same way on all of them:
an error on one is raised on every one, so nobody waits for a rank that has given up. These take a `group` over all
ranks to talk in, the default one if None; `writer` saves in a thread, with a group for it alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from refusion_train.checkpoint.files import HashingWriter, SliceReader, hash_file
from refusion_train.errors import CheckpointError, RefusionError

logger = logging.getLogger(__name__)

FORMAT, VERSION = "refusion-checkpoint", 2
CHECKPOINTS, MANIFEST, STATE, METADATA = "checkpoints", "manifest.json", "state.json", ".metadata"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".tmp"
T = TypeVar("T")

# ------------------------------------------------------------------------------------------------------- saving


def save(
    root: str | os.PathLike[str],
    step: int,
    tensors: dict[str, Any],
    state: dict[str, Any],
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint of `step` below `root` and remove all but the `keep` newest good ones. Collective.

    tensors: what DCP takes; every rank passes its own part (ShardedEntry, or tensors that all ranks hold alike).
    state: JSON-serialisable; the first rank's is written.
    Raises CheckpointError on every rank if any rank could not write; the unfinished folder is removed then and
    earlier checkpoints are as they were.
    """
    root = Path(root)
    unfinished = root / f"{step_name(step)}{_UNFINISHED}"
    try:
        on_first_rank(lambda: _begin(root, unfinished), group)
        files = _write_tensors(unfinished, tensors, group)
        return on_first_rank(lambda: _commit(root, unfinished, step, files, state, keep), group)
    except CheckpointError as error:
        if _rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        place = root / step_name(step)
        raise CheckpointError(f"cannot save checkpoint {place}: {error}; earlier checkpoints are untouched") from error


def checkpoints_of(run_dir: str | os.PathLike[str]) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(run_dir) / CHECKPOINTS


def step_name(step: int) -> str:
    """Name of the folder that holds the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def _begin(root: Path, unfinished: Path) -> None:
    """Make an empty folder to write into, clearing what killed writers have left."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(leftover)
    unfinished.mkdir()


def _write_tensors(
    unfinished: Path, tensors: dict[str, Any], group: dist.ProcessGroup | None
) -> dict[str, dict[str, Any]]:
    """Every rank writes its part, synced to disk; size and hash of all files. Collective.

    DCP raises on all ranks what fails on one; an error of the group itself is not caught here.
    """
    writer = HashingWriter(unfinished)
    try:
        with _without_warning():
            dcp_save(tensors, storage_writer=writer, process_group=group)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(_root_cause(error)) from error
    return {name: entry for part in gather(writer.written, group) for name, entry in part.items()}


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """Of a process without a process group, DCP warns that there is none. Filters of warnings belong to all threads."""
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _commit(
    root: Path, unfinished: Path, step: int, files: dict[str, dict[str, Any]], state: dict[str, Any], keep: int
) -> Path:
    """Write the state, then the manifest, then give the folder its name: from here on the checkpoint exists."""
    _write_json(unfinished / STATE, state)
    files = {**files, **_describe([unfinished / METADATA, unfinished / STATE])}
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": dict(sorted(files.items()))}
    _write_json(unfinished / MANIFEST, manifest)
    _sync_folder(unfinished)
    final = root / step_name(step)
    if final.exists():  # a damaged one that this run has passed over and now reached again
        _remove(final)
    os.rename(unfinished, final)
    _sync_folder(root)
    _retain(root, keep)
    return final


def _retain(root: Path, keep: int) -> None:
    """Remove everything older than the `keep` newest checkpoints that are complete by size."""
    complete = 0
    for folder in reversed(folders(root)):
        if complete >= keep:
            _remove(folder)
        elif _damage(folder, hashes=False) is None:
            complete += 1


def _remove(folder: Path) -> None:
    """Delete a checkpoint; a kill half-way leaves an unfinished folder, not a damaged checkpoint."""
    aside = folder.with_name(f"{folder.name}.old{_UNFINISHED}")
    os.rename(folder, aside)
    shutil.rmtree(aside)


# ------------------------------------------------------------------------------------------------------ reading


def folders(root: str | os.PathLike[str]) -> list[Path]:
    """Folders below `root` that bear a checkpoint's name, oldest first, good or not."""
    root = Path(root)
    found = [folder for folder in root.iterdir() if _NAME.fullmatch(folder.name)] if root.is_dir() else []
    return sorted(found, key=_step_of)


def latest_good(root: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint whose files all agree with its manifest; None if there is no checkpoint at all.

    One warning for each damaged one that is passed over. Raises CheckpointError if there are checkpoints but none
    is good: starting over would silently throw a run away. Not collective: see `on_first_rank`.
    """
    present = folders(root)
    reasons: list[str] = []
    for folder in reversed(present):
        damage = _damage(folder)
        if damage is None:
            return folder
        reasons.append(f"{folder.name}: {damage}")
        logger.warning("checkpoint %s is passed over: %s", folder, damage)
    if reasons:
        raise CheckpointError(
            f"none of the {len(present)} checkpoints in {root} is good ({'; '.join(reasons)}); restore one, "
            "or remove that folder to start again from the beginning"
        )
    return None


def check(folder: str | os.PathLike[str]) -> None:
    """Raise CheckpointError unless `folder` is a whole, undamaged checkpoint."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder {folder}")
    damage = _damage(folder)
    if damage is not None:
        raise CheckpointError(f"checkpoint {folder} is damaged: {damage}")


def resolve(path: str | os.PathLike[str]) -> Path:
    """The good checkpoint that `path` names: one itself, or the newest of a run folder or a folder of checkpoints.

    Raises CheckpointError when there is none, or when the one that is named is damaged.
    """
    path = Path(path)
    if _NAME.fullmatch(path.name) and path.is_dir():
        check(path)
        return path
    for root in (checkpoints_of(path), path):
        found = latest_good(root)
        if found is not None:
            return found
    raise CheckpointError(
        f"no checkpoint in {path}; give a run folder or a folder such as checkpoints/{step_name(1000)}"
    )


def read_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint's state.json."""
    file = Path(folder) / STATE
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error


def load(folder: str | os.PathLike[str], tensors: dict[str, Any], reader: SliceReader | None = None) -> None:
    """Fill `tensors` (in place; any layout) from a checkpoint; only what they hold is read. Collective.

    reader: of this folder, for several loads from it.
    Raises CheckpointError for a tensor that the checkpoint lacks or holds in another shape.
    """
    try:
        with _without_warning():
            dcp_load(tensors, storage_reader=reader or SliceReader(folder))
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot load checkpoint {folder}: {_root_cause(error)}") from error


def _damage(folder: Path, hashes: bool = True) -> str | None:
    """Why a folder is not a good checkpoint, naming the file; None if it is one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
            return f"{MANIFEST} is of format {manifest.get('format')} {manifest.get('version')}, not {FORMAT} {VERSION}"
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
        if hashes:
            found = _describe([folder / name for name in files])
            for name, entry in files.items():
                if found[name]["sha256"] != entry["sha256"]:
                    return f"{name} differs from its sha256 in {MANIFEST}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read: {type(error).__name__}: {error}"
    return None


def _step_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match is not None, f"{folder} does not have a checkpoint's name"
    return int(match[1])


# ------------------------------------------------------------------------------------------------- files, hashes


def _describe(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Name -> {bytes, sha256}; several files at once, as hashing releases the GIL."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return {file.name: entry for file, entry in zip(files, pool.map(hash_file, files), strict=True)}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    with open(file, "w", encoding="utf-8") as stream:
        stream.write("{" + ",\n ".join(lines) + "}\n")
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _root_cause(error: BaseException) -> str:
    """The one line that matters: of a failure on several ranks the first; of a chain the operating system's."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = min(failures.items())
        return f"rank {rank}: {_root_cause(inner)}" if _world() > 1 else _root_cause(inner)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            advice = "; free some space and run again" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            return f"{os.strerror(cause.errno)}{advice}"
        cause = cause.__cause__ or cause.__context__
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"


# ------------------------------------------------------------------------------------------ agreement among ranks


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on the first rank and return its result on all. Collective.

    A RefusionError of it, or an OSError as a CheckpointError, is raised on all of them.
    """
    outcome: list[Any] = [None, None]
    if _rank() == 0:
        outcome = list(_attempt(action))
    if _world() > 1:
        dist.broadcast_object_list(outcome, src=0, group=group)
    result, error = outcome
    if error is not None:
        raise error
    return result


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on every rank and return the rank's own result. Collective.

    If it raises a RefusionError or OSError on some rank, the first such rank's error is raised on all of them.
    """
    result, error = _attempt(action)
    for failure in gather(error, group):
        if failure is not None:
            raise failure
    return result  # type: ignore[return-value]


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, in order of rank, on all of them. Collective."""
    if _world() == 1:
        return [value]
    values: list[Any] = [None] * _world()
    dist.all_gather_object(values, value, group=group)
    return values


def _attempt(action: Callable[[], T]) -> tuple[T | None, RefusionError | None]:
    try:
        return action(), None
    except RefusionError as error:
        return None, error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return None, CheckpointError(f"{place}{_root_cause(error)}")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
