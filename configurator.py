"""Settings: dataclass defaults  <-  config/NAME.py files  <-  --key=value, as one checked object.

A script declares its settings once, as a dataclass. Each field has a default, a help text, and if
needed the values that it accepts and the heading of the group that starts with it:

    @dataclass(frozen=True)
    class TrainConfig:
        batch_size: int = option(16, "sequences per micro-step", minimum=1, group="Batch")
        compile: bool | Literal["auto"] = option("auto", "torch.compile; auto: on for CUDA")

        def problems(self) -> list[str]:  # optional, for what one field alone cannot tell
            return []

`parse(TrainConfig)` reads the command line. Config files are given by their paths and contain plain
assignments; a later file overrides an earlier one. Options are written as `--key=value`,
`--key value` or `--flag`, and override all files. A mistake ends the program with one line and exit
code 2.
"""

import atexit
import dataclasses
import difflib
import errno
import functools
import io
import math
import operator
import os
import re
import runpy
import select
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Literal


class UserError(Exception):
    """An error that the user can fix.

    The message names the file, line or option, what is wrong, and what to do.
    """


@functools.cache  # the same text is printed only once
def note(text: str) -> None:
    """Print a note for the user on stderr, from rank 0 only. The program continues."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {one_line(text)}", file=sys.stderr)


def harmless(text: str) -> str:
    """Return a text with U+FFFD for what moves the cursor, or changes colours or the direction.

    Carriage returns are dropped: texts from Windows have one at the end of each line.
    """
    harmful = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"
    return re.sub(harmful, "\ufffd", text.replace("\r", ""))


def one_line(text: str) -> str:
    """Return a message as one harmless line: it may quote a downloaded file, or its name."""
    return harmless(text).replace("\n", " ")


class Output(io.FileIO):
    """A file that a thread writes, so that a reader who stops reading stops nothing else.

    A pipe that is full, or a terminal after Ctrl-S, takes no text. Up to LIMIT pieces then wait,
    and the next ones are dropped. What cannot be written at all, such as after the end of
    `| tee log`, is dropped too.
    """

    LIMIT = 20_000

    def __init__(self, stream: Any):
        """stream: the text stream of the file, or None if it was closed at the start."""
        self.stream = stream or open(os.devnull, "w")
        super().__init__(self.stream.fileno(), "w", closefd=False)
        self.queue: SimpleQueue[bytes | None] = SimpleQueue()  # None is the end
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        atexit.register(self.finish)

    def write(self, data: Any) -> int:
        if (waiting := self.queue.qsize()) < self.LIMIT:
            self.queue.put(bytes(data))
        elif waiting == self.LIMIT:
            self.queue.put(b"note: nobody read this: the next lines are left out\n")
        return len(data)

    def work(self) -> None:
        while (data := self.queue.get()) is not None:
            while data:
                try:
                    data = data[os.write(self.fileno(), data) :]
                except BlockingIOError:  # its parent does not want to wait for the reader
                    select.select([], [self.fileno()], [])
                except OSError:
                    break

    def finish(self) -> None:
        """Wait until all is written, unless nothing is read for three seconds."""
        left = math.inf
        self.queue.put(None)
        while self.thread.is_alive() and self.queue.qsize() < left:
            left = self.queue.qsize()
            self.thread.join(3)


def run(main: Callable[[], None], needs_output: bool = True) -> None:
    """Run main() of a script. A UserError becomes one line on stderr and exit code 2.

    An unexpected exception, which is a bug, keeps its traceback.

    needs_output: False for a script whose results are files. It continues when its output can no
    longer be written, because the terminal was closed, or when nobody reads it.
    """
    # A terminal may lack a character: print ? instead. Pasted bytes may not be UTF-8.
    for stream, errors in ((sys.stdout, "replace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    if not needs_output and isinstance(sys.stdout, io.TextIOWrapper | None):  # not in Jupyter
        out, err = Output(sys.stdout), Output(sys.stderr)
        if os.path.sameopenfile(out.fileno(), err.fileno()):
            err = out  # the order of their lines stays
        options = dict(encoding=out.stream.encoding, line_buffering=True)
        sys.stdout = io.TextIOWrapper(out, errors="replace", **options)
        sys.stderr = io.TextIOWrapper(err, errors="backslashreplace", **options)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # for the imports of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except UserError as e:
        end(str(e))
    except BrokenPipeError:  # the reader has closed the pipe, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as e:
        if not e.filename and e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        end(f"{e.filename or 'writing'}: {e.strerror}")


def end(problem: str) -> None:
    """Print an error in one line, and end the process with exit code 2.

    Under torchrun, an error that all ranks share is printed once on each computer: the other ranks
    wait for torchrun to end them. If they are not ended in that time, they print it too.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
        problem = f"rank {os.environ['RANK']}: {problem}"
    print(f"error: {one_line(problem)}", file=sys.stderr)
    sys.exit(2)


