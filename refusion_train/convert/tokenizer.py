"""Our SentencePiece tokenizer as the `tokenizers` file that AutoTokenizer loads without this package.

The same ids for every text: the pieces keep their ids and SentencePiece's order of merges, a space is a space (not
U+2581, which would be confused with one in the text), unknown characters become bytes, and the literal text of a
control token stays text (`split_special_tokens`). Only the begin token is put in front, unless
`add_special_tokens=False`. Two corners where tokenizer.json cannot follow SentencePiece have classes of their own,
for `trust_remote_code=True`: see refusion_train.hf.tokenization_refusion.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import refusion_train.hf
from refusion_train.data.tokenizer import META_FILE, MODEL_FILE, Tokenizer
from refusion_train.errors import DataError

_SPACE = "\u2581"
_BPE_CLASS = "tokenization_refusion.ReFusionTokenizer"
_UNIGRAM_CLASS = "tokenization_refusion_unigram.ReFusionUnigramTokenizer"


def write_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write all files of the tokenizer: tokenizers', our own, and the code. `longest`: positions of the model.

    Raises DataError for a tokenizer that cannot be written exactly.
    """
    pieces = _Pieces(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(_pipeline(tokenizer, pieces), ensure_ascii=False) + "\n", "utf-8")
    special = tokenizer.special_pieces
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "auto_map": {"AutoTokenizer": [_UNIGRAM_CLASS, None] if pieces.unigram else [None, _BPE_CLASS]},
        **{f"{name}_token": special[name] for name in ("bos", "eos", "pad", "unk", "mask") if name in special},
        "add_bos_token": "bos" in special,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": longest,
        "padding_side": "left",
        "split_special_tokens": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    code = Path(refusion_train.hf.__path__[0])
    modules = [_BPE_CLASS, _UNIGRAM_CLASS] if pieces.unigram else [_BPE_CLASS]
    for file in (*(code / f"{name.partition('.')[0]}.py" for name in modules),
                 tokenizer.folder / MODEL_FILE, tokenizer.folder / META_FILE):  # fmt: skip
        shutil.copyfile(file, folder / file.name)


class _Pieces:
    """The vocabulary of a SentencePiece model with spaces as spaces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from sentencepiece import SentencePieceProcessor

        model: Any = SentencePieceProcessor()
        model.LoadFromSerializedProto((tokenizer.folder / MODEL_FILE).read_bytes())
        self.unigram = json.loads((tokenizer.folder / META_FILE).read_bytes()).get("model_type") == "unigram"
        count = model.vocab_size()
        self.text: list[str] = [model.id_to_piece(i).replace(_SPACE, " ") for i in range(count)]
        self.score: list[float] = [model.get_score(i) for i in range(count)]
        # Pieces that text can become; the others are control tokens and bytes.
        self.normal = [i for i in range(count) if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))]
        if len(set(self.text)) != count:
            raise DataError(
                f"the tokenizer in {tokenizer.folder} has two pieces of the same text; it cannot be exported"
            )


def _pipeline(tokenizer: Tokenizer, pieces: _Pieces) -> dict[str, Any]:
    """The contents of tokenizer.json."""
    special = sorted((index, tokenizer.special_pieces[name]) for name, index in tokenizer.special_ids.items())
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": piece, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for i, piece in special
        ],
        "normalizer": None,
        "pre_tokenizer": _apart(tokenizer) if pieces.unigram else None,
        "post_processor": _begin_token(tokenizer),
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _unigram(tokenizer, pieces) if pieces.unigram else _bpe(tokenizer, pieces),
    }  # fmt: skip


def _bpe(tokenizer: Tokenizer, pieces: _Pieces) -> dict[str, Any]:
    """SentencePiece merges the pair that makes the piece of highest score; so the merges stand in order of score."""
    known = {pieces.text[i] for i in pieces.normal}
    merges = [
        (-pieces.score[i], cut, pieces.text[i][:cut], pieces.text[i][cut:])
        for i in pieces.normal
        for cut in range(1, len(pieces.text[i]))
        if pieces.text[i][:cut] in known and pieces.text[i][cut:] in known
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": tokenizer.special_pieces["unk"],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {text: i for i, text in enumerate(pieces.text)},
        "merges": [[left, right] for _, _, left, right in sorted(merges, key=lambda merge: merge[:2])],
    }


def _unigram(tokenizer: Tokenizer, pieces: _Pieces) -> dict[str, Any]:
    """Pieces with their scores; what text must not become has the lowest, and `_apart` keeps text from it."""
    lowest = min(pieces.score[i] for i in pieces.normal)
    normal = set(pieces.normal)
    return {
        "type": "Unigram",
        "unk_id": tokenizer.unk_id,
        "vocab": [[text, pieces.score[i] if i in normal else lowest] for i, text in enumerate(pieces.text)],
        "byte_fallback": True,
    }


def _apart(tokenizer: Tokenizer) -> dict[str, Any]:
    """Cuts literal names of control and byte tokens behind their first character, so that they are not those tokens.

    Only unigram models need it: BPE reaches a token through merges, and no merge makes these.
    """
    names = [re.escape(piece) for piece in tokenizer.special_pieces.values()] + ["<0x[0-9A-F]{2}>"]
    first = {name[0] for name in names}
    assert first == {"<"}, f"names of control tokens begin with {first}"
    rest = "|".join(name[1:] for name in names)
    return {"type": "Split", "pattern": {"Regex": f"<(?={rest})"}, "behavior": "Isolated", "invert": False}


def _begin_token(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Puts the begin token before a text, as documents begin in training."""
    if tokenizer.bos_id is None:
        return None
    piece = tokenizer.special_pieces["bos"]
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    begin = {"SpecialToken": {"id": piece, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text[0]],
        "pair": [begin, text[0], begin, text[1]],
        "special_tokens": {piece: {"id": piece, "ids": [tokenizer.bos_id], "tokens": [piece]}},
    }
