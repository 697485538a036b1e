"""Break small real trainings, restart them, and compare with undisturbed ones.

    python tests/faults/harness.py --rounds 100        # or: make soak

Each round takes a job and draws at random what happens to it: SIGKILL at any moment, after a step,
or while a checkpoint is written; SIGTERM, SIGINT, SIGUSR1 or SIGHUP, perhaps while nobody reads the
output; a rank alone that is killed; the run's folder, moved while it trains and then moved back;
then perhaps a flipped bit, or a cut or deleted file, in the newest checkpoint. Files of other
programs are in the run's folder: they must be there at the end. The same command then starts the
job again until it ends. Identical means: the same bytes in the weights and in the state of the
optimizer, and for every step exactly one record with the same loss, norm and validation loss.
"""

import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from conftest import TINY, make_records, prepared, python  # noqa: E402
from test_chat_folder import conversations, records  # noqa: E402

from configurator import option, parse, run  # noqa: E402
from training.metrics import read_metrics  # noqa: E402

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # This process runs under nohup. The processes started here would ignore SIGHUP, too, because
    # they inherit that. They do not inherit a handler, so this one does nothing.
    signal.signal(signal.SIGHUP, lambda number, frame: None)

STEPS = 40
LIFE = 6  # seconds after the start, in which a kill at a random time comes
COMMON = [*TINY, f"--max_steps={STEPS}", "--save_every=4", "--eval_every=6", "--dropout=0.1"]
COMMON += ["--init_from=auto", "--n_embd=64"]
JOBS = {  # name -> (processes, options)
    "fp32": (1, []),
    "bf16": (1, ["--dtype=bfloat16"]),
    "muon": (1, ["--optimizer=muon", "--dtype=bfloat16"]),
    "adafactor": (1, ["--optimizer=adafactor", "--lr=0.05"]),
    # An epoch ends in every third step.
    "epochs": (1, ["--block_size=256", "--batch_size=2", "--batch_tokens=8192"]),
    "compiled": (1, ["--compile=true"]),
    "2 processes": (2, []),
    "sharded": (2, ["--shard=all", "--recompute=blocks"]),
    "documents": (1, ["--documents=mask"]),
    "packed": (2, ["--documents=pack", "--loss_per=document", "--dtype=bfloat16"]),
    "evaluating": (1, ["--eval_every=2", "--eval_tokens=65536"]),  # most of the time
    "2 evaluating": (2, ["--eval_every=2", "--eval_tokens=65536"]),
    "answers": (2, ["--dataset=chat", "--loss_on=answers", "--documents=pack"]),
}
KILLS = ["kill at a random time", "kill after a step", "kill inside a save"]
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]
UNREAD = "SIGTERM, output unread"
MOVED = "move the folder"
DAMAGE = ["flip a bit", "cut a file", "lose a file"]  # of the newest checkpoint, after a kill
FOREIGN = ["notes.txt", "ckpt/mine/model.pt", "ckpt/backup/step_00000004/x", "ckpt/.mine"]
RECORDED = ("loss", "lr", "grad_norm", "val_loss", "tokens")


def command(job: str, data: Path, out: Path) -> list[str]:
    n, options = JOBS[job]
    launch = ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGHUP"] if n > 1 else []
    folders = [f"--data_dir={data}", f"--out_dir={out}"]
    return python(n, *launch, REPO / "train.py", *COMMON, *folders, *options)


def start(argv: list[str], stdout: int = DEVNULL) -> Popen:
    return Popen(argv, stdout=stdout, stderr=PIPE, text=True, start_new_session=True)


def unread_pipe() -> tuple[int, int]:
    """Return the two ends of a pipe that is full after about 20 lines of the log."""
    receive, send = os.pipe()
    fcntl.fcntl(send, fcntl.F_SETPIPE_SZ, 4096)
    return receive, send


def move_back(out: Path) -> None:
    """Move the folder of a run back, and to it the checkpoint that the run saved beside it."""
    (out / "elsewhere").rename(out / "run")
    for path in (out / "run_moved" / "ckpt").glob("step_*"):
        if not (out / "run" / "ckpt" / path.name).exists():
            path.rename(out / "run" / "ckpt" / path.name)
    shutil.rmtree(out / "run_moved", ignore_errors=True)


