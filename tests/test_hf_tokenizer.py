"""The tokenizers of other tools, written and read. Most of these tests compare with the packages
transformers and tokenizers themselves.
"""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from conftest import call, forge, make_records, train_tiny, write_jsonl
from test_prepare import TEXTS, contents, tiktoken_file

import prepare
import sample
import train
from configurator import UserError
from text.dataset import load_tokenizer
from text.hf_tokenizer import from_hugging_face, to_hugging_face
from text.records import record_text
from text.tokenizer import (
    CL100K_PATTERN,
    GPT2_PATTERN,
    SentencePiece,
    Tiktoken,
    same_ids,
    up_to_edge,
)
from training.runs import newest_checkpoint

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers", reason="needs the package transformers")
    module.logging.set_verbosity_error()
    return module


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def checkpoint(data: Path, out: Path, *options: str) -> Path:
    """Train TINY; return its last checkpoint."""
    return newest_checkpoint(train_tiny(data, out, *options) / "ckpt")


def prepared(data: Path, name: str, tokenizer: Path | str, *options: str) -> None:
    """Make a data set of 100 records with this tokenizer."""
    corpus = write_jsonl(data / "c.jsonl", make_records(100))
    options = [f"--name={name}", f"--tokenizer={tokenizer}", "--val_fraction=0.3", *options]
    call(prepare.main, "--input", corpus, f"--data_dir={data}", *options)


def test_a_meta_json_cannot_name_a_tokenizer_elsewhere(tiny_data, tmp_path, refuses):
    folder = tmp_path / "ckpt"
    shutil.copytree(checkpoint(tiny_data, tmp_path), folder)
    meta = read(folder / "meta.json")
    damaged = "meta.json: its tokenizer entry is damaged"
    for changes, message in [
        ({"file": "../../tiny/tokenizer.model"}, "which is not in this folder: not read"),
        ({"file": 7}, "which is not in this folder: not read"),
        ({"kind": "bert"}, f"{damaged} (ValueError: unknown tokenizer kind 'bert')"),
        ({"kind": "tiktoken"}, f"{damaged} (KeyError"),
        ({"prefix": [400]}, f"{damaged} (ValueError: the prefix [400] is not a list of ids"),
        ({"prefix": 5}, "the prefix 5 is not a list of ids"),
        ({"prefix": ["a"]}, "the prefix ['a'] is not a list of ids"),
        ({"file": ".."}, "which is not in this folder: not read"),
    ]:
        changed = meta | {"tokenizer": meta["tokenizer"] | changes}
        forge(folder, "meta.json", json.dumps(changed).encode())
        assert message in refuses(sample.main, f"--ckpt={folder}", "--device=cpu")


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


@pytest.mark.parametrize("kind", ["sentencepiece", "gpt2", "cl100k"])
def test_auto_tokenizer_encodes_to_the_same_ids(kind, tiny_data, tmp_path, transformers):
    if kind == "sentencepiece":
        ours = load_tokenizer(tiny_data / "tiny")
    else:
        pattern = GPT2_PATTERN if kind == "gpt2" else CL100K_PATTERN
        ours = Tiktoken.from_file(tiktoken_file(tmp_path / "v.tiktoken", 2000), pattern)
    folder = write_files(tmp_path / "hf", to_hugging_face(ours, 128))
    found = transformers.AutoTokenizer.from_pretrained(folder)
    assert found.eos_token_id == found.bos_token_id == ours.eos_id and len(found) == ours.vocab_size
    for text in MIXED:
        want = ours.encode(text).tolist()
        alone = found(text, add_special_tokens=False, split_special_tokens=True).input_ids
        with_eos = found(text, split_special_tokens=True).input_ids
        assert alone == want, text
        assert with_eos == [ours.eos_id, *want]  # sample.py begins a text like this
        assert found.decode(want) == text


def sentencepiece_model(path: Path, **options) -> SentencePiece:
    """Train a SentencePiece with these options, by default one such as prepare.py trains."""
    import sentencepiece

    usual = dict(model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False)
    usual |= dict(normalization_rule_name="identity", add_dummy_prefix=False)
    usual |= dict(vocab_size=400, hard_vocab_limit=False, minloglevel=2)
    records = json.dumps(make_records(50), ensure_ascii=False).replace("型 ", "型，")
    texts = records.split("}, ")
    with open(path, "wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=f, **usual | options
        )
    return SentencePiece(path)


