"""The report of `refusion compare`: what each objective learned, what its decoders get right, and how fast.

Losses of different objectives are different things and never share an axis: the left-to-right loss is drawn for the
causal arms that have one, the masked loss (a bound on the likelihood, NELBO) for those that are masked.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_tools.output import new_figure, write_whole
from launchers.demo import validation_rows
from launchers.status import last_rows
from refusion_train.config import load

if TYPE_CHECKING:
    from launchers.compare import Comparison, Training

REPORT = "report.md"
CURVES, SPEED = "curves.png", "speed.png"
_LOSSES = {
    "val_left_to_right": "left to right, nats per token",
    "val_nelbo": "masked (NELBO), nats per token",
}
Figures = Sequence[tuple[int, list[dict[str, Any]]]]  # of each seed, the summaries of all decoders


def write(folder: Path, comparison: Comparison, trainings: list[Training], figures: Figures) -> Path:
    """Write report.md and its pictures; returns the report."""
    curves = {one: validation_rows(one.run) for one in trainings}
    _draw_curves(curves, folder / CURVES)
    _draw_speed(figures, folder / SPEED)
    parts = [
        f"# Comparison: {', '.join(comparison.arms)}",
        _settings(comparison, trainings),
        "## What was learned",
        f"![validation losses]({CURVES})",
        _losses(curves),
        "## Decoding",
        f"![speed over exact answers]({SPEED})",
        _decoding(comparison, figures),
    ]
    text = "\n\n".join(parts) + "\n"
    write_whole(folder / REPORT, lambda partial: partial.write_text(text, "utf-8"))
    return folder / REPORT


def _settings(comparison: Comparison, trainings: list[Training]) -> str:
    config = load(trainings[0].words[0], list(trainings[0].words[1:]))
    tokens = [last_rows(one.run)[-1]["tokens"] for one in trainings]
    arms = "\n".join(f"- **{arm}**: `{' '.join(words)}`" for arm, words in comparison.arms.items())
    data = f"the built-in task, level {comparison.level}" if comparison.shards is None else comparison.shards
    model = config.model
    return (
        f"Every arm starts from the same weights (per seed) and sees the same data, {config.train.steps} steps and "
        f"{min(tokens):,} tokens{'' if min(tokens) == max(tokens) else f' to {max(tokens):,}'}; seeds "
        f"{', '.join(map(str, comparison.seeds))}. Data: {data}. Model: {model.num_layers} layers of "
        f"{model.hidden_size}, {config.train.precision}.\n\n{arms}"
    )


def _losses(curves: dict[Training, list[dict[str, Any]]]) -> str:
    lines = ["| run | " + " | ".join(_LOSSES.values()) + " |", "|---|" + "---|" * len(_LOSSES)]
    for one, rows in curves.items():
        values = [f"{rows[-1][key]:.4f}" if rows and key in rows[-1] else "" for key in _LOSSES]
        lines.append(f"| {one.folder.name} | {' | '.join(values)} |")
    lines.append(
        "\nThe two columns measure different things: the one a likelihood, the other a bound on it from random masks. "
        "Compare within a column."
    )
    return "\n".join(lines)


def _decoding(comparison: Comparison, figures: Figures) -> str:
    """One row a decoder: exact answers of every seed; speed relative to the ar arm of the same seed (median)."""
    names = {(_arm(one), one["name"]) for _, found in figures for one in found}
    order = [key for _, found in figures[:1] for key in [(_arm(one), one["name"]) for one in found] if key in names]
    lines = [
        "| arm | decoder | exact, by seed | tokens/CPU s | speed against ar | against mdm, full steps | "
        "tokens/forward | forwards/answer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, name in order:
        mine = [one for _, found in figures for one in found if (_arm(one), one["name"]) == (arm, name)]
        exact = ", ".join(f"{one['exact_match']:.1%}" for one in mine)
        lines.append(
            f"| {arm} | {name} | {exact} | "
            f"{_median(one['tokens_per_cpu_second'] for one in mine):.0f} | "
            f"{_ratio(mine, figures, 'left to right', 'ar')} | {_ratio(mine, figures, 'mdm', 'mdm')} | "
            f"{_median(one['tokens_per_forward'] for one in mine):.2f} | "
            f"{_median(one['forwards_per_sequence'] for one in mine):.1f} |"
        )
    lines.append(
        f"\n{comparison.prompts} prompts, greedy, batch 1, one thread, all decoders in turns prompt by prompt. Exact: "
        "the whole answer is right. tokens/forward: emitted tokens up to and including the end, over all forwards. "
        "Where an arm has not learned the task, its row compares cost alone."
    )
    return "\n".join(lines)


def _arm(one: dict[str, Any]) -> str:
    """Arm of a summary: its model stands in ARM-SEED/hf."""
    return Path(one["folder"]).parent.name.rpartition("-")[0]


def _median(values: Any) -> float:
    return statistics.median(list(values))


def _ratio(mine: list[dict[str, Any]], figures: Figures, name: str, objective: str) -> str:
    """Speed of `mine` over that of the decoder `name` of the arm trained with `objective`, median over seeds."""
    ratios = []
    for one, (_, found) in zip(mine, figures, strict=True):
        others = [other for other in found if other["name"] == name and other["objective"] == objective]
        if others:
            ratios.append(one["tokens_per_cpu_second"] / others[0]["tokens_per_cpu_second"])
    return f"{_median(ratios):.2f}x" if ratios else ""


def _draw_curves(curves: dict[Training, list[dict[str, Any]]], path: Path) -> None:
    figure = new_figure(11, 4.5)
    for axis, (key, title) in zip(figure.subplots(1, 2), _LOSSES.items(), strict=True):
        for one, rows in curves.items():
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axis.plot(*zip(*points, strict=True), label=one.folder.name, marker=".")
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_yscale("log")
        if axis.lines:
            axis.legend(fontsize=7)
    write_whole(path, lambda partial: figure.savefig(partial, format="png", dpi=120))


def _draw_speed(figures: Figures, path: Path) -> None:
    figure = new_figure(8, 6)
    axis = figure.add_subplot()
    for index, (_, found) in enumerate(figures):
        for number, one in enumerate(found):
            place = (100 * one["exact_match"], one["tokens_per_cpu_second"])
            axis.scatter(*place, color=f"C{number % 10}", marker="o^sv"[index % 4])
            axis.annotate(f"{_arm(one)}: {one['name']}", place, fontsize=6)
    axis.set_xlabel("exact answers, %")
    axis.set_ylabel("tokens per CPU second")
    axis.set_yscale("log")
    write_whole(path, lambda partial: figure.savefig(partial, format="png", dpi=120))
