"""`refusion generate`: the text, slots filling in, and words that cannot be followed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from made_up import make_checkpoint, model_shape
from rich.console import Console

from refusion_train import cli
from refusion_train.config import ObjectiveConfig
from refusion_train.convert.export import export_checkpoint
from refusion_train.convert.generate import generate_text, render
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Any) -> str:
    root = tmp_path_factory.mktemp("run")
    make_checkpoint(root, tiny_dataset.train, model_shape())
    return str(export_checkpoint(str(root), str(root / "hf"), dtype="float32"))


def _console(**options: Any) -> Console:
    return Console(file=io.StringIO(), width=40, highlight=False, **options)


def _printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_prompt_and_continuation_are_printed(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    console = _console()
    text = generate_text(folder, "the cat", 40, slot_size=4, console=console)
    # Long lines are not broken: what is printed is the text.
    assert _printed(console) == f"the cat{text}\n"
    assert "tokens per forward" in capsys.readouterr().err


def test_it_is_what_the_model_generates(folder: str) -> None:
    import torch

    from refusion_train.hf.modeling_refusion import ReFusionQwen3ForCausalLM

    tokenizer = Tokenizer.load(folder)
    prompt = [tokenizer.bos_id, *tokenizer.encode("the cat")]
    model = ReFusionQwen3ForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, slot_size=4, temperature=1.0, seed=5)
    text = generate_text(folder, "the cat", 12, slot_size=4, temperature=1.0, seed=5, console=_console())
    assert text == tokenizer.decode(out[0, len(prompt) :].tolist())


def test_streaming_into_a_file_prints_a_line_for_each_forward(folder: str) -> None:
    console = _console()
    text = generate_text(folder, "the cat", 12, slot_size=4, stream=True, console=console)
    *lines, last = _printed(console).removesuffix(f"the cat{text}\n").split("\n")
    assert last == "" and len(lines) > 3
    counts = [line.split(maxsplit=2) for line in lines]
    assert [int(words[0]) for words in counts] == list(range(1, len(lines) + 1))
    decided = [int(words[1]) for words in counts]
    assert decided == sorted(decided) and decided[0] == 0
    assert lines[0].endswith("░" * 12) and "░" not in lines[-1]


def test_streaming_on_a_terminal_redraws_in_place(folder: str) -> None:
    console = _console(force_terminal=True)
    text = generate_text(folder, "the cat", 12, slot_size=4, stream=True, console=console)
    shown = _printed(console)
    assert "░" in shown and "\x1b[2K" in shown and " of 12 tokens after " in shown
    assert shown.endswith(f"{text}\n")


def test_gaps_are_shown_where_they_are() -> None:
    from refusion_train.hf.runner import Update

    def decode(ids: Any) -> str:
        return "".join(chr(token) for token in ids)

    tokens = [97, 98, 0, 0, 99, 0, 100]
    decided = [True, True, False, False, True, False, True]
    assert render(Update(0, tokens, decided, None, 3), decode) == "ab░░c░d"
    assert render(Update(0, tokens, decided, 4, 3), decode) == "ab░░c"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slot_size": 3, "num_blocks": 7}, "num_blocks=7"),
        ({"decoding": "mdm"}, "decoding=mdm"),
        ({"steps": 4}, "decoding=plan_and_infill has no use of steps=4"),
        (
            {"confidence_threshold": 0.5, "decoding": "left_to_right"},
            "left_to_right has no use of confidence_threshold",
        ),
    ],
)
def test_options_that_do_not_suit(folder: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        generate_text(folder, "a", 8, console=_console(), **options)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_masked_diffusion_takes_its_options_from_the_command_line(
    tiny_dataset: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many forwards a response costs is what both of them say; together, or out of range, they are refused."""
    make_checkpoint(tmp_path, tiny_dataset.train, model_shape(), ObjectiveConfig(name="mdm"))
    folder = str(export_checkpoint(str(tmp_path), str(tmp_path / "hf"), dtype="float32"))

    def generate(*words: str) -> tuple[int, str]:
        code = cli.run(["generate", folder, "--prompt", "the cat", "--max-new-tokens", "12", *words])
        return code, capsys.readouterr().err

    for words, forwards in (((), 12), (("--steps", "3"), 3), (("--confidence-threshold", "0"), 1)):
        code, told = generate(*words)
        assert code == 0 and f" in {forwards} forwards" in told, told
    for words, part in (
        (("--steps", "3", "--confidence-threshold", "0.5"), "confidence_threshold=0.5"),
        (("--steps", "13"), "steps=13"), (("--confidence-threshold", "2"), "confidence_threshold=2"),
    ):  # fmt: skip
        code, told = generate(*words)
        assert code == 2 and part in told and told.count("\n") == 1, told


def test_folders_that_cannot_be_used(folder: str, tmp_path: Path) -> None:
    def refused(*words: str) -> None:
        with pytest.raises(DataError) as error:
            generate_text(str(tmp_path), "a", 8, console=_console())
        assert "\n" not in str(error.value)
        for word in (str(tmp_path), *words):
            assert word in str(error.value)

    refused("config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    refused("bert", "qwen3")
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    refused("cannot be loaded")
    (tmp_path / "model.safetensors").write_bytes((Path(folder) / "model.safetensors").read_bytes()[:1000])
    refused("cannot be loaded")
