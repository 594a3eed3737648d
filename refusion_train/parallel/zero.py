"""What we read and set inside DeepSpeed's ZeRO optimizers: the only file that touches their private attributes.

The rest of the package sees gradients by parameter, and the parts of masters and moments that this rank owns. All of
it is true of DeepSpeed 0.19; each name is looked up when the view is made, so that another version fails at the start
and not after hours. Why we reach inside at all:

- the gradient norm and its finiteness are computed once, over all groups and all kinds of ranks, with one collective
  and one wait (DeepSpeed: two collectives per parameter group, and a second pass for overflow), and then handed over;
- fp32 accumulation of bf16 gradients is refused by DeepSpeed's configuration for stage 1 together with coalesced
  reduction, and rounded through bf16 at stage 2, although its own fp32 path does both;
- checkpoints store each rank's own part without gathering whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OwnedRange:
    """The part of one parameter of this rank whose optimizer state lives here: flat elements start:start + count.

    state: views, float32 [count], of `master`, `exp_avg` and `exp_avg_sq`; what is written into them is trained on
    (after `ZeroView.publish`).
    """

    parameter: torch.nn.Parameter
    start: int
    count: int
    state: dict[str, torch.Tensor]


class ZeroView:
    """Common to all stages; `view_of` gives the one for an optimizer."""

    _NAMES: tuple[str, ...] = ()

    def __init__(self, zero: Any) -> None:
        missing = [name for name in ("averaged_gradients", "optimizer", *self._NAMES) if not hasattr(zero, name)]
        assert not missing, f"this DeepSpeed's {type(zero).__name__} lacks {', '.join(missing)}; use 0.19"
        self._zero = zero
        self._norm = torch.zeros(())

    def accumulate_in_float32(self) -> None:
        """Keep and reduce gradients of bf16 parameters in float32. Once, before the first backward pass."""
        raise NotImplementedError

    def before_reduction(self) -> None:
        """Put gradients where the coalesced reduction looks for them. Within the coalescing block, at its end."""

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """This rank's part of every averaged gradient, after the reduction; padding is 0."""
        raise NotImplementedError

    def set_norm(self, norm: float) -> None:
        """The norm by which the next step clips; when it is not finite that step is skipped and gradients dropped."""
        self._norm = torch.tensor(norm if math.isfinite(norm) else math.inf, dtype=torch.float32)

    def set_learning_rate(self, rate: float) -> None:
        """For all parameter groups."""
        for group in self._zero.param_groups:
            group["lr"] = rate

    def owned(self) -> Iterator[OwnedRange]:
        """Everything whose optimizer state lives on this rank. Moments are made if there are none yet."""
        raise NotImplementedError

    def publish(self) -> None:
        """Make the weights that the model computes with from the masters, after these were changed. Collective."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """Optimizer steps taken so far, as Adam's bias correction counts them."""
        steps = {int(state["step"]) for state in self._zero.optimizer.state.values() if "step" in state}
        assert len(steps) <= 1, f"parameter groups have taken different numbers of steps: {sorted(steps)}"
        return steps.pop() if steps else 0

    @step.setter
    def step(self, count: int) -> None:
        self._ensure_moments()
        for state in self._zero.optimizer.state.values():
            state["step"].fill_(count)

    def _flats(self) -> list[torch.Tensor]:
        """The flat masters that the inner optimizer works on."""
        raise NotImplementedError

    def _ensure_moments(self) -> None:
        """Make the state that Adam itself would make at its first step."""
        fused = bool(self._zero.optimizer.defaults.get("fused"))
        for flat in self._flats():
            if not self._zero.optimizer.state.get(flat):
                device = flat.device if fused else torch.device("cpu")
                self._zero.optimizer.state[flat] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    **{name: torch.zeros_like(flat.data) for name in MOMENTS},
                }

    def _state(self, flat: torch.Tensor, start: int, count: int) -> dict[str, torch.Tensor]:
        whole = {"master": flat.detach(), **{name: self._zero.optimizer.state[flat][name] for name in MOMENTS}}
        return {name: tensor.narrow(0, start, count) for name, tensor in whole.items()}


