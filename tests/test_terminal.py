"""What a run looks like in a terminal, and where there is none."""

import io
import os
import re
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable

import pytest
from conftest import REPO, call, make_records, train_tiny, write_jsonl

import prepare
import sample
import train
from configurator import help_text
from hardware.terminal import quoted
from training.settings import TrainConfig

INTERRUPTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
BAR = re.compile(r"(\S+)[^|\n]* +\d+% \|.{16}\| eta [^|\n]*")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def in_terminal(monkeypatch) -> Callable[..., str]:
    """in_terminal(work) calls work() in a terminal of 80 columns, and returns what it wrote."""

    def show(work: Callable[[], None]) -> str:
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            patch.setattr(sys, "stdout", terminal)
            patch.setattr(sys, "stderr", terminal)
            work()
        return terminal.getvalue()

    return show


def parts(written: str) -> tuple[list[str], str]:
    """Return the rows of the bars, and all else. A \\r begins each drawing of a bar."""
    drawn = [part.rstrip(" ") for part in written.split("\r")]
    bars = [part for part in drawn if BAR.fullmatch(part)]
    return bars, "".join(part for part in drawn if part not in bars)


def width(row: str) -> int:
    return len(row) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in row)


def test_the_bar_stays_below_the_lines_and_leaves_nothing(
    in_terminal, trains, tmp_path, monkeypatch
):
    take_step = train.take_step

    def warned_step(*args):
        print("a warning of another package", file=sys.stderr)
        return take_step(*args)

    monkeypatch.setattr(train, "take_step", warned_step)
    bars, printed = parts(in_terminal(lambda: trains("--sample_every=4")))
    assert max(map(len, bars)) < 80
    for step in range(1, 9):
        assert any(bar.startswith(f"step {step}/8 {100 * step / 8:3.0f}% |") for bar in bars), bars
    # Each line begins at the left border, and the bar is in none of them.
    assert printed.count("a warning of another package\n") == 8 and not BAR.search(printed)
    banner = printed[printed.index("data: tiny") : printed.index("step 1/8")].splitlines()
    assert max(len(row) for row in banner if str(tmp_path) not in row) <= 80


def test_prepare_and_evaluation_fit_into_the_terminal(in_terminal, tiny_data, tmp_path):
    corpus = write_jsonl(tmp_path / f"{'很长的名字' * 9}.jsonl", [*make_records(150), {"x": 1}])
    options = [f"--data_dir={tmp_path}", "--vocab_size=400", "--workers=1"]
    run = train_tiny(tiny_data, tmp_path, "--documents=pack")
    evaluate = [f"--ckpt={run}", "--device=cpu", f"--eval={tiny_data / 'tiny'}"]
    written = in_terminal(lambda: call(prepare.main, "--input", corpus, *options))
    assert max(map(width, parts(written)[1].splitlines())) <= 80
    bars, printed = parts(written + in_terminal(lambda: call(sample.main, *evaluate)))
    names = {BAR.match(bar)[1] for bar in bars}
    assert names == {"reading", "encoding", "verifying", "finding", "evaluating"}
    assert max(map(len, bars)) < 80 and not BAR.search(printed)


def test_where_there_is_no_terminal_there_is_no_bar(trains, capfd):
    trains("--max_steps=2")
    out, err = capfd.readouterr()
    assert err == "" and "step 2/2 | loss" in out and "\r" not in out and "\x1b" not in out


def test_help_fits_into_the_terminal(in_terminal):
    written = in_terminal(lambda: print(help_text(TrainConfig, train.__doc__)))
    assert max(map(len, written.splitlines())) <= 80


def test_a_sample_cannot_be_taken_for_the_log_or_move_the_cursor():
    assert quoted("one\n\n \n\n\tstep 1 | loss\n\n") == "    > one\n    >\n    >     step 1 | loss"
    assert quoted("- - -\n" * 40).count("\n") == 11  # a model that has learned little writes these
    assert quoted("red \x1b[31m\r\x07") == "    > red \ufffd[31m\ufffd"
    # Another line, and other directions.
    assert quoted("a\u2028step 2\u202eb\u2066c") == "    > a\ufffdstep 2\ufffdb\ufffdc"
    # Chinese texts are indented so.
    assert quoted("\u3000\u3000从前\xa0有") == "    > \u3000\u3000从前\xa0有"
    assert max(map(width, quoted("字" * 80).splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train", "prepare", "sample", "plan", "plot"])
def test_ctrl_c_while_a_command_imports_leaves_no_traceback(tmp_path, script):
    """It comes while the first module of this project is imported, after configurator."""
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    (tmp_path / "numpy.py").write_text(INTERRUPTED)  # plot.py and prepare.py import it first
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(REPO / f"{script}.py"), "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", -signal.SIGINT)
