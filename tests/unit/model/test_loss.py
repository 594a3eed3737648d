"""The head and its loss against float64 cross entropy, and what it must never allocate."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refusion_train.model import loss as loss_module
from refusion_train.model.loss import STAT_INDEX, STAT_NAMES, LanguageModelHead, VocabularyPart, loss_statistics
from refusion_train.objective import CLEAN, MASKED

ROWS, HIDDEN, VOCABULARY, PADDED = 37, 12, 50, 64


def make_head(dtype: torch.dtype = torch.float32) -> LanguageModelHead:
    """50 of 64 rows mean something; the padding is large so that it would show."""
    weight = torch.randn(PADDED, HIDDEN)
    weight[VOCABULARY:] *= 100
    return LanguageModelHead(torch.nn.Parameter(weight.to(dtype)), VocabularyPart(0, VOCABULARY, None))


def make_targets(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(rows, HIDDEN, requires_grad=True)
    weights = torch.rand(rows)
    weights[: rows // 8] = 0
    return hidden, torch.randint(0, VOCABULARY, (rows,)), weights


@pytest.mark.parametrize("chunk", [1, 16, 1 << 20])
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["usual", "beyond float32 exponentials"])
def test_loss_and_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int, scale: float) -> None:
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *_: chunk)
    head, (hidden, labels, weights) = make_head(), make_targets()
    loss, entropy = head(hidden * scale, labels, weights)
    (loss * 0.7).backward()

    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = head.weight.detach()[:VOCABULARY].double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact_hidden * scale @ exact_weight.t(), labels, reduction="none")
    exact = (wanted * weights).sum()
    (exact * 0.7).backward()
    assert loss.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
    torch.testing.assert_close(entropy.double(), wanted.detach(), atol=2e-6 * scale, rtol=1e-5)
    torch.testing.assert_close(loss.double(), exact.detach(), atol=1e-5 * scale, rtol=1e-5)
    assert hidden.grad is not None and head.weight.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, atol=2e-5 * scale**2, rtol=1e-4)
    torch.testing.assert_close(
        head.weight.grad[:VOCABULARY].double(), exact_weight.grad, atol=2e-5 * scale**2, rtol=1e-4
    )
    assert not head.weight.grad[VOCABULARY:].any(), "padding has a gradient"


def test_bf16_sums_the_weight_gradient_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 chunks of one row: a bf16 sum would stop growing after 256 of them."""
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *_: 1)
    head = make_head(torch.bfloat16)
    hidden = torch.ones(600, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    loss, _ = head(hidden, torch.zeros(600, dtype=torch.int64), torch.ones(600))
    loss.backward()
    grad = head.weight.grad
    assert grad is not None and grad.dtype == torch.bfloat16
    probability = (torch.ones(HIDDEN).bfloat16() @ head.weight.detach()[:VOCABULARY].t()).float().softmax(0)[0]
    torch.testing.assert_close(grad[0].float(), torch.full((HIDDEN,), -600 * (1 - probability)), rtol=2e-2, atol=0)


def test_without_rows_the_loss_is_zero_with_a_graph() -> None:
    head, (hidden, labels, weights) = make_head(), make_targets(0)
    loss, entropy = head(hidden, labels, weights)
    assert loss.item() == 0 and entropy.shape == (0,)
    loss.backward()
    assert head.weight.grad is not None and not head.weight.grad.any()
    assert hidden.grad is not None and hidden.grad.shape == (0, HIDDEN)


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    head, (hidden, labels, weights) = make_head(), make_targets()
    with_gradients, _ = head(hidden, labels, weights)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(loss_module, "_logit_gradient", refuse)
    with torch.no_grad():
        loss, _ = head(hidden, labels, weights)
    assert torch.equal(loss, with_gradients)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_full_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *_: 16)
    head, (hidden, labels, weights) = make_head(), make_targets(400)
    with _Largest() as largest:
        loss, _ = head(hidden, labels, weights)
        loss.backward()
    assert largest.elements < 400 * VOCABULARY / 4
    with _Largest() as largest:
        head.logits(hidden)
    assert largest.elements == 400 * VOCABULARY, "the measurement does not see full logits"


def test_chunks_hold_a_fixed_number_of_bytes() -> None:
    assert loss_module.chunk_rows(4096, torch.device("cpu")) * 4096 * 4 == loss_module.CHUNK_BYTES["cpu"]
    assert loss_module.chunk_rows(151_936, torch.device("cuda")) * 151_936 * 4 <= loss_module.CHUNK_BYTES["cuda"]
    assert loss_module.chunk_rows(10**9, torch.device("cpu")) == 16


def test_statistics() -> None:
    entropy = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    weights = torch.tensor([0.5, 0.5, 0.25, 0.25, 1.0])
    kinds = torch.tensor([CLEAN, MASKED, CLEAN, MASKED, MASKED], dtype=torch.uint8)
    buckets = torch.tensor([0, 9, 0, 0, 9], dtype=torch.uint8)
    stats = loss_statistics((entropy * weights).sum(), entropy, weights, kinds, buckets)
    got = {name: stats[index].item() for name, index in STAT_INDEX.items() if stats[index]}
    assert stats.dtype == torch.float64 and stats.shape == (len(STAT_NAMES),)
    assert got == {
        "loss": 20.5, "ce_clean": 5, "ce_masked": 26, "weighted_clean": 1.5, "weighted_masked": 19, "count_clean": 2,
        "count_masked": 3, "bucket_ce_0": 8, "bucket_ce_9": 18, "bucket_count_0": 1, "bucket_count_9": 2,
    }  # fmt: skip
