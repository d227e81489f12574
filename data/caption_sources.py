# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Sources of captioned images and videos: folders, metadata files, tar shards, parquet files, the hub.

Notable:
- a split of a source is read into a list of `Entry`, sorted by name, the same on every machine. Images are opened in
  place when they are needed;
- of several sources in a folder, images with captions come first, then tars, then parquet files. What is not read is
  described for the user (`Source.reading`);
- inconsistent sources (a caption without an image, two images with one name, a path outside the folder) are refused
  here, in one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchditan.config import options
from torchditan.config.optional_libraries import import_optional
from torchditan.datasets.caption_entries import (
    Captions,
    Entry,
    Frames,
    Source,
    SourceError,
    captions_in,
    clean,
    decode,
    describe_joined,
    has_lines,
    kind_word,
    pair,
)
from torchditan.datasets.caption_folder import METADATA_FILES, read_folder
from torchditan.datasets.encoded import Cell, Encoded
from torchditan.datasets.hub import find_splits, load_rows
from torchditan.datasets.images import HOW_TO_READ, IMAGE_SUFFIXES, describe_files
from torchditan.datasets.options import Split, is_tar_address
from torchditan.datasets.splits import describe_parts, divide_files, suffix_of, walk
from torchditan.datasets.tables import check_images, read_parquet, type_of
from torchditan.datasets.tars import (
    CAPTION_SUFFIXES,
    Members,
    Shard,
    TarMember,
    find_shards,
    json_object,
    kind_of,
)
from torchditan.datasets.videos import VIDEO_SUFFIXES
from torchditan.errors import option_error, some


def read_source(place: str, split: Split, *, config: options.Dataset, cache_folder: Path | None) -> Source:
    """Read a split of a folder, a file or an address of tar shards; entries are sorted by name.

    `cache_folder` keeps the index of tar shards.

    Raises:
        SourceError: the source is empty or inconsistent.
    """
    root = Path(place).expanduser()
    if is_tar_address(place) or (root.is_file() and root.suffix == ".tar"):
        source = _read_tars(place, split, config=config, cache_folder=cache_folder)
    elif root.is_file() and root.suffix == ".parquet":
        table = read_parquet(root, shown=place)
        source = Source(_read_table(table, config, where=root.name), False, [])
    elif root.is_dir():
        source = _read_mixed(root, split, config=config, cache_folder=cache_folder)
    else:
        raise SourceError("must be a folder, a .tar or a .parquet file")
    if not source.entries:
        others = Counter(map(suffix_of, source.unread))
        found = f"; it has {describe_files(others)}" if others else ""
        raise SourceError(f"holds no {kind_word(config.num_frames is not None)}s with captions{found}")
    return source._replace(entries=sorted(source.entries, key=lambda entry: entry.name))


def _read_mixed(root: Path, split: Split, *, config: options.Dataset, cache_folder: Path | None) -> Source:
    """The captioned images of a folder, else the tars, else the parquet files in it."""
    names = dict(walk(root))
    files = sorted("/".join((*parts, name)) for parts in names for name in names[parts])
    tars = [name for name in files if suffix_of(name) == ".tar"]
    tables = [name for name in files if suffix_of(name) == ".parquet" and Path(name).name not in METADATA_FILES]
    source = read_folder(root, names, split, config=config)
    what = f"the {kind_word(config.num_frames is not None)}s of the folder"
    if (tars or tables) and not any(entry.captions.texts for entry in source.entries):
        if source.entries and config.trigger_word is not None:
            raise SourceError(f"holds {what} without captions, and {some(tars or tables)}; keep one of them there")
        what, read = ("the tar shards", tars) if tars else ("the parquet files", tables)
        if tars:
            source = _read_tars(str(root), split, config=config, cache_folder=cache_folder)
        else:
            source = _read_tables(root, tables, split, config=config)
        source = source._replace(unread=[name for name in files if name not in read] + source.unread)
    if tars or tables:
        source.reading.insert(0, f"read: {what}")
    return source


def _read_tars(root: str, split: Split, *, config: options.Dataset, cache_folder: Path | None) -> Source:
    """Read the entries of WebDataset shards, `key.jpg` with `key.txt`, or with `dataset.caption_key` in `key.json`.

    With `dataset.corrupt_images` "skip", a line names what is missing.

    Raises:
        SourceError: there are none, or captions, images or ends of shards are missing.
    """
    is_video = config.num_frames is not None
    pictures: list[tuple[str, str, Encoded | Frames]] = []
    captions: dict[str, Captions] = {}
    others: list[str] = []
    """Members that are not read: images that this machine cannot read, and what may be captions in another form."""
    skipped: list[str] = []
    joined: list[str] = []
    shards = find_shards(root, cache_folder=cache_folder, blocks_gib=config.remote_cache_gib)
    is_divided = bool(shards.places["validation"])
    for shard in shards.open(split if is_divided else "train"):
        if shard.damage is not None:
            skipped.append(f"{shard.place.name} is {shard.damage}")
        found, lines = _captions_of(shard, config.caption_key)
        joined += lines
        captions |= found
        for suffix, members in shard.members.items():
            if kind_of(suffix) in (VIDEO_SUFFIXES if is_video else IMAGE_SUFFIXES):
                pictures += _pictures_of(shard, suffix, members)
            else:
                keys = (f"{shard.place.name}/{shard.keys[key]}" for key in members.keys)
                is_image = kind_of(suffix) in HOW_TO_READ
                others += [f"{stem}{suffix}" for stem in keys if is_image or stem not in found]
    if skipped and config.corrupt_images == "error":
        right = "; repair or remove such shards, or read what they have with --dataset.corrupt_images skip"
        raise SourceError(f"{some(skipped)}{right}")
    if config.corrupt_images == "skip":
        stems = {stem for stem, _, _ in pictures}
        skipped += [f"{stem} has no {kind_word(is_video)}" for stem in captions if stem not in stems]
        captions = {stem: caption for stem, caption in captions.items() if stem in stems}
        if config.trigger_word is None:
            skipped += [f"{name} has no caption" for stem, name, _ in pictures if stem not in captions]
            pictures = [picture for picture in pictures if picture[0] in captions]
    names = {part: [place.name for place in places] for part, places in shards.places.items()}
    reading = describe_parts(names, what="tar shard") + describe_joined(joined)
    reading += [f"left out: {some(skipped)}"] if skipped else []
    entries = pair(pictures, captions, is_video=is_video, others=others)
    return Source(entries, is_divided, reading, others)


