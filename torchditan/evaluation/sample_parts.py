# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Finished samples of an evaluation, kept in files, so that an interrupted evaluation continues.

Notable:
- a part holds consecutive samples, `00000250-00000499.npz`: their numbers, 8-bit images and labels. It appears when it
  is whole; its checksums are verified when it is read. A damaged part is removed, one that cannot be read is kept;
- the identity in `identity.json` says what the samples are. Samples with different identities never mix;
- ranks read each other's parts: the folder must be on a file system that all of them see.
"""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchditan.config.errors import ConfigError
from torchditan.evaluation.ranks import from_rank_0, rank_and_world_size
from torchditan.evaluation.sample_batches import write_images
from torchditan.run.atomic_files import atomic_writer, write_file

IDENTITY_FILE = "identity.json"
_PARTS_FOLDER = "parts"
_PART = re.compile(r"(\d{8})-(\d{8})\.npz")
_PARTIAL = re.compile(rf"\.({_PART.pattern}|{re.escape(IDENTITY_FILE)})\..+\.partial")
"""Temporary files of `atomic_writer`."""
_DAMAGE = (ValueError, KeyError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
"""What zipfile and numpy raise for a wrong byte in memory, depending on its place: RuntimeError for a flag of an
encrypted entry or an unknown compression."""


@dataclass(frozen=True)
class SampleParts:
    """The finished samples of one evaluation with one seed."""

    folder: Path
    identity: Mapping[str, Any]
    """All that determines the samples, as JSON values: run, step, weights, sampling options, seed, number of samples,
    class balance, rounding and precision. The batch size is not part of it: it changes only the last digits of the
    model's output, and the evaluation may continue with another one."""

    def open(self) -> list[range]:
        """The finished samples, as ranges of their numbers in order. All ranks call it, and get what rank 0 sees.

        Raises:
            ConfigError: the folder holds samples with another identity, or cannot be written.
        """
        found: Any = None
        if rank_and_world_size()[0] == 0:
            try:
                self._check_identity()
                found = self._ranges()
            except ConfigError as error:
                found = error
        found = from_rank_0(found)
        if isinstance(found, ConfigError):
            raise found
        return found

    def read(self, numbers: range) -> tuple[Tensor, Tensor | None] | None:
        """Images (n, C, H, W) uint8 and labels (n,) int64 of a part; None if it is damaged, and then it is removed.

        Raises:
            ConfigError: the file cannot be read, which says nothing about its content: it is kept.
        """
        path = self._path(numbers)
        try:
            data = io.BytesIO(path.read_bytes())  # all errors from here on are of the content
        except OSError as error:
            right = "run the same command again; finished samples are kept"
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}; {right}") from None
        try:
            with zipfile.ZipFile(data) as archive:
                is_whole = archive.testzip() is None  # before numpy trusts the shapes
            if is_whole:
                data.seek(0)
                with np.load(data, allow_pickle=False) as stored:
                    images = torch.from_numpy(stored["images"])
                    labels = torch.from_numpy(stored["labels"]) if len(stored["labels"]) else None
                    is_whole = stored["numbers"].tolist() == list(numbers)
        except _DAMAGE:
            is_whole = False
        if is_whole:
            return images, labels
        with suppress(OSError):
            path.unlink(missing_ok=True)
        print(f"{path} is damaged; its samples are drawn again", file=sys.stderr, flush=True)
        return None

    def write(self, numbers: range, images: Tensor, labels: Tensor | None) -> None:
        """Keep consecutive samples.

        Args:
            numbers: of the samples.
            images: (n, C, H, W) uint8.
            labels: (n,) int64, or None.

        Raises:
            ConfigError: the part cannot be written; the finished ones are kept.
        """
        path = self._path(numbers)
        stored_labels = np.empty(0, dtype=np.int64) if labels is None else labels.numpy()
        with _one_line_for_the_disk(path), atomic_writer(path) as file:
            np.savez(file, numbers=np.array(numbers), images=images.numpy(), labels=stored_labels)

    def write_npz(self, path: Path, *, num_samples: int) -> None:
        """Write all samples in order as ADM's `.npz`, part by part; gray images get three equal channels.

        Only one rank calls it, when all have finished drawing.

        Raises:
            ConfigError: a sample is missing or damaged, or the file cannot be written.
        """
        ranges = self._ranges()
        num_finished = sum(map(len, ranges))
        if num_finished != num_samples:
            found = f"{num_finished:,} of {num_samples:,} samples"
            raise ConfigError(f"{self.folder}: holds {found}; run the same evaluation again to draw the others")
        height, width = self._images(ranges[0]).shape[2:]
        batches = (self._images(numbers).expand(-1, 3, -1, -1) for numbers in ranges)
        with _one_line_for_the_disk(path):
            write_images(path, batches, shape=(num_samples, height, width))

    def remove(self) -> None:
        """Delete the parts, `identity.json` and stale temporary files, if this identity wrote them.

        Then delete the folder, and its parent `parts`, if they are empty. Other files are kept. Only one rank calls it,
        when all have finished reading.
        """
        # The identity goes last, and the first error ends it, so that what remains is still known.
        with suppress(OSError):
            if self._stored_identity() == self._plain_identity():
                for path in list(self.folder.iterdir()):
                    if _PART.fullmatch(path.name) or _PARTIAL.fullmatch(path.name):
                        path.unlink(missing_ok=True)
                (self.folder / IDENTITY_FILE).unlink(missing_ok=True)
            self.folder.rmdir()
            if self.folder.parent.name == _PARTS_FOLDER:
                self.folder.parent.rmdir()

    def refuse(self, why: str) -> ConfigError:
        """The error for a folder with other samples."""
        return ConfigError(
            f"{self.folder}: holds samples of another evaluation ({why}); choose another --out, or remove this folder"
        )

    def _images(self, numbers: range) -> Tensor:
        found = self.read(numbers)
        if found is None:
            raise ConfigError(f"{self._path(numbers)}: was damaged; run the same evaluation again to draw its samples")
        return found[0]

    def _check_identity(self) -> None:
        path = self.folder / IDENTITY_FILE
        identity = self._plain_identity()
        if path.exists():
            stored = self._stored_identity()
            if stored is None:
                raise self.refuse(f"{IDENTITY_FILE} is unreadable")
            for name in sorted(stored.keys() | identity.keys()):
                if stored.get(name) != identity.get(name):
                    raise self.refuse(f"{name} {_shown(stored.get(name))}, now {_shown(identity.get(name))}")
        elif self._ranges():
            raise self.refuse(f"no {IDENTITY_FILE}")
        else:
            with _one_line_for_the_disk(path):
                write_file(path, json.dumps(identity, indent=2).encode())
        for stale in list(self.folder.iterdir()):
            if _PARTIAL.fullmatch(stale.name):  # of a killed process
                with suppress(OSError):
                    stale.unlink(missing_ok=True)

    def _plain_identity(self) -> dict[str, Any]:
        """As it is read back: tuples become lists."""
        return json.loads(json.dumps(self.identity))

    def _stored_identity(self) -> dict[str, Any] | None:
        """None if there is none, or if it is unreadable."""
        try:
            stored = json.loads((self.folder / IDENTITY_FILE).read_text())
        except (OSError, ValueError):
            return None
        return stored if isinstance(stored, dict) else None

    def _ranges(self) -> list[range]:
        """Ranges of the parts by name, in order. Two processes in the same folder may have drawn a sample twice: a part
        that overlaps an earlier one is ignored."""
        names = self.folder.iterdir() if self.folder.is_dir() else ()
        matches = [match for path in names if (match := _PART.fullmatch(path.name))]
        ranges: list[range] = []
        for first, last in sorted((int(match[1]), int(match[2])) for match in matches):
            if not ranges or first >= ranges[-1].stop:
                ranges.append(range(first, last + 1))
        return ranges

    def _path(self, numbers: range) -> Path:
        return self.folder / f"{numbers[0]:08d}-{numbers[-1]:08d}.npz"


@contextmanager
def _one_line_for_the_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        right = "free disk space and run the same command again; finished samples are kept"
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; {right}") from None


def _shown(value: Any) -> str:
    text = "none" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
