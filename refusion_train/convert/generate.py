"""`refusion generate`: a prompt continued by an exported model, on the terminal, slots filling in place if wished."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from refusion_train.convert.family import CLASSES
from refusion_train.convert.trace import Recorder, check_target, write_page
from refusion_train.errors import ConfigError, DataError

if TYPE_CHECKING:
    from refusion_train.hf.runner import Update

Decode = Callable[[Sequence[int]], str]
_OPEN = "░"  # one for each token that is not decided yet


def generate_text(
    hf_dir: str,
    prompt: str,
    max_new_tokens: int | None = None,
    *,
    stream: bool = False,
    trace: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> str:
    """Continue `prompt` with the model in `hf_dir`, print prompt and continuation, and return the continuation.

    stream: show the response after every forward: in place on a terminal, else as a line each. trace: a page to write
    that replays the decoding (see `convert.trace`). device: default cuda
    if there is one. max_new_tokens and options: those of the model's `generate`. What it cost goes to stderr.
    Raises DataError for a folder that cannot be used and ConfigError for options that do not suit it.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    if trace is not None:
        check_target(trace)
    model, encode, decode = load_folder(hf_dir, device)
    ids = encode(prompt)
    try:
        with _screen(console, prompt, decode) if stream else nullcontext(None) as show:
            recorder = None if trace is None else Recorder(decode, _slot_size(model, options))
            watch = _both(show, recorder)
            out = _generate(model, ids, {"max_new_tokens": max_new_tokens, **options, "on_update": watch})
    except ValueError as error:
        raise ConfigError(f"{hf_dir}: {error}") from None
    text = decode(out[0, len(ids) :].tolist())
    console.print(Text.assemble((prompt, "bold"), text), soft_wrap=True)
    stats = model.last_stats
    if trace is not None and recorder is not None:
        write_page(trace, recorder, prompt, text, {"model": hf_dir, **_told(stats), **options})
    Console(stderr=True, highlight=False).print(
        f"{stats['new_tokens']} tokens in {stats['forwards']} forwards "
        f"({stats['tokens_per_forward']:.2f} tokens per forward), {stats['seconds']:.2f} s",
        style="dim",
    )
    return text


def load_folder(hf_dir: str, device: str | None = None) -> tuple[Any, Callable[[str], list[int]], Decode]:
    """Model, encoder (begin token in front) and decoder of a folder. Its code is not run: ours is the same.

    Raises DataError when it is not the folder of such a model.
    """
    import torch
    from safetensors import SafetensorError
    from transformers.utils import logging

    from refusion_train.hf import modeling_refusion

    folder = Path(hf_dir)
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        raise DataError(f"'{hf_dir}' is not a folder written by `refusion export`: no readable config.json") from None
    classes = {family: getattr(modeling_refusion, ours) for family, (_, ours) in CLASSES.items()}
    if config.get("model_type") not in classes:
        raise DataError(f"'{hf_dir}' holds a model of type {config.get('model_type')}; known: {', '.join(classes)}")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    logging.disable_progress_bar()
    try:
        model = classes[config["model_type"]].from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"the model in '{hf_dir}' cannot be loaded: {str(error).strip().splitlines()[0]}") from None
    # Processors without fast bfloat16 arithmetic are many; float32 holds the same weights.
    model = model.to(where) if where.type != "cpu" else model.float()
    return model.eval(), *_load_tokenizer(folder)


def _load_tokenizer(folder: Path) -> tuple[Callable[[str], list[int]], Decode]:
    """Encoder and decoder: of our own tokenizer where its files are there, else of transformers."""
    from refusion_train.data.tokenizer import META_FILE, Tokenizer

    if (folder / META_FILE).is_file():
        tokenizer = Tokenizer.load(folder)
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return lambda text: begin + tokenizer.encode(text), tokenizer.decode
    from transformers import AutoTokenizer

    try:
        other: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"no tokenizer in '{folder}': {str(error).strip().splitlines()[0]}") from None
    return other.encode, lambda ids: other.decode(ids, skip_special_tokens=True)


def _slot_size(model: Any, options: dict[str, Any]) -> int:
    """What the response is shown in; 8 for decodings that know no slots."""
    size = options.get("slot_size") or getattr(model.generation_config, "slot_size", None)
    return size if isinstance(size, int) and size > 0 else 8


def _told(stats: dict[str, Any]) -> dict[str, str]:
    return {
        "tokens": str(stats["new_tokens"]), "forwards": str(stats["forwards"]),
        "tokens per forward": f"{stats['tokens_per_forward']:.2f}",
    }  # fmt: skip


def _both(first: Callable[[Update], None] | None, second: Callable[[Update], None] | None) -> Any:
    """One callback that passes an update on to those of both that are there; None if there is none."""
    takers = [taker for taker in (first, second) if taker is not None]

    def pass_on(update: Update) -> None:
        for taker in takers:
            taker(update)

    return pass_on if takers else None


def _generate(model: Any, ids: list[int], options: dict[str, Any]) -> Any:
    import torch

    prompt = torch.tensor([ids], dtype=torch.long, device=model.device).reshape(1, -1)
    return model.generate(prompt, **options)


# ------------------------------------------------------------------------------------------------------------ stream


def render(update: Update, decode: Decode) -> str:
    """The response as it stands: decoded runs of decided tokens, and a mark for each other one."""
    parts: list[str] = []
    run: list[int] = []
    stop = _stop(update)
    for token, decided in zip(update.tokens[:stop], update.decided[:stop], strict=True):
        if decided:
            run.append(token)
            continue
        parts += [decode(run), _OPEN]
        run = []
    return "".join([*parts, decode(run)])


def _stop(update: Update) -> int:
    """Length of the response as far as is known: what stands behind an end token is cut."""
    return len(update.tokens) if update.end is None else min(update.end + 1, len(update.tokens))


def _screen(console: Console, prompt: str, decode: Decode) -> AbstractContextManager[Callable[[Update], None]]:
    """What shows updates: a live display on a terminal, otherwise a line for each."""
    return _Live(console, prompt, decode) if console.is_terminal else nullcontext(_Lines(console, decode))


class _Lines:
    """One line for each forward, for logs and pipes."""

    def __init__(self, console: Console, decode: Decode) -> None:
        self.console = console
        self.decode = decode

    def __call__(self, update: Update) -> None:
        text = render(update, self.decode).replace("\n", "\u23ce")
        self.console.print(Text(f"{update.forwards:4d} {sum(update.decided):4d} {text}"), soft_wrap=True)


class _Live:
    """The response in place, redrawn after every forward; it is gone afterwards."""

    def __init__(self, console: Console, prompt: str, decode: Decode) -> None:
        from rich.live import Live

        self.prompt = prompt
        self.decode = decode
        self.live = Live(console=console, transient=True, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> _Live:
        self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.__exit__(*error)

    def __call__(self, update: Update) -> None:
        body = Text.assemble((self.prompt, "bold"), render(update, self.decode))
        body.highlight_regex(f"{_OPEN}+", "cyan")
        self.live.update(Text.assemble(body, "\n", (self._status(update), "dim")), refresh=True)

    def _status(self, update: Update) -> str:
        stop = _stop(update)
        return f"{sum(update.decided[:stop])} of {stop} tokens after {update.forwards} forwards"
