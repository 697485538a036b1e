"""Which part of the repository may import which, checked by reading all import statements."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import REPO

COMMANDS = {"train", "prepare", "sample", "plot", "plan"}
PACKAGES = {"text", "training", "hardware"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


FILES = [path for folder in ("", *PACKAGES, "bench") for path in (REPO / folder).glob("*.py")]
MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """Return this repository's modules that a file imports, anywhere in its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


GRAPH = {name: imports(path) for name, path in MODULES.items()}


def test_nothing_imports_a_command_or_bench_hardware_knows_no_text_and_text_no_training():
    assert not GRAPH["model"]
    below = {"hardware": {"text", "training"}, "text": {"training", "model"}}
    for name, used in GRAPH.items():
        if not name.startswith("bench"):
            above = {*COMMANDS, "bench"} | below.get(name.split(".")[0], set())
            assert not {u for u in used if u.split(".")[0] in above}, name


def test_no_circle():
    TopologicalSorter(GRAPH).prepare()  # raises CycleError, which names the modules of a circle


def test_no_import_is_hidden_from_these_tests():
    sources = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    assert not [name for name, source in sources.items() if "TYPE_CHECKING" in source]


SLOW = "torch._dynamo torch.distributed.fsdp torch.utils.benchmark matplotlib sentencepiece"
SLOW += " tiktoken tokenizers transformers wandb tensorboard"


def test_a_command_loads_what_is_slow_to_import_only_when_it_needs_it():
    """So --help and the refusal of a mistaken option come at once."""
    loaded = f"import sys, train, sample; print(*sys.modules.keys() & {{*'{SLOW}'.split()}})"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "")
