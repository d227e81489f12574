# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encoded images and videos where they are stored (a file, a cell of a table), and datasets of such images."""

from __future__ import annotations

import importlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch

from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets.images import Crop, corrupt_image, load_sample


class Encoded(Protocol):
    """An encoded image or video. tars.py has members of tars."""

    def open(self) -> BinaryIO: ...


@dataclass(frozen=True)
class File:
    path: Path

    def open(self) -> BinaryIO:
        return self.path.open("rb")


@dataclass(frozen=True)
class Stored:
    """A value of an image column: bytes and path as the hub stores them, or bytes; None if the row has no image.

    Of a folder of images on the hub, `datasets` stores only the paths.
    """

    value: Any

    def open(self) -> BinaryIO:
        fields = self.value if isinstance(self.value, dict) else {"bytes": self.value}
        if fields["bytes"] is not None:
            return io.BytesIO(fields["bytes"])
        if not fields.get("path"):
            raise OSError("no data")
        return cast(BinaryIO, importlib.import_module("fsspec").open(fields["path"], "rb").open())


@dataclass(frozen=True)
class Cell:
    """A row of an Arrow image column."""

    column: Any
    row: int

    def open(self) -> BinaryIO:
        return Stored(self.column[self.row].as_py()).open()


def read_bytes(content: Encoded, *, where: str) -> bytes:
    """Read the whole file.

    Raises:
        CorruptImageError: it cannot be read.
    """
    try:
        with content.open() as file:
            return file.read()
    except OSError as error:
        raise corrupt_image(where, error.strerror or str(error)) from error


class EncodedImages(ImageDataset):
    """Images that are decoded when an item is read."""

    horizontal_flip = True
    crop: Crop = "center"

    def name_of(self, index: int) -> str:
        """Name of an image in messages."""
        raise NotImplementedError

    def content_of(self, index: int) -> bytes:
        """The encoded image.

        Raises:
            CorruptImageError: it cannot be read.
        """
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = {"sample": self.decode(self.content_of(index), index)}
        if self.class_labels is not None:
            item["class_label"] = int(self.class_labels[index])
        return item

    def decode(self, data: bytes, index: int) -> torch.Tensor:
        sample = load_sample(
            data, sample_shape=self.sample_shape, where=self.name_of(index), crop=self.crop, number=index
        )
        return torch.from_numpy(sample)