class _Stage12(ZeroView):
    """Parameters of a group lie behind each other in one flat tensor, of which each rank owns an equal stretch."""

    _NAMES = (
        "bit16_groups", "params_in_partition", "single_partition_of_fp32_groups", "scaled_global_norm", "has_overflow",
        "use_grad_accum_attribute", "gradient_accumulation_dtype", "fill_grad_accum_attribute", "update_lp_params",
    )  # fmt: skip

    def __init__(self, zero: Any) -> None:
        super().__init__(zero)
        zero.scaled_global_norm = lambda *_args, **_kwargs: self._norm
        zero.has_overflow = lambda *_args, **_kwargs: not math.isfinite(self._norm.item())

    def accumulate_in_float32(self) -> None:
        self._zero.gradient_accumulation_dtype = torch.float32
        self._zero.use_separate_grad_accum = True
        self._zero.use_grad_accum_attribute = True

    def before_reduction(self) -> None:
        if self._zero.use_grad_accum_attribute:
            self._zero.fill_grad_accum_attribute()

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for index, parameters in enumerate(self._zero.params_in_partition):
            parts = [part for part in self._zero.averaged_gradients[index] if not getattr(part, "_zero_padding", False)]
            assert len(parts) >= len(parameters), f"group {index}: {len(parts)} gradients, {len(parameters)} parameters"
            yield from zip(parameters, parts, strict=False)  # what is left over is padding of zeros

    def owned(self) -> Iterator[OwnedRange]:
        self._ensure_moments()
        for index, parameters in enumerate(self._zero.bit16_groups):
            flat = self._zero.single_partition_of_fp32_groups[index]
            for parameter in parameters:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield OwnedRange(parameter, here.start, here.numel, self._state(flat, there.start, there.numel))

    def publish(self) -> None:
        self._zero.update_lp_params()

    def _flats(self) -> list[torch.Tensor]:
        return self._zero.single_partition_of_fp32_groups


class _Stage3(ZeroView):
    """Every parameter is cut into equal stretches, the last ones padded, and a rank keeps one of each."""

    _NAMES = (
        "fp16_groups", "fp32_partitioned_groups_flat", "grad_position", "get_param_id", "persistent_parameters",
        "_get_norm_groups", "_partition_all_parameters", "_reassign_or_swap_out_partitioned_parameters",
    )  # fmt: skip

    def __init__(self, zero: Any) -> None:
        super().__init__(zero)
        zero._get_norm_groups = lambda: [self._norm]

    def accumulate_in_float32(self) -> None:
        assert self._zero.gradient_accumulation_dtype == torch.float32, "stage 3 takes this from its configuration"

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for index, parameters in enumerate(self._zero.fp16_groups):
            yield from zip(parameters, self._zero.averaged_gradients[index], strict=True)

    def owned(self) -> Iterator[OwnedRange]:
        self._ensure_moments()
        rank = dist.get_rank(self._zero.dp_process_group)
        for parameter in (parameter for group in self._zero.fp16_groups for parameter in group):
            index, position, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
            start = min(rank * size, parameter.ds_numel)
            count = min(size, parameter.ds_numel - start)
            if count:
                flat = self._zero.fp32_partitioned_groups_flat[index]
                yield OwnedRange(parameter, start, count, self._state(flat, position, count))

    def publish(self) -> None:
        self._zero._partition_all_parameters()
        for index in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        if self._zero.persistent_parameters:
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)

    def _flats(self) -> list[torch.Tensor]:
        return self._zero.fp32_partitioned_groups_flat


def view_of(zero: Any, stage: int) -> ZeroView:
    """The view of DeepSpeed's optimizer of a ZeRO stage (1, 2 or 3)."""
    return _Stage3(zero) if stage == 3 else _Stage12(zero)
