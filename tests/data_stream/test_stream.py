# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The training stream is a function of (seed, position) for any ranks, workers and batch splits."""

from __future__ import annotations

import itertools
import json
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from torchditan.data_stream.datasets import Batch, CorruptImageError, ImageDataset
from torchditan.data_stream.loader import TrainingStream
from torchditan.data_stream.order import BatchPlan, OrderedDataset
from torchditan.data_stream.streamed import SequentialStream
from torchditan.data_stream.workers import end_loader_workers
from torchditan.errors import ConfigError
from torchditan.randomness import draw


class Numbers(ImageDataset):
    """Sample i is filled with i; `broken` ones cannot be read."""

    name = "numbers"
    sample_shape = (1, 2, 2)
    class_names: ClassVar[list[str]] = ["even", "odd"]
    horizontal_flip = True

    def __init__(self, length: int = 10, *, broken: tuple[int, ...] = (), label: int | None = None) -> None:
        self.length = length
        self.broken = broken
        self.label = label

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise CorruptImageError(f"images/{index}.png cannot be read")
        sample = torch.tensor([[[index, index + 0.25], [index, index + 0.25]]])
        return {"sample": sample, "class_label": index % 2 if self.label is None else self.label}


def read(
    num_batches: int, *, plan: BatchPlan, dataset: Numbers | None = None, start: int = 0, **options: Any
) -> list[Batch]:
    settings: dict[str, Any] = {
        "seed": 0,
        "num_classes": 2,
        "horizontal_flip": None,
        "corrupt_images": "error",
        "num_workers": 0,
        "pin_memory": False,
    }
    stream = TrainingStream(dataset or Numbers(), plan=plan, **{**settings, **options})
    pairs = itertools.islice(stream.batches(start), num_batches)
    return [{**batch, "noise": randomness.noise} for batch, randomness in pairs]


def by_position(batches: list[Batch]) -> dict[int, dict[str, torch.Tensor]]:
    return {
        int(index): {key: batch[key][row] for key in batch if key != "skipped"}
        for batch in batches
        for row, index in enumerate(batch["index"])
    }


def assert_same(left: dict[int, dict[str, torch.Tensor]], right: dict[int, dict[str, torch.Tensor]]) -> None:
    assert left.keys() == right.keys()
    for position in left:
        for key in left[position]:
            assert torch.equal(left[position][key], right[position][key]), (position, key)


def test_an_epoch_shows_every_sample_once_and_the_next_in_another_order() -> None:
    stream = OrderedDataset(Numbers(), seed=0, num_classes=2, horizontal_flip=False, corrupt_images="error")
    epochs = stream.locate(np.arange(30)).reshape(3, 10).tolist()
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [int(stream.locate(np.array([position]))[0]) for position in range(30)] == stream.locate(
        np.arange(30)
    ).tolist()


@pytest.mark.parametrize(("world_size", "batch_size", "num_workers"), [(1, 6, 2), (4, 3, 0), (3, 2, 0)])
def test_any_split_over_ranks_and_workers_reads_the_same_samples_from_any_position(
    world_size: int, batch_size: int, num_workers: int
) -> None:
    whole = by_position(read(2, plan=BatchPlan(batch_size=12, global_batch_size=12)))
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for rank in range(world_size):
        plan = BatchPlan(batch_size=batch_size, global_batch_size=12, rank=rank, world_size=world_size)
        mine = by_position(read(2 * plan.num_micro_batches, plan=plan, num_workers=num_workers))
        assert not parts.keys() & mine.keys()
        parts.update(mine)
        tail = by_position(read(plan.num_micro_batches, plan=plan, start=12))
        assert_same({position: whole[position] for position in tail}, tail)
    assert_same(whole, parts)


def test_flips_mirror_about_half_and_the_same_ones_every_time() -> None:
    plan = BatchPlan(batch_size=100, global_batch_size=100)
    samples = read(2, plan=plan)[1]["sample"]
    flipped = samples[:, 0, 0, 0] > samples[:, 0, 0, 1]
    assert 30 < flipped.sum() < 70
    assert torch.equal(samples, read(2, plan=plan)[1]["sample"])
    unflipped = read(2, plan=plan, horizontal_flip=False)[1]["sample"]
    assert (unflipped[:, 0, 0, 0] < unflipped[:, 0, 0, 1]).all()


