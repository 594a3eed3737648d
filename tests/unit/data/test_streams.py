"""The order of the data: every token once an epoch, resumable anywhere, the same whatever reads it."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_shards import MemoryShards, numbered

from refusion_train.data.packing import RowPacker
from refusion_train.data.streams import Cursor, DataOrder, Stream, merge_cursors, split_units
from refusion_train.errors import DataError

Piece = tuple[int, int, int, int]  # epoch, document, first token, end


def rows_of(stream: Stream, rows: int, length: int) -> tuple[np.ndarray, list[Piece]]:
    packer = RowPacker(rows, length)
    for row in range(rows):
        stream.fill(packer, row)
    packed, p = packer.finish(0, 0)
    pieces = [(e, d, o, o + n) for e, d, o, n in zip(p.epochs, p.documents, p.offsets, p.lengths, strict=True)]
    return packed.tokens, [tuple(int(x) for x in piece) for piece in pieces]


def read_epochs(data: MemoryShards, streams: int, length: int, shuffle_blocks: int, epochs: int) -> list[Piece]:
    """All pieces of the first epochs from all streams, each read until it is beyond them."""
    order = DataOrder(data, 3, streams, shuffle_blocks)
    found: list[Piece] = []
    for number in range(streams):
        stream = Stream(order, number)
        while (number + stream.place[0] * streams) // order.units < epochs:
            found += rows_of(stream, 1, length)[1]
    return [piece for piece in found if piece[0] < epochs]


def assert_exactly_once(pieces: list[Piece], lengths: list[int], epochs: int) -> None:
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for epoch, document, start, stop in pieces:
        spans.setdefault((epoch, document), []).append((start, stop))
    wanted = {(e, d) for e in range(epochs) for d, n in enumerate(lengths) if n}
    assert set(spans) == wanted
    for (_, document), parts in spans.items():
        parts.sort()
        ends = [0, *(stop for _, stop in parts)]
        assert [start for start, _ in parts] == ends[:-1] and ends[-1] == lengths[document]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 3), st.integers(1, 20), st.integers(80, 120)), min_size=1, max_size=16),
    streams=st.integers(1, 6),
    length=st.sampled_from([1, 7, 32]),
    per_block=st.integers(1, 12),
    shuffle_blocks=st.integers(1, 4),
)
def test_every_token_once_an_epoch(lengths, streams, length, per_block, shuffle_blocks) -> None:
    if not any(lengths):
        lengths = [*lengths, 5]
    pieces = read_epochs(numbered(lengths, per_block), streams, length, shuffle_blocks, epochs=2)
    assert_exactly_once(pieces, lengths, 2)


def test_more_streams_than_documents() -> None:
    lengths = [5, 9, 14]
    assert_exactly_once(read_epochs(numbered(lengths, 1), 16, 4, 8, epochs=12), lengths, 12)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=20),
    stop_after=st.integers(0, 40),
    length=st.sampled_from([1, 5, 16, 33]),
    stream=st.integers(0, 2),
)
def test_a_stream_goes_on_from_its_place(lengths, stop_after, length, stream) -> None:
    lengths = [*lengths, 7]
    data = numbered(lengths)
    whole = Stream(DataOrder(data, 3, 3, 2), stream)
    rows_of(whole, stop_after, length)
    place = json.loads(json.dumps(whole.place))
    resumed = Stream(DataOrder(data, 3, 3, 2), stream, place)
    assert resumed.place == whole.place
    for _ in range(10):
        expected, got = rows_of(whole, 1, length), rows_of(resumed, 1, length)
        np.testing.assert_array_equal(expected[0], got[0])
        assert expected[1] == got[1] and whole.place == resumed.place


def test_resuming_reads_only_the_window() -> None:
    data = numbered([20] * 400, per_block=4)  # 100 blocks; 2 streams
    whole = Stream(DataOrder(data, 0, 2, 4), 1)
    rows_of(whole, 300, 10)
    before = set(data.opened[-4:])
    data.opened.clear()
    rows_of(Stream(DataOrder(data, 0, 2, 4), 1, whole.place), 1, 10)
    assert set(data.opened) == before and len(data.opened) == 4


def test_epochs_and_seeds_have_their_own_order() -> None:
    data = numbered([2] * 256, per_block=4)

    def documents(seed: int, epoch: int) -> list[int]:
        order = DataOrder(data, seed, 1, 4)
        tapes = [order.window(0, first)[0] for first in range(epoch * 64, (epoch + 1) * 64, 4)]
        return [d for tape in tapes for d in tape.documents.tolist()]

    orders = [documents(0, 0), documents(0, 1), documents(1, 0)]
    for order in orders:
        assert sorted(order) == list(range(256))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(np.equal(orders[one], orders[other])) < 0.1
    assert documents(0, 1) == orders[1]


def test_units_are_taken_from_all_over_the_dataset() -> None:
    order = DataOrder(numbered([2] * 256, per_block=1), 0, 2, 4)
    blocks = [order.window(stream, 0)[0].documents // 64 for stream in range(2)]
    assert len(set(np.concatenate(blocks).tolist())) > 1
    windows = Counter(stop for first in range(0, 128, 4) for stop in [order.window(1, first)[1]])
    assert windows == Counter(range(4, 129, 4))


def test_documents_are_shuffled_across_the_window() -> None:
    order = DataOrder(numbered([2] * 800, per_block=50), 0, 2, 4)
    one, two = (order.window(stream, 0)[0].documents for stream in range(2))
    for documents in (one, two):
        assert (np.diff(documents) == 1).mean() < 0.1, "neighbours in the corpus stay neighbours"
        assert (np.diff(documents // 50) != 0).mean() > 0.5, "blocks are not mixed"
    assert set(one.tolist()).isdisjoint(two.tolist())


def test_a_window_ends_with_the_epoch() -> None:
    order = DataOrder(numbered([2] * 50, per_block=1), 0, 4, 8)  # units 0..49; stream 1 has 1, 5, ..., 49: 13 of them
    _, first_stop = order.window(1, 8)
    tape, next_stop = order.window(1, first_stop)
    assert first_stop == 13 and tape.epoch == 1 and next_stop == 21


@settings(max_examples=100, deadline=None)
@given(documents=st.lists(st.integers(0, 50), min_size=1, max_size=20), wanted=st.integers(1, 200))
def test_units_partition_the_documents(documents, wanted) -> None:
    sizes = np.array(documents, dtype=np.int64)
    block, start, stop = split_units(sizes, wanted)
    assert (start < stop).all()
    covered = [(b, d) for b, s, e in zip(block, start, stop, strict=True) for d in range(s, e)]
    assert covered == [(b, d) for b, n in enumerate(documents) for d in range(n)]
    blocks = sum(n > 0 for n in documents)
    if blocks >= wanted:
        assert len(block) == blocks, "enough blocks: none is split"
    elif blocks and min(n for n in documents if n) >= wanted:
        assert len(block) >= wanted
    if blocks:
        parts = np.bincount(block, minlength=len(sizes))[sizes > 0]
        assert (parts <= np.ceil(wanted / blocks)).all()


def test_cursor_survives_json() -> None:
    cursor = Cursor(7, {"sha256:00": np.arange(12).reshape(4, 3)}, {"seed": 1})
    back = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    assert back.step == 7 and back.order == cursor.order and back.places["sha256:00"].dtype == np.int64
    np.testing.assert_array_equal(back.places["sha256:00"], cursor.places["sha256:00"])


def test_a_cursor_of_one_dataset_in_its_old_form_is_read() -> None:
    old = {
        "step": 7,
        "streams": [[0, 1, 2], [3, 4, 5]],
        "order": {"seed": 1, "dataset": "sha256:00", "data.streams": 2},
    }
    back = Cursor.from_dict(old)
    assert back.step == 7 and back.order == {"seed": 1, "data.streams": 2}
    assert {name: places.tolist() for name, places in back.places.items()} == {"sha256:00": old["streams"]}


@pytest.mark.parametrize(
    "state",
    [{}, {"step": 1}, {"step": 1, "places": {"a": [[1, 2]]}}, {"step": 1, "places": {"a": [["b", 0, 0]]}},
     {"step": 1, "streams": [[0, 0, 0]]}],
)  # fmt: skip
def test_a_broken_cursor_is_a_data_error(state) -> None:
    with pytest.raises(DataError, match="not readable"):
        Cursor.from_dict(state)


def test_merge_cursors() -> None:
    parts = [np.full((4, 3), -1), np.full((4, 3), -1)]
    parts[0][0::2], parts[1][1::2] = 5, 6
    dormant = np.full((4, 3), 9)
    merged = merge_cursors([Cursor(3, {"a": part, "b": dormant}) for part in parts])
    np.testing.assert_array_equal(merged.places["a"][:, 0], [5, 6, 5, 6])
    np.testing.assert_array_equal(merged.places["b"], dormant)
    assert merged.step == 3
    with pytest.raises(AssertionError, match="missing"):
        merge_cursors([Cursor(3, {"a": parts[0]})])
    with pytest.raises(AssertionError, match="different steps"):
        merge_cursors([Cursor(3, {"a": parts[0]}), Cursor(4, {"a": parts[1]})])


def test_a_cursor_of_another_order_is_refused() -> None:
    data = numbered([5] * 20)
    saved = Cursor(1, {"a": np.zeros((4, 3), dtype=np.int64)}, DataOrder(data, 0, 4, 2).identity)
    saved.check(DataOrder(data, 0, 4, 2).identity)
    for order, key in (
        (DataOrder(data, 9, 4, 2), "seed"),
        (DataOrder(data, 0, 8, 2), "data.streams"),
        (DataOrder(data, 0, 4, 3), "data.shuffle_blocks"),
    ):
        with pytest.raises(DataError, match=key):
            saved.check(order.identity)
    with pytest.raises(DataError, match="4 streams"):
        Cursor(1, saved.places).check(DataOrder(data, 0, 8, 2).identity)


@pytest.mark.parametrize("place", [(0, 99, 0), (0, 0, 5), (0, -1, 0)])
def test_a_place_outside_the_window_is_refused(place) -> None:
    stream = Stream(DataOrder(numbered([5] * 20), 0, 4, 2), 0, place)
    with pytest.raises(DataError, match="belongs to other data"):
        rows_of(stream, 1, 4)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_dataset_without_tokens_is_refused(lengths) -> None:
    with pytest.raises(DataError, match="holds no tokens"):
        DataOrder(numbered(lengths), 0, 2, 2)
