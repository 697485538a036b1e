"""A GPT in one file: architecture, initialisation, and the numbers of parameters and FLOPs.

A GPT reads a sequence of token ids. At each position it predicts which token comes next.

    token ids (B, T)
        |
    wte (+ wpe)                        a vector for each token; gpt2 adds one for its position
        |
        x (B, T, C)                    the residual stream, to which n_layer blocks add:
        +----> norm_1 -> attention ----+
        |                              |   attention moves information between positions
        x <----------- add ------------+
        +----> norm_2 -> mlp ----------+
        |                              |   the MLP works on each position alone
        x <----------- add ------------+
        |
    norm_f -> lm_head                  logits (B, T, V): a score for each token of the vocabulary

Shapes are written with these letters: B sequences in a batch, T tokens in a sequence, C = n_embd,
nh = n_head, nkv = n_kv_head, hs = head_dim, V = vocab_size. PRESETS has four architectures:

             positions   norm        mlp      biases   lm_head    in Hugging Face
    gpt2     learned     LayerNorm   GELU     yes      is wte     GPT2LMHeadModel
    llama    RoPE        RMSNorm     SwiGLU   no       its own    LlamaForCausalLM
    qwen2    RoPE        RMSNorm     SwiGLU   of qkv   its own    Qwen2ForCausalLM
    qwen3    RoPE        RMSNorm     SwiGLU   no       its own    Qwen3ForCausalLM, with QK-norm

This file needs no other file of this project. A new model has random weights, and learns:

    import torch
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(vocab_size=65, block_size=32, n_layer=2, n_head=4, n_embd=64))
    ids = torch.randint(65, (8, 33))  # 8 sequences of random tokens
    loss = model(ids[:, :-1], ids[:, 1:])  # about ln 65 = 4.17
    loss.backward()  # the gradients, for any optimizer of PyTorch

Class Kernels calls PyTorch's own kernels. train.py and sample.py choose faster versions of the same
formulas for some devices, by one line: model.use(pick_kernels(device)), from hardware/kernels.py.
hardware/generation.py continues a text with a model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, Protocol, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# What an MLP computes between its matrices: a function, and whether its result is the factor (the
# gate) of a second product with x (arXiv 2002.05202). gelu_tanh is OpenAI's, in GPT-2.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (F.gelu, False),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), False),
    "swiglu": (F.silu, True),
}


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return (number + multiple - 1) // multiple * multiple


@dataclass
class GPTConfig:
    """The architecture. A preset sets its switches: GPTConfig(**PRESETS["llama"], n_layer=8, ...).

    Raises ValueError if the values contradict each other: see check_shape().
    """

    vocab_size: int = 50257
    block_size: int = 1024  # the longest sequence, in tokens
    n_layer: int = 12  # blocks
    n_head: int = 12  # query heads
    n_kv_head: int = 0  # key/value heads: fewer than n_head is GQA; 0: n_head
    n_embd: int = 768  # width of the residual stream
    head_dim: int = 0  # width of one head; 0: n_embd / n_head
    # Width inside the MLP. 0: 4 n_embd; with a gate 8/3 n_embd, rounded up to a multiple of 64.
    d_ff: int = 0
    pos: Literal["learned", "rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal[tuple(ACTIVATIONS)] = "gelu"  # pyrefly: ignore[invalid-literal]
    bias: bool = True  # in linear layers and LayerNorm
    qkv_bias: bool = False  # in the linear layer of queries, keys and values, whatever bias is
    qk_norm: bool = False  # RMSNorm over each head's query and key
    tie_embeddings: bool = True  # lm_head shares the weights of wte
    rope_theta: float = 10000.0  # base of RoPE's frequencies
    rope_scaling: str = ""  # extends a model to longer sequences: rope_frequencies()
    norm_eps: float = 1e-5  # added to the variance (RMSNorm: the mean square) before its root
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the values, and replace each 0 by its default."""
        check_shape(self)
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        default_width = round_up(8 * self.n_embd // 3, 64) if self.gated else 4 * self.n_embd
        self.d_ff = self.d_ff or default_width
        self.qkv_bias = self.qkv_bias and not self.bias  # bias includes it
        if self.pos == "learned":
            self.rope_theta = 10000.0  # it has no meaning here
        if self.rope_scaling:  # normalise the spelling: 4 for 4.0
            kind, numbers = rope_scaling(self.rope_scaling)
            self.rope_scaling = f"{kind}:{','.join(repr(n).removesuffix('.0') for n in numbers)}"

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: three matrices in place of two."""
        return ACTIVATIONS[self.mlp][1]

    @property
    def padded_vocab_size(self) -> int:
        """vocab_size rounded up to a multiple of 128, a size that suits matrix units.

        The padding gets no gradient and can never be sampled.
        """
        return round_up(self.vocab_size, 128)


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, tie_embeddings=True),
    "llama": dict(pos="rope", norm="rmsnorm", mlp="swiglu", bias=False, tie_embeddings=False),
}
PRESETS["qwen2"] = PRESETS["llama"] | dict(qkv_bias=True)
PRESETS["qwen3"] = PRESETS["llama"] | dict(qk_norm=True)


# --------------------------------------------------------------------------------------------------
# The model


class Block(nn.Module):
    """Attention, then an MLP. Each reads the normalised residual stream and adds its result."""

    # True: keep only x for the backward pass, which then runs compute() again.
    recompute = False
    # compute() as torch.compile compiled it, if blocks are compiled one by one.
    compiled: Callable[..., Tensor] | None = None

    def __init__(self, c: GPTConfig, layer: int):
        super().__init__()
        self.norm_1 = make_norm(c)
        self.attn = Attention(c, layer)
        self.norm_2 = make_norm(c)
        self.mlp = MLP(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, rope: Tensor | None, mask: Any, cache: "Cache | None") -> Tensor:
        """x (B, T, C) -> (B, T, C). rope, mask and cache: as in Attention.forward()."""
        if cache is not None:
            return self.compute(x, rope, mask, cache)
        compute = self.compiled or self.compute
        if not self.recompute or not torch.is_grad_enabled():
            return compute(x, rope, mask, None)
        # With dropout, compute() must draw the same numbers again.
        draws = self.dropout.p > 0
        inputs = (x, rope, mask, None)
        return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=draws)

    def compute(self, x: Tensor, rope: Tensor | None, mask: Any, cache: "Cache | None") -> Tensor:
        x = x + self.dropout(self.attn(self.norm_1(x), rope, mask, cache))  # (B, T, C)
        return x + self.dropout(self.mlp(self.norm_2(x)))


class Attention(nn.Module):
    """Causal self-attention: nh query heads over nkv key/value heads.

    Each head computes softmax(q k^T / sqrt(hs) + mask) v (arXiv 1706.03762, eq. 1). The mask is
    -inf where a key comes after the query, and 0 elsewhere: no position sees the future. If
    documents are kept apart, it is -inf too where a key is in another document than the query. If
    nkv < nh, each key/value head serves nh / nkv query heads (GQA, arXiv 2305.13245).
    """

    kernels: "Kernels"

    def __init__(self, c: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer  # the index of this layer's keys and values in a cache
        self.heads = (c.n_head, c.n_kv_head, c.n_kv_head)  # of q, k and v
        self.head_dim = c.head_dim
        self.dropout = c.dropout
        self.qkv = Linear(c.n_embd, sum(self.heads) * c.head_dim, bias=c.bias or c.qkv_bias)
        self.qkv.rows = [n * c.head_dim for n in self.heads]
        self.proj = Linear(c.n_head * c.head_dim, c.n_embd, bias=c.bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None

    def forward(self, x: Tensor, rope: Tensor | None, mask: Any, cache: "Cache | None") -> Tensor:
        """x (B, T, C) -> (B, T, C). The cache serves text generation; in training it is None.

        mask: of Kernels.document_mask(), to keep documents apart; None: they are not.
        """
        B, T, _ = x.shape
        # One product computes all heads of q, k and v: (B, T, nh + 2 nkv, hs).
        q, k, v = self.qkv(x).view(B, T, -1, self.head_dim).split(self.heads, dim=2)
        if self.q_norm is not None:
            q = self.q_norm(q)  # (B, T, nh, hs)
            k = self.k_norm(k)  # (B, T, nkv, hs)
        if rope is not None:
            q = self.kernels.rotate(q, rope)
            k = self.kernels.rotate(k, rope)
        q = q.to(v.dtype).transpose(1, 2)  # (B, nh, T, hs); rotate() returns fp32
        k = k.to(v.dtype).transpose(1, 2)  # (B, nkv, T, hs)
        v = v.transpose(1, 2)  # (B, nkv, T, hs)

        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # (B, nkv, past + T, hs) each
        if cache is not None and T == 1:
            y = cache.attend(q, k, v)  # (B, nh, 1, hs)
        else:
            # Repeat each key/value head for the query heads of its group. With enable_gqa=True the
            # copies are not needed, but a V100 then uses a kernel that stores the T x T matrix.
            group = q.size(1) // k.size(1)
            if group > 1:
                k = k.repeat_interleave(group, dim=1)  # (B, nh, past + T, hs)
                v = v.repeat_interleave(group, dim=1)
            dropout = self.dropout if self.training else 0.0
            y = self.kernels.attend(q, k, v, mask, dropout)  # (B, nh, T, hs)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, nh * hs) -> (B, T, C)


class MLP(nn.Module):
    """down(f(up(x))), or with a gate down(f(gate(x)) * up(x)): ACTIVATIONS has f."""

    def __init__(self, c: GPTConfig):
        super().__init__()
        self.activation, gated = ACTIVATIONS[c.mlp]
        self.gate_proj = Linear(c.n_embd, c.d_ff, bias=c.bias) if gated else None
        self.up_proj = Linear(c.n_embd, c.d_ff, bias=c.bias)
        self.down_proj = Linear(c.d_ff, c.n_embd, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, d_ff) -> (B, T, C)."""
        if self.gate_proj is not None:
            # Under fp16, autocast would cast x for each of the two products, and keep both copies.
            x = x.to(product_dtype(x))
            return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.activation(self.up_proj(x)))


