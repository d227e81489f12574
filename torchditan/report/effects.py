# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The effect of each setting of a grid: pairs of cells that differ only in that setting, and statistics of the changes.

Notable:
- The change is computed within each pair, then the median over pairs. Means over all compiled and all other runs would
  compare different batch sizes, because different runs fit into memory.
- There are three separate comparisons: at the *same batch*; each side at its *best batch* (the fastest one tried); and
  the same setting *between folders*.
- A best-batch pair counts only if both sides were tried at the same batches. Otherwise the side with more tries would
  win. In a grid with autotuned batches, each side uses the batch that the search found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, NamedTuple

from torchditan.ablation.grid import BATCH_SIZE, COMPILE, PARALLEL, parallel_degrees
from torchditan.report.grid_results import GridResults, ordered_values, parallel_mode, work_axes
from torchditan.report.labels import csv_of

if TYPE_CHECKING:
    import pandas as pd

PER_DEVICE = "images_per_second_per_device_mean"
SAME_BATCH, BEST_BATCH, BETWEEN_FOLDERS = "same batch", "best batch", "between folders"
_ALL_PAIRS_UP_TO = 4  # values of an axis; with more (learning rates) only neighbours are compared
_PAIR_COLUMNS = ["source", "axis", "from_value", "to_value", "a", "b"]
_EFFECT_COLUMNS = (
    *("comparison", "grid", "axis", "from_value", "to_value", "metric", "better", "num_pairs", "median_percent"),
    *("quartile_1_percent", "quartile_3_percent", "minimum_percent", "maximum_percent", "num_better"),
    *("noise_percent", "num_mixed"),
)


class Metric(NamedTuple):
    """A column of the ledger, its name in sentences, and its better direction."""

    column: str
    name: str
    unit: str
    higher_is_better: bool
    spread: str | None  # column with its standard deviation over the window

    @property
    def better(self) -> str:
        return "higher" if self.higher_is_better else "lower"


THROUGHPUT = Metric("images_per_second_mean", "throughput", "images/s", True, "images_per_second_std")
MFU = Metric("mfu_mean", "MFU", "%", True, "mfu_std")
MEMORY = Metric("peak_memory_gib", "peak memory", "GiB", False, None)
METRICS = (THROUGHPUT, MFU, MEMORY)


