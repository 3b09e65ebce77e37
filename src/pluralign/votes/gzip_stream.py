"""Gzip streams: every byte before a damage is read, and data that expands too much is refused."""

import io
import zlib
from typing import IO, Any

from pluralign.core.errors import DataError

CHUNK = 2**16
FREE_BYTES = 2**26
"""The ratio of expansion counts only after this many bytes of text: short files of repeated rows are harmless."""
_GZIP = zlib.MAX_WBITS | 16


class GzipReader(io.RawIOBase):
    """Decompresses a gzip stream of one or more members.

    ``gzip.GzipFile`` drops up to a chunk of intact data before a damage. Here all intact data is returned, and then
    ``EOFError`` is raised.
    """

    def __init__(self, compressed: IO[bytes], file: str, max_expansion: int) -> None:
        self._compressed, self._file, self._max_expansion = compressed, file, max_expansion
        self._decoder = zlib.decompressobj(_GZIP)
        self._input = b""
        self._output = memoryview(b"")
        self._read = self._written = 0
        self._damaged = self._ended = False

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with text, as far as there is some."""
        while not self._output and not self._ended:
            if self._damaged:
                raise EOFError
            self._output = memoryview(self._next(len(buffer)))
            self._written += len(self._output)
            if self._written > max(FREE_BYTES, self._max_expansion * self._read):
                raise DataError(
                    f"the gzip data expands to more than {self._max_expansion} times its size",
                    file=self._file,
                    remedy="use --max-expansion if you trust the file",
                )
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _next(self, size: int) -> bytes:
        """Return the next text, about ``size`` bytes of it; perhaps none yet."""
        if not self._input:
            self._input = self._compressed.read(CHUNK)
            self._read += len(self._input)
            if not self._input:
                self._ended = self._decoder.eof
                self._damaged = not self._ended
                return b""
        if self._decoder.eof:
            self._input = self._input.lstrip(b"\0")  # members may be padded
            if not self._input:
                return b""
            self._decoder = zlib.decompressobj(_GZIP)
        before = self._decoder.copy()
        try:
            text = self._decoder.decompress(self._input, size)
        except zlib.error:
            self._damaged = True
            return _intact(before, self._input)
        self._input = self._decoder.unconsumed_tail or self._decoder.unused_data
        return text


def _intact(decoder: Any, data: bytes) -> bytes:
    """Return the text of the bytes before the one that cannot be decompressed."""
    text = []
    for position in range(len(data)):
        try:
            text.append(decoder.decompress(data[position : position + 1]))
        except zlib.error:
            break
    return b"".join(text)
