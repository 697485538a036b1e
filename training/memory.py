"""What a training step of ours holds in memory, part by part, from the settings alone.

The formulas follow a step. Its forward pass keeps what autograd needs to go back; the backward pass
frees that again, operation by operation, and has gradients beside it. `block` lists the operations
of a block, with what each keeps and what its backward pass needs; `moments` adds up what is alive at
each of them, and the largest sum is the peak. tests/test_memory.py compares it with what torch
allocates, over random shapes.

Here N = B T tokens, s bytes a number (2 in 16 bits, 4 in fp32), C = n_embd, nh and nkv heads of hs,
V the padded vocabulary, and a block keeps, a token,

    norms       2 C s      the inputs of both: the residual stream (which is in fp32 under fp16)
    attention   C s        the input of qkv
                3 nh hs s  q, k, v, after rotation and after the key/value heads were repeated
                nh hs s    the output, which is the input of proj; and 4 nh for the log-sum-exp
    MLP         C s        its input
                2 d_ff s   GELU: in and out. SwiGLU: 3 d_ff s compiled (gate, up, product), in eager
                           mode 4 d_ff s (silu(gate) too)

    GPT-2's 16 C numbers a token and layer: 2 + 1 + 3 + 1 + 1 + 8. No T x T matrix where
    scaled_dot_product_attention makes it in pieces.

These are the elements of Korthikanti et al., arXiv 2205.05198, section 4.1, without its dropout
masks and its T x T scores, and counted for the kernels that run here.

In 16 bits, a matrix's gradient is made in 16 bits and then cast: for a moment a number of it takes
6 bytes. A matrix that wte and the head share has two gradients. The head's is there first and waits
until the embedding's, V x C in fp32 as well, comes as the last of all. Autograd adds the second onto
the first; but in fp32 the first is a view of a product's result, and the sum is a third tensor.

torch.compile fuses what lies between the products, which then needs no temporaries, and it changes
four things beside that. All gradients of a micro-step are alive at its end, before they are added to
those of earlier ones. The sum of a shared matrix's two gradients is a third tensor in 16 bits; in
fp32 Inductor makes one addmm of the head's product and the sum, at the end, for which the gradient
of the logits waits. Of dropout it keeps a mask of bytes. And of few tokens, see `inductors`.

Not counted is the scratch that kernels take for themselves, by a machine's caches and threads: on a
CPU mostly less than 2 MB a thread (oneDNN's copies of a product's operands, the tiles of attention).
So the 5 % hold for peaks above 50 MB. And they hold for n_embd above 64: where a 16-bit product has
fewer columns, oneDNN may split a long sum among the threads, each with a result of its own in fp32
(the head's gradient then takes 4 V C bytes a thread more: 5 to 7 % of a step of 2,048 tokens at
V = 50,257, with two threads; with one thread nothing).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hardware.kernels import attention_kernel, loss_chunk
from hardware.machine import CONTEXT
from model import GPT, GPTConfig


@dataclass(frozen=True)
class Step:
    """What decides the memory of a step, beside the model."""

    B: int  # sequences in a micro-step
    T: int
    accum: int = 1  # micro-steps
    dtype: torch.dtype = torch.bfloat16  # of autocast
    compiled: bool = True
    device: str = "cuda"
    world: int = 1  # processes
    # 0: DDP, all of everything on each GPU; ZeRO stage 1: moments are shared out, 2: gradients too,
    # 3: weights too
    zero: int = 0
    optimizer: str = "adamw"
    # attention in pieces; False: with the T x T matrix, which a GPU makes when no fused kernel takes
    # the shape
    fused: bool = True
    checkpointing: bool = False  # keep a block's input alone, and compute the rest again backward

    @property
    def s(self) -> int:
        return self.dtype.itemsize

    @property
    def stream(self) -> int:
        """Bytes of a number of the residual stream: model.py leaves it in fp32 under fp16."""
        return 2 if self.dtype == torch.bfloat16 else 4

    @property
    def eager_cpu(self) -> bool:
        """Small operations make up there for what is one kernel on a GPU."""
        return self.device == "cpu" and not self.compiled

    def matrix(self, c: GPTConfig) -> int:
        """Bytes of a number of the T x T matrix: 0 where attention makes it in pieces, 4 where
        torch's math kernel makes it, 2 where model.py does.
        """
        if self.device != "cpu" or not self.fused:
            return 0 if self.fused else 4
        cpu = torch.device("cpu")
        kernel = attention_kernel(c.n_head, self.T, c.head_dim, cpu, self.dtype, c.dropout)
        return {"plain": self.s, "math": 4}.get(kernel, 0)


# ---------------------------------------------------------------------------------------------------------------------
# A block


@dataclass(frozen=True)
class Operation:
    """One operation of a block: bytes a token, and how many numbers its weight matrix has.

    `backward` and `forward` are the most that is alive in that pass, beside the residual stream and
    what earlier operations keep: what it keeps itself and the gradients that come and go are in it.
    """

    part: str
    keeps: float  # from the forward to the backward pass
    backward: float
    leaves: float = 0  # gradients that wait when its backward pass is over
    weight: int = 0
    forward: float = 0  # 0 where it is no peak


def norm(c: GPTConfig, step: Step, comes: float, last: bool = False) -> Operation:
    """comes: gradients that arrive. last: none of the residual stream waits beside them."""
    C = c.n_embd
    stream = C * step.stream
    if c.norm == "rmsnorm" and step.eager_cpu:
        # In fp32 it keeps its input and the normalised input. Backward, six tensors are alive where
        # the gradient of the square is made, and that of the stream is one of them if it is fp32.
        shared = step.stream == 4 and not last
        return Operation("norms", 8 * C + 4, 4 * C * (5 if shared else 6))
    if c.norm == "layernorm" and not step.compiled and step.device != "cpu":
        # Autocast on a GPU makes it fp32: the input and both gradients are cast.
        casts = 8 * C if step.stream == 2 else 0
        return Operation("norms", 4 * C + 8, 4 * C + 8 + comes + stream + casts)
    made = 0 if step.compiled else stream  # else written over what comes
    return Operation("norms", stream + 8, stream + 8 + comes + made)


def heads(c: GPTConfig, step: Step) -> Operation:
    """q, k and v, from what qkv wrote to what attention reads."""
    s = step.s
    q = c.n_head * c.head_dim  # numbers a token
    kv = c.n_kv_head * c.head_dim
    qkv = (q + 2 * kv) * s
    turned = c.pos == "rope" or c.qk_norm
    repeated = kv < q

    # How many of the three are tensors of their own, and not views into what qkv wrote.
    own = turned + (turned or repeated) + repeated
    size = s
    single = step.B == 1 or c.n_head == 1
    matrix = step.matrix(c)
    if matrix == 4 or (matrix and not single):
        # Products over all heads want the numbers of each together; torch's math kernel wants fp32.
        cast = matrix > s and not step.compiled
        own = 2 + (repeated or not single or cast)
        size = s if step.compiled else matrix
    views = own < 3

    normalised = 0.0
    if c.qk_norm:  # keeps what norm() does; its input is such a view, or a copy in fp32
        normalised = 4 * (c.n_head + c.n_kv_head)
        if step.eager_cpu:
            normalised += (q + kv) * (4 if s == 4 else 8)
        views = views or s == 4 or not step.eager_cpu
    keeps = own * q * size + views * qkv + normalised

    forward = 0.0
    if c.pos == "rope" and not step.compiled:
        # x cos and the product of sin with the turned x are fp32, for which a CPU copies the latter
        # to fp32 too. Then comes k's rotation, beside the rotated q.
        turning = 8 + s + (4 if step.eager_cpu and s == 2 else 0)
        forward = qkv + normalised + max(turning * q, turning * kv + 4 * q)
        forward += c.qk_norm * (q + kv) * s
    return Operation("attention", keeps, keeps + 4 * q * s, qkv, forward=forward)


def scores(c: GPTConfig, step: Step) -> Operation:
    """The T x T matrix, where there is one: softmax's result, and with dropout what that keeps."""
    s = step.s
    q = c.n_head * c.head_dim
    row = c.n_head * step.T  # numbers a token
    matrix = row * step.matrix(c)
    cast = step.matrix(c) > s
    drops = c.dropout > 0
    if step.compiled:  # a mask of bytes; and the result, unless its cast is kept in the product
        keeps = matrix + drops * row * (1 if cast else 1 + s)
        backward = row * s * (2 if cast else 1)
        # The last block keeps softmax's result in place of the scores, a tensor more for a moment.
        forward = row * (4 if c.n_layer == 1 else 8) + 8 * q
        forward = keeps + forward if cast else 0
    else:  # the mask and the result
        keeps = matrix + drops * (matrix + (matrix if step.eager_cpu else row))
        backward = matrix * (1 if drops else 2)
        # Of torch's math kernel: in fp32 q, k, v, and the output; the mask; what was, or is, cast.
        temporary = q * (18 if cast else 4) + 4 * step.T / step.B
        temporary += cast * (3 * q * s + (row * s if drops else 0))
        temporary += 0 if drops else matrix
        forward = keeps + temporary if step.matrix(c) == 4 else 0
    out = q * s
    return Operation("T x T matrix", keeps, keeps + backward + 2 * out, 3 * out, forward=forward)


