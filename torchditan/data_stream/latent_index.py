# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Metadata of a folder of latents: `index.json`, and `encoding.json` while it is written.

Notable:
- every run that writes a folder must agree on the `Encoding`. `LatentIndex` adds the results: the shards with their
  hashes, the images that could not be read, statistics, and the normalisation for training;
- if the autoencoder publishes a normalisation, it is used; otherwise the latents' own mean and standard deviation;
- a newer format is refused with its version number, a damaged file with its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from torchditan.errors import ConfigError, option_error

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
SETTINGS_FILE = "encoding.json"
"""File that an unfinished folder has instead of an index."""
REPAIR = "rerun the command that encoded it"
STORED_DTYPES = ("bf16", "int8")
_LARGEST_SIDE = 65_536
"""Of a latent shape, channels included."""
_TABLES = {
    "autoencoder": {
        "autoencoder_name": "name",
        "autoencoder_path": "path",
        "downsampling": "downsampling",
        "fingerprint": "fingerprint",
        "image_channels": "image_channels",
        "autoencoder_dtype": "dtype",
    },
    "statistics": {"mean": "mean", "std": "std"},
    "normalization": {"shift": "shift", "scale": "scale", "normalization": "source"},
}
"""Tables of the JSON: the fields in each, and their keys there."""
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Source and storage format of a folder of latents; every run that writes the folder must agree on it."""

    dataset: str
    split: str
    num_source_images: int
    source: str | None
    """Identity of the list of source images, not of their content; None if the dataset has none."""
    image_size: tuple[int, ...]
    """Height and width of the images, in pixels."""
    crop: str
    autoencoder_name: str
    """Opens the decoder again, in the form of `autoencoder.name` and `autoencoder.path`."""
    autoencoder_path: str | None
    downsampling: int
    fingerprint: str | None
    """Identity of the autoencoder's weights; None for the public file, which does not state it."""
    image_channels: int
    autoencoder_dtype: str | None
    """Compute dtype of the autoencoder, such as float32; None for the public file, which does not state it."""
    latent_shape: tuple[int, ...]
    """(C, h, w)."""
    dtype: str
    """bf16 or int8."""
    flipped: bool
    """Whether the latents of the mirrored images are stored too."""
    posterior: bool
    """Whether the log-variance is stored in addition to the mean."""
    shard_size: int
    """Source images per shard; if some cannot be read, the shard has fewer latents."""
    shard_format: str = "safetensors"
    """safetensors, or webdataset: tars with one safetensors file per latent."""
    class_names: tuple[str, ...]
    """Empty if there are no labels."""
    published_shift: tuple[float, ...] | None
    """(C,) of the autoencoder's published normalisation, if it has one."""
    published_scale: tuple[float, ...] | None
    images: bool = False
    """Whether the images are stored too. The JSON has it only if they are."""

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(C, H, W)."""
        return (self.image_channels, *self.image_size)


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """Entry of one shard in the index."""

    file: str
    num_images: int
    bytes: int
    sha256: str
    sum: tuple[float, ...]
    """(C,) float64, over all stored latents of the shard as read back, including mirrored ones."""
    sum_of_squares: tuple[float, ...]
    skipped: tuple[tuple[int, str], ...] = ()
    """(number, reason) of the source images that could not be read; `{"index": ..., "reason": ...}` in the JSON."""


@dataclass(frozen=True, kw_only=True)
class LatentIndex(Encoding):
    """The contents of `index.json` of a folder of latents."""

    num_images: int
    num_skipped: int
    mean: tuple[float, ...]
    """(C,) of the latents as read back, before normalisation, including mirrored ones."""
    std: tuple[float, ...]
    shift: tuple[float, ...]
    """(C,) of the normalisation (z - shift) x scale for training."""
    scale: tuple[float, ...]
    normalization: str
    """Origin of shift and scale: published, or statistics (the mean, and one over the standard deviation)."""
    shards: tuple[ShardRecord, ...]


Described = TypeVar("Described", bound=Encoding)


def read_index(folder: Path) -> LatentIndex:
    """Read `index.json` of a folder.

    Raises:
        ConfigError: it is missing, damaged, or was written by a newer version of TorchDiTan.
    """
    if not (folder / INDEX_FILE).is_file():
        right = "holds no latents (it has no index.json); encode them with torchditan encode"
        if (folder / SETTINGS_FILE).exists():
            right = f"its encoding is not finished; {REPAIR}"
        raise option_error("dataset.root_dir", str(folder), right)
    return read_as(LatentIndex, folder / INDEX_FILE)


def read_as(kind: type[Described], path: Path) -> Described:
    """Read a file that `index_to_json` described.

    Raises:
        ConfigError: as above.
    """
    try:
        values = json.loads(path.read_bytes())
        if values["format_version"] > FORMAT_VERSION:
            version = f"is of format {values['format_version']}, and this TorchDiTan reads up to {FORMAT_VERSION}"
            raise ConfigError(f"{path} {version}; update TorchDiTan")
        for table, keys in _TABLES.items():
            values |= {name: values[table][key] for name, key in keys.items() if table in values}
        found: Described = _from_json(kind, values)
        _check_numbers(found)
    except ConfigError:
        raise
    except _DAMAGE:
        raise ConfigError(f"{path} is damaged; restore it, or delete it and encode the latents again") from None
    return found


def read_record(path: Path) -> ShardRecord | None:
    """The record of a shard, while its folder is written; None if it is missing or damaged."""
    try:
        record: ShardRecord = _from_json(ShardRecord, json.loads(path.read_bytes()))
        return record
    except (FileNotFoundError, *_DAMAGE):
        return None


def fingerprint_of(index: LatentIndex) -> str:
    """Identity of the latents: their encoding and the content of every shard, independent of paths."""
    values = index_to_json(replace(index, autoencoder_path=None))
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return f"latents-{digest[:16]}"


def index_to_json(index: Encoding) -> dict[str, Any]:
    """`index.json`, or `encoding.json` of an `Encoding`, as nested plain values."""
    values = asdict(index)
    if not index.images:
        del values["images"]  # what older versions wrote keeps its fingerprint
    for table, keys in _TABLES.items():
        if found := {key: values.pop(name) for name, key in keys.items() if name in values}:
            values[table] = found
    if isinstance(index, LatentIndex):
        values["shards"] = [record_to_json(shard) for shard in index.shards]
    return {"format_version": FORMAT_VERSION, **values}


def record_to_json(record: ShardRecord) -> dict[str, Any]:
    skipped = [{"index": number, "reason": reason} for number, reason in record.skipped]
    return {**asdict(record), "skipped": skipped}


def _from_json(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass whose fields are converted to their types."""
    hints = get_type_hints(kind)
    return kind(**{name: _convert(hint, values[name]) for name, hint in hints.items() if name in values})


