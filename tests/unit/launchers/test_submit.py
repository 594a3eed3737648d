"""Batch scripts: what they say, that bash reads back what was put in, and that no text becomes a command."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from launchers import submit as submission
from launchers.cluster import ClusterConfig, load_cluster
from launchers.submit import for_job, job_name, prepare, render
from refusion_train.cli import run as refusion
from refusion_train.config import Config, load, shipped_configs, to_yaml
from refusion_train.errors import ConfigError

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
CLUSTERS: dict[str, dict[str, Any]] = {
    "plain": {"nodes": 2, "ranks_per_node": 2, "gpus_per_node": 0, "time": "01:00:00", "python": "/opt/python"},
    "all": {
        "nodes": 16, "ranks_per_node": 8, "gpu_type": "h100", "cpus_per_rank": 12, "memory": "0", "time": "2-00:00:00",
        "partition": "train", "account": "lab", "qos": "high", "constraint": "ib&h100", "reservation": "week",
        "exclusive": True, "stop_before": 600, "max_stalls": 5, "modules": ["cuda/12.8"], "venv": "/shared/my env",
        "setup": ["ulimit -l unlimited"], "environment": {"NCCL_DEBUG": "WARN", "NOTE": "it's"},
        "sbatch": ["--mail-type=END"], "srun": ["--cpu-bind=none"], "master_addr": "10.0.0.1",
    },
    "container": {
        "nodes": 4, "launch": "torchrun", "container_image": "/images/train.sqsh",
        "container_mounts": ["/data:/data", "/runs"],
    },
}  # fmt: skip


def _run(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, timeout=30, check=False)


@pytest.mark.parametrize("name", CLUSTERS)
def test_scripts_are_as_written_down(name: str) -> None:
    """Look at what has changed, then write it anew: REFUSION_GOLDEN=1 pytest tests/unit/launchers/test_submit.py"""
    script = render(ClusterConfig(**CLUSTERS[name]), Path("/runs/first run"), Path("/home/me"), "0123abcd")
    file = GOLDEN / f"job-{name}.sbatch"
    if os.environ.get("REFUSION_GOLDEN"):
        file.write_text(script)
    assert script == file.read_text()


@pytest.mark.parametrize("name", CLUSTERS)
def test_bash_accepts_the_scripts(name: str) -> None:
    result = _run(["bash", "-n", str(GOLDEN / f"job-{name}.sbatch")], GOLDEN)
    assert result.returncode == 0, result.stderr


# Stands for Slurm and for the ranks' interpreter: leaves its arguments and its environment, and what it was given.
_FAKES = {
    "srun": """#!/bin/sh
        while [ "${1#--}" != "$1" ]; do shift; done
        SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 exec "$@"
    """,
    "scontrol": "#!/bin/sh\necho node7\n",
    "squeue": "#!/bin/sh\n",
}


def _fakes(folder: Path) -> Path:
    """A folder for PATH, and in it `python`, which writes down how it was called."""
    folder.mkdir()
    recorder = folder / "python"
    recorder.write_text(
        '#!/bin/sh\nplace="${RANK:--} ${LOCAL_RANK:--} ${WORLD_SIZE:--} $MASTER_ADDR"\n'
        f'printf \'%s\\0\' "$#" "$place" "$NOTE" "$PWD" "$@" >>\'{folder}/calls\'\n'
    )
    for name, text in _FAKES.items():
        (folder / name).write_text(text)
    for file in folder.iterdir():
        file.chmod(0o755)
    return folder


_PIECES = [
    "$(touch x)", "`touch x`", "; touch x;", "\n touch x\n", "&touch x&", "|touch x", "$HOME", "${PATH}", "'", '"',
    "\\", "\n", " ", "\t", "*", "?", "~", "#", "%j", "!", "<", ">x", "{a,b}", "[a]", "(", ")", "=", "-", "^",
    "\x80", "\udcff",
]  # fmt: skip
NASTY = st.lists(
    st.one_of(st.sampled_from(_PIECES), st.sampled_from(_PIECES), st.text(max_size=3)), min_size=1, max_size=6
).map(lambda pieces: "".join(pieces).replace("\0", "").replace("/", "") or "x")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NASTY, note=NASTY, place=NASTY)
def test_paths_and_environment_arrive_unchanged(
    tmp_path_factory: pytest.TempPathFactory, name: str, note: str, place: str
) -> None:
    assume(not {name, place} & {".", ".."})
    folder = tmp_path_factory.mktemp("job")
    fakes, work, run = _fakes(folder / "fakes"), folder / place, folder / "runs" / name
    work.mkdir()
    (run / "slurm").mkdir(parents=True)
    machine = ClusterConfig(nodes=2, ranks_per_node=2, gpus_per_node=0, environment={"NOTE": note}, python="python")
    script = folder / "job.sbatch"
    script.write_bytes(render(machine, run, work, "0123").encode("utf-8", "surrogateescape"))
    before = sorted(str(file) for file in folder.rglob("*"))
    result = _run(
        ["bash", str(script)], folder, PATH=f"{fakes}:{os.environ['PATH']}", SLURM_JOB_ID="12", SLURM_JOB_NODELIST="n"
    )
    assert result.returncode == 0, result.stderr
    told, calls = (fakes / "calls").read_bytes().split(b"\0")[:-1], []
    while told:
        size = 4 + int(told[0])
        calls.append(told[1:size])
        told = told[size:]
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
    submission._write(file, to_yaml(for_job(config)))
    assert load(file).data.cache_dir == text


def test_nothing_of_an_override_is_in_the_script(tiny_config: Config, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_config))
    text = "$(touch /tmp/pwned); 'x' \"y\"\nz"
    plan = prepare(str(file), [f"model.init_from={json.dumps(text)}", "cluster.nodes=1"], "cpu-test")
    assert plan.config.model.init_from == text
    assert "pwned" not in plan.script and plan.cluster.nodes == 1


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


def test_missing_data_are_found_before(tiny_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_config))
    assert refusion(["submit", str(file), "data.train=no-such-shards", "--cluster", "cpu-test"]) == 1
    assert "no-such-shards" in capsys.readouterr().err


def test_resume_none_is_for_the_first_stretch_only(tiny_config: Config, tmp_path: Path) -> None:
    tiny_config.checkpoint.resume = "none"
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(tiny_config))
    assert for_job(prepare(str(file), [], "cpu-test").config).checkpoint.resume == "auto"
    Path(tiny_config.run_dir, "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds a run already \(checkpoints\)"):
        prepare(str(file), [], "cpu-test")


@pytest.mark.parametrize("name", sorted(shipped_configs("clusters")))
def test_shipped_clusters_are_valid(name: str) -> None:
    machine = load_cluster(name)
    assert machine.world_size == machine.nodes * machine.ranks_per_node
    assert _run(["bash", "-n", "-c", render(machine, Path("/r"), Path("/w"), "0")], GOLDEN).returncode == 0


def test_names_of_jobs() -> None:
    assert job_name(Path("/a/b c;d")) == "b-c-d"
    assert job_name(Path("/a/\n$")) == "refusion"
