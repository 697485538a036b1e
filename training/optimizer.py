"""The optimizers: AdamW and Adafactor are torch's own, Muon is written here.

AdamW (arXiv 1711.05101) divides the running mean of each weight's gradient by the root of the
running mean of its square: every weight moves by about lr, whatever the size of its gradient.

Muon (Jordan et al. 2024; arXiv 2502.16982) does the same with the directions of a matrix. The
gradient of a matrix, averaged over steps, is U S V^T: each column of U and V is a direction, and S
says how strong it is. Muon moves the matrix by U V^T: along all directions equally far.

Adafactor (arXiv 1804.04235) is AdamW without a running mean of the gradient, and with the squares
averaged over rows and columns, which takes nearly no memory. Its lr is relative to the size of the
weights: a matrix of standard deviation 0.02 moves by 0.02 lr. torch limits lr to 1 / sqrt(step).
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hardware.machine import Machine
from hardware.sharded import is_sharded, local_shard
from model import GPT
from training.settings import TrainConfig

# Each line maps a square P to a P² + b Q + c, where Q is the P of the previous line. At first both
# are A, so the last P is a polynomial of degree 16 in A, for four matrix products.
# It turns the strength s into s P(s²): up to rounding, a number between 0.22 and 1.78 for each s
# from 0.005 to 1. A search found no four lines that come nearer to 1 (bench/LOG.md).
SQUARES = (
    (5.7605, -6.4162, 1.0000),
    (1.6299, 0.0937, -0.6299),
    (1.4420, -0.1821, -0.2599),
    (43.3874, 0.7950, 1.0266),
)

# Parameters of one shape are stacked, so that one product serves all. A stack has at most this many
# numbers, or one parameter: its copies take memory.
STACK = 2**25


def orthogonalize(X: Tensor, factor: float | Tensor = 1.0) -> Tensor:
    """Return factor U V^T, approximately, for each matrix U S V^T of X (n, rows, columns).

    With A = X X^T, any polynomial P(A) X has the directions of X, and the strengths S P(S²). So
    matrix products alone bring every strength near to 1, as in the Newton-Schulz iteration of Muon.
    Here, all of them but the first and the last are between squares with the shorter side of X: for
    a tall X, A is X^T X, and the result X P(A).
    """
    tall = X.size(1) > X.size(2)
    P = X.mT @ X if tall else X @ X.mT  # the smaller square: V S² V^T or U S² U^T
    # Make all strengths at most 1, and the weak ones less weak (arXiv 2512.04632): each row (of a
    # tall X, each column) is divided by the root of the sum of |A| in its row of A. Only squares
    # are multiplied by these factors. 1.01 allows for rounding. Below 1e-8 the squares of A's
    # numbers would underflow: such a matrix hardly moves.
    sums = 1.01 * torch.linalg.vector_norm(P, 1, dim=2, dtype=torch.float32)  # (n, shorter side)
    scale = (1 / sums.sqrt().clamp(min=1e-8)).to(X.dtype)
    P *= scale[:, :, None]
    P *= scale[:, None, :]
    Q = P.clone()
    for a, b, c in SQUARES:
        P, Q = Q.baddbmm_(P, P, beta=b, alpha=a), P
        P.diagonal(dim1=1, dim2=2).add_(c)
    P *= factor * (scale[:, :, None] if tall else scale[:, None, :])
    return X @ P if tall else P @ X


class Muon(torch.optim.AdamW):
    """Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.

    One optimizer holds both, so one state_dict() resumes them. Muon's update is U V^T, from the
    singular value decomposition U S V^T of the momentum, times 0.2 sqrt(max(rows, columns)). So a
    weight moves by about as much as with AdamW: one lr serves both (arXiv 2502.16982, section 2.2).

    groups: those of GPT.param_groups(), with a momentum each. dtype: in which the update is
    computed, bf16 or fp32. fused: compute AdamW in one kernel, which is needed to skip a step on
    the device.

    torch.optim.Muon (torch 2.13) is not enough: it moves one matrix after the other, and qkv as if
    it were one matrix; it ignores found_inf; it computes in bf16 even where that is slow; and
    embeddings and vectors need a second optimizer.
    """

    def __init__(
        self, groups: list[dict], lr: float, betas: tuple, dtype: torch.dtype, fused: bool
    ):
        super().__init__(groups, lr, betas, fused=fused)
        self.dtype = dtype
        self._step_supports_amp_scaling = fused  # GradScaler then sets found_inf, as take_step does

    def __setstate__(self, state: dict) -> None:
        # AdamW's own version needs a number of steps in each state: matrices have none.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self) -> None:
        """Move all weights. If self.found_inf, a tensor on the device, is 1, nothing changes.

        The gradients of the matrices are used up.
        """
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.is_cpu:
            if found_inf:  # on a CPU, reading it costs nothing
                return
            found_inf = None
        for group in self.param_groups:
            if group["name"] == "matrices":
                self.move_matrices(group, found_inf)
        super().step()  # AdamW, for the parameters that still have a gradient

    def move_matrices(self, group: dict, found_inf: Tensor | None) -> None:
        """Move the parameters of a group by Muon, in stacks of one shape."""
        stacks: dict[tuple, list[Tensor]] = {}
        for weight, rows in zip(group["params"], group["rows"], strict=True):
            stacks.setdefault((weight.size(1), *rows), []).append(weight)
        for (_, *rows), weights in stacks.items():
            size = ranks_of(weights[0]) * max(1, STACK // weights[0].numel())
            for start in range(0, len(weights), size):
                self.move_stack(weights[start : start + size], rows, group, found_inf)
        for weight in group["params"]:
            weight.grad = None

    def move_stack(
        self, weights: list[Tensor], rows: list[int], group: dict, found_inf: Tensor | None
    ) -> None:
        """Move parameters of one shape.

        rows: of the matrices that each parameter holds, one below the other: three for qkv, else
        one. If the parameters are sharded, each rank holds some rows of all of them. It then
        computes the updates of a few full ones, and sends their rows to the ranks that hold them.
        """
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["mean"] = torch.zeros_like(weight)
        parts = [local_shard(weight) for weight in weights]
        grads = [local_shard(weight.grad) for weight in weights if weight.grad is not None]
        means = [local_shard(self.state[weight]["mean"]) for weight in weights]
        if found_inf is not None:
            for grad, mean in zip(grads, means, strict=True):
                # In a step to be skipped: mean + (1 - momentum) (mean - mean) is mean, exactly.
                torch.where(found_inf > 0, mean, grad, out=grad)
        torch._foreach_lerp_(means, grads, 1 - group["muon_momentum"])
        # The running mean after one more step with the same gradient: Nesterov's momentum.
        torch._foreach_lerp_(grads, means, group["muon_momentum"])
        lr = group["lr"] if found_inf is None else group["lr"] * (1 - found_inf)
        moves = to_owners(grads, weights[0], self.dtype)  # (parameters, sum of rows, columns)
        for matrices in moves.split(rows, dim=1):
            factor = -0.2 * math.sqrt(max(matrices.shape[1:])) * lr
            matrices.copy_(orthogonalize(matrices, factor))
        moves = from_owners(moves, weights[0]).float()
        torch._foreach_mul_(parts, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parts, [x[: len(w)] for x, w in zip(moves, parts, strict=False)])


def ranks_of(x: Tensor) -> int:
    """Return the number of processes over which x is sharded; 1 if it is not sharded."""
    return x.device_mesh.size() if is_sharded(x) else 1


def to_owners(parts: list[Tensor], p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return full tensors of the shape of p (R, C) as one stack (m, R, C), in another dtype.

    parts: this rank's shard of each tensor. If they are sharded over W ranks, each rank gets the
    next m = ceil(len(parts) / W) full tensors. Zeros fill the stacks of the last ranks.
    """
    R, C = p.shape
    W = ranks_of(p)
    m = math.ceil(len(parts) / W)
    stack = torch.zeros(W * m, math.ceil(R / W), C, dtype=dtype, device=parts[0].device)
    torch._foreach_copy_([x[: len(rows)] for x, rows in zip(stack, parts, strict=False)], parts)
    if W > 1:
        stack = exchange(stack, p).view(W, m, -1, C).transpose(0, 1).reshape(m, -1, C)[:, :R]
    return stack