def _convert(hint: Any, value: Any) -> Any:
    if isinstance(hint, UnionType):  # of a type and None
        return None if value is None else _convert(get_args(hint)[0], value)
    if hint == tuple[int, str]:  # of `skipped`
        return int(value["index"]), str(value["reason"])
    if get_origin(hint) is tuple:
        return tuple(_convert(get_args(hint)[0], element) for element in value)
    return _from_json(hint, value) if is_dataclass(hint) else hint(value)


def _check_numbers(found: Encoding) -> None:
    """Raise a ValueError for impossible sizes and counts, and unless all numbers per channel have its channels."""
    channels, _, _ = found.latent_shape
    if not all(0 < side <= _LARGEST_SIDE for side in found.latent_shape) or found.dtype not in STORED_DTYPES:
        raise ValueError(found)
    per_channel = [numbers for numbers in (found.published_shift, found.published_scale) if numbers is not None]
    if isinstance(found, LatentIndex):
        counts = [shard.num_images for shard in found.shards]
        if min(counts, default=-1) < 0 or sum(counts) != found.num_images:
            raise ValueError(counts)
        if any(Path(shard.file).name != shard.file for shard in found.shards):
            raise ValueError(found)  # a shard must be inside the folder
        per_channel += [found.mean, found.std, found.shift, found.scale]
        per_channel += [sums for shard in found.shards for sums in (shard.sum, shard.sum_of_squares)]
    if any(len(numbers) != channels for numbers in per_channel):
        raise ValueError(channels)


def channel_sums(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and sum of squares of each channel, (C,) float64 each; exact for int8, and the same on every machine.

    Args:
        stored: (n, C, h, w) int8, or uint16 with the bits of bfloat16.
    """
    total, squares = np.zeros((2, stored.shape[1]))
    for start in range(0, len(stored), 64):
        part = stored[start : start + 64]
        if part.dtype == np.int8:
            wide = part.astype(np.int32)
        else:
            wide = (part.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        total += wide.sum(axis=(0, 2, 3))
        squares += np.square(wide).sum(axis=(0, 2, 3))
    return total, squares


def mean_and_std(total: np.ndarray, squares: np.ndarray, *, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of `count` values per channel, from sums (C,) and sums of squares (C,)."""
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0.0))
    return tuple(mean.tolist()), tuple(std.tolist())


def standardizing(mean: Sequence[float], std: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(shift, scale) to zero mean and unit variance; the scale of a channel without variance is 1."""
    varies = (value > 1e-6 * max(1.0, abs(center)) for center, value in zip(mean, std, strict=True))  # beyond rounding
    return tuple(mean), tuple(1 / value if is_known else 1.0 for value, is_known in zip(std, varies, strict=True))
