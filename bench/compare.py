"""Compare this trainer with a peer: the speed of the same training, or the time to a loss.

    # nanoGPT's own train.py, from a checkout of nanoGPT, with the same model, batch, data and AdamW
    python -m bench.compare config/gpt2_124m.py --dataset=mine --nanogpt=../nanoGPT
    # transformers' Trainer, with the same model
    python -m bench.compare config/minimind_26m.py --dataset=zh --hf
    # a copy of this repository, for example with a patch applied
    python -m bench.compare config/gpt2_124m.py --dataset=mine --others ../patched
    # sampling instead of training
    python -m bench.compare config/gpt2_124m.py --dataset=mine --nanogpt=../nanoGPT --sampling
    # how long nanoGPT with a recipe of its own and this trainer with a config take to a loss
    python -m bench.compare config/demo.py --nanogpt=../nanoGPT --recipe="
        config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
        --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
        --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"

Every setting of train.py is accepted too. The contestants run as processes of their own, in turns,
on this machine.

Speed is timed from outside by one clock: it measures the time from the line that a contestant
prints for step `warmup` to the line for step `steps`. A line waits for the device, so all print the
same few: one in every gcd(warmup, steps) steps. Evaluating and saving do not fall into that time.
The results are medians over the turns, and ratios of them.
Without a peer, only this trainer is timed.

With a recipe, both train to their ends with each of the seeds, nanoGPT on our .bin files. The final
weights of both are evaluated in fp32 on all windows of val.bin. Two times are compared: that of the
whole command, and that of its training alone, which is the number of steps times the median time of
a step, without compilation, evaluations and checkpoints.
"""

import json
import math
import os
import pickle
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from bench.measure import REPO, StepConfig, facts_of, in_turns, table, train_options, write_json
from configurator import UserError, option, parse, run
from hardware.machine import pick_device, pick_dtype, start
from hardware.peak import peak_tflops
from model import GPT, GPTConfig
from text.dataset import open_datasets, open_windows
from training.evaluate import evaluate
from training.huggingface import from_pretrained, to_config
from training.metrics import read_metrics
from training.plan import make_plan
from training.run_folder import newest_checkpoint
from training.settings import model_config, with_data


@dataclass(frozen=True)
class CompareConfig(StepConfig):
    nanogpt: str = option("", "folder of a nanoGPT checkout, to compare with", group="Peers")
    hf: bool = option(False, "compare with transformers' Trainer, on the same model")
    others: tuple[str, ...] = option((), "folders of changed copies of this repository")
    peer_compile: bool = option(False, "torch.compile for the peers as well")
    sampling: bool = option(False, "compare sampling instead of training", group="Speed")
    num_samples: int = option(1, "sampling: texts in a batch", minimum=1)
    max_new_tokens: int = option(256, "sampling: tokens of each text", minimum=1)
    steps: int = option(30, "steps in each turn", minimum=1)
    warmup: int = option(10, "steps at the start of a turn that are not timed", minimum=1)
    rounds: int = option(3, "turns of each contestant", minimum=1)
    recipe: str = option("", "options of nanoGPT's train.py, in quotes", group="The time to a loss")
    seeds: tuple[int, ...] = option((1, 2, 3), "both train with each of them", minimum=0)
    json: str = option("", "also write the figures to this file", group="Output")

    def problems(self) -> list[str]:
        problems = super().problems()
        if (self.nanogpt or self.recipe) and not Path(self.nanogpt, "train.py").exists():
            problems.append(f"nanogpt={self.nanogpt}: no train.py in it")
        if self.warmup >= self.steps:  # from step `warmup` to step `steps` it is timed
            problems.append("warmup must be below steps")
        if self.recipe and not re.search(r"--max_iters=\d+", self.recipe):
            problems.append("recipe must say --max_iters=N")
        return problems

    @property
    def ours(self) -> dict[str, Path]:
        """This repository and its changed copies, by their names in the tables."""
        return {"ours": REPO} | {f"ours, {Path(f).name}": Path(f).resolve() for f in self.others}

    @property
    def log_interval(self) -> int:
        """Steps between two lines of a contestant."""
        return math.gcd(self.warmup, self.steps)

    @property
    def device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """The device to run on, and the dtype of autocast there."""
        device = pick_device(self.device)
        return device, pick_dtype(self.dtype, device)[0]


# --------------------------------------------------------------------------------------------------
# The contestants: commands that print one line for each step. They run in `folder`.


def our_command(cfg: CompareConfig, folder: Path, repo: Path = REPO, **overrides) -> list[str]:
    """Return the command of this repository's train.py, or of a copy's."""
    folders = dict(out_dir=str(folder / "ours"), run_name="run", tracker="off")
    options = train_options(cfg, **folders, sample_every=0, **overrides)
    return [sys.executable, str(repo / "train.py"), *options]


