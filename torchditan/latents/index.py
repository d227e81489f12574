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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from torchditan.config.errors import ConfigError, option_error

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
SETTINGS_FILE = "encoding.json"
"""File that an unfinished folder has instead of an index."""
REPAIR = "rerun the command that encoded it"
STORED_DTYPES = ("bf16", "int8")
_LARGEST_SIDE = 65_536
"""Of a latent shape, channels included."""
_AUTOENCODER_KEYS = {
    "autoencoder_name": "name",
    "autoencoder_path": "path",
    "downsampling": "downsampling",
    "fingerprint": "fingerprint",
    "image_channels": "image_channels",
    "autoencoder_dtype": "dtype",
}
"""Fields of `Encoding` that JSON stores under `autoencoder`, and their keys there."""


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
    """(number, reason) of the source images that could not be read."""


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


def read_index(folder: Path) -> LatentIndex:
    """Read `index.json` of a folder.

    Raises:
        ConfigError: it is missing, does not parse, or was written by a newer version of TorchDiTan.
    """
    try:
        values = json.loads((folder / INDEX_FILE).read_bytes())
    except OSError:
        right = "holds no latents (it has no index.json); encode them with torchditan encode"
        if (folder / SETTINGS_FILE).exists():
            right = f"its encoding is not finished; {REPAIR}"
        raise option_error("dataset.root_dir", str(folder), right) from None
    except (ValueError, RecursionError):
        values = None
    return index_from_json(values, where=folder / INDEX_FILE)


def index_from_json(values: Any, *, where: Path) -> LatentIndex:
    """Inverse of `index_to_json`; a ConfigError names the file."""
    _check_version(values, where=where)
    try:
        statistics, normalization = values["statistics"], values["normalization"]
        shards = tuple(record_from_json(entry) for entry in values["shards"])
        index = LatentIndex(
            **vars(_encoding_from(values)),
            num_images=int(values["num_images"]),
            num_skipped=int(values["num_skipped"]),
            mean=_numbers(statistics["mean"]),
            std=_numbers(statistics["std"]),
            shift=_numbers(normalization["shift"]),
            scale=_numbers(normalization["scale"]),
            normalization=str(normalization["source"]),
            shards=shards,
        )
        _check_numbers(index)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigError(f"{where} is damaged; restore it, or delete it and encode the latents again") from None
    return index


def fingerprint_of(index: LatentIndex) -> str:
    """Identity of the latents: their encoding and the content of every shard, independent of paths."""
    values = index_to_json(replace(index, autoencoder_path=None))
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return f"latents-{digest[:16]}"


def index_to_json(index: LatentIndex) -> dict[str, Any]:
    """`index.json` as nested plain values."""
    values = {**encoding_to_json(index), "num_images": index.num_images, "num_skipped": index.num_skipped}
    values["statistics"] = {"mean": index.mean, "std": index.std}
    values["normalization"] = {"shift": index.shift, "scale": index.scale, "source": index.normalization}
    values["shards"] = [record_to_json(shard) for shard in index.shards]
    return values


def encoding_to_json(encoding: Encoding) -> dict[str, Any]:
    """`encoding.json`, which is also the start of `index.json`, as nested plain values."""
    values = {name: getattr(encoding, name) for name in Encoding.__dataclass_fields__}
    autoencoder = {key: values.pop(name) for name, key in _AUTOENCODER_KEYS.items()}
    if values["shard_format"] == "safetensors":  # older folders lack the key, and `fingerprint_of` must not change
        del values["shard_format"]
    return {"format_version": FORMAT_VERSION, "autoencoder": autoencoder, **values}


def encoding_from_json(values: Any, *, where: Path) -> Encoding:
    """Inverse of `encoding_to_json`; a ConfigError names the file."""
    _check_version(values, where=where)
    try:
        return _encoding_from(values)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigError(f"{where} is damaged; delete the folder and encode the latents again") from None


def record_to_json(record: ShardRecord) -> dict[str, Any]:
    values = asdict(record)
    values["skipped"] = [{"index": number, "reason": reason} for number, reason in record.skipped]
    return values


def record_from_json(values: dict[str, Any]) -> ShardRecord:
    file = values["file"]
    if file in ("", ".", "..") or Path(file).name != file:
        raise ValueError(file)  # a shard must be inside the folder
    return ShardRecord(
        file=file,
        num_images=int(values["num_images"]),
        bytes=int(values["bytes"]),
        sha256=str(values["sha256"]),
        sum=_numbers(values["sum"]),
        sum_of_squares=_numbers(values["sum_of_squares"]),
        skipped=tuple((int(entry["index"]), str(entry["reason"])) for entry in values["skipped"]),
    )


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
    return _numbers(mean), _numbers(std)


def standardizing(mean: Sequence[float], std: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(shift, scale) to zero mean and unit variance; the scale of a channel without variance is 1."""
    return tuple(mean), tuple(1 / value if value > 0 else 1.0 for value in std)


def _check_version(values: Any, *, where: Path) -> None:
    version = values.get("format_version") if isinstance(values, dict) else None
    if type(version) is not int:
        raise ConfigError(f"{where} is damaged; restore it, or delete it and encode the latents again")
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{where} is of format {version}, and this TorchDiTan reads up to {FORMAT_VERSION}; update TorchDiTan"
        )


def _encoding_from(values: dict[str, Any]) -> Encoding:
    shift, scale = values["published_shift"], values["published_scale"]
    if values["dtype"] not in STORED_DTYPES:
        raise ValueError(values["dtype"])
    return Encoding(
        dataset=str(values["dataset"]),
        split=str(values["split"]),
        num_source_images=int(values["num_source_images"]),
        source=values["source"],
        image_size=tuple(int(side) for side in values["image_size"]),
        crop=str(values["crop"]),
        **{name: values["autoencoder"][key] for name, key in _AUTOENCODER_KEYS.items()},
        latent_shape=tuple(int(side) for side in values["latent_shape"]),
        dtype=values["dtype"],
        flipped=bool(values["flipped"]),
        posterior=bool(values["posterior"]),
        shard_size=int(values["shard_size"]),
        shard_format=str(values.get("shard_format", "safetensors")),
        class_names=tuple(str(name) for name in values["class_names"]),
        published_shift=None if shift is None else _numbers(shift),
        published_scale=None if scale is None else _numbers(scale),
    )


def _check_numbers(index: LatentIndex) -> None:
    """Raise a ValueError for impossible sizes and counts, and unless all numbers per channel have its channels."""
    channels, _, _ = index.latent_shape
    counts = [shard.num_images for shard in index.shards]
    if not all(0 < side <= _LARGEST_SIDE for side in index.latent_shape):
        raise ValueError(index.latent_shape)
    if min(counts, default=-1) < 0 or sum(counts) != index.num_images:
        raise ValueError(counts)
    per_channel = [index.mean, index.std, index.shift, index.scale]
    per_channel += [sums for shard in index.shards for sums in (shard.sum, shard.sum_of_squares)]
    per_channel += [values for values in (index.published_shift, index.published_scale) if values is not None]
    if any(len(values) != channels for values in per_channel):
        raise ValueError(channels)


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
