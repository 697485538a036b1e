"""A corpus for a first BPE: the documentation that Python, numpy and torch bring with them.

docstring_sources() lists the modules. documentation() returns the documents of one module: each
docstring in it is one, and each section of the language reference, which Python has for help().
conversations() makes questions and answers of them, for prepare.py --chat.
"""

import ast
import inspect
import re
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

from text.formats import Source

# Folders of tests and of other projects' packages.
LEFT_OUT = {
    "site-packages", "test", "tests", "testing", "_vendor", "idlelib", "lib2to3", "turtledemo",
    "ensurepip", "__pycache__",
}  # fmt: skip

HEADING = re.compile(r"^(\S.*)\n([*=~^-])\2{2,}\n", re.MULTILINE)  # of the language reference
SIGNATURE = re.compile(r"[\w.]+\([^\n]*\)( *-> *[^\n]*)?")
BEFORE_CODE = re.compile(r"(Example|Usage)s?:{0,2}")
# A row or an edge of a table, a session at Python's prompt, a rule of a grammar.
NO_SENTENCE = re.compile(r"^ *([|+]|=+ +=|>>>|\w+ +::=)", re.MULTILINE)

# The modules of the questions: few enough for a small model to learn all answers in two minutes.
TAUGHT = [
    "abc", "argparse", "base64", "calendar", "collections", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "fnmatch", "functools", "genericpath", "glob", "gzip", "heapq",
    "inspect", "json", "logging", "operator", "os", "pathlib", "pickle", "posixpath", "pprint",
    "queue", "random", "re", "shlex", "shutil", "socket", "statistics", "subprocess", "tempfile",
    "textwrap", "threading", "timeit", "traceback", "urllib.parse", "uuid", "warnings", "weakref",
    "zipfile",
]  # fmt: skip
IMPORTED_AS = {"posixpath": "os.path", "genericpath": "os.path"}
WORDINGS = ("What does {} do?", "What is {} for?", "Explain {}.", "Tell me about {}.")
WORDINGS += ("What can I do with {}?",)
ANSWER = re.compile(r"[A-Z][^:>|*]{19,99}\.")


def docstring_sources() -> list[Source]:
    """Return the modules of the standard library, numpy and torch, in a fixed order."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    packages = [Path(s.origin).parent for s in map(find_spec, ("numpy", "torch")) if s and s.origin]
    sources = []
    for root in (stdlib, *packages):
        base = stdlib if root == stdlib else root.parent  # module names are relative to it
        for path in sorted(root.rglob("*.py")):
            is_test = path.name.startswith(("test_", "_test", "_sysconfigdata"))
            if is_test or LEFT_OUT.intersection(path.relative_to(root).parts):
                continue
            module = ".".join(path.relative_to(base).with_suffix("").parts)
            sources.append(Source.from_path(path, "py", module.removesuffix(".__init__")))
    return sources


def documentation(source: bytes, module: str) -> list[dict]:
    """Return {title, content} of each text about a module and what is in it.

    The title is the name of the module, of the class or function in it, or of a section. A content
    is prose(); texts of less than 40 characters are left out, such as "See base class."
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, or code for another version of Python
        return []
    texts = [(module, ast.get_docstring(tree))]

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                texts.append((name, ast.get_docstring(child)))
                visit(child, f"{name}.")
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                texts.append(added_docstring(child.value))

    visit(tree, "")
    if module == "pydoc_data.topics":
        texts += language_reference(tree)
    contents = [(title, prose(text or "")) for title, text in texts]
    return [{"title": t, "content": content} for t, content in contents if len(content) >= 40]


def conversations(source: bytes, module: str) -> list[dict]:
    """Return {messages} of each question about a module, with its answer.

    The questions are about its public functions and classes, but not about members of a class. The
    answer is the first sentence of the documentation. A hash of the name holds out one of the
    WORDINGS.
    """
    records = []
    for record in documentation(source, module):
        title = record["title"]
        paragraph = " ".join(record["content"].split("\n\n")[0].split())
        answer = paragraph.split(". ")[0].removesuffix(".") + "."
        is_public = not title.startswith("_") and "." not in title and title != module
        if is_public and ANSWER.fullmatch(answer):
            name = f"{IMPORTED_AS.get(module, module)}.{title}"
            held_out = crc32(name.encode()) % len(WORDINGS)
            for wording in WORDINGS[:held_out] + WORDINGS[held_out + 1 :]:
                question = {"role": "user", "content": wording.format(name)}
                answered = {"role": "assistant", "content": answer}
                records.append({"messages": [question, answered]})
    return records


def added_docstring(call: ast.Call) -> tuple[str, str]:
    """Return (name, docstring) if a call adds the docstring of a function written in C.

    numpy calls add_newdoc("module", "name", "text"), and torch calls add_docstr(name, "text").
    """
    function = call.func
    prefixes = ("add_docstr", "add_newdoc")
    if not (isinstance(function, ast.Name) and function.id.startswith(prefixes)):
        return "", ""
    values = [str(a.value) if isinstance(a, ast.Constant) else ast.unparse(a) for a in call.args]
    text = next((v for v in values if "\n" in v), "")
    return ".".join(v for v in values if "\n" not in v), inspect.cleandoc(text)


def language_reference(tree: ast.Module) -> list[tuple[str, str]]:
    """Return (heading, text) of each section of the topics that Python's help() knows.

    The module is a dictionary of them. A section that is part of several topics is returned once.
    """
    sections: dict[tuple[str, str], None] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for topic in ast.literal_eval(node.value).values():
                _, *parts = HEADING.split(topic)  # heading, its underline, text, heading, ...
                sections |= dict.fromkeys(zip(parts[::3], map(str.strip, parts[2::3]), strict=True))
    return list(sections)


def prose(text: str) -> str:
    """Return the paragraphs of a text that consist of sentences.

    A paragraph is left out if it has a table, a session or a grammar, if it is only a signature or
    the announcement of an example, or if it has no small letter.
    """

    def is_prose(paragraph: str) -> bool:
        line = paragraph.strip()
        other = SIGNATURE.fullmatch(line) or BEFORE_CODE.fullmatch(line)
        return not (other or NO_SENTENCE.search(paragraph)) and bool(re.search("[a-z]", line))

    return "\n\n".join(filter(is_prose, re.split(r"\n\s*\n", text))).strip()
