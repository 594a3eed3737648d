"""Datasets on disk: what is written comes back, any WebDataset reader agrees, and damage is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_train.data.shard_index import INDEX_FILE, Index, datasets_in
from refusion_train.data.shards import ShardSet, ShardWriter, check_tokenizer
from refusion_train.data.tokenizer import TokenizerInfo
from refusion_train.errors import DataError

INFO = TokenizerInfo("sha256:abc", "sentencepiece", 5000, {"pad": 0, "unk": 1, "bos": 2, "eos": 3, "mask": 4})


def make_documents(count: int, vocabulary: int = 5000, seed: int = 0) -> list[tuple[np.ndarray, int, int]]:
    """Tokens, prompt and text bytes of documents of 0 to 300 tokens."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in rng.integers(0, 300, count).tolist():
        tokens = rng.integers(0, vocabulary, length).astype(np.int32)
        documents.append((tokens, int(rng.integers(0, length + 1)), int(rng.integers(0, 1000))))
    return documents


def write(
    path: Path, documents: list[tuple[np.ndarray, int, int]], info: TokenizerInfo = INFO, **sizes: int
) -> ShardSet:
    with ShardWriter(path, "train", info, **{"shard_bytes": 40_000, "block_tokens": 4000, **sizes}) as writer:
        for document in documents:
            writer.add(*document)
    return ShardSet.open(path)


def read(dataset: ShardSet) -> list[tuple[list[int], int]]:
    """Tokens and prompt of every document."""
    found = []
    for i in range(dataset.blocks):
        block = dataset.block(i)
        assert block.first_document == len(found) == dataset.first_documents[i]
        ends = zip(block.offsets[:-1], block.offsets[1:], block.prompts.tolist(), strict=True)
        found += [(block.tokens[start:end].tolist(), prompt) for start, end, prompt in ends]
    return found


@pytest.fixture
def dataset(tmp_path: Path) -> ShardSet:
    """Several shards of several blocks."""
    dataset = write(tmp_path / "data", make_documents(200))
    assert len(dataset.index.shards) >= 2 and dataset.blocks > len(dataset.index.shards)
    return dataset


