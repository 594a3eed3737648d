"""What ranks hold and send, measured on small layouts of CPU processes, beside what `refusion plan` says of them.

    python benchmarks/memory.py [--only TEXT]

Weights, optimizer state, gradients (whole, and what the reduction leaves) and activations are bytes of the tensors
that the engine really has; `peak` is the most that lives at a time before the reduction; traffic is
what the collectives of a step would send in rings. The exit code is 1 if anything is off by more than 2 % (the peak,
which depends on temporaries of kernels: 10 %).
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "distributed")]

import torch  # noqa: E402
from processes import run  # noqa: E402  # pyright: ignore[reportMissingImports]
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_iter  # noqa: E402

from refusion_train.config import Config, ModelConfig  # noqa: E402
from refusion_train.model.functional import _SwiGLU  # noqa: E402
from refusion_train.plan import Plan, plan  # noqa: E402

TOLERANCE, PEAK_TOLERANCE = 0.02, 0.10
MEMORY = ("weights", "optimizer", "gradients", "gradient_shard", "activations")


@dataclass(frozen=True)
class Case:
    """A layout to measure; `words` change the small configuration."""

    name: str
    ranks: int
    words: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        """Four layers with padded rows in the vocabulary; sizes that shards do not divide."""
        config = Config(
            model=ModelConfig(
                hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=160, vocab_size=500,
                max_sequence_length=128,
            )
        )  # fmt: skip
        config.data.sequence_length, config.data.streams = 128, 12
        config.train.micro_batch_size, config.train.global_batch_size = 2, 24
        for key, value in self.words.items():
            section, name = key.split(".")
            setattr(getattr(config, section), name, value)
        return config


def _cases() -> list[Case]:
    both, untied = ("bf16", "fp32"), {"model.tie_embeddings": False}
    cases = []
    for precision in both:
        words = {"train.precision": precision}
        cases += [
            Case(f"dp2 zero{stage} {precision}", 2, words | {"parallel.zero_stage": stage}) for stage in (1, 2, 3)
        ]
        cases.append(Case(f"tp2 {precision}", 2, words | {"parallel.tensor": 2}))
        cases.append(Case(f"pp2 {precision}", 2, words | {"parallel.pipeline": 2}))
    tp2_sequence = {"parallel.tensor": 2, "parallel.sequence": True}
    return [
        *cases,
        Case("dp3 zero1 fp32 untied", 3, {"train.precision": "fp32"} | untied),
        Case("dp3 zero3 bf16 untied", 3, {"parallel.zero_stage": 3} | untied),
        Case("tp2 sequence bf16 untied, selective", 2, tp2_sequence | {"train.recompute": "selective"} | untied),
        Case("tp2 sequence bf16, full", 2, tp2_sequence | {"train.recompute": "full"}),
        Case("pp2 uneven bf16", 2, {"parallel.pipeline": 2, "parallel.pipeline_last": 1}),
        Case("pp2 virtual2 bf16 untied", 2, {"parallel.pipeline": 2, "parallel.virtual_pipeline": 2} | untied),
        Case("pp2 x dp2 zero2 bf16 untied, selective", 4,
             {"parallel.pipeline": 2, "parallel.zero_stage": 2, "train.recompute": "selective"} | untied),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ on each rank


def measure(case: Case) -> dict[str, Any]:
    """Two steps of training on one rank of the layout; what it held and sent in the second. Collective."""
    from refusion_train.model import layers
    from refusion_train.model.slot_model import build_model_chunks
    from refusion_train.parallel.engine import Engine
    from refusion_train.parallel.groups import destroy, init_groups
    from refusion_train.train.optim import param_groups

    # Those of the CPU keep other things.
    layers.rms_norm, layers.swiglu = _NormOfGpu.apply, _GateOfGpu.apply  # type: ignore[assignment]
    config = case.config()
    groups = init_groups(config)
    alive = _Alive()
    with alive:
        chunks = build_model_chunks(config, groups, bidirectional=False)
        engine = Engine(config, groups, chunks, param_groups(chunks, 0.1))
    count = config.train.global_batch_size // (config.train.micro_batch_size * groups.dp_size)
    batches = [_batch(config) for _ in range(count)]
    found: dict[str, Any] = {"stage": groups.pp_rank}
    before_reduction = engine._zero.before_reduction

    def at_end_of_schedule() -> None:  # of a step that is reduced once
        found["peak"] = alive.stop()
        found["gradients"] = _bytes(parameter.grad for parameter in engine._parameters)
        before_reduction()

    engine._zero.before_reduction = at_end_of_schedule
    with alive:
        engine.forward_backward(batches)
        engine.step(1e-3)
    kept = _Kept(engine._parameters)
    sent = _Sent()
    with alive, sent, kept.watch(chunks):
        alive.start()
        engine.forward_backward(batches)
        found["gradient_shard"] = _bytes(part for _, part in engine._zero.gradients())
        found.setdefault("gradients", found["gradient_shard"])
        found.setdefault("peak", alive.stop())
        engine.step(1e-3)
    found["activations"] = kept.peak
    found["optimizer"] = _bytes(part for owned in engine.owned() for part in owned.owned.state.values())
    found["weights"] = _bytes(
        part for parameter in engine._parameters for part in (parameter.data, getattr(parameter, "ds_tensor", None))
    )
    names = {"tensor": groups.tp_group, "zero": groups.dp_group, "tied embeddings": groups.embedding_group}
    by_group = {group.group_name: name for name, group in names.items() if group is not None and group.size() > 1}
    for (group, kind), size in sent.bytes.items():
        name = "pipeline" if kind == "send" else by_group.get(group)
        if name is not None:
            found[name] = found.get(name, 0) + size
    destroy()
    return found


def _batch(config: Config) -> Any:
    from refusion_train.model.batch import DeviceBatch

    rows, length = config.train.micro_batch_size, config.data.sequence_length
    ids = torch.randint(0, 500, (rows, length))
    ones = torch.ones(rows * length, dtype=torch.uint8)
    return DeviceBatch(
        input_ids=ids, position_ids=torch.arange(length).repeat(rows, 1),
        boundaries=torch.arange(0, rows * length + 1, length, dtype=torch.int32), rows=torch.arange(rows * length),
        labels=ids.view(-1), weights=torch.full((rows * length,), 1e-3), kinds=ones, buckets=torch.zeros_like(ones),
    )  # fmt: skip


def _bytes(tensors: Any) -> int:
    """Bytes of the storages of tensors (None: nothing), each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor is not None}
    return sum(storage.nbytes() for storage in storages.values())


