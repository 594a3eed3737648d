"""A checkpoint to a Hugging Face folder: weights, configuration, tokenizer and the standalone modelling code.

The folder has the `model_type` of its family, so stock transformers (and what builds on it) loads it as an ordinary
causal language model; with `trust_remote_code=True` it is the class whose `generate` decodes slots. It is written
beside its place and renamed when whole, config.json last: without it nothing loads a folder.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

import refusion_train.hf
from data_tools.output import new_folder
from refusion_train import __version__
from refusion_train.checkpoint import store
from refusion_train.config import ModelConfig, ObjectiveConfig
from refusion_train.convert.names import EMBEDDING, HEAD, logical_shapes
from refusion_train.convert.safetensors_stream import Shape, sync_all, write_model
from refusion_train.convert.tokenizer import write_tokenizer
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import CheckpointError, ConfigError, DataError

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip
_CODE = ("modeling_refusion.py", "decoding.py", "runner.py", "cache.py")
_SHARD_BYTES = 5 * 10**9
_CLASSES = {
    "qwen3": ("Qwen3ForCausalLM", "ReFusionQwen3ForCausalLM"),
    "llama": ("LlamaForCausalLM", "ReFusionLlamaForCausalLM"),
}


def export_checkpoint(
    checkpoint: str,
    out: str,
    dtype: str = "bfloat16",
    overwrite: bool = False,
    tokenizer: str | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Write the weights of `checkpoint` as a Hugging Face folder `out`; returns its path.

    checkpoint: a checkpoint, or a run folder, of which the newest good one is taken. dtype: float32 or bfloat16.
    overwrite: replace an earlier export, at the end and at once. tokenizer: its folder; default: the copy in the
    training data's folder. Weights are read one by one, in the memory of one tensor.
    Raises CheckpointError, DataError or ConfigError; then nothing has changed at `out`.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype} is not one of float32, bfloat16")
    folder = store.resolve(checkpoint)
    state = store.read_state(folder)
    model, objective = _configs(state, folder)
    tokens = _find_tokenizer(state, tokenizer)
    with new_folder(out, overwrite, _is_export) as target:
        write_model(target, _shapes(model), _DTYPES[dtype], _reader(folder, model), max_shard_bytes)
        write_tokenizer(tokens, target, model.max_sequence_length)
        for name in _CODE:
            shutil.copyfile(Path(refusion_train.hf.__path__[0]) / name, target / name)
        _write_json(target / "generation_config.json", generation_config(objective, tokens))
        sync_all(path for path in target.iterdir() if path.is_file())
        config = model_config(model, objective, tokens, state, dtype=str(_DTYPES[dtype]).removeprefix("torch."))
        _write_json(target / "config.json", config)
    return Path(out)


def model_config(
    model: ModelConfig, objective: ObjectiveConfig, tokenizer: Tokenizer, state: dict[str, Any], dtype: str
) -> dict[str, Any]:
    """Contents of config.json: the stock configuration of the family, and `refusion`: how the model was trained."""
    family = "qwen3" if model.qk_norm else "llama"
    stock, ours = _CLASSES[family]
    config: dict[str, Any] = {
        "architectures": [stock],
        "auto_map": {"AutoModelForCausalLM": f"modeling_refusion.{ours}"},
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
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        **_special_ids(tokenizer),
        "torch_dtype": dtype,
        "refusion": {
            "version": __version__,
            "objective": objective.name,
            "mask_token_id": tokenizer.mask_id,
            "slot_sizes": objective.slot_sizes if objective.name == "slots" else [],
            "cross_slot_targets": objective.name == "slots" and objective.cross_slot_targets,
            "step": state.get("step"),
            "tokens": state.get("tokens"),
            "tokenizer": tokenizer.fingerprint,
        },
    }
    config |= {"use_sliding_window": False} if family == "qwen3" else {"mlp_bias": False}
    return config


def generation_config(objective: ObjectiveConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Contents of generation_config.json: greedy, with the decoder's defaults for models trained on slots."""
    config: dict[str, Any] = {**_special_ids(tokenizer), "do_sample": False}
    if objective.name == "slots":
        # The middle of the sizes trained on: longer slots need fewer forwards, and are less often right.
        size = sorted(objective.slot_sizes)[(len(objective.slot_sizes) - 1) // 2]
        config |= {
            "slot_size": size, "num_blocks": 1, "slot_threshold": 0.9, "token_threshold": 0.4, "correction": "ar",
        }  # fmt: skip
    return config


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    named = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return {name: index for name, index in named.items() if index is not None}


def _configs(state: dict[str, Any], folder: Path) -> tuple[ModelConfig, ObjectiveConfig]:
    """Model and objective of the run, from a checkpoint's state.json."""
    try:
        config = state["config"]
        model, objective = ModelConfig(**config["model"]), ObjectiveConfig(**config["objective"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / store.STATE} does not describe a model of this version ({error}); use another checkpoint"
        ) from None
    if model.vocab_size is None:
        raise CheckpointError(f"{folder / store.STATE}: model.vocab_size is missing; use another checkpoint")
    return model, objective


def _find_tokenizer(state: dict[str, Any], given: str | None) -> Tokenizer:
    """The tokenizer of the training data; refuses another one."""
    data = state.get("data", {})
    wanted = data.get("tokenizer", {}).get("fingerprint")
    folder = Path(given) if given is not None else Path(data.get("path", "")) / "tokenizer"
    if given is None and not folder.is_dir():
        raise DataError(
            f"the tokenizer of the training data is not at '{folder}' any more; give its folder (--tokenizer)"
        )
    tokenizer = Tokenizer.load(folder)
    if wanted is not None and tokenizer.fingerprint != wanted:
        raise DataError(
            f"the tokenizer in '{folder}' is {tokenizer.fingerprint}, the checkpoint was trained with {wanted}; "
            "give that one's folder (--tokenizer)"
        )
    return tokenizer


def _shapes(model: ModelConfig) -> dict[str, Shape]:
    """Tensors of the exported model: the logical ones without the padding of the vocabulary."""
    return {
        name: (model.vocab_size, *shape[1:]) if name in (EMBEDDING, HEAD) and model.vocab_size else shape
        for name, shape in logical_shapes(model).items()
    }


def _reader(folder: Path, model: ModelConfig):
    """A function that reads one tensor of the checkpoint (float32 master weights), trimmed to the vocabulary."""
    stored, wanted = logical_shapes(model), _shapes(model)

    def read(name: str) -> torch.Tensor:
        key = f"{name}.master"
        tensors: dict[str, Any] = {key: torch.empty(stored[name], dtype=torch.float32)}
        store.load(folder, tensors)
        return tensors[key][: wanted[name][0]]

    return read


def _is_export(folder: Path) -> bool:
    """Whether a folder is an earlier export: only such a one may be replaced."""
    try:
        return "refusion" in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2, ensure_ascii=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
