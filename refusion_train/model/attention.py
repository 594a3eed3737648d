"""Attention that never crosses a document, whatever the row holds: the one place where a kernel is chosen.

Rows of a micro-batch lie behind each other, so a batch is one run of `tokens` and a document is a range of it. The
ranges travel as an int32 tensor of cumulative starts in the place of megatron-core's attention mask: as an argument,
so that recomputation and interleaved pipelines, which replay micro-batches in another order, see the right one.

Kernels (`REFUSION_ATTENTION`, default `auto`):
- `loop`: scaled_dot_product_attention document by document; the CPU's, and the fallback for float32 on a GPU. On CPU a
  dense mask or jagged tensors cost 5 times as much or have no kernel.
- `varlen`: torch's variable-length flash attention (torch 2.10 or later); the default for bf16 on a GPU.
- `flash_attn`: the package of that name, if it is installed and asked for.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from refusion_train.errors import ConfigError
from refusion_train.model.mcore import AttnMaskType, SelfAttention, TransformerConfig, tensor_parallel
from refusion_train.model.rotary import rotate

# query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim], boundaries int32 [documents + 1],
# longest document, causal -> [tokens, heads, head_dim]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, bool], torch.Tensor]


class PackedSelfAttention(SelfAttention):
    """megatron-core's self attention with documents: its matrices and norms, our order of work between them.

    Works on [tokens, 1, hidden]; `attention_mask` holds document boundaries, `rotary_pos_emb` a `rotary_table`.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        rotary_pos_emb: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        assert rotary_pos_emb is not None, "the table of rotary angles is missing"
        mixed, _ = cast(torch.nn.Module, self.linear_qkv)(hidden_states)
        if self.checkpoint_core_attention and self.training and torch.is_grad_enabled():
            attended = tensor_parallel.checkpoint(self._attend, False, mixed, rotary_pos_emb, attention_mask)
        else:
            attended = self._attend(mixed, rotary_pos_emb, attention_mask)
        output, _ = self.linear_proj(attended)
        return output, None

    def _attend(self, mixed: torch.Tensor, table: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
        """[tokens, 1, (heads + 2 kv_heads) * head_dim] of this rank -> [tokens, 1, heads * head_dim]."""
        tokens, groups, head_dim = mixed.shape[0], self.num_query_groups_per_partition, self.key_hidden_size
        queries = self.num_attention_heads_per_partition // groups
        query, key, value = mixed.view(tokens, groups, queries + 2, head_dim).split([queries, 1, 1], dim=2)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query = rotate(query.reshape(tokens, groups * queries, head_dim), table)
        key = rotate(key.reshape(tokens, groups, head_dim), table)
        attended = cast(torch.nn.Module, self.core_attention)(query, key, value.squeeze(2), boundaries)
        return attended.reshape(tokens, 1, groups * queries * head_dim)


class DocumentAttention(torch.nn.Module):
    """The core attention of a layer: softmax(q k / sqrt(head_dim)) v within each document.

    Causal in physical order, or over the whole document if the layer was described with `AttnMaskType.no_mask`.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, max_length: int, **_: Any
    ) -> None:
        super().__init__()
        self.causal = attn_mask_type == AttnMaskType.causal
        self.max_length = max_length

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor
    ) -> torch.Tensor:
        kernel = select_kernel(query.device, query.dtype)
        return kernel(query, key, value, boundaries, self.max_length, self.causal)


def select_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel for tensors of this kind. Raises ConfigError if `REFUSION_ATTENTION` asks for what cannot be."""
    wish = os.environ.get("REFUSION_ATTENTION", "auto")
    if wish not in ("auto", "loop", "varlen", "flash_attn"):
        raise ConfigError(f"REFUSION_ATTENTION={wish} is not one of auto, loop, varlen, flash_attn")
    flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if wish in ("varlen", "flash_attn") and not flash:
        raise ConfigError(f"REFUSION_ATTENTION={wish} needs a GPU and train.precision=bf16; use auto or loop")
    if wish == "varlen" and not _has_varlen():
        raise ConfigError("REFUSION_ATTENTION=varlen needs torch 2.10 or later; use auto or loop")
    if wish == "flash_attn":
        return _flash_attn
    return _varlen if flash and wish != "loop" and _has_varlen() else _loop


@functools.cache
def _has_varlen() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def _loop(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, _max: int, causal: bool
) -> torch.Tensor:
    """Document by document; neighbours of equal length go as one batch, which costs no copy."""
    runs = _runs(boundaries.tolist())
    sizes = [count * length for count, length in runs]
    shared = query.shape[1] != key.shape[1]
    outputs = []
    for (count, length), *parts in zip(
        runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True
    ):  # one range of tokens of each
        q, k, v = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in parts)
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
        outputs.append(out.transpose(1, 2).reshape(count * length, *query.shape[1:]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _runs(boundaries: list[int]) -> list[tuple[int, int]]:
    """(count, length) of neighbouring documents of equal length, in order; empty documents are left out."""
    runs: list[tuple[int, int]] = []
    for start, stop in itertools.pairwise(boundaries):
        length = stop - start
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        elif length:
            runs.append((1, length))
    return runs


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, longest: int, causal: bool
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options = _varlen_options(varlen_attn, causal)
    if "enable_gqa" not in options:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    out = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)
    assert isinstance(out, torch.Tensor), "varlen_attn returned more than the attention"
    return out


@functools.cache
def _varlen_options(function: Callable[..., Any], causal: bool) -> dict[str, Any]:
    """How this version of torch is told the mask: 2.10 by a flag, later ones by a window of keys around the query."""
    known = inspect.signature(function).parameters
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
    if "window_size" in known:
        return {**options, "window_size": (-1, 0) if causal else (-1, -1)}
    return {**options, "is_causal": causal}


def _flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: torch.Tensor, longest: int, causal: bool
) -> torch.Tensor:
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError:
        raise ConfigError(
            "REFUSION_ATTENTION=flash_attn needs the package flash-attn; install it or use auto"
        ) from None
    return flash_attn_varlen_func(query, key, value, boundaries, boundaries, longest, longest, causal=causal)
