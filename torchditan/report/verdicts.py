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

The verdicts are a DataFrame, one row for each figure of two cells: the columns of verdicts.csv, and
    others          ((axis, value), ...): the other settings that vary in the results
    name            of the figure, for readers
    has_interval    whether the interval says something: one of a few seeds can reach values that the figure cannot have
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from torchditan.ablation.grid import BATCH_SIZE, SEED
from torchditan.ablation.ledger import QUALITY
from torchditan.config.errors import option_error
from torchditan.evaluation.card_tables import columns, rounded, significant
from torchditan.report.effects import MEMORY, PER_DEVICE, THROUGHPUT, Metric, matched_pairs
from torchditan.report.grid_results import GridResults
from torchditan.report.labels import TOO_FEW_RUNS, axis_name, change_name, count, csv_of, value_name

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

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
    "diffusion.ingredients",
)
"""Options of these sections that change only the training loss."""
_CAN_BE_NEGATIVE = ("KID",)
"""Figures whose unbiased estimates are negative at times; all others are losses, distances and shares."""
_WIDEST_RATIO = 10.0
"""Of the ends of a ratio's interval, above which it says only that there are too few runs."""
_MOST_ROWS = 100  # in a terminal
_CHANGE = ["grid", "axis", "from_value", "to_value"]
_CSV_COLUMNS = [
    *(*_CHANGE, "from_run", "to_run", "figure", "better", "seeds", "missing_seeds"),
    *("before", "after", "difference", "low", "high", "p", "corrected_p", "num_comparisons", "verdict"),
    *("further_seeds", "flops_ratio", "time_ratio", "time_low", "time_high", "memory_ratio"),
]
_HEADERS = (
    *("change", "with", "figure", "seeds", "before", "after", "difference", "95% interval", "corrected p", "verdict"),
    *("further seeds", "FLOPs", "time", "memory"),
)
NUMERIC = frozenset(_HEADERS[3:9]) | frozenset(_HEADERS[10:])


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
    import numpy as np
    from scipy.stats import ttest_1samp

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
    import numpy as np
    import pandas as pd

    ascending = pd.Series(p).dropna().sort_values()
    corrected = (ascending * np.arange(len(ascending), 0, -1)).cummax().clip(upper=1.0)
    return corrected.reindex(range(len(p))).to_numpy()


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


def judge(results: GridResults, figures: list[str] | None = None) -> pd.DataFrame:
    """Verdicts on all pairs of cells that differ in one setting, for every figure.

    Args:
        results: of one or more grids. Each is corrected for its own comparisons.
        figures: names of those to judge. Default: all figures of quality. If there are none, several seeds are judged
            by the training loss.

    Raises:
        ConfigError: a figure was not measured.
    """
    import pandas as pd

    metrics = _metrics(results, figures)
    axes = [*results.effects, *([BATCH_SIZE] if BATCH_SIZE in results.varied and not results.searched else [])]
    usual = matched_pairs(results.cells, results.axes, axes)
    found = []
    for source in results.sources:
        grid = results.runs.loc[results.runs["source"] == source, "grid"].iloc[0]
        baseline = _baseline(results, grid)
        pairs = matched_pairs(results.cells, results.axes, axes, baseline=baseline) if baseline else usual
        chosen = {name for kind in ("axes", "settings") for name in results.contents[grid].get(kind, ())}
        compared = [
            (pair, metric)
            for pair in pairs[pairs["source"] == source].itertuples()
            for metric in metrics
            if _is_comparable(pair.axis, metric, chosen)
        ]
        found += [_judge_grid(results, compared)] if compared else []
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=_CSV_COLUMNS)


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


