# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""report.html: findings, tables and interactive plots of ablation grids, in one file that works offline.

Notable:
- The same ledgers always give the same bytes.
- All text from ledgers is escaped, here or in page.py.
- The first screen answers whether to compile, and lists hardware and versions.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchditan.ablation.grid import BATCH_SIZE, PRECISION
from torchditan.finetune.resolutions import MODEL, RESOLUTION
from torchditan.report import page, plots
from torchditan.report.analysis import (
    Analysis,
    Effect,
    effects_csv,
    fastest,
    largest_batches,
    pairs_csv,
)
from torchditan.report.findings import (
    AXIS_NAMES,
    STATUS_NAMES,
    Finding,
    effect_name,
    findings,
    percent,
    value_name,
)
from torchditan.report.loss_plot import loss_figure
from torchditan.report.losses import FEWEST_STEPS, final_losses, loss_curves
from torchditan.report.pairs import MEMORY, METRICS, MFU, THROUGHPUT, Metric
from torchditan.report.sanity import MINUS, Check, count
from torchditan.report.verdict_tables import verdict_finding, verdict_section, verdicts_csv


def write_report(analysis: Analysis, out: Path) -> Path:
    """Write report.html and the CSV files of an analysis to `out`. Returns the path of the page."""
    report = out / "report.html"
    contents = {
        out / "effects.csv": effects_csv(analysis),
        out / "pairs.csv": pairs_csv(analysis),
        report: report_html(analysis).encode(),
    }
    if analysis.verdicts:
        contents[out / "verdicts.csv"] = verdicts_csv(analysis.verdicts)
    page.write_files(contents, out)
    return report


def report_html(analysis: Analysis) -> str:
    """The HTML page."""
    names = ", ".join(dict.fromkeys(analysis.results.runs["grid"]))
    sections = (
        ("verdicts", "Verdicts on quality", _verdicts_section),
        ("effects", "What each setting changes", _effects_section),
        ("memory", "Memory at the same batch", _memory_section),
        ("best", "Each at its best batch", _best_section),
        ("interactions", "Interactions between settings", _interactions_section),
        ("batch", "Throughput and memory over batch size", _batch_section),
        ("frontier", "Throughput over memory", _frontier_section),
        ("scaling", "More devices", _scaling_section),
        ("loss", "Loss over steps", _loss_section),
        ("folders", "Between folders and devices", _folders_section),
        ("sanity", "Sanity checks", _sanity_section),
        ("failures", "Runs that did not complete", _failures_section),
        ("origin", "Hardware and versions", _origin_section),
        ("method", "How the numbers are computed", _method_section),
    )
    shown = [
        (anchor, title, make(analysis))
        for anchor, title, make in sections
        if make is not _verdicts_section or analysis.verdicts
    ]
    return page.document(
        title=f"Ablations: {names}",
        heading=f"Effects of the optimisations: {names}",
        top=_facts(analysis),
        findings=_findings_box(analysis),
        sections=shown,
    )


def _facts(analysis: Analysis) -> str:
    """Hardware, versions and dates in two lines."""
    runs = analysis.results.runs
    devices = "; ".join(_devices(analysis))
    torch = _list(runs["torch_version"])
    started = sorted(value for value in set(runs["started"]) if value)
    days = " to ".join(dict.fromkeys((started[0][:10], started[-1][:10]))) if started else "unknown days"
    windows = _list(f"{value:g}" for value in runs["window"].dropna())
    steps = _list(f"{value:g}" for value in runs["steps"].dropna())
    commits = _shorten(map(_commit, runs["git_commit"]))
    text = f"{devices or 'unknown hardware'}. torch {torch or 'unknown'}, commit {commits}, run {days}. "
    text += f"{steps or '?'} steps per run, the last {windows or '?'} measured. "
    if len(analysis.results.seeds) > 1:
        text += f"{len(analysis.results.seeds)} training seeds, averaged: {_list(analysis.results.seeds)}. "
    return f'<p class="facts">{html.escape(text)}</p>'


def _commit(text: str) -> str:
    """The abbreviated commit, and whether files differed from it."""
    return text[:12] + ("-dirty" if text.endswith("-dirty") else "")


