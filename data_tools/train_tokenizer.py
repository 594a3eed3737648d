"""A corpus to a tokenizer folder: SentencePiece with byte fallback and exact round trips.

Text is not normalised, and spaces, tabs and newlines are kept; begin, end, pad and mask tokens are CONTROL pieces.
The result is a function of the corpus and the options: what is sampled from a large corpus is chosen by hash, and
the number of trainer threads, on which unigram's sums depend, is fixed.
"""

from __future__ import annotations

import hashlib
import io
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_tools.corpus import Corpus
from data_tools.documents import Broken, find_files
from data_tools.output import new_folder
from data_tools.progress import CorpusProgress, Spinner
from refusion_train.data.tokenizer import META_FILE, MODEL_FILE, SPECIAL_PIECES, Tokenizer
from refusion_train.errors import ConfigError, DataError

# The trainer sees texts in chunks, because it keeps and counts whole lines: cut before a newline, else a space.
_CHUNK, _LONGEST_CHUNK = 2000, 4000
_TRAINER_THREADS = 8
_EXAMPLES = 20
# Pieces beside the learned ones: 256 bytes and the special pieces.
_FIXED_PIECES = 256 + len(SPECIAL_PIECES)


@dataclass
class TokenizerReport:
    """What was trained on what. Sizes in UTF-8 bytes; `examples`: the first broken lines."""

    tokenizer: Tokenizer
    documents: int
    text_bytes: int
    sampled_bytes: int
    broken: int
    examples: list[Broken] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> str:
        """Lines to print at the end."""
        sampled = "" if self.sampled_bytes == self.text_bytes else f", {self.sampled_bytes / 1e6:,.1f} MB of them used"
        lines = [
            f"{self.tokenizer.folder}: {self.tokenizer.vocab_size:,} pieces from {self.documents:,} documents, "
            f"{self.text_bytes / 1e6:,.1f} MB{sampled}, in {self.seconds:.1f} s ({self.tokenizer.fingerprint[:19]})"
        ]
        if self.broken:
            lines.append(f"{self.broken:,} broken lines were skipped:")
            lines += [f"  {line}" for line in self.examples]
        return "\n".join(lines)


