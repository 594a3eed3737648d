"""Layouts that cannot work are refused in one line, with keys and a remedy; and every remedy is one."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from refusion_train import layouts
from refusion_train.config import Config, ModelConfig, load, validate
from refusion_train.errors import ConfigError

VIRTUAL = ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]
# Words of the command line (28 layers, 16 heads, 8 kv heads, 64 streams, 64 rows in micro-batches of 1 unless they say
# otherwise), processes, what is wrong, and what would work.
REFUSED: list[tuple[list[str], int, str, str]] = [
    (["parallel.zero_stage=0"], 1, "parallel.zero_stage=0 is not one of 1, 2, 3", "parallel.zero_stage=1 or 2"),
    (
        ["parallel.zero_stage=3", "parallel.pipeline=2"], 2,
        "parallel.zero_stage=3 with parallel.pipeline=2 gives wrong gradient norms",
        "parallel.zero_stage=2 or parallel.pipeline=1",
    ),
    (
        ["parallel.zero_stage=3", "parallel.linear=transformer_engine"], 1,
        "parallel.zero_stage=3 with parallel.linear=transformer_engine",
        "parallel.zero_stage=2 or parallel.linear=torch",
    ),
    (
        ["model.num_heads=6", "model.num_kv_heads=2", "parallel.tensor=4"], 4,
        "model.num_heads=6 is not divisible by parallel.tensor=4", "parallel.tensor=2 or 1",
    ),
    (["parallel.tensor=16"], 16, "model.num_kv_heads=8 is not divisible by", "parallel.tensor=8 or 4"),
    (
        ["model.ffn_size=1001", "parallel.tensor=2", "parallel.sequence=true"], 2,
        "model.ffn_size=1001 is not divisible by parallel.tensor=2", "parallel.tensor=1 parallel.sequence=false",
    ),
    (["model.vocab_multiple=6", "parallel.tensor=4"], 4, "model.vocab_multiple=6 is", "parallel.tensor=2 or 1"),
    (["parallel.tensor=3"], 3, "model.num_heads=16 is not divisible", "parallel.tensor=2 on 2 processes, or "),
    (["parallel.sequence=true"], 1, "parallel.sequence=true", "parallel.sequence=false"),
    (
        ["parallel.sequence=true", "parallel.tensor=8", "data.sequence_length=1004"], 8,
        "data.sequence_length=1004 is not divisible by parallel.tensor=8",
        "parallel.sequence=false or parallel.tensor=4",
    ),
    (["parallel.virtual_pipeline=2"], 1, "parallel.virtual_pipeline=2", "parallel.virtual_pipeline=1"),
    (["parallel.pipeline_last=5"], 4, "parallel.pipeline_last=5", "parallel.pipeline_last=null"),
    (
        ["model.num_layers=30", "parallel.pipeline=4"], 4,
        "model.num_layers=30 does not divide into equal stages with parallel.pipeline=4",
        "parallel.pipeline_first=7 parallel.pipeline_last=7, or parallel.pipeline=2",
    ),
    (
        ["model.num_layers=29", "parallel.pipeline=2"], 2, "model.num_layers=29",
        "parallel.pipeline_last=14 or parallel.pipeline=1",
    ),
    (["model.num_layers=3", "parallel.pipeline=4"], 4, "model.num_layers=3", "parallel.pipeline=1"),
    (
        ["parallel.pipeline=4", "parallel.pipeline_first=6"], 4,
        "model.num_layers=28 does not divide into stages with parallel.pipeline=4, parallel.pipeline_first=6",
        "parallel.pipeline_first=null or parallel.pipeline_last=6",
    ),
    (
        ["parallel.pipeline=2", "parallel.pipeline_first=20", "parallel.pipeline_last=20"], 2,
        "parallel.pipeline_first=20, parallel.pipeline_last=20",
        "parallel.pipeline_first=null parallel.pipeline_last=null",
    ),
    (
        [*VIRTUAL, "model.num_layers=30"], 2,
        "model.num_layers=30 does not divide into equal stages of equal chunks with parallel.pipeline=2, "
        "parallel.virtual_pipeline=2", "parallel.pipeline_last=14 or parallel.virtual_pipeline=1",
    ),
    ([*VIRTUAL, "parallel.pipeline_last=13"], 2, "parallel.pipeline_last=13", "parallel.pipeline_last=null"),
    (
        ["parallel.tensor=2"], 3, "3 processes cannot be divided by parallel.tensor * parallel.pipeline = 2 * 1",
        "2 or 4 processes",
    ),
    (["data.streams=6"], 4, "data.streams=6 is not a multiple of the data-parallel size 4", "data.streams=4 or 8"),
    (
        ["train.global_batch_size=36"], 8,
        "train.global_batch_size=36 is not a multiple of train.micro_batch_size * data-parallel size = 1 * 8",
        "train.global_batch_size=32 or 40",
    ),
    (
        [*VIRTUAL, "train.global_batch_size=65"], 2,
        "gives 65 micro-batches per step, which are not a multiple of parallel.pipeline=2",
        "train.global_batch_size=64 or 66",
    ),
    (
        ["parallel.tensor=16", "parallel.pipeline=3", "data.streams=5"], 48, "model.num_kv_heads=8",
        "parallel.tensor=8 parallel.pipeline_first=9 parallel.pipeline_last=9 data.streams=4, or ",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "world", "wrong", "remedy"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_refusals_name_the_keys_and_what_works(words: list[str], world: int, wrong: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load(None, words), world)
    text, _, advice = str(caught.value).rpartition("; use ")
    assert wrong in text and advice.startswith(remedy) and "\n" not in str(caught.value)
    for following in _choices(advice):
        processes = [int(word) for word in re.findall(r"(\d+) processes", following)]
        changes = re.findall(r"\S+=\S+", following)
        validate(load(None, [*words, *changes]), processes[0] if processes else world)


def _choices(advice: str) -> list[str]:
    """The alternatives of a line's advice, each as words."""
    if ", or " in advice:
        return advice.split(", or ")
    first, _, second = advice.partition(" or ")
    if not second:
        return [first]
    if second.endswith("processes"):
        return [f"{first} processes", second]
    return [first, second if "=" in second else f"{first.partition('=')[0]}={second}"]


