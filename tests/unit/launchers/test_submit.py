"""Batch scripts: what they say, that bash reads back what was put in, and that no text becomes a command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from batch_scripts import CLUSTERS, GOLDEN, NASTY, assert_golden, calls_of, execute, fakes_in
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from launchers import submit as submission
from launchers.batch import job_name
from launchers.cluster import ClusterConfig, load_cluster
from launchers.submit import follower, for_job, prepare, render
from refusion_train.cli import run as refusion
from refusion_train.config import Config, load, shipped_configs, to_yaml
from refusion_train.errors import ConfigError


@pytest.mark.parametrize("name", CLUSTERS)
def test_scripts_are_as_written_down(name: str) -> None:
    """Look at what has changed, then write it anew: REFUSION_GOLDEN=1 pytest tests/unit/launchers/test_submit.py"""
    script = render(ClusterConfig(**CLUSTERS[name]), Path("/runs/first run"), Path("/home/me"), "0123abcd")
    assert_golden(script, f"job-{name}.sbatch")


@pytest.mark.parametrize("name", CLUSTERS)
def test_bash_accepts_the_scripts(name: str) -> None:
    result = execute(["bash", "-n", str(GOLDEN / f"job-{name}.sbatch")], GOLDEN)
    assert result.returncode == 0, result.stderr


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NASTY, note=NASTY, place=NASTY)
def test_paths_and_environment_arrive_unchanged(
    tmp_path_factory: pytest.TempPathFactory, name: str, note: str, place: str
) -> None:
    assume(not {name, place} & {".", ".."})
    folder = tmp_path_factory.mktemp("job")
    fakes, work, run = fakes_in(folder / "fakes"), folder / place, folder / "runs" / name
    work.mkdir()
    (run / "slurm").mkdir(parents=True)
    machine = ClusterConfig(nodes=2, ranks_per_node=2, gpus_per_node=0, environment={"NOTE": note}, python="python")
    script = folder / "job.sbatch"
    script.write_bytes(render(machine, run, work, "0123").encode("utf-8", "surrogateescape"))
    before = sorted(str(file) for file in folder.rglob("*"))
    result = execute(
        ["bash", str(script)], folder, PATH=f"{fakes}:{os.environ['PATH']}", SLURM_JOB_ID="12", SLURM_JOB_NODELIST="n"
    )
    assert result.returncode == 0, result.stderr
    calls = calls_of(fakes)
    assert len(calls) == 3, "begin, one rank, end"
    begin, rank, end = calls
    assert all(call[1:3] == [os.fsencode(note), os.fsencode(work)] for call in calls)
    assert rank[0] == b"3 1 4 node7" and rank[3:5] == [b"-m", b"refusion_train.cli"]
    assert rank[5:] == [b"train", os.fsencode(run / "slurm" / "config.yaml")]
    assert begin[6] == end[6] == os.fsencode(run)
    new = set(str(file) for file in folder.rglob("*")) - set(before)
    attempt = run / "slurm" / "12-0"
    assert new == {str(attempt), str(attempt / "output.log"), str(fakes / "calls")}, "something else was run or written"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=NASTY)
def test_overrides_arrive_unchanged(tmp_path: Path, text: str) -> None:
    """They travel in the job's file; what YAML cannot keep is refused before."""
    config = load(None, [])
    config.data.cache_dir = text
    try:
        submission._check_text(config)
    except ConfigError:
        assert "${" in text or "\udcff" in text, "only the beginning of a reference, and what is not UTF-8, is refused"
        return
    file = tmp_path / "config.yaml"
    submission.write_text(file, to_yaml(for_job(config)))
    assert load(file).data.cache_dir == text


def test_nothing_of_an_override_is_in_the_script(tiny_config: Config, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_config))
    text = "$(touch /tmp/pwned); 'x' \"y\"\nz"
    plan = prepare(str(file), [f"model.init_from={json.dumps(text)}", "cluster.nodes=1"], "cpu-test")
    assert plan.configs[plan.run].model.init_from == text
    assert "pwned" not in plan.scripts[0].text and plan.cluster.nodes == 1


