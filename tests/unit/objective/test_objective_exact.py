"""Every array of every objective, exactly, against a plain implementation; and the edges that packing can produce."""

from __future__ import annotations

import dataclasses

import numpy as np
import plain_objective
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_train.config import ObjectiveConfig
from refusion_train.errors import ConfigError
from refusion_train.objective import Batch, PackedDocuments, api, make_objective

MASK, PAD = 4, 0
BACKENDS = ("numba", "numpy")


def check(packed: PackedDocuments, config: ObjectiveConfig, t: np.ndarray | None = None, step: int = 0) -> Batch:
    """Both backends against the plain objective; returns the batch."""
    wanted = plain_objective.corrupt(packed, config, MASK, t, step)
    for backend in BACKENDS:
        batch = make_objective(config, MASK, PAD, backend).corrupt(packed, t, step)
        for name, array in wanted.items():
            got = getattr(batch, name)
            assert got.dtype == array.dtype, f"{backend} {name}"
            np.testing.assert_array_equal(got, array, err_msg=f"{backend} {name}")
    return batch


@st.composite
def packings(draw: st.DrawFn) -> PackedDocuments:
    rows, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 7, 40, 300]))
    documents = []
    for row in range(rows):
        at = 0
        for _ in range(draw(st.integers(0, 6))):
            at += draw(st.sampled_from([0, 0, 0, 3]))
            if at > width:
                break
            length = draw(st.integers(0, width - at))
            prompt = draw(st.sampled_from([0, 1, length // 3, length]))
            documents.append((row, at, length, min(prompt, length), len(documents)))
            at += length
    return plain_objective.pack(documents, rows, width, seed=draw(st.integers(0, 2**40)))


CONFIGS = st.builds(
    ObjectiveConfig,
    name=st.sampled_from(["slots", "slots", "slots", "ar", "mdm"]),
    slot_sizes=st.sampled_from([[4, 8, 16, 32], [1], [3], [2, 5, 1000]]),
    eps=st.sampled_from([1e-3, 0.2]),
    cross_slot_targets=st.booleans(),
    partial_slot_probability=st.sampled_from([0.0, 0.0, 0.4, 1.0]),
    normalization=st.sampled_from(["token", "document", "micro_batch"]),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(packed=packings(), config=CONFIGS, t=st.sampled_from([None, None, 0.0, 0.5, 1.0]))
def test_any_packing(packed: PackedDocuments, config: ObjectiveConfig, t: float | None) -> None:
    check(packed, config, None if t is None else np.full(len(packed.starts), t))


MIXTURES = st.builds(
    ObjectiveConfig,
    slot_sizes=st.sampled_from([[2, 5, 1000], [1, 3, 4]]),
    slot_weights=st.sampled_from([None, [1, 0, 2], [[3, [1, 0, 0]], [7, [0, 1, 3]], [9, [0, 0, 1]]]]),
    ar_probability=st.sampled_from([0.0, 0.3, 1.0]),
    cross_slot_targets=st.booleans(),
    partial_slot_probability=st.sampled_from([0.0, 0.4]),
    normalization=st.sampled_from(["token", "document", "micro_batch"]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(packed=packings(), config=MIXTURES, t=st.sampled_from([None, 0.0, 1.0]), step=st.integers(0, 12))
def test_any_mixture_at_any_step(packed: PackedDocuments, config: ObjectiveConfig, t: float | None, step: int) -> None:
    check(packed, config, None if t is None else np.full(len(packed.starts), t), step)


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plain_document_is_that_of_ar_and_leaves_the_others_alone(backend: str, cross: bool) -> None:
    """Each document alone in its row, with and without prompt: as `name=ar` or as `ar_probability=0` has it."""
    documents = [(row, 0, row % 13 + 1, min(row % 4, row % 13 + 1), row) for row in range(400)]
    packed = plain_objective.pack(documents, 400, 13, seed=8)
    base = ObjectiveConfig(slot_sizes=[2, 3], cross_slot_targets=cross)
    mixed, slots, ar = (
        make_objective(config, MASK, PAD, backend)
        for config in (dataclasses.replace(base, ar_probability=0.4), base, ObjectiveConfig(name="ar"))
    )
    plain = mixed.plain(packed)
    assert plain is not None and 120 < plain.sum() < 200 and slots.plain(packed) is None
    got, wanted, other = mixed.corrupt(packed), ar.corrupt(packed), slots.corrupt(packed)
    assert (wanted.counts[plain, 1] > 0).any()
    wanted.counts[:, 1:] = 0  # these normalise masked targets
    for row in range(400):
        source = wanted if plain[row] else other
        assert got.rows(row, row + 1).equals(source.rows(row, row + 1)), documents[row]


def test_a_constant_schedule_is_a_plain_list() -> None:
    packed = plain_objective.pack([(i, 0, 30, 1, i) for i in range(64)], 64, 30)
    weights = [0.7, 0.1, 0.3]
    for schedule in ([[5, weights]], [[0, weights], [10, weights]]):
        for rng in ("counter", "reference"):
            one, other = (
                make_objective(ObjectiveConfig(slot_sizes=[2, 5, 9], slot_weights=value, rng=rng), MASK, PAD)
                for value in (weights, schedule)
            )
            for step in (0, 3, 7, 10, 99):
                assert one.corrupt(packed).equals(other.corrupt(packed, step=step))
    with pytest.raises(AssertionError, match="say of which step"):
        other.corrupt(packed)


@pytest.mark.parametrize("partial", [0.0, 0.5])
def test_long_documents_with_many_slots(partial: float) -> None:
    """Enough slots that sorting deals them into buckets first."""
    documents = [(row, 0, 20000, 17 * row, row) for row in range(4)]
    packed = plain_objective.pack(documents, 4, 20000)
    check(packed, ObjectiveConfig(slot_sizes=[1, 4], slot_weights=[1, 3], partial_slot_probability=partial))


@pytest.mark.parametrize("name", ["slots", "ar", "mdm"])
def test_numpy_passes_over_a_few_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a row has no documents; each document keeps its own t."""
    monkeypatch.setattr(api, "_TOKENS_AT_ONCE", 100)
    documents = [(row, at, 20, 1, 3 * row + at) for row in range(7) if row != 4 for at in (0, 25)]
    packed = plain_objective.pack(documents, 7, 45)
    check(packed, ObjectiveConfig(name=name), np.linspace(0, 1, len(documents)))


@pytest.mark.parametrize("weights", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [0.2, 0.3, 0.5]])
def test_slot_weights(weights: list[float]) -> None:
    packed = plain_objective.pack([(i, 0, 30, 0, i) for i in range(64)], 64, 30)
    check(packed, ObjectiveConfig(slot_sizes=[2, 5, 9], slot_weights=weights))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["slots", "ar", "mdm"])
class TestEdges:
    def run(self, backend: str, name: str, documents, rows=1, width=12, t=None, **options) -> Batch:
        packed = plain_objective.pack(documents, rows, width)
        return make_objective(ObjectiveConfig(name=name, **options), MASK, PAD, backend).corrupt(packed, t)

    def test_no_documents_at_all(self, backend: str, name: str) -> None:
        batch = self.run(backend, name, [], rows=2)
        assert (batch.document_ids == -1).all() and (batch.labels == -100).all() and not batch.counts.any()
        assert not batch.position_ids.any() and not batch.loss_weight.any() and not batch.target_kind.any()

    def test_no_rows_at_all(self, backend: str, name: str) -> None:
        batch = self.run(backend, name, [], rows=0)
        assert batch.input_ids.shape == (0, 12) and batch.counts.shape == (0, 3)

    def test_empty_documents_leave_no_trace(self, backend: str, name: str) -> None:
        some = [(0, 0, 5, 1, 1), (1, 2, 10, 0, 2)]
        holes = [(0, 0, 0, 0, 7), some[0], (0, 5, 0, 0, 8), (1, 0, 0, 0, 9), some[1], (1, 12, 0, 0, 10)]
        wanted = self.run(backend, name, some, rows=2, t=np.array([0.3, 0.8]))
        got = self.run(backend, name, holes, rows=2, t=np.array([0.1, 0.3, 0.1, 0.1, 0.8, 0.1]))
        assert got.equals(wanted)

    def test_a_document_that_is_only_a_prompt(self, backend: str, name: str) -> None:
        batch = self.run(backend, name, [(0, 0, 5, 5, 1)], t=np.array([1.0]))
        assert (batch.labels == -100).all() and not batch.loss_weight.any() and not batch.counts.any()
        assert (batch.input_ids != MASK).all()
        assert batch.document_ids[0].tolist() == [0] * 5 + [-1] * 7

    def test_a_response_of_one_token_without_prompt(self, backend: str, name: str) -> None:
        batch = self.run(backend, name, [(0, 0, 1, 0, 1)], t=np.array([1.0]), normalization="document")
        token = plain_objective.pack([(0, 0, 1, 0, 1)], 1, 12).tokens[0, 0]
        if name == "ar":  # nothing to predict it from
            assert batch.labels[0, 0] == -100 and batch.counts.tolist() == [[0, 1, 1]]
        else:
            assert batch.input_ids[0, 0] == MASK and batch.labels[0, 0] == token
            assert batch.loss_weight[0, 0] == 1 and batch.noise_bucket[0, 0] == 9
            assert batch.counts.tolist() == [[0, 1, 1]]

    def test_a_response_of_one_token_after_a_prompt(self, backend: str, name: str) -> None:
        batch = self.run(backend, name, [(0, 0, 3, 2, 1)], t=np.array([1.0]))
        assert batch.target_kind[0, :3].tolist() == {"slots": [0, 1, 2], "ar": [0, 1, 0], "mdm": [0, 0, 2]}[name]

    def test_a_document_shorter_than_a_slot(self, backend: str, name: str) -> None:
        batch = self.run(backend, name, [(0, 0, 3, 0, 1)], t=np.array([1.0]), slot_sizes=[32])
        assert batch.target_kind[0, :3].tolist() == ([1, 1, 0] if name == "ar" else [2, 2, 2])

    def test_pad_is_kept_as_it_is(self, backend: str, name: str) -> None:
        packed = plain_objective.pack([(0, 0, 3, 0, 1)], 1, 12)
        packed.tokens[0, 3:] = 99
        batch = make_objective(ObjectiveConfig(name=name), MASK, 99, backend).corrupt(packed)
        assert (batch.input_ids[0, 3:] == 99).all() and (batch.document_ids[0, 3:] == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cross", [True, False])
def test_every_clean_token_has_the_next_token_of_the_document_as_target(backend: str, cross: bool) -> None:
    packed = plain_objective.pack([(0, 0, 50, 3, 1)], 1, 50)
    config = ObjectiveConfig(slot_sizes=[4], cross_slot_targets=cross)
    batch = make_objective(config, MASK, PAD, backend).corrupt(packed, np.array([0.5]))
    tokens, position = packed.tokens[0], batch.position_ids[0]
    masked = batch.target_kind[0] == 2
    assert 0 < masked.sum() < 47 and (np.diff(position[3:]) != 1).any()
    for i, here in enumerate(position):
        if masked[i]:
            wanted = tokens[here]
        elif cross:
            wanted = tokens[here + 1] if 2 <= here < 49 else -100
        else:
            wanted = tokens[here + 1] if here >= 3 and (here - 3) % 4 != 3 and here < 49 else -100
        assert batch.labels[0, i] == wanted, f"physical position {i}, original position {here}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_slots_keep_a_clean_head_among_the_masked_slots(backend: str) -> None:
    packed = plain_objective.pack([(0, 0, 41, 0, 1)], 1, 41)
    config = ObjectiveConfig(slot_sizes=[8], partial_slot_probability=1.0, cross_slot_targets=False)
    batch = make_objective(config, MASK, PAD, backend).corrupt(packed, np.array([1.0]))
    assert batch.position_ids[0].tolist() == list(range(41))  # all slots are masked ones: in order
    for at in range(0, 40, 8):
        kinds = batch.target_kind[0, at : at + 8].tolist()
        head = kinds.index(2)
        assert 1 <= head <= 7 and kinds == [1] * head + [2] * (8 - head)
        assert batch.labels[0, at : at + head].tolist() == packed.tokens[0, at + 1 : at + head + 1].tolist()
        assert batch.input_ids[0, at : at + head].tolist() == packed.tokens[0, at : at + head].tolist()
    assert batch.target_kind[0, 40] == 2  # a slot of one token cannot be partial


def test_rows_are_views() -> None:
    packed = plain_objective.pack([(0, 0, 12, 0, 1), (1, 0, 12, 0, 2)], 2, 12)
    batch = make_objective(ObjectiveConfig(), MASK, PAD).corrupt(packed)
    row = batch.rows(1, 2)
    assert all(getattr(row, f.name).base is not None for f in dataclasses.fields(Batch))
    np.testing.assert_array_equal(row.input_ids[0], batch.input_ids[1])
    np.testing.assert_array_equal(row.counts[0], batch.counts[1])


def test_only_mdm_is_bidirectional() -> None:
    names = ("slots", "ar", "mdm")
    assert [make_objective(ObjectiveConfig(name=n), MASK, PAD).bidirectional for n in names] == [False, False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.zeros((2, 6), np.int64)},
        {"lengths": np.array([4, -1])},
        {"lengths": np.array([4, 9])},
        {"lengths": np.array([8, 1]), "starts": np.array([0, 9])},
        {"starts": np.array([6, 0])},
        {"starts": np.array([0, 3])},
        {"prompts": np.array([0, 3])},
        {"prompts": np.array([-1, 0])},
        {"keys": np.zeros(2, np.int64)},
        {"keys": np.zeros(3, np.uint64)},
    ],
)
def test_broken_packings_are_refused(change: dict[str, np.ndarray]) -> None:
    good = PackedDocuments(
        np.zeros((2, 6), np.int32), np.array([0, 6]), np.array([4, 2]), np.array([1, 0]), np.zeros(2, np.uint64)
    )
    objective = make_objective(ObjectiveConfig(), MASK, PAD)
    objective.corrupt(good)
    with pytest.raises(AssertionError, match=r"\w+ \w+"):
        objective.corrupt(dataclasses.replace(good, **change))


@pytest.mark.parametrize("t", [np.zeros(3), np.array([0.0, 1.1]), np.array([0.0, np.nan]), np.zeros(2, np.float32)])
def test_broken_noise_grids_are_refused(t: np.ndarray) -> None:
    packed = plain_objective.pack([(0, 0, 3, 0, 1), (1, 0, 3, 0, 2)], 2, 3)
    with pytest.raises(AssertionError, match="t must"):
        make_objective(ObjectiveConfig(), MASK, PAD).corrupt(packed, t)


def test_unknown_names_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match=r"objective\.name=gpt"):
        make_objective(ObjectiveConfig(name="gpt"), MASK, PAD)
    with pytest.raises(ConfigError, match="backend=c"):
        make_objective(ObjectiveConfig(), MASK, PAD, "c")
