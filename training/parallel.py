"""How the model runs: its batch size, whether it is compiled, and on how many processes."""

import copy
import gc
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import UserError
from hardware.kernels import document_mask
from hardware.machine import Machine, capacity, least, memory_advice, out_of_memory
from model import GPT, Block
from text.windows import Loader
from training.memory import Step, always_held, auto_batch
from training.plan import even_batch
from training.settings import TrainConfig
from training.step import Batch, to_batch


def fit_batch(
    cfg: TrainConfig, model: GPT, loader: Loader, machine: Machine, compiled: bool, most: int | None
) -> int:
    """Return the batch_size for batch_size=auto, the same on all ranks.

    Start from what training/memory.py predicts to fit, try it out, and go down while it runs out of
    memory. most: the batch_size that a resumed run had; it keeps this one if it fits.
    Raises UserError if not even one sequence fits.
    """
    kind = machine.device.type
    step = Step(1, cfg.block_size, 2, machine.dtype, compiled, kind, machine.world)
    step = step.of(cfg)
    predicted = auto_batch(model, step, capacity(machine.device))
    limit = min(predicted, most or predicted)
    if shares(cfg, machine):
        # A trial needs all ranks: if one ran out of memory, the others would wait for it.
        B = even_batch(least(max(1, limit), machine), cfg, machine.world)
        machine.say(f"batch_size=auto: {B}, not tried out (at most {predicted} predicted)")
        return B
    always = always_held(model, step)
    held = sum(always.values()) - always["weights"]
    while True:
        limit = least(limit, machine)
        B = limit if limit == most else even_batch(limit, cfg, machine.world)
        batch = to_batch(loader.rows(loader.starts(0, B)), machine.device)
        by_blocks = compiles_by_blocks(cfg, machine)
        fits_here = has_room(model, batch, machine, compiled, by_blocks, held)
        model.zero_grad(set_to_none=True)
        gc.collect()
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()  # the log shows the run's peak, not a trial's
        fits = bool(least(fits_here, machine))
        if compiled and not (fits and machine.world == 1):
            # Forget the compiled code if the run cannot use it. On several ranks, torch.compile
            # would reuse it inside DDP, although it is not split at DDP's buckets.
            torch.compiler.reset()
        if fits:
            machine.say(f"batch_size=auto: {B}, tried out (at most {predicted} predicted)")
            return B
        if B == 1:
            half = f"--block_size={cfg.block_size // 2}"
            raise UserError(f"out of memory at batch_size=1: try {half}, or a smaller model")
        limit = B * 7 // 8


def has_room(
    model: GPT, batch: Batch, machine: Machine, compiled: bool, by_blocks: bool, held: float
) -> bool:
    """Return whether this rank has the memory to train on batches like this one.

    Run two micro-steps; the second adds its gradients to those of the first. A tensor of `held`
    bytes takes the place of the optimizer's state, of the average of the weights, if there is one,
    and of DDP's buckets on several ranks.
    """
    try:
        _placeholder = torch.empty(int(held), dtype=torch.uint8, device=machine.device)
        forward = None
        if compiled and by_blocks:
            forward, _ = try_blocks(model, batch.x, machine)
        elif compiled:
            forward, _ = try_compile(model, batch, machine)
        if forward is None:
            forward = model
        for _ in range(2):
            with machine.autocast():
                loss = forward(*batch)
            loss.backward()
        machine.synchronize()
        return True
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        return False


def try_compile(
    model: torch.nn.Module, batch: Batch, machine: Machine
) -> tuple[Callable | None, str]:
    """Compile the model and try it out on one batch, without waiting for other ranks.

    Return the compiled model and "", or None and the reason why this failed.
    """
    # DDP must not sum the gradients here: a rank on which this fails would never join the sum.
    no_sync = getattr(model, "no_sync", nullcontext)
    try:
        compiled = torch.compile(model, dynamic=False)
        with no_sync(), machine.autocast():
            compiled(*batch).backward()
        if machine.device.type == "cuda":
            # An evaluation by document compiles FlexAttention: better now than in step eval_every.
            model.eval()
            with torch.no_grad(), machine.autocast():
                compiled(batch.x, batch.y, eos_id=0, reduction="sum")
        machine.synchronize()
        return compiled, ""
    except Exception as e:  # no C++ compiler, an old GPU: eager mode may work all the same
        if out_of_memory(e):
            raise
        first_line = str(e).splitlines()[0] if str(e) else ""
        return None, f"{type(e).__name__}: {first_line}"
    finally:
        model.train()
        model.zero_grad(set_to_none=True)


