"""Hugging Face's model format, written and read: config.json, and the weights as safetensors.

    save_pretrained(model.config, dict(model.named_parameters()), folder)
        writes to a folder, which AutoModelForCausalLM.from_pretrained(folder) of transformers opens
    from_pretrained(folder)
        reads a GPT2LMHeadModel, or the Llama, Mistral, Qwen2 or Qwen3 ...ForCausalLM, in one file
        or in shards; also nanoGPT's ckpt.pt

If config.json asks for something that model.py does not compute, it is refused, and the error names
it. Nothing that is read can execute code, and no file can make this program read a file outside its
folder.
"""

import json
import math
import os
import pickle
import warnings
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save

from hardware.disk import MANIFEST, damage, only_plain, read_object
from model import GPT, PRESETS, GPTConfig, rope_scaling

# --------------------------------------------------------------------------------------------------
# config.json

ONLY_OURS = (
    "no transformers class computes this architecture: only this project's huggingface.py loads it"
)


def hf_class(c: GPTConfig) -> str | None:
    """Return the transformers class that computes exactly this architecture, or None."""
    # A field of GPTConfig that no class has, such as one that you add, must be at its default.
    known = GPT2_KEYS | LLAMA_KEYS | PRESETS["llama"] | dict(qkv_bias=False, rope_scaling="")
    for field in fields(c):
        if field.name not in known and getattr(c, field.name) != field.default:
            return None
    gelu = c.mlp in ("gelu", "gelu_tanh")
    if gelu and (c.pos, c.norm, c.qk_norm or c.qkv_bias) == ("learned", "layernorm", False):
        same_heads = c.n_kv_head == c.n_head and c.head_dim * c.n_head == c.n_embd
        return "GPT2LMHeadModel" if same_heads else None
    if (c.pos, c.norm, c.mlp) == ("rope", "rmsnorm", "swiglu"):
        if c.qk_norm:
            return None if c.bias or c.qkv_bias else "Qwen3ForCausalLM"
        return "Qwen2ForCausalLM" if c.qkv_bias else "LlamaForCausalLM"
    return None


def caveat(c: GPTConfig) -> str:
    """Return which programs cannot open a checkpoint of this shape; empty if all can."""
    if hf_class(c) is None:
        return ONLY_OURS
    if hf_class(c) == "LlamaForCausalLM" and c.n_embd % c.n_head:
        uneven = f"n_embd={c.n_embd} is not a multiple of n_head={c.n_head}"
        return f"transformers 5 refuses it: {uneven}"
    if hf_class(c) == "GPT2LMHeadModel" and c.d_ff != 4 * c.n_embd:
        return "llama.cpp cannot load it: its GPT-2 has d_ff = 4 n_embd"
    return ""


# Field of GPTConfig -> its name in a config.json of each class.
GPT2_KEYS = dict(
    vocab_size="vocab_size", block_size="n_positions", n_layer="n_layer", n_head="n_head",
    n_embd="n_embd", d_ff="n_inner", bias="use_bias", tie_embeddings="tie_word_embeddings",
    norm_eps="layer_norm_epsilon", dropout="resid_pdrop",
)  # fmt: skip
LLAMA_KEYS = dict(
    vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers",
    n_head="num_attention_heads", n_kv_head="num_key_value_heads", n_embd="hidden_size",
    head_dim="head_dim", d_ff="intermediate_size", bias="attention_bias",
    tie_embeddings="tie_word_embeddings", rope_theta="rope_theta", norm_eps="rms_norm_eps",
    dropout="attention_dropout",
)  # fmt: skip

# What each class takes for a field that its config.json lacks.
GPT2_DEFAULTS = dict(d_ff=0, bias=True, tie_embeddings=True, norm_eps=1e-5, dropout=0.1)
LLAMA_DEFAULTS = dict(
    n_kv_head=0, head_dim=0, bias=False, tie_embeddings=False,
    rope_theta=1e4, norm_eps=1e-6, dropout=0.0,
)  # fmt: skip
QWEN2_DEFAULTS = LLAMA_DEFAULTS | dict(n_kv_head=32)
QWEN3_DEFAULTS = QWEN2_DEFAULTS | dict(head_dim=128)
MISTRAL_DEFAULTS = LLAMA_DEFAULTS | dict(n_kv_head=8)

