"""Random models made and saved by transformers itself, in the families that can be imported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

FAMILIES = ("qwen3", "qwen2", "llama")
ROWS = 300  # of the vocabulary; needs padding


def hf_model(family: str, tied: bool = True, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Two layers, grouped queries, head_dim unlike hidden / heads; norms away from 1 and biases away from 0."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    shape = dict(
        vocab_size=ROWS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=tied, max_position_embeddings=128, rms_norm_eps=1e-5,
        bos_token_id=2, eos_token_id=3, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 2e4},
    )  # fmt: skip
    torch.manual_seed(0)
    model = model_class(config_class(**{**shape, **changes}))
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    return model.to(dtype).eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """As transformers writes it."""
    model.save_pretrained(folder, **options)
    return folder


def save_bin(model: Any, folder: Path, shards: int = 1) -> Path:
    """As torch.save writes it, with an index for several files: what transformers did before safetensors."""
    import json

    save(model, folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    state = {name: value for name, value in model.state_dict().items() if name in dict(model.named_parameters())}
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    names = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    places = {name: names[i % shards] for i, name in enumerate(state)}
    for file in names:
        torch.save({name: value for name, value in state.items() if places[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the safetensors files of a folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    return found


def equal(a: Path, b: Path) -> bool:
    """Whether two folders hold the same tensors, to the bit and to the type."""
    first, second = tensors(a), tensors(b)
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and first[name].equal(second[name]) for name in first
    )


def with_tokenizer(folder: Path, tokenizer: Path) -> Path:
    """Put a SentencePiece tokenizer of ours into the folder."""
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def json_tokenizer(folder: Path, tokens: int, **config: Any) -> Path:
    """A tokenizer.json with so many tokens, the last two of them special: <|end|> and <|spare|>."""
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    words = [*sorted(letters), *(f"w{i}" for i in range(tokens - len(letters) - 2))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    made.add_special_tokens([AddedToken("<|end|>", normalized=False), AddedToken("<|spare|>", normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder
