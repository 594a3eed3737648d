"""The built-in task: right answers, disjoint sets, the same documents from the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_tools.arithmetic import LEVELS, Level, problems
from refusion_train.cli import run as command
from refusion_train.errors import ConfigError


@pytest.mark.parametrize("level", [level for level in LEVELS if not LEVELS[level].aligned])
def test_answers_are_right_and_sets_are_disjoint(level: str) -> None:
    sets = [list(problems(level, 300, 0, test)) for test in (False, True)]
    for one in [problem for some in sets for problem in some]:
        tasks = one.prompt.removesuffix(" =").split(" ")
        answers, sums = one.response.removeprefix(" ").split(" | ")
        assert [answer.split("=")[0] for answer in answers.split(" ")] == tasks
        results = [int(answer.split("=")[1]) for answer in answers.split(" ")]
        assert results == [eval(task) for task in tasks] and min(results) >= 0
        assert [int(total) for total in sums.split(" ")] == [sum(results[: i + 1]) for i in range(len(results))]
    prompts = [{one.prompt for one in some} for some in sets]
    assert len(prompts[0]) == len(prompts[1]) == 300 and not prompts[0] & prompts[1]
    # Whatever the seed: what may be asked in a test is never trained on.
    assert not {one.prompt for one in problems(level, 300, 7, False)} & prompts[1]
    assert sets[0] == list(problems(level, 300, 0, False)) != list(problems(level, 300, 1, False))


def test_of_the_aligned_level_every_step_is_as_long() -> None:
    for one in problems("aligned", 300, 0, test=False):
        tasks = one.prompt.removesuffix(" =").split(" ")
        answers, steps = one.response.removeprefix(" ").split(" | ")
        last = 0
        for task, answer, step in zip(tasks, answers.split(" "), steps.split(" "), strict=True):
            result = eval(task.removesuffix("=??"))
            last = last % 10 + result % 10
            assert (answer, step) == (task.replace("??", f"{result:02}"), f"t+{result % 10}={last:02}")
        assert len({len(step) for step in [*tasks, *answers.split(" "), *steps.split(" ")]}) == 1


def test_hard_responses_are_long() -> None:
    assert min(len(one.response) for one in problems("hard", 300, 0, False)) >= 70
    lengths = sorted(len(one.response) for one in problems("hard", 300, 0, False))
    assert lengths[30] >= 100, "characters of nine of ten"


def test_more_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVELS, "tiny", Level(1, 1, 3, "+"))
    with pytest.raises(ConfigError, match="hardly more than"):
        list(problems("tiny", 50, 0, False))


def test_the_command_writes_what_shards_are_made_of(tmp_path: Path, tiny_tokenizer: Path) -> None:
    sums = tmp_path / "sums"
    assert command(["data", "arithmetic", "--out", str(sums), "--train", "50", "--test", "10"]) == 0
    lines = (sums / "test.jsonl").read_text().splitlines()
    assert len(lines) == 10 and set(json.loads(lines[0])) == {"prompt", "response"}
    words = ["--prompt-field", "prompt", "--response-field", "response", "--tokenizer", str(tiny_tokenizer)]
    assert command(["data", "shards", str(sums / "train.jsonl"), *words, "--out", str(tmp_path / "shards")]) == 0
    assert command(["data", "arithmetic", "--out", str(sums)]) == 1, "it exists already"
