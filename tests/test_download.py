"""--input https://... is downloaded once. The web is a socket that answers each request alike."""

import gzip
import hashlib
import http.client
import io
import os
import socket
import urllib.parse
from pathlib import Path

import pytest
from conftest import REPO, call, metrics
from test_prepare import SHARED, prepare_set, texts_of

import prepare
import sample
import train
from text import download

TEXT = "".join(f"line {i} of the play, and 更多\n" for i in range(20_000))
DATA = TEXT.encode()
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(DATA)


def answer(content: bytes = DATA, status: str = "200 OK", kind: str = "text/plain") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


class Web:
    """Takes the place of every socket. Tests set the answer, and count the requests."""

    root = "http://web.test"
    answer = answer()
    requests = 0

    def sendall(self, _):
        self.requests += 1

    def makefile(self, _):
        return io.BytesIO(self.answer)

    def close(self):
        pass


@pytest.fixture
def web(monkeypatch) -> Web:
    web = Web()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(
        http.client.HTTPConnection, "connect", lambda self: setattr(self, "sock", web)
    )
    return web


@pytest.fixture
def fails_on(tmp_path, refuses):
    """fails_on(url) runs prepare.py, which must fail and name the URL. Return its one line."""
    options = [f"--data_dir={tmp_path / 'data'}", "--tokenizer=byte"]

    def check(url: str, shown: str = "") -> str:
        error = refuses(prepare.main, "--input", url, *options)
        assert (shown or f"--input {url}: ") in error
        return error

    return check


def text_of(folder: Path) -> str:
    return "".join(texts_of(folder, "train") + texts_of(folder, "val"))


def test_a_file_is_downloaded_once_hashed_and_used_again(web, tmp_path, capsys, monkeypatch):
    packed = gzip.compress(DATA)
    web.answer = answer(packed, kind="text/html; charset=utf-8")
    url = f"{web.root}/corpora/play.txt.gz"
    folder, meta = prepare_set(tmp_path, url)
    assert text_of(folder) == TEXT
    sha256 = hashlib.sha256(packed).hexdigest()
    assert meta["sources"] == [{"path": url, "bytes": len(packed), "sha256": sha256}]
    printed = capsys.readouterr()
    assert url in printed.out and sha256 in printed.out
    assert f"{url}: the server sends a web page" in printed.err
    monkeypatch.setattr(download, "Lock", None)  # it may be in another user's folder
    again, _ = prepare_set(tmp_path, url, name="again")
    assert text_of(again) == TEXT and web.requests == 1


