"""What an objective shows of a document at a noise level, written down for one document.

Training corrupts whole batches with compiled code; this says the same in plain words, bit for bit, for the likelihoods
of an exported model. Every draw is a hash of (key of the document, what is drawn, which slot or token).

This file is copied into every exported folder: it imports numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PASSES = 8
# What is drawn: the low bits of the counter of a hash; the number of the slot or token stands above them.
_SIZE, _MASK, _ORDER, _TOKEN = 0, 2, 3, 6
_WRAP = (1 << 64) - 1


@dataclass
class Masking:
    """How a model was trained: what masks its documents."""

    objective: str
    mask_id: int
    slot_sizes: tuple[int, ...] = ()
    slot_weights: tuple[float, ...] | None = None
    eps: float = 1e-3


@dataclass
class Corrupted:
    """One document as one pass shows it. tokens, positions: in physical order; masked: which tokens are to be
    predicted in place; follows: rows whose next row is a clean token of the same slot."""

    tokens: list[int]
    positions: list[int]
    masked: list[int]
    follows: list[int]
    p: float


def noise_level(number: int, documents: Any, passes: int = PASSES) -> Any:
    """t of documents (numbers in their set, any shape) in a pass: in [number, number + 1) / passes.

    Within this part the documents spread evenly (multiples of the golden ratio), so that a mean over all passes and
    documents is a quadrature over all noise levels, and always the same one.
    """
    golden = (5**0.5 - 1) / 2
    return (number + (documents + 0.5) * golden % 1.0) / passes


def document_key(number: int, document: int) -> int:
    """Key of a document's noise in a pass, for documents that belong to no set of shards."""
    key = 0
    for part in (number, document, 0):
        key = _mix(key, part)
    return key


def corrupt(tokens: list[int], prompt: int, masking: Masking, key: int, t: float) -> Corrupted:
    """The document as the objective shows it at noise level t. prompt: tokens that are never masked."""
    p = (1 - masking.eps) * t + masking.eps
    response = len(tokens) - prompt
    if masking.objective == "mdm":
        hidden = [i for i in range(response) if _uniform(_mix(key, i << 3 | _TOKEN)) < p]
        shown = list(tokens)
        for i in hidden:
            shown[prompt + i] = masking.mask_id
        return Corrupted(shown, list(range(len(tokens))), [prompt + i for i in hidden], [], p)
    size = _slot_size(masking, key)
    slots = [range(first, min(first + size, response)) for first in range(0, response, size)]
    masked = [_uniform(_mix(key, i << 3 | _MASK)) < p for i in range(len(slots))]
    clean = sorted(
        (i for i, hidden in enumerate(masked) if not hidden), key=lambda i: (_mix(key, i << 3 | _ORDER) >> 24, i)
    )
    found = Corrupted(list(tokens[:prompt]), list(range(prompt)), [], [], p)
    for index in [*clean, *(i for i, hidden in enumerate(masked) if hidden)]:
        begin, slot = len(found.tokens), [prompt + i for i in slots[index]]
        found.positions += slot
        if masked[index]:
            found.masked += range(begin, begin + len(slot))
            found.tokens += [masking.mask_id] * len(slot)
        else:
            found.follows += range(begin, begin + len(slot) - 1)
            found.tokens += [tokens[position] for position in slot]
    return found


def _slot_size(masking: Masking, key: int) -> int:
    """Drawn by the weights of the sizes, in the order of the configuration."""
    weights = masking.slot_weights or (1.0,) * len(masking.slot_sizes)
    shares = np.cumsum(np.asarray(weights, np.float64))
    place = np.searchsorted(shares[:-1] / shares[-1], _uniform(_mix(key, _SIZE)), side="right")
    return masking.slot_sizes[int(place)]


def _mix(key: int, counter: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, 2014) over a Weyl sequence that starts at the key."""
    z = (key + (counter + 1) * 0x9E3779B97F4A7C15) & _WRAP
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WRAP
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WRAP
    return z ^ (z >> 31)


def _uniform(value: int) -> float:
    """The top 53 bits of a hash as a number in [0, 1)."""
    return (value >> 11) * 2.0**-53