def block(c: GPTConfig, step: Step) -> list[Operation]:
    """A block's operations in the order of model.py's forward pass."""
    s = step.s
    x = c.n_embd * s  # bytes of what a linear layer reads
    h = c.d_ff * s  # and of what is inside the MLP
    up_weight = c.n_embd * c.d_ff
    q = c.n_head * c.head_dim
    qkv = (c.n_head + 2 * c.n_kv_head) * c.head_dim

    # What comes to proj and down is the stream's gradient itself, or a masked one, or one in 16 bits.
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
    else:  # it keeps its output, as proj does, and the log-sum-exp; CUDA sums q's gradient in fp32
        kernel = attend[0]
        more = q * s + 4 * c.n_head
        backward = kernel.backward + more + (4 * q if step.device == "cuda" else 0)
        attend = [replace(kernel, keeps=kernel.keeps + more, backward=backward)]
        proj = replace(proj, keeps=0)

    if c.mlp == "swiglu":
        gate = Operation("MLP", x, 3 * x + h, 2 * x, up_weight)
        silu = Operation("MLP", h, x + 3 * h, x + h)
        up = Operation("MLP", 0, x + 2 * h, x + h, up_weight)
        product = Operation("MLP", 2 * h, 5 * h, 2 * h)
        inside = [norm(c, step, 2 * x), gate, silu, up, product]
        if step.compiled:  # silu is computed again, and gradients are written over what was kept
            inside = [norm(c, step, 2 * x), gate, up, replace(product, backward=4 * h)]
    else:
        gelu = Operation("MLP", h, (2 if step.compiled else 3) * h, h)
        inside = [norm(c, step, x), Operation("MLP", x, 2 * x + h, x, up_weight), gelu]
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
    """Bytes a token of that many whole blocks, and of operations of one more, by part."""
    parts: dict[str, float] = {}
    if step.checkpointing:
        parts["block inputs"] = blocks * c.n_embd * step.stream
        blocks = 0
    for operations, times in ((block(c, step), blocks), (more, 1)):
        for o in operations:
            parts[o.part] = parts.get(o.part, 0) + times * o.keeps
    return parts


