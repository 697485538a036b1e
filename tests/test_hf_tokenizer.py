"""The tokenizers of other tools, written and read. Most of these tests compare with the packages
transformers and tokenizers themselves.
"""

import json
import random
from pathlib import Path

import pytest
from conftest import make_records, prepared, saved, train_tiny
from test_prepare import TEXTS, tiktoken_file

from configurator import UserError
from text.dataset import load_tokenizer
from text.encode import Encoder
from text.hf_tokenizer import from_hugging_face, ranks_of, to_hugging_face
from text.settings import PrepareConfig
from text.shapes import record_text
from text.tokenizer import CL100K_PATTERN, GPT2_PATTERN, SentencePiece, Tiktoken, same_ids
from text.train_tokenizer import write_alphabet

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def checkpoint(data: Path, out: Path, *options: str) -> Path:
    """Train TINY; return its last checkpoint."""
    return saved(train_tiny(data, out, *options))


LETTERS = "aab b  \n\t'sS我的是一，。😀\u0301é0123 .()_=\u3000\u00a0"
MIXED = [
    *TEXTS,
    "Hello 世界 😀 naïve café\n\n    def f(x):\n\t\treturn x   **  2  # 注释\r\n"
    "1234567 3.14 中文，标点。 I'LL don't",
    "4 ½ months, ² ١٢  7",
    "      \n\n \t \u3000全角\x00\u200d👩‍👩‍👧‍👦 \ud7ff ﷽   ",
    *("".join(random.Random(i).choices(LETTERS, k=60)) for i in range(300)),
]