def _devices(analysis: Analysis) -> list[str]:
    runs = analysis.results.runs
    runs = runs[runs["device"] != ""]
    lines = []
    for device in dict.fromkeys(runs["device"]):
        numbers = sorted({int(number) for number in runs["num_devices"][runs["device"] == device].dropna()})
        lines.append(f"{' or '.join(map(str, numbers)) or '?'} x {device}")
    return lines


def _findings_box(analysis: Analysis) -> str:
    judged = [verdict_finding(analysis.verdicts)] if analysis.verdicts else []
    first, *others = [*judged, *findings(analysis)]
    cards = [page.card(first, "finding first"), _sanity_card(analysis)]
    cards += [page.card(finding, "finding") for finding in others]
    return f'<div class="findings">{"".join(cards)}</div>'


def _sanity_card(analysis: Analysis) -> str:
    failed = [check for check in analysis.checks if check.passed is False]
    looked = [check for check in analysis.checks if check.passed is not None]
    if failed:
        verb = "needs" if len(failed) == 1 else "need"
        answer = f"{len(failed)} of {count(len(looked), 'sanity check')} {verb} attention."
        sentences = [f"Not so: {check.title[0].lower()}{check.title[1:]}. {check.sentence}" for check in failed]
    else:
        answer = f"All {count(len(looked), 'sanity check')} passed." if looked else "No check was possible."
        sentences = [f"{check.title}." for check in looked[:4]]
    return page.card(
        Finding("Can I trust these numbers?", answer, sentences), "finding warn" if failed else "finding"
    )  # fmt: skip


def _verdicts_section(analysis: Analysis) -> str:
    return verdict_section(analysis.verdicts)


def _effects_section(analysis: Analysis) -> str:
    text = (
        "<p>Two runs are compared only if they differ in one setting and agree in all others, including the batch per "
        "device. White dots are medians over such pairs, thick bars the middle half, thin lines the full range, and n "
        "the number of pairs.</p>"
    )
    if not analysis.same_batch:
        return text + page.none("No pairs: only the batch varies in these runs.")
    plot = page.plot(plots.effects_figure(analysis, analysis.same_batch), "effects-plot", "No pairs.")
    return text + plot + _effect_table(analysis, analysis.same_batch)


def _effect_table(analysis: Analysis, effects: Sequence[Effect]) -> str:
    between = effects[0].axis == "source"
    several = len(analysis.results.sources) > 1 and not between
    headers = ["folder" if between else "effect", *(["grid"] if several else []), "metric", "better", "pairs", "median"]
    headers += ["middle half", "min", "max", "better in", "noise"]
    rows = []
    for effect in effects:
        for metric in METRICS:
            change = effect.change(metric)
            where = [effect_name(effect), *([effect.source] if several else [])]
            where = where if metric is METRICS[0] else [""] * len(where)
            row = [*where, metric.name.replace(" ", "\N{NO-BREAK SPACE}"), metric.better]
            if not change.num_pairs:
                why = _why_none(analysis, effect, metric)
                rows.append([*row, "0", why, *[""] * 5])
                continue
            middle = f"{percent(change.quartile_1)} to {percent(change.quartile_3)}"
            noise = f"±{change.noise:.1f}%" if change.noise else ""
            row += [f"{change.num_pairs:,}", percent(change.median), middle]
            row += [percent(change.minimum), percent(change.maximum), f"{change.num_better:,} of {change.num_pairs:,}"]
            rows.append([*row, noise])
    return page.table(headers, rows, numeric=set(headers[headers.index("pairs") :]))


def _why_none(analysis: Analysis, effect: Effect, metric: Metric) -> str:
    if len(effect.pairs) and metric is MFU:
        return "peak unknown"
    return "not measured" if len(effect.pairs) else "no pairs"


def _memory_section(analysis: Analysis) -> str:
    text = (
        "<p>Peak memory of the same pairs in GiB per device: the saving of a setting at a batch that fits in both.</p>"
    )
    if set(analysis.results.runs["device_type"]) == {"cpu"}:
        text += (
            "<p>On a CPU this is the peak resident memory of a process, which includes the memory of the compiler.</p>"
        )
    rows = []
    for effect in analysis.same_batch:
        change = effect.change(MEMORY)
        if not change.num_pairs:
            continue
        before, after = effect.pairs[f"{MEMORY.column}_from"], effect.pairs[f"{MEMORY.column}_to"]
        rows.append(
            [
                effect_name(effect),
                effect.source,
                f"{change.num_pairs:,}",
                f"{before.median():.3g}",
                f"{after.median():.3g}",
                f"{(after - before).median():+.2g}".replace("-", MINUS),
                percent(change.median),
                f"{percent(change.quartile_1)} to {percent(change.quartile_3)}",
            ]
        )
    headers = [
        "effect",
        "grid",
        "pairs",
        "median before",
        "median after",
        "median change, GiB",
        "change",
        "middle half",
    ]
    return text + (
        page.table(headers, rows, numeric=set(headers[2:])) if rows else page.none("No pairs with a peak memory.")
    )


