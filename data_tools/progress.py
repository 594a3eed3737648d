"""How far reading a corpus has come: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

_BAR_SECONDS = 0.1
_LOG_SECONDS = 30.0
_SHORTEST = 0.05


class CorpusProgress:
    """Context manager: call `update` as often as you like.

    `total_bytes`: size of the files; shown are documents, documents/s, tokens/s, MB/s (bytes of the files) and the time
    left.
    """

    def __init__(self, title: str, total_bytes: int, enabled: bool = True):
        self._title, self._total = title, total_bytes
        self._console = Console(stderr=True)
        self._enabled = enabled
        self._bar: Progress | None = None
        self._begun = self._shown = time.monotonic()
        self._before = (0, 0, 0)

    def __enter__(self) -> CorpusProgress:
        self._begun = time.monotonic()
        if self._enabled and self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(self._title, total=max(1, self._total), rate="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def go_on(self, position: int, documents: int, tokens: int = 0) -> None:
        """An earlier run has done so much: rates are of what comes now."""
        self._before = (position, documents, tokens)

    def update(self, position: int, documents: int, last: bool = False, tokens: int = 0) -> None:
        """`position`: bytes read so far; `documents`, `tokens`: so far; `last`: show it in any case."""
        now = time.monotonic()
        if not self._enabled or (now - self._shown < (_BAR_SECONDS if self._bar else _LOG_SECONDS) and not last):
            return
        self._shown = now
        rate = describe_rate(documents, position, self._total, now - self._begun, tokens, self._before)
        if self._bar is not None:
            self._bar.update(self._task, completed=position, rate=rate)
        else:
            self._console.print(f"{self._title}: {position / max(1, self._total):4.0%}  {rate}", highlight=False)


class Spinner:
    """Context manager for a step of unknown length: a spinner with the time gone by, or one line in a log."""

    def __init__(self, title: str, enabled: bool = True):
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        if enabled and self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task(title, total=None)
        elif enabled:
            self._console.print(f"{title} ...", highlight=False)

    def __enter__(self) -> Spinner:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe_rate(
    documents: int,
    position: int,
    total: int,
    seconds: float,
    tokens: int = 0,
    before: tuple[int, int, int] = (0, 0, 0),
) -> str:
    """'12,345 documents, 678 documents/s, 9.0 MB/s, 0:01:23 left' from what was done in `seconds`.

    `before`: position, documents and tokens when they began. In less than 1/20 s nothing but the documents is told.
    """
    if seconds < _SHORTEST:  # nothing that could be called a rate
        return f"{documents:,} documents"
    per_second = (position - before[0]) / seconds
    left = "?" if per_second <= 0 else _clock((total - position) / per_second)
    speed = f", {(tokens - before[2]) / seconds / 1e6:.2f} M tokens/s" if tokens else ""
    return (
        f"{documents:,} documents, {(documents - before[1]) / seconds:,.0f} documents/s{speed}, "
        f"{per_second / 1e6:.1f} MB/s, {left} left"
    )


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
