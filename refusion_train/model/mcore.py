"""What this package takes from megatron-core, and what differs between its versions 0.16 to 0.19, in one file.

The other files of the model import megatron-core's names from here, and describe their configuration with
`transformer_config`, so that a new version is met in one place.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from refusion_train.config import Config

__all__ = [
    "AttnMaskType",
    "ColumnParallelLinear",
    "LinearLayers",
    "ModuleSpec",
    "RowParallelLinear",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "TransformerBlock",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "VocabParallelEmbedding",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "linear_layers",
    "parameter_dtype",
    "recomputed_output",
    "tensor_group",
    "tensor_parallel",
    "transformer_config",
]

# Column-parallel, row-parallel.
LinearLayers = tuple[type[ColumnParallelLinear], type[RowParallelLinear]]

# selective: all between the joint query-key-value matrix and the output matrix of attention, and the product of the
# gated activation (see layers.SwiGLU), are computed again; full: every layer from its input.
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def parameter_dtype(config: Config) -> torch.dtype:
    """Type of the weights and activations; fp32 masters of bf16 weights live in the optimizer."""
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def tensor_group() -> dist.ProcessGroup:
    """The ranks that share each matrix with this one; a group of one without tensor parallelism."""
    group = parallel_state.get_tensor_model_parallel_group()
    assert isinstance(group, dist.ProcessGroup), f"megatron-core gave {group!r} where a process group belongs"
    return group


def recomputed_output() -> tensor_parallel.CheckpointWithoutOutput:
    """A function call whose output is dropped once it is used, and computed again in the backward pass.

    All versions take any `fp8` but None for a wish for it, which fails without TransformerEngine.
    """
    return tensor_parallel.CheckpointWithoutOutput(fp8=None)  # type: ignore[arg-type]


def linear_layers(config: Config) -> LinearLayers:
    """The classes of column-parallel and row-parallel matrices that `parallel.linear` names; the same parameters."""
    if config.parallel.linear == "torch":
        return ColumnParallelLinear, RowParallelLinear
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    return TEColumnParallelLinear, TERowParallelLinear  # type: ignore[return-value]  # made and called like these


def _ends(config: Config) -> dict[str, int]:
    """Layers of the first and the last stage, where they are given."""
    parallel = config.parallel
    ends = {
        "num_layers_in_first_pipeline_stage": parallel.pipeline_first,
        "num_layers_in_last_pipeline_stage": parallel.pipeline_last,
    }
    if parallel.pipeline == 2 and None not in ends.values():
        # The one follows from the other; told both, megatron-core divides by the 0 stages between (interleaved).
        del ends["num_layers_in_last_pipeline_stage"]
    return {name: layers for name, layers in ends.items() if layers is not None}


def transformer_config(config: Config) -> TransformerConfig:
    """megatron-core's description of the model and its layout.

    The same object also steers the pipeline schedules, whose communication defaults are silently wrong on gloo for
    interleaved stages: there `batch_p2p_comm` and `deallocate_pipeline_outputs` are off.
    """
    model, parallel = config.model, config.parallel
    dtype = parameter_dtype(config)
    on_cuda = torch.cuda.is_available()
    interleaved = parallel.virtual_pipeline > 1
    with warnings.catch_warnings():
        # Our attention is not TransformerEngine's, to which this advice on recomputation refers.
        warnings.filterwarnings("ignore", message="If you are using transformer_engine")
        return TransformerConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_heads,
            num_query_groups=model.num_kv_heads,
            kv_channels=model.head_dim,
            ffn_hidden_size=model.ffn_size,
            layernorm_epsilon=model.norm_eps,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            qk_layernorm=model.qk_norm,
            add_bias_linear=False,
            add_qkv_bias=model.qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor,
            sequence_parallel=parallel.sequence,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
            **_ends(config),
            overlap_p2p_comm=interleaved and on_cuda,
            batch_p2p_comm=not interleaved,
            deallocate_pipeline_outputs=on_cuda or not interleaved,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            # Weights are drawn by name, for the whole tensor, after construction: see slot_model.initialise.
            perform_initialization=False,
            use_cpu_initialization=not on_cuda,
            # Every fusion needs Apex, TransformerEngine or a compiler on the training machine.
            apply_rope_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            cuda_graph_scope=[],
            **_RECOMPUTE[config.train.recompute],
        )
