"""Text to token ids and back, exactly: a tokenizer in a folder, with a fingerprint.

A folder is one of: SentencePiece by our trainer (`tokenizer.model`, `refusion_tokenizer.json`), SentencePiece of others
(`tokenizer.model`), or Hugging Face (`tokenizer.json`, `tokenizer_config.json`; see hf_tokenizer.py). Ids are those
that the library gives for the whole text. A tokenizer without a mask token gets one behind its last id; `save` writes a
copy of the folder with `refusion_tokenizer.json`, which records kind, special ids, what was added, and the
fingerprint. Shards, checkpoints and exported models name the fingerprint, so that ids are never read with another
vocabulary than the one that wrote them.

No text, not even the literal `<s>` or `<mask>`, is ever encoded to a special token. SentencePiece writes a space as
U+2581; with our own models a U+2581 in the text itself is encoded by its three byte pieces, which keeps
decode(encode(text)) == text for every text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
# leaves the cache) and 100 bytes and more per character, whatever the kind. A segment ends where no piece can reach
# over its end, so the ids are those of the whole text; without such a place it is as long as it has to be.
_BPE_SEGMENT = 1500
_LONGEST_SEGMENT = 1 << 20
MASK_PIECE = "<|mask|>"
# What a Hugging Face folder has beside a SentencePiece model. Ids do not depend on it; an exported model needs it.
_HF_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True)
class TokenizerInfo:
    """What shards must remember of the tokenizer that made them."""

    fingerprint: str
    kind: str
    vocab_size: int
    special_ids: dict[str, int]


class Tokenizer:
    """A loaded tokenizer. Thread-safe; use `Tokenizer.load` or `Tokenizer.create`.

    Attributes: `folder`, `fingerprint` ("sha256:..."), `kind` ("sentencepiece" or "huggingface"), `vocab_size` (ids are
    smaller), `special_ids` and `special_pieces` (by name: pad, mask; where there are such: unk, bos, eos), `added`
    (names of those that the folder's own files do not have), `chat_template` (Jinja source, or None), `meta` (what
    `refusion_tokenizer.json` holds).
    """

    files: tuple[str, ...] = ()  # of the folder, that belong to the tokenizer

    def __init__(self, folder: Path, meta: dict[str, Any]):
        self.folder, self.meta = folder, meta
        self.kind: str = meta["kind"]
        self.fingerprint: str = meta["fingerprint"]
        self.special_ids: dict[str, int] = dict(meta["special_ids"])
        self.special_pieces: dict[str, str] = dict(meta["special_pieces"])
        self.vocab_size: int = meta["vocab_size"]
        self.added: list[str] = list(meta.get("added", []))
        self.chat_template: str | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Open a tokenizer folder. Raises DataError when it is missing, incomplete or changed."""
        from refusion_train.data.hf_tokenizer import HF_FILE, HuggingFaceTokenizer

        folder = Path(path)
        if (folder / META_FILE).is_file():
            meta = _read_meta(folder / META_FILE)
            kind = HuggingFaceTokenizer if meta["kind"] == "huggingface" else SentencePieceTokenizer
            model = _read(folder / kind.files[0], folder)
            found = fingerprint_of(model, meta["special_ids"])
            if found != meta["fingerprint"]:
                raise DataError(
                    f"{folder / kind.files[0]} is not the file that {META_FILE} describes (fingerprint {found}, "
                    f"expected {meta['fingerprint']}); restore the folder from a copy"
                )
            return kind(folder, model, meta)
        if (folder / HF_FILE).is_file():
            return HuggingFaceTokenizer.adopt(folder)
        return SentencePieceTokenizer.adopt(folder, _read(folder / MODEL_FILE, folder))

    @classmethod
    def create(cls, path: str | os.PathLike[str], model: bytes, model_type: str) -> SentencePieceTokenizer:
        """Write `model` (a serialized SentencePiece model with our special pieces) as a tokenizer folder and open it.

        `model_type`: "bpe" or "unigram". The folder must exist. Raises DataError if a special piece is missing.
        """
        sp = _processor(model, Path(path))
        special_ids: dict[str, int] = {}
        for name, piece in SPECIAL_PIECES.items():
            if not _is_control(sp, piece):
                raise DataError(f"the SentencePiece model has no control piece {piece}; train it with our trainer")
            special_ids[name] = sp.piece_to_id(piece)
        meta = new_meta("sentencepiece", model, sp.vocab_size(), special_ids, SPECIAL_PIECES, model_type=model_type)
        folder = Path(path)
        (folder / MODEL_FILE).write_bytes(model)
        _write_meta(folder, meta)
        return SentencePieceTokenizer(folder, model, meta)

    def save(self, folder: Path) -> None:
        """Write a copy of the tokenizer to a folder that is made for it; loading the copy gives the same tokenizer."""
        folder.mkdir(parents=True)
        for name in self.files:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        _write_meta(folder, self.meta)

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
        raise NotImplementedError

    def encode_flat(self, texts: Sequence[str], threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of all texts one after another, int32 [sum], and how many each has, int64 [texts]."""
        arrays = self.encode_batch(texts, threads)
        lengths = np.fromiter((len(array) for array in arrays), np.int64, len(arrays))
        return (np.concatenate(arrays) if arrays else np.empty(0, np.int32)), lengths

    def decode(self, ids: Iterable[int] | np.ndarray, keep_special: bool = False) -> str:
        """Text of `ids`. Special tokens (begin, end, pad, mask) are dropped, or with `keep_special` written as pieces.

        Raises DataError for an id outside the vocabulary.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64).reshape(-1)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            bad = int(array[(array < 0) | (array >= self.vocab_size)][0])
            raise DataError(f"token id {bad} is outside the tokenizer's vocabulary of {self.vocab_size}")
        if not keep_special:
            return self._decode_text(array)
        names = {index: self.special_pieces[name] for name, index in self.special_ids.items()}
        out: list[str] = []
        start = 0
        for place in np.flatnonzero(np.isin(array, list(names))).tolist():
            out += [self._decode_parts(array[start:place]), names[int(array[place])]]
            start = place + 1
        out.append(self._decode_parts(array[start:]))
        return "".join(out)

    def piece(self, index: int) -> str:
        """The piece of one id as text, for display: spaces as spaces, bytes as `<0x0A>`, control tokens as `<mask>`."""
        raise NotImplementedError

    def _decode_text(self, ids: np.ndarray) -> str:
        """Text without special tokens."""
        raise NotImplementedError

    def _decode_parts(self, ids: np.ndarray) -> str:
        """Text of ids that hold none of `special_ids`, other control tokens of the library written out."""
        return self._decode_text(ids)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model: of our trainer, or of others, whose Hugging Face files stay beside it in every copy."""

    files = (MODEL_FILE, *_HF_FILES)

    def __init__(self, folder: Path, model: bytes, meta: dict[str, Any]):
        super().__init__(folder, meta)
        self._sp: Any = _processor(model, folder)
        # Of our making: nothing is normalised, every byte has a piece. Others' texts are handed over as they are.
        self._faithful = _is_faithful(self._sp)
        self._space_bytes = np.array([self._sp.piece_to_id(f"<0x{b:02X}>") for b in _SPACE.encode()], np.int32)
        self._segment = _BPE_SEGMENT if meta.get("model_type") == "bpe" and self._cuts_are_safe() else _LONGEST_SEGMENT

    @classmethod
    def adopt(cls, folder: Path, model: bytes) -> SentencePieceTokenizer:
        """Open a model of others: its own begin, end, padding and mask tokens, or what stands in for them."""
        sp = _processor(model, folder)
        ids = {"unk": sp.unk_id(), "bos": sp.bos_id(), "eos": sp.eos_id(), "pad": sp.pad_id()}
        ids = {name: index for name, index in ids.items() if index >= 0}
        if "eos" not in ids:
            raise DataError(f"{folder / MODEL_FILE} has no end token; documents could not be told apart")
        ids.setdefault("pad", ids["eos"])
        size = sp.vocab_size()
        pieces = {name: sp.id_to_piece(index) for name, index in ids.items()}
        own = [piece for piece in (SPECIAL_PIECES["mask"], "[MASK]", MASK_PIECE) if _is_control(sp, piece)]
        ids["mask"], pieces["mask"] = (sp.piece_to_id(own[0]), own[0]) if own else (size, MASK_PIECE)
        if own and pieces == SPECIAL_PIECES:  # made by our trainer: the order in which it names them
            ids = {name: ids[name] for name in SPECIAL_PIECES}
        added = [] if own else ["mask"]
        return cls(folder, model, new_meta("sentencepiece", model, size + len(added), ids, pieces, added=added))

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        if not self._faithful:
            return self._encode(texts, texts, threads)
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
        arrays = self._encode(segments, texts, threads)
        if literal_space:
            arrays = [self._space_bytes if s == _SPACE else ids for s, ids in zip(segments, arrays, strict=True)]
        starts = [0, *ends][: len(ends)]
        return [
            arrays[start] if end - start == 1 else np.concatenate(arrays[start:end])
            for start, end in zip(starts, ends, strict=True)
        ]

    def piece(self, index: int) -> str:
        if index >= self._sp.vocab_size():
            return self.special_pieces["mask"]
        return self._sp.id_to_piece(index).replace(_SPACE, " ")

    def _encode(self, segments: Sequence[str], texts: Sequence[str], threads: int) -> list[np.ndarray]:
        try:
            return self._sp.encode(list(segments), return_type="numpy", num_threads=max(1, threads))
        except TypeError:  # what SentencePiece says of a string that has no UTF-8
            if not any(_SURROGATE.search(text) for text in texts):
                raise
            raise DataError("a text holds a lone surrogate (half a UTF-16 pair), which is no Unicode text") from None

    def _decode_text(self, ids: np.ndarray) -> str:
        return self._sp.decode(ids[ids < self._sp.vocab_size()].tolist())

    def _cut(self, text: str) -> list[str]:
        """`text` in segments whose ids, joined, are those of the whole text."""
        if len(text) <= self._segment:
            return [text]
        segments: list[str] = []
        start = 0
        while len(text) - start > self._segment:
            end = self._next_cut(text, start)
            segments.append(text[start:end])
            start = end
            if start >= len(text):
                return segments
        segments.append(text[start:])
        return segments

    def _next_cut(self, text: str, start: int) -> int:
        """Where the segment that begins at `start` may end: before a space, else between characters that no piece
        holds side by side, else at the end of the text."""
        first = start + self._segment
        if self._cuts_are_safe() and (match := _SAFE_CUT.search(text, first, start + _LONGEST_SEGMENT)):
            return match.start()
        pairs = self._pairs
        for place in range(first, len(text)):
            if text[place - 1 : place + 1] not in pairs:
                return place
        return len(text)

    def _cuts_are_safe(self) -> bool:
        """Whether no piece reaches from a non-space over a space (true of models made by our trainer)."""
        return not any(pair[1] == " " and pair[0] != " " for pair in self._pairs)

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """Neighbouring characters of all pieces. A text is cut exactly between two that no piece holds: no merge and
        no path of the search reaches over the cut."""
        pieces = (self._sp.id_to_piece(i).replace(_SPACE, " ") for i in range(self._sp.vocab_size()))
        return frozenset(piece[i : i + 2] for piece in pieces for i in range(len(piece) - 1))


def new_meta(
    kind: str, model: bytes, vocab_size: int, special_ids: dict[str, int], special_pieces: dict[str, str], **more: Any
) -> dict[str, Any]:
    """The contents of `refusion_tokenizer.json`. `model`: the bytes of the library's own file."""
    return {
        "format": META_FORMAT,
        "version": META_VERSION,
        "kind": kind,
        **more,
        "vocab_size": vocab_size,
        "special_ids": special_ids,
        "special_pieces": special_pieces,
        "fingerprint": fingerprint_of(model, special_ids),
    }


