"""Shards with tokenizers of others: exact ids, a mask token, chats, pairs; choosing documents; parts; statistics."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from data_tools import encode
from data_tools.build_shards import build_shards, part_of
from data_tools.documents import find_files
from data_tools.inspect import verify
from data_tools.merge import merge
from data_tools.stats import plot, show_stats, stats
from refusion_train.data.hf_tokenizer import FastEncoder, HuggingFaceTokenizer
from refusion_train.data.shards import ShardSet
from refusion_train.data.tokenizer import Tokenizer
from refusion_train.errors import ConfigError, DataError

PATTERN = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = [
    "the cat",
    "sees ",
    "<|endoftext|>",
    "<|im_start|>",
    "<think>",
    "é",
    "e\u0301",
    "🙂",
    "\n\n",
    "  ",
    "don't",
    "12",
]


def make_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{i} " + "".join(rng.choices(WORDS, k=rng.randint(1, 60))) for i in range(count)]


TEXTS = make_texts(300, 0)


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE with special and other added tokens, as Qwen has them, without a mask token."""
    library = Library(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    library.add_tokens([AddedToken("<think>", normalized=False)])
    folder = tmp_path_factory.mktemp("hf")
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": {"content": "<|endoftext|>"},
              "chat_template": TEMPLATE}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def library_of(folder: Path) -> Library:
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    return library


