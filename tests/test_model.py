"""The model: its architecture, its numbers, its initialisation, and the text that it generates."""

import math
import re
import textwrap

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU
from torch.fx.experimental.proxy_tensor import make_fx

from hardware import kernels
from hardware.generation import KVCache, RecordedCache, generate, sample_token
from hardware.kernels import ChunkedCrossEntropy, pick_kernels
from model import (
    ACTIVATIONS,
    GPT,
    INIT,
    PRESETS,
    GPTConfig,
    Kernels,
    rope_table,
)
from model import __doc__ as description

SMALL = dict(vocab_size=300, block_size=32, n_layer=3, n_head=4, n_embd=48)
LLAMA = PRESETS["llama"] | SMALL
ODD = {  # name -> a shape that a careless export or cache would get wrong
    "gpt2": PRESETS["gpt2"] | SMALL,
    "gpt2 without biases": PRESETS["gpt2"] | SMALL | dict(bias=False, mlp="gelu_tanh"),
    "gpt2 untied": PRESETS["gpt2"] | SMALL | dict(tie_embeddings=False, d_ff=100),
    "llama": LLAMA | dict(n_head=6, n_kv_head=2, rope_theta=5e5, norm_eps=1e-6),
    "llama tied, biases, wide heads": LLAMA | dict(tie_embeddings=True, bias=True, head_dim=20),
    "qwen3": PRESETS["qwen3"] | SMALL | dict(n_head=6, n_kv_head=2, head_dim=16),
    "qwen2": LLAMA | dict(n_head=6, n_kv_head=2, qkv_bias=True, rope_theta=1e6),
    "qwen2, RoPE as linear": LLAMA | dict(qkv_bias=True, rope_scaling="linear:4"),
    "llama, RoPE as llama3": LLAMA | dict(rope_scaling="llama3:8,1,4,16", tie_embeddings=True),
    "qwen3, RoPE as linear": PRESETS["qwen3"] | SMALL | dict(rope_scaling="linear:2.5"),
    "a class of its own": PRESETS["gpt2"] | SMALL | dict(pos="rope", norm="rmsnorm"),
}


def make(name: str, scheme: str = "llama", **overrides) -> GPT:
    """Return a model of ODD with the kernels of a CPU, as train.py and sample.py use them."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(ODD[name] | overrides)), scheme)
    return model.use(pick_kernels(CPU.device)).eval()


def ids(model: GPT, B: int = 2, T: int = 16) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (B, T), generator=rng)


def generated(model: GPT, prompt: torch.Tensor, count: int, **how) -> torch.Tensor:
    """Return the tokens that follow the prompt, (count, B), or fewer where all rows met eos."""
    return torch.stack(list(generate(model, prompt, count, **how)))


# -- architecture --


IMPOSSIBLE = [
    dict(n_embd=50),
    dict(n_kv_head=3),
    dict(n_layer=0),
    dict(head_dim=5),
    dict(mlp="swish"),  # an unknown kind once trained GELU, without a word
    dict(rope_scaling="linear"),
    dict(rope_scaling="ntk:2"),
    dict(rope_scaling="yarn:4,16,32,1,1.1"),
    dict(rope_scaling="llama3:8,4,1,16"),  # LOW and HIGH the wrong way round
    dict(rope_scaling="linear:2", pos="learned"),
]


@pytest.mark.parametrize("shape", IMPOSSIBLE)
def test_a_shape_that_cannot_be_is_refused_by_name(shape):
    with pytest.raises(ValueError, match=next(iter(shape))):
        GPTConfig(**LLAMA | shape)


ROOT = (2 / math.pi) ** 0.5
FORMULAS = {  # of MLPs: u = up(x), g = gate(x), where there is one
    "gelu": lambda u, g: u * (1 + torch.erf(u / 2**0.5)) / 2,
    "gelu_tanh": lambda u, g: u * (1 + torch.tanh(ROOT * (u + 0.044715 * u**3))) / 2,
    "swiglu": lambda u, g: g * torch.sigmoid(g) * u,
}


@pytest.mark.parametrize("mlp", ACTIVATIONS)
def test_an_mlp_computes_the_formula_of_its_name(mlp):
    module = make("llama", mlp=mlp, bias=True).blocks[0].mlp
    x = torch.randn(3, SMALL["n_embd"])
    gate = module.gate_proj(x) if module.gate_proj else None
    expected = module.down_proj(FORMULAS[mlp](module.up_proj(x), gate))
    torch.testing.assert_close(module(x), expected)


def hidden_logits(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of every prefix of x, (B, T, V): the model only returns the last ones."""
    return torch.stack([model(x[:, : t + 1]) for t in range(x.size(1))], dim=1)


