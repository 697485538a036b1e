import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.flop_counter import FlopCounterMode

from hardware.kernels import ChunkedCrossEntropy, attend, attention_kernel
from model import GPT, INIT, PRESETS, GPTConfig, KVCache, rope_table, sample_token

SMALL = dict(vocab_size=300, block_size=32, n_layer=3, n_head=4, n_embd=48)
ODD = {  # name -> a shape that a careless export or cache would get wrong
    "gpt2": PRESETS["gpt2"] | SMALL,
    "gpt2 without biases": PRESETS["gpt2"] | SMALL | dict(bias=False, mlp="gelu_tanh"),
    "gpt2 untied": PRESETS["gpt2"] | SMALL | dict(tie_embeddings=False, d_ff=100),
    "llama": PRESETS["llama"] | SMALL | dict(n_head=6, n_kv_head=2, rope_theta=5e5, norm_eps=1e-6),
    "llama tied, biases, wide heads": PRESETS["llama"] | SMALL | dict(tie_embeddings=True, bias=True, head_dim=20),
    "qwen3": PRESETS["qwen3"] | SMALL | dict(n_head=6, n_kv_head=2, head_dim=16),
    "a class of its own": PRESETS["gpt2"] | SMALL | dict(pos="rope", norm="rmsnorm"),
}


def make(name: str, scheme: str = "llama", **overrides) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(ODD[name] | overrides)))
    model.init_weights(scheme)
    return model.eval()


def ids(model: GPT, B: int = 2, T: int = 16) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (B, T), generator=torch.Generator().manual_seed(1))


# -- architecture --


def test_gpt2_has_the_published_number_of_parameters():
    with torch.device("meta"):
        n = GPT(GPTConfig(**PRESETS["gpt2"])).num_params()
    assert n["total"] == 124_439_808  # GPT-2 small
    assert (
        n["matmul"] == 124_439_808 - 1024 * 768 - (2 * 12 + 1) * 2 * 768 - 12 * (3 + 1 + 4 + 1) * 768
    )  # less wpe, norms, biases


@pytest.mark.parametrize("name", ODD)
def test_no_position_sees_the_future(name):
    model = make(name)
    x = ids(model)
    changed = x.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % model.config.vocab_size
    a, b = hidden_logits(model, x), hidden_logits(model, changed)
    torch.testing.assert_close(a[:, :10], b[:, :10])
    assert not torch.allclose(a[:, 10:], b[:, 10:])


def hidden_logits(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Logits of every position, by asking for the last one of every prefix."""
    return torch.stack([model(x[:, : t + 1]) for t in range(x.size(1))], dim=1)


def test_rope_angles_are_exact_to_fp32():
    c = GPTConfig(**(ODD["llama"] | dict(block_size=4096)))
    cos, sin = rope_table(c)[:, :, 0]  # (4096, hs)
    for position, i in ((0, 0), (1, 0), (17, 3), (4095, 0), (4095, 1)):
        angle = position * c.rope_theta ** (-2 * i / c.head_dim)
        for at in (i, i + c.head_dim // 2):
            assert (cos[position, at].item(), sin[position, at].item()) == pytest.approx(
                (math.cos(angle), math.sin(angle)), abs=1e-7
            )


@pytest.mark.parametrize("T", [2, 33, 512])
def test_attention_by_plain_products_is_the_fused_kernel(T):
    """In bf16 on a CPU, forward and backward, to bf16's own rounding."""
    g = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 3, T, 16, generator=g).bfloat16().requires_grad_() for _ in range(3)]
    results = []
    for attention in (
        lambda q, k, v: attend(q, k, v, 0.0),
        lambda q, k, v: sdpa(q.float(), k.float(), v.float(), is_causal=True),
    ):
        y = attention(*qkv)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), qkv)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=0.03 * theirs.float().abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", ODD)
