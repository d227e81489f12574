# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Which images are for training, which are held out, and which are test data: one rule for all datasets.

Names of folders (`train/`, `Valid/`, `test2017/`), of tars and parquet files (`ds-val-000.tar`,
`test-00000-of-00001.parquet`) and of splits on the hub tell. Test data is never trained on.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from torchditan.datasets.options import Split
from torchditan.errors import counted, option_error, some

SPLITS: tuple[Split, ...] = ("train", "validation")
Part = Literal["train", "validation", "test", "beside"]
"""`beside`: next to the folders of the splits, so in none of them."""
PARTS: tuple[Part, ...] = ("train", "validation", "test", "beside")
Parts = tuple[str, ...]
"""The folders of a path: `("train", "cat")`."""
HELD_OUT_SHARE = 0.02
"""Of images without a split of their own."""

_PARTS: dict[str, Part] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validate", "validation", "dev", "eval"), "validation"),
    **dict.fromkeys(("holdout", "heldout", "hold_out", "held_out"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_FOLDER = re.compile(
    rf"(?:(.*)[-_ .])?({'|'.join(_PARTS)})(?:[-_ .]?(?:set|split|data|images))?[-_ .]?\d*"
    r"(?:([ab])|[-_ .](.*?)[-_ .]?\d*)?"
)
"""Other words of a folder's name, that of the split, and words after it: `DIV2K_train_HR`, `trainA`."""
_MADE_BY_SYSTEMS = frozenset(["__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"])


def part_of(name: str) -> Part | None:
    """The part that a folder, or a split of the hub, is named after: `Train`, `val2017`, `test_set`; else None."""
    match = _FOLDER.fullmatch(name.lower())
    return None if match is None or _words(match) is not None else _PARTS[match[2]]


def _words(match: re.Match[str]) -> tuple[str | None, ...] | None:
    """The words around that of the split; None without any."""
    words = (match[1], match[3], match[4])
    return words if any(words) else None


def part_of_file(name: str) -> Part | None:
    """The part that a tar or parquet file is named after: the last of the words in `ds-val-000.tar`; else None."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((_PARTS[word] for word in reversed(words) if word in _PARTS), None)


def is_hidden(name: str) -> bool:
    """Whether a file or folder counts nowhere: `.cache`, `._a.jpg` of macOS, thumbnails of systems."""
    return name.startswith(".") or name in _MADE_BY_SYSTEMS


class Division:
    """Divides folders into training, validation and test data, by their names.

    A name is that of a split if the folders next to it agree: `train/` with `test/` or alone, `test/` next to `cat/`
    and `dog/`, `seg_train/` with `seg_test/`, `DIV2K_train_HR/` with `DIV2K_valid_HR/`. A `train/` next to `plane/` is
    a folder of trains. Splits may be below other folders (`cat/train/`), and twice in a path
    (`training_set/training_set/cat/`).

    Args:
        folders: all folders that hold data themselves. The last name of a tar or parquet file counts as one too.
        has_classes: whether folders may be classes. `dev/` next to `anna/` is then a class, unless it has a folder that
            is named like another one next to it.
    """

    def __init__(self, folders: Iterable[Parts], *, has_classes: bool) -> None:
        self.folders = sorted(set(folders))
        groups: dict[tuple[Parts, tuple[str | None, ...] | None], dict[str, Part]] = defaultdict(dict)
        for parts in self.folders:
            for depth, name in enumerate(parts):
                if (match := _FOLDER.fullmatch(name.lower())) is not None:
                    groups[parts[:depth], _words(match)][name] = _PARTS[match[2]]
        self.splits: dict[Parts, dict[str, Part]] = defaultdict(dict)
        """Folder -> the folders in it that are splits."""
        for (parent, words), children in sorted(groups.items(), key=lambda group: len(group[0][0])):
            if self._is_split(parent, children, has_words=words is not None, has_classes=has_classes):
                self.splits[parent] |= children

    def _is_split(self, parent: Parts, children: dict[str, Part], *, has_words: bool, has_classes: bool) -> bool:
        found = set(children.values())
        if len(found) > 1:
            return not has_words or "train" in found
        is_inside = bool(self._splits_of(parent))
        if has_words and not is_inside:
            return False
        below = [parts[len(parent) :] for parts in self.folders if parts[: len(parent)] == parent]
        others = {parts[0] for parts in below if parts and parts[0] not in children}
        if is_inside:  # of folders in a split, only one that repeats its name: others are classes
            return not others and [*children] == [parent[-1]]
        if found == {"train"} or not others:
            return not others
        mirrored = {parts[1] for parts in below if parts and parts[0] in children and len(parts) > 1} & others
        return not has_classes or found == {"test"} or bool(mirrored)

    def _splits_of(self, parts: Parts) -> dict[int, Part]:
        """The folders in a path that are splits: place in the path -> part."""
        found = {depth: self.splits.get(parts[:depth], {}).get(name) for depth, name in enumerate(parts)}
        return {depth: part for depth, part in found.items() if part is not None}

    def place(self, parts: Parts) -> tuple[Part, Parts]:
        """The part of a folder, and its path without the names of splits."""
        found = self._splits_of(parts)
        inside = tuple(name for depth, name in enumerate(parts) if depth not in found)
        for depth in range(len(parts) + 1):
            if depth not in found and "train" in self.splits.get(parts[:depth], {}).values():
                return "beside", inside
        parts_found = set(found.values())
        return next((part for part in ("test", "validation") if part in parts_found), "train"), inside


def divide_files(names: Iterable[str]) -> dict[Part, list[str]]:
    """Paths of tars or parquet files below a folder, by part: by the names of their folders and of themselves."""
    paths = {name: tuple(name.split("/")) for name in names}
    folders = {name: (*path[:-1], part_of_file(path[-1]) or path[-1]) for name, path in paths.items()}
    division = Division(folders.values(), has_classes=False)
    parts: dict[Part, list[str]] = {part: [] for part in PARTS}
    for name, folder in folders.items():
        parts[division.place(folder)[0]].append(name)
    return parts


def num_held_out(num_images: int) -> int:
    """Two percent; at least one of two or more."""
    return max(round(HELD_OUT_SHARE * num_images), min(1, num_images - 1), 0)


def held_out(names: Iterable[bytes], *, count: int) -> np.ndarray:
    """(N,) bool: the `count` images whose names have the lowest checksums. The choice needs no list of files."""
    checksums = np.array([zlib.crc32(name) for name in names])
    chosen = np.zeros(len(checksums), dtype=bool)
    chosen[np.argsort(checksums, kind="stable")[:count]] = True
    return chosen


def describe_parts(names: Mapping[Part, Sequence[str]], *, what: str) -> list[str]:
    """Lines about what is not for training: `held out: 12 images, val/a.png, val/b.png, val/c.png and 9 more`."""
    titles: dict[Part, str] = {
        "validation": "held out",
        "test": "test data, not read",
        "beside": "in no split, not read",
    }
    found = [(title, names[part]) for part, title in titles.items() if names[part]]
    return [f"{title}: {counted(len(paths), what)}, {some(paths)}" for title, paths in found]


def walk(root: Path) -> Iterator[tuple[Parts, list[str]]]:
    """(path below `root`, sorted names of its files) of a folder and all below it, through links, without hidden ones.

    Raises:
        ConfigError: a link leads to a folder that contains the link, so the walk would not end.
    """
    for folder, subfolders, names in os.walk(root, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not is_hidden(name))
        for name in subfolders:
            link = Path(folder, name)
            if not link.is_symlink():
                continue
            target = link.resolve()
            if any(above.resolve().is_relative_to(target) for above in _up_to(root, link)):
                right = f"{link.relative_to(root)} is a link to {target}, which contains it; remove the link"
                raise option_error("dataset.root_dir", str(root), right)
        yield Path(folder).relative_to(root).parts, sorted(name for name in names if not is_hidden(name))


def _up_to(root: Path, path: Path) -> Iterator[Path]:
    """The folders that contain a path, from the nearest to `root`."""
    while path != root:
        path = path.parent
        yield path


def suffix_of(name: str) -> str:
    """`.jpg` of `a.JPG`, `.tar.gz` of `a.tar.gz`."""
    stem, suffix = os.path.splitext(name.lower())
    return f".tar{suffix}" if stem.endswith(".tar") else suffix
