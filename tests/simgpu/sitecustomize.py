"""What Python does first in each process on simulated GPUs: it makes up numbers that come back.

A kernel of a simulated GPU computes nothing, so a number that is read from it is whatever the
memory held. Where one number or a few are read, they may decide what happens next, so sensible ones
are made up. The programs themselves know nothing of that.
"""

import sys

import torch


def made_up(x: torch.Tensor) -> torch.Tensor:
    """Return ones; of three numbers, the last is 0.

    The numbers of a step are its loss, the norm of its gradient, and whether a signal has come.
    """
    x = torch.ones(x.shape, dtype=x.dtype, device="cpu")
    if x.numel() == 3 and x.is_floating_point():
        x.view(-1)[2] = 0
    return x


def reading(name: str):
    real = getattr(torch.Tensor, name)
    return lambda x: real(made_up(x) if x.is_cuda else x)


for name in ("item", "__float__", "__bool__", "__int__"):
    setattr(torch.Tensor, name, reading(name))


def tolist(x: torch.Tensor, real=torch.Tensor.tolist):
    if not (x.is_cuda or x.is_pinned()):  # a GPU copies to pinned memory, if the host does not wait
        return real(x)
    if sys._getframe(1).f_code.co_name == "generate":
        return [1.0, 0.0]  # the sum of the logits is finite, and the texts have not ended
    return real(made_up(x))


torch.Tensor.tolist = tolist
torch.cuda.Event.elapsed_time = lambda begin, end: 1.0
torch.backends.cuda.enable_cudnn_sdp(False)  # the simulation has no cuDNN
# The simulation refuses parts of different sizes, some of them empty.
torch.distributed.all_to_all_single = lambda output, *args, **options: None
