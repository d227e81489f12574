# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The effect of one setting: pairs of cells that differ only in that setting, and statistics of their changes.

Notable:
- The change is computed within each pair, then the median over pairs. Means over all compiled and all other runs would
  compare different batch sizes, because different runs fit into memory.
- There are three separate comparisons: at the *same batch*; each side at its *best batch* (the fastest one tried); and
  the same setting *between folders*.
- A best-batch pair counts only if both sides were tried at the same batches. Otherwise the side with more tries would
  win. In a grid with autotuned batches, each side uses the batch that the search found.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import TYPE_CHECKING, NamedTuple

from torchditan.ablation.grid import BATCH_SIZE, PARALLEL
from torchditan.report.grid_results import GridResults, ordered_values

if TYPE_CHECKING:
    import pandas as pd

_ALL_PAIRS_UP_TO = 4  # values of an axis; with more (seeds, learning rates) only neighbours are compared


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


def matched_pairs(cells: pd.DataFrame, axes: tuple[str, ...], effects: list[str]) -> pd.DataFrame:
    """Pairs of cells of one source that are equal in every axis except one of `effects`.

    Returns one row per pair: `source`, `axis`, `from_value`, `to_value`, and `a` and `b`, the row numbers in `cells`.
    Cells are unique in (source, axes), so pairs are unique too. Runs on different numbers of devices never pair.
    """
    import pandas as pd

    columns = ["source", "axis", "from_value", "to_value", "a", "b"]
    frames = [pd.DataFrame(columns=columns).astype({"a": int, "b": int})]
    for axis in effects:
        rest = ["source", "num_devices", *(other for other in axes if other != axis)]
        others = cells.groupby(rest, sort=False, dropna=False).ngroup()
        table = pd.DataFrame({"others": others, "value": cells[axis], "row": range(len(cells))})
        wide = table.pivot(index="others", columns="value", values="row")
        for start, end in compared_values(axis, cells[axis].unique()):
            both = wide[[start, end]].dropna().astype(int)
            if len(both):
                pair = pd.DataFrame({"a": both[start].to_numpy(), "b": both[end].to_numpy()})
                pair["source"] = cells["source"].to_numpy()[pair["a"]]
                frames.append(pair.assign(axis=axis, from_value=start, to_value=end)[columns])
    return pd.concat(frames[1:] or frames, ignore_index=True)


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
    import pandas as pd

    first, *others = results.sources
    cells = results.cells.assign(row=range(len(results.cells)))
    columns = ["source", "axis", "from_value", "to_value", "a", "b"]
    frames = [pd.DataFrame(columns=columns).astype({"a": int, "b": int})]
    key = list(results.axes)
    start = cells[cells["source"] == first][[*key, "row"]]
    for other in others:
        end = cells[cells["source"] == other][[*key, "row"]]
        both = start.merge(end, on=key, suffixes=("_a", "_b"))
        pair = pd.DataFrame({"a": both["row_a"], "b": both["row_b"]})
        pair = pair.assign(source=other, axis="source", from_value=first, to_value=other)
        frames.append(pair[columns])
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


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


def change_of(pairs: pd.DataFrame, metric: Metric) -> Change:
    """Median, quartiles (linear interpolation) and extremes over the pairs with the metric on both sides."""
    import numpy as np

    percent = pairs[f"{metric.column}_percent"].to_numpy(float)
    known = ~np.isnan(percent)
    percent = percent[known]
    if not len(percent):
        nan = float("nan")
        return Change(0, nan, nan, nan, nan, nan, 0, nan)
    minimum, quartile_1, median, quartile_3, maximum = np.quantile(percent, [0, 0.25, 0.5, 0.75, 1]).tolist()
    better = percent > 0 if metric.higher_is_better else percent < 0
    noise = float(np.median(pairs[f"{metric.column}_noise"].to_numpy(float)[known]))
    return Change(len(percent), median, quartile_1, quartile_3, minimum, maximum, int(better.sum()), noise)
