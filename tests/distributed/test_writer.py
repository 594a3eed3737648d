"""Saving beside training: the state of the step it was begun at, reported when it is true, and alike on all ranks."""

from __future__ import annotations

import copy
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import run
from tiny import one_step, start, tiny_config

from refusion_train.checkpoint import store
from refusion_train.checkpoint.layout import tensors_to_save
from refusion_train.checkpoint.sharded import ShardedEntry
from refusion_train.checkpoint.writer import Writer
from refusion_train.errors import CheckpointError
from refusion_train.parallel.groups import destroy


def _writer(root: str) -> Writer:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return Writer(Path(root), 3, group)


def _hold(gate: threading.Event) -> None:
    """Let no file of this process be synced before the gate is open: a slow disk."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        assert gate.wait(60)
        fsync(descriptor)

    os.fsync = slow


def _train_during_the_write(config: Any, root: str) -> dict[str, Any]:
    """Two steps, a save that cannot end, two steps more; then it may end."""
    _, engine = start(config)
    writer, gate = _writer(root), threading.Event()
    _hold(gate)
    for step in range(2):
        one_step(engine, step)
    kept = {
        name: (tuple(entry.shape), {offsets: part.clone() for offsets, part in entry.parts.items()})
        for name, entry in tensors_to_save(engine).items()
        if isinstance(entry, ShardedEntry)
    }
    writer.save(2, tensors_to_save(engine), f"rank {dist.get_rank()}", lambda parts: {"parts": parts})
    for step in range(2, 4):
        one_step(engine, step)
        time.sleep(0.1)
        assert not writer.ended and writer.step == 2
        assert store.folders(root) == [], "it looks like a checkpoint before it is one"
    gate.set()
    folder = writer.collect()
    assert writer.step is None and not writer.ended
    stored = {
        name: ShardedEntry(shape, {o: torch.full(part.shape, -1.0) for o, part in parts.items()})
        for name, (shape, parts) in kept.items()
    }
    store.load(folder, copy.copy(stored))
    differing = [
        name for name, (_, parts) in kept.items() for o in parts if not torch.equal(parts[o], stored[name].parts[o])
    ]
    moved = [
        name
        for name, entry in tensors_to_save(engine).items()
        if isinstance(entry, ShardedEntry) and name.endswith(".master")
        for o, part in entry.parts.items()
        if not torch.equal(part, kept[name][1][o])
    ]
    destroy()
    return {"differing": differing, "moved": len(moved), "state": store.read_state(folder), "folder": folder.name}


def test_what_is_written_is_the_state_of_the_step(tmp_path: Path) -> None:
    results = run(_train_during_the_write, 2, tiny_config(parallel__tensor=2), str(tmp_path))
    for result in results:
        assert result["differing"] == []
        assert result["moved"] > 10, "training has not gone on meanwhile"
        assert result["state"] == {"parts": ["rank 0", "rank 1"]}
        assert result["folder"] == "step-00000002"
    store.check(tmp_path / "step-00000002")


def _fail_on_the_second(root: str) -> list[str]:
    groups, engine = start(tiny_config(parallel__zero_stage=1))
    writer, outcomes = _writer(root), []
    fsync, failing = os.fsync, False

    def full(descriptor: int) -> None:
        if failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    if groups.rank == 1:
        os.fsync = full
    for step in range(3):
        failing = step == 1
        one_step(engine, step)
        writer.save(step, tensors_to_save(engine), None, lambda _: {})
        while not writer.ended:  # the step goes on all the same
            time.sleep(0.01)
        try:
            outcomes.append(writer.collect().name)
        except CheckpointError as error:
            outcomes.append(str(error))
    destroy()
    return outcomes


def test_a_failed_write_is_known_to_all_ranks_and_the_next_is_good(tmp_path: Path) -> None:
    first, second = run(_fail_on_the_second, 2, str(tmp_path))
    assert first == second
    assert (first[0], first[2]) == ("step-00000000", "step-00000002")
    assert "step-00000001" in first[1] and "rank 1: No space left on device" in first[1] and "\n" not in first[1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000000", "step-00000002"]
    store.check(tmp_path / "step-00000002")


def _a_bug_in_the_thread(root: str) -> str:
    groups, engine = start(tiny_config())

    def join(_: Any) -> dict[str, Any]:
        raise KeyError("a bug")

    writer = _writer(root)
    writer.save(1, tensors_to_save(engine), None, join if groups.rank == 0 else lambda _: {})
    outcome = "waits"  # as the first rank does not answer
    try:
        while groups.rank == 0 and not writer.ended:
            time.sleep(0.01)
    except KeyError as error:
        outcome = repr(error)
    dist.barrier()
    return outcome


def test_an_error_that_only_one_rank_knows_of_is_raised_there_at_once(tmp_path: Path) -> None:
    assert run(_a_bug_in_the_thread, 2, str(tmp_path)) == ["KeyError('a bug')", "waits"]
