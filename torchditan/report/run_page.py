# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The page of one run, or of several: losses, scores, speed, memory, samples over time, evaluation, settings.

Notable:
- The page is one file. Its plots and pictures are inside it, so it can be sent to others.
- Of several runs it also has the ratio of their training times, curves over time, and what differs between them.
- A run that was interrupted, has no samples or has damaged files gives a page that says so.
- The pictures share a budget of bytes: large ones become smaller, and of many steps some are shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torchditan.config.errors import ConfigError, option_error
from torchditan.config.schema import options
from torchditan.evaluation.card import Card, CardFigure, cards_of_run
from torchditan.evaluation.card_tables import interval_text, ordered_names, value_text
from torchditan.report import plots
from torchditan.report.labels import UNKNOWN, as_utf8, commit_name, count, duration, listed, number, setting_value
from torchditan.report.page import (
    Block,
    Frames,
    Look,
    Page,
    Picture,
    Pictures,
    Plot,
    Plots,
    Section,
    Slider,
    Table,
    Warned,
    data_uri,
    html_of,
    num_bytes,
    picture_uri,
    uri_of,
    write_page,
)
from torchditan.report.plots import Panel, Points
from torchditan.report.runs import Run, differing_settings, read_runs, runs_in
from torchditan.report.several_runs import Comparison, ratio_text
from torchditan.run.atomic_files import write_file

PAGE_NAME = "report.html"
_MOST_RUNS = 32  # the colours and dashes of the plots distinguish no more
_MOST_PICTURES = 40
_GRID_BYTES, _STRIP_BYTES, _ANIMATION_BYTES = 4_000_000, 1_000_000, 1_000_000  # of all; as base64 they take 8 MB
_MOST_COLUMNS = 8
_MOST_OPTIONS = 1000
_LONGEST_VALUE = 300
_MOST_PROFILES = 5
_BIN = re.compile(r"validation_loss_by_t/(\d\.\d+)-(\d\.\d+)")
_ABSENT = "absent"


def write_run_page(folders: Sequence[Path], out: Path | None, labels: Sequence[str] | None = None) -> Path:
    """Write the page of run directories.

    Args:
        folders: run directories.
        out: a file that ends with .html, or a folder. None: in the run, or next to the first of several.
        labels: a name for each run. None: the folder names.

    Returns:
        The path of the page.

    Raises:
        ConfigError: a folder is not a run or is named twice, there are too many, or `out` cannot be written.
    """
    content = as_utf8(html_of(run_page(_read_runs(folders, labels, option="run"))))
    first = folders[0]
    path = out or (first if len(folders) == 1 else first.absolute().parent)
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        path = path / PAGE_NAME
    try:
        write_file(path, content)
    except OSError as error:
        raise option_error("--out", str(path), f"is not a writable file ({error.strerror})") from None
    return path


def write_comparison(folders: Sequence[Path], out: Path, labels: Sequence[str] | None = None) -> Path:
    """Write the page of runs as compare.html to the folder `out`, with its plots and compare.csv next to it.

    Args:
        folders: run directories, or grids, whose runs are compared.
        out: the folder.
        labels: a name for each run. None: the folder names.

    Returns:
        The path of the page.

    Raises:
        ConfigError: as `write_run_page`, or there are fewer than two runs.
    """
    folders = [run for folder in folders for run in runs_in(folder)]
    if len(folders) < 2:
        right = "is a single run; must be two or more run directories"
        raise option_error("--compare", " ".join(map(str, folders)), right)
    runs = _read_runs(folders, labels, option="--compare")
    page = replace(run_page(runs), files={"compare.csv": Comparison(runs).csv()})
    return write_page(page, out, "compare.html")


def _read_runs(folders: Sequence[Path], labels: Sequence[str] | None, *, option: str) -> list[Run]:
    if len(folders) > _MOST_RUNS:
        raise ConfigError(
            f"{len(folders)} runs are too many for one page; name at most {_MOST_RUNS}, or the folder that holds them"
        )
    return read_runs(folders, labels, option=option)


