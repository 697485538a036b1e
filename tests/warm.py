"""Start train.py and sample.py without waiting for their imports, which take about three seconds.

A server process imports everything once and starts no threads. It forks itself for each command.
The fork runs the script as __main__ and ends as Python ends, so its exit code, its signals and its
output are those of the real command. Popen and run replace those of subprocess.

A command that begins with torchrun does not run torchrun: ranks() starts the processes instead. A
test that is about the start itself (a limit, a locale, a terminal) uses subprocess.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, TimeoutExpired

REPO = Path(__file__).resolve().parents[1]
MODULES = ["train", "sample", "torch._dynamo", "matplotlib.pyplot"]
TORCHRUN = ["-m", "torch.distributed.run"]


# -- in the tests --


@functools.cache
def server() -> socket.socket:
    """Start the server process and return the connection to it. It ends with the tests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, __file__, str(theirs.fileno())]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # otherwise numpy starts a thread
    env.pop("OMP_NUM_THREADS", None)  # set_environment() sets the number for each command
    process = subprocess.Popen(
        argv, stdin=DEVNULL, stdout=DEVNULL, env=env, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


class Popen:
    """The part of subprocess.Popen that the tests use.

    Output that goes to a PIPE is written to a temporary file, so no command waits for a reader.
    """

    def __init__(
        self,
        args,
        stdout=None,
        stderr=None,
        text=False,
        env=None,
        cwd=".",
        start_new_session=False,
    ):
        assert args[0] == sys.executable
        self.args = args
        self.text = text
        self.returncode = None
        self.stdout = tempfile.TemporaryFile() if stdout == PIPE else None
        self.stderr = tempfile.TemporaryFile() if stderr == PIPE else None
        self.report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [os.fsdecode(arg) for arg in args[1:]]
        order = [argv, dict(env or os.environ), os.path.abspath(cwd), start_new_session]
        with open(os.devnull, "r+b") as nothing, theirs:

            def handle(where, captured, inherited: int) -> int:
                file = {PIPE: captured, DEVNULL: nothing, None: inherited}.get(where, where)
                return file if isinstance(file, int) else file.fileno()

            files = [nothing.fileno(), handle(stdout, self.stdout, 1)]
            files += [handle(stderr, self.stderr, 2), theirs.fileno()]
            socket.send_fds(server(), [json.dumps(order).encode()], files)
        self.pid = int(self.report.recv(100))

    def has_ended(self, timeout: float | None) -> bool:
        if self.returncode is None and select.select([self.report], [], [], timeout)[0]:
            self.returncode = int(self.report.recv(100))
            self.report.close()
        return self.returncode is not None

    def poll(self) -> int | None:
        self.has_ended(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.has_ended(timeout):
            raise TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple:
        self.wait(timeout)
        return self.printed(self.stdout), self.printed(self.stderr)

    def printed(self, file) -> str | bytes | None:
        if file is None:
            return None
        with file:
            file.seek(0)
            return file.read().decode() if self.text else file.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(args, capture_output=False, timeout=None, check=False, **options) -> CompletedProcess:
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    process = Popen(args, **options)
    try:
        done = CompletedProcess(args, process.wait(timeout), *process.communicate())
    except BaseException:
        process.kill()
        raise
    if check:
        done.check_returncode()
    return done


if sys.platform != "linux":  # elsewhere, a fork after so many imports may fail
    Popen = subprocess.Popen  # noqa: F811
    run = subprocess.run  # noqa: F811


# -- in the process that is forked --


def serve(channel: socket.socket) -> None:
    """Fork for each order that arrives. Return in the fork, which is then ready for execute()."""
    while True:
        message, files, *_ = socket.recv_fds(channel, 1 << 20, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            obey(*json.loads(message), files)
            return
        for file in files:
            os.close(file)


def obey(argv: list[str], env: dict[str, str], cwd: str, alone: bool, files: list[int]) -> None:
    """Fork once more: the child becomes the command and returns; the parent reports how it ends."""
    report = socket.socket(fileno=files.pop())
    if command := os.fork():
        for file in (0, 1, 2, *files):
            os.close(file)
        status = os.waitpid(command, 0)[1]
        report.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    if alone:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # new ones, as Python makes them
        old = getattr(sys, name)
        mode = "r" if number == 0 else "w"
        buffering = 1 if number == 2 else -1
        setattr(sys, name, open(number, mode, buffering, old.encoding, old.errors, closefd=False))
    set_environment(env)
    sys.argv = argv
    report.send(str(os.getpid()).encode())
    report.close()


def set_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:  # torch read it when it was imported: before this
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))


def execute() -> None:
    """Run the command in sys.argv, as Python would."""
    if sys.argv[:2] == TORCHRUN:
        ranks()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if sys.argv[0] == "-c":
        code = sys.argv.pop(1)
        name = "<string>"
        folder = ""
    else:
        name = main.__file__ = sys.argv[0]
        code = Path(name).read_bytes()
        folder = str(Path(name).resolve().parent)
    sys.path[0] = folder
    exec(compile(code, name, "exec"), main.__dict__)


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


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    for module in MODULES:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # otherwise the garbage collector of each fork would touch, and so copy, all memory
    serve(socket.socket(fileno=int(sys.argv[1])))
    execute()
