# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Distances against closed forms, definitions and torch-fidelity; merging over ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from references import run_reference
from torch import Tensor

from torchditan.extras.evaluation.distances import (
    FeatureStatistics,
    Gaussian,
    frechet_distance,
    gaussian_of,
    inception_score,
    kernel_distance,
    polynomial_mmd,
)


def random_features(count: int, dimensions: int = 16, *, seed: int = 0) -> Tensor:
    """(count, dimensions) float32 with correlations, far from zero, as pooled ReLU features are."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dimensions, dimensions, generator=torch.Generator().manual_seed(99))
    values = torch.randn(count, dimensions, generator=generator)
    return (values @ mixing + seed * 0.1).abs() + 5


# Statistics


def test_statistics_are_those_of_numpy() -> None:
    features = random_features(500)
    statistics = FeatureStatistics(16)
    for batch in features.split(7):
        statistics.update(batch)
    gaussian = statistics.gaussian()
    assert statistics.count == 500
    np.testing.assert_allclose(gaussian.mean, features.double().mean(0), rtol=1e-13)
    np.testing.assert_allclose(gaussian.covariance, np.cov(features.double().numpy(), rowvar=False), rtol=1e-11)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_merging_over_ranks_equals_one_pass(world_size: int) -> None:
    features = random_features(301)
    whole = gaussian_of(features)
    merged = FeatureStatistics(16)
    for rank in range(world_size):
        statistics = FeatureStatistics(16)
        for batch in features[rank::world_size].split(10):
            statistics.update(batch)
        merged.merge(statistics)
    merged.merge(FeatureStatistics(16))  # a rank without images
    gaussian = merged.gaussian()
    assert merged.count == 301
    torch.testing.assert_close(gaussian.mean, whole.mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(gaussian.covariance, whole.covariance, rtol=1e-12, atol=1e-14)


def test_features_far_from_zero_lose_no_digits() -> None:
    """Sums of squares would lose all of them: (1e8)^2 has no room for 1 in float64."""
    offset = 1e8
    features = random_features(200).double()
    statistics = FeatureStatistics(16)
    for batch in (features + offset).split(13):
        statistics.update(batch)
    torch.testing.assert_close(statistics.gaussian().covariance, gaussian_of(features).covariance, rtol=1e-6, atol=1e-6)


# Fréchet distance


def test_gaussians_with_one_eigenbasis_have_their_closed_form() -> None:
    """Commuting covariances: |m1 - m2|^2 + sum (s1 - s2)^2 over the standard deviations."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64)).Q
    first, second = torch.rand(2, 40, dtype=torch.float64) * 3
    means = torch.randn(2, 40, dtype=torch.float64)
    gaussians = [
        Gaussian(mean, basis @ torch.diag(scale**2) @ basis.T)
        for mean, scale in zip(means, (first, second), strict=True)
    ]
    expected = (means[0] - means[1]).square().sum() + (first - second).square().sum()
    assert frechet_distance(*gaussians) == pytest.approx(expected.item(), abs=1e-6)


def test_two_dimensions_have_their_closed_form() -> None:
    """Any 2 x 2 covariances: tr sqrt(C1 C2) = sqrt(tr(C1 C2) + 2 sqrt(det(C1 C2)))."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        roots = torch.randn(2, 2, 2, dtype=torch.float64, generator=generator)
        first, second = roots[0] @ roots[0].T, roots[1] @ roots[1].T
        mean = torch.randn(2, dtype=torch.float64, generator=generator)
        product = first @ second
        trace = (product.trace() + 2 * product.det().sqrt()).sqrt()
        expected = mean.square().sum() + first.trace() + second.trace() - 2 * trace
        found = frechet_distance(Gaussian(mean, first), Gaussian(torch.zeros_like(mean), second))
        assert found == pytest.approx(expected.item(), abs=1e-6)


def test_singular_covariances_have_their_distance_too() -> None:
    """Rank 3 of 10: of a Gaussian to itself 0, and in an orthogonal subspace the sum of traces."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64)).Q
    scales = torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64)
    first, second = ((basis[:, part] * scales) @ (basis[:, part] * scales).T for part in (slice(0, 3), slice(5, 8)))
    zero = torch.zeros(10, dtype=torch.float64)
    assert frechet_distance(Gaussian(zero, first), Gaussian(zero, first)) == pytest.approx(0, abs=1e-6)
    expected = 2 * first.trace().item()
    assert frechet_distance(Gaussian(zero, first), Gaussian(zero, second)) == pytest.approx(expected, abs=1e-6)


