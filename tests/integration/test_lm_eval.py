"""The command of lm-evaluation-harness on an exported folder, both kinds of task, in an environment without us."""

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
from made_up import make_checkpoint, model_shape

HARNESS = "lm_eval==0.4.13"
QUESTIONS = [("the cat sees", " a dog"), ("a dog likes the", " big house"), ("we run", " and the cat sleeps")]
NEW_TOKENS = 8

_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["."], max_gen_toks: {tokens}, do_sample: false}}
metric_list: [{{metric: {metric}, aggregation: {aggregation}, higher_is_better: true}}]
"""


def _write_tasks(folder: Path) -> None:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS), encoding="utf-8")
    for kind, metric, aggregation in (("generate_until", "exact_match", "mean"), ("loglikelihood", "acc", "mean")):
        task = _TASK.format(
            name=f"tiny_{kind}", file=file, kind=kind, tokens=NEW_TOKENS, metric=metric, aggregation=aggregation
        )
        (folder / f"tiny_{kind}.yaml").write_text(task, encoding="utf-8")


@pytest.mark.slow
def test_both_kinds_of_task_by_the_command(tiny_dataset: Any, tmp_path: Path) -> None:
    """generate_until is plan and infill; loglikelihood is left to right, as the model's own `likelihood` has it."""
    from refusion_train.convert.export import export_checkpoint
    from refusion_train.data.tokenizer import Tokenizer
    from refusion_train.hf.modeling_refusion import ReFusionQwen3ForCausalLM

    version = importlib.metadata.version("transformers")
    python = environment(f"{HARNESS}-transformers-{version}", ["torch", "transformers"], [HARNESS, "accelerate"])
    make_checkpoint(tmp_path, tiny_dataset.train, model_shape())
    folder = export_checkpoint(str(tmp_path), str(tmp_path / "hf"), dtype="float32")
    _write_tasks(tmp_path)
    command = [
        str(python), "-I", "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "2", "--model_args",
        f"pretrained={folder},trust_remote_code=True,dtype=float32", "--include_path", str(tmp_path),
        "--tasks", "tiny_generate_until,tiny_loglikelihood", "--log_samples", "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    variables = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]

    tokenizer, model = Tokenizer.load(folder), ReFusionQwen3ForCausalLM.from_pretrained(folder)
    answers = _samples(tmp_path / "out", "tiny_generate_until")
    scores = _samples(tmp_path / "out", "tiny_loglikelihood")
    assert len(answers) == len(scores) == len(QUESTIONS)
    for (question, answer), generated, scored in zip(QUESTIONS, answers, scores, strict=True):
        ids = torch.tensor([_prompt(tokenizer, question)])
        out = model.generate(ids, max_new_tokens=NEW_TOKENS)[0, ids.shape[1] :]
        assert generated["resps"][0][0] == tokenizer.decode(out.tolist()).split(".")[0]
        both = torch.tensor([_prompt(tokenizer, question + answer)])
        expected = model.likelihood(both, prompt_length=ids.shape[1])[0].left_to_right
        assert float(scored["resps"][0][0][0]) == pytest.approx(expected, abs=1e-3)


def _samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text(encoding="utf-8").splitlines()), key=lambda sample: sample["doc_id"])


def _prompt(tokenizer: Any, text: str) -> list[int]:
    """As documents begin in the shards: with the begin token."""
    return [tokenizer.bos_id, *tokenizer.encode(text)]
