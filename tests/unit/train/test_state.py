"""What a run remembers, and what it may not change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from refusion_train.config import Config, all_keys
from refusion_train.data.loader import Cursor
from refusion_train.errors import CheckpointError, ConfigError
from refusion_train.train.state import FIXED_KEYS, TrainState, adopt_model, check_unchanged, describe_run

FOLDER = Path("run/checkpoints/step-00000012")
TOKENIZER = {"fingerprint": "sha256:t", "kind": "sentencepiece"}


def dataset(fingerprint: str = "sha256:a") -> Any:
    index = SimpleNamespace(tokenizer=TOKENIZER, special_ids={"mask": 4})
    return SimpleNamespace(path="shards/train", fingerprint=fingerprint, index=index)


def saved(config: Config) -> dict[str, Any]:
    state = TrainState(cursor=Cursor(0, np.zeros((2, 3), np.int64)))
    return json.loads(json.dumps(describe_run(state, config, dataset())))


def test_state_survives_json() -> None:
    state = TrainState(cursor=Cursor(0, np.zeros((2, 3), np.int64)))
    state.advance(Cursor(1, np.array([[1, 2, 3], [4, 5, 6]])), 100, 60.0, skipped=True)
    state.advance(Cursor(2, np.array([[7, 8, 9], [4, 5, 6]])), 100, 50.0, skipped=True)
    again = TrainState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert (again.step, again.tokens, again.supervised_tokens) == (2, 200, 110)
    assert (again.skipped, again.bad_in_a_row) == (2, 2)
    assert again.cursor is not None and again.cursor.streams.tolist() == [[7, 8, 9], [4, 5, 6]]
    again.advance(again.cursor, 100, 50.0, skipped=False)
    assert (again.skipped, again.bad_in_a_row) == (2, 0)


def test_a_state_that_lacks_something_is_a_clear_error() -> None:
    with pytest.raises(CheckpointError, match=r"state\.json of the checkpoint lacks 'tokens'"):
        TrainState.from_dict({"step": 3})


def test_fixed_keys_exist() -> None:
    assert set(FIXED_KEYS) <= set(all_keys())


OTHER: dict[str, Any] = {"objective.name": "ar", "objective.rng": "reference", "model.qk_norm": False,
                         "model.qkv_bias": True, "model.tie_embeddings": False}  # fmt: skip


@pytest.mark.parametrize("key", FIXED_KEYS)
def test_a_change_of_meaning_is_refused(key: str) -> None:
    config = Config()
    config.model.vocab_size = 320
    before = saved(config)
    *sections, name = key.split(".")
    owner = getattr(config, sections[0]) if sections else config
    old = getattr(owner, name)
    new = OTHER.get(key, None if isinstance(old, (bool, str)) else old + 1)
    assert new is not None and new != old
    setattr(owner, name, new)
    with pytest.raises(ConfigError) as caught:
        check_unchanged(before, config, dataset(), FOLDER)
    text = str(caught.value)
    assert f"{key}={new}" in text and f"{key}={old}" in text and FOLDER.name in text and "\n" not in text


def test_changes_that_are_allowed_are_told() -> None:
    config = Config()
    before = saved(config)
    assert check_unchanged(before, copy.deepcopy(config), dataset(), FOLDER) == []
    config.train.lr, config.train.steps, config.train.micro_batch_size = 1e-4, 2000, 4
    config.parallel.zero_stage, config.checkpoint.interval, config.run_dir = 3, 5, "elsewhere"
    config.data.train, config.data.workers = "moved/train", 0
    changes = check_unchanged(before, config, dataset(), FOLDER)
    assert changes == ["train.steps 1000 -> 2000", "train.micro_batch_size 1 -> 4", "train.lr 0.0003 -> 0.0001"]


def test_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sha256:b.*sha256:a"):
        check_unchanged(saved(Config()), Config(), dataset("sha256:b"), FOLDER)


def test_evaluation_takes_the_vocabulary_and_refuses_another_model() -> None:
    config = Config()
    config.model.vocab_size = 320
    before = saved(config)
    config.model.vocab_size, config.seed = None, 99
    adopt_model(before, config, TOKENIZER, FOLDER)
    assert config.model.vocab_size == 320
    with pytest.raises(ConfigError, match="another tokenizer"):
        adopt_model(before, config, {"fingerprint": "sha256:other", "kind": "sentencepiece"}, FOLDER)
    config.model.num_layers = 3
    with pytest.raises(ConfigError, match=r"model\.num_layers=3, but checkpoint .* has model\.num_layers=28"):
        adopt_model(before, config, TOKENIZER, FOLDER)


def test_a_run_of_a_version_without_some_model_key_goes_on() -> None:
    config = Config()
    config.model.vocab_size = 320
    before = saved(config)
    del before["config"]["model"]["qkv_bias"]
    assert check_unchanged(before, config, dataset(), FOLDER) == []
    config.model.qk_norm, config.model.qkv_bias = False, True
    before["config"]["model"]["qk_norm"] = False
    with pytest.raises(ConfigError, match=r"model\.qkv_bias=True cannot replace model\.qkv_bias=False"):
        check_unchanged(before, config, dataset(), FOLDER)


def test_an_imported_model_is_evaluated_on_any_data() -> None:
    """Its tokenizer has no fingerprint of ours; shape and vocabulary are still compared."""
    config = Config()
    config.model.vocab_size = 320
    before = saved(config)
    before["data"]["tokenizer"] = {}
    config.model.vocab_size = None
    adopt_model(before, config, TOKENIZER, FOLDER)
    assert config.model.vocab_size == 320
    before["data"]["tokenizer"] = {"fingerprint": "sha256:other", "kind": "sentencepiece"}
    with pytest.raises(ConfigError, match="another tokenizer"):
        adopt_model(before, config, TOKENIZER, FOLDER)
