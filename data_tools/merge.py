"""Parts that several machines made, as one dataset: the shards stay as they are and get a common index.

The shards are linked into the new folder (hard links where the file system has them, else symbolic ones), so the
result is a folder like any other, takes no space, and with hard links outlives the parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_tools.build_shards import is_build
from data_tools.output import new_folder
from data_tools.sinks import TRAIN, VALIDATION
from refusion_train.data.shard_index import TOKENIZER_FOLDER, Index, ShardInfo, dataset_fingerprint, datasets_in
from refusion_train.data.tokenizer import copy_tokenizer
from refusion_train.data.transport import is_url
from refusion_train.errors import DataError


@dataclass
class MergeReport:
    """`datasets`: path and index of each; `parts`: how many were joined."""

    datasets: dict[str, Index]
    parts: int

    def summary(self) -> str:
        """Lines to print."""
        return "\n".join(
            f"{path}: {index.documents:,} documents, {index.tokens:,} tokens in {len(index.shards)} shards "
            f"of {self.parts} parts"
            for path, index in self.datasets.items()
        )


def merge(parts: Sequence[str], out: str, *, overwrite: bool = False) -> MergeReport:
    """Join the datasets of the folders `parts` (what `build_shards` made) into OUT/train and OUT/validation.

    Parts of one build (`part="i/n"`) must be all of it, each once, and are joined in their order; others in the order
    given. Raises DataError when they do not belong together, when one is missing or not complete.
    """
    remote = [part for part in parts if is_url(part)]
    if remote:
        raise DataError(f"'{remote[0]}' is a URL; merge links files, so copy the part to a folder first")
    folders = [Path(part) for part in parts]
    found = {folder: _datasets(folder) for folder in folders}
    everything = [(path, index) for datasets in found.values() for path, index in datasets.values()]
    _check_alike(everything)
    order = _in_order(found)
    merged: dict[str, Index] = {}
    with new_folder(out, overwrite, is_build) as target:
        for name in (TRAIN, VALIDATION):
            pieces = [found[folder][name] for folder in order if name in found[folder]]
            if pieces:
                merged[name] = _merge_one(pieces, target / name, Path(out) / name)
    return MergeReport({str(Path(out) / name): index for name, index in merged.items()}, len(folders))


def _datasets(folder: Path) -> dict[str, tuple[Path, Index]]:
    paths = datasets_in(folder)
    if not paths:
        Index.read(folder)  # says what is missing
    if paths == [folder]:
        name = VALIDATION if folder.name == VALIDATION else TRAIN
        return {name: (folder, Index.read(folder))}
    others = [str(path) for path in paths if path.name not in (TRAIN, VALIDATION)]
    if others:
        raise DataError(f"'{folder}' holds {others[0]}, which is not a part's train or validation; name the parts")
    return {path.name: (path, Index.read(path)) for path in paths}


def _check_alike(datasets: list[tuple[Path, Index]]) -> None:
    (first_path, first), *others = datasets
    for path, index in others:
        for what in ("tokenizer", "vocab_size", "dtype", "special_ids"):
            if getattr(index, what) != getattr(first, what):
                raise DataError(
                    f"'{path}' and '{first_path}' do not belong together: {what} is {getattr(index, what)} and "
                    f"{getattr(first, what)}; build them with the same tokenizer"
                )


def _in_order(found: dict[Path, dict[str, tuple[Path, Index]]]) -> list[Path]:
    """The folders by the number of their part; all as they are if none is a part."""
    builds: dict[Path, dict[str, Any]] = {
        folder: next(iter(datasets.values()))[1].build for folder, datasets in found.items()
    }
    parts = {folder: build.get("part") for folder, build in builds.items()}
    if not any(parts.values()):
        return list(found)
    numbered: dict[int, Path] = {}
    whole = builds[next(iter(found))]
    for folder, part in parts.items():
        if part is None or builds[folder]["job"] != whole["job"] or part.split("/")[1] != whole["part"].split("/")[1]:
            raise DataError(f"'{folder}' is not a part of the same build as '{next(iter(found))}' (inputs or options)")
        number = int(part.split("/")[0])
        if number in numbered:
            raise DataError(f"'{folder}' and '{numbered[number]}' are both part {part}; name each part once")
        numbered[number] = folder
    count = int(whole["part"].split("/")[1])
    missing = [f"{i}/{count}" for i in range(1, count + 1) if i not in numbered]
    if missing:
        raise DataError(f"part {', '.join(missing[:5])} of {count} is missing; build it or name its folder")
    return [numbered[number] for number in sorted(numbered)]


def _merge_one(pieces: list[tuple[Path, Index]], target: Path, final: Path) -> Index:
    target.mkdir()
    names = [shard.name for _, index in pieces for shard in index.shards]
    alike = len(set(names)) < len(names)
    shards: list[ShardInfo] = []
    for number, (path, index) in enumerate(pieces):
        for shard in index.shards:
            name = f"{number:0{len(str(len(pieces)))}d}-{shard.name}" if alike else shard.name
            _link(path / shard.name, target / name, final / name, shard)
            shards.append(replace(shard, name=name))
    first = pieces[0][1]
    build = {**first.build, "part": None, "merged": len(pieces)} if first.build else {}
    merged = replace(
        first, shards=tuple(shards), sources=_sources([index for _, index in pieces]), build=build,
        fingerprint=dataset_fingerprint(first.tokenizer["fingerprint"], shards),
        **{name: sum(getattr(index, name) for _, index in pieces) for name in ("documents", "tokens", "text_bytes")},
    )  # fmt: skip
    copy_tokenizer(pieces[0][0] / TOKENIZER_FOLDER, target / TOKENIZER_FOLDER)
    merged.write(target)
    return merged


def _sources(indexes: list[Index]) -> tuple[dict[str, Any], ...]:
    sums: dict[str, dict[str, Any]] = {}
    for index in indexes:
        for source in index.sources:
            here = sums.setdefault(source["name"], {"name": source["name"]})
            for name, value in source.items():
                if name != "name":
                    here[name] = here.get(name, 0) + value
    return tuple(sums.values())


def _link(source: Path, target: Path, final: Path, shard: ShardInfo) -> None:
    """`final`: where the link will lie in the end, which is where a symbolic one is read from."""
    if not source.is_file() or source.stat().st_size != shard.bytes:
        raise DataError(f"'{source}' is missing or has another size than its index says; build the part again")
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        os.symlink(os.path.relpath(source.resolve(), final.resolve().parent), target)
