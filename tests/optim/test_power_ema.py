# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Power-function averages against numerical integration, and their reconstruction from snapshots."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

from torchditan.optim.power_ema import PowerEMA, decay_at, gamma_of_width, num_snapshots
from torchditan.weights.reconstructed_ema import combine

WIDTHS = (0.03, 0.06, 0.075, 0.12, 0.15)
"""Never stored in these tests."""


@pytest.mark.parametrize("width", [0.005, 0.03, 0.05, 0.1, 0.2, 0.25, 0.288])
def test_the_width_is_the_standard_deviation_of_the_profile(width: float) -> None:
    times = (numpy.arange(2_000_000) + 0.5) / 2_000_000
    profile = times ** gamma_of_width(width)
    profile /= profile.sum()
    mean = (profile * times).sum()
    assert numpy.sqrt((profile * (times - mean) ** 2).sum()) == pytest.approx(width, rel=1e-5)


def test_widths_of_the_paper_have_its_exponents() -> None:
    assert gamma_of_width(0.05) == pytest.approx(16.97, abs=0.005)
    assert gamma_of_width(0.1) == pytest.approx(6.94, abs=0.005)


def test_updates_weight_each_step_by_the_integral_of_the_profile_over_it() -> None:
    model, steps, gamma = nn.Linear(1, 1, bias=False).double(), 200, gamma_of_width(0.1)
    averages = PowerEMA(model, widths=[0.1])
    weights = torch.randn(steps, dtype=torch.float64)
    for step in range(1, steps + 1):
        with torch.no_grad():
            model.weight.fill_(weights[step - 1])
        averages.update(step)
    edges = (torch.arange(steps + 1, dtype=torch.float64) / steps) ** (gamma + 1)
    expected = (edges.diff() * weights).sum().item()  # the initial weight does not count
    assert averages.averages[0]["weight"].item() == pytest.approx(expected, rel=1e-12)
    assert decay_at(1, gamma) == 0


def test_coefficients_minimize_the_distance_of_the_profiles() -> None:
    """Against a least-squares fit of the profiles on a fine grid, with the constraint as a heavy row."""
    stored = [(step, width) for step in (25, 50, 75, 100) for width in (0.05, 0.1)]
    steps, widths = zip(*stored, strict=True)
    found = combine(steps, widths, step=100, width=0.075)
    times = (numpy.arange(400_000) + 0.5) / 400_000

    def profile(step: int, width: float) -> numpy.ndarray:
        time, gamma = step / 100, gamma_of_width(width)
        return numpy.where(times <= time, (gamma + 1) / time * (times / time) ** gamma, 0) / numpy.sqrt(len(times))

    matrix = numpy.stack([profile(*pair) for pair in stored], axis=1)
    wanted = profile(100, 0.075)
    heavy = numpy.full((1, len(stored)), 1e6)
    fit = numpy.linalg.lstsq(numpy.concatenate([matrix, heavy]), numpy.append(wanted, 1e6), rcond=None)[0]
    assert found.coefficients.numpy() == pytest.approx(fit, abs=2e-4)
    assert found.coefficients.sum().item() == pytest.approx(1, abs=1e-12)
    error = numpy.linalg.norm(matrix @ fit - wanted) / numpy.linalg.norm(wanted)
    assert found.error == pytest.approx(error, rel=1e-2)


def test_a_stored_average_is_its_own_reconstruction() -> None:
    found = combine([10, 10, 20, 20], [0.05, 0.1, 0.05, 0.1], step=20, width=0.1)
    assert found.coefficients.tolist() == pytest.approx([0, 0, 0, 1], abs=1e-12)
    assert found.error < 1e-6


@pytest.mark.parametrize(("steps", "interval"), [(100, 10), (600, 40), (2000, 50)])
def test_a_width_that_was_never_stored_is_rebuilt_within_a_thousandth(steps: int, interval: int) -> None:
    """On weights that move in one direction, slow down and fluctuate; the direct average is one of the same class."""
    torch.manual_seed(0)
    model = nn.Linear(20, 20, bias=False)
    stored, direct = PowerEMA(model, widths=[0.05, 0.1]), PowerEMA(model, widths=WIDTHS)
    start, direction = torch.randn(20, 20), torch.randn(20, 20)
    walk = torch.zeros(20, 20)
    snapshots: list[tuple[int, float, torch.Tensor]] = []
    for step in range(1, steps + 1):
        walk += 0.02 * torch.randn(20, 20)
        with torch.no_grad():
            model.weight.copy_(start + direction * (step / steps) ** 0.5 + walk)
        stored.update(step)
        direct.update(step)
        if step % interval == 0:
            for width, average in zip((0.05, 0.1), stored.averages, strict=True):
                snapshots.append((step, width, average["weight"].clone()))
    for width, average in zip(WIDTHS, direct.averages, strict=True):
        found = combine([item[0] for item in snapshots], [item[1] for item in snapshots], step=steps, width=width)
        rebuilt = sum(c * item[2].double() for c, item in zip(found.coefficients.tolist(), snapshots, strict=True))
        error = ((rebuilt - average["weight"]).norm() / average["weight"].norm()).item()
        print(f"{steps} steps, every {interval}, width {width}: profile {found.error:.1e}, weights {error:.1e}")
        assert error < 1e-3


def test_the_last_step_has_a_snapshot() -> None:
    assert [num_snapshots(steps, 10) for steps in (1, 9, 10, 11, 40)] == [1, 1, 1, 2, 4]
