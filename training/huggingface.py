"""A model as other tools write it, out and in: config.json and safetensors in the names of Hugging Face's classes.

    save_pretrained(model.config, dict(model.named_parameters()), folder)     -> AutoModelForCausalLM.from_pretrained(folder)
    from_pretrained(folder)     <- a GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM, in one file or in shards; nanoGPT's ckpt.pt

What a config.json asks for and model.py does not compute is refused by its name. Nothing that is read can execute anything, and
no file can name one outside its folder.
"""

import json
import os
import pickle
import shutil
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from hardware.disk import MANIFEST, damage, only_plain
from model import GPT, PRESETS, GPTConfig

# ---------------------------------------------------------------------------------------------------------------------
# config.json


def hf_class(c: GPTConfig) -> str | None:
    """The transformers class that computes exactly this architecture, or None."""
    if (c.pos, c.norm, c.qk_norm) == ("learned", "layernorm", False) and c.mlp in ("gelu", "gelu_tanh"):
        same_heads = c.n_kv_head == c.n_head and c.head_dim * c.n_head == c.n_embd
        return "GPT2LMHeadModel" if same_heads else None
    if (c.pos, c.norm, c.mlp) == ("rope", "rmsnorm", "swiglu"):
        if c.qk_norm:
            return None if c.bias else "Qwen3ForCausalLM"
        return "LlamaForCausalLM"
    return None


def caveat(c: GPTConfig) -> str:
    """Who can't open a checkpoint of this shape; empty where all can."""
    if hf_class(c) is None:
        return ONLY_OURS
    if hf_class(c) == "LlamaForCausalLM" and c.n_embd % c.n_head:
        return f"transformers 5 refuses it: n_embd={c.n_embd} is no multiple of n_head={c.n_head}"
    if hf_class(c) == "GPT2LMHeadModel" and c.d_ff != 4 * c.n_embd:
        return "llama.cpp cannot load it: its GPT-2 has d_ff = 4 n_embd"
    return ""


ONLY_OURS = "no transformers class computes this architecture: only this project's huggingface.py loads it"

# Our fields in the words of the classes, and what the classes take for a field that a config.json lacks.
GPT2_KEYS = dict(
    vocab_size="vocab_size", block_size="n_positions", n_layer="n_layer", n_head="n_head", n_embd="n_embd", d_ff="n_inner",
    bias="use_bias", tie_embeddings="tie_word_embeddings", norm_eps="layer_norm_epsilon", dropout="resid_pdrop",
)  # fmt: skip
LLAMA_KEYS = dict(
    vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers", n_head="num_attention_heads",
    n_kv_head="num_key_value_heads", n_embd="hidden_size", head_dim="head_dim", d_ff="intermediate_size", bias="attention_bias",
    tie_embeddings="tie_word_embeddings", rope_theta="rope_theta", norm_eps="rms_norm_eps", dropout="attention_dropout",
)  # fmt: skip
GPT2_DEFAULTS = dict(d_ff=0, bias=True, tie_embeddings=True, norm_eps=1e-5, dropout=0.1)
LLAMA_DEFAULTS = dict(
    n_kv_head=0, head_dim=0, bias=False, tie_embeddings=False, rope_theta=1e4, norm_eps=1e-6, dropout=0.0
)
CLASSES = {  # name: (preset, model_type, keys, defaults)
    "GPT2LMHeadModel": ("gpt2", "gpt2", GPT2_KEYS, GPT2_DEFAULTS),
    "LlamaForCausalLM": ("llama", "llama", LLAMA_KEYS, LLAMA_DEFAULTS),
    "Qwen3ForCausalLM": ("qwen3", "qwen3", LLAMA_KEYS, LLAMA_DEFAULTS | dict(n_kv_head=32, head_dim=128)),
}
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}  # theirs: ours


