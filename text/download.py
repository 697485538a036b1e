"""Input from the web: a file is downloaded once and kept, data_dir/downloads/NAME-HASH/NAME.

Beside it, NAME.download says where it came from and what its SHA-256 is. Until the last byte has
arrived the file is called NAME.part. If a download was interrupted, the next one continues it,
provided that the server still has the same file and can send a part of it.
"""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

from configurator import UserError, note
from hardware.disk import (
    Lock,
    file_sha256,
    json_bytes,
    remove_only,
    sealed,
    sync_to_disk,
    unseal,
    write_whole,
)
from hardware.terminal import ProgressBar
from text.records import printable
from text.sources import EXPECTED, kind_of

TIMEOUT = 30  # seconds that a server may be silent


def is_url(argument: str) -> bool:
    return re.match(r"\w+://", argument) is not None


def without_secrets(url: str) -> str:
    """Return a URL without user, password, query and fragment, which may hold a key.

    Only this form is written to a file or printed: a checkpoint has a copy of meta.json, and people
    publish checkpoints.
    """
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


def named(url: str) -> str:
    return f"--input {without_secrets(url)}"


def digest_of(url: str) -> str:
    """Return the SHA-256 of a URL. Its bytes need not be UTF-8: Python has surrogates for these."""
    return hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()


