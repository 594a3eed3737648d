"""Training on shards behind a server that fails now and then is training on the folder, to the bit."""

from __future__ import annotations

from pathlib import Path

from groups import losses, train_group, validation_rows
from http_shards import cut, flip, serve, status
from pytest import MonkeyPatch

from refusion_train.config import Config
from refusion_train.convert.export import export_checkpoint


def test_training_over_http_equals_training_from_the_folder(
    undisturbed: Config, again: Config, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    train, validation = Path(str(again.data.train)), Path(str(again.data.validation))
    assert train.parent == validation.parent
    again.data.cache_dir, again.data.cache_gb = str(tmp_path / "cache"), 2e-5  # a few of the blocks
    with serve(train.parent) as site:
        site.faults = [("train.*tar", fault) for fault in (status(500), cut, flip)] + [("validation.*tar", status(503))]
        again.data.train, again.data.validation = f"{site.url}/{train.name}", f"{site.url}/{validation.name}"
        train_group(again, 2)
        assert not site.faults
        export_checkpoint(again.run_dir, str(tmp_path / "hf"))  # with the tokenizer from there
        assert (tmp_path / "hf" / "tokenizer.json").is_file()
        assert all(end is not None for _, _, end in site.asked("tar"))
    assert losses(again) == losses(undisturbed)
    assert validation_rows(again) == validation_rows(undisturbed)
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.bin")) <= 20_000
