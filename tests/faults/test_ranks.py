"""Ranks with different data or checkpoints must not train together.

Each case is two processes, which tests/warm.py starts as torchrun does.
"""

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from subprocess import CompletedProcess, Popen

import harness
import pytest
from conftest import REPO, TINY, WAITS, ended, forge, metrics, python, saved

pytestmark = pytest.mark.slow

# Runs train.py as if each rank were on its own computer: {rank} in an option becomes the rank.
ON_ITS_OWN = f"""
import os, sys
sys.path.insert(0, {str(REPO)!r})
sys.argv = [a.replace("{{rank}}", os.environ["RANK"]) for a in sys.argv]
import configurator, train
PATCH
configurator.run(train.main, needs_output=False)
"""


def two(tmp_path: Path, data: Path, *options: str, patch: str = "") -> CompletedProcess:
    script = tmp_path / "of_a_rank.py"
    script.write_text(ON_ITS_OWN.replace("PATCH", patch))
    folders = [f"--data_dir={data}", f"--out_dir={tmp_path / 'out'}"]
    return ended(python(2, script, *TINY, *folders, *options))


def refusal(done: CompletedProcess) -> str:
    """Return the error line. There may be a traceback of torchrun, but none of train.py.

    A rank that sees another one end says so. Else the line is the same for all ranks.
    """
    errors = {line for line in done.stderr.splitlines() if line.startswith("error: ")}
    errors -= {"error: another rank of this run has ended"}
    assert done.returncode != 0 and len(errors) == 1, done.stderr[-3000:]
    assert str(REPO / "train.py") not in done.stderr, done.stderr
    return errors.pop()


OTHER_DISK = """
from pathlib import Path
broadcast = train.Machine.broadcast
def on_node1(machine, value):
    cfg, origin, *more = broadcast(machine, value)
    cfg = train.replace(cfg, data_dir=cfg.data_dir.replace("node0", "node1"))
    return cfg, origin and Path(str(origin).replace("node0", "node1")), *more
if os.environ["RANK"] == "1":
    os.environ["LOCAL_RANK"] = "0"  # the first of its own computer
    train.Machine.broadcast = on_node1
"""


def damaged(node1: Path) -> None:
    os.truncate(node1 / "train_state.pt", 100)


def of_another_run(node1: Path) -> None:
    (node1 / "config.json").write_bytes((node1 / "config.json").read_bytes() + b"\n")
    forge(node1)


@pytest.mark.parametrize("change", [shutil.rmtree, damaged, of_another_run])
def test_ranks_that_would_begin_elsewhere_are_refused(finished, tiny_data, tmp_path, change):
    """Each rank has its own out_dir. Rank 0 resumes; rank 1 finds something else, or nothing."""
    run, _ = (shutil.copytree(finished, tmp_path / f"node{rank}" / "run") for rank in (0, 1))
    change(tmp_path / "node1" / "run" / "ckpt" / "step_00000008")
    options = [f"--out_dir={tmp_path}/node{{rank}}", "--init_from=auto", "--max_steps=12"]
    error = refusal(two(tmp_path, tiny_data, *options, patch=OTHER_DISK))
    assert ("rank 1: checkpoint" if change is of_another_run else "node1") in error
    assert saved(run).name == "step_00000008"


def test_data_that_differ_on_one_computer_are_refused(tiny_data, tmp_path):
    one, other = (tmp_path / f"node{rank}" / "tiny" for rank in (0, 1))
    shutil.copytree(tiny_data / "tiny", one)
    assert "no data set in" in refusal(two(tmp_path, one.parent, patch=OTHER_DISK))
    shutil.copytree(tiny_data / "tiny", other)
    meta = json.loads((other / "meta.json").read_text(encoding="utf-8"))
    meta["splits"]["train"]["sha256"] = "0" * 64
    forge(other, "meta.json", json.dumps(meta).encode())
    assert "tiny/train.bin" in refusal(two(tmp_path, one.parent, patch=OTHER_DISK))
    assert not (tmp_path / "out/run/metrics.jsonl").exists()


def test_an_error_of_one_rank_alone_is_told(tiny_data, tmp_path):
    patch = """
def fails(*args, **options):
    raise configurator.UserError("rank 1 fails")
if os.environ["RANK"] == "1":
    train.open_datasets = fails
"""
    assert "rank 1 fails" in refusal(two(tmp_path, tiny_data, patch=patch))


def test_all_ranks_train_with_the_settings_of_rank_0(tiny_data, tmp_path):
    done = two(tmp_path, tiny_data, "--lr=0.00{rank}1", "--schedule=constant")
    assert done.returncode == 0, done.stderr[-3000:]
    assert metrics(tmp_path / "out" / "run", "lr")[8] == 0.0001


def test_another_torch_on_one_rank_is_refused(tiny_data, tmp_path):
    patch = "import torch\nif os.environ['RANK'] == '1': torch.__version__ = '2.9.9'"
    assert "torch is 2.9.9" in refusal(two(tmp_path, tiny_data, patch=patch))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs g++")
