"""How likely a model says a text is, in three ways, each a fixed number: the same text, the same noise, every time.

    left to right   log-probability of each token after those before it: the stock forward, what evaluation tools read.
                    It compares all models that have it; masked diffusion over tokens (mdm) has none.
    NELBO           nats, an upper bound of -log p(response | prompt) under the model's own masking: the mean over
                    PASSES passes of sum(cross entropy / p over masked tokens). Pass i takes its noise level from the
                    i-th of PASSES equal parts of [0, 1], so that all passes together integrate over noise.
    in-slot AR      log-probability of the clean tokens that follow a token of their own slot, in the same passes: what
                    verifying a draft relies on.

`refusion evaluate` gives the same numbers per token of a validation set: noise is a function of (key of a document,
noise level), here as there; see docs/objective.md.

This file is copied into every exported folder: it imports torch and its neighbour only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .corruption import PASSES, Masking, corrupt, document_key, noise_level


@dataclass
class Likelihood:
    """Of one document, in nats. left_to_right: sum of log-probabilities; nelbo: see above; in_slot: sum of
    log-probabilities over all passes; *_tokens: how many tokens each is over. nan where a model has no such number."""

    left_to_right: float = float("nan")
    left_to_right_tokens: int = 0
    nelbo: float = float("nan")
    response_tokens: int = 0
    in_slot: float = float("nan")
    in_slot_tokens: int = 0


@torch.no_grad()
def likelihood(
    model: Any, tokens: list[int], prompt: int, masking: Masking, document: int = 0, keys: list[int] | None = None
) -> Likelihood:
    """All numbers of one document. `model`: a class of modeling_refusion; `document`: its number, which decides its
    noise; keys: of its noise in each pass, in place of those of `document_key`."""
    result = Likelihood()
    if masking.objective != "mdm" and len(tokens) > max(prompt, 1):
        first = max(prompt, 1)  # nothing stands before the first token of all
        rows = _log_probabilities(
            model, tokens, list(range(len(tokens))), range(first - 1, len(tokens) - 1), tokens[first:]
        )
        result.left_to_right, result.left_to_right_tokens = rows.sum().item(), len(rows)
    if masking.objective == "ar":
        return result
    result.nelbo = result.in_slot = 0.0
    result.response_tokens = len(tokens) - prompt
    for number in range(PASSES):
        key = document_key(number, document) if keys is None else keys[number]
        seen = corrupt(tokens, prompt, masking, key, float(noise_level(number, document)))
        wanted = [*seen.masked, *seen.follows]
        targets = [tokens[seen.positions[row]] for row in seen.masked] + [seen.tokens[row + 1] for row in seen.follows]
        rows = _log_probabilities(model, seen.tokens, seen.positions, wanted, targets)
        count = len(seen.masked)
        result.nelbo -= rows[:count].sum().item() / seen.p / PASSES
        result.in_slot += rows[count:].sum().item()
        result.in_slot_tokens += len(seen.follows)
    if masking.objective == "mdm":
        result.in_slot = float("nan")
    return result


def _log_probabilities(model: Any, tokens: list[int], positions: list[int], rows: Any, targets: list[int]) -> Tensor:
    """Log-probability of a target at each of these rows, float64 [rows]; one forward."""
    wanted = list(rows)
    if not wanted:
        return torch.zeros(0, dtype=torch.float64)
    device = model.device
    ids, at = torch.tensor([tokens], device=device), torch.tensor([positions], device=device)
    logits = model(input_ids=ids, position_ids=at, use_cache=False).logits[0, wanted]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    picked = logits.log_softmax(dim=-1).gather(1, torch.tensor(targets, device=device)[:, None])[:, 0]
    return picked.double().cpu()
