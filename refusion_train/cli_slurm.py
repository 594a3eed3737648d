"""Commands for clusters: `refusion submit` and `refusion status`. Parsing and printing only."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Optional

import typer

from refusion_train.errors import ConfigError


def submit(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped one.", show_default=False)],
    cluster: Annotated[str, typer.Option(help="A cluster file, or the name of a shipped one (dgx).")],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
        typer.Argument(help="key=value, cluster.key=value ...", metavar="[KEY=VALUE]...", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script and the command; touch nothing.")
    ] = False,
    test_only: Annotated[bool, typer.Option("--test-only", help="Ask whether such a job can ever run.")] = False,
) -> None:
    """Train as a job of Slurm, which is put back into the queue until train.steps are done.

    Examples: refusion submit run.yaml train.lr=1e-4 --cluster dgx cluster.nodes=8 cluster.account=me
              refusion submit run.yaml --cluster my-cluster.yaml --dry-run

    The configuration is checked for the number of ranks first: an error in it never enters the queue (exit code 2).
    """
    from launchers import submit as job

    if dry_run and test_only:
        raise ConfigError("give one of --dry-run and --test-only")
    plan = job.prepare(config, overrides or [], cluster)
    if dry_run:
        typer.echo(plan.script, nl=False)
        typer.echo(f"\n# Submitted by:\n{plan.line}")
    elif test_only:
        typer.echo(job.test_only(plan))
    else:
        number, run = job.submit(plan), shlex.quote(str(plan.config.run_dir))
        typer.echo(
            f"job {number}: {plan.cluster.nodes} nodes, {plan.cluster.world_size} ranks\n"
            f"script:    {plan.folder / job.SCRIPT}\n"
            f"watch it:  refusion status {run} --watch\n"
            f"its log:   {plan.folder}/{number}-0/output.log (then {number}-1, ...)\n"
            f"stop it:   scancel {number}   (it saves; submit again to go on)"
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
