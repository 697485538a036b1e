"""Hugging Face's tokenizer files: write them for other programs, and read those of a model."""

import itertools
import json
import re
from pathlib import Path

from configurator import UserError
from hardware.disk import json_bytes, read_object
from text.dataset import load_tokenizer
from text.tokenizer import (
    GPT2_PATTERN,
    IM_END,
    IM_START,
    SentencePiece,
    Tiktoken,
    Tokenizer,
    check_ids,
)

# --------------------------------------------------------------------------------------------------
# Writing: tokenizer.json, which AutoTokenizer opens

# tokenizer.json has one printable character for each byte: the byte's own character in Latin-1 if
# that is printable, and else a character from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
UNPRINTABLE = [b for b in range(256) if b not in PRINTABLE]
BYTE_TO_CHAR = {b: chr(b) for b in PRINTABLE}
BYTE_TO_CHAR |= {b: chr(0x100 + i) for i, b in enumerate(UNPRINTABLE)}
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


def all_merges(tokens: dict[str, int]) -> list[str]:
    """Return every pair of tokens that form a token, in the order of that token's id.

    SentencePiece and tiktoken merge any two neighbours that make a token, so each pair is a merge.
    """
    pairs = []
    for token in sorted(tokens, key=tokens.__getitem__):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs += [f"{a} {b}" for a, b in halves if a in tokens and b in tokens]
    return pairs


def to_hugging_face(
    tokenizer: Tokenizer, block_size: int, came_with: dict | None = None
) -> dict[str, dict]:
    """Return file name -> content of tokenizer.json and tokenizer_config.json.

    AutoTokenizer, pipelines and llama.cpp read these files. They give the same ids, except for a
    text that contains U+2581 or the name of a special token. Hugging Face calls the prefix bos, and
    puts it before every text unless add_special_tokens=False.

    Returns {} for a SentencePiece model of another kind than prepare.py trains. came_with: the
    tokenizer_config.json of the tokenizer's source. Its other settings, such as a chat template,
    are kept.
    """
    t = tokenizer
    described = describe_sentencepiece(t) if isinstance(t, SentencePiece) else describe_tiktoken(t)
    if described is None:
        return {}
    special, model, steps = described
    names = {i: name for name, i in special.items()}
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)

    # The prefix, named bos, comes before every text, and so before the first of a pair.
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    prefix_tokens = {}
    bos = names.get(tokenizer.prefix[0]) if tokenizer.prefix else None
    if bos:
        single = [{"SpecialToken": {"id": bos, "type_id": 0}}, *single]
        prefix_tokens = {bos: {"id": bos, "ids": tokenizer.prefix, "tokens": [bos]}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": names[i]} | flags | {"special": names[i] not in tokenizer.added}
            for i in sorted(names)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": template | {"special_tokens": prefix_tokens},
    }
    content |= steps | {"model": {"type": "BPE", "dropout": None} | model}
    config = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=block_size)
    config |= dict(bos_token=bos, eos_token=names[tokenizer.eos_id], unk_token=model["unk_token"])
    config |= dict(add_bos_token=bool(bos), add_prefix_space=False)
    config |= dict(clean_up_tokenization_spaces=False)
    return {"tokenizer.json": content, "tokenizer_config.json": (came_with or {}) | config}


