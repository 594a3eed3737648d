"""How many parameters a model has, and which of them each pipeline stage and rank holds.

The order and the shapes are those of `model.slot_model.SlotModel`; `convert.names` says the same of tensors of a
Hugging Face checkpoint. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from refusion_train.config import Config, ModelConfig
from refusion_train.errors import ConfigError
from refusion_train.layouts import stage_layers


@dataclass(frozen=True)
class Weight:
    """One parameter, whole.

    size: elements, rows of padding included (`padding` of them); split: tensor-parallel ranks share it, otherwise
    each holds all of it; matrix: it decays, so ZeRO keeps it in another flat tensor than the vectors.
    """

    name: str
    size: int
    split: bool
    matrix: bool
    padding: int = 0

    def local(self, tensor: int) -> int:
        """Elements on one of `tensor` tensor-parallel ranks."""
        return self.size // tensor if self.split else self.size


@dataclass(frozen=True)
class Stage:
    """What the ranks of one pipeline stage hold.

    chunks: layers of each of its (interleaved) chunks; weights: every parameter, in the order of the model;
    copied: its head is a second copy of the tied embedding, whose home is the first stage.
    """

    number: int
    chunks: tuple[int, ...]
    weights: tuple[Weight, ...]
    embedding: bool
    head: bool
    copied: bool

    @property
    def layers(self) -> int:
        """Layers of all its chunks."""
        return sum(self.chunks)

    @cached_property
    def parameters(self) -> int:
        """Parameters whose home this is: without padding, and without the copy of a tied embedding."""
        return sum(
            weight.size - weight.padding for weight in self.weights if not (self.copied and weight.name == "head")
        )

    def sizes(self, tensor: int, matrix: bool) -> list[int]:
        """Elements of every matrix (or vector) on one rank, in the order of the model."""
        return [weight.local(tensor) for weight in self.weights if weight.matrix == matrix]

    def local(self, tensor: int) -> int:
        """Elements on one rank, padding and copies included."""
        return sum(weight.local(tensor) for weight in self.weights)


def padded_vocabulary(model: ModelConfig) -> int:
    """Rows of the embedding: `vocab_size` rounded up to a multiple of `vocab_multiple`, in every layout."""
    return -(-vocabulary(model) // model.vocab_multiple) * model.vocab_multiple


def vocabulary(model: ModelConfig) -> int:
    """Rows that mean something. Raises ConfigError if they are not known."""
    if model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set; give it, or data.train with the index of a dataset")
    return model.vocab_size


def layer_weights(model: ModelConfig) -> list[Weight]:
    """The parameters of one layer: a multi-head attention with grouped keys and values, and a gated feed-forward."""
    hidden, width = model.hidden_size, model.head_dim
    heads, kv_heads = model.num_heads, model.num_kv_heads
    biases = [Weight("query_key_value_bias", (heads + 2 * kv_heads) * width, split=True, matrix=False)] * model.qkv_bias
    per_head = [Weight("norm", width, split=False, matrix=False)] * (2 * model.qk_norm)
    return [
        Weight("norm", hidden, split=False, matrix=False),
        Weight("attention_output", heads * width * hidden, split=True, matrix=True),
        Weight("query_key_value", (heads + 2 * kv_heads) * width * hidden, split=True, matrix=True),
        *biases,
        *per_head,
        Weight("norm", hidden, split=False, matrix=False),
        Weight("gate_up", 2 * model.ffn_size * hidden, split=True, matrix=True),
        Weight("down", model.ffn_size * hidden, split=True, matrix=True),
    ]


def stages(config: Config) -> list[Stage]:
    """Every pipeline stage of a model whose layout is valid. Raises ConfigError if the vocabulary is not known."""
    model, virtual = config.model, config.parallel.virtual_pipeline
    rows = padded_vocabulary(model)
    padding = (rows - vocabulary(model)) * model.hidden_size
    shares, layer = stage_layers(config), layer_weights(model)
    result = []
    for number, layers in enumerate(shares):
        first, last = number == 0, number == len(shares) - 1
        weights = layer * layers
        if first:
            weights = [Weight("embedding", rows * model.hidden_size, True, True, padding), *weights]
        if last:
            weights = [*weights, Weight("norm", model.hidden_size, split=False, matrix=False)]
            if not model.tie_embeddings or not first:
                weights.append(Weight("head", rows * model.hidden_size, True, True, padding))
        copied = last and not first and model.tie_embeddings
        result.append(Stage(number, (layers // virtual,) * virtual, tuple(weights), first, last, copied))
    return result


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of the whole model.

    total: as Hugging Face counts them (tied embeddings once, without padding); embedding: of them in the embedding
    and an untied head; padding: rows of padding on top, which are stored and never trained; per_stage: total by home;
    per_rank: elements that a rank of each stage holds and computes with, padding and copies included.
    """

    total: int
    embedding: int
    padding: int
    per_stage: list[int]
    per_rank: list[int]


def count(config: Config) -> ParameterCounts:
    """Count the parameters of a configuration. Raises ConfigError as `stages` does."""
    model, all_stages = config.model, stages(config)
    per_stage = [stage.parameters for stage in all_stages]
    matrices = 1 if model.tie_embeddings else 2
    padding = (padded_vocabulary(model) - vocabulary(model)) * model.hidden_size
    return ParameterCounts(
        total=sum(per_stage),
        embedding=matrices * vocabulary(model) * model.hidden_size,
        padding=matrices * padding,
        per_stage=per_stage,
        per_rank=[stage.local(config.parallel.tensor) for stage in all_stages],
    )
