"""A Hugging Face folder to a checkpoint from which a run of any layout can start.

The checkpoint holds the weights alone (fp32 masters under logical names): a run that starts from it begins at step 0
with the optimizer's moments at 0. Weights stream from the folder into the checkpoint in blocks, so that memory does
not grow with the model. The tokenizer's files lie beside it, with the mask token added if one was asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from data_tools.output import new_folder
from refusion_train.checkpoint import store
from refusion_train.checkpoint.sharded import ShardedEntry
from refusion_train.config import Config, ModelConfig
from refusion_train.convert.initial import LogicalWeights, NewRows, make_rows, with_vocabulary
from refusion_train.convert.safetensors_stream import blocks
from refusion_train.convert.source import Source
from refusion_train.convert.tokenizer_files import (
    Known,
    chat_templates,
    check_vocabulary,
    copy_files,
    declare_mask,
    inspect,
)
from refusion_train.data.tokenizer import META_FILE, Tokenizer
from refusion_train.errors import CheckpointError, ConfigError, DataError

TOKENIZER = "tokenizer"
_Read = Callable[[str, tuple[slice, ...]], torch.Tensor]  # of a tensor's name, this part
IMPORTED = "imported"  # key of state.json: the folder's own config.json and generation_config.json


@dataclass(frozen=True)
class Imported:
    """What an import made. folder: the checkpoint, None if nothing was written; mask_id: of the mask token, if any;
    new_rows: how many rows of the vocabulary were made up; dtypes: in which the weights came."""

    folder: Path | None
    model: ModelConfig
    mask_id: int | None
    new_rows: int
    dtypes: list[str]

    def summary(self) -> str:
        """One line for a person."""
        mask = "no mask token" if self.mask_id is None else f"mask token {self.mask_id}"
        made = (
            f"{self.new_rows} row{'s' * (self.new_rows != 1)} of the vocabulary {'to be ' * (self.folder is None)}made"
        )
        place = "nothing written" if self.folder is None else f"written to {self.folder}"
        return f"weights in {', '.join(self.dtypes)}; {mask}; {made}; {place}"

    def yaml(self) -> str:
        """The `model` section of a configuration that starts from it."""
        section = dataclasses.asdict(self.model)
        section["init_from"] = None if self.folder is None else str(self.folder)
        del section["init_rows"]  # there are none left
        return "model:\n" + "".join(f"  {name}: {json.dumps(value)}\n" for name, value in section.items())


def import_folder(
    hf_dir: str,
    out: str | None,
    mask_token: str | None = None,
    mask_init: str = "mean",
    vocab_multiple: int = 128,
    overwrite: bool = False,
) -> Imported:
    """Write the model in `hf_dir` as the checkpoint `out`/step-00000000, its tokenizer beside it in `out`/tokenizer.

    out: None only checks what is given. mask_token: text of the token that is to be the mask: one that the tokenizer
    has already, or a new one, whose row is an unused one or new. mask_init: mean, eos or random, for rows made up.
    vocab_multiple: the vocabulary is padded to a multiple of it. overwrite: replace an earlier import.
    Raises DataError or ConfigError; then there is nothing at `out` that was not there before.
    """
    source = Source(hf_dir)
    known = inspect(source.folder)
    check_vocabulary(known, source.rows, source.folder)
    if mask_token is not None and known is None:
        raise ConfigError(f"--mask-token={mask_token}: '{hf_dir}' has no tokenizer to which it could belong")
    if out is None:
        with tempfile.TemporaryDirectory() as scratch:
            model, mask_id, new = _vocabulary(source, known, mask_token, mask_init, vocab_multiple, Path(scratch))
        return Imported(None, model, mask_id, len(new.ids), source.dtypes)
    with new_folder(out, overwrite, _is_import) as target:
        model, mask_id, new = _vocabulary(source, known, mask_token, mask_init, vocab_multiple, target)
        weights = LogicalWeights(source, model, new)
        state = _state(source, model, mask_id, target)
        _save(target, weights, state)
    return Imported(Path(out), model, mask_id, len(new.ids), source.dtypes)


def _vocabulary(
    source: Source, known: Known | None, mask_token: str | None, mask_init: str, vocab_multiple: int, target: Path
) -> tuple[ModelConfig, int | None, NewRows]:
    """The model with all its rows, its mask token's id and the rows made; the tokenizer is written to `target`."""
    folder = target / TOKENIZER
    folder.mkdir()
    copy_files(source.folder, folder)
    mask_id, made = source.mask_id, None
    if mask_token is not None and known is not None:
        mask_id, made = _mask(folder, known, mask_token, mask_id, source)
    model = with_vocabulary(source.model, 0 if mask_id is None else mask_id + 1, vocab_multiple)
    new = make_rows(source, model, made, mask_init, used=known.rows if known else None)
    if not any(folder.iterdir()):
        folder.rmdir()
    return model, mask_id, new