def write_files(folder: Path, files: dict[str, str | dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def take_out_post_processor(folder: Path) -> None:
    """Remove the post-processor from tokenizer.json, as docs/interchange.md describes."""
    content = read(folder / "tokenizer.json") | {"post_processor": None}
    write_files(folder, {"tokenizer.json": content})


ALPHABETS = {"char": "Citizen: a\n", "char with bytes": "".join(MIXED), "byte": ""}


@pytest.mark.parametrize("kind", ["sentencepiece", "gpt2", "cl100k", *ALPHABETS])
def test_auto_tokenizer_encodes_to_the_same_ids(kind, tiny_data, tmp_path, transformers):
    if kind == "sentencepiece":
        ours = load_tokenizer(tiny_data / "tiny")
    elif kind in ALPHABETS:
        write_alphabet(tmp_path / "a.model", set(ALPHABETS[kind]), with_bytes=kind != "char")
        ours = SentencePiece(tmp_path / "a.model")
    else:
        pattern = GPT2_PATTERN if kind == "gpt2" else CL100K_PATTERN
        ours = Tiktoken.from_file(tiktoken_file(tmp_path / "v.tiktoken", 2000), pattern)
    folder = write_files(tmp_path / "hf", to_hugging_face(ours, 128))
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert auto.eos_token_id == auto.bos_token_id == ours.eos_id and len(auto) == ours.vocab_size
    for text in ["Citizen é😀é  a"] if kind == "char" else MIXED:
        ids = ours.encode(text).tolist()
        # sample.py begins a text with an eos, too.
        assert auto(text, split_special_tokens=True).input_ids == [ours.eos_id, *ids], text
        assert ours.unk_id in ids if kind == "char" else auto.decode(ids) == text
    if kind in ALPHABETS:
        ours.save(folder)
        assert same_ids(from_hugging_face(folder), ours)
    # Without the post-processor, the eos alone is gone; the settings still say that it comes first.
    take_out_post_processor(folder)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert auto(text, split_special_tokens=True).input_ids == ids
    config = read(folder / "tokenizer_config.json")
    assert config["add_bos_token"] is True and config["add_prefix_space"] is False


def sentencepiece_model(path: Path, **options) -> SentencePiece:
    """Train a SentencePiece with these options, by default one such as prepare.py trains."""
    import sentencepiece

    usual = dict(model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False)
    usual |= dict(normalization_rule_name="identity", add_dummy_prefix=False)
    usual |= dict(vocab_size=400, hard_vocab_limit=False, minloglevel=2)
    records = json.dumps(make_records(50), ensure_ascii=False).replace("型 ", "型，")
    with open(path, "wb") as f:
        usual |= dict(sentence_iterator=iter(records.split("}, ")), model_writer=f)
        sentencepiece.SentencePieceTrainer.train(**usual | options)
    return SentencePiece(path)


KINDS = [
    ("model_type", "bpe", True, True),
    ("vocab_size", 600, True, True),
    ("split_by_whitespace", False, True, False),  # tokens reach from one word into the next
    ("split_by_unicode_script", False, True, False),  # and from a character to punctuation
    ("add_dummy_prefix", True, False, False),  # each slice would begin with a space of its own
    ("normalization_rule_name", "nfkc", False, False),
    ("model_type", "unigram", False, False),  # adds scores up over the whole text
    ("byte_fallback", False, False, False),  # makes one unk of several characters
    ("user_defined_symbols", ["<think>"], False, False),
]


@pytest.mark.parametrize("name, value, is_exported, is_cut", KINDS)
def test_sentencepiece_export_and_slices_only_where_exact(
    tmp_path, monkeypatch, name, value, is_exported, is_cut
):
    """Slices of a text give the ids of the whole text."""
    monkeypatch.setattr("text.tokenizer.SLICE", 1)  # a slice ends at the first place where it may
    tokenizer = sentencepiece_model(tmp_path / "a.model", **{name: value})
    assert bool(to_hugging_face(tokenizer, 128)) == is_exported
    records = [record_text(r)[0] for r in make_records(20)]
    texts = [*MIXED, *records, "".join(MIXED + records), "a 中，b 。中\n\n 中 （", "", " ", "中，"]
    assert is_cut == any(len(tokenizer.slices(text)) > 1 for text in texts)
    for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
        assert ids.tolist() == tokenizer.sp.encode(text), text


def bpe(folder: Path, kind: str) -> Path:
    """Train a byte-level BPE with the package tokenizers; save it as models of this kind do."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    pre = tokenizers.pre_tokenizers
    post = tokenizers.processors
    byte_level = pre.ByteLevel
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    if kind == "gpt2":
        t.pre_tokenizer = byte_level(add_prefix_space=False)
    elif kind == "smollm":
        digits = pre.Digits(individual_digits=True)
        t.pre_tokenizer = pre.Sequence([digits, byte_level(add_prefix_space=False)])
    else:
        split = pre.Split(tokenizers.Regex(QWEN2_PATTERN), "isolated")
        t.pre_tokenizer = pre.Sequence([split, byte_level(add_prefix_space=False, use_regex=False)])
    if kind == "qwen":
        t.normalizer = tokenizers.normalizers.NFC()
    if kind == "llama3":
        template = post.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
        t.post_processor = post.Sequence([post.ByteLevel(), template])
    t.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|bos|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    texts = [json.dumps(r, ensure_ascii=False) for r in make_records(100)]
    t.train_from_iterator(texts + MIXED, trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    write_files(folder, {"tokenizer.json": t.to_str(), "tokenizer_config.json": json.dumps(config)})
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "qwen", "llama3"])
def test_a_tokenizer_of_a_public_model_encodes_the_same_here(kind, tmp_path, transformers):
    folder = bpe(tmp_path / "m", kind)
    found = transformers.AutoTokenizer.from_pretrained(folder)
    ours = from_hugging_face(folder)
    assert (ours.vocab_size, ours.eos_id, ours.prefix) == (700, 0, [1] if kind == "llama3" else [])
    for text in MIXED:
        want = [*ours.prefix, *ours.encode(text).tolist()]
        assert found(text, split_special_tokens=True).input_ids == want, text
    again = from_hugging_face(write_files(tmp_path / "again", to_hugging_face(ours, 128)))
    assert same_ids(again, ours) and again.prefix == ours.prefix
    assert all((again.encode(text) == ours.encode(text)).all() for text in MIXED)


ADDED = ["<think>", "</think>", "<tool_call>", "<think>x", "   ", "标点", "<|im_end|>"]


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama3"])
def test_added_tokens_are_found_as_their_file_says(kind, tmp_path, transformers):
    """Only the special tokens of a conversation cannot be written by a text."""
    folder = bpe(tmp_path / "m", kind)
    content = read(folder / "tokenizer.json")
    added = [{"id": 700 + i, "content": name} for i, name in enumerate(ADDED[:-1])]
    added += [t for t in content["added_tokens"] if t["content"] not in ADDED]
    special = [t | {"special": False} for t in content["added_tokens"] if t["content"] in ADDED]
    flags = dict(lstrip=False, rstrip=False, single_word=False, normalized=False, special=False)
    content["added_tokens"] = [flags | token for token in added + special]
    write_files(folder, {"tokenizer.json": content})
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    ours = from_hugging_face(folder)
    texts = [f"{text}{name}\n{text[:9]}" for text in MIXED for name in ADDED[:-1]]
    for text in [*texts, "<think", "a    b", "<think>xy</think></think>", "的标点。"]:
        ids = ours.encode(text).tolist()
        assert auto(text, split_special_tokens=True).input_ids == [*ours.prefix, *ids], text
        assert b"".join(map(ours.token_bytes, ids)).decode() == ours.normalized(text)
    assert ours.special_id("<|im_end|>") not in ours.encode("<|im_end|>")
    again = from_hugging_face(write_files(tmp_path / "again", to_hugging_face(ours, 128)))
    assert (
        same_ids(again, ours) and again.encode(texts[0]).tolist() == ours.encode(texts[0]).tolist()
    )


def test_ignore_merges_decides_if_a_word_needs_merges(tmp_path, transformers):
    """Llama 3 sets ignore_merges. Without it, a token that no merge produces never appears."""
    folder = bpe(tmp_path / "m", "gpt2")
    content = read(folder / "tokenizer.json")
    model = content["model"]
    model["vocab"]["zqzqzq"] = 700
    for ignore in (True, False):
        model["ignore_merges"] = ignore
        write_files(folder, {"tokenizer.json": content})
        ours = from_hugging_face(folder).encode("zqzqzq").tolist()
        auto = transformers.AutoTokenizer.from_pretrained(folder)
        assert ours == auto("zqzqzq").input_ids
        assert (700 in ours) is ignore


def test_merges_that_tiktoken_would_not_make_are_refused():
    """One that was extended by the merges of another has such."""
    vocab = {token: i for i, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    assert ranks_of(vocab, {"merges": ["a b", "b c", "ab c"]})[b"abc"] == 5
    with pytest.raises(ValueError, match="other merges"):
        ranks_of(vocab, {"merges": ["a b", "b c", "a bc"]})


def test_a_word_without_merges_is_exported_as_a_token(tmp_path, transformers):
    ranks = {bytes([b]): b for b in range(256)} | {b"abc": 256}
    ours = Tiktoken("x", GPT2_PATTERN, ranks, {"<|endoftext|>": 257})
    folder = write_files(tmp_path, to_hugging_face(ours, 128))
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert auto("abc abcd").input_ids == [257, *ours.encode("abc abcd").tolist()]
    assert 256 in ours.encode("abc")


def test_eos_comes_from_either_config_file_or_the_default(tmp_path):
    folder = bpe(tmp_path / "m", "gpt2")
    (folder / "tokenizer_config.json").unlink()
    assert from_hugging_face(folder).eos_id == 0
    for eos_id, name, eos in (
        (1, "special_tokens_map.json", "<|bos|>"),
        (0, "tokenizer_config.json", {"content": "<|im_end|>"}),  # ends a message, no document
        (3, "tokenizer_config.json", "<|im_start|>"),
    ):
        write_files(folder, {name: {"eos_token": eos}})
        assert from_hugging_face(folder).eos_id == eos_id


PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
OUTSIDE = {"single": [{"SpecialToken": {"id": "x"}}, {"Sequence": {}}]}
OUTSIDE |= {"type": "TemplateProcessing", "special_tokens": {"x": {"ids": [10**6]}}}
APPENDED = [{"Sequence": {}}, {"SpecialToken": {"id": "x"}}]
NO_FORMAT = r"[\p{L}\p{M}]+|\p{N}|[\p{P}\p{S}]+|[\s\p{Cc}]+"  # leaves out a soft hyphen


def split_at(regex: str) -> dict:
    """Return the pre_tokenizer of a byte-level BPE that cuts texts into words by a pattern."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


STRANGE = {  # a part of the message -> (file, key, value)
    "byte-level BPE": ("tokenizer.json", "model", {"type": "Unigram", "vocab": []}),
    "normalizer Lowercase": ("tokenizer.json", "normalizer", {"type": "Lowercase"}),
    "pre_tokenizer": ("tokenizer.json", "pre_tokenizer", PREFIXED),
    "after every text": (
        "tokenizer.json", "post_processor", {"type": "TemplateProcessing", "single": APPENDED}),
    "not ids of this tokenizer": ("tokenizer.json", "post_processor", OUTSIDE),
    "post_processor Roberta": ("tokenizer.json", "post_processor", {"type": "RobertaProcessing"}),
    "its pattern": ("tokenizer.json", "pre_tokenizer", split_at(r"\\p{L}+")),
    "pre_tokenizer .*W": ("tokenizer.json", "pre_tokenizer", split_at(r"\w+|\W+")),
    "leaves out parts": ("tokenizer.json", "pre_tokenizer", split_at(NO_FORMAT)),
    "lstrip": ("tokenizer.json", "added_tokens", [{"id": 700, "content": "<x>", "lstrip": True}]),
    "not distinct": ("tokenizer.json", "added_tokens", [{"id": 7, "content": "<x>"}]),
    "cannot be used": ("model", "vocab", 7),
    "its merges": ("model", "merges", [["a", "b"], ["t", "h"], ["Ġ", "t"]]),
    "dropout": ("model", "dropout", 0.1),
    "no eos token": ("tokenizer_config.json", "eos_token", "<|none|>"),
    "add_prefix_space": ("tokenizer_config.json", "add_prefix_space", True),
}  # fmt: skip


@pytest.mark.parametrize("message", STRANGE)
def test_a_tokenizer_of_another_kind_is_refused_by_name(message, tmp_path):
    folder = bpe(tmp_path / "m", "gpt2")
    name, key, value = STRANGE[message]
    path = folder / ("tokenizer.json" if name == "model" else name)
    content = read(path)
    (content["model"] if name == "model" else content)[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        from_hugging_face(folder)


# -- the way of a tokenizer: data set, checkpoint, fine-tuning --


def test_one_vocabulary_with_two_rules_is_two_tokenizers(tmp_path, refuses):
    folder = bpe(tmp_path / "m", "gpt2")
    prepared(tmp_path, make_records(100), "--name=a", f"--tokenizer={folder}")
    write_files(folder, {"tokenizer_config.json": {"eos_token": "<|bos|>"}})
    prepared(tmp_path, make_records(100), "--name=b", f"--tokenizer={folder}")
    error = refuses(lambda: train_tiny(tmp_path, tmp_path, "--dataset=a,b"))
    assert "b was made with another tokenizer than a" in error


NOT_DONE = {  # a part of the message -> (file, its content)
    "add_prefix_space": ("tokenizer_config.json", {"add_prefix_space": False}),
    "add_eos_token": ("tokenizer_config.json", {"add_eos_token": True}),
    "the eos of": ("special_tokens_map.json", {"eos_token": "<|im_end|>"}),
    "other ids": ("tokenizer.json", {"model": {"vocab": {"<0x41>": 5}}}),
    "<x>": ("tokenizer.json", {"model": {}, "added_tokens": [{"id": 5000, "content": "<x>"}]}),
}


@pytest.mark.parametrize("message", NOT_DONE)
def test_unsupported_sentencepiece_settings_are_refused(message, tmp_path):
    sentencepiece_model(tmp_path / "tokenizer.model", add_dummy_prefix=True)
    ours = from_hugging_face(tmp_path)
    assert ours.adds_space and ours.prefix == [1]  # a text of Llama begins with <s>
    name, content = NOT_DONE[message]
    write_files(tmp_path, {name: content})
    with pytest.raises(UserError, match=message):
        from_hugging_face(tmp_path)


def test_an_added_space_comes_once_and_in_no_conversation(tmp_path, refuses):
    options = dict(add_dummy_prefix=True, control_symbols=["<|im_start|>", "<|im_end|>"])
    model = sentencepiece_model(tmp_path / "a.model", **options)
    text = "the loop reads " * 140_000
    info = model.save(tmp_path) | dict(vocab_size=model.vocab_size, eos_id=model.eos_id)
    encoder = Encoder(PrepareConfig(), tmp_path / "a.model", info)
    assert encoder.encode(text).tolist() == model.sp.encode(text)
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": asked}] * 5
    named = f"--tokenizer={tmp_path}/a.model"
    assert "space" in refuses(lambda: prepared(tmp_path, records, named))