def _best_section(analysis: Analysis) -> str:
    text = (
        "<p>A setting that saves memory may allow a larger batch. Here each side runs at the fastest batch tried, so "
        "the batches of a pair may differ. Only settings that were tried at the same batches are compared"
        f"{_left_out(analysis)}.</p>"
    )
    if BATCH_SIZE not in analysis.results.varied:
        return text + page.none("Only one batch size: see the effects at the same batch.")
    known = [effect for effect in analysis.best_batch if len(effect.pairs)]
    if not known:
        return text + page.none("No pairs.")
    batches = analysis.results.cells["batch"].to_numpy(float)
    rows = []
    for effect in known:
        throughput, memory = effect.change(THROUGHPUT), effect.change(MEMORY)
        ratio = batches[effect.pairs["b"].to_numpy(int)] / batches[effect.pairs["a"].to_numpy(int)]
        larger = int((ratio > 1).sum())
        rows.append(
            [
                effect_name(effect),
                effect.source,
                f"{throughput.num_pairs:,}",
                percent(throughput.median),
                f"{percent(throughput.quartile_1)} to {percent(throughput.quartile_3)}",
                percent(effect.change(MFU).median),
                percent(memory.median),
                f"{larger:,} of {throughput.num_pairs:,}",
            ]
        )
    headers = ["effect", "grid", "pairs", "throughput", "middle half", "MFU", "peak memory", "larger best batch"]
    plot = page.plot(plots.effects_figure(analysis, known), "best-plot", "No pairs.")
    return text + plot + page.table(headers, rows, numeric=set(headers[2:]))


def _left_out(analysis: Analysis) -> str:
    number = analysis.num_unequal_batches
    return f" ({count(number, 'pair')} excluded)" if number else ""


def _interactions_section(analysis: Analysis) -> str:
    text = (
        "<p>The median change of each effect (row) over the pairs with one value of another setting (column). If the "
        "numbers of a row are equal, the effect does not depend on the column. Blue is better, orange is worse. "
        "Settings with many values are left out if the map would be too wide.</p>"
    )
    figure = plots.interactions_figure(analysis)
    return text + page.plot(figure, "interactions-plot", "No pairs in which a second setting varies.")


def _batch_section(analysis: Analysis) -> str:
    text = "<p>A line is one combination of the other settings. It ends at the memory limit or the end of the grid.</p>"
    figure = plots.batch_figure(analysis)
    text += page.plot(figure, "batch-plot", "Only one batch size, or no completed run.")
    return text + _models(analysis) + _largest_batches(analysis)


def _models(analysis: Analysis) -> str:
    """The fastest run of each published model, per device, for comparison with published numbers."""
    if MODEL not in analysis.results.axes or analysis.results.cells.empty:
        return ""
    cells = fastest(analysis.results)
    measured = ("images_per_second_per_device_mean", "tflops_per_device_mean", MFU.column, MEMORY.column)
    rows = []
    for _, cell in cells[cells[MODEL] != ""].iterrows():
        numbers = ["not measured" if cell[name] != cell[name] else f"{cell[name]:,.3g}" for name in measured]
        devices = f"{cell['num_devices']:g} x {cell['device']}"
        rows.append([cell[MODEL], cell[RESOLUTION], devices, cell[PRECISION], cell[BATCH_SIZE], *numbers])
    headers = [
        "model",
        "resolution",
        "devices",
        "precision",
        "batch",
        "images/s per device",
        "TFLOP/s per device",
        "MFU %",
    ]
    headers.append("GiB")
    return "<p>The fastest run of each model:</p>" + page.table(headers, rows, numeric=set(headers[4:]))


