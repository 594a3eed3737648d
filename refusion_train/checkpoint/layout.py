"""Between the optimizer state of a rank and logical tensors that know nothing of ranks.

A checkpoint holds, for every tensor of the Hugging Face model (full shape, vocabulary padded), `NAME.master`,
`NAME.exp_avg` and `NAME.exp_avg_sq` in float32, and `optimizer.steps`. Each rank writes the part that it owns, in
rectangles, without gathering anything; each rank reads the rectangles that it owns, however they were cut when they
were written. So a checkpoint of any layout of ranks, ZeRO stage and precision resumes on any other.

    flat elements start:start+count of a parameter        (parallel.zero: ZeRO's cut)
    -> intervals of its rows that are one logical tensor  (convert.names: query, key, value; gate, up)
    -> rectangles of that tensor                          (tensor-parallel offset; a cut within a row makes three)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from refusion_train.checkpoint.sharded import Offsets, ShardedEntry
from refusion_train.convert.names import Piece
from refusion_train.parallel.engine import Engine

STEPS = "optimizer.steps"


def tensors_to_save(engine: Engine) -> dict[str, Any]:
    """What this rank writes, for `torch.distributed.checkpoint.save`: views of live state, no copies, no collective.

    Of copies (parameters that all tensor-parallel ranks hold, tied embeddings on two stages) one is written.
    """
    return _entries(engine, writing=True)


def restore(engine: Engine, read: Callable[[dict[str, Any]], None]) -> None:
    """Fill a fresh engine from a checkpoint and compute with its weights. Collective.

    read: fills a dictionary of tensors in place from the checkpoint, as `torch.distributed.checkpoint.load` does;
    what it raises passes through.
    """
    tensors = _entries(engine, writing=False)
    read(tensors)
    engine.publish(int(tensors[STEPS].item()))


def restore_weights(engine: Engine, read: Callable[[dict[str, Any]], None]) -> None:
    """Fill a fresh engine with weights alone: step 0, moments at 0. Collective. `read` as in `restore`."""
    read({name: entry for name, entry in _entries(engine, writing=False).items() if name.endswith(".master")})
    engine.publish(0)


def _entries(engine: Engine, writing: bool) -> dict[str, Any]:
    """Logical name with suffix -> this rank's part of it."""
    parts: dict[str, tuple[tuple[int, ...], dict[Offsets, torch.Tensor]]] = {}
    pieces = {id(chunk): chunk.pieces() for chunk in engine.chunks}
    for named in engine.owned():
        owned = named.owned
        copy = getattr(owned.parameter, "shared_embedding", False) and not engine.groups.first_stage
        all_pieces = pieces[id(named.chunk)][named.name]
        block_rows = max(piece.stop for piece in all_pieces)
        for piece in all_pieces:
            if writing and (copy or (piece.replicated and engine.groups.tp_rank > 0)):
                continue
            for begin, end, at in intervals(piece, block_rows, owned.start, owned.count):
                for suffix, flat in owned.state.items():
                    _, found = parts.setdefault(f"{piece.name}.{suffix}", (piece.shape, {}))
                    found.update(rectangles(piece, at, flat[begin:end]))
    entries: dict[str, Any] = {name: ShardedEntry(shape, found) for name, (shape, found) in parts.items()}
    entries[STEPS] = torch.tensor([engine.optimizer_steps], dtype=torch.int64)
    return entries


def intervals(piece: Piece, block_rows: int, start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Where flat elements start:start+count of a parameter hold elements of `piece`.

    block_rows: rows of each of the parameter's `piece.groups` blocks.
    Yields (begin, end, at): begin:end within the flat elements is the stretch of the piece, flattened, from `at` on.
    """
    width = math.prod(piece.local_shape[1:])
    inside = (piece.stop - piece.start) * width  # elements of the piece in one block
    for group in range(piece.groups):
        first = (group * block_rows + piece.start) * width
        begin, end = max(first, start), min(first + inside, start + count)
        if begin < end:
            yield begin - start, end - start, group * inside + begin - first


def rectangles(piece: Piece, at: int, flat: torch.Tensor) -> Iterator[tuple[Offsets, torch.Tensor]]:
    """The stretch `flat` of a piece, flattened, from element `at` on, as rectangles of the full tensor with offsets.

    A stretch is the end of a row, whole rows and the beginning of a row; each may be missing. Views of `flat`.
    """
    if len(piece.shape) == 1:
        yield (piece.offset + at,), flat
        return
    width = piece.local_shape[1]
    done, total = 0, flat.numel()
    while done < total:
        row, column = divmod(at + done, width)
        if column or total - done < width:
            rows, columns = 1, min(width - column, total - done)
        else:
            rows, columns = (total - done) // width, width
        base_row, base_column = (piece.offset, 0) if piece.dim == 0 else (0, piece.offset)
        yield (base_row + row, base_column + column), flat[done : done + rows * columns].view(rows, columns)
        done += rows * columns
