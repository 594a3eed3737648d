"""Several datasets read as one: which row comes from which.

Every row is filled from one source, so a share of tokens is a share of rows. The choice is a function of (seed, step,
row, weights at the step): in step i the B rows take the points (k + u_i) / B, k = 0 ... B - 1, in an order of keyed
hashes, and a row takes the source on whose part of [0, 1) its point lies. So in every step each source has its share
to within one row (systematic sampling); u_i = frac(u_0 + i / golden ratio) has the lowest discrepancy there is in one
dimension, so what is over in one step is made up for in the next ones.

Every source has its own streams, with places of their own. Ranks, threads and micro-batches do not enter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from refusion_train.data.shards import ShardSet
from refusion_train.data.streams import Stream
from refusion_train.errors import ConfigError
from refusion_train.objective import noise
from refusion_train.sources import short_names, sources_of, weights_at

if TYPE_CHECKING:
    from refusion_train.config import Config, SourceConfig
    from refusion_train.data.packing import RowPacker

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
_POINT_SALT, _ROW_SALT = 0x706F696E, 0x726F77


@dataclass(frozen=True)
class Source:
    """A dataset of `data.train`, open, with its weight and limit; name: short, for reports."""

    name: str
    dataset: ShardSet
    config: SourceConfig


def open_sources(config: Config) -> list[Source]:
    """Open what `data.train` names.

    Raises ConfigError for a wrong `data.train`, a dataset that is there twice, or datasets of different tokenizers;
    DataError for one that cannot be read.
    """
    wanted = sources_of(config)
    names = short_names([entry.path for entry in wanted])
    sources = [
        Source(name, ShardSet.of_run(entry.path, config.data), entry) for name, entry in zip(names, wanted, strict=True)
    ]
    first = sources[0].dataset.index
    seen: dict[str, Source] = {}
    for number, source in enumerate(sources):
        where, index = f"data.train[{number}].path={source.config.path}", source.dataset.index
        if index.tokenizer != first.tokenizer or index.special_ids != first.special_ids:
            raise ConfigError(
                f"{where} was made with another tokenizer than data.train[0].path={sources[0].config.path}; build both "
                "with the same"
            )
        if source.dataset.fingerprint in seen:
            other = seen[source.dataset.fingerprint].config.path
            raise ConfigError(f"{where} holds the same data as {other}; name each dataset once")
        seen[source.dataset.fingerprint] = source
    return sources


class Draw(NamedTuple):
    """Of a row: its source if none is used up, its point in [0, 1), and the weights of the step."""

    number: int
    point: float
    weights: Sequence[float]


class Shares:
    """Which source every row of every step comes from, as long as none is used up."""

    def __init__(self, sources: Sequence[SourceConfig], seed: int, rows: int) -> None:
        self.sources = sources
        self.rows = rows
        self._start = int(noise.mix(np.uint64(seed), np.uint64(_POINT_SALT)))
        self._key = noise.mix(np.uint64(seed), np.uint64(_ROW_SALT))

    def weights(self, step: int) -> list[float]:
        """The shares at a step; they add up to 1."""
        return weights_at(self.sources, step)

    def points(self, step: int) -> np.ndarray:
        """The point in [0, 1) of every row of a step, float64 [rows]."""
        within = ((self._start + step * _GOLDEN) % (1 << 64)) / 2**64
        key = noise.mix(self._key, np.uint64(step))
        order = np.argsort(noise.mix(key, np.arange(self.rows, dtype=np.uint64)), kind="stable")
        return (order + min(within, 1 - 2.0**-53)) / self.rows

    def rows_of(self, step: int) -> list[Draw]:
        """What decides on the source of every row of a step."""
        if len(self.sources) == 1:
            return [Draw(0, 0.0, (1.0,))] * self.rows
        weights, points = tuple(self.weights(step)), self.points(step)
        ends = np.cumsum(weights)
        numbers = np.minimum(ends.searchsorted(points * ends[-1], "right"), np.flatnonzero(weights)[-1])
        return [Draw(n, p, weights) for n, p in zip(numbers.tolist(), points.tolist(), strict=True)]


def choose(point: float, weights: Sequence[float], open_: Sequence[int]) -> int:
    """The source on whose part of [0, 1) `point` lies. weights: of all sources; open_: those to choose from, not none.

    Parts are as long as the weights of the sources to choose from; if these have no weight, they are equally long.
    """
    shares = [weights[number] for number in open_]
    if not any(shares):
        shares = [1.0] * len(open_)
    ends = list(itertools.accumulate(shares))
    for number, end, share in zip(open_, ends, shares, strict=True):
        if share and point * ends[-1] < end:
            return number
    return max(number for number, share in zip(open_, shares, strict=True) if share)


class Blend:
    """The streams of one number, one of each source, and rows from them.

    epochs: for each source, how many passes are allowed; None: any number. When the share of a stream in them has been
    read, its rows, also in their middle, go on with one of the other sources. When there is no other, the limits are
    passed: streams are not equally long, so at the very end of a run that uses up everything some of them read a
    little twice.
    """

    def __init__(self, streams: Sequence[Stream], epochs: Sequence[int | None]) -> None:
        self.streams = streams
        self.epochs = epochs
        self._all = range(len(streams))
        self._limited = [number for number in self._all if epochs[number] is not None]

    def fill(self, packer: RowPacker, row: int, draw: Draw) -> None:
        """Fill a row."""
        column = 0
        while column < packer.length:
            gone = [number for number in self._limited if self.streams[number].used_up(self.epochs[number])]
            if not gone:
                number, limit = draw.number, self.epochs[draw.number]
            else:
                open_ = [number for number in self._all if number not in gone]
                number = choose(draw.point, draw.weights, open_ or self._all)
                limit = self.epochs[number] if open_ else None
            column = self.streams[number].fill(packer, row, column, limit)
