"""Start train.py and sample.py without waiting for their imports: Python's forkserver has them.

multiprocessing's forkserver imports them once and forks itself for each command, which runs the
script as __main__. Popen and run replace those of subprocess.

A command that begins with torchrun does not run torchrun: ranks() starts the processes instead. A
test that is about the start itself (a limit, a locale, a terminal) uses subprocess.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, TimeoutExpired

TORCHRUN = ["-m", "torch.distributed.run"]
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["train", "sample", "torch._dynamo", "matplotlib.pyplot"])
# A command that a failed test has left must not keep the tests from ending.
atexit.register(lambda: [child.kill() for child in multiprocessing.active_children()])


class Popen:
    """The part of subprocess.Popen that the tests use.

    Output that goes to a PIPE is written to a temporary file, so no command waits for a reader. It
    is always text.
    """

    def __init__(
        self, args, stdout=None, stderr=None, text=True, env=None, cwd=None,
        start_new_session=False, preexec_fn=None,
    ):  # fmt: skip
        assert args[0] == sys.executable
        self.args = args
        self.files = []  # of stdout and stderr, where they are captured
        paths = []
        for number, target in ((1, stdout), (2, stderr)):
            file = tempfile.TemporaryFile("w+", encoding="utf-8") if target == PIPE else None
            self.files.append(file)
            target = file or (number if target is None else target)
            handle = target if isinstance(target, int) else target.fileno()
            paths.append(os.devnull if target == DEVNULL else f"/proc/{os.getpid()}/fd/{handle}")
        started, report = FORKSERVER.Pipe(duplex=False)
        argv = [os.fsdecode(arg) for arg in args[1:]]
        order = (argv, dict(env or os.environ), cwd or os.getcwd(), start_new_session, paths)
        self.process = FORKSERVER.Process(target=execute, args=(*order, report))
        self.process.start()
        report.close()  # the process has its own: if that ends early, recv() fails
        started.recv()  # it has opened its files: the caller may close them
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> list[str | None]:
        self.wait(timeout)
        for file in filter(None, self.files):
            file.seek(0)
        return [file and file.read() for file in self.files]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(args, capture_output=False, timeout=None, **options) -> CompletedProcess:
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    process = Popen(args, **options)
    try:
        return CompletedProcess(args, process.wait(timeout), *process.communicate())
    except BaseException:
        process.kill()
        raise


if sys.platform != "linux":  # elsewhere, a fork after so many imports may fail
    Popen = subprocess.Popen  # noqa: F811
    run = subprocess.run  # noqa: F811


# -- in the process that is forked --


def execute(argv: list, env: dict, cwd: str, alone: bool, paths: list[str], report) -> None:
    """Run a command, as Python would.

    paths: of stdout and stderr. report: gets a message when the command begins.
    """
    for number, path in enumerate(paths, 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # Streams that know what these files are: a pipe cannot seek.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    os.chdir(cwd)
    if alone:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    set_environment(env)
    sys.argv = argv
    report.send(None)
    report.close()
    if sys.argv[:2] == TORCHRUN:
        ranks()
    try:
        if sys.argv[0] == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        for stream in (sys.stdout, sys.stderr):  # atexit does not run at the end of such a process
            stream.flush()
            getattr(stream.buffer, "finish", stream.flush)()


def set_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:  # torch read it when it was imported: before this
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))


def ranks() -> None:
    """Do what torchrun does: start the ranks, forward signals, and end all ranks when one fails.

    Return in each rank, with the environment variables that torchrun sets.
    """
    script = next(i for i, arg in enumerate(sys.argv) if arg.endswith(".py"))
    options = sys.argv[2:script]
    sys.argv = sys.argv[script:]
    (n,) = (int(o.split("=")[1]) for o in options if o.startswith("--nproc_per_node="))
    receive, send = os.pipe()
    left = set()
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            Path("/proc/self/comm").write_text(f"RANK={rank}")  # tests look for a rank by this name
            os.close(send)
            values = {"MASTER_ADDR": "localhost", "MASTER_PORT": int(os.read(receive, 5))}
            os.close(receive)
            values |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
            values |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
            values |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
            given = {"OMP_NUM_THREADS": "1"} | os.environ
            set_environment(given | {name: str(value) for name, value in values.items()})
            return
        left.add(pid)

    def hand_on(number: int, frame=None) -> None:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, hand_on)
    TCPStore = sys.modules["torch.distributed"].TCPStore
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.write(send, f"{store.port:05d}".encode() * n)
    failed = False
    while left:
        pid, status = os.wait()
        left.remove(pid)
        if status and not failed:
            failed = True
            time.sleep(0.1)  # torchrun looks for failed ranks ten times a second
            hand_on(signal.SIGTERM)
    sys.exit(1 if failed else 0)
