"""A model trained on slots with targets across them is an ordinary language model for stock transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from refusion_train.cli import run as command
from refusion_train.config import Config
from refusion_train.data.shards import ShardWriter
from refusion_train.data.tokenizer import Tokenizer

WORDS, FIRST = 24, 40  # ids FIRST ... FIRST + WORDS - 1 follow each other in one order, round and round


def _shards(folder: Path, tokenizer_folder: Path, order: np.ndarray) -> Path:
    """Documents of 14 to 40 words, each starting anywhere in the round."""
    tokenizer, random = Tokenizer.load(tokenizer_folder), np.random.default_rng(1)
    with ShardWriter(
        folder, "train", tokenizer.info, shard_bytes=1 << 16, block_tokens=1_024, tokenizer_folder=tokenizer_folder
    ) as writer:
        for _ in range(600):
            start, length = random.integers(WORDS), random.integers(14, 41)
            words = order[(start + np.arange(length)) % WORDS]
            writer.add(np.array([tokenizer.bos_id, *words, tokenizer.eos_id]), 0, length)
    return folder


@pytest.mark.slow
def test_stock_generate_continues_across_slots(tiny_config: Config, tiny_tokenizer: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    order = FIRST + np.random.default_rng(0).permutation(WORDS)
    config = tiny_config
    data = _shards(tmp_path / "shards", tiny_tokenizer, order)
    words = [
        f"run_dir={config.run_dir}", f"data.train={data}", "data.sequence_length=64", "data.streams=8",
        "data.workers=0", "train.steps=120", "train.global_batch_size=16", "train.micro_batch_size=16",
        "train.precision=fp32", "train.lr=1e-2", "train.warmup_steps=5", "train.tensorboard=false",
        "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2",
        "model.head_dim=8", "model.ffn_size=64", "model.vocab_multiple=64", "objective.slot_sizes=[2,4,8]",
    ]  # fmt: skip
    (tmp_path / "empty.yaml").write_text("{}\n")
    assert command(["train", str(tmp_path / "empty.yaml"), *words]) == 0
    assert command(["export", config.run_dir, "--out", str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(stock).__name__ == "Qwen3ForCausalLM"
    right = 0
    for start in range(WORDS):
        document = order[(start + np.arange(12)) % WORDS].tolist()
        prompt = torch.tensor([[Tokenizer.load(tiny_tokenizer).bos_id, *document[:2]]])
        out = stock.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=None)
        right += out[0, 3:].tolist() == document[2:]
    assert right == WORDS, f"{right} of {WORDS} are continued rightly"
    assert "decodes it left to right" in (tmp_path / "hf" / "README.md").read_text()
