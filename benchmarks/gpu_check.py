"""Does the GPU path do what the CPU path does, and how fast: attention, 20 training steps beside the plan, a decode.

    python benchmarks/gpu_check.py                                    # one GPU, under five minutes
    torchrun --nproc-per-node 8 benchmarks/gpu_check.py [key=value]   # all of a host, e.g. parallel.tensor=2

1. The attention kernel of the GPU in bf16 against scaled_dot_product_attention document by document in float32 on the
   CPU, forward and backward.
2. 20 steps of the shape of Qwen3-0.6B at sequence 4096 on random packed documents, through the engine that
   `refusion train` uses: tokens/s, MFU and peak memory, beside what `refusion plan` says of the same configuration.
3. The trained weights in the Hugging Face class: logits of both models on permuted positions, then plan-and-infill and
   left-to-right decoding. (Without parallel.tensor or parallel.pipeline.)

Exits with 0 when everything agrees and when there is no GPU, and with 1 when something disagrees. `--rehearse` goes
through the same steps with a tiny model on any machine, to see that this file works.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch

from refusion_train.config import Config, load
from refusion_train.convert.names import EMBEDDING, HEAD
from refusion_train.model.attention import _loop, select_kernel
from refusion_train.model.batch import DeviceBatch, to_device
from refusion_train.model.slot_model import SlotModel, build_model_chunks
from refusion_train.objective import PackedDocuments, document_key, make_objective
from refusion_train.parallel.engine import Engine
from refusion_train.parallel.groups import Groups, destroy, init_groups
from refusion_train.plan import plan
from refusion_train.plan.compute import Gpu, gpu_of_device
from refusion_train.telemetry import peak_memory_mb
from refusion_train.train.optim import param_groups
from refusion_train.train.step import kind_scales

MASK_ID, PAD_ID, END_ID, FIRST_ID = 4, 0, 3, 5
MEDIAN_DOCUMENT = 600
# Largest differences that rounding to bf16 explains, relative to the largest value.
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE, LOGITS_TOLERANCE = 2e-2, 4e-2, 5e-2
PEAK_TOLERANCE = 0.10
_TINY = [
    "model.hidden_size=64", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=16",
    "model.ffn_size=96", "model.vocab_size=500", "data.sequence_length=128",
]  # fmt: skip


class Report:
    """Prints on the first rank, and remembers whether something disagreed."""

    def __init__(self, speaks: bool) -> None:
        self.speaks, self.failed, self.figures = speaks, False, {}

    def say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)

    def compare(self, name: str, found: float, limit: float) -> None:
        """A relative difference and the most that it may be."""
        bad = not found <= limit
        self.failed |= bad
        self.figures[name] = found
        self.say(f"  {name:46} {found:.2e}   at most {limit:.0e}   {'DISAGREES' if bad else 'ok'}")


def check_attention(report: Report, device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """The kernel that training would use on `device`, against the CPU's in float32."""
    ends = np.unique(np.append(np.random.default_rng(0).integers(1, tokens, 6), (0, tokens)))
    boundaries = torch.tensor(ends, dtype=torch.int32)
    heads = [torch.randn(tokens, count, 64, dtype=torch.float32) for count in (8, 4, 4)]
    grad = torch.randn(tokens, 8, 64)
    exact = [x.to(dtype).float().requires_grad_() for x in heads]  # the same rounded numbers on both sides
    low = [x.detach().to(device, dtype).requires_grad_() for x in exact]
    kernel = select_kernel(device, dtype)
    report.say(f"1. attention: {kernel.__name__.strip('_')} in {dtype} on {device}")
    for causal in (True, False):
        wanted = _loop(exact[0], exact[1], exact[2], boundaries, tokens, causal)
        out = kernel(low[0], low[1], low[2], boundaries.to(device), tokens, causal)
        name = "causal" if causal else "both ways"
        report.compare(f"output, {name}", _distance(out, wanted), OUTPUT_TOLERANCE)
        gradients = torch.autograd.grad(out, low, grad.to(device, dtype))
        for which, got, right in zip("qkv", gradients, torch.autograd.grad(wanted, exact, grad), strict=True):
            report.compare(f"gradient of {which}, {name}", _distance(got, right), GRADIENT_TOLERANCE)


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest wanted value."""
    wanted = wanted.detach().float().cpu()
    return ((found.detach().float().cpu() - wanted).abs().max() / wanted.abs().max()).item()


def step_batches(config: Config, groups: Groups, step: int) -> list[DeviceBatch]:
    """This rank's micro-batches of random packed documents of lognormal length, with final weights."""
    rng = np.random.default_rng([step, groups.dp_rank])
    rows, length = config.train.global_batch_size // groups.dp_size, config.data.sequence_length
    sizes = np.clip(rng.lognormal(np.log(MEDIAN_DOCUMENT), 0.8, 1 + rows * length // 50), 2, length).astype(np.int64)
    ends = np.append(np.cumsum(sizes)[np.cumsum(sizes) < rows * length], rows * length)
    starts = np.unique(np.concatenate(([0], ends[:-1], np.arange(0, rows * length, length))))
    lengths = np.diff(np.append(starts, rows * length))
    keys = document_key(0, step, np.arange(len(starts), dtype=np.uint64), groups.dp_rank)
    tokens = rng.integers(FIRST_ID, config.model.vocab_size, (rows, length)).astype(np.int32)
    packed = PackedDocuments(tokens, starts, lengths, np.zeros_like(lengths), keys)
    batch = make_objective(config.objective, MASK_ID, PAD_ID).corrupt(packed)
    scales = kind_scales(config.objective, batch.counts.sum(axis=0)) / np.float32(groups.dp_size)
    size = config.train.micro_batch_size
    parts = [batch.rows(start, start + size) for start in range(0, rows, size)]
    return [to_device(part, part.loss_weight * scales[part.target_kind], groups.device) for part in parts]


def train(report: Report, config: Config, groups: Groups, gpu: Gpu | None, steps: int) -> Engine:
    """Steps on random documents; speed of the later half, and peak memory beside the plan."""
    report.say(f"2. {steps} steps: {config.model.num_layers} layers of {config.model.hidden_size}, rows of "
               f"{config.data.sequence_length}, {groups.world_size} rank(s), {config.train.precision}")  # fmt: skip
    chunks = build_model_chunks(config, groups, bidirectional=False)
    engine = Engine(config, groups, chunks, lambda given: param_groups(given, config.train.weight_decay))
    if groups.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for step in range(steps):
        batches = step_batches(config, groups, step % 2)  # two batches in turn: the loss must fall
        began = time.perf_counter()
        engine.forward_backward(batches)
        result = engine.step(config.train.lr)  # waits for the device
        seconds.append(time.perf_counter() - began)
        losses.append(result.statistics[0].item())
    tokens = config.train.global_batch_size * config.data.sequence_length
    rate = tokens / float(np.median(seconds[steps // 2 :]))
    planned = plan(config, groups.world_size, gpu=gpu.name if gpu else None)
    report.figures |= {"tokens_per_s": rate, "loss_first": losses[0], "loss_last": losses[-1]}
    report.say(f"  loss {losses[0]:.3f} -> {losses[-1]:.3f}; {rate:,.0f} tokens/s (median of the later half)")
    report.failed |= not losses[-1] < losses[0]
    if gpu is not None:
        flops = planned.arithmetic.flops_per_token * rate / (groups.world_size * gpu.flops)
        memory, expected = peak_memory_mb() * 1e6 / (1 << 30), planned.peak / (1 << 30)
        report.figures |= {"mfu": flops, "peak_gib": memory, "planned_peak_gib": expected}
        report.say(f"  MFU {flops:.1%} of {gpu.name}; the plan's days assume {planned.duration.mfu:.0%}")
        report.say(f"  peak memory {memory:.2f} GiB; planned {expected:.2f} GiB")
        report.compare("peak memory over the plan", max(0.0, memory / expected - 1), PEAK_TOLERANCE)
    return engine


def decode(report: Report, config: Config, chunk: SlotModel, device: torch.device, tokens: int) -> None:
    """The weights in the Hugging Face class: the same logits, and text by slots and left to right."""
    from refusion_train.hf.modeling_refusion import ReFusionQwen3ForCausalLM

    report.say("3. the Hugging Face class with these weights")
    model: Any = ReFusionQwen3ForCausalLM(hugging_face_config(config))
    model = model.to(device, chunk.head.weight.dtype).eval()
    parameters = dict(chunk.named_parameters())
    weights = {piece.name: piece.take(parameters[name]) for name, parts in chunk.pieces().items() for piece in parts}
    weights = {n: w[: config.model.vocab_size] if n in (EMBEDDING, HEAD) else w for n, w in weights.items()}
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {HEAD}, f"names differ: {missing}"
    length = min(256, config.data.sequence_length)
    ids = torch.randint(FIRST_ID, config.model.vocab_size or 0, (1, length), device=device)
    positions = torch.randperm(length, device=device)[None]
    none = torch.zeros(0, dtype=torch.int64, device=device)
    batch = DeviceBatch(
        input_ids=ids, position_ids=positions, boundaries=torch.tensor([0, length], dtype=torch.int32, device=device),
        rows=none, labels=none, weights=none.float(), kinds=none.byte(), buckets=none.byte(),
    )  # fmt: skip
    with torch.no_grad():
        found = model(input_ids=ids, position_ids=positions).logits
        report.compare("logits, permuted positions", _distance(found, chunk.eval().logits(batch)), LOGITS_TOLERANCE)
    for options in ({"slot_size": 8}, {"decoding": "left_to_right"}):
        model.generate(ids[:, :32], max_new_tokens=tokens, eos_token_id=END_ID, **options)
        stats = model.last_stats
        assert stats is not None, "generate left no statistics"
        new, name = stats["new_tokens"], options.get("decoding", "plan_and_infill")
        report.figures[f"{name}_tokens_per_s"] = new / stats["seconds"]
        report.say(f"  {name}: {new} tokens, {new / stats['seconds']:.1f} tokens/s, "
                   f"{new / stats['forwards']:.2f} tokens per forward (random text)")  # fmt: skip


def hugging_face_config(config: Config) -> Any:
    """Qwen3Config of the same shape."""
    from transformers import Qwen3Config

    model = config.model
    shape: dict[str, Any] = dict(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim, rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings, max_position_embeddings=model.max_sequence_length,
        rope_theta=model.rope_theta, attn_implementation="sdpa",
    )  # fmt: skip
    described: Any = Qwen3Config(**shape)
    described.refusion = {"objective": "slots", "mask_token_id": MASK_ID, "slot_sizes": config.objective.slot_sizes}
    return described


def main() -> int:
    """All three; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to configs/qwen3-0.6b.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to decode")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, on any machine")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.rehearse:
        print("no GPU here: nothing to check (--rehearse goes through the steps with a tiny model)")
        return 0
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fixed = [f"train.global_batch_size={8 * world}", f"data.streams={8 * world}", "train.micro_batch_size=2"]
    fixed += ["train.recompute=none", "parallel.zero_stage=1", "train.lr=1e-4"]
    if not torch.cuda.is_available():
        fixed.append("train.precision=fp32")
    config = load("qwen3-0.6b", [*fixed, *(_TINY if options.rehearse else []), *options.overrides])
    groups = init_groups(config)
    report = Report(groups.rank == 0)
    gpu = gpu_of_device(torch.cuda.get_device_name()) if groups.device.type == "cuda" else None
    if groups.device.type == "cuda":
        report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    dtype = torch.bfloat16 if groups.device.type == "cuda" else torch.float32
    check_attention(report, groups.device, dtype, 256 if options.rehearse else 4096)
    engine = train(report, config, groups, gpu, options.steps)
    if groups.tp_size == groups.pp_size == 1 and config.parallel.zero_stage < 3 and groups.rank == 0:
        decode(report, config, engine.chunks[0], groups.device, options.new_tokens)
    if options.json and report.speaks:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report.figures, file, indent=1)
    report.say("something DISAGREES, see above" if report.failed else "everything agrees")
    destroy()
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
