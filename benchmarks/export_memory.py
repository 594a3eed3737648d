"""Peak memory of `refusion export`, beside its bound: two output shards and one layer, whatever the size of the model.

    python benchmarks/export_memory.py [--layers 24] [--hidden 1024] [--vocabulary 65536] [--shard-mb 100]

A checkpoint of random weights is made (1.7 GB; in a temporary folder of the working directory, deleted in the end) and
exported to bfloat16 in shards, in a process of its own. Printed is the highest resident memory of that process during
the export less what it held before, with everything imported and a tiny model exported; for the model and for one of a
third of its layers. Layer and shards are counted as they are written. The exit code is 1 if the bound is exceeded.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import sentencepiece
import torch

from refusion_train.checkpoint import store
from refusion_train.config import Config, ModelConfig
from refusion_train.convert.names import logical_shapes
from refusion_train.data.tokenizer import SPECIAL_PIECES, Tokenizer

# Prints the bytes that exporting sys.argv[1] to sys.argv[2] added to the process's highest resident memory.
EXPORT = """
import sys
import torch
from pathlib import Path
from refusion_train.convert.export import export_checkpoint

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

torch.set_num_threads(1)
tiny, checkpoint, out, tokenizer, shard_bytes = sys.argv[1:]
export_checkpoint(tiny, out + "-tiny", tokenizer=tokenizer)
before = resident("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")  # the highest so far is the present one
export_checkpoint(checkpoint, out, tokenizer=tokenizer, max_shard_bytes=int(shard_bytes))
print(resident("VmHWM:") - before)
"""


def make_tokenizer(folder: Path) -> Tokenizer:
    """The smallest tokenizer that there is."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["slots are planned and slots are filled"] * 20), model_writer=model, model_type="bpe",
        vocab_size=280, byte_fallback=True, pad_id=0, unk_id=1, bos_id=2, eos_id=3, pad_piece="<pad>",
        unk_piece="<unk>", bos_piece="<s>", eos_piece="</s>", control_symbols=[SPECIAL_PIECES["mask"]],
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    folder.mkdir()
    Tokenizer.create(folder, model.getvalue(), "bpe")
    return Tokenizer.load(folder)


def make_checkpoint(root: Path, model: ModelConfig, tokenizer: Tokenizer) -> Path:
    """Random weights, as a run would have saved them (the moments are left out: an export does not look at them)."""
    tensors = {f"{name}.master": torch.randn(shape) for name, shape in logical_shapes(model).items()}
    special = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id, "mask": tokenizer.mask_id}
    info = {"fingerprint": tokenizer.fingerprint, "kind": "sentencepiece"}
    state = {
        "step": 1, "tokens": 1, "config": dataclasses.asdict(Config(model=model)),
        "data": {"path": "", "fingerprint": "", "tokenizer": info, "special_ids": special},
    }  # fmt: skip
    return store.save(root, 1, tensors, state, keep=1)


def measure(folder: Path, name: str, model: ModelConfig, tokenizer: Tokenizer, shard_bytes: int) -> tuple[int, int]:
    """Bytes that the export of such a model added to its process, and bytes of the exported weights."""
    tiny = dataclasses.replace(model, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, vocab_size=280)
    given = [
        make_checkpoint(folder / f"{name}-tiny", tiny, tokenizer),
        make_checkpoint(folder / name, model, tokenizer),
        folder / f"{name}-out",
        folder / "tokenizer",
    ]
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, *map(str, given), str(shard_bytes)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parent.parent,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the export failed:\n{done.stderr[-3000:]}")
    weights = sum(file.stat().st_size for file in (folder / f"{name}-out").glob("*.safetensors"))
    return int(done.stdout.splitlines()[-1]), weights


def main() -> int:
    """Measure, print, and fail if the bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--shard-mb", type=int, default=100)
    options = parser.parse_args()
    heads = options.hidden // 64
    big = ModelConfig(
        hidden_size=options.hidden, num_layers=options.layers, num_heads=heads, num_kv_heads=heads // 2, head_dim=64,
        ffn_size=3 * options.hidden, vocab_size=options.vocabulary,
    )  # fmt: skip
    shapes = logical_shapes(big)
    layer = 2 * sum(math.prod(shape) for name, shape in shapes.items() if ".layers.0." in name)
    bound = 2 * options.shard_mb * 10**6 + layer
    worst = 0
    with tempfile.TemporaryDirectory(prefix="benchmark-export-", dir=Path()) as folder:
        place = Path(folder).resolve()
        tokenizer = make_tokenizer(place / "tokenizer")
        for layers in (max(1, options.layers // 3), options.layers):
            model = dataclasses.replace(big, num_layers=layers)
            added, weights = measure(place, f"layers-{layers}", model, tokenizer, options.shard_mb * 10**6)
            worst = max(worst, added)
            print(f"{layers} layers, {weights / 1e6:.0f} MB exported: peak {added / 1e6:.0f} MB above the baseline")
    print(f"bound: two shards of {options.shard_mb} MB and a layer of {layer / 1e6:.0f} MB, {bound / 1e6:.0f} MB")
    return 0 if worst <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
