"""Driving decoders with a model: forwards, probabilities, samples, counts and progress.

Rows of a batch are advanced in step, each by its own decoder, and leave when they are done.

This file is copied into every exported folder: it imports torch and its neighbours only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .baselines import DiffusionDecoder, LeftToRightDecoder
from .cache import NO_TARGET, KeyValueCache, Query, forward
from .decoding import Decoder, Note, Prediction, Rows, SlotDecoder
from .settings import Settings

DECODERS = {"plan_and_infill": SlotDecoder, "left_to_right": LeftToRightDecoder, "mdm": DiffusionDecoder}
# Rows of logits that exist at a time: those of a large vocabulary are large.
_HEAD_ROWS = 256


@dataclass
class Update:
    """The response as it stands after a forward; what a streaming callback is given."""

    row: int  # of the batch
    tokens: list[int]  # of the response region; the mask id where `decided` is False
    decided: list[bool]
    end: int | None  # offset of the earliest end token so far; what follows it will be cut
    forwards: int  # so far, for this row
    notes: list[Note] = field(default_factory=list)  # decoding by slots: what this forward did to each


@dataclass
class Decoded:
    """The response to one prompt and what it cost."""

    tokens: list[int]  # up to and including the earliest end token, at most max_new_tokens
    forwards: int = 0  # that it took part in
    query_tokens: int = 0  # tokens that went through the model, over all forwards


class Row:
    """One sequence of a batch while it is decoded."""

    def __init__(
        self, number: int, prompt: list[int], settings: Settings, cache: KeyValueCache, watched: bool = False
    ) -> None:
        """number: of the batch; it seeds the row's samples beside `seed`. watched: take notes for updates."""
        self.number = number
        self.settings = settings
        self.decoder: Decoder = DECODERS[settings.decoding](prompt, settings, cache.rows[number])
        self.random = torch.Generator().manual_seed((settings.seed * 1_000_003 + number) % 2**63)
        self.result = Decoded([])
        if watched and isinstance(self.decoder, SlotDecoder):
            self.decoder.notes = []
        self._steps = self.decoder.steps()
        # What is to be run, or looked up, next; None: done.
        self.asked: Query | Rows | None = next(self._steps, None)

    def answer(self, seen: Prediction) -> None:
        """Give the decoder what it asked for."""
        try:
            self.asked = self._steps.send(seen)
        except StopIteration:
            self.asked = None

    def update(self) -> Update:
        settings, decoder = self.settings, self.decoder
        tokens = list(decoder.tokens[: settings.max_new_tokens])
        decided = [token != settings.mask_id for token in tokens]
        notes: list[Note] = []
        if isinstance(decoder, SlotDecoder) and decoder.notes is not None:
            notes, decoder.notes = decoder.notes, []
        return Update(self.number, tokens, decided, decoder.end, self.result.forwards, notes)

    def finish(self) -> None:
        settings, decoder = self.settings, self.decoder
        stop = settings.max_new_tokens if decoder.end is None else min(settings.max_new_tokens, decoder.end + 1)
        self.result.tokens = decoder.tokens[:stop]
        assert settings.mask_id not in self.result.tokens, "a mask token was left in the response"


def decode(
    model: Any, prompts: Sequence[list[int]], settings: Settings, on_update: Callable[[Update], None] | None = None
) -> list[Decoded]:
    """Decode some sequences together; what each becomes does not depend on the others.

    `model`: Qwen3- or Llama-like ...ForCausalLM.
    """
    # Masked diffusion keeps nothing: its cache is scratch of the same size.
    # A slot more: a plan may look at one a second time.
    cache = KeyValueCache(model, max(map(len, prompts)) + settings.region + settings.unit, len(prompts))
    rows = [Row(number, prompt, settings, cache, on_update is not None) for number, prompt in enumerate(prompts)]
    results = [row.result for row in rows]
    while rows:
        _advance(model, cache, rows, settings)
        for row in rows:
            if on_update is not None:
                on_update(row.update())
        for place in reversed(range(len(rows))):
            if rows[place].asked is None:
                rows[place].finish()
                cache.drop(place)
                last = rows.pop()
                if place < len(rows):
                    rows[place] = last
    return results


