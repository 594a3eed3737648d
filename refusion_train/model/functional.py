"""Elementwise operations of a layer with hand-written gradients.

Composed of torch's operations they read and write the activations several times more often, and keep more of them for
the backward pass; on a CPU that is a noticeable part of a training step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467); statistics in float32."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return F.rms_norm(x, weight.shape, weight, eps)  # one kernel on a GPU


class _RMSNorm(torch.autograd.Function):
    """y = n w with n = x r, r = 1 / sqrt(mean(x^2) + eps); dx = r (dy w - n mean(dy w n)), dw = sum(dy n)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        size = weight.shape[0]
        product = (grads[0] * normed).view(-1, size)
        grad_weight = product.sum(dim=0)
        mean = (product @ weight).div_(size).view(scale.shape)
        grad = grads[0] * weight
        return grad.addcmul_(normed, mean, value=-1).mul_(scale), grad_weight, None


def swiglu(joint: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension (arXiv 2002.05202)."""
    return _SwiGLU.apply(joint)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: torch.Tensor) -> torch.Tensor:
        gate, up = joint.chunk(2, dim=-1)
        activated = F.silu(gate)
        # The exponential is dear on a CPU; on a GPU memory is, and it is computed again.
        ctx.save_for_backward(joint, activated if joint.device.type == "cpu" else None)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        joint, activated = ctx.saved_tensors
        gate, up = joint.chunk(2, dim=-1)
        grad = torch.empty_like(joint)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate) if activated is None else activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad
