"""One forward over parts of several sequences, on top of keys and values that are already there.

Decoding slots needs what transformers' caches and masks do not offer: tokens that stand in another order than
their positions, several continuations of one prefix side by side, keys that are forgotten again, and sequences of
different lengths without padding. So the decoder walks over the model's own layers itself, with a preallocated
cache and masks built here in physical order; transformers never sees the permuted positions (it would take them
for packed sequences).

The tokens of all rows of a batch are laid one behind the other, so that every matrix product is over real tokens
only; they are padded to a rectangle for attention alone.

This file is copied into every exported folder: it imports torch only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Target of a row at which no probability is asked for.
NO_TARGET = -1


@dataclass
class Query:
    """Tokens of one sequence in one forward, in physical order behind the committed cache.

    The tokens may form several runs. A run sees the committed cache and itself (causally), never another run, so
    several slots can be completed side by side over one prefix without copying it. Run r writes its keys at the
    places `starts[r] ...` behind the committed cache, where they stay until they are committed or overwritten. It
    sees what stands from `origins[r]` on: an earlier forward's tokens in front of its own, where that is less.
    """

    tokens: list[int]
    positions: list[int]
    # Lengths of the runs (they add up to len(tokens)), the first place of each and where what it sees begins;
    # default: one run at place 0, and runs that see no earlier forward.
    runs: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    # Token whose probability is asked for at each row of the query, or NO_TARGET. Empty: none at all.
    targets: list[int] = field(default_factory=list)
    # Rows of the query whose prediction is wanted; None: all.
    wanted: list[int] | None = None
    # Whether probabilities are wanted, or the tokens alone.
    sure: bool = True
    # Every token sees every other (masked diffusion); only without a cache.
    bidirectional: bool = False

    def __post_init__(self) -> None:
        if not self.runs:
            self.runs, self.starts = [len(self.tokens)], [0]
        self.origins = self.origins or self.starts
        assert sum(self.runs) == len(self.tokens) == len(self.positions), "runs, tokens and positions differ in length"
        assert not self.targets or len(self.targets) == len(self.tokens), "one target for each row of the query"


class KeyValueCache:
    """Rotated keys and values of some sequences in physical order, for all layers; allocated once.

    The first `rows[r].length` places of row r are committed. The places behind them are scratch: every forward
    writes there and `commit` keeps a leading part of it.
    """

    def __init__(self, model: Any, capacity: int, rows: int = 1) -> None:
        """Room for `rows` times `capacity` tokens of `model` (Qwen3- or Llama-like ...ForCausalLM), in its dtype."""
        first = model.model.layers[0].self_attn
        heads = first.k_proj.out_features // first.head_dim
        weight = first.k_proj.weight
        # A token's keys stand together, so that those of any tokens are written as whole rows. Zeros, not empty: a
        # hidden place has weight 0, and 0 times a leftover NaN would be NaN.
        shape = (len(model.model.layers), 2, rows, capacity, heads, first.head_dim)
        self.storage = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.flat = self.storage.view(shape[0], 2, rows * capacity, heads, first.head_dim)
        self.groups = first.q_proj.out_features // first.k_proj.out_features  # heads that share keys
        self.capacity = capacity
        self.rows = [CacheRow(index, self.storage) for index in range(rows)]

    @property
    def length(self) -> int:
        """Committed tokens of the first row."""
        return self.rows[0].length

    def drop(self, number: int) -> None:
        """Forget row `number`; the last row takes its place, so that the rows in use stay the first ones."""
        last = self.rows.pop()
        if last.index != number:
            self.storage[:, :, number] = self.storage[:, :, last.index]  # scratch too: it may be in use
            last.index, self.rows[number] = number, last

    def write(self, layer: int, keys: Tensor, values: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Put keys and values [tokens, kv_heads, head_dim] at their places; returns those in use of all rows
        [rows, kv_heads, stop, head_dim]."""
        self.flat[layer, 0].index_copy_(0, geometry.places, keys)
        self.flat[layer, 1].index_copy_(0, geometry.places, values)
        used = self.storage[layer, :, : geometry.rows, : geometry.stop].transpose(2, 3)
        return used[0], used[1]


