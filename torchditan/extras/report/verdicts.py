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

import warnings
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import nctdtr, stdtrit
from scipy.stats import ttest_1samp

from torchditan.errors import counted, option_error
from torchditan.extras.ablation.grid import BATCH_SIZE, SEED
from torchditan.extras.ablation.ledger import quality
from torchditan.extras.evaluation.card_tables import columns, rounded, significant
from torchditan.extras.report.effects import MEMORY, PER_DEVICE, THROUGHPUT, Metric, matched_pairs
from torchditan.extras.report.grids import Grids
from torchditan.extras.report.labels import axis_name, change_name, value_name

LEVEL = 0.05
"""Share of grids without any effect that get a verdict."""
POWER = 0.8
MOST_SEEDS = 1000
FEWEST_STEPS = 100
"""Of runs that are judged by their training loss. Shorter ones are benchmarks of speed."""
BETTER, WORSE, INCONCLUSIVE, ONE_SEED = "better", "worse", "inconclusive", "one seed: no verdict"
NOT_MEASURED = "not measured on both sides"
TRAINING_LOSS = Metric("loss_mean", "training loss", False)
_LEARN_SIGMA, _PRESET = "model.learn_sigma", "model.preset"
_CHANGE_THE_LOSS = ("diffusion.", "dataset.", "autoencoder.", _LEARN_SIGMA, _PRESET)
"""Sections and options that change what a loss measures, so that its values are not comparable. A learned variance adds
a term to the loss of ddpm; the preset chooses it if the grid does not."""
_NOT_IN_VALIDATION = ("diffusion.loss_weighting", "diffusion.ingredients")
"""Options of these sections that change only the training loss."""
_MOST_ROWS = 100  # in a terminal
VERDICT_COLUMNS = [
    *("grid", "axis", "from_value", "to_value", "from_run", "to_run", "figure", "better", "seeds", "missing_seeds"),
    *("before", "after", "difference", "low", "high", "p", "corrected_p", "num_comparisons", "verdict"),
    *("further_seeds", "flops_ratio", "time_ratio", "time_low", "time_high", "memory_ratio"),
]
"""Of verdicts.csv."""


class Tests(NamedTuple):
    """Paired t tests; arrays (..., comparisons). NaN with fewer than two seeds."""

    num_seeds: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    """Of one difference."""
    half_width: np.ndarray
    p: np.ndarray
    """1 if all differences are equal."""


def paired_tests(differences: np.ndarray) -> Tests:
    """Test differences (..., comparisons, seeds), NaN where a seed is missing."""
    num_seeds = (~np.isnan(differences)).sum(axis=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # fewer than two seeds, and equal differences
        found = ttest_1samp(differences, 0, axis=-1, nan_policy="omit")
        interval = found.confidence_interval(0.95)
        mean, std = np.nanmean(differences, axis=-1), np.nanstd(differences, axis=-1, ddof=1)
        # Differences that are equal, but for the rounding of their last bits, show no spread.
        has_spread = std > 1e-9 * np.nanmax(np.abs(differences), axis=-1)
    is_tested = num_seeds > 1
    p = np.where(is_tested, np.where(has_spread, found.pvalue, 1.0), np.nan)
    half_width = np.where(is_tested, (interval.high - interval.low) / 2, np.nan)
    return Tests(num_seeds, mean, std, half_width, p)


def holm(p: np.ndarray) -> np.ndarray:
    """Corrected p values (comparisons,); NaN are not tests and count for nothing.

    In ascending order the k-th of m values becomes the maximum over j <= k of (m - j + 1) p_j, at most 1.
    """
    ascending = pd.Series(p).dropna().sort_values()
    corrected = (ascending * np.arange(len(ascending), 0, -1)).cummax().clip(upper=1.0)
    return corrected.reindex(range(len(p))).to_numpy()


def seeds_needed(mean: float, std: float, *, level: float) -> int | None:
    """Smallest number of seeds at which a paired t test finds this difference with probability `POWER`.

    With n seeds, the statistic has a noncentral t distribution with n - 1 degrees and noncentrality |mean| sqrt(n) /
    std. None if they are more than `MOST_SEEDS`.
    """
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


def judge(grids: Grids, figures: list[str] | None = None) -> pd.DataFrame:
    """Verdicts on all pairs of cells that differ in one setting, one row for each figure.

    The columns are those of verdicts.csv, and for readers `name` of the figure, `change` and `with`: the other settings
    in which the pairs of one change differ. Each grid is corrected for its own comparisons.

    Args:
        grids: with all runs.
        figures: names of those to judge. Default: all figures of quality. If there are none, several seeds are judged
            by the training loss.

    Raises:
        ConfigError: a figure was not measured.
    """
    metrics = _metrics(grids, figures)
    axes = [*grids.effects, *([BATCH_SIZE] if BATCH_SIZE in grids.varied and not grids.searched else [])]
    found = []
    for source in grids.sources:
        first = grids.runs[grids.runs["grid"] == grids.runs.loc[grids.runs["source"] == source, "grid"].iloc[0]].iloc[0]
        content = grids.contents[first["grid"]]
        # The first row has the baseline: the first value of every axis, but batch sizes ascend.
        baseline = {axis: first[axis] for axis in axes if axis != BATCH_SIZE} if content.get("one_at_a_time") else {}
        chosen = {name for kind in ("axes", "settings") for name in content.get(kind, ())}
        pairs = matched_pairs(grids, axes, baseline=baseline)
        compared = [
            (pair, metric)
            for pair in pairs[pairs["grid"] == source].itertuples()
            for metric in metrics
            if _is_comparable(pair.axis, metric, chosen)
        ]
        found += [_judge_grid(grids, compared)] if compared else []
    verdicts = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=VERDICT_COLUMNS)
    return _named(grids, verdicts)


