"""Predict the memory of a training step, part by part, from the settings alone.

The forward pass keeps what autograd needs for the backward pass. The backward pass frees it again,
block by block, and holds gradients next to it. step_memory() adds up what is alive at each moment
that may hold the most. The largest sum is the peak.

What is held when (P: parameters; N = B T: tokens of a micro-step; L: blocks; V: the padded
vocabulary; C = n_embd; s: bytes per number, 2 in 16 bits, 4 in fp32):

    always                      weights 4 P, optimizer 8 P (AdamW), DDP's buckets 4 P on several
                                ranks, gradients of earlier micro-steps 4 P
    loss, head's backward pass  activations of all blocks; the weights' copies, s each; logits N V s
                                and some rows in fp32; the gradient of the head
    backward pass of a block    activations of the blocks before it, gradients of those after it,
                                and the gradients that travel inside the block
    end of the backward pass    gradients of all; wte has two if the head is tied, and their sum
    optimizer's step            gradients, and what the optimizer needs for a moment

A block keeps, per token, with nh query heads of hs numbers each:

    norms       2 C s      the inputs of both norms: the residual stream (under fp16 it is in fp32)
    attention   C s        the input of qkv
                3 nh hs s  q, k and v; those that are new tensors (rotated or repeated) are kept
                           next to what qkv wrote, while any of the three is a view into that
                nh hs s    the output, which is the input of proj
    MLP         C s        its input
                2 d_ff s   GELU: its input and its output
                3 d_ff s   SwiGLU, compiled: gate, up and their product
                4 d_ff s   SwiGLU, in eager mode: silu(gate) too

For GPT-2 this is 16 C numbers per token and layer: 2 + 1 + 3 + 1 + 1 + 8. The terms are those of
Korthikanti et al., arXiv 2205.05198, section 4.1, without its dropout masks and its T x T scores,
and counted for the kernels that run here. torch.compile fuses what lies between the matrix
products, so that it needs no temporaries, and all gradients of a micro-step are alive at its end,
before they are added to those of earlier micro-steps.
"""

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace

import torch

from hardware.device import CONTEXT
from hardware.kernels import loss_chunk
from model import GPT, GPTConfig
from training.optimizer import STACK
from training.settings import TrainConfig

SHARDS = ("none", "optimizer", "gradients", "all")  # by the stage of ZeRO


@dataclass(frozen=True)
class Step:
    """What the memory of a step depends on, next to the model."""

    B: int  # sequences in a micro-step
    T: int  # tokens in a sequence
    accum: int = 1  # micro-steps in a step
    dtype: torch.dtype = torch.bfloat16  # of autocast
    compiled: bool = True
    device: str = "cuda"
    world: int = 1  # processes
    shard: str = "none"  # none, optimizer, gradients or all: what is sharded over the processes
    optimizer: str = "adamw"
    documents: bool = False  # whether attention stays inside a document
    # Keep only the input of a block, and compute the rest a second time in the backward pass.
    recompute: bool = False

    def of(self, cfg: TrainConfig) -> "Step":
        """Return this step with what the settings say of it."""
        return replace(
            self,
            optimizer=cfg.optimizer,
            shard=cfg.shard,
            recompute=cfg.recompute == "blocks",
            documents=cfg.documents in ("mask", "pack"),
        )

    @property
    def zero(self) -> int:
        """The stage of ZeRO: 0 is DDP, where each process holds everything."""
        return SHARDS.index(self.shard) if self.world > 1 else 0

    @property
    def ranks(self) -> int:
        """Over how many ranks the weights and the optimizer's state are sharded."""
        return self.world if self.zero else 1

    @property
    def compiled_whole(self) -> bool:
        """Whether the whole model is compiled, and not its blocks one by one (parallel.py)."""
        return self.compiled and not self.recompute and not self.zero

    @property
    def eager_gpu(self) -> bool:
        return self.device == "cuda" and not self.compiled

    @property
    def stream(self) -> int:
        """Bytes per number of the residual stream. With fp16, model.py leaves it in fp32."""
        return 2 if self.dtype == torch.bfloat16 else 4