def files_of(kind: str) -> tuple[str, ...]:
    """The files that a saved tokenizer of a kind may have, the one that describes it first."""
    from refusion_train.data.hf_tokenizer import HuggingFaceTokenizer

    return (META_FILE, *(HuggingFaceTokenizer if kind == "huggingface" else SentencePieceTokenizer).files)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Write the tokenizer in folder `source` to a new folder `target`, complete with its description."""
    Tokenizer.load(source).save(target)


_KINDS = ("sentencepiece", "huggingface")


def fingerprint_of(model: bytes, special_ids: dict[str, int]) -> str:
    """Identity of a tokenizer: sha256 over the model file and the special ids."""
    digest = hashlib.sha256(model)
    digest.update(json.dumps(special_ids, sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()}"


def _write_meta(folder: Path, meta: dict[str, Any]) -> None:
    (folder / META_FILE).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _read(path: Path, folder: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        raise DataError(
            f"no tokenizer in '{folder}': {path.name} is missing; make one with `refusion data tokenizer ... --out DIR`"
        ) from None


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_bytes())
        known = meta["format"] == META_FORMAT and meta["version"] == META_VERSION
        complete = meta["kind"] in _KINDS and bool(meta["fingerprint"]) and {"pad", "mask"} <= set(meta["special_ids"])
        complete = complete and "vocab_size" in meta and set(meta["special_ids"]) == set(meta["special_pieces"])
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} cannot be read; train the tokenizer again") from None
    if not known or not complete:
        raise DataError(f"{path} is not of format {META_FORMAT} version {META_VERSION}; train the tokenizer again")
    return meta


def _processor(model: bytes, folder: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    sp: Any = SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(model)
    except RuntimeError:
        raise DataError(f"{folder / MODEL_FILE} is not a SentencePiece model; train the tokenizer again") from None
    return sp


def _is_control(sp: Any, piece: str) -> bool:
    """Whether the model has this piece and no text can become it."""
    index = sp.piece_to_id(piece)
    return sp.id_to_piece(index) == piece and (sp.IsControl(index) or sp.IsUnknown(index))


def _is_faithful(sp: Any) -> bool:
    """Whether decoding gives back every text: all bytes have pieces, and nothing is normalised or added."""
    probe = "  \ufb01 \t\n a\u0301  \uff21 "
    return (
        all(sp.IsByte(sp.piece_to_id(f"<0x{byte:02X}>")) for byte in range(256))
        and sp.normalize(probe).replace(_SPACE, " ") == probe
    )
