"""Break real small trainings and preparations on purpose, restart them, and compare with one that was left alone.

    python tests/faults/harness.py --rounds 100        # or: make soak

Each round draws a job, and what happens to it: SIGKILL at a random moment, after a random step, or inside the writing of a
checkpoint; SIGTERM, SIGINT or SIGUSR1; a flipped byte, a cut or a deleted file in the newest checkpoint, or in the data set,
which must then be refused by name; a disk that is full for some steps (a small tmpfs, where one may be mounted). The job is
then started again by the same command until it ends. Identical means: the same bytes in the weights, the optimizer's state
and the loss, norm and validation loss of every step, each there once; for prepare.py, the same bytes in every file.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from conftest import TINY, make_records, write_jsonl  # noqa: E402

from configurator import parse, run  # noqa: E402

STEPS = 40
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
COMMON = [
    *TINY, f"--max_steps={STEPS}", "--save_every=4", "--eval_every=6", "--dropout=0.1", "--init_from=auto", "--n_embd=64",
]  # fmt: skip
JOBS = {  # name: (processes, options)
    "fp32": (1, []),
    "bf16": (1, ["--dtype=bfloat16"]),
    "epochs": (1, ["--block_size=256", "--batch_size=2", "--batch_tokens=8192"]),  # an epoch's edge every third step
    "compiled": (1, ["--compile=true"]),
    "2 processes": (2, []),
}
KILLS = ["kill at a random time", "kill after a step", "kill inside a save", "SIGTERM", "SIGINT", "SIGUSR1"]
DAMAGE = ["flip a byte", "cut a file", "lose a file"]  # of the newest checkpoint, after a kill
FAULTS = [*KILLS, *DAMAGE, *(f"{damage} of the data" for damage in DAMAGE), "full disk"]


def command(job: str, data: Path, out: Path) -> list[str]:
    n, options = JOBS[job]
    handed_on = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
    launch = ["-m", "torch.distributed.run", "--standalone", handed_on, f"--nproc_per_node={n}"] if n > 1 else []
    return [
        sys.executable,
        *launch,
        str(REPO / "train.py"),
        *COMMON,
        f"--data_dir={data}",
        f"--out_dir={out}",
        *options,
    ]


def start(argv: list[str]) -> subprocess.Popen:
    return subprocess.Popen(argv, stdout=-1, stderr=-1, text=True, env=ENVIRONMENT, start_new_session=True)


def workers(process: subprocess.Popen) -> dict[int, int]:
    """rank -> process id of what torchrun has started; each is in a session of its own and would outlive it."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    environment = {int(child): Path(f"/proc/{child}/environ").read_text().split("\0") for child in children}
    return {int(v[5:]): child for child, values in environment.items() for v in values if v.startswith("RANK=")}


def stop(process: subprocess.Popen, number: int) -> None:
    """SIGKILL takes torchrun and all workers, as when a machine goes down; others torchrun hands on."""
    hit = workers(process).values() if number == signal.SIGKILL else []
    for pid in (process.pid, *hit):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def steps_done(out: Path) -> int:
    try:
        return json.loads((out / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError):
        return 0


def saving(out: Path) -> bool:
    return any((out / "run" / "ckpt").glob(".tmp_*"))


def wait_for(process: subprocess.Popen, condition, seconds: float = 60) -> None:
    deadline = time.time() + seconds
    while process.poll() is None and not condition() and time.time() < deadline:
        time.sleep(0.0005)


def result(out: Path) -> dict:
    """All that must be identical."""
    folder = out / "run" / "ckpt" / f"step_{STEPS:08d}"
    state = torch.load(folder / "train_state.pt", weights_only=True)
    records = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "lr", "grad_norm", "val_loss", "tokens")
    return {
        "weights": load_file(folder / "model.safetensors"),
        "moments": {(i, k): v for i, s in state["optimizer"]["state"].items() for k, v in s.items()},
        "state": {k: v for k, v in state.items() if k not in ("optimizer", "scaler", "data_files")},
        "metrics": [(r["step"], k, r[k]) for r in records for k in keys if k in r],
    }


def identical(a: dict, b: dict) -> bool:
    tensors = all(
        a[part].keys() == b[part].keys() and all(torch.equal(a[part][k], b[part][k]) for k in a[part])
        for part in ("weights", "moments")
    )
    return tensors and a["state"] == b["state"] and a["metrics"] == b["metrics"]