def test_a_small_search_has_a_remedy_for_every_refusal() -> None:
    """Whatever is wrong, something works, and it is found soon enough to be found while a user waits."""
    refused = 0
    sizes = (1, 2, 3, 4, 8)
    for tensor, pipeline, virtual, zero, world in itertools.product(sizes, sizes, (1, 2), (1, 3), (1, 6, 8, 24)):
        config = Config(model=ModelConfig(num_layers=12, vocab_size=100))
        config.parallel = replace(
            config.parallel, tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual, zero_stage=zero
        )
        try:
            layouts.check(config, world)
            assert layouts.accepts(config, world)
        except ConfigError as error:
            assert "; use " in str(error) and not layouts.accepts(config, world)
            refused += 1
    assert 300 < refused < 400


@pytest.mark.parametrize(
    ("layers", "pipeline", "first", "last", "shares"),
    [
        (28, 1, None, None, [28]), (28, 4, None, None, [7, 7, 7, 7]), (30, 4, 7, 7, [7, 8, 8, 7]),
        (29, 4, None, 5, [8, 8, 8, 5]), (29, 4, 5, None, [5, 8, 8, 8]), (28, 2, 15, None, [15, 13]),
        (28, 2, 15, 13, [15, 13]), (28, 2, None, 13, [15, 13]),
    ],
)  # fmt: skip
def test_layers_of_stages(layers: int, pipeline: int, first: int | None, last: int | None, shares: list[int]) -> None:
    config = Config(model=ModelConfig(num_layers=layers))
    config.parallel = replace(config.parallel, pipeline=pipeline, pipeline_first=first, pipeline_last=last)
    validate(config)
    assert layouts.stage_layers(config) == shares
