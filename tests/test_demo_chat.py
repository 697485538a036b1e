"""prepare.py --chat without --input: questions about Python's library, some wordings held out."""

from conftest import call
from test_prepare import all_texts

import prepare
from text.chat import question_ids
from text.dataset import load_tokenizer
from text.demo import TAUGHT, WORDINGS, demo_sources, questions

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


def test_each_function_is_asked_about_in_every_wording_and_one_of_them_is_held_out():
    asked = list(questions(MODULE.encode(), "posixpath"))
    answers = {q: answer for q, answer, _ in asked}
    for wording in WORDINGS:
        join = "Join two or more pathname components, inserting '/' as needed."
        assert answers.pop(wording.format("os.path.join")) == join
        path = "A path of the file system, in the form of an object."
        assert answers.pop(wording.format("os.path.Path")) == path
    assert not answers
    assert sum(is_held_out for *_, is_held_out in asked) == 2
    assert asked == list(questions(MODULE.encode(), "posixpath"))


def test_the_conversations_of_the_demo_are_all_questions_but_those_held_out(tmp_path):
    call(prepare.main, "--chat", f"--data_dir={tmp_path}", "--vocab_size=1000", "--workers=1")
    folder = tmp_path / "chat"
    tokenizer = load_tokenizer(folder)
    asked = [
        question
        for source in demo_sources()
        if source.name in TAUGHT
        for question in questions(source.path.read_bytes(), source.name)
    ]
    assert len(asked) > 1000
    of_training = [(q, answer) for q, answer, is_held_out in asked if not is_held_out]
    assert len(of_training) == 0.8 * len(asked)
    expected = set()
    for q, answer in of_training:
        prompt = tokenizer.decode(question_ids(q, tokenizer)[1:])  # without the eos before it
        expected.add(f"{prompt}{answer}<|im_end|>\n")
    assert set(all_texts(folder)) == expected