def test_a_compiler_that_is_missing_on_one_rank_alone_ends_all(tiny_data, tmp_path):
    patch = """
import torch._inductor.config as inductor
inductor.force_disable_caches = True
if os.environ["RANK"] == "1":
    inductor.cpp.cxx = (None, "/no/compiler")
"""
    options = ["--compile=true", "--batch_size=2", "--n_layer=1"]
    done = two(tmp_path, tiny_data, *options, patch=patch)
    assert done.returncode != 0 and "--compile=false" in done.stderr


def test_one_rank_without_memory_halves_the_batch_of_all(tiny_data, tmp_path):
    patch = """
import torch
forward = train.GPT.forward
def limited(model, idx, *args, **kwargs):
    if os.environ["RANK"] == "1" and idx.size(0) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return forward(model, idx, *args, **kwargs)
train.GPT.forward = limited
"""
    done = two(tmp_path, tiny_data, "--batch_size=auto", patch=patch)
    assert done.returncode == 0, done.stderr[-3000:]
    records = (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()
    assert json.loads(records[0])["settings"]["batch_size"] == 2
    assert metrics(tmp_path / "out/run", "loss").keys() == set(range(1, 9))


def test_a_last_save_that_fails_ends_all_ranks_without_a_traceback(tiny_data, tmp_path):
    patch = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (102_400, 102_400))"
    done = two(tmp_path, tiny_data, "--max_steps=4", patch=patch)
    assert "could not be written" in done.stdout and refusal(done)


def test_a_computer_that_comes_back_joins_the_run_again(tiny_data, tmp_path):
    """Two torchruns on this computer stand for two computers, as docs/resume.md starts them. One is
    killed with its rank, before its last step. The other waits for it, and both go on from the
    newest checkpoint.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    launch = "-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --max_restarts=3 --rdzv_id=1"
    launch += f" --rdzv_backend=c10d --rdzv_endpoint=localhost:{port} --local_addr=localhost"
    (tmp_path / "of_a_rank.py").write_text(ON_ITS_OWN.replace("PATCH", WAITS))
    script = [str(tmp_path / "of_a_rank.py"), *TINY]
    script += [f"--data_dir={tiny_data}", f"--out_dir={tmp_path}"]
    script += ["--shard=all", "--init_from=auto", "--max_steps=40", "--eval_every=200"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def computer(host: int) -> Popen:
        # A computer that says nothing for three seconds is lost. Usually it is fifteen.
        conf = f"--rdzv_conf=is_host={host},keep_alive_interval=1"
        argv = [sys.executable, *launch.split(), conf, *script]
        log = open(tmp_path / f"computer {host}", "a")  # noqa: SIM115
        return Popen(argv, env=environment, stdout=log, stderr=log)

    computers = [computer(1), computer(0)]
    harness.wait_for(computers[0], lambda: harness.steps_done(tmp_path) >= 20)
    harness.stop(computers[1], signal.SIGKILL)
    computers[1].wait(timeout=60)
    computers[1] = computer(0)
    assert [one.wait(timeout=240) for one in computers] == [0, 0]
    assert metrics(tmp_path / "run", "loss").keys() == set(range(1, 41))
    printed = (tmp_path / "computer 0").read_text() + (tmp_path / "computer 1").read_text()
    assert "resumed from " in printed


SAMPLES = ["--shard=all", "--sample_every=3", "--eval_every=9"]
STEPS = ["--batch_size=1", "--eval_every=9"]  # of 4 micro-steps each


@pytest.mark.parametrize(
    "more, step", [([], 4), (SAMPLES, 3), (STEPS, 2), ([*STEPS, "--shard=optimizer"], 2)]
)
def test_a_signal_is_heard_within_what_takes_long(tiny_data, tmp_path, more, step):
    """It arrives at rank 1 alone, within an evaluation, a sample or a step, and stops all ranks."""
    patch = """
import itertools, signal
forward, calls = train.GPT.forward, itertools.count()
training = STEP == 2
def interrupted(model, *args, **options):
    wanted = model.training == training and os.environ["RANK"] == "1"
    if wanted and next(calls) == (10 if training else 2):
        os.kill(os.getpid(), signal.SIGTERM)
    return forward(model, *args, **options)
train.GPT.forward = interrupted
"""
    more = [*more, "--save_every=100"]
    done = two(tmp_path, tiny_data, *more, patch=patch.replace("STEP", str(step)))
    run = tmp_path / "out" / "run"
    assert done.returncode != 0 and "stopped by a signal" in done.stdout, done.stderr[-3000:]
    assert saved(run).name == f"step_0000000{step}" and not metrics(run, "val_loss")
    assert two(tmp_path, tiny_data, *more, "--init_from=resume").returncode == 0
    assert metrics(run, "loss").keys() == set(range(1, 9))
    assert not metrics(run, "bad_steps") and 8 in metrics(run, "val_loss")
    assert step == 2 or step in metrics(run, "sample" if step == 3 else "val_loss")
