"""Predict the memory of a training step, part by part, from the settings alone.

The forward pass keeps what autograd needs for the backward pass. The backward pass frees it again,
operation by operation, and holds gradients beside it. block() lists the operations of a block, with
what each keeps and which gradients its backward pass needs. Timeline goes through a step and adds
up what is alive at each moment that may matter. The largest sum is the peak.

What is held when (P: parameters; N = B T: tokens of a micro-step; L: blocks; V: the padded
vocabulary; C = n_embd; s: bytes per number, 2 in 16 bits, 4 in fp32):

    always                      weights 4 P, optimizer 8 P (AdamW), DDP's buckets 4 P on several
                                ranks, gradients of earlier micro-steps 4 P
    forward pass                activations, more with each block; the weights' copies, s each
    loss                        activations of all blocks; logits N V s, and some rows in fp32
    head's backward pass        the same; the gradient of the head, in 16 bits and then in fp32
    backward pass of block i    activations of the blocks up to i, gradients of those behind it, and
                                the gradients that travel inside block i
    end of the backward pass    gradients of all; wte has two if the head is tied, and their sum
    optimizer's step            gradients, and what the optimizer needs for a moment

A block keeps, per token, with nh query heads of hs numbers each:

    norms       2 C s      the inputs of both norms: the residual stream (under fp16 it is in fp32)
    attention   C s        the input of qkv
                3 nh hs s  q, k and v, after the rotation and after key/value heads were repeated
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

tests/simgpu/memory.py compares the prediction with torch's allocator for CUDA, and
tests/test_memory.py with torch's profiler on a CPU: docs/cost.md has the results. What is below 1 %
is left out: token ids, and what a norm or a softmax keeps of a row. So is the scratch memory of
kernels. On a CPU it is mostly less than 2 MB per thread, which matters for a peak below 50 MB; so
does that of a 16-bit product with few columns (n_embd of 64 and less), which oneDNN splits among
the threads. The T x T matrix that a CPU makes with dropout, and in bf16 for short sequences, is
counted on the safe side: such a prediction may be 25 % too high.
"""

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hardware.device import CONTEXT
from hardware.kernels import loss_chunk
from model import GPT, GPTConfig
from training.optimizer import STACK
from training.settings import TrainConfig

SHARDS = ("none", "optimizer", "gradients", "all")  # by the stage of ZeRO


@dataclass(frozen=True)
class Step:
    """What the memory of a step depends on, beside the model."""

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
    def ddp(self) -> bool:
        return self.world > 1 and self.zero == 0

    @property
    def ranks(self) -> int:
        """Over how many ranks the weights and the optimizer's state are sharded."""
        return self.world if self.zero else 1

    @property
    def compiled_whole(self) -> bool:
        """Whether the whole model is compiled, and not its blocks one by one (parallel.py)."""
        return self.compiled and not self.recompute and not self.zero

    @property
    def s(self) -> int:
        """Bytes per number in the dtype of autocast."""
        return self.dtype.itemsize

    @property
    def stream(self) -> int:
        """Bytes per number of the residual stream. With fp16, model.py leaves it in fp32."""
        return 2 if self.dtype == torch.bfloat16 else 4

    def scores(self, c: GPTConfig) -> int:
        """Return the bytes per number of the T x T matrix, or 0 if there is no such matrix.

        Fused kernels have none. On a CPU, attention is computed by plain products in bf16 while the
        matrix fits into the cache (hardware/kernels.py), and dropout has no fused kernel.
        """
        if self.device != "cpu":
            return 0
        if self.dtype == torch.bfloat16 and 1 < self.T <= 512:
            return 2
        return 4 if c.dropout else 0


# --------------------------------------------------------------------------------------------------
# A block


class Operation(NamedTuple):
    """One operation of a block, with what it holds in bytes per token."""

    name: str
    keeps: float  # from the forward pass to the backward pass
    gradients: float  # that arrive and leave in its backward pass; 0: never the most of a block