def nanogpt_command(cfg: CompareConfig, folder: Path, options: list[str]) -> list[str]:
    """Copy nanoGPT to `folder`, with our .bin files; return the command of its train.py.

    nanoGPT reads the same format, in data/. Only its seed is changed.
    """
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    ignored = shutil.ignore_patterns("data", ".git", "out*")
    shutil.copytree(cfg.nanogpt, folder, ignore=ignored, dirs_exist_ok=True)
    script = (folder / "train.py").read_text()
    seeded = script.replace("1337 + seed_offset", f"{cfg.seed} + seed_offset")
    (folder / "train.py").write_text(seeded)
    link = folder / "data" / "ours"
    link.mkdir(parents=True)
    for split in ("train", "val"):
        (link / f"{split}.bin").symlink_to((data.folder / f"{split}.bin").resolve())
    (link / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.meta["vocab_size"]}))
    return [sys.executable, "train.py", *options, "--dataset=ours"]


def nanogpt_options(cfg: CompareConfig) -> list[str]:
    """Return the options of nanoGPT's train.py that are our settings."""
    plan = make_plan(cfg, 1, 1)
    device, dtype = cfg.device_and_dtype
    shape = ("n_layer", "n_head", "n_embd", "block_size", "dropout")
    settings = {name: getattr(cfg, name) for name in shape}
    settings |= dict(batch_size=plan.batch_size, gradient_accumulation_steps=plan.accum)
    settings |= dict(bias=model_config(cfg, 1).bias, device=device)
    settings |= dict(dtype=str(dtype).removeprefix("torch."), compile=cfg.peer_compile)
    settings |= dict(max_iters=cfg.steps, eval_interval=10**9, eval_iters=1)
    settings |= dict(log_interval=cfg.log_interval)
    return [f"--{k}={v}" for k, v in settings.items()]


HF_TRAINER = """
import json, sys
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import Trainer, TrainerCallback, TrainingArguments
config, file, dtype, T, interval, training = json.loads(sys.argv[1])
ids = np.memmap(file, dtype=dtype, mode="r")

class Windows(torch.utils.data.Dataset):
    def __len__(self):
        return (len(ids) - 1) // T
    def __getitem__(self, i):
        window = torch.from_numpy(ids[i * T : (i + 1) * T].astype(np.int64))
        return {"input_ids": window, "labels": window}

class Lines(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % interval == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            print(f"step {state.global_step}", flush=True)

model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
Trainer(model, TrainingArguments(**training), train_dataset=Windows(), callbacks=[Lines()]).train()
"""