class CacheRow:
    """One sequence's share of a cache: what a decoder is given."""

    def __init__(self, index: int, storage: Tensor) -> None:
        self.index = index
        self.storage = storage  # of all rows; see KeyValueCache
        self.capacity = storage.shape[3]
        self.length = 0

    def move(self, start: int, to: int, count: int) -> None:
        """Put the keys at the scratch places `start` ... at the places `to` ..."""
        places = self.storage[:, :, self.index, self.length :]
        places[:, :, to : to + count] = places[:, :, start : start + count].clone()  # they may overlap

    def commit(self, count: int) -> None:
        """Keep the first `count` scratch places for good."""
        assert count >= 0 and self.length + count <= self.capacity, f"cannot commit {count} places"
        self.length += count


@dataclass
class Geometry:
    """Where the tokens of one forward stand and what they see; the same for every layer."""

    rows: int
    widest: int  # tokens of the longest query
    stop: int  # end of the places in use, of any row
    places: Tensor  # int64 [tokens]: places in the flat cache
    padded: Tensor | None  # int64 [tokens]: places in [rows * widest]; None: nothing is padded
    mask: Tensor | None  # [rows, 1, groups * widest, stop]: added to the scores (see _mix); None: `causal` says all
    causal: bool
    cos: Tensor  # [tokens, 1, head_dim]
    sin: Tensor


def forward(model: Any, cache: KeyValueCache, queries: Sequence[Query]) -> Tensor:
    """Final hidden states [tokens of all queries, hidden], one query for each row of the cache, whose scratch it fills.

    `model` is a Qwen3- or Llama-like ...ForCausalLM of transformers; only its modules are used, not its masks or
    caches. Positions are the true ones, whatever the physical order.
    """
    assert len(queries) == len(cache.rows), "one query for each row of the cache"
    numbers, plan = _plan(queries, cache)
    given = torch.tensor(numbers, device=cache.storage.device)
    hidden = model.model.embed_tokens(given[0])
    cos, sin = model.model.rotary_emb(hidden[None], given[1][None])
    geometry = _geometry(given, plan, cos.transpose(0, 1), sin.transpose(0, 1))
    if geometry.mask is not None:
        geometry.mask = geometry.mask.to(hidden.dtype).repeat(1, 1, cache.groups, 1)
    for index, layer in enumerate(model.model.layers):
        hidden = hidden + _attention(layer.self_attn, layer.input_layernorm(hidden), cache, index, geometry)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.model.norm(hidden)


def _attention(own: Any, hidden: Tensor, cache: KeyValueCache, layer: int, geometry: Geometry) -> Tensor:
    """Attention module `own` of one layer over the cache: [tokens, hidden] to the same."""
    shape = (hidden.shape[0], -1, own.head_dim)
    queries, keys = own.q_proj(hidden).view(shape), own.k_proj(hidden).view(shape)
    if hasattr(own, "q_norm"):
        queries, keys = own.q_norm(queries), own.k_norm(keys)
    queries, keys = _rotate(queries, geometry), _rotate(keys, geometry)
    keys, values = cache.write(layer, keys, own.v_proj(hidden).view(shape), geometry)
    rows, widest = geometry.rows, geometry.widest
    if geometry.padded is not None:
        rectangle = queries.new_zeros(rows * widest, *queries.shape[1:])
        queries = rectangle.index_copy_(0, geometry.padded, queries)
    mixed = _mix(queries.view(rows, widest, *queries.shape[1:]).transpose(1, 2), keys, values, geometry, own.scaling)
    mixed = mixed.transpose(1, 2).reshape(rows * widest, -1)
    return own.o_proj(mixed if geometry.padded is None else mixed[geometry.padded])


