"""The corruption as compiled loops: one pass over documents that writes every array of the batch directly.

numba compiles these functions to code that holds no GIL, so that loader threads run beside the training step. They
compute exactly what slots.py and baselines.py compute in numpy: the same hashes, the same float64 comparisons, no
fast-math. compiled.py calls them. What is drawn once per document is drawn in numpy and given to them.

Arguments common to all, as in PackedDocuments, without empty documents: tokens int32 [b*s], width (tokens of a row),
starts, lengths, prompts int64 [n], keys uint64 [n]; p float64, masked_weights float32 and noise_buckets uint8 [n] of
each document's masked targets; then the outputs, the fields of Batch flat [b*s], and counts float64 [b, 3], zeroed.
Padding is left to the caller. The bodies are long on purpose: every further function costs compilation time.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from refusion_train.objective import noise
from refusion_train.objective.batch import CLEAN, IGNORE, MASKED, NONE

_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_mix = numba.njit(**_OPTIONS)(noise.mix_wrapping)
_uniform = numba.njit(**_OPTIONS)(noise.uniform)

_MASK, _ORDER, _PARTIAL, _PREFIX, _TOKEN = noise.MASK, noise.ORDER, noise.PARTIAL, noise.PREFIX, noise.TOKEN
_SHIFT, _S32 = noise.INDEX_SHIFT, np.uint64(32)
# A sort key: 40 bits of the hash above 24 bits of the slot's number.
SLOT_BITS = 64 - noise.ORDER_BITS
_SLOT_SHIFT, _HASH_SHIFT = np.uint64(SLOT_BITS), np.uint64(noise.ORDER_BITS)
_SLOT = np.uint64((1 << SLOT_BITS) - 1)
_HASH = ~_SLOT
_ONE = np.uint64(1)
_FEW = 24  # up to so many slots insertion sort alone is faster


@numba.njit(**_OPTIONS)
def _sorted(keys: Any, count: int, spare: Any, heads: Any) -> Any:
    """Sort `count` uint64 sort keys; returns the array that holds them: `keys` or `spare`.

    Their top bits are uniform hashes, so many keys are first dealt into as many buckets by value, which leaves
    the insertion sort a constant amount of work for each.
    """
    if count > _FEW:
        n = np.uint64(count)
        for i in range(count + 1):
            heads[i] = 0
        for i in range(count):
            heads[((keys[i] >> _SLOT_SHIFT) * n >> _HASH_SHIFT) + _ONE] += 1
        for i in range(count):
            heads[i + 1] += heads[i]
        for i in range(count):
            bucket = (keys[i] >> _SLOT_SHIFT) * n >> _HASH_SHIFT
            spare[heads[bucket]] = keys[i]
            heads[bucket] += 1
        keys = spare
    for i in range(1, count):
        key = keys[i]
        j = i - 1
        while j >= 0 and keys[j] > key:
            keys[j + 1] = keys[j]
            j -= 1
        keys[j + 1] = key
    return keys


def corrupt_slots(
    tokens: Any, width: int, starts: Any, lengths: Any, prompts: Any, keys: Any,
    sizes: Any, p: Any, masked_weights: Any, noise_buckets: Any, partial: float, cross: bool, mask_id: int,
    clean: Any, masked: Any, spare: Any, heads: Any,
    ids: Any, positions: Any, labels: Any, documents: Any, weights: Any, kinds: Any, buckets: Any, counts: Any,
) -> None:  # fmt: skip
    """The slot objective, see slots.py. sizes: int64 [n]; clean, spare uint64, masked, heads int64: room for slots."""
    row, number = -1, 0
    for d in range(len(starts)):
        start, key, size, bucket = starts[d], keys[d], sizes[d], noise_buckets[d]
        stop, at = start + lengths[d], start + prompts[d]
        number = number + 1 if start // width == row else 0
        row = start // width

        n_clean = n_masked = 0
        for slot in range((stop - at + size - 1) // size):
            counter = np.uint64(slot) << _SHIFT
            if _uniform(_mix(key, counter | _MASK)) < p[d]:
                masked[n_masked] = slot
                n_masked += 1
            else:
                clean[n_clean] = (_mix(key, counter | _ORDER) & _HASH) | np.uint64(slot)
                n_clean += 1
        order = _sorted(clean, n_clean, spare, heads)

        # What whole regions share; the exceptions are written over it. `border`: end of the clean slots.
        border = at
        for i in range(n_clean):
            border += min(size, stop - at - np.int64(order[i] & _SLOT) * size)
        for i in range(start, at):
            ids[i], positions[i], labels[i] = tokens[i], i - start, IGNORE
            kinds[i], weights[i], buckets[i] = NONE, 0, 0
        for i in range(at, border):
            kinds[i], weights[i], buckets[i] = CLEAN, 1, 0
        for i in range(border, stop):
            ids[i], kinds[i], weights[i], buckets[i] = mask_id, MASKED, masked_weights[d], bucket
        for i in range(start, stop):
            documents[i] = number
        targets = border - at
        if cross and start < at < stop:
            labels[at - 1], kinds[at - 1], weights[at - 1] = tokens[at], CLEAN, 1
            targets += 1

        to = at
        for i in range(n_clean):
            source = at + np.int64(order[i] & _SLOT) * size
            count = min(size, stop - source)
            has_next = source + count < stop
            for j in range(count - 1 + has_next):
                labels[to + j] = tokens[source + j + 1]
            for j in range(count):
                ids[to + j] = tokens[source + j]
                positions[to + j] = source + j - start
            to += count
            if not (cross and has_next):
                labels[to - 1], kinds[to - 1], weights[to - 1] = IGNORE, NONE, 0
                targets -= 1
        for i in range(n_masked):
            source = at + masked[i] * size
            count = min(size, stop - source)
            for j in range(count):
                labels[to + j] = tokens[source + j]
                positions[to + j] = source + j - start
            counter = np.uint64(masked[i]) << _SHIFT
            if partial > 0 and count > 1 and _uniform(_mix(key, counter | _PARTIAL)) < partial:
                head = 1 + np.int64((_mix(key, counter | _PREFIX) >> _S32) * np.uint64(count - 1) >> _S32)
                for j in range(head):
                    ids[to + j], labels[to + j] = tokens[source + j], tokens[source + j + 1]
                    kinds[to + j], weights[to + j], buckets[to + j] = CLEAN, 1, 0
                targets += head
            to += count
        counts[row, 0] += targets
        counts[row, 1] += stop - at
        counts[row, 2] += stop > at


def corrupt_ar(
    tokens: Any, width: int, starts: Any, lengths: Any, prompts: Any,
    ids: Any, positions: Any, labels: Any, documents: Any, weights: Any, kinds: Any, buckets: Any, counts: Any,
) -> None:  # fmt: skip
    """Next-token prediction, see baselines.py."""
    row, number = -1, 0
    for d in range(len(starts)):
        start = starts[d]
        stop, at = start + lengths[d], start + prompts[d]
        number = number + 1 if start // width == row else 0
        row = start // width
        first = stop if at == stop else max(start, at - 1)  # the first token with a target; the last one has none
        for i in range(start, stop):
            ids[i], positions[i], documents[i], buckets[i] = tokens[i], i - start, number, 0
        for i in range(start, first):
            labels[i], kinds[i], weights[i] = IGNORE, NONE, 0
        for i in range(first, stop - 1):
            labels[i], kinds[i], weights[i] = tokens[i + 1], CLEAN, 1
        labels[stop - 1], kinds[stop - 1], weights[stop - 1] = IGNORE, NONE, 0
        counts[row, 0] += max(0, stop - 1 - first)
        counts[row, 1] += stop - at
        counts[row, 2] += stop > at


def corrupt_mdm(
    tokens: Any, width: int, starts: Any, lengths: Any, prompts: Any, keys: Any,
    p: Any, masked_weights: Any, noise_buckets: Any, mask_id: int,
    ids: Any, positions: Any, labels: Any, documents: Any, weights: Any, kinds: Any, buckets: Any, counts: Any,
) -> None:  # fmt: skip
    """Token-level masked diffusion, see baselines.py."""
    row, number = -1, 0
    for d in range(len(starts)):
        start, key = starts[d], keys[d]
        stop, at = start + lengths[d], start + prompts[d]
        number = number + 1 if start // width == row else 0
        row = start // width
        for i in range(start, stop):
            ids[i], positions[i], documents[i] = tokens[i], i - start, number
            labels[i], kinds[i], weights[i], buckets[i] = IGNORE, NONE, 0, 0
        for i in range(at, stop):
            if _uniform(_mix(key, (np.uint64(i - at) << _SHIFT) | _TOKEN)) < p[d]:
                ids[i], labels[i], kinds[i] = mask_id, tokens[i], MASKED
                weights[i], buckets[i] = masked_weights[d], noise_buckets[d]
        counts[row, 1] += stop - at
        counts[row, 2] += stop > at
