"""Rows as the model gets them, made readable: every document slot by slot, in physical order.

A line is one slot: its state, its original positions, its tokens. Of a masked token the target is shown. `>` at the
end of a clean slot or a prompt is followed by the token that its last one predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.text import Text

from refusion_train.config import Config
from refusion_train.data.packing import Pieces, RowPacker
from refusion_train.data.shards import ShardSet
from refusion_train.data.streams import DataOrder, Stream
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.objective import MASKED, NONE, Batch, Objective, PackedDocuments, make_objective

_LINES_SHOWN = 24
# Where there are no slots, or they are drawn in an order not known here: lines of so many tokens.
_LINE_TOKENS = 16
_STYLES = {"prompt": "cyan", "clean": "green", "masked": "bold magenta"}
_NO_TARGET = "dim"


@dataclass(frozen=True)
class Line:
    """Part of a row, `start` to `stop`, that lies together in the document: a prompt, or a slot."""

    kind: str  # prompt, clean, masked
    start: int
    stop: int


def show_rows(
    dataset: ShardSet,
    tokenizer: Tokenizer,
    config: Config,
    n: int,
    console: Console,
    full: bool,
    step: int | None = None,
) -> None:
    """Print the first `n` rows that a run with `config` trains on.

    step: show them as they would be corrupted in this step, in place of the one that they belong to.
    """
    order = DataOrder.of(dataset, config)
    packer = RowPacker(n, config.data.sequence_length, tokenizer.pad_id)
    streams = {number: Stream(order, number) for number in range(min(n, config.data.streams))}
    for row in range(n):
        streams[row % config.data.streams].fill(packer, row)
    packed, pieces = packer.finish(config.seed, order.dataset_hash)
    objective = make_objective(config.objective, tokenizer.mask_id, tokenizer.pad_id)
    at_once = config.train.global_batch_size
    parts = [
        (packed.some_rows(row, row + at_once)[0], row // at_once if step is None else step)
        for row in range(0, n, at_once)
    ]
    batches = [objective.corrupt(part, step=at) for part, at in parts]
    batch = Batch(*(np.concatenate([getattr(one, name) for one in batches]) for name in Batch.__dataclass_fields__))
    sizes = [size for part, at in parts for size in slot_sizes(objective, part, at)]
    console.print(_legend())
    for piece in range(len(pieces.rows)):
        _show_piece(batch, packed, pieces, piece, sizes[piece], tokenizer, console, full)


def slot_sizes(objective: Objective, packed: PackedDocuments, step: int) -> list[int | None]:
    """The slot size of each document, 0 for those that are trained plainly left to right.

    None where there are no slots or they are not drawn by hash.
    """
    if objective.config.name != "slots" or objective.config.rng != "counter":
        return [None] * len(packed.keys)
    sizes, plain = objective.slot_sizes(packed, step), objective.plain(packed)
    return (sizes if plain is None else np.where(plain, 0, sizes)).tolist()


def lines_of(positions: np.ndarray, kinds: np.ndarray, prompt: int, size: int) -> list[Line]:
    """Cut a document's part of a row into its prompt and its slots.

    positions: int64 [n] original positions in physical order; kinds: target kinds of the same tokens; prompt: tokens
    of the prompt, which come first; size: tokens of a slot.
    """
    lines = [Line("prompt", 0, prompt)] if prompt else []
    start = prompt
    while start < len(positions):
        stop = min(len(positions), start + size)
        # The short last slot of a document may stand anywhere among the clean ones.
        jumps = np.flatnonzero(np.diff(positions[start:stop]) != 1)
        stop = start + int(jumps[0]) + 1 if len(jumps) else stop
        masked = bool((kinds[start:stop] == MASKED).any())
        lines.append(Line("masked" if masked else "clean", start, stop))
        start = stop
    return lines


def _show_piece(
    batch: Batch,
    packed: PackedDocuments,
    pieces: Pieces,
    piece: int,
    size: int | None,
    tokenizer: Tokenizer,
    console: Console,
    full: bool,
) -> None:
    row, column = divmod(int(packed.starts[piece]), packed.tokens.shape[1])
    length, offset = int(packed.lengths[piece]), int(pieces.offsets[piece])
    part = (row, slice(column, column + length))
    title = f"row {row}  document {pieces.documents[piece]}, tokens {offset} to {offset + length - 1}"
    title += "" if size is None else f"  slot size {size}" if size else "  left to right"
    console.print(Text(title, style="bold"))
    lines = lines_of(
        batch.position_ids[part], batch.target_kind[part], int(packed.prompts[piece]), size or _LINE_TOKENS
    )
    for line in lines if full else lines[:_LINES_SHOWN]:
        console.print(_line_text(batch, part, line, tokenizer), no_wrap=full, crop=False)
    if not full and len(lines) > _LINES_SHOWN:
        console.print(Text(f"  ... {len(lines) - _LINES_SHOWN} more lines", style="dim"))


def _line_text(batch: Batch, part: tuple[int, slice], line: Line, tokenizer: Tokenizer) -> Text:
    inputs, labels, kinds, positions = (
        array[part][line.start : line.stop]
        for array in (batch.input_ids, batch.labels, batch.target_kind, batch.position_ids)
    )
    where = f"{positions[0]}-{positions[-1]}" if len(positions) > 1 else f"{positions[0]}"
    text = Text(f"  {line.kind:<7}{where:>11}  ", style=_STYLES[line.kind])
    for place, (style, token) in enumerate(_styled_tokens(line, inputs, labels, kinds)):
        text.append("|" if place else "", style="dim")
        text.append(_visible(tokenizer.piece(token)), style=style)
    if kinds[-1] not in (NONE, MASKED):
        text.append(" > ", style="dim")
        text.append(_visible(tokenizer.piece(int(labels[-1]))), style="yellow")
    return text


def _styled_tokens(line: Line, inputs: np.ndarray, labels: np.ndarray, kinds: np.ndarray) -> Iterator[tuple[str, int]]:
    """Style and token to show: of a masked token its target, in the colour of its state."""
    for token, label, kind in zip(inputs.tolist(), labels.tolist(), kinds.tolist(), strict=True):
        if kind == MASKED:
            yield _STYLES["masked"], label
        elif line.kind == "prompt":
            yield _STYLES["prompt"], token
        else:
            yield _STYLES["clean"] + ("" if kind != NONE else f" {_NO_TARGET}"), token


def _visible(piece: str) -> str:
    return piece.replace("\n", "\u21b5").replace("\t", "\u21e5").replace("\r", "\u240d")


def _legend() -> Text:
    text = Text("physical order; ")
    for kind, meaning in (
        ("prompt", "prompt"),
        ("clean", "clean slot"),
        ("masked", "masked slot: its targets"),
    ):
        text.append(meaning, style=_STYLES[kind]).append(", ")
    text.append("predicts no token", style=f"{_STYLES['clean']} {_NO_TARGET}")
    return text.append(", ").append("> next token predicted", style="yellow")
