"""Settings: dataclass defaults  <-  config/NAME.py files  <-  --key=value, as one checked object.

A script declares its settings once, as a dataclass with one field per line. The comment behind a
field is its help text:

    @dataclass(frozen=True)
    class TrainConfig:
        # ---- Batch ----
        batch_size: int = 16  # sequences per device and micro-step
        compile: bool | Literal["auto"] = "auto"  # torch.compile; auto: on for CUDA

        def problems(self) -> list[str]:  # optional, for checks that a type cannot express
            return [] if self.batch_size > 0 else ["batch_size must be positive"]

`parse(TrainConfig)` reads the command line. Config files are given by their paths and contain plain
assignments; a later file wins over an earlier one. Options are written as `--key=value`,
`--key value` or `--flag`, and win over all files. A mistake is never guessed around: it ends the
program with one line and exit code 2.
"""

import dataclasses
import difflib
import errno
import functools
import inspect
import math
import os
import re
import runpy
import shutil
import sys
import textwrap
import time
import traceback
import types
import typing
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal


class UserError(Exception):
    """An error that the user can fix.

    The message names the file, line or option, what is wrong, and what to do.
    """


class OneRankError(UserError):
    """A UserError that may occur on one of torchrun's ranks only. That rank prints it itself."""


@functools.cache  # the same text is printed only once
def note(text: str) -> None:
    """Print a note for the user on stderr, from rank 0 only. The program continues."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr)


class Unfailing:
    """A stream that drops what cannot be written: the terminal is closed, or the disk is full."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self.stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def ignore_leftovers() -> None:
    """Forget what the environment says of ranks, if that is not all that torchrun would have set.

    Else one process would count for many, as where a cluster's script has set WORLD_SIZE.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        if left := [name for name in names if os.environ.pop(name, None)]:
            note(f"ignored: {', '.join(left)}, since torchrun did not start this process")


def run(main: Callable[[], None], needs_output: bool = True) -> None:
    """Run main() of a script. A UserError becomes one line on stderr and exit code 2.

    An unexpected exception, which is a bug, keeps its traceback.

    needs_output: False for a script whose results are files. It continues when its output can no
    longer be written, for example because the terminal was closed.
    """
    # A stream that was closed before the start (`>&-` in a shell) is None. The next file that the
    # program opens would get its number, and all that is printed.
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        setattr(sys, name, getattr(sys, name) or open(os.devnull, mode))
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a character, such as a Chinese one, prints ? instead.
        sys.stdout.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        # Somebody may paste text in another encoding, such as GBK.
        sys.stdin.reconfigure(errors="surrogateescape")
    if not needs_output:
        sys.stdout = Unfailing(sys.stdout)
        sys.stderr = Unfailing(sys.stderr)
    try:
        ignore_leftovers()
        main()
    except UserError as e:
        if "RANK" in os.environ and isinstance(e, OneRankError):
            print(f"error: rank {os.environ['RANK']}: {e}", file=sys.stderr)
        elif os.environ.get("LOCAL_RANK", "0") == "0":  # one line per machine, not one per rank
            print(f"error: {e}", file=sys.stderr)
        else:
            # torchrun ends all ranks as soon as one has ended. Give rank 0 time to print the error.
            time.sleep(10)
        sys.exit(2)
    except BrokenPipeError:  # the reader has closed the pipe, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as e:
        if not e.filename and e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        print(f"error: {e.filename or 'writing'}: {e.strerror}", file=sys.stderr)
        sys.exit(2)


# --------------------------------------------------------------------------------------------------
# Values: convert text, or a Python value of a config file, into the type that the field declares


def accepted(kind: Any) -> str:
    """Return what an error message or --help says for a type: int, true|false, a|b, text ..."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return "|".join(accepted(k) for k in args)
    if origin is tuple:
        return f"{accepted(args[0])} ..."
    return {bool: "true|false", int: "int", float: "float", str: "text", dict: "{...}"}[kind]


def convert(value: Any, kind: Any) -> Any:
    """Return `value` as the type `kind`.

    value: text from the command line, or a Python value from a config file.
    Raises ValueError, TypeError or ArithmeticError if the type does not accept it.
    """
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin is Literal:
        for choice in args:
            if str(value) == str(choice):
                return choice
    elif origin in (typing.Union, types.UnionType):
        for option in args:  # the first type that accepts the value
            with suppress(ValueError, ArithmeticError):
                return convert(value, option)
    elif origin is tuple:
        items = [value] if isinstance(value, str) else value
        return tuple(convert(item, args[0]) for item in items)
    elif kind is bool and str(value).lower() in ("true", "1", "false", "0"):
        return str(value).lower() in ("true", "1")
    elif kind is int and not isinstance(value, bool):
        number = Decimal(str(value))  # 5e8 and 1_000 too, with every digit
        if number == number.to_integral_value() and abs(number) < 2**63:  # as in numpy and torch
            return int(number)
    elif kind is float and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number):
            return number
    elif kind is dict and isinstance(value, dict):  # from a config file only
        return value
    elif kind is str and isinstance(value, str) and "\0" not in value:  # no file name has a NUL
        return value
    raise ValueError(value)


