"""One entry to every objective: packed documents in, corrupted rows out.

The trainer and the loader know an objective only by `corrupt` and `bidirectional`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from refusion_train.config import OBJECTIVES, ObjectiveConfig
from refusion_train.errors import ConfigError
from refusion_train.objective import baselines, slots
from refusion_train.objective.batch import Batch, PackedDocuments


@dataclass
class Objective:
    """A corruption with its settings fixed. Stateless: safe to share between threads."""

    config: ObjectiveConfig
    mask_id: int
    pad_id: int
    kernels: Any = None  # compiled functions (kernels.Kernels); None: numpy

    def __post_init__(self) -> None:
        weights = self.config.slot_weights or [1.0] * len(self.config.slot_sizes)
        shares = np.cumsum(np.asarray(weights, np.float64))
        self._thresholds = shares[:-1] / shares[-1]
        self._sizes = np.asarray(self.config.slot_sizes, np.int64)

    @property
    def bidirectional(self) -> bool:
        """Whether attention sees the whole document (mdm) rather than what stands physically before (slots, ar)."""
        return self.config.name == "mdm"

    @property
    def backend(self) -> str:
        """Which implementation runs: numba or numpy. Both give the same bits."""
        return "numpy" if self.kernels is None else "numba"

    def corrupt(self, packed: PackedDocuments, t: np.ndarray | None = None) -> Batch:
        """Corrupt, reorder, label and weigh all rows of `packed`.

        t: float64 [n] in [0, 1], in place of each document's own draw (validation's fixed noise grid).
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
            self._reference(batch, packed, t)
        else:
            self._numpy(batch, packed, t)
        return batch

    def _numpy(self, batch: Batch, packed: PackedDocuments, t: np.ndarray | None) -> None:
        config = self.config
        if config.name == "ar":
            baselines.corrupt_ar(batch, packed)
            return
        p = (1 - config.eps) * (slots.draw_times(packed.keys) if t is None else t) + config.eps
        if config.name == "mdm":
            baselines.corrupt_mdm(batch, packed, p, normalization=config.normalization, mask_id=self.mask_id)
            return
        table = slots.SlotTable.cut(packed, slots.draw_sizes(packed.keys, self._sizes, self._thresholds))
        draws = slots.draw_slots(packed.keys, table, p, config.partial_slot_probability)
        self._lay_out(batch, packed, table, draws, p)

    def _lay_out(
        self, batch: Batch, packed: PackedDocuments, table: slots.SlotTable, draws: slots.SlotDraws, p: np.ndarray
    ) -> None:
        slots.lay_out(
            batch,
            packed,
            table,
            draws,
            p,
            normalization=self.config.normalization,
            cross_slot_targets=self.config.cross_slot_targets,
            mask_id=self.mask_id,
        )

    def _reference(self, batch: Batch, packed: PackedDocuments, t: np.ndarray | None) -> None:
        """One `random.Random` per row, seeded by its first document's key; a document's noise depends on its row."""
        rows = packed.starts // max(1, packed.tokens.shape[1])
        new_row = np.flatnonzero(np.diff(rows, prepend=-1))
        rngs = {int(rows[i]): random.Random(int(packed.keys[i])) for i in new_row}
        self.corrupt_reference(batch, packed, [rngs[int(row)] for row in rows], t)

    def corrupt_reference(
        self, batch: Batch, packed: PackedDocuments, rngs: list[Any], t: np.ndarray | None = None
    ) -> np.ndarray:
        """Corrupt with the paper's draw order. rngs: the Random-like object of each document.

        Returns each document's mask probability p: float64 [n].
        """
        config = self.config
        responses = packed.lengths - packed.prompts
        drawn = [
            slots.reference_draws(
                rng,
                int(response),
                config.slot_sizes,
                config.slot_weights,
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
        self._lay_out(batch, packed, table, slots.SlotDraws(masked, order, None), p)
        return p


def make_objective(config: ObjectiveConfig, mask_id: int, pad_id: int, backend: str = "auto") -> Objective:
    """The objective that `config` names.

    backend: `numba` (compiled, releases the GIL), `numpy` (the same bits, slower), or `auto`: numba where it imports.
    Raises ConfigError for an unknown objective or backend.
    """
    if config.name not in OBJECTIVES:
        raise ConfigError(f"objective.name={config.name} is not one of {', '.join(OBJECTIVES)}")
    if backend not in ("auto", "numba", "numpy"):
        raise ConfigError(f"backend={backend} of the objective is not one of auto, numba, numpy")
    return Objective(config, mask_id, pad_id, None)
