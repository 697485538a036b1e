"""The optimizers: AdamW and Adafactor are torch's own, Muon is written here.

AdamW (arXiv 1711.05101) divides the running mean of each weight's gradient by the root of the
running mean of its square: every weight moves by about lr, whatever the size of its gradient.

Muon (Jordan et al. 2024; arXiv 2502.16982) does the same with the directions of a matrix. The
gradient of a matrix, averaged over steps, is U S V^T: each column of U and V is a direction, and S
says how strong it is. Muon moves the matrix by U V^T: along all directions equally far.

Adafactor (arXiv 1804.04235) is AdamW without a running mean of the gradient, and with the squares
averaged over rows and columns, which takes nearly no memory. Its lr is a share of the size of the
weights: a matrix of standard deviation 0.02 moves by 0.02 lr. torch takes at most 1 / sqrt(step).
"""

import math
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hardware.machine import Machine
from model import GPT
from training.settings import TrainConfig
from training.shards import Pieces, is_sharded, part, rows_of

# Each line takes a square P to a P² + b before + c, where `before` is the P of the line before it.
# At first both are A, so the last P is a polynomial of degree 16 in A, for four matrix products.
# With it the strength s becomes s P(s²): but for rounding, a number between 0.22 and 1.78 for each
# s from 0.005 to 1. A search found no four lines that come nearer to 1 (bench/LOG.md).
SQUARES = (
    (5.7605, -6.4162, 1.0000),
    (1.6299, 0.0937, -0.6299),
    (1.4420, -0.1821, -0.2599),
    (43.3874, 0.7950, 1.0266),
)

# The matrices of one shape are stacked, so that one product serves all. A stack has at most so many
# numbers, or one matrix: its copies take memory.
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
    # are multiplied by these factors. 1.01 leaves room for rounding. Below 1e-8 the squares of A's
    # numbers would underflow: such a matrix hardly moves.
    sums = 1.01 * torch.linalg.vector_norm(P, 1, dim=2, dtype=torch.float32)  # (n, shorter side)
    scale = (1 / sums.sqrt().clamp(min=1e-8)).to(X.dtype)
    P *= scale[:, :, None]
    P *= scale[:, None, :]
    before = P.clone()
    for a, b, c in SQUARES:
        before, P = P, before.baddbmm_(P, P, beta=b, alpha=a)
        P.diagonal(dim1=1, dim2=2).add_(c)
    P *= factor * (scale[:, :, None] if tall else scale[:, None, :])
    return X @ P if tall else P @ X