def names_elsewhere(table: str) -> dict[str, str]:
    """Return the name of a setting here -> what other programs call it, for those who try that.

    table: a file of this repository with lines `here <- names elsewhere`; an indented line
    continues the one before it.
    """
    text = (Path(__file__).parent / table).read_text(encoding="utf-8")
    return dict(row.split(" <- ") for row in re.split(r"\n(?! )", text.strip()))


def set_value(cls: type, values: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set values[key] = value, converted to the type that cls declares for key.

    source: the source of the value, for the message.
    Raises UserError if cls has no such setting, or if its type does not accept the value.
    """
    refuse_unknown(cls, {key: source})
    kind = typing.get_type_hints(cls)[key]
    try:
        values[key] = convert(value, kind)
    except (ValueError, TypeError, ArithmeticError):
        problem = f"{key}={value!r:.80} is not accepted; it takes {accepted(kind)}"
        if re.fullmatch(r"[\d.]+[kKmMbBgGtT]", str(value)):
            problem += ", written in full, such as 10_000_000_000"
        raise UserError(f"{source}: {problem}") from None


def refuse_unknown(cls: type, places: dict[str, str]) -> None:
    """Raise UserError if cls lacks one of these settings: a line for each, with its name here.

    places: setting -> where it is given.
    If cls has a table `elsewhere`, that is the name here -> the names that other programs use. Of a
    name with dots, such as training.seq_len, the last part counts if the whole is not in it.
    """
    kinds = typing.get_type_hints(cls)
    advice = {}
    for name_here, others in getattr(cls, "elsewhere", {}).items():
        advice |= dict.fromkeys(others.split(), f"here it is {name_here}")
    advice |= {name: f"did you mean {name!r}?" for name in kinds}
    lines = []
    for key, source in places.items():
        if key in kinds:
            continue
        last = key.rpartition(".")[2]
        # Most typos are more similar than this, and most names of something else are less.
        close = difflib.get_close_matches(last, kinds, n=1, cutoff=0.8)
        close += difflib.get_close_matches(last, advice, n=1, cutoff=0.9)
        names = [name for name in (key.replace(".", "_"), last, *close) if name in advice]
        hint = advice[names[0]] if names else "see --help"
        lines.append(f"{source}: unknown setting {key!r}; {hint}")
    if lines:
        raise UserError("\n".join(lines))


# --------------------------------------------------------------------------------------------------
# Sources: config files and the command line


def read_file(cls: type, path: str, values: dict[str, Any]) -> None:
    """Run a config file and put its assignments into `values`, except for names that begin with _.

    Raises UserError if the file cannot be run, or if a setting or value is not accepted.
    """
    try:
        namespace = runpy.run_path(path)
    except OSError as e:
        folder = Path(__file__).parent / "config"
        names = [file.name for file in folder.glob("*.py")]
        close = difflib.get_close_matches(Path(path).name, names, n=1)
        hint = f"; did you mean {os.path.relpath(folder / close[0])}?" if close else ""
        raise UserError(f"config file {path}: {e.strerror}{hint}") from None
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        lines = ["?", *(frame.lineno for frame in frames if frame.filename == path)]
        source = f"config file {path}, line {getattr(e, 'lineno', lines[-1])}"
        problem = " ".join(str(getattr(e, "msg", e)).split())  # msg is without file and line
        raise UserError(f"{source}: {type(e).__name__}: {problem}") from None
    settings = {k: v for k, v in namespace.items() if not k.startswith("_")}
    settings = {k: v for k, v in settings.items() if not isinstance(v, types.ModuleType)}
    refuse_unknown(cls, dict.fromkeys(settings, f"config file {path}"))
    for key, value in settings.items():
        set_value(cls, values, key, value, f"config file {path}")


def parse(cls: type, argv: list[str] | None = None, doc: str = "", positional: str = "") -> Any:
    """Return a `cls` with the settings of the command line `argv` (default: of this process).

    positional: the setting, a list, that takes the arguments which are no options, as in
    `plot.py out/a out/b`. Without it, such an argument must be a config file. If cls has a text
    `argument`, the error for another one asks for that, as sample.py does for --prompt TEXT.
    --help prints `doc` and the settings, and ends the program. Raises UserError for every mistake.
    """
    return checked(cls, given(cls, argv, doc, positional))


def checked(cls: type, values: dict[str, Any]) -> Any:
    """Return a `cls` with these values, and defaults for the rest. Raises UserError for problems.

    values: of the declared types, as given() returns them.
    """
    config = cls(**values)
    problems = config.problems() if hasattr(config, "problems") else []
    if problems:
        raise UserError("; ".join(problems))
    return config


def given(
    cls: type, argv: list[str] | None = None, doc: str = "", positional: str = ""
) -> dict[str, Any]:
    """Return {setting: value} of the config files and options of a command line, as in parse().

    A setting that has its default value because nobody has given it is not among them.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    kinds = typing.get_type_hints(cls)
    if "--help" in argv or "-h" in argv:
        print(help_text(cls, doc))
        sys.exit(0)
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    while argv:
        arg = argv.pop(0)
        if arg.startswith("--"):
            key, equals, value = arg[2:].partition("=")
            key = key.replace("-", "_")
            following = [value] if equals else take_values(argv, kinds.get(key))
            if key in kinds and not following:
                raise UserError(f"--{key}: a value is missing; it takes {accepted(kinds[key])}")
            if typing.get_origin(kinds.get(key)) is tuple:  # all values count
                options[key] = options.get(key, []) + following + take_values(argv, kinds[key])
            else:
                options[key] = next(iter(following), None)
        elif positional and not arg.startswith("-"):
            options[positional] = [*options.get(positional, []), arg]
        elif arg.endswith(".py") and not arg.startswith("-"):
            read_file(cls, arg, values)
        else:
            kind = "" if positional else getattr(cls, "argument", "config/NAME.py") + " or "
            hint = f"did you mean {arg}.py?" if os.path.exists(f"{arg}.py") else "see --help"
            raise UserError(f"argument {arg!r}: expected {kind}--key=value; {hint}")
    refuse_unknown(cls, {key: f"--{key}" for key in options})
    for key, value in options.items():  # after all files, wherever they stand on the command line
        set_value(cls, values, key, value, f"--{key}")
    # A shell expands the ~ of `--out_dir ~/x`, but not that of `--out_dir=~/x`.
    return {k: os.path.expanduser(v) if k.endswith("_dir") else v for k, v in values.items()}


def take_values(argv: list[str], kind: Any) -> list[Any]:
    """Return the values of an option that was given without `=`, and remove them from argv.

    A list takes all arguments up to the next option; so does a setting that is not there (None). A
    setting that accepts true or false may stand alone (`--compile`), or in front of a config file
    (`--compile config/demo.py`): its value is then True.
    """
    takes_bool = bool in (kind, *typing.get_args(kind))
    following = []
    while argv and not argv[0].startswith("--"):
        if (takes_bool or kind is None) and argv[0].endswith(".py"):
            break
        following.append(argv.pop(0))
        if kind is not None and typing.get_origin(kind) is not tuple:
            break
    return [True] if takes_bool and not following else following


# --------------------------------------------------------------------------------------------------
# Output: the text of --help, rows that fit a terminal, and the settings that are not the defaults


def help_text(cls: type, doc: str) -> str:
    """Return `doc` and the settings, with the groups and comments of the source of the dataclass
    and of those that it inherits."""
    width = columns()
    out = []
    for part in doc.strip().split("\n\n"):
        is_prose = width and not re.search("^ ", part, re.MULTILINE)
        out.append((textwrap.fill(part, width) if is_prose else folded(part, width)) + "\n")
    out.append("Settings (--key=value, or an assignment in a config file):")
    kinds = typing.get_type_hints(cls)
    rows = {}  # heading or setting -> its row; a class may change the default that it inherits
    for source in reversed(list(filter(dataclasses.is_dataclass, cls.__mro__))):
        for line in inspect.getsource(source).splitlines():
            heading = re.fullmatch(r"\s+# -+ (.+?) -+", line)
            field = re.match(r"    (\w+): .+? = (.+?)(?:  # (.*))?$", line)
            if heading:
                rows[heading[1]] = folded(f"\n{heading[1]}", width)
            elif field and field[1] in kinds:
                name, default, comment = field.groups()
                option = f"--{name}=" + default.strip('"')
                takes = accepted(kinds[name])
                takes = takes.replace("|", " | ") if len(takes) > 45 else takes  # can be folded
                rows[name] = row(f"  {option:<32} ", f"{comment or ''} [{takes}]")
    return "\n".join([*out, *rows.values()])


def columns() -> int:
    """Return the width of the terminal that stdout goes to; 0 if there is none."""
    return shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else 0


def folded(text: str, width: int) -> str:
    """Return a text whose lines have at most `width` columns, by going on below; 0: as it is."""
    rows = []
    for line in text.split("\n"):
        # A Chinese character takes two columns: the NUL behind it is counted as the second. A row
        # that ends between the two is one column longer than it counts.
        padded = "".join(c + "\0" * (unicodedata.east_asian_width(c) in "WF") for c in line)
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        limit = width - ("\0" in padded)
        if width and len(padded) > width:
            # Chinese has no spaces. Options and paths stay whole.
            options = dict(break_on_hyphens=False, break_long_words="\0" in padded)
            rows += textwrap.wrap(padded, limit, subsequent_indent=indent, **options)
        else:
            rows.append(padded)
    return "\n".join(rows).replace("\0", "")


def row(key: str, value: str) -> str:
    """Return `key` + `value`. A value that is too long goes on below, beside the key."""
    width = columns() and max(20, columns() - len(key))
    top, *below = folded(value, width).split("\n")
    return "\n".join([key + top, *(" " * len(key) + line for line in below)])


def changes(config: Any) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    fields = dataclasses.fields(config)
    return {f.name: getattr(config, f.name) for f in fields if getattr(config, f.name) != f.default}
