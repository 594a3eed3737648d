"""Checkpoints on disk: whole or not there, checked when read, removed when old."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from refusion_train.checkpoint import store
from refusion_train.errors import CheckpointError


def tensors(value: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"weight.master": torch.full((size,), value), "weight.exp_avg": torch.full((3, 5), value + 1)}


def save(root: Path, step: int, keep: int = 3) -> Path:
    return store.save(root, step, tensors(float(step)), {"step": step}, keep)


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    assert folder == tmp_path / "step-00000007"
    found = store.latest_good(tmp_path)
    assert found == folder
    target = tensors(0.0)
    store.load(found, target)
    assert torch.equal(target["weight.master"], torch.full((1000,), 7.0))
    assert torch.equal(target["weight.exp_avg"], torch.full((3, 5), 8.0))
    assert store.read_state(found) == {"step": 7}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {file.name for file in folder.iterdir()} - {"manifest.json"}
    assert not list(tmp_path.glob("*.tmp"))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [folder.name for folder in store.folders(tmp_path)] == ["step-00000003", "step-00000004"]


def test_a_damaged_one_does_not_count_among_those_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / "state.json").write_text("{")
    save(tmp_path, 3, keep=2)
    assert [folder.name for folder in store.folders(tmp_path)] == [f"step-0000000{i}" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: flip_a_byte(next(folder.glob("*.distcp"))), "differs from its sha256"),
        (lambda folder: os.truncate(next(folder.glob("*.distcp")), 100), "has 100 bytes instead of"),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), "is missing"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": '), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "cannot be read"),
        (lambda folder: (folder / "state.json").write_text('{"step": 3}'), "state.json has"),
    ],
)
def test_a_damaged_newest_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, reason: str
) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 20))
    with caplog.at_level(logging.WARNING):
        assert store.latest_good(tmp_path) == tmp_path / "step-00000001"
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    message = warned[0].getMessage()
    assert str(tmp_path / "step-00000020") in message and reason in message
    with pytest.raises(CheckpointError, match="step-00000020 is damaged"):
        store.check(tmp_path / "step-00000020")


def test_no_good_one_is_refused_rather_than_started_over(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .*step-00000001: state.json is missing"):
        store.latest_good(tmp_path)


def test_nothing_there_is_a_beginning(tmp_path: Path) -> None:
    assert store.latest_good(tmp_path / "absent") is None
    (tmp_path / "step-00000005.tmp").mkdir()
    assert store.latest_good(tmp_path) is None


def test_leftovers_of_killed_writers_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "step-00000005.tmp").mkdir()
    (tmp_path / "step-00000005.tmp" / "__0_0.distcp").write_bytes(b"half")
    save(tmp_path, 9)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000009"]


def test_a_damaged_one_is_replaced_when_its_step_is_reached_again(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "state.json").unlink()
    folder = save(tmp_path, 1)
    assert store.latest_good(tmp_path) == folder


def test_resolve_takes_a_run_folder_or_a_checkpoint(tmp_path: Path) -> None:
    folder = save(store.checkpoints_of(tmp_path), 3)
    assert store.resolve(tmp_path) == store.resolve(folder) == store.resolve(folder.parent) == folder
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.resolve(tmp_path / "elsewhere")


def test_a_tensor_of_another_shape_is_one_clear_error(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cannot load checkpoint") as caught:
        store.load(folder, {"weight.master": torch.zeros(1001)})
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file.*Not a directory"):
        save(tmp_path / "file" / "checkpoints", 1)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system to fill: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


# The data are 2,000,000 bytes and some hundred of headers: full at once; in their midst; just after them.
@pytest.mark.parametrize("free", [0, 900_000, 2_008_000])
def test_a_full_disk_is_one_clear_error_and_nothing_is_lost(small_disk: Path, free: int) -> None:
    root = small_disk / "checkpoints"
    save(root, 1)
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - free))
    with pytest.raises(CheckpointError) as caught:
        store.save(root, 2, tensors(2.0, 500_000), {"step": 2, "long": "x" * 20_000}, keep=3)
    text = str(caught.value)
    assert "step-00000002" in text and "No space left on device" in text and "\n" not in text
    assert [entry.name for entry in root.iterdir()] == ["step-00000001"]
    assert store.latest_good(root) == root / "step-00000001"
