"""Tests that need a CUDA device; without one they are skipped. `pytest -m gpu tests` runs these."""

import gc
import itertools
import math
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import end, metrics, resumes
from peak import measured_peak
from test_documents import EOS, text_of_documents
from test_model import ODD, generated, ids, make

from hardware.generation import generate
from hardware.kernels import pick_kernels
from hardware.machine import Machine
from model import GPT, PRESETS, GPTConfig
from text.windows import Rows
from train import take_step
from training.batches import to_batch
from training.memory import Workload, step_memory

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EAGER = [f"--device={DEVICE}", "--compile=false"]  # for train_tiny
COMPILERS = [*filter(shutil.which, ("gcc", "cc", "clang"))]
compiles = pytest.mark.skipif(not COMPILERS, reason="torch.compile's Triton needs a C compiler")


def needs_bf16() -> None:
    """Skip the test if the GPU has no bf16. This is called inside a test, because to ask at import
    would take memory on the GPU, even if none of these tests runs.
    """
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8")


@pytest.fixture(autouse=True)
def settings():
    """Multiply fp32 matrices in full fp32, not in TF32, until a run of train.py changes it. After
    the test, restore the precision and forget what was compiled.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    torch.compiler.reset()


def loss_and_gradients(
    forward: torch.nn.Module,
    x: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    eos_id: int | None = None,
) -> tuple[float, list[torch.Tensor]]:
    """Return what a model, compiled or not, computes where it is from tokens x (B, T + 1)."""
    weights = list(forward.parameters())
    x = x.to(weights[0].device)
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        loss = forward(x[:, :-1], x[:, 1:], None, eos_id)
    return loss.item(), [g.float().cpu() for g in torch.autograd.grad(loss, weights)]


def assert_close(gradients: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float):
    """Check that no number is off by more than this share of the largest one in its tensor."""
    for g, e in zip(gradients, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=tolerance * e.abs().max().item())


def wide(preset: str, block_size: int = 128) -> GPT:
    return make(preset, "xavier", n_embd=192, block_size=block_size).train()


def on_gpu(model: GPT, compiled: bool = False) -> GPT:
    """Move a model of make() to the GPU, and give it the kernels of a GPU. Return it."""
    return model.to(DEVICE).use(pick_kernels(torch.device(DEVICE), compiled))


# -- the same numbers --


@compiles
@pytest.mark.parametrize("preset", PRESETS)
def test_compiled_equals_eager_in_fp32(preset):
    model = on_gpu(wide(preset))
    x = ids(model, 4, 129)
    loss, gradients = loss_and_gradients(model, x)
    forward = torch.compile(on_gpu(model, compiled=True), dynamic=False)
    compiled_loss, compiled = loss_and_gradients(forward, x)
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    # The sums are rounded in another order. An error of TF32 would be ten times as large.
    assert_close(compiled, gradients, 1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_bf16_computes_the_loss_and_direction_of_fp32(preset):
    needs_bf16()
    model = on_gpu(wide(preset))
    x = ids(model, 4, 129)
    loss, gradients = loss_and_gradients(model, x)
    low_loss, low = loss_and_gradients(model, x, torch.bfloat16)
    assert low_loss == pytest.approx(loss, rel=1e-3)
    flat, low_flat = (torch.cat([g.flatten() for g in some]).double() for some in (gradients, low))
    assert F.cosine_similarity(flat, low_flat, dim=0).item() > 0.999


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=compiles)])
@pytest.mark.parametrize("preset", PRESETS)
def test_masked_documents_are_those_of_the_cpu(preset, compiled):
    """Loss and gradients of two windows with seven documents each, in fp32, and their loss in an
    evaluation. Compiled, FlexAttention is used where the GPU has compute capability 8.
    """
    x = torch.cat([text_of_documents().roll(n, 1) for n in (0, 100)])
    model = wide(preset, block_size=x.size(1))
    expected, gradients = loss_and_gradients(model, x, eos_id=EOS)
    on_gpu(model, compiled)
    forward = torch.compile(model, dynamic=False) if compiled else model
    loss, computed = loss_and_gradients(forward, x, eos_id=EOS)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert_close(computed, gradients, 1e-3)
    x = x.to(DEVICE)
    with torch.no_grad():
        evaluated = forward(x[:, :-1], x[:, 1:], eos_id=EOS)
    assert evaluated.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ODD)
def test_greedy_tokens_are_those_of_the_cpu(name):
    model = make(name, scheme="xavier")
    prompt = ids(model, 3, 5)
    on_cpu = generated(model, prompt, 60, temperature=0)  # beyond block_size
    tokens = generated(on_gpu(model), prompt.to(DEVICE), 60, temperature=0, record=True)
    assert torch.equal(tokens.cpu(), on_cpu)


# -- whole runs --


@compiles
def test_the_defaults_train_compiled_and_in_16_bits(trains, capsys):
    run = trains("--device=auto", "--dtype=auto", "--compile=auto", "--peak_tflops=0")
    said = capsys.readouterr().out
    assert "compiled in" in said and "warning" not in said and ": compute capability" in said
    losses = metrics(run, "loss")
    assert losses.keys() == set(range(1, 9)) and losses[8] < losses[1] - 0.3
    assert 0 < metrics(run, "memory_gb")[8] < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_bit_identical_to_never_having_stopped(dtype, tiny_data, tmp_path):
    """This holds in eager mode and with a T so short that the backward pass of attention does not
    add up partial sums in an order that changes from run to run.
    """
    if dtype == "bfloat16":
        needs_bf16()
    options = [*EAGER, "--dropout=0.1", f"--dtype={dtype}", "--sample_every=4"]
    resumes(tiny_data, tmp_path, *options)


def test_fp16_trains_and_skips_a_step_that_overflows(trains, capsys, monkeypatch):
    """The scale of the loss begins at 2^30, so gradients overflow until it is small enough."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**30)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    run = trains(*EAGER, "--dtype=float16", "--max_steps=40", "--eval_every=40")
    scales = metrics(run, "loss_scale")
    losses = metrics(run, "loss")
    skipped = len(scales)
    assert 1 <= skipped < 25
    assert [*scales.items()] == [(i + 1, 2.0 ** (29 - i)) for i in range(skipped)]
    assert (
        capsys.readouterr().out.count("fp16 overflow: step skipped, loss scale reduced to")
        == skipped
    )
    assert losses.keys() == set(range(skipped + 1, 41)) and not metrics(run, "bad_steps")
    # The skipped steps changed nothing: the first loss is that of guessing one of 400 tokens.
    assert losses[skipped + 1] == pytest.approx(math.log(400), abs=0.1)
    assert losses[40] < losses[skipped + 1] - 0.3
    assert all(x.isfinite().all() for x in end(run, 40).values())


