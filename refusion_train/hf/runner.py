"""Driving a decoder with a model: forwards, probabilities, samples, counts and progress.

This file is copied into every exported folder: it imports torch and its neighbours only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cache import NO_TARGET, KeyValueCache, Query, forward
from .decoding import DECODERS, Decoder, Prediction, Settings


@dataclass
class Update:
    """The response as it stands after a forward; what a streaming callback is given."""

    row: int  # of the batch
    tokens: list[int]  # of the response region; the mask id where `decided` is False
    decided: list[bool]
    end: int | None  # offset of the earliest end token so far; what follows it will be cut
    forwards: int  # so far, for this row


@dataclass
class Decoded:
    """The response to one prompt and what it cost."""

    tokens: list[int]  # up to and including the earliest end token, at most max_new_tokens
    forwards: int = 0
    query_tokens: int = 0  # tokens that went through the model, over all forwards


def decode(
    model: Any, prompt: list[int], settings: Settings, row: int = 0, on_update: Callable[[Update], None] | None = None
) -> Decoded:
    """Decode one sequence. `model`: Qwen3- or Llama-like ...ForCausalLM; `row` seeds its samples beside `seed`."""
    # Masked diffusion keeps nothing: its cache is scratch of the same size.
    cache = KeyValueCache(model, len(prompt) + settings.region)
    decoder: Decoder = DECODERS[settings.decoding](prompt, settings, cache)
    random = torch.Generator().manual_seed(settings.seed * 1_000_003 + row)
    result = Decoded([])
    steps = decoder.steps()
    query = next(steps, None)
    while query is not None:
        seen = predict(model, forward(model, cache, query), query, settings, random)
        result.forwards += 1
        result.query_tokens += len(query.tokens)
        try:
            query = steps.send(seen)
        except StopIteration:
            query = None
        if on_update is not None:
            on_update(_update(row, decoder, settings, result.forwards))
    stop = settings.max_new_tokens if decoder.end is None else min(settings.max_new_tokens, decoder.end + 1)
    result.tokens = decoder.tokens[:stop]
    assert settings.mask_id not in result.tokens, "a mask token was left in the response"
    return result


def _update(row: int, decoder: Decoder, settings: Settings, forwards: int) -> Update:
    tokens = list(decoder.tokens[: settings.max_new_tokens])
    return Update(row, tokens, [token != settings.mask_id for token in tokens], decoder.end, forwards)


def predict(model: Any, hidden: Tensor, query: Query, settings: Settings, random: torch.Generator) -> Prediction:
    """Apply the head to the wanted rows of `hidden` [q, hidden]; the mask token has probability 0."""
    wanted, targets = query.wanted, query.targets or [NO_TARGET] * len(query.tokens)
    if wanted is not None:
        if not wanted:
            return Prediction([], [], [])
        hidden, targets = hidden[wanted], [targets[index] for index in wanted]
    logits = model.lm_head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if settings.mask_id >= 0:
        logits[:, settings.mask_id] = -torch.inf
    tokens = _sample(logits, settings, random) if settings.temperature > 0 else logits.argmax(dim=-1)
    asked = torch.tensor(targets, device=logits.device)
    scores = torch.stack([logits.gather(1, ids[:, None])[:, 0] for ids in (tokens, asked.clamp(min=0))])
    probabilities = (scores - logits.logsumexp(dim=-1)).exp()
    # Ids are exact in float64: one transfer for all three.
    numbers = torch.cat([tokens[None].double(), probabilities.double()]).tolist()
    known = [value if target >= 0 else 0.0 for value, target in zip(numbers[2], targets, strict=True)]
    return Prediction([int(token) for token in numbers[0]], numbers[1], known)


def _sample(logits: Tensor, settings: Settings, random: torch.Generator) -> Tensor:
    """One token [n] for each row of logits [n, vocab]: temperature, then the smallest set of mass top_p."""
    probabilities, order = (logits / settings.temperature).softmax(dim=-1).sort(dim=-1, descending=True)
    cumulated = probabilities.double().cumsum(dim=-1)
    if settings.top_p < 1:
        probabilities = probabilities.masked_fill(cumulated - probabilities >= settings.top_p, 0.0)
        cumulated = probabilities.double().cumsum(dim=-1)
    # Drawn on the host, so that a seed means the same on every device.
    drawn = torch.rand(len(logits), 1, generator=random, dtype=torch.float64).to(logits.device) * cumulated[:, -1:]
    rank = (cumulated <= drawn).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return order.gather(1, rank)[:, 0]