def workers(process: Popen) -> dict[int, int]:
    """Return rank -> process id of the processes that torchrun has started. They are in sessions of
    their own, so they outlive torchrun.

    A rank that tests/warm.py has forked has the environment of another process, but its name
    contains RANK=.
    """
    argv = ["pgrep", "-P", str(process.pid)]
    children = subprocess.run(argv, capture_output=True, text=True).stdout.split()
    ranks = {}
    for child in map(Path, (f"/proc/{child}" for child in children)):
        values = [*child.joinpath("environ").read_text().split("\0"), (child / "comm").read_text()]
        ranks |= {int(v[5:]): int(child.name) for v in values if v.startswith("RANK=")}
    return ranks


def stop(process: Popen, number: int) -> None:
    """Send a signal. SIGKILL goes to torchrun and all workers, as if the machine went down. The
    other signals are handed on to the workers by torchrun.
    """
    hit = workers(process).values() if number == signal.SIGKILL else []
    for pid in (process.pid, *hit):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def steps_done(out: Path) -> int:
    text = ""
    with suppress(OSError, ValueError):
        text = (out / "run" / "metrics.jsonl").read_text()
    # The last record may be of an earlier step: saves end while training goes on.
    return max(map(int, re.findall(r'"step": (\d+)', text)), default=0)