# --------------------------------------------------------------------------------------------------
# Declarations: a field of a dataclass, with its help text and the values that it accepts

BOUNDS = {  # name of a limit -> its sign, its test
    "minimum": (">=", operator.ge),
    "above": (">", operator.gt),
    "maximum": ("<=", operator.le),
    "below": ("<", operator.lt),
}


def option(
    default: Any,
    help: str,
    *,
    group: str = "",
    resume: str = "",
    choices: tuple[str, ...] = (),
    **limits: float,
) -> Any:
    """Return a field of a dataclass of settings.

    group: the heading in --help of this field and those that follow it. resume: what a new value
    means to a run that is resumed, for training/settings.py. choices: the accepted texts. limits:
    of a number, or of each number of a list: minimum and maximum are inclusive, above and below are
    exclusive.
    """
    metadata = dict(help=help, group=group, resume=resume, choices=choices, limits=limits)
    return dataclasses.field(default=default, metadata=metadata)


def metadata_of(cls: type, name: str) -> Mapping[str, Any]:
    """Return the arguments of option() for a setting; {} if it is a plain field.

    A class that only changes the default of an inherited setting need not repeat them.
    """
    declared = [vars(c).get("__dataclass_fields__", {}).get(name) for c in cls.__mro__]
    return next((field.metadata for field in declared if field and field.metadata), {})


def grouped(cls: type) -> dict[str, list[str]]:
    """Return the settings of each group, both in the order of the declarations."""
    groups: dict[str, list[str]] = {}
    heading = "Settings"
    for field in dataclasses.fields(cls):
        heading = metadata_of(cls, field.name).get("group") or heading
        groups.setdefault(heading, []).append(field.name)
    return groups


def type_name(kind: Any) -> str:
    """Return the name of a type in messages and --help: int, true|false, a|b, text ..."""
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return f"{type_name(args[0])} ..."
    names = {bool: "true|false", int: "int", float: "float", str: "text", dict: "{...}"}
    return "|".join(map(type_name, args)) if args else names.get(kind, str(kind))


def domain(cls: type, name: str) -> str:
    """Return the values that a setting accepts: choices, or type and limits: `float >= 0`."""
    meta = metadata_of(cls, name)
    kind = "|".join(meta.get("choices", ())) or type_name(typing.get_type_hints(cls)[name])
    limits = [f"{BOUNDS[limit][0]} {number}" for limit, number in meta.get("limits", {}).items()]
    return f"{kind} {' and '.join(limits)}".rstrip()


# --------------------------------------------------------------------------------------------------
# Values: convert text, or a Python value of a config file, into what the field declares


