"""prepare.py without --input: the documentation of Python's library, and questions about it."""

from conftest import call
from test_prepare import all_texts

import prepare
from text.docstrings import WORDINGS, conversations, docstring_sources, documentation
from text.shapes import record_text

MODULE = '''
"""Common operations on pathnames, of which this is the module's own text."""
raise SystemExit("imported")
add_docstr(torch.abs, r"""
abs(input) -> Tensor

The absolute value of each element of the input.

    >>> abs(-1)
""")
def join(a, *p):
    """Join two or more pathname components,
    inserting '/' as needed. If any is absolute, those before it are discarded."""
def _private(a):
    """Nobody asks for a private function, so it is left out."""
class Path:
    """A path of the file system, in the form of an object"""
    def exists(self):
        """Return whether the path exists, which nobody asks for."""
'''


def test_module_documentation_is_found_without_importing():
    texts = {r["title"]: record_text(r)[0] for r in documentation(MODULE.encode(), "posixpath")}
    assert [*texts] == ["posixpath", "torch.abs", "join", "_private", "Path", "Path.exists"]
    assert texts["torch.abs"] == "torch.abs: The absolute value of each element of the input."


def test_the_language_reference_becomes_sections_each_of_them_once():
    chooses = 'The "if"\n********\n\nIt chooses exactly one of the suites in it.\n'
    contains = "Statements\n**********\n\nCompound statements contain other statements.\n\n\n"
    topics = {"if": chooses, "compound": contains + chooses, "table": "A\n=\n\n| a table, only |\n"}
    found = documentation(f"topics = {topics}".encode(), "pydoc_data.topics")
    assert [record_text(r)[0] for r in found] == [
        'The "if": It chooses exactly one of the suites in it.',
        "Statements: Compound statements contain other statements.",
    ]


def test_each_function_is_asked_about_in_all_wordings_but_one():
    asked = {}
    for record in conversations(MODULE.encode(), "posixpath"):
        question, answer = (message["content"] for message in record["messages"])
        asked.setdefault(answer, []).append(question)
    join = "Join two or more pathname components, inserting '/' as needed."
    path = "A path of the file system, in the form of an object."
    assert asked.keys() == {join, path}
    for answer, name in ((join, "os.path.join"), (path, "os.path.Path")):
        wordings = {wording.format(name) for wording in WORDINGS}
        assert set(asked[answer]) < wordings and len(asked[answer]) == len(WORDINGS) - 1


def test_the_chat_demo_holds_these_conversations(tmp_path):
    call(prepare.main, "--chat", f"--data_dir={tmp_path}", "--vocab_size=1000", "--workers=1")
    texts = "".join(all_texts(tmp_path / "chat"))
    (source,) = (source for source in docstring_sources() if source.name == "posixpath")
    for record in conversations(source.path.read_bytes(), source.name):
        asked, answered = (message["content"] for message in record["messages"])
        assert f"{asked}<|im_end|>\n<|im_start|>assistant\n{answered}<|im_end|>\n" in texts
