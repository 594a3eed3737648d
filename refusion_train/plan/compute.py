"""Arithmetic of a training step: FLOPs per token, what a GPU gives, how long a run takes. Defined only here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from refusion_train.config import Config, ObjectiveConfig
from refusion_train.errors import ConfigError
from refusion_train.schedules import LAST, value_at


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet has it.

    flops: dense bf16 FLOP/s; memory_gib: what is there for a process, in GiB; memory_gb_s: GB/s to and from it;
    link_gb_s, network_gb_s: GB/s that it sends to GPUs of its own host, and to other hosts (one adapter per GPU, of
    400 Gb/s beside Hopper and Blackwell and 200 Gb/s beside A100).
    """

    name: str
    flops: float
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float


_GPUS = (
    Gpu("B200", 2250e12, 178.0, 8000.0, 900.0, 50.0),
    Gpu("H200", 989e12, 139.0, 4800.0, 450.0, 50.0),
    Gpu("H100", 989e12, 79.0, 3350.0, 450.0, 50.0),
    Gpu("H800", 989e12, 79.0, 3350.0, 200.0, 50.0),
    Gpu("A100-40GB", 312e12, 39.0, 1555.0, 300.0, 25.0),
    Gpu("A100", 312e12, 79.0, 2039.0, 300.0, 25.0),
    Gpu("A800", 312e12, 79.0, 2039.0, 200.0, 25.0),
    Gpu("L40S", 362e12, 44.0, 864.0, 32.0, 12.5),
)
GPU_NAMES = tuple(gpu.name for gpu in _GPUS)


def gpu_named(name: str) -> Gpu:
    """The GPU that a user means. Raises ConfigError for one that is not known here."""
    for gpu in _GPUS:
        if gpu.name.lower() == name.lower():
            return gpu
    near = difflib.get_close_matches(name.upper(), GPU_NAMES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"--gpu {name} is not one of {', '.join(GPU_NAMES)}{hint}")


def gpu_of_device(device_name: str) -> Gpu | None:
    """The GPU whose name stands in that of a device ("NVIDIA H100 80GB HBM3"), if it is known."""
    squeezed = device_name.replace("SXM4-", "").replace("PCIE-", "")
    return next((gpu for gpu in _GPUS if gpu.name in squeezed), None)


# ----------------------------------------------------------------------------------------------------------- FLOPs


def layer_weights(config: Config) -> int:
    """Elements of the matrices of all layers."""
    model = config.model
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    return model.num_layers * (attention + 3 * model.hidden_size * model.ffn_size)


def attention_flops(config: Config, attended: float) -> float:
    """FLOPs per token of scores and weighted values, forward and backward, of all layers.

    attended: length of the document of a token, averaged over tokens. A query meets half of it under a causal mask,
    all of it in both directions (`objective.name: mdm`); 2 products of 2 a d FLOPs per key, and the backward pass
    twice that: 6 a d attended per layer, or 12 (Narayanan et al. 2021, arXiv 2104.04473, appendix, counts 12).
    """
    model = config.model
    per_layer = 12 if config.objective.name == "mdm" else 6
    return per_layer * model.num_layers * model.num_heads * model.head_dim * attended


def flops_per_token(
    config: Config, vocab_size: int, supervised_fraction: float, attended: float | None = None
) -> float:
    """Training FLOPs per token, without recomputation.

    6 per weight that a token meets (Kaplan et al. 2020, arXiv 2001.08361): those of the layers; those of the head at
    supervised tokens only; none of the embedding, which is looked up. Attention as in `attention_flops`; without
    `attended` it is left out, and the result is a lower bound.
    """
    weights = layer_weights(config) + config.model.hidden_size * vocab_size * supervised_fraction
    return 6.0 * weights + (0.0 if attended is None else attention_flops(config, attended))


def recompute_flops(config: Config, attended: float) -> float:
    """FLOPs per token that recomputation adds: the forward pass of the layers (full), of attention (selective)."""
    scores = attention_flops(config, attended) / 3
    if config.train.recompute == "full":
        return 2.0 * layer_weights(config) + scores
    return scores if config.train.recompute == "selective" else 0.0


def supervised_fraction(objective: ObjectiveConfig, length: float, prompt: float = 1.0) -> float:
    """Expected share of tokens that carry a target, in documents of `length` tokens of which `prompt` are prompt.

    ar: the response's tokens. mdm: those that are masked, E[p] = (1 + eps) / 2. slots: the masked ones and, of the
    clean ones, all but the document's last (cross_slot_targets), and what the prompt's last token predicts; otherwise
    all but the last of each slot, of expected share E[1 / slot size]. Of `ar_probability` of the documents as in ar.
    Where slot weights change with the step, those that they end at count.
    """
    response = max(0.0, length - prompt)
    if not response:
        return 0.0
    masked = (1 + objective.eps) / 2
    plain = (response if prompt else response - 1) / length
    if objective.name == "ar":
        return plain
    if objective.name == "mdm":
        return masked * response / length
    if objective.cross_slot_targets:
        slots = (response - (1 - masked) + min(1.0, prompt)) / length
    else:
        weights = value_at(objective.slot_weights, LAST) or [1.0] * len(objective.slot_sizes)
        ends = sum(w / size for w, size in zip(weights, objective.slot_sizes, strict=True)) / sum(weights)
        slots = response * (masked + (1 - masked) * (1 - ends)) / length
    return (1 - objective.ar_probability) * slots + objective.ar_probability * plain


def attended_length(length: float, row: int) -> float:
    """Length of the piece of a document that a token sees, averaged over tokens.

    length: of every document, before it is cut; row: tokens of a row. Documents are packed behind each other and cut
    at the ends of rows, so two tokens at a distance of x lie in the same row with probability 1 - x / row; summed over
    all pairs of a document: length - length^2 / (3 row) up to a length of a row, row - row^2 / (3 length) beyond.
    Documents of unequal length attend more than their mean does: the result is then a lower bound.
    """
    return length - length**2 / (3 * row) if length <= row else row - row**2 / (3 * length)


def days(flops: float, world_size: int, gpu: Gpu, mfu: float) -> float:
    """Days that `world_size` GPUs take for model FLOPs when they reach the share `mfu` of their peak."""
    return flops / (world_size * gpu.flops * mfu) / 86_400
