"""Tokens per second of `refusion data shards`, over those of the tokenizer libraries' own batch encoding in memory.

    python benchmarks/tokenizing.py [--megabytes 200] [--workers 2] [--memory-gigabytes 2] [--hf DIR]

The corpus is Python's own sources and those of installed packages, one document a file, as JSON lines. The tool reads
the file, encodes in worker processes and writes shards, starting and loading included; the library encodes the same
texts, already in memory, with as many threads. Ratios are printed by the clock and by CPU time (which neighbours on a
busy machine disturb less), and the largest sum of resident memory over all processes of the tool. With
`--memory-gigabytes` the corpus is written again and again into a file of that size and tokenized once more for its
memory.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: this file would hide the standard library's module of its name

import argparse
import glob
import itertools
import json
import os
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHUNK = 2 << 20  # texts are given to the library in batches of about this size, as the tool's workers get them


@dataclass
class Measured:
    """One run: seconds on the clock, seconds of CPU time of all its processes, tokens (without begin and end tokens for
    a library), peak memory in bytes."""

    seconds: float
    cpu: float
    tokens: int
    memory: int = 0

    def line(self, name: str) -> str:
        memory = f", peak memory {self.memory / 1e6:,.0f} MB" if self.memory else ""
        return (
            f"{name:<34}{self.tokens / self.seconds / 1e6:8.2f} M tokens/s "
            f"({self.tokens / self.cpu / 1e6:.2f} M per CPU second{memory})"
        )


def write_corpus(path: Path, size: int) -> int:
    """About `size` bytes of text as JSON lines; returns the bytes of text."""
    roots = [Path(os.__file__).parent, *map(Path, sys.path)]
    files = itertools.chain.from_iterable(
        glob.iglob(f"{root}/**/*.py", recursive=True) for root in dict.fromkeys(roots)
    )
    seen: set[int] = set()
    total = 0
    with open(path, "wb") as file:
        for name in files:
            try:
                text = Path(name).read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text and hash(text) not in seen:
                seen.add(hash(text))
                file.write(orjson.dumps({"text": text}) + b"\n")
                total += len(text.encode())
                if total >= size:
                    break
    return total


def make_tokenizers(folder: Path, corpus: Path, sample: int) -> tuple[Path, Path]:
    """A SentencePiece tokenizer of ours and a byte-level BPE like Qwen's, both trained on the begin of the corpus."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    from data_tools.train_tokenizer import train_tokenizer

    train_tokenizer([str(corpus)], str(folder / "sp"), 16000, sample_bytes=sample, progress=False)
    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=50000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"]
    )
    with open(corpus, "rb") as file:
        lines = itertools.islice(file, None, None, 4)
        library.train_from_iterator((orjson.loads(line)["text"] for line in lines), trainer)
    (folder / "hf").mkdir()
    library.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder / "sp", folder / "hf"


