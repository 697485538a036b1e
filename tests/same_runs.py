"""Compare the results of the working tree with those of another commit, bit for bit.

    PYTHONPATH=. python tests/same_runs.py COMMIT

Use it after a change that moves code and should not change any result. Both versions make the same
short runs on this machine, because another CPU rounds differently: prepare.py; a demo in bf16; gpt2
in fp32 with dropout and accumulation, stopped half-way and resumed; a run of two processes; an
evaluation and a text by sample.py. These must be equal: the .bin files, the weights, the moments of
AdamW, the loss and gradient norm of every step, and what sample.py prints.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import REPO, end, make_records, metrics, write_jsonl

PREPARE = ["prepare.py", "--input=../corpus.jsonl", "--name=small"]
SAVING = ["--log_every=1", "--eval_every=10", "--save_every=10", "--keep=9"]
BOTH = ["--dataset=small", "--compile=false", "--device=cpu", *SAVING]
DEMO = ["config/docs.py", "--dtype=bfloat16", "--batch_size=2", "--batch_tokens=1024", *BOTH]
GPT2 = ["--preset=gpt2", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", *BOTH]
GPT2 += ["--batch_size=2", "--batch_tokens=256", "--dropout=0.1", "--dtype=float32"]
ONE = [*GPT2, "--run_name=gpt2", "--schedule=constant"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SAMPLE = ["sample.py", "--device=cpu"]
TEXTS = ["--prompt=The", "--num_samples=2", "--max_new_tokens=50", "--seed=1"]
RUNS = [
    [*PREPARE, "--vocab_size=400", "--val_fraction=0.1"],
    ["train.py", *DEMO, "--max_steps=30"],
    ["train.py", *ONE, "--max_steps=15"],
    ["train.py", *ONE, "--max_steps=30", "--init_from=resume"],
    [*TORCHRUN, "train.py", *GPT2, "--run_name=two", "--max_steps=20"],
    [*SAMPLE, "--ckpt=out/docs/ckpt/step_00000030", "--eval=data/small"],
    [*SAMPLE, "--ckpt=out/gpt2/ckpt/step_00000030", *TEXTS],
]


def results(tree: Path) -> dict[str, object]:
    """Make all runs in a copy of the repository; return what they have written and printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = {}
    for number, argv in enumerate(RUNS):
        command = [sys.executable, *argv]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{tree}: {' '.join(argv)}: exit code {done.returncode}\n{done.stderr}")
        if "sample.py" in argv:
            found[f"sample.py, run {number}"] = done.stdout
    for path in tree.glob("data/*/*.bin"):
        found[str(path.relative_to(tree))] = path.read_bytes()
    for path in tree.glob("out/*/ckpt/step_*"):
        tensors = end(path.parents[1], int(path.name[5:]))
        found[str(path.relative_to(tree))] = {key: x.tolist() for key, x in tensors.items()}
    for path in tree.glob("out/*/metrics.jsonl"):
        keys = ("loss", "grad_norm", "val_loss")
        found[str(path.relative_to(tree))] = [metrics(path.parent, key) for key in keys]
    return found


def main() -> None:
    [commit] = sys.argv[1:]
    with tempfile.TemporaryDirectory() as root:
        write_jsonl(Path(root) / "corpus.jsonl", make_records(300))
        there = Path(root) / "there"
        subprocess.check_call(["git", "clone", "-q", REPO, there])
        subprocess.check_call(["git", "checkout", "-q", "--detach", commit], cwd=there)
        shutil.copy(REPO / "config/docs.py", there / "config")  # other commits call it demo.py
        # The working tree as it is on the disk, also what is not committed.
        left_out = shutil.ignore_patterns(".*", "data", "out", "shared", "wandb")
        here = shutil.copytree(REPO, Path(root) / "here", ignore=left_out)
        before = results(there)
        now = results(here)
    differ = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    print("\n".join(differ))
    print(f"{len(before) - len(differ)} of {len(before)} results are equal")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