def test_the_loss_is_the_cross_entropy_of_the_logits(name):
    model = make(name)
    x = ids(model, T=17)
    want = torch.nn.functional.cross_entropy(hidden_logits(model, x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(model(x[:, :-1], x[:, 1:]), want)


@pytest.mark.parametrize("dtype, loss_error, error", [(torch.float32, 1e-6, 1e-6), (torch.bfloat16, 1e-6, 5e-3)])
def test_the_chunked_loss_and_its_gradient_are_those_of_the_plain_one(dtype, loss_error, error):
    """37 rows at a vocabulary that fits 10 of them into a chunk, some without a target, and columns that are padding."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(37, 50_304, generator=rng).mul(3).to(dtype)
    logits[:, 50_257:] = -math.inf
    targets = torch.randint(0, 50_257, (37,), generator=rng)
    targets[[0, 12, 36]] = -1
    x, y = (logits.clone().requires_grad_() for _ in range(2))
    plain = F.cross_entropy(x.float(), targets, ignore_index=-1, reduction="sum")
    chunked = ChunkedCrossEntropy.apply(y * 1, targets)  # * 1: it writes over its input, which no leaf may suffer
    assert chunked.item() == pytest.approx(plain.item(), rel=loss_error)
    (plain / 34).backward()
    (chunked / 34).backward()
    assert (y.grad - x.grad).abs().max() <= error * x.grad.abs().max()
    assert y.grad[[0, 12, 36]].count_nonzero() == 0 and y.grad[:, 50_257:].count_nonzero() == 0


def test_the_loss_adds_less_than_one_more_copy_of_the_logits():
    """Counted by torch's profiler; cross_entropy on fp32 logits would take two fp32 copies forward, a third backward."""
    logits = torch.randn(1024, 32_000).bfloat16().requires_grad_()
    targets = torch.randint(0, 32_000, (1024,))

    def most(loss) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
            loss().backward()
        changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = list(itertools.accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())))
        return max(held) / (logits.numel() * 2)

    assert (
        most(lambda: ChunkedCrossEntropy.apply(logits * 1, targets)) < 2.2
    )  # its input, and a chunk or the leaf's gradient
    assert most(lambda: F.cross_entropy((logits * 1).float(), targets)) > 5


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_a_compiled_model_is_the_eager_one_forward_and_backward(name):
    model = make(name)
    idx = ids(model)
    targets = idx.roll(-1, 1)
    targets[0, :3] = -1
    eager = model(idx, targets)
    wanted = torch.autograd.grad(eager, list(model.parameters()))
    loss = torch.compile(model, dynamic=False)(idx, targets)
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert loss.item() == pytest.approx(eager.item(), rel=1e-6)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-8


@pytest.mark.parametrize("T, dtype, kernel", [(64, torch.bfloat16, "plain"), (64, torch.float32, "flash")])
def test_the_attention_kernel_is_named(T, dtype, kernel):
    assert attention_kernel(4, T, 32, torch.device("cpu"), dtype) == kernel


def test_a_fresh_model_starts_near_the_loss_of_guessing():
    model = make("llama")
    x = ids(model, 8, 33)
    assert abs(model(x[:, :-1], x[:, 1:]).item() - math.log(model.config.vocab_size)) < 0.1


def test_vocabulary_padding_gets_no_gradient_and_no_probability():
    model = make("llama")
    assert model.config.padded_vocab_size == 384 and model(ids(model)).shape == (2, 300)
    model(ids(model), ids(model)).backward()
    for weight in (model.wte.weight, model.lm_head.weight):
        assert weight[300:].abs().max() == 0 and weight.grad[300:].abs().max() == 0
    with torch.no_grad():
        model.lm_head.weight[300:] = 100.0  # even if something were there
    seen = torch.stack(list(model.generate(ids(model, 16), 20, temperature=10.0)))
    assert seen.max() < 300


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(n_embd=50), "n_embd=50 does not divide by n_head=4"),
        (dict(n_kv_head=3), "n_head=4 must be a multiple of n_kv_head=3"),
        (dict(n_layer=0), "n_layer must be positive"),
        (dict(pos="rope", head_dim=5), "head_dim=5 must be even"),
    ],
)
def test_an_impossible_shape_is_refused_with_the_numbers(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**(PRESETS["gpt2"] | SMALL | wrong))


# -- accounting --


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_flops_per_token_is_what_torch_counts(name):
    """Forward and backward of one batch, attention as plain matrix products, embeddings not counted."""
    model = make(name, vocab_size=256).train()  # a multiple of 128: padding is work, but not the model's
    x = ids(model, 2, 32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x, x).backward()
    assert counter.get_total_flops() == model.flops_per_token(32) * x.numel()


@pytest.mark.parametrize("name", ODD)
def test_decay_groups_hold_every_parameter_once_and_only_matrices_decay(name):
    model = make(name)
    decayed, other = model.param_groups(0.1)
    assert (decayed["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for g in (decayed, other) for p in g["params"]} == {id(p) for p in model.parameters()}
    assert all(p.dim() == 2 for p in decayed["params"]) and all(p.dim() == 1 for p in other["params"])


# -- initialisation --

L, D = 8, 256  # depth and width of the model that is measured; d_ff = 1024
PROMISED = {  # scheme -> the std of query, value, out, up, down by its published formula
    "gpt2": (0.02, 0.02, 0.02 / math.sqrt(2 * L), 0.02, 0.02 / math.sqrt(2 * L)),
    "llama": (0.02,) * 5,
    "xavier": (math.sqrt(2 / 512),) * 3 + (math.sqrt(2 / 1280),) * 2,
    "kaiming": (math.sqrt(2 / 256),) * 4 + (math.sqrt(2 / 1024),),
    "lecun": (1 / 16,) * 4 + (1 / 32,),
    "small": (math.sqrt(2 / (5 * 256)),) * 5,
    "deepnorm": tuple(
        g * math.sqrt(2 / n) for g, n in ((1, 512), (64**-0.25, 512), (64**-0.25, 512)) + ((64**-0.25, 1280),) * 2
    ),
    "zero_proj": (1 / 16, 1 / 16, 0.0, 1 / 16, 0.0),
}


@pytest.mark.parametrize("scheme", INIT)
def test_init_has_the_standard_deviations_that_its_scheme_promises(scheme):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(PRESETS["gpt2"] | dict(vocab_size=1000, block_size=64, n_layer=L, n_head=4, n_embd=D))))
    model.init_weights(scheme)
    for block in model.blocks:
        query, _, value = block.attn.qkv.weight.split(D)
        found = (query, value, block.attn.proj.weight, block.mlp.up_proj.weight, block.mlp.down_proj.weight)
        for weight, std in zip(found, PROMISED[scheme], strict=True):
            assert weight.std().item() == pytest.approx(std, rel=0.02)
            assert abs(weight.mean().item()) <= 0.02 * std
    assert model.wte.weight[:1000].std().item() == pytest.approx(0.02, rel=0.02)
    assert all((p == (0 if n.endswith("bias") else 1)).all() for n, p in model.named_parameters() if p.dim() == 1)


