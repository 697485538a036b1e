"""Input from the web: a file is downloaded once and kept, data_dir/downloads/NAME-HASH/NAME.

Beside it, NAME.download says where it came from and what its SHA-256 is. The file has its name only
when the last byte has arrived: a download that was interrupted begins anew.
"""

import hashlib
import http.client
import os
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from configurator import UserError, note
from hardware.disk import Lock, file_sha256, json_bytes, remove_only, sealed, unseal, write_whole
from hardware.terminal import ProgressBar
from text.records import printable
from text.sources import UNKNOWN_KIND, kind_of

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


def digest_of(url: str) -> str:
    """Return the SHA-256 of a URL. Its bytes need not be UTF-8: Python has surrogates for these."""
    return hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()


def download_all(inputs: tuple[str, ...], data_dir: Path, kind: str) -> dict[str, Path]:
    """Download those of the --input arguments that are URLs, unless that was done earlier.

    Return URL -> file. kind: of the files; "auto": as the name of each says. Raises UserError if a
    file cannot be downloaded, or is not what was downloaded.
    """
    files = {url: file_of(url, data_dir) for url in inputs if is_url(url)}
    for url, file in files.items():
        if kind == "auto" and not kind_of(file):
            raise UserError(f"--input {without_secrets(url)}: {UNKNOWN_KIND}")
        # An earlier download may be in another user's folder, where nothing can be locked.
        is_kept = os.path.lexists(file)
        sha256 = check_kept(url, file) if is_kept else download(url, file)
        origin = "downloaded earlier" if is_kept else "downloaded"
        size = f"{file.stat().st_size:,} bytes"
        print(f"{without_secrets(url)}: {origin}: {file}, {size}, SHA-256 {sha256}")
    return files


def check_kept(url: str, file: Path) -> str:
    """Return the SHA-256 of a file that was downloaded from this URL.

    Raises UserError if NAME.download does not say so.
    """
    record = file.with_name(f"{file.name}.download")
    try:
        kept = unseal(record)
        sha256 = kept["file_sha256"]
        if kept["url_sha256"] == digest_of(url) and sha256 == file_sha256(file):
            return sha256
        problem = "changed since it was downloaded"
    except (OSError, ValueError, KeyError) as e:
        problem = f"prepare.py did not download it, or {record} was changed ({e})"
    advice = f"move {file.parent} away, or name the file itself as --input"
    raise UserError(f"{file}: {problem}: {advice}")


def download(url: str, file: Path) -> str:
    """Download a file, write NAME.download beside it, and return its SHA-256."""
    lock = Lock(file.parent, "download the file yourself")
    partial = file.with_name(f".{file.name}.tmp")
    digest = hashlib.sha256()
    try:
        partial.unlink(missing_ok=True)  # of a killed process; or a link, which is not followed
        with open(partial, "xb") as f:
            for block in blocks(url):
                f.write(block)
                digest.update(block)
            f.flush()
            os.fsync(f.fileno())
        kept = {"url": without_secrets(url), "url_sha256": digest_of(url)}
        kept |= {"bytes": partial.stat().st_size, "file_sha256": digest.hexdigest()}
        write_whole(file.with_name(f"{file.name}.download"), json_bytes(sealed(kept)))
        partial.rename(file)
        return digest.hexdigest()
    finally:
        partial.unlink(missing_ok=True)
        lock.close()
        remove_only(file.parents[1], ())  # if it is empty, because nothing was downloaded


def blocks(url: str) -> Iterator[bytes]:
    """Yield what the server sends. Raises UserError unless it is the whole file."""
    headers = {"User-Agent": "prepare.py", "Accept-Encoding": "identity"}
    in_ascii = urllib.parse.quote(url, "%/:=&?~#+!$,;'@()*[]", errors="surrogateescape")
    shown = without_secrets(url)
    size = 0
    try:
        request = urllib.request.Request(in_ascii, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            total = response.length
            if response.status != 200 or (total is None and not response.chunked):
                raise ValueError("the server does not say how long the file is")
            if response.headers.get_content_type() == "text/html":
                note(f"{shown}: the server sends a web page; is it the address of the file itself?")
            with ProgressBar("downloading", total=total, unit_scale=True) as bar:
                while block := response.read(1 << 16):
                    size += len(block)
                    yield block
                    bar.update(len(block))
        if total is not None and size < total:
            raise ValueError(f"the connection ended after {size:,} of {total:,} bytes")
    except (OSError, http.client.HTTPException, ValueError) as e:
        reason = printable(" ".join(str(e).split()))  # it may be a text of the server's
        advice = "run the same command again, or download it yourself and give --input FILE"
        raise UserError(f"--input {shown}: not downloaded ({reason}): {advice}") from None
