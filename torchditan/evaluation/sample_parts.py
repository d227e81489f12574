# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Finished samples of an evaluation, kept in files, so that an interrupted evaluation continues.

Notable:
- a part holds consecutive samples, `00000250-00000499.npz`. It appears when it is whole; its checksum is verified when
  it is read. A damaged part is removed, one that cannot be read is kept;
- the name of the folder ends in a hash of all that determines the samples, so different samples never mix;
- ranks read each other's parts: the folder must be on a file system that all of them see.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchditan.config.errors import ConfigError
from torchditan.distributed.process_group import from_rank_0, rank_and_world_size
from torchditan.evaluation.sample_batches import write_images
from torchditan.evaluation.sampler import SamplePlan
from torchditan.run.atomic_files import atomic_writer

_PART = re.compile(r"(\d{8})-(\d{8})\.npz")
_PARTIAL = re.compile(rf"\.{_PART.pattern}\..+\.partial")
"""Temporary files of `atomic_writer`."""
_DAMAGE = (ValueError, KeyError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
"""What zipfile and numpy raise for a wrong byte in memory, depending on its place: RuntimeError for a flag of an
encrypted entry or an unknown compression."""


class SampleParts:
    """The finished samples of one evaluation with one seed.

    Args:
        folder: of the parts of this evaluation.
        plan: the samples.
        seed: of their noise.
        settings: all that determines the samples besides, as JSON values: run, step, weights, sampling options,
            rounding and precision. The batch size is not part of it: it changes only the last digits of the model's
            output, and the evaluation may continue with another one.
    """

    def __init__(self, folder: Path, plan: SamplePlan, *, seed: int, settings: Mapping[str, Any]) -> None:
        self.num_samples = len(plan)
        classes = plan.texts if plan.labels is None else plan.labels.tolist()
        identity = json.dumps([seed, len(plan), classes, settings], sort_keys=True, default=str)
        self.folder = folder / f"seed-{seed}_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    def open(self) -> list[range]:
        """The finished samples, as ranges of their numbers in order. All ranks call it, and get what rank 0 sees.

        Raises:
            ConfigError: the folder cannot be written.
        """
        found: Any = None
        if rank_and_world_size()[0] == 0:
            try:
                with _one_line_for_the_disk(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                self._delete(_PARTIAL)  # of a killed process
                found = self._ranges()
            except ConfigError as error:
                found = error
        found = from_rank_0(found)
        if isinstance(found, ConfigError):
            raise found
        return found

    def read(self, numbers: range) -> Tensor | None:
        """Images (n, C, H, W) uint8 of a part; None if it is damaged, and then it is removed.

        Raises:
            ConfigError: the file cannot be read, which says nothing about its content: it is kept.
        """
        path = self._path(numbers)
        try:
            data = io.BytesIO(path.read_bytes())  # all errors from here on are of the content
        except OSError as error:
            right = "run the same command again; finished samples are kept"
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}; {right}") from None
        with suppress(*_DAMAGE), zipfile.ZipFile(data) as archive:
            if archive.testzip() is None:  # before numpy trusts the shapes
                data.seek(0)
                with np.load(data, allow_pickle=False) as stored:
                    images = torch.from_numpy(stored["images"])
                if len(images) == len(numbers):
                    return images
        with suppress(OSError):
            path.unlink(missing_ok=True)
        print(f"{path} is damaged; its samples are drawn again", file=sys.stderr, flush=True)
        return None

    def write(self, numbers: Sequence[int], images: Tensor) -> None:
        """Keep samples with increasing numbers, one part for each run of consecutive ones.

        Args:
            numbers: of the samples.
            images: (n, C, H, W) uint8.

        Raises:
            ConfigError: a part cannot be written; the finished ones are kept.
        """
        breaks = [0, *(place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1)]
        for start, stop in pairwise([*breaks, len(numbers)]):
            path = self._path(range(numbers[start], numbers[stop - 1] + 1))
            with _one_line_for_the_disk(path), atomic_writer(path) as file:
                np.savez(file, images=images[start:stop].numpy())

    def write_npz(self, path: Path) -> None:
        """Write all samples in order as ADM's `.npz`, part by part; gray images get three equal channels.

        Only one rank calls it, when all have finished drawing.

        Raises:
            ConfigError: a sample is missing or damaged, or the file cannot be written.
        """
        ranges = self._ranges()
        num_finished = sum(map(len, ranges))
        if num_finished != self.num_samples:
            found = f"{num_finished:,} of {self.num_samples:,} samples"
            raise ConfigError(f"{self.folder}: holds {found}; run the same evaluation again to draw the others")
        height, width = self._images(ranges[0]).shape[2:]
        batches = (self._images(numbers).expand(-1, 3, -1, -1) for numbers in ranges)
        with _one_line_for_the_disk(path):
            write_images(path, batches, shape=(self.num_samples, height, width))

    def remove(self) -> None:
        """Delete the parts, and the folders that become empty; other files are kept.

        Only one rank calls it, when all have finished reading.
        """
        with suppress(OSError):
            self._delete(_PART)
            self._delete(_PARTIAL)
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def _images(self, numbers: range) -> Tensor:
        found = self.read(numbers)
        if found is None:
            raise ConfigError(f"{self._path(numbers)}: was damaged; run the same evaluation again to draw its samples")
        return found

    def _delete(self, pattern: re.Pattern[str]) -> None:
        for path in list(self.folder.iterdir()):
            if pattern.fullmatch(path.name):
                path.unlink(missing_ok=True)

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
