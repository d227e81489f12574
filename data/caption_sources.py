# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Sources of captioned images and videos: folders, metadata.jsonl, tar shards, parquet files, the hub.

Notable:
- each source is read once into a list of `Entry`, sorted by name, the same on every machine. Images are opened in
  place when they are needed, including members of tar files;
- inconsistent sources (a caption without an image, two images with one name, a path outside the folder) are refused
  here, in one line.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from torchditan.config import options
from torchditan.config.errors import ConfigError, option_error, some
from torchditan.config.optional_libraries import import_optional
from torchditan.datasets.hub import _load as load_hub
from torchditan.datasets.images import IMAGE_SUFFIXES, Encoded, corrupt_image
from torchditan.datasets.videos import VIDEO_SUFFIXES

METADATA_FILE = "metadata.jsonl"
Refusal = Callable[[str], ConfigError]
"""Message -> the error with the option and its value."""


@dataclass(frozen=True)
class File:
    path: Path

    def open(self) -> BinaryIO:
        return self.path.open("rb")


@dataclass(frozen=True)
class TarMember:
    """A file inside an uncompressed tar, read in place."""

    path: Path
    offset: int
    size: int

    def open(self) -> BinaryIO:
        return io.BufferedReader(_Part(self.path.open("rb", buffering=0), self.offset, self.size))


@dataclass(frozen=True)
class Cell:
    """A row of an Arrow image column: bytes and path as the hub stores them, or only bytes."""

    column: Any
    row: int

    def open(self) -> BinaryIO:
        value = self.column[self.row].as_py()
        if isinstance(value, dict):
            if value["bytes"] is None and value.get("path"):  # an image folder of the hub, already downloaded
                return Path(value["path"]).open("rb")
            value = value["bytes"]
        if value is None:
            raise OSError("no data")
        return io.BytesIO(value)


@dataclass(frozen=True)
class Frames:
    """A folder of numbered frames, sorted by number."""

    files: tuple[File, ...]


@dataclass(frozen=True)
class Entry:
    """An image or a video with its caption."""

    name: str
    """Path in the dataset, with slashes."""
    caption: str | None
    """None if it has no caption."""
    content: Encoded | Frames
    repeats: int = 1
    """Number of times that an epoch shows it."""


class _Part(io.RawIOBase):
    """`size` bytes of an open file, starting at `offset`."""

    def __init__(self, file: Any, offset: int, size: int) -> None:
        self.file, self.offset, self.size = file, offset, size
        self.place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence])
        return self.place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self.size - self.place))
        self.file.seek(self.offset + self.place)
        data = self.file.read(count)
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)

    def readall(self) -> bytes:
        self.file.seek(self.offset + self.place)
        data = self.file.read(max(0, self.size - self.place))
        self.place += len(data)
        return data

    def close(self) -> None:
        self.file.close()
        super().close()


def read_entries(root: Path, *, config: options.Dataset) -> list[Entry]:
    """Read all entries under `root`, a folder or a file; sorted by name.

    Raises:
        ConfigError: the source is empty or inconsistent.
    """
    refusal = _refusal_of(root)
    suffix = root.suffix if root.is_file() else ""
    tars = [root] if suffix == ".tar" else sorted(root.glob("*.tar"))
    tables = [root] if suffix == ".parquet" else sorted(root.rglob("*.parquet"))
    if tars:
        entries = _read_tars(tars, is_video=config.num_frames is not None, refusal=refusal)
    elif tables:
        entries = _read_parquet(root, tables, config, refusal=refusal)
    elif (root / METADATA_FILE).is_file():
        entries = _read_metadata(root, config, refusal=refusal)
    elif root.is_dir():
        entries = _read_folder(root, is_video=config.num_frames is not None, refusal=refusal)
    else:
        raise refusal("must be a folder, a .tar or a .parquet file")
    if not entries:
        raise refusal(f"holds no {_kind(config.num_frames is not None)}s with captions")
    return sorted(entries, key=lambda entry: entry.name)


def _refusal_of(root: Path) -> Refusal:
    return functools.partial(option_error, "dataset.root_dir", str(root))


def _kind(is_video: bool) -> str:
    return "video" if is_video else "image"


def _clean(text: str, *, where: str, refusal: Refusal) -> str:
    """A caption in one line, without surrounding white space."""
    text = " ".join(text.split())
    if not text:
        raise refusal(f"the caption of {where} is empty; write one, or remove it")
    return text


def _decode(data: bytes, *, where: str, refusal: Refusal) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise refusal(f"{where} is not UTF-8 text") from None
    return _clean(text, where=where, refusal=refusal)