def ends(c: GPTConfig, step: Step) -> tuple[float, float, float]:
    """Bytes a token beside the blocks: ids, targets and a mask; norm_f; the head's input."""
    mask = c.n_embd * (step.stream if step.eager_cpu else 1)
    return 16 + (mask if c.dropout else 0), norm(c, step, 0).keeps, c.n_embd * step.s


def activations(c: GPTConfig, step: Step) -> dict[str, float]:
    """Bytes that autograd keeps of one sequence until the backward pass, by part; not the logits."""
    parts = kept(c, step, c.n_layer, []) | {"embedding and head": sum(ends(c, step))}
    return {part: step.T * x for part, x in parts.items()}


# ---------------------------------------------------------------------------------------------------------------------
# A step


def optimizer_bytes(model: GPT, optimizer: str) -> int:
    """Of its state. AdamW: two fp32 moments. Muon: one for the blocks' matrices, AdamW for the rest.
    Adafactor: a row and a column.
    """
    blocks = {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    total = 0
    for p in model.parameters():
        if optimizer == "adafactor":
            total += 4 * (p.size(0) + p.size(1) if p.dim() == 2 else p.numel())
        else:
            total += (4 if optimizer == "muon" and id(p) in blocks else 8) * p.numel()
    return total


Moment = tuple[str, dict[str, float]]  # when, part -> bytes


def moments(model: GPT, step: Step) -> Iterator[Moment]:
    """Those moments of a step that may hold the most, in their order."""
    c = model.config
    C = c.n_embd
    V = c.padded_vocab_size
    N = step.B * step.T
    P = sum(p.numel() for p in model.parameters())
    head = V * C
    operations = block(c, step)
    in_block = sum(o.weight for o in operations)
    half = step.s == 2
    shard = {stage: step.world if step.zero >= stage else 1 for stage in (1, 2, 3)}

    rope = sum(b.nbytes for b in model.buffers())
    moments = optimizer_bytes(model, step.optimizer) / shard[1]
    always = {"weights": 4 * P / shard[3] + rope, "optimizer": moments}
    earlier = 4 * P / shard[2] if step.accum > 1 else 0  # gradients of the micro-steps before
    ddp = step.world > 1 and step.zero == 0
    if ddp:
        # Gradients go there in a step's last micro-step; those of the micro-steps before were
        # added up beside them. Twice: in its second step DDP lays its buckets out anew, in the
        # order in which gradients came, and holds the old ones too.
        always["DDP's buckets"] = 2 * 4 * P
    stay = not ddp and (step.compiled or step.accum == 1)  # else new gradients are added to these

    def moment(when, tokens, copies, new=0.0, logits=0.0, temporary=0.0) -> Moment:
        """tokens: kept, in bytes a token. copies: of so many weights. new: bytes of gradients."""
        parts = always | {f"activations: {part}": N * x for part, x in tokens.items()}
        parts |= {"16-bit weights": 2 * copies * half, "gradients": earlier + new / shard[2]}
        return when, parts | {"logits": logits, "temporary": temporary}

    # -- the loss --
    ids, norm_f, head_input = ends(c, step)
    outside = "embedding and head"
    blocks = kept(c, step, c.n_layer, [])
    copies = c.n_layer * in_block + head
    logits = N * V * step.s
    if step.compiled:
        loss = 0
    elif step.dtype == torch.float16:  # plain cross_entropy: three in fp32, without the padding
        loss = 12 * N * c.vocab_size - logits
    else:
        rows = max(1, loss_chunk(step.device) // V)
        loss = min(N, rows) * V * (8 if half else 4)
    tokens = blocks | {outside: ids + norm_f + head_input}
    yield moment("before the backward pass", tokens, copies, 0, logits, loss)

    # -- the head's backward pass; the gradient of the logits is written over them --
    if step.compiled and c.tie_embeddings and not half:  # an addmm at the end, for which both wait
        ids += head_input
        waits = logits
        made = 0
    else:
        waits = 0
        made = 4 * head * (stay or c.tie_embeddings)
        when = "in the head's backward pass"
        gradient = N * head_input
        yield moment(when, tokens, copies, 0, logits, gradient + step.s * head)
        tokens = blocks | {outside: ids + norm_f}
        gradient += 4 * C * N * (step.stream != step.s)
        yield moment(when, tokens, copies - head, 0, 0, gradient + (6 if half else 4) * head)
    when = "in the last norm's backward pass"
    most = N * norm(c, step, head_input, last=True).backward
    yield moment(when, blocks | {outside: ids}, copies - head, made, waits, most)

    # -- the blocks'. All is linear in a block's number: the last and the first are enough --
    stream = N * C * step.stream
    for number in sorted({c.n_layer - 1, 0}, reverse=True):
        which = "last" if number == c.n_layer - 1 else "first"
        when = f"in the {which} block's backward pass"
        new = made + 4 * in_block * (c.n_layer - 1 - number) * stay
        for i in reversed(range(len(operations))):
            o = operations[i]
            tokens = kept(c, step, number, operations[:i]) | {outside: ids}
            copies = sum(before.weight for before in operations[:i])
            copies += in_block * number * (not step.checkpointing)
            if o.forward and which == "last":
                at = "in the last block's forward pass"
                yield moment(at, tokens, copies, 0, 0, stream + N * o.forward)
            most = stream + N * o.backward + step.s * o.weight
            yield moment(when, tokens, copies + o.weight, new, waits, most)
            if half:  # the gradient of its matrix in 16 bits and in fp32
                most = stream + N * o.leaves + 6 * o.weight
                yield moment(when, tokens, copies, new, waits, most)
            new += 4 * o.weight * stay

    # -- the end: the embedding's gradient, the head's that waited, and their sum --
    when = "at the end of the backward pass"
    tied = {(False, False): 12, (False, True): 8, (True, False): 8, (True, True): 10}
    numbers = tied[step.compiled, half] if c.tie_embeddings else 4
    stays = 4 * head * stay  # of it, what counts as a gradient
    more = numbers * head - stays / shard[2] + 4 * C * N
    yield moment(when, {}, 0, 4 * (P - head) * stay + stays, waits, more)


def inductors(found: list[Moment], c: GPTConfig, step: Step) -> list[Moment]:
    """The moments in the order that Inductor may take in 16 bits, where a step has few tokens.

    The gradient of a matrix is then larger than what it is made of. Inductor tries orders that make
    such products late and cast their results last, and takes one that holds less, by its own count.
    """
    first = found[0]
    when, end = found[-1]
    head = c.padded_vocab_size * c.n_embd
    waiting = [o.weight for o in block(c, step)] * c.n_layer
    if c.tie_embeddings:  # the sum of its gradients is made before casts that are larger
        waiting = [weight for weight in waiting if weight > head]
        more = 2 * max(waiting) if waiting else 6 * head
    else:
        waiting.append(head)
        more = 2 * max(waiting)
    better = [first, (when, end | {"temporary": more})]
    if max(map(total, better)) >= max(map(total, found)):
        return found
    if step.device == "cpu":  # all casts are one kernel, which has their sources and results
        return [first, (when, end | {"temporary": end["temporary"] + 2 * sum(waiting)})]
    return better


def total(moment: Moment) -> float:
    return sum(moment[1].values())


def step_memory(model: GPT, step: Step) -> Moment:
    """(when, part -> bytes) at the moment of a step that holds the most.

    model: may lie on the meta device.
    """
    c = model.config
    found = list(moments(model, step))
    if step.compiled and step.s == 2 and step.B * step.T < c.n_embd:
        found = inductors(found, c, step)
    when, parts = max(found, key=total)
    return when, {part: x for part, x in parts.items() if x}


# What max_memory_allocated does not see, on a GPU: NCCL's buffers, and what the allocator cannot use
# between its blocks (both assumed); and CUDA's context.
NCCL, FRAGMENTED = 0.7e9, 0.04


def beside(total: float, step: Step) -> dict[str, float]:
    """Bytes that a GPU must have beside `total`."""
    if step.device == "cpu":
        return {"Python and torch": 0.3e9}
    return {"CUDA context": CONTEXT, "fragmentation": FRAGMENTED * total} | ({"NCCL": NCCL} if step.world > 1 else {})


def needed(model: GPT, step: Step) -> float:
    """Bytes that the device must have for a step."""
    total = sum(step_memory(model, step)[1].values())
    return total + sum(beside(total, step).values())


def auto_batch(model: GPT, step: Step, capacity: float) -> int:
    """The largest that fits; on a CPU not more than 8,192 tokens, since more is no faster (bench/LOG.md)."""
    fits = largest_batch(model, step, capacity)
    return min(fits, max(1, 8192 // step.T)) if step.device == "cpu" else fits


def largest_batch(model: GPT, step: Step, capacity: float) -> int:
    """The most sequences in a micro-step that `capacity` bytes hold; 0: not even one."""
    fits, fails = 0, 1
    while needed(model, replace(step, B=fails)) <= capacity:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        B = (fits + fails) // 2
        fits, fails = (B, fails) if needed(model, replace(step, B=B)) <= capacity else (fits, B)
    return fits
