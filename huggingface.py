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


def to_config(c: GPTConfig, eos_id: int | None = None, bos_id: int | None = None) -> dict:
    """config.json as the fitting transformers class reads it; our own fields, under the architecture GPT, if none fits."""
    name = hf_class(c)
    shared = {"architectures": [name or "GPT"], "vocab_size": c.vocab_size, "tie_word_embeddings": c.tie_embeddings}
    shared |= {"torch_dtype": "float32", "bos_token_id": bos_id, "eos_token_id": eos_id}
    if name is None:
        return shared | {"note": ONLY_OURS, "model_type": "gpt"} | asdict(c)
    if name == "GPT2LMHeadModel":
        sizes = dict(
            n_positions=c.block_size,
            n_ctx=c.block_size,
            n_layer=c.n_layer,
            n_head=c.n_head,
            n_embd=c.n_embd,
            n_inner=c.d_ff,
        )
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), c.dropout)
        activation = "gelu_new" if c.mlp == "gelu_tanh" else "gelu"
        more = dict(activation_function=activation, layer_norm_epsilon=c.norm_eps, use_bias=c.bias)
        return shared | {"model_type": "gpt2"} | sizes | drops | more
    return shared | {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "max_position_embeddings": c.block_size,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head,
        "hidden_size": c.n_embd,
        "head_dim": c.head_dim,
        "intermediate_size": c.d_ff,
        "hidden_act": "silu",
        "attention_bias": c.bias,
        "mlp_bias": c.bias,
        "attention_dropout": c.dropout,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
    }


# What says nothing of what is computed: who wrote it, how it was initialised, how text is made of it, other heads of a class.
HARMLESS = """
    architectures model_type torch_dtype dtype transformers_version _name_or_path use_cache initializer_range pretraining_tp
    bos_token_id eos_token_id pad_token_id unk_token_id task_specific_params n_ctx max_window_layers sliding_window
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj reorder_and_upcast_attn
    is_llama_config transformers.js_config gradient_checkpointing resid_pdrop embd_pdrop attn_pdrop note
""".split()

MODEL_TYPES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def from_config(d: dict) -> GPTConfig:
    """GPTConfig of a config.json. ValueError for another architecture, and for any setting that is neither known nor empty. Missing settings have the
    defaults of the transformers classes.
    """
    name = (d.get("architectures") or [MODEL_TYPES.get(d.get("model_type"), "?")])[0]
    rest = {k: v for k, v in d.items() if k not in HARMLESS}
    fixed: dict = {}  # what it must be where it is given
    if name == "GPT":
        found = {f.name: rest.pop(f.name) for f in fields(GPTConfig)}
        rest.pop("tie_word_embeddings", None)
    elif name == "GPT2LMHeadModel":
        found = PRESETS["gpt2"] | {k: rest.pop(k) for k in ("vocab_size", "n_layer", "n_head", "n_embd")}
        activation = rest.pop("activation_function", "gelu_new")
        kinds = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
        if activation not in kinds:
            raise ValueError(f"config.json: activation_function={activation!r} is not supported")
        found |= dict(mlp=kinds[activation], block_size=rest.pop("n_positions"), d_ff=rest.pop("n_inner", None) or 0)
        found |= dict(bias=rest.pop("use_bias", True), tie_embeddings=rest.pop("tie_word_embeddings", True))
        found |= dict(norm_eps=rest.pop("layer_norm_epsilon", 1e-5), dropout=d.get("resid_pdrop", 0.1))
        fixed = dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    elif name in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        rope = rest.pop("rope_parameters", None) or {}  # transformers 5 has rope_theta in there
        scaled = [rest.pop("rope_scaling", None), {k: v for k, v in rope.items() if k != "rope_theta"}]
        for scaling in filter(None, scaled):
            if scaling != {"rope_type": "default"}:
                raise ValueError(f"config.json: rope_scaling={scaling} is not supported")
        heads = rest.pop("num_attention_heads")
        bias = rest.pop("attention_bias", False)
        found = PRESETS["llama" if name[0] == "L" else "qwen3"] | dict(
            vocab_size=rest.pop("vocab_size"),
            block_size=rest.pop("max_position_embeddings"),
            n_layer=rest.pop("num_hidden_layers"),
            n_head=heads,
            n_kv_head=rest.pop("num_key_value_heads", None) or heads,
            n_embd=rest.pop("hidden_size"),
            head_dim=rest.pop("head_dim", None) or (0 if name[0] == "L" else 128),
            d_ff=rest.pop("intermediate_size"),
            bias=bias,
            tie_embeddings=rest.pop("tie_word_embeddings", False),
            rope_theta=rest.pop("rope_theta", rope.get("rope_theta", 10000.0)),
            norm_eps=rest.pop("rms_norm_eps", 1e-6),
            dropout=rest.pop("attention_dropout", 0.0),
        )
        fixed = dict(hidden_act="silu", mlp_bias=bias)  # a bias everywhere or nowhere
        fixed |= dict(use_sliding_window=False)
        rest["layer_types"] = [kind for kind in rest.get("layer_types") or [] if kind != "full_attention"]
    else:
        known = ", ".join(MODEL_TYPES.values())
        raise ValueError(f"config.json: architecture {name!r} is none of {known}")
    for key, value in rest.items():
        if value != fixed[key] if key in fixed else value not in (None, False, [], {}):
            raise ValueError(f"config.json: {key}={value!r} is not supported")
    for f in fields(GPTConfig):
        wanted = (int, float) if isinstance(f.default, float) else type(f.default)
        if not isinstance(found.get(f.name, f.default), wanted):
            raise ValueError(f"config.json: {f.name}={found[f.name]!r} is not accepted")
    return GPTConfig(**found)


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
    shutil.copymode(
        Path(folder) / "config.json", Path(folder) / "model.safetensors"
    )  # it comes readable by its owner alone


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