CLASSES = {  # class: (preset, model_type, keys, defaults)
    "GPT2LMHeadModel": ("gpt2", "gpt2", GPT2_KEYS, GPT2_DEFAULTS),
    "LlamaForCausalLM": ("llama", "llama", LLAMA_KEYS, LLAMA_DEFAULTS),
    "Qwen2ForCausalLM": ("llama", "qwen2", LLAMA_KEYS, QWEN2_DEFAULTS),
    "Qwen3ForCausalLM": ("qwen3", "qwen3", LLAMA_KEYS, QWEN3_DEFAULTS),
    "MistralForCausalLM": ("llama", "mistral", LLAMA_KEYS, MISTRAL_DEFAULTS),  # is read only
}
# Activation in config.json -> GPTConfig.mlp.
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def to_config(c: GPTConfig, eos_id: int | None = None, bos_id: int | None = None) -> dict:
    """Return the content of config.json, as the transformers class of this architecture reads it.

    If no class fits, the architecture is called GPT, and GPTConfig's fields keep their own names.
    """
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
    shared["model_type"] = model_type
    shared |= {theirs: getattr(c, ours) for ours, theirs in keys.items()}
    if name == "GPT2LMHeadModel":
        activation = "gelu_new" if c.mlp == "gelu_tanh" else "gelu"
        # n_ctx is for llama.cpp.
        shared |= {"activation_function": activation, "n_ctx": c.block_size}
        return shared | {"embd_pdrop": c.dropout, "attn_pdrop": c.dropout}
    if c.rope_scaling:
        kind, numbers = rope_scaling(c.rope_scaling)
        whole = (int(n) if n == int(n) else n for n in numbers)  # transformers wants a whole length
        shared["rope_scaling"] = {"rope_type": kind} | dict(zip(ROPE[kind], whole, strict=True))
    return shared | {"hidden_act": "silu", "mlp_bias": c.bias}


FIRST_LENGTH = "original_max_position_embeddings"
# Kind of scaling -> the names of GPTConfig.rope_scaling's numbers in a config.json.
ROPE = {
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", FIRST_LENGTH],
    "yarn": ["factor", FIRST_LENGTH, "beta_fast", "beta_slow", "attention_factor"],
}  # fmt: skip


# Settings of a config.json that do not change the logits: who wrote the file, how the model was
# initialised and trained, how text is sampled from it, and what other heads do. Dropout is among
# them, because --dropout sets it.
HARMLESS = set(
    """
    architectures model_type torch_dtype dtype transformers_version _name_or_path
    initializer_range note tokenizer_class prefix use_cache pretraining_tp gradient_checkpointing
    use_bfloat16 torchscript _attn_implementation attn_implementation return_dict
    return_dict_in_generate output_hidden_states output_attentions output_scores output_past
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    task_specific_params max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences num_labels _num_labels
    id2label label2id problem_type finetuning_task predict_special_tokens is_decoder
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    n_ctx embd_pdrop attn_pdrop reorder_and_upcast_attn max_window_layers sliding_window
    is_llama_config transformers.js_config unsloth_version unsloth_fixed
    """.split()
)


def from_config(d: dict) -> GPTConfig:
    """Return the GPTConfig that a config.json describes.

    Raises ValueError for an architecture that model.py does not have, for a value that a field does
    not accept, and for a setting that is neither known nor empty.
    """
    of_type = {model_type: name for name, (_, model_type, *_) in CLASSES.items()}
    names = d.get("architectures") or of_type.get(d.get("model_type"), "?")
    name = names[0] if isinstance(names, list) else names
    if name == "GPT":
        found = {f.name: d[f.name] for f in fields(GPTConfig)}
        known = HARMLESS | found.keys() | {"tie_word_embeddings"}
        refuse_more({k: v for k, v in d.items() if k not in known})
    elif name in CLASSES:
        model_type = d.get("model_type", CLASSES[name][1])
        if model_type != CLASSES[name][1]:  # transformers goes by it
            raise ValueError(f"model_type={model_type!r} is not that of {name}")
        found = in_our_words(d, name)
    else:
        raise ValueError(f"architecture {name!r} is none of {', '.join(CLASSES)}")
    return checked(found)


