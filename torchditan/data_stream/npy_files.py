# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Arrays in .npy format, from strangers. numpy's reader trusts the header's size and fails in many ways."""

from __future__ import annotations

import io
import math
from typing import IO, Any

import numpy as np


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the order is Fortran's, and dtype. The file is then at the first value.

    Raises:
        ValueError: it is not .npy, or the header is damaged.
        OSError: the file cannot be read; an archive has errors of its own (`zipfile.BadZipFile`, `zlib.error`).
    """
    magic = file.read(8)
    if magic[:6] != b"\x93NUMPY" or len(magic) < 8:
        raise ValueError("not an .npy array")
    long_header = magic[6] != 1
    size = int.from_bytes(file.read(4 if long_header else 2), "little")
    header = file.read(min(size, 1 << 16))
    fields = io.BytesIO(len(header).to_bytes(4 if long_header else 2, "little") + header)
    reader = np.lib.format.read_array_header_2_0 if long_header else np.lib.format.read_array_header_1_0
    try:
        shape, is_fortran, dtype = reader(fields)
    except Exception as error:  # of numpy, of the tokenizer that it calls, and of a dtype
        raise ValueError(f"a damaged header: {type(error).__name__}") from error
    if any(type(length) is not int or length < 0 for length in shape):  # numpy takes True for an integer
        raise ValueError(f"a shape of {shape}")
    return shape, is_fortran, dtype


def read_array(data: bytes) -> np.ndarray:
    """The array in a whole file, without a copy.

    Raises:
        ValueError: it is damaged, has fewer values than its header says, or holds Python objects.
    """
    file = io.BytesIO(data)
    shape, is_fortran, dtype = read_header(file)
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or dtype.itemsize == 0 or size != len(data) - file.tell():
        raise ValueError(f"{len(data) - file.tell()} bytes for {list(shape)} {dtype}")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")
