"""The one table of names: a parameter on a rank <-> its part of the tensors of a Hugging Face Qwen3 checkpoint.

Everything outside the model (checkpoints, export, initial weights) speaks of *logical* tensors: the names and full
shapes of `Qwen3ForCausalLM`, vocabulary padded (`padded_vocab_size`). The model holds them differently: query, key and
value rows are interleaved by key/value group in one matrix, gate and up projection share one, tensor-parallel ranks
hold slices, pipeline stages count their layers from 0. A `Piece` says where one logical tensor lies in one parameter
of one rank, and which part of the full tensor that is. Pure functions of shapes and ranks; no process group is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from refusion_train.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_LAYERS = "decoder.layers."


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of the embedding: `vocab_size` rounded up to a multiple of `vocab_multiple`, in every layout."""
    assert model.vocab_size is not None, "model.vocab_size must be resolved before the model is described"
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


@dataclass(frozen=True)
class Piece:
    """The part of one logical tensor that lies in one parameter of one rank.

    In the parameter it is rows `start:stop` of each of the `groups` equal blocks along dimension 0, in order.
    In the full tensor it is `size` entries from `offset` on along dimension `dim`, and everything along the others.
    `replicated`: every tensor-parallel rank holds the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    groups: int
    start: int
    stop: int
    dim: int
    offset: int
    size: int
    replicated: bool

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this part in the full tensor."""
        return tuple(
            slice(self.offset, self.offset + self.size) if dim == self.dim else slice(None)
            for dim in range(len(self.shape))
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this part."""
        return tuple(self.size if dim == self.dim else size for dim, size in enumerate(self.shape))

    def take(self, parameter: torch.Tensor) -> torch.Tensor:
        """This piece of a parameter (or of anything of its shape: a moment, a gradient), shape `local_shape`.

        A view of it where the layout allows (`groups` == 1), else a copy.
        """
        return self._blocks(parameter)[:, self.start : self.stop].reshape(self.local_shape)

    def put(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Write this piece into a contiguous parameter, in place; `values` has `local_shape`, any float dtype."""
        assert tuple(values.shape) == self.local_shape, f"{self.name}: {tuple(values.shape)} is not {self.local_shape}"
        blocks = self._blocks(parameter)[:, self.start : self.stop]
        blocks.copy_(values.reshape(blocks.shape))

    def _blocks(self, parameter: torch.Tensor) -> torch.Tensor:
        assert parameter.is_contiguous(), f"the parameter that holds {self.name} must be contiguous"
        return parameter.view(self.groups, parameter.shape[0] // self.groups, *parameter.shape[1:])


@dataclass(frozen=True)
class _Place:
    """What decides which part of a tensor a rank holds."""

    model: ModelConfig
    tp_rank: int
    tp_size: int

    def share(self, total: int) -> int:
        assert total % self.tp_size == 0, f"{total} cannot be shared by {self.tp_size} tensor-parallel ranks"
        return total // self.tp_size


_Rule = Callable[[str, _Place], Piece]


def _whole(shape: tuple[int, ...]) -> tuple[int, int, int, int, int, int]:
    """groups, start, stop, dim, offset, size of a tensor that is held whole."""
    return 1, 0, shape[0], 0, 0, shape[0]


def _norm(size: Callable[[ModelConfig], int]) -> _Rule:
    def rule(name: str, place: _Place) -> Piece:
        shape = (size(place.model),)
        return Piece(name, shape, *_whole(shape), replicated=True)

    return rule


def _vocabulary(name: str, place: _Place) -> Piece:
    rows = padded_vocab_size(place.model)
    local = place.share(rows)
    return Piece(name, (rows, place.model.hidden_size), 1, 0, local, 0, place.tp_rank * local, local, False)


def _columns(size: Callable[[ModelConfig], int]) -> _Rule:
    """A matrix [hidden, size] whose columns are shared by the ranks."""

    def rule(name: str, place: _Place) -> Piece:
        model = place.model
        local = place.share(size(model))
        shape = (model.hidden_size, size(model))
        return Piece(name, shape, 1, 0, model.hidden_size, 1, place.tp_rank * local, local, False)

    return rule


def _attention(heads: Callable[[int], tuple[int, int]], per_group: Callable[[int], int], bias: bool = False) -> _Rule:
    """Query, key or value rows of the joint matrix, whose blocks are: queries of a group, its key, its value.

    bias: of the joint vector of biases instead.
    """

    def rule(name: str, place: _Place) -> Piece:
        model = place.model
        queries = model.num_heads // model.num_kv_heads
        groups = place.share(model.num_kv_heads)
        first, last = heads(queries)
        rows = model.num_kv_heads * per_group(queries) * model.head_dim
        local = place.share(rows)
        return Piece(
            name, (rows,) if bias else (rows, model.hidden_size), groups, first * model.head_dim, last * model.head_dim,
            0, place.tp_rank * local, local, False,
        )  # fmt: skip

    return rule


def _half(number: int) -> _Rule:
    """Gate (0) or up (1) projection: the halves of the joint matrix of a rank."""

    def rule(name: str, place: _Place) -> Piece:
        model = place.model
        local = place.share(model.ffn_size)
        shape = (model.ffn_size, model.hidden_size)
        return Piece(name, shape, 1, number * local, (number + 1) * local, 0, place.tp_rank * local, local, False)

    return rule


_hidden = _norm(lambda model: model.hidden_size)
_head = _norm(lambda model: model.head_dim)

# Within a block of the joint matrix, in heads: from, to; and how many heads of it a group has.
_Heads = tuple[Callable[[int], tuple[int, int]], Callable[[int], int]]
_QUERY: _Heads = (lambda queries: (0, queries), lambda queries: queries)
_KEY: _Heads = (lambda queries: (queries, queries + 1), lambda _: 1)
_VALUE: _Heads = (lambda queries: (queries + 1, queries + 2), lambda _: 1)

# parameter of a layer -> (tensor of the Hugging Face layer, where it lies)
_LAYER_TABLE: dict[str, list[tuple[str, _Rule]]] = {
    "input_layernorm.weight": [("input_layernorm.weight", _hidden)],
    "self_attention.linear_qkv.weight": [
        ("self_attn.q_proj.weight", _attention(*_QUERY)),
        ("self_attn.k_proj.weight", _attention(*_KEY)),
        ("self_attn.v_proj.weight", _attention(*_VALUE)),
    ],
    "self_attention.linear_qkv.bias": [
        ("self_attn.q_proj.bias", _attention(*_QUERY, bias=True)),
        ("self_attn.k_proj.bias", _attention(*_KEY, bias=True)),
        ("self_attn.v_proj.bias", _attention(*_VALUE, bias=True)),
    ],
    "self_attention.q_layernorm.weight": [("self_attn.q_norm.weight", _head)],
    "self_attention.k_layernorm.weight": [("self_attn.k_norm.weight", _head)],
    "self_attention.linear_proj.weight": [
        ("self_attn.o_proj.weight", _columns(lambda model: model.num_heads * model.head_dim))
    ],
    "pre_mlp_layernorm.weight": [("post_attention_layernorm.weight", _hidden)],
    "mlp.linear_fc1.weight": [("mlp.gate_proj.weight", _half(0)), ("mlp.up_proj.weight", _half(1))],
    "mlp.linear_fc2.weight": [("mlp.down_proj.weight", _columns(lambda model: model.ffn_size))],
}


def pieces(parameter: str, model: ModelConfig, tp_rank: int, tp_size: int, layer_offset: int) -> list[Piece]:
    """The logical tensors that a parameter holds, in the order in which they lie in it.

    `parameter`: name in a `SlotModel`, its layers numbered from 0 in each pipeline chunk; `layer_offset`: layers
    before that chunk. With tied embeddings the last stage's `head.weight` is a second copy of the embedding and has
    its name. Raises KeyError for a name that the model does not have.
    """
    place = _Place(model, tp_rank, tp_size)
    if parameter.startswith(_LAYERS):
        number, inner = parameter[len(_LAYERS) :].split(".", 1)
        prefix = f"model.layers.{int(number) + layer_offset}."
        return [rule(prefix + name, place) for name, rule in _LAYER_TABLE[inner]]
    if parameter == "embedding.weight":
        return [_vocabulary(EMBEDDING, place)]
    if parameter == "head.weight":
        return [_vocabulary(EMBEDDING if model.tie_embeddings else HEAD, place)]
    if parameter == "decoder.final_layernorm.weight":
        return [_hidden("model.norm.weight", place)]
    raise KeyError(f"no logical tensor belongs to the parameter {parameter}")


def split(parameter: torch.Tensor, parts: list[Piece]) -> dict[str, torch.Tensor]:
    """A parameter of this rank (or a moment of it) as its parts of the logical tensors, by name."""
    return {piece.name: piece.take(parameter) for piece in parts}


def join(parameter: torch.Tensor, parts: list[Piece], values: dict[str, torch.Tensor], full: bool = False) -> None:
    """Fill a parameter of this rank in place from its parts (`full`: from the full logical tensors), by name."""
    for piece in parts:
        value = values[piece.name]
        piece.put(parameter, value[piece.slices] if full else value)


def logical_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every logical tensor of the model with its full shape, in the order of the model."""
    place = _Place(model, 0, 1)
    absent = () if model.qk_norm else ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
    absent += () if model.qkv_bias else ("self_attention.linear_qkv.bias",)
    shapes = {EMBEDDING: _vocabulary(EMBEDDING, place).shape}
    for layer in range(model.num_layers):
        for inner, rules in _LAYER_TABLE.items():
            if inner not in absent:
                shapes |= {f"model.layers.{layer}.{name}": rule(name, place).shape for name, rule in rules}
    shapes["model.norm.weight"] = (model.hidden_size,)
    if not model.tie_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    return shapes