class GPT(nn.Module):
    """Embeddings, n_layer blocks, a last norm, and the head that computes the logits.

    A new model draws its weights from torch's generator, as `init`, a key of INIT, says. On the
    meta device it draws none: its weights have only shapes, until others are loaded.
    """

    kernels: "Kernels"
    # loss() as torch.compile compiled it, if the blocks are compiled one by one.
    compiled_loss: Callable[..., Tensor] | None = None

    def __init__(self, c: GPTConfig, init: str = "gpt2"):
        super().__init__()
        self.config = c
        self.wte = Embedding(c.padded_vocab_size, c.n_embd)
        self.wpe = Embedding(c.block_size, c.n_embd) if c.pos == "learned" else None
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = cast(Sequence[Block], nn.ModuleList(Block(c, i) for i in range(c.n_layer)))
        self.norm_f = make_norm(c)
        self.lm_head = Linear(c.n_embd, c.padded_vocab_size, bias=False)
        if c.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        rope = rope_table(c) if c.pos == "rope" else None
        self.register_buffer("rope", rope, persistent=False)  # not saved: the config determines it
        self.use(Kernels())
        if not self.wte.weight.is_meta:
            self.init_weights(init)

    def use(self, kernels: "Kernels") -> "GPT":
        """Compute with these kernels from now on, in all layers. Return this model."""
        for module in self.modules():
            module.kernels = kernels  # pyrefly: ignore[bad-argument-type]
        return self

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        eos_id: int | None = None,
        cache: "Cache | None" = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Return the loss if targets are given, else the logits (B, V) of the last position.

        idx: token ids (B, T), T <= block_size.
        targets: the token that follows each token of idx, (B, T); -1: ignore this position.
        The loss is the cross-entropy -ln p(target) in nats, the mean or sum over the positions.
        weights: (B, T), by which the loss of each position is multiplied. The mean is then over all
        positions, those that are ignored included.
        eos_id: keep documents apart. The eos, which ends a document, counts as the first token of
        the next. Each token attends only to its own document, in which positions are counted.
        cache: of text generation. It holds the tokens before idx, and those of idx are added.
        """
        T = idx.size(1)
        positions = slice(0, T) if cache is None else cache.positions(T)
        mask = None
        if eos_id is not None:
            position = torch.arange(T, device=idx.device)
            # (B, T): where the document of each token starts: 0 0 2 2 2 for 5 7 eos 3 4
            starts = torch.where(idx == eos_id, position, 0).cummax(dim=1).values
            # With RoPE, only the distance of two tokens counts, and that is the same in a document.
            if self.wpe is not None:
                positions = position - starts  # (B, T)
            mask = self.kernels.document_mask(self, starts, product_dtype(self.wte.weight))

        x = self.wte(idx)  # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe.weight[positions]  # (B, T, C) + (T, C), or (B, T, C) of documents
        # Keep the residual stream in bf16. Autocast would leave it in fp32: twice the bytes, and no
        # better loss (bench/LOG.md). In fp16 it could overflow, so with fp16 it stays in fp32.
        if product_dtype(x) == torch.bfloat16:
            x = x.bfloat16()
        rope = None if self.rope is None else self.rope[:, positions]  # (2, T, 1, hs)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rope, mask, cache)  # (B, T, C)

        if targets is None:
            logits = self.logits(x[:, -1])  # (B, padded V)
            return logits[:, : self.config.vocab_size].float()  # (B, V)
        loss = self.compiled_loss or self.loss
        return loss(x, targets, weights, reduction)

    def logits(self, x: Tensor) -> Tensor:
        """x (..., C) -> (..., padded V). Their softmax over V is the probability of each token."""
        return self.lm_head(self.norm_f(x))

    def loss(self, x: Tensor, targets: Tensor, weights: Tensor | None, reduction: str) -> Tensor:
        """Return the cross-entropy of the targets (B, T), given the residual stream (B, T, C)."""
        # The columns of the padding have probability 0. So their rows in lm_head get no gradient
        # and stay 0, and a checkpoint need not store them.
        logits = self.logits(x).flatten(0, 1)  # (B * T, padded V): the largest tensor of all
        logits = self.kernels.mask_padding(logits, self.config.vocab_size)
        weights = None if weights is None else weights.flatten()
        return self.kernels.cross_entropy(logits, targets.flatten(), weights, reduction)

    # -- initialisation --

    @torch.no_grad()
    def init_weights(self, scheme: str) -> None:
        """Draw every matrix from N(0, std²), with the std that `scheme`, a key of INIT, gives it.

        Embeddings have a std of 0.02. Biases are 0, and the weights of norms are 1.
        """
        c = self.config
        for name, p in self.named_parameters():
            layer, kind = name.split(".")[-2:]
            if p.dim() == 1:
                p.fill_(0.0 if kind == "bias" else 1.0)
                continue
            if layer in ("wte", "lm_head"):
                p.zero_()  # the rows of the padding stay 0
                p = p[: c.vocab_size]
            matrices = p.split(self.blocks[0].attn.qkv.rows) if layer == "qkv" else [p]
            for role, weight in zip(ROLES[layer], matrices, strict=True):
                std = 0.02
                if role != "embed":
                    std = INIT[scheme](role, weight.size(1), weight.size(0), c.n_layer)
                if scheme == "trunc_normal":  # a number beyond 3 std is drawn again
                    nn.init.trunc_normal_(weight, 0, std, -3 * std, 3 * std)
                else:
                    weight.normal_(0.0, std)

    # -- parameters and FLOPs: one definition for train.py, plan.py, bench/ and tests/ --

    def param_groups(self, weight_decay: float) -> list[dict]:
        """Return the parameters in groups for an optimizer. All but vectors have weight decay.

        The group "matrices" also has `rows`, for Muon: the parameter qkv holds three matrices, one
        below the other, and its entry in `rows` says how many rows each of them has.

        A checkpoint numbers the parameters in this order, so the order must not change.
        """
        layers = [m for block in self.blocks for m in block.modules() if isinstance(m, Linear)]
        matrices = [layer.weight for layer in layers]
        rows = [layer.rows or [layer.out_features] for layer in layers]
        embeddings = [layer.weight for layer in (self.wte, self.wpe) if layer is not None]
        head = [] if self.config.tie_embeddings else [self.lm_head.weight]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"name": "embeddings", "params": embeddings, "weight_decay": weight_decay},
            {"name": "matrices", "params": matrices, "weight_decay": weight_decay, "rows": rows},
            {"name": "head", "params": head, "weight_decay": weight_decay},
            {"name": "vectors", "params": vectors, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def num_params(self) -> dict[str, int]:
        """Return the numbers of parameters, without the padding of the vocabulary.

        total: all of them. embedding: wte and wpe, where rows are looked up. matmul: the weights
        (without biases) of all linear layers, including lm_head whether it is tied or not.
        """
        c = self.config
        padding = (c.padded_vocab_size - c.vocab_size) * c.n_embd  # of wte, and of lm_head
        total = sum(p.numel() for p in self.parameters()) - (1 if c.tie_embeddings else 2) * padding
        embedding = (c.vocab_size + (c.block_size if self.wpe is not None else 0)) * c.n_embd
        matmul = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear)) - padding
        return {"total": total, "embedding": embedding, "matmul": matmul}

    def flops_per_token(self, T: int) -> int:
        """Return the FLOPs of the model per token, forward and backward, in sequences of T tokens.

        6 N_matmul + 12 n_layer nh hs T (PaLM, arXiv 2204.02311, appendix B). Each weight takes a
        multiplication and an addition in the forward pass, and twice as many in the backward pass.
        Attention is counted with the full T x T matrix. Work that is recomputed is counted once.
        """
        c = self.config
        return 6 * self.num_params()["matmul"] + 12 * c.n_layer * c.n_head * c.head_dim * T


# --------------------------------------------------------------------------------------------------
# Its layers, and the computations that some devices do otherwise


class Linear(nn.Linear):
    """x (..., K) -> x @ weight.T + bias (..., N)."""

    kernels: "Kernels"

    # The weight of the qkv layer is three matrices, one below the other: these are their numbers of
    # rows. init_weights and Muon treat each matrix by itself. (): the weight is one matrix.
    rows: Sequence[int] = ()

    def reset_parameters(self) -> None:
        """Set the parameters to 0, when nn.Linear's constructor calls this.

        PyTorch's own version would draw random weights, which takes seconds on a CPU. GPT draws
        them once, when all layers are made.
        """
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, input: Tensor) -> Tensor:
        return self.kernels.linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """Token ids (...) -> their rows of weight (..., C)."""

    reset_parameters = Linear.reset_parameters


class RMSNorm(nn.RMSNorm):
    """x (..., n) -> x / sqrt(mean(x²) + eps) * weight, with the mean over n."""

    eps: float
    kernels: "Kernels"

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)


def make_norm(c: GPTConfig) -> nn.Module:
    """Return RMSNorm, or LayerNorm, which also subtracts the mean (arXiv 1607.06450)."""
    if c.norm == "layernorm":
        return nn.LayerNorm(c.n_embd, c.norm_eps, bias=c.bias)
    return RMSNorm(c.n_embd, c.norm_eps)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies x: that of autocast, if it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Kernels:
    """The computations of a GPT, except embeddings, LayerNorm and activations: PyTorch's kernels.

    GPT.use() chooses others. hardware/kernels.py has subclasses that compute the same formulas.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., K), weight (N, K), bias (N,) -> x @ weight.T + bias, (..., N)."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (..., n) -> x / sqrt(mean(x²) + eps) * weight, mean over n (arXiv 1910.07467)."""
        # The fused kernel needs x and weight in one dtype. CUDA's autocast (torch 2.12 and later)
        # would turn both into fp32, so it is switched off here.
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        """Rotate queries or keys x (B, T, n, hs) by the angles of rope (2, T, 1, hs); return fp32.

        A pair (a, b) becomes (a cos - b sin, b cos + a sin). The product of a query and a key then
        depends on the distance of their positions, but not on the positions themselves. The numbers
        i and i + hs/2 are a pair, as in Hugging Face's Llama.

        The rotation is in fp32: with cos and sin rounded to bf16, the product would depend a little
        on the positions themselves. torch.compile fuses the casts away.
        """
        cos, sin = rope  # (T, 1, hs) each
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def document_mask(self, gpt: "GPT", starts: Tensor, dtype: torch.dtype) -> Any:
        """Return the mask of attend() by which a token sees its own document up to itself.

        starts: position at which the document of each token starts, (B, T). Two tokens of a
        sequence are in one document if these numbers are equal. The mask, (B, 1, T, T), is 0 where
        a query sees a key and -inf elsewhere. It is made once for all layers. dtype: of
        queries. gpt: the model, which subclasses look at.
        """
        seen = (starts[:, None, :, None] == starts[:, None, None, :]).tril()
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float) -> Tensor:
        """Return softmax(q k^T / sqrt(hs) + mask) v, with dropout on what softmax returns.

        q: (B, nh, T, hs). k, v: (B, nh, past + T, hs); past is 0 except with a cache.
        mask: what document_mask() returned; None: 0 where a key is at the query's position or
        before it, -inf elsewhere, so that no position sees the future.

        Most of PyTorch's kernels for this never store the T x T matrix.
        """
        T, keys = q.size(2), k.size(2)
        if mask is None and T < keys:  # is_causal would let the first query see the first key only
            mask = torch.ones(T, keys, dtype=torch.bool, device=q.device).tril(keys - T)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)

    def mask_padding(self, logits: Tensor, V: int) -> Tensor:
        """logits (N, padded V) -> the same with -inf in columns V and above: probability 0."""
        if V == logits.size(1):
            return logits
        padding = torch.arange(logits.size(1), device=logits.device) >= V
        return logits.masked_fill(padding, -math.inf)

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, weights: Tensor | None, reduction: str
    ) -> Tensor:
        """Return the mean or sum of -ln softmax(logits)[target] over all rows that have a target.

        logits (N, V). targets (N,): -1 is none. weights (N,): factors of the rows, or None; with
        them, the mean is over all N rows. torch.compile turns this into one pass that stores no
        fp32 logits.
        """
        logits = logits.float()
        if weights is None:
            return F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none") * weights  # (N,)
        return loss.mean() if reduction == "mean" else loss.sum()


