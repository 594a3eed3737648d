"""One optimizer step over all ranks: megatron-core's pipeline schedule inside DeepSpeed's ZeRO engine.

The schedule runs all micro-batches of a step; gradients that are parts of a sum are summed (`reduce`), ZeRO averages
gradients over data-parallel ranks, the global norm is taken, and AdamW updates what each rank owns. The only file that
imports DeepSpeed; `zero` knows its insides. When gradients are reduced:

- ZeRO 1, and any pipeline: once per step. They add up whole, in float32, on the parameters meanwhile
  (DeepSpeed's `coalesce_grad_reduction`). The least communication.
- ZeRO 2 and 3 without pipeline: during the backward pass of every micro-batch, so that a rank keeps only its share.

A loss is a sum with final weights over the global batch, so the gradient of a step must be the plain sum over
micro-batches and data-parallel ranks. The schedule divides by the number of micro-batches and ZeRO by the number of
ranks: the loss is multiplied by both beforehand.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from refusion_train.config import Config
from refusion_train.model.loss import STAT_NAMES
from refusion_train.parallel import cpu
from refusion_train.parallel.clock import BACKWARD, FORWARD, Clock
from refusion_train.parallel.groups import Groups
from refusion_train.parallel.reduce import PartialGradients, counted_in_norm, norm_and_sums, squared_norm
from refusion_train.parallel.zero import OwnedRange, view_of

if TYPE_CHECKING:
    from refusion_train.model.batch import DeviceBatch
    from refusion_train.model.slot_model import SlotModel

# Elements that are reduced, or gathered, together; 256 MiB in float32.
BUCKET = 1 << 26

ParamGroups = list[dict[str, Any]]
_Call = Callable[["SlotModel", "DeviceBatch"], Any]


@dataclass(frozen=True)
class StepResult:
    """What a step did. grad_norm: global, before clipping; inf if something was not finite, and then `skipped`:
    no rank changed weights, moments or step count. statistics: float64 [len(STAT_NAMES)] on the CPU, summed over all
    micro-batches and data-parallel ranks. The same on every rank. own_s: seconds of this rank's own passes (see
    `clock`)."""

    grad_norm: float
    skipped: bool
    statistics: torch.Tensor
    own_s: float


@dataclass(frozen=True)
class NamedRange:
    """Optimizer state of a part of one parameter: of chunk `chunk`, under `name` in it, `owned` (see there)."""

    chunk: SlotModel
    name: str
    owned: OwnedRange


class Engine:
    """The sharded optimizer and the schedule over this rank's chunks of the model."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        chunks: list[SlotModel],
        param_groups: ParamGroups | Callable[[list[SlotModel]], ParamGroups],
    ) -> None:
        """Takes over `chunks` (weights are broadcast from the first data-parallel rank and sharded). Collective.

        param_groups: as torch optimizers take them, over the parameters of `chunks`, with `weight_decay` each; or a
        function that makes them from the chunks.
        """
        self.config, self.groups, self.chunks = config, groups, chunks
        self._root = chunks[0] if len(chunks) == 1 else _Chunks(chunks)
        self._parameters = list(dict.fromkeys(self._root.parameters()))
        self._names = _parameter_names(chunks)
        self._partial = PartialGradients(self._parameters, groups)
        self._reduces_early = config.parallel.zero_stage > 1 and groups.pp_size == 1
        self._clock = Clock(groups.device, (FORWARD,) if self._reduces_early else (FORWARD, BACKWARD))
        self._prepare_schedule()
        param_groups = param_groups(chunks) if callable(param_groups) else param_groups
        self._deepspeed = self._start_deepspeed(param_groups)
        self._zero = view_of(self._deepspeed.optimizer, config.parallel.zero_stage)
        if config.train.precision == "bf16":
            self._zero.accumulate_in_float32()
            for parameter in self._parameters:
                parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
        if self._reduces_early:
            self._partial.sum_in_backward()
        self._statistics = self._no_statistics()

    # -------------------------------------------------------------------------------------------- one step

    def forward_backward(self, micro_batches: Sequence[DeviceBatch], forward_only: bool = False) -> torch.Tensor:
        """Run all micro-batches of a step on this data-parallel rank; leaves averaged gradients for `step`. Collective.

        micro_batches: the same number and shape on every rank; ranks of a pipeline and tensor-parallel ranks pass the
        same ones. With `forward_only`, no gradients and nothing for `step`: evaluation.
        Returns the sums of the statistics over the micro-batches, float64 [len(STAT_NAMES)] on the device, the same
        on all ranks that share the model; not summed over data-parallel ranks.
        """
        assert micro_batches, "a step needs at least one micro-batch"
        if forward_only:
            return self._evaluate(micro_batches)
        if self._reduces_early:
            self._statistics = self._run_schedule(micro_batches, self._call_and_reduce(len(micro_batches)))
        else:
            self._statistics = self._accumulate_and_reduce(micro_batches)
        return self._statistics

    def _call_and_reduce(self, count: int) -> _Call:
        """Calls the model through DeepSpeed, whose hooks then reduce gradients as the backward pass makes them."""
        remaining = count

        def call(_: SlotModel, batch: DeviceBatch) -> Any:
            nonlocal remaining
            remaining -= 1
            self._deepspeed.set_gradient_accumulation_boundary(remaining == 0)
            return self._deepspeed(batch)

        return call

    def _accumulate_and_reduce(self, micro_batches: Sequence[DeviceBatch]) -> torch.Tensor:
        with self._deepspeed.coalesce_grad_reduction():
            try:
                statistics = self._run_schedule(micro_batches)
                self._fill_missing_gradients()
                self._partial.sum()
                self._zero.before_reduction()
            except BaseException:
                # Leaving the block reduces what lies on the parameters; ranks that fail must not wait for others.
                self._drop_gradients()
                raise
        return statistics

    def step(self, lr: float) -> StepResult:
        """Clip and apply the gradients that `forward_backward` left, at learning rate `lr`. Collective.

        If a gradient or statistic of any rank is not finite, no rank changes anything but drops its gradients.
        """
        square = squared_norm(
            [part for parameter, part in self._zero.gradients() if counted_in_norm(parameter, self.groups)],
            self.groups.device,
        )
        mine = self._statistics if self.groups.last_stage and self.groups.tp_rank == 0 else self._no_statistics()
        norm, statistics = norm_and_sums(square, mine)
        own_s = self._clock.take()  # here the host has waited for the device
        self._zero.set_norm(norm)
        self._zero.set_learning_rate(lr)
        self._deepspeed.step()
        self._deepspeed.optimizer.clear_backward_seen_flag()
        self._statistics = self._no_statistics()
        return StepResult(norm, not math.isfinite(norm), statistics, own_s)

    def _evaluate(self, micro_batches: Sequence[DeviceBatch]) -> torch.Tensor:
        # Interleaved schedules want a multiple of the number of stages: repeat a batch, and do not count it.
        padded = list(micro_batches)
        if self.groups.vp_size > 1:
            padded += [padded[-1]] * (-len(padded) % self.groups.pp_size)
        self._root.eval()
        try:
            with torch.no_grad():
                return self._run_schedule(padded, forward_only=True, counted=len(micro_batches))
        finally:
            self._root.train()
            self._clock.take()

    def _run_schedule(
        self,
        micro_batches: Sequence[DeviceBatch],
        call: _Call | None = None,
        forward_only: bool = False,
        counted: int | None = None,
    ) -> torch.Tensor:
        """Statistics summed over the first `counted` micro-batches (all), on every rank of the pipeline.

        call: runs a chunk on a micro-batch (plainly).
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        scale = float(len(micro_batches) * self.groups.dp_size)

        def loss_of(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            loss, statistics = output
            return loss * scale, statistics

        def forward_step(batches: Iterator[DeviceBatch], chunk: SlotModel) -> tuple[Any, Callable[..., Any]]:
            batch = next(batches)
            return (chunk(batch) if call is None else call(chunk, batch)), loss_of

        collected = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=[*self.chunks],
            num_microbatches=len(micro_batches),
            # The model lays the rows of a micro-batch behind each other.
            seq_length=micro_batches[0].input_ids.numel(),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        statistics = torch.stack(collected[:counted]).sum(dim=0) if collected else self._no_statistics()
        if self.groups.pp_size > 1:
            last = dist.get_global_rank(self.groups.pp_group, self.groups.pp_size - 1)
            dist.broadcast(statistics, last, group=self.groups.pp_group)
        return statistics

    def _fill_missing_gradients(self) -> None:
        """Zeros where a rank's batches did not reach a parameter, so that all ranks reduce the same tensors."""
        for parameter in self._parameters:
            if parameter.grad is None:
                dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
            parameter.grad_accum = None  # type: ignore[attr-defined]

    def _no_statistics(self) -> torch.Tensor:
        return torch.zeros(len(STAT_NAMES), dtype=torch.float64, device=self.groups.device)

    # ------------------------------------------------------------------------------------------- checkpoints

    def owned(self) -> Iterator[NamedRange]:
        """Masters and moments that live on this rank, as views: every element of the model on one rank of its copies.

        (Tensor-parallel ranks each hold a copy of replicated parameters, and the last stage one of tied embeddings.)
        """
        for owned in self._zero.owned():
            chunk, name = self._names[owned.parameter]
            yield NamedRange(chunk, name, owned)

    @property
    def optimizer_steps(self) -> int:
        """Steps that were applied, as Adam counts them."""
        return self._zero.step

    def publish(self, optimizer_steps: int) -> None:
        """After masters and moments were overwritten through `owned`: compute with them. Collective."""
        self._zero.step = optimizer_steps
        self._zero.publish()

    # ------------------------------------------------------------------------------------------------ set-up

    def _prepare_schedule(self) -> None:
        from megatron.core.enums import ModelType

        for chunk in self.chunks:
            chunk.model_type = ModelType.encoder_or_decoder  # type: ignore[assignment]  # the schedules ask for it
            schedule = chunk.config
            schedule.timers = self._clock
            if self.groups.vp_size > 1 and self.groups.device.type == "cpu":
                assert not schedule.batch_p2p_comm and not schedule.deallocate_pipeline_outputs, (
                    "interleaved stages on gloo are silently wrong with batch_p2p_comm or deallocate_pipeline_outputs"
                )

    def _start_deepspeed(self, param_groups: ParamGroups) -> Any:
        train = self.config.train
        optimizer = torch.optim.AdamW(
            param_groups,
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
            fused=True,  # on CPU too: one pass over the memory instead of ten
        )
        import deepspeed

        cpu.forbid_builds(deepspeed)
        # It reports every choice it makes; what matters comes as an exception.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        engine, *_ = deepspeed.initialize(
            model=self._root,
            optimizer=optimizer,
            config=deepspeed_config(self.config, self.groups, self._parameters),
            mpu=_Layout(self.groups),
            dist_init_required=False,
        )
        return engine