def norm(c: GPTConfig, step: Step) -> float:
    """Return the bytes per token that a norm keeps: its input."""
    in_fp32 = c.norm == "layernorm" and step.device == "cuda" and not step.compiled
    return c.n_embd * (4 if in_fp32 else step.stream)


def attention(c: GPTConfig, step: Step) -> Operation:
    """Return attention, from q, k, v, the result of qkv, to the input of proj."""
    q = c.n_head * c.head_dim * step.s  # bytes per token
    kv = c.n_kv_head * c.head_dim * step.s
    # Which of q, k and v are new tensors. The others are views into what qkv wrote.
    rotated = c.pos == "rope" or c.qk_norm
    repeated = kv < q
    score = step.scores(c)
    # Products over all heads, for the T x T matrix, need new tensors.
    copied = 3 if score else rotated + (rotated or repeated) + repeated
    keeps = q + copied * c.n_head * c.head_dim * (score or step.s)
    if copied < 3 or c.qk_norm:
        keeps += q + 2 * kv
    if c.qk_norm and step.compiled and step.s == 4 and not repeated:
        keeps += q + kv  # before they are rotated, too
    if not score:
        return Operation("attention", keeps, 4 * q)
    row = c.n_head * step.T  # numbers of the matrix, per token
    matrix = row * score
    cast = row * step.s if score > step.s else 0  # a copy in 16 bits
    keeps += matrix  # softmax's result
    if c.dropout:  # its mask and its result
        keeps += row + (0 if cast else matrix) if step.compiled else 2 * matrix
    return Operation("attention", keeps, (cast or matrix) + matrix + 2 * q)


def mlp(c: GPTConfig, step: Step) -> list[Operation]:
    """Return the operations of an MLP up to the input of its last matrix."""
    x = c.n_embd * step.s  # bytes per token of its input
    h = c.d_ff * step.s  # bytes per token of a tensor inside
    if not c.gated:
        return [Operation("up", x, x + h), Operation("GELU", h, 2 * h)]
    # Under DDP torch compiles what belongs to one bucket of gradients, of 25 MiB, by itself. If
    # each of these matrices fills a bucket, silu's result goes from one piece to the next.
    cut = step.compiled_whole and step.ddp and 4 * c.n_embd * c.d_ff > 25 * 2**20
    # Compiled, silu is computed a second time, and gradients are written over what was kept.
    inside = 2 * h if step.compiled and not cut else 3 * h
    return [Operation("gate, up", x, 2 * x + h), Operation("silu(gate) * up", inside, inside)]


def block(c: GPTConfig, step: Step) -> list[Operation]:
    """Return the operations of a block, in the order of model.py's forward pass."""
    x = c.n_embd * step.s  # bytes per token of what a linear layer reads
    h = c.d_ff * step.s
    q = c.n_head * c.head_dim * step.s
    qkv = q + 2 * c.n_kv_head * c.head_dim * step.s
    # The gradient that arrives at proj and at down is that of the residual stream itself, or a copy
    # of it in 16 bits.
    copy = x if step.stream != step.s else 0
    mask = c.n_embd * (step.s if step.device == "cpu" else 1)
    dropout = [Operation("dropout", mask, 0)] if c.dropout else []
    # Where blocks are compiled one by one, norm_2 keeps the result of proj, in the dtype of
    # autocast, which is added to the block's input a second time.
    by_blocks = step.compiled and not step.compiled_whole
    return [
        Operation("norm_1", norm(c, step), 0),
        Operation("qkv", x, 2 * qkv),
        attention(c, step),
        Operation("proj", 0, copy + q),
        *dropout,
        Operation("norm_2", x if by_blocks else norm(c, step), 0),
        *mlp(c, step),
        Operation("down", h, copy + h),
        *dropout,
    ]


