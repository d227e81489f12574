# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reads and checks the ledgers of one or more grid folders, or folders of runs, and combines them in one table.

Notable:
- A *source* is one grid on one device. The analysis compares within a source. A grid on two kinds of device is two
  sources, so only comparisons between devices mix them.
- A *cell* is one setting of all axes in one source: the mean of its completed repeats, then of its training seeds.
  Only cells are data. Runs that ran out of memory, failed or were skipped are counted and listed, never averaged.
- Axis values are text, as in the file, so that numbers, booleans and `1,8` compare in the same way.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchditan.ablation.grid import (
    BATCH_SIZE,
    CHECKPOINT_FRACTION,
    CHECKPOINTING,
    COMPILE,
    FLAVOR,
    PARALLEL,
    PATCH_SIZE,
    PRECISION,
    SEED,
    is_grid,
    parallel_degrees,
)
from torchditan.ablation.ledger import (
    CSV_NAME,
    PARQUET_NAME,
    QUALITY,
    SCHEMA_VERSION,
    STATUSES,
    Row,
    column_type,
    columns,
    to_text,
)
from torchditan.config.errors import ConfigError, option_error
from torchditan.finetune.resolutions import MODEL, RESOLUTION
from torchditan.report.run_folder import is_run_folder, read_runs
from torchditan.run.reading import check_folder

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = columns(())
_AFTER_AXES = _COLUMNS[_COLUMNS.index("num_devices") :]
_NUMBERS = tuple(name for name in (*_AFTER_AXES, *QUALITY) if column_type(name) is not str)
_WITH_INTERVAL = ("images_per_second_mean", "images_per_second_per_device_mean", "mfu_mean", "peak_memory_gib")
# Zero or less is a measurement error, and ratios to it are meaningless.
_POSITIVE = (*_WITH_INTERVAL, "step_time_s_mean", "tflops_per_device_mean", "peak_reserved_gib")
_ORDER = {
    COMPILE: ("false", "true"),
    CHECKPOINTING: ("none", "selective", "full"),
    PRECISION: ("float32", "float16", "bfloat16", "bfloat16_f8"),
}


@dataclass(frozen=True)
class GridResults:
    """The contents of the ledgers.

    `runs`: one row per run, with `source` (its label). `seed_cells`: one row per setting, source and training seed with
    repeats averaged, `batch` (a number), `made_by` (commit, versions, steps and window, which a comparison should not
    mix), `num_repeats` and `cell` (the row of its cell). `cells`: one row per setting and source with seeds averaged,
    `num_seeds`, and half of the 95% interval of their mean for some columns (`..._half`; NaN with one seed). `axes`:
    names of the axis columns, in ledger order, without the seed. `contents`: grid.json by grid, or what the runs of a
    folder have in common. `folders`: folder by grid.
    """

    contents: dict[str, dict[str, Any]]
    runs: pd.DataFrame
    seed_cells: pd.DataFrame
    cells: pd.DataFrame
    axes: tuple[str, ...]
    folders: dict[str, Path]

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

    @cached_property
    def quality(self) -> list[str]:
        """Figures of quality that some cell has."""
        return [name for name in QUALITY if self.cells[name].notna().any()]

    def values(self, axis: str, *, completed: bool = True) -> list[str]:
        """The values of an axis in comparison order."""
        return ordered_values(axis, (self.cells if completed else self.runs)[axis].unique())


def read_grids(folders: list[Path]) -> GridResults:
    """Read the ledgers of grid folders. Raises ConfigError for an invalid or truncated folder or ledger."""
    import pandas as pd

    unique = list({folder.resolve(): folder for folder in folders}.values())
    names = distinct_names(unique)
    loose = {folder: read_runs(folder) for folder in unique if is_run_folder(folder)}
    contents = {
        name: loose[folder][0] if folder in loose else _read_content(folder)
        for name, folder in zip(names, unique, strict=True)
    }
    tables = [_table_of(folder, *loose[folder][1:]) if folder in loose else _read_ledger(folder) for folder in unique]
    axes = tuple(dict.fromkeys(axis for table in tables for axis in _axes_of(list(table.columns))))
    for table, name in zip(tables, names, strict=True):
        table["grid"] = name
    runs = pd.concat(tables, ignore_index=True)
    for axis in axes:  # axes that another ledger does not have
        runs[axis] = runs[axis].fillna("")
    runs["source"] = _source_labels(runs)
    runs["batch"] = pd.to_numeric(runs[BATCH_SIZE], errors="coerce")
    runs[SEED] = runs[SEED] if SEED in axes else ""
    axes = tuple(axis for axis in axes if axis != SEED)
    seed_cells = _average_repeats(runs, axes)
    return GridResults(
        contents=contents,
        runs=runs,
        seed_cells=seed_cells,
        cells=_average_seeds(seed_cells, axes),
        axes=axes,
        folders=dict(zip(names, unique, strict=True)),
    )


