"""Hugging Face's tokenizer files: write them for other programs, and read those of a model."""

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

from configurator import UserError
from text.tokenizer import GPT2_PATTERN, MAX_ID, SentencePiece, Tiktoken, are_token_ids

# --------------------------------------------------------------------------------------------------
# Writing: tokenizer.json, which AutoTokenizer opens

# tokenizer.json has one printable character for each byte: the byte's own character in Latin-1 if
# that is printable, and else a character from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
UNPRINTABLE = [b for b in range(256) if b not in PRINTABLE]
BYTE_TO_CHAR = {b: chr(b) for b in PRINTABLE}
BYTE_TO_CHAR |= {b: chr(0x100 + i) for i, b in enumerate(UNPRINTABLE)}
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


def as_characters(token: bytes) -> str:
    return "".join(BYTE_TO_CHAR[b] for b in token)


def all_merges(tokens: dict[str, int]) -> list[str]:
    """Return every pair of tokens that together are a token, in the order of that token's id.

    SentencePiece and tiktoken merge any two neighbours that make a token, so each pair is a merge.
    """
    pairs = []
    for token in sorted(tokens, key=tokens.get):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs += [f"{a} {b}" for a, b in halves if a in tokens and b in tokens]
    return pairs


def to_hugging_face(
    tokenizer: SentencePiece | Tiktoken, block_size: int, came_with: dict | None = None
) -> dict[str, dict]:
    """Return file name -> content of tokenizer.json and tokenizer_config.json.

    AutoTokenizer, pipelines and llama.cpp read these files. They give the same ids, except for a
    text that contains U+2581 or the name of a special token. Hugging Face calls the prefix bos, and
    puts it before every text unless add_special_tokens=False.

    Returns {} for a SentencePiece model of another kind than prepare.py trains. came_with: an
    earlier tokenizer_config.json, whose other settings are kept, such as a chat template.
    """
    describe = describe_sentencepiece if tokenizer.kind == "sentencepiece" else describe_tiktoken
    described = describe(tokenizer)
    if described is None:
        return {}
    special, model, steps = described
    names = {i: name for name, i in special.items()}
    bos = names.get(tokenizer.prefix[0]) if tokenizer.prefix else None
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": names[i]} | flags for i in sorted(names)],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": post_processor(bos, tokenizer.prefix),
    }
    content |= steps
    content |= {"model": {"type": "BPE", "dropout": None} | model}
    config = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=block_size)
    config |= dict(bos_token=bos, eos_token=names[tokenizer.eos_id], unk_token=model["unk_token"])
    config |= dict(add_bos_token=bool(bos), add_prefix_space=False)
    config |= dict(clean_up_tokenization_spaces=False)
    return {"tokenizer.json": content, "tokenizer_config.json": (came_with or {}) | config}


