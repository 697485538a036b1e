"""A GPT in one file: architecture, initialisation, generation and accounting.

    tokens (B, T) -> wte (+ wpe) -> x --+--> norm_1 -> attention --(+)--> norm_2 -> mlp --(+)--> ... -> norm_f -> lm_head
                                        |          n_layer times |          |             |
                                        +------------------------+          +-------------+   the residual stream (B, T, C)

Shapes: B batch, T sequence, C = n_embd, nh = n_head, nkv = n_kv_head, hs = head_dim, V = vocab_size.

               positions         norm        mlp       attention                 in Hugging Face
    gpt2       learned           LayerNorm   GELU      one k, v for each head    GPT2LMHeadModel
    llama      RoPE              RMSNorm     SwiGLU    grouped queries (GQA)     LlamaForCausalLM
    qwen3      RoPE              RMSNorm     SwiGLU    GQA with QK-norm          Qwen3ForCausalLM
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from hardware.kernels import attend, attend_past, cross_entropy, decoding_step, linear

PRESETS = {
    "gpt2": dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False, tie_embeddings=True),
    "llama": dict(pos="rope", norm="rmsnorm", mlp="swiglu", bias=False, qk_norm=False, tie_embeddings=False),
    "qwen3": dict(pos="rope", norm="rmsnorm", mlp="swiglu", bias=False, qk_norm=True, tie_embeddings=False),
}


@dataclass(frozen=True)
class GPTConfig:
    """The architecture. A preset is a set of switches: GPTConfig(**PRESETS["llama"], n_layer=8, ...)."""

    vocab_size: int = 50257
    block_size: int = 1024  # the longest sequence, in tokens
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0  # key/value heads (GQA); 0: n_head
    n_embd: int = 768
    head_dim: int = 0  # 0: n_embd / n_head
    d_ff: int = 0  # width inside the MLP; 0: 4 n_embd, for swiglu 8/3 n_embd rounded up to a multiple of 64
    pos: Literal["learned", "rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"  # OpenAI's GPT-2 has gelu_tanh, an approximation
    bias: bool = True  # in linear layers and LayerNorm
    qk_norm: bool = False  # RMSNorm over each head's query and key
    tie_embeddings: bool = True  # lm_head shares the weights of wte
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        def default(name: str, value: int) -> None:  # a frozen dataclass resolves its own defaults this way
            if not getattr(self, name):
                object.__setattr__(self, name, value)

        if problems := [f"{f.name} must be positive" for f in fields(self)[:4] if getattr(self, f.name) < 1]:
            raise ValueError("; ".join(problems))
        default("n_kv_head", self.n_head)
        if not self.head_dim and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} does not divide by n_head={self.n_head}: change one, or set head_dim"
            )
        default("head_dim", self.n_embd // self.n_head)
        default("d_ff", -(-8 * self.n_embd // 3 // 64) * 64 if self.mlp == "swiglu" else 4 * self.n_embd)
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if self.pos == "rope" and self.head_dim % 2:
            raise ValueError(f"rope turns pairs of numbers: head_dim={self.head_dim} must be even")

    @property
    def padded_vocab_size(self) -> int:
        """vocab_size rounded up to a multiple of 128, which matrix units like; the padding can never be sampled."""
        return -(-self.vocab_size // 128) * 128


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """0 until GPT.init_weights draws them: torch's own draw would be thrown away, seconds of a start on a CPU."""
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    reset_parameters = Linear.reset_parameters


class RMSNorm(nn.RMSNorm):
    """torch's, with the weight in the input's dtype: the fused kernel wants them alike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):  # CUDA's makes both fp32, from torch 2.12 on
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(c: GPTConfig) -> nn.Module:
    return nn.LayerNorm(c.n_embd, c.norm_eps, bias=c.bias) if c.norm == "layernorm" else RMSNorm(c.n_embd, c.norm_eps)


def rope_table(c: GPTConfig) -> torch.Tensor:
    """cos and sin of every position's rotation, (2, block_size, 1, hs) fp32. RoFormer, arXiv 2104.09864, eq. 34.

    By numpy: the first cos of a process in torch is now and then wrong by 1e-4 on a CPU (bench/LOG.md), and a resumed run
    would not be bit-identical.
    """
    freq = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)  # (hs/2,)
    angle = np.tile(np.outer(np.arange(c.block_size), freq), 2)  # (block_size, hs)
    return torch.from_numpy(np.stack((np.cos(angle), np.sin(angle)))[:, :, None].astype(np.float32))


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate x (B, T, n, hs) by rope (2, T, 1, hs), pairing dimension i with i + hs/2 as Hugging Face's Llama does.

    In fp32: bf16 has too few bits for the angles of far positions. torch.compile fuses the casts away.
    """
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin  # promoted to the table's fp32


