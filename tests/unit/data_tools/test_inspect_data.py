"""`verify` names what is damaged and where; `show` shows documents and rows as they are."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from data_tools.build_shards import build_shards
from data_tools.corrupted_view import Line, lines_of, slot_sizes
from data_tools.inspect import show, verify
from refusion_train.config import Config
from refusion_train.data.packing import RowPacker
from refusion_train.data.shard_index import INDEX_FILE, BlockInfo, dataset_fingerprint
from refusion_train.data.shards import ShardSet, ShardWriter
from refusion_train.data.streams import DataOrder, Stream
from refusion_train.data.tokenizer import Tokenizer, TokenizerInfo
from refusion_train.errors import DataError
from refusion_train.objective import MASKED, make_objective

TEXTS = [f"number {i}:\n\tthe cat sees a dog <mask>. " * (1 + i % 5) for i in range(200)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    with open(folder / "a.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
    build_shards(
        [str(folder / "a.jsonl")], str(tiny_tokenizer), str(folder / "out"), val_fraction=0.2,
        shard_bytes=20_000, block_tokens=3000, progress=False,
    )  # fmt: skip
    return folder / "out"


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    """The training part, to damage."""
    return Path(shutil.copytree(built / "train", tmp_path / "train"))


# -------------------------------------------------------------------------------------------------------- verify


def test_datasets_in_order(built: Path) -> None:
    reports = verify(str(built), progress=False)
    assert [Path(report.path).name for report in reports] == ["train", "validation"]
    assert sum(report.documents for report in reports) == len(TEXTS)
    assert "in order; " in reports[0].summary()
    (alone,) = verify(str(built / "train"), progress=False)
    assert alone == reports[0]


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def block(folder: Path, shard: int, number: int) -> tuple[Path, BlockInfo]:
    info = ShardSet.open(folder).index.shards[shard]
    return folder / info.name, info.blocks[number]


@pytest.mark.parametrize("array", ["tokens", "lengths", "prompts"])
def test_a_flipped_byte_names_shard_and_block(copied: Path, array: str) -> None:
    path, info = block(copied, 1, 1)
    flip(path, getattr(info, f"{array}_offset") + 2)
    with pytest.raises(DataError, match=f"shard {path.name}, block {info.key}: ") as error:
        verify(str(copied), progress=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", [20, -1])
def test_a_change_outside_the_blocks_names_the_shard(copied: Path, place: int) -> None:
    path, _ = block(copied, 1, 0)
    flip(path, place % path.stat().st_size)
    with pytest.raises(DataError, match=f"shard {path.name}"):
        verify(str(copied), progress=False)


def test_a_tar_member_of_another_name_is_noticed_beside_the_checksum(copied: Path) -> None:
    path, info = block(copied, 0, 0)
    data = path.read_bytes()
    header = bytearray(data[:512])
    header[0:5] = b"other"
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    path.write_bytes(bytes(header) + data[512:])
    with pytest.raises(DataError, match=rf"shard {path.name}: .*(missing|nothing)"):
        verify(str(copied), progress=False)
    assert info.key == "train-000000-000000"


def test_several_faults_are_all_named(copied: Path) -> None:
    names = [shard.name for shard in ShardSet.open(copied).index.shards]
    assert len(names) >= 3
    (copied / names[0]).unlink()
    os.truncate(copied / names[1], 4096)
    path, info = block_of_index(copied, 2)
    flip(path, info["tokens_offset"])
    with pytest.raises(DataError) as error:
        verify(str(copied), progress=False)
    message = str(error.value)
    for part in (f"{names[0]} is missing", f"{names[1]} has 4096 bytes", f"block {info['key']}"):
        assert part in message
    assert message.count(str(copied)) == 1


def block_of_index(folder: Path, shard: int) -> tuple[Path, dict[str, Any]]:
    info = json.loads((folder / INDEX_FILE).read_bytes())["shards"][shard]
    return folder / info["name"], info["blocks"][0]


def test_ids_outside_the_vocabulary_are_found_although_all_checksums_are_right(tmp_path: Path) -> None:
    info = TokenizerInfo("sha256:a", "sentencepiece", 1000, {"pad": 0})
    with ShardWriter(tmp_path / "data", "train", info, block_tokens=3) as writer:
        writer.add(np.array([1, 2, 3]), 0, 1)
        writer.add(np.array([1, 999, 3]), 0, 1)
    path = tmp_path / "data" / INDEX_FILE
    index = json.loads(path.read_bytes())
    index["vocab_size"] = 999
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match="block train-000000-000001: token id 999 is outside the vocabulary of 999"):
        verify(str(tmp_path / "data"), progress=False)


def test_counts_that_do_not_fit_are_found(copied: Path) -> None:
    """An index whose own sums are right, but not what the shard holds."""

    def move_a_document(blocks: list[dict[str, Any]]) -> None:
        blocks[0]["documents"] -= 1
        blocks[1]["documents"] += 1

    _change_blocks(copied, move_a_document)
    with pytest.raises(DataError, match="block train-000000-000000: the document lengths"):
        verify(str(copied), progress=False)


def _change_blocks(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    index = json.loads((folder / INDEX_FILE).read_bytes())
    change(index["shards"][0]["blocks"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_a_tokenizer_that_does_not_belong_to_the_shards(copied: Path) -> None:
    path = copied / INDEX_FILE
    index = json.loads(path.read_bytes())
    index["tokenizer"]["fingerprint"] = "sha256:other"
    dataset = ShardSet.open(copied)
    index["fingerprint"] = dataset_fingerprint("sha256:other", dataset.index.shards)
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match="wrong tokenizer for the shards"):
        verify(str(copied), progress=False)
    with pytest.raises(DataError, match="wrong tokenizer for the shards"):
        show(str(copied))


def test_a_folder_that_is_no_dataset(tmp_path: Path) -> None:
    for call in (lambda: verify(str(tmp_path)), lambda: show(str(tmp_path))):
        with pytest.raises(DataError, match=r"index.json is missing"):
            call()


# ---------------------------------------------------------------------------------------------------------- show


def shown(path: Path, *arguments: object, colour: bool = False, **options: object) -> str:
    console = Console(
        file=io.StringIO(),
        width=200,
        highlight=False,
        force_terminal=colour,
        color_system="standard" if colour else None,
    )
    show(str(path), *arguments, console=console, **options)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_documents_are_shown_decoded(built: Path) -> None:
    text = shown(built, n=2, first=1)
    training = ShardSet.open(built / "train")
    assert f"document 1 of {training.index.documents}" in text and "document 2 of " in text
    assert "document 3 of" not in text and "document 0 of" not in text
    assert "<s>number " in text and "the cat sees a dog <mask>." in text and "</s>" in text
    with pytest.raises(DataError, match="no document 1000; there are"):
        shown(built, first=1000)


def test_long_documents_are_shortened_unless_asked_for(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("[bold]" + "x" * 5000)
    build_shards([str(tmp_path / "a.txt")], str(tiny_tokenizer), str(tmp_path / "out"), progress=False)
    assert "more characters)" in shown(tmp_path / "out") and "[bold]x" in shown(tmp_path / "out")
    full = shown(tmp_path / "out", full=True)
    assert "more characters" not in full and full.count("x") == 5000


def config_for(name: str, **objective: object) -> Config:
    config = Config()
    config.data.sequence_length, config.data.streams = 96, 4
    config.objective.name = name
    config.objective.slot_sizes = [4, 7]
    for key, value in objective.items():
        setattr(config.objective, key, value)
    return config


@pytest.mark.parametrize(
    ("name", "changes"),
    [("slots", {}), ("slots", {"ar_probability": 0.5}), ("ar", {}), ("mdm", {})],
    ids=["slots", "mixture", "ar", "mdm"],
)
def test_rows_show_every_token_of_every_document_once(built: Path, name: str, changes: dict[str, Any]) -> None:
    """Tokens shown, put in the order of their positions, are the documents; masked ones by their targets."""
    text = shown(built, config_for(name, partial_slot_probability=0.3, **changes), 6, full=True)
    assert ("left to right" in text) == ("ar_probability" in changes)
    tokenizer = Tokenizer.load(built / "train" / "tokenizer")
    documents = ["".join(map(tokenizer.piece, [2, *tokenizer.encode(text), 3])) for text in TEXTS]
    rows = text.split("row ")[1:]
    assert len(rows) >= 6
    for row in rows:
        title, *lines = row.splitlines()
        first, last = (int(word) for word in title.split("tokens ")[1].split("  ")[0].split(" to "))
        places: dict[int, str] = {}
        for line in lines:
            where, pieces = line[9:22].strip(), line[22:].split(" > ")[0].split("|")
            start, end = int(where.split("-")[0]), int(where.split("-")[-1])
            assert end - start + 1 == len(pieces)
            places.update(zip(range(start, end + 1), pieces, strict=True))
        assert sorted(places) == list(range(last - first + 1))
        document = "".join(places[i] for i in range(len(places)))
        assert any(document in text for text in documents), document


def test_slots_shown_are_the_slots_of_the_objective(built: Path) -> None:
    """Under the slot sizes used for display, every slot of the batch is wholly masked or wholly clean."""
    config = config_for("slots")
    order = DataOrder.of(ShardSet.open(built / "train"), config)
    packer = RowPacker(8, 96, 0)
    stream = Stream(order, 0)
    for row in range(8):
        stream.fill(packer, row)
    packed, _ = packer.finish(config.seed, order.dataset_hash)
    objective = make_objective(config.objective, 4, 0)
    batch, sizes = objective.corrupt(packed), slot_sizes(objective, packed, 0)
    assert set(sizes) == {4, 7}
    checked = 0
    for start, length, prompt, size in zip(packed.starts, packed.lengths, packed.prompts, sizes, strict=True):
        assert size is not None
        part = slice(int(start), int(start + length))
        kinds, positions = batch.target_kind.reshape(-1)[part], batch.position_ids.reshape(-1)[part]
        for line in lines_of(positions, kinds, int(prompt), int(size))[1:]:
            masked = kinds[line.start : line.stop] == MASKED
            assert masked.all() == masked.any() == (line.kind == "masked")
            assert (int(positions[line.start]) - int(prompt)) % int(size) == 0
            checked += 1
    assert checked > 30


def test_lines_of_cuts_at_slots_and_where_positions_jump() -> None:
    # A prompt of 1 and slots of 4: the short last one, which is clean, and two masked ones.
    positions = np.array([0, 9, 10, 1, 2, 3, 4, 5, 6, 7, 8])
    kinds = np.array([0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2])
    assert lines_of(positions, kinds, 1, 4) == [
        Line("prompt", 0, 1),
        Line("clean", 1, 3),
        Line("masked", 3, 7),
        Line("masked", 7, 11),
    ]
    assert lines_of(np.arange(3), np.zeros(3), 3, 4) == [Line("prompt", 0, 3)]
    assert lines_of(np.arange(0), np.zeros(0), 0, 4) == []


def test_rows_are_in_colour_and_shortened(built: Path) -> None:
    config = config_for("slots", slot_sizes=[1])
    assert "more lines" in shown(built, config, 2)
    text = shown(built, config, 2, colour=True)
    for code in ("\x1b[36m", "\x1b[32m", "\x1b[1;35m", "\x1b[33m"):  # cyan, green, bold magenta, yellow
        assert code in text


def test_slot_sizes_of_a_schedule_are_those_of_the_step(built: Path) -> None:
    """A row belongs to the step that it is trained in; `step` shows the same rows as in another one."""
    config = config_for("slots", slot_weights=[[0, [1.0, 0.0]], [2, [0.0, 1.0]]])
    config.train.global_batch_size = 2
    sizes = [
        {part.split("slot size ")[1].split()[0] for part in shown(built, config, 6, **step).split("row ")[1:]}
        for step in ({}, {"step": 0}, {"step": 2})
    ]
    assert sizes == [{"4", "7"}, {"4"}, {"7"}]
    last_rows = shown(built, config, 6).split("row 4 ")[1]
    assert "slot size 4" not in last_rows and "slot size 7" in last_rows
    with pytest.raises(AssertionError, match="of which step"):
        make_objective(config.objective, 4, 0).slot_sizes(RowPacker(1, 4, 0).finish(0, 0)[0])


def test_the_reference_generator_is_shown_too(built: Path) -> None:
    assert "masked" in shown(built, config_for("slots", rng="reference"), 3)
