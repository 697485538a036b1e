import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from conftest import REPO, call

import bench.prepare
import plot
import prepare
import sample
import train
from configurator import UserError, changes, parse, run
from model import GPTConfig
from sample import SampleConfig
from text.settings import PrepareConfig
from training.settings import TrainConfig, model_config


@dataclass(frozen=True)
class Config:
    # ---- Numbers ----
    steps: int = 10  # how many
    lr: float = 0.1  # how fast
    # ---- Others ----
    compile: bool | Literal["auto"] = "auto"  # whether
    kind: Literal["a", "b"] = "a"  # which
    name: str = "x"  # who
    files: tuple[str, ...] = ()  # what

    def problems(self):
        checked = {"steps": self.steps, "lr": self.lr}
        return [f"{name} must be positive" for name, value in checked.items() if value <= 0]


def test_later_sources_win_defaults_then_files_then_command_line(tmp_path):
    (tmp_path / "a.py").write_text("steps = 20\nlr = 1\nkind = 'b'\n")
    (tmp_path / "b.py").write_text("import math\n_half = 15\nsteps = 2 * _half\n")
    got = parse(Config, ["--lr=0.5", str(tmp_path / "a.py"), str(tmp_path / "b.py")])
    assert got == Config(steps=30, lr=0.5, kind="b")
    assert changes(got) == {"steps": 30, "lr": 0.5, "kind": "b"}


def test_a_folder_in_the_home_directory_is_that_and_other_texts_keep_their_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    got = parse(TrainConfig, ["--out_dir=~/x", "--sample_prompt=~/x", "--max_steps=1"])
    assert (got.out_dir, got.sample_prompt) == ("/home/me/x", "~/x")


SPELLINGS = [
    (["--steps", "5"], Config(steps=5)),
    (["--steps=5e3"], Config(steps=5000)),
    (["--steps=5", "--steps=7"], Config(steps=7)),
    (["--files", "p", "--files=q", "--files=r"], Config(files=("p", "q", "r"))),
    (["--compile"], Config(compile=True)),
    (["--compile", "auto", "--kind", "b"], Config(kind="b")),
    (["--name="], Config(name="")),
    (["--files", "p", "q", "--steps=3"], Config(files=("p", "q"), steps=3)),
]


@pytest.mark.parametrize("argv, want", SPELLINGS)
def test_every_spelling_of_an_option_is_understood(argv, want):
    assert parse(Config, argv) == want


PROGRAMS = {"train": TrainConfig, "prepare": PrepareConfig, "sample": SampleConfig}


@pytest.mark.parametrize("cls", PROGRAMS.values())
def test_each_name_of_another_program_is_answered_with_what_there_is_here(cls):
    every = " ".join(cls.elsewhere.values()).split()
    assert len(every) == len(set(every)) and not set(every) & names(cls)
    for here, others in cls.elsewhere.items():
        for program, option in re.findall(r"(\w+)\.py --(\w+)", here):
            assert option in names(PROGRAMS[program])
        elsewhere = re.match(r"(not|chosen|python|torchrun|head -n|\w+\.py) ", here)
        assert elsewhere or re.split("[=, ]", here)[0] in names(cls)
        for other in others.split():
            assert answer(cls, f"--{other}=1") == f"unknown setting {other!r}; here it is {here}"


def names(cls) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def answer(cls, *argv: str) -> str:
    with pytest.raises(UserError) as e:
        parse(cls, list(argv))
    return str(e.value).partition(": ")[2]


HINTS = [
    (TrainConfig, "btach_size batchsize", "'batch_size'"),
    (TrainConfig, "n_layers nlayer", "'n_layer'"),
    (PrepareConfig, "tokeniser", "'tokenizer'"),
    (TrainConfig, "lerning_rate", "lr"),  # a typo in the name of another trainer
    # Of a name with dots, the whole counts, or its last part.
    (TrainConfig, "training.seq_len", "block_size"),
    (TrainConfig, "optimizer.lr", "'lr'"),
    # No setting is named for what only resembles it.
    (TrainConfig, "logit_cap beam val_part max_train_time embedder", "see --help"),
]


