# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Verdicts on quality: whether a setting makes the model better or worse, given the spread over training seeds.

Two cells that differ in one setting are compared seed by seed. For the n differences d of a figure, with mean m and
standard deviation s (divided by n - 1):

    interval  m ± t(0.975, n - 1) s / sqrt(n)           95%, Student t
    p         P(|T| > |m| sqrt(n) / s), T ~ t(n - 1)    paired t test of m = 0, two-sided

Notable:
- A grid makes many comparisons, and of 20 without any effect one has p < 0.05. Holm's procedure over all comparisons
  and figures of a grid corrects p: of grids in which no setting has an effect, at most 5% get any verdict "better" or
  "worse", also if the comparisons share a baseline or the figures are correlated (Holm, Scand. J. Statist. 6, 1979).
- The interval is that of its comparison alone. It can exclude zero where the verdict is "inconclusive".
- One seed has no spread: "one seed: no verdict". Equal differences in all seeds have none either; they are counted as a
  comparison with p = 1, because figures are rounded shares of images and agree by chance.
- The number of further seeds assumes that the measured mean and spread are the true ones. It is the smallest number at
  which the test finds the difference with probability 0.8, at the level 0.05 / (comparisons still undecided).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchditan.ablation.grid import BATCH_SIZE, SEED
from torchditan.ablation.ledger import QUALITY
from torchditan.config.errors import option_error
from torchditan.evaluation.card import spread_of
from torchditan.report.effects import Metric, matched_pairs
from torchditan.report.grid_results import GridResults

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.05
"""Share of grids without any effect that get a verdict."""
POWER = 0.8
MOST_SEEDS = 1000
FEWEST_STEPS = 100
"""Of runs that are judged by their training loss. Shorter ones are benchmarks of speed."""
BETTER, WORSE, INCONCLUSIVE, ONE_SEED = "better", "worse", "inconclusive", "one seed: no verdict"
NOT_MEASURED = "not measured on both sides"
TRAINING_LOSS = Metric("loss_mean", "training loss", "", False, None)
_LEARN_SIGMA, _PRESET = "model.learn_sigma", "model.preset"
_CHANGE_THE_LOSS = ("diffusion.", "dataset.", "autoencoder.", _LEARN_SIGMA, _PRESET)
"""Sections and options that change what a loss measures, so that its values are not comparable. A learned variance adds
a term to the loss of ddpm; the preset chooses it if the grid does not."""
_NOT_IN_VALIDATION = (
    "diffusion.loss_weighting",
    "diffusion.min_snr_gamma",
    "diffusion.ingredients",
)
"""Options of these sections that change only the training loss."""
_CAN_BE_NEGATIVE = ("KID",)
"""Figures whose unbiased estimates are negative at times; all others are losses, distances and shares."""
_WIDEST_RATIO = 10.0
"""Of the ends of a ratio's interval, above which it says only that there are too few runs."""


class Tests(NamedTuple):
    """Paired t tests; arrays (..., comparisons)."""

    num_seeds: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    """Of one difference; NaN with fewer than two seeds."""
    half_width: np.ndarray
    p: np.ndarray
    """NaN with fewer than two seeds, 1 if all differences are equal."""
    corrected: np.ndarray
    """Smallest level at which Holm's procedure rejects "no difference", between 0 and 1."""

    @property
    def is_decided(self) -> np.ndarray:
        return self.corrected <= LEVEL


@dataclass(frozen=True)
class Cost:
    """Ratios, after / before, of the cells of a comparison: geometric means over seeds; None if not measured."""

    flops: float | None
    """Training FLOPs per image."""
    time: float | None
    """Training time per image."""
    memory: float | None
    """Peak memory per device."""
    time_interval: tuple[float, float] | None
    """95% of `time`, over the seeds; None with one seed."""

    @property
    def is_time_known(self) -> bool:
        """Whether the interval of the time says something."""
        return self.time_interval is not None and self.time_interval[1] <= _WIDEST_RATIO * self.time_interval[0]


@dataclass(frozen=True)
class Verdict:
    """One figure of two cells that differ in one setting."""

    source: str
    axis: str
    from_value: str
    to_value: str
    others: tuple[tuple[str, str], ...]
    """The other settings that vary in the results, and their values."""
    runs: tuple[str, str]
    """Names of the two cells, with their seeds."""
    metric: Metric
    seeds: tuple[str, ...]
    """Those that both cells have."""
    missing: tuple[str, ...]
    """Those that only one of them has: the other run failed, or its figure is not finite."""
    before: float
    after: float
    difference: float
    """after - before: means over the seeds."""
    half_width: float | None
    """Half of the difference's 95% interval; None with one seed."""
    p: float | None
    corrected: float | None
    num_comparisons: int
    """Over which p was corrected: all of this grid with two seeds or more."""
    word: str
    further_seeds: int | None
    """That would decide it; None if it is decided, if they are more than `MOST_SEEDS`, or if nobody knows."""
    cost: Cost

    @property
    def is_decided(self) -> bool:
        return self.word in (BETTER, WORSE)

    @property
    def is_tested(self) -> bool:
        return self.p is not None

    @property
    def has_interval(self) -> bool:
        """Whether the interval says something: one of a few seeds can reach values that the figure cannot have."""
        if self.half_width is None:
            return False
        return self.metric.column.startswith(_CAN_BE_NEGATIVE) or self.half_width <= min(self.before, self.after)


