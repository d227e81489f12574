# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The report of ablation grids: verdicts, effects, throughput, memory and loss over the axes of the grid, warnings.

Notable:
- The page and the CSV files are made from the same numbers, and the same ledgers always give the same bytes.
- It shows what these runs answer: what they do not vary or did not measure has no section.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchditan.ablation.grid import BATCH_SIZE, COMPILE, FLAVOR, PATCH_SIZE, PRECISION
from torchditan.ablation.ledger import STATUSES
from torchditan.finetune.resolutions import MODEL, RESOLUTION
from torchditan.report import plots
from torchditan.report.checks import find_warnings
from torchditan.report.effects import (
    MEMORY,
    MFU,
    PER_DEVICE,
    THROUGHPUT,
    Change,
    Effect,
    Effects,
    effects_csv,
    fastest,
    find_effects,
    largest_batches,
    pairs_csv,
    repayment,
)
from torchditan.report.grid_results import GridResults, read_grids
from torchditan.report.labels import (
    MINUS,
    TOO_FEW_RUNS,
    axis_name,
    change_name,
    commit_name,
    count,
    listed,
    mean_with_interval,
    number,
    percent,
    value_name,
)
from torchditan.report.losses import final_losses, loss_curves
from torchditan.report.page import Block, Page, Plots, Section, Table, Warned, table
from torchditan.report.verdicts import NUMERIC, guarantee, judge, summary, verdict_table, verdicts_csv

if TYPE_CHECKING:
    import pandas as pd

_MOST_HEADLINES = 6
_STATUSES = dict(zip(STATUSES, ("completed", "out of memory", "failed", "timed out", "skipped"), strict=True))


@dataclass(frozen=True)
class Analysis:
    """Everything that is computed from the ledgers."""

    results: GridResults
    effects: Effects
    verdicts: pd.DataFrame
    warnings: list[Warned]


def analyse(folders: list[Path], *, figures: list[str] | None = None) -> Analysis:
    """Read the ledgers of the grid folders and compute all comparisons.

    `figures` are the names of the figures of quality to judge; None judges all.
    """
    results = read_grids(folders)
    effects = find_effects(results)
    return Analysis(results, effects, judge(results, figures), find_warnings(results, effects.pairs["same batch"]))


def grid_page(analysis: Analysis) -> Page:
    files = {
        "effects.csv": effects_csv(analysis.effects),
        "pairs.csv": pairs_csv(analysis.effects, analysis.results.cells),
    }
    if len(analysis.verdicts):
        files["verdicts.csv"] = verdicts_csv(analysis.verdicts)
    sections = (_verdicts, _effects, _fastest, _over_axes, _frontier, _scaling, _losses, _not_completed, _origin)
    return Page(
        title=f"Ablations: {listed(analysis.results.runs['grid'])}",
        facts=_facts(analysis.results),
        headlines=_headlines(analysis),
        warnings=analysis.warnings,
        sections=[make(analysis) for make in sections],
        files=files,
    )


def _facts(results: GridResults) -> list[str]:
    """Hardware, versions, dates and statuses."""
    runs = results.runs
    started = sorted(value for value in set(runs["started"]) if value)
    days = " to ".join(dict.fromkeys((started[0][:10], started[-1][:10]))) if started else ""
    lengths = [listed(f"{value:g}" for value in runs[name].dropna()) for name in ("steps", "window")]
    seeds = f"{count(len(results.seeds), 'training seed')}, averaged: {listed(results.seeds)}"
    dated = (("torch", listed(runs["torch_version"])), ("run", days))
    parts = [
        listed(_devices(results)),
        ", ".join(f"{what} {value}" for what, value in dated if value),
        f"{lengths[0]} steps per run, the last {lengths[1]} measured" if all(lengths) else "",
        seeds if len(results.seeds) > 1 else "",
    ]
    counts = runs["status"].value_counts()
    states = ", ".join(f"{counts[status]:,} {name}" for status, name in _STATUSES.items() if counts.get(status))
    return [f"{'. '.join(filter(None, parts))}.", f"{count(len(runs), 'run')}: {states}."]


