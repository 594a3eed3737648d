"""Noise: known values of the hash, the distributions that follow from it, and that nothing but the key decides it."""

from __future__ import annotations

import warnings

import numpy as np
import plain_objective
import pytest

from refusion_train.config import ObjectiveConfig
from refusion_train.objective import Batch, PackedDocuments, document_key, make_objective, noise

MASK, PAD = 4, 0


def test_the_hash_is_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 0, as in its public reference implementation."""
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    zero = np.zeros(3, np.uint64)
    assert noise.mix(zero, np.arange(3, dtype=np.uint64)).tolist() == known
    assert noise.mix(np.uint64(0), np.uint64(0)) == known[0]


def test_uniform_covers_the_half_open_unit_interval() -> None:
    ends = noise.uniform(np.array([0, 2**64 - 1], np.uint64))
    assert ends.dtype == np.float64 and ends.tolist() == [0.0, 1 - 2.0**-53]


def test_below_stays_below() -> None:
    top = np.full(3, 2**64 - 1, np.uint64)
    bound = np.array([1, 7, 2**32 - 1], np.uint64)
    assert noise.below(top, bound).tolist() == [0, 6, 2**32 - 2]
    assert noise.below(np.zeros(3, np.uint64), bound).tolist() == [0, 0, 0]


def test_document_keys() -> None:
    """Scalars and arrays agree; every argument matters; no warnings about wrapping; none shared among many."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scalar = document_key(5, 1, 7, 2)
        array = document_key(5, 1, np.array([6, 7], np.int64), 2)
    assert isinstance(scalar, np.uint64) and array.dtype == np.uint64 and array[1] == scalar
    assert document_key(5, np.array([[1], [2]]), np.arange(3), 0).shape == (2, 3)
    others = [document_key(*a) for a in [(5, 1, 7, 2), (4, 1, 7, 2), (5, 0, 7, 2), (5, 1, 8, 2), (5, 1, 7, 1)]]
    assert len(set(map(int, others))) == 5
    assert len(np.unique(document_key(0, 0, np.arange(100_000), np.array([[0], [1]])))) == 200_000
    assert document_key(np.uint64(2**63 + 1), 0, np.uint64(2**64 - 1), 0).dtype == np.uint64


def test_different_draws_are_not_correlated() -> None:
    keys = document_key(3, 0, np.arange(20_000), 0)
    draws = [noise.uniform(noise.mix(keys, what)) for what in (noise.SIZE, noise.TIME, noise.MASK, noise.ORDER)]
    draws.append(noise.uniform(noise.mix(keys, noise.MASK | (np.uint64(1) << noise.INDEX_SHIFT))))
    draws.append(noise.uniform(noise.mix(document_key(3, 1, np.arange(20_000), 0), noise.TIME)))
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 4.5 / np.sqrt(20_000)
    for values in draws:
        histogram = np.bincount((values * 50).astype(int), minlength=50)
        assert _chi_square(histogram, np.full(50, 400.0)) < 49 + 5 * np.sqrt(2 * 49)


def _chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def _many(length: int, count: int, **options) -> tuple[Batch, PackedDocuments]:
    packed = plain_objective.pack([(i, 0, length, 0, i) for i in range(count)], count, length, seed=11)
    t = options.pop("t", None)
    objective = make_objective(ObjectiveConfig(**options), MASK, PAD)
    return objective.corrupt(packed, None if t is None else np.full(count, t)), packed


@pytest.mark.parametrize("name", ["slots", "mdm"])
@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_masked_fraction(name: str, t: float) -> None:
    """Slots (tokens, for mdm) are masked with probability p, each on its own: mean and spread over documents."""
    batch, _ = _many(64, 4000, name=name, t=t, slot_sizes=[4])
    units = (batch.target_kind == 2).reshape(4000, 16, 4)
    p = (1 - 1e-3) * t + 1e-3
    if name == "slots":
        assert (units.all(2) | ~units.any(2)).all()
        units = units[:, :, :1]
    per_document = units.sum((1, 2))
    n = units[0].size
    assert abs(units.mean() - p) < 4.5 * np.sqrt(p * (1 - p) / units.size)
    assert abs(per_document.var() / (n * p * (1 - p)) - 1) < 4.5 * np.sqrt(2 / 4000)


