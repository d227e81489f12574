# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encoded latents on disk: a folder of safetensors shards with an index, read through memory maps.

Notable:
- a folder contains `index.json` (see latent_index.py), `labels.npy` and the shards. extras/latents/encoding.py
  writes them, and the index last, so a folder with an index is complete;
- a shard contains `latents` (n, C, h, w), the posterior mean BEFORE normalisation, as bf16, or as int8 with a factor
  `scale` (C,). Optional tensors are `latents_flipped` of the mirrored images, `logvar`, `logvar_flipped` and `images`
  (n, C, H, W) uint8, which are mirrored when they are read. `labels` and `index` give the label and the number of each
  source image;
- opening checks the size of every shard and reads no content. Nothing is kept per sample: labels and latents stay in
  the page cache, which all processes share;
- with `--format webdataset` a shard is a tar: `000000012.safetensors` has the tensors of one image, `000000012.cls` its
  label. All members of a tar have the same layout, so its rows are found without reading their headers;
- a batch is copied row by row into one tensor in the stored format. `to_sample` converts it to normalised float32
  latents on the training device;
- the public ImageNet file `imagenet_ci8x8.safetensors` is one shard without an index, and is read by the same class.
"""

from __future__ import annotations

import json
import math
import mmap
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchditan.checkpoint.safetensors_files import other_kind
from torchditan.data_stream import npy_files
from torchditan.data_stream.latent_index import (
    REPAIR,
    LatentIndex,
    ShardRecord,
    channel_sums,
    mean_and_std,
    read_index,
    standardizing,
)
from torchditan.errors import ConfigError, option_error

LABELS_FILE = "labels.npy"
PUBLIC_SCALE = 16 / 255
"""Scale of the int8 latents in the public file, the same for all channels."""

_STORED_DTYPES = {"bf16": ("BF16", torch.bfloat16), "int8": ("I8", torch.int8)}
_SAFETENSORS_DTYPES = {"BF16": "<u2", "F32": "<f4", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U8": "u1"}
_UNPARSABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_LOGVAR_RANGE = (-30.0, 20.0)
_PUBLIC_SAMPLES = 4096
_SPARE_FILES = 256


class TensorPlace(NamedTuple):
    """Position of a tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    end: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """The tensors of a safetensors file by name. The format is a length of eight bytes, JSON, and the tensor bytes.

    Raises:
        ConfigError: it is not a complete safetensors file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        first = 8 + length
        places = {name: _place(entry, first=first) for name, entry in header.items()}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except _UNPARSABLE:
        kind = other_kind(path) or "is not a safetensors file"
        raise ConfigError(f"{path} {kind}") from None
    end = max((place.end for place in places.values()), default=first)
    if end > size:
        raise ConfigError(f"{path} is truncated: it has {size} bytes, and should have {end}")
    return places


def _place(entry: dict[str, Any], *, first: int) -> TensorPlace:
    """Parse an entry of a header; ValueError if its byte range does not match its shape."""
    start, end = (first + int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(side) for side in entry["shape"])
    dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])  # tensors with other dtypes are not read
    fits = dtype is None or end - start == math.prod(shape) * np.dtype(dtype).itemsize
    if not first <= start <= end or min(shape, default=0) < 0 or not fits:
        raise ValueError(f"{shape} from {start} to {end}")
    return TensorPlace(entry["dtype"], shape, start, end)


class MappedFile:
    """A safetensors file as read-only arrays over one memory map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places = read_header(path)
        self._bytes = _map_bytes(path)

    def array(self, name: str) -> np.ndarray:
        """The whole tensor; bf16 as uint16, because numpy has no bfloat16."""
        place = self.places[name]
        dtype = np.dtype(_SAFETENSORS_DTYPES[place.dtype])
        return self._bytes[place.start : place.end].view(dtype).reshape(place.shape)

    def rows(self, name: str) -> np.ndarray:
        """The tensor as (n, bytes per row) uint8."""
        place = self.places[name]
        return self._bytes[place.start : place.end].reshape(place.shape[0], -1)


