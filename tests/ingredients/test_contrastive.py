# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Contrastive flow matching against the paper's formula, and a run with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import assert_refused
from tiny_runs import KEEP
from torch import nn

from torchditan.data_stream.order import BatchPlan
from torchditan.diffusion.flow_matching import FlowMatching, wide
from torchditan.diffusion.timesteps import Timesteps
from torchditan.ingredients.contrastive import Contrastive
from torchditan.models import ClassLabels, Unconditional
from torchditan.randomness import Randomness, draw
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript, Train

WEIGHT = 0.05
OPTION = "diffusion.ingredients"
SHAPE = (2, 4, 4)


class Answer(nn.Module):
    """Predicts a function of its inputs with one parameter per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7, -1.2]).view(2, 1, 1))

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.scale * torch.sin(x_t) + wide(t, x_t)


class XPrediction(FlowMatching):
    """As in docs/extending.md; near data the velocity of the target is not x - noise."""

    def target(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return x

    def velocity(self, prediction: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (prediction - x_t) / (1 - t).clamp(min=0.5)


def plain(kind: type[FlowMatching] = FlowMatching, **options: Any) -> FlowMatching:
    return kind(conditioning=Unconditional(), timesteps=Timesteps(kind="uniform"), label_dropout=0, **options)


def objective(kind: type[FlowMatching] = FlowMatching, **options: Any) -> Contrastive:
    return Contrastive(plain(kind, **options), weight=WEIGHT)


def samples(positions: list[int]) -> dict[str, torch.Tensor]:
    return {"sample": draw(1, positions, SHAPE).noise * 0.5 + 0.3}


def gradient(loss: torch.Tensor, model: Answer) -> torch.Tensor:
    return torch.autograd.grad(loss, model.scale)[0]


@pytest.mark.parametrize("kind", [FlowMatching, XPrediction])
def test_the_gradient_is_that_of_the_papers_loss_and_the_value_is_the_plain_loss(kind: type[FlowMatching]) -> None:
    positions, model = list(range(6, 14)), Answer()
    batch, randomness = samples(positions), draw(0, positions, SHAPE)
    losses = objective(kind).loss(model, batch, randomness)
    assert torch.equal(losses, plain(kind).loss(model, batch, randomness))

    expected = torch.zeros(())
    for i in range(len(positions)):
        negative = positions.index(positions[i] ^ 1)
        x, noise, t = batch["sample"][i], randomness.noise[i], randomness.timestep[i]
        x_t = t * x + (1 - t) * noise
        predicted = model.scale * torch.sin(x_t) + t
        velocity = x - noise
        if kind is XPrediction:
            predicted, velocity = ((value - x_t) / max(1 - t, 0.5) for value in (predicted, x))
        other = batch["sample"][negative] - randomness.noise[negative]
        expected = expected + ((predicted - velocity) ** 2).mean() - WEIGHT * ((predicted - other) ** 2).mean()
    torch.testing.assert_close(gradient(losses.sum(), model), gradient(expected, model))


def test_it_composes_with_x_prediction_and_min_snr() -> None:
    """The weight of min-SNR at t multiplies both terms of a sample."""
    positions, model = list(range(4)), Answer()
    batch, randomness = samples(positions), draw(0, positions, SHAPE)
    weighted = objective(prediction="x", min_snr_gamma=5.0)
    with_x = objective(prediction="x")
    factors = weighted.loss(model, batch, randomness) / with_x.loss(model, batch, randomness)
    expected = (factors.detach() * with_x.loss(model, batch, randomness)).sum()
    torch.testing.assert_close(
        gradient(weighted.loss(model, batch, randomness).sum(), model), gradient(expected, model)
    )
    without = weighted.base
    assert torch.equal(weighted.loss(model, batch, randomness), without.loss(model, batch, randomness))
    assert not torch.allclose(
        gradient(weighted.loss(model, batch, randomness).sum(), model),
        gradient(without.loss(model, batch, randomness).sum(), model),
    )


def test_the_gradient_does_not_depend_on_the_split_over_ranks_and_micro_batches() -> None:
    model = Answer()

    def total(batch_size: int, world_size: int) -> torch.Tensor:
        found = torch.zeros(())
        for rank in range(world_size):
            plan = BatchPlan(batch_size=batch_size, global_batch_size=16, rank=rank, world_size=world_size)
            positions = plan.positions(32)
            for _ in range(plan.num_micro_batches):
                here = next(positions)
                found = found + objective().loss(model, samples(here), draw(0, here, SHAPE)).sum()
        return gradient(found, model)

    for batch_size, world_size in ((2, 1), (4, 2), (2, 4), (8, 2)):
        torch.testing.assert_close(total(batch_size, world_size), total(16, 1))


def test_an_ideal_model_overshoots_by_the_stated_factor_for_every_label() -> None:
    """The velocity of the docstring of contrastive.py has no gradient, with and without the label."""

    class OfLabel(nn.Module):
        def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: dict[str, torch.Tensor]) -> torch.Tensor:
            return table[cond["class_label"]].view(-1, 1, 1, 1).expand_as(x_t)

    positions = list(range(8))
    labels = torch.tensor([0, 1, 1, 0, 0, 0, 1, 1])
    randomness = Randomness(draw(0, positions, SHAPE), label_dropout=torch.tensor([0.0, 1, 1, 1, 0, 1, 1, 1]))
    batch = {**samples(positions), "class_label": labels}
    velocity = (batch["sample"] - randomness.noise).mean((1, 2, 3))
    negative = velocity[torch.arange(8) ^ 1]
    seen = torch.where(randomness.label_dropout == 0, 2, labels)  # 2 is the null class
    ideal = [(velocity[seen == i].mean() - WEIGHT * negative[seen == i].mean()) / (1 - WEIGHT) for i in range(3)]
    table = torch.stack(ideal).requires_grad_()
    base = FlowMatching(conditioning=ClassLabels(2), timesteps=Timesteps(kind="uniform"), label_dropout=0.5)
    losses = Contrastive(base, WEIGHT).loss(OfLabel(), batch, randomness)
    assert torch.autograd.grad(losses.sum(), table)[0].abs().max() < 1e-5


def test_validation_needs_no_pairs() -> None:
    batch, randomness = samples([0, 1, 2]), draw(0, [0, 1, 2], SHAPE)
    with torch.no_grad():
        losses = objective().loss(Answer(), batch, randomness)
    assert torch.equal(losses, plain().loss(Answer(), batch, randomness).detach())


@pytest.mark.parametrize(
    ("flags", "about", "right"),
    [
        ([f"--{OPTION}=contrastive weight=1"], f'{OPTION} = "contrastive weight=1"', "below 1"),
        ([f"--{OPTION}=contrastive weight=-0.05"], f'{OPTION} = "contrastive weight=-0.05"', "0 or more"),
        ([f"--{OPTION}=contrastive gap=1"], f'{OPTION} = "contrastive gap=1"', "weight"),
        ([f"--{OPTION}=contrastive 0.05"], f'{OPTION} = "contrastive 0.05"', "key=value"),
        (["--diffusion.ingredients=contrast"], 'diffusion.ingredients = ["contrast"]', "contrastive"),
        (["--diffusion.ingredients=contrastive", "--diffusion.objective=ddpm"], "diffusion.ingredients", "ddpm"),
        (
            ["--diffusion.ingredients=contrastive", "--training.batch_size=5"],
            "training.batch_size = 5",
            "multiple of 2",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(
    flags: list[str], about: str, right: str, run_script: RunScript
) -> None:
    outcome = run_script("train.py", "--model.flavor=debugmodel", *flags)
    assert outcome.code == 2
    assert_refused(outcome.err.splitlines()[-1], about, [right])


def curve(run: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(run)]


def test_a_run_resumes_to_the_bit_on_another_curve_than_that_of_flow_matching(tmp_path: Path, train: Train) -> None:
    flags = ["--diffusion.ingredients=contrastive weight=0.2", *KEEP, "--checkpoint.interval=3"]
    train("plain")
    train("whole", *flags)
    train("parts", *flags, "--training.steps=4")
    shutil.rmtree(tmp_path / "parts/checkpoint/step-00000004")
    assert "resumed at step 3" in train("parts", *flags).out
    plain, whole, parts = (curve(tmp_path / name) for name in ("plain", "whole", "parts"))
    assert parts == whole
    assert whole[0][0] == plain[0][0], "the loss of the first step is that of flow matching"
    assert whole[0][1] != plain[0][1] and whole[-1][0] != plain[-1][0]
