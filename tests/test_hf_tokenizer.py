"""The tokenizers of other tools, written and read. Most of these tests compare with the packages
transformers and tokenizers themselves.
"""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from conftest import make_records, prepared, saved, train_tiny
from test_prepare import TEXTS, tiktoken_file

from hardware.disk import file_sha256
from text.dataset import load_tokenizer
from text.hf_tokenizer import find_tokenizer, to_hugging_face
from text.shapes import record_text
from text.tokenizer import (
    CL100K_PATTERN,
    GPT2_PATTERN,
    QWEN_PATTERN,
    SentencePiece,
    Tiktoken,
    open_tokenizer,
    same_ids,
)
from text.train_tokenizer import write_alphabet


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


def find(folder: Path, eos: str = ""):
    return find_tokenizer(str(folder), eos)


# -- ours, elsewhere and back --

ALPHABETS = {"char": "Citizen: a\n", "char with bytes": "".join(MIXED), "byte": ""}


@pytest.mark.parametrize("kind", ["sentencepiece", "gpt2", "cl100k", *ALPHABETS])
def test_auto_tokenizer_has_the_same_ids_and_what_it_saves(kind, tiny_data, tmp_path, transformers):
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
    auto.save_pretrained(tmp_path / "saved")
    saved = find(tmp_path / "saved")
    assert same_ids(saved, ours) and saved.prefix == ours.prefix
    assert auto.eos_token_id == auto.bos_token_id == ours.eos_id and len(auto) == ours.vocab_size
    assert auto.pad_token_id == (ours.unk_id if ours.unk_id >= 0 else ours.eos_id)
    for text in ["Citizen é😀é  a"] if kind == "char" else MIXED:
        ids = ours.encode(text)
        # sample.py begins a text with an eos, too.
        assert auto(text, split_special_tokens=True).input_ids == [ours.eos_id, *ids], text
        assert saved.encode(text) == ids
        assert ours.unk_id in ids if kind == "char" else auto.decode(ids) == text
        assert kind == "char" or b"".join(map(saved.token_bytes, ids)).decode() == text
    # Without the post-processor, the eos alone is gone.
    take_out_post_processor(folder)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert auto(text, split_special_tokens=True).input_ids == ids


def test_a_word_without_merges_is_exported_as_a_token(tmp_path, transformers):
    ranks = {bytes([b]): b for b in range(256)} | {b"abc": 256}
    ours = Tiktoken("x", GPT2_PATTERN, ranks, {"<|endoftext|>": 257})
    folder = write_files(tmp_path, to_hugging_face(ours, 128))
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert auto("abc abcd").input_ids == [257, *ours.encode("abc abcd")]
    assert 256 in ours.encode("abc")


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
    monkeypatch.setattr("text.tokenizer.SHORT_SLICE", 1)  # it ends at the first place where it may
    tokenizer = sentencepiece_model(tmp_path / "a.model", **{name: value})
    assert bool(to_hugging_face(tokenizer, 128)) == is_exported
    records = [record_text(r)[0] for r in make_records(20)]
    texts = [*MIXED, *records, "".join(MIXED + records), "a 中，b 。中\n\n 中 （", "", " ", "中，"]
    assert is_cut == any(len(tokenizer.parts(text)) > 1 for text in texts)
    for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
        assert ids.tolist() == tokenizer.sp.encode(text), text


def test_a_space_before_a_text_comes_once(tmp_path, monkeypatch):
    model = sentencepiece_model(tmp_path / "a.model", add_dummy_prefix=True)
    monkeypatch.setattr("text.tokenizer.SLICE", 1000)
    for text in ("the loop reads " * 400, "中文" * 2000, "▁▂▃", "a▁b", " ▁ ", "▁", ""):
        ids = model.encode(text)
        assert model.decode(ids) == text
        assert "▁" in text or ids == model.sp.encode(text)


# -- those of other tools, here --