def kept(c: GPTConfig, step: Step, blocks: int) -> float:
    """Return what so many blocks keep for their backward pass, in bytes per token."""
    # FlexAttention keeps no mask of T x T. fp16 is mostly for GPUs that do not have it.
    flex = step.compiled and step.dtype != torch.float16 and not c.dropout
    mask = step.T * step.s if step.documents and step.device == "cuda" and not flex else 0
    in_block = sum(operation.keeps for operation in block(c, step))
    return mask + blocks * (c.n_embd * step.stream if step.recompute else in_block)


def most_in_block(c: GPTConfig, step: Step) -> float:
    """Return the most that the backward pass of a block holds, in bytes per token.

    What an operation keeps is free as soon as its backward pass is over.
    """
    held = float(c.n_embd * step.stream)  # the gradient of the residual stream
    most = held
    for operation in block(c, step):
        held += operation.keeps
        most = max(most, held + operation.gradients)
    return most


# --------------------------------------------------------------------------------------------------
# What does not depend on the batch


def optimizer_bytes(model: GPT, optimizer: str) -> int:
    """Return the bytes of the optimizer's state.

    AdamW has two fp32 moments per weight. Muon has one for the matrices of the blocks, and is AdamW
    for the rest. Adafactor has a row and a column for each matrix.
    """
    if optimizer == "adafactor":
        return 4 * sum(sum(p.shape) for p in model.parameters())
    matrices = sum(p.numel() for p in model.blocks[0].parameters() if p.dim() == 2)
    return 8 * count(model) - (4 * model.config.n_layer * matrices if optimizer == "muon" else 0)


