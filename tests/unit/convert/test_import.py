"""Folders of other models become checkpoints and come back to the bit; what cannot be imported is refused in a line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILIES, ROWS, equal, hf_model, json_tokenizer, save, save_bin, tensors, with_tokenizer
from made_up import VOCABULARY, make_checkpoint, model_shape

from refusion_train.checkpoint import store
from refusion_train.config import ModelConfig, load
from refusion_train.convert.export import export_checkpoint, read_checkpoint
from refusion_train.convert.importer import import_folder
from refusion_train.convert.names import logical_shapes
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import ConfigError, DataError, RefusionError

CASES = [(family, tied) for family in FAMILIES for tied in (True, False)]


def _there_and_back(folder: Path, tmp_path: Path, dtype: str, **options: Any) -> Path:
    import_folder(str(folder), str(tmp_path / "imported"), **options)
    return export_checkpoint(str(tmp_path / "imported"), str(tmp_path / "back"), dtype=dtype)


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_it_comes_back_to_the_bit(family: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    source = save(hf_model(family, tied), tmp_path / "source")
    back = _there_and_back(source, tmp_path, "float32")
    assert equal(source, back) and len(tensors(back)) == len(hf_model(family, tied).state_dict()) - tied
    before, after = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, back))
    added = {"auto_map", "refusion", "head_dim"} - before.keys()
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert differing <= added | {"_name_or_path"}, {key: (before.get(key), after.get(key)) for key in differing}
    stock = AutoModelForCausalLM.from_pretrained(back)
    assert type(stock) is type(hf_model(family, tied))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types_come_back_too(dtype: str, tmp_path: Path) -> None:
    source = save(hf_model("qwen2", dtype=getattr(torch, dtype)), tmp_path / "source", max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    assert equal(source, _there_and_back(source, tmp_path, dtype))


@pytest.mark.parametrize("shards", [1, 3])
def test_files_of_torch(shards: int, tmp_path: Path) -> None:
    source = save_bin(hf_model("llama", tied=False), tmp_path / "bin", shards)
    back = _there_and_back(source, tmp_path, "float32")
    assert equal(save(hf_model("llama", tied=False), tmp_path / "safe"), back)


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_the_training_model_computes_what_the_stock_class_does(family: str, tied: bool, tmp_path: Path) -> None:
    """Rows in order and rows with permuted positions, float32."""
    from refusion_train.convert.verify import _inputs, _training_logits

    stock = hf_model(family, tied)
    import_folder(str(save(stock, tmp_path / "source")), str(tmp_path / "imported"))
    tokens, positions = _inputs(ROWS, 24, seed=1)
    ours = _training_logits(read_checkpoint(str(tmp_path / "imported")), tokens, positions)
    with torch.no_grad():
        theirs = stock(
            torch.from_numpy(tokens), position_ids=torch.from_numpy(positions),
            attention_mask=torch.ones(tokens.shape, dtype=torch.long), use_cache=False,
        ).logits  # fmt: skip
    assert theirs.abs().max() > 1, "logits are too small to compare"
    assert (ours - theirs).abs().max() < 1e-4
    in_order = stock(torch.from_numpy(tokens[2:]), use_cache=False).logits
    assert (in_order - theirs[2:]).abs().max() > 0.1, "the positions have no effect"


def test_what_it_prints_is_a_configuration(tmp_path: Path) -> None:
    made = import_folder(str(save(hf_model("qwen2"), tmp_path / "source")), str(tmp_path / "imported"))
    (tmp_path / "run.yaml").write_text(made.yaml())
    config = load(tmp_path / "run.yaml")
    assert config.model == ModelConfig(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=12, ffn_size=48, vocab_size=ROWS,
        qk_norm=False, qkv_bias=True, tie_embeddings=True, rope_theta=20_000.0, norm_eps=1e-5, init_std=0.02,
        max_sequence_length=128, init_from=str(tmp_path / "imported"),
    )  # fmt: skip
    only_looked = import_folder(str(tmp_path / "source"), None)
    assert only_looked.folder is None and only_looked.model == made.model
    assert not (tmp_path / "None").exists()


def test_our_own_export_comes_back_with_what_it_was_trained_for(tiny_dataset: Any, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape())
    first = export_checkpoint(str(tmp_path / "run"), str(tmp_path / "first"), dtype="float32")
    made = import_folder(str(first), str(tmp_path / "imported"))
    assert made.mask_id == 4 and made.new_rows == 0
    second = export_checkpoint(str(tmp_path / "imported"), str(tmp_path / "second"), dtype="float32")
    assert {p.name for p in first.iterdir()} == {p.name for p in second.iterdir()}
    for file in first.iterdir():
        if file.name not in ("config.json", "README.md"):
            assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (first, second))
    assert after["refusion"].pop("step") == 0 and before["refusion"].pop("step") == 3
    assert after["refusion"].pop("tokens") == 0 and before["refusion"].pop("tokens") == 1000
    assert before == after


# ------------------------------------------------------------------------------------------------------------- mask


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """The masters of an imported checkpoint, padding included."""
    found = read_checkpoint(str(folder))
    wanted = {f"{name}.master": torch.empty(shape) for name, shape in logical_shapes(found.model).items()}
    store.load(found.folder, wanted)
    return {name.removesuffix(".master"): value for name, value in wanted.items()}


@pytest.mark.parametrize(("tokens", "mask_id"), [(ROWS - 10, ROWS - 10), (ROWS, ROWS)], ids=["unused row", "new row"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_mask_token_is_added(tokens: int, mask_id: int, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = json_tokenizer(save(hf_model("llama", tied), tmp_path / "source"), tokens, chat_template="{{ messages }}")
    made = import_folder(str(source), str(tmp_path / "imported"), mask_token="<|mask|>", vocab_multiple=64)
    assert made.mask_id == mask_id and made.new_rows == 1
    assert made.model.vocab_size == max(ROWS, mask_id + 1)
    stored, original = _weights(tmp_path / "imported"), tensors(source)
    for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied):
        assert stored[name].shape[0] == 320 and not stored[name][made.model.vocab_size :].any()
        mean = original[name][:tokens].mean(dim=0)
        assert torch.allclose(stored[name][mask_id], mean, atol=1e-6)
        others = [row for row in range(ROWS) if row != mask_id]
        assert stored[name][others].equal(original[name][others])
    back = export_checkpoint(str(tmp_path / "imported"), str(tmp_path / "back"), dtype="float32")
    assert tensors(back)["model.embed_tokens.weight"].shape[0] == made.model.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(back)
    assert tokenizer.mask_token_id == mask_id and tokenizer.eos_token == "<|end|>"
    assert tokenizer.chat_template == "{{ messages }}"
    assert json.loads((back / "config.json").read_text())["refusion"]["mask_token_id"] == mask_id


def test_a_mask_token_that_is_there_already_and_rows_by_choice(tmp_path: Path) -> None:
    source = json_tokenizer(save(hf_model("qwen3"), tmp_path / "source"), ROWS - 4)
    spare = ROWS - 5
    rows = {}
    for how in ("eos", "random", "mean"):
        made = import_folder(
            str(source), str(tmp_path / "imported"), mask_token="<|spare|>", mask_init=how, overwrite=True
        )
        assert made.mask_id == spare and made.new_rows == 1
        rows[how] = _weights(tmp_path / "imported")["model.embed_tokens.weight"][spare]
    original = tensors(source)["model.embed_tokens.weight"]
    assert rows["eos"].equal(original[3])
    assert 0.01 < rows["random"].std() < 0.03 and not rows["random"].equal(original[spare])
    used = [row for row in range(ROWS - 4) if row != spare]
    assert torch.allclose(rows["mean"], original[used].mean(dim=0), atol=1e-6)


def test_the_mask_of_our_own_export_keeps_its_row(tiny_dataset: Any, tmp_path: Path) -> None:
    weights = make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape())
    folder = export_checkpoint(str(tmp_path / "run"), str(tmp_path / "hf"), dtype="float32")
    made = import_folder(str(folder), str(tmp_path / "imported"), mask_token="<mask>")
    assert made.new_rows == 0
    stored = _weights(tmp_path / "imported")["model.embed_tokens.weight"]
    assert stored[:VOCABULARY].equal(weights["model.embed_tokens.weight"][:VOCABULARY])


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("w3", ["w3", "ordinary"]),
        ("<|end|>", ["eos"]),
        ("<|spare|>", ["chat template"]),
        ("", ["empty"]),
        (" ", ["empty"]),
    ],
)
@pytest.mark.parametrize(("out", "template"), [("imported", "file"), (None, "entry"), ("imported", "entries")])
def test_a_mask_that_cannot_be(mask: str, words: list[str], out: str | None, template: str, tmp_path: Path) -> None:
    text = "{{ messages }}<|spare|>"
    entry: Any = {"entry": text, "entries": [{"name": "default", "template": text}]}.get(template)
    source = save(hf_model("qwen3", eos_token_id=ROWS - 2), tmp_path / "source")
    json_tokenizer(source, ROWS, **({} if entry is None else {"chat_template": entry}))
    if template == "file":
        (source / "chat_template.jinja").write_text(text)
    place = None if out is None else str(tmp_path / out)
    _refused(lambda: import_folder(str(source), place, mask_token=mask), tmp_path, *words)
    if mask in ("w3", "<|spare|>"):  # the folder that was given, not the one being written
        _refused(lambda: import_folder(str(source), place, mask_token=mask), tmp_path, f"'{source}'")


@pytest.mark.parametrize("tokens", [ROWS - 10, ROWS], ids=["unused row", "new row"])
def test_only_looking_sees_what_an_import_would_make(tokens: int, tmp_path: Path) -> None:
    source = json_tokenizer(save(hf_model("qwen3"), tmp_path / "source"), tokens)
    looked = import_folder(str(source), None, mask_token="<|mask|>")
    made = import_folder(str(source), str(tmp_path / "imported"), mask_token="<|mask|>")
    assert looked.model == made.model and looked.mask_id == made.mask_id == tokens and looked.new_rows == 1
    assert "1 row of the vocabulary to be made; nothing written" in looked.summary()
    assert "1 row of the vocabulary made; written to" in made.summary()


def test_a_folder_of_transformers_5_can_be_read_by_4(tmp_path: Path) -> None:
    source = json_tokenizer(save(hf_model("qwen3"), tmp_path / "source"), ROWS, tokenizer_class="TokenizersBackend")
    import_folder(str(source), str(tmp_path / "imported"), mask_token="<|mask|>")
    back = export_checkpoint(str(tmp_path / "imported"), str(tmp_path / "back"))
    content = json.loads((back / "tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast" and content["mask_token"] == "<|mask|>"
    assert content["model_input_names"] == ["input_ids", "attention_mask"]
    assert json.loads((back / "config.json").read_text())["sliding_window"] is None, "4.52 would take its default"


def _with_sentencepiece(folder: Path, tiny_tokenizer: Path) -> Path:
    """A SentencePiece model as others give it: tokenizer.model alone, without a mask token that we would know."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(  # pyright: ignore[reportAttributeAccessIssue]
        (tiny_tokenizer / "tokenizer.model").read_bytes()
    )
    (piece,) = (piece for piece in model.pieces if piece.piece == "<mask>")
    piece.piece = "<other>"
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"})
    )
    return folder


