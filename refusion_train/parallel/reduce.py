"""Sums over ranks that neither megatron-core's layers nor ZeRO make: partial gradients, and the global norm.

ZeRO averages gradients over data-parallel ranks and knows nothing of the model's pieces. Where each tensor-parallel
rank has a part of a gradient (q/k norms; with sequence parallelism every norm), and where the first and the last
stage hold copies of the tied embedding, the parts must be added first: once per step, while the gradients still lie
whole on the parameters, or, where ZeRO reduces during the backward pass, just before it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from refusion_train.parallel.groups import Groups


class PartialGradients:
    """The parameters of a rank whose gradients are parts of a sum over other ranks.

    They are marked by the model: `tensor_partial` (sum over tensor-parallel ranks), `shared_embedding` (sum over the
    first and the last stage). Ranks that sum together list them in the same order, that of the model.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], groups: Groups) -> None:
        parameters = list(parameters)
        self._sums: list[tuple[dist.ProcessGroup, list[torch.nn.Parameter]]] = []
        partial = [parameter for parameter in parameters if getattr(parameter, "tensor_partial", False)]
        if partial and groups.tp_size > 1:
            self._sums.append((groups.tp_group, partial))
        shared = [parameter for parameter in parameters if getattr(parameter, "shared_embedding", False)]
        if shared and groups.pp_size > 1:
            assert groups.embedding_group is not None, "a stage in the middle holds a copy of the embedding"
            self._sums.append((groups.embedding_group, shared))

    def sum(self) -> None:
        """Add up the gradients, in place, one collective per group of ranks. Every parameter has a gradient."""
        for group, parameters in self._sums:
            gradients = [_gradient(parameter) for parameter in parameters]
            if len(gradients) == 1 and gradients[0].is_contiguous():
                dist.all_reduce(gradients[0], group=group)
                continue
            joined = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(joined, group=group)
            parts = joined.split([gradient.numel() for gradient in gradients])
            for part, gradient in zip(parts, gradients, strict=True):
                gradient.copy_(part.view_as(gradient))

    def sum_in_backward(self) -> None:
        """From now on, add up each of these gradients when the backward pass has made it."""
        for group, parameters in self._sums:
            for parameter in parameters:
                parameter.register_hook(_summed_over(group))


def _summed_over(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.to(torch.float32, copy=True)
        dist.all_reduce(total, group=group)
        return total.to(gradient.dtype)

    return hook


def counted_in_norm(parameter: torch.nn.Parameter, groups: Groups) -> bool:
    """Whether this rank's gradient of a parameter enters the norm: of several copies of a parameter one does."""
    if getattr(parameter, "shared_embedding", False) and not groups.first_stage:
        return False
    return groups.tp_rank == 0 or bool(getattr(parameter, "tensor_model_parallel", False))


def squared_norm(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of all elements of float32 tensors, float64 scalar on `device`; not finite if one is not."""
    gradients = list(gradients)
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.nn.utils.get_total_norm(gradients).double().square()


def norm_and_sums(square: torch.Tensor, statistics: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The global gradient norm (inf if a gradient or a statistic of any rank is not finite), and summed statistics.

    square: this rank's share of the squared norm, float64 scalar; statistics: float64 [n], its share of them.
    One collective over all ranks and one wait for the device; every rank gets the same bits. Statistics come back on
    the CPU.
    """
    both = torch.cat((square.reshape(1), statistics))
    dist.all_reduce(both)
    both = both.cpu()
    finite = bool(torch.isfinite(both).all())
    return math.sqrt(both[0].item()) if finite else math.inf, both[1:]


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "a parameter has no gradient; see Engine, which fills missing ones with zeros"
    return parameter.grad
