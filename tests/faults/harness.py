"""Break real small trainings and preparations on purpose, restart them, and compare with one that was left alone.

    python tests/faults/harness.py --rounds 100        # or: make soak

Each round draws a job, and what happens to it: SIGKILL at a random moment, after a random step, or inside the writing of a
checkpoint; SIGTERM, SIGINT, SIGUSR1 or SIGHUP; a pipe that is closed, or a full disk, under the log; a flipped byte, a cut or
a deleted file in the newest checkpoint, or in the data set, which must then be refused by name; checkpoints that cannot be
seen, which must be refused too; a disk that is full for some steps (a small tmpfs, where one may be mounted). Files of
somebody else's lie in the run's folder, and must lie there at the end. The job is then started again by the same command
until it ends. Identical means: the same bytes in the weights, the optimizer's state and the loss, norm and validation loss
of every step, each there once; for prepare.py, the same bytes in every file.

    python tests/faults/harness.py --rounds 0 --flips 1000

turns over one bit after the other in the files of a checkpoint and of a data set, and runs every command that reads them:
each must refuse them in one line, or do what it does with the whole ones.
"""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from conftest import TINY, call, make_records, write_jsonl  # noqa: E402

import prepare  # noqa: E402
import sample  # noqa: E402
import train  # noqa: E402
from configurator import parse, run  # noqa: E402
from training.plots import read_metrics  # noqa: E402

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # Under nohup: what is started here would inherit that. A handler that does nothing is not inherited.
    signal.signal(signal.SIGHUP, lambda number, frame: None)

STEPS = 40
LIFE = 6  # seconds, about: so long a start of theirs takes
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
COMMON = [
    *TINY, f"--max_steps={STEPS}", "--save_every=4", "--eval_every=6", "--dropout=0.1", "--init_from=auto", "--n_embd=64",
]  # fmt: skip
JOBS = {  # name: (processes, the options of one start after the other, each of which goes on where the one before ended)
    "fp32": (1, [[]]),
    "bf16": (1, [["--dtype=bfloat16"]]),
    "epochs": (1, [["--block_size=256", "--batch_size=2", "--batch_tokens=8192"]]),  # an epoch's edge every third step
    "compiled": (1, [["--compile=true"]]),
    "2 processes": (2, [[]]),
    "another batch": (1, [["--max_steps=20"], ["--batch_tokens=512", "--max_steps=0", "--max_tokens=15360"]]),
}
KILLS = ["kill at a random time", "kill after a step", "kill inside a save", "SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]
LOG = ["closed pipe", "full disk under the log"]
DAMAGE = ["flip a byte", "cut a file", "lose a file"]  # of the newest checkpoint, after a kill
HIDDEN = ["no manifest", "ckpt not mounted"]
FAULTS = [*KILLS, *LOG, *DAMAGE, *HIDDEN, *(f"{damage} of the data" for damage in DAMAGE), "full disk"]
FOREIGN = ["notes.txt", "ckpt/mine/model.pt", "ckpt/backup/step_00000004/x", "bad_steps/mine.txt", "ckpt/.mine"]


def command(job: str, data: Path, out: Path, phase: int = 0) -> list[str]:
    n, phases = JOBS[job]
    options = phases[phase]
    handed_on = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGHUP"
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


def start(argv: list[str], stdout=-3) -> Popen:
    options = {"text": True, "env": ENVIRONMENT, "start_new_session": True}
    return Popen(argv, stdout=stdout, stderr=-1, **options)


def workers(process: Popen) -> dict[int, int]:
    """rank -> process id of what torchrun has started: in sessions of their own, they outlive it.

    A rank that was forked, as in tests/warm.py, has the environment of another process, but says
    RANK= in its name.
    """
    argv = ["pgrep", "-P", str(process.pid)]
    children = subprocess.run(argv, capture_output=True, text=True).stdout.split()
    found = {}
    for child in map(Path, (f"/proc/{child}" for child in children)):
        values = [*child.joinpath("environ").read_text().split("\0"), (child / "comm").read_text()]
        found |= {int(v[5:]): int(child.name) for v in values if v.startswith("RANK=")}
    return found


def stop(process: Popen, number: int) -> None:
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


def wait_for(process: Popen, condition, seconds: float = 60) -> None:
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
    foreign: list[Path] = field(default_factory=list)  # somebody's files in the run's folder


def hurt(folder: Path, fault: str, rng: random.Random) -> Path:
    """Damage one file of a folder; returns which."""
    path = rng.choice(sorted(folder.iterdir()))
    if fault.startswith("lose"):
        path.unlink()
    elif fault.startswith("cut"):
        os.truncate(path, rng.randrange(path.stat().st_size))
    else:
        flip(path, rng)
    return path


def flip(path: Path, rng: random.Random) -> None:
    """Turn over one bit of a file."""
    with open(path, "r+b") as f:
        at = rng.randrange(path.stat().st_size)
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ (1 << rng.randrange(8))]))


