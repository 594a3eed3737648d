"""Rotary position embedding (RoFormer, arXiv 2104.09864) by explicit position ids.

Tokens lie in physical order, which is not the order of their positions, so the angles are looked up by position id.
The halves are rotated against each other (not neighbouring pairs), as Qwen3 and LLaMA checkpoints expect.
"""

from __future__ import annotations

from typing import Any

import torch


def rotary_table(position_ids: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> torch.Tensor:
    """Cosine and sine of every angle: [2, tokens, 1, head_dim / 2] from positions [tokens].

    Angles are computed in float32 and only their cosine and sine are rounded to `dtype`.
    """
    device = position_ids.device
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = position_ids.float()[:, None, None] * (1.0 / theta**exponents)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate heads [tokens, heads, head_dim] (any strides) by `table` [2, tokens, 1, head_dim / 2]; contiguous."""
    return _Rotate.apply(x, table)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    """The rotation is orthogonal: its gradient is the rotation by the opposite angle, so nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table)
        return _turn(x, table[0], table[1], 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (table,) = ctx.saved_tensors
        return _turn(grads[0], table[0], table[1], -1.0), None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=direction)
    return out
