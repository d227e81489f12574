# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Precision, recall, density, coverage and a copy check: what the nearest neighbours of features say.

Notable:
- distances are computed in blocks that stay in the cache, so 50,000 x 50,000 of them need no memory;
- features are centred on the mean of the references first, which keeps float32 products accurate;
- an image is never its own neighbour; a distance equal to a radius counts as inside, as in the papers' definitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchditan.config.errors import ConfigError

BLOCK = 1024
"""Rows and columns of a block of distances: 4 MiB of float32."""
NUM_GROUPS = 32
"""Groups of columns in a block of which the nearest are searched first."""
K_PRECISION_RECALL = 3
"""Kynkäänniemi et al. 2019 and ADM's evaluator."""
K_DENSITY_COVERAGE = 5
"""Naeem et al. 2020."""


class Neighbourhoods(NamedTuple):
    """All in [0, 1], but density, which may exceed 1."""

    precision: float
    """Share of generated images inside the ball of a real image, with the radius of its third neighbour."""
    recall: float
    """Share of real images inside such a ball of a generated image."""
    density: float
    """Balls of real images (fifth neighbour) that contain a generated image: their mean number / 5."""
    coverage: float
    """Share of real images whose ball (fifth neighbour) contains a generated image."""


def compare_neighbourhoods(generated: Tensor, real: Tensor) -> Neighbourhoods:
    """Precision and recall (Kynkäänniemi et al. 2019, eq. 1-2), density and coverage (Naeem et al. 2020, eq. 5, 7).

    Args:
        generated, real: (N, D) and (M, D) float32.

    Raises:
        ConfigError: fewer images than neighbours.
    """
    centre = real.mean(0)
    real_radii = squared_radii(real, [K_PRECISION_RECALL, K_DENSITY_COVERAGE], centre=centre, name="real images")
    generated_radii = squared_radii(generated, [K_PRECISION_RECALL], centre=centre, name="generated images")[:, 0]
    is_realistic = torch.zeros(len(generated), dtype=torch.bool, device=generated.device)
    is_recalled = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    is_covered = torch.zeros_like(is_recalled)
    num_balls = torch.zeros((), dtype=torch.float64, device=real.device)
    for rows, columns, distances in _blocks(real, generated, centre=centre):
        # Each comparison is a minimum: several times faster than any() over booleans on a CPU.
        radii = real_radii[rows]
        is_covered[rows] |= distances.amin(1) <= radii[:, 1]
        is_recalled[rows] |= (distances - generated_radii[columns]).amin(1) <= 0
        is_realistic[columns] |= (distances - radii[:, :1]).amin(0) <= 0
        num_balls += (distances <= radii[:, 1:]).count_nonzero()
    return Neighbourhoods(
        precision=is_realistic.double().mean().item(),
        recall=is_recalled.double().mean().item(),
        density=(num_balls / (K_DENSITY_COVERAGE * len(generated))).item(),
        coverage=is_covered.double().mean().item(),
    )


class CopyCheck(NamedTuple):
    """How near generated images are to training images, against held-out images, which nobody copied."""

    generated_distance: float
    """Median distance of a generated image to its nearest training image."""
    held_out_distance: float
    """The same of a held-out image."""
    share_closer: float
    """P(a generated image is nearer than a held-out one): 0.5 where both are alike, above it where images are copied
    (the statistic of Meehan et al. 2020, scaled to [0, 1]; ties count one half)."""
    share_very_close: float
    """Share of generated images nearer than 99% of held-out ones: 0.01 where both are alike."""
    nearest: Tensor
    """(N,) index of each generated image's nearest training image, to look at the pairs."""