def bpe(folder: Path, kind: str) -> Path:
    """Train a byte-level BPE with the package tokenizers; save it as models of this kind do."""
    pre, post = tokenizers.pre_tokenizers, tokenizers.processors
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = {"gpt2": [], "prefix": [], "smollm": [pre.Digits(individual_digits=True)]}
    split = pre.Split(tokenizers.Regex(QWEN_PATTERN), "isolated")
    options = dict(add_prefix_space=kind == "prefix", use_regex=kind in words)
    t.pre_tokenizer = pre.Sequence([*words.get(kind, [split]), pre.ByteLevel(**options)])
    if kind == "qwen":
        t.normalizer = tokenizers.normalizers.NFC()
    if kind in ("llama3", "bert"):
        single = "<|bos|> $A" + " <|endoftext|>" * (kind == "bert")
        special = [("<|bos|>", 1), ("<|endoftext|>", 0)]
        template = post.TemplateProcessing(single=single, special_tokens=special)
        t.post_processor = post.Sequence([post.ByteLevel(), template])
    if kind != "prefix":
        t.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|bos|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [json.dumps(r, ensure_ascii=False) for r in make_records(100)]
    t.train_from_iterator(texts + MIXED, trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    return write_files(folder, {"tokenizer.json": t.to_str(), "tokenizer_config.json": config})


def llama2(folder: Path) -> Path:
    """Save a BPE that puts a space before every text, as transformers saves one."""
    ours = sentencepiece_model(folder.parent / "a.model", add_dummy_prefix=False)
    files = to_hugging_face(ours, 128)
    steps = [{"type": "Prepend", "prepend": "▁"}, files["tokenizer.json"]["normalizer"]]
    files["tokenizer.json"]["normalizer"] = {"type": "Sequence", "normalizers": steps}
    return write_files(folder, files)


PUBLIC = ["gpt2", "smollm", "qwen", "llama2", "llama3", "bert", "prefix"]


@pytest.mark.parametrize("kind", PUBLIC)
def test_a_tokenizer_of_a_public_model_encodes_the_same_here(kind, tmp_path, transformers):
    folder = llama2(tmp_path / "m") if kind == "llama2" else bpe(tmp_path / "m", kind)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    ours = find(folder)
    prefix = {"llama2": [2], "llama3": [1], "bert": [1]}.get(kind, [])
    assert (ours.vocab_size, ours.prefix) == (len(auto), prefix)
    assert (ours.adds_space, ours.lacks) == (kind in ("llama2", "prefix"), b"")
    for text in [*MIXED, "the <|im_end|> of <|bos|>"]:
        ids = ours.encode(text)
        want = auto(text, split_special_tokens=True, add_special_tokens=False).input_ids
        assert ids == want and not set(ours.special.values()) & set(ids), text
        if not ours.adds_space and kind != "qwen":  # it normalizes
            assert b"".join(map(ours.token_bytes, ids)).decode() == ours.decode(ids) == text


def test_vocab_and_merges_alone_are_gpt2s_tokenizer(tmp_path):
    """They name no eos: that of GPT-2 is added."""
    folder = bpe(tmp_path / "m", "gpt2")
    model = read(folder / "tokenizer.json")["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    alone = write_files(tmp_path / "alone", {"vocab.json": model["vocab"]})
    (alone / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]), encoding="utf-8")
    ours, whole = find(alone), find(folder)
    assert ours.library.id_to_token(ours.eos_id) == "<|endoftext|>"
    assert all(ours.encode(t) == whole.encode(t) for t in MIXED[:50])


CUTS = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
PADS = {"strategy": {"Fixed": 999}, "direction": "Right", "pad_to_multiple_of": None}
PADS |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}


@pytest.mark.parametrize("name, value", [("truncation", CUTS), ("padding", PADS), ("dropout", 0.5)])
def test_settings_of_training_change_no_ids(name, value, tmp_path):
    folder = bpe(tmp_path / "m", "gpt2")
    want = [find(folder).encode(t) for t in MIXED]
    content = read(folder / "tokenizer.json")
    (content["model"] if name == "dropout" else content)[name] = value
    write_files(folder, {"tokenizer.json": content})
    assert [find(folder).encode(t) for t in MIXED] == want


LLAMA = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
ADDED = ["   ", "<think>", "</think>", "<think>x", "标点"]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen", "tokenizer.model"])
def test_added_tokens_are_found_whichever_file_names_them(kind, file, tmp_path, transformers):
    """Only special tokens cannot be written by a text."""
    is_model = kind == "tokenizer.model"
    if is_model:
        folder = write_files(tmp_path / "m", {"tokenizer_config.json": LLAMA})
        size = sentencepiece_model(folder / kind, add_dummy_prefix=True).vocab_size
    else:
        folder, size = bpe(tmp_path / "m", kind), 700
    texts = ADDED[is_model:]  # SentencePiece cannot add spaces alone
    names = [*texts, "<|im_start|>"] if is_model else texts
    flags = dict(lstrip=False, rstrip=False, single_word=False, normalized=False, special=False)
    added = {size + i: flags | {"content": name} for i, name in enumerate(names)}
    added[size + 1]["normalized"] = True
    content = read(folder / file) if (folder / file).exists() else {}
    if file == "added_tokens.json":
        content = {token["content"]: i for i, token in added.items()}
    elif file == "tokenizer_config.json":
        content |= {"added_tokens_decoder": added}
    elif is_model:
        return
    else:
        content["added_tokens"] += [token | {"id": i} for i, token in added.items()]
    write_files(folder, {file: content})
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    prepared(tmp_path, make_records(30), f"--tokenizer={folder}")
    for ours in (find(folder), load_tokenizer(tmp_path / "tiny")):
        assert ours.vocab_size == size + len(names) and ours.added.keys() == set(texts)
        both = [f"{text}{name}\n{text[:9]}" for text in MIXED[4:50] for name in texts]
        for text in [*both, "<think", "a    b", "<think>xy</think></think>", "的标点。"]:
            if is_model and text[:1] == " ":  # to which transformers adds none, but SentencePiece
                continue
            ids = ours.encode(text)
            assert auto(text, split_special_tokens=True, add_special_tokens=False).input_ids == ids
        assert ours.special_id("<|im_start|>") not in [-1, *ours.encode("<|im_start|>")]


