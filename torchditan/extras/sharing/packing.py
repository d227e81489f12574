# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Any dataset -> WebDataset shards, for `torchditan pack`.

Notable:
- files, rows of the hub and members of tars keep their bytes. Images that a dataset draws (digits, earth) become PNGs;
- one caption becomes a `.txt`, several with their weights a `.json`;
- the images are shuffled once, always in the same way, for programs that read shards in order;
- a shard has a temporary name until it is complete. A packing that was killed continues at the first missing shard.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from torchditan.config.options import Dataset
from torchditan.data_stream.datasets import CaptionedPixels, CorruptImageError, ImageDataset
from torchditan.datasets.caption_entries import Entry, Frames
from torchditan.datasets.captions import CaptionedImages
from torchditan.datasets.encoded import EncodedImages, read_bytes
from torchditan.datasets.images import UnreadableError, corrupt_image, open_picture
from torchditan.datasets.webdataset import CLASSES_FILE
from torchditan.errors import ConfigError, option_error
from torchditan.randomness import generator
from torchditan.run.atomic_files import atomic_writer, refuse_unwritable, write_file

SETTINGS_FILE = ".packing.json"
"""In a folder of shards: what was packed. Another dataset is refused."""
LEFT_OUT_FILE = ".left_out.txt"
"""In a folder of shards: names of the unreadable images that they lack, with the reasons."""
_CAPTION_KEY = Dataset().caption_key
_MOST_IMAGES = 10**9
"""Names of members have nine digits."""


def pack(
    dataset: ImageDataset,
    folder: Path,
    *,
    images_per_shard: int,
    skips_corrupt: bool,
    report: Callable[[int], None],
) -> list[str]:
    """Write the shards that `folder` lacks, and the names of the classes into its parent.

    Args:
        skips_corrupt: leave unreadable images out.
        report: called with the number of images after each shard.

    Returns:
        Names and reasons of the images that the shards lack, also of shards that an earlier call wrote.

    Raises:
        CorruptImageError: an image is unreadable, without `skips_corrupt`.
        ConfigError: the folder has shards of another dataset or other files, or cannot be written; or the dataset has
            too many images.
    """
    if len(dataset) > _MOST_IMAGES:
        right = f"has {len(dataset):,} images; shards hold at most {_MOST_IMAGES:,}, so train on it without packing"
        raise option_error("dataset.dataset_name", dataset.name, right)
    with refuse_unwritable(folder, right="complete shards are kept, and the same command continues"):
        _open(folder, dataset, images_per_shard=images_per_shard)
        if dataset.class_names:
            lines = [" ".join(name.split()) for name in dataset.class_names]
            write_file(folder.parent / CLASSES_FILE, "".join(f"{line}\n" for line in lines).encode())
        order = generator(0, "pack", 0).permutation(len(dataset))
        for first in range(0, len(dataset), images_per_shard):
            path = folder / f"shard-{first // images_per_shard:06d}.tar"
            indices = order[first : first + images_per_shard].tolist()
            if not path.exists():
                skipped = _write_shard(path, dataset, indices, skips_corrupt=skips_corrupt)
                with (folder / LEFT_OUT_FILE).open("a", encoding="utf-8") as file:
                    file.writelines(f"{named}\n" for named in skipped)
            report(len(indices))
        return (folder / LEFT_OUT_FILE).read_text(encoding="utf-8").splitlines()


def _open(folder: Path, dataset: ImageDataset, *, images_per_shard: int) -> None:
    settings = {"dataset": dataset.name, "images_per_shard": images_per_shard, "identity": _identity_of(dataset)}
    path = folder / SETTINGS_FILE
    if path.exists():
        try:
            stored = json.loads(path.read_bytes())
        except ValueError:
            stored = {}
        if stored != settings:
            shown = ", ".join(f"{key} {stored.get(key)}" for key in settings if stored.get(key) != settings[key])
            raise ConfigError(f"{folder} has shards of other images or another size ({shown}); choose another folder")
    elif folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} contains other files; shards need a separate folder")
    write_file(path, json.dumps(settings).encode())
    for partial in folder.glob(".shard-*.partial"):  # of a killed process
        partial.unlink()


def _identity_of(dataset: ImageDataset) -> str:
    names = f"{len(dataset)} {dataset.fingerprint}"
    if isinstance(dataset, CaptionedImages):
        entries = [dataset.entries[place] for place in dataset.places]
        names = json.dumps([(entry.name, entry.captions) for entry in entries])
    return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()[:16]


def _write_shard(path: Path, dataset: ImageDataset, indices: list[int], *, skips_corrupt: bool) -> list[str]:
    skipped = []
    with atomic_writer(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for index in indices:
            try:
                members = _members_of(dataset, index)
            except CorruptImageError as error:
                if not skips_corrupt:
                    raise
                skipped.append(error.named)
                continue
            for suffix, data in members.items():
                member = tarfile.TarInfo(f"{index:09d}{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return skipped


def _members_of(dataset: Any, index: int) -> dict[str, bytes]:
    """Suffix -> content: the image and its label or caption.

    Raises:
        CorruptImageError: the image cannot be read.
    """
    if isinstance(dataset, CaptionedImages):
        entry = dataset.entries[dataset.places[index]]
        if isinstance(entry.content, Frames):
            raise option_error("dataset.num_frames", dataset.config.num_frames, f"{entry.name} is a folder of frames")
        data = read_bytes(entry.content, where=entry.name)
        is_video = dataset.config.num_frames is not None
        suffix = os.path.splitext(entry.name)[1].lower() if is_video else _suffix_of(data, where=entry.name)
        return {suffix: data, **_caption_of(entry)}
    label = None
    if isinstance(dataset, EncodedImages):
        where, data = dataset.name_of(index), dataset.content_of(index)
    else:
        item = dataset[index]
        where, data, label = "", _to_png(item["sample"].numpy(), name=dataset.name), item.get("class_label")
    members = {_suffix_of(data, where=where): data}
    if dataset.class_names:
        label = dataset.class_labels[index] if label is None else label
        members[".cls"] = str(int(label)).encode()
    if isinstance(dataset, CaptionedPixels):
        members[".txt"] = dataset.caption_of(index).encode()
    return members


def _caption_of(entry: Entry) -> dict[str, bytes]:
    texts, weights = entry.captions
    if len(texts) < 2:
        return {".txt": texts[0].encode()} if texts else {}
    row: dict[str, Any] = {_CAPTION_KEY: texts}
    if weights:
        row["weights"] = weights
    return {".json": json.dumps(row, ensure_ascii=False).encode()}


def _suffix_of(data: bytes, *, where: str) -> str:
    """The suffix of an image, from its content, which is decoded once: training would refuse what is damaged inside.

    Raises:
        CorruptImageError: it cannot be read.
    """
    try:
        with open_picture(data) as picture:
            picture.image.draft(None, (1, 1))  # a JPEG, at an eighth of its size
            picture.decode(channels=3).load()
            return picture.format.suffixes[0]
    except UnreadableError as error:
        raise corrupt_image(where, str(error)) from error


def _to_png(sample: np.ndarray, *, name: str) -> bytes:
    """float32 (1 or 3, H, W) in [-1, 1] as a PNG, which is exact for images of 8 bits."""
    if sample.ndim != 3 or sample.shape[0] not in (1, 3):
        raise option_error("dataset.dataset_name", name, "has no images; must be a dataset of pictures")
    pixels = ((sample + 1) * 127.5).round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(buffer, "PNG")
    return buffer.getvalue()
