# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From the results of each sampling seed to the figures of a card: value, interval and its label."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchditan.evaluation.card import CardFigure

if TYPE_CHECKING:
    from torchditan.evaluation.metric import Figure

_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5% quantiles of Student's t with 1 to 30 degrees of freedom."""


class Spread(NamedTuple):
    """Mean of several values, and how far they spread."""

    mean: float
    std: float
    """Of one value, divided by K - 1."""
    half_width: float
    """Half of the 95% interval of the mean: t(0.975, K - 1) std / sqrt(K)."""


def t_quantile(degrees: int) -> float:
    """97.5% quantile of Student's t, within 0.2%: a table, then the first terms of Abramowitz & Stegun 26.7.5."""
    assert degrees > 0, degrees
    z = 1.959964
    return _T_975[degrees - 1] if degrees <= len(_T_975) else z + (z**3 + z) / (4 * degrees)


def spread_of(values: Sequence[float]) -> Spread:
    """Mean, standard deviation and 95% interval of two or more independent values."""
    std = statistics.stdev(values)
    return Spread(statistics.fmean(values), std, t_quantile(len(values) - 1) * std / math.sqrt(len(values)))


def card_figure(figures: Sequence[Figure]) -> CardFigure:
    """One figure of all sampling seeds. Its interval covers the choice of noise and classes, and no retraining.

    Two or more seeds give the 95% interval of their mean. One seed gives half of the difference between the halves of
    its images. For halves a and b, |a - b| / 2 estimates the standard error of (a + b) / 2 with one degree of freedom:
    the interval covers the mean over many seeds with a probability of 50%, and can be narrow by chance. Fréchet
    distances of halves are higher than that of all images, but by the same amount, so it cancels.

    Args:
        figures: the same figure of each seed, of equally many images.
    """
    first = figures[0]
    assert all(figure.num_images == first.num_images for figure in figures), figures
    values = [figure.value for figure in figures]
    value: float | None = None
    half_width: float | None = None
    label = None
    if all(map(math.isfinite, values)):
        value = statistics.fmean(values) if len(set(values)) > 1 else values[0]
        if len(values) == 1 and first.halves is not None:
            half_width = abs(first.halves[0] - first.halves[1]) / 2
            label = "sampling only: two halves, about 50%"
        elif len(set(values)) > 1:
            half_width = spread_of(values).half_width
            label = f"sampling only: 95%, {len(values)} seeds"
        elif len(values) > 1:  # a figure of real images, or one at its bound: an interval of width 0 would mislead
            label = f"equal for all {len(values)} seeds"
    if half_width is not None and not math.isfinite(half_width):
        half_width = label = None
    return CardFigure(
        value=value,
        low=None if value is None or half_width is None else value - half_width,
        high=None if value is None or half_width is None else value + half_width,
        interval=label,
        num_images=first.num_images,
        extractor=first.extractor,
        per_seed=[value if math.isfinite(value) else None for value in values],
    )


def card_figures(
    results: Sequence[Mapping[str, Any]], *, num_images: int
) -> tuple[dict[str, CardFigure], dict[str, Any]]:
    """The figures of a card, and its other results: tables of numbers, averaged over the seeds, and texts.

    Args:
        results: what the metrics computed for each seed, by name (`Metric.compute`).
        num_images: generated images of each seed, for numbers that do not say.
    """
    from torchditan.evaluation.metric import Figure

    figures: dict[str, CardFigure] = {}
    other: dict[str, Any] = {}
    for name, first in results[0].items():
        found = [result[name] for result in results]
        if isinstance(first, str):
            other[name] = first
        elif isinstance(first, Mapping):
            tables = {key: [table[key] for table in found if key in table] for key in first}
            other[name] = {key: statistics.fmean(values) for key, values in tables.items()}
        else:
            figures[name] = card_figure(
                [one if isinstance(one, Figure) else Figure(float(one), num_images) for one in found]
            )
    return figures, other
