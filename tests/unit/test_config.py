"""Configuration: layers, the errors a user can make, and that every knob is read by somebody."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from refusion_train import config as configuration
from refusion_train.config import Config, SourceConfig, all_keys, load, shipped_configs, to_yaml, validate
from refusion_train.errors import ConfigError
from refusion_train.sources import expected_tokens, short_names, sources_of

ROOT = Path(__file__).resolve().parents[2]


def test_layers_override_in_order(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  lr: 0.5\n  steps: 7\n")
    config = load(file, ["train.lr=0.25", "objective.slot_sizes=[2,4]"])
    assert (config.train.lr, config.train.steps) == (0.25, 7)
    assert config.objective.slot_sizes == [2, 4]
    assert config.train.global_batch_size == Config().train.global_batch_size


def test_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load("demo", ["data.train=shards", "objective.slot_weights=[1,2]"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load(file) == config


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("trian.lr=1", "did you mean 'train'"),
        ("train.lrr=1", "did you mean 'train.lr'"),
        ("lr=1", "did you mean 'train.lr'"),
        ("model.hiden_size=1", "did you mean 'model.hidden_size'"),
        ("train.lr=fast", "train.lr"),
        ("train=3", "section"),
        ("train.lr", "key=value"),
        ("=3", "key=value"),
        ("train.steps=1.5", "train.steps"),
        ("objective.slot_sizes=[a]", "objective.slot_sizes"),
        ("objective.slot_sizes=4", "not a list"),
    ],
)
def test_bad_overrides_name_the_key(word: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [word])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: {hidden_sizes: 3}", "did you mean 'model.hidden_size'"),
        ("- 1\n- 2\n", "mapping"),
        ("a: [1,\n", "YAML"),
        ("train: 5\n", "section"),
        ("", "mapping"),
    ],
)
def test_bad_files_name_the_file(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    if not text:
        assert load(file) == Config()  # an empty file changes nothing
        return
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert part in str(caught.value) and "bad.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("data.train=[]", "empty list"),
        ("data.train=3", "neither a folder nor a list"),
        ("data.train={path: a}", "neither a folder nor a list"),
        ("data.train=[{weight: 1}]", "data.train[0].path is not set"),
        ("data.train=[{path: a, wieght: 1}]", "unknown key 'data.train[0].wieght'"),
        ("data.train=[{path: a},{path: b, weight: -1}]", "data.train[1].weight=-1"),
        ("data.train=[{path: a, weight: 0}]", "data.train[0].weight=0 is never greater"),
        ("data.train=[{path: a, weight: .nan}]", "data.train[0].weight=nan"),
        ("data.train=[{path: a, weight: true}]", "data.train[0].weight=True"),
        ("data.train=[{path: a, weight: [[0, 1], [0, 2]]}]", "grow from point to point"),
        ("data.train=[{path: a, weight: [[0, -1], [5, 2]]}]", "must not be negative"),
        ("data.train=[{path: a, weight: [0, 1]}]", "a schedule, such as [[0, 0.7]"),
        ("data.train=[{path: a, weight: [[0, 1], 5]}]", "is not a schedule"),
        ("data.train=[{path: a, weight: [[0, 0], [9, 0]]}]", "is never greater than 0"),
        ("data.train=[{path: a, weight: [[0, 1], [9, 0]]}]", "no source has any weight at step 9"),
        ("data.train=[{path: a},{path: ./a/}]", "is the dataset of data.train[0]"),
        ("data.train=[{path: a, epochs: 0}]", "data.train[0].epochs=0"),
        ("data.train=[{path: a, epochs: 1.5}]", "data.train[0].epochs=1.5"),
    ],
)
def test_wrong_sources_name_the_key(word: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [word])
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_sources_from_file_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {train: [{path: a, weight: [[0, 0.7], [100, 0.2]]}, {path: b, weight: 0.3, epochs: 2}]}\n")
    assert sources_of(load(file)) == [SourceConfig("a", [[0, 0.7], [100, 0.2]]), SourceConfig("b", 0.3, 2)]
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(load(file)))
    assert load(again) == load(file)
    words = ["data.train=[{path: c, weight: 0.7},{path: d, weight: 0.3}]"]
    assert sources_of(load(file, words)) == [SourceConfig("c", 0.7), SourceConfig("d", 0.3)]
    assert sources_of(load(file, ["data.train=c"])) == [SourceConfig("c")]
    with pytest.raises(ConfigError, match="give the list as a whole"):
        load(file, ["data.train[0].weight=1"])
    with pytest.raises(ConfigError, match=r"data\.train is not set"):
        sources_of(load(None))


def test_expected_tokens_by_weights_and_limits() -> None:
    web, code = SourceConfig("web", 3.0), SourceConfig("code", 1.0)
    assert expected_tokens([web, code], [500, 500], 100, 10) == pytest.approx([750, 250])
    code.epochs = 1  # 100 of its tokens, then all from the web
    assert expected_tokens([web, code], [500, 100], 100, 10) == pytest.approx([900, 100])
    web.weight = [[0, 1.0], [100, 0.0]]
    code = SourceConfig("code", [[0, 0.0], [100, 1.0]])
    assert expected_tokens([web, code], [500, 500], 100, 10) == pytest.approx([500, 500], abs=10)
    web, code = SourceConfig("web", 1.0, 1), SourceConfig("code", 1.0, 1)
    assert sum(expected_tokens([web, code], [100, 100], 100, 10)) == pytest.approx(1000)


def test_short_names() -> None:
    assert short_names(["shards/web/train", "shards/code/train"]) == ["web", "code"]
    assert short_names(["shards/train"]) == ["train"]
    assert short_names(["a", "a/b"]) == ["a", "a/b"]
    assert short_names(["s3://x/web", "/data/code"]) == ["s3:/x/web", "data/code"]


SLOT_SCHEDULE = "objective.slot_weights=[[0,[1,0,0,0]],[100,[0,0,0,1]]]"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["objective.slot_weights=[1]"], "objective.slot_weights=[1] must be a list of 4 numbers"),
        (["objective.slot_weights=3"], "objective.slot_weights=3 must be a list of 4 numbers"),
        (["objective.slot_weights=[0,0,0,0]"], "not all 0"),
        (["objective.slot_weights=[1,1,1,-1]"], "not negative"),
        (["objective.slot_weights=[1,1,1,a]"], "must be a list of 4 numbers"),
        (["objective.slot_weights=[[0,[1,0,0,0]],[9,[1]]]"], "[1] at step 9 must be a list of 4 numbers"),
        (["objective.slot_weights=[[0,[1,0,0,0]],[9,[0,0,0,0]]]"], "at step 9 must be a list of 4 numbers"),
        (["objective.slot_weights=[[0,[1,0,0,0]],[9,2]]"], "2 at step 9 must be a list of 4 numbers"),
        (["objective.slot_weights=[[5,[1,0,0,0]],[5,[0,0,0,1]]]"], "grow from point to point"),
        (["objective.slot_weights=[[5,[1,0,0,0]],[3,[0,0,0,1]]]"], "grow from point to point"),
        (["objective.slot_weights=[[1,2,3,4],[5,6,7,8]]"], "is not a schedule; write [[step, value], ...]"),
        (["objective.slot_weights=[[0,[1,0,0,0]],7]"], "is not a schedule"),
        ([SLOT_SCHEDULE, "objective.slot_sizes=[2,64]"], "[1, 0, 0, 0] at step 0 must be a list of 2 numbers"),
        (["objective.ar_weight=-1"], "objective.ar_weight=-1 must be a number and must not be negative"),
        (["objective.ar_weight=fast"], "objective.ar_weight=fast must be a number"),
        (["objective.ar_weight=null"], "objective.ar_weight=None must be a number"),
        (["objective.ar_weight=.inf"], "objective.ar_weight=inf must be a number"),
        (["objective.mdm_weight=[0,1]"], "a schedule, such as [[0, 0.7], [1000, 0.2]]"),
        (["objective.mdm_weight=[[0,1],[9,-1]]"], "objective.mdm_weight=[[0, 1], [9, -1]]: -1 at step 9 must"),
        (["objective.mdm_weight=[[0.5,1],[9,2]]"], "whole numbers from 0 on"),
        (["objective.mdm_weight=[[-1,1],[9,2]]"], "whole numbers from 0 on"),
        (["objective.ar_weight=0", "objective.mdm_weight=0"], "nothing is trained at step 0"),
        (["objective.ar_weight=0", "objective.mdm_weight=[[0,1],[8,0]]"], "nothing is trained at step 8: objective.ar"),
        (["objective.name=ar", "objective.ar_weight=0"], "objective.ar_weight must be greater than 0"),
        (["objective.ar_probability=1.5"], "objective.ar_probability=1.5 must lie between 0 and 1"),
        (["objective.ar_probability=0.1", "objective.name=ar"], "needs objective.name=slots, not ar"),
        (["objective.ar_probability=0.1", "objective.name=mdm"], "needs objective.name=slots, not mdm"),
        (["objective.ar_probability=0.1", "objective.rng=reference"], "needs objective.rng=counter, not reference"),
    ],
)
def test_wrong_mixtures_and_schedules_name_the_key(words: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load(None, words))
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_schedules_from_file_and_command_line_read_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "objective:\n  slot_sizes: [2, 64]\n  slot_weights: [[0, [1, 0]], [50, [0, 1]]]\n"
        "  ar_weight: [[0, 1], [50, 1e-1]]\n  ar_probability: 0.1\n"
    )
    config = load(file, ["objective.mdm_weight=[[10,0],[20,1.5]]"])
    validate(config)
    assert config.objective.slot_weights == [[0, [1.0, 0.0]], [50, [0.0, 1.0]]]
    assert config.objective.ar_weight == [[0, 1.0], [50, 0.1]]
    assert config.objective.mdm_weight == [[10, 0.0], [20, 1.5]]
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load(again) == config
    back = load(file, ["objective.slot_weights=null", "objective.ar_weight=1", "objective.ar_probability=0"])
    validate(back)
    assert (back.objective.slot_weights, back.objective.ar_weight) == (None, 1.0)


def test_missing_file_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"no-such.*demo\.yaml"):
        load("no-such")


@pytest.mark.parametrize(
    ("words", "world", "part"),
    [
        (["model.num_heads=6", "model.num_kv_heads=4"], 1, "model.num_kv_heads=4"),
        (["model.num_heads=24", "model.hidden_size=1000", "model.qk_norm=false"], 1, "model.hidden_size=1000"),
        (["data.sequence_length=65536"], 1, "model.max_sequence_length"),
        (["objective.slot_weights=[1]"], 1, "objective.slot_weights"),
        (["objective.slot_sizes=[]"], 1, "objective.slot_sizes"),
        (["objective.name=slot"], 1, "did you mean 'slots'"),
        (["objective.eps=0"], 1, "objective.eps"),
        (["objective.rng=reference", "objective.name=ar"], 1, "objective.rng"),
        (["parallel.tensor=3"], 3, "model.num_heads"),
        (["parallel.pipeline_first=0", "parallel.pipeline=2"], 2, "null for an equal share"),
        (["parallel.linear=transformerengine"], 1, "did you mean 'transformer_engine'"),
        (["train.micro_batch_size=0"], 1, "train.micro_batch_size"),
        (["train.min_lr_ratio=2"], 1, "train.min_lr_ratio"),
        (["model.head_dim=33"], 1, "model.head_dim"),
        (["train.lr=inf"], 1, "train.lr=inf"),
        (["train.clip=nan"], 1, "train.clip=nan"),
        (["train.beta2=1"], 1, "train.beta2"),
        (["seed=99999999999999999999"], 1, "seed"),
        (["data.sequence_length=1"], 1, "data.sequence_length"),
        (["data.sequence_length=16", "objective.slot_sizes=[32]"], 1, "every slot is longer"),
    ],
)
def test_cross_field_checks_name_the_key(words: list[str], world: int, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load(None, words), world)
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_shipped_configurations_are_valid(name: str) -> None:
    validate(load(name), 1 if name == "arithmetic.yaml" else 2)  # that one is for a single core


def test_every_knob_is_read_outside_the_schema() -> None:
    """A knob that nobody reads is a promise that nobody keeps."""
    sources = [
        file.read_text()
        for folder in ("refusion_train", "launchers", "data_tools")
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "config.py"
    ]
    text = "\n".join(sources)
    unread = [key for key in all_keys() if not re.search(rf"\.{key.rsplit('.', 1)[-1]}\b", text)]
    assert not unread, f"declared in config.py and read nowhere: {unread}"


def test_every_check_key_exists() -> None:
    for table in (
        configuration._POSITIVE, configuration._POSITIVE_OR_NULL, configuration._NOT_NEGATIVE, configuration._FRACTION,
    ):  # fmt: skip
        assert set(table) <= set(all_keys())
