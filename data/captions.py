# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Captioned images and videos for fine-tuning. Each sample has the size of its aspect-ratio bucket and a text.

Notable:
- caption_sources.py finds the files, buckets.py the sizes; images.py and videos.py decode. Opening reads the size of
  every picture, so that pictures that would be enlarged are refused before training;
- `content_key` is the cache key of an encoded latent: it changes only with the file's bytes, the target size and the
  resampling;
- captions are texts here. `caption_variants` returns those that a text encoder will see.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchditan.config import options
from torchditan.data_stream.datasets import CorruptImageError, ImageDataset
from torchditan.datasets.buckets import Size, bucket_sizes, nearest_bucket
from torchditan.datasets.caption_entries import Entry, Frames, Source, SourceError
from torchditan.datasets.caption_folder import refuse_bare
from torchditan.datasets.caption_sources import read_hub, read_source
from torchditan.datasets.encoded import Encoded, File, read_bytes
from torchditan.datasets.file_check import damage_of
from torchditan.datasets.images import (
    Crop,
    UnreadableError,
    convert,
    corrupt_image,
    describe_files,
    fit,
    load_sample,
    open_picture,
)
from torchditan.datasets.options import Split, existing_path, height_and_width, is_tar_address, photo_channels, refuse
from torchditan.datasets.splits import HELD_OUT_SHARE, held_out, suffix_of
from torchditan.datasets.videos import corrupt_video, open_video
from torchditan.errors import counted, option_error, some
from torchditan.randomness import generator, name_to_index

TRIGGER = "[trigger]"
ENOUGH_TO_HOLD_OUT = 20
"""From this number of images, some are held out by default."""


