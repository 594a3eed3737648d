"""An exported folder in environments that hold only torch, transformers and what these need: current, and 4.52."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "convert"))
from environments import environment
from made_up import VOCABULARY, make_checkpoint, model_shape

OLD = "4.52.4"


def _environment(version: str | None) -> Path:
    """Python of an environment with this version of transformers; None: the installed one."""
    if version is None:
        return environment(f"transformers-{importlib.metadata.version('transformers')}", ["torch", "transformers"], [])
    linked = ["torch", "pyyaml", "regex", "tqdm", "requests", "safetensors", "packaging"]
    without = ("transformers", "tokenizers", "huggingface-hub")
    return environment(f"transformers-{version}", linked, [f"transformers=={version}"], without)


_SCRIPT = """
import importlib.util, json, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
for name in ("refusion_train", "megatron", "deepspeed", "sentencepiece"):
    assert importlib.util.find_spec(name) is None, name
folder, given = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
# In this order: 4.52 gives the class with remote code to the rest of the process, also without being asked.
stock = AutoModelForCausalLM.from_pretrained(folder).float().eval()
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).float().eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
# Permuted positions, no mask, no cache: some versions take this for packed sequences.
with torch.no_grad():
    logits = model(given["tokens"], position_ids=given["positions"], use_cache=False).logits
    masked = stock(given["tokens"], position_ids=given["positions"], use_cache=False,
                   attention_mask=torch.ones_like(given["tokens"])).logits
inputs = tokenizer(["the cat sees", "a dog"], return_tensors="pt", padding=True)
out = model.generate(**inputs, max_new_tokens=12, slot_size=4, return_dict_in_generate=True)
left = model.generate(**inputs, max_new_tokens=6, decoding="left_to_right", eos_token_id=None)
plain = stock.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, suppress_tokens=[4])
scores = model.likelihood(inputs["input_ids"], attention_mask=inputs["attention_mask"], prompt_length=1)
print(json.dumps({
    "version": transformers.__version__, "classes": [type(model).__name__, type(stock).__name__],
    "off": [(logits - given["logits"]).abs().max().item(), (masked - given["logits"]).abs().max().item()],
    "out": out.sequences.tolist(), "forwards": out.forwards.tolist(), "left": left.tolist(), "plain": plain.tolist(),
    "nelbo": [one.nelbo for one in scores], "padded": inputs["input_ids"].tolist(),
    "text": tokenizer.batch_decode(out.sequences, skip_special_tokens=True),
}))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Any) -> tuple[Path, Path]:
    """A folder in float32; and random tokens, permuted positions and the training model's logits at them."""
    from refusion_train.convert.export import export_checkpoint, read_checkpoint
    from refusion_train.convert.verify import _inputs, _training_logits

    root = tmp_path_factory.mktemp("elsewhere")
    make_checkpoint(root, tiny_dataset.train, model_shape())
    folder = export_checkpoint(str(root), str(root / "hf"), dtype="float32")
    tokens, positions = _inputs(VOCABULARY, 24, seed=0)
    logits = _training_logits(read_checkpoint(str(root)), tokens, positions)
    given = {"tokens": torch.from_numpy(tokens), "positions": torch.from_numpy(positions), "logits": logits}
    torch.save(given, root / "given.pt")
    return folder, root / "given.pt"


@pytest.mark.slow
@pytest.mark.parametrize("version", [None, OLD], ids=["installed", OLD])
def test_it_works_where_only_transformers_is(exported: tuple[Path, Path], version: str | None, tmp_path: Path) -> None:
    from refusion_train.data.tokenizer import Tokenizer
    from refusion_train.hf.modeling_refusion import ReFusionQwen3ForCausalLM

    python = _environment(version)
    environment = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), "-I", "-W", "ignore", "-c", _SCRIPT, *map(str, exported)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["version"] == (version or importlib.metadata.version("transformers"))
    assert found["classes"] == ["ReFusionQwen3ForCausalLM", "Qwen3ForCausalLM"]
    assert max(found["off"]) < 1e-4, "positions are not taken as positions"
    assert found["left"] == found["plain"]
    tokenizer, model = Tokenizer.load(exported[0]), ReFusionQwen3ForCausalLM.from_pretrained(exported[0])
    rows = torch.tensor(found["padded"])
    mask = (rows != tokenizer.pad_id).long()
    out = model.generate(rows, attention_mask=mask, max_new_tokens=12, slot_size=4, return_dict_in_generate=True)
    assert out.sequences.tolist() == found["out"] and out.forwards.tolist() == found["forwards"]
    assert [tokenizer.decode(row) for row in found["out"]] == found["text"]
    scores = model.likelihood(rows, attention_mask=mask, prompt_length=1)
    assert found["nelbo"] == pytest.approx([one.nelbo for one in scores], rel=1e-4)