@dataclass
class Round:
    job: str
    faults: list[str]
    starts: int = 0
    identical: bool = False
    traceback: str = ""
    seconds: float = 0.0


def hurt(folder: Path, fault: str, rng: random.Random) -> Path:
    """Damage one file of a folder; returns which."""
    path = rng.choice(sorted(folder.iterdir()))
    if fault.startswith("lose"):
        path.unlink()
    elif fault.startswith("cut"):
        os.truncate(path, rng.randrange(path.stat().st_size))
    else:
        with open(path, "r+b") as f:
            at = rng.randrange(path.stat().st_size)
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return path


def hurt_checkpoint(out: Path, fault: str, rng: random.Random) -> str:
    """As long as there is another one to fall back to."""
    whole = sorted(p.parent for p in (out / "run" / "ckpt").glob("step_*/manifest.json"))
    return f"{fault}: {hurt(whole[-1], fault, rng).name}" if len(whole) > 1 else "(too early for damage)"


def hurt_data(argv: list[str], data: Path, fault: str, rng: random.Random) -> tuple[str, str]:
    """(what was done, what is wrong with the answer). A start must name the file in one line; then it is put back."""
    shutil.copytree(data / "tiny", data / "whole")
    path, process = hurt(data / "tiny", fault, rng), start(argv)
    stderr = process.communicate(timeout=120)[1]
    shutil.rmtree(data / "tiny")
    (data / "whole").rename(data / "tiny")
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    # where meta.json has another hash or count than the file beside it, none can tell which of the two is damaged
    named = str(data / "tiny") if path.name == "meta.json" else path.name
    refused = process.returncode != 0 and len(errors) == 1 and (named in errors[0] or "no data set" in errors[0])
    harmless = process.returncode == 0 and path.name == "meta.json"  # a flipped byte in what is for people only
    return f"{fault}: {path.name}", "" if refused or harmless else f"exit code {process.returncode}: {stderr[-1500:]}"


def fill_disk(out: Path, seconds: float) -> None:
    with open(out / "ballast", "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 12))
        except OSError:  # no space left
            time.sleep(seconds)
    (out / "ballast").unlink()


def mount_small_disk(folder: Path) -> bool:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True)
    return done.returncode == 0


