"""README and docs/: what they point to is there, and plans are shown as plan.py prints them."""

import re
import shlex
import unicodedata
from pathlib import Path

import pytest
from conftest import REPO, call, metrics

import plan
import prepare
import sample
import train

PAGES = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"), *REPO.glob("bench/**/*.md")]


def prose(page: Path) -> str:
    """Return the page without its blocks of code."""
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the page's headings."""
    found = set()
    for heading in re.findall(r"(?m)^#+ (.+)$", prose(page)):
        kept = [c for c in heading.lower() if c in " -_" or unicodedata.category(c)[0] in "LNM"]
        found.add("".join(kept).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def outline(page: Path) -> tuple[list[str], set[str]]:
    """Return (marks of the headings, commands and options)."""
    commands = r"--[a-z_]+|\w+\.(?:py|sh)\b|torchrun|make [a-z]+"
    text = page.read_text(encoding="utf-8")
    return re.findall(r"(?m)^#+ ", prose(page)), set(re.findall(commands, text))


PAIRS = {"README.md": "README.zh.md"}
PAIRS |= {f"docs/{p.name}": f"docs/zh/{p.name}" for p in REPO.glob("docs/zh/*.md")}


@pytest.mark.parametrize("page", PAIRS)
def test_both_languages_have_the_same_headings_and_commands(page):
    assert outline(REPO / page) == outline(REPO / PAIRS[page])


@pytest.mark.parametrize("page", ["docs/cost.md", "docs/zh/cost.md"])
def test_a_page_shows_what_plan_py_prints(page, monkeypatch, prints):
    """Pictures are left out."""
    monkeypatch.chdir(REPO)
    text = (REPO / page).read_text(encoding="utf-8")
    shown = re.findall(r"(?ms)^```\n\$ python plan\.py (.*?[^\\])\n(.*?)^```", text)
    assert shown
    for command, lines in shown:
        options = shlex.split(command.replace("\\\n", " "))
        printed = prints(plan.main, *(o for o in options if not o.startswith("--png")))
        printed = ["  ...", *printed.splitlines()]
        assert [line for line in lines.splitlines() if line not in printed] == [], command


@pytest.mark.slow
def test_the_lines_of_the_readme_give_shakespeare_trained_and_sampled(tmp_path, prints):
    """With a loss below the 1.88 that nanoGPT's README names for its recipe for a laptop."""
    play = REPO / "data" / "shakespeare.txt.gz"
    options = ["--tokenizer=char", "--val_fraction=0.1"]
    call(prepare.main, "--input", play, *options, f"--data_dir={tmp_path}")
    folders = [f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'out'}"]
    call(train.main, REPO / "config" / "demo.py", *folders, "--eval_tokens=30_000")
    assert min(metrics(tmp_path / "out" / "demo", "val_loss").values()) < 1.88
    text = prints(sample.main, folders[1])
    assert len("ROMEO:") + 250 <= len(text) <= len("ROMEO:\n") + 256, text