class KVCache:
    """Keys and values of the tokens seen so far, preallocated: two tensors of (n_layer, B, nkv, room, hs).

    In a step that is recorded as a CUDA graph nothing may depend on how many there are: the next token's place is a tensor then,
    `position` (1,), and attention goes over all the room, with a mask (1, 1, 1, room), -inf for what is not filled.
    """

    def __init__(self, c: GPTConfig, batch: int, room: int, device: torch.device, dtype: torch.dtype):
        shape = (2, c.n_layer, batch, c.n_kv_head, room, c.head_dim)
        self.k, self.v = torch.zeros(shape, device=device, dtype=dtype)  # not empty: masked, a NaN would still be one
        self.length, self.position, self.mask = 0, None, None

    def fix(self, position: torch.Tensor) -> None:
        """Have the next step write at `position`, whatever number that will be when the step is replayed."""
        self.position = position
        ahead = torch.arange(self.k.size(3), device=position.device) > position
        self.mask = torch.zeros_like(ahead, dtype=self.k.dtype).masked_fill(ahead, -math.inf)[None, None, None]

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k, v (B, nkv, T, hs) behind what the layer holds; return all of its keys and values."""
        if self.position is not None:
            return self.k[layer].index_copy_(2, self.position, k), self.v[layer].index_copy_(2, self.position, v)
        end = self.length + k.size(2)
        self.k[layer, :, :, self.length : end], self.v[layer, :, :, self.length : end] = k, v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention: nh query heads over nkv key/value heads."""

    def __init__(self, c: GPTConfig, layer: int):
        super().__init__()
        self.heads, self.head_dim, self.dropout = (c.n_head, c.n_kv_head, c.n_kv_head), c.head_dim, c.dropout
        self.layer = layer
        self.qkv = Linear(c.n_embd, sum(self.heads) * c.head_dim, bias=c.bias)
        self.proj = Linear(c.n_head * c.head_dim, c.n_embd, bias=c.bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None, cache: KVCache | None) -> torch.Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.head_dim).split(self.heads, dim=2)  # (B, T, nh or nkv, hs)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = q.to(v.dtype).transpose(1, 2), k.to(v.dtype).transpose(1, 2), v.transpose(1, 2)  # (B, n, T, hs)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        if cache is not None and T == 1:
            y = attend_past(q, k, v, cache.mask)
        else:
            if k.size(1) < q.size(1):  # not enable_gqa: on a V100 that falls back to the T x T matrix
                k, v = (t.repeat_interleave(q.size(1) // k.size(1), dim=1) for t in (k, v))
            y = attend(q, k, v, self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, C)


class MLP(nn.Module):
    """GELU: down(gelu(up x)); SwiGLU: down(silu(gate x) * up x) (arXiv 2002.05202)."""

    def __init__(self, c: GPTConfig):
        super().__init__()
        self.approximate = "tanh" if c.mlp == "gelu_tanh" else "none"
        self.gate_proj = Linear(c.n_embd, c.d_ff, bias=c.bias) if c.mlp == "swiglu" else None
        self.up_proj = Linear(c.n_embd, c.d_ff, bias=c.bias)
        self.down_proj = Linear(c.d_ff, c.n_embd, bias=c.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is not None:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(F.gelu(self.up_proj(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, c: GPTConfig, layer: int):
        super().__init__()
        self.norm_1, self.attn = make_norm(c), Attention(c, layer)
        self.norm_2, self.mlp = make_norm(c), MLP(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None, cache: KVCache | None) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.norm_1(x), rope, cache))
        return x + self.dropout(self.mlp(self.norm_2(x)))


# ---------------------------------------------------------------------------------------------------------------------
# The model


class GPT(nn.Module):
    def __init__(self, c: GPTConfig):
        super().__init__()
        self.config = c
        self.wte = Embedding(c.padded_vocab_size, c.n_embd)
        self.wpe = Embedding(c.block_size, c.n_embd) if c.pos == "learned" else None
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.norm_f = make_norm(c)
        self.lm_head = Linear(c.n_embd, c.padded_vocab_size, bias=False, device="meta" if c.tie_embeddings else None)
        if c.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.register_buffer("rope", rope_table(c) if c.pos == "rope" else None, persistent=False)

    def forward(
        self,
        idx: torch.Tensor,
        targets: torch.Tensor | None = None,
        cache: KVCache | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> torch.Tensor:
        """With targets (B, T; -1 is ignored): the cross-entropy in nats. Without: the last position's logits (B, V).

        idx: token ids (B, T), T <= block_size. With a cache, idx continues what the cache holds: a prompt of any length
        into an empty one, then one token at a time.
        """
        T, V = idx.size(1), self.config.vocab_size
        start = 0 if cache is None else cache.length
        at = slice(start, start + T) if cache is None or cache.position is None else cache.position
        x = self.wte(idx)  # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe.weight[at]
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.bfloat16:
            x = x.bfloat16()  # autocast leaves the residual stream in fp32: twice the bytes, and no better loss
        rope = None if self.rope is None else self.rope[:, at]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rope, cache)
        if cache is not None:
            cache.length += T
        if targets is None:
            return self.logits(x[:, -1])[:, :V].float()
        # (B T, padded V): the largest tensor of all. The loss leaves the padding out, whose rows of the matrix then get no
        # gradient and stay 0: a checkpoint can do without them.
        logits, targets = self.logits(x).flatten(0, 1), targets.flatten()
        return cross_entropy(logits, targets, V, reduction)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm_f(x))

    # -- generation --

    @torch.inference_mode()
    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[torch.Tensor]:
        """Continue idx (B, T), yielding the next token of every row, (B,), until all rows have met eos_id.

        A row that has met it goes on yielding it. temperature 0 is greedy. When block_size is full the older half of
        the context is forgotten, so that one token costs one forward step nearly always.
        """
        c = self.config
        idx = idx[:, -c.block_size :]
        room = -(-min(c.block_size, idx.size(1) + max_new_tokens) // 64) * 64  # GPUs like it round
        cache, step = KVCache(c, idx.size(0), room, idx.device, self.wte.weight.dtype), None
        done = torch.zeros(idx.size(0), dtype=torch.bool, device=idx.device)
        for _ in range(max_new_tokens):
            if idx.size(1) > c.block_size:
                idx, cache.length = idx[:, -max(1, c.block_size // 2) :], 0
            if cache.length == 0:
                logits = self(idx, cache=cache)
            else:
                step = step or decoding_step(self, idx[:, -1:], cache)
                logits = step(idx[:, -1:])
            token = sample_token(logits, temperature, top_k, top_p, generator)
            if eos_id is not None:
                token = torch.where(done, eos_id, token)
                done = done | (token == eos_id)
            idx = torch.cat((idx, token[:, None]), dim=1)
            total, ended = torch.stack((logits.sum(), done.all())).tolist()  # one wait for the device
            if not math.isfinite(total):
                raise ArithmeticError(
                    "the model's output is not finite: its weights are damaged, or need another dtype"
                )
            yield token
            if ended:
                return

    # -- initialisation --

    def init_weights(self, scheme: str = "gpt2") -> None:
        """Draw every matrix from N(0, std(role, fan_in, fan_out)²) by a scheme of INIT; biases 0, norm weights 1."""
        c, std = self.config, INIT[scheme]
        heads = [n * c.head_dim for n in (c.n_head, c.n_kv_head, c.n_kv_head)]
        parts = [("embed", self.wte.weight[: c.vocab_size])]
        if self.wpe is not None:
            parts.append(("embed", self.wpe.weight))
        for block in self.blocks:
            parts += zip(("query", "key", "value"), block.attn.qkv.weight.split(heads), strict=True)
            parts.append(("out", block.attn.proj.weight))
            if block.mlp.gate_proj is not None:
                parts.append(("up", block.mlp.gate_proj.weight))
            parts += [("up", block.mlp.up_proj.weight), ("down", block.mlp.down_proj.weight)]
        if not c.tie_embeddings:
            parts.append(("head", self.lm_head.weight[: c.vocab_size]))
        with torch.no_grad():
            self.wte.weight.zero_()  # the padding's rows stay 0
            self.lm_head.weight.zero_()
            for role, weight in parts:
                i, o = weight.size(1), weight.size(0)
                weight.normal_(0.0, 0.02 if role == "embed" else std(role, i, o, c.n_layer))
            for name, p in self.named_parameters():
                if p.dim() == 1:
                    p.fill_(0.0 if name.endswith("bias") else 1.0)

    # -- accounting: one definition for train.py, bench/ and tests/ --

    def param_groups(self, weight_decay: float) -> list[dict]:
        """Matrices and embeddings are decayed; biases and norm weights are not."""
        params = list(self.parameters())
        return [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]

    def num_params(self) -> dict[str, int]:
        """Parameters, without the vocabulary's padding: total; embedding (look-ups only); matmul.

        matmul are those that take part in a matrix product, lm_head included whether tied or not.
        """
        c = self.config
        padding = (c.padded_vocab_size - c.vocab_size) * c.n_embd
        total = sum(p.numel() for p in self.parameters()) - padding * (1 if c.tie_embeddings else 2)
        matmul = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear)) - padding
        positions = 0 if self.wpe is None else self.wpe.weight.numel()
        return {"total": total, "embedding": c.vocab_size * c.n_embd + positions, "matmul": matmul}

    def flops_per_token(self, T: int) -> int:
        """Model FLOPs of a token's forward and backward: 6 N_matmul + 12 n_layer nh hs T. PaLM, arXiv 2204.02311, app. B.

        Attention counts the full T x T; work that is done twice (recomputation) is not counted.
        """
        c = self.config
        return 6 * self.num_params()["matmul"] + 12 * c.n_layer * c.n_head * c.head_dim * T


def sample_token(
    logits: torch.Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """One token id a row, (B,), from logits (B, V). top_p: the fewest tokens whose probability reaches it (nucleus)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    exact = torch.float32 if logits.device.type == "mps" else torch.float64  # for the sums of V small numbers
    ids = None
    if 0 < top_k < logits.size(-1):
        logits, ids = logits.topk(top_k)  # (B, top_k), the likeliest first
    p = (logits / temperature).softmax(-1)  # (B, V or top_k)
    if ids is None and top_p < 1.0:
        likeliest, ids = p.topk(min(1024, p.size(-1)))  # nearly always enough: to sort all V takes six times as long
        p, ids = p.sort(descending=True) if (likeliest.sum(-1) < top_p).any() else (likeliest, ids)
    sums = p.cumsum(-1, dtype=exact)
    mass = sums[:, -1:]  # what is left to choose from
    if top_p < 1.0:
        mass = sums.gather(1, (sums < top_p).sum(-1, keepdim=True).clamp(max=p.size(-1) - 1))
    dice = torch.rand(mass.shape, dtype=exact, device=mass.device, generator=generator) * mass
    dice = dice.clamp(max=torch.nextafter(mass, mass - 1))
    chosen = torch.searchsorted(sums, dice, right=True)  # the first sum above it
    if ids is not None:  # of NaNs, none is above it: a GPU would not survive that index
        chosen = ids.gather(1, chosen.clamp(max=ids.size(1) - 1))
    return chosen.squeeze(1)


# ---------------------------------------------------------------------------------------------------
# Initialisation schemes: the standard deviation of a matrix that is no embedding (those have 0.02), from
# its role, fan_in i, fan_out o and the depth L. Roles: query, key, value, up (they read the residual
# stream); out, down (they write to it); head.

WRITES = ("out", "down")


def init_gpt2(role: str, i: int, o: int, L: int) -> float:
    """0.02, and 0.02 / sqrt(2 L) into the residual stream, whose variance then does not grow with depth.

    GPT-2 report, section 2.3.
    """
    return 0.02 * (2 * L) ** -0.5 if role in WRITES else 0.02


def init_llama(role: str, i: int, o: int, L: int) -> float:
    """0.02 everywhere: initializer_range of Hugging Face's Llama and Qwen3."""
    return 0.02


def init_xavier(role: str, i: int, o: int, L: int) -> float:
    """sqrt(2 / (i + o)). Glorot and Bengio 2010, eq. 12."""
    return math.sqrt(2 / (i + o))


def init_kaiming(role: str, i: int, o: int, L: int) -> float:
    """sqrt(2 / i). He et al. 2015, arXiv 1502.01852, eq. 10."""
    return math.sqrt(2 / i)


def init_lecun(role: str, i: int, o: int, L: int) -> float:
    """sqrt(1 / i). LeCun et al. 1998, Efficient BackProp, eq. 16."""
    return math.sqrt(1 / i)


def init_small(role: str, i: int, o: int, L: int) -> float:
    """SmallInit, sqrt(2 / 5 d). Nguyen and Salazar 2019, arXiv 1910.05895, section 2.2.

    Their d is n_embd; here it is the smaller fan.
    """
    return math.sqrt(2 / (5 * min(i, o)))


def init_deepnorm(role: str, i: int, o: int, L: int) -> float:
    """Xavier, times (8 L)^-1/4 for value, out, up and down. DeepNet, arXiv 2203.00555, table 1.

    Only its initialisation: the residual stream stays pre-norm and unscaled here.
    """
    gain = 1.0 if role in ("query", "key", "head") else (8 * L) ** -0.25
    return gain * math.sqrt(2 / (i + o))


def init_zero_proj(role: str, i: int, o: int, L: int) -> float:
    """LeCun, and 0 into the residual stream: every block starts as the identity.

    Fixup, arXiv 1901.09321; ReZero, arXiv 2003.04887.
    """
    return 0.0 if role in WRITES else math.sqrt(1 / i)


INIT = {
    "gpt2": init_gpt2,
    "llama": init_llama,
    "xavier": init_xavier,
    "kaiming": init_kaiming,
    "lecun": init_lecun,
    "small": init_small,
    "deepnorm": init_deepnorm,
    "zero_proj": init_zero_proj,
}
