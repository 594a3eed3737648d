"""Hand-written gradients against finite differences and torch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from refusion_train.model import functional


@pytest.mark.parametrize("shape", [(5, 1, 16), (3, 2, 4, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]].requires_grad_()  # not contiguous
    weight = torch.randn(shape[-1], requires_grad=True)
    ours = functional.rms_norm(x, weight, 1e-3)
    torch.testing.assert_close(ours, F.rms_norm(x, weight.shape, weight, 1e-3))
    grad = torch.randn(shape)
    got = torch.autograd.grad(ours, (x, weight), grad)
    wanted = torch.autograd.grad(F.rms_norm(x, weight.shape, weight, 1e-3), (x, weight), grad)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_rms_norm_of_zeros_and_of_nothing() -> None:
    weight = torch.randn(8, requires_grad=True)
    for rows in (0, 2):
        x = torch.zeros(rows, 8, requires_grad=True)
        out = functional.rms_norm(x, weight, 1e-6)
        out.sum().backward()
        assert not out.any() and x.grad is not None and x.grad.isfinite().all()


def test_rms_norm_in_bf16_keeps_statistics_in_float32() -> None:
    x, weight = torch.randn(4, 1024, dtype=torch.bfloat16), torch.ones(1024, dtype=torch.bfloat16)
    exact = functional.rms_norm(x.float(), weight.float(), 1e-6)
    torch.testing.assert_close(functional.rms_norm(x, weight, 1e-6).float(), exact, atol=0, rtol=1e-2)


def test_swiglu() -> None:
    joint = torch.randn(3, 1, 12, dtype=torch.float64, requires_grad=True)
    gate, up = joint.chunk(2, dim=-1)
    torch.testing.assert_close(functional.swiglu(joint), F.silu(gate) * up)
    assert torch.autograd.gradcheck(functional.swiglu, (joint,))
