"""AdamW, Muon and Adafactor: what they compute, and that a run with each of them can be resumed."""

import math
import operator
from dataclasses import replace
from itertools import repeat

import pytest
import torch
from conftest import CPU, metrics, resumes, saved
from test_model import make

from train import take_step
from training import optimizer as optimizers
from training.batches import Batch
from training.optimizer import make_optimizer, orthogonalize
from training.plan import Progress
from training.schedule import momentum_at
from training.settings import OPTIMIZERS, TrainConfig

LR = {"adamw": 3e-3, "muon": 3e-3, "adafactor": 0.1}


def config(name: str, **more) -> TrainConfig:
    return TrainConfig(optimizer=name, lr=LR[name], max_steps=1, **more)


def trained(model, optimizer, scale=False, steps=1, grad_clip=1.0) -> float:
    """Take steps on four texts, always the same. Return the norm of the last gradient."""
    torch.manual_seed(1)
    rows = torch.randint(model.config.vocab_size, (4, 17))
    batches = repeat(Batch(rows[:, :-1], rows[:, 1:]))
    for _ in range(steps):
        scaler = torch.amp.GradScaler("cpu", enabled=scale)
        _, grad_norm, _ = take_step(model, optimizer, scaler, batches, 1, CPU, grad_clip).wait()
    return grad_norm


# -- Muon --


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, columns", [(8, 8), (16, 48), (48, 16), (64, 64), (1, 5)])
def test_muon_moves_a_matrix_along_all_its_directions(rows, columns, dtype):
    """By 0.2 to 1.9, however weak they are, down to 0.01 of the strongest."""
    torch.manual_seed(0)
    U, _, Vt = torch.linalg.svd(torch.randn(3, rows, columns), full_matrices=False)
    S = torch.logspace(0, -2, min(rows, columns)) * 1e-4
    moved = orthogonalize((U * S @ Vt).to(dtype)).float()
    strengths = torch.linalg.svdvals(moved)
    assert strengths.min() > 0.2 and strengths.max() < 1.9
    assert (torch.cosine_similarity(moved.flatten(1), (U @ Vt).flatten(1)) > 0.8).all()


@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-9, 1e-13, 1e-20])
def test_muon_of_rounding_errors_is_never_large(size):
    torch.manual_seed(0)
    moved = orthogonalize((size * torch.randn(2, 64, 128)).bfloat16()).float()
    assert torch.linalg.matrix_norm(moved, ord=2).max() < (2 if size else 1e-30)


def by_hand(weight, grad, mean, cfg, momentum):
    """One step of Muon for one matrix, as the papers write it."""
    mean = momentum * mean + (1 - momentum) * grad
    direction = momentum * mean + (1 - momentum) * grad
    X = orthogonalize(direction[None])[0]
    far = cfg.lr * 0.2 * math.sqrt(max(weight.shape))
    return weight * (1 - cfg.lr * cfg.weight_decay) - far * X, mean


@pytest.mark.parametrize("stack", [optimizers.STACK, 1])
def test_muon_moves_q_k_and_v_as_three_matrices_and_others_whole(stack, monkeypatch):
    """And a stack of matrices moves as each of them alone would."""
    monkeypatch.setattr(optimizers, "STACK", stack)
    cfg = config("muon")
    model = make("llama", n_embd=32, n_head=4, n_kv_head=2)
    optimizer = make_optimizer(cfg, CPU, model)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    mean = {k: torch.zeros_like(p) for k, p in before.items()}
    heads = [32, 16, 16]  # rows of q, k and v
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            if name.startswith("blocks") and p.dim() == 2:
                rows = heads if "qkv" in name else [p.size(0)]
                parts = [x.split(rows) for x in (before[name], grads[name], mean[name])]
                new = [by_hand(*part, cfg, 0.95) for part in zip(*parts, strict=True)]
                before[name], mean[name] = (torch.cat(x) for x in zip(*new, strict=True))
                torch.testing.assert_close(p.detach(), before[name], atol=1e-6, rtol=1e-5)


