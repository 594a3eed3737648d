"""Training as jobs of a real Slurm: whatever ends a stretch, the losses are those of an undisturbed run."""

from __future__ import annotations

import copy
import shutil
import sys
import time
from pathlib import Path

import pytest
from groups import losses, rows, train_group
from jobs import Command, Submitted
from local_cluster import LocalCluster

from refusion_train.config import Config

STEPS = 200


@pytest.fixture(scope="session")
def undisturbed(_tiny_template: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """200 steps of one learning rate on 2 ranks, not by Slurm. Read only."""
    config = copy.deepcopy(_tiny_template)
    config.run_dir = str(tmp_path_factory.mktemp("undisturbed") / "run")
    config.train.steps, config.train.schedule, config.checkpoint.interval = STEPS, "constant", 70
    train_group(config, 2)
    return config


def assert_same(config: Config, undisturbed: Config) -> None:
    assert losses(config) == pytest.approx(losses(undisturbed), abs=1e-6)
    assert rows(config)[-1] == pytest.approx(rows(undisturbed)[-1], abs=1e-6)


@pytest.mark.slurm
def test_two_nodes_of_two_ranks(refusion: Command, undisturbed: Config, again: Config) -> None:
    again.train.steps = 12
    job = refusion.submit(again, ranks_per_node=2)
    job.wait_for_state("COMPLETED")
    assert losses(again) == pytest.approx(losses(undisturbed)[:12], abs=1e-5)  # another split of the rows
    assert job.ends == ["finished"] and job.begun() == 1
    begun, ended = job.events
    assert begun["nodes"] == "node[1-2]" and begun["step"] == 0
    assert (ended["step"], ended["code"], ended["next"]) == (12, 0, "none")
    told = refusion("status", again.run_dir)
    assert told.returncode == 0 and "12 of 12" in told.stdout and "COMPLETED" in told.stdout
    assert "finished (all steps are done)" in told.stdout


@pytest.mark.slurm
def test_a_run_lives_through_all_that_ends_a_job(
    refusion: Command, cluster: LocalCluster, undisturbed: Config, again: Config
) -> None:
    """USR1 as before the time limit, a preemption, a requeue in the middle of a save, the loss of a node."""
    slow = {"PYTHONPATH": str(Path(__file__).parent / "slow_saves")}
    job = refusion.submit(again, environment=slow)
    _reach(job, 20)
    cluster.run("scancel", "-s", "USR1", job.number)
    job.wait_for(lambda: job.ends == ["stopped"], "the stop after USR1")
    saved = job.events[-1]["step"]
    assert saved >= 20 and job.events[-1]["next"] == "again"

    _reach(job, saved + 20)
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"
    )
    job.wait_for(lambda: job.ends[1:] == ["interrupted"], "the stop for a preemption")
    assert job.events[-1]["step"] >= saved + 20, "what was preempted has not saved"
    job.wait_for(lambda: cluster.state(urgent) == "COMPLETED", "the urgent job")

    job.wait_for(lambda: job.begun() == 3, "the third stretch")
    job.wait_for(lambda: list(Path(again.run_dir, "checkpoints").glob("*.tmp")), "a save")
    cluster.run("scontrol", "requeue", job.number)
    job.wait_for(lambda: job.ends[2:] == ["interrupted"], "the stop for a requeue")

    _reach(job, job.events[-1]["step"] + 5)
    node = job.events[-1]["nodes"].replace("[", "").split("-")[0].split(",")[0]
    cluster.kill_node(node)
    job.wait_for(lambda: job.begun() == 5, "the stretch after the node's loss")
    cluster.start_node(node)
    assert job.ends[3:] == ["lost"]
    job.wait_for_state("COMPLETED")
    assert job.ends[4:] == ["finished"]
    assert_same(again, undisturbed)
    logs = sorted(Path(again.run_dir, "slurm").glob(f"{job.number}-*/output.log"))
    assert len(logs) == 5 and all("step " in log.read_text() for log in logs)


def _reach(job: Submitted, step: int) -> None:
    job.wait_for(lambda: job.step >= step and len(job.ends) < job.begun(), f"step {step}")


