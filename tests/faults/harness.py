"""Break small real trainings and preparations, restart them, and compare with undisturbed ones.

    python tests/faults/harness.py --rounds 100        # or: make soak

Each round takes a job and draws at random what happens to it: SIGKILL at any moment, after a step,
or while a checkpoint is written; SIGTERM, SIGINT, SIGUSR1 or SIGHUP; a log whose pipe is closed or
whose disk is full; a flipped bit, or a cut or deleted file, in the newest checkpoint; the same in
the data set, which the next start must then refuse by name; checkpoints that cannot be seen, which
it must refuse, too; a disk that is full during some steps (a small tmpfs, if it can be mounted);
data that somebody changes in place, which must end the run and be named. Files of other programs
are in the run's folder, and links to one of them in the place of each temporary file: they must be
there at the end. In some rounds two processes train one run, without a lock: each checkpoint must
be of one of them, or damaged by its hashes. The same command then
starts the job again until it ends. Identical means: the same bytes in the weights, in their average
and in the state of the optimizer, and for every step exactly one record with the same loss, norm
and validation loss; for prepare.py, the same bytes in every file.

    python tests/faults/harness.py --rounds 0 --flips 1000

flips one bit after the other in the files of a checkpoint and of a data set. After each, it runs
every command that reads them: the command must refuse them in one line, or do the same as with the
undamaged files.
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
from subprocess import DEVNULL, PIPE, Popen
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
from hardware.disk import LOCK, MANIFEST, damage, read_object  # noqa: E402
from training.metrics import read_metrics  # noqa: E402

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # This process runs under nohup. The processes started here would ignore SIGHUP, too, because
    # they inherit that. They do not inherit a handler, so this one does nothing.
    signal.signal(signal.SIGHUP, lambda number, frame: None)

STEPS = 40
LIFE = 6  # seconds after the start, in which a "kill at a random time" comes
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
COMMON = [*TINY, f"--max_steps={STEPS}", "--save_every=4", "--eval_every=6", "--dropout=0.1"]
COMMON += ["--init_from=auto", "--n_embd=64"]
LONGER_BATCH = ["--batch_tokens=512", "--max_steps=0", "--max_tokens=15360"]
JOBS = {  # name -> (processes, the options of each phase; a phase continues the one before)
    "fp32": (1, [[]]),
    "bf16": (1, [["--dtype=bfloat16"]]),
    "muon": (1, [["--optimizer=muon", "--dtype=bfloat16"]]),
    "adafactor": (1, [["--optimizer=adafactor", "--lr=0.05"]]),
    "average": (1, [["--average=0.2"]]),
    # An epoch ends in every third step.
    "epochs": (1, [["--block_size=256", "--batch_size=2", "--batch_tokens=8192"]]),
    "compiled": (1, [["--compile=true"]]),
    "2 processes": (2, [[]]),
    "sharded": (2, [["--shard=all", "--recompute=blocks"]]),
    "documents": (1, [["--documents=mask"]]),
    "packed": (2, [["--documents=pack", "--loss_per=document", "--dtype=bfloat16"]]),
    "another batch": (1, [["--max_steps=20"], LONGER_BATCH]),
}
KILLS = ["kill at a random time", "kill after a step", "kill inside a save"]
KILLS += ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"]
OF_SEVERAL = ["kill a rank", "kill torchrun"]  # where a job has several processes
LOG = ["closed pipe", "full disk under the log"]
DAMAGE = ["flip a byte", "cut a file", "lose a file"]  # of the newest checkpoint, after a kill
HIDDEN = ["no manifest", "ckpt not mounted"]
IN_PLACE = "data changed in place"
FAULTS = [*KILLS, *LOG, *DAMAGE, *HIDDEN, IN_PLACE]
FAULTS += [*(f"{damage} of the data" for damage in DAMAGE), "full disk"]
FOREIGN = ["notes.txt", "ckpt/mine/model.pt", "ckpt/backup/step_00000004/x", "bad_steps/mine.txt"]
FOREIGN += ["ckpt/.mine", "average/mine.txt", "average/mine/step_00000004/model.pt"]
LINKS = [".metrics.jsonl.tmp", ".loss.png.tmp", "bad_steps/.step_00000004.txt.tmp"]
TWO = "two writers"  # a job of its own


def command(job: str, data: Path, out: Path, phase: int = 0) -> list[str]:
    n, phases = JOBS[job]
    launch = []
    if n > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
        launch += ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGHUP"]
    argv = [sys.executable, *launch, str(REPO / "train.py"), *COMMON]
    return [*argv, f"--data_dir={data}", f"--out_dir={out}", *phases[phase]]


def start(argv: list[str], stdout=DEVNULL) -> Popen:
    options = {"text": True, "env": ENVIRONMENT, "start_new_session": True}
    return Popen(argv, stdout=stdout, stderr=PIPE, **options)


def workers(process: Popen) -> dict[int, int]:
    """Return rank -> process id of the processes that torchrun has started. They are in sessions of
    their own, so they outlive torchrun.

    A rank that tests/warm.py has forked has the environment of another process, but its name
    contains RANK=.
    """
    argv = ["pgrep", "-P", str(process.pid)]
    children = subprocess.run(argv, capture_output=True, text=True).stdout.split()
    found = {}
    for child in map(Path, (f"/proc/{child}" for child in children)):
        values = [*child.joinpath("environ").read_text().split("\0"), (child / "comm").read_text()]
        found |= {int(v[5:]): int(child.name) for v in values if v.startswith("RANK=")}
    return found


def stop(process: Popen, number: int) -> None:
    """Send a signal. SIGKILL goes to torchrun and all workers, as if the machine went down. The
    other signals are handed on to the workers by torchrun.
    """
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
    """Return everything that must be identical."""
    folder = out / "run" / "ckpt" / f"step_{STEPS:08d}"
    averaged = folder / "average" / "model.safetensors"
    state = torch.load(folder / "train_state.pt", weights_only=True)
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    moments = state["optimizer"]["state"]
    keys = ("loss", "lr", "grad_norm", "val_loss", "val_loss_average", "tokens")
    apart = ("optimizer", "scaler", "average", "data_files")
    return {
        "weights": load_file(folder / "model.safetensors"),
        "average": state["average"]["weights"] if "average" in state else {},
        "saved average": load_file(averaged) if "average" in state else {},
        "moments": {(i, k): v for i, s in moments.items() for k, v in s.items()},
        "state": {k: v for k, v in state.items() if k not in apart},
        "metrics": [(r["step"], k, r[k]) for r in records for k in keys if k in r],
    }


def identical(a: dict, b: dict) -> bool:
    for part in ("weights", "average", "saved average", "moments"):
        if a[part].keys() != b[part].keys():
            return False
        if not all(torch.equal(tensor, b[part][k]) for k, tensor in a[part].items()):
            return False
    return a["state"] == b["state"] and a["metrics"] == b["metrics"]


@dataclass
class Round:
    job: str
    faults: list[str]
    starts: int = 0
    identical: bool = False
    traceback: str = ""
    seconds: float = 0.0
    foreign: list[Path] = field(default_factory=list)  # files of other programs in the run's folder

    def note(self, wrong: str) -> None:
        """Keep the first thing that went wrong."""
        self.traceback = self.traceback or wrong


def hurt(folder: Path, fault: str, rng: random.Random) -> Path:
    """Damage one file of a folder; return its path."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    if fault.startswith("lose"):
        path.unlink()
    elif fault.startswith("cut"):
        os.truncate(path, rng.randrange(path.stat().st_size))
    else:
        flip(path, rng)
    return path


