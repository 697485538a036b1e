"""Answer a question by training: every variant with every seed, compared seed by seed.

    python -m bench.lab bench/questions/optimizers.py --dataset=mine
    python -m bench.lab bench/questions/inits.py --seeds 4 5 6 --only xavier small
    python -m bench.lab bench/questions/optimizers.py --report --png=o.png

A question is a file of plain assignments (docs/extending.md has one): the question in words, the
settings of all runs, and `variants`, each a name with the settings in which it differs. Every
setting of train.py is accepted too, in the file and as an option.

Each run is a train.py of its own, one after the other. All of them complete the decay of their
learning rate, because a ranking may turn around before that, and are evaluated on all of val.bin.
The same seed gives the same initial weights and the same windows, if model and data sets are the
same. With init_from, which is a setting of the question and not of a variant, all runs fine-tune
that model. Stop the lab at any time, for example by Ctrl-C: the same command continues (a run that
fine-tunes starts again). A run's folder is named by its seed and a hash of its settings and its
data. So a run whose settings have changed is trained again, and questions share the runs that they
have in common. After a change of the code, or of the model to fine-tune, give another out_dir.

Statistics: `difference` is the mean over the seeds of the variant's final loss minus the baseline's
with the same seed. Behind ± is the standard error of that mean: the standard deviation over the
seeds (with n - 1), divided by the root of n. The verdict is "better" or "worse" only if the
difference is more than three standard errors from 0; with three seeds chance alone does that once
in ten times, with five once in 25.

The main figure is `BASELINE needs`: how many times the tokens or seconds of the variant the
baseline needs to end with the variant's loss. Above 1, the variant saves. It is read from runs of
the baseline with other `lengths`, each with its own completed decay; between two of them, the loss
is taken to be linear in the logarithm of the tokens. < and > say that the loss is beyond the
shortest or the longest of these runs. Seconds are the number of steps times the median time of a
step, without evaluations and checkpoints. Other programs on the machine disturb them, but not the
losses.
"""

import ctypes
import math
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from subprocess import Popen
from typing import Literal

import configurator
from bench.lab_results import Result, Results, compare, plot, read_run, table
from bench.measure import REPO, command, train_options, write_json
from configurator import UserError, changes, check_known, option, parse, set_value
from hardware.disk import content_sha256
from hardware.machine import stop_signals
from hardware.terminal import ProgressBar
from text.dataset import hashes_of, names_and_weights, open_datasets
from training.settings import TRAINING, TrainConfig, with_data

# The lab itself gives these settings to every run.
GIVEN = {"seed", "init_from", "resume", "overwrite", "eval_tokens", "run_name", "out_dir"}


@dataclass(frozen=True)
class LabConfig(TrainConfig):
    out_dir: str = "out/lab"
    question: str = option("", "the question in words", group="Question")
    config: str = option("", "a config file of this repository; the question overrides it")
    variants: dict = field(default_factory=dict)  # name -> the settings in which it differs
    baseline: str = option("", "the variant to compare the others with; default: the first")
    lengths: tuple[float, ...] = option((), "train the baseline for so many lengths too", above=0)
    seeds: tuple[int, ...] = option((1, 2, 3), "each variant trains with each of them", minimum=0)
    judge: Literal["val_loss", "val_document_loss"] = option("val_loss", "the loss that decides")
    only: tuple[str, ...] = option((), "of the variants, only these and the baseline", group="Work")
    report: bool = option(False, "train nothing: report on the runs that are finished")
    json: str = option("", "also write the table's figures to this file", group="Output")
    png: str = option("", "also draw curves and final losses to this file")

    def problems(self) -> list[str]:
        are_settings = [isinstance(settings, dict) for settings in self.variants.values()]
        if not self.question or not are_settings or not all(are_settings):
            return ["give a file with a question and variants: bench/questions/optimizers.py"]
        named = [name for name in (self.baseline, *self.only) if name]
        problems = [f"{name!r} is no variant" for name in named if name not in self.variants]
        folders = [path for path in (self.json, self.png) if path and Path(path).is_dir()]
        return problems + [f"{path} is a folder: give the name of a file" for path in folders]


