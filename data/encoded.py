# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encoded images and videos where they are stored (a file, a cell of a table), and datasets of such images."""

from __future__ import annotations

import abc
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
    """An image as the hub stores it. Of a folder of images, `datasets` stores only the paths."""

    data: bytes | None
    path: str | None

    def open(self) -> BinaryIO:
        if self.data is not None:
            return io.BytesIO(self.data)
        if not self.path:
            raise OSError("no data")
        return cast(BinaryIO, importlib.import_module("fsspec").open(self.path, "rb").open())


@dataclass(frozen=True)
class Cell:
    """A row of an Arrow column of `Stored` images, or of bytes."""

    column: Any
    row: int

    def open(self) -> BinaryIO:
        value = self.column[self.row]
        if not value.is_valid or not hasattr(value, "keys"):
            return Stored(value.as_py(), None).open()
        return Stored(value["bytes"].as_py(), value["path"].as_py() if "path" in value else None).open()


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

    @abc.abstractmethod
    def name_of(self, index: int) -> str:
        """Name of an image in messages."""

    @abc.abstractmethod
    def content_of(self, index: int) -> bytes:
        """The encoded image.

        Raises:
            CorruptImageError: it cannot be read.
        """

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
