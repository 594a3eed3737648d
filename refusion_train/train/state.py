"""What a run must remember: the few numbers of its progress, and which settings it cannot change any more.

`TrainState` goes into every checkpoint's state.json, together with the resolved configuration and the fingerprints of
the data, so that a later start can tell whether it would continue the same run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refusion_train.config import Config, ModelConfig, all_keys
from refusion_train.data.loader import Cursor
from refusion_train.data.shards import ShardSet
from refusion_train.errors import CheckpointError, ConfigError

# Another value of one of these would make it another model, or another sequence of batches.
FIXED_KEYS = (
    "seed", "data.sequence_length", "data.streams", "data.shuffle_blocks", "train.global_batch_size",
    "objective.name", "objective.rng",
    *(f"model.{name}" for name in (
        "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size",
        "vocab_multiple", "qk_norm", "qkv_bias", "tie_embeddings", "rope_theta", "norm_eps",
    )),
)  # fmt: skip
# Where things are and how they are computed: changes of these need no mention.
_SILENT_PREFIXES = (
    "run_dir", "parallel.", "checkpoint.", "data.train", "data.validation", "data.workers", "data.cache_",
)  # fmt: skip


@dataclass
class TrainState:
    """Progress of a run, equal on all ranks (the cursor is this rank's own between checkpoints).

    step: optimizer steps done, skipped ones included; tokens, supervised_tokens: consumed so far over all ranks;
    skipped: steps without an update because something was not finite; bad_in_a_row: the last so many of them.
    """

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0
    cursor: Cursor | None = None

    def advance(self, cursor: Cursor, tokens: int, supervised_tokens: float, skipped: bool) -> None:
        """Count one more step, which consumed so much and led to `cursor`."""
        self.step += 1
        self.tokens += tokens
        self.supervised_tokens += round(supervised_tokens)
        self.skipped += skipped
        self.bad_in_a_row = self.bad_in_a_row + 1 if skipped else 0
        self.cursor = cursor

    def to_dict(self) -> dict[str, Any]:
        """For JSON. The cursor must be that of all ranks."""
        assert self.cursor is not None, "nothing has been trained yet"
        return {**dataclasses.asdict(self), "cursor": self.cursor.to_dict()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> TrainState:
        """Inverse of `to_dict`. Raises CheckpointError for anything else."""
        try:
            numbers = {field.name: saved[field.name] for field in dataclasses.fields(cls)}
            return cls(**{**numbers, "cursor": Cursor.from_dict(saved["cursor"])})
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"state.json of the checkpoint lacks {error}; use another checkpoint") from None


def describe_run(state: TrainState, config: Config, dataset: ShardSet) -> dict[str, Any]:
    """Contents of state.json."""
    return {
        **state.to_dict(),
        "config": dataclasses.asdict(config),
        "data": {
            "path": dataset.location,
            "fingerprint": dataset.fingerprint,
            "tokenizer": dataset.index.tokenizer,
            "special_ids": dataset.index.special_ids,
        },
    }


def check_unchanged(saved: dict[str, Any], config: Config, dataset: ShardSet, folder: Path) -> list[str]:
    """Refuse to go on from a checkpoint whose run was another one; return the changes that are allowed.

    saved: contents of its state.json; folder: the checkpoint, to name it. The changes are texts `key old -> new`.
    Raises ConfigError naming the key, both values and the remedy.
    """
    data = saved.get("data", {})
    if data.get("fingerprint") != dataset.fingerprint:
        raise ConfigError(
            f"data.train={config.data.train} is not the data of this run: its fingerprint is {dataset.fingerprint}, "
            f"that of checkpoint {folder} ({data.get('path')}) is {data.get('fingerprint')}; "
            "give the same data, or another run_dir for a new run"
        )
    now, before = dataclasses.asdict(config), _whole(saved.get("config", {}))
    changes = []
    for key in all_keys():
        old, new = _get(before, key), _get(now, key)
        if old == new:
            continue
        if key in FIXED_KEYS:
            raise ConfigError(
                f"{key}={new} cannot replace {key}={old} of checkpoint {folder}; a run keeps it for life: "
                "set it back, or give another run_dir for a new run"
            )
        if not key.startswith(_SILENT_PREFIXES):
            changes.append(f"{key} {old} -> {new}")
    return changes


def adopt_model(saved: dict[str, Any], config: Config, tokenizer: dict[str, str], folder: Path) -> None:
    """Take over from a checkpoint's state.json what is not given; refuse another model, or data of another tokenizer.

    Raises ConfigError.
    """
    before = _whole(saved.get("config", {}))
    if config.model.vocab_size is None:
        config.model.vocab_size = _get(before, "model.vocab_size")
    now = dataclasses.asdict(config)
    for key in FIXED_KEYS:
        old, new = _get(before, key), _get(now, key)
        if key.startswith("model.") and old != new:
            raise ConfigError(f"{key}={new}, but checkpoint {folder} has {key}={old}; give the run's own config.yaml")
    made_by = saved.get("data", {}).get("tokenizer")
    imported = made_by is not None and "fingerprint" not in made_by  # of a folder with a tokenizer that is not ours
    if made_by != tokenizer and not imported:
        raise ConfigError(
            f"data.validation={config.data.validation} was made with another tokenizer ({tokenizer}) than the data of "
            f"checkpoint {folder} ({made_by}); build it with the same"
        )


def _whole(saved: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration with the defaults of model keys that its version did not have yet."""
    return {**saved, "model": {**dataclasses.asdict(ModelConfig()), **saved.get("model", {})}}


def _get(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
