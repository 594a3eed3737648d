"""Which layouts of ranks can be right; for one that cannot: what is wrong, and the nearest changes that would work.

Everything here follows from the configuration and the number of processes, so a layout is refused before any process
group exists. A remedy is only named after it has passed the same checks.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from refusion_train.errors import ConfigError

if TYPE_CHECKING:
    from refusion_train.config import Config

# Dotted key -> value; also the number of processes, under a name that no key has.
Changes = dict[str, Any]
PROCESSES = "processes"

# Where a search for remedies ends: every check that a model itself passes is passed by this.
_PLAIN: Changes = {
    "parallel.tensor": 1, "parallel.sequence": False, "parallel.pipeline": 1, "parallel.virtual_pipeline": 1,
    "parallel.pipeline_first": None, "parallel.pipeline_last": None, "parallel.zero_stage": 1,
}  # fmt: skip
_EVEN: Changes = {"parallel.pipeline_first": None, "parallel.pipeline_last": None}
_MOST_CHANGES = 3  # keys of one remedy, unless one drags another along
_REMEDIES = 2  # that are named
_NEAR = 8  # candidates that are tried of one kind


class _Refusal(Exception):
    """Why a layout cannot work, and what to try instead, the best first."""

    def __init__(self, message: str, remedies: Iterable[Changes]) -> None:
        super().__init__(message)
        self.remedies = list(remedies)


def check(config: Config, world_size: int | None = None) -> None:
    """Raise ConfigError, in one line that names keys, values and what would work, if the layout cannot be right.

    `world_size`: number of processes, when it is known; then what depends on the data-parallel size is checked too.
    """
    try:
        _check(config, world_size)
    except _Refusal as refusal:
        raise ConfigError(f"{refusal}{_advice(config, world_size, refusal)}") from None


def accepts(config: Config, world_size: int | None = None) -> bool:
    """Whether `check` has nothing to say."""
    try:
        _check(config, world_size)
    except _Refusal:
        return False
    return True


def data_parallel_size(config: Config, world_size: int) -> int:
    """Ranks that hold different data: world size / (tensor * pipeline); the layout has passed `check`."""
    return world_size // (config.parallel.tensor * config.parallel.pipeline)


def stage_layers(config: Config) -> list[int]:
    """Layers of each pipeline stage; the layout has passed `check`.

    Equal shares, or `parallel.pipeline_first` and `parallel.pipeline_last` and equal shares of the rest between them.
    """
    parallel = config.parallel
    first, last = parallel.pipeline_first, parallel.pipeline_last
    between = parallel.pipeline - (first is not None) - (last is not None)
    share = (config.model.num_layers - (first or 0) - (last or 0)) // max(between, 1)
    return [*([] if first is None else [first]), *[share] * between, *([] if last is None else [last])]


# ---------------------------------------------------------------------------------------------------------- checks


def _check(config: Config, world_size: int | None) -> None:
    _check_zero(config)
    _check_tensor(config)
    _check_stages(config)
    if world_size is not None:
        _check_processes(config, world_size)
        _check_streams(config, world_size)
        _check_batch(config, world_size)


def _check_zero(config: Config) -> None:
    parallel = config.parallel
    if parallel.zero_stage not in (1, 2, 3):
        message = f"parallel.zero_stage={parallel.zero_stage} is not one of 1, 2, 3"
        raise _Refusal(message, [{"parallel.zero_stage": stage} for stage in (1, 2, 3)])
    if parallel.zero_stage == 3 and parallel.pipeline > 1:
        raise _Refusal(
            f"parallel.zero_stage=3 with parallel.pipeline={parallel.pipeline} gives wrong gradient norms",
            [{"parallel.zero_stage": 2}, {"parallel.pipeline": 1, "parallel.virtual_pipeline": 1} | _EVEN],
        )
    if parallel.zero_stage == 3 and parallel.linear != "torch":
        raise _Refusal(
            f"parallel.zero_stage=3 with parallel.linear={parallel.linear} is not supported",
            [{"parallel.zero_stage": 2}, {"parallel.linear": "torch"}],
        )


def _check_tensor(config: Config) -> None:
    model, tensor, sequence = config.model, config.parallel.tensor, config.parallel.sequence
    shared = {
        "model.num_heads": model.num_heads, "model.num_kv_heads": model.num_kv_heads,
        "model.ffn_size": model.ffn_size, "model.vocab_multiple": model.vocab_multiple,
    }  # fmt: skip
    smaller = [_tensor(size, sequence) for size in _nearest(tensor, _divisors(math.gcd(*shared.values())))]
    for key, value in shared.items():
        if value % tensor:
            raise _Refusal(f"{key}={value} is not divisible by parallel.tensor={tensor}", smaller)
    if sequence and tensor == 1:
        raise _Refusal(
            "parallel.sequence=true splits rows over tensor-parallel ranks, but parallel.tensor=1",
            [{"parallel.sequence": False}, *smaller],
        )
    if sequence and config.data.sequence_length % tensor:
        raise _Refusal(
            f"data.sequence_length={config.data.sequence_length} is not divisible by parallel.tensor={tensor}, "
            "which parallel.sequence=true needs",
            [{"parallel.sequence": False}, *smaller],
        )


def _tensor(size: int, sequence: bool) -> Changes:
    return {"parallel.tensor": size} | ({"parallel.sequence": False} if sequence and size == 1 else {})


def _check_stages(config: Config) -> None:
    layers, parallel = config.model.num_layers, config.parallel
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    ends = {"parallel.pipeline_first": parallel.pipeline_first, "parallel.pipeline_last": parallel.pipeline_last}
    given = [f"{key}={value}" for key, value in ends.items() if value is not None]
    if stages == 1 and chunks > 1:
        message = f"parallel.virtual_pipeline={chunks} splits the stages of a pipeline, but parallel.pipeline=1"
        raise _Refusal(message, [{"parallel.virtual_pipeline": 1}])
    if stages == 1 and given:
        raise _Refusal(f"{' and '.join(given)}: there are no stages with parallel.pipeline=1", [_EVEN])
    shares = stage_layers(config)
    if len(shares) == stages and sum(shares) == layers and all(n > 0 and n % chunks == 0 for n in shares):
        return
    named = [f"parallel.pipeline={stages}", *([f"parallel.virtual_pipeline={chunks}"] if chunks > 1 else []), *given]
    remedies = [
        *([_EVEN] if given else []),
        *itertools.islice(_uneven(layers, stages, chunks), 1),
        *({"parallel.virtual_pipeline": count} for count in _nearest(chunks, range(1, layers + 1)) if chunks > 1),
        *({"parallel.pipeline": count} | _EVEN for count in _nearest(stages, range(1, layers + 1))),
    ]
    what = f"{'stages' if given else 'equal stages'}{' of equal chunks' if chunks > 1 else ''}"
    raise _Refusal(f"model.num_layers={layers} does not divide into {what} with {', '.join(named)}", remedies)


def _uneven(layers: int, stages: int, chunks: int) -> Iterator[Changes]:
    """Ends with fewer layers than the stages between them, which are equal; all in whole chunks."""
    if layers % chunks:
        return
    units = layers // chunks
    for between in range(-(-units // stages), units):
        ends = units - (stages - 2) * between
        if ends < 2:
            return
        last = ends // 2
        if stages == 2:
            yield _EVEN | {"parallel.pipeline_last": last * chunks}
        elif last < between and ends - last <= between:
            first = ends - last
            yield {
                "parallel.pipeline_first": None if first == between else first * chunks,
                "parallel.pipeline_last": None if last == between else last * chunks,
            }


def _check_processes(config: Config, world_size: int) -> None:
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    together = tensor * pipeline
    if world_size % together == 0:
        return
    remedies: list[Changes] = [{PROCESSES: count} for count in _multiples(world_size, together)]
    remedies += [_tensor(size, config.parallel.sequence) for size in _nearest(tensor, _divisors(world_size))]
    remedies += [{"parallel.pipeline": size} for size in _nearest(pipeline, _divisors(world_size))]
    raise _Refusal(
        f"{world_size} processes cannot be divided by parallel.tensor * parallel.pipeline = {tensor} * {pipeline}",
        remedies,
    )


def _check_streams(config: Config, world_size: int) -> None:
    size, streams = data_parallel_size(config, world_size), config.data.streams
    if streams % size == 0:
        return
    raise _Refusal(
        f"data.streams={streams} is not a multiple of the data-parallel size {size} (a run keeps its data.streams for "
        "life: take a multiple of every size that it will use)",
        [{"data.streams": count} for count in _multiples(streams, size)]
        + [{PROCESSES: count * world_size // size} for count in _nearest(size, _divisors(streams))],
    )


def _check_batch(config: Config, world_size: int) -> None:
    size, train, parallel = data_parallel_size(config, world_size), config.train, config.parallel
    rows, at_once = train.global_batch_size, train.micro_batch_size * size
    interleaved = parallel.virtual_pipeline > 1
    unit = at_once * (parallel.pipeline if interleaved else 1)
    if rows % unit == 0:
        return
    remedies: list[Changes] = [{"train.global_batch_size": count} for count in _multiples(rows, unit)]
    remedies += [{"train.micro_batch_size": count} for count in _nearest(train.micro_batch_size, _divisors(rows))]
    remedies += [{"parallel.virtual_pipeline": 1}] * interleaved
    remedies += [{PROCESSES: count * world_size // size} for count in _nearest(size, _divisors(rows))]
    if rows % at_once:
        message = (
            f"train.global_batch_size={rows} is not a multiple of train.micro_batch_size * data-parallel size = "
            f"{train.micro_batch_size} * {size}"
        )
    else:
        message = (
            f"train.global_batch_size={rows} with train.micro_batch_size={train.micro_batch_size} gives "
            f"{rows // at_once} micro-batches per step, which are not a multiple of parallel.pipeline="
            f"{parallel.pipeline}, as parallel.virtual_pipeline={parallel.virtual_pipeline} needs"
        )
    raise _Refusal(message, remedies)


# -------------------------------------------------------------------------------------------------------- remedies


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _nearest(value: int, candidates: Iterable[int]) -> list[int]:
    """Other candidates, those below first, each from `value` on."""
    every = [candidate for candidate in candidates if candidate != value]
    below, above = [c for c in every if c < value], [c for c in every if c > value]
    return [*reversed(below), *above][:_NEAR]


def _multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` below and above `value`, without 0, and the next one."""
    below = value // unit * unit
    return [count for count in (below, below + unit, below + 2 * unit) if count]


