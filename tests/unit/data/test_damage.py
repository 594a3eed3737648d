"""Damaged shards in training and validation: one clear error, or left out alike by all, and right again once mended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from memory_shards import PAD, numbered, write_shards
from test_loader import lognormal, objective_of, run, settings

from refusion_train.config import Config, SourceConfig
from refusion_train.data import streams
from refusion_train.data.loader import TrainLoader, ValidationLoader
from refusion_train.data.mixture import Source
from refusion_train.data.shards import ShardSet
from refusion_train.data.streams import Cursor, merge_cursors
from refusion_train.errors import DataError

BLOCK = 17  # in the middle of a shard


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    documents = numbered([length + 1 for length in lognormal(1500)])  # none is empty, as in every built dataset
    return write_shards(tmp_path_factory.mktemp("data") / "train", documents, block_tokens=800)


@pytest.fixture
def folder(whole: ShardSet, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.path, tmp_path / "train"))


def skipping(**changes: object) -> Config:
    return settings(data__on_error="skip", **changes)


def shard_of(folder: Path, block: int) -> Path:
    index = ShardSet.open(folder, check_shards=False).index
    for shard in index.shards:
        if block < len(shard.blocks):
            return folder / shard.name
        block -= len(shard.blocks)
    raise AssertionError("no such block")


def flip(folder: Path, block: int = BLOCK) -> None:
    dataset = ShardSet.open(folder, check_shards=False)
    path, info = shard_of(folder, block), dataset.block_info(block)
    content = bytearray(path.read_bytes())
    content[info.tokens_offset + 5] ^= 1
    path.write_bytes(content)


def truncate(folder: Path, block: int = BLOCK) -> None:
    path = shard_of(folder, block)
    os.truncate(path, path.stat().st_size // 2)


def vanish(folder: Path, block: int = BLOCK) -> None:
    shard_of(folder, block).unlink()


def opened(folder: Path) -> ShardSet:
    return ShardSet.open(folder, check_shards=False)


def everything(loader: TrainLoader, steps: int) -> tuple[list, list]:
    """Pieces (document, start, stop, epoch) and damage of some steps."""
    pieces, damage = [], []
    for _ in range(steps):
        batch = next(loader)
        pieces += [piece[1:] for piece in batch.documents]
        damage += batch.damage
    return pieces, damage


DAMAGES = pytest.mark.parametrize("damage", [flip, truncate, vanish])


@DAMAGES
def test_stop_names_shard_and_block(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    name = shard_of(folder, BLOCK).name
    with (
        TrainLoader(opened(folder), settings(), objective_of(settings())) as loader,
        pytest.raises(DataError) as caught,
    ):
        everything(loader, 200)
    assert name in str(caught.value) and "\n" not in str(caught.value)
    if damage is flip:
        assert opened(folder).block_info(BLOCK).key in str(caught.value)


@DAMAGES
def test_the_same_damage_gives_the_same_rows_whoever_reads_them(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    batches, end = run(opened(folder), skipping(), 1, 50)
    for dp_size, stop in ((2, 20), (4, 33)):
        first, cursor = run(opened(folder), skipping(data__workers=2), dp_size, stop)
        second, after = run(opened(folder), skipping(), 8 // dp_size, 50 - stop, cursor)
        assert first + second == batches and after.to_dict() == end.to_dict()
    assert run(ShardSet.open(folder, check_shards=False), skipping(), 1, 50)[0] == batches


def test_only_the_damaged_block_is_lost(folder: Path, whole: ShardSet) -> None:
    flip(folder)
    lost = set(range(int(whole.first_documents[BLOCK]), int(whole.first_documents[BLOCK + 1])))
    with TrainLoader(opened(folder), skipping(), objective_of(settings())) as loader:
        pieces, damage = everything(loader, 110)
    assert min(e for *_, e in pieces[-100:]) >= 1, "the first epoch is over"
    seen = [document for document, start, _, epoch in pieces if epoch == 0 and start == 0]
    assert sorted(seen) == sorted(set(range(whole.index.documents)) - lost)
    assert {(entry.block, entry.documents, entry.tokens) for entry in damage} == {
        (BLOCK, len(lost), whole.block_info(BLOCK).tokens)
    }
    assert whole.block_info(BLOCK).key in damage[0].reason and "checksum" in damage[0].reason


@DAMAGES
@pytest.mark.parametrize("steps", [1, 14, 37])
def test_once_mended_every_place_is_right(
    folder: Path, whole: ShardSet, damage: Callable[[Path], None], steps: int
) -> None:
    """What comes after the place is what would have come; nothing is read twice, only damaged documents are missing."""
    damage(folder)
    lost: set[int] = set()
    cursor: Cursor | None = None
    with TrainLoader(opened(folder), skipping(), objective_of(settings())) as loader:
        before = []
        for _ in range(steps):
            batch = next(loader)
            before += [piece[1:] for piece in batch.documents]
            cursor = batch.cursor
            for entry in batch.damage:
                lost |= set(range(int(whole.first_documents[entry.block]), int(whole.first_documents[entry.block + 1])))
    assert cursor is not None
    with TrainLoader(whole, skipping(), objective_of(settings()), cursor=merge_cursors([cursor])) as loader:
        after, nothing = everything(loader, 120)
    assert not nothing
    spans: dict[int, list[tuple[int, int]]] = {}
    for document, start, stop, epoch in before + after:
        if epoch == 0:
            spans.setdefault(document, []).append((start, stop))
    for document, parts in spans.items():
        ends = [0, *(stop for _, stop in sorted(parts))]
        assert [start for start, _ in sorted(parts)] == ends[:-1], f"document {document} twice or in part"
    assert set(range(whole.index.documents)) - set(spans) <= lost


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_file_cut_short_while_it_is_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch, on_error: str) -> None:
    """Within an open window: without the look before every copy this process would die of SIGBUS."""
    monkeypatch.setattr(streams, "TOKENS_CUT_AHEAD", 48)
    config = settings(data__on_error=on_error, data__streams=2, data__shuffle_blocks=8)
    with TrainLoader(opened(folder), config, objective_of(config)) as loader:
        everything(loader, 2)  # both windows are open, 16 blocks mapped
        for shard in folder.glob("*.tar"):
            if shard != shard_of(folder, BLOCK):
                os.truncate(shard, 4096)
        if on_error == "stop":
            with pytest.raises(DataError, match=r"shard train-\d+\.tar, block .* cut short .*restore") as caught:
                everything(loader, 200)
            assert str(folder) in str(caught.value)
            return
        pieces, damage = everything(loader, 30)
    assert damage and all("truncated" in entry.reason or "cut short" in entry.reason for entry in damage)
    assert any("cut short" in entry.reason for entry in damage)
    gone = {entry.block for entry in damage}
    data = opened(folder)
    left = {data.locate(document)[0] for document, *_ in pieces[-50:]}
    assert left and not left & gone


def test_a_file_cut_short_and_replaced_is_mapped_again(folder: Path, whole: ShardSet) -> None:
    data = opened(folder)
    data.block(BLOCK)
    path = shard_of(folder, BLOCK)
    os.truncate(path, 512)
    with pytest.raises(DataError, match="truncated"):
        data.block(BLOCK)
    shutil.copyfile(Path(whole.path) / path.name, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
    np.testing.assert_array_equal(data.block(BLOCK).tokens, whole.block(BLOCK).tokens)


def test_a_place_in_a_document_that_is_gone_goes_on_behind_it(folder: Path) -> None:
    config = skipping(data__streams=1, data__shuffle_blocks=4)
    with TrainLoader(opened(folder), config, objective_of(config)) as loader:
        batch = next(loader)
    document = batch.documents[-1][1]
    cursor = batch.cursor
    assert next(iter(cursor.places.values()))[0, 2] > 0, "the place is within a document"
    flip(folder, opened(folder).locate(document)[0])
    with TrainLoader(opened(folder), config, objective_of(config), cursor=cursor) as loader:
        pieces, damage = everything(loader, 3)
    assert damage and document not in {piece[0] for piece in pieces}
    assert pieces[0][1] == 0


def test_nothing_but_damage_is_an_error_and_no_endless_loop(folder: Path) -> None:
    for shard in folder.glob("*.tar"):
        shard.unlink()
    config = skipping(data__workers=1)
    missing = pytest.raises(DataError, match=r"every block is damaged or gone; the last one: .* is missing")
    with TrainLoader(opened(folder), config, objective_of(config)) as loader, missing:
        next(loader)


def test_a_single_block_that_is_left_goes_on(folder: Path) -> None:
    data = opened(folder)
    for block in range(data.blocks):
        if block != BLOCK:
            flip(folder, block)
    config = skipping(train__global_batch_size=8)
    with TrainLoader(opened(folder), config, objective_of(config)) as loader:
        pieces, _ = everything(loader, 2)
    assert {data.locate(document)[0] for document, *_ in pieces} == {BLOCK}


def test_damage_in_one_source_of_several(folder: Path, whole: ShardSet) -> None:
    flip(folder)
    other = numbered(lognormal(200, seed=4))
    other.fingerprint = "sha256:other"
    sources = [Source("a", opened(folder), SourceConfig("a")), Source("b", other, SourceConfig("b"))]  # type: ignore[arg-type]
    batches, _ = run(sources, skipping(), 1, 60)
    assert run(sources, skipping(), 4, 60)[0] == batches
    with TrainLoader(sources, skipping(), objective_of(settings())) as loader:
        _, damage = everything(loader, 120)
    assert {entry.fingerprint for entry in damage} == {whole.fingerprint} and {entry.block for entry in damage} == {
        BLOCK
    }


# ------------------------------------------------------------------------------------------------------ validation


def validated(data: ShardSet, config: Config, dp_size: int) -> tuple[np.ndarray, int, set[int]]:
    """Tokens of all rows in order, padding left out, tokens filled and blocks left out over all ranks."""
    loaders = [ValidationLoader(data, config, objective_of(config), rank, dp_size) for rank in range(dp_size)]
    rows = {}
    for rank, loader in enumerate(loaders):
        for number, batch in enumerate(loader):
            for row in range(len(batch.input_ids)):
                place = (number * len(batch.input_ids) + row) * dp_size + rank
                rows[place] = batch.input_ids[row][batch.document_ids[row] >= 0]
                assert (batch.input_ids[row][batch.document_ids[row] < 0] == PAD).all()
    tokens = np.concatenate([rows[place] for place in sorted(rows)])
    return tokens, sum(loader.filled for loader in loaders), set().union(*(loader.damage for loader in loaders))


@DAMAGES
def test_validation_leaves_out_the_same_on_any_layout(
    folder: Path, whole: ShardSet, damage: Callable[[Path], None]
) -> None:
    damage(folder)
    with pytest.raises(DataError, match=shard_of(folder, BLOCK).name):
        validated(opened(folder), settings(objective__name="ar"), 1)
    config = skipping(objective__name="ar")
    tokens, filled, lost = validated(opened(folder), config, 1)
    assert BLOCK in lost and len(tokens) == filled
    blocks = [whole.block(block).tokens for block in range(whole.blocks) if block not in lost]
    np.testing.assert_array_equal(tokens, np.concatenate(blocks))
    for dp_size in (2, 3):
        again = validated(opened(folder), config, dp_size)
        np.testing.assert_array_equal(again[0], tokens)
        assert again[1:] == (filled, lost)
