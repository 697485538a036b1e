"""What a training step of ours holds in memory, part by part, from the settings alone; and, to check that, what it really holds.

The formulas count what autograd keeps of each layer for the backward pass; tests/test_plan.py compares them with what it does keep.
Here N = B T tokens, s bytes a number (2 in 16 bits, 4 in fp32), C = n_embd, nh and nkv heads of hs, V the padded vocabulary, and a
layer keeps, a token,

    norms       2 C s        the inputs of both: the residual stream (which is in fp32 under fp16)
    attention   C s          the input of qkv
                3 nh hs s    q, k, v, after rotation and after the key/value heads were repeated
                nh hs s      the output, which is the input of proj; and 4 nh for the log-sum-exp of each row
    MLP         C s          its input
                2 d_ff s     GELU: in and out. SwiGLU: 3 d_ff s compiled (gate, up, product), 4 d_ff s in eager mode (silu(gate) too)

    GPT-2's 16 C numbers a token and layer: 2 + 1 + 3 + 1 + 1 + 8. No T x T matrix: scaled_dot_product_attention makes it in pieces.

These are the elements of Korthikanti et al., arXiv 2205.05198, section 4.1, without its dropout masks and its T x T scores, and counted for the
kernels that run here.
"""

import os
import re
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from model import GPT, GPTConfig, attention_kernel, loss_chunk


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
    zero: int = 0  # 0: DDP, all of everything on each GPU; ZeRO stage 1: moments are shared out, 2: gradients too, 3: weights too
    optimizer: str = "adamw"
    # attention in pieces; False: with the T x T matrix, which a GPU makes when no fused kernel takes the shape
    fused: bool = True
    checkpointing: bool = False  # keep only each block's input, and compute the rest again in the backward pass

    @property
    def s(self) -> int:
        return self.dtype.itemsize

    def matrix(self, c: GPTConfig) -> int:
        """Bytes of a number of the T x T matrix: 0 where attention makes it in pieces, 4 where torch's math kernel makes it."""
        if self.device != "cpu" or not self.fused:
            return 0 if self.fused else 4
        kernel = attention_kernel(c.n_head, self.T, c.head_dim, torch.device("cpu"), self.dtype, c.dropout)
        return {"plain": self.s, "math": 4}.get(kernel, 0)

    @property
    def stream(self) -> int:
        """Bytes of a number of the residual stream: model.py leaves it in fp32 under fp16."""
        return 2 if self.dtype == torch.bfloat16 else 4


def activations(c: GPTConfig, step: Step) -> dict[str, float]:
    """Bytes that autograd keeps of one sequence until the backward pass, by part; of all layers, without the logits."""
    C, nh, nkv, hs, T, s = c.n_embd, c.n_head, c.n_kv_head, c.head_dim, step.T, step.s
    eager_cpu, rope = not step.compiled and step.device == "cpu", c.pos == "rope"
    matrix = step.matrix(c)

    norm = C * step.stream  # a token; compiled, and in the CPU's LayerNorm, its input
    if not step.compiled and c.norm == "rmsnorm" and eager_cpu:
        norm = 8 * C  # made of small operations in fp32: the input and the normalised input
    elif not step.compiled and not eager_cpu and c.norm == "layernorm":
        norm = 4 * C  # CUDA's autocast normalises in fp32

    qkv = (nh + 2 * nkv) * hs  # a token of q, k and v as the linear layer writes them
    if matrix:
        heads = 3 * nh * hs * s  # copied, as the plain products want them
    elif nkv < nh:
        heads = 3 * nh * hs * s if rope or c.qk_norm else (qkv + 2 * nh * hs) * s
    else:
        # v, or all three, are views into what qkv wrote
        heads = (2 * nh * hs + qkv) * s if rope or c.qk_norm else qkv * s
    if c.qk_norm:
        heads += (nh + nkv) * hs * (8 if eager_cpu else s)
    attention = C * s + heads + nh * hs * s + (0 if matrix else 4 * nh)

    mlp = C * s + c.d_ff * s * (2 if c.mlp != "swiglu" else 3 if step.compiled else 4)
    parts = {"norms": 2 * norm, "attention": attention, "MLP": mlp}
    if matrix:
        parts["T x T matrix"] = nh * T * matrix
    if c.dropout:
        mask = s if eager_cpu else 1
        parts["dropout"] = 2 * C * mask + nh * T * matrix * 2  # masks, and the T x T matrix behind its own
    layer = {k: T * v for k, v in parts.items()}
    if step.checkpointing:
        kept = {"block inputs": c.n_layer * T * C * step.stream} | {f"{k}, of one block": v for k, v in layer.items()}
    else:
        kept = {k: c.n_layer * v for k, v in layer.items()}
    return kept | {"embedding and head": T * (norm + C * s + 16 + (C * s if c.dropout else 0))}  # 16: ids and targets