def deepspeed_config(config: Config, groups: Groups, parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """DeepSpeed's configuration of a run. To it a step is a single micro-batch: the schedule has its own."""
    train, stage = config.train, config.parallel.zero_stage
    bf16 = train.precision == "bf16"
    local = sum(parameter.numel() for parameter in parameters)
    bucket = min(BUCKET, local + local % 2)
    settings: dict[str, Any] = {
        "train_batch_size": train.global_batch_size,
        "train_micro_batch_size_per_gpu": train.global_batch_size // groups.dp_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": train.clip,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            # Norms stay whole on every rank; matrices are gathered when they are needed.
            "stage3_param_persistence_threshold": config.model.hidden_size,
        },
        "bf16": {"enabled": bf16},
        # It would wait for the device at every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    if bf16 and stage == 3:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


class _Chunks(torch.nn.Module):
    """Several chunks of a pipeline rank as the one module that DeepSpeed asks for; it is never called."""

    def __init__(self, chunks: list[SlotModel]) -> None:
        super().__init__()
        self.chunks = torch.nn.ModuleList(chunks)


class _Layout:
    """DeepSpeed's `mpu`: who is where. Its "model parallel" ranks are all pieces of one model, tensor x pipeline."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._groups.dp_group)

    def get_data_parallel_rank(self) -> int:
        return self._groups.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self._groups.dp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.model_group

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._groups.model_group)

    def get_model_parallel_world_size(self) -> int:
        return self._groups.tp_size * self._groups.pp_size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.tp_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self._groups.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._groups.tp_size

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_global_rank(self._groups.tp_group, 0)

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.pp_group

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._groups.pp_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._groups.pp_size


def _parameter_names(chunks: list[SlotModel]) -> dict[torch.nn.Parameter, tuple[SlotModel, str]]:
    """Where a parameter has its first name."""
    return {parameter: (chunk, name) for chunk in chunks for name, parameter in chunk.named_parameters()}
