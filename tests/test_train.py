import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (
    CPU,
    REPO,
    TINY,
    call,
    end,
    forge,
    metrics,
    prepared,
    same,
    saved,
    train_tiny,
)

import sample
import train
from configurator import UserError, parse
from hardware.disk import damage
from hardware.machine import Clock
from model import GPT, INIT
from text.dataset import load_tokenizer, open_datasets, open_windows
from text.windows import Rows
from training import banner
from training.batches import read_ahead, to_batch
from training.evaluate import evaluate, prompt_ids, write_text
from training.huggingface import from_pretrained
from training.parallel import compiler_errors, separate_cache
from training.plan import MAX_DEVIATION, deviation, make_plan
from training.schedule import lr_at
from training.settings import TrainConfig, model_config


@pytest.fixture(scope="module", autouse=True)
def two_threads():
    """Let this file's trainings use two threads, as a user's use several. All others use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def config(*options: str) -> TrainConfig:
    return parse(TrainConfig, [*TINY, *options])


# -- schedule and plan --

# 100 steps, of which 10 are warm-up, then a decay to 0.1 of lr at the very last step.
COSINE = 0.1 + 0.9 * (1 + math.cos(math.pi * 44 / 89)) / 2
TO_ZERO = ["--schedule=linear", "--warmup_ratio=0.2", "--min_lr_ratio=0"]


SCHEDULES = [
    (["--schedule=cosine"], {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 54: COSINE, 99: 0.1}),
    (["--schedule=linear"], {0: 0.1, 10: 1.0, 54: 1 - 0.9 * 44 / 89, 99: 0.1}),
    (["--schedule=wsd"], {0: 0.1, 10: 1.0, 50: 1.0, 80: 1.0, 90: 1 - 0.9 * 10 / 19, 99: 0.1}),
    (["--schedule=constant"], {0: 0.1, 10: 1.0, 99: 1.0}),
    (TO_ZERO, {0: 0.05, 19: 1.0, 99: 0.0}),
]


@pytest.mark.parametrize("options, table", SCHEDULES)
def test_learning_rate_is_what_the_formula_says(options, table):
    cfg = config("--lr=1", "--warmup_ratio=0.1", *options)
    for step, want in table.items():
        assert lr_at(step, 100, cfg) == pytest.approx(want, abs=1e-12), step


ENDS = [
    (["--max_steps=7"], 7),
    (["--max_steps=0", "--max_tokens=2560"], 10),
    (["--max_steps=0", "--max_epochs=1.5"], 15),
    (["--max_steps=12", "--max_epochs=1.5", "--max_tokens=9999999"], 12),
]


@pytest.mark.parametrize("options, steps", ENDS)
def test_a_run_ends_at_the_first_of_its_limits(options, steps):
    assert make_plan(config(*options), 1, epoch_tokens=2560).steps == steps


@pytest.mark.parametrize("path", sorted(REPO.glob("config/*.py")), ids=lambda p: p.stem)
def test_a_shipped_config_trains_the_same_on_1_to_8_gpus(path):
    cfg = parse(TrainConfig, [str(path)])
    for world in (1, 2, 4, 6, 8):
        tokens = make_plan(cfg, world, 10**9).step_tokens
        # The smallest have 16 sequences in a step, or 4.
        small = world >= 6 and path.stem in ("chat", "demo", "docs", "docs_large")
        assert small or deviation(tokens, cfg) < MAX_DEVIATION


@pytest.mark.parametrize("preset", ["gpt2", "qwen3"])  # with a tied head, and with its own
def test_the_first_loss_is_the_expected_one_of_each_init(preset):
    shape = config(f"--preset={preset}", "--n_embd=96", "--n_kv_head=0")
    ids = torch.randint(67, (16, 33), generator=torch.Generator().manual_seed(0))
    for init in INIT:
        torch.manual_seed(0)
        model = GPT(model_config(shape, 67), init)
        with torch.no_grad():
            loss = model(ids[:, :-1], ids[:, 1:]).item()
        assert loss == pytest.approx(banner.first_loss(model.config, init), abs=0.25), init


def test_reading_the_data_too_often_is_a_warning(tiny_data):
    [data] = open_datasets("tiny", tiny_data)
    sets = [replace(data, name=name, weight=Fraction(w, 10)) for name, w in (("a", 9), ("b", 1))]
    size = data.meta["splits"]["train"]["tokens"]
    assert not banner.repetition_warnings(4 * size, config(), sets)
    mixed = banner.repetition_warnings(6 * size, config(), sets)
    assert "a is read 5.4 times" in mixed and "b is read" not in mixed


# -- evaluation --


def test_evaluation_is_the_mean_loss_for_every_batch_size(tiny_data):
    [data] = open_datasets("tiny", tiny_data)
    model = GPT(model_config(config(), data.meta["vocab_size"]), "xavier")
    windows = open_windows(data, "val", 32)
    tokens = torch.from_numpy(windows.tokens.astype(np.int64))
    end = (len(tokens) - 1) // 32 * 32
    with torch.no_grad():
        expected = model(tokens[:end].view(-1, 32), tokens[1 : end + 1].view(-1, 32)).item()
    for B in (1, 7, 1000):
        assert evaluate(model, windows, 0, B, CPU) == pytest.approx(expected, rel=1e-6)
        assert model.training


# -- whole runs --


@pytest.mark.parametrize("world", [1, 6])
@pytest.mark.parametrize("B", [2, 3, 5, 7, 17, 26])
def test_the_advice_for_a_step_that_does_not_fit_keeps_its_tokens(B, world):
    sizes = ["--block_size=1024", "--batch_tokens=524_288"]
    plan = make_plan(config(*sizes, f"--batch_size={B}"), world, 10_000)
    flags = re.findall(r"--\S+", plan.memory_hint(1024))
    smaller = make_plan(config(*sizes, *flags), world, 10_000)
    assert smaller.batch_size <= B // 2 and smaller.step_tokens == plan.step_tokens


@pytest.fixture(scope="module")
def straight(tiny_data, tmp_path_factory) -> Path:
    """One uninterrupted run of TINY with dropout, which shows samples."""
    options = ["--dropout=0.1", "--sample_every=4", "--sample_prompt=the loop"]
    return train_tiny(tiny_data, tmp_path_factory.mktemp("straight"), *options)


def test_a_run_leaves_all_that_it_promises(straight, tiny_data):
    records = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    evaluations = [r for r in records if "val_loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 9))
    assert [r["step"] for r in evaluations] == [4, 8]
    for r in steps:
        assert r["tokens"] == 256 * r["step"] and r["tokens_per_s"] > 0
        assert 0 <= r["data_ms"] < r["step_ms"]
        assert r["tokens_per_s"] == pytest.approx(256 / r["step_ms"] * 1000)
        assert r["mfu"] == pytest.approx(r["tflops"] / 1.0)  # TINY says peak_tflops=1
    last = evaluations[-1]
    counts = open_datasets("tiny", tiny_data)[0].meta["splits"]["val"]
    bits = last["val_loss"] / math.log(2) * counts["tokens"]
    assert last["val_bits_per_byte"] == pytest.approx(bits / counts["bytes"])
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    checkpoint = saved(straight)
    assert checkpoint.name == "step_00000008"
    files = {"config.json", "model.safetensors", "train_state.pt", "train_config.json", "meta.json"}
    files |= {"tokenizer.model", "tokenizer.json", "tokenizer_config.json", "manifest.json"}
    assert {p.name for p in checkpoint.iterdir()} == files
    assert not damage(checkpoint)


def test_batches_of_a_stream_and_of_documents_have_the_same_strides():
    """So they share compiled code."""
    for weights in (None, np.ones((2, 8), np.float32)):
        x, y, _, _ = to_batch(Rows(np.zeros((2, 9), np.int64), weights, None), CPU.device)
        assert x.stride() == y.stride() == (8, 1)


def test_waits_for_data_are_counted(monkeypatch):
    """The second batch comes a tenth of a second after the training began to wait for it."""
    rows, waits = Rows(np.zeros((1, 9), np.int64), None, None), threading.Event()

    def now() -> float:
        seconds = time.perf_counter()
        waits.set()
        return seconds

    def starts(at: int, _) -> None:
        assert at != 1 or (waits.wait(60) and not time.sleep(0.1))

    monkeypatch.setattr("training.batches.time", SimpleNamespace(perf_counter=now))
    loader, clock = SimpleNamespace(starts=starts, rows=lambda _: rows), Clock(CPU, 0)
    with closing(read_ahead(loader, 0, 1, CPU, clock)) as batches:
        assert next(batches).x.shape == (1, 8) and clock.data_s >= 0.1


def test_a_peak_that_is_measured_too_low_gives_no_mfu(trains, monkeypatch):
    monkeypatch.setattr(train, "peak_tflops", lambda *_: (1e-9, "far too slow"))
    assert set(metrics(trains("--peak_tflops=0"), "mfu").values()) == {None}


def test_resume_after_kill_is_bit_identical(straight, tmp_path, capsys):
    """No setting is given again: the run even has another name, and is found as the newest one."""
    renamed = shutil.copytree(straight, tmp_path / "renamed")
    shutil.rmtree(renamed / "ckpt" / "step_00000008")
    # The copy looks like a run that was killed in the middle of a line.
    with open(renamed / "metrics.jsonl", "a") as f:
        f.write('{"step": 9, "lo')
    call(train.main, f"--out_dir={tmp_path}", "--init_from=resume")
    out, err = capsys.readouterr()
    assert str(tmp_path / "renamed") in err and "changed since" not in out
    assert same(renamed, straight)
    for key in ("loss", "grad_norm", "val_loss", "train_eval_loss", "sample"):
        # There is no gap, no repetition and no difference.
        assert metrics(renamed, key) == metrics(straight, key)
    paths = [saved(run) / "train_config.json" for run in (straight, renamed)]
    before, after = (json.loads(path.read_text()) for path in paths)
    assert after == before | {"out_dir": str(tmp_path), "run_name": "renamed"}


def test_settings_given_to_a_resumed_run_take_effect_and_are_listed(straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "run")
    checkpoint = saved(tmp_path / "run")
    path = checkpoint / "train_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_magic": 3, "overwrite": True}))
    forge(checkpoint)
    (tmp_path / "more.py").write_text("max_steps = 10\nlr = 3e-3\nweight_decay = 300\n")
    options = [f"--out_dir={tmp_path}", "--run_name=run", "--init_from=auto", "--seed=7"]
    call(train.main, str(tmp_path / "more.py"), *options)
    out, err = capsys.readouterr()
    assert "use_magic=3" in err and "seed 1337 -> 7" in out
    assert "max_steps 8 -> 10, weight_decay 0.1 -> 300" in out  # lr has not changed
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, 11))
    before, after = (end(tmp_path / "run", step)["model.embed_tokens.weight"] for step in (8, 10))
    assert after.norm() < 0.9 * before.norm()  # it decays by what is asked for now
    call(train.main, *options[:3])
    assert "nothing is left to do" in capsys.readouterr().out


def test_without_a_dataset_the_newest_is_named(tiny_data, tmp_path, monkeypatch, capsys):
    """And too many epochs of it are warned of."""
    shutil.copytree(tiny_data / "tiny", tmp_path / "data" / "mine")
    monkeypatch.setattr(train, "make_optimizer", Mock(side_effect=UserError("seen enough")))
    options = [option for option in TINY if not option.startswith("--dataset")]
    options += [f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}"]
    with pytest.raises(UserError, match="seen enough"):
        call(train.main, *options, "--max_steps=100_000")
    out, err = capsys.readouterr()
    assert "dataset=mine" in err and "warning: mine is read " in out


def test_evaluating_saving_and_logging_change_no_weight(straight, trains):
    options = ["--dropout=0.1", "--eval_every=3", "--save_every=100", "--log_every=7"]
    run = trains(*options, "--sample_every=0")
    assert same(run, straight)
    assert not metrics(run, "sample")


def test_samples_show_what_the_weights_of_their_step_write(straight, tiny_data):
    samples = metrics(straight, "sample")
    assert samples.keys() == {4, 8} and samples[4] != samples[8]
    tokenizer = load_tokenizer(tiny_data / "tiny")
    prompt = [*tokenizer.prefix, *tokenizer.encode("the loop")]
    model = from_pretrained(saved(straight))
    counts = open_datasets("tiny", tiny_data)[0].meta["splits"]["val"]
    length = math.ceil(200 * counts["tokens"] / counts["bytes"])
    text = write_text(model, tokenizer, prompt, length, TrainConfig.seed, CPU)
    assert samples[8] == f"the loop{text}" and model.training


TOLD = {"text": "Let me tell you a tale that is long.\nIt ends."}
ASKED = {"messages": [{"role": "user", "content": "Why is\nit?"}]}
ASKED["messages"] += [{"role": "assistant", "content": "So."}]
SYSTEM = {"messages": [{"role": "system", "content": "Be kind."}, *ASKED["messages"]]}
CHINESE = {"text": "床前明月光，疑是地上霜。举头望明月，低头思故乡。春眠不觉晓，处处闻啼鸟。"}
DRAWN = [  # the documents, block_size, loss_on, the prompt
    (TOLD, 256, "all", "Let me tell you a tale that is"),
    (TOLD, 64, "all", "Let me"),
    (TOLD, 4, "all", ""),
    (CHINESE, 256, "all", CHINESE["text"][:32]),
    ({"text": "docs/basic/selection-sort"}, 128, "all", "docs/basic"),
    ({"text": "(" + "ab" * 40}, 128, "all", "(" + "ab" * 7 + "a"),
    (ASKED, 256, "answers", "Why is"),
    (SYSTEM, 256, "all", "Why is"),
]


@pytest.mark.parametrize("record, T, loss_on, prompt", DRAWN)
def test_the_prompt_is_the_first_words_of_a_document(
    own_data, tmp_path, record, T, loss_on, prompt
):
    tokenizer = f"--tokenizer={own_data}"
    prepared(tmp_path, [record] * 9, "--name=own", tokenizer, "--val_fraction=0.5")
    sets = open_datasets("own", tmp_path)
    cfg = config(f"--block_size={T}", f"--loss_on={loss_on}", "--sample_every=1")
    drawn, ids = prompt_ids(cfg, sets, load_tokenizer(own_data))
    assert drawn == replace(cfg, sample_prompt=prompt) and 0 < len(ids) <= T


def test_a_config_s_prompt_is_not_used_with_other_data(trains, tmp_path, prints):
    """The prompt of a run is stored: sample.py continues it, too."""
    own = tmp_path / "own.py"
    own.write_text("dataset = 'shakespeare'\nsample_prompt = 'ROMEO:'\nmax_steps = 1\n")
    given = {"--seed=1": "ROMEO:", "--dataset=shakespeare": "ROMEO:", "--sample_prompt=So": "So"}
    for option, prompt in (given | {"--dataset=other": "auto"}).items():
        assert parse(TrainConfig, [str(own), option]).sample_prompt == prompt
    run = trains(str(own), "--max_steps=1", "--block_size=64", "--sample_every=1")
    prompt = json.loads((saved(run) / "train_config.json").read_text())["sample_prompt"]
    assert prompt not in ("ROMEO:", "auto", "") and metrics(run, "sample")[1].startswith(prompt)
    assert prints(sample.main, f"--ckpt={run}", "--device=cpu").startswith(prompt)


def test_the_loss_on_train_is_of_as_many_windows_as_on_val(straight, tiny_data):
    [data] = open_datasets("tiny", tiny_data)
    val, split = (open_windows(data, name, 32) for name in ("val", "train"))
    count = len(val.fixed_starts(0))
    assert count < split.n_windows
    loss = evaluate(from_pretrained(saved(straight)), split, count * 32, 4, CPU)
    assert metrics(straight, "train_eval_loss")[8] == pytest.approx(loss, rel=1e-5)
    assert abs(loss - metrics(straight, "val_loss")[8]) > 1e-4


def test_accumulation_does_not_change_the_step(tiny_data, tmp_path):
    runs = [train_tiny(tiny_data, tmp_path / str(B), f"--batch_size={B}") for B in (8, 4, 1)]
    for run in runs[1:]:
        assert metrics(run, "loss") == pytest.approx(metrics(runs[0], "loss"), rel=1e-5)
        assert metrics(run, "grad_norm") == pytest.approx(metrics(runs[0], "grad_norm"), rel=1e-3)


def test_every_preset_trains_in_bf16(tiny_data, tmp_path):
    for preset in ("gpt2", "llama", "qwen3"):
        options = [f"--preset={preset}", "--n_kv_head=0", "--dtype=bfloat16"]
        losses = metrics(train_tiny(tiny_data, tmp_path / preset, *options), "loss")
        assert losses[8] < losses[1] - 0.3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs g++")
@pytest.mark.parametrize("recompute", ["none", "blocks"])  # blocks: they are compiled one by one
def test_compiled_training_is_eager_training(tiny_data, tmp_path, capsys, monkeypatch, recompute):
    """All is compiled before the first step: a signal within the run does not wait for that."""
    compile_now, graphs = train.compile_now, torch._dynamo.utils.counters["stats"]
    before = []

    def counted(*args) -> None:
        compile_now(*args)
        before.append(graphs["unique_graphs"])

    monkeypatch.setattr(train, "compile_now", counted)
    options = ["--max_steps=4", "--n_layer=1", f"--recompute={recompute}"]
    eager = train_tiny(tiny_data, tmp_path / "eager", *options)
    compiled = train_tiny(tiny_data, tmp_path / "compiled", *options, "--compile")
    assert "compiled in" in capsys.readouterr().out
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(compiled, key) == pytest.approx(metrics(eager, key), rel=1e-4)
    assert before == [graphs["unique_graphs"]] and before[0] > 0


@pytest.mark.slow
def test_ranks_with_other_code_have_another_hash(tmp_path):
    """The folder does not count: each computer may have its own."""
    script = "from training.startup import code_sha256; print(code_sha256())"
    hashes = []
    for name, change in (("a", ""), ("b", ""), ("c", "# another version")):
        for folder in ("hardware", "text", "training"):
            shutil.copytree(REPO / folder, tmp_path / name / folder)
        for file in ("train.py", "model.py", "configurator.py"):
            shutil.copy(REPO / file, tmp_path / name)
        (tmp_path / name / "hardware/disk.py").open("a").write(change)
        command = [sys.executable, "-c", script]
        hashes.append(subprocess.check_output(command, cwd=tmp_path / name, text=True))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_resume_says_that_the_code_has_changed(tiny_data, tmp_path, capsys, monkeypatch):
    for steps, code, is_said in ((2, "a", False), (3, "a", False), (4, "b", True)):
        monkeypatch.setattr(train.startup, "code_sha256", lambda code=code: code)
        train_tiny(tiny_data, tmp_path, f"--max_steps={steps}", "--init_from=auto")
        assert ("code has changed" in capsys.readouterr().out) == is_said


def test_code_that_was_compiled_for_one_cpu_is_not_run_on_another(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for capability in ("AVX2", "AVX512", "AVX512"):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda name=capability: name)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        for _ in range(2):
            separate_cache()
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / capability)


@pytest.mark.parametrize("error", [OSError(20, "Not a directory", "/x"), "ImportError: too short"])
def test_a_cache_that_fails_names_itself_and_the_option(refuses, monkeypatch, error):
    """It cannot be written, or a Ctrl-C during compiling has left an empty library there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/cache")
    inductor = type("InductorError", (Exception,), {"__module__": "torch._inductor.exc"})

    def compiled() -> None:
        with compiler_errors():
            raise inductor(error) if isinstance(error, str) else error

    said = refuses(compiled)
    assert all(part in said for part in ("torch.compile", "--compile=false", "/the/cache"))


@pytest.mark.slow
def test_where_compile_fails_one_line_names_the_option(trains, refuses):
    import torch._inductor.config as inductor

    # monkeypatch does not put these settings back: later compilations would fail.
    with inductor.patch({"force_disable_caches": True, "cpp.cxx": (None, "/no/compiler")}):
        assert "--compile=false" in refuses(lambda: trains("--compile"))


def test_only_the_newest_checkpoints_and_the_best_are_kept(trains, evaluates):
    evaluates({1: 5.0, 2: 4.0, 3: 3.0, 4: 4.0, 5: 4.0, 6: 4.0})
    run = trains("--eval_every=1", "--save_every=1", "--keep=2", "--max_steps=6")
    assert sorted(int(p.name[5:]) for p in (run / "ckpt").glob("step_*")) == [3, 5, 6]


def test_weights_that_are_not_finite_are_never_saved(trains, tmp_path, refuses):
    options = ["--lr=1e38", "--warmup_ratio=0", "--save_every=1", "--keep=9", "--grad_clip=0"]
    assert "wte.weight" in refuses(lambda: trains(*options))
    for folder in (tmp_path / "run" / "ckpt").glob("step_*"):
        assert all(p.isfinite().all() for p in from_pretrained(folder).parameters())