class CaptionedImages(ImageDataset):
    """Images or videos with captions.

    An item has `sample` float32 in [-1, 1], (C, H, W) or (C, F, H, W) of its bucket, and `caption`.
    """

    horizontal_flip = False

    def __init__(self, entries: list[Entry], config: options.Dataset, *, channels: int, buckets: list[Size]) -> None:
        self.name = config.dataset_name
        self.class_names = []
        self.config = config
        self.channels = channels
        self.buckets = buckets
        self.entries = entries
        self.bucket_numbers = np.array(self._choose_buckets(), dtype=np.int64)
        """(number of entries,) the index in `buckets` of each entry."""
        self.sample_shape = self._shape(self.most_common)
        entries = self.entries  # without those that were left out
        self.places = np.repeat(np.arange(len(entries)), [entry.repeats for entry in entries])
        """(number of items,) the index in `entries` of each item."""
        self._texts = [
            [self._with_trigger(text, entry) for text in entry.captions.texts or (None,)] for entry in entries
        ]
        self.captions = [self._texts[place][0] for place in self.places]
        """The first caption of each item, with its tags in their original order."""
        self._keys: dict[int, str] = {}
        self.split_entries: dict[Split, list[Entry]] = {}
        """The entries of each split, as far as they were read."""

    def _choose_buckets(self) -> list[int]:
        """The bucket of each entry. Unreadable entries stop the run, or are left out (`dataset.corrupt_images`)."""
        found: dict[str, int] = {}
        errors: list[CorruptImageError] = []
        skips = self.config.corrupt_images == "skip"
        for entry in self.entries:
            try:
                size = read_size(entry, is_video=self.config.num_frames is not None)
                number = nearest_bucket(size, self.buckets)
                if skips:  # whole, because an encoder needs every sample
                    self._load(entry, self._shape(number))
            except CorruptImageError as error:
                errors.append(error)
                continue
            if not self.config.upscale:
                self._refuse_small(entry, size, self.buckets[number])
            found[entry.name] = number
        if errors and not skips:
            raise CorruptImageError("; ".join(map(str, errors)))
        if not found:
            raise option_error("dataset.dataset_name", self.name, "has no readable image")
        if errors:
            self.reading = [f"unreadable, left out: {some((error.named for error in errors), most=10)}"]
        self.entries = [entry for entry in self.entries if entry.name in found]
        counts = Counter(found.values())
        self.most_common = min(counts, key=lambda number: (-counts[number], number))
        return list(found.values())

    def _refuse_small(self, entry: Entry, size: Size, bucket: Size) -> None:
        if size[0] < bucket[0] or size[1] < bucket[1]:
            right = (
                f"{entry.name} has {size[0]} x {size[1]} pixels, fewer than the {bucket[0]} x {bucket[1]} of its "
                "sample; use a smaller size, remove it, or enlarge small images with --dataset.upscale"
            )
            raise option_error("dataset.image_size", self.config.image_size, right)

    def _with_trigger(self, caption: str | None, entry: Entry) -> str:
        trigger = self.config.trigger_word
        if caption is None:
            assert trigger is not None
            return trigger
        if trigger is None:
            if TRIGGER in caption:
                right = f"the caption of {entry.name} has {TRIGGER}; must be the word that replaces it"
                raise option_error("dataset.trigger_word", None, right)
            return caption
        caption = caption.replace(TRIGGER, trigger)
        is_there = re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption)  # whole words: "sks" is not in "masks"
        return caption if is_there else f"{trigger}, {caption}"

    def _shape(self, bucket: int) -> tuple[int, ...]:
        frames = () if self.config.num_frames is None else (self.config.num_frames,)
        return (self.channels, *frames, *self.buckets[bucket])

    def caption_variants(self, index: int) -> list[str]:
        """The texts of an item: its captions, each with `dataset.shuffle_tags` as that number of shuffles of its tags.

        They depend only on the captions. Duplicates are removed, so a caption of few tags has fewer.
        """
        return list(self._variants(index))

    def caption_weights(self, index: int) -> list[float]:
        """How often each of `caption_variants` is drawn: shares of 1. The shuffles of a caption divide its share."""
        return list(self._variants(index).values())

    def _variants(self, index: int) -> dict[str, float]:
        place = self.places[index]
        texts = self._texts[place]
        weights = self.entries[place].captions.weights or (1,) * len(texts)
        found: dict[str, float] = {}
        for text, weight in zip(texts, weights, strict=True):
            shuffles = self._shuffles(text)
            for shuffle in shuffles:
                found[shuffle] = found.get(shuffle, 0.0) + weight / sum(weights) / len(shuffles)
        return found

    def _shuffles(self, caption: str) -> list[str]:
        first, *tags = (tag.strip() for tag in caption.split(","))
        if self.config.shuffle_tags == 0 or len(tags) < 2:
            return [caption]
        draws = generator(0, "shuffle tags", name_to_index(caption))
        orders = [draws.permutation(len(tags)) for _ in range(self.config.shuffle_tags)]
        return list(dict.fromkeys(", ".join([first, *(tags[place] for place in order)]) for order in orders))

    def shape_of(self, index: int) -> tuple[int, ...]:
        """(C, [F,] H, W) of one sample."""
        return self._shape(self.bucket_numbers[self.places[index]])

    def groups(self) -> list[np.ndarray]:
        """Indices of the items of each shape. One optimizer step uses one group."""
        numbers = self.bucket_numbers[self.places]
        return [np.flatnonzero(numbers == number) for number in np.unique(numbers)]

    def file_sizes(self) -> dict[str, dict[str, int]]:
        return {part: {entry.name: _size_of(entry) for entry in found} for part, found in self.split_entries.items()}

    def name_of(self, index: int) -> str:
        """Name of an item for messages."""
        return self.entries[self.places[index]].name

    def content_key(self, index: int) -> str:
        """sha256 of everything that determines the sample: bytes, shape and resampling. Repeats share it.

        Raises:
            CorruptImageError: the file cannot be read.
        """
        place = int(self.places[index])
        if place not in self._keys:
            entry = self.entries[place]
            digest = hashlib.sha256(f"{self.shape_of(index)} {self.config.crop} ".encode())
            for content in _files(entry):
                data = read_bytes(content, where=entry.name)
                digest.update(f"{len(data)} ".encode())
                digest.update(data)
            self._keys[place] = digest.hexdigest()
        return self._keys[place]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._load(self.entries[self.places[index]], self.shape_of(index))
        return {"sample": torch.from_numpy(sample), "caption": self.captions[index]}

    def _load(self, entry: Entry, shape: tuple[int, ...]) -> np.ndarray:
        if self.config.num_frames is not None:
            return _read_video(entry, sample_shape=shape, crop=self.config.crop)
        (content,) = _files(entry)
        data = read_bytes(content, where=entry.name)
        return load_sample(data, sample_shape=shape, where=entry.name, crop=self.config.crop)


def _size_of(entry: Entry) -> int:
    path = entry.content.path if isinstance(entry.content, File) else None
    return path.stat().st_size if path is not None and path.exists() else 0


def _files(entry: Entry) -> tuple[Encoded, ...]:
    return entry.content.files if isinstance(entry.content, Frames) else (entry.content,)


def read_size(entry: Entry, *, is_video: bool) -> Size:
    """Height and width as displayed, from the header of an image or the first frame of a video.

    Raises:
        CorruptImageError: it cannot be read, or the end of an image file is missing.
    """
    if isinstance(entry.content, File) and not is_video and (damage := damage_of(str(entry.content.path))) is not None:
        raise corrupt_image(entry.name, damage)
    if is_video and not isinstance(entry.content, Frames):
        for frame in open_video(entry.content, where=entry.name):
            return frame.height, frame.width
        raise corrupt_video(entry.name, "it has no frames")
    try:
        with _files(entry)[0].open() as stream, open_picture(stream) as picture:
            return picture.size
    except (UnreadableError, OSError) as error:
        raise corrupt_image(entry.name, str(error)) from error


