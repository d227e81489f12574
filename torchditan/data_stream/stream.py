# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Position -> sample -> batch: the training stream over any map-style dataset.

Notable:
- the stream is a function of (seed, position): position p is sample p mod N of the shuffle of epoch p div N,
  mirrored or not by a draw keyed to p. A checkpoint stores one integer; any world size, batch split or
  number of workers continues from it without losing or repeating a sample;
- a loader worker also draws the sample's noise, timestep and label dropout (see randomness.py);
- a source that can only be read in order (hub streaming) goes through torchdata's StatefulDataLoader instead;
- a dataset that can gives whole batches (`BatchedDataset`): latents are copied out of memory-mapped shards at once, by
  threads where images need worker processes;
- samples of several shapes (`GroupedDataset`) are dealt out so that all of an optimizer step have the same;
- an unreadable image stops the run by name, or is replaced by the next readable one and counted.
"""

from __future__ import annotations

import bisect
import functools
import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchditan.config.options import ConfigError, option_error
from torchditan.randomness import Permutation, Randomness, draw, uniform
from torchditan.supervision.parent_death import die_with_parent
from torchditan.supervision.preemption import SIGNALS

Batch = dict[str, torch.Tensor]
Result = TypeVar("Result")
BucketOrder = Literal["epochs", "random"]
"""Values of `dataset.bucket_order`."""


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


@runtime_checkable
class GroupedDataset(Protocol):
    """An ImageDataset whose samples have several shapes; its `sample_shape` is the most common one."""

    def groups(self) -> list[np.ndarray]:
        """Indices (n,) of the samples of each shape, ascending, none of them empty; every sample is in one."""


@runtime_checkable
class VariedDataset(Protocol):
    """An ImageDataset whose samples have several captions."""

    def vary(self, item: dict[str, Any], index: int, *, seed: int, position: int) -> dict[str, Any]:
        """The item at this position: with the caption that (seed, position) chooses."""
        ...


@runtime_checkable
class CaptionedDataset(Protocol):
    """A dataset of captioned images (data/captions.py): the cache encodes it, and becomes the ImageDataset."""

    name: str
    sample_shape: tuple[int, ...]
    captions: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def caption_variants(self, index: int) -> list[str]: ...

    def shape_of(self, index: int) -> tuple[int, ...]: ...

    def content_key(self, index: int) -> str: ...


class StreamedDataset(Protocol):
    """A dataset that can only be read in order."""

    name: str
    sample_shape: tuple[int, ...]
    class_names: list[str]
    horizontal_flip: bool

    def iterate(self, *, rank: int, world_size: int) -> IterableDataset:
        """This rank's share, items as in ImageDataset; the iterable has `state_dict` and `load_state_dict`."""


def read_image(
    dataset: ImageDataset,
    index: int,
    *,
    num_classes: int,
    corrupt_images: Literal["error", "skip"],
    group: np.ndarray | None = None,
) -> dict[str, Any]:
    """The item at `index`, or with `skip` the next readable one: `place` is its index, `skipped` counts those before.

    Args:
        group: indices in ascending order, `index` among them, that may take its place; None: all.

    Raises:
        CorruptImageError: it cannot be read, and `corrupt_images` is `error`.
        ConfigError: none can be read, or the label is not below `num_classes` (0: there are no labels).
    """
    length = len(dataset) if group is None else len(group)
    first = index if group is None else int(np.searchsorted(group, index))
    for skipped in range(length):
        place = (first + skipped) % length
        place = place if group is None else int(group[place])
        try:
            item = dataset[place]
        except CorruptImageError:
            if corrupt_images == "error":
                raise
            continue
        if num_classes and not 0 <= item["class_label"] < num_classes:
            right = f"image {place} of {dataset.name} has label {item['class_label']}; must be 0 to {num_classes - 1}"
            raise option_error("dataset.num_classes", num_classes, right)
        return {**item, "skipped": skipped, "place": place}
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


