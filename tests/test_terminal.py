"""What a run looks like in a terminal, and where there is none."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable

import pytest
from conftest import TINY, call

import train
from training.report import Metrics
from training.terminal import fitted, quoted

DRAWN = "\r\x1b[K"  # what begins each drawing of the bar, and removes it


@pytest.fixture
def in_terminal(monkeypatch) -> Callable[..., str]:
    """in_terminal(columns, work) calls work() in a terminal and returns all that was written."""

    def show(columns: int, work: Callable[[], None]) -> str:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        written: list[bytes] = []

        def read() -> None:
            try:
                while data := os.read(ours, 65536):
                    written.append(data)
            except OSError:  # the terminal was closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        with open(theirs, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setattr(sys, "stdout", terminal)
            patch.setattr(sys, "stderr", terminal)
            work()
        reader.join()
        os.close(ours)
        return b"".join(written).decode().replace("\r\n", "\n")

    return show


def kinds(text: str) -> list[str]:
    """Return the lines of a log from the first step on, without numbers and paths.

    They are sorted: a thread says when a checkpoint is saved.
    """
    log = re.sub(r"\S*/(run|ckpt)/\S*", "PATH", text[text.index("step 1/") :])
    return sorted(re.sub(r"[0-9][0-9.e+-]*k?", "N", log).splitlines())


@pytest.mark.parametrize("columns", [80, 160])
def test_the_bar_stays_in_one_row_below_the_lines_and_leaves_nothing(
    columns, in_terminal, tiny_data, tmp_path, capsys, monkeypatch
):
    log_outcome = Metrics.log_outcome

    def outcome(self, *args) -> None:
        print("a warning of another package", file=sys.stderr)
        log_outcome(self, *args)

    options = [*TINY, f"--data_dir={tiny_data}", f"--out_dir={tmp_path}", "--sample_every=4"]
    call(train.main, *options)
    without = capsys.readouterr().out
    options += ["--progress=auto", "--overwrite"]
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "log_outcome", outcome)
        written = in_terminal(columns, lambda: call(train.main, *options))
    parts = [part.strip("\r") for part in written.split(DRAWN)]
    bars = [part for part in parts if "\n" not in part]
    printed = "".join(part for part in parts if "\n" in part)
    assert max(map(len, bars)) < 80
    for done in range(1, 9):
        assert any(bar.startswith(f"step {done}/8 {100 * done / 8:3.0f}% |") for bar in bars), bars
    assert re.search(r"\| eta 0m0\ds \| [0-9.]+k tok/s$", bars[-2])
    # Each line begins at the left border, and the bar is in none of them.
    assert printed.count("\na warning of another package\n") == 8
    printed = printed.replace("a warning of another package\n", "")
    assert not re.search(r"step \d/8 +\d+% \|", printed)
    joined = re.sub(r"\n    (?!>)", " | ", printed)  # undo what fitted() has done
    assert kinds(joined) == kinds(without)
    log = printed[printed.index("step 1/8") :]
    rows = [row for row in log.splitlines() if " | " in row and "saved" not in row]
    assert rows and max(map(len, rows)) <= columns


def test_where_there_is_no_terminal_there_is_no_bar(tiny_data, tmp_path, capfd):
    options = [f"--data_dir={tiny_data}", f"--out_dir={tmp_path}", "--progress=auto"]
    call(train.main, *TINY, *options, "--max_steps=2")
    out, err = capfd.readouterr()
    assert err == "" and "step 2/2 | loss" in out and "\r" not in out and "\x1b" not in out


def test_a_line_is_cut_between_its_fields_only():
    line = "step 1/2 | loss 3.412 | 412.3k tok/s | eta 3h12m"
    assert fitted(line, 0) == fitted(line, len(line)) == line
    assert fitted(line, 30) == "step 1/2 | loss 3.412\n    412.3k tok/s | eta 3h12m"
    assert fitted(line, 5) == "step 1/2\n    loss 3.412\n    412.3k tok/s\n    eta 3h12m"


def test_a_sample_cannot_be_taken_for_the_log_or_move_the_cursor():
    assert (
        quoted("one\n\n \n\n\tstep 1/2 | loss\n\n") == "    > one\n    >\n    >     step 1/2 | loss"
    )
    assert quoted("red \x1b[31m\r\x07") == "    > red \ufffd[31m\ufffd\ufffd"
    assert {len(row) for row in quoted("字" * 80).splitlines()} == {6 + 36, 6 + 8}
