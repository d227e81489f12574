# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The one entry to reports: of run directories, of several runs compared in a folder, or of ablation grids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torchditan.config.errors import option_error
from torchditan.config.optional_libraries import import_optional
from torchditan.report.grid_page import analyse, grid_page
from torchditan.report.page import PAGE_NAME, write_page
from torchditan.report.run_page import run_page
from torchditan.report.runs import read_runs, runs_in
from torchditan.report.verdicts import verdict_text


class Written(NamedTuple):
    path: Path
    """Of the page."""
    verdicts: str
    """For a terminal; empty without verdicts."""


def is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not (folder / "grid.json").exists()


def write_report(
    folders: Sequence[Path],
    *,
    compare: bool = False,
    labels: Sequence[str] | None = None,
    figures: list[str] | None = None,
    out: Path | None = None,
) -> Written:
    """Write the report of run directories as one file; of grids, or with `compare`, as a folder with plots and numbers.

    Args:
        folders: run directories; or grids, or folders of runs. With `compare`, a grid stands for its runs.
        compare: write the page of two runs or more as compare.html, with compare.csv.
        labels: a name for each run. None: the folder names.
        figures: figures of quality to judge in grids. None: all.
        out: the folder, or of run directories also a file that ends with .html. None: the run, the folder next to the
            first of several runs, analysis/ or compare/ in the first grid, or compare/ next to the first run.

    Raises:
        ConfigError: a folder cannot be read, a run is named twice, there are too many, or `out` cannot be written.
    """
    for library in ("jinja2", "matplotlib", "pandas"):
        import_optional(library, extra="analysis")
    first = folders[0]
    if compare:
        runs = [run for folder in folders for run in runs_in(folder)]
        if len(runs) < 2:
            right = "is a single run; must be two or more run directories"
            raise option_error("--compare", " ".join(map(str, runs)), right)
        page = run_page(read_runs(runs, labels, option="--compare"))
        out = out or (first if (first / "grid.json").exists() else first.absolute().parent) / "compare"
        return Written(write_page(page, out, "compare.html"), "")
    if is_run(first):
        page = run_page(read_runs(folders, labels, option="run"))
        return Written(write_page(page, out or (first if len(folders) == 1 else first.absolute().parent)), "")
    analysis = analyse(list(folders), figures=figures)
    path = write_page(grid_page(analysis), out or first / "analysis", PAGE_NAME)
    return Written(path, verdict_text(analysis.verdicts) if len(analysis.verdicts) else "")
