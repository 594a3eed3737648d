"""Batches are a function of the configuration and the data; ranks, threads and stops leave no trace in them."""

from __future__ import annotations

import gc
import json
import threading
import time

import numpy as np
import pytest
from memory_shards import MASK, PAD, numbered, write_shards

from refusion_train.config import Config
from refusion_train.data.loader import TrainLoader, ValidationLoader, stratified_noise
from refusion_train.data.streams import Cursor, merge_cursors
from refusion_train.errors import DataError
from refusion_train.objective import Batch, make_objective

FIELDS = tuple(Batch.__dataclass_fields__)


def settings(**changes) -> Config:
    """A small run: 8 streams, 16 rows of 48 tokens a step."""
    config = Config()
    config.seed = 5
    config.data.sequence_length, config.data.streams, config.data.shuffle_blocks = 48, 8, 2
    config.data.workers, config.data.prefetch = 0, 3
    config.train.global_batch_size, config.train.micro_batch_size = 16, 2
    config.objective.slot_sizes = [2, 4]
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def objective_of(config: Config):
    return make_objective(config.objective, MASK, PAD)


def lognormal(documents: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return np.minimum(rng.lognormal(3, 1, documents).astype(int), 400).tolist()


def step_bytes(parts: list[list[Batch]], dp_size: int) -> bytes:
    """A global batch in the order of its rows, whatever ranks and micro-batches it came in."""
    ranks = [[np.concatenate([getattr(b, name) for b in part]) for name in FIELDS] for part in parts]
    whole = []
    for columns in zip(*ranks, strict=True):
        rows = np.empty((len(columns[0]) * dp_size, *columns[0].shape[1:]), columns[0].dtype)
        for rank, column in enumerate(columns):
            rows[rank::dp_size] = column
        whole.append(rows.tobytes())
    return b"".join(whole)


def run(data, config: Config, dp_size: int, steps: int, cursor: Cursor | None = None) -> tuple[list[bytes], Cursor]:
    """The global batches of some steps, read by `dp_size` ranks, and the cursor after them."""
    objective = objective_of(config)
    loaders = [TrainLoader(data, config, objective, rank, dp_size, cursor) for rank in range(dp_size)]
    batches, first = [], cursor.step if cursor else 0
    try:
        for step in range(first, first + steps):
            parts = [next(loader) for loader in loaders]
            assert [part.step for part in parts] == [step] * dp_size
            batches.append(step_bytes([part.micro_batches for part in parts], dp_size))
            cursor = merge_cursors([part.cursor for part in parts])
    finally:
        for loader in loaders:
            loader.close()
    assert cursor is not None
    return batches, Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))


@pytest.fixture(scope="module")
def memory():
    return numbered(lognormal(1500))


@pytest.fixture(scope="module")
def data(memory, tmp_path_factory):
    dataset = write_shards(tmp_path_factory.mktemp("data") / "train", memory, block_tokens=800)
    assert dataset.blocks > 50 and len(dataset.index.shards) > 1
    return dataset


@pytest.fixture(scope="module")
def reference(data):
    return run(data, settings(), 1, 50)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_fifty_batches_are_byte_identical(data, reference, dp_size, workers) -> None:
    batches, cursor = run(data, settings(data__workers=workers), dp_size, 50)
    assert batches == reference[0]
    assert cursor.to_dict() == reference[1].to_dict()


