# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reads the ledgers of grids, and folders of runs that no grid made, into one table of runs and one of settings.

Notable:
- A *source* is one grid on one device. A grid on two kinds of device is two sources, so only comparisons between
  devices mix them.
- A *cell* is one setting of all axes in one source: the mean of its completed repeats, then of its training seeds.
  Only cells are data. Runs that ran out of memory, failed or were skipped are counted and listed, never averaged.
- Axis values are text, as in the file, so that numbers, booleans and `1,8` compare in the same way.
- In a folder of runs, the axes are the options in which the runs differ, without those that only say where a run writes
  and what it logs. A run is measured over the last fifth of its steps: 10 of 50, as in a grid and the course project.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from torchditan.config.schema import options
from torchditan.config.trajectory import flatten_tree
from torchditan.errors import ConfigError
from torchditan.extras.ablation.grid import (
    BATCH_SIZE,
    CHECKPOINT_FRACTION,
    CHECKPOINTING,
    COMPILE,
    FLAVOR,
    PARALLEL,
    PATCH_SIZE,
    PRECISION,
    PRECISIONS,
    SEED,
    STANDARD_AXES,
)
from torchditan.extras.ablation.ledger import (
    CSV_NAME,
    Row,
    column_type,
    columns,
    measure,
    provenance_of,
    quality,
    read_ledger,
    to_text,
)
from torchditan.extras.ablation.maker import RUNS_FOLDER
from torchditan.extras.ablation.runner import read_grid, stored_grid
from torchditan.extras.published.resolutions import MODEL, RESOLUTION
from torchditan.extras.report.labels import ordered_values
from torchditan.extras.report.runs import distinct_names
from torchditan.run.reading import read_config, read_metrics, read_status

_WITH_INTERVAL = ("images_per_second_mean", "images_per_second_per_device_mean", "mfu_mean", "peak_memory_gib")
# Zero or less is a measurement error, and ratios to it are meaningless.
_POSITIVE = (*_WITH_INTERVAL, "step_time_s_mean", "tflops_per_device_mean", "peak_reserved_gib")
_REPLICATE, _SHARD = "training.data_parallel_replicate_degree", "training.data_parallel_shard_degree"
_NO_AXES = ("job", "metrics", "profiling", "comm", "checkpoint", "autotune", "cache")
_COMPLETED = (
    "training.global_batch_size",
    "model.input_channels",
    "model.sample_size",
    "dataset.num_classes",
    "dataset.fingerprint",
    "diffusion.timestep_shift",
)
"""Options that the trainer completes. They are axes only if the other axes do not explain them."""


@dataclass(frozen=True)
class Grids:
    """The contents of one or more grids.

    `runs`: one row per run, with `source` and `folder`, its run directory. `seed_cells`: one row per setting, source
    and training seed with repeats averaged, `made_by` (commit, versions, steps and window, which a comparison should
    not mix), `num_repeats` and `cell` (the row of its cell). `cells`: one row per setting and source with seeds
    averaged, `num_seeds`, and half of the 95% interval of their mean for some columns (`..._half`; NaN with one seed).
    `axes`: names of the axis columns, in ledger order, without the seed. `contents`: grid.json by grid, or what the
    runs of a folder have in common.
    """

    contents: dict[str, dict[str, Any]]
    runs: pd.DataFrame
    seed_cells: pd.DataFrame
    cells: pd.DataFrame
    axes: tuple[str, ...]

    @cached_property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(self.runs["source"]))

    @cached_property
    def varied(self) -> list[str]:
        """Axes with more than one value in the runs of some source, whatever the status of the runs."""
        counts = self.runs.groupby("source")[list(self.axes)].nunique(dropna=False).max()
        return [axis for axis in self.axes if counts[axis] > 1]

    @cached_property
    def effects(self) -> list[str]:
        """Varied axes in which two runs of the same batch can differ, the most common questions first.

        Different published models, and their resolutions, are not compared with each other.
        """
        usual = (COMPILE, CHECKPOINTING, CHECKPOINT_FRACTION, PRECISION, PARALLEL, PATCH_SIZE, FLAVOR)
        apart = [BATCH_SIZE, *([MODEL, FLAVOR] if MODEL in self.axes else [])]
        if MODEL in self.axes and self.runs.groupby(MODEL)[RESOLUTION].nunique().max() == 1:
            apart.append(RESOLUTION)
        varied = [axis for axis in self.varied if axis not in apart]
        return sorted(varied, key=lambda axis: usual.index(axis) if axis in usual else len(usual))

    @cached_property
    def searched(self) -> set[str]:
        """Grids with autotuned batch sizes, in which each setting has its own."""
        return {
            name
            for name, content in self.contents.items()
            if content.get("autotune") or "auto" in content.get("axes", {}).get(BATCH_SIZE, ())
        }

    @cached_property
    def seeds(self) -> list[str]:
        """All training seeds, in order; one, which may be unknown, if the grids do not vary it."""
        return ordered_values(SEED, self.runs[SEED])


