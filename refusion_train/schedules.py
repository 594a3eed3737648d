"""Settings that may change with the step: a plain value, or a schedule `[[step, value], ...]`.

Between two points of a schedule a value is linear, before the first and behind the last it is constant; step 0 is the
first of a run. A value is a number (a weight) or a list of numbers (weights of slot sizes). All schedules of the
configuration are read and evaluated here.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from refusion_train.errors import ConfigError

if TYPE_CHECKING:
    from refusion_train.config import ObjectiveConfig

LOSS_WEIGHTS = ("ar_weight", "mdm_weight")  # of ObjectiveConfig
LAST = sys.maxsize  # a step behind every point: what a schedule ends at


def is_schedule(given: Any) -> bool:
    """Whether `given` is written as a schedule, right or wrong, and not as a plain value."""
    return isinstance(given, list | tuple) and bool(given) and isinstance(given[0], list | tuple)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_weight(key: str, given: Any) -> Any:
    """A weight, or a schedule of weights, checked and in floats. Raises ConfigError, one line that names `key`."""

    def fault(value: Any) -> str:
        return "" if is_number(value) and value >= 0 else "must be a number and must not be negative"

    return _read(key, given, fault, "[[0, 0.7], [1000, 0.2]]")


def read_weights(key: str, given: Any, count: int, what: str) -> Any:
    """`count` weights, not all 0, or a schedule of such lists, checked and in floats; what: they are weights of.

    Raises ConfigError, one line that names `key`.
    """

    def fault(value: Any) -> str:
        good = isinstance(value, list | tuple) and all(is_number(weight) and weight >= 0 for weight in value)
        if good and len(value) == count and any(value):
            return ""
        return f"must be a list of {count} numbers, one for each of {what}, not negative and not all 0"

    first, last = ([int(number == at) for number in range(count)] for at in (0, count - 1))
    return _read(key, given, fault, f"[[0, {first}], [1000, {last}]]")


def _read(key: str, given: Any, fault: Callable[[Any], str], example: str) -> Any:
    """fault: what is wrong with a value, or nothing."""
    if not is_schedule(given):
        if wrong := fault(given):
            raise ConfigError(f"{key}={given} {wrong}; or it is a schedule, such as {example}")
        return _floats(given)
    if not all(isinstance(point, list | tuple) and len(point) == 2 and is_number(point[0]) for point in given):
        raise ConfigError(f"{key}={given} is not a schedule; write [[step, value], ...], such as {example}")
    steps = [step for step, _ in given]
    if any(step < 0 or step != int(step) for step in steps) or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ConfigError(f"{key}={given}: steps must be whole numbers from 0 on that grow from point to point")
    for step, value in given:
        if wrong := fault(value):
            raise ConfigError(f"{key}={given}: {value} at step {step} {wrong}")
    return [[int(step), _floats(value)] for step, value in given]


def _floats(value: Any) -> Any:
    return [float(number) for number in value] if isinstance(value, list | tuple) else float(value)


def value_at(given: Any, step: int) -> Any:
    """The value at a step of what `read_weight` or `read_weights` returned."""
    if not is_schedule(given):
        return given
    if step <= given[0][0]:
        return given[0][1]
    for (start, low), (stop, high) in itertools.pairwise(given):
        if step <= stop:
            part = (step - start) / (stop - start)
            if isinstance(low, list):
                return [a + (b - a) * part for a, b in zip(low, high, strict=True)]
            return low + (high - low) * part
    return given[-1][1]


def step_without_weight(weights: list[Any]) -> int | None:
    """The first step at which all of these (numbers or schedules of them) are 0, if there is one.

    They are linear between their points and never negative: if some are above 0 at two neighbouring points of any of
    them, so between the two.
    """
    steps = sorted({0, *(step for given in weights if is_schedule(given) for step, _ in given)})
    return next((step for step in steps if not any(value_at(given, step) > 0 for given in weights)), None)


def read_objective(objective: ObjectiveConfig) -> dict[str, Any]:
    """What of the objective may change with the step, by name, checked and in floats. Raises ConfigError."""
    read = {name: read_weight(f"objective.{name}", getattr(objective, name)) for name in LOSS_WEIGHTS}
    sizes, weights = objective.slot_sizes, objective.slot_weights
    if sizes and weights is not None:
        read["slot_weights"] = read_weights("objective.slot_weights", weights, len(sizes), "objective.slot_sizes")
    return read


def objective_at(objective: ObjectiveConfig, step: int) -> ObjectiveConfig:
    """The objective as it is at a step, without schedules (itself if it has none)."""
    moving = [name for name in ("slot_weights", *LOSS_WEIGHTS) if is_schedule(getattr(objective, name))]
    return (
        replace(objective, **{name: value_at(getattr(objective, name), step) for name in moving})
        if moving
        else objective
    )