def flip(path: Path, rng: random.Random) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b") as f:
        at = rng.randrange(path.stat().st_size)
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ (1 << rng.randrange(8))]))


def started_to_its_end(argv: list[str]) -> tuple[int, list[str], str]:
    """Start a process and wait. Return its exit code, its lines `error: ...`, and all of stderr."""
    process = start(argv)
    stderr = process.communicate(timeout=600)[1]
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return process.returncode, errors, stderr


def hide_checkpoints(argv: list[str], out: Path, fault: str) -> tuple[str, str]:
    """Hide all checkpoints, start the job, and put them back. The start must refuse in one line and
    change nothing. Return what was done, and what is wrong with the answer.
    """
    ckpt = out / "run" / "ckpt"
    away = out / "away"
    if not any(ckpt.glob("step_*/manifest.json")):
        return f"({fault}: too early)", ""
    shutil.copytree(ckpt, away)
    if fault == "no manifest":
        for path in ckpt.glob("step_*/manifest.json"):
            path.unlink()
    else:
        shutil.rmtree(ckpt)
        ckpt.symlink_to("/nowhere/ckpt")
    (out / "run" / LOCK).unlink(missing_ok=True)  # a killed process left it
    before = {p: p.read_bytes() for p in (out / "run").rglob("*") if p.is_file()}
    code, errors, stderr = started_to_its_end(argv)
    after = {p: p.read_bytes() for p in (out / "run").rglob("*") if p.is_file()}
    if ckpt.is_symlink():
        ckpt.unlink()
    else:
        shutil.rmtree(ckpt)
    away.rename(ckpt)
    if code != 0 and len(errors) == 1 and before == after:
        return fault, ""
    return fault, f"{fault}: exit code {code}: {stderr[-1500:]}"


