"""Models of other tools, written and read: most of these tests compare with transformers itself."""

import dataclasses
import json
import os
import re
import struct
from pathlib import Path

import pytest
import tokenizers
import torch
from conftest import (
    POINTERS,
    call,
    contents,
    make_records,
    metrics,
    prepared,
    save_model,
    saved,
    train_tiny,
)
from safetensors.torch import load_file, save_file
from test_hf_tokenizer import bpe, checkpoint, read
from test_model import ODD, hidden_logits, ids
from test_model import make as make_model

import plan
import sample
import train
from configurator import UserError, given_settings
from model import GPT, PRESETS, GPTConfig
from text.dataset import load_tokenizer
from text.shapes import record_text
from training import huggingface
from training.huggingface import GPT2, OURS, architecture_of, from_config, from_pretrained
from training.metrics import read_metrics
from training.settings import TrainConfig
from training.startup import settings_of_run

FITTING = [name for name in ODD if architecture_of(GPTConfig(**ODD[name])) is not OURS]


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
    save_model(model, folder, eos_id=0, bos_id=0)
    return folder


def logits(model: GPT, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return hidden_logits(model.eval(), x)


# -- weights, out --


def test_a_new_field_of_the_model_is_never_lost_in_a_folder():
    """Whoever adds a field to GPTConfig must find it again when the run is resumed."""
    field = ("softcap", float, dataclasses.field(default=0.0))
    wider = dataclasses.make_dataclass("Wider", [field], bases=(GPTConfig,))
    for preset in PRESETS.values():
        assert architecture_of(wider(**preset)) is not OURS
        assert architecture_of(wider(**preset, softcap=30.0)) is OURS


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
    assert PRESETS.keys() <= {*FITTING} and "a class of its own" not in FITTING
    gpt2 = ODD["gpt2"]
    assert architecture_of(GPTConfig(**gpt2, rope_theta=5e5)) is GPT2  # it has no effect
    for change in (dict(mlp="swiglu"), dict(n_kv_head=2), dict(head_dim=16), dict(qk_norm=True)):
        c = GPTConfig(**gpt2 | change)
        assert architecture_of(c) is OURS and from_config(huggingface.to_config(c)) == c


@pytest.mark.parametrize("name", FITTING)
def test_transformers_computes_the_same_logits(name, tmp_path, transformers):
    model = make(name, scheme="xavier")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(save(model, tmp_path)).eval()
    x = ids(model)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, logits(model, x), atol=1e-4, rtol=0)


def test_an_architecture_without_a_class_is_saved_and_says_so(tiny_data, tmp_path, capsys):
    folder = checkpoint(tiny_data, tmp_path, "--mlp=gelu")
    config = read(folder / "config.json")
    assert config["note"] in capsys.readouterr().out  # in the banner
    assert config["eos_token_id"] == config["bos_token_id"] == load_tokenizer(folder).eos_id
    options = [f"--tokenizer={folder}", "--max_new_tokens=3", "--device=cpu"]
    call(sample.main, f"--ckpt={folder}", *options)


# -- weights, in --


def theirs(transformers, kind: str, **more):
    """Return a random model made by transformers, of a shape that is not the default anywhere."""
    shape = dict(vocab_size=300, bos_token_id=0, eos_token_id=0)
    if kind == "GPT2":
        shape |= dict(n_layer=3, n_embd=48, n_head=4, n_positions=32)
    else:
        shape |= dict(hidden_size=48, intermediate_size=100, max_position_embeddings=32)
        shape |= dict(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2)
        shape |= dict(initializer_range=0.1)
    if kind == "Qwen3":
        shape["head_dim"] = 16
    config = getattr(transformers, f"{kind}Config")(**shape | more)
    torch.manual_seed(0)
    return shaken(transformers.AutoModelForCausalLM.from_config(config).eval())


