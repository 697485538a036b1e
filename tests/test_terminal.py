"""What a run looks like in a terminal, and where there is none."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import unicodedata
from collections.abc import Callable

import pytest
from conftest import TINY, call, make_records, train_tiny, write_jsonl

import prepare
import sample
import train
from configurator import folded
from hardware.terminal import fitted, quoted
from training.report import Metrics

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
    options += ["--overwrite"]
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


def test_prepare_and_evaluation_have_the_same_bar_and_leave_nothing_of_it(
    in_terminal, tiny_data, tmp_path
):
    corpus = write_jsonl(tmp_path / "c.jsonl", make_records(50))
    options = [f"--data_dir={tmp_path}", "--vocab_size=400", "--workers=1"]
    run = train_tiny(tiny_data, tmp_path, "--documents=pack")
    evaluated = ["--device=cpu", f"--eval={tiny_data / 'tiny'}"]
    written = in_terminal(80, lambda: call(prepare.main, "--input", corpus, *options))
    written += in_terminal(80, lambda: call(sample.main, f"--ckpt={run}", *evaluated))
    parts = [part.strip("\r") for part in written.split(DRAWN)]
    bars = [part for part in parts if re.search(r" +\d+% \|.{16}\| eta [^\n]+$", part)]
    work = {"reading", "encoding", "verifying", "finding", "evaluating"}
    assert {bar.split(" ")[0] for bar in bars} == work
    assert max(map(len, bars)) < 80
    assert not re.search(r"\d%.*\|", "".join(part for part in parts if part not in bars))


def test_where_there_is_no_terminal_there_is_no_bar(tiny_data, tmp_path, capfd):
    options = [f"--data_dir={tiny_data}", f"--out_dir={tmp_path}"]
    call(train.main, *TINY, *options, "--max_steps=2")
    out, err = capfd.readouterr()
    assert err == "" and "step 2/2 | loss" in out and "\r" not in out and "\x1b" not in out


def test_a_line_is_cut_between_its_fields_only():
    line = "step 1/2 | loss 3.412 | 412.3k tok/s | eta 3h12m"
    assert fitted(line, 0) == fitted(line, len(line)) == line
    assert fitted(line, 30) == "step 1/2 | loss 3.412\n    412.3k tok/s | eta 3h12m"
    assert fitted(line, 5) == "step 1/2\n    loss 3.412\n    412.3k tok/s\n    eta 3h12m"


def test_a_report_is_folded_at_the_width_of_the_terminal_and_nowhere_else(
    in_terminal, tmp_path, capsys
):
    (tmp_path / "语料").mkdir()
    records = [{"text": f"均摊分析 {i}" * 40, "title": "a"} for i in range(300)]
    corpus = write_jsonl(tmp_path / "语料" / f"{'很长的名字' * 9}.jsonl", [*records, {"x": 1}])
    options = ["--input", corpus, f"--data_dir={tmp_path}", "--tokenizer=byte"]
    call(prepare.main, *options)
    whole = capsys.readouterr().out.splitlines()
    written = in_terminal(80, lambda: call(prepare.main, *options))
    rows = written.rpartition(DRAWN)[2].strip("\r").splitlines()
    assert max(len(row) + sum(map(is_wide, row)) for row in rows) <= 80
    assert len(rows) > len(whole) and whole[3] in rows
    made_in = -1
    assert "".join("".join(rows[:made_in]).split()) == "".join("".join(whole[:made_in]).split())
    assert all(row.startswith(" ") for row in rows[2:])  # rows that go on are indented


@pytest.mark.parametrize("columns", [80, 100])
def test_help_and_the_banner_fit_into_the_terminal(in_terminal, tiny_data, tmp_path, columns):
    """Words were cut at the edge: `preset=`, and `qwen3` below it."""

    def show_help() -> None:
        with pytest.raises(SystemExit):
            call(train.main, "--help")

    settings = in_terminal(columns, show_help)
    assert "--block_size=1024" in settings and "--tracker=none" in settings
    more = ["--max_steps=1", "--preset=gpt2", "--n_kv_head=0", "--max_epochs=40"]
    banner = in_terminal(columns, lambda: train_tiny(tiny_data, tmp_path, *more))
    banner = banner[banner.index("settings:") : banner.index("first loss:")]
    paths = (str(tiny_data), str(tmp_path))
    rows = [row for row in (settings + banner).splitlines() if not any(p in row for p in paths)]
    assert max(map(len, rows)) <= columns


def is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def test_a_line_is_folded_between_words_behind_its_own_indent():
    assert folded("  one two three four", 16) == "  one two three\n      four"
    assert folded("  one\n\n  two", 5) == "  one\n\n  two"
    assert folded("标题：一二三", 10) == "标题：一二\n    三"
    assert folded("one two", 0) == "one two"


def test_a_sample_cannot_be_taken_for_the_log_or_move_the_cursor():
    assert (
        quoted("one\n\n \n\n\tstep 1/2 | loss\n\n") == "    > one\n    >\n    >     step 1/2 | loss"
    )
    assert quoted("- - -\n" * 40).count("\n") == 11  # a model that has learned little writes these
    assert quoted("red \x1b[31m\r\x07") == "    > red \ufffd[31m\ufffd\ufffd"
    assert {len(row) for row in quoted("字" * 80).splitlines()} == {6 + 36, 6 + 8}