def post_processor(bos: str | None, prefix: list[int]) -> dict:
    """Return the step of tokenizer.json that puts the prefix, named bos, before every text."""
    first = [{"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"Sequence": {"id": "B", "type_id": 1}}]
    prefix_tokens = {}
    if bos:
        first = [{"SpecialToken": {"id": bos, "type_id": 0}}, *first]
        prefix_tokens = {bos: {"id": bos, "ids": prefix, "tokens": [bos]}}
    template = {"type": "TemplateProcessing", "single": first, "pair": first + second}
    return template | {"special_tokens": prefix_tokens}


def describe_sentencepiece(tokenizer: SentencePiece) -> tuple[dict, dict, dict] | None:
    """Return the parts of tokenizer.json: special tokens, model, and the steps before and after it.

    Returns None where these would not compute the same as SentencePiece. They do if the model does
    not normalize texts, and is a BPE that has a piece for every byte, or has only pieces of single
    characters, which nothing merges.
    """
    sp = tokenizer.sp
    ids = range(sp.vocab_size())
    kinds = [(sp.is_control(i), sp.is_unknown(i), sp.is_byte(i)) for i in ids]
    has_all_bytes = sum(is_byte for *_, is_byte in kinds) >= 256
    is_alphabet = all(len(sp.id_to_piece(i)) == 1 for i in ids if not any(kinds[i]))
    if not (tokenizer.keeps_text and (is_alphabet or tokenizer.is_byte_bpe)):
        return None
    vocab = {sp.id_to_piece(i): i for i in ids}
    special = {sp.id_to_piece(i): i for i in ids if sp.is_control(i) or sp.is_unknown(i)}
    merges = all_merges({piece: i for piece, i in vocab.items() if not any(kinds[i])})
    model = {"unk_token": sp.id_to_piece(sp.unk_id()), "fuse_unk": True}
    model |= {"byte_fallback": has_all_bytes, "vocab": vocab, "merges": merges}
    marked = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    unmarked = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    steps_back = [unmarked, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoder = {"type": "Sequence", "decoders": steps_back}
    return special, model, {"normalizer": marked, "decoder": decoder}


def describe_tiktoken(tokenizer: Tiktoken) -> tuple[dict, dict, dict]:
    """Return the same parts for a byte-level BPE."""
    special = tokenizer.encoding._special_tokens
    ranks = tokenizer.encoding._mergeable_ranks
    tokens = {as_characters(token): rank for token, rank in ranks.items()}
    model = {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"vocab": tokens | special, "merges": all_merges(tokens)}
    # Hugging Face's regex engine reads {1,3}+ as a repetition of {1,3}, not as possessive. Nothing
    # follows it in these patterns, so possessive or not makes no difference: remove the +.
    pattern = re.sub(r"(\{[\d,]+\})\+", r"\1", tokenizer.pattern)
    split = dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    steps = {"pre_tokenizer": pre_tokenizer, "decoder": byte_level}
    if tokenizer.normalize:
        steps |= {"normalizer": {"type": tokenizer.normalize}}
    return special, model, steps


def llama_cpp_note(
    tokenizer: SentencePiece | Tiktoken, hf_class: str | None, vocab_size: int
) -> str:
    """Return what llama.cpp needs to read texts as this program does; "" if it needs nothing.

    hf_class, vocab_size: as in config.json. By the class, llama.cpp's convert_hf_to_gguf.py chooses
    the file from which it takes the vocabulary, and whether it notes that no space goes before a
    text. It recognizes a BPE by a hash of the ids of one text. These ids contain no eos in public
    models, but begin with the eos here. (conversion/base.py, llama.py, qwen.py and gpt2.py there.)
    """
    if hf_class is None:
        return ""
    needs = []
    if tokenizer.kind == Tiktoken.kind:
        if hf_class == "Qwen2ForCausalLM" and transformers_note(tokenizer, hf_class):
            return "llama.cpp's converter refuses a Qwen2 with this tokenizer"
        if tokenizer.prefix == [tokenizer.eos_id]:
            needs.append("a tokenizer.json without its post_processor")
    elif hf_class == "GPT2LMHeadModel":
        return "llama.cpp's converter refuses a GPT-2 with SentencePiece"
    elif "Qwen" in hf_class and tokenizer.sp.normalize("a") == "a":
        needs.append("--override-kv tokenizer.ggml.add_space_prefix=bool:false")
    # llama.cpp recognizes two public Llama models by the size of their vocabulary.
    is_llama = hf_class == "LlamaForCausalLM"
    if is_llama and vocab_size == 49152 and tokenizer.prefix:  # Granite
        needs.append("--override-kv tokenizer.ggml.add_bos_token=bool:true")
    if is_llama and vocab_size == 32016:  # CodeLlama, which has an eot token
        needs.append(f"--override-kv tokenizer.ggml.eot_token_id=int:{tokenizer.eos_id}")
    return f"llama.cpp needs {' and '.join(needs)}" if needs else ""


QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def transformers_note(tokenizer: SentencePiece | Tiktoken, hf_class: str | None) -> str:
    """Return what transformers needs to read texts as this program does; "" if it needs nothing.

    In transformers 5, AutoTokenizer splits the texts of a Qwen2ForCausalLM as Qwen2 does, whatever
    tokenizer.json says.
    """
    if hf_class != "Qwen2ForCausalLM":
        return ""
    if tokenizer.kind == Tiktoken.kind and tokenizer.pattern == QWEN2_PATTERN:
        return ""
    instead = "PreTrainedTokenizerFast.from_pretrained reads this one"
    return f"AutoTokenizer takes Qwen2's own tokenizer for a Qwen2ForCausalLM; {instead}"


# --------------------------------------------------------------------------------------------------
# Reading: the tokenizer of a Hugging Face model folder

# The files of such a tokenizer. prepare.py and the checkpoints copy all of them.
HF_FILES = "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json".split()
HF_FILES += "vocab.json merges.txt chat_template.jinja".split()


def hugging_face_files(folder: str | Path) -> list[Path]:
    """Return those of HF_FILES that are in a model folder.

    Raises UserError for a link that leads out of the folder. The files are copied into data sets
    and checkpoints, which people publish, and a link to a private file must not bring its content
    there. In Hugging Face's cache, links to models--NAME/blobs are allowed: all files are such.
    """
    paths = [path for name in HF_FILES if (path := Path(folder) / name).is_file()]
    tree = Path(folder).resolve()
    if tree.parent.name == "snapshots" and tree.parents[1].name.startswith("models--"):
        tree = tree.parents[1]
    for path in paths:
        target = path.resolve()
        if not target.is_relative_to(tree):
            advice = "replace it by a copy of that file"
            raise UserError(f"{path}: a link to {target}, outside this folder: {advice}")
    return paths


def from_hugging_face(folder: Path) -> SentencePiece | Tiktoken:
    """Return the tokenizer of a Hugging Face model folder.

    The name of a special token in a text is ordinary text here, as everywhere in this program.
    Raises UserError for damaged files. Also raises it for a setting with which neither
    SentencePiece nor tiktoken is known to compute the same ids, and names the setting.
    """
    try:
        return convert(folder)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())
        raise UserError(f"{folder}: its tokenizer files cannot be used ({reason})") from None


# Names for the content of these files in the functions below ({} where a file is missing):
#     config     tokenizer_config.json and special_tokens_map.json
#     added      added_tokens.json
#     whole      tokenizer.json
#     of_model   config.json


def convert(folder: Path) -> SentencePiece | Tiktoken:
    """Do what from_hugging_face() says, but raise any kind of error for damaged files."""
    names = "tokenizer_config special_tokens_map added_tokens tokenizer config".split()
    files = [read_json(folder / f"{name}.json") for name in names]
    config, special_map, added, whole, of_model = files
    config = special_map | config
    has_model_file = (folder / SentencePiece.file).exists()
    if has_model_file and not (whole and is_byte_level(whole)):
        return convert_sentencepiece(folder, config, added, whole, of_model)
    return convert_bpe(folder, config, added, whole, of_model)


def convert_sentencepiece(
    folder: Path, config: dict, added: dict, whole: dict, of_model: dict
) -> SentencePiece:
    path = folder / SentencePiece.file
    sp = SentencePiece(path).sp
    pieces = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    pieces |= special_tokens(config, added, whole, folder)
    eos = eos_of(config, of_model, pieces, folder, sp.id_to_piece(sp.eos_id()))
    if pieces[eos] != sp.eos_id():
        problem = f"its eos {eos!r} is not the eos of its tokenizer.model"
        raise UserError(f"{folder}: {problem}: not supported")
    if whole:
        prefix = prefix_of(whole, folder)
    else:
        has_bos = config.get("add_bos_token", True) and sp.bos_id() >= 0
        prefix = [sp.bos_id()] if has_bos else []
    return SentencePiece(path, prefix)


def convert_bpe(folder: Path, config: dict, added: dict, whole: dict, of_model: dict) -> Tiktoken:
    unsupported = ["add_prefix_space"]
    if whole:
        pattern, normalize = splitting(whole, folder)
        vocab = whole["model"]["vocab"]
        merges = whole["model"]["merges"]
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]
        whole_words = bool(whole["model"].get("ignore_merges"))
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        pattern = GPT2_PATTERN  # GPT-2 was first published as these two files
        normalize = ""
        vocab = read_json(folder / "vocab.json")
        lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if line and not line.startswith("#version")]
        merges = [tuple(line.split(" ")) for line in lines]
        whole_words = False
        unsupported.append("add_bos_token")
    else:
        files = "no tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
        raise UserError(f"{folder}: no tokenizer there: {files}")
    for option in unsupported:
        if config.get(option):
            raise UserError(f"{folder}/tokenizer_config.json: {option} is not supported here")

    special = special_tokens(config, added, whole, folder)
    eos = eos_of(config, of_model, vocab | special, folder)
    special |= {eos: (vocab | special)[eos]}
    plain = {token: i for token, i in vocab.items() if token not in special}
    both = set(plain.values()) & set(special.values())
    if both:
        raise UserError(f"{folder}: two tokens have the id {min(both)}")
    ranks = ranks_of(plain, merges, whole_words, folder)
    tokenizer = Tiktoken("hf", pattern, ranks, special, eos, normalize, prefix_of(whole, folder))
    check_pattern(tokenizer, ranks, folder)
    return tokenizer


