"""Jobs around training on a real Slurm: tokenizing by an array, what follows a training, sweeps."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
from groups import losses, validation_rows
from jobs import Command, Submitted
from local_cluster import LocalCluster
from tiny_texts import tiny_texts

from data_tools.build_shards import build_shards
from data_tools.merge import merge
from launchers import status
from refusion_train.config import Config
from refusion_train.data.shard_index import Index


@pytest.mark.slurm
def test_an_array_of_four_parts_makes_the_dataset_of_one_process(
    refusion: Command, cluster: LocalCluster, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """One of the parts is killed (kill -9) the first time, and its job runs again."""
    corpus, out = tmp_path / "corpus", tmp_path / "my shards"
    corpus.mkdir()
    for number in range(6):
        (corpus / f"{number}.txt").write_text("".join(tiny_texts(20 + number, seed=number)) or "x")
    python, killed = tmp_path / "python", tmp_path / "killed"
    python.write_text(
        f'#!/bin/bash\ncase "$*" in *"--part 2/4"*) [ -e {killed} ] || {{ touch {killed}; kill -9 $$; }} ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    words = [str(corpus), "--tokenizer", str(tiny_tokenizer), "--out", str(out), "--parts", "4", "--at-most", "3"]
    told = refusion("submit-data", *words, "--cluster", str(refusion.machine(python=str(python))))
    assert told.returncode == 0, told.stderr
    array, joined = (line.split()[1].rstrip(":") for line in told.stdout.splitlines()[:2])
    again = refusion("submit-data", *words, "--cluster", str(refusion.machine()))
    assert again.returncode == 2 and f"has a job already: {array}_" in again.stderr

    def ended() -> bool:
        return cluster.state(joined) not in ("PENDING", "RUNNING", "COMPLETING")

    cluster.wait_for(ended, 180, "the end of the merge")
    logs = "\n".join(file.read_text() for file in sorted(Path(f"{out}.parts/slurm").glob("*.log")))
    assert cluster.state(joined) == "COMPLETED", logs
    assert killed.exists() and "Killed" in logs
    folders = [str(tmp_path / "one" / str(number)) for number in range(1, 5)]
    for number, folder in enumerate(folders, start=1):
        build_shards([str(corpus)], str(tiny_tokenizer), folder, part=f"{number}/4", workers=1)
    merge(folders, str(tmp_path / "merged"))
    assert Index.read(out / "train").fingerprint == Index.read(tmp_path / "merged" / "train").fingerprint
    third = refusion("submit-data", *words, "--cluster", str(refusion.machine()))
    assert third.returncode == 2 and "exists already" in third.stderr


@pytest.mark.slurm
def test_export_and_evaluation_wait_for_the_end_of_a_training_that_is_put_back(
    refusion: Command, cluster: LocalCluster, tiny_config: Config
) -> None:
    tiny_config.train.steps, tiny_config.train.validation_interval = 100, 1000
    job = refusion.submit(tiny_config, "--then", "export", "--then", "evaluate")
    then = json.loads((job.run / "slurm" / "submitted.json").read_text())["then"]
    assert list(then) == ["export", "evaluate"]
    job.wait_for(lambda: job.step >= 10, "step 10")
    cluster.run("scancel", "-s", "USR1", job.number)
    job.wait_for(lambda: job.ends == ["stopped"], "the stop after USR1")
    job.wait_for(lambda: job.begun() == 2, "the second stretch")
    assert {cluster.state(number) for number in then.values()} == {"PENDING"}, "the stop was taken for the end"
    assert "export (job " in refusion("status", str(job.run)).stdout
    job.wait_for_state("COMPLETED")
    assert job.ends == ["stopped", "finished"]
    for number in then.values():
        job.wait_for(lambda number=number: cluster.state(number) == "COMPLETED", f"job {number}")
    assert (job.run / "hf" / "config.json").exists()
    evaluated = json.loads((job.run / "evaluation.json").read_text())
    row = validation_rows(tiny_config)[-1]
    assert row.pop("step") == 100 and evaluated == pytest.approx(row, abs=1e-5)


@pytest.mark.slurm
def test_a_sweep_is_an_array_of_runs(
    refusion: Command, cluster: LocalCluster, tiny_config: Config, tmp_path: Path
) -> None:
    """Two runs; one is stopped and put back alone. What follows waits for its own run."""
    tiny_config.train.steps = 60
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("- [train.steps=5, train.lr=1e-3]\n- [train.lr=3e-3]\n")
    job = refusion.submit(tiny_config, "--sweep", str(sweep), "--then", "export", nodes=1)
    runs = [_element(job, number) for number in (0, 1)]
    runs[1].wait_for(lambda: runs[1].step >= 10, "step 10 of the second run")
    second = refusion("submit", str(refusion.write(runs[1].config)), "--cluster", str(refusion.machine()))
    assert second.returncode == 2 and f"has a job already: {job.number}_" in second.stderr
    cluster.run("scancel", "-s", "USR1", f"{job.number}_1")
    for run in runs:
        run.wait_for(lambda run=run: run.ends[-1:] == ["finished"], f"the end of {run.run}")
    assert (runs[0].ends, runs[1].ends) == (["finished"], ["stopped", "finished"])
    assert [len(losses(run.config)) for run in runs] == [5, 60]
    assert [event["job"] for event in runs[1].events] == [f"{job.number}_1"] * 4
    for run in runs:
        run.wait_for(lambda run=run: (run.run / "hf" / "config.json").exists(), f"the export of {run.run}")
    told = refusion("status", str(job.run))
    assert told.returncode == 0 and "5 of 5" in told.stdout and "60 of 60" in told.stdout
    assert [one.run.name for one in status.standings([job.run])[0]] == ["000", "001"]


def _element(job: Submitted, number: int) -> Submitted:
    config = copy.deepcopy(job.config)
    config.run_dir = str(job.run / f"{number:03d}")
    return Submitted(job.cluster, config, f"{job.number}_{number}")
