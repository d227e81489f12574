# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A folder of images: one subfolder per class, or only images, which have no labels.

Notable:
- `train/` and `val/` (or `validation/`) are the splits if they exist. Otherwise about 2 percent of the images are held
  out: those whose paths have the lowest checksums, so the choice needs no list of files.
- The paths are one bytes array instead of a million Python strings, so forked loader workers share its memory pages.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from torchditan.config import options
from torchditan.config.errors import option_error
from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets.file_check import check_files
from torchditan.datasets.images import IMAGE_SUFFIXES, Crop, load_sample
from torchditan.datasets.options import existing_path, height_and_width, photo_channels, refuse

Split = Literal["train", "validation"]
HELD_OUT_SHARE = 0.02


class ImageFolder(ImageDataset):
    """Images in a folder, decoded on access."""

    horizontal_flip = True

    def __init__(
        self,
        *,
        name: str,
        train_root: Path,
        validation_root: Path | None,
        split: Split,
        sample_shape: tuple[int, ...],
        crop: Crop,
    ) -> None:
        self.name = name
        self.sample_shape = sample_shape
        self.crop = crop
        self.root = validation_root if split == "validation" and validation_root else train_root
        self.class_names = _class_names(train_root)
        paths, self.other_files = _list_images(self.root)
        self.class_labels = self._read_labels(paths) if self.class_names else None
        if self.class_names and self.root == train_root:
            self._refuse_empty_classes()
        self.paths = np.array([os.fsencode(path) for path in paths], dtype=bytes)
        if validation_root is None:
            self._keep(held_out(self.paths) == (split == "validation"))
        # Depends on the paths in the folder, not on image content: a moved folder is the same data.
        self.fingerprint = f"paths-{hashlib.sha256(self.paths.tobytes()).hexdigest()[:16]}"

    def _read_labels(self, paths: list[str]) -> np.ndarray:
        labels = {name: label for label, name in enumerate(self.class_names)}
        folders = [path.split(os.sep)[0] if os.sep in path else "" for path in paths]
        for folder, path in zip(folders, paths, strict=True):
            if folder not in labels:
                right = f"{path} is in no folder of a training class ({', '.join(self.class_names[:3])}, ...)"
                raise option_error("dataset.root_dir", str(self.root), right)
        return np.array([labels[folder] for folder in folders], dtype=np.int64)

    def _refuse_empty_classes(self) -> None:
        """Refuse classes without images: the model could not learn them."""
        assert self.class_labels is not None
        counts = np.bincount(self.class_labels, minlength=len(self.class_names))
        empty = [name for name, count in zip(self.class_names, counts, strict=True) if count == 0]
        if empty and counts.any():
            many = f"{empty[0]} and {len(empty) - 1} more" if len(empty) > 1 else empty[0]
            right = f"{many} of its {len(counts)} classes holds no image; remove the folder, or fill it"
            raise option_error("dataset.root_dir", str(self.root), right)

    def _keep(self, chosen: np.ndarray) -> None:
        self.paths = self.paths[chosen]
        if self.class_labels is not None:
            self.class_labels = self.class_labels[chosen]

    def __len__(self) -> int:
        return len(self.paths)

    def path_of(self, index: int) -> Path:
        return self.root / os.fsdecode(self.paths[index])

    def file_sizes(self) -> dict[str, int]:
        files = {path: self.root / path for path in _list_images(self.root)[0]}
        return {path: file.stat().st_size if file.exists() else 0 for path, file in files.items()}

    def check_files(self, cache_folder: Path) -> Iterator[tuple[int, dict[int, str]]]:
        root = os.path.abspath(self.root)
        name = hashlib.sha256(f"{root} {self.fingerprint}".encode(errors="surrogateescape")).hexdigest()[:16]
        return check_files([os.path.join(root, os.fsdecode(path)) for path in self.paths], cache=cache_folder / name)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.path_of(index)
        sample = load_sample(path, sample_shape=self.sample_shape, where=str(path), crop=self.crop, number=index)
        item: dict[str, Any] = {"sample": torch.from_numpy(sample)}
        if self.class_labels is not None:
            item["class_label"] = int(self.class_labels[index])
        return item


def find_validation(root: Path) -> Path | None:
    return next((root / name for name in ("val", "validation") if (root / name).is_dir()), None)


def _split_roots(root: Path) -> tuple[Path, Path | None]:
    """Folders of the training and the validation images; the second is None without a split."""
    validation = find_validation(root)
    folders = set(_class_names(root))
    # Among other folders `train` may be a class (of trains), unless a validation folder exists too.
    if "train" in folders and (validation or folders <= {"train", "test"}):
        return root / "train", validation
    return root, None


def _class_names(root: Path) -> list[str]:
    """Names of the subfolders, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def _list_images(root: Path) -> tuple[list[str], Counter[str]]:
    """Paths of all images in a folder, relative to it, sorted, and the number of other files by suffix. Hidden files
    and folders do not count."""
    paths: list[str] = []
    others: Counter[str] = Counter()
    for folder, names in walk_folders(root):
        suffixes = {name: os.path.splitext(name)[1].lower() for name in names}
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else relative + os.sep
        paths += [prefix + name for name, suffix in suffixes.items() if suffix in IMAGE_SUFFIXES]
        others.update(suffix or "no suffix" for suffix in suffixes.values() if suffix not in IMAGE_SUFFIXES)
    return sorted(paths), others


def walk_folders(root: Path) -> Iterator[tuple[str, list[str]]]:
    """(path, names of its files) of a folder and of all below it, through links. Hidden files and folders do not count.

    Raises:
        ConfigError: a link leads to a folder that contains the link, so the walk would not end.
    """
    for folder, subfolders, names in os.walk(root, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in subfolders:
            link = Path(folder, name)
            if not link.is_symlink():
                continue
            target = link.resolve()
            if any(above.resolve().is_relative_to(target) for above in _up_to(root, link)):
                right = f"{link.relative_to(root)} is a link to {target}, which contains it; remove the link"
                raise option_error("dataset.root_dir", str(root), right)
        yield folder, [name for name in names if not name.startswith(".")]


def _up_to(root: Path, path: Path) -> Iterator[Path]:
    """The folders that contain a path, from the nearest to `root`."""
    while path != root:
        path = path.parent
        yield path


def held_out(paths: np.ndarray) -> np.ndarray:
    """(N,) bool, the HELD_OUT_SHARE of the paths with the lowest checksums; at least one of two or more."""
    count = max(round(HELD_OUT_SHARE * len(paths)), min(1, len(paths) - 1))
    checksums = np.array([zlib.crc32(path.replace(os.sep.encode(), b"/")) for path in paths.tolist()])
    chosen = np.zeros(len(paths), dtype=bool)
    chosen[np.argsort(checksums, kind="stable")[: max(count, 0)]] = True
    return chosen


def build(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> ImageFolder:
    refuse(config, "hub_name")
    root = existing_path(config)
    if not root.is_dir():
        raise option_error("dataset.root_dir", config.root_dir, "is a file; folder needs a folder of images")
    train_root, validation_root = _split_roots(root)
    return ImageFolder(
        name=config.dataset_name,
        train_root=train_root,
        validation_root=validation_root,
        split=split,
        sample_shape=(photo_channels(config, input_channels), *height_and_width(config, default=(256, 256))),
        crop=config.crop,
    )