class _NormOfGpu(torch.autograd.Function):
    """RMSNorm that keeps what the fused kernel of a GPU keeps: its input and one scale per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = x.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grads[0].float()
        inner = grad * weight.float()
        grad_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        grad_weight = (grad * normed).reshape(-1, weight.shape[0]).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _GateOfGpu(_SwiGLU):
    """The gated activation that keeps what it keeps on a GPU: its input."""

    @staticmethod
    def forward(ctx: Any, joint: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(joint, None)
        gate, up = joint.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class _Kept:
    """Bytes of what forward passes keep for backward passes: floating-point tensors other than weights."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.peak = 0
        self._parameters = parameters
        self._live: Counter[int] = Counter()
        self._storages: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def watch(self, chunks: list[Any]) -> Iterator[None]:
        """Look at the end of each forward pass of a chunk."""
        handles = [chunk.register_forward_hook(self._look) for chunk in chunks]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
            yield
        for handle in handles:
            handle.remove()

    def _pack(self, tensor: torch.Tensor) -> _Handle:
        return _Handle(tensor, self)

    def add(self, storage: torch.UntypedStorage) -> None:
        self._live[storage._cdata] += 1
        self._storages[storage._cdata] = storage

    def remove(self, key: int) -> None:
        self._live[key] -= 1
        if not self._live[key]:
            del self._live[key], self._storages[key]

    def _look(self, *_: Any) -> None:
        weights = {parameter.data.untyped_storage()._cdata for parameter in self._parameters}
        total = sum(storage.nbytes() for key, storage in self._storages.items() if key not in weights)
        self.peak = max(self.peak, total)


