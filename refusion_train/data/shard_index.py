"""`index.json`, the table of contents of a dataset: what it holds, who tokenized it, where each block lies.

It is written last, so a folder without it is no dataset. Everything is plain JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from refusion_train.data.transport import Damaged, Patience, Remote, is_url, join, local_path
from refusion_train.errors import DataError

INDEX_FILE = "index.json"
TOKENIZER_FOLDER = "tokenizer"
_PARTS = ("train", "validation")
FORMAT, VERSION = "refusion-shards", 1


@dataclass(frozen=True)
class BlockInfo:
    """One sample of a shard: many documents. Offsets are bytes from the start of the tar to the raw array data."""

    key: str
    documents: int
    tokens: int
    text_bytes: int
    # Of the raw token bytes; of the raw lengths bytes followed by the raw prompts bytes.
    crc32: int
    documents_crc32: int
    tokens_offset: int
    lengths_offset: int
    prompts_offset: int


@dataclass(frozen=True)
class ShardInfo:
    """One tar file."""

    name: str
    bytes: int
    sha256: str
    documents: int
    tokens: int
    text_bytes: int
    blocks: tuple[BlockInfo, ...]


@dataclass(frozen=True)
class Index:
    """The whole index. `text_bytes`: UTF-8 bytes of the source text. `tokenizer`: its fingerprint and kind.

    Not in every index: `build` (how it was made: encoder and its version, options, job, part) and `sources`
    (documents, tokens and text_bytes of each input that was named).
    """

    tokenizer: dict[str, str]
    vocab_size: int
    dtype: str
    special_ids: dict[str, int]
    documents: int
    tokens: int
    text_bytes: int
    fingerprint: str
    shards: tuple[ShardInfo, ...]
    build: dict[str, Any] = field(default_factory=dict)
    sources: tuple[dict[str, Any], ...] = ()

    @cached_property
    def blocks(self) -> list[tuple[int, BlockInfo]]:
        """All blocks in order, each with the number of its shard."""
        return [(number, block) for number, shard in enumerate(self.shards) for block in shard.blocks]

    def write(self, folder: Path) -> None:
        """Write index.json so that it is either whole or absent."""
        path = folder / INDEX_FILE
        temporary = folder / f"{INDEX_FILE}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "version": VERSION, **asdict(self)}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    @classmethod
    def read(cls, folder: str | os.PathLike[str], patience: Patience | None = None) -> Index:
        """Read and check index.json of a folder or URL (with `patience`). Raises DataError naming it and its fault."""
        if is_url(folder):
            return cls.read_from(Remote(os.fspath(folder), patience))
        path = local_path(folder) / INDEX_FILE
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise DataError(_no_index(path.parent)) from None
        except (ValueError, OSError) as error:
            raise DataError(f"{path} cannot be read ({error}); build the dataset again") from None
        return cls._from_json(content, str(path))

    @classmethod
    def read_from(cls, remote: Remote) -> Index:
        """As `read`, from a URL that is open."""

        def take(chunks: Iterator[bytes]) -> Any:
            try:
                return json.loads(b"".join(chunks))
            except ValueError as error:
                raise Damaged(f"it is no JSON ({error})") from None

        where = f"{remote.name}: {INDEX_FILE}"
        try:
            content = remote.fetch(INDEX_FILE, None, take, INDEX_FILE)
            try:
                return cls._from_json(content, where)
            except DataError:  # damaged on its way, perhaps, or read while it was replaced
                return cls._from_json(remote.fetch(INDEX_FILE, None, take, INDEX_FILE), where)
        except FileNotFoundError as error:
            said = f" ({error})" if remote.url.startswith("pipe:") else ""
            raise DataError(f"no dataset at '{remote.name}': {INDEX_FILE} is missing{said}; check the path") from None

    @classmethod
    def _from_json(cls, content: Any, path: str) -> Index:
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DataError(f"{path} is not an index of {FORMAT}; build the dataset with `refusion data shards`")
        if content.get("version") != VERSION:
            raise DataError(
                f"{path} has format version {content.get('version')!r}, this program reads version {VERSION}; "
                "build the dataset again or use the program that made it"
            )
        try:
            shards = tuple(shard_from_dict(shard) for shard in content["shards"])
            index = _make(cls, {**content, "shards": shards, "sources": tuple(content.get("sources", ()))})
            index._check()
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}); build the dataset again") from None
        return index

    def _check(self) -> None:
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype {self.dtype!r}")
        for name in ("documents", "tokens", "text_bytes"):
            per_shard = [getattr(shard, name) for shard in self.shards]
            per_block = [sum(getattr(block, name) for block in shard.blocks) for shard in self.shards]
            if sum(per_shard) != getattr(self, name) or per_shard != per_block:
                raise ValueError(f"{name} of shards and blocks do not add up")
        if dataset_fingerprint(self.tokenizer["fingerprint"], self.shards) != self.fingerprint:
            raise ValueError("its fingerprint is not that of its shards")


def dataset_fingerprint(tokenizer: str, shards: Iterable[ShardInfo]) -> str:
    """Identity of the data: sha256 over the tokenizer's fingerprint and the shards' checksums, in order."""
    lines = [tokenizer, *(shard.sha256 for shard in shards)]
    return f"sha256:{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


def datasets_in(folder: Path) -> list[Path]:
    """The datasets that a folder is or directly holds (what `refusion data shards --out` makes), by name."""
    if (folder / INDEX_FILE).is_file():
        return [folder]
    if not folder.is_dir():
        return []
    return sorted(child for child in folder.iterdir() if (child / INDEX_FILE).is_file())


def datasets_at(path: str | os.PathLike[str]) -> list[str]:
    """The datasets that a folder or URL is or directly holds, else `path` itself. Behind URLs, which cannot be listed,
    only those named train and validation are found. Raises DataError when a server cannot be asked."""
    if not is_url(path):
        return [os.fspath(found) for found in datasets_in(local_path(path))] or [os.fspath(local_path(path))]
    url = os.fspath(path)
    inner = [] if _is_there(url, INDEX_FILE) else [n for n in _PARTS if _is_there(url, f"{n}/{INDEX_FILE}")]
    return [url] if url.startswith("pipe:") or not inner else [join(url, name) for name in inner]


def _is_there(url: str, name: str) -> bool:
    try:
        Remote(url).read(name)
    except FileNotFoundError:
        return False
    return True


def _no_index(folder: Path) -> str:
    if not folder.is_dir():
        return f"no dataset '{folder}': there is no such folder; make one with `refusion data shards ... --out DIR`"
    inner = [str(path) for path in datasets_in(folder)]
    if inner:
        return f"'{folder}' is not a dataset but holds some; give {' or '.join(inner)}"
    return f"no dataset in '{folder}': {INDEX_FILE} is missing (it is written last; build the dataset again)"


def shard_from_dict(values: dict[str, Any]) -> ShardInfo:
    """The inverse of `dataclasses.asdict` for a shard. Raises KeyError or TypeError for other values."""
    return _make(ShardInfo, {**values, "blocks": tuple(_make(BlockInfo, block) for block in values["blocks"])})


def _make(kind: type, values: dict[str, Any]) -> Any:
    """An instance of a dataclass from the keys it knows; a missing one is a KeyError, others are left alone."""
    optional = {e.name for e in fields(kind) if e.default is not MISSING or e.default_factory is not MISSING}
    names = [entry.name for entry in fields(kind) if entry.name in values or entry.name not in optional]
    return kind(**{name: values[name] for name in names})
