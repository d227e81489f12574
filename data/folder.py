# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A folder of images: one subfolder per class, or only images, which have no labels.

Notable:
- splits.py finds `train/`, `val/` and `test/` in all their spellings. Without held-out images, about 2 percent are held
  out: those whose paths have the lowest checksums, so the choice needs no list of files. Test images are not read.
- The paths are one bytes array instead of a million Python strings, so forked loader workers share its memory pages.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from torchditan.config import options
from torchditan.datasets.encoded import EncodedImages, File, read_bytes
from torchditan.datasets.file_check import check_files
from torchditan.datasets.images import IMAGE_SUFFIXES, Crop, describe_files
from torchditan.datasets.options import Split, existing_path, height_and_width, photo_channels, refuse
from torchditan.datasets.splits import (
    PARTS,
    SPLITS,
    Division,
    Part,
    Parts,
    describe_parts,
    held_out,
    num_held_out,
    suffix_of,
    walk,
)
from torchditan.errors import counted, option_error


class ImageTree:
    """The images in a folder, by part and class.

    Raises:
        ConfigError: `root` is above the folder with the splits, which would be a class.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        names = dict(walk(root))
        images = {parts: [name for name in names[parts] if suffix_of(name) in IMAGE_SUFFIXES] for parts in names}
        self.division = Division((parts for parts in images if images[parts]), has_classes=True)
        places = {parts: self.division.place(parts) for parts in names}
        self.class_names = sorted({inside[0] for part, inside in places.values() if part == "train" and inside})
        self.images: dict[Part, list[tuple[str, str | None]]] = {part: [] for part in PARTS}
        """Part -> (path of an image below the root, its class), sorted."""
        self.other_files: Counter[str] = Counter()
        """Number of other files next to the images of training and validation, by suffix."""
        for parts, (part, inside) in places.items():
            prefix, class_name = "".join(f"{name}{os.sep}" for name in parts), inside[0] if inside else None
            self.images[part] += [(prefix + name, class_name) for name in images[parts]]
            if part in ("train", "validation"):
                self.other_files.update(suffix_of(name) for name in names[parts])
                self.other_files.subtract(suffix_of(name) for name in images[parts])
        for found in self.images.values():
            found.sort()
        self._refuse_folder_above({parts: inside for parts, (_, inside) in places.items() if images[parts]})
        self._refuse_empty_classes()

    def _refuse_folder_above(self, inside: dict[Parts, Parts]) -> None:
        """`inside` has the paths without split of all folders of images."""
        classes = {parts[0] for parts in inside.values() if parts}
        for parent, splits in self.division.splits.items():
            above = self.division.place(parent)[1]
            if not above:
                continue
            below = {parts[len(above)] for parts in inside.values() if parts[:-1][: len(above)] == above}
            if len(classes) == 1 or len(below) > 1:
                held, place = ", ".join(sorted(f"{name}/" for name in splits)), "/".join(parent)
                right = f"{place}/ would be a class, but holds {held}; must be {self.root / place}"
                raise option_error("dataset.root_dir", str(self.root), right)

    def _refuse_empty_classes(self) -> None:
        """Refuse classes without images: the model could not learn them."""
        filled = {name for _, name in self.images["train"]}
        empty = [name for name in self.class_names if name not in filled]
        if empty and filled:
            many = f"{empty[0]} and {len(empty) - 1} more" if len(empty) > 1 else empty[0]
            right = f"{many} of its {len(self.class_names)} classes holds no image; remove the folder, or fill it"
            raise option_error("dataset.root_dir", str(self.root), right)

    def describe(self) -> list[str]:
        """Lines about what is held out, and what is not read."""
        names = {part: [path for path, _ in found] for part, found in self.images.items()}
        lines = describe_parts(names, what="image")
        if names["train"] and not names["validation"]:
            lines.insert(0, f"held out: {counted(num_held_out(len(names['train'])), 'image')}, chosen by their paths")
        return lines + ([f"not read: {describe_files(self.other_files)}"] if +self.other_files else [])


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


class ImageFolder(EncodedImages):
    """Images in a folder."""

    def __init__(self, tree: ImageTree, *, name: str, split: Split, sample_shape: tuple[int, ...], crop: Crop) -> None:
        self.root = tree.root
        self.name = name
        self.sample_shape = sample_shape
        self.crop = crop
        self.class_names = tree.class_names
        self.reading = tree.describe()
        labels = {class_name: label for label, class_name in enumerate(self.class_names)}
        rows = {part: tree.images[part] for part in SPLITS}
        for path, class_name in rows[split if rows["validation"] else "train"]:
            if labels and class_name not in labels:
                right = f"{path} is in no folder of a training class ({', '.join(self.class_names[:3])}, ...)"
                raise option_error("dataset.root_dir", str(self.root), right)
        if not rows["validation"]:
            paths = [os.fsencode(path.replace(os.sep, "/")) for path, _ in rows["train"]]
            chosen = held_out(paths, count=num_held_out(len(paths)))
            rows = {part: [rows["train"][n] for n in np.flatnonzero(chosen == (part != "train"))] for part in SPLITS}
        self.class_labels = np.array([labels[str(name)] for _, name in rows[split]], dtype=np.int64) if labels else None
        self.split_paths = {
            part: np.array([os.fsencode(path) for path, _ in rows[part]], dtype=bytes) for part in SPLITS
        }
        self.paths = self.split_paths[split]
        # Depends on the paths in the folder, not on image content: a moved folder is the same data.
        self.fingerprint = f"paths-{hashlib.sha256(self.paths.tobytes()).hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.paths)

    def name_of(self, index: int) -> str:
        return str(self._path_of(index))

    def _path_of(self, index: int) -> Path:
        return self.root / os.fsdecode(self.paths[index])

    def content_of(self, index: int) -> bytes:
        return read_bytes(File(self._path_of(index)), where=self.name_of(index))

    def file_sizes(self) -> dict[str, dict[str, int]]:
        names = {part: [os.fsdecode(path) for path in paths.tolist()] for part, paths in self.split_paths.items()}
        return {part: {path: _size(self.root / path) for path in paths} for part, paths in names.items()}

    def check_files(self, cache_folder: Path) -> Iterator[tuple[int, dict[int, str]]]:
        root = os.path.abspath(self.root)
        name = hashlib.sha256(f"{root} {self.fingerprint}".encode(errors="surrogateescape")).hexdigest()[:16]
        return check_files([os.path.join(root, os.fsdecode(path)) for path in self.paths], cache=cache_folder / name)


def build(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> ImageFolder:
    refuse(config, "hub_name")
    root = existing_path(config)
    if not root.is_dir():
        raise option_error("dataset.root_dir", config.root_dir, "is a file; folder needs a folder of images")
    shape = (photo_channels(config, input_channels), *height_and_width(config, default=(256, 256)))
    return ImageFolder(ImageTree(root), name=config.dataset_name, split=split, sample_shape=shape, crop=config.crop)
