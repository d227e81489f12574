# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Samples of an evaluation: their classes, their bytes on any number of ranks, and drawing that was interrupted.

As a script it draws on ranks of torchrun.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from refusals import refused
from torch import Tensor, nn

from torchditan.config import options
from torchditan.distributed.parallelize import parallelize
from torchditan.extras.evaluation.class_balance import order_of_classes
from torchditan.extras.evaluation.metric import Pictures
from torchditan.extras.evaluation.sample_parts import SampleParts, draw_pictures
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.models import build_model_spec
from torchditan.sampling.drawing import Drawing, SampleRows
from torchditan.supervision.exit_status import verdict_of

if TYPE_CHECKING:
    from tests.conftest import RunDistributed

CPU = torch.device("cpu")
NUM_CLASSES = 3
BATCH_SIZE = 4


def of_classes(num_samples: int, class_balance: Any = "data", *, num_classes: int = NUM_CLASSES) -> Drawing:
    rows = SampleRows.of_classes(range(max(1, num_classes)), class_names=["a", "b", "c"][:num_classes])
    order = order_of_classes(
        num_samples, num_classes=num_classes, class_balance=class_balance, class_counts=[5, 3, 1], seed=5
    )
    return Drawing(rows, order, options.Sampling(num_steps=2), seed=5, model="a run", step=7, weights="ema")


DRAWING = of_classes(10)


def trained_model() -> TrainedModel:
    """A model with random weights, none of them zero, so that every sample depends on its class."""
    spec = build_model_spec(
        options.Model(flavor="debugmodel", patch_size=4), sample_shape=(1, 8, 8), num_classes=NUM_CLASSES
    )
    model = spec.build()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return TrainedModel(
        config=options.Config(sampling=options.Sampling(num_steps=2)),
        spec=spec,
        model=model.requires_grad_(False),
        sample_shape=spec.sample_shape,
        num_classes=NUM_CLASSES,
        step=7,
        weights="ema",
        device=CPU,
    )


