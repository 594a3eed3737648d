"""The `refusion data` commands on URLs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_shards import Site, flip, serve, status
from typer.testing import CliRunner

from refusion_train.cli import app
from refusion_train.errors import ConfigError, DataError, RefusionError


@pytest.fixture
def site(tiny_dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The tiny dataset at URL/, its cache in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with serve(tiny_dataset.train.parent) as site:
        yield site


def said(*words: str) -> str:
    result = CliRunner().invoke(app, ["data", *words])
    if isinstance(result.exception, RefusionError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_verify(site: Site, tiny_dataset: Any) -> None:
    lines = said("verify", site.url).splitlines()
    assert [line.split(":", 2)[-1].split("/", 1)[1] for line in lines] == [
        line.rsplit("/", 1)[1] for line in said("verify", str(tiny_dataset.train.parent)).splitlines()
    ]
    assert lines[0].startswith(f"{site.url}/train: in order; ") and "not checked" not in lines[0]
    site.always = [("train-000001.tar", flip)]
    with pytest.raises(DataError, match=rf"^{site.url}/train: shard train-000001.tar, block .* \(checksum\)"):
        said("verify", f"{site.url}/train")
    site.always = [("train-000001.tar", status(403)), ("train-000000.tar", flip)]
    with pytest.raises(DataError, match=r"shard train-000000.tar, .*; .*shard train-000001.tar could not be fetched"):
        said("verify", f"{site.url}/train")


def test_stats_are_those_of_the_folder(site: Site, tiny_dataset: Any) -> None:
    there = said("stats", site.url, "--json").replace(site.url, "")
    assert there == said("stats", str(tiny_dataset.train.parent), "--json").replace(str(tiny_dataset.train.parent), "")
    assert all(end is not None and end - first < 2000 for _, first, end in site.asked("tar") if first is not None)
    site.ranges = False
    assert said("stats", site.url, "--json").replace(site.url, "") == there


def test_show(site: Site, tiny_dataset: Any, tmp_path: Path) -> None:
    assert said("show", site.url, "-n", "2") == said("show", str(tiny_dataset.train), "-n", "2")
    assert len(list((tmp_path / "home" / "refusion").rglob("tokenizer/tokenizer.model"))) == 1
    words = ("--config", "demo", "-n", "1", "data.sequence_length=32", "objective.slot_sizes=[4]")
    cache = f"data.cache_dir={tmp_path / 'other'}"
    rows = said("show", f"{site.url}/train", *words, cache)
    assert rows == said("show", str(tiny_dataset.train), *words)
    assert list((tmp_path / "other").rglob("*.bin"))
    with pytest.raises(ConfigError, match="name it with --config"):
        said("show", site.url, "data.sequence_length=32")


def test_without_a_tokenizer(site: Site, tiny_dataset: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny_dataset.validation, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer"))
    with serve(tmp_path) as bare:
        for path in (str(tmp_path / "bare"), f"{bare.url}/bare"):
            assert said("verify", path).rstrip().endswith("not checked: the tokenizer, as there is no tokenizer folder")
            with pytest.raises(DataError, match="no tokenizer folder"):
                said("show", path)


def test_merge_wants_folders(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a URL; merge links files"):
        said("merge", f"{site.url}/train", "--out", str(tmp_path / "out"))