class Change(NamedTuple):
    """Percent changes of a metric over matched pairs; NaN without pairs."""

    num_pairs: int
    median: float
    quartile_1: float
    quartile_3: float
    minimum: float
    maximum: float
    num_better: int
    noise: float  # percent: expected difference of two runs of equal speed, from the spread of their steps

    @property
    def is_clear(self) -> bool:
        """Whether the middle half of the pairs has one sign and the median exceeds the noise."""
        return self.num_pairs > 0 and self.quartile_1 * self.quartile_3 > 0 and abs(self.median) > self.noise


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of one step of one axis in one source. `key` is (axis, from_value, to_value); `pairs` are its rows."""

    source: str
    key: tuple[str, str, str]
    pairs: pd.DataFrame

    @property
    def axis(self) -> str:
        return self.key[0]

    def change(self, metric: Metric) -> Change:
        """Median, quartiles (linear interpolation) and extremes over the pairs with the metric on both sides."""
        import numpy as np

        known = self.pairs[self.pairs[f"{metric.column}_percent"].notna()]
        percent = known[f"{metric.column}_percent"].to_numpy(float)
        if known.empty:
            nan = math.nan
            return Change(0, nan, nan, nan, nan, nan, 0, nan)
        minimum, quartile_1, median, quartile_3, maximum = np.quantile(percent, [0, 0.25, 0.5, 0.75, 1]).tolist()
        better = percent > 0 if metric.higher_is_better else percent < 0
        noise = float(known[f"{metric.column}_noise"].median())
        return Change(len(percent), median, quartile_1, quartile_3, minimum, maximum, int(better.sum()), noise)


class Repayment(NamedTuple):
    """Start-up cost of compiling, and the number of steps after which it is repaid; medians over pairs."""

    num_pairs: int
    seconds: float
    steps: float | None  # None if compiled steps are not faster


@dataclass(frozen=True)
class Effects:
    """All comparisons of the results by kind. Pairs include their changes. Effects without pairs are listed too."""

    same_batch: list[Effect]
    best_batch: list[Effect]
    between_folders: list[Effect]
    pairs: dict[str, pd.DataFrame]
    num_unequal_batches: int


def find_effects(results: GridResults) -> Effects:
    """Compute all comparisons of the cells."""
    cells = results.cells
    best, num_unequal = best_batch_pairs(results)
    same = with_changes(matched_pairs(cells, results.axes, results.effects), cells)
    best = with_changes(best, cells)
    between = with_changes(folder_pairs(results), cells)
    first, *others = results.sources
    return Effects(
        same_batch=_by_axis(results, same),
        best_batch=_by_axis(results, best),
        between_folders=[
            Effect(other, ("source", first, other), between[between["source"] == other]) for other in others
        ],
        pairs={SAME_BATCH: same, BEST_BATCH: best, BETWEEN_FOLDERS: between},
        num_unequal_batches=num_unequal,
    )


def _by_axis(results: GridResults, pairs: pd.DataFrame) -> list[Effect]:
    """Effects of all sources, ordered by axis and value. A varied axis without pairs gets one empty effect."""
    found = []
    groups = dict(list(pairs.groupby(["source", "axis", "from_value", "to_value"], sort=False)))
    for axis in results.effects:
        for start, end in compared_values(axis, results.runs[axis].unique()):
            if axis == PARALLEL and math.prod(parallel_degrees(start)) != math.prod(parallel_degrees(end)):
                continue  # covered by scaling
            for source in results.sources:
                here = results.runs[results.runs["source"] == source][axis]
                if start in here.values and end in here.values:
                    group = groups.get((source, axis, start, end), pairs.iloc[:0])
                    found.append(Effect(source, (axis, start, end), group))
    return found


def matched_pairs(
    cells: pd.DataFrame, axes: tuple[str, ...], effects: list[str], *, baseline: Mapping[str, str] = {}
) -> pd.DataFrame:
    """Pairs of cells of one source that are equal in every axis except one of `effects`.

    Returns one row per pair: `source`, `axis`, `from_value`, `to_value`, and `a` and `b`, the row numbers in `cells`.
    Cells are unique in (source, axes), so pairs are unique too. Runs on different numbers of devices never pair. For an
    axis in `baseline`, this value is compared with each other one, and no others are.
    """
    import pandas as pd

    frames = []
    for axis in effects:
        rest = ["source", "num_devices", *(other for other in axes if other != axis)]
        others = cells.groupby(rest, sort=False, dropna=False).ngroup()
        table = pd.DataFrame({"others": others, "value": cells[axis], "row": range(len(cells))})
        wide = table.pivot(index="others", columns="value", values="row")
        values = cells[axis].unique()
        first = baseline.get(axis)
        compared = compared_values(axis, values) if first is None else [(first, end) for end in values if end != first]
        for start, end in compared:
            if start not in wide:
                continue
            both = wide[[start, end]].dropna().astype(int)
            pair = pd.DataFrame({"a": both[start].to_numpy(), "b": both[end].to_numpy()})
            pair["source"] = cells["source"].to_numpy()[pair["a"]]
            frames.append(pair.assign(axis=axis, from_value=start, to_value=end))
    return _joined(frames)


def _joined(frames: list[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    empty = pd.DataFrame(columns=_PAIR_COLUMNS).astype({"a": int, "b": int})
    return pd.concat([frame for frame in frames if len(frame)] or [empty], ignore_index=True)[_PAIR_COLUMNS]


def compared_values(axis: str, values: object) -> list[tuple[str, str]]:
    """The compared values of an axis: all pairs if there are few values, else neighbours."""
    ordered = ordered_values(axis, values)
    everything = axis == PARALLEL or len(ordered) <= _ALL_PAIRS_UP_TO
    return list(combinations(ordered, 2) if everything else pairwise(ordered))


def best_batch_pairs(results: GridResults) -> tuple[pd.DataFrame, int]:
    """Matched pairs of the fastest batch of each setting, and the number excluded because the tried batches differ.

    A batch counts as tried if its run completed, ran out of memory, or was skipped after a smaller batch did.
    """
    setting = ["source", *(axis for axis in results.axes if axis != BATCH_SIZE)]
    cells = results.cells
    if cells.empty:
        return matched_pairs(cells, results.axes, []), 0
    fastest = cells.groupby(setting, sort=False, dropna=False)[THROUGHPUT.column].idxmax()
    best = cells.loc[fastest.to_numpy()]
    tried = results.runs[results.runs["status"].isin(("completed", "oom", "skipped"))]
    batches = tried.groupby(setting, sort=False, dropna=False)[BATCH_SIZE].agg(
        lambda values: " ".join(sorted(set(values)))
    )
    best = best.join(batches.rename("tried"), on=setting)
    axes = tuple(axis for axis in results.axes if axis != BATCH_SIZE)
    found = matched_pairs(best.reset_index(drop=True), axes, results.effects)
    index = best.index.to_numpy()
    tried_at = best["tried"].to_numpy()
    searched = best["grid"].isin(results.searched).to_numpy()
    same = (tried_at[found["a"]] == tried_at[found["b"]]) | searched[found["a"]]
    found[["a", "b"]] = index[found[["a", "b"]].to_numpy()]
    return found[same].reset_index(drop=True), int((~same).sum())


def folder_pairs(results: GridResults) -> pd.DataFrame:
    """Pairs of the same setting in the first source and in each other source: `axis` is "source"."""
    first, *others = results.sources
    cells = results.cells.assign(row=range(len(results.cells)))
    key = list(results.axes)
    start = cells[cells["source"] == first][[*key, "row"]]
    frames = []
    for other in others:
        end = cells[cells["source"] == other][[*key, "row"]]
        both = start.merge(end, on=key, suffixes=("_a", "_b")).rename(columns={"row_a": "a", "row_b": "b"})
        frames.append(both[["a", "b"]].assign(source=other, axis="source", from_value=first, to_value=other))
    return _joined(frames)


def with_changes(pairs: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """`pairs` with the percent change of every metric, its noise, and whether commit or versions differ (`mixed`)."""
    import numpy as np

    pairs = pairs.copy()
    a, b = pairs["a"].to_numpy(int), pairs["b"].to_numpy(int)
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
    made_by, several = cells["made_by"].to_numpy(), cells["num_made_by"].to_numpy(int) > 1
    pairs["mixed"] = (made_by[a] != made_by[b]) | several[a] | several[b]
    return pairs


def repayment(effect: Effect, cells: pd.DataFrame) -> Repayment | None:
    """Start-up cost of compiling relative to the time saved per compiled step; None if not measured."""
    import numpy as np

    assert effect.axis == COMPILE, effect.axis
    a, b = effect.pairs["a"].to_numpy(int), effect.pairs["b"].to_numpy(int)
    start = cells["compile_s"].to_numpy(float)
    step = cells["step_time_s_mean"].to_numpy(float)
    cost = start[b] - np.nan_to_num(start[a])  # eager: its first step, if recorded
    known = ~np.isnan(cost) & (cost > 0)
    if not known.any():
        return None
    saved = (step[a] - step[b])[known]
    steps = np.where(saved > 0, cost[known] / np.where(saved > 0, saved, 1), np.inf)
    median = float(np.median(steps))
    return Repayment(int(known.sum()), float(np.median(cost[known])), median if np.isfinite(median) else None)


def scaling(results: GridResults) -> pd.DataFrame:
    """Throughput per device on more devices, relative to the same setting on the fewest devices.

    The batch per device is constant (weak scaling). Each mode starts at one device, which belongs to all modes, or at
    the fewest devices of that mode. Columns: `source`, `mode`, `num_devices`, `part` (median), `num_pairs`.
    """
    import pandas as pd

    cells = results.cells.assign(mode=[parallel_mode(value) for value in results.cells[PARALLEL]])
    cells = cells[cells[PER_DEVICE].notna()]
    others = ["source", *(axis for axis in results.axes if axis != PARALLEL)]
    rows = []
    for mode in ("FSDP", "HSDP", "DDP"):
        if mode not in set(cells["mode"]):
            continue
        line = cells[cells["mode"].isin(("one device", mode))]
        fewest = line.groupby("source")["num_devices"].transform("min")
        base = line[line["num_devices"] == fewest].groupby(others, dropna=False)[PER_DEVICE].mean()
        joined = line.join(base.rename("base"), on=others)
        joined["part"] = joined[PER_DEVICE] / joined["base"]
        known = joined[joined["part"].notna()]
        for (source, devices), part in known.groupby(["source", "num_devices"])["part"]:
            rows.append((source, mode, int(devices), float(part.median()), len(part)))
    found = pd.DataFrame(rows, columns=["source", "mode", "num_devices", "part", "num_pairs"])
    counts = found.groupby(["source", "mode"])["num_devices"].transform("nunique")
    return found[counts > 1].reset_index(drop=True)


def frontier(cells: pd.DataFrame) -> pd.DataFrame:
    """Pareto-optimal cells in memory and throughput per device, for each source, model and patch size.

    Patch sizes and models do different work, so each has its own frontier. Sorted by memory within each.
    """
    work = ["source", *work_axes(cells.columns)]
    known = cells[cells[MEMORY.column].notna() & cells[PER_DEVICE].notna()]
    ordered = known.sort_values(
        [*work, MEMORY.column, PER_DEVICE], ascending=[True] * (len(work) + 1) + [False], kind="stable"
    )
    keys = [ordered[name] for name in work]
    fastest_so_far = ordered[PER_DEVICE].groupby(keys, sort=False).cummax()
    is_first = fastest_so_far.groupby(keys, sort=False).shift() < fastest_so_far
    return ordered[is_first | ~ordered.duplicated(work)]


def fastest(results: GridResults) -> pd.DataFrame:
    """The fastest cell of each source, model, resolution, patch size and number of devices, the fastest first."""
    cells = results.cells
    if cells.empty:
        return cells
    groups = cells.groupby(["source", *work_axes(results.axes), "num_devices"], sort=False, dropna=False)
    best = cells.loc[groups[THROUGHPUT.column].idxmax()]
    return best.sort_values(THROUGHPUT.column, ascending=False, kind="stable")


def largest_batches(results: GridResults) -> pd.DataFrame:
    """For each setting that reached its memory limit: the largest batch that ran, and the smallest that did not fit."""
    setting = ["source", *(axis for axis in results.axes if axis != BATCH_SIZE)]
    runs = results.runs
    fits = runs[runs["status"] == "completed"].groupby(setting, sort=False, dropna=False)["batch"].max()
    fails = runs[runs["status"] == "oom"].groupby(setting, sort=False, dropna=False)["batch"].min()
    return fails.rename("fails").to_frame().join(fits.rename("fits")).reset_index()


def effects_csv(found: Effects) -> bytes:
    """effects.csv: all effects on all metrics, one row each."""
    import pandas as pd

    kinds = {SAME_BATCH: found.same_batch, BEST_BATCH: found.best_batch, BETWEEN_FOLDERS: found.between_folders}
    rows = [
        (
            comparison,
            effect.source,
            *effect.key,
            metric.column,
            metric.better,
            *effect.change(metric),
            int(effect.pairs["mixed"].sum()),
        )
        for comparison, effects in kinds.items()
        for effect in effects
        for metric in METRICS
    ]
    return csv_of(pd.DataFrame(rows, columns=_EFFECT_COLUMNS))


def pairs_csv(found: Effects, cells: pd.DataFrame) -> bytes:
    """pairs.csv: every pair of every comparison, by the names of its runs."""
    import pandas as pd

    names = cells["run_name"].to_numpy()
    frames = []
    for comparison, pairs in found.pairs.items():
        frame = pairs.rename(columns={"source": "grid"}).drop(columns=["a", "b"])
        frame = frame.drop(columns=[name for name in frame if name.endswith("_noise")])
        frame.insert(0, "comparison", comparison)
        frame.insert(5, "from_run", names[pairs["a"].to_numpy(int)])
        frame.insert(6, "to_run", names[pairs["b"].to_numpy(int)])
        frames.append(frame)
    return csv_of(pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True))
