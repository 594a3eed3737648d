"""Noise as a function: every random value is a hash of (document key, what is drawn, index).

No generator carries state, so a document gets the same noise on any layout of ranks, with any number of workers and
after any resume. The functions below are plain uint64 and float64 arithmetic that numpy evaluates over arrays and
numba compiles for scalars: one text, the same bits from both.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)
over a Weyl sequence that starts at the key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# What is drawn: the low bits of the counter; the index of the slot or token is above them.
SIZE, TIME, MASK, ORDER, PARTIAL, PREFIX, TOKEN, PLAIN = (np.uint64(i) for i in range(8))
INDEX_SHIFT = np.uint64(3)

# The order of clean slots is the order of the top 40 bits of their hashes (equal ones: by slot index), which leaves
# room in one 64-bit sort key for the number of the document or slot.
ORDER_BITS = 40
ORDER_SHIFT = np.uint64(64 - ORDER_BITS)

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_S30, _S27, _S31, _S32, _S11 = (np.uint64(i) for i in (30, 27, 31, 32, 11))
_UNIT = 2.0**-53


def mix_wrapping(key: Any, counter: Any) -> Any:
    """`mix` without the guard against numpy's overflow warnings of scalars; this is what numba compiles."""
    z = key + (counter + _ONE) * _GAMMA
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


def mix(key: Any, counter: Any) -> Any:
    """Hash of (key, counter), both uint64 or arrays of it, to uint64; wraps modulo 2**64."""
    with np.errstate(over="ignore"):
        return mix_wrapping(key, counter)


def uniform(value: Any) -> Any:
    """The top 53 bits of a hash as a float64 in [0, 1), exactly representable."""
    return (value >> _S11) * _UNIT


def below(value: Any, bound: Any) -> Any:
    """A hash as an integer in [0, bound), uint64; bound: uint64 in 1..2**32. Multiply and shift, no division."""
    return ((value >> _S32) * bound) >> _S32


def document_key(seed: ArrayLike, epoch: ArrayLike, document_id: ArrayLike, piece: ArrayLike) -> Any:
    """Noise key of a document's piece in an epoch: uint64, of the arguments' broadcast shape.

    All arguments are non-negative integers or integer arrays; within one (seed, epoch) different documents never
    share the key of the same piece, because every round of `mix` is one-to-one in its counter.
    """
    key = np.atleast_1d(np.asarray(seed)).astype(np.uint64)
    shape = np.broadcast_shapes(*(np.shape(a) for a in (seed, epoch, document_id, piece)))
    for part in (epoch, document_id, piece):
        key = mix(key, np.atleast_1d(np.asarray(part)).astype(np.uint64))
    return key.reshape(shape) if shape else key[0]
