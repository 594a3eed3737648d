"""Batch scripts: rendered from templates that can be read, written into a folder, submitted one after the other.

A script says what a job is; what it waits for stands in sbatch's command, because it is known only when the other job
has a number. Everything that comes from a user is quoted, or refused where Slurm has no way to quote it.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from data_tools.output import write_whole
from launchers import attempt, slurm
from launchers.cluster import ClusterConfig
from refusion_train import __version__
from refusion_train.errors import ConfigError

SUBMITTED = "submitted.json"


@dataclass(frozen=True)
class Script:
    """A batch script and its file's name. after: name of the script whose job must have succeeded first; of two arrays
    each element waits for the other's of its number."""

    name: str
    text: str
    after: str | None = None
    array: bool = False

    def words(self, folder: Path, numbers: dict[str, str]) -> list[str]:
        """What sbatch is called with. The folder is no pattern to Slurm, as the name of an output file would be.

        numbers: of the jobs so far, by the names of their scripts.
        """
        after = []
        if self.after is not None:
            kind = "aftercorr" if self.array else "afterok"
            after = [f"--dependency={kind}:{numbers[self.after]}", "--kill-on-invalid-dep=yes"]
        return [f"--chdir={folder}", *after, str(folder / self.name)]


# ------------------------------------------------------------------------------------------------------ rendering


def render(
    template: str,
    cluster: ClusterConfig,
    name: str,
    work_dir: Path,
    commit: str,
    array: str | None = None,
    **values: Any,
) -> str:
    """A batch script. array: numbers of its elements, as sbatch takes them; values: what else the template asks for.

    Raises ConfigError for a path that no file name can be.
    """  # fmt: skip
    import jinja2

    for path in (work_dir, *(value for value in values.values() if isinstance(value, Path))):
        if "\0" in str(path):
            raise ConfigError(f"{str(path)!a} holds a zero byte; give another run_dir")
    folder = importlib.resources.files("launchers").joinpath("templates")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True,
        loader=jinja2.FunctionLoader(lambda file: folder.joinpath(file).read_text()),
    )  # fmt: skip
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["comment"] = lambda value: json.dumps(str(value))  # one line, whatever stands in it
    per_node = cluster.ranks_per_node if cluster.launch == "srun" else 1
    python = cluster.python or ("python" if cluster.venv or cluster.container_image else sys.executable)
    return environment.get_template(template).render(
        cluster=cluster, name=name, work_dir=work_dir, commit=commit, array=array, python=python,
        tasks=cluster.nodes * per_node, tasks_per_node=per_node, options=_options(cluster),
        container=_container(cluster),
        srun_options="".join(f" {shlex.quote(word)}" for word in _srun_options(cluster)), **values,
    )  # fmt: skip


def job_name(folder: Path) -> str:
    """Name of a job: that of its folder, as far as Slurm can show it."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.name).strip("-.")[:64] or "refusion"


def array_of(first: int, last: int, at_most: int | None) -> str:
    """Numbers of an array's elements. at_most: so many run at a time. Raises ConfigError."""
    if at_most is not None and at_most < 1:
        raise ConfigError(f"--at-most {at_most} must be at least 1")
    return f"{first}-{last}" + (f"%{at_most}" if at_most is not None else "")


def _options(cluster: ClusterConfig) -> list[str]:
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
    given = {
        "gpus-per-node": f"{kind}{cluster.gpus}" if cluster.gpus else None, "cpus-per-task": _cpus(cluster),
        "mem": cluster.memory, "partition": cluster.partition, "account": cluster.account, "qos": cluster.qos,
        "constraint": cluster.constraint, "reservation": cluster.reservation,
    }  # fmt: skip
    found = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [*found, *(["--exclusive"] if cluster.exclusive else []), *cluster.sbatch]


def _cpus(cluster: ClusterConfig) -> int | None:
    """CPUs of a task of Slurm, which is a rank, or all ranks of a node."""
    if cluster.cpus_per_rank is None:
        return None
    return cluster.cpus_per_rank * (1 if cluster.launch == "srun" else cluster.ranks_per_node)


