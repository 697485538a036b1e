"""Predict the memory of a training step, part by part, from the settings alone.

The formulas follow a step. The forward pass keeps what autograd needs for the backward pass. The
backward pass frees it again, operation by operation, and holds gradients beside it. block() lists
the operations of a block, with what each keeps and what its backward pass needs. moments() adds up
everything that is alive at each operation. The largest sum is the peak. tests/test_memory.py
compares it with what torch allocates, over random shapes.

Symbols: N = B T tokens; s bytes per number (2 in 16 bits, 4 in fp32); C = n_embd; nh query heads
and nkv key/value heads of hs numbers each; V the padded vocabulary. A block keeps, per token:

    norms       2 C s      the inputs of both norms: the residual stream (under fp16 it is in fp32)
    attention   C s        the input of qkv
                3 nh hs s  q, k and v, after the rotation and after key/value heads were repeated
                nh hs s    the output, which is the input of proj
                4 nh       the log-sum-exp of each head
    MLP         C s        its input
                2 d_ff s   GELU: its input and its output
                3 d_ff s   SwiGLU, compiled: gate, up and their product
                4 d_ff s   SwiGLU, in eager mode: silu(gate) too

For GPT-2 this is 16 C numbers per token and layer: 2 + 1 + 3 + 1 + 1 + 8. There is no T x T matrix
where scaled_dot_product_attention computes attention piece by piece.

The terms are those of Korthikanti et al., arXiv 2205.05198, section 4.1, without its dropout masks
and its T x T scores, and counted for the kernels that run here.

In 16 bits the gradient of a matrix is computed in 16 bits and then cast to fp32: for a moment it
takes 6 bytes per number. If wte and the head share one matrix, this matrix has two gradients, both
of V x C numbers in fp32. The head's gradient comes first and waits for the embedding's gradient,
which is the very last. Autograd adds the second to the first in place. But in fp32 the first is a
view of the result of a product, and the sum is a third tensor.

torch.compile fuses what lies between the matrix products, which then needs no temporaries. It
changes four other things:

  * All gradients of a micro-step are alive at its end, before they are added to those of earlier
    micro-steps.
  * In 16 bits too, the sum of the two gradients of a shared matrix is a third tensor. In fp32,
    Inductor computes the head's gradient and the sum in one addmm at the end, and the gradient of
    the logits has to wait for that.
  * Dropout keeps a mask of one byte per number.
  * A step with few tokens may run in another order: see inductors().

The scratch memory that kernels take for themselves is not counted. It depends on the caches and the
threads of a machine. On a CPU it is mostly less than 2 MB per thread (oneDNN's copies of the
operands of a product, the tiles of attention). So the prediction is within 5 % only for peaks above
50 MB, and only for n_embd above 64: where a 16-bit product has fewer columns, oneDNN may split a
long sum among the threads, and each thread then holds a result of its own in fp32. In that case the
head's gradient takes 4 V C more bytes per thread: with two threads 5 to 7 % of a step of 2,048
tokens at V = 50,257, with one thread nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from hardware.kernels import attention_kernel, loss_chunk
from hardware.machine import CONTEXT
from model import GPT, GPTConfig
from training.optimizer import STACK
from training.settings import TrainConfig


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
    shard: str = "none"  # none, optimizer, gradients or all: what the processes share out
    optimizer: str = "adamw"
    average: bool = False  # whether a running mean of the weights is kept (training/average.py)
    documents: bool = False  # whether attention stays inside a document
    # True: attention is computed piece by piece. False: with the T x T matrix, as on a GPU that has
    # no fused kernel for the shape.
    fused: bool = True
    # Keep only the input of a block, and compute the rest a second time in the backward pass.
    recompute: bool = False

    def of(self, cfg: TrainConfig) -> "Step":
        """Return this step with what the settings say of it."""
        some = dict(optimizer=cfg.optimizer, average=cfg.average > 0, shard=cfg.shard)
        some |= dict(recompute=cfg.recompute == "blocks", documents=cfg.documents != "stream")
        return replace(self, **some)

    @property
    def zero(self) -> int:
        """The stage of ZeRO: 0 is DDP, where each process holds everything."""
        stages = {"none": 0, "optimizer": 1, "gradients": 2, "all": 3}
        return stages[self.shard] if self.world > 1 else 0

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

    @property
    def eager_cpu(self) -> bool:
        """Whether it is eager mode on a CPU: small operations do there what one GPU kernel does."""
        return self.device == "cpu" and not self.compiled

    def matrix(self, c: GPTConfig) -> int:
        """Return the bytes per number of the T x T matrix, or 0 if there is no such matrix.

        torch's math kernel makes it in fp32: 4 bytes. The plain attention of hardware/kernels.py
        makes it in the dtype of autocast.
        """
        if not self.fused:
            return 4
        if self.device != "cpu":
            return 0
        cpu = torch.device("cpu")
        kernel = attention_kernel(c.n_head, self.T, c.head_dim, cpu, self.dtype, c.dropout)
        return {"plain": self.s, "math": 4}.get(kernel, 0)


# --------------------------------------------------------------------------------------------------
# A block


@dataclass(frozen=True)
class Operation:
    """One operation of a block. All sizes are bytes per token, except `weight`.

    `backward` and `forward` are the most that is alive during that pass of the operation. They
    include what it keeps itself, and the gradients that arrive and leave. They do not include the
    residual stream and what earlier operations keep.
    """

    part: str
    keeps: float  # from the forward pass to the backward pass
    backward: float
    leaves: float = 0  # gradients that are alive when its backward pass is over
    weight: int = 0  # how many numbers its weight matrix has
    forward: float = 0  # 0 if its forward pass cannot be the peak


def norm(c: GPTConfig, step: Step, comes: float) -> Operation:
    """Return a norm as an Operation.

    comes: bytes per token of the gradient that arrives from the operation behind it.
    """
    C = c.n_embd
    stream = C * step.stream
    if c.norm == "rmsnorm" and step.eager_cpu:
        # RMSNormOnCPU keeps its input. Its backward pass makes two fp32 tensors, and in bf16 also
        # the gradient in fp32, and the result.
        made = 14 * C if step.stream == 2 else 8 * C
        return Operation("norms", stream + 4, stream + 4 + comes + made)
    if c.norm == "layernorm" and not step.compiled and step.device != "cpu":
        # Autocast on a GPU runs it in fp32: the input and both gradients are cast.
        casts = 8 * C if step.stream == 2 else 0
        return Operation("norms", 4 * C + 8, 4 * C + 8 + comes + stream + casts)
    made = 0 if step.compiled else stream  # compiled code writes its result over what arrives
    return Operation("norms", stream + 8, stream + 8 + comes + made)


def heads(c: GPTConfig, step: Step) -> Operation:
    """Return the operation between qkv, which makes q, k, v, and attention, which reads them."""
    s = step.s
    q = c.n_head * c.head_dim  # numbers per token
    kv = c.n_kv_head * c.head_dim
    qkv = (q + 2 * kv) * s
    turned = c.pos == "rope" or c.qk_norm
    repeated = kv < q

    # How many of q, k and v are new tensors. The others are views into what qkv wrote.
    own = [turned, turned or repeated, repeated].count(True)
    size = s
    single = step.B == 1 or c.n_head == 1
    matrix = step.matrix(c)
    if matrix == 4 or (matrix and not single):
        # A product over all heads needs the numbers of each head contiguous in memory. torch's math
        # kernel needs them in fp32.
        cast = matrix > s and not step.compiled
        own = 3 if repeated or not single or cast else 2
        size = s if step.compiled else matrix
    views = own < 3

    normalised = 0.0
    if c.qk_norm:  # it keeps what norm() keeps; its input is such a view, or a copy in fp32
        normalised = 4 * (c.n_head + c.n_kv_head)
        views = True
        if step.compiled and s == 4 and c.pos == "rope" and not repeated:
            normalised += (q + kv) * s  # and its result, before it is rotated
    keeps = own * q * size + normalised
    if views:
        keeps += qkv

    forward = 0.0
    if c.pos == "rope" and not step.compiled:
        # For x cos + turned(x) sin, both products are in fp32. On a CPU, a copy of x and the result
        # are. k is rotated after q, while the rotated q is alive.
        turning = 8 + s
        if step.eager_cpu:
            turning = 8 if s == 2 else 4
        forward = qkv + normalised + max(turning * q, turning * kv + 4 * q)
        if c.qk_norm:
            forward += (q + kv) * s
    return Operation("attention", keeps, keeps + 4 * q * s, qkv, forward=forward)


def scores(c: GPTConfig, step: Step) -> Operation:
    """Return the operation on the T x T matrix: the softmax of the scores, and dropout."""
    s = step.s
    q = c.n_head * c.head_dim
    row = c.n_head * step.T  # numbers per token
    matrix = row * step.matrix(c)
    cast = step.matrix(c) > s
    drops = c.dropout > 0
    forward = 0
    if step.compiled:
        # It keeps softmax's result. Dropout keeps a mask of bytes, and also its own result, unless
        # the product after it keeps a cast copy of that.
        mask = row if cast else row * (1 + s)
        keeps = matrix + mask if drops else matrix
        backward = row * s * (2 if cast else 1)
        if cast:
            # If there are several layers, the last block keeps softmax's result in place of the
            # scores: for a moment this is one tensor more.
            forward = keeps + row * (4 if c.n_layer == 1 else 8) + 8 * q
    else:
        # It keeps softmax's result. Dropout keeps its mask and its own result.
        mask = matrix if step.eager_cpu else row
        keeps = matrix + matrix + mask if drops else matrix
        backward = matrix * (1 if drops else 2)
        if step.matrix(c) == 4:
            # Temporaries of torch's math kernel: the output, and q, k and v if they are cast, in
            # fp32; the causal mask; the 16-bit tensors before or after a cast.
            temporary = q * (18 if cast else 4) + 4 * step.T / step.B
            if cast:
                temporary += 3 * q * s + (row * s if drops else 0)
            if not drops:
                temporary += matrix
            forward = keeps + temporary
    out = q * s
    return Operation("T x T matrix", keeps, keeps + backward + 2 * out, 3 * out, forward=forward)


def block(c: GPTConfig, step: Step) -> list[Operation]:
    """Return the operations of a block, in the order of model.py's forward pass."""
    s = step.s
    x = c.n_embd * s  # bytes per token of what a linear layer reads
    h = c.d_ff * s  # bytes per token of a tensor inside the MLP
    up_weight = c.n_embd * c.d_ff
    q = c.n_head * c.head_dim
    qkv = (c.n_head + 2 * c.n_kv_head) * c.head_dim

    # The gradient that arrives at proj and at down is that of the residual stream itself, or a new
    # tensor: masked by dropout, or cast to 16 bits.
    cast = x if step.stream != s else 0
    branch = x if c.dropout else cast
    dropout = []
    if c.dropout:
        mask = c.n_embd * (s if step.eager_cpu else 1)
        dropout = [Operation("dropout", mask, mask + x + cast, branch)]

    attend = [heads(c, step)]
    proj = Operation("attention", q * s, branch + 2 * q * s, q * s, q * c.n_embd)
    if step.matrix(c):
        attend.append(scores(c, step))
    else:
        # The kernel keeps its output, which proj keeps too, and the log-sum-exp. On CUDA it sums up
        # the gradient of q in fp32.
        kernel = attend[0]
        more = q * s + 4 * c.n_head
        backward = kernel.backward + more + (4 * q if step.device == "cuda" else 0)
        attend = [replace(kernel, keeps=kernel.keeps + more, backward=backward)]
        proj = replace(proj, keeps=0)

    second_norm = norm(c, step, 2 * x if c.gated else x)
    if step.compiled and not step.compiled_whole:
        # Under fp16 the sum that it reads is not kept, but the result of proj, in 16 bits: that is
        # added to the block's input a second time.
        less = c.n_embd * (step.stream - s)
        second_norm = replace(second_norm, keeps=second_norm.keeps - less)
    if c.gated:
        gate = Operation("MLP", x, 3 * x + h, 2 * x, up_weight)
        silu = Operation("MLP", h, x + 3 * h, x + h)
        up = Operation("MLP", 0, x + 2 * h, x + h, up_weight)
        product = Operation("MLP", 2 * h, 5 * h, 2 * h)
        inside = [second_norm, gate, silu, up, product]
        # Under DDP torch compiles what belongs to one bucket of gradients, of 25 MiB, by itself. If
        # each of these matrices fills a bucket, silu's result goes from one piece to the next.
        cut = step.compiled_whole and step.world > 1 and 4 * up_weight > 25 * 2**20
        if step.compiled and not cut:
            # silu is computed a second time, and gradients are written over what was kept.
            inside = [second_norm, gate, up, replace(product, backward=4 * h)]
    else:
        gelu = Operation("MLP", h, (2 if step.compiled else 3) * h, h)
        inside = [second_norm, Operation("MLP", x, 2 * x + h, x, up_weight), gelu]
    return [
        norm(c, step, x),
        Operation("attention", x, x + qkv * s + max(qkv * s, x), x, c.n_embd * qkv),
        *attend,
        proj,
        *dropout,
        *inside,
        Operation("MLP", h, branch + 2 * h, h, up_weight),
        *dropout,
    ]


