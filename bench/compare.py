"""Ours against a peer's trainer: the same model, batch and data, by turns in one run on this machine; medians and ratios.

    python bench/compare.py config/gpt2_124m.py --dataset=mine --nanogpt=../nanoGPT      # nanoGPT's own train.py, checked out there
    python bench/compare.py config/minimind_26m.py --dataset=zh --hf                     # transformers' Trainer, the same model
    python bench/compare.py config/gpt2_124m.py --dataset=mine --nanogpt=../nanoGPT --sampling

Any setting of train.py can be given, as to train.py. All are timed from outside by one clock: the time between the lines that
they print for step `warmup` and for the last step, each step printed, evaluation and saving out of the way. Without a peer it times
ours alone.
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
from tqdm import tqdm

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `python bench/compare.py` finds ours
from configurator import UserError, changes, parse, run  # noqa: E402
from hardware.machine import pick_dtype  # noqa: E402
from hardware.peak import device_name, peak_tflops, read_gb_s  # noqa: E402
from model import GPT  # noqa: E402
from text.dataset import open_datasets  # noqa: E402
from training.huggingface import to_config  # noqa: E402
from training.plan import make_plan  # noqa: E402
from training.settings import TrainConfig, model_config  # noqa: E402


@dataclass(frozen=True)
class CompareConfig(TrainConfig):
    # ---- Peers ----
    nanogpt: str = ""  # a checkout of nanoGPT
    hf: bool = False  # transformers' Trainer, with the model that our checkpoint would hold
    peer_compile: bool = False  # torch.compile for the peers as well (nanoGPT's default on a GPU)
    sampling: bool = False  # compare sampling in place of training
    num_samples: int = 1  # sampling: texts in a batch
    max_new_tokens: int = 256  # sampling: tokens in each
    # ---- Measurement ----
    steps: int = 30  # of each turn
    warmup: int = 10  # of them not timed
    rounds: int = 3  # turns of each contestant
    json: str = ""  # write the figures here too

    def problems(self) -> list[str]:
        wrong = TrainConfig.problems(replace(self, max_steps=1))  # its length is `steps`
        found = not self.nanogpt or (Path(self.nanogpt) / "train.py").exists()
        wrong += [] if found else [f"no train.py in {self.nanogpt}"]
        wrong += [] if 0 < self.warmup < self.steps else ["warmup must be positive and below steps"]
        return wrong + ["rounds must be positive"] * (self.rounds < 1)


# ---------------------------------------------------------------------------------------------------------------------
# The contestants: each is a command that prints a line a step, and the word that such a line begins with


def ours(cfg: CompareConfig, folder: Path) -> list[str]:
    theirs = {f.name for f in fields(CompareConfig)} - {f.name for f in fields(TrainConfig)}
    plan = dict(eval_every=10**9, eval_tokens=1, save_every=10**9)
    plan |= dict(log_every=1, progress="line", out_dir=str(folder / "ours"), run_name="run", overwrite=True)
    settings = {k: v for k, v in changes(cfg).items() if k not in theirs} | plan
    return [sys.executable, str(REPO / "train.py"), *(f"--{k}={v}" for k, v in settings.items())]


def nanogpt(cfg: CompareConfig, folder: Path) -> list[str]:
    """Its train.py as it is, on our .bin files: it reads the same format."""
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    link = folder / "data" / "ours"
    if not link.exists():
        link.mkdir(parents=True)
        (folder / "configurator.py").symlink_to(Path(cfg.nanogpt) / "configurator.py")  # it looks for it right here
        for split in ("train", "val"):
            (link / f"{split}.bin").symlink_to((data.folder / f"{split}.bin").resolve())
        (link / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.meta["vocab_size"]}))
    plan, device, dtype = make_plan(cfg, 1, 1), *machine(cfg)
    settings = {k: getattr(cfg, k) for k in ("n_layer", "n_head", "n_embd", "block_size", "dropout")}
    settings |= dict(dataset="ours", batch_size=plan.batch_size, gradient_accumulation_steps=plan.accum)
    settings |= dict(bias=model_config(cfg, 1).bias, device=device, dtype=str(dtype).removeprefix("torch."))
    settings |= dict(
        compile=cfg.peer_compile, max_iters=cfg.steps - 1, eval_interval=10**9, eval_iters=1, log_interval=1
    )
    script = str((Path(cfg.nanogpt) / "train.py").resolve())
    return [sys.executable, script, *(f"--{k}={v}" for k, v in settings.items())]


HF_TRAINER = """
import json, sys
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
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
    """transformers' Trainer at its fast settings: fused AdamW, SDPA, bf16 autocast where ours has it."""
    data = open_datasets(cfg.dataset, cfg.data_dir)[0]
    plan, device, dtype = make_plan(cfg, 1, 1), *machine(cfg)
    training = dict(output_dir=str(folder / "hf"), max_steps=cfg.steps, per_device_train_batch_size=plan.batch_size)
    training |= dict(gradient_accumulation_steps=plan.accum, learning_rate=cfg.lr, weight_decay=cfg.weight_decay)
    training |= dict(
        optim="adamw_torch_fused", bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16, use_cpu=device == "cpu"
    )
    training |= dict(
        torch_compile=cfg.peer_compile, logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True
    )
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
    model.init_weights()  # nanoGPT's draws its own