def to_config(c: GPTConfig, eos_id: int | None = None, bos_id: int | None = None) -> dict:
    """config.json as the fitting transformers class reads it; our own fields, under the architecture GPT, if none fits."""
    name = hf_class(c)
    shared = {
        "architectures": [name or "GPT"],
        "torch_dtype": "float32",
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
    }
    if name is None:
        return shared | {"note": ONLY_OURS, "model_type": "gpt"} | asdict(c)
    _, model_type, keys, _ = CLASSES[name]
    shared |= {"model_type": model_type} | {theirs: getattr(c, ours) for ours, theirs in keys.items()}
    if name == "GPT2LMHeadModel":
        activation = "gelu_new" if c.mlp == "gelu_tanh" else "gelu"
        more = {"activation_function": activation, "n_ctx": c.block_size}  # n_ctx is for llama.cpp
        return shared | more | {"embd_pdrop": c.dropout, "attn_pdrop": c.dropout}
    return shared | {"hidden_act": "silu", "mlp_bias": c.bias}


# What says nothing of the logits: who wrote it, how it was initialised and trained (dropout is --dropout's), how text is made with
# it, what other heads would do.
HARMLESS = set(
    """
    architectures model_type torch_dtype dtype transformers_version _name_or_path initializer_range note tokenizer_class prefix
    use_cache pretraining_tp gradient_checkpointing use_bfloat16 torchscript _attn_implementation attn_implementation
    return_dict return_dict_in_generate output_hidden_states output_attentions output_scores output_past
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id task_specific_params
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    num_labels _num_labels id2label label2id problem_type finetuning_task predict_special_tokens is_decoder
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    n_ctx embd_pdrop attn_pdrop reorder_and_upcast_attn max_window_layers sliding_window
    is_llama_config transformers.js_config unsloth_version unsloth_fixed
    """.split()
)


def from_config(d: dict) -> GPTConfig:
    """GPTConfig of a config.json. ValueError for another architecture, and for a setting that is neither known nor empty."""
    types = {model_type: name for name, (_, model_type, *_) in CLASSES.items()}
    names = d.get("architectures") or types.get(d.get("model_type"), "?")
    name = names[0] if isinstance(names, list) else names
    if name == "GPT":
        found = {f.name: d[f.name] for f in fields(GPTConfig)}
        refuse_more({k: v for k, v in d.items() if k not in HARMLESS | found.keys() | {"tie_word_embeddings"}})
    elif name in CLASSES:
        found = in_our_words(d, name)
    else:
        raise ValueError(f"architecture {name!r} is none of {', '.join(CLASSES)}")
    return checked(found)


def checked(found: dict[str, Any]) -> GPTConfig:
    for f in fields(GPTConfig):
        if f.name in found and not accepts(f, found[f.name]):
            raise ValueError(f"{f.name}={found[f.name]!r} is not accepted")
    c = GPTConfig(**found)
    if c.block_size * c.head_dim > 2**27:  # of RoPE's table: a million positions of 128
        raise ValueError(f"block_size={c.block_size} and head_dim={c.head_dim} are not accepted")
    return c


def accepts(f: Field, value: Any) -> bool:
    """Is this a value for a field of GPTConfig? Numbers are not negative, and of a size that a model can have."""
    if choices := get_args(f.type):
        return value in choices
    if isinstance(f.default, bool) or isinstance(value, bool):
        return isinstance(f.default, bool) and isinstance(value, bool)
    most = 2**22 if f.name == "block_size" else 2**31  # RoPE has a table of all positions
    least = 1 if f.name == "rope_theta" else 0
    return isinstance(value, int | float if isinstance(f.default, float) else int) and least <= value <= most


def refuse_more(rest: dict[str, Any], must_be: dict[str, Any] | None = None) -> None:
    """ValueError for a setting that was not understood, unless it is empty, or what it must be."""
    for key, value in rest.items():
        if value != must_be[key] if must_be and key in must_be else value not in (None, False, [], {}):
            raise ValueError(f"{key}={value!r} is not supported")