def _pair(
    pictures: list[tuple[str, str, Encoded | Frames]], captions: dict[str, str], *, is_video: bool, refusal: Refusal
) -> list[Entry]:
    """Match pictures (name without extension, name, content) with captions by name."""
    by_stem: dict[str, str] = {}
    for stem, name, _ in pictures:
        if stem in by_stem:
            right = f"{by_stem[stem]} and {name} share one caption; rename or remove one"
            raise refusal(right)
        by_stem[stem] = name
    alone = captions.keys() - by_stem.keys()
    if alone:
        texts = some(sorted(f"{stem}.txt" for stem in alone))
        right = f"no {_kind(is_video)} belongs to the caption {texts}; add or remove"
        raise refusal(right)
    return [Entry(name, captions.get(stem), content) for stem, name, content in pictures]


def _walk(root: Path) -> Iterable[tuple[str, Path, list[str]]]:
    """(path with slashes and a final slash, folder, its files) of each folder, without hidden ones."""
    for folder, subfolders, names in os.walk(root, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        relative = Path(folder).relative_to(root).as_posix()
        yield "" if relative == "." else f"{relative}/", Path(folder), sorted(n for n in names if not n.startswith("."))


def _read_folder(root: Path, *, is_video: bool, refusal: Refusal) -> list[Entry]:
    pictures: list[tuple[str, str, Encoded | Frames]] = []
    captions: dict[str, str] = {}
    suffixes = VIDEO_SUFFIXES if is_video else IMAGE_SUFFIXES
    for prefix, folder, names in _walk(root):
        found = [name for name in names if os.path.splitext(name)[1].lower() in suffixes]
        for name in found:
            pictures.append((prefix + os.path.splitext(name)[0], prefix + name, File(folder / name)))
        if is_video and prefix and not found:
            frames = _numbered_frames(folder, names)
            if frames.files:
                pictures.append((prefix[:-1], prefix[:-1], frames))
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix.lower() == ".txt":
                text = (folder / name).read_bytes()
                captions[prefix + stem] = _decode(text, where=prefix + name, refusal=refusal)
    entries = _pair(pictures, captions, is_video=is_video, refusal=refusal)
    return [Entry(entry.name, entry.caption, entry.content, _repeats(entry.name, refusal=refusal)) for entry in entries]


def _numbered_frames(folder: Path, names: list[str]) -> Frames:
    images = [name for name in names if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES]
    images.sort(key=lambda name: ([int(digits) for digits in re.findall(r"\d+", name)], name))
    return Frames(tuple(File(folder / name) for name in images))


def _repeats(name: str, *, refusal: Refusal) -> int:
    """10 for `10_dog/a.png`, as kohya's scripts name folders. A year (`2024_dogs`) does not count."""
    match = re.match(r"(\d{1,3})_[^/]*/", name)
    if match is None:
        return 1
    if int(match[1]) == 0:
        raise refusal(f"the folder {match[0]} repeats its images 0 times; must be at least 1")
    return int(match[1])


def _read_metadata(root: Path, config: options.Dataset, *, refusal: Refusal) -> list[Entry]:
    """Read lines of `{"file_name": "a.png", "text": "a dog", "repeats": 2}`. Other files are ignored."""
    entries: dict[str, Entry] = {}
    try:
        lines = (root / METADATA_FILE).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise refusal(f"{METADATA_FILE} is not UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{METADATA_FILE}, line {number}"
        row = _read_line(line, where=where, refusal=refusal)
        if config.caption_key not in row:
            right = f"{where} has no such column; must be one of {', '.join(row)}"
            raise option_error("dataset.caption_key", config.caption_key, right)
        caption, repeats = row[config.caption_key], row.get("repeats", 1)
        if not isinstance(caption, str):
            raise refusal(f"{where}: {config.caption_key} must be text")
        if type(repeats) is not int or repeats < 1:
            raise refusal(f"{where}: repeats must be an integer of at least 1")
        name = PurePosixPath(row["file_name"]).as_posix()
        if name in entries:
            raise refusal(f"{where}: {name} is listed twice; use repeats to show it more often")
        content = _find_listed(root, name, where=where, is_video=config.num_frames is not None, refusal=refusal)
        entries[name] = Entry(name, _clean(caption, where=where, refusal=refusal), content, repeats)
    return list(entries.values())


def _read_line(line: str, *, where: str, refusal: Refusal) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise refusal(f"{where} is not JSON ({error})") from None
    if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
        raise refusal(f'{where}: must be {{"file_name": "...", "text": "..."}}')
    return row


def _find_listed(root: Path, name: str, *, where: str, is_video: bool, refusal: Refusal) -> Encoded | Frames:
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or os.path.isabs(name):
        raise refusal(f"{where}: {name} is outside the folder; must be a path inside it")
    path = root / relative
    if is_video and path.is_dir():
        frames = _numbered_frames(path, [entry.name for entry in path.iterdir() if not entry.name.startswith(".")])
        if not frames.files:
            raise refusal(f"{where}: the folder {name} holds no frames")
        return frames
    if not path.is_file():
        raise refusal(f"{where}: {name} does not exist")
    if path.suffix.lower() not in (VIDEO_SUFFIXES if is_video else IMAGE_SUFFIXES):
        hint = "" if is_video else "; videos need dataset.num_frames"
        raise refusal(f"{where}: {name} is not {'a video' if is_video else 'an image'}{hint}")
    return File(path)


def _read_tars(paths: list[Path], *, is_video: bool, refusal: Refusal) -> list[Entry]:
    """Shards of `key.jpg` with `key.txt`, as WebDataset writes them. A key ends at the first dot of the file name."""
    pictures: list[tuple[str, str, Encoded | Frames]] = []
    captions: dict[str, str] = {}
    for path in paths:
        for name, member in _members(path, refusal=refusal):
            folder, _, base = f"{path.name}/{name}".rpartition("/")
            if base.startswith("."):
                continue
            key, suffix = f"{folder}/{base.split('.')[0]}", os.path.splitext(base)[1].lower()
            if suffix in (VIDEO_SUFFIXES if is_video else IMAGE_SUFFIXES):
                pictures.append((key, f"{path.name}/{name}", member))
            elif suffix == ".txt":
                with member.open() as file:
                    captions[key] = _decode(file.read(), where=f"{path.name}/{name}", refusal=refusal)
    return _pair(pictures, captions, is_video=is_video, refusal=refusal)


def _members(path: Path, *, refusal: Refusal) -> list[tuple[str, TarMember]]:
    """(name, place) of every file in an uncompressed tar."""
    try:
        with tarfile.open(path, "r:") as tar:
            members = [member for member in tar if member.isreg() and not member.issparse()]
    except (tarfile.TarError, OSError) as error:
        raise refusal(f"{path.name} is not a readable, uncompressed tar ({error})") from error
    size = path.stat().st_size
    for member in members:
        if member.offset_data + member.size > size:
            raise refusal(f"{path.name} is truncated: {member.name} is incomplete")
    return [(member.name, TarMember(path, member.offset_data, member.size)) for member in members]


def _read_parquet(root: Path, paths: list[Path], config: options.Dataset, *, refusal: Refusal) -> list[Entry]:
    parquet = import_optional("pyarrow.parquet", extra="hub")
    pyarrow = import_optional("pyarrow", extra="hub")
    entries = []
    for path in paths:
        try:
            table = parquet.read_table(path, memory_map=True)
        except pyarrow.ArrowInvalid as error:
            raise refusal(f"{path.name} is not a readable parquet file ({str(error).splitlines()[0]})") from error
        where = path.name if path == root else path.relative_to(root).as_posix()
        entries += _read_table(table, config, where=where, refusal=refusal)
    return entries


def read_hub(config: options.Dataset) -> list[Entry]:
    """The training split of `dataset.hub_name`."""
    assert config.hub_name is not None
    rows = load_hub(config.hub_name, split="train", streaming=False)
    datasets = import_optional("datasets", extra="hub")
    feature = rows.features.get(config.image_key)
    if isinstance(feature, datasets.Image):
        rows = rows.cast_column(config.image_key, datasets.Image(decode=False))
    refusal = functools.partial(option_error, "dataset.hub_name", config.hub_name)
    return _read_table(rows.data, config, where=config.hub_name, refusal=refusal)


def _read_table(table: Any, config: options.Dataset, *, where: str, refusal: Refusal) -> list[Entry]:
    """Read the rows of an Arrow table. `where` names it in errors."""
    types = import_optional("pyarrow", extra="hub").types
    if config.num_frames is not None:
        right = "parquet files and hub datasets contain images; leave it out, or use files with --dataset.root_dir"
        raise option_error("dataset.num_frames", config.num_frames, right)
    for option, key in (("image_key", config.image_key), ("caption_key", config.caption_key)):
        if key not in table.column_names:
            right = f"must be one of the columns of {where}: {', '.join(table.column_names)}"
            raise option_error(f"dataset.{option}", key, right)
    image_type, caption_type = table.schema.field(config.image_key).type, table.schema.field(config.caption_key).type
    has_bytes = types.is_struct(image_type) and image_type.get_field_index("bytes") >= 0
    if not has_bytes and not types.is_binary(image_type) and not types.is_large_binary(image_type):
        raise option_error("dataset.image_key", config.image_key, f"holds {image_type} in {where}; must be images")
    if not types.is_string(caption_type) and not types.is_large_string(caption_type):
        raise option_error("dataset.caption_key", config.caption_key, f"holds {caption_type} in {where}; must be text")
    images, captions = table.column(config.image_key), table.column(config.caption_key).to_pylist()
    width = len(str(len(captions)))
    entries = []
    for row, caption in enumerate(captions):
        name = f"{where}, row {row:0{width}}"
        text = None if caption is None else _clean(caption, where=name, refusal=refusal)
        entries.append(Entry(name, text, Cell(images, row)))
    return entries


def read_bytes(content: Encoded, *, where: str) -> bytes:
    """Read the whole file.

    Raises:
        CorruptImageError: it cannot be read.
    """
    try:
        with content.open() as file:
            return file.read()
    except OSError as error:
        raise corrupt_image(where, error.strerror or str(error), can_skip=False) from error
