"""One Slurm cluster for all tests of this folder; skipped where Slurm is not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Helpers that start processes and read the reports of runs.
sys.path += [str(ROOT / "tests" / "distributed"), str(ROOT / "tests" / "integration")]

from jobs import Command  # noqa: E402
from local_cluster import LocalCluster, missing  # noqa: E402


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A running cluster of four nodes; skips where Slurm is not installed."""
    lacking = missing()
    if lacking:
        pytest.skip(f"no Slurm here ({', '.join(lacking)} missing): install slurmctld, slurmd, slurm-client and munge")
    made = LocalCluster(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


@pytest.fixture
def refusion(cluster: LocalCluster, tmp_path: Path) -> Iterator[Command]:
    """The command on the cluster; jobs that a test leaves are cancelled."""
    os.chmod(tmp_path, 0o755)
    yield Command(cluster, tmp_path)
    jobs = cluster.run("squeue", "-h", "-o", "%A").split()
    if jobs:
        cluster.run("scancel", *jobs)
        cluster.wait_for(lambda: not cluster.run("squeue", "-h"), 40, "the end of all jobs")
