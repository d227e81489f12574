# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Tar shards as WebDataset writes them: where they are, an index of their members on disk, and members read in place.

Notable:
- a sample is all members of one key, the name up to the first dot of the file name: `0001.jpg` with `0001.cls`;
- the index of a folder, a pattern or an address is one file with a line for each shard, appended when the shard was
  read. A pass that is killed continues. A shard whose size or time changed is read again;
- the index holds names, places, the text of captions, `.json` and `.cls`, and what is damaged. Opening reads no shard;
- images are checked as file_check.py checks files, in the same pass;
- shards may be at an address of fsspec (remote_files.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from torchditan.datasets.byte_ranges import ByteRanges
from torchditan.datasets.file_check import damage_in
from torchditan.datasets.images import IMAGE_SUFFIXES, describe_files
from torchditan.datasets.options import Split
from torchditan.datasets.remote_files import RemoteFile, list_folder
from torchditan.datasets.splits import (
    PARTS,
    Division,
    Part,
    describe_parts,
    divide_files,
    is_hidden,
    part_of,
    suffix_of,
    walk,
)
from torchditan.errors import option_error, some
from torchditan.run.progress import report_progress

CAPTION_SUFFIXES = (".txt", ".caption")
TEXT_SUFFIXES = frozenset([".cls", ".json", *CAPTION_SUFFIXES])
MOST_TEXT = 1 << 20
_VERSION = 3
_META = re.compile(r"__[^/]*__($|/)")
"""Members that webdataset skips."""
_REMOTE_THREADS = 8


@dataclass(frozen=True)
class TarMember:
    """A file inside an uncompressed tar, read in place."""

    path: Path | RemoteFile
    offset: int
    size: int
    damage: str | None = None
    """Why it cannot be read."""

    def open(self) -> BinaryIO:
        if self.damage is not None:
            raise OSError(self.damage)
        return cast(BinaryIO, _open_part(self.path, self.offset, self.size))


def _open_part(file: Path | RemoteFile, offset: int, size: int) -> ByteRanges:
    ranges = [(offset, offset + size)]
    if isinstance(file, RemoteFile):
        return ByteRanges(file.read_at, ranges)
    descriptor = os.open(file, os.O_RDONLY)
    return ByteRanges(
        lambda place, count: os.pread(descriptor, count, place), ranges, close=lambda: os.close(descriptor)
    )


@dataclass(frozen=True)
class Place:
    """A shard, and its state when it was found."""

    name: str
    """Its path below the folder that all shards share, in names of samples."""
    file: Path | RemoteFile
    size: int
    time: str
    """Time of its last change, or what its store has instead."""


@dataclass
class Members:
    """The members of a shard with one suffix."""

    keys: list[int] = field(default_factory=list)
    """Of each member, the number of its key in `Shard.keys`."""
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The content of text members; bytes that are not UTF-8 are lone surrogates."""
    damages: dict[str, str] = field(default_factory=dict)
    """Number of an unreadable member, as text -> the reason."""


@dataclass
class Shard:
    place: Place
    keys: list[str]
    """Folder and key of each sample: `a/0001`."""
    members: dict[str, Members]
    """By everything after the key: `.jpg`, `.seg.png`."""
    damage: str | None
    """Why members may be missing at its end."""


def json_object(text: str) -> dict[str, Any]:
    """The content of a `.json` member.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError('must be {"key": value}')
    return values


def kind_of(suffix: str) -> str:
    """`.png` of `.seg.PNG`."""
    return os.path.splitext(f"x{suffix}")[1].lower()


@dataclass(frozen=True)
class Shards:
    """The tar shards of `dataset.root_dir`, by part, not read yet."""

    root: str
    places: dict[Part, list[Place]]
    other_files: Counter[str]
    """Number of other files in the folder of the shards, by suffix."""
    is_folder: bool
    cache_folder: Path | None

    def open(self, split: Split) -> list[Shard]:
        """The index of the shards of a split, sorted by name.

        Raises:
            ConfigError: a shard cannot be read, or shards for training have folders of held-out or test data.
        """
        absolute = self.root if "://" in self.root else os.path.abspath(Path(self.root).expanduser())
        name = hashlib.sha256(f"{_VERSION} {absolute} {split}".encode(errors="surrogateescape")).hexdigest()[:16]
        path = None if self.cache_folder is None else self.cache_folder / f"{name}.jsonl"
        shards = _read_index(self.places[split], root=self.root, path=path)
        if split == "train":
            self._refuse_splits_inside(shards)
        return shards

    def _refuse_splits_inside(self, shards: list[Shard]) -> None:
        folders = {posixpath.normpath(posixpath.dirname(key)) for shard in shards for key in shard.keys}
        parts = {folder: tuple(folder.split("/")) for folder in folders if folder != "."}
        division = Division(parts.values(), has_classes=False)
        found = sorted(folder for folder, path in parts.items() if division.place(path)[0] in ("validation", "test"))
        if found:
            right = (
                f"its tars hold {some(found)}; write each split into tars of its own, such as train.tar and test.tar"
            )
            raise option_error("dataset.root_dir", self.root, right)

    def describe(self) -> list[str]:
        """Lines about what is held out, and what is not read."""
        names = {part: [place.name for place in places] for part, places in self.places.items()}
        lines = describe_parts(names, what="tar shard")
        return lines + ([f"not read: {describe_files(self.other_files)}"] if self.other_files else [])


def find_shards(root: str, *, cache_folder: Path | None, blocks_gib: float | None = None) -> Shards:
    """The shards of `dataset.root_dir`: a folder of them, one file, a pattern or an address.

    Only the shards of a folder are divided into splits. What a pattern or a file names is for training.

    Args:
        cache_folder: keeps the index, and blocks of remote shards; None keeps nothing.
        blocks_gib: `dataset.remote_cache_gib`.

    Raises:
        ConfigError: a shard does not exist or cannot be reached, or none is for training.
    """
    folder = None if cache_folder is None else cache_folder / "tars"
    other_files: Counter[str] = Counter()
    is_folder = not root.endswith(".tar") and "{" not in root
    if "://" in root:
        limit = None if blocks_gib is None else int(blocks_gib * 2**30)
        found = _find_remote(root, blocks=None if folder is None else folder / "blocks", limit=limit)
    else:
        is_folder = Path(root).expanduser().is_dir()
        found = _find_local(root, other_files)
    places: dict[Part, list[Place]] = {part: found if part == "train" else [] for part in PARTS}
    if is_folder:
        by_name = {place.name: place for place in found}
        places = {part: [by_name[name] for name in names] for part, names in divide_files(by_name).items()}
    if not places["train"]:
        named = f" for training, only {some(place.name for place in found)}" if found else ""
        packed = f"; it has {describe_files(other_files)}" if other_files else ""
        raise option_error("dataset.root_dir", root, f"holds no .tar files{named}{packed}")
    return Shards(root, places, other_files, is_folder, folder)


def read_text(root: str, name: str) -> str | None:
    """The text of a small file in the folder of these shards; None if there is none. Bytes that are not UTF-8 are kept
    as in names of files.

    Raises:
        ConfigError: it cannot be read.
    """
    folder = posixpath.dirname(expand_braces(root)[0]) if root.endswith(".tar") else root
    if "://" in root:
        system, found = list_folder(folder)
        infos = [info for info in found if posixpath.basename(info["name"]) == name]
        files = [RemoteFile(system.unstrip_protocol(info["name"]), info["size"], None) for info in infos]
        return files[0].read_at(0, MOST_TEXT).decode("utf-8-sig", errors="surrogateescape") if files else None
    path = Path(folder).expanduser() / name
    return path.read_text(encoding="utf-8-sig", errors="surrogateescape") if path.is_file() else None


def expand_braces(pattern: str) -> list[str]:
    """`a-{000..002}.tar` -> a-000.tar, a-001.tar, a-002.tar; `{a,b}` lists words. Several braces are combined."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] if place % 2 == 0 else _choices(part) for place, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*choices)]


def _choices(text: str) -> list[str]:
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is None:
        return text.split(",")
    first, last = match.groups()
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def _find_local(root: str, other_files: Counter[str]) -> list[Place]:
    path = Path(root).expanduser()
    if path.is_dir():
        files = [(parts, name) for parts, names in walk(path) for name in names]
        other_files.update(suffix_of(name) for _, name in files if suffix_of(name) not in (".tar", *TEXT_SUFFIXES))
        names = sorted("/".join((*parts, name)) for parts, name in files if suffix_of(name) == ".tar")
        paths = [path / name for name in names]
    else:
        paths = [path] if path.exists() else [Path(text) for text in expand_braces(str(path))]
        names = _names([path.as_posix() for path in paths])
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise option_error("dataset.root_dir", root, _not_there(missing, len(paths)))
    states = [path.stat() for path in paths]
    return [
        Place(name, path.absolute(), state.st_size, str(state.st_mtime_ns))
        for name, path, state in zip(names, paths, states, strict=True)
    ]


def _names(paths: list[str]) -> list[str]:
    """The paths below their common folder."""
    common = posixpath.commonpath([posixpath.dirname(path) for path in paths]) if paths else ""
    return [posixpath.relpath(path, common or ".") for path in paths]


def _find_remote(root: str, *, blocks: Path | None, limit: int | None) -> list[Place]:
    addresses = expand_braces(root)
    is_folder = len(addresses) == 1 and not root.endswith(".tar")
    infos: dict[str, dict[str, Any]] = {}
    for folder in [root] if is_folder else sorted({posixpath.dirname(address) for address in addresses}):
        system, found = list_folder(folder)
        infos |= {info["name"]: info for info in found}
    if is_folder:
        below = [info["name"] for info in infos.values() if info["type"] == "directory"]
        for path in below:
            if part_of(posixpath.basename(path.rstrip("/"))) is not None:
                infos |= {info["name"]: info for info in list_folder(system.unstrip_protocol(path))[1]}
        visible = [path for path in infos if not is_hidden(posixpath.basename(path))]
        paths = sorted(path for path in visible if path.endswith(".tar"))
        top = system._strip_protocol(root).rstrip("/")
        names = [posixpath.relpath(path, top) for path in paths]
    else:
        paths = [system._strip_protocol(address) for address in addresses]
        names = _names(paths)
    missing = [path for path in paths if path not in infos]
    if missing:
        raise option_error("dataset.root_dir", root, _not_there(missing, len(paths)))
    return [
        _remote_place(name, system.unstrip_protocol(path), infos[path], blocks=blocks, limit=limit)
        for name, path in zip(names, paths, strict=True)
    ]


def _remote_place(name: str, address: str, info: dict[str, Any], *, blocks: Path | None, limit: int | None) -> Place:
    stamps = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
    time = next((str(info[stamp]) for stamp in stamps if info.get(stamp) is not None), "")
    version = hashlib.sha256(f"{address} {info['size']} {time}".encode()).hexdigest()[:16]
    file = RemoteFile(address, info["size"], None if blocks is None else blocks / version, limit)
    return Place(name, file, info["size"], time)


def _not_there(missing: list[str], num_shards: int) -> str:
    return "does not exist" if num_shards == 1 else f"{some(missing)} of {num_shards} shards do not exist"


def _read_index(places: list[Place], *, root: str, path: Path | None) -> list[Shard]:
    """The index of these shards. Those that `path` lacks, or has in another state, are read and added to it."""
    shards = _load(places, path)
    if path is None:
        _read_missing(places, shards, root=root, write=lambda line: None)
    elif len(shards) < len(places):
        with _lock(path):
            shards = _load(places, path)  # another rank may have read them
            with contextlib.ExitStack() as stack:
                write: Callable[[bytes], object] = lambda line: None  # noqa: E731
                with contextlib.suppress(OSError):  # a folder that cannot be written: the next start reads them again
                    write = stack.enter_context(open(path, "ab", buffering=0)).write
                    write(b"\n")  # after a line that a killed process did not finish
                _read_missing(places, shards, root=root, write=write)
    return [shards[place.name] for place in places]


def _read_missing(
    places: list[Place], shards: dict[str, Shard], *, root: str, write: Callable[[bytes], object]
) -> None:
    missing = [place for place in places if place.name not in shards]
    if not missing:
        return
    is_remote = any(isinstance(place.file, RemoteFile) for place in missing)
    with (
        report_progress(f"reading the members of {root}", total=len(missing), unit="shards") as advance,
        ThreadPoolExecutor(_REMOTE_THREADS) as threads,
    ):
        read: Iterator[Shard] = threads.map(read_shard, missing) if is_remote else map(read_shard, missing)
        for shard in read:
            shards[shard.place.name] = shard
            with contextlib.suppress(OSError):
                write(_to_line(shard))
            advance(1)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Other ranks wait until one has read the shards. Without locks, each reads them, and all write the same lines."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path.with_suffix(".lock"), "w")), fcntl.LOCK_EX)
        yield


def _to_line(shard: Shard) -> bytes:
    members = {suffix: vars(members) for suffix, members in shard.members.items()}
    state = (shard.place.name, shard.place.size, shard.place.time)
    return json.dumps([*state, shard.keys, members, shard.damage], separators=(",", ":")).encode() + b"\n"


def _load(places: list[Place], path: Path | None) -> dict[str, Shard]:
    """Name -> shard, of those that the index has in their present state. Lines that do not parse do not count."""
    here = {place.name: place for place in places}
    shards: dict[str, Shard] = {}
    if path is None or not path.exists():
        return shards
    with open(path, "rb") as file:
        for line in file:
            try:
                name, size, time, keys, members, damage = json.loads(line)
                place = here.get(name)
                if place is not None and (place.size, place.time) == (size, time):
                    columns = {suffix: Members(**column) for suffix, column in members.items()}
                    shards[name] = Shard(place, keys, columns, damage)
            except (ValueError, TypeError, AttributeError, RecursionError):
                continue
    return shards


def read_shard(place: Place) -> Shard:
    """Read the names of all members of a shard, its texts, and the ends of its images.

    Raises:
        ConfigError: it cannot be opened or read. Damage of its content is part of the result.
    """
    shard = Shard(place, [], {}, None)
    try:
        with _open_part(place.file, 0, place.size) as file:
            shard.damage = _read_members(shard, file)
    except OSError as error:
        raise option_error("dataset.root_dir", str(place.file), f"cannot be read: {error.strerror or error}") from error
    return shard


def _read_members(shard: Shard, file: ByteRanges) -> str | None:
    """Add all members, and return why some may be missing."""
    numbers: dict[str, int] = {}
    last, offset = None, 0
    try:
        with tarfile.open(fileobj=cast(BinaryIO, file), mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep all
                last, offset = member.name, tar.offset
                if not member.isdir() and not _is_left_out(member.name):
                    _add(shard, numbers, member, file)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:  # numbers, and chains of headers
        if last is None:
            return f"not a readable, uncompressed tar ({error})"
    # tarfile also stops at a header that is damaged or incomplete. A whole tar ends with blocks of zeros.
    end = _read(file, offset, tarfile.BLOCKSIZE)
    if len(end) == tarfile.BLOCKSIZE and not any(end):
        return None
    return f"truncated or damaged after the start of {last}"


def _is_left_out(name: str) -> bool:
    """Members in hidden folders, and those that webdataset skips."""
    return bool(_META.match(name)) or any(is_hidden(part) for part in name.split("/") if part != ".")


def _add(shard: Shard, numbers: dict[str, int], member: tarfile.TarInfo, file: ByteRanges) -> None:
    folder, slash, base = member.name.rpartition("/")
    key, dot, suffix = base.partition(".")
    if not key or not dot:  # hidden, or without a suffix
        return
    key = f"{folder}{slash}{key}"
    if key not in numbers:
        numbers[key] = len(shard.keys)
        shard.keys.append(key)
    members = shard.members.setdefault(f".{suffix}", Members())
    is_stored = member.isreg() and not member.issparse()
    is_whole = is_stored and 0 <= member.size <= shard.place.size - member.offset_data
    kind = kind_of(f".{suffix}")
    if kind in TEXT_SUFFIXES:
        if not is_whole:
            return
        text = _read(file, member.offset_data, min(member.size, MOST_TEXT))
        members.texts.append(text.decode("utf-8-sig", "surrogateescape"))
    damage = None if is_whole else "incomplete"
    if not is_stored:
        damage = "a sparse file, as GNU tar writes with -S" if member.issparse() else "a link, not a file"
    if is_whole and kind in IMAGE_SUFFIXES:
        damage = _image_damage(file, member)
    if damage is not None:
        members.damages[str(len(members.keys))] = damage
    members.keys.append(numbers[key])
    members.offsets.append(member.offset_data)
    members.sizes.append(member.size if is_whole else 0)  # a damaged size may exceed 64 bits


def _read(file: ByteRanges, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


def _image_damage(file: ByteRanges, member: tarfile.TarInfo) -> str | None:
    first, size = member.offset_data, member.size
    start = _read(file, first, min(12, size))
    end = _read(file, first + max(0, size - 12), min(12, size))
    image = ByteRanges(functools.partial(_read, file), [(first, first + size)])
    return damage_in(cast(BinaryIO, image), start=start, end=end, size=size)
