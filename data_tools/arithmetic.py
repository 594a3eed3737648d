"""A task with exact answers, to measure what decoders get right: small problems, of which some need each other.

A prompt holds some problems; the response repeats them with their results, which can be done in any order or at once,
and then adds the results up one by one, where every step needs the one before:

    prompt      12+7 40-3 5*6 =
    response    12+7=19 40-3=37 5*6=30 | 19 56 86

The level `aligned` is for models so small that counting places is what they fail at: every problem and every step is of
one digit plus one digit and as long as every other, so that what belongs together is always equally far apart. In the
serial part t is the last digit of the step before, and what is added the last digit of a result:

    prompt      9+8=?? 3+4=?? 5+6=?? =
    response    9+8=17 3+4=07 5+6=11 | t+7=07 t+7=14 t+1=05

Every document is a function of (seed, its number). A prompt is of the test set if its hash says so, so that no prompt
of the one set is in the other, whatever their sizes and seeds.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_tools.output import new_folder
from refusion_train.errors import ConfigError

FILES = ("train.jsonl", "test.jsonl")
_TEST_SHARE = 8  # one prompt of so many may be asked in the test set
_TRIES = 200  # new prompts in a row that are looked for before giving up


@dataclass(frozen=True)
class Level:
    """How hard: the least and the most problems of a prompt, and the largest number in them."""

    least: int
    most: int
    largest: int
    operators: str
    aligned: bool = False


LEVELS = {
    "aligned": Level(8, 8, 9, "+", aligned=True),
    "easy": Level(3, 4, 9, "+"),
    "medium": Level(5, 7, 30, "+-"),
    "hard": Level(8, 12, 99, "+-*"),
}


@dataclass(frozen=True)
class Problem:
    """One document. `response` is the only right one."""

    prompt: str
    response: str


def make(level: Level, random_: random.Random) -> Problem:
    """One document of this level; results are never negative, products are of numbers up to 12."""
    tasks, results = [], []
    for _ in range(random_.randint(level.least, level.most)):
        operator = random_.choice(level.operators)
        a, b = (random_.randint(1, 12 if operator == "*" else level.largest) for _ in range(2))
        if operator == "-":
            a, b = max(a, b), min(a, b)
        tasks.append(f"{a}{operator}{b}")
        results.append({"+": a + b, "-": a - b, "*": a * b}[operator])
    if level.aligned:
        return _aligned(tasks, results)
    answers = " ".join(f"{task}={result}" for task, result in zip(tasks, results, strict=True))
    totals = itertools.accumulate(results)
    return Problem(f"{' '.join(tasks)} =", f" {answers} | {' '.join(map(str, totals))}")


def _aligned(tasks: list[str], results: list[int]) -> Problem:
    answers = " ".join(f"{task}={result:02}" for task, result in zip(tasks, results, strict=True))
    last, steps = 0, []
    for result in results:
        last = last % 10 + result % 10
        steps.append(f"t+{result % 10}={last:02}")
    return Problem(f"{'=?? '.join(tasks)}=?? =", f" {answers} | {' '.join(steps)}")


def problems(level: str, count: int, seed: int, test: bool) -> Iterator[Problem]:
    """`count` different documents of one set. Raises ConfigError for levels that are not there or hold fewer."""
    if level not in LEVELS:
        raise ConfigError(f"level '{level}' is not one of {', '.join(LEVELS)}")
    draw, seen, tries = random.Random(f"{seed} {level} {test}"), set[str](), 0
    while len(seen) < count:
        found, tries = make(LEVELS[level], draw), tries + 1
        digest = hashlib.blake2b(found.prompt.encode(), digest_size=8).digest()
        if (int.from_bytes(digest, "big") % _TEST_SHARE == 0) == test and found.prompt not in seen:
            seen.add(found.prompt)
            tries = 0
            yield found
        elif tries > _TRIES * _TEST_SHARE:
            raise ConfigError(f"level '{level}' has hardly more than {len(seen)} prompts; ask for fewer, or a higher")


def write(out: str | os.PathLike[str], level: str, train: int, test: int, seed: int, overwrite: bool = False) -> Path:
    """Write train.jsonl and test.jsonl (fields prompt, response) into a new folder; returns it.

    Raises ConfigError as `problems` does, and DataError if the folder cannot be written.
    """
    with new_folder(out, overwrite, _is_ours) as folder:
        for name, count in zip(FILES, (train, test), strict=True):
            with open(folder / name, "w", encoding="utf-8") as file:
                for one in problems(level, count, seed, test=name == FILES[1]):
                    file.write(json.dumps({"prompt": one.prompt, "response": one.response}) + "\n")
    return Path(out)


def _is_ours(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= set(FILES)
