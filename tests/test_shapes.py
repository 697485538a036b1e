"""What a record says is read, or counted by its path: record shapes through prepare.py."""

import pytest
from conftest import write_jsonl
from test_prepare import prepare_set

import prepare
from text.chat import turns_of
from text.dataset import open_dataset
from text.shapes import read_conversation, record_text

SECTION = {"title": "c", "content": "d"}
HALVES = [{"title": "c"}, {"content": 5}]
INNER = [{"title": "h", "text": "b", "sections": [{"title": "i", "text": "c"}]}]
# record -> its text; None: it is refused
SHAPES = [
    ({"title": "a", "summary": None, "sections": [SECTION]}, "a\n\nc: d"),
    ({"title": "甲", "summary": "b", "sections": HALVES}, "甲：bc：。：5。"),
    ({"title": "甲", "content": ["b", "c"]}, "甲：b\nc。"),
    ({"completion": "c"}, "c"),
    ({"abstract": "a"}, "a"),
    ({"text": ["a", "b"], "content": None}, "a\nb"),
    ("as it is", "as it is"),
    (["a"], None),
    ({"title": float("nan"), "content": "b"}, None),
    # a title comes before any text
    ({"Title": "猫", "TEXT": "动物"}, "猫：动物。"),
    ({"title": "  ", "text": "文"}, "文"),
    ({"title": "t", "abstract": "a", "body": "b"}, "t: a\n\nb"),
    ({"text": "lower", "TEXT": "upper"}, "lower"),
    # the encyclopedia form does not hide a text
    ({"title": "t", "summary": "s", "text": "b"}, "t: b"),
    ({"dialogue": "A: hi", "summary": "s"}, "A: hi"),
    ({"title": "t", "abstract": "a", "sections": [SECTION]}, "t: a\n\nc: d"),
    # sections of other names, and in sections
    ({"title": "t", "sections": [{"heading": "h", "text": "b"}]}, "t\n\nh: b"),
    ({"title": "t", "sections": [{"name": "h", "paragraphs": ["b", "c"]}]}, "t\n\nh: b\nc"),
    ({"sections": INNER}, "h: b\n\ni: c"),
    ({"title": "t", "sections": [{"title": "h", "body": "lost text"}]}, None),
    ({"title": "a", "summary": "b", "sections": [{"title": "c", "content": [1]}]}, None),
    # questions and answers
    ({"input": "q", "output": "a", "conversation": "its name"}, "q\na"),
    ({"instruction": "i", "input": "n", "output": "o"}, "i\nn\no"),
    ({"user": "q", "assistant": "a"}, "q\na"),
    ({"instruction": "q", "context": "c", "response": "a"}, "q\nc\na"),
    ({"": "0", "question": "q", "answer": "a"}, "q\na"),
    ({"content": "c", "question": "q", "answer": "a"}, "c\nq\na"),
    ({"text": "Q: q A: a", "instruction": "q", "output": "a"}, "Q: q A: a"),
    ({"problem": "p", "answer": "4", "solution": "2 + 2"}, "p\n2 + 2"),
    ({"instruction": "i", "question": "q", "answer": "a"}, None),
    ({"question": "q", "choices": ["b", "c"], "answer": "A"}, None),
    ({"role": "user", "content": "a message alone"}, None),
    ({"messages": {"role": "user"}}, None),
]


@pytest.mark.parametrize("record, text", SHAPES)
def test_known_record_shapes_and_no_others_become_text(record, text):
    if text is None:
        with pytest.raises(ValueError):
            record_text(record)
    else:
        assert record_text(record)[0] == text
        assert not read_conversation(record, "", chat=False)


DEEP = {"sections": [SECTION | {"sections": [SECTION | {"note": "n"}]}]}
UNREAD = [
    ({"text": "b", "summary": "a b", "n": 5, "date": "2024-01-02 03:04"}, "", {"summary": 3}),
    ({"text": "b", "url": "https://a.b/c", "id": "a-7", "lang": "en"}, "", {"lang": 2}),
    (DEEP, "", {"sections[].sections[].note": 1}),
    ({"a": {"b": "read", "c": "not"}, "d": ["x", "y"]}, "a.b,d.0", {"a.c": 3, "d": 1}),
    ({"text": "b", "link": "http://t.cn/a1，一段很长的话"}, "", {"link": 21}),
    ({"text": "b", "smiles": "CC(=O)Oc1ccccc1" * 9}, "", {"smiles": 135}),
    ({"text": "b", "image": "data:image/png;base64,iVBOR/9w" * 9, "md5": "0a" * 99}, "", {}),
    ({"text": "b", "pairs": [("a", "b c")], "raw": b"a"}, "", {"pairs[]": 4, "raw": 0}),
    ({"text": "b", "label": True, "meta": {"train": False}}, "", {"meta.train": 0}),
]