class NumbersInBatches(Numbers):
    """The same samples, read a batch at a time."""

    def read_batch(self, indices: np.ndarray, flips: np.ndarray) -> Batch:
        items = [self[index] for index in indices]
        samples = [item["sample"].flip(-1) if flip else item["sample"] for item, flip in zip(items, flips, strict=True)]
        labels = torch.tensor([item["class_label"] for item in items])
        return {"sample": torch.stack(samples), "class_label": labels}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_reads_in_batches_gives_the_same_stream(num_workers: int) -> None:
    plan = BatchPlan(batch_size=4, global_batch_size=4)
    one_by_one = by_position(read(6, plan=plan))
    in_batches = by_position(read(6, plan=plan, dataset=NumbersInBatches(), num_workers=num_workers))
    assert_same(one_by_one, in_batches)
    (bare,) = read(1, plan=plan, dataset=NumbersInBatches(), num_workers=num_workers, num_classes=0)
    assert "class_label" not in bare


def test_a_mistake_while_reading_a_batch_stops_the_run_in_its_own_words() -> None:
    class Damaged(NumbersInBatches):
        def read_batch(self, indices: np.ndarray, flips: np.ndarray) -> Batch:
            raise ConfigError("shard-00003.safetensors is cut short")

    with pytest.raises(ConfigError) as caught:
        read(1, plan=BatchPlan(batch_size=4, global_batch_size=4), dataset=Damaged(), num_workers=1)
    assert str(caught.value) == "shard-00003.safetensors is cut short"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_corrupt_image_stops_the_run_by_name(num_workers: int) -> None:
    plan = BatchPlan(batch_size=10, global_batch_size=10)
    with pytest.raises(CorruptImageError) as caught:
        read(1, plan=plan, dataset=Numbers(broken=(4,)), num_workers=num_workers)
    assert str(caught.value) == "images/4.png cannot be read"


def test_a_corrupt_image_is_replaced_by_the_next_and_counted_where_the_config_says_so() -> None:
    plan = BatchPlan(batch_size=10, global_batch_size=10)
    (batch,) = read(1, plan=plan, dataset=Numbers(broken=(4, 5)), corrupt_images="skip", horizontal_flip=False)
    shown = sorted(batch["sample"][:, 0, 0, 0].tolist())
    assert shown == [0, 1, 2, 3, 6, 6, 6, 7, 8, 9]
    assert batch["skipped"] == {index: f"images/{index}.png cannot be read" for index in (4, 5)}


def test_what_a_stream_refuses() -> None:
    plan = BatchPlan(batch_size=4, global_batch_size=4)
    with pytest.raises(ConfigError, match="has no readable image"):
        read(1, plan=plan, dataset=Numbers(2, broken=(0, 1)), corrupt_images="skip")
    with pytest.raises(ConfigError, match="has no readable image"):  # of its shape
        read(7, plan=plan, dataset=Shapes(broken=(3,)), corrupt_images="skip")
    with pytest.raises(ConfigError, match=r"num_classes = 2: image \d .*numbers .*label 7; .*0 to 1"):
        read(1, plan=plan, dataset=Numbers(label=7))
    with pytest.raises(ConfigError, match=r"dataset.aspect_buckets = true: images .*several sizes .*encoded"):
        read(1, plan=plan, dataset=Shapes(), sample_shape=(4, 1, 1))