def block_memory(c: GPTConfig, step: Step) -> tuple[float, float]:
    """Return the bytes per token that a block keeps, and the most that its backward pass holds."""
    s = step.dtype.itemsize
    x = c.n_embd * s
    h = c.d_ff * s
    q = c.n_head * c.head_dim * s
    kv = c.n_kv_head * c.head_dim * s
    stream = c.n_embd * step.stream
    norm = c.n_embd * 4 if c.norm == "layernorm" and step.eager_gpu else stream
    score = 0
    if step.device == "cpu":
        plain = step.dtype == torch.bfloat16 and 1 < step.T <= 512
        score = 2 if plain else 4 * (c.dropout > 0)
    matrix = c.n_head * step.T * score  # T x T
    # Which of q, k and v are new tensors. The others are views into what qkv wrote.
    rotated = c.pos == "rope" or c.qk_norm
    repeated = kv < q
    new = 3 if score else rotated + (rotated or repeated) + repeated
    attention = x + q + new * q * max(score, s) // s + matrix * (3 if c.dropout else 1)
    if new < 3 or c.qk_norm:
        attention += q + 2 * kv
    if c.qk_norm and step.compiled and s == 4 and not repeated:
        attention += 2 * q  # before they are rotated, too
    mask = c.n_embd * (s if step.device == "cpu" else 1) if c.dropout else 0
    # Under DDP torch compiles what belongs to one bucket of gradients, of 25 MiB, by itself. If
    # each of these matrices fills a bucket, silu's result goes from one piece to the next.
    cut = step.compiled_whole and step.world > 1 and 4 * c.n_embd * c.d_ff > 25 * 2**20
    silu = c.gated and (not step.compiled or cut)
    keeps = 2 * norm + attention + x + (2 + c.gated + silu) * h + 2 * mask
    copy = x if step.stream != s else 0  # of the gradient, in 16 bits
    in_mlp = stream + keeps + h + max(copy, silu * h)
    in_attention = stream + norm + attention + 2 * matrix + 4 * q
    return keeps, max(in_mlp, in_attention)