def paired_tests(differences: np.ndarray) -> Tests:
    """Test differences (..., comparisons, seeds), NaN where a seed is missing; the last comparisons are one grid's."""
    import numpy as np
    from scipy.special import stdtr, stdtrit

    known = ~np.isnan(differences)
    num_seeds = known.sum(axis=-1)
    values = np.where(known, differences, 0.0)
    mean = values.sum(axis=-1) / np.maximum(num_seeds, 1)
    squares = (np.where(known, differences - mean[..., None], 0.0) ** 2).sum(axis=-1)
    degrees = np.maximum(num_seeds - 1, 1)
    is_tested = num_seeds > 1
    std = np.where(is_tested, np.sqrt(squares / degrees), np.nan)
    error = std / np.sqrt(np.maximum(num_seeds, 1))
    # Differences that are equal, but for the rounding of their last bits, show no spread.
    has_spread = std > 1e-9 * np.abs(values).max(axis=-1, initial=0)
    statistic = np.abs(mean) / np.where(has_spread, error, 1.0)
    p = np.where(is_tested, np.where(has_spread, 2 * stdtr(degrees, -statistic), 1.0), np.nan)
    mean = np.where(num_seeds > 0, mean, np.nan)
    return Tests(num_seeds, mean, std, stdtrit(degrees, 0.975) * error, p, holm(p))


def holm(p: np.ndarray) -> np.ndarray:
    """Corrected p values (..., comparisons); NaN are not tests and count for nothing.

    In ascending order the k-th of m values becomes the maximum over j <= k of (m - j + 1) p_j, at most 1.
    """
    import numpy as np

    order = np.argsort(p, axis=-1)  # NaN last
    ascending = np.take_along_axis(p, order, axis=-1)
    num_tests = (~np.isnan(p)).sum(axis=-1, keepdims=True)
    factors = num_tests - np.arange(p.shape[-1])
    corrected = np.minimum(np.maximum.accumulate(factors * ascending, axis=-1), 1.0)
    result = np.empty_like(corrected)
    np.put_along_axis(result, order, corrected, axis=-1)
    return result


def seeds_needed(mean: float, std: float, *, level: float) -> int | None:
    """Smallest number of seeds at which a paired t test finds this difference with probability `POWER`.

    With n seeds, the statistic has a noncentral t distribution with n - 1 degrees and noncentrality |mean| sqrt(n) /
    std. None if they are more than `MOST_SEEDS`.
    """
    import numpy as np
    from scipy.special import nctdtr, stdtrit

    if not std > 0:
        return None
    number = np.arange(2, MOST_SEEDS + 1)
    critical = stdtrit(number - 1, 1 - level / 2)
    centre = abs(mean) * np.sqrt(number) / std
    lower = nctdtr(number - 1, centre, -critical)
    # scipy gives NaN for some tails below 1e-16, at other numbers in each version.
    power = 1 - nctdtr(number - 1, centre, critical) + np.nan_to_num(lower)
    enough = np.flatnonzero(power >= POWER)
    return int(number[enough[0]]) if len(enough) else None


def judge(results: GridResults, figures: list[str] | None = None) -> list[Verdict]:
    """Verdicts on all pairs of cells that differ in one setting, for every figure; [] if there is nothing to judge.

    Args:
        results: of one or more grids. Each is corrected for its own comparisons.
        figures: names of those to judge. Default: all figures of quality. If there are none, several seeds are judged
            by the training loss.

    Raises:
        ConfigError: a figure was not measured.
    """
    metrics = _metrics(results, figures)
    axes = [*results.effects, *([BATCH_SIZE] if BATCH_SIZE in results.varied and not results.searched else [])]
    usual = matched_pairs(results.cells, results.axes, axes)
    found = []
    for source in results.sources:
        grid = results.runs.loc[results.runs["source"] == source, "grid"].iloc[0]
        baseline = _baseline(results, grid)
        pairs = matched_pairs(results.cells, results.axes, axes, baseline=baseline) if baseline else usual
        mine = pairs[pairs["source"] == source]
        chosen = {name for kind in ("axes", "settings") for name in results.contents[grid].get(kind, ())}
        compared = [
            (pair, metric)
            for pair in mine.itertuples()
            for metric in metrics
            if _is_comparable(pair.axis, metric, chosen)
        ]
        found += _judge_grid(results, compared)
    return found


def _baseline(results: GridResults, grid: str) -> dict[str, str]:
    """The first value of every axis in a grid that changes one axis at a time from there; {} for another grid."""
    if not results.contents[grid].get("one_at_a_time"):
        return {}
    first = results.runs[results.runs["grid"] == grid].iloc[0]  # on another device, if the grid changed it
    return {axis: first[axis] for axis in results.axes if axis != BATCH_SIZE}  # batch sizes ascend