def in_our_words(d: dict, name: str) -> dict:
    """GPTConfig's fields from a config.json of one of the CLASSES."""
    preset, _, keys, defaults = CLASSES[name]
    rest = {k: v for k, v in d.items() if k not in HARMLESS}
    rope = rest.pop("rope_parameters", None) or {}  # where transformers 5 has rope_theta, and what was rope_scaling
    plain = {k: v for k, v in rope.items() if k in ("rope_theta", "partial_rotary_factor")}
    rest |= plain
    scaling = rest.pop("rope_scaling", None) or {k: v for k, v in rope.items() if k not in plain}
    if {k: v for k, v in scaling.items() if k not in ("type", "rope_type") or v != "default"}:
        rest["rope_scaling"] = scaling
    given = {ours: value for ours, theirs in keys.items() if (value := rest.pop(theirs, None)) is not None}
    if missing := [theirs for ours, theirs in keys.items() if ours not in defaults | given]:
        raise ValueError(f"there is no {missing[0]}")
    found = PRESETS[preset] | defaults | given
    if name == "GPT2LMHeadModel" and (gelu := rest.get("activation_function", "gelu_new")) in GELUS:
        rest.pop("activation_function", None)
        found["mlp"] = GELUS[gelu]

    must_be = dict(hidden_act="silu", scale_attn_weights=True, partial_rotary_factor=1.0)  # where they are given
    if name == "LlamaForCausalLM" and rest.pop("mlp_bias", False) != found["bias"]:
        raise ValueError("attention_bias without mlp_bias, or the reverse, is not supported")
    if name == "Qwen3ForCausalLM" and found["bias"]:
        raise ValueError("attention_bias=True is not supported")
    rest["layer_types"] = [kind for kind in rest.get("layer_types") or [] if kind != "full_attention"]
    refuse_more(rest, must_be)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Weights: our parameter names in the terms of each class