def hidden_states(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Return the residual stream of x (B, T) after the last block, (B, T, C)."""
    found = []
    hook = model.norm_f.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    model(x, x)
    hook.remove()
    return found[0]


@pytest.mark.parametrize("name", ODD)
def test_the_loss_is_the_cross_entropy_and_sees_no_future(name):
    model = make(name)
    x = ids(model, T=17)
    idx, targets = x[:, :-1], x[:, 1:]
    want = F.cross_entropy(hidden_logits(model, idx).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(idx, targets), want)


def test_rope_angles_are_exact_to_fp32():
    c = GPTConfig(**(ODD["llama"] | dict(block_size=4096)))
    cos, sin = rope_table(c)[:, :, 0]  # (4096, hs)
    for position, i in ((0, 0), (1, 0), (17, 3), (4095, 0), (4095, 1)):
        angle = position * c.rope_theta ** (-2 * i / c.head_dim)
        for at in (i, i + c.head_dim // 2):
            assert cos[position, at].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[position, at].item() == pytest.approx(math.sin(angle), abs=1e-7)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_the_chunked_loss_and_its_gradient_are_those_of_the_plain_one(
    dtype, error, apart, monkeypatch
):
    """Of 37 rows, 10 fit into a chunk. Some rows have no target, and some columns are padding."""
    monkeypatch.setattr(kernels, "keeps_gradient", lambda *logits: apart)
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(37, 50_304, generator=rng).mul(3).to(dtype)
    logits[:, 50_257:] = -math.inf
    targets = torch.randint(0, 50_257, (37,), generator=rng)
    targets[[0, 12, 36]] = -1
    x, y = (logits.clone().requires_grad_() for _ in range(2))
    plain = F.cross_entropy(x.float(), targets, ignore_index=-1, reduction="sum")
    # * 1 makes a copy: the gradient is written over the logits, and a leaf must stay as it is.
    chunked = ChunkedCrossEntropy.apply(y * 1, targets, None)
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-6)
    (plain / 34).backward()
    (chunked / 34).backward()
    assert (y.grad - x.grad).abs().max() <= error * x.grad.abs().max()


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("first", [False, True])
def test_a_term_of_the_loss_sees_intact_logits(first, apart, monkeypatch):
    """GPT.loss with the z-loss that readers add, before or after the cross-entropy."""
    monkeypatch.setattr(kernels, "keeps_gradient", lambda *logits: apart)

    class WithTerm(GPT):
        def loss(self, x, targets, weights, reduction):
            logits = self.logits(x).flatten(0, 1)
            logits = self.kernels.mask_padding(logits, self.config.vocab_size)
            z = logits.logsumexp(-1).square().mean() if first else 0
            ce = self.kernels.cross_entropy(logits, targets.flatten(), weights, reduction)
            return ce + 0.1 * (z if first else logits.logsumexp(-1).square().mean())

    plain = make("llama").train()
    x = ids(plain)
    logits = plain.logits(hidden_states(plain, x))[..., :300]
    z = logits.logsumexp(-1).square().mean()
    want = F.cross_entropy(logits.flatten(0, 1), x.flatten()) + 0.1 * z
    model = WithTerm(plain.config).use(pick_kernels(CPU.device)).train()
    model.load_state_dict(plain.state_dict())
    loss = model(x, x)
    torch.testing.assert_close(loss, want)
    want.backward()
    loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_vocabulary_padding_gets_no_gradient_and_no_probability():
    model = make("llama")
    assert model.config.padded_vocab_size == 384 and model(ids(model)).shape == (2, 300)
    model(ids(model), ids(model)).backward()
    for weight in (model.wte.weight, model.lm_head.weight):
        assert weight[300:].abs().max() == 0 and weight.grad[300:].abs().max() == 0
    with torch.no_grad():
        model.lm_head.weight[300:] = 100.0  # even if these rows were not zero
    assert generated(model, ids(model, 16), 20, temperature=10.0).max() < 300


@pytest.mark.parametrize("name", ODD)
def test_parameters_keep_their_order_and_only_matrices_decay(name):
    """Matrices and embeddings as they come in the model, then vectors: in that order a checkpoint
    numbers the moments.
    """
    model = make(name)
    groups = model.param_groups(0.1)
    grouped = [id(p) for group in groups for p in group["params"]]
    matrices = [id(p) for p in model.parameters() if p.dim() == 2]
    assert grouped == matrices + [id(p) for p in model.parameters() if p.dim() == 1]
    for group in groups:
        vectors = group["name"] == "vectors"
        assert group["weight_decay"] == (0.0 if vectors else 0.1)
        assert {p.dim() for p in group["params"]} == {1 if vectors else 2}


# -- initialisation --


def test_the_example_of_the_docstring_runs_and_its_model_learns():
    torch.manual_seed(0)
    names = {}
    exec(textwrap.dedent(re.search("learns:\\n(.*?)\\nClass", description, re.DOTALL)[1]), names)
    gpt, ids = names["model"], names["ids"]
    assert names["loss"].item() == pytest.approx(math.log(65), abs=0.1)
    assert all(p.grad.any() for p in gpt.parameters())
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.003)
    for _ in range(60):
        optimizer.zero_grad()
        loss = gpt(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss < 1


def test_a_model_on_the_meta_device_draws_nothing():
    """So a seed gives one text, whether or not a model was loaded before."""
    state = torch.get_rng_state()
    with torch.device("meta"):
        GPT(GPTConfig(**LLAMA))
    assert torch.equal(torch.get_rng_state(), state)


L = 8  # layers of the model that is measured
D = 256  # its width; d_ff = 1024
XAVIER = math.sqrt(2 / 512)
DEEPNORM = (8 * L) ** -0.25  # the gain of value, out, up and down
CUT = 0.98658  # std of N(0, 1) cut at 3: sqrt(1 - 6 f / (1 - 2 t)), density f, tail t at 3
PROMISED = {  # scheme -> the std of query, value, out, up, down by its published formula
    "gpt2": (0.02, 0.02, 0.02 / math.sqrt(2 * L), 0.02, 0.02 / math.sqrt(2 * L)),
    "llama": (0.02,) * 5,
    "xavier": (XAVIER,) * 3 + (math.sqrt(2 / 1280),) * 2,
    "kaiming": (math.sqrt(2 / 256),) * 4 + (math.sqrt(2 / 1024),),
    "lecun": (1 / 16,) * 4 + (1 / 32,),
    "small": (math.sqrt(2 / (5 * 256)),) * 5,
    "deepnorm": (XAVIER, *(DEEPNORM * XAVIER,) * 2, *(DEEPNORM * math.sqrt(2 / 1280),) * 2),
    "zero_proj": (1 / 16, 1 / 16, 0.0, 1 / 16, 0.0),
    "trunc_normal": (0.02 * CUT,) * 5,
}


@pytest.mark.parametrize("scheme", INIT)
def test_init_has_the_standard_deviations_of_its_scheme(scheme):
    torch.manual_seed(0)
    shape = dict(vocab_size=1000, block_size=64, n_layer=L, n_head=4, n_embd=D)
    model = GPT(GPTConfig(**PRESETS["gpt2"] | shape), scheme)
    for block in model.blocks:
        query, _, value = block.attn.qkv.weight.split(D)
        others = (block.attn.proj, block.mlp.up_proj, block.mlp.down_proj)
        weights = (query, value, *(module.weight for module in others))
        for weight, std in zip(weights, PROMISED[scheme], strict=True):
            assert weight.std().item() == pytest.approx(std, rel=0.02)
            assert abs(weight.mean().item()) <= 0.02 * std
    for embedding in (model.wte.weight[:1000], model.wpe.weight):
        assert embedding.std().item() == pytest.approx(0.02, rel=0.02)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        elif scheme == "trunc_normal":
            assert 0.055 < p.abs().max() <= 0.06


# -- generation: in fp64, no rounding decides which token is the likeliest --


@torch.no_grad()
def greedy_without_cache(model: GPT, idx: torch.Tensor, count: int) -> torch.Tensor:
    """Return the next tokens, (count, B). The model computes the whole text for each of them."""
    for _ in range(count):
        idx = torch.cat((idx, model(idx).argmax(-1, keepdim=True)), dim=1)
    return idx[:, -count:].T


@pytest.mark.parametrize("name", ODD)
def test_greedy_with_cache_equals_greedy_without(name):
    model = make(name, scheme="xavier").double()
    prompt = ids(model, 3, 5)
    cached = generated(model, prompt, 27, temperature=0)
    assert cached.shape == (27, 3) and torch.equal(cached, greedy_without_cache(model, prompt, 27))
    assert torch.equal(cached, generated(model, prompt, 27, temperature=1e-40))


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
@torch.no_grad()
def test_a_step_that_is_recorded_once_serves_for_every_position(name):
    """A trace keeps Python's numbers, as a CUDA graph does: only tensors may change later."""
    model = make(name, scheme="xavier").double()
    prompt = ids(model, 3, 5)
    want = greedy_without_cache(model, prompt, 20)
    cache = KVCache(model.config, 3, 32, model.wte.weight)
    token = model(prompt, cache=cache).argmax(-1)

    def step(token, position, k, v):
        return model(token, cache=RecordedCache(k, v, position)).argmax(-1)

    recorded = make_fx(step)(token[:, None], torch.tensor([5]), cache.k, cache.v)
    for position in range(5, 5 + 19):
        assert torch.equal(token, want[position - 5])
        token = recorded(token[:, None], torch.tensor([position]), cache.k, cache.v)
    assert torch.equal(token, want[-1])


@pytest.mark.parametrize("block_size", [1, 2, 30, 65])
def test_generation_goes_on_beyond_block_size(block_size):
    """A full window is cut to its younger half, and the cache is computed anew from that."""
    model = make("llama", scheme="xavier", block_size=block_size).double()
    tokens = generated(model, ids(model, 2, 40), 70, temperature=0)  # (70, 2)
    idx = ids(model, 2, 40)[:, -block_size:]
    want = []
    for _ in range(70):
        if idx.size(1) > block_size:
            idx = idx[:, -max(1, block_size // 2) :]
        want.append(greedy_without_cache(model, idx, 1)[0])
        idx = torch.cat((idx, want[-1][:, None]), dim=1)
    assert torch.equal(tokens, torch.stack(want))


def test_generation_ends_when_every_row_has_met_eos():
    model = make("llama", scheme="xavier")
    prompt = ids(model, 4, 3)
    first = generated(model, prompt, 20, temperature=0).T.tolist()  # (4, 20)
    eos_id = first[0][4]
    rows = generated(model, prompt, 20, temperature=0, eos_id=eos_id).T.tolist()
    ends = [free.index(eos_id) if eos_id in free else len(free) for free in first]
    for row, free, end in zip(rows, first, ends, strict=True):
        assert row[: end + 1] == free[: end + 1][: len(row)] and set(row[end:]) <= {eos_id}
        assert len(row) == min(20, max(ends) + 1)


def test_top_k_and_top_p_keep_just_the_likeliest_tokens():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    torch.manual_seed(0)

    def kept(**settings):
        return set(sample_token(logits, 1.0, **settings).tolist())

    assert kept() == {0, 1, 2, 3}
    assert kept(top_k=2) == {0, 1}
    assert kept(top_p=0.79) == {0, 1} and kept(top_p=0.81) == {0, 1, 2} and kept(top_p=0.01) == {0}
    fraction = (sample_token(logits, 1.0) == 0).float().mean().item()
    assert fraction == pytest.approx(0.5, abs=5 * math.sqrt(0.25 / 4000))  # five standard errors
    assert (sample_token(logits, 0.0) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{"top_p": 0.95}, {"top_p": 1.0}, {"top_k": 50}])
def test_the_token_of_a_row_does_not_depend_on_other_rows(dtype, how):
    """Many probabilities are equal, and some rows need more than the 1,024 likeliest tokens."""
    torch.manual_seed(0)
    scale = torch.linspace(0, 6, 60)[:, None]
    rows = (torch.randn(60, 4000) * scale).round(decimals=1).to(dtype)

    def drawn(rows: torch.Tensor) -> int:
        torch.manual_seed(7)
        return int(sample_token(rows, 1.0, **how)[0])

    alone = [drawn(row[None]) for row in rows]
    assert alone == [drawn(torch.stack((row, rows[0], rows[-1]))) for row in rows]
    assert len(set(alone)) > 20


# -- the kernels of hardware/kernels.py --


# About 50 roundings, forward and back through 3 layers, add up to 7 eps; the worst number has twice
# that.
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.bfloat16, 14 * 2**-7)])
@pytest.mark.parametrize("eos_id", [None, 7])
@pytest.mark.parametrize("name", ODD)
def test_the_kernels_of_a_cpu_change_a_model_by_rounding(name, eos_id, dtype, near):
    """Loss and gradients of each weight, and in fp32 the text that it writes."""
    fast = make(name, "xavier")
    plain = make(name, "xavier").use(Kernels())
    x = ids(fast)
    x[:, 5] = 7
    batch = (x, x.roll(-1, 1), torch.rand(x.shape), eos_id)
    results = []
    for model in (fast, plain):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
            loss = model(*batch)
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for ours, formula in zip(*results, strict=True):
        atol = near * formula.abs().max().item() + 1e-8
        torch.testing.assert_close(ours, formula, atol=atol, rtol=0)
    if dtype == torch.float32:
        models = fast.double(), plain.double()
        tokens = [generated(model, x[:, :5], 9, temperature=0) for model in models]
        assert torch.equal(*tokens)
