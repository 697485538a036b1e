import dataclasses
import fcntl
import io
import itertools
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from conftest import REPO, call

import configurator
import plan
import plot
import prepare
import sample
import train
from bench import sweep
from configurator import Output, UserError, changes, option, parse
from sample import SampleConfig
from text.settings import PrepareConfig
from training.settings import TrainConfig, model_config


@dataclass(frozen=True)
class Config:
    steps: int = option(10, "how many", above=0, group="Numbers")
    lr: float = option(0.1, "how fast", minimum=0, below=1)
    sizes: tuple[int, ...] = option((), "how large", minimum=1)
    compile: bool | Literal["auto"] = option("auto", "whether", group="Others")
    kind: str = option("a", "which", choices=("a", "b"))
    name: str = option("x", "who")
    files: tuple[str, ...] = option((), "what")

    def problems(self):
        return ["name and kind must differ"] if self.name == self.kind else []


def test_command_line_overrides_files_and_defaults(tmp_path):
    (tmp_path / "a.py").write_text("steps = 20\nlr = 0.2\nkind = 'b'\n")
    (tmp_path / "b.py").write_text("import math\n_half = 15\nsteps = 2 * _half\n")
    got = parse(Config, ["--lr=0.5", str(tmp_path / "a.py"), str(tmp_path / "b.py")])
    assert got == Config(steps=30, lr=0.5, kind="b")
    assert changes(got) == {"steps": 30, "lr": 0.5, "kind": "b"}