def from_owners(stack: Tensor, p: Tensor) -> Tensor:
    """Return this rank's shard of each tensor, in one stack: the inverse of to_owners().

    A rank that holds fewer rows than others has them first.
    """
    W = ranks_of(p)
    if W == 1:
        return stack
    m, R, C = stack.shape
    filled = F.pad(stack, (0, 0, 0, W * math.ceil(R / W) - R))
    return exchange(filled.view(m, W, -1, C).transpose(0, 1).flatten(0, 1), p)


def exchange(stack: Tensor, p: Tensor) -> Tensor:
    """Send the r-th of W equal parts of a stack to rank r; return the received parts, in order."""
    received = torch.empty_like(stack)
    # pyrefly: ignore[missing-attribute]
    dist.all_to_all_single(received, stack, group=p.device_mesh.get_group())
    return received


def make_optimizer(cfg: TrainConfig, machine: Machine, model: GPT) -> torch.optim.Optimizer:
    """Return the optimizer that the settings ask for."""
    groups = model.param_groups(cfg.weight_decay)
    scale = {"embeddings": cfg.embed_lr, "vectors": cfg.vector_lr}
    for group in groups:
        group["scale"] = scale.get(group["name"], 1.0)
        # Not "momentum": torch's own optimizers read each key that is one of their options.
        group["muon_momentum"] = cfg.momentum
    if cfg.optimizer == "adafactor":
        # foreach=True, its default on a GPU, would hold a copy of all weights.
        return torch.optim.Adafactor(groups, lr=cfg.lr, foreach=False)
    # A fused AdamW skips a bad step by itself if found_inf is set (take_step). The one for mps
    # ignores found_inf (torch 2.13), so there AdamW is not fused.
    fused = machine.device.type in ("cuda", "cpu")
    betas = (cfg.beta1, cfg.beta2)
    if cfg.optimizer == "muon":
        dtype = torch.bfloat16 if machine.dtype == torch.bfloat16 else torch.float32
        return Muon(groups, cfg.lr, betas, dtype, fused)
    if cfg.optimizer != "adamw":
        raise NotImplementedError(cfg.optimizer)
    return torch.optim.AdamW(groups, cfg.lr, betas, fused=fused)