def _judge_grid(results: GridResults, compared: list[tuple[Any, Metric]]) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    a, b = (np.array([getattr(pair, side) for pair, _ in compared]) for side in "ab")
    by_seed = {metric.column: _by_seed(results, metric.column) for _, metric in compared}
    before, after = (
        np.stack([by_seed[metric.column][row] for row, (_, metric) in zip(rows, compared, strict=True)])
        for rows in (a, b)
    )  # (comparisons, seeds)
    both = ~np.isnan(before) & ~np.isnan(after)
    one = np.isnan(before) != np.isnan(after)
    tests = paired_tests(after - before)
    table = pd.DataFrame(
        {
            **{name: [getattr(pair, name) for pair, _ in compared] for name in ("axis", "from_value", "to_value")},
            "grid": [pair.source for pair, _ in compared],
            "from_run": results.cells["run_name"].to_numpy()[a],
            "to_run": results.cells["run_name"].to_numpy()[b],
            "figure": [metric.column for _, metric in compared],
            "name": [metric.name for _, metric in compared],
            "better": [metric.better for _, metric in compared],
            "seeds": [" ".join(np.array(results.seeds)[known]) for known in both],
            "missing_seeds": [" ".join(np.array(results.seeds)[known]) for known in one],
            "num_seeds": tests.num_seeds,
            "before": pd.DataFrame(np.where(both, before, np.nan)).mean(axis=1),
            "after": pd.DataFrame(np.where(both, after, np.nan)).mean(axis=1),
            "difference": tests.mean,
            "half_width": tests.half_width,
            "low": tests.mean - tests.half_width,
            "high": tests.mean + tests.half_width,
            "p": tests.p,
            "corrected_p": holm(tests.p),
        }
    )
    is_decided = table["corrected_p"] <= LEVEL
    is_better = (table["difference"] > 0) == (table["better"] == "higher")
    table["verdict"] = np.select(
        [tests.num_seeds < 1, tests.num_seeds < 2, ~is_decided, is_better],
        [NOT_MEASURED, ONE_SEED, INCONCLUSIVE, BETTER],
        WORSE,
    )
    table["num_comparisons"] = table["p"].notna().sum()
    level = LEVEL / max(table["p"].notna().sum() - is_decided.sum(), 1)
    needed = [
        seeds_needed(mean, std, level=level) if word == INCONCLUSIVE else None
        for mean, std, word in zip(tests.mean, tests.std, table["verdict"], strict=True)
    ]
    further = (pd.Series(needed, dtype="Int64") - tests.num_seeds).clip(lower=1)
    others = [
        tuple((axis, cell[axis]) for axis in results.varied if axis != pair.axis)
        for (pair, _), (_, cell) in zip(compared, results.cells.iloc[a].iterrows(), strict=True)
    ]
    is_possible = table["figure"].str.startswith(_CAN_BE_NEGATIVE) | (
        table["half_width"] <= table[["before", "after"]].min(axis=1)
    )
    return table.assign(
        further_seeds=further,
        others=others,
        has_interval=table["half_width"].notna() & is_possible,
        **_costs(results, a, b),
    )


def _by_seed(results: GridResults, column: str) -> np.ndarray:
    """A column (cells, seeds) of `seed_cells`; NaN where a cell has no such seed."""
    import numpy as np

    table = np.full((len(results.cells), len(results.seeds)), np.nan)
    seeds = results.seed_cells[SEED].map(results.seeds.index).to_numpy(int)
    table[results.seed_cells["cell"].to_numpy(int), seeds] = results.seed_cells[column].to_numpy(float)
    return table


