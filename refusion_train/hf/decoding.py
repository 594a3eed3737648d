"""Turning a prompt into a response by slots: plan, verify, infill; and what every decoder is given and gives.

A decoder is a generator that knows tokens and slots but no model: it yields a `Query` (what to run through the
model) or `Rows` (more of what the last forward says), is sent a `Prediction`, and keeps or drops keys through
`cache.commit`. So the logic is testable without a model, every forward is counted at one place (runner.decode),
and several sequences are advanced in step.

Source: arXiv 2512.13586, section 3, with the corrections described in the documentation of the objective.
This file is copied into every exported folder: it imports nothing but its neighbours.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .cache import NO_TARGET, Query
from .settings import Settings

# Confidences that differ by less are equal.
EQUAL = 1e-6
# Tokens that a round of corrections must bring to be worth more than planning anew, which costs two forwards.
_WORTH = 3


@dataclass
class Rows:
    """Rows of the last query whose prediction is wanted too: they cost the head, and no forward."""

    wanted: list[int]


@dataclass
class Prediction:
    """What the model says at the wanted rows of a query; plain lists, one transfer from the device."""

    tokens: list[int]  # argmax (or a sample) without the mask token
    probabilities: list[float]  # of these tokens; 0 if the query did not ask
    targets: list[float]  # probabilities of the query's targets; 0 where none was given


@dataclass
class Note:
    """What the answer to a forward did to a slot, for one who watches.

    what:        candidate (planned, but must wait), planned, judged, corrected, redrawn, drafted (its tokens are new
                 because something before it was corrected), committed
    tokens:      of the slot as far as they are drafted; the first `accepted` of them are final
    confidences: candidate, planned: of the first token; judged: of each token, 0 where it was not asked for
    """

    what: str
    slot: int
    tokens: list[int]
    accepted: int
    confidences: list[float] = field(default_factory=list)


Steps = Generator[Query | Rows, Prediction, None]


class Cache(Protocol):
    """The part of the cache that decoders use."""

    def commit(self, count: int) -> None: ...

    def move(self, start: int, to: int, count: int) -> None: ...


class Decoder(Protocol):
    """A sequence being decoded: `tokens` of the response region hold the mask id where nothing is decided."""

    tokens: list[int]
    end: int | None

    def steps(self) -> Steps: ...


@dataclass
class _Draft:
    """The tokens of a run of neighbouring chosen slots (of one slot, unless joined); the first `accepted` are final."""

    slot: int  # the first
    tokens: list[int]
    accepted: int = 1
    # Nothing is missing before it: its left-to-right predictions know all that they depend on.
    complete: bool = True
    # How many tokens the last verifying forward has accepted.
    gained: int = 0
    # Infill: scratch place of its first token, and how many leading tokens have their right keys there already.
    place: int = 0
    kept: int = 0
    # The prediction (token, probability) after each token, of the last forward that it took part in.
    after: list[tuple[int, float]] = field(default_factory=list)
    # Infill: a forward of this run alone has seen the final tokens, so that its keys are right.
    seen: bool = False

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
        # Slots of which that prediction was made while something before was missing.
        self._outdated: set[int] = set()
        # What happened since somebody last took it from here; None: nobody watches.
        self.notes: list[Note] | None = None

    def steps(self) -> Steps:
        """Yield the forwards of the whole response; afterwards `tokens` is decided up to `end`."""
        settings = self.settings
        per_block = settings.region // settings.slot_size // settings.num_blocks
        prompt = self.prompt
        for block in range(settings.num_blocks):
            pool = self._before_end(range(block * per_block, (block + 1) * per_block))
            while pool:
                drafts = yield from self._plan(pool, prompt)
                prompt = []
                run = yield from self._verify(drafts)
                if not run:
                    run = yield from self._infill(drafts)
                self._commit(run)
                done = {slot for draft in run for slot in self._slots(draft)}
                pool = self._before_end(slot for slot in pool if slot not in done)

    def _plan(self, pool: list[int], prompt: list[int]) -> Generator[Query | Rows, Prediction, list[_Draft]]:
        """Choose slots of the pool by their first tokens, and draft them from masks; in position order.

        prompt: what is not committed yet, of the first plan; the masks stand behind it in the same forward.
        """
        size, before, mask = self.settings.slot_size, len(prompt), self.settings.mask_id
        positions = [position for slot in pool for position in self._positions(slot)]
        firsts = list(range(before, before + len(positions), size))
        # The rows of the prompt's last token and of every slot's first: the head is large, and most slots must wait.
        ahead = [before - 1] if prompt and self.settings.first_from_ar else []
        query = Query([*prompt, *([mask] * len(positions))], [*range(before), *positions], wanted=ahead + firsts)
        again = self.settings.joined and pool[0] in self._outdated
        if again:
            # The slot before the first one once more, beside the masks: now nothing before it is missing.
            count, before_it = len(query.tokens), slice((pool[0] - 1) * size, pool[0] * size)
            query = Query(
                query.tokens + self.tokens[before_it], [*query.positions, *self._positions(pool[0] - 1)],
                [count, size], [0, count], wanted=[*firsts, count + size - 1],
            )  # fmt: skip
        seen = yield query
        self.cache.commit(before)
        if ahead:
            self._ahead[0] = (seen.tokens[0], seen.probabilities[0])
        if again:
            self._ahead[pool[0]] = (seen.tokens.pop(), seen.probabilities.pop())
            self._outdated.remove(pool[0])
        best = list(zip(seen.tokens[len(ahead) :], seen.probabilities[len(ahead) :], strict=True))
        for row, slot in enumerate(pool):
            if slot in self._ahead and self._ahead[slot][1] > best[row][1]:
                best[row] = self._ahead[slot]
        chosen = self._choose([probability for _, probability in best])
        if self.settings.joined and chosen[0] != 0:
            # The first slot follows what is committed: as plain left-to-right decoding it can always go on.
            chosen = [0, *chosen] if best[chosen[0]][1] > self.settings.slot_threshold else [0]
        for count, row in enumerate(chosen, 1):
            if best[row][0] in self.settings.end_ids:
                # Whatever becomes of this slot, those behind its end token are not kept in this iteration.
                chosen = chosen[:count]
        rest = [firsts[row] + index for row in chosen for index in range(1, size)]
        drafted = (yield Rows(rest)).tokens if rest else []
        drafts = [
            _Draft(pool[row], [best[row][0], *drafted[number * (size - 1) : (number + 1) * (size - 1)]])
            for number, row in enumerate(chosen)
        ]
        if self.notes is not None:
            waiting = [row for row in range(len(pool)) if row not in chosen]
            self.notes += [Note("candidate", pool[row], [best[row][0]], 0, [best[row][1]]) for row in waiting]
            self.notes += [
                Note("planned", draft.slot, draft.tokens, draft.accepted, [best[row][1]])
                for draft, row in zip(drafts, chosen, strict=True)
            ]
        # Only now: an end token that is first in a slot but not in its run is judged, and may be wrong.
        drafts = self._join(drafts) if self.settings.joined else drafts
        for draft in drafts:
            self._accept(draft, 1)
        return drafts

    def _join(self, drafts: list[_Draft]) -> list[_Draft]:
        """Drafts of neighbouring slots as one; of these only the very first token is accepted without judgement."""
        runs = drafts[:1]
        for draft in drafts[1:]:
            if draft.slot * self.settings.slot_size == runs[-1].slot * self.settings.slot_size + len(runs[-1].tokens):
                runs[-1].tokens = runs[-1].tokens + draft.tokens
            else:
                runs.append(draft)
                draft.complete = False
        return runs

    def _choose(self, sure: list[float]) -> list[int]:
        """Numbers of the slots with these confidences that are to be drafted."""
        chosen = [row for row, value in enumerate(sure) if value > self.settings.slot_threshold]
        # The first among equals: without a prompt all slots look alike, and rounding must not choose.
        return chosen or [next(row for row, value in enumerate(sure) if value >= max(sure) - EQUAL)]

    def _verify(self, drafts: list[_Draft]) -> Generator[Query | Rows, Prediction, list[_Draft]]:
        """One causal pass over all drafts; returns the leading run of wholly accepted ones (may be empty)."""
        planned = [draft.tokens for draft in drafts]
        self._judge(drafts, (yield self._together(drafts)))
        run: list[_Draft] = []
        for draft in drafts:
            if not draft.whole:
                break
            run.append(draft)
            if self._ended(draft):
                break
        if self.settings.joined and not run:
            # What was accepted behind drafts that may be wrong is judged again, an end token and what it cut off too.
            for draft, tokens in zip(drafts[1:], planned[1:], strict=True):
                draft.tokens, draft.accepted = tokens, 1
        return run

    def _infill(self, drafts: list[_Draft]) -> Generator[Query | Rows, Prediction, list[_Draft]]:
        """Complete all drafts side by side, each behind the committed cache only; returns those up to the end token.

        A slot is done when a forward has seen its final tokens. Every draft keeps its own scratch places in every
        round, so that the keys of an accepted prefix are not computed again.
        """
        # The first draft has seen itself only in the verifying pass, as it will here.
        drafts[0].kept = drafts[0].accepted
        while True:
            if self.settings.joined:
                drafts = self._hold_back(drafts)
            drafts = self._until_end(drafts)
            rejected = [draft for draft in drafts if not draft.whole and (draft.kept or not self.settings.joined)]
            if self.settings.correction == "ar":
                for draft in rejected:
                    self._replace(draft, [token for token, _ in draft.after[draft.accepted - 1 : -1]])
            elif rejected:
                yield from self._redraft(rejected)
            drafts = self._until_end(drafts)
            unseen = [draft for draft in drafts if not draft.seen]
            if not unseen:
                break
            self._judge(unseen, (yield self._apart(unseen)))
            for draft in unseen:
                draft.seen, draft.kept = draft.whole, draft.accepted
        if self.settings.exact_kv and len(drafts) > 1:  # a single one has seen what it would see again
            for draft in drafts:
                draft.kept = 0
            self._judge(drafts, (yield self._together(drafts)))
        return drafts

    def _hold_back(self, drafts: list[_Draft]) -> list[_Draft]:
        """Cut runs to their whole slots where going on does not pay; what is cut off waits for another plan.

        The first run stops when a round brought little. The others stop where the left-to-right prediction is unsure,
        as what decides there may stand in a slot before them that is not known yet.
        """
        size, left = self.settings.slot_size, []
        for draft in drafts:
            if draft.kept and not draft.whole:
                whole = draft.accepted // size * size
                little = whole > 0 and draft.gained + 1 < _WORTH
                unsure = draft.after[draft.accepted - 1][1] <= self._threshold(draft)
                if little if draft.complete else unsure:
                    draft.tokens, draft.after, draft.accepted = draft.tokens[:whole], draft.after[:whole], whole
                    draft.seen = True  # as far as it was kept, and so are all whole slots
            if draft.tokens:
                left.append(draft)
        return left

    def _redraft(self, drafts: list[_Draft]) -> Steps:
        """Predict the rest of each slot from masks behind its accepted prefix; the first of these is accepted."""
        mask, size = self.settings.mask_id, self.settings.slot_size
        rows = [d.tokens[d.kept : d.accepted] + [mask] * (size - d.accepted) for d in drafts]
        query = self._side_by_side(drafts, rows)
        query.wanted, first = [], 0
        for draft, row in zip(drafts, rows, strict=True):
            query.wanted += range(first + draft.accepted - draft.kept, first + len(row))
            first += len(row)
        seen, row = (yield query), 0
        for draft in drafts:
            draft.kept = draft.accepted
            count = size - draft.accepted
            self._replace(draft, seen.tokens[row : row + count])
            row += count

    def _slots(self, draft: _Draft) -> range:
        """The slots of a draft."""
        return range(draft.slot, draft.slot + -(-len(draft.tokens) // self.settings.slot_size))

    def _positions(self, slot: int, count: int | None = None) -> range:
        """Positions in the document of the first `count` tokens from a slot on (default: those of the slot)."""
        first = len(self.prompt) + slot * self.settings.slot_size
        return range(first, first + (self.settings.slot_size if count is None else count))

    def _together(self, drafts: list[_Draft]) -> Query:
        """A verifying forward in which every draft sees those before it; a token's target is the next of its slot."""
        place = 0
        for draft in drafts:
            draft.place, place = place, place + len(draft.tokens)
        tokens = [token for draft in drafts for token in draft.tokens]
        positions = [p for d in drafts for p in self._positions(d.slot, len(d.tokens))]
        return Query(tokens, positions, targets=self._targets(drafts))

    def _apart(self, drafts: list[_Draft]) -> Query:
        """A verifying forward of what is not kept of each draft, each behind its own kept tokens only."""
        query = self._side_by_side(drafts, [draft.tokens[draft.kept :] for draft in drafts])
        query.targets = self._targets(drafts)
        return query

    def _targets(self, drafts: list[_Draft]) -> list[int]:
        return [token for draft in drafts for token in [*draft.tokens[draft.kept + 1 :], NO_TARGET]]

    def _side_by_side(self, drafts: list[_Draft], rows: list[list[int]]) -> Query:
        """`rows` of tokens behind the kept tokens of each draft."""
        positions = [
            position
            for draft, row in zip(drafts, rows, strict=True)
            for position in self._positions(draft.slot, draft.kept + len(row))[draft.kept :]
        ]
        starts, origins = [draft.place + draft.kept for draft in drafts], [draft.place for draft in drafts]
        return Query([token for row in rows for token in row], positions, [len(row) for row in rows], starts, origins)

    def _judge(self, drafts: list[_Draft], seen: Prediction) -> None:
        """Extend the accepted prefixes by what a verifying forward over what is not kept of these drafts says."""
        row = 0
        for draft in drafts:
            count = len(draft.tokens)
            before = row - draft.kept  # row of a token is this and its place in the slot
            part = slice(row, before + count)
            draft.after[draft.kept :] = zip(seen.tokens[part], seen.probabilities[part], strict=True)
            accepted, threshold = draft.accepted, self._threshold(draft)
            while accepted < count and seen.targets[before + accepted - 1] > threshold:
                accepted += 1
            draft.gained = accepted - draft.accepted
            self._accept(draft, accepted)
            if self.notes is not None:
                sure = [0.0] * (draft.kept + 1) + seen.targets[row : before + count - 1]
                self._note("judged", draft, sure[:count])
            row = before + count

    def _threshold(self, draft: _Draft) -> float:
        """Left-to-right probability above which a token is accepted: where something before it is missing, as of a
        slot's first token."""
        settings = self.settings
        return settings.token_threshold if draft.complete else max(settings.token_threshold, settings.slot_threshold)

    def _replace(self, draft: _Draft, tokens: list[int]) -> None:
        """Put `tokens` behind the accepted prefix; the first of them is thereby accepted."""
        draft.tokens = draft.tokens[: draft.accepted] + tokens
        self._accept(draft, draft.accepted + 1)
        self._note("corrected" if self.settings.correction == "ar" else "redrawn", draft)

    def _accept(self, draft: _Draft, count: int) -> None:
        """Accept the first `count` tokens; an end token among them ends the slot there."""
        for index in range(count):
            if draft.tokens[index] in self.settings.end_ids:
                draft.tokens, draft.after = draft.tokens[: index + 1], draft.after[: index + 1]
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
        """Write the accepted tokens into the response, as far as they cannot be held back."""
        size = self.settings.slot_size
        first = draft.slot * size
        count = draft.accepted // size * size if self.settings.joined and not draft.whole else draft.accepted
        self.tokens[first : first + count] = draft.tokens[:count]
        if self._ended(draft):
            end = first + draft.accepted - 1
            self.end = end if self.end is None else min(self.end, end)

    def _before_end(self, slots: Iterable[int]) -> list[int]:
        """Those slots that do not begin behind the earliest end token."""
        return [slot for slot in slots if self.end is None or slot * self.settings.slot_size <= self.end]

    def _commit(self, run: list[_Draft]) -> None:
        """Keep these runs: their keys come to stand behind the committed ones, in this order."""
        place = 0
        for draft in run:
            assert draft.whole and draft.after, "only whole, seen slots can be committed"
            if draft.place != place:  # something before it was held back
                self.cache.move(draft.place, place, len(draft.tokens))
            place += len(draft.tokens)
            self._show(draft)
            self._note("committed", draft)
            if self.settings.first_from_ar:
                self._ahead[self._slots(draft).stop] = draft.after[-1]
                if not draft.complete:
                    self._outdated.add(self._slots(draft).stop)
        self.cache.commit(place)

    def _note(self, what: str, draft: _Draft, sure: list[float] | None = None) -> None:
        """Tell those who watch of each slot of a draft."""
        if self.notes is None:
            return
        size, replaced = self.settings.slot_size, what in ("corrected", "redrawn")
        for first in range(0, len(draft.tokens), size):
            if replaced and first + size < draft.accepted:
                continue  # it was accepted before
            tokens = draft.tokens[first : first + size]
            accepted = min(max(draft.accepted - first, 0), len(tokens))
            said = "drafted" if replaced and not accepted else what
            self.notes.append(
                Note(said, draft.slot + first // size, tokens, accepted, (sure or [])[first : first + size])
            )
