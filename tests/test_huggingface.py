"""Weights and tokenizers of other tools, written and read. Most of these tests compare with the
packages transformers and tokenizers themselves.
"""

import dataclasses
import json
import math
import os
import random
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from conftest import call, forge, make_records, metrics, train_tiny, write_jsonl
from safetensors.torch import load_file, save_file
from test_model import ODD, hidden_logits, ids
from test_model import make as make_model
from test_prepare import TEXTS, contents, tiktoken_file

import prepare
import sample
import train
from configurator import UserError
from model import GPT, PRESETS, GPTConfig
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
from training import huggingface
from training.huggingface import from_config, from_pretrained, hf_class, save_pretrained, to_config
from training.resume import settings_of_run
from training.runs import newest_checkpoint
from training.settings import TrainConfig

os.environ["HF_HUB_OFFLINE"] = "1"
FITTING = [name for name in ODD if hf_class(GPTConfig(**ODD[name]))]


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers", reason="needs the package transformers")
    module.logging.set_verbosity_error()
    return module


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """Change all norms and biases, so that a test notices if two of them are exchanged."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.3 * torch.randn(p.shape, generator=rng)
    return model


def make(name: str, **options) -> GPT:
    return shaken(make_model(name, **options))


def save(model: GPT, folder: Path) -> Path:
    """Write a model without a manifest, as another program would."""
    folder.mkdir(parents=True, exist_ok=True)
    save_pretrained(model.config, dict(model.named_parameters()), folder, eos_id=0, bos_id=0)
    return folder


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


def logits(model: GPT, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return hidden_logits(model.eval(), x)


# -- weights, out --


def test_a_new_switch_of_the_model_is_never_lost_in_a_folder_of_a_class_that_lacks_it():
    """Whoever adds a field to GPTConfig must find it again when the run is resumed."""
    field = ("softcap", float, dataclasses.field(default=0.0))
    wider = dataclasses.make_dataclass("Wider", [field], bases=(GPTConfig,), frozen=True)
    for preset in PRESETS.values():
        assert hf_class(wider(**preset)) is not None
        assert hf_class(wider(**preset, softcap=30.0)) is None


@pytest.mark.parametrize("name", ODD)
def test_a_saved_model_comes_back_bit_for_bit(name, tmp_path):
    model = make(name, dropout=0.1)
    again = from_pretrained(save(model, tmp_path))
    assert again.config == model.config
    state = model.state_dict()
    found = again.state_dict()
    assert state.keys() == found.keys() and all(torch.equal(state[k], found[k]) for k in state)
    assert from_pretrained(tmp_path, dropout=0.3).config.dropout == 0.3


def test_the_hugging_face_class_is_named_only_where_it_fits():
    want = ["GPT2LMHeadModel"] * 3 + ["LlamaForCausalLM"] * 2 + ["Qwen3ForCausalLM"]
    want += ["Qwen2ForCausalLM"] * 2 + ["LlamaForCausalLM", "Qwen3ForCausalLM", None]
    assert [hf_class(GPTConfig(**shape)) for shape in ODD.values()][: len(want)] == want
    for c in (GPTConfig(**shape) for shape in ODD.values()):
        assert from_config(to_config(c)) == c


@pytest.mark.parametrize("name", FITTING)
def test_transformers_computes_the_same_logits(name, tmp_path, transformers):
    model = make(name, scheme="xavier")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(save(model, tmp_path)).eval()
    x = ids(model)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, logits(model, x), atol=1e-4, rtol=0)


def test_a_qwen2_with_another_tokenizer_says_how_transformers_reads_it(
    tiny_data, tmp_path, capsys, transformers
):
    folder = checkpoint(tiny_data, tmp_path, "--qkv_bias=true")
    assert "AutoTokenizer takes Qwen2's own tokenizer" in capsys.readouterr().out
    tokenizer = load_tokenizer(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("the loop 12", "  从前 有\n\nx=1;", "naïve 😀"):
        assert theirs(text).input_ids == [*tokenizer.prefix, *tokenizer.encode(text).tolist()]
    assert hf_class(from_pretrained(folder).config) == "Qwen2ForCausalLM"


def test_an_architecture_without_a_class_is_saved_and_says_so(tiny_data, tmp_path, capsys):
    folder = checkpoint(tiny_data, tmp_path, "--norm=layernorm")
    note = "no transformers class computes this architecture"
    said = capsys.readouterr().out
    assert note in said  # in the banner
    assert read(folder / "config.json")["note"].startswith(note)
    call(sample.main, f"--ckpt={folder}", "--max_new_tokens=3", "--device=cpu")


# -- weights, in --


def theirs(transformers, kind: str, **more):
    """Return a random model made by transformers, of a shape that is not the default anywhere."""
    shared = dict(vocab_size=300, bos_token_id=0, eos_token_id=0)
    if kind == "gpt2":
        shared |= dict(n_layer=3, n_embd=48, n_head=4, n_positions=32)
        config = transformers.GPT2Config(**shared | more)
    else:
        shared |= dict(hidden_size=48, intermediate_size=100, max_position_embeddings=32)
        shared |= dict(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2)
        shared |= dict(initializer_range=0.1)
        shared |= {"head_dim": 16} if kind == "qwen3" else {}
        make_config = {
            "llama": transformers.LlamaConfig,
            "mistral": transformers.MistralConfig,
            "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config,
        }[kind]
        config = make_config(**shared | more)
    torch.manual_seed(0)
    return shaken(transformers.AutoModelForCausalLM.from_config(config).eval())


BIASES = {"attention_bias": True, "mlp_bias": True}
FIRST = "original_max_position_embeddings"  # what the model had before its RoPE was scaled
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {FIRST: 8, "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, FIRST: 8, "rope_theta": 1e4}
FAST = YARN | {"beta_fast": 4, "beta_slow": 0.5, "attention_factor": 0.8}


@pytest.mark.parametrize(
    "kind, more, shards",
    [
        ("gpt2", {}, "5GB"),
        ("gpt2", {"activation_function": "gelu", "tie_word_embeddings": False}, "40KB"),
        ("llama", {"rope_theta": 5e5, "rms_norm_eps": 1e-5}, "30KB"),
        ("llama", BIASES | {"tie_word_embeddings": True, "head_dim": 10}, "5GB"),
        ("qwen3", {"tie_word_embeddings": True}, "30KB"),
        ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}, "30KB"),
        ("qwen2", {"rope_parameters": YARN, "num_key_value_heads": 6}, "5GB"),
        ("mistral", {"sliding_window": None, "head_dim": 12}, "30KB"),
        ("mistral", {"sliding_window": 32, "rope_theta": 1e6}, "5GB"),
        ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, "5GB"),
        ("llama", {"rope_parameters": LINEAR}, "30KB"),
        ("qwen3", {"rope_parameters": FAST}, "5GB"),
    ],
)
def test_models_that_transformers_saved_compute_the_same_here(
    kind, more, shards, tmp_path, transformers
):
    model = theirs(transformers, kind, **more)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards != "5GB")
    ours = from_pretrained(tmp_path)
    x = ids(ours)
    with torch.no_grad():
        torch.testing.assert_close(logits(ours, x), model(x).logits, atol=1e-4, rtol=0)


def odd_shapes(kind: str) -> list[dict]:
    """Return six random shapes of a class, each with another scaling of RoPE, or none."""
    draw = random.Random(kind)
    scalings = [None, LINEAR, LLAMA3, YARN, FAST, None]
    shapes = []
    for scaling in scalings:
        kv = draw.choice([1, 2, 3])
        heads = kv * draw.choice([1, 2, 5])
        hs = 2 * draw.randint(2, 9)
        shape = dict(num_attention_heads=heads, num_key_value_heads=kv, vocab_size=300)
        shape |= dict(hidden_size=heads * hs, intermediate_size=draw.randint(9, 130))
        shape |= dict(num_hidden_layers=draw.randint(1, 4), rms_norm_eps=draw.choice([1e-5, 1e-6]))
        shape |= dict(tie_word_embeddings=draw.random() < 0.5)
        shape["head_dim"] = hs if kind in ("llama", "qwen2") else 2 * draw.randint(2, 12)
        shapes.append(shape | ({} if scaling is None else {"rope_parameters": scaling}))
    return shapes


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_odd_shapes_agree_both_ways_in_fp32_and_bf16(kind, number, tmp_path, transformers):
    """At all positions, most of them beyond the length that a scaled RoPE was made for."""
    more = odd_shapes(kind)[number] | ({"sliding_window": None} if kind == "mistral" else {})
    model = theirs(transformers, kind, **more)
    if number == 5:
        model.bfloat16()  # as most models are published
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    auto = transformers.AutoModelForCausalLM
    stored = auto.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    ours = from_pretrained(tmp_path / "theirs")
    again = auto.from_pretrained(save(ours, tmp_path / "ours")).eval()
    x = ids(ours, T=32)
    with torch.no_grad():
        want = stored(x).logits
        torch.testing.assert_close(logits(ours, x), want, atol=1e-4, rtol=0)
        torch.testing.assert_close(again(x).logits, want, atol=1e-4, rtol=0)


def test_weights_stored_in_bf16_are_taken_exactly(tmp_path, transformers):
    model = theirs(transformers, "llama").bfloat16()
    model.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path)
    assert ours.wte.weight.dtype == torch.float32
    assert torch.equal(ours.wte.weight[:300], model.model.embed_tokens.weight.float())


def test_gpt2_as_openai_named_it_is_read(tmp_path):
    """The names lack the prefix of the class, and there are the masks that old versions stored."""
    model = make("gpt2", mlp="gelu_tanh")
    stored = load_file(save(model, tmp_path) / "model.safetensors")
    stored = {k.removeprefix("transformer."): w for k, w in stored.items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(stored, tmp_path / "model.safetensors")
    assert torch.equal(logits(from_pretrained(tmp_path), ids(model)), logits(model, ids(model)))


NANO = dict(n_layer=3, n_head=4, n_embd=48, block_size=32, vocab_size=300, bias=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", ["", "_orig_mod."])
def test_a_checkpoint_of_nanogpt_is_read(bias, compiled, tmp_path):
    model = make("gpt2", bias=bias)
    state = {}
    ours = huggingface.to_state(model.config, dict(model.named_parameters()))
    for name, w in ours.items():
        if bias or "bias" not in name:
            state[compiled + name] = w.t() if ".h." in name and w.dim() == 2 else w
    state[f"{compiled}lm_head.weight"] = state[f"{compiled}transformer.wte.weight"]
    args = NANO | dict(bias=bias, dropout=0.1)
    content = {"model": state, "model_args": args, "optimizer": {}, "iter_num": 1, "config": {}}
    torch.save(content, tmp_path / "ckpt.pt")
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        theirs = from_pretrained(path)
        assert torch.equal(logits(theirs, ids(model)), logits(model, ids(model)))
        assert huggingface.shape_in(path) == theirs.config


LLAMA = to_config(GPTConfig(**ODD["llama"]))
BACK = dict(beta_fast=1, beta_slow=32)
HALF_LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
DYNAMIC = {"type": "dynamic", "factor": 2.0}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
REFUSED = {
    f"rope_scaling={HALF_LLAMA3} is not": {"rope_scaling": HALF_LLAMA3},
    "'factor': 8.0, 'rope_theta': 500000.0} is not supported": {
        "rope_parameters": HALF_LLAMA3 | {"rope_theta": 5e5}
    },
    "FAST must exceed SLOW": {"rope_scaling": YARN | BACK},
    "rope_scaling beside rope_parameters": {"rope_scaling": YARN, "rope_parameters": LINEAR},
    "is_causal=False is not supported": {"is_causal": False},
    "model_type='gemma' is not that of LlamaForCausalLM": {"model_type": "gemma"},
    "sliding_window=4096 is not supported": MISTRAL | {"max_position_embeddings": 5000},
    "rope_theta=0.5 is not accepted": {"rope_theta": 0.5},
    f"rope_scaling={DYNAMIC} is not supported": {"rope_scaling": DYNAMIC},
    "sliding_window=16 is not supported: it is shorter": MISTRAL | {"sliding_window": 16},
    "hidden_act='gelu' is not supported": {"hidden_act": "gelu"},
    "attention_bias without mlp_bias, or the reverse, is not supported": {"attention_bias": True},
    "quantization_config={'bits': 4} is not supported": {"quantization_config": {"bits": 4}},
    "auto_map={'AutoModel': 'x.py'} is not supported": {"auto_map": {"AutoModel": "x.py"}},
    "logit_softcap=30.0 is not supported": {"logit_softcap": 30.0},
    "layer_types=['sliding_attention'] is not supported": {"layer_types": ["sliding_attention"]},
    "architecture 'GemmaForCausalLM' is none of": {"architectures": ["GemmaForCausalLM"]},
    "n_layer='three' is not accepted": {"num_hidden_layers": "three"},
    "there is no hidden_size": {"hidden_size": ...},
    "n_head=6 must be a multiple of n_kv_head=4": {"num_key_value_heads": 4},
    "there is no tensor": {"num_hidden_layers": 10**9},
    "d_ff=-5 is not accepted": {"intermediate_size": -5},
    "block_size=10000000000 is not accepted": {"max_position_embeddings": 10**10},
    "dropout=nan is not accepted": {"attention_dropout": math.nan},
    "wants (1000000000, 48)": {"vocab_size": 10**9},
    "partial_rotary_factor=0.5 is not supported": {"partial_rotary_factor": 0.5},
    "attention_bias=True is not supported": QWEN3 | {"attention_bias": True},
    "wants (301, 48)": {"vocab_size": 301},
    "there is no tensor model.layers.0.self_attn.q_norm.weight": QWEN3,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_computed_here_is_refused_by_name(message, tmp_path):
    save(make("llama"), tmp_path)
    settings = {k: v for k, v in (LLAMA | REFUSED[message]).items() if v is not ...}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError) as refused:
        from_pretrained(tmp_path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_settings_that_compute_nothing_are_let_pass():
    more = dict(use_cache=True, pretraining_tp=1, initializer_range=0.02, torch_dtype="bfloat16")
    more |= dict(rope_scaling=None, rope_interleaved=False, is_llama_config=True)
    more |= {"transformers.js_config": {"dtype": "q4"}, "id2label": {"0": "a"}}
    more["rope_parameters"] = {"type": "default", "rope_type": "default", "rope_theta": 5e5}
    assert from_config(LLAMA | more) == GPTConfig(**ODD["llama"])


def test_the_config_of_distilgpt2_is_read():
    """This is the published file, with its settings for other heads and for sampling."""
    d = dict(_num_labels=1, activation_function="gelu_new", architectures=["GPT2LMHeadModel"])
    d |= dict(attn_pdrop=0.1, bos_token_id=50256, embd_pdrop=0.1, eos_token_id=50256)
    d |= dict(id2label={"0": "LABEL_0"}, initializer_range=0.02, label2id={"LABEL_0": 0})
    d |= dict(layer_norm_epsilon=1e-05, model_type="gpt2", n_ctx=1024, n_embd=768, n_head=12)
    d |= dict(n_layer=6, n_positions=1024, resid_pdrop=0.1, summary_activation=None)
    d |= dict(summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index")
    d |= dict(summary_use_proj=True, vocab_size=50257)
    d |= dict(task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}})
    want = GPTConfig(**PRESETS["gpt2"] | dict(n_layer=6, mlp="gelu_tanh", dropout=0.1))
    assert from_config(d) == want
    more = dict(predict_special_tokens=True, output_past=True)  # as in gpt2-medium and rugpt3
    assert from_config(d | more) == want


CHANGED = {  # tensor -> (new value, what is said)
    "transformer.h.0.extra.weight": (torch.ones(3), "belongs to no part of this architecture"),
    "lm_head.bias": (torch.ones(300), "lm_head.bias belongs to no part of this architecture"),
    "lm_head.weight": (
        torch.ones(300, 48),
        "lm_head.weight belongs to no part of this architecture, or differs from the tensor",
    ),
    "transformer.h.1.ln_2.bias": (
        torch.ones(48),
        "transformer.h.1.ln_2.bias is not 0, but config.json says use_bias=false",
    ),
    "transformer.h.1.ln_2.weight": (
        torch.ones(48, dtype=torch.int8),
        "is (48,) of torch.int8, config.json wants (48,)",
    ),
}


@pytest.mark.parametrize("tensor", CHANGED)
def test_no_tensor_is_ignored(tensor, tmp_path):
    folder = save(make("gpt2 without biases"), tmp_path)
    value, message = CHANGED[tensor]
    path = folder / "model.safetensors"
    save_file(load_file(path) | {tensor: value}, path)
    with pytest.raises(ValueError) as refused:
        from_pretrained(folder)
    assert message in str(refused.value)


# -- files that are damaged, or that an attacker may have made --


def weights_of(content: bytes) -> dict[str, bytes]:
    return {"model.safetensors": content}


def index_of(name: str) -> dict[str, bytes | None]:
    content = json.dumps({"weight_map": {"model.norm.weight": name}}).encode()
    return {"model.safetensors": None, "model.safetensors.index.json": content}


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**40]}}).encode()
CUT = "model.safetensors: truncated, or not a safetensors file"
FOREIGN = "which is no .safetensors file in this folder"
UNSAFE = {
    "cut in its header": (weights_of(b"\x10\x00"), CUT),
    "a header of 2^60 bytes": (weights_of(struct.pack("<Q", 2**60) + b"{}"), CUT),
    "a header that is no JSON": (weights_of(struct.pack("<Q", 8) + b"\x80\x04rm -rf"), CUT),
    "offsets beyond the file": (weights_of(struct.pack("<Q", len(HEADER)) + HEADER), CUT),
    "a shard above the folder": (index_of("../../secret.safetensors"), FOREIGN),
    "a shard at the root": (index_of("/etc/passwd"), FOREIGN),
    "a shard that is pickled": (index_of("pytorch_model.bin"), FOREIGN),
    "a shard that is gone": (index_of("model-2.safetensors"), "model-2.safetensors: No such file"),
    "an index of numbers": (index_of(7), f"the index names 7, {FOREIGN}"),
    "pickled weights": (
        {"model.safetensors": None, "pytorch_model.bin": b"\x80\x04"},
        "the weights are pickled (pytorch_model.bin), which could execute anything",
    ),
}


@pytest.mark.parametrize("what", UNSAFE)
def test_unsafe_files_are_refused_in_one_line_and_nothing_outside_is_read(what, tmp_path, refuses):
    folder = save(make("llama"), tmp_path / "model")
    save_file({"model.norm.weight": torch.ones(48)}, tmp_path.parent / "secret.safetensors")
    changed, message = UNSAFE[what]
    for name, content in changed.items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    assert message in refuses(sample.main, f"--ckpt={folder}", "--device=cpu")


DAMAGED = [b"", b"[" * 100_000, b"\xff\xfe", b"[1]", b"7", b'{"model": {"type": "BPE"}}']


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_json_is_one_line(name, content, tmp_path, refuses):
    folder = save(make("llama"), tmp_path)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    assert str(folder) in refuses(sample.main, f"--ckpt={folder}", "--device=cpu")


NOT_NANO = [{"model": 7, "model_args": {}}, {"model": {}, "model_args": {"n_layer": 1.0}}]


@pytest.mark.parametrize("content", [None, {}, *NOT_NANO])
def test_a_damaged_nanogpt_checkpoint_is_one_line(content, tmp_path, refuses):
    if content is None:
        (tmp_path / "ckpt.pt").touch()
    else:
        torch.save(content, tmp_path / "ckpt.pt")
    said = refuses(sample.main, f"--ckpt={tmp_path}", "--device=cpu")
    assert "cannot be loaded (ckpt.pt: " in said


def test_a_pickle_that_would_execute_is_refused(tmp_path, refuses):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"model": Evil(), "model_args": {}}, tmp_path / "ckpt.pt")
    path = tmp_path / "ckpt.pt"
    said = refuses(sample.main, f"--ckpt={path}", "--tokenizer=gpt2", "--device=cpu")
    assert "ckpt.pt: not a checkpoint of nanoGPT" in said and not (tmp_path / "executed").exists()


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


# -- tokenizers, out --

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


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpt2", "llama", "qwen3"])
def test_a_pipeline_continues_a_prompt_as_sample_does(
    preset, tiny_data, tmp_path, capsys, transformers
):
    options = ["--n_kv_head=0", "--lr=1e-2", "--max_steps=60", "--eval_every=60", "--save_every=60"]
    folder = checkpoint(tiny_data, tmp_path, f"--preset={preset}", *options)
    pipeline = transformers.pipeline("text-generation", model=str(folder), device="cpu")
    for prompt in ("the loop", "模型 训练 "):
        expected = pipeline(prompt, max_new_tokens=20, do_sample=False)[0]["generated_text"]
        capsys.readouterr()
        options = ["--temperature=0", "--max_new_tokens=20", "--device=cpu", "--dtype=float32"]
        call(sample.main, f"--ckpt={folder}", f"--prompt={prompt}", *options)
        assert capsys.readouterr().out == expected + "\n" and len(expected) > len(prompt) + 10


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


# -- tokenizers, in --


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


# -- the whole way: somebody's model, fine-tuned here, opened there --


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_public_model_is_prepared_for_evaluated_tuned_resumed_and_opened_again(
    kind, tmp_path, capsys, transformers
):
    # The model has more rows than the tokenizer has tokens.
    scaled = {"rope_parameters": LLAMA3} if kind == "llama" else {}
    more = dict(vocab_size=710, max_position_embeddings=64) | scaled
    model = theirs(transformers, kind, **more)
    folder = bpe(tmp_path / "public", "llama3")
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    public = contents(folder)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(300))
    options = ["--name=mine", f"--data_dir={tmp_path}", f"--tokenizer={folder}"]
    call(prepare.main, "--input", corpus, *options, "--val_fraction=0.1")
    options = [f"--eval={tmp_path / 'mine'}", "--device=cpu", "--block_size=32"]
    call(sample.main, f"--ckpt={folder}", *options)
    before = float(capsys.readouterr().out.split("validation loss ")[1].split()[0])
    tune = ["--dataset=mine", "--preset=gpt2", "--eval_every=8", "--eval_tokens=0"]
    tuned = checkpoint(tmp_path, tmp_path / "out", *tune, f"--init_from={folder}")
    said = capsys.readouterr().out
    after = float(said.split("validation loss ")[1].split()[0])
    assert type(model).__name__ in said and after < before - 0.3

    # The shape is that of the checkpoint, whatever --preset says.
    train_tiny(tmp_path, tmp_path / "out", *tune, "--init_from=resume", "--max_steps=12")
    assert "resumed from" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tuned / name).read_bytes() == public[name]
    assert contents(folder) == public  # nothing is written there
    assert from_pretrained(tuned).config == from_pretrained(folder).config
    pipeline = transformers.pipeline("text-generation", model=str(tuned), device="cpu")
    expected = pipeline("the loop", max_new_tokens=20, do_sample=False)[0]["generated_text"]
    options = ["--temperature=0", "--max_new_tokens=20", "--device=cpu", "--dtype=float32"]
    call(sample.main, f"--ckpt={tuned}", "--prompt=the loop", *options)
    assert capsys.readouterr().out == expected + "\n"


def test_evaluation_says_what_training_said(tiny_data, tmp_path, capsys):
    folder = checkpoint(tiny_data, tmp_path, "--eval_tokens=0")
    said = capsys.readouterr().out.split("step 8/8 | validation loss ")[1].splitlines()[0]
    options = [f"--eval={tiny_data / 'tiny'}", "--device=cpu", "--dtype=float32"]
    call(sample.main, f"--ckpt={folder}", *options)
    said = re.sub(r"train [0-9.]+, ", "", said)  # which training evaluates besides
    assert f"validation loss {said} | " in capsys.readouterr().out


def test_other_tokens_are_not_evaluated_or_tuned_on(tiny_data, tmp_path, refuses):
    model = make("llama", vocab_size=700)
    folder = save(model, bpe(tmp_path / "m", "gpt2"))
    said = refuses(sample.main, f"--ckpt={folder}", f"--eval={tiny_data / 'tiny'}", "--device=cpu")
    assert "made with another tokenizer than the model's" in said
    assert f"--tokenizer={folder}" in said
    options = [f"--init_from={folder}", "--max_steps=1"]
    said = refuses(lambda: train_tiny(tiny_data, tmp_path, *options))
    assert "its tokenizer is not the one that made" in said


def test_a_model_without_a_tokenizer_is_evaluated_and_said_to_be(
    tiny_data, tmp_path, capsys, refuses
):
    folder = save(make("llama", vocab_size=400), tmp_path)
    options = [f"--ckpt={folder}", "--device=cpu"]
    call(sample.main, *options, f"--eval={tiny_data / 'tiny'}")
    said = capsys.readouterr()
    assert "validation loss" in said.out and "note: no tokenizer is there" in said.err
    assert "no tokenizer is there: name one" in refuses(sample.main, *options)
    call(sample.main, *options, f"--tokenizer={tiny_data / 'tiny'}", "--max_new_tokens=3")


def test_ids_that_the_model_has_no_rows_for_are_refused(tiny_data, tmp_path, refuses):
    folder = save(make("llama"), tmp_path)  # 300 rows
    options = [f"--ckpt={folder}", f"--tokenizer={tiny_data / 'tiny'}", "--device=cpu"]
    assert "a vocabulary of 300; its tokenizer has 400 tokens" in refuses(sample.main, *options)
    said = refuses(sample.main, *options[::2], f"--eval={tiny_data / 'tiny'}")
    assert "a vocabulary of 400; the model has 300" in said
    said = refuses(lambda: train_tiny(tiny_data, tmp_path, f"--init_from={folder}"))
    assert "vocab_size is 300 there, 400 in the data" in said


def test_config_json_names_the_eos_that_ends_a_text(tiny_data, tmp_path):
    folder = checkpoint(tiny_data, tmp_path, "--preset=gpt2", "--n_kv_head=0")
    config = read(folder / "config.json")
    assert config["eos_token_id"] == config["bos_token_id"] == load_tokenizer(folder).eos_id


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


@pytest.mark.parametrize("name", ["n_head", "logit_softcap"])
def test_a_nanogpt_of_another_kind_is_refused_by_name(name, tmp_path):
    if name in NANO:
        args = {k: v for k, v in NANO.items() if k != name}
    else:
        args = NANO | {name: 30.0}
    torch.save({"model": {}, "model_args": args}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=f"model_args: {name} is missing, or is none of nanoGPT's"):
        from_pretrained(tmp_path)


def test_an_architecture_of_ours_has_no_more_settings_than_ours():
    config = to_config(GPTConfig(**ODD["a class of its own"]))
    with pytest.raises(ValueError, match="logit_softcap=30.0 is not supported"):
        from_config(config | {"logit_softcap": 30.0})


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


def test_overwrite_deletes_nothing_before_the_new_run_can_begin(tiny_data, tmp_path, refuses):
    shutil.copytree(tiny_data / "tiny", tmp_path / "tiny")
    run = train_tiny(tmp_path, tmp_path)
    before = sorted(run.rglob("*"))
    meta = read(tmp_path / "tiny" / "meta.json")
    meta["tokenizer"]["prefix"] = 5
    forge(tmp_path / "tiny", "meta.json", json.dumps(meta).encode())
    said = refuses(lambda: train_tiny(tmp_path, tmp_path, "--overwrite"))
    assert "the prefix 5 is not a list of ids" in said and sorted(run.rglob("*")) == before


def test_a_chat_template_is_kept_where_tokenizer_json_is_made(tmp_path):
    files = first_form(bpe(tmp_path / "m", "gpt2"), heading="")
    files["tokenizer_config.json"] = {"chat_template": "MINE"}
    prepared(tmp_path, "tiny", write_files(tmp_path / "old", files))
    config = read(checkpoint(tmp_path, tmp_path) / "tokenizer_config.json")
    assert config["chat_template"] == "MINE" and config["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    "change, message",
    [
        ("--n_kv_head=4", "does not fit the settings: n_kv_head is 2 there, 4 here"),
        ("--block_size=64", "does not fit the settings: block_size is 32 there, 64 here"),
        ("--d_ff=64", "does not fit the settings: d_ff is 128 there, 64 here"),
    ],
)
def test_a_resume_says_what_the_shape_was(change, message, tiny_data, tmp_path, refuses):
    train_tiny(tiny_data, tmp_path, "--max_steps=4")
    said = refuses(lambda: train_tiny(tiny_data, tmp_path, "--init_from=resume", change))
    assert said.endswith(message)


def test_a_model_with_rope_goes_on_with_longer_sequences_and_with_a_scaling_of_them(
    tiny_data, tmp_path, transformers
):
    first = train_tiny(tiny_data, tmp_path / "first")  # 32 tokens
    short = newest_checkpoint(first / "ckpt")
    more = ["--preset=gpt2", "--block_size=64", "--batch_tokens=512"]  # the preset is ignored
    run = train_tiny(tiny_data, tmp_path, f"--init_from={short}", *more, "--max_steps=4")
    folder = newest_checkpoint(run / "ckpt")
    assert from_pretrained(folder).config.block_size == 64
    loss = metrics(run, "val_loss")
    assert loss[4] < metrics(first, "val_loss")[8] + 0.1
    # A resume has the same shape; another one is refused as any other change of it is.
    train_tiny(tiny_data, tmp_path, "--init_from=resume", "--block_size=64", "--max_steps=6")
    scaled = ["--rope_scaling=yarn:2,32,32,1,1.07", "--run_name=scaled"]
    run = train_tiny(tiny_data, tmp_path, f"--init_from={short}", *more, *scaled, "--max_steps=2")
    again = ["--init_from=resume", "--block_size=64", "--run_name=scaled", "--max_steps=4"]
    train_tiny(tiny_data, tmp_path, *again)
    folder = newest_checkpoint(tmp_path / "scaled" / "ckpt")
    model = from_pretrained(folder)
    assert model.config.rope_scaling == "yarn:2,32,32,1,1.07" and model.config.block_size == 64
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    x = torch.arange(64)[None] % 400
    torch.testing.assert_close(hidden_logits(model, x), theirs(x).logits, atol=1e-4, rtol=1e-4)


def test_a_model_to_fine_tune_keeps_its_context_unless_a_block_size_is_given(
    tiny_data, tmp_path, monkeypatch
):
    folder = newest_checkpoint(train_tiny(tiny_data, tmp_path, "--max_steps=2") / "ckpt")
    asked = {"init_from": str(folder), "max_steps": 2}
    assert settings_of_run(asked).block_size == 32
    assert settings_of_run(asked | {"block_size": 64}).block_size == 64
    (tmp_path / "scratch").symlink_to(folder)  # a model, but not the one that is meant
    monkeypatch.chdir(tmp_path)
    assert settings_of_run({"max_steps": 2}).block_size == TrainConfig().block_size
    other = settings_of_run(asked | {"init_from": str(tmp_path)})  # it will be refused
    assert other.block_size == TrainConfig().block_size


def test_the_folder_of_a_run_is_answered_with_its_newest_checkpoint(tiny_data, tmp_path, refuses):
    run = train_tiny(tiny_data, tmp_path, "--max_steps=2")
    said = refuses(lambda: train_tiny(tiny_data, tmp_path / "new", f"--init_from={run}"))
    assert str(newest_checkpoint(run / "ckpt")) in said


def test_a_shape_that_a_model_to_fine_tune_does_not_have_is_refused_at_its_resume(
    tiny_data, tmp_path, refuses
):
    first = newest_checkpoint(train_tiny(tiny_data, tmp_path / "first", "--max_steps=2") / "ckpt")
    own = ["--n_layer=5", "--max_steps=2"]  # ignored
    train_tiny(tiny_data, tmp_path, f"--init_from={first}", *own)
    more = ["--init_from=resume", "--max_steps=4"]
    said = refuses(lambda: train_tiny(tiny_data, tmp_path, *more, "--n_layer=3"))
    assert "n_layer is 2 there, 3 here" in said
    train_tiny(tiny_data, tmp_path, *more)  # n_layer=2, which the model has


def test_a_resumed_run_at_a_longer_context_keeps_it(tiny_data, tmp_path, refuses):
    short = newest_checkpoint(train_tiny(tiny_data, tmp_path / "first", "--max_steps=2") / "ckpt")
    train_tiny(tiny_data, tmp_path, f"--init_from={short}", "--block_size=64", "--max_steps=2")
    more = ["--init_from=resume", "--max_steps=4"]
    said = refuses(lambda: train_tiny(tiny_data, tmp_path, *more, "--block_size=128"))
    assert "block_size is 64 there, 128 here" in said
