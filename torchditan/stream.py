# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Position -> sample -> batch: the training stream over any map-style dataset.

Notable:
- the stream is a function of (seed, position): position p is sample p mod N of the shuffle of epoch p div N,
  mirrored or not by a draw keyed to p. A checkpoint stores one integer; any world size, batch split or
  number of workers continues from it without losing or repeating a sample;
- a loader worker also draws the sample's noise, timestep and label dropout (see randomness.py);
- a source that can only be read in order (hub streaming) goes through torchdata's StatefulDataLoader instead;
- a dataset that can gives whole batches (`BatchedDataset`): latents are copied out of memory-mapped shards at once;
- an unreadable image stops the run by name, or is replaced by the next readable one and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchditan.config import ConfigError, option_error
from torchditan.randomness import IndexedGenerator, Permutation, Randomness, draw, generator

Batch = dict[str, torch.Tensor]


class CorruptImageError(ConfigError):
    """An image that cannot be read; the message names it."""


class ImageDataset(Protocol):
    """What the stream needs of a dataset; `data/` has one file for each."""

    name: str
    sample_shape: tuple[int, ...]
    """(C, H, W) of every sample."""
    class_names: list[str]
    """Empty: the dataset has no labels."""
    horizontal_flip: bool
    """Whether a mirrored sample is as good as the original."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`sample` (C, H, W) float32 in [-1, 1], and `class_label` int where there are labels."""


@runtime_checkable
class BatchedDataset(Protocol):
    """An ImageDataset that reads whole batches at once, mirrored samples included; no sample of it can be corrupt."""

    def read_batch(self, indices: np.ndarray, flips: np.ndarray) -> Batch:
        """The samples (B,) at these indices, mirrored where `flips` (B,) bool is true.

        Instead of `sample` it may give what `sample` is computed from on the device (autoencoders/latent_space.py).
        """


class StreamedDataset(Protocol):
    """A dataset that can only be read in order."""

    name: str
    sample_shape: tuple[int, ...]
    class_names: list[str]
    horizontal_flip: bool

    def iterate(self, *, rank: int, world_size: int) -> IterableDataset:
        """This rank's share, items as in ImageDataset; the iterable has `state_dict` and `load_state_dict`."""


def read_image(
    dataset: ImageDataset, index: int, *, num_classes: int, corrupt_images: Literal["error", "skip"]
) -> dict[str, Any]:
    """The item at `index`, or with `skip` the next readable one; `skipped` counts those passed over.

    Raises:
        CorruptImageError: it cannot be read, and `corrupt_images` is `error`.
        ConfigError: none can be read, or the label is not below `num_classes` (0: there are no labels).
    """
    for skipped in range(len(dataset)):
        place = (index + skipped) % len(dataset)
        try:
            item = dataset[place]
        except CorruptImageError:
            if corrupt_images == "error":
                raise
            continue
        if num_classes and not 0 <= item["class_label"] < num_classes:
            right = f"image {place} of {dataset.name} has label {item['class_label']}; must be 0 to {num_classes - 1}"
            raise option_error("dataset.num_classes", num_classes, right)
        return {**item, "skipped": skipped}
    raise option_error("dataset.dataset_name", dataset.name, "has no readable image")


@dataclass(frozen=True)
class BatchPlan:
    """Which positions of the stream make up which batch of which rank."""

    batch_size: int
    """Images per rank in one forward pass."""
    global_batch_size: int
    rank: int = 0
    world_size: int = 1

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // (self.batch_size * self.world_size)

    def positions(self, start: int) -> Iterator[list[int]]:
        """Positions of this rank's batches, endlessly, from global position `start`."""
        stride = self.batch_size * self.world_size
        first = start + self.rank * self.batch_size
        while True:
            yield list(range(first, first + self.batch_size))
            first += stride


