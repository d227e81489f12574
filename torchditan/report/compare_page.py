# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The report of compared runs: training times, curves, scores at equal time and equal steps, samples, settings.

Notable:
- A value that a run did not measure is "not measured" in its cell, never 0. What no run measured is not shown.
- Sample grids are embedded. Large ones are scaled down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchditan.report import plots
from torchditan.report.compare import (
    SAME_CURVE,
    Comparison,
    Run,
    Sampling,
    Standing,
    compare,
    comparison_csv,
)
from torchditan.report.labels import UNKNOWN, commit_name, count, duration, listed, number, setting_value
from torchditan.report.page import Block, Page, Picture, Pictures, Section, Table, Warned, data_uri, write_page
from torchditan.report.plots import Panel, thinned

_STATES = {"oom": "out of memory", "running": "running, or killed", "error": "failed"}
KINDS = {
    "job": "training",
    "path": "a path; contents may be equal",
    "drawing": "sampling",
    "running": "execution",
}


def write_comparison(folders: Sequence[Path], out: Path, labels: Sequence[str] | None = None) -> Path:
    """Compare run directories; write compare.html, its plots and compare.csv to `out`. Returns the path of the page."""
    return write_page(comparison_page(compare(folders, labels)), out, "compare.html")


def comparison_page(comparison: Comparison) -> Page:
    sections = (_runs, _curves, _equal_time, _equal_steps, _scores, _samples, _settings, _agreement, _origin)
    return Page(
        title=f"{count(len(comparison.runs), 'run')} compared: {', '.join(run.label for run in comparison.runs)}",
        facts=_facts(comparison),
        headlines=[line for line in (_time_line(comparison), _curve_line(comparison)) if line],
        warnings=list(_warnings(comparison)),
        sections=[make(comparison) for make in sections],
        files={"compare.csv": comparison_csv(comparison)},
    )


def _facts(comparison: Comparison) -> list[str]:
    runs = comparison.runs
    started = sorted(str(run.content["started"])[:10] for run in runs if run.content.get("started"))
    days = f", run {' to '.join(dict.fromkeys((started[0], started[-1])))}" if started else ""
    versions = listed(_version(run, "torch") for run in runs)
    commits = listed(commit_name(run.content.get("git_commit")) for run in runs)
    hardware = "; ".join(dict.fromkeys(run.hardware for run in runs))
    return [f"{hardware}. torch {versions}, commit {commits or 'unknown'}{days}."]


def _time_line(comparison: Comparison) -> str:
    """The ratio of total training times, with which the projects that we continue lead."""
    times = [(time, run) for run in comparison.runs if (time := comparison.training_time(run))]
    if len(times) < 2:
        return ""
    (least, fastest), (most, slowest) = (choose(times, key=lambda pair: pair[0]) for choose in (min, max))
    steps = count(comparison.common_step or 0, "step")
    return (
        f"Total training time: {fastest.label} is {_ratio(most / least)} times as fast as {slowest.label} ({steps} in "
        f"{duration(least)} instead of {duration(most)})."
    )


def _curve_line(comparison: Comparison) -> str:
    """Whether runs of one job follow one curve; that they do not is a warning."""
    known = [pair.difference for pair in comparison.curves if pair.difference is not None]
    if not known or max(known) > SAME_CURVE:
        return ""
    return f"Runs of one job have the same losses{f', within {max(known):.1e}' if max(known) else ''}."


def _warnings(comparison: Comparison) -> Iterable[Warned]:
    names = {kind: [s.name for s in comparison.settings if s.kind == kind] for kind in KINDS}
    if names["job"]:
        yield Warned(f"These are different jobs. They differ in {listed(names['job'])}: do not expect equal losses.")
    if names["path"]:
        yield Warned(f"Paths may lead to the same or to other weights: {listed(names['path'])}.")
    if names["drawing"] and comparison.scored_against:
        yield Warned(f"Settings of sampling differ, so scores do not compare the models: {listed(names['drawing'])}.")
    if len(comparison.scored_against) > 1:
        yield Warned("Some scores are against real images, others against samples of the original model.")
    parted = [pair for pair in comparison.curves if pair.parted_at is not None]
    if parted:
        first = min(parted, key=lambda pair: pair.parted_at or 0)
        pairs = f"{len(parted)} of {count(len(comparison.curves), 'pair')} of runs of one job"
        text = f"The losses of {pairs} differ by more than {SAME_CURVE:g}, first at step {first.parted_at:,}"
        yield Warned(f"{text} ({first.first.label} and {first.second.label}).")
    for run in comparison.runs:
        if run.status.get("reason"):
            yield Warned(f"{run.label}: {run.status['reason']}")


