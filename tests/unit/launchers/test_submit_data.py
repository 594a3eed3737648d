"""`refusion submit-data`: the scripts, which bash runs here without Slurm, and what is refused before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from batch_scripts import CLUSTERS, GOLDEN, NASTY, assert_golden, calls_of, execute, fakes_in
from hypothesis import HealthCheck, given, settings
from tiny_texts import tiny_texts

from data_tools.build_shards import build_shards
from data_tools.merge import merge
from launchers import submit_data
from launchers.batch import Script
from launchers.cluster import ClusterConfig
from launchers.submit import single
from launchers.submit_data import MERGE, PARTS, prepare
from refusion_train.cli import run as refusion
from refusion_train.data.shard_index import Index


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Seven files of documents, of different sizes, in a folder with a blank in its name."""
    folder = tmp_path / "my corpus"
    folder.mkdir()
    for number in range(7):
        texts = [text for text in tiny_texts(10 + 7 * number, seed=number) if text]
        (folder / f"{number}.jsonl").write_text("".join(f'{{"text": "{text.encode().hex()}"}}\n' for text in texts))
    return folder


@pytest.mark.parametrize("name", CLUSTERS)
def test_scripts_are_as_written_down(name: str) -> None:
    machine, out = single(ClusterConfig(**CLUSTERS[name])), Path("/data/my shards")
    words = ["corpus/*.jsonl", "--tokenizer", "tok", "--text-field", "it's"]
    part = submit_data._part(words, machine, out, 16, [])
    texts = {
        "parts": submit_data._script(PARTS, machine, out, "0123abcd", part, "16 parts of it.", "1-16%4").text,
        "merge": submit_data._script(MERGE, machine, out, "0123abcd", submit_data._merge(out, 16, []), "Joins.").text,
    }
    for kind, text in texts.items():
        golden = f"data-{kind}-{name}.sbatch"
        assert_golden(text.replace(f"cd {Path.cwd()} ", "cd /home/me "), golden)
        assert execute(["bash", "-n", golden], GOLDEN).returncode == 0


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(word=NASTY, note=NASTY)
def test_words_arrive_unchanged(tmp_path_factory: pytest.TempPathFactory, word: str, note: str) -> None:
    folder = tmp_path_factory.mktemp("job")
    fakes, out = fakes_in(folder / "fakes"), folder / "a 'shards"
    machine = ClusterConfig(gpus_per_node=0, ranks_per_node=1, environment={"NOTE": note}, python="python")
    command = submit_data._part(["in", "--text-field", word], machine, out, 4, [])
    script = folder / "parts.sbatch"
    text = submit_data._script(PARTS, machine, out, "0", command, "", "1-4").text
    script.write_bytes(text.encode("utf-8", "surrogateescape"))
    before = sorted(folder.rglob("*"))
    variables = {"PATH": f"{fakes}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert execute(["bash", str(script)], folder, **variables).returncode == 0
    [call] = calls_of(fakes)
    assert call[1] == os.fsencode(note)
    wanted = ["-m", "refusion_train.cli", "data", "shards", "--part", "3/4", "--out", f"{out}.parts/3", "in",
              "--text-field", word]  # fmt: skip
    assert call[3:] == [os.fsencode(part) for part in wanted]
    assert sorted(folder.rglob("*")) == sorted([*before, fakes / "calls"]), "something else was run or written"


def test_a_part_that_is_killed_is_put_back_alone(tmp_path: Path) -> None:
    """Of an array the number of a job that is an element may be that of the whole array."""
    fakes, machine = fakes_in(tmp_path / "fakes"), ClusterConfig(gpus_per_node=0, ranks_per_node=1, python="python")
    (fakes / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    (fakes / "scontrol").write_text(f"#!/bin/sh\necho \"$@\" >>'{tmp_path}/asked'\n")
    variables = {"PATH": f"{fakes}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    element = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    for array, more in (("1-3", element), (None, {})):
        script = submit_data._script(PARTS, machine, tmp_path / "out", "0", "data", "", array).text
        assert execute(["bash", "-c", script], tmp_path, **variables, **more).returncode == 137
        last = execute(["bash", "-c", script], tmp_path, **variables, **more, SLURM_RESTART_COUNT="2")
        assert last.returncode == 137, "max_stalls times are enough"
    assert (tmp_path / "asked").read_text() == "requeue 12_3\nrequeue 12\n"


def _execute(script: Script, folder: Path, element: int) -> None:
    variables = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": str(element), "PYTHONPATH": os.getcwd()}
    done = execute(["bash", "-c", script.text], folder, **variables)
    assert done.returncode == 0, done.stderr


def test_four_parts_and_their_merge_make_the_dataset_of_one_process(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """The scripts' commands, the parts in another order and one of them twice, against the same within one process."""
    out, words = tmp_path / "by scripts", [str(corpus), "--tokenizer", str(tiny_tokenizer), "--val-fraction", "0.2"]
    plan = prepare(words, str(out), 4, "cpu-test")
    parts, joined = plan.scripts
    assert (parts.name, joined.name, joined.after) == (PARTS, MERGE, PARTS)
    for element in (3, 1, 4, 2, 3):
        _execute(parts, tmp_path, element)
    _execute(joined, tmp_path, 0)
    folders = [tmp_path / "one" / str(number) for number in range(1, 5)]
    for number, folder in enumerate(folders, start=1):
        build_shards([str(corpus)], str(tiny_tokenizer), str(folder), val_fraction=0.2, part=f"{number}/4", workers=1)
    merge([str(folder) for folder in folders], str(tmp_path / "merged"))
    build_shards([str(corpus)], str(tiny_tokenizer), str(tmp_path / "undivided"), val_fraction=0.2, workers=1)
    for name in ("train", "validation"):
        made, wanted = Index.read(out / name), Index.read(tmp_path / "merged" / name)
        assert made.fingerprint == wanted.fingerprint
        whole = Index.read(tmp_path / "undivided" / name)
        assert (made.documents, made.tokens) == (whole.documents, whole.tokens)


def test_a_dry_run_touches_nothing(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "")  # no sbatch, no git
    words = ["submit-data", str(corpus), "--tokenizer", str(tiny_tokenizer), "--out", str(tmp_path / "out")]
    words += ["--parts", "4", "--at-most", "2", "--cluster", "cpu-test", "cluster.partition=p"]
    assert refusion([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --array=1-4%2" in out and out.count("#SBATCH --partition=p") == 2
    first, second = out.splitlines()[-2:]
    assert first.startswith("sbatch --chdir=") and "--dependency=afterok:JOB --kill-on-invalid-dep=yes" in second
    assert refusion(words) == 1
    assert "scontrol is not here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--wat", "3"], 2, "--wat"),
        (["--parts", "8"], 2, "7 files cannot be split into 8 parts"),
        (["--parts", "0"], 2, "--parts"),
        (["--part", "1/4"], 2, "--part is not for the jobs"),
        (["--val-fraction=2"], 2, "--val-fraction"),
        (["--prompt-field", "p"], 2, "--response-field"),
        (["--tokenizer", "nothing"], 1, "no tokenizer in 'nothing'"),
        (["cluster.nods=2"], 2, "did you mean 'nodes'"),
        (["--at-most", "0"], 2, "--at-most"),
        (["--dry-run", "--test-only"], 2, "one of --dry-run"),
        (["--out", "."], 2, "exists already"),
    ],
)
def test_errors_are_found_before_anything_is_written(
    corpus: Path, tiny_tokenizer: Path, tmp_path: Path, words: list[str], code: int, part: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    usual = ["submit-data", str(corpus), "--tokenizer", str(tiny_tokenizer), "--out", str(tmp_path / "out")]
    assert refusion([*usual, "--parts", "4", "--cluster", "cpu-test", *words]) == code
    error = capsys.readouterr().err
    assert part in error and len(error.splitlines()) == 1, error
    assert list(tmp_path.iterdir()) == [corpus]