def optimizer_copies(model: GPT, step: Step) -> float:
    """Return the bytes that the optimizer takes beside its state, for a moment."""
    if step.optimizer == "adamw":
        return 0
    if step.optimizer == "adafactor":  # the update of one parameter at a time
        return 4 * max(p.numel() for p in model.parameters())
    # Muon, for the largest stack of matrices of one shape, of which each rank has its share: a copy
    # of the matrices, and of one by one two squares and their product with it. For the matrices of
    # an MLP that is 2.5 to 2.75 numbers for each of theirs; in bf16 the sum with fp32 is the most.
    shapes = (p.shape for p in model.blocks[0].parameters() if p.dim() == 2)
    stacks = Counter([*shapes] * model.config.n_layer)
    numbers = max(
        min(math.ceil(n / step.ranks), max(STACK // shape.numel(), 1)) * shape.numel()
        for shape, n in stacks.items()
    )
    return numbers * (6 if step.dtype == torch.bfloat16 else 11)


def count(model: GPT) -> int:
    """Return the number of parameters. Blocks are alike: to visit all of them takes a while."""
    # A set, since a tied matrix is there twice.
    outside = {p for m in model.children() if m is not model.blocks for p in m.parameters()}
    return sum(p.numel() for p in outside) + model.config.n_layer * in_block(model)


def in_block(model: GPT) -> int:
    """Return the number of parameters of a block."""
    return sum(p.numel() for p in model.blocks[0].parameters())


# Bytes that cuBLAS works in: torch gives it 8 MiB in the forward pass and 8 in the backward pass,
# which runs in another thread. (On a GPU of capability 9.0, 32 MiB each; that is not counted.)
CUBLAS = 2 * 8320 * 1024


# --------------------------------------------------------------------------------------------------
# A step


class Timeline:
    """The moments of a step that may hold the most, in their order."""

    def __init__(self, model: GPT, step: Step):
        c = model.config
        self.c = c
        self.step = step
        self.moments: dict[str, Counter] = {}  # when -> part -> bytes
        self.N = step.B * step.T
        self.P = count(model)
        self.in_block = in_block(model)
        self.most_in_block = most_in_block(c, step)
        self.outside = self.P - c.n_layer * self.in_block
        self.head = c.padded_vocab_size * c.n_embd  # numbers in the matrix of the head
        self.logits = self.N * c.padded_vocab_size * step.s
        # Whether the gradients of a micro-step stay until its end, in memory of their own. If not,
        # each is added at once to those of earlier micro-steps, or goes into DDP's buckets.
        self.own_gradients = not step.ddp and (step.compiled_whole or step.accum == 1)
        # Bytes of gradients after the backward pass of the head.
        separate = self.own_gradients or c.tie_embeddings or step.zero >= 2
        self.head_gradient = 4 * self.head if separate else 0
        # In fp32, Inductor computes the gradient of a tied head at the end of the backward pass, in
        # one addmm with the sum. The logits, from which it is computed, wait until then.
        late = step.compiled_whole and c.tie_embeddings and step.s == 4
        self.waiting = self.logits if late else 0
        constants = sum(buffer.nbytes for buffer in model.buffers())
        self.always = Counter(weights=4 * self.P / step.ranks + constants)  # during the whole step
        self.always["optimizer"] = optimizer_bytes(model, step.optimizer) / step.ranks
        if step.device == "cuda":
            self.always["cuBLAS"] = CUBLAS
        if step.ddp:
            # DDP puts gradients into its buckets in the last micro-step of a step. Those of the
            # earlier micro-steps were added up beside the buckets. In the second step DDP lays the
            # buckets out anew, in the order in which gradients came. On a CPU, gloo still holds the
            # old ones. On a GPU, NCCL lets go of them within a tenth of a second after the first
            # step.
            self.always["DDP's buckets"] = (2 if step.device == "cpu" else 1) * 4 * self.P
        if step.accum > 1:  # the gradients of the micro-steps before; sharded from ZeRO-2 on
            self.always["gradients"] = 4 * self.P / (step.world if step.zero >= 2 else 1)

        self.around_head()
        # From block to block it is more or less by the same amount, but for the last one, where no
        # weights are on their way (gathered()): so the most is at an end.
        for number in sorted({0, max(0, c.n_layer - 2), c.n_layer - 1}, reverse=True):
            self.backward_of_block(number)
        self.end_of_backward()
        # Under DDP the gradients are its buckets, which are among what is always held.
        gradients = 0 if step.ddp else 4 * self.P / step.ranks
        copies = {"gradients": gradients, "temporary": optimizer_copies(model, step)}
        self.moments["in the optimizer's step"] = Counter(self.always | copies)

    def note(self, name: str, tokens: float, copies: float, **sizes: float) -> None:
        """Note a moment.

        tokens: the activations that are kept, in bytes per token. copies: how many weights have a
        copy in 16 bits. sizes: the bytes of other parts.
        """
        parts = Counter(self.always)
        parts.update({"activations": self.N * tokens}, **sizes)
        if self.step.s == 2:
            parts["16-bit weights"] = 2 * copies
        self.moments[name] = parts

    def around_head(self) -> None:
        """Note the moments of the loss and of the head's backward pass."""
        c = self.c
        step = self.step
        head_input = c.n_embd * step.s
        tokens = kept(c, step, c.n_layer) + norm(c, step) + head_input
        copies = self.head + (0 if step.recompute else c.n_layer * self.in_block)
        sizes = self.gathered(None) | {"logits": self.logits}
        self.note("before the backward pass", tokens, copies, temporary=self.loss_bytes(), **sizes)
        # The gradient of the logits is written over the logits. That of the head comes in the dtype
        # of autocast. When the logits and the head's copy are gone, there is a copy of it in fp32.
        temporary = max(step.s * self.head, 4 * self.head - self.logits) + self.N * head_input
        self.note("in the head's backward pass", tokens, copies, temporary=temporary, **sizes)

    def gathered(self, block: int | None) -> dict[str, float]:
        """Return by part the bytes of whole weights, and of the buffers of FSDP2, at a moment.

        block: the block that works backward, from 0; None: none of them, but what is around them.

        The weights of a block come in one buffer, and are copied into their places. In a forward
        pass the buffer stays until the next block has come. In a backward pass the block before is
        on its way, unless it is there already. Gradients go the other way: they are copied into a
        buffer, which stays until those of the next block are ready.
        """
        step = self.step
        if not step.zero:
            return {}
        blocks = self.c.n_layer
        if step.zero == 3:
            blocks = 0 if block is None else 1
        buffers = 1 if block is None else (block < self.c.n_layer - 1) + (step.zero == 3)
        size = 4 * self.in_block
        return {"whole weights": 4 * self.outside + blocks * size, "FSDP's buffers": buffers * size}

    def loss_bytes(self) -> float:
        """Return the bytes that the loss takes beside the logits."""
        V = self.c.padded_vocab_size
        if self.step.compiled:
            return 0
        if self.step.dtype == torch.float16:
            # Plain cross_entropy: three fp32 tensors without the padding, and nothing else, not
            # even the logits, which note() counts.
            return 12 * self.N * self.c.vocab_size - self.logits
        rows = max(1, loss_chunk(self.step.device) // V)  # of ChunkedCrossEntropy at a time
        return min(self.N, rows) * V * (8 if self.step.s == 2 else 4)

    def backward_of_block(self, number: int) -> None:
        """Note the most that the backward pass of a block holds. number: from 0."""
        c = self.c
        step = self.step
        gradients = max(self.head_gradient, self.waiting)
        if self.own_gradients:  # of the blocks behind; if sharded, they are averaged already
            gradients += 4 * self.in_block * (c.n_layer - 1 - number) / step.ranks
        gradients += self.in_block  # of its own weights, a quarter when the most is held
        tokens = kept(c, step, number)
        copies = self.in_block * (1 if step.recompute else number + 1)
        name = f"in the backward pass of block {number + 1}"
        sizes = self.gathered(number) | {"gradients": gradients}
        sizes["inside a block"] = self.N * self.most_in_block
        self.note(name, tokens, copies, **sizes)

    def wte_gradient(self) -> int:
        """Return the bytes per number that the gradient of wte takes while it is summed up."""
        step = self.step
        if not self.c.tie_embeddings:
            return 4
        if step.compiled_whole:
            # Inductor computes the head's gradient and the sum in one addmm in fp32. In 16 bits, it
            # adds the head's, still in 16 bits, and the embedding's into a third tensor.
            return 8 if step.s == 4 else 10
        # Autograd adds the embedding's gradient to the head's in place. But in fp32 the head's is a
        # view of the result of a product, and the sum is a third tensor.
        return 12 if step.s == 4 else 8

    def end_of_backward(self) -> None:
        """Note the moments of the embedding's gradient, and of the sum with that of a tied head."""
        step = self.step
        gradients = self.head_gradient if step.zero else 0
        if self.own_gradients:
            gradients = 4 * (self.P - self.outside) / step.ranks + 4 * self.outside
        counted = 4 * self.head if self.own_gradients else gradients  # in `gradients` already
        of_stream = 4 * self.c.n_embd * self.N
        temporary = self.wte_gradient() * self.head - counted + of_stream
        size = dict(gradients=gradients, temporary=temporary, logits=self.waiting)
        self.note("at the end of the backward pass", 0, 0, **size, **self.gathered(None))
        if step.zero:
            outside = 4 * self.outside
            temporary = outside + outside / step.world
            temporary += 0 if self.own_gradients else outside - self.head_gradient
            size = dict(gradients=gradients, temporary=temporary)
            if step.zero == 2 and step.accum > 1:  # else the whole weights are gone
                size |= self.gathered(None)
            self.note("while the last gradients are averaged", 0, 0, **size)


def step_memory(model: GPT, step: Step) -> tuple[str, dict[str, float]]:
    """Return when a step holds the most, and the bytes of its parts then that are not 0.

    model: may be on the meta device.
    """
    moments = Timeline(model, step).moments
    largest = max(moments, key=lambda name: moments[name].total())
    return largest, {part: size for part, size in moments[largest].items() if size}


# What a GPU needs beyond what torch.cuda.max_memory_allocated() sees: the buffers of NCCL in bytes,
# and the share that the allocator cannot use between its blocks. Both are assumed, not measured.
# CUDA's context comes on top of these.
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
