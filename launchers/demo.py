"""The demo: corpus, tokenizer, shards, pretraining, Hugging Face folder and generated text, on this machine.

It exists so that a newcomer sees every part work in a few minutes, with the same functions and processes that a
real run uses. The corpus is what every machine with Python has: the sources and docstrings of the standard library,
one document a file, some of them held out. A stage that is already there is left alone, so a stopped demo goes on.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from refusion_train.config import load, validate
from refusion_train.errors import ConfigError, TrainingError

VOCAB_SIZE = 384  # bytes and a few pieces: a million tokens teach no more
TOKENIZER_SAMPLE = 8 << 20  # bytes of text that the tokenizer learns from
VALIDATION_FRACTION = 0.05
PROMPT = "def read_config(path):\n    "
# Left out: tests and the IDE, which would triple the corpus without making it more varied.
_SKIP = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def corpus_files() -> list[str]:
    """Python files of this interpreter's standard library, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(str(file) for file in root.rglob("*.py") if not _SKIP.intersection(file.relative_to(root).parts))


def run_demo(folder: Path, overrides: list[str], nproc: int, fresh: bool) -> int:
    """Run the stages that are still missing in `folder` and return the exit code of the last one.

    overrides: `key=value` words for the training configuration (configs/demo.yaml).
    """
    started = time.monotonic()
    run_dir, shards, tokenizer, export = (folder / name for name in ("run", "shards", "tokenizer", "hf"))
    words = [f"run_dir={run_dir}", f"data.train={shards / 'train'}", f"data.validation={shards / 'validation'}"]
    words += overrides
    config = load("demo", words)
    validate(config, nproc)
    if fresh and folder.exists():
        _remove_demo(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    console = Console(highlight=False, soft_wrap=True)
    _prepare_data(console, tokenizer, shards)

    _headline(console, 3, f"Pretraining on {nproc} processes (configs/demo.yaml; run folder {run_dir})")
    code = _train(words, nproc)
    if code:
        return code
    _headline(console, 4, f"Hugging Face folder {export}")
    from refusion_train.convert.export import export_checkpoint

    export_checkpoint(str(run_dir), str(export), dtype="float32", overwrite=True)
    _headline(console, 5, "Generated text (the prompt first)")
    _generate(export)
    _summary(console, folder, run_dir, export, time.monotonic() - started)
    return 0


_MARK = ".refusion-demo"


def _remove_demo(folder: Path) -> None:
    """Remove an earlier demo, and nothing that is not one."""
    if not (folder / _MARK).exists():
        raise ConfigError(f"{folder} was not made by the demo, so --fresh does not remove it; choose another --dir")
    shutil.rmtree(folder)


def _headline(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold]{number}/5[/bold] {text}", markup=True)


def _prepare_data(console: Console, tokenizer: Path, shards: Path) -> None:
    from data_tools.build_shards import build_shards
    from data_tools.train_tokenizer import train_tokenizer

    files = corpus_files()
    _headline(console, 1, f"Tokenizer of {VOCAB_SIZE} pieces from {len(files)} files of Python's standard library")
    if tokenizer.exists():
        console.print(f"already there: {tokenizer}")
    else:
        report = train_tokenizer(files, str(tokenizer), vocab_size=VOCAB_SIZE, sample_bytes=TOKENIZER_SAMPLE)
        console.print(report.summary())
    _headline(console, 2, f"Shards, {VALIDATION_FRACTION:.0%} of the files held out")
    if shards.exists():
        console.print(f"already there: {shards}")
    else:
        built = build_shards(files, str(tokenizer), str(shards), val_fraction=VALIDATION_FRACTION)
        console.print(built.summary())


def _train(words: list[str], nproc: int) -> int:
    """Train in processes of their own even when there is one, as `refusion train` would."""
    from launchers.local import launch

    sys.stdout.flush()
    return launch(["train", "demo", *words], nproc)


def _generate(export: Path) -> None:
    from refusion_train.convert.generate import generate_text

    # Sampled: the likeliest text of a model that has seen so little repeats itself.
    generate_text(
        str(export), PROMPT, max_new_tokens=96, temperature=0.7, top_p=0.9, seed=1, stream=sys.stdout.isatty()
    )


def validation_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The validation rows of a run's metrics, in order."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise TrainingError(f"{path} is missing: the run has not written its metrics")
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [row for row in rows if any(key.startswith("val_") for key in row)]


def _summary(console: Console, folder: Path, run_dir: Path, export: Path, seconds: float) -> None:
    rows = validation_rows(run_dir)
    console.print(f"\n[bold]Done[/bold] in {seconds / 60:.1f} minutes.")
    if len(rows) > 1:
        for key, name in (
            ("val_nelbo", "masked, NELBO (nats per token)"), ("val_bits_per_byte", "bits per byte"),
            ("val_left_to_right", "left to right (nats per token)"),
        ):  # fmt: skip
            if key in rows[0] and key in rows[-1]:
                before, after = rows[0][key], rows[-1][key]
                console.print(f"  validation {name}: {before:.3f} -> {after:.3f} ({after / before - 1:+.0%})")
    console.print(
        f"  run folder        {run_dir}\n  curves            tensorboard --logdir {run_dir}\n"
        f"  Hugging Face      {export}\n"
        f'  generate more     refusion generate {export} --prompt "import os" --stream\n'
        f"  look at the data  refusion data show {folder / 'shards' / 'train'} --config demo -n 1\n"
        f"  go further        refusion demo --dir {folder} train.steps=2000   (see refusion demo --help)"
    )
