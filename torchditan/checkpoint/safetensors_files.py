# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Safetensors files: written atomically, one tensor at a time; opened with errors that name the cause."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchditan.errors import ConfigError
from torchditan.run.atomic_files import atomic_writer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_BITS = {torch.float32: (torch.int32, "<i4"), torch.bfloat16: (torch.int16, "<i2")}


class TensorToWrite(NamedTuple):
    """One tensor of a file that is being written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """float32 or bfloat16; the result of `read` is converted to it."""
    read: Callable[[], Tensor]
    """Called once, when this tensor is written."""


def write_weights(path: Path, tensors: Iterable[TensorToWrite], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, one tensor after the other.

    Raises:
        OSError: it cannot be written; an existing file is unchanged.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape, dtype, _ in ordered:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _STORED_DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # align the tensors in memory maps
    with atomic_writer(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, dtype, read in ordered:
            tensor = read().to(dtype)
            assert tuple(tensor.shape) == shape, (name, tensor.shape, shape)
            bits, little_endian = _BITS[dtype]
            file.write(tensor.contiguous().flatten().view(bits).numpy().astype(little_endian, copy=False).data)


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise ConfigError(f"{path} is a folder; must be a .safetensors file")
    try:
        path.open("rb").close()  # the library's own errors vary in form
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except SafetensorError:
        kind = other_kind(path)
        if kind is not None:
            raise ConfigError(f"{path} {kind}") from None
        raise ConfigError(f"{path} is not a safetensors file, or is truncated; copy or export it again") from None


_TO_SAFETENSORS = (
    "must be a .safetensors file; if you trust it, read it with torch.load(..., weights_only=True) and write its "
    "tensors with safetensors.torch.save_file"
)
_OTHER_KINDS = (
    (b"PK\x03\x04", f"is a PyTorch file, whose pickle may execute code; {_TO_SAFETENSORS}"),
    (b"\x80", f"is a pickle, which may execute code; {_TO_SAFETENSORS}"),
    (b"GGUF", "is a GGUF file of quantized weights; must be a .safetensors file of floating-point weights"),
    (b"\x89HDF", "is an HDF5 file (Keras); must be a .safetensors file"),
    (b"version https://git-lfs", "is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"),
    (b"<", "is a web page, not weights; download it again, with an access token if its terms ask for one"),
)
"""(first bytes, message) of other files that users pass as safetensors files."""


def is_pickle(path: Path) -> bool:
    """Whether torch.save or pickle wrote a file."""
    kind = other_kind(path)
    return kind is not None and "pickle" in kind


def is_of_diffusers(path: Path) -> bool:
    """Whether a folder is a pipeline or a model that diffusers saved."""
    if (path / "model_index.json").is_file():
        return True
    try:
        content = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "_class_name" in content


def other_kind(path: Path) -> str | None:
    """Message for a file that is not a safetensors file; None if its first bytes are unknown."""
    with path.open("rb") as file:
        start = file.read(32)
    # Some of these could be the size of the header that starts a safetensors file; there, `{` follows.
    if start[8:9] == b"{":
        return None
    return next((text for first, text in _OTHER_KINDS if start.startswith(first)), None)
