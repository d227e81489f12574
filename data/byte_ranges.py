# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Parts of a file as a file: a picture without its metadata, or a member of a tar."""

from __future__ import annotations

import bisect
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

ReadAt = Callable[[int, int], bytes]
"""(offset, count) -> bytes; fewer at the end of the file."""


class ByteRanges:
    """Parts of a file (start, end), and bytes in place of others, read as one file.

    It never asks for more bytes than are left: Python reserves what a damaged picture asks for, up to 4 GiB.
    """

    def __init__(self, read_at: ReadAt, parts: Sequence[tuple[int, int] | bytes], *, close: Any = None) -> None:
        self._read_at = read_at
        self._close = close
        lengths = [len(part) if isinstance(part, bytes) else part[1] - part[0] for part in parts]
        self._parts = [part for part, length in zip(parts, lengths, strict=True) if length > 0]
        ends = list(itertools.accumulate(length for length in lengths if length > 0))
        self._starts = [0, *ends][:-1]
        self._size = ends[-1] if ends else 0
        self._place = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence])
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self._size - self._place)
        left = left if count is None or count < 0 else min(count, left)
        data = self._read_part(left) if left else b""
        if len(data) == left:
            return data
        found = [data]
        while data and (left := left - len(data)):  # no data: the file became shorter
            data = self._read_part(left)
            found.append(data)
        return b"".join(found)

    def _read_part(self, left: int) -> bytes:
        """Bytes from here to the end of the part, at most `left`."""
        number = bisect.bisect_right(self._starts, self._place) - 1
        part, offset = self._parts[number], self._place - self._starts[number]
        if isinstance(part, bytes):
            data = part[offset : offset + left]
        else:
            data = self._read_at(part[0] + offset, min(left, part[1] - part[0] - offset))
        self._place += len(data)
        return data

    def close(self) -> None:
        if self._close is not None:
            self._close()
            self._close = None

    def __enter__(self) -> ByteRanges:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def reading(file: BinaryIO) -> ReadAt:
    """Reads an open file."""

    def read_at(offset: int, count: int) -> bytes:
        file.seek(offset)
        return file.read(count)

    return read_at
