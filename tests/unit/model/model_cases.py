"""Small models, batches and their counterparts in `transformers`, shared by the tests of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from refusion_train.config import Config, ModelConfig
from refusion_train.convert.names import padded_vocab_size
from refusion_train.model.batch import DeviceBatch, to_device
from refusion_train.model.slot_model import SlotModel, build_model_chunks
from refusion_train.objective import CLEAN, MASKED, NONE, Batch
from refusion_train.parallel.groups import Groups

CPU = torch.device("cpu")
LENGTH = 48


def make_config(**model: Any) -> Config:
    """4 layers, 50 of 64 rows of vocabulary in use, grouped queries; rows of 48 tokens; keywords change the model."""
    shape = dict(
        hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, vocab_size=50,
        vocab_multiple=64, rope_theta=10_000.0, init_std=0.2, max_sequence_length=64,
    )  # fmt: skip
    config = Config(seed=3, model=ModelConfig(**{**shape, **model}))
    config.train.precision, config.train.micro_batch_size, config.train.global_batch_size = "fp32", 2, 8
    config.data.sequence_length = LENGTH
    return config


def make_model(config: Config, groups: Groups, bidirectional: bool = False) -> SlotModel:
    """All layers on one stage; norms are moved away from 1 and biases from 0 so that they matter."""
    model = build_model_chunks(config, groups, bidirectional)[0]
    generator = torch.Generator().manual_seed(5)
    for name, parts in model.pieces().items():
        for piece in parts:
            if len(piece.shape) == 1:
                noise = 0.3 * torch.randn(piece.shape, generator=generator)[piece.slices]
                piece.put(model.get_parameter(name).data, piece.take(model.get_parameter(name).data) + noise)
    return model


# lengths of the documents of each row; the second row ends in padding
ROWS = [[10, 10, 1, 27], [20, 5, 17]]


def make_batch(vocab_size: int = 50, seed: int = 0, rows: list[list[int]] | None = None) -> Batch:
    """Rows of documents with permuted positions and targets of both kinds at about two thirds of the positions."""
    rng = np.random.default_rng(seed)
    rows = ROWS if rows is None else rows
    batch = Batch.empty(len(rows), LENGTH)
    batch.document_ids[:], batch.position_ids[:], batch.counts[:] = -1, 0, 0
    for row, lengths in enumerate(rows):
        start = 0
        for document, length in enumerate(lengths):
            batch.document_ids[row, start : start + length] = document
            batch.position_ids[row, start : start + length] = rng.permutation(length)
            start += length
    shape = batch.input_ids.shape
    batch.input_ids[:] = rng.integers(0, vocab_size, shape)
    batch.labels[:] = rng.integers(0, vocab_size, shape)
    batch.target_kind[:] = np.where(batch.document_ids < 0, NONE, rng.integers(NONE, MASKED + 1, shape))
    batch.loss_weight[:] = np.where(batch.target_kind == NONE, 0, rng.random(shape) / 50)
    batch.noise_bucket[:] = np.where(batch.target_kind == MASKED, rng.integers(0, 10, shape), 0)
    assert (batch.target_kind == CLEAN).any(), "the seed gives no clean target"
    return batch


def on_device(batch: Batch) -> DeviceBatch:
    """The batch on the CPU, its weights taken as final."""
    return to_device(batch, batch.loss_weight, CPU)


def documents(batch: Batch) -> list[tuple[int, slice]]:
    """(row, range) of every document."""
    found = []
    for row, ids in enumerate(batch.document_ids):
        for number in range(ids.max() + 1):
            where = np.flatnonzero(ids == number)
            found.append((row, slice(int(where[0]), int(where[-1]) + 1)))
    return found


def logical(model: SlotModel, values: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Full logical tensors of a model on one rank (or of `values` by parameter name, such as gradients)."""
    given = dict(model.named_parameters()) if values is None else values
    parts = model.pieces()
    return {piece.name: piece.take(given[name].detach()).clone() for name in given for piece in parts[name]}


def gradients(model: SlotModel) -> dict[str, torch.Tensor]:
    """Gradients of a model on one rank under logical names."""
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        grads[name] = parameter.grad
    return logical(model, grads)


def transformers_model(config: Config, weights: dict[str, torch.Tensor]) -> Any:
    """Qwen3ForCausalLM with these weights, its padded rows cut off; Qwen2 with biases, Llama without q/k norms."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    model = config.model
    kind, cls = (Qwen3Config, Qwen3ForCausalLM) if model.qk_norm else (LlamaConfig, LlamaForCausalLM)
    if model.qkv_bias:
        kind, cls = Qwen2Config, Qwen2ForCausalLM
    description = kind(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim, rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.tie_embeddings, max_position_embeddings=model.max_sequence_length,
        attn_implementation="eager", **({} if model.qkv_bias else {"attention_bias": False}),
    )  # fmt: skip
    reference = cls(description).eval()
    padded = padded_vocab_size(model)
    trimmed = {
        name: value[: model.vocab_size] if value.shape[0] == padded else value for name, value in weights.items()
    }
    missing, unexpected = reference.load_state_dict(trimmed, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, f"{missing} missing, {unexpected} unexpected"
    reference.tie_weights()
    return reference


def reference_logits(reference: Any, batch: Batch) -> torch.Tensor:
    """Logits [b, s, vocabulary] of a `transformers` model, document by document; 0 in padding.

    The mask of ones keeps `transformers` from taking permuted positions for several packed documents.
    """
    ids, positions = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.position_ids)
    logits = torch.zeros(*ids.shape, reference.config.vocab_size)
    for row, span in documents(batch):
        out = reference(
            input_ids=ids[None, row, span], position_ids=positions[None, row, span],
            attention_mask=torch.ones_like(ids[None, row, span]), use_cache=False,
        )  # fmt: skip
        logits[row, span] = out.logits[0]
    return logits


def reference_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """sum(weight * cross entropy) of full logits."""
    labels = torch.from_numpy(batch.labels).masked_fill(torch.from_numpy(batch.target_kind == NONE), -100)
    entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (entropy * torch.from_numpy(batch.loss_weight).flatten()).sum()