def test_a_sentencepiece_of_another_kind_is_not_exported_as_what_it_is_not(tmp_path):
    assert to_hugging_face(sentencepiece_model(tmp_path / "usual.model"), 128)
    for name, value in {
        "add_dummy_prefix": True,
        "model_type": "unigram",
        "normalization_rule_name": "nfkc",
        "user_defined_symbols": ["<think>"],
        "byte_fallback": False,
    }.items():
        tokenizer = sentencepiece_model(tmp_path / f"{name}.model", **{name: value})
        assert to_hugging_face(tokenizer, 128) == {}, name


def test_slices_of_a_text_give_the_ids_of_the_whole_text(tmp_path, monkeypatch):
    monkeypatch.setattr("text.tokenizer.SLICE", 1)  # a slice ends at the first place where it may
    monkeypatch.setattr("text.tokenizer.SLICES", up_to_edge(1))
    records = [record_text(r)[0] for r in make_records(20)]
    texts = [*MIXED, *records, "".join(MIXED + records), "a 中，b 。中\n\n 中 （", "", " ", "中，"]
    for name, value, is_cut in [
        ("model_type", "bpe", True),
        ("vocab_size", 600, True),
        ("add_dummy_prefix", True, False),  # each slice would begin with a space of its own
        ("split_by_whitespace", False, False),  # tokens reach from one word into the next
        ("split_by_unicode_script", False, False),  # and from a character to a mark
        ("normalization_rule_name", "nfkc", False),
        ("model_type", "unigram", False),  # adds scores up over the whole text
        ("byte_fallback", False, False),  # makes one unk of several characters
    ]:
        tokenizer = sentencepiece_model(tmp_path / "a.model", **{name: value})
        assert tokenizer.may_cut == is_cut, name
        assert is_cut == any(len(tokenizer.slices(text)) > 1 for text in texts), name
        for text, found in zip(texts, tokenizer.encode_all(texts), strict=True):
            assert found.tolist() == tokenizer.sp.encode(text), (name, text)


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
        qwen = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        qwen += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        split = pre.Split(tokenizers.Regex(qwen), "isolated")
        t.pre_tokenizer = pre.Sequence([split, byte_level(add_prefix_space=False, use_regex=False)])
    if kind == "qwen":
        t.normalizer = tokenizers.normalizers.NFC()
    if kind == "llama3":
        template = post.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
        t.post_processor = post.Sequence([post.ByteLevel(), template])
    t.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|bos|>", "<|im_end|>"],
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


def first_form(folder: Path, heading: str = "#version: 0.2\n") -> dict[str, str | dict]:
    """Return the vocab.json and the merges.txt that say the same as a folder's tokenizer.json."""
    model = read(folder / "tokenizer.json")["model"]
    merges = "".join(" ".join(m) + "\n" for m in model["merges"])
    return {"vocab.json": model["vocab"], "merges.txt": heading + merges}


def test_gpt2s_first_form_is_read(tmp_path):
    """It has vocab.json and merges.txt, but no tokenizer.json."""
    one = from_hugging_face(bpe(tmp_path / "m", "gpt2"))
    files = first_form(tmp_path / "m") | {"config.json": {"eos_token_id": 0}}
    two = from_hugging_face(write_files(tmp_path / "old", files))
    assert two.eos_id == 0 and all((one.encode(text) == two.encode(text)).all() for text in MIXED)


def test_words_that_are_tokens_need_no_merges_where_the_file_says_so(tmp_path, transformers):
    """Llama 3 sets ignore_merges. Without it, a token that no merge produces never appears."""
    folder = bpe(tmp_path / "m", "gpt2")
    content = read(folder / "tokenizer.json")
    content["model"]["merges"] = [m for m in content["model"]["merges"] if "".join(m) != "Ġtokens"]
    for ignore in (True, False):
        content["model"]["ignore_merges"] = ignore
        (folder / "tokenizer.json").write_text(json.dumps(content))
        ours = from_hugging_face(folder).encode("the tokens").tolist()
        found = transformers.AutoTokenizer.from_pretrained(folder)
        assert ours == found("the tokens").input_ids
        assert (content["model"]["vocab"]["Ġtokens"] in ours) is ignore