class Cache(Protocol):
    """The keys and values of the tokens before a call of the model, for text generation.

    KVCache in hardware/generation.py is one.
    """

    def positions(self, T: int) -> slice | Tensor:
        """Return the positions of the next T tokens."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, nkv, T, hs) to a layer's; return all its keys and values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return Kernels.attend() of the newest token alone, (B, nh, 1, hs)."""


# --------------------------------------------------------------------------------------------------
# Valid shapes


def check_shape(c: GPTConfig) -> None:
    """Raise ValueError if the values of c contradict each other. 0 may still mean a default."""
    for field in fields(c):
        value = getattr(c, field.name)
        choices = get_args(field.type)
        if choices and value not in choices:
            raise ValueError(f"{field.name}={value!r} is not one of {', '.join(choices)}")
    if min(c.vocab_size, c.block_size, c.n_layer, c.n_head, c.n_embd) < 1:
        raise ValueError("vocab_size, block_size, n_layer, n_head and n_embd must be positive")
    if not c.head_dim and c.n_embd % c.n_head:
        raise ValueError(f"n_embd={c.n_embd} is not a multiple of n_head={c.n_head}")
    if c.n_kv_head and c.n_head % c.n_kv_head:
        raise ValueError(f"n_head={c.n_head} must be a multiple of n_kv_head={c.n_kv_head}")
    if c.pos == "rope":
        head_dim = c.head_dim or c.n_embd // c.n_head
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} must be even: rope rotates pairs")
        if c.rope_theta <= 1:
            raise ValueError(f"rope_theta={c.rope_theta} must be above 1")
    elif c.rope_scaling:
        raise ValueError(f"rope_scaling={c.rope_scaling!r} needs pos=rope")


