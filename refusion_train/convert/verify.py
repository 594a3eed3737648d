"""`refusion export --verify`: the exported model and the training model compute the same, at ordinary and permuted
positions.

Both compute in float32: the training model with the checkpoint's masters, the other with the weights as they were
written. So the difference is that of rounding the weights, and anything beyond it is a mistake of the conversion.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refusion_train.checkpoint import store
from refusion_train.checkpoint.sharded import ShardedEntry
from refusion_train.config import Config
from refusion_train.convert.export import Checkpoint
from refusion_train.convert.family import CLASSES, family_of
from refusion_train.convert.names import join
from refusion_train.errors import CheckpointError
from refusion_train.model.batch import to_device
from refusion_train.model.slot_model import SlotModel, build_model_chunks
from refusion_train.objective.batch import Batch
from refusion_train.parallel.groups import destroy, init_groups

# Largest difference of logits, in units of the largest logit (1 at least).
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
_ROWS, _LENGTH = 4, 96


@dataclass(frozen=True)
class Verified:
    """difference: the largest of all logits; largest: of the logits themselves."""

    difference: float
    largest: float
    tolerance: float
    dtype: torch.dtype

    def summary(self) -> str:
        """One line for a person."""
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"verified: logits differ by at most {self.difference:.2e} (largest logit {self.largest:.2f}, weights in "
            f"{name}, tolerance {self.tolerance:.0e} of it)"
        )


def verify_folder(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype, seed: int = 0) -> Verified:
    """Compare the logits of the model in `folder` with those of the checkpoint's training model on random inputs.

    Half of the rows have permuted positions. Joins a group of one process. Raises CheckpointError if they differ by
    more than TOLERANCE allows for the type of the weights.
    """
    length = min(_LENGTH, checkpoint.model.max_sequence_length)
    tokens, positions = _inputs(checkpoint.model.vocab_size or 0, length, seed)
    ours = _training_logits(checkpoint, tokens, positions)
    theirs = _exported_logits(folder, checkpoint, tokens, positions)
    largest = max(1.0, ours.abs().max().item())
    result = Verified((ours - theirs).abs().max().item(), largest, TOLERANCE[dtype], dtype)
    if not result.difference <= result.tolerance * largest:
        raise CheckpointError(
            f"the exported model is not that of {checkpoint.folder}: logits differ by {result.difference:.2e} (largest "
            f"logit {largest:.2f}, weights in {str(dtype).removeprefix('torch.')}, tolerance {result.tolerance:.0e} of "
            "it); nothing was exported, please report this"
        )
    return result


def _inputs(vocab_size: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and positions, int64 [rows, length]: the first half of the rows in order, the others permuted."""
    random = np.random.default_rng(seed)
    positions = np.tile(np.arange(length), (_ROWS, 1))
    positions[_ROWS // 2 :] = random.permuted(positions[_ROWS // 2 :], axis=1)
    return random.integers(0, vocab_size, positions.shape), positions


@torch.no_grad()
def _training_logits(checkpoint: Checkpoint, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    config = Config(model=dataclasses.replace(checkpoint.model, init_from=None))
    config.objective = checkpoint.objective
    config.train.precision, config.train.micro_batch_size = "fp32", len(tokens)
    config.data.sequence_length = tokens.shape[1]
    groups = init_groups(config)
    try:
        (model,) = build_model_chunks(config, groups, bidirectional=checkpoint.objective.name == "mdm")
        _fill(model, checkpoint.folder)
        batch = Batch.empty(*tokens.shape)
        batch.input_ids[:], batch.position_ids[:], batch.document_ids[:] = tokens, positions, 0
        batch.labels[:], batch.loss_weight[:], batch.target_kind[:], batch.noise_bucket[:] = -100, 0, 0, 0
        return model.logits(to_device(batch, batch.loss_weight, groups.device)).float().cpu()
    finally:
        destroy()


def _fill(model: SlotModel, folder: Path) -> None:
    """Give a whole model on one rank the masters of a checkpoint, tensor by tensor."""
    for name, pieces in model.pieces().items():
        values: dict[str, Any] = {piece.name: torch.empty(piece.shape) for piece in pieces}
        zero = {piece.name: (0,) * len(piece.shape) for piece in pieces}
        store.load(folder, {f"{n}.master": ShardedEntry(tuple(v.shape), {zero[n]: v}) for n, v in values.items()})
        join(model.get_parameter(name).data, pieces, values)


@torch.no_grad()
def _exported_logits(folder: Path, checkpoint: Checkpoint, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    from transformers.utils import logging

    from refusion_train.hf import modeling_refusion

    logging.disable_progress_bar()
    model_class = getattr(modeling_refusion, CLASSES[family_of(checkpoint.model)][1])
    model = model_class.from_pretrained(folder, local_files_only=True).float().eval()
    rows = zip(torch.from_numpy(tokens), torch.from_numpy(positions), strict=True)
    return torch.cat([model(ids[None], position_ids=at[None], use_cache=False).logits for ids, at in rows])