def run_page(runs: Sequence[Run]) -> Page:
    sections = (
        *(_summary, _differences, _loss, _scores, _samples, _evaluation, _loss_by_timestep),
        *(_optimization, _speed, _configuration),
    )
    names = ", ".join(run.label for run in runs)
    comparison = Comparison(runs)
    of_runs = [f"{run.label}: {sentence}" for run in runs for sentence in _warnings(run)]
    return Page(
        title=f"Run {names}" if len(runs) == 1 else f"{count(len(runs), 'run')}: {names}",
        facts=[fact for run in runs for fact in _facts(run, is_alone=len(runs) == 1)],
        headlines=list(comparison.headlines),
        warnings=[Warned(sentence) for sentence in (*comparison.warnings, *of_runs)],
        sections=[make(runs) for make in sections],
    )


def _facts(run: Run, *, is_alone: bool) -> Iterable[str]:
    start, state = ("", run.state_name.capitalize()) if is_alone else (f"{run.label}: ", run.state_name)
    images = run.last("images_seen")
    parts = [
        f"{state} at step {run.steps_text}" if run.steps is not None else state,
        "resumed before" if run.was_resumed else "",
        f"{images:,.0f} images" if images is not None else "",
        duration(run.elapsed_s) if run.elapsed_s is not None else "",
    ]
    hardware = f"{run.hardware}, torch {_version(run, 'torch')}" + (
        f", commit {commit_name(str(run.content['git_commit']))}" if run.content.get("git_commit") else ""
    )
    yield f"{start}{', '.join(filter(None, parts))}. {hardware}."
    if description := run.options.get("job.description"):
        yield f"{start}{_shortened(setting_value(description))}"


def _warnings(run: Run) -> Iterable[str]:
    """What a reader has to know about the run before its numbers."""
    if run.state != "completed":
        reason = f": {_shortened(str(run.status['reason']))}" if run.status.get("reason") else ""
        yield f"the status is {run.state_text}{reason}."
    if not run.records:
        imported = "imported" in run.content
        yield "it was imported and did not train." if imported else "metrics.jsonl has no logged step."
    lost = [record["step"] for record in run.records if "loss" in record] if run.records else []
    lost = sorted(set(lost) - {step for step, _ in run.curve("loss")})
    if lost:
        steps = f"{len(lost):,} of {count(len(run.records), 'logged step')}"
        yield f"the loss is not finite at {steps}, first at step {lost[0]:,}."
    if run.num_unreadable_lines:
        yield f"{count(run.num_unreadable_lines, 'line')} of metrics.jsonl cannot be read."
    earlier = len(list(run.path.glob("metrics.jsonl.*[0-9]")))
    if earlier:
        yield f"{count(earlier, 'earlier attempt')} started from step 1 too. The page shows the last one."


def _summary(runs: Sequence[Run]) -> Section:
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("status", lambda run: run.state_text),
        ("reason", lambda run: _shortened(str(run.status.get("reason") or ""))),
        ("steps", lambda run: run.steps_text),
        ("images seen", lambda run: _measured(run.last("images_seen"), "{:,.0f}")),
        ("time", lambda run: duration(run.elapsed_s)),
        ("final loss", lambda run: _measured(run.loss, "{:.4g}")),
        ("validation loss", lambda run: _measured(run.validation_loss, "{:.4g}")),
        *_compared(Comparison(runs)),
        ("steps/s", lambda run: _measured(run.steps_per_second)),
        ("images/s", lambda run: _measured(run.images_per_second)),
        ("MFU, %", lambda run: _measured(run.last("mfu"))),
        ("peak memory, GiB", lambda run: _measured(run.peak_memory_gib)),
        ("s per sample drawn", lambda run: _measured(run.seconds_per_image)),
        ("model", lambda run: _option(run, "model.flavor")),
        ("objective", lambda run: _option(run, "diffusion.objective")),
        ("data", lambda run: _option(run, "dataset.dataset_name")),
        ("classes", _classes),
        ("global batch", lambda run: _option(run, "training.global_batch_size")),
        ("precision", lambda run: str(run.precision or "")),
        ("parallel", lambda run: run.parallel_mode or ""),
        ("hardware", lambda run: run.hardware),
        ("CPU", lambda run: str(run.machine.get("cpu") or "")),
        *((package, lambda run, name=package: _version(run, name)) for package in ("torchditan", "torch", "python")),
        ("git commit", lambda run: commit_name(str(run.content.get("git_commit") or "unknown"))),
        ("created, UTC", lambda run: _moment(run, "created")),
        ("last start, UTC", lambda run: _moment(run, "started") if run.was_resumed else ""),
        ("folder", lambda run: str(run.path)),
    ]
    filled = [[name, *map(value, runs)] for name, value in rows]
    known = [row for row in filled if any(cell not in ("", UNKNOWN) for cell in row[1:])]
    return Section("Summary", [Table(["", *(run.label for run in runs)], known)])


