# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Images and reference statistics as ADM's evaluator stores them: `.npz` files, streamed in both directions.

Notable:
- `arr_0` is (N, H, W, 3) uint8; a reference batch may also have `mu` and `sigma` of pool_3, `mu_s` and `sigma_s` of
  the spatial features, of more images than `arr_0` has (Dhariwal & Nichol 2021, github.com/openai/guided-diffusion);
- images are read and written batch by batch: 50,000 of 256 x 256 are 9.2 GiB;
- statistics are those of Inception-2015, unless the file names another extractor in `extractor`.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from torchditan.data_stream.npy_files import read_header
from torchditan.errors import ConfigError
from torchditan.extras.evaluation.distances import Gaussian
from torchditan.run.atomic_files import atomic_writer

INCEPTION = "Inception-2015"
"""The extractor of a file that names none."""
_MOST_BYTES = 8 * 8_192**2
"""Of stored statistics: of 8,192 features in float64. pool_3 has 2,048."""
_DAMAGE = (
    *(OSError, KeyError, TypeError, ValueError, EOFError, RuntimeError, OverflowError, SystemError),
    *(zlib.error, zipfile.BadZipFile),
)
"""What zipfile, numpy and torch raise for a file that is damaged or not an archive."""


def image_shape(path: Path) -> tuple[int, int, int]:
    """(N, H, W) of the images in a file.

    Raises:
        ConfigError: the file holds no `arr_0` of uint8 images.
    """
    with _open_images(path) as (_, shape):
        return shape[:3]


def has_images(path: Path) -> bool:
    """Whether a file has `arr_0`; some files of references have statistics only.

    Raises:
        ConfigError: the file is unreadable.
    """
    with _open(path) as archive:
        return "arr_0.npy" in archive.namelist()


def read_images(path: Path, *, batch_size: int) -> Iterator[Tensor]:
    """The images in order, (B, 3, H, W) uint8; the last batch may be smaller.

    Raises:
        ConfigError: the file holds no `arr_0` of uint8 images, or ends before the last one.
    """
    with _open_images(path) as (file, shape):
        num_images, height, width, channels = shape
        for start in range(0, num_images, batch_size):
            rows = min(batch_size, num_images - start)
            data = bytearray(file.read(rows * height * width * channels))
            images = torch.frombuffer(data, dtype=torch.uint8).view(rows, height, width, channels)
            yield images.permute(0, 3, 1, 2).contiguous()


def write_images(path: Path, batches: Iterable[Tensor], *, shape: tuple[int, int, int]) -> None:
    """Write images as ADM's evaluator reads them; the file appears when it is whole.

    Args:
        batches: (B, 3, H, W) uint8; N images in all.
        shape: (N, H, W).
    """
    num_written = 0
    with atomic_writer(path) as file, zipfile.ZipFile(file, "w") as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as entry:
            header = {"descr": "|u1", "fortran_order": False, "shape": (*shape, 3)}
            np.lib.format.write_array_header_1_0(entry, header)
            for images in batches:
                assert images.dtype == torch.uint8 and images.shape[1:] == (3, *shape[1:]), (images.dtype, images.shape)
                entry.write(images.permute(0, 2, 3, 1).contiguous().cpu().numpy().data)
                num_written += len(images)
        assert num_written == shape[0], (num_written, shape)


def read_statistics(path: Path, *, extractor: str) -> tuple[Gaussian | None, Gaussian | None]:
    """The stored Gaussians of the pooled and of the spatial features, each None where the file has none.

    Args:
        extractor: the one that will see the images to compare.

    Raises:
        ConfigError: the file is unreadable, or its statistics are of another extractor.
    """
    with _open(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
        stored = str(_read_array(archive, "extractor")) if "extractor" in names else INCEPTION
        if "mu" in names and stored != extractor:
            raise ConfigError(f"{path}: its statistics are of {stored}, and this evaluation uses {extractor}")
        pool, spatial = (
            _read_gaussian(archive, mean, covariance) if {mean, covariance} <= names else None
            for mean, covariance in (("mu", "sigma"), ("mu_s", "sigma_s"))
        )
        return pool, spatial


def check_same_size(generated: tuple[int, int], reference: tuple[int, int], *, name: str) -> None:
    """Refuse to compare images of two sizes: a distance would mostly measure the resize.

    Args:
        generated, reference: (H, W).
        name: what the reference is called in the error.

    Raises:
        ConfigError: the sizes differ.
    """
    if generated != reference:
        ours, theirs = (f"{height} x {width}" for height, width in (generated, reference))
        raise ConfigError(f"{name}: images of {theirs} pixels, the generated ones are {ours}; they must be equal")


def _read_gaussian(archive: zipfile.ZipFile, mean: str, covariance: str) -> Gaussian:
    first, second = _read_array(archive, mean), _read_array(archive, covariance)
    if first.ndim != 1 or second.shape != (len(first), len(first)) or not len(first):
        raise ValueError(f"{mean} is {first.shape}, {covariance} is {second.shape}")
    return Gaussian(mean=torch.from_numpy(first).double(), covariance=torch.from_numpy(second).double())


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array of numbers, or a text, of a bounded size."""
    with archive.open(f"{name}.npy") as file:
        shape, is_fortran, dtype = read_header(file)
        size = math.prod(shape) * dtype.itemsize
        if size > _MOST_BYTES or dtype.kind not in "fiuU":
            raise ValueError(f"{name} is {shape} {dtype}")
        array = np.frombuffer(file.read(size), dtype).reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="))


@contextmanager
def _open(path: Path, what: str = "of images or statistics") -> Iterator[zipfile.ZipFile]:
    """Raises ConfigError for a file that is damaged, or not such an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except ConfigError:
        raise
    except _DAMAGE as error:
        raise ConfigError(f"{path}: not an .npz file {what} ({error})") from error


@contextmanager
def _open_images(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, int, int, int]]]:
    """The data of `arr_0`, positioned at the first image, and its shape (N, H, W, 3)."""
    with _open(path, "with images in arr_0") as archive, archive.open("arr_0.npy") as file:
        shape, is_fortran, dtype = read_header(file)
        if len(shape) != 4 or shape[3] != 3 or dtype != np.uint8 or is_fortran:
            raise ConfigError(f"{path}: arr_0 must be (N, H, W, 3) uint8, not {shape} {dtype}")
        yield file, (shape[0], shape[1], shape[2], shape[3])
