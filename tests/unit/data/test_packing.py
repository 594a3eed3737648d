"""Rows hold exactly the tokens of the tape, cut at row ends; each piece knows its document, prompt and noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_shards import BOS, PAD, MemoryShards, numbered

from refusion_train.data.packing import (
    COLUMN,
    LENGTH,
    OFFSET,
    PROMPT,
    RowPacker,
    Span,
    copy_pieces,
    cut,
    document_ids,
    fastest_copy,
    hash_dataset,
    lay_tape,
)
from refusion_train.objective.noise import document_key


def tape_of(data: MemoryShards, shuffle_key: int | None = None, epoch: int = 0):
    spans = [Span(data.block(i), 0, len(data.block(i).prompts)) for i in range(data.blocks)]
    return lay_tape(spans, BOS, epoch, shuffle_key)


def pack(tape, length: int, pad_id: int = PAD, seed: int = 1, dataset_hash: int = 7):
    rows = -(-tape.tokens // length)
    packer = RowPacker(rows, length, pad_id)
    if tape.tokens:
        content = cut(tape, 0, tape.tokens, 0, length)
        assert len(content.ends) == rows and content.ends[-1] == content.table.shape[1]
        for row in range(rows):
            packer.fill(row, 0, content, row)
    return packer.finish(seed, dataset_hash)


def test_three_documents_in_two_rows() -> None:
    data = numbered([3, 4, 2], prompts=[1, 3, 0])
    packed, pieces = pack(tape_of(data), 5)
    first, second, third = data.documents
    expected = np.concatenate([first, second, third, [PAD]]).reshape(2, 5)
    np.testing.assert_array_equal(packed.tokens, expected)
    assert packed.tokens.dtype == np.int32
    np.testing.assert_array_equal(packed.starts, [0, 3, 5, 7])
    np.testing.assert_array_equal(packed.lengths, [3, 2, 2, 2])
    np.testing.assert_array_equal(packed.prompts, [1, 2, 1, 0])  # the second document's prompt of 3 is cut after 2
    np.testing.assert_array_equal(pieces.documents, [0, 1, 1, 2])
    np.testing.assert_array_equal(pieces.offsets, [0, 0, 2, 0])
    np.testing.assert_array_equal(pieces.rows, [0, 0, 1, 1])
    packed.check()


def test_begin_token_is_the_prompt_of_plain_text_only() -> None:
    documents = [np.array(ids, np.uint16) for ids in ([BOS, 9, 9], [9, BOS, 9], [BOS, 9, 9], [BOS])]
    packed, _ = pack(tape_of(MemoryShards(documents, [0, 0, 2, 0])), 2)
    # rows: [B 9] [9 | 9] [B 9] [B 9] [9 | B]
    np.testing.assert_array_equal(packed.lengths, [2, 1, 1, 2, 2, 1, 1])
    np.testing.assert_array_equal(packed.prompts, [1, 0, 0, 0, 2, 0, 1])


def test_a_cut_may_begin_anywhere() -> None:
    tape = tape_of(numbered([3, 4, 2], prompts=[1, 3, 0]))
    pieces = cut(tape, 4, 9, 3, 5)  # from the second document's second token, which lies in column 3 of its row
    np.testing.assert_array_equal(pieces.table[COLUMN], [3, 0, 1])
    np.testing.assert_array_equal(pieces.table[LENGTH], [2, 1, 2])
    np.testing.assert_array_equal(pieces.table[OFFSET], [1, 3, 0])
    np.testing.assert_array_equal(pieces.table[PROMPT], [2, 0, 0])
    assert pieces.ends == [1, 3] and pieces.positions == [2, 5]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_compiled_and_plain_copies_agree(dtype) -> None:
    source = np.arange(60_000, dtype=dtype)
    source.flags.writeable = False
    begins, lengths, places = np.array([59_990, 0, 500]), np.array([10, 0, 77]), np.array([77, 3, 0])
    results = []
    for copy in (copy_pieces, fastest_copy()):
        target = np.full(90, -1, dtype=np.int32)
        copy(source, begins, lengths, places, target)
        results.append(target)
    assert fastest_copy() is not copy_pieces
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[1][[0, 76, 77, 86, 87]], [500, 576, 59_990, 59_999, -1])


def test_keys_are_those_of_document_and_offset() -> None:
    data = numbered([3, 4, 2])
    dataset_hash = hash_dataset("sha256:ab")
    packed, _ = pack(tape_of(data, epoch=6), 5, seed=11, dataset_hash=dataset_hash)
    ids = document_ids(dataset_hash, np.array([0, 1, 1, 2]))
    np.testing.assert_array_equal(packed.keys, document_key(11, 6, ids, np.array([0, 0, 2, 0])))
    assert len(set(packed.keys.tolist())) == 4
    other, _ = pack(tape_of(data, epoch=6), 5, seed=11, dataset_hash=hash_dataset("sha256:ac"))
    assert not set(packed.keys.tolist()) & set(other.keys.tolist())


def test_unfilled_rows_are_padding_without_documents() -> None:
    packer = RowPacker(2, 4, pad_id=8)
    packed, pieces = packer.finish(0, 0)
    assert (packed.tokens == 8).all() and packed.starts.size == 0 and pieces.rows.size == 0
    packed.check()


def test_shuffle_is_a_keyed_permutation() -> None:
    data = numbered([1 + i % 3 for i in range(200)], per_block=50)
    plain, one, again, two = (tape_of(data, key) for key in (None, 1, 1, 2))
    np.testing.assert_array_equal(plain.documents, np.arange(200))
    np.testing.assert_array_equal(one.documents, again.documents)
    for shuffled in (one, two):
        assert sorted(shuffled.documents.tolist()) == list(range(200))
        # A shuffle worth the name: hardly a document stays where it was, and blocks mix.
        assert (shuffled.documents == np.arange(200)).mean() < 0.1
        assert len({d // 50 for d in shuffled.documents[:20].tolist()}) == 4
    assert (one.documents == two.documents).mean() < 0.1


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(90, 200)), min_size=1, max_size=25),
    length=st.integers(1, 50),
    per_block=st.integers(1, 5),
    shuffle_key=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    prompt=st.integers(0, 30),
)
def test_pieces_cover_every_token_once(lengths, length, per_block, shuffle_key, prompt) -> None:
    data = numbered(lengths, per_block, [min(prompt, n) for n in lengths])
    packed, pieces = pack(tape_of(data, shuffle_key), length)
    packed.check()
    flat = packed.tokens.reshape(-1)
    covered: dict[int, int] = {}
    for start, size, kept, number, offset in zip(
        packed.starts, packed.lengths, packed.prompts, pieces.documents, pieces.offsets, strict=True
    ):
        np.testing.assert_array_equal(flat[start : start + size], data.documents[number][offset : offset + size])
        assert offset == covered.get(number, 0), "pieces of a document follow each other"
        covered[number] = offset + size
        whole = min(prompt, lengths[number])
        assert kept == min(max(whole - offset, 0), size)
    assert covered == {i: n for i, n in enumerate(lengths) if n}
    assert packed.lengths.sum() == sum(lengths) and packed.tokens.shape == (-(-sum(lengths) // length), length)
