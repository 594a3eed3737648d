"""Tokens per second of corrupting packed rows: compiled and in numpy, against a plain Python loop over slots.

    python benchmarks/corruption.py [--rows 32] [--length 4096] [--median-document 180] [--rounds 30]

One core; the three take turns, so that they share whatever else the machine does. The plain loop is the straightforward
way to write the objective: for each document cut the slots, draw, shuffle, and copy slot by slot with array slices. It
draws in the paper's order from `random.Random`, which makes its result comparable: it equals `objective.rng=reference`
exactly, and that is checked first. Prints ratios of the fastest and of the median rounds (CPU time).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from refusion_train.config import ObjectiveConfig
from refusion_train.objective import CLEAN, IGNORE, MASKED, NONE, Batch, PackedDocuments, document_key, make_objective

MASK_ID, PAD_ID, VOCABULARY = 4, 0, 32000
WANTED = {"numpy": 15.0, "compiled": 60.0}


def pack_rows(rows: int, length: int, median: float, sigma: float, seed: int) -> PackedDocuments:
    """Full rows of documents of lognormal length, cut at the ends of rows; a begin token is each one's prompt."""
    rng = np.random.default_rng(seed)
    starts, lengths = [], []
    for row in range(rows):
        at = 0
        while at < length:
            size = min(max(1, int(rng.lognormal(np.log(median), sigma))), length - at)
            starts.append(row * length + at)
            lengths.append(size)
            at += size
    return PackedDocuments(
        tokens=rng.integers(5, VOCABULARY, (rows, length)).astype(np.int32),
        starts=np.array(starts, np.int64),
        lengths=np.array(lengths, np.int64),
        prompts=np.ones(len(starts), np.int64),
        keys=document_key(seed, 0, np.arange(len(starts)), 0),
    )


def plain_loop(packed: PackedDocuments, config: ObjectiveConfig) -> Batch:
    """The slot objective without any cleverness: a loop over documents, and in each over its slots."""
    rows, length = packed.tokens.shape
    batch = Batch.empty(rows, length)
    positions = np.arange(length)
    row, number, rng = -1, 0, random.Random()
    for start, size, prompt, key in zip(
        packed.starts.tolist(), packed.lengths.tolist(), packed.prompts.tolist(), packed.keys.tolist(), strict=True
    ):
        if start // length != row:
            row, number, rng = start // length, 0, random.Random(key)
        else:
            number += 1
        begin = start - row * length
        x = packed.tokens[row, begin : begin + size]
        ids, position, labels = batch.input_ids[row], batch.position_ids[row], batch.labels[row]
        kinds, weights, buckets = batch.target_kind[row], batch.loss_weight[row], batch.noise_bucket[row]

        k = rng.choice(config.slot_sizes)
        p = (1 - config.eps) * rng.random() + config.eps
        clean, masked = [], []
        for at in range(prompt, size, k):
            (masked if rng.random() < p else clean).append((at, min(at + k, size)))
        rng.shuffle(clean)

        to = begin + prompt
        batch.document_ids[row, begin : begin + size] = number
        buckets[begin : begin + size] = 0
        ids[begin:to], position[begin:to], labels[begin:to] = x[:prompt], positions[:prompt], IGNORE
        kinds[begin:to], weights[begin:to] = NONE, 0
        if config.cross_slot_targets and 0 < prompt < size:
            labels[to - 1], kinds[to - 1], weights[to - 1] = x[prompt], CLEAN, 1
        for a, b in clean:
            end = to + b - a
            ids[to:end], position[to:end] = x[a:b], positions[a:b]
            kinds[to:end], weights[to:end] = CLEAN, 1
            if config.cross_slot_targets and b < size:
                labels[to:end] = x[a + 1 : b + 1]
            else:
                labels[to : end - 1] = x[a + 1 : b]
                labels[end - 1], kinds[end - 1], weights[end - 1] = IGNORE, NONE, 0
            to = end
        for a, b in masked:
            end = to + b - a
            ids[to:end], position[to:end], labels[to:end] = MASK_ID, positions[a:b], x[a:b]
            kinds[to:end], weights[to:end], buckets[to:end] = MASKED, 1 / p, min(9, int(10 * p))
            to = end
        batch.counts[row] += (kinds[begin : begin + size] == CLEAN).sum(), size - prompt, size > prompt
    return batch


def measure(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of one call in each round. They take turns, each as many calls as last about as long."""
    alone = {name: _seconds(run, 3) for name, run in contenders.items()}
    calls = {name: max(1, round(max(alone.values()) / seconds)) for name, seconds in alone.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            seconds[name].append(_seconds(run, calls[name]))
    return seconds


def _seconds(run: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="rows that are corrupted in one call")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--median-document", type=float, default=180, help="median tokens of a document")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the lengths' logarithms")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    packed = pack_rows(options.rows, options.length, options.median_document, options.sigma, options.seed)
    config = ObjectiveConfig()
    reference = make_objective(ObjectiveConfig(rng="reference"), MASK_ID, PAD_ID, "numpy")
    assert plain_loop(packed, config).equals(reference.corrupt(packed)), "the plain loop does something else"
    compiled, vectorised = (make_objective(config, MASK_ID, PAD_ID, backend) for backend in ("numba", "numpy"))
    assert compiled.corrupt(packed).equals(vectorised.corrupt(packed)), "the backends differ"

    seconds = measure(
        {
            "plain loop": lambda: plain_loop(packed, config),
            "numpy": lambda: vectorised.corrupt(packed),
            "compiled": lambda: compiled.corrupt(packed),
        },
        options.rounds,
    )
    tokens = packed.tokens.size
    print(
        f"{options.rows} rows of {options.length} tokens, {len(packed.starts)} documents, "
        f"slot sizes {config.slot_sizes}, one core, {options.rounds} rounds"
    )
    print(f"{'':12}{'million tokens/s':>24}{'ns/token':>18}{'times the plain loop':>26}")
    print(f"{'':12}{'best':>12}{'median':>12}{'best':>9}{'median':>9}{'best':>13}{'median':>13}   wanted")
    for name, times in seconds.items():
        best, median = min(times), statistics.median(times)
        plain_best, plain_median = min(seconds["plain loop"]), statistics.median(seconds["plain loop"])
        wanted = f">= {WANTED[name]:.0f}" if name in WANTED else ""
        print(
            f"{name:12}{tokens / best / 1e6:12.2f}{tokens / median / 1e6:12.2f}"
            f"{best / tokens * 1e9:9.1f}{median / tokens * 1e9:9.1f}"
            f"{plain_best / best:13.1f}{plain_median / median:13.1f}   {wanted}"
        )


if __name__ == "__main__":
    main()
