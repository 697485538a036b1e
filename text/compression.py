"""The decompressed bytes of a file, and the packages that reading one needs."""

import bz2
import gzip
import importlib
import io
import lzma
import re
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType

from configurator import UserError

SUFFIXES = (".gz", ".xz", ".bz2", ".zst")  # of compressed files
Stream = io.BufferedReader | gzip.GzipFile
BLOCK = 1 << 18  # bytes that are unpacked at a time


class Unpacked(io.RawIOBase):
    """The decompressed bytes of a file of one or several streams, as `cat a.xz b.xz` makes it.

    BZ2File and LZMAFile would end without an error where a later stream is damaged.
    """

    def __init__(self, raw: io.BufferedReader, decompressor: Callable):
        self.raw = raw
        self.decompressor = decompressor
        self.stream = decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while True:
            packed = b""
            if self.stream.eof:  # zeros may stand between streams of .xz
                packed = self.stream.unused_data.lstrip(b"\0") or self.raw.read(BLOCK).lstrip(b"\0")
                if not packed:
                    return 0
                self.stream = self.decompressor()
            elif self.stream.needs_input and not (packed := self.raw.read(BLOCK)):
                raise EOFError("its end is missing")
            if data := self.stream.decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)


def decompressed(raw: io.BufferedReader, name: str) -> Stream:
    """Return a stream of the decompressed bytes of `raw`; `raw` itself if it is not compressed.

    The first bytes of the file decide, since a file may have been renamed. name: of the file, for
    messages.
    """
    head = raw.peek(10)
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if head.startswith(b"\xfd7zXZ\x00"):
        return io.BufferedReader(Unpacked(raw, lzma.LZMADecompressor))
    if re.match(rb"BZh[1-9]1AY&SY", head):
        return io.BufferedReader(Unpacked(raw, bz2.BZ2Decompressor))
    # The second is a skippable frame, as pzstd writes first; 31 is for zstd --ultra --long=31.
    if re.match(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", head):
        zstd = import_for(name, "backports.zstd", "compression.zstd", "backports.zstd")
        return zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: 31})
    return raw


def import_for(name: str, package: str, *modules: str) -> ModuleType:
    """Return the first of these modules that is installed, to read the file `name`.

    Raises UserError, which names `package`, if none is installed.
    """
    for module in modules:
        with suppress(ImportError):
            return importlib.import_module(module)
    raise UserError(f"{name}: reading it needs {package}: pip install {package}")