def check_copies(generated: Tensor, held_out: Tensor, training: Tensor) -> CopyCheck:
    """Compare the distances of two sets to their nearest training images.

    Args:
        generated, held_out, training: (N, D), (M, D) and (T, D) float32. Held-out images must come from the
            distribution of the training images; if they are of other subjects, every model seems to copy.

    Raises:
        ConfigError: there are no held-out or training images.
    """
    for name, features in (("held-out images", held_out), ("training images", training)):
        if not len(features):
            raise ConfigError(f"{name}: none; the copy check needs both held-out and training images")
    of_generated, nearest = nearest_distances(generated, training)
    of_held_out, _ = nearest_distances(held_out, training)
    ordered = of_held_out.sort().values
    farther = len(ordered) - torch.searchsorted(ordered, of_generated, right=True)
    tied = len(ordered) - farther - torch.searchsorted(ordered, of_generated)
    return CopyCheck(
        generated_distance=of_generated.median().item(),
        held_out_distance=of_held_out.median().item(),
        share_closer=((farther + tied / 2) / len(ordered)).mean().item(),
        share_very_close=(of_generated < ordered.quantile(0.01)).double().mean().item(),
        nearest=nearest,
    )


def nearest_distances(features: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of (N, D): the distance to its nearest reference (N,) float64, and that reference's index (N,).

    The index is found in float32; the distance is then computed from the difference, so a copy has distance 0.
    """
    smallest = features.new_full((len(features),), torch.inf)
    nearest = torch.zeros(len(features), dtype=torch.int64, device=features.device)
    for rows, columns, distances in _blocks(features, references, centre=references.mean(0)):
        values, indices = distances.min(1)
        is_nearer = values < smallest[rows]
        smallest[rows] = torch.where(is_nearer, values, smallest[rows])
        nearest[rows] = torch.where(is_nearer, indices + columns.start, nearest[rows])
    parts = zip(features.split(BLOCK), nearest.split(BLOCK), strict=True)
    return torch.cat([(rows.double() - references[index]).norm(dim=1) for rows, index in parts]), nearest


def squared_radii(features: Tensor, ks: list[int], *, centre: Tensor, name: str) -> Tensor:
    """Squared distance of each row of (N, D) to its k-th nearest other row: (N, len(ks)).

    Args:
        ks: from 1 on.
        centre: (D,) subtracted from the features first, so that their products are small.
        name: what the images are called in the error.

    Raises:
        ConfigError: there are only k images, or fewer.
    """
    most = max(ks)
    if len(features) <= most:
        raise ConfigError(f"{name}: {len(features)} are too few; the {most} nearest neighbours need {most + 1} or more")
    nearest = features.new_full((len(features), most), torch.inf)
    for rows, columns, distances in _blocks(features, features, centre=centre, is_symmetric=True):
        if rows == columns:
            distances.fill_diagonal_(torch.inf)
        else:
            nearest[columns] = _smallest(torch.cat([nearest[columns], _smallest(distances.T, most)], 1), most)
        nearest[rows] = _smallest(torch.cat([nearest[rows], _smallest(distances, most)], 1), most)
    return nearest.sort(1).values[:, [k - 1 for k in ks]]


def _smallest(values: Tensor, k: int) -> Tensor:
    """The k smallest values of each row, unordered. They lie in the k groups of columns whose minima are smallest."""
    if values.shape[1] == BLOCK and k < NUM_GROUPS:
        groups = values.reshape(len(values), NUM_GROUPS, -1)
        chosen = groups.amin(2).topk(k, dim=1, largest=False, sorted=False).indices
        values = groups.gather(1, chosen[:, :, None].expand(-1, -1, groups.shape[2])).flatten(1)
    return values.topk(k, dim=1, largest=False, sorted=False).values if values.shape[1] > k else values


def _blocks(
    rows: Tensor, columns: Tensor, *, centre: Tensor, is_symmetric: bool = False
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Slices of rows and columns, and the squared distances between them (float32, at least 0).

    `is_symmetric` leaves out the blocks below the diagonal.
    """
    for i in range(0, len(rows), BLOCK):
        block = rows[i : i + BLOCK] - centre
        norms = block.square().sum(1, keepdim=True)
        for j in range(i if is_symmetric else 0, len(columns), BLOCK):
            others = columns[j : j + BLOCK] - centre
            distances = torch.addmm(others.square().sum(1), block, others.T, alpha=-2).add_(norms).clamp_min_(0)
            yield slice(i, i + len(block)), slice(j, j + len(others)), distances