def test_t_is_uniform_and_weights_make_the_loss_unbiased() -> None:
    """E[sum of weights of masked tokens] = response tokens, for every t: what makes the loss a bound."""
    batch, _ = _many(32, 20_000, slot_sizes=[4], eps=0.05)
    masked_weight = batch.loss_weight * (batch.target_kind == 2)
    per_document = masked_weight.sum(1, dtype=np.float64)
    assert abs(per_document.mean() - 32) < 4.5 * per_document.std() / np.sqrt(20_000)
    masked = (batch.target_kind == 2).sum(1)
    buckets = batch.noise_bucket.max(1)[masked > 0]
    assert set(buckets.tolist()) == set(range(10))
    high = np.bincount(buckets, minlength=10)[5:]  # nearly every document with p > 0.5 has a masked slot
    assert _chi_square(high, np.full(5, high.mean())) < 4 + 5 * np.sqrt(8)


def test_slot_sizes_follow_their_weights() -> None:
    batch, _ = _many(32, 6000, slot_sizes=[4, 8, 16], slot_weights=[1, 2, 1], cross_slot_targets=False, t=0.0)
    untargeted = (batch.labels == -100).sum(1)  # one for each (clean) slot; a masked one has all its targets
    clean = (batch.target_kind != 2).all(1)
    counts = np.array([(untargeted[clean] == n).sum() for n in (8, 4, 2)])
    assert counts.sum() == clean.sum() > 5000
    # A document stays clean with probability (1 - eps)**slots.
    expected = 6000 * np.array([0.25, 0.5, 0.25]) * (1 - 1e-3) ** np.array([8, 4, 2])
    assert _chi_square(counts, expected) < 3 + 5 * np.sqrt(6)


def test_plain_documents_have_the_asked_share_whatever_else_is_drawn() -> None:
    """Also with the same t, slot size or neighbours; and what is drawn for the others stays as it is."""
    keys = document_key(4, 0, np.arange(40_000), 0)
    packed = plain_objective.pack([(i, 0, 6, 0, i) for i in range(40_000)], 40_000, 6, seed=4)
    objective = make_objective(ObjectiveConfig(slot_sizes=[2, 3], ar_probability=0.1), MASK, PAD)
    plain = objective.plain(packed)
    assert plain is not None and (packed.keys == keys).all()
    groups = {
        "all": np.ones(40_000, bool), "small slots": objective.slot_sizes(packed) == 2,
        "high t": noise.uniform(noise.mix(keys, noise.TIME)) > 0.5, "after a plain one": np.roll(plain, 1),
        "first slot masked": noise.uniform(noise.mix(keys, noise.MASK)) < 0.3,
    }  # fmt: skip
    for name, group in groups.items():
        assert abs(plain[group].mean() - 0.1) < 4.5 * np.sqrt(0.1 * 0.9 / group.sum()), name
    masked = objective.corrupt(packed).counts[:, 2] > 0
    assert (masked == ~plain).all()


def test_plain_documents_keep_the_masked_part_what_it_is() -> None:
    """E[sum of weights of masked targets] / (response tokens counted) is 1 with any share of plain documents."""
    for share in (0.0, 0.5):
        batch, _ = _many(32, 20_000, slot_sizes=[4], eps=0.05, ar_probability=share)
        weight = (batch.loss_weight * (batch.target_kind == 2)).sum(1, dtype=np.float64)
        counted = batch.counts[:, 1].sum()
        assert abs(counted / (32 * 20_000) - (1 - share)) < 0.02
        assert abs(weight.sum() / counted - 1) < 4.5 * weight.std() * np.sqrt(20_000) / counted


