"""A checkpoint to a Hugging Face folder: weights, configuration, tokenizer, model card and the modelling code.

The folder has the `model_type` of its family, so stock transformers (and what builds on it) loads it as an ordinary
causal language model; with `trust_remote_code=True` it is the class whose `generate` decodes slots. It is written
beside its place and renamed when whole, config.json last: without it nothing loads a folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import refusion_train.hf
from data_tools.output import new_folder
from refusion_train import __version__
from refusion_train.checkpoint import store
from refusion_train.checkpoint.files import SliceReader
from refusion_train.checkpoint.sharded import ShardedEntry
from refusion_train.config import ModelConfig, ObjectiveConfig
from refusion_train.convert import card
from refusion_train.convert.family import check, config_of
from refusion_train.convert.importer import IMPORTED, TOKENIZER
from refusion_train.convert.names import EMBEDDING, HEAD, logical_shapes
from refusion_train.convert.safetensors_stream import Read, Shape, sync_all, write_model
from refusion_train.convert.tokenizer import write_tokenizer
from refusion_train.convert.tokenizer_files import TEMPLATE, copy_files, declare_mask, inspect, older_class
from refusion_train.data.shards import ShardSet
from refusion_train.data.tokenizer import META_FILE, Tokenizer
from refusion_train.data.transport import is_url
from refusion_train.errors import CheckpointError, ConfigError, DataError
from refusion_train.schedules import LAST, value_at

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16,
}  # fmt: skip
_CODE = (
    "modeling_refusion.py", "decoding.py", "baselines.py", "runner.py", "cache.py", "likelihood.py", "corruption.py",
    "settings.py",
)  # fmt: skip
_SHARD_BYTES = 5 * 10**9
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class Checkpoint:
    """What an export needs to know of a checkpoint. special_ids: bos, eos, pad, mask, where there are such."""

    folder: Path
    state: dict[str, Any]
    model: ModelConfig
    objective: ObjectiveConfig

    @property
    def special_ids(self) -> dict[str, Any]:
        return self.state.get("data", {}).get("special_ids") or {}

    @property
    def imported(self) -> dict[str, Any]:
        """The configuration files of the folder that it was imported from; empty for a run's own checkpoint."""
        return self.state.get(IMPORTED) or {}