def test_tilde_is_the_home_directory_in_folders_only(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    got = parse(TrainConfig, ["--out_dir=~/x", "--sample_prompt=~/x", "--max_steps=1"])
    assert (got.out_dir, got.sample_prompt) == ("/home/me/x", "~/x")


SPELLINGS = [
    (["--steps", "5"], Config(steps=5)),
    (["--steps=5e3"], Config(steps=5000)),
    (["--steps=5", "--steps=7"], Config(steps=7)),
    (["--files", "p", "--files=q", "--files=r"], Config(files=("p", "q", "r"))),
    (["--compile"], Config(compile=True)),
    (["--compile", "--compile=false"], Config(compile=False)),
    (["--compile", "auto", "--kind", "b"], Config(kind="b")),
    (["--name="], Config(name="")),
    (["--files", "p", "q", "--steps=3"], Config(files=("p", "q"), steps=3)),
]


@pytest.mark.parametrize("argv, want", SPELLINGS)
def test_spellings_of_an_option(argv, want):
    assert parse(Config, argv) == want


def names(cls) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


MISTAKES = [
    (["--zzz=1"], "see --help"),
    (["--steps=1e30"], "int"),
    (["--steps=0"], "int > 0"),
    (["--lr=1"], "float >= 0 and < 1"),
    (["--lr=nan"], "float >= 0 and < 1"),
    (["--sizes", "3", "0"], "int ... >= 1"),
    (["--kind=c"], "a|b"),
    (["--compile=maybe"], "true|false|auto"),
    (["--files", "--steps=5"], "--files"),
    (["--steps"], "--steps"),
    (["steps=5"], "config/NAME.py"),
    (["--name=a"], "name and kind"),
    (["nowhere.py"], "nowhere.py"),
    (["{folder}/unknown.py"], "unknown.py: unknown setting 'stepz'"),
    (["{folder}/value.py"], "value.py: steps='5 apples'"),
    (["{folder}/raises.py"], "raises.py, line 1: ZeroDivisionError"),
    (["{folder}/syntax.py"], "line 1"),
]


@pytest.mark.parametrize("argv, named", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(monkeypatch, tmp_path, argv, named):
    (tmp_path / "unknown.py").write_text("stepz = 5\n")
    (tmp_path / "value.py").write_text("steps = '5 apples'\n")
    (tmp_path / "raises.py").write_text("lr = 1 / 0\n")
    (tmp_path / "syntax.py").write_text("steps = = 5\n")
    monkeypatch.chdir(REPO)
    with pytest.raises(UserError) as e:
        parse(Config, [arg.format(folder=tmp_path) for arg in argv])
    assert named in str(e.value) and "\n" not in str(e.value)


SCRIPTS = [(train, TrainConfig), (prepare, PrepareConfig), (sample, SampleConfig)]
SCRIPTS += [(plot, plot.PlotConfig)]
OTHERS = [(plan, plan.PlanConfig), (sweep, sweep.SweepConfig)]  # which inherit settings


@pytest.mark.parametrize("module, cls", [*SCRIPTS, *OTHERS])
def test_help_explains_every_setting(module, cls, capsys):
    with pytest.raises(SystemExit, match="0"):
        call(module.main, "--help")
    lines = capsys.readouterr().out.splitlines()
    for field in dataclasses.fields(cls):
        line = next((line for line in lines if line.startswith(f"  --{field.name}=")), None)
        assert line, f"{field.name} is not in --help"
        words = line.split("=", 1)[1].split("[")[0].split()
        assert len(words) >= 2, f"{field.name} has no explanation: {line}"


@pytest.mark.parametrize("module, cls", SCRIPTS)
def test_every_setting_is_read_by_its_script(module, cls):
    """A setting that no code reads would do nothing."""
    # The files of a wing read the settings of its command, too, and model.py those of the model,
    # which model_config() passes on by their names.
    wing = {TrainConfig: "training", PrepareConfig: "text"}.get(cls, "no wing")
    paths = [Path(module.__file__), *(REPO / wing).glob("*.py"), REPO / "model.py"]
    source = "\n".join(path.read_text() for path in paths)
    used = {*re.findall(r"\.(\w+)", source), *re.findall(r"\"(\w+)\"", source)}
    assert names(cls) <= used


@pytest.mark.parametrize("path", sorted(REPO.glob("config/*.py")), ids=lambda p: p.stem)
def test_every_config_is_valid_and_names_its_run(path):
    cfg = parse(TrainConfig, [str(path)])
    assert cfg.run_name == path.stem
    model_config(cfg, vocab_size=32000)


def test_no_setting_abbreviates_an_option_of_torchrun():
    """torchrun refuses `train.py --run=x` as an ambiguous abbreviation of its own --run-path,
    although the option comes after the name of the script.
    """
    from torch.distributed.run import get_args_parser

    theirs = [name.lstrip("-") for name in get_args_parser()._option_string_actions]
    assert "run-path" in theirs
    assert not [name for name in names(TrainConfig) if any(t.startswith(name) for t in theirs)]


def test_a_closed_pipe_ends_a_program_without_a_traceback():
    many = "import configurator as c; c.run(lambda: print(*['x' * 99] * 10**4, sep='\\n'))"
    command = f'"{sys.executable}" -c "{many}" | head -n 1'
    done = subprocess.run(command, shell=True, cwd=REPO, capture_output=True, text=True)
    assert done.stdout == "x" * 99 + "\n" and done.stderr == ""


def test_names_of_other_trainers_are_translated_all_at_once(tmp_path, refuses):
    path = tmp_path / "nanogpt.py"
    path.write_text("learning_rate = 1e-3\nmax_iters = 9\nn_layer = 2\neval_interval = 3\n")
    error = refuses(train.main, path)
    assert all(f"here it is {name}" in error for name in ("lr", "max_steps", "eval_every"))
    error = refuses(train.main, "--accumulation_steps=8", "--hidden_size=512", "--bach_size=4")
    assert all(name in error for name in ("batch_tokens", "n_embd", "did you mean 'batch_size'"))


def test_each_translated_name_leads_to_a_setting():
    for here, others in TrainConfig.ELSEWHERE.items():
        assert not names(TrainConfig) & set(others)
        first = re.match(r"\w+", here)[0]  # of a text, if nothing corresponds to it
        assert first in names(TrainConfig) | {"chosen", "not", "part", "sample"}, here


@pytest.fixture
def unread(monkeypatch):
    """A stream into a pipe of 4,096 bytes that nobody reads yet, and the pipe's other end."""
    receive, send = os.pipe()
    fcntl.fcntl(send, fcntl.F_SETPIPE_SZ, 4096)
    monkeypatch.setattr("atexit.register", lambda function: None)
    with open(send, "w") as stream, open(receive, "rb") as reader:
        yield Output(stream), reader


@pytest.mark.parametrize("blocking", [True, False])
def test_output_that_nobody_reads_waits_up_to_a_limit(unread, blocking, monkeypatch):
    """What is beyond it is left out, and that is said. Nothing is in another order or lost."""
    output, reader = unread
    os.set_blocking(output.fileno(), blocking)
    monkeypatch.setattr(Output, "LIMIT", 1000)
    output.write(b"")  # as progress bars do
    output.write(b"x" * 4999 + b"\n")  # more than the pipe takes
    while output.queue.qsize():
        time.sleep(0.01)
    stream = io.TextIOWrapper(output, "utf-8", line_buffering=True)
    for n in range(2000):
        print(f"line {n} 模型", file=stream)
    first, *lines = itertools.takewhile(lambda line: not line.startswith(b"note"), reader)
    assert first == b"x" * 4999 + b"\n"
    assert lines == [f"line {n} 模型\n".encode() for n in range(1000)]
    print("and a part", end="", file=stream, flush=True)
    assert reader.read(10) == b"and a part"
    output.finish()
    assert not output.thread.is_alive()


def test_a_message_is_one_line_that_cannot_move_the_cursor(refuses, capsys):
    def main():
        configurator.note("a \x1b]0;note\x07")
        raise UserError("b \x1b[31m\nc\u202ed")

    assert refuses(main) == "error: b \ufffd[31m c\ufffdd"
    configurator.note("d \x1b\ne")
    assert capsys.readouterr().err == "note: d \ufffd e\n"
