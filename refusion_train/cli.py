"""The `refusion` command: parsing and printing only.

Every command imports what it needs when it runs, so that `--help` answers at once and tokenizing needs no torch.
Errors meant for the user are one line (exit code 2 for usage and configuration, 1 otherwise); `--debug` adds the
traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from refusion_train import __version__, cli_bench, cli_slurm
from refusion_train.cli_data import data_app
from refusion_train.errors import ConfigError, RefusionError

app = typer.Typer(
    name="refusion",
    help="Pretrain ReFusion language models: slot-level masked diffusion under causal attention.",
    epilog="First steps: refusion demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(cli_bench.bench_app, name="bench")
app.command()(cli_bench.compare)
app.command()(cli_slurm.submit)
app.command("submit-data", context_settings={"ignore_unknown_options": True})(cli_slurm.submit_data)
app.command()(cli_slurm.status)

_DEBUG = False

Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
    typer.Argument(help="Changes to the configuration: key=value ...", metavar="[KEY=VALUE]...", show_default=False),
]
ConfigPath = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a shipped one (demo).", metavar="CONFIG", show_default=False)
]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"refusion {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the command as a whole; `run` has taken --debug out of the words by now."""


# -------------------------------------------------------------------------------------------------------- training


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(help="Processes to start on this host.", min=1)] = 1,
) -> None:
    """Train, or go on with a run from its newest good checkpoint.

    Under torchrun or srun (RANK is set) the process joins that group.

    Examples: refusion train demo data.train=shards/train run_dir=runs/a --nproc 2
              torchrun --nproc-per-node 8 -m refusion_train.cli train run.yaml

    Exit codes: 0 done, 75 stopped by a signal after saving (run again to go on), 2 configuration, 1 anything else.
    """
    from refusion_train.config import load, validate
    from refusion_train.sources import dataset_paths

    settings = load(config, overrides)
    inside_group = "RANK" in os.environ
    if inside_group and nproc > 1:
        raise ConfigError("--nproc starts processes of its own; leave it out under torchrun or srun (RANK is set)")
    validate(settings, int(os.environ.get("WORLD_SIZE", "1")) if inside_group else nproc)
    paths = dataset_paths(settings)
    if not inside_group:  # before processes are started and torch is imported
        from refusion_train.data.shard_index import Index

        for path in paths:
            Index.read(path)
    if nproc > 1:
        from launchers.local import launch

        words = ["--debug"] * _DEBUG + ["train", config, *(overrides or [])]
        raise typer.Exit(launch(words, nproc))
    from refusion_train.train.loop import train as run

    raise typer.Exit(run(settings))


@app.command()
def plan(
    config: ConfigPath,
    world_size: Annotated[int, typer.Option(help="Ranks that the run would have, one per GPU.", min=1)],
    overrides: Overrides = None,
    gpu: Annotated[Optional[str], typer.Option(help="For speed and memory: H100, H200, A100 ...")] = None,  # noqa: UP045
    gpu_memory: Annotated[Optional[float], typer.Option(help="Memory of a GPU in GiB.", min=2)] = None,  # noqa: UP045
    mfu: Annotated[float, typer.Option(help="Share of the GPU's peak that the model's FLOPs reach.")] = 0.4,
    suggest: Annotated[bool, typer.Option("--suggest", help="Rank the layouts that fit instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; sizes in bytes.")] = False,
) -> None:
    """What a run would hold, send and take on so many ranks; needs no GPU.

    If data.train is set and is here, its size gives vocabulary, epochs (of each source) and the lengths of documents.

    Examples: refusion plan qwen3-8b --world-size 64 --gpu H100 parallel.tensor=4 train.recompute=full
              refusion plan qwen3-8b --world-size 64 --gpu-memory 80 --suggest
    """
    import dataclasses
    import json

    from rich.console import Console

    from refusion_train import plan as planning
    from refusion_train.config import load
    from refusion_train.data.shard_index import INDEX_FILE, Index
    from refusion_train.sources import sources_of

    settings = load(config, overrides)
    folders = [Path(source.path) for source in sources_of(settings)] if settings.data.train else []
    here = folders and all((folder / INDEX_FILE).is_file() for folder in folders)
    dataset = planning.mixed(settings, [Index.read(folder) for folder in folders]) if here else None
    console = Console(width=None if sys.stdout.isatty() else 120)
    if suggest:
        found = planning.suggest(settings, world_size, gpu_memory, gpu=gpu, mfu=mfu, dataset=dataset)
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(entry) for entry in found]))
        else:
            planning.render_suggestions(found, console)
        raise typer.Exit(0 if found else 1)
    planned = planning.plan(settings, world_size, gpu=gpu, gpu_memory_gib=gpu_memory, mfu=mfu, dataset=dataset)
    if as_json:
        typer.echo(json.dumps({"config": dataclasses.asdict(settings), **planned.to_dict()}))
    else:
        planning.render(planned, console)


