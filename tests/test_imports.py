"""Which part of the repository may import which, checked by reading all import statements."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import REPO

PACKAGES = ("text", "training", "hardware", "bench")
COMMANDS = {"train", "prepare", "sample", "plot", "plan"}
FILES = [path for folder in ("", *PACKAGES) for path in (REPO / folder).glob("*.py")]
MODULES = {".".join(path.relative_to(REPO).with_suffix("").parts): path for path in FILES}
# Imports go one way: a module imports only those of its own layer and of those below.
LAYERS = ["bench", "commands", "training", "text", "hardware", "model"]


def layer(module: str) -> int:
    if module in ("model", "configurator"):
        return LAYERS.index("model")
    return LAYERS.index("commands" if module in COMMANDS else module.split(".")[0])


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


@pytest.mark.parametrize("name", GRAPH)
def test_imports_go_one_way(name):
    assert not [used for used in GRAPH[name] if layer(used) < layer(name)]
    assert not GRAPH[name] & COMMANDS or name.startswith("bench")
    assert "TYPE_CHECKING" not in MODULES[name].read_text(encoding="utf-8")  # which hides imports


def test_no_circle():
    TopologicalSorter(GRAPH).prepare()  # raises CycleError, which names the modules of a circle
    assert not GRAPH["model"]


SLOW = ["torch._dynamo", "torch.distributed.fsdp", "torch.utils.benchmark", "matplotlib"]
SLOW += ["sentencepiece", "tiktoken", "tokenizers", "transformers", "wandb", "tensorboard"]


def test_a_command_imports_what_is_slow_when_it_needs_it():
    """So --help and the refusal of a mistaken option come at once."""
    loaded = f"import sys, train, sample; print(*sys.modules.keys() & {{*{SLOW}}})"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "")