SPECIAL = [  # the special tokens of a folder, the eos that a file names, --eos, the right one
    (["<pad>", "[EOS]", "[SEP]"], "", "", "[EOS]"),
    (["[CLS]", "[SEP]"], "", "", "[SEP]"),
    (["<|endoftext|>", "</s>"], "", "", None),
    (["<|endoftext|>", "</s>"], "", "</s>", "</s>"),
    # <|im_end|> ends a message of a document.
    (["<|endoftext|>", "<|im_end|>"], "<|im_end|>", "", "<|endoftext|>"),
    (["<s>", "</s>"], {"content": "<s>"}, "", "<s>"),
    ([], "", "", None),
    ([], "", "<end>", "<end>"),  # a new one
]


def model_of_words(folder: Path, words: list[str], special: list[str], **model) -> Path:
    """Save a tokenizer.json with this vocabulary, of which some are special tokens."""
    vocab = {word: i for i, word in enumerate(words + special)}
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    added = [flags | {"id": vocab[name], "content": name, "special": True} for name in special]
    content = {"model": {"vocab": vocab} | model, "added_tokens": added}
    return write_files(folder, {"tokenizer.json": content | {"decoder": {"type": "Fuse"}}})


@pytest.mark.parametrize("special, named, option, right", SPECIAL)
def test_eos_is_named_by_a_file_or_an_option_or_its_name(
    special, named, option, right, tmp_path, capsys, refuses
):
    model = dict(type="WordLevel", unk_token="?")
    folder = model_of_words(tmp_path / "m", ["?", "a"], special, **model)
    write_files(folder, {"special_tokens_map.json": {"eos_token": named} if named else {}})
    options = [f"--tokenizer={folder}", *([f"--eos={option}"] if option else [])]
    if right is None:
        assert "--eos" in refuses(lambda: prepared(tmp_path, [{"text": "a"}] * 30, *options))
        return
    prepared(tmp_path, [{"text": "a"}] * 30, *options)
    assert bool(named or option) != ("no file names the eos" in capsys.readouterr().err)
    for ours in (find(folder, option), load_tokenizer(tmp_path / "tiny")):
        assert ours.library.id_to_token(ours.eos_id) == right and ours.encode("a") == [1]


CANNOT = ["byte", "bytes alone", "strips spaces", "adds a space", "eos ends a message"]


@pytest.mark.parametrize("kind", CANNOT)
def test_a_tokenizer_that_cannot_write_conversations_is_refused(kind, tmp_path, refuses):
    named = tmp_path / "a.model"
    if kind == "byte":
        named = kind
    elif kind == "bytes alone":
        tiktoken_file(named)
    elif kind == "strips spaces":
        named = bpe(tmp_path / "m", "gpt2")
        content = read(named / "tokenizer.json")
        content["added_tokens"][2]["rstrip"] = True
        write_files(named, {"tokenizer.json": content})
    elif kind == "eos ends a message":
        named = bpe(tmp_path / "m", "gpt2")
        (named / "tokenizer_config.json").unlink()  # it names another eos
    else:
        names = ["<|im_start|>", "<|im_end|>"]
        sentencepiece_model(named, add_dummy_prefix=True, control_symbols=names)
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    options = [f"--tokenizer={named}", "--vocab_size=4096"]  # which is the default
    options += ["--eos=<|im_end|>"] * (kind == "eos ends a message")
    error = refuses(lambda: prepared(tmp_path, [{"messages": asked}] * 5, *options))
    assert f"--tokenizer={named}: " in error and "--tokenizer=train" in error


