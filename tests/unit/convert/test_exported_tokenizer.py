"""The tokenizer of an exported folder gives the ids and texts of ours, for text of every kind."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from made_up import run_elsewhere
from tiny_texts import tiny_texts

from data_tools.train_tokenizer import train_tokenizer
from refusion_train.convert.tokenizer import write_tokenizer
from refusion_train.data.tokenizer import SPECIAL_PIECES, Tokenizer

BITS = [
    " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\0", "-", "=", "ab", "aba", " the", "cat", " sees", ".", "0", "17",
    "é", "e\u0301", "日本", "😀", "👩\u200d👩\u200d👧", "\u2581", " \u2581 ", "\u00a0", "\u200b", "\ufffd",
    "\U0010ffff", "<0x0A>", "<0xE2>", "<s", "s>", *SPECIAL_PIECES.values(),
]  # fmt: skip


def texts(tokenizer: Tokenizer, count: int) -> list[str]:
    """Fuzzed texts: chains of nasty bits, of pieces of the vocabulary, of two characters, of any characters."""
    rng = random.Random(0)
    pieces = [tokenizer.decode([i]) for i in range(261, tokenizer.vocab_size)]
    letters = sorted(set("".join(pieces)))
    found = ["", " ", "\n", "the cat sees a dog.", "".join(SPECIAL_PIECES.values())]
    while len(found) < count:
        kind, length = rng.randrange(4), rng.randint(1, 30)
        if kind == 0:
            source = BITS
        elif kind == 1:
            source = pieces
        elif kind == 2:
            source = rng.sample(letters, 2)
        else:
            source = [chr(rng.choice([rng.randrange(128), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))]
            source += rng.sample(letters, 3)
        found.append("".join(rng.choice(source) for _ in range(length)))
    return found


_CHECK = """
from transformers import AutoTokenizer
texts, runs = json.load(open(sys.argv[2]))
plain = AutoTokenizer.from_pretrained(sys.argv[1])
exact = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
out = {"names": [type(plain).__name__, type(exact).__name__]}
for name, tokenizer in (("plain", plain), ("exact", exact)):
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    out[name] = {
        "ids": ids,
        "with_begin": [tokenizer(text)["input_ids"] for text in texts[:20]],
        "texts": [tokenizer.decode(one, skip_special_tokens=True) for one in ids],
        "runs": [tokenizer.decode(run, skip_special_tokens=True) for run in runs],
        "kept": [tokenizer.decode(run) for run in runs],
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id],
    }
exact.save_pretrained("saved")
again = AutoTokenizer.from_pretrained("saved", trust_remote_code=True)
out["saved"] = again(texts)["input_ids"] == exact(texts)["input_ids"] and type(again).__name__ == type(exact).__name__
print(json.dumps(out))
"""


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def elsewhere(
    request: pytest.FixtureRequest, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any, Any, Any]:
    """Our tokenizer, texts, runs of random ids, and what a process without this package makes of them."""
    folder = tmp_path_factory.mktemp("hf")
    if request.param == "bpe":
        tokenizer = Tokenizer.load(tiny_tokenizer)
    else:
        corpus = folder / "corpus.txt"
        corpus.write_text("\n".join(tiny_texts(200, seed=1)) + " -- == <a> (((())))")
        train_tokenizer([str(corpus)], str(folder / "unigram"), 320, "unigram", progress=False)
        tokenizer = Tokenizer.load(folder / "unigram")
    write_tokenizer(tokenizer, folder, 128)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    rng = random.Random(1)
    # Many byte tokens (5..260): whole characters, broken ones, and both in a row.
    whole = [tokenizer.encode(character) for character in ("é", "日", "😀")]
    runs = []
    for _ in range(400):
        run: list[int] = []
        for _ in range(rng.randint(1, 8)):
            run += rng.choice([rng.choice(whole), [rng.randrange(5, 261)], [rng.randrange(tokenizer.vocab_size)]])
        runs.append(run)
    given = texts(tokenizer, 1500)
    (folder / "given.json").write_text(json.dumps([given, runs]))
    found = run_elsewhere(_CHECK, folder, str(folder), str(folder / "given.json"), sentencepiece=request.param != "bpe")
    return tokenizer, given, runs, found


def test_ids_are_the_same(elsewhere: Any) -> None:
    tokenizer, given, _, found = elsewhere
    expected = [ids.tolist() for ids in tokenizer.encode_batch(given)]
    exact = found["names"][1]
    for name in ("plain", "exact"):
        if (name, exact) == ("plain", "ReFusionUnigramTokenizer"):
            # Of equally probable segmentations tokenizer.json may take another one; control tokens never come out.
            same = [ids == other for ids, other in zip(found[name]["ids"], expected, strict=True)]
            assert 0.98 * len(same) < sum(same) < len(same), "all the same: the class may go"
            assert all(set(tokenizer.special_ids.values()).isdisjoint(ids) for ids in found[name]["ids"])
        else:
            assert found[name]["ids"] == expected
            assert found[name]["with_begin"] == [[tokenizer.bos_id, *ids] for ids in expected[:20]]
        assert found[name]["special"] == [tokenizer.special_ids[key] for key in ("bos", "eos", "pad", "mask")]


@pytest.mark.parametrize("name", ["plain", "exact"])
def test_texts_come_back(elsewhere: Any, name: str) -> None:
    _, given, _, found = elsewhere
    assert found[name]["texts"] == given


def test_broken_characters_are_decoded_as_sentencepiece_does(elsewhere: Any) -> None:
    tokenizer, _, runs, found = elsewhere
    for run, text, kept in zip(runs, found["exact"]["runs"], found["exact"]["kept"], strict=True):
        assert text == tokenizer.decode(run), run
        assert kept == tokenizer.decode(run, keep_special=True), run
    assert found["plain"]["runs"] != found["exact"]["runs"], "tokenizers does it too now; the class may go"


def test_a_saved_tokenizer_is_the_same(elsewhere: Any) -> None:
    assert elsewhere[3]["saved"] is True