def _srun_options(cluster: ClusterConfig) -> list[str]:
    cpus = _cpus(cluster)  # srun does not take it over from the job
    return [*([] if cpus is None else [f"--cpus-per-task={cpus}"]), *_container(cluster), *cluster.srun]


def _container(cluster: ClusterConfig) -> list[str]:
    if cluster.container_image is None:
        return []
    mounts = [f"--container-mounts={','.join(cluster.container_mounts)}"] if cluster.container_mounts else []
    return [f"--container-image={cluster.container_image}", *mounts]


def commit() -> str:
    """The commit of the package's sources, `+changes` if files differ from it; `unknown` outside a repository."""
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        return head + ("+changes" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


# ----------------------------------------------------------------------------------------------------- submitting


def shown(scripts: Sequence[Script], folder: Path) -> str:
    """What a dry run prints: the scripts, and the commands as one would type them."""
    numbers = {script.name: f"JOB{i}" if len(scripts) > 2 else "JOB" for i, script in enumerate(scripts, start=1)}
    lines = [shlex.join(["sbatch", *script.words(folder, numbers)]) for script in scripts]
    return "\n".join(script.text for script in scripts) + "\n# Submitted by:\n" + "\n".join(lines)


def submit_all(scripts: Sequence[Script], folder: Path) -> dict[str, str]:
    """Write the scripts and submit them in order; the numbers of their jobs. The controller has answered a `ping`.

    Raises SlurmError if Slurm does not take one; those before it are then cancelled.
    """
    for script in scripts:
        write_text(folder / script.name, script.text)
    numbers: dict[str, str] = {}
    for script in scripts:
        try:
            numbers[script.name] = slurm.submit(script.words(folder, numbers))
        except slurm.SlurmError as error:
            if numbers:
                raise type(error)(f"{error} ({script.name}); {_cancelled(list(numbers.values()))}") from None
            raise
    return numbers


def _cancelled(numbers: list[str]) -> str:
    try:
        slurm.call(["scancel", *numbers])
    except slurm.SlurmError:
        return f"end what was submitted before it with `scancel {' '.join(numbers)}`"
    return "what was submitted before it is cancelled"


def test_only(scripts: Iterable[Script]) -> str:
    """Ask Slurm whether such jobs could ever run, and when; its answers. Raises SlurmError if one could not."""
    slurm.ping()
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            write_text(Path(folder) / script.name, script.text)
            answers.append(slurm.call(["sbatch", "--test-only", str(Path(folder) / script.name)]))
    return "\n".join(answers)


def record(folder: Path, job: str, commit: str, **more: Any) -> None:
    """Leave a note of a submission in FOLDER/slurm, for `submitted`."""
    content = {
        "job": job, "time": datetime.now().astimezone().isoformat(timespec="seconds"), "commit": commit,
        "version": __version__, **more, "command": sys.argv,
    }  # fmt: skip
    write_text(folder / attempt.FOLDER / SUBMITTED, json.dumps(content, indent=1) + "\n")


def submitted(folder: Path) -> dict[str, Any]:
    """What the last submission has left in a run folder; empty if there was none."""
    try:
        return json.loads((folder / attempt.FOLDER / SUBMITTED).read_text())
    except (OSError, ValueError):
        return {}


def refuse_second(folders: Iterable[Path], key: str) -> None:
    """Raise ConfigError if a job that was submitted for one of the folders is still in the queue.

    key: what the folder is called in the command, such as run_dir.
    """
    asked: dict[str, slurm.Job | None] = {}
    for folder in folders:
        number = submitted(folder).get("job", "").partition("_")[0]  # of an array the whole
        if number and number not in asked:
            asked[number] = slurm.active(number)
        found = asked.get(number)
        if found is not None:
            raise ConfigError(
                f"{key}={folder} has a job already: {found.number} ({found.state}); wait for it, stop it with "
                f"`scancel {number}`, or give another {key}"
            )


def write_text(file: Path, text: str) -> None:
    """Write a file that may hold names of files that are not UTF-8."""
    os.makedirs(file.parent, exist_ok=True)
    write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8", errors="surrogateescape"))
