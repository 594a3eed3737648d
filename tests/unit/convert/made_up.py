"""A checkpoint made up of random tensors, as training would have written it, and a Python that knows nothing of us."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from refusion_train.checkpoint import store
from refusion_train.config import Config, ModelConfig, ObjectiveConfig
from refusion_train.convert.names import logical_shapes
from refusion_train.data.shards import ShardSet

VOCABULARY = 320


def model_shape(**changes: Any) -> ModelConfig:
    """Two layers, head_dim unlike hidden / heads, a vocabulary that needs padding."""
    shape = ModelConfig(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=12, ffn_size=48, vocab_size=VOCABULARY,
        vocab_multiple=128, rope_theta=20_000.0, norm_eps=1e-5, max_sequence_length=128,
    )  # fmt: skip
    return dataclasses.replace(shape, **changes)


def make_checkpoint(
    root: Path, shards: Path, model: ModelConfig, objective: ObjectiveConfig | None = None, step: int = 3
) -> dict[str, torch.Tensor]:
    """Write `root`/checkpoints/step-...; returns the weights, vocabulary padded."""
    generator = torch.Generator().manual_seed(step)
    weights = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in logical_shapes(model).items()
    }
    tensors = {f"{name}.master": weight for name, weight in weights.items()}
    tensors |= {f"{name}.exp_avg": torch.zeros_like(weight) for name, weight in weights.items()}
    data = ShardSet.open(str(shards))
    config = Config(model=model, objective=objective or ObjectiveConfig(slot_sizes=[2, 4, 8]))
    state = {
        "step": step, "tokens": 1000, "config": dataclasses.asdict(config),
        "data": {"path": str(shards), "fingerprint": data.fingerprint, "tokenizer": data.index.tokenizer,
                 "special_ids": data.index.special_ids},
    }  # fmt: skip
    store.save(root / store.CHECKPOINTS, step, tensors, state, keep=5)
    return weights


_BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("refusion_train", "data_tools", "launchers", "megatron", "deepspeed"):
            raise ImportError(name + " is not to be had here")
sys.meta_path.insert(0, Blocked())
import json, torch
torch.set_num_threads(1)
"""


def run_elsewhere(script: str, folder: Path, *arguments: str, sentencepiece: bool = False) -> Any:
    """Run Python code in an isolated process in another place, without this package; returns what it prints as JSON.

    sentencepiece: whether that process has the package of that name.
    """
    before = _BLOCK if sentencepiece else _BLOCK + "sys.modules['sentencepiece'] = None\n"
    home = folder / "elsewhere"
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {
        **kept, "HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", before + script, *arguments],
        cwd=home, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])
