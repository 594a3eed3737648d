"""Rotary embedding: against its definition, and its hand-written gradient."""

from __future__ import annotations

import math

import torch

from refusion_train.model.rotary import rotary_table, rotate


def test_rotation_by_position() -> None:
    """Pair (i, i + half) turns by position * theta^(-2 i / head_dim)."""
    positions, head_dim, theta = torch.tensor([7, 0, 123]), 8, 10_000.0
    x = torch.randn(3, 2, head_dim)
    out = rotate(x, rotary_table(positions, head_dim, theta, torch.float32))
    for token, position in enumerate(positions.tolist()):
        for i in range(head_dim // 2):
            angle = position * theta ** (-2 * i / head_dim)
            first, second = x[token, :, i], x[token, :, i + head_dim // 2]
            turned = first * math.cos(angle) - second * math.sin(angle)
            torch.testing.assert_close(out[token, :, i], turned, atol=1e-4, rtol=0)
            turned = second * math.cos(angle) + first * math.sin(angle)
            torch.testing.assert_close(out[token, :, i + head_dim // 2], turned, atol=1e-4, rtol=0)
    assert torch.equal(out[1], x[1])


def test_gradient() -> None:
    table = rotary_table(torch.tensor([3, 1, 60, 2]), 6, 100.0, torch.float64)
    base = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x[:, 1:4], table), (base,))


def test_angles_are_computed_in_float32() -> None:
    """At position 30,000 bf16 angles would be off by whole turns."""
    positions = torch.tensor([30_001])
    table = rotary_table(positions, 4, 10_000.0, torch.bfloat16)
    exact = torch.tensor([math.cos(30_001.0), math.cos(300.01)])
    torch.testing.assert_close(table[0].flatten().float(), exact, atol=6e-3, rtol=0)
