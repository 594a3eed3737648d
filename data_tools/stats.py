"""What a dataset holds, in numbers and as a picture: documents, tokens, bytes per token, lengths, sources."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from data_tools.output import new_figure, write_whole
from data_tools.progress import CorpusProgress
from refusion_train.data.remote import THREADS
from refusion_train.data.shard_index import datasets_at
from refusion_train.data.shards import ShardSet
from refusion_train.errors import ConfigError

# Lengths are counted one by one below this, and above in steps of 1/64 of an octave, so that quantiles are exact to
# about one percent and memory does not grow with the number of documents.
_EXACT = 1 << 12
_STEPS = 64
_QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_BAR = 40


@dataclass
class DatasetStats:
    """`quantiles`: length in tokens by share of documents; `histogram`: [shortest, longest, documents, tokens] per
    octave of lengths; `prompt_tokens`: of all tokens, those of prompts."""

    path: str
    documents: int
    tokens: int
    text_bytes: int
    disk_bytes: int
    shards: int
    prompt_tokens: int
    longest: int
    quantiles: dict[str, int]
    histogram: list[list[int]]
    sources: list[dict[str, Any]]
    build: dict[str, Any]
    tokenizer: dict[str, str]

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / max(1, self.tokens)


def stats(path: str, *, progress: bool = True) -> list[DatasetStats]:
    """Statistics of the dataset in folder or at URL `path`, or of all datasets directly in it. Reads no tokens.

    Raises DataError as `ShardSet.open` does.
    """
    return [_of_dataset(ShardSet.open(one), progress) for one in datasets_at(path)]


def _of_dataset(dataset: ShardSet, progress: bool) -> DatasetStats:
    index = dataset.index
    counts = np.zeros(_EXACT + 32 * _STEPS, np.int64)
    octaves = np.zeros((33, 2), np.int64)  # documents and tokens by bit length of the length
    longest = prompts = 0
    with CorpusProgress("Counting", dataset.blocks, progress) as bar:
        for number, (lengths, prompt) in enumerate(_lengths(dataset)):
            if len(lengths):
                counts += np.bincount(_bin(lengths), minlength=len(counts))
                octave = np.ceil(np.log2(np.maximum(lengths, 1) + 1)).astype(np.int64) * (lengths > 0)
                octaves[:, 0] += np.bincount(octave, minlength=33)
                octaves[:, 1] += np.bincount(octave, weights=lengths, minlength=33).astype(np.int64)
                longest = max(longest, int(lengths.max()))
                prompts += int(prompt.sum(dtype=np.int64))
            bar.update(number + 1, int(dataset.first_documents[number + 1]), last=number + 1 == dataset.blocks)
    return DatasetStats(
        dataset.path, index.documents, index.tokens, index.text_bytes, sum(s.bytes for s in index.shards),
        len(index.shards), prompts, longest, _quantiles(counts),
        [[1 << (o - 1) if o else 0, (1 << o) - 1, *octaves[o].tolist()] for o in range(33) if octaves[o, 0]],
        list(index.sources), index.build, index.tokenizer,
    )  # fmt: skip


def _lengths(dataset: ShardSet) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Lengths and prompts of all blocks; several requests at a time, if they are remote."""
    if dataset.remote is None:
        yield from map(dataset.lengths, range(dataset.blocks))
        return
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            yield from pool.map(dataset.lengths, range(dataset.blocks))
        except BaseException:
            dataset.remote.close()  # the others need not be waited for
            raise


def _bin(lengths: np.ndarray) -> np.ndarray:
    steps = np.floor((np.log2(np.maximum(lengths, _EXACT)) - np.log2(_EXACT)) * _STEPS).astype(np.int64)
    return np.where(lengths < _EXACT, lengths, _EXACT + steps)


def _quantiles(counts: np.ndarray) -> dict[str, int]:
    total = int(counts.sum())
    found = np.searchsorted(np.cumsum(counts), [share * total for share in _QUANTILES], side="left")
    values = [b if b < _EXACT else round(_EXACT * 2 ** ((b - _EXACT + 0.5) / _STEPS)) for b in found.tolist()]
    return {f"{share:.0%}": int(value) for share, value in zip(_QUANTILES, values, strict=True)} if total else {}


def show_stats(found: list[DatasetStats], console: Console) -> None:
    """Print statistics as tables."""
    for one in found:
        console.print(f"[bold]{one.path}[/bold]")
        console.print(
            f"  {one.documents:,} documents, {one.tokens:,} tokens, {one.bytes_per_token:.2f} bytes of text per token, "
            f"{one.disk_bytes / 1e6:,.1f} MB in {one.shards} shards"
        )
        if one.prompt_tokens:
            console.print(f"  prompts: {one.prompt_tokens / max(1, one.tokens):.1%} of the tokens")
        made_by = f" by {one.build['encoder']}" if "encoder" in one.build else ""
        console.print(f"  tokenizer {one.tokenizer['kind']} {one.tokenizer['fingerprint'][:19]}{made_by}")
        quantiles = ", ".join(f"{share} {value:,}" for share, value in one.quantiles.items())
        console.print(f"  length in tokens: {quantiles}, longest {one.longest:,}")
        most = max((row[2] for row in one.histogram), default=1)
        table = Table("tokens", "documents", "share of tokens", "", box=None, padding=(0, 2))
        for first, last, documents, tokens in one.histogram:
            bar = "█" * max(1, round(_BAR * documents / most))
            table.add_row(f"{first:,}-{last:,}", f"{documents:,}", f"{tokens / max(1, one.tokens):.1%}", bar)
        console.print(table)
        if one.sources:
            table = Table("source", "documents", "tokens", "bytes per token", box=None, padding=(0, 2))
            for source in one.sources:
                ratio = source["text_bytes"] / max(1, source["tokens"])
                table.add_row(source["name"], f"{source['documents']:,}", f"{source['tokens']:,}", f"{ratio:.2f}")
            console.print(table)


def plot(found: list[DatasetStats], path: str) -> None:
    """Draw the lengths of the documents, by documents and by tokens, as the picture `path` (.png).

    Raises ConfigError when matplotlib is not there, DataError when the file cannot be written.
    """
    figure = new_figure(10, 3.2 * len(found))
    if not path.endswith(".png"):
        raise ConfigError(f"--plot {path}: the name must end in .png")
    axes = figure.subplots(len(found), 2, squeeze=False)
    for row, one in zip(axes, found, strict=True):
        names = [f"{max(1, last + 1) // 2:,}" for _, last, _, _ in one.histogram]
        for axis, column, what in ((row[0], 2, "documents"), (row[1], 3, "tokens")):
            axis.bar(range(len(names)), [entry[column] for entry in one.histogram], color="#4878a8")
            axis.set_xticks(range(len(names)), names, rotation=60, fontsize=7)
            axis.set_xlabel("tokens of a document, from")
            axis.set_ylabel(what)
        row[0].set_title(f"{one.path}: {one.documents:,} documents, {one.tokens:,} tokens", fontsize=9, loc="left")
    write_whole(path, lambda partial: figure.savefig(partial, format="png", dpi=120))
