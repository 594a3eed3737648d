"""The parts of a layer that megatron-core has only in forms that do not fit, and the description of a whole layer.

Its own RMSNorm without TransformerEngine or Apex refuses sequence parallelism; its dropout-and-add and its gated
activation copy more than is needed when there is neither dropout nor bias.
"""

from __future__ import annotations

from typing import Any

import torch

from refusion_train.model.attention import DocumentAttention, PackedSelfAttention
from refusion_train.model.functional import rms_norm, swiglu
from refusion_train.model.mcore import (
    AttnMaskType,
    ColumnParallelLinear,
    LinearLayers,
    ModuleSpec,
    RowParallelLinear,
    SelfAttentionSubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    recomputed_output,
    tensor_group,
)


class RMSNorm(torch.nn.Module):
    """`functional.rms_norm` with its weight, which megatron-core's layers build by this signature."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # With sequence parallelism a rank sees only its rows, so its gradient is a part of the whole.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(torch.nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are the halves of one column-parallel matrix.

    With selective recomputation the product is dropped after use and made again from the halves.
    """

    # Classes of the two matrices; megatron-core's layer takes a feed-forward part as a class without arguments.
    column: type[ColumnParallelLinear]
    row: type[RowParallelLinear]

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        assert config.ffn_hidden_size is not None, "the width of the feed-forward layer is missing"
        assert config.init_method is not None and config.output_layer_init_method is not None, "no init methods"
        self.recompute = config.recompute_granularity == "selective"
        group = tensor_group()
        self.linear_fc1 = self.column(
            config.hidden_size, 2 * config.ffn_hidden_size, config=config, init_method=config.init_method,
            bias=False, gather_output=False, skip_bias_add=False, is_expert=False, tp_group=group,
            tp_comm_buffer_name="fc1",
        )  # fmt: skip
        self.linear_fc2 = self.row(
            config.ffn_hidden_size, config.hidden_size, config=config, init_method=config.output_layer_init_method,
            bias=False, input_is_parallel=True, skip_bias_add=True, is_expert=False, tp_group=group,
            tp_comm_buffer_name="fc2",
        )  # fmt: skip

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        joint, _ = self.linear_fc1(hidden)
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return self.linear_fc2(swiglu(joint))[0], None
        product = recomputed_output()
        output, _ = self.linear_fc2(product.checkpoint(swiglu, joint))
        product.discard_output_and_register_recompute(output)
        return output, None


def residual_add(_training: bool, _fused: bool) -> Any:
    """What takes the place of megatron-core's bias-dropout-add: there is no bias and no dropout."""
    return _add


def _add(output_and_bias: tuple[torch.Tensor, None], residual: torch.Tensor, _probability: float) -> torch.Tensor:
    return residual + output_and_bias[0]


def block_submodules(
    config: TransformerConfig,
    layers: int,
    max_length: int,
    bidirectional: bool,
    linear: LinearLayers,
) -> TransformerBlockSubmodules:
    """Description of `layers` equal layers and the final norm.

    max_length: no document is longer, in tokens; linear: see `mcore.linear_layers`.
    """
    column, row = linear
    mask = AttnMaskType.no_mask if bidirectional else AttnMaskType.causal
    norm = RMSNorm if config.qk_layernorm else None
    attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=ModuleSpec(module=DocumentAttention, params={"max_length": max_length}),
            linear_proj=row,
            q_layernorm=norm,  # type: ignore[arg-type]
            k_layernorm=norm,  # type: ignore[arg-type]
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=residual_add,  # type: ignore[arg-type]
            pre_mlp_layernorm=RMSNorm,
            mlp=type("SwiGLU", (SwiGLU,), {"column": column, "row": row}),
            mlp_bda=residual_add,  # type: ignore[arg-type]
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)  # type: ignore[arg-type]
