"""Hugging Face folders (`tokenizer.json`) as tokenizers, and a faster encoder with the same ids where one is installed.

The `tokenizers` library is the reference. Tokens that it calls special are never made from text; the other added
tokens (such as `<think>`) are a part of the vocabulary like any piece. `fastokens` is used only beside the reference:
who encodes with it compares samples.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refusion_train.data.tokenizer import MASK_PIECE, Tokenizer, new_meta
from refusion_train.errors import DataError

HF_FILE = "tokenizer.json"
_CONFIG_FILES = ("special_tokens_map.json", "tokenizer_config.json")
_TEMPLATE_FILE = "chat_template.jinja"


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` with what `tokenizer_config.json` says of begin, end, padding and mask tokens."""

    files = (HF_FILE, *_CONFIG_FILES, _TEMPLATE_FILE)

    def __init__(self, folder: Path, model: bytes, meta: dict[str, Any], library: Any = None):
        super().__init__(folder, meta)
        self._library = library or _library(model, folder)
        self.chat_template = _chat_template(folder)
        added = self._library.get_added_tokens_decoder().items()
        # Content to id of all tokens that no text may become.
        self.control_tokens = {token.content: index for index, token in added if token.special}

    @classmethod
    def adopt(cls, folder: Path) -> HuggingFaceTokenizer:
        """Open a folder as it comes from elsewhere; a mask token is added behind the last id if there is none.

        Raises DataError when no end token is named.
        """
        model = (folder / HF_FILE).read_bytes()
        library, config = _library(model, folder), _config(folder)
        vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
        special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
        named = {name: _content(config.get(f"{name}_token")) for name in ("unk", "bos", "eos", "pad", "mask")}
        pieces = {name: piece for name, piece in named.items() if piece is not None and piece in vocabulary}
        if config.get("add_bos_token") is False:
            pieces.pop("bos", None)
        if "eos" not in pieces:
            raise DataError(f"'{folder}' names no end token; set eos_token in {_CONFIG_FILES[1]} beside {HF_FILE}")
        pieces.setdefault("pad", pieces["eos"])
        for name in ("unk", "mask"):
            if pieces.get(name) not in special:  # text could become it
                pieces.pop(name, None)
        ids = {name: vocabulary[piece] for name, piece in pieces.items()}
        size = max(vocabulary.values()) + 1
        added = []
        if "mask" not in pieces:
            pieces["mask"] = next(p for p in (MASK_PIECE, "<|refusion_mask|>") if p not in vocabulary)
            ids["mask"], size, added = size, size + 1, ["mask"]
        return cls(folder, model, new_meta("huggingface", model, size, ids, pieces, added=added), library)

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        try:
            encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise DataError("a text holds a lone surrogate (half a UTF-16 pair), which is no Unicode text") from None
        return [np.array(one.ids, np.int32) for one in encoded]

    def piece(self, index: int) -> str:
        return self.special_pieces["mask"] if index == self.mask_id else self._library.decode([index], False)

    def to_json(self) -> str:
        """`tokenizer.json` with the added mask token in it, for other programs."""
        from tokenizers import AddedToken

        full = _library((self.folder / HF_FILE).read_bytes(), self.folder)
        if "mask" in self.added:
            full.add_special_tokens([AddedToken(self.special_pieces["mask"], special=True, normalized=False)])
            found = full.token_to_id(self.special_pieces["mask"])
            if found != self.mask_id:
                raise DataError(f"{self.folder / HF_FILE} has unused ids before {found}; it cannot be exported")
        return full.to_str(pretty=True)

    def _decode_text(self, ids: np.ndarray) -> str:
        # The added mask token is unknown to the library.
        special = [index for name, index in self.special_ids.items() if name != "unk"]
        return self._library.decode(ids[~np.isin(ids, special)].tolist(), skip_special_tokens=True)

    def _decode_parts(self, ids: np.ndarray) -> str:
        return self._library.decode(ids.tolist(), skip_special_tokens=False)


class FastEncoder:
    """The `fastokens` encoder for a Hugging Face folder; `version` names it."""

    def __init__(self, tokenizer: HuggingFaceTokenizer):
        import fastokens

        self.version = f"fastokens {importlib.metadata.version('fastokens')}"
        try:
            self._fast: Any = fastokens.Tokenizer.from_file(str(tokenizer.folder / HF_FILE))
        except Exception as error:  # whatever it does not support, it says in its own kinds of errors
            raise DataError(f"fastokens cannot read {tokenizer.folder / HF_FILE}: {error}") from None
        self._fast.no_truncation()

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `Tokenizer.encode_flat`; runs without the GIL."""
        ids, offsets = self._fast.encode_batch_flat(list(texts), add_special_tokens=False, split_special_tokens=True)
        return np.frombuffer(ids, "<u4").view("<i4"), np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))


def fast_is_installed() -> bool:
    """Whether the optional `fastokens` can be imported."""
    import importlib.util

    return importlib.util.find_spec("fastokens") is not None


def _library(model: bytes, folder: Path) -> Any:
    from tokenizers import Tokenizer as Library

    try:
        library: Any = Library.from_buffer(model)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{folder / HF_FILE} is not a file of the tokenizers library: {error}") from None
    library.no_truncation()
    library.no_padding()
    # Special tokens in the text are text. They are put in by us, by id.
    library.encode_special_tokens = True
    return library


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in _CONFIG_FILES:
        if (folder / name).is_file():
            try:
                config.update(json.loads((folder / name).read_bytes()))
            except ValueError as error:
                raise DataError(f"{folder / name} is not valid JSON ({error}); restore it") from None
    return config


def _content(token: Any) -> str | None:
    """A token as configurations write it: a string, or an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(folder: Path) -> str | None:
    if (folder / _TEMPLATE_FILE).is_file():
        return (folder / _TEMPLATE_FILE).read_text("utf-8")
    template = _config(folder).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
