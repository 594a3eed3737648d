"""Peak memory and time of `refusion import` and `refusion export` of a large random checkpoint, each in a process.

    python benchmarks/convert_memory.py --gigabytes 2 --dir /tmp/convert

Prints one line for each, the ratio of peak memory to the size of the weights, and whether the two folders hold the
same bytes. What it writes (about six times the size: bf16 folder, fp32 checkpoint, bf16 folder) is removed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from refusion_train.config import ModelConfig
from refusion_train.convert.family import config_of
from refusion_train.convert.names import logical_shapes
from refusion_train.convert.safetensors_stream import write_model

_MEASURED = """
import resource, sys, time
began = time.perf_counter()
from refusion_train.cli import run
code = run(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(f"MEASURED {code} {peak} {time.perf_counter() - began}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the weights in bf16")
    parser.add_argument("--shard-gigabytes", type=float, default=None, help="size of a file; default: one file")
    parser.add_argument("--dir", type=Path, default=None, help="where there is room; default: the system's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        here = Path(folder)
        size = make_folder(here / "source", options.gigabytes, options.shard_gigabytes or options.gigabytes * 2)
        print(
            f"weights: {size / 1e9:.2f} GB in bf16, of it vocabulary {_vocabulary_bytes(here / 'source') / 1e9:.2f} GB"
        )
        limit = f"{options.shard_gigabytes or 2 * options.gigabytes}GB"
        measure("import", size, "import", str(here / "source"), "--out", str(here / "imported"))
        measure(
            "export", size, "export", str(here / "imported"), "--out", str(here / "back"), "--max-shard-size", limit
        )
        names = sorted(path.name for path in (here / "source").glob("*.safetensors"))
        same = all(_equal(here / "source" / name, here / "back" / name) for name in names)
        print(f"{len(names)} file(s) of weights come back to the bit: {same}")


def make_folder(folder: Path, gigabytes: float, shard_gigabytes: float) -> int:
    """A Qwen3 folder with random weights of about this size; returns the bytes of its weights."""
    model = ModelConfig(num_layers=1, vocab_size=151_936, vocab_multiple=128)
    fixed = sum(torch.Size(shape).numel() for shape in logical_shapes(model).values())
    model.num_layers = 2
    layer = sum(torch.Size(shape).numel() for shape in logical_shapes(model).values()) - fixed
    model.num_layers = max(1, round((gigabytes * 1e9 / 2 - fixed) / layer) + 1)
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    shapes = logical_shapes(model)

    def read(name: str, rows: slice) -> torch.Tensor:
        return torch.empty(rows.stop - rows.start, *shapes[name][1:]).normal_(0, 0.02, generator=generator)

    write_model(folder, shapes, torch.bfloat16, read, int(shard_gigabytes * 1e9))
    (folder / "config.json").write_text(json.dumps(config_of(model)))
    return 2 * sum(torch.Size(shape).numel() for shape in shapes.values())


def measure(name: str, size: int, *words: str) -> None:
    """Run the command in a process of its own and print its peak resident memory."""
    done = subprocess.run([sys.executable, "-c", _MEASURED, *words], capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED")), "MEASURED 1 0 0")
    code, peak, seconds = line.split()[1:]
    assert code == "0", f"{name} failed: {done.stderr}"
    print(f"{name}: peak {float(peak) / 1e9:.2f} GB, {float(peak) / size:.2f} of the weights, {float(seconds):.0f} s")


def _vocabulary_bytes(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return 2 * config["vocab_size"] * config["hidden_size"]


def _equal(a: Path, b: Path) -> bool:
    with open(a, "rb") as first, open(b, "rb") as second:
        while True:
            block = first.read(1 << 24)
            if block != second.read(1 << 24):
                return False
            if not block:
                return True


if __name__ == "__main__":
    main()
