"""Which model a Hugging Face config.json describes, and back: the families that this package can train.

Qwen3 (q/k norm), Qwen2 (biases on query, key and value) and Llama (neither) are one architecture here. What another
configuration asks for beyond it is refused by name, never ignored: a model that is nearly right is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refusion_train.config import Config, ModelConfig, ObjectiveConfig, validate
from refusion_train.errors import ConfigError, DataError

# model_type -> class of transformers, and ours with the same weights
CLASSES = {
    "qwen3": ("Qwen3ForCausalLM", "ReFusionQwen3ForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM", "ReFusionQwen2ForCausalLM"),
    "llama": ("LlamaForCausalLM", "ReFusionLlamaForCausalLM"),
}
# Values of options that change nothing; any other is refused, with this reason.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish", None), "only silu is supported"),
    "mlp_bias": ((False, None), "biases of the feed-forward layers are not supported"),
    "use_sliding_window": ((False, None), "sliding-window attention is not supported"),
    "partial_rotary_factor": ((1, 1.0, None), "rotary angles on a part of a head are not supported"),
    "pretraining_tp": ((0, 1, None), "only 1 is supported"),
    "quantization_config": ((None,), "quantized weights are not supported; give the unquantized model"),
}


def family_of(model: ModelConfig) -> str:
    """The `model_type` whose stock class computes what this model does."""
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"


def read_config(folder: Path) -> dict[str, Any]:
    """Contents of a folder's config.json. Raises DataError."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "it is a file" if folder.is_file() else "config.json is missing"
        raise DataError(f"'{folder}' is not a Hugging Face folder: {what}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'config.json'} cannot be read ({error}); fetch it again") from None
    if not isinstance(config, dict):
        raise DataError(f"{folder / 'config.json'} does not hold a configuration; fetch it again")
    return config


def model_of(config: dict[str, Any], folder: Path) -> ModelConfig:
    """The model that a config.json describes, its vocabulary as many rows as are stored.

    Raises DataError, naming the entry, for another architecture or an option that this package does not compute.
    """
    where = folder / "config.json"
    family = str(config.get("model_type"))
    if family not in CLASSES:
        raise DataError(
            f"{where}: model_type={family} is not an architecture that can be imported ({', '.join(CLASSES)})"
        )
    for name, (neutral, reason) in _NEUTRAL.items():
        if config.get(name) not in neutral:
            raise DataError(f"{where}: {name}={_short(config[name])}: {reason}")
    if family != "qwen2" and config.get("attention_bias"):
        raise DataError(f"{where}: attention_bias=true: biases of the output projection are not supported")
    kinds = config.get("layer_types") or []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            raise DataError(f"{where}: layer_types: {_short(kind)} is not supported, only full_attention")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(name)
        if not all(isinstance(i, int) for i in (ids if isinstance(ids, list) else [0 if ids is None else ids])):
            raise DataError(f"{where}: {name}={_short(ids)} is neither a token id nor a list of them")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        model = ModelConfig(
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2",
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope_theta=_rope_theta(config, where),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            init_std=float(config.get("initializer_range", 0.02)),
            max_sequence_length=int(config.get("max_position_embeddings", 32768)),
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{where}: {reason}; it does not describe a {family} model") from None
    return model


def objective_of(config: dict[str, Any], model: ModelConfig, folder: Path) -> ObjectiveConfig:
    """What the model was trained for, as an earlier export of ours says; `ar` for models of others.

    Raises DataError for an objective or a model that no run could have.
    """
    where = folder / "config.json"
    trained = config.get("refusion") or {}
    mask = trained.get("mask_token_id") if isinstance(trained, dict) else None
    if not isinstance(trained, dict) or not (mask is None or isinstance(mask, int)):
        raise DataError(f"{where}: refusion={_short(trained)} is not what an export writes; export the model again")
    try:
        objective = ObjectiveConfig(name=trained.get("objective", "ar"))
        if objective.name == "slots":
            objective.slot_sizes = list(trained.get("slot_sizes") or objective.slot_sizes)
            objective.slot_weights, objective.eps = trained.get("slot_weights"), trained.get("eps", objective.eps)
            objective.cross_slot_targets = bool(trained.get("cross_slot_targets", False))
        check(model, objective, where)
    except TypeError:
        raise DataError(
            f"{where}: refusion={_short(trained)} is not what an export writes; export the model again"
        ) from None
    return objective


def check(model: ModelConfig, objective: ObjectiveConfig, where: Path) -> None:
    """Refuse what no run could have, and what transformers would not load. where: the file that says so.

    Raises DataError.
    """
    config = Config(model=model, objective=objective)
    config.data.sequence_length = model.max_sequence_length  # of data there is none yet
    try:
        validate(config)
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from None


def _rope_theta(config: dict[str, Any], where: Path) -> float:
    """Base of the rotary angles; transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling."""
    theta = config.get("rope_theta")
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        if not isinstance(rope, dict):
            raise DataError(f"{where}: {name}={_short(rope)} does not describe rotary positions; fetch the file again")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            # What is added for longer texts can be left out; what a model was trained with cannot.
            hint = (
                "remove it if the model is to see no positions beyond those that it was trained on"
                if kind in ("yarn", "dynamic")
                else "give a model that was trained without"
            )
            raise DataError(f"{where}: {name} of type {kind} is not supported: only plain rotary positions are; {hint}")
        if any(isinstance(value, dict) for value in rope.values()) or rope.get("partial_rotary_factor") not in (
            None,
            1,
        ):
            raise DataError(f"{where}: {name}={_short(rope)}: only one set of angles over whole heads is supported")
        theta = rope.get("rope_theta", theta)
    return float(10_000.0 if theta is None else theta)


def config_of(model: ModelConfig, inherited: dict[str, Any] | None = None) -> dict[str, Any]:
    """The entries of config.json that describe the model, for its family.

    inherited: the config.json that the model was imported from; its entries that say nothing of shape are kept.
    """
    family = family_of(model)
    kept = inherited or {}
    config: dict[str, Any] = {
        "architectures": [CLASSES[family][0]],
        "auto_map": {"AutoModelForCausalLM": f"modeling_refusion.{CLASSES[family][1]}"},
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_sequence_length,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        # transformers 5 reads rope_parameters, earlier ones rope_theta.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_dropout": kept.get("attention_dropout", 0.0),
        "use_cache": True,
    }
    if family != "qwen2":
        config["attention_bias"] = False
    config |= {"mlp_bias": False} if family == "llama" else {"use_sliding_window": False, "sliding_window": None}
    # Of Qwen; without sliding windows it has no effect, but a configuration that comes back should be the same.
    config |= {name: kept[name] for name in ("max_window_layers",) if name in kept}
    return config


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."
