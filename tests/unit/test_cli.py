"""The command line: exit codes, one-line errors, help that answers at once and imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from refusion_train.cli import run


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["foo"], "foo"),
        (["train"], "CONFIG"),
        (["train", "no-such-config"], "no-such-config"),
        (["train", "demo", "train.lrr=1"], "train.lr"),
        (["train", "demo", "--nprocs", "2"], "--nproc"),
        (["train", "demo"], "data.train"),
        (["train", "demo", "data.train=x", "train.global_batch_size=15", "--nproc", "2"], "train.global_batch_size"),
        (["plan", "demo"], "--world-size"),
        (["plan", "demo", "--world-size", "2"], "model.vocab_size"),
        (["plan", "qwen3-8b", "--world-size", "3"], "data.streams"),
        (["plan", "qwen3-8b", "--world-size", "8", "--suggest"], "--gpu-memory"),
        (["data", "shards", "x"], "--tokenizer"),
        (["generate", "x"], "--prompt"),
        (["generate", "x", "--prompt", "a", "--prompt-file", "b"], "--prompt"),
        (["generate", "x", "--prompt", "\udc80"], "UTF-8"),
        (["generate", "x", "--prompt-file", "no-such-file"], "no-such-file"),
        (["generate", "x", "--prompt", "a", "--seed", "-1"], "--seed"),
        (["data", "tokenizer", "x", "--out", "y", "--vocab-size", "3"], "vocab"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    captured = capsys.readouterr()
    assert len(_lines(captured.err)) == 1 and part in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["data", "verify", "no-such-folder"], 1, "no-such-folder"),
        (["data", "show", "no-such-folder"], 1, "no-such-folder"),
        (["data", "shards", "no-such-input", "--tokenizer", "no-such-tokenizer", "--out", "out"], 1, "no-such"),
        (["data", "tokenizer", "no-such-input", "--out", "out"], 1, "no-such-input"),
        (["export", "no-such-run", "--out", "out"], 1, "no-such-run"),
        (["generate", "no-such-folder", "--prompt", "x"], 1, "no-such-folder"),
        (["train", "demo", "data.train=no-such-data", "run_dir=run"], 1, "no-such-data"),
    ],
)
def test_missing_things_are_one_line(
    words: list[str], code: int, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(words) == code
    error = [line for line in _lines(capfd.readouterr().err) if line.startswith("refusion: error")]
    assert len(error) == 1 and part in error[0]
    assert not (tmp_path / "out").exists()


def test_a_path_in_the_way_is_not_called_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert run(["demo", "--dir", "file"]) == 1
    assert capsys.readouterr().err.strip() == "refusion: error: file: File exists"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "no-such-config", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_every_command_has_help_with_an_example() -> None:
    for words in (
        ["data", "tokenizer"], ["data", "shards"], ["data", "verify"], ["data", "show"], ["train"], ["evaluate"],
        ["plan"], ["export"], ["generate"], ["demo"],
    ):  # fmt: skip
        result = subprocess.run(
            [sys.executable, "-m", "refusion_train.cli", *words, "--help"], capture_output=True, text=True, check=True
        )
        assert "refusion " + " ".join(words) in result.stdout.replace("\n", " "), f"{words}: no example in the help"


def test_plan_prints_tables_or_json(tiny_dataset: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["parallel.pipeline=2", "model.num_layers=4"]
    words = ["plan", "demo", "--world-size", "4", f"data.train={tiny_dataset.train}", *shape]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "4 ranks = 1 tensor x 2 data" in text and "epochs" in text
    assert run([*words, "--json", "--gpu", "H100"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["layout"]["pipeline"] == 2 and content["config"]["parallel"]["pipeline"] == 2
    assert content["fits"] is True and content["arithmetic"]["measured_length"] is True
    assert run([*words, "--suggest", "--gpu-memory", "16", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert run([*words, *first["overrides"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"] == first["peak"]


def test_a_plan_that_finds_no_layout_says_so_to_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "qwen3-8b", "--world-size", "1", "--gpu-memory", "8", "--suggest"]) == 1
    assert "no layout fits" in capsys.readouterr().out


def _imported_by(code: str) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {name.split(".")[0] for name in result.stdout.splitlines()[-1].split()}


def test_help_imports_nothing_heavy() -> None:
    """Imports, not seconds: `refusion --help` answers at once because these are not loaded."""
    loaded = _imported_by("from refusion_train.cli import run; run(['--help'])")
    assert not loaded & {"torch", "numpy", "numba", "deepspeed", "megatron", "transformers", "omegaconf"}


def test_tokenizing_needs_no_torch() -> None:
    loaded = _imported_by("import data_tools.build_shards, data_tools.train_tokenizer, refusion_train.data.shards")
    assert not loaded & {"torch", "deepspeed", "megatron", "transformers"}


def test_only_model_parallel_and_train_need_mcore_and_deepspeed() -> None:
    loaded = _imported_by(
        "import refusion_train.data.loader, refusion_train.objective, refusion_train.telemetry, "
        "refusion_train.convert.export, "
        "refusion_train.convert.generate, launchers.local, launchers.demo, data_tools.inspect"
    )
    assert not loaded & {"deepspeed", "megatron"}
