"""How large the house is, what a run loads of it, and how often a step waits for the device.

The two ceilings of size bind this project's maintainers alone: they are checked where CI is set, as
on GitHub, and a copy of the project may raise them. Blank lines, comments and docstrings are
not counted.
"""

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from conftest import REPO, training
from test_imports import MODULES

import train

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE.add(tokenize.ENDMARKER)
CEILING = 7_900  # lines of code of the product: all but bench/, tests/ and config/
CEILING_OF_A_RUN = 5_500  # lines of ours that a training on a CPU loads
for_maintainers = pytest.mark.skipif("CI" not in os.environ, reason="set CI to check the ceilings")


def code_lines(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        with_docstring = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, with_docstring) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


@for_maintainers
def test_the_product_is_not_longer_than_its_ceiling():
    product = [path for name, path in MODULES.items() if not name.startswith("bench")]
    assert sum(map(code_lines, product)) <= CEILING


@for_maintainers
def test_a_run_loads_no_more_than_its_ceiling(tiny_data, tmp_path):
    """Counted after the run, so imports inside functions are included."""
    _, script, *options = training(1, tiny_data, tmp_path, "--max_steps=2")
    run = f"import runpy, sys; sys.argv = {[script, *options]}; sys.path.insert(0, {str(REPO)!r})"
    run += "; runpy.run_path(sys.argv[0], run_name='__main__'); print('', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", run], check=True, capture_output=True, text=True)
    loaded = {"train", *done.stdout.splitlines()[-1].split()} & MODULES.keys()
    assert sum(code_lines(MODULES[name]) for name in loaded) <= CEILING_OF_A_RUN, loaded


def test_a_step_waits_for_the_device_once(trains, tmp_path, monkeypatch):
    """In ten steps more, in which nothing is logged, evaluated or saved."""
    calls = Counter()

    def counted(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def call(self, *args):
            calls[name] += 1
            return method(self, *args)

        monkeypatch.setattr(kind, name, call)

    counted(train.HostCopy, "wait")
    counted(train.Machine, "synchronize")
    counts = []
    for steps in (5, 15):
        calls.clear()
        rare = ["--log_every=100", "--eval_every=100", "--save_every=100", "--overwrite"]
        trains(*rare, f"--max_steps={steps}")
        counts.append(Counter(calls))
    assert counts[1] - counts[0] == Counter(wait=10), counts
    assert counts[0].keys() == {"wait", "synchronize"}
