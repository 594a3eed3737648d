"""Shards that are damaged in the middle of a run on two ranks: it stops as one, or goes on without the blocks."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from groups import (
    Group,
    Outcome,
    checkpoints,
    continue_from,
    count_rows,
    losses,
    train_group,
    training_rows,
    validation_rows,
    wait_until,
)  # fmt: skip

from refusion_train.config import Config
from refusion_train.data.shards import ShardSet, ShardWriter
from refusion_train.data.streams import DataOrder
from refusion_train.data.tokenizer import Tokenizer

STEPS = 16


@pytest.fixture
def run(undisturbed: Config, tiny_tokenizer: Path, tmp_path: Path) -> Config:
    """16 steps on data in 128 small blocks and 16 shards, each stream opening one block after the other."""
    config = copy.deepcopy(undisturbed)
    tokenizer = Tokenizer.load(tiny_tokenizer)
    rng = np.random.default_rng(0)
    with ShardWriter(
        tmp_path / "train",
        "train",
        tokenizer.info,
        shard_bytes=5_000,
        block_tokens=128,
        tokenizer_folder=tiny_tokenizer,
    ) as writer:
        for _ in range(16 * 128):
            writer.add(rng.integers(5, 300, 8), 0, 16)
    config.run_dir, config.data.train = str(tmp_path / "run"), str(tmp_path / "train")
    config.data.shuffle_blocks, config.data.prefetch = 1, 1
    config.train.steps, config.train.validation_interval = STEPS, 0
    config.data.validation = None
    config.checkpoint.interval, config.checkpoint.keep = 2, 10
    return config


def late_block(config: Config) -> int:
    """A block that is first read after some 8 steps: that of a stream's fifth unit."""
    order = DataOrder.of(ShardSet.open(config.data.train), config)
    return int(order.unit_block[order.permutation(0)[3 + 4 * config.data.streams]])


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    with open(path, "r+b") as file:  # in place: the ranks have it mapped
        file.write(content)


def truncate(path: Path, offset: int) -> None:
    os.truncate(path, 512)


def vanish(path: Path, offset: int) -> None:
    path.unlink()


def damage(config: Config, how: Callable[[Path, int], None]) -> str:
    """Damage the shard of the late block; its name."""
    dataset, block = ShardSet.open(config.data.train), late_block(config)
    left = block
    for shard in dataset.index.shards:
        if left < len(shard.blocks):
            how(Path(config.data.train) / shard.name, dataset.block_info(block).tokens_offset + 3)
            return shard.name
        left -= len(shard.blocks)
    raise AssertionError("no such block")


def damage_in_the_middle(config: Config, how: Callable[[Path, int], None]) -> tuple[Group, list[Outcome], str]:
    group = Group(config, 2)
    wait_until(lambda: count_rows(config) >= 2, group)
    group.signal(signal.SIGSTOP)
    name = damage(config, how)
    group.signal(signal.SIGCONT)
    return group, group.wait(), name


@pytest.mark.parametrize("how", [flip, truncate, vanish])
def test_stop(run: Config, how: Callable[[Path, int], None]) -> None:
    kept = shutil.copytree(run.data.train, Path(run.run_dir).parent / "kept")
    group, outcomes, name = damage_in_the_middle(run, how)
    assert outcomes[0] == outcomes[1] and outcomes[0].code == 1, f"{outcomes}\n{group.output}"
    assert f"shard {name}" in outcomes[0].error and "\n" not in outcomes[0].error
    assert 2 <= len(losses(run)) < STEPS and checkpoints(run)[-1] == f"step-{len(losses(run)) // 2 * 2:08d}"
    if how is vanish:  # mended, the run goes on to its end
        shutil.copyfile(kept / name, Path(run.data.train) / name)
        train_group(run, 1)
        assert len(losses(run)) == STEPS


