"""Output in a terminal: the progress bar of all programs, and texts that fit into the terminal.

The bar goes to stderr, everything else to stdout. If stderr is not a terminal, there is no bar.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from configurator import folded, harmless


class ProgressBar(tqdm):
    """One row at the bottom of the terminal. It is removed when it is closed.

    title: of the work. disable: None: if stderr is not a terminal. options: of tqdm, such as total.
    """

    def __init__(self, title: str, iterable=None, disable: bool | None = None, **options):
        # The bar does not grow with the terminal, so the row fits into 80 columns and stays one row
        # if a wide terminal is made narrower. With miniters=1 a long step shows at once;
        # mininterval, 0.1 s, limits how often the row is drawn.
        row = f"{title} {{n_fmt}}/{{total_fmt}} {{percentage:3.0f}}% |{{bar:16}}| "
        row += "eta {remaining}{postfix}"
        options |= dict(bar_format=row, dynamic_ncols=True, miniters=1, leave=False)
        super().__init__(iterable, disable=disable, **options)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep the bar below all output of the block, including warnings of other packages."""
        # pyrefly: ignore[bad-specialization]
        redirected = nullcontext() if self.disable else redirect_stderr(DummyTqdmFile(sys.stderr))
        with self, redirected:
            yield


def is_terminal() -> bool:
    """Return whether stdout and stderr are terminals: not in `train.py | tee log`."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def plural(n: int, noun: str) -> str:
    """Return `1 document`, or `2 documents`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def quoted(text: str) -> str:
    """Return a text of the model as a block that cannot be mistaken for lines of the log.

    Each row starts with >. Rows after the twelfth are left out, and several empty lines become one.
    """
    lines = re.sub(r"\n([ \t]*\n)+", "\n\n", text.rstrip()).expandtabs(4)
    rows = folded(harmless(lines), 72).split("\n")
    return "\n".join(f"    > {row}".rstrip() for row in rows[:12])