def test_a_dry_run_touches_nothing(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")  # no sbatch, no git
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_config))
    assert refusion(["submit", str(file), "--cluster", "cpu-test", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n") and out.splitlines()[-1].startswith("sbatch --chdir=")
    assert list(tmp_path.iterdir()) == [file]
    assert refusion(["submit", str(file), "--cluster", "cpu-test"]) == 1
    assert "scontrol is not here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["cluster.nods=3"], "did you mean 'nodes'"),
        (["cluster.time=24:00:00"], "in quotes"),
        (["cluster.time='0:00:30'"], "stop_before"),
        (["cluster.partition=a b"], "partition"),
        (["cluster.sbatch=[mail]"], "--name=value"),
        (["cluster.environment.RANK=0"], "RANK"),
        (["cluster.gpus_per_node=1", "cluster.ranks_per_node=2"], "a GPU of its own"),
        (["cluster.launch=mpi"], "srun, torchrun"),
        (["train.global_batch_size=3"], "train.global_batch_size"),
        (["trian.lr=1"], "did you mean 'train'"),
        (["data.train=null"], "data.train"),
    ],
)
def test_errors_are_found_before_anything_is_written(
    tiny_config: Config, tmp_path: Path, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_config))
    assert refusion(["submit", str(file), *words, "--cluster", "cpu-test"]) == 2
    error = capsys.readouterr().err
    assert part in error and len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("kind", ["export", "evaluate", "sweep"])
def test_scripts_of_sweeps_and_followers_are_as_written_down(name: str, kind: str) -> None:
    """Those of a plain training are in `test_scripts_are_as_written_down`; here all are of an array."""
    where = ClusterConfig(**CLUSTERS[name]), Path("/runs/first run"), Path("/home/me"), "0123abcd", "0-7%2"
    script = render(*where) if kind == "sweep" else follower(kind, *where).text
    assert_golden(script, f"{kind}-{name}.sbatch")
    assert execute(["bash", "-n", f"{kind}-{name}.sbatch"], GOLDEN).returncode == 0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NASTY, array=st.booleans())
def test_followers_get_the_run_folder_unchanged(
    tmp_path_factory: pytest.TempPathFactory, name: str, array: bool
) -> None:
    assume(name not in {".", ".."})
    folder = tmp_path_factory.mktemp("job")
    fakes, run = fakes_in(folder / "fakes"), folder / "runs" / name
    machine = ClusterConfig(nodes=2, ranks_per_node=2, gpus_per_node=0, python="python")
    calls = []
    for what in ("export", "evaluate"):
        script = follower(what, machine, run, folder, "0123", "0-4" if array else None)
        (folder / "job").write_bytes(script.text.encode("utf-8", "surrogateescape"))
        variables = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n", "SLURM_ARRAY_TASK_ID": "3"}
        done = execute(["bash", "job"], folder, PATH=f"{fakes}:{os.environ['PATH']}", **variables)
        assert done.returncode == 0, done.stderr
        [call] = calls_of(fakes)
        (fakes / "calls").unlink()
        calls.append((call[0], call[5:]))
    place = run / "003" if array else run
    (_, exported), (ranks, evaluated) = calls
    assert exported == [os.fsencode(word) for word in ("export", place, "--out", place / "hf", "--overwrite")]
    wanted = ("evaluate", place / "slurm" / "config.yaml", "--checkpoint", place, "--out", place / "evaluation.json")
    assert evaluated == [os.fsencode(word) for word in wanted] and ranks == b"3 1 4 node7"


