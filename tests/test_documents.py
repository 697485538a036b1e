"""Attention within documents, windows that are packed with them, and losses that weigh them."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CPU, metrics, resumes, train_tiny
from test_model import ODD, make

import prepare
import sample
from hardware.disk import file_sha256
from hardware.kernels import pick_kernels
from model import GPT
from text.dataset import DataSet, open_datasets, open_windows, train_loader
from text.packing import best_fit
from training.batches import to_batch
from training.evaluate import evaluate
from training.huggingface import from_pretrained
from training.settings import TrainConfig, model_config

EOS = 299
LENGTHS = (7, 30, 1, 90, 300, 2, 260)  # of documents, in tokens; 256 tokens make a span


def text_of_documents(seed: int = 0) -> torch.Tensor:
    """Return documents of LENGTHS, each after its eos, and the end of one before them: (1, T)."""
    draw = np.random.default_rng(seed)
    texts = [draw.integers(0, EOS, n).tolist() for n in LENGTHS]
    ids = draw.integers(0, EOS, 5).tolist()
    for text in texts:
        ids += [EOS, *text]
    return torch.tensor([ids])


COMPILED = [pytest.param(name, True, marks=pytest.mark.slow) for name in ("gpt2", "qwen3")]


@pytest.mark.parametrize("name, compiled", [*((name, False) for name in ODD), *COMPILED])
def test_a_masked_window_is_its_documents_run_alone(name, compiled):
    """Loss and gradients are equal, with a weight for each token."""
    ids = text_of_documents()
    model = make(name, "xavier", block_size=ids.size(1), n_layer=1 if compiled else 2).train()
    model.use(pick_kernels(CPU.device, compiled))
    targets = ids.roll(-1, 1)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    forward = torch.compile(model, dynamic=False) if compiled else model
    loss = forward(ids, targets, weights, EOS)
    loss.backward()
    masked = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    edges = [0, *torch.nonzero(ids[0] == EOS).flatten().tolist(), ids.size(1)]
    documents = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    parts = [(ids[:, d], targets[:, d], weights[:, d]) for d in documents]
    of_parts = sum(model(*part, reduction="sum") for part in parts) / ids.numel()
    of_parts.backward()
    torch.testing.assert_close(loss, of_parts)
    for ours, p in zip(masked, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, atol=3e-6 * p.grad.abs().max().item(), rtol=1e-4)
    if compiled:  # documents that begin elsewhere need no other code
        with torch._dynamo.config.patch(error_on_recompile=True):
            forward(ids.flip(1), targets, weights, EOS)


# -- packing --


@pytest.fixture
def packed_set(tmp_path) -> Path:
    """A data set whose tokens count up, so that a test can see where each of them went.

    0 is the eos.
    """
    draw = np.random.default_rng(3)
    lengths = [1, 64, 65, 129, 200, 2, *draw.integers(1, 150, 150)]  # of documents, with their eos
    tokens = np.arange(1, sum(lengths) + 1, dtype="<u4")
    tokens[np.cumsum(lengths) - 1] = 0
    tokens.tofile(tmp_path / "train.bin")
    return tmp_path


def open_packed(folder: Path, T: int, documents: str = "pack", loss_per: str = "token"):
    """Open the windows of packed_set."""
    tokens = np.fromfile(folder / "train.bin", "<u4")
    split = {"tokens": len(tokens), "sha256": file_sha256(folder / "train.bin")}
    meta = {"dtype": "uint32", "eos_id": 0, "vocab_size": len(tokens) + 1}
    data = DataSet(folder.name, folder, meta | {"splits": {"train": split}}, Fraction(1))
    return open_windows(data, "train", T, documents=documents, loss_per=loss_per)


@pytest.mark.parametrize("T", [1, 16, 64, 1000])
def test_packed_windows_learn_each_token_once(packed_set, T, monkeypatch):
    monkeypatch.setattr("text.packing.GROUP_SIZE", 50)
    monkeypatch.setattr("text.packing.CHUNK", 1000)
    windows = open_packed(packed_set, T)
    tokens = windows.tokens
    trained = []  # the targets of each window
    for window in range(windows.n_windows):
        row = windows.row(window)
        targets = windows.targets(window)
        assert row.shape == (T + 1,) and targets.shape == (T,)
        learned = targets >= 0
        assert (row[1:][learned] == tokens[targets[learned]]).all()
        # The input before a target is the token before it, or an eos where a document begins.
        inputs = np.where(targets > 0, tokens[targets - 1], 0)
        assert (row[:-1][learned] == inputs[learned]).all()
        assert (row[1:][~learned] == -1).sum() == (row == -1).sum()
        trained.append(set(targets[learned].tolist()))
    assert Counter(token for targets in trained for token in targets) == Counter(range(len(tokens)))
    ends = np.flatnonzero(tokens == 0) + 1
    for start, end in zip([0, *ends], ends, strict=False):
        document = set(range(start, end))
        assert len(document) > T or any(document <= targets for targets in trained), (start, end)


def test_packing_fills_the_windows_and_is_best_fit():
    lengths = np.minimum(np.random.default_rng(0).geometric(0.004, 20_000), 512)
    bins, count = best_fit(lengths, 512)
    assert np.bincount(bins, lengths).max() <= 512
    assert lengths.sum() / (count * 512) > 0.97
    # 7 goes first, then 6. 4 fits after 6 exactly; 3 fits after 7, where 1 would be left.
    assert best_fit(np.array([3, 7, 4, 6]), 10)[0].tolist() == [0, 0, 1, 1]


# -- weights --


@pytest.mark.parametrize("documents", ["stream", "pack", "pad"])
def test_each_document_counts_the_same(packed_set, documents):
    windows = open_packed(packed_set, 64, documents, "document")
    total = np.zeros(len(windows.tokens))
    for start in windows.fixed_starts(0):
        np.add.at(total, windows.targets(start), windows.weights(start))
    ends = np.flatnonzero(windows.tokens == 0) + 1
    of_documents = np.add.reduceat(total, [0, *ends[:-1]])
    if documents == "stream":  # its windows lack the first token, and up to T tokens at the end
        of_documents = of_documents[1 : np.searchsorted(ends, ends[-1] - 64)]
    # With pad, what does not fit into a window is left out.
    mean = (of_documents.sum() if documents == "pad" else len(windows.tokens)) / len(ends)
    np.testing.assert_allclose(of_documents, mean, rtol=1e-5)


def test_the_loss_of_a_step_is_the_weighted_mean(tiny_data, tmp_path):
    """Computed here from the model and the windows of the first step."""
    options = ["--documents=pack", "--loss_per=document", "--max_steps=1", "--seed=5"]
    run = train_tiny(tiny_data, tmp_path, *options)
    loader = train_loader(open_datasets("tiny", tiny_data), 32, 5, "pack", "document")
    rows = loader.rows(loader.starts(0, 8))
    settings = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["settings"]
    cfg = TrainConfig(**{k: v for k, v in settings.items() if hasattr(TrainConfig, k)})
    torch.manual_seed(5)
    model = GPT(model_config(cfg, 400), cfg.init)
    x, y, weights, eos_id = to_batch(rows, torch.device("cpu"))
    total = model(x, y, weights, eos_id, reduction="sum")
    assert metrics(run, "loss")[1] == pytest.approx((total / weights.sum()).item(), rel=1e-5)


# -- runs --


def test_a_run_on_documents_resumes(tiny_data, tmp_path, prints):
    run = resumes(tiny_data, tmp_path, "--documents=pack", "--loss_per=document")
    assert prints(sample.main, f"--ckpt={run}", "--max_new_tokens=4", "--device=cpu")
    assert "<eos>" in prints(prepare.main, "--inspect", run, "--step=2")


def test_runs_are_evaluated_on_the_same_windows(tiny_data, tmp_path):
    """The loss by document is that of each document alone, after an eos, as far as it fits."""
    T = 128
    options = ["--eval_tokens=0", f"--block_size={T}", "--batch_tokens=512", "--documents=mask"]
    run = train_tiny(tiny_data, tmp_path, *options)
    data = open_datasets("tiny", tiny_data)[0]
    model = from_pretrained(run / "ckpt" / "step_00000008").eval()
    stream = open_windows(data, "val", T)
    loss = evaluate(model, stream, 0, 4, CPU)
    assert metrics(run, "val_loss")[8] == pytest.approx(loss, rel=1e-5)

    eos_id = data.meta["eos_id"]
    tokens = stream.tokens.astype(np.int64)
    total = 0.0
    begin = 0
    for end in np.flatnonzero(tokens == eos_id):
        inputs = torch.from_numpy(np.append(eos_id, tokens[begin:end]))
        targets = torch.from_numpy(tokens[begin : end + 1].copy())
        for at in range(0, len(inputs), T):
            x, y = inputs[None, at : at + T], targets[None, at : at + T]
            if 0 < at and len(inputs) - at < T:  # a tail, which has an eos before it
                x = torch.cat([torch.tensor([[eos_id]]), x], 1)
                y = torch.cat([torch.tensor([[-1]]), y], 1)
            with torch.no_grad():
                total += model(x, y, reduction="sum").item()
        begin = end + 1
    assert metrics(run, "val_document_loss")[8] == pytest.approx(total / len(tokens), rel=1e-5)
