"""The `refusion bench` commands and `refusion compare`: parsing and printing only, as in `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

bench_app = typer.Typer(help="Measuring on your own data.", no_args_is_help=True, add_completion=False)


@bench_app.callback()
def _group() -> None:
    """Keeps the name of a single command."""


@bench_app.command("decode")
def bench_decode(
    folders: Annotated[list[str], typer.Argument(help="Folders written by export.", metavar="HF_DIR...")],
    test: Annotated[Path, typer.Option(help="JSON lines with prompt and response.")],
    limit: Annotated[Optional[int], typer.Option("-n", "--limit", min=1, help="Only so many prompts.")] = None,  # noqa: UP045
    max_new_tokens: Annotated[Optional[int], typer.Option(min=1, help="Default: what the answers need.")] = None,  # noqa: UP045
    slot_size: Annotated[Optional[list[int]], typer.Option(min=1, help="May be given several times.")] = None,  # noqa: UP045
    out: Annotated[Optional[Path], typer.Option(help="Write the figures as this .json.")] = None,  # noqa: UP045
    plot: Annotated[Optional[Path], typer.Option(help="Draw speed over quality as this .png.")] = None,  # noqa: UP045
) -> None:
    """Exact answers and speed of every decoder that suits each model, in turns, on one thread.

    Example: refusion bench decode runs/slots/hf runs/ar/hf runs/mdm/hf --test sums/test.jsonl --plot speed.png
    """
    from rich.console import Console

    from data_tools.output import new_figure
    from refusion_train.convert import bench

    if plot is not None:
        new_figure(1, 1)  # says now, not after the work, if it cannot be drawn
    console = Console(highlight=False)
    found = bench.bench_decode(folders, str(test), limit, max_new_tokens, slot_size or (), Console(stderr=True))
    bench.show(found, console if console.is_terminal else Console(width=160, highlight=False))
    if out is not None:
        bench.write_json(found, str(out))
    if plot is not None:
        bench.plot(found, str(plot))


def compare(
    comparison: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a shipped one (cpu).", show_default=False)
    ],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
        typer.Argument(
            help="key=value ... of the comparison, or of the training of all arms.",
            metavar="[KEY=VALUE]...",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where everything is made.")] = Path("compare"),
    arm: Annotated[Optional[list[str]], typer.Option(help="Only this one; may be given several times.")] = None,  # noqa: UP045
    jobs: Annotated[int, typer.Option(help="Trainings side by side.", min=1)] = 1,
    nproc: Annotated[int, typer.Option(help="Processes of each training.", min=1)] = 1,
) -> None:
    """Train the same model with several objectives on the same tokens, decode with all, and write a report.

    Examples: refusion compare cpu --dir compare --jobs 2
              refusion compare cpu train.steps=300 seeds=[0] prompts=20
              refusion compare mine.yaml shards=shards test=test.jsonl --nproc 8

    The same command again goes on after an interruption. The report is DIR/report.md.
    """
    from data_tools.output import new_figure
    from launchers.compare import run_compare

    new_figure(1, 1)  # says now, not after the work, if pictures cannot be drawn
    raise typer.Exit(run_compare(comparison, folder, overrides or [], arm or [], jobs, nproc))
