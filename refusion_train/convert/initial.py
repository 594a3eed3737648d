"""Weights of a Hugging Face folder as logical tensors: vocabulary padded, and rows that the folder does not have.

A model that was trained left to right has no mask token. Its row of the embedding (and of an untied head) is either an
unused one or a new one behind the others; both are made here, by choice as the mean of the others that the tokenizer
uses, as the end-of-text token, or at random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from refusion_train.config import ModelConfig
from refusion_train.convert.names import EMBEDDING, HEAD, logical_shapes
from refusion_train.convert.safetensors_stream import blocks
from refusion_train.convert.source import Source
from refusion_train.errors import ConfigError


@dataclass(frozen=True)
class NewRows:
    """Rows of the vocabulary to be made up: their ids, and the row that each of them becomes, by tensor."""

    ids: tuple[int, ...] = ()
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> float32 [ids, hidden]


class LogicalWeights:
    """What a model of this package starts from: `read` gives any part of any logical tensor.

    model: as the folder's, possibly with more rows in the vocabulary (`model.vocab_size`), padded.
    """

    def __init__(self, source: Source, model: ModelConfig, new: NewRows) -> None:
        self.source, self.model, self.new = source, model, new
        self.shapes = logical_shapes(model)

    def read(self, name: str, where: tuple[slice, ...] = ()) -> torch.Tensor:
        """float32, in memory of its own. Rows of padding are 0."""
        shape = self.shapes[name]
        where = where or (slice(None),) * len(shape)
        if name not in (EMBEDDING, HEAD):
            return self.source.read(name, where)
        first, stop, _ = where[0].indices(shape[0])
        part = torch.zeros(stop - first, shape[1])
        stored = min(stop, self.source.rows)
        if first < stored:
            part[: stored - first] = self.source.read(name, (slice(first, stored), slice(None)))
        for row, index in enumerate(self.new.ids):
            if first <= index < stop:
                part[index - first] = self.new.values[name][row]
        return part[:, where[1]].contiguous() if len(where) > 1 else part


def with_vocabulary(model: ModelConfig, vocab_size: int, vocab_multiple: int) -> ModelConfig:
    """The model with (at least) so many rows of vocabulary."""
    assert model.vocab_size is not None, "the folder states its vocabulary"
    return replace(model, vocab_size=max(model.vocab_size, vocab_size), vocab_multiple=vocab_multiple)


def make_rows(
    source: Source, model: ModelConfig, mask_id: int | None, how: str, used: int | None = None, seed: int = 0
) -> NewRows:
    """The rows that `source` does not have, and that of the mask token if it is to be made.

    mask_id: row of a mask token that the model has not learnt; None: there is none. how: mean, eos or random (normal,
    with the model's `init_std`). used: rows below this count for the mean; default: all stored ones.
    Raises ConfigError if the folder names no end-of-text token and it is asked for.
    """
    assert model.vocab_size is not None, "the vocabulary was settled before"
    wanted: set[int] = set(range(source.rows, model.vocab_size))
    ids = sorted(wanted if mask_id is None else wanted | {mask_id})
    if not ids:
        return NewRows()
    names = [EMBEDDING] if model.tie_embeddings else [EMBEDDING, HEAD]
    values = {name: _one_row(source, model, name, how, mask_id, used, seed) for name in names}
    return NewRows(tuple(ids), {name: draw(len(ids)) for name, draw in values.items()})


def _one_row(
    source: Source, model: ModelConfig, name: str, how: str, mask_id: int | None, used: int | None, seed: int
) -> Callable[[int], torch.Tensor]:
    """A function that gives n such rows."""
    if how == "random":
        digest = hashlib.sha256(f"{seed}:{name}:new rows".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return lambda n: torch.empty(n, model.hidden_size).normal_(0.0, model.init_std, generator=generator)
    if how == "eos":
        end = source.config.get("eos_token_id")
        end = end[0] if isinstance(end, list) and end else end
        if not isinstance(end, int) or not 0 <= end < source.rows:
            raise ConfigError(
                f"'{source.folder}' names no eos_token_id, whose row the mask token should take; choose mean"
            )
        row = source.read(name, (slice(end, end + 1), slice(None)))
        return lambda n: row.repeat(n, 1)
    assert how == "mean", f"no way to make a row is called {how}"
    mean = _mean(source, name, min(used or source.rows, source.rows), mask_id)
    return lambda n: mean.repeat(n, 1)


def _mean(source: Source, name: str, used: int, left_out: int | None) -> torch.Tensor:
    """Mean row of the first `used` ones, without one, in float64 and block by block: float32 [1, hidden]."""
    total, count = torch.zeros(1, source.model.hidden_size, dtype=torch.float64), 0
    for rows in blocks((used, source.model.hidden_size)):
        part = source.read(name, (rows, slice(None))).double()
        total += part.sum(dim=0, keepdim=True)
        count += len(part)
        if left_out is not None and rows.start <= left_out < rows.stop:
            total -= part[left_out - rows.start]
            count -= 1
    return (total / max(1, count)).float()
