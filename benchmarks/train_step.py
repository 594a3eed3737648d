"""Tokens per CPU second of a training step, against `transformers` Qwen3ForCausalLM with ordinary cross entropy.

    python benchmarks/train_step.py [--rounds 7] [--threads 1] [--objective slots ar]

The same shape of model on both sides (256 hidden, 6 layers, vocabulary 4096, tied embeddings, rows of 512 tokens,
fp32), the same number of threads, AdamW and clipping on both. A step is everything from token ids to new weights: on
our side corruption, the move to the device, the pipeline schedule and the ZeRO engine as `refusion train` runs them; on
the other forward (sdpa attention), backward, clipping and `torch.optim.AdamW`. They take turns within a round, in an
order that changes from round to round. On a machine that does other work too, trust the ratio of the best rounds.

(a) full rows: 8 rows of one document each, the same tokens on both sides.
(b) documents: lengths are lognormal (median 180, sigma 1, cut at 512). The other side takes 8 documents a batch, padded
    on the right to the longest of them; ours lays the same documents one behind the other in rows and steps on 8 rows.
    Only real tokens count. As causal attention never looks right, the other side gets no padding mask, which is the
    faster way for it (`--padding-mask` passes one).

`ar` is the like-for-like figure: both sides predict every next token. `slots` is what this package is for, with its
default settings: the same rows, corrupted, and a target at nearly every position.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from refusion_train.config import Config, ModelConfig, ObjectiveConfig, validate  # noqa: E402
from refusion_train.model.batch import to_device  # noqa: E402
from refusion_train.model.slot_model import build_model_chunks  # noqa: E402
from refusion_train.objective import PackedDocuments, document_key, make_objective  # noqa: E402
from refusion_train.parallel.engine import Engine  # noqa: E402
from refusion_train.parallel.groups import Groups, destroy, init_groups  # noqa: E402
from refusion_train.train.optim import param_groups  # noqa: E402
from refusion_train.train.step import kind_scales  # noqa: E402

LENGTH, ROWS = 512, 8
MASK_ID, PAD_ID, FIRST_ID = 4, 0, 5
WANTED = {"full rows": 1.0, "documents": 1.8}


def make_config(objective: str, micro_batch: int) -> Config:
    """The run that is measured."""
    config = Config(
        model=ModelConfig(
            hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64, ffn_size=768, vocab_size=4096,
            max_sequence_length=LENGTH,
        ),
        objective=ObjectiveConfig(name=objective),
    )  # fmt: skip
    config.data.sequence_length = LENGTH
    config.train.precision, config.train.global_batch_size, config.train.micro_batch_size = "fp32", ROWS, micro_batch
    validate(config, 1)
    return config


class Ours:
    """The engine with a fresh model; one object for each objective."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self.config, self.groups = config, groups
        self.objective = make_objective(config.objective, MASK_ID, PAD_ID)
        chunks = build_model_chunks(config, groups, self.objective.bidirectional)
        self.engine = Engine(config, groups, chunks, lambda given: param_groups(given, config.train.weight_decay))

    def step(self, packed: PackedDocuments) -> None:
        """One optimizer step on the rows of `packed`."""
        batch = self.objective.corrupt(packed)
        scales = kind_scales(self.config.objective, batch.counts.sum(axis=0))
        size = self.config.train.micro_batch_size
        parts = [batch.rows(start, start + size) for start in range(0, len(batch.input_ids), size)]
        self.engine.forward_backward(
            [to_device(part, part.loss_weight * scales[part.target_kind], self.groups.device) for part in parts]
        )
        self.engine.step(self.config.train.lr)


