import re
import shutil

import pytest
import torch
from conftest import REPO, TINY, metrics, saved, train_tiny
from test_model import ODD, ids, make
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import plan
from configurator import parse
from model import GPT
from training import memory
from training.banner import pace_note
from training.batch_size import wants_compile
from training.plan import best_batch
from training.settings import TrainConfig


def the_run(*options: str) -> plan.PlannedRun:
    end = [] if any("max_tokens" in option for option in options) else ["--max_steps=1"]
    return plan.planned_run(parse(plan.PlanConfig, [*end, "--vocab_size=50257", *options]))


# -- known answers, from public papers and notes --


GPT3 = "--preset=gpt2 --n_layer=96 --n_embd=12288 --n_head=96 --max_tokens=300e9"
LLAMA_65B = "--preset=llama --n_layer=80 --n_embd=8192 --n_head=64 --d_ff=22016 --max_tokens=1.4e12"


PUBLISHED = [(GPT3, 50257, 3.14e23, 1024, 30, 0.379), (LLAMA_65B, 32000, 5.48e23, 2048, 21, 0.47)]


@pytest.mark.parametrize("shape, V, flops, gpus, days, mfu", PUBLISHED)
def test_known_runs_have_their_published_compute_and_mfu(capsys, shape, V, flops, gpus, days, mfu):
    batch = ["--block_size=2048", "--batch_size=1", "--batch_tokens=4_194_304"]
    place = ["--gpu=a100-80g", f"--nproc={gpus}"]
    plan.print_time(the_run(*shape.split(), f"--vocab_size={V}", *batch, *place))
    output = capsys.readouterr().out
    exact, by_6nd = re.search(r"FLOPs +(\S+) \(.+; (\S+) by 6 N D", output).groups()
    assert float(by_6nd) == pytest.approx(flops, rel=0.003)
    days_at_40 = float(re.search(r"at 40% of peak +(\S+) days", output)[1])
    fraction = float(by_6nd) / float(exact)  # most published figures count no attention
    assert 0.4 * days_at_40 / days * fraction == pytest.approx(mfu, abs=0.005)


@pytest.mark.parametrize("tflops, minutes", [(75, 346), (165, 157)])
def test_minimind_takes_its_published_time(prints, tflops, minutes):
    """It is published for 26M parameters, and has 25.8M."""
    options = ["--vocab_size=6400", "--max_tokens=10e9", f"--peak_tflops={tflops}"]
    options += ["--gpu=24g"]  # which is in no table
    output = prints(plan.main, REPO / "config" / "minimind_26m.py", *options)
    exact, by_6nd = map(float, re.search(r"FLOPs +(\S+) \(.+; (\S+) by 6 N D", output).groups())
    # A fraction of a measured speed would say nothing, so there is one row.
    (hours,) = re.findall(r"at .+% of peak +(\S+) hours", output)
    assert 60 * float(hours) * by_6nd / exact == pytest.approx(minutes, rel=0.015)


@pytest.mark.parametrize("gpu, computed_as_tf32", [("a100-80g", True), ("v100-32g", False)])
def test_float32_is_tf32_where_the_gpu_can(gpu, computed_as_tf32):
    source = the_run(f"--gpu={gpu}", "--dtype=float32").device.source
    assert ("tf32" in source) == computed_as_tf32


def test_a_step_of_more_than_a_minute_is_noted():
    assert "--batch_tokens" in pace_note(6e13, 0.5)
    assert not pace_note(6e12, 0.5) and not pace_note(6e13, None)


QWEN = "--preset=qwen2 --n_layer=28 --n_head=12 --n_kv_head=2 --n_embd=1536 --d_ff=8960"
QWEN += " --tie_embeddings=true --vocab_size=151936 --gpu=a100-80g --batch_size=1"


@pytest.mark.parametrize("page", ["docs/cost.md", "docs/zh/cost.md"])
def test_documented_batch_sizes_are_those_of_plan_py(page):
    text = (REPO / page).read_text(encoding="utf-8")
    for T in (8000, 4000, 2000):
        run = the_run(*QWEN.split(), f"--block_size={T}", f"--batch_tokens={T}")
        assert run.model.num_params()["total"] == pytest.approx(1.5437e9, rel=1e-3)
        B = memory.largest_batch(run.model, run.workload, run.device.bytes)
        assert re.search(rf"\n\| {T} \| .* \| {B} \|\n", text)


# -- the command, and batch_size=auto --


def test_plan_counts_the_epochs_of_its_data_set(tiny_data, tmp_path, prints):
    shutil.copytree(tiny_data / "tiny", tmp_path / "planned")
    options = [option for option in TINY if not option.startswith(("--dataset", "--max_steps"))]
    options += [f"--data_dir={tmp_path}", "--max_tokens=1e9"]
    output = prints(plan.main, *options)
    assert "epochs of planned\n" in output
    assert "warning: planned " in output
    output = prints(plan.main, *options, "--vocab_size=16384")  # a plan for other data
    assert "planned" not in output
    output = prints(plan.main, *options, "--nproc=6", "--batch_tokens=256", "--device=cpu")
    assert "192 tokens a step; 256 requested" in output


