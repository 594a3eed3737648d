"""The one place where every knob is declared: names, types, defaults and the checks across fields.

A configuration is built in layers: the dataclass defaults below, then a YAML file, then `key=value`
words of the command line (OmegaConf structured configs, so a wrong type or an unknown key is an error).
`load` returns a typed `Config`; `validate` refuses what cannot work before any expensive step.
"""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from refusion_train import layouts, schedules
from refusion_train.errors import ConfigError

OBJECTIVES = ("slots", "ar", "mdm")
NORMALIZATIONS = ("token", "document", "micro_batch")
PRECISIONS = ("fp32", "bf16")
SCHEDULES = ("cosine", "wsd", "constant")
RECOMPUTE = ("none", "selective", "full")
RESUME = ("auto", "none")
ON_ERROR = ("stop", "skip")
NEW_ROWS = ("mean", "eos", "random")
LINEAR = ("torch", "transformer_engine")
T = TypeVar("T")


@dataclass
class ModelConfig:
    """Shape of the causal language model (Qwen3 family: RMSNorm, GQA, SwiGLU, RoPE)."""

    hidden_size: int = 1024
    num_layers: int = 28
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    ffn_size: int = 3072
    # Rows of the embedding that mean something; null: taken from the shards' tokenizer.
    vocab_size: int | None = None
    # The embedding is padded to a multiple of this, whatever the layout, so that checkpoints need no re-padding.
    vocab_multiple: int = 128
    qk_norm: bool = True
    # Biases of query, key and value, as in Qwen2; no family has them together with qk_norm.
    qkv_bias: bool = False
    tie_embeddings: bool = True
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    # The longest position the model is declared for (max_position_embeddings of an exported folder).
    max_sequence_length: int = 32768
    # Weights that a new run starts from: a Hugging Face folder or a checkpoint of this shape; null: random ones.
    init_from: str | None = None
    # Rows of the vocabulary that a Hugging Face folder lacks, and that of a mask token it was not trained with:
    # the mean of all others, the end-of-text token's, or random.
    init_rows: str = "mean"


@dataclass
class ObjectiveConfig:
    """What is corrupted and what is predicted; arXiv 2512.13586, section 3, and docs/objective.md."""

    name: str = "slots"
    slot_sizes: list[int] = field(default_factory=lambda: [4, 8, 16, 32])
    # Relative frequency of each slot size: [weight, ...], or [[step, [weight, ...]], ...] (linear in between); null:
    # uniform.
    slot_weights: Any = None
    eps: float = 1e-3
    # Weights of the two parts of the loss: numbers, or [[step, weight], ...] (linear in between).
    ar_weight: Any = 1.0
    mdm_weight: Any = 1.0
    # Share of documents that are not masked but trained plainly left to right.
    ar_probability: float = 0.0
    cross_slot_targets: bool = True
    partial_slot_probability: float = 0.0
    normalization: str = "token"
    # counter: every draw is a hash of (seed, epoch, document, what); reference: the draw order of the paper's code.
    rng: str = "counter"


@dataclass
class SourceConfig:
    """One entry of a list in `data.train`; `sources.sources_of` reads them."""

    # A folder of shards, or a URL.
    path: str
    # Share of the tokens, relative to that of the others: a number, or [[step, weight], ...] (linear in between).
    weight: Any = 1.0
    # At most so many passes; then the others go on without it. null: no limit.
    epochs: int | None = None


@dataclass
class DataConfig:
    """Where rows come from and how they are cut."""

    # A folder of shards, or a list of sources: [{path: a, weight: 0.7}, {path: b, weight: 0.3}]; see SourceConfig.
    train: Any = None
    validation: str | None = None
    sequence_length: int = 4096
    # Independent sequences of rows; a multiple of every data-parallel size that the run will ever use.
    streams: int = 64
    # Background threads that prepare batches; 0: prepared in the training thread.
    workers: int = 2
    # Steps prepared ahead of the training step.
    prefetch: int = 4
    # Blocks of documents that a stream shuffles among each other (its buffer; 1: within a block only).
    shuffle_blocks: int = 8
    # A damaged or missing block of a shard: stop with an error, or skip it (warned of and counted).
    on_error: str = "stop"
    # Where blocks of shards behind URLs are kept, best on a local disk; null: $XDG_CACHE_HOME/refusion or
    # ~/.cache/refusion. Processes and runs of a machine share it.
    cache_dir: str | None = None
    # Its size in GB (10^9 bytes); what was used longest ago is removed.
    cache_gb: float = 20.0