@pytest.mark.parametrize("how", [flip, truncate, vanish])
def test_skip(run: Config, how: Callable[[Path, int], None], tmp_path: Path) -> None:
    run.data.on_error = "skip"
    group, outcomes, name = damage_in_the_middle(run, how)
    assert outcomes == [Outcome(0)] * 2, f"{outcomes}\n{group.output}"
    found = training_rows(run)
    assert len(losses(run)) == STEPS
    counts = [row["blocks_left_out"] for row in found]
    assert counts[0] == 0 and counts[-1] >= 1 and counts == sorted(counts)
    block_tokens = found[-1]["tokens_left_out"] / counts[-1]
    assert 100 < block_tokens < 200
    warnings = [line for line in group.output.splitlines() if line.startswith("warning: step")]
    assert len(warnings) == counts[-1] and all(f"shard {name}" in line for line in warnings)
    first = next(row["step"] for row in found if row["blocks_left_out"])
    assert warnings[0].startswith(f"warning: step {first}: left out ") and " documents, " in warnings[0]
    if how is not flip:
        return
    # The block was not in use when it was damaged: it is as if it had been so from the start, on another layout.
    for step in (0, 12):
        again = copy.deepcopy(run)
        again.run_dir = str(tmp_path / f"from-{step}" / "run")
        if step:
            continue_from(run, again, step)
        train_group(again, 1)
        assert losses(again) == pytest.approx(losses(run), abs=1e-5)
        assert training_rows(again)[-1]["blocks_left_out"] == counts[-1], "counted twice, or forgotten"


def test_a_mixture_goes_on_where_a_single_dataset_was(run: Config, tiny_dataset, tmp_path: Path) -> None:
    run.train.steps = 6
    train_group(run, 2)
    old = training_rows(run)
    assert "sources" not in old[-1]
    run.data.train = [
        {"path": run.data.train, "weight": 3},
        {"path": str(tiny_dataset.train), "weight": [[6, 1], [12, 3]]},
    ]
    run.train.steps, run.train.tensorboard = 12, True
    printed = train_group(run, 2)
    assert "with changes" in printed and f"data.train + {tiny_dataset.train}" in printed
    sources = training_rows(run)[-1]["sources"]
    first, new = sources
    assert sum(entry["tokens"] for entry in sources.values()) == training_rows(run)[-1]["tokens"] == 12 * 512
    assert sources[first]["share"] + sources[new]["share"] == pytest.approx(1)
    assert 6 * 512 * 0.25 < sources[new]["tokens"] < 6 * 512 * 0.5
    assert sources[new]["epochs"] == pytest.approx(sources[new]["tokens"] / 16_196)
    assert f"read so far: {first} " in printed
    # And back to one source, on one rank.
    run.data.train, run.train.steps = str(tiny_dataset.train), 14
    assert "its place is kept" in train_group(run, 1)
    assert len(losses(run)) == 14


def test_damage_in_validation(undisturbed: Config, again: Config, tmp_path: Path) -> None:
    """Numbers are of what is left, and the same on any number of ranks."""
    again.data.validation = str(shutil.copytree(undisturbed.data.validation, tmp_path / "validation"))  # type: ignore[arg-type]
    dataset = ShardSet.open(again.data.validation)
    info = dataset.block_info(0)
    flip(Path(again.data.validation) / dataset.index.shards[0].name, info.tokens_offset)
    again.train.steps, again.train.validation_rows, again.data.on_error = 4, None, "skip"
    printed = train_group(again, 2)
    found = validation_rows(again)
    assert [row["val_blocks_left_out"] for row in found] == [1, 1]
    assert printed.count(f"block {info.key}") == 2
    other = copy.deepcopy(again)
    other.run_dir = str(tmp_path / "other" / "run")
    train_group(other, 1)
    assert all(
        row["val_bits_per_byte"] == pytest.approx(row["val_nelbo"] / np.log(2) * 0.615, rel=0.05) for row in found
    )
    for mine, theirs in zip(validation_rows(other), found, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