def test_several_files_are_called_like_their_addresses_and_may_be_mixed_with_others(web, tmp_path):
    (tmp_path / "c.txt").write_text("mine")
    one = f"{web.root}/a/莎士比亚 1.txt"
    two = f"{web.root}/b/{urllib.parse.quote('莎士比亚 1')}.txt?raw=1#top"
    in_gbk = web.root + b"/\xc4\xe3.txt".decode("utf8", "surrogateescape")
    inputs = [one, tmp_path / "c.txt", two, in_gbk]
    folder, meta = prepare_set(tmp_path, *inputs, val_fraction=0.01)
    assert text_of(folder) == f"{TEXT}mine{TEXT}{TEXT}"
    kept = [download.file_of(url, tmp_path / "data") for url in (one, two, in_gbk)]
    assert [path.name for path in kept] == ["莎士比亚_1.txt", "莎士比亚_1.txt", "_.txt"]
    assert len({path.parent for path in kept if path.is_file()}) == 3
    # What follows the path may be a key, and meta.json goes into every checkpoint.
    shown = [one, str(inputs[1]), two.removesuffix("?raw=1#top"), in_gbk]
    assert [s["path"] for s in meta["sources"]] == shown
    assert not any(b"raw=1" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


@pytest.mark.parametrize("whole", [answer(), CHUNKED + DATA + b"\r\n0\r\n\r\n"])
def test_a_broken_download_leaves_no_file_and_begins_anew(web, tmp_path, fails_on, whole):
    url = f"{web.root}/play.txt"
    web.answer = whole[:100_000]
    fails_on(url)
    assert not list((tmp_path / "data").glob("*"))
    web.answer = whole
    assert text_of(prepare_set(tmp_path, url)[0]) == TEXT
    (kept,) = tmp_path.glob("data/downloads/play-*")
    assert sorted(os.listdir(kept)) == ["play.txt", "play.txt.download"]


def test_what_a_server_does_wrong_is_one_line_that_cannot_control_the_terminal(web, fails_on):
    url = f"{web.root}/play.txt"
    web.answer = (
        b"HTTP/1.1 200 OK\r\n\r\n" + DATA
    )  # where it ends is unknown, so whether it is whole
    fails_on(url)
    web.answer = answer(status="404 Not here")
    assert "404" in fails_on(url)
    for web.answer in (b"HTTP/1.1 404 \x1b]0;x\x07\x9b31m\r\n\r\n", b"\x1b]0;x\x07 what\r\n\r\n"):
        error = fails_on(url)
        assert "\\x1b]0;x\\x07" in error and error.isprintable()


def test_an_address_that_cannot_be_read_is_one_line(tmp_path, fails_on, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    hosts = ["http://127.0.0.1:1", "http://127.0.0.1:99999", f"http://{'x' * 70}.invalid"]
    for host in (*hosts, "http://[", "s3:/"):
        fails_on(f"{host}/play.txt")
    assert "unknown kind" in fails_on(f"{hosts[0]}/play.pdf")  # before it is downloaded
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(download, "TIMEOUT", 0.2)
        fails_on(f"http://127.0.0.1:{silent.getsockname()[1]}/play.txt")
    assert not list(tmp_path.glob("data/*"))


@pytest.mark.parametrize("start", ["http://", "HTTPS://", "ftp://"])
@pytest.mark.parametrize("host", ["127.0.0.1:1", "[", "h\u2100"])
def test_a_password_in_a_url_is_in_no_message_and_no_file(tmp_path, fails_on, start, host):
    for secret in ("hunter2", "user:hunter2", "user:hunter2/x", "user:hunter2?x"):
        error = fails_on(f"{start}{secret}@{host}/play.txt", f"--input {host}/play.txt: ")
        assert "password" in error and "hunter" not in error
    assert not list(tmp_path.glob("data/*"))


def test_nothing_that_was_not_downloaded_is_overwritten(web, tmp_path, fails_on):
    url = f"{web.root}/play.txt"
    file = download.file_of(url, tmp_path / "data")
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    fails_on(url, str(file))
    file.rename(tmp_path / "thesis.txt")
    file.with_name(".play.txt.tmp").symlink_to(tmp_path / "thesis.txt")
    assert text_of(prepare_set(tmp_path, url)[0]) == TEXT and not file.is_symlink()
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    for changed in (file, file.with_name("play.txt.download")):
        content = changed.read_bytes()
        changed.write_text("mine")
        fails_on(url, str(changed))
        assert changed.read_text() == "mine"
        changed.write_bytes(content)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared corpora")
def test_two_lines_give_shakespeare_trained_and_sampled(web, tmp_path, capsys):
    """With a loss below the 1.88 that nanoGPT's README names for its recipe for a laptop."""
    play = (SHARED / "corpora" / "tinyshakespeare.txt.gz").read_bytes()
    web.answer = answer(gzip.decompress(play))
    data = f"--data_dir={tmp_path}"
    out = f"--out_dir={tmp_path / 'out'}"
    url = ["--val_fraction=0.1", "--input", f"{web.root}/input.txt"]
    call(prepare.main, data, "--name=shakespeare", "--tokenizer=char", *url)
    call(train.main, REPO / "config" / "shakespeare_char.py", data, out, "--eval_tokens=30_000")
    assert min(metrics(tmp_path / "out" / "shakespeare_char", "val_loss").values()) < 1.88
    capsys.readouterr()
    call(sample.main, out)
    text = capsys.readouterr().out
    assert len("ROMEO:") + 256 <= len(text) <= len("ROMEO:\n") + 320, text
