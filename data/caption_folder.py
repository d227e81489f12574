# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Captions in a folder of images or videos: a file next to each (`a.txt`, `a.caption`, `a.json`), or metadata files.

Notable:
- `metadata.jsonl`, `.csv` and `.parquet` list the images of their folder and of those below it, as in `datasets`;
- names are compared in NFC, because macOS writes them in NFD;
- with `dataset.caption_from` "file_name", no file is read.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from torchditan.config import options
from torchditan.datasets.caption_entries import (
    Captions,
    Entry,
    Frames,
    Picture,
    Source,
    SourceError,
    captions_in,
    decode,
    describe_joined,
    has_lines,
    kind_word,
    pair,
)
from torchditan.datasets.encoded import File
from torchditan.datasets.images import HOW_TO_READ, IMAGE_SUFFIXES
from torchditan.datasets.options import Split
from torchditan.datasets.splits import PARTS, Division, Parts, describe_parts, suffix_of
from torchditan.datasets.tables import read_parquet
from torchditan.datasets.tars import CAPTION_SUFFIXES, MOST_TEXT, json_object
from torchditan.datasets.videos import VIDEO_SUFFIXES
from torchditan.errors import option_error, shorten, some

METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_HOLD_CAPTIONS = frozenset([*CAPTION_SUFFIXES, ".json", ".jsonl", ".csv", ".parquet"])
_MAY_HOLD_CAPTIONS = frozenset([".json", ".jsonl", ".csv", ".tsv", ".cap", ".captions", ".tags", ".xlsx", ".parquet"])


def read_folder(root: Path, names: dict[Parts, list[str]], split: Split, *, config: options.Dataset) -> Source:
    """A split of the pictures below `root`, whose files are `names`. It has no entries if there are no pictures.

    Raises:
        SourceError: captions and pictures do not belong together.
    """
    is_video = config.num_frames is not None
    pictures = {parts: list(_pictures_in(root, parts, names[parts], is_video=is_video)) for parts in names}
    division = Division((parts for parts in pictures if pictures[parts]), has_classes=False)
    part_of = {parts: division.place(parts)[0] for parts in names}
    by_part = {
        part: [name for parts in names if part_of[parts] == part for _, name, _ in pictures[parts]] for part in PARTS
    }
    is_divided = bool(by_part["validation"])
    chosen = [parts for parts in names if part_of[parts] == (split if is_divided else "train")]
    from_files = config.caption_from == "files"
    inside = {  # of a folder of frames, the folder that it lies in
        name: division.place(parts)[1][: -1 if isinstance(content, Frames) else None]
        for parts in names
        for _, name, content in pictures[parts]
    }
    repeats = {name: _repeats(folders) for name, folders in inside.items()}
    tables = [(parts, name) for parts in names for name in METADATA_FILES if from_files and name in names[parts]]
    listed: dict[str, Entry] = {}
    for parts, name in tables:
        found = _read_metadata(root, parts, name, pictures=pictures, config=config)
        if taken := sorted(found.keys() & listed.keys()):
            raise SourceError(f"{taken[0]} is listed in two metadata files; keep one of them")
        listed |= found
    free = [parts for parts in chosen if not any(parts[: len(folder)] == folder for folder, _ in tables)]
    own = [picture for parts in free for picture in pictures[parts]]
    read = {_join(parts, name) for parts, name in tables}
    if from_files:
        beside = {parts: names[parts] for parts in free}
        captions, sidecars, joined = _read_sidecars(root, beside, {stem for stem, _, _ in own}, config=config)
        read |= sidecars
    else:
        captions, joined = {stem: Captions((_words(stem),)) for stem, _, _ in own}, []
    others = [_join(parts, name) for parts in free for name in names[parts]]
    entries = [
        dataclasses.replace(entry, repeats=repeats[entry.name])
        for entry in pair(own, captions, is_video=is_video, others=others)
    ]
    entries += [listed[name] for parts in chosen for _, name, _ in pictures[parts] if name in listed]
    for entry in entries:
        if entry.repeats == 0:
            raise SourceError(f"the folder {inside[entry.name][0]}/ repeats its images 0 times; must be at least 1")
        content = entry.content
        read |= (
            {f"{entry.name}/{file.path.name}" for file in content.files}
            if isinstance(content, Frames)
            else {entry.name}
        )
    reading = describe_parts(by_part, what=kind_word(is_video)) + describe_joined(sorted(joined))
    if files := sorted(name for name in read if suffix_of(name) in _HOLD_CAPTIONS):
        reading.insert(0, f"captions from {some(files)}")
    repeated = {
        f"{inside[each.name][0]} x {each.repeats}" for each in entries if each.repeats == repeats[each.name] > 1
    }
    if repeated:
        reading.append(f"repeats: {some(sorted(repeated))}")
    unread = [_join(parts, name) for parts in chosen for name in names[parts] if _join(parts, name) not in read]
    return Source(entries, is_divided, reading, unread)