@app.command()
def evaluate(
    config: ConfigPath,
    checkpoint: Annotated[Path, typer.Option(help="A run folder (its newest good checkpoint) or a step folder.")],
    overrides: Overrides = None,
    out: Annotated[Optional[Path], typer.Option(help="Also write them to this file.")] = None,  # noqa: UP045
) -> None:
    """Validation losses of a checkpoint as one JSON object. Under torchrun or srun the process joins that group.

    Example: refusion evaluate runs/a/config.yaml --checkpoint runs/a
    """
    import json

    from data_tools.output import write_whole
    from refusion_train.config import load, validate
    from refusion_train.train.evaluate import evaluate_checkpoint

    settings = load(config, overrides)
    validate(settings, int(os.environ.get("WORLD_SIZE", "1")))
    text = json.dumps(evaluate_checkpoint(settings, str(checkpoint)))
    if os.environ.get("RANK", "0") == "0":
        typer.echo(text)
        if out is not None:
            write_whole(out, lambda partial: partial.write_text(text + "\n"))


# ---------------------------------------------------------------------------------------------- export and decoding


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder or a checkpoint.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to write.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    max_shard_size: Annotated[str, typer.Option(help="Largest file with weights, such as 500MB.")] = "5GB",
    tokenizer: Annotated[Optional[Path], typer.Option(help="Its folder, if the data are gone.")] = None,  # noqa: UP045
    verify: Annotated[bool, typer.Option("--verify", help="Compare logits with the training model's.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing folder.")] = False,
) -> None:
    """Write a Hugging Face folder: weights, tokenizer, model card and standalone modelling code.

    Example: refusion export runs/a --out runs/a/hf --verify
    """
    from refusion_train.convert.export import export_checkpoint, parse_size

    def check(*given: Any) -> None:
        from refusion_train.convert.verify import verify_folder

        typer.echo(verify_folder(*given).summary())

    folder = export_checkpoint(
        str(checkpoint), str(out), dtype=dtype, overwrite=overwrite, max_shard_bytes=parse_size(max_shard_size),
        tokenizer=None if tokenizer is None else str(tokenizer), verify=check if verify else None,
    )  # fmt: skip
    typer.echo(f"{folder}")


