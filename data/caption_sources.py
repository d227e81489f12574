# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Sources of captioned images and videos: folders, metadata.jsonl, tar shards, parquet files, the hub.

Notable:
- each source is read once into a list of `Entry`, sorted by name, the same on every machine. Images are opened in
  place when they are needed; tars.py reads tar shards;
- inconsistent sources (a caption without an image, two images with one name, a path outside the folder) are refused
  here, in one line.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from torchditan.config import options
from torchditan.config.errors import ConfigError, is_finite_number, option_error, shorten, some
from torchditan.config.optional_libraries import import_optional
from torchditan.config.prompts import is_unicode
from torchditan.datasets.folder import walk_folders
from torchditan.datasets.hub import _load as load_hub
from torchditan.datasets.images import IMAGE_SUFFIXES, Encoded, corrupt_image
from torchditan.datasets.options import is_tar_address
from torchditan.datasets.tars import Members, Shard, TarMember, json_object, kind_of, open_shards, warn_once
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
    others: tuple[str, ...] = ()
    """Further captions."""
    weights: tuple[float, ...] = ()
    """How often training draws `caption` and each of `others`, relative to each other. (): equally often."""


class Captions(NamedTuple):
    """What a source says of one image."""

    first: str
    others: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


def read_entries(place: str, *, config: options.Dataset, cache_folder: Path | None) -> list[Entry]:
    """Read all entries of a folder, a file or an address of tar shards; sorted by name.

    `cache_folder` keeps the index of tar shards.

    Raises:
        ConfigError: the source is empty or inconsistent.
    """
    root = Path(place).expanduser()
    refusal = _refusal_of(root)
    suffix = root.suffix if root.is_file() else ""
    if is_tar_address(place) or suffix == ".tar" or any(root.glob("*.tar")):
        return _read_tars(place, config=config, cache_folder=cache_folder)
    tables = [root] if suffix == ".parquet" else sorted(root.rglob("*.parquet"))
    if tables:
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
    if not is_unicode(text):
        raise refusal(f"the caption of {where} is not Unicode text: half of a character is missing")
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
    pictures: list[tuple[str, str, Encoded | Frames]],
    captions: dict[str, Captions],
    *,
    is_video: bool,
    refusal: Refusal,
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
    entries = []
    for stem, name, content in pictures:
        given = captions.get(stem)
        entries.append(
            Entry(name, None, content)
            if given is None
            else Entry(name, given.first, content, others=given.others, weights=given.weights)
        )
    return entries


def _walk(root: Path) -> Iterable[tuple[str, Path, list[str]]]:
    """(path with slashes and a final slash, folder, its files) of each folder, without hidden ones."""
    for folder, names in walk_folders(root):
        relative = Path(folder).relative_to(root).as_posix()
        yield "" if relative == "." else f"{relative}/", Path(folder), sorted(names)


def _read_folder(root: Path, *, is_video: bool, refusal: Refusal) -> list[Entry]:
    pictures: list[tuple[str, str, Encoded | Frames]] = []
    captions: dict[str, Captions] = {}
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
                captions[prefix + stem] = Captions(_decode(text, where=prefix + name, refusal=refusal))
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
        captions = _captions_in(row, config.caption_key, where=where, refusal=refusal)
        repeats = row.get("repeats", 1)
        if type(repeats) is not int or repeats < 1:
            raise refusal(f"{where}: repeats must be an integer of at least 1")
        name = PurePosixPath(row["file_name"]).as_posix()
        if name in entries:
            raise refusal(f"{where}: {name} is listed twice; use repeats to show it more often")
        content = _find_listed(root, name, where=where, is_video=config.num_frames is not None, refusal=refusal)
        entries[name] = Entry(name, captions.first, content, repeats, captions.others, captions.weights)
    return list(entries.values())


def _captions_in(row: dict[str, Any], key: str, *, where: str, refusal: Refusal) -> Captions:
    """The captions in a JSON object: text, or a list of texts, for which `weights` may be given."""
    texts = row[key] if isinstance(row[key], list) else [row[key]]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise refusal(f"{where}: {key} must be text, or a list of texts")
    first, *others = (_clean(text, where=where, refusal=refusal) for text in texts)
    return Captions(first, tuple(others), _weights(row.get("weights"), len(texts), where=where, refusal=refusal))


def _weights(given: Any, count: int, *, where: str, refusal: Refusal) -> tuple[float, ...]:
    """The weights of this number of captions; () if none are given."""
    if given is None:
        return ()
    is_right = isinstance(given, list) and len(given) == count
    is_right = is_right and all(is_finite_number(weight) and weight > 0 for weight in given)
    if not is_right or math.isinf(sum(map(float, given))):
        raise refusal(f"{where}: weights must be a list of {count} positive numbers, one for each caption")
    return tuple(given)


def _read_line(line: str, *, where: str, refusal: Refusal) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refusal(f"{where} is not JSON ({error})") from None
    if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
        raise refusal(f'{where}: must be {{"file_name": "...", "text": "..."}}')
    return row


