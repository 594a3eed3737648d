"""Suggested layouts, and what is printed."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from refusion_train.config import Config, load
from refusion_train.errors import ConfigError
from refusion_train.plan import Suggestion, plan, render, render_suggestions, suggest
from refusion_train.plan.planner import usable_bytes


@pytest.fixture(scope="module")
def large() -> Config:
    """8 billion parameters, which one GPU of 80 GB cannot train."""
    return load("qwen3-8b")


@pytest.fixture(scope="module")
def found(large: Config) -> list[Suggestion]:
    """Every suggestion for 16 H100; the configuration is left as it was."""
    before = replace(large, parallel=replace(large.parallel), train=replace(large.train))
    suggestions = suggest(large, 16, gpu="H100", limit=None)
    assert large == before
    return suggestions


def test_suggestions_fit_and_are_what_the_plan_says(found: list[Suggestion]) -> None:
    assert len(found) > 3
    for entry in found:
        words = load("qwen3-8b", entry.overrides)
        planned = plan(words, 16, gpu="H100")
        assert planned.peak == entry.peak <= usable_bytes(79)
        assert planned.bubble == entry.bubble and planned.layout.data == entry.data
    assert len({(entry.tensor, entry.pipeline, entry.virtual_pipeline) for entry in found}) == len(found)


def test_fastest_come_first(found: list[Suggestion]) -> None:
    times = [entry.step_s for entry in found]
    assert all(later >= 0.98 * earlier for earlier, later in itertools.pairwise(times))


def test_estimated_times_are_those_of_the_arithmetic_and_more(large: Config, found: list[Suggestion]) -> None:
    planned = plan(large, 16, gpu="H100")
    assert planned.duration.tokens_per_s is not None
    ideal = planned.duration.tokens_per_step / planned.duration.tokens_per_s
    assert all(ideal < entry.step_s < 4 * ideal for entry in found)
    by_shape = {(entry.tensor, entry.pipeline, entry.virtual_pipeline): entry.step_s for entry in found}
    assert by_shape[8, 1, 1] > 1.05 * by_shape[2, 1, 1]  # more to sum over tensor-parallel ranks
    assert by_shape[2, 4, 1] > by_shape[2, 4, 3]  # a larger bubble


def test_less_memory_means_more_pieces_or_recomputation(large: Config) -> None:
    def first(memory: float) -> tuple[int, int]:
        (best,) = suggest(large, 16, memory, limit=1)
        return best.tensor * best.pipeline, ["none", "selective", "full"].index(best.recompute)

    assert first(20) > first(140)


def test_nothing_fits_in_little_memory(large: Config) -> None:
    assert suggest(large, 8, 8.0) == []


def test_small_models_stay_whole() -> None:
    best = suggest(load("qwen3-0.6b"), 8, gpu="H200")[0]
    assert (best.tensor, best.pipeline, best.data) == (1, 1, 8)


def test_memory_must_be_known(large: Config) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory"):
        suggest(large, 8)


def test_printed_plan() -> None:
    config = load("qwen3-8b", ["parallel.pipeline=2", "parallel.tensor=2", "train.recompute=full"])
    found = plan(config, 8, gpu="A100")
    text = _printed(lambda console: render(found, console))
    verdict = "fits:" if found.fits else "DOES NOT FIT"
    for part in (
        "8,190,735,360", verdict, "0-3", "4-7", found.memory[1].peak_phase, "pipeline", "zero gather",
        "8 A100 at 40% MFU", f"{found.bubble:.1%}", "no dataset",
    ):  # fmt: skip
        assert part in text, f"'{part}' is not in the plan"
    assert max(map(len, text.splitlines())) <= 120


def test_the_verdict_is_printed() -> None:
    config = load("qwen3-0.6b")
    assert "- DOES NOT FIT: " in _printed(lambda console: render(plan(config, 8, gpu_memory_gib=8), console))
    assert "- fits: " in _printed(lambda console: render(plan(config, 8, gpu_memory_gib=80), console))
    assert "GiB that tensors" not in _printed(lambda console: render(plan(config, 8), console))


def test_printed_suggestions(found: list[Suggestion]) -> None:
    text = _printed(lambda console: render_suggestions(found, console))
    assert found[0].overrides[0] in text and found[1].recompute in text
    assert "no layout fits" in _printed(lambda console: render_suggestions([], console))


def test_a_plan_is_json() -> None:
    config = load("qwen3-0.6b")
    content = json.loads(json.dumps(plan(config, 4, gpu="H100").to_dict()))
    assert content["parameters"]["total"] == 596_049_920
    assert content["memory"][0]["peak"] == content["peak"] and content["fits"] is True
    assert content["layout"]["data"] == 4


def test_planning_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from refusion_train.config import load; from refusion_train.plan import plan, render, suggest\n"
        "from rich.console import Console\n"
        "c = load('qwen3-8b'); render(plan(c, 8, gpu='H100'), Console()); suggest(c, 8, gpu='H100')\n"
        "print(sorted(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.splitlines()[-1].replace("'", "").strip("[]").split(", "))
    assert not loaded & {"torch", "numpy", "megatron", "deepspeed", "transformers"}


def _printed(write: object) -> str:
    from rich.console import Console

    output = io.StringIO()
    write(Console(file=output, width=120))  # type: ignore[operator]
    return output.getvalue()