def hurt_checkpoint(out: Path, fault: str, rng: random.Random) -> str:
    """Damage the newest checkpoint, if there is another one to continue from."""
    whole = sorted(p.parent for p in (out / "run" / "ckpt").glob("step_*/manifest.json"))
    if len(whole) < 2:
        return "(too early for damage)"
    return f"{fault}: {hurt(whole[-1], fault, rng).name}"


def hurt_data(argv: list[str], data: Path, fault: str, rng: random.Random) -> tuple[str, str]:
    """Damage a file of the data set, start the job, and put the file back. The start must name the
    file in one line. Return what was done, and what is wrong with the answer.
    """
    shutil.copytree(data / "tiny", data / "whole")
    name = hurt(data / "tiny", fault, rng).name
    code, errors, stderr = started_to_its_end(argv)
    shutil.rmtree(data / "tiny")
    (data / "whole").rename(data / "tiny")
    # If meta.json has another hash or count than a file, either of the two may be damaged.
    named = str(data / "tiny") if name == "meta.json" else name
    refused = code != 0 and len(errors) == 1
    refused = refused and (named in errors[0] or "no data set" in errors[0])
    harmless = code == 0 and name == "meta.json"  # a flip in a part that only people read
    if refused or harmless:
        return f"{fault}: {name}", ""
    return f"{fault}: {name}", f"exit code {code}: {stderr[-1500:]}"


