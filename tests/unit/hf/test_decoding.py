"""The decoders' logic without a model: scripted predictions, and properties under random ones."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion_train.hf.cache import Query
from refusion_train.hf.decoding import Prediction, Rows, SlotDecoder
from refusion_train.hf.runner import DECODERS
from refusion_train.hf.settings import Settings

MASK, END, PROMPT = 99, 80, [50, 51, 52]


class FakeCache:
    """Counts what is committed, and notes what is moved."""

    length = 0

    def __init__(self) -> None:
        self.moves: list[tuple[int, int, int]] = []

    def commit(self, count: int) -> None:
        assert count >= 0, "a commit of less than nothing"
        self.length += count

    def move(self, start: int, to: int, count: int) -> None:
        assert start > to >= 0 < count, "keys move forward, over what was held back"
        self.moves.append((start, to, count))


def _drive(decoder, answer: Callable[[Query], Prediction]) -> list[Query]:
    """Run a decoder on `answer`; returns the queries. Further rows of a query are asked for as a query of them."""
    queries: list[Query] = []
    steps = decoder.steps()
    try:
        asked = next(steps)
        while True:
            if isinstance(asked, Rows):
                asked = dataclasses.replace(queries[-1], wanted=asked.wanted)
            else:
                queries.append(asked)
            asked = steps.send(answer(asked))
    except StopIteration:
        return queries


def _answer(
    query: Query, draft: Callable[[int], tuple[int, float]], verify: Callable[[int, int], float],
    after: Callable[[int], int] = lambda position: 60,
) -> Prediction:  # fmt: skip
    """Scripted model. draft(position): token and confidence at a mask; verify(position of a token, next token): its
    left-to-right probability; after(position): the left-to-right prediction behind the token there."""
    tokens, sure, targets = [], [], []
    rows = range(len(query.tokens)) if query.wanted is None else query.wanted
    for row in rows:
        position = query.positions[row]
        token, probability = draft(position) if query.tokens[row] == MASK else (after(position), 0.01)
        tokens.append(token)
        sure.append(probability)
        target = query.targets[row] if query.targets else -1
        targets.append(verify(position, target) if target >= 0 else 0.0)
    return Prediction(tokens, sure, targets)


def _decode(
    new: int, draft, verify, after=lambda position: 60, **options
) -> tuple[SlotDecoder, list[Query], FakeCache]:
    options.setdefault("join_slots", False)
    cache = FakeCache()
    values = Settings(mask_id=MASK, end_ids=(END,), max_new_tokens=new, slot_size=4, **options)
    values.validate()
    decoder = SlotDecoder(PROMPT, values, cache)
    queries = _drive(decoder, lambda query: _answer(query, draft, verify, after))
    return decoder, queries, cache


def test_everything_sure_and_accepted_takes_one_plan_and_one_pass() -> None:
    decoder, queries, cache = _decode(12, lambda p: (p, 0.95), lambda p, t: 0.9)
    assert decoder.tokens == list(range(3, 15))
    # The first plan is one forward with the prompt.
    assert [len(q.tokens) for q in queries] == [15, 12]
    assert cache.length == 15


def test_only_the_leading_run_is_kept_and_the_rest_is_planned_again() -> None:
    # The slot at 7..10 is rejected at its second token; the one behind it is accepted but not kept.
    _, queries, cache = _decode(12, lambda p: (p, 0.95), lambda p, t: 0.1 if p == 7 and t == 8 else 0.9)
    assert queries[1].positions == list(range(3, 15))
    assert queries[2].positions == list(range(7, 15)) and set(queries[2].tokens) == {MASK}
    # Then the rejected slot leads: infill of both, side by side behind the same prefix.
    # The accepted token of the leading one has its keys already.
    assert (queries[4].runs, queries[4].starts, queries[4].origins) == ([3, 4], [1, 4], [0, 4])
    assert cache.length == 15


def test_correction_ar_takes_the_prediction_that_rejected() -> None:
    decoder, queries, _ = _decode(
        4, lambda p: (p, 0.95), lambda p, t: 0.9 if t in (4, 70, 71) else 0.1, after=lambda p: 70 if p == 4 else 71
    )
    assert decoder.tokens == [3, 4, 70, 71]
    assert [q.tokens for q in queries[1:]] == [[3, 4, 5, 6], [70, 71]]
    assert (queries[2].starts, queries[2].origins, queries[2].positions) == ([2], [0], [5, 6])


def test_neighbouring_slots_are_one_run_in_which_first_tokens_are_judged_too() -> None:
    # The first token of the second slot (position 7) is refused and replaced; all else stands.
    decoder, queries, cache = _decode(
        12, lambda p: (p, 0.95), lambda p, t: 0.1 if (p, t) == (6, 7) else 0.9,
        after=lambda p: p + (91 if p == 6 else 1), join_slots=True,
    )  # fmt: skip
    assert decoder.tokens == [3, 4, 5, 6, 97, *range(8, 15)]
    assert [len(q.tokens) for q in queries] == [15, 12, 8], "a plan, a pass, and what stands behind the correction"
    assert (queries[2].starts, queries[2].origins, cache.length, cache.moves) == ([4], [0], 15, [])


def test_a_run_that_gains_little_is_planned_again_behind_its_whole_slots() -> None:
    # From position 8 on every token is refused: each round brings one.
    _, queries, _ = _decode(
        12, lambda p: (p, 0.95), lambda p, t: 0.9 if t < 8 else 0.1, after=lambda p: p + 1, join_slots=True
    )
    assert queries[2].positions == list(range(8, 15)), "a round, which brings a single token"
    assert queries[3].positions == list(range(7, 15)) and set(queries[3].tokens) == {MASK}
    rounds = queries[5:8]  # no whole slot is there to stop at: this one is completed
    assert [q.positions[0] for q in rounds] == [8, 9, 10]
    assert queries[8].positions == list(range(11, 15)) and set(queries[8].tokens) == {MASK}


def test_what_an_unsure_token_depends_on_is_waited_for() -> None:
    # Slots 2, 3 and 5 are chosen, and 0 as the first. 0 needs a round; 2 is right, but in 3 (from position 15 on)
    # something is less sure than is asked of a run that something is missing before: it waits, and the keys of 5 move
    # to the place behind those of 2.
    def draft(position: int) -> tuple[int, float]:
        return position, 0.95 if (position - 3) // 4 in (2, 3, 5) else 0.1

    def verify(position: int, token: int) -> float:
        return {5: 0.1, 17: 0.6}.get(token, 0.95)

    decoder, queries, cache = _decode(24, draft, verify, after=lambda p: 70 if p == 4 else p + 1, join_slots=True)
    infill = queries[2]
    assert (infill.runs, infill.starts) == ([2, 8, 4], [2, 4, 12])
    assert cache.moves[0] == (12, 8, 4)
    assert queries[3].positions == [*range(7, 11), *range(15, 19), *range(19, 23)], "1, 3 and 4 are planned next"
    assert decoder.tokens[:3] == [3, 4, 70] and cache.length == 27


def test_a_refused_end_token_leaves_no_slot_unfinished() -> None:
    # The end token is first in its slot (position 11), which is judged as the last of a run of three.
    decoder, _, cache = _decode(
        12, lambda p: (END if p == 11 else p, 0.95), lambda p, t: 0.1 if t == END else 0.95,
        after=lambda p: p + 1, join_slots=True,
    )  # fmt: skip
    assert decoder.tokens == list(range(3, 15)) and decoder.end is None and cache.length == 15


def test_an_end_token_accepted_behind_a_wrong_draft_is_judged_again() -> None:
    # Slots 0 and 2 are chosen, 1 is not. 2 ends at position 12 while the first draft of 0 stands before it; behind
    # the committed tokens alone its end token is refused.
    queries: list[Query] = []

    def answer(query: Query) -> Prediction:
        queries.append(query)

        def verify(position: int, token: int) -> float:
            return {5: 0.1, END: 0.95 if len(query.runs) == 1 else 0.1}.get(token, 0.95)

        def draft(position: int) -> tuple[int, float]:
            return END if position == 12 else position, 0.1 if 7 <= position < 11 else 0.95

        seen = _answer(query, draft, verify, lambda p: 70 if p == 4 else p + 1)
        seen.probabilities = [0.95 if query.targets else p for p in seen.probabilities]
        return seen

    decoder = SlotDecoder(PROMPT, Settings(mask_id=MASK, end_ids=(END,), max_new_tokens=12, slot_size=4), FakeCache())
    _drive(decoder, answer)
    assert len(next(query for query in queries if len(query.runs) == 2).tokens) == 2 + 4, "a place for every token of 2"
    assert decoder.tokens == [3, 4, 70, *range(6, 15)] and decoder.end is None


def test_a_slot_committed_too_early_is_looked_at_again_by_what_follows_it() -> None:
    # Slot 1 waits while 0 and 2 are committed; when 3 is the first left, what 2 predicts behind it is asked for anew.
    looks = {14: 0}

    def after(position: int) -> int:
        looks[position] = looks.get(position, 0) + 1
        return 90 if position == 14 and looks[14] > 1 else position + 1

    decoder, queries, _ = _decode(
        16, lambda p: (p, 0.95 if p in (3, 11) else 0.005), lambda p, t: 0.95, after=after, join_slots=True
    )
    assert queries[1].positions == [*range(3, 7), *range(11, 15)], "0 and 2"
    assert queries[2].positions == [*range(7, 11), *range(15, 19)], "1 and 3; 2 is not looked at: 1 is before it"
    plan = queries[4]
    assert (plan.runs, plan.starts, plan.origins) == ([4, 4], [0, 4], [0, 4])
    assert plan.tokens == [MASK] * 4 + [11, 12, 13, 14] and plan.positions == [*range(15, 19), *range(11, 15)]
    assert decoder.tokens == [*range(3, 15), 90, 16, 17, 18]


def test_the_first_slot_goes_on_where_no_slot_is_sure() -> None:
    # Slot 2 is the best, but not sure: the first is taken, which knows all that is before it.
    _, queries, _ = _decode(
        12, lambda p: (p, 0.5 if p == 11 else 0.1), lambda p, t: 0.95, after=lambda p: p + 1, join_slots=True
    )
    assert queries[1].positions == [3, 4, 5, 6]


def test_redraft_keeps_the_accepted_prefix_and_masks_the_rest() -> None:
    decoder, queries, _ = _decode(4, lambda p: (p, 0.95), lambda p, t: 0.9 if t == 4 else 0.1, correction="redraft")
    assert decoder.tokens == [3, 4, 5, 6]
    # What is accepted has its keys and is not run again.
    assert [q.tokens for q in queries[1:]] == [[3, 4, 5, 6], [MASK, MASK], [5, 6], [MASK], [6]]


def test_first_token_from_the_left_when_it_is_surer() -> None:
    sure = {"left": 0.5}

    def answer(query: Query) -> Prediction:
        seen = _answer(query, lambda p: (p, 0.2), lambda p, t: 0.9)
        rows = range(len(query.tokens)) if query.wanted is None else query.wanted
        for index, row in enumerate(rows):
            if query.tokens[row] != MASK:
                seen.probabilities[index] = sure["left"]
        return seen

    for left, first in ((0.5, 60), (0.1, 3)):
        sure["left"] = left
        for allowed in (True, False):
            values = Settings(mask_id=MASK, max_new_tokens=4, slot_size=4, first_from_ar=allowed)
            decoder = SlotDecoder(PROMPT, values, FakeCache())
            _drive(decoder, answer)
            assert decoder.tokens[0] == (first if allowed else 3)


def test_exact_kv_adds_one_pass_over_slots_completed_side_by_side() -> None:
    plain = _decode(8, lambda p: (p, 0.95), lambda p, t: 0.1)[1]
    exact = _decode(8, lambda p: (p, 0.95), lambda p, t: 0.1, exact_kv=True)[1]
    assert len(exact) == len(plain) + 1
    assert exact[-1].runs == [8]


def test_text_behind_the_earliest_end_is_not_generated_but_slots_before_it_are() -> None:
    # The second slot is surest and holds the end token at its second place; the first is unsure, the third surer.
    confidence = {3: 0.3, 7: 0.6, 11: 0.5}
    decoder, queries, cache = _decode(
        12, lambda p: (END if p == 8 else p, confidence.get(p, 0.9)), lambda p, t: 0.9, slot_threshold=0.9
    )
    assert decoder.end == 5
    assert decoder.tokens[:6] == [3, 4, 5, 6, 7, END]
    assert decoder.tokens[6:] == [MASK] * 6
    planned = [
        [p for t, p in zip(q.tokens, q.positions, strict=True) if t == MASK] for q in queries if MASK in q.tokens
    ]
    assert planned == [list(range(3, 15)), list(range(3, 7))]
    # The prompt, the cut slot (two tokens), then the slot before it.
    assert cache.length == 3 + 2 + 4


def test_later_blocks_are_not_begun_behind_an_end() -> None:
    decoder, queries, _ = _decode(8, lambda p: (END if p == 6 else p, 0.95), lambda p, t: 0.9, num_blocks=2)
    assert decoder.end == 3
    assert max(max(q.positions) for q in queries) == 6


def test_an_end_token_that_is_not_accepted_ends_nothing() -> None:
    decoder, _, _ = _decode(
        4, lambda p: (END if p == 5 else p, 0.95), lambda p, t: 0.1 if t == END else 0.9, after=lambda p: 60
    )
    assert decoder.end is None
    assert END not in decoder.tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 12, "slot_size": 4, "num_blocks": 2}, ["num_blocks=2", "slot_size=4", "multiple of 8"]),
        ({"decoding": "slot"}, ["decoding=slot", "plan_and_infill"]),
        ({"correction": "none"}, ["correction=none", "redraft"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0"]),
        ({"slot_size": 0}, ["slot_size=0"]),
        ({"top_p": 0.0}, ["top_p=0.0"]),
        ({"temperature": -1.0}, ["temperature=-1.0"]),
        ({"slot_threshold": float("nan")}, ["slot_threshold=nan"]),
        ({"token_threshold": 1.5}, ["token_threshold=1.5"]),
        ({"slot_size": 2.5}, ["slot_size=2.5"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"decoding": "mdm", "steps": 8, "confidence_threshold": 0.9}, ["steps=8", "confidence_threshold=0.9"]),
        ({"decoding": "mdm", "max_new_tokens": 10, "num_blocks": 3}, ["num_blocks=3"]),
        ({"decoding": "mdm", "max_new_tokens": 12, "num_blocks": 3, "steps": 4}, ["steps=4"]),
        ({"decoding": "mdm", "max_new_tokens": 12, "num_blocks": 3, "steps": 15}, ["steps=15"]),
    ],
)
def test_what_cannot_work_is_refused(options: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Settings(mask_id=MASK, **options).validate()
    for word in words:
        assert word in str(caught.value)


def test_the_region_is_rounded_up_to_whole_slots() -> None:
    assert Settings(mask_id=MASK, max_new_tokens=9, slot_size=4).region == 12
    assert Settings(mask_id=MASK, max_new_tokens=9, slot_size=4, decoding="left_to_right").region == 9


@st.composite
def _options(draw) -> Settings:
    decoding = draw(st.sampled_from(["plan_and_infill", "plan_and_infill", "left_to_right", "mdm"]))
    size, blocks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    region = size * blocks * slots
    shorter = draw(st.integers(0, size - 1)) if decoding == "plan_and_infill" else 0
    return Settings(
        mask_id=MASK, end_ids=draw(st.sampled_from([(), (7,), (7, 8)])), decoding=decoding,
        max_new_tokens=region - shorter, slot_size=size, num_blocks=blocks,
        slot_threshold=draw(st.floats(0, 1)), token_threshold=draw(st.floats(0, 1)),
        correction=draw(st.sampled_from(["ar", "redraft"])), exact_kv=draw(st.booleans()),
        first_from_ar=draw(st.booleans()), join_slots=draw(st.booleans()),
        **draw(st.sampled_from([{}, {"steps": blocks}, {"confidence_threshold": 0.5}])),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(_options(), st.integers(0, 2**32), st.integers(1, 6))
def test_under_random_predictions(values: Settings, seed: int, prompt: int) -> None:
    """No token lost, doubled or left masked; positions a permutation; an end cuts; the work is bounded."""
    values.validate()
    rng = random.Random(seed)
    cache = FakeCache()
    decoder = DECODERS[values.decoding]([50] * prompt, values, cache)
    decided: dict[int, int] = {}

    def answer(query: Query) -> Prediction:
        assert len(query.tokens) == len(query.positions) == sum(query.runs)
        assert len(set(query.positions)) == len(query.positions), "a position twice in one forward"
        assert max(query.positions) < prompt + values.region
        spans = sorted(zip(query.starts, query.runs, strict=True))
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans)), "runs overlap"
        for offset, token in enumerate(decoder.tokens):
            if token != MASK:
                assert decided.setdefault(offset, token) == token, "a decided token changed"
        count = len(query.tokens) if query.wanted is None else len(query.wanted)
        return Prediction(
            [rng.randrange(20) for _ in range(count)], [rng.random() for _ in range(count)],
            [rng.random() for _ in range(count)],
        )  # fmt: skip

    queries = _drive(decoder, answer)
    stop = values.region if decoder.end is None else decoder.end + 1
    assert MASK not in decoder.tokens[:stop]
    assert (decoder.end is None) == (not set(decoder.tokens[:stop]) & set(values.end_ids))
    if decoder.end is not None:
        assert set(decoder.tokens[: stop - 1]).isdisjoint(values.end_ids), "not the earliest end token"
    assert all(token < 20 for token in decoder.tokens[:stop])
    if values.decoding == "plan_and_infill":
        slots = values.region // values.slot_size
        assert stop <= cache.length - prompt <= values.region
        assert len(queries) <= slots * (3 + 2 * values.slot_size)