def _advance(model: Any, cache: KeyValueCache, rows: list[Row], settings: Settings) -> None:
    """One forward for all rows, and everything that they ask of it."""
    queries: list[Query] = []
    for row in rows:
        assert isinstance(row.asked, Query), "a row begins with a forward"
        queries.append(row.asked)
        row.result.forwards += 1
        row.result.query_tokens += len(row.asked.tokens)
    hidden = forward(model, cache, queries)
    firsts = [0]
    for query in queries:
        firsts.append(firsts[-1] + len(query.tokens))
    asking = list(range(len(rows)))
    while asking:
        wanted = [_wanted(rows[place].asked) for place in asking]
        seen = predict(
            model, hidden,
            [firsts[place] + index for place, some in zip(asking, wanted, strict=True) for index in some],
            [t for place, some in zip(asking, wanted, strict=True) for t in _targets(queries[place], some)],
            [(rows[place].random, len(some)) for place, some in zip(asking, wanted, strict=True)],
            settings, any(queries[place].sure for place in asking),
        )  # fmt: skip
        first = 0
        for place, some in zip(asking, wanted, strict=True):
            part = slice(first, first + len(some))
            rows[place].answer(Prediction(seen.tokens[part], seen.probabilities[part], seen.targets[part]))
            first += len(some)
        asking = [place for place in asking if isinstance(rows[place].asked, Rows)]


def _wanted(asked: Query | Rows | None) -> Sequence[int]:
    assert asked is not None, "a row that is done asks for nothing"
    return range(len(asked.tokens)) if isinstance(asked, Query) and asked.wanted is None else asked.wanted or []


def _targets(query: Query, rows: Sequence[int]) -> list[int]:
    return [query.targets[row] for row in rows] if query.targets else [NO_TARGET] * len(rows)


def predict(
    model: Any, hidden: Tensor, wanted: list[int], targets: list[int], draws: list[tuple[torch.Generator, int]],
    settings: Settings, sure: bool = True,
) -> Prediction:  # fmt: skip
    """Apply the head to the `wanted` rows of `hidden` [tokens, hidden]; the mask token has probability 0.

    targets: a token for each wanted row, or NO_TARGET. draws: which generator samples how many of the rows, in order.
    sure: whether probabilities are needed. One transfer to the host, whatever is asked.
    """
    if not wanted:
        return Prediction([], [], [])
    # All rows in order, as in most forwards: no copy.
    chosen = hidden if wanted == list(range(len(hidden))) else hidden[torch.tensor(wanted, device=hidden.device)]
    uniform = torch.cat([torch.rand(count, 1, generator=random, dtype=torch.float64) for random, count in draws]) \
        if settings.temperature > 0 else None  # fmt: skip
    parts = []
    asked = torch.tensor(targets, device=hidden.device) if sure and any(t != NO_TARGET for t in targets) else None
    for first in range(0, len(chosen), _HEAD_ROWS):
        part = slice(first, first + _HEAD_ROWS)
        parts.append(
            _predict(
                model.lm_head(chosen[part]), None if asked is None else asked[part],
                None if uniform is None else uniform[part], settings, sure,
            )
        )  # fmt: skip
    numbers = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).tolist()
    count = len(wanted)
    known = numbers[2] if asked is not None else [0.0] * count
    return Prediction([int(token) for token in numbers[0]], numbers[1] if sure else [0.0] * count, known)


def _predict(logits: Tensor, targets: Tensor | None, uniform: Tensor | None, settings: Settings, sure: bool) -> Tensor:
    """Tokens, their probabilities (if `sure`) and the targets' (if given), as float64 [1 to 3, rows]: ids are exact."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if settings.mask_id >= 0:
        logits[:, settings.mask_id] = -torch.inf
    tokens = logits.argmax(dim=-1) if uniform is None else _sample(logits, settings, uniform)
    if not sure:
        return tokens[None].double()
    total = logits.logsumexp(dim=-1)
    lines = [tokens.double(), (logits.gather(1, tokens[:, None])[:, 0] - total).exp().double()]
    if targets is not None:
        found = (logits.gather(1, targets.clamp(min=0)[:, None])[:, 0] - total).exp()
        lines.append(found.masked_fill(targets < 0, 0.0).double())
    return torch.stack(lines)


def _sample(logits: Tensor, settings: Settings, uniform: Tensor) -> Tensor:
    """One token [n] for each row of logits [n, vocab]: temperature, then the smallest set of mass top_p.

    uniform: float64 [n, 1] in [0, 1), drawn on the host, so that a seed means the same on every device.
    """
    # The largest is 0, so that a tiny temperature makes zeros of the others and nothing infinite.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / max(settings.temperature, 1e-30)
    probabilities, order = scaled.softmax(dim=-1).sort(dim=-1, descending=True)
    cumulated = probabilities.double().cumsum(dim=-1)
    if settings.top_p < 1:
        probabilities = probabilities.masked_fill(cumulated - probabilities >= settings.top_p, 0.0)
        cumulated = probabilities.double().cumsum(dim=-1)
    drawn = uniform.to(logits.device) * cumulated[:, -1:]
    possible = (probabilities > 0).sum(dim=-1, keepdim=True)
    rank = (cumulated <= drawn).sum(dim=-1, keepdim=True)
    return order.gather(1, rank.minimum(possible - 1))[:, 0]