HF_GPT2 = {"wte": "transformer.wte", "wpe": "transformer.wpe", "norm_f": "transformer.ln_f", "blocks": "transformer.h"} | {
    "norm_1": "ln_1", "norm_2": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
HF_LLAMA = {"wte": "model.embed_tokens", "norm_f": "model.norm", "blocks": "model.layers"} | {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "attn.proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
    "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
}  # fmt: skip


def hf_names(c: GPTConfig, name: str) -> list[str]:
    """The Hugging Face name of one of our parameters; three for the qkv of a Llama, which has them apart."""
    kind = hf_class(c)
    if kind is None:
        return [name]
    table = HF_GPT2 if kind == "GPT2LMHeadModel" else HF_LLAMA
    module, leaf = name.rsplit(".", 1)
    prefix = ""
    if module.startswith("blocks."):
        _, layer, module = module.split(".", 2)
        prefix = f"{table['blocks']}.{layer}."
    return [f"{prefix}{part}.{leaf}" for part in table.get(module, module).split()]


def to_state(c: GPTConfig, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our parameters as the fitting class stores them: without vocabulary padding, GPT-2's matrices transposed."""
    gpt2 = hf_class(c) == "GPT2LMHeadModel"
    heads = [n * c.head_dim for n in (c.n_head, c.n_kv_head, c.n_kv_head)]
    out = {}
    for name, w in state.items():
        if name in ("wte.weight", "lm_head.weight"):
            w = w[: c.vocab_size]
        elif gpt2 and name.startswith("blocks.") and w.dim() == 2:
            w = w.t()  # GPT-2's Conv1D holds (in, out)
        names = hf_names(c, name)
        for key, part in zip(names, w.split(heads) if len(names) == 3 else [w], strict=True):
            out[key] = part.contiguous()
            if gpt2 and not c.bias and (".h." in key or "ln_f" in key):  # the class has biases: zeros compute the same
                out[key.removesuffix("weight") + "bias"] = w.new_zeros(w.size(-1))
    return out


def shapes(c: GPTConfig, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters that c asks for, without their memory. ValueError for a tensor that is not stored.

    One layer shows the names of all: no model is built that is larger than the file.
    """

    def build(n_layer: int) -> dict[str, torch.Tensor]:
        small = dict(block_size=1) if c.pos == "rope" else {}
        try:
            with torch.device("meta"):
                return dict(GPT(replace(c, n_layer=n_layer, **small)).named_parameters())
        except (RuntimeError, OverflowError):
            raise ValueError("config.json asks for a tensor of more than 2^63 bytes") from None

    for name in build(1):
        for layer in range(c.n_layer if name.startswith("blocks.0.") else 1):
            for key in hf_names(c, name.replace("blocks.0.", f"blocks.{layer}.")):
                if key not in stored:
                    raise ValueError(f"there is no tensor {key}")
    return build(c.n_layer)


def from_state(c: GPTConfig, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of to_state. ValueError that names a tensor that is missing, too many, or not what config.json says."""
    gpt2 = hf_class(c) == "GPT2LMHeadModel"
    if gpt2 and "wte.weight" in stored:  # of a GPT2Model, without its head
        stored = {k if k == "lm_head.weight" else f"transformer.{k}": w for k, w in stored.items()}
    parameters = shapes(c, stored)
    wanted = to_state(c, parameters)
    zero = {k for k in wanted if gpt2 and not c.bias and k.endswith("bias")}  # the class has them, c has not
    for key, like in wanted.items():
        if key in stored and (stored[key].shape != like.shape or not stored[key].is_floating_point()):
            found = f"{tuple(stored[key].shape)} of {stored[key].dtype}"
            raise ValueError(f"{key} is {found}, config.json wants {tuple(like.shape)}")
    buffers = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # constants that old versions stored
    for key in sorted(stored.keys() - wanted.keys()):
        tied = key == "lm_head.weight" and torch.equal(stored[key], stored[hf_names(c, "wte.weight")[0]])
        if not (tied or key.endswith(buffers)):
            raise ValueError(f"{key} belongs to no part of this architecture, or is not what it is tied to")
    if lost := [k for k in sorted(zero & stored.keys()) if stored[k].any()]:
        raise ValueError(f"{lost[0]} is not 0, but config.json says use_bias=false")

    state = {}
    for name, like in parameters.items():
        w = torch.cat([stored[key] for key in hf_names(c, name)])
        if gpt2 and name.startswith("blocks.") and w.dim() == 2:
            w = w.t()
        state[name] = F.pad(w, (0, 0, 0, like.size(0) - w.size(0))) if name in ("wte.weight", "lm_head.weight") else w
    if c.tie_embeddings:
        state["lm_head.weight"] = state["wte.weight"]
    return state


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def save_pretrained(
    c: GPTConfig,
    state: dict[str, torch.Tensor],
    folder: str | Path,
    eos_id: int | None = None,
    bos_id: int | None = None,
) -> None:
    """Write config.json and model.safetensors. state: our parameters by name, a tied matrix once, as wte.weight."""
    config, weights = Path(folder) / "config.json", Path(folder) / "model.safetensors"
    config.write_text(json.dumps(to_config(c, eos_id, bos_id), indent=2) + "\n", encoding="utf-8")
    tensors, about = {k: w.detach().cpu() for k, w in to_state(c, state).items()}, {"format": "pt"}
    if is_utf8(weights):
        save_file(tensors, weights, about)
    else:
        weights.write_bytes(save(tensors, about))
    shutil.copymode(config, weights)  # save_file makes it readable by its owner alone


def is_utf8(path: Path) -> bool:
    """safetensors opens no others, as on an old GBK disk: there the bytes go through Python."""
    try:
        return bool(os.fsencode(path).decode("utf-8"))
    except UnicodeDecodeError:
        return False


def unverified(path: Path) -> str:
    """What to tell of a model whose files were taken as they are; empty for one of ours."""
    return "" if (path / MANIFEST).exists() else f"not verified: it has no {MANIFEST}"


def is_nanogpt(path: str | Path) -> bool:
    """A ckpt.pt, or a folder that holds one and no config.json."""
    path = Path(path)
    return path.suffix == ".pt" or ((path / "ckpt.pt").exists() and not (path / "config.json").exists())


def from_pretrained(path: str | Path, **overrides) -> GPT:
    """The model of a folder, or of nanoGPT's ckpt.pt, on the CPU in fp32; overrides: GPTConfig fields, such as dropout.

    ValueError, in one line, for a file that is missing, damaged or not safe to read, or asks for what we do not compute.
    A folder of ours has a manifest, by which its files are verified; nobody else's has: unverified() says so.
    """
    path, names = Path(path), ("config.json", "model.safetensors")
    if (path / MANIFEST).exists() and (wrong := damage(path, names, names)):
        own = f"if you changed it yourself, delete {MANIFEST}"
        raise ValueError(f"{wrong}: it was changed after it was written; {own}")
    try:
        if is_nanogpt(path):
            source = path.name if path.suffix == ".pt" else "ckpt.pt"
            config, stored = read_nanogpt(path if path.suffix == ".pt" else path / source)
        else:
            source = "config.json"
            only_plain(path / source)
            config = from_config(json.loads((path / source).read_text(encoding="utf-8")))
            source = "model.safetensors"
            stored = read_safetensors(path)
        state = from_state(config, stored)
        model = GPT(replace(config, **overrides))
        model.load_state_dict(state, strict=True)
        return model
    except OSError as e:
        raise ValueError(f"{source}: {e.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as e:
        what = str(e) if type(e) is ValueError else f"{type(e).__name__}: {e}"
        raise ValueError(f"{source}: {' '.join(what.split())}") from None


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of model.safetensors, or of the shards that its index names."""
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.exists() and not (folder / names[0]).exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    elif not (folder / names[0]).exists() and list(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            "the weights are pickled (pytorch_model.bin), which could execute anything: only safetensors are read; in "
            "transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW) writes them"
        )
    stored = {}
    for name in names:
        if name != Path(str(name)).name or not name.endswith(".safetensors"):
            raise ValueError(f"the index names {name!r}, which is no .safetensors file in this folder")
        shard = "" if name == "model.safetensors" else f"{name}: "
        if not (folder / name).is_file():
            raise ValueError(f"{shard}No such file")
        try:
            path = folder / name
            stored |= load_file(path) if is_utf8(path) else load(path.read_bytes())
        except SafetensorError as e:
            raise ValueError(f"{shard}truncated, or no safetensors file ({e})") from None
    return stored


def read_nanogpt(path: Path) -> tuple[GPTConfig, dict[str, torch.Tensor]]:
    """Shape and weights of a checkpoint of nanoGPT's train.py, the latter as Hugging Face's GPT-2 has them."""
    only_plain(path)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError:  # torch's own words explain how to run the code all the same
        raise ValueError("no checkpoint of nanoGPT: it is damaged, or holds more than tensors and numbers") from None
    except Exception as e:  # what a damaged pickle raises is anything
        raise ValueError(f"no checkpoint of nanoGPT ({type(e).__name__}: {' '.join(str(e).split())[:200]})") from None
    args = dict(saved["model_args"])
    shape = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size"}
    if odd := sorted((args.keys() ^ shape) - {"bias", "dropout"}):
        raise ValueError(f"model_args: {odd[0]} is missing, or is none of nanoGPT's")
    state = {k.removeprefix("_orig_mod."): w for k, w in saved["model"].items()}  # torch.compile's
    return checked(PRESETS["gpt2"] | args), {k: w.t() if ".h." in k and w.dim() == 2 else w for k, w in state.items()}
