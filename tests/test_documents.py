"""Attention within documents, windows that are packed with them, and losses that weigh them."""

import json
import os
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, call, metrics, torchrun, train_tiny
from test_model import ODD, make

import prepare
import sample
import train
from hardware import kernels
from hardware.disk import file_sha256
from hardware.kernels import Pieces, document_mask
from model import GPT
from text.dataset import open_datasets
from text.packing import best_fit, pack
from text.windows import open_windows, train_loader
from training.evaluate import evaluate
from training.huggingface import from_pretrained
from training.settings import TrainConfig, model_config
from training.step import to_batch

EOS = 299
LENGTHS = (7, 30, 1, 90, 300, 2, 260)  # of documents, in tokens; 256 tokens make a piece


def text_of_documents(seed: int = 0) -> torch.Tensor:
    """Return documents of LENGTHS, each behind its eos, and the end of one before them: (1, T)."""
    draw = np.random.default_rng(seed)
    texts = [draw.integers(0, EOS, n).tolist() for n in LENGTHS]
    ids = draw.integers(0, EOS, 5).tolist()
    for text in texts:
        ids += [EOS, *text]
    return torch.tensor([ids])


def alone(ids: torch.Tensor) -> list[slice]:
    """Return where the documents of ids (1, T) are."""
    edges = [0, *torch.nonzero(ids[0] == EOS).flatten().tolist(), ids.size(1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def all_logits(model: GPT, ids: torch.Tensor, eos_id: int | None) -> torch.Tensor:
    """Return the logits of all positions, (B, T, padded V)."""
    model.loss = lambda x, *_: model.logits(x)
    with torch.no_grad():
        return model(ids, ids, None, eos_id)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_a_masked_window_is_its_documents_run_alone(name, compiled):
    """Loss and gradients are equal, with a weight for each token."""
    ids = text_of_documents()
    model = make(name, "xavier", block_size=ids.size(1), n_layer=2).train()
    targets = ids.roll(-1, 1)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    forward = torch.compile(model, dynamic=False) if compiled else model
    loss = forward(ids, targets, weights, EOS)
    loss.backward()
    masked = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parts = [(ids[:, d], targets[:, d], weights[:, d]) for d in alone(ids)]
    of_parts = sum(model(*part, reduction="sum") for part in parts) / ids.numel()
    of_parts.backward()
    torch.testing.assert_close(loss, of_parts)
    for ours, p in zip(masked, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, atol=3e-6 * p.grad.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("name", ODD)
def test_each_logit_of_a_masked_window_is_that_of_its_document_alone(name):
    ids = text_of_documents(1)
    model = make(name, "xavier", block_size=ids.size(1))
    masked = all_logits(model, ids, EOS)
    for document in alone(ids):
        of_document = all_logits(model, ids[:, document], None)
        torch.testing.assert_close(masked[:, document], of_document, atol=1e-5, rtol=1e-4)


def test_what_stands_in_another_document_changes_nothing():
    ids = text_of_documents()
    model = make("qwen3", "xavier", block_size=ids.size(1))
    third = alone(ids)[2]
    changed = ids.clone()
    changed[:, third.start + 1 : third.stop] = 0
    a, b = (all_logits(model, x, EOS) for x in (ids, changed))
    torch.testing.assert_close(a[:, third.stop :], b[:, third.stop :], rtol=0, atol=0)
    assert not torch.allclose(a[:, third], b[:, third])


class OnGPU(torch.Tensor):
    """Numbers that say that they are on a GPU, to reach the code for it."""

    is_cpu = False
    is_cuda = True


BEGINS = torch.tensor([[0, 0, 2, 2, 2], [0, 1, 1, 1, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mask_on_a_gpu_is_made_once_in_the_dtype_of_the_queries(dtype):
    """Each layer would make one of a mask of True and False, and keep it for the backward pass."""
    mask = make("llama").document_mask(BEGINS.as_subclass(OnGPU), dtype)
    place = torch.arange(5)
    same = BEGINS[:, :, None] == BEGINS[:, None, :]
    expected = (same & (place[:, None] >= place[None, :])).float()
    assert mask.dtype == dtype and mask.shape == (2, 1, 5, 5)
    assert torch.equal(mask.float().exp()[:, 0].as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize(
    "head_dim, dropout, compiled, capability, flex",
    [
        (16, 0.0, True, (8, 0), True),
        (8, 0.0, True, (9, 0), False),  # FlexAttention refuses such heads
        (64, 0.1, True, (9, 0), False),
        (64, 0.0, False, (9, 0), False),
        (64, 0.0, True, (7, 0), False),
    ],
)
def test_flex_attention_is_taken_where_it_runs(
    monkeypatch, head_dim, dropout, compiled, capability, flex
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "block_mask", lambda: lambda *args: "flex")
    model = make("llama", head_dim=head_dim, dropout=dropout)
    begins = BEGINS.as_subclass(OnGPU)
    mask = document_mask(model.train(), begins, torch.bfloat16, compiled)
    assert isinstance(mask, str) == flex
    if dropout:  # an evaluation has none
        assert isinstance(document_mask(model.eval(), begins, torch.bfloat16, compiled), str)


def test_pieces_cover_each_token_once_and_only_short_documents_share_one():
    place = torch.arange(1024)
    ids = torch.zeros(3, 1024, dtype=torch.long)
    ids[0, ::50] = 1  # many short documents
    ids[1, 500] = 1
    begins = torch.where(ids == 1, place, 0).cummax(1).values
    pieces = Pieces(begins)
    assert sum(count * length for count, length in pieces.sizes) == ids.numel()
    assert [mask is None for mask in pieces.masks] == [False] * 4 + [True] * 3
    assert pieces.sizes[-3:] == [(1, 500), (1, 524), (1, 1024)]


# -- packing --


def corpus_of(lengths: list[int]) -> np.ndarray:
    """Return a split with documents of these lengths, eos included; each token is another number,
    except for eos, which is 0."""
    tokens = np.arange(1, sum(lengths) + 1)
    tokens[np.cumsum(lengths) - 1] = 0
    return tokens


@pytest.fixture
def packed_set(tmp_path) -> Path:
    """A data set whose tokens count up, so that a test can see where each of them went."""
    draw = np.random.default_rng(3)
    lengths = [1, 64, 65, 129, 200, 2, *draw.integers(1, 150, 400).tolist()]
    tokens = corpus_of(lengths).astype("<u4")
    folder = tmp_path / "data" / "counted"
    folder.mkdir(parents=True)
    tokens.tofile(folder / "train.bin")
    (folder / "lengths.json").write_text(json.dumps(lengths))
    return folder


def open_packed(folder: Path, T: int, loss_per: str = "token"):
    """Open the windows of packed_set."""
    from text.dataset import DataSet

    tokens = np.fromfile(folder / "train.bin", "<u4")
    split = {"tokens": len(tokens), "sha256": file_sha256(folder / "train.bin")}
    meta = {"dtype": "uint32", "eos_id": 0, "vocab_size": len(tokens) + 1}
    data = DataSet(folder.name, folder, meta | {"splits": {"train": split}}, Fraction(1))
    return open_windows(data, "train", T, documents="pack", loss_per=loss_per)


@pytest.mark.parametrize("T", [1, 2, 16, 64, 1000])
def test_packed_windows_train_on_each_token_once_and_cut_no_document_that_fits(packed_set, T):
    windows = open_packed(packed_set, T)
    tokens = windows.tokens
    lengths = json.loads((packed_set / "lengths.json").read_text())
    ends = np.cumsum(lengths) - 1
    seen = Counter()
    found = []  # the targets of each window
    for window in range(windows.n_windows):
        row = windows.row(window)
        targets = windows.targets(window)
        assert row.shape == (T + 1,) and targets.shape == (T,)
        known = targets >= 0
        assert (row[1:][known] == tokens[targets[known]]).all()
        # The input before a target is the token before it, or an eos where a document begins.
        before = np.where(targets > 0, tokens[targets - 1], 0)
        assert (row[:-1][known] == before[known]).all()
        assert (row[1:][~known] == -1).sum() == (row == -1).sum()
        seen.update(targets[known].tolist())
        found.append(set(targets[known].tolist()))
    assert seen == Counter(range(len(tokens)))
    for length, end in zip(lengths, ends, strict=True):
        if length <= T:
            whole = set(range(end - length + 1, end + 1))
            assert any(whole <= targets for targets in found), (length, end)


def test_packing_fills_the_windows_and_is_best_fit():
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.geometric(0.004, 20_000), 512)
    bins, count = best_fit(lengths, 512)
    assert np.bincount(bins, lengths).max() <= 512
    assert lengths.sum() / (count * 512) > 0.97
    # 7 goes first, then 6. 4 fits behind 6 exactly; 3 fits behind 7, where 1 would be left.
    assert best_fit(np.array([3, 7, 4, 6]), 10)[0].tolist() == [0, 0, 1, 1]


def test_the_plan_does_not_depend_on_the_stretches_that_are_read(packed_set, monkeypatch):
    before = open_packed(packed_set, 64)
    pieces, bounds = before.pieces.tolist(), before.bounds.tolist()
    monkeypatch.setattr("text.packing.STRETCH", 17)
    after = open_packed(packed_set, 64)
    assert (after.pieces.tolist(), after.bounds.tolist()) == (pieces, bounds)


def test_documents_that_are_packed_in_groups_are_all_there(packed_set, monkeypatch):
    monkeypatch.setattr("text.packing.TOGETHER", 50)
    windows = open_packed(packed_set, 64)
    targets = np.concatenate([windows.targets(i) for i in range(windows.n_windows)])
    assert sorted(targets[targets >= 0]) == list(range(len(windows.tokens)))


def test_pack_handles_a_split_with_one_long_document():
    (windows, one_each), (tail, alone) = pack(np.array([999]), 0, 64)
    assert windows["count"].tolist() == [64] + [65] * 14 and one_each.tolist() == [1] * 15
    assert tail["count"].tolist() == [41] and alone.tolist() == [1]  # 15 x 64 + 40 = 1000 targets


def test_long_documents_are_cut_in_stretches_that_bound_the_memory(packed_set, monkeypatch):
    before = open_packed(packed_set, 16).pieces.tolist()
    monkeypatch.setattr("text.packing.AT_ONCE", 7)
    assert open_packed(packed_set, 16).pieces.tolist() == before


@pytest.mark.parametrize("split", ["train", "val"])
def test_no_windows_are_planned_of_data_that_is_damaged(tiny_data, tmp_path, refuses, split):
    """The data is repaired afterwards. Nothing remembers what it was in between."""
    data = tmp_path / "data"
    shutil.copytree(tiny_data / "tiny", data / "tiny")
    path = data / "tiny" / f"{split}.bin"
    good = path.read_bytes()
    ids = np.frombuffer(good, "<u2").copy()
    eos_id = open_datasets("tiny", data)[0].meta["eos_id"]
    ids[ids == eos_id] = eos_id + 1  # no document ends any more
    path.write_bytes(ids.tobytes())
    options = [f"--data_dir={data}", "--documents=pack"]
    error = refuses(train.main, *TINY, *options, f"--out_dir={tmp_path / 'bad'}")
    assert f"{split}.bin" in error and "run prepare.py again" in error
    path.write_bytes(good)
    run = train_tiny(data, tmp_path / "good", "--documents=pack")
    want = train_tiny(tiny_data, tmp_path / "want", "--documents=pack")
    for key in ("loss", "val_loss", "val_document_loss"):
        assert metrics(run, key) == metrics(want, key)


def test_a_data_set_in_a_folder_below_and_windows_of_one_token_train(tiny_data, tmp_path):
    shutil.copytree(tiny_data / "tiny", tmp_path / "data" / "sub" / "tiny")
    options = ["--dataset=sub/tiny", "--block_size=1", "--documents=pack", "--batch_tokens=4"]
    options += ["--eval_tokens=64", "--max_steps=2"]
    train_tiny(tmp_path / "data", tmp_path, *options)
    assert os.listdir(tmp_path / "data") == ["sub"]
    assert os.listdir(tmp_path / "data" / "sub") == ["tiny"]


def test_an_evaluation_inside_the_data_set_writes_nothing_into_it(
    tiny_data, tmp_path, monkeypatch, capsys
):
    run = train_tiny(tiny_data, tmp_path)
    shutil.copytree(tiny_data / "tiny", tmp_path / "data" / "tiny")
    before = sorted(os.listdir(tmp_path / "data" / "tiny"))
    monkeypatch.chdir(tmp_path / "data" / "tiny")
    call(sample.main, f"--ckpt={run}", "--eval=.", "--device=cpu")
    assert sorted(os.listdir(".")) == before


# -- weights --


@pytest.mark.parametrize("documents", ["stream", "pack"])
def test_each_document_counts_the_same(packed_set, documents):
    windows = open_packed(packed_set, 64, "document")
    lengths = json.loads((packed_set / "lengths.json").read_text())
    total = np.zeros(len(windows.tokens))
    for window in range(windows.n_windows):
        targets = windows.targets(window)
        np.add.at(total, targets[targets >= 0], windows.weights(window)[targets >= 0])
    of_documents = np.add.reduceat(total, np.cumsum([0, *lengths[:-1]]))
    np.testing.assert_allclose(of_documents, np.mean(lengths), rtol=1e-5)


def test_the_loss_of_a_step_is_the_weighted_mean_over_all_micro_steps(tiny_data, tmp_path):
    """Computed here from the model and the windows of the first step."""
    options = ["--documents=pack", "--loss_per=document", "--max_steps=1", "--seed=5"]
    run = train_tiny(tiny_data, tmp_path, *options)
    loader = train_loader(open_datasets("tiny", tiny_data), 32, 5, "pack", "document")
    rows = loader.rows(loader.starts(0, 8))
    settings = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["settings"]
    cfg = TrainConfig(**{k: v for k, v in settings.items() if hasattr(TrainConfig, k)})
    torch.manual_seed(5)
    model = GPT(model_config(cfg, 400))
    model.init_weights(cfg.init)
    x, y, weights, eos_id = to_batch(rows, torch.device("cpu"))
    total = model(x, y, weights, eos_id, reduction="sum")
    assert metrics(run, "loss")[1] == pytest.approx((total / weights.sum()).item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--documents=mask"], ["--documents=pack"]])
def test_two_ranks_train_as_one_does(tiny_data, tmp_path, options):
    import warm

    both = [*options, "--loss_per=document", "--grad_clip=0"]
    one = train_tiny(tiny_data, tmp_path / "one", *both)
    two = torchrun(2, tiny_data, tmp_path / "two", *both, run=warm.run)
    for key in ("loss", "grad_norm", "val_loss", "val_document_loss"):
        for step, value in metrics(one, key).items():
            assert metrics(two, key)[step] == pytest.approx(value, rel=1e-4), (key, step)


# -- runs --


@pytest.mark.parametrize("documents", ["mask", "pack"])
def test_a_run_within_documents_learns_resumes_to_the_bit_and_can_be_sampled(
    tiny_data, tmp_path, documents, capsys
):
    options = [f"--documents={documents}", "--loss_per=document"]
    straight = train_tiny(tiny_data, tmp_path / "straight", *options)
    halves = tmp_path / "halves"
    train_tiny(tiny_data, halves, *options, "--max_steps=4", "--schedule=constant")
    changed = ["--init_from=resume", "--max_steps=8"]
    resumed = train_tiny(tiny_data, halves, *options, *changed, "--schedule=constant")
    again = train_tiny(tiny_data, tmp_path / "again", *options, "--schedule=constant")
    assert metrics(resumed, "loss") == metrics(again, "loss")
    weights = [run / "ckpt" / "step_00000008" / "model.safetensors" for run in (resumed, again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    losses = metrics(straight, "val_document_loss")
    assert losses[8] < losses[4]
    capsys.readouterr()
    call(sample.main, f"--ckpt={resumed}", "--max_new_tokens=4", "--device=cpu")
    assert capsys.readouterr().out


def test_the_model_folder_is_the_same_whatever_documents_is(tiny_data, tmp_path):
    """Nothing of it is in the model: its config.json and the files beside it are equal."""
    folders = []
    for documents in ("stream", "pack"):
        run = train_tiny(tiny_data, tmp_path / documents, f"--documents={documents}")
        folders.append(run / "ckpt" / "step_00000008")
    a, b = folders
    assert {p.name for p in a.iterdir()} == {p.name for p in b.iterdir()}
    assert (a / "config.json").read_bytes() == (b / "config.json").read_bytes()


def test_every_run_is_evaluated_on_the_same_windows_and_by_document(tiny_data, tmp_path):
    """The loss by document is that of each document alone, behind an eos, as far as it fits."""
    T = 128
    options = ["--eval_tokens=0", f"--block_size={T}", "--batch_tokens=512", "--documents=mask"]
    run = train_tiny(tiny_data, tmp_path, *options)
    data = open_datasets("tiny", tiny_data)[0]
    model = from_pretrained(run / "ckpt" / "step_00000008").eval()
    machine = train.start("cpu", "float32")
    stream = open_windows(data, "val", T)
    loss = evaluate(model, stream, 0, 4, machine)
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
    by_document = metrics(run, "val_document_loss")[8]
    assert by_document == pytest.approx(total / len(tokens), rel=1e-5)


def test_inspect_shows_the_documents_of_a_packed_step(tiny_data, tmp_path, capsys):
    run = train_tiny(tiny_data, tmp_path, "--documents=pack")
    call(prepare.main, "--inspect", str(run), "--step=2")
    said = capsys.readouterr().out
    assert "train.bin, tokens" in said and "<eos>" in said


def test_a_mask_does_not_look_at_the_padding():
    """A window with padding has the loss of the same window without it."""
    model = make("llama", "xavier", block_size=64)
    ids = torch.full((1, 65), -1)
    ids[0, :21] = torch.tensor([EOS, *range(10), EOS, *range(20, 28), EOS])
    from text.windows import Rows

    weights = (ids[:, 1:] >= 0).float()
    rows = Rows(ids.numpy(), weights.numpy(), EOS)
    x, y, weights, eos_id = to_batch(rows, torch.device("cpu"))
    padded = model(x, y, weights, eos_id, reduction="sum")
    torch.testing.assert_close(padded, model(ids[:, :20], ids[:, 1:21], None, EOS, reduction="sum"))
