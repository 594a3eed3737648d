"""A tiny world for tests that need one: a tokenizer, shards for training and validation, a configuration on them.

The folders are made once per session and are to be read only; a test that damages something copies it first.
"""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tiny_texts import tiny_texts

from refusion_train.config import Config, ModelConfig, ObjectiveConfig, TrainConfig, validate

VOCABULARY = 320


@dataclass(frozen=True)
class TinyDataset:
    """Folders of shards: about 16,000 tokens for training, 2,300 for validation, documents of 2 to 150 tokens."""

    train: Path
    validation: Path


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer with byte fallback and 320 pieces."""
    import sentencepiece

    from refusion_train.data.tokenizer import SPECIAL_PIECES, Tokenizer

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([text for text in tiny_texts(200, seed=1) if text]),
        model_writer=model, model_type="bpe", vocab_size=VOCABULARY, byte_fallback=True, character_coverage=1.0,
        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
        pad_id=0, unk_id=1, bos_id=2, eos_id=3, pad_piece="<pad>", unk_piece="<unk>", bos_piece="<s>",
        eos_piece="</s>", control_symbols=[SPECIAL_PIECES["mask"]], num_threads=1, minloglevel=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.create(folder, model.getvalue(), "bpe")
    return folder


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> TinyDataset:
    """Shards of tiny texts, several blocks each."""
    from refusion_train.data.shards import ShardWriter
    from refusion_train.data.tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("shards")
    tokenizer = Tokenizer.load(tiny_tokenizer)
    for name, count, seed in (("train", 250, 2), ("validation", 30, 3)):
        with ShardWriter(
            folder / name, name, tokenizer.info, shard_bytes=16_384, block_tokens=1_024, tokenizer_folder=tiny_tokenizer
        ) as writer:
            for text in tiny_texts(count, seed):
                tokens = np.array([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id])
                writer.add(tokens, 0, len(text.encode()))
    return TinyDataset(folder / "train", folder / "validation")


@pytest.fixture(scope="session")
def _tiny_template(tiny_dataset: TinyDataset) -> Config:
    config = Config(
        seed=7,
        model=ModelConfig(
            hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=64, vocab_multiple=64,
            rope_theta=10_000.0, max_sequence_length=64,
        ),
        objective=ObjectiveConfig(slot_sizes=[2, 4, 8]),
        train=TrainConfig(
            steps=8, global_batch_size=8, micro_batch_size=2, precision="fp32", lr=1e-2, warmup_steps=2,
            validation_interval=0, validation_rows=8, tensorboard=False,
        ),
    )  # fmt: skip
    config.data.train, config.data.validation = str(tiny_dataset.train), str(tiny_dataset.validation)
    config.data.sequence_length, config.data.streams, config.data.workers = 64, 8, 1
    config.checkpoint.interval = 1000
    return config


@pytest.fixture
def tiny_config(_tiny_template: Config, tmp_path: Path) -> Config:
    """8 steps of a model of some 30,000 weights on the tiny dataset, in a run folder of its own; change it freely."""
    config = copy.deepcopy(_tiny_template)
    config.run_dir = str(tmp_path / "run")
    validate(config)
    return config


@pytest.fixture
def again(undisturbed: Config, tmp_path: Path) -> Config:
    """The same settings for a run in a folder of its own; change it freely."""
    config = copy.deepcopy(undisturbed)
    config.run_dir = str(tmp_path / "run")
    return config
