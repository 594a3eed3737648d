"""The tokenizer of an exported folder with a unigram vocabulary: SentencePiece itself.

Of equally probable segmentations, which repeated characters often have, SentencePiece takes one by the rounding of
its sums; `tokenizer.json` may take another one. This class, loaded with `trust_remote_code=True`, gives the ids of
the training data always.

This file is copied into every exported folder: it imports transformers, sentencepiece and its neighbour only.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from sentencepiece import SentencePieceProcessor
from transformers import PreTrainedTokenizer

from .tokenization_refusion import SentencePieceText

_SPACE = "\u2581"  # SentencePiece writes a space so


class ReFusionUnigramTokenizer(SentencePieceText, PreTrainedTokenizer):  # type: ignore[misc]
    """Unigram vocabularies: ids by SentencePiece, from tokenizer.model."""

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012 - as transformers has it

    def __init__(self, vocab_file: str, add_bos_token: bool = True, **options: Any) -> None:
        self.vocab_file = vocab_file
        self.add_bos_token = add_bos_token
        self.sp: Any = SentencePieceProcessor(model_file=vocab_file)
        # Spaces in the names of pieces are spaces, as in tokenizer.json.
        self.pieces = [self.sp.id_to_piece(i).replace(_SPACE, " ") for i in range(self.sp.vocab_size())]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        super().__init__(add_bos_token=add_bos_token, **options)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        return {**self.ids, **self.added_tokens_encoder}

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: list[int] | None = None) -> list:
        begin = [self.bos_token_id] if self.add_bos_token else []
        return begin + token_ids_0 + ([] if token_ids_1 is None else begin + token_ids_1)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        name = (f"{filename_prefix}-" if filename_prefix else "") + "tokenizer.model"
        target = os.path.join(save_directory, name)
        if os.path.abspath(self.vocab_file) != os.path.abspath(target):
            shutil.copyfile(self.vocab_file, target)
        return (target,)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._decode([self.ids[token] for token in tokens])

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        """A U+2581 of the text itself is not a space: it becomes its bytes, as in training."""
        found: list[str] = []
        for place, part in enumerate(text.split(_SPACE)):
            if place:
                found += [f"<0x{byte:02X}>" for byte in _SPACE.encode()]
            found += [self.pieces[i] for i in self.sp.encode(part)]
        return found

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.pieces[index]
