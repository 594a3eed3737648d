"""`refusion submit`: a run as a job of Slurm, from a batch script that can be read, changed and submitted by hand.

What is trained goes to the job as a file, the resolved configuration: no override ever meets a shell. What must stand
in the script (paths, environment) is quoted, or refused where Slurm has no way to quote it.
"""

from __future__ import annotations

import copy
import importlib.resources
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from data_tools.output import write_whole
from launchers import attempt, slurm
from launchers.cluster import ClusterConfig, load_cluster
from refusion_train import __version__
from refusion_train.config import Config, load, to_yaml, validate
from refusion_train.data.shard_index import Index
from refusion_train.errors import ConfigError
from refusion_train.sources import dataset_paths
from refusion_train.train.folder import refuse_another_run

PREFIX = "cluster."  # of the words that are for the cluster file
SCRIPT, CONFIG, SUBMITTED = "job.sbatch", "config.yaml", "submitted.json"


@dataclass(frozen=True)
class Plan:
    """All that a submission consists of, before anything is written."""

    config: Config
    cluster: ClusterConfig
    run: Path
    commit: str
    script: str

    @property
    def folder(self) -> Path:
        """Where the job's files go, and where Slurm puts the batch script's own words."""
        return self.run / attempt.FOLDER

    @property
    def words(self) -> list[str]:
        """What sbatch is called with. The folder is no pattern to Slurm, as the name of an output file would be."""
        return [f"--chdir={self.folder}", str(self.folder / SCRIPT)]

    @property
    def line(self) -> str:
        """The command, as one would type it."""
        return shlex.join(["sbatch", *self.words])


def prepare(config: str, overrides: list[str], cluster: str) -> Plan:
    """Check everything that can be checked here, and render the script; nothing is written.

    overrides: `key=value` for the run, `cluster.key=value` for the cluster file.
    Raises ConfigError, as `refusion train` would on so many ranks, so that no such error waits in a queue.
    """
    ours = [word.removeprefix(PREFIX) for word in overrides if word.startswith(PREFIX)]
    machine = load_cluster(cluster, ours)
    settings = load(config, [word for word in overrides if not word.startswith(PREFIX)])
    validate(settings, machine.world_size)
    for path in dataset_paths(settings):
        Index.read(path)
    run = Path(os.path.abspath(settings.run_dir))
    refuse_another_run(settings, run)
    _check_text(settings)
    sources = commit()
    return Plan(settings, machine, run, sources, render(machine, run, Path.cwd(), sources))


def submit(plan: Plan) -> str:
    """Write the job's files into the run folder and submit; the number of the job.

    Raises ConfigError if another job has the run folder, SlurmError if Slurm does not take it.
    """
    slurm.ping()  # before anything is written
    _refuse_second(plan)
    plan.folder.mkdir(parents=True, exist_ok=True)
    _write(plan.folder / CONFIG, to_yaml(for_job(plan.config)))
    _write(plan.folder / SCRIPT, plan.script)
    number = slurm.submit(plan.words)
    record = {
        "job": number, "time": datetime.now().astimezone().isoformat(timespec="seconds"), "commit": plan.commit,
        "version": __version__, "nodes": plan.cluster.nodes, "ranks": plan.cluster.world_size,
        "steps": plan.config.train.steps, "command": sys.argv,
    }  # fmt: skip
    _write(plan.folder / SUBMITTED, json.dumps(record, indent=1) + "\n")
    return number


def test_only(plan: Plan) -> str:
    """Ask Slurm whether such a job could ever run, and when; its answer. Raises SlurmError if it could not."""
    slurm.ping()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / SCRIPT
        _write(file, plan.script)
        return slurm.call(["sbatch", "--test-only", str(file)])


def for_job(config: Config) -> Config:
    """The configuration of every stretch of the job: what `checkpoint.resume=none` asks for was seen to here."""
    config = copy.deepcopy(config)
    config.checkpoint.resume = "auto"
    return config


# --------------------------------------------------------------------------------------------------------- script


def render(cluster: ClusterConfig, run: Path, work_dir: Path, commit: str) -> str:
    """The batch script. Raises ConfigError for a path that no file name can be."""
    import jinja2

    for path in (run, work_dir):
        if "\0" in str(path):
            raise ConfigError(f"{str(path)!a} holds a zero byte; give another run_dir")
    template = importlib.resources.files("launchers").joinpath("templates", "job.sbatch.j2").read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["quote"] = shlex.quote
    environment.filters["comment"] = json.dumps  # one line, whatever stands in it
    per_rank = cluster.launch == "srun"
    per_node = cluster.ranks_per_node if per_rank else 1
    python = cluster.python or ("python" if cluster.venv or cluster.container_image else sys.executable)
    return environment.from_string(template).render(
        cluster=cluster, run_dir=str(run), work_dir=str(work_dir), commit=commit, name=job_name(run), python=python,
        tasks=cluster.nodes * per_node, tasks_per_node=per_node, options=_options(cluster),
        container=_container(cluster),
        srun_options="".join(f" {shlex.quote(word)}" for word in _srun_options(cluster)),
    )  # fmt: skip


def job_name(run: Path) -> str:
    """Name of the job: the run folder's, as far as Slurm can show it."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", run.name).strip("-.")[:64] or "refusion"


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


# --------------------------------------------------------------------------------------------------------- checks


def _check_text(config: Config) -> None:
    """Refuse what would not come back from the job's file as it is."""
    with tempfile.TemporaryDirectory() as folder:
        file, wanted = Path(folder) / CONFIG, for_job(config)
        try:
            _write(file, to_yaml(wanted))
            same = load(file) == wanted
        except (ConfigError, UnicodeError):
            same = False
    if not same:
        raise ConfigError("the configuration holds text that YAML cannot keep, such as ${ or bytes that are not UTF-8")


def _refuse_second(plan: Plan) -> None:
    number = submitted(plan.run).get("job")
    found = slurm.active(number) if number else None
    if found is not None:
        raise ConfigError(
            f"run_dir={plan.config.run_dir} has a job already: {found.number} ({found.state}); wait for it, stop it "
            f"with `scancel {found.number}`, or give another run_dir"
        )


def submitted(run: Path) -> dict[str, Any]:
    """What the last submission of a run folder has left; empty if there was none."""
    try:
        return json.loads((run / attempt.FOLDER / SUBMITTED).read_text())
    except (OSError, ValueError):
        return {}


def _write(file: Path, text: str) -> None:
    write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8", errors="surrogateescape"))
