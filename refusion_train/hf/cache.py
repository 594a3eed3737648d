"""One forward over part of a sequence, on top of keys and values that are already there.

Decoding slots needs what transformers' caches and masks do not offer: tokens that stand in another order than
their positions, several continuations of one prefix side by side, and keys that are forgotten again. So the
decoder walks over the model's own layers itself, with a preallocated cache and masks built here in physical
order; transformers never sees the permuted positions (it would take them for packed sequences).

This file is copied into every exported folder: it imports torch only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Target of a row at which no probability is asked for.
NO_TARGET = -1


@dataclass
class Query:
    """Tokens of one forward, in physical order behind the committed cache.

    The tokens may form several runs. A run sees the committed cache and itself (causally), never another run, so
    several slots can be completed side by side over one prefix without copying it. Run r writes its keys at the
    places `starts[r] ...` behind the committed cache, where they stay until they are committed or overwritten.
    """

    tokens: list[int]
    positions: list[int]
    # Lengths of the runs (they add up to len(tokens)) and the first place of each; default: one run at place 0.
    runs: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    # Token whose probability is asked for at each row of the query, or NO_TARGET. Empty: none at all.
    targets: list[int] = field(default_factory=list)
    # Rows of the query whose prediction is wanted; None: all.
    wanted: list[int] | None = None
    # Every token sees every other (masked diffusion); only without a cache.
    bidirectional: bool = False

    def __post_init__(self) -> None:
        if not self.runs:
            self.runs, self.starts = [len(self.tokens)], [0]
        assert sum(self.runs) == len(self.tokens) == len(self.positions), "runs, tokens and positions differ in length"
        assert not self.targets or len(self.targets) == len(self.tokens), "one target for each row of the query"


class KeyValueCache:
    """Rotated keys and values of one sequence in physical order, for all layers; allocated once.

    The first `length` places are committed. The places behind them are scratch: every forward writes there and
    `commit` keeps a leading part of it.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        """Room for `capacity` tokens of `model` (a Qwen3- or Llama-like ...ForCausalLM), in its dtype and device."""
        first = model.model.layers[0].self_attn
        heads = first.k_proj.out_features // first.head_dim
        shape = (len(model.model.layers), 2, 1, heads, capacity, first.head_dim)
        weight = first.k_proj.weight
        # Zeros, not empty: a hidden place has weight 0, and 0 times a leftover NaN would be NaN.
        self.storage = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.capacity = capacity
        self.length = 0

    def commit(self, count: int) -> None:
        """Keep the first `count` scratch places for good."""
        assert count >= 0 and self.length + count <= self.capacity, f"cannot commit {count} places"
        self.length += count

    def write(self, layer: int, keys: Tensor, values: Tensor, places: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Put keys and values [1, kv_heads, q, head_dim] at absolute `places` [q]; returns the first `stop`."""
        stored_keys, stored_values = self.storage[layer]
        stored_keys.index_copy_(2, places, keys)
        stored_values.index_copy_(2, places, values)
        return stored_keys[:, :, :stop], stored_values[:, :, :stop]


@dataclass
class _Geometry:
    """Where the tokens of one query stand and what they see; the same for every layer."""

    places: Tensor  # int64 [q]: absolute places in the cache
    mask: Tensor | None  # bool [1, 1, q, stop]: True where a key is seen; None: plain causal, nothing committed
    stop: int  # end of the places in use
    cos: Tensor  # [1, 1, q, head_dim]
    sin: Tensor


def forward(model: Any, cache: KeyValueCache, query: Query) -> Tensor:
    """Final hidden states [q, hidden] of a query over the cache, whose scratch places it fills.

    `model` is a Qwen3- or Llama-like ...ForCausalLM of transformers; only its modules are used, not its masks or
    caches. Positions are the true ones, whatever the physical order.
    """
    device = cache.storage.device
    hidden = model.model.embed_tokens(torch.tensor([query.tokens], device=device))
    cos, sin = model.model.rotary_emb(hidden, torch.tensor([query.positions], device=device))
    geometry = _Geometry(*_visible(cache.length, query, device), cos.unsqueeze(1), sin.unsqueeze(1))
    assert geometry.stop <= cache.capacity, f"the cache holds {cache.capacity} tokens, {geometry.stop} are needed"
    for index, layer in enumerate(model.model.layers):
        hidden = hidden + _attention(layer.self_attn, layer.input_layernorm(hidden), cache, index, geometry)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.model.norm(hidden)[0]


def _attention(own: Any, hidden: Tensor, cache: KeyValueCache, layer: int, geometry: _Geometry) -> Tensor:
    """Attention module `own` of one layer over the cache: [1, q, hidden] to the same."""
    shape = (1, hidden.shape[1], -1, own.head_dim)
    queries, keys = own.q_proj(hidden).view(shape), own.k_proj(hidden).view(shape)
    if hasattr(own, "q_norm"):
        queries, keys = own.q_norm(queries), own.k_norm(keys)
    queries = _rotate(queries.transpose(1, 2), geometry)
    keys = _rotate(keys.transpose(1, 2), geometry)
    values = own.v_proj(hidden).view(shape).transpose(1, 2)
    keys, values = cache.write(layer, keys, values, geometry.places, geometry.stop)
    mask = geometry.mask
    mixed = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=own.scaling, enable_gqa=True
    )
    return own.o_proj(mixed.transpose(1, 2).reshape(1, hidden.shape[1], -1))


def _rotate(states: Tensor, geometry: _Geometry) -> Tensor:
    """Rotary embedding of [1, heads, q, head_dim], pairs (i, i + head_dim / 2) as in Llama and Qwen3."""
    first, second = states.chunk(2, dim=-1)
    return states * geometry.cos + torch.cat((-second, first), dim=-1) * geometry.sin


def _visible(length: int, query: Query, device: torch.device) -> tuple[Tensor, Tensor | None, int]:
    """Places, mask and stop of a query behind `length` committed tokens (see _Geometry).

    Row i sees the committed places and, of the scratch places, those of its own run up to itself (all of them if
    bidirectional).
    """
    places: list[int] = []
    first: list[int] = []
    for start, count in zip(query.starts, query.runs, strict=True):
        places.extend(range(length + start, length + start + count))
        first.extend([length + start] * count)
    stop = max(places) + 1
    place = torch.tensor(places, device=device)
    if query.bidirectional:
        assert length == 0 and len(query.runs) == 1, "bidirectional attention cannot use a cache"
        return place, torch.ones(1, 1, stop, stop, dtype=torch.bool, device=device), stop
    if length == 0 and len(query.runs) == 1 and query.starts[0] == 0:
        return place, None, stop
    key = torch.arange(stop, device=device)
    own = (key >= torch.tensor(first, device=device)[:, None]) & (key <= place[:, None])
    return place, (own | (key < length))[None, None], stop