def _compared(comparison: Comparison) -> Iterable[tuple[str, Callable[[Run], str]]]:
    """Ratios to the slowest run, and values at equal steps. Of one run, only its scores."""
    keys = {"psnr": ("PSNR", "{:.2f} dB"), "ssim": ("SSIM", "{:.4f}")}
    if len(comparison.runs) > 1:
        yield f"time for {comparison.common_step or 0:,} steps", lambda run: duration(comparison.training_time(run))
        yield "times as fast", lambda run: _ratio(comparison.time_ratio(run))
        yield "speed-up of images/s", lambda run: _ratio(comparison.speed_up(run))
        keys = {"loss": ("loss", "{:.4g}"), "validation_loss": ("validation loss", "{:.4g}"), **keys}
    for key, (name, form) in keys.items():
        yield f"{name} at step {comparison.equal_step or 0:,}", partial(_at_equal_step, comparison, key, form)


def _at_equal_step(comparison: Comparison, key: str, form: str, run: Run) -> str:
    return _measured(comparison.at_equal_step(run)[key], form)


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else ratio_text(value)


def _differences(runs: Sequence[Run]) -> Section:
    if len(runs) == 1:
        return Section("What differs", [])
    rows = [
        [setting.name, setting.kind, *(_shortened(setting_value(value)) for value in setting.values)]
        for setting in differing_settings(runs)
    ]
    note = "Names and folders of the runs are left out."
    if not rows:
        rows, note = [["(none)"] + [""] * (1 + len(runs))], "The runs have equal settings, names and folders aside."
    return Section("What differs", [Table(["setting", "decides", *(run.label for run in runs)], rows)], note)


def _loss(runs: Sequence[Run]) -> Section:
    smooth = [_smoothed(run.curve("loss")) for run in runs]
    panels = {
        "loss": Panel("Training loss", "step", "loss", smooth, faint=_faint(runs, "loss", smooth), is_log=True),
        "validation": _panel(runs, "Validation loss", "validation_loss", "validation loss", is_log=True),
    }
    if len(runs) > 1:
        unit, seconds = _time_unit(runs)
        times = [[(step, time / seconds) for step, time in run.curve("elapsed_s")] for run in runs]
        panels |= {
            **{f"{name}-over-time": _over_time(runs, panel) for name, panel in panels.items()},
            "time": Panel("Time over steps", "step", unit, times),
        }
    note = "Thick lines of the training loss are means over about 1/20 of the run, thin lines single steps."
    return Section(
        "Loss and time" if len(runs) > 1 else "Loss", _drawn(runs, panels), note if any(panels["loss"].faint) else ""
    )


def _scores(runs: Sequence[Run]) -> Section:
    """PSNR and SSIM of the samples, which runs of one job draw from the same prompts and noise."""
    panels = {
        key: Panel(name, "step", name, [run.scores(key) for run in runs])
        for key, name in (("psnr", "PSNR, dB"), ("ssim", "SSIM"))
    }
    if len(runs) > 1:
        panels |= {f"{name}-over-time": _over_time(runs, panel) for name, panel in panels.items()}
    against = {run.scored_against for run in runs} - {None}
    note = "Against the held-out image of each caption. A good sample can differ from it."
    if against == {"original"}:
        note = "Against samples of the original model: how far the run moved, not how good it is."
    elif len(against) > 1:
        note = "Not comparable: some are against real images, others against samples of the original model."
    return Section("PSNR and SSIM", _drawn(runs, panels), note)


