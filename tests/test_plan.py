import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import REPO, TINY, call, metrics, train_tiny
from test_model import ODD

import train
from bench import plan
from bench.memory import Step, activations, largest_batch, measured_peak, needed, step_memory
from configurator import parse
from model import GPT, PRESETS, GPTConfig


def shape(preset: str, V: int, T: int, **more) -> GPTConfig:
    return GPTConfig(**(PRESETS[preset] | dict(vocab_size=V, n_layer=4, n_head=8, n_embd=256, block_size=T) | more))


def on_meta(c: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(c)


GQA = dict(n_kv_head=2)
BF16, FP32 = torch.bfloat16, torch.float32
COMBINATIONS = [  # preset, more, V, B, T, dtype, accum: each of the three moments is the peak of some
    ("gpt2", {}, 500, 8, 256, BF16, 1),
    ("gpt2", {}, 8000, 8, 256, BF16, 1),
    ("gpt2", {}, 8000, 2, 1024, BF16, 1),
    ("gpt2", {}, 8000, 4, 256, FP32, 1),
    ("gpt2", {}, 30000, 1, 64, BF16, 2),
    ("gpt2", dict(dropout=0.1), 2000, 4, 256, BF16, 1),
    ("gpt2", dict(dropout=0.1), 2000, 2, 1024, BF16, 1),  # the CPU's fused attention has no dropout
    ("gpt2", {}, 8000, 4, 256, torch.float16, 1),
    ("llama", GQA, 8000, 4, 256, torch.float16, 2),
    ("llama", {}, 500, 8, 256, BF16, 1),
    ("llama", {}, 8000, 2, 1024, BF16, 1),
    ("llama", {}, 8000, 2, 256, BF16, 4),
    ("llama", GQA | dict(tie_embeddings=True), 8000, 8, 256, BF16, 1),
    ("llama", GQA, 8000, 4, 256, FP32, 1),
    ("llama", GQA | dict(tie_embeddings=True), 30000, 1, 64, BF16, 2),
    ("qwen3", GQA, 8000, 2, 1024, BF16, 1),
    ("qwen3", GQA, 500, 8, 256, BF16, 1),
]


@pytest.mark.parametrize("preset, more, V, B, T, dtype, accum", COMBINATIONS)
def test_the_predicted_peak_is_the_measured_one_within_5_percent(preset, more, V, B, T, dtype, accum):
    c = shape(preset, V, T, **more)
    step = Step(B, T, accum, dtype, False, "cpu")
    when, parts = step_memory(on_meta(c), step)
    assert sum(parts.values()) == pytest.approx(measured_peak(c, step), rel=0.05), when


@pytest.mark.parametrize("preset, T, more", [("gpt2", 256, {}), ("llama", 1024, GQA)])
def test_the_predicted_peak_of_a_compiled_step_is_the_measured_one_within_5_percent(preset, T, more):
    c = shape(preset, 8000, T, **more)
    step = Step(2, T, 1, BF16, True, "cpu")
    assert sum(step_memory(on_meta(c), step)[1].values()) == pytest.approx(measured_peak(c, step), rel=0.05)


@pytest.mark.parametrize("name", ODD)
def test_activations_are_what_autograd_keeps(name):
    """Layer by layer, counted by saved-tensor hooks; in bf16, at a T where attention is fused."""
    kept: dict[int, dict[int, int]] = {}
    for n_layer in (1, 2):  # the difference is a layer
        model = GPT(GPTConfig(**(ODD[name] | dict(n_layer=n_layer, block_size=1024))))
        model.init_weights()
        weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
        storages: dict[int, int] = {}

        def note(t: torch.Tensor, weights=weights, storages=storages) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return t

        x = torch.zeros(1, 1024, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast("cpu", BF16):
            model(x, x)
        kept[n_layer] = sum(storages.values())
    c, step = model.config, Step(1, 1024, 1, BF16, False, "cpu")
    one, two = (sum(activations(replace(c, n_layer=n), step).values()) for n in (1, 2))
    copies = 2 * sum(m.weight.numel() for m in model.blocks[0].modules() if isinstance(m, torch.nn.Linear))
    assert two - one + copies == pytest.approx(kept[2] - kept[1], rel=0.02)


def test_a_layer_of_gpt2_keeps_16_C_numbers_a_token():
    c = GPTConfig(**PRESETS["gpt2"])
    parts = activations(c, Step(1, 1024))
    layers = sum(v for k, v in parts.items() if k != "embedding and head")
    assert layers == 1024 * 12 * (16 * 768 * 2 + 4 * 12)  # and the log-sum-exp of each head


def test_the_largest_batch_fits_and_the_next_does_not():
    model = on_meta(GPTConfig(**PRESETS["gpt2"]))
    for step in (Step(1, 1024), Step(1, 1024, world=6, zero=2), Step(1, 512, compiled=False, device="cpu")):
        B = largest_batch(model, step, 16e9)
        assert B > 1 and needed(model, replace(step, B=B)) <= 16e9 < needed(model, replace(step, B=B + 1))
    assert largest_batch(model, Step(1, 1024), 1e9) == 0


def test_every_device_that_train_py_takes_has_a_prediction():
    model = on_meta(GPTConfig(**PRESETS["gpt2"]))
    assert all(needed(model, Step(1, 512, compiled=False, device=device)) > 2e9 for device in ("cpu", "cuda", "mps"))


def test_ddp_holds_its_buckets_beside_the_gradients_of_earlier_micro_steps():
    """Measured with gloo, 29.4 MB of parameters: 252.6 MB in the second step, predicted 250.4; 223.2 from the third on."""
    model = on_meta(GPTConfig(**PRESETS["gpt2"]))
    P = sum(p.numel() for p in model.parameters())
    one, six = (step_memory(model, Step(4, 1024, 2, world=n))[1] for n in (1, 6))
    assert six.pop("DDP's buckets") == 8 * P == 2 * one["gradients"] and six == one


def test_zero_shares_out_checkpointing_keeps_less_and_other_optimizers_hold_less():
    model, ddp = on_meta(GPTConfig(**PRESETS["gpt2"])), Step(16, 1024, 4, world=8)
    stages = [needed(model, replace(ddp, zero=stage)) for stage in (0, 1, 2, 3)]
    assert stages == sorted(stages, reverse=True) and len(set(stages)) == 4
    others = (dict(checkpointing=True), dict(optimizer="muon"), dict(optimizer="adafactor"))
    assert all(needed(model, replace(ddp, **change)) < stages[0] for change in others)
    assert needed(model, replace(ddp, fused=False)) > stages[0]


# -- known answers, from public papers and notes --


def test_a_6b_model_in_fp32_holds_24_24_and_48_gb():
    model = on_meta(GPTConfig(**PRESETS["gpt2"] | dict(n_layer=28, n_embd=4096, n_head=16, block_size=2048)))
    parts = step_memory(model, Step(1, 64, 2, FP32, False))[1]
    P = model.num_params()["total"]
    assert P == pytest.approx(6e9, rel=0.03)
    gb = {k: parts[k] / P * 6 for k in ("weights", "gradients", "optimizer")}
    assert gb == pytest.approx({"weights": 24, "gradients": 24, "optimizer": 48}, rel=0.01)


def test_the_gradients_of_1500m_parameters_take_6_gb():
    model = on_meta(GPTConfig(**PRESETS["gpt2"] | dict(n_layer=48, n_embd=1600, n_head=25)))
    assert step_memory(model, Step(1, 64, 2))[1]["gradients"] == pytest.approx(6.2e9, rel=0.01)  # of 1.558G


@pytest.mark.parametrize(
    "parameters, tokens, flops, gpus, days, mfu",
    [
        (174.6e9, 300e9, 3.14e23, 1024, 30, 0.379),  # GPT-3 on A100s
        (65.2e9, 1.4e12, 5.48e23, 2048, 21, 0.47),  # LLaMA-65B on A100s
    ],
)
def test_published_runs_have_their_published_compute_and_mfu(parameters, tokens, flops, gpus, days, mfu):
    assert plan.six_nd(parameters, tokens) == pytest.approx(flops, rel=0.003)
    assert plan.hours(flops, 312, mfu, gpus) / 24 == pytest.approx(days, rel=0.01)


def test_minimind_takes_its_published_time():
    flops = plan.six_nd(26e6, 10e9)
    assert 3600 * plan.hours(flops, 75, 1.0) == pytest.approx(20_800)
    assert 3600 * plan.hours(flops, 165, 1.0) == pytest.approx(9_455, rel=1e-4)


@pytest.mark.parametrize("it_per_s, B, tflops", [(12.3, 1, 7.6), (3.3, 8, 16.2)])
def test_iterations_a_second_are_the_tflops_of_the_field_notes(it_per_s, B, tflops):
    assert plan.six_nd(100e6, B * 1024) * it_per_s / 1e12 == pytest.approx(tflops, abs=0.05)


QWEN = dict(vocab_size=151_936, n_layer=28, n_head=12, n_kv_head=2, n_embd=1536, d_ff=8960, block_size=8000)


@pytest.mark.parametrize(
    "T, in_the_note, with_matrix, today", [(8000, 4.18, 0, 2), (4000, 9.56, 1, 5), (2000, 20.58, 5, 11)]
)
def test_a_well_known_notes_batch_sizes_are_understood(T, in_the_note, with_matrix, today):
    """Qwen2.5-1.5B in 80 GiB: the note takes numbers for bytes, and T² for one head alone. One reading that gives its figures:
    a layer keeps 6 C + 4 nkv hs + 3 d_ff a token and two T x T, the head 2 V; 16 bytes a parameter and 1.3 GB of context are gone.
    """
    h, kv, d_ff, V, P = 1536, 256, 8960, 151_936, 1.5437e9
    numbers = 28 * (T * (6 * h + 4 * kv + 3 * d_ff) + 2 * T * T) + T * 2 * V
    assert (80 * 2**30 - 16 * P - 1.3e9) / numbers == pytest.approx(in_the_note, abs=0.01)
    model = on_meta(GPTConfig(**PRESETS["llama"] | QWEN | dict(block_size=T, tie_embeddings=True)))
    assert model.num_params()["total"] == pytest.approx(P, rel=1e-3)  # less the biases of its qkv
    found = [largest_batch(model, Step(1, T, fused=fused), 80 * 2**30) for fused in (False, True)]
    assert found == [with_matrix, today]


# -- the command, and batch_size=auto --


def test_the_plan_says_all_that_one_asks_before_a_run(tmp_path, capsys):
    out, png = tmp_path / "plan.json", tmp_path / "memory.png"
    config = str(REPO / "config" / "train_1b.py")
    call(plan.main, config, "--gpu=a100-80g", "--nproc=6", "--vocab_size=32000", f"--json={out}", f"--png={png}")
    said, found = capsys.readouterr().out, json.loads(out.read_text())
    assert png.stat().st_size > 10_000
    for words in ("Model", "Memory of each device", "fits", "ZeRO-3", "kWh", "Chinchilla", "FLOP/byte", "and not more"):
        assert words in said
    assert found["needed_bytes"] == pytest.approx(sum(found["memory"].values()))
    assert found["largest_batch"] == found["what_if"]["as it is"]["largest_batch"] > 8
    one = found["hours"]["0.3"] * 3600 * 0.3 * 6 * 312e12
    assert one == pytest.approx(found["flops"]["exact"])
    assert found["roofline"]["linear layers"]["bound"] == "compute"
    assert found["roofline"]["optimizer"]["bound"] == "memory"


def test_a_sequence_of_one_token_waits_for_memory_and_one_of_8192_does_not(tmp_path):
    bounds = []
    for T in (1, 8192):
        options = [f"--block_size={T}", "--batch_size=1", "--max_steps=1", "--gpu=h200", "--vocab_size=50257"]
        call(plan.main, *options, f"--json={tmp_path / 'plan.json'}")
        bounds.append(json.loads((tmp_path / "plan.json").read_text())["roofline"]["linear layers"]["bound"])
    assert bounds == ["memory", "compute"]


def test_a_trial_measures_the_run(tiny_data, tmp_path, capsys):
    options = [*TINY, f"--data_dir={tiny_data}", "--max_steps=1000", "--eval_every=100", "--trial"]
    call(plan.main, *options, f"--json={tmp_path / 'plan.json'}")
    found = json.loads((tmp_path / "plan.json").read_text())["trial"]
    assert found["evaluations"] == 10 and found["step"] > 0 and found["start_and_end"] > 0
    parts = found["start_and_end"] + 1000 * found["step"] + 10 * found["evaluation"]
    assert found["all"] == pytest.approx(parts) and "the whole run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "most, batch_tokens, world, want", [(100, 4096, 1, 64), (9, 4096, 1, 8), (5, 40_960, 2, 5), (30, 43 * 64, 1, 22)]
)
def test_the_batch_that_is_found_keeps_the_tokens_of_a_step_as_near_as_it_can(most, batch_tokens, world, want):
    cfg = parse(train.TrainConfig, [f"--batch_tokens={batch_tokens}", "--block_size=64", "--max_steps=1"])
    assert train.even_batch(most, cfg, world) == want


def test_batch_size_auto_trains_what_a_number_trains(tiny_data, tmp_path, capsys):
    auto = train_tiny(tiny_data, tmp_path / "auto", "--batch_size=auto")
    assert "batch_size=auto: 8, tried out" in capsys.readouterr().out
    eight = train_tiny(tiny_data, tmp_path / "8", "--batch_size=8")
    assert metrics(auto, "loss") == metrics(eight, "loss")


def test_a_resumed_run_keeps_the_batch_size_that_auto_found(tiny_data, tmp_path, capsys):
    options = ["--batch_size=auto", "--block_size=16", "--batch_tokens=512"]
    train_tiny(tiny_data, tmp_path, *options, "--max_steps=4", "--batch_size=8")
    run = train_tiny(tiny_data, tmp_path, *options, "--max_steps=8", "--init_from=resume")
    said = capsys.readouterr().out
    assert "batch_size=auto: 8, tried out" in said and "batch_size 8 ->" not in said  # 32 would fit
    assert metrics(run, "loss").keys() == set(range(1, 9))


@pytest.mark.parametrize(
    "compile, kind, flops, want",
    [
        ("auto", "cuda", 1e9, True),
        ("auto", "cpu", 1e12, False),
        ("auto", "cpu", 1e15, True),
        ("auto", "mps", 1e15, False),
    ]
    + [("true", "cpu", 1e9, True), ("false", "cuda", 1e20, False)],
)
def test_auto_compiles_on_cuda_and_for_long_runs_on_a_cpu(compile, kind, flops, want):
    cfg = parse(train.TrainConfig, [f"--compile={compile}", "--max_steps=1"])
    assert train.wants_compile(cfg, kind, flops) is want


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space that works")
def test_batch_size_auto_steps_down_where_memory_runs_out_after_all(tiny_data, tmp_path):
    """The process may not grow by more than 350 MB once the model is there; what is predicted to fit needs more."""
    limited = (
        "import re, resource, sys\n"
        "import configurator, train\n"
        "fit = train.fit_batch\n"
        "def fit_in_less(*args):\n"
        "    now = 1024 * int(re.search(r'VmSize:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "    before = resource.getrlimit(resource.RLIMIT_AS)\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (now + 350_000_000, before[1]))\n"
        "    found = fit(*args)\n"
        "    resource.setrlimit(resource.RLIMIT_AS, before)\n"
        "    return found\n"
        "train.fit_batch = fit_in_less\n"
        "configurator.run(train.main)\n"
    )
    options = [*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path}", "--batch_size=auto", "--n_embd=256"]
    options += ["--n_layer=4", "--batch_tokens=8192", "--max_steps=2"]
    done = subprocess.run([sys.executable, "-c", limited, *options], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = int(done.stdout.split("batch_size=auto: ")[1].split(",")[0])
    assert 1 <= found < 256 and math.isfinite(metrics(tmp_path / "run", "loss")[2])