def _read_video(entry: Entry, *, sample_shape: tuple[int, ...], crop: Crop) -> np.ndarray:
    """The first frames as float32 (C, F, H, W)."""
    channels, num_frames, height, width = sample_shape
    fitting: dict[str, Any] = {"sample_shape": (channels, height, width), "crop": crop}
    if isinstance(entry.content, Frames):
        files = [(file, f"{entry.name}/{file.path.name}") for file in entry.content.files[:num_frames]]
        frames = [load_sample(read_bytes(file, where=where), where=where, **fitting) for file, where in files]
    else:
        shown = itertools.islice(open_video(entry.content, where=entry.name), num_frames)
        frames = [fit(convert(frame, channels=channels), number=0, **fitting) for frame in shown]
    if len(frames) < num_frames:
        raise corrupt_video(entry.name, f"it has {len(frames)} of the {num_frames} frames of dataset.num_frames")
    return np.stack(frames, axis=1)


def build(
    config: options.Dataset, *, split: Split, input_channels: int | None = None, cache_folder: Path | None = None
) -> CaptionedImages:
    channels = photo_channels(config, input_channels)
    if config.image_size is None:
        raise option_error("dataset.image_size", None, "captions needs the height and width of a sample, such as 512")
    if config.crop == "random":
        right = "captions encodes each image once, so every epoch sees the same part; must be center or adm"
        raise option_error("dataset.crop", config.crop, right)
    size = height_and_width(config, default=(0, 0))
    buckets = bucket_sizes(size, step=config.bucket_step) if config.aspect_buckets else [size]
    option = "root_dir" if config.hub_name is None else "hub_name"
    try:
        source = _open_source(config, split, cache_folder=cache_folder)
        refuse_bare(source, trigger_word=config.trigger_word)
    except SourceError as error:
        raise option_error(f"dataset.{option}", getattr(config, option), str(error)) from None
    if source.is_divided and config.held_out:
        right = f"{getattr(config, option)} has held-out images of its own; leave it out"
        raise option_error("dataset.held_out", config.held_out, right)
    parts = {split: source.entries} if source.is_divided else _hold_out(source.entries, config)
    if not parts[split]:
        none = f"none of {len(source.entries)} image(s) is held out{' by default' if config.held_out is None else ''}"
        right = f"{none}; set a number, or set --validation.freq 0 and --evaluation.freq 0"
        raise option_error("dataset.held_out", config.held_out, right)
    dataset = CaptionedImages(parts[split], config, channels=channels, buckets=buckets)
    dataset.reading = [*_describe(source, config), *dataset.reading]
    dataset.split_entries = parts
    return dataset


def _open_source(config: options.Dataset, split: Split, *, cache_folder: Path | None) -> Source:
    if config.hub_name is not None:
        refuse(config, "root_dir")
        return read_hub(config, split)
    root = str(config.root_dir if is_tar_address(config.root_dir) else existing_path(config))
    return read_source(root, split, config=config, cache_folder=cache_folder)


def _describe(source: Source, config: options.Dataset) -> list[str]:
    """Lines for the user: captions, held-out images, and what is not read."""
    bare = sum(not entry.captions.texts for entry in source.entries)
    lines = [f"captions: {len(source.entries) - bare:,} of {len(source.entries):,} images"]
    if bare:
        lines[0] += f"; {bare:,} have only the trigger word {config.trigger_word}"
    lines += source.reading
    if not source.is_divided:
        count = _num_held_out(source.entries, config)
        lines.append(f"held out: {counted(count, 'image')}, chosen by their names" if count else "held out: none")
    unread = Counter(suffix_of(name) for name in source.unread)
    return lines + ([f"not read: {describe_files(unread)}"] if unread else [])


def _num_held_out(entries: list[Entry], config: options.Dataset) -> int:
    if config.held_out is not None:
        return config.held_out
    return max(1, round(HELD_OUT_SHARE * len(entries))) if len(entries) >= ENOUGH_TO_HOLD_OUT else 0


def _hold_out(entries: list[Entry], config: options.Dataset) -> dict[Split, list[Entry]]:
    """Divide the entries. The names with the lowest checksums are held out, each shown once."""
    count = _num_held_out(entries, config)
    if count >= len(entries):
        raise option_error("dataset.held_out", config.held_out, f"must be below {len(entries)}, the number of images")
    chosen = held_out((entry.name.encode(errors="surrogateescape") for entry in entries), count=count)
    return {
        "train": [entry for entry, is_held_out in zip(entries, chosen, strict=True) if not is_held_out],
        "validation": [dataclasses.replace(entries[place], repeats=1) for place in np.flatnonzero(chosen)],
    }
