"""Looking at datasets: is everything as it was written (`verify`), and what is in there (`show`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from data_tools.build_shards import TRAIN
from data_tools.progress import CorpusProgress
from refusion_train.config import Config
from refusion_train.data.remote import RemoteOptions
from refusion_train.data.shard_index import INDEX_FILE, TOKENIZER_FOLDER, BlockInfo, Index, ShardInfo, datasets_at
from refusion_train.data.shards import ShardSet, check_tokenizer
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.data.transport import is_url
from refusion_train.errors import DataError

_HASH_BYTES = 8 << 20
_FAULTS_SHOWN = 5
_CHARACTERS_SHOWN = 2000


@dataclass
class VerifyReport:
    """What `verify` found in one dataset, all of it in order."""

    path: str
    shards: int
    blocks: int
    documents: int
    tokens: int
    fingerprint: str
    has_tokenizer: bool

    def summary(self) -> str:
        """One line to print."""
        unchecked = (
            "" if self.has_tokenizer else f"; not checked: the tokenizer, as there is no {TOKENIZER_FOLDER} folder"
        )
        return (
            f"{self.path}: in order; {self.shards:,} shards, {self.blocks:,} blocks, {self.documents:,} documents, "
            f"{self.tokens:,} tokens ({self.fingerprint[:19]}){unchecked}"
        )


def verify(path: str, *, progress: bool = True, options: RemoteOptions | None = None) -> list[VerifyReport]:
    """Check the dataset in folder `path`, or all datasets directly in it, against index.json.

    Checked: size and sha256 of each shard; names, dtypes and places of its arrays; checksums and counts of each
    block; token ids within the vocabulary; the tokenizer that lies with the dataset. `path` may be a URL: each shard is
    then fetched whole, and `options` say where to.
    Raises DataError naming shard and block (the first few, if there are several) when something is wrong.
    """
    return [_verify_dataset(dataset, progress, options) for dataset in datasets_at(path)]


def _verify_dataset(path: str, progress: bool, options: RemoteOptions | None) -> VerifyReport:
    # Not `open` for folders: a missing shard is one fault of several.
    dataset = ShardSet.open(path, options) if is_url(path) else ShardSet(path, Index.read(path))
    index = dataset.index
    faults: list[str] = []
    first, done, documents = 0, 0, 0
    with CorpusProgress("Verifying", sum(shard.bytes for shard in index.shards), progress) as bar:
        for shard in index.shards:
            try:
                with _local(dataset, shard) as local:
                    _verify_shard(local, shard, first)
                done, documents = done + shard.bytes, documents + shard.documents
            except DataError as error:
                faults.append(str(error).removeprefix(f"{dataset.path}: "))
            first += len(shard.blocks)
            bar.update(done, documents, last=shard is index.shards[-1])
    tokenizer = None
    try:
        tokenizer = dataset.tokenizer()
        if tokenizer is not None:
            check_tokenizer(dataset, tokenizer)
    except DataError as error:
        faults.append(str(error))
    if faults:
        more = f"; and {len(faults) - _FAULTS_SHOWN} more faults" if len(faults) > _FAULTS_SHOWN else ""
        raise DataError(f"{dataset.path}: {'; '.join(faults[:_FAULTS_SHOWN])}{more}")
    return VerifyReport(
        dataset.path, len(index.shards), dataset.blocks, index.documents, index.tokens, index.fingerprint,
        tokenizer is not None,
    )  # fmt: skip


@contextlib.contextmanager
def _local(dataset: ShardSet, shard: ShardInfo) -> Iterator[ShardSet]:
    """The dataset as one of this machine, as far as this shard goes."""
    if dataset.remote is None:
        yield dataset
        return
    with dataset.remote.downloaded(shard) as folder:
        try:
            yield ShardSet(os.fspath(folder), dataset.index)
        except DataError as error:
            raise DataError(str(error).removeprefix(f"{folder}: ")) from None


def _verify_shard(dataset: ShardSet, shard: ShardInfo, first_block: int) -> None:
    """Raise DataError for the first fault of a shard; its blocks come before the whole, to name the one at fault."""
    for number, info in enumerate(shard.blocks, first_block):
        block = dataset.block(number)  # verifies size, checksums and counts
        largest = int(block.tokens.max(initial=0))
        if largest >= dataset.index.vocab_size:
            raise DataError(
                f"shard {shard.name}, block {info.key}: token id {largest} is outside the vocabulary of "
                f"{dataset.index.vocab_size}; build the dataset again"
            )
    path = os.path.join(dataset.path, shard.name)
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while data := file.read(_HASH_BYTES):
            digest.update(data)
        _verify_members(file, shard, dataset.index.dtype)
    if digest.hexdigest() != shard.sha256:
        raise DataError(
            f"shard {shard.name}: its blocks are in order, but the file differs from the one that was written "
            "(sha256); restore it or build the dataset again"
        )


def _verify_members(file: IO[bytes], shard: ShardInfo, token_dtype: str) -> None:
    """The arrays of a tar, as any reader sees them, are those of the index: names, dtypes, shapes and places."""
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            found = {member.name: _npy_array(file, member.offset_data) for member in tar}
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise DataError(f"shard {shard.name} is not a readable tar of .npy files ({error}); restore it") from None
    expected = {name: array for info in shard.blocks for name, array in _arrays_of(info, token_dtype).items()}
    for name in expected.keys() | found.keys():
        if expected.get(name) != found.get(name):
            raise DataError(
                f"shard {shard.name}: {name} is {found.get(name, 'missing')}, "
                f"{INDEX_FILE} says {expected.get(name, 'nothing')} (offset, dtype, shape); build the dataset again"
            )


def _arrays_of(info: BlockInfo, token_dtype: str) -> dict[str, tuple[int, str, tuple[int, ...]]]:
    """Members of a block by name: offset of the data, dtype, shape."""
    return {
        f"{info.key}.tokens.npy": (info.tokens_offset, token_dtype, (info.tokens,)),
        f"{info.key}.lengths.npy": (info.lengths_offset, "int32", (info.documents,)),
        f"{info.key}.prompts.npy": (info.prompts_offset, "int32", (info.documents,)),
    }


def _npy_array(file: IO[bytes], offset: int) -> tuple[int, str, tuple[int, ...]]:
    """Offset of the data, dtype and shape from a .npy header; reads only the header and unpickles nothing."""
    file.seek(offset)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"no .npy of version 1.0 at byte {offset}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return file.tell(), dtype.name, shape


def show(
    path: str,
    config: Config | None = None,
    n: int = 3,
    tokenizer: str | None = None,
    *,
    first: int = 0,
    full: bool = False,
    console: Console | None = None,
    options: RemoteOptions | None = None,
    step: int | None = None,
) -> None:
    """Print documents of the dataset in folder `path`, or with a config rows as training gets them, in colour.

    Documents `first` to `first + n - 1`, decoded; or the first `n` rows of the run that `config` describes, packed and
    corrupted. `path` may also be a folder of datasets: then its training part is shown. `tokenizer`: its folder
    (default: the one that lies with the dataset). `full`: long documents and rows are not shortened. `step`: the step
    that rows are corrupted as in.
    Raises DataError (no dataset, wrong tokenizer, no such document).
    """
    dataset = ShardSet.open(_one_dataset(path), options)
    encoder = Tokenizer.load(tokenizer) if tokenizer is not None else dataset.tokenizer()
    if encoder is None:
        raise DataError(
            f"'{dataset.path}' has no {TOKENIZER_FOLDER} folder, so its documents cannot be decoded; restore it"
        )
    check_tokenizer(dataset, encoder)
    console = console or Console(highlight=False)
    if config is not None:
        from data_tools.corrupted_view import show_rows

        show_rows(dataset, encoder, config, n, console, full, step)
        return
    dataset.locate(first)
    for number in range(first, min(first + n, dataset.index.documents)):
        block, place = dataset.locate(number)
        _show_document(dataset, encoder, number, block, place, console, full)


def _one_dataset(path: str) -> str:
    found = datasets_at(path)
    training = [one for one in found if one.rstrip("/").endswith(f"/{TRAIN}")]
    return (training or found)[0]


def _show_document(
    dataset: ShardSet, encoder: Tokenizer, number: int, block: int, place: int, console: Console, full: bool
) -> None:
    content: Any = dataset.block(block)
    tokens = content.tokens[content.offsets[place] : content.offsets[place + 1]]
    prompt = int(content.prompts[place])
    title = f"document {number:,} of {dataset.index.documents:,}  {len(tokens):,} tokens"
    console.print(Text(f"{title}{f', prompt {prompt:,}' if prompt else ''}  ({content.key})", style="bold"))
    line = Text()
    for part, style in ((tokens[:prompt], "cyan"), (tokens[prompt:], "")):
        text = encoder.decode(part, keep_special=True)
        if not full and len(text) > _CHARACTERS_SHOWN:
            text = f"{text[:_CHARACTERS_SHOWN]} ... ({len(text) - _CHARACTERS_SHOWN:,} more characters)"
        line.append(text, style=style)
    console.print(line)
