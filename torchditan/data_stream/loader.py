# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Sample -> batch: this rank's micro-batches with their noise and timesteps.

Notable:
- a loader worker also draws the random numbers of its samples (see randomness.py);
- threads copy latents from memory-mapped shards; worker processes decode images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader, Dataset

from torchditan.data_stream.datasets import Batch, BatchedDataset, ImageDataset, images_of
from torchditan.data_stream.order import BatchPlan, OrderedDataset
from torchditan.data_stream.workers import init_worker, run_ahead, start_workers
from torchditan.errors import ConfigError, option_error
from torchditan.models.frozen import LookUp
from torchditan.randomness import NOISE_TIMESTEP_DROPOUT, Kind, Randomness, draw

PREFETCH = 4
"""Batches that each worker prepares ahead."""
_NUMBERS = ("index", "class_label")


@dataclass(frozen=True)
class Collate:
    """Samples -> batch, in the worker. An error among the samples is returned as a value.

    All tensors of a sample are stacked (`sample`, and embeddings of its text). `skipped` has the unreadable images that
    others replace: index -> name and reason. Other values are dropped.
    """

    labelled: bool

    def __call__(self, items: list[dict[str, Any] | ConfigError] | Batch | ConfigError) -> Batch | ConfigError:
        if isinstance(items, ConfigError):
            return items
        if isinstance(items, dict):
            return {**items, "skipped": {}}  # type: ignore[dict-item]
        for item in items:
            if isinstance(item, ConfigError):
                return item
        samples = cast(list[dict[str, Any]], items)
        tensors = [key for key, value in samples[0].items() if isinstance(value, torch.Tensor) and key not in _NUMBERS]
        batch: dict[str, Any] = {key: torch.stack([item[key] for item in samples]) for key in tensors}
        for key in _NUMBERS if self.labelled else _NUMBERS[:1]:
            batch[key] = torch.tensor([item.get(key, 0) for item in samples], dtype=torch.int64)  # (B,)
        batch["skipped"] = {number: named for item in samples for number, named in item.get("skipped", {}).items()}
        return batch


@dataclass(frozen=True)
class CollateAndDraw:
    """Samples -> (batch, randomness), in the worker."""

    seed: int
    sample_shape: tuple[int, ...] | None
    """(C, H, W) of the model's input; of latents, if the device encodes pixels. None: the batch's shape."""
    numbers: Mapping[str, Kind]
    collate: Collate
    targets: Mapping[str, LookUp]
    """Name in the batch -> what reads it for samples, from a cache."""

    def __call__(
        self, items: list[dict[str, Any] | ConfigError] | Batch | ConfigError
    ) -> tuple[Batch, Randomness] | ConfigError:
        batch = self.collate(items)
        if isinstance(batch, ConfigError):
            return batch
        try:
            if self.targets:
                images = images_of(batch)
                batch |= {name: look_up(images) for name, look_up in self.targets.items()}
        except ConfigError as error:
            return error
        shape = self.sample_shape or batch["sample"].shape[1:]
        return batch, draw(self.seed, batch["index"].tolist(), shape, self.numbers)


class TrainingStream:
    """This rank's micro-batches from a given position, without end."""

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
        pin_memory: bool,
        sample_shape: tuple[int, ...] | None = None,
        numbers: Mapping[str, Kind] = NOISE_TIMESTEP_DROPOUT,
        targets: Mapping[str, LookUp] = MappingProxyType({}),
    ) -> None:
        flip = dataset.horizontal_flip if horizontal_flip is None else horizontal_flip
        self.plan = plan
        self.stream = OrderedDataset(
            dataset,
            seed=seed,
            num_classes=num_classes,
            horizontal_flip=flip,
            corrupt_images=corrupt_images,
            global_batch_size=plan.global_batch_size,
        )
        noise_shape: tuple[int, ...] | None = sample_shape or dataset.sample_shape
        if self.stream.groups is not None:
            if noise_shape != dataset.sample_shape:
                right = "images of several sizes cannot be encoded at each step; encode them in advance"
                raise option_error("dataset.aspect_buckets", True, right)
            noise_shape = None
        self.loader_options: dict[str, Any] = {
            "collate_fn": CollateAndDraw(seed, noise_shape, numbers, Collate(labelled=num_classes > 0), dict(targets)),
            "num_workers": num_workers,
            "prefetch_factor": PREFETCH if num_workers else None,
            "pin_memory": pin_memory,
        }

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position of the run determines the stream."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict

    def batches(self, position: int) -> Iterator[tuple[Batch, Randomness]]:
        """Micro-batches of this rank, from a global position of the stream."""
        positions = self.plan.positions(position)
        for item in self._read_in_threads(positions) if self.uses_threads else self._read_in_processes(positions):
            if isinstance(item, ConfigError):
                raise item
            yield item

    @property
    def uses_threads(self) -> bool:
        """Whether threads can do the work. Copying rows and drawing noise release Python's global interpreter lock,
        and threads avoid a copy of each batch between processes."""
        return isinstance(self.stream.dataset, BatchedDataset) and self.loader_options["num_workers"] > 0

    def _read_in_processes(self, positions: Iterator[list[int]]) -> Iterator[tuple[Batch, Randomness] | ConfigError]:
        sampler = cast(Iterable[list[int]], positions)
        stream = cast(Dataset, self.stream)
        loader = DataLoader(stream, batch_sampler=sampler, worker_init_fn=init_worker, **self.loader_options)
        yield from start_workers(loader)

    def _read_in_threads(self, positions: Iterator[list[int]]) -> Iterator[tuple[Batch, Randomness] | ConfigError]:
        options = self.loader_options
        ahead = options["num_workers"] * PREFETCH
        return run_ahead(self._load, positions, num_threads=options["num_workers"], ahead=ahead)

    def _load(self, positions: list[int]) -> tuple[Batch, Randomness] | ConfigError:
        item = self.loader_options["collate_fn"](self.stream.__getitems__(positions))
        if isinstance(item, ConfigError) or not self.loader_options["pin_memory"]:
            return item
        batch, randomness = item
        pinned = {name: tensor if name == "skipped" else tensor.pin_memory() for name, tensor in batch.items()}
        return pinned, randomness.pin_memory()
