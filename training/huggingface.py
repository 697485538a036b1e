"""Read and write Hugging Face's model format: config.json, and the weights as safetensors.

    to_config() and save_weights()
        make the config.json and the weights of a folder that transformers opens with
        AutoModelForCausalLM.from_pretrained(folder)
    from_pretrained(folder)
        reads a GPT2LMHeadModel, or the Llama, Qwen2 or Qwen3 ...ForCausalLM, in one file
        or in shards; also nanoGPT's ckpt.pt
    load_tensors(path)
        reads a file of torch.save() without executing anything in it

A config.json with a setting that model.py does not compute is refused, and the error names the
setting. No file that is read can execute code, or make this program read a file outside its folder.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save

from configurator import UserError
from hardware.disk import MANIFEST, check_regular_file, damage, read_object
from model import GPT, PRESETS, GPTConfig, rope_scaling

Weights = dict[str, torch.Tensor]  # name -> value

# --------------------------------------------------------------------------------------------------
# The names that each class of transformers uses, for reading and writing


@dataclass(frozen=True)
class Architecture:
    """The names and values that a class of transformers uses for GPTConfig and our parameters."""

    name: str
    model_type: str
    fixed: dict[str, Any]  # fields of GPTConfig that are the same in all models of the class
    keys: dict[str, str]  # each other field of GPTConfig -> its key in config.json
    # Key -> the default of transformers. (The classes have different defaults for the number of
    # key/value heads and head_dim. If a file lacks these, the shapes of its tensors give them.)
    defaults: dict[str, Any]
    modules: dict[str, str]  # our name of a module -> its name in the class; for qkv, three names


GPT2 = Architecture(
    "GPT2LMHeadModel", "gpt2", PRESETS["gpt2"],
    dict(
        vocab_size="vocab_size", block_size="n_positions", n_layer="n_layer", n_head="n_head",
        n_embd="n_embd", d_ff="n_inner", mlp="activation_function", bias="use_bias",
        tie_embeddings="tie_word_embeddings", norm_eps="layer_norm_epsilon", dropout="resid_pdrop",
    ),
    dict(
        n_inner=None, activation_function="gelu_new", use_bias=True, tie_word_embeddings=True,
        layer_norm_epsilon=1e-5, resid_pdrop=0.1,
    ),
    {
        "wte": "transformer.wte", "wpe": "transformer.wpe",
        "norm_f": "transformer.ln_f", "blocks": "transformer.h",
        "norm_1": "ln_1", "norm_2": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
    },
)  # fmt: skip
QWEN3 = Architecture(
    "Qwen3ForCausalLM", "qwen3", PRESETS["qwen3"],
    dict(
        vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers",
        n_head="num_attention_heads", n_kv_head="num_key_value_heads", n_embd="hidden_size",
        head_dim="head_dim", d_ff="intermediate_size", tie_embeddings="tie_word_embeddings",
        rope_theta="rope_theta", rope_scaling="rope_scaling", norm_eps="rms_norm_eps",
        dropout="attention_dropout",
    ),
    dict(
        num_key_value_heads=None, head_dim=None, attention_bias=False, mlp_bias=False,
        tie_word_embeddings=False, rope_theta=1e4, rms_norm_eps=1e-6, attention_dropout=0.0,
    ),
    {
        "wte": "model.embed_tokens", "norm_f": "model.norm", "blocks": "model.layers",
        "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
        "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
        "attn.proj": "self_attn.o_proj",
    },
)  # fmt: skip
QWEN2 = replace(QWEN3, name="Qwen2ForCausalLM", model_type="qwen2", fixed=PRESETS["qwen2"])
LLAMA = replace(
    QWEN3, name="LlamaForCausalLM", model_type="llama", fixed=PRESETS["llama"],
    keys=QWEN3.keys | dict(bias="attention_bias"),
)  # fmt: skip
OURS = Architecture(  # for shapes that no class computes
    "GPT", "gpt", {}, {field.name: field.name for field in fields(GPTConfig)},
    {field.name: field.default for field in fields(GPTConfig)}, {},
)  # fmt: skip
ONLY_OURS = "no transformers class computes this architecture: only this project loads it"
# Activation in a config.json of GPT-2 -> GPTConfig.mlp.
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
ORIGINAL_LENGTH = "original_max_position_embeddings"
# Kind of scaling -> the names of GPTConfig.rope_scaling's numbers in a config.json.
ROPE = {
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH],
}
# Settings with the only value that model.py computes: other settings that the four classes read,
# and the factors and caps of related classes. All other settings of a config.json are ignored, such
# as its author and the settings of training and sampling.
ONLY_VALUES = dict(
    scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False,
    is_causal=True, use_sliding_window=False, layer_types=[], partial_rotary_factor=1.0,
    quantization_config={}, auto_map={}, attn_logit_softcapping=None, final_logit_softcapping=None,
    logit_scale=1.0, logits_scaling=1.0, embedding_multiplier=1.0, residual_multiplier=1.0,
)  # fmt: skip


def architecture_of(c: GPTConfig) -> Architecture:
    """Return the architecture in which a model of this shape is written.

    It is the first whose config.json gives back c, in every field.
    """
    for a in (GPT2, LLAMA, QWEN2, QWEN3):
        with suppress(ValueError):
            if type(c)(**asdict(from_config(hf_settings(a, c)))) == c:
                return a
    return OURS


# --------------------------------------------------------------------------------------------------
# config.json


def to_config(c: GPTConfig, eos_id: int | None = None, bos_id: int | None = None) -> dict:
    """Return the content of config.json, as the transformers class of this architecture reads it.

    If no class fits, the architecture is called GPT, and GPTConfig's fields keep their own names.
    """
    a = architecture_of(c)
    content = {"architectures": [a.name], "model_type": a.model_type, "torch_dtype": "float32"}
    content |= {"bos_token_id": bos_id, "eos_token_id": eos_id}
    if a is OURS:
        content["note"] = ONLY_OURS
    return content | hf_settings(a, c)


def hf_settings(a: Architecture, c: GPTConfig) -> dict[str, Any]:
    """Return the settings of a config.json of this architecture for the shape c."""
    settings = {key: getattr(c, field) for field, key in a.keys.items()}
    settings["model_type"] = a.model_type
    if a is GPT2:
        settings["activation_function"] = "gelu_new" if c.mlp == "gelu_tanh" else c.mlp
        # n_ctx is for llama.cpp.
        settings |= dict(n_ctx=c.block_size, embd_pdrop=c.dropout, attn_pdrop=c.dropout)
    elif a is not OURS:
        settings |= dict(hidden_act="silu", attention_bias=c.bias, mlp_bias=c.bias)
        kind, numbers = rope_scaling(settings.pop("rope_scaling"))
        if kind:
            # transformers needs a length that is an int.
            numbers = [int(n) if n == int(n) else n for n in numbers]
            names = ROPE[kind]
            settings["rope_scaling"] = {"rope_type": kind} | dict(zip(names, numbers, strict=True))
    return settings


def from_config(d: dict) -> GPTConfig:
    """Return the GPTConfig that a config.json describes.

    Raises ValueError for an architecture that model.py does not have, for a value that a field does
    not accept, and for a setting that changes the logits in a way that model.py does not compute.
    """
    by_type = {a.model_type: a for a in (GPT2, LLAMA, QWEN2, QWEN3, OURS)}
    model_type = d.get("model_type")
    if model_type not in by_type:
        name = f"model_type={model_type!r} of {d.get('architectures')}"
        raise ValueError(f"{name} is not one of {', '.join(by_type)}")
    a = by_type[model_type]
    settings = a.defaults | {k: v for k, v in d.items() if v is not None}
    if a not in (GPT2, OURS):
        unpack_rope(settings)
    shape = a.fixed | {field: settings.pop(key) for field, key in a.keys.items()}
    if a is GPT2:
        shape["mlp"] = GELUS.get(shape["mlp"], f"activation_function {shape['mlp']}")
    # In GPTConfig, 0 means what null means in config.json.
    c = checked_shape({field: 0 if value is None else value for field, value in shape.items()})

    if a is OURS:
        unknown = [key for key in d.keys() - to_config(c).keys() if d[key] and key[0] != "_"]
        if unknown:  # a field of a later version, or of another program
            advice = "if it does not change the model, delete the line"
            raise ValueError(f"{min(unknown)}={d[min(unknown)]!r} is not supported: {advice}")
        return c
    expected = ONLY_VALUES | hf_settings(a, c)
    layer_types = settings.get("layer_types", [])
    settings["layer_types"] = [kind for kind in layer_types if kind != "full_attention"]
    for key in settings.keys() & expected.keys() - {"n_ctx", "embd_pdrop", "attn_pdrop"}:
        if settings[key] != expected[key] and (settings[key] or expected[key]):
            raise ValueError(f"{key}={settings[key]!r} is not supported, only {expected[key]!r}")
    return c


def unpack_rope(settings: dict[str, Any]) -> None:
    """Convert the settings of RoPE to GPTConfig's rope_theta and rope_scaling.

    transformers 5 has one object, rope_parameters, instead of the two. A scaling of the type
    "default" is none.
    """
    rope = settings.pop("rope_parameters", {})
    scaling = settings.pop("rope_scaling", None) or rope
    if rope and scaling != rope:
        raise ValueError("both rope_scaling and rope_parameters: not supported")
    numbers = {key: value for key, value in scaling.items() if value is not None}
    kind = numbers.pop("rope_type", numbers.pop("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in numbers:
            settings[key] = numbers.pop(key)
    if numbers.keys() != set(ROPE.get(kind, ["none"])):
        raise ValueError(f"rope_scaling={scaling!r} is not supported")
    spec = f"{kind}:{','.join(repr(numbers[name]) for name in ROPE[kind])}"
    settings["rope_scaling"] = "" if kind == "default" else spec


def checked_shape(shape: dict[str, Any]) -> GPTConfig:
    """Return GPTConfig(**shape). Raises ValueError if a value is of another type, or too large."""
    for field in fields(GPTConfig):
        value = shape.get(field.name, field.default)
        types = (int, float) if isinstance(field.default, float) else (type(field.default),)
        is_number = type(value) in (int, float)
        if type(value) not in types or (is_number and not 0 <= value <= 2**31):
            raise ValueError(f"{field.name}={value!r} is not accepted")
    c = GPTConfig(**shape)
    # RoPE's table has block_size * head_dim angles: at most a million positions of heads of 128.
    widest = max(c.vocab_size, c.d_ff, c.n_head * c.head_dim)
    if c.block_size * c.head_dim > 2**27 or widest * c.n_embd > 2**50:
        raise ValueError(f"no memory holds the tensors of {c}")
    return c


# --------------------------------------------------------------------------------------------------
# Weights

EMBEDDINGS = ("wte.weight", "lm_head.weight")  # model.py pads their rows


def hf_names(a: Architecture, name: str) -> list[str]:
    """Return the names of one of our parameters in the class.

    For qkv these are three if the class keeps q, k and v in three matrices, as Llama does.
    """
    module, leaf = name.rsplit(".", 1)
    prefix = ""
    if module.startswith("blocks."):
        blocks, layer, module = module.split(".", 2)
        prefix = f"{a.modules.get(blocks, blocks)}.{layer}."
    return [f"{prefix}{part}.{leaf}" for part in a.modules.get(module, module).split()]


def is_transposed(a: Architecture, name: str, w: torch.Tensor) -> bool:
    """Return whether the class stores this parameter as (in, out): GPT-2's Conv1D does."""
    return a is GPT2 and name.startswith("blocks.") and w.dim() == 2


