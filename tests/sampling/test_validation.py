# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Validation losses: the stored number, and the bins of t. tests/trainer/test_training.py has those of runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchditan.config.options import Dataset, Diffusion, Model
from torchditan.data_stream.datasets import ImageDataset
from torchditan.data_stream.sample_space import SampleSpace
from torchditan.datasets import build_dataset
from torchditan.diffusion.objectives import Inputs, Objective, build_objective, uniform_objective
from torchditan.models import build_model_spec
from torchditan.randomness import Randomness, normal
from torchditan.sampling.validation import BIN_KEYS, stratified_timesteps, validation_losses

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
    dataset: ImageDataset, num_images: int, *, objective: Objective, uniform: Objective | None
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
            batch_size=6,
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


def test_the_validation_loss_keeps_its_bits_with_and_without_bins(dataset: ImageDataset) -> None:
    for uniform, keys in ((None, ()), (Of(t_itself), BIN_KEYS)):
        found = validate(dataset, 20, objective=Of(first_values), uniform=uniform)
        assert found["validation_loss"].hex() == "0x1.fe66333333333p-8"
        assert list(found) == ["validation_loss", *keys]


@pytest.mark.parametrize("count", [8, 21])
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


@pytest.mark.parametrize("num_images", [1, 7, 21])
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