@dataclass
class TrainConfig:
    """Optimisation, precision and reporting."""

    steps: int = 1000
    # Rows per optimizer step, over all ranks.
    global_batch_size: int = 64
    # Rows per forward on one data-parallel rank.
    micro_batch_size: int = 1
    precision: str = "bf16"
    lr: float = 3e-4
    min_lr_ratio: float = 0.1
    schedule: str = "cosine"
    warmup_steps: int = 100
    # wsd: the last part of the steps in which the rate falls.
    decay_fraction: float = 0.2
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    # Largest global gradient norm; 0: no clipping.
    clip: float = 1.0
    recompute: str = "none"
    max_bad_steps: int = 10
    # Validate every so many steps; 0: only at the end. Needs data.validation.
    validation_interval: int = 500
    # Rows of the validation set that are used; null: all.
    validation_rows: int | None = 256
    log_interval: int = 1
    tensorboard: bool = True
    # A rank that completes no step, save or validation for so long shows its stacks and ends; null: it waits for ever.
    timeout_minutes: float | None = None


@dataclass
class ParallelConfig:
    """Layout of ranks; the data-parallel size is what remains of the world size."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual_pipeline: int = 1
    # Layers of the first and of the last stage, so that embedding and head can be balanced; null: an equal share.
    pipeline_first: int | None = None
    pipeline_last: int | None = None
    zero_stage: int = 1
    # What multiplies the matrices that tensor-parallel ranks share; transformer_engine needs that package and a GPU.
    linear: str = "torch"


@dataclass
class CheckpointConfig:
    """When to save, how many to keep, and whether to go on from an earlier one."""

    interval: int = 500
    keep: int = 3
    # Write while training goes on, from a copy of the optimizer state in the host's memory; false: wait for the write.
    asynchronous: bool = True
    # auto: continue from the newest good checkpoint of run_dir; none: refuse a run_dir that already holds a run.
    resume: str = "auto"


@dataclass
class Config:
    """A whole run. See `load`."""

    run_dir: str = "runs/default"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def load(path: str | os.PathLike[str] | None, overrides: list[str] | None = None) -> Config:
    """Build the configuration from defaults, a YAML file (or the name of a shipped one) and `key=value` words.

    Raises ConfigError, naming the nearest right key, for an unknown key, and for a value of the wrong type.
    """
    config = build(Config, None if path is None else find_config(path), overrides or [])
    for name, value in schedules.read_objective(config.objective).items():
        setattr(config.objective, name, value)
    if config.data.train is not None:
        from refusion_train.sources import sources_of

        sources_of(config)
    return config


def build(schema: type[T], file: Path | None, overrides: list[str]) -> T:
    """An object of the dataclass `schema` from its defaults, a YAML file and `key=value` words.

    Raises ConfigError, naming the nearest right key, for an unknown key, and for a value of the wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    layers: list[tuple[str, Any]] = []
    if file is not None:
        layers.append((str(file), _read_yaml(file, schema)))
    for word in overrides:
        if "=" not in word or word.startswith("="):
            raise ConfigError(f"'{word}' is not an override; write key=value, for example train.lr=1e-4")
        try:
            layers.append((f"command line: {word}", OmegaConf.from_dotlist([word])))
        except Exception as error:
            raise ConfigError(f"cannot read the override '{word}': {_first_line(error)}") from None
    merged = OmegaConf.structured(schema)
    for source, layer in layers:
        _check_keys(OmegaConf.to_container(layer, resolve=False), schema, source, schema)
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or "?"
            raise ConfigError(f"{source}: {key}: {_explain(error, key)}") from None
        except TypeError:
            raise ConfigError(f"{source}: a part of a list cannot be set alone; give the list as a whole") from None
    try:
        built = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', '?')}: {_first_line(error)}") from None
    assert isinstance(built, schema), "OmegaConf returned something that is not of our schema"
    return built


def find_config(path: str | os.PathLike[str], section: str = "", kind: str = "configuration") -> Path:
    """The YAML file that `path` names: a file, or one shipped with the package (`demo`, `demo.yaml`).

    section: the folder of those shipped; kind: what an error calls them. Raises ConfigError when there is none.
    """
    given = Path(path)
    if given.is_file():
        return given
    shipped = shipped_configs(section)
    for name in (str(given), f"{given}.yaml"):
        if name in shipped:
            return shipped[name]
    raise ConfigError(f"no {kind} file '{path}'; shipped ones: {', '.join(sorted(shipped)) or 'none'}")


def shipped_configs(section: str = "") -> dict[str, Path]:
    """Names (relative, with suffix) and paths of the configurations that come with the package."""
    here = Path(__file__).resolve().parent
    for folder in (here / "configs" / section, here.parent / "configs" / section):
        if folder.is_dir():
            return {str(file.relative_to(folder)): file for file in sorted(folder.glob("*.yaml"))}
    return {}


