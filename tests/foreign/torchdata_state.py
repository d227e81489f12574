# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The state-dict tests of torchdata's StatefulDataLoader on our streams (data_stream/).

    python tests/foreign/torchdata_state.py --source TORCHDATA_CHECKOUT

Notable:
- a dataset with indices becomes a `TrainingStream`, whose state is one position; an iterable one becomes a
  `SequentialStream`, which keeps the state of a loader of torchdata;
- our streams have no end, theirs have epochs. With indices, an epoch is the whole batches of the dataset; an iterable
  ends when our stream opens it again;
- their items are any objects, ours are tensors: an item travels as its pickled bytes.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import foreign_suite
import torch
from torch.utils.data import IterableDataset, default_collate

from torchditan.data_stream.datasets import ImageDataset, SequentialDataset
from torchditan.data_stream.loader import Collate, TrainingStream
from torchditan.data_stream.order import BatchPlan
from torchditan.data_stream.streamed import SequentialStream
from torchditan.data_stream.workers import end_loader_workers

NUM_BYTES = 512

FORMAT = "reads the inner format of their state, which we pass on as it is"
RANDOM = "samples drawn from a worker's generator; ours are functions of their index"
FIRST = "asks for the state of a source before its first batch; a run before its first step saves none"
EVERY = "each epoch of a streamed source opens it again, and its workers keep nothing"
SKIPPED = {
    "TestStatefulDataLoaderMap_*::test_random_state": RANDOM,
    "TestStatefulSampler_*": "a sampler of the user; the order of our streams is a function of the seed",
    "TestSnapshotZero_*::test_map": RANDOM,
    "TestSnapshotZero_*::test_map_iterrupted_shuffle": RANDOM,
    "TestSnapshotEnd_*::test_map": RANDOM,
    "TestSnapshotEnd_*::test_iterable": RANDOM,
    "TestSnapshotZero_*::test_iterable": FIRST,
    "TestStatefulDataLoaderIterable_*::test_random_state": FIRST,
    "TestStatefulDataLoaderIterable2_*::test_random_state": FIRST,
    "TestStatefulDataLoaderIterable2_*::test_no_mp": FIRST,
    "TestNumWorkersMismatch_*": "expects a refusal; the stream with indices continues with any number of workers",
    "TestConcurrentDataLoaders_*": "expects the stored order; ours is always shuffled",
    "TestInitialState_*::test_initial_state": FORMAT,
    "TestInitialState_*::test_load_*": RANDOM,
    "TestInitialState_*::test_init_error": "a function of the user that starts workers",
    "TestDynamicState*": FORMAT,
    "TestDatasetIteratorStateDuplication_*": FORMAT,
    "TestSingleIterCalled_*": FORMAT,
    "TestEndOfEpoch*": "the position after the last sample of an epoch is the first of the next one",
    "TestMultiEpochState_*::test_pw": EVERY,
    "TestOutOfOrder*": "batches out of order, which we do not have",
}


def encoded(item: Any) -> dict[str, Any]:
    data = pickle.dumps(item)
    return {"sample": torch.frombuffer(bytearray(data.ljust(NUM_BYTES, b"\0")), dtype=torch.uint8)}


def decoded(samples: torch.Tensor) -> list[Any]:
    return [pickle.loads(bytes(sample.tolist())) for sample in samples]


class EncodedCollate:
    """Our `Collate` for their items."""

    def __call__(self, items: list[Any]) -> Any:
        return Collate(labelled=False)([encoded(item) for item in items])


class Description:
    name = "foreign"
    sample_shape = (1,)
    class_names: tuple[str, ...] = ()
    horizontal_flip = False


class Indexed(Description, ImageDataset):  # type: ignore[misc]
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return encoded(self.dataset[index])


class EndOfSource(Exception):
    """Our stream opened the source a second time."""


class Iterable(Description, SequentialDataset):  # type: ignore[misc]
    def __init__(self, dataset: IterableDataset) -> None:
        self.dataset = dataset
        self.has_begun = False
        """Whether our stream took a batch. A resume at the very end takes none from the epoch before."""

    def iterate(self, *, rank: int, world_size: int) -> IterableDataset:
        if self.has_begun:
            raise EndOfSource
        return self.dataset


class OurLoader:
    """The interface of their loader. Its state is (position, state of the stream), empty before the first batch."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        **without: Any,  # order, persistence of workers and frequency of snapshots, which are not options of ours
    ) -> None:
        self.collate = collate_fn if batch_size is not None else lambda items: items[0]
        self.plan = BatchPlan(batch_size=batch_size or 1, global_batch_size=batch_size or 1)
        self.dataset = dataset
        self.num_workers = num_workers
        self.is_indexed = not isinstance(dataset, IterableDataset)
        self.position = 0
        self.state: dict[str, Any] = {}
        self.is_loaded = False
        self.stream: Any = None

    def open(self) -> Any:
        if self.is_indexed:
            return TrainingStream(
                Indexed(self.dataset),
                plan=self.plan,
                seed=0,
                num_classes=0,
                horizontal_flip=False,
                corrupt_images="error",
                num_workers=self.num_workers,
                pin_memory=False,
            )
        stream = SequentialStream(
            Iterable(self.dataset),
            plan=self.plan,
            seed=0,
            num_classes=0,
            horizontal_flip=False,
            num_workers=self.num_workers,
            pin_memory=False,
        )
        stream.collate = EncodedCollate()  # type: ignore[assignment]
        return stream

    def __len__(self) -> int:
        return len(self.dataset) // self.plan.batch_size

    def __iter__(self) -> Iterator[Any]:
        self.stream = self.open()
        if self.is_loaded and self.state:
            self.stream.load_state_dict(self.state["stream"])
        elif self.is_indexed:  # what is left of an epoch is not continued
            epoch = len(self) * self.plan.batch_size
            self.position = -(-self.position // epoch) * epoch
        self.state = self.state if self.is_loaded else {}
        self.is_loaded = False
        return self.epoch(self.stream)

    def epoch(self, stream: Any) -> Iterator[Any]:
        batches = stream.batches(self.position)
        while True:
            try:
                batch, randomness = next(batches)
            except EndOfSource:
                return
            if not self.is_indexed:
                stream.dataset.has_begun = True
            size = self.plan.batch_size
            assert batch["index"].tolist() == list(range(self.position, self.position + size))
            assert randomness.noise.shape == (size, 1)
            self.position += size
            self.state = {"position": self.position, "stream": stream.state_dict()}
            yield self.collate(decoded(batch["sample"]))
            if self.is_indexed and self.position % (len(self) * size) == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.is_loaded = state, True
        self.position = state.get("position", 0)


def replace(module: ModuleType) -> None:
    module.StatefulDataLoader = OurLoader  # type: ignore[attr-defined]


if __name__ == "__main__":
    tests = ["test/stateful_dataloader/test_state_dict.py"]
    code = foreign_suite.main(__doc__ or "", tests=tests, replace=replace, skipped=SKIPPED)
    end_loader_workers()
    sys.exit(code)
