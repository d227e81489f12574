# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Images in WebDataset shards, with labels: `key.jpg` with `key.cls`, or with `dataset.label_key` in `key.json`.

Latents in shards, `key.npy` or `key.safetensors`, are read for `torchditan encode`, which converts them.

Notable:
- shards without any label train without labels. If only some images lack one, these count as unreadable, as do images
  that the index found damaged, labels without an image, and the missing end of a shard. The check of files before
  training (job/check_files.py) names them all;
- an unreadable image keeps its number, so `dataset.corrupt_images` does not change the numbers of others.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from torchditan.config import options
from torchditan.data_stream.datasets import CorruptImageError
from torchditan.data_stream.npy_files import read_array
from torchditan.datasets.encoded import EncodedImages, read_bytes
from torchditan.datasets.images import HOW_TO_READ, IMAGE_SUFFIXES, Crop
from torchditan.datasets.options import Split, existing_path, height_and_width, is_tar_address, photo_channels, refuse
from torchditan.datasets.splits import held_out, num_held_out
from torchditan.datasets.tars import Place, Shard, TarMember, find_shards, json_object, kind_of, read_text
from torchditan.errors import option_error, some

CLASSES_FILE = "classes.txt"
"""In the folder of the shards, or in that of `train/`: the names of the classes 0, 1, ..., one in each line."""
LATENT_SUFFIXES = frozenset([".npy", ".safetensors"])
_NO_LABEL = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Samples:
    """Images of shards, in their order. Some cannot be read."""

    shards: list[Place]
    names: np.ndarray
    """(N,) bytes, `0000.tar/key.jpg`: one array instead of Python objects, whose memory forked workers would copy."""
    members: np.ndarray
    """(N, 3) int64: number of the shard, offset and size."""
    labels: np.ndarray | None
    """(N,) int64; 0 for those without a label. None if no sample has one."""
    damages: dict[int, str]
    """Number of an unreadable sample -> the reason."""

    def keep(self, chosen: np.ndarray) -> Samples:
        """Those where `chosen` (N,) bool is true."""
        numbers = np.cumsum(chosen) - 1
        return Samples(
            self.shards,
            self.names[chosen],
            self.members[chosen],
            None if self.labels is None else self.labels[chosen],
            {int(numbers[place]): reason for place, reason in self.damages.items() if chosen[place]},
        )


class TarImages(EncodedImages):
    """Images in tar shards, read in place."""

    def __init__(
        self,
        samples: Samples,
        *,
        name: str,
        root: Path,
        class_names: list[str],
        sample_shape: tuple[int, ...],
        crop: Crop,
        reading: list[str],
    ) -> None:
        self.samples = samples
        self.name = name
        self.root = root
        self.class_names = class_names
        self.class_labels = samples.labels if class_names else None
        self.sample_shape = sample_shape
        self.crop = crop
        self.reading = reading
        # Like that of a folder: names in the shards, not content. Moved shards are the same data.
        self.fingerprint = f"members-{hashlib.sha256(samples.names.tobytes()).hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.samples.names)

    def name_of(self, index: int) -> str:
        return str(self.samples.names[index].decode("utf-8", "surrogateescape"))

    def file_sizes(self) -> dict[str, dict[str, int]]:
        return {"shards": {shard.name: shard.size for shard in self.samples.shards}}

    def check_files(self, cache_folder: Path) -> Iterator[tuple[int, dict[int, str]]]:
        """Yields what the index knows, at once."""
        yield len(self), self.samples.damages

    def content_of(self, index: int) -> bytes:
        shard, offset, size = self.samples.members[index].tolist()
        member = TarMember(self.samples.shards[shard].file, offset, size, self.samples.damages.get(index))
        return read_bytes(member, where=self.name_of(index))


class TarLatents(TarImages):
    """Latents in tar shards; `sample` is (C, h, w) float32, as stored."""

    horizontal_flip = False  # the mirrored image has other latents

    def decode(self, data: bytes, index: int) -> torch.Tensor:
        where = self.name_of(index)
        try:
            latent = read_latent(data)
        except ValueError as error:
            raise CorruptImageError(f"{where}: no readable latent ({error}); repair or remove it") from None
        if latent.shape != self.sample_shape:
            right = f"has shape {list(latent.shape)}, and the first latent {list(self.sample_shape)}"
            raise option_error("dataset.root_dir", str(self.root), f"{where} {right}; must have one shape")
        return latent


