"""Plans as tables on a console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from refusion_train.plan.planner import GIB, Plan, usable_bytes
from refusion_train.plan.suggest import Suggestion

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def render(plan: Plan, console: Console) -> None:
    """Print a plan."""
    for section in (_layout, _parameters, _memory, _traffic, _run):
        section(plan, console)
    for note in notes(plan):
        console.print(f"- {note}", highlight=False, markup=False)


def notes(plan: Plan) -> list[str]:
    """What a reader of the tables should know."""
    found = []
    if plan.fits is not None and plan.gpu_memory_gib is not None:
        verdict = "fits" if plan.fits else "DOES NOT FIT"
        found.append(
            f"{verdict}: the fullest rank needs {_gib(plan.peak)} GiB of {_gib(usable_bytes(plan.gpu_memory_gib))} GiB "
            f"that tensors can have on a GPU of {plan.gpu_memory_gib:g} GiB"
        )
    if plan.layout.zero_stage == 2 and plan.layout.pipeline > 1:
        found.append("in a pipeline gradients add up whole before they are reduced: ZeRO 2 needs as much as ZeRO 1")
    if not plan.arithmetic.measured_length:
        found.append("no dataset: attention is counted as if every row were one document, which is the most it can be")
    return found


def render_suggestions(suggestions: Sequence[Suggestion], console: Console) -> None:
    """Print layouts, the fastest first, and the words that choose the first one."""
    if not suggestions:
        console.print("no layout fits: use more or larger GPUs, a shorter data.sequence_length, or a smaller model")
        return
    table = _table(
        "tensor", "pipeline", "virtual", "data", "zero", "micro-batch", "recompute", "peak GiB", "bubble", "step s",
    )  # fmt: skip
    for entry in suggestions:
        tensor = f"{entry.tensor}{' +seq' if entry.sequence else ''}"
        table.add_row(
            tensor, str(entry.pipeline), str(entry.virtual_pipeline), str(entry.data), str(entry.zero_stage),
            str(entry.micro_batch_size), entry.recompute, _gib(entry.peak), f"{entry.bubble:.1%}",
            f"{entry.step_s:.3g}",
        )  # fmt: skip
    _print(
        console,
        "Layouts that fit, fastest first; of those within a percent the one in fewer pieces (times only compare them)",
        table,
    )
    console.print("first: " + " ".join(suggestions[0].overrides), highlight=False, soft_wrap=True)


def _table(*columns: str, header: bool = True) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if header else box.SIMPLE, show_header=header, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _print(console: Console, heading: str, table: Table, *remarks: str) -> None:
    console.print(f"[bold]{heading}[/bold]", highlight=False)
    console.print(table)
    for remark in remarks:
        console.print(remark, highlight=False)
    if remarks:
        console.print()


def _layout(plan: Plan, console: Console) -> None:
    layout = plan.layout
    table = _table("stage", "layers", "ranks")
    for stage, (layers, ranks) in enumerate(zip(layout.layers, layout.ranks, strict=True)):
        table.add_row(str(stage), str(layers), ranks)
    chunks = f" in {layout.virtual_pipeline} chunks each" if layout.virtual_pipeline > 1 else ""
    _print(
        console,
        f"Layout: {layout.world_size} ranks = {layout.tensor} tensor{' (sequence)' if layout.sequence else ''} x "
        f"{layout.data} data (ZeRO {layout.zero_stage}) x {layout.pipeline} pipeline{chunks}",
        table,
        f"{layout.micro_batches} micro-batches of {layout.micro_batch_size} rows per step and rank; pipeline bubble "
        f"{plan.bubble:.1%} of the working time",
    )


def _parameters(plan: Plan, console: Console) -> None:
    counts = plan.parameters
    table = _table("stage", "parameters", "on each rank")
    for stage, (home, rank) in enumerate(zip(counts.per_stage, counts.per_rank, strict=True)):
        table.add_row(str(stage), f"{home:,}", f"{rank:,}")
    _print(
        console,
        f"Parameters: {counts.total:,}",
        table,
        f"{counts.embedding:,} of them in embedding and head; on ranks also padding ({counts.padding:,} in all) and "
        "copies",
    )


def _memory(plan: Plan, console: Console) -> None:
    table = _table(
        "stage", "weights", "optimizer", "gradients", "shard", "activations", "logits", "head", "working", "buckets",
        "peak", "when",
    )  # fmt: skip
    for stage in plan.memory:
        sizes = (
            stage.weights + stage.gathered, stage.optimizer, stage.gradients, stage.gradient_shard, stage.activations,
            stage.logits, stage.head, stage.working, stage.buckets, stage.peak,
        )  # fmt: skip
        table.add_row(str(stage.stage), *map(_gib, sizes), stage.peak_phase)
    modes = ", ".join(f"{mode} {_gib(size)}" for mode, size in plan.activations.items())
    _print(
        console,
        "Memory of the fullest rank of each stage, GiB (not all of it at the same time)",
        table,
        f"activations by train.recompute: {modes}",
    )


def _traffic(plan: Plan, console: Console) -> None:
    if not plan.traffic:
        return
    table = _table("kind", "operation", "least", "most")
    for kind in plan.traffic:
        table.add_row(kind.kind, kind.operation, _gib(min(kind.per_rank)), _gib(kind.largest))
    _print(console, "Sent by a rank per step, GiB", table)


def _run(plan: Plan, console: Console) -> None:
    costs, run = plan.arithmetic, plan.duration
    rows = {
        "FLOPs per token": f"{costs.flops_per_token:.4g}, of which attention {costs.attention_flops_per_token:.3g} "
        f"(documents of {costs.attended:,.0f} tokens)",
        "recomputation adds": f"{costs.recompute_flops_per_token:.3g}",
        "supervised tokens": f"{costs.supervised_fraction:.1%}",
        "tokens": f"{run.tokens:,} = {run.steps:,} steps of {run.tokens_per_step:,}",
    }
    if run.epochs is not None:
        rows["epochs"] = f"{run.epochs:.3g}"
    for name, passes in (run.source_epochs or {}).items():
        rows[f"  over {name}"] = f"{passes:.3g}"
    if run.days is not None and run.tokens_per_s is not None and plan.gpu is not None:
        rows[f"{plan.layout.world_size} {plan.gpu.name} at {run.mfu:.0%} MFU"] = (
            f"{run.tokens_per_s:,.0f} tokens/s, {run.days:.3g} days"
        )
    table = _table("", "", header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    _print(console, "Run", table)


def _gib(size: int) -> str:
    value = size / GIB
    return f"{value:.2f}" if value >= 0.095 or not size else f"{value:.2g}"
