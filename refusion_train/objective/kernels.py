"""The corruption as compiled loops: one pass over documents that writes every array of the batch directly.

numba compiles these functions to code that holds no GIL, so that loader threads run beside the training step. They
compute exactly what slots.py and baselines.py compute in numpy: the same hashes, the same float64 comparisons, no
fast-math. compiled.py calls them. What is drawn once per document is drawn in numpy and given to them.

Arguments common to all, as in PackedDocuments, without empty documents: tokens int32 [b*s], width (tokens of a row,
uint64), starts, lengths, prompts, keys uint64 [n]; p float64, masked_weights float32 and noise_buckets uint8 [n] of
each document's masked targets; then the outputs, the fields of Batch flat [b*s], and counts float64 [b, 3], zeroed.
Padding is left to the caller. The bodies are long on purpose: every further function costs compilation time.

All indices are unsigned: numba lets a negative one count from the end, and the test for that would keep LLVM from
vectorising the loops (half of the speed). A signed and an unsigned integer together would be a float: hence _ONE.
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
_ZERO, _ONE, _NOWHERE = np.uint64(0), np.uint64(1), np.uint64(2**64 - 1)
_SHIFT, _S32 = noise.INDEX_SHIFT, np.uint64(32)
# A sort key: 40 bits of the hash above 24 bits of the slot's number.
SLOT_BITS = 64 - noise.ORDER_BITS
_SLOT_SHIFT, _HASH_SHIFT = np.uint64(SLOT_BITS), np.uint64(noise.ORDER_BITS)
_SLOT = np.uint64((1 << SLOT_BITS) - 1)
_HASH = ~_SLOT
_FEW = np.uint64(24)  # up to so many slots insertion sort alone is faster


@numba.njit(**_OPTIONS)
def _sorted(keys: Any, count: Any, spare: Any, heads: Any) -> Any:
    """Sort `count` sort keys; returns the array that holds them: `keys` or `spare`. All uint64.

    Their top bits are uniform hashes, so many keys are first dealt into as many buckets by value, which leaves
    the insertion sort a constant amount of work for each.
    """
    if count > _FEW:
        for i in range(count + _ONE):
            heads[i] = 0
        for i in range(count):
            heads[((keys[i] >> _SLOT_SHIFT) * count >> _HASH_SHIFT) + _ONE] += _ONE
        for i in range(count):
            heads[i + _ONE] += heads[i]
        for i in range(count):
            bucket = (keys[i] >> _SLOT_SHIFT) * count >> _HASH_SHIFT
            spare[heads[bucket]] = keys[i]
            heads[bucket] += _ONE
        keys = spare
    for i in range(_ONE, count):
        key, j = keys[i], i
        while j > _ZERO and keys[j - _ONE] > key:
            keys[j] = keys[j - _ONE]
            j -= _ONE
        keys[j] = key
    return keys


def corrupt_slots(
    tokens: Any, width: Any, starts: Any, lengths: Any, prompts: Any, keys: Any,
    sizes: Any, p: Any, masked_weights: Any, noise_buckets: Any, partial: float, cross: bool, mask_id: int,
    clean: Any, masked: Any, spare: Any, heads: Any,
    ids: Any, positions: Any, labels: Any, documents: Any, weights: Any, kinds: Any, buckets: Any, counts: Any,
) -> None:  # fmt: skip
    """The slot objective, see slots.py. sizes: uint64 [n]; clean, masked, spare, heads uint64: room for slots."""
    row, number = _NOWHERE, 0
    for d in range(len(starts)):
        start, key, size, p_mask = starts[d], keys[d], sizes[d], p[d]
        stop, at = start + lengths[d], start + prompts[d]
        number = number + 1 if start // width == row else 0
        row = start // width

        n_clean, n_masked = _ZERO, _ZERO
        for slot in range((stop - at + size - _ONE) // size):
            if _uniform(_mix(key, slot << _SHIFT | _MASK)) < p_mask:
                masked[n_masked] = slot
                n_masked += _ONE
            else:
                clean[n_clean] = _mix(key, slot << _SHIFT | _ORDER) & _HASH | slot
                n_clean += _ONE
        order = _sorted(clean, n_clean, spare, heads)

        # What whole regions share; the exceptions are written over it. `border`: end of the clean slots.
        border = at
        for i in range(n_clean):
            border += min(size, stop - at - (order[i] & _SLOT) * size)
        for i in range(start, at):
            ids[i], positions[i], labels[i] = tokens[i], i - start, IGNORE
            kinds[i], weights[i], buckets[i] = NONE, 0, 0
        for i in range(at, border):
            kinds[i], weights[i], buckets[i] = CLEAN, 1, 0
        weight, bucket = masked_weights[d], noise_buckets[d]
        for i in range(border, stop):
            ids[i], kinds[i], weights[i], buckets[i] = mask_id, MASKED, weight, bucket
        for i in range(start, stop):
            documents[i] = number
        targets = border - at
        if cross and start < at and at < stop:
            labels[at - _ONE], kinds[at - _ONE], weights[at - _ONE] = tokens[at], CLEAN, 1
            targets += _ONE

        to = at
        for i in range(n_clean):
            source = at + (order[i] & _SLOT) * size
            count = min(size, stop - source)
            last = source + count == stop
            for j in range(count - np.uint64(last)):
                labels[to + j] = tokens[source + j + _ONE]
            for j in range(count):
                ids[to + j] = tokens[source + j]
            for j in range(count):
                positions[to + j] = source + j - start
            to += count
            if last or not cross:
                labels[to - _ONE], kinds[to - _ONE], weights[to - _ONE] = IGNORE, NONE, 0
                targets -= _ONE
        for i in range(n_masked):
            slot = masked[i]
            source = at + slot * size
            count = min(size, stop - source)
            for j in range(count):
                labels[to + j] = tokens[source + j]
            for j in range(count):
                positions[to + j] = source + j - start
            if partial > 0 and count > _ONE and _uniform(_mix(key, slot << _SHIFT | _PARTIAL)) < partial:
                head = _ONE + ((_mix(key, slot << _SHIFT | _PREFIX) >> _S32) * (count - _ONE) >> _S32)
                for j in range(head):
                    ids[to + j], labels[to + j] = tokens[source + j], tokens[source + j + _ONE]
                    kinds[to + j], weights[to + j], buckets[to + j] = CLEAN, 1, 0
                targets += head
            to += count
        counts[row, 0] += targets
        counts[row, 1] += stop - at
        counts[row, 2] += stop > at


def corrupt_ar(
    tokens: Any, width: Any, starts: Any, lengths: Any, prompts: Any, keys: Any,
    ids: Any, positions: Any, labels: Any, documents: Any, weights: Any, kinds: Any, buckets: Any, counts: Any,
) -> None:  # fmt: skip
    """Next-token prediction, see baselines.py."""
    row, number = _NOWHERE, 0
    for d in range(len(starts)):
        start = starts[d]
        stop, at = start + lengths[d], start + prompts[d]
        number = number + 1 if start // width == row else 0
        row = start // width
        first = at - _ONE if at > start else at  # the first token with a target; the last one has none
        for i in range(start, stop):
            ids[i], positions[i], documents[i], buckets[i] = tokens[i], i - start, number, 0
        targets = _ZERO
        for i in range(start, first):
            labels[i], kinds[i], weights[i] = IGNORE, NONE, 0
        for i in range(first, stop - _ONE):
            labels[i], kinds[i], weights[i] = tokens[i + _ONE], CLEAN, 1
            targets += _ONE
        labels[stop - _ONE], kinds[stop - _ONE], weights[stop - _ONE] = IGNORE, NONE, 0
        counts[row, 0] += targets
        counts[row, 1] += stop - at
        counts[row, 2] += stop > at


def corrupt_mdm(
    tokens: Any, width: Any, starts: Any, lengths: Any, prompts: Any, keys: Any,
    p: Any, masked_weights: Any, noise_buckets: Any, mask_id: int,
    ids: Any, positions: Any, labels: Any, documents: Any, weights: Any, kinds: Any, buckets: Any, counts: Any,
) -> None:  # fmt: skip
    """Token-level masked diffusion, see baselines.py."""
    row, number = _NOWHERE, 0
    for d in range(len(starts)):
        start, key = starts[d], keys[d]
        stop, at = start + lengths[d], start + prompts[d]
        number = number + 1 if start // width == row else 0
        row = start // width
        for i in range(start, stop):
            ids[i], positions[i], documents[i] = tokens[i], i - start, number
            labels[i], kinds[i], weights[i], buckets[i] = IGNORE, NONE, 0, 0
        for i in range(at, stop):
            if _uniform(_mix(key, (i - at) << _SHIFT | _TOKEN)) < p[d]:
                ids[i], labels[i], kinds[i] = mask_id, tokens[i], MASKED
                weights[i], buckets[i] = masked_weights[d], noise_buckets[d]
        counts[row, 1] += stop - at
        counts[row, 2] += stop > at
