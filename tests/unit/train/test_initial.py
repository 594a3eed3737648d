"""What a run that starts from other weights takes over, and what it refuses before anything is built."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "convert"))
from hf_models import ROWS, hf_model, json_tokenizer, save

from refusion_train.config import Config, load
from refusion_train.convert.importer import import_folder
from refusion_train.convert.source import Source
from refusion_train.errors import ConfigError, RefusionError
from refusion_train.train.initial import _good_checkpoint, _new_rows, settle_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer of ROWS - 10 tokens, and an import of it beside it."""
    root = tmp_path_factory.mktemp("start")
    json_tokenizer(save(hf_model("qwen2"), root / "source"), ROWS - 10)
    made = import_folder(str(root / "source"), str(root / "imported"), mask_token="<|mask|>")
    (root / "run.yaml").write_text(made.yaml())
    return root


def _config(folder: Path, start: str, tmp_path: Path) -> Config:
    config = load(folder / "run.yaml")
    config.model.init_from, config.model.vocab_size, config.run_dir = str(folder / start), None, str(tmp_path / "run")
    return config


def _index(vocab_size: int = ROWS - 9, mask: int = ROWS - 10, **tokenizer: str) -> Any:
    return SimpleNamespace(vocab_size=vocab_size, special_ids={"mask": mask}, tokenizer=tokenizer)


@pytest.mark.parametrize("start", ["source", "imported"])
def test_the_vocabulary_is_that_of_the_weights(folder: Path, start: str, tmp_path: Path) -> None:
    config = _config(folder, start, tmp_path)
    settle_model(config, _index())
    assert config.model.vocab_size == ROWS


def test_a_folder_is_given_more_rows_and_an_import_is_not(folder: Path, tmp_path: Path) -> None:
    config = _config(folder, "source", tmp_path)
    settle_model(config, _index(vocab_size=ROWS + 1))
    assert config.model.vocab_size == ROWS + 1
    with pytest.raises(ConfigError, match="--mask-token"):
        settle_model(_config(folder, "imported", tmp_path), _index(vocab_size=ROWS + 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64, "qkv_bias": False}, ["model.hidden_size=32", "model.qkv_bias=true"]),
        ({"vocab_size": ROWS - 20}, [str(ROWS - 20), "leave it out"]),
        ({"init_from": "nowhere"}, ["model.init_from=nowhere", "Hugging Face folder", "checkpoint"]),
    ],
    ids=["another shape", "fewer rows", "no such folder"],
)
def test_what_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    config = _config(folder, "source", tmp_path)
    for name, value in changes.items():
        setattr(config.model, name, value)
    with pytest.raises(RefusionError) as error:
        settle_model(config, _index())
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), str(error.value)


def test_a_run_with_a_checkpoint_needs_its_start_no_more(folder: Path, tmp_path: Path) -> None:
    config = _config(folder, "gone", tmp_path)
    shutil.copytree(folder / "imported" / "step-00000000", tmp_path / "run" / "checkpoints" / "step-00000000")
    settle_model(config, _index())
    assert config.model.vocab_size == ROWS


def test_the_mask_token_must_be_the_same(folder: Path, tmp_path: Path) -> None:
    config = _config(folder, "imported", tmp_path)
    assert _good_checkpoint(config, _index()).name == "step-00000000"
    with pytest.raises(ConfigError, match=f"mask token {ROWS - 10}.*{ROWS - 9}"):
        _good_checkpoint(config, _index(mask=ROWS - 9))
    plain = copy.deepcopy(config)
    plain.objective.name = "ar"
    assert _good_checkpoint(plain, _index(mask=ROWS - 9)).name == "step-00000000"


def test_only_a_row_that_is_not_in_use_is_made(folder: Path, tmp_path: Path) -> None:
    config, source = _config(folder, "source", tmp_path), Source(folder / "source")
    settle_model(config, _index())
    assert _new_rows(source, config, _index()).ids == (ROWS - 10,)
    with pytest.raises(ConfigError, match="ordinary token"):
        _new_rows(source, config, _index(mask=7))
    config.objective.name = "ar"
    assert _new_rows(source, config, _index()).ids == ()
