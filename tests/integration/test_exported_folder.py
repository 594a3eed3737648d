"""A trained run as a Hugging Face folder, through the command line: stock classes, ours, and generated text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from refusion_train.checkpoint import store
from refusion_train.cli import run as command
from refusion_train.config import Config
from refusion_train.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(undisturbed: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export of a run of a few steps."""
    out = tmp_path_factory.mktemp("exported") / "hf"
    assert command(["export", undisturbed.run_dir, "--out", str(out), "--dtype", "float32"]) == 0
    return out


def test_weights_are_those_of_the_last_checkpoint(undisturbed: Config, folder: Path) -> None:
    from transformers import Qwen3ForCausalLM

    last = store.resolve(undisturbed.run_dir)
    loaded = Qwen3ForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in loaded.items():
        if name == "lm_head.weight":  # tied
            continue
        stored = weight.clone()
        if name == "model.embed_tokens.weight":
            stored = torch.empty(-(-weight.shape[0] // 64) * 64, weight.shape[1])
        tensors = {f"{name}.master": stored}
        store.load(last, tensors)
        assert weight.equal(tensors[f"{name}.master"][: weight.shape[0]]), name
    assert json.loads((folder / "config.json").read_text())["refusion"]["step"] == store.read_state(last)["step"]


def test_its_left_to_right_loss_is_that_of_the_validation(undisturbed: Config, folder: Path) -> None:
    """The trained model and the exported one say the same: 10 steps bring the loss far below the uniform one."""
    from groups import validation_rows
    from transformers import Qwen3ForCausalLM

    from refusion_train.data.shards import ShardSet

    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    assert undisturbed.data.validation is not None
    block = ShardSet.open(undisturbed.data.validation).block(0)
    losses = []
    with torch.no_grad():
        for first, last in zip(block.offsets, block.offsets[1:], strict=False):
            tokens = torch.tensor(block.tokens[first:last].astype("int64"))[:64]
            logits = model(tokens[None]).logits[0, :-1]
            losses += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none").tolist()
    assert sum(losses) / len(losses) == pytest.approx(validation_rows(undisturbed)[-1]["val_left_to_right"], rel=0.1)


def test_it_generates_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(folder), "--prompt", "the cat", "--max-new-tokens", "16", "--slot-size", "4"]
    assert command(words) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("the cat")
    assert command([*words, "--stream"]) == 0
    streamed = capsys.readouterr().out
    assert streamed.endswith(plain) and "░" in streamed
    assert command([*words, "--decoding", "left_to_right"]) == 0
    tokenizer = Tokenizer.load(folder)
    assert "<mask>" not in capsys.readouterr().out and tokenizer.mask_id == 4


def test_mistakes_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["export", str(folder.parent), "--out", str(folder.parent / "other")]) == 1
    assert command(["generate", str(folder), "--prompt", "a", "--max-new-tokens", "8", "--num-blocks", "7"]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 2 and "no checkpoint" in lines[0] and "num_blocks=7" in lines[1]
