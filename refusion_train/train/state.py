"""What a run must remember: the few numbers of its progress, and which settings it cannot change any more.

`TrainState` goes into every checkpoint's state.json, together with the resolved configuration and the fingerprints of
the data, so that a later start can tell whether it would continue the same run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refusion_train.config import Config, DataConfig, ModelConfig, ObjectiveConfig, all_keys
from refusion_train.data.mixture import Source
from refusion_train.data.streams import Cursor, Damage
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
    source_tokens: those of `tokens` that came from each dataset, by its fingerprint; left_out: of each dataset the
    blocks (numbers as text, as in JSON) that could not be read at least once, and their tokens. These two are
    replaced, never changed: a checkpoint may be written meanwhile.
    """

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0
    cursor: Cursor | None = None
    source_tokens: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)

    def advance(self, cursor: Cursor, tokens: int, supervised_tokens: float, skipped: bool) -> None:
        """Count one more step, which consumed so much and led to `cursor`."""
        self.step += 1
        self.tokens += tokens
        self.supervised_tokens += round(supervised_tokens)
        self.skipped += skipped
        self.bad_in_a_row = self.bad_in_a_row + 1 if skipped else 0
        self.cursor = cursor

    def count_sources(self, fingerprints: Sequence[str], tokens: Sequence[int]) -> None:
        """Count the tokens of a step by the datasets that they came from."""
        added = dict(zip(fingerprints, tokens, strict=True))
        self.source_tokens = {**self.source_tokens, **{f: self.source_tokens.get(f, 0) + n for f, n in added.items()}}

    def has_left_out(self, damage: Damage) -> bool:
        """Whether the block is counted already."""
        return str(damage.block) in self.left_out.get(damage.fingerprint, {})

    def leave_out(self, damage: Sequence[Damage]) -> None:
        """Count blocks that could not be read."""
        left_out = {fingerprint: dict(blocks) for fingerprint, blocks in self.left_out.items()}
        for entry in damage:
            left_out.setdefault(entry.fingerprint, {})[str(entry.block)] = entry.tokens
        self.left_out = left_out

    def to_dict(self) -> dict[str, Any]:
        """For JSON. The cursor must be that of all ranks."""
        assert self.cursor is not None, "nothing has been trained yet"
        return {**dataclasses.asdict(self), "cursor": self.cursor.to_dict()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> TrainState:
        """Inverse of `to_dict`. Raises CheckpointError for anything else."""
        try:
            cursor = Cursor.from_dict(saved["cursor"]) if "cursor" in saved else None
            # A version that knew a single dataset did not count these.
            early = {"source_tokens": {name: saved.get("tokens", 0) for name in cursor.places} if cursor else {}}
            saved = {**early, "left_out": {}, **saved, "cursor": cursor}
            return cls(**{entry.name: saved[entry.name] for entry in dataclasses.fields(cls)})
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"state.json of the checkpoint lacks {error}; use another checkpoint") from None


def describe_run(state: TrainState, config: Config, sources: Sequence[Source]) -> dict[str, Any]:
    """Contents of state.json. Under `data`, path and fingerprint are those of the first source."""
    dataset = sources[0].dataset
    return {
        **state.to_dict(),
        "config": dataclasses.asdict(config),
        "data": {
            "path": dataset.location,
            "fingerprint": dataset.fingerprint,
            "tokenizer": dataset.index.tokenizer,
            "special_ids": dataset.index.special_ids,
            "sources": [
                {
                    "path": source.dataset.location,
                    "fingerprint": source.dataset.fingerprint,
                    "name": source.name,
                    "weight": source.config.weight,
                    "epochs": source.config.epochs,
                }
                for source in sources
            ],
        },
    }


def check_unchanged(saved: dict[str, Any], config: Config, sources: Sequence[Source], folder: Path) -> list[str]:
    """Refuse to go on from a checkpoint whose run was another one; return the changes that are allowed.

    saved: contents of its state.json; folder: the checkpoint, to name it. The changes are texts `key old -> new`.
    Of its sources at least one must be one that the run has read; others may come and go, and weights may change.
    Raises ConfigError naming the key, both values and the remedy.
    """
    changes = _check_sources(saved, sources, folder)
    now, before = dataclasses.asdict(config), _whole(saved.get("config", {}))
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


def _check_sources(saved: dict[str, Any], sources: Sequence[Source], folder: Path) -> list[str]:
    """The changes of `data.train`, by what the datasets hold; paths may differ. Raises ConfigError for other data."""
    data = saved.get("data", {})
    # A version that knew a single dataset did not list them.
    before = data.get("sources") or [{"weight": 1.0, "epochs": None, "name": "", **data}]
    known = {entry.get("fingerprint"): entry for entry in before}
    read = {*known, *saved.get("source_tokens", {})}
    now = {source.dataset.fingerprint: source for source in sources}
    if not read & now.keys():
        paths, fingerprints = ", ".join(source.config.path for source in sources), ", ".join(now)
        raise ConfigError(
            f"data.train={paths} is not the data of this run: its fingerprint is {fingerprints}, that of checkpoint "
            f"{folder} ({data.get('path')}) is {', '.join(str(name) for name in known)}; give data that the run has "
            "read (its weight may end at 0), or another run_dir for a new run"
        )
    if data.get("tokenizer") not in (None, sources[0].dataset.index.tokenizer):
        raise ConfigError(f"data.train was made with another tokenizer than the data of checkpoint {folder}")
    changes = []
    for fingerprint, source in now.items():
        if fingerprint not in known:
            again = " (goes on where it stopped)" if fingerprint in read else ""
            changes.append(f"data.train + {source.config.path}{again}")
            continue
        old = known[fingerprint]
        alone = len(now) == len(known) == 1  # then a weight means nothing
        for key, new in (("weight", source.config.weight), ("epochs", source.config.epochs)):
            if old.get(key) != new and not (alone and key == "weight"):
                changes.append(f"{key} of {source.config.path} {old.get(key)} -> {new}")
    gone = [entry for fingerprint, entry in known.items() if fingerprint not in now]
    return changes + [f"data.train - {entry.get('path')} (its place is kept)" for entry in gone]


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
    """A saved configuration with the defaults of keys that its version did not have yet."""
    sections = {"model": ModelConfig(), "objective": ObjectiveConfig(), "data": DataConfig()}
    return {**saved, **{name: {**dataclasses.asdict(new), **saved.get(name, {})} for name, new in sections.items()}}


def _get(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