def _join(parts: Parts, name: str) -> str:
    return "/".join((*parts, name))


def _pictures_in(root: Path, parts: Parts, names: list[str], *, is_video: bool) -> Iterator[Picture]:
    """Images, or videos: files, and folders of frames."""
    suffixes = VIDEO_SUFFIXES if is_video else IMAGE_SUFFIXES
    found = [name for name in names if suffix_of(name) in suffixes]
    for name in found:
        yield _join(parts, os.path.splitext(name)[0]), _join(parts, name), File(root.joinpath(*parts, name))
    frames = [name for name in names if suffix_of(name) in IMAGE_SUFFIXES]
    if is_video and parts and frames and not found:
        frames.sort(key=lambda name: ([int(digits) for digits in re.findall(r"\d+", name)], name))
        files = tuple(File(root.joinpath(*parts, name)) for name in frames)
        yield "/".join(parts), "/".join(parts), Frames(files)


def _words(stem: str) -> str:
    """`a red cat` of `photos/a_red_cat`."""
    return decode(os.fsencode(stem.rpartition("/")[2].replace("_", " ")), where=stem)


def _repeats(inside: Parts) -> int:
    """10 for `10_dog/a.png`, as kohya's scripts name folders. A year (`2024_dogs`) does not count."""
    match = re.match(r"(\d{1,3})_", inside[0]) if inside else None
    return 1 if match is None else int(match[1])


def _read_sidecars(
    root: Path, names: dict[Parts, list[str]], stems: set[str], *, config: options.Dataset
) -> tuple[dict[str, Captions], set[str], list[str]]:
    """Name without extension -> its captions, the names of the files that were read, and of those with several lines.

    A `.json` counts if it belongs to a picture and has the key `dataset.caption_key`, and there is no other file.
    """
    texts: dict[str, Captions] = {}
    objects: dict[str, Captions] = {}
    origins: dict[str, str] = {}
    joined: list[str] = []
    normal = {unicodedata.normalize("NFC", stem) for stem in stems}
    for parts, files in names.items():
        for file in files:
            name, suffix, path = _join(parts, file), suffix_of(file), root.joinpath(*parts, file)
            stem = unicodedata.normalize("NFC", os.path.splitext(name)[0])
            if suffix in CAPTION_SUFFIXES:
                data = path.read_bytes()
                caption = Captions((decode(data, where=name),))
                joined += [name] * has_lines(data)
                if texts.setdefault(stem, caption) != caption:
                    raise SourceError(f"{origins[stem]} and {name} differ; keep one of them")
                origins[stem] = name
            elif suffix == ".json" and stem in normal and path.stat().st_size <= MOST_TEXT:
                try:
                    row = json_object(path.read_text(encoding="utf-8-sig"))
                except ValueError:  # of another program
                    continue
                if row.get(config.caption_key) is not None:
                    objects[stem] = captions_in(row, config.caption_key, where=name)
                    origins.setdefault(stem, name)
    return objects | texts, {*origins.values()}, joined


