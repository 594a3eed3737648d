"""The weights of a Hugging Face folder, read part by part: no tensor is read before it is asked for, none is kept.

Safetensors files are opened for each part alone, so that what is mapped into memory is one part, whatever the size
of the file. PyTorch's .bin files are read with `weights_only` (no pickled code is ever run), one at a time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from refusion_train.config import ModelConfig, ObjectiveConfig
from refusion_train.convert.family import model_of, objective_of, read_config
from refusion_train.convert.names import EMBEDDING, HEAD, logical_shapes
from refusion_train.errors import DataError

_SAFE, _BIN = "model.safetensors", "pytorch_model.bin"
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Tensors that old files hold beside the weights: they follow from the configuration.
_POINTER = b"version https://git-lfs"  # what git leaves in the place of a file that was not fetched
_DERIVED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")


@dataclass(frozen=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


class Source:
    """An opened folder: `config` (config.json), `model` (its shape), `objective` (trained for it) and `read`.

    dtypes: names of the types in which weights are stored, as torch calls them.
    """

    def __init__(self, folder: str | Path) -> None:
        """Check everything that can be known without reading weights: architecture, files, names, shapes, types.

        Raises DataError, one line, for the first thing that is wrong.
        """
        self.folder = Path(folder)
        self.config: dict[str, Any] = read_config(self.folder)
        self.model: ModelConfig = model_of(self.config, self.folder)
        self.objective: ObjectiveConfig = objective_of(self.config, self.model, self.folder)
        self._bin: tuple[Path, dict[str, torch.Tensor]] | None = None
        self._entries = self._index()
        self._check()
        self.dtypes = sorted({str(_FLOATS[e.dtype]).removeprefix("torch.") for e in self._entries.values()})

    @property
    def trained(self) -> dict[str, Any]:
        """What an earlier export of ours says of the training; empty for other folders."""
        return self.config.get("refusion") or {}

    @property
    def mask_id(self) -> int | None:
        """The mask token that an earlier export of ours was trained with; it says -1 if there was none."""
        found: int | None = self.trained.get("mask_token_id")
        return None if found is None or found < 0 else found

    @property
    def rows(self) -> int:
        """Rows of the embedding, unused ones included."""
        return self._entries[EMBEDDING].shape[0]

    def read(self, name: str, where: tuple[slice, ...] = ()) -> torch.Tensor:
        """The part `where` (all, if empty) of a tensor, float32, in memory of its own.

        Raises DataError if it holds NaN or infinity: no training goes on from there.
        """
        entry = self._entries[name]
        where = where or (slice(None),) * len(entry.shape)
        if entry.file.suffix == ".bin":
            part = self._load(entry.file)[name][where].to(torch.float32, copy=True)
        else:
            with _safely(entry.file) as opened:
                part = opened.get_slice(name)[where].to(torch.float32, copy=True)
        # A sum needs no memory; it is not finite if an entry is not, and hardly ever else.
        if not part.sum().isfinite() and not part.isfinite().all():
            raise DataError(f"{entry.file}: {name} holds NaN or infinity; fetch it again, or give another model")
        return part

    # ------------------------------------------------------------------------------------------------------- index

    def _index(self) -> dict[str, _Entry]:
        """Every stored tensor, except those that are derived."""
        entries: dict[str, _Entry] = {}
        for file, promised in self._files():
            found = self._scan(file)
            lost = [name for name in promised if name not in found]
            if lost:
                raise DataError(f"{file} does not hold {lost[0]}, which its index promises; fetch the file again")
            entries |= {name: entry for name, entry in found.items() if not name.endswith(_DERIVED)}
        if self.model.tie_embeddings:
            entries.pop(HEAD, None)
        return entries

    def _files(self) -> Iterable[tuple[Path, list[str]]]:
        """Files with weights, and the tensors that an index promises in each."""
        for name in (_SAFE, _BIN):
            single, index = self.folder / name, self.folder / f"{name}.index.json"
            if single.is_file():
                return [(single, [])]
            if index.is_file():
                return self._indexed(index)
        raise DataError(f"'{self.folder}' holds no weights: neither {_SAFE} nor {_BIN}, nor an index of several")

    def _indexed(self, index: Path) -> list[tuple[Path, list[str]]]:
        try:
            places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            files: dict[Any, list[str]] = {}
            for name, file in places.items():
                files.setdefault(file, []).append(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{index} cannot be read; fetch it again") from None
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise DataError(f"{index} names {file!r}, which is no file beside it; fetch it again")
            if not (self.folder / file).is_file():
                raise DataError(f"{self.folder / file} is missing, which {index.name} names; fetch it again")
        return [(self.folder / file, names) for file, names in files.items()]

    def _scan(self, file: Path) -> dict[str, _Entry]:
        if file.suffix == ".bin":
            names = {dtype: name for name, dtype in _FLOATS.items()}
            return {
                name: _Entry(file, tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)))
                for name, tensor in self._load(file).items()
            }
        with _safely(file) as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            return {name: _Entry(file, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}

    def _load(self, file: Path) -> dict[str, torch.Tensor]:
        """The tensors of a .bin file; that of the last call is kept."""
        if self._bin is None or self._bin[0] != file:
            self._bin = None  # before the next is read: at most one file is in memory
            self._bin = (file, _load_bin(file))
        return self._bin[1]

    # ------------------------------------------------------------------------------------------------------- checks

    def _check(self) -> None:
        where = f"'{self.folder}'"
        expected = self._shapes()
        for name, shape in expected.items():
            if name not in self._entries:
                raise DataError(f"{where} lacks the tensor {name}, which its config.json calls for")
            if self._entries[name].shape != shape:
                raise DataError(
                    f"{where}: {name} has shape {list(self._entries[name].shape)}, config.json says {list(shape)}"
                )
        for name, entry in self._entries.items():
            if entry.dtype not in _FLOATS:
                raise DataError(
                    f"{entry.file}: {name} is of type {entry.dtype}, not float32, bfloat16 or float16; "
                    "give unquantized weights"
                )
            if name not in expected:
                raise DataError(
                    f"{where} holds the tensor {name}, for which a {self.config['model_type']} model of this kind has "
                    "no place; it cannot be imported"
                )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the stock class: the logical ones without padding."""
        rows = self.model.vocab_size
        assert rows is not None, "config.json states the vocabulary"
        return {
            name: (rows, *shape[1:]) if name in (EMBEDDING, HEAD) else shape
            for name, shape in logical_shapes(self.model).items()
        }


def _load_bin(file: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            found = _torch_load(file, mmap=True)
        except RuntimeError:  # written by a torch before 1.6, which cannot be mapped
            found = _torch_load(file, mmap=False)
    except Exception as error:
        _refuse_pointer(file)
        if "weights_only" in str(error).lower() or "unsupported" in str(error).lower():
            raise DataError(f"{file} holds more than tensors and is not opened; convert it to safetensors") from None
        raise DataError(f"{file} cannot be read as a PyTorch file; fetch it again") from None
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise DataError(f"{file} is not a dictionary of tensors; convert it to safetensors")
    return found


def _torch_load(file: Path, mmap: bool) -> Any:
    """Tensors alone, no code; what torch thinks of the pickle's version is of no use to anybody here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def _refuse_pointer(file: Path) -> None:
    with open(file, "rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise DataError(f"{file} is a Git LFS pointer, not the file itself; fetch that (git lfs pull)")


class _safely:
    """`safe_open` whose errors are ours."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._opened = safe_open(file, "pt")
        except (SafetensorError, OSError) as error:
            _refuse_pointer(file)
            raise DataError(f"{file} is damaged or cut short ({error}); fetch it again") from None

    def __enter__(self) -> Any:
        return self._opened.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)