class Shapes(Numbers):
    """Sample i is filled with i and has the i-th of these widths; beside it stand tokens of its text, and the text."""

    horizontal_flip = False

    def __init__(self, widths: tuple[int, ...] = (2, 4, 2, 6, 4, 2, 2), *, broken: tuple[int, ...] = ()) -> None:
        super().__init__(len(widths), broken=broken)
        self.widths = np.array(widths)

    def groups(self) -> list[np.ndarray]:
        return [np.flatnonzero(self.widths == width) for width in np.unique(self.widths)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        sample = torch.full((1, 2, int(self.widths[index])), float(index))
        return {**item, "sample": sample, "text": torch.full((3,), index), "caption": "a dog"}


def grouped(dataset: Any, *, global_batch_size: int = 4, seed: int = 0) -> OrderedDataset:
    settings: dict[str, Any] = {"num_classes": 2, "horizontal_flip": False, "corrupt_images": "error"}
    return OrderedDataset(dataset, seed=seed, global_batch_size=global_batch_size, **settings)


WIDTHS = (2,) * 30 + (4,) * 15 + (6,) * 9 + (8,) * 4 + (10,) * 2


@pytest.mark.parametrize("global_batch_size", [1, 3, 16])
@pytest.mark.parametrize("widths", [WIDTHS, (2, 4, 2, 6, 4, 2, 2)])
def test_epochs_show_every_sample_once_but_for_less_than_a_batch_of_each_shape(
    widths: tuple[int, ...], global_batch_size: int
) -> None:
    dataset = Shapes(widths)
    stream, num_epochs = grouped(dataset, global_batch_size=global_batch_size), 40
    sizes = [len(group) for group in dataset.groups()]
    seen, step = np.zeros(len(widths), dtype=int), 0
    for epoch in range(1, num_epochs + 1):
        end = sum(epoch * size // global_batch_size for size in sizes)
        indices = stream.locate(np.arange(step * global_batch_size, end * global_batch_size))
        of_one_step = dataset.widths[indices].reshape(-1, global_batch_size)
        assert (of_one_step == of_one_step[:, :1]).all()
        seen += np.bincount(indices, minlength=len(widths))
        step = end
        assert seen.max() <= epoch
        for group in dataset.groups():
            assert epoch * len(group) - seen[group].sum() == epoch * len(group) % global_batch_size
            assert seen[group].max() - seen[group].min() <= 1


def test_shapes_are_mixed_within_an_epoch_and_epochs_differ() -> None:
    dataset = Shapes((2,) * 24 + (4,) * 24)
    orders = dataset.widths[grouped(dataset).locate(np.arange(0, 4 * 36, 4))].reshape(3, 12).tolist()
    assert all(sorted(order) == [2] * 6 + [4] * 6 for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert all(sum(a != b for a, b in itertools.pairwise(order)) > 2 for order in orders)


def test_far_positions_are_found_at_once() -> None:
    stream, far = grouped(Shapes(WIDTHS)), range(4 * 10**12, 4 * 10**12 + 8)
    assert stream.locate(np.array(far)).tolist() == [int(stream.locate(np.array([position]))[0]) for position in far]


def test_the_order_of_epochs_never_changes() -> None:
    stream = grouped(Shapes(), seed=5)
    assert stream.locate(np.arange(40)).tolist() == [
        *(6, 0, 2, 5, 4, 1, 4, 1, 2, 6, 0, 5, 0, 6, 2, 5, 2, 5, 6, 0),
        *(1, 4, 4, 1, 3, 3, 3, 3, 2, 5, 0, 6, 4, 1, 1, 4, 6, 2, 5, 0),
    ]
    assert stream.locate(np.arange(4000, 4008)).tolist() == [2, 6, 5, 0, 2, 5, 6, 0]


def test_one_shape_alone_keeps_the_order_of_a_plain_dataset() -> None:
    one_shape, plain = grouped(Shapes((2,) * 10)), grouped(Numbers(10))
    assert one_shape.locate(np.arange(50)).tolist() == plain.locate(np.arange(50)).tolist()


@pytest.mark.parametrize(("world_size", "num_workers"), [(4, 0), (2, 1)])
def test_shapes_come_in_the_same_order_on_any_number_of_ranks_and_workers(world_size: int, num_workers: int) -> None:
    whole = by_position(read(14, plan=BatchPlan(batch_size=4, global_batch_size=4), dataset=Shapes()))
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for rank in range(world_size):
        plan = BatchPlan(batch_size=1, global_batch_size=4, rank=rank, world_size=world_size)
        batches = read(14 * plan.num_micro_batches, plan=plan, dataset=Shapes(), num_workers=num_workers)
        parts.update(by_position(batches))
    assert_same(whole, parts)
    tail = by_position(read(4, plan=BatchPlan(batch_size=4, global_batch_size=4), dataset=Shapes(), start=40))
    assert_same({position: whole[position] for position in tail}, tail)


def test_noise_has_the_shape_of_its_batch_and_every_tensor_of_a_sample_is_stacked() -> None:
    plan = BatchPlan(batch_size=4, global_batch_size=4)
    batches = read(7, plan=plan, dataset=Shapes())
    assert {batch["sample"].shape[3] for batch in batches} == {2, 4, 6}
    for batch in batches:
        assert batch["noise"].shape == batch["sample"].shape
        assert batch["text"].tolist() == [[index] * 3 for index in batch["sample"][:, 0, 0, 0].tolist()]
        assert "caption" not in batch


def test_a_corrupt_image_is_replaced_by_one_of_its_shape() -> None:
    plan = BatchPlan(batch_size=4, global_batch_size=4)
    batches = read(7, plan=plan, dataset=Shapes(broken=(0, 4)), corrupt_images="skip")
    shown = torch.cat([batch["sample"][:, 0, 0, 0] for batch in batches]).tolist()
    assert {index: shown.count(index) for index in set(shown)} == {1: 8, 2: 8, 3: 4, 5: 4, 6: 4}


def test_what_takes_the_place_of_a_corrupt_image_keeps_its_own_caption() -> None:
    class Varied(Shapes):
        def vary(self, item: dict[str, Any], index: int, *, seed: int, position: int) -> dict[str, Any]:
            return {**item, "text": torch.tensor([index, seed, position])}

    plan = BatchPlan(batch_size=4, global_batch_size=4)
    for batch in read(7, plan=plan, dataset=Varied(broken=(0, 4)), corrupt_images="skip", seed=3):
        texts = torch.stack([batch["sample"][:, 0, 0, 0].long(), torch.full((4,), 3), batch["index"]], dim=1)
        assert torch.equal(batch["text"], texts)


class InOrder(torch.utils.data.IterableDataset):
    """A source that can only be read in order, with a state."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.done = 0

    def __iter__(self) -> Any:
        while self.done < len(self.numbers):
            self.done += 1
            yield Numbers(100)[self.numbers[self.done - 1]]
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class OfWorker(InOrder):
    """Worker 0 has 4 samples, worker 1 has 12."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        self.numbers = range(4) if worker.id == 0 else range(4, 16)
        return super().__iter__()


class OwnIterator(InOrder):
    """Each iteration begins at the start; a state is loaded into the running one."""

    is_running = False

    def __iter__(self) -> Any:
        self.done, self.is_running = 0, True
        return self

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert self.is_running
        super().load_state_dict(state)

    def __next__(self) -> Any:
        if self.done == len(self.numbers):
            raise StopIteration
        self.done += 1
        return Numbers(100)[self.numbers[self.done - 1]]


class Damaged(InOrder):
    """Amid the second batch of four, an error."""

    def __iter__(self) -> Any:
        for item in super().__iter__():
            yield CorruptImageError("row 5 cannot be read") if self.done >= 6 else item


class Streamed(Numbers):
    def __init__(self, source: Any = InOrder, numbers: range = range(16)) -> None:
        super().__init__()
        self.source, self.numbers = source, numbers

    def iterate(self, *, rank: int, world_size: int) -> InOrder:
        found: InOrder = self.source(self.numbers[rank::world_size])
        return found


def streamed(
    source: Any = InOrder,
    numbers: range = range(16),
    *,
    world_size: int = 1,
    num_workers: int = 0,
    is_checked: bool = True,
) -> SequentialStream:
    pytest.importorskip("torchdata")
    stream = SequentialStream(
        Streamed(source, numbers),  # type: ignore[arg-type]
        plan=BatchPlan(batch_size=4, global_batch_size=4 * world_size, world_size=world_size),
        seed=0,
        num_classes=2,
        horizontal_flip=None,
        num_workers=num_workers,
        pin_memory=False,
    )
    stream.collate.is_checked = is_checked  # these samples are numbers above 1
    return stream


@pytest.mark.parametrize("source", [InOrder, OwnIterator])
def test_a_streamed_source_resumes_where_it_was_and_its_state_is_json(source: type[InOrder]) -> None:
    stream = streamed(source)
    batches = stream.batches(0)
    whole = [batch for batch, _ in itertools.islice(batches, 2)]
    state = json.loads(json.dumps(stream.state_dict()))
    whole += [batch for batch, _ in itertools.islice(batches, 4)]  # past the end of the source

    resumed = streamed(source)
    resumed.load_state_dict(state)
    tail = [batch for batch, _ in itertools.islice(resumed.batches(8), 4)]
    assert_same(by_position(whole[2:]), by_position(tail))
    assert [int(batch["index"][0]) for batch in tail] == [8, 12, 16, 20]


def test_a_streamed_source_resumes_from_its_very_end() -> None:
    stream = streamed()
    batches = stream.batches(0)
    whole = [batch for batch, _ in itertools.islice(batches, 4)]  # all 16 samples
    resumed = streamed()
    resumed.load_state_dict(stream.state_dict())
    ((again, _),) = itertools.islice(resumed.batches(16), 1)
    assert again["index"].tolist() == [16, 17, 18, 19]
    assert sorted(again["class_label"].tolist()) == sorted(whole[0]["class_label"].tolist())


def test_a_streamed_source_resumes_after_one_of_its_workers_has_ended() -> None:
    stream = streamed(OfWorker, num_workers=2)
    batches = stream.batches(0)
    for _ in range(3):
        next(batches)
    resumed = streamed(OfWorker, num_workers=2)
    resumed.load_state_dict(stream.state_dict())
    tail = resumed.batches(12)
    for _ in range(5):  # past the end of the source
        assert_same(by_position([next(batches)[0]]), by_position([next(tail)[0]]))


def test_a_streamed_source_with_workers_resumes_with_the_noise_of_its_positions() -> None:
    stream = streamed(num_workers=2)
    batches = stream.batches(0)
    whole = [{**batch, "noise": randomness.noise} for batch, randomness in itertools.islice(batches, 1)]
    state = stream.state_dict()  # noise of later batches is drawn, none of their samples is taken
    whole += [{**batch, "noise": randomness.noise} for batch, randomness in itertools.islice(batches, 5)]
    for batch in whole:
        assert torch.equal(batch["noise"], draw(0, batch["index"].tolist(), (1, 2, 2)).noise)
    resumed = streamed(num_workers=2)
    resumed.load_state_dict(state)
    tail = [{**batch, "noise": noise.noise} for batch, noise in itertools.islice(resumed.batches(4), 5)]
    assert_same(by_position(whole[1:]), by_position(tail))


def test_a_streamed_source_refuses_another_number_of_ranks() -> None:
    stream = streamed()
    next(stream.batches(0))
    with pytest.raises(ConfigError, match="streamed source only resumes with the same numbers"):
        streamed(world_size=2).load_state_dict(stream.state_dict())
    with pytest.raises(ConfigError, match="the checkpoint is from None ranks and workers"):
        streamed().load_state_dict({})  # of a rank for which the checkpoint has no file


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_corrupt_image_in_a_streamed_source_stops_the_run_wherever_it_stands(num_workers: int) -> None:
    with pytest.raises(CorruptImageError, match="row 5"):
        list(itertools.islice(streamed(Damaged, range(8), num_workers=num_workers).batches(0), 4))
    end_loader_workers()


def test_the_first_item_and_the_first_batch_of_a_streamed_source_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"first item .* from 9 to 9\.25"):  # pixels above 1
        next(streamed(numbers=range(9, -1, -1), is_checked=False).batches(0))
    next(streamed(is_checked=False).batches(0))
    with pytest.raises(ConfigError, match=r"fewer readable images .*batch .*4"):
        next(streamed(numbers=range(2)).batches(0))
