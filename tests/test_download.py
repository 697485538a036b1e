"""--input https://... is downloaded once. The web is a server on this computer."""

import gzip
import hashlib
import os
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import REPO, call, metrics
from test_prepare import SHARED, prepare_set, texts_of, tiktoken_file

import prepare
import sample
import train
from text import download

TEXT = "".join(f"line {i} of the play, and 更多\n" for i in range(20_000))


class Web(BaseHTTPRequestHandler):
    """A server of one file. Tests set these attributes, and read the requests that came."""

    protocol_version = "HTTP/1.1"
    content = TEXT.encode()
    drop_at = None  # it closes the connection before this byte
    status = 200
    framing = "Content-Length"  # how it says where the file ends; or "chunked", or ""
    kind = "text/plain"
    block_on = None  # an event: no answer before it is set

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.requests.append(self.path)
        if self.block_on:
            self.block_on.wait(20)
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.send_header("Connection", "close")
        body = self.content[: self.drop_at]
        if self.framing == "Content-Length":
            self.send_header("Content-Length", str(len(self.content)))
        elif self.framing == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            end = b"" if self.drop_at else b"0\r\n\r\n"
            body = b"%x\r\n%s\r\n" % (len(body), body) + end
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    handler = type("OfThisTest", (Web,), {"requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *_: None  # a client that goes away is part of a test
        handler.root = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield handler
        server.shutdown()
        thread.join()


@pytest.fixture
def fails_on(tmp_path, refuses):
    """fails_on(url) runs prepare.py, which must fail and name the URL. Return its one line."""
    model = tiktoken_file(tmp_path / "bytes.tiktoken")
    options = [f"--data_dir={tmp_path / 'data'}", "--name=set", f"--tokenizer={model}"]

    def check(url: str, shown: str = "") -> str:
        error = refuses(prepare.main, "--input", url, *options)
        assert (shown or f"--input {url}: ") in error
        return error

    return check


def text_of(folder: Path) -> str:
    return "".join(texts_of(folder, "train") + texts_of(folder, "val"))


def test_a_file_is_downloaded_once_hashed_and_used_again(web, tmp_path, capsys, monkeypatch):
    web.content = gzip.compress(TEXT.encode())
    web.kind = "text/html; charset=utf-8"
    url = f"{web.root}/corpora/play.txt.gz"
    folder, meta = prepare_set(tmp_path, url)
    assert text_of(folder) == TEXT
    sha256 = hashlib.sha256(web.content).hexdigest()
    assert meta["sources"] == [{"path": url, "bytes": len(web.content), "sha256": sha256}]
    printed = capsys.readouterr()
    assert url in printed.out and sha256 in printed.out
    assert f"{url}: the server sends a web page" in printed.err
    web.status = 500  # it is not asked again
    monkeypatch.setattr(download, "Lock", None)  # it may be in another user's folder
    again, _ = prepare_set(tmp_path, url, name="again")
    assert text_of(again) == TEXT and len(web.requests) == 1


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


@pytest.mark.parametrize("framing", ["Content-Length", "chunked"])
def test_a_broken_download_leaves_no_file_and_begins_anew(web, tmp_path, fails_on, framing):
    url = f"{web.root}/play.txt"
    web.framing = framing
    web.drop_at = 100_000
    fails_on(url)
    assert not list((tmp_path / "data").glob("*"))
    web.drop_at = None
    assert text_of(prepare_set(tmp_path, url)[0]) == TEXT
    (kept,) = tmp_path.glob("data/downloads/play-*")
    assert sorted(os.listdir(kept)) == ["play.txt", "play.txt.download"]


def test_what_a_server_or_a_user_does_wrong_is_one_line(web, tmp_path, fails_on, monkeypatch):
    url = f"{web.root}/play.txt"
    web.framing = ""  # where it ends is unknown, so whether it is whole
    fails_on(url)
    web.status = 404
    assert "404" in fails_on(url)
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    web.block_on = threading.Event()
    fails_on(url)
    web.block_on.set()
    asked = len(web.requests)
    fails_on(f"{web.root}/play.pdf")
    for host in ("http://127.0.0.1:1", f"http://{'x' * 70}.invalid", "http://[", "s3:/"):
        fails_on(f"{host}/play.txt")
    fails_on("http://127.0.0.1:99999/play.txt")
    assert len(web.requests) == asked and not list(tmp_path.glob("data/*"))


@pytest.mark.parametrize("start", ["http://", "HTTPS://", "ftp://"])
@pytest.mark.parametrize("host", ["127.0.0.1:1", "[", "h\u2100"])
def test_a_password_in_a_url_is_in_no_message_and_no_file(tmp_path, fails_on, start, host):
    for secret in ("hunter2", "user:hunter2", "user:hunter2/x", "user:hunter2?x"):
        error = fails_on(f"{start}{secret}@{host}/play.txt", f"--input {host}/play.txt: ")
        assert "password" in error and "hunter" not in error
    assert not list(tmp_path.glob("data/*"))


def test_a_server_cannot_control_the_terminal(web, fails_on, monkeypatch):
    for answer in (b"HTTP/1.1 404 \x1b]0;x\x07\x9b31m\r\n\r\n", b"\x1b]0;x\x07 what\r\n\r\n"):
        monkeypatch.setattr(web, "do_GET", lambda self, answer=answer: self.wfile.write(answer))
        error = fails_on(f"{web.root}/play.txt")
        assert "\\x1b]0;x\\x07" in error and error.isprintable()


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
    web.content = gzip.decompress((SHARED / "corpora" / "tinyshakespeare.txt.gz").read_bytes())
    config = [REPO / "config" / "shakespeare_char.py", f"--data_dir={tmp_path}"]
    out = f"--out_dir={tmp_path / 'out'}"
    url = [f"--data_dir={tmp_path}", "--val_fraction=0.1", "--input", f"{web.root}/input.txt"]
    call(prepare.main, "--name=shakespeare", "--tokenizer=char", *url)
    quick = ["--eval_tokens=30_000"]
    call(train.main, *config, out, *quick)
    capsys.readouterr()
    call(sample.main, out)
    assert min(metrics(tmp_path / "out" / "shakespeare_char", "val_loss").values()) < 1.88
    text = capsys.readouterr().out
    assert len("ROMEO:") + 256 <= len(text) <= len("ROMEO:\n") + 320, text