@pytest.mark.parametrize(
    ("step", "shares"),
    [(0, [1, 0, 0]), (10, [1, 0, 0]), (15, [0.5, 0.125, 0.375]), (20, [0, 0.25, 0.75]),
     (24, [0.4 / 1.4, 0.25 / 1.4, 0.75 / 1.4]), (30, [0.5, 0.125, 0.375]), (31, [0.5, 0.125, 0.375])],
)  # fmt: skip
def test_slot_sizes_follow_their_schedule(step: int, shares: list[float]) -> None:
    """Linear between the points, as they are given (not as shares), constant outside."""
    schedule = [[10, [1.0, 0.0, 0.0]], [20, [0.0, 0.25, 0.75]], [30, [1.0, 0.25, 0.75]]]
    packed = plain_objective.pack([(i, 0, 4, 0, i) for i in range(12_000)], 12_000, 4, seed=3)
    objective = make_objective(ObjectiveConfig(slot_sizes=[2, 3, 4], slot_weights=schedule), MASK, PAD)
    sizes = objective.slot_sizes(packed, step)
    counts, expected = np.bincount(sizes, minlength=5)[2:], 12_000 * np.array(shares)
    assert not counts[expected == 0].any()
    some = expected > 0
    assert _chi_square(counts[some], expected[some]) < 2 + 5 * np.sqrt(4)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_clean_slots_are_shuffled_uniformly_the_short_one_too(backend: str) -> None:
    packed = plain_objective.pack([(i, 0, 14, 0, i) for i in range(12_000)], 12_000, 14, seed=5)
    batch = make_objective(ObjectiveConfig(slot_sizes=[4]), MASK, PAD, backend).corrupt(packed, np.zeros(12_000))
    clean = (batch.target_kind != 2).all(1)
    first = batch.position_ids[clean]
    order = [tuple(p[p % 4 == 0] // 4) for p in first]
    seen, counts = np.unique(order, axis=0, return_counts=True)
    assert len(seen) == 24
    assert _chi_square(counts, np.full(24, counts.mean())) < 23 + 5 * np.sqrt(46)


def test_partial_slots_have_the_asked_share_and_uniform_lengths() -> None:
    batch, _ = _many(64, 3000, slot_sizes=[8], partial_slot_probability=0.3, t=1.0)
    head = (batch.target_kind.reshape(3000, 8, 8) == 1).sum(2).ravel()
    share = (head > 0).mean()
    assert abs(share - 0.3) < 4.5 * np.sqrt(0.3 * 0.7 / head.size)
    counts = np.bincount(head, minlength=8)[1:]
    assert head.max() == 7 and _chi_square(counts, np.full(7, counts.mean())) < 6 + 5 * np.sqrt(12)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("name", ["slots", "ar", "mdm"])
def test_noise_belongs_to_the_document(name: str, backend: str) -> None:
    """The same documents in another order, other rows and other company come out the same."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 90, 40)
    prompts = np.minimum(lengths, rng.integers(0, 4, 40))
    objective = make_objective(ObjectiveConfig(name=name, partial_slot_probability=0.3), MASK, PAD, backend)

    def apart(order: np.ndarray, width: int) -> dict[int, list[np.ndarray]]:
        documents, row, at = [], 0, 0
        for i in order:
            if at + lengths[i] > width:
                row, at = row + 1, 0
            documents.append((row, at, int(lengths[i]), int(prompts[i]), int(i)))
            at += int(lengths[i])
        batch = objective.corrupt(plain_objective.pack(documents, row + 1, width, seed=9))
        fields = (batch.input_ids, batch.position_ids, batch.labels, batch.loss_weight, batch.target_kind)
        fields += (batch.noise_bucket,)
        return {i: [f[row, at : at + n].copy() for f in fields] for row, at, n, _, i in documents}

    one, other, alone = apart(np.arange(40), 100), apart(rng.permutation(40), 333), apart(np.array([7]), 90)
    for i in range(40):
        for a, b in zip(one[i], other[i], strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(one[7], alone[7], strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_seed_epoch_or_piece_is_other_noise() -> None:
    objective = make_objective(ObjectiveConfig(), MASK, PAD)
    base = plain_objective.pack([(0, 0, 400, 0, 1)], 1, 400, seed=1)
    batches = [objective.corrupt(base)]
    for seed, epoch, piece in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        keys = np.atleast_1d(document_key(seed, epoch, 1, piece))
        batches.append(objective.corrupt(PackedDocuments(base.tokens, base.starts, base.lengths, base.prompts, keys)))
    orders = {batch.input_ids.tobytes() for batch in batches}
    assert len(orders) == 4
