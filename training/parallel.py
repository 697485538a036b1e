"""How the model runs: its batch size, whether it is compiled, and on how many processes."""

import copy
import gc
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
from hardware.machine import Machine, memory_advice, out_of_memory
from hardware.memory import capacity
from model import GPT, Block
from text.windows import Loader
from training.memory import Step, always_held, auto_batch
from training.plan import even_batch
from training.settings import TrainConfig
from training.step import Batch, autocast, to_batch


def fit_batch(
    cfg: TrainConfig, model: GPT, loader: Loader, machine: Machine, compiled: bool, last: int | None
) -> int:
    """Return the batch_size for batch_size=auto, the same on all ranks.

    Start from what training/memory.py predicts to fit, try it out, and go down while it runs out of
    memory. last: the batch_size that a resumed run had; it keeps this one if it fits.
    Raises UserError if not even one sequence fits.
    """
    step = Step(1, cfg.block_size, 2, machine.dtype, compiled, machine.device.type, machine.world)
    step = step.of(cfg)
    predicted = auto_batch(model, step, capacity(machine.device))
    limit = max(1, min(machine.gather(min(predicted, last or predicted))))
    always = always_held(model, step)
    held = sum(always.values()) - always["weights"]
    while True:
        B = limit if limit == last else even_batch(limit, cfg, machine.world)
        if shares(cfg, machine):
            # A trial needs all ranks: if one ran out of memory, the others would wait for it.
            machine.say(f"batch_size=auto: {B}, not tried out (at most {predicted} predicted)")
            return B
        batch = to_batch(loader.rows(loader.starts(0, B)), machine.device)
        fits = all(machine.gather(has_room(cfg, model, batch, machine, compiled, held)))
        model.zero_grad(set_to_none=True)
        gc.collect()
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()  # the log shows the run's peak, not a trial's
        if compiled and not (fits and machine.world == 1):
            # Forget the compiled code if the run cannot use it. On several ranks, torch.compile
            # would reuse it inside DDP, although it is not split at DDP's buckets.
            torch.compiler.reset()
        if fits:
            machine.say(f"batch_size=auto: {B}, tried out (at most {predicted} predicted)")
            return B
        if B == 1:
            raise UserError("out of memory at batch_size=1: lower block_size, n_layer or n_embd")
        limit = B * 7 // 8


def has_room(
    cfg: TrainConfig, model: GPT, batch: Batch, machine: Machine, compiled: bool, held: float
) -> bool:
    """Return whether this rank has the memory to train on batches like this one.

    Run two micro-steps; the second adds its gradients to those of the first. A tensor of `held`
    bytes takes the place of the optimizer's state, and of DDP's buckets on several ranks.
    """
    try:
        _placeholder = torch.empty(int(held), dtype=torch.uint8, device=machine.device)
        forward = model
        if compiled:
            forward, _ = try_compile(model, batch, machine, compiles_by_blocks(cfg, machine))
        for _ in range(2):
            with autocast(machine):
                loss = forward(*batch)
            loss.backward()
        machine.synchronize()
        return True
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        return False


def try_compile(
    model: torch.nn.Module, batch: Batch, machine: Machine, by_blocks: bool
) -> tuple[Callable, str]:
    """Compile the model and try it out on one batch, without waiting for other ranks.

    Return the compiled model and "", or the model as it was and the reason why this failed.
    """
    try:
        if by_blocks:
            compiled = compile_blocks(model, batch.x, machine)
        else:
            compiled = compile_whole(model, batch, machine)
        machine.synchronize()
        return compiled, ""
    except Exception as e:  # no C++ compiler, an old GPU: eager mode may work all the same
        if out_of_memory(e):
            raise
        first_line = str(e).partition("\n")[0]
        return model, f"{type(e).__name__}: {first_line}"
    finally:
        model.train()
        model.zero_grad(set_to_none=True)


def compile_whole(model: torch.nn.Module, batch: Batch, machine: Machine) -> Callable:
    compiled = torch.compile(model, dynamic=False)
    # DDP must not sum the gradients here: a rank on which this fails would never join the sum.
    with getattr(model, "no_sync", nullcontext)(), autocast(machine):
        compiled(*batch).backward()
    if machine.device.type == "cuda":
        # An evaluation by document compiles FlexAttention: better now than in step eval_every.
        model.eval()
        with torch.no_grad(), autocast(machine):
            compiled(batch.x, batch.y, eos_id=0, reduction="sum")
    return compiled


