"""What a corpus is made of: which files, in which order, documents, and what is wrong in them.

Files come in the order of their paths, standard input first. What cannot be read is never dropped silently: it comes
out as a `Broken`, in its place.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_tools.streams import COMPRESSIONS, STDIN
from refusion_train.errors import ConfigError, DataError

# A longer document or line is broken: it bounds the memory that one document can take.
MAX_DOCUMENT_BYTES = 256 << 20

# What a file holds, by its suffix. "text": one document; "lines": a JSON object a line; "json": a list of objects.
KINDS = {".txt": "text", ".jsonl": "lines", ".json": "json", ".parquet": "parquet", ".tar": "tar"}
INPUT_FORMATS = ("txt", "jsonl", "json", "parquet", "tar")
_SHORT = {".tgz": ".tar.gz", ".tzst": ".tar.zst", ".txz": ".tar.xz", ".tbz2": ".tar.bz2"}
_REFUSED = {
    ".zip": "unpack it",
    ".arrow": "convert it to .parquet",
    ".feather": "convert it to .parquet",
    ".npy": "it holds no text",
    ".pdf": "extract its text first",
}


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus. `kind`: a value of KINDS; `compression`: "" or one of COMPRESSIONS; `bytes`: on disk (0 for
    standard input); `modified`: in ns; `source`: which of the inputs that were named gave it."""

    path: str
    kind: str
    compression: str
    bytes: int
    modified: int = 0
    source: int = 0


@dataclass(frozen=True)
class Fields:
    """Where the text of a record is: `text`; or `prompt` and `response`; or `messages` of a chat. Paths with dots."""

    text: str = "text"
    prompt: str | None = None
    response: str | None = None
    messages: str | None = None

    def check(self) -> None:
        """Raise ConfigError for a combination that means nothing."""
        if (self.prompt is None) != (self.response is None):
            raise ConfigError("--prompt-field and --response-field go together; give both or neither")
        if self.messages is not None and self.prompt is not None:
            raise ConfigError("--messages-field and --prompt-field exclude each other; choose one")

    @property
    def roots(self) -> list[str]:
        """All paths that are read."""
        if self.messages is not None:
            return [self.messages]
        if self.prompt is not None and self.response is not None:
            return [self.prompt, self.response]
        return [self.text]


@dataclass(frozen=True, slots=True)
class Document:
    """One text and where it came from (`line` counts from 1)."""

    text: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Broken:
    """What is wrong at a place. `kind`: one of PROBLEMS."""

    file: str
    line: int
    reason: str
    kind: str = "broken"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


# What can be wrong, and what is done about it.
PROBLEMS = {
    "broken": "broken lines were left out",
    "empty": "empty documents were left out",
    "nul": "documents hold NUL characters and were kept as they are",
    "duplicate_key": "records or members come under a key that was there before",
    "not_text": "members of tars are neither .txt nor .json and were passed over",
}


def find_files(inputs: Sequence[str], input_format: str | None = None) -> list[CorpusFile]:
    """The files that `inputs` (files, folders, globs, `-`) name, each once, sorted by path.

    A folder gives its files with the suffixes of KINDS, also compressed, at any depth, without hidden ones; a file that
    is named, or that a glob matches, may have any suffix and is text unless it has one of those. `input_format`: one of
    INPUT_FORMATS, whatever the suffixes say; standard input is JSON lines otherwise.
    Raises DataError for an input that names nothing or a kind of file that cannot be read.
    """
    if not inputs:
        raise DataError("no input given; name files, folders or globs such as 'corpus/**/*.txt'")
    if input_format is not None and input_format not in INPUT_FORMATS:
        raise ConfigError(f"input_format={input_format} is not one of {', '.join(INPUT_FORMATS)}")
    kind = None if input_format is None else KINDS["." + input_format]
    found: dict[str, tuple[str, int]] = {}
    for number, item in enumerate(inputs):
        if item == STDIN:
            if kind == "parquet":
                raise ConfigError("parquet cannot be read from standard input; give a file")
            found.setdefault(STDIN, (STDIN, number))
            continue
        for path in _expand(item):
            found.setdefault(os.path.realpath(path), (path, number))
    return [_describe(path, number, kind) for path, number in sorted(found.values())]


def _expand(item: str) -> list[str]:
    if os.path.isdir(item):
        paths = list(_walk(item))
        if not paths:
            raise DataError(
                f"folder '{item}' holds no {', '.join(KINDS)} file (or {', '.join(COMPRESSIONS)} of them); "
                f"name other text files by a glob such as '{item}/**/*.py'"
            )
        return paths
    if os.path.isfile(item):
        return [item]
    paths = [path for path in glob.glob(item, recursive=True) if os.path.isfile(path)]
    if not paths:
        kind = "matches no file" if glob.has_magic(item) else "is no file or folder"
        raise DataError(f"input '{item}' {kind}; check the path")
    return paths


def _walk(folder: str) -> Iterator[str]:
    """Readable files below `folder`, through links too, but never the same folder twice."""
    seen: set[str] = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and real not in seen)
        if real in seen:
            continue
        seen.add(real)
        for name in names:
            plain, _ = _split_compression(name)
            if plain.lower().endswith(tuple(KINDS)) and not name.startswith("."):
                yield os.path.join(here, name)


def _split_compression(path: str) -> tuple[str, str]:
    for short, full in _SHORT.items():
        if path.lower().endswith(short):
            path = path[: -len(short)] + full
    for suffix in COMPRESSIONS:
        if path.lower().endswith(suffix):
            return path[: -len(suffix)], suffix
    return path, ""


def _describe(path: str, source: int, kind: str | None) -> CorpusFile:
    if path == STDIN:
        return CorpusFile(STDIN, kind or "lines", "", 0, 0, source)
    plain, compression = _split_compression(path)
    suffix = os.path.splitext(plain)[1].lower()
    if kind is None and suffix in _REFUSED:
        raise DataError(f"input '{path}': {suffix} files are not read; {_REFUSED[suffix]}")
    kind = kind or KINDS.get(suffix, "text")
    if kind == "parquet" and compression:
        raise DataError(f"input '{path}': a compressed .parquet file is not read; unpack it")
    status = os.stat(path)
    return CorpusFile(path, kind, compression, status.st_size, status.st_mtime_ns, source)