def train_tokenizer(
    inputs: Sequence[str],
    out: str,
    vocab_size: int,
    model_type: Literal["bpe", "unigram"] = "bpe",
    *,
    sample_bytes: int = 64 << 20,
    character_coverage: float = 0.9995,
    split_digits: bool = True,
    text_field: str = "text",
    strict: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> TokenizerReport:
    """Train a tokenizer on `inputs` (files, folders, globs) and write it as folder `out`.

    `vocab_size`: all pieces, 256 byte pieces and 5 special ones included; `sample_bytes`: at most so many bytes of
    text are used, chunks spread evenly over the corpus; `character_coverage`: rarer characters are left to the byte
    pieces; `split_digits`: every digit is a piece of its own. `strict`: a broken line is an error.
    Raises ConfigError (options), DataError (inputs, output).
    """
    if model_type not in ("bpe", "unigram"):
        raise ConfigError(f"model_type={model_type} is not one of bpe, unigram")
    if vocab_size <= _FIXED_PIECES:
        raise ConfigError(f"--vocab-size {vocab_size} must be more than the {_FIXED_PIECES} byte and special pieces")
    if sample_bytes < 1:
        raise ConfigError(f"sample_bytes={sample_bytes} must be at least 1")
    begun = time.monotonic()
    corpus = Corpus(find_files(inputs), text_field)
    with new_folder(out, overwrite, _is_tokenizer) as folder:
        sample = _Sample(sample_bytes)
        counts = _read(corpus, sample, strict, progress)
        chunks = sample.chunks()
        if not chunks:
            raise DataError(_nothing(counts, corpus))
        size = sum(len(chunk.encode()) for chunk in chunks)
        with Spinner(f"Training {model_type} with {vocab_size:,} pieces on {size / 1e6:,.1f} MB", progress):
            model = _train(chunks, vocab_size, model_type, character_coverage, split_digits)
        tokenizer = Tokenizer.create(folder, model, model_type)
        _check_round_trip(tokenizer, chunks)
    tokenizer.folder = Path(out)
    return TokenizerReport(
        tokenizer=tokenizer,
        documents=counts.documents,
        text_bytes=counts.text_bytes,
        sampled_bytes=size if sample.cut else counts.text_bytes,
        broken=counts.broken,
        examples=counts.examples,
        seconds=time.monotonic() - begun,
    )


@dataclass
class _Counts:
    documents: int = 0
    text_bytes: int = 0
    broken: int = 0
    examples: list[Broken] = field(default_factory=list)


def _read(corpus: Corpus, sample: _Sample, strict: bool, progress: bool) -> _Counts:
    counts = _Counts()
    with CorpusProgress("Reading", corpus.total_bytes, progress) as bar:
        for item in corpus:
            if isinstance(item, Broken):
                if strict:
                    raise DataError(f"{item}; leave out --strict to skip such lines")
                counts.broken += 1
                if len(counts.examples) < _EXAMPLES:
                    counts.examples.append(item)
            elif item.text:
                counts.documents += 1
                counts.text_bytes += len(item.text.encode())
                for chunk in chunks_of(item.text):
                    sample.add(chunk)
            bar.update(corpus.position, counts.documents)
        bar.update(corpus.total_bytes, counts.documents, last=True)
    return counts


def chunks_of(text: str) -> Iterator[str]:
    """`text` in chunks of about 2000 characters, cut before a newline, or else before a space."""
    start = 0
    while len(text) - start > _LONGEST_CHUNK:
        for stop in ("\n", " "):
            end = text.find(stop, start + _CHUNK, start + _LONGEST_CHUNK)
            if end >= 0:
                break
        else:
            end = start + _LONGEST_CHUNK
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


class _Sample:
    """An even sample of chunks of bounded size: those with the smallest hashes of their number in the corpus."""

    def __init__(self, limit: int):
        self._limit = limit
        self._kept: list[tuple[int, int, str]] = []  # hash, number, chunk
        self._bytes = self._number = 0
        self._threshold = 1 << 64
        self.cut = False

    def add(self, chunk: str) -> None:
        number = self._number
        self._number += 1
        place = int.from_bytes(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest(), "little")
        if place >= self._threshold:
            return
        self._kept.append((place, number, chunk))
        self._bytes += len(chunk.encode())
        if self._bytes > self._limit + self._limit // 4:
            self._trim()

    def chunks(self) -> list[str]:
        """The sample, in the order of the corpus."""
        if self._bytes > self._limit:
            self._trim()
        return [chunk for _, _, chunk in sorted(self._kept, key=lambda item: item[1])]

    def _trim(self) -> None:
        """Keep the chunks of smallest hash that fit the limit, but at least one."""
        self._kept.sort()
        total = 0
        for count, (place, _, chunk) in enumerate(self._kept):
            size = len(chunk.encode())
            if total + size > self._limit and count:
                self._threshold, self._bytes, self.cut = place, total, True
                del self._kept[count:]
                return
            total += size


def _train(chunks: list[str], vocab_size: int, model_type: str, coverage: float, split_digits: bool) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "model_type": model_type,
        "character_coverage": coverage,
        "split_digits": split_digits,
        "byte_fallback": True,
        # Nothing is lost or added, so that decoding gives the text back.
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "required_chars": "\n",
        "pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3,
        "pad_piece": SPECIAL_PIECES["pad"], "unk_piece": SPECIAL_PIECES["unk"],
        "bos_piece": SPECIAL_PIECES["bos"], "eos_piece": SPECIAL_PIECES["eos"],
        "control_symbols": [SPECIAL_PIECES["mask"]],
        "max_sentence_length": 16 * _LONGEST_CHUNK,
        "num_threads": _TRAINER_THREADS,
        "minloglevel": 2,
    }  # fmt: skip
    # The trainer skips lines with NUL, and would take U+2581 for a space.
    sentences = (chunk.replace("\0", "").replace("\u2581", "") for chunk in chunks)
    try:
        SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **options)
    except RuntimeError as error:
        raise _explain(str(error), vocab_size) from None
    return model.getvalue()


def _explain(message: str, vocab_size: int) -> Exception:
    """The trainer's complaint as an error that says what to change."""
    if match := re.search(r"Please set it to a value <= (\d+)", message):
        return ConfigError(
            f"--vocab-size {vocab_size} is too large for this corpus; use at most {match[1]}, or give more text"
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"--vocab-size {vocab_size} has no room for the characters of this corpus; use more than {match[1]}, "
            "or a smaller character coverage"
        )
    if "sentences_.empty()" in message:
        return DataError("the corpus holds nothing that a tokenizer can be trained on; give more text")
    return DataError(f"SentencePiece cannot train on this corpus: {message}")


def _check_round_trip(tokenizer: Tokenizer, chunks: list[str]) -> None:
    """An invariant of the options above, checked on each new tokenizer before it is given out."""
    control = set(tokenizer.special_ids.values())
    for text in [*chunks[:: max(1, len(chunks) // 100)], "".join(SPECIAL_PIECES.values()), " \t\r\n \u2581\0"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, f"the new tokenizer does not give back {text[:80]!r}"
        assert control.isdisjoint(ids), f"the new tokenizer makes control tokens of {text[:80]!r}"


def _nothing(counts: _Counts, corpus: Corpus) -> str:
    first = f"; first broken line: {counts.examples[0]}" if counts.examples else ""
    return f"no text in the corpus of {len(corpus.files)} files ({counts.broken} broken lines){first}"


def _is_tokenizer(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} == {MODEL_FILE, META_FILE}