def compile_blocks(model: GPT, x: torch.Tensor, machine: Machine) -> GPT:
    """Compile the blocks, each by itself, and the loss, after a trial with a copy of a block.

    x: inputs (B, T) of the model. What lies between the blocks stays as it is: the hooks that
    gather the weights of a block, and the checkpoint that computes a block twice. All blocks share
    one compiled code.
    """
    stream = torch.bfloat16 if machine.dtype == torch.bfloat16 else torch.float32
    shape = (*x.shape, model.config.n_embd)
    inputs = torch.zeros(shape, dtype=stream, device=machine.device, requires_grad=True)
    rope = None if model.rope is None else model.rope[:, : x.size(1)].to(machine.device)
    trial = copy.deepcopy(model.blocks[0]).to(machine.device)
    trial.compute = compiled_compute(trial)
    with autocast(machine):
        trial(inputs, rope, None, None).sum().backward()
        if machine.device.type == "cuda":  # FlexAttention, for which evaluations compile it
            begins = torch.zeros(x.shape, dtype=torch.long, device=machine.device)
            with torch.no_grad():
                mask = document_mask(model.eval(), begins, machine.dtype, compiled=True)
                trial.eval()(inputs, rope, mask, None)
            model.train()
    for block in model.blocks:
        block.compute = compiled_compute(block)
    model.loss = torch.compile(MethodType(GPT.loss, model), dynamic=False)
    model.document_mask = partial(document_mask, model, compiled=True)
    return model


def compiled_compute(block: Block) -> Callable:
    """Return Block.compute, compiled for training. With a cache, for generation, it is not."""
    plain = MethodType(Block.compute, block)
    compiled = torch.compile(plain, dynamic=False)
    return lambda *inputs: (compiled if inputs[-1] is None else plain)(*inputs)


def compile_together(
    model: torch.nn.Module, batch: Batch, machine: Machine, by_blocks: bool, advice: str
) -> Callable:
    """Return the compiled model if all ranks can compile it, else the model as it was.

    The ranks must agree: a rank without the compiled model would sum its gradients in different
    pieces, and the other ranks would wait for theirs for ever.
    advice: what the error message recommends if memory runs out.
    """
    start = time.perf_counter()

    def attempt() -> tuple[Callable, str]:
        with memory_advice(advice):
            return try_compile(model, batch, machine, by_blocks)

    compiled, failure = machine.together(attempt)
    for rank, reason in enumerate(machine.gather(failure)):
        if reason:
            machine.say(f"warning: torch.compile failed on rank {rank}: {reason}; not compiled")
            torch.compiler.reset()
            if by_blocks:  # undo compile_blocks(): what is left are the methods of the classes
                for module in (model, *model.blocks):
                    for name in ("loss", "document_mask", "compute"):
                        module.__dict__.pop(name, None)
            return model
    machine.say(f"compiled in {time.perf_counter() - start:.1f} s")
    return compiled


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
    if batch is not None and by_blocks:
        compile_together(model, batch, machine, by_blocks, advice)
    if shares(cfg, machine):
        return Shards(model, cfg.shard, machine)
    forward = model
    if dist.is_initialized():
        forward = DistributedDataParallel(
            model,
            device_ids=[machine.local_rank] if machine.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # The only buffer, the rope table, is constant: no step need send it to the ranks.
            forward_sync_buffers=False,
        )
    if batch is None or by_blocks:
        return forward
    # DDP comes first and the compiler second, so that communication overlaps the backward pass.
    return compile_together(forward, batch, machine, by_blocks, advice)


def shares(cfg: TrainConfig, machine: Machine) -> bool:
    """Return whether the processes share out weights or states: one process has nobody to share
    with."""
    return cfg.shard != "none" and machine.world > 1


def compiles_by_blocks(cfg: TrainConfig, machine: Machine) -> bool:
    """Return whether torch.compile gets the blocks one by one, and not the whole model."""
    return cfg.recompute != "none" or shares(cfg, machine)


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
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=shard == "all")
        fully_shard(model, mesh=mesh, reshard_after_forward=False)

    def forward(self, *inputs: torch.Tensor, **options) -> torch.Tensor:
        y = self.model(*inputs, **options)
        if not torch.is_grad_enabled():  # no backward pass will come, which frees the whole weights
            self.free_whole_weights()
        return y

    def free_whole_weights(self) -> None:
        for module in (*self.model.blocks, self.model):
            module.reshard()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gather all weights once, and keep them for a while, to generate text."""
        for module in (*self.model.blocks, self.model):
            module.unshard()
        for block in self.model.blocks:
            block.set_reshard_after_forward(False)
        try:
            yield
        finally:
            self.free_whole_weights()
            for block in self.model.blocks:
                block.set_reshard_after_forward(self.shard == "all")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For every micro-step of a step but the last one: keep what the table says."""
        self.model.set_reshard_after_backward(self.shard == "all")
        self.model.set_requires_gradient_sync(self.shard != "optimizer")
        yield
        self.model.set_reshard_after_backward(True)
        self.model.set_requires_gradient_sync(True)