# Letters, marks, digits, spaces and signs next to each other: a pattern that leaves out parts of a
# text leaves out some of these.
PROBE = "ab\ncd  e\t\tf\r\n 12 ½x_-.,;: 中文，。１é" + "".join(map(chr, range(128)))


def check_pattern(tokenizer: Tiktoken, ranks: dict[bytes, int], folder: Path) -> None:
    """Raise UserError if PROBE does not decode to itself."""
    # Some vocabularies lack the token of a byte or two.
    probe = "".join(c for c in PROBE if all(bytes([b]) in ranks for b in c.encode()))
    if tokenizer.normalize:
        probe = unicodedata.normalize(tokenizer.normalize, probe)
    if tokenizer.decode(tokenizer.encode(probe).tolist()) != probe:
        problem = "its pattern leaves out parts of a text"
        raise UserError(f"{folder}/tokenizer.json: {problem}: not supported")


def special_tokens(config: dict, added: dict, whole: dict, folder: Path) -> dict[str, int]:
    """Return name -> id of the tokens that were added to a vocabulary, from all three files."""
    in_config = config.get("added_tokens_decoder", {})
    tokens = [*whole.get("added_tokens", []), *({"id": int(i)} | t for i, t in in_config.items())]
    tokens += [{"id": i, "content": name} for name, i in added.items()]
    for token in tokens:
        i = token["id"]
        name = token["content"]
        if not 0 <= i <= MAX_ID:
            problem = f"is not a number from 0 to {MAX_ID:,}"
            raise UserError(f"{folder}: the id {i} of the token {name!r} {problem}")
        if not token.get("special") and name[:1] not in ("<", "["):  # a run of spaces, for example
            problem = "would cut ordinary text: not supported"
            raise UserError(f"{folder}: the added token {name!r} {problem}")
    return {token["content"]: token["id"] for token in tokens}


