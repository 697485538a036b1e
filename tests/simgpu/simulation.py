"""Run a command of this project on simulated GPUs, which compute nothing.

SIMGPU=FOLDER names them. FOLDER/venv has torch's CUDA build; FOLDER/lib has libraries that take the
place of NVIDIA's: libcudart, libcuda, libcublas, libnvidia-ml, libnccl, and shim.so, which adds to
them. All the rest is real: the choice of kernels, streams, pinned copies, the caching allocator,
Inductor and Triton down to machine code, graphs, and the calls of NCCL.
"""

import os
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

SIMGPU = os.environ.get("SIMGPU", "")
REPO = Path(__file__).resolve().parents[2]
LIBRARIES = ["shim.so", "libcudart.so.13", "libcuda.so.1", "libcublas.so.13", "libnvidia-ml.so.1"]


@cache
def nothing() -> Path:
    """Compile nothing.c, and return the library."""
    library = Path(tempfile.mkdtemp()) / "nothing.so"
    source = Path(__file__).with_name("nothing.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def environment(gpu: str, processes: int) -> dict[str, str]:
    """Return the environment of processes on so many simulated GPUs.

    gpu: a100, h100 or rtx4090.
    """
    lib = Path(SIMGPU).resolve() / "lib"
    bin = Path(SIMGPU).resolve() / "venv/bin"
    libraries = [nothing(), *(lib / name for name in LIBRARIES)]
    several = {}
    if processes > 1:
        libraries.append(lib / "libnccl.so.2")
        several = {"FAKEGPU_MODE": "simulate", "FAKEGPU_DIST_MODE": "simulate"}
    of_all = {
        "PATH": f"{bin}:{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(__file__).parent}:{REPO}",
        "TRITON_LIBCUDA_PATH": str(lib),
        "OMP_NUM_THREADS": "1",
        "FAKEGPU_PROFILE": gpu,
        "FAKEGPU_DEVICE_COUNT": str(processes),
        "FAKEGPU_TERMINAL_REPORT": "0",
        "FAKEGPU_REPORT_PATH": os.devnull,
        "LD_PRELOAD": ":".join(map(str, libraries)),
    }
    return os.environ | several | of_all


def simulated(
    gpu: str, processes: int, argv: list[str], folder: Path, **options
) -> subprocess.CompletedProcess:
    """Run a script with its arguments as so many processes. options: of subprocess.run()."""
    env = environment(gpu, processes)
    python = ["python"]
    meeting = None
    if processes > 1:
        python = ["torchrun", f"--nproc_per_node={processes}"]
        address = tempfile.mktemp()
        env |= {"FAKEGPU_COORDINATOR_TRANSPORT": "unix", "FAKEGPU_COORDINATOR_ADDR": address}
        env |= {"FAKEGPU_COORDINATOR_TIMEOUT_MS": "600000"}  # one rank may compile for long
        coordinator = [Path(SIMGPU) / "fakegpu-coordinator", "--transport", "unix"]
        meeting = subprocess.Popen([*coordinator, "--address", address], stdout=subprocess.DEVNULL)
        while not os.path.exists(address):
            time.sleep(0.1)
    streams = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    command = ["env", *python, *argv]  # env finds python in the new PATH
    try:
        return subprocess.run(command, env=env, cwd=folder, **streams | options)
    finally:
        if meeting:
            meeting.kill()
            meeting.wait()
