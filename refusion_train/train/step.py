"""One optimizer step: count, weigh, forward and backward, update, report.

The normalisers of the loss are summed over the global batch before the first forward pass, so the loss is
sum(weight * cross entropy) with final weights, and any split into ranks and micro-batches has the same gradient.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from refusion_train.checkpoint import store
from refusion_train.config import ObjectiveConfig
from refusion_train.data.loader import StepBatch
from refusion_train.errors import DataError, RefusionError
from refusion_train.model.batch import DeviceBatch, to_device
from refusion_train.model.loss import BUCKETS, STAT_NAMES
from refusion_train.objective.batch import CLEAN, CLEAN_TARGETS, DOCUMENTS, MASKED, RESPONSE_TOKENS
from refusion_train.schedules import objective_at
from refusion_train.telemetry import peak_memory_mb
from refusion_train.train.optim import learning_rate

if TYPE_CHECKING:
    from refusion_train.train.setup import Run


@dataclass(frozen=True)
class Counts:
    """Of a global batch: `targets` float64 [3] (as `Batch.counts`), tokens, and tokens from each source; the largest
    memory of any rank in MB; whether any rank has been asked to stop; whether a save has ended on all ranks; every
    rank's own time a step in seconds, float64 [ranks] (see `stragglers`). The same on all ranks."""

    targets: np.ndarray
    tokens: int
    source_tokens: list[int]
    memory_mb: float
    stop: bool
    saved: bool
    own_s: np.ndarray


def next_batch(run: Run) -> tuple[StepBatch, Counts]:
    """This rank's part of the next global batch, and what all ranks must know before they train on it. Collective, on
    the host.

    Raises, on all ranks alike, what kept any of them from reading its part.
    """
    batch, error, began = None, None, time.perf_counter()
    try:
        batch = next(run.loader)
    except RefusionError as failure:
        error = failure
    run.rank_times.add(time.perf_counter() - began)
    everyone = _exchange(run, batch)
    if everyone["failed"].any():
        raise next(failure for failure in store.gather(error, run.host_group) if failure is not None)
    assert batch is not None, "no rank failed, and this one has no batch"
    _check_copies(everyone, run.state.step + 1)
    if everyone["damage"].any():
        run.note_damage(batch.damage)
    copies = run.groups.world_size // run.groups.dp_size  # all ranks of one copy of the model have the same rows
    totals = {name: column.sum(axis=0) / copies for name, column in everyone.items()}
    counts = Counts(
        targets=totals["targets"], tokens=round(totals["tokens"].item()),
        source_tokens=[round(number) for number in totals["sources"].tolist()],
        memory_mb=everyone["memory"].max().item(), stop=bool(everyone["stop"].any()),
        saved=bool(everyone["saved"].all()), own_s=everyone["own_s"],
    )  # fmt: skip
    return batch, counts


def _exchange(run: Run, batch: StepBatch | None) -> dict[str, np.ndarray]:
    """Numbers of all ranks, float64 [ranks] each, targets [ranks, 3], sources [ranks, sources]. batch: None: failed."""
    here: dict[str, Any] = {
        "failed": batch is None, "stop": run.stop.requested, "saved": run.writer.ended, "memory": peak_memory_mb(),
        "own_s": run.rank_times.mean, "dp_rank": run.groups.dp_rank, "tokens": 0, "checksum": 0,
        "damage": 0, "targets": np.zeros(3), "sources": np.zeros(len(run.data.sources)),
    }  # fmt: skip
    if batch is not None:
        here |= {
            "tokens": batch.tokens, "checksum": batch.checksum, "targets": batch.counts, "sources": batch.source_tokens,
            "damage": sum(not run.state.has_left_out(entry) for entry in batch.damage),
        }  # fmt: skip
    mine = torch.from_numpy(np.concatenate([np.atleast_1d(value).astype(np.float64) for value in here.values()]))
    everyone = torch.empty(run.groups.world_size, len(mine), dtype=torch.float64)
    dist.all_gather(list(everyone.unbind()), mine, group=run.host_group)
    ends = np.cumsum([np.size(value) for value in here.values()])[:-1]
    columns = np.split(everyone.numpy(), ends, axis=1)
    return {
        name: column if isinstance(here[name], np.ndarray) else column[:, 0]
        for name, column in zip(here, columns, strict=True)
    }


def _check_copies(everyone: dict[str, np.ndarray], step: int) -> None:
    """Refuse to train on rows that are not the same on all ranks of a copy of the model.

    They read the same files, but not at the same time, and perhaps of different disks. Raises DataError on all ranks.
    """
    first: dict[float, int] = {}
    for rank, (copy, checksum) in enumerate(zip(everyone["dp_rank"], everyone["checksum"], strict=True)):
        other = first.setdefault(copy, rank)
        if everyone["checksum"][other] != checksum:
            raise DataError(
                f"step {step}: ranks {other} and {rank} should have read the same rows and have not; look for damaged "
                "shards (`refusion data verify`) and run again: the run goes on from its last checkpoint"
            )