def write_lines(path: Path, records: list[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def documents_of(folder: Path) -> list[tuple[list[int], int]]:
    dataset = ShardSet.open(folder)
    found = []
    for i in range(dataset.blocks):
        block = dataset.block(i)
        ends = zip(block.offsets[:-1], block.offsets[1:], block.prompts.tolist(), strict=True)
        found += [(block.tokens[start:end].tolist(), prompt) for start, end, prompt in ends]
    return found


# ------------------------------------------------------------------------------------------------------ tokenizers


def test_a_mask_token_is_added_and_recorded(hf_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(hf_folder)
    size = library_of(hf_folder).get_vocab_size(with_added_tokens=True)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert (tokenizer.mask_id, tokenizer.vocab_size, tokenizer.added) == (size, size + 1, ["mask"])
    assert tokenizer.bos_id is None and tokenizer.pad_id == tokenizer.eos_id
    tokenizer.save(tmp_path / "copy")
    again = Tokenizer.load(tmp_path / "copy")
    assert again.info == tokenizer.info and again.meta == tokenizer.meta and again.chat_template == TEMPLATE
    assert Library.from_str(tokenizer.to_json()).token_to_id("<|mask|>") == size  # type: ignore[attr-defined]
    # A folder that has a mask token keeps it.
    config = json.loads((hf_folder / "tokenizer_config.json").read_text())
    (tmp_path / "copy" / "refusion_tokenizer.json").unlink()
    (tmp_path / "copy" / "tokenizer_config.json").write_text(json.dumps({**config, "mask_token": "<|im_end|>"}))
    own = Tokenizer.load(tmp_path / "copy")
    assert own.added == [] and own.special_pieces["mask"] == "<|im_end|>" and own.fingerprint != tokenizer.fingerprint
    # But not one that text can become.
    (tmp_path / "copy" / "tokenizer_config.json").write_text(json.dumps({**config, "mask_token": "<think>"}))
    assert Tokenizer.load(tmp_path / "copy").added == ["mask"]
    (tmp_path / "copy" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"names no end token; set eos_token in tokenizer_config.json"):
        Tokenizer.load(tmp_path / "copy")


def test_ids_are_the_librarys_and_special_tokens_stay_text(hf_folder: Path) -> None:
    tokenizer, library = Tokenizer.load(hf_folder), library_of(hf_folder)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    special = set(tokenizer.control_tokens.values()) | {tokenizer.mask_id}
    texts = [*TEXTS, "", "<|mask|>", "<|im_end|><|endoftext|>", "a" * 5000, "\0"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
        assert special.isdisjoint(ids.tolist())
        assert tokenizer.decode(ids) == library.normalizer.normalize_str(text)  # type: ignore[union-attr]
    flat, lengths = FastEncoder(tokenizer).encode_flat(texts)
    reference, reference_lengths = tokenizer.encode_flat(texts)
    np.testing.assert_array_equal(flat, reference)
    np.testing.assert_array_equal(lengths, reference_lengths)
    assert tokenizer.decode([tokenizer.mask_id, *tokenizer.encode("x"), tokenizer.pad_id], keep_special=True) == (
        "<|mask|>x<|endoftext|>"
    )
    assert tokenizer.decode([tokenizer.mask_id, *tokenizer.encode("x"), tokenizer.pad_id]) == "x"


def test_a_sentencepiece_model_of_others(tmp_path: Path) -> None:
    import sentencepiece

    prefix = str(tmp_path / "tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=prefix, model_type="bpe", vocab_size=400, byte_fallback=True,
        minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.vocab").unlink()
    library = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.mask_id, tokenizer.vocab_size) == (400, 401)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    texts = [*TEXTS, "  two  spaces ", "\u2581 <s> </s> <|mask|>", "x" * 9000 + " y"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == library.encode(text)
    assert tokenizer.decode([1, *library.encode("the cat"), 400, 2], keep_special=True).replace(" ", "") == (
        "<s>thecat<|mask|></s>"
    )
    tokenizer.save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").info == tokenizer.info


# ---------------------------------------------------------------------------------------------------------- shards

WEBDATASET = """
import json, sys
import webdataset
found = []
for url in sys.argv[1:]:
    for sample in webdataset.WebDataset(url, shardshuffle=False, empty_check=False).decode():
        start = 0
        for length in sample["lengths.npy"].tolist():
            found.append(sample["tokens.npy"][start : start + length].tolist())
            start += length
assert "refusion_train" not in sys.modules and "data_tools" not in sys.modules
print(json.dumps(found))
"""


def test_webdataset_alone_reads_every_document_back(hf_folder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    tars: list[str] = []
    for encoder, library_name in (("reference", "tokenizers"), ("fast", "fastokens")):
        out = tmp_path / encoder
        report = build_shards(
            [str(tmp_path / "a.jsonl")], str(hf_folder), str(out), shard_bytes=20_000, block_tokens=2000,
            encoder=encoder, progress=False,  # type: ignore[arg-type]
        )  # fmt: skip
        assert ShardSet.open(out / "train").index.build["encoder"].startswith(f"{library_name} ")
        assert report.checked == (len(TEXTS) if encoder == "fast" else 0)
        assert "the tokenizer had no mask token; <|mask|> was added as id" in report.summary()
        tars += [str(path) for path in sorted((out / "train").glob("*.tar"))]
    assert len(tars) >= 4
    result = subprocess.run([sys.executable, "-c", WEBDATASET, *tars], capture_output=True, check=True, cwd=tmp_path)
    library = library_of(hf_folder)
    documents = json.loads(result.stdout)
    assert documents[: len(TEXTS)] == documents[len(TEXTS) :]
    assert [library.decode(ids[:-1], skip_special_tokens=False) for ids in documents[: len(TEXTS)]] == [
        library.normalizer.normalize_str(text)  # type: ignore[union-attr]
        for text in TEXTS
    ]
    assert {ids[-1] for ids in documents} == {library.token_to_id("<|endoftext|>")}


def test_a_difference_between_the_encoders_stops_the_build(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FastEncoder.encode_flat

    def wrong(self: FastEncoder, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = real(self, texts)
        tokens = tokens.copy()
        tokens[lengths[:7].sum()] += 1
        return tokens, lengths

    monkeypatch.setattr(FastEncoder, "encode_flat", wrong)
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    words = ([str(tmp_path / "a.jsonl")], str(hf_folder), str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"a.jsonl:8: fastokens .* gives other ids .*; use --encoder reference"):
        build_shards(*words, progress=False)
    build_shards(*words, progress=False, encoder="reference")


def test_encoders_that_are_not_there(hf_folder: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"encoder=fast is for tokenizer.json only"):
        encode.choose_fast(Tokenizer.load(tiny_tokenizer), "fast")
    monkeypatch.setattr(encode, "fast_is_installed", lambda: False)
    assert encode.choose_fast(Tokenizer.load(hf_folder), "auto") is None
    with pytest.raises(ConfigError, match="needs fastokens; pip install"):
        encode.choose_fast(Tokenizer.load(hf_folder), "fast")


def test_pairs_and_chats_record_their_prompts(hf_folder: Path, tmp_path: Path) -> None:
    tokenizer, library = Tokenizer.load(hf_folder), library_of(hf_folder)
    write_lines(tmp_path / "pairs.jsonl", [{"q": f"ask {t}", "a": t} for t in TEXTS[:20]] + [{"q": "x", "a": ""}])
    report = build_shards(
        [str(tmp_path / "pairs.jsonl")], str(hf_folder), str(tmp_path / "pairs"), prompt_field="q", response_field="a",
        progress=False,
    )  # fmt: skip
    assert report.empty == 1
    for text, (ids, prompt) in zip(TEXTS, documents_of(tmp_path / "pairs" / "train"), strict=False):
        assert ids[:prompt] == tokenizer.encode(f"ask {text}") and ids[prompt:-1] == tokenizer.encode(text)
    said = ["hi", "<|im_end|> is text", "third", "last <|im_start|>"]
    chats = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    write_lines(tmp_path / "chats.jsonl", [{"m": chats}, {"m": chats[:3]}, {"m": "no"}, {"m": chats[:2]}])
    report = build_shards(
        [str(tmp_path / "chats.jsonl")], str(hf_folder), str(tmp_path / "chats"), messages_field="m", progress=False
    )
    assert report.broken == 2 and "the last message is not of the role assistant" in report.examples[0].reason
    start, end = library.token_to_id("<|im_start|>"), library.token_to_id("<|im_end|>")
    (ids, prompt), (short, _) = documents_of(tmp_path / "chats" / "train")
    assert ids.count(start) == 4 and ids.count(end) == 4 and short.count(start) == 2  # what was said made none
    assert ids[prompt - 1 - len(tokenizer.encode("assistant\n")) + 1 : prompt] == tokenizer.encode("assistant\n")
    assert ids[prompt:] == [*tokenizer.encode("last <|im_start|>"), end, *tokenizer.encode("\n")]
    with pytest.raises(ConfigError, match="has no chat template; give one by --chat-template"):
        tokenizer.chat_template = None
        encode.chat_of(encode.Recipe("", encode.Fields(messages="m")), tokenizer)


def test_choosing_documents(tiny_tokenizer: Path, tmp_path: Path) -> None:
    texts = [f"{'the cat ' * (i % 9)}{i % 90}" for i in range(400)]
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    words = ([str(tmp_path / "a.jsonl")], str(tiny_tokenizer))
    tokenizer = Tokenizer.load(tiny_tokenizer)

    def build(name: str, **options: object) -> list[str]:
        build_shards(*words, str(tmp_path / name), progress=False, block_tokens=300, **options)  # type: ignore[arg-type]
        return [tokenizer.decode(ids) for ids, _ in documents_of(tmp_path / name / "train")]

    plain, first = build("plain"), list(dict.fromkeys(texts))
    assert plain == texts and len(first) < 400
    assert build("dedup", dedup=True) == first
    mixed = build("mixed", shuffle=1)
    assert mixed != texts and sorted(mixed) == sorted(texts)
    assert build("again", shuffle=1, workers=1) == mixed and build("other", shuffle=2) != mixed
    assert sorted(build("both", shuffle=1, dedup=True)) == sorted(first)
    near = np.mean([abs(mixed.index(a) - mixed.index(b)) for a, b in itertools.pairwise(first)])
    assert near > 20  # neighbours do not stay together
    sizes = {text: len(tokenizer.encode(text)) + 2 for text in texts}
    some = build("some", min_tokens=8, max_tokens=20)
    assert some == [text for text in texts if 8 <= sizes[text] <= 20] and 0 < len(some) < 400
    report = build_shards(*words, str(tmp_path / "r"), progress=False, min_tokens=8, max_tokens=20, dedup=True)
    assert report.too_short == sum(sizes[text] < 8 for text in texts)
    assert report.too_long == sum(sizes[text] > 20 for text in texts)
    assert report.duplicates == len(some) - len(set(some))
    assert f"{report.too_short} too short" in report.summary() and f"{report.duplicates} duplicates" in report.summary()
    with pytest.raises(ConfigError, match="max_tokens=3 must be at least 1 and not less than min_tokens=8"):
        build("wrong", min_tokens=8, max_tokens=3)


# ------------------------------------------------------------------------------------------------- parts and looking


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(7):
        write_lines(folder / f"{i}.jsonl", [{"text": text} for text in make_texts(20 + 10 * i, i)])
    return folder


def test_parts_are_all_files_once_and_of_like_size(corpus: Path) -> None:
    files = find_files([str(corpus)])
    parts = [part_of(files, f"{i}/3")[0] for i in (1, 2, 3)]
    assert sorted(file.path for part in parts for file in part) == [file.path for file in files]
    sizes = [sum(file.bytes for file in part) for part in parts]
    assert max(sizes) < 1.4 * min(sizes)
    assert part_of(files, None) == (files, "")
    for wrong, message in (("0/3", "is not i/n"), ("4/3", "is not i/n"), ("x", "is not i/n"), ("1/8", "use fewer")):
        with pytest.raises(ConfigError, match=message):
            part_of(files, wrong)


def test_merged_parts_are_the_whole(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    options = {"val_fraction": 0.1, "block_tokens": 500, "shard_bytes": 10_000, "progress": False}
    words = ([str(corpus)], str(tiny_tokenizer))
    build_shards(*words, str(tmp_path / "whole"), **options)  # type: ignore[arg-type]
    for i in (2, 1, 3):
        build_shards(*words, str(tmp_path / f"part{i}"), part=f"{i}/3", **options)  # type: ignore[arg-type]
    parts = [str(tmp_path / f"part{i}") for i in (3, 1, 2)]
    report = merge(parts, str(tmp_path / "merged"))
    assert report.parts == 3 and "of 3 parts" in report.summary()
    for name in ("train", "validation"):
        merged, whole = documents_of(tmp_path / "merged" / name), documents_of(tmp_path / "whole" / name)
        assert sorted(merged) == sorted(whole)
        expected = [document for i in (1, 2, 3) for document in documents_of(tmp_path / f"part{i}" / name)]
        assert merged == expected
        index = ShardSet.open(tmp_path / "merged" / name).index
        assert sum(source["documents"] for source in index.sources) == index.documents
        for shard in index.shards:
            assert os.stat(tmp_path / "merged" / name / shard.name).st_nlink == 2  # linked, not rewritten
    assert len(verify(str(tmp_path / "merged"), progress=False)) == 2
    with pytest.raises(DataError, match=r"part 2/3 of 3 is missing; build it or name its folder"):
        merge(parts[:2], str(tmp_path / "two"))
    with pytest.raises(DataError, match=r"are both part 1/3; name each part once"):
        merge([parts[1], str(shutil.copytree(parts[1], tmp_path / "copy"))], str(tmp_path / "twice"))
    with pytest.raises(DataError, match=r"is not a part of the same build as"):
        merge([*parts, str(tmp_path / "whole")], str(tmp_path / "mixed"))
    assert not list(tmp_path.glob("two*")) and not list(tmp_path.glob("twice*"))


def test_datasets_that_were_no_parts_are_merged_in_the_order_given(tiny_tokenizer: Path, tmp_path: Path) -> None:
    for name, texts in (("a", TEXTS[:10]), ("b", TEXTS[10:20])):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
        build_shards([str(tmp_path / f"{name}.jsonl")], str(tiny_tokenizer), str(tmp_path / name), progress=False)
    merge([str(tmp_path / "b"), str(tmp_path / "a" / "train")], str(tmp_path / "both"))
    tokenizer = Tokenizer.load(tiny_tokenizer)
    assert [tokenizer.decode(ids) for ids, _ in documents_of(tmp_path / "both" / "train")] == TEXTS[10:20] + TEXTS[:10]


def test_statistics_are_those_of_the_documents(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    from rich.console import Console

    write_lines(tmp_path / "long.jsonl", [{"text": "the cat " * 5000}])
    inputs = [str(corpus), str(tmp_path / "long.jsonl")]
    build_shards(inputs, str(tiny_tokenizer), str(tmp_path / "out"), block_tokens=800, progress=False)
    (found,) = stats(str(tmp_path / "out"), progress=False)
    lengths = np.array([len(ids) for ids, _ in documents_of(tmp_path / "out" / "train")])
    assert (found.documents, found.tokens, found.longest) == (len(lengths), lengths.sum(), lengths.max())
    for share, value in found.quantiles.items():
        exact = np.quantile(lengths, float(share.rstrip("%")) / 100, method="inverted_cdf")
        assert abs(value - exact) <= 0.01 * exact
    for first, last, documents, tokens in found.histogram:
        here = lengths[(lengths >= first) & (lengths <= last)]
        assert (len(here), here.sum()) == (documents, tokens)
    assert sum(row[2] for row in found.histogram) == found.documents
    assert [(source["name"], source["documents"]) for source in found.sources] == [
        (inputs[0], found.documents - 1), (inputs[1], 1)
    ]  # fmt: skip
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show_stats([found], console)
    text = console.export_text()
    assert f"{found.documents:,} documents" in text and "long.jsonl" in text and "sentencepiece" in text
    plot([found], str(tmp_path / "lengths.png"))
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"must end in .png"):
        plot([found], str(tmp_path / "lengths.gif"))
