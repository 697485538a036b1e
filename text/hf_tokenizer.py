"""Hugging Face's tokenizer files: write them for other programs, and read those of a model."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from configurator import UserError, note
from hardware.disk import json_bytes, read_object
from text.dataset import load_tokenizer
from text.tokenizer import (
    BYTE_TO_CHAR,
    IM_END,
    IM_START,
    SPACE_SIGN,
    Added,
    HuggingFace,
    SentencePiece,
    Tiktoken,
    Tokenizer,
)

# --------------------------------------------------------------------------------------------------
# Writing: tokenizer.json, which AutoTokenizer opens


def all_merges(tokens: dict[str, int]) -> list[tuple[str, str]]:
    """Return every pair of tokens that form a token, in the order of that token's id.

    SentencePiece and tiktoken merge any two neighbours that make a token, so each pair is a merge.
    """
    in_order = sorted(tokens, key=tokens.__getitem__)
    halves = ((token[:i], token[i:]) for token in in_order for i in range(1, len(token)))
    return [(a, b) for a, b in halves if a in tokens and b in tokens]


def to_hugging_face(
    tokenizer: SentencePiece | Tiktoken, block_size: int, source_config: dict | None = None
) -> dict[str, dict]:
    """Return file name -> content of tokenizer.json and tokenizer_config.json.

    AutoTokenizer, pipelines and llama.cpp read these files. They give the same ids, except for a
    text that contains U+2581 or the name of a special token. Hugging Face calls the prefix bos, and
    puts it before every text unless add_special_tokens=False.

    Returns {} for a SentencePiece model of another kind than prepare.py trains. source_config: the
    tokenizer_config.json that came with the tokenizer. Its other settings, such as a chat template,
    are kept.
    """
    from tokenizers.processors import TemplateProcessing

    t = tokenizer
    library = sentencepiece_bpe(t) if isinstance(t, SentencePiece) else byte_level_bpe(t)
    if library is None:
        return {}
    names = {i: name for name, i in tokenizer.special.items()}
    unk = library.model.unk_token
    library.add_special_tokens([names[i] for i in sorted(names)] + [unk] * bool(unk))
    # The prefix, named bos, comes before every text, and so before the first of a pair.
    if bos := names.get(tokenizer.prefix[0]) if tokenizer.prefix else None:
        single, known = [bos, "$A"], [(bos, tokenizer.prefix[0])]
        library.post_processor = TemplateProcessing(single, [*single, "$B:1"], known)
    config = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=block_size)
    config |= dict(bos_token=bos, eos_token=names[tokenizer.eos_id], unk_token=unk)
    config |= dict(add_bos_token=bool(bos), add_prefix_space=False)
    config |= dict(clean_up_tokenization_spaces=False)
    config = {"pad_token": unk or config["eos_token"]} | (source_config or {}) | config
    return {"tokenizer.json": json.loads(library.to_str()), "tokenizer_config.json": config}


def sentencepiece_bpe(tokenizer: SentencePiece) -> Any:
    """Return the same tokenizer of the package `tokenizers`, without its special tokens.

    Returns None if that would not give the same ids as SentencePiece. It does if the model does
    not normalize texts, and either is a BPE with a piece for every byte, or has only pieces of
    single characters, which are never merged.
    """
    import tokenizers

    sp = tokenizer.sp
    ordinary = {sp.id_to_piece(i): i for i in tokenizer.ordinary}
    is_alphabet = all(len(piece) == 1 for piece in ordinary)
    if not (tokenizer.keeps_text and (is_alphabet or tokenizer.is_byte_bpe)):
        return None
    options = dict(unk_token=sp.id_to_piece(sp.unk_id()), byte_fallback=tokenizer.has_bytes)
    vocab = {sp.id_to_piece(i): i for i in range(tokenizer.vocab_size)}
    bpe = tokenizers.models.BPE(vocab, all_merges(ordinary), fuse_unk=True, **options)
    library = tokenizers.Tokenizer(bpe)
    library.normalizer = tokenizers.normalizers.Replace(" ", SPACE_SIGN)
    decoders = tokenizers.decoders
    unmarked = decoders.Replace(SPACE_SIGN, " ")
    library.decoder = decoders.Sequence([unmarked, decoders.ByteFallback(), decoders.Fuse()])
    return library


def byte_level_bpe(tokenizer: Tiktoken) -> Any:
    """Return the same tokenizer of the package `tokenizers`, without its special tokens."""
    import tokenizers

    ranks = tokenizer.ranks.items()
    tokens = {"".join(BYTE_TO_CHAR[b] for b in token): rank for token, rank in ranks}
    # As in tiktoken, a word that is a token becomes it, even if no merges lead to it.
    vocab = tokens | tokenizer.special
    bpe = tokenizers.models.BPE(vocab, all_merges(tokens), ignore_merges=True)
    library = tokenizers.Tokenizer(bpe)
    if tokenizer.is_nfc:
        library.normalizer = tokenizers.normalizers.NFC()
    # Hugging Face's regex engine reads {1,3}+ as a repetition of {1,3}, not as possessive. Nothing
    # follows it in these patterns, so possessive or not makes no difference: remove the +.
    pattern = tokenizers.Regex(re.sub(r"(\{[\d,]+\})\+", r"\1", tokenizer.pattern))
    pre_tokenizers = tokenizers.pre_tokenizers
    split = pre_tokenizers.Split(pattern, "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


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


def with_class_and_eos(tokenizer: HuggingFace, files: dict[str, bytes]) -> bytes:
    """Return the tokenizer_config.json of a tokenizer.json, without which AutoTokenizer guesses.

    files: those that came with it, name -> content. Their settings are kept.
    """
    names = ("special_tokens_map.json", "tokenizer_config.json")
    named, config = (json.loads(files.get(name, "{}")) for name in names)
    made = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=tokenizer.eos)
    missing = {key: value for key, value in made.items() if key not in named | config}
    return json_bytes(config | missing) if missing else files[names[1]]


def answer_ends(tokenizer: Tokenizer, generation_config: bytes) -> bytes:
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
HF_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
HF_FILES += ["added_tokens.json", "vocab.json", "merges.txt"]
HF_FILES += ["chat_template.jinja", "generation_config.json"]
# All files that a tokenizer may have in a data set or a checkpoint.
TOKENIZER_FILES = [SentencePiece.file, Tiktoken.file, *HF_FILES]


# Usual names of the token that ends a document.
EOS = (
    r"</s>|[<\[][|｜/]?(?:eo[sd]|eos_token|end|stop|end[_▁]?of[_▁]?(?:text|sen|doc)\w*)[|｜]?[>\]]"
)
# Texts to which tokenizer.json and tokenizer.model of one folder may give different ids.
PROBES = ["a", " a", "x ---  y\n\n z", "中文，。 １２", "\t12 don't", "é e\u0301 😀"]


def find_tokenizer(spec: str, eos: str = "") -> Tokenizer:
    """Return the tokenizer that --tokenizer names, with this token as its eos.

    This is the folder of a data set, a checkpoint or any Hugging Face model, a file of
    SentencePiece or tiktoken, or a name known to tiktoken.
    """
    path = Path(spec)
    if path.is_dir():
        is_ours = (path / "meta.json").exists()
        tokenizer = load_tokenizer(path) if is_ours else from_hugging_face(path, eos)
    elif path.is_file() or path.suffix in (".model", ".tiktoken"):
        tokenizer = from_file(path, eos)
    else:
        tokenizer = Tiktoken.from_name(spec)
    if eos and tokenizer.special_id(eos) != tokenizer.eos_id:
        raise UserError(f"--eos={eos}: the eos of --tokenizer={spec} is another, and fixed")
    return tokenizer


def from_file(path: Path, eos: str, added: Added = ()) -> Tokenizer:
    """Return the tokenizer in a file of SentencePiece or tiktoken, known by its content."""
    if path.suffix == ".json":
        raise UserError(f"--tokenizer {path}: for a tokenizer.json, give its folder: {path.parent}")
    first = path.open("rb").readline(1000) if path.is_file() else b""
    if path.suffix == ".tiktoken" or re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", first):
        return Tiktoken.from_file(path)
    return SentencePiece(path, None, eos, added)


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
    if outside := [path for path in paths if not path.resolve().is_relative_to(tree)]:
        raise UserError(f"{outside[0]}: a link out of this folder: copy the file here")
    return paths


def from_hugging_face(folder: Path, eos: str = "") -> Tokenizer:
    """Return the tokenizer of a Hugging Face model folder: its tokenizer.json or tokenizer.model.

    The name of a special token in a text is ordinary text here, as everywhere in this program. An
    added token that is not special, such as <think>, is one token, whichever file names it.
    eos: its name; by default the one that the files name, or else the only one with a usual name.
    Raises UserError for damaged files.
    """
    path, model = folder / HuggingFace.file, folder / SentencePiece.file
    try:
        config = read_json(folder / "special_tokens_map.json")
        config |= read_json(folder / "tokenizer_config.json")
        named = config.get("eos_token") or ""
        named = named["content"] if isinstance(named, dict) else named
        added = added_tokens(folder, config)
        if path.exists() or not model.exists():
            content = read_json(path) or from_merges(folder, config)
            if not path.exists():
                named = named or "<|endoftext|>"  # GPT-2's, of whose kind these files are
            is_qwen2 = config.get("tokenizer_class") == "Qwen2Tokenizer"
            if is_qwen2 and BYTE_TO_CHAR[0x20] not in content["model"]["vocab"]:
                raise ValueError("saved as if it were Qwen2's own: copy that of the checkpoint")
            eos = eos or eos_of(folder, named, content, added)
            tokenizer = HuggingFace(content, eos, added=added)
        else:
            tokenizer = from_file(model, eos or named.replace(IM_END, ""), added)
            if isinstance(tokenizer, SentencePiece):
                has_bos = config.get("add_bos_token", True) and tokenizer.sp.bos_id() >= 0
                tokenizer.prefix = [tokenizer.sp.bos_id()] * has_bos
    except UserError:
        raise
    except Exception as e:  # `tokenizers` raises Exception itself for a damaged file
        reason = str(e) if type(e) in (ValueError, Exception) else repr(e)
        raise UserError(f"{folder}: its tokenizer files cannot be used: {reason}") from None
    with suppress(UserError):  # tokenizer.model may be missing, or of another library
        other = SentencePiece(model)
        differ = (t for t in PROBES if tokenizer.encode(t) != other.encode(t))
        if text := next(differ, None):
            note(f"{folder}: tokenizer.model gives {text!r} other ids: tokenizer.json is used")
    return tokenizer


def from_merges(folder: Path, config: dict) -> dict:
    """Return the tokenizer.json of a byte-level BPE in vocab.json and merges.txt, as GPT-2's."""
    from tokenizers import ByteLevelBPETokenizer

    files = [folder / name for name in ("vocab.json", "merges.txt")]
    if not all(path.is_file() for path in files):
        raise ValueError("no tokenizer.json or tokenizer.model: save_pretrained() writes one")
    add_space = bool(config.get("add_prefix_space"))
    return json.loads(ByteLevelBPETokenizer(*map(str, files), add_prefix_space=add_space).to_str())