def kept(c: GPTConfig, step: Step, blocks: int, more: list[Operation]) -> dict[str, float]:
    """Return by part what is kept, in bytes per token.

    blocks: how many whole blocks. more: the operations of a block that is not complete.
    """
    parts: dict[str, float] = {}
    # FlexAttention keeps no mask of T x T. fp16 is mostly for GPUs that do not have it.
    flex = step.compiled and step.dtype != torch.float16 and c.head_dim >= 16 and not c.dropout
    if step.documents and step.device == "cuda" and not flex:
        parts["document mask"] = step.T * step.s
    if step.recompute:
        parts["block inputs"] = blocks * c.n_embd * step.stream
        blocks = 0
    for operations, times in ((block(c, step), blocks), (more, 1)):
        for o in operations:
            parts[o.part] = parts.get(o.part, 0) + times * o.keeps
    return parts


def ends(c: GPTConfig, step: Step) -> tuple[float, float, float]:
    """Return what is kept beside the blocks, in bytes per token.

    These are three numbers: ids, targets and the mask of dropout; norm_f; the input of the head.
    """
    ids = 16  # ids and targets are int64
    if c.dropout:
        ids += c.n_embd * (step.stream if step.eager_cpu else 1)
    return ids, norm(c, step, 0).keeps, c.n_embd * step.s