class _Handle:
    """Stands for a saved tensor in the graph, and knows when the graph lets go of it."""

    def __init__(self, tensor: torch.Tensor, kept: _Kept) -> None:
        self.tensor, self._kept, self._key = tensor, kept, None
        if tensor.is_floating_point():
            self._key = tensor.untyped_storage()._cdata
            kept.add(tensor.untyped_storage())

    def __del__(self) -> None:
        if self._key is not None:
            self._kept.remove(self._key)


class _Alive(TorchDispatchMode):
    """Bytes of all storages that were made under it and are still there; the most of them between start and stop."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peak, self._looking = 0, False

    def start(self) -> None:
        self._peak, self._looking = 0, True

    def stop(self) -> int:
        self._looking = False
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = weakref.ref(storage)
                    weakref.finalize(storage, self._storages.pop, storage._cdata, None)
        if self._looking:  # storages may have been resized, so they are counted anew
            living = [reference() for reference in list(self._storages.values())]
            self._peak = max(self._peak, sum(storage.nbytes() for storage in living if storage is not None))
        return result


class _Sent(TorchDispatchMode):
    """Bytes that this rank would send in rings, by (group name, operation)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        from torch.distributed import ProcessGroup

        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if boxed is None:
            return
        group = ProcessGroup.unbox(boxed)
        part = (group.size() - 1) / group.size()
        tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        if "allreduce" in name:
            self.bytes[group.group_name, "all-reduce"] += round(2 * part * size)
        elif "allgather" in name:  # the first argument is the gathered tensor
            self.bytes[group.group_name, "all-gather"] += round(part * size)
        elif "reduce_scatter" in name:  # the first argument is this rank's part
            self.bytes[group.group_name, "reduce-scatter"] += round(part * size * group.size())
        elif name.startswith("send"):
            self.bytes[group.group_name, "send"] += size


# ---------------------------------------------------------------------------------------------------- comparison


def compare(case: Case, measured: list[dict[str, Any]]) -> list[tuple[str, int, int, bool]]:
    """(what, measured, planned, close enough) for the fullest rank of every stage."""
    expected = plan(case.config(), case.ranks)
    rows = []
    for stage in range(expected.layout.pipeline):
        ranks = [found for found in measured if found["stage"] == stage]
        prefix = f"stage {stage} " if expected.layout.pipeline > 1 else ""
        for name in MEMORY:
            largest, planned = max(found[name] for found in ranks), getattr(expected.memory[stage], name)
            rows.append((prefix + name, largest, planned, _close(largest, planned)))
        largest, planned = max(found["peak"] for found in ranks), expected.memory[stage].phases["schedule"]
        rows.append((f"{prefix}peak", largest, planned, _close(largest, planned, PEAK_TOLERANCE)))
        for name, planned in _planned_traffic(expected, stage).items():
            largest = max(found.get(name, 0) for found in ranks)
            rows.append((f"{prefix}sent: {name}", largest, planned, _close(largest, planned)))
    return rows


def _planned_traffic(expected: Plan, stage: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for kind in expected.traffic:
        name = "zero" if kind.kind.startswith("zero") else kind.kind
        sizes[name] = sizes.get(name, 0) + kind.per_rank[stage]
    return {name: size for name, size in sizes.items() if size}


def _close(measured: int, planned: int, tolerance: float = TOLERANCE) -> bool:
    return abs(measured - planned) <= tolerance * measured


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    only = parser.parse_args().only
    chosen = [case for case in _cases() if only in case.name]
    wrong = 0
    print(f"{'':<44}{'measured':>12}{'planned':>12}{'difference':>12}")
    for case in chosen:
        print(case.name)
        for name, measured, planned, close in compare(case, run(measure, case.ranks, case, timeout_s=600)):
            wrong += not close
            off = planned / measured - 1 if measured else float(planned > 0)
            print(
                f"    {name:<40}{measured:>12,}{planned:>12,}{off:>11.2%}{'' if close else '  <-- too far'}", flush=True
            )
    print(f"{wrong} of the figures above are too far from the plan" if wrong else "all within tolerance")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