def change_in_place(process: Popen, path: Path, argv: list[str], rng: random.Random) -> str:
    """Change a data file while the job reads it, wait for the end, and put it back. The job must
    name it, unless it was at its end already. Return stderr, or what is wrong with the answer.
    """
    whole = path.read_bytes()
    with open(path, "r+b") as file:
        file.seek(2 * rng.randrange(len(whole) // 2))
        file.write(bytes(2) if whole[file.tell()] else b"\1\0")
    stderr = process.communicate(timeout=600)[1]
    path.write_bytes(whole)
    named = [
        line for line in stderr.splitlines() if line.startswith("error: ") and path.name in line
    ]
    if process.returncode == 0 or len(named) == 1:
        return stderr
    return f"Traceback: exit code {process.returncode}: {stderr[-1500:]}"


# Runs a script on a disk that has no locks.
UNLOCKED = f"""import fcntl, runpy, sys
fcntl.flock = lambda *args: None
sys.path.insert(0, {str(REPO)!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""


def two_writers(data: Path, out: Path, steps: int = 60) -> str:
    """Train one run in two processes, with different seeds and no lock between them. Return what is
    wrong: a checkpoint with whole hashes that is of neither process.
    """
    more = [f"--max_steps={steps}", "--save_every=1", f"--keep={steps}", "--average=0.5"]
    more += [f"--data_dir={data}", "--eval_every=999", "--overwrite"]

    def begin(seed: int, out: Path) -> Popen:
        argv = ["-c", UNLOCKED, str(REPO / "train.py"), *TINY, *more, f"--out_dir={out}"]
        return start([sys.executable, *argv, f"--seed={seed}"])

    def written(out: Path) -> dict[str, dict[str, dict]]:
        """Return the manifest of each whole checkpoint, without the settings."""
        folders = [path.parent for path in (out / "run" / "ckpt").glob("step_*/manifest.json")]
        manifests = {
            str(p.relative_to(out)): read_object(p / MANIFEST) for p in folders if not damage(p)
        }
        return {
            k: {n: e for n, e in m.items() if n != "train_config.json"}
            for k, m in manifests.items()
        }

    alone = [begin(seed, out / str(seed)) for seed in (1, 2)]
    for process in alone:
        process.communicate(timeout=600)
    expected = [written(out / str(seed)) for seed in (1, 2)]
    for process in [begin(seed, out) for seed in (1, 2)]:
        process.communicate(timeout=600)
    together = written(out)
    mixed = []
    for path, entries in together.items():
        name = path.partition("_kept")[0]  # the second one renames what the first has put there
        if entries not in (expected[0].get(name), expected[1].get(name)):
            mixed.append(path)
    if min(map(len, expected)) < steps or not together:
        return f"{len(together)} checkpoints of {[len(e) for e in expected]} to compare with"
    return f"of neither run, under valid hashes: {mixed}" if mixed else ""


def fill_disk(out: Path, seconds: float) -> None:
    with open(out / "ballast", "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 12))
        except OSError:  # no space left
            time.sleep(seconds)
    (out / "ballast").unlink()


def mount_small_disk(folder: Path) -> bool:
    """Make a folder, and mount a small tmpfs there. Return whether it could be mounted."""
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    return subprocess.run(argv, capture_output=True).returncode == 0


def train_round(job: str, data: Path, out: Path, reference: dict, rng: random.Random) -> Round:
    begun = time.time()
    r = Round(job, [])
    own_data = out.with_name(f"{out.name} data")
    shutil.copytree(data, own_data)
    small_disk = mount_small_disk(out)
    try:
        for phase in range(len(JOBS[job][1])):
            train_phase(job, phase, own_data, out, small_disk, r, rng)
        r.identical = not r.traceback and identical(result(out), reference)
        for path in r.foreign:
            if not path.exists() or path.read_bytes() != b"precious":
                r.note(f"{path}: a file of another program was changed")
    except Exception:  # an error of this harness must not hide what the other rounds found
        r.traceback = traceback.format_exc()
    finally:
        if small_disk:  # -l, because another round may fork at this moment, which keeps it busy
            subprocess.run(["umount", "-l", str(out)], check=True)
    r.seconds = time.time() - begun
    shutil.rmtree(own_data)
    return r


def put_foreign_files(out: Path, r: Round) -> None:
    """Put files of other programs there, once there is a run: train.py begins none beside them."""
    if r.foreign or not (out / "run" / "metrics.jsonl").exists():
        return
    r.foreign = [out / "run" / name for name in FOREIGN]
    for path in r.foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"precious")


def put_links(out: Path, r: Round) -> None:
    """Put links to a file of another program where temporary files of a run might be written."""
    for path in (out / "run" / name for name in LINKS):
        if r.foreign and not os.path.lexists(path):
            path.symlink_to(r.foreign[0])


def start_with_log(argv: list[str], fault: str) -> Popen:
    """Start a job. If that is the fault, its log goes to a closed pipe or to a full disk."""
    if fault == "closed pipe":
        reader, writer = os.pipe()
        process = start(argv, writer)
        os.close(writer)
        os.close(reader)
        return process
    if fault == "full disk under the log":
        with open("/dev/full", "w") as log:
            return start(argv, log)
    return start(argv)


def kill_torchrun(process: Popen, argv: list[str]) -> str:
    """Kill torchrun alone. Its ranks go on, so that the same command must refuse to start a second
    time. Then kill the ranks. Return what stderr had.
    """
    ranks = workers(process).values()
    process.kill()
    code, errors, stderr = started_to_its_end(argv)
    alive = any(Path(f"/proc/{pid}").exists() for pid in ranks)
    for pid in ranks:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    stderr = "" if errors or code == 0 or not alive else f"Traceback: exit code {code}: {stderr}"
    return stderr


def break_training(
    argv: list[str], fault: str, out: Path, small_disk: bool, rng: random.Random
) -> tuple[Popen, str]:
    """Start a training and stop it as the fault says. Return the process and its stderr."""
    before = steps_done(out)
    process = start_with_log(argv, fault)
    if fault == "kill at a random time":
        wait_for(process, lambda: False, rng.uniform(0, LIFE))
    elif fault == "kill inside a save":
        wait_for(process, lambda: saving(out))
    else:
        target = before + rng.randint(1, STEPS // 3)
        wait_for(process, lambda: steps_done(out) >= target)
    if fault == "full disk" and small_disk:
        fill_disk(out, rng.uniform(0.05, 1))
        wait_for(process, lambda: False, rng.uniform(0, 1))
    if fault == IN_PLACE:
        data = Path(next(o for o in argv if o.startswith("--data_dir=")).partition("=")[2])
        return process, change_in_place(process, data / "tiny" / "train.bin", argv, rng)
    if fault == "kill torchrun":
        return process, kill_torchrun(process, argv)
    if fault == "kill a rank" and (ranks := list(workers(process).values())):
        os.kill(rng.choice(ranks), signal.SIGKILL)  # torchrun then ends the others
        return process, process.communicate(timeout=600)[1]
    stop(process, getattr(signal, fault, signal.SIGKILL))
    return process, process.communicate(timeout=600)[1]


def train_phase(
    job: str, phase: int, data: Path, out: Path, small_disk: bool, r: Round, rng: random.Random
) -> None:
    """Start it, break it, and start it again until it ends."""
    argv = command(job, data, out, phase)
    # In a job of several phases, the checkpoint before the newest one may be of an earlier phase,
    # with other settings. From there, the job would not reach the same end.
    faults = FAULTS if len(JOBS[job][1]) == 1 else [*KILLS, *LOG, *HIDDEN]
    if JOBS[job][0] > 1:
        faults = [*faults, *OF_SEVERAL, *OF_SEVERAL]
    for _ in range(rng.randint(1, 3)):
        fault = rng.choice(faults)
        put_links(out, r)
        process, stderr = break_training(argv, fault, out, small_disk, rng)
        r.starts += 1
        put_foreign_files(out, r)
        if "Traceback" in stderr and JOBS[job][0] == 1:  # torchrun prints a traceback of its own
            r.traceback = stderr[-1500:]
        if fault in DAMAGE:
            fault = hurt_checkpoint(out, fault, rng)
        elif fault in HIDDEN:
            fault, wrong = hide_checkpoints(argv, out, fault)
            r.starts += 1
            r.note(wrong)
        elif fault.endswith("of the data"):
            fault, wrong = hurt_data(argv, data, fault, rng)
            r.starts += 1
            r.note(wrong)
        elif fault == "full disk" and not small_disk:
            fault = "(no tmpfs to fill)"
        r.faults.append(fault)
        if process.returncode == 0:
            break
    for _ in range(3):
        code, _, stderr = started_to_its_end(argv)
        r.starts += 1
        if code == 0:
            return
        r.note(stderr[-1500:])


def prepare_command(corpus: Path, data: Path) -> list[str]:
    argv = [sys.executable, str(REPO / "prepare.py"), "--input", str(corpus), f"--data_dir={data}"]
    argv += ["--name=set", "--vocab_size=400", "--val_fraction=0.2"]
    return [*argv, "--workers=2", "--shard_mb=0.02"]


def prepare_round(
    corpus: Path, data: Path, reference: dict[str, bytes], rng: random.Random
) -> Round:
    begun = time.time()
    r = Round("prepare", [])
    for _ in range(rng.randint(1, 3)):
        process = start(prepare_command(corpus, data))
        seconds = rng.uniform(0, 2.5)
        wait_for(process, lambda: False, seconds)
        process.kill()
        process.communicate()
        r.starts += 1
        r.faults.append(f"kill after {seconds:.1f} s")
        if (data / "set").exists() and files_of(data / "set") != reference:
            r.traceback = "the data set is not complete"
    code, _, stderr = started_to_its_end(prepare_command(corpus, data))
    r.starts += 1
    r.seconds = time.time() - begun
    r.identical = code == 0 and files_of(data / "set") == reference
    if code:
        r.note(stderr[-1500:])
    return r


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# -- flipped bits: every command that reads a checkpoint or a data set, in this process --


def run_here(main: Callable[[], None], *argv: str) -> tuple[int, str, str]:
    """Run a script in this process. Return its exit code, stdout and stderr."""
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            call(lambda: run(main), *argv)
            code = 0
        except SystemExit as e:
            code = e.code
    return code, out.getvalue(), err.getvalue()


def uses(root: Path, ckpt: Path, data: Path) -> dict[str, Callable[[], Any]]:
    """Return name of a command -> function that runs it on the checkpoint and the data set, and
    returns its result, or "refused" if it refuses them in one line.
    """
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
        path = root / name / "metrics.jsonl"
        if not path.exists() or said == "refused" or said.startswith("exit"):
            return said
        return [(r["step"], r["loss"]) for r in read_metrics(path) if "loss" in r]

    def resumed() -> Any:
        shutil.copytree(ckpt.parents[1], root / "resumed")
        return trained("resumed", "--init_from=auto", "--max_steps=10")

    def prepared() -> Any:
        options = [f"--data_dir={root}", "--name=set", "--val_fraction=0.2"]
        said = told(prepare.main, "--input", str(corpus), f"--tokenizer={ckpt}", *options)
        # meta.json is not compared: it repeats when and where the checkpoint was made.
        names = ("train.bin", "val.bin", "tokenizer.json", "tokenizer_config.json")
        return said if said == "refused" else [(root / "set" / name).read_bytes() for name in names]

    in_fp32 = [f"--ckpt={ckpt}", "--device=cpu", "--dtype=float32"]
    greedy = ["--temperature=0", "--max_new_tokens=20"]
    return {
        "sample": lambda: told(sample.main, *in_fp32, *greedy),
        "evaluate": lambda: told(sample.main, *in_fp32, f"--eval={data}"),
        "fine-tune": lambda: trained("tuned", f"--init_from={ckpt}", "--max_steps=2"),
        "resume": resumed,
        "train": lambda: trained("new", "--max_steps=2"),
        "prepare": prepared,
        "inspect": lambda: told(prepare.main, "--inspect", str(data), "--count=1"),
        "inspect a step": lambda: told(prepare.main, "--inspect", str(ckpt.parents[1]), "--step=3"),
    }


def flip_bits(count: int, seed: int, root: Path, wrong: list[str]) -> Counter:
    """Flip bit after bit. Print what goes wrong and append it to `wrong`; count the outcomes."""
    data = make_data(root)[0] / "tiny"
    options = ["--schedule=constant", f"--data_dir={data.parent}", f"--out_dir={root / 'out'}"]
    run_here(train.main, *TINY, *options)
    ckpt = root / "out" / "run" / "ckpt" / "step_00000008"
    rng = random.Random(seed)
    counts = Counter()
    whole = {name: use() for name, use in uses(root / "use", ckpt, data).items()}
    assert "refused" not in whole.values(), whole
    files = [*sorted(ckpt.iterdir()), *sorted(p for p in data.iterdir() if p.is_file())]
    for number in range(count):
        path = files[number % len(files)]
        content = path.read_bytes()
        stat = path.stat()
        flip(path, rng)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a failing disk keeps the times
        for name, use in uses(root / "use", ckpt, data).items():
            found = use()
            counts["refusals" if found == "refused" else "equal results"] += 1
            if found not in ("refused", whole[name]):
                wrong.append(f"{name}, a flip in {path.name}: {str(found)[:300]}")
                print(f"WRONG: {wrong[-1]}", flush=True)
        path.write_bytes(content)
    return counts


def make_data(root: Path) -> tuple[Path, Path]:
    """Return a folder with the data set tiny, and a corpus."""
    root.mkdir(exist_ok=True)
    small = write_jsonl(root / "small.jsonl", make_records(300))
    corpus = write_jsonl(root / "corpus.jsonl", make_records(6000))
    argv = [sys.executable, str(REPO / "prepare.py"), "--input", str(small), "--name=tiny"]
    argv += [f"--data_dir={root / 'data'}", "--vocab_size=400", "--val_fraction=0.1"]
    subprocess.run(argv, check=True, stdout=DEVNULL, env=ENVIRONMENT)
    return root / "data", corpus


def references(root: Path, data: Path, corpus: Path, jobs: list[str]) -> dict[str, dict]:
    """Return the result of each job when nothing disturbs it."""
    found = {}
    quiet = {"stdout": DEVNULL, "env": ENVIRONMENT}
    for job in jobs:
        if job == TWO:
            continue
        if job == "prepare":
            subprocess.run(prepare_command(corpus, root / "prepared"), check=True, **quiet)
            found[job] = files_of(root / "prepared" / "set")
        else:
            out = root / f"reference {job}"
            for phase in range(len(JOBS[job][1])):
                argv = command(job, data, out, phase)
                subprocess.run(argv, check=True, stderr=DEVNULL, **quiet)
            found[job] = result(out)
    return found


def soak(
    rounds: int, seed: int, parallel: int, root: Path, jobs=(*JOBS, "prepare", TWO)
) -> list[Round]:
    """Make the rounds, with these jobs in turn; print and return what happened in each."""
    data, corpus = make_data(root)
    reference = references(root, data, corpus, jobs)

    def one(number: int) -> Round:
        rng = random.Random(seed * 10_000 + number)
        out = root / f"round {number}"
        job = jobs[number % len(jobs)]
        if job == "prepare":
            r = prepare_round(corpus, out, reference[job], rng)
        elif job == TWO:
            wrong = two_writers(data, out)
            r = Round(job, ["no lock"], starts=4, identical=not wrong, traceback=wrong)
        else:
            r = train_round(job, data, out, reference[job], rng)
        same = "yes" if r.identical else "NO "
        what = f"{number + 1:>4}  {job:<12} {r.starts} starts {r.seconds:5.0f} s"
        failed = "  TRACEBACK" if r.traceback else ""
        print(f"{what}  identical {same}  {'; '.join(r.faults)}{failed}", flush=True)
        if r.identical and not r.traceback:
            shutil.rmtree(out)
        elif r.traceback:
            print(r.traceback, flush=True)
        return r

    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(one, range(rounds)))


@dataclass(frozen=True)
class SoakConfig:
    rounds: int = 100  # number of rounds
    flips: int = 0  # number of bits to flip, before the rounds
    seed: int = 0  # seed of all that is drawn at random
    parallel: int = 2  # number of rounds that run at the same time
    jobs: str = ""  # only these, with commas between them
    kills: bool = False  # of all that can happen, only kills and signals


def main() -> None:
    cfg = parse(SoakConfig, doc=__doc__)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        if cfg.flips:
            counts = flip_bits(cfg.flips, cfg.seed, Path(root) / "flips", wrong)
            outcomes = ", ".join(f"{n:,} {what}" for what, n in counts.items())
            print(f"{cfg.flips} flipped bits: {outcomes}", flush=True)
        jobs = cfg.jobs.split(",") if cfg.jobs else (*JOBS, "prepare", TWO)
        if cfg.kills:
            FAULTS[:] = KILLS
        soaked = cfg.rounds > 0
        found = soak(cfg.rounds, cfg.seed, cfg.parallel, Path(root), jobs) if soaked else []
    good = sum(r.identical for r in found)
    bad = sum(bool(r.traceback) for r in found)
    starts = sum(r.starts for r in found)
    print(f"\n{good} of {len(found)} identical, {bad} with a traceback, {starts} starts")
    sys.exit(good < len(found) or bad > 0 or bool(wrong))


if __name__ == "__main__":
    run(main)
