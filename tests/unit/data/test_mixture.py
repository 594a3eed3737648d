"""Mixtures: shares are exact, the layout does not enter, no document is lost or repeated when the list changes."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from memory_shards import MemoryShards, numbered
from test_loader import lognormal, objective_of, run, settings

from refusion_train.config import Config, SourceConfig
from refusion_train.data.loader import TrainLoader
from refusion_train.data.mixture import Shares, Source, choose, open_sources
from refusion_train.data.streams import Cursor, merge_cursors
from refusion_train.errors import ConfigError, DataError
from refusion_train.sources import weights_at

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5)


def source(name: str, documents: int, weight: object = 1.0, epochs: int | None = None) -> Source:
    data = numbered(lognormal(documents, seed=ord(name[0])), per_block=5)
    data.fingerprint = f"sha256:{name}"
    return Source(name, data, SourceConfig(name, weight, epochs))  # type: ignore[arg-type]


def changed(source: Source, **changes: object) -> Source:
    return replace(source, config=replace(source.config, **changes))  # type: ignore[arg-type]


def choices(shares: Shares, step: int) -> list[int]:
    draws = shares.rows_of(step)
    assert all(choose(d.point, d.weights, range(len(d.weights))) == d.number for d in draws)
    return [draw.number for draw in draws]


# ------------------------------------------------------------------------------------------------------ the choice


@examples(max_examples=60, deadline=None)
@given(
    weights=WEIGHTS, rows=st.sampled_from([1, 7, 16, 256]), seed=st.integers(0, 2**63 - 1), step=st.integers(0, 10**7)
)
def test_every_step_has_its_shares_to_one_row(weights, rows, seed, step) -> None:
    shares = Shares([SourceConfig(str(i), w) for i, w in enumerate(weights)], seed, rows)
    counts = np.bincount(choices(shares, step), minlength=len(weights))
    wanted = rows * np.array(weights) / sum(weights)
    assert (np.abs(counts - wanted) < 1 + 1e-9).all(), "a source has lost or gained more than a row"
    assert sorted(np.floor(shares.points(step) * rows).astype(int)) == list(range(rows))


@examples(max_examples=15, deadline=None)
@given(weights=WEIGHTS, rows=st.sampled_from([1, 4]), seed=st.integers(0, 2**40), first=st.integers(0, 10**6))
def test_running_shares_converge_faster_than_by_chance(weights, rows, seed, first) -> None:
    shares = Shares([SourceConfig(str(i), w) for i, w in enumerate(weights)], seed, rows)
    steps = 500
    counts = np.bincount(
        [c for step in range(first, first + steps) for c in choices(shares, step)], minlength=len(weights)
    )
    wanted = rows * steps * np.array(weights) / sum(weights)
    assert (np.abs(counts - wanted) < 12).all(), "of independent draws it would be some 15 to 30 rows"


def test_rows_of_a_source_stand_anywhere_in_a_step() -> None:
    shares = Shares([SourceConfig("a", 0.5), SourceConfig("b", 0.5)], 3, 8)
    chosen = np.array([choices(shares, step) for step in range(400)])
    assert (np.abs(chosen.mean(axis=0) - 0.5) < 0.12).all(), "a row, and so a stream, would always have the same source"
    assert len({tuple(row) for row in chosen.tolist()}) > 50


def test_weights_follow_their_schedule() -> None:
    sources = [
        SourceConfig("a", [[10, 1.0], [20, 0.0]]),
        SourceConfig("b", [[10, 0.0], [20, 3.0]]),
        SourceConfig("c", 1.0),
    ]
    assert weights_at(sources, 0) == weights_at(sources, 10) == [0.5, 0.0, 0.5]
    assert weights_at(sources, 20) == weights_at(sources, 99) == [0.0, 0.75, 0.25]
    assert weights_at(sources, 15) == pytest.approx([0.5 / 3, 1.5 / 3, 1 / 3])
    shares = Shares(sources, 0, 16)
    assert 1 not in choices(shares, 5) and 0 not in choices(shares, 25)


# ------------------------------------------------------------------------------------------------- one source alone


GOLDEN = 1375063223  # crc32 of the 12 first batches as they were before there were mixtures
OLD_CURSOR = {
    "step": 12,
    "streams": [[11, 7, 86], [11, 3, 17], [8, 2, 9], [8, 6, 5], [8, 6, 13], [10, 1, 31], [10, 5, 7], [10, 5, 12]],
    "order": {"seed": 5, "dataset": "sha256:00", "data.streams": 8, "data.shuffle_blocks": 2},
}


def test_one_source_is_read_as_ever_and_old_cursors_go_on() -> None:
    data = numbered(lognormal(300), per_block=7)
    batches, _ = run(data, settings(), 1, 20)
    assert zlib.crc32(b"".join(batches[:12])) == GOLDEN
    listed, cursor = run([Source("a", data, SourceConfig("a", 0.3, 9))], settings(), 2, 12)  # type: ignore[list-item]
    assert listed == batches[:12] and cursor.places["sha256:00"].tolist() == OLD_CURSOR["streams"]
    for sources in (data, [Source("a", data, SourceConfig("a"))]):  # type: ignore[arg-type]
        assert run(sources, settings(), 4, 8, Cursor.from_dict(OLD_CURSOR))[0] == batches[12:]


# ------------------------------------------------------------------------------------------------------- several


@pytest.fixture(scope="module")
def three() -> list[Source]:
    return [source("web", 120, 0.5), source("code", 60, [[0, 0.2], [20, 0.6]]), source("books", 30, 0.3, epochs=1)]


@pytest.mark.parametrize(("dp_size", "workers", "micro_batch"), [(1, 2, 4), (2, 0, 1), (4, 1, 2), (8, 0, 2)])
def test_the_layout_does_not_enter(three, dp_size, workers, micro_batch) -> None:
    config = settings(data__workers=workers, train__micro_batch_size=micro_batch)
    batches, cursor = run(three, config, dp_size, 30)
    expected, end = run(three, settings(), 1, 30)
    assert batches == expected and cursor.to_dict() == end.to_dict()


def test_a_stop_leaves_no_trace(three) -> None:
    whole, end = run(three, settings(), 1, 40)
    for stop in (1, 13, 27):
        first, cursor = run(three, settings(), 2, stop)
        second, after = run(three, settings(), 4, 40 - stop, cursor)
        assert first + second == whole and after.to_dict() == end.to_dict()


def read(sources: list[Source], config: Config, dp_size: int, steps: int, cursor: Cursor | None, seen: dict) -> Cursor:
    """Steps on `dp_size` ranks; adds to `seen`, for each (source, epoch, document), the ranges of tokens."""
    loaders = [TrainLoader(sources, config, objective_of(config), rank, dp_size, cursor) for rank in range(dp_size)]
    for _ in range(steps):
        parts = [next(loader) for loader in loaders]
        cursor = merge_cursors([part.cursor for part in parts])
        for part in parts:
            assert part.source_tokens.sum() == part.tokens
            for number, (_, document, start, stop, epoch) in zip(
                part.pieces.datasets.tolist(), part.documents, strict=True
            ):
                seen.setdefault((part.names[number], epoch, document), []).append((start, stop))
    for loader in loaders:
        loader.close()
    assert cursor is not None
    return Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))


def assert_once(seen: dict, source: Source, epoch: int) -> None:
    lengths = [len(document) for document in source.dataset.documents]  # type: ignore[attr-defined]
    found = {document for name, e, document in seen if name == source.name and e == epoch}
    assert found == {document for document, length in enumerate(lengths) if length}
    for document in found:
        parts = sorted(seen[source.name, epoch, document])
        ends = [0, *(stop for _, stop in parts)]
        assert [start for start, _ in parts] == ends[:-1] and ends[-1] == lengths[document]


def test_the_list_may_change_and_no_document_is_lost_or_repeated(three) -> None:
    """Weights, limits, sources that come, leave and return, ranks: every document once an epoch all the same."""
    web, code, books = three
    lists = [
        [web], [web, code], [changed(code, weight=5.0), changed(web, weight=0.1), books], [code, books],
        [changed(books, epochs=2), web], [web, code, changed(books, epochs=None, weight=2.0)],
    ]  # fmt: skip
    seen: dict = {}
    cursor = None
    for number, sources in enumerate(lists):
        dormant = {} if cursor is None else {n: p.tolist() for n, p in cursor.places.items()}
        cursor = read(sources, settings(), (1, 4, 2, 8, 1, 2)[number], 5, cursor, seen)
        for fingerprint in dormant.keys() - {entry.dataset.fingerprint for entry in sources}:
            assert cursor.places[fingerprint].tolist() == dormant[fingerprint], "a source that is away keeps its places"
    cursor = read(lists[-1], settings(), 1, 25, cursor, seen)
    for entry in three:
        assert_once(seen, entry, 0)
        spans = [s for key, parts in seen.items() if key[0] == entry.name for s in parts]
        assert len(spans) > len(entry.dataset.documents)  # type: ignore[attr-defined]


def test_a_source_is_read_so_often_and_then_the_others_go_on() -> None:
    few, many = source("few", 40, 3.0, epochs=2), source("many", 400, 1.0)
    seen: dict = {}
    cursor = read([few, many], settings(), 2, 30, None, seen)
    assert {epoch for name, epoch, _ in seen if name == "few"} == {0, 1}
    assert_once(seen, few, 0)
    assert_once(seen, few, 1)
    later: dict = {}
    read([few, many], settings(), 4, 3, cursor, later)
    assert {name for name, *_ in later} == {"many"}
    # With the limit raised it goes on where it stopped.
    read([changed(few, epochs=3), many], settings(), 1, 30, cursor, later)
    assert {epoch for name, epoch, _ in later if name == "few"} == {2}
    assert_once(later, few, 2)


def test_when_all_is_used_up_limits_are_passed() -> None:
    sources = [source("few", 40, 1.0, epochs=1), source("many", 60, 1.0, epochs=1)]
    seen: dict = {}
    read(sources, settings(), 1, 12, None, seen)
    for entry in sources:
        assert_once(seen, entry, 0)
        assert max(epoch for name, epoch, _ in seen if name == entry.name) > 0
    assert run(sources, settings(), 1, 12)[0] == run(sources, settings(), 4, 12)[0]


def test_a_limited_source_without_weight_for_now_stands_in_when_nothing_else_is_left() -> None:
    sources = [source("first", 20, 1.0, epochs=1), source("later", 100, [[50, 0.0], [60, 1.0]])]
    seen: dict = {}
    read(sources, settings(), 1, 10, None, seen)
    assert {epoch for name, epoch, _ in seen if name == "first"} == {0} and any(name == "later" for name, *_ in seen)


def test_documents_are_named_with_their_source(three) -> None:
    config = settings()
    with TrainLoader(three, config, objective_of(config)) as loader:
        text = next(loader).describe(3)
    assert text.startswith("step 0, documents ") and any(f"{name} " in text for name in ("web", "code", "books"))


def test_a_cursor_of_none_of_the_sources_is_refused(three) -> None:
    _, cursor = run(three[:1], settings(), 1, 1)
    with pytest.raises(DataError, match="place in other data"):
        TrainLoader(three[1:], settings(), objective_of(settings()), cursor=cursor)


# ------------------------------------------------------------------------------------------------------ the folders


def write(path, documents: list[int], special: dict[str, int] | None = None, tokenizer: str = "sha256:t"):
    from refusion_train.data.shards import ShardWriter
    from refusion_train.data.tokenizer import TokenizerInfo

    data: MemoryShards = numbered(documents)
    ids = special or data.index.special_ids
    info = TokenizerInfo(fingerprint=tokenizer, kind="sentencepiece", vocab_size=1 << 16, special_ids=ids)
    with ShardWriter(path, "train", info, 1 << 16, 100) as writer:
        for document in data.documents:
            writer.add(document, 0, 4 * len(document))
    return str(path)


def test_sources_that_cannot_be_read_together_are_refused(tmp_path) -> None:
    config = Config()
    one, other = write(tmp_path / "one", [5, 9]), write(tmp_path / "other", [7, 3])
    config.data.train = [{"path": one, "weight": 0.7}, {"path": other}]
    opened = open_sources(config)
    assert [entry.name for entry in opened] == ["one", "other"] and opened[0].config.weight == 0.7
    config.data.train = [{"path": one}, {"path": write(tmp_path / "copy", [5, 9])}]
    with pytest.raises(ConfigError, match=r"data\.train\[1\]\.path=.*copy holds the same data as .*one"):
        open_sources(config)
    config.data.train = [{"path": one}, {"path": write(tmp_path / "foreign", [6], tokenizer="sha256:u")}]
    with pytest.raises(ConfigError, match=r"data\.train\[1\]\.path=.*another tokenizer"):
        open_sources(config)
    config.data.train = one
    assert open_sources(config)[0].config == SourceConfig(one)