def optimizer_bytes(model: GPT, optimizer: str) -> int:
    """Of its state. AdamW: two fp32 moments. Muon: one for the blocks' matrices, AdamW for the rest. Adafactor: a row and a column."""
    blocks = {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    total = 0
    for p in model.parameters():
        if optimizer == "adafactor":
            total += 4 * (p.size(0) + p.size(1) if p.dim() == 2 else p.numel())
        else:
            total += (4 if optimizer == "muon" and id(p) in blocks else 8) * p.numel()
    return total


def step_memory(model: GPT, step: Step) -> tuple[str, dict[str, float]]:
    """(when, part -> bytes) at the moment of a step that holds the most. model: may lie on the meta device.

    Three moments are candidates. Before the loss's backward pass all activations and the logits are alive. In the last block's
    backward pass the logits are gone, and the block's own gradients have come. At its end all gradients are.
    """
    c, s, N = model.config, step.s, step.B * step.T
    P = sum(p.numel() for p in model.parameters())
    head = c.padded_vocab_size * c.n_embd
    copies = s * sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)) if s == 2 else 0
    shard = {stage: step.world if step.zero >= stage else 1 for stage in (1, 2, 3)}

    always = {"weights": 4 * P / shard[3], "optimizer": optimizer_bytes(model, step.optimizer) / shard[1]}
    gradients = 4 * P / shard[2]
    before = {"gradients": gradients if step.accum > 1 else 0}  # of the micro-steps before
    if step.world > 1 and step.zero == 0:
        # Gradients go there in a step's last micro-step; those of the micro-steps before were added up beside them. Twice: in
        # its second step DDP lays its buckets out anew, in the order in which gradients came, and holds the old ones too.
        always["DDP's buckets"] = 2 * 4 * P
        gradients = before["gradients"]
    kept = {f"activations: {k}": step.B * v for k, v in activations(c, step).items()} | {"16-bit weights": copies}

    logits = N * c.padded_vocab_size * s
    chunk = 0 if step.compiled else 8 * min(N * c.padded_vocab_size, loss_chunk(step.device))
    if step.dtype == torch.float16 and not step.compiled:  # plain cross_entropy: two fp32 tensors and the fp16 gradient
        chunk = 10 * N * c.padded_vocab_size
    # The logits' gradient is written over the logits, by ours in eager mode and by Inductor's donated buffers.
    loss = {"logits": logits, "temporary": max(chunk, s * head + N * c.n_embd * s)}

    wide = {"MLP": c.d_ff * s * (2 if c.mlp == "swiglu" else 1)}  # its gradients, less what was already used up
    if step.matrix(c):
        wide["T x T"] = 4 * c.n_head * step.T - c.d_ff * s * 2  # two in 16 bits, or one in fp32
    in_block = before | {"temporary": N * (max(wide.values()) + c.n_embd * s) + 4 * head}  # and the head's gradient

    # At the end: a tied matrix has two gradients, which are added; of an untied head, one in 16 bits and in fp32.
    if c.tie_embeddings:
        last = 4 * head * (2 if step.accum > 1 else 1)
    else:
        last = (4 + s % 4) * head if step.accum > 1 else 0
    at_end = {"gradients": gradients, "temporary": last}
    moments = {
        "before the backward pass": always | before | kept | loss,
        "in the last block's backward pass": always | kept | in_block,
        "at the end of the backward pass": always | at_end,
    }
    when = max(moments, key=lambda m: sum(moments[m].values()))
    return when, {k: v for k, v in moments[when].items() if v}


# What max_memory_allocated does not see, on a GPU: CUDA's context with its libraries (1.3 GB by a published account of a 6B model; not
# measured by us), NCCL's buffers, and what the allocator cannot use between its blocks (both assumed).
CONTEXT, NCCL, FRAGMENTED = 1.3e9, 0.7e9, 0.04


def beside(total: float, step: Step) -> dict[str, float]:
    """Bytes that a GPU must have beside `total`."""
    if step.device == "cpu":
        return {"Python and torch": 0.3e9}
    return {"CUDA context": CONTEXT, "fragmentation": FRAGMENTED * total} | ({"NCCL": NCCL} if step.world > 1 else {})


def needed(model: GPT, step: Step) -> float:
    """Bytes that the device must have for a step."""
    total = sum(step_memory(model, step)[1].values())
    return total + sum(beside(total, step).values())


def measured_peak(c: GPTConfig, step: Step) -> int:
    """Bytes that a step like train.py's really holds at most, on this machine's CUDA device or CPU, by torch's own account.

    On a CPU, that is the sum of all allocations and releases that its profiler sees.
    """
    device = torch.device(step.device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    model = GPT(c)
    model.init_weights()
    model.to(device)
    fast = torch.compile(model, dynamic=False) if step.compiled else model
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-3, fused=True)
    rows = torch.randint(0, c.vocab_size, (step.B, step.T + 1), device=device)
    x, y = rows[:, :-1], rows[:, 1:]

    def one() -> None:
        for _ in range(step.accum):
            with torch.autocast(device.type, step.dtype, enabled=step.dtype != torch.float32):
                loss = fast(x, y) / step.accum
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    one()  # the moments are allocated now, and what compiles has compiled
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        one()
        return torch.cuda.max_memory_allocated() - before
    moments = [t for state in optimizer.state.values() for t in state.values()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        one()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return sum(t.nbytes for t in [*model.parameters(), *moments]) + max(held)


def ram() -> float:
    """Bytes of memory that this computer has to give; in a container, what that may have."""
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.exists() else None
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return min(int(found[1]) * 1024 if found else everything, everything if allowed == "max" else int(allowed))


def capacity(device: torch.device) -> float:
    """Bytes that this process can have, CUDA's context among them."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(total, free + torch.cuda.memory_reserved(device) + CONTEXT)
    return ram() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def out_of_memory(e: BaseException) -> bool:
    """CUDA's allocator and Python's have types for it; the CPU's, cuBLAS's and what a compiler wraps only have words."""
    words = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(e, torch.OutOfMemoryError | MemoryError) or any(w in str(e) for w in words)


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