class MappedTar(MappedFile):
    """A tar of samples of equal sizes, as extras/latents/writer.py writes it, read as one safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map_bytes(path)
        self._num, self._has_labels = 0, False
        self._inside: dict[str, TensorPlace] = {}
        try:
            if self._bytes[0]:  # not empty: the end of a tar is zeros
                self._find_samples()
        except (*_UNPARSABLE, IndexError):
            raise ConfigError(f"{path} is not a tar of latents of one shape; {REPAIR}") from None
        self.places = {
            name: place if name == "scale" else place._replace(shape=(self._num, *place.shape))
            for name, place in self._inside.items()
        }

    def _find_samples(self) -> None:
        """Find them by their distance, that of the first two, and compare their headers."""
        blocks = self._bytes[: self._bytes.size // 512 * 512].reshape(-1, 512)
        second = 1 + -(-int(bytes(blocks[0, 124:135]), 8) // 512)  # block of the header after the first sample
        self._has_labels = bytes(blocks[second, :100]).rstrip(b"\0").endswith(b".cls")
        self._stride = 512 * (second + 2 * self._has_labels)
        self._num = int(np.argmin(blocks[:: self._stride // 512, 0]))
        start = 512 + 8 + int.from_bytes(bytes(blocks[1, :8]), "little")
        header = json.loads(bytes(self._bytes[512 + 8 : start]))
        header.pop("__metadata__", None)
        self._inside = {name: _place(entry, first=start) for name, entry in header.items()}
        headers = self._strided(0, start)
        if (headers[:, 124:136] != headers[0, 124:136]).any() or (headers[:, 512:] != headers[0, 512:]).any():
            raise ValueError(header)

    def _strided(self, start: int, end: int) -> np.ndarray:
        """(samples, end - start) uint8: these bytes of each sample, counted from its tar header."""
        shape, strides = (self._num, end - start), (self._stride, 1)
        return np.ndarray(shape, np.uint8, self._bytes, offset=start, strides=strides)

    def rows(self, name: str) -> np.ndarray:
        return self._strided(self._inside[name].start, self._inside[name].end)

    def array(self, name: str) -> np.ndarray:
        """`labels` (n,), or the `scale` (C,) that the samples share."""
        if name == "scale":
            return self.rows(name)[0].copy().view(_SAFETENSORS_DTYPES[self._inside[name].dtype])
        texts = self._strided(self._stride - 512, self._stride) if self._has_labels else ()
        return np.array([int(bytes(text).rstrip(b"\0")) for text in texts], dtype=np.int64)


def map_shard(path: Path) -> MappedFile:
    """A shard of a folder, in either format."""
    return MappedTar(path) if path.suffix == ".tar" else MappedFile(path)


def _map_bytes(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # otherwise each cold row also reads its neighbours, up to 8 MB on cloud disks
    return np.frombuffer(mapped, dtype=np.uint8)


class LatentShards:
    """Random access to the latents of one folder, or of the public file."""

    def __init__(
        self, path: Path, index: LatentIndex, *, labels: np.ndarray | None, constant_scale: float | None = None
    ) -> None:
        self.path = path
        self.index = index
        self.labels = labels
        """(N,) integers, memory-mapped; None if the latents have no labels."""
        self._folder = path.parent if constant_scale is not None else path
        self._constant_scale = constant_scale
        counts = [shard.num_images for shard in index.shards]
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._files: list[MappedFile | None] = [None] * len(counts)
        self._scales = np.zeros((len(counts), index.latent_shape[0]), dtype=np.float32)
        """(shards, C), filled in for the shards mapped so far."""
        _allow_open_files(len(counts))

    @classmethod
    def open(cls, path: str | Path) -> LatentShards:
        """Open a folder that extras/latents/encoding.py finished, or the public file.

        Raises:
            ConfigError: it has no latents, was written by a newer version, or a shard is missing or truncated.
        """
        path = Path(path)
        if path.is_file():
            return _open_public(path)
        index = read_index(path)
        problem = next(iter(size_problems(path, index)), None)
        if problem is not None:
            raise option_error("dataset.root_dir", str(path), f"{problem}; {REPAIR}")
        return cls(path, index, labels=map_labels(path) if index.class_names else None)

    def __reduce__(self) -> Any:
        # A loader worker that is not forked reopens the files, because pickled maps would copy all latents.
        return LatentShards.open, (self.path,)

    def __len__(self) -> int:
        return self.index.num_images

    def read(
        self, indices: np.ndarray, flips: np.ndarray, *, with_logvar: bool = False, with_image: bool = False
    ) -> dict[str, Tensor]:
        """Read latents in their stored format, for `to_sample`.

        Args:
            indices: (B,) in [0, len).
            flips: (B,) bool, whether to read the mirrored image; all False if none are stored.
            with_logvar: also read the log-variance.
            with_image: also read the image.

        Returns:
            `latent` (B, C, h, w) bfloat16 or int8; with int8 also `latent_scale` (B, C) float32; `logvar` (B, C, h, w)
            bfloat16; `image` (B, C, H, W) uint8.

        Raises:
            ConfigError: a shard does not match the index.
        """
        assert self.index.flipped or not flips.any(), "no mirrored latents are stored"
        assert self.index.posterior or not with_logvar, "no log-variance is stored"
        shards = np.searchsorted(self._ends, indices, side="right")
        rows = indices - self._starts[shards]
        places = list(zip(shards.tolist(), rows.tolist(), flips.tolist(), strict=True))
        batch = {"latent": self._gather("latents", places, _STORED_DTYPES[self.index.dtype][1])}
        if self.index.dtype == "int8":
            batch["latent_scale"] = torch.from_numpy(self._scales[shards])  # (B, C)
        if with_logvar:
            batch["logvar"] = self._gather("logvar", places, torch.bfloat16)
        if with_image:
            as_encoded = [(shard, row, False) for shard, row, _ in places]
            batch["image"] = self._gather("images", as_encoded, torch.uint8, self.index.image_shape)
            mirrored = torch.from_numpy(flips)
            batch["image"][mirrored] = batch["image"][mirrored].flip(-1)
        return batch

    def _gather(
        self,
        name: str,
        places: list[tuple[int, int, bool]],
        dtype: torch.dtype,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        gathered = torch.empty(len(places), *(shape or self.index.latent_shape), dtype=dtype)
        target = gathered.view(torch.uint8).numpy().reshape(len(places), -1)  # (B, bytes per row)
        sources = {
            (shard, flip): self._file(shard).rows(f"{name}_flipped" if flip else name)
            for shard, flip in {(shard, flip) for shard, _, flip in places}
        }
        for position, (shard, row, flip) in enumerate(places):
            target[position] = sources[shard, flip][row]
        return gathered

    def _file(self, shard: int) -> MappedFile:
        """A shard, mapped at its first read, when its tensors are compared with the index. Two threads may both do
        this, with the same result."""
        file = self._files[shard]
        if file is None:
            file = map_shard(self._folder / self.index.shards[shard].file)
            _check_tensors(file, self.index, num_images=self.index.shards[shard].num_images)
            if self._constant_scale is not None:
                self._scales[shard] = self._constant_scale
            elif self.index.dtype == "int8":
                self._scales[shard] = file.array("scale")
            self._files[shard] = file
        return file


def to_sample(
    raw: Mapping[str, Tensor], *, shift: Tensor, scale: Tensor, posterior_noise: Tensor | None = None
) -> Tensor:
    """Normalised latents from the output of `LatentShards.read`, computed on its device.

    Args:
        raw: `latent` (B, C, h, w), with `latent_scale` and `logvar` if present.
        shift, scale: (C,) float32 of the normalisation (z - shift) x scale.
        posterior_noise: (B, C, h, w) float32 standard normal. Draws z = mean + exp(logvar / 2) x noise from the
            encoder's posterior (Kingma and Welling 2014). Without it, z is the mean.

    Returns:
        (B, C, h, w) float32.
    """
    z = raw["latent"].float()
    if "latent_scale" in raw:
        z = z * raw["latent_scale"][:, :, None, None]
    if posterior_noise is not None:
        z = z + (raw["logvar"].float().clamp(*_LOGVAR_RANGE) / 2).exp() * posterior_noise
    return (z - shift.to(z.device)[:, None, None]) * scale.to(z.device)[:, None, None]


def size_problems(folder: Path, index: LatentIndex) -> list[str]:
    """Files of a finished folder that are missing or differ in size from the index, one line each."""
    problems = []
    for shard in index.shards:
        size = _size(folder / shard.file)
        if size != shard.bytes:
            found = "is missing" if size is None else f"has {size} bytes, not {shard.bytes}"
            problems.append(f"{shard.file} {found}")
    if index.class_names:
        try:
            labels = map_labels(folder)
            if labels.shape != (index.num_images,):
                problems.append(f"{LABELS_FILE} has {labels.size} labels, not {index.num_images}")
        except FileNotFoundError:
            problems.append(f"{LABELS_FILE} is missing")
        except (OSError, ValueError):
            problems.append(f"{LABELS_FILE} is damaged")
    return problems


def _open_public(path: Path) -> LatentShards:
    """Open the public ImageNet file with a generated index; its statistics come from evenly spaced samples."""
    places = read_header(path)
    latents, labels = places.get("latents"), places.get("labels")
    is_public = (
        latents is not None
        and labels is not None
        and (latents.dtype, len(latents.shape)) == ("I8", 4)
        and labels.dtype in ("I16", "I32", "I64")
        and labels.shape == latents.shape[:1]
    )
    if not is_public or latents is None:
        found = ", ".join(f"{name} {place.dtype} {list(place.shape)}" for name, place in sorted(places.items()))
        right = f"must hold int8 `latents` (N, C, h, w) and integer `labels` (N,); it has {found}"
        raise option_error("dataset.root_dir", str(path), right)
    num_images, *latent_shape = latents.shape
    if num_images == 0:
        raise option_error("dataset.root_dir", str(path), "contains no latents")
    label_array = MappedFile(path).array("labels")
    mean, std = _public_statistics(path, latents)
    shift, scale = standardizing(mean, std)
    index = LatentIndex(
        dataset=path.stem,
        split="train",
        num_source_images=num_images,
        source=None,
        image_size=(8 * latent_shape[1], 8 * latent_shape[2]),
        crop="center",
        autoencoder_name="cosmos-ci8x8",
        autoencoder_path=None,
        downsampling=8,
        fingerprint=None,
        image_channels=3,
        autoencoder_dtype=None,
        latent_shape=tuple(latent_shape),
        dtype="int8",
        flipped=False,
        posterior=False,
        shard_size=num_images,
        class_names=tuple(f"class {label}" for label in range(int(label_array.max()) + 1)),
        published_shift=None,
        published_scale=None,
        num_images=num_images,
        num_skipped=0,
        mean=mean,
        std=std,
        shift=shift,
        scale=scale,
        normalization="statistics",
        shards=(
            ShardRecord(
                file=path.name, num_images=num_images, bytes=path.stat().st_size, sha256="", sum=(), sum_of_squares=()
            ),
        ),
    )
    return LatentShards(path, index, labels=label_array, constant_scale=PUBLIC_SCALE)


def _public_statistics(path: Path, latents: TensorPlace) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of each channel over evenly spaced samples; reading all samples would take minutes."""
    num_images, *shape = latents.shape
    count = min(num_images, _PUBLIC_SAMPLES)
    samples = np.empty((count, *shape), dtype=np.int8)
    with open(path, "rb", buffering=0) as file:  # read, not mapped: a map would also read the neighbours
        for number, sample in enumerate(samples):
            file.seek(latents.start + number * num_images // count * sample.nbytes)
            file.readinto(sample.data)
    total, squares = channel_sums(samples)
    values = count * math.prod(shape[1:])
    return mean_and_std(total * PUBLIC_SCALE, squares * PUBLIC_SCALE**2, count=values)


def _check_tensors(file: MappedFile, index: LatentIndex, *, num_images: int) -> None:
    stored = _STORED_DTYPES[index.dtype][0]
    shape = (num_images, *index.latent_shape)
    expected = {"latents": (stored, shape)}
    if index.flipped:
        expected["latents_flipped"] = (stored, shape)
    if index.posterior:
        expected["logvar"] = ("BF16", shape)
    if index.posterior and index.flipped:
        expected["logvar_flipped"] = ("BF16", shape)
    if index.images:
        expected["images"] = ("U8", (num_images, *index.image_shape))
    for name, described in expected.items():
        place = file.places.get(name)
        if place is None or (place.dtype, place.shape) != described:
            raise ConfigError(f"{file.path} is not the shard that its index describes: {name} differs; {REPAIR}")


def map_labels(folder: Path) -> np.ndarray:
    """Memory map of labels.npy.

    Raises:
        ValueError: it is not a list of integers.
    """
    with open(folder / LABELS_FILE, "rb") as file:
        shape, _, dtype = npy_files.read_header(file)
        values = _map_bytes(folder / LABELS_FILE)[file.tell() :]
    if dtype.kind not in "iu":
        raise ValueError(dtype)
    return values.view(dtype).reshape(shape)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _allow_open_files(count: int) -> None:
    """Raise the limit of open files: each memory map needs a descriptor, and many shards exceed the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
