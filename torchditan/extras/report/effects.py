# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The effect of each setting of a grid: pairs of cells that differ only in that setting, and statistics of the changes.

Notable:
- The change is computed within each pair, then the median over pairs. Means over all compiled and all other runs would
  compare different batch sizes, because different runs fit into memory.
- Both sides of a pair have the same batch. Only where the grid searched for the batch, each has the one that was found.
- With several grids, or several kinds of device, the first one is also compared with each other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from torchditan.extras.ablation.grid import BATCH_SIZE, PARALLEL
from torchditan.extras.report.grids import Grids
from torchditan.extras.report.labels import ordered_values

PER_DEVICE = "images_per_second_per_device_mean"
_ALL_PAIRS_UP_TO = 4  # values of an axis; with more (learning rates) only neighbours are compared
_PAIR_COLUMNS = ["grid", "axis", "from_value", "to_value", "a", "b"]
EFFECT_COLUMNS = [
    *("comparison", "grid", "axis", "from_value", "to_value", "metric", "better", "num_pairs", "median_percent"),
    *("quartile_1_percent", "quartile_3_percent", "minimum_percent", "maximum_percent", "num_better"),
    *("noise_percent", "num_mixed"),
]
"""Of effects.csv."""


class Metric(NamedTuple):
    """A column of the ledger, its name in sentences, and its better direction."""

    column: str
    name: str
    higher_is_better: bool
    spread: str | None = None  # column with its standard deviation over the window

    @property
    def better(self) -> str:
        return "higher" if self.higher_is_better else "lower"


THROUGHPUT = Metric("images_per_second_mean", "throughput", True, "images_per_second_std")
MFU = Metric("mfu_mean", "MFU", True, "mfu_std")
MEMORY = Metric("peak_memory_gib", "peak memory", False)
METRICS = (THROUGHPUT, MFU, MEMORY)


def find_pairs(grids: Grids) -> pd.DataFrame:
    """All pairs of cells that differ in one setting, with their changes: the columns of pairs.csv, and `a` and `b`."""
    first, *others = grids.sources
    baseline = {"source": first} if others else {}
    return with_changes(matched_pairs(grids, [*grids.effects, *baseline], baseline=baseline), grids.cells)


def matched_pairs(grids: Grids, effects: Sequence[str], *, baseline: Mapping[str, str]) -> pd.DataFrame:
    """Pairs of cells that are equal in every axis, source and number of devices included, except one of `effects`.

    Returns one row per pair: `grid`, `axis`, `from_value`, `to_value`, and `a` and `b`, the row numbers in `cells`. For
    an axis in `baseline`, this value is compared with each other one, and no others are.
    """
    cells = grids.cells.copy()
    cells[BATCH_SIZE] = cells[BATCH_SIZE].where(~cells["grid"].isin(grids.searched), "auto")
    frames = [pd.DataFrame(columns=_PAIR_COLUMNS).astype({"a": int, "b": int})]
    for axis in effects:
        # Between meshes of different sizes, or one job on more devices, the difference is not that of the mode alone.
        rest = [name for name in ("source", "num_devices", *grids.axes) if name != axis]
        others = cells.groupby(rest, sort=False, dropna=False).ngroup()
        table = pd.DataFrame({"others": others, "value": cells[axis], "row": range(len(cells))})
        wide = table.pivot_table(index="others", columns="value", values="row", aggfunc="last", sort=False)
        first = baseline.get(axis)
        if first is None:
            ordered = ordered_values(axis, cells[axis])
            everything = axis == PARALLEL or len(ordered) <= _ALL_PAIRS_UP_TO
            compared = list(combinations(ordered, 2) if everything else pairwise(ordered))
        else:
            compared = [(first, end) for end in wide if end != first and first in wide]
        for start, end in compared:
            both = wide[[start, end]].dropna().astype(int)
            pair = pd.DataFrame({"a": both[start].to_numpy(), "b": both[end].to_numpy()})
            pair["grid"] = cells["source"].to_numpy()[pair["b"]]
            frames.append(pair.assign(axis=axis, from_value=start, to_value=end))
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)[_PAIR_COLUMNS]


def with_changes(pairs: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """`pairs` with the percent change of every metric, its noise, and whether commit or versions differ (`mixed`)."""
    a, b = pairs["a"].to_numpy(int), pairs["b"].to_numpy(int)
    names, made_by = cells["run_name"].to_numpy(), cells["made_by"].to_numpy()
    comparison = np.where(pairs["axis"] == "source", "between folders", "same batch")
    pairs = pairs.assign(comparison=comparison, from_run=names[a], to_run=names[b])
    for metric in METRICS:
        values = cells[metric.column].to_numpy(float)
        pairs[f"{metric.column}_from"], pairs[f"{metric.column}_to"] = values[a], values[b]
        pairs[f"{metric.column}_percent"] = 100 * (values[b] / values[a] - 1)
        noise = np.zeros(len(cells))
        if metric.spread is not None:
            steps = cells["window"].to_numpy(float) * cells["num_repeats"].to_numpy(float)
            noise = np.nan_to_num(cells[metric.spread].to_numpy(float) / values) / np.sqrt(np.maximum(steps, 1))
        # Two standard errors of the difference from the steps, or its 95% interval over seeds if that is wider.
        seeds = np.nan_to_num(cells[f"{metric.column}_half"].to_numpy(float) / values)
        pairs[f"{metric.column}_noise"] = np.maximum(
            200 * np.hypot(noise[a], noise[b]), 100 * np.hypot(seeds[a], seeds[b])
        )
    several = cells["num_made_by"].to_numpy(int) > 1
    return pairs.assign(mixed=(made_by[a] != made_by[b]) | several[a] | several[b])


def pairs_table(pairs: pd.DataFrame) -> pd.DataFrame:
    """pairs.csv: every pair, by the names of its runs."""
    first = ["comparison", *_PAIR_COLUMNS[:4], "from_run", "to_run"]
    left_out = [*first, "a", "b", *(name for name in pairs if name.endswith("_noise"))]
    return pairs[[*first, *(name for name in pairs if name not in left_out)]]


def find_effects(pairs: pd.DataFrame) -> pd.DataFrame:
    """Statistics of the changes over the pairs of each effect: the columns of effects.csv, and for readers `name` of
    the metric, median `before` and `after`, and `is_clear`.

    An effect is clear if the middle half of the pairs has one sign and the median exceeds the noise: the difference to
    expect of two runs of equal speed, from the spread of their steps.
    """
    rows = []
    for key, group in pairs.groupby(["comparison", *_PAIR_COLUMNS[:4]], sort=False):
        for metric in METRICS:
            known = group[group[f"{metric.column}_percent"].notna()]
            percent = known[f"{metric.column}_percent"]
            minimum, quartile_1, median, quartile_3, maximum = percent.quantile([0, 0.25, 0.5, 0.75, 1])
            noise = known[f"{metric.column}_noise"].median()
            better = percent > 0 if metric.higher_is_better else percent < 0
            statistics = (len(known), median, quartile_1, quartile_3, minimum, maximum, better.sum(), noise)
            sides = (known[f"{metric.column}_{side}"].median() for side in ("from", "to"))
            is_clear = quartile_1 * quartile_3 > 0 and abs(median) > noise
            of_metric = (metric.column, metric.better, *statistics, group["mixed"].sum())
            rows.append((*key, *of_metric, metric.name, *sides, is_clear))
    return pd.DataFrame(rows, columns=[*EFFECT_COLUMNS, "name", "before", "after", "is_clear"])
