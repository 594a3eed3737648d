"""Attention within documents: the loop against dense masks, and the choice of a kernel."""

from __future__ import annotations

import pytest
import torch

from refusion_train.errors import ConfigError
from refusion_train.model.attention import _loop, _runs, select_kernel

CPU = torch.device("cpu")


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: list[int], causal: bool) -> torch.Tensor:
    """Softmax attention with one mask over all tokens, heads repeated by hand."""
    tokens, heads, head_dim = q.shape
    owner = torch.bucketize(torch.arange(tokens), torch.tensor(boundaries[1:]), right=True)
    allowed = owner[:, None] == owner[None, :]
    if causal:
        allowed &= torch.ones(tokens, tokens).tril().bool()
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "boundaries", [[0, 40], [0, 1, 2, 20, 40], [0, 8, 16, 24, 40], [0, 0, 13, 13, 40], [0, 10, 20, 30, 40]]
)
def test_loop_is_dense_attention_with_a_mask(boundaries: list[int], kv_heads: int, causal: bool) -> None:
    mixed = torch.randn(40, 4 + 2 * kv_heads, 8, requires_grad=True)  # strided views, as in a layer
    q, k, v = mixed.split([4, kv_heads, kv_heads], dim=1)
    out = _loop(q, k, v, torch.tensor(boundaries, dtype=torch.int32), 40, causal)
    wanted = dense(q, k, v, boundaries, causal)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, mixed, grad)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, mixed, grad), atol=1e-5, rtol=1e-5)


def test_neighbours_of_equal_length_are_one_batch() -> None:
    assert _runs([0, 8, 16, 24, 40]) == [(3, 8), (1, 16)]
    assert _runs([0, 0, 5, 5, 10, 11]) == [(2, 5), (1, 1)]


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.delenv("REFUSION_ATTENTION", raising=False)
    assert select_kernel(CPU, torch.float32).__name__ == "_loop"
    assert select_kernel(CPU, torch.bfloat16).__name__ == "_loop"
    assert select_kernel(cuda, torch.float32).__name__ == "_loop"
    assert select_kernel(cuda, torch.bfloat16).__name__ == "_varlen"
    monkeypatch.setenv("REFUSION_ATTENTION", "flash_attn")
    assert select_kernel(cuda, torch.bfloat16).__name__ == "_flash_attn"
    with pytest.raises(ConfigError, match="needs a GPU"):
        select_kernel(CPU, torch.float32)
    monkeypatch.setenv("REFUSION_ATTENTION", "loop")
    assert select_kernel(cuda, torch.bfloat16).__name__ == "_loop"
    monkeypatch.setenv("REFUSION_ATTENTION", "flash")
    with pytest.raises(ConfigError, match="not one of"):
        select_kernel(CPU, torch.float32)


@pytest.mark.parametrize("modern", [True, False], ids=["window", "is_causal"])
@pytest.mark.parametrize("causal", [True, False])
def test_varlen_is_asked_for_the_same_mask_in_both_of_its_forms(
    monkeypatch: pytest.MonkeyPatch, modern: bool, causal: bool
) -> None:
    """The kernel needs a GPU; here a stand-in with each signature checks what it is told."""
    from torch.nn.attention import varlen

    from refusion_train.model.attention import _varlen

    def by_window(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa and cu_q is cu_k and max_q == max_k == 16
        assert window_size[0] == -1 and window_size[1] in (0, -1)
        return dense(q, k, v, cu_q.tolist(), causal=window_size[1] == 0)

    def by_flag(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        assert q.shape == k.shape == v.shape, "this version wants as many heads everywhere"
        return dense(q, k, v, cu_q.tolist(), is_causal)

    monkeypatch.setattr(varlen, "varlen_attn", by_window if modern else by_flag)
    q, k, v = torch.randn(20, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    boundaries = torch.tensor([0, 4, 20], dtype=torch.int32)
    torch.testing.assert_close(
        _varlen(q, k, v, boundaries, 16, causal), _loop(q, k, v, boundaries, 16, causal), atol=1e-5, rtol=1e-5
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [True, False])
def test_kernel_of_the_gpu_agrees_with_the_loop(causal: bool) -> None:
    from refusion_train.model.attention import _varlen

    boundaries = torch.tensor([0, 100, 101, 700, 1024], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(1024, n, 128, device="cuda", requires_grad=True) for n in (16, 8, 8))
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    wanted, out = _loop(q, k, v, boundaries, 1024, causal), _varlen(*low, boundaries, 1024, causal)
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)
    grad = torch.randn_like(wanted)
    got = torch.autograd.grad(out, low, grad.bfloat16())
    for ours, exact in zip(got, torch.autograd.grad(wanted, (q, k, v), grad), strict=True):
        torch.testing.assert_close(ours.float(), exact, atol=6e-2, rtol=5e-2)