def read_latent(data: bytes) -> torch.Tensor:
    """(C, h, w) float32 of a member: an array, or a file of safetensors with one tensor, or one called `latents`.

    A first dimension of 1 is dropped if there are four.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    if data[:6] == b"\x93NUMPY":
        array = read_array(data)
        if array.dtype.kind != "f":
            raise ValueError(f"{array.dtype}, not floating-point numbers")
        latent = torch.from_numpy(array.astype(np.float32))
    else:
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        if "latents" not in tensors and len(tensors) != 1:
            raise ValueError(f"{len(tensors)} tensors, none called latents")
        latent = tensors["latents"] if "latents" in tensors else next(iter(tensors.values()))
        if not latent.is_floating_point():
            raise ValueError(f"{latent.dtype}, not floating-point numbers")
        latent = latent.float()
    if latent.ndim == 4 and len(latent) == 1:
        latent = latent[0]
    if latent.ndim != 3:
        raise ValueError(f"shape {list(latent.shape)}")
    if not latent.numel() or not latent.isfinite().all():
        raise ValueError("empty, or not finite")
    return latent


def read_samples(shards: Sequence[Shard], *, label_key: str | None, suffixes: Set[str] = IMAGE_SUFFIXES) -> Samples:
    """The images of these shards; `label_key` None reads no labels, other `suffixes` other members.

    Raises:
        ConfigError: two images of a shard have one key.
    """
    names: list[bytes] = []
    members: list[np.ndarray] = [np.zeros((0, 3), dtype=np.int64)]
    labels: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    damages: dict[int, str] = {}
    for number, shard in enumerate(shards):
        rows = _rows_of(shard, label_key, suffixes)
        damages |= {len(names) + place: row.damage for place, row in enumerate(rows) if row.damage is not None}
        names += [row.name.encode("utf-8", "surrogateescape") for row in rows]
        members.append(np.array([(number, row.offset, row.size) for row in rows], dtype=np.int64).reshape(-1, 3))
        labels.append(np.array([row.label for row in rows], dtype=np.int64))
    all_labels = np.concatenate(labels)
    bare = all_labels == _NO_LABEL
    if not bare.all():
        damages |= {place: damages.get(place, "it has no label") for place in np.flatnonzero(bare).tolist()}
    return Samples(
        shards=[shard.place for shard in shards],
        names=np.array(names, dtype=bytes),
        members=np.concatenate(members),
        labels=None if bare.all() else np.where(bare, 0, all_labels),
        damages=dict(sorted(damages.items())),
    )


class _Row(NamedTuple):
    name: str
    offset: int
    size: int
    label: int
    damage: str | None


def _rows_of(shard: Shard, label_key: str | None, suffixes: Set[str]) -> list[_Row]:
    """The images of a shard by their key, then what is missing."""
    labels, problems = _read_labels(shard, label_key)
    rows: dict[int, _Row] = {}
    for suffix, members in shard.members.items():
        if kind_of(suffix) not in suffixes:
            continue
        for place, (key, offset, size) in enumerate(zip(members.keys, members.offsets, members.sizes, strict=True)):
            name = f"{shard.place.name}/{shard.keys[key]}{suffix}"
            if key in rows:
                right = f"{rows[key].name} and {name} have one key; rename or remove one"
                raise option_error("dataset.root_dir", str(shard.place.file), right)
            damage = members.damages.get(str(place), problems.get(key))
            rows[key] = _Row(name, offset, size, labels.get(key, _NO_LABEL), damage)
    found = [rows[key] for key in sorted(rows)]
    what = "latent" if suffixes == LATENT_SUFFIXES else "image"
    readers = {
        key: HOW_TO_READ[kind_of(suffix)]
        for suffix, members in shard.members.items()
        if kind_of(suffix) in HOW_TO_READ
        for key in members.keys
    }
    found += [
        _Row(f"{shard.place.name}/{shard.keys[key]}", 0, 0, _NO_LABEL, readers.get(key, f"its {what} is missing"))
        for key in sorted(labels.keys() | problems.keys() | readers.keys())
        if key not in rows
    ]
    if shard.damage is not None:
        found.append(_Row(shard.place.name, 0, 0, _NO_LABEL, shard.damage))
    return found


def _read_labels(shard: Shard, label_key: str | None) -> tuple[dict[int, int], dict[int, str]]:
    """Number of a key -> its label, and of those that have an invalid one, the reason.

    Raises:
        ConfigError: a key has two .cls members, or two .json, with different labels.
    """
    labels: dict[int, int] = {}
    found: dict[tuple[int, str], tuple[str, int]] = {}
    """(key, kind) -> the suffix of its first member with a label, and this label."""
    problems: dict[int, str] = {}
    for kind, suffix in sorted(((kind_of(suffix), suffix) for suffix in shard.members), reverse=True):
        members = shard.members[suffix]
        if label_key is None or kind not in (".cls", ".json"):
            continue
        for key, text in zip(members.keys, members.texts, strict=True):  # .json first, so that .cls replaces it
            try:
                label = int(text) if kind == ".cls" else json_object(text).get(label_key)
            except ValueError:
                problems[key] = f"its {kind} is not {'an integer' if kind == '.cls' else 'a JSON object'}"
                continue
            if type(label) is int and abs(label) < 2**62:
                labels[key] = label
                first, known = found.setdefault((key, kind), (suffix, label))
                if known != label:
                    name = f"{shard.place.name}/{shard.keys[key]}"
                    right = f"{name}{first} and {name}{suffix} have different labels; keep one of them"
                    raise option_error("dataset.root_dir", str(shard.place.file), right)
            elif label is not None:
                problems[key] = f"its label is {json.dumps(label)[:40]}, not an integer"
    return labels, problems


def build(
    config: options.Dataset, *, split: Split, input_channels: int | None = None, cache_folder: Path | None = None
) -> TarImages:
    shape = (photo_channels(config, input_channels), *height_and_width(config, default=(256, 256)))
    samples, shared = _open_split(config, split, IMAGE_SUFFIXES, cache_folder=cache_folder)
    return TarImages(samples, sample_shape=shape, crop=config.crop, **shared)


def build_latents(config: options.Dataset, *, split: Split, cache_folder: Path | None = None) -> TarLatents:
    """The latents in shards of images' latents.

    Raises:
        ConfigError: it holds none that can be read.
    """
    samples, shared = _open_split(config, split, LATENT_SUFFIXES, cache_folder=cache_folder)
    dataset = TarLatents(samples, sample_shape=(), crop="center", **shared)
    for index in range(len(dataset)):
        with suppress(CorruptImageError, ValueError):
            dataset.sample_shape = tuple(read_latent(dataset.content_of(index)).shape)
            return dataset
    right = "holds no latents: no readable .npy or .safetensors members of shape (C, h, w)"
    raise option_error("dataset.root_dir", str(dataset.root), right)


def _open_split(
    config: options.Dataset, split: Split, suffixes: Set[str], *, cache_folder: Path | None
) -> tuple[Samples, dict[str, Any]]:
    """The samples of a split, and what describes them: arguments of `TarImages`."""
    refuse(config, "hub_name")
    root = str(config.root_dir if is_tar_address(config.root_dir) else existing_path(config))
    label_key = None if config.num_classes == 0 else config.label_key

    shards = find_shards(root, cache_folder=cache_folder, blocks_gib=config.remote_cache_gib)

    def read(part: Split) -> Samples:
        return read_samples(shards.open(part), label_key=label_key, suffixes=suffixes)

    train = samples = read("train")
    is_divided = bool(shards.places["validation"])
    if is_divided and split == "validation":
        samples = read("validation")
    class_names: list[str] = []
    if train.labels is not None:
        folders = {posixpath.dirname(place.name) for place in shards.places["train"]} if shards.is_folder else set()
        class_names = _class_names(
            {root, *(posixpath.join(root, name) for name in folders)}, int(train.labels.max()) + 1
        )
    if class_names and samples.labels is None:
        right = (
            f"{some(place.name for place in shards.places['validation'])} has no labels, but the training images have"
        )
        raise option_error("dataset.root_dir", root, right)
    if not is_divided:
        chosen = held_out(train.names.tolist(), count=num_held_out(len(train.names)))
        samples = train.keep(chosen == (split == "validation"))
    shared = {"name": config.dataset_name, "root": Path(root), "class_names": class_names}
    return samples, {**shared, "reading": shards.describe()}


def _class_names(roots: set[str], num_classes: int) -> list[str]:
    """The lines of `classes.txt`, or "class 0" and so on."""
    for root in sorted(roots):
        text = read_text(root, CLASSES_FILE)
        if text is not None:
            return text.rstrip().splitlines()
    return [f"class {label}" for label in range(num_classes)]