def to_state(a: Architecture, c: GPTConfig, parameters: Weights) -> Weights:
    """Return our parameters as the class stores them, under its names.

    The padding of the vocabulary is removed, and GPT-2's matrices are transposed.
    """
    stored = {}
    for name, w in parameters.items():
        if name in EMBEDDINGS:
            w = w[: c.vocab_size]
        if is_transposed(a, name, w):
            w = w.t()
        keys = hf_names(a, name)
        heads = [n * c.head_dim for n in (c.n_head, c.n_kv_head, c.n_kv_head)]
        parts = w.split(heads) if len(keys) == 3 else [w]
        stored |= {key: part.contiguous() for key, part in zip(keys, parts, strict=True)}
    if a is GPT2 and not c.bias:
        # The class always has biases here. Zero biases compute the same as none.
        for key in [key for key in stored if ".h." in key or ".ln_f." in key]:
            stored[key.removesuffix("weight") + "bias"] = w.new_zeros(stored[key].size(-1))
    return stored


def from_state(c: GPTConfig, stored: Weights, parameters: Weights) -> Weights:
    """Return our parameters from those that the class stores: the inverse of to_state().

    parameters: those of the model, on the meta device.
    Raises ValueError, which names the tensor, if one is missing, if the model has no such tensor,
    if one does not match config.json, or if one is not finite: Saver could not save it.
    """
    a = architecture_of(c)
    unused = dict(stored)
    if a is GPT2 and "wte.weight" in stored:  # a GPT2Model, which is the class without its head
        unused = {k if k == "lm_head.weight" else f"transformer.{k}": w for k, w in stored.items()}
    state = {}
    for name, ours in parameters.items():
        keys = hf_names(a, name)
        if missing := [key for key in keys if key not in unused]:
            raise ValueError(f"there is no tensor {missing[0]}")
        w = torch.cat([unused.pop(key) for key in keys])
        if is_transposed(a, name, w):
            w = w.t()
        rows = c.vocab_size if name in EMBEDDINGS else len(ours)
        shape = (rows, *ours.shape[1:])
        if w.shape != shape or not w.is_floating_point():
            found = f"{w.dtype} of shape {tuple(w.shape)}, by config.json a float of shape {shape}"
            raise ValueError(f"{', '.join(keys)}: {found}")
        w = w.float().contiguous()
        state[name] = F.pad(w, (0, 0, 0, len(ours) - rows)) if name in EMBEDDINGS else w
        if not state[name].isfinite().all():
            raise ValueError(f"{', '.join(keys)}: NaN or infinity")
    head = unused.pop("lm_head.weight", None) if c.tie_embeddings else None
    if head is not None and not torch.equal(head.float(), state["wte.weight"][: c.vocab_size]):
        problem = "tie_word_embeddings is true in config.json or by default"
        raise ValueError(
            f"{problem}, but lm_head.weight is another matrix: if it is right, set false"
        )
    constants = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # of old versions
    for key, w in unused.items():
        if not key.endswith(constants) and not (key.endswith(".bias") and not w.any()):
            raise ValueError(f"{key} belongs to no part of this architecture")
    return state