# --------------------------------------------------------------------------------------------------
# RoPE: the angles, and two ways to extend a model to longer sequences


def rope_scaling(spec: str) -> tuple[str, list[float]]:
    """Return the kind and the numbers of rope_scaling. Raises ValueError if it is malformed."""
    counts = {"linear": 1, "llama3": 4}
    kind, _, listed = spec.partition(":")
    try:
        numbers = [float(number) for number in listed.split(",") if listed]
    except ValueError:
        numbers = []
    if spec and (len(numbers) != counts.get(kind) or not all(1e-6 <= n <= 1e9 for n in numbers)):
        forms = "linear:FACTOR or llama3:FACTOR,LOW,HIGH,LENGTH"
        raise ValueError(f"rope_scaling={spec!r} is neither {forms}")
    if kind == "llama3" and numbers[1] >= numbers[2]:
        raise ValueError(f"rope_scaling={spec!r}: LOW must be below HIGH")
    return kind, numbers


def rope_frequencies(c: GPTConfig) -> np.ndarray:
    """Return the frequency of each pair of a head's numbers, (hs/2,).

    Pair i has the frequency rope_theta^(-2i / hs). Lower frequencies extend a model that was
    trained on short sequences to longer ones, in one of two ways:

    linear:FACTOR                     All frequencies are divided by FACTOR (arXiv 2306.15595).
    llama3:FACTOR,LOW,HIGH,LENGTH     LENGTH is the length of the sequences in training. The
                                      frequency of a pair that turns less than LOW times in it is
                                      divided by FACTOR. That of a pair that turns more than HIGH
                                      times stays. Between the two, it is interpolated (Llama 3.1).
    """
    freq = c.rope_theta ** (-2 * np.arange(c.head_dim // 2) / c.head_dim)
    kind, numbers = rope_scaling(c.rope_scaling)
    if not kind:
        return freq
    kept = 0.0  # the fraction of the frequency that is not divided, (hs/2,) or for all pairs
    if kind == "llama3":
        _, low, high, length = numbers
        turns = length * freq / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
    return freq * kept + freq / numbers[0] * (1 - kept)


def rope_table(c: GPTConfig) -> Tensor:
    """Return cos and sin of the rotation angle of every position, (2, block_size, 1, hs) in fp32.

    At position t, pair i of a head's numbers is rotated by the angle t * frequency of the pair, for
    i = 0 ... hs/2 - 1 (RoFormer, arXiv 2104.09864, eq. 34).

    The table is computed by numpy. On a CPU, the first cos that a process computes with torch is
    sometimes wrong by 1e-4 (bench/LOG.md). A resumed run would then not be bit-identical.
    """
    # Numbers i and i + hs/2 are a pair, with one angle.
    angle = np.tile(np.outer(np.arange(c.block_size), rope_frequencies(c)), 2)  # (block_size, hs)
    table = np.stack((np.cos(angle), np.sin(angle)))  # (2, block_size, hs)
    return torch.from_numpy(table[:, :, None].astype(np.float32))


# --------------------------------------------------------------------------------------------------
# Initialisation schemes: a reference. On a first reading, gpt2 is enough.
#
# Each function returns the standard deviation of a matrix. Its arguments are the matrix's role, its
# fan_in i (columns), its fan_out o (rows), and the depth L = n_layer. The roles are
#     query, key, value, up    which read the residual stream (up: SwiGLU's gate too)
#     out, down                which write to the residual stream
#     head                     which is lm_head, unless it is tied to wte
#     embed                    which is wte and wpe: always 0.02

ROLES = {  # of the matrices in each weight
    "wte": ["embed"], "wpe": ["embed"], "qkv": ["query", "key", "value"], "proj": ["out"],
    "gate_proj": ["up"], "up_proj": ["up"], "down_proj": ["down"], "lm_head": ["head"],
}  # fmt: skip
WRITES = ("out", "down")

INIT: dict[str, Callable[[str, int, int, int], float]] = {
    # 0.02 for what reads the residual stream, 0.02 / sqrt(2 L) for what writes to it: 2 L matrices
    # add to the stream. With this factor its variance after the last block does not depend on L.
    # Source: GPT-2 report (Radford et al. 2019), section 2.3.
    "gpt2": lambda role, i, o, L: 0.02 * (2 * L) ** -0.5 if role in WRITES else 0.02,
    #
    # 0.02 for every matrix. Source: initializer_range of Hugging Face's Llama and Qwen3.
    "llama": lambda role, i, o, L: 0.02,
    #
    # Source: Glorot and Bengio 2010, eq. 12.
    "xavier": lambda role, i, o, L: math.sqrt(2 / (i + o)),
    #
    # Source: He et al. 2015, arXiv 1502.01852, eq. 10.
    "kaiming": lambda role, i, o, L: math.sqrt(2 / i),
    #
    # Source: LeCun et al. 1998, Efficient BackProp, eq. 16.
    "lecun": lambda role, i, o, L: math.sqrt(1 / i),
    #
    # sqrt(2 / (5 d)), SmallInit. d is n_embd in the source; here it is the smaller of i and o.
    # Source: Nguyen and Salazar 2019, arXiv 1910.05895, section 2.2.
    "small": lambda role, i, o, L: math.sqrt(2 / (5 * min(i, o))),
    #
    # sqrt(2 / (i + o)), times (8 L)^(-1/4) for value, out, up and down. Only DeepNet's
    # initialisation is used. Its architecture is not: here the norms stay in front of attention and
    # MLP, and the residual stream is not scaled. Source: DeepNet, arXiv 2203.00555, table 1.
    "deepnorm": lambda role, i, o, L: (
        math.sqrt(2 / (i + o)) * (1.0 if role in ("query", "key", "head") else (8 * L) ** -0.25)
    ),
    #
    # 0 for what writes to the residual stream, LeCun's for what reads it: every block starts as the
    # identity. Source: Fixup, arXiv 1901.09321; ReZero, arXiv 2003.04887.
    "zero_proj": lambda role, i, o, L: 0.0 if role in WRITES else math.sqrt(1 / i),
    #
    # 0.02 for every matrix, from a normal that is cut at 3 standard deviations. A number beyond
    # 0.06 is drawn again. This leaves a std of 0.0197, which the source does not correct.
    # Embeddings are cut too, and what writes to the residual stream gets no other factor.
    # Source: OLMo-core, the code of OLMo 2 (arXiv 2501.00656), InitMethod.normal. BERT cuts at 2.
    "trunc_normal": lambda role, i, o, L: 0.02,
}
