"""--input https://... is downloaded once. The web is a server on this computer."""

import gzip
import hashlib
import json
import os
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import warm
from conftest import REPO, call, make_records, metrics
from test_prepare import SHARED, prepare_set, texts_of, tiktoken_file
from test_prepare_durability import under_torchrun

import prepare
import sample
import train
from text import download

TEXT = "".join(f"line {i} of the play, and 更多\n" for i in range(20_000))
DATA = TEXT.encode()


class Web(ThreadingHTTPServer):
    """A server of one file. Tests set these attributes, and read the requests that came."""

    content = DATA
    drop_at = 0  # it closes the connection before this byte; 0: never
    status = 200
    length = True  # it says how long the file is
    chunked = False
    kind = "text/plain"
    block_on = None  # an event: no answer before it is set

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.requests: list[dict[str, str]] = []
        self.root = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # a client that goes away is part of a test


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        web = self.server
        web.requests.append(dict(self.headers))
        if web.block_on:
            web.block_on.wait(20)
        self.send_response(web.status)
        self.send_header("Content-Type", web.kind)
        self.send_header("Connection", "close")
        body = web.content
        if web.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif web.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if web.drop_at:
            body = body[: web.drop_at]
        if web.chunked:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
            if not web.drop_at:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(body)
        self.close_connection = True


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Web()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def try_it(tmp_path, refuses):
    """try_it(url) runs prepare.py, which must fail, and returns its one line."""
    model = tiktoken_file(tmp_path / "bytes.tiktoken")
    options = [f"--data_dir={tmp_path / 'data'}", "--name=set", f"--tokenizer={model}"]
    return lambda url, *more: refuses(prepare.main, "--input", url, *options, *more)


def downloads(tmp_path: Path) -> list[str]:
    """Return the names of all files that downloads left."""
    return sorted(path.name for path in tmp_path.glob("data/downloads/*/*"))


def text_of(folder: Path) -> str:
    return "".join(texts_of(folder, "train") + texts_of(folder, "val"))


def test_a_file_is_downloaded_once_hashed_and_used_again(web, tmp_path, capsys, monkeypatch):
    url = f"{web.root}/corpora/play.txt"
    folder, meta = prepare_set(tmp_path, url)
    assert text_of(folder) == TEXT
    sha256 = hashlib.sha256(DATA).hexdigest()
    assert meta["sources"] == [{"path": url, "bytes": len(DATA), "sha256": sha256}]
    (kept,) = tmp_path.glob("data/downloads/play-*/play.txt")
    assert f"{url}: downloaded: {kept}, {len(DATA):,} bytes, SHA-256 {sha256}" in (
        capsys.readouterr().out
    )
    assert downloads(tmp_path) == ["play.txt", "play.txt.download"]
    assert json.loads((kept.parent / "play.txt.download").read_text())["file_sha256"] == sha256
    web.status = 500  # it is not asked again
    monkeypatch.setattr(download, "Lock", None)  # it may be in another user's folder
    again, _ = prepare_set(tmp_path, url, name="again")
    assert text_of(again) == TEXT and "downloaded earlier" in capsys.readouterr().out
    assert len(web.requests) == 1