class StreamDataset(Dataset):
    """Map-style view of the training stream: position -> sample."""

    def __init__(
        self,
        dataset: ImageDataset,
        *,
        seed: int,
        num_classes: int,
        horizontal_flip: bool,
        corrupt_images: Literal["error", "skip"],
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.num_classes = num_classes
        self.horizontal_flip = horizontal_flip
        self.corrupt_images = corrupt_images
        self._epoch = -1
        self._flip_draws = IndexedGenerator(seed, "flip")

    def locate(self, positions: np.ndarray) -> np.ndarray:
        """(n,) indices in the dataset of the samples at these positions."""
        epochs, offsets = np.divmod(positions, len(self.dataset))
        indices = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            if epoch != self._epoch:
                self._epoch = int(epoch)
                self._shuffle = Permutation(self.seed, "shuffle", self._epoch, length=len(self.dataset))
            indices[epochs == epoch] = self._shuffle(offsets[epochs == epoch])
        return indices

    def is_flipped(self, position: int) -> bool:
        return self.horizontal_flip and bool(self._flip_draws.at(position).random() < 0.5)

    def __getitem__(self, position: int) -> dict[str, Any] | ConfigError:
        # A worker process would lengthen a raised message with its traceback, so the error travels as a value.
        try:
            item = read_image(
                self.dataset,
                int(self.locate(np.array([position]))[0]),
                num_classes=self.num_classes,
                corrupt_images=self.corrupt_images,
            )
        except ConfigError as error:
            return error
        if self.is_flipped(position):
            item["sample"] = item["sample"].flip(-1)
        item["index"] = position
        return item

    def __getitems__(self, positions: list[int]) -> list[dict[str, Any] | ConfigError] | Batch | ConfigError:
        """What the loader asks for: all samples of a batch, or a whole one from a dataset that reads in batches."""
        if not isinstance(self.dataset, BatchedDataset):
            return [self[position] for position in positions]
        flips = np.array([self.is_flipped(position) for position in positions])
        try:
            batch = self.dataset.read_batch(self.locate(np.array(positions)), flips)
        except ConfigError as error:
            return error
        batch["index"] = torch.tensor(positions, dtype=torch.int64)  # (B,)
        return batch


@dataclass(frozen=True)
class Collate:
    """Samples -> batch, in the worker; an error among them travels as a value."""

    labelled: bool

    def __call__(self, items: list[dict[str, Any] | ConfigError] | Batch | ConfigError) -> Batch | ConfigError:
        if isinstance(items, ConfigError):
            return items
        if isinstance(items, dict):
            items["skipped"] = torch.zeros(len(items["index"]), dtype=torch.int64)
            return items
        for item in items:
            if isinstance(item, ConfigError):
                return item
        samples = cast(list[dict[str, Any]], items)
        batch = {"sample": torch.stack([item["sample"] for item in samples])}  # (B, C, H, W)
        for key in ("index", "skipped", "class_label") if self.labelled else ("index", "skipped"):
            batch[key] = torch.tensor([item.get(key, 0) for item in samples], dtype=torch.int64)  # (B,)
        return batch


@dataclass(frozen=True)
class CollateAndDraw:
    """Samples -> (batch, randomness), in the worker."""

    seed: int
    sample_shape: tuple[int, ...]
    """(C, H, W) of what the model sees: of latents, where pixels are encoded on the device."""
    posterior: bool
    collate: Collate

    def __call__(
        self, items: list[dict[str, Any] | ConfigError] | Batch | ConfigError
    ) -> tuple[Batch, Randomness] | ConfigError:
        batch = self.collate(items)
        if isinstance(batch, ConfigError):
            return batch
        return batch, draw(self.seed, batch["index"].tolist(), self.sample_shape, posterior=self.posterior)


class TrainingStream:
    """This rank's micro-batches, from a position on, endlessly."""

    def __init__(
        self,
        dataset: ImageDataset,
        *,
        plan: BatchPlan,
        seed: int,
        num_classes: int,
        horizontal_flip: bool | None,
        corrupt_images: Literal["error", "skip"],
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
        sample_shape: tuple[int, ...] | None = None,
        posterior: bool = False,
    ) -> None:
        flip = dataset.horizontal_flip if horizontal_flip is None else horizontal_flip
        self.plan = plan
        self.stream = StreamDataset(
            dataset, seed=seed, num_classes=num_classes, horizontal_flip=flip, corrupt_images=corrupt_images
        )
        self.loader_options: dict[str, Any] = {
            "collate_fn": CollateAndDraw(
                seed, sample_shape or dataset.sample_shape, posterior, Collate(labelled=num_classes > 0)
            ),
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor if num_workers else None,
            "pin_memory": pin_memory,
        }

    def state(self) -> None:
        """Nothing: the position says it all."""

    def load_state(self, state: dict[str, Any] | None) -> None:
        assert state is None

    def batches(self, position: int) -> Iterator[tuple[Batch, Randomness]]:
        """Micro-batches of this rank from a global position of the stream."""
        sampler = cast(Iterable[list[int]], self.plan.positions(position))
        for item in DataLoader(self.stream, batch_sampler=sampler, **self.loader_options):
            if isinstance(item, ConfigError):
                raise item
            yield item


class StreamedTraining:
    """This rank's micro-batches of a source that is read in its stored order, unshuffled.

    Every rank reads its own share of the source, so a checkpoint holds a state for each rank: a resume is exact
    with the same number of ranks and workers, and refused with others. Flips, noise, timesteps and label dropout
    are keyed to the position in the stream, as everywhere.
    """

    def __init__(
        self,
        dataset: StreamedDataset,
        *,
        plan: BatchPlan,
        seed: int,
        num_classes: int,
        horizontal_flip: bool | None,
        num_workers: int,
        pin_memory: bool,
        sample_shape: tuple[int, ...] | None = None,
        posterior: bool = False,
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.seed = seed
        self.sample_shape = sample_shape or dataset.sample_shape
        self.posterior = posterior
        self.flip = dataset.horizontal_flip if horizontal_flip is None else horizontal_flip
        self.collate = Collate(labelled=num_classes > 0)
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self._loader: Any = None
        self._resume_from: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {
            "world_size": self.plan.world_size,
            "num_workers": self.num_workers,
            "loader": self._loader.state_dict(),
        }

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Continue from a saved state.

        Raises:
            ConfigError: it is of another number of ranks or workers.
        """
        there = (state["world_size"], state["num_workers"]) if state else None
        here = (self.plan.world_size, self.num_workers)
        if state is None or there != here:
            right = (
                f"the checkpoint is of {there} ranks and workers, this job of {here}; a streamed source resumes with "
                "the same numbers only"
            )
            raise option_error("dataset.streaming", True, right)
        self._resume_from = state["loader"]

    def batches(self, position: int) -> Iterator[tuple[Batch, Randomness]]:
        """Micro-batches of this rank; `position` names the samples, the loader's state finds them."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        positions = self.plan.positions(position)
        while True:
            self._loader = StatefulDataLoader(
                self.dataset.iterate(rank=self.plan.rank, world_size=self.plan.world_size),
                batch_size=self.plan.batch_size,
                collate_fn=self.collate,
                drop_last=True,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
            )
            is_empty = self._resume_from is None  # a state may stand at the very end of the source
            if self._resume_from is not None:
                self._loader.load_state_dict(self._resume_from)
                self._resume_from = None
            for batch in self._loader:
                is_empty = False
                if isinstance(batch, ConfigError):
                    raise batch
                yield self._position(batch, next(positions))
            if is_empty:
                right = f"rank {self.plan.rank} finds fewer readable images than a batch of {self.plan.batch_size}"
                raise option_error("dataset.dataset_name", self.dataset.name, right)

    def _position(self, batch: Batch, index: list[int]) -> tuple[Batch, Randomness]:
        if self.flip:
            flips = [generator(self.seed, "flip", i).random() < 0.5 for i in index]
            batch["sample"][flips] = batch["sample"][flips].flip(-1)
        batch["index"] = torch.tensor(index, dtype=torch.int64)
        return batch, draw(self.seed, index, self.sample_shape, posterior=self.posterior)