def test_muon_is_adamw_for_embeddings_head_norms_and_biases():
    models = [make("gpt2", tie_embeddings=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, name in zip(models, ("adamw", "muon"), strict=True):
        # The gradient of the first step alone: later ones depend on what the matrices did.
        trained(model, make_optimizer(config(name), CPU, model))
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        matrix = name.startswith("blocks") and p.dim() == 2
        assert torch.equal(p, q) != matrix, name


def test_muons_momentum_grows_during_its_warm_up(trains):
    cfg = config("muon", momentum=0.95)
    momenta = [momentum_at(step, 1000, cfg) for step in (0, 50, 100, 999)]
    assert momenta == pytest.approx([0.85, 0.9, 0.95, 0.95])
    state = torch.load(saved(trains("--optimizer=muon", "--max_steps=1")) / "train_state.pt")
    assert [group["muon_momentum"] for group in state["optimizer"]["param_groups"]] == [0.85] * 4


# -- all three --


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("change", [operator.mul, operator.add], ids=["gradient", "loss alone"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer, scale, change):
    """scale: with the GradScaler of fp16. An infinite constant leaves the gradient as it is."""
    model = make("qwen3")
    made = make_optimizer(config(optimizer), CPU, model)
    trained(model, made, scale, steps=2)

    def everything() -> list[torch.Tensor]:
        state = [t for s in made.state.values() for t in s.values()]
        return [t.detach().clone() for t in (*model.parameters(), *state)]

    before = everything()
    infinite = model.register_forward_hook(lambda module, batch, loss: change(loss, math.inf))
    trained(model, made, scale)
    infinite.remove()
    assert all(map(torch.equal, before, everything()))
    trained(model, made, scale)
    assert not any(map(torch.equal, before, everything()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_without_a_target_changes_nothing(optimizer, scale, world, monkeypatch):
    """Neither weights nor momentum; and the loss of 2 equal ranks is that of one, also in fp16."""
    monkeypatch.setattr("train.all_sum", lambda x: x.mul_(world))
    monkeypatch.setattr("hardware.machine.Machine.stop_if_asked", lambda self: None)
    model = make("qwen3")
    made = make_optimizer(config(optimizer, weight_decay=0.5), CPU, model)
    rows = torch.randint(model.config.vocab_size, (4, 17))
    scaler = torch.amp.GradScaler("cpu", enabled=scale)

    def step(weight: float) -> list[float]:
        x, y = rows[:, :-1], rows[:, 1:]
        batch = Batch(x, y if weight else y * 0 - 1, torch.full(y.shape, weight))
        machine = replace(CPU, world=world)
        return take_step(model, made, scaler, repeat(batch), 2, machine, 1.0).wait()

    def everything() -> list[torch.Tensor]:
        state = [t for s in made.state.values() for t in s.values()]
        return [t.detach().clone() for t in (*model.parameters(), *state)]

    with torch.no_grad():
        expected = model(rows[:, :-1], rows[:, 1:]).item()
    loss, norm, _ = step(0.5)
    assert loss == pytest.approx(expected, rel=1e-5) and norm > 0
    before, scale_before = everything(), scaler.get_scale()
    loss, norm, _ = step(0.0)
    assert math.isnan(loss) and norm == 0 and scaler.get_scale() == scale_before
    progress = Progress(losses=[1.0], bad_in_a_row=2)
    assert progress.add_step(8, loss, norm, scaler) == "no target"
    assert progress == Progress(step=1, samples=8, losses=[1.0], bad_in_a_row=2)
    assert all(map(torch.equal, before, everything()))
    step(0.5)
    assert not any(map(torch.equal, before, everything()))


def test_a_gradient_above_grad_clip_is_shortened_to_it():
    model = make("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    grad_norm = trained(model, optimizer, grad_clip=0.01)
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3) and grad_norm > 0.1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_groups_have_learning_rates_of_their_own(optimizer):
    cfg = config(optimizer, embed_lr=3.0, vector_lr=2.0)
    made = make_optimizer(cfg, CPU, make("gpt2", tie_embeddings=False))
    scales = {group["name"]: group["scale"] for group in made.param_groups}
    assert scales == {"embeddings": 3.0, "matrices": 1.0, "head": 1.0, "vectors": 2.0}
    assert not any("momentum" in group for group in made.param_groups)  # torch's SGD would heed it


# -- whole runs --


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
def test_each_optimizer_resumes_as_if_it_had_never_stopped(optimizer, tiny_data, tmp_path):
    options = [f"--optimizer={optimizer}", f"--lr={LR[optimizer]}", "--embed_lr=2"]
    losses = metrics(resumes(tiny_data, tmp_path, *options), "loss")
    assert losses[8] < losses[1] - 0.3