def try_blocks(model: GPT, x: torch.Tensor, machine: Machine) -> tuple[Callable | None, str]:
    """Compile the blocks, each by itself, and the loss. Try a copy of the first block.

    x: inputs (B, T) of the model. Return the model and "", or None and the reason why this failed.
    This does not wait for other ranks.

    What lies between the blocks stays as it is: the hooks that gather the weights of a block, and
    the checkpoint that computes a block twice. All blocks share one compiled code.
    """
    stream = torch.bfloat16 if machine.dtype == torch.bfloat16 else torch.float32
    shape = (*x.shape, model.config.n_embd)
    inputs = torch.zeros(shape, dtype=stream, device=machine.device, requires_grad=True)
    rope = None if model.rope is None else model.rope[:, : x.size(1)].to(machine.device)
    try:
        block = copy.deepcopy(model.blocks[0]).to(machine.device)
        for one in (*model.blocks, block):
            one.compute = compiled_compute(one)
        model.loss = torch.compile(MethodType(GPT.loss, model), dynamic=False)
        model.document_mask = partial(document_mask, model, compiled=True)
        with machine.autocast():
            block(inputs, rope, None, None).sum().backward()
            if machine.device.type == "cuda":  # FlexAttention, for which evaluations compile it
                begins = torch.zeros(x.shape, dtype=torch.long, device=machine.device)
                model.eval()
                with torch.no_grad():
                    mask = model.document_mask(begins, machine.dtype)
                    block.eval()(inputs, rope, mask, None)
        machine.synchronize()
        return model, ""
    except Exception as e:
        if out_of_memory(e):
            raise
        eager(model)
        first_line = str(e).splitlines()[0] if str(e) else ""
        return None, f"{type(e).__name__}: {first_line}"
    finally:
        model.train()


def compiled_compute(block: Block) -> Callable:
    """Return Block.compute, compiled for training. With a cache, for generation, it is not."""
    plain = MethodType(Block.compute, block)
    compiled = torch.compile(plain, dynamic=False)
    return lambda *inputs: (compiled if inputs[-1] is None else plain)(*inputs)


def eager(model: GPT) -> None:
    """Undo what try_blocks() did."""
    for block in model.blocks:
        block.__dict__.pop("compute", None)  # what is left is the method of the class
    for name in ("loss", "document_mask"):
        model.__dict__.pop(name, None)


def compile_together(
    attempt: Callable[[], tuple[Callable | None, str]], machine: Machine, advice: str
) -> Callable | None:
    """Return what attempt() returns if all ranks can compile it, else None.

    The ranks must agree: a rank without the compiled model would sum its gradients in different
    pieces, and the other ranks would wait for theirs for ever.
    advice: what the error message recommends if memory runs out.
    """
    started = time.perf_counter()

    def work() -> tuple[Callable | None, str]:
        with memory_advice(advice):
            return attempt()

    compiled, failed = machine.together(work)
    reasons = machine.gather(failed)
    if not any(reasons):
        machine.say(f"compiled in {time.perf_counter() - started:.1f} s")
        return compiled
    rank = next(rank for rank, reason in enumerate(reasons) if reason)
    where = f" on rank {rank}" if machine.world > 1 else ""
    slower = "going on without it, slower"
    machine.say(f"warning: torch.compile failed{where}; {slower} ({reasons[rank]})")
    torch.compiler.reset()
    return None