def export_checkpoint(
    checkpoint: str,
    out: str,
    dtype: str = "bfloat16",
    overwrite: bool = False,
    tokenizer: str | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
    verify: Callable[[Path, Checkpoint, torch.dtype], None] | None = None,
) -> Path:
    """Write the weights of `checkpoint` as a Hugging Face folder `out`; returns its path. Needs no network.

    checkpoint: a checkpoint, or a run folder, of which the newest good one is taken. dtype: float32, bfloat16 or
    float16. overwrite: replace an earlier export, at the end and at once. tokenizer: its folder; default: the copy in
    the training data's folder (or beside an imported checkpoint). verify: called with the whole folder before it gets
    its name; what it raises undoes the export. Weights are read in blocks, so memory does not grow with the model.
    Raises CheckpointError, DataError or ConfigError; then nothing has changed at `out`.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype} is not one of float32, bfloat16, float16")
    found = read_checkpoint(checkpoint)
    check(found.model, found.objective, found.folder / store.STATE)
    tokens = _find_tokenizer(found, tokenizer)
    with new_folder(out, overwrite, _is_export) as target:
        write_model(target, _shapes(found.model), DTYPES[dtype], _reader(found), max_shard_bytes)
        _write_tokenizer(tokens, target, found.model.max_sequence_length)
        for name in _CODE:
            shutil.copyfile(Path(refusion_train.hf.__path__[0]) / name, target / name)
        decoding = generation_config(found)
        _write_json(target / "generation_config.json", decoding)
        config = model_config(found, dtype=str(DTYPES[dtype]).removeprefix("torch."))
        (target / "README.md").write_text(card.render(config, decoding, found.state), "utf-8")
        sync_all(path for path in target.iterdir() if path.is_file())
        _write_json(target / "config.json", config)
        if verify is not None:
            verify(target, found, DTYPES[dtype])
    return Path(out)


def read_checkpoint(checkpoint: str) -> Checkpoint:
    """Resolve a path to a good checkpoint and read what it says of itself. Raises CheckpointError."""
    folder = store.resolve(checkpoint)
    state = store.read_state(folder)
    try:
        config = state["config"]
        model, objective = ModelConfig(**config["model"]), ObjectiveConfig(**config["objective"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / store.STATE} does not describe a model of this version ({error}); use another checkpoint"
        ) from None
    if model.vocab_size is None:
        raise CheckpointError(f"{folder / store.STATE}: model.vocab_size is missing; use another checkpoint")
    return Checkpoint(folder, state, model, objective)


def parse_size(text: str) -> int:
    """Bytes that `5GB`, `500MB` or `4GiB` means. Raises ConfigError."""
    number = text.strip().upper().removesuffix("B")
    unit = number.lstrip("0123456789.")
    try:
        size = int(float(number.removesuffix(unit) if unit else number) * _UNITS[unit])
    except (KeyError, ValueError):
        size = 0
    if size <= 0:
        raise ConfigError(f"a size of '{text}' is not understood; write for example 5GB or 500MB")
    return size


# --------------------------------------------------------------------------------------------------- configurations


def model_config(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    """Contents of config.json: the stock configuration of the family, and `refusion`: how the model was trained."""
    model, objective, state = checkpoint.model, checkpoint.objective, checkpoint.state
    kept = checkpoint.imported.get("config", {})
    return {
        **config_of(model, kept),
        **{name: kept[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in kept},
        **_special_ids(checkpoint),
        "torch_dtype": dtype,
        "refusion": {
            "version": __version__,
            "objective": objective.name,
            "mask_token_id": checkpoint.special_ids.get("mask", -1),
            "slot_sizes": objective.slot_sizes if objective.name == "slots" else [],
            "slot_weights": value_at(objective.slot_weights, LAST) if objective.name == "slots" else None,
            "eps": objective.eps,
            "cross_slot_targets": objective.name == "slots" and objective.cross_slot_targets,
            "step": state.get("step"),
            "tokens": state.get("tokens"),
            "tokenizer": state.get("data", {}).get("tokenizer", {}).get("fingerprint"),
        },
    }


def generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Contents of generation_config.json: greedy, with the decoder's defaults for models trained on slots."""
    objective = checkpoint.objective
    config: dict[str, Any] = {"do_sample": False, **checkpoint.imported.get("generation_config", {})}
    config |= _special_ids(checkpoint)
    if objective.name == "slots":
        # The middle of the sizes trained on (at last): longer slots need fewer forwards, and are less often right.
        weights = value_at(objective.slot_weights, LAST) or [1.0] * len(objective.slot_sizes)
        sizes = sorted(size for size, weight in zip(objective.slot_sizes, weights, strict=True) if weight)
        size = sizes[(len(sizes) - 1) // 2]
        config = {
            "slot_size": size, "num_blocks": 1, "slot_threshold": 0.9, "token_threshold": 0.4, "correction": "ar",
            **config,
        }  # fmt: skip
    return config


def _special_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    ids = checkpoint.special_ids
    return {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad") if ids.get(name) is not None}


# --------------------------------------------------------------------------------------------------------- tokenizer


def _find_tokenizer(checkpoint: Checkpoint, given: str | None) -> Path | None:
    """Folder of the tokenizer of the training data; refuses another one. None: imported without any."""
    data = checkpoint.state.get("data", {})
    beside = checkpoint.folder.parent / TOKENIZER
    folder = Path(given) if given is not None else Path(data.get("path", "")) / TOKENIZER
    if given is None and is_url(data.get("path", "")):
        tokenizer = ShardSet.open(data["path"]).tokenizer()
        folder = tokenizer.folder if tokenizer is not None else folder
    if given is None and checkpoint.imported:
        if not beside.is_dir() and not data.get("tokenizer"):
            return None
        folder = beside
    if given is None and not folder.is_dir():
        raise DataError(
            f"the tokenizer of the training data is not at '{folder}' any more; give its folder (--tokenizer)"
        )
    wanted = data.get("tokenizer", {}).get("fingerprint")
    found = Tokenizer.load(folder).fingerprint if wanted is not None or (folder / META_FILE).is_file() else None
    if wanted is not None and found != wanted:
        raise DataError(
            f"the tokenizer in '{folder}' is {found}, the checkpoint was trained with {wanted}; "
            "give that one's folder (--tokenizer)"
        )
    return folder


def _write_tokenizer(folder: Path | None, target: Path, longest: int) -> None:
    """Ours as `tokenizers` files; those of others as they are, with the mask token in them; chat template included."""
    if folder is None:
        return
    own = Tokenizer.load(folder) if (folder / META_FILE).is_file() else None
    if own is not None and own.meta.get("model_type"):  # trained by us: the other files follow from it
        write_tokenizer(own, target, longest)
        if (folder / TEMPLATE).is_file():
            shutil.copyfile(folder / TEMPLATE, target / TEMPLATE)
        return
    # A Hugging Face tokenizer gets the mask token, so it is no longer the one that our own file describes.
    changed = own is not None and own.kind == "huggingface"
    if not copy_files(folder, target, without=(META_FILE,) if changed else ()):
        raise DataError(f"'{folder}' holds no tokenizer; give its folder (--tokenizer)")
    older_class(target)
    if changed:
        known = inspect(target)
        assert own is not None and known is not None, "the tokenizer was copied"
        declare_mask(target, known, own.special_pieces["mask"])


# ----------------------------------------------------------------------------------------------------------- weights


def _shapes(model: ModelConfig) -> dict[str, Shape]:
    """Tensors of the exported model: the logical ones without the padding of the vocabulary."""
    return {
        name: (model.vocab_size, *shape[1:]) if name in (EMBEDDING, HEAD) and model.vocab_size else shape
        for name, shape in logical_shapes(model).items()
    }


def _reader(checkpoint: Checkpoint) -> Read:
    """A function that reads rows of a tensor of the checkpoint (float32 master weights)."""
    stored, wanted = logical_shapes(checkpoint.model), _shapes(checkpoint.model)
    reader = SliceReader(checkpoint.folder)  # one for all: `.metadata` is read once, not for every block

    def read(name: str, rows: slice) -> torch.Tensor:
        assert rows.stop <= wanted[name][0], f"{name} has no rows {rows}"
        part = torch.empty(rows.stop - rows.start, *stored[name][1:])
        offsets = (rows.start, *(0,) * (part.dim() - 1))
        store.load(checkpoint.folder, {f"{name}.master": ShardedEntry(stored[name], {offsets: part})}, reader)
        return part

    return read


def _is_export(folder: Path) -> bool:
    """Whether a folder is an earlier export: only such a one may be replaced."""
    try:
        return "refusion" in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2, ensure_ascii=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
