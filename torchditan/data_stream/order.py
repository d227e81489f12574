# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Position -> sample: the order of the training stream over any map-style dataset.

Notable:
- the stream is a function of (seed, position): position p is sample p mod N of the shuffle of epoch p div N.
  A draw keyed to p decides whether it is mirrored. A checkpoint stores one integer. Any world size, batch split or
  number of workers continues from it without losing or repeating a sample;
- samples of several shapes (`GroupedDataset`) are ordered so that all samples of an optimizer step share one shape;
- a `BatchedDataset` returns whole batches.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from torchditan.data_stream.datasets import (
    Batch,
    BatchedDataset,
    GroupedDataset,
    ImageDataset,
    VariedDataset,
    read_image,
)
from torchditan.errors import ConfigError
from torchditan.randomness import Permutation, uniform


@dataclass(frozen=True)
class BatchPlan:
    """Assigns positions of the stream to the batches of this rank."""

    batch_size: int
    """Images per rank in one forward pass."""
    global_batch_size: int
    rank: int = 0
    world_size: int = 1

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // (self.batch_size * self.world_size)

    def positions(self, start: int) -> Iterator[list[int]]:
        """Positions of this rank's batches from global position `start`, without end."""
        stride = self.batch_size * self.world_size
        first = start + self.rank * self.batch_size
        while True:
            yield list(range(first, first + self.batch_size))
            first += stride


class OrderedDataset:
    """View of the training stream for a loader: positions -> samples."""

    def __init__(
        self,
        dataset: ImageDataset,
        *,
        seed: int,
        num_classes: int,
        horizontal_flip: bool,
        corrupt_images: Literal["error", "skip"],
        global_batch_size: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.num_classes = num_classes
        self.horizontal_flip = horizontal_flip
        self.corrupt_images = corrupt_images
        self.global_batch_size = global_batch_size
        self._varied = dataset if isinstance(dataset, VariedDataset) else None  # the check of a protocol is slow
        groups = dataset.groups() if isinstance(dataset, GroupedDataset) else []
        self.groups = groups if len(groups) > 1 else None
        """Indices of the samples of each shape; None if all samples share one shape."""
        self._group_of = np.zeros(0 if self.groups is None else len(dataset), dtype=np.int64)
        for number, group in enumerate(self.groups or []):
            self._group_of[group] = number

    def locate(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """(n,) dataset indices of the samples at these positions."""
        if self.groups is not None:
            return self._locate_in_groups(np.asarray(positions), self.groups)
        return self._shuffled("shuffle", np.asarray(positions), len(self.dataset))

    def _locate_in_groups(self, positions: np.ndarray, groups: list[np.ndarray]) -> np.ndarray:
        """Locate samples so that each optimizer step takes them from one group.

        Each group has its own shuffled stream of epochs. Step n of a group takes global batch n of that stream.
        Every epoch takes the steps of all groups in a new order.
        """
        assert self.global_batch_size is not None
        sizes = np.array([len(group) for group in groups])
        steps, rows = np.divmod(positions, self.global_batch_size)
        owners, numbers = self._steps_in_epochs(steps, sizes)
        indices = np.empty(len(positions), dtype=np.int64)
        for owner in np.unique(owners).tolist():
            here, group = owners == owner, groups[owner]
            own_positions = numbers[here] * self.global_batch_size + rows[here]
            indices[here] = group[self._shuffled(f"shuffle {owner}", own_positions, len(group))]
        return indices

    def _steps_in_epochs(self, steps: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (n,) the group of each step and its number in the group, for whole batches, epoch by epoch.

        After E epochs a group of size s has had `E * s // global_batch_size` steps. The remaining images, fewer than a
        batch, come first in its next step. The steps of an epoch are shuffled.
        """
        owners, numbers = np.empty_like(steps), np.empty_like(steps)
        unique, inverse = np.unique(steps, return_inverse=True)  # usually one
        epochs = np.array([self._epoch_of(step, sizes) for step in unique.tolist()])[inverse]
        for epoch in np.unique(epochs).tolist():
            here, before = epochs == epoch, self._steps_before(epoch, sizes)
            offsets = np.cumsum([0, *(self._steps_before(epoch + 1, sizes) - before)])  # (number of groups + 1,)
            slots = _shuffle(self.seed, "epoch of buckets", epoch, int(offsets[-1]))(steps[here] - before.sum())
            owners[here] = np.searchsorted(offsets, slots, side="right") - 1
            numbers[here] = before[owners[here]] + slots - offsets[owners[here]]
        return owners, numbers

    def _epoch_of(self, step: int, sizes: np.ndarray) -> int:
        """The last epoch that starts at or before this step. An epoch of very few images may have no step."""
        assert self.global_batch_size is not None
        last = (step + len(sizes) + 1) * self.global_batch_size // int(sizes.sum()) + 1
        return bisect.bisect_right(range(last + 1), step, key=lambda epoch: self._steps_before(epoch, sizes).sum()) - 1

    def _steps_before(self, epoch: int, sizes: np.ndarray) -> np.ndarray:
        return epoch * sizes // self.global_batch_size  # (number of groups,)

    def _shuffled(self, purpose: str, positions: np.ndarray, length: int) -> np.ndarray:
        """(n,) values of range(length) at these positions, with a new shuffle in every epoch."""
        epochs, offsets = np.divmod(positions, length)
        shuffled = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():  # usually one
            here = epochs == epoch
            shuffled[here] = _shuffle(self.seed, purpose, epoch, length)(offsets[here])
        return shuffled

    def are_flipped(self, positions: Sequence[int]) -> np.ndarray:
        """(n,) bool: which of the samples at these positions are mirrored."""
        if not self.horizontal_flip:
            return np.zeros(len(positions), dtype=bool)
        return (uniform(self.seed, "flip", positions) < 0.5).numpy()

    def __getitems__(self, positions: list[int]) -> list[dict[str, Any]] | Batch | ConfigError:
        """The samples of a batch for the loader, or a whole batch from a `BatchedDataset`."""
        # A worker process adds its traceback to the message of a raised error, so the error is returned as a value.
        indices, flips = self.locate(positions), self.are_flipped(positions)
        try:
            if not isinstance(self.dataset, BatchedDataset):
                return [self._read(*place) for place in zip(positions, indices.tolist(), flips.tolist(), strict=True)]
            batch = self.dataset.read_batch(indices, flips)
        except ConfigError as error:
            return error
        if self.num_classes == 0:
            batch.pop("class_label", None)
        batch["index"] = torch.from_numpy(np.array(positions, dtype=np.int64))  # (B,)
        return batch

    def _read(self, position: int, index: int, is_flipped: bool) -> dict[str, Any]:
        item = read_image(
            self.dataset,
            index,
            num_classes=self.num_classes,
            corrupt_images=self.corrupt_images,
            group=None if self.groups is None else self.groups[self._group_of[index]],
        )
        if is_flipped:
            item["sample"] = item["sample"].flip(-1)
        if self._varied is not None:
            item = self._varied.vary(item, item["place"], seed=self.seed, position=position)
        item["index"] = position
        return item


@functools.lru_cache(maxsize=64)
def _shuffle(seed: int, purpose: str, epoch: int, length: int) -> Permutation:
    return Permutation(seed, purpose, epoch, length=length)