# -- generation --


@torch.no_grad()
def greedy_without_cache(model: GPT, idx: torch.Tensor, count: int) -> torch.Tensor:
    """(count, B): the whole text through the model for each token."""
    for _ in range(count):
        idx = torch.cat((idx, model(idx).argmax(-1, keepdim=True)), dim=1)
    return idx[:, -count:].T


@pytest.mark.parametrize("name", ODD)
def test_greedy_with_cache_equals_greedy_without_token_for_token(name):
    model = make(name, scheme="xavier")
    prompt = ids(model, 3, 5)
    cached = torch.stack(list(model.generate(prompt, 27, temperature=0)))
    assert cached.shape == (27, 3) and torch.equal(cached, greedy_without_cache(model, prompt, 27))


@pytest.mark.parametrize("name", ODD)
@torch.no_grad()
def test_a_step_that_is_recorded_once_serves_for_every_position(name):
    """As a CUDA graph does, a trace keeps each number that is Python's as it was: only tensors may change from step to step."""
    model = make(name, scheme="xavier")
    prompt = ids(model, 3, 5)
    want = greedy_without_cache(model, prompt, 20)
    cache = KVCache(model.config, 3, 32, torch.device("cpu"), torch.float32)
    token = model(prompt, cache=cache).argmax(-1)

    def step(token, position, k, v):
        cache.k, cache.v = k, v
        cache.fix(position)
        return model(token, cache=cache).argmax(-1)

    recorded = make_fx(step)(token[:, None], torch.tensor([5]), cache.k, cache.v)
    for position in range(5, 5 + 19):
        assert torch.equal(token, want[position - 5])
        token = recorded(token[:, None], torch.tensor([position]), cache.k, cache.v)
    assert torch.equal(token, want[-1])


@pytest.mark.parametrize("how", [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damaged_weights_are_an_error_before_any_token_of_theirs(how, bad):
    model = make("gpt2")
    with torch.no_grad():
        model.norm_f.weight[0] = bad
    with pytest.raises(ArithmeticError, match="not finite"):
        next(model.generate(ids(model, 2, 4), 3, **how))


@pytest.mark.parametrize("block_size", [1, 2, 30, 65])
def test_generation_goes_on_beyond_block_size(block_size):
    """When it is full, with its younger half: as from a new start."""
    model = make("llama", scheme="xavier", block_size=block_size)
    tokens = torch.stack(list(model.generate(ids(model, 2, 40), 100, temperature=0)), dim=1)  # (2, 100)
    idx, want = ids(model, 2, 40)[:, -block_size:], []
    for _ in range(100):
        if idx.size(1) > block_size:
            idx = idx[:, -max(1, block_size // 2) :]
        want.append(greedy_without_cache(model, idx, 1)[0])
        idx = torch.cat((idx, want[-1][:, None]), dim=1)
    assert torch.equal(tokens, torch.stack(want, dim=1))


def test_generation_ends_when_every_row_has_met_eos():
    model = make("llama", scheme="xavier")
    prompt = ids(model, 4, 3)
    first = torch.stack(list(model.generate(prompt, 20, temperature=0)), dim=1)  # (4, 20)
    eos_id = int(first[0, 4])
    rows = torch.stack(list(model.generate(prompt, 20, temperature=0, eos_id=eos_id)), dim=1)
    for row, free in zip(rows.tolist(), first.tolist(), strict=True):
        end = free.index(eos_id) if eos_id in free else len(free)
        assert row[: end + 1] == free[: end + 1][: len(row)] and set(row[end:]) <= {eos_id}
    assert rows.size(1) == min(20, max((r.index(eos_id) + 1 if eos_id in r else 20) for r in first.tolist()))


def test_top_k_and_top_p_keep_just_the_likeliest_tokens():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    g = torch.Generator().manual_seed(0)

    def kept(**settings):
        return set(sample_token(logits, 1.0, generator=g, **settings).tolist())

    assert kept() == {0, 1, 2, 3}
    assert kept(top_k=2) == {0, 1}
    assert kept(top_p=0.79) == {0, 1} and kept(top_p=0.81) == {0, 1, 2} and kept(top_p=0.01) == {0}
    share = (sample_token(logits, 1.0, generator=g) == 0).float().mean().item()
    assert share == pytest.approx(0.5, abs=0.03)
    assert (sample_token(logits, 0.0) == 0).all()