def eos_of(
    config: dict, of_model: dict, vocab: dict, folder: Path, default: str = "<|endoftext|>"
) -> str:
    """Return the name of the eos: as the tokenizer's files say, else as config.json says."""
    ids = of_model.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    by_id = [name for i in ids for name in vocab if vocab[name] == i]
    eos = config.get("eos_token") or next(iter(by_id), default)
    if isinstance(eos, dict):
        eos = eos["content"]
    if eos not in vocab:
        why = "but every document must end with one"
        raise UserError(f"{folder}: its tokenizer names no eos token, {why}")
    return eos


def read_json(path: Path) -> dict:
    """Return the content of a JSON file; {} if it does not exist. UserError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as e:
        raise UserError(f"{path}: damaged ({e})") from None


def is_byte_level(whole: dict) -> bool:
    return '"ByteLevel"' in json.dumps(whole.get("pre_tokenizer"))


def splitting(whole: dict, folder: Path) -> tuple[str, str]:
    """Return (pattern, normal form or "") of a tokenizer.json.

    Raises UserError for the kinds of tokenizers that tiktoken cannot compute.
    """
    path = folder / "tokenizer.json"

    def refuse(part: str, content: Any) -> UserError:
        return UserError(f"{path}: {part} {json.dumps(content)[:200]} is not supported")

    model = whole["model"]
    options = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    odd = {key: model[key] for key in options if model.get(key)}
    if model.get("type") != "BPE" or odd or not is_byte_level(whole):
        part = "a model other than a byte-level BPE, without a tokenizer.model beside it:"
        raise refuse(part, {"type": model.get("type")} | odd)

    normalizer = whole.get("normalizer")
    forms = normalizer.get("normalizers", [normalizer]) if normalizer else []
    if len(forms) > 1 or any(f["type"] not in ("NFC", "NFD", "NFKC", "NFKD") for f in forms):
        raise refuse("normalizer", normalizer)
    normalize = forms[0]["type"] if forms else ""

    pre_tokenizer = whole.get("pre_tokenizer") or {}
    *cuts, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise refuse("pre_tokenizer", pre_tokenizer)
    cuts_as_gpt2 = last.get("use_regex", True)
    if not cuts and cuts_as_gpt2:
        return GPT2_PATTERN, normalize
    if len(cuts) == 1:
        cut = cuts[0]
        if cut["type"] == "Digits" and cut["individual_digits"] and cuts_as_gpt2:
            # Each digit is a word. GPT-2's pattern cuts the text between two digits as if it were a
            # text of its own. So spaces at its end, before the next digit, are one word.
            between = GPT2_PATTERN.replace(r" ?\p{N}++|", "")
            between = between.replace(r"|\s+(?!\S)", r"|\s+(?=\p{N})|\s+(?!\S)")
            return rf"\p{{N}}|{between}", normalize
        if cut["type"] == "Split" and not cuts_as_gpt2:
            how = (cut["behavior"], cut.get("invert", False), *cut["pattern"])
            if how == ("Isolated", False, "Regex"):
                return cut["pattern"]["Regex"], normalize
    raise refuse("pre_tokenizer", pre_tokenizer)


def ranks_of(
    vocab: dict[str, int], merges: list[tuple], whole_words: bool, folder: Path
) -> dict[bytes, int]:
    """Return the table of tiktoken: token -> id.

    tiktoken merges in the order of the ids that result, so the ids must be in the order of the
    merges. whole_words: a word that is a token becomes this token, even if no merges lead to it.
    """
    try:
        ranks = {bytes(CHAR_TO_BYTE[c] for c in token): i for token, i in vocab.items()}
    except KeyError:
        raise UserError(f"{folder}: its vocabulary is not that of a byte-level BPE") from None
    if not are_token_ids(ranks.values()):
        problem = f"are not distinct numbers from 0 to {MAX_ID:,}"
        raise UserError(f"{folder}: the ids of its vocabulary {problem}")
    results = [vocab[a + b] for a, b in merges if a + b in vocab]
    if any(a > b for a, b in zip(results, results[1:], strict=False)):
        raise UserError(f"{folder}: its merges are not in the order of their ids: not supported")
    if whole_words:
        return ranks
    made = set(results)
    return {token: i for token, i in ranks.items() if len(token) == 1 or i in made}


def prefix_of(whole: dict, folder: Path) -> list[int]:
    """Return the ids that a tokenizer.json puts before every text."""
    post = whole.get("post_processor") or {"type": "Sequence", "processors": []}
    steps = post["processors"] if post["type"] == "Sequence" else [post]
    path = folder / "tokenizer.json"
    prefix = []
    for step in steps:
        if step["type"] == "TemplateProcessing":
            *before, text = step["single"]
            if "Sequence" not in text or any("Sequence" in part for part in before):
                raise UserError(f"{path}: it puts tokens after every text: not supported")
            for part in before:
                name = part["SpecialToken"]["id"]
                prefix += step["special_tokens"][name]["ids"]
        elif step["type"] != "ByteLevel":
            raise UserError(f"{path}: post_processor {step['type']} is not supported")
    return prefix
