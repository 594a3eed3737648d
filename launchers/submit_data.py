"""`refusion submit-data`: a corpus tokenized by an array of jobs, a part each, and joined by a job that waits for them.

The jobs run `refusion data shards --part i/N` and `refusion data merge`, as one could by hand. A part that is
interrupted goes on where it stopped, one that is finished does nothing: so the same command again mends what failed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers import attempt, batch, slurm
from launchers.batch import Script
from launchers.cluster import ClusterConfig
from launchers.submit import single, split_words
from refusion_train.errors import ConfigError

PARTS, MERGE = "parts.sbatch", "merge.sbatch"


@dataclass(frozen=True)
class DataPlan:
    """All that a submission consists of, before anything is written. out: the dataset's folder, absolute."""

    out: Path
    parts: int
    commit: str
    scripts: list[Script]

    @property
    def parts_folder(self) -> Path:
        """Holds the parts, which are called 1, 2 ..., and the jobs' files."""
        return parts_folder(self.out)

    @property
    def folder(self) -> Path:
        return self.parts_folder / attempt.FOLDER


def parts_folder(out: Path) -> Path:
    """Where the parts of a dataset lie until they are joined."""
    return out.with_name(f"{out.name}.parts")


def prepare(
    words: list[str], out: str, parts: int, cluster: str, overwrite: bool = False, at_most: int | None = None
) -> DataPlan:
    """The scripts; nothing is written, and the corpus is not looked at.

    words: of `refusion data shards`, without --out, --part and --overwrite; and `cluster.key=value` for the cluster
    file. at_most: so many parts are made at a time. Raises ConfigError.
    """
    if parts < 1:
        raise ConfigError(f"--parts {parts} must be at least 1")
    for word in words:
        if word.partition("=")[0] in ("--part", "--check"):
            raise ConfigError(f"{word} is not for the jobs of submit-data, which make all parts; leave it out")
    machine, words = split_words(words, cluster)
    machine, target, sources = single(machine), Path(os.path.abspath(out)), batch.commit()
    if target.exists() and not overwrite:
        raise ConfigError(f"--out {out} exists already; give another folder, or --overwrite to replace it")
    again = ["--overwrite"] * overwrite
    scripts = [
        _script(PARTS, machine, target, sources, _part(words, machine, target, parts, again), f"{parts} parts of it.",
                array=batch.array_of(1, parts, at_most)),
        _script(MERGE, machine, target, sources, _merge(target, parts, again), "Joins the parts."),
    ]  # fmt: skip
    return DataPlan(target, parts, sources, scripts)


def submit(plan: DataPlan) -> tuple[str, str]:
    """Write the scripts and submit them; numbers of the array and of the job that joins its parts.

    Raises ConfigError if an earlier submission is still in the queue, SlurmError if Slurm does not take it.
    """
    slurm.ping()  # before anything is written
    batch.refuse_second([plan.parts_folder], "--out")
    numbers = batch.submit_all(plan.scripts, plan.folder)
    batch.record(plan.parts_folder, numbers[PARTS], plan.commit, then={"merge": numbers[MERGE]}, parts=plan.parts)
    return numbers[PARTS], numbers[MERGE]


def _script(
    name: str, machine: ClusterConfig, out: Path, commit: str, command: str, about: str, array: str | None = None
) -> Script:
    kind = name.partition(".")[0]
    text = batch.render(
        "task.sbatch.j2", machine, f"{batch.job_name(out)[:50]}-{kind}", Path.cwd(), commit, array,
        written_by="submit-data", folder=out, about=about, log=kind, command=command, on_all_ranks=False, variables={},
    )  # fmt: skip
    return Script(name, text, after=None if name == PARTS else PARTS)


def _part(words: Sequence[str], machine: ClusterConfig, out: Path, parts: int, again: list[str]) -> str:
    cpus = machine.cpus_per_rank
    workers = [] if cpus is None else ["--workers", str(cpus)]  # before the user's own
    part, folder = f'"$SLURM_ARRAY_TASK_ID/{parts}"', f'{shlex.quote(str(parts_folder(out)))}/"$SLURM_ARRAY_TASK_ID"'
    return f"data shards --part {part} --out {folder} {shlex.join([*again, *workers, *words])}"


def _merge(out: Path, parts: int, again: list[str]) -> str:
    folders = f"{shlex.quote(str(parts_folder(out)))}/{{1..{parts}}}"
    return f"data merge {folders} {shlex.join(['--out', str(out), *again])}"
