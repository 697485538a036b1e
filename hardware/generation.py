"""Text generation: the loop over tokens, the choice of a token, and the cache of keys and values.

    for tokens in generate(model, idx, 100):  # (B,): the next token of each text

On CUDA, one step of the loop can be recorded as a CUDA graph, which is replayed for each token. A
replay launches the few hundred kernels of a step at once. Python would launch them one by one,
which is expected to take longer than the kernels themselves. With the graph, a step of 32 texts of
a 124M model took 1.35 ms on an H100; without it, it was not measured.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from model import GPT, GPTConfig, round_up


@torch.inference_mode()
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_id: int | None = None,
    cache: "KVCache | None" = None,
    record: bool = False,
) -> Iterator[Tensor]:
    """Continue the texts idx (B, T). Each step yields the next token of every text, (B,).

    It ends after max_new_tokens steps, or when every text has reached eos_id. A text that has
    reached it yields eos_id from then on. sample_token explains temperature, top_k and top_p.

    cache: of a conversation, with capacity block_size, so that only new tokens go through the
    model. It holds the first cache.length tokens of idx, and not the last one. In the end it
    holds all tokens except the last one that was yielded.

    record: on CUDA, record one step, and replay it. The graph takes memory. From then on, this
    process does not use cuDNN's attention kernel. It is faster, but took up to 0.4 s for the first
    text of each length (bench/LOG.md).

    When block_size is full, the older half of the context is dropped, and the newer half goes
    through the model again. All other steps compute only one token.

    Raises ArithmeticError if the logits are not finite.
    """
    c = model.config
    idx = idx[:, -c.block_size :]
    if cache is None:
        capacity = min(c.block_size, idx.size(1) + max_new_tokens)
        cache = KVCache(c, idx.size(0), capacity, model.wte.weight)
    decode = None
    if record and idx.is_cuda:
        torch.backends.cuda.enable_cudnn_sdp(False)
        decode = RecordedStep(model, cache)
    ended = torch.zeros(idx.size(0), dtype=torch.bool, device=idx.device)
    for _ in range(max_new_tokens):
        if idx.size(1) > c.block_size:
            idx = idx[:, -max(1, c.block_size // 2) :]
            cache.length = 0
        new = idx[:, cache.length :]  # a prompt, or the newest token (B, 1)
        if decode and new.size(1) == 1:
            logits = decode(new)  # (B, V)
        else:
            logits = model(new, cache=cache)  # (B, V)
        cache.length = idx.size(1)
        token = sample_token(logits, temperature, top_k, top_p)  # (B,)
        if eos_id is not None:
            token = torch.where(ended, eos_id, token)
            ended = ended | (token == eos_id)
        idx = torch.cat((idx, token[:, None]), dim=1)  # (B, T + 1)
        # One copy brings both numbers from the device: the CPU waits once per token (with
        # top_p, sample_token waits once more).
        total, all_ended = torch.stack((logits.sum(), ended.all())).tolist()
        if not math.isfinite(total):
            raise ArithmeticError("the model's output is not finite: are its weights damaged?")
        yield token
        if all_ended:
            return


def sample_token(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Draw a token id (B,) from softmax(logits / temperature), for each row of logits (B, V).

    temperature 0: take the likeliest token. top_k > 0: draw from the top_k likeliest tokens only.
    top_p < 1: draw from the fewest of the likeliest tokens whose probabilities add up to top_p
    (nucleus sampling).
    """
    if temperature < 1e-5:  # 0, or so low that logits / temperature may overflow
        return logits.argmax(dim=-1)
    # The sums of V small numbers need fp64, which mps does not have.
    exact = torch.float32 if logits.device.type == "mps" else torch.float64
    ids = None  # the token of each column; None: column i is token i
    if 0 < top_k < logits.size(-1):
        logits, ids = logits.topk(top_k)  # (B, top_k) each, the likeliest first
    probs = (logits / temperature).softmax(-1)  # (B, V) or (B, top_k)
    if ids is None and top_p < 1.0:
        # The 1,024 likeliest nearly always reach top_p. Sorting all V takes six times as long.
        likeliest = probs.topk(min(1024, probs.size(-1)))
        enough = likeliest.values.sum(-1, dtype=exact) >= top_p  # (B,)
        if enough.all():
            probs, ids = likeliest
        else:
            probs, ids = probs.sort(descending=True)
            # topk and sort order equal numbers differently. A row that has enough keeps the order
            # of topk, so that its token does not depend on other rows.
            count = likeliest.indices.size(1)
            probs[enough, :count], ids[enough, :count] = likeliest[0][enough], likeliest[1][enough]

    # Draw a number from [0, mass) and choose the first column whose cumulative sum is above it. On
    # a CPU, torch.multinomial takes several times as long (bench/LOG.md).
    sums = probs.cumsum(-1, dtype=exact)  # (B, columns)
    mass = sums[:, -1:]  # (B, 1)
    if top_p < 1.0:
        last = (sums < top_p).sum(-1, keepdim=True)  # the first column whose sum reaches top_p
        mass = sums.gather(1, last.clamp(max=probs.size(-1) - 1))
    drawn = torch.rand(mass.shape, dtype=exact, device=mass.device) * mass
    drawn = drawn.clamp(max=torch.nextafter(mass, mass - 1))  # the product may round up to mass
    chosen = torch.searchsorted(sums, drawn, right=True)  # (B, 1)
    if ids is not None:
        # If the logits are NaN, no sum is above the drawn number, and `chosen` is out of range.
        # Such an index stops a GPU with an error before generate() can report the NaN.
        chosen = ids.gather(1, chosen.clamp(max=ids.size(1) - 1))
    return chosen.squeeze(1)


class KVCache:
    """The keys and values of the tokens so far, so that only new tokens pass through the model.

    k and v, (n_layer, B, nkv, capacity, hs) each, are allocated once. They hold `length` tokens.
    Lowering `length` forgets the tokens after it.
    generate() raises it when the model has computed the keys and values of new tokens.
    """

    def __init__(self, c: GPTConfig, B: int, capacity: int, weight: Tensor):
        """capacity: in tokens. weight: of the model; the cache has its dtype and device."""
        shape = (2, c.n_layer, B, c.n_kv_head, round_up(capacity, 64), c.head_dim)  # 64 suits GPUs
        # Not torch.empty: it may contain NaN, and a masked NaN is still NaN.
        self.k, self.v = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.length = 0

    def positions(self, T: int) -> slice:
        """Return the positions of the next T tokens."""
        return slice(self.length, self.length + T)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, nkv, T, hs) to a layer's; return all its keys and values.

        They are (B, nkv, length + T, hs) each.
        """
        end = self.length + k.size(2)
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return attend() of the newest token alone, (B, nh, 1, hs). It sees all of k and v.

        There is a single query position, so the nh / nkv query heads that share a key/value head
        take the dimension of the positions. The keys and values need not be repeated.
        """
        B, nkv, _, hs = k.shape
        grouped = q.reshape(B, nkv, -1, hs)  # (B, nkv, nh / nkv, hs)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)


# --------------------------------------------------------------------------------------------------
# A step that is recorded once


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