def _mask(folder: Path, known: Known, text: str, trained: int | None, source: Source) -> tuple[int, int | None]:
    """Id of the mask token, and the same if its row is to be made: a mask token that was trained with stays."""
    mask_id = declare_mask(folder, known, text, source.folder)
    if mask_id != trained and text in chat_templates(folder):
        raise ConfigError(f"--mask-token={text} stands in the chat template of '{source.folder}'; give another text")
    for name in ("bos", "eos", "pad"):
        ids = source.config.get(f"{name}_token_id")
        if mask_id in (ids if isinstance(ids, list) else [ids]) and mask_id != trained:
            raise ConfigError(f"--mask-token={text} is the {name} token of the model; give another text")
    return mask_id, None if mask_id == trained else mask_id


def _save(target: Path, weights: LogicalWeights, state: dict[str, Any]) -> None:
    """Write the checkpoint. Raises DataError for weights that cannot be read, and as `store.save`."""
    unread: list[DataError] = []

    def read(name: str, where: tuple[slice, ...]) -> torch.Tensor:
        try:
            return weights.read(name, where)
        except DataError as error:  # the checkpoint's writer would tell it as a fault of the checkpoint
            unread.append(error)
            raise

    tensors = {f"{name}.master": _Streamed(read, name, shape) for name, shape in weights.shapes.items()}
    try:
        store.save(target, 0, tensors, state, keep=1)
    except CheckpointError:
        if unread:
            raise unread[0] from None
        raise


class _Streamed(ShardedEntry):
    """A tensor of the checkpoint that is read while it is written: in blocks of rows, one in memory at a time."""

    _read: _Read
    _name: str

    @staticmethod
    def __new__(cls, read: _Read, name: str, shape: tuple[int, ...]) -> _Streamed:
        entry = ShardedEntry.__new__(cls, shape, {})
        assert isinstance(entry, _Streamed), "torch made another class of tensor"
        entry._read, entry._name = read, name
        return entry

    def __init__(self, read: _Read, name: str, shape: tuple[int, ...]) -> None:
        super().__init__(shape, {})

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        rest = tuple(self.shape[1:])
        return [
            ChunkStorageMetadata(
                torch.Size((rows.start, *(0 for _ in rest))), torch.Size((rows.stop - rows.start, *rest))
            )
            for rows in blocks(tuple(self.shape))
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        (chunk,) = (chunk for chunk in self.__create_chunk_list__() if chunk.offsets == index.offset)
        where = zip(chunk.offsets, chunk.sizes, strict=True)
        return self._read(self._name, tuple(slice(offset, offset + size) for offset, size in where))


def _state(source: Source, model: ModelConfig, mask_id: int | None, target: Path) -> dict[str, Any]:
    """Contents of state.json: no progress, the shape, and what the folder said of itself."""
    special = {
        name: source.config[f"{name}_token_id"] for name in ("bos", "eos", "pad")
        if source.config.get(f"{name}_token_id") is not None
    }  # fmt: skip
    return {
        "step": 0,
        "tokens": 0,
        "config": dataclasses.asdict(Config(model=model, objective=source.objective)),
        "data": {
            "path": "",
            "tokenizer": _identity(target / TOKENIZER),
            "special_ids": special | ({} if mask_id is None else {"mask": mask_id}),
        },
        IMPORTED: {"config": source.config, "generation_config": _generation_config(source.folder)},
    }


def _identity(folder: Path) -> dict[str, str]:
    """Fingerprint and kind of the tokenizer as data of it name them, where it is one of ours."""
    if (folder / META_FILE).is_file():
        own = Tokenizer.load(folder)
        return {"fingerprint": own.fingerprint, "kind": own.kind}
    if not folder.is_dir():
        return {}
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return {"files": f"sha256:{digest.hexdigest()}"}


def _generation_config(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "generation_config.json").read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'generation_config.json'} cannot be read ({error}); fetch or remove it") from None
    return content if isinstance(content, dict) else {}


def _is_import(folder: Path) -> bool:
    """Whether a folder is an earlier import: only such a one may be replaced."""
    found = store.folders(folder)
    try:
        return len(found) == 1 and IMPORTED in json.loads((found[0] / store.STATE).read_bytes())
    except (OSError, ValueError):
        return False
