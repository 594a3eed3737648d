"""What a comparison refuses before anything is trained, and how its words are shared out."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.compare import plan, read
from refusion_train.errors import ConfigError


def test_words_go_to_the_comparison_or_to_the_training_of_all_arms(tmp_path: Path) -> None:
    assert list(read("cpu", ["arms={mine: [objective.name=ar]}"], [])[0].arms) == ["mine"], (
        "not beside those of the file"
    )
    comparison, words = read("cpu", ["prompts=7", "train.steps=30", "seeds=[3]"], ["slots", "ar"])
    assert (comparison.prompts, comparison.seeds, list(comparison.arms)) == (7, [3], ["slots", "ar"])
    assert words == ["train.steps=30"]
    trainings = plan(comparison, words, tmp_path, nproc=1)
    assert [(one.arm, one.seed) for one in trainings] == [("slots", 3), ("ar", 3)]
    assert all({"train.steps=30", "seed=3"} <= set(one.words) for one in trainings)
    assert "objective.name=ar" in trainings[1].words


@pytest.mark.parametrize(
    ("words", "arms", "message"),
    [
        (["seeds=[]"], [], "must not be empty"),
        (["seeds=[1,1]"], [], "holds a seed twice"),
        (["shards=there"], [], "go together"),
        ([], ["bert"], "--arm bert is not one of slots, ar, mdm, paper"),
        (["arms={a/b: [objective.name=ar]}"], ["a/b"], "letters, digits"),
        (["arms={a: [objective.name=ar], wider: [model.hidden_size=256]}"], [], "do not share model"),
        (["arms={a: [objective.name=ar], longer: [train.steps=9]}"], [], "do not share model"),
        (["arms={odd: [objective.name=mdn]}"], [], "arm odd: .*did you mean 'mdm'"),
        (["train.step=3"], [], "^command line: .*did you mean 'train.steps'"),
        (["arms={}"], [], "must not be empty"),
        (["arms={a: [objective.name=ar], b: [train.warmup_steps=9]}"], [], "do not share model"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], arms: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        comparison, rest = read("cpu", words, arms)
        plan(comparison, rest, tmp_path, nproc=1)
