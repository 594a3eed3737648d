"""Turning a prompt into a response: slots (plan, verify, infill), left to right, and masked diffusion.

Each decoder is a generator that knows tokens and slots but no model: it yields a `Query` (what to run through
the model), is sent a `Prediction`, and keeps or drops keys through `cache.commit`. So the logic is testable
without a model, every forward is counted at one place (runner.decode), and several sequences can be advanced in
step.

Source: arXiv 2512.13586, section 3, with the corrections described in the documentation of the objective.
This file is copied into every exported folder: it imports nothing but its neighbour.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .cache import NO_TARGET, Query

DECODINGS = ("plan_and_infill", "left_to_right", "mdm")
CORRECTIONS = ("ar", "redraft")
# Confidences that differ by less are equal.
EQUAL = 1e-6


@dataclass
class Settings:
    """How to decode. The defaults are those of greedy decoding of slots."""

    mask_id: int
    end_ids: tuple[int, ...] = ()
    decoding: str = "plan_and_infill"
    max_new_tokens: int = 128
    slot_size: int = 8
    # Serial blocks of the response region; slots of later blocks are not planned before earlier blocks are full.
    num_blocks: int = 1
    # A slot is chosen when the probability of its first token is above this (or when it is the best).
    slot_threshold: float = 0.9
    # A drafted token is accepted while its left-to-right probability within the slot is above this.
    token_threshold: float = 0.4
    # What replaces a rejected token: ar (argmax of the distribution that rejected it), redraft (the paper's).
    correction: str = "ar"
    # Recompute the keys of slots that were completed side by side in one causal pass.
    exact_kv: bool = False
    # A slot whose predecessor is committed may take its first token from the left-to-right prediction there.
    first_from_ar: bool = True
    # 0: argmax. Probabilities compared with thresholds are always those at temperature 1.
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    # mdm: forwards over the whole response; None: one for each token.
    steps: int | None = None

    @property
    def region(self) -> int:
        """Length of the response region: max_new_tokens rounded up to whole slots (slots only)."""
        if self.decoding != "plan_and_infill":
            return self.max_new_tokens
        return -(-self.max_new_tokens // self.slot_size) * self.slot_size

    def validate(self) -> None:
        """Raise ValueError, naming the option and a remedy, for values that cannot work."""
        _one_of("decoding", self.decoding, DECODINGS)
        _one_of("correction", self.correction, CORRECTIONS)
        for name in ("max_new_tokens", "slot_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"temperature={self.temperature} must be at least 0 and top_p={self.top_p} in (0, 1]")
        if self.decoding == "left_to_right":
            return
        unit = self.slot_size if self.decoding == "plan_and_infill" else 1
        if self.region % (self.num_blocks * unit):
            raise ValueError(
                f"a response region of {self.region} tokens (max_new_tokens={self.max_new_tokens}) cannot be cut into "
                f"num_blocks={self.num_blocks} blocks of whole slots (slot_size={unit}); "
                f"make max_new_tokens a multiple of {self.num_blocks * unit}, or change num_blocks"
            )
        if self.decoding == "mdm" and self.steps is not None:
            block = self.region // self.num_blocks
            if self.steps % self.num_blocks or not 1 <= self.steps // self.num_blocks <= block:
                raise ValueError(
                    f"steps={self.steps} must be a multiple of num_blocks={self.num_blocks} and at most "
                    f"max_new_tokens={self.max_new_tokens}"
                )


@dataclass
class Prediction:
    """What the model says at the wanted rows of a query; plain lists, one transfer from the device."""

    tokens: list[int]  # argmax (or a sample) without the mask token
    probabilities: list[float]  # of these tokens
    targets: list[float]  # probabilities of the query's targets; 0 where none was given


Steps = Generator[Query, Prediction, None]


class Cache(Protocol):
    """The part of the cache that decoders use."""

    def commit(self, count: int) -> None: ...


class Decoder(Protocol):
    """A sequence being decoded: `tokens` of the response region hold the mask id where nothing is decided."""

    tokens: list[int]
    end: int | None

    def steps(self) -> Steps: ...


@dataclass
class _Draft:
    """The current tokens of one chosen slot; the first `accepted` of them are final."""

    slot: int
    tokens: list[int]
    accepted: int = 1
    # What the last verifying forward predicts after each token.
    predicted: list[int] = field(default_factory=list)
    # Infill: a forward of this slot's own run has seen the final tokens, so that its keys are right.
    seen: bool = False
    # The prediction after the last token, of the forward whose keys are kept.
    following: tuple[int, float] | None = None

    @property
    def whole(self) -> bool:
        return self.accepted == len(self.tokens)


class SlotDecoder:
    """Plan, verify, infill, for one sequence."""

    def __init__(self, prompt: list[int], settings: Settings, cache: Cache) -> None:
        """`prompt`: token ids, may be empty; `cache`: empty, with room for the prompt and the region."""
        self.prompt = prompt
        self.settings = settings
        self.cache = cache
        self.tokens = [settings.mask_id] * settings.region
        # Offset of the earliest end token that is decided.
        self.end: int | None = None
        # Left-to-right prediction (token, probability) of a slot's first token, where its predecessor is committed.
        self._ahead: dict[int, tuple[int, float]] = {}

    def steps(self) -> Steps:
        """Yield the forwards of the whole response; afterwards `tokens` is decided up to `end`."""
        settings = self.settings
        if self.prompt:
            wanted = [len(self.prompt) - 1] if settings.first_from_ar else []
            seen = yield Query(self.prompt, list(range(len(self.prompt))), wanted=wanted)
            self.cache.commit(len(self.prompt))
            if wanted:
                self._ahead[0] = (seen.tokens[0], seen.probabilities[0])
        per_block = settings.region // settings.slot_size // settings.num_blocks
        for block in range(settings.num_blocks):
            pool = self._before_end(range(block * per_block, (block + 1) * per_block))
            while pool:
                drafts = yield from self._plan(pool)
                run = yield from self._verify(drafts)
                if not run:
                    run = yield from self._infill(drafts)
                self._commit(run)
                done = {draft.slot for draft in run}
                pool = self._before_end(slot for slot in pool if slot not in done)

    # ------------------------------------------------------------------------------------------------------- phases

    def _plan(self, pool: list[int]) -> Generator[Query, Prediction, list[_Draft]]:
        """Draft every slot of the pool from masks; returns the chosen slots' drafts in position order."""
        size, mask = self.settings.slot_size, self.settings.mask_id
        positions = [position for slot in pool for position in self._positions(slot, size)]
        seen = yield Query([mask] * len(positions), positions)
        drafts, sure = [], []
        for row, slot in enumerate(pool):
            tokens = seen.tokens[row * size : (row + 1) * size]
            confidence = seen.probabilities[row * size]
            if slot in self._ahead and self._ahead[slot][1] > confidence:
                tokens[0], confidence = self._ahead[slot]
            drafts.append(_Draft(slot, tokens))
            sure.append(confidence)
        chosen = [draft for draft, value in zip(drafts, sure, strict=True) if value > self.settings.slot_threshold]
        if not chosen:
            # The first among equals: without a prompt all slots look alike, and rounding must not choose.
            chosen = [next(d for d, value in zip(drafts, sure, strict=True) if value >= max(sure) - EQUAL)]
        for index, draft in enumerate(chosen):
            self._accept(draft, 1)
            if self._ended(draft):
                # Whatever becomes of this slot, those behind its end token are not kept in this iteration.
                return chosen[: index + 1]
        return chosen

    def _verify(self, drafts: list[_Draft]) -> Generator[Query, Prediction, list[_Draft]]:
        """One causal pass over all drafts; returns the leading run of wholly accepted ones (may be empty)."""
        seen = yield self._query(drafts, [sum(len(draft.tokens) for draft in drafts)], [0])
        self._judge(drafts, seen)
        run: list[_Draft] = []
        for draft in drafts:
            if not draft.whole:
                break
            run.append(draft)
            if self._ended(draft):
                break
        return run

    def _infill(self, drafts: list[_Draft]) -> Generator[Query, Prediction, list[_Draft]]:
        """Complete all drafts side by side, each behind the committed cache only; returns those up to the end token.

        A slot is done when a forward has seen its final tokens. Every slot keeps its own scratch places in every
        round, so that afterwards the keys of all slots stand in position order without being moved.
        """
        place = {draft.slot: index * self.settings.slot_size for index, draft in enumerate(drafts)}
        while True:
            drafts = self._until_end(drafts)
            rejected = [draft for draft in drafts if not draft.whole]
            if self.settings.correction == "ar":
                for draft in rejected:
                    self._replace(draft, draft.predicted[draft.accepted - 1 : -1])
            elif rejected:
                yield from self._redraft(rejected, place)
            drafts = self._until_end(drafts)
            unseen = [draft for draft in drafts if not draft.seen]
            if not unseen:
                break
            lengths, starts = [len(draft.tokens) for draft in unseen], [place[draft.slot] for draft in unseen]
            self._judge(unseen, (yield self._query(unseen, lengths, starts)))
            for draft in unseen:
                draft.seen = draft.whole
        if self.settings.exact_kv and len(drafts) > 1:
            self._judge(drafts, (yield self._query(drafts, [sum(len(draft.tokens) for draft in drafts)], [0])))
        return drafts

    def _redraft(self, drafts: list[_Draft], place: dict[int, int]) -> Steps:
        """Predict the rest of each slot from masks behind its accepted prefix; the first of these is accepted."""
        mask, size = self.settings.mask_id, self.settings.slot_size
        tokens = [token for d in drafts for token in d.tokens[: d.accepted] + [mask] * (size - d.accepted)]
        positions = [position for d in drafts for position in self._positions(d.slot, size)]
        wanted = [size * i + j for i, d in enumerate(drafts) for j in range(d.accepted, size)]
        starts = [place[d.slot] for d in drafts]
        seen = yield Query(tokens, positions, [size] * len(drafts), starts, wanted=wanted)
        row = 0
        for draft in drafts:
            count = size - draft.accepted
            self._replace(draft, seen.tokens[row : row + count])
            row += count

    # ------------------------------------------------------------------------------------------------------- helpers

    def _positions(self, slot: int, count: int) -> range:
        """Positions in the document of the first `count` tokens of a slot."""
        first = len(self.prompt) + slot * self.settings.slot_size
        return range(first, first + count)

    def _query(self, drafts: list[_Draft], runs: list[int], starts: list[int]) -> Query:
        """A verifying forward: every token's target is the next one of its own slot."""
        tokens = [token for draft in drafts for token in draft.tokens]
        positions = [p for draft in drafts for p in self._positions(draft.slot, len(draft.tokens))]
        targets = [token for draft in drafts for token in [*draft.tokens[1:], NO_TARGET]]
        return Query(tokens, positions, runs, starts, targets)

    def _judge(self, drafts: list[_Draft], seen: Prediction) -> None:
        """Extend the accepted prefixes by what a verifying forward over exactly these drafts says."""
        row = 0
        for draft in drafts:
            count = len(draft.tokens)
            draft.predicted = seen.tokens[row : row + count]
            accepted = draft.accepted
            while accepted < count and seen.targets[row + accepted - 1] > self.settings.token_threshold:
                accepted += 1
            self._accept(draft, accepted)
            last = row + len(draft.tokens) - 1
            draft.following = (seen.tokens[last], seen.probabilities[last])
            row += count

    def _replace(self, draft: _Draft, tokens: list[int]) -> None:
        """Put `tokens` behind the accepted prefix; the first of them is thereby accepted."""
        draft.tokens = draft.tokens[: draft.accepted] + tokens
        self._accept(draft, draft.accepted + 1)

    def _accept(self, draft: _Draft, count: int) -> None:
        """Accept the first `count` tokens; an end token among them ends the slot there."""
        for index in range(count):
            if draft.tokens[index] in self.settings.end_ids:
                draft.tokens = draft.tokens[: index + 1]
                count = index + 1
                break
        draft.accepted = count

    def _ended(self, draft: _Draft) -> bool:
        return draft.tokens[draft.accepted - 1] in self.settings.end_ids

    def _until_end(self, drafts: list[_Draft]) -> list[_Draft]:
        """Make the accepted tokens of `drafts` final; returns those that do not begin behind an end token."""
        for draft in drafts:
            self._show(draft)
        kept = self._before_end(draft.slot for draft in drafts)
        return drafts[: len(kept)]

    def _show(self, draft: _Draft) -> None:
        """Write the accepted tokens into the response."""
        first = draft.slot * self.settings.slot_size
        self.tokens[first : first + draft.accepted] = draft.tokens[: draft.accepted]
        if self._ended(draft):
            end = first + draft.accepted - 1
            self.end = end if self.end is None else min(self.end, end)

    def _before_end(self, slots: Iterable[int]) -> list[int]:
        """Those slots that do not begin behind the earliest end token."""
        return [slot for slot in slots if self.end is None or slot * self.settings.slot_size <= self.end]

    def _commit(self, run: list[_Draft]) -> None:
        """Keep these slots: their keys are the first scratch places, in this order."""
        self.cache.commit(sum(len(draft.tokens) for draft in run))
        for draft in run:
            assert draft.whole and draft.following is not None, "only whole, seen slots can be committed"
            self._show(draft)
            if self.settings.first_from_ar:
                self._ahead[draft.slot + 1] = draft.following


