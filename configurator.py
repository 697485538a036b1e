"""Settings: dataclass defaults  <-  config/NAME.py files  <-  --key=value, into one typed, checked config.

A script declares its settings once, as a dataclass with one field a line, and the comment behind a field is its
help text:

    @dataclass(frozen=True)
    class TrainConfig:
        # ---- Batch ----
        batch_size: int = 16  # sequences per device and micro-step
        compile: bool | Literal["auto"] = "auto"  # torch.compile; auto: on for CUDA

        def problems(self) -> list[str]:  # optional: what no type can say (ranges, pairs that exclude each other)
            return [] if self.batch_size > 0 else ["batch_size must be positive"]

`parse(TrainConfig)` then reads the command line: positional config files (plain assignments, the later file wins), then
`--key=value`, `--key value` or `--flag`. A mistake ends the program with one line and exit code 2, never a guess.
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
import sys
import time
import types
import typing
from collections.abc import Callable
from typing import Any, Literal


class UserError(Exception):
    """Something the user can mend: the message names the file, line or option, what is wrong, and what to do."""


class OneRankError(UserError):
    """One that this process may be alone with, of those that torchrun started: it says so itself."""


@functools.cache  # each text is said once
def note(text: str) -> None:
    """Something to know that is no mistake: a line on stderr, from one of all ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr)


class Unfailing:
    """A stream whose writes never raise: what cannot be written is dropped."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except (OSError, ValueError):  # a full disk, a closed terminal or pipe, a closed file
            pass
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def run(main: Callable[[], None], needs_output: bool = True) -> None:
    """Run a script's main(); a UserError becomes one line on stderr and exit code 2. Bugs keep their traceback.

    needs_output=False: the script's work is in files. It goes on where nobody can read what it prints any more.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # it was closed, as by >&-: what is opened next must not take its place
            handle = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(handle, "w" if number else "r", closefd=False))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks Chinese shows ?, it does not end the run
    if not needs_output:
        sys.stdout = Unfailing(sys.stdout)
        sys.stderr = Unfailing(sys.stderr)
    try:
        main()
    except UserError as e:
        rank = os.environ.get("RANK")
        if rank is not None and isinstance(e, OneRankError):
            print(f"error: rank {rank}: {e}", file=sys.stderr)
        elif os.environ.get("LOCAL_RANK", "0") == "0":  # one line a machine, not one a rank
            print(f"error: {e}", file=sys.stderr)
        else:
            time.sleep(2)  # torchrun ends all ranks when one has ended: the first is to say it before
        sys.exit(2)
    except BrokenPipeError:  # `python sample.py | head`: the reader has had enough
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


# ---------------------------------------------------------------------------------------------------------------------
# Values: from text, or from a config file's Python value, to the type that the field declares


