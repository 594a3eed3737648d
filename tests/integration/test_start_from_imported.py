"""`refusion import`, `refusion train` from it, `refusion export`: the commands, one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "convert"))
from hf_models import hf_model, save, tensors, with_tokenizer

from refusion_train.cli import run as command
from refusion_train.config import Config


def _words(config: Config, run_dir: Path, start: Path) -> list[str]:
    """Two steps at a learning rate that moves nothing by more than 1e-6."""
    return [
        f"run_dir={run_dir}", f"model.init_from={start}", f"data.train={config.data.train}",
        f"data.validation={config.data.validation}", "data.sequence_length=64", "data.streams=8", "data.workers=0",
        "train.steps=2", "train.global_batch_size=4", "train.micro_batch_size=2", "train.precision=fp32",
        "train.lr=1e-7", "train.warmup_steps=0", "train.weight_decay=0", "train.validation_rows=4",
        "train.tensorboard=false",
    ]  # fmt: skip


@pytest.mark.parametrize("start", ["source", "imported"])
def test_a_run_starts_with_the_weights(
    start: str, tiny_config: Config, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer has a mask token; its row becomes the mean, all others stay but for two tiny steps."""
    source = with_tokenizer(save(hf_model("qwen2", vocab_size=320), tmp_path / "source"), tiny_tokenizer)
    words = ["import", str(source), "--out", str(tmp_path / "imported"), "--mask-token", "<mask>"]
    assert command(words) == 0
    out = capsys.readouterr()
    (tmp_path / "run.yaml").write_text(out.out)
    assert "mask token 4; 1 row of the vocabulary made" in out.err and "qkv_bias: true" in out.out
    run_dir = tmp_path / "run"
    assert command(["train", str(tmp_path / "run.yaml"), *_words(tiny_config, run_dir, tmp_path / start)]) == 0
    assert command(["export", str(run_dir), "--out", str(tmp_path / "hf"), "--dtype", "float32", "--verify"]) == 0
    before, after = tensors(source), tensors(tmp_path / "hf")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if name == "model.embed_tokens.weight":
            others = [row for row in range(320) if row != 4]
            mean = weight[others].mean(dim=0)
            assert (after[name][4] - mean).abs().max() < 1e-5
            weight[4] = after[name][4]
        assert 0 < (after[name] - weight).abs().max() < 1e-5, name
    refusion = json.loads((tmp_path / "hf" / "config.json").read_text())["refusion"]
    assert refusion["objective"] == "slots" and refusion["mask_token_id"] == 4 and refusion["step"] == 2
    assert str(tmp_path / start) in (tmp_path / "hf" / "README.md").read_text()


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(hf_model("qwen3"), tmp_path / "source")
    capsys.readouterr()
    attempts: list[tuple[list[str], int, str]] = [
        (["import", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")], 1, "config.json is missing"),
        (["import", str(source), "--out", str(tmp_path / "out"), "--mask-token", "<m>"], 2, "no tokenizer"),
        (["import", str(source), "--out", str(source)], 1, "exists already"),
        (["export", str(source), "--out", str(tmp_path / "out")], 1, "no checkpoint"),
        (["export", str(source), "--out", str(tmp_path / "out"), "--max-shard-size", "5 things"], 2, "5 things"),
    ]
    for words, code, text in attempts:
        assert command(words) == code
        (line,) = capsys.readouterr().err.strip().split("\n")
        assert text in line
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_only_looking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source: Any = save(hf_model("llama"), tmp_path / "source")
    capsys.readouterr()
    assert command(["import", str(source), "--mask-token", "<m>"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert command(["import", str(source)]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("model:\n") and "nothing written" in out.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
