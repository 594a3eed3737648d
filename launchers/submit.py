"""`refusion submit`: a run, or a sweep of runs, as a job of Slurm, and what is to be done when it has ended.

What is trained goes to the job as a file, the resolved configuration: no override ever meets a shell. A sweep is one
array of Slurm whose elements are ordinary runs, each in a folder of its own: RUN/000, RUN/001 ...
"""

from __future__ import annotations

import copy
import dataclasses
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers import attempt, batch, slurm
from launchers.batch import Script, write_text
from launchers.cluster import ClusterConfig, load_cluster
from refusion_train.config import Config, load, to_yaml, validate
from refusion_train.data.shard_index import Index
from refusion_train.errors import ConfigError
from refusion_train.sources import dataset_paths
from refusion_train.train.folder import refuse_another_run

PREFIX = "cluster."  # of the words that are for the cluster file
SCRIPT, CONFIG = "job.sbatch", "config.yaml"
FOLLOWERS = ("export", "evaluate")  # what can be asked for after a training
EXPORTED, EVALUATED = "hf", "evaluation.json"  # in the run folder: what they leave


@dataclass(frozen=True)
class Plan:
    """All that a submission consists of, before anything is written. run: the run folder, or that of all of a sweep;
    configs: by the run folders; scripts: the training's, then those that follow."""

    run: Path
    configs: dict[Path, Config]
    cluster: ClusterConfig
    commit: str
    scripts: list[Script]

    @property
    def folder(self) -> Path:
        """Where the job's files go, and where Slurm puts the batch script's own words."""
        return self.run / attempt.FOLDER

    @property
    def sweep(self) -> bool:
        return list(self.configs) != [self.run]


def prepare(
    config: str,
    overrides: list[str],
    cluster: str,
    then: Sequence[str] = (),
    sweep: str | None = None,
    at_most: int | None = None,
) -> Plan:
    """Check everything that can be checked here, and render the scripts; nothing is written.

    overrides: `key=value` for the run, `cluster.key=value` for the cluster file; then: of FOLLOWERS; sweep: file with
    the words of each run; at_most: so many of them run at a time.
    Raises ConfigError, as `refusion train` would on so many ranks, so that no such error waits in a queue.
    """  # fmt: skip
    machine, words = split_words(overrides, cluster)
    if at_most is not None and sweep is None:
        raise ConfigError(f"--at-most {at_most} is for a sweep; leave it out, or give --sweep FILE")
    entries = [[]] if sweep is None else read_sweep(sweep)
    configs: dict[Path, Config] = {}
    run = Path()
    for number, entry in enumerate(entries):
        try:
            settings = load(config, [*words, *entry])
            before, run = run, Path(os.path.abspath(settings.run_dir))
            if number and run != before:  # made of other keys, as runs/${train.lr} is
                raise ConfigError(f"run_dir={run} cannot differ between runs ({before}); give a text without ${{}}")
            if sweep is not None:
                settings.run_dir = os.path.join(settings.run_dir, element(number))
            _check(settings, machine, then)
        except ConfigError as error:
            raise ConfigError(f"{error} (run {element(number)} of {sweep})" if sweep else str(error)) from None
        configs[Path(os.path.abspath(settings.run_dir))] = settings
    for path in dict.fromkeys(path for settings in configs.values() for path in dataset_paths(settings)):
        Index.read(path)
    array = None if sweep is None else batch.array_of(0, len(entries) - 1, at_most)
    sources = batch.commit()
    scripts = [Script(SCRIPT, render(machine, run, Path.cwd(), sources, array))]
    scripts += [follower(name, machine, run, Path.cwd(), sources, array) for name in dict.fromkeys(then)]
    return Plan(run, configs, machine, sources, scripts)


def split_words(overrides: list[str], cluster: str) -> tuple[ClusterConfig, list[str]]:
    """The cluster with what of the words is for it, and the other words. Raises ConfigError."""
    ours = [word for word in overrides if word.startswith(PREFIX)]
    machine = load_cluster(cluster, [word.removeprefix(PREFIX) for word in ours])
    return machine, [word for word in overrides if word not in ours]


def submit(plan: Plan) -> dict[str, str]:
    """Write the job's files into the run folder and submit; the numbers of the jobs, the training's first.

    Raises ConfigError if another job has the run folder, SlurmError if Slurm does not take it.
    """
    slurm.ping()  # before anything is written
    batch.refuse_second([plan.run, *plan.configs], "run_dir")
    for run, config in plan.configs.items():
        write_text(run / attempt.FOLDER / CONFIG, to_yaml(for_job(config)))
    numbers = batch.submit_all(plan.scripts, plan.folder)
    job, then = numbers[SCRIPT], {name.partition(".")[0]: job for name, job in numbers.items() if name != SCRIPT}
    size = {"nodes": plan.cluster.nodes, "ranks": plan.cluster.world_size}
    for number, (run, config) in enumerate(plan.configs.items()):
        suffix = f"_{number}" if plan.sweep else ""
        more = {"then": {name: job + suffix for name, job in then.items()}, "steps": config.train.steps}
        batch.record(run, job + suffix, plan.commit, **size, **more)
    if plan.sweep:
        batch.record(plan.run, job, plan.commit, **size, then=then, sweep=len(plan.configs))
    return {SCRIPT: job, **then}


