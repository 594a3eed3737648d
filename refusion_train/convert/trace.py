"""`refusion generate --trace`: one self-contained page that replays how a response was decoded.

A `Recorder` takes the updates of a decoding and keeps a `Frame` for each forward: every token of the response region
with its state, the physical order of what the cache holds, what the forward did. The page shows the frames one by one
(step, play), and below them all forwards as one static picture, for print.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from data_tools.output import write_whole
from refusion_train.errors import ConfigError

if TYPE_CHECKING:
    from refusion_train.hf.decoding import Note
    from refusion_train.hf.runner import Update

# What a token of the response can be after a forward, in the order of the legend.
STATES = {
    "open": "not decided",
    "candidate": "first token of a slot that must wait",
    "planned": "first token of a chosen slot",
    "draft": "drafted from masks",
    "rejected": "drafted, then rejected",
    "corrected": "put right by the distribution that rejected it",
    "redrawn": "drawn again from masks",
    "accepted": "accepted",
    "committed": "accepted, and its keys in the cache",
    "cut": "behind the end",
}
_FINAL = ("committed", "accepted", "corrected", "redrawn", "planned")
_LASTING = (*_FINAL, "draft")
_CELL = 7  # of the static picture, in its units


@dataclass
class Cell:
    """A token of the response region after a forward. confidence: 0 if the forward said none."""

    text: str
    state: str
    confidence: float = 0.0


@dataclass
class Frame:
    """All tokens after a forward, slots in the physical order of the cache, and what the forward did, in words."""

    forward: int
    cells: list[Cell]
    cache: list[int]
    says: str


class Recorder:
    """Makes frames of the updates of one sequence; give it to `generate` as `on_update`."""

    def __init__(self, decode: Callable[[Sequence[int]], str], slot_size: int) -> None:
        self.decode = decode
        self.slot_size = slot_size
        self.frames: list[Frame] = []
        self._cells: list[Cell] = []
        self._cache: list[int] = []

    def __call__(self, update: Update) -> None:
        if not self._cells:
            self._cells = [Cell("", "open") for _ in update.tokens]
        self._cells = [cell if cell.state in _LASTING else Cell("", "open") for cell in self._cells]
        for cell in self._cells:
            cell.confidence = 0.0
        for note in update.notes:
            self._apply(note)
        if any(note.what == "committed" for note in update.notes):
            # What was drafted beside them, but is not kept, is planned anew.
            for cell in self._cells:
                cell.state = "rejected" if cell.state in _LASTING[1:] else cell.state
        for offset, (token, decided) in enumerate(zip(update.tokens, update.decided, strict=True)):
            if decided and self._cells[offset].state not in _FINAL:
                self._cells[offset] = Cell(self._text(token), "accepted")
            if update.end is not None and offset > update.end:
                self._cells[offset] = Cell("", "cut")
        cells = [Cell(cell.text, cell.state, cell.confidence) for cell in self._cells]
        self.frames.append(Frame(update.forwards, cells, list(self._cache), _in_words(update)))

    def _apply(self, note: Note) -> None:
        """Put what a note says into the cells of its slot."""
        first = note.slot * self.slot_size
        for index, token in enumerate(note.tokens):
            if first + index >= len(self._cells):
                break
            state = self._state(note, index, self._cells[first + index].state)
            sure = note.confidences[index] if index < len(note.confidences) else 0.0
            self._cells[first + index] = Cell(self._text(token), state, sure)
        if note.what == "committed":
            self._cache.append(note.slot)

    def _state(self, note: Note, index: int, before: str) -> str:
        if note.what in ("candidate", "committed"):
            return note.what
        if note.what == "planned":
            return "planned" if index == 0 else "draft"
        if index >= note.accepted:
            return "rejected" if note.what == "judged" else "draft"
        if note.what in ("corrected", "redrawn") and index == note.accepted - 1:
            return note.what
        return before if before in _FINAL else "accepted"

    def _text(self, token: int) -> str:
        return self.decode([token]).replace("\n", "\u23ce").replace("\t", "\u21e5")


def _in_words(update: Update) -> str:
    """What a forward did."""
    slots: dict[str, int] = {}
    for note in update.notes:
        slots[note.what] = slots.get(note.what, 0) + 1
    judged = [note for note in update.notes if note.what == "judged"]
    words = []
    if "planned" in slots:
        words.append(f"{slots['planned']} slots planned, {slots.get('candidate', 0)} wait")
    if judged:
        words.append(f"{sum(note.accepted for note in judged)} of {sum(len(n.tokens) for n in judged)} tokens accepted "
                     f"in {len(judged)} slots")  # fmt: skip
    words += [f"{slots[what]} slots {what}" for what in ("corrected", "redrawn", "committed") if what in slots]
    return ", ".join(words) or f"{sum(update.decided)} tokens decided"


# -------------------------------------------------------------------------------------------------------------- page


def check_target(path: Path) -> None:
    """Refuse, before anything is decoded, a page that exists already or cannot be written. Raises ConfigError."""
    if path.exists():
        raise ConfigError(f"--trace {path} exists already; give another name, or remove it")
    if not path.parent.is_dir():
        raise ConfigError(f"--trace {path}: there is no folder {path.parent}")


def write_page(path: Path, recorder: Recorder, prompt: str, response: str, settings: dict[str, object]) -> None:
    """Write the page, whole or not at all. settings: what to show of how it was decoded. Raises DataError."""
    template = resources.files("refusion_train.convert").joinpath("trace.html").read_text(encoding="utf-8")
    frames = [
        {"forward": frame.forward, "says": frame.says, "cache": frame.cache,
         "cells": [[cell.text, cell.state, round(cell.confidence, 4)] for cell in frame.cells]}
        for frame in recorder.frames
    ]  # fmt: skip
    data = json.dumps({"slot_size": recorder.slot_size, "states": STATES, "frames": frames}, ensure_ascii=False)
    parts = {
        "PROMPT": html.escape(prompt), "RESPONSE": html.escape(response),
        "SETTINGS": html.escape(", ".join(f"{name} {value}" for name, value in settings.items())),
        "PICTURE": picture(recorder.frames, recorder.slot_size),
        "DATA": data.replace("<", "\\u003c"),  # no text can end the script
    }  # fmt: skip
    # All at once: what stands for a part in the template may also stand in a prompt.
    page = re.sub(f"@({'|'.join(parts)})@", lambda match: parts[match[1]], template)
    write_whole(path, lambda partial: partial.write_text(page, encoding="utf-8"))


def picture(frames: list[Frame], slot_size: int) -> str:
    """All forwards as one SVG: a line for each, a square for each token, its colour the state."""
    if not frames:
        return ""
    columns = len(frames[0].cells)
    gaps = [offset + offset // slot_size * 0.4 for offset in range(columns)]
    width, height = (gaps[-1] + 1) * _CELL + 30, len(frames) * _CELL + 4
    lines = [f'<svg id="picture" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="all forwards">']
    for row, frame in enumerate(frames):
        y = row * _CELL
        lines.append(f'<text x="26" y="{y + 6}" class="n">{frame.forward}</text>')
        lines += [
            f'<rect x="{30 + gaps[offset] * _CELL:g}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" '
            f'class="{cell.state}"><title>{html.escape(cell.text)}</title></rect>'
            for offset, cell in enumerate(frame.cells)
            if cell.state != "cut"
        ]
    return "\n".join([*lines, "</svg>"])