def accepted(kind: Any) -> str:
    """How an error message or --help names a type: int, true/false, one of a|b, ..."""
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return "|".join(accepted(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"{accepted(typing.get_args(kind)[0])} ..."
    return {bool: "true|false", int: "int", float: "float", str: "text"}[kind]


def convert(value: Any, kind: Any) -> Any:
    """`value` (text from the command line, or a Python value from a config file) as `kind`; ValueError if it is not."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        for choice in args:
            if value == choice or str(value) == str(choice):
                return choice
    elif origin in (typing.Union, types.UnionType):
        for option in args:
            try:
                return convert(value, option)
            except ValueError:
                continue
    elif origin is tuple:
        if isinstance(value, str | list | tuple):
            return tuple(convert(v, args[0]) for v in ([value] if isinstance(value, str) else value))
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "1", "yes", "on", "false", "0", "no", "off"):
            return str(value).lower() in ("true", "1", "yes", "on")
    elif kind in (int, float) and not isinstance(value, bool):
        if kind is int and not isinstance(value, float):
            try:
                number = int(value)  # not by way of float, which has 53 bits
                if abs(number) < 2**63:  # what numpy and torch can hold
                    return number
            except ValueError:
                pass
        number = float(value)
        if kind is float and math.isfinite(number):
            return number
        if kind is int and number.is_integer() and abs(number) < 2**63:  # 5e8
            return int(number)
    elif kind is str and isinstance(value, str) and "\0" not in value:  # no file can have that name
        return value
    raise ValueError(value)


def set_value(cls: type, values: dict[str, Any], key: str, value: Any, where: str) -> None:
    """values[key] = value in the type that cls declares for it, or a UserError that says where and what is accepted."""
    kinds = typing.get_type_hints(cls)
    if key not in kinds:
        near = difflib.get_close_matches(key, kinds, n=1)
        raise UserError(
            f"{where}: unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else "; see --help")
        )
    try:
        values[key] = convert(value, kinds[key])
    except (ValueError, TypeError, OverflowError):
        shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
        raise UserError(f"{where}: {key}={shown} is not accepted; it takes {accepted(kinds[key])}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Sources: config files and the command line


def read_file(cls: type, path: str, values: dict[str, Any]) -> None:
    """Run a config file in a namespace of its own and take its assignments; names that start with _ are its own."""
    try:
        namespace = runpy.run_path(path)
    except OSError as e:
        raise UserError(f"config file {path}: {e.strerror}") from None
    except (Exception, SystemExit) as e:
        line = e.lineno if isinstance(e, SyntaxError) else e.__traceback__.tb_next and last_line(e, path)
        raise UserError(f"config file {path}, line {line}: {type(e).__name__}: {' '.join(str(e).split())}") from None
    for key, value in namespace.items():
        if not key.startswith("_") and not isinstance(value, types.ModuleType):
            set_value(cls, values, key, value, f"config file {path}")


def last_line(error: Exception, path: str) -> int | str:
    """The line of the config file itself in an error's traceback, whatever it called from there."""
    lines = [f.lineno for f in inspect.getinnerframes(error.__traceback__) if f.filename == path]
    return lines[-1] if lines else "?"


def parse(cls: type, argv: list[str] | None = None, doc: str = "") -> Any:
    """A `cls` from the command line `argv` (default: this process's); --help prints `doc` and the settings."""
    argv = list(sys.argv[1:] if argv is None else argv)
    kinds = typing.get_type_hints(cls)
    if "--help" in argv or "-h" in argv:
        print(help_text(cls, doc))
        sys.exit(0)
    values: dict[str, Any] = {}
    options: list[tuple[str, Any]] = []  # applied after the files, wherever they stand on the line
    while argv:
        arg = argv.pop(0)
        if not arg.startswith("--"):
            if arg.startswith("-") or not arg.endswith(".py"):
                raise UserError(f"argument {arg!r}: expected config/NAME.py or --key=value; see --help")
            read_file(cls, arg, values)
            continue
        key, equals, value = arg[2:].partition("=")
        key = key.replace("-", "_")
        kind = kinds.get(key)
        if typing.get_origin(kind) is tuple:  # --input a b c: all that follows up to the next option
            value = [value] if equals else []
            while argv and not argv[0].startswith("--"):
                value.append(argv.pop(0))
            if not value:
                raise UserError(f"--{key}: a value is missing; it takes {accepted(kind)}")
            value = [v for k, before in options if k == key for v in before] + value  # given twice: both count
        elif not equals:
            takes_bool = kind is bool or bool in typing.get_args(kind)
            following = argv[0] if argv and not argv[0].startswith("--") else None
            if takes_bool and (following is None or following.endswith(".py")):
                value = True  # --flag, --flag config/x.py
            elif following is None and key in kinds:
                raise UserError(f"--{key}: a value is missing; it takes {accepted(kind)}")
            elif following is not None:
                value = argv.pop(0)
        options.append((key, value))
    for key, value in options:
        set_value(cls, values, key, value, f"--{key}")
    config = cls(**values)
    if problems := getattr(config, "problems", list)():
        raise UserError("; ".join(problems))
    return config


# ---------------------------------------------------------------------------------------------------------------------
# Showing: --help, and what a run was changed to


def help_text(cls: type, doc: str) -> str:
    """The settings in the groups, and with the comments, of the dataclass's own source."""
    out, kinds = (
        [doc.strip(), "\nSettings (--key=value, or an assignment in a config file):"],
        typing.get_type_hints(cls),
    )
    for line in inspect.getsource(cls).splitlines():
        if heading := re.fullmatch(r"\s+# -+ (.+?) -+", line):
            out.append(f"\n{heading[1]}")
        elif (found := re.match(r"    (\w+): .+? = (.+?)(?:  # (.*))?$", line)) and found[1] in kinds:
            name, default, comment = found.groups()
            out.append(f"  --{name + '=' + default.strip(chr(34)):<30} {comment or ''} [{accepted(kinds[name])}]")
    return "\n".join(out)


def changes(config: Any) -> dict[str, Any]:
    """The settings that differ from the defaults."""
    fields = dataclasses.fields(config)
    return {f.name: getattr(config, f.name) for f in fields if getattr(config, f.name) != f.default}