def _over_time(runs: Sequence[Run], panel: Panel) -> Panel:
    """The curves of a panel over the time at which their steps were reached."""
    unit, seconds = _time_unit(runs)
    curves = [
        [(time / seconds, value) for step, value in points if (time := run.reached_at(int(step))) is not None]
        for run, points in zip(runs, panel.curves, strict=True)
    ]
    return panel._replace(title=f"{panel.title} over time", x=unit, curves=curves, faint=())


def _time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    """Title of the time axes and their unit in seconds, chosen for the longest and the shortest run."""
    times = [run.elapsed_s for run in runs if run.elapsed_s]
    typical = math.sqrt(min(times) * max(times)) if times else 0.0
    if typical < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if typical < 3 * 3600 else ("hours", 3600.0)


def _loss_by_timestep(runs: Sequence[Run]) -> Section:
    bins = sorted({key for run in runs for record in run.records for key in record if _BIN.fullmatch(key)})
    if not bins:
        return Section("Validation loss by timestep", [])
    profiles = [_profiles(run, bins) for run in runs]
    x, y, title = "t, from noise (0) to data (1)", "validation loss", "Last validation"
    note = "Every point is the mean loss in one part of the range of t. Different objectives are not comparable."
    if len(runs) > 1:
        panels = {"by-t": Panel(title, x, y, [list(known.values())[-1] if known else [] for known in profiles])}
        panels |= {f"bin-{index}": _panel(runs, _bin_name(key), key, y) for index, key in enumerate(bins)}
        return Section("Validation loss by timestep", _drawn(runs, panels), note)
    (known,) = profiles
    steps = _evenly(list(known), _MOST_PROFILES)
    looks = plots.looks_of([f"step {step:,}" for step in steps], is_ordered=True)
    over_t = Panel("Over t", x, y, [known[step] for step in steps])
    shades = plots.looks_of([_bin_name(key) for key in bins], is_ordered=True)
    over_steps = Panel("Over steps", "step", y, [runs[0].curve(key) for key in bins], is_log=True)
    small = [
        replace(_plot("by-t", over_t, looks), legend=looks),
        replace(_plot("bins", over_steps, shades), legend=shades),
    ]
    return Section("Validation loss by timestep", [Plots(small)], note)


def _profiles(run: Run, bins: Sequence[str]) -> dict[int, Points]:
    """(middle of the bin, loss) by the step of each validation."""
    found: dict[int, list[tuple[float, float]]] = {}
    for key in bins:
        low, high = map(float, _BIN.fullmatch(key).groups())  # type: ignore[union-attr]
        for step, value in run.curve(key):
            found.setdefault(step, []).append(((low + high) / 2, value))
    return {step: found[step] for step in sorted(found)}


def _bin_name(key: str) -> str:
    low, high = _BIN.fullmatch(key).groups()  # type: ignore[union-attr]
    return f"t {float(low):g} to {float(high):g}"


def _optimization(runs: Sequence[Run]) -> Section:
    smooth = [_smoothed(run.curve("grad_norm")) for run in runs]
    norm = Panel("Gradient norm before clipping", "step", "norm", smooth, faint=_faint(runs, "grad_norm", smooth))
    rate = _panel(runs, "Learning rate", "lr", "learning rate")
    return Section("Gradient norm and learning rate", _drawn(runs, {"norm": norm._replace(is_log=True), "rate": rate}))


def _speed(runs: Sequence[Run]) -> Section:
    panels = {
        "throughput": _panel(runs, "Throughput, all devices", "images_per_second", "images/s"),
        "mfu": _panel(runs, "MFU, of the bfloat16 peak", "mfu", "%"),
        "memory": _panel(runs, "Peak memory per device", "peak_memory_gib", "GiB"),
    }
    note = "Without sampling, validation and checkpoints."
    if any(run.is_cpu for run in runs):
        note += " On a CPU, memory is that of the first process."
    return Section("Speed and memory", _drawn(runs, panels), note)


