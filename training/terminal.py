"""What a run looks like in a terminal: a progress bar below all lines, and lines that fit into it.

The bar goes to stderr, everything else to stdout. Where these are no terminal, there is no bar, and
every line stays whole.
"""

import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile


class ProgressBar(tqdm):
    """One row at the bottom of the terminal. It is removed when it is closed.

    hidden: show nothing. total, begun: how many steps the run has, and has done already.
    """

    def __init__(self, hidden: bool, total: int, begun: int):
        # The bar does not grow with the terminal, so that the row fits into 80 columns and stays in
        # one piece if a wide terminal is made narrower. With miniters=1 a step that takes long
        # shows at once; mininterval, 0.1 s, limits how often the row is drawn.
        row = "step {n}/{total} {percentage:3.0f}% |{bar:24}| {desc}"
        options = dict(bar_format=row, dynamic_ncols=True, miniters=1, leave=False)
        super().__init__(disable=hidden, total=total, initial=begun, **options)

    @staticmethod
    def status_printer(file: TextIO):
        """Return the function by which tqdm replaces the row.

        tqdm's own writes spaces over the old row. Here the terminal erases it, so what the terminal
        wrote into it goes too, as the ^C of Ctrl-C, and spaces can't run over into the next row.
        """

        def show(row: str) -> None:
            file.write(f"\r\x1b[K{row}")
            file.flush()

        return show

    @contextmanager
    def below(self) -> Iterator[None]:
        """Keep the bar below all that is printed in the block, also warnings of other packages."""
        if self.disable:
            yield
            return
        with self, redirect_stderr(DummyTqdmFile(sys.stderr)):
            yield


def in_a_terminal() -> bool:
    """Return whether a bar can be shown. In `train.py | tee log` it would run into the lines."""
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def columns() -> int:
    """Return the width of the terminal that stdout goes to; 0 if there is none."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
    except (OSError, ValueError):  # a closed terminal
        return 0


def fitted(line: str, width: int) -> str:
    """Return a log line in rows of at most `width` columns, cut between its fields; 0: as it is."""
    rows = [""]
    for field in line.split(" | "):
        longer = f"{rows[-1]} | {field}".removeprefix(" | ")
        if not width or not rows[-1] or len(longer) <= width:
            rows[-1] = longer
        else:
            rows.append(f"    {field}")
    return "\n".join(rows)


def quoted(text: str) -> str:
    """Return a text that a model wrote as a block, which cannot be taken for lines of the log.

    Each row begins with >. Several empty lines become one. Characters that would move the cursor or
    change colours become U+FFFD.
    """
    wide = any(unicodedata.east_asian_width(c) in "WF" for c in text)  # Chinese takes two columns
    rows = []
    for line in re.sub(r"\n([ \t]*\n)+", "\n\n", text.rstrip()).split("\n"):
        shown = "".join(c if c.isprintable() else "\ufffd" for c in line.expandtabs(4))
        rows += textwrap.wrap(shown, 36 if wide else 72) or [""]
    return "\n".join(f"    > {row}".rstrip() for row in rows)