def _metrics(grids: Grids, figures: list[str] | None) -> list[Metric]:
    declared = {name: higher for name, higher in quality().items() if grids.cells[name].notna().any()}
    known = {name: Metric(name, name.replace("_", " "), higher) for name, higher in declared.items()}
    if not known and len(grids.seeds) > 1 and (grids.cells["steps"] >= FEWEST_STEPS).any():
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


def _judge_grid(grids: Grids, compared: list[tuple[Any, Metric]]) -> pd.DataFrame:
    table = pd.DataFrame([pair for pair, _ in compared]).drop(columns="Index")
    a, b = (table.pop(side).to_numpy() for side in "ab")
    names = grids.cells["run_name"].to_numpy()
    table = table.assign(from_run=names[a], to_run=names[b], a=a, b=b)
    for name, values in {"figure": "column", "name": "name", "better": "better"}.items():
        table[name] = [getattr(metric, values) for _, metric in compared]
    by_seed = {figure: _by_seed(grids, figure) for figure in table["figure"].unique()}
    before, after = (
        np.stack([by_seed[figure][row] for row, figure in zip(rows, table["figure"], strict=True)]) for rows in (a, b)
    )  # (comparisons, seeds)
    both, one = ~np.isnan(before + after), np.isnan(before) != np.isnan(after)
    table["seeds"], table["missing_seeds"] = (
        [" ".join(np.array(grids.seeds)[known]) for known in sides] for sides in (both, one)
    )
    tests = paired_tests(after - before)
    table["before"], table["after"] = (pd.DataFrame(side).where(both).mean(axis=1) for side in (before, after))
    table = table.assign(
        num_seeds=tests.num_seeds,
        difference=tests.mean,
        half_width=tests.half_width,
        low=tests.mean - tests.half_width,
        high=tests.mean + tests.half_width,
        p=tests.p,
        corrected_p=holm(tests.p),
        num_comparisons=int((~np.isnan(tests.p)).sum()),
    )
    is_decided = table["corrected_p"] <= LEVEL
    is_better = (table["difference"] > 0) == (table["better"] == "higher")
    table["verdict"] = np.select(
        [tests.num_seeds < 1, tests.num_seeds < 2, ~is_decided, is_better],
        [NOT_MEASURED, ONE_SEED, INCONCLUSIVE, BETTER],
        WORSE,
    )
    level = LEVEL / max(table["p"].notna().sum() - is_decided.sum(), 1)
    needed = [
        seeds_needed(mean, std, level=level) if word == INCONCLUSIVE else None
        for mean, std, word in zip(tests.mean, tests.std, table["verdict"], strict=True)
    ]
    table["further_seeds"] = (pd.Series(needed, dtype="Int64") - tests.num_seeds).clip(lower=1)
    return table.assign(**_costs(grids, a, b))


def _by_seed(grids: Grids, column: str) -> np.ndarray:
    """A column of `seed_cells` as (cells, seeds); NaN where a cell has no such seed."""
    table = grids.seed_cells.pivot(index="cell", columns=SEED, values=column)
    return table.reindex(index=range(len(grids.cells)), columns=grids.seeds).to_numpy(float)