def work_axes(axes: Iterable[str]) -> list[str]:
    """Axes that change the work per sample. Speeds across their values are not compared."""
    return [FLAVOR, PATCH_SIZE, *(axis for axis in (MODEL, RESOLUTION) if axis in axes)]


def ordered_values(axis: str, values: Any) -> list[str]:
    """Values of an axis in comparison order, which goes from the baseline to the alternative.

    Known words have a fixed order, numbers ascend, and meshes go from most to least sharded. Others keep their order.
    """
    found = list(dict.fromkeys(values))
    known = _ORDER.get(axis, ())
    if axis == PARALLEL:
        return sorted(found, key=_mesh_order)
    if all(value in known for value in found):
        return sorted(found, key=known.index)
    try:
        return sorted(found, key=float)
    except ValueError:
        return found


def parallel_mode(value: str) -> str:
    """Name of a `replicate,shard` mesh: one device, FSDP, DDP or HSDP."""
    replicate, shard = parallel_degrees(value)
    if replicate * shard == 1:
        return "one device"
    if replicate == 1:
        return "FSDP"
    return "DDP" if shard == 1 else "HSDP"


def _mesh_order(value: str) -> tuple[int, int]:
    replicate, shard = parallel_degrees(value)
    return replicate * shard, -shard


def _read_ledger(folder: Path) -> pd.DataFrame:
    """The checked runs of one grid folder: axes as text, measurements as numbers."""
    file = folder / CSV_NAME
    if file.exists():
        table = _read_csv(file)
    elif (file := folder / PARQUET_NAME).exists():
        table = _read_parquet(file)
    else:
        raise ConfigError(f"{folder} has no {CSV_NAME}: no run of this grid has finished yet")
    _check_columns(file, list(table.columns))
    if not len(table):
        raise ConfigError(f"{file} contains no run yet")
    return _typed(file, table)


def _table_of(folder: Path, rows: list[Row], axes: list[str]) -> pd.DataFrame:
    """The rows of a folder of runs, as `_read_ledger` reads those of a grid."""
    import pandas as pd

    names = columns(axes, measured=(name for row in rows for name in row))
    table = pd.DataFrame([[to_text(row.get(name)) for name in names] for row in rows], columns=names, dtype=object)
    return _typed(folder, table)


def _read_content(folder: Path) -> dict[str, Any]:
    """Read grid.json. Raises ConfigError if the folder is neither a grid folder nor a folder of runs."""
    file = folder / "grid.json"
    check_folder(folder, mark="grid.json", what="a run directory, a grid folder or a folder of run directories")
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} does not parse: {error}") from None
    if not isinstance(content, dict) or "schema_version" not in content:
        raise ConfigError(f"{file} does not belong to an ablation grid: it has no schema_version")
    if content["schema_version"] != SCHEMA_VERSION:
        raise _other_version(file, content["schema_version"])
    if not is_grid(content):
        raise ConfigError(f"{file} does not describe a grid: name, axes or settings have another type")
    return content


def _read_csv(file: Path) -> pd.DataFrame:
    """Read every field as text. A file truncated by a copy or a full disk is refused: it would look complete."""
    import pandas as pd

    try:
        text = file.read_text(encoding="utf-8-sig")
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file} is not a complete CSV file: {error}") from None
    if not lines:
        raise ConfigError(f"{file} is empty")
    header, *rows = lines
    _check_columns(file, header)
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ConfigError(f"{file} is cut short: row {number} has {len(row)} of {len(header)} columns")
    if not text.endswith("\n"):
        raise ConfigError(f"{file} is cut short: its last row does not end")
    return pd.DataFrame(rows, columns=header, dtype=object)


def _read_parquet(file: Path) -> pd.DataFrame:
    """Like `_read_csv`: text, with empty strings for missing values."""
    import pandas as pd
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file).to_pydict()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{file} is not a complete parquet file: {' '.join(str(error).split())}") from None
    texts = {name: ["" if pd.isna(value) else str(value) for value in values] for name, values in table.items()}
    return pd.DataFrame(texts, dtype=object)


def _check_columns(file: Path, header: list[str]) -> None:
    if "schema_version" not in header:
        raise ConfigError(f"{file} is not the ledger of a grid: it has no column schema_version")
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise ConfigError(f"{file} is cut short or of another version: it has no column {', '.join(missing[:3])}")


def _axes_of(header: list[str]) -> list[str]:
    """Axes are the columns between `reason` and `num_devices`."""
    return header[header.index("reason") + 1 : header.index("num_devices")]