def convert(value: Any, kind: Any) -> Any:
    """Return `value` as the type `kind`.

    value: text from the command line, or a Python value from a config file.
    Raises ValueError, TypeError or ArithmeticError if the type does not accept it.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(convert(v, args[0]) for v in ([value] if isinstance(value, str) else value))
    if origin in (typing.Union, types.UnionType):
        for one in args:  # the first type that accepts the value is used
            with suppress(ValueError, LookupError, ArithmeticError):
                return convert(value, one)
    elif origin is Literal:
        return {str(choice): choice for choice in args}[str(value)]
    elif kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
    elif kind in (int, float) and not isinstance(value, bool):
        number = Decimal(str(value)) if kind is int else float(value)  # 5e8, with every digit
        if kind(number) == number and abs(number) < (2**63 if kind is int else math.inf):
            return kind(number)
    elif kind in (dict, str) and isinstance(value, kind) and "\0" not in value:
        return value  # a dict comes from a config file only; no file name contains a NUL
    raise ValueError(value)


def is_within(value: Any, meta: Mapping[str, Any]) -> bool:
    """Return whether a value is one of the choices and within the limits of option()."""
    if isinstance(value, tuple):
        return all(is_within(one, meta) for one in value)
    if isinstance(value, str):
        return not meta.get("choices") or value in meta["choices"]
    return all(BOUNDS[name][1](value, limit) for name, limit in meta.get("limits", {}).items())


def check_known(cls: type, keys: Iterable[str], source: str) -> None:
    """Raise UserError, with a proposal for each, if `cls` does not declare some of these settings.

    A table cls.ELSEWHERE has the names that other programs use for a setting.
    source: where the settings are given, for the message.
    """
    kinds = typing.get_type_hints(cls)
    unknown = []
    for key in keys:
        if key not in kinds:
            table = getattr(cls, "ELSEWHERE", {}).items()
            here = [f"here it is {name}" for name, others in table if key in others]
            close = [f"did you mean {name!r}?" for name in difflib.get_close_matches(key, kinds)]
            unknown.append(f"unknown setting {key!r}: {[*here, *close, 'see --help'][0]}")
    if unknown:
        raise UserError(f"{source}: {'; '.join(unknown)}")


def expanded(cls: type, key: str, value: Any) -> dict[str, Any]:
    """Return the settings that a setting and its value stand for, by the table cls.SHORT."""
    return getattr(cls, "SHORT", {}).get((key, str(value)), {key: value})


def set_value(cls: type, values: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set values[key] = value, converted to the type that cls declares for key.

    source: where the value is given, for the message.
    Raises UserError if the setting does not accept the value.
    """
    kind = typing.get_type_hints(cls)[key]
    with suppress(ValueError, TypeError, LookupError, ArithmeticError):
        values[key] = convert(value, kind)
        if is_within(values[key], metadata_of(cls, key)):
            return
    problem = f"{key}={value!r:.80} is not accepted; it takes {domain(cls, key)}"
    raise UserError(f"{source}: {problem}")


# --------------------------------------------------------------------------------------------------
# Sources: config files and the command line


def read_file(cls: type, path: str, values: dict[str, Any]) -> None:
    """Run a config file and put its assignments into `values`, except for names that start with _.

    Raises UserError if the file cannot be run, or if a setting or value is not accepted.
    """
    try:
        namespace = runpy.run_path(path)
    except OSError as e:
        raise UserError(f"config file {path}: {e.strerror}") from None
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        lines = ["?", *(frame.lineno for frame in frames if frame.filename == path)]
        source = f"config file {path}, line {getattr(e, 'lineno', lines[-1])}"
        problem = " ".join(str(getattr(e, "msg", e)).split())  # msg is without file and line
        raise UserError(f"{source}: {type(e).__name__}: {problem}") from None
    found = {k: v for k, v in namespace.items() if k[0] != "_" and not isinstance(v, ModuleType)}
    check_known(cls, found, f"config file {path}")
    for key, value in found.items():
        for name, meaning in expanded(cls, key, value).items():
            set_value(cls, values, name, meaning, f"config file {path}")


def parse(cls: type, argv: list[str] | None = None, doc: str = "", positional: str = "") -> Any:
    """Return a `cls` with the settings of the command line `argv` (default: of this process).

    positional: the setting, a list, that gets the arguments without --, as in
    `plot.py out/a out/b`. By default, such an argument must be a config file.
    --help prints `doc` and the settings, and ends the program. Raises UserError for every mistake.
    """
    return validated(cls, given_settings(cls, argv, doc, positional))


def validated(cls: type, values: dict[str, Any]) -> Any:
    """Return a `cls` with these values, and defaults for the rest. Raises UserError for problems.

    values: of the declared types, as given_settings() returns them.
    """
    config = cls(**values)
    problems = config.problems() if hasattr(config, "problems") else []
    if problems:
        raise UserError("; ".join(problems))
    return config


