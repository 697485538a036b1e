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
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from configurator import UserError, note
from hardware.disk import Lock, file_sha256, json_bytes, read_object, sync_to_disk, write_whole
from hardware.terminal import ProgressBar
from text.records import printable
from text.sources import UNKNOWN_KIND, kind_of

TIMEOUT = 30  # seconds that a server may be silent

# The second group is the path. A host with user and password does not match: neither may be stored.
URL = re.compile(r"https?://([\w.-]+|\[[\da-f:.]+\])(?::\d+)?(/[^?#]*)?([?#].*)?", re.IGNORECASE)


def is_url(argument: str) -> bool:
    return re.match(r"\w+://", argument) is not None


def without_secrets(url: str) -> str:
    """Return a URL without user, password, query and fragment, which may hold a key.

    Only this form is written to a file or printed: a checkpoint has a copy of meta.json, and people
    publish checkpoints.
    """
    return re.split("[?#]", url)[0]


def file_of(url: str, data_dir: Path) -> Path:
    """Return the path of the file in which a URL is kept, whether or not it has been downloaded.

    Raises UserError if it is not the URL of a file that can be downloaded.
    """
    parts = URL.fullmatch(url)
    if not parts:
        shown = without_secrets(url.rpartition("@")[2])
        expected = "expected http:// or https://, a host without user and password, and a file"
        raise UserError(f"--input {shown}: {expected}")
    path = urllib.parse.unquote(parts[2] or "")
    name = re.sub(r"[^\w.-]+", "_", path.rstrip("/").rpartition("/")[2])[-60:].lstrip(".")
    name = name or "index"
    # The bytes of a URL need not be UTF-8: Python has surrogates for these.
    digest = hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()
    return data_dir / "downloads" / f"{name.partition('.')[0]}-{digest[:8]}" / name


def download_all(inputs: tuple[str, ...], data_dir: Path, kind: str) -> dict[str, Path]:
    """Download those of the --input arguments that are URLs, unless that was done earlier.

    Return URL -> file. kind: of the files; "auto": as the name of each says. Raises UserError if a
    file cannot be downloaded, or is not what was downloaded.
    """
    files = {url: file_of(url, data_dir) for url in inputs if is_url(url)}
    for url, file in files.items():
        shown = without_secrets(url)
        if kind == "auto" and not kind_of(file):
            raise UserError(f"--input {shown}: {UNKNOWN_KIND}")
        # An earlier download may be in another user's folder, where nothing can be locked.
        sha256 = check_kept(file) if os.path.lexists(file) else download(url, file)
        print(f"{shown}: downloaded: {file}, {file.stat().st_size:,} bytes, SHA-256 {sha256}")
    return files


def check_kept(file: Path) -> str:
    """Return the SHA-256 of a file that was downloaded earlier.

    Raises UserError if NAME.download does not say so.
    """
    record = file.with_name(f"{file.name}.download")
    with suppress(OSError, ValueError, KeyError):
        sha256 = file_sha256(file)
        if read_object(record)["file_sha256"] == sha256:
            return sha256
    advice = f"move {file.parent} away, or name the file itself as --input"
    raise UserError(f"{file}: not the file that {record} describes: {advice}")


def download(url: str, file: Path) -> str:
    """Download a file, write NAME.download beside it, and return its SHA-256."""
    lock = Lock(file.parent, "download the file yourself")
    partial = file.with_name(f".{file.name}.tmp")
    try:
        partial.unlink(missing_ok=True)  # of a killed process; or a link, which is not followed
        with open(partial, "xb") as f:
            receive(url, f)
        sync_to_disk(partial)
        sha256 = file_sha256(partial)
        origin = {"url": without_secrets(url), "file_sha256": sha256}
        write_whole(file.with_name(f"{file.name}.download"), json_bytes(origin))
        partial.rename(file)
        return sha256
    finally:
        partial.unlink(missing_ok=True)
        lock.close()


def receive(url: str, f: BinaryIO) -> None:
    """Write what the server sends into a file. Raises UserError unless it is the whole file."""
    in_ascii = urllib.parse.quote(url, "%/:=&?~#+!$,;'@()*[]", errors="surrogateescape")
    shown = without_secrets(url)
    try:
        request = urllib.request.Request(in_ascii, headers={"User-Agent": "prepare.py"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            total = response.length
            if total is None and not response.chunked:
                raise ValueError("the server does not say how long the file is")
            if response.headers.get_content_type() == "text/html":
                note(f"{shown}: the server sends a web page; is it the address of the file itself?")
            with ProgressBar("downloading", total=total, unit_scale=True) as bar:
                while block := response.read(1 << 16):
                    f.write(block)
                    bar.update(len(block))
        if total is not None and f.tell() < total:
            raise ValueError(f"the connection ended after {f.tell():,} of {total:,} bytes")
    except (OSError, http.client.HTTPException, ValueError) as e:
        reason = printable(" ".join(str(e).split()))  # it may be a text of the server's
        advice = "run the same command again, or download it yourself and give --input FILE"
        raise UserError(f"--input {shown}: not downloaded ({reason}): {advice}") from None