BIASES = {"attention_bias": True, "mlp_bias": True}
FIRST = "original_max_position_embeddings"  # what the model had before its RoPE was scaled
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {FIRST: 8, "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, FIRST: 8, "rope_theta": 1e4}


THEIRS = [
    ("GPT2", {}, "5GB", "bfloat16"),
    ("GPT2", {"activation_function": "gelu", "tie_word_embeddings": False}, "40KB", "float32"),
    ("Llama", {"rope_theta": 5e5, "rms_norm_eps": 1e-5}, "20KB", "bfloat16"),
    ("Llama", BIASES | {"tie_word_embeddings": True, "head_dim": 10}, "5GB", "float32"),
    ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 3}, "20KB", "bfloat16"),
    ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}, "20KB", "float32"),
    ("Qwen2", {"rope_parameters": LINEAR, "num_key_value_heads": 6}, "5GB", "bfloat16"),
    ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, "5GB", "float32"),
    ("Qwen3", {"rope_parameters": LLAMA3, "head_dim": 18}, "5GB", "float32"),
]


@pytest.mark.parametrize("kind, more, shards, dtype", THEIRS)
def test_models_of_transformers_compute_the_same_here_and_back(
    kind, more, shards, dtype, tmp_path, transformers
):
    """At all positions, most of them beyond the length that a scaled RoPE was made for."""
    public = theirs(transformers, kind, **more).to(getattr(torch, dtype))
    public.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards != "5GB")
    auto = transformers.AutoModelForCausalLM
    stored = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = from_pretrained(tmp_path)
    again = auto.from_pretrained(save(ours, tmp_path / "ours")).eval()
    x = ids(ours, T=32)
    with torch.no_grad():
        expected = stored(x).logits
        torch.testing.assert_close(logits(ours, x), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(again(x).logits, expected, atol=1e-4, rtol=0)


def test_gpt2_as_openai_named_it_is_read(tmp_path):
    """The names lack the prefix of the class, and there are the masks that old versions stored."""
    model = make("gpt2", mlp="gelu_tanh")
    stored = load_file(save(model, tmp_path) / "model.safetensors")
    stored = {k.removeprefix("transformer."): w for k, w in stored.items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(stored, tmp_path / "model.safetensors")
    assert torch.equal(logits(from_pretrained(tmp_path), ids(model)), logits(model, ids(model)))


NANO = dict(n_layer=3, n_head=4, n_embd=48, block_size=32, vocab_size=300, bias=True)


def as_nanogpt(model: GPT) -> dict[str, torch.Tensor]:
    """Return the weights under the names of nanoGPT, and in its shapes."""
    c = model.config
    stored = huggingface.to_state(architecture_of(c), c, dict(model.named_parameters()))
    state = {"lm_head.weight": stored["transformer.wte.weight"]}
    for name, w in stored.items():
        if c.bias or "bias" not in name:
            state[name] = w.t() if ".h." in name and w.dim() == 2 else w
    return state


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", ["", "_orig_mod."])
def test_a_checkpoint_of_nanogpt_is_read(bias, compiled, tmp_path, trains, refuses):
    model = make("gpt2", bias=bias)
    state = {compiled + name: w for name, w in as_nanogpt(model).items()}
    args = NANO | dict(bias=bias, dropout=0.1)
    content = {"model": state, "model_args": args, "optimizer": {}, "iter_num": 1, "config": {}}
    torch.save(content, tmp_path / "ckpt.pt")
    theirs = from_pretrained(tmp_path / "ckpt.pt")
    assert torch.equal(logits(theirs, ids(model)), logits(model, ids(model)))
    assert huggingface.read_shape(tmp_path / "ckpt.pt") == theirs.config
    assert "a vocabulary of 300" in refuses(lambda: trains(f"--init_from={tmp_path}/ckpt.pt"))


LLAMA = huggingface.to_config(GPTConfig(**ODD["llama"]))
REFUSED = [  # a word of the message, settings in config.json; ...: the key is missing
    ("rope_scaling", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
    ("rope_scaling", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("rope_scaling", {"rope_scaling": YARN}),
    ("rope_theta", {"rope_theta": 0.5}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("model_type", {"model_type": ...}),
    ("mlp_bias", {"attention_bias": True}),
    ("layer_types", {"layer_types": ["sliding_attention"]}),
    ("n_layer", {"num_hidden_layers": "three"}),
    ("hidden_size", {"hidden_size": ...}),
    ("n_kv_head", {"num_key_value_heads": 4}),
    ("block_size", {"max_position_embeddings": 10**10}),
    ("no tensor of layer", {"num_hidden_layers": 10**9}),
    ("model.layers.0.self_attn.q_norm.weight", {"model_type": "qwen3", "head_dim": 8}),
    ("embed_tokens", {"vocab_size": 301}),
    ("no memory", {"vocab_size": 2**31, "hidden_size": 2**30}),
    ("k_proj", {"num_key_value_heads": 3}),
]


@pytest.mark.parametrize("word, settings", REFUSED)
def test_what_is_not_computed_here_is_refused_by_name(word, settings, tmp_path):
    save(make("llama"), tmp_path)
    settings = {k: v for k, v in (LLAMA | settings).items() if v is not ...}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=re.escape(word)) as refused:
        from_pretrained(tmp_path)
    assert "\n" not in str(refused.value)


HARMLESS = dict(_attn_implementation_autoset=True, _flash_attn_2_enabled=True, num_beams=1)
HARMLESS |= dict(max_sequence_length=32, model_max_length=32, tokenizer_padding_side="left")
HARMLESS |= dict(loss_type="ForCausalLMLoss", _commit_hash="a", pretraining_tp=1, spm_version=2)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "qwen3"])
def test_keys_that_change_no_logits_are_ignored(name):
    c = GPTConfig(**(PRESETS[name] | dict(n_head=4, n_embd=48)))
    content = huggingface.to_config(c)
    assert from_config(content | HARMLESS) == from_config(content)
    for key in ("final_logit_softcapping", "logits_scaling"):
        with pytest.raises(ValueError, match=key):
            from_config(content | {key: 30.0})


def test_an_unknown_key_of_our_own_class_may_be_deleted():
    content = huggingface.to_config(GPTConfig(mlp="swiglu"))
    assert from_config(content | dict(_commit_hash="a", later=0)) == from_config(content)
    with pytest.raises(ValueError, match="later=1.*delete the line"):
        from_config(content | dict(later=1))


FILES = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_pointer_in_place_of_a_file_is_named(name, tmp_path, refuses):
    folder = save(make("llama"), tmp_path)
    for pointer, cure in POINTERS:
        (folder / name).write_text(pointer)
        message = refuses(sample.main, f"--ckpt={folder}", "--device=cpu")
        assert name in message and cure in message


def test_a_tied_head_that_differs_names_its_setting(tmp_path):
    folder = save(make("gpt2"), tmp_path)
    path = folder / "model.safetensors"
    state = load_file(path)
    for head in (1.01 * state["transformer.wte.weight"], torch.ones(300, 48)):
        save_file(state | {"lm_head.weight": head}, path)
        with pytest.raises(UserError, match="tie_word_embeddings"):
            from_pretrained(folder)


CHANGED = {  # tensor -> its new value
    "transformer.h.0.extra.weight": torch.ones(3),
    "lm_head.weight": torch.ones(300, 48),
    "transformer.h.1.ln_2.bias": torch.ones(48),
    "transformer.h.1.ln_2.weight": torch.ones(48, dtype=torch.int8),
}


@pytest.mark.parametrize("tensor", CHANGED)
def test_no_tensor_is_ignored(tensor, tmp_path):
    folder = save(make("gpt2 without biases"), tmp_path)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {tensor: CHANGED[tensor]}, path)
    with pytest.raises(UserError, match=tensor):
        from_pretrained(folder)


# -- files that are damaged, or that an attacker may have made --


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**40]}}).encode()
UNSAFE = [  # what an attacker may put into model.safetensors
    struct.pack("<Q", 2**60) + b"{}",  # a header of 2^60 bytes
    struct.pack("<Q", 8) + b"\x80\x04rm -rf",  # a header that is no JSON
    struct.pack("<Q", len(HEADER)) + HEADER,  # offsets beyond the file
]
NO_OBJECT = [b"", b"[" * 100_000, b"\xff\xfe", b"[1]", b'{"model": {"type": "BPE"}}']
DAMAGED = [("model.safetensors", content) for content in UNSAFE]
for name in ("config.json", "model.safetensors.index.json", "tokenizer.json"):
    DAMAGED += [(name, content) for content in NO_OBJECT]