def test_a_sweep_is_runs_in_folders_of_their_own(
    tiny_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, sweep = tmp_path / "run.yaml", tmp_path / "sweep.yaml"
    file.write_text(to_yaml(tiny_config))
    sweep.write_text("- [train.lr=1e-4, seed=3]\n- train.lr=2e-4\n- ['objective.slot_sizes=[4]']\n")
    plan = prepare(str(file), ["train.steps=9"], "cpu-test", ["evaluate"], str(sweep), 2)
    runs = [Path(tiny_config.run_dir) / name for name in ("000", "001", "002")]
    assert list(plan.configs) == runs and plan.run == Path(tiny_config.run_dir)
    found = list(plan.configs.values())
    assert [(config.train.lr, config.seed, config.train.steps) for config in found] == [
        (1e-4, 3, 9), (2e-4, 7, 9), (1e-2, 7, 9)
    ]  # fmt: skip
    assert [config.run_dir for config in found] == [str(run) for run in runs]
    assert found[2].objective.slot_sizes == [4]
    words = ["submit", str(file), "--cluster", "cpu-test", "--sweep", str(sweep), "--at-most", "2", "--then", "export"]
    assert refusion([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("#SBATCH --array=0-2%2") == 2
    assert "--dependency=aftercorr:JOB --kill-on-invalid-dep=yes" in out.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == [file, sweep]


@pytest.mark.parametrize(
    ("content", "words", "part"),
    [
        ("- [train.lr=1]\n- [trian.lr=1]", [], "did you mean 'train'? (run 001 of"),
        ("- [train.global_batch_size=3]", [], "train.global_batch_size"),
        ("- [seed]", [], "run 000 holds 'seed', not a text key=value"),
        ("- [{train.lr: 1}]", [], "not a text key=value"),
        ("- [cluster.nodes=3]", [], "cluster.nodes=3 cannot differ"),
        ("- [run_dir=x]", [], "run_dir=x cannot differ"),
        ("- [seed=1]\n- [seed=2]", ["run_dir=runs/${seed}"], "runs/2 cannot differ between runs"),
        ("train.lr: 3", [], "is not a list"),
        ("- [a", [], "cannot be read"),
        ("- [seed=1]", ["--at-most", "0"], "--at-most 0"),
        (None, ["--at-most", "2"], "--at-most 2 is for a sweep"),
        (None, ["--sweep", "nothing.yaml"], "nothing.yaml cannot be read"),
        (None, ["--then", "celebrate"], "--then celebrate is not one of export, evaluate"),
        (None, ["--then", "evaluate", "data.validation=null"], "needs data.validation"),
    ],
)
def test_errors_of_sweeps_and_followers_are_found_before(
    tiny_config: Config, tmp_path: Path, content: str | None, words: list[str], part: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file, sweep = tmp_path / "run.yaml", tmp_path / "sweep.yaml"
    file.write_text(to_yaml(tiny_config))
    if content is not None:
        sweep.write_text(content)
        words = ["--sweep", str(sweep), *words]
    assert refusion(["submit", str(file), *words, "--cluster", "cpu-test"]) == 2
    error = capsys.readouterr().err
    assert part in error and len(error.splitlines()) == 1, error
    assert not Path(tiny_config.run_dir).exists()


def test_what_waits_for_a_job_is_cancelled_with_it_if_slurm_refuses(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training is in the queue already when its follower is refused."""
    fakes, file = tmp_path / "bin", tmp_path / "run.yaml"
    fakes.mkdir()
    programs = {
        "scontrol": "exit 0",
        "sbatch": 'case "$*" in *afterok:17*) echo "sbatch: error: no" >&2; exit 1 ;; esac; echo 17',
        "scancel": f'echo "$@" >{tmp_path}/cancelled',
    }
    for name, text in programs.items():
        (fakes / name).write_text(f"#!/bin/sh\n{text}\n")
        (fakes / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{fakes}:/usr/bin:/bin")
    file.write_text(to_yaml(tiny_config))
    assert refusion(["submit", str(file), "--cluster", "cpu-test", "--then", "export"]) == 1
    assert "no (export.sbatch); what was submitted before it is cancelled" in capsys.readouterr().err
    assert (tmp_path / "cancelled").read_text() == "17\n"


def test_missing_data_are_found_before(tiny_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_config))
    assert refusion(["submit", str(file), "data.train=no-such-shards", "--cluster", "cpu-test"]) == 1
    assert "no-such-shards" in capsys.readouterr().err


def test_resume_none_is_for_the_first_stretch_only(tiny_config: Config, tmp_path: Path) -> None:
    tiny_config.checkpoint.resume = "none"
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_config))
    assert for_job(prepare(str(file), [], "cpu-test").configs[Path(tiny_config.run_dir)]).checkpoint.resume == "auto"
    Path(tiny_config.run_dir, "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds a run already \(checkpoints\)"):
        prepare(str(file), [], "cpu-test")


@pytest.mark.parametrize("name", sorted(shipped_configs("clusters")))
def test_shipped_clusters_are_valid(name: str) -> None:
    machine = load_cluster(name)
    assert machine.world_size == machine.nodes * machine.ranks_per_node
    assert execute(["bash", "-n", "-c", render(machine, Path("/r"), Path("/w"), "0")], GOLDEN).returncode == 0


def test_names_of_jobs() -> None:
    assert job_name(Path("/a/b c;d")) == "b-c-d"
    assert job_name(Path("/a/\n$")) == "refusion"