def hide_checkpoints(argv: list[str], out: Path, fault: str) -> tuple[str, str]:
    """(what was done, what is wrong with the answer). A start must refuse in one line and change nothing; then they are back."""
    ckpt, away = out / "run" / "ckpt", out / "away"
    if not any(ckpt.glob("step_*/manifest.json")):
        return f"({fault}: too early)", ""
    shutil.copytree(ckpt, away)
    if fault == "no manifest":
        for path in ckpt.glob("step_*/manifest.json"):
            path.unlink()
    else:
        shutil.rmtree(ckpt)
        ckpt.symlink_to("/nowhere/ckpt")
    before = {p: p.read_bytes() for p in (out / "run").rglob("*") if p.is_file()}
    process = start(argv)
    stderr = process.communicate(timeout=600)[1]
    after = {p: p.read_bytes() for p in (out / "run").rglob("*") if p.is_file()}
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    refused = process.returncode != 0 and len(errors) == 1 and before == after
    ckpt.unlink() if ckpt.is_symlink() else shutil.rmtree(ckpt)
    away.rename(ckpt)
    return fault, "" if refused else f"{fault}: exit code {process.returncode}: {stderr[-1500:]}"


def hurt_checkpoint(out: Path, fault: str, rng: random.Random) -> str:
    """As long as there is another one to fall back to."""
    whole = sorted(p.parent for p in (out / "run" / "ckpt").glob("step_*/manifest.json"))
    return f"{fault}: {hurt(whole[-1], fault, rng).name}" if len(whole) > 1 else "(too early for damage)"


def hurt_data(argv: list[str], data: Path, fault: str, rng: random.Random) -> tuple[str, str]:
    """(what was done, what is wrong with the answer). A start must name the file in one line; then it is put back."""
    shutil.copytree(data / "tiny", data / "whole")
    path, process = hurt(data / "tiny", fault, rng), start(argv)
    stderr = process.communicate(timeout=600)[1]
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
    small_disk = mount_small_disk(out)
    try:
        for phase in range(len(JOBS[job][1])):
            train_phase(job, phase, own_data, out, small_disk, r, rng)
        r.identical = identical(result(out), reference) if not r.traceback else False
        for path in r.foreign:
            if not path.exists() or path.read_bytes() != b"precious":
                r.traceback = r.traceback or f"{path}: somebody else's, and it was changed"
    except Exception:  # this harness's own, which must not hide what the other rounds found
        r.traceback = traceback.format_exc()
    finally:
        if small_disk:
            subprocess.run(
                ["umount", "-l", str(out)], check=True
            )  # lazily: a round beside this one may just be forking
    r.seconds = time.time() - begun
    shutil.rmtree(own_data)
    return r


def put_foreign_files(out: Path, r: Round) -> None:
    """As soon as there is a run: into an empty folder of somebody else's train.py would not go."""
    for name in FOREIGN if (out / "run" / "metrics.jsonl").exists() and not r.foreign else []:
        r.foreign.append(out / "run" / name)
        r.foreign[-1].parent.mkdir(parents=True, exist_ok=True)
        r.foreign[-1].write_bytes(b"precious")


