# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Validation losses: the stored number, the bins of t, and a LoRA that they do not change.

tests/trainer/test_training.py has the same for pretraining, and on several ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchditan.config.loader import as_flags
from torchditan.config.options import Dataset, Diffusion, Model
from torchditan.data_stream.datasets import ImageDataset
from torchditan.data_stream.sample_space import SampleSpace
from torchditan.datasets import build_dataset
from torchditan.diffusion.objectives import Inputs, Objective, build_objective, uniform_objective
from torchditan.extras.published.resolutions import published_options
from torchditan.models import build_model_spec
from torchditan.randomness import Randomness, normal
from torchditan.run.reading import read_metrics
from torchditan.sampling.validation import BIN_KEYS, stratified_timesteps, validation_losses

if TYPE_CHECKING:
    from tests.conftest import RunScript

Batch = dict[str, torch.Tensor]
SHAPE = (1, 8, 8)


class PredictsT(nn.Module):
    """Every value of its prediction is t, so the loss at each t is known."""

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: Any) -> torch.Tensor:
        return t.view(-1, 1, 1, 1).expand_as(x_t)


@pytest.fixture(scope="module")
def dataset() -> ImageDataset:
    options = Dataset(dataset_name="dummy", image_size=[8, 8], num_classes=10)
    return build_dataset(options, split="validation", input_channels=1)


class Of(Objective):
    """An objective with this loss, at t = first + (1 - first) u."""

    def __init__(self, loss: Any, first: float = 0.0) -> None:
        self.of_samples = loss
        self.first = first

    def inputs(self, batch: Batch, randomness: Randomness) -> Inputs:
        return Inputs(batch["sample"], self.first + (1 - self.first) * randomness.timestep, {})

    def loss(self, model: nn.Module, batch: Batch, randomness: Randomness) -> torch.Tensor:
        return self.of_samples(model, batch, randomness)


def validate(
    dataset: ImageDataset, num_images: int, *, objective: Objective, uniform: Objective | None, batch_size: int = 6
) -> dict[str, float]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return validation_losses(
            PredictsT(),
            objective=objective,
            uniform=uniform,
            dataset=dataset,
            space=SampleSpace(dataset.sample_shape),
            num_images=num_images,
            batch_size=batch_size,
            corrupt_images="error",
            device=torch.device("cpu"),
        )
    finally:
        dist.destroy_process_group()


def first_values(model: nn.Module, batch: Batch, randomness: Randomness) -> torch.Tensor:
    """A loss of additions alone, which gives the same bits on every machine."""
    return batch["sample"].flatten(1)[:, 0] + randomness.noise.flatten(1)[:, 0] + randomness.timestep


def t_itself(model: nn.Module, batch: Batch, randomness: Randomness) -> torch.Tensor:
    """The model's t. The model is called at another t too, as in a consistency loss."""
    predicted = model(batch["sample"], randomness.timestep, batch["class_label"]).flatten(1)[:, 0]
    model(batch["sample"], t=1 - randomness.timestep, cond=None)
    return predicted


@pytest.mark.parametrize("has_bins", [False, True], ids=["alone", "with bins"])
@pytest.mark.parametrize(
    ("num_images", "batch_size", "stored"),
    [(20, 6, "0x1.fe66333333333p-8"), (5, 16, "0x1.e405fcccccccdp-2")],
)
def test_the_validation_loss_is_that_of_older_versions_to_the_bit(
    dataset: ImageDataset, num_images: int, batch_size: int, stored: str, has_bins: bool
) -> None:
    """The stored numbers are from commit 22afa3c, which had no bins."""
    uniform = Of(t_itself) if has_bins else None
    found = validate(dataset, num_images, batch_size=batch_size, objective=Of(first_values), uniform=uniform)
    assert found["validation_loss"].hex() == stored
    assert list(found) == ["validation_loss", *(BIN_KEYS if has_bins else ())]


@pytest.mark.parametrize("count", [8, 12, 21, 256])
def test_timesteps_are_stratified_over_the_bins_and_inside_each(count: int) -> None:
    timesteps = stratified_timesteps(count)
    places = (timesteps * 8).long()
    numbers = torch.bincount(places, minlength=8)
    assert numbers.sum() == count and numbers.max() - numbers.min() <= 1
    for i, number in enumerate(numbers.tolist()):
        inside = ((timesteps[places == i] * 8 - i) * number).sort().values
        assert inside.tolist() == pytest.approx([part + 0.5 for part in range(number)], abs=1e-4)
    assert timesteps.tolist() != sorted(timesteps.tolist()), "classes are often in order"
    assert torch.equal(timesteps, stratified_timesteps(count))


