"""Exported folders: the weights, every way of loading them, and folders that are whole or not there."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import tensors
from made_up import VOCABULARY, make_checkpoint, model_shape, run_elsewhere

from refusion_train.config import ObjectiveConfig
from refusion_train.convert.export import export_checkpoint, parse_size
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import CheckpointError, ConfigError, DataError, RefusionError

CODE = {
    "modeling_refusion.py",
    "decoding.py",
    "baselines.py",
    "cache.py",
    "runner.py",
    "likelihood.py",
    "corruption.py",
    "settings.py",
    "tokenization_refusion.py",
}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "refusion_tokenizer.json"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run folder with one checkpoint, and its weights."""
    root = tmp_path_factory.mktemp("run")
    return root, make_checkpoint(root, tiny_dataset.train, model_shape())


@pytest.fixture(scope="module")
def exported(run: tuple[Path, dict], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a Hugging Face folder in float32; read only."""
    return export_checkpoint(str(run[0]), str(tmp_path_factory.mktemp("out") / "hf"), dtype="float32")


def test_the_folder_holds_what_it_should(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == CODE | TOKENIZER | {
        "config.json", "generation_config.json", "model.safetensors", "README.md",
    }  # fmt: skip
    config = json.loads((exported / "config.json").read_text())
    assert config["refusion"]["objective"] == "slots" and config["refusion"]["cross_slot_targets"] is True
    assert config["refusion"]["mask_token_id"] == 4 and config["vocab_size"] == VOCABULARY
    assert not [path for path in exported.parent.iterdir() if path != exported]


def test_the_modelling_code_names_all_its_files(exported: Path) -> None:
    """transformers before 5 copies a file's own relative imports only, not those of its neighbours."""
    named = {
        file.name: set(re.findall(r"^from \.(\w+) import", file.read_text(), re.MULTILINE))
        for file in exported.glob("*.py")
    }
    for root in ("modeling_refusion.py", "tokenization_refusion.py"):
        for neighbour in named[root]:
            assert named[f"{neighbour}.py"] <= named[root], f"{root} must import what {neighbour}.py does"
    assert {f"{name}.py" for name in named["modeling_refusion.py"]} == CODE - {
        "modeling_refusion.py", "tokenization_refusion.py"
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_the_checkpoint_without_padding(
    run: tuple[Path, dict], dtype: str, tmp_path: Path
) -> None:
    root, weights = run
    got = tensors(export_checkpoint(str(root / "checkpoints/step-00000003"), str(tmp_path / "hf"), dtype=dtype))
    assert set(got) == set(weights)
    assert weights["model.embed_tokens.weight"].shape[0] == 384
    for name, weight in weights.items():
        expected = weight[:VOCABULARY] if "embed_tokens" in name else weight
        assert got[name].equal(expected.to(getattr(torch, dtype))), name


def test_a_large_model_is_cut_into_files_with_an_index(run: tuple[Path, dict], exported: Path, tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    folder = export_checkpoint(str(run[0]), str(tmp_path / "hf"), dtype="fp32", max_shard_bytes=30_000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    # The embedding alone is larger than the limit; all other files keep it.
    assert all((folder / name).stat().st_size < 32_000 for name in files[1:])
    whole = tensors(exported)
    assert all(value.equal(whole[name]) for name, value in tensors(folder).items())
    loaded = Qwen3ForCausalLM.from_pretrained(folder).state_dict()
    assert all(loaded[name].equal(value) for name, value in whole.items())


def test_the_newest_good_checkpoint_is_taken(tiny_dataset: Any, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape(), step=1)
    second = make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape(), step=2)
    make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape(), step=3)
    (tmp_path / "run/checkpoints/step-00000003/state.json").unlink()
    got = tensors(export_checkpoint(str(tmp_path / "run"), str(tmp_path / "hf"), dtype="float32"))
    assert got["model.norm.weight"].equal(second["model.norm.weight"])


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_stock_classes_load_it_and_agree(tiny_dataset: Any, tmp_path: Path, qk_norm: bool, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

    sys.path.insert(0, str(Path(__file__).parents[1] / "hf"))
    from brute_force import dense_logits

    weights = make_checkpoint(tmp_path, tiny_dataset.train, model_shape(qk_norm=qk_norm, tie_embeddings=tied))
    folder = export_checkpoint(str(tmp_path), str(tmp_path / "hf"), dtype="float32")
    stock, report = (Qwen3ForCausalLM if qk_norm else LlamaForCausalLM).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    ours = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(ours).__name__ == f"ReFusion{type(stock).__name__}"
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is type(stock)
    assert ("lm_head.weight" in weights) is (not tied)
    tokens = torch.arange(5, 25)
    logits = stock.eval()(tokens[None]).logits[0]
    assert logits.equal(ours.eval()(tokens[None]).logits[0])
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    expected = dense_logits(stock, tokens.tolist(), list(range(20)), causal)
    assert torch.allclose(logits.double(), expected, atol=1e-4)


_GENERATE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer(["the cat sees", "a dog"], return_tensors="pt", padding=True)
out = model.generate(**inputs, max_new_tokens=12, slot_size=4)
print(json.dumps([out.tolist(), inputs["input_ids"].tolist(), type(model).__name__, model.last_stats["forwards"],
                  tokenizer.batch_decode(out, skip_special_tokens=True)]))
"""


def test_it_generates_in_a_process_without_this_package(exported: Path, tmp_path: Path) -> None:
    from refusion_train.hf.modeling_refusion import ReFusionQwen3ForCausalLM

    out, ids, name, forwards, texts = run_elsewhere(_GENERATE, tmp_path, str(exported))
    assert name == "ReFusionQwen3ForCausalLM"
    tokenizer = Tokenizer.load(exported)
    model = ReFusionQwen3ForCausalLM.from_pretrained(exported)
    total = 0
    for row, prompt, tokens, text in zip(out, ["the cat sees", "a dog"], ids, texts, strict=True):
        expected = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        assert tokens == [tokenizer.pad_id] * (len(tokens) - len(expected)) + expected
        alone = model.generate(torch.tensor([expected]), max_new_tokens=12, slot_size=4)[0].tolist()
        assert row[len(tokens) :][: len(alone) - len(expected)] == alone[len(expected) :]
        assert text == tokenizer.decode(alone)
        total += model.last_stats["forwards"]
    assert forwards == total


def test_the_defaults_of_decoding_are_in_the_folder(exported: Path) -> None:
    from refusion_train.hf.modeling_refusion import ReFusionQwen3ForCausalLM

    model = ReFusionQwen3ForCausalLM.from_pretrained(exported)
    prompt = torch.tensor([[2, 10, 11]])
    plain = model.generate(prompt, max_new_tokens=16)
    assert plain.equal(model.generate(
        prompt, max_new_tokens=16, slot_size=4, num_blocks=1, slot_threshold=0.9, token_threshold=0.4, correction="ar",
        decoding="plan_and_infill", first_from_ar=True, eos_token_id=3,
    ))  # fmt: skip
    left = model.generate(prompt, max_new_tokens=16, decoding="left_to_right")
    assert left[0, 3:].tolist() == _stock_greedy(exported, prompt)


def _stock_greedy(folder: Path, prompt: torch.Tensor) -> list[int]:
    from transformers import Qwen3ForCausalLM

    stock = Qwen3ForCausalLM.from_pretrained(folder)
    return stock.generate(prompt, max_new_tokens=16, suppress_tokens=[4])[0, prompt.shape[1] :].tolist()


def test_it_stops_at_words(exported: Path) -> None:
    from transformers import AutoTokenizer

    from refusion_train.hf.modeling_refusion import ReFusionQwen3ForCausalLM

    model = ReFusionQwen3ForCausalLM.from_pretrained(exported)
    tokenizer: Any = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    prompt = torch.tensor([[2, 10, 11]])
    plain = model.generate(prompt, max_new_tokens=32, eos_token_id=None)[0, 3:].tolist()
    pieces = [tokenizer.decode([token], skip_special_tokens=True) for token in plain]
    word = next(piece for piece in pieces[3:] if piece.strip().isalnum())
    out = model.generate(prompt, max_new_tokens=32, eos_token_id=None, stop_strings=word, tokenizer=tokenizer)
    first = next(n for n in range(1, 33) if word in tokenizer.decode(plain[:n], skip_special_tokens=True))
    assert out[0, 3:].tolist() == plain[:first]
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(prompt, stop_strings=word)


def test_slot_sizes_are_those_that_a_schedule_ends_at(tiny_dataset: Any, tmp_path: Path) -> None:
    """`likelihood` of the folder draws as the run's validation does; decoding begins with a size in use."""
    weights = [[0, [1.0, 0.0, 0.0]], [1000, [0.0, 1.0, 3.0]]]
    objective = ObjectiveConfig(slot_sizes=[2, 4, 8], slot_weights=weights, ar_weight=[[0, 1.0], [5, 0.5]])
    make_checkpoint(tmp_path, tiny_dataset.train, model_shape(), objective)
    folder = export_checkpoint(str(tmp_path), str(tmp_path / "hf"))
    assert json.loads((folder / "config.json").read_text())["refusion"]["slot_weights"] == [0.0, 1.0, 3.0]
    assert json.loads((folder / "generation_config.json").read_text())["slot_size"] == 4


@pytest.mark.parametrize(("objective", "decoding"), [("ar", "left_to_right"), ("mdm", "mdm")])
def test_the_objective_decides_how_it_is_decoded(
    tiny_dataset: Any, tmp_path: Path, objective: str, decoding: str
) -> None:
    from refusion_train.hf.modeling_refusion import ReFusionQwen3ForCausalLM

    make_checkpoint(tmp_path, tiny_dataset.train, model_shape(), ObjectiveConfig(name=objective))
    model = ReFusionQwen3ForCausalLM.from_pretrained(export_checkpoint(str(tmp_path), str(tmp_path / "hf")))
    prompt = torch.tensor([[2, 10, 11]])
    plain = model.generate(prompt, max_new_tokens=8)
    assert plain.equal(model.generate(prompt, max_new_tokens=8, decoding=decoding))
    with pytest.raises(ValueError, match=f"objective.name={objective}"):
        model.generate(prompt, max_new_tokens=8, decoding="plan_and_infill")


# --------------------------------------------------------------------------------------------- refusals and accidents


def _one_line(error: pytest.ExceptionInfo[RefusionError], *words: str) -> None:
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_an_existing_folder_is_replaced_only_if_asked_and_ours(run: tuple[Path, dict], tmp_path: Path) -> None:
    root, out = str(run[0]), tmp_path / "hf"
    out.mkdir()
    export_checkpoint(root, str(out))
    (out / "marker").touch()
    with pytest.raises(DataError) as error:
        export_checkpoint(root, str(out))
    _one_line(error, str(out), "--overwrite")
    assert (out / "marker").exists()
    export_checkpoint(root, str(out), overwrite=True)
    assert not (out / "marker").exists() and (out / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    other = tmp_path / "letters"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(DataError) as error:
        export_checkpoint(root, str(other), overwrite=True)
    _one_line(error, str(other))
    assert (other / "letter.txt").read_text() == "dear"


def test_a_tokenizer_that_is_gone_or_another(
    run: tuple[Path, dict], tiny_dataset: Any, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    from refusion_train.checkpoint import store

    folder = run[0] / "checkpoints/step-00000003"
    state = store.read_state(folder)
    state["data"]["path"] = str(tmp_path / "gone")
    tensors: dict[str, Any] = {}
    store.save(tmp_path / "run/checkpoints", 3, tensors | {"nothing": torch.zeros(1)}, state, keep=1)
    with pytest.raises(DataError) as error:
        export_checkpoint(str(tmp_path / "run"), str(tmp_path / "hf"))
    _one_line(error, str(tmp_path / "gone"), "--tokenizer")
    state["data"]["tokenizer"]["fingerprint"] = "sha256:other"
    store.save(tmp_path / "run/checkpoints", 4, {"nothing": torch.zeros(1)}, state, keep=1)
    with pytest.raises(DataError) as error:
        export_checkpoint(str(tmp_path / "run"), str(tmp_path / "hf"), tokenizer=str(tiny_tokenizer))
    _one_line(error, "sha256:other", str(tiny_tokenizer))
    # The explicit folder is enough where the data are gone.
    assert export_checkpoint(str(run[0]), str(tmp_path / "hf"), tokenizer=str(tiny_tokenizer)).is_dir()


def test_a_checkpoint_without_its_weights_leaves_nothing(tiny_dataset: Any, tmp_path: Path) -> None:
    from refusion_train.checkpoint import store

    make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape())
    state = store.read_state(tmp_path / "run/checkpoints/step-00000003")
    store.save(tmp_path / "run/checkpoints", 4, {"nothing": torch.zeros(1)}, state, keep=1)
    with pytest.raises(CheckpointError) as error:
        export_checkpoint(str(tmp_path / "run"), str(tmp_path / "hf"))
    _one_line(error, "step-00000004")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_shape_that_transformers_would_not_load(tiny_dataset: Any, tmp_path: Path) -> None:
    """Its Llama wants hidden_size to be a multiple of num_heads, whatever head_dim is."""
    make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape(qk_norm=False, num_heads=6))
    with pytest.raises(DataError) as error:
        export_checkpoint(str(tmp_path / "run"), str(tmp_path / "hf"))
    _one_line(error, "state.json", "hidden_size=32", "num_heads=6")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_wrong_words(run: tuple[Path, dict], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        export_checkpoint(str(run[0]), str(tmp_path / "hf"), dtype="int8")
    _one_line(error, "dtype=int8", "bfloat16")
    with pytest.raises(CheckpointError) as error2:
        export_checkpoint(str(tmp_path / "nowhere"), str(tmp_path / "hf"))
    _one_line(error2, str(tmp_path / "nowhere"))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_and_leaves_nothing(run: tuple[Path, dict], tmp_path: Path) -> None:
    """A limit on file sizes stands for the full disk: the same failing writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(RefusionError) as error:
            export_checkpoint(str(run[0]), str(tmp_path / "hf"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _one_line(error, str(tmp_path / "hf"))
    assert not list(tmp_path.iterdir())


_SLOW_EXPORT = """
import sys, time
from refusion_train.convert import export
original = export._reader
def reader(*given):
    read = original(*given)
    def slow(name, rows):
        print(name, flush=True)
        time.sleep(0.3)
        return read(name, rows)
    return slow
export._reader = reader
export.export_checkpoint(sys.argv[1], sys.argv[2], overwrite=True)
print("done", flush=True)
"""


@pytest.mark.parametrize("existing", [False, True])
def test_a_kill_leaves_no_folder_that_looks_whole(run: tuple[Path, dict], tmp_path: Path, existing: bool) -> None:
    from transformers import AutoConfig

    out = tmp_path / "hf"
    if existing:
        export_checkpoint(str(run[0]), str(out))
        before = tensors(out)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", _SLOW_EXPORT, str(run[0]), str(out)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline().strip() != "done"
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    leftovers = [path for path in tmp_path.iterdir() if path != out]
    assert leftovers, "the kill came too early to prove anything"
    for folder in leftovers:
        assert not (folder / "config.json").exists()
        with pytest.raises((OSError, ValueError)):
            AutoConfig.from_pretrained(folder)
    if existing:
        assert all(value.equal(before[name]) for name, value in tensors(out).items())
    else:
        assert not out.exists()
    export_checkpoint(str(run[0]), str(out), overwrite=existing)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    AutoConfig.from_pretrained(out)


def test_memory_is_that_of_one_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each block of rows is written before the next is read."""
    from refusion_train.convert.safetensors_stream import blocks, write_model

    events: list[str] = []
    monkeypatch.setattr(blocks, "__defaults__", (3 * 4,))

    def read(name: str, rows: slice) -> torch.Tensor:
        events.append(f"read {name} {rows.start}:{rows.stop}")
        return torch.zeros(rows.stop - rows.start)

    write_model(
        tmp_path,
        {name: (4,) for name in "ab"},
        torch.float32,
        read,
        10**9,
        lambda size: events.append(f"wrote {size}"),
    )
    expected = [
        ["read a 0:3", "wrote 12"],
        ["read a 3:4", "wrote 4"],
        ["read b 0:3", "wrote 12"],
        ["read b 3:4", "wrote 4"],
    ]
    assert events == [event for pair in expected for event in pair]


def test_a_tokenizer_of_hugging_face_is_written_with_its_mask_token(tiny_dataset: Any, tmp_path: Path) -> None:
    """As shards of a tokenizer.json keep it: the mask token, which the file lacks, stands in a file of ours."""
    from hf_models import json_tokenizer
    from transformers import AutoTokenizer

    from refusion_train.checkpoint import store

    (tmp_path / "hf").mkdir()
    given = Tokenizer.load(json_tokenizer(tmp_path / "hf", VOCABULARY - 1, chat_template="{{ messages }}"))
    assert given.mask_id == VOCABULARY - 1
    given.save(tmp_path / "shards" / "tokenizer")
    make_checkpoint(tmp_path / "run", tiny_dataset.train, model_shape())
    state = store.read_state(tmp_path / "run/checkpoints/step-00000003")
    state["data"] |= {"path": str(tmp_path / "shards"), "special_ids": given.special_ids}
    state["data"]["tokenizer"] = {"fingerprint": given.fingerprint, "kind": given.kind}
    file = tmp_path / "run/checkpoints/step-00000003/state.json"
    file.write_text(json.dumps(state))
    manifest = json.loads((file.parent / "manifest.json").read_text())
    import hashlib

    data = file.read_bytes()
    manifest["files"]["state.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (file.parent / "manifest.json").write_text(json.dumps(manifest))
    out = export_checkpoint(str(tmp_path / "run"), str(tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.mask_token_id == given.mask_id and tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.encode("w1 w2", add_special_tokens=False) == given.encode("w1 w2")
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == given.eos_id


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1B", 1), ("4GiB", 4 << 30), ("0.5mb", 500_000), ("1TB", 10**12), (" 7 ", 7)],
)
def test_sizes_are_understood(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.5B", "-5GB", "1e3", "5 things", "B", "1..5GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="5GB or 500MB"):
        parse_size(text)