def start_with_log(argv: list[str], fault: str) -> Popen:
    """Start it with a pipe that nobody reads, or a full disk, for its log, if that is the fault."""
    if fault == "closed pipe":
        read, log = os.pipe()
        process = start(argv, log)
        os.close(log)
        os.close(read)
        return process
    if fault == "full disk under the log":
        with open("/dev/full", "w") as log:
            return start(argv, log)
    return start(argv)


def train_phase(job: str, phase: int, data: Path, out: Path, small_disk: bool, r: Round, rng: random.Random) -> None:
    """Start it, break it, and start it again until it ends."""
    argv = command(job, data, out, phase)
    # A checkpoint before the last one is of another phase, with other settings: it is no way to the same end.
    faults = FAULTS if len(JOBS[job][1]) == 1 else [*KILLS, *LOG, *HIDDEN]
    for _ in range(rng.randint(1, 3)):
        fault, before = rng.choice(faults), steps_done(out)
        process = start_with_log(argv, fault)
        r.starts += 1
        if fault == "kill at a random time":
            wait_for(process, lambda: False, rng.uniform(0, LIFE))
        elif fault == "kill inside a save":
            wait_for(process, lambda: saving(out))
        else:
            target = before + rng.randint(1, STEPS // 3)
            wait_for(process, lambda target=target: steps_done(out) >= target)
        if fault == "full disk" and small_disk:
            fill_disk(out, rng.uniform(0.05, 1))
            wait_for(process, lambda: False, rng.uniform(0, 1))
        stop(process, getattr(signal, fault, signal.SIGKILL))
        stderr = process.communicate(timeout=600)[1]
        put_foreign_files(out, r)
        if "Traceback" in stderr and JOBS[job][0] == 1:  # torchrun has tracebacks of its own
            r.traceback = stderr[-1500:]
        if fault in DAMAGE:
            fault = hurt_checkpoint(out, fault, rng)
        elif fault in HIDDEN:
            fault, wrong = hide_checkpoints(argv, out, fault)
            r.starts, r.traceback = r.starts + 1, r.traceback or wrong
        elif fault.endswith("of the data"):
            fault, wrong = hurt_data(argv, data, fault, rng)
            r.starts, r.traceback = r.starts + 1, r.traceback or wrong
        r.faults.append(fault if small_disk or fault != "full disk" else "(no tmpfs to fill)")
        if process.returncode == 0:
            break
    for _ in range(3):
        process = start(argv)
        stderr = process.communicate(timeout=600)[1]
        r.starts += 1
        if process.returncode == 0:
            return
        r.traceback = r.traceback or stderr[-1500:]


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


# ---------------------------------------------------------------------------------------------------------------------
# Flipped bits: every command that reads a checkpoint or a data set, in this process


def run_here(main: Callable[[], None], *argv: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a script."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            call(lambda: run(main), *argv)
            code = 0
        except SystemExit as e:
            code = e.code
    return code, out.getvalue(), err.getvalue()


def uses(root: Path, ckpt: Path, data: Path) -> dict[str, Callable[[], Any]]:
    """name -> what a command makes of the checkpoint and the data set; "refused" if it says so in one line."""
    shutil.rmtree(root, ignore_errors=True)
    tiny = [*TINY, "--schedule=constant", f"--data_dir={data.parent}", f"--out_dir={root}"]
    corpus = write_jsonl(data.parent / "few.jsonl", make_records(40))

    def told(main: Callable[[], None], *argv: str) -> str:
        code, out, err = run_here(main, *argv)
        if code == 2 and err.startswith("error: ") and err.count("\n") == 1:
            return "refused"
        return out if code == 0 else f"exit code {code}: {err}"

    def trained(name: str, *more: str) -> Any:
        said = told(train.main, *tiny, f"--run_name={name}", *more)
        if not (root / name / "metrics.jsonl").exists() or said == "refused" or said.startswith("exit"):
            return said
        return [(r["step"], r["loss"]) for r in read_metrics(root / name / "metrics.jsonl") if "loss" in r]

    def resumed() -> Any:
        shutil.copytree(ckpt.parents[1], root / "resumed")
        return trained("resumed", "--init_from=auto", "--max_steps=10")

    def prepared() -> Any:
        options = [f"--data_dir={root}", "--name=set", "--val_fraction=0.2"]
        said = told(prepare.main, "--input", str(corpus), f"--tokenizer={ckpt}", *options)
        # Of a checkpoint's files, what says when and where it was made goes into meta.json: here, only what is read.
        names = ("train.bin", "val.bin", "tokenizer.json", "tokenizer_config.json")
        return said if said == "refused" else [(root / "set" / name).read_bytes() for name in names]

    greedy = ["--temperature=0", "--max_new_tokens=20", "--device=cpu", "--dtype=float32"]
    return {
        "sample": lambda: told(sample.main, f"--ckpt={ckpt}", *greedy),
        "evaluate": lambda: told(sample.main, f"--ckpt={ckpt}", f"--eval={data}", "--device=cpu", "--dtype=float32"),
        "fine-tune": lambda: trained("tuned", f"--init_from={ckpt}", "--max_steps=2"),
        "resume": resumed,
        "train": lambda: trained("new", "--max_steps=2"),
        "prepare": prepared,
        "inspect": lambda: told(prepare.main, "--inspect", str(data), "--count=1"),
        "inspect a step": lambda: told(prepare.main, "--inspect", str(ckpt.parents[1]), "--step=3"),
    }


def flip_bits(count: int, seed: int, root: Path, wrong: list[str]) -> Counter:
    """Flip one bit at a time; what went wrong is printed, and put into `wrong`."""
    data = make_data(root)[0] / "tiny"
    run_here(train.main, *TINY, "--schedule=constant", f"--data_dir={data.parent}", f"--out_dir={root / 'out'}")
    ckpt, rng, counts = root / "out" / "run" / "ckpt" / "step_00000008", random.Random(seed), Counter()
    whole = {name: use() for name, use in uses(root / "use", ckpt, data).items()}
    assert "refused" not in whole.values(), whole
    files = [*sorted(ckpt.iterdir()), *sorted(p for p in data.iterdir() if p.is_file())]
    for number in range(count):
        path = files[number % len(files)]
        content, stat = path.read_bytes(), path.stat()
        flip(path, rng)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a failing disk does
        for name, use in uses(root / "use", ckpt, data).items():
            found = use()
            counts["refusals" if found == "refused" else "equal results"] += 1
            if found not in ("refused", whole[name]):
                wrong.append(f"{name}, a flip in {path.name}: {str(found)[:300]}")
                print(f"WRONG: {wrong[-1]}", flush=True)
        path.write_bytes(content)
    return counts


def make_data(root: Path) -> tuple[Path, Path]:
    """(a folder with the data set tiny, a corpus)."""
    root.mkdir(exist_ok=True)
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
            for phase in range(len(JOBS[job][1])):
                subprocess.run(command(job, data, out, phase), check=True, stdout=-3, stderr=-3, env=ENVIRONMENT)
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
    flips: int = 0  # bits to turn over, before the rounds
    seed: int = 0  # of what happens in them
    parallel: int = 2  # rounds at a time


def main() -> None:
    cfg = parse(SoakConfig, doc=__doc__)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        if cfg.flips:
            counts = flip_bits(cfg.flips, cfg.seed, Path(root) / "flips", wrong)
            print(f"{cfg.flips} flipped bits: {', '.join(f'{n:,} {what}' for what, n in counts.items())}", flush=True)
        found = soak(cfg.rounds, cfg.seed, cfg.parallel, Path(root)) if cfg.rounds else []
    good, bad = sum(r.identical for r in found), sum(bool(r.traceback) for r in found)
    print(f"\n{good} of {len(found)} identical, {bad} with a traceback, {sum(r.starts for r in found)} starts")
    sys.exit(good < len(found) or bad > 0 or bool(wrong))


if __name__ == "__main__":
    run(main)
