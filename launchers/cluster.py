"""Cluster files: what a batch system must be told about the machine, apart from what is trained.

One YAML file a cluster, checked against `ClusterConfig` by the machinery of run configurations: an unknown key is an
error that names the nearest right one. Shipped ones lie in configs/clusters and are found by name (`dgx`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from refusion_train.config import build, find_config
from refusion_train.errors import ConfigError

LAUNCH = ("srun", "torchrun")
_TIME = re.compile(r"(\d+-)?\d{1,2}:\d{2}:\d{2}")
# What may stand in an option of Slurm: no blank, quote, backslash or control character.
_WORD = re.compile(r"[A-Za-z0-9_.,:;@/+=*|&()\[\]~!<>{}$%^?-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class ClusterConfig:
    """How a job is asked for and started. Null leaves the choice to Slurm."""

    nodes: int = 1
    # Processes on each node: one per GPU.
    ranks_per_node: int = 8
    # GPUs asked for on each node; null: as many as ranks; 0: none (CPUs only).
    gpus_per_node: int | None = None
    # The kind of GPU, as Slurm calls it there (--gpus-per-node=KIND:N).
    gpu_type: str | None = None
    cpus_per_rank: int | None = None
    # Memory of each node that the job takes, such as 64G; 0: all.
    memory: str | None = None
    # Limit of one stretch of the job, "[DAYS-]HH:MM:SS" in quotes. A run that needs longer is put back into the queue.
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    # Seconds before the time limit at which the ranks are told to save and stop: more than a step and a save take.
    stop_before: int = 300
    # The job stops for good when so many stretches in a row have ended without a newer checkpoint.
    max_stalls: int = 3
    # srun: one task of Slurm per rank; torchrun: one task per node, which starts the ranks.
    launch: str = "srun"
    # Address of the first node as the others reach it; null: its name.
    master_addr: str | None = None
    # Interpreter that has the package; null: that of `refusion submit`, or `python` of the venv or the container.
    python: str | None = None
    # Modules to load, a folder with bin/activate, further lines of bash before the ranks start.
    modules: list[str] = field(default_factory=list)
    venv: str | None = None
    setup: list[str] = field(default_factory=list)
    # Environment of the ranks.
    environment: dict[str, str] = field(default_factory=dict)
    # Image for srun's --container-image (the plugin pyxis) and what it sees of the host, "/data:/data".
    container_image: str | None = None
    container_mounts: list[str] = field(default_factory=list)
    # Further options of sbatch (the job) and srun (the ranks), such as --mail-type=END.
    sbatch: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def gpus(self) -> int:
        """GPUs of each node."""
        return self.ranks_per_node if self.gpus_per_node is None else self.gpus_per_node


def load_cluster(path: str | os.PathLike[str], overrides: list[str] | None = None) -> ClusterConfig:
    """The cluster that a file, or the name of a shipped one, describes, changed by `key=value` words.

    Raises ConfigError, which names the key, for what is not known or cannot be.
    """
    cluster = build(ClusterConfig, find_config(path, "clusters", "cluster"), overrides or [])
    _check(cluster)
    return cluster


def _check(cluster: ClusterConfig) -> None:
    for key in ("nodes", "ranks_per_node", "stop_before", "max_stalls"):
        _require(getattr(cluster, key) > 0, f"{key}={getattr(cluster, key)} must be greater than 0")
    _require(cluster.cpus_per_rank is None or cluster.cpus_per_rank > 0, f"cpus_per_rank={cluster.cpus_per_rank} <= 0")
    _require(
        cluster.gpus == 0 or cluster.gpus >= cluster.ranks_per_node,
        f"gpus_per_node={cluster.gpus} is less than ranks_per_node={cluster.ranks_per_node}; every rank needs a GPU "
        "of its own (0: train on CPUs)",
    )
    _require(
        _TIME.fullmatch(cluster.time) is not None,
        f"time={cluster.time} is not [DAYS-]HH:MM:SS; write it in quotes, for example time: '24:00:00'",
    )
    _require(
        seconds(cluster.time) > cluster.stop_before,
        f"time={cluster.time} leaves nothing before stop_before={cluster.stop_before} seconds; raise the one or lower "
        "the other",
    )
    _require(cluster.launch in LAUNCH, f"launch={cluster.launch} is not one of {', '.join(LAUNCH)}")
    for key in ("gpu_type", "memory", "partition", "account", "qos", "constraint", "reservation"):
        value = getattr(cluster, key)
        _require(
            value is None or _WORD.fullmatch(value) is not None,
            f"{key}={value!r} cannot be an option of Slurm; leave out blanks, quotes and backslashes",
        )
    for key in ("sbatch", "srun"):
        for option in getattr(cluster, key):
            _require(
                option.startswith("-") and _WORD.fullmatch(option) is not None,
                f"{key}: {option!r} is not an option; write it as --name=value, without blanks or quotes",
            )
    for name in cluster.environment:
        _require(_NAME.fullmatch(name) is not None, f"environment: {name!r} is not the name of a variable")
        _require(name not in _OURS, f"environment: {name} is set for each rank; leave it out (see also master_addr)")
    for key, value in _texts(cluster):
        _require("\0" not in value, f"{key} holds a zero byte")


def _texts(cluster: ClusterConfig) -> list[tuple[str, str]]:
    """Every text of the file that comes to stand in a script."""
    found = [(key, value) for key in vars(cluster) if isinstance(value := getattr(cluster, key), str)]
    for key in ("modules", "setup", "container_mounts"):
        found += [(key, entry) for entry in getattr(cluster, key)]
    return found + [(f"environment.{name}", value) for name, value in cluster.environment.items()]


def seconds(time: str) -> int:
    """Seconds of "[DAYS-]HH:MM:SS"."""
    days, _, clock = time.rpartition("-")
    hours, minutes, rest = (int(part) for part in clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"cluster: {message}")
