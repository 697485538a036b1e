"""A model as other tools write it, out and in: config.json and safetensors in the names of Hugging Face's classes.

    save_pretrained(model.config, model.state_dict(), folder)     -> AutoModelForCausalLM.from_pretrained(folder)
    from_pretrained(folder)                                       GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM, in one
                                                                  file or several; nanoGPT's ckpt.pt

What a config.json asks for and model.py does not compute is refused by its name. Nothing that is read can execute anything, and
no file outside the folder is opened.
"""

import json
import pickle
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

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
    "Qwen3ForCausalLM": ("qwen3", "qwen3", LLAMA_KEYS, LLAMA_DEFAULTS | dict(head_dim=128)),
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


# What says nothing of what is computed: who wrote it, how it was initialised, how text is made of it, other heads of a class.
HARMLESS = """
    architectures model_type torch_dtype dtype transformers_version _name_or_path use_cache initializer_range pretraining_tp
    bos_token_id eos_token_id pad_token_id unk_token_id task_specific_params n_ctx max_window_layers sliding_window
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj reorder_and_upcast_attn
    is_llama_config transformers.js_config gradient_checkpointing embd_pdrop attn_pdrop note
""".split()


def from_config(d: dict) -> GPTConfig:
    """GPTConfig of a config.json. ValueError for another architecture, and for a setting that is neither known nor empty."""
    types = {model_type: name for name, (_, model_type, *_) in CLASSES.items()}
    name = (d.get("architectures") or [types.get(d.get("model_type"), "?")])[0]
    if name == "GPT":
        found = {f.name: d[f.name] for f in fields(GPTConfig)}
    elif name in CLASSES:
        found = in_our_words(d, name)
    else:
        raise ValueError(f"config.json: architecture {name!r} is none of {', '.join(CLASSES)}")
    for f in fields(GPTConfig):
        wanted = (int, float) if isinstance(f.default, float) else type(f.default)
        if not isinstance(found.get(f.name, f.default), wanted):
            raise ValueError(f"config.json: {f.name}={found[f.name]!r} is not accepted")
    return GPTConfig(**found)


def in_our_words(d: dict, name: str) -> dict:
    """GPTConfig's fields from a config.json of one of the CLASSES."""
    preset, _, keys, defaults = CLASSES[name]
    rest = {k: v for k, v in d.items() if k not in HARMLESS}
    rope = rest.pop("rope_parameters", None) or {}  # where transformers 5 has rope_theta, and what was rope_scaling
    rest |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    scaling = rest.pop("rope_scaling", None) or {k: v for k, v in rope.items() if k != "rope_theta"}
    if scaling and scaling != {"rope_type": "default"}:
        rest["rope_scaling"] = scaling
    given = {ours: value for ours, theirs in keys.items() if (value := rest.pop(theirs, None)) is not None}
    if missing := [theirs for ours, theirs in keys.items() if ours not in defaults | given]:
        raise ValueError(f"config.json: there is no {missing[0]}")
    found = PRESETS[preset] | defaults | given
    if name == "GPT2LMHeadModel" and (gelu := rest.get("activation_function", "gelu_new")) in GELUS:
        rest.pop("activation_function", None)
        found["mlp"] = GELUS[gelu]

    must_be = dict(hidden_act="silu", mlp_bias=found["bias"], scale_attn_weights=True)  # where they are given
    rest["layer_types"] = [kind for kind in rest.get("layer_types") or [] if kind != "full_attention"]
    for key, value in rest.items():
        if value != must_be[key] if key in must_be else value not in (None, False, [], {}):
            raise ValueError(f"config.json: {key}={value!r} is not supported")
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