@pytest.mark.parametrize("record, fields, unread", UNREAD)
def test_every_text_is_read_or_counted_by_its_path(record, fields, unread):
    assert record_text(record, fields)[2] == unread


Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TURNS = [("user", "q"), ("assistant", "a")]
SYSTEM = [("system", "s"), *TURNS]
NAMED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
UPPER = [{"role": "User", "text": "q"}, {"role": "ASSISTANT", "text": "a"}]
EMPTY = {"role": "system", "content": ""}
PAIR = {"human": "q", "assistant": "a"}
PARTS = [{"type": "text", "text": "a", "note": "b c"}, {"type": "text", "value": "d"}]
LONGER = [TURNS[0], ("assistant", "ad")]
# record, fields, chat: its turns, and what is not read
CONVERSATIONS = [
    ([Q, A], "", False, TURNS, {}),
    ({"messages": UPPER}, "", False, TURNS, {}),
    ({"Conversations": NAMED}, "", False, TURNS, {}),
    ({"messages": None, "conversations": [EMPTY, Q, A]}, "", False, TURNS, {}),
    ({"messages": [{"role": "developer", "content": "s"}, Q, A]}, "", False, SYSTEM, {}),
    ({"conversation": [{"system": "s", "input": "q", "output": "a"}]}, "", False, SYSTEM, {}),
    ({"conversation": [PAIR] * 2}, "", False, TURNS * 2, {}),
    (
        {"prompt": "q", "completion": "a", "conversation": "its name"},
        "",
        True,
        TURNS,
        {"conversation": 8},
    ),
    ({"question": "q", "answer": ["a"], "text": "Q: q A: a"}, "", True, TURNS, {"text": 9}),
    ({"q": "q", "a": {"b": "a", "c": "c d"}}, "q,a.b", True, TURNS, {"a.c": 3}),
    ({"messages": [Q, A | {"think": "so on"}]}, "", False, TURNS, {"messages[].think": 5}),
    ({"messages": [Q, A | {"content": PARTS}]}, "", 0, LONGER, {"messages[].content[].note": 3}),
    ({"messages": [Q, A], "system": "s"}, "", False, SYSTEM, {}),
    ({"messages": [Q, A], "weight": 0.5, "tools": ""}, "", False, TURNS, {"weight": 0}),
]


@pytest.mark.parametrize("record, fields, chat, turns, unread", CONVERSATIONS)
def test_conversations_of_every_shape_are_read(record, fields, chat, turns, unread):
    messages, _, left = read_conversation(record, fields, chat)
    assert [turn[:2] for turn in turns_of(messages)] == turns and left == unread


def test_a_flag_of_any_spelling_is_obeyed():
    for records in ([{"input": "q", "output": "a", "loss": False}], [Q, A | {"Weight": 0}]):
        messages, _, _ = read_conversation({"conversation": records}, "", False)
        assert not turns_of(messages)[-1].is_learned


CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
REFUSED = [
    ({"messages": [Q, CALL]}, ["message 2", "tool call"]),
    ({"messages": [Q, A, {"role": "tool", "content": "7"}]}, ["message 3", "tool call"]),
    ({"messages": [{"speaker": "x", "words": "q"}]}, ["message 1", "speaker, words"]),
    ({"messages": ["q", "a"]}, ["message 1"]),
    ({"messages": [Q]}, []),
    ({"messages": [EMPTY | {"content": "s"}] * 2 + [Q, A]}, ["message 2"]),
    ({"messages": [Q, A | {"content": " \n\t"}]}, ["message 2"]),
    ({"messages": [Q, A | {"content": 3}]}, ["message 2"]),
    ({"prompt": "q", "completion": " "}, ["message 2"]),
]


@pytest.mark.parametrize("record, parts", REFUSED)
def test_an_unreadable_conversation_is_named_with_its_reason(record, parts):
    with pytest.raises(ValueError) as refusal:
        turns_of(read_conversation(record, "", chat=True)[0])
    assert all(part in str(refusal.value) for part in parts)


ADVICE = [
    ({"Question": "q", "Options": ["b", "c"], "Answer": "A"}, "'{Question} {Options} {Answer}'"),
    ({"Question": "q", "Answer": ["a", "b"]}, "--fields=Question,Answer.0 "),
    ({"Prompt": "q", "chosen": "a", "rejected": "b"}, "--fields=Prompt,NAME"),
    ({"total": "2", "data": [{"text": "a"}]}, "jq -c '.NAME[]'"),
    ({"messages": []}, "a conversation without messages"),
]


@pytest.mark.parametrize("record, advice", ADVICE)
def test_a_bad_record_s_reason_has_options_that_fit_it(record, advice):
    with pytest.raises(ValueError) as refusal:
        record_text(record)
    assert advice in str(refusal.value)
    assert ("jq" in advice) == ("jq" in str(refusal.value))


LOST = {"title": "a", "text": "some text", "notes": "that is much longer than the text is"}


def test_more_text_left_than_read_stops_before_it_writes(tmp_path, prints, refuses):
    path = write_jsonl(tmp_path / "a.jsonl", [LOST] * 40)
    options = ["--name=x", "--tokenizer=byte", f"--data_dir={tmp_path / 'data'}"]
    error = refuses(prepare.main, "--input", path, *options)
    assert "notes (1,440)" in error and "--fields=" in error and "--allow_unread" in error
    assert not (tmp_path / "data" / "x").exists()
    for choice in ("--allow_unread", "--fields=text"):
        report = prints(prepare.main, "--input", path, *options, choice)
        assert "40 x notes, 1,440 characters" in report
        records = open_dataset(tmp_path / "data" / "x")["records"]
        assert records["unread"]["notes"] == 40 and records["unread_characters"]["notes"] == 1440


def test_keys_that_are_data_do_not_fill_the_memory(tmp_path):
    records = [{"text": "long enough " * 9, "votes": {f"u{i}": "a b"}} for i in range(400)]
    _, meta = prepare_set(tmp_path, write_jsonl(tmp_path / "a.jsonl", records))
    unread = meta["records"]["unread"]
    assert len(unread) <= 202 and sum(unread.values()) == 400