class LeftToRightDecoder:
    """One token after the other with a cache: what any causal language model does."""

    def __init__(self, prompt: list[int], settings: Settings, cache: Cache) -> None:
        if not prompt:
            raise ValueError("decoding left to right needs a prompt of at least one token, for example the begin token")
        self.prompt = prompt
        self.settings = settings
        self.cache = cache
        self.tokens = [settings.mask_id] * settings.region
        self.end: int | None = None

    def steps(self) -> Steps:
        """Yield one forward for each token; the first is the prompt's."""
        count = len(self.prompt)
        seen = yield Query(self.prompt, list(range(count)), wanted=[count - 1])
        self.cache.commit(count)
        for offset in range(self.settings.region):
            token = seen.tokens[0]
            self.tokens[offset] = token
            if token in self.settings.end_ids:
                self.end = offset
                return
            if offset + 1 < self.settings.region:
                seen = yield Query([token], [count + offset])
                self.cache.commit(1)


class DiffusionDecoder:
    """Masked diffusion with low-confidence remasking, block by block, as in LLaDA (arXiv 2502.09992).

    Attention is bidirectional, so nothing can be cached: every forward reads the prompt and the whole region. When
    an end token is decided the region ends there, as documents do in training.
    """

    def __init__(self, prompt: list[int], settings: Settings, cache: Cache) -> None:
        self.prompt = prompt
        self.settings = settings
        self.tokens = [settings.mask_id] * settings.region
        self.end: int | None = None

    def steps(self) -> Steps:
        """Yield the forwards; each decides the surest masked tokens of the current block."""
        block = self.settings.region // self.settings.num_blocks
        forwards = (self.settings.steps or self.settings.region) // self.settings.num_blocks
        for first in range(0, self.settings.region, block):
            for step in range(forwards):
                masked = self._masked(first, first + block)
                if not masked:
                    break
                # The first forwards decide one more where the block does not divide evenly.
                count = block // forwards + (step < block % forwards)
                yield from self._decide(masked, count)

    def _masked(self, first: int, stop: int) -> list[int]:
        """Offsets of a block that are undecided and not behind the end token."""
        stop = stop if self.end is None else min(stop, self.end)
        return [offset for offset in range(first, stop) if self.tokens[offset] == self.settings.mask_id]

    def _decide(self, masked: list[int], count: int) -> Steps:
        region = self.tokens if self.end is None else self.tokens[: self.end + 1]
        before = len(self.prompt)
        length = before + len(region)
        wanted = [before + offset for offset in masked]
        seen = yield Query([*self.prompt, *region], list(range(length)), wanted=wanted, bidirectional=True)
        # Confidences as whole multiples of EQUAL: sorting is stable, so the first among equals wins.
        surest = sorted(range(len(masked)), key=lambda row: -round(seen.probabilities[row] / EQUAL))[:count]
        for row in surest:
            self.tokens[masked[row]] = seen.tokens[row]
            if seen.tokens[row] in self.settings.end_ids:
                self.end = masked[row] if self.end is None else min(self.end, masked[row])


DECODERS = {"plan_and_infill": SlotDecoder, "left_to_right": LeftToRightDecoder, "mdm": DiffusionDecoder}


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value} is not one of {', '.join(allowed)}")