def describe_sentencepiece(tokenizer: SentencePiece) -> tuple[dict, dict, dict] | None:
    """Return the parts of tokenizer.json: special tokens, model, and the steps before and after it.

    Returns None if these would not give the same ids as SentencePiece. They do if the model does
    not normalize texts, and either is a BPE with a piece for every byte, or has only pieces of
    single characters, which are never merged.
    """
    sp = tokenizer.sp
    ordinary = {sp.id_to_piece(i): i for i in tokenizer.ordinary}
    is_alphabet = all(len(piece) == 1 for piece in ordinary)
    if not (tokenizer.keeps_text and (is_alphabet or tokenizer.is_byte_bpe)):
        return None
    vocab = {sp.id_to_piece(i): i for i in range(tokenizer.vocab_size)}
    special = {p: i for p, i in vocab.items() if sp.is_control(i) or sp.is_unknown(i)}
    model = {"unk_token": sp.id_to_piece(sp.unk_id()), "fuse_unk": True}
    model |= {"byte_fallback": tokenizer.has_all_bytes, "vocab": vocab}
    model |= {"merges": all_merges(ordinary)}
    marked = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    unmarked = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    steps_back = [unmarked, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoder = {"type": "Sequence", "decoders": steps_back}
    return special, model, {"normalizer": marked, "decoder": decoder}


def describe_tiktoken(tokenizer: Tiktoken) -> tuple[dict, dict, dict]:
    """Return the same parts for a byte-level BPE."""
    special = tokenizer.special | tokenizer.added
    ranks = tokenizer.ranks.items()
    tokens = {"".join(BYTE_TO_CHAR[b] for b in token): rank for token, rank in ranks}
    # As in tiktoken, a word that is a token becomes it, even if no merges lead to it.
    model = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
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


# text/chat.py's ChatML as a template. ollama recognizes ChatML by this spelling of the template.
CHATML = (
    r"{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'"
    r" + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_files(tokenizer: Tokenizer, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files that make other programs write conversations as text/chat.py does.

    The template replaces one that came with the tokenizer. It starts with the prefix, since
    transformers and llama-cpp-python add none. llama.cpp adds one itself, and then removes this
    one. An answer ends at <|im_end|>.

    files: those of the tokenizer, name -> content.
    """
    template = ("{{ bos_token }}" if tokenizer.prefix else "") + CHATML
    config = json.loads(files.get("tokenizer_config.json", "{}")) | {"chat_template": template}
    ends = [tokenizer.eos_id, tokenizer.special_id(IM_END)]
    generation = dict(bos_token_id=next(iter(tokenizer.prefix), None), eos_token_id=ends)
    return {
        "chat_template.jinja": template.encode(),
        "tokenizer_config.json": json_bytes(config),
        "generation_config.json": json_bytes(generation),
    }


def only_ends(tokenizer: Tokenizer, generation_config: bytes) -> bytes:
    """Return a generation_config.json with nothing but the ids that end a text.

    Its other settings, such as a temperature, were meant for another model.
    """
    ends = json.loads(generation_config).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    valid = {i for i in ends if i in range(tokenizer.vocab_size)}
    return json_bytes({"eos_token_id": sorted(valid | {tokenizer.eos_id})})


# --------------------------------------------------------------------------------------------------
# Reading: the tokenizer of a Hugging Face model folder

# The files of such a tokenizer, and generation_config.json, which names the end of an answer.
# prepare.py and the checkpoints copy all of them.
HF_FILES = "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json".split()
HF_FILES += "vocab.json merges.txt chat_template.jinja generation_config.json".split()


def find_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer that --tokenizer names.

    This is the folder of a data set, a checkpoint or any Hugging Face model, a .model or .tiktoken
    file, or a name known to tiktoken.
    """
    if (folder := Path(spec)).is_dir():
        is_ours = (folder / "meta.json").exists()
        return load_tokenizer(folder) if is_ours else from_hugging_face(folder)
    if spec.endswith(".model"):
        return SentencePiece(spec)
    if spec.endswith(".tiktoken"):
        return Tiktoken.from_file(spec)
    if folder.is_file():
        kinds = "a .model or .tiktoken file; for a tokenizer.json, give its folder"
        raise UserError(f"--tokenizer {spec}: not {kinds}: {folder.parent}")
    return Tiktoken.from_name(spec)


def tokenizer_of_model(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in a model's folder, or None if it has none, as nanoGPT's ckpt.pt."""
    files = ("meta.json", SentencePiece.file, "tokenizer.json", "vocab.json")
    return find_tokenizer(str(folder)) if any((folder / name).exists() for name in files) else None


def hugging_face_files(folder: Path) -> list[Path]:
    """Return the HF_FILES that a model folder contains.

    Raises UserError for a link that leads out of the folder. The files are copied into data sets
    and checkpoints, which people publish, and a link must not publish a private file. In Hugging
    Face's cache all files are links to models--NAME/blobs: these are allowed.
    """
    paths = [path for name in HF_FILES if (path := folder / name).is_file()]
    tree = folder.resolve()
    if tree.parent.name == "snapshots" and tree.parents[1].name.startswith("models--"):
        tree = tree.parents[1]
    for path in paths:
        target = path.resolve()
        if not target.is_relative_to(tree):
            raise UserError(f"{path}: a link to {target}, outside this folder: copy the file here")
    return paths


def from_hugging_face(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face model folder: its tokenizer.model or tokenizer.json.

    The name of a special token in a text is ordinary text here, as everywhere in this program. An
    added token that is not special, such as <think>, is one token.
    Raises UserError for damaged files, and for a setting with which neither SentencePiece nor
    tiktoken is known to give the same ids. The error names the setting.
    """
    try:
        config = read_json(folder / "special_tokens_map.json")
        config |= read_json(folder / "tokenizer_config.json")
        content = read_json(folder / "tokenizer.json")
        is_byte_level = '"ByteLevel"' in json.dumps(content.get("pre_tokenizer"))
        if (folder / SentencePiece.file).exists() and not is_byte_level:
            tokenizer = from_tokenizer_model(folder / SentencePiece.file, config, content)
        elif not content:
            raise ValueError("no tokenizer.model or tokenizer.json: save_pretrained() writes one")
        elif content["model"].get("type", "BPE") != "BPE" or not is_byte_level:  # GPT-2 has no type
            raise ValueError("a model other than a byte-level BPE is not supported")
        else:
            tokenizer = from_tokenizer_json(config, content)
        if not all(i in range(tokenizer.vocab_size) for i in tokenizer.prefix):
            raise ValueError(f"{tokenizer.prefix} before every text are not ids of this tokenizer")
        return tokenizer
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as e:
        reason = str(e) if type(e) is ValueError else repr(e)
        raise UserError(f"{folder}: its tokenizer files cannot be used: {reason}") from None


def read_json(path: Path) -> dict:
    """Return the object in a JSON file; {} if it does not exist. UserError if it is damaged."""
    try:
        return read_object(path) if path.exists() else {}
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: damaged ({getattr(e, 'strerror', e)})") from None


# In the functions below, config is the content of tokenizer_config.json and special_tokens_map.json
# together, and content is that of tokenizer.json.


def from_tokenizer_model(path: Path, config: dict, content: dict) -> SentencePiece:
    """Return the tokenizer of a tokenizer.model, with the prefix that the other files give it.

    Raises ValueError if the other files ask for something that this model does not do.
    """
    tokenizer = SentencePiece(path)
    sp = tokenizer.sp
    for token in content.get("added_tokens", []):
        if token["id"] >= sp.vocab_size() and not token.get("special"):
            raise ValueError(f"the added token {token['content']!r} is not in {path.name}")
    vocab = content.get("model", {}).get("vocab", {})
    if any(vocab.get(sp.id_to_piece(i), i) != i for i in range(sp.vocab_size())):
        raise ValueError("tokenizer.json gives tokens other ids: remove the file that is wrong")
    if config.get("add_prefix_space") is False and tokenizer.adds_space:
        raise ValueError("add_prefix_space=false is not supported")
    if config.get("add_eos_token") and not content:
        raise ValueError("add_eos_token is not supported")
    own_eos = sp.id_to_piece(sp.eos_id())
    if (eos := eos_of(config, own_eos)) != own_eos:
        raise ValueError(f"the eos of {path.name} is {own_eos!r}, but another file says {eos!r}")
    has_bos = config.get("add_bos_token", True) and sp.bos_id() >= 0
    tokenizer.prefix = prefix_of(content) if content else [sp.bos_id()] * has_bos
    return tokenizer


def from_tokenizer_json(config: dict, content: dict) -> Tiktoken:
    """Return the byte-level BPE in a tokenizer.json, for tiktoken to compute.

    tiktoken needs a pattern that cuts a text into words (pattern_of), the id of each token, which
    is also its rank in merging (ranks_of), and the special tokens. Raises ValueError, with the name
    of the setting, if tiktoken would give other ids than the file means.
    """
    model = content["model"]
    for option in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ValueError(f"{option} is not supported")
    if config.get("add_prefix_space"):
        raise ValueError("add_prefix_space is not supported")
    normalize = (content.get("normalizer") or {}).get("type", "")
    if normalize not in ("", "NFC", "NFD", "NFKC", "NFKD"):
        raise ValueError(f"normalizer {normalize} is not supported")
    special, added = added_tokens(content, normalize)
    vocab = model["vocab"] | special | added
    eos = eos_of(config, "<|endoftext|>")
    if eos == IM_END and "<|endoftext|>" in vocab:
        eos = "<|endoftext|>"  # IM_END ends a message of a document, not the document
    if eos not in vocab:
        problem = f"it has no eos token {eos}, but every document must end with one"
        raise ValueError(f"{problem}: name it as eos_token in tokenizer_config.json")
    special |= {eos: vocab[eos]}
    added.pop(eos, None)

    named = special | added
    ranks = ranks_of({token: i for token, i in vocab.items() if token not in named}, model)
    check_ids([*ranks.values(), *named.values()])
    pattern = pattern_of(content["pre_tokenizer"])
    prefix = prefix_of(content)
    tokenizer = Tiktoken("hf", pattern, ranks, special, eos, normalize, prefix, added)

    # A pattern that leaves out parts of a text leaves out some of these characters, which are of
    # each category of Unicode. Some vocabularies lack the token of a byte or two.
    probe = "ab\ncd  e\t\tf\r\n 12 ½x_-.,;: 中文，。１é" + "".join(map(chr, range(128)))
    rare = "\xa6\xaa\xab\xb2\xbb\u01c5\u02b0\u0300\u0378\u0488\u0903\u16ee\u200d\u2028\u2029\ue000"
    probe += "".join(f"a{c}b" for c in rare)
    probe = "".join(c for c in probe if all(bytes([b]) in ranks for b in c.encode()))
    if tokenizer.decode(tokenizer.encode(probe).tolist()) != tokenizer.normalized(probe):
        raise ValueError("its pattern leaves out parts of a text: not supported")
    return tokenizer


def added_tokens(content: dict, normalize: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tokens that were added to the model, name -> id: special ones, and others.

    The others, such as <think>, are found in a text. <|im_start|> and <|im_end|> count as special:
    no text is encoded to them. Raises ValueError for a token with more conditions than its name.
    """
    special, others = {}, {}
    for token in content.get("added_tokens", []):
        name = token["content"]
        is_special = token.get("special") or name in (IM_START, IM_END)
        (special if is_special else others)[name] = token["id"]
        flags = ["lstrip", "rstrip", "single_word", *(["normalized"] if normalize else [])]
        if not is_special and (on := [flag for flag in flags if token.get(flag)]):
            raise ValueError(f"the added token {name!r} has {on[0]}: not supported")
    return special, others


# Each digit is a word. GPT-2's pattern cuts the text between two digits as if it were a text of its
# own. So spaces at its end, before the next digit, are one word.
DIGITS_PATTERN = r"\p{N}|" + GPT2_PATTERN.replace(r" ?\p{N}++|", "").replace(
    r"|\s+(?!\S)", r"|\s+(?=\p{N})|\s+(?!\S)"
)
# What matches differently in Hugging Face's regex engine: \w \W \b \B, ^ and $, [:alpha:], and
# {1,3}+. (After \s++, which takes all line ends, $ matches the same.)
UNLIKE = re.compile(r"\\[wWbB]|(?<!\[)\^|(?<!\\s\+\+)\$|\[:|\d\}\+")


def eos_of(config: dict, default: str) -> str:
    """Return the name of the eos."""
    eos = config.get("eos_token") or default
    return eos["content"] if isinstance(eos, dict) else eos


def pattern_of(pre_tokenizer: dict) -> str:
    """Return the regular expression that cuts a text into words, for tiktoken.

    Three kinds of tokenizer.json are supported: GPT-2's pattern alone, GPT-2's pattern after a
    split at each digit (SmolLM), and a pattern in the file (Llama 3, Qwen). Raises ValueError for
    another kind, and for a pattern that tiktoken's regex engine matches differently.
    """
    *cuts, byte_level = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    is_gpt2 = byte_level.get("use_regex", True)
    if byte_level["type"] == "ByteLevel" and not byte_level.get("add_prefix_space"):
        if is_gpt2 and not cuts:
            return GPT2_PATTERN
        if is_gpt2 and cuts == [{"type": "Digits", "individual_digits": True}]:
            return DIGITS_PATTERN
        if not is_gpt2 and len(cuts) == 1:
            regex = cuts[0].get("pattern", {}).get("Regex")
            split = dict(type="Split", behavior="Isolated", invert=False, pattern={"Regex": regex})
            if {"invert": False} | cuts[0] == split and regex and not UNLIKE.search(regex):
                return regex
    raise ValueError(f"pre_tokenizer {json.dumps(pre_tokenizer)[:200]} is not supported")


def to_bytes(token: str) -> bytes:
    return bytes(CHAR_TO_BYTE[c] for c in token)


def ranks_of(vocab: dict[str, int], model: dict) -> dict[bytes, int]:
    """Return tiktoken's table, token -> id, of a vocabulary and the merges of a model.

    A byte-level BPE of Hugging Face lists its merges: pairs of tokens, in order of priority.
    tiktoken has no list. It merges any two neighbours that form a token, the token with the
    smallest id first. Both give the same tokens if

    * the merges are in the order of the ids of the tokens that they make, and
    * for every token, the last merge by which tiktoken makes it is in the list. (That fails for a
      vocabulary that was extended by the merges of another one.)

    Raises ValueError otherwise. A token that no merge makes never appears, unless the model has
    ignore_merges: then a word that is a token becomes this token.
    """
    ranks = {to_bytes(token): i for token, i in vocab.items()}
    listed = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    merges = [(to_bytes(a), to_bytes(b)) for a, b in listed if a + b in vocab]
    made = [ranks[a + b] for a, b in merges]
    if made != sorted(made):
        raise ValueError("its merges are not in the order of their ids: not supported")
    whole_words = model.get("ignore_merges")
    if not whole_words:
        ids = set(made)
        ranks = {token: i for token, i in ranks.items() if len(token) == 1 or i in ids}
    known = set(merges)
    for token in ranks:
        parts = parts_before_last_merge(token, ranks)
        needed = {tuple(parts)} if len(parts) > 1 else set()
        if len(parts) > 2 and whole_words:  # within a word, any two halves may be merged to it
            halves = ((token[:i], token[i:]) for i in range(1, len(token)))
            needed = {pair for pair in halves if ranks.keys() >= set(pair)}
        if not needed <= known:
            raise ValueError(f"tiktoken makes {token} by other merges: not supported")
    return ranks


def parts_before_last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Merge the bytes of a token as tiktoken does, and return the parts before the last merge.

    These are two parts, or more if no tokens with smaller ids lead to it.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        ids = [ranks.get(a + b, ranks[token]) for a, b in itertools.pairwise(parts)]
        lowest = min(ids)
        if lowest == ranks[token]:
            break
        i = ids.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def prefix_of(content: dict) -> list[int]:
    """Return the ids that a tokenizer.json puts before every text."""
    post = content.get("post_processor") or {"type": "ByteLevel"}
    prefix = []
    for step in post.get("processors", [post]):
        if step["type"] == "TemplateProcessing":
            *special, text = step["single"]
            if "Sequence" not in text:
                raise ValueError("it puts tokens after every text: not supported")
            for part in special:
                prefix += step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
        elif step["type"] != "ByteLevel":
            raise ValueError(f"post_processor {step['type']} is not supported")
    return prefix
