"""`refusion bench decode`: folders of every objective, figures that are those of `generate`, and clear refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up import make_checkpoint, model_shape

from refusion_train.cli import run as command
from refusion_train.convert.bench import bench_decode, read_pairs
from refusion_train.convert.export import export_checkpoint
from refusion_train.convert.generate import load_folder
from refusion_train.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Any) -> Path:
    root = tmp_path_factory.mktemp("run")
    make_checkpoint(root, tiny_dataset.train, model_shape())
    return export_checkpoint(str(root), str(root / "hf"), dtype="float32")


@pytest.fixture
def as_(folder: Path, tmp_path: Path) -> Any:
    """The folder as if trained with another objective: the same weights."""
    import shutil

    def make(objective: str) -> str:
        made = shutil.copytree(folder, tmp_path / objective)
        config = json.loads((made / "config.json").read_text())
        config["refusion"]["objective"] = objective
        (made / "config.json").write_text(json.dumps(config))
        return str(made)

    return make


def _test_file(folder: Path, tmp_path: Path) -> Path:
    """Three prompts; the slot decoder's own answer is the right one to the first."""
    import torch

    model, encode, decode = load_folder(str(folder), "cpu")
    ids = encode("the cat")
    out = model.generate(torch.tensor([ids]), max_new_tokens=32)
    answers = [("the cat", decode(out[0, len(ids) :].tolist())), ("a dog", "no"), ("sees", "no")]
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in answers))
    return file


def test_every_objective_is_measured(folder: Path, as_: Any, tmp_path: Path, capsys: Any) -> None:
    file, out, png = _test_file(folder, tmp_path), tmp_path / "out.json", tmp_path / "out.png"
    words = ["--test", str(file), "--out", str(out), "--plot", str(png), "--max-new-tokens", "32"]
    assert command(["bench", "decode", str(folder), as_("ar"), as_("mdm"), *words]) == 0
    found = json.loads(out.read_text())
    names = [entry["name"] for entry in found]
    assert [name.split(" ")[0].strip(",") for name in names] == ["slots"] * 3 + ["left"] * 2 + ["mdm"] * 3
    assert all(entry["prompts"] == 3 for entry in found)
    assert found[0]["right"] == 1 and found[0]["exact_match"] == pytest.approx(1 / 3)
    for entry in found:
        assert entry["tokens_per_forward"] == entry["tokens"] / entry["forwards"]
        assert entry["cpu_seconds"] > 0 and entry["prefill_seconds"] > 0
    # Left to right, a token a forward.
    assert found[3]["tokens"] == found[3]["forwards"] == found[4]["forwards"]
    assert found[6]["forwards"] <= 3 * 16 < found[5]["forwards"] or found[5]["tokens"] < 3 * 32
    assert png.read_bytes().startswith(b"\x89PNG") and "forwards/answer" in capsys.readouterr().out


def test_what_is_counted_is_what_generate_says(folder: Path, tmp_path: Path) -> None:
    import torch

    file = _test_file(folder, tmp_path)
    (slots, *_) = bench_decode([str(folder)], str(file), limit=2, max_new_tokens=32)
    model, encode, _ = load_folder(str(folder), "cpu")
    forwards = 0
    for prompt, _ in read_pairs(str(file))[:2]:
        model.generate(torch.tensor([encode(prompt)]), max_new_tokens=32)
        forwards += model.last_stats["forwards"]
    assert slots.forwards == forwards and slots.prompts == 2


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    with pytest.raises(DataError, match="cannot be read"):
        read_pairs(str(file))
    for text, words in (("", "no lines"), ('{"prompt": "a"}\n', ":1 is not"), ("[]\n", ":1 is not")):
        file.write_text(text)
        with pytest.raises(DataError, match=words):
            read_pairs(str(file))


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refusion_train.convert import bench
    from refusion_train.errors import ConfigError

    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match="pip install"):
        bench.plot([], str(tmp_path / "a.png"))
    # Said before anything is measured.
    assert command(["bench", "decode", str(tmp_path), "--test", "nowhere", "--plot", "a.png"]) == 2
