"""A corpus to datasets of shards: OUT/train, and with a validation fraction also OUT/validation.

Documents keep the order of the corpus (files by path, lines as they stand). Each is stored as begin token, text, end
token (those that the tokenizer has). A document goes to validation by the hash of its text, so the same text is on
the same side in every build, whatever else is in the corpus. The output is a function of the inputs, the tokenizer
and the options; the number of threads does not matter. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from data_tools.documents import Broken, Corpus, Document, find_files
from data_tools.output import new_folder
from data_tools.progress import CorpusProgress
from refusion_train.data.shard_index import Index, datasets_in
from refusion_train.data.shards import BLOCK_TOKENS, SHARD_BYTES, ShardWriter
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import ConfigError, DataError

TRAIN, VALIDATION = "train", "validation"
BROKEN_FILE = "broken-lines.txt"

# Documents are encoded in batches; two are under way while the next one is read.
_BATCH_CHARACTERS, _BATCH_DOCUMENTS, _BATCHES_AHEAD = 1 << 20, 4096, 2
_EXAMPLES = 20


@dataclass
class BuildReport:
    """What was built. `datasets`: path and index of each; `empty`, `broken`: documents and lines left out;
    `examples`: the first broken ones, all of which are in `OUT/broken-lines.txt`."""

    out: str
    datasets: dict[str, Index] = field(default_factory=dict)
    empty: int = 0
    broken: int = 0
    examples: list[Broken] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def documents(self) -> int:
        return sum(index.documents for index in self.datasets.values())

    @property
    def tokens(self) -> int:
        return sum(index.tokens for index in self.datasets.values())

    @property
    def text_bytes(self) -> int:
        return sum(index.text_bytes for index in self.datasets.values())

    def summary(self) -> str:
        """Lines to print at the end."""
        lines = [
            f"{path}: {index.documents:,} documents, {index.tokens:,} tokens "
            f"({index.text_bytes / max(1, index.tokens):.2f} bytes per token) in {len(index.shards)} shards"
            for path, index in self.datasets.items()
        ]
        lines.append(f"{self.seconds:.1f} s, {self.tokens / max(1e-9, self.seconds) / 1e6:.2f} M tokens/s")
        if self.empty:
            lines.append(f"{self.empty:,} empty documents were left out")
        if self.broken:
            lines.append(f"{self.broken:,} broken lines were left out (all in {Path(self.out) / BROKEN_FILE}):")
            lines += [f"  {line}" for line in self.examples]
        return "\n".join(lines)


def build_shards(
    inputs: Sequence[str],
    tokenizer: str,
    out: str,
    *,
    workers: int | None = None,
    val_fraction: float = 0.0,
    shard_bytes: int = SHARD_BYTES,
    block_tokens: int = BLOCK_TOKENS,
    text_field: str = "text",
    strict: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> BuildReport:
    """Tokenize `inputs` (files, folders, globs) with the tokenizer in folder `tokenizer` into OUT/train.

    `workers`: threads that encode (default: all cores); `val_fraction`: share of the documents, 0 <= f < 1, that goes
    to OUT/validation; `text_field`: of JSON lines; `strict`: a broken line is an error; `overwrite`: replace datasets
    that stand in `out`. `out` appears when everything is written.
    Raises ConfigError (options), DataError (inputs, tokenizer, output, nothing to write).
    """
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction={val_fraction} must be at least 0 and less than 1")
    for name, value in (("workers", workers), ("shard_bytes", shard_bytes), ("block_tokens", block_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    begun = time.monotonic()
    encoder = Tokenizer.load(tokenizer)
    corpus = Corpus(find_files(inputs), text_field)
    names = [TRAIN, VALIDATION] if val_fraction else [TRAIN]
    report = BuildReport(os.fspath(out))
    with new_folder(out, overwrite, _is_build) as folder:
        with contextlib.ExitStack() as stack:
            writers = {
                name: stack.enter_context(
                    ShardWriter(folder / name, name, encoder.info, shard_bytes, block_tokens, encoder.folder)
                )
                for name in names
            }
            broken = stack.enter_context(_BrokenLines(folder / BROKEN_FILE, report, strict))
            bar = stack.enter_context(CorpusProgress("Tokenizing", corpus.total_bytes, progress))
            _build(corpus, encoder, workers or _cores(), writers, val_fraction, broken, bar)
            documents = {name: writer.documents for name, writer in writers.items()}
            _check_documents(documents, report, corpus, val_fraction)
        indexes = {name: Index.read(folder / name) for name in names}
    report.datasets = {str(Path(out) / name): index for name, index in indexes.items()}
    report.seconds = time.monotonic() - begun
    return report


def goes_to_validation(text: bytes, fraction: float) -> bool:
    """Whether a document with this UTF-8 text belongs to the validation part: a function of the text alone."""
    place = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return place < fraction * 2.0**64


def _build(
    corpus: Corpus,
    encoder: Tokenizer,
    threads: int,
    writers: dict[str, ShardWriter],
    val_fraction: float,
    broken: _BrokenLines,
    bar: CorpusProgress,
) -> None:
    """Read, encode and write, one batch each at a time, in the order of the corpus."""
    under_way: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()

    def write_oldest() -> None:
        documents, encoded = under_way.popleft()
        for document, tokens in zip(documents, encoded.result(), strict=True):
            text = document.text.encode()
            name = VALIDATION if val_fraction and goes_to_validation(text, val_fraction) else TRAIN
            writers[name].add(tokens, 0, len(text))

    with ThreadPoolExecutor(1) as pool:
        for batch in _batches(corpus, broken):
            under_way.append((batch, pool.submit(_encode, encoder, batch, threads)))
            if len(under_way) > _BATCHES_AHEAD:
                write_oldest()
            bar.update(corpus.position, sum(writer.documents for writer in writers.values()))
        while under_way:
            write_oldest()
    bar.update(corpus.total_bytes, sum(writer.documents for writer in writers.values()), last=True)


def _batches(corpus: Corpus, broken: _BrokenLines) -> Iterator[list[Document]]:
    """Documents with text, in batches of bounded size; everything else goes to `broken`."""
    batch: list[Document] = []
    characters = 0
    for item in corpus:
        if isinstance(item, Broken):
            broken.add(item)
        elif not item.text:
            broken.report.empty += 1
        else:
            batch.append(item)
            characters += len(item.text)
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _encode(encoder: Tokenizer, documents: list[Document], threads: int) -> list[np.ndarray]:
    """int32 tokens of each document with begin and end tokens. Runs without the GIL for nearly all of its time."""
    begin = np.array([i for i in (encoder.bos_id,) if i is not None], np.int32)
    end = np.array([i for i in (encoder.eos_id,) if i is not None], np.int32)
    encoded = encoder.encode_batch([document.text for document in documents], threads)
    return [np.concatenate((begin, tokens, end)) for tokens in encoded]


class _BrokenLines:
    """Counts broken lines and writes them to a file that exists only if there are any; with `strict` the first is an
    error."""

    def __init__(self, path: Path, report: BuildReport, strict: bool):
        self.report = report
        self._path, self._strict = path, strict
        self._file: IO[str] | None = None

    def __enter__(self) -> _BrokenLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, line: Broken) -> None:
        if self._strict:
            raise DataError(f"{line}; leave out --strict to skip such lines")
        if self._file is None:
            self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._file.write(f"{line}\n")
        self.report.broken += 1
        if len(self.report.examples) < _EXAMPLES:
            self.report.examples.append(line)


def _check_documents(documents: dict[str, int], report: BuildReport, corpus: Corpus, val_fraction: float) -> None:
    """Refuse a build without documents, saying why."""
    if not sum(documents.values()):
        first = f"; first broken line: {report.examples[0]}" if report.examples else ""
        raise DataError(
            f"no document in the corpus of {len(corpus.files)} files "
            f"({report.empty} empty documents, {report.broken} broken lines){first}"
        )
    for name, count in documents.items():
        if not count:
            raise DataError(
                f"val_fraction={val_fraction} of {sum(documents.values())} documents leaves none for {name}; "
                "choose another fraction or give more documents"
            )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _is_build(folder: Path) -> bool:
    """Whether a folder holds datasets and nothing else, so that it may be replaced."""
    known = {TRAIN, VALIDATION, BROKEN_FILE}
    return bool(datasets_in(folder)) and {path.name for path in folder.iterdir()} <= known
