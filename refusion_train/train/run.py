"""A run in progress: its parts on this rank, and what is done between two steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from refusion_train.checkpoint import layout, store
from refusion_train.checkpoint.writer import Writer
from refusion_train.config import Config
from refusion_train.data.loader import TrainLoader, merge_cursors
from refusion_train.data.mixture import Source
from refusion_train.data.shard_index import Index
from refusion_train.data.shards import ShardSet
from refusion_train.data.streams import Damage
from refusion_train.errors import CheckpointError, TrainingError
from refusion_train.parallel.engine import Engine
from refusion_train.parallel.groups import Groups
from refusion_train.parallel.lost import rank_lost
from refusion_train.plan import compute
from refusion_train.telemetry import Telemetry, has_validation, peak_flops
from refusion_train.train.damage import warn_of_damage
from refusion_train.train.evaluate import evaluate
from refusion_train.train.signals import StopSignals
from refusion_train.train.state import TrainState, describe_run
from refusion_train.train.stragglers import RankTimes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """The datasets of a run; `validation` may be absent. All have one tokenizer and the same special ids."""

    sources: list[Source]
    validation: ShardSet | None

    @property
    def index(self) -> Index:
        """What all sources say alike: tokenizer, special ids, size of the vocabulary."""
        return self.sources[0].dataset.index


@dataclass
class Run:
    """A run in progress on this rank: its parts, and what is done between steps. All methods but
    `utilisation` and `give_up_saving` are collective. `saved_step`: of the newest checkpoint that exists."""

    config: Config
    groups: Groups
    host_group: dist.ProcessGroup | None  # for numbers on the host; None: the default group takes them
    data: Data
    engine: Engine
    loader: TrainLoader
    telemetry: Telemetry
    writer: Writer
    state: TrainState
    stop: StopSignals
    saved_step: int
    rank_times: RankTimes

    def save(self) -> None:
        """Begin to write a checkpoint, unless this step is in one already; the one before is waited for.

        Raises CheckpointError, on all ranks, if that one could not be written.
        """
        if self.state.step in (self.saved_step, self.writer.step):
            return
        self.end_saving()
        assert self.state.cursor is not None, "steps were done without a cursor"
        state, config, sources = dataclasses.replace(self.state), self.config, self.data.sources

        def join(cursors: list[Any]) -> dict[str, Any]:
            return describe_run(dataclasses.replace(state, cursor=merge_cursors(cursors)), config, sources)

        self.writer.save(state.step, layout.tensors_to_save(self.engine), state.cursor, join)
        if not self.config.checkpoint.asynchronous:
            self.end_saving()

    def end_saving(self) -> None:
        """Wait until what is being written, if anything, is a checkpoint, and say so.

        Raises CheckpointError, on all ranks, if it could not be written.
        """
        step = self.writer.step
        if step is not None:
            self._say_saved(step, self.writer.collect())

    def give_up_saving(self, error: BaseException) -> None:
        """Before the run ends for `error`: finish what is being written, unless that needs a rank that has gone."""
        step = self.writer.step
        if step is None:
            return
        try:
            folder = self.writer.give_up(partner_lost=rank_lost(error))
        except CheckpointError as other:
            if self.groups.rank == 0:
                logger.warning("%s", other)
            return
        if folder is not None:
            self._say_saved(step, folder)

    def _say_saved(self, step: int, folder: Path) -> None:
        self.saved_step = step
        self.telemetry.say(f"saved step {step}: {folder}")

    def validate_if_due(self, begun: bool = True) -> None:
        """Validate, at the first and last step and every `train.validation_interval`.

        begun: False before the first step of this process; then it may have been done by an earlier one.
        """
        step, interval = self.state.step, self.config.train.validation_interval
        due = step == self.config.train.steps or (interval > 0 and step % interval == 0)
        if self.data.validation is None or not due:
            return
        if not begun and store.on_first_rank(lambda: has_validation(self.config.run_dir, step)):
            return
        losses, damage = evaluate(self.engine, self.groups, self.config, self.data.validation, stop=self.asked_to_stop)
        if self.groups.rank == 0:
            warn_of_damage(damage, "validation")
        if losses:
            self.telemetry.validation({"step": step, **losses})

    def asked_to_stop(self) -> bool:
        """Whether any rank has been."""
        flag = torch.tensor(float(self.stop.requested))
        dist.all_reduce(flag, group=self.host_group)
        return flag.item() > 0

    def note_damage(self, here: Sequence[Damage]) -> None:
        """Count the blocks that ranks have left out for the first time in this run, and warn of them.

        here: those of this rank.
        """
        parts = store.gather(list(here), self.host_group)
        every = {(entry.fingerprint, entry.block): entry for part in parts for entry in part}
        new = [entry for key, entry in sorted(every.items()) if not self.state.has_left_out(entry)]
        self.state.leave_out(new)
        if self.groups.rank == 0:
            warn_of_damage(new, f"step {self.state.step + 1}")

    def report_skipped(self, described: str, finite_here: bool) -> None:
        """Warn of a step without update; raise TrainingError when there were too many in a row.

        described: this rank's documents of the step; finite_here: whether its own losses were finite.
        """
        bad, limit = self.state.bad_in_a_row, self.config.train.max_bad_steps
        everyone: list[Any] = [None] * self.groups.world_size
        dist.all_gather_object(everyone, (finite_here, self.groups.dp_rank, described))
        suspects = dict((rank, text) for finite, rank, text in everyone if not finite) or {
            rank: text for _, rank, text in everyone
        }
        where = "; ".join(f"data-parallel rank {rank}: {text}" for rank, text in sorted(suspects.items()))
        what = f"step {self.state.step}: loss or gradient is not finite ({where})"
        if bad >= limit:
            raise TrainingError(
                f"{what}; {bad} steps in a row were skipped (train.max_bad_steps={limit}): lower train.lr, or look at "
                f"these documents; the last checkpoint is of step {self.saved_step}"
            )
        if self.groups.rank == 0:
            logger.warning("%s; skipped, %d in a row, %d in all", what, bad, self.state.skipped)

    def utilisation(self, tokens_per_s: float) -> dict[str, float]:
        """`mfu`: share of the GPUs' peak that the model's own FLOPs take; nothing where the peak is not known."""
        peak = peak_flops()
        if peak is None or not self.state.tokens:
            return {}
        assert self.config.model.vocab_size is not None, "the vocabulary was resolved at the start"
        supervised = self.state.supervised_tokens / self.state.tokens
        row, read = self.config.data.sequence_length, self.state.source_tokens
        lengths = {
            source.dataset.fingerprint: source.dataset.index.tokens / max(1, source.dataset.index.documents)
            for source in self.data.sources
        }
        weights = {name: read.get(name, 0) for name in lengths}
        total = max(1, sum(weights.values()))
        attended = sum(weights[n] / total * compute.attended_length(mean, row) for n, mean in lengths.items())
        flops = compute.flops_per_token(self.config, self.config.model.vocab_size, supervised, attended)
        return {"mfu": flops * tokens_per_s / (peak * self.groups.world_size)}