def _largest_batches(analysis: Analysis) -> str:
    table = largest_batches(analysis.results)
    if table.empty:
        return ""
    varied = [axis for axis in analysis.results.varied if axis != BATCH_SIZE]
    rows = [
        [
            row["source"],
            *(value_name(axis, row[axis]) for axis in varied),
            f"{row['fits']:g}" if row["fits"] == row["fits"] else "none",
            f"{row['fails']:g}",
        ]
        for _, row in table.iterrows()
    ]
    headers = ["grid", *(AXIS_NAMES.get(axis, axis) for axis in varied), "largest that ran", "smallest out of memory"]
    shown = page.table(headers, rows, numeric=set(headers[-2:]))
    return page.details(f"Memory limits: {count(len(rows), 'setting')}", shown)


def _frontier_section(analysis: Analysis) -> str:
    text = (
        "<p>Each dot is a setting. The dotted frontier connects the settings that no other one beats in both memory "
        "and throughput. Models and patch sizes do different work, so each has its own frontier.</p>"
    )
    return text + page.plot(plots.frontier_figure(analysis), "frontier-plot", "No completed run has both numbers.")


def _scaling_section(analysis: Analysis) -> str:
    figure = plots.scaling_figure(analysis)
    devices = sorted({int(number) for number in analysis.results.cells["num_devices"].dropna()})
    if figure is None and len(devices) == 1:
        return page.none(f"All completed runs used {count(devices[0], 'device')}: nothing to scale over.")
    text = "<p>Images/s per device, relative to the same setting on the fewest devices (medians).</p>"
    return text + page.plot(figure, "scaling-plot", "No setting completed on two numbers of devices.")


def _loss_section(analysis: Analysis) -> str:
    curves = loss_curves(analysis.results)
    if not curves:
        return page.none(f"No run has {FEWEST_STEPS} or more steps. Shorter runs measure only speed.")
    table = final_losses(analysis.results)
    text = (
        "<p>Each line is one run: means of its loss over intervals of steps. A cross marks the end of a run that did "
        "not complete. All runs of a grid see the same samples, noise and timesteps in the same order.</p>"
    )
    plot = page.plot(loss_figure(curves), "loss-plot", "No losses.")
    rows = [[rate or "(one)", *losses.values()] for rate, losses in table.items()]
    headers = ["learning rate", *(value_name(PRECISION, precision) for precision in next(iter(table.values())))]
    return text + plot + "<p>Mean loss of the last steps:</p>" + page.table(headers, rows, numeric=set(headers[1:]))


def _folders_section(analysis: Analysis) -> str:
    if len(analysis.results.sources) == 1:
        return page.none("One folder, one device. Pass more grid folders to compare devices, versions or commits.")
    first = html.escape(analysis.results.sources[0])
    text = f"<p>Changes relative to {first}, over the settings that completed in both folders.</p>"
    plot = page.plot(plots.folders_figure(analysis), "folders-plot", "No setting completed in both.")
    return text + plot + _effect_table(analysis, analysis.between_folders) + _speed_ups(analysis)


def _speed_ups(analysis: Analysis) -> str:
    rows = []
    for effect in analysis.between_folders:
        change = effect.change(THROUGHPUT)
        if change.num_pairs:
            ratios = [1 + value / 100 for value in (change.median, change.quartile_1, change.quartile_3)]
            middle = f"{ratios[1]:.2f} to {ratios[2]:.2f}"
            rows.append([effect.to_value, effect.from_value, f"{change.num_pairs:,}", f"{ratios[0]:.2f} times", middle])
    if not rows:
        return ""
    headers = ["grid", "against", "pairs", "speed-up", "middle half"]
    return "<h3>Speed-up</h3>" + page.table(headers, rows, numeric=set(headers[2:]))


def _sanity_section(analysis: Analysis) -> str:
    return "<p>A failed check removes nothing from the results.</p>" + "".join(map(_check, analysis.checks))


def _check(check: Check) -> str:
    kind = {True: "pass", False: "fail", None: "skip"}[check.passed]
    text = f'<p class="check {kind}"><b>{html.escape(check.title)}.</b></p>'
    text += f'<div class="detail">{html.escape(check.sentence)}'
    if check.rows:
        text += page.details(f"Show {count(len(check.rows), 'case')}", page.table(check.columns, check.rows))
    return f"{text}</div>"