CURRICULUM = {
    "objective__slot_weights": [[3, [1.0, 0.0]], [20, [0.0, 1.0]]], "objective__ar_probability": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def curriculum(data):
    return run(data, settings(**CURRICULUM), 1, 24)[0]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_a_curriculum_is_one_of_steps_whatever_the_ranks(data, curriculum, dp_size, workers) -> None:
    """Also after a stop in its middle, which changes the ranks."""
    config = settings(data__workers=workers, data__prefetch=5, **CURRICULUM)
    first, cursor = run(data, config, dp_size, 11)
    assert first + run(data, config, 8 // dp_size // 2, 13, cursor)[0] == curriculum


def test_a_curriculum_follows_the_step(data, curriculum, reference) -> None:
    """As long as it is constant, and with no plain documents, the batches are those of plain numbers."""
    config = settings(**{**CURRICULUM, "objective__ar_probability": 0.0})
    moving = run(data, config, 2, 24)[0]
    ends = [run(data, settings(objective__slot_weights=weights), 1, 24)[0] for weights in ([1.0, 0.0], [0.0, 1.0])]
    same = [[step for step in range(24) if moving[step] == end[step]] for end in ends]
    assert same == [[0, 1, 2, 3], [20, 21, 22, 23]]
    even = settings(objective__slot_weights=[[4, [1.0, 1.0]], [9, [1.0, 1.0]]])
    assert run(data, even, 2, 24)[0] == reference[0][:24]
    assert not set(curriculum) & set(moving)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
def test_a_stop_that_changes_the_ranks_leaves_no_trace(data, reference, before, after) -> None:
    config = settings(data__workers=2)
    first, cursor = run(data, config, before, 20)
    second, end = run(data, config, after, 30, cursor)
    assert first + second == reference[0]
    assert end.to_dict() == reference[1].to_dict()


@pytest.mark.parametrize("changes", [{"train__micro_batch_size": 1}, {"train__micro_batch_size": 16},
                                     {"data__prefetch": 1}, {"data__prefetch": 9}])  # fmt: skip
def test_micro_batches_and_prefetch_do_not_matter(data, reference, changes) -> None:
    assert run(data, settings(data__workers=2, **changes), 1, 10)[0] == reference[0][:10]


@pytest.mark.parametrize(("changes", "seed"), [({}, 6), ({"data__streams": 16}, 5)])
def test_what_the_order_does_depend_on(data, reference, changes, seed) -> None:
    config = settings(**changes)
    config.seed = seed
    batches, _ = run(data, config, 1, 3)
    assert not set(batches) & set(reference[0])


@pytest.mark.parametrize(("streams", "batch"), [(8, 12), (16, 4), (4, 32)])
def test_batches_smaller_and_larger_than_the_streams(data, streams, batch) -> None:
    config = settings(data__streams=streams, train__global_batch_size=batch, train__micro_batch_size=1)
    assert run(data, config, 1, 12)[0] == run(data, config, 4, 12)[0]


def test_row_j_of_step_i_comes_from_stream_i_times_batch_plus_j(data) -> None:
    config = settings(data__streams=16, train__global_batch_size=6, train__micro_batch_size=1)
    taken = np.zeros(16, dtype=int)
    before = np.zeros((16, 3), dtype=np.int64)
    with TrainLoader(data, config, objective_of(config)) as loader:
        for step in range(8):
            after = next(loader).cursor.places[data.fingerprint]
            moved = np.flatnonzero((after != before).any(axis=1))
            assert set(moved.tolist()) == {(step * 6 + j) % 16 for j in range(6)}
            taken[moved] += 1
            before = after
    assert (taken == 3).all()


@pytest.mark.parametrize("documents", [1, 7, 60])
def test_small_datasets_go_through_epochs(documents) -> None:
    """Even when one step is many epochs, and also with blocks and units fewer than streams."""
    lengths = lognormal(documents, seed=1)
    data, config = numbered(lengths, per_block=4), settings(data__workers=1)
    batches, cursor = run(data, config, 1, 12)
    first, middle = run(data, config, 4, 5)
    assert first + run(data, config, 2, 7, middle)[0] == batches
    assert cursor.step == 12


def test_every_document_once_an_epoch(data, memory) -> None:
    """Tokens seen of each document in the first epoch, over all rows of all ranks: each exactly once."""
    config = settings()
    seen: dict[int, list[tuple[int, int]]] = {}
    with TrainLoader(data, config, objective_of(config)) as loader:
        for batch in loader:
            for _, document, start, stop, epoch in batch.documents:
                if epoch == 0:
                    seen.setdefault(document, []).append((start, stop))
            if batch.epoch > 2:  # every stream has left the first epoch
                break
    lengths = [len(d) for d in memory.documents]
    assert set(seen) == {i for i, n in enumerate(lengths) if n}
    for document, parts in seen.items():
        ends = [0, *(stop for _, stop in sorted(parts))]
        assert [start for start, _ in sorted(parts)] == ends[:-1] and ends[-1] == lengths[document]


def test_step_batch_describes_itself(data, memory) -> None:
    config = settings()
    with TrainLoader(data, config, objective_of(config), 1, 2) as loader:
        batch = next(loader)
        later = next(loader)
    assert [b.input_ids.shape for b in batch.micro_batches] == [(2, 48)] * 4
    assert batch.tokens == 8 * 48
    np.testing.assert_array_equal(batch.counts, sum(b.counts.sum(axis=0) for b in batch.micro_batches))
    assert batch.counts.dtype == np.float64 and batch.counts[1] > 0
    assert batch.epoch == pytest.approx(16 * 48 / data.index.tokens)
    assert later.epoch == pytest.approx(2 * batch.epoch)
    places = batch.cursor.places[data.fingerprint]
    assert (places[0::2] == -1).all() and (places[1::2] >= 0).all()
    assert batch.micro_batches[1].input_ids.base is not None, "a view"
    number, start, stop = batch.documents[0][1:4]
    assert batch.describe(1).startswith(f"step 0, documents {number}[{start}:{stop}] and ")
    # The tokens are those that the description names.
    assert batch.documents[0][0] == 0
    shown = batch.micro_batches[0]
    own = (shown.document_ids[0] == 0) & (shown.input_ids[0] != MASK)
    expected = memory.documents[number][start:stop][shown.position_ids[0][own]]
    np.testing.assert_array_equal(shown.input_ids[0][own], expected)


class Failing:
    """A dataset whose reading fails after some blocks."""

    def __init__(self, inner, after: int, error: BaseException) -> None:
        self.inner, self.after, self.error = inner, after, error

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def block(self, i: int):
        if len(self.inner.opened) >= self.after:
            raise self.error
        return self.inner.block(i)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("error", [DataError("shard x: block y is damaged"), OSError("disk lost")], ids=["data", "os"])
def test_errors_of_threads_reach_the_caller(workers, error) -> None:
    data = Failing(numbered(lognormal(400), per_block=5), 60, error)
    config = settings(data__workers=workers)
    good, _ = run(data.inner, config, 1, 40)
    data.inner.opened.clear()
    loader = TrainLoader(data, config, objective_of(config))
    delivered = []
    with pytest.raises(type(error), match=str(error)):
        delivered.extend(step_bytes([batch.micro_batches], 1) for batch in loader)
    assert delivered and delivered == good[: len(delivered)], "steps before the failure are delivered"
    with pytest.raises(StopIteration):
        next(loader)
    loader.close()
    assert not data_threads()


def test_errors_of_corruption_reach_the_caller(data) -> None:
    class Broken:
        def corrupt(self, packed, step):
            raise ZeroDivisionError("no")

    with (
        TrainLoader(data, settings(data__workers=2), Broken()) as loader,
        pytest.raises(ZeroDivisionError, match="no"),
    ):
        next(loader)


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("data-") and thread.is_alive()]


def test_close_ends_the_threads_at_once(data) -> None:
    config = settings(data__workers=3)
    loader = TrainLoader(data, config, objective_of(config))
    next(loader)
    threads = data_threads()
    assert len(threads) == 3 and all(thread.daemon for thread in threads)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < 5 and not data_threads()
    loader.close()
    assert list(loader) == []


def test_a_dropped_loader_ends_its_threads(data) -> None:
    config = settings(data__workers=2)
    loader = TrainLoader(data, config, objective_of(config))
    next(loader)
    threads = data_threads()
    del loader
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not data_threads()


def test_prefetch_is_bounded(data) -> None:
    """Threads prepare `prefetch` steps and then sleep."""

    class Counting:
        made = 0

        def corrupt(self, packed, step):
            self.made += 1
            return inner.corrupt(packed, step=step)

    config = settings(data__workers=1, data__prefetch=3)
    inner, counting = objective_of(config), Counting()
    with TrainLoader(data, config, counting) as loader:
        for delivered in range(1, 4):
            next(loader)
            deadline = time.monotonic() + 5
            while counting.made < delivered + 3 and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.03)
            assert counting.made == delivered + 3