def test_a_job_that_gets_nowhere_is_stopped(refusion: Command, tiny_config: Config, tmp_path: Path) -> None:
    """The interpreter of the ranks breaks; it works for what notes the attempts."""
    broken = tmp_path / "python"
    broken.write_text(f'#!/bin/sh\ncase "$*" in *cli*) echo broken >&2; exit 1 ;; esac\nexec {sys.executable} "$@"\n')
    broken.chmod(0o755)
    job = refusion.submit(tiny_config, python=str(broken))
    job.wait_for_state("FAILED")
    assert job.ends == ["failed"] * 3
    assert [event["next"] for event in job.events if event["event"] == "end"] == ["again", "again", "none"]
    assert "3 attempts in a row have ended at step 0" in job.events[-1]["reason"]
    assert job.begun() == 3 and not (job.run / "slurm" / "holder").exists()


def test_a_wrong_configuration_is_not_queued(refusion: Command, cluster: LocalCluster, tiny_config: Config) -> None:
    tiny_config.train.global_batch_size, tiny_config.train.micro_batch_size = 3, 1
    before = cluster.run("squeue", "-h", "-t", "all", "-o", "%A")
    result = refusion("submit", str(refusion.write(tiny_config)), "--cluster", str(refusion.machine()))
    assert result.returncode == 2 and "train.global_batch_size=3" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert cluster.run("squeue", "-h", "-t", "all", "-o", "%A") == before
    assert not Path(tiny_config.run_dir).exists()


def test_one_job_has_a_run_folder(
    refusion: Command, cluster: LocalCluster, tiny_config: Config, tmp_path: Path
) -> None:
    """A second submission is refused; a copy of the script that is submitted by hand stops with a clear line."""
    sleeper = tmp_path / "python"
    sleeper.write_text(f'#!/bin/sh\ncase "$*" in *cli*) exec sleep 600 ;; esac\nexec {sys.executable} "$@"\n')
    sleeper.chmod(0o755)
    job = refusion.submit(tiny_config, python=str(sleeper))
    job.wait_for(lambda: job.begun() == 1, "the start")
    second = refusion("submit", str(refusion.write(tiny_config)), "--cluster", str(refusion.machine()))
    assert second.returncode == 2 and f"has a job already: {job.number} (RUNNING)" in second.stderr
    by_hand = tmp_path / "copy.sbatch"
    shutil.copy(job.run / "slurm" / "job.sbatch", by_hand)
    other = cluster.run("sbatch", "--parsable", f"--chdir={job.run}/slurm", str(by_hand))
    job.wait_for(lambda: cluster.state(other) == "FAILED", "the end of the second job")
    assert f"is in use by job {job.number} (RUNNING)" in (job.run / "slurm" / f"{other}.log").read_text()
    cluster.run("scancel", job.number)
    job.wait_for_state("CANCELLED")
    assert job.ends == ["interrupted"]


def test_slurm_is_asked_whether_it_can_ever_run(refusion: Command, tiny_config: Config) -> None:
    words = ["submit", str(refusion.write(tiny_config)), "--cluster", str(refusion.machine()), "--test-only"]
    assert "to start at" in refusion(*words).stdout
    impossible = refusion(*words, "cluster.memory=9000G")
    assert impossible.returncode == 1 and len(impossible.stderr.splitlines()) == 1
    assert not Path(tiny_config.run_dir).exists()


def test_no_answer_of_the_controller_is_one_line(
    refusion: Command, cluster: LocalCluster, tiny_config: Config, tiny_tokenizer: Path
) -> None:
    folder = Path(tiny_config.run_dir) / "slurm"
    folder.mkdir(parents=True)
    (folder / "submitted.json").write_text('{"job": "1", "steps": 5}')
    sweep = Path(tiny_config.run_dir + "s")
    for place in (sweep, sweep / "000", sweep / "001"):
        (place / "slurm").mkdir(parents=True)
        (place / "slurm" / "submitted.json").write_text('{"job": "1_0", "then": {"export": "2_0"}, "sweep": 2}')
    (corpus := Path(tiny_config.run_dir).with_name("a.txt")).write_text("text")
    parts = [str(corpus), "--tokenizer", str(tiny_tokenizer), "--out", str(corpus) + "s", "--parts", "1"]
    cluster.silence_controller()
    try:
        for words in (
            ["submit", str(refusion.write(tiny_config)), "--cluster", str(refusion.machine())],
            ["status", tiny_config.run_dir],
            ["status", str(sweep)],
            ["submit-data", *parts, "--cluster", str(refusion.machine())],
        ):
            began = time.monotonic()
            result = refusion(*words)
            assert time.monotonic() - began < 15 + 10, "10 s are for the start of the command on a busy machine"
            assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
            assert "controller does not answer" in result.stderr
    finally:
        cluster.wake_controller()