# --------------------------------------------------------------------------------------------------
# Folders

NANOGPT = ".pt"  # suffix of a checkpoint of nanoGPT, which is a file


def save_weights(a: Architecture, c: GPTConfig, parameters: Weights, folder: Path) -> None:
    """Write model.safetensors to a folder. Its config.json is to_config(c).

    a: architecture_of(c). parameters: our name -> value, on the CPU. A matrix that wte and lm_head
    share is stored once, as wte.weight.
    """
    # Not save_file(): its files can only be read by their owner (safetensors 0.8.0).
    stored = {name: w.detach() for name, w in to_state(a, c, parameters).items()}
    (folder / "model.safetensors").write_bytes(save(stored, metadata={"format": "pt"}))


def unverified(path: Path) -> str:
    """Return a remark for the user on a model without a manifest; "" if it has one."""
    return "" if (path / MANIFEST).exists() else f"not verified: it has no {MANIFEST}"


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn the errors that a damaged file can cause into a UserError of one line, with its path."""
    try:
        yield
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or " ".join(str(e).split())
        raise UserError(f"{path}: {reason}") from None
    except (LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as e:
        raise UserError(f"{path}: damaged ({type(e).__name__}: {e})") from None


def read_shape(path: str | Path) -> GPTConfig:
    """Return the shape of the model that from_pretrained() returns. Raises UserError like it."""
    path = Path(path)
    if path.suffix == NANOGPT and path.is_file():
        return read_nanogpt(path)[0]
    if not (path / "config.json").exists():
        problem = "not a model folder on this disk: it has no config.json"
        if (path / "adapter_config.json").exists():
            advice = "save the whole model: merge_and_unload().save_pretrained(FOLDER)"
            raise UserError(f"{path}: a LoRA adapter of peft, without its model; {advice}")
        raise UserError(f"{path}: {problem}; train it or copy it first: nothing is downloaded")
    with file_errors(path / "config.json"):
        return from_config(read_object(path / "config.json"))


def from_pretrained(path: str | Path, verify: bool = True, **overrides: Any) -> GPT:
    """Return the model of a folder, or of nanoGPT's ckpt.pt, on the CPU in fp32.

    verify: False if another process compares the files with their manifest. overrides: fields of
    GPTConfig, such as dropout. Raises UserError if a file is missing, damaged or not safe to read,
    or has a setting that model.py does not compute.

    A folder that this program wrote has a manifest, by which its files are verified. Folders of
    other programs have none: unverified() says so.
    """
    path = Path(path)
    names = ("config.json", "model.safetensors")
    has_manifest = verify and (path / MANIFEST).exists()
    if has_manifest and (problem := damage(path, names, names)):
        raise UserError(f"{problem}; if you changed it yourself, delete {MANIFEST}")
    nanogpt = path.suffix == NANOGPT
    config, stored = read_nanogpt(path) if nanogpt else (read_shape(path), read_safetensors(path))
    with file_errors(path if nanogpt else path / "model.safetensors"):
        # First, so that no file makes this program build more layers than it has weights for.
        if config.n_layer > len(stored):
            raise ValueError(f"there is no tensor of layer {len(stored)}")
        with torch.device("meta"):  # `state` has the weights: they are not copied
            model = GPT(replace(config, **overrides))
        state = from_state(config, stored, dict(model.named_parameters()))
    # Not strict, because `state` does not have a tied head, which is wte.
    model.load_state_dict(state, strict=False, assign=True)
    if config.tie_embeddings:
        model.lm_head.weight = model.wte.weight
    return model


def read_safetensors(folder: Path) -> Weights:
    """Return the tensors of model.safetensors, or of the shards that its index names."""
    names = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not (folder / names[0]).exists():
        if not index.exists():
            advice = "save the model again with transformers; pytorch_model.bin could execute code"
            raise UserError(f"{folder}: there is no model.safetensors: {advice}")
        with file_errors(index):
            names = sorted({str(name) for name in read_object(index)["weight_map"].values()})
            for name in names:
                if not name or Path(name).name != name or not name.isprintable():
                    raise ValueError(f"it names {name[:80]!r}, a file outside this folder")
    stored = {}
    for name in names:
        path = folder / name
        with file_errors(path):
            check_regular_file(path)
            stored |= load_file(path) if is_utf8(path) else load(path.read_bytes())
    return stored


def read_nanogpt(path: Path) -> tuple[GPTConfig, Weights]:
    """Return the shape and the weights of a checkpoint that nanoGPT's train.py wrote.

    The weights have the names and shapes of Hugging Face's GPT2LMHeadModel. Raises UserError if the
    file is not such a checkpoint.
    """
    with file_errors(path):
        check_regular_file(path)
        saved = load_tensors(path)
        args = saved["model_args"]
        sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
        config = checked_shape(PRESETS["gpt2"] | args | {name: args[name] for name in sizes})
        # torch.compile puts the prefix _orig_mod. before every name.
        state = {key.removeprefix("_orig_mod."): w for key, w in saved["model"].items()}
        return config, {k: w.t() if ".h." in k and w.dim() == 2 else w for k, w in state.items()}


def is_utf8(path: Path) -> bool:
    """Return whether the bytes of a path are UTF-8: safetensors and mmap open no other files.

    On an old disk with names in GBK they are not, and Python itself reads the file.
    """
    return os.fsencode(path) == str(path).encode(errors="replace")


def load_tensors(path: Path, mmap: bool = False) -> Any:
    """Return the content of a file of torch.save(). Raises ValueError or OSError.

    Nothing in it is executed: with weights_only=True, torch.load reads tensors and numbers only.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, MemoryError):
        raise
    except Exception:
        # A damaged pickle can raise any exception. The exception for a pickle with code explains
        # how to run it: so no exception is repeated.
        raise ValueError("it is damaged, or holds more than tensors and numbers") from None