def _find_listed(root: Path, name: str, *, where: str, is_video: bool, refusal: Refusal) -> Encoded | Frames:
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or os.path.isabs(name):
        raise refusal(f"{where}: {name} is outside the folder; must be a path inside it")
    path = root / relative
    if is_video and os.path.isdir(path):  # unlike Path.is_dir, no error for a name that is too long
        frames = _numbered_frames(path, [entry.name for entry in path.iterdir() if not entry.name.startswith(".")])
        if not frames.files:
            raise refusal(f"{where}: the folder {name} holds no frames")
        return frames
    if not os.path.isfile(path):
        raise refusal(f"{where}: {shorten(name, most=200)} does not exist")
    if path.suffix.lower() not in (VIDEO_SUFFIXES if is_video else IMAGE_SUFFIXES):
        hint = "" if is_video else "; videos need dataset.num_frames"
        raise refusal(f"{where}: {name} is not {'a video' if is_video else 'an image'}{hint}")
    return File(path)


def _read_tars(root: str, *, config: options.Dataset, cache_folder: Path | None) -> list[Entry]:
    """Read the entries of WebDataset shards, `key.jpg` with `key.txt`, or with `dataset.caption_key` in `key.json`.

    Sorted by name. With `dataset.corrupt_images` "skip", a line names what is missing.

    Raises:
        ConfigError: there are none, or captions, images or ends of shards are missing.
    """
    refusal = functools.partial(option_error, "dataset.root_dir", root)
    is_video = config.num_frames is not None
    pictures: list[tuple[str, str, Encoded | Frames]] = []
    captions: dict[str, Captions] = {}
    skipped: list[str] = []
    for shard in open_shards(root, cache_folder=cache_folder, blocks_gib=config.remote_cache_gib):
        if shard.damage is not None:
            skipped.append(f"{shard.place.name} is {shard.damage}")
        for suffix, members in shard.members.items():
            if kind_of(suffix) in (VIDEO_SUFFIXES if is_video else IMAGE_SUFFIXES):
                pictures += _pictures_of(shard, suffix, members)
        captions |= _captions_of(shard, config.caption_key, refusal=refusal)
    if skipped and config.corrupt_images == "error":
        right = "; repair or remove such shards, or read what they have with --dataset.corrupt_images skip"
        raise refusal(f"{some(skipped)}{right}")
    if config.corrupt_images == "skip":
        stems = {stem for stem, _, _ in pictures}
        skipped += [f"{stem} has no {_kind(is_video)}" for stem in captions if stem not in stems]
        captions = {stem: caption for stem, caption in captions.items() if stem in stems}
        if config.trigger_word is None:
            skipped += [f"{name} has no caption" for stem, name, _ in pictures if stem not in captions]
            pictures = [picture for picture in pictures if picture[0] in captions]
    if skipped:
        warn_once(f"warning: {root}: {some(skipped)}")
    entries = _pair(pictures, captions, is_video=is_video, refusal=refusal)
    if not entries:
        raise refusal(f"holds no {_kind(is_video)}s with captions")
    return sorted(entries, key=lambda entry: entry.name)


def _pictures_of(shard: Shard, suffix: str, members: Members) -> Iterator[tuple[str, str, TarMember]]:
    for number, (key, offset, size) in enumerate(zip(members.keys, members.offsets, members.sizes, strict=True)):
        stem = f"{shard.place.name}/{shard.keys[key]}"
        damage = members.damages.get(str(number))
        yield stem, f"{stem}{suffix}", TarMember(shard.place.file, offset, size, damage)


def _captions_of(shard: Shard, caption_key: str, *, refusal: Refusal) -> dict[str, Captions]:
    captions: dict[str, Captions] = {}
    for kind, suffix in sorted((kind_of(suffix), suffix) for suffix in shard.members):  # .txt after .json
        members = shard.members[suffix]
        for key, text in zip(members.keys, members.texts, strict=False):
            stem = f"{shard.place.name}/{shard.keys[key]}"
            where = f"{stem}{suffix}"
            if kind == ".txt":
                content = text.encode("utf-8", "surrogateescape")
                captions[stem] = Captions(_decode(content, where=where, refusal=refusal))
            elif kind == ".json":
                try:
                    row = json_object(text)
                except ValueError as error:
                    raise refusal(f"{where} is not a JSON object ({error})") from None
                if row.get(caption_key) is not None:
                    captions[stem] = _captions_in(row, caption_key, where=where, refusal=refusal)
    return captions


def _read_parquet(root: Path, paths: list[Path], config: options.Dataset, *, refusal: Refusal) -> list[Entry]:
    parquet = import_optional("pyarrow.parquet", extra="hub")
    pyarrow = import_optional("pyarrow", extra="hub")
    entries = []
    for path in paths:
        try:
            table = parquet.read_table(path, memory_map=True)
        except (pyarrow.ArrowException, OSError, ValueError) as error:  # of damage in a page of data, OSError
            why = str(error).partition("\n")[0]
            raise refusal(f"{path.name} is not a readable parquet file ({why})") from error
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
    has_lists = types.is_list(caption_type) or types.is_large_list(caption_type)
    text_type = caption_type.value_type if has_lists else caption_type
    if not types.is_string(text_type) and not types.is_large_string(text_type):
        raise option_error("dataset.caption_key", config.caption_key, f"holds {caption_type} in {where}; must be text")
    images, rows = table.column(config.image_key), table.column(config.caption_key).to_pylist()
    width = len(str(len(rows)))
    entries = []
    for row, given in enumerate(rows):
        name = f"{where}, row {row:0{width}}"
        texts = given or [] if has_lists or given is None else [given]
        captions = [_clean(text or "", where=name, refusal=refusal) for text in texts]
        caption = captions[0] if captions else None
        entries.append(Entry(name, caption, Cell(images, row), others=tuple(captions[1:])))
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