def run(words: list[str], workers: int) -> Measured:
    """This file as another process, with the memory of all its processes watched."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    process = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, env=environment)
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(psutil.Process(process.pid), peak), daemon=True)
    watcher.start()
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed")
    watcher.join()
    return Measured(**{**json.loads(output.splitlines()[-1]), "memory": peak[0]})


def _watch(process: psutil.Process, peak: list[int]) -> None:
    while True:
        try:
            everyone = [process, *process.children(recursive=True)]
            memory = 0
            for one in everyone:
                try:
                    memory += one.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            if process.status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        peak[0] = max(peak[0], memory)
        time.sleep(0.05)


def measure_tool(corpus: str, tokenizer: str, encoder: str, workers: int) -> dict[str, Any]:
    """The whole tool."""
    from data_tools.build_shards import build_shards

    out = tempfile.mkdtemp(prefix="shards", dir=Path(corpus).parent)
    begun = time.monotonic()
    report = build_shards([corpus], tokenizer, out, workers=workers, encoder=encoder, progress=False)  # type: ignore[arg-type]
    seconds = time.monotonic() - begun
    shutil.rmtree(out)
    return {"seconds": seconds, "cpu": _cpu(), "tokens": report.tokens}


def measure_library(corpus: str, tokenizer: str, workers: int) -> dict[str, Any]:
    """The library's own batch encoding of texts that lie in memory, to arrays of ids."""
    import numpy as np

    with open(corpus, "rb") as file:
        texts = [orjson.loads(line)["text"] for line in file]
    batches: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size > _CHUNK:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    if (Path(tokenizer) / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
        encode: Any = lambda batch: [  # noqa: E731
            np.array(one.ids, np.uint32) for one in library.encode_batch_fast(batch, add_special_tokens=False)
        ]
    else:
        import sentencepiece

        model: Any = sentencepiece.SentencePieceProcessor(model_file=f"{tokenizer}/tokenizer.model")
        encode = lambda batch: model.encode(batch, return_type="numpy", num_threads=workers)  # noqa: E731

    begun, cpu = time.monotonic(), _cpu()
    tokens = sum(len(ids) for batch in batches for ids in encode(batch))
    return {"seconds": time.monotonic() - begun, "cpu": _cpu() - cpu, "tokens": tokens}


def _cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def compare(name: str, tool: Measured, library: Measured, wanted: float) -> None:
    """Print one ratio."""
    clock = (tool.tokens / tool.seconds) / (library.tokens / library.seconds)
    cpu = (tool.tokens / tool.cpu) / (library.tokens / library.cpu)
    print(f"{name:<34}{clock:8.2f} by the clock, {cpu:.2f} by CPU time (wanted: {wanted:g})", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="text to measure the fast encoder on")
    parser.add_argument("--slow-megabytes", type=int, default=50, help="text to measure everything else on")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-gigabytes", type=float, default=0, help="text to measure memory on")
    parser.add_argument("--hf", help="folder with tokenizer.json (default: one is trained)")
    parser.add_argument("--sentencepiece", help="folder of a tokenizer of ours (default: one is trained)")
    parser.add_argument("--folder", help="where temporary files go")
    parser.add_argument("--only", choices=["sentencepiece", "hf", "memory"], help="a part of it")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=words.folder) as name:
        folder = Path(name)
        corpus, small = folder / "corpus.jsonl", folder / "small.jsonl"
        sizes = [write_corpus(path, size * 1_000_000) for path, size in ((corpus, words.megabytes),
                                                                        (small, words.slow_megabytes))]  # fmt: skip
        print(f"{sizes[1] / 1e6:,.0f} MB of text ({sizes[0] / 1e6:,.0f} for the fast encoder), {words.workers} workers")
        sp, hf = Path(words.sentencepiece or ""), Path(words.hf or "")
        if not (words.hf and words.sentencepiece):
            made = make_tokenizers(folder, corpus, 8_000_000)
            sp, hf = Path(words.sentencepiece or made[0]), Path(words.hf or made[1])
        count = str(words.workers)
        if words.only in (None, "sentencepiece"):
            library = run(["library", str(small), str(sp), count], words.workers)
            tool = run(["tool", str(small), str(sp), "auto", count], words.workers)
            print(library.line("sentencepiece in memory"), tool.line("refusion data shards"), sep="\n")
            compare("tool over library", tool, library, 0.85)
        if words.only in (None, "hf"):
            library = run(["library", str(small), str(hf), count], words.workers)
            print(library.line("tokenizers encode_batch_fast"), flush=True)
            for encoder, text, wanted in (("reference", small, 0.85), ("fast", corpus, 10.0)):
                tool = run(["tool", str(text), str(hf), encoder, count], words.workers)
                print(tool.line(f"refusion data shards ({encoder})"))
                compare("tool over library", tool, library, wanted)
        if words.memory_gigabytes:
            large = folder / "large.jsonl"
            with open(large, "wb") as file:
                while file.tell() < words.memory_gigabytes * 1e9:
                    file.write(corpus.read_bytes())
            for tokenizer, encoder in ((sp, "auto"), (hf, "auto")):
                tool = run(["tool", str(large), str(tokenizer), encoder, count], words.workers)
                print(tool.line(f"{large.stat().st_size / 1e9:.1f} GB with {tokenizer.name}"), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["tool"]:
        print(json.dumps(measure_tool(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))))
    elif sys.argv[1:2] == ["library"]:
        print(json.dumps(measure_library(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        main()