def _typed(file: Path, table: pd.DataFrame) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    versions = list(dict.fromkeys(table["schema_version"]))
    if versions != [str(SCHEMA_VERSION)]:
        raise _other_version(file, ", ".join(versions) or "none")
    unknown = [status for status in dict.fromkeys(table["status"]) if status not in STATUSES]
    if unknown:
        raise option_error(f"{file}: status", unknown[0], f"must be one of {', '.join(STATUSES)}")
    for name in _NUMBERS:
        if name not in table:  # a figure of quality that no run measured
            table[name] = np.nan
            continue
        numbers = pd.to_numeric(table[name].replace("", np.nan), errors="coerce")
        wrong = table.index[numbers.isna() & ~table[name].isin(("", "nan"))]
        if len(wrong):
            raise ConfigError(f'{file}: row {wrong[0] + 2} has "{table[name][wrong[0]]}" for {name}, not a number')
        table[name] = numbers.astype(float).replace([np.inf, -np.inf], np.nan)
    for name in _POSITIVE:
        table[name] = table[name].where(table[name] > 0)
    for mesh in table[PARALLEL].unique():
        parallel_degrees(mesh)
    for axis in _axes_of(list(table.columns)):
        table[axis] = table[axis].replace({"True": "true", "False": "false"}).str.replace(r"\.0$", "", regex=True)
    return table


def _other_version(file: Path, version: Any) -> ConfigError:
    return ConfigError(f"{file} has schema version {version}; this analysis reads version {SCHEMA_VERSION}")


def distinct_names(folders: list[Path]) -> list[str]:
    """The folder names, with as many parents as needed to make them unique."""
    resolved = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("resolved folders are unique")


def _source_labels(runs: pd.DataFrame) -> pd.Series:
    """`grid`, with the device if there are several grids or devices."""
    # A run that failed before it recorded its device is assigned to the other runs of its grid.
    named = runs[runs["device"] != ""].groupby("grid")["device"]
    usual = {grid: names.mode()[0] for grid, names in named}
    device = runs["device"].where(runs["device"] != "", [usual.get(grid, "unknown device") for grid in runs["grid"]])
    if device.nunique() == 1:
        return runs["grid"]
    return runs["grid"] + " on " + device


def _average_repeats(runs: pd.DataFrame, axes: tuple[str, ...]) -> pd.DataFrame:
    """`seed_cells`: completed runs with measurements, averaged over the repeats of a setting and seed."""
    data = runs[(runs["status"] == "completed") & runs["images_per_second_mean"].notna()].copy()
    origin = "{0} torch {1} python {2} steps {3:g} window {4:g}".format
    columns = ("git_commit", "torch_version", "python_version", "steps", "window")
    data["made_by"] = [origin(*values) for values in zip(*(data[name] for name in columns), strict=True)]
    keys = ["source", *axes, SEED]
    numbers = [name for name in (*_NUMBERS, "batch") if name not in keys]
    first = ["grid", "device", "device_type", "run_name", "made_by"]
    groups = data.groupby(keys, sort=False, dropna=False)
    cells = groups[numbers].mean().join(groups[first].first())
    cells["num_repeats"] = groups.size()
    cells["num_made_by"] = groups["made_by"].nunique()
    cells = cells.reset_index()
    cells["cell"] = cells.groupby(["source", *axes], sort=False, dropna=False).ngroup()
    return cells


def _average_seeds(seed_cells: pd.DataFrame, axes: tuple[str, ...]) -> pd.DataFrame:
    """`cells`: every seed has the same weight, however often it was repeated."""
    import numpy as np
    from scipy.special import stdtrit

    keys = ["source", *axes]
    texts = ["grid", "device", "device_type", "made_by", *keys]
    numbers = [
        name for name in seed_cells if name not in (*texts, SEED, "run_name", "num_repeats", "num_made_by", "cell")
    ]
    groups = seed_cells.groupby("cell")
    cells = groups[texts].first().join(groups[numbers].mean())
    cells["run_name"] = groups[["run_name", SEED]].apply(_name_of_seeds) if len(cells) else ""
    cells["num_repeats"] = groups["num_repeats"].sum()
    cells["num_made_by"] = np.maximum(groups["made_by"].nunique(), groups["num_made_by"].max())
    cells["num_seeds"] = seeds = groups.size()
    factor = (stdtrit(np.maximum(seeds - 1, 1), 0.975) / np.sqrt(seeds)).where(seeds > 1)
    for name in _WITH_INTERVAL:
        cells[f"{name}_half"] = factor * groups[name].std()
    return cells.reset_index(drop=True)


def _name_of_seeds(runs: pd.DataFrame) -> str:
    """`..._seed-0,1,2`: the name of the first run, with all seeds."""
    name, first = str(runs["run_name"].iloc[0]), runs[SEED].iloc[0]
    return name if len(runs) == 1 else name.replace(f"seed-{first}", f"seed-{','.join(runs[SEED])}")