def for_job(config: Config) -> Config:
    """The configuration of every stretch of the job: what `checkpoint.resume=none` asks for was seen to here."""
    config = copy.deepcopy(config)
    config.checkpoint.resume = "auto"
    return config


# -------------------------------------------------------------------------------------------------------- scripts


def render(cluster: ClusterConfig, run: Path, work_dir: Path, commit: str, array: str | None = None) -> str:
    """The training's batch script; with `array`, that of a sweep in `run`."""
    name = batch.job_name(run)
    return batch.render("job.sbatch.j2", cluster, name, work_dir, commit, array, run_dir=run)


def follower(
    what: str, cluster: ClusterConfig, run: Path, work_dir: Path, commit: str, array: str | None = None
) -> Script:
    """What is done when the training has ended well: `export` in one process, `evaluate` on the training's ranks."""
    on_all_ranks = what == "evaluate"
    command = f'export "$RUN" --out "$RUN/{EXPORTED}" --overwrite'
    if on_all_ranks:
        command = f'evaluate "$RUN/slurm/config.yaml" --checkpoint "$RUN" --out "$RUN/{EVALUATED}"'
    text = batch.render(
        "task.sbatch.j2", cluster if on_all_ranks else single(cluster), f"{batch.job_name(run)[:50]}-{what}", work_dir,
        commit, array, written_by=f"submit --then {what}", folder=run, log=what, command=command,
        about="After the training, when that has ended well.", on_all_ranks=on_all_ranks,
        variables={"RUN": shlex.quote(str(run)) + ('"/$(printf %03d "$SLURM_ARRAY_TASK_ID")"' if array else "")},
    )  # fmt: skip
    return Script(f"{what}.sbatch", text, after=SCRIPT, array=array is not None)


def single(cluster: ClusterConfig) -> ClusterConfig:
    """The same cluster for a job of one process without GPUs."""
    return dataclasses.replace(cluster, nodes=1, ranks_per_node=1, gpus_per_node=0, gpu_type=None, launch="srun")


# ---------------------------------------------------------------------------------------------------------- sweeps


def element(number: int) -> str:
    """Name of the run folder of a sweep's element; the batch script makes the same one of Slurm's number."""
    return f"{number:03d}"


def read_sweep(file: str) -> list[list[str]]:
    """The words of each run of a sweep: a YAML list whose entries are lists of `key=value`, or one such word.

    Raises ConfigError for anything else.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text("utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--sweep {file} cannot be read: {' '.join(str(error).split())}") from None
    entries = [[entry] if isinstance(entry, str) else entry for entry in content] if isinstance(content, list) else []
    if not entries:
        raise ConfigError(f"--sweep {file} is not a list; write one line a run, such as `- [train.lr=1e-3, seed=1]`")
    for number, entry in enumerate(entries):
        for word in entry if isinstance(entry, list) else [entry]:
            if not (isinstance(entry, list) and isinstance(word, str) and "=" in word):
                raise ConfigError(
                    f"--sweep {file}: run {element(number)} holds {word!r}, not a text key=value; put it in quotes"
                )
            if word.startswith((PREFIX, "run_dir=")):
                raise ConfigError(
                    f"--sweep {file}: run {element(number)}: {word} cannot differ between runs; give it in the command"
                )
    return entries


# --------------------------------------------------------------------------------------------------------- checks


def _check(config: Config, machine: ClusterConfig, then: Sequence[str]) -> None:
    validate(config, machine.world_size)
    dataset_paths(config)
    refuse_another_run(config, Path(config.run_dir))
    _check_text(config)
    for name in then:
        if name not in FOLLOWERS:
            raise ConfigError(f"--then {name} is not one of {', '.join(FOLLOWERS)}")
    if "evaluate" in then and config.data.validation is None:
        raise ConfigError("--then evaluate needs data.validation; give a folder of shards")


def _check_text(config: Config) -> None:
    """Refuse what would not come back from the job's file as it is."""
    with tempfile.TemporaryDirectory() as folder:
        file, wanted = Path(folder) / CONFIG, for_job(config)
        try:
            write_text(file, to_yaml(wanted))
            same = load(file) == wanted
        except (ConfigError, UnicodeError):
            same = False
    if not same:
        raise ConfigError("the configuration holds text that YAML cannot keep, such as ${ or bytes that are not UTF-8")
