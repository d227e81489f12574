# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Distances between two sets of features: Fréchet, kernel (KID), and the Inception Score of one set of logits.

Notable:
- statistics are float64, updated batch by batch, and merged over ranks: the result of one pass over all images;
- the Fréchet distance takes eigenvalues of a symmetric matrix, not a matrix square root of an asymmetric one;
- covariances divide by N - 1, as those of ADM's evaluator and torch-fidelity do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchditan.errors import ConfigError

ROWS_AT_A_TIME = 4096
"""Rows converted to float64 together: 64 MiB of 2,048 features."""
IMAGES_PER_SPLIT = 5000
"""Of the Inception Score, as in ADM's evaluator."""


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of features."""

    mean: Tensor
    """(D,) float64."""
    covariance: Tensor
    """(D, D) float64."""

    def to(self, device: torch.device | str) -> Gaussian:
        return Gaussian(self.mean.to(device), self.covariance.to(device))


class FeatureStatistics:
    """Count, mean and scatter matrix of features, in float64 (Chan, Golub & LeVeque 1979, for batches).

    Sums are centred on the running mean, so features far from zero lose no digits.
    """

    def __init__(self, num_features: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.mean = torch.zeros(num_features, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)
        """Sum over images of (x - mean) (x - mean)^T."""

    def update(self, features: Tensor) -> None:
        """Add a batch (B, D) of any float dtype."""
        for rows in features.split(ROWS_AT_A_TIME):
            batch = rows.to(self.mean)
            mean = batch.mean(0)
            self._move_mean(mean, len(batch))
            centred = batch - mean
            self.scatter.addmm_(centred.T, centred)

    def merge(self, other: FeatureStatistics) -> None:
        """Add what another process has seen."""
        if other.count:
            self._move_mean(other.mean.to(self.mean), other.count)
            self.scatter += other.scatter.to(self.scatter)

    def _move_mean(self, mean: Tensor, count: int) -> None:
        """Join `count` images around `mean`; their own scatter is added by the caller."""
        difference = mean - self.mean
        total = self.count + count
        self.scatter.addr_(difference, difference, alpha=self.count * count / total)
        self.mean += difference * (count / total)
        self.count = total

    def gaussian(self) -> Gaussian:
        return Gaussian(self.mean.clone(), self.scatter / (self.count - 1))


def statistics_of(features: Tensor) -> FeatureStatistics:
    """Statistics of features (N, D), N at least 1."""
    statistics = FeatureStatistics(features.shape[1], features.device)
    statistics.update(features)
    return statistics


def gaussian_of(features: Tensor) -> Gaussian:
    """Mean and covariance of features (N, D)."""
    return statistics_of(features).gaussian()


def require_full_rank(count: int, num_features: int, *, name: str) -> None:
    """Refuse a covariance of N images and D >= N features: its Fréchet distance depends on N most of all."""
    if count <= num_features:
        raise ConfigError(
            f"{name}: {count} are too few for a Fréchet distance: a covariance of {num_features} features needs "
            f"at least {num_features + 1}"
        )


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Squared Fréchet distance of two Gaussians (Dowson & Landau 1982; FID of Heusel et al. 2017, eq. 6).

    |m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2)). With C1 = A A^T, the eigenvalues of C1 C2 are those of the
    symmetric matrix A^T C2 A, so the last trace is the sum of their square roots.
    """
    factor = _factor(first.covariance)
    product = factor.T @ second.covariance.to(factor) @ factor
    eigenvalues = torch.linalg.eigvalsh((product + product.T) / 2).clamp_min(0)  # below 0 by rounding only
    difference = first.mean - second.mean.to(first.mean)
    traces = first.covariance.trace() + second.covariance.trace().to(factor)
    return (difference @ difference + traces - 2 * eigenvalues.sqrt().sum()).item()


def _factor(covariance: Tensor) -> Tensor:
    """A with A A^T = covariance: Cholesky, or by eigenvectors where the covariance is singular."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed:
        return factor
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
    return eigenvectors * eigenvalues.clamp_min(0).sqrt()


def inception_score(logits: Tensor, *, images_per_split: int = IMAGES_PER_SPLIT) -> float:
    """Mean of exp(E KL(p(y|x) || p(y))) over splits of consecutive images (Salimans et al. 2016).

    A last split with fewer images counts like the others, as in ADM's evaluator.

    Args:
        logits: (N, classes), without bias.
    """
    marginals, entropies = [], []
    for split in logits.split(images_per_split):
        log_p = split.double().log_softmax(1)
        p = log_p.exp()
        # A cumulative sum adds in order, the same on any number of threads.
        marginals.append(p.cumsum(0)[-1] / len(split))
        entropies.append((p * log_p).sum(1).cumsum(0)[-1] / len(split))
    marginal = torch.stack(marginals)  # (splits, classes)
    return (torch.stack(entropies) - torch.xlogy(marginal, marginal).sum(1)).exp().mean().item()


def kernel_distance(
    features: Tensor, references: Tensor, *, num_subsets: int = 100, subset_size: int = 1000, seed: int = 2020
) -> float:
    """KID (Binkowski et al. 2018): the mean unbiased MMD^2 of random subsets, as torch-fidelity draws them.

    Each subset has all images of a set that is not larger than a subset. The estimate remains unbiased, so it may be
    slightly below 0.

    Args:
        features, references: (N, D) and (M, D), at least two rows each.
        subset_size: images of each set in a subset, drawn without replacement.
    """
    sizes = [min(subset_size, len(rows)) for rows in (features, references)]
    if sizes == [len(features), len(references)]:
        num_subsets = 1  # all would be equal
    random = np.random.RandomState(seed)  # the generator and the order of draws of torch-fidelity
    distances = []
    for _ in range(num_subsets):
        drawn = [
            random.choice(len(rows), size, replace=False)
            for rows, size in zip((features, references), sizes, strict=True)
        ]
        distances.append(polynomial_mmd(features[drawn[0]], references[drawn[1]]))
    return float(np.mean(distances))


def polynomial_mmd(first: Tensor, second: Tensor) -> float:
    """Unbiased MMD^2 with the kernel (x . y / D + 1)^3 (Gretton et al. 2012, eq. 3).

    Args:
        first, second: (M, D) and (N, D), at least two rows each; products in their dtype, sums in float64.
    """
    m, n = len(first), len(second)
    within_first, within_second = _kernel(first, first), _kernel(second, second)
    return (
        (within_first.sum() - within_first.trace()) / (m * (m - 1))
        + (within_second.sum() - within_second.trace()) / (n * (n - 1))
        - 2 * _kernel(first, second).mean()
    ).item()


def _kernel(rows: Tensor, columns: Tensor) -> Tensor:
    """(M, N) float64."""
    scaled = (rows @ columns.T).double().div_(rows.shape[1]).add_(1)
    return scaled.pow_(3)
