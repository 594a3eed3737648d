"""What the forward pass keeps for the backward pass, in bytes per rank.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
whose layer keeps s b h (34 + 5 a s / h) bytes in 16 bit. Ours differs: no dropout and so no masks; flash attention,
so not the 5 a s / h of the scores but a log-sum-exp per head; RMSNorm; grouped keys and values; a gated feed-forward
of width f with one joint matrix; rotations that keep nothing of what they rotate.

Symbols: T tokens of a micro-batch (rows lie behind each other), h hidden, a heads, k kv heads, d head dimension,
f feed-forward width, t tensor-parallel size, r = t with sequence parallelism and 1 without it, e bytes per element.
"""

from __future__ import annotations

from refusion_train.config import Config
from refusion_train.plan.parameters import Stage

_FP32 = 4


def element_bytes(config: Config) -> int:
    """Bytes of a weight or an activation."""
    return 2 if config.train.precision == "bf16" else 4


def micro_batch_tokens(config: Config) -> int:
    """Tokens of one forward pass on a rank, padding included."""
    return config.train.micro_batch_size * config.data.sequence_length


def residual_bytes(config: Config) -> int:
    """One tensor of hidden states of a micro-batch between layers: e T h / r."""
    shared = config.parallel.tensor if config.parallel.sequence else 1
    return element_bytes(config) * micro_batch_tokens(config) * config.model.hidden_size // shared


def layer_bytes(config: Config, recompute: str | None = None) -> int:
    """Kept per layer and micro-batch on one rank; `recompute`: that of the configuration.

    none       e T [4 h / r  +  (3 a + 3 k) d / t  +  3 f / t]  and in float32  T [(a + (a + k)) / t + 2 / r]
               2 norms with input and output; joint query-key-value, rotated queries and keys, attention's output;
               joint gate and up, their product; log-sum-exp, and the scale of each norm (per head of q/k norms)
    selective  e T [4 h / r  +  (2 a + 2 k) d / t  +  2 f / t]  and in float32  T [2 / r]
               rotated queries and keys, the scores' sums and the gated product are computed again
    full       e T h / r: the input of the layer
    """
    model, tensor = config.model, config.parallel.tensor
    mode = config.train.recompute if recompute is None else recompute
    tokens, element, residual = micro_batch_tokens(config), element_bytes(config), residual_bytes(config)
    if mode == "full":
        return residual
    rows = tokens // tensor if config.parallel.sequence else tokens
    heads, kv_heads, width, ffn = model.num_heads, model.num_kv_heads, model.head_dim, model.ffn_size
    scales = 2 * _FP32 * rows
    if mode == "selective":
        split = (2 * heads + 2 * kv_heads) * width + 2 * ffn
        return 4 * residual + element * tokens * split // tensor + scales
    split = (3 * heads + 3 * kv_heads) * width + 3 * ffn
    sums = heads + (heads + kv_heads) * model.qk_norm
    return 4 * residual + element * tokens * split // tensor + scales + _FP32 * tokens * sums // tensor


def passes_in_flight(config: Config, stage: int, micro_batches: int) -> int:
    """Forward passes of chunks of a stage whose backward pass is still to come, at the most.

    1F1B (Narayanan et al. 2021, arXiv 2104.04473): stage i of p keeps min(m, p - i) micro-batches. Interleaved with v
    chunks per stage, megatron-core begins with 2 (p - i - 1) + (v - 1) p passes of single chunks, and one more is in
    flight when the first goes back. On the first stage that is p v + p - 1 of the p v that make up the model:
    1 + (p - 1) / (p v) times all its layers (arXiv 2205.05198, section 4.2.3).
    """
    pipeline, virtual = config.parallel.pipeline, config.parallel.virtual_pipeline
    if virtual == 1:
        return min(micro_batches, pipeline - stage)
    return min(micro_batches * virtual, 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1)


def stage_bytes(config: Config, stage: Stage, micro_batches: int, recompute: str | None = None) -> int:
    """Kept by one rank of a stage when the most passes are in flight.

    Beyond the layers: a table of rotary angles (e T d) for each pass, and on the last stage the input of the final
    norm with its scale, for the one micro-batch that is there. What is recomputed comes on top for one layer at a
    time: see `memory.working_bytes`.
    """
    passes = passes_in_flight(config, stage.number, micro_batches)
    table = element_bytes(config) * micro_batch_tokens(config) * config.model.head_dim
    kept = passes * (stage.chunks[0] * layer_bytes(config, recompute) + table)
    if stage.head:
        shared = config.parallel.tensor if config.parallel.sequence else 1
        kept += residual_bytes(config) + _FP32 * micro_batch_tokens(config) // shared
    return kept