@app.command("import")
def import_(
    hf_dir: Annotated[Path, typer.Argument(help="A Hugging Face folder: Qwen3, Qwen2, Llama.", show_default=False)],
    out: Annotated[Optional[Path], typer.Option(help="Checkpoint to write; without it, only look.")] = None,  # noqa: UP045
    mask_token: Annotated[Optional[str], typer.Option(help="Text of the mask token, added if it is new.")] = None,  # noqa: UP045
    mask_init: Annotated[Literal["mean", "eos", "random"], typer.Option(help="Its row, and other new ones.")] = "mean",
    vocab_multiple: Annotated[int, typer.Option(help="Pad the vocabulary to a multiple of it.", min=1)] = 128,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier import.")] = False,
) -> None:
    """Make a checkpoint of a Hugging Face folder, and print the model section of a configuration that starts from it.

    Example: refusion import Qwen3-0.6B --out start --mask-token "<|mask|>" > model.yaml
    """
    from refusion_train.convert.importer import import_folder

    made = import_folder(
        str(hf_dir), None if out is None else str(out), mask_token=mask_token, mask_init=mask_init,
        vocab_multiple=vocab_multiple, overwrite=overwrite,
    )  # fmt: skip
    typer.echo(made.yaml(), nl=False)
    typer.echo(made.summary(), err=True)


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder written by export.", show_default=False)],
    prompt: Annotated[Optional[str], typer.Option(help="Text to continue.")] = None,  # noqa: UP045
    prompt_file: Annotated[Optional[str], typer.Option(help="A file that holds it; - for standard input.")] = None,  # noqa: UP045
    max_new_tokens: Annotated[Optional[int], typer.Option(min=1, help="Default: 128, if so many fit.")] = None,  # noqa: UP045
    slot_size: Annotated[Optional[int], typer.Option(min=1, help="Tokens per slot.")] = None,  # noqa: UP045
    num_blocks: Annotated[Optional[int], typer.Option(min=1, help="Serial blocks of the response.")] = None,  # noqa: UP045
    slot_threshold: Annotated[Optional[float], typer.Option(help="Confidence to start a slot.")] = None,  # noqa: UP045
    token_threshold: Annotated[Optional[float], typer.Option(help="Probability to accept a token.")] = None,  # noqa: UP045
    correction: Annotated[Optional[str], typer.Option(help="ar or redraft.")] = None,  # noqa: UP045
    decoding: Annotated[Optional[str], typer.Option(help="plan_and_infill, left_to_right or mdm.")] = None,  # noqa: UP045
    steps: Annotated[Optional[int], typer.Option(min=1, help="mdm: forwards; default: one for each token.")] = None,  # noqa: UP045
    confidence_threshold: Annotated[Optional[float], typer.Option(help="mdm: decide all tokens surer than it.")] = None,  # noqa: UP045
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.", min=0, max=2**63 - 1)] = 0,
    stream: Annotated[bool, typer.Option("--stream", help="Show slots filling in as they are decided.")] = False,
    trace: Annotated[Optional[Path], typer.Option(help="Write a page (HTML) that replays the decoding.")] = None,  # noqa: UP045
) -> None:
    """Continue a prompt by plan and infill.

    Examples:
      refusion generate runs/a/hf --prompt "def main():" --stream
      refusion generate runs/a/hf --prompt "def main():" --trace decoding.html
    """
    text = _prompt(prompt, prompt_file)
    from refusion_train.convert.generate import generate_text

    options = {
        "slot_size": slot_size, "num_blocks": num_blocks, "slot_threshold": slot_threshold,
        "token_threshold": token_threshold, "correction": correction, "decoding": decoding,
        "steps": steps, "confidence_threshold": confidence_threshold,
    }  # fmt: skip
    generate_text(
        str(folder), text, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
        stream=stream, trace=trace, **{name: value for name, value in options.items() if value is not None},
    )  # fmt: skip


def _prompt(text: str | None, file: str | None) -> str:
    """The text to continue, from the one of both options that is given."""
    if (text is None) == (file is None):
        raise ConfigError("give the text to continue by one of --prompt TEXT and --prompt-file FILE")
    try:
        if file is not None:
            return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
        assert text is not None, "one of both is given"
        text.encode()  # bytes of the command line that are not UTF-8 arrive as lone surrogates
        return text
    except OSError as error:
        raise ConfigError(f"--prompt-file {file} cannot be read: {error.strerror}") from None
    except UnicodeError:
        where = "--prompt" if file is None else f"--prompt-file {file}"
        raise ConfigError(f"the text of {where} is not UTF-8") from None


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Folder for everything that the demo writes.")] = Path("demo"),
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(help="Training processes.", min=1)] = 2,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin again: remove what an earlier demo wrote.")] = False,
) -> None:
    """Text in, generated text out: the whole way on this machine, in a few minutes.

    Corpus (Python's own standard library), tokenizer, shards, pretraining, Hugging Face folder, a generated
    continuation. Run again, it goes on where it stopped.

    More to try:
      refusion demo --fresh objective.name=ar          the same model left to right
      refusion demo --dir demo-long train.steps=2000   a longer run
      refusion generate demo/hf --prompt "import os" --stream
      refusion data show demo/shards/train --config demo -n 1
      tensorboard --logdir demo/run
    """
    from launchers.demo import run_demo

    raise typer.Exit(run_demo(folder, overrides or [], nproc, fresh))


# ------------------------------------------------------------------------------------------------------------ main


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `refusion` command; exits the process with the documented codes."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run the command line `argv` and return its exit code; errors are printed as one line on stderr."""
    global _DEBUG
    _DEBUG = "--debug" in argv
    try:
        # --debug may stand anywhere: it concerns the whole command.
        code = app(args=[word for word in argv if word != "--debug"], standalone_mode=False)
        return code if isinstance(code, int) else 0
    except RefusionError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing is left to say. Keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # a path of the user's: in the way, not readable
            return _fail(f"{error.filename}: {error.strerror}", 1)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's usage errors
            message = error.format_message()  # type: ignore[attr-defined]
            return _fail(message, error.exit_code) if message else 2  # type: ignore[attr-defined]
        text = str(error).strip().split("\n")[0]
        return _fail(f"{type(error).__name__}: {text} (an error of ours; --debug shows where)", 1)


def _fail(message: str, code: int) -> int:
    if _DEBUG:
        traceback.print_exc()
    print(f"refusion: error: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
