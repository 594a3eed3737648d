"""A corpus to datasets of shards: OUT/train, and with a validation fraction also OUT/validation.

One process reads the files in order and cuts them into chunks, workers turn chunks into tokens, and the first process
writes these in the order of the chunks. So documents keep the order of the corpus (files by path, lines as they stand)
unless they are shuffled, and the output is a function of the inputs, the tokenizer and the options: not of the number
of workers, nor of interruptions. A document goes to validation by the hash of its text, so the same text is on the
same side in every build, whatever else is in the corpus. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.chunks import CHUNK_BYTES, Chunk, Place, read_chunks
from data_tools.documents import CorpusFile, Fields, find_files
from data_tools.encode import (
    ChunkEncoder,
    Encoded,
    EncoderName,
    Recipe,
    chat_of,
    choose_fast,
    encode_in_worker,
    encoder_name,
    goes_to_validation,
    start_worker,
)
from data_tools.journal import JOURNAL, Journal, has_checkpoint, hash_of
from data_tools.output import clean, recover, resumable_folder
from data_tools.progress import CorpusProgress
from data_tools.report import PROBLEMS_FILE, BuildReport, ProblemLog
from data_tools.sinks import TRAIN, VALIDATION, DatasetSink, Sink, Spool
from refusion_train.data.shard_index import TOKENIZER_FOLDER, Index, datasets_in
from refusion_train.data.shard_writer import BLOCK_TOKENS, SHARD_BYTES
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import ConfigError, DataError

__all__ = ["TRAIN", "VALIDATION", "BuildReport", "build_shards", "goes_to_validation"]

# Text under way at a time: so much, or two chunks per worker, if those are more.
_BYTES_AHEAD = 64 << 20
# Smaller corpora are encoded in this process: starting others would take longer.
_SMALL = 16 << 20
_CHECKPOINT_SECONDS = 30.0


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
    prompt_field: str | None = None,
    response_field: str | None = None,
    messages_field: str | None = None,
    chat_template: str | None = None,
    input_format: str | None = None,
    encoder: EncoderName = "auto",
    part: str | None = None,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    dedup: bool = False,
    shuffle: int | None = None,
    strict: bool = False,
    overwrite: bool = False,
    fresh: bool = False,
    progress: bool = True,
    checkpoint_seconds: float = _CHECKPOINT_SECONDS,
    check_only: bool = False,
) -> BuildReport:
    """Tokenize `inputs` (files, folders, globs, "-") with the tokenizer in folder `tokenizer` into OUT/train.

    `workers`: processes that encode (default: all cores; a small corpus is encoded in this process); `val_fraction`:
    share of the documents, 0 <= f < 1, that goes to OUT/validation; `text_field`, `prompt_field` and `response_field`,
    `messages_field`: where records have their text (paths with dots); `chat_template`: file of a template (default: the
    tokenizer's); `input_format`: of all inputs, whatever their suffixes; `part`: "i/n", only the i-th of n parts of the
    files; `min_tokens`, `max_tokens`: other documents are left out; `dedup`: of equal texts only the first; `shuffle`:
    seed of a global order; `strict`: anything wrong in the inputs is an error; `overwrite`: replace datasets that stand
    in `out`; `fresh`: do not go on with an interrupted build; `checkpoint_seconds`: what a kill may cost; `check_only`:
    raise what can be found without reading documents, and write nothing.
    `out` appears when everything is written; the same call after a kill goes on, and after the end does nothing.
    Raises ConfigError (options), DataError (inputs, tokenizer, output, nothing to write).
    """
    _check_options(workers, val_fraction, shard_bytes, block_tokens, min_tokens, max_tokens)
    begun = time.monotonic()
    fields = Fields(text_field, prompt_field, response_field, messages_field)
    fields.check()
    loaded = Tokenizer.load(tokenizer)
    recipe = Recipe(
        os.fspath(tokenizer), fields, encoder, _read_template(chat_template), val_fraction, min_tokens, max_tokens,
        digests=dedup,
    )  # fmt: skip
    chat_of(recipe, loaded)  # what is wrong with it is said here, not by every worker
    every_file = find_files(inputs, input_format)
    files, infix = part_of(every_file, part)
    options = {
        **asdict(fields), "chat_template": recipe.chat_template and hash_of(recipe.chat_template),
        "input_format": input_format, "val_fraction": val_fraction, "min_tokens": min_tokens, "max_tokens": max_tokens,
        "dedup": dedup, "shuffle": shuffle, "shard_bytes": shard_bytes, "block_tokens": block_tokens, "strict": strict,
        "part": part,
    }  # fmt: skip
    name = encoder_name(loaded, choose_fast(loaded, encoder))
    job = _job(every_file, options, loaded, name)
    report = BuildReport(os.fspath(out), tokenizer=loaded)
    if check_only:
        return report
    recover(out)
    if not overwrite and not fresh and (done := _finished(Path(out), job)):
        report.datasets, report.already = done, True
        clean(out, [JOURNAL])
        return report
    with resumable_folder(out, overwrite, is_build, lambda f: not fresh and has_checkpoint(f), [JOURNAL]) as folder:
        fresh = False  # what this run writes may be continued
        build = _Build(folder, job, report, files, recipe, loaded, list(map(str, inputs)), infix, shuffle, strict)
        build.run(workers, shard_bytes, block_tokens, progress, checkpoint_seconds)
        indexes = {name: Index.read(folder / name) for name in (TRAIN, VALIDATION) if (folder / name).is_dir()}
    report.datasets = {str(Path(out) / name): index for name, index in indexes.items()}
    report.seconds = time.monotonic() - begun
    return report


class _Build:
    """One build in its folder: reading and encoding into a sink, from a spool into the datasets, and checkpoints."""

    def __init__(
        self, folder: Path, job: dict[str, Any], report: BuildReport, files: list[CorpusFile], recipe: Recipe,
        tokenizer: Tokenizer, sources: list[str], infix: str, shuffle: int | None, strict: bool,
    ):  # fmt: skip
        self.folder, self.job, self.report, self.files, self.recipe = folder, job, report, files, recipe
        self.tokenizer, self.sources, self.infix, self.shuffle, self.strict = tokenizer, sources, infix, shuffle, strict
        self.journal = Journal(folder)
        self.total = sum(file.bytes for file in files)

    def run(
        self, workers: int | None, shard_bytes: int, block_tokens: int, progress: bool, checkpoint_seconds: float
    ) -> None:
        resumed = self.journal.begin(self.job)
        names = [TRAIN, VALIDATION] if self.recipe.val_fraction else [TRAIN]
        self.interval, self.saved = checkpoint_seconds, time.monotonic()
        with contextlib.ExitStack() as stack:
            self.datasets = DatasetSink(
                self.folder, self.journal.folder, names, self.infix, self.tokenizer, shard_bytes, block_tokens
            )
            stack.callback(self.datasets.abort)
            self.problems = stack.enter_context(
                ProblemLog(self.folder / PROBLEMS_FILE, self.report, self.strict, resumed[0] if resumed else None)
            )
            spool = None
            if self.shuffle is not None or self.recipe.digests:
                spool = Spool(self.journal.folder / "spool", self.tokenizer.vocab_size, self.shuffle)
                stack.callback(spool.close)
            place, emitted = Place(), None
            if resumed:
                place, emitted = self._restore(*resumed, spool)
            if emitted is None:
                self._read(place, spool or self.datasets, workers, progress)
            if spool is not None:
                self._emit(spool, emitted, progress)
            self._finish()

    def _restore(
        self, state: dict[str, Any], arrays: dict[str, np.ndarray], spool: Spool | None
    ) -> tuple[Place, tuple[int, int] | None]:
        """Put everything where the checkpoint says; where to read on, or where to go on out of the spool."""
        self.report.resumed_at = state["position"]
        emitted = state["emitted"]
        if spool is not None:
            spool.restore(state["spool"], {})
        self.datasets.restore(state["datasets"], arrays)
        return Place(**state["place"]), None if emitted is None else (emitted[0], emitted[1])

    def _read(self, place: Place, sink: Sink, workers: int | None, progress: bool) -> None:
        spool = sink if isinstance(sink, Spool) else None
        position = self.report.resumed_at
        with CorpusProgress("Tokenizing", self.total, progress) as bar:
            bar.go_on(position, sink.documents, sink.tokens)
            chunks = read_chunks(self.files, self.recipe.fields, place, self.recipe.limit)
            # The copy of the tokenizer is complete, whatever becomes of the folder that was given.
            recipe = replace(self.recipe, tokenizer=str(self.folder / TRAIN / TOKENIZER_FOLDER))
            with _encoder(recipe, workers, self.total) as (submit, ahead):
                for chunk, encoded in _in_order(chunks, submit, ahead):
                    self.problems.add(encoded)
                    sink.add(encoded)
                    self._checkpoint(chunk.after, chunk.position, None, spool)
                    bar.update(chunk.position, sink.documents, tokens=sink.tokens)
            bar.update(self.total, sink.documents, last=True, tokens=sink.tokens)

    def _emit(self, spool: Spool, start: tuple[int, int] | None, progress: bool) -> None:
        """From the spool, complete by now, into the datasets."""
        done = Place(len(self.files))
        self._checkpoint(done, self.total, start or (0, 0), spool, now=True)
        title = "Shuffling" if self.shuffle is not None else "Writing"
        size = spool.tokens * self.tokenizer_bytes
        with CorpusProgress(title, size, progress) as bar:
            bar.go_on(self.datasets.tokens * self.tokenizer_bytes, self.datasets.documents, self.datasets.tokens)
            for encoded, place in spool.emit(start or (0, 0)):
                self.datasets.add(encoded)
                self._checkpoint(done, self.total, place, spool)
                tokens = self.datasets.tokens
                bar.update(tokens * self.tokenizer_bytes, self.datasets.documents, tokens=tokens)
            bar.update(size, self.datasets.documents, last=True, tokens=self.datasets.tokens)
        self.report.duplicates = spool.duplicates

    @property
    def tokenizer_bytes(self) -> int:
        return 2 if self.tokenizer.vocab_size <= 1 << 16 else 4

    def _checkpoint(
        self, place: Place, position: int, emitted: tuple[int, int] | None, spool: Spool | None, now: bool = False
    ) -> None:
        if not now and time.monotonic() - self.saved < self.interval:
            return
        datasets, arrays = self.datasets.state()
        state = {
            "place": asdict(place),
            "position": position,
            "emitted": emitted,
            "datasets": datasets,
            "spool": spool.state()[0] if spool is not None else None,
            **self.problems.state(),
        }
        self.journal.save(state, arrays)
        self.saved = time.monotonic()

    def _finish(self) -> None:
        documents = {name: self.datasets.documents_of(name) for name in self.datasets.names}
        empty = {name for name, count in documents.items() if not count}
        _check_documents(documents, self.report, len(self.files), self.recipe.val_fraction, bool(self.infix))
        build = {**self.job["options"], "encoder": self.job["encoder"], "job": self.job["id"]}
        self.datasets.finish({**build, "inputs": hash_of(self.job["inputs"])}, self.sources, empty)
        for name in empty:
            shutil.rmtree(self.folder / name)


def _in_order(
    chunks: Iterator[Chunk], submit: Callable[[Chunk], Future[Encoded]], ahead: int
) -> Iterator[tuple[Chunk, Encoded]]:
    """Chunks with what became of them, in their order; at most `ahead` bytes of text are under way."""
    under_way: deque[tuple[Chunk, Future[Encoded], int]] = deque()
    held = 0

    def oldest() -> tuple[Chunk, Encoded]:
        nonlocal held
        chunk, future, size = under_way.popleft()
        encoded = future.result()
        held -= size
        return chunk, encoded

    for chunk in chunks:
        while under_way and held + chunk.bytes > ahead:
            yield oldest()
        future = submit(chunk)
        # What a worker has is not needed here.
        under_way.append((replace(chunk, parts=[]), future, chunk.bytes))
        held += chunk.bytes
        while under_way and under_way[0][1].done():
            yield oldest()
    while under_way:
        yield oldest()


@contextlib.contextmanager
def _encoder(
    recipe: Recipe, workers: int | None, total: int
) -> Iterator[tuple[Callable[[Chunk], Future[Encoded]], int]]:
    """What encodes chunks, and how many bytes of text to have under way."""
    count = workers or (1 if 0 < total < _SMALL else len(os.sched_getaffinity(0)))
    pool: Executor
    if count == 1:
        encoder = ChunkEncoder(recipe)
        with ThreadPoolExecutor(1) as pool:
            yield lambda chunk: pool.submit(encoder.encode, chunk), 3 * CHUNK_BYTES
        return
    # Not forked: this process may have threads.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), start_worker, (recipe,))
    try:
        yield lambda chunk: pool.submit(encode_in_worker, chunk), max(_BYTES_AHEAD, 2 * count * CHUNK_BYTES)
    except BrokenProcessPool:
        raise DataError(
            "a worker process died, perhaps for lack of memory; run the same command again to go on, with fewer "
            "--workers if memory was short"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def part_of(files: list[CorpusFile], part: str | None) -> tuple[list[CorpusFile], str]:
    """The files of part "i/n" and what the names of its shards hold of it. Files go to parts by size, the largest
    first, each to the part that has least so far. Raises ConfigError for a part that is none or has no file."""
    if part is None:
        return files, ""
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"part={part} is not i/n with 1 <= i <= n, for example 3/8")
    index, parts = int(number) - 1, int(count)
    if parts > len(files):
        raise ConfigError(f"part={part}: {len(files)} files cannot be split into {parts} parts; use fewer")
    if any(file.path == "-" for file in files):
        raise ConfigError(f"part={part}: standard input cannot be split; give files")
    sizes = [0] * parts
    chosen: list[CorpusFile] = []
    for file in sorted(files, key=lambda file: (-file.bytes, file.path)):
        least = min(range(parts), key=lambda i: (sizes[i], i))
        # A file of no bytes counts too, so that no part stays without.
        sizes[least] += max(1, file.bytes)
        if least == index:
            chosen.append(file)
    return sorted(chosen, key=lambda file: file.path), f"-{index + 1:0{len(count)}d}of{parts}"


def _job(files: list[CorpusFile], options: dict[str, Any], tokenizer: Tokenizer, encoder: str) -> dict[str, Any]:
    """What a build is: two of the same `id` make parts of one whole, whatever the dates of the files."""
    whole = {name: value for name, value in options.items() if name != "part"}
    return {
        "inputs": [[file.path, file.bytes, file.modified] for file in files],
        "options": options,
        "tokenizer": tokenizer.fingerprint,
        "encoder": encoder,
        "id": hash_of([whole, tokenizer.fingerprint, [[file.path, file.bytes] for file in files]]),
    }


def _finished(out: Path, job: dict[str, Any]) -> dict[str, Index] | None:
    """The datasets in `out`, if the same job made them from the same files."""
    paths = [path for path in datasets_in(out) if path.name in (TRAIN, VALIDATION)]
    try:
        found = {str(path): Index.read(path) for path in paths}
    except DataError:
        return None
    same = {"job": job["id"], "inputs": hash_of(job["inputs"]), "part": job["options"]["part"]}
    if not found or any(entry[0] == "-" for entry in job["inputs"]):
        return None
    return found if all(same.items() <= index.build.items() for index in found.values()) else None


def _check_options(
    workers: int | None, val_fraction: float, shard_bytes: int, block_tokens: int, min_tokens: int,
    max_tokens: int | None,
) -> None:  # fmt: skip
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction={val_fraction} must be at least 0 and less than 1")
    for name, value in (("workers", workers), ("shard_bytes", shard_bytes), ("block_tokens", block_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if max_tokens is not None and max_tokens < max(1, min_tokens):
        raise ConfigError(f"max_tokens={max_tokens} must be at least 1 and not less than min_tokens={min_tokens}")


def _check_documents(
    documents: dict[str, int], report: BuildReport, files: int, val_fraction: float, is_part: bool
) -> None:
    """Refuse a build without documents, saying why."""
    if not sum(documents.values()):
        first = f"; first broken line: {report.examples[0]}" if report.examples and report.broken else ""
        raise DataError(
            f"no document in the corpus of {files} files "
            f"({report.empty} empty documents, {report.broken} broken lines{report.filtered()}){first}"
        )
    for name, count in documents.items():
        if not count and not is_part:  # a part may be too small for a document on each side
            raise DataError(
                f"val_fraction={val_fraction} of {sum(documents.values())} documents leaves none for {name}; "
                "choose another fraction or give more documents"
            )


def _read_template(path: str | None) -> str | None:
    try:
        return None if path is None else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={path} cannot be read: {error}") from None


def is_build(folder: Path) -> bool:
    """Whether a folder holds datasets and nothing else, so that it may be replaced."""
    known = {TRAIN, VALIDATION, PROBLEMS_FILE, JOURNAL, ".lock"}
    return bool(datasets_in(folder)) and {path.name for path in folder.iterdir()} <= known