def hf_command(cfg: CompareConfig, folder: Path) -> list[str]:
    """Return the command of transformers' Trainer with its fast settings.

    These are fused AdamW, SDPA, and autocast in 16 bits where our trainer uses it.
    """
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    plan = make_plan(cfg, 1, 1)
    device, dtype = cfg.device_and_dtype
    training = dict(
        output_dir=str(folder / "hf"),
        max_steps=cfg.steps,
        per_device_train_batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.accum,
        learning_rate=cfg.lr,
        weight_decay=cfg.weight_decay,
        optim="adamw_torch_fused",
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu=device.type == "cpu",
        torch_compile=cfg.peer_compile,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    config = to_config(model_config(cfg, data.meta["vocab_size"]))
    file = str(data.folder / "train.bin")
    facts = [config, file, data.meta["dtype"], cfg.block_size, cfg.log_interval, training]
    return [sys.executable, "-c", HF_TRAINER, json.dumps(facts)]


SAMPLING = """
import json, sys, time
repo, kind, shape, dtype, device, batch, count = json.loads(sys.argv[1])
sys.path.insert(0, repo)
import torch
from model import GPT, GPTConfig
torch.manual_seed(0)
model = GPT(GPTConfig(**shape)).to(device, getattr(torch, dtype)).eval()
if kind != "nanoGPT":
    from hardware.generation import generate
    from hardware.kernels import pick_kernels
    model.use(pick_kernels(torch.device(device)))
idx = torch.zeros(batch, 1, dtype=torch.long, device=device)
with torch.inference_mode():
    for step in range(3):  # the first one warms up
        if kind == "nanoGPT":
            last = model.generate(idx, count)
        else:
            *_, last = generate(model, idx, count, record=True)
        last.cpu()
        print("step", step + 1, flush=True)
"""


def sampling_command(repo: Path, name: str, c: GPTConfig, cfg: CompareConfig) -> list[str]:
    """Return the command that samples with the model.py in `repo`.

    The weights are freshly initialised, because the time does not depend on their values. Both have
    the dtype that sample.py would choose, except that nanoGPT samples in float32 on a CPU.
    """
    shape = asdict(c)
    device, dtype = cfg.device_and_dtype
    if name == "nanoGPT":
        names = ("vocab_size", "n_layer", "n_head", "n_embd", "block_size", "bias")
        shape = {key: shape[key] for key in names}
        dtype = torch.float32 if device.type == "cpu" else dtype
    named = str(dtype).removeprefix("torch.")
    facts = [str(repo), name, shape, named, str(device), cfg.num_samples, cfg.max_new_tokens]
    return [sys.executable, "-c", SAMPLING, json.dumps(facts)]


def commands_of(cfg: CompareConfig, c: GPTConfig, folder: Path) -> dict[str, list[str]]:
    """Return the command of each contestant, by its name."""
    if cfg.sampling:
        repos = cfg.ours | ({"nanoGPT": Path(cfg.nanogpt)} if cfg.nanogpt else {})
        return {name: sampling_command(repo, name, c, cfg) for name, repo in repos.items()}
    # Without what peers do not do.
    rarely = dict(eval_every=10**9, eval_tokens=1, save_every=10**9, log_every=cfg.log_interval)
    rarely |= dict(optimizer="adamw", overwrite=True)
    commands = {name: our_command(cfg, folder, repo, **rarely) for name, repo in cfg.ours.items()}
    if cfg.nanogpt:
        commands["nanoGPT"] = nanogpt_command(cfg, folder, nanogpt_options(cfg))
    if cfg.hf:
        commands["HF Trainer"] = hf_command(cfg, folder)
    return commands


# --------------------------------------------------------------------------------------------------
# The clock


def lines_of(argv: list[str], folder: Path) -> Iterator[tuple[float, str]]:
    """Run a command in `folder`, and yield the lines that it prints, with the time of each.

    A caller that leaves the loop ends the command. Raises UserError if the command fails.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Show one GPU only: transformers' Trainer would use all that it sees.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = []
    with subprocess.Popen(argv, cwd=folder, env=environment, **streams) as process:
        try:
            for line in process.stdout:
                output.append(line)
                yield time.perf_counter(), line
            code = process.wait()
        finally:
            process.kill()
    if code:
        print("".join(output)[-4000:], file=sys.stderr)
        raise UserError(f"the above ended with exit code {code}: {argv[0]} {argv[1]}")


def seconds_per_step(argv: list[str], folder: Path, start: int, end: int) -> float:
    """Return the seconds per step of a command between its lines for the steps `start` and `end`.

    The line of a step begins with "step" or "iter" and the step's number.
    """
    times: dict[int, float] = {}  # step -> when its line came
    for seconds, line in lines_of(argv, folder):
        step = re.match(r"(?:step|iter)[ :]+(\d+)", line)
        if step:
            times.setdefault(int(step[1]), seconds)
        if end in times:  # the rest, such as an evaluation and a checkpoint, is not timed
            break
    if not {start, end} <= times.keys():
        raise UserError(f"no lines for steps {start} and {end}: {argv[0]} {argv[1]}")
    return (times[end] - times[start]) / (end - start)


# --------------------------------------------------------------------------------------------------
# Speed


def compare_speed(cfg: CompareConfig) -> None:
    cfg = replace(cfg, max_steps=cfg.steps, max_epochs=0.0, max_tokens=0)
    device, dtype = cfg.device_and_dtype
    c = model_config(cfg, open_datasets(cfg.dataset, cfg.data_dir)[0].meta["vocab_size"])
    with torch.device("meta"):
        model = GPT(c)
    step_tokens = make_plan(cfg, 1, 1).step_tokens
    start, end = cfg.warmup, cfg.steps
    if cfg.sampling:
        step_tokens = cfg.num_samples * cfg.max_new_tokens
        start, end = 1, 3  # SAMPLING prints three steps
    with tempfile.TemporaryDirectory() as tmp:
        commands = commands_of(cfg, c, Path(tmp))
        run_once = partial(seconds_per_step, folder=Path(tmp), start=start, end=end)
        seconds = in_turns(commands, cfg.rounds, lambda name: [run_once(commands[name])])
    rates = {name: step_tokens / statistics.median(s) for name, s in seconds.items()}

    flops = 0 if cfg.sampling else model.flops_per_token(cfg.block_size)
    peak, source = peak_tflops(device, dtype, cfg.peak_tflops)
    rows = []
    for name, rate in rates.items():
        row = {"": name, "tok/s": rate, "ours / it": f"{rates['ours'] / rate:.2f}x"}
        if flops:
            tflops = rate * flops / 1e12
            row |= {"TFLOPS": tflops, "MFU": f"{tflops / peak:.1%}" if peak else ""}
        times = " ".join(f"{s:.4g}" for s in seconds[name])
        rows.append(row | {"seconds per step, turn by turn": times})
    table(source if flops else "sampling", rows)

    facts = facts_of(device)
    if cfg.hf:
        facts["versions"] += f", transformers {version('transformers')}"
    facts |= {"seconds": seconds, "tokens_per_step": step_tokens, "tokens_per_s": rates}
    write_json(cfg.json, facts | {"flops_per_token": flops, "peak_tflops": peak})


# --------------------------------------------------------------------------------------------------
# The time to a loss

Finish = dict[str, float]  # what a training has come to, as finish_of() says


def compare_losses(cfg: CompareConfig) -> None:
    finishes: dict[str, list[Finish]] = {"nanoGPT": [], "ours": []}
    for seed in cfg.seeds:
        with tempfile.TemporaryDirectory() as folder:
            seeded = replace(cfg, seed=seed)
            finishes["nanoGPT"].append(nanogpt_finish(seeded, Path(folder)))
            finishes["ours"].append(our_finish(seeded, Path(folder)))
        table(f"seed {seed}", [{"": name} | ends[-1] for name, ends in finishes.items()])
    keys = ("loss", "training", "command")
    peer, our = (
        [statistics.median(e[k] for e in ends) for k in keys] for ends in finishes.values()
    )
    times = f"{peer[1] / our[1]:.2f} times as long in training"
    times += f", and {peer[2] / our[2]:.2f} times from command to exit"
    print(f"nanoGPT took {times}; our loss less its loss is {our[0] - peer[0]:+.4f}")
    facts = facts_of(torch.device("cpu"))
    write_json(cfg.json, facts | {"seeds": cfg.seeds, "finishes": finishes})


def nanogpt_finish(cfg: CompareConfig, folder: Path) -> Finish:
    """Run nanoGPT's train.py. It saves its weights at each evaluation, also after the last step."""
    steps = int(re.findall(r"--max_iters=(\d+)", cfg.recipe)[-1])
    # On a GPU the time that nanoGPT prints is that of a step only if each step prints a line.
    options = ["--out_dir=out", "--always_save_checkpoint=True", "--log_interval=1"]
    argv = nanogpt_command(cfg, folder, [*shlex.split(cfg.recipe), *options])
    start_time = time.perf_counter()
    output = "".join(line for _, line in lines_of(argv, folder))
    command = time.perf_counter() - start_time
    times = [float(ms) for ms in re.findall(r"^iter \d+: .*time ([0-9.]+)ms", output, re.M)]
    saved = folder / "out" / "ckpt.pt"
    if not saved.exists() or torch.load(saved, weights_only=True)["iter_num"] != steps:
        raise UserError(f"nanoGPT has not saved its final weights: say --eval_interval={steps}")
    return finish_of(cfg, saved, steps, times, command)


def our_finish(cfg: CompareConfig, folder: Path) -> Finish:
    """Run this repository's train.py."""
    start_time = time.perf_counter()
    for _ in lines_of(our_command(cfg, folder), folder):
        pass
    command = time.perf_counter() - start_time
    records = read_metrics(folder / "ours" / "run" / "metrics.jsonl")
    times = [r["step_ms"] for r in records if "step_ms" in r]
    checkpoint = newest_checkpoint(folder / "ours" / "run" / "ckpt")
    return finish_of(cfg, checkpoint, records[0]["steps"], times[1:] or times, command)


def finish_of(
    cfg: CompareConfig, path: Path, steps: int, step_ms: list[float], command: float
) -> Finish:
    """Return the figures of the final weights in `path`.

    loss: on all windows of val.bin, in fp32 on the CPU. training: seconds, as the steps times the
    median of step_ms. command: seconds from the command to its exit.
    """
    machine = start("cpu", "float32")
    model = from_pretrained(path)
    if model.config.block_size != cfg.block_size:
        raise UserError(f"block_size is {model.config.block_size} there and {cfg.block_size} here")
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    loss = evaluate(model, open_windows(data, "val", cfg.block_size), 0, 64, machine)
    training = steps * statistics.median(step_ms) / 1e3
    parameters = model.num_params()["total"]
    return dict(loss=loss, training=training, command=command, steps=steps, parameters=parameters)


def main() -> None:
    cfg = with_data(parse(CompareConfig, doc=__doc__))
    # The contestants run in another folder, where relative paths would lead nowhere.
    nanogpt = str(Path(cfg.nanogpt).resolve()) if cfg.nanogpt else ""
    cfg = replace(cfg, data_dir=str(Path(cfg.data_dir).resolve()), nanogpt=nanogpt)
    if cfg.recipe:
        compare_losses(cfg)
    else:
        compare_speed(cfg)


if __name__ == "__main__":
    run(main)