model.to(device, getattr(torch, dtype)).eval()
idx = torch.zeros(batch, 1, dtype=torch.long, device=device)
with torch.inference_mode():
    for step in range(3):  # the first warms up
        if kind == "ours":
            for token in model.generate(idx, count):
                pass
        else:
            token = model.generate(idx, count)
        token.cpu()
        print("step", step + 1, flush=True)
"""


def sampling(repo: str, kind: str, cfg: CompareConfig) -> list[str]:
    """Both with fresh weights: the time does not depend on them. Ours in the dtype that sample.py would choose."""
    vocab_size, device = open_datasets(cfg.dataset, cfg.data_dir)[0].meta["vocab_size"], machine(cfg)[0]
    c = model_config(cfg, vocab_size)
    shape = dict(vocab_size=vocab_size, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, block_size=c.block_size)
    shape |= asdict(c) if kind == "ours" else dict(bias=c.bias, dropout=0.0)
    name = str(sampling_dtype(kind, cfg)).removeprefix("torch.")
    facts = [repo, kind, shape, name, device, cfg.num_samples, cfg.max_new_tokens]
    return [sys.executable, "-c", SAMPLING, json.dumps(facts)]


def sampling_dtype(kind: str, cfg: CompareConfig) -> torch.dtype:
    device, dtype = machine(cfg)
    return dtype if kind == "ours" or device != "cpu" else torch.float32


def machine(cfg: CompareConfig) -> tuple[str, torch.dtype]:
    kind = cfg.device
    if kind == "auto":
        kind = (torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")).type
    return kind, pick_dtype(cfg.dtype, torch.device(kind))[0]


# ---------------------------------------------------------------------------------------------------------------------


def seconds_per_line(argv: list[str], folder: Path, first: int, last: int, words: tuple[str, ...]) -> float:
    """Run a command; the seconds between its lines for step `first` and step `last`, over the steps between."""
    times: dict[int, float] = {}
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not any("cuda:" in a for a in argv):  # of several GPUs, transformers' Trainer would take all by itself
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)
    output = []
    for line in process.stdout:
        output.append(line)
        parts = line.replace(":", " ").replace("/", " ").split()
        if len(parts) > 1 and parts[0] in words and parts[1].isdigit():
            times.setdefault(int(parts[1]), time.perf_counter())
        if last in times:  # what it does behind that, an evaluation and a checkpoint, is not timed
            process.kill()
            break
    process.stdout.close()
    process.wait()
    if not {first, last} <= times.keys():
        print("".join(output)[-4000:], file=sys.stderr)
        raise UserError(f"the above ended with exit code {process.returncode}: {' '.join(argv)[:200]} ...")
    return (times[last] - times[first]) / (last - first)


def main() -> None:
    cfg = parse(CompareConfig, doc=__doc__)
    # The contestants run in a folder of their own.
    absolute = {k: str(Path(getattr(cfg, k)).resolve()) for k in ("data_dir", "nanogpt") if getattr(cfg, k)}
    cfg = replace(cfg, max_steps=cfg.steps, max_epochs=0.0, max_tokens=0, **absolute)
    plan, device = make_plan(cfg, 1, 1), machine(cfg)[0]
    open_datasets(cfg.dataset, cfg.data_dir)
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        if cfg.sampling:
            commands = {"ours": sampling(str(REPO), "ours", cfg)}
            if cfg.nanogpt:
                commands["nanoGPT"] = sampling(cfg.nanogpt, "nanogpt", cfg)
            first, last, unit = 1, 3, cfg.num_samples * cfg.max_new_tokens
        else:
            makers: dict[str, Callable] = {"ours": ours}
            makers |= {"nanoGPT": nanogpt} if cfg.nanogpt else {}
            makers |= {"HF Trainer": hf} if cfg.hf else {}
            commands = {name: make(cfg, folder) for name, make in makers.items()}
            first, last, unit = cfg.warmup, cfg.steps - 1, plan.step_tokens
        for _ in tqdm(range(cfg.rounds), "rounds", disable=None):
            for name, argv in commands.items():
                rows.setdefault(name, []).append(seconds_per_line(argv, folder, first, last, ("step", "iter")))
    rates = {name: unit / statistics.median(seconds) for name, seconds in rows.items()}
    with torch.device("meta"):
        model = GPT(model_config(cfg, open_datasets(cfg.dataset, cfg.data_dir)[0].meta["vocab_size"]))
    if cfg.sampling:
        # Bound by memory: a token's share of the weights, and in ours the keys and values that it needs. (A CUDA graph reads all
        # the cache, about twice that.)
        peak = read_gb_s(torch.device(device))
        source = f"{peak:.1f} GB/s, a plain sum over memory measured here and now"
        heads, scale, c = ("GB/s", "of it"), 1e9, model.config
        key, peak_key = "bytes_per_token", "peak_gb_per_s"
        weights = model.num_params()["matmul"] / cfg.num_samples
        past = c.n_layer * c.n_kv_head * c.head_dim * cfg.max_new_tokens  # k and v of half of them, on average
        work = {name: (weights + past * (name == "ours")) * sampling_dtype(name, cfg).itemsize for name in rates}
    else:
        peak, source = peak_tflops(torch.device(device), machine(cfg)[1], cfg.peak_tflops)
        heads, scale = ("TFLOPS", "MFU"), 1e12
        key, peak_key = "flops_per_token", "peak_tflops"
        work = dict.fromkeys(rates, model.flops_per_token(cfg.block_size))
    heads = f"{heads[0]:>8} {heads[1]:>6}   seconds a step, of each turn"
    print(f"{source}\n{'':<12} {'tok/s':>12} {'ours / it':>10} {heads}")
    for name, rate in rates.items():
        done, turns = rate * work[name] / scale, " ".join(f"{s:.4g}" for s in rows[name])
        of_peak = f"{done / peak:.1%}" if peak else ""
        print(f"{name:<12} {rate:>12,.1f} {rates['ours'] / rate:>9.2f}x {done:>8.3f} {of_peak:>6}   {turns}")
    if cfg.json:
        packages = {p: version(p) for p in ("torch", "numpy", *(["transformers", "accelerate"] if cfg.hf else []))}
        facts = {
            "machine": device_name(torch.device(device)),
            "python": platform.python_version(),
            "versions": packages,
        }
        here = {sys.executable: "python", str(REPO): ".", str(folder): "TMP", cfg.nanogpt or "?": "nanoGPT"}
        for name, argv in commands.items():
            for path, word in here.items():  # of no meaning elsewhere
                argv = [a.replace(path, word) for a in argv]
            commands[name] = argv
        facts |= {"command": " ".join(["python bench/compare.py", *sys.argv[1:]]), "commands": commands, "unit": unit}
        facts |= {"seconds": rows, "tokens_per_s": rates, key: work, peak_key: peak}
        Path(cfg.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