def _metrics(results: GridResults, figures: list[str] | None) -> list[Metric]:
    known = {name: Metric(name, name.replace("_", " "), "", QUALITY[name], None) for name in results.quality}
    if not known and len(results.seeds) > 1 and (results.cells["steps"] >= FEWEST_STEPS).any():
        known = {TRAINING_LOSS.column: TRAINING_LOSS}
    for name in figures or ():
        if name not in known:
            raise option_error("--metrics", name, f"was not measured; there are {', '.join(known) or 'no figures'}")
    return [metric for name, metric in known.items() if figures is None or name in figures]


def _is_comparable(axis: str, metric: Metric, chosen: set[str]) -> bool:
    """Whether values of an axis do not change what a figure measures. `chosen`: axes and settings of the grid."""
    if metric.column == "validation_loss" and axis.startswith(_NOT_IN_VALIDATION):
        return True
    if axis == _PRESET and _LEARN_SIGMA in chosen:
        return True
    return not (metric.column in ("validation_loss", TRAINING_LOSS.column) and axis.startswith(_CHANGE_THE_LOSS))


def _judge_grid(results: GridResults, compared: list[tuple[Any, Metric]]) -> list[Verdict]:
    import numpy as np

    if not compared:
        return []
    values = {metric.column: _by_seed(results, metric.column) for _, metric in compared}
    before = np.stack([values[metric.column][pair.a] for pair, metric in compared])  # (comparisons, seeds)
    after = np.stack([values[metric.column][pair.b] for pair, metric in compared])
    tests = paired_tests(after - before)
    num_comparisons = int((~np.isnan(tests.p)).sum())
    level = LEVEL / max(num_comparisons - int(tests.is_decided.sum()), 1)
    costs = _Costs(results)
    verdicts = []
    for number, (pair, metric) in enumerate(compared):
        both = ~np.isnan(before[number]) & ~np.isnan(after[number])
        one = np.isnan(before[number]) != np.isnan(after[number])
        mean, std, is_tested = float(tests.mean[number]), float(tests.std[number]), bool(tests.num_seeds[number] > 1)
        word = _word(int(tests.num_seeds[number]), bool(tests.is_decided[number]), mean, metric)
        needed = seeds_needed(mean, std, level=level) if word == INCONCLUSIVE else None
        cell = results.cells.iloc[pair.a]
        verdicts.append(
            Verdict(
                source=pair.source,
                axis=pair.axis,
                from_value=pair.from_value,
                to_value=pair.to_value,
                others=tuple((axis, cell[axis]) for axis in results.varied if axis != pair.axis),
                runs=(cell["run_name"], results.cells["run_name"].iloc[pair.b]),
                metric=metric,
                seeds=tuple(np.array(results.seeds)[both]),
                missing=tuple(np.array(results.seeds)[one]),
                before=float(before[number][both].mean()) if both.any() else math.nan,
                after=float(after[number][both].mean()) if both.any() else math.nan,
                difference=mean,
                half_width=float(tests.half_width[number]) if is_tested else None,
                p=float(tests.p[number]) if is_tested else None,
                corrected=float(tests.corrected[number]) if is_tested else None,
                num_comparisons=num_comparisons,
                word=word,
                further_seeds=None if needed is None else max(needed - int(tests.num_seeds[number]), 1),
                cost=costs.of(pair),
            )
        )
    return verdicts


def _word(num_seeds: int, is_decided: bool, difference: float, metric: Metric) -> str:
    if num_seeds < 2:
        return ONE_SEED if num_seeds else NOT_MEASURED
    if not is_decided:
        return INCONCLUSIVE
    return BETTER if (difference > 0) == metric.higher_is_better else WORSE


def _by_seed(results: GridResults, column: str) -> np.ndarray:
    """A column (cells, seeds) of `seed_cells`; NaN where a cell has no such seed."""
    import numpy as np

    table = np.full((len(results.cells), len(results.seeds)), np.nan)
    seeds = results.seed_cells[SEED].map(results.seeds.index).to_numpy(int)
    table[results.seed_cells["cell"].to_numpy(int), seeds] = results.seed_cells[column].to_numpy(float)
    return table


class _Costs:
    """Cost ratios of pairs of cells, from the seeds that both have."""

    def __init__(self, results: GridResults) -> None:
        rate = _by_seed(results, "images_per_second_mean")
        per_device = _by_seed(results, "images_per_second_per_device_mean")
        self._tables = {
            "flops": _by_seed(results, "tflops_per_device_mean") / per_device,
            "time": 1 / rate,
            "memory": _by_seed(results, "peak_memory_gib"),
        }

    def of(self, pair: Any) -> Cost:
        import numpy as np

        logarithms = {name: np.log(table[pair.b] / table[pair.a]) for name, table in self._tables.items()}
        known = {name: values[~np.isnan(values)] for name, values in logarithms.items()}
        ratios = {name: float(np.exp(values.mean())) if len(values) else None for name, values in known.items()}
        interval = None
        if len(known["time"]) > 1:
            mean, _, half = spread_of(known["time"].tolist())
            interval = math.exp(mean - half), math.exp(mean + half)
        return Cost(**ratios, time_interval=interval)