def test_two_addresses_with_one_name_are_two_files_and_may_be_mixed_with_others(web, tmp_path):
    (tmp_path / "c.txt").write_text("mine")
    urls = [f"{web.root}/a/play.txt", f"{web.root}/b/play.txt?raw=1#top"]
    folder, meta = prepare_set(tmp_path, urls[0], tmp_path / "c.txt", urls[1], val_fraction=0.01)
    assert text_of(folder) == f"{TEXT}mine{TEXT}"
    # What follows the path may be a key, and meta.json goes into every checkpoint.
    shown = urls[1].removesuffix("?raw=1#top")
    assert [s["path"] for s in meta["sources"]] == [urls[0], str(tmp_path / "c.txt"), shown]
    assert not any(b"raw=1" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


@pytest.mark.parametrize("encode", [str, urllib.parse.quote])
def test_the_data_set_is_called_like_the_file(web, tmp_path, encode):
    options = [f"--data_dir={tmp_path / 'data'}", "--tokenizer=char"]
    call(prepare.main, "--input", f"{web.root}/{encode('莎士比亚 1.txt')}", *options)
    assert text_of(tmp_path / "data" / "莎士比亚_1") == TEXT


def test_a_compressed_file_is_unpacked_when_it_is_read(web, tmp_path):
    web.content = gzip.compress(DATA)
    folder, meta = prepare_set(tmp_path, f"{web.root}/play.txt.gz")
    assert text_of(folder) == TEXT and meta["sources"][0]["bytes"] == len(web.content)


def test_a_broken_download_leaves_no_file_and_begins_anew(web, tmp_path, try_it):
    url = f"{web.root}/play.txt"
    for web.drop_at in (100_000, 300_000):
        error = try_it(url)
        assert url in error and f"{web.drop_at:,} of {len(DATA):,} bytes" in error
        assert not list((tmp_path / "data").glob("*"))
    web.drop_at = 0
    assert text_of(prepare_set(tmp_path, url)[0]) == TEXT
    assert downloads(tmp_path) == ["play.txt", "play.txt.download"]


@pytest.mark.parametrize("drop_at", [0, 100_000])
def test_a_file_of_unknown_length_is_taken_only_if_its_end_is_marked(
    web, tmp_path, try_it, drop_at
):
    web.chunked = True
    web.drop_at = drop_at
    url = f"{web.root}/play.txt"
    if drop_at:
        assert "the connection broke (IncompleteRead" in try_it(url)
        web.drop_at = 0
    assert text_of(prepare_set(tmp_path, url)[0]) == TEXT
    web.chunked = web.length = False
    error = try_it(f"{web.root}/other.txt")
    assert "other.txt: the server does not say how long the file is" in error


def test_what_a_server_or_a_user_does_wrong_is_one_line(web, tmp_path, try_it, monkeypatch):
    web.status = 404
    url = f"{web.root}/play.txt"
    assert try_it(url) == f"error: --input {url}: the server answers 404 Not Found"
    assert "play.pdf: unknown kind of file; expected .jsonl" in try_it(f"{web.root}/play.pdf")
    assert "index: unknown kind of file" not in try_it(f"{web.root}/", "--format=txt")
    assert "cannot be downloaded" in try_it("http://127.0.0.1:1/play.txt")
    assert "cannot be downloaded" in try_it("http://" + "x" * 70 + ".invalid/play.txt")
    for other in ("http://[/play.txt", "s3://play.txt", "http://127.0.0.1:99999/play.txt"):
        assert f"--input {other}: expected http" in try_it(other)
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    web.block_on = threading.Event()
    error = try_it(url)
    assert error.startswith(f"error: --input {url}: cannot be downloaded")
    assert error.endswith(": timed out")
    web.block_on.set()
    assert not (tmp_path / "data").exists() or not os.listdir(tmp_path / "data")


@pytest.mark.parametrize("start", ["http://", "HTTPS://", "ftp://"])
@pytest.mark.parametrize("host", ["127.0.0.1:1", "[", "h\u2100"])
def test_a_password_in_a_url_is_in_no_message_and_no_file(tmp_path, try_it, start, host):
    for secret in ("hunter2", "user:hunter2", "user:hunter2/x", "user:hunter2?x"):
        error = try_it(f"{start}{secret}@{host}/play.txt")
        assert "--input" in error and "password" in error and "hunter" not in error
    assert not list(tmp_path.glob("data/*"))


def test_a_url_may_have_bytes_that_are_not_utf8(web, tmp_path, monkeypatch):
    url = f"{web.root}/" + b"\xc4\xe3.txt".decode("utf-8", "surrogateescape")  # as GBK on a disk
    folder, meta = prepare_set(tmp_path, url)
    assert text_of(folder) == TEXT and meta["sources"][0]["path"] == url
    assert prepare_set(tmp_path, url) and len(web.requests) == 1


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 404 \x1b]0;x\x07\x9b31m\r\n\r\n", b"\x1b]0;x\x07 what\r\n\r\n"]
)
def test_a_server_cannot_control_the_terminal(web, try_it, monkeypatch, answer):
    monkeypatch.setattr(Answer, "do_GET", lambda self: self.wfile.write(answer))
    error = try_it(f"{web.root}/play.txt")
    assert "\\x1b]0;x\\x07" in error and error.isprintable()


def test_a_download_follows_no_link_that_is_in_the_place_of_its_file(web, tmp_path):
    url = f"{web.root}/play.txt"
    file = download.file_of(url, tmp_path / "data")
    file.parent.mkdir(parents=True)
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("mine")
    file.with_name(".play.txt.tmp").symlink_to(thesis)
    assert text_of(prepare_set(tmp_path, url)[0]) == TEXT
    assert thesis.read_text() == "mine" and not file.is_symlink()


def test_a_web_page_in_place_of_a_file_is_noted(web, tmp_path, capsys):
    web.kind = "text/html; charset=utf-8"
    prepare_set(tmp_path, f"{web.root}/play.txt")
    assert "play.txt: the server sends a web page; is it the address" in capsys.readouterr().err


def test_nothing_that_was_not_downloaded_is_overwritten(web, tmp_path, try_it):
    url = f"{web.root}/play.txt"
    file = download.file_of(url, tmp_path / "data")
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    assert str(file) in try_it(url) and file.read_text() == "mine"
    file.unlink()
    prepare_set(tmp_path, url)
    for changed in (file, file.with_name("play.txt.download")):
        before = changed.read_bytes()
        changed.write_text("mine")
        assert str(changed) in try_it(url) and changed.read_text() == "mine"
        changed.write_bytes(before)


def test_downloads_are_not_put_into_a_data_set(web, tmp_path, try_it):
    (tmp_path / "c.txt").write_text(TEXT)
    folder, _ = prepare_set(tmp_path, tmp_path / "c.txt")
    folder = folder.rename(folder.with_name("downloads"))
    assert f"{folder} is a data set" in try_it(f"{web.root}/play.txt")
    assert "give another --name" in try_it(f"{web.root}/play.txt", "--name=downloads")


@pytest.mark.slow
def test_one_of_several_processes_downloads(web, tmp_path):
    urls = [f"{web.root}/{i}.txt" for i in range(2)]
    model = f"--tokenizer={tiktoken_file(tmp_path / 'b.tiktoken')}"
    run = under_torchrun(2, urls, tmp_path / "data", model, run=warm.run)
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(web.requests) == 2 and text_of(tmp_path / "data" / "set") == TEXT * 2


@pytest.mark.slow
def test_two_lines_give_shakespeare_trained_and_sampled(web, tmp_path, capsys):
    """With a loss below the 1.88 that nanoGPT's README names for its recipe for a laptop."""
    play = SHARED / "corpora" / "tinyshakespeare.txt.gz"
    if play.exists():
        web.content = gzip.decompress(play.read_bytes())
    else:
        lines = (" ".join(r["summary"].split()[:9]) for r in make_records(30_000))
        web.content = "\n".join(lines).encode()
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