@pytest.mark.parametrize("cls, given, hint", HINTS)
def test_an_unknown_setting_leads_to_the_one_that_was_meant(cls, given, hint):
    for name in given.split():
        assert hint in answer(cls, f"--{name}=1").partition("; ")[2]


def test_all_settings_that_are_unknown_are_named_at_once(tmp_path):
    argv = ["--max_iters", "5", "--lr=1", "--decay-lr", "--files", "--input", "a", "b", "--bf16"]
    every = [line.split("; ")[0] for line in f"x: {answer(TrainConfig, *argv)}".splitlines()]
    keys = ["max_iters", "decay_lr", "files", "input", "bf16"]
    assert [line.rpartition(" ")[2].strip("'") for line in every] == keys
    path = tmp_path / "nanogpt.py"
    path.write_text("bf16 = True\nlr = 1\nbackend = 'nccl'\n")
    assert re.findall(r"setting '(\w+)'", answer(TrainConfig, str(path))) == ["bf16", "backend"]


MISTAKES = [
    (["--steps=1e30"], "int"),
    (["--steps=2B"], "10_000_000_000"),
    (["--kind=c"], "a|b"),
    (["--compile=maybe"], "true|false|auto"),
    (["--files", "--steps=5"], "--files"),
    (["--steps"], "--steps"),
    (["steps=5"], "config/NAME.py"),
    (["config/demo"], "config/demo.py"),
    (["--steps=0", "--lr=-1"], "steps must be positive; lr must be positive"),
    (["nowhere.py"], "nowhere.py"),
    (["{folder}/unknown.py"], "unknown.py: unknown setting 'stepz'"),
    (["{folder}/value.py"], "value.py: steps='5 apples'"),
    (["{folder}/raises.py"], "raises.py, line 1: ZeroDivisionError"),
    (["{folder}/syntax.py"], "line 1"),
]


@pytest.mark.parametrize("argv, named", MISTAKES)
def test_a_mistake_says_what_is_accepted(monkeypatch, tmp_path, argv, named):
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


@pytest.mark.parametrize("module, cls", [*SCRIPTS, (bench.prepare, bench.prepare.BenchConfig)])
def test_help_shows_every_setting_with_its_default_and_reason(module, cls, capsys):
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
    # The files of a wing read the settings of its command, too, and model_config() passes settings
    # on to the model by their names.
    wing = {TrainConfig: "training", PrepareConfig: "text"}.get(cls, "no wing")
    paths = [Path(module.__file__), *(REPO / wing).glob("*.py")]
    source = "\n".join(path.read_text() for path in paths)
    used = set(re.findall(r"\.(\w+)|\"(\w+)\"", source))
    used = {word for words in used for word in words} | names(GPTConfig)
    assert names(cls) <= used


@pytest.mark.parametrize("path", sorted(REPO.glob("config/*.py")), ids=lambda p: p.stem)
def test_every_shipped_config_is_valid_and_names_its_run(path):
    cfg = parse(TrainConfig, [str(path)])
    assert cfg.run_name == path.stem
    model_config(cfg, vocab_size=32000)


def test_no_setting_is_taken_for_an_abbreviation_of_a_torchrun_option():
    """torchrun refuses `train.py --run=x` as an ambiguous abbreviation of its own --run-path,
    although the option stands behind the name of the script.
    """
    from torch.distributed.run import get_args_parser

    actions = get_args_parser()._actions
    theirs = [name.lstrip("-") for action in actions for name in action.option_strings]
    for field in dataclasses.fields(TrainConfig):
        assert not [name for name in theirs if name.startswith(field.name)], field.name


def test_a_world_size_that_no_torchrun_has_set_counts_for_nothing(monkeypatch, capsys):
    """A cluster's script may have set it. One process would then read a part of each step."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    run(lambda: print({"WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys()))
    printed = capsys.readouterr()
    assert printed.out == "set()\n" and "ignored: LOCAL_RANK, WORLD_SIZE" in printed.err