def _runs(comparison: Comparison) -> Section:
    rows = []
    for run in comparison.runs:
        speed_up, time_ratio = comparison.speed_up(run), comparison.time_ratio(run)
        rows.append(
            [
                run.label,
                run.hardware,
                _text(run.parallel_mode),
                _text(run.global_batch_size),
                _text(run.precision),
                steps_text(run),
                duration(run.elapsed_s),
                UNKNOWN if time_ratio is None else _ratio(time_ratio),
                _number(run.steps_per_second),
                _number(run.images_per_second),
                UNKNOWN if speed_up is None else _ratio(speed_up),
                _number(run.seconds_per_image),
                _number(run.peak_memory_gib),
                _number(run.loss, 4),
                _number(run.validation_loss, 4),
                state_text(run),
            ]
        )
    headers = ["run", "hardware", "parallel", "global batch", "precision", "steps", "total training time"]
    headers += ["times as fast in total", "steps/s", "images/s", "speed-up of images/s", "s per sample drawn"]
    headers += ["peak memory, GiB", "final loss", "validation loss", "status"]
    note = (
        "Total training time is the wall clock of the last logged step, with sampling, validation and checkpoints. Its "
        "ratio is to the slowest run, over the steps that all reached. Steps/s and images/s are medians over steps, "
        "without the first line."
    )
    if any(run.is_cpu for run in comparison.runs):
        note += " On a CPU, memory is that of the first process, and all processes share the cores of the machine."
    return Section("The runs", [_measured_columns(headers, rows, keep=8)], note)


def _measured_columns(headers: Sequence[str], rows: Sequence[Sequence[str]], *, keep: int) -> Table:
    """A table without those later columns that no run measured."""
    shown = [index for index in range(len(headers)) if index < keep or any(row[index] != UNKNOWN for row in rows)]
    names = [headers[index] for index in shown]
    texts = frozenset(("run", "hardware", "parallel", "precision", "status"))
    return Table(names, [[row[index] for index in shown] for row in rows], frozenset(names) - texts)


def _curves(comparison: Comparison) -> Section:
    unit, seconds = time_unit(comparison)
    times = [thinned([(step, time / seconds) for step, time in run.curve("elapsed_s")]) for run in comparison.runs]
    time_over_steps = Panel("time over steps", "step", unit, times, comparison.equal_step)
    panels = [*_panels(comparison, "loss", "loss"), time_over_steps]
    note = "Dotted lines mark where the runs are compared below: the last time and the last step that they share."
    return Section("Loss and time", _drawn(comparison, panels, "curves", "Loss and training time"), note)


def _scores(comparison: Comparison) -> Section:
    """Scores over steps and over time, if a run has measured one twice."""
    blocks: list[Block] = []
    for key, name in (("psnr", "PSNR, dB"), ("ssim", "SSIM"), ("validation_loss", "validation loss")):
        if max(len(run.scores(key)) for run in comparison.runs) > 1:
            blocks += _drawn(comparison, _panels(comparison, key, name), key, name)
    return Section("Scores over steps and time", blocks)


def _panels(comparison: Comparison, key: str, name: str) -> list[Panel]:
    """A curve of every run over steps, and over time."""
    unit, seconds = time_unit(comparison)
    over_steps = [thinned(run.scores(key)) for run in comparison.runs]
    over_time = [thinned(_over_time(run, run.scores(key), seconds)) for run in comparison.runs]
    equal_time = None if comparison.equal_time_s is None else comparison.equal_time_s / seconds
    return [
        Panel(f"{name} over steps", "step", name, over_steps, comparison.equal_step),
        Panel(f"{name} over time", unit, name, over_time, equal_time),
    ]


