# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The training stream of a sequential source, through torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from torchditan.data_stream.datasets import Batch, SequentialDataset, check_item
from torchditan.data_stream.loader import Collate
from torchditan.data_stream.order import BatchPlan
from torchditan.data_stream.workers import init_worker, run_ahead, start_workers
from torchditan.errors import ConfigError, option_error
from torchditan.randomness import NOISE_TIMESTEP_DROPOUT, Kind, Randomness, draw, uniform


class _Pass(IterableDataset):
    """A source whose iterators remember their end.

    When a run resumes, torchdata also asks the workers that had ended before the others. A source whose state at its
    end is that of its start would begin again there.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.iterator: Any = None

    def __iter__(self) -> _PassIterator:
        self.iterator = iter(self.source)
        return _PassIterator(self.iterator)

    def state_dict(self) -> dict[str, Any]:
        """That of the source; empty if the source is its own iterator, whose state is loaded after `iter`."""
        return {} if self.iterator is self.source else self.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.source.load_state_dict(state)


class _PassIterator(Iterator[Any]):
    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.is_over = False

    def __next__(self) -> Any:
        if self.is_over:
            raise StopIteration
        try:
            return next(self.iterator)
        except StopIteration:
            self.is_over = True
            raise

    def state_dict(self) -> dict[str, Any]:
        has_state = hasattr(self.iterator, "state_dict")
        return {"is_over": self.is_over, "iterator": self.iterator.state_dict() if has_state else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_over = state["is_over"]
        if state["iterator"] is not None:
            self.iterator.load_state_dict(state["iterator"])


class _CheckingCollate:
    """`Collate`, which also checks the first item that a worker reads."""

    def __init__(self, collate: Collate, dataset: SequentialDataset) -> None:
        self.collate = collate
        self.dataset = dataset
        self.is_checked = False

    def __call__(self, items: list[dict[str, Any] | ConfigError]) -> Batch | ConfigError:
        if not self.is_checked and not isinstance(items[0], ConfigError):
            try:
                check_item(self.dataset, items[0], name=self.dataset.name)
            except ConfigError as error:
                return error
            self.is_checked = True
        return self.collate(items)


class SequentialStream:
    """This rank's micro-batches of a source that is read in its stored order, without shuffling.

    Every rank reads its own share of the source, so a checkpoint stores a state for each rank. A resume is exact with
    the same number of ranks and workers; other numbers are refused. Flips and random numbers are keyed to the
    position in the stream, as in `TrainingStream`. A worker does not know the positions of its samples.
    Threads therefore draw the noise, one per worker; without workers it is drawn together with its batch.
    """

    def __init__(
        self,
        dataset: SequentialDataset,
        *,
        plan: BatchPlan,
        seed: int,
        num_classes: int,
        horizontal_flip: bool | None,
        num_workers: int,
        pin_memory: bool,
        sample_shape: tuple[int, ...] | None = None,
        numbers: Mapping[str, Kind] = NOISE_TIMESTEP_DROPOUT,
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.seed = seed
        self.sample_shape = sample_shape or dataset.sample_shape
        self.numbers = numbers
        self.flip = dataset.horizontal_flip if horizontal_flip is None else horizontal_flip
        self.collate: Any = _CheckingCollate(Collate(labelled=num_classes > 0), dataset)
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self._loader: Any = None
        self._resume_from: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "world_size": self.plan.world_size,
            "num_workers": self.num_workers,
            "loader": self._loader.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; an empty one means that the checkpoint has none for this rank.

        Raises:
            ConfigError: the state is from another number of ranks or workers.
        """
        there = (state_dict["world_size"], state_dict["num_workers"]) if state_dict else None
        here = (self.plan.world_size, self.num_workers)
        if there != here:
            right = (
                f"the checkpoint is from {there} ranks and workers, this job has {here}; a streamed source "
                "only resumes with the same numbers"
            )
            raise option_error("dataset.streaming", True, right)
        self._resume_from = state_dict["loader"]

    def batches(self, position: int) -> Iterator[tuple[Batch, Randomness]]:
        """Micro-batches of this rank. `position` keys the random draws; the loader's state determines the samples."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        while True:
            source = self.dataset.iterate(rank=self.plan.rank, world_size=self.plan.world_size)
            self._loader = StatefulDataLoader(
                _Pass(source) if hasattr(source, "state_dict") else source,
                batch_size=self.plan.batch_size,
                collate_fn=self.collate,
                drop_last=True,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                worker_init_fn=init_worker,
            )
            is_empty = self._resume_from is None  # a state may be at the end of the source
            if self._resume_from is not None:
                self._loader.load_state_dict(self._resume_from)
                self._resume_from = None
            # Each epoch draws its noise in new threads, which start after the loader has forked its workers.
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
                right = f"rank {self.plan.rank} has fewer readable images than its batch size {self.plan.batch_size}"
                raise option_error("dataset.dataset_name", self.dataset.name, right)

    def _draws(self, position: int) -> Generator[tuple[torch.Tensor, Randomness], None, None]:
        """Positions (B,) and randomness of this rank's batches, from a global position without end."""
        positions = self.plan.positions(position)
        if self.num_workers == 0:
            yield from map(self._draw, positions)
        else:
            yield from run_ahead(self._draw, positions, num_threads=self.num_workers, ahead=self.num_workers)

    def _draw(self, positions: list[int]) -> tuple[torch.Tensor, Randomness]:
        index = torch.tensor(positions, dtype=torch.int64)
        randomness = draw(self.seed, positions, self.sample_shape, self.numbers)
        return (index.pin_memory(), randomness.pin_memory()) if self.pin_memory else (index, randomness)

    def _with_position(self, batch: Batch, index: torch.Tensor) -> Batch:
        if self.flip:
            flips = uniform(self.seed, "flip", index.numpy()) < 0.5  # (B,)
            batch["sample"][flips] = batch["sample"][flips].flip(-1)
        return {**batch, "index": index}