@pytest.mark.parametrize("num_images", [1, 3, 7, 8, 21, 64])
def test_a_bin_is_the_mean_over_its_part_of_t(dataset: ImageDataset, num_images: int) -> None:
    """Also with fewer images than bins, and in batches that are padded."""
    found = validate(dataset, num_images, objective=Of(t_itself), uniform=Of(t_itself))
    centers = {key: (i + 0.5) / 8 for i, key in enumerate(BIN_KEYS)}
    assert {key: found[key] for key in BIN_KEYS} == pytest.approx(centers)


def test_a_bin_that_the_objective_never_reaches_is_left_out(dataset: ImageDataset) -> None:
    late = Of(t_itself, first=0.5)
    assert list(validate(dataset, 16, objective=late, uniform=late)) == ["validation_loss", *BIN_KEYS[4:]]


@pytest.mark.parametrize("objective", ["flow_matching", "ddpm"])
def test_the_loss_in_the_bins_is_the_objectives_whatever_t_it_trains_on(objective: str, dataset: ImageDataset) -> None:
    spec = build_model_spec(Model(flavor="debugmodel", patch_size=2), sample_shape=SHAPE, num_classes=10)
    config = Diffusion(objective=objective, timestep_sampling="logit_normal", timestep_shift=3.0)
    built = build_objective(config, spec)
    found = validate(dataset, 640, objective=built, uniform=uniform_objective(config, spec))
    expected: list[list[float]] = [[] for _ in BIN_KEYS]
    for row, u in enumerate(stratified_timesteps(640).tolist()):
        x, noise = dataset[row * len(dataset) // 640]["sample"], normal(0, "validation", [row], SHAPE)[0]
        level = int(1000 * u) / 1000  # 0 is data
        t, output, target = (u, u, x - noise) if objective == "flow_matching" else (1 - level, level, noise)
        expected[min(int(8 * t), 7)].append((output - target).square().mean().item())
    means = {key: sum(losses) / len(losses) for key, losses in zip(BIN_KEYS, expected, strict=True)}
    assert {key: found[key] for key in BIN_KEYS} == pytest.approx(means, rel=1e-5)


def test_validation_leaves_no_trace_in_a_lora_and_resumes_to_the_bit(tmp_path: Path, run_script: RunScript) -> None:
    pytest.importorskip("diffusers")

    def train(name: str, *flags: str) -> tuple[list[dict[str, Any]], str]:
        options = {
            **published_options("flux/debugmodel", None),
            "dataset.dataset_name": "dummy",
            "dataset.num_workers": 0,
            "dataset.dummy_size": 8,
            "training.batch_size": 2,
            "training.mixed_precision_param": "float32",
            "optimizer.lr": 1e-2,
            "lora.rank": 2,
            "ema.enable": "false",
            "metrics.enable_sampling": "false",
            "metrics.log_freq": 1,
            "validation.num_images": 3,
            "training.steps": 3,
            "checkpoint.enable_checkpoint": "true",
            "checkpoint.interval": 2,
        }
        outcome = run_script("train.py", *as_flags(options), *flags, f"--metrics.experiment_name={name}")
        assert outcome.code == 0, outcome.err
        return read_metrics(tmp_path / "outputs" / name), outcome.out

    def only(records: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
        return [tuple(record.get(key) for key in keys) for record in records]

    curve, validated = ("loss", "grad_norm"), ("validation_loss", *BIN_KEYS)
    without, _ = train("without")
    whole, out = train("run", "--validation.freq=2")
    shutil.rmtree(tmp_path / "outputs/run/checkpoint/step-00000003")
    resumed, out_resumed = train("run", "--validation.freq=2")
    assert only(whole, *curve) == only(without, *curve)
    assert only(resumed, *curve, *validated) == only(whole, *curve, *validated)
    assert [record.keys() >= {*validated} for record in whole] == [False, True, True]
    before, last = only(whole[1:], *validated)
    assert all(loss != other for loss, other in zip(before, last, strict=True))
    summary = f"validation loss {last[0]:.4f}; by t, noise to data: {' '.join(f'{loss:.3f}' for loss in last[1:])}"
    assert summary in out.splitlines() and summary in out_resumed.splitlines()
    assert "resumed at step 2" in out_resumed