def _drawn(comparison: Comparison, panels: Sequence[Panel], name: str, title: str) -> list[Block]:
    figure = plots.curves_figure([run.label for run in comparison.runs], panels)
    return [] if figure is None else [plots.draw(figure, name, title)]


def _equal_time(comparison: Comparison) -> Section:
    if comparison.equal_time_s is None:
        return Section("At equal time", [])
    rows = []
    for run in comparison.runs:
        standing = comparison.at_equal_time(run)
        reached = "none" if standing.step is None else f"{standing.step:,}"
        drawn = _no_scores(run) if standing.sampling is None else f"{standing.sampling.step:,}"
        rows.append([run.label, reached, *_standing(run, standing), drawn])
    headers = ["run", "reached step", "loss", "validation loss", "PSNR, dB", "SSIM", "drawn at step"]
    note = f"After {duration(comparison.equal_time_s)}, the largest time that all runs reached. {_meaning(comparison)}"
    return Section("At equal time", [_measured_columns(headers, rows, keep=3)], note.strip())


def _equal_steps(comparison: Comparison) -> Section:
    if comparison.equal_step is None:
        return Section("At equal steps", [])
    rows = []
    for run in comparison.runs:
        standing = comparison.at_equal_step(run)
        after = "not reached" if standing.elapsed_s is None else duration(standing.elapsed_s)
        rows.append([run.label, after, *_standing(run, standing)])
    samplings = [sampling for run in comparison.runs for sampling in run.samplings]
    scored = " with scored samples" if any(sampling.is_scored for sampling in samplings) else ""
    shared = scored or (" with samples" if samplings else "")
    headers = ["run", "after", "loss", "validation loss", "PSNR, dB", "SSIM"]
    note = f"At step {comparison.equal_step:,}, the last common step{shared}. {_meaning(comparison)}"
    return Section("At equal steps", [_measured_columns(headers, rows, keep=3)], note.strip())


def _meaning(comparison: Comparison) -> str:
    """What the scores mean."""
    if comparison.scored_against == {"original"}:
        return "PSNR and SSIM are against samples of the original model: how far the run moved, not how good it is."
    if comparison.scored_against == {"images"}:
        return "PSNR and SSIM are against the held-out image of each caption. A good sample can differ from it."
    return ""


def _standing(run: Run, standing: Standing) -> list[str]:
    """Loss, validation loss, PSNR and SSIM, or why they are missing."""
    sampling, missing = standing.sampling, _no_scores(run)
    no_validation = "none by then" if run.validation_loss is not None else UNKNOWN
    return [
        "not logged" if standing.loss is None else number(standing.loss, 4),
        no_validation if standing.validation_loss is None else number(standing.validation_loss, 4),
        missing if sampling is None else UNKNOWN if sampling.psnr is None else f"{sampling.psnr:.2f}",
        missing if sampling is None else UNKNOWN if sampling.ssim is None else f"{sampling.ssim:.4f}",
    ]


def _no_scores(run: Run) -> str:
    return "none by then" if any(sampling.is_scored for sampling in run.samplings) else UNKNOWN


def _samples(comparison: Comparison) -> Section:
    groups: list[Block] = []
    if comparison.picture_step is not None:
        pictures = [_picture(run, comparison.picture_at_equal_step(run)) for run in comparison.runs]
        groups.append(Pictures(f"At step {comparison.picture_step:,}", pictures))
    samplings = [comparison.picture_at_equal_time(run) for run in comparison.runs]
    if any(samplings):
        pictures = [_picture(run, sampling) for run, sampling in zip(comparison.runs, samplings, strict=True)]
        groups.append(Pictures(f"After {duration(comparison.equal_time_s)}", pictures))
    return Section("Samples side by side", groups)


