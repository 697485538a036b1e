"""Compare the speed of this trainer with that of a peer: the same model, batch, data and AdamW.

    # nanoGPT's own train.py, from a checkout of nanoGPT
    python bench/compare.py config/gpt2_124m.py --dataset=mine --nanogpt=../nanoGPT
    # transformers' Trainer, with the same model
    python bench/compare.py config/minimind_26m.py --dataset=zh --hf
    # sampling instead of training
    python bench/compare.py config/gpt2_124m.py --dataset=mine --nanogpt=../nanoGPT --sampling

Every setting of train.py is accepted too. The contestants run as processes of their own, in turns,
on this machine. All of them are timed from outside by one clock: it measures the time from the line
that a contestant prints for step `warmup` to the line for step `steps` - 1. Every step prints a
line; evaluating and saving do not fall into that time. The results are medians over the turns, and
ratios of them. Without a peer, only this trainer is timed.
"""

import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/compare.py` finds the modules below
from configurator import UserError, changes, parse, run  # noqa: E402
from hardware.machine import pick_dtype  # noqa: E402
from hardware.peak import device_name, peak_tflops, read_gb_s  # noqa: E402
from hardware.terminal import ProgressBar  # noqa: E402
from model import GPT  # noqa: E402
from text.dataset import open_datasets  # noqa: E402
from training.huggingface import to_config  # noqa: E402
from training.plan import make_plan  # noqa: E402
from training.settings import TrainConfig, model_config, with_data  # noqa: E402


@dataclass(frozen=True)
class CompareConfig(TrainConfig):
    # ---- Peers ----
    nanogpt: str = ""  # folder of a nanoGPT checkout, to compare with its train.py
    hf: bool = False  # compare with transformers' Trainer, on the model that train.py saves
    peer_compile: bool = False  # torch.compile for the peers as well (nanoGPT's default on a GPU)
    sampling: bool = False  # compare sampling instead of training
    num_samples: int = 1  # sampling: texts in a batch
    max_new_tokens: int = 256  # sampling: tokens of each text
    # ---- Measurement ----
    steps: int = 30  # steps in each turn
    warmup: int = 10  # steps at the start of a turn that are not timed
    rounds: int = 3  # turns of each contestant
    json: str = ""  # also write the figures to this file

    def problems(self) -> list[str]:
        wrong = TrainConfig.problems(replace(self, max_steps=1))  # `steps` sets the length here
        if self.nanogpt and not (Path(self.nanogpt) / "train.py").exists():
            wrong.append(f"no train.py in {self.nanogpt}")
        if not 0 < self.warmup < self.steps - 1:  # step `warmup` to step `steps` - 1 are timed
            wrong.append("warmup must be positive and below steps - 1")
        if self.rounds < 1:
            wrong.append("rounds must be positive")
        return wrong


# --------------------------------------------------------------------------------------------------
# The contestants. Each function returns a command that prints one line for each step.


def ours(cfg: CompareConfig, folder: Path) -> list[str]:
    """Return the command of this repository's train.py."""
    only_here = {f.name for f in fields(CompareConfig)} - {f.name for f in fields(TrainConfig)}
    settings = {k: v for k, v in changes(cfg).items() if k not in only_here}
    settings |= dict(eval_every=10**9, eval_tokens=1, save_every=10**9, log_every=1)
    settings |= dict(sample_every=0, optimizer="adamw")  # as the peers have it
    settings |= dict(follow=False, out_dir=str(folder / "ours"), run_name="run", overwrite=True)
    return [sys.executable, str(REPO / "train.py"), *(f"--{k}={v}" for k, v in settings.items())]


def nanogpt(cfg: CompareConfig, folder: Path) -> list[str]:
    """Return the command of nanoGPT's unchanged train.py, on our .bin files.

    nanoGPT reads the same format. It looks for data/ and configurator.py in the working directory,
    so this function links both into `folder`.
    """
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    link = folder / "data" / "ours"
    if not link.exists():
        link.mkdir(parents=True)
        (folder / "configurator.py").symlink_to(Path(cfg.nanogpt) / "configurator.py")
        for split in ("train", "val"):
            (link / f"{split}.bin").symlink_to((data.folder / f"{split}.bin").resolve())
        (link / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.meta["vocab_size"]}))
    plan = make_plan(cfg, 1, 1)
    device, dtype = machine(cfg)
    shape = ("n_layer", "n_head", "n_embd", "block_size", "dropout")
    settings = {name: getattr(cfg, name) for name in shape}
    settings |= dict(dataset="ours", batch_size=plan.batch_size)
    settings |= dict(gradient_accumulation_steps=plan.accum, bias=model_config(cfg, 1).bias)
    settings |= dict(device=device, dtype=str(dtype).removeprefix("torch."))
    settings |= dict(compile=cfg.peer_compile, max_iters=cfg.steps - 1)
    settings |= dict(eval_interval=10**9, eval_iters=1, log_interval=1)
    script = str((Path(cfg.nanogpt) / "train.py").resolve())
    return [sys.executable, script, *(f"--{k}={v}" for k, v in settings.items())]


HF_TRAINER = """
import json, sys
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import Trainer, TrainerCallback, TrainingArguments
config, file, dtype, T, training = json.loads(sys.argv[1])
ids = np.memmap(file, dtype=dtype, mode="r")

class Windows(torch.utils.data.Dataset):
    def __len__(self):
        return (len(ids) - 1) // T
    def __getitem__(self, i):
        window = torch.from_numpy(ids[i * T : (i + 1) * T].astype(np.int64))
        return {"input_ids": window, "labels": window}

class Lines(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}", flush=True)

model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
Trainer(model, TrainingArguments(**training), train_dataset=Windows(), callbacks=[Lines()]).train()
"""


def hf(cfg: CompareConfig, folder: Path) -> list[str]:
    """Return the command of transformers' Trainer with its fast settings.

    These are fused AdamW, SDPA, and autocast in 16 bits where our trainer uses it.
    """
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    plan = make_plan(cfg, 1, 1)
    device, dtype = machine(cfg)
    training = dict(output_dir=str(folder / "hf"), max_steps=cfg.steps)
    training |= dict(per_device_train_batch_size=plan.batch_size)
    training |= dict(gradient_accumulation_steps=plan.accum)
    training |= dict(learning_rate=cfg.lr, weight_decay=cfg.weight_decay, optim="adamw_torch_fused")
    training |= dict(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    training |= dict(use_cpu=device == "cpu", torch_compile=cfg.peer_compile)
    training |= dict(logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True)
    config = to_config(model_config(cfg, data.meta["vocab_size"]))
    facts = [config, str(data.folder / "train.bin"), data.meta["dtype"], cfg.block_size, training]
    return [sys.executable, "-c", HF_TRAINER, json.dumps(facts)]


SAMPLING = """
import json, sys, time
repo, kind, shape, dtype, device, batch, count = json.loads(sys.argv[1])
sys.path.insert(0, repo)
import torch
from model import GPT, GPTConfig
torch.manual_seed(0)
model = GPT(GPTConfig(**shape))
if kind == "ours":
    model.init_weights()  # nanoGPT's constructor draws its weights by itself
model.to(device, getattr(torch, dtype)).eval()
idx = torch.zeros(batch, 1, dtype=torch.long, device=device)
with torch.inference_mode():
    for step in range(3):  # the first one warms up
        if kind == "ours":
            for token in model.generate(idx, count):
                pass
        else:
            token = model.generate(idx, count)
        token.cpu()
        print("step", step + 1, flush=True)
"""


def sampling(repo: str, kind: str, cfg: CompareConfig) -> list[str]:
    """Return the command that samples with the model.py in `repo`; kind: "ours" or "nanogpt".

    The weights are freshly initialised, because the time does not depend on their values.
    """
    vocab_size = open_datasets(cfg.dataset, cfg.data_dir)[0].meta["vocab_size"]
    device = machine(cfg)[0]
    c = model_config(cfg, vocab_size)
    shape = dict(vocab_size=vocab_size, n_layer=c.n_layer, n_head=c.n_head)
    shape |= dict(n_embd=c.n_embd, block_size=c.block_size)
    shape |= asdict(c) if kind == "ours" else dict(bias=c.bias, dropout=0.0)
    dtype = str(sampling_dtype(kind, cfg)).removeprefix("torch.")
    facts = [repo, kind, shape, dtype, device, cfg.num_samples, cfg.max_new_tokens]
    return [sys.executable, "-c", SAMPLING, json.dumps(facts)]


def sampling_dtype(kind: str, cfg: CompareConfig) -> torch.dtype:
    """Return the dtype of the weights: for ours the one that sample.py would choose.

    nanoGPT samples in the same dtype, except on a CPU, where it samples in float32.
    """
    device, dtype = machine(cfg)
    return dtype if kind == "ours" or device != "cpu" else torch.float32


def machine(cfg: CompareConfig) -> tuple[str, torch.dtype]:
    """Return the device to run on, and the dtype of autocast there."""
    kind = cfg.device
    if kind == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        kind = (found or torch.device("cpu")).type
    try:
        device = torch.device(kind)
    except RuntimeError:
        raise UserError(f"--device={cfg.device}: torch knows no such device") from None
    return kind, pick_dtype(cfg.dtype, device)[0]


def training_commands(cfg: CompareConfig, folder: Path) -> dict[str, list[str]]:
    """Return the command of each contestant in training, by its name."""
    makers: dict[str, Callable[[CompareConfig, Path], list[str]]] = {"ours": ours}
    if cfg.nanogpt:
        makers["nanoGPT"] = nanogpt
    if cfg.hf:
        makers["HF Trainer"] = hf
    return {name: make(cfg, folder) for name, make in makers.items()}


def sampling_commands(cfg: CompareConfig) -> dict[str, list[str]]:
    """Return the command of each contestant in sampling, by its name."""
    commands = {"ours": sampling(str(REPO), "ours", cfg)}
    if cfg.nanogpt:
        commands["nanoGPT"] = sampling(cfg.nanogpt, "nanogpt", cfg)
    return commands


# --------------------------------------------------------------------------------------------------
# The clock


def seconds_per_line(
    argv: list[str], folder: Path, first: int, last: int, words: tuple[str, ...]
) -> float:
    """Run a command, and return the seconds per step between its lines for `first` and `last`.

    words: the line of a step begins with one of these, followed by the step's number.
    Raises UserError if the command ends without having printed both lines.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not any("cuda:" in a for a in argv):
        # Show one GPU only: transformers' Trainer would use all that it sees.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(argv, cwd=folder, env=environment, **streams)
    times: dict[int, float] = {}  # step -> when its line came
    output = []
    for line in process.stdout:
        output.append(line)
        parts = line.replace(":", " ").replace("/", " ").split()
        if len(parts) > 1 and parts[0] in words and parts[1].isdigit():
            times.setdefault(int(parts[1]), time.perf_counter())
        if last in times:  # the rest, such as an evaluation and a checkpoint, is not timed
            process.kill()
            break
    process.stdout.close()
    process.wait()
    if not {first, last} <= times.keys():
        print("".join(output)[-4000:], file=sys.stderr)
        command = f"{' '.join(argv)[:200]} ..."
        raise UserError(f"the above ended with exit code {process.returncode}: {command}")
    return (times[last] - times[first]) / (last - first)


def take_turns(
    commands: dict[str, list[str]], rounds: int, folder: Path, first: int, last: int
) -> dict[str, list[float]]:
    """Run all commands one after the other, `rounds` times; return the seconds a step of each."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in ProgressBar("rounds", range(rounds)):
        for name, argv in commands.items():
            found = seconds_per_line(argv, folder, first, last, ("step", "iter"))
            seconds[name].append(found)
    return seconds


# --------------------------------------------------------------------------------------------------
# Reporting


def bytes_per_token(cfg: CompareConfig, model: GPT, name: str) -> float:
    """Return the bytes of memory that must be read to sample one token.

    One reading of the weights serves all texts of the batch. Ours also reads the keys and values of
    the earlier tokens. (On CUDA its graph reads the whole cache, about twice as many. That is not
    counted, because it is not needed.)
    """
    c = model.config
    numbers = model.num_params()["matmul"] / cfg.num_samples
    if name == "ours":
        # A key and a value for half of the tokens, which is the average over the text.
        numbers += c.n_layer * c.n_kv_head * c.head_dim * cfg.max_new_tokens
    return numbers * sampling_dtype(name, cfg).itemsize


def print_table(
    seconds: dict[str, list[float]],
    rates: dict[str, float],
    done: dict[str, float],
    units: tuple[str, str],
    peak: float | None,
) -> None:
    """Print a row for each contestant.

    rates: tokens a second. done: work a second, in units[0]. units[1]: the heading of its share of
    `peak`.
    """
    heads = f"{units[0]:>8} {units[1]:>6}   seconds per step, turn by turn"
    print(f"{'':<12} {'tok/s':>12} {'ours / it':>10} {heads}")
    for name, rate in rates.items():
        turns = " ".join(f"{s:.4g}" for s in seconds[name])
        share = f"{done[name] / peak:.1%}" if peak else ""
        ratio = f"{rates['ours'] / rate:>9.2f}x"
        print(f"{name:<12} {rate:>12,.1f} {ratio} {done[name]:>8.3f} {share:>6}   {turns}")


def portable(
    commands: dict[str, list[str]], cfg: CompareConfig, folder: str
) -> dict[str, list[str]]:
    """Return the commands with words in place of paths that exist on this machine only."""
    words = {sys.executable: "python", str(REPO): ".", folder: "TMP"}
    if cfg.nanogpt:
        words[cfg.nanogpt] = "nanoGPT"
    found = {}
    for name, argv in commands.items():
        for path, word in words.items():
            argv = [a.replace(path, word) for a in argv]
        found[name] = argv
    return found


def main() -> None:
    cfg = parse(CompareConfig, doc=__doc__)
    # The contestants run in another folder, where relative paths would lead nowhere.
    paths = {name: getattr(cfg, name) for name in ("data_dir", "nanogpt")}
    absolute = {name: str(Path(path).resolve()) for name, path in paths.items() if path}
    cfg = replace(cfg, max_steps=cfg.steps, max_epochs=0.0, max_tokens=0, **absolute)
    plan = make_plan(cfg, 1, 1)
    kind, dtype = machine(cfg)
    device = torch.device(kind)
    cfg = with_data(cfg)
    vocab_size = open_datasets(cfg.dataset, cfg.data_dir)[0].meta["vocab_size"]

    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        if cfg.sampling:
            commands = sampling_commands(cfg)
            first = 1
            last = 3  # SAMPLING prints three steps
            step_tokens = cfg.num_samples * cfg.max_new_tokens
        else:
            commands = training_commands(cfg, folder)
            first = cfg.warmup
            last = cfg.steps - 1
            step_tokens = plan.step_tokens
        seconds = take_turns(commands, cfg.rounds, folder, first, last)
    rates = {name: step_tokens / statistics.median(turns) for name, turns in seconds.items()}

    with torch.device("meta"):
        model = GPT(model_config(cfg, vocab_size))
    if cfg.sampling:  # bound by the speed of memory
        peak = read_gb_s(device)
        source = f"{peak:.1f} GB/s, a plain sum over memory measured here and now"
        units = ("GB/s", "of it")
        scale = 1e9
        work = {name: bytes_per_token(cfg, model, name) for name in rates}
        figures = {"bytes_per_token": work, "peak_gb_per_s": peak}
    else:  # bound by the speed of matrix products
        peak, source = peak_tflops(device, dtype, cfg.peak_tflops)
        units = ("TFLOPS", "MFU")
        scale = 1e12
        work = dict.fromkeys(rates, model.flops_per_token(cfg.block_size))
        figures = {"flops_per_token": work, "peak_tflops": peak}
    done = {name: rate * work[name] / scale for name, rate in rates.items()}
    print(source)
    print_table(seconds, rates, done, units, peak)

    if cfg.json:
        packages = ["torch", "numpy"] + (["transformers", "accelerate"] if cfg.hf else [])
        facts = {
            "machine": device_name(device),
            "python": platform.python_version(),
            "versions": {package: version(package) for package in packages},
            "command": " ".join(["python bench/compare.py", *sys.argv[1:]]),
            "commands": portable(commands, cfg, str(folder)),
            "unit": step_tokens,
            "seconds": seconds,
            "tokens_per_s": rates,
        }
        Path(cfg.json).write_text(json.dumps(facts | figures, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
