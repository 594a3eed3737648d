"""What a build has to say: its datasets, and everything that was wrong in the inputs, counted and written down."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from data_tools.documents import PROBLEMS, Broken
from data_tools.encode import Encoded
from refusion_train.data.shard_index import Index
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import DataError

PROBLEMS_FILE = "problems.txt"
_EXAMPLES = 20


@dataclass
class BuildReport:
    """What was built. `datasets`: path and index of each; `problems`: how many of each kind of PROBLEMS; `examples`:
    the first of them, all of which are in `OUT/problems.txt`; `too_short`, `too_long`, `duplicates`: documents left out
    because it was asked for; `checked`: documents compared with the reference encoder; `resumed_at`: bytes of the
    inputs that an interrupted run had done; `already`: everything was there, nothing was done."""

    out: str
    datasets: dict[str, Index] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)
    examples: list[Broken] = field(default_factory=list)
    too_short: int = 0
    too_long: int = 0
    duplicates: int = 0
    checked: int = 0
    resumed_at: int = 0
    already: bool = False
    seconds: float = 0.0
    tokenizer: Tokenizer | None = None

    @property
    def empty(self) -> int:
        return self.problems["empty"]

    @property
    def broken(self) -> int:
        return self.problems["broken"]

    @property
    def documents(self) -> int:
        return sum(index.documents for index in self.datasets.values())

    @property
    def tokens(self) -> int:
        return sum(index.tokens for index in self.datasets.values())

    @property
    def text_bytes(self) -> int:
        return sum(index.text_bytes for index in self.datasets.values())

    def filtered(self) -> str:
        """What was left out on demand, as the rest of a list."""
        counts = {"too short": self.too_short, "too long": self.too_long, "duplicates": self.duplicates}
        return "".join(f", {count:,} {name}" for name, count in counts.items() if count)

    def summary(self) -> str:
        """Lines to print at the end."""
        lines = [
            f"{path}: {index.documents:,} documents, {index.tokens:,} tokens "
            f"({index.text_bytes / max(1, index.tokens):.2f} bytes per token) in {len(index.shards)} shards"
            for path, index in self.datasets.items()
        ]
        if self.already:
            return "\n".join([*lines, "all there already: the same command has made it; nothing was done"])
        lines.append(f"{self.seconds:.1f} s, {self.tokens / max(1e-9, self.seconds) / 1e6:.2f} M tokens/s")
        if self.tokenizer is not None and "mask" in self.tokenizer.added:
            lines.append(
                f"the tokenizer had no mask token; {self.tokenizer.special_pieces['mask']} was added as id "
                f"{self.tokenizer.mask_id}"
            )
        if self.resumed_at:
            lines.append(f"an interrupted run had done the first {self.resumed_at / 1e6:,.1f} MB of the inputs")
        if self.checked:
            lines.append(f"{self.checked:,} documents were compared with the reference encoder: no difference")
        if filtered := self.filtered():
            lines.append(f"left out as asked: {filtered.removeprefix(', ')}")
        lines += [f"{self.problems[kind]:,} {meaning}" for kind, meaning in PROBLEMS.items() if self.problems[kind]]
        if self.problems:
            lines.append(f"all of these are in {Path(self.out) / PROBLEMS_FILE}:")
            lines += [f"  {line}" for line in self.examples]
        return "\n".join(lines)


class ProblemLog:
    """Counts problems in a report and writes them to a file that exists only if there are any; with `strict` the first
    is an error. `resumed`: what `state` gave in the run that is continued."""

    def __init__(self, path: Path, report: BuildReport, strict: bool, resumed: dict[str, Any] | None = None):
        self.report = report
        self._path, self._strict = path, strict
        self._file: IO[str] | None = None
        if resumed is not None:
            self._restore(resumed["problems"])
        else:
            path.unlink(missing_ok=True)

    def __enter__(self) -> ProblemLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, encoded: Encoded) -> None:
        """Take over what came with the documents of a chunk. Raises DataError if `strict` and anything is wrong."""
        report = self.report
        report.too_short += encoded.too_short
        report.too_long += encoded.too_long
        report.checked += encoded.checked
        for problem in encoded.problems:
            if self._strict:
                raise DataError(f"{problem}; leave out --strict to go on all the same")
            if self._file is None:
                self._file = open(self._path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            self._file.write(f"{problem}\n")
            report.problems[problem.kind] += 1
            if len(report.examples) < _EXAMPLES:
                report.examples.append(problem)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; the file is on the disk when this returns."""
        size = 0
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        if self._path.exists():
            size = self._path.stat().st_size
        report = self.report
        return {
            "problems": {
                "bytes": size,
                "counts": dict(report.problems),
                "examples": [[e.file, e.line, e.reason, e.kind] for e in report.examples],
                "others": [report.too_short, report.too_long, report.checked],
            }
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if state["bytes"]:
            os.truncate(self._path, state["bytes"])
        else:
            self._path.unlink(missing_ok=True)
        report = self.report
        report.problems = Counter(state["counts"])
        report.examples = [Broken(*entry) for entry in state["examples"]]
        report.too_short, report.too_long, report.checked = state["others"]
