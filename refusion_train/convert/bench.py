"""`refusion bench decode`: what each decoder gets right, and how fast, on prompts with exact answers.

Prompts are taken one after the other, and for each all methods take turns in an order that changes from prompt to
prompt, so that whatever else the machine does hits all of them alike. Times are of one thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from data_tools.output import new_figure, write_whole
from refusion_train.convert.generate import load_folder
from refusion_train.errors import ConfigError, DataError


@dataclass
class Method:
    """A decoder with its options, on one model; what it did so far."""

    folder: str
    objective: str  # that the model was trained with
    name: str
    options: dict[str, Any]
    prompts: int = 0
    right: int = 0
    tokens: int = 0  # emitted, up to and including the end token
    forwards: int = 0
    query_tokens: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    prefill_seconds: float = 0.0  # CPU seconds of a forward over the prompts alone

    def summary(self) -> dict[str, Any]:
        """The counts and what follows from them, for JSON."""
        return {
            **asdict(self),
            "exact_match": self.right / max(1, self.prompts),
            "tokens_per_cpu_second": self.tokens / max(1e-9, self.cpu_seconds),
            "tokens_per_second": self.tokens / max(1e-9, self.wall_seconds),
            "tokens_per_forward": self.tokens / max(1, self.forwards),
            "forwards_per_sequence": self.forwards / max(1, self.prompts),
        }


@dataclass
class Subject:
    """A loaded folder and the methods that suit it."""

    model: Any
    encode: Any
    decode: Any
    methods: list[Method] = field(default_factory=list)


def bench_decode(
    folders: Sequence[str], test: str, limit: int | None = None, max_new_tokens: int | None = None,
    slot_sizes: Sequence[int] = (), console: Console | None = None,
) -> list[Method]:  # fmt: skip
    """Decode the prompts of `test` (JSON lines with prompt and response) with every method of every folder.

    limit: the first so many prompts. max_new_tokens: default: what the longest response needs, in slots of every size.
    slot_sizes: default: that of the folder. Raises DataError for files and ConfigError for options that do not suit.
    """
    import torch

    pairs = read_pairs(test)[:limit]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        subjects = []
        for folder in folders:
            subject = Subject(*load_folder(folder, "cpu"))
            longest = max(
                len(subject.encode(prompt + answer)) - len(subject.encode(prompt)) for prompt, answer in pairs
            )
            subject.methods = _methods(
                folder, subject.model, max_new_tokens or -(-(longest + 2) // 32) * 32, slot_sizes
            )
            subjects.append(subject)
        turns = [(subject, method) for subject in subjects for method in subject.methods]
        for subject, method in turns:  # what is made once is not measured
            _one(subject, method, *pairs[0], count=False)
        for number, pair in enumerate(pairs):
            if console is not None and console.is_terminal:
                console.print(f"{number}/{len(pairs)} prompts", end="\r")
            for index in range(len(turns)):
                _one(*turns[(index + number) % len(turns)], *pair)
        return [method for _, method in turns]
    finally:
        torch.set_num_threads(before)


def read_pairs(path: str) -> list[tuple[str, str]]:
    """Prompts and responses of a file of JSON lines. Raises DataError naming the line."""
    pairs = []
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise DataError(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            pairs.append((str(record["prompt"]), str(record["response"])))
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}:{number} is not an object with prompt and response; see data arithmetic") from None
    if not pairs:
        raise DataError(f"'{path}' has no lines; refusion data arithmetic writes such files")
    return pairs


def _methods(folder: str, model: Any, new: int, slot_sizes: Sequence[int]) -> list[Method]:
    """The decoders that suit how a model was trained."""
    trained = getattr(model.config, "refusion", None) or {}
    objective = trained.get("objective", "ar")
    base = {"max_new_tokens": new}
    if objective == "mdm":
        found = {
            "mdm": {"decoding": "mdm"},
            "mdm, half the steps": {"decoding": "mdm", "steps": max(1, new // 2)},
            "mdm, confidence > 0.9": {"decoding": "mdm", "confidence_threshold": 0.9},
        }
    elif objective == "slots":
        found = {}
        for size in slot_sizes or [model.generation_config.slot_size]:
            found[f"slots of {size}"] = {"slot_size": size}
            found[f"slots of {size}, redraft"] = {"slot_size": size, "correction": "redraft"}
            if trained.get("cross_slot_targets"):
                found[f"slots of {size}, side by side"] = {"slot_size": size, "join_slots": False}
        found["left to right"] = {"decoding": "left_to_right"}
    else:
        found = {"left to right": {"decoding": "left_to_right"}}
    return [Method(folder, objective, name, {**base, **options}) for name, options in found.items()]


def _one(subject: Subject, method: Method, prompt: str, answer: str, count: bool = True) -> None:
    import torch

    from refusion_train.hf.cache import KeyValueCache, Query, forward

    ids = subject.encode(prompt)
    began, wall = time.process_time(), time.perf_counter()
    try:
        out = subject.model.generate(torch.tensor([ids]), **method.options)
    except ValueError as error:
        raise ConfigError(f"{method.folder}: {error}") from None
    spent, took = time.process_time() - began, time.perf_counter() - wall
    if not count:
        return
    began = time.process_time()
    with torch.no_grad():
        forward(subject.model, KeyValueCache(subject.model, len(ids)), [Query(ids, list(range(len(ids))))])
    method.prefill_seconds += time.process_time() - began
    stats = subject.model.last_stats
    method.prompts += 1
    method.right += subject.decode(out[0, len(ids) :].tolist()).strip() == answer.strip()
    method.tokens += stats["new_tokens"]
    method.forwards += stats["forwards"]
    method.query_tokens += stats["query_tokens"]
    method.cpu_seconds += spent
    method.wall_seconds += took


def show(methods: Sequence[Method], console: Console) -> None:
    """Print a table; speed also relative to the first left-to-right decoder."""
    table = Table(title="Decoding, batch 1, one thread")
    for name in ("model", "decoder", "exact", "tokens/CPU s", "tokens/s", "speed", "tokens/forward", "forwards/answer",
                 "query tokens/answer", "prefill ms"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("model", "decoder") else "right")
    first = next((m for m in methods if m.name == "left to right"), methods[0]).summary()["tokens_per_cpu_second"]
    for method in methods:
        found = method.summary()
        table.add_row(
            method.folder, method.name, f"{found['exact_match']:.1%}", f"{found['tokens_per_cpu_second']:.0f}",
            f"{found['tokens_per_second']:.0f}", f"{found['tokens_per_cpu_second'] / first:.2f}x",
            f"{found['tokens_per_forward']:.2f}", f"{found['forwards_per_sequence']:.1f}",
            f"{method.query_tokens / max(1, method.prompts):.0f}",
            f"{1000 * method.prefill_seconds / max(1, method.prompts):.1f}",
        )  # fmt: skip
    console.print(table)


def write_json(methods: Sequence[Method], path: str) -> None:
    """One list of summaries."""
    text = json.dumps([method.summary() for method in methods], indent=1) + "\n"
    write_whole(path, lambda partial: partial.write_text(text))


def plot(methods: Sequence[Method], path: str) -> None:
    """Speed over quality as a .png."""
    figure = new_figure(7, 5)
    axis = figure.add_subplot()
    for method in methods:
        found = method.summary()
        place = (100 * found["exact_match"], found["tokens_per_cpu_second"])
        axis.scatter(*place)
        axis.annotate(f"{Path(method.folder).name}: {method.name}", place, fontsize=7)
    axis.set_xlabel("exact answers, %")
    axis.set_ylabel("tokens per CPU second")
    write_whole(path, lambda partial: figure.savefig(partial, format="png", dpi=120))
