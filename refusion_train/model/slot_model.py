"""The model of one pipeline chunk, from token ids or a previous stage's activations to activations or the loss.

Rows of a micro-batch are laid behind each other: activations are [b * s, 1, hidden] (divided by the tensor-parallel
size with sequence parallelism), which saves every transposition; attention knows documents, not rows. A pipeline
schedule is therefore told a sequence length of b * s and a micro-batch size of 1: `stage_shape`.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch

from refusion_train.config import Config
from refusion_train.convert.names import Piece, padded_vocab_size, pieces
from refusion_train.errors import ConfigError
from refusion_train.model import mcore
from refusion_train.model.batch import DeviceBatch
from refusion_train.model.layers import block_submodules
from refusion_train.model.loss import LanguageModelHead, VocabularyPart, loss_statistics
from refusion_train.model.rotary import rotary_table


class Place(Protocol):
    """What of a rank's place in the layout the model must know; `parallel.groups.Groups` is one."""

    @property
    def first_stage(self) -> bool: ...
    @property
    def last_stage(self) -> bool: ...
    @property
    def vp_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class SlotModel(torch.nn.Module):
    """One pipeline chunk of a causal language model in the shape of Qwen3.

    `config` is megatron-core's (the schedules look for it there). Parameters carry, beyond megatron-core's
    `tensor_model_parallel`, what a data-parallel engine must know: `tensor_partial` (each tensor-parallel rank has a
    part of the gradient: sum it over them) and `shared_embedding` (a copy of the tied embedding on the first and
    last of several stages: sum the gradients of the two).
    """

    def __init__(
        self,
        config: Config,
        transformer_config: mcore.TransformerConfig,
        vocab_size: int,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        bidirectional: bool = False,
    ) -> None:
        """`vocab_size`: rows of the vocabulary that mean something; `pre_process`: holds the embedding;
        `post_process`: holds the head and returns the loss; `vp_stage`: number of the interleaved chunk, if any."""
        super().__init__()
        self.config = transformer_config
        self.model = config.model
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.tp_group = mcore.tensor_group()
        self.layer_offset: int = mcore.get_transformer_layer_offset(transformer_config, vp_stage)
        if pre_process:
            assert transformer_config.init_method is not None, "megatron-core's configuration has no init method"
            self.embedding = mcore.VocabParallelEmbedding(
                padded_vocab_size(config.model), config.model.hidden_size, config=transformer_config,
                init_method=transformer_config.init_method, tp_group=self.tp_group,
                reduce_scatter_embeddings=transformer_config.sequence_parallel,
            )  # fmt: skip
        layers = mcore.get_num_layers_to_build(transformer_config, vp_stage)
        self.decoder = mcore.TransformerBlock(
            transformer_config,
            block_submodules(
                transformer_config, layers, config.data.sequence_length, bidirectional, mcore.linear_layers(config)
            ),
            pre_process=pre_process, post_process=post_process, vp_stage=vp_stage,
        )  # fmt: skip
        if post_process:
            self.head = LanguageModelHead(self._head_weight(), self._vocabulary_part(vocab_size))
        self._mark_parameters()

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor] | None) -> None:
        """What the previous stage sent, [tokens, 1, hidden]; the schedule calls this before `forward`."""
        if isinstance(input_tensor, list):
            assert len(input_tensor) == 1, "a stage has one input"
            input_tensor = input_tensor[0]
        self.decoder.input_tensor = input_tensor

    def forward(self, batch: DeviceBatch) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Activations for the next stage, or on the last one (loss, statistics).

        loss: float32 scalar, sum(weight * cross entropy); statistics: float64, see `loss.STAT_NAMES`.
        """
        hidden = self._hidden(batch)
        if not self.post_process:
            return hidden
        supervised = self._select(hidden, batch.rows)
        loss, entropy = self.head(supervised, batch.labels, batch.weights)
        return loss, loss_statistics(loss, entropy, batch.weights, batch.kinds, batch.buckets)

    def logits(self, batch: DeviceBatch) -> torch.Tensor:
        """Logits of every position, [b, s, vocabulary] in the model's dtype: for inspection and small models."""
        assert self.post_process, "only the last stage has logits"
        every = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
        logits = self.head.logits(self._select(self._hidden(batch), every))
        if self.tp_group.size() > 1:
            # ranks may hold different numbers of meaningful columns: gather padded ones, then cut
            missing = self.head.weight.shape[0] - logits.shape[-1]
            logits = torch.nn.functional.pad(logits, (0, missing))
            logits = mcore.gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
            logits = logits[:, : self.model.vocab_size]
        return logits.view(*batch.input_ids.shape, -1)

    def pieces(self) -> dict[str, list[Piece]]:
        """For each parameter of this chunk, by name: the parts of logical tensors that it holds."""
        rank, size = self.tp_group.rank(), self.tp_group.size()
        return {name: pieces(name, self.model, rank, size, self.layer_offset) for name, _ in self.named_parameters()}

    def _hidden(self, batch: DeviceBatch) -> torch.Tensor:
        """Activations after the layers of this chunk, [tokens (/ tp), 1, hidden]."""
        hidden = None
        if self.pre_process:
            hidden = self.embedding(batch.input_ids.view(1, -1))
            hidden = hidden.view(-1, 1, self.model.hidden_size)
        table = rotary_table(
            batch.position_ids.view(-1), self.model.head_dim, self.model.rope_theta, self.config.params_dtype
        )
        return self.decoder(hidden_states=hidden, attention_mask=batch.boundaries, rotary_pos_emb=table)

    def _select(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows [m, hidden] of the whole micro-batch, their gradient summed over the parts of the vocabulary."""
        if self.config.sequence_parallel:
            hidden = mcore.gather_from_sequence_parallel_region(hidden, group=self.tp_group)
            return hidden.squeeze(1).index_select(0, rows)
        selected = hidden.squeeze(1).index_select(0, rows)
        if self.tp_group.size() == 1:
            return selected
        return mcore.copy_to_tensor_model_parallel_region(selected, group=self.tp_group)

    def _head_weight(self) -> torch.nn.Parameter:
        if self.model.tie_embeddings and self.pre_process:
            return self.embedding.weight
        rows = padded_vocab_size(self.model) // self.tp_group.size()
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        return torch.nn.Parameter(
            torch.empty(rows, self.model.hidden_size, dtype=self.config.params_dtype, device=device)
        )

    def _vocabulary_part(self, vocab_size: int) -> VocabularyPart:
        rows = padded_vocab_size(self.model) // self.tp_group.size()
        start = rows * self.tp_group.rank()
        size = min(max(vocab_size - start, 0), rows)
        return VocabularyPart(start, size, self.tp_group if self.tp_group.size() > 1 else None)

    def _mark_parameters(self) -> None:
        parts, shared = self.pieces(), self.model.tie_embeddings and not (self.pre_process and self.post_process)
        for name, parameter in self.named_parameters():
            # megatron-core 0.16 sets these only when it draws the weights itself, later versions always.
            parameter.tensor_model_parallel = self.tp_group.size() > 1 and not parts[name][0].replicated  # type: ignore[attr-defined]
            parameter.partition_dim, parameter.partition_stride = parts[name][0].dim, 1  # type: ignore[attr-defined]
            per_head = "q_layernorm" in name or "k_layernorm" in name
            partial = self.tp_group.size() > 1 and (per_head or getattr(parameter, "sequence_parallel", False))
            parameter.tensor_partial = partial  # type: ignore[attr-defined]
            is_vocabulary = name in ("embedding.weight", "head.weight")
            parameter.shared_embedding = shared and is_vocabulary  # type: ignore[attr-defined]


def build_model_chunks(config: Config, groups: Place, bidirectional: bool) -> list[SlotModel]:
    """The chunks of the model that this rank holds (one, or `virtual_pipeline` of them), with their initial weights.

    Raises ConfigError if the vocabulary is not known.
    """
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set; give it, or data.train with an index that states it")
    description = mcore.transformer_config(config)
    interleaved = groups.vp_size > 1
    chunks = []
    for number in range(groups.vp_size):
        first = groups.first_stage and number == 0
        last = groups.last_stage and number == groups.vp_size - 1
        stage = number if interleaved else None
        chunk = SlotModel(config, description, config.model.vocab_size, first, last, stage, bidirectional)
        initialise(chunk, config)
        chunks.append(chunk.to(groups.device))
    return chunks


def stage_shape(config: Config) -> dict[str, int]:
    """`seq_length` and `micro_batch_size` for the pipeline schedule: see the top of this file."""
    return {"seq_length": config.train.micro_batch_size * config.data.sequence_length, "micro_batch_size": 1}


@torch.no_grad()
def initialise(chunk: SlotModel, config: Config) -> None:
    """Draw the weights of a chunk; the same in every layout, for the same seed.

    Each logical tensor has its own generator, seeded by (seed, its name), is drawn whole in float32 and cut to the
    part of this rank; one full tensor is held at a time. Normal with `init_std`; matrices that write into the
    residual stream are divided by sqrt(2 * layers), as in GPT-2; norms are 1; biases and rows of padding are 0.
    """
    for name, parameter in chunk.named_parameters():
        for piece in chunk.pieces()[name]:
            piece.put(parameter, _draw(piece, config)[piece.slices])


def _draw(piece: Piece, config: Config) -> torch.Tensor:
    if len(piece.shape) == 1:
        return torch.zeros(piece.shape) if piece.name.endswith(".bias") else torch.ones(piece.shape)
    digest = hashlib.sha256(f"{config.seed}:{piece.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std = config.model.init_std
    if piece.name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.model.num_layers)
    if piece.shape[0] != padded_vocab_size(config.model) or ".layers." in piece.name:
        return torch.empty(piece.shape).normal_(0.0, std, generator=generator)
    full = torch.zeros(piece.shape)
    full[: config.model.vocab_size].normal_(0.0, std, generator=generator)
    return full