def test_the_eos_may_be_named_in_any_of_the_files(tmp_path):
    folder = bpe(tmp_path / "m", "gpt2")
    (folder / "tokenizer_config.json").unlink()
    for eos_id, name, content in (
        (2, "config.json", {"eos_token_id": [2, 0]}),
        (1, "special_tokens_map.json", {"eos_token": "<|bos|>"}),
        (0, "tokenizer_config.json", {"eos_token": {"content": "<|endoftext|>"}}),
    ):
        write_files(folder, {name: content})
        assert from_hugging_face(folder).eos_id == eos_id


EOS = {"id": 0, "content": "<|endoftext|>", "special": True}


PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


APPENDING = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {}}, {"SpecialToken": {"id": "x"}}],
}


LETTERS_ONLY = [
    {"type": "Split", "pattern": {"Regex": r"\\p{L}+"}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
]


STRANGE = {  # message -> (key, value) in tokenizer.json
    "a model other than a byte-level BPE, without a tokenizer.model beside it: "
    '{"type": "Unigram"} is not supported': ("model", {"type": "Unigram", "vocab": []}),
    'normalizer {"type": "Lowercase"} is not supported': ("normalizer", {"type": "Lowercase"}),
    'pre_tokenizer {"type": "ByteLevel", "add_prefix_space": true': ("pre_tokenizer", PREFIXED),
    "it puts tokens after every text": ("post_processor", APPENDING),
    "post_processor RobertaProcessing is not supported": (
        "post_processor", {"type": "RobertaProcessing"}),
    "its pattern leaves out parts of a text": (
        "pre_tokenizer", {"type": "Sequence", "pretokenizers": LETTERS_ONLY}),
    "the added token '   ' would cut ordinary text": (
        "added_tokens", [EOS, {"id": 700, "content": "   "}]),
    "its merges are not in the order of their ids": ("merges", None),
    '{"type": "BPE", "dropout": 0.1} is not supported': ("dropout", 0.1),
}  # fmt: skip


@pytest.mark.parametrize("message", STRANGE)
def test_a_tokenizer_of_another_kind_is_refused_by_name(message, tmp_path, refuses):
    folder = bpe(tmp_path / "m", "gpt2")
    key, value = STRANGE[message]
    content = read(folder / "tokenizer.json")
    if key == "merges":
        content["model"][key].reverse()
    elif key in content["model"]:
        content["model"][key] = value
    else:
        content[key] = value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    corpus = write_jsonl(tmp_path / "c.jsonl", make_records(5))
    options = ["--input", corpus, f"--tokenizer={folder}", f"--data_dir={tmp_path / 'data'}"]
    assert message in refuses(prepare.main, *options)


def test_a_damaged_tokenizer_ends_a_fine_tuning_before_it_begins(tiny_data, tmp_path, refuses):
    folder = tmp_path / "ckpt"
    shutil.copytree(checkpoint(tiny_data, tmp_path), folder)
    (folder / "tokenizer.model").write_bytes(b"?")
    options = [f"--init_from={folder}", "--run_name=tuned"]
    said = refuses(lambda: train_tiny(tiny_data, tmp_path, *options))
    assert "tokenizer.model" in said and "manifest.json" in said
    (folder / "manifest.json").unlink()  # a folder that another program wrote has none
    said = refuses(lambda: train_tiny(tiny_data, tmp_path, *options))
    assert "tokenizer.model: missing, or not the tokenizer" in said


def test_one_vocabulary_with_two_rules_is_two_tokenizers(tmp_path, refuses):
    """Qwen3 and its base model differ only in their eos. Others differ in how they split a text."""
    folder = bpe(tmp_path / "m", "gpt2")
    for name, eos in (("a", "<|endoftext|>"), ("b", "<|im_end|>")):
        write_files(folder, {"tokenizer_config.json": {"eos_token": eos}})
        prepared(tmp_path, name, folder)
    said = refuses(lambda: train_tiny(tmp_path, tmp_path, "--dataset=a,b"))
    assert "b was made with another tokenizer than a" in said


def test_a_folder_of_tokenizer_files_is_not_replaced_by_a_data_set(tmp_path, refuses):
    folder = bpe(tmp_path / "data" / "mine", "gpt2")
    before = contents(folder)
    corpus = write_jsonl(tmp_path / "c.jsonl", make_records(50))
    options = ["--name=mine", f"--data_dir={tmp_path / 'data'}"]
    said = refuses(prepare.main, "--input", corpus, *options)
    assert "exists and is no data set" in said
    assert contents(folder) == before


def test_a_checkpoint_has_the_tokenizer_of_its_start_whatever_becomes_of_the_data_set(
    tiny_data, tmp_path, monkeypatch
):
    shutil.copytree(tiny_data / "tiny", tmp_path / "data" / "tiny")
    model = tmp_path / "data" / "tiny" / "tokenizer.model"
    original = model.read_bytes()

    def damage(*args, **kwargs) -> float:
        model.write_bytes(b"?")
        return 1.0

    with monkeypatch.context() as damaged:
        damaged.setattr(train, "evaluate", damage)
        folder = checkpoint(tmp_path / "data", tmp_path)
    assert (folder / "tokenizer.model").read_bytes() == original
    call(sample.main, f"--ckpt={folder}", "--max_new_tokens=3", "--device=cpu")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("added_tokens.json", {"   ": 699}, "the added token '   ' would cut ordinary text"),
        ("added_tokens.json", {"<x>": 7}, "two tokens have the id 7"),
        ("added_tokens.json", {"<x>": -5}, "the id -5 of the token '<x>' is not a number"),
        ("tokenizer_config.json", {"eos_token": "<|none|>"}, "its tokenizer names no eos token"),
        ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space is not supported"),
    ],
)
def test_no_file_of_a_tokenizer_is_ignored(name, content, message, tmp_path):
    folder = write_files(bpe(tmp_path / "m", "gpt2"), {name: content})
    with pytest.raises(UserError, match=message):
        from_hugging_face(folder)