def _picture(run: Run, sampling: Sampling | None) -> Picture:
    if sampling is None or sampling.picture is None:
        return Picture(run.label, "has no samples by then" if run.pictures else "has no samples", None)
    uri = data_uri(sampling.picture)
    parts = [f"step {sampling.step:,}", duration(sampling.elapsed_s) if sampling.elapsed_s is not None else ""]
    parts += [f"{sampling.psnr:.2f} dB" if sampling.psnr is not None else ""]
    parts += [f"SSIM {sampling.ssim:.4f}" if sampling.ssim is not None else ""]
    parts += ["the file cannot be read" if uri is None else ""]
    return Picture(run.label, ", ".join(filter(None, parts)), uri)


def _settings(comparison: Comparison) -> Section:
    rows = [[setting.name, KINDS[setting.kind], *map(setting_value, setting.values)] for setting in comparison.settings]
    headers = ["setting", "decides", *(run.label for run in comparison.runs)]
    return Section("Settings that differ", [Table(headers, rows)] if rows else [])


def _agreement(comparison: Comparison) -> Section:
    rows = [
        [
            pair.first.label,
            pair.second.label,
            f"{pair.num_steps:,}",
            f"{pair.difference:.1e}" if pair.difference else "0",
            "" if pair.step is None else f"{pair.step:,}",
            "nowhere" if pair.parted_at is None else f"{pair.parted_at:,}",
        ]
        for pair in comparison.curves
        if pair.difference is not None
    ]
    headers = ["run", "and", "common steps", "largest difference", "at step", f"above {SAME_CURVE:g} from step"]
    note = (
        f"Relative to the loss, over the steps that both logged. Curves of one job should agree within {SAME_CURVE:g}; "
        "rounding differs between devices and splits of the batch, and training amplifies it."
    )
    return Section("Differences of the losses", [Table(headers, rows, frozenset(headers[2:]))] if rows else [], note)


def _origin(comparison: Comparison) -> Section:
    rows = [
        [
            run.label,
            *(_text(run.machine.get(key)) for key in ("device_name", "cpu", "cpu_count", "hostname")),
            _version(run, "torch"),
            _version(run, "python"),
            commit_name(run.content.get("git_commit")) or "unknown",
            _text(run.content.get("started"))[:16].replace("T", " "),
            "yes" if run.was_resumed else "no",
        ]
        for run in comparison.runs
    ]
    headers = ["run", "device", "CPU", "cores", "host", "torch", "python", "commit", "last start, UTC", "resumed"]
    resumed = any(run.was_resumed for run in comparison.runs)
    note = "A resumed run lists the hardware of its last start. Its time continues from its checkpoint."
    return Section("Hardware and versions", [Table(headers, rows, frozenset(("cores",)))], note if resumed else "")


def time_unit(comparison: Comparison) -> tuple[str, float]:
    """Title of the time axes and their unit in seconds, chosen for the longest and the shortest run."""
    times = [run.elapsed_s for run in comparison.runs if run.elapsed_s]
    typical = math.sqrt(min(times) * max(times)) if times else 0.0
    if typical < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if typical < 3 * 3600 else ("hours", 3600.0)


def _over_time(run: Run, curve: Iterable[tuple[int, float]], seconds: float) -> list[tuple[float, float]]:
    """A curve over the time at which its steps were reached, in units of `seconds`."""
    known = ((run.reached_at(step), value) for step, value in curve)
    return [(time / seconds, value) for time, value in known if time is not None]


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else number(value)


def _number(value: float | None, digits: int = 3) -> str:
    return UNKNOWN if value is None else number(value, digits)


def _text(value: Any) -> str:
    return "unknown" if value is None else str(value)


def steps_text(run: Run) -> str:
    """`100`, or `15 of 100` if the run has not done all."""
    if run.steps is None:
        return "none"
    planned = "?" if run.planned_steps is None else f"{run.planned_steps:,}"
    return f"{run.steps:,}" if run.steps == run.planned_steps else f"{run.steps:,} of {planned}"


def state_name(run: Run) -> str:
    return _STATES.get(run.state, run.state)


def state_text(run: Run) -> str:
    return state_name(run) + (", resumed" if run.was_resumed else "")


def _version(run: Run, package: str) -> str:
    return _text(run.content.get("versions", {}).get(package))
