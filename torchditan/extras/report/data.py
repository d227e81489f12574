# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the sections of a report show: run directories one by one, or the settings of grids; and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from torchditan.extras.ablation.grid import BATCH_SIZE, FLAVOR, PATCH_SIZE, PRECISION, STANDARD_AXES
from torchditan.extras.evaluation.card import Card, cards_of_run
from torchditan.extras.report.effects import find_effects, find_pairs
from torchditan.extras.report.figures import Curve
from torchditan.extras.report.grids import Grids, half_width
from torchditan.extras.report.labels import axis_name, value_name
from torchditan.extras.report.runs import CurvePair, Run, compared, curve_pairs, metrics_of
from torchditan.extras.report.verdicts import judge

_MOST_SETTINGS = 16
"""With more, colours and dashes cannot tell the curves apart."""


@dataclass(frozen=True)
class Data:
    """`runs` of a page about runs, or `grids` and the names of those `figures` to judge, of which None are all."""

    runs: Sequence[Run] = ()
    grids: Grids | None = None
    figures: list[str] | None = None

    @cached_property
    def table(self) -> pd.DataFrame:
        """The runs side by side: compare.csv."""
        return compared(self.runs)

    @cached_property
    def curve_pairs(self) -> list[CurvePair]:
        return curve_pairs(self.runs)

    @cached_property
    def cards(self) -> list[Card | None]:
        """The newest evaluation of each run."""
        return [next(iter(cards_of_run(run.path)), None) for run in self.runs]

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Of cells that differ in one setting."""
        return find_pairs(self.grids) if self.grids else pd.DataFrame()

    @cached_property
    def effects(self) -> pd.DataFrame:
        return find_effects(self.pairs) if self.grids else pd.DataFrame()

    @cached_property
    def verdicts(self) -> pd.DataFrame:
        return judge(self.grids, self.figures) if self.grids else pd.DataFrame()

    def curves(self, key: str) -> list[Curve]:
        """The curves of a key of metrics.jsonl over steps, named after their runs, or settings of the grids.

        Completed runs of a grid that differ only in the training seed are one curve, the mean with its 95% interval.
        """
        if self.grids is None:
            found = [Curve(run.label, run.curve(key)) for run in self.runs]
            return [curve for curve in found if len(curve.values)]
        runs = self.grids.runs.assign(setting=self.settings, is_done=self.grids.runs["status"] == "completed")
        alike: dict[tuple[Any, ...], list[tuple[pd.Series, pd.Series]]] = {}
        for (_, run), metrics in zip(runs.iterrows(), self._metrics, strict=True):
            values = metrics[key].dropna() if key in metrics else ()
            if len(values) > 1:
                cell = (*run[["source", "repeat", *self.grids.axes]], run["is_done"] or run["run_name"])
                alike.setdefault(cell, []).append((run, values))
        return [_mean_curve(found) for found in alike.values()]

    @cached_property
    def _metrics(self) -> list[pd.DataFrame]:
        return [metrics_of(folder) for folder in self.grids.runs["folder"]] if self.grids else []

    @cached_property
    def settings(self) -> pd.Series:
        """What the curves of a grid are named after, by run: `model.mlp swiglu`, or how the run differs from the first.

        Empty if the runs do not differ, or in too many ways. What changes only the speed has no name.
        """
        assert self.grids is not None
        runs, learned = self.grids.runs, (FLAVOR, PATCH_SIZE, BATCH_SIZE)
        axes = [axis for axis in self.grids.varied if axis in learned or axis not in STANDARD_AXES]
        names = pd.Series("", index=runs.index)
        for axis in axes:
            first = runs[axis].iloc[0] if len(axes) > 1 else None
            names += [
                "" if value == first else f", {axis_name(axis)} {value_name(axis, value)}" for value in runs[axis]
            ]
        names = names.str.removeprefix(", ").replace("", "baseline")
        return names if 1 < names.nunique() <= _MOST_SETTINGS else pd.Series("", index=runs.index)


def _mean_curve(runs: list[tuple[pd.Series, pd.Series]]) -> Curve:
    """The curve of one setting: of its only run, or the mean over its seeds at the steps that all logged."""
    run, values = runs[0]
    half_widths = None
    if len(runs) > 1:
        seeds = pd.concat([values for _, values in runs], axis=1, join="inner")
        values = seeds.mean(axis=1)
        half_widths = half_width(seeds.std(axis=1), len(runs))
    has_failed = not run["is_done"] and run["status"] != "skipped"
    return Curve(run["setting"], values, half_widths, value_name(PRECISION, run[PRECISION]), has_failed)