def _costs(results: GridResults, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Ratios, after / before, of FLOPs and time per image and of memory: geometric means over the seeds of both."""
    import numpy as np

    per_device = _by_seed(results, PER_DEVICE)
    values = {
        "flops": _by_seed(results, "tflops_per_device_mean") / per_device,
        "time": 1 / _by_seed(results, THROUGHPUT.column),
        "memory": _by_seed(results, MEMORY.column),
    }
    tests = {name: paired_tests(np.log(table[b] / table[a])) for name, table in values.items()}
    time = tests["time"]
    ends = {"time_low": time.mean - time.half_width, "time_high": time.mean + time.half_width}
    logarithms = {f"{name}_ratio": test.mean for name, test in tests.items()} | ends
    return {name: np.exp(value) for name, value in logarithms.items()}


def verdicts_csv(verdicts: pd.DataFrame) -> bytes:
    """verdicts.csv. Numbers that do not exist are empty."""
    return csv_of(verdicts[_CSV_COLUMNS])


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
    return f"{', '.join(parts)}, of {count(len(verdicts), 'comparison')}."


def guarantee(verdicts: pd.DataFrame) -> str:
    """What the correction of p promises, and how many comparisons lack seeds."""
    tested = verdicts[verdicts["p"].notna()].drop_duplicates("grid")["num_comparisons"]
    if tested.empty:
        return ""
    numbers = " and ".join(f"{number:,}" for number in tested.unique())
    plural = "comparison" if set(tested) == {1} else "comparisons"
    num_missing = int((verdicts["missing_seeds"] != "").sum())
    warning = f"{count(num_missing, 'comparison')} without some seeds: a run of one side failed or is missing. "
    return (
        f"{warning if num_missing else ''}Corrected for {numbers} {plural} per grid: if no setting has an effect, the "
        f"chance of any better or worse is at most {LEVEL:.0%}."
    )


def verdict_names(verdicts: pd.DataFrame) -> list[tuple[str, str]]:
    """(change, other settings) of each verdict: those other settings that vary between the pairs of one change."""
    alike: dict[tuple[tuple[str, ...], str], set[str]] = {}
    keys = list(verdicts[_CHANGE].itertuples(index=False, name=None))
    for key, others in zip(keys, verdicts["others"], strict=True):
        for axis, value in others:
            alike.setdefault((key, axis), set()).add(value)
    has_several = verdicts["grid"].nunique() > 1
    return [
        (
            (f"{key[0]}, " if has_several else "") + change_name(*key[1:]),
            ", ".join(
                f"{axis_name(axis)} {value_name(axis, value)}" for axis, value in others if len(alike[key, axis]) > 1
            ),
        )
        for key, others in zip(keys, verdicts["others"], strict=True)
    ]


def verdict_table(verdicts: pd.DataFrame) -> pd.DataFrame:
    """The verdicts as texts; the column of other settings only if it has an entry."""
    import pandas as pd

    rows = [
        (*name, *_cells_of(verdict))
        for verdict, name in zip(verdicts.itertuples(), verdict_names(verdicts), strict=True)
    ]
    table = pd.DataFrame(rows, columns=_HEADERS)
    return table if table["with"].any() else table.drop(columns="with")


def _cells_of(verdict: Any) -> list[str]:
    # A difference is shown with one digit more than its interval supports: most are small against the spread.
    precision = verdict.half_width / 10 if verdict.has_interval and verdict.half_width else None
    num_missing = len(verdict.missing_seeds.split())
    measured = ["", "", ""]
    if verdict.num_seeds:
        difference = significant(verdict.difference, 3) if precision is None else rounded(verdict.difference, precision)
        measured = [rounded(verdict.before, precision), rounded(verdict.after, precision)]
        measured.append(f"+{difference}" if verdict.difference > 0 else difference)
    return [
        verdict.name,
        f"{verdict.num_seeds} of {verdict.num_seeds + num_missing}" if num_missing else str(verdict.num_seeds),
        *measured,
        _interval(verdict),
        significant(verdict.corrected_p, 2) if verdict.p == verdict.p else "",
        verdict.verdict,
        _further(verdict),
        _ratio(verdict.flops_ratio),
        _time(verdict),
        _ratio(verdict.memory_ratio),
    ]


def _interval(verdict: Any) -> str:
    if verdict.num_seeds < 2:
        return ""
    if not verdict.half_width:
        return "no spread"
    if not verdict.has_interval:
        return TOO_FEW_RUNS
    return " to ".join(rounded(end, verdict.half_width / 10) for end in (verdict.low, verdict.high))


def _further(verdict: Any) -> str:
    import pandas as pd

    if verdict.verdict != INCONCLUSIVE:
        return ""
    if not pd.isna(verdict.further_seeds):
        return f"{verdict.further_seeds:,}"
    return f"over {MOST_SEEDS:,}" if verdict.half_width else "no spread"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value == value else ""


def _time(verdict: Any) -> str:
    """`1.05 (95%: 0.98 to 1.12)`: the ratio with its interval, because other work on the machine changes it."""
    low, high = verdict.time_low, verdict.time_high
    if low != low:
        return _ratio(verdict.time_ratio)
    return (
        f"{verdict.time_ratio:.2f} ({f'95%: {low:.2f} to {high:.2f}' if high <= _WIDEST_RATIO * low else TOO_FEW_RUNS})"
    )