# -- memory --

LLAMA = PRESETS["llama"]
TIED = LLAMA | dict(tie_embeddings=True)
MODELS = {
    "26M": TIED | dict(vocab_size=6400, n_layer=8, n_head=8, n_kv_head=2, n_embd=512),
    "100M": LLAMA | dict(vocab_size=16_384, n_layer=12, n_head=6, n_embd=768),
    "124M": PRESETS["gpt2"] | dict(n_layer=12),
    "1B": LLAMA | dict(vocab_size=32_000, n_layer=22, n_head=16, n_kv_head=8, n_embd=2048),
}
STEPS = [  # B, T, accum, compiled
    ("26M", 32, 512, 1, False), pytest.param("26M", 128, 512, 2, True, marks=compiles),
    ("100M", 16, 1024, 2, False), ("124M", 32, 1024, 2, False),
    pytest.param("124M", 64, 1024, 2, True, marks=compiles), ("1B", 8, 2048, 1, False),
]  # fmt: skip


@pytest.mark.parametrize("name, B, T, accum, compiled", STEPS)
def test_the_predicted_peak_is_max_memory_allocated(name, B, T, accum, compiled):
    needs_bf16()
    gc.collect()
    torch.cuda.empty_cache()
    c = GPTConfig(**(MODELS[name] | dict(block_size=T)))
    step = Workload(B, T, accum, torch.bfloat16, compiled, DEVICE)
    with torch.device("meta"):
        when, parts = step_memory(GPT(c), step)
    assert sum(parts.values()) == pytest.approx(measured_peak(c, step), rel=0.05), when


# -- speed --


def test_generations_at_once_do_not_disturb_each_other():
    """Each generation has its own CUDA graph. One that is given up frees the memory of its graph,
    and the graph of a third generation is recorded into this memory.
    """
    model = on_gpu(make("llama", scheme="xavier"))
    how = dict(temperature=0, record=True)
    prompts = [ids(model, B, 4).to(DEVICE) for B in (1, 2, 3)]
    alone = [generated(model, prompt, 24, **how) for prompt in prompts]
    first, second = (generate(model, prompt, 24, **how) for prompt in prompts[:2])
    tokens = [token for token, _ in zip(itertools.islice(first, 6), second, strict=False)]
    del second
    assert torch.equal(generated(model, prompts[2], 24, **how), alone[2])
    assert torch.equal(torch.stack([*tokens, *first]), alone[0])


MODES = [("bfloat16", False), pytest.param("bfloat16", True, marks=compiles), ("float16", False)]


@pytest.mark.parametrize("dtype, compiled", MODES)
def test_a_step_waits_for_the_gpu_only_to_read_its_figures(dtype, compiled):
    """Launch a step of 4 micro-steps of 8 x 512 tokens, without reading its loss and norm."""
    if dtype == "bfloat16":
        needs_bf16()
    machine = Machine(0, 0, 1, torch.device(DEVICE), getattr(torch, dtype), "test")
    model = on_gpu(make("llama", n_embd=192, block_size=512, dropout=0.1), compiled).train()
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, enabled=machine.dtype == torch.float16)
    fast = torch.compile(model, dynamic=False) if compiled else model
    rows = Rows(ids(model, 8, 513).numpy(), None, None)
    batches = (to_batch(rows, machine.device) for _ in itertools.count())

    def step():
        torch.manual_seed(1)  # as the training loop does
        return take_step(fast, optimizer, scaler, batches, 4, machine, grad_clip=1.0)

    for _ in range(3):  # compiles, and creates the optimizer's state
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones((), device=DEVICE).item()  # to prove that waiting is noticed
        result = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(number > 0 for number in result.wait()[:2])  # loss, and norm of the gradient
