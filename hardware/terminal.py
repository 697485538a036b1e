"""What all programs look like in a terminal: one kind of progress bar, and lines that fit into it.

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

ETA = "eta {remaining}{postfix}"  # in tqdm's words


class ProgressBar(tqdm):
    """One row at the bottom of the terminal. It is removed when it is closed.

    title: of the work. shown: None: if stderr is a terminal. end: the text behind the bar. options:
    those of tqdm, such as total.
    """

    def __init__(
        self, title: str, iterable=None, shown: bool | None = None, end: str = ETA, **options
    ):
        # The bar does not grow with the terminal, so that the row fits into 80 columns and stays in
        # one piece if a wide terminal is made narrower. With miniters=1 a step that takes long
        # shows at once; mininterval, 0.1 s, limits how often the row is drawn.
        row = f"{title} {{n_fmt}}/{{total_fmt}} {{percentage:3.0f}}% |{{bar:16}}| {end}"
        options |= dict(bar_format=row, dynamic_ncols=True, miniters=1, leave=False)
        hidden = not (stderr_can_erase() if shown is None else shown)
        super().__init__(iterable, disable=hidden, **options)

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


def stderr_can_erase() -> bool:
    """Return whether stderr is a terminal that can remove a row again."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def in_a_terminal() -> bool:
    """Return whether lines can stand above a bar: not in `train.py | tee log`."""
    return sys.stdout.isatty() and stderr_can_erase()


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


def plural(n: int, noun: str) -> str:
    """Return `1 document`, or `2 documents`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def quoted(text: str) -> str:
    """Return a text that a model wrote as a block, which cannot be taken for lines of the log.

    Each row begins with >. Rows beyond the twelfth are left out, and several empty lines become
    one. Characters that would move the cursor or change colours become U+FFFD.
    """
    wide = any(unicodedata.east_asian_width(c) in "WF" for c in text)  # Chinese takes two columns
    rows = []
    for line in re.sub(r"\n([ \t]*\n)+", "\n\n", text.rstrip()).split("\n"):
        shown = "".join(c if c.isprintable() else "\ufffd" for c in line.expandtabs(4))
        rows += textwrap.wrap(shown, 36 if wide else 72) or [""]
    return "\n".join(f"    > {row}".rstrip() for row in rows[:12])