def _costs(grids: Grids, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Ratios, after / before, of FLOPs and time per image and of memory: geometric means over the seeds of both."""
    values = {
        "flops": _by_seed(grids, "tflops_per_device_mean") / _by_seed(grids, PER_DEVICE),
        "time": 1 / _by_seed(grids, THROUGHPUT.column),
        "memory": _by_seed(grids, MEMORY.column),
    }
    tests = {name: paired_tests(np.log(table[b] / table[a])) for name, table in values.items()}
    time = tests["time"]
    ends = {"time_low": time.mean - time.half_width, "time_high": time.mean + time.half_width}
    logarithms = {f"{name}_ratio": test.mean for name, test in tests.items()} | ends
    return {name: np.exp(value) for name, value in logarithms.items()}


def _named(grids: Grids, verdicts: pd.DataFrame) -> pd.DataFrame:
    """Add `change`, and `with`: the values of those other axes that differ between the pairs of the change."""
    several = verdicts["grid"].nunique() > 1
    change = ["grid", "axis", "from_value", "to_value"]
    keys = list(verdicts[change].itertuples(index=False, name=None))
    others: dict[tuple[str, ...], pd.DataFrame] = {}
    for key, mine in verdicts.groupby(change, sort=False):
        cells = grids.cells.loc[mine["a"], [axis for axis in grids.varied if axis != key[1]]]
        others[key] = cells.loc[~cells.index.duplicated(), cells.nunique() > 1]
    with_others = [
        ", ".join(f"{axis_name(axis)} {value_name(axis, value)}" for axis, value in others[key].loc[row].items())
        for key, row in zip(keys, verdicts.get("a", ()), strict=True)
    ]
    changes = [(f"{key[0]}, " if several else "") + change_name(*key[1:]) for key in keys]
    return verdicts.assign(**{"change": changes, "with": with_others})


def verdict_text(verdicts: pd.DataFrame) -> str:
    """The verdicts for a terminal: a Markdown table, and a sentence that summarises it."""
    table = verdict_table(verdicts)
    lines = [columns(list(table), table.to_numpy().tolist()[:_MOST_ROWS])]
    if len(table) > _MOST_ROWS:
        lines.append(f"{len(table) - _MOST_ROWS:,} more are in verdicts.csv.")
    return "\n".join([*lines, f"Verdicts: {summary(verdicts)} {guarantee(verdicts)}".rstrip()])


def summary(verdicts: pd.DataFrame) -> str:
    """`2 better, 1 worse, 9 inconclusive, of 12 comparisons.`"""
    counts = verdicts["verdict"].value_counts()
    if set(counts.index) <= {ONE_SEED, NOT_MEASURED}:
        return (
            "One seed: no verdict." if ONE_SEED in counts else "No figure was measured on both sides of a comparison."
        )
    words = (BETTER, WORSE, INCONCLUSIVE, ONE_SEED, NOT_MEASURED)
    parts = [f"{counts.get(word, 0):,} {word}" for word in words if word in counts or word in words[:3]]
    return f"{', '.join(parts)}, of {counted(len(verdicts), 'comparison')}."


def guarantee(verdicts: pd.DataFrame) -> str:
    """What the correction of p promises, and how many comparisons lack seeds."""
    tested = verdicts[verdicts["p"].notna()].drop_duplicates("grid")["num_comparisons"]
    if tested.empty:
        return ""
    numbers = " and ".join(f"{number:,}" for number in tested.unique())
    plural = "comparison" if set(tested) == {1} else "comparisons"
    num_missing = int((verdicts["missing_seeds"] != "").sum())
    warning = f"{counted(num_missing, 'comparison')} without some seeds: a run of one side failed or is missing. "
    return (
        f"{warning if num_missing else ''}Corrected for {numbers} {plural} per grid: if no setting has an effect, the "
        f"chance of any better or worse is at most {LEVEL:.0%}."
    )


def verdict_table(verdicts: pd.DataFrame) -> pd.DataFrame:
    """The verdicts as texts; the column of other settings only if it has an entry."""
    table = pd.DataFrame([_texts(verdict) for _, verdict in verdicts.iterrows()])
    return table if table["with"].any() else table.drop(columns="with")


def _texts(verdict: pd.Series) -> dict[str, str]:
    half, num_seeds = verdict["half_width"], verdict["num_seeds"]
    num_missing = len(verdict["missing_seeds"].split())
    before = after = difference = ends = ""
    if num_seeds:
        # A difference is shown with one digit more than its interval supports: most are small against the spread.
        precision = half / 10 if half > 0 else None
        before, after = (rounded(verdict[side], precision) for side in ("before", "after"))
        size = verdict["difference"]
        difference = "+" * (size > 0) + (rounded(size, precision) if precision else significant(size, 3))
        ends = " to ".join(rounded(verdict[end], precision) for end in ("low", "high")) if precision else "no spread"
    further = verdict["further_seeds"]
    unknown = f"over {MOST_SEEDS:,}" if half > 0 else "no spread"
    time = _ratio(verdict["time_ratio"])
    if verdict["time_low"] == verdict["time_low"]:
        time += f" (95%: {verdict['time_low']:.2f} to {verdict['time_high']:.2f})"
    return {
        "change": verdict["change"],
        "with": verdict["with"],
        "figure": verdict["name"],
        "seeds": f"{num_seeds} of {num_seeds + num_missing}" if num_missing else str(num_seeds),
        "before": before,
        "after": after,
        "difference": difference,
        "95% interval": ends if num_seeds > 1 else "",
        "corrected p": significant(verdict["corrected_p"], 2) if num_seeds > 1 else "",
        "verdict": verdict["verdict"],
        "further seeds": "" if verdict["verdict"] != INCONCLUSIVE else unknown if pd.isna(further) else f"{further:,}",
        "FLOPs": _ratio(verdict["flops_ratio"]),
        "time": time,
        "memory": _ratio(verdict["memory_ratio"]),
    }


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value == value else ""
