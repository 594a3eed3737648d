"""README.md of an exported folder: what the model is, how it was trained, and how it is loaded and decoded."""

from __future__ import annotations

from typing import Any


def render(config: dict[str, Any], decoding: dict[str, Any], state: dict[str, Any]) -> str:
    """Text of the card. config: of config.json; decoding: of generation_config.json; state: of the checkpoint."""
    trained = config["refusion"]
    parts = [
        _head(config),
        _model(config, state),
        _objective(trained, state),
        _loading(config),
        _options(trained, decoding),
    ]
    return "\n".join(part.strip() + "\n" for part in parts if part)


def _head(config: dict[str, Any]) -> str:
    return f"""
---
library_name: transformers
pipeline_tag: text-generation
tags: [refusion, {config["model_type"]}]
---

# A {config["model_type"]} model for decoding in slots
"""


def _model(config: dict[str, Any], state: dict[str, Any]) -> str:
    data, imported = state.get("data", {}), state.get("imported")
    progress = (
        f"{state.get('tokens', 0):,} tokens in {state.get('step', 0):,} optimizer steps"
        if not imported
        else "none here: the weights were imported and are as they came"
    )
    listed = [source["fingerprint"] for source in data.get("sources", ())]
    read = list(state.get("source_tokens") or listed) or ([data["fingerprint"]] if data.get("fingerprint") else [])
    start = state.get("config", {}).get("model", {}).get("init_from")
    rows = [
        ("layers, hidden, feed-forward",
         f"{config['num_hidden_layers']}, {config['hidden_size']}, {config['intermediate_size']}"),
        ("heads, key/value heads, head size",
         f"{config['num_attention_heads']}, {config['num_key_value_heads']}, {config['head_dim']}"),
        ("vocabulary", f"{config['vocab_size']:,} rows, {'tied' if config['tie_word_embeddings'] else 'untied'} head"),
        ("positions", f"{config['max_position_embeddings']:,}, rotary base {config['rope_theta']:,.0f}"),
        ("weights", config["torch_dtype"]),
        ("training", progress),
        *([("started from", f"`{start}`")] if start else []),
        *([("data", ", ".join(f"`{name}`" for name in read))] if read else []),
    ]  # fmt: skip
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def _objective(trained: dict[str, Any], state: dict[str, Any]) -> str:
    name = trained["objective"]
    if name == "ar":
        return "Trained left to right (`ar`); it is decoded so.\n"
    if name == "mdm":
        return (
            "Trained by masked diffusion over tokens (`mdm`) with attention in both directions. **Without remote code "
            "the weights load in a causal class, which computes something else: do not use it so.**\n"
        )
    crossing = trained["cross_slot_targets"]
    sizes = ", ".join(str(size) for size in trained["slot_sizes"])
    stock = (
        "Every clean token also predicted the next token of its document, so the stock class decodes it left to right "
        "as an ordinary language model."
        if crossing
        else "**No token predicted the first token of the next slot (`cross_slot_targets: false`), so the stock class, "
        "which decodes left to right, gives poor text: load it with remote code.**"
    )
    mask = trained["mask_token_id"]
    return f"Trained on slots of {sizes} tokens (ReFusion, arXiv 2512.13586; mask token id {mask}). {stock}\n"


def _loading(config: dict[str, Any]) -> str:
    return f"""
## Loading

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=128)[0], skip_special_tokens=True))
```

With `trust_remote_code=True` it is `{config["auto_map"]["AutoModelForCausalLM"].split(".")[1]}`, which decodes as it
was trained; without it, the stock `{config["architectures"][0]}`.
"""


def _options(trained: dict[str, Any], decoding: dict[str, Any]) -> str:
    if trained["objective"] != "slots":
        return ""
    names = ("slot_size", "num_blocks", "slot_threshold", "token_threshold", "correction")
    rows = "".join(f"| `{name}` | {decoding[name]} |\n" for name in names)
    return f"""
## Decoding

Plan and infill: slots whose first token is sure are drafted together, verified left to right, and completed side by
side.

| option of `generate` | default |
|---|---|
{rows}
Longer slots and lower thresholds need fewer forwards and are less often right. `decoding="left_to_right"` decodes
one token after the other.
"""