def wait_for(process: Popen, condition, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and not condition() and time.monotonic() < deadline:
        time.sleep(0.0005)


def frozen(state: Any) -> Any:
    """Return a state_dict with lists instead of tensors, which == can compare."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), state.tolist()
    return {k: frozen(v) for k, v in state.items()} if isinstance(state, dict) else state


def result(out: Path) -> tuple:
    """Return everything that must be identical."""
    folder = out / "run" / "ckpt" / f"step_{STEPS:08d}"
    weights = (folder / "model.safetensors").read_bytes()
    state = torch.load(folder / "train_state.pt", weights_only=True)
    records = read_metrics(out / "run" / "metrics.jsonl")
    recorded = [(r["step"], k, r[k]) for r in records for k in RECORDED if k in r]
    return weights, frozen(state), recorded


@dataclass
class Round:
    job: str
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    identical: bool = False
    problem: str = ""  # the first that was noticed
    seconds: float = 0.0

    def note(self, problem: str) -> None:
        self.problem = self.problem or problem


def flip(path: Path, rng: random.Random) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def hurt(path: Path, fault: str, rng: random.Random) -> None:
    """Damage a file as one of DAMAGE says."""
    if fault == "lose a file":
        path.unlink()
    elif fault == "cut a file":
        os.truncate(path, rng.randrange(path.stat().st_size))
    else:
        flip(path, rng)


def hurt_checkpoint(out: Path, fault: str, rng: random.Random) -> str:
    """Damage the newest checkpoint, if there is another one to go on from. Return what was done."""
    manifests = sorted((out / "run" / "ckpt").glob("step_????????/manifest.json"))
    if len(manifests) < 2:
        return "(too early for damage)"
    path = rng.choice(sorted(p for p in manifests[-1].parent.rglob("*") if p.is_file()))
    hurt(path, fault, rng)
    return f"{fault}: {path.name}"


def break_training(argv: list[str], fault: str, out: Path, r: Round, rng: random.Random) -> bool:
    """Start a training and stop it as the fault says. Return whether it had come to its end."""
    target = steps_done(out) + rng.randint(1, STEPS // 3)
    # Settings that may change at a resume, and change no result.
    argv = [*argv, f"--keep={rng.randint(2, 5)}", f"--sample_every={rng.choice([0, 5])}"]
    pipe = unread_pipe() if fault == UNREAD else ()
    process = start(argv, *pipe[1:])
    r.starts += 1
    if fault == "kill at a random time":
        wait_for(process, lambda: False, rng.uniform(0, LIFE))
    elif fault == "kill inside a save":
        wait_for(process, lambda: any((out / "run" / "ckpt").glob(".tmp_*")))
    else:
        wait_for(process, lambda: steps_done(out) >= target)
    ranks = list(workers(process).values())
    if fault == MOVED and (out / "run" / "ckpt").exists() and process.poll() is None:
        (out / "run").rename(out / "elsewhere")
    elif fault == "kill a rank" and ranks:
        os.kill(rng.choice(ranks), signal.SIGKILL)  # torchrun then ends the others
    else:
        stop(process, getattr(signal, fault.partition(",")[0], signal.SIGKILL))
    stderr = process.communicate(timeout=600)[1]
    for end in pipe:
        os.close(end)
    if (out / "elsewhere").exists():
        if (out / "run").exists():
            r.note("a run wrote to a folder that is not its own")
        move_back(out)
    if "Traceback" in stderr and "torch.distributed.run" not in argv:  # torchrun prints its own
        r.note(stderr[-1500:])
    r.faults.append(hurt_checkpoint(out, fault, rng) if fault in DAMAGE else fault)
    return process.returncode == 0


def train_round(job: str, data: Path, out: Path, reference: tuple, rng: random.Random) -> Round:
    """Start a job, break it up to three times, and start it until it ends."""
    r = Round(job)
    argv = command(job, data, out)
    faults = [*KILLS, *SIGNALS, UNREAD, MOVED, *DAMAGE, *(JOBS[job][0] - 1) * ["kill a rank"]]
    foreign = [out / "run" / name for name in FOREIGN]
    for _ in range(rng.randint(1, 3)):
        at_its_end = break_training(argv, rng.choice(faults), out, r, rng)
        for path in foreign:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"precious")
        if at_its_end:
            break
    process = start(argv)
    r.starts += 1
    stderr = process.communicate(timeout=600)[1]
    if process.returncode:
        r.note(stderr[-1500:])
    r.identical = not r.problem and result(out) == reference
    if not all(path.exists() and path.read_bytes() == b"precious" for path in foreign):
        r.note("files of another program were changed")
    return r


def make_data(data: Path) -> Path:
    """Make the data sets tiny and chat in a folder; return it."""
    data.mkdir(parents=True)
    prepared(data, make_records(300))
    chats = records(conversations(300, special=True))
    prepared(data, chats, "--name=chat", f"--tokenizer={data / 'tiny'}")
    return data


def undisturbed(job: str, root: Path, data: Path) -> tuple:
    """Return the result of a job when nothing disturbs it."""
    out = root / f"reference {job}"
    subprocess.run(command(job, data, out), check=True, stdout=DEVNULL, stderr=DEVNULL)
    return result(out)


def soak(rounds: int, seed: int, parallel: int, root: Path, jobs=tuple(JOBS)) -> list[Round]:
    """Make the rounds, with these jobs in turn; print and return what happened in each."""
    data = make_data(root / "data")
    references = {job: undisturbed(job, root, data) for job in jobs[:rounds]}

    def one(number: int) -> Round:
        rng = random.Random(seed * 10_000 + number)
        out = root / f"round {number}"
        job = jobs[number % len(jobs)]
        started = time.time()
        try:
            r = train_round(job, data, out, references[job], rng)
        except Exception:  # an error of this harness must not hide what the other rounds found
            r = Round(job, problem=traceback.format_exc())
        r.seconds = time.time() - started
        verdict = f"identical {'yes' if r.identical else 'NO '}  {'; '.join(r.faults)}"
        line = f"{number + 1:>4}  {job:<12} {r.starts} starts {r.seconds:5.0f} s  {verdict}"
        print(line, r.problem, sep="\n" if r.problem else "", flush=True)
        if r.identical and not r.problem:
            shutil.rmtree(out)
        return r

    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(one, range(rounds)))


@dataclass(frozen=True)
class SoakConfig:
    rounds: int = option(100, "number of rounds")
    seed: int = option(0, "seed of all that is drawn at random")
    parallel: int = option(2, "number of rounds that run at the same time")


def main() -> None:
    cfg = parse(SoakConfig, doc=__doc__)
    with tempfile.TemporaryDirectory() as root:
        rounds = soak(cfg.rounds, cfg.seed, cfg.parallel, Path(root))
    good = sum(r.identical and not r.problem for r in rounds)
    print(f"\n{good} of {len(rounds)} identical, {sum(r.starts for r in rounds)} starts")
    sys.exit(good < len(rounds))


if __name__ == "__main__":
    run(main)
