"""Predict the memory of a training step, part by part, from the settings alone.

The forward pass keeps the activations that the backward pass needs. The backward pass frees them
again, block by block, and allocates gradients. step_memory() adds up the live tensors at each
moment that may be the peak, and takes the largest sum.

The tensors at each moment (P: parameters; N = B T: tokens of a micro-step; L: blocks; V: the padded
vocabulary; C = n_embd; s: bytes per number, 2 in 16 bits, 4 in fp32):

    always                      weights 4 P, optimizer 8 P (AdamW), DDP's buckets 4 P on several
                                ranks, gradients of earlier micro-steps 4 P
    loss, head's backward pass  activations of all blocks; the weights' copies, s each; logits N V s
                                and some rows in fp32; the gradient of the head
    backward pass of a block    activations of the blocks before it, gradients of the blocks after
                                it, and the gradients of activations inside the block
    end of the backward pass    all gradients; wte has two if the head is tied, and their sum
    optimizer's step            gradients, and temporary tensors of the optimizer

A block keeps, per token, with nh query heads of hs numbers each:

    norms       2 C s      the inputs of both norms: the residual stream (in fp32 under fp16)
    attention   C s        the input of qkv
                3 nh hs s  q, k and v; rotated or repeated, they are new tensors. The output of qkv
                           is kept too, while any of the three is a view into it
                nh hs s    the output, which is the input of proj
    MLP         C s        its input
                2 d_ff s   GELU: its input and its output
                3 d_ff s   SwiGLU, compiled: gate, up and their product
                4 d_ff s   SwiGLU, in eager mode: silu(gate) too

For GPT-2 this is 16 C numbers per token and layer: 2 + 1 + 3 + 1 + 1 + 8. The terms are those of
Korthikanti et al., arXiv 2205.05198, section 4.1, without its dropout masks and its T x T scores,
and counted for the kernels that run here. torch.compile fuses the operations between the matrix
products, so that they need no temporaries, and all gradients of a micro-step are alive at its end,
before they are added to those of earlier micro-steps.

tests/simgpu/memory.py compares the prediction with torch's allocator for CUDA, and
tests/test_memory.py with torch's profiler on a CPU: docs/cost.md has the results. Tensors below 1 %
are left out: token ids, and the statistics of norms and softmax. So is the scratch memory of
kernels, which matters on a CPU for a peak below 50 MB, and for n_embd of 64 and less. The T x T
matrix that a CPU makes with dropout, and in bf16 for short sequences, is an upper bound: such a
prediction may be 25 % too high.
"""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from hardware.kernels import keeps_gradient, loss_chunk
from hardware.limits import CONTEXT
from hardware.machine import Machine
from model import GPT, GPTConfig
from training.optimizer import STACK
from training.plan import Plan
from training.settings import SHARDS, TrainConfig

# The workspace of cuBLAS: torch gives it 8 MiB in the forward pass and 8 in the backward pass,
# which runs in another thread. (On a GPU of capability 9.0, 32 MiB each; that is not counted.)
CUBLAS = 2 * 8320 * 1024
PARTS = ("optimizer", "cuBLAS", "weights", "gradients", "activations", "logits", "temporary")


@dataclass(frozen=True)
class Workload:
    """The sizes and settings, apart from the model, that the memory of a step depends on."""

    B: int  # sequences in a micro-step
    T: int  # tokens in a sequence
    accum: int = 1  # micro-steps in a step
    dtype: torch.dtype = torch.bfloat16  # of autocast
    compiled: bool = True
    device: str = "cuda"
    world: int = 1  # processes
    shard: str = "none"  # none, optimizer, gradients or all: what is sharded over the processes
    optimizer: str = "adamw"
    documents: bool = False  # whether attention is limited to a document
    # Keep only the input of a block, and compute the rest again in the backward pass.
    recompute: bool = False

    @classmethod
    def of(cls, cfg: TrainConfig, plan: Plan, machine: Machine) -> "Workload":
        """Return the workload of a run on one of its ranks."""
        sizes = (plan.batch_size, cfg.block_size, plan.accum, machine.dtype, plan.compiled)
        load = cls(*sizes, machine.device.type, machine.world, cfg.shard, cfg.optimizer)
        documents = cfg.documents in ("mask", "pack")
        return replace(load, documents=documents, recompute=cfg.recompute == "blocks")

    @property
    def zero(self) -> int:
        """The stage of ZeRO. 0 is DDP, or one process: each process holds everything."""
        return SHARDS.index(self.shard) if self.world > 1 else 0

    @property
    def compiled_whole(self) -> bool:
        """Whether the whole model is compiled, and not its blocks one by one (parallel.py)."""
        return self.compiled and not self.recompute and not self.zero


