"""What a save adds to the time of the training loop: written while training goes on, against waited for.

    python benchmarks/checkpoint.py [--hidden 1024] [--layers 6] [--rounds 5] [--steps 0] [--threads 1] [--folder DIR]

One process trains a small model through the real engine and saves its optimizer state through the real writer, in
`--folder` (a temporary one in the working directory; take the disk that runs use). A round is three stretches of the
same number of steps, in an order that changes from round to round: without a save; with a save that is waited for; with
a save that goes on beside the steps and is collected when it has ended, at the end at the latest. What a save adds is
the wall time of a stretch with it less that of the stretch without; `blocks` is the part of it for which the loop
stands still to take the snapshot. Stretches are made long enough (`--steps 0`) for a save to end within. The ratio is
of medians over rounds of what a save adds in a round. On a machine that does other work too, threads wait for a core
that others have; what the kernel counts of that (schedstat) is taken off: of the training thread always, of the writing
thread where the loop waits for it. With nothing else running it is next to nothing; `waits` shows how much it was.

By default the steps compute on one thread, so that on two cores one is left to the writer, as processors are on a
machine whose GPUs do the computing; `--threads 2` shows the worst case, where both want the same cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from refusion_train.checkpoint import layout, store  # noqa: E402
from refusion_train.checkpoint.writer import Writer  # noqa: E402
from refusion_train.config import Config, ModelConfig, validate  # noqa: E402
from refusion_train.model.batch import to_device  # noqa: E402
from refusion_train.model.slot_model import build_model_chunks  # noqa: E402
from refusion_train.objective import PackedDocuments, document_key, make_objective  # noqa: E402
from refusion_train.parallel.engine import Engine  # noqa: E402
from refusion_train.parallel.groups import destroy, init_groups  # noqa: E402
from refusion_train.train.optim import param_groups  # noqa: E402
from refusion_train.train.step import kind_scales  # noqa: E402

LENGTH, WANTED = 256, 0.15
KINDS = ("none", "waited", "beside")
MASK_ID, PAD_ID, FIRST_ID = 4, 0, 5


def core_wait() -> float:
    """Seconds for which this thread could have run but had no core (Linux)."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    return int(text.split()[1]) / 1e9


class Loop:
    """A model, its engine and its writer, and stretches of steps with and without a save."""

    def __init__(self, hidden: int, layers: int, folder: Path) -> None:
        heads = hidden // 64
        self.config = Config(
            model=ModelConfig(
                hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=heads // 2, head_dim=64,
                ffn_size=3 * hidden, vocab_size=8192, max_sequence_length=LENGTH,
            )
        )  # fmt: skip
        self.config.data.sequence_length, self.config.train.precision = LENGTH, "fp32"
        self.config.train.global_batch_size = 1
        validate(self.config, 1)
        groups = init_groups(self.config)
        self._objective = make_objective(self.config.objective, MASK_ID, PAD_ID)
        chunks = build_model_chunks(self.config, groups, self._objective.bidirectional)
        self.engine = Engine(self.config, groups, chunks, param_groups(chunks, self.config.train.weight_decay))
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "this process belongs to the group of all"
        self.writer = Writer(folder, keep=1, group=group)
        self.steps_done = 0
        self._random = np.random.default_rng(1)
        self._written_waits: list[float] = []
        self._watch_writer()

    def _watch_writer(self) -> None:
        """Note how long the writing thread of each save has waited for a core."""
        write = store.save

        def watched(*arguments: Any) -> Path:
            waited = core_wait()
            try:
                return write(*arguments)
            finally:
                self._written_waits.append(core_wait() - waited)

        store.save = watched

    @property
    def bytes(self) -> int:
        """Of a checkpoint."""
        entries = layout.tensors_to_save(self.engine).values()
        return sum(part.nbytes for entry in entries for part in getattr(entry, "parts", {}).values())

    def step(self) -> None:
        """One optimizer step on one row."""
        tokens = self._random.integers(FIRST_ID, 8192, LENGTH).astype(np.int32)
        one = np.array([0], dtype=np.int64)
        packed = PackedDocuments(
            tokens[None], one, np.array([LENGTH]), one, document_key(0, 0, one.astype(np.uint64), one.astype(np.uint64))
        )
        batch = self._objective.corrupt(packed)
        scales = kind_scales(self.config.objective, batch.counts.sum(axis=0))
        weights = batch.loss_weight * scales[batch.target_kind]
        self.engine.forward_backward([to_device(batch, weights, torch.device("cpu"))])
        self.engine.step(1e-4)
        self.steps_done += 1

    def stretch(self, steps: int, save: str) -> dict[str, float]:
        """Seconds: `total`; until the save was begun, `blocks`; until it had ended. save: one of KINDS."""
        os.sync()  # what earlier stretches have left to the system
        began, waited = time.perf_counter(), core_wait()
        self._written_waits.clear()
        blocks, ended = 0.0, 0.0
        if save != "none":
            self.writer.save(self.steps_done, layout.tensors_to_save(self.engine), None, lambda _: {})
            blocks = time.perf_counter() - began
            if save == "waited":
                self.writer.collect()
                ended = time.perf_counter() - began
        for _ in range(steps):
            self.step()
            if self.writer.ended:
                self.writer.collect()
                ended = time.perf_counter() - began
        if self.writer.step is not None:
            self.writer.collect()
            ended = time.perf_counter() - began
        waits = core_wait() - waited + (sum(self._written_waits) if save == "waited" else 0.0)
        return {"total": time.perf_counter() - began - waits, "blocks": blocks, "ended": ended, "waits": waits}


