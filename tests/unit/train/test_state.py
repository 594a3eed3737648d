"""What a run remembers, and what it may not change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from refusion_train.config import Config, SourceConfig, all_keys, load
from refusion_train.data.streams import Cursor, Damage
from refusion_train.errors import CheckpointError, ConfigError
from refusion_train.train.run import Data
from refusion_train.train.setup import check_supply
from refusion_train.train.state import FIXED_KEYS, TrainState, adopt_model, check_unchanged, describe_run

FOLDER = Path("run/checkpoints/step-00000012")
TOKENIZER = {"fingerprint": "sha256:t", "kind": "sentencepiece"}


def source(fingerprint: str = "sha256:a", path: str = "shards/train", **settings: Any) -> Any:
    index = SimpleNamespace(tokenizer=TOKENIZER, special_ids={"mask": 4}, tokens=1000)
    dataset = SimpleNamespace(path=path, location=path, fingerprint=fingerprint, index=index)
    return SimpleNamespace(name="", dataset=dataset, config=SourceConfig(path, **settings))


def saved(config: Config) -> dict[str, Any]:
    state = TrainState(cursor=Cursor(0, {"sha256:a": np.zeros((2, 3), np.int64)}))
    return json.loads(json.dumps(describe_run(state, config, [source()])))


def test_state_survives_json() -> None:
    state = TrainState(cursor=Cursor(0, {"sha256:a": np.zeros((2, 3), np.int64)}))
    state.advance(Cursor(1, {"sha256:a": np.array([[1, 2, 3], [4, 5, 6]])}), 100, 60.0, skipped=True)
    state.advance(Cursor(2, {"sha256:a": np.array([[7, 8, 9], [4, 5, 6]])}), 100, 50.0, skipped=True)
    state.count_sources(["sha256:a", "sha256:b"], [150, 50])
    state.count_sources(["sha256:a"], [10])
    state.leave_out([Damage("sha256:a", 7, 3, 120, "gone"), Damage("sha256:a", 7, 3, 120, "gone")])
    again = TrainState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert (again.step, again.tokens, again.supervised_tokens) == (2, 200, 110)
    assert (again.skipped, again.bad_in_a_row) == (2, 2)
    assert again.cursor is not None and again.cursor.places["sha256:a"].tolist() == [[7, 8, 9], [4, 5, 6]]
    assert again.source_tokens == {"sha256:a": 160, "sha256:b": 50} and again.left_out == {"sha256:a": {"7": 120}}
    assert again.has_left_out(Damage("sha256:a", 7, 3, 120, "still gone"))
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
        check_unchanged(before, config, [source()], FOLDER)
    text = str(caught.value)
    assert f"{key}={new}" in text and f"{key}={old}" in text and FOLDER.name in text and "\n" not in text


def test_changes_that_are_allowed_are_told() -> None:
    config = Config()
    before = saved(config)
    assert check_unchanged(before, copy.deepcopy(config), [source()], FOLDER) == []
    config.train.lr, config.train.steps, config.train.micro_batch_size = 1e-4, 2000, 4
    config.parallel.zero_stage, config.checkpoint.interval, config.run_dir = 3, 5, "elsewhere"
    config.data.train, config.data.workers = "moved/train", 0
    changes = check_unchanged(before, config, [source()], FOLDER)
    assert changes == ["train.steps 1000 -> 2000", "train.micro_batch_size 1 -> 4", "train.lr 0.0003 -> 0.0001"]


def test_schedules_are_compared_as_they_were_saved() -> None:
    """Through JSON; a number that becomes a schedule, or another one, is a change that is told."""
    config = load(None, ["objective.slot_weights=[[0,[1,0,0,0]],[9,[0,0,0,1]]]", "objective.ar_weight=[[0,1],[9,0.5]]"])
    before = saved(config)
    assert check_unchanged(before, copy.deepcopy(config), [source()], FOLDER) == []
    config.objective.ar_weight, config.objective.mdm_weight = 1.0, [[0, 0.0], [9, 1.0]]
    changes = check_unchanged(before, config, [source()], FOLDER)
    assert changes == [
        "objective.ar_weight [[0, 1.0], [9, 0.5]] -> 1.0", "objective.mdm_weight 1.0 -> [[0, 0.0], [9, 1.0]]"
    ]  # fmt: skip


def test_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sha256:b.*sha256:a"):
        check_unchanged(saved(Config()), Config(), [source("sha256:b")], FOLDER)


def sources_saved(*sources: Any, read: tuple[str, ...] = ()) -> dict[str, Any]:
    state = TrainState(cursor=Cursor(0, {}), source_tokens=dict.fromkeys(read, 5))
    return json.loads(json.dumps(describe_run(state, Config(), sources)))


def test_sources_may_come_go_and_change() -> None:
    web, code = source("sha256:a", "web", weight=0.7), source("sha256:b", "code", weight=0.3)
    before = sources_saved(web, code)
    assert check_unchanged(before, Config(), [code, web], FOLDER) == []
    now = [source("sha256:a", "moved/web", weight=0.5, epochs=2), source("sha256:c", "books")]
    assert check_unchanged(before, Config(), now, FOLDER) == [
        "weight of moved/web 0.7 -> 0.5", "epochs of moved/web None -> 2", "data.train + books",
        "data.train - code (its place is kept)",
    ]  # fmt: skip
    # `code` comes back: the run has read it, though the checkpoint's configuration does not list it.
    between = sources_saved(*now, read=("sha256:a", "sha256:b"))
    changes = check_unchanged(between, Config(), [code, now[0]], FOLDER)
    assert changes == ["data.train + code (goes on where it stopped)", "data.train - books (its place is kept)"]
    with pytest.raises(ConfigError, match="is not the data of this run"):
        check_unchanged(before, Config(), now[1:], FOLDER)


def test_a_checkpoint_that_knew_one_dataset_goes_on_with_several() -> None:
    before = saved(Config())
    del before["data"]["sources"], before["source_tokens"], before["left_out"], before["config"]["data"]["on_error"]
    before["tokens"] = 4000
    before["cursor"] = {"step": 0, "streams": [[1, 2, 3]], "order": {"seed": 0, "dataset": "sha256:a"}}
    assert check_unchanged(before, Config(), [source()], FOLDER) == []
    assert check_unchanged(before, Config(), [source(), source("sha256:b", "new")], FOLDER) == ["data.train + new"]
    state = TrainState.from_dict(before)
    assert state.source_tokens == {"sha256:a": 4000} and state.left_out == {}
    assert state.cursor is not None and state.cursor.places["sha256:a"].tolist() == [[1, 2, 3]]


def test_more_steps_than_limited_sources_hold_are_refused() -> None:
    config = Config()
    config.train.global_batch_size, config.data.sequence_length, config.train.steps = 2, 50, 30
    data = Data([source("sha256:a", epochs=2), source("sha256:b", "b", epochs=1)], None)
    check_supply(config, data, TrainState())  # 3000 tokens for 30 steps of 100
    config.train.steps = 31
    with pytest.raises(ConfigError, match=r"train\.steps=31 .*set train\.steps=30"):
        check_supply(config, data, TrainState())
    # What a source that has left has given does not count against the others.
    check_supply(config, data, TrainState(step=10, source_tokens={"sha256:a": 900, "sha256:gone": 100}))
    data.sources[1].config.epochs = None
    config.train.steps = 1000
    check_supply(config, data, TrainState())


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
    del before["config"]["model"]["qkv_bias"], before["config"]["objective"]["ar_probability"]
    assert check_unchanged(before, config, [source()], FOLDER) == []
    config.model.qk_norm, config.model.qkv_bias = False, True
    before["config"]["model"]["qk_norm"] = False
    with pytest.raises(ConfigError, match=r"model\.qkv_bias=True cannot replace model\.qkv_bias=False"):
        check_unchanged(before, config, [source()], FOLDER)


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