def added_tokens(folder: Path, config: dict) -> list[dict]:
    """Return the added tokens that tokenizer_config.json describes, or added_tokens.json names."""
    tokens = config.get("added_tokens_decoder")
    if tokens is None:
        special = str([value for key, value in config.items() if "token" in key])
        ids = read_json(folder / "added_tokens.json").items()
        tokens = {i: {"content": name, "special": name in special} for name, i in ids}
    for token in tokens.values():
        token["special"] = token.get("special", False) or token["content"] in (IM_START, IM_END)
    return [tokens[i] for i in sorted(tokens, key=int)]


def eos_of(folder: Path, named: str, content: dict, added: list[dict]) -> str:
    """Return the eos that the files name, or else the only special token with a usual name."""
    tokens = [*content.get("added_tokens", []), *added]
    special = {token["content"] for token in tokens if token.get("special")}
    if named and (named != IM_END or "<|endoftext|>" not in special):
        return named
    names = {"<|endoftext|>"} if named else special or set(content["model"]["vocab"])
    usual = [name for name in names if re.fullmatch(EOS, name, re.IGNORECASE)]
    usual = usual or [name for name in names if name == "[SEP]"]
    if len(usual) != 1:
        problem = f"tokens with a usual name: {', '.join(sorted(usual)) or 'none'}"
        advice = "give --eos=NAME, which is added if it is new"
        raise ValueError(f"no file names the eos; {problem}: {advice}")
    if not named:
        note(f"{folder}: no file names the eos: {usual[0]} is taken; --eos=NAME takes another")
    return usual[0]


def read_json(path: Path) -> dict:
    """Return the object in a JSON file; {} if it does not exist. UserError if it is damaged."""
    try:
        return read_object(path) if path.exists() else {}
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: damaged ({getattr(e, 'strerror', e)})") from None