def _read_metadata(
    root: Path,
    parts: Parts,
    file: str,
    *,
    pictures: dict[Parts, list[Picture]],
    config: options.Dataset,
) -> dict[str, Entry]:
    """Name -> entry of the rows `{"file_name": "a.png", "text": "a dog", "repeats": 2}` of a metadata file."""
    is_video = config.num_frames is not None
    known = {
        unicodedata.normalize("NFC", name): (name, content) for found in pictures.values() for _, name, content in found
    }
    entries: dict[str, Entry] = {}
    for number, row in _rows(root.joinpath(*parts, file), where=_join(parts, file)):
        where = f"{_join(parts, file)}, line {number}"
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            raise SourceError(f'{where}: must be {{"file_name": "...", "text": "..."}}')
        if config.caption_key not in row:
            right = f"{where} has no such column; must be one of {', '.join(map(str, row))}"
            raise option_error("dataset.caption_key", config.caption_key, right)
        captions = captions_in(row, config.caption_key, where=where)
        relative = PurePosixPath(row["file_name"].replace("\\", "/"))  # of Windows
        if relative.is_absolute() or ".." in relative.parts:
            raise SourceError(f"{where}: {relative} is outside the folder; must be a path inside it")
        wanted = unicodedata.normalize("NFC", _join(parts, relative.as_posix()))
        if wanted not in known:
            raise SourceError(f"{where}: {_why_unknown(root / wanted, str(relative), is_video=is_video)}")
        name, content = known[wanted]
        if name in entries:
            raise SourceError(f"{where}: {relative} is listed twice; use repeats to show it more often")
        repeats = str(row.get("repeats", 1))  # the values of a CSV are texts
        if not repeats.isdecimal() or int(repeats) < 1:
            raise SourceError(f"{where}: repeats must be an integer of at least 1")
        entries[name] = Entry(name, content, captions, int(repeats))
    return entries


def _why_unknown(path: Path, name: str, *, is_video: bool) -> str:
    if os.path.isdir(path):  # unlike Path.is_dir, no error for a name that is too long
        return f"the folder {name} holds no frames"
    if not os.path.isfile(path):
        return f"{shorten(name, most=200)} does not exist"
    if (suffix := suffix_of(name)) in HOW_TO_READ:
        return f"{name} cannot be read; {HOW_TO_READ[suffix]}"
    return (
        f"{name} is not {'a video' if is_video else 'an image'}{'' if is_video else '; videos need dataset.num_frames'}"
    )


def _rows(path: Path, *, where: str) -> Iterator[tuple[int, Any]]:
    """(number of its line, content) of each row of a metadata file."""
    if path.suffix == ".parquet":
        yield from enumerate(read_parquet(path, shown=where).to_pylist(), start=1)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SourceError(f"{where} is not UTF-8 text") from None
    if path.suffix == ".csv":
        yield from _csv_rows(text, where=where)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SourceError(f"{where}, line {number} is not JSON ({error})") from None


def _csv_rows(text: str, *, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        names = [name for name in reader.fieldnames or () if name]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise SourceError(f"{where} has several columns {repeated[0]}; must be one")
        for row in reader:
            if None in row:
                right = "has more columns than the header; put quotes around captions with commas"
                raise SourceError(f"{where}, line {reader.reader.line_num} {right}")
            yield reader.reader.line_num, row  # DictReader.line_num does not count empty lines before the row
    except csv.Error as error:
        right = "put quotes around the whole caption, and double those inside it"
        raise SourceError(f"{where}: what follows line {reader.line_num} is not CSV ({error}); {right}") from None


def refuse_bare(source: Source, *, trigger_word: str | None) -> None:
    """Refuse images without a caption, unless a trigger word replaces it and no file looks like their captions."""
    bare = [entry.name for entry in source.entries if not entry.captions.texts]
    if bare and trigger_word is None:
        raise SourceError(
            f"no caption belongs to {some(sorted(bare))}; write one (a.txt for a.png), or set dataset.trigger_word"
        )
    if bare and (files := [name for name in source.unread if suffix_of(name) in _MAY_HOLD_CAPTIONS]):
        right = f"{len(bare):,} images have no caption, and {some(files)} may hold captions, but is not read as such"
        raise SourceError(f"{right}; write metadata.csv with the columns file_name and text, or move it elsewhere")