def _mix(queries: Tensor, keys: Tensor, values: Tensor, geometry: Geometry, scale: float) -> Tensor:
    """Attention of queries [rows, heads, widest, head_dim] over keys and values with fewer heads; as the queries."""
    if geometry.mask is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=geometry.causal, scale=scale, enable_gqa=True
        )
    # The heads that share keys are laid one behind the other as one longer query: no kernel need repeat keys.
    rows, heads, widest, size = queries.shape
    folded = queries.reshape(rows, keys.shape[1], heads // keys.shape[1] * widest, size)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=geometry.mask, scale=scale)
    return mixed.reshape(queries.shape)


def _rotate(states: Tensor, geometry: Geometry) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim], pairs (i, i + head_dim / 2) as in Llama and Qwen3."""
    first, second = states.chunk(2, dim=-1)
    return states * geometry.cos + torch.cat((-second, first), dim=-1) * geometry.sin


@dataclass
class _Plan:
    """What the host knows of a forward; see Geometry."""

    lengths: list[int]  # tokens of each query
    committed: list[int]
    stop: int
    plain: bool  # no row has anything committed or more than one run: plain causal (or bidirectional)
    bidirectional: bool


def _plan(queries: Sequence[Query], cache: KeyValueCache) -> tuple[list[list[int]], _Plan]:
    """One list for each of: tokens, positions, flat places, first and last scratch place seen (within the row), row
    and place in the rectangle. One list of lists is one transfer to the device."""
    lengths = [len(query.tokens) for query in queries]
    plan = _Plan(lengths, [row.length for row in cache.rows], 0, True, queries[0].bidirectional)
    tokens, positions, places, first, last, padded = ([] for _ in range(6))
    for number, (query, committed) in enumerate(zip(queries, plan.committed, strict=True)):
        assert query.bidirectional == plan.bidirectional, "rows of one forward see both ways, or none of them does"
        assert not (query.bidirectional and committed), "bidirectional attention cannot use a cache"
        tokens += query.tokens
        positions += query.positions
        padded += range(number * max(lengths), number * max(lengths) + len(query.tokens))
        for start, origin, count in zip(query.starts, query.origins, query.runs, strict=True):
            begin = committed + start
            plan.stop = max(plan.stop, begin + count)
            places += range(number * cache.capacity + begin, number * cache.capacity + begin + count)
            first += [committed + origin] * count
            last += [begin + count - 1] * count if query.bidirectional else range(begin, begin + count)
        plan.plain &= committed == 0 and len(query.runs) == 1 and query.starts == query.origins == [0]
    assert plan.stop <= cache.capacity, f"the cache holds {cache.capacity} tokens, {plan.stop} are needed"
    plan.plain &= not plan.bidirectional or len(set(lengths)) == 1
    return [tokens, positions, places, first, last, padded], plan


def _geometry(given: Tensor, plan: _Plan, cos: Tensor, sin: Tensor) -> Geometry:
    """The device's side of a forward. given: int64 [6, tokens], the lists of `_plan`."""
    rows, widest = len(plan.lengths), max(plan.lengths)
    _, _, places, first, last, padded = given
    even = len(set(plan.lengths)) == 1
    causal = plan.plain and not plan.bidirectional
    # One new token a row and equally much behind it: everything is seen.
    everything = widest == 1 and all(count + 1 == plan.stop for count in plan.committed)
    mask = None if plan.plain or (everything and even) else _mask(plan, first, last, padded)
    return Geometry(
        rows, widest, plan.stop, places, None if even else padded, mask, causal and not everything, cos, sin
    )


def _mask(plan: _Plan, first: Tensor, last: Tensor, padded: Tensor) -> Tensor:
    """0 where a token sees a place, else -inf: the committed places and, of the scratch, `first` to `last`.

    [rows, 1, widest, stop]; a token that only pads sees the row's first place, as it must see something.
    """
    rows, widest = len(plan.lengths), max(plan.lengths)
    key = torch.arange(plan.stop, device=first.device)
    bounds = torch.zeros(3, rows * widest, dtype=torch.long, device=first.device)
    if max(plan.committed):
        counts = torch.tensor(plan.committed, device=first.device)
        bounds[2] = counts.repeat_interleave(widest, output_size=rows * widest)
    bounds[0, padded], bounds[1, padded] = first, last
    begin, end, committed = bounds[:, :, None]
    seen = ((key >= begin) & (key <= end)) | (key < committed)
    mask = torch.zeros(seen.shape, device=first.device).masked_fill_(~seen, -torch.inf)
    return mask.view(rows, 1, widest, plan.stop)