def wrap(
    cfg: TrainConfig, model: GPT, machine: Machine, example: Loader | None, B: int, advice: str
) -> Callable:
    """Return the model as it runs: in DDP or Shards under torchrun, and compiled if asked for.

    example: a loader, which gives a batch to try the compiled model with; None: do not compile.
    advice: what the error message recommends if memory runs out.
    """
    batch = None
    if example is not None:
        batch = to_batch(example.rows(example.starts(0, B)), machine.device)
    by_blocks = compiles_by_blocks(cfg, machine)
    if example is not None and by_blocks:
        if compile_together(lambda: try_blocks(model, batch.x, machine), machine, advice) is None:
            eager(model)
    if shares(cfg, machine):
        return Shards(model, cfg.shard, machine)
    parallel = in_ddp(model, machine) if dist.is_initialized() else model
    if example is None or by_blocks:
        return parallel
    # DDP comes first and the compiler second, so that communication overlaps the backward pass.
    compiled = compile_together(lambda: try_compile(parallel, batch, machine), machine, advice)
    return parallel if compiled is None else compiled


def shares(cfg: TrainConfig, machine: Machine) -> bool:
    """Return whether the processes share out weights or states: one process has nobody to share
    with."""
    return cfg.shard != "none" and machine.world > 1


def compiles_by_blocks(cfg: TrainConfig, machine: Machine) -> bool:
    """Return whether torch.compile gets the blocks one by one, and not the whole model."""
    return cfg.recompute != "none" or shares(cfg, machine)


def in_ddp(model: GPT, machine: Machine) -> DistributedDataParallel:
    """Return the model in DDP: each rank has all weights, and the gradients are averaged."""
    # The only buffer, the rope table, is constant: the ranks need not send it in each step.
    # torch 2.13 has the option forward_sync_buffers for this, earlier ones broadcast_buffers.
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    new = "forward_sync_buffers" in options
    sync_buffers = "forward_sync_buffers" if new else "broadcast_buffers"
    return DistributedDataParallel(
        model,
        device_ids=[machine.local_rank] if machine.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{sync_buffers: False},
    )


class Shards(torch.nn.Module):
    """The model, shared out among the processes by torch's FSDP2: ZeRO (arXiv 1910.02054).

    Each rank holds a part of every weight, of its gradient and of the optimizer's state. The whole
    weights are gathered to compute with them. The gradients are averaged, and each rank gets those
    of its part. The setting `shard` says when:

                    whole weights are there            whole gradients are there
        optimizer   from the first forward pass of a   from the first backward pass of a step to
                    step to its last backward pass     the last one, where they are averaged
        gradients   the same                           of a block, in its backward pass
        all         of a block, in its two passes      of a block, in its backward pass

    So with `all`, weights are gathered twice in a micro-step, else once in a step. Embeddings, last
    norm and head count as a block, whose weights stay from the beginning of a micro-step to its
    end. The sums are the same in each case, up to rounding.
    """

    def __init__(self, model: GPT, shard: str, machine: Machine):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # takes half a second to import

        super().__init__()
        self.shard = shard
        self.model = model
        mesh = init_device_mesh(machine.device.type, (machine.world,))
        for module in (*model.blocks, model):
            often = shard == "all" and module is not model
            fully_shard(module, mesh=mesh, reshard_after_forward=often)

    def forward(self, *inputs: torch.Tensor, **more) -> torch.Tensor:
        y = self.model(*inputs, **more)
        if not torch.is_grad_enabled():  # no backward pass will come, which frees the whole weights
            for module in (*self.model.blocks, self.model):
                module.reshard()
        return y

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gather all weights once, and keep them for a while, to generate text."""
        modules = (*self.model.blocks, self.model)
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
                often = self.shard == "all" and module is not self.model
                module.set_reshard_after_forward(often, recurse=False)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For every micro-step of a step but the last one: keep what the table says."""
        self.model.set_reshard_after_backward(self.shard == "all")
        self.model.set_requires_gradient_sync(self.shard != "optimizer")
        yield
        self.model.set_reshard_after_backward(True)
        self.model.set_requires_gradient_sync(True)