def train_step(run: Run, batch: StepBatch, counts: Counts, began: float) -> dict[str, Any]:
    """Train on a global batch, of which `batch` is this rank's part, and advance `run.state`. Collective.

    began: `time.perf_counter()` when the step began, before it waited for its batch.
    Returns the step's row of metrics.jsonl. Raises TrainingError after too many steps in a row that were not finite.
    """
    config, state, prepared = run.config, run.state, time.perf_counter()
    objective = objective_at(config.objective, batch.step)
    micro_batches = weigh(batch, objective, counts.targets, run.groups.dp_size, run.groups.device)
    run.rank_times.add(time.perf_counter() - prepared)
    statistics = run.engine.forward_backward(micro_batches)
    rate = learning_rate(config.train, state.step)
    result = run.engine.step(rate)
    run.rank_times.add(result.own_s)
    run.rank_times.end_step()
    totals = dict(zip(STAT_NAMES, result.statistics.tolist(), strict=True))
    state.advance(batch.cursor, counts.tokens, totals["count_clean"] + totals["count_masked"], result.skipped)
    state.count_sources([source.dataset.fingerprint for source in run.data.sources], counts.source_tokens)
    seconds = time.perf_counter() - began
    row = {
        "step": state.step, "tokens": state.tokens, "supervised_tokens": state.supervised_tokens,
        **losses(totals, objective), "grad_norm": result.grad_norm, "lr": rate,
        "tokens_per_s": counts.tokens / seconds, "step_s": seconds, "memory_mb": counts.memory_mb,
        "epoch": batch.epoch, "skipped": state.skipped, "mdm_buckets": bucket_losses(totals),
        **run.utilisation(counts.tokens / seconds), **_what_was_read(run),
        **run.rank_times.report(state.step, counts.own_s),
    }  # fmt: skip
    if result.skipped:
        run.report_skipped(batch.describe().partition(", ")[2], bool(statistics.isfinite().all()))
    return row


def _what_was_read(run: Run) -> dict[str, Any]:
    """For the step's row: tokens, share and passes so far of each of several sources; blocks left out, if any."""
    state, row = run.state, {}
    if len(run.data.sources) > 1:
        read = [(source, state.source_tokens.get(source.dataset.fingerprint, 0)) for source in run.data.sources]
        row["sources"] = {
            source.name: {
                "tokens": tokens, "share": tokens / max(1, state.tokens),
                "epochs": tokens / source.dataset.index.tokens,
            }
            for source, tokens in read
        }  # fmt: skip
    if run.config.data.on_error == "skip":
        lost = [tokens for blocks in state.left_out.values() for tokens in blocks.values()]
        row |= {"blocks_left_out": len(lost), "tokens_left_out": sum(lost)}
    return row


def weigh(
    batch: StepBatch, objective: ObjectiveConfig, counts: np.ndarray, dp_size: int, device: torch.device
) -> list[DeviceBatch]:
    """The micro-batches with final weights. objective: at this step; counts: float64 [3], of the global batch.

    With `normalization: micro_batch` (the paper's code) each micro-batch has means of its own, which are averaged.
    """
    scales = kind_scales(objective, counts)
    weighed = []
    for micro_batch in batch.micro_batches:
        if objective.normalization == "micro_batch":
            own = kind_scales(objective, micro_batch.counts.sum(axis=0))
            scales = own / np.float32(len(batch.micro_batches) * dp_size)
        weights = micro_batch.loss_weight * scales[micro_batch.target_kind]
        weighed.append(to_device(micro_batch, weights, device))
    return weighed


def kind_scales(objective: ObjectiveConfig, counts: np.ndarray) -> np.ndarray:
    """Factor from weight before normalisation to final weight, float32 [3], by kind of target.

    objective: at a step. counts: float64 [3], as `Batch.counts`. A part without any is 0.
    """
    by_token = objective.normalization == "token"
    clean, masked = counts[CLEAN_TARGETS], counts[RESPONSE_TOKENS if by_token else DOCUMENTS]
    scales = np.zeros(3, dtype=np.float32)
    scales[CLEAN] = objective.ar_weight / clean if clean else 0.0
    scales[MASKED] = objective.mdm_weight / masked if masked else 0.0
    return scales


def losses(totals: dict[str, float], objective: ObjectiveConfig) -> dict[str, float]:
    """The loss that is minimised, and its two parts without their weights (0 for a part that has weight 0)."""
    ar, mdm = objective.ar_weight, objective.mdm_weight
    return {
        "loss": totals["loss"],
        "loss_ar": totals["weighted_clean"] / ar if ar else 0.0,
        "loss_mdm": totals["weighted_masked"] / mdm if mdm else 0.0,
    }


def bucket_losses(totals: dict[str, float]) -> list[float | None]:
    """Mean cross entropy of masked targets by tenth of the mask probability; None where there was none."""
    pairs = ((totals[f"bucket_ce_{i}"], totals[f"bucket_count_{i}"]) for i in range(BUCKETS))
    return [ce / count if count and math.isfinite(ce) else None for ce, count in pairs]