def _devices(results: GridResults) -> Iterable[str]:
    runs = results.runs[results.runs["device"] != ""]
    for device, numbers in runs.groupby("device", sort=False)["num_devices"]:
        yield f"{' or '.join(f'{number:g}' for number in sorted(set(numbers.dropna())))} x {device}"


def _headlines(analysis: Analysis) -> list[str]:
    """The verdicts on quality in one line, and one line for each effect on speed and memory."""
    lines = [f"Quality: {summary(analysis.verdicts)}"] if len(analysis.verdicts) else []
    known = [effect for effect in _answering(analysis.effects) if effect.change(THROUGHPUT).num_pairs]
    if len(analysis.results.sources) > 1:
        known = [effect for effect in analysis.effects.between_folders if effect.change(THROUGHPUT).num_pairs] + known
    lines += [_headline(analysis, effect) for effect in known[:_MOST_HEADLINES]]
    return lines


def _answering(effects: Effects) -> list[Effect]:
    """Effects at the same batch; of an axis without such pairs, because batches were searched, at the best batch."""
    paired = {effect.axis for effect in effects.same_batch if effect.change(THROUGHPUT).num_pairs}
    return [*effects.same_batch, *(effect for effect in effects.best_batch if effect.axis not in paired)]


def _headline(analysis: Analysis, effect: Effect) -> str:
    throughput, memory = effect.change(THROUGHPUT), effect.change(MEMORY)
    name = change_name(*effect.key)
    if effect.axis == "source":
        name = "{2} against {1}".format(*effect.key)
    elif len(analysis.results.sources) > 1:
        name = f"{effect.source}, {name}"
    measured = [("images/s", throughput), *([("memory", memory)] if memory.num_pairs else [])]
    parts = [f"{percent(change.median)} {noun}" for noun, change in measured if change.is_clear]
    unclear = " or ".join(noun for noun, change in measured if not change.is_clear)
    parts += [f"no clear change in {unclear}"] if unclear else []
    where = ", each at its best batch" if effect in analysis.effects.best_batch else ""
    return f"{name}: {', '.join(parts)} ({count(throughput.num_pairs, 'pair')}{where})"


def _blocks(figure: Any | None, name: str, title: str, *tables: Table | None) -> list[Block]:
    """The plot, if there is one, then the tables that have rows."""
    drawn: list[Block] = [Plots([plots.draw(figure, name, title)])] if figure is not None else []
    return drawn + [table for table in tables if table is not None and len(table.frame)]


def _verdicts(analysis: Analysis) -> Section:
    if analysis.verdicts.empty:
        return Section("Verdicts on quality", [])
    texts = verdict_table(analysis.verdicts)
    for header in NUMERIC:
        texts[header] = texts[header].str.replace("-", MINUS).str.replace("95%: ", "")
    note = (
        f"{guarantee(analysis.verdicts)} Two settings are compared seed by seed. The 95% interval is that of one "
        "comparison alone, so it can exclude zero where the verdict is inconclusive. FLOPs and time per image and peak "
        "memory are ratios, after over before; that of time has its 95% interval."
    )
    figure = plots.verdict_figure(analysis.verdicts)
    return Section(
        "Verdicts on quality",
        _blocks(figure, "verdicts", "Difference of each figure", Table(texts, NUMERIC)),
        note.strip(),
    )


def _effects(analysis: Analysis) -> Section:
    effects = analysis.effects
    known = [effect for effect in effects.same_batch if effect.change(THROUGHPUT).num_pairs]
    best = [effect for effect in effects.best_batch if effect.change(THROUGHPUT).num_pairs]
    has_batches = BATCH_SIZE in analysis.results.varied
    blocks = _blocks(
        plots.effects_figure(known), "effects", "Effect of each setting at the same batch per device",
        _effect_table(analysis, known, "At the same batch"),
    )  # fmt: skip
    if has_batches and best:
        left_out = effects.num_unequal_batches
        title = "Each side at its best batch" + (f" ({count(left_out, 'pair')} excluded)" if left_out else "")
        blocks += _blocks(
            plots.effects_figure(best), "effects_best_batch", "Effect of each setting, each side at its best batch",
            _effect_table(analysis, best, title),
        )  # fmt: skip
    blocks += _blocks(
        plots.effects_figure(effects.between_folders), "folders", "Settings that completed in both folders",
        _effect_table(analysis, effects.between_folders, "Between folders"),
    )  # fmt: skip
    note = (
        "Two runs are compared only if they differ in one setting and agree in all others. White dots are medians over "
        "such pairs, thick bars the middle half, thin lines the full range."
    )
    return Section("What each setting changes", blocks, note + _repaid(analysis, known or best))


