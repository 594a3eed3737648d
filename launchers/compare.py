"""`refusion compare`: the same model trained with several objectives on the same tokens, and decoded side by side.

All arms share one training configuration, and so initial weights (which are a function of the seed), data, steps and
tokens; an arm is the words that set it apart. Data is the built-in task unless shards and a test set are given. A stage
that is already there is left alone, so a comparison that was stopped goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from launchers.local import STOPPED, cores, end_with, stop_signals
from launchers.status import last_rows
from refusion_train.config import Config, all_keys, build, find_config, load, to_yaml, validate
from refusion_train.errors import ConfigError, TrainingError

FILE = "comparison.yaml"
FIXED_PIECES = 261  # bytes and special ones; the task's tokenizer has its characters beside them, and no words
VALIDATION_FRACTION = 0.01
_TOKENIZER_DOCUMENTS = 2000
_POLL_S = 0.2
_TOLD_S = 60.0  # between two lines about the trainings, where there is no terminal


@dataclass
class Comparison:
    """What is compared; `configs/compare/*.yaml`."""

    # Configuration that all arms share: a file, or the name of a shipped one.
    training: str = "arithmetic"
    # Name of each arm, and the words of the configuration that set it apart.
    arms: dict[str, list[str]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0, 1])
    # The built-in task: `refusion data arithmetic --level LEVEL`.
    level: str = "aligned"
    documents: int = 20000
    # Own data instead: a folder that holds shards `train` and `validation`, and JSON lines with prompt and response.
    shards: str | None = None
    test: str | None = None
    # Prompts that are decoded.
    prompts: int = 64
    # Slot sizes that arms of slots are decoded with.
    slot_sizes: list[int] = field(default_factory=lambda: [8])


@dataclass(frozen=True)
class Training:
    """One arm with one seed."""

    arm: str
    seed: int
    folder: Path  # of the run and of the exported model
    words: tuple[str, ...]  # of `refusion train`

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def exported(self) -> Path:
        return self.folder / "hf"


def run_compare(name: str, folder: Path, overrides: list[str], arms: list[str], jobs: int, nproc: int) -> int:
    """Run the stages that are still missing in `folder`; return the exit code of the last one.

    name: a comparison file, or the name of a shipped one. overrides: `key=value` words, for the comparison where it has
    the key and for the training of all arms otherwise. arms: only these; all if empty. jobs: trainings side by side;
    nproc: ranks of each.
    Raises ConfigError for what cannot work, before anything is done.
    """
    comparison, words = read(name, overrides, arms)
    trainings = plan(comparison, words, folder, nproc)
    _claim(folder, comparison, words)
    console = Console(highlight=False, soft_wrap=True)
    _headline(console, 1, "Data")
    test = prepare_data(comparison, folder, console)
    _headline(console, 2, f"{len(trainings)} trainings, {jobs} at a time; logs: {folder}/*/train.log")
    code = train_all([one for one in trainings if not one.exported.exists()], jobs, nproc, console)
    if code:
        return code
    from refusion_train.convert.export import export_checkpoint

    for one in trainings:
        if not one.exported.exists():
            export_checkpoint(str(one.run), str(one.exported), dtype="float32")
    _headline(console, 3, f"Decoding {comparison.prompts} prompts, all decoders in turns, on one thread")
    figures = [(seed, decode(comparison, folder, trainings, seed, test)) for seed in comparison.seeds]
    _headline(console, 4, "Report")
    from launchers import compare_report

    console.print(f"{compare_report.write(folder, comparison, trainings, figures)}")
    return 0


def read(name: str, overrides: list[str], arms: list[str]) -> tuple[Comparison, list[str]]:
    """The comparison, and the words that are for the training. Raises ConfigError."""
    own = set(all_keys(Comparison))
    mine = [word for word in overrides if word.partition("=")[0].split(".")[0] in own]
    comparison = build(Comparison, find_config(name, "compare", "comparison"), mine)
    given = [build(Comparison, None, [word]).arms for word in mine if word.startswith("arms=")]
    if given:  # in place of those of the file, and not beside them
        comparison.arms = given[-1]
    for arm in arms:
        if arm not in comparison.arms:
            raise ConfigError(f"--arm {arm} is not one of {', '.join(comparison.arms)}")
    comparison.arms = {arm: words for arm, words in comparison.arms.items() if arm in (arms or comparison.arms)}
    if not comparison.arms or not comparison.seeds:
        raise ConfigError("comparison: arms and seeds must not be empty")
    if len(set(comparison.seeds)) < len(comparison.seeds):
        raise ConfigError(f"comparison: seeds={comparison.seeds} holds a seed twice")
    if (comparison.shards is None) != (comparison.test is None):
        raise ConfigError("comparison: shards and test go together: give both, or none for the built-in task")
    for arm in comparison.arms:
        if not arm or not arm.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"comparison: arm '{arm}' is a folder's name: letters, digits, - and _ only")
    return comparison, [word for word in overrides if word not in mine]


def plan(comparison: Comparison, words: list[str], folder: Path, nproc: int) -> list[Training]:
    """Every arm with every seed, each of which is a configuration that can work. Raises ConfigError."""
    shards = Path(comparison.shards) if comparison.shards else folder / "shards"
    load(comparison.training, words)  # what is wrong with these is the fault of no arm
    trainings, shapes = [], set()
    for seed in comparison.seeds:
        for arm, apart in comparison.arms.items():
            place = folder / f"{arm}-{seed}"
            given = [f"data.train={shards / 'train'}", f"data.validation={shards / 'validation'}", f"seed={seed}"]
            all_words = (*given, *words, *apart, f"run_dir={place / 'run'}")
            try:
                config = load(comparison.training, list(all_words))
                validate(config, nproc)
            except ConfigError as error:
                raise ConfigError(f"arm {arm}: {error}") from None
            trainings.append(Training(arm, seed, place, (comparison.training, *all_words)))
            shapes.add(_shared(config))
    if len(shapes) > 1:
        raise ConfigError(
            "the arms do not share model, data and training, so that nothing can be said of their objectives; let an "
            "arm's words change objective.* and train.lr only"
        )
    return trainings


def _shared(config: Config) -> str:
    """What all arms must have in common."""
    parts = asdict(config)
    for key in ("objective", "run_dir", "seed"):
        del parts[key]
    del parts["train"]["lr"]
    return repr(parts)


def _claim(folder: Path, comparison: Comparison, words: list[str]) -> None:
    """Make the folder that of this comparison. Raises ConfigError if it is that of another one."""
    text = to_yaml(comparison) + "".join(f"# {word}\n" for word in words)
    file = folder / FILE
    if file.exists():
        if file.read_text("utf-8") != text:
            raise ConfigError(f"{file} says that this folder holds another comparison; choose another --dir")
        return
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds other things; choose another --dir")
    folder.mkdir(parents=True, exist_ok=True)
    from data_tools.output import write_whole

    write_whole(file, lambda partial: partial.write_text(text, "utf-8"))


def _headline(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold]{number}/4[/bold] {text}", markup=True)


# ------------------------------------------------------------------------------------------------------------- stages


def prepare_data(comparison: Comparison, folder: Path, console: Console) -> Path:
    """Shards of the built-in task, unless own ones were given; returns the file of the test set."""
    if comparison.test is not None:
        return Path(comparison.test)
    from data_tools import arithmetic
    from data_tools.build_shards import build_shards

    task, tokenizer, shards = (folder / name for name in ("task", "tokenizer", "shards"))
    if not task.exists():
        arithmetic.write(task, comparison.level, comparison.documents, comparison.prompts, seed=0)
    files = [str(task / arithmetic.FILES[0])]
    if not tokenizer.exists():
        _train_tokenizer(task / arithmetic.FILES[0], tokenizer)
    if not shards.exists():
        built = build_shards(
            files, str(tokenizer), str(shards), val_fraction=VALIDATION_FRACTION, prompt_field="prompt",
            response_field="response",
        )  # fmt: skip
        console.print(built.summary())
    return task / arithmetic.FILES[1]


def _train_tokenizer(documents: Path, out: Path) -> None:
    """A tokenizer of single characters: a piece of several would hide from the model how far apart things are."""
    from data_tools.train_tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as scratch, open(documents, encoding="utf-8") as lines:
        records = [json.loads(line) for _, line in zip(range(_TOKENIZER_DOCUMENTS), lines, strict=False)]
        texts = [record["prompt"] + record["response"] for record in records]
        sample = Path(scratch, "sample.txt")
        sample.write_text("\n".join(texts), "utf-8")
        pieces = FIXED_PIECES + len(set("".join(texts))) + 1  # and the end of a line
        train_tokenizer([str(sample)], str(out), vocab_size=pieces, model_type="unigram", progress=False)


def train_all(trainings: list[Training], jobs: int, nproc: int, console: Console) -> int:
    """Train them, `jobs` at a time. A signal is passed on: they save, and the code is 75.

    Raises TrainingError, naming the log, when one fails; the others save and stop first.
    """
    waiting, running = list(trainings), dict[Training, subprocess.Popen[bytes]]()
    failed: Training | None = None
    told = time.monotonic()
    with stop_signals() as received:
        try:
            while running or (waiting and not received and failed is None):
                while waiting and len(running) < jobs and not received and failed is None:
                    one = waiting.pop(0)
                    running[one] = _start(one, jobs, nproc)
                time.sleep(_POLL_S)
                if received or failed is not None:
                    for process in running.values():
                        process.send_signal(signal.SIGTERM)
                    for process in running.values():
                        process.wait()
                for one in [one for one, process in running.items() if process.poll() is not None]:
                    code = running.pop(one).returncode
                    if code not in (0, STOPPED):
                        failed = failed or one
                    console.print(f"  {one.folder.name}: {_standing(one)}{'' if code == 0 else f' (exit code {code})'}")
                if time.monotonic() - told > _TOLD_S:
                    told = time.monotonic()
                    console.print("; ".join(f"{one.folder.name}: {_standing(one)}" for one in running))
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    if failed is not None:
        raise TrainingError(f"{failed.folder.name} could not be trained; see {failed.folder / 'train.log'}")
    return STOPPED if received else 0


def _start(one: Training, jobs: int, nproc: int) -> subprocess.Popen[bytes]:
    one.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "refusion_train.cli", "train", *one.words, "--nproc", str(nproc)]
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // (jobs * nproc))), **os.environ}
    with open(one.folder / "train.log", "ab") as log:
        # A session of its own: an interrupt typed at the terminal comes through us, once.
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=end_with(os.getpid()),
        )  # fmt: skip


def _standing(one: Training) -> str:
    row = (last_rows(one.run) or [{}])[-1]
    return f"step {row['step']}, loss {row['loss']:.4f}" if row else "starting"


def decode(
    comparison: Comparison, folder: Path, trainings: list[Training], seed: int, test: Path
) -> list[dict[str, Any]]:
    """What each decoder of each arm of this seed gets right and how fast; kept in `folder`."""
    from refusion_train.convert import bench

    kept = folder / f"decoding-{seed}.json"
    if not kept.exists():
        models = [str(one.exported) for one in trainings if one.seed == seed]
        console = Console(stderr=True)
        methods = bench.bench_decode(models, str(test), comparison.prompts, None, comparison.slot_sizes, console)
        bench.show(methods, console if console.is_terminal else Console(width=160, highlight=False))
        bench.write_json(methods, str(kept))
    return json.loads(kept.read_text("utf-8"))
