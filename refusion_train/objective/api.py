"""One entry to every objective: packed documents in, corrupted rows out.

The trainer and the loader know an objective only by `corrupt` and `bidirectional`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refusion_train.config import OBJECTIVES, ObjectiveConfig
from refusion_train.errors import ConfigError
from refusion_train.objective import baselines, slots
from refusion_train.objective.batch import Batch, PackedDocuments
from refusion_train.objective.layout import fill_padding
from refusion_train.objective.noise import document_key
from refusion_train.schedules import is_schedule, value_at

_TOKENS_AT_ONCE = 1 << 17
BACKENDS = ("auto", "numba", "numpy")


@dataclass
class Objective:
    """A corruption with its settings fixed. Stateless: safe to share between threads."""

    config: ObjectiveConfig
    mask_id: int
    pad_id: int
    backend: str = "numpy"  # numpy or numba; both give the same bits

    def __post_init__(self) -> None:
        self._sizes = np.asarray(self.config.slot_sizes, np.int64)
        weights = self.config.slot_weights
        self._constant = None if is_schedule(weights) else slots.size_thresholds(weights, len(self._sizes))

    @property
    def bidirectional(self) -> bool:
        """Whether attention sees the whole document (mdm) rather than what stands physically before (slots, ar)."""
        return self.config.name == "mdm"

    def corrupt(self, packed: PackedDocuments, t: np.ndarray | None = None, step: int | None = None) -> Batch:
        """Corrupt, reorder, label and weigh all rows of `packed`.

        t: float64 [n] in [0, 1], in place of each document's own draw (validation's fixed noise grid).
        step: of the global batch that the rows belong to; needed where `slot_weights` is a schedule.
        """
        packed.check()
        if t is not None:
            assert t.dtype == np.float64 and t.shape == packed.starts.shape, (
                f"t must be float64 {packed.starts.shape}, got {t.dtype} {t.shape}"
            )
            assert ((t >= 0) & (t <= 1)).all(), "t must lie between 0 and 1"
        if not packed.lengths.all():  # an empty document has no token that could carry its number
            keep = packed.lengths > 0
            packed, t = packed.select(keep), None if t is None else t[keep]
        batch = Batch.empty(*packed.tokens.shape)
        if self.config.name == "slots" and self.config.rng == "reference":
            self._reference(batch, packed, t, step)
        elif self.backend == "numba":
            self._compiled(batch, packed, t, step)
        else:  # a few rows at a time: what is in between stays in the processor's cache
            rows = max(1, _TOKENS_AT_ONCE // max(1, packed.tokens.shape[1]))
            for start in range(0, len(packed.tokens), rows):
                some, first, last = packed.some_rows(start, start + rows)
                self._numpy(batch.rows(start, start + rows), some, None if t is None else t[first:last], step)
        return batch

    def plain(self, packed: PackedDocuments) -> np.ndarray | None:
        """Which documents are trained plainly left to right: bool [n]; None: there can be none."""
        return slots.draw_plain(packed.keys, self.config.ar_probability) if self.config.ar_probability else None

    def slot_sizes(self, packed: PackedDocuments, step: int | None = None) -> np.ndarray:
        """The slot size of each document where it is drawn by hash: int64 [n]. step: as in `corrupt`."""
        return slots.draw_sizes(packed.keys, self._sizes, self._thresholds(step))

    def _thresholds(self, step: int | None) -> np.ndarray:
        if self._constant is not None:
            return self._constant
        return slots.size_thresholds(self._weights(step), len(self._sizes))

    def _weights(self, step: int | None) -> list[float] | None:
        """Of the slot sizes, at a step."""
        assert step is not None or self._constant is not None, "slot_weights is a schedule: say of which step rows are"
        return value_at(self.config.slot_weights, step or 0)

    def _numpy(self, batch: Batch, packed: PackedDocuments, t: np.ndarray | None, step: int | None) -> None:
        if self.config.name == "ar":
            baselines.corrupt_ar(batch, packed)
            return
        p = self._mask_probability(packed, t)
        if self.config.name == "mdm":
            baselines.corrupt_mdm(batch, packed, p, *self._masked_targets(packed, p), mask_id=self.mask_id)
            return
        targets, (sizes, p, plain) = self._masked_targets(packed, p), self._cuts(packed, p, step)
        table = slots.SlotTable.cut(packed, sizes)
        draws = slots.draw_slots(packed.keys, table, p, self.config.partial_slot_probability)
        self._lay_out(batch, packed, table, draws, *targets)
        if plain is not None:
            slots.finish_plain(batch, packed, plain)

    def _compiled(self, batch: Batch, packed: PackedDocuments, t: np.ndarray | None, step: int | None) -> None:
        from refusion_train.objective import compiled

        fill_padding(batch, packed)
        if self.config.name == "ar":
            compiled.corrupt_ar(batch, packed)
            return
        p = self._mask_probability(packed, t)
        weights, buckets = self._masked_targets(packed, p)
        if self.config.name == "mdm":
            compiled.corrupt_mdm(batch, packed, p, weights, buckets, mask_id=self.mask_id)
            return
        sizes, p, plain = self._cuts(packed, p, step)
        compiled.corrupt_slots(
            batch,
            packed,
            sizes,
            p,
            weights,
            buckets,
            partial=self.config.partial_slot_probability,
            cross_slot_targets=self.config.cross_slot_targets,
            mask_id=self.mask_id,
        )
        if plain is not None:
            slots.finish_plain(batch, packed, plain)

    def _cuts(
        self, packed: PackedDocuments, p: np.ndarray, step: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Slot size (int64 [n]) and mask probability (float64 [n]) of each document; which ones are plain.

        To lay out a plain document is to lay out one slot that is never masked.
        """
        sizes, plain = self.slot_sizes(packed, step), self.plain(packed)
        if plain is None:
            return sizes, p, None
        return np.where(plain, np.maximum(packed.lengths - packed.prompts, 1), sizes), np.where(plain, 0.0, p), plain

    def _mask_probability(self, packed: PackedDocuments, t: np.ndarray | None) -> np.ndarray:
        """p = (1 - eps) * t + eps of each document: float64 [n]."""
        return (1 - self.config.eps) * (slots.draw_times(packed.keys) if t is None else t) + self.config.eps

    def _masked_targets(self, packed: PackedDocuments, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weight (float32 [n]) and noise bucket (uint8 [n]) of each document's masked targets."""
        responses = packed.lengths - packed.prompts
        return slots.masked_weights(p, responses, self.config.normalization), slots.noise_buckets(p)

    def _lay_out(
        self,
        batch: Batch,
        packed: PackedDocuments,
        table: slots.SlotTable,
        draws: slots.SlotDraws,
        weights: np.ndarray,
        buckets: np.ndarray,
    ) -> None:
        slots.lay_out(
            batch,
            packed,
            table,
            draws,
            weights,
            buckets,
            cross_slot_targets=self.config.cross_slot_targets,
            mask_id=self.mask_id,
        )

    def _reference(self, batch: Batch, packed: PackedDocuments, t: np.ndarray | None, step: int | None) -> None:
        """One `random.Random` per row, seeded by its first document's key; a document's noise depends on its row."""
        rows = packed.starts // max(1, packed.tokens.shape[1])
        new_row = np.flatnonzero(np.diff(rows, prepend=-1))
        rngs = {int(rows[i]): random.Random(int(packed.keys[i])) for i in new_row}
        self.corrupt_reference(batch, packed, [rngs[int(row)] for row in rows], t, step)

    def corrupt_reference(
        self,
        batch: Batch,
        packed: PackedDocuments,
        rngs: list[Any],
        t: np.ndarray | None = None,
        step: int | None = None,
    ) -> np.ndarray:
        """Corrupt with the paper's draw order. rngs: the Random-like object of each document.

        Returns each document's mask probability p: float64 [n].
        """
        config, weights = self.config, self._weights(step)
        responses = packed.lengths - packed.prompts
        drawn = [
            slots.reference_draws(
                rng,
                int(response),
                config.slot_sizes,
                weights,
                config.eps,
                None if t is None else float(t[i]),
            )
            for i, (rng, response) in enumerate(zip(rngs, responses, strict=True))
        ]
        p = np.asarray([d[1] for d in drawn], np.float64)
        table = slots.SlotTable.cut(packed, np.asarray([d[0] for d in drawn], np.int64))
        masked = np.asarray([m for d in drawn for m in d[2]], bool)
        order = np.zeros(len(masked), np.uint64)
        first = np.cumsum(table.counts) - table.counts
        for begin, (_, _, _, clean) in zip(first, drawn, strict=True):
            order[begin + np.asarray(clean, np.int64)] = np.arange(len(clean), dtype=np.uint64)
        self._lay_out(batch, packed, table, slots.SlotDraws(masked, order, None), *self._masked_targets(packed, p))
        return p


def make_objective(config: ObjectiveConfig, mask_id: int, pad_id: int, backend: str = "auto") -> Objective:
    """The objective that `config` names.

    backend: `numba` (compiled, releases the GIL), `numpy` (the same bits, slower), or `auto`: numba where it imports.
    Raises ConfigError for an unknown objective or backend.
    """
    if config.name not in OBJECTIVES:
        raise ConfigError(f"objective.name={config.name} is not one of {', '.join(OBJECTIVES)}")
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend} of the objective is not one of {', '.join(BACKENDS)}")
    objective = Objective(config, mask_id, pad_id)
    if backend == "numpy":
        return objective
    compiled = replace(objective, backend="numba")
    problem = _cannot_compile() or ("" if _same_bits(objective, compiled) else "gives other bits than numpy here")
    if not problem:
        return compiled
    if backend == "numba":
        raise ConfigError(f"backend=numba of the objective {problem}; use backend=numpy")
    return objective


def _cannot_compile() -> str:
    """Why numba cannot be used, or nothing."""
    try:
        from numba.core import config
    except ImportError as error:
        return f"does not import ({error})"
    return "is switched off by NUMBA_DISABLE_JIT" if getattr(config, "DISABLE_JIT", 0) else ""


def _same_bits(objective: Objective, compiled: Objective) -> bool:
    """Whether the machine code computes what numpy does, on a few documents; compiles it if need be.

    It would not if its cache were older than the noise functions (numba looks only at the file of the kernel itself),
    so a difference is met by compiling anew first.
    """
    from refusion_train.objective.compiled import renew

    lengths = np.asarray([1, 2, 40, 200, 13], np.int64)
    packed = PackedDocuments(
        tokens=np.arange(512, dtype=np.int32).reshape(2, 256),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        prompts=np.asarray([0, 1, 3, 0, 13], np.int64),
        keys=document_key(1, 2, np.arange(5), 3),
    )
    wanted = objective.corrupt(packed, step=0)
    if compiled.corrupt(packed, step=0).equals(wanted):
        return True
    renew()
    return compiled.corrupt(packed, step=0).equals(wanted)