@dataclass(frozen=True)
class Run:
    """One training: a variant with a seed."""

    variant: str
    seed: int
    settings: TrainConfig
    judges: list[str]  # data sets that all variants read: the loss is the mean of theirs
    loss: str  # the loss that decides: its key in metrics.jsonl
    # The SHA-256 of train.bin of each data set, as its folder's name has it. Somebody may prepare
    # the set again while the lab works; train.py opens it by its name.
    data: dict[str, str]

    @property
    def folder(self) -> Path:
        return Path(self.settings.out_dir) / self.settings.run_name


def main() -> None:
    cfg = read_question(sys.argv[1:])
    baseline = cfg.baseline or next(iter(cfg.variants))
    runs = plan(cfg, baseline)
    exit_code = 0 if cfg.report else train_all(runs)
    report(cfg, runs, baseline)
    if exit_code:
        sys.exit(exit_code)


# --------------------------------------------------------------------------------------------------
# Plan


def read_question(argv: list[str]) -> LabConfig:
    """Return the settings of a command line that names a question."""
    cfg = parse(LabConfig, argv, doc=__doc__)
    if cfg.config:  # it is read first, so that the settings of the question override it
        cfg = parse(LabConfig, [str(REPO / cfg.config), *argv])
    return cfg


def plan(cfg: LabConfig, baseline: str) -> list[Run]:
    """Return the runs in their order: all variants with the first seed, then with the second."""
    variants = variants_of(cfg, baseline)
    names_of_variants = [names_and_weights(settings.dataset)[0] for _, settings in variants]
    judges = [n for n in names_of_variants[0] if all(n in names for names in names_of_variants)]
    if not judges:
        raise UserError("no data set is read by all variants, so that it could judge them")
    runs = []
    for seed in cfg.seeds:
        for name, settings in variants:
            planned, data = run_settings(settings, seed)
            runs.append(Run(name, seed, planned, judges, cfg.judge, data))
    return runs


def variants_of(cfg: LabConfig, baseline: str) -> list[tuple[str, TrainConfig]]:
    """Return (name, settings) of the baseline, of the variants, and of other lengths.

    Raises UserError for settings that train.py would refuse.
    """
    shared = TrainConfig(**{f.name: getattr(cfg, f.name) for f in fields(TrainConfig)})
    base = varied(shared, baseline, cfg.variants[baseline])
    variants = [(baseline, base)]
    for name, settings in cfg.variants.items():
        if name != baseline and name in (cfg.only or cfg.variants):
            variants.append((name, varied(shared, name, settings)))
    for length in cfg.lengths:
        if length != 1:
            variants.append((variant_name(baseline, length), scaled_length(base, length)))
    for name, settings in variants:
        problems = settings.problems()
        if problems:
            raise UserError(f"variant {name!r}: {'; '.join(problems)}")
    return variants


def varied(shared: TrainConfig, name: str, settings: dict) -> TrainConfig:
    """Return the settings of a variant."""
    values = {}
    check_known(TrainConfig, settings, f"variant {name!r}")
    for key, value in settings.items():
        if key in GIVEN:
            raise UserError(f"variant {name!r}: {key}: lab.py gives it to each run")
        set_value(TrainConfig, values, key, value, f"variant {name!r}")
    return with_data(replace(shared, **values))


def variant_name(baseline: str, length: float) -> str:
    return baseline if length == 1 else f"{baseline}, {length:g} x as long"


def scaled_length(settings: TrainConfig, length: float) -> TrainConfig:
    """Return the settings of a run that is `length` times as long, and so is its schedule."""
    counts = {k: getattr(settings, k) for k in ("max_steps", "max_tokens")}
    counts = {k: max(1, round(length * count)) if count else 0 for k, count in counts.items()}
    return replace(settings, max_epochs=length * settings.max_epochs, **counts)


