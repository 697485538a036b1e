"""Tokenizers as Hugging Face writes them: out for AutoTokenizer and llama.cpp, and in from a model folder."""

import json
import re
import unicodedata
from pathlib import Path

from configurator import UserError
from text.tokenizer import GPT2_PATTERN, SentencePiece, Tiktoken

# ---------------------------------------------------------------------------------------------------------------------
# Out: tokenizer.json, which AutoTokenizer opens

# In tokenizer.json a byte is one printable character: itself where it is printable in Latin-1, else one from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
UNPRINTABLE = [b for b in range(256) if b not in PRINTABLE]
BYTE_TO_CHAR = {b: chr(b) for b in PRINTABLE} | {b: chr(0x100 + i) for i, b in enumerate(UNPRINTABLE)}
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


def as_characters(token: bytes) -> str:
    return "".join(BYTE_TO_CHAR[b] for b in token)


def all_merges(tokens: dict[str, int]) -> list[str]:
    """Every pair of tokens that is a token together, by its id: both libraries merge whatever neighbours make a token."""
    pairs = []
    for token in sorted(tokens, key=tokens.get):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs += [f"{a} {b}" for a, b in halves if a in tokens and b in tokens]
    return pairs


def to_hugging_face(
    tokenizer: SentencePiece | Tiktoken, block_size: int, came_with: dict | None = None
) -> dict[str, dict]:
    """File name -> content of tokenizer.json and tokenizer_config.json: for AutoTokenizer, pipelines and llama.cpp.

    The same ids, but for a text that has U+2581 or the name of a special token in it. The prefix is called bos there, and
    stands before every text unless add_special_tokens=False. {} for a SentencePiece of another kind than prepare.py trains.
    came_with: an earlier tokenizer_config.json, of which the rest is kept, a chat template say.
    """
    described = describe_sentencepiece if tokenizer.kind == "sentencepiece" else describe_tiktoken
    if (parts := described(tokenizer)) is None:
        return {}
    special, model, steps = parts
    names = {i: name for name, i in special.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": i, "content": names[i]} | flags for i in sorted(names)]
    bos = names.get(tokenizer.prefix[0]) if tokenizer.prefix else None
    before = [{"SpecialToken": {"id": bos, "type_id": 0}}] if bos else []
    one = [*before, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {bos: {"id": bos, "ids": tokenizer.prefix, "tokens": [bos]}} if bos else {}
    template = {"type": "TemplateProcessing", "single": one, "pair": [*one, {"Sequence": {"id": "B", "type_id": 1}}]}
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    content |= {
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": template | {"special_tokens": known},
    } | steps
    content |= {"model": {"type": "BPE", "dropout": None} | model}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size, "bos_token": bos}
    config |= {"eos_token": names[tokenizer.eos_id], "unk_token": model["unk_token"], "add_bos_token": bool(bos)}
    config |= {"add_prefix_space": False, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": content, "tokenizer_config.json": (came_with or {}) | config}


def llama_cpp_note(
    tokenizer: SentencePiece | Tiktoken,
    hf_class: str | None,
    vocab_size: int,
) -> str:
    """What llama.cpp has to be told of a checkpoint to read texts as we do; empty where nothing.

    hf_class, vocab_size: as in config.json. llama.cpp's convert_hf_to_gguf.py chooses by the class
    from which file it takes the vocabulary, and whether it says that no space goes before a text.
    It knows a BPE by a hash of the ids of one text. In public models no eos is among these; ours
    begin with it. (conversion/base.py, llama.py, qwen.py and gpt2.py there.)
    """
    if hf_class is None:
        return ""
    needs = []
    if tokenizer.kind == Tiktoken.kind:
        if tokenizer.prefix == [tokenizer.eos_id]:
            needs.append("a tokenizer.json without its post_processor")
    elif hf_class == "GPT2LMHeadModel":
        return "llama.cpp's converter refuses a GPT-2 with SentencePiece"
    elif hf_class == "Qwen3ForCausalLM" and tokenizer.sp.normalize("a") == "a":
        needs.append("--override-kv tokenizer.ggml.add_space_prefix=bool:false")
    if hf_class == "LlamaForCausalLM" and vocab_size == 49152 and tokenizer.prefix:  # as Granite's
        needs.append("--override-kv tokenizer.ggml.add_bos_token=bool:true")
    if hf_class == "LlamaForCausalLM" and vocab_size == 32016:  # as CodeLlama's, which has an eot
        needs.append(f"--override-kv tokenizer.ggml.eot_token_id=int:{tokenizer.eos_id}")
    return f"llama.cpp needs {' and '.join(needs)}" if needs else ""


def describe_sentencepiece(tokenizer: SentencePiece) -> tuple[dict, dict, dict] | None:
    """(special tokens, model, steps before and after it) of tokenizer.json; None where they would not compute the same:
    unless it is a BPE with pieces for all bytes, and takes a text as it is.
    """
    sp = tokenizer.sp
    kinds = [(sp.is_control(i), sp.is_unknown(i), sp.is_byte(i)) for i in range(sp.vocab_size())]
    scores = [sp.get_score(i) for i, kind in enumerate(kinds) if not any(kind)]
    in_order = scores == [-i for i in range(len(scores))]  # a BPE's scores are the order of its merges
    if not in_order or sp.normalize("  a １ ") != "▁▁a▁１▁" or sum(is_byte for *_, is_byte in kinds) < 256:
        return None
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    special = {sp.id_to_piece(i): i for i, (control, unknown, _) in enumerate(kinds) if control or unknown}
    merges = all_merges({piece: i for piece, i in vocab.items() if not any(kinds[i])})
    model = {"unk_token": sp.id_to_piece(sp.unk_id()), "fuse_unk": True, "byte_fallback": True}
    marked = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    unmarked = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [unmarked, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return special, model | {"vocab": vocab, "merges": merges}, {"normalizer": marked, "decoder": decoder}


def describe_tiktoken(tokenizer: Tiktoken) -> tuple[dict, dict, dict]:
    """The same of a byte-level BPE."""
    special = tokenizer.encoding._special_tokens
    tokens = {as_characters(token): rank for token, rank in tokenizer.encoding._mergeable_ranks.items()}
    model = {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"vocab": tokens | special, "merges": all_merges(tokens)}
    # Its engine takes {1,3}+ for a repetition of {1,3}; nothing follows it, so that possessive or not is the same.
    pattern = re.sub(r"(\{[\d,]+\})\+", r"\1", tokenizer.pattern)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "decoder": byte_level}
    return special, model, steps | ({"normalizer": {"type": tokenizer.normalize}} if tokenizer.normalize else {})


# ---------------------------------------------------------------------------------------------------------------------
# In: the tokenizer of a Hugging Face model directory

# What belongs to such a tokenizer; prepare.py and the checkpoints take all of it along.
HF_FILES = "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json".split()
HF_FILES += "vocab.json merges.txt chat_template.jinja".split()


def hugging_face_files(folder: str | Path) -> list[Path]:
    """Those of HF_FILES that lie in a model folder. UserError for a link that leads out of it.

    They are copied into data sets and checkpoints, which people publish: a link to a private file must not
    carry its content there. Hugging Face's cache keeps files under models--NAME/blobs, and links to them.
    """
    found = [path for name in HF_FILES if (path := Path(folder) / name).is_file()]
    tree = Path(folder).resolve()
    if tree.parent.name == "snapshots" and tree.parents[1].name.startswith("models--"):
        tree = tree.parents[1]
    for path in found:
        if not path.resolve().is_relative_to(tree):
            raise UserError(f"{path}: a link to {path.resolve()}, outside this folder: copy the file there")
    return found


def from_hugging_face(folder: Path) -> SentencePiece | Tiktoken:
    """The tokenizer of a Hugging Face model directory. UserError, by name, for what neither library is known to compute the same.

    A special token's name in a text is text here, as everywhere in this program.
    """
    try:
        return convert(folder)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as e:
        what = " ".join(f"{type(e).__name__}: {e}".split())
        raise UserError(f"{folder}: its tokenizer files cannot be used ({what})") from None


def convert(folder: Path) -> SentencePiece | Tiktoken:
    names = "tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.json config.json"
    config, named, more, whole, of_model = (read_json(folder / name) for name in names.split())
    config = named | config
    sp_file = folder / SentencePiece.file
    if sp_file.exists() and not (whole and is_byte_level(whole)):
        sp = SentencePiece(sp_file).sp
        pieces = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
        pieces |= special_tokens(whole, config, more, folder)
        eos = eos_of(config, of_model, pieces, folder, sp.id_to_piece(sp.eos_id()))
        if pieces[eos] != sp.eos_id():
            raise UserError(f"{folder}: its eos {eos!r} is not that of its tokenizer.model: not supported")
        bos = [sp.bos_id()] if config.get("add_bos_token", True) and sp.bos_id() >= 0 else []
        return SentencePiece(sp_file, prefix_of(whole, folder) if whole else bos)
    if whole:
        pattern, normalize = splitting(whole, folder)
        vocab, merges = whole["model"]["vocab"], whole["model"]["merges"]
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]
        whole_words = bool(whole["model"].get("ignore_merges"))
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():  # GPT-2's first form
        pattern, normalize, whole_words, vocab = GPT2_PATTERN, "", False, read_json(folder / "vocab.json")
        lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    else:
        raise UserError(
            f"{folder}: no tokenizer there: no tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
        )
    for option in ("add_prefix_space", *([] if whole else ["add_bos_token"])):
        if config.get(option):
            raise UserError(f"{folder}/tokenizer_config.json: {option} is not supported here")

    special = special_tokens(whole, config, more, folder)
    eos = eos_of(config, of_model, vocab | special, folder)
    special |= {eos: (vocab | special)[eos]}
    plain = {t: i for t, i in vocab.items() if t not in special}
    if both := set(plain.values()) & set(special.values()):
        raise UserError(f"{folder}: the id {min(both)} is that of two tokens")
    ranks = ranks_of(plain, merges, whole_words, folder)
    tokenizer = Tiktoken("hf", pattern, ranks, special, eos, normalize, prefix_of(whole, folder))
    probe = "".join(c for c in PROBE if all(bytes([b]) in ranks for b in c.encode()))  # some lack a byte or two
    probe = unicodedata.normalize(normalize, probe) if normalize else probe
    if tokenizer.decode(tokenizer.encode(probe).tolist()) != probe:
        raise UserError(f"{folder}/tokenizer.json: its pattern leaves out parts of a text: not supported")
    return tokenizer


# Letters, marks, digits, spaces and signs beside each other: a pattern that does not take all of a text leaves some of them out.
PROBE = "ab\ncd  e\t\tf\r\n 12 ½x_-.,;: 中文，。１é" + "".join(map(chr, range(128)))


def special_tokens(whole: dict, config: dict, more: dict, folder: Path) -> dict[str, int]:
    """Name -> id of the tokens that were added to a vocabulary. more: of added_tokens.json, the oldest form."""
    decoder = config.get("added_tokens_decoder", {})
    added = [*whole.get("added_tokens", []), *({"id": int(i)} | t for i, t in decoder.items())]
    added += [{"id": i, "content": name} for name, i in more.items()]
    for t in added:
        if not 0 <= t["id"] < 1 << 24:
            raise UserError(f"{folder}: the id {t['id']} of the token {t['content']!r} is none")
        if not t.get("special") and t["content"][:1] not in ("<", "["):  # such as a run of spaces
            raise UserError(f"{folder}: the added token {t['content']!r} would cut ordinary text: not supported")
    return {t["content"]: t["id"] for t in added}


def eos_of(config: dict, of_model: dict, vocab: dict[str, int], folder: Path, default: str = "<|endoftext|>") -> str:
    """The name of the eos, by the tokenizer's files, else by the model's."""
    ids = of_model.get("eos_token_id")
    by_id = [name for i in (ids if isinstance(ids, list) else [ids]) for name in vocab if vocab[name] == i]
    eos = config.get("eos_token") or next(iter(by_id), default)
    eos = eos["content"] if isinstance(eos, dict) else eos
    if eos not in vocab:
        raise UserError(f"{folder}: its tokenizer names no eos token, which ends every document")
    return eos


def read_json(path: Path) -> dict:
    """{} if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as e:
        raise UserError(f"{path}: damaged ({e})") from None


def is_byte_level(whole: dict) -> bool:
    return '"ByteLevel"' in json.dumps(whole.get("pre_tokenizer"))


def splitting(whole: dict, folder: Path) -> tuple[str, str]:
    """(pattern, normal form) of a tokenizer.json; UserError for the kinds that this program has no library for."""

    def refuse(what: str, found) -> UserError:
        return UserError(f"{folder}/tokenizer.json: {what} {json.dumps(found)[:200]} is not supported")

    model, normalizer, before = whole["model"], whole.get("normalizer"), whole.get("pre_tokenizer") or {}
    options = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    odd = {k: model[k] for k in options if model.get(k)}
    if model.get("type") != "BPE" or odd or not is_byte_level(whole):
        raise refuse(
            "a model that is no byte-level BPE, without a tokenizer.model beside it:", {"type": model.get("type")} | odd
        )
    parts = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    if len(parts) > 1 or any(p["type"] not in ("NFC", "NFD", "NFKC", "NFKD") for p in parts):
        raise refuse("normalizer", normalizer)
    normalize = parts[0]["type"] if parts else ""
    *cuts, last = before.get("pretokenizers", [before])
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise refuse("pre_tokenizer", before)
    if not cuts and last.get("use_regex", True):
        return GPT2_PATTERN, normalize
    if len(cuts) == 1 and cuts[0]["type"] == "Digits" and cuts[0]["individual_digits"] and last.get("use_regex", True):
        # Each digit is a word, and what lies between them is cut as GPT-2 does: spaces before a digit are one word.
        between = GPT2_PATTERN.replace(r" ?\p{N}++|", "").replace(r"|\s+(?!\S)", r"|\s+(?=\p{N})|\s+(?!\S)")
        return rf"\p{{N}}|{between}", normalize
    if len(cuts) == 1 and cuts[0]["type"] == "Split" and not last.get("use_regex", True):
        how = (cuts[0]["behavior"], cuts[0].get("invert", False), *cuts[0]["pattern"])
        if how == ("Isolated", False, "Regex"):
            return cuts[0]["pattern"]["Regex"], normalize
    raise refuse("pre_tokenizer", before)


def ranks_of(vocab: dict[str, int], merges: list[tuple], whole_words: bool, folder: Path) -> dict[bytes, int]:
    """tiktoken's table: it merges by the ids of the results, which must therefore be in the order of the merges.

    whole_words: a word that is a token is taken as such, whether or not merges lead to it.
    """
    try:
        ranks = {bytes(CHAR_TO_BYTE[c] for c in token): i for token, i in vocab.items()}
    except KeyError:
        raise UserError(f"{folder}: its vocabulary is not that of a byte-level BPE") from None
    if len(set(ranks.values())) < len(ranks) or not 0 <= min(ranks.values()) <= max(ranks.values()) < 1 << 24:
        raise UserError(f"{folder}: the ids of its vocabulary are no numbering")
    results = [vocab[a + b] for a, b in merges if a + b in vocab]
    if any(a > b for a, b in zip(results, results[1:], strict=False)):
        raise UserError(f"{folder}: its merges are not in the order of their ids: not supported")
    made = set(results)
    return {token: i for token, i in ranks.items() if len(token) == 1 or whole_words or i in made}


def prefix_of(whole: dict, folder: Path) -> list[int]:
    """The ids that a tokenizer.json puts before every text."""
    post, found = whole.get("post_processor") or {"type": "Sequence", "processors": []}, []
    for step in post["processors"] if post["type"] == "Sequence" else [post]:
        if step["type"] == "TemplateProcessing":
            *before, text = step["single"]
            if "Sequence" not in text or any("Sequence" in part for part in before):
                raise UserError(f"{folder}/tokenizer.json: it puts tokens behind every text: not supported")
            found += [i for part in before for i in step["special_tokens"][part["SpecialToken"]["id"]]["ids"]]
        elif step["type"] != "ByteLevel":
            raise UserError(f"{folder}/tokenizer.json: post_processor {step['type']} is not supported")
    return found