def test_a_cursor_of_one_rank_is_not_enough(data) -> None:
    config = settings()
    with TrainLoader(data, config, objective_of(config), 0, 2) as loader:
        cursor = next(loader).cursor
    with pytest.raises(AssertionError, match="merge"):
        TrainLoader(data, config, objective_of(config), 1, 2, cursor)


def test_wrong_sizes_are_named(data) -> None:
    with pytest.raises(AssertionError, match="streams=8"):
        TrainLoader(data, settings(), objective_of(settings()), 0, 3)
    config = settings(train__global_batch_size=12, train__micro_batch_size=4)
    with pytest.raises(AssertionError, match="global_batch_size=12"):
        TrainLoader(data, config, objective_of(config), 0, 2)
    with pytest.raises(DataError, match="no tokens"):
        TrainLoader(numbered([]), settings(), objective_of(settings()))


# ------------------------------------------------------------------------------------------------------- validation


def validation_rows(data, config: Config, dp_size: int, **options) -> tuple[list[bytes], int]:
    """All rows in the order of the set, and the number of micro-batches of every rank."""
    parts, loaders = [], []
    for rank in range(dp_size):
        loader = ValidationLoader(data, config, objective_of(config), rank, dp_size, **options)
        batches = list(loader)
        assert len(batches) == len(loader)
        loaders.append(loader)
        columns = [np.concatenate([getattr(b, name) for b in batches]) for name in FIELDS]
        parts.append([b"".join(column[row].tobytes() for column in columns) for row in range(len(columns[0]))])
        filler = np.concatenate([b.document_ids for b in batches])[:, 0] == -1
        for name, empty in (("counts", 0), ("target_kind", 0), ("labels", -100), ("loss_weight", 0)):
            assert (np.concatenate([getattr(b, name) for b in batches])[filler] == empty).all()
    assert len({len(loader) for loader in loaders}) == 1
    rows = [row for group in zip(*parts, strict=True) for row in group]
    assert len(rows) >= loaders[0].rows
    return rows[: loaders[0].rows], len(loaders[0])