def _panel(runs: Sequence[Run], title: str, key: str, y: str, *, is_log: bool = False) -> Panel:
    return Panel(title, "step", y, [run.curve(key) for run in runs], is_log=is_log)


def _drawn(runs: Sequence[Run], panels: dict[str, Panel]) -> list[Block]:
    """The panels that have a point, with one legend."""
    looks = plots.looks_of([run.label for run in runs])
    drawn = [_plot(name, panel, looks) for name, panel in panels.items() if any(panel.curves)]
    return [Plots(drawn, looks)] if drawn else []


def _plot(name: str, panel: Panel, looks: Sequence[Look]) -> Plot:
    return plots.draw(plots.small_figure(panel, looks), f"plot-{name}", panel.title, looks)


def _smoothed(points: Points) -> Points:
    """Means over the neighbours of each point, about a twentieth of all; few points stay as they are."""
    reach = len(points) // 40
    if reach == 0:
        return points
    means = []
    for index, (step, _) in enumerate(points):
        near = points[max(0, index - reach) : index + reach + 1]
        means.append((step, sum(value for _, value in near) / len(near)))
    return means


def _faint(runs: Sequence[Run], key: str, smooth: Sequence[Points]) -> list[Points]:
    """The single values, where the curve is another."""
    curves = [run.curve(key) for run in runs]
    return [[] if len(raw) < 40 else raw for raw in curves] if smooth else []


def _samples(runs: Sequence[Run]) -> Section:
    steps = _chosen_steps(runs)
    drawn = [(run, [step for step in steps if step in run.pictures]) for run in runs]
    num_pictures = sum(len(found) for _, found in drawn)
    if not num_pictures:
        return Section("Samples over time", [])
    share = _GRID_BYTES // num_pictures
    frames = [
        Frames(run.label, {step: data_uri(run.pictures[step], most_bytes=share) for step in found})
        for run, found in drawn
    ]
    all_steps = len(set(chain.from_iterable(run.pictures for run in runs)))
    is_smaller = any(num_bytes(run.pictures[step]) > share for run, found in drawn for step in found)
    notes = [
        "Move the slider, or use the arrow keys on it." if len(steps) > 1 else "",
        f"The page has {len(steps)} of {all_steps:,} steps, samples/ of the runs all."
        if len(steps) < all_steps
        else "",
        "Large pictures are scaled down." if is_smaller else "",
    ]
    cut = [picture for run, found in drawn for picture in _strip_and_animation(run, found, len(runs))]
    blocks: list[Block] = [Slider(frames), *([Pictures("As a strip and as a GIF", cut)] if cut else [])]
    return Section("Samples over time", blocks, " ".join(filter(None, notes)))