def _repaid(analysis: Analysis, effects: Sequence[Effect]) -> str:
    """When compiling has repaid its start-up cost, in one sentence per source."""
    text = ""
    for effect in effects:
        cost = repayment(effect, analysis.results.cells) if effect.axis == COMPILE else None
        if cost is not None:
            where = f" ({effect.source})" if len(analysis.results.sources) > 1 else ""
            after = "is never repaid" if cost.steps is None else f"is repaid after about {cost.steps:,.0f} steps"
            text += f" Compiling takes {cost.seconds:,.0f} s more at the start, which {after}{where}."
    return text


def _effect_table(analysis: Analysis, effects: Sequence[Effect], title: str) -> Table | None:
    effects = [effect for effect in effects if effect.change(THROUGHPUT).num_pairs]
    several = len(analysis.results.sources) > 1 and bool(effects) and effects[0].axis != "source"
    has_mfu = any(effect.change(MFU).num_pairs for effect in effects)
    rows = []
    for effect in effects:
        throughput, memory = effect.change(THROUGHPUT), effect.change(MEMORY)
        ratio = f"{1 + throughput.median / 100:.2f}"
        noise = TOO_FEW_RUNS if throughput.noise >= 100 else f"±{throughput.noise:.1f}%" if throughput.noise else ""
        rows.append(
            [
                change_name(*effect.key),
                *([effect.source] if several else []),
                f"{throughput.num_pairs:,}",
                percent(throughput.median),
                ratio,
                _middle(throughput),
                f"{throughput.num_better:,} of {throughput.num_pairs:,}",
                noise,
                *([percent(effect.change(MFU).median)] if has_mfu else []),
                *_memory(effect),
                percent(memory.median),
                "clear" if throughput.is_clear else "not clear",
            ]
        )
    headers = ["effect", *(["grid"] if several else []), "pairs", "throughput", "ratio", "middle half", "faster in"]
    headers += ["noise", *(["MFU"] if has_mfu else []), "GiB before", "GiB after", "memory", "speed is"]
    return table(headers, rows, headers[1 + several : -1], title=title)


def _middle(change: Change) -> str:
    return f"{percent(change.quartile_1)} to {percent(change.quartile_3)}" if change.num_pairs > 1 else ""


def _memory(effect: Effect) -> list[str]:
    """Median peak memory before and after."""
    return [number(float(effect.pairs[f"{MEMORY.column}_{side}"].median())) for side in ("from", "to")]


def _fastest(analysis: Analysis) -> Section:
    """The fastest run of each model, resolution, patch size and number of devices."""
    results = analysis.results
    cells = fastest(results)
    work = [MODEL, RESOLUTION] if MODEL in results.axes else [FLAVOR, PATCH_SIZE]
    several = len(results.sources) > 1
    rows = []
    for _, cell in cells.iterrows():
        rate = mean_with_interval(cell[THROUGHPUT.column], cell[f"{THROUGHPUT.column}_half"], cell["num_seeds"])
        measured = (PER_DEVICE, "tflops_per_device_mean", MFU.column, MEMORY.column)
        rows.append(
            [
                *([cell["source"]] if several else []),
                *(value_name(axis, cell[axis]) for axis in work),
                f"{cell['num_devices']:g} x {cell['device']}",
                *(value_name(axis, cell[axis]) for axis in (PRECISION, BATCH_SIZE)),
                rate,
                *(number(cell[name]) for name in measured),
                cell["run_name"],
            ]
        )
    headers = [*(["grid"] if several else []), *map(axis_name, work), "devices", "precision", "batch"]
    numeric = ["images/s", "images/s per device", "TFLOP/s per device", "MFU %", "GiB"]
    found = table([*headers, *numeric, "run"], rows, ("batch", *numeric))
    return Section("The fastest runs", _blocks(None, "", "", found))


