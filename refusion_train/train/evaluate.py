"""Validation losses that can be compared: between steps, layouts and objectives; defined in `hf.likelihood`.

Every number is over the same rows of the validation set with the same noise, whatever the run's seed and layout:

    val_nelbo          slots, mdm: nats per response token, an upper bound of the negative log-likelihood under the
                       run's masking. Mean over PASSES draws of [sum of cross entropy / p over masked tokens] /
                       [response tokens]. Pass i takes its noise level from the i-th of PASSES equal parts of [0, 1]
                       (within it the documents spread evenly), so that all draws together integrate over noise.
    val_bits_per_byte  the same sum (ar: of the left-to-right loss) in bits, per UTF-8 byte of the text.
    val_in_slot_ar     slots: mean cross entropy of clean tokens that follow a token of their own slot (in the same
                       passes); what verifying drafts within a slot relies on.
    val_left_to_right  slots, ar: mean cross entropy of ordinary left-to-right prediction: the number that compares
                       objectives. A bidirectional model (mdm) has none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from refusion_train.checkpoint import layout, store
from refusion_train.config import Config
from refusion_train.data.loader import ValidationLoader, stratified_noise
from refusion_train.data.shards import ShardSet
from refusion_train.data.streams import Damage
from refusion_train.errors import ConfigError, DataError
from refusion_train.hf.corruption import PASSES
from refusion_train.model.batch import to_device
from refusion_train.model.loss import STAT_NAMES
from refusion_train.model.slot_model import build_model_chunks
from refusion_train.objective import Objective, make_objective
from refusion_train.objective.batch import RESPONSE_TOKENS
from refusion_train.parallel.engine import Engine
from refusion_train.parallel.groups import Groups, destroy, init_groups
from refusion_train.schedules import LAST, objective_at
from refusion_train.train.damage import warn_of_damage
from refusion_train.train.optim import param_groups
from refusion_train.train.state import adopt_model


def evaluate(
    engine: Engine, groups: Groups, config: Config, dataset: ShardSet, stop: Callable[[], bool] = lambda: False
) -> tuple[dict[str, float], list[Damage]]:
    """The `val_*` numbers of the model as it is, and what was left out (`data.on_error: skip`; then there is
    `val_blocks_left_out`, and the numbers are of what is left). The same on all ranks. Collective.

    Up to `train.validation_rows` rows of `dataset` are used, PASSES times (and once left to right).
    stop: asked before every pass, the same on all ranks; if it says so there are no numbers.
    """
    results: dict[str, float] = {}
    damage: dict[int, Damage] = {}
    if config.objective.name != "ar":
        objective = _plain_objective(config, config.objective.name, dataset)
        passes = []
        for number in range(PASSES):
            if stop():
                return {}, []
            passes.append(_run_pass(engine, groups, config, dataset, objective, number, damage))
        masked, response, clean, clean_targets, text_bytes = (sum(column) for column in zip(*passes, strict=True))
        results["val_nelbo"] = masked / response if response else math.nan
        results["val_bits_per_byte"] = masked / text_bytes / math.log(2) if text_bytes else math.nan
        if config.objective.name == "slots":
            results["val_in_slot_ar"] = clean / clean_targets if clean_targets else math.nan
    if config.objective.name != "mdm":
        objective = _plain_objective(config, "ar", dataset)
        _, _, clean, clean_targets, text_bytes = _run_pass(engine, groups, config, dataset, objective, None, damage)
        results["val_left_to_right"] = clean / clean_targets if clean_targets else math.nan
        results.setdefault("val_bits_per_byte", clean / text_bytes / math.log(2) if text_bytes else math.nan)
    if config.data.on_error == "skip":
        damage = {number: entry for part in store.gather(damage) for number, entry in part.items()}
    if damage:
        results["val_blocks_left_out"] = len(damage)
    return results, [damage[number] for number in sorted(damage)]


def _plain_objective(config: Config, name: str, dataset: ShardSet) -> Objective:
    """As the model is used, not as it is trained: every document masked, no targets across slots, no partly masked
    slots; weights 1 / p. Slot sizes are those that a schedule ends at, so that all steps are measured alike."""
    plain = dataclasses.replace(
        objective_at(config.objective, LAST), name=name, cross_slot_targets=False, partial_slot_probability=0.0,
        ar_probability=0.0, normalization="token", rng="counter",
    )  # fmt: skip
    special = dataset.index.special_ids
    return make_objective(plain, special["mask"], special["pad"])


def _run_pass(
    engine: Engine,
    groups: Groups,
    config: Config,
    dataset: ShardSet,
    objective: Objective,
    number: int | None,
    damage: dict[int, Damage],
) -> tuple[float, float, float, float, float]:
    """Sums over all ranks: masked CE / p, response tokens, clean CE, clean targets; and bytes of text.

    number: the pass, which fixes the noise; None: an objective without noise. damage: blocks that this rank left out
    are added. Raises DataError, on all ranks, if nothing could be read.
    """
    noise = None if number is None else stratified_noise(number, PASSES)
    rows = ValidationLoader(
        dataset, config, objective, groups.dp_rank, groups.dp_size, max_rows=config.train.validation_rows, t=noise,
        draw=number or 0,
    )  # fmt: skip
    sums = torch.zeros(len(STAT_NAMES) + 2, dtype=torch.float64, device=groups.device)
    at_once = config.train.global_batch_size // (groups.dp_size * config.train.micro_batch_size)
    micro_batches = []
    for count, batch in enumerate(rows, start=1):
        sums[-2] += batch.counts[:, RESPONSE_TOKENS].sum()
        micro_batches.append(to_device(batch, batch.loss_weight, groups.device))
        if len(micro_batches) == at_once or count == len(rows):
            sums[:-2] += engine.forward_backward(micro_batches, forward_only=True)
            micro_batches = []
    sums[-1] = rows.filled
    damage |= rows.damage
    dist.all_reduce(sums, group=groups.dp_group)
    *numbers, response, filled = sums.tolist()
    if not filled:
        raise DataError(
            f"{dataset.path}: none of its blocks that are used can be read; `refusion data verify` says why"
        )
    stats = dict(zip(STAT_NAMES, numbers, strict=True))
    return stats["weighted_masked"], response, stats["ce_clean"], stats["count_clean"], rows.bytes_of(round(filled))


def evaluate_checkpoint(config: Config, checkpoint: str) -> dict[str, float]:
    """The `val_*` numbers of a checkpoint (its folder, or a run folder for the newest good one). Collective.

    Joins the group of the environment, or is one process. Raises ConfigError without `data.validation`.
    """
    groups = init_groups(config)
    try:
        if config.data.validation is None:
            raise ConfigError("data.validation is not set; give a folder of shards, data.validation=shards/validation")
        folder = store.on_first_rank(lambda: store.resolve(checkpoint))
        path = config.data.validation
        dataset = store.on_every_rank(lambda: ShardSet.of_run(path, config.data))
        saved = store.on_first_rank(lambda: store.read_state(folder))
        adopt_model(saved, config, dataset.index.tokenizer, folder)
        chunks = build_model_chunks(config, groups, config.objective.name == "mdm")
        engine = Engine(config, groups, chunks, param_groups(chunks, config.train.weight_decay))
        layout.restore_weights(engine, lambda tensors: store.load(folder, tensors))
        results, damage = evaluate(engine, groups, config, dataset)
        if groups.rank == 0:
            warn_of_damage(damage, "validation")
        return results
    finally:
        destroy()
