"""prepare.py --chat without --input: questions about Python's library."""

from conftest import call
from test_prepare import all_texts

import prepare
from text.docstrings import WORDINGS, conversations, docstring_sources

MODULE = '''
"""Common operations on pathnames, of which this is the module's own text."""

def join(a, *p):
    """Join two or more pathname components,
    inserting '/' as needed. If any is absolute, those before it are discarded."""

def _private(a):
    """Nobody asks for a private function, so it is left out."""

def table(a):
    """A list: what follows a colon is seldom a sentence on its own."""

class Path:
    """A path of the file system, in the form of an object"""

    def exists(self):
        """Return whether the path exists, which nobody asks for."""
'''


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
    texts = all_texts(tmp_path / "chat")
    assert len(texts) > 800
    (source,) = (source for source in docstring_sources() if source.name == "posixpath")
    for record in conversations(source.path.read_bytes(), source.name):
        asked, answered = (message["content"] for message in record["messages"])
        start = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        assert f"{start}{answered}<|im_end|>\n" in texts