@pytest.mark.parametrize("rows", [320, 324], ids=["new row", "unused row"])
def test_a_sentencepiece_model_gets_the_mask_token_of_its_data(rows: int, tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = _with_sentencepiece(save(hf_model("llama", vocab_size=rows), tmp_path / "source"), tiny_tokenizer)
    made = import_folder(str(source), str(tmp_path / "imported"), mask_token="<|mask|>")
    assert made.mask_id == 320 and made.new_rows == 1 and made.model.vocab_size == max(rows, 321)
    tokenizer = Tokenizer.load(tmp_path / "imported" / "tokenizer")
    assert tokenizer.mask_id == 320 and tokenizer.fingerprint == Tokenizer.load(source).fingerprint
    tokenizer.save(tmp_path / "data")  # as the builder of shards does
    assert (tmp_path / "data" / "tokenizer_config.json").is_file()
    back = export_checkpoint(str(tmp_path / "imported"), str(tmp_path / "back"))
    for name in ("tokenizer.model", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    assert import_folder(str(back), None).mask_id == 320


def test_a_sentencepiece_model_takes_no_other_mask_token(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = _with_sentencepiece(save(hf_model("llama", vocab_size=324), tmp_path / "source"), tiny_tokenizer)
    place = str(tmp_path / "imported")
    _refused(lambda: import_folder(str(source), place, mask_token="<m>"), tmp_path, "<m>", str(source), "is <|mask|>")
    (source / "added_tokens.json").write_text(json.dumps({"<pad>": 320}))
    _refused(lambda: import_folder(str(source), place, mask_token="<|mask|>"), tmp_path, "added_tokens.json", "320")


def test_an_export_without_a_mask_token_comes_back_without(tmp_path: Path) -> None:
    back = _there_and_back(save(hf_model("qwen3"), tmp_path / "source"), tmp_path, "float32")
    assert json.loads((back / "config.json").read_text())["refusion"]["mask_token_id"] == -1
    again = import_folder(str(back), str(tmp_path / "again"))
    assert again.mask_id is None and "no mask token" in again.summary()
    assert "mask" not in read_checkpoint(str(tmp_path / "again")).special_ids


# -------------------------------------------------------------------------------------------------------- refusals


def _refused(action: Callable[[], Any], tmp_path: Path, *words: str) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(RefusionError) as error:
        action()
    assert isinstance(error.value, (DataError, ConfigError))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "something was left behind"


def _import(tmp_path: Path) -> Callable[[], Any]:
    return lambda: import_folder(str(tmp_path / "source"), str(tmp_path / "imported"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type=gpt2", "qwen3"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "linear", "trained without"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, ["rope_scaling", "yarn", "remove it"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["llama3", "trained without"]),
        ({"rope_parameters": "plain"}, ["rope_parameters", "plain"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, ["rope_theta=0", "greater than 0"]),
        ({"model_type": ["qwen3"]}, ["model_type", "architecture"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": 2}, ["layer_types", "2"]),
        ({"head_dim": 11}, ["head_dim=11", "even"]),
        ({"num_key_value_heads": 3}, ["num_heads=4", "num_kv_heads=3"]),
        ({"eos_token_id": "end"}, ["eos_token_id", "end"]),
        ({"refusion": 3}, ["refusion=3", "export the model again"]),
        ({"refusion": {"objective": "best"}}, ["objective.name=best"]),
        ({"refusion": {"objective": "slots", "slot_sizes": "4"}}, ["slot_sizes", "export the model again"]),
        ({"refusion": {"mask_token_id": "four"}}, ["four", "export the model again"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["rope_parameters", "whole heads"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["rope_parameters", "whole heads"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "unquantized"]),
        ({"hidden_size": None}, ["config.json", "qwen3"]),
        ({"vocab_size": 299}, ["embed_tokens", "299", "300"]),
        ({"num_hidden_layers": 3}, ["lacks the tensor model.layers.2."]),
        ({"num_hidden_layers": 1}, ["model.layers.1.", "no place"]),
        ({"model_type": "llama"}, ["_norm", "llama", "no place"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_configurations_that_are_not_ours(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    source = save(hf_model("qwen3"), tmp_path / "source")
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**content, **changes}))
    _refused(_import(tmp_path), tmp_path, str(source), *words)


def _sharded(tmp_path: Path) -> list[Path]:
    return sorted(save(hf_model("qwen3"), tmp_path / "source", max_shard_size="20KB").glob("model-*.safetensors"))


def test_a_missing_shard(tmp_path: Path) -> None:
    lost = _sharded(tmp_path)[1]
    lost.unlink()
    _refused(_import(tmp_path), tmp_path, lost.name, "missing")


def test_a_shard_cut_short(tmp_path: Path) -> None:
    cut = _sharded(tmp_path)[1]
    os.truncate(cut, cut.stat().st_size - 100)
    _refused(_import(tmp_path), tmp_path, cut.name, "cut short")


def test_a_shard_without_what_its_index_promises(tmp_path: Path) -> None:
    first, second, *_ = _sharded(tmp_path)
    shutil.copyfile(first, second)
    _refused(_import(tmp_path), tmp_path, second.name, "promises")


def test_tensors_of_another_type(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = save(hf_model("qwen3"), tmp_path / "source")
    wrong = tensors(source)
    wrong["model.norm.weight"] = wrong["model.norm.weight"].to(torch.int8)
    save_file(wrong, source / "model.safetensors")
    _refused(_import(tmp_path), tmp_path, "model.norm.weight", "I8", "unquantized")


def test_no_folder_and_no_weights(tmp_path: Path) -> None:
    _refused(_import(tmp_path), tmp_path, "config.json is missing")
    source = save(hf_model("qwen3"), tmp_path / "source")
    (source / "model.safetensors").unlink()
    _refused(_import(tmp_path), tmp_path, "no weights")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ('{"weight_map": {"lm_head.weight": 3}}', ["names 3", "beside it"]),
        ('{"weight_map": {"lm_head.weight": "../other.safetensors"}}', ["../other.safetensors", "beside it"]),
        ('{"weight_map": {"lm_head.weight": ["a"]}}', ["cannot be read"]),
        ("{", ["cannot be read"]),
    ],
)
def test_an_index_that_is_none(index: str, words: list[str], tmp_path: Path) -> None:
    _sharded(tmp_path)
    (tmp_path / "source" / "model.safetensors.index.json").write_text(index)
    _refused(_import(tmp_path), tmp_path, "model.safetensors.index.json", *words)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_git_did_not_fetch(name: str, tmp_path: Path) -> None:
    (save if name == "model.safetensors" else save_bin)(hf_model("qwen3"), tmp_path / "source")
    (tmp_path / "source" / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    _refused(_import(tmp_path), tmp_path, name, "git lfs pull")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(value: float, tmp_path: Path) -> None:
    model = hf_model("qwen3")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    save(model, tmp_path / "source")
    _refused(_import(tmp_path), tmp_path, "model.safetensors: model.layers.1.mlp.up_proj.weight holds NaN or infinity")


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def test_pickled_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = save_bin(hf_model("qwen3"), tmp_path / "source")
    torch.save({"model.norm.weight": _Bomb()}, source / "pytorch_model.bin")
    _refused(_import(tmp_path), tmp_path, "pytorch_model.bin", "more than tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one line, and no warning of torch beside it
        (source / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
        _refused(_import(tmp_path), tmp_path, "pytorch_model.bin", "more than tensors")
    assert not (tmp_path / "exploded").exists()


def test_a_tokenizer_of_another_model(tmp_path: Path, tiny_tokenizer: Path) -> None:
    source = with_tokenizer(save(hf_model("qwen3"), tmp_path / "source"), tiny_tokenizer)
    _refused(_import(tmp_path), tmp_path, "ids up to 319", "300 rows")
    for file in tiny_tokenizer.iterdir():
        (source / file.name).unlink()
    json_tokenizer(source, ROWS + 1)
    _refused(_import(tmp_path), tmp_path, "ids up to 300", "300 rows")
    (source / "tokenizer.json").write_text("{")
    _refused(_import(tmp_path), tmp_path, "tokenizer.json")


def test_only_an_import_is_replaced(tmp_path: Path) -> None:
    save(hf_model("qwen3"), tmp_path / "source")
    _import(tmp_path)()
    _refused(_import(tmp_path), tmp_path, "--overwrite")
    import_folder(str(tmp_path / "source"), str(tmp_path / "imported"), overwrite=True)
    store.check(tmp_path / "imported" / "step-00000000")
    _refused(lambda: import_folder(str(tmp_path / "source"), str(tmp_path / "source"), overwrite=True), tmp_path)


def test_memory_is_that_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read in blocks, each written before the next is read."""
    from refusion_train.convert import safetensors_stream
    from refusion_train.convert.source import Source

    sizes: list[int] = []
    original = Source.read

    def read(*given: Any) -> torch.Tensor:
        part = original(*given)
        sizes.append(part.nbytes)
        return part

    monkeypatch.setattr(safetensors_stream.blocks, "__defaults__", (4096,))
    monkeypatch.setattr(Source, "read", read)
    source = save(hf_model("qwen3"), tmp_path / "source")
    assert equal(source, _there_and_back(source, tmp_path, "float32"))
    assert max(sizes) <= 4096 and sum(sizes) == sum(value.nbytes for value in tensors(source).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_our_class_decodes_what_was_imported(family: str, tmp_path: Path) -> None:
    """Left to right over our own cache, biases and norms included, as the stock class does."""
    from refusion_train.convert.family import CLASSES
    from refusion_train.hf import modeling_refusion

    stock = hf_model(family)
    back = _there_and_back(save(stock, tmp_path / "source"), tmp_path, "float32")
    ours = getattr(modeling_refusion, CLASSES[family][1]).from_pretrained(back)
    prompt = torch.tensor([[5, 6, 7, 8]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert ours.generate(prompt, **options).equal(stock.generate(prompt, **options))
