# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Pictures of a drawing in 8 bits, whose finished parts are kept in files, so that an interrupted evaluation continues.

Notable:
- a part holds consecutive samples, `00000250-00000499.npz`, and appears when it is whole;
- the folder is named after the digest of the drawing, so different samples never mix. The batch size is not part of it:
  it changes only the last digits of the model's output, and the evaluation may continue with another one;
- ranks read each other's parts: the folder must be on a file system that all of them see.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from torchditan.distributed.process_group import from_rank_0, rank_and_world_size
from torchditan.extras.evaluation.metric import Pictures
from torchditan.extras.evaluation.sample_batches import write_images
from torchditan.run.atomic_files import atomic_writer, refuse_unwritable
from torchditan.sampling.drawing import Drawing
from torchditan.sampling.reconstruction import Rounding, to_8_bit
from torchditan.sampling.sampler import Sampler, ToPixels

_PART = re.compile(r"(\d{8})-(\d{8})\.npz")
_PARTIAL = re.compile(rf"\.{_PART.pattern}\..+\.partial")
"""Temporary files of `atomic_writer`."""
_KEPT = "free disk space and run the same command again; finished samples are kept"


class SampleParts:
    """The finished samples of one drawing.

    Args:
        folder: of its parts alone, named after its digest.
        num_samples: of the drawing.
    """

    def __init__(self, folder: Path, num_samples: int) -> None:
        self.folder = folder
        self.num_samples = num_samples

    def open(self) -> list[range]:
        """The finished samples, as ranges of their numbers in order. All ranks call it, and get what rank 0 sees.

        Raises:
            ConfigError: the folder cannot be written.
        """
        with refuse_unwritable(self.folder, right=_KEPT):
            self.folder.mkdir(parents=True, exist_ok=True)
        is_first = rank_and_world_size()[0] == 0
        if is_first:
            self._delete(_PARTIAL)  # of a killed process
        return from_rank_0(self._ranges() if is_first else [])

    def read(self, numbers: range) -> Tensor:
        """Images (n, C, H, W) uint8 of a part."""
        with np.load(self._path(numbers), allow_pickle=False) as stored:
            return torch.from_numpy(stored["images"])

    def write(self, numbers: Sequence[int], images: Tensor) -> None:
        """Keep samples (n, C, H, W) uint8 with increasing numbers, one part for each run of consecutive ones.

        Raises:
            ConfigError: a part cannot be written; the finished ones are kept.
        """
        breaks = [0, *(place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1)]
        for start, stop in pairwise([*breaks, len(numbers)]):
            path = self._path(range(numbers[start], numbers[stop - 1] + 1))
            with refuse_unwritable(path, right=_KEPT), atomic_writer(path) as file:
                np.savez(file, images=images[start:stop].numpy())

    def write_npz(self, path: Path) -> None:
        """Write all samples in order as ADM's `.npz`, part by part; gray images get three equal channels.

        Only one rank calls it, when all have finished drawing.

        Raises:
            ConfigError: the file cannot be written.
        """
        ranges = self._ranges()
        assert sum(map(len, ranges)) == self.num_samples, (ranges, self.num_samples)
        height, width = self.read(ranges[0]).shape[2:]
        batches = (self.read(numbers).expand(-1, 3, -1, -1) for numbers in ranges)
        with refuse_unwritable(path, right=_KEPT):
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

    def _delete(self, pattern: re.Pattern[str]) -> None:
        for path in list(self.folder.iterdir()):
            if pattern.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _ranges(self) -> list[range]:
        """Ranges of the parts by name, in order. Two processes in the same folder may have drawn a sample twice: a part
        that overlaps an earlier one is ignored."""
        matches = [match for path in self.folder.iterdir() if (match := _PART.fullmatch(path.name))]
        ranges: list[range] = []
        for first, last in sorted((int(match[1]), int(match[2])) for match in matches):
            if not ranges or first >= ranges[-1].stop:
                ranges.append(range(first, last + 1))
        return ranges

    def _path(self, numbers: range) -> Path:
        return self.folder / f"{numbers[0]:08d}-{numbers[-1]:08d}.npz"


def draw_pictures(
    sampler: Sampler,
    model: nn.Module,
    drawing: Drawing,
    *,
    batch_size: int,
    to_pixels: ToPixels,
    rounding: Rounding = "nearest",
    parts: SampleParts | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[Pictures]:
    """Draw this rank's share of the samples. All ranks call it together, and take all that it yields.

    Samples in `parts` are not drawn again. If they came from batches of another size, the rest of each batch is drawn.

    Args:
        model, batch_size, say: see `Sampler.draw`.
        to_pixels: decodes samples.
        rounding: see `to_8_bit`.
        parts: keeps finished samples; None keeps none.

    Yields:
        Pictures of source "generated", B or fewer.

    Raises:
        ConfigError: `parts` cannot be written.
    """

    def pictures(numbers: Sequence[int], images: Tensor) -> Pictures:
        chosen = torch.tensor(numbers, dtype=torch.int64)
        labels = None if drawing.labels is None else drawing.labels[chosen]
        return Pictures(images, labels, chosen, "generated", drawing.prompts_of(numbers))

    finished: list[range] = []
    if parts is not None:
        finished = parts.open()
        rank, world_size = rank_and_world_size()
        for kept in finished[rank::world_size]:
            yield pictures(kept, parts.read(kept))
    num_bad = 0
    for drawn, samples in sampler.draw(model, drawing, batch_size=batch_size, finished=finished, say=say):
        pixels = to_pixels(samples).cpu()
        num_bad += int((~pixels.isfinite()).flatten(1).any(1).sum())
        images = to_8_bit(pixels.nan_to_num(nan=-1.0), rounding).byte()  # (B, 1 or 3, H, W)
        if parts is not None:
            parts.write(drawn, images)
        yield pictures(drawn, images)
    if num_bad:
        warning = f"warning: {num_bad} samples have values that are not finite; NaN counts as black"
        (say or partial(print, file=sys.stderr))(warning)