def activations(c: GPTConfig, step: Step) -> dict[str, float]:
    """Return by part the bytes that autograd keeps of one sequence until the backward pass.

    The logits are not among them.
    """
    parts = kept(c, step, c.n_layer, []) | {"embedding and head": sum(ends(c, step))}
    return {part: step.T * x for part, x in parts.items()}


# --------------------------------------------------------------------------------------------------
# A step


def optimizer_bytes(model: GPT, optimizer: str) -> int:
    """Return the bytes of the optimizer's state.

    AdamW has two fp32 moments per weight. Muon has one for the matrices of the blocks, and is AdamW
    for the rest. Adafactor has a row and a column for each matrix.
    """
    blocks = {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    total = 0
    for p in model.parameters():
        if optimizer == "adafactor":
            total += 4 * (p.size(0) + p.size(1) if p.dim() == 2 else p.numel())
        elif optimizer == "muon" and id(p) in blocks:
            total += 4 * p.numel()
        else:
            total += 8 * p.numel()
    return total


def optimizer_copies(model: GPT, step: Step) -> float:
    """Return the bytes that the optimizer takes beside its state, for a moment."""
    if step.optimizer == "adamw":
        return 0
    if step.optimizer == "adafactor":  # the update of one parameter at a time
        return 4 * max(p.numel() for p in model.parameters())
    # Muon: the copies of one stack of matrices. These are X, two squares and their product with X;
    # or in the end that product in bf16 and in fp32.
    # If the weights are shared out, a rank computes with its share of the matrices.
    ranks = step.world if step.zero else 1
    matrices = next(g for g in model.param_groups(0.0) if g["name"] == "matrices")
    in_all: Counter[tuple[int, int]] = Counter()  # shape -> numbers in all matrices of this shape
    for weight, rows in zip(matrices["params"], matrices["rows"], strict=True):
        for n in rows:
            in_all[n, weight.size(1)] += n * weight.size(1)
    largest = 0.0
    for (rows, columns), numbers in in_all.items():
        one = rows * columns
        own = math.ceil(numbers / one / ranks) * one
        stack = min(own, max(STACK // one, 1) * one)
        each = 8 + 8 * min(rows, columns) / max(rows, columns)
        if step.dtype == torch.bfloat16:
            each = max(each / 2, 6)
        largest = max(largest, stack * each)
    return largest


Moment = tuple[str, dict[str, float]]  # when it is, and part -> bytes


# Bytes that cuBLAS works in: torch gives it 8 MiB in the forward pass and 8 in the backward pass,
# which runs in another thread. (On a GPU of capability 9.0, 32 MiB each; that is not counted.)
CUBLAS = 2 * 8320 * 1024


def always_held(model: GPT, step: Step) -> dict[str, float]:
    """Return by part the bytes that are held during the whole step."""
    numbers = sum(p.numel() for p in model.parameters())
    rope = sum(b.nbytes for b in model.buffers())
    ranks = step.world if step.zero else 1
    state = optimizer_bytes(model, step.optimizer) / ranks
    held = {"weights": 4 * numbers / ranks + rope, "optimizer": state}
    if step.device == "cuda":
        held["cuBLAS"] = CUBLAS
    if step.average:
        held["average"] = 4 * numbers
    if step.world > 1 and step.zero == 0:
        # DDP puts gradients into its buckets in the last micro-step of a step. Those of the earlier
        # micro-steps were added up beside the buckets. In the second step DDP lays the buckets out
        # anew, in the order in which gradients came. On a CPU, gloo still holds the old ones. On a
        # GPU, NCCL lets go of them within a tenth of a second after the first step.
        held["DDP's buckets"] = (2 if step.device == "cpu" else 1) * 4 * numbers
    return held


def gathered(model: GPT, step: Step, block: int | None, averaging: bool) -> dict[str, float]:
    """Return by part the bytes of whole weights, and of the buffers of FSDP2, at a moment.

    block: the block that works backward, from 0; None: none of them, but what is around them.
    averaging: it has done so, and its gradients are averaged.

    The weights of a block come in one buffer, and are copied into their places. In a forward pass
    the buffer stays until the next block has come. In a backward pass the block before is on its
    way, unless it is there already. Gradients go the other way: they are copied into a buffer,
    which stays until those of the next block are ready.
    """
    if not step.zero:
        return {}
    layers = model.config.n_layer
    one = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    rest = 4 * sum(p.numel() for p in model.parameters()) - layers * one
    buffers = 0
    if block is None and averaging:  # the whole weights have gone before, if they need not stay
        stay = step.zero == 2 and step.accum > 1
        return {"whole weights": rest + layers * one if stay else 0}
    if block is None:
        here = 0 if step.zero == 3 else layers
        buffers += 1
    else:
        stays = 0 if averaging else 1
        here = stays if step.zero == 3 else block + stays
        if step.zero < 3 and step.accum > 1:
            here = layers
        if step.zero == 3 and block > 0:
            buffers += 1
        if averaging:
            buffers += 1 + 1 / step.world
        elif block < layers - 1 and (step.zero >= 2 or step.accum == 1):
            buffers += 1
    return {"whole weights": rest + here * one, "FSDP's buffers": buffers * one}


def moments(model: GPT, step: Step) -> Iterator[Moment]:
    """Yield, in order, the moments of a step that may hold the most."""
    c = model.config
    N = step.B * step.T
    P = sum(p.numel() for p in model.parameters())
    head = c.padded_vocab_size * c.n_embd
    in_block = sum(o.weight for o in block(c, step))
    half = step.s == 2
    always = always_held(model, step)
    sharing = step.world if step.zero >= 2 else 1  # how many GPUs divide the gradients among them
    earlier = 4 * P / sharing if step.accum > 1 else 0  # gradients of the micro-steps before
    # Whether new gradients take memory of their own. If not, each is added at once to those of
    # earlier micro-steps, or goes into DDP's buckets.
    ddp = step.world > 1 and step.zero == 0
    stay = not ddp and (step.compiled_whole or step.accum == 1)
    # Counting the parameters for each moment would take most of plan.py's time.
    whole_weights = cache(lambda block, averaging: gathered(model, step, block, averaging))

    def moment(
        when, tokens, copies, new=0.0, logits=0.0, temporary=0.0, block=None, averaging=False
    ) -> Moment:
        """Return one moment.

        tokens: by part, the activations that are kept, in bytes per token. copies: how many weights
        have a copy in 16 bits. new, logits, temporary: bytes; `new` are gradients. block and
        averaging: see gathered().
        """
        parts = always | {f"activations: {part}": N * x for part, x in tokens.items()}
        parts["16-bit weights"] = 2 * copies if half else 0
        parts["gradients"] = earlier + new
        parts |= whole_weights(block, averaging)
        return when, parts | {"logits": logits, "temporary": temporary}

    # The head's gradient comes late if Inductor computes it in one addmm with the sum, at the end.
    # What it is computed from waits until then: the head's input and the gradient of the logits.
    late = step.compiled_whole and c.tie_embeddings and not half
    ids, _, head_input = ends(c, step)
    outside = {"embedding and head": ids + head_input if late else ids}
    waits = N * c.padded_vocab_size * step.s if late else 0
    # The bytes of gradients after the backward pass of the head.
    made = 4 * head if not late and (stay or c.tie_embeddings or step.zero >= 2) else 0

    yield from loss_and_head(c, step, outside, made, late, moment)
    # Every size is linear in the number of the block: the last and the first one are enough, and
    # those next to them, since FSDP has buffers for the neighbours of a block.
    some = {c.n_layer - 1, max(c.n_layer - 2, 0), min(1, c.n_layer - 1), 0}
    for number in sorted(some, reverse=True):
        new = made
        if stay:  # of the blocks before; if the ranks share them out, they are averaged already
            new += 4 * in_block * (c.n_layer - 1 - number) / (step.world if step.zero else 1)
        yield from backward_of_block(c, step, number, outside, new, stay, waits, moment)

    # At the end come the gradient of the embedding, that of the head if it was late, and their sum.
    tied = {(False, False): 12, (False, True): 8, (True, False): 8, (True, True): 10}
    numbers = (
        tied[step.compiled_whole, half] if c.tie_embeddings else 4
    )  # bytes per number of the matrix
    blocks = 4 * sum(p.numel() for p in model.blocks.parameters())
    new = made if step.zero else 0
    if stay:
        new = blocks / (step.world if step.zero else 1) + 4 * P - blocks
    counted = 4 * head if stay else new  # of these bytes, what `new` counts already
    more = numbers * head - counted + 4 * c.n_embd * N
    yield moment("at the end of the backward pass", {}, 0, new, waits, more)
    if step.zero:
        rest = 4 * P - blocks
        more = rest + rest / step.world + (0 if stay else rest - made)
        when = "while the last gradients are averaged"
        yield moment(when, {}, 0, new, 0, more, averaging=True)


def loss_and_head(
    c: GPTConfig,
    step: Step,
    outside: dict[str, float],
    made: float,
    late: bool,
    moment: Callable[..., Moment],
) -> Iterator[Moment]:
    """Yield the moments from the loss to the backward pass of norm_f.

    The arguments are those variables of moments(), which calls this.
    """
    N = step.B * step.T
    V = c.padded_vocab_size
    head = V * c.n_embd
    logits = N * V * step.s
    ids, norm_f, head_input = ends(c, step)
    blocks = kept(c, step, c.n_layer, [])
    in_blocks = 0 if step.recompute else c.n_layer * sum(o.weight for o in block(c, step))
    copies = in_blocks + head

    tokens = blocks | {"embedding and head": ids + norm_f + head_input}
    yield moment("before the backward pass", tokens, copies, 0, logits, loss_bytes(c, step))
    if not late:
        # The gradient of the logits is written over the logits.
        when = "in the head's backward pass"
        gradient = N * head_input
        yield moment(when, tokens, copies, 0, logits, gradient + step.s * head)
        tokens = blocks | {"embedding and head": ids + norm_f}
        if step.stream != step.s:
            gradient += 4 * c.n_embd * N
        cast = (6 if step.s == 2 else 4) * head
        yield moment(when, tokens, copies - head, 0, 0, gradient + cast)
    when = "in the last norm's backward pass"
    most = N * norm(c, step, head_input).backward
    yield moment(when, blocks | outside, copies - head, made, logits if late else 0, most)


def loss_bytes(c: GPTConfig, step: Step) -> float:
    """Return the bytes that the loss takes beside the logits."""
    if step.compiled:
        return 0
    N = step.B * step.T
    V = c.padded_vocab_size
    if step.dtype == torch.float16:
        # Plain cross_entropy: three fp32 tensors without the padding, and nothing else. moments()
        # adds the logits, so they are subtracted here.
        return 12 * N * c.vocab_size - N * V * step.s
    rows = max(1, loss_chunk(step.device) // V)  # ChunkedCrossEntropy takes so many at a time
    return min(N, rows) * V * (8 if step.s == 2 else 4)


def backward_of_block(
    c: GPTConfig,
    step: Step,
    number: int,
    outside: dict[str, float],
    new: float,
    stay: bool,
    waits: float,
    moment: Callable[..., Moment],
) -> Iterator[Moment]:
    """Yield the moments of a block's backward pass, and of the last block's forward pass.

    number: that of the block, from 0. The other arguments are those variables of moments().
    """
    operations = block(c, step)
    N = step.B * step.T
    stream = N * c.n_embd * step.stream
    last = number == c.n_layer - 1
    before_block = new
    own = stay or step.zero >= 2 or step.compiled  # a block's gradients are new tensors
    which = "last" if number >= c.n_layer - 2 and number else "first"
    when = f"in the {which} block's backward pass"
    before = 0 if step.recompute else number * sum(o.weight for o in operations)
    for i in reversed(range(len(operations))):
        o = operations[i]
        tokens = kept(c, step, number, operations[:i]) | outside
        copies = before + sum(earlier.weight for earlier in operations[:i])
        if o.forward and (last or step.recompute):
            at = "in the last block's forward pass"
            grads = 0
            if step.recompute:  # the forward pass that runs a second time
                at = f"in the {which} block's second forward pass"
                grads = before_block
            yield moment(at, tokens, copies, grads, 0, stream + N * o.forward, number)
        most = stream + N * o.backward + step.s * o.weight
        yield moment(when, tokens, copies + o.weight, new, waits, most, number)
        if step.s == 2:  # the gradient of its matrix, in 16 bits and in fp32
            most = stream + N * o.leaves + 6 * o.weight
            yield moment(when, tokens, copies, new, waits, most, number)
        if own:
            new += 4 * o.weight
    if step.zero >= 2 or (step.zero and stay):
        tokens = kept(c, step, number, []) | outside
        when = "while a block's gradients are averaged"
        yield moment(when, tokens, before, new, waits, stream, number, averaging=True)


def inductors(found: list[Moment], c: GPTConfig, step: Step) -> list[Moment]:
    """Return the moments of a compiled 16-bit step in the order that Inductor may choose for it.

    found: the moments in the usual order. If a step has few tokens, the gradient of a matrix is
    larger than the two factors that it is computed from. Inductor tries orders that compute such
    products late and cast their results last. It takes one of these if it holds less, by Inductor's
    own count.
    """
    first = found[0]
    when, end = found[-1]
    head = c.padded_vocab_size * c.n_embd
    waiting = [o.weight for o in block(c, step)] * c.n_layer
    if c.tie_embeddings:
        # The sum of the two gradients of wte is computed before the casts that are larger.
        waiting = [weight for weight in waiting if weight > head]
        more = 2 * max(waiting) if waiting else 6 * head
    else:
        waiting.append(head)
        more = 2 * max(waiting)
    better = [first, (when, end | {"temporary": more})]
    if max(map(total, better)) >= max(map(total, found)):
        return found
    if step.device == "cpu":
        # One kernel makes all casts, and holds all their sources and results at once.
        return [first, (when, end | {"temporary": end["temporary"] + 2 * sum(waiting)})]
    return better


def total(moment: Moment) -> float:
    """Return the bytes of a moment, over all parts."""
    return sum(moment[1].values())


def step_memory(model: GPT, step: Step) -> Moment:
    """Return the moment of a step that holds the most, with its parts that are not 0.

    model: may be on the meta device.
    """
    c = model.config
    found = list(moments(model, step))
    if step.compiled_whole and step.s == 2 and step.B * step.T < c.n_embd:
        found = inductors(found, c, step)
    P = sum(p.numel() for p in model.parameters())
    # Under DDP the gradients are its buckets, which always_held() counts.
    ddp = step.world > 1 and step.zero == 0
    gradients = {"gradients": 0 if ddp else 4 * P / (step.world if step.zero else 1)}
    copies = gradients | {"temporary": optimizer_copies(model, step)}
    found.append(("in the optimizer's step", always_held(model, step) | copies))
    when, parts = max(found, key=total)
    return when, {part: x for part, x in parts.items() if x}


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
    peak = total(step_memory(model, step))
    return peak + sum(beside(peak, step).values())


def auto_batch(model: GPT, step: Step, capacity: float) -> int:
    """Return the largest batch_size that fits into `capacity` bytes.

    On a CPU it is at most 8,192 tokens, since a larger one is no faster (bench/LOG.md).
    """
    fits = largest_batch(model, step, capacity)
    return min(fits, max(1, 8192 // step.T)) if step.device == "cpu" else fits


def largest_batch(model: GPT, step: Step, capacity: float) -> int:
    """Return how many sequences of a micro-step fit into `capacity` bytes; 0 if not even one."""
    fits = 0
    fails = 1
    while needed(model, replace(step, B=fails)) <= capacity:
        fits = fails
        fails = 2 * fails
    while fails - fits > 1:
        B = (fits + fails) // 2
        if needed(model, replace(step, B=B)) <= capacity:
            fits = B
        else:
            fails = B
    return fits
