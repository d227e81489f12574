# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Finds unreadable image files before training, without decoding the others.

Notable:
- a JPEG, PNG, GIF or WebP is whole if it has its header and its end. A file without them is decoded, because cameras
  append data to JPEGs, which Pillow ignores. Of other formats only the header is read;
- damage in the middle of a file is found when the file is drawn;
- a cache remembers whole files by path, size and time of change, 8 bytes each. A check of a few seconds needs none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchditan.datasets.images import UnreadableError, open_picture
from torchditan.run.atomic_files import write_file

_MARKS = (  # (header, end)
    (b"\xff\xd8\xff", b"\xff\xd9"),
    (b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"),
    (b"GIF8", b";"),
)
_EVERY_S = 5.0
_CACHED_AFTER_S = 2.0


def damage_of(path: str) -> str | None:
    """Why an image file cannot be read; None if it is whole."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(file).st_size
            start, end = os.pread(file, 12, 0), os.pread(file, 12, max(0, size - 12))
        finally:
            os.close(file)
    except OSError as error:
        return error.strerror or str(error)
    return damage_in(path, start=start, end=end, size=size)


def damage_in(source: str | BinaryIO, *, start: bytes, end: bytes, size: int) -> str | None:
    """Why an image cannot be read, from its first and last 12 bytes; it is decoded only if these do not tell."""
    is_marked = any(start.startswith(header) for header, _ in _MARKS) or start[:4] + start[8:] == b"RIFFWEBP"
    if any(start.startswith(header) and end.endswith(mark) for header, mark in _MARKS):
        return None
    if is_marked and start[:4] == b"RIFF" and size >= 8 + int.from_bytes(start[4:8], "little"):
        return None
    try:
        with open_picture(source) as picture:
            if is_marked:
                picture.image.draft(None, (1, 1))  # a JPEG, at an eighth of its size
                picture.image.load()
    except UnreadableError as error:
        return str(error)
    return None


def check_files(paths: Sequence[str], *, cache: Path) -> Iterator[tuple[int, dict[int, str]]]:
    """Yield the number of files checked so far, and the unreadable ones: index -> reason. At the end, and every 5 s.

    Args:
        paths: absolute paths.
        cache: file of the cache, which is updated.
    """
    known = set(np.fromfile(cache, dtype=np.int64).tolist()) if cache.exists() else set()
    damages: dict[int, str] = {}
    whole: list[int] = []
    start = reported = time.monotonic()
    for index, path in enumerate(paths):
        key = _key_of(path)
        damage = None if key in known else damage_of(path)
        if damage is None:
            whole.append(key)
        else:
            damages[index] = damage
        if time.monotonic() - reported > _EVERY_S and index + 1 < len(paths):
            yield index + 1, damages
            reported = time.monotonic()
    if time.monotonic() - start > _CACHED_AFTER_S and not known.issuperset(whole):
        with contextlib.suppress(OSError):  # a full disk; the next start checks again
            write_file(cache, np.array(whole, dtype=np.int64).tobytes())
    yield len(paths), damages


def _key_of(path: str) -> int:
    """63 bits of a checksum of a file's path, size and time of change."""
    try:
        stat = os.stat(path)
    except OSError:
        return -1
    text = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