def block_memory(c: GPTConfig, load: Workload) -> tuple[float, float, float]:
    """Return bytes per token: of the residual stream, of all that a block keeps for its backward
    pass, and of the most that this backward pass holds.
    """
    s = load.dtype.itemsize
    x, h = c.n_embd * s, c.d_ff * s
    q, kv = c.n_head * c.head_dim * s, c.n_kv_head * c.head_dim * s
    stream = c.n_embd * (2 if load.dtype == torch.bfloat16 else 4)  # with fp16 it is in fp32
    fp32_norm = c.norm == "layernorm" and load.device == "cuda" and not load.compiled
    norm = 4 * c.n_embd if fp32_norm else stream
    # Bytes per number of a T x T matrix, which fused kernels do not store. On a CPU, attention uses
    # plain products in bf16 if the matrix fits into the cache, and dropout has no fused kernel.
    score = 4 if load.device == "cpu" and c.dropout else 0
    if load.device == "cpu" and load.dtype == torch.bfloat16 and 1 < load.T <= 512:
        score = 2
    matrix = c.n_head * load.T * score
    # How many of q, k and v are new tensors. The others are views into the output of qkv.
    rotated = c.pos == "rope" or c.qk_norm
    new = 3 if score else rotated + (rotated or kv < q) + (kv < q)
    attention = x + q + new * q * max(score, s) // s + matrix * (3 if c.dropout else 1)
    if new < 3 or c.qk_norm:
        attention += q + 2 * kv
    # In fp32, Inductor also keeps the normed queries and keys from before the rotation.
    attention += 2 * q if c.qk_norm and load.compiled and s == 4 and kv == q else 0
    # Under DDP, torch compiles the operations of each bucket of gradients, 25 MiB, by themselves.
    # If each of these matrices fills a bucket, silu's result is passed from one graph to the next.
    cut = load.compiled_whole and load.world > 1 and 4 * c.n_embd * c.d_ff > 25 * 2**20
    silu = c.gated and (not load.compiled or cut)
    dropout = 2 * c.n_embd * (s if load.device == "cpu" else 1) if c.dropout else 0
    keeps = 2 * norm + attention + x + (2 + c.gated + silu) * h + dropout
    # The backward pass holds the most in the MLP, or in attention if there is a T x T matrix.
    most = stream + max(keeps + (1 + silu) * h, norm + attention + 2 * matrix + 4 * q)
    return stream, stream if load.recompute else keeps, most


def optimizer_memory(model: GPT, load: Workload) -> tuple[float, float]:
    """Return the bytes of the optimizer's state, and of the temporary tensors of its step.

    AdamW has two fp32 moments per weight. Muon has one for the matrices of the blocks, and is AdamW
    for the rest. Adafactor has a row and a column for each matrix.
    """
    params = list(model.parameters())
    if load.optimizer == "adafactor":  # it updates one parameter at a time
        return 4 * sum(sum(p.shape) for p in params), 4 * max(p.numel() for p in params)
    if load.optimizer not in ("adamw", "muon"):
        raise NotImplementedError(f"the memory of {load.optimizer}")
    ranks = load.world if load.zero else 1
    # In Muon's stacks: all matrices of one shape.
    numbers: dict[torch.Size, float] = defaultdict(float)
    for p in model.blocks[0].parameters():
        if load.optimizer == "muon" and p.dim() == 2:
            numbers[p.shape] += model.config.n_layer * p.numel() / ranks
    # The temporaries of a stack: a copy, two squares, and their product with it.
    most = max((min(n, max(STACK, shape.numel())) for shape, n in numbers.items()), default=0)
    state = 8 * sum(p.numel() for p in params) / ranks - 4 * sum(numbers.values())
    return state, most * (6 if load.dtype == torch.bfloat16 else 11)


