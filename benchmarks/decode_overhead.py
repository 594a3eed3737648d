"""What decoding costs beside the model's own forwards, and what decoding prompts together gains.

    python benchmarks/decode_overhead.py [--layers 28] [--prompts 2] [--new 32]
    python benchmarks/decode_overhead.py --batch

The first: a model of the shape of Qwen3-0.6B with random weights, batch 1, one thread; the share of the time of
`generate` that is neither in the layers nor in the head: choosing and judging tokens, masks, bookkeeping, transfers.
The second: a small model (128 hidden, 4 layers), the same eight prompts one by one and as one batch, in turns;
tokens per second of the one to the other, for slots and left to right. Random models accept few drafts, so the
number of forwards is not that of a trained one; the ratios are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from refusion_train.hf import cache, runner
from refusion_train.hf.modeling_refusion import ReFusionQwen3ForCausalLM

MASK = 4


def make_model(hidden: int, layers: int, heads: int, head_dim: int, ffn: int, vocabulary: int) -> Any:
    """A random model trained on slots, as its configuration says."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=head_dim, tie_word_embeddings=True,
        max_position_embeddings=4096,
    )  # fmt: skip
    config.refusion = {"objective": "slots", "mask_token_id": MASK, "cross_slot_targets": True}  # type: ignore[attr-defined]
    return ReFusionQwen3ForCausalLM(config).eval()


def overhead(model: Any, prompts: int, new: int, decoding: str) -> tuple[float, int]:
    """Share of the time of `generate` outside the forwards and the head; and the number of forwards."""
    inside = 0.0
    real = runner.forward, model.lm_head.forward, cache._plan, cache._geometry

    def timed(call: Any, sign: int = 1) -> Any:
        def run(*given: Any) -> Tensor:
            nonlocal inside
            began = time.perf_counter()
            result = call(*given)
            inside += sign * (time.perf_counter() - began)
            return result

        return run

    runner.forward, model.lm_head.forward = timed(real[0]), timed(real[1])
    cache._plan, cache._geometry = timed(real[2], -1), timed(real[3], -1)  # within a forward, but not the model
    try:
        began, forwards = time.perf_counter(), 0
        for number in range(prompts):
            ids = torch.randint(5, 1000, (1, 32), generator=torch.Generator().manual_seed(number))
            model.generate(ids, max_new_tokens=new, slot_size=8, slot_threshold=0.5, decoding=decoding)
            forwards += model.last_stats["forwards"]
        return 1 - inside / (time.perf_counter() - began), forwards
    finally:
        runner.forward, model.lm_head.forward, cache._plan, cache._geometry = real


def batch_gain(model: Any, rounds: int, new: int, decoding: str) -> float:
    """Tokens per second of a batch of eight prompts over those of the same one by one; median of rounds."""
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 1000, (1, 24), generator=random) for _ in range(8)]
    options = {"max_new_tokens": new, "slot_size": 8, "decoding": decoding}
    ratios = []
    for _ in range(rounds):
        began = time.process_time()
        for prompt in prompts:
            model.generate(prompt, **options)
        alone = time.process_time() - began
        model.generate(torch.cat(prompts), **options)
        ratios.append(alone / (time.process_time() - began - alone))
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--batch", action="store_true", help="a batch of eight against one by one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.batch:
        model = make_model(128, 4, 4, 32, 384, 1000)
        for decoding in ("plan_and_infill", "left_to_right"):
            print(f"{decoding}: a batch of 8 decodes {batch_gain(model, 5, given.new, decoding):.2f}x the tokens/s")
        return
    model = make_model(1024, given.layers, 16, 128, 3072, 151_936)
    for decoding in ("plan_and_infill", "left_to_right"):
        share, forwards = overhead(model, given.prompts, given.new, decoding)
        print(f"{decoding}: {share:.2%} of the time is outside the model, in {forwards} forwards (wanted: under 15 %)")


if __name__ == "__main__":
    main()