class Theirs:
    """Qwen3ForCausalLM of the same shape with torch's AdamW."""

    def __init__(self, config: Config) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        model, train = config.model, config.train
        shape: dict[str, Any] = dict(
            vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.ffn_size,
            num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim, tie_word_embeddings=model.tie_embeddings,
            max_position_embeddings=LENGTH, attn_implementation="sdpa",
        )  # fmt: skip
        self.model: Any = Qwen3ForCausalLM(Qwen3Config(**shape)).train()
        self.clip = train.clip
        self.optimizer = torch.optim.AdamW(
            param_groups([self.model], train.weight_decay), lr=train.lr, betas=(train.beta1, train.beta2)
        )

    def step(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> None:
        """One optimizer step on [b, s]."""
        self.model(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def pack(documents: list[np.ndarray]) -> list[PackedDocuments]:
    """Documents one behind the other in rows, cut at their ends, ROWS rows a step; the last row may be padded."""
    stream = np.concatenate(documents).astype(np.int32)
    rows = -(-len(stream) // LENGTH)
    tokens = np.full((rows, LENGTH), PAD_ID, np.int32)
    tokens.reshape(-1)[: len(stream)] = stream
    ends = np.cumsum([len(document) for document in documents])
    starts = np.unique(np.concatenate(([0], ends[:-1], np.arange(0, len(stream), LENGTH))))
    lengths = np.diff(np.append(starts, len(stream)))
    keys = document_key(0, 0, np.arange(len(starts), dtype=np.uint64), 0)
    steps = []
    for first in range(0, rows, ROWS):
        chosen = (starts >= first * LENGTH) & (starts < (first + ROWS) * LENGTH)
        prompts = np.minimum(1, lengths[chosen])
        steps.append(
            PackedDocuments(
                tokens[first : first + ROWS], starts[chosen] - first * LENGTH, lengths[chosen], prompts, keys[chosen]
            )
        )
    return steps


def pad(documents: list[np.ndarray], masked: bool) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Batches of ROWS documents, each padded on the right to its longest: ids, labels, mask."""
    batches = []
    for first in range(0, len(documents), ROWS):
        chosen = documents[first : first + ROWS]
        ids = np.full((len(chosen), max(map(len, chosen))), PAD_ID, np.int64)
        labels = np.full_like(ids, -100)
        for row, document in enumerate(chosen):
            ids[row, : len(document)] = labels[row, : len(document)] = document
        mask = torch.from_numpy((labels != -100).astype(np.int64)) if masked else None
        batches.append((torch.from_numpy(ids), torch.from_numpy(labels), mask))
    return batches


def draw(case: str, count: int, seed: int) -> list[np.ndarray]:
    """Random documents: of full length, or of lognormal lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.full(count, LENGTH)
    if case == "documents":
        lengths = np.clip(rng.lognormal(np.log(180), 1.0, count), 2, LENGTH).astype(int)
    return [rng.integers(FIRST_ID, 4096, length) for length in lengths]


def measure(case: str, ours: dict[str, Ours], theirs: Theirs, options: argparse.Namespace) -> None:
    """Print one table: real tokens per CPU second (of all threads) of each contender, and the ratios."""
    count = ROWS if case == "full rows" else options.documents
    names = [*ours, "transformers"]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        documents = draw(case, count, seed=number)
        packed, padded = pack(documents), pad(documents, options.padding_mask)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.process_time()
            if name == "transformers":
                for batch in padded:
                    theirs.step(*batch)
            else:
                for rows in packed:
                    ours[name].step(rows)
            rates[name].append(sum(map(len, documents)) / (time.process_time() - start))
    base = rates["transformers"][1:]  # the first round warms up
    print(f"\n{case:14}{'real tokens per CPU second':>28}{'ratio to transformers':>42}")
    print(f"{'':14}{'median':>14}{'best':>14}{'best to best':>16}{'median of rounds':>18}{'range':>16}   wanted")
    for name in names:
        values = rates[name][1:]
        ratios = [mine / other for mine, other in zip(values, base, strict=True)]
        print(
            f"{name:14}{statistics.median(values):14.0f}{max(values):14.0f}{max(values) / max(base):16.2f}"
            f"{statistics.median(ratios):18.2f}{f'{min(ratios):.2f} - {max(ratios):.2f}':>16}"
            f"   {f'>= {WANTED[case]}' if name == 'slots' else ''}",
            flush=True,
        )


def main() -> None:
    """Measure both cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, on both sides")
    parser.add_argument("--documents", type=int, default=32, help="documents of a round of case (b), a multiple of 8")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of ours that go through the model at once")
    parser.add_argument("--padding-mask", action="store_true", help="give the other side a padding mask in (b)")
    parser.add_argument("--objective", nargs="+", default=["slots", "ar"], choices=["slots", "ar", "mdm"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    groups = init_groups(make_config("slots", options.micro_batch))
    print(f"{options.threads} thread(s) on both sides, {options.rounds} rounds, torch {torch.__version__}")
    ours = {name: Ours(make_config(name, options.micro_batch), groups) for name in options.objective}
    theirs = Theirs(make_config("ar", options.micro_batch))
    for case in WANTED:
        measure(case, ours, theirs, options)
    destroy()


if __name__ == "__main__":
    main()
