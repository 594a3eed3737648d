"""Commands for clusters: `refusion submit` and `refusion status`. Parsing and printing only."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Optional

import typer

from refusion_train.errors import ConfigError

Cluster = Annotated[str, typer.Option(help="A cluster file, or the name of a shipped one (dgx).")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the scripts and the commands; touch nothing.")]
TestOnly = Annotated[bool, typer.Option("--test-only", help="Ask whether such a job can ever run.")]
AtMost = Annotated[
    Optional[int],  # noqa: UP045 - typer reads the annotation at run time
    typer.Option(help="Of the array so many run at a time; default: as Slurm likes.", show_default=False),
]


def submit(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped one.", show_default=False)],
    cluster: Cluster,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
        typer.Argument(help="key=value, cluster.key=value ...", metavar="[KEY=VALUE]...", show_default=False),
    ] = None,
    dry_run: DryRun = False,
    test_only: TestOnly = False,
    then: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="export, or evaluate, when the training has ended well. Repeat it for both."),
    ] = None,
    sweep: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="YAML list of runs: the key=value words of each. They go to RUN/000, RUN/001 ..."),
    ] = None,
    at_most: AtMost = None,
) -> None:
    """Train as a job of Slurm, which is put back into the queue until train.steps are done.

    Examples: refusion submit run.yaml train.lr=1e-4 --cluster dgx cluster.nodes=8 cluster.account=me
              refusion submit run.yaml --cluster my-cluster.yaml --dry-run
              refusion submit run.yaml --cluster dgx --then export --then evaluate
              refusion submit run.yaml --cluster dgx --sweep rates.yaml --at-most 2

    Every configuration is checked for the number of ranks first: an error in it never enters the queue (exit code 2).
    """
    from launchers import batch
    from launchers import submit as job

    _refuse_both(dry_run, test_only)
    plan = job.prepare(config, overrides or [], cluster, then or [], sweep, at_most)
    if dry_run:
        typer.echo(batch.shown(plan.scripts, plan.folder))
        return
    if test_only:
        typer.echo(batch.test_only(plan.scripts))
        return
    numbers, run = job.submit(plan), shlex.quote(os.path.relpath(plan.run))
    number, *others = numbers.values()
    runs = f"{len(plan.configs)} runs, each on " if plan.sweep else ""
    one, log = (f"{number}_0", plan.run / job.element(0) / "slurm") if plan.sweep else (number, plan.folder)
    lines = [
        f"job {number}: {runs}{plan.cluster.nodes} nodes, {plan.cluster.world_size} ranks",
        *(f"job {other}: {name}, when that has ended well" for name, other in numbers.items() if other in others),
        f"script:    {plan.folder / job.SCRIPT}",
        f"watch it:  refusion status {run} --watch",
        f"its log:   {log}/{one}-0/output.log (then {one}-1, ...)",
        f"stop it:   scancel {number}   (it saves; submit again to go on)",
    ]
    typer.echo("\n".join(lines))


def submit_data(
    words: Annotated[
        list[str],
        typer.Argument(
            help="Inputs and options of `refusion data shards`, and cluster.key=value.",
            metavar="INPUT... [OPTIONS]",
            show_default=False,
        ),
    ],
    cluster: Cluster,
    out: Annotated[str, typer.Option(help="Folder of the dataset. The parts go to OUT.parts.")],
    parts: Annotated[int, typer.Option(help="Parts of the input files, made by a job each.", min=1)],
    at_most: AtMost = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Make OUT and its parts anew.")] = False,
    dry_run: DryRun = False,
    test_only: TestOnly = False,
) -> None:
    """Tokenize documents into shards: an array of jobs of Slurm, and one that joins their parts when all are done.

    Examples: refusion submit-data corpus/ --tokenizer tok --out shards --parts 16 --cluster dgx cluster.partition=cpu
              refusion submit-data corpus/ --tokenizer tok --out shards --parts 4 --cluster cpu-test --dry-run

    Options that are not below are those of `refusion data shards` and go to every part. Inputs are split by files. The
    command is checked first: an error in it never enters the queue (exit code 2). After a failure submit again: parts
    that are done stay.
    """
    from launchers import batch
    from launchers import submit_data as job
    from refusion_train.cli_data import check_shards_words

    _refuse_both(dry_run, test_only)
    check_shards_words(job.split_words(words, cluster)[1], parts)
    plan = job.prepare(words, out, parts, cluster, overwrite, at_most)
    if dry_run:
        typer.echo(batch.shown(plan.scripts, plan.folder))
    elif test_only:
        typer.echo(batch.test_only(plan.scripts))
    else:
        array, merge = job.submit(plan)
        typer.echo(
            f"job {array}: {parts} parts\n"
            f"job {merge}: {plan.out} of them, when all are done\n"
            f"scripts:   {plan.folder}\n"
            f"watch it:  squeue --jobs={array},{merge}\n"
            f"its logs:  {plan.folder}/parts-{array}_1.log ... merge-{merge}.log\n"
            f"stop it:   scancel {array} {merge}   (submit again to go on)"
        )


def status(
    runs: Annotated[Optional[list[Path]], typer.Argument(help="Run folders.", metavar="[RUN]...")] = None,  # noqa: UP045
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every few seconds, until interrupted.")] = False,
) -> None:
    """How runs stand: queue, step, loss, speed, newest checkpoint, expected end, restarts.

    Examples: refusion status runs/a
              refusion status --watch          all jobs of yours that `refusion submit` has made

    A run folder is enough; without Slurm, or without its answer, what the folder tells is shown.
    """
    from launchers import status as report

    raise typer.Exit(report.show(runs or [], watch))


def _refuse_both(dry_run: bool, test_only: bool) -> None:
    if dry_run and test_only:
        raise ConfigError("give one of --dry-run and --test-only")
