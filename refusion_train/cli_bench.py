"""The `refusion bench` commands: parsing and printing only, as in `cli`."""

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
