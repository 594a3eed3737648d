"""Text to token ids and back, exactly: a SentencePiece model in a folder, with a fingerprint.

The folder holds `tokenizer.model` (the SentencePiece model) and `refusion_tokenizer.json` (kind, special
ids, fingerprint). Shards, checkpoints and exported models name the fingerprint, so that ids are never read
with another vocabulary than the one that wrote them.

Special symbols are CONTROL pieces: no text, not even the literal `<s>` or `<mask>`, is ever encoded to them.
SentencePiece writes a space as U+2581; a U+2581 in the text itself is therefore encoded by its three byte
pieces, which keeps decode(encode(text)) == text for every text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refusion_train.errors import DataError

MODEL_FILE = "tokenizer.model"
META_FILE = "refusion_tokenizer.json"
META_FORMAT, META_VERSION = "refusion-tokenizer", 1

# Name, piece; the id is the place in this list.
SPECIAL_PIECES = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>", "mask": "<mask>"}

_SPACE = "\u2581"
# A space after something that is not a space: no piece reaches across it (checked per vocabulary).
_SAFE_CUT = re.compile(r"(?<=[^ ]) ")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Texts are encoded in segments: SentencePiece's BPE takes 1.5x as long on whole files of source code (its queue
# leaves the cache) and 100 bytes and more per character, whatever the kind.
_BPE_SEGMENT = 1500
_LONGEST_SEGMENT = 1 << 20


@dataclass(frozen=True)
class TokenizerInfo:
    """What shards must remember of the tokenizer that made them."""

    fingerprint: str
    kind: str
    vocab_size: int
    special_ids: dict[str, int]


class Tokenizer:
    """A loaded tokenizer folder. Thread-safe; use `Tokenizer.load` or `Tokenizer.create`.

    Attributes: `folder`, `fingerprint` ("sha256:..."), `kind` ("sentencepiece"), `vocab_size`, `special_ids` and
    `special_pieces` (by name: pad, unk, bos, eos, mask).
    """

    def __init__(self, folder: Path, model: bytes, meta: dict[str, Any]):
        from sentencepiece import SentencePieceProcessor

        self._sp: Any = SentencePieceProcessor()
        try:
            self._sp.LoadFromSerializedProto(model)
        except RuntimeError:
            raise DataError(f"{folder / MODEL_FILE} is not a SentencePiece model; train the tokenizer again") from None
        self.folder = folder
        self.kind: str = meta["kind"]
        self.fingerprint: str = meta["fingerprint"]
        self.special_ids: dict[str, int] = dict(meta["special_ids"])
        self.vocab_size: int = self._sp.vocab_size()
        self.special_pieces: dict[str, str] = {name: self._sp.id_to_piece(i) for name, i in self.special_ids.items()}
        self._space_bytes = np.array([self._sp.piece_to_id(f"<0x{b:02X}>") for b in _SPACE.encode()], np.int32)
        self._segment = _BPE_SEGMENT if meta.get("model_type") == "bpe" and self._cuts_are_safe() else _LONGEST_SEGMENT

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Open a tokenizer folder. Raises DataError when it is missing, incomplete or changed."""
        folder = Path(path)
        meta_path, model_path = folder / META_FILE, folder / MODEL_FILE
        if not meta_path.is_file() or not model_path.is_file():
            missing = META_FILE if model_path.is_file() else MODEL_FILE
            raise DataError(
                f"no tokenizer in '{path}': {missing} is missing; make one with `refusion data tokenizer ... --out DIR`"
            )
        try:
            meta = json.loads(meta_path.read_bytes())
            known = meta["format"] == META_FORMAT and meta["version"] == META_VERSION
            complete = (
                bool(meta["kind"]) and bool(meta["fingerprint"]) and set(SPECIAL_PIECES) <= set(meta["special_ids"])
            )
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{meta_path} cannot be read; train the tokenizer again") from None
        if not known or not complete:
            raise DataError(
                f"{meta_path} is not of format {META_FORMAT} version {META_VERSION}; train the tokenizer again"
            )
        model = model_path.read_bytes()
        found = fingerprint_of(model, meta["special_ids"])
        if found != meta["fingerprint"]:
            raise DataError(
                f"{model_path} is not the file that {META_FILE} describes (fingerprint {found}, "
                f"expected {meta['fingerprint']}); restore the folder from a copy"
            )
        return cls(folder, model, meta)

    @classmethod
    def create(cls, path: str | os.PathLike[str], model: bytes, model_type: str) -> Tokenizer:
        """Write `model` (a serialized SentencePiece model with our special pieces) as a tokenizer folder and open it.

        `model_type`: "bpe" or "unigram". The folder must exist. Raises DataError if a special piece is missing.
        """
        from sentencepiece import SentencePieceProcessor

        sp: Any = SentencePieceProcessor()
        sp.LoadFromSerializedProto(model)
        special_ids: dict[str, int] = {}
        for name, piece in SPECIAL_PIECES.items():
            index = sp.piece_to_id(piece)
            if sp.id_to_piece(index) != piece or not (sp.IsControl(index) or sp.IsUnknown(index)):
                raise DataError(f"the SentencePiece model has no control piece {piece}; train it with our trainer")
            special_ids[name] = index
        meta = {
            "format": META_FORMAT,
            "version": META_VERSION,
            "kind": "sentencepiece",
            "model_type": model_type,
            "vocab_size": sp.vocab_size(),
            "special_ids": special_ids,
            "special_pieces": SPECIAL_PIECES,
            "fingerprint": fingerprint_of(model, special_ids),
        }
        folder = Path(path)
        (folder / MODEL_FILE).write_bytes(model)
        (folder / META_FILE).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        return cls(folder, model, meta)

    @property
    def info(self) -> TokenizerInfo:
        """What a dataset's index records of this tokenizer."""
        return TokenizerInfo(self.fingerprint, self.kind, self.vocab_size, dict(self.special_ids))

    @property
    def bos_id(self) -> int | None:
        return self.special_ids.get("bos")

    @property
    def eos_id(self) -> int | None:
        return self.special_ids.get("eos")

    @property
    def pad_id(self) -> int:
        return self.special_ids["pad"]

    @property
    def unk_id(self) -> int:
        return self.special_ids["unk"]

    @property
    def mask_id(self) -> int:
        return self.special_ids["mask"]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; no begin or end token is added, and no control token can come out."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """Token ids of each text, int32 [tokens] each. The result does not depend on `threads`.

        Raises DataError for a text that is not valid Unicode (a lone surrogate).
        """
        segments: list[str] = []
        ends: list[int] = []
        literal_space = False
        for text in texts:
            if _SPACE in text:
                literal_space = True
                for place, part in enumerate(text.split(_SPACE)):
                    if place:
                        segments.append(_SPACE)
                    if part:
                        segments.extend(self._cut(part))
            else:
                segments.extend(self._cut(text))
            ends.append(len(segments))
        try:
            arrays: list[np.ndarray] = self._sp.encode(segments, return_type="numpy", num_threads=max(1, threads))
        except TypeError:  # what SentencePiece says of a string that has no UTF-8
            if not any(_SURROGATE.search(text) for text in texts):
                raise
            raise DataError("a text holds a lone surrogate (half a UTF-16 pair), which is no Unicode text") from None
        if literal_space:
            arrays = [self._space_bytes if s == _SPACE else ids for s, ids in zip(segments, arrays, strict=True)]
        starts = [0, *ends][: len(ends)]
        return [
            arrays[start] if end - start == 1 else np.concatenate(arrays[start:end])
            for start, end in zip(starts, ends, strict=True)
        ]

    def decode(self, ids: Iterable[int] | np.ndarray, keep_special: bool = False) -> str:
        """Text of `ids`. Control tokens (begin, end, pad, mask) are dropped, or with `keep_special` written as pieces.

        Raises DataError for an id outside the vocabulary.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64).reshape(-1)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            bad = int(array[(array < 0) | (array >= self.vocab_size)][0])
            raise DataError(f"token id {bad} is outside the tokenizer's vocabulary of {self.vocab_size}")
        if not keep_special:
            return self._sp.decode(array.tolist())
        special = np.flatnonzero(np.isin(array, list(self.special_ids.values())))
        out: list[str] = []
        start = 0
        for place in special.tolist():
            out += [self._sp.decode(array[start:place].tolist()), self._sp.id_to_piece(int(array[place]))]
            start = place + 1
        out.append(self._sp.decode(array[start:].tolist()))
        return "".join(out)

    def piece(self, index: int) -> str:
        """The piece of one id as text, for display: spaces as spaces, bytes as `<0x0A>`, control tokens as `<mask>`."""
        return self._sp.id_to_piece(index).replace(_SPACE, " ")

    def _cut(self, text: str) -> list[str]:
        """`text` in segments whose ids, joined, are those of the whole text."""
        if len(text) <= self._segment:
            return [text]
        segments: list[str] = []
        start = 0
        while len(text) - start > self._segment:
            match = _SAFE_CUT.search(text, start + self._segment, start + _LONGEST_SEGMENT)
            # Without a space for a million characters: cut all the same, always at the same place.
            end = match.start() if match else start + _LONGEST_SEGMENT
            segments.append(text[start:end])
            start = end
            if start >= len(text):
                return segments
        segments.append(text[start:])
        return segments

    def _cuts_are_safe(self) -> bool:
        """Whether no piece reaches from a non-space over a space (true of models made by our trainer)."""
        pieces = (self._sp.id_to_piece(i) for i in range(self.vocab_size))
        return not any(_SPACE in piece.lstrip(_SPACE) for piece in pieces)


def fingerprint_of(model: bytes, special_ids: dict[str, int]) -> str:
    """Identity of a tokenizer: sha256 over the model file and the special ids."""
    digest = hashlib.sha256(model)
    digest.update(json.dumps(special_ids, sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()}"