def _failures_section(analysis: Analysis) -> str:
    runs = analysis.results.runs
    text = ""
    titles = {"error": "Failures", "timeout": "Timeouts", "oom": "Out of memory", "skipped": "Skipped"}
    for status, title in titles.items():
        mine = runs[runs["status"] == status]
        if mine.empty:
            continue
        reasons = mine["reason"].replace("", "no reason recorded").value_counts(sort=True)
        rows = [[reason, f"{number:,}"] for reason, number in reasons.head(page.MOST_ROWS // 10).items()]
        text += f"<h3>{title}: {count(len(mine), 'run')}</h3>"
        if status != "oom":  # their reasons differ only in sizes
            text += page.table(["reason", "runs"], rows, numeric={"runs"})
        listed = [
            [row["run_name"], row["source"], row["reason"] or "no reason recorded"]
            for _, row in mine.head(page.MOST_ROWS).iterrows()
        ]
        shown = page.table(["run", "grid", "reason"], listed)
        if len(mine) > page.MOST_ROWS:
            shown += f"<p>The first {page.MOST_ROWS}; the others are in runs_summary.csv.</p>"
        text += page.details("Show the runs", shown, is_open=len(mine) <= 12)
    return text or page.none("Every run completed.")


def _origin_section(analysis: Analysis) -> str:
    rows = []
    for source in analysis.results.sources:
        runs = analysis.results.runs[analysis.results.runs["source"] == source]
        statuses = runs["status"].value_counts()
        rows.append(
            [
                source,
                _list(runs["device"]),
                _list(runs["host"]),
                _list(f"{number:g}" for number in runs["num_devices"].dropna()),
                _list(runs["torch_version"]),
                _list(runs["python_version"]),
                _shorten(map(_commit, runs["git_commit"])),
                ", ".join(
                    f"{statuses[status]:,} {name}" for status, name in STATUS_NAMES.items() if status in statuses
                ),
            ]
        )
    headers = ["grid", "device", "host", "devices", "torch", "python", "commit", "runs"]
    text = page.table(headers, rows)
    constant = [axis for axis in analysis.results.axes if axis not in analysis.results.varied]
    fixed = [
        f"{AXIS_NAMES.get(axis, axis)} {_list(value_name(axis, value) for value in analysis.results.runs[axis])}"
        for axis in constant
    ]
    varied = [AXIS_NAMES.get(axis, axis) for axis in analysis.results.varied]
    text += f"<p>Varied: {html.escape(', '.join(varied) or 'nothing')}. Held: {html.escape('; '.join(fixed))}.</p>"
    started = sorted(value for value in set(analysis.results.runs["started"]) if value)
    return text + (f"<p>First run {html.escape(started[0])}, last {html.escape(started[-1])}.</p>" if started else "")


def _method_section(analysis: Analysis) -> str:
    effects = len(analysis.results.effects)
    seeds = (
        "<p>Training seeds are repetitions: after the repeats, the seeds of a setting are averaged, each with the same "
        "weight. The noise of a pair is then at least the 95% interval of its difference over seeds.</p>"
    )
    return (
        "<p>A run is used as data if it completed and has a throughput. Repeats of a setting are averaged first. Pairs "
        f"are formed for each of the {count(effects, 'setting')} that vary in addition to the batch. The runs of a "
        "pair completed, agree in all other settings, and ran on the same kind and number of devices in the same "
        "grid. The change is computed within each pair. The table shows median, quartiles (linear interpolation) and "
        "extremes over pairs. Changes of MFU are relative too: from 20% to 30% is +50%.</p>"
        "<p>Noise is two standard errors of the difference of a pair's two means, from the spread of the steps in the "
        "window. Steps are treated as independent, so this is a lower bound. A difference is clear if the middle half "
        "of the pairs has one sign and the median exceeds the noise. With few pairs, read the single pairs in "
        "pairs.csv. The tables are in effects.csv, in the same folder.</p>"
        "<p>The start-up cost of compiling is compile_s of the compiled run minus that of its eager pair. It is repaid "
        "after this time divided by the time saved per step.</p>" + (seeds if len(analysis.results.seeds) > 1 else "")
    )


def _list(values: Iterable[str]) -> str:
    return ", ".join(value for value in dict.fromkeys(values) if value)


def _shorten(values: Iterable[str]) -> str:
    found = [value for value in dict.fromkeys(values) if value]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "") or "unknown"