def counted_flops(model: GPT, x: torch.Tensor) -> float:
    """Return what torch counts in a micro-step. It does not know the fused attention of a CPU."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x, x).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ODD)
def test_flops_are_those_that_torch_counts(name):
    """The vocabulary is a multiple of 128: torch would also count its padding.

    Without dropout, the second forward pass of a block would spare its last product.
    """
    model = make(name, vocab_size=256, dropout=0.1).train()
    x = ids(model, 2, 32)
    flops = model.flops_per_token(32) * x.numel()
    assert counted_flops(model, x) == flops
    for block in model.blocks:
        block.recompute = True
    assert counted_flops(model, x) == flops + plan.repeated_flops(model, 32) * x.numel()


def test_plan_names_the_flags_that_fit(prints):
    options = [str(REPO / "config" / "train_1b.py"), "--gpu=v100-16g", "--nproc=6"]
    options += ["--vocab-size=32000"]
    flags = re.search(r"it fits with (.+)", prints(plan.main, *options, "--recompute=blocks"))[1]
    run = the_run(*options, *flags.split())
    assert memory.bytes_needed(run.model, run.workload) < run.device.bytes
    # The time is that of the run that fits, which computes the blocks twice.
    output = [prints(plan.main, *options, *more) for more in ([], flags.split())]
    times = [re.findall("at .+% of peak +(.+)", text) for text in output]
    assert "--recompute" in flags and times[0] == times[1] and len(times[0]) == 5
    options = [str(REPO / "config" / "train_1b.py"), "--gpu=a100-40g", "--vocab-size=32000"]
    # It does not accumulate.
    output = prints(plan.main, *options, "--batch_size=64", "--batch_tokens=131072")
    largest = re.search(r"largest batch_size (\d+)  <-", output)[1]
    run = the_run(*options, f"--batch_size={largest}", "--batch_tokens=131072")
    assert run.plan.accum > 1 and memory.bytes_needed(run.model, run.workload) < run.device.bytes


def test_plan_says_what_sharding_sends_between_computers(prints):
    options = ["config/train_1b.py", "--gpu=v100-32g", "--nproc=12", "--vocab_size=32000"]
    output = prints(plan.main, *options, "--batch_tokens=393216")  # 2 micro-steps of 8 x 2048
    P = 1.152e9
    for shard, per_parameter in (("none", 8), ("optimizer", 8), ("gradients", 12), ("all", 24)):
        gb, *seconds = re.search(rf"--shard={shard} +(\S+) GB: (.+), (.+), (.+) s", output).groups()
        assert float(gb) == pytest.approx(per_parameter * P / 1e9, rel=0.01)
        at = [float(gb) * 8 / rate for rate in (10, 100, 400)]
        assert [float(s) for s in seconds] == pytest.approx(at, abs=0.01)
    assert "Gbit" not in prints(plan.main, *options[:2], "--vocab_size=32000")


def test_plan_reads_the_model_to_fine_tune(finished, tiny_data, tmp_path, refuses, prints):
    folder = saved(finished)
    where = [f"--data_dir={tiny_data}", "--dataset=tiny", "--device=cpu", "--max_steps=4"]
    output = prints(plan.main, f"--init_from={folder}", *where, "--peak_tflops=1")
    assert re.search("2 layers x 32, .*, T = 32\n", output)
    assert "config.json" in refuses(plan.main, f"--init_from={tmp_path}", *where)
    assert "init_from" in refuses(plan.main, "--init_from=resume", *where)


def test_damaged_data_set_is_not_taken_for_none(own_data, tmp_path, refuses):
    (own_data / "meta.json").write_text("{")
    options = [*TINY, f"--data_dir={tmp_path}", "--gpu=h200"]
    assert "meta.json" in refuses(plan.main, *options)
    shutil.rmtree(own_data)
    assert "--vocab_size" in refuses(plan.main, *options)
    epochs = [option for option in options if not option.startswith("--max_steps")]
    assert "max_steps" in refuses(plan.main, *epochs, "--max_epochs=1", "--vocab_size=300")


@pytest.mark.parametrize("most, tokens, world, want", [
    (100, 4096, 1, 64), (9, 4096, 1, 8), (5, 40_960, 2, 5), (30, 43 * 64, 1, 22),
])  # fmt: skip
def test_even_batch_keeps_the_tokens_of_a_step(most, tokens, world, want):
    options = [f"--batch_tokens={tokens}", "--block_size=64", "--max_steps=1"]
    assert best_batch(most, parse(TrainConfig, options), world) == want


def test_batch_size_auto_trains_what_a_number_trains(tiny_data, tmp_path, capsys):
    auto = train_tiny(tiny_data, tmp_path / "auto", "--batch_size=auto")
    assert "batch: 8 x " in capsys.readouterr().out
    eight = train_tiny(tiny_data, tmp_path / "8", "--batch_size=8")
    assert metrics(auto, "loss") == metrics(eight, "loss")


def test_resume_keeps_the_batch_size_of_auto(trains, capsys):
    options = ["--batch_size=auto", "--block_size=16", "--batch_tokens=512"]
    trains(*options, "--max_steps=4", "--batch_size=8")
    run = trains(*options, "--max_steps=8", "--init_from=resume")
    output = capsys.readouterr().out
    assert output.count("batch: 8 x ") == 2  # although 32 would fit
    assert metrics(run, "loss").keys() == set(range(1, 9))


@pytest.mark.parametrize("compile, kind, flops, want", [
    pytest.param("auto", "cuda", 1e9, True, id="a GPU"),
    pytest.param("auto", "cpu", 1e12, False, id="a short run on a CPU"),
    pytest.param("auto", "cpu", 1e15, True, id="a long one"),
    pytest.param("auto", "mps", 1e15, False, id="a Mac"),
    pytest.param("false", "cuda", 1e20, False, id="as it is told"),
])  # fmt: skip
def test_compile_auto(compile, kind, flops, want):
    cfg = parse(TrainConfig, [f"--compile={compile}", "--max_steps=1"])
    assert wants_compile(cfg, kind, flops) is want