def checked(found: dict[str, Any]) -> GPTConfig:
    """Return GPTConfig(**found). Raises ValueError if a value is not accepted."""
    for f in fields(GPTConfig):
        if f.name in found and not accepts(f, found[f.name]):
            raise ValueError(f"{f.name}={found[f.name]!r} is not accepted")
    c = GPTConfig(**found)
    # RoPE's table grows with this product. The limit is a million positions of heads of 128.
    if c.block_size * c.head_dim > 2**27:
        raise ValueError(f"block_size={c.block_size} and head_dim={c.head_dim} are not accepted")
    return c


def accepts(f: Field, value: Any) -> bool:
    """Return whether `value` is acceptable for a field of GPTConfig.

    A number must lie between 0 and the largest that a model can have there.
    """
    if isinstance(f.default, bool) or isinstance(value, bool):
        return isinstance(f.default, bool) and isinstance(value, bool)
    if isinstance(f.default, str):
        return isinstance(value, str)
    kind = (int, float) if isinstance(f.default, float) else int
    most = 2**22 if f.name == "block_size" else 2**31  # RoPE has a table of all positions
    least = 1 if f.name == "rope_theta" else 0
    return isinstance(value, kind) and least <= value <= most


def refuse_more(rest: dict[str, Any], must_be: dict[str, Any] | None = None) -> None:
    """Raise ValueError for a setting that was not understood and may change the logits.

    A setting that must_be names is accepted if it has that value, any other one if it is empty.
    """
    must_be = must_be or {}
    for key, value in rest.items():
        if key in must_be:
            supported = value == must_be[key]
        else:
            supported = value in (None, False, [], {})
        if not supported:
            raise ValueError(f"{key}={value!r} is not supported")


def unpack_rope(rest: dict[str, Any]) -> None:
    """Rename the RoPE settings among `rest` to what they were called before transformers 5.

    transformers 5 has one object, rope_parameters, in place of rope_theta and rope_scaling. A
    scaling of the type "default" scales nothing and is removed.
    """
    rope = rest.pop("rope_parameters", None) or {}
    scaling = rest.pop("rope_scaling", None) or rope
    if rope and scaling != rope:
        raise ValueError("rope_scaling beside rope_parameters is not supported")
    plain = ("rope_theta", "partial_rotary_factor")
    rest |= {k: v for k, v in scaling.items() if k in plain}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    numbers = {k: v for k, v in scaling.items() if k not in ("type", "rope_type", *plain)}
    numbers = {k: v for k, v in numbers.items() if v is not None}
    if kind == "yarn" and isinstance(factor := numbers.get("factor"), int | float):
        default = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        numbers = dict(beta_fast=32, beta_slow=1, attention_factor=default) | numbers
        if FIRST_LENGTH not in numbers:
            numbers[FIRST_LENGTH] = rest.get("max_position_embeddings")
        if numbers.get("truncate") is True:  # which is how it is done here
            numbers.pop("truncate")
    if kind in ROPE and set(numbers) == set(ROPE[kind]):
        rest["rope_scaling"] = f"{kind}:{','.join(f'{numbers[k]!r}' for k in ROPE[kind])}"
    elif kind != "default" or numbers:
        raise ValueError(f"rope_scaling={scaling!r} is not supported")


