"""`data.train`, a folder or a list of sources, in one form: what a run reads, in which shares, and how often.

Nothing here opens a dataset. Weights are shares of tokens, numbers or functions of the step; `expected_tokens` says
what a run will have read of each source, for plans and for checks before anything is built.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from refusion_train import schedules
from refusion_train.config import Config, SourceConfig
from refusion_train.errors import ConfigError

_KEY = "data.train"
_SLICES = 1000  # parts of a run in which `expected_tokens` takes shares to be constant


def sources_of(config: Config) -> list[SourceConfig]:
    """The sources that `data.train` names, checked. Raises ConfigError, one line that names the key."""
    given = config.data.train
    if given is None or given == "":
        raise ConfigError(f"{_KEY} is not set; give the folder of shards, for example {_KEY}=shards/train")
    if isinstance(given, str):
        return [SourceConfig(given)]
    if not isinstance(given, Sequence):
        raise ConfigError(
            f"{_KEY}={given} is neither a folder nor a list; write {_KEY}=shards/train, or "
            f"{_KEY}=[{{path: a, weight: 0.7}}, {{path: b, weight: 0.3}}]"
        )
    if not given:
        raise ConfigError(f"{_KEY} is an empty list; give at least one source, {_KEY}=[{{path: shards/train}}]")
    sources = [_source(f"{_KEY}[{number}]", entry) for number, entry in enumerate(given)]
    _refuse_doubles(sources)
    _refuse_steps_without_weight(sources)
    return sources


def dataset_paths(config: Config) -> list[str]:
    """The folders or URLs of all datasets that a run reads. Raises ConfigError as `sources_of`."""
    validation = config.data.validation
    return [source.path for source in sources_of(config)] + ([validation] if validation else [])


def weights_at(sources: Sequence[SourceConfig], step: int) -> list[float]:
    """The share of tokens of each source at a step; they add up to 1."""
    weights = [schedules.value_at(source.weight, step) for source in sources]
    total = sum(weights)
    return [weight / total for weight in weights]


def expected_tokens(
    sources: Sequence[SourceConfig], sizes: Sequence[int], steps: int, tokens_per_step: int
) -> list[float]:
    """Tokens that a run of `steps` takes from each source, by weights and `epochs`; sizes: tokens of each dataset.

    What a source that is used up would have given is shared by the others; if there are none, it goes beyond.
    """
    taken = [0.0] * len(sources)
    room = [math.inf if s.epochs is None else float(s.epochs * size) for s, size in zip(sources, sizes, strict=True)]
    slices = min(_SLICES, steps)
    for part in range(slices):
        wanted = steps * tokens_per_step / slices
        weights = weights_at(sources, int((part + 0.5) * steps / slices))
        open_ = [n for n in range(len(sources)) if taken[n] < room[n]] or list(range(len(sources)))
        while wanted > 1e-6 * tokens_per_step and open_:
            total = sum(weights[n] for n in open_)
            shares = {n: weights[n] / total if total else 1 / len(open_) for n in open_}
            given = {n: share * wanted if share else 0.0 for n, share in shares.items()}
            given = {n: min(amount, max(room[n] - taken[n], 0.0)) for n, amount in given.items()}
            if not any(given.values()):
                given = {n: share * wanted for n, share in shares.items()}
            for n, amount in given.items():
                taken[n] += amount
            wanted -= sum(given.values())
            open_ = [n for n in range(len(sources)) if taken[n] < room[n]] or list(range(len(sources)))
    return taken


def short_names(paths: Sequence[str]) -> list[str]:
    """Names for reports: what of the paths differs, such as `web` and `code` of web/train and code/train."""
    parts = [[piece for piece in path.split("/") if piece] for path in paths]
    if len(parts) == 1:
        return [parts[0][-1] if parts[0] else paths[0]]
    while all(parts) and len({p[0] for p in parts}) == 1:
        parts = [p[1:] for p in parts]
    while all(parts) and len({p[-1] for p in parts}) == 1:
        parts = [p[:-1] for p in parts]
    names = ["/".join(p) for p in parts]
    return names if all(names) and len(set(names)) == len(names) else list(paths)


def _source(key: str, entry: Any) -> SourceConfig:
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, dict):
        raise ConfigError(f"{key}={entry} is not a source; write {{path: shards/train, weight: 0.5}}")
    known = [field.name for field in fields(SourceConfig)]
    for name in entry:
        if name not in known:
            raise ConfigError(f"unknown key '{key}.{name}'; a source has {', '.join(known)}")
    path = entry.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{key}.path is {'not set' if path in (None, '') else path}; give a folder of shards")
    weight = _read_weight(f"{key}.weight", entry.get("weight", 1.0))
    return SourceConfig(path, weight, _read_epochs(f"{key}.epochs", entry.get("epochs")))


def _read_weight(key: str, given: Any) -> Any:
    weight = schedules.read_weight(key, given)
    if not any(value for _, value in weight) if schedules.is_schedule(weight) else not weight:
        raise ConfigError(f"{key}={given} is never greater than 0; leave out a source that is not to be read")
    return weight


def _read_epochs(key: str, given: Any) -> int | None:
    if given is None:
        return None
    if not schedules.is_number(given) or given <= 0 or given != int(given):
        raise ConfigError(f"{key}={given} must be a whole number of passes, 1 or more, or null for no limit")
    return int(given)


def _refuse_doubles(sources: Sequence[SourceConfig]) -> None:
    seen: dict[str, int] = {}
    for number, source in enumerate(sources):
        path = source.path.rstrip("/") if "://" in source.path else os.path.realpath(source.path)
        if path in seen:
            raise ConfigError(
                f"{_KEY}[{number}].path={source.path} is the dataset of {_KEY}[{seen[path]}]; name each once"
            )
        seen[path] = number


def _refuse_steps_without_weight(sources: Sequence[SourceConfig]) -> None:
    step = schedules.step_without_weight([source.weight for source in sources])
    if step is not None:
        raise ConfigError(f"{_KEY}: no source has any weight at step {step}; give one of them some")
