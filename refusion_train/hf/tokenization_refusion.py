"""The tokenizer of an exported folder, exact also where a text is not whole.

`tokenizer.json` alone gives the same ids and, for whole characters, the same text. What it does differently is a run
of byte tokens that is not valid UTF-8 (a response cut within a character): there it replaces every byte of the run,
also those of whole characters. This class, loaded with `trust_remote_code=True`, replaces only the bytes that belong
to no character, as SentencePiece does.

This file is copied into every exported folder: it imports transformers only.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

from transformers import PreTrainedTokenizerFast

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UNKNOWN_SURFACE = " \u2047 "  # what SentencePiece writes for the unknown token

codecs.register_error("refusion_bytes", lambda error: ("\ufffd", error.start + 1))  # type: ignore[attr-defined]


class SentencePieceText:
    """Text of token ids as SentencePiece writes it; a mixin before the class of transformers."""

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, *_: Any, **__: Any) -> str:
        """Text of token ids; control tokens are dropped, or written as they are called."""
        own: Any = self
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        special = set(own.all_special_ids)
        parts: list[str] = []
        run = bytearray()
        for token, piece in zip(ids, own.convert_ids_to_tokens(ids), strict=True):
            match = _BYTE.fullmatch(piece)
            if match and token not in special:
                run.append(int(match[1], 16))
                continue
            parts.append(run.decode("utf-8", "refusion_bytes"))
            run.clear()
            if token not in special or not skip_special_tokens:
                parts.append(piece)
            elif token == own.unk_token_id:
                parts.append(_UNKNOWN_SURFACE)
        parts.append(run.decode("utf-8", "refusion_bytes"))
        return "".join(parts)


class ReFusionTokenizer(SentencePieceText, PreTrainedTokenizerFast):  # type: ignore[misc]
    """BPE vocabularies: ids by tokenizer.json, text as by SentencePiece."""
