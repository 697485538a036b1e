"""docs/evening.md and docs/zh/evening.md: each command prints what the pages show.

The commands are read from the pages. `make evening` runs all stops, the suite those of a few
seconds.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO

ENGLISH, CHINESE = REPO / "docs" / "evening.md", REPO / "docs" / "zh" / "evening.md"
PAGES = pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])
QUICK = {0, 2, 8, 12}  # stops of a few seconds each
CHOSEN = range(15) if os.environ.get("EVENING") else sorted(QUICK)

NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?"
BLOCK = r"(?ms)^(?:<!-- within ([\d.]+) -->\n\n?)?```(\w+)\n(.*?)^```"
# What the two pages do not have in common: a text in their own language.
OWN = r"(?s)<!-- own -->.*?<!-- end -->"


def stops(text: str) -> dict[int, list[tuple[float, str, str]]]:
    """Return the blocks of each stop: (tolerance, language, content). 0 is what precedes stop 1."""
    parts = re.split(r"(?m)^## (?:(\d+)\. )?.*$", text)
    found = {}
    for number, part in zip(parts[1::2], parts[2::2], strict=True):
        blocks = found.setdefault(int(number or 0), [])
        for within, kind, body in re.findall(BLOCK, part):
            blocks.append((float(within or 0.03), kind, body))
    return found


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a block, each with the lines that it should print."""
    parts = re.split(r"(?m)^\$ ((?:.*\\\n)*.*)\n", block)
    return [(c, shown.splitlines()) for c, shown in zip(parts[1::2], parts[2::2], strict=True)]


def fits(shown: str, printed: str, tolerance: float) -> bool:
    """Return whether a line is as shown: `...` is any text, numbers with a point may differ."""
    parts = re.split(f"({NUMBER})", shown)
    texts = [re.escape(text).replace(re.escape("..."), ".*") for text in parts[::2]]
    found = re.fullmatch(f"({NUMBER})".join(texts), printed.rstrip())
    pairs = zip(parts[1::2], found.groups(), strict=True) if found else ()
    pairs = [(a.replace(",", ""), b.replace(",", "")) for a, b in pairs]
    same = [a == b or "." in a and abs(float(a) - float(b)) <= tolerance for a, b in pairs]
    return found is not None and all(same)


def missing(shown: list[str], printed: list[str], tolerance: float) -> list[str]:
    """Return the lines that are shown, but not printed in this order."""
    lines = iter(printed)
    shown = [line for line in shown if line.strip() != "..."]
    return [line for line in shown if not any(fits(line, other, tolerance) for other in lines)]


def edited(tree: Path, block: str) -> Path:
    """Apply a block of kind diff: the name of a file, then its lines. Return the file."""
    name, *lines = block.splitlines()
    old, new = ("".join(s[1:] + "\n" for s in lines if s[0] in signs) for signs in (" -", " +"))
    source = (tree / name).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{name} has not one place with\n{old}"
    (tree / name).write_text(source.replace(old, new), encoding="utf-8")
    return tree / name


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the programs, in which the stops are run."""
    tree = tmp_path_factory.mktemp("evening")
    for name in ("bench", "config", "docs", "hardware", "text", "training"):
        shutil.copytree(REPO / name, tree / name)
    (tree / "data").mkdir()
    shutil.copy(REPO / "data" / "shakespeare.txt.gz", tree / "data")
    follow(tree, stops(ENGLISH.read_text(encoding="utf-8"))[0])
    return tree


def follow(tree: Path, blocks: list[tuple[float, str, str]]) -> None:
    """Do what the blocks say, and compare what is printed."""
    for program in REPO.glob("*.py"):  # whole again if a stop before has failed
        shutil.copy(program, tree)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for tolerance, kind, block in blocks:
        if kind == "diff":
            edited(tree, block)
        for command, shown in commands(block) if kind == "console" else ():
            if command.startswith("git checkout "):  # the tree is no repository
                shutil.copy(REPO / command.split()[-1], tree / command.split()[-1])
                continue
            began = time.perf_counter()
            options = dict(shell=True, cwd=tree, env=os.environ | {"PATH": path}, text=True)
            done = subprocess.run(command, stdout=-1, stderr=subprocess.STDOUT, **options)
            print(f"{time.perf_counter() - began:.0f} s: {command}\n{done.stdout}", flush=True)
            assert done.returncode == 0, done.stdout
            assert missing(shown, done.stdout.splitlines(), tolerance) == [], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [n for n in CHOSEN if n > 0])
def test_a_stop_prints_what_the_page_shows(number, tree):
    follow(tree, stops(ENGLISH.read_text(encoding="utf-8"))[number])


@pytest.mark.slow
@pytest.mark.skipif("not os.environ.get('EVENING')", reason="make evening runs it")
def test_the_poems_of_the_chinese_page_are_memorised_too(tree):
    (own,) = re.findall(OWN, CHINESE.read_text(encoding="utf-8"))
    follow(tree, stops(f"## own\n{own}")[0])


def test_both_pages_have_the_same_stops():
    shared = [re.sub(OWN, "", page.read_text(encoding="utf-8")) for page in (ENGLISH, CHINESE)]
    assert stops(shared[0]) == stops(shared[1])
    assert list(stops(shared[0])) == list(range(15))


@PAGES
def test_each_edit_has_its_place_in_the_code(page, tmp_path):
    for _, kind, block in sum(stops(page.read_text(encoding="utf-8")).values(), []):
        if kind == "diff":
            name = block.splitlines()[0]
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, tmp_path / name)
            compile(edited(tmp_path, block).read_text(encoding="utf-8"), name, "exec")


@PAGES
def test_each_number_in_the_prose_is_one_that_is_printed(page):
    """Or a tolerance. Only numbers with a point: the others are counts, which the text explains."""
    text = page.read_text(encoding="utf-8")
    blocks = " ".join(body for _, _, body in re.findall(BLOCK, text))
    prose = re.sub(r"arXiv\s+[\d.]+", "", re.sub(BLOCK, "", text))
    decimals = set(re.findall(r"(?<![\d.])\d[\d,]*\.\d+(?![\d.MG])", prose))
    tolerances = {"0.03", *re.findall(r"<!-- within ([\d.]+) -->", text)}
    assert decimals - tolerances - set(re.findall(r"\d[\d,]*\.\d+", blocks)) == set()


@PAGES
def test_each_name_is_in_the_file_that_the_page_gives(page):
    references = re.findall(r"`([\w/]+\.py): ([\w.]+)`", page.read_text(encoding="utf-8"))
    assert len(references) > 20
    for name, dotted in references:
        node: ast.AST = ast.parse((REPO / name).read_text(encoding="utf-8"))
        for part in dotted.split("."):
            node = next((n for n in getattr(node, "body", []) if part in names_of(n)), None)
            assert node, f"{name} has no {dotted}"


def names_of(node: ast.AST) -> set[str]:
    """Return the names that a statement defines."""
    targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
    return {getattr(node, "name", "")} | {getattr(target, "id", "") for target in targets}