@pytest.mark.parametrize("max_rows", [None, 1, 5, 10_000])
def test_validation_rows_do_not_depend_on_ranks(max_rows) -> None:
    lengths = [0, *lognormal(40), 0, 300, 0]
    data = numbered(lengths, per_block=4)
    config = settings()
    rows, count = validation_rows(data, config, 1, max_rows=max_rows)
    total = -(-sum(lengths) // 48)
    assert len(rows) == min(total, max_rows or total) and count == -(-len(rows) // 2)
    for dp_size in (2, 3, 4):
        assert validation_rows(data, config, dp_size, max_rows=max_rows)[0] == rows
    assert validation_rows(data, settings(train__micro_batch_size=7), 2, max_rows=max_rows)[0] == rows


def test_validation_covers_the_set_in_order_once() -> None:
    lengths = [0, *lognormal(40), 0, 300, 0]
    data = numbered(lengths, per_block=4)
    config = settings(objective__name="ar")
    loader = ValidationLoader(data, config, objective_of(config))
    batches = list(loader)
    tokens = np.concatenate([b.input_ids[b.document_ids >= 0] for b in batches])
    np.testing.assert_array_equal(tokens, np.concatenate(data.documents))
    assert loader.tokens == sum(lengths) and loader.text_bytes == 4 * sum(lengths)
    half = ValidationLoader(data, config, objective_of(config), max_rows=4)
    assert half.rows == 4 and half.tokens == 4 * 48 and half.text_bytes == pytest.approx(4 * 4 * 48)
    assert sum(b.counts[:, 1].sum() for b in half) == 4 * 48


def test_validation_noise_is_fixed_and_can_be_given() -> None:
    data, config = numbered(lognormal(60)), settings()

    def masked(seed: int = 5, **options) -> list[bytes]:
        config.seed = seed
        return [b.input_ids.tobytes() for b in ValidationLoader(data, config, objective_of(config), **options)]

    assert masked() == masked() == masked(seed=77)
    assert masked() != masked(draw=1)
    everything = list(ValidationLoader(data, config, objective_of(config), t=1.0))
    assert all((b.input_ids[b.document_ids >= 0] == MASK).all() for b in everything)
    per_document = np.linspace(0, 1, 60)
    assert masked(t=per_document) == masked(t=lambda documents: per_document[documents]) != masked()
    loader = ValidationLoader(data, config, objective_of(config), t=0.5)
    assert [b.counts.tolist() for b in loader] == [b.counts.tolist() for b in loader], "may be iterated again"


def test_stratified_noise_covers_all_levels() -> None:
    documents = np.arange(1000)
    levels = np.stack([stratified_noise(i, 4)(documents) for i in range(4)])
    assert (np.floor(levels * 4) == np.arange(4)[:, None]).all()
    histogram, _ = np.histogram(levels, bins=40, range=(0, 1))
    assert histogram.min() > 90 and levels.max() < 1


def test_interleaved_stages_get_groups_of_micro_batches() -> None:
    data, config = numbered(lognormal(60)), settings()
    config.parallel.pipeline, config.parallel.virtual_pipeline = 4, 2
    loader = ValidationLoader(data, config, objective_of(config), max_rows=5)
    assert len(loader) == 4 and sum(1 for _ in loader) == 4


def test_an_empty_validation_set_is_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        ValidationLoader(numbered([0]), settings(), objective_of(settings()))
