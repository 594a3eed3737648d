"""Tokens per second of the training data path: packing, corruption, and both in background threads.

    python benchmarks/loader.py [--median 500] [--length 4096] [--tokens 40000000] [--sources 1]

Documents of lognormal length (uint16 ids) are written as shards to a temporary folder, or to one for each of several
sources with weights 1, 2, 3, ...; every figure reads them in the order of training. The first two are per second of CPU
time of one thread, the rest per second on the clock.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from refusion_train.config import Config, SourceConfig
from refusion_train.data.loader import StepFeed, TrainLoader
from refusion_train.data.mixture import Source
from refusion_train.data.shards import ShardSet, ShardWriter
from refusion_train.data.tokenizer import TokenizerInfo
from refusion_train.objective import make_objective

VOCAB, MASK, PAD = 32000, 4, 0
SPECIAL = {"pad": PAD, "unk": 1, "bos": 2, "eos": 3, "mask": MASK}


def write_dataset(path: Path, tokens: int, median: int, seed: int) -> ShardSet:
    """About `tokens` random tokens in documents of lognormal length."""
    rng = np.random.default_rng(seed)
    info = TokenizerInfo(fingerprint="sha256:none", kind="sentencepiece", vocab_size=VOCAB, special_ids=SPECIAL)
    with ShardWriter(path, "train", info) as writer:
        while tokens > 0:
            size = int(np.clip(rng.lognormal(np.log(median), 0.8), 1, 50_000))
            writer.add(rng.integers(5, VOCAB, size), 0, 4 * size)
            tokens -= size
    return ShardSet.open(path)


def rate(make: Callable[[], object], tokens: int, times: int, clock: Callable[[], float]) -> float:
    """Millions of tokens per second of `clock`: the median over calls that make `tokens` each."""
    seconds = []
    for _ in range(times):
        begin = clock()
        make()
        seconds.append(clock() - begin)
    return tokens / float(np.median(seconds)) / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--median", type=int, default=500, help="median document length in tokens")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=40_000_000, help="tokens of the dataset")
    parser.add_argument("--sources", type=int, default=1, help="datasets that are read together")
    words = parser.parse_args()
    config = Config()
    config.data.sequence_length, config.data.streams = words.length, 16
    config.train.global_batch_size, config.train.micro_batch_size = max(16, (1 << 18) // words.length), 1
    step_tokens = config.train.global_batch_size * words.length
    objective = make_objective(config.objective, MASK, PAD)
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for number in range(words.sources):
            path = Path(folder) / f"train-{number}"
            dataset = write_dataset(path, words.tokens // words.sources, words.median, number)
            sources.append(Source(path.name, dataset, SourceConfig(str(path), number + 1.0)))
        mean = float(np.mean([entry.dataset.index.tokens / entry.dataset.index.documents for entry in sources]))
        print(f"rows of {words.length}, documents of {mean:.0f} tokens on average, corruption in {objective.backend}")
        feed = StepFeed(sources, config, objective)
        taken = feed.take()
        feed.make(taken)  # compiles
        steps = 150  # of which some read far ahead: together, or a median would not see them
        packing = rate(lambda: [feed.take() for _ in range(steps)], steps * step_tokens, 1, time.thread_time)
        print(f"packing              {packing:7.1f} M tokens/s per CPU")
        corrupting = rate(lambda: feed.make(taken), step_tokens, 20, time.thread_time)
        print(f"corruption           {corrupting:7.1f} M tokens/s per CPU")
        for workers in (0, 1, 2):
            config.data.workers = workers
            with TrainLoader(sources, config, objective) as loader:
                for _ in range(config.data.prefetch + 2):
                    next(loader)
                begin, steps = time.perf_counter(), 100
                for _ in range(steps):
                    next(loader)
                speed = steps * step_tokens / (time.perf_counter() - begin) / 1e6
            print(f"loader, {workers} threads    {speed:7.1f} M tokens/s on the clock")


if __name__ == "__main__":
    main()
