"""Text to ids and back: exact for every text, and no text becomes a control token."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

import data_tools
from data_tools.train_tokenizer import train_tokenizer
from refusion_train.data import tokenizer as tokenizer_module
from refusion_train.data.tokenizer import META_FILE, MODEL_FILE, SPECIAL_PIECES, Tokenizer
from refusion_train.errors import DataError

CODE = Path(data_tools.__file__).parent
# Pieces of text that are easy to get wrong: special symbols, spaces of all kinds, SentencePiece's own symbols.
TRICKY = [
    *SPECIAL_PIECES.values(), "<0x41>", "<s", ">", "\u2581", "\u2581<s>", " ", "  ", "\n", "\r\n", "\t", "\0", "\u2047",
    "\ufffd", "\ufeff", "\u00a0", "\u3000", "\u2028", "\u0301", "e\u0301", "漢字", "🙂", "👩‍👩‍👧", "def f(x):\n    ",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=20))).map("".join)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    sample = 200_000 if request.param == "bpe" else 30_000
    inputs = [str(CODE / "*.py"), str(CODE.parent / "refusion_train" / "*.py")]
    train_tokenizer(inputs, str(folder), 600, request.param, sample_bytes=sample, progress=False)
    return Tokenizer.load(folder)


@settings(max_examples=100, deadline=None)
@given(texts)
@example("".join(TRICKY))
@example("\u2581" * 3)
def test_any_text_comes_back_and_holds_no_control_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, keep_special=True) == text
    assert set(ids).isdisjoint(tokenizer.special_ids.values())
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_special_ids_and_pieces(tokenizer: Tokenizer) -> None:
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert tokenizer.special_pieces == SPECIAL_PIECES
    assert tokenizer.vocab_size == 600
    assert tokenizer.info.special_ids == tokenizer.special_ids
    assert tokenizer.info.fingerprint == tokenizer.fingerprint != ""


def test_decode_drops_control_tokens_or_shows_them(tokenizer: Tokenizer) -> None:
    ids = [2, *tokenizer.encode(" a"), 4, *tokenizer.encode("b "), 3, 0]
    assert tokenizer.decode(ids) == " ab "
    assert tokenizer.decode(np.array(ids, np.uint16), keep_special=True) == "<s> a<mask>b </s><pad>"
    assert tokenizer.decode([]) == tokenizer.decode([], keep_special=True) == ""


@pytest.mark.parametrize("bad", [-1, 600])
def test_an_id_outside_the_vocabulary_is_an_error(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(DataError, match=f"token id {bad} is outside the tokenizer's vocabulary of 600"):
        tokenizer.decode([5, bad])


def test_half_a_surrogate_pair_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        tokenizer.encode("a\ud800b")


def test_batches_and_threads_change_nothing(tokenizer: Tokenizer) -> None:
    batch = ["", "a", "x\u2581y", " " * 50, "\n".join(TRICKY), *[f"word {i} <mask>" for i in range(50)]]
    single = [tokenizer.encode(text) for text in batch]
    for threads in (1, 3):
        encoded = tokenizer.encode_batch(batch, threads)
        assert [ids.tolist() for ids in encoded] == single
        assert all(ids.dtype == np.int32 for ids in encoded)
    assert tokenizer.encode_batch([]) == []


def test_long_texts_get_the_ids_of_the_whole_text(tokenizer: Tokenizer) -> None:
    whole = "".join(path.read_text(encoding="utf-8") for path in sorted(CODE.glob("*.py")))
    whole = whole.replace("\u2581", "") + " " * 5000 + "x" * 5000 + " end"
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.folder / MODEL_FILE))
    segments = tokenizer._cut(whole)
    assert "".join(segments) == whole
    assert (len(segments) > 10) == (tokenizer._segment == tokenizer_module._BPE_SEGMENT)
    assert tokenizer.encode(whole) == reference.encode(whole)


def test_a_vocabulary_with_pieces_across_spaces_is_not_cut(tmp_path: Path) -> None:
    text = "of the people by the people for the people of the"
    model = _train([text] * 20, split_by_whitespace=False, vocab_size=320)
    tokenizer = Tokenizer.create(tmp_path, model, "bpe")
    assert tokenizer._segment == tokenizer_module._LONGEST_SEGMENT


def test_text_without_a_space_is_cut_somewhere(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_LONGEST_SEGMENT", 1000)
    monkeypatch.setattr(tokenizer, "_segment", 100)
    text = "abc\n" * 2000 + " x y z " * 500
    assert max(map(len, tokenizer._cut(text))) <= 1000
    assert "".join(tokenizer._cut(text)) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_piece_shows_spaces_and_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.piece(4) == "<mask>"
    assert "".join(tokenizer.piece(i) for i in tokenizer.encode("return x")) == "return x"
    assert "<0x09>" in [tokenizer.piece(i) for i in tokenizer.encode("\t")]


def _train(sentences: list[str], **options: object) -> bytes:
    model = io.BytesIO()
    fixed = {"byte_fallback": True, "pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, "control_symbols": ["<mask>"]}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, model_type="bpe", minloglevel=2, **{**fixed, **options}
    )
    return model.getvalue()


def test_a_model_without_our_mask_piece_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no control piece <mask>"):
        Tokenizer.create(tmp_path, _train(["some text"] * 5, control_symbols=[], vocab_size=270), "bpe")
    # A piece of that name that text can reach is no better than none.
    with pytest.raises(DataError, match="no control piece <mask>"):
        Tokenizer.create(
            tmp_path,
            _train(["some text"] * 5, control_symbols=[], user_defined_symbols=["<mask>"], vocab_size=272),
            "bpe",
        )


@pytest.fixture
def copied(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer.folder, tmp_path / "tokenizer"))


def test_a_folder_that_is_no_tokenizer(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer in '.*nowhere': tokenizer.model is missing"):
        Tokenizer.load(tmp_path / "nowhere")
    (copied / MODEL_FILE).unlink()
    with pytest.raises(DataError, match=r"tokenizer.model is missing"):
        Tokenizer.load(copied)


def test_a_changed_model_is_noticed(copied: Path) -> None:
    model = bytearray((copied / MODEL_FILE).read_bytes())
    model[len(model) // 2] ^= 1
    (copied / MODEL_FILE).write_bytes(model)
    with pytest.raises(DataError, match=r"is not the file that refusion_tokenizer.json describes"):
        Tokenizer.load(copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "not of format refusion-tokenizer version 1"),
        ({"format": "x"}, "not of format"),
        ({"special_ids": {"pad": 0}}, "not of format"),
        ({"fingerprint": None}, "not of format"),
        ({"special_ids": 5}, "cannot be read"),
    ],
)
def test_a_wrong_description_is_an_error(copied: Path, change: dict[str, object], message: str) -> None:
    meta = json.loads((copied / META_FILE).read_bytes())
    (copied / META_FILE).write_text(json.dumps({**meta, **change}))
    with pytest.raises(DataError, match=message):
        Tokenizer.load(copied)


def test_a_description_that_is_no_json_is_an_error(copied: Path) -> None:
    (copied / META_FILE).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.load(copied)


def test_a_model_that_is_none_is_an_error(copied: Path) -> None:
    meta = json.loads((copied / META_FILE).read_bytes())
    (copied / MODEL_FILE).write_bytes(b"nonsense")
    meta["fingerprint"] = tokenizer_module.fingerprint_of(b"nonsense", meta["special_ids"])
    (copied / META_FILE).write_text(json.dumps(meta))
    with pytest.raises(DataError, match="is not a SentencePiece model"):
        Tokenizer.load(copied)