def in_our_words(d: dict, name: str) -> dict:
    """Return GPTConfig's fields, from a config.json of the class `name`, one of CLASSES.

    Raises ValueError if a field is missing, or for a setting that model.py does not compute.
    """
    preset, _, keys, defaults = CLASSES[name]
    rest = {k: v for k, v in d.items() if k not in HARMLESS}
    unpack_rope(rest)
    given = {}
    if "num_key_value_heads" in d and d["num_key_value_heads"] is None:
        given["n_kv_head"] = 0  # as many as n_head
    for ours, theirs in keys.items():
        value = rest.pop(theirs, None)
        if value is not None:
            given[ours] = value
    missing = [theirs for ours, theirs in keys.items() if ours not in defaults | given]
    if missing:
        raise ValueError(f"there is no {missing[0]}")
    found = PRESETS[preset] | defaults | given
    if name == "GPT2LMHeadModel":
        activation = rest.get("activation_function", "gelu_new")
        if activation in GELUS:
            rest.pop("activation_function", None)
            found["mlp"] = GELUS[activation]
    if name == "LlamaForCausalLM" and rest.pop("mlp_bias", False) != found["bias"]:
        raise ValueError("attention_bias without mlp_bias, or the reverse, is not supported")
    if name != "LlamaForCausalLM" and name != "GPT2LMHeadModel" and found["bias"]:
        raise ValueError("attention_bias=True is not supported")
    if name == "Qwen2ForCausalLM":
        found["qkv_bias"] = True
    window = d.get("sliding_window", 4096)  # without the key it is 4,096 in transformers
    if name == "MistralForCausalLM" and window is not None and window < found["block_size"]:
        shorter = f"shorter than max_position_embeddings={found['block_size']}"
        raise ValueError(f"sliding_window={window!r} is not supported: it is {shorter}")
    if "rope_scaling" in rest:
        found["rope_scaling"] = rest.pop("rope_scaling")
    rest["layer_types"] = [k for k in rest.get("layer_types") or [] if k != "full_attention"]
    # These four are refused only if they are given with another value.
    must_be = dict(hidden_act="silu", scale_attn_weights=True, partial_rotary_factor=1.0)
    must_be["is_causal"] = True
    refuse_more(rest, must_be)
    return found


# --------------------------------------------------------------------------------------------------
# Weights: our names and shapes of parameters, and those of each class