def measure(loop: Loop, rounds: int, steps: int) -> list[dict[str, dict[str, float]]]:
    """Stretches of each kind, by round."""
    results = []
    for number in range(rounds):
        order = KINDS[number % 3 :] + KINDS[: number % 3]
        times = {kind: loop.stretch(steps, kind) for kind in order}
        results.append(times)
        shown = ", ".join(f"{kind} {times[kind]['total']:.2f} s (waits {times[kind]['waits']:.2f})" for kind in KINDS)
        print(f"  round {number + 1}: {shown}", flush=True)
    return results


def report(results: list[dict[str, dict[str, float]]]) -> float:
    """Print what a save adds, each way: medians over rounds of what it adds in a round; the ratio of these."""
    none = statistics.median(times["none"]["total"] for times in results)
    waited, beside = (
        statistics.median(times[kind]["total"] - times["none"]["total"] for times in results) for kind in KINDS[1:]
    )
    blocks, ended = (statistics.median(times["beside"][what] for times in results) for what in ("blocks", "ended"))
    print(
        f"medians of {len(results)} rounds: a save that is waited for adds {waited:.2f} s to {none:.2f} s, "
        f"one beside the steps {beside:.2f} s: ratio {beside / waited:.3f}"
    )
    print(f"of these it stops them for {blocks:.2f} s (ratio {blocks / waited:.3f}); it has ended after {ended:.2f} s")
    return beside / waited


def main() -> int:
    """Measure, print, and fail if saving beside the steps costs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of a stretch; 0: as many as a save needs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="benchmark-checkpoint-", dir=options.folder))
    try:
        loop = Loop(options.hidden, options.layers, folder)
        loop.step()
        first = loop.stretch(1, "waited")["ended"]
        began = time.perf_counter()
        loop.step()
        step_s = time.perf_counter() - began
        steps = options.steps or max(3, round(2.0 * first / step_s))
        print(f"{loop.bytes / 1e9:.2f} GB a checkpoint, {steps} steps of {step_s:.2f} s a stretch, "
              f"{options.threads} of {os.cpu_count()} cores compute")  # fmt: skip
        ratio = report(measure(loop, options.rounds, steps))
        destroy()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"ratio {ratio:.3f}, wanted below {WANTED}")
    return 0 if ratio < WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
