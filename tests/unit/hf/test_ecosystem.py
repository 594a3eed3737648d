"""What tools of the ecosystem do with the shipped classes: stop criteria, the text-generation pipeline, lm_eval."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from brute_force import MASK, VOCAB, tiny_model
from transformers import PreTrainedTokenizerFast, StoppingCriteria, pipeline

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(0, sharpness=0.8, slot_sizes=[2, 4, 8]).float()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A word for each id, none within another: a05 a06 ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"a{i:02d}": i for i in range(VOCAB)}, unk_token="a01"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="a00", eos_token="a03", padding_side="left",
        model_input_names=["input_ids", "attention_mask"], clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )  # fmt: skip


class _At(StoppingCriteria):
    """Stops a row whose last token is `token`, as transformers asks: a row at a time in a batch."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def test_criteria_to_stop_cut_each_row(model: Any) -> None:
    batch = torch.tensor([[5, 6, 7, 8], [0, 9, 10, 11]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "slot_size": 4, "pad_token_id": 0}
    plain = model.generate(batch, **options)
    stop = int(plain[0, 4 + 5])
    criterion = _At(stop)
    out = model.generate(batch, stopping_criteria=[criterion], return_dict_in_generate=True, **options)
    assert criterion.lengths == list(range(5, 5 + len(criterion.lengths)))
    for row in range(2):
        tokens = plain[row, 4:].tolist()
        count = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert out.new_tokens[row] == count
        assert out.sequences[row, 4 : 4 + count].tolist() == tokens[:count]
        assert not out.sequences[row, 4 + count :].any()


def _words(text: str) -> list[str]:
    return re.findall(r"a\d+", text)


def test_the_pipeline_for_text(model: Any, tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert "not supported" not in capfd.readouterr().err
    words: dict[str, Any] = {"max_new_tokens": 8, "slot_size": 4, "do_sample": False}
    (one,) = pipe("a05 a06 a07 a08", **words)
    expected = model.generate(PROMPT, max_new_tokens=8, slot_size=4, eos_token_id=3)
    assert _words(one["generated_text"]) == [f"a{i:02d}" for i in expected[0].tolist()]
    (new,) = pipe("a05 a06 a07 a08", return_full_text=False, **words)
    assert _words(new["generated_text"]) == [f"a{i:02d}" for i in expected[0, 4:].tolist()]
    both = pipe(["a05 a06 a07 a08", "a09 a10"], batch_size=2, **words)
    assert both[0] == [one]
    assert both[1] == pipe("a09 a10", **words), "a padded neighbour changes the text"
    (chat,) = pipe([{"role": "user", "content": "a05 a06 a07 a08"}], **words)
    assert _words(chat["generated_text"][-1]["content"]) == [f"a{i:02d}" for i in expected[0, 4:].tolist()]


def test_the_result_is_an_output_of_transformers(model: Any) -> None:
    from transformers.utils.generic import ModelOutput

    out = model.generate(PROMPT, max_new_tokens=8, slot_size=4, return_dict_in_generate=True)
    assert isinstance(out, ModelOutput) and out["sequences"] is out.sequences is out[0]
    assert out.tokens_per_forward.tolist() == [8 / out.forwards.item()]
    streamed: list[int] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            streamed.extend(value.reshape(-1).tolist())

        def end(self) -> None:
            streamed.append(-1)

    model.generate(PROMPT, max_new_tokens=8, slot_size=4, streamer=Streamer())
    assert streamed == [*out.sequences[0].tolist(), -1]


def test_lm_eval_reads_both_kinds_of_task(model: Any, tokenizer: Any) -> None:
    """generate_until by plan and infill, loglikelihood by the stock forward; the tool's own class, no network."""
    huggingface = pytest.importorskip(
        "lm_eval.models.huggingface", reason="lm_eval is not installed; pip install 'refusion-train[evaluation]'"
    )
    from lm_eval.api.instance import Instance

    harness = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, backend="causal")

    def ask(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        requests = [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]
        return getattr(harness, kind)(requests, disable_tqdm=True)

    plain = model.generate(PROMPT, max_new_tokens=8, eos_token_id=3)[0, 4:].tolist()
    stop = f"a{plain[4]:02d}"
    prompts = ["a05 a06 a07 a08", "a09 a10"]
    answers = ask("generate_until", [(text, {"until": [stop], "max_gen_toks": 8}) for text in prompts])
    assert _words(answers[0]) == [f"a{i:02d}" for i in plain[: plain.index(plain[4])]]
    assert all(stop not in _words(answer) for answer in answers)
    pairs = [("a05 a06", " a07 a08"), ("a09", " a10")]
    scores = ask("loglikelihood", pairs)
    for (score, _), (context, continuation) in zip(scores, pairs, strict=True):
        ids = tokenizer(context + continuation, return_tensors="pt")["input_ids"]
        given = len(tokenizer(context)["input_ids"])
        assert score == pytest.approx(model.likelihood(ids, prompt_length=given)[0].left_to_right, abs=1e-4)
    assert MASK not in plain