def _over_axes(analysis: Analysis) -> Section:
    results = analysis.results
    blocks = [
        *_blocks(plots.axes_figure(results, PER_DEVICE, "images/s per device"), "throughput", "Throughput per device"),
        *_blocks(plots.axes_figure(results, MEMORY.column, "GiB"), "memory", "Peak memory per device"),
        *_blocks(None, "", "", _memory_limits(results)),
    ]
    note = "Each line is one combination of the other settings."
    if set(results.runs["device_type"]) == {"cpu"}:
        note += " On a CPU, memory is the resident memory of a process, which includes the compiler."
    return Section("Throughput and memory", blocks, note)


def _memory_limits(results: GridResults) -> Table:
    """The largest batch that ran and the smallest that did not fit."""
    varied = [axis for axis in results.varied if axis != BATCH_SIZE]
    rows = [
        [
            row["source"],
            *(value_name(axis, row[axis]) for axis in varied),
            f"{row['fits']:g}" if row["fits"] == row["fits"] else "none",
            f"{row['fails']:g}",
        ]
        for _, row in largest_batches(results).iterrows()
    ]
    headers = ["grid", *map(axis_name, varied), "largest batch that ran", "smallest out of memory"]
    summary = f"Memory limits: {count(len(rows), 'setting')}"
    return table(headers, rows, headers[-2:], summary=summary)


def _frontier(analysis: Analysis) -> Section:
    figure = plots.frontier_figure(analysis.results)
    note = "Each dot is a setting. Models and patch sizes do different work, so each has its own frontier."
    return Section("Throughput over memory", _blocks(figure, "frontier", "Images/s over peak memory"), note)


def _scaling(analysis: Analysis) -> Section:
    figure = plots.scaling_figure(analysis.results)
    note = "Images/s per device, relative to the same setting on the fewest devices (medians)."
    return Section("More devices", _blocks(figure, "scaling", "Weak scaling"), note)


def _losses(analysis: Analysis) -> Section:
    curves = loss_curves(analysis.results)
    figure = plots.loss_figure(curves)
    has_seeds = any(curve.half_widths for curve in curves)
    note = (
        "Means over intervals of steps; a cross marks the end of a run that did not complete. All runs of a grid with "
        "one training seed see the same samples, noise and timesteps in the same order."
    )
    if has_seeds:
        note += " Lines are means over the training seeds, bands the 95% intervals of these means."
    rows = [[setting or "(all)", *losses.values()] for setting, losses in final_losses(analysis.results).items()]
    precisions = [value_name(PRECISION, value) for value in analysis.results.values(PRECISION, completed=False)]
    title = "Mean loss of the last steps"
    last = table(["setting", *precisions], rows if curves else [], precisions, title=title)
    return Section("Loss over steps", _blocks(figure, "loss", "Training loss", last), note)


def _not_completed(analysis: Analysis) -> Section:
    """Runs out of memory and skipped runs; those that failed are warnings."""
    runs = analysis.results.runs
    tables = []
    for status in ("oom", "skipped"):
        mine = runs[runs["status"] == status][["run_name", "grid", "reason"]].rename(columns={"run_name": "run"})
        mine["reason"] = mine["reason"].replace("", "no reason recorded")
        tables.append(Table(mine, summary=f"{_STATUSES[status].capitalize()}: {count(len(mine), 'run')}"))
    return Section("Runs without a measurement", _blocks(None, "", "", *tables))


def _origin(analysis: Analysis) -> Section:
    results = analysis.results
    rows = []
    for source in results.sources:
        runs = results.runs[results.runs["source"] == source]
        devices = (f"{number:g}" for number in runs["num_devices"].dropna())
        texts = [runs["device"], runs["host"], devices, runs["torch_version"], runs["python_version"]]
        rows.append([source, *map(listed, texts), listed(map(commit_name, runs["git_commit"]))])
    made_by = table(["grid", "device", "host", "devices", "torch", "python", "commit"], rows)
    held = [
        [axis_name(axis), listed(value_name(axis, value) for value in results.runs[axis])]
        for axis in results.axes
        if axis not in results.varied
    ]
    fixed = table(["setting", "value in all runs"], held, summary=f"Not varied: {count(len(held), 'setting')}")
    return Section("Hardware and versions", _blocks(None, "", "", made_by, fixed))