class StreamDataset:
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
        bucket_order: BucketOrder = "epochs",
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.num_classes = num_classes
        self.horizontal_flip = horizontal_flip
        self.corrupt_images = corrupt_images
        self.global_batch_size = global_batch_size
        self.bucket_order = bucket_order
        groups = dataset.groups() if isinstance(dataset, GroupedDataset) else []
        self.groups = groups if len(groups) > 1 else None
        """Indices of the samples of each shape; None where all have one."""
        self._group_of = np.zeros(len(dataset), dtype=np.int64)
        for number, group in enumerate(self.groups or []):
            self._group_of[group] = number

    def locate(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """(n,) indices in the dataset of the samples at these positions."""
        if self.groups is not None:
            return self._locate_in_groups(np.asarray(positions), self.groups)
        return self._shuffled("shuffle", np.asarray(positions), len(self.dataset))

    def _locate_in_groups(self, positions: np.ndarray, groups: list[np.ndarray]) -> np.ndarray:
        """An order in which the samples of an optimizer step are of one group.

        Each group has a shuffled stream of its own, epoch after epoch. Its steps are numbered, and step n of a group
        takes global batch n of that stream. `bucket_order` decides which step of which group comes when.
        """
        assert self.global_batch_size is not None
        sizes = np.array([len(group) for group in groups])
        steps, rows = np.divmod(positions, self.global_batch_size)
        in_order = self._steps_in_epochs if self.bucket_order == "epochs" else self._steps_at_random
        owners, numbers = in_order(steps, sizes)
        indices = np.empty(len(positions), dtype=np.int64)
        for owner in np.unique(owners).tolist():
            here, group = owners == owner, groups[owner]
            own_positions = numbers[here] * self.global_batch_size + rows[here]
            indices[here] = group[self._shuffled(f"shuffle {owner}", own_positions, len(group))]
        return indices

    def _steps_in_epochs(self, steps: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) the group of each step and the number of that step in its group: whole batches, epoch by epoch.

        After E epochs a group of size s has had `E * s // global_batch_size` steps. The images that are left, fewer
        than a batch, come first in its next step. The steps of an epoch are shuffled.
        """
        owners, numbers = np.empty_like(steps), np.empty_like(steps)
        unique, inverse = np.unique(steps, return_inverse=True)  # mostly one
        epochs = np.array([self._epoch_of(step, sizes) for step in unique.tolist()])[inverse]
        for epoch in np.unique(epochs).tolist():
            here, before = epochs == epoch, self._steps_before(epoch, sizes)
            offsets = np.cumsum([0, *(self._steps_before(epoch + 1, sizes) - before)])  # (number of groups + 1,)
            slots = _shuffle(self.seed, "epoch of buckets", epoch, int(offsets[-1]))(steps[here] - before.sum())
            owners[here] = np.searchsorted(offsets, slots, side="right") - 1
            numbers[here] = before[owners[here]] + slots - offsets[owners[here]]
        return owners, numbers

    def _epoch_of(self, step: int, sizes: np.ndarray) -> int:
        """The last epoch that begins at this step or before; an epoch of very few images may have no step."""
        assert self.global_batch_size is not None
        last = (step + len(sizes) + 1) * self.global_batch_size // int(sizes.sum()) + 1
        return bisect.bisect_right(range(last + 1), step, key=lambda epoch: self._steps_before(epoch, sizes).sum()) - 1

    def _steps_before(self, epoch: int, sizes: np.ndarray) -> np.ndarray:
        return epoch * sizes // self.global_batch_size  # (number of groups,)

    def _steps_at_random(self, steps: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) the group of each step and the number of that step in its group, as the first version had them.

        With N images a cycle is N steps, shuffled; s of them are of a group of size s. So a cycle shows every image
        as often as a global batch has images, but a part of it may show some often and others not at all.
        """
        offsets = np.cumsum([0, *sizes])  # (number of groups + 1,), the last is N
        slots = self._shuffled("buckets", steps, int(offsets[-1]))
        owners = np.searchsorted(offsets, slots, side="right") - 1
        return owners, steps // offsets[-1] * sizes[owners] + slots - offsets[owners]

    def _shuffled(self, purpose: str, positions: np.ndarray, length: int) -> np.ndarray:
        """(n,) what stands at these positions of range(length), shuffled anew in every epoch."""
        epochs, offsets = np.divmod(positions, length)
        shuffled = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():  # mostly one
            here = epochs == epoch
            shuffled[here] = _shuffle(self.seed, purpose, epoch, length)(offsets[here])
        return shuffled

    def are_flipped(self, positions: Sequence[int]) -> np.ndarray:
        """(n,) bool: which of the samples at these positions are mirrored."""
        if not self.horizontal_flip:
            return np.zeros(len(positions), dtype=bool)
        return (uniform(self.seed, "flip", positions) < 0.5).numpy()

    def __getitems__(self, positions: list[int]) -> list[dict[str, Any]] | Batch | ConfigError:
        """What the loader asks for: the samples of a batch, or a whole one from a dataset that reads in batches."""
        # A worker process would lengthen a raised message with its traceback, so the error travels as a value.
        indices, flips = self.locate(positions), self.are_flipped(positions)
        try:
            if not isinstance(self.dataset, BatchedDataset):
                return [self._read(*place) for place in zip(positions, indices.tolist(), flips.tolist(), strict=True)]
            batch = self.dataset.read_batch(indices, flips)
        except ConfigError as error:
            return error
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
        if isinstance(self.dataset, VariedDataset):
            item = self.dataset.vary(item, item["place"], seed=self.seed, position=position)
        item["index"] = position
        return item


@functools.lru_cache(maxsize=64)
def _shuffle(seed: int, purpose: str, epoch: int, length: int) -> Permutation:
    return Permutation(seed, purpose, epoch, length=length)


_NUMBERS = ("index", "skipped", "class_label")


@dataclass(frozen=True)
class Collate:
    """Samples -> batch, in the worker; an error among them travels as a value.

    Every tensor of a sample is stacked (embeddings of its text beside `sample`); what else it carries stays behind.
    """

    labelled: bool

    def __call__(self, items: list[dict[str, Any] | ConfigError] | Batch | ConfigError) -> Batch | ConfigError:
        if isinstance(items, ConfigError):
            return items
        if isinstance(items, dict):
            return {**items, "skipped": torch.zeros(len(items["index"]), dtype=torch.int64)}
        for item in items:
            if isinstance(item, ConfigError):
                return item
        samples = cast(list[dict[str, Any]], items)
        tensors = [key for key, value in samples[0].items() if isinstance(value, torch.Tensor) and key not in _NUMBERS]
        batch = {key: torch.stack([item[key] for item in samples]) for key in tensors}  # sample: (B, C, H, W)
        for key in _NUMBERS if self.labelled else _NUMBERS[:2]:
            batch[key] = torch.tensor([item.get(key, 0) for item in samples], dtype=torch.int64)  # (B,)
        return batch


@dataclass(frozen=True)
class CollateAndDraw:
    """Samples -> (batch, randomness), in the worker."""

    seed: int
    sample_shape: tuple[int, ...] | None
    """(C, H, W) of what the model sees: of latents, where pixels are encoded on the device. None: the batch's own."""
    posterior: bool
    collate: Collate

    def __call__(
        self, items: list[dict[str, Any] | ConfigError] | Batch | ConfigError
    ) -> tuple[Batch, Randomness] | ConfigError:
        batch = self.collate(items)
        if isinstance(batch, ConfigError):
            return batch
        shape = self.sample_shape or batch["sample"].shape[1:]
        return batch, draw(self.seed, batch["index"].tolist(), shape, posterior=self.posterior)


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
        bucket_order: BucketOrder = "epochs",
    ) -> None:
        flip = dataset.horizontal_flip if horizontal_flip is None else horizontal_flip
        self.plan = plan
        self.stream = StreamDataset(
            dataset,
            seed=seed,
            num_classes=num_classes,
            horizontal_flip=flip,
            corrupt_images=corrupt_images,
            global_batch_size=plan.global_batch_size,
            bucket_order=bucket_order,
        )
        noise_shape: tuple[int, ...] | None = sample_shape or dataset.sample_shape
        if self.stream.groups is not None:
            if noise_shape != dataset.sample_shape:
                right = "images of several sizes cannot be encoded at each step; encode them before"
                raise option_error("dataset.aspect_buckets", True, right)
            noise_shape = None
        self.loader_options: dict[str, Any] = {
            "collate_fn": CollateAndDraw(seed, noise_shape, posterior, Collate(labelled=num_classes > 0)),
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
        positions = self.plan.positions(position)
        for item in self._read_in_threads(positions) if self.uses_threads else self._read_in_processes(positions):
            if isinstance(item, ConfigError):
                raise item
            yield item

    @property
    def uses_threads(self) -> bool:
        """Copying rows and drawing noise let go of the interpreter's lock, so threads do what decoding needs processes
        for, and no batch is copied from one process to another."""
        return isinstance(self.stream.dataset, BatchedDataset) and self.loader_options["num_workers"] > 0

    def _read_in_processes(self, positions: Iterator[list[int]]) -> Iterator[tuple[Batch, Randomness] | ConfigError]:
        sampler = cast(Iterable[list[int]], positions)
        stream = cast(Dataset, self.stream)
        loader = DataLoader(stream, batch_sampler=sampler, worker_init_fn=live_with_rank, **self.loader_options)
        yield from start_workers(loader)

    def _read_in_threads(self, positions: Iterator[list[int]]) -> Iterator[tuple[Batch, Randomness] | ConfigError]:
        options = self.loader_options
        ahead = options["num_workers"] * options["prefetch_factor"]
        return run_ahead(self._load, positions, num_threads=options["num_workers"], ahead=ahead)

    def _load(self, positions: list[int]) -> tuple[Batch, Randomness] | ConfigError:
        item = self.loader_options["collate_fn"](self.stream.__getitems__(positions))
        if isinstance(item, ConfigError) or not self.loader_options["pin_memory"]:
            return item
        batch, randomness = item
        return {name: tensor.pin_memory() for name, tensor in batch.items()}, randomness.pin_memory()


def run_ahead(
    function: Callable[[list[int]], Result], positions: Iterator[list[int]], *, num_threads: int, ahead: int
) -> Iterator[Result]:
    """What `function` makes of the positions of each batch, in order; threads compute the next `ahead` of them."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="batches")
    try:
        pending = deque(pool.submit(function, next(positions)) for _ in range(ahead))
        while True:
            pending.append(pool.submit(function, next(positions)))
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # the next epoch may fork loader workers at once


def live_with_rank(worker: int) -> None:
    """For a loader worker: it ignores the signals that ask its rank to stop, and ends when the rank does.

    A rank that shall finish its step needs the next batch, and clusters signal every process of a job.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


_workers: set[BaseProcess] = set()


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """An iterator over a loader, whose workers `end_loader_workers` will know."""
    before = set(multiprocessing.active_children())
    iterator = iter(loader)
    _workers.update(set(multiprocessing.active_children()) - before)
    return iterator


def end_loader_workers() -> None:
    """End what is left of them when a run is over: they would not listen to the SIGTERM that Python sends them."""
    workers = [worker for worker in multiprocessing.active_children() if worker in _workers]
    _workers.clear()
    if not workers or threading.current_thread() is not threading.main_thread():
        return
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's loader takes a dead worker for a failure
    for worker in workers:
        worker.kill()
        worker.join()
    signal.signal(signal.SIGCHLD, previous)


class StreamedTraining:
    """This rank's micro-batches of a source that is read in its stored order, unshuffled.

    Every rank reads its own share of the source, so a checkpoint holds a state for each rank: a resume is exact
    with the same number of ranks and workers, and refused with others. Flips, noise, timesteps and label dropout
    are keyed to the position in the stream, as everywhere. A worker does not know the positions of its samples, so
    threads draw the noise, as many as there are workers; without workers it is drawn when its batch is.
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

        while True:
            self._loader = StatefulDataLoader(
                self.dataset.iterate(rank=self.plan.rank, world_size=self.plan.world_size),
                batch_size=self.plan.batch_size,
                collate_fn=self.collate,
                drop_last=True,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                worker_init_fn=live_with_rank,
            )
            is_empty = self._resume_from is None  # a state may stand at the very end of the source
            if self._resume_from is not None:
                self._loader.load_state_dict(self._resume_from)
                self._resume_from = None
            # The noise of an epoch has threads of its own, which start after the loader forked its workers.
            draws = self._draws(position)
            for batch in start_workers(self._loader):
                is_empty = False
                if isinstance(batch, ConfigError):
                    raise batch
                index, randomness = next(draws)
                yield self._with_position(batch, index), randomness
                position += self.plan.batch_size * self.plan.world_size
            draws.close()
            if is_empty:
                right = f"rank {self.plan.rank} finds fewer readable images than a batch of {self.plan.batch_size}"
                raise option_error("dataset.dataset_name", self.dataset.name, right)

    def _draws(self, position: int) -> Generator[tuple[torch.Tensor, Randomness], None, None]:
        """Positions (B,) and randomness of this rank's batches, endlessly, from a global position."""
        positions = self.plan.positions(position)
        if self.num_workers == 0:
            yield from map(self._draw, positions)
        else:
            yield from run_ahead(self._draw, positions, num_threads=self.num_workers, ahead=self.num_workers)

    def _draw(self, positions: list[int]) -> tuple[torch.Tensor, Randomness]:
        index = torch.tensor(positions, dtype=torch.int64)
        randomness = draw(self.seed, positions, self.sample_shape, posterior=self.posterior)
        return (index.pin_memory(), randomness.pin_memory()) if self.pin_memory else (index, randomness)

    def _with_position(self, batch: Batch, index: torch.Tensor) -> Batch:
        if self.flip:
            flips = uniform(self.seed, "flip", index.numpy()) < 0.5  # (B,)
            batch["sample"][flips] = batch["sample"][flips].flip(-1)
        return {**batch, "index": index}
