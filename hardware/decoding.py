"""Text generation on CUDA: one step is recorded as a CUDA graph, and replayed for each token.

A replay launches the few hundred kernels of a step at once. Python would launch them one by one,
which is expected to take longer than the kernels themselves. With the graph, a step of 32 texts of
a 124M model took 1.35 ms on an H100; without it, it was not measured.
"""

import math

import torch
from torch import Tensor

from model import GPT, KVCache


def record_decoding(model: GPT) -> None:
    """Let model.generate() record its step, if the model is on CUDA. A graph takes memory.

    From then on, this process does not use cuDNN's attention kernel. It is faster, but took up to
    0.4 s for the first text of each length (bench/LOG.md).
    """
    if model.wte.weight.is_cuda:
        torch.backends.cuda.enable_cudnn_sdp(False)
        model.decoder = RecordedStep


class RecordedCache(KVCache):
    """A KVCache in which the position of the next token is a tensor, `position` (1,).

    A graph keeps each number that came from Python, such as `length`, at its recorded value, and
    reads and writes the same memory in every replay. So attention covers all positions, with a mask
    (1, 1, 1, capacity) that is -inf where no token is stored yet.
    """

    def __init__(self, k: Tensor, v: Tensor, position: Tensor):
        """k, v: of a KVCache. The two caches share this memory."""
        self.k = k
        self.v = v
        self.position = position
        ahead = torch.arange(k.size(3), device=position.device) > position  # (capacity,)
        mask = torch.zeros_like(ahead, dtype=k.dtype).masked_fill(ahead, -math.inf)
        self.mask = mask[None, None, None]

    def positions(self, T: int) -> Tensor:
        return self.position

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, nkv, 1, hs) at the position; return all (B, nkv, capacity, hs)."""
        all_k = self.k[layer].index_copy_(2, self.position, k)
        all_v = self.v[layer].index_copy_(2, self.position, v)
        return all_k, all_v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v, self.mask)


class RecordedStep:
    """Computes the logits (B, V) after one more token (B, 1): each call replays one graph."""

    def __init__(self, model: GPT, cache: KVCache):
        device = cache.k.device
        self.cache = cache
        self.token = torch.zeros(cache.k.size(1), 1, dtype=torch.long, device=device)
        # The first step writes here, a free position: the cache may hold a conversation.
        self.position = torch.full((1,), cache.length, device=device)
        # Each graph has a stream of its own: when torch frees a graph, it also frees the workspace
        # that cuBLAS has on the graph's stream.
        self.graph = torch.cuda.CUDAGraph()
        graph_stream = torch.cuda.Stream(device)
        usual_stream = torch.cuda.current_stream(device)
        graph_stream.wait_stream(usual_stream)
        with torch.cuda.stream(graph_stream):
            self.step(model)  # makes one-time preparations, which cannot be recorded
        usual_stream.wait_stream(graph_stream)
        with torch.cuda.graph(self.graph, stream=graph_stream):
            self.logits = self.step(model)

    def step(self, model: GPT) -> Tensor:
        cache = RecordedCache(self.cache.k, self.cache.v, self.position)
        return model(self.token, cache=cache)

    def __call__(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.position.fill_(self.cache.length)
        self.graph.replay()
        return self.logits
