# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Pictures in one grey, tars of files, and the greys that a dataset shows."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image

Files = dict[str, bytes | str]


def picture(grey: int = 0, *, size: tuple[int, int] = (4, 4), suffix: str = ".png", **options: Any) -> bytes:
    """An image of (height, width) in one grey."""
    buffer = io.BytesIO()
    image = Image.new("RGB", size[::-1], (grey,) * 3)
    image.save(buffer, format=Image.registered_extensions()[suffix], **options)
    return buffer.getvalue()


def as_bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def write(root: Path, files: Files) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(as_bytes(content))
    return root


def tar(files: Files, *, format: int = tarfile.PAX_FORMAT) -> bytes:
    """With times of fractions of a second, as the package webdataset writes it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(as_bytes(content)), 1.5
            archive.addfile(info, io.BytesIO(as_bytes(content)))
    return buffer.getvalue()


def write_tar(path: Path, files: Files, **options: int) -> Path:
    write(path.parent, {path.name: tar(files, **options)})
    return path


def greys(dataset: Any) -> list[int]:
    return [round((dataset[i]["sample"].flatten()[0].item() + 1) * 127.5) for i in range(len(dataset))]