HF_GPT2 = {
    "wte": "transformer.wte", "wpe": "transformer.wpe",
    "norm_f": "transformer.ln_f", "blocks": "transformer.h",
    "norm_1": "ln_1", "norm_2": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
HF_LLAMA = {
    "wte": "model.embed_tokens", "norm_f": "model.norm", "blocks": "model.layers",
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
    "attn.proj": "self_attn.o_proj",
}  # fmt: skip


def hf_names(c: GPTConfig, name: str) -> list[str]:
    """Return the Hugging Face name of one of our parameters.

    For qkv these are three names where the class keeps q, k and v in three matrices, as Llama does.
    """
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
    """Return our parameters as the class stores them, under its names.

    The padding of the vocabulary is cut off, and GPT-2's matrices are transposed.
    """
    gpt2 = hf_class(c) == "GPT2LMHeadModel"
    heads = [n * c.head_dim for n in (c.n_head, c.n_kv_head, c.n_kv_head)]
    out = {}
    for name, w in state.items():
        if name in ("wte.weight", "lm_head.weight"):
            w = w[: c.vocab_size]
        elif gpt2 and name.startswith("blocks.") and w.dim() == 2:
            w = w.t()  # GPT-2's Conv1D holds (in, out)
        names = hf_names(c, name)
        parts = w.split(heads) if len(names) == 3 else [w]
        for key, part in zip(names, parts, strict=True):
            out[key] = part.contiguous()
            if gpt2 and not c.bias and (".h." in key or "ln_f" in key):
                # The class always has biases here. Biases of zero compute the same as none.
                out[key.removesuffix("weight") + "bias"] = w.new_zeros(w.size(-1))
    return out


def shapes(c: GPTConfig, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters of a model of the shape c, on the meta device: they take no memory.

    Raises ValueError if the tensor of one of them is not stored. The names come from a model of one
    layer, and are checked before the whole model is built. So no config.json can make this program
    build a model that has more layers than the file.
    """

    def build(n_layer: int) -> dict[str, torch.Tensor]:
        small = dict(block_size=1) if c.pos == "rope" else {}
        try:
            with torch.device("meta"):
                return dict(GPT(replace(c, n_layer=n_layer, **small)).named_parameters())
        except (RuntimeError, OverflowError):
            raise ValueError("config.json asks for a tensor of more than 2^63 bytes") from None

    for name in build(1):
        layers = c.n_layer if name.startswith("blocks.0.") else 1
        for layer in range(layers):
            for key in hf_names(c, name.replace("blocks.0.", f"blocks.{layer}.")):
                if key not in stored:
                    raise ValueError(f"there is no tensor {key}")
    return build(c.n_layer)


def from_state(c: GPTConfig, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return our parameters from those that the class stores: the inverse of to_state().

    Raises ValueError, which names the tensor, if one is missing, if one belongs to no part of the
    model, if one is not what config.json says, or if one is not finite: even if the texts never use
    such a number, no checkpoint could be saved.
    """
    gpt2 = hf_class(c) == "GPT2LMHeadModel"
    if gpt2 and "wte.weight" in stored:  # a GPT2Model, which is the class without its head
        stored = {k if k == "lm_head.weight" else f"transformer.{k}": w for k, w in stored.items()}
    parameters = shapes(c, stored)
    check_tensors(c, stored, to_state(c, parameters))

    state = {}
    for name, like in parameters.items():
        keys = hf_names(c, name)
        if broken := [key for key in keys if not stored[key].isfinite().all()]:
            raise ValueError(f"{broken[0]} holds NaN or infinity")
        w = torch.cat([stored[key] for key in keys]).float()
        if gpt2 and name.startswith("blocks.") and w.dim() == 2:
            w = w.t().contiguous()
        if name in ("wte.weight", "lm_head.weight"):
            w = F.pad(w, (0, 0, 0, like.size(0) - w.size(0)))
        state[name] = w
    if c.tie_embeddings:
        state["lm_head.weight"] = state["wte.weight"]
    return state


def check_tensors(
    c: GPTConfig, stored: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> None:
    """Raise ValueError unless the stored tensors are those of the model, and no others.

    wanted: the tensors of the model, as to_state() returns them, on the meta device.
    """
    for key, like in wanted.items():
        if key not in stored:
            continue  # a bias that to_state() adds, and the file need not have
        found = stored[key]
        if found.shape != like.shape or not found.is_floating_point():
            got = f"{tuple(found.shape)} of {found.dtype}"
            raise ValueError(f"{key} is {got}, config.json wants {tuple(like.shape)}")

    wte = hf_names(c, "wte.weight")[0]
    constants = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # of old versions
    for key in sorted(stored.keys() - wanted.keys()):
        tied = key == "lm_head.weight" and torch.equal(stored[key], stored[wte])
        if not (tied or key.endswith(constants)):
            differs = "differs from the tensor that it is tied to"
            raise ValueError(f"{key} belongs to no part of this architecture, or {differs}")

    if hf_class(c) == "GPT2LMHeadModel" and not c.bias:  # the class has biases, the model has none
        biases = {key for key in wanted if key.endswith("bias")}
        lost = [key for key in sorted(biases & stored.keys()) if stored[key].any()]
        if lost:
            raise ValueError(f"{lost[0]} is not 0, but config.json says use_bias=false")


# --------------------------------------------------------------------------------------------------
# Folders


def save_pretrained(
    c: GPTConfig,
    parameters: dict[str, torch.Tensor],
    folder: Path,
    eos_id: int | None = None,
    bos_id: int | None = None,
) -> None:
    """Write config.json and model.safetensors to a folder.

    parameters: name -> value, under our names, on the CPU. A matrix that wte and lm_head share is
    there once, as wte.weight.
    """
    content = json.dumps(to_config(c, eos_id, bos_id), indent=2) + "\n"
    (folder / "config.json").write_text(content)
    # Not save_file(): its files can only be read by their owner (safetensors 0.8.0).
    stored = {name: w.detach() for name, w in to_state(c, parameters).items()}
    (folder / "model.safetensors").write_bytes(save(stored, metadata={"format": "pt"}))


def is_utf8(path: Path) -> bool:
    """Return whether the bytes of a path are UTF-8: safetensors and mmap open no other files.

    On an old disk with names in GBK they are not. There Python itself reads the file.
    """
    try:
        os.fsencode(path).decode("utf-8")
        return True
    except UnicodeDecodeError:
        return False


def unverified(path: Path) -> str:
    """Return what to tell the user about a model without a manifest; empty if it has one."""
    return "" if (path / MANIFEST).exists() else f"not verified: it has no {MANIFEST}"


def is_nanogpt(path: str | Path) -> bool:
    """Return whether path is a ckpt.pt of nanoGPT, or a folder with one and without config.json."""
    path = Path(path)
    if path.suffix == ".pt":
        return True
    return (path / "ckpt.pt").exists() and not (path / "config.json").exists()


def shape_in(path: str | Path) -> GPTConfig:
    """Return the shape of the model that from_pretrained() returns. Raises ValueError like it."""
    path = Path(path)
    try:
        if is_nanogpt(path):
            return read_nanogpt(path if path.suffix == ".pt" else path / "ckpt.pt")[0]
        return from_config(read_object(path / "config.json"))
    except OSError as e:
        raise ValueError(f"{e.filename}: {e.strerror}") from None
    except (LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"config.json: {type(e).__name__}: {e}") from None


def from_pretrained(path: str | Path, **overrides) -> GPT:
    """Return the model of a folder, or of nanoGPT's ckpt.pt, on the CPU in fp32.

    overrides: fields of GPTConfig, such as dropout. Raises ValueError, in one line, if a file is
    missing, damaged or not safe to read, or asks for something that model.py does not compute.

    A folder that this program wrote has a manifest, and its files are verified by that. Folders of
    other programs have none: unverified() says so.
    """
    path = Path(path)
    names = ("config.json", "model.safetensors")
    if (path / MANIFEST).exists():
        wrong = damage(path, names, names)
        if wrong:
            own = f"if you changed it yourself, delete {MANIFEST}"
            raise ValueError(f"{wrong}: it was changed after it was written; {own}")
    try:
        if is_nanogpt(path):
            file = path if path.suffix == ".pt" else path / "ckpt.pt"
            source = file.name
            config, stored = read_nanogpt(file)
        else:
            source = "config.json"
            config = from_config(read_object(path / source))
            source = "model.safetensors"
            stored = read_safetensors(path)
        state = from_state(config, stored)
        with torch.device("meta"):  # the weights are those of `state`, not copies of them
            model = GPT(replace(config, **overrides))
        model.load_state_dict(state, strict=True, assign=True)
        if config.tie_embeddings:
            model.lm_head.weight = model.wte.weight
        return model
    except OSError as e:
        raise ValueError(f"{source}: {e.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as e:
        what = str(e) if type(e) is ValueError else f"{type(e).__name__}: {e}"
        raise ValueError(f"{source}: {' '.join(what.split())}") from None


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of model.safetensors, or of the shards that its index names."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    whole = (folder / "model.safetensors").exists()
    if index.exists() and not whole:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    elif not whole and list(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            "the weights are pickled (pytorch_model.bin), which could execute anything: "
            "only safetensors are read; in transformers, "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW) writes them"
        )
    stored = {}
    for name in names:
        if name != Path(str(name)).name or not name.endswith(".safetensors"):
            wrong = "which is no .safetensors file in this folder"
            raise ValueError(f"the index names {name!r}, {wrong}")
        shard = "" if name == "model.safetensors" else f"{name}: "
        if not (folder / name).is_file():
            raise ValueError(f"{shard}No such file")
        try:
            path = folder / name
            stored |= load_file(path) if is_utf8(path) else load(path.read_bytes())
        except SafetensorError as e:
            raise ValueError(f"{shard}truncated, or not a safetensors file ({e})") from None
    return stored


def read_nanogpt(path: Path) -> tuple[GPTConfig, dict[str, torch.Tensor]]:
    """Return the shape and the weights of a checkpoint that nanoGPT's train.py wrote.

    The weights have the names and shapes of Hugging Face's GPT2LMHeadModel. Raises ValueError if it
    is not such a checkpoint.
    """
    only_plain(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle's protocol
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError:
        # torch's own message is left out: it explains how to load the file and run its code.
        wrong = "it is damaged, or holds more than tensors and numbers"
        raise ValueError(f"not a checkpoint of nanoGPT: {wrong}") from None
    except Exception as e:  # a damaged pickle can raise any exception
        wrong = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise ValueError(f"not a checkpoint of nanoGPT ({wrong})") from None
    args = dict(saved["model_args"])
    shape = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size"}
    odd = sorted((args.keys() ^ shape) - {"bias", "dropout"})
    if odd:
        raise ValueError(f"model_args: {odd[0]} is missing, or is none of nanoGPT's")
    # torch.compile puts the prefix _orig_mod. before every name.
    state = {k.removeprefix("_orig_mod."): w for k, w in saved["model"].items()}
    config = checked(PRESETS["gpt2"] | args)
    return config, {k: w.t() if ".h." in k and w.dim() == 2 else w for k, w in state.items()}
