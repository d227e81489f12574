# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Precision, recall, density, coverage and the copy check against their definitions, written with loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchditan.extras.evaluation import neighbours
from torchditan.extras.evaluation.neighbours import (
    compare_with_halves,
    nearest_distances,
    share_closer,
    share_very_close,
    squared_radii,
)


def clouds(*counts: int, dimensions: int = 8, seed: int = 0) -> list[Tensor]:
    """Overlapping Gaussian clouds, far from zero."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, dimensions, generator=generator) + 10 + 0.6 * i for i, n in enumerate(counts)]


def distance(x: Tensor, y: Tensor) -> float:
    return (x.double() - y.double()).norm().item()


def radius(features: Tensor, i: int, k: int) -> float:
    """Distance to the k-th nearest other image."""
    return sorted(distance(features[i], features[j]) for j in range(len(features)) if j != i)[k - 1]


def by_definition(generated: Tensor, real: Tensor) -> tuple[float, float, float, float]:
    """Kynkäänniemi et al. 2019, eq. 1 and 2, with k = 3; Naeem et al. 2020, eq. 5 and 7, with k = 5."""
    real_3 = [radius(real, i, 3) for i in range(len(real))]
    real_5 = [radius(real, i, 5) for i in range(len(real))]
    generated_3 = [radius(generated, j, 3) for j in range(len(generated))]
    between = [[distance(x, y) for y in generated] for x in real]
    rows, columns = range(len(real)), range(len(generated))
    precision = sum(any(between[i][j] <= real_3[i] for i in rows) for j in columns) / len(generated)
    recall = sum(any(between[i][j] <= generated_3[j] for j in columns) for i in rows) / len(real)
    density = sum(between[i][j] <= real_5[i] for i in rows for j in columns) / (5 * len(generated))
    coverage = sum(min(between[i]) <= real_5[i] for i in rows) / len(real)
    return precision, recall, density, coverage


@pytest.mark.parametrize("block", [16, 1024])
def test_the_four_figures_are_their_definitions(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block, and in blocks that end in the middle of both sets."""
    monkeypatch.setattr(neighbours, "BLOCK", block)
    generated, real = clouds(45, 59)
    found, _ = compare_with_halves(generated, real)
    assert found == pytest.approx(by_definition(generated, real), abs=1e-12)
    assert all(0.1 < value < 1 for value in found), "the clouds must overlap in part"


def test_copies_have_radius_zero_and_are_inside() -> None:
    """Six copies of one image: their fifth neighbour is at distance 0, and a generated copy counts as realistic."""
    (other,) = clouds(20)
    real = torch.cat([other, torch.full((6, 8), 3.0)])
    radii = squared_radii(real, [5], centre=real.mean(0))
    torch.testing.assert_close(radii[-6:], torch.zeros(6, 1), atol=1e-4, rtol=0)
    assert compare_with_halves(real, real)[0][:2] == (1.0, 1.0)


def test_noise_far_away_has_precision_zero_and_one_mode_has_no_recall() -> None:
    (real,) = clouds(60)
    assert compare_with_halves(real + 100, real)[0] == (0, 0, 0, 0)
    mode = real[:1] + 0.01 * torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    found, _ = compare_with_halves(mode, real)
    assert found.precision == 1
    assert found.recall < 0.1
    assert found.coverage < 0.3


def test_an_offset_far_from_zero_changes_nothing() -> None:
    """|x|^2 + |y|^2 - 2 xy cancels: without centring, distances of 1 between features of 1000 are lost in float32."""
    generated, real = clouds(45, 59)
    found, _ = compare_with_halves(generated + 1000, real + 1000)
    assert found == pytest.approx(compare_with_halves(generated, real)[0], abs=0.05)


def test_nearest_distances_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "BLOCK", 16)
    features, references = clouds(37, 53)
    features[5] = references[50]
    found, indices = nearest_distances(features, references)
    everything = torch.cdist(features.double(), references.double())
    assert indices.tolist() == everything.argmin(1).tolist()
    torch.testing.assert_close(found, everything.amin(1), rtol=1e-12, atol=1e-12)
    assert found[5] == 0
    assert indices[5] == 50


def test_the_shares_tell_copies_from_new_images() -> None:
    """New images of the same distribution are as near as held-out ones; copies with a little noise are nearer."""
    generator = torch.Generator().manual_seed(0)
    training, held_out, new = (torch.randn(400, 8, generator=generator) for _ in range(3))
    of_held_out, _ = nearest_distances(held_out, training)
    honest, _ = nearest_distances(new, training)
    assert share_closer(honest, of_held_out) == pytest.approx(0.5, abs=0.06)
    assert share_very_close(honest, of_held_out) < 0.04
    copies = training[:100] + 0.01 * torch.randn(100, 8, generator=generator)
    copied, nearest = nearest_distances(torch.cat([copies, new[:100]]), training)
    assert share_closer(copied, of_held_out) == pytest.approx(0.75, abs=0.06)
    assert share_very_close(copied, of_held_out) == pytest.approx(0.5, abs=0.02)
    assert nearest[:100].tolist() == list(range(100))
    assert copied.median() < honest.median()


def test_ties_count_one_half() -> None:
    """Distances 0, 1, 1 against 1, 2: nearer in 2 + 1 + 1 pairs of 6, tied in 2."""
    found = share_closer(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 2.0]))
    assert found == pytest.approx((4 + 2 / 2) / 6)
