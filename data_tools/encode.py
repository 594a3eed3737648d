"""A chunk of a corpus to arrays of tokens: what each worker process does, and nothing that depends on another chunk."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from data_tools.chat import ChatTemplate
from data_tools.chunks import Chunk
from data_tools.documents import MAX_DOCUMENT_BYTES, Broken, Fields
from data_tools.records import Item, items_of
from refusion_train.data.hf_tokenizer import FastEncoder, HuggingFaceTokenizer, fast_is_installed
from refusion_train.data.shard_writer import token_dtype
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import ConfigError, DataError

DIGEST_BYTES = 16
# With a fast encoder: all documents of the first chunk are compared with the reference, then one in so many chunks.
_CHECK_EVERY = 8
_CHECK_CHARACTERS = 1 << 18

EncoderName = Literal["auto", "fast", "reference"]
FlatEncoder = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Recipe:
    """All that decides what becomes of a document. `tokenizer`: folder; `chat_template`: its source, if not the
    tokenizer's own; `val_fraction`: share of validation; `min_tokens`, `max_tokens`: shorter and longer documents
    (begin and end tokens counted) are left out; `digests`: hash each text."""

    tokenizer: str
    fields: Fields = field(default_factory=Fields)
    encoder: EncoderName = "auto"
    chat_template: str | None = None
    val_fraction: float = 0.0
    min_tokens: int = 0
    max_tokens: int | None = None
    digests: bool = False
    limit: int = MAX_DOCUMENT_BYTES


@dataclass
class Encoded:
    """The documents of a chunk, one after another; arrays over documents unless said otherwise."""

    tokens: np.ndarray  # uint16 or uint32 [sum of lengths]
    lengths: np.ndarray  # int32
    prompts: np.ndarray  # int32
    text_bytes: np.ndarray  # int64
    validation: np.ndarray  # bool: belongs to the validation part
    sources: np.ndarray  # int32: number of the input that was named
    digests: np.ndarray  # uint8 [documents, 16], or [0, 16]
    problems: list[Broken] = field(default_factory=list)
    too_short: int = 0
    too_long: int = 0
    checked: int = 0  # documents compared with the reference encoder

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, kept: np.ndarray) -> Encoded:
        """The documents where `kept` (bool [documents]) is true, all else as it is."""
        if kept.all():
            return self
        arrays = {name: getattr(self, name)[kept] for name in _PER_DOCUMENT}
        digests = self.digests[kept] if len(self.digests) else self.digests
        tokens = self.tokens[np.repeat(kept, self.lengths)]
        return Encoded(tokens, **arrays, digests=digests, problems=self.problems, too_short=self.too_short,
                       too_long=self.too_long, checked=self.checked)  # fmt: skip


_PER_DOCUMENT = ("lengths", "prompts", "text_bytes", "validation", "sources")


class ChunkEncoder:
    """Encodes chunks by a recipe. Raises ConfigError for an encoder or a chat template that is not there."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.tokenizer = Tokenizer.load(recipe.tokenizer)
        self._fast = choose_fast(self.tokenizer, recipe.encoder)
        self._chat = chat_of(recipe, self.tokenizer)
        self._dtype = token_dtype(self.tokenizer.vocab_size)

    def encode(self, chunk: Chunk) -> Encoded:
        """Raises DataError when the fast encoder and the reference differ."""
        problems: list[Broken] = []
        items = list(self._good_items(chunk, problems))
        texts = [text for item in items for text in item.texts]
        checked = 0
        if self._chat is None:
            tokens, lengths = self._encode_texts(texts)
            checked = self._check(chunk.number, items, tokens, lengths)
            tokens, lengths, prompts = self._assemble(tokens, lengths, len(self.recipe.fields.roots))
        else:
            tokens, lengths, prompts = self._encode_chats(self._chat, items)
        raw = ["\0".join(item.texts).encode() for item in items] if self._needs_bytes(texts) else None
        encoded = Encoded(
            tokens.astype(self._dtype, copy=False),
            lengths.astype(np.int32, copy=False),
            prompts.astype(np.int32, copy=False),
            self._text_bytes(items),
            self._sides(raw, len(items)),
            np.fromiter((item.source for item in items), np.int32, len(items)),
            self._digests(raw),
            problems,
            checked=checked,
        )
        return self._filtered(encoded)

    def _good_items(self, chunk: Chunk, problems: list[Broken]) -> Iterator[Item]:
        """Documents with text; all else, also what is only to be noted, goes to `problems`."""
        for item in items_of(chunk, self.recipe.fields, self.recipe.limit, self._chat):
            if isinstance(item, Broken):
                problems.append(item)
            elif not item.texts[-1]:
                problems.append(Broken(item.file, item.line, "empty document", "empty"))
            else:
                yield item

    def _encode_texts(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return self._fast.encode_flat(texts) if self._fast else self.tokenizer.encode_flat(texts)

    def _assemble(
        self, tokens: np.ndarray, lengths: np.ndarray, parts: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Begin and end tokens put around each document of `parts` texts; tokens, lengths and prompt lengths."""
        begin, end = self.tokenizer.bos_id is not None, self.tokenizer.eos_id is not None
        per_text = lengths.reshape(-1, parts)
        whole = per_text.sum(axis=1) + begin + end
        prompts = per_text[:, 0] + begin if parts == 2 else np.zeros(len(whole), np.int64)
        out = np.empty(int(whole.sum()), self._dtype)
        ends = np.cumsum(whole)
        of_text = np.ones(len(out), bool)
        if begin:
            out[ends - whole] = self.tokenizer.bos_id
            of_text[ends - whole] = False
        if end:
            out[ends - 1] = self.tokenizer.eos_id
            of_text[ends - 1] = False
        out[of_text] = tokens
        return out, whole, prompts

    def _encode_chats(self, chat: ChatTemplate, items: list[Item]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As the template writes them, without further begin and end tokens. Prompt and response are encoded apart,
        as they are when a model is asked."""
        parts = [[list(chat.parts(text)) for text in item.texts] for item in items]
        flat = [part for document in parts for text in document for part in text]
        tokens, lengths = self._encode_texts([part for part in flat if isinstance(part, str)])
        texts = iter(np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else [])
        arrays = [next(texts) if isinstance(part, str) else np.array([part], np.int32) for part in flat]
        sizes = iter([len(array) for array in arrays])
        per_text = [[sum(itertools.islice(sizes, len(text))) for text in document] for document in parts]
        whole = np.array([sum(sizes) for sizes in per_text], np.int64)
        prompts = np.array([sizes[0] for sizes in per_text], np.int64)
        return (np.concatenate(arrays) if arrays else np.empty(0, np.int32)), whole, prompts

    def _needs_bytes(self, texts: list[str]) -> bool:
        return bool(texts) and (self.recipe.val_fraction > 0 or self.recipe.digests)

    def _text_bytes(self, items: list[Item]) -> np.ndarray:
        sizes = (sum(len(t) if t.isascii() else len(t.encode()) for t in item.texts) for item in items)
        return np.fromiter(sizes, np.int64, len(items))

    def _sides(self, raw: list[bytes] | None, count: int) -> np.ndarray:
        fraction = self.recipe.val_fraction
        if raw is None or not fraction:
            return np.zeros(count, bool)
        return np.fromiter((goes_to_validation(text, fraction) for text in raw), bool, count)

    def _digests(self, raw: list[bytes] | None) -> np.ndarray:
        if raw is None or not self.recipe.digests:
            return np.empty((0, DIGEST_BYTES), np.uint8)
        joined = b"".join(hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest() for text in raw)
        return np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)

    def _filtered(self, encoded: Encoded) -> Encoded:
        short = encoded.lengths < self.recipe.min_tokens
        longest = self.recipe.max_tokens
        long = encoded.lengths > longest if longest is not None else np.zeros(len(encoded), bool)
        encoded.too_short, encoded.too_long = int(short.sum()), int((long & ~short).sum())
        return encoded.take(~(short | long))

    def _check(self, number: int, items: list[Item], tokens: np.ndarray, lengths: np.ndarray) -> int:
        """Compare documents with the reference encoder: of the first chunk all, then a sample chosen by number."""
        if self._fast is None or not items or (number and number % _CHECK_EVERY):
            return 0
        per_item = len(self.recipe.fields.roots)
        draw = int.from_bytes(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest(), "little")
        chosen = [draw % len(items)] if number else range(len(items))
        starts = np.concatenate(([0], np.cumsum(lengths)))
        for place in chosen:
            for text in range(place * per_item, (place + 1) * per_item):
                item = items[place]
                content = item.texts[text % per_item]
                if number and len(content) > _CHECK_CHARACTERS:
                    continue
                reference = self.tokenizer.encode_batch([content])[0]
                if not np.array_equal(reference, tokens[starts[text] : starts[text + 1]]):
                    raise DataError(
                        f"{item.file}:{item.line}: {self._fast.version} gives other ids than the tokenizers library; "
                        "use --encoder reference"
                    )
        return len(chosen)


def choose_fast(tokenizer: Tokenizer, encoder: EncoderName) -> FastEncoder | None:
    """The fast encoder if it is wanted and there; None for the reference."""
    if encoder not in ("auto", "fast", "reference"):
        raise ConfigError(f"encoder={encoder} is not one of auto, fast, reference")
    if encoder == "reference" or not isinstance(tokenizer, HuggingFaceTokenizer):
        if encoder == "fast":
            raise ConfigError("encoder=fast is for tokenizer.json only; leave out --encoder")
        return None
    if not fast_is_installed():
        if encoder == "fast":
            raise ConfigError("encoder=fast needs fastokens; pip install 'refusion-train[fast]'")
        return None
    try:
        return FastEncoder(tokenizer)
    except DataError:
        if encoder == "fast":
            raise
        return None


def encoder_name(tokenizer: Tokenizer, fast: FastEncoder | None) -> str:
    """Library and version, for the index."""
    import importlib.metadata

    library = {"sentencepiece": "sentencepiece", "huggingface": "tokenizers"}[tokenizer.kind]
    return fast.version if fast else f"{library} {importlib.metadata.version(library)}"


def chat_of(recipe: Recipe, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template that the recipe asks for."""
    if recipe.fields.messages is None:
        return None
    source = recipe.chat_template or tokenizer.chat_template
    if source is None:
        raise ConfigError(f"the tokenizer in '{tokenizer.folder}' has no chat template; give one by --chat-template")
    special = {piece: tokenizer.special_ids[name] for name, piece in tokenizer.special_pieces.items()}
    control = {**special, **getattr(tokenizer, "control_tokens", {})}
    return ChatTemplate(source, control, tokenizer.special_pieces)


def goes_to_validation(text: bytes, fraction: float) -> bool:
    """Whether a document with this UTF-8 text belongs to the validation part: a function of the text alone."""
    place = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return place < fraction * 2.0**64


# ---------------------------------------------------------------------------------------------- in a worker process

_worker: ChunkEncoder | None = None


def start_worker(recipe: Recipe) -> None:
    """Make the encoder of this process, which ends when its parent does, however that ended."""
    import multiprocessing
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked as well, and ends us
    # One thread each: the workers are the parallelism.
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    global _worker
    _worker = ChunkEncoder(recipe)


def encode_in_worker(chunk: Chunk) -> Encoded:
    """`ChunkEncoder.encode` of this process's encoder."""
    assert _worker is not None, "the worker was not started"
    return _worker.encode(chunk)