def is_run_folder(folder: Path) -> bool:
    """Whether a folder contains run directories, and no grid made them."""
    return not (folder / "grid.json").exists() and any(folder.glob("*/config.json"))


def read_grids(folders: list[Path]) -> Grids:
    """Read grid folders and folders of runs. Raises ConfigError for an invalid or truncated folder or ledger."""
    unique = list({folder.resolve(): folder for folder in folders}.values())
    contents, tables, axes = {}, [], list(STANDARD_AXES)
    for name, folder in zip(distinct_names(unique), unique, strict=True):
        contents[name], rows, found = (_read_runs if is_run_folder(folder) else _read_grid)(folder)
        axes += [axis for axis in found if axis not in axes]
        place = folder if is_run_folder(folder) else folder / RUNS_FOLDER
        tables.append(_table_of(rows, found).assign(grid=name, folder=lambda runs, at=place: at / runs["run_name"]))
    runs = pd.concat(tables, ignore_index=True)
    runs[axes] = runs[axes].fillna("")  # axes that another ledger does not have
    runs["source"] = _source_labels(runs)
    if SEED not in axes:
        runs[SEED] = ""
    axes = [axis for axis in axes if axis != SEED]
    seed_cells = _average_repeats(runs, axes)
    return Grids(contents, runs, seed_cells, _average_seeds(seed_cells, axes), tuple(axes))


def _read_grid(folder: Path) -> tuple[dict[str, Any], list[Row], list[str]]:
    """grid.json, the rows of the ledger, and its axes."""
    content, axes = read_grid(folder), stored_grid(folder).columns
    rows = read_ledger(folder, axes=axes)
    if not rows:
        raise ConfigError(f"{folder / CSV_NAME} contains no run: no run of this grid has finished yet")
    return content, rows, axes


def _read_runs(folder: Path) -> tuple[dict[str, Any], list[Row], list[str]]:
    """What the runs of a folder have in common, as in grid.json; rows as in a grid's ledger; and the axes.

    Imported runs, which did not train, are left out.
    """
    found = {file.parent: read_config(file.parent) for file in sorted(folder.glob("*/config.json"))}
    contents = {run: content for run, content in found.items() if "imported" not in content}
    if not contents:
        raise ConfigError(f"{folder} has only imported runs; must have runs of train.py")
    rows = [_row(run, content) for run, content in contents.items()]
    settings = [_settings(content) for content in contents.values()]

    def values(*names: str) -> set[str]:
        return {repr([setting[name] for name in names]) for setting in settings}

    names = [name for name in settings[0] if name not in STANDARD_AXES and len(values(name)) > 1]
    axes = [*STANDARD_AXES, *(name for name in names if name not in _COMPLETED)]
    for name in names:
        if name in _COMPLETED and len(values(*axes, name)) > len(values(*axes)):
            axes.append(name)
    rows = [row | {axis: setting[axis] for axis in axes} for row, setting in zip(rows, settings, strict=True)]
    return {"settings": {name: settings[0][name] for name in settings[0] if len(values(name)) == 1}}, rows, axes


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    """Value of every option that can be an axis, and of the axes that stand for several options."""
    defaults = {name: option.default for name, option in options().items()}
    values = {**defaults, **flatten_tree(content["config"])}
    shard = values[_SHARD]
    if shard < 1:
        degrees = values[_REPLICATE] * values["training.context_parallel_degree"]
        shard = content["hardware"]["device_count"] // degrees
    found = {name: values[name] for name in defaults if name.split(".")[0] not in _NO_AXES}
    precision = (name for name, members in PRECISIONS.items() if members.items() <= found.items())
    found[PRECISION] = next(precision, values["training.mixed_precision_param"])
    found[PARALLEL] = f"{values[_REPLICATE]},{shard}"
    return {name: found[name] for name in found if name not in (_REPLICATE, _SHARD, *PRECISIONS["float32"])}


