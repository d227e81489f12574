# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Precision, recall, density, coverage and shares of copies: what the nearest neighbours of features say.

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

from torchditan.errors import ConfigError

BLOCK = 1024
"""Rows and columns of a block of distances: 4 MiB of float32."""
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


def compare_with_halves(
    generated: Tensor, real: Tensor, *, radii: Tensor | None = None
) -> tuple[Neighbourhoods, tuple[Neighbourhoods, Neighbourhoods] | None]:
    """The figures, and the same for every second generated image from the first and from the second on.

    Precision and recall (Kynkäänniemi et al. 2019, eq. 1-2), density and coverage (Naeem et al. 2020, eq. 5, 7).
    The halves reuse the distances between all images, so they add few percent to the time.

    Args:
        generated, real: (N, D) and (M, D) float32.
        radii: `real_radii(real)`, if you have them already.

    Returns:
        The halves are None if one has too few images for `K_PRECISION_RECALL` neighbours.
    """
    radii = real_radii(real) if radii is None else radii
    if len(generated) // 2 <= K_PRECISION_RECALL:
        return _compare([generated], real, radii)[0], None
    whole, even, odd = _compare([generated[0::2], generated[1::2]], real, radii)
    return whole, (even, odd)


def real_radii(real: Tensor) -> Tensor:
    """Squared radii of the balls of real images (M, D): (M, 2), for `K_PRECISION_RECALL` and `K_DENSITY_COVERAGE`."""
    return squared_radii(real, [K_PRECISION_RECALL, K_DENSITY_COVERAGE], centre=real.mean(0))


def _compare(parts: list[Tensor], real: Tensor, radii: Tensor) -> list[Neighbourhoods]:
    """The figures of one set of generated images; for two parts of it, those of both together, then of each."""
    centre = real.mean(0)
    parts_radii, whole_radii = _radii_of_parts(parts, centre=centre)
    realistic = [torch.zeros(len(part), dtype=torch.bool, device=real.device) for part in parts]
    # (parts, M): whether a real image is in a ball of that part, and whether its own ball contains an image of it.
    recalled, recalled_by_whole, covered = torch.zeros(3, len(parts), len(real), dtype=torch.bool, device=real.device)
    num_balls = torch.zeros(len(parts), dtype=torch.float64, device=real.device)
    for i, part in enumerate(parts):
        for rows, columns, distances in _blocks(real, part, centre=centre):
            # Each comparison is a minimum: several times faster than any() over booleans on a CPU.
            covered[i, rows] |= distances.amin(1) <= radii[rows, 1]
            recalled[i, rows] |= (distances - parts_radii[i][columns]).amin(1) <= 0
            if len(parts) > 1:
                recalled_by_whole[i, rows] |= (distances - whole_radii[i][columns]).amin(1) <= 0
            realistic[i][columns] |= (distances - radii[rows, :1]).amin(0) <= 0
            num_balls[i] += (distances <= radii[rows, 1:]).count_nonzero()

    def figures(realistic: Tensor, recalled: Tensor, covered: Tensor, num_balls: Tensor) -> Neighbourhoods:
        return Neighbourhoods(
            precision=realistic.double().mean().item(),
            recall=recalled.double().mean().item(),
            density=(num_balls / (K_DENSITY_COVERAGE * len(realistic))).item(),
            coverage=covered.double().mean().item(),
        )

    of_parts = [figures(*values) for values in zip(realistic, recalled, covered, num_balls, strict=True)]
    if len(parts) == 1:
        return of_parts
    return [figures(torch.cat(realistic), recalled_by_whole.any(0), covered.any(0), num_balls.sum()), *of_parts]


def _radii_of_parts(parts: list[Tensor], *, centre: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Squared radii (N,) of generated images: among those of their part, and among those of all (one or two) parts."""
    k = K_PRECISION_RECALL
    within = [_nearest_within(part, k, centre=centre) for part in parts]
    among_all = [nearest.clone() for nearest in within]
    if len(parts) > 1:
        for rows, columns, distances in _blocks(*parts, centre=centre):
            _keep_smallest(among_all[0][rows], distances)
            _keep_smallest(among_all[1][columns], distances, dim=1)
    return [nearest.amax(1) for nearest in within], [nearest.amax(1) for nearest in among_all]


def share_closer(generated: Tensor, held_out: Tensor) -> float:
    """P(a distance of `generated` (N,) is below one of `held_out` (M,)); ties count one half.

    Of distances to the nearest training image it is 0.5 where both sets are alike, and more where images are copied
    (the statistic of Meehan et al. 2020, scaled to [0, 1]).
    """
    ordered, generated = held_out.sort().values, generated.contiguous()
    farther = len(ordered) - torch.searchsorted(ordered, generated, right=True)
    tied = len(ordered) - farther - torch.searchsorted(ordered, generated)
    return ((farther + tied / 2) / len(ordered)).mean().item()


def share_very_close(generated: Tensor, held_out: Tensor) -> float:
    """Share of the distances `generated` (N,) below the first percentile of `held_out` (M,): 0.01 if both are alike."""
    return (generated < held_out.quantile(0.01)).double().mean().item()


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


def squared_radii(features: Tensor, ks: list[int], *, centre: Tensor) -> Tensor:
    """Squared distance of each row of (N, D) to its k-th nearest other row: (N, len(ks)).

    Args:
        centre: (D,) subtracted from the features first, so that their products are small.
    """
    return _nearest_within(features, max(ks), centre=centre).sort(1).values[:, [k - 1 for k in ks]]


def require_neighbours(count: int, k: int, *, name: str) -> None:
    """Refuse sets without k other images."""
    if count <= k:
        raise ConfigError(f"{name}: {count} are too few; the {k} nearest neighbours need {k + 1} or more")


def _nearest_within(features: Tensor, k: int, *, centre: Tensor) -> Tensor:
    """Squared distances of each row of (N, D) to its k nearest other rows: (N, k), unordered. N is above k."""
    nearest = features.new_full((len(features), k), torch.inf)
    for rows, columns, distances in _blocks(features, features, centre=centre, is_symmetric=True):
        if rows == columns:
            distances.fill_diagonal_(torch.inf)
        else:
            _keep_smallest(nearest[columns], distances, dim=1)
        _keep_smallest(nearest[rows], distances)
    return nearest


def _keep_smallest(smallest: Tensor, distances: Tensor, *, dim: int = 0) -> None:
    """Replace `smallest` (B, k) by the k smallest of it and of the rows of `distances` (columns for `dim` 1)."""
    # Most rows of most blocks have nothing smaller: looking at their minimum first is several times faster.
    chosen = (distances.amin(1 - dim) < smallest.amax(1)).nonzero()[:, 0]
    if len(chosen):
        found = distances.index_select(dim, chosen)
        found = torch.cat([smallest[chosen], found.T if dim else found], 1)
        smallest[chosen] = found.topk(smallest.shape[1], dim=1, largest=False, sorted=False).values


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
