"""Compare the results of the working tree with those of another commit, bit for bit.

    PYTHONPATH=. python tests/same_runs.py COMMIT

Use it after a change that moves code and should not change any result. Both versions make the same
short runs on this machine, because another CPU rounds differently: prepare.py; a demo in bf16; gpt2
in fp32 with dropout and accumulation, stopped half-way and resumed; a run of two processes; an
evaluation and a text by sample.py. These must be equal: the .bin files, the weights, the moments of
AdamW, the loss and gradient norm of every step, and what sample.py prints.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from conftest import make_records, write_jsonl
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[1]
PREPARE = ["prepare.py", "--input=../corpus.jsonl", "--name=small"]
SAVING = ["--log_every=1", "--eval_every=10", "--save_every=10", "--keep=9"]
BOTH = ["--dataset=small", "--compile=false", "--device=cpu", *SAVING]
DEMO = ["config/demo.py", "--dtype=bfloat16", "--batch_size=2", "--batch_tokens=1024", *BOTH]
GPT2 = ["--preset=gpt2", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", *BOTH]
GPT2 += ["--batch_size=2", "--batch_tokens=256", "--dropout=0.1", "--dtype=float32"]
ONE = [*GPT2, "--run_name=gpt2", "--schedule=constant"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SAMPLE = ["sample.py", "--device=cpu"]
TEXTS = ["--num_samples=2", "--max_new_tokens=50", "--seed=1"]
RUNS = [
    [*PREPARE, "--vocab_size=400", "--val_fraction=0.1"],
    ["train.py", *DEMO, "--max_steps=30"],
    ["train.py", *ONE, "--max_steps=15"],
    ["train.py", *ONE, "--max_steps=30", "--init_from=resume"],
    [*TORCHRUN, "train.py", *GPT2, "--run_name=two", "--max_steps=20"],
    [*SAMPLE, "--ckpt=out/demo/ckpt/step_00000030", "--eval=data/small"],
    [*SAMPLE, "--ckpt=out/gpt2/ckpt/step_00000030", *TEXTS],
]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def of_tensors(state: object) -> str:
    """Return a hash of all tensors in nested dictionaries and lists, and of their names."""
    digest = hashlib.sha256()

    def add(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            digest.update(name.encode() + content)
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                add(f"{name}.{number}", item)

    add("", state)
    return digest.hexdigest()[:16]


def results(tree: Path) -> dict[str, str]:
    """Make all runs in a copy of the repository; return name of a result -> its hash."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = {}
    for number, argv in enumerate(RUNS):
        command = [sys.executable, *argv]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{tree}: {' '.join(argv)}: exit code {done.returncode}\n{done.stderr}")
        if "sample.py" in argv:
            found[f"sample.py, run {number}"] = sha256(done.stdout.encode())
    for path in sorted(tree.glob("data/*/*.bin")):
        found[str(path.relative_to(tree))] = sha256(path.read_bytes())
    for checkpoint in sorted(tree.glob("out/*/ckpt/step_*")):
        name = str(checkpoint.relative_to(tree))
        found[f"{name}, weights"] = of_tensors(load_file(checkpoint / "model.safetensors"))
        training = torch.load(checkpoint / "train_state.pt", weights_only=True)
        found[f"{name}, moments"] = of_tensors(training["optimizer"])
    for path in sorted(tree.glob("out/*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        keys = ("step", "loss", "grad_norm", "val_loss")
        kept = [{k: v for k, v in line.items() if k in keys} for line in lines]
        content = json.dumps([line for line in kept if len(line) > 1]).encode()
        found[str(path.relative_to(tree))] = sha256(content)
    return found


def git(folder: Path, *arguments: str) -> str:
    """Run a git command in a folder; return what it prints."""
    return subprocess.check_output(["git", *arguments], cwd=folder, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as root:
        write_jsonl(Path(root) / "corpus.jsonl", make_records(300))
        there = Path(root) / "there"
        here = Path(root) / "here"
        for folder in (there, here):
            git(REPO, "clone", "-q", str(REPO), str(folder))
        git(there, "-c", "advice.detachedHead=false", "checkout", "-q", commit)
        git(here, "rm", "-rq", ".")
        # The files of the working tree as they are on the disk, also those that are not committed.
        for name in sorted(set(git(REPO, "ls-files", "-cmo", "--exclude-standard").splitlines())):
            if (REPO / name).is_file():
                (here / name).parent.mkdir(parents=True, exist_ok=True)
                (here / name).write_bytes((REPO / name).read_bytes())
        before = results(there)
        now = results(here)
    differ = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    for name in differ:
        print(f"{name}: {before.get(name, 'missing')} by {commit}, {now.get(name, 'missing')} here")
    print(f"{len(before) - len(differ)} of {len(before)} results are equal")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