def train_round(job: str, data: Path, out: Path, reference: dict, rng: random.Random) -> Round:
    begun, r = time.time(), Round(job, [])
    own_data = out.with_name(f"{out.name} data")
    shutil.copytree(data, own_data)
    argv, small_disk = command(job, own_data, out), mount_small_disk(out)
    for _ in range(rng.randint(1, 3)):
        fault, process, before = rng.choice(FAULTS), start(argv), steps_done(out)
        r.starts += 1
        if fault == "kill at a random time":
            wait_for(process, lambda: False, rng.uniform(0, 6))
        elif fault == "kill inside a save":
            wait_for(process, lambda: saving(out))
        else:
            target = before + rng.randint(1, STEPS // 3)
            wait_for(process, lambda target=target: steps_done(out) >= target)
        if fault == "full disk" and small_disk:
            fill_disk(out, rng.uniform(0.05, 1))
            wait_for(process, lambda: False, rng.uniform(0, 1))
        stop(process, getattr(signal, fault, signal.SIGKILL))
        stderr = process.communicate(timeout=120)[1]
        if "Traceback" in stderr and JOBS[job][0] == 1:  # torchrun has tracebacks of its own
            r.traceback = stderr[-1500:]
        if fault in DAMAGE:
            fault = hurt_checkpoint(out, fault, rng)
        elif fault.endswith("of the data"):
            fault, wrong = hurt_data(argv, own_data, fault, rng)
            r.starts, r.traceback = r.starts + 1, r.traceback or wrong
        r.faults.append(fault if small_disk or fault != "full disk" else "(no tmpfs to fill)")
        if process.returncode == 0:
            break
    for _ in range(3):
        process = start(argv)
        stderr = process.communicate(timeout=300)[1]
        r.starts += 1
        if process.returncode == 0:
            break
        r.traceback = r.traceback or stderr[-1500:]
    r.identical = process.returncode == 0 and identical(result(out), reference)
    r.seconds = time.time() - begun
    if small_disk:
        subprocess.run(["umount", "-l", str(out)], check=True)  # lazily: a round beside this one may just be forking
    shutil.rmtree(own_data)
    return r


def prepare_command(corpus: Path, data: Path) -> list[str]:
    options = ["--name=set", "--vocab_size=400", "--val_fraction=0.2", "--workers=2", "--shard_mb=0.02"]
    return [sys.executable, str(REPO / "prepare.py"), "--input", str(corpus), f"--data_dir={data}", *options]


def prepare_round(corpus: Path, data: Path, reference: dict[str, bytes], rng: random.Random) -> Round:
    begun, r = time.time(), Round("prepare", [])
    for _ in range(rng.randint(1, 3)):
        process, seconds = start(prepare_command(corpus, data)), rng.uniform(0, 2.5)
        wait_for(process, lambda: False, seconds)
        process.kill()
        process.communicate()
        r.starts += 1
        r.faults.append(f"kill after {seconds:.1f} s")
        if (data / "set").exists() and files_of(data / "set") != reference:
            r.traceback = "a data set that is not whole"
    process = start(prepare_command(corpus, data))
    stderr = process.communicate()[1]
    r.starts, r.seconds = r.starts + 1, time.time() - begun
    r.identical = process.returncode == 0 and files_of(data / "set") == reference
    r.traceback = r.traceback or (stderr[-1500:] if process.returncode else "")
    return r


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def make_data(root: Path) -> tuple[Path, Path]:
    """(a folder with the data set tiny, a corpus)."""
    small, corpus = (
        write_jsonl(root / "small.jsonl", make_records(300)),
        write_jsonl(root / "corpus.jsonl", make_records(6000)),
    )
    argv = [
        sys.executable,
        str(REPO / "prepare.py"),
        "--input",
        str(small),
        "--name=tiny",
        f"--data_dir={root / 'data'}",
    ]
    subprocess.run([*argv, "--vocab_size=400", "--val_fraction=0.1"], check=True, stdout=-3, env=ENVIRONMENT)
    return root / "data", corpus


def references(root: Path, data: Path, corpus: Path, jobs: list[str]) -> dict[str, dict]:
    found = {}
    for job in jobs:
        if job == "prepare":
            subprocess.run(prepare_command(corpus, root / "prepared"), check=True, stdout=-3, env=ENVIRONMENT)
            found[job] = files_of(root / "prepared" / "set")
        else:
            out = root / f"reference {job}"
            subprocess.run(command(job, data, out), check=True, stdout=-3, stderr=-3, env=ENVIRONMENT)
            found[job] = result(out)
    return found


def soak(rounds: int, seed: int, parallel: int, root: Path, jobs: list[str] | None = None) -> list[Round]:
    jobs = jobs or [*JOBS, "prepare"]
    data, corpus = make_data(root)
    reference = references(root, data, corpus, jobs)

    def one(number: int) -> Round:
        rng, out = random.Random(seed * 10_000 + number), root / f"round {number}"
        job = jobs[number % len(jobs)]
        if job == "prepare":
            r = prepare_round(corpus, out, reference[job], rng)
        else:
            r = train_round(job, data, out, reference[job], rng)
        what = f"{number + 1:>4}  {job:<12} {r.starts} starts {r.seconds:5.0f} s  identical {'yes' if r.identical else 'NO '}"
        print(f"{what}  {'; '.join(r.faults)}{'  TRACEBACK' if r.traceback else ''}", flush=True)
        if r.identical and not r.traceback:
            shutil.rmtree(out)
        elif r.traceback:
            print(r.traceback, flush=True)
        return r

    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(one, range(rounds)))


@dataclass(frozen=True)
class SoakConfig:
    rounds: int = 100  # so many
    seed: int = 0  # of what happens in them
    parallel: int = 2  # rounds at a time


def main() -> None:
    cfg = parse(SoakConfig, doc=__doc__)
    with tempfile.TemporaryDirectory() as root:
        found = soak(cfg.rounds, cfg.seed, cfg.parallel, Path(root))
    good, bad = sum(r.identical for r in found), sum(bool(r.traceback) for r in found)
    print(f"\n{good} of {len(found)} identical, {bad} with a traceback, {sum(r.starts for r in found)} starts")
    sys.exit(good < len(found) or bad > 0)


if __name__ == "__main__":
    run(main)
