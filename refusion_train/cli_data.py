"""The `refusion data` commands: parsing and printing only, as in `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

data_app = typer.Typer(
    help="Corpora to tokenizers and shards, and looking at them.", no_args_is_help=True, add_completion=False
)

Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Files, folders or globs of .txt, .jsonl, .json, .tar (also .gz, .zst, .bz2, .xz), .parquet; - for "
        "standard input.",
        metavar="INPUT...", show_default=False,
    ),
]  # fmt: skip
Dataset = Annotated[str, typer.Argument(help="Folder of shards, or a URL.", show_default=False)]
TextField = Annotated[str, typer.Option(help="Field of a record that holds the text; a.b for b in a.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing folder.")]


@data_app.command("tokenizer")
def data_tokenizer(
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="Folder to write the tokenizer to.")],
    vocab_size: Annotated[int, typer.Option(help="Number of pieces, special ones included.", min=270)] = 32000,
    model_type: Annotated[Literal["bpe", "unigram"], typer.Option(help="bpe, or unigram (slower).")] = "bpe",
    text_field: TextField = "text",
    overwrite: Overwrite = False,
) -> None:
    """Train a SentencePiece tokenizer with byte fallback, begin, end and mask tokens.

    Example: refusion data tokenizer corpus/*.jsonl.zst --vocab-size 32000 --out tokenizer
    """
    from data_tools.train_tokenizer import train_tokenizer

    report = train_tokenizer(
        inputs, str(out), vocab_size=vocab_size, model_type=model_type, text_field=text_field, overwrite=overwrite
    )
    typer.echo(report.summary())


@data_app.command("shards")
def data_shards(
    inputs: Inputs,
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer: ours, SentencePiece, or tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="Folder to write the shards to.")],
    val_fraction: Annotated[float, typer.Option(help="Share of documents held out.", min=0.0, max=0.9)] = 0.0,
    text_field: TextField = "text",
    prompt_field: Annotated[Optional[str], typer.Option(help="Prompt of a pair, with --response-field.")] = None,  # noqa: UP045
    response_field: Annotated[Optional[str], typer.Option(help="Response of a pair.")] = None,  # noqa: UP045
    messages_field: Annotated[Optional[str], typer.Option(help="Messages of a chat; the last is to learn.")] = None,  # noqa: UP045
    chat_template: Annotated[Optional[Path], typer.Option(help="Template file, if not the tokenizer's.")] = None,  # noqa: UP045
    input_format: Annotated[
        Optional[Literal["txt", "jsonl", "json", "parquet", "tar"]],  # noqa: UP045
        typer.Option(help="Of all inputs, whatever their names say."),
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Leave out shorter documents.", min=0)] = 0,
    max_tokens: Annotated[Optional[int], typer.Option(help="Leave out longer documents.", min=1)] = None,  # noqa: UP045
    dedup: Annotated[bool, typer.Option("--dedup", help="Of equal texts keep only the first.")] = False,
    shuffle: Annotated[Optional[int], typer.Option(help="Seed of a global order of the documents.")] = None,  # noqa: UP045
    part: Annotated[Optional[str], typer.Option(help="i/n: only that part of the inputs; see data merge.")] = None,  # noqa: UP045
    encoder: Annotated[
        Literal["auto", "fast", "reference"], typer.Option(help="For tokenizer.json: fastokens, or tokenizers.")
    ] = "auto",
    shard_size: Annotated[int, typer.Option(help="Size of a shard in MiB.", min=1)] = 256,
    workers: Annotated[Optional[int], typer.Option(help="Processes that encode; default: all cores.", min=1)] = None,  # noqa: UP045
    strict: Annotated[bool, typer.Option(help="Stop at the first thing that is wrong in the inputs.")] = False,
    overwrite: Overwrite = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not go on with an interrupted build.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only look whether inputs and options are right.")] = False,
) -> None:
    """Tokenize documents into WebDataset shards with an index.

    The same command again goes on after an interruption. The shards do not depend on the number of workers.

    Examples: refusion data shards corpus/ --tokenizer tokenizer --out shards --val-fraction 0.01
              refusion data shards chats.parquet --messages-field messages --tokenizer Qwen3-0.6B --out chats
              refusion data shards web/ --part 3/8 --tokenizer tokenizer --out parts/3
    """
    from data_tools.build_shards import build_shards

    report = build_shards(
        inputs, str(tokenizer), str(out), workers=workers, val_fraction=val_fraction, text_field=text_field,
        prompt_field=prompt_field, response_field=response_field, messages_field=messages_field,
        chat_template=None if chat_template is None else str(chat_template), input_format=input_format,
        min_tokens=min_tokens, max_tokens=max_tokens, dedup=dedup, shuffle=shuffle, part=part, encoder=encoder,
        shard_bytes=shard_size << 20, strict=strict, overwrite=overwrite, fresh=fresh, check_only=check,
    )  # fmt: skip
    if not check:
        typer.echo(report.summary())


def check_shards_words(words: list[str], parts: int) -> None:
    """What `refusion data shards WORDS` would say at once, for parts of the inputs; nothing is read or written.

    words: without --out, --part and --overwrite. Raises what the command does.
    """
    data_app(args=["shards", *words, "--part", f"1/{parts}", "--out", ".", "--check"], standalone_mode=False)


@data_app.command("arithmetic")
def data_arithmetic(
    out: Annotated[Path, typer.Option(help="Folder to write train.jsonl and test.jsonl to.")],
    level: Annotated[
        Literal["aligned", "easy", "medium", "hard"], typer.Option(help="Number and size of the problems.")
    ] = "easy",
    train: Annotated[int, typer.Option(help="Documents to train on.", min=0)] = 20000,
    test: Annotated[int, typer.Option(help="Documents to test with; none has a prompt of the others.", min=0)] = 200,
    seed: Annotated[int, typer.Option(help="Another seed, other documents.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write a task with exact answers: small problems, and their running total, which is serial.

    Example: refusion data arithmetic --out sums --level medium
             refusion data shards sums/train.jsonl --prompt-field prompt --response-field response ...
             refusion bench decode hf --test sums/test.jsonl
    """
    from data_tools.arithmetic import write

    typer.echo(f"{write(out, level, train, test, seed, overwrite)}")


@data_app.command("merge")
def data_merge(
    parts: Annotated[list[str], typer.Argument(help="Folders of shards.", metavar="PART...", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to write: links to the shards, and an index.")],
    overwrite: Overwrite = False,
) -> None:
    """Join parts into one dataset without rewriting their shards.

    Example: refusion data merge parts/* --out shards
    """
    from data_tools.merge import merge

    typer.echo(merge(parts, str(out), overwrite=overwrite).summary())


@data_app.command("verify")
def data_verify(path: Dataset) -> None:
    """Check checksums, counts and token ids of every shard.

    Example: refusion data verify shards/train
    """
    from data_tools.inspect import verify

    for report in verify(path):
        typer.echo(report.summary())


@data_app.command("stats")
def data_stats(
    path: Dataset,
    plot: Annotated[Optional[Path], typer.Option(help="Draw the lengths as this .png.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Documents, tokens, bytes per token, lengths of documents, sources.

    Example: refusion data stats shards --plot lengths.png
    """
    import dataclasses
    import json

    from rich.console import Console

    from data_tools import stats

    found = stats.stats(path)
    if plot is not None:
        stats.plot(found, str(plot))
    if as_json:
        typer.echo(json.dumps([{**dataclasses.asdict(s), "bytes_per_token": s.bytes_per_token} for s in found]))
    else:
        stats.show_stats(found, Console(highlight=False))


@data_app.command("show")
def data_show(
    path: Dataset,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="With --config: changes to it.", metavar="[KEY=VALUE]...", show_default=False),
    ] = None,
    config: Annotated[Optional[str], typer.Option(help="Show packed and corrupted rows of this run.")] = None,  # noqa: UP045
    count: Annotated[int, typer.Option("-n", "--count", help="Documents or rows to show.", min=1)] = 3,
    first: Annotated[int, typer.Option(help="Number of the first document.", min=0)] = 0,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long documents and rows.")] = False,
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="With --config: with the slot sizes of this step, if they change.", min=0),
    ] = None,
) -> None:
    """Show decoded documents; with --config packed and corrupted rows in colour.

    Examples: refusion data show shards/train -n 5
              refusion data show shards/train --config demo -n 1 objective.slot_sizes=[4]
    """
    from data_tools.inspect import show
    from refusion_train.config import load
    from refusion_train.data.remote import RemoteOptions
    from refusion_train.errors import ConfigError

    if overrides and config is None:
        raise ConfigError(f"'{overrides[0]}' changes a configuration; name it with --config, for example --config demo")
    if step is not None and config is None:
        raise ConfigError(f"--step {step} is of a run; name its configuration with --config, for example --config demo")
    run = load(config, overrides) if config else None
    options = RemoteOptions.of(run.data) if run is not None else None
    show(path, run, count, first=first, full=full, options=options, step=step)
