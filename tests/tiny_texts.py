"""Small documents for tests, a function of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

_SUBJECTS = ["the cat", "a dog", "my friend", "the old man", "every child", "a bird", "the teacher", "nobody"]
_VERBS = ["sees", "follows", "likes", "forgets", "paints", "hears", "carries", "finds"]
_OBJECTS = [
    "the red house",
    "a small stone",
    "the river",
    "an apple",
    "the long road",
    "two books",
    "the moon",
    "a song",
]


def tiny_texts(count: int, seed: int) -> Iterator[str]:
    """Documents of a few sentences, a function of the seed; simple enough to be learnt in some dozen steps."""
    rng = random.Random(seed)
    for _ in range(count):
        sentences = [
            f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}." for _ in range(rng.randint(0, 8))
        ]
        yield " ".join(sentences)
