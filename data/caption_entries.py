# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Captioned images and videos as entries, and the rules of their captions."""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchditan.config.prompts import is_unicode
from torchditan.datasets.encoded import Encoded, File
from torchditan.datasets.images import HOW_TO_READ
from torchditan.datasets.splits import suffix_of
from torchditan.errors import counted, is_finite_number, some


class SourceError(Exception):
    """Images and captions do not belong together. The message says what would be right, for `dataset.root_dir`."""


@dataclass(frozen=True)
class Frames:
    """A folder of numbered frames, sorted by number."""

    files: tuple[File, ...]


class Captions(NamedTuple):
    """What a source says of one image; no texts if it says nothing."""

    texts: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    """How often training draws each text, relative to each other. (): equally often."""


@dataclass(frozen=True)
class Entry:
    """An image or a video with its captions."""

    name: str
    """Path in the dataset, with slashes."""
    content: Encoded | Frames
    captions: Captions
    repeats: int = 1
    """Number of times that an epoch shows it."""


Picture = tuple[str, str, Encoded | Frames]
"""Name without extension, name, content."""


class Source(NamedTuple):
    """A split of a source."""

    entries: list[Entry]
    is_divided: bool
    """Whether the source has held-out images of its own. If not, `entries` are all images, for either split."""
    reading: list[str]
    """Lines for the user: what is held out, and what is not read."""
    unread: list[str] = []  # noqa: RUF012  never changed
    """Names of the files that were not read."""


def kind_word(is_video: bool) -> str:
    return "video" if is_video else "image"


def clean(text: str, *, where: str) -> str:
    """A caption in one line, without surrounding white space."""
    text = " ".join(text.split())
    if not is_unicode(text):
        raise SourceError(f"the caption of {where} is not Unicode text: half of a character is missing")
    if not text:
        raise SourceError(f"the caption of {where} is empty; write one, or remove it")
    return text


def decode(data: bytes, *, where: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SourceError(f"{where} is not UTF-8 text") from None
    return clean(text, where=where)


def has_lines(data: bytes) -> bool:
    """Whether a caption file has several lines, which `decode` joins."""
    return sum(bool(line.strip()) for line in data.splitlines()) > 1


def describe_joined(names: list[str]) -> list[str]:
    """A line for the user about caption files with several lines."""
    return [f"{counted(len(names), 'caption')} of several lines, joined into one: {some(names)}"] if names else []


def pair(
    pictures: list[Picture],
    captions: dict[str, Captions],
    *,
    is_video: bool,
    others: Iterable[str],
) -> list[Entry]:
    """Match pictures with captions by their names without extension, which may be written in NFC and in NFD.

    Captions of images that this machine cannot read are left out; `others` has the names of these and of other files.
    """
    by_stem: dict[str, str] = {}
    pictures = [(unicodedata.normalize("NFC", stem), name, content) for stem, name, content in pictures]
    captions = {unicodedata.normalize("NFC", stem): found for stem, found in captions.items()}
    for stem, name, _ in pictures:
        if stem in by_stem:
            right = f"{by_stem[stem]} and {name} share one caption; rename or remove one"
            raise SourceError(right)
        by_stem[stem] = name
    unreadable = {os.path.splitext(name)[0] for name in others if suffix_of(name) in HOW_TO_READ}
    alone = captions.keys() - by_stem.keys() - {unicodedata.normalize("NFC", stem) for stem in unreadable}
    if alone:
        texts = some(sorted(f"{stem}.txt" for stem in alone))
        right = f"no {kind_word(is_video)} belongs to the caption {texts}; add or remove"
        raise SourceError(right)
    return [Entry(name, content, captions.get(stem, Captions())) for stem, name, content in pictures]


def captions_in(row: dict[str, Any], key: str, *, where: str) -> Captions:
    """The captions in a JSON object: text, or a list of texts, for which `weights` may be given."""
    texts = row[key] if isinstance(row[key], list) else [row[key]]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise SourceError(f"{where}: {key} must be text, or a list of texts")
    found = tuple(clean(text, where=where) for text in texts)
    return Captions(found, _weights(row.get("weights"), len(texts), where=where))


def _weights(given: Any, count: int, *, where: str) -> tuple[float, ...]:
    """The weights of this number of captions; () if none are given."""
    if given is None:
        return ()
    is_right = isinstance(given, list) and len(given) == count
    is_right = is_right and all(is_finite_number(weight) and weight > 0 for weight in given)
    if not is_right or math.isinf(sum(map(float, given))):
        raise SourceError(f"{where}: weights must be a list of {count} positive numbers, one for each caption")
    return tuple(given)
