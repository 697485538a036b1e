"""Does the working tree do what another commit does, to the bit? For changes that move code and mean to change nothing.

    python tests/same_runs.py COMMIT

A few short runs are made by both, on this machine (another CPU rounds otherwise): prepare.py; a demo in bf16; gpt2 in fp32
with dropout and accumulation, stopped half-way and resumed; two processes; an evaluation and a text of sample.py.
What must be equal: the .bin files, weights, moments, the losses and norms of every step, what sample.py prints.
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
SAVING = ["--compile=false", "--device=cpu", "--log_every=1", "--eval_every=10", "--save_every=10", "--keep=9"]
GPT2 = ["--preset=gpt2", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=2"]
GPT2 += ["--batch_tokens=256", "--dropout=0.1", "--dtype=float32", "--run_name=gpt2", "--dataset=small", *SAVING]
DEMO = ["config/demo.py", "--dtype=bfloat16", "--dataset=small", "--batch_size=2", "--batch_tokens=1024", *SAVING]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", *GPT2, "--run_name=two"]
RUNS = [
    ["prepare.py", "--input=../corpus.jsonl", "--name=small", "--vocab_size=400", "--val_fraction=0.1"],
    ["train.py", *DEMO, "--max_steps=30"],
    ["train.py", *GPT2, "--schedule=constant", "--max_steps=15"],
    ["train.py", *GPT2, "--schedule=constant", "--max_steps=30", "--init_from=resume"],
    [*TWO, "--max_steps=20"],
    ["sample.py", "--ckpt=out/demo/ckpt/step_00000030", "--eval=data/small", "--device=cpu"],
    [
        "sample.py",
        "--ckpt=out/gpt2/ckpt/step_00000030",
        "--num_samples=2",
        "--max_new_tokens=50",
        "--seed=1",
        "--device=cpu",
    ],
]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def of_tensors(state: object) -> str:
    """A hash of all numbers in nested dictionaries and lists, and of their places."""
    digest = hashlib.sha256()

    def add(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                add(f"{name}.{number}", item)

    add("", state)
    return digest.hexdigest()[:16]


def results(tree: Path) -> dict[str, str]:
    """What the runs leave in a tree, by name."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = {}
    for number, argv in enumerate(RUNS):
        done = subprocess.run([sys.executable, *argv], cwd=tree, env=environment, capture_output=True, text=True)
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
        kept = [{k: v for k, v in line.items() if k in ("step", "loss", "grad_norm", "val_loss")} for line in lines]
        found[str(path.relative_to(tree))] = sha256(json.dumps([k for k in kept if len(k) > 1]).encode())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as root:
        write_jsonl(Path(root) / "corpus.jsonl", make_records(300))
        there, here = Path(root) / "there", Path(root) / "here"
        subprocess.run(["git", "clone", "-q", REPO, there], check=True)
        subprocess.run(["git", "-c", "advice.detachedHead=false", "checkout", "-q", commit], cwd=there, check=True)
        subprocess.run(["git", "clone", "-q", REPO, here], check=True)
        names = subprocess.run(
            ["git", "ls-files", "-cmo", "--exclude-standard"], cwd=REPO, check=True, capture_output=True, text=True
        )
        subprocess.run(["git", "rm", "-rq", "."], cwd=here, check=True)
        for name in sorted(set(names.stdout.splitlines())):  # the working tree, as it is on the disk
            if (REPO / name).is_file():
                (here / name).parent.mkdir(parents=True, exist_ok=True)
                (here / name).write_bytes((REPO / name).read_bytes())
        before, now = results(there), results(here)
    differ = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    for name in differ:
        print(f"{name}: {before.get(name, 'missing')} by {commit}, {now.get(name, 'missing')} here")
    print(f"{len(before) - len(differ)} of {len(before)} results are equal")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