SHARDS = ["../../secret.safetensors", "/etc/passwd", "pytorch_model.bin", "gone.safetensors", 7, ""]


@pytest.mark.parametrize("name, content", DAMAGED)
def test_a_damaged_file_is_one_line(name, content, tmp_path, refuses):
    folder = save(make("llama"), tmp_path)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    assert str(folder) in refuses(sample.main, f"--ckpt={folder}", "--device=cpu")


@pytest.mark.parametrize("shard", SHARDS)
def test_an_index_names_safetensors_in_its_folder_or_is_refused(shard, tmp_path, refuses):
    folder = save(make("llama"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    save_file({"model.norm.weight": torch.ones(48)}, tmp_path.parent / "secret.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "safetensors" in refuses(sample.main, f"--ckpt={folder}", "--device=cpu")
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert str(shard) in refuses(sample.main, f"--ckpt={folder}", "--device=cpu")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


NOT_NANO = [  # a word of the message, what ckpt.pt holds
    ("ckpt.pt", Evil()),
    ("ckpt.pt", {"model": 7, "model_args": NANO}),
    ("n_layer", {"model": {}, "model_args": NANO | {"n_layer": 1.0}}),
    ("n_head", {"model": {}, "model_args": {k: NANO[k] for k in NANO if k != "n_head"}}),
    ("logit_softcap", {"model": {}, "model_args": NANO | {"logit_softcap": 30.0}}),
]


@pytest.mark.parametrize("word, content", NOT_NANO)
def test_a_pickle_that_is_not_nanogpt_s_executes_nothing(
    word, content, tmp_path, refuses, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "ckpt.pt")
    assert word in refuses(sample.main, "--ckpt=ckpt.pt", "--device=cpu")
    assert os.listdir() == ["ckpt.pt"]


# -- the whole way: somebody's model, fine-tuned here, opened there --


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_a_public_model_is_evaluated_tuned_resumed_and_reopened(
    kind, tmp_path, capsys, prints, transformers
):
    # The model has more rows than the tokenizer has tokens.
    scaled = {"rope_parameters": LLAMA3} if kind == "Llama" else {}
    more = dict(vocab_size=710, max_position_embeddings=64) | scaled
    folder = bpe(tmp_path / "public", "llama3")
    theirs(transformers, kind, **more).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    public = contents(folder)
    prepared(tmp_path, make_records(300), "--name=mine", f"--tokenizer={folder}")
    options = [f"--eval={tmp_path / 'mine'}", "--device=cpu", "--block_size=32"]
    printed = prints(sample.main, f"--ckpt={folder}", *options)
    before = float(printed.split("validation loss ")[1].split()[0])
    # The shape is that of the checkpoint, whatever --preset says.
    tune = ["--dataset=mine", "--preset=gpt2", "--eval_every=8", "--eval_tokens=0"]
    tuned = checkpoint(tmp_path, tmp_path / "out", *tune, f"--init_from={folder}")
    after = float(capsys.readouterr().out.split("validation loss ")[1].split()[0])
    assert after < before - 0.3
    train_tiny(tmp_path, tmp_path / "out", *tune, "--init_from=resume", "--max_steps=12")
    assert "resumed from" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tuned / name).read_bytes() == public[name]
    assert contents(folder) == public  # nothing is written there
    assert from_pretrained(tuned).config == from_pretrained(folder).config
    # In these four steps, the likeliest token is well ahead of the next one.
    greedy = ["--temperature=0", "--max_new_tokens=4", "--device=cpu", "--dtype=float32"]
    text = prints(sample.main, f"--ckpt={tuned}", "--prompt=the loop", *greedy)
    pipeline = transformers.pipeline("text-generation", model=str(tuned), device="cpu")
    [continued] = pipeline("the loop", max_new_tokens=4, do_sample=False)
    assert text == continued["generated_text"] + "\n"


def test_evaluation_says_what_training_said(tiny_data, tmp_path, capsys):
    folder = checkpoint(tiny_data, tmp_path, "--eval_tokens=0")
    said = capsys.readouterr().out.split("step 8/8 | validation loss ")[1].splitlines()[0]
    options = [f"--eval={tiny_data / 'tiny'}", "--device=cpu", "--dtype=float32"]
    call(sample.main, f"--ckpt={folder}", *options)
    said = re.sub(r"train [0-9.]+, ", "", said)  # which training evaluates besides
    printed = capsys.readouterr().out.split("validation loss ")[1]
    ours, theirs = ([*map(float, re.findall(r"\d+\.\d+", s))][:4] for s in (said, printed))
    assert ours == pytest.approx(theirs, rel=1e-4)  # they are printed with five digits


def test_a_model_refuses_the_ids_of_another_tokenizer(tiny_data, tmp_path, refuses):
    data = tiny_data / "tiny"  # 400 tokens
    small = save(make("llama"), tmp_path / "small")  # 300 rows, and no tokenizer
    other = save(make("llama", vocab_size=700), bpe(tmp_path / "other", "gpt2"))
    advice = f"--tokenizer={other}"
    sampled = [(small, f"--tokenizer={data}", "400"), (small, f"--eval={data}", "400")]
    sampled += [(other, f"--tokenizer={data}", "not those of"), (other, f"--eval={data}", advice)]
    for folder, option, word in sampled:
        assert word in refuses(sample.main, f"--ckpt={folder}", option, "--device=cpu")
    for folder, word in ((small, "400"), (other, advice)):
        start = f"--init_from={folder}"
        assert word in refuses(lambda: train_tiny(tiny_data, tmp_path, start))  # noqa: B023


def test_a_model_without_a_tokenizer_is_evaluated_with_a_note(tiny_data, tmp_path, capsys, refuses):
    folder = save(make("llama", vocab_size=400), tmp_path)
    options = [f"--ckpt={folder}", "--device=cpu"]
    call(sample.main, *options, f"--eval={tiny_data / 'tiny'}")
    said = capsys.readouterr()
    assert "validation loss" in said.out and "has no tokenizer" in said.err
    assert "--tokenizer" in refuses(sample.main, *options)
    call(sample.main, *options, f"--tokenizer={tiny_data / 'tiny'}", "--max_new_tokens=3")


def test_a_model_with_rope_is_tuned_on_longer_scaled_sequences(
    finished, trains, transformers, capsys
):
    longer = ["--block_size=64", "--batch_tokens=512"]  # the finished run has 32
    start = [f"--init_from={saved(finished)}", *longer, "--max_steps=4"]
    run = trains(*start, "--rope_scaling=llama3:2,1,4,32")
    [told] = re.findall("not trained with these positions: (.*)", capsys.readouterr().err)
    assert told == "block_size 32 -> 64, rope_scaling '' -> 'llama3:2,1,4,32'"
    assert metrics(run, "val_loss")[4] < metrics(finished, "val_loss")[8] + 0.1
    # A resume has the same shape, without being told.
    trains("--init_from=resume", *longer, "--max_steps=6")
    folder = saved(run)
    model = from_pretrained(folder)
    assert model.config.rope_scaling == "llama3:2,1,4,32" and model.config.block_size == 64
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    x = torch.arange(64)[None] % 400
    torch.testing.assert_close(hidden_logits(model, x), theirs(x).logits, atol=1e-4, rtol=1e-4)


def test_a_tuned_model_keeps_its_shape_and_refuses_another(
    finished, tiny_data, tmp_path, capsys, refuses
):
    short = saved(finished)
    # The folder of a run stands for its newest checkpoint.
    assert settings_of_run({"init_from": str(finished), "max_steps": 2}).init_from == str(short)
    start = [f"--init_from={finished}", "--block_size=64", "--max_steps=2"]
    train_tiny(tiny_data, tmp_path, *start, "--n_layer=5", "--n_head=3")  # not of a width of 32
    assert "keeps its own shape and ignores n_layer=5 n_head=3" in capsys.readouterr().err
    settings = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["settings"]
    assert (settings["init_from"], settings["n_layer"]) == (str(short), 2)
    more = ["--init_from=resume", "--max_steps=4"]
    for name, size, other in (("n_layer", 2, 3), ("block_size", 64, 128), ("d_ff", 128, 64)):
        said = refuses(lambda: train_tiny(tiny_data, tmp_path, *more, f"--{name}={other}"))  # noqa: B023
        assert f"{name} was {size}, is {other}" in said
    call(train.main, f"--data_dir={tiny_data}", f"--out_dir={tmp_path}", *more)


def test_the_last_init_from_decides_whether_a_run_resumes(tmp_path):
    (tmp_path / "c.py").write_text("init_from = 'auto'\n")
    for argv, expected in (
        (["--init_from=auto", "--init_from=scratch"], ("scratch", "no")),
        ([str(tmp_path / "c.py"), "--init_from=scratch"], ("scratch", "no")),
        (["--init_from=x", "--init_from=auto"], ("x", "auto")),
        (["--init_from=auto", "--init_from=x"], ("x", "auto")),
        (["--init_from=resume"], ("scratch", "yes")),
    ):
        cfg = TrainConfig(**given_settings(TrainConfig, argv))
        assert (cfg.init_from, cfg.resume) == expected, argv


def test_a_tuning_that_saved_nothing_is_not_resumed(finished, trains, refuses):
    spoilt = [f"--init_from={saved(finished)}", "--lr=1e38", "--warmup_ratio=0", "--grad_clip=0"]
    assert "is not saved: NaN" in refuses(lambda: trains(*spoilt))
    for how in ("auto", "resume"):
        said = refuses(lambda: trains(f"--init_from={how}"))  # noqa: B023
        assert f"started from {saved(finished)}" in said and "--init_from=auto" in said


@pytest.mark.parametrize("by_config", [True, False])
def test_auto_begins_or_resumes_a_tuning(finished, trains, tmp_path, prints, by_config):
    """The same command, with --init_from=auto added, does both. plan.py plans what it begins."""
    start = [f"--init_from={finished}"]
    if by_config:
        (tmp_path / "c.py").write_text(f"init_from = {str(finished)!r}\n")
        start = [str(tmp_path / "c.py")]
    started = trains(*start, "--max_steps=4", "--run_name=a").with_name("a")
    for steps in (4, 8):  # begins; goes on
        command = [*start, "--init_from", "auto", f"--max_steps={steps}", "--run_name=b"]
        run = trains(*command).with_name("b")
        settings = read_metrics(run / "metrics.jsonl")[0]["settings"]
        assert settings["init_from"] == str(saved(finished)) and settings["block_size"] == 32
    assert metrics(run, "loss")[1] == metrics(started, "loss")[1]
    assert metrics(run, "loss").keys() == set(range(1, 9))
    shown = prints(plan.main, *command, "--vocab_size=400", "--device=cpu", "--peak_tflops=1")
    assert "2 layers x 32" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, preset",
    [("train", "llama"), ("char", "gpt2"), ("byte", "qwen3"), ("tokenizer.json", "qwen3")],
)
def test_what_transformers_saves_of_a_checkpoint_opens_again(
    kind, preset, tmp_path, capsys, refuses, prints, transformers
):
    records = make_records(300)
    if kind == "tokenizer.json":  # no other file says what its tokens are for
        kind = tmp_path / "bare"
        kind.mkdir()
        bare = tokenizers.ByteLevelBPETokenizer()
        texts = [record_text(record)[0] for record in records]
        bare.train_from_iterator(texts, 400, special_tokens=["</s>"])
        bare.save(str(kind / "tokenizer.json"))
    data = prepared(tmp_path, records, f"--tokenizer={kind}")
    folder = checkpoint(tmp_path, tmp_path / "out", f"--preset={preset}", "--n_kv_head=4")
    auto = transformers.AutoModelForCausalLM.from_pretrained(folder)
    back = tmp_path / "back"
    auto.to(torch.bfloat16).save_pretrained(back, max_shard_size="30KB")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(back)
    assert len(list(back.glob("*.safetensors"))) > 1 and not (back / "tokenizer.model").exists()
    greedy = ["--prompt=the", "--temperature=0", "--max_new_tokens=8", "--device=cpu"]
    assert prints(sample.main, f"--ckpt={back}", *greedy).startswith("the")
    tuned = checkpoint(tmp_path, tmp_path / "tuned", f"--init_from={back}")
    assert from_pretrained(tuned).config == from_pretrained(folder).config
    before = [(data / f"{split}.bin").read_bytes() for split in ("train", "val")]
    prepared(tmp_path, records, "--name=again", f"--tokenizer={back}")
    again = tmp_path / "again"
    assert before == [(again / f"{split}.bin").read_bytes() for split in ("train", "val")]
    assert "again: back tokenizer" in capsys.readouterr().out
    (back / "config.json").rename(back / "adapter_config.json")
    start = f"--init_from={back}"
    assert "merge_and_unload()" in refuses(lambda: train_tiny(tmp_path, tmp_path / "x", start))


def test_what_auto_tokenizer_makes_of_our_qwen2_is_refused(
    tiny_data, tmp_path, refuses, transformers
):
    folder = checkpoint(tiny_data, tmp_path, "--preset=qwen2", "--max_steps=4")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "back")
    named = f"--tokenizer={tmp_path / 'back'}"
    assert "of the checkpoint" in refuses(lambda: prepared(tmp_path, make_records(9), named))