def _pictures_of(shard: Shard, suffix: str, members: Members) -> Iterator[tuple[str, str, TarMember]]:
    for number, (key, offset, size) in enumerate(zip(members.keys, members.offsets, members.sizes, strict=True)):
        stem = f"{shard.place.name}/{shard.keys[key]}"
        damage = members.damages.get(str(number))
        yield stem, f"{stem}{suffix}", TarMember(shard.place.file, offset, size, damage)


def _captions_of(shard: Shard, caption_key: str) -> tuple[dict[str, Captions], list[str]]:
    """Captions of the keys of a shard, and the names of members with several lines."""
    joined: list[str] = []
    captions: dict[str, Captions] = {}
    origins: dict[tuple[str, bool], tuple[str, Captions]] = {}
    """(key, whether it is JSON) -> the first member with captions, and these."""
    by_kind = sorted(((kind_of(suffix), suffix) for suffix in shard.members), key=lambda pair: pair[0] != ".json")
    for kind, suffix in by_kind:  # .json first, so that texts replace it
        members = shard.members[suffix]
        for key, text in zip(members.keys, members.texts, strict=False):
            stem = f"{shard.place.name}/{shard.keys[key]}"
            where = f"{stem}{suffix}"
            if kind in CAPTION_SUFFIXES:
                content = text.encode("utf-8", "surrogateescape")
                found = Captions((decode(content, where=where),))
                joined += [where] * has_lines(content)
            elif kind == ".json":
                try:
                    row = json_object(text)
                except ValueError as error:
                    raise SourceError(f"{where} is not a JSON object ({error})") from None
                if row.get(caption_key) is None:
                    continue
                found = captions_in(row, caption_key, where=where)
            else:
                continue
            first, known = origins.setdefault((stem, kind == ".json"), (where, found))
            if known != found:
                raise SourceError(f"{first} and {where} differ; keep one of them")
            captions[stem] = found
    return captions, joined


def _read_tables(root: Path, names: list[str], split: Split, *, config: options.Dataset) -> Source:
    """A split of the parquet files below a folder."""
    parts = divide_files(names)
    if not parts["train"]:
        raise SourceError(f"holds no parquet files for training, only {some(names)}")
    entries: list[Entry] = []
    for name in parts[split if parts["validation"] else "train"]:
        entries += _read_table(read_parquet(root / name, shown=str(root)), config, where=name)
    return Source(entries, bool(parts["validation"]), describe_parts(parts, what="parquet file"))


def read_hub(config: options.Dataset, split: Split) -> Source:
    """A split of `dataset.hub_name`."""
    assert config.hub_name is not None
    names = find_splits(config.hub_name)
    is_divided = bool(names["validation"])
    rows = load_rows(config.hub_name, names[split if is_divided else "train"][0], streaming=False)
    entries = _read_table(rows.data, config, where=config.hub_name)
    return Source(entries, is_divided, describe_parts(names, what="split"))


def _read_table(table: Any, config: options.Dataset, *, where: str) -> list[Entry]:
    """Read the rows of an Arrow table. `where` names it in errors."""
    types = import_optional("pyarrow", extra="hub").types
    if config.num_frames is not None:
        right = "parquet files and hub datasets contain images; leave it out, or use files with --dataset.root_dir"
        raise option_error("dataset.num_frames", config.num_frames, right)
    check_images(table.schema, config.image_key, where=where)
    caption_type = type_of(table.schema, "caption_key", config.caption_key, where=where)
    has_lists = types.is_list(caption_type) or types.is_large_list(caption_type)
    text_type = caption_type.value_type if has_lists or types.is_dictionary(caption_type) else caption_type
    if not types.is_string(text_type) and not types.is_large_string(text_type):
        raise option_error("dataset.caption_key", config.caption_key, f"holds {caption_type} in {where}; must be text")
    images, rows = table.column(config.image_key), table.column(config.caption_key).to_pylist()
    width = len(str(len(rows)))
    entries = []
    for row, given in enumerate(rows):
        name = f"{where}, row {row:0{width}}"
        texts = given or [] if has_lists or given is None else [given]
        captions = Captions(tuple(clean(text or "", where=name) for text in texts))
        entries.append(Entry(name, Cell(images, row), captions))
    return entries