def to_yaml(config: Any) -> str:
    """The resolved configuration (or another object of a schema) as YAML, keys in the order of declaration."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _read_yaml(path: Path, schema: type) -> Any:
    from omegaconf import OmegaConf

    try:
        layer = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"{path}: not a readable YAML file: {_first_line(error)}") from None
    if not OmegaConf.is_dict(layer):
        some = ", ".join([field.name for field in fields(schema) if field.name != "seed"][:3])
        raise ConfigError(f"{path}: the top level must be a mapping of keys such as {some}")
    return layer


def _check_keys(layer: Any, schema: type, source: str, root: type, prefix: str = "") -> None:
    """Refuse keys that the schema does not have, naming the nearest right one."""
    hints = get_type_hints(schema)
    for key, value in layer.items():
        if key not in hints:
            raise ConfigError(f"{source}: unknown key '{prefix}{key}'{_nearest(prefix, str(key), schema, root)}")
        inner = hints[key]
        if is_dataclass(inner):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{source}: '{prefix}{key}' is a section; give its keys, for example "
                    f"{prefix}{key}.{fields(inner)[0].name}=..."
                )
            _check_keys(value, inner, source, root, f"{prefix}{key}.")  # type: ignore[arg-type]


def _nearest(prefix: str, key: str, schema: type, root: type) -> str:
    """' (did you mean ...?)' for a mistyped key; looks in its own section first, then everywhere."""
    own = difflib.get_close_matches(key, [f.name for f in fields(schema)], n=1, cutoff=0.6)  # type: ignore[arg-type]
    if own:
        return f"; did you mean '{prefix}{own[0]}'?"
    everywhere = all_keys(root)
    same_name = [name for name in everywhere if name.rsplit(".", 1)[-1] == key]
    near = same_name or difflib.get_close_matches(f"{prefix}{key}", everywhere, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known here: {', '.join(f.name for f in fields(schema))}"  # type: ignore[arg-type]


def all_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, in order of declaration."""
    keys: list[str] = []
    for name, hint in get_type_hints(schema).items():
        if is_dataclass(hint):
            keys += all_keys(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _explain(error: BaseException, key: str) -> str:
    """OmegaConf's words, but where they name its own classes."""
    text = _first_line(error)
    return f"not a list; write it as {key}=[1,2]" if "is not a ListConfig" in text else text


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


# --------------------------------------------------------------------------------------------- checks across fields


def validate(config: Config, world_size: int | None = None) -> None:
    """Refuse what cannot work, naming the keys, the values and a remedy.

    `world_size`: number of ranks, when it is known; then the data-parallel checks are made too (see `layouts`).
    Raises ConfigError.
    """
    from refusion_train.sources import sources_of

    _check_ranges(config)
    if config.data.train is not None:
        sources_of(config)
    _check_objective(config.objective)
    shortest = min(config.objective.slot_sizes)
    _require(
        shortest <= config.data.sequence_length,
        f"objective.slot_sizes={config.objective.slot_sizes}: every slot is longer than data.sequence_length="
        f"{config.data.sequence_length}; give shorter slots or longer rows",
    )
    _check_model(config)
    layouts.check(config, world_size)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"{key}={value} is not one of {', '.join(allowed)}{hint}")


