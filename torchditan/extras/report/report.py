# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The one entry to reports: of run directories, of several runs compared in a folder, or of ablation grids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torchditan.errors import counted, option_error
from torchditan.extras.report.data import Data
from torchditan.extras.report.effects import EFFECT_COLUMNS, MEMORY, THROUGHPUT, pairs_table
from torchditan.extras.report.grids import Grids, read_grids
from torchditan.extras.report.labels import change_name, commit_name, listed, percent, setting_value
from torchditan.extras.report.page import PAGE_NAME, Page, write_page
from torchditan.extras.report.runs import Run, read_runs, run_headlines, run_warnings, runs_in
from torchditan.extras.report.sections import SECTIONS
from torchditan.extras.report.verdicts import VERDICT_COLUMNS, summary, verdict_text

_MOST_HEADLINES = 6
_STATUSES = {
    "completed": "completed", "oom": "out of memory", "error": "failed", "timeout": "timed out", "skipped": "skipped"
}  # fmt: skip


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
        ConfigError: a folder cannot be read, there is a single run to compare, or `out` cannot be written.
    """
    first = folders[0]
    if compare:
        runs = [run for folder in folders for run in runs_in(folder)]
        if len(runs) < 2:
            right = "is a single run; must be two or more run directories"
            raise option_error("--compare", " ".join(map(str, runs)), right)
        data = Data(read_runs(runs, labels))
        place = first if (first / "grid.json").exists() else first.absolute().parent
        path = (out or place / "compare") / "compare.html"
    elif is_run(first):
        data = Data(read_runs(folders, labels))
        path = out or (first if len(folders) == 1 else first.absolute().parent)
        path = path if path.suffix.lower() in (".html", ".htm") and not path.is_dir() else path / PAGE_NAME
    else:
        data = Data(grids=read_grids(list(folders)), figures=figures)
        path = (out or first / "analysis") / PAGE_NAME
    write_page(page_of(data, is_folder=compare or not is_run(first)), path)
    return Written(path, verdict_text(data.verdicts) if len(data.verdicts) else "")


def page_of(data: Data, *, is_folder: bool = True) -> Page:
    sections = [section for make in SECTIONS if (section := make(data)) is not None]
    if data.grids is None:
        names = ", ".join(run.label for run in data.runs)
        return Page(
            title=f"Run {names}" if len(data.runs) == 1 else f"{counted(len(data.runs), 'run')}: {names}",
            facts=[fact for run in data.runs for fact in _run_facts(run)],
            headlines=list(run_headlines(data.runs, data.table, data.curve_pairs)),
            warnings=list(run_warnings(data.runs, data.curve_pairs)),
            sections=sections,
            files={"compare.csv": data.table},
            is_folder=is_folder,
        )
    files = {"effects.csv": data.effects[EFFECT_COLUMNS], "pairs.csv": pairs_table(data.pairs)}
    return Page(
        title=f"Ablations: {listed(data.grids.runs['grid'])}",
        facts=_grid_facts(data.grids),
        headlines=list(_grid_headlines(data)),
        warnings=list(_grid_warnings(data)),
        sections=sections,
        files=files | ({"verdicts.csv": data.verdicts[VERDICT_COLUMNS]} if len(data.verdicts) else {}),
    )


def _run_facts(run: Run) -> Iterable[str]:
    commit = run.content.get("git_commit")
    torch = f"torch {run.content['versions'].get('torch') or 'unknown'}"
    made_by = ", ".join([run.hardware, torch, *([f"commit {commit_name(commit)}"] if commit else [])])
    yield f"{run.label}: {run.state_text} at step {run.steps_text}. {made_by}."
    if description := run.options.get("job.description"):
        yield f"{run.label}: {setting_value(description)}"


def _grid_facts(grids: Grids) -> list[str]:
    """Hardware, versions, dates and statuses."""
    runs = grids.runs
    devices = [
        f"{' or '.join(f'{number:g}' for number in sorted(set(numbers.dropna())))} x {device}"
        for device, numbers in runs[runs["device"] != ""].groupby("device", sort=False)["num_devices"]
    ]
    days = sorted({started[:10] for started in runs["started"]} - {""})
    lengths = [listed(f"{value:g}" for value in runs[name].dropna()) for name in ("steps", "window")]
    seeds = f"{counted(len(grids.seeds), 'training seed')}, averaged: {listed(grids.seeds)}"
    versions = listed(runs["torch_version"])
    parts = [
        listed(devices),
        f"torch {versions}" if versions else "",
        f"run {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else "",
        f"{lengths[0]} steps per run, the last {lengths[1]} measured" if all(lengths) else "",
        seeds if len(grids.seeds) > 1 else "",
    ]
    counts = runs["status"].value_counts()
    states = ", ".join(f"{counts[status]:,} {name}" for status, name in _STATUSES.items() if counts.get(status))
    return [f"{'. '.join(filter(None, parts))}.", f"{counted(len(runs), 'run')}: {states}."]


def _grid_headlines(data: Data) -> Iterable[str]:
    """The verdicts on quality in one line, and one line for each effect on speed and memory."""
    if len(data.verdicts):
        yield f"Quality: {summary(data.verdicts)}"
    assert data.grids is not None
    keys = ["comparison", "grid", "axis", "from_value", "to_value"]
    known = data.effects[data.effects["num_pairs"] > 0].sort_values("comparison", kind="stable")
    for (_, grid, *key), mine in list(known.groupby(keys, sort=False))[:_MOST_HEADLINES]:
        of = {effect.metric: effect for effect in mine.itertuples()}
        if THROUGHPUT.column not in of:
            continue
        nouns = {"images/s": of[THROUGHPUT.column], "memory": of.get(MEMORY.column)}
        measured = {noun: effect for noun, effect in nouns.items() if effect is not None}
        parts = [f"{percent(effect.median_percent)} {noun}" for noun, effect in measured.items() if effect.is_clear]
        unclear = " or ".join(noun for noun, effect in measured.items() if not effect.is_clear)
        parts += [f"no clear change in {unclear}"] if unclear else []
        where = f"{grid}, " if len(data.grids.sources) > 1 and key[0] != "source" else ""
        yield f"{where}{change_name(*key)}: {', '.join(parts)} ({counted(of[THROUGHPUT.column].num_pairs, 'pair')})"


def _grid_warnings(data: Data) -> Iterable[str]:
    """Failed runs, and pairs that mix versions. A warning removes nothing from the results."""
    assert data.grids is not None
    failed = data.grids.runs[data.grids.runs["status"].isin(("error", "timeout"))]
    if len(failed):
        reasons = failed["reason"].replace("", "no reason recorded")
        often = ", most often" if reasons.nunique() > 1 else ""
        yield f"{counted(len(failed), 'run')} failed{often}: {reasons.value_counts().index[0]}"
    if num_mixed := int(data.pairs["mixed"].sum()):
        yield (
            f"{num_mixed} of {counted(len(data.pairs), 'matched pair')} mix commits, versions or numbers of steps. The "
            "medians include these pairs; the column mixed of pairs.csv marks them."
        )
