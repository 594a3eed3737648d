"""The weights that a new run starts from: `model.init_from`, a Hugging Face folder or a checkpoint.

The optimizer's moments are 0 and the step is 0: it is another run, on the weights alone. Every rank reads only the
parts that it owns. The folder need not be there any more once the run has a checkpoint of its own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from refusion_train.checkpoint import layout, store
from refusion_train.checkpoint.sharded import ShardedEntry
from refusion_train.config import Config, ModelConfig
from refusion_train.convert.initial import LogicalWeights, NewRows, make_rows
from refusion_train.convert.source import Source
from refusion_train.convert.tokenizer_files import inspect
from refusion_train.data.shard_index import Index
from refusion_train.errors import CheckpointError, ConfigError
from refusion_train.parallel.engine import Engine
from refusion_train.train.state import FIXED_KEYS

_SHAPE = tuple(
    key.removeprefix("model.") for key in FIXED_KEYS if key.startswith("model.") and not key.startswith("model.vocab_")
)


def settle_model(config: Config, index: Index) -> None:
    """Fill in `model.vocab_size` if it is not given, and refuse another shape than that of `model.init_from`.

    index: of the training data. A run that has checkpoints goes on from those: then their vocabulary counts.
    Raises ConfigError; DataError or CheckpointError for a folder that cannot be used.
    """
    model, where = config.model, f"model.init_from={config.model.init_from}"
    own = _own_checkpoint(config)
    if own is not None:
        model.vocab_size = model.vocab_size if model.vocab_size is not None else own.vocab_size
        return
    found = _describe(config)
    wrong = [f"model.{key}={getattr(found, key)}" for key in _SHAPE if getattr(found, key) != getattr(model, key)]
    if wrong:
        raise ConfigError(f"{where} is a model of another shape; set {' '.join(wrong).lower()}")
    assert found.vocab_size is not None, "a model with weights has a vocabulary"
    if model.vocab_size is None:
        model.vocab_size = found.vocab_size if _is_checkpoint(config) else max(found.vocab_size, index.vocab_size)
    if _is_checkpoint(config):
        for key in ("vocab_size", "vocab_multiple"):
            if getattr(found, key) != getattr(model, key):
                raise ConfigError(
                    f"{where} has model.{key}={getattr(found, key)}, not {getattr(model, key)}; set it so"
                )
        if found.vocab_size < index.vocab_size:
            raise ConfigError(
                f"{where} has {found.vocab_size} rows of vocabulary, data.train ids up to "
                f"{index.vocab_size - 1}; import the model again with --mask-token, or give its Hugging Face folder"
            )
    elif model.vocab_size < found.vocab_size:
        raise ConfigError(f"{where} has {found.vocab_size} rows of vocabulary, not {model.vocab_size}; leave it out")


def load_weights(engine: Engine, config: Config, index: Index) -> None:
    """Give a fresh engine the weights of `model.init_from`. Collective. Raises as `settle_model` does."""
    assert config.model.init_from is not None, "there is nothing to start from"
    if _is_checkpoint(config):
        folder = store.on_first_rank(lambda: _good_checkpoint(config, index))
        layout.restore_weights(engine, lambda tensors: store.load(folder, tensors))
        return
    path = config.model.init_from
    source = store.on_every_rank(lambda: Source(path))
    new = store.on_first_rank(lambda: _new_rows(source, config, index))
    weights = LogicalWeights(source, config.model, new)
    layout.restore_weights(engine, lambda tensors: store.on_every_rank(lambda: _fill(tensors, weights)))


def _fill(tensors: dict[str, Any], weights: LogicalWeights) -> None:
    for name, entry in tensors.items():
        assert isinstance(entry, ShardedEntry), f"{name} is not in parts"
        for offsets, part in entry.parts.items():
            where = tuple(slice(first, first + size) for first, size in zip(offsets, part.shape, strict=True))
            part.copy_(weights.read(name.removesuffix(".master"), where))


def _new_rows(source: Source, config: Config, index: Index) -> NewRows:
    """Rows that the folder lacks; that of the mask token too, unless the folder was trained with this one."""
    known = inspect(source.folder)
    mask_id: int | None = index.special_ids.get("mask") if config.objective.name != "ar" else None
    if mask_id == source.mask_id:
        mask_id = None
    if mask_id is not None and known is not None and mask_id < known.rows and mask_id not in known.text.values():
        raise ConfigError(
            f"the mask token of data.train has id {mask_id}, an ordinary token in "
            f"model.init_from={source.folder}; build the data with that folder's tokenizer"
        )
    used = None if known is None else known.rows
    return make_rows(source, config.model, mask_id, config.model.init_rows, used=used, seed=config.seed)


def _is_checkpoint(config: Config) -> bool:
    return not (Path(config.model.init_from or "") / "config.json").is_file()


def _describe(config: Config) -> ModelConfig:
    """The model in `model.init_from`."""
    path = str(config.model.init_from)
    if not _is_checkpoint(config):
        return Source(path).model
    places = [Path(path), Path(path) / store.CHECKPOINTS]
    if not Path(path, store.STATE).is_file() and not any(store.folders(place) for place in places):
        raise CheckpointError(
            f"model.init_from={path} is neither a Hugging Face folder (it has no config.json) nor an import, a run or "
            "a checkpoint; give the path of one"
        )
    try:
        return _model_of(store.read_state(store.resolve(path)))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"model.init_from={path} is a checkpoint of another version ({error})") from None


def _good_checkpoint(config: Config, index: Index) -> Path:
    """The checkpoint, if it speaks the language of the data."""
    folder = store.resolve(str(config.model.init_from))
    data = store.read_state(folder).get("data", {})
    theirs, ours = data.get("tokenizer", {}).get("fingerprint"), index.tokenizer.get("fingerprint")
    mask = data.get("special_ids", {}).get("mask")
    if theirs not in (None, ours):
        raise ConfigError(
            f"model.init_from={config.model.init_from} was trained with tokenizer {theirs}, data.train "
            f"was made with {ours}; build the data with the same"
        )
    if config.objective.name != "ar" and mask != index.special_ids.get("mask"):
        raise ConfigError(
            f"model.init_from={config.model.init_from} has the mask token {mask}, data.train "
            f"{index.special_ids.get('mask')}; import it with --mask-token and build the data with its tokenizer"
        )
    return folder


def _own_checkpoint(config: Config) -> ModelConfig | None:
    """The model of this run's newest checkpoint that can be read; which one is good is seen later."""
    for folder in reversed(store.folders(store.checkpoints_of(config.run_dir))):
        try:
            return _model_of(store.read_state(folder))
        except (CheckpointError, KeyError, TypeError):
            continue
    return None


def _model_of(state: dict[str, Any]) -> ModelConfig:
    return dataclasses.replace(ModelConfig(), **state["config"]["model"])