def given_settings(
    cls: type, argv: list[str] | None = None, doc: str = "", positional: str = ""
) -> dict[str, Any]:
    """Return {setting: value} of the config files and options of a command line, as in parse().

    Settings that were not given are not in it.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        print(help_text(cls, doc))
        sys.exit(0)
    names = [arg[2:].partition("=")[0].replace("-", "_") for arg in argv if arg[:2] == "--"]
    check_known(cls, names, "command line")
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    while argv:
        arg = argv.pop(0)
        if arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")
            key = key.replace("-", "_")
            kind = typing.get_type_hints(cls)[key]
            is_list = typing.get_origin(kind) is tuple
            # A switch may stand alone, also before a config file: it is then True.
            is_switch = bool in (kind, *typing.get_args(kind))
            texts: list[Any] = [text] if equals else []
            while argv and not argv[0].startswith("--") and (is_list or not texts):
                if is_switch and argv[0].endswith(".py"):
                    break
                texts.append(argv.pop(0))
            if not texts and not is_switch:
                raise UserError(f"--{key}: a value is missing; it takes {domain(cls, key)}")
            texts = texts or [True]
            before = options.get(key, [])
            options |= {key: [*before, *texts]} if is_list else expanded(cls, key, texts[0])
        elif positional and not arg.startswith("-"):
            options[positional] = [*options.get(positional, []), arg]
        elif arg.endswith(".py") and not arg.startswith("-"):
            read_file(cls, arg, values)
        else:
            raise UserError(f"argument {arg!r}: expected config/NAME.py or --key=value; see --help")
    for key, other in getattr(cls, "SUITS", {}).items():
        if other in values and options.get(other, values[other]) != values[other]:
            values.pop(key, None)
    for key, value in options.items():  # after all files, wherever these are on the command line
        set_value(cls, values, key, value, "command line")
    # A shell expands the ~ of `--out_dir ~/x`, but not that of `--out_dir=~/x`.
    return {k: os.path.expanduser(v) if k.endswith("_dir") else v for k, v in values.items()}


# --------------------------------------------------------------------------------------------------
# Output: the text of --help, rows that fit a terminal, and the settings that differ from defaults


def help_text(cls: type, doc: str) -> str:
    """Return `doc`, and the settings in groups: default, help and accepted values of each."""
    width = columns() or 100
    out = []
    for part in (doc or "").strip().split("\n\n"):
        is_prose = not re.search("^ ", part, re.MULTILINE)
        out += [textwrap.fill(part, width) if is_prose else folded(part, width), ""]
    out.append("Settings (--key=value, or an assignment in a config file):")
    for heading, names in grouped(cls).items():
        out.append(f"\n{heading}")
        for name in names:
            default = getattr(cls, name, "")
            default = " ".join(map(str, default)) if isinstance(default, tuple) else default
            choices = domain(cls, name).replace("|", " | ")
            text = metadata_of(cls, name).get("help", "")
            line = f"{f'  --{name}={default}':<34} {text} [{choices}]"
            out.append(folded(line, width, indent=33))
    return "\n".join(out)


def columns() -> int:
    """Return the width of the terminal of stdout; 0 if stdout is not a terminal."""
    return shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else 0


def folded(text: str, width: int, indent: int = 4) -> str:
    """Return a text whose lines are wrapped to at most `width` columns; 0: not wrapped.

    indent: of continuation lines, in addition to the indent of their line.
    """
    rows = []
    for line in text.split("\n"):
        # A Chinese character takes two columns: a NUL after it counts as the second. If a row ends
        # between the two, it is one column longer than counted.
        padded = "".join(c + "\0" * (unicodedata.east_asian_width(c) in "WF") for c in line)
        is_wide = "\0" in padded
        below = " " * (len(line) - len(line.lstrip()) + indent)
        # Chinese has no spaces. Options and paths are not broken.
        options = dict(break_on_hyphens=False, break_long_words=is_wide, subsequent_indent=below)
        fits = not width or len(padded) <= width
        rows += [padded] if fits else textwrap.wrap(padded, width - is_wide, **options)
    return "\n".join(rows).replace("\0", "")


def row(key: str, value: str) -> str:
    """Return `key` + `value`. A long value is wrapped, with its lines aligned after the key."""
    width = columns() and max(20, columns() - len(key))
    top, *below = folded(value, width).split("\n")
    return "\n".join([key + top, *(" " * len(key) + line for line in below)])


def changes(config: Any) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    fields = dataclasses.fields(config)
    return {f.name: getattr(config, f.name) for f in fields if getattr(config, f.name) != f.default}