def _strip_and_animation(run: Run, steps: Sequence[int], num_runs: int) -> list[Picture]:
    """The same samples cut out of the grids of the steps: the first of each row side by side, and all as a GIF.

    Grids of other rows or another size than the last one are left out, as are those that cannot be read.
    """
    if len(steps) < 2:
        return []
    from torchditan.evaluation.grid_picture import animation, read_cells, strip

    grids = {}
    for step in steps:
        with suppress(ConfigError):
            grids[step] = read_cells(run.pictures[step])
    if not grids:
        return []
    last, labels = grids[max(grids)]
    frames = {step: cells for step, (cells, names) in grids.items() if cells.shape == last.shape and names == labels}
    if len(frames) < 2:
        return []
    shown = {step: frames[step][:, 0] for step in _evenly(list(frames), _MOST_COLUMNS)}
    row = picture_uri(strip(shown, labels, title=run.label), most_bytes=_STRIP_BYTES // num_runs)
    moving = animation(frames, labels, title=run.label, most_bytes=_ANIMATION_BYTES // num_runs)
    return [
        Picture(run.label, f"{len(shown)} steps", row),
        Picture(run.label, f"{len(frames)} steps, as a GIF", uri_of(moving, "gif")),
    ]


def _evaluation(runs: Sequence[Run]) -> Section:
    """The newest card of each run."""
    cards = [next(iter(cards_of_run(run.path)), None) for run in runs]
    found = [card for card in cards if card is not None]
    about: dict[str, Callable[[Card], str]] = {
        "evaluated, UTC": lambda card: card.created[:16].replace("T", " "),
        "step": lambda card: f"{card.step:,}" if card.step is not None else UNKNOWN,
        "weights": lambda card: card.weights or UNKNOWN,
        "samples": lambda card: f"{len(card.seeds)} x {card.num_samples:,}",
    }
    rows = [[name, *(value(card) if card else "" for card in cards)] for name, value in about.items()]
    for name in dict.fromkeys(name for card in found for name in card.sampling):
        values = [_shortened(setting_value(card.sampling.get(name))) if card else "" for card in cards]
        rows.append([f"sampling.{name}", *values])
    for name in ordered_names({name: figure for card in found for name, figure in card.figures.items()}):
        rows.append([name, *(_figure(card.figures.get(name)) if card else "" for card in cards)])
    note = "The newest evaluation in evaluation/. Values in brackets are the ends of the interval."
    return Section("Evaluation", [Table(["", *(run.label for run in runs)], rows)] if found else [], note)


def _figure(figure: CardFigure | None) -> str:
    if figure is None:
        return "not measured"
    interval = interval_text(figure)
    return value_text(figure) + ("" if interval == "none" else f" ({interval})")


def _chosen_steps(runs: Sequence[Run]) -> list[int]:
    """The steps that the slider offers: all; or, if these are too many pictures, some of those that all runs share."""
    drawn = [set(run.pictures) for run in runs if run.pictures]
    if not drawn:
        return []
    every, shared = set.union(*drawn), set.intersection(*drawn)
    if sum(map(len, drawn)) <= _MOST_PICTURES:
        return sorted(every)
    later = {step for step in every if step > max(shared, default=0)}  # of the longest runs, or all
    return _evenly(sorted(shared | later), max(1, _MOST_PICTURES // len(drawn)))


def _evenly(values: Sequence[int], most: int) -> list[int]:
    """At most this many of the values, including the first and the last; the last, if only one."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def _configuration(runs: Sequence[Run]) -> Section:
    known = options()
    names = list(dict.fromkeys([*known, *(name for run in runs for name in run.options)]))
    defaults = {name: _plain(option.default) for name, option in known.items()}
    rows, changed = [], []
    for name in names:
        values = [run.options.get(name, _ABSENT) for run in runs]
        default = defaults.get(name, "unknown option")
        rows.append([name, *(_shortened(setting_value(value)) for value in (*values, default))])
        if any(value not in (default, _ABSENT) for value in values):
            changed.append(rows[-1])
    headers = ["option", *(run.label for run in runs), "default"]
    return Section(
        "Configuration",
        [
            Table(headers, changed, title="Differs from the default", most_rows=_MOST_OPTIONS),
            Table(headers, rows, summary=f"All {len(rows)} options", most_rows=_MOST_OPTIONS),
        ],
        "As the run completed it: options that were left open have the values that it chose.",
    )


def _plain(value: Any) -> Any:
    """A default as config.json stores it."""
    return list(value) if isinstance(value, tuple) else value


def _shortened(text: str) -> str:
    return plots.shorten(text, _LONGEST_VALUE)


def _measured(value: float | None, form: str = "") -> str:
    return UNKNOWN if value is None else form.format(value) if form else number(value)


def _option(run: Run, name: str) -> str:
    value = run.options.get(name)
    return "" if value is None else _shortened(setting_value(value))


def _version(run: Run, package: str) -> str:
    return str(run.content["versions"].get(package) or "unknown")


def _moment(run: Run, key: str) -> str:
    return str(run.content.get(key) or "")[:16].replace("T", " ")


def _classes(run: Run) -> str:
    names = run.content.get("class_names")
    return f"{len(names)}: {_shortened(listed(map(str, names), most=10))}" if isinstance(names, list) and names else ""