# Inception Score


def test_the_inception_score_is_its_definition_in_splits() -> None:
    logits = torch.randn(230, 12, generator=torch.Generator().manual_seed(0)) * 2
    p = logits.double().softmax(1).numpy()
    expected = [
        np.exp((part * (np.log(part) - np.log(part.mean(0)))).sum(1).mean()) for part in np.split(p, [100, 200])
    ]
    assert inception_score(logits, images_per_split=100) == pytest.approx(np.mean(expected), rel=1e-12)


def test_extremes_of_the_inception_score_are_right() -> None:
    """Sure and evenly spread predictions score the number of classes, equal ones 1."""
    assert inception_score(torch.eye(10).repeat(3, 1) * 1000, images_per_split=20) == pytest.approx(10)
    assert inception_score(torch.zeros(5, 10)) == pytest.approx(1)


# Kernel distance


def test_the_kernel_distance_is_unbiased() -> None:
    """Over every possible draw of 3 and 2 images, its mean is the distance of the two populations."""
    torch.manual_seed(0)
    first, second = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64) + 0.5

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T / 3 + 1) ** 3

    population = kernel(first, first).mean() + kernel(second, second).mean() - 2 * kernel(first, second).mean()
    draws = [
        polynomial_mmd(first[list(rows)], second[list(columns)])
        for rows in itertools.product(range(4), repeat=3)
        for columns in itertools.product(range(3), repeat=2)
    ]
    assert np.mean(draws) == pytest.approx(population.item(), abs=1e-12)


def test_float32_products_cost_no_accuracy() -> None:
    """Float64 sums of float32 products: far below the 1e-5 that KID is quoted to."""
    first, second = (random_features(1000, 512, seed=seed) / 20 for seed in (0, 1))
    exact = polynomial_mmd(first.double(), second.double())
    assert polynomial_mmd(first, second) == pytest.approx(exact, abs=1e-6)


def test_a_set_smaller_than_a_subset_is_compared_as_a_whole() -> None:
    few, many = random_features(50), random_features(300, seed=1)
    whole = polynomial_mmd(few, many)
    assert kernel_distance(few, many, subset_size=300) == pytest.approx(whole, rel=1e-5)
    assert kernel_distance(few, many, subset_size=100, num_subsets=1000) == pytest.approx(whole, rel=0.2)


# References

TORCH_FIDELITY = """
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric

first, second, logits = given
statistics = [fid_features_to_statistics(features.double()) for features in (first, second)]
kid = kid_features_to_metric(first, second, kid_subsets=20, kid_subset_size=400, verbose=False)
result = {
    "fid": fid_statistics_to_metric(*statistics, False)["frechet_inception_distance"],
    "kid": kid["kernel_inception_distance_mean"],
    "is": isc_features_to_metric(logits, splits=1, shuffle=False)["inception_score_mean"],
}
"""


def three_sets() -> list[Tensor]:
    return [random_features(600, seed=0), random_features(500, seed=3), random_features(600, seed=5)]


@pytest.mark.slow
def test_the_same_features_give_the_figures_of_torch_fidelity(tmp_path: Path) -> None:
    first, second, logits = three_sets()
    expected = run_reference("torch_fidelity", TORCH_FIDELITY, three_sets(), folder=tmp_path)
    assert frechet_distance(gaussian_of(first), gaussian_of(second)) == pytest.approx(expected["fid"], rel=1e-8)
    assert inception_score(logits) == pytest.approx(expected["is"], rel=1e-8)
    ours = kernel_distance(first, second, num_subsets=20, subset_size=400)
    assert ours == pytest.approx(expected["kid"], rel=1e-4)
