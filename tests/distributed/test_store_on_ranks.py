"""Saving on several ranks: each writes its part, and all end the same way when one of them cannot."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import torch
from processes import run

from refusion_train.checkpoint import store
from refusion_train.checkpoint.sharded import ShardedEntry
from refusion_train.config import Config
from refusion_train.errors import CheckpointError, ConfigError
from refusion_train.parallel.groups import destroy, init_groups


def _entries(rank: int) -> dict[str, Any]:
    """Two rows of four, one on each of two ranks."""
    return {"weight.master": ShardedEntry((2, 4), {(rank, 0): torch.full((1, 4), float(rank))})}


def _save(root: str, failing: str) -> tuple[str, str]:
    groups = init_groups(Config())
    if failing == "write" and groups.rank == 1:
        _break(store.HashingWriter, "write_data")
    if failing == "sync" and groups.rank == 1:
        _break(os, "fsync")
    if failing == "commit" and groups.rank == 0:
        _break(store, "_write_json")
    try:
        result = str(store.save(root, 3, _entries(groups.rank), {"step": 3}, keep=1)), ""
    except CheckpointError as error:
        result = "", str(error)
    destroy()
    return result


def _break(owner: Any, name: str) -> None:
    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    setattr(owner, name, full)


def test_every_rank_writes_its_part(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000003"
    assert run(_save, 2, str(tmp_path), "") == [(str(folder), "")] * 2
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"}
    assert store.latest_good(tmp_path) == folder
    whole = {"weight.master": torch.zeros(2, 4)}
    store.load(folder, whole)
    assert whole["weight.master"].tolist() == [[0.0] * 4, [1.0] * 4]


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    run(_save, 2, str(tmp_path), "")
    for failing in ("write", "sync", "commit"):
        results = run(_save, 2, str(tmp_path), failing)
        assert results[0] == results[1]
        text = results[0][1]
        assert "step-00000003" in text and "No space left on device" in text and "\n" not in text
        assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000003"]


def _agree(failing: int) -> list[str]:
    groups = init_groups(Config())

    def action() -> str:
        if groups.rank == failing:
            raise ConfigError(f"wrong on {groups.rank}")
        return f"fine on {groups.rank}"

    results = []
    for together in (store.on_first_rank, store.on_every_rank):
        try:
            results.append(together(action))
        except ConfigError as error:
            results.append(str(error))
    destroy()
    return results


def test_agreement() -> None:
    assert run(_agree, 2, 0) == [["wrong on 0", "wrong on 0"]] * 2
    assert run(_agree, 2, 1) == [["fine on 0", "wrong on 1"]] * 2
    assert run(_agree, 2, 9) == [["fine on 0", "fine on 0"], ["fine on 0", "fine on 1"]]