def stacked(matrices: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return torch.stack(matrices) in another dtype, without a copy in between."""
    shape = (len(matrices), *matrices[0].shape)
    X = torch.empty(shape, dtype=dtype, device=matrices[0].device)
    torch._foreach_copy_(X.unbind(), matrices)
    return X


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.

    One optimizer holds both, so one state_dict() resumes them. Muon's update U V^T is multiplied by
    0.2 sqrt(max(rows, columns)), so that a weight moves by about as much as with AdamW: one lr
    serves both (arXiv 2502.16982, section 2.2).

    groups: those of GPT.param_groups(). dtype: in which the update is computed, bf16 or fp32.
    fused: compute AdamW in one kernel, which is needed to skip a step on the device.

    torch.optim.Muon (torch 2.13) was not enough: it moves one matrix after the other, and qkv as if
    it were one matrix; it does not heed found_inf; it computes in bf16 even where that is slow; and
    embeddings and vectors need a second optimizer.
    """

    def __init__(
        self,
        groups: list[dict],
        lr: float,
        betas: tuple[float, float],
        momentum: float,
        dtype: torch.dtype,
        fused: bool,
    ):
        defaults = {"lr": lr, "betas": betas, "momentum": momentum, "fused": fused}
        super().__init__(groups, defaults)
        self.dtype = dtype
        self._step_supports_amp_scaling = fused  # GradScaler then sets found_inf, as take_step does

    @torch.no_grad()
    def step(self) -> None:
        """Move all weights. If self.found_inf, a tensor on the device, is 1, nothing changes."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.device.type == "cpu":
            if found_inf:  # there is no device to wait for
                return
            found_inf = None
        for group in self.param_groups:
            if group["name"] != "matrices":
                self.adamw(group, found_inf)
                continue
            stacks = self.shared_stacks if is_sharded(group["params"][0]) else self.stacks
            for weights, grads, means, pieces in stacks(group):
                self.muon(weights, grads, means, pieces, group, found_inf)

    def adamw(self, group: dict, found_inf: Tensor | None) -> None:
        """Move the parameters of a group by AdamW, as torch.optim.AdamW does."""
        for p in group["params"]:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device if group["fused"] else "cpu"),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in group["params"]]
        adamw(
            group["params"],
            [p.grad for p in group["params"]],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=group["fused"],
            found_inf=found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )

    def stacks(
        self, group: dict
    ) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor], None]]:
        """Yield weights, gradients and running means, in lists of matrices of one shape."""
        of_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for weight, rows in zip(group["params"], group["rows"], strict=True):
            state = self.state[weight]
            if not state:
                state["mean"] = torch.zeros_like(weight)
            parts = [x.split(rows) for x in (weight, weight.grad, state["mean"])]
            for matrices in zip(*parts, strict=True):  # q, k, v of qkv; one matrix of the others
                of_shape.setdefault(matrices[0].shape, []).append(matrices)
        for (rows, columns), found in of_shape.items():
            most = max(1, STACK // (rows * columns))
            for first in range(0, len(found), most):
                weights, grads, means = zip(*found[first : first + most], strict=True)
                yield list(weights), list(grads), list(means), None

    def shared_stacks(
        self, group: dict
    ) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor], Pieces]]:
        """Yield the same if every rank holds some rows of each parameter: its rows of the matrices.

        The matrices of one shape are dealt out to the ranks, as Pieces says.
        """
        mesh = group["params"][0].device_mesh
        ranks = range(mesh.size())
        rank = mesh.get_local_rank()
        of_shape: dict[tuple[int, int], list[tuple[list[int], list[Tensor]]]] = {}
        for weight, rows in zip(group["params"], group["rows"], strict=True):
            state = self.state[weight]
            if not state:
                state["mean"] = torch.zeros_like(weight)
            parts = [part(x) for x in (weight, weight.grad, state["mean"])]
            starts = [rows_of(r, weight.size(0), mesh.size())[0] for r in ranks]
            above = 0  # rows of the parameter that belong to the matrices before
            for n in rows:  # q, k, v of qkv; one matrix of the others
                bounds = [min(max(start - above, 0), n) for start in starts] + [n]
                begin = above - starts[rank]
                mine = [x[max(begin, 0) : max(begin + n, 0)] for x in parts]
                of_shape.setdefault((n, weight.size(1)), []).append((bounds, mine))
                above += n
        for shape, found in of_shape.items():
            most = mesh.size() * max(1, STACK // math.prod(shape))
            for first in range(0, len(found), most):
                dealt = [found[first : first + most][r :: mesh.size()] for r in ranks]
                bounds, mine = zip(*chain.from_iterable(dealt), strict=True)
                pieces = Pieces(shape, bounds, [*map(len, dealt)], rank, mesh.get_group())
                weights, grads, means = zip(*mine, strict=True)
                yield list(weights), list(grads), list(means), pieces

    def muon(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        pieces: Pieces | None,
        group: dict,
        found_inf: Tensor | None,
    ) -> None:
        """Move matrices of one shape, (rows, columns) each. The gradients are overwritten.

        pieces: how they are shared out; None if they are not.
        """
        if found_inf is not None:
            for grad, mean in zip(grads, means, strict=True):
                # In a step to be skipped: mean + (1 - momentum) (mean - mean) is mean, exactly.
                torch.where(found_inf > 0, mean, grad, out=grad)
        torch._foreach_lerp_(means, grads, 1 - group["momentum"])
        # The running mean after one more step with the same gradient: Nesterov's momentum.
        torch._foreach_lerp_(grads, means, group["momentum"])
        lr = group["lr"] if found_inf is None else group["lr"] * (1 - found_inf)
        factor = -0.2 * math.sqrt(max(pieces.shape if pieces else weights[0].shape)) * lr
        if pieces is None:
            moves = orthogonalize(stacked(grads, self.dtype), factor).float().unbind()
        else:
            mine = torch.cat([grad.to(self.dtype).flatten() for grad in grads])
            X = pieces.from_owners(orthogonalize(pieces.to_owners(mine), factor)).float()
            flat = X.split([weight.numel() for weight in weights])
            moves = [x.view_as(weight) for x, weight in zip(flat, weights, strict=True)]
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, moves)


def make_optimizer(cfg: TrainConfig, machine: Machine, model: GPT) -> torch.optim.Optimizer:
    """Return the optimizer that the settings ask for."""
    groups = model.param_groups(cfg.weight_decay)
    scale = {"embeddings": cfg.embed_lr, "vectors": cfg.vector_lr}
    for group in groups:
        group["scale"] = scale.get(group["name"], 1.0)
    if cfg.optimizer == "adafactor":
        # foreach=True, its default on a GPU, would hold a copy of all weights.
        return torch.optim.Adafactor(groups, lr=cfg.lr, foreach=False)
    # A fused AdamW skips a bad step by itself if found_inf is set (take_step). The one for mps
    # ignores found_inf (torch 2.13), so there AdamW is not fused.
    fused = machine.device.type in ("cuda", "cpu")
    betas = (cfg.beta1, cfg.beta2)
    if cfg.optimizer == "muon":
        dtype = torch.bfloat16 if machine.dtype == torch.bfloat16 else torch.float32
        return Muon(groups, cfg.lr, betas, cfg.momentum, dtype, fused)
    return torch.optim.AdamW(groups, cfg.lr, betas, fused=fused)