class Stopped(nn.Module):
    """A model that counts its calls, and stops in one of them."""

    def __init__(self, model: nn.Module, *, at: int | None = None, stop: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.model, self.at, self.stop, self.calls = model, at, stop, 0

    def forward(self, *inputs: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            assert self.stop is not None
            self.stop()
        return self.model(*inputs)


def draw(
    trained: TrainedModel,
    parts: SampleParts | None = None,
    *,
    drawing: Drawing = DRAWING,
    batch_size: int = BATCH_SIZE,
    model: nn.Module | None = None,
) -> Iterator[Pictures]:
    return draw_pictures(
        trained.sampler,
        model or trained.model,
        drawing,
        batch_size=batch_size,
        to_pixels=trained.to_pixels,
        parts=parts,
    )


def parts_in(folder: Path, drawing: Drawing = DRAWING) -> SampleParts:
    return SampleParts(folder / "parts" / drawing.digest()[:12], len(drawing))


def in_order(batches: Sequence[Pictures], drawing: Drawing = DRAWING) -> Tensor:
    """The images of all samples, after a check that each came once, with its label."""
    numbers = torch.cat([pictures.numbers for pictures in batches])
    assert sorted(numbers.tolist()) == list(range(len(drawing)))
    for pictures in batches:
        assert pictures.source == "generated"
        assert pictures.images.dtype == torch.uint8
        if drawing.labels is None:
            assert pictures.labels is None
        else:
            assert pictures.labels is not None
            assert torch.equal(pictures.labels, drawing.labels[pictures.numbers])
    return torch.cat([pictures.images for pictures in batches])[numbers.argsort()]


@pytest.fixture(scope="module")
def trained() -> TrainedModel:
    return trained_model()


@pytest.fixture(scope="module")
def images(trained: TrainedModel) -> Tensor:
    """All samples, drawn without interruption."""
    return in_order(list(draw(trained)))


def counts(labels: Tensor) -> list[int]:
    return labels.bincount(minlength=4).tolist()


def of_4_classes(num_samples: int, class_balance: Any, seed: int = 0) -> Tensor:
    counts = [10, 5, 0, 1]
    return order_of_classes(num_samples, num_classes=4, class_balance=class_balance, class_counts=counts, seed=seed)


def test_each_class_has_its_share_by_largest_remainder_and_the_seed_chooses_the_rest() -> None:
    assert counts(of_4_classes(16, "data")) == [10, 5, 0, 1]
    assert counts(of_4_classes(25, "data")) == [16, 8, 0, 1]  # shares 15.625, 7.8125, 0, 1.5625
    assert counts(of_4_classes(24, "balanced")) == [6, 6, 6, 6]
    assert {counts(of_4_classes(25, "balanced", seed)).index(7) for seed in range(20)} == {0, 1, 2, 3}
    for balance in ("data", "balanced", "random"):
        assert torch.equal(of_4_classes(50, balance), of_4_classes(50, balance))
        assert not torch.equal(of_4_classes(50, balance), of_4_classes(50, balance, seed=1))
    order = order_of_classes(10, num_classes=4, class_balance="data", class_counts=[3, 2], seed=0)
    assert counts(order) == [6, 4, 0, 0], "the last classes may have no image"


@pytest.mark.parametrize("balance", ["data", "balanced", "random"])
def test_consecutive_samples_have_random_classes(balance: Any) -> None:
    """As in ADM's evaluator, whose Inception Score would be higher if each split had the same class counts."""
    order = order_of_classes(20_000, num_classes=50, class_balance=balance, class_counts=[1] * 50, seed=2)
    per_split = torch.stack([split.bincount(minlength=50) for split in order.split(1000)]).double()
    assert per_split.mean() == 20
    assert 0.85 < per_split.var() / (1000 * 0.02 * 0.98) < 1.15, "the variance of multinomial counts"


def test_random_classes_are_uniform_and_do_not_depend_on_the_number_of_samples() -> None:
    labels = of_4_classes(4000, "random")
    assert all(900 < count < 1100 for count in counts(labels))
    assert torch.equal(labels[:1000], of_4_classes(1000, "random"))


def test_noise_is_that_of_the_number_within_the_class() -> None:
    labels = DRAWING.order.tolist()
    expected = [label * 2**32 + labels[:place].count(label) for place, label in enumerate(labels)]
    assert DRAWING.noise_numbers == expected
    assert DRAWING.labels is not None and torch.equal(DRAWING.labels, DRAWING.order)
    without = of_classes(3, num_classes=0)
    assert without.labels is None and without.noise_numbers == [0, 1, 2]


def test_unknown_numbers_of_images_name_the_option() -> None:
    with refused('--class_balance = "data"', "balanced", "random"):
        order_of_classes(9, num_classes=3, class_balance="data", class_counts=None, seed=0)


def test_samples_are_those_of_generate_to_the_byte_in_equal_batches(trained: TrainedModel) -> None:
    rows = trained.rows()
    (pictures,) = draw_pictures(
        trained.sampler,
        trained.model,
        trained.drawing(rows, rows.each(2), seed=5),
        batch_size=6,
        to_pixels=trained.to_pixels,
        rounding="down",
    )
    generated = trained.generate_rows(rows, samples_per_row=2, seed=5, batch_size=6).flatten(0, 1)
    expected = ((generated + 1) * 127.5).clamp(0, 255).to(torch.uint8)  # ADM's image_sample.py
    assert torch.equal(pictures.images, expected)


def interrupted(trained: TrainedModel, parts: SampleParts, error: BaseException, *, at: int = 3) -> None:
    """Draw until the model raises an error; each batch takes two model steps."""

    def stop() -> None:
        raise error

    with pytest.raises(type(error)):
        list(draw(trained, parts, model=Stopped(trained.model, at=at, stop=stop)))


def part_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_an_interrupted_drawing_continues(
    error: BaseException, trained: TrainedModel, images: Tensor, tmp_path: Path
) -> None:
    parts = parts_in(tmp_path)
    interrupted(trained, parts, error, at=5)
    assert verdict_of(error).exit_code == (75 if isinstance(error, KeyboardInterrupt) else 3)
    assert part_names(parts.folder) == ["00000000-00000003.npz", "00000004-00000007.npz"]
    half_written = parts.folder / ".00000008-00000009.npz.host-1.partial"  # of a process that was killed
    half_written.write_bytes(b"half")
    model = Stopped(trained.model)
    assert torch.equal(in_order(list(draw(trained, parts, model=model))), images)
    assert model.calls == 2 and not half_written.exists()  # one batch
    model = Stopped(trained.model)
    assert torch.equal(in_order(list(draw(trained, parts, model=model))), images)
    assert model.calls == 0


def test_another_batch_size_continues_with_the_missing_samples(
    trained: TrainedModel, images: Tensor, tmp_path: Path
) -> None:
    parts = parts_in(tmp_path)
    interrupted(trained, parts, MemoryError(), at=5)
    parts._path(range(4)).unlink()
    batches = list(draw(trained, parts, batch_size=6))
    assert [pictures.numbers.tolist() for pictures in batches] == [[4, 5, 6, 7], [0, 1, 2, 3], [8, 9]]
    found = in_order(batches).int()
    assert torch.equal(found[4:8], images[4:8].int())
    assert (found - images.int()).abs().max() <= 1
    parts._path(range(8, 10)).unlink()
    assert len(list(draw(trained, parts, batch_size=3))) == 4  # two parts, sample 8 and sample 9
    names = ["00000000-00000003.npz", "00000004-00000007.npz", "00000008-00000008.npz", "00000009-00000009.npz"]
    assert part_names(parts.folder) == names

    parts.write_npz(tmp_path / "samples.npz")
    with np.load(tmp_path / "samples.npz") as arrays:
        assert arrays.files == ["arr_0"]
        assert np.array_equal(arrays["arr_0"], found.byte().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy())


def test_finished_samples_are_removed_and_nothing_else(tmp_path: Path) -> None:
    first, second = (parts_in(tmp_path, replace(DRAWING, seed=seed)) for seed in (1, 2))
    for parts in (first, second):
        parts.open()
        parts.write(range(2), torch.ones(2, 1, 2, 2, dtype=torch.uint8))
        (parts.folder / ".00000002-00000003.npz.host-1.partial").write_bytes(b"half")
    mine = ["00000000-00000001.npz.bak", "notes.txt", ".notes.txt.partial"]
    for name in mine:
        (second.folder / name).write_text("mine")
    first.remove()
    assert not first.folder.exists()
    assert second.open() == [range(2)], "samples of another seed are kept"
    second.remove()
    assert part_names(second.folder) == sorted(mine)
    for name in mine:
        (second.folder / name).unlink()
    (tmp_path / "card.json").write_text("{}")
    second.remove()
    second.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["card.json"]


def test_a_full_disk_is_one_line_and_keeps_finished_parts(
    trained: TrainedModel, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_in(tmp_path)
    batches = draw(trained, parts)
    next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_is_full)
        with refused(
            f"{parts.folder}/00000004-00000007.npz cannot be written: No space left on device", "free", "kept"
        ):
            next(batches)
    assert part_names(parts.folder) == ["00000000-00000003.npz"]
    assert torch.equal(in_order(list(draw(trained, parts))), images)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_is_full)
        with refused(f"{tmp_path}/samples.npz cannot be written: No space left on device"):
            parts.write_npz(tmp_path / "samples.npz")


def disk_is_full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_samples_of_other_evaluations_never_mix(trained: TrainedModel, tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    interrupted(trained, parts, MemoryError())
    assert parts_in(tmp_path).open() == [range(4)]
    heun = replace(DRAWING.sampling, sampler="heun")
    different = [replace(DRAWING, **change) for change in ({"step": 8}, {"seed": 6}, {"model": 1}, {"sampling": heun})]
    different += [of_classes(3, "balanced"), of_classes(10, "random"), of_classes(10, num_classes=0)]
    prompts = SampleRows(["a", "b"], [0, 1], prompts=["a", "b"])
    different += [replace(DRAWING, rows=prompts, order=prompts.in_turn(10))]
    different += [replace(different[-1], rows=replace(prompts, prompts=["a", "c"]))]
    assert len({one.digest() for one in different} | {DRAWING.digest(), DRAWING.digest("down")}) == 11
    assert all(parts_in(tmp_path, one).open() == [] for one in different)
    grid = replace(DRAWING, sampling=replace(DRAWING.sampling, images_per_class=3))
    assert grid.digest() == DRAWING.digest(), "options that choose rows"


def test_ranks_draw_the_bytes_of_one_process(
    trained: TrainedModel, images: Tensor, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    """10 samples in batches of 4: on 2 and 4 ranks, whole models and one sharded by FSDP, and parts of 4 ranks on 2."""
    result = run_distributed(["tests/extras/evaluation/test_drawn_samples.py", tmp_path], 4)
    assert result.returncode == 0, result.stderr
    for case, num_ranks in {"4": 4, "2": 2, "2_fsdp": 2, "2_continues": 2, "2_reads": 2}.items():
        results = [torch.load(tmp_path / f"{case}_{rank}.pt") for rank in range(num_ranks)]
        batches = [Pictures(**pictures) for result in results for pictures in result["pictures"]]
        assert torch.equal(in_order(batches), images), case
        calls = [result["calls"] for result in results]
        expected = {"4": 2, "2": 4, "2_fsdp": 4, "2_continues": 2, "2_reads": 0}[case]
        assert calls == [expected] * num_ranks, case
    grids = [torch.load(tmp_path / f"grid_{rank}.pt") for rank in range(2)]
    assert torch.equal(grids[0], grids[1]) and torch.equal(grids[0], draw_grid(trained))
    refusals = [(tmp_path / f"refused_{rank}.txt").read_text() for rank in range(2)]
    assert refusals[0] == refusals[1]
    assert "cannot be written" in refusals[0]


def draw_grid(trained: TrainedModel) -> Tensor:
    """12 samples in 3 rows, (3, 4, 1, 8, 8)."""
    return trained.generate_rows(trained.rows(), samples_per_row=4, seed=5, batch_size=BATCH_SIZE)


def draw_on_this_rank(folder: Path, case: str, trained: TrainedModel, parts: SampleParts | None) -> None:
    model = Stopped(trained.model)
    pictures = [vars(pictures) for pictures in draw(trained, parts, model=model)]
    torch.save({"pictures": pictures, "calls": model.calls}, folder / f"{case}_{dist.get_rank()}.pt")


def draw_on_ranks(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    parts = parts_in(folder)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store_4"), 4), rank=rank, world_size=4)
    draw_on_this_rank(folder, "4", trained_model(), parts)
    dist.destroy_process_group()
    if rank >= 2:
        return
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store_2"), 2), rank=rank, world_size=2)
    draw_on_this_rank(folder, "2", trained_model(), None)
    sharded = trained_model()
    mesh = dist.init_device_mesh("cpu", (2,))
    parallelize(sharded.model, blocks=sharded.spec.blocks(sharded.model), mesh=mesh, param_dtype=torch.float32)
    draw_on_this_rank(folder, "2_fsdp", sharded, None)
    torch.save(draw_grid(sharded), folder / f"grid_{rank}.pt")
    draw_on_this_rank(folder, "2_reads", sharded, parts)
    dist.barrier()  # the other rank may still read
    if rank == 0:
        parts._path(range(8, 10)).unlink()
        parts._path(range(4, 8)).unlink()
    dist.barrier()
    draw_on_this_rank(folder, "2_continues", sharded, parts)
    (folder / "a file").touch()
    try:
        parts_in(folder / "a file").open()
    except ValueError as error:
        (folder / f"refused_{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def test_samples_that_are_not_finite_are_black_and_counted(capfd: pytest.CaptureFixture[str]) -> None:
    class Diverged(nn.Module):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return torch.where(torch.arange(len(x)).view(-1, 1, 1, 1) == 1, torch.nan, x)

    batches = list(draw(trained_model(), model=Diverged()))
    (line,) = capfd.readouterr().err.splitlines()
    num_bad = len(batches)  # the second sample of each batch
    assert line.startswith(f"warning: {num_bad} samples") and "not finite" in line
    assert all(pictures.images[1].max() == 0 for pictures in batches)
    assert all(pictures.images[0].max() > 0 for pictures in batches)


if __name__ == "__main__":
    draw_on_ranks(Path(sys.argv[1]))