def _row(run: Path, content: dict[str, Any]) -> Row:
    """The row of a run, without its axes."""
    if not isinstance((content.get("hardware") or {}).get("device_count"), int):
        raise ConfigError(f"{run}/config.json is damaged: hardware.device_count must be the number of devices")
    num_devices, records, state = content["hardware"]["device_count"], read_metrics(run), read_status(run) or {}
    status, reason = state.get("state", "running"), state.get("reason")
    if status not in ("completed", "oom"):
        status, reason = "error", reason or f"its status.json says {status}"
    steps = records[-1]["step"] if records else 0
    window = max(1, steps // 5)
    last = [record for record in records[1:] if record["step"] > steps - window]
    measured = measure(records, window=len(last), num_devices=num_devices) if status == "completed" and last else {}
    for name in [name for name in measured if name.endswith("_std") and measured[name] is not None]:
        measured[name] *= math.sqrt(window / len(last))  # of a step; a record is a mean of several
    if status == "completed" and not measured:
        status, reason = "error", f"it logged {len(records)} of {steps} steps, which is too few to measure"
    return {
        "run_name": run.name,
        "repeat": 1,
        "status": status,
        "reason": reason,
        "num_devices": num_devices,
        "steps": steps,
        "window": window,
        **measured,
        "elapsed_s": records[-1].get("elapsed_s") if records else None,
        "started": content.get("started"),
        **provenance_of(run),
    }


def _table_of(rows: list[Row], axes: list[str]) -> pd.DataFrame:
    """The runs of one folder: axes and words as text, measurements as finite numbers."""
    names = columns(axes, measured=quality())
    table = pd.DataFrame({name: [row.get(name) for row in rows] for name in names}, dtype=object)
    for name in names:
        if name in axes or name in STANDARD_AXES or column_type(name) is str:
            table[name] = table[name].map(to_text)
        else:
            numbers = table[name].astype(float).replace([np.inf, -np.inf], np.nan)
            table[name] = numbers.where(numbers > 0) if name in _POSITIVE else numbers
    for axis in names[names.index("reason") + 1 : names.index("num_devices")]:
        table[axis] = table[axis].str.replace(r"\.0$", "", regex=True)
    return table


def _source_labels(runs: pd.DataFrame) -> pd.Series:
    """`grid`, with the device if there are several grids or devices."""
    # A run that failed before it recorded its device is assigned to the other runs of its grid.
    named = runs[runs["device"] != ""].groupby("grid")["device"]
    usual = {grid: names.mode()[0] for grid, names in named}
    device = runs["device"].where(runs["device"] != "", [usual.get(grid, "unknown device") for grid in runs["grid"]])
    if device.nunique() == 1:
        return runs["grid"]
    return runs["grid"] + " on " + device


def _average_repeats(runs: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    """`seed_cells`: completed runs with measurements, averaged over the repeats of a setting and seed."""
    data = runs[(runs["status"] == "completed") & runs["images_per_second_mean"].notna()].copy()
    origin = "{0} torch {1} python {2} steps {3:g} window {4:g}".format
    made = data[["git_commit", "torch_version", "python_version", "steps", "window"]]
    data["made_by"] = pd.Series([origin(*values) for values in made.itertuples(index=False)], data.index, dtype=object)
    keys = ["source", *axes, SEED]
    groups = data.groupby(keys, sort=False, dropna=False)
    cells = groups[data.select_dtypes("number").columns.tolist()].mean()
    cells = cells.join(groups[["grid", "device", "run_name", "made_by"]].first())
    cells["num_repeats"] = groups.size()
    cells["num_made_by"] = groups["made_by"].nunique()
    cells = cells.reset_index()
    cells["cell"] = cells.groupby(["source", *axes], sort=False, dropna=False).ngroup()
    return cells


def _average_seeds(seed_cells: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    """`cells`: every seed has the same weight, however often it was repeated."""
    counts = ["num_repeats", "num_made_by", "cell"]
    numbers = [name for name in seed_cells.select_dtypes("number") if name not in counts]
    groups = seed_cells.groupby("cell")
    cells = groups[["grid", "device", "made_by", "source", *axes]].first().join(groups[numbers].mean())
    cells["run_name"] = groups[["run_name", SEED]].apply(_name_of_seeds) if len(cells) else ""
    cells["num_repeats"] = groups["num_repeats"].sum()
    cells["num_made_by"] = np.maximum(groups["made_by"].nunique(), groups["num_made_by"].max())
    cells["num_seeds"] = seeds = groups.size()
    for name in _WITH_INTERVAL:
        cells[f"{name}_half"] = half_width(groups[name].std(), seeds)
    return cells.reset_index(drop=True)


def half_width(std: Any, num_seeds: Any) -> Any:
    """Half of the 95% interval of the mean over seeds; NaN with one seed."""
    return stdtrit(np.maximum(num_seeds - 1, 1), 0.975) * std / np.sqrt(num_seeds)


def _name_of_seeds(runs: pd.DataFrame) -> str:
    """`..._seed-0,1,2`: the name of the first run, with all seeds."""
    name, first = str(runs["run_name"].iloc[0]), runs[SEED].iloc[0]
    return name if len(runs) == 1 else name.replace(f"seed-{first}", f"seed-{','.join(runs[SEED])}")
