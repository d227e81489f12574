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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchditan.config.schema import options
from torchditan.evaluation.card import Card, CardFigure, cards_of_run
from torchditan.evaluation.card_tables import interval_text, ordered_names, value_text
from torchditan.report import plots
from torchditan.report.labels import (
    UNKNOWN,
    commit_name,
    count,
    csv_of,
    duration,
    evenly,
    listed,
    number,
    ratio_text,
    setting_value,
    shorten,
)
from torchditan.report.page import Block, Page, Plots, Section, Warned, table
from torchditan.report.plots import Panel, Points
from torchditan.report.runs import Comparison, Run, differing_settings
from torchditan.report.samples import samples_over_time

_MOST_OPTIONS = 1000
_LONGEST_VALUE = 300
_MOST_PROFILES = 5
_BIN = re.compile(r"validation_loss_by_t/(\d\.\d+)-(\d\.\d+)")
_ABSENT = "absent"


def run_page(runs: Sequence[Run]) -> Page:
    sections = (
        *(_summary, _differences, _loss, _scores, samples_over_time, _evaluation, _loss_by_timestep),
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
        files={"compare.csv": csv_of(comparison.table)},
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
    hardware = f"{run.hardware}, torch {run.content['versions'].get('torch') or 'unknown'}" + (
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
    comparison = Comparison(runs)
    found = comparison.table

    def measured(column: str, form: Callable[[Any], str] = number) -> list[str]:
        return [UNKNOWN if value is None else form(value) for value in found[column]]

    def each(value: Callable[[Run], Any]) -> list[str]:
        return [str(value(run) or "") for run in runs]

    def chosen(name: str) -> list[str]:
        return each(lambda run: "" if run.options.get(name) is None else _value(run.options[name]))

    rows: dict[str, list[str]] = {
        "status": each(lambda run: run.state_text),
        "reason": each(lambda run: _shortened(str(run.status.get("reason") or ""))),
        "steps": each(lambda run: run.steps_text),
        "images seen": each(lambda run: _measured(run.last("images_seen"), "{:,.0f}")),
        "time": measured("elapsed_s", duration),
        "final loss": measured("loss", "{:.4g}".format),
        "validation loss": measured("validation_loss", "{:.4g}".format),
    }
    scores = {"psnr": ("PSNR", "{:.2f} dB"), "ssim": ("SSIM", "{:.4f}")}
    if len(runs) > 1:  # ratios to the slowest run, and values at equal steps
        rows |= {
            f"time for {comparison.common_step or 0:,} steps": measured("training_time_s", duration),
            "times as fast": measured("training_time_ratio", ratio_text),
            "speed-up of images/s": measured("speed_up", ratio_text),
        }
        scores = {"loss": ("loss", "{:.4g}"), "validation_loss": ("validation loss", "{:.4g}"), **scores}
    for key, (name, form) in scores.items():
        rows[f"{name} at step {comparison.equal_step or 0:,}"] = measured(f"{key}_at_equal_step", form.format)
    rows |= {
        "steps/s": measured("steps_per_second"),
        "images/s": measured("images_per_second"),
        "MFU, %": each(lambda run: _measured(run.last("mfu"))),
        "peak memory, GiB": measured("peak_memory_gib"),
        "s per sample drawn": measured("seconds_per_image"),
        "model": chosen("model.flavor"),
        "objective": chosen("diffusion.objective"),
        "data": chosen("dataset.dataset_name"),
        "classes": each(_classes),
        "global batch": chosen("training.global_batch_size"),
        "precision": each(lambda run: run.precision),
        "parallel": each(lambda run: run.parallel_mode),
        "hardware": each(lambda run: run.hardware),
        "CPU": each(lambda run: run.machine.get("cpu")),
        **{
            package: [str(run.content["versions"].get(package) or "unknown") for run in runs]
            for package in ("torchditan", "torch", "python")
        },
        "git commit": each(lambda run: commit_name(str(run.content.get("git_commit") or "unknown"))),
        "created, UTC": each(lambda run: _moment(run, "created")),
        "last start, UTC": each(lambda run: _moment(run, "started") if run.was_resumed else ""),
        "folder": each(lambda run: run.path),
    }
    known = [(name, *cells) for name, cells in rows.items() if not set(cells) <= {"", UNKNOWN}]
    return Section("Summary", [table(["", *(run.label for run in runs)], known)])


def _differences(runs: Sequence[Run]) -> Section:
    if len(runs) == 1:
        return Section("What differs", [])
    rows = [[setting.name, setting.kind, *map(_value, setting.values)] for setting in differing_settings(runs)]
    note = "Names and folders of the runs are left out."
    if not rows:
        rows, note = [["(none)"] + [""] * (1 + len(runs))], "The runs have equal settings, names and folders aside."
    return Section("What differs", [table(["setting", "decides", *(run.label for run in runs)], rows)], note)


def _loss(runs: Sequence[Run]) -> Section:
    panels = {
        "loss": _smooth_panel(runs, "Training loss", "loss", "loss"),
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
    steps = evenly(list(known), _MOST_PROFILES)
    looks = plots.looks_of([f"step {step:,}" for step in steps], is_ordered=True)
    over_t = Panel("Over t", x, y, [known[step] for step in steps])
    shades = plots.looks_of([_bin_name(key) for key in bins], is_ordered=True)
    over_steps = Panel("Over steps", "step", y, [runs[0].curve(key) for key in bins], is_log=True)
    drawn = {"by-t": (over_t, looks), "bins": (over_steps, shades)}
    small = [plots.draw_panel(name, *shown)._replace(legend=shown[1]) for name, shown in drawn.items()]
    return Section("Validation loss by timestep", [Plots(small, is_small=True)], note)


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
    panels = {
        "norm": _smooth_panel(runs, "Gradient norm before clipping", "grad_norm", "norm"),
        "rate": _panel(runs, "Learning rate", "lr", "learning rate"),
    }
    return Section("Gradient norm and learning rate", _drawn(runs, panels))


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


def _smooth_panel(runs: Sequence[Run], title: str, key: str, y: str) -> Panel:
    """Smoothed curves, and the single values behind them."""
    curves = [run.curve(key) for run in runs]
    smooth = [_smoothed(points) for points in curves]
    faint = [[] if len(points) < 40 else points for points in curves]
    return Panel(title, "step", y, smooth, faint=faint, is_log=True)


def _drawn(runs: Sequence[Run], panels: Mapping[str, Panel]) -> list[Block]:
    """The panels that have a point, with one legend."""
    looks = plots.looks_of([run.label for run in runs])
    drawn = [plots.draw_panel(name, panel, looks) for name, panel in panels.items() if any(panel.curves)]
    return [Plots(drawn, looks, is_small=True)] if drawn else []


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
        values = [_value(card.sampling.get(name)) if card else "" for card in cards]
        rows.append([f"sampling.{name}", *values])
    for name in ordered_names({name: figure for card in found for name, figure in card.figures.items()}):
        rows.append([name, *(_figure(card.figures.get(name)) if card else "" for card in cards)])
    note = "The newest evaluation in evaluation/. Values in brackets are the ends of the interval."
    return Section("Evaluation", [table(["", *(run.label for run in runs)], rows)] if found else [], note)


def _figure(figure: CardFigure | None) -> str:
    if figure is None:
        return "not measured"
    interval = interval_text(figure)
    return value_text(figure) + ("" if interval == "none" else f" ({interval})")


def _configuration(runs: Sequence[Run]) -> Section:
    known = options()
    names = list(dict.fromkeys([*known, *(name for run in runs for name in run.options)]))
    defaults = {name: _plain(option.default) for name, option in known.items()}
    rows = []
    for name in names:
        values = [run.options.get(name, _ABSENT) for run in runs]
        default = defaults.get(name, "unknown option")
        is_changed = any(value not in (default, _ABSENT) for value in values)
        rows.append((is_changed, [name, *map(_value, (*values, default))]))
    headers = ["option", *(run.label for run in runs), "default"]
    changed = [row for is_changed, row in rows if is_changed]
    every = [row for _, row in rows]
    return Section(
        "Configuration",
        [
            table(headers, changed, title="Differs from the default", most_rows=_MOST_OPTIONS),
            table(headers, every, summary=f"All {len(every)} options", most_rows=_MOST_OPTIONS),
        ],
        "As the run completed it: options that were left open have the values that it chose.",
    )


def _plain(value: Any) -> Any:
    """A default as config.json stores it."""
    return list(value) if isinstance(value, tuple) else value


def _shortened(text: str) -> str:
    return shorten(text, _LONGEST_VALUE)


def _value(value: Any) -> str:
    return _shortened(setting_value(value))


def _measured(value: float | None, form: str = "") -> str:
    return UNKNOWN if value is None else form.format(value) if form else number(value)


def _moment(run: Run, key: str) -> str:
    return str(run.content.get(key) or "")[:16].replace("T", " ")


def _classes(run: Run) -> str:
    names = run.content.get("class_names")
    return f"{len(names)}: {_shortened(listed(map(str, names), most=10))}" if isinstance(names, list) and names else ""