def from_state(model: GPT, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of to_state. ValueError that names the first tensor that is missing, too many, or of another shape."""
    c, state = model.config, {}
    gpt2 = hf_class(c) == "GPT2LMHeadModel"
    if gpt2 and "wte.weight" in stored:  # of a GPT2Model, without its head
        stored = {k if k == "lm_head.weight" else f"transformer.{k}": w for k, w in stored.items()}
    for key, like in to_state(c, dict(model.named_parameters())).items():
        if gpt2 and not c.bias and key.endswith("bias"):
            continue
        if key not in stored:
            raise ValueError(f"there is no tensor {key}")
        if stored[key].shape != like.shape or not stored[key].is_floating_point():
            found = f"{tuple(stored[key].shape)} of {stored[key].dtype}"
            raise ValueError(f"{key} is {found}, config.json wants {tuple(like.shape)}")
    used = {key for name in model.state_dict() for key in hf_names(c, name)}
    buffers = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # old versions stored these constants
    if more := sorted(k for k in stored.keys() - used if not (k.endswith(buffers) or (gpt2 and k.endswith("bias")))):
        raise ValueError(f"{more[0]} belongs to no part of this architecture")
    for name, like in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_embeddings:
            state[name] = state["wte.weight"]
            continue
        w = torch.cat([stored[key] for key in hf_names(c, name)])
        if gpt2 and name.startswith("blocks.") and w.dim() == 2:
            w = w.t()
        state[name] = F.pad(w, (0, 0, 0, like.size(0) - w.size(0))) if name in ("wte.weight", "lm_head.weight") else w
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
    (Path(folder) / "config.json").write_text(json.dumps(to_config(c, eos_id, bos_id), indent=2) + "\n")
    weights = {k: w.detach().cpu() for k, w in to_state(c, state).items()}
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes it readable by its owner alone
    shutil.copymode(Path(folder) / "config.json", Path(folder) / "model.safetensors")


def is_nanogpt(path: str | Path) -> bool:
    """A ckpt.pt, or a folder that holds one and no config.json."""
    path = Path(path)
    return path.suffix == ".pt" or ((path / "ckpt.pt").exists() and not (path / "config.json").exists())


def from_pretrained(path: str | Path, **overrides) -> GPT:
    """The model of a folder, or of nanoGPT's ckpt.pt, on the CPU in fp32; overrides: GPTConfig fields, such as dropout.

    ValueError, in one line, for a file that is missing, damaged or not safe to read, or asks for what we do not compute.
    """
    path = Path(path)
    if is_nanogpt(path):
        config, stored, source = read_nanogpt(path if path.suffix == ".pt" else path / "ckpt.pt")
    else:
        try:
            config = from_config(json.loads((path / "config.json").read_text(encoding="utf-8")))
        except OSError as e:
            raise ValueError(f"config.json: {e.strerror}") from None
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as e:
            raise ValueError(f"config.json: {type(e).__name__}: {e}") from None
        stored, source = read_safetensors(path), "model.safetensors"
    if config.n_layer > len(stored):
        raise ValueError(f"{source}: {len(stored)} tensors are too few for {config.n_layer} layers")
    model = GPT(replace(config, **overrides))
    try:
        model.load_state_dict(from_state(model, stored), strict=True)
    except ValueError as e:
        raise ValueError(f"{source}: {e}") from None
    return model


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of model.safetensors, or of the shards that its index names."""
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if not (folder / names[0]).exists():
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise ValueError(f"{index.name}: {type(e).__name__}: {e}") from None
        elif list(folder.glob("pytorch_model*.bin")):
            raise ValueError(
                "its weights are pickled (pytorch_model.bin), which could execute anything: only safetensors are read; in "
                "transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW) writes them"
            )
    stored = {}
    for name in names:
        if name != Path(str(name)).name or not name.endswith(".safetensors"):
            raise ValueError(f"{index.name}: {name!r} is no .safetensors file in this folder")
        if not (folder / name).is_file():
            raise ValueError(f"{name}: No such file")
        try:
            stored |= load_file(folder / name)
        except SafetensorError as e:
            raise ValueError(f"{name}: truncated, or no safetensors file ({e})") from None
    return stored


def read_nanogpt(path: Path) -> tuple[GPTConfig, dict[str, torch.Tensor], str]:
    """Shape and weights of a checkpoint of nanoGPT's train.py, the latter as Hugging Face's GPT-2 has them."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        args, state = saved["model_args"], saved["model"]
        config = GPTConfig(**PRESETS["gpt2"] | {f.name: args[f.name] for f in fields(GPTConfig) if f.name in args})
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as e:
        raise ValueError(f"{path.name}: no checkpoint of nanoGPT ({str(e).splitlines()[0]})") from None
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from None
    state = {k.removeprefix("_orig_mod."): w for k, w in state.items()}  # torch.compile's
    return config, {k: w.t() if ".h." in k and w.dim() == 2 else w for k, w in state.items()}, path.name