def run_settings(settings: TrainConfig, seed: int) -> tuple[TrainConfig, dict[str, str]]:
    """Return the settings of a variant's run, and Run.data. The run's name has a hash of both."""
    settings = replace(settings, seed=seed, eval_tokens=0)
    # Defaults are left out: a setting that train.py gets later changes no name.
    # The results are read at the evaluations. All else that concerns the report changes nothing.
    judged = {*TRAINING, "eval_every"}
    content = {k: v for k, v in changes(settings).items() if k in judged}
    sets = open_datasets(settings.dataset, settings.data_dir)
    content["data"] = [data.meta["splits"] for data in sets]
    is_tuned = settings.init_from != "scratch"
    if is_tuned:
        content["init_from"] = settings.init_from
    name = f"seed{seed}-{content_sha256(content)[:12]}"
    settings = replace(settings, sample_every=0, tracker="off")
    start = dict(overwrite=True) if is_tuned else dict(resume="auto")
    settings = replace(settings, run_name=name, **start)
    return settings, hashes_of(sets, "train")


# --------------------------------------------------------------------------------------------------
# Train


def train_all(runs: list[Run]) -> int:
    """Train the runs that are not finished.

    Return the exit code: 1 if a run failed, 128 + number if a signal ended the work.
    """
    # Two runs of the same folder have the same settings: one of them is enough.
    todo = {run.folder: run for run in runs if result_of(run) is None}
    print(f"{len(runs)} runs, {len(todo)} of them to train", flush=True)
    exit_code = 0
    signals: list[int] = []
    with stop_signals(signals):
        for run in ProgressBar("runs", todo.values()):
            # Beside the folder, in which only train.py writes.
            log = run.folder.with_name(f"{run.folder.name}.log")
            code = train(run, log, signals)
            if signals:
                ProgressBar.write(f"{run.variant}: stopped by a signal: the same command goes on")
                return 128 + signals[-1]
            result = result_of(run)
            exit_code = exit_code if result else 1
            outcome = f"failed with exit code {code}: {log}"
            if code == 0 and not result:
                outcome = "failed: its data were prepared again meanwhile; delete its folder"
            outcome = f"loss {result.loss:.4f}" if result else outcome
            ProgressBar.write(f"{run.variant}, seed {run.seed} | {outcome} | {run.folder}")
            sys.stdout.flush()
    return exit_code


def result_of(run: Run) -> Result | None:
    return read_run(run.folder, run.judges, run.loss, run.data)


def end_with_parent() -> None:
    """Let Linux send this process SIGTERM when its parent is killed. train.py then saves and ends.

    For preexec_fn of a Popen.
    """
    with suppress(OSError, AttributeError):  # macOS has no such call
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def train(run: Run, output: Path, signals: list[int]) -> int:
    """Begin a run or go on with it, and return its exit code. On a signal, it saves and ends."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "ab") as log:
        argv = [sys.executable, str(REPO / "train.py"), *train_options(run.settings)]
        process = Popen(argv, stdout=log, stderr=log, preexec_fn=end_with_parent)
        while process.poll() is None and not signals:
            time.sleep(0.05)
        if signals:
            process.send_signal(signal.SIGTERM)  # once: a second one would not let it end properly
            process.wait()
    return process.returncode


# --------------------------------------------------------------------------------------------------
# Report


def report(cfg: LabConfig, runs: list[Run], baseline: str) -> None:
    """Print the table of the finished runs, and write the files that were asked for."""
    results: Results = {}
    for run in runs:
        # A loss that is not finite: the run has diverged.
        if (result := result_of(run)) and math.isfinite(result.loss):
            results.setdefault(run.variant, {})[run.seed] = result
    lengths = [baseline, *(variant_name(baseline, length) for length in cfg.lengths if length != 1)]
    rows = compare(results, lengths)
    if not rows:
        print("no run to compare is finished")
        return
    print(f"\n# {cfg.question}\n")
    print(f"`{command()}`: {sum(map(len, results.values()))} of {len(runs)} runs are finished.")
    print(f"The loss is {cfg.judge}, the mean of those on {', '.join(runs[0].judges)}.\n")
    print(table(rows, baseline))
    folders = [{"variant": r.variant, "seed": r.seed, "folder": str(r.folder)} for r in runs]
    facts = {"question": cfg.question, "baseline": baseline, "command": command()}
    facts |= {"judges": runs[0].judges, "rows": [asdict(row) for row in rows], "runs": folders}
    write_json(cfg.json, facts)
    if cfg.png:
        plot(results, rows, lengths, cfg.question, cfg.png)


if __name__ == "__main__":
    configurator.run(main)
