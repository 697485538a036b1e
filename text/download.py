"""Input from the web: a file is downloaded once and kept, data_dir/downloads/NAME-HASH/NAME.

Beside it, NAME.download says where it came from and what its SHA-256 is. The file has its name only
when the last byte has arrived: a download that was interrupted begins anew.
"""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from configurator import UserError, note
from hardware.disk import (
    Lock,
    file_sha256,
    json_bytes,
    remove_only,
    sealed,
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
        problem = f"{file.parents[1]} is a data set, but downloads belong there"
        raise UserError(f"{named(url)}: {problem}: choose another --data_dir")
    about = file.with_name(f"{file.name}.download")
    if os.path.lexists(file):  # perhaps in another user's folder, where nothing can be locked
        kept = check_kept(url, file, about)
        print_kept(url, file, kept, "downloaded earlier")
        return
    held = Lock(file.parent, "download the file yourself")
    try:
        kept = fetch(url, file, about)
        print_kept(url, file, kept, "downloaded")
    finally:
        held.close()
        remove_only(file.parents[1], ())  # if it is empty, because nothing was downloaded


def print_kept(url: str, file: Path, kept: dict, how: str) -> None:
    size = f"{kept['bytes']:,} bytes, SHA-256 {kept['file_sha256']}"
    print(f"{without_secrets(url)}: {how}: {file}, {size}")


def check_kept(url: str, file: Path, about: Path) -> dict:
    """Return what NAME.download says of the file.

    Raises UserError if the file is not what was downloaded from this URL.
    """
    try:
        kept = unseal(about)
        if kept["url_sha256"] == digest_of(url) and kept["file_sha256"] == file_sha256(file):
            return kept
        problem = "changed since it was downloaded"
    except (OSError, ValueError, KeyError) as e:
        problem = f"prepare.py did not download it, or {about} was changed ({e})"
    advice = f"move {file.parent} away, or name the file itself as --input"
    raise UserError(f"{file}: {problem}: {advice}")


def fetch(url: str, file: Path, about: Path) -> dict:
    """Download the file, and return what NAME.download says of it."""
    aside = file.with_name(f".{file.name}.tmp")
    aside.unlink(missing_ok=True)  # of a killed process; or a link, which is not to be followed
    digest = hashlib.sha256()
    try:
        with ask(url) as response, open(aside, "xb") as f:
            bar = ProgressBar("downloading", total=response.length, unit_scale=True)
            with bar:
                for data in blocks(response, url):
                    f.write(data)
                    digest.update(data)
                    bar.update(len(data))
            f.flush()
            os.fsync(f.fileno())
            size = f.tell()
        kept = {"url": without_secrets(url), "url_sha256": digest_of(url), "bytes": size}
        kept |= {"file_sha256": digest.hexdigest()}
        write_whole(about, json_bytes(sealed(kept)))
        aside.rename(file)
        return kept
    finally:
        aside.unlink(missing_ok=True)


def ask(url: str) -> http.client.HTTPResponse:
    """Return the server's response. Raises UserError if it may be only a part of the file."""
    headers = {"User-Agent": "prepare.py", "Accept-Encoding": "identity"}
    in_ascii = urllib.parse.quote(url, "%/:=&?~#+!$,;'@()*[]", errors="surrogateescape")
    try:
        request = urllib.request.Request(in_ascii, headers=headers)
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except (OSError, http.client.HTTPException, ValueError) as e:
        problem = "cannot be downloaded (or give --input FILE, which came in another way):"
        if isinstance(e, urllib.error.HTTPError):
            problem = f"the server answers {e.code}"
        why = " ".join(str(getattr(e, "reason", e)).split())  # it may be a text of the server's
        raise UserError(f"{named(url)}: {problem} {printable(why)}") from None
    if response.status != 200 or (response.length is None and not response.chunked):
        response.close()
        problem = "the server does not say how long the file is, or sends only a part of it"
        raise UserError(f"{named(url)}: {problem}: download it yourself")
    if response.headers.get_content_type() == "text/html":
        note(f"{named(url)}: the server sends a web page; is it the address of the file itself?")
    return response


def blocks(response: http.client.HTTPResponse, url: str) -> Iterator[bytes]:
    """Yield what the server sends. Raises UserError if the connection ends before the file does."""
    total = response.length
    size = 0
    try:
        while data := response.read(1 << 16):
            size += len(data)
            yield data
    except (OSError, http.client.HTTPException) as e:
        problem = f"the connection broke ({e})"
        raise UserError(f"{named(url)}: {problem}: run the same command again") from None
    if total is not None and size < total:
        problem = f"the connection ended after {size:,} of {total:,} bytes"
        raise UserError(f"{named(url)}: {problem}: run the same command again")