_POSITIVE = (
    "model.hidden_size", "model.num_layers", "model.num_heads", "model.num_kv_heads", "model.head_dim",
    "model.ffn_size", "model.vocab_multiple", "model.max_sequence_length", "model.rope_theta", "model.norm_eps",
    "model.init_std", "data.sequence_length", "data.streams", "data.prefetch", "data.shuffle_blocks",
    "data.cache_gb",
    "train.steps", "train.global_batch_size", "train.micro_batch_size", "train.lr", "train.max_bad_steps",
    "train.log_interval", "parallel.tensor", "parallel.pipeline", "parallel.virtual_pipeline",
    "checkpoint.interval", "checkpoint.keep",
)  # fmt: skip
_POSITIVE_OR_NULL = {
    "train.validation_rows": "all", "train.timeout_minutes": "no limit", "parallel.pipeline_first": "an equal share",
    "parallel.pipeline_last": "an equal share",
}  # fmt: skip
_NOT_NEGATIVE = (
    "seed", "data.workers", "train.warmup_steps", "train.weight_decay", "train.clip", "train.validation_interval",
    "train.adam_eps",
)  # fmt: skip
_FRACTION = (
    "objective.partial_slot_probability", "objective.ar_probability", "train.min_lr_ratio", "train.decay_fraction",
    "train.beta1", "train.beta2",
)  # fmt: skip
_BELOW_ONE = ("train.beta1", "train.beta2")  # Adam divides by 1 - beta
_LARGEST_SEED = 2**63 - 1


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _check_ranges(config: Config) -> None:
    for key in (*_POSITIVE, *_NOT_NEGATIVE):
        value = _get(config, key)
        _require(math.isfinite(value), f"{key}={value} is not a finite number")
    for key in _POSITIVE:
        _require(_get(config, key) > 0, f"{key}={_get(config, key)} must be greater than 0")
    for key in _NOT_NEGATIVE:
        _require(_get(config, key) >= 0, f"{key}={_get(config, key)} must not be negative")
    for key in _FRACTION:
        _require(0 <= _get(config, key) <= 1, f"{key}={_get(config, key)} must lie between 0 and 1")
    for key in _BELOW_ONE:
        _require(_get(config, key) < 1, f"{key}={_get(config, key)} must be less than 1")
    _require(config.seed <= _LARGEST_SEED, f"seed={config.seed} is too large; the largest is {_LARGEST_SEED}")
    _require(
        config.data.sequence_length >= 2,
        f"data.sequence_length={config.data.sequence_length} leaves no token to predict from another; give 2 or more",
    )
    for key, allowed in (
        ("objective.name", OBJECTIVES), ("objective.normalization", NORMALIZATIONS),
        ("objective.rng", ("counter", "reference")), ("train.precision", PRECISIONS),
        ("model.init_rows", NEW_ROWS), ("train.schedule", SCHEDULES), ("train.recompute", RECOMPUTE),
        ("checkpoint.resume", RESUME), ("data.on_error", ON_ERROR),
        ("parallel.linear", LINEAR),
    ):  # fmt: skip
        _choice(key, _get(config, key), allowed)
    for key, otherwise in _POSITIVE_OR_NULL.items():
        value = _get(config, key)
        _require(value is None or value > 0, f"{key}={value} must be greater than 0, or null for {otherwise}")


def _check_objective(objective: ObjectiveConfig) -> None:
    sizes = objective.slot_sizes
    _require(bool(sizes), "objective.slot_sizes is empty; give at least one slot size, for example [4,8,16,32]")
    _require(all(size >= 1 for size in sizes), f"objective.slot_sizes={sizes}: every slot size must be at least 1")
    _require(0 < objective.eps < 1, f"objective.eps={objective.eps} must lie between 0 and 1")
    weights = schedules.read_objective(objective)
    parts = schedules.LOSS_WEIGHTS if objective.name == "slots" else [f"{objective.name}_weight"]
    step = schedules.step_without_weight([weights[name] for name in parts])
    names = " and ".join(f"objective.{name}" for name in parts)
    _require(step is None, f"nothing is trained at step {step}: {names} must be greater than 0 there")
    if objective.ar_probability:
        for key, wanted in (("name", "slots"), ("rng", "counter")):
            _require(
                getattr(objective, key) == wanted,
                f"objective.ar_probability={objective.ar_probability} needs objective.{key}={wanted}, not "
                f"{getattr(objective, key)}; set one of the two",
            )
    if objective.rng == "reference":
        _require(
            objective.name == "slots",
            "objective.rng=reference draws in the order of the paper's slot code; "
            f"it needs objective.name=slots, not {objective.name}",
        )
        _require(
            objective.partial_slot_probability == 0,
            "objective.rng=reference has no partial slots; set objective.partial_slot_probability=0",
        )


def _check_model(config: Config) -> None:
    model = config.model
    _require(
        model.num_heads % model.num_kv_heads == 0,
        f"model.num_heads={model.num_heads} must be a multiple of model.num_kv_heads={model.num_kv_heads}",
    )
    _require(
        not (model.qk_norm and model.qkv_bias),
        "model.qkv_bias=true with model.qk_norm=true is the shape of no known family; set one of them to false",
    )
    _require(
        model.qk_norm or model.qkv_bias or model.hidden_size % model.num_heads == 0,
        f"model.hidden_size={model.hidden_size} is not a multiple of model.num_heads={model.num_heads}: without "
        "model.qk_norm and model.qkv_bias that is a Llama, which transformers would not load; change one of them",
    )
    _require(model.head_dim % 2 == 0, f"model.head_dim={model.head_dim} must be even (rotary pairs)")
    _require(model.vocab_size is None or model.vocab_size > 0, f"model.vocab_size={model.vocab_size} must be positive")
    _require(
        config.data.sequence_length <= model.max_sequence_length,
        f"data.sequence_length={config.data.sequence_length} is longer than the model's positions, "
        f"model.max_sequence_length={model.max_sequence_length}; shorten the one or raise the other",
    )