def _advice(config: Config, world_size: int | None, refusal: _Refusal) -> str:
    """'; use A or B' with the smallest changes that make the whole layout pass; '' if none is found."""
    for depth in range(1, _MOST_CHANGES + 1):
        found = _remedies(config, world_size, refusal, depth)
        words = dict.fromkeys(_words(config, changes) for changes in itertools.islice(found, 4 * _REMEDIES))
        if words:
            return f"; use {_either(list(words)[:_REMEDIES])}"
    plain = next(_remedies(config, world_size, _Refusal("", [_PLAIN]), _MOST_CHANGES), None)
    return "" if plain is None else f"; use {_words(config, plain)}"


def _remedies(config: Config, world_size: int | None, refusal: _Refusal, depth: int) -> Iterator[Changes]:
    """Changes that pass every check, of at most `depth` remedies that follow from each other."""
    for changes in refusal.remedies:
        trial = _changed(config, changes)
        processes = changes.get(PROCESSES, world_size)
        try:
            _check(trial, processes)
            yield changes
        except _Refusal as another:
            if depth > 1:
                for more in _remedies(trial, processes, another, depth - 1):
                    if not more.keys() & changes.keys():
                        yield {**changes, **more}


def _changed(config: Config, changes: Changes) -> Config:
    trial = copy.copy(config)
    for key, value in changes.items():
        if key != PROCESSES:
            section, name = key.split(".")
            owner = copy.copy(getattr(trial, section))
            setattr(owner, name, value)
            setattr(trial, section, owner)
    return trial


def _words(config: Config, changes: Changes) -> str:
    """As on the command line, without what is so already; the number of processes last."""
    words = []
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if key != PROCESSES and getattr(getattr(config, section), name) != value:
            words.append(f"{key}={'null' if value is None else str(value).lower()}")
    if PROCESSES in changes:
        words.append(f"{'on ' if words else ''}{changes[PROCESSES]} processes")
    return " ".join(words)


def _either(words: list[str]) -> str:
    """'key=1 or 2' where only the value of one key differs, else 'a=1 b=2, or c=3'."""
    if len(words) == 2 and not any(" " in word for word in words):
        (key, _, _), (other, _, value) = (word.partition("=") for word in words)
        return f"{words[0]} or {value if key == other else words[1]}"
    if len(words) == 2 and all(word.endswith(" processes") and word.count(" ") == 1 for word in words):
        return f"{words[0].split()[0]} or {words[1]}"
    return ", or ".join(words)