def step_memory(model: GPT, load: Workload) -> tuple[str, dict[str, float]]:
    """Return the moment of a step's peak, and the bytes of its PARTS at that moment.

    The sum predicts torch.cuda.max_memory_allocated(). model: may be on the meta device.
    """
    c = model.config
    L, V, N, s = c.n_layer, c.padded_vocab_size, load.B * load.T, load.dtype.itemsize
    zero, ddp = load.zero, load.world > 1 and not load.zero
    ranks = load.world if zero else 1
    P = model.num_params()["total"]
    block = sum(p.numel() for p in model.blocks[0].parameters())
    outside = P - L * block  # the embeddings, the last norm and the head
    head = V * c.n_embd
    logits = N * V * s
    state, copies = optimizer_memory(model, load)

    stream, keeps, most = block_memory(c, load)
    # FlexAttention keeps no mask of T x T. fp16 is mostly for GPUs that do not have it.
    flex = load.compiled and load.dtype != torch.float16 and not c.dropout
    mask = N * load.T * s if load.documents and load.device == "cuda" and not flex else 0
    activations = mask + N * (L * keeps + stream + c.n_embd * s)  # the last norm's, the head's

    # With FSDP, ZeRO 1 to 3: the full weights, and buffers of the size of a block.
    weights = 4 * P / ranks + sum(b.nbytes for b in model.buffers())
    full = weights + (4 * (P if zero < 3 else outside) + 4 * block if zero else 0)
    cast = 2 if s == 2 else 0  # bytes per weight of autocast's copies

    # DDP puts gradients into its buckets in the last micro-step. The gradients of the earlier
    # micro-steps are added up outside of them. On a CPU, gloo also holds the first step's buckets.
    total = 4 * P / ranks * (2 if ddp and load.device == "cpu" else 1)
    before = ddp * total + (load.accum > 1) * 4 * P / (ranks if zero >= 2 else 1)
    # Whether the gradients of a micro-step have memory of their own until its end. If not, each is
    # added at once to those of earlier micro-steps, or written into DDP's buckets.
    own = not ddp and (load.compiled_whole or load.accum == 1)
    own_block = own * 4 * block / ranks
    own_head = 4 * head if own or c.tie_embeddings or zero >= 2 else 0
    # wte's gradient. A tied head's is added to it, in up to three tensors.
    wte = 4
    if c.tie_embeddings:
        wte = {(4, False): 12, (2, True): 10}.get((s, load.compiled_whole), 8)
    last = before + L * own_block + own * 4 * (outside - head) + wte * head
    if zero:  # the gradients outside of the blocks are averaged after the full weights are freed
        gone = full - weights if zero != 2 or load.accum == 1 else 0
        last = max(last, before + L * own_block + 4 * outside * (2 + 1 / ranks) - gone)
    # In fp32, Inductor computes a tied head's gradient from the logits at the end.
    late = logits if load.compiled_whole and c.tie_embeddings and s == 4 else 0
    loss = max(s * head, 4 * head - logits)  # the head's gradient, in the dtype and then in fp32
    if not load.compiled:  # rows in fp32; in fp16 all of them, three times
        rows = min(N * V, max(V, loss_chunk(load.device))) * 16 // s
        rows += logits if keeps_gradient(logits, load.device) else 0
        loss = max(loss, 12 * N * V - logits if load.dtype == torch.float16 else rows)

    # when: weights, gradients, activations, logits, temporary
    at_loss = full + cast * (head + block * (1 if load.recompute else L))
    moments = {
        "at the loss": (at_loss, before, activations, logits, loss),
        "at the end of the backward pass": (full, last, 4 * c.n_embd * N, late, 0),
        "in the optimizer's step": (weights, total, 0, 0, copies),
    }
    for n in {1, max(1, L - 1), L}:  # the backward pass of n blocks is not over
        # ZeRO 3 holds this block, and the previous block, which is being gathered.
        gathered = 4 * block * (1 + (n < L or load.recompute)) if zero == 3 else 0
        there = full + gathered + cast * block * (1 if load.recompute else n)
        gradients = before + own_head + own_block * (L - n) + block
        row = (there, gradients, mask + N * ((n - 1) * keeps + most), late, 0)
        moments[f"in the backward pass of block {n}"] = row
    when, sizes = max(moments.items(), key=lambda moment: sum(moment[1]))
    return when, dict(zip(PARTS, (state, CUBLAS * (load.device == "cuda"), *sizes), strict=True))


def overhead(model: GPT, peak: float, load: Workload) -> dict[str, float]:
    """Return part -> bytes that a device must have in addition to the `peak` of a step.

    The bytes of NCCL, and the fraction of a GPU's memory that is lost to fragmentation, are
    assumed, not measured.
    """
    if load.device == "cpu":
        # Smaller tensors fill the memory of freed logits, so the next logits need new memory. (With
        # shards, large tensors have pages of their own: tune_malloc() of hardware/limits.py)
        logits = load.B * load.T * model.config.padded_vocab_size * load.dtype.itemsize
        gap = 0 if load.zero else logits * (1 + keeps_gradient(logits, load.device))
        return {"Python and torch": 0.3e9, "gap in the heap": gap}
    return {
        "CUDA context": CONTEXT,
        "fragmentation": 0.04 * peak,
        "NCCL": 0.7e9 * (load.world > 1),
    }


def bytes_needed(model: GPT, load: Workload) -> float:
    """Return the bytes that the device must have for a step."""
    peak = sum(step_memory(model, load)[1].values())
    return peak + sum(overhead(model, peak, load).values())


def largest_batch(model: GPT, load: Workload, capacity: float) -> int:
    """Return the largest number of sequences in a micro-step that fits into `capacity` bytes, or 0.

    If those of `load` do not fit, a step needs several micro-steps, whose gradients add up.
    """
    if bytes_needed(model, load) > capacity:
        load = replace(load, accum=max(2, load.accum))
    sizes = range(1, 2**20)
    return bisect_right(sizes, capacity, key=lambda B: bytes_needed(model, replace(load, B=B)))