def file_of(url: str, data_dir: Path) -> Path:
    """Return the path of the file in which a URL is kept, whether or not it has been downloaded.

    Raises UserError if it is not the URL of a file that can be downloaded.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        # The port raises ValueError if it is no number, but a part of a password.
        usable = parts.scheme in ("http", "https") and "@" not in parts.netloc and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        shown = re.split("[?#]", url.rpartition("@")[2])[0]
        expected = "expected http:// or https://, a host without user and password, and a file"
        raise UserError(f"--input {shown}: {expected}")
    path = urllib.parse.unquote(parts.path)
    name = re.sub(r"[^\w.-]+", "_", path.rstrip("/").rpartition("/")[2])[-60:].lstrip(".")
    name = name or "index"
    return data_dir / "downloads" / f"{name.partition('.')[0]}-{digest_of(url)[:8]}" / name


def download_all(inputs: tuple[str, ...], data_dir: Path, kind: str) -> dict[str, Path]:
    """Download those of the --input arguments that are URLs. Return URL -> file."""
    files = {url: file_of(url, data_dir) for url in inputs if is_url(url)}
    for url, file in files.items():
        download(url, file, kind)
    return files


def download(url: str, file: Path, kind: str) -> None:
    """Make sure that `file` holds what the server sent for the URL, complete and unchanged.

    file: the result of file_of(). kind: of the file; "auto": as its name says. Raises UserError if
    it cannot be downloaded, or is not what was downloaded.
    """
    if kind == "auto" and not kind_of(file):
        wanted = f"expected {EXPECTED}, or give --format=KIND"
        raise UserError(f"{named(url)}: unknown kind of file; {wanted}")
    if (file.parents[1] / "meta.json").exists():
        what = f"{file.parents[1]} is a data set, but downloads belong there"
        raise UserError(f"{named(url)}: {what}: choose another --data_dir")
    # A file that is complete may be in another user's folder, where nothing can be locked.
    held = None if os.path.lexists(file) else Lock(file.parent, "download the file yourself")
    try:
        known = known_state(url, file)
        if os.path.lexists(file):
            if file_sha256(file) != known.get("file_sha256"):
                advice = f"move {file.parent} away, or name the file itself as --input"
                raise UserError(f"{file}: changed since it was downloaded: {advice}")
            how = "downloaded earlier"
        else:
            known = fetch(url, file, known)
            how = "downloaded"
    finally:
        if held:
            held.close()
            remove_only(file.parents[1], ())  # if it is empty, because nothing was downloaded
    size = f"{known['bytes']:,} bytes, SHA-256 {known['file_sha256']}"
    print(f"{without_secrets(url)}: {how}: {file}, {size}")


def beside(file: Path) -> tuple[Path, Path]:
    """Return the paths of NAME.part and NAME.download."""
    return file.with_name(f"{file.name}.part"), file.with_name(f"{file.name}.download")


def known_state(url: str, file: Path) -> dict:
    """Return the content of NAME.download, {} if no download has begun.

    It has the url without secrets, the SHA-256 of all of it, the version that the server names, the
    bytes (None: unknown) and, at the end, the file_sha256. Raises UserError if prepare.py did not
    write the files that are there.
    """
    part, about = beside(file)
    for path in (file, part):
        if os.path.lexists(path) and not about.exists() or path == part and path.is_symlink():
            what = "is where a download belongs, but prepare.py did not write it"
            raise UserError(f"{path} {what}: move it away")
    if not about.exists():
        return {}
    try:
        known = unseal(about)
        if known["url_sha256"] == digest_of(url):
            return known
        why = f"it is of {known['url']}"
    except (OSError, ValueError, KeyError) as e:
        why = str(e)
    raise UserError(f"{about}: damaged ({why}): move {file.parent} away")


def fetch(url: str, file: Path, known: dict) -> dict:
    """Download the file, or the rest of it, and return its state. known: the state before."""
    part, about = beside(file)
    begin = 0
    if part.exists() and known["version"] and known["bytes"]:
        begin = part.stat().st_size
    if begin == 0 or begin != known["bytes"]:  # else it was killed before it gave the file its name
        with open_at(url, begin, known) as response:
            if response.status == 200:
                begin = 0
                part.unlink(missing_ok=True)  # before `about` says that it is of the new version
                version = version_of(response.headers)
                known = {"url": without_secrets(url), "version": version, "bytes": response.length}
                known["url_sha256"] = digest_of(url)
                write_whole(about, json_bytes(sealed(known)))
            receive(response, url, part, begin, known["bytes"])
    sync_to_disk(part)
    known |= {"bytes": part.stat().st_size, "file_sha256": file_sha256(part)}
    write_whole(about, json_bytes(sealed(known)))
    part.rename(file)
    return known


def version_of(headers: Message) -> str:
    """Return what the server calls this version of the file, "" if it says nothing that is sure.

    A weak ETag (W/...) may stay the same although bytes change.
    """
    etag = headers.get("ETag", "")
    return etag if etag.startswith('"') else headers.get("Last-Modified", "")


def open_at(url: str, begin: int, known: dict) -> http.client.HTTPResponse:
    """Return the server's response: with the status 206, the file from byte `begin` on.

    With the status 200, it is the whole file: begin is 0, or the server cannot send a part of a
    file, or it has another version now. Raises UserError if a part could be taken for the whole.
    """
    if begin:
        response = ask(url, {"Range": f"bytes={begin}-", "If-Range": known["version"]})
        wanted = f"bytes {begin}-{known['bytes'] - 1}/{known['bytes']}"
        fits = response.headers.get("Content-Range") == wanted
        same = version_of(response.headers) in ("", known["version"])
        if response.status == 200 or (response.status == 206 and fits and same):
            return response
        response.close()
    response = ask(url, {})
    if response.status != 200 or (response.length is None and not response.chunked):
        response.close()
        why = "the server does not say how long the file is, or sends only a part of it"
        raise UserError(f"{named(url)}: {why}: download it yourself")
    if response.headers.get_content_type() == "text/html":
        note(f"{named(url)}: the server sends a web page; is it the address of the file itself?")
    return response


def ask(url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Send a request and return the response: its status is 2xx, or 416 for an impossible range."""
    headers = {"User-Agent": "prepare.py", "Accept-Encoding": "identity"} | headers
    in_ascii = urllib.parse.quote(url, "%/:=&?~#+!$,;'@()*[]", errors="surrogateescape")
    try:
        request = urllib.request.Request(in_ascii, headers=headers)
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except (OSError, http.client.HTTPException, ValueError) as e:
        what = "cannot be downloaded (or give --input FILE, which came in another way):"
        if isinstance(e, urllib.error.HTTPError):
            if e.code == 416:
                return e
            what = f"the server answers {e.code}"
        why = " ".join(str(getattr(e, "reason", e)).split())  # it may be a text of the server's
        raise UserError(f"{named(url)}: {what} {printable(why)}") from None


def receive(
    response: http.client.HTTPResponse, url: str, part: Path, begin: int, total: int | None
) -> None:
    """Write what the server sends to the file `part`, from byte `begin` on.

    Raises UserError if the connection ends before the file does.
    """
    bar = ProgressBar("downloading", total=total, initial=begin, unit_scale=True)
    with open(part, "ab" if begin else "xb") as f, bar:
        for data in blocks(response, url):
            f.write(data)
            bar.update(len(data))
        size = f.tell()
    if total is not None and size < total:
        what = f"the connection ended after {size:,} of {total:,} bytes"
        raise UserError(f"{named(url)}: {what}: run the same command again")


def blocks(response: http.client.HTTPResponse, url: str) -> Iterator[bytes]:
    """Yield the bytes that the server sends."""
    try:
        while data := response.read(1 << 16):
            yield data
    except (OSError, http.client.HTTPException) as e:
        what = f"the connection broke ({e})"
        raise UserError(f"{named(url)}: {what}: run the same command again") from None
