"""The tokenizer files of a Hugging Face folder: how many tokens they know, a mask token added, and copies of them.

Nothing here runs a folder's code. A tokenizer of our own (SentencePiece, see `data.tokenizer`) is one of the cases.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_train.data.tokenizer import META_FILE, Tokenizer
from refusion_train.errors import ConfigError, DataError

JSON, CONFIG, SENTENCEPIECE, TEMPLATE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
FILES = (
    JSON, CONFIG, SENTENCEPIECE, TEMPLATE, META_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """What the files of a folder say. rows: one more than the highest id; text: token -> id of all added tokens;
    mask_id: of a token that is declared as the mask token."""

    rows: int
    text: dict[str, int]
    mask_id: int | None


def inspect(folder: Path) -> Known | None:
    """What is known of the tokenizer in a folder; None if there is none. Raises DataError for damaged files."""
    if (folder / META_FILE).is_file() and (folder / SENTENCEPIECE).is_file():
        own = Tokenizer.load(folder)
        return Known(own.vocab_size, {own.piece(i): i for i in own.special_ids.values()}, own.special_ids.get("mask"))
    if (folder / JSON).is_file():
        return _inspect_json(folder)
    if (folder / SENTENCEPIECE).is_file():
        return _inspect_sentencepiece(folder)
    return None


def _inspect_json(folder: Path) -> Known:
    from tokenizers import Tokenizer as Fast

    try:
        tokenizer = Fast.from_file(str(folder / JSON))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{folder / JSON} cannot be read ({_line(error)}); fetch it again") from None
    added = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
    rows = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    mask = _text_of(_read(folder / CONFIG).get("mask_token"))
    return Known(rows, added, tokenizer.token_to_id(mask) if mask is not None else None)


def _inspect_sentencepiece(folder: Path) -> Known:
    from sentencepiece import SentencePieceProcessor

    model: Any = SentencePieceProcessor()
    try:
        model.Load(str(folder / SENTENCEPIECE))
    except (OSError, RuntimeError):
        raise DataError(f"{folder / SENTENCEPIECE} is not a SentencePiece model; fetch it again") from None
    added = {text: int(index) for text, index in _read(folder / "added_tokens.json").items()}
    return Known(max([model.vocab_size(), *(index + 1 for index in added.values())]), added, None)


def check_vocabulary(known: Known | None, rows: int, folder: Path) -> None:
    """Refuse a tokenizer with ids for which the model has no rows. Raises DataError."""
    if known is not None and known.rows > rows:
        raise DataError(
            f"'{folder}': the tokenizer has ids up to {known.rows - 1}, the model only {rows} rows of vocabulary; "
            "they do not belong together"
        )


def declare_mask(folder: Path, known: Known, text: str, origin: Path | None = None) -> int:
    """Declare `text` as the mask token of the tokenizer in `folder`, adding it behind all others if it is not there.

    origin: the folder that messages name, if `folder` is a copy. Returns its id. Raises ConfigError if the text is
    empty or an ordinary token, or if these files cannot take another one.
    """
    origin = origin or folder
    if not text.strip():
        raise ConfigError(f"--mask-token={text!r} is empty; give a text that stands nowhere else, for example <|mask|>")
    if not (folder / JSON).is_file() and not (folder / META_FILE).is_file():
        return _mask_of_sentencepiece(folder, known, text, origin)
    if text not in known.text and not (folder / JSON).is_file():
        raise ConfigError(f"--mask-token: the tokenizer in '{origin}' has no {JSON} to which a token could be added")
    content = _read(folder / JSON)
    new = text not in known.text
    index = known.rows if new else known.text[text]
    if new and text in _vocabulary(content):
        raise ConfigError(f"--mask-token {text!r} is an ordinary token of '{origin}'; give a text that is none")
    if new:
        content.setdefault("added_tokens", []).append(
            {"id": index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        )  # fmt: skip
        (folder / JSON).write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")
    config = {**_read(folder / CONFIG), "mask_token": text}
    if new and "added_tokens_decoder" in config:
        described = {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        config["added_tokens_decoder"] = {**config["added_tokens_decoder"], str(index): {**described, "special": True}}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    found = _inspect_json(folder).text.get(text) if new else index
    if found != index:
        raise ConfigError(f"--mask-token: {origin / JSON} has unused ids before {found}; add the token there yourself")
    return index


def _mask_of_sentencepiece(folder: Path, known: Known, text: str, origin: Path) -> int:
    """Id of the mask token that data made with this SentencePiece model has: its file takes no other, so it is
    recorded beside it, in our own."""
    own = Tokenizer.load(folder)
    index, piece = own.mask_id, own.special_pieces["mask"]
    if text != piece:
        raise ConfigError(f"--mask-token={text}: that of the SentencePiece model in '{origin}' is {piece}; give that")
    if "mask" in own.added and index < known.rows:
        raise ConfigError(
            f"--mask-token: id {index} behind the SentencePiece model in '{origin}' is a token of added_tokens.json; "
            f"give a folder with {JSON}"
        )
    own.save(folder / "own")
    (folder / "own" / META_FILE).rename(folder / META_FILE)
    shutil.rmtree(folder / "own")
    return index


def older_class(folder: Path) -> None:
    """Name the tokenizer's class in tokenizer_config.json as transformers 4 and 5 both know it, with what 5 implies."""
    config = _read(folder / CONFIG)
    if config.get("tokenizer_class") == "TokenizersBackend":  # the name that 5 gave to the same class
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config.setdefault("model_input_names", ["input_ids", "attention_mask"])
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def chat_templates(folder: Path) -> str:
    """The source of all chat templates in a folder, for a look at what stands in them; empty if there is none."""
    file = folder / TEMPLATE
    try:
        own = file.read_text("utf-8") if file.is_file() else ""
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({_line(error)}); fetch it again") from None
    found = _read(folder / CONFIG).get("chat_template") or ""
    several = [str(entry.get("template")) for entry in found if isinstance(entry, dict)]
    return "\n".join([own, *([found] if isinstance(found, str) else several)])


def copy_files(source: Path, target: Path, without: tuple[str, ...] = ()) -> list[str]:
    """Copy whatever tokenizer files are in `source`; returns their names."""
    names = [name for name in FILES if (source / name).is_file() and name not in without]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def _vocabulary(content: dict[str, Any]) -> set[str]:
    vocabulary = content.get("model", {}).get("vocab", {})
    return set(vocabulary) if isinstance(vocabulary, dict) else {entry[0] for entry in vocabulary}


def _text_of(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read ({_line(error)}); fetch it again") from None
    return content if isinstance(content, dict) else {}


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
