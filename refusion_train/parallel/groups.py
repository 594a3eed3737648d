"""The process groups of a run: who computes what. The only caller of torch's and megatron-core's initialisation.

Ranks are laid out tensor-parallel first, then data-parallel, then pipeline:
rank = tp_rank + tp_size * (dp_rank + dp_size * pp_rank), so that tensor-parallel ranks share a host.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from refusion_train.config import Config, validate
from refusion_train.errors import ConfigError, TrainingError
from refusion_train.layouts import data_parallel_size
from refusion_train.parallel import cpu

DEFAULT_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Groups:
    """This rank's place in the layout, its device, and the groups that it talks to.

    dp: ranks with the same piece of the model and other rows; tp: ranks that share each matrix; pp: ranks that hold
    consecutive stages; model: tp x pp, all pieces of one copy of the model. `embedding` is the first and last
    stage (None on the stages between), which hold copies of tied embeddings.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    vp_size: int
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the head and computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def main(self) -> bool:
        """Whether this is the rank that reports to the user: the first on the last stage, where losses are known."""
        return self.last_stage and self.tp_rank == 0 and self.dp_rank == 0


@dataclass(frozen=True)
class _Place:
    """What the launcher says about this process."""

    rank: int
    world_size: int
    local_rank: int


def init_groups(config: Config, timeout_s: float = DEFAULT_TIMEOUT_S) -> Groups:
    """Join the group that the environment describes, or be a group of one, and lay it out as `config.parallel` says.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them; without RANK and
    WORLD_SIZE this is a single process, which needs no port. NCCL on CUDA (one process per GPU, device LOCAL_RANK),
    gloo elsewhere. `timeout_s`: how long a collective waits for the other ranks.

    Raises ConfigError, before any group exists, if the layout does not fit the number of processes, and TrainingError
    if these do not find each other.
    """
    place = _read_environment()
    if config.parallel.tensor > 1:
        # Read when CUDA starts: kernels then begin in the order of their launch, so that megatron-core's reductions
        # over tensor-parallel ranks overlap with the products behind them. It warns where this is not set.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    validate(config, place.world_size)
    _check_linear(config)
    assert not dist.is_initialized(), "a process group already exists; call destroy() first"
    cpu.install()
    device = _device(place)
    _init_torch(place, device, timedelta(seconds=timeout_s))
    _init_megatron(config, timeout_s)
    return _describe(config, place, device)


def destroy() -> None:
    """Leave all groups, so that the process can end, or join others. Safe to call twice."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _read_environment() -> _Place:
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    if given["RANK"] is None and given["WORLD_SIZE"] is None:
        return _Place(0, 1, 0)
    missing = [name for name in ("RANK", "WORLD_SIZE") if given[name] is None]
    if given["WORLD_SIZE"] not in (None, "1"):
        missing += [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if given[name] is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set in the environment although RANK or WORLD_SIZE is; start with torchrun, "
            "srun or `refusion train --nproc N`, or unset RANK and WORLD_SIZE for a single process"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = given[name] or "0"
        if not text.isdecimal():
            raise ConfigError(f"the environment has {name}={text!r}; it must be a number that is not negative")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ConfigError(f"the environment has RANK={numbers['RANK']}, not below WORLD_SIZE={numbers['WORLD_SIZE']}")
    return _Place(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"])


def _check_linear(config: Config) -> None:
    """Refuse a kind of linear layers that this machine does not have."""
    if config.parallel.linear != "transformer_engine":
        return
    lacking = [] if importlib.util.find_spec("transformer_engine") else ["the package transformer-engine"]
    lacking += [] if cpu.cuda_present() else ["a GPU"]
    if lacking:
        raise ConfigError(
            f"parallel.linear=transformer_engine needs {' and '.join(lacking)}, missing here; use parallel.linear=torch"
        )


def _device(place: _Place) -> torch.device:
    if not cpu.cuda_present():
        return torch.device("cpu")
    if place.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"LOCAL_RANK={place.local_rank}, but this host has {torch.cuda.device_count()} GPUs; "
            "start one process per GPU"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _init_torch(place: _Place, device: torch.device, timeout: timedelta) -> None:
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))  # DeepSpeed insists on it
    # Communicators are made when first used (no device_id here): most of megatron-core's groups never are.
    backend = "nccl" if device.type == "cuda" else "gloo"
    if place.world_size == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (needs no port)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    try:
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout)
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).strip().split("\n")[0]
        raise TrainingError(
            f"rank {place.rank} did not meet all {place.world_size} processes at MASTER_ADDR:MASTER_PORT = {address} "
            f"within {timeout.total_seconds():.0f} s; see that all were started and can reach that port ({reason})"
        ) from error


def _init_megatron(config: Config, timeout_s: float) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]
        create_gloo_process_groups=False,
    )
    # Nothing in the model draws random numbers (no dropout, weights are drawn per parameter name), so megatron-core's
    # tracker of generator states is the one that does nothing.
    model_parallel_cuda_manual_seed(config.seed, inference_rng_tracker=True, force_reset_rng=True)


def _describe(config: Config, place: _Place, device: torch.device) -> Groups:
    from megatron.core import parallel_state as state

    embedding = state.get_embedding_group(check_initialized=False)
    groups = Groups(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        device=device,
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        vp_size=config.parallel.virtual_pipeline,
        dp_group=_group(state.get_data_parallel_group()),
        tp_group=_group(state.get_tensor_model_parallel_group()),
        pp_group=_group(state.get_pipeline_model_parallel_group()),
        model_group=_group(state.get_model_parallel_group()),
        embedding_group=None if embedding is None else _group(embedding),
    )
    assert groups.dp_size == data_parallel_size(config, place.world_size), "megatron-core laid the ranks out otherwise"
    return groups


def _group(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), f"megatron-core gave {group!r} where a process group belongs"
    return group