def optimizer_memory(model: GPT, step: Step) -> tuple[float, float]:
    """Return the bytes of the optimizer's state, and of what a step takes for a moment.

    AdamW has two fp32 moments per weight. Muon has one for the matrices of the blocks, and is AdamW
    for the rest. Adafactor has a row and a column for each matrix.
    """
    if step.optimizer == "adafactor":  # it updates one parameter at a time
        params = list(model.parameters())
        return 4 * sum(sum(p.shape) for p in params), 4 * max(p.numel() for p in params)
    state = 8 * model.num_params()["total"] / step.ranks
    if step.optimizer == "adamw":
        return state, 0
    L = model.config.n_layer
    shapes = Counter(p.shape for p in model.blocks[0].parameters() if p.dim() == 2)
    state -= 4 * L * sum(n * shape.numel() for shape, n in shapes.items()) / step.ranks
    # Muon's work on the largest stack of matrices of one shape, of which each rank has a part: a
    # copy of the matrices, and of one by one two squares and their product with it.
    stack = max(
        min(math.ceil(n * L / step.ranks), max(STACK // shape.numel(), 1)) * shape.numel()
        for shape, n in shapes.items()
    )
    return state, stack * (6 if step.dtype == torch.bfloat16 else 11)


# Bytes that cuBLAS works in: torch gives it 8 MiB in the forward pass and 8 in the backward pass,
# which runs in another thread. (On a GPU of capability 9.0, 32 MiB each; that is not counted.)
CUBLAS = 2 * 8320 * 1024


def step_memory(model: GPT, step: Step) -> tuple[str, dict[str, float]]:
    """Return when a step holds the most, and the bytes of its parts then that are not 0.

    model: may be on the meta device.
    """
    c = model.config
    L, V, N = c.n_layer, c.padded_vocab_size, step.B * step.T
    s = step.dtype.itemsize
    zero = step.zero
    ddp = step.world > 1 and not zero
    P = model.num_params()["total"]
    block = sum(p.numel() for p in model.blocks[0].parameters())
    outside = P - L * block
    head = V * c.n_embd  # numbers in the matrix of the head
    logits = N * V * s
    keeps, most = block_memory(c, step)
    state, copies = optimizer_memory(model, step)
    if step.recompute:
        keeps = c.n_embd * step.stream
    flex = step.compiled and step.dtype != torch.float16 and not c.dropout
    mask = N * step.T * s if step.documents and step.device == "cuda" and not flex else 0
    buckets = 4 * P * (2 if step.device == "cpu" else 1) if ddp else 0
    earlier = 0
    if step.accum > 1:
        earlier = 4 * P / (step.world if zero >= 2 else 1)
    # Whether the gradients of a micro-step stay until its end, in memory of their own.
    own = not ddp and (step.compiled_whole or step.accum == 1)
    head_gradient = 4 * head if own or c.tie_embeddings or zero >= 2 else 0
    per_block = own * 4 * block / step.ranks
    buffer = 4 * block if zero else 0
    weights = 4 * P / step.ranks + sum(b.nbytes for b in model.buffers())
    whole = weights
    if zero:
        whole += 4 * (P if zero < 3 else outside) + buffer
    cast = 2 if s == 2 else 0
    if step.compiled:
        loss = 0
    elif step.dtype == torch.float16:
        loss = 12 * N * c.vocab_size - logits  # three tensors in fp32
    else:
        loss = min(N * V, max(V, loss_chunk(step.device))) * (8 if s == 2 else 4)
    last = 4
    if c.tie_embeddings:
        last = (8 if s == 4 else 10) if step.compiled_whole else (12 if s == 4 else 8)
    moments = {
        "at the loss": dict(
            weights=whole + cast * (head + (0 if step.recompute else L * block)),
            gradients=buckets + earlier,
            activations=mask + N * (L * keeps + c.n_embd * (step.stream + s)),
            logits=logits,
            temporary=max(loss, s * head, 4 * head - logits),
        ),
        "at the end of the backward pass": dict(
            weights=whole,
            gradients=buckets + earlier + L * per_block + own * 4 * (outside - head) + last * head,
            temporary=4 * c.n_embd * N,
        ),
        "while the last gradients are averaged": dict(
            weights=whole if zero == 2 and step.accum > 1 else weights,
            gradients=buckets + earlier + L * per_block + (4 * outside * (2 + 1 / step.world) if zero else 0),
        ),
        "in the optimizer's step": dict(
            weights=weights,
            gradients=buckets or 4 * P / step.ranks,
            temporary=copies,
        ),
    }
    for n in (1, L):  # blocks whose backward pass is not over
        moments[f"in the backward pass of block {n}"] = dict(
            weights=whole + (2 * buffer if zero == 3 else 0) + cast * block * (1 if step.recompute else n),
            gradients=buckets + earlier + head_gradient + per_block * (L - n) + block,
            activations=mask + N * ((n - 1) * keeps + most),
        )
    when = max(moments, key=lambda name: sum(moments[name].values()))
    return when, moments[when] | dict(optimizer=state, cuBLAS=CUBLAS if step.device == "cuda" else 0)


NCCL = 0.7e9
FRAGMENTED = 0.04


def beside(total: float, step: Step) -> dict[str, float]:
    """Return by part the bytes that the device must have beside the `total` bytes of a step."""
    if step.device == "cpu":
        return {"Python and torch": 0.3e9}
    parts = {"CUDA context": CONTEXT, "fragmentation": FRAGMENTED * total}
    if step.world > 1:
        parts["NCCL"] = NCCL
    return parts


def needed(model: GPT, step: Step) -> float:
    """Return the bytes that the device must have for a step."""
    peak = sum(step_memory(model, step)[1].values())
    return peak + sum(beside(peak, step).values())


def auto_batch(model: GPT, step: Step, capacity: float) -> int:
    """Return the largest batch_size that fits into `capacity` bytes.

    On a CPU it is at most 8,192 tokens, since a larger one is no faster (bench/LOG.md).
    """
    fits = largest_batch(model, step, capacity)
    return min(fits, max(1, 8192 // step.T)) if step.device == "cpu" else fits


def largest_batch(model: GPT, step: Step, capacity: float) -> int:
    """Return how many sequences of a micro-step fit into `capacity` bytes; 0 if not even one.

    If as many as in `step` do not fit, a step needs several micro-steps, whose gradients add up.
    """
    if needed(model, step) > capacity:
        step = replace(step, accum=max(2, step.accum))
    sizes = range(1, 2**20)
    return bisect_right(sizes, capacity, key=lambda B: needed(model, replace(step, B=B)))
