"""Training tokenizers: options, determinism, sampling of large corpora, and errors that say what to change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import data_tools
from data_tools import train_tokenizer as module
from data_tools.train_tokenizer import chunks_of, train_tokenizer
from refusion_train.data.tokenizer import META_FILE, MODEL_FILE, Tokenizer
from refusion_train.errors import ConfigError, DataError

CODE = Path(data_tools.__file__).parent
INPUTS = [str(CODE / "*.py")]


def train(tmp_path: Path, *inputs: str, vocab_size: int = 400, **options: object) -> module.TokenizerReport:
    return train_tokenizer(inputs or INPUTS, str(tmp_path / "out"), vocab_size, progress=False, **options)  # type: ignore[arg-type]


def test_report_and_folder(tmp_path: Path) -> None:
    report = train(tmp_path)
    assert report.documents == len(list(CODE.glob("*.py")))
    assert report.text_bytes == report.sampled_bytes == sum(path.stat().st_size for path in CODE.glob("*.py"))
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == sorted([META_FILE, MODEL_FILE])
    loaded = Tokenizer.load(tmp_path / "out")
    assert loaded.fingerprint == report.tokenizer.fingerprint
    assert report.tokenizer.folder == tmp_path / "out"
    assert loaded.vocab_size == 400
    assert f"400 pieces from {report.documents} documents" in report.summary()
    newline, digit = loaded.encode("\n"), loaded.encode("12")
    assert len(newline) == 1 and loaded.piece(newline[0]) == "\n"
    assert len(digit) == 2


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_same_corpus_gives_the_same_tokenizer_in_any_process(tmp_path: Path, model_type: str) -> None:
    program = (
        "import sys; from data_tools.train_tokenizer import train_tokenizer as train\n"
        "report = train([sys.argv[1]], sys.argv[2], 400, sys.argv[3], sample_bytes=20000, progress=False)\n"
        "print(report.tokenizer.fingerprint)\n"
        "assert 'torch' not in sys.modules"
    )
    here = train(tmp_path, model_type=model_type, sample_bytes=20000)
    run = subprocess.run(
        [sys.executable, "-c", program, INPUTS[0], str(tmp_path / "there"), model_type],
        capture_output=True, text=True, cwd=CODE.parent, env={**os.environ, "PYTHONHASHSEED": "5"}, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == here.tokenizer.fingerprint
    assert json.loads((tmp_path / "out" / META_FILE).read_bytes())["model_type"] == model_type


def test_a_large_corpus_is_sampled_evenly(tmp_path: Path) -> None:
    sample = module._Sample(100_000)
    for number in range(20_000):
        sample.add(f"{number:100d}")
        assert sample._bytes <= 130_000
    numbers = [int(chunk) for chunk in sample.chunks()]
    assert numbers == sorted(numbers) and 900 <= len(numbers) <= 1000
    assert all(150 <= sum(n // 4000 == part for n in numbers) <= 250 for part in range(5))
    report = train(tmp_path, sample_bytes=20_000)
    assert 10_000 < report.sampled_bytes <= 20_000 < report.text_bytes
    assert "of them used" in report.summary()


def test_a_small_limit_keeps_one_chunk() -> None:
    sample = module._Sample(1)
    for word in ("first", "second", "third"):
        sample.add(word)
    assert len(sample.chunks()) == 1 and sample.cut


def test_chunks_are_the_text() -> None:
    text = "".join(f"line {i}\n" for i in range(2000)) + "x y " * 3000 + "z" * 9000
    chunks = list(chunks_of(text))
    assert "".join(chunks) == text
    assert all(1 <= len(chunk) <= 4000 for chunk in chunks)
    assert chunks[1].startswith("\nline") and chunks[-4].startswith((" x", " y"))
    assert list(chunks_of("")) == [] and list(chunks_of("a\n")) == ["a\n"]


def test_literal_special_symbols_in_the_corpus_stay_text(tmp_path: Path) -> None:
    corpus = tmp_path / "a.txt"
    corpus.write_text("<s> <mask> </s> <0x41> <pad><mask><mask>\n" * 500 + "some other words\n" * 100)
    tokenizer = train(tmp_path, str(corpus), vocab_size=290).tokenizer
    for text in ("<mask>", "<s>", "<0x41>", "<pad><unk></s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert min(tokenizer.encode(text)) > 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 100_000}, r"--vocab-size 100000 is too large for this corpus; use at most \d+"),
        ({"vocab_size": 261}, "--vocab-size 261 must be more than the 261"),
        ({"vocab_size": 270}, r"--vocab-size 270 has no room for the characters of this corpus; use more than \d+"),
        ({"model_type": "word"}, "model_type=word is not one of bpe, unigram"),
        ({"sample_bytes": 0}, "sample_bytes=0 must be at least 1"),
    ],
)
def test_wrong_options_say_what_to_change(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        train(tmp_path, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"no text in the corpus of 1 files \(0 broken lines\)"),
        (b"\n\n", "holds nothing that a tokenizer can be trained on"),
        (b"\xff", r"no text in the corpus of 1 files \(1 broken lines\); first broken line: .*a.txt:1: byte 0xff"),
    ],
)
def test_a_corpus_without_text(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        train(tmp_path, str(tmp_path / "a.txt"))


def test_broken_lines_are_counted_or_fatal(tmp_path: Path) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_text('{"text": "' + "some words " * 50 + '"}\n{"text"\n')
    report = train(tmp_path, str(corpus), vocab_size=280)
    assert (report.documents, report.broken) == (1, 1)
    assert "1 broken lines were skipped:" in report.summary() and "a.jsonl:2: not valid JSON" in report.summary()
    with pytest.raises(DataError, match=r"a.jsonl:2: not valid JSON.*; leave out --strict"):
        train(tmp_path, str(corpus), vocab_size=280, strict=True, overwrite=True)
    assert Tokenizer.load(tmp_path / "out").fingerprint == report.tokenizer.fingerprint


def test_an_existing_tokenizer_is_only_replaced_on_request(tmp_path: Path) -> None:
    first = train(tmp_path)
    with pytest.raises(DataError, match=r"exists already; choose another folder, or replace it with --overwrite"):
        train(tmp_path, vocab_size=500)
    assert Tokenizer.load(tmp_path / "out").fingerprint == first.tokenizer.fingerprint
    assert train(tmp_path, vocab_size=500, overwrite=True).tokenizer.vocab_size == 500
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="holds other things"):
        train(tmp_path, overwrite=True)
    assert Tokenizer.load(tmp_path / "out").vocab_size == 500
