"""Jobs on a cluster of the tests, submitted as a user does, and what can be seen of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_cluster import LocalCluster

from launchers import attempt
from refusion_train.config import Config, to_yaml

PATIENCE_S = 180.0  # for one stretch of a job to get somewhere; other things may run on the machine


@dataclass
class Submitted:
    """A job that `refusion submit` has made."""

    cluster: LocalCluster
    config: Config
    number: str

    @property
    def run(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def events(self) -> list[dict[str, Any]]:
        return attempt.read(self.run)

    @property
    def ends(self) -> list[str]:
        """Why each stretch has ended, in order."""
        return [event["why"] for event in self.events if event["event"] == "end"]

    @property
    def step(self) -> int:
        """The last step that the run has reported."""
        file = self.run / "metrics.jsonl"
        rows = file.read_text().splitlines() if file.exists() else []
        return max((json.loads(row)["step"] for row in rows if row.endswith("}")), default=0)

    def begun(self) -> int:
        return sum(event["event"] == "begin" for event in self.events)

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
        """Wait for something that the job brings about; shows its logs if it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds:.0f} s for {what}\n{self.logs()}\n{self.cluster.last_words()}")
            time.sleep(0.2)

    def wait_for_state(self, state: str, seconds: float = PATIENCE_S) -> None:
        self.wait_for(lambda: self.cluster.state(self.number) == state, f"job {self.number} to be {state}", seconds)

    def logs(self) -> str:
        files = [self.run / attempt.ATTEMPTS, *sorted((self.run / "slurm").glob("*.log"))]
        files += sorted((self.run / "slurm").glob("*/*"))
        parts = [
            f"--- {f}\n" + "\n".join(f.read_text(errors="replace").splitlines()[-15:]) for f in files if f.exists()
        ]
        return "\n".join(parts)


@dataclass
class Command:
    """`refusion` in a process of its own that has this cluster."""

    cluster: LocalCluster
    folder: Path

    def __call__(self, *words: str, timeout: float = 90.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "refusion_train.cli", *words], cwd=self.folder, env=self.cluster.environment,
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def submit(self, config: Config, *words: str, **machine: Any) -> Submitted:
        """Submit a run on two nodes of one rank each, unless `machine` says otherwise."""
        result = self("submit", str(self.write(config)), *words, "--cluster", str(self.machine(**machine)))
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.startswith("job "), result.stdout
        return Submitted(self.cluster, config, result.stdout.split()[1].rstrip(":"))

    def write(self, config: Config) -> Path:
        file = self.folder / "run.yaml"
        file.write_text(to_yaml(config))
        return file

    def machine(self, **changes: Any) -> Path:
        """A cluster file."""
        content = {
            "nodes": 2, "ranks_per_node": 1, "gpus_per_node": 0, "time": "00:10:00", "stop_before": 60,
            **({} if self.cluster.root else {"master_addr": "127.0.0.1"}), **changes,
        }  # fmt: skip
        content["environment"] = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **changes.get("environment", {})}
        file = self.folder / "cluster.yaml"
        file.write_text(json.dumps(content))  # which is YAML
        return file
