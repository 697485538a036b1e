"""Run the model compiled or not, and on several processes: in DDP, or sharded over them."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from configurator import UserError
from hardware.limits import out_of_memory
from hardware.machine import Machine, autocast
from model import GPT
from training.batches import Batch
from training.settings import TrainConfig


@contextmanager
def compiler_errors() -> Iterator[None]:
    """Turn an error of torch.compile, or of writing its cache, into a UserError of one line."""
    try:
        yield
    except Exception as e:
        modules = ("torch._dynamo", "torch._inductor")
        is_of_compiler = isinstance(e, OSError) or type(e).__module__.startswith(modules)
        if out_of_memory(e) or not is_of_compiler:  # another rank has ended, or it is a bug
            raise
        reason = f"{type(e).__name__}: {e}".partition("\n")[0]
        # Ctrl-C during compiling may leave an empty library in its cache, and each start loads it.
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "the default")  # torch sets it
        advice = f"train with --compile=false, or another TORCHINDUCTOR_CACHE_DIR than {folder}"
        raise UserError(f"torch.compile failed: {reason}: {advice}") from e


def compile_blocks(model: GPT) -> None:
    """Compile the blocks, each by itself, and the loss.

    The code between the blocks is not compiled: the hooks that gather the weights of a block, and
    activation checkpointing. All blocks share one compiled code.
    """
    for block in model.blocks:
        block.compiled = torch.compile(block.compute, dynamic=False)
    model.compiled_loss = torch.compile(model.loss, dynamic=False)


@compiler_errors()  # torch makes the folder of its cache when torch.compile is imported
def wrap(cfg: TrainConfig, model: GPT, machine: Machine, compiled: bool) -> torch.nn.Module:
    """Return the model as it runs: under torchrun in DDP or Shards, and compiled if wanted."""
    for block in model.blocks:
        block.recompute = cfg.recompute == "blocks"
    if compiled and machine.device.type == "cpu":
        separate_cache()
    compiles_blocks = cfg.recompute != "none" or is_sharded_run(cfg, machine)
    if compiled and compiles_blocks:
        compile_blocks(model)
    if is_sharded_run(cfg, machine):
        return Shards(model, cfg.shard, machine)
    forward = model
    if dist.is_initialized():
        # The only buffer, the rope table, is constant: no step needs to broadcast it. DDP's option
        # for that is broadcast_buffers up to torch 2.12, and forward_sync_buffers from 2.13 on.
        # This method is private, but it is the same in all versions.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["rope"])
        ids = [machine.local_rank] if machine.device.type == "cuda" else None
        forward = DistributedDataParallel(model, ids, gradient_as_bucket_view=True)
    # DDP is wrapped before compiling, so that communication overlaps the backward pass.
    # pyrefly: ignore[bad-return] torch.compile returns a module, but its annotation a function.
    return torch.compile(forward, dynamic=False) if compiled and not compiles_blocks else forward


def separate_cache() -> None:
    """Give the cache of torch.compile a folder for each instruction set, such as AVX2.

    torch 2.13 would load code from it that was compiled for another CPU, which may compute garbage:
    the cache may be on a disk of several computers.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes a second to import

    own = f"/{torch.backends.cpu.get_cpu_capability()}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir().removesuffix(own) + own


def compile_now(forward: torch.nn.Module, batch: Batch, machine: Machine, eos_id: int) -> None:
    """Trigger compilation before the first step, so that the time of that step is typical.

    Raises UserError if the model cannot be compiled, without a C++ compiler or on an old GPU.
    """
    start = time.perf_counter()
    machine.print0("compiling: this takes a while")
    with compiler_errors():
        with autocast(machine):
            forward(*batch).backward()
        # Evaluation, with and without separate documents: better now than in step eval_every, where
        # a signal would wait for the compiler.
        forward.eval()
        with torch.no_grad(), autocast(machine):
            for document_eos in (None, eos_id):
                forward(batch.x, batch.y, eos_id=document_eos, reduction="sum")
        forward.train()
        machine.synchronize()
    forward.zero_grad(set_to_none=True)
    machine.print0(f"compiled in {time.perf_counter() - start:.1f} s")


def trial_fits(
    forward: torch.nn.Module, batch: Batch, machine: Machine, state_bytes: float
) -> bool:
    """Return whether two micro-steps of this batch fit into the memory of all ranks, by a trial.

    state_bytes: of the optimizer, whose state exists from the second step on. With DDP, the ranks
    do not communicate here, so no rank waits for one that runs out of memory.
    """
    enough = True
    try:
        state = torch.ones(int(state_bytes), dtype=torch.uint8, device=machine.device)
        for _ in range(2):  # the second has the gradients of the first in memory
            with sync_gradients(forward, now=False), compiler_errors():
                with autocast(machine):
                    loss = forward(*batch)
                loss.backward()
        machine.synchronize()
        del state, loss
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        enough = False
    forward.zero_grad(set_to_none=True)
    enough = all(machine.gather(enough))
    if not enough and machine.device.type == "cuda":
        torch.cuda.empty_cache()
    return enough


def is_sharded_run(cfg: TrainConfig, machine: Machine) -> bool:
    """Return whether weights or states are sharded, which needs several processes."""
    return cfg.shard != "none" and machine.world > 1


def sync_gradients(forward: torch.nn.Module, now: bool) -> AbstractContextManager[None]:
    """Return the context of a micro-step's forward and backward pass.

    DDP averages the gradients over the ranks in the last micro-step of a step only. It decides in
    the forward pass whether the backward pass will do so. now: whether this is the last one.
    """
    no_sync = getattr(forward, "no_sync", nullcontext)  # DDP and Shards have it, compiled or not
    return nullcontext() if now else no_sync()


def full_weights(forward: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the model can generate text: shards are gathered once."""
    return forward.full_weights() if isinstance(forward, Shards) else nullcontext()


class Shards(torch.nn.Module):
    """The model, sharded over the processes by torch's FSDP2: ZeRO (arXiv 1910.02054).

    Each rank holds a local shard of every weight, of its gradient and of the optimizer's state. The
    full weights are gathered for the computation. The gradients are averaged, and each rank gets
    those of its shard. The setting `shard` decides how long the full tensors exist:

                    full weights                       full gradients
        optimizer   from the first forward pass of a   from the first backward pass of a step to
                    step to its last backward pass     the last one, where they are averaged
        gradients   the same                           of a block, in its backward pass
        all         of a block, in its two passes      of a block, in its backward pass

    So with `all`, weights are gathered twice per micro-step, else once per step. Embeddings, last
    norm and head count as a block whose weights stay gathered during a micro-step. The result is
    the same in each case, up to rounding.
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
        if not torch.is_grad_enabled():  # there will be no backward pass to free the full weights
            self.free_full_weights()
        return y

    def free_full_weights(self) -> None:
        for module in (*self.model.blocks, self.model):
            module.reshard()

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Gather all weights once, and keep them during the block, to generate text."""
        for module in (*self.model.blocks, self.model):
            module.unshard()
        for block in self.model.blocks:
            block.set_reshard_after_forward(False)
        try:
            yield
        finally:
            self.free_full_weights()
            for block in self.model.blocks:
                block.set_reshard_after_forward(self.shard == "all")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Use this in every micro-step but the last one of a step, to keep what the table says."""
        self.model.set_reshard_after_backward(self.shard == "all")
        self.model.set_requires_gradient_sync(self.shard != "optimizer")
        yield
        self.model.set_reshard_after_backward(True)
        self.model.set_requires_gradient_sync(True)