def test_documents_come_back_in_order(dataset: ShardSet) -> None:
    documents = make_documents(200)
    assert read(dataset) == [(tokens.tolist(), prompt) for tokens, prompt, _ in documents]
    index = dataset.index
    assert index.documents == len(documents)
    assert index.tokens == sum(len(tokens) for tokens, _, _ in documents)
    assert index.text_bytes == sum(size for _, _, size in documents)
    assert len(dataset) == dataset.blocks == sum(len(shard.blocks) for shard in index.shards)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 70_000), max_size=30), max_size=20),
    st.integers(1, 60),
    st.integers(1, 30_000),
    st.sampled_from([65_536, 65_537, 100_000]),
)
def test_any_documents_and_sizes(
    tmp_path_factory: pytest.TempPathFactory, ids: list[list[int]], block: int, shard: int, vocabulary: int
) -> None:
    info = TokenizerInfo("sha256:abc", "sentencepiece", vocabulary, {"pad": 0})
    documents = [(np.array(doc, np.int64) % vocabulary, len(doc) // 2, len(doc)) for doc in ids]
    dataset = write(tmp_path_factory.mktemp("any") / "d", documents, info, block_tokens=block, shard_bytes=shard)
    assert dataset.index.dtype == ("uint16" if vocabulary <= 65_536 else "uint32")
    assert read(dataset) == [(tokens.tolist(), prompt) for tokens, prompt, _ in documents]


def test_blocks_and_shards_keep_to_their_sizes(dataset: ShardSet) -> None:
    assert all(shard.bytes <= 40_000 + 10_240 for shard in dataset.index.shards)
    for i in range(dataset.blocks):
        assert dataset.block_info(i).tokens <= 4000
    long = write(Path(dataset.path).parent / "long", [(np.zeros(9000, np.int32), 0, 1)] * 2)
    assert [long.block_info(i).tokens for i in range(long.blocks)] == [9000, 9000]


def test_blocks_are_read_only_views_of_the_mapped_file(dataset: ShardSet) -> None:
    block = dataset.block(1)
    assert block.tokens.dtype == np.uint16 and block.offsets.dtype == np.int64 and block.prompts.dtype == np.int32
    assert not block.tokens.flags.writeable and not block.tokens.flags.owndata
    assert np.shares_memory(block.tokens, dataset.block(1).tokens)


def test_locate_finds_the_block_of_a_document(dataset: ShardSet) -> None:
    documents = make_documents(200)
    for number in (0, 57, 199):
        i, place = dataset.locate(number)
        block = dataset.block(i)
        assert block.first_document + place == number
        np.testing.assert_array_equal(
            block.tokens[block.offsets[place] : block.offsets[place + 1]], documents[number][0]
        )
    for number in (-1, 200):
        with pytest.raises(DataError, match=f"no document {number}; there are 200"):
            dataset.locate(number)


def test_the_same_documents_give_the_same_bytes(dataset: ShardSet, tmp_path: Path) -> None:
    again = write(tmp_path / "again", make_documents(200))
    assert again.index == dataset.index
    assert again.fingerprint.startswith("sha256:")
    assert write(tmp_path / "other", make_documents(199)).fingerprint != again.fingerprint
    other = TokenizerInfo("sha256:xyz", "sentencepiece", 5000, INFO.special_ids)
    assert write(tmp_path / "tokenizer", make_documents(200), other).fingerprint != again.fingerprint


def test_webdataset_reads_the_shards_unchanged(dataset: ShardSet) -> None:
    """In a process that imports nothing of ours."""
    program = """
import sys, json, glob
sys.modules["torch"] = None  # its import takes longer than all the rest, and WebDataset can do without
import numpy as np, webdataset
documents = []
for sample in webdataset.WebDataset(sorted(glob.glob(sys.argv[1] + "/*.tar")), shardshuffle=False).decode():
    ends = np.cumsum(sample["lengths.npy"])
    parts = np.split(sample["tokens.npy"], ends[:-1])
    documents += [[part.tolist(), prompt] for part, prompt in zip(parts, sample["prompts.npy"].tolist(), strict=True)]
assert not any(name.startswith("refusion_train") for name in sys.modules)
print(json.dumps(documents))
"""
    run = subprocess.run(
        [sys.executable, "-c", program, dataset.path], capture_output=True, text=True, check=True, cwd=dataset.path
    )
    assert [(tokens, prompt) for tokens, prompt in json.loads(run.stdout)] == read(dataset)


def test_threads_read_the_same(dataset: ShardSet) -> None:
    expected = read(dataset)
    results: list[Any] = []
    shared = ShardSet.open(dataset.path)
    threads = [threading.Thread(target=lambda: results.append(read(shared))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


# ------------------------------------------------------------------------------------------------------- writing


def test_nothing_stands_in_its_place_before_close(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "data", "train", INFO)
    writer.add(np.arange(5), 0, 5)
    assert not (tmp_path / "data").exists()
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["data"]
    assert sorted(os.listdir(tmp_path / "data")) == [INDEX_FILE, "train-000000.tar"]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="planted"),
        ShardWriter(tmp_path / "data", "train", INFO, block_tokens=2) as writer,
    ):
        writer.add(np.arange(5), 0, 5)
        writer.add(np.arange(5), 0, 5)
        raise RuntimeError("planted")
    assert os.listdir(tmp_path) == []


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="exists already"):
        ShardWriter(tmp_path / "data", "train", INFO)
    late = ShardWriter(tmp_path / "late", "train", INFO)
    (tmp_path / "late").mkdir()
    with pytest.raises(DataError, match="came into being meanwhile"):
        late.close()


@pytest.mark.parametrize("ids", [[5000], [-1]])
def test_ids_outside_the_vocabulary_are_not_written(tmp_path: Path, ids: list[int]) -> None:
    writer = ShardWriter(tmp_path / "data", "train", INFO)
    writer.add(np.array(ids), 0, 1)
    with pytest.raises(AssertionError, match="do not fit a vocabulary of 5000"):
        writer.close()


def test_the_tokenizer_is_copied_into_the_dataset(tmp_path: Path, tiny_tokenizer: Path) -> None:
    ShardWriter(tmp_path / "data", "train", INFO, tokenizer_folder=tiny_tokenizer).close()
    for file in tiny_tokenizer.iterdir():
        assert (tmp_path / "data" / "tokenizer" / file.name).read_bytes() == file.read_bytes()


# -------------------------------------------------------------------------------------------------------- damage


def first_shard(dataset: ShardSet) -> Path:
    return Path(dataset.path) / dataset.index.shards[0].name


def test_no_index_is_no_dataset(dataset: ShardSet, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no dataset '.*nowhere': there is no such folder"):
        ShardSet.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"is not a dataset but holds some; give .*data"):
        ShardSet.open(tmp_path)
    assert datasets_in(tmp_path) == [Path(dataset.path)]
    (Path(dataset.path) / INDEX_FILE).unlink()
    with pytest.raises(DataError, match=r"index.json is missing \(it is written last"):
        ShardSet.open(dataset.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=2), "format version 2, this program reads version 1"),
        (lambda index: index.update(format="other"), "is not an index of refusion-shards"),
        (lambda index: index.pop("vocab_size"), r"damaged \('vocab_size'\)"),
        (lambda index: index.update(documents=1), "documents of shards and blocks do not add up"),
        (lambda index: index["shards"][0].update(sha256="0" * 64), "fingerprint is not that of its shards"),
        (lambda index: index["shards"][0]["blocks"][0].pop("crc32"), r"damaged \('crc32'\)"),
        (lambda index: index.update(dtype="object"), "dtype 'object'"),
        (lambda index: index.update(shards=None), "damaged"),
    ],
)
def test_a_wrong_index_is_an_error(dataset: ShardSet, change: Callable[[Any], None], message: str) -> None:
    path = Path(dataset.path) / INDEX_FILE
    index = json.loads(path.read_bytes())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=message) as error:
        ShardSet.open(dataset.path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_an_index_that_is_no_json_is_an_error(dataset: ShardSet) -> None:
    (Path(dataset.path) / INDEX_FILE).write_bytes((Path(dataset.path) / INDEX_FILE).read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        ShardSet.open(dataset.path)


def test_keys_of_later_versions_are_left_alone(dataset: ShardSet) -> None:
    path = Path(dataset.path) / INDEX_FILE
    index = json.loads(path.read_bytes())
    index["note"] = index["shards"][0]["note"] = index["shards"][0]["blocks"][0]["note"] = "new"
    path.write_text(json.dumps(index))
    assert ShardSet.open(dataset.path).index == dataset.index


def test_a_missing_shard_is_named(dataset: ShardSet) -> None:
    dataset.block(0)
    first_shard(dataset).unlink()
    for access in (lambda: ShardSet.open(dataset.path), lambda: dataset.block(0)):
        with pytest.raises(DataError, match=r"shard train-000000.tar is missing"):
            access()


def test_a_truncated_shard_is_named_and_does_not_end_the_process(dataset: ShardSet) -> None:
    dataset.block(0)
    os.truncate(first_shard(dataset), 4096)
    for access in (lambda: ShardSet.open(dataset.path), lambda: dataset.block(0)):
        with pytest.raises(DataError, match=r"shard train-000000.tar has 4096 bytes, .* \(truncated\)"):
            access()


@pytest.mark.parametrize(("array", "what"), [("tokens", "tokens"), ("lengths", "lengths"), ("prompts", "lengths")])
def test_a_flipped_byte_names_shard_and_block(dataset: ShardSet, array: str, what: str) -> None:
    info = dataset.index.shards[0].blocks[1]
    with open(first_shard(dataset), "r+b") as file:
        file.seek(getattr(info, f"{array}_offset") + 4)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    opened = ShardSet.open(dataset.path)
    opened.block(0)
    with pytest.raises(DataError, match=rf"shard train-000000.tar, block train-000000-000001: the .*{what}"):
        opened.block(1)


def test_a_block_outside_its_shard_is_an_error(dataset: ShardSet) -> None:
    path = Path(dataset.path) / INDEX_FILE
    index = json.loads(path.read_bytes())
    index["shards"][0]["blocks"][0]["tokens_offset"] = 10**9
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"places block train-000000-000000 outside shard train-000000.tar"):
        ShardSet.open(dataset.path).block(0)


def test_a_shard_is_never_unpickled(dataset: ShardSet, tmp_path: Path) -> None:
    """A shard replaced by one of pickles, of the right size, gives an error and runs nothing."""
    shard = first_shard(dataset)
    evil = b"cos\nmkdir\n(V" + str(tmp_path / "owned").encode() + b"\ntR."
    shard.write_bytes((evil * (shard.stat().st_size // len(evil) + 1))[: shard.stat().st_size])
    with pytest.raises(DataError, match="checksum"):
        ShardSet.open(dataset.path).block(0)
    assert not (tmp_path / "owned").exists()


def test_another_tokenizer_is_refused(dataset: ShardSet) -> None:
    class Other:
        fingerprint = "sha256:abc"

    check_tokenizer(dataset, Other())
    Other.fingerprint = "sha256:xyz"
    with pytest.raises(DataError, match=r"wrong tokenizer for the shards: .*sha256:abc.*sha256:xyz"):
        check_tokenizer(dataset, Other())


def test_index_survives_writing_and_reading(dataset: ShardSet, tmp_path: Path) -> None:
    dataset.index.write(tmp_path)
    assert Index.read(tmp_path) == dataset.index
    assert not (tmp_path / f"{INDEX_FILE}.tmp").exists()


def test_a_dataset_can_be_moved(dataset: ShardSet, tmp_path: Path) -> None:
    shutil.move(dataset.path, tmp_path / "elsewhere")
    assert len(read(ShardSet.open(tmp_path / "elsewhere"))) == 200