def test_a_sentencepiece_folder_with_another_eos_is_refused(tiny_data, tmp_path):
    shutil.copy(tiny_data / "tiny" / "tokenizer.model", tmp_path)
    assert from_hugging_face(tmp_path).prefix == [1]  # a text of Llama begins with <s>
    files = {"added_tokens.json": {"<|im_end|>": 400}}
    files["special_tokens_map.json"] = {"eos_token": "<|im_end|>"}
    write_files(tmp_path, files)
    message = "its eos '<|im_end|>' is not the eos of its tokenizer.model"
    with pytest.raises(UserError, match=re.escape(message)):
        from_hugging_face(tmp_path)


def test_one_name_of_the_eos_with_two_ids_is_two_tokenizers(tmp_path, refuses):
    folder = bpe(tmp_path / "m", "gpt2")
    prepared(tmp_path, "a", folder)
    content = read(folder / "tokenizer.json")
    content["added_tokens"][0]["id"] = 700
    content["model"]["vocab"].pop("<|endoftext|>", None)
    write_files(folder, {"tokenizer.json": content})
    prepared(tmp_path, "b", folder)
    said = refuses(lambda: train_tiny(tmp_path, tmp_path, "--dataset=a,b"))
    assert "b was made with another tokenizer than a" in said


def test_a_name_of_tiktoken_takes_nothing_from_a_folder_of_that_name(tmp_path, monkeypatch):
    own = Tiktoken.from_file(tiktoken_file(tmp_path / "v.tiktoken"))
    monkeypatch.setattr(Tiktoken, "by_name", lambda name: own)
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "gpt2", {"tokenizer.json": {"mine": 1}})
    prepared(tmp_path, "x", "gpt2")
    assert not (tmp_path / "x" / "tokenizer.json").exists()


def test_a_chat_template_is_kept_where_tokenizer_json_is_made(tmp_path):
    files = first_form(bpe(tmp_path / "m", "gpt2"), heading="")
    files["tokenizer_config.json"] = {"chat_template": "MINE"}
    prepared(tmp_path, "tiny", write_files(tmp_path / "old", files))
    config = read(checkpoint(tmp_path, tmp_path) / "tokenizer_config.json")
    assert config["chat_template"] == "MINE" and config["eos_token"] == "<|endoftext|>"
