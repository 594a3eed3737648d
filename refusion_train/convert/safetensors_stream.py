"""Safetensors files written block by block, so that a model of any size is exported in the memory of one block.

The format: the header's length as 8 bytes (little endian), the header as JSON (name -> dtype, shape, offsets into the
data), then the data, row-major, without gaps. The safetensors library writes only whole dictionaries of tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_BLOCK_BYTES = 64 << 20

Shape = tuple[int, ...]
Read = Callable[[str, slice], torch.Tensor]


def blocks(shape: Shape, limit: int = _BLOCK_BYTES) -> Iterator[slice]:
    """Ranges of rows of a float32 tensor, in order, of at most `limit` bytes each (one row at least)."""
    rows = max(1, limit // max(1, 4 * math.prod(shape[1:])))
    return (slice(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows))


def write_model(
    folder: Path,
    shapes: dict[str, Shape],
    dtype: torch.dtype,
    read: Read,
    max_shard_bytes: int,
    tell: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Write model.safetensors, or model-0000N-of-M.safetensors with an index, in the names of transformers.

    read(name, rows): these rows of the tensor of that name (shape as in `shapes`, any float dtype), asked for once
    and dropped at once. tell: is given the bytes written after each block. Returns the names of the files with weights.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = _cut(sizes, max_shard_bytes)
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        _write_file(folder / file, {name: shapes[name] for name in names}, dtype, read, tell)
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return files


def _cut(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, in shards of at most `limit` bytes; a larger tensor is a shard of its own."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _write_file(
    file: Path,
    shapes: dict[str, Shape],
    dtype: torch.dtype,
    read: Read,
    tell: Callable[[int], None],
) -> None:
    with open(file, "wb") as stream:
        stream.write(_header(shapes, dtype))
        for name, shape in shapes.items():
            for rows in blocks(shape):
                tensor = read(name, rows)
                expected = (rows.stop - rows.start, *shape[1:])
                assert tuple(tensor.shape) == expected, f"{name} has shape {tuple(tensor.shape)}, not {expected}"
                data = tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
                del tensor
                stream.write(memoryview(data))  # pyright: ignore[reportArgumentType]
                tell(data.nbytes)
                del data
        stream.flush()
        os.fsync(stream.fileno())


def _header(shapes: dict[str, Shape], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def sync_all(paths: Iterable[Path]) -> None:
    """Have the contents of these files on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