def test_names_of_own_special_tokens_stay_text_and_are_counted(tmp_path):
    folder = bpe(tmp_path / "m", "gpt2")
    content = read(folder / "tokenizer.json")
    token = content["added_tokens"][0] | {"id": 700, "content": "<repo_name>"}
    content["added_tokens"] += [token, token | {"id": 701, "content": ""}]
    vocab = content["model"]["vocab"]
    vocab["\x00"] = vocab.pop("ą")  # of the byte 5: `tokenizers` leaves it out
    write_files(folder, {"tokenizer.json": content})
    texts = ["a<repo_name>b", "a\x05b", "plain"] * 10
    data = prepared(tmp_path, [{"text": text} for text in texts], f"--tokenizer={folder}")
    records = read(data / "meta.json")["records"]
    assert records["names"] == {"<repo_name>": 10}
    assert list(records["changed"].values()) == [10] and records["bad"] == {}
    ours = find(folder)
    assert ours.special["<repo_name>"] == 700 and 700 not in ours.encode("a<repo_name>b")


def test_two_tokenizers_of_a_folder_that_disagree_are_noted(tmp_path, capsys):
    folder = llama2(tmp_path / "m")
    ours = sentencepiece_model(folder / "tokenizer.model", add_dummy_prefix=True)
    assert find(folder).encode("a b") == ours.encode("a b")
    assert not capsys.readouterr().err
    sentencepiece_model(folder / "tokenizer.model")
    assert find(folder).encode("a b") == ours.encode("a b")
    assert "tokenizer.model" in capsys.readouterr().err


def test_a_file_is_known_by_its_content(tmp_path, monkeypatch, capsys):
    (tmp_path / "v").mkdir()
    tiktoken = tiktoken_file(tmp_path / "v" / "tokenizer.model", 2000)
    model = sentencepiece_model(tmp_path / "tokenizer.model.v3")
    assert same_ids(find(tmp_path / "tokenizer.model.v3"), model) and not capsys.readouterr().err
    known = {file_sha256(tiktoken)[:12]: GPT2_PATTERN}
    for hashes, pattern in (({}, CL100K_PATTERN), (known, GPT2_PATTERN)):
        monkeypatch.setattr("text.tokenizer.PATTERNS", hashes)
        for path in (tiktoken, tiktoken.parent):  # in a folder, too
            found = find(path)
            assert (found.pattern, found.vocab_size) == (pattern, 2257)
        assert bool(capsys.readouterr().err) == (not hashes)


def test_a_data_set_that_tiktoken_encoded_opens_with_the_same_ids(tmp_path):
    """Until 0.9, prepare.py stored the tokenizer of a Hugging Face folder for tiktoken."""
    folder = bpe(tmp_path / "m", "qwen")
    data = prepared(tmp_path, make_records(30), f"--tokenizer={folder}")
    new = load_tokenizer(data)
    info = read(data / "meta.json")["tokenizer"] | {"kind": "tiktoken", "name": "hf"}
    opened = open_tokenizer(data / "tokenizer.tiktoken", info)
    assert same_ids(opened, new) and opened.prefix == new.prefix
    assert all(opened.encode(t) == new.encode(t) for t in MIXED)


def test_a_text_that_becomes_a_special_token_is_bad_with_its_characters(tmp_path, refuses):
    """A model of words may have the name of a special token as a word."""
    model = dict(type="WordLevel", unk_token="?")
    folder = model_of_words(tmp_path / "m", ["?", "a"], ["</s>"], **model)
    texts = [{"text": "a"}] * 9 + [{"text": "</s>"}]
    options = [f"--tokenizer={folder}", "--max_bad=0.2"]
    data = prepared(tmp_path, texts, *options)
    assert [*read(data / "meta.json")["records"]["bad"].values()] == [1]
    texts[-1]["note"] = "some longer text"
    assert "max_bad" in refuses(lambda: prepared(tmp_path, texts, *options, "--allow_unread"))


def test_a_tokenizer_that_drops_characters_is_counted_or_refused(tmp_path, refuses):
    """A BPE without bytes and unk leaves out what it has no token for."""
    folder = model_of_words(tmp_path / "m", ["a", "b"], ["</s>"], type="BPE", merges=[])
    options = [f"--tokenizer={folder}", "--val_fraction=0.5"]
    data = prepared(tmp_path, [{"text": text} for text in ("ab", "a的b", "的", "b")], *options)
    records = read(data / "meta.json")["records"]
    assert [*records["changed"].values()] == [1] and [*records["dropped"].values()] == [1]
    assert records["checked"] == 3
    with_none = [{"text": "的"}] * 4
    assert "fewer than 1 token" in refuses(lambda: prepared(tmp_path, with_none, *options))
