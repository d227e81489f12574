# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The sections of all reports. A section is a function that returns a `Section`, or None if it has nothing to show.

To add one, write the function and list it in SECTIONS, in the order of the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from torchditan.config.schema import options
from torchditan.errors import counted
from torchditan.extras.ablation.grid import BATCH_SIZE, PRECISION, SEED
from torchditan.extras.evaluation.card import Card, CardFigure
from torchditan.extras.evaluation.card_tables import interval_text, ordered_names, value_text
from torchditan.extras.report.data import Data
from torchditan.extras.report.effects import MEMORY, MFU, PER_DEVICE, THROUGHPUT
from torchditan.extras.report.figures import (
    PALETTE,
    Curve,
    Panel,
    axes_figure,
    curves_figure,
    effects_figure,
    verdict_figure,
)
from torchditan.extras.report.grids import half_width
from torchditan.extras.report.labels import (
    MINUS,
    UNKNOWN,
    axis_name,
    change_name,
    commit_name,
    duration,
    evenly,
    listed,
    number,
    ordered_values,
    percent,
    ratio_text,
    setting_value,
    value_name,
    with_interval,
)
from torchditan.extras.report.page import Plot, Section, Table
from torchditan.extras.report.runs import Run, differing_settings
from torchditan.extras.report.samples import samples_over_time
from torchditan.extras.report.verdicts import BETTER, INCONCLUSIVE, ONE_SEED, WORSE, guarantee, verdict_table

_MOST_OPTIONS = 1000
_MOST_PROFILES = 5
_BIN = re.compile(r"validation_loss_by_t/(\d\.\d+)-(\d\.\d+)")
_VERDICT_COLORS = {BETTER: PALETTE[0], WORSE: PALETTE[1], INCONCLUSIVE: PALETTE[7], ONE_SEED: PALETTE[6]}


def _frame(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(headers), dtype=object)


def _labels(data: Data) -> list[str]:
    return [run.label for run in data.runs]


def verdicts(data: Data) -> Section | None:
    if data.verdicts.empty:
        return None
    texts = verdict_table(data.verdicts)
    for header in ("before", "after", "difference", "95% interval"):
        texts[header] = texts[header].str.replace("-", MINUS)
    note = (
        f"{guarantee(data.verdicts)} Two settings are compared seed by seed. The 95% interval is that of one "
        "comparison alone, so it can exclude zero where the verdict is inconclusive. FLOPs and time per image and peak "
        "memory are ratios, after over before; that of time has its 95% interval."
    )
    known = data.verdicts[data.verdicts["num_seeds"] > 0]
    names = known[["change", "with"]].agg(lambda both: ", ".join(filter(None, both)), axis=1)
    plots = []
    if len(known):
        plots = [Plot("verdicts", "Differences", verdict_figure(known.assign(label=names), _VERDICT_COLORS))]
    return Section("Verdicts on quality", [*plots, Table(texts)], note.strip())


def effects(data: Data) -> Section | None:
    """What each setting changes, and how folders differ."""
    blocks: list[Plot | Table] = []
    titles = {"same batch": "At the same batch", "between folders": "Between folders"}
    for comparison, title in titles.items() if len(data.effects) else ():
        known = data.effects[(data.effects["comparison"] == comparison) & (data.effects["num_pairs"] > 0)]
        if len(known):
            keys = known[["axis", "from_value", "to_value"]].itertuples(index=False, name=None)
            known = known.assign(label=[change_name(*key) for key in keys])
            name = "effects" if comparison == "same batch" else "folders"
            blocks += [Plot(name, title, effects_figure(known)), Table(_effect_table(known))]
    note = (
        "Two runs are compared only if they differ in one setting and agree in all others. White dots are medians over "
        "such pairs, thick bars the middle half, thin lines the full range."
    )
    return Section("What each setting changes", blocks, note) if blocks else None


def _effect_table(effects: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for (label, grid), mine in effects.groupby(["label", "grid"], sort=False):
        of = {effect.metric: effect for effect in mine.itertuples()}
        speed, mfu, memory = (of.get(metric.column) for metric in (THROUGHPUT, MFU, MEMORY))
        row = {"effect": label, "grid": grid if effects["grid"].nunique() > 1 else ""}
        if speed:
            row |= {
                "pairs": f"{speed.num_pairs:,}",
                "throughput": percent(speed.median_percent),
                "ratio": f"{1 + speed.median_percent / 100:.2f}",
                "middle half": f"{percent(speed.quartile_1_percent)} to {percent(speed.quartile_3_percent)}",
                "faster in": f"{speed.num_better:,} of {speed.num_pairs:,}",
                "noise": f"±{speed.noise_percent:.1f}%" if speed.noise_percent else "",
                "speed is": "clear" if speed.is_clear else "not clear",
            }
        row["MFU"] = percent(mfu.median_percent) if mfu else ""
        if memory:
            row |= {"GiB before": number(memory.before), "GiB after": number(memory.after)}
            row["memory"] = percent(memory.median_percent)
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def summary(data: Data) -> Section | None:
    """The runs side by side. Several also have ratios to the slowest one, and values at equal steps."""
    if not data.runs:
        return None
    runs, found = data.runs, data.table

    def measured(column: str, form: Callable[[Any], str] = number) -> list[str]:
        return [UNKNOWN if value is None else form(value) for value in found[column]]

    def last(key: str, form: Callable[[Any], str] = number) -> list[str]:
        return [UNKNOWN if (value := run.last(key)) is None else form(value) for run in runs]

    def each(value: Callable[[Run], Any]) -> list[str]:
        return [str(value(run) or "") for run in runs]

    def chosen(name: str) -> list[str]:
        return ["" if run.options.get(name) is None else setting_value(run.options[name]) for run in runs]

    loss, decibel, share = "{:.4g}".format, "{:.2f} dB".format, "{:.4f}".format
    rows: dict[str, list[str]] = {
        "status": each(lambda run: run.state_text),
        "reason": each(lambda run: setting_value(run.status.get("reason") or "")),
        "steps": each(lambda run: run.steps_text),
        "images seen": last("images_seen", "{:,.0f}".format),
        "time": measured("elapsed_s", duration),
        "final loss": measured("loss", loss),
        "validation loss": measured("validation_loss", loss),
    }
    at_equal = {"psnr": ("PSNR", decibel), "ssim": ("SSIM", share)}
    if len(runs) > 1:
        rows |= {
            f"time for {found['common_step'].iloc[0] or 0:,} steps": measured("training_time_s", duration),
            "times as fast": measured("training_time_ratio", ratio_text),
            "speed-up of images/s": measured("speed_up", ratio_text),
        }
        at_equal = {"loss": ("loss", loss), "validation_loss": ("validation loss", loss), **at_equal}
    for key, (name, form) in at_equal.items():
        rows[f"{name} at step {found['equal_step'].iloc[0] or 0:,}"] = measured(f"{key}_at_equal_step", form)
    rows |= {
        "steps/s": measured("steps_per_second"),
        "images/s": measured("images_per_second"),
        "MFU, %": [UNKNOWN if (value := run.median("mfu")) is None else number(value) for run in runs],
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
        "git commit": each(lambda run: commit_name(run.content.get("git_commit")) or "unknown"),
        "created, UTC": each(lambda run: _moment(run, "created")),
        "last start, UTC": each(lambda run: _moment(run, "started") if run.was_resumed else ""),
        "folder": each(lambda run: run.path),
    }
    known = [(name, *cells) for name, cells in rows.items() if not set(cells) <= {"", UNKNOWN}]
    return Section("Summary", [Table(_frame(["", *_labels(data)], known))])


def _moment(run: Run, key: str) -> str:
    return (run.content.get(key) or "")[:16].replace("T", " ")


def _classes(run: Run) -> str:
    names = run.content.get("class_names")
    return f"{len(names)}: {setting_value(listed(map(str, names), most=10))}" if names else ""


def differences(data: Data) -> Section | None:
    if len(data.runs) < 2:
        return None
    found = differing_settings(data.runs)
    rows = [[setting.name, setting.kind, *map(setting_value, setting.values)] for setting in found]
    note = "Names and folders of the runs are left out."
    if not rows:
        rows = [["(none)"] + [""] * (1 + len(data.runs))]
        note = "The runs have equal settings, names and folders aside."
    return Section("What differs", [Table(_frame(["setting", "decides", *_labels(data)], rows))], note)


def losses(data: Data) -> Section | None:
    training = ("Training loss", "loss", "loss")
    validation = ("Validation loss", "validation_loss", "validation loss")
    panels = [*_panels(data, *training, is_smooth=True, is_log=True), *_panels(data, *validation, is_log=True)]
    several = len(data.runs) > 1
    if several:
        panels += [*_over_time(data, *training, is_log=True), *_over_time(data, *validation, is_log=True)]
        unit, seconds = _time_unit(data.runs)
        times = [curve._replace(values=curve.values / seconds) for curve in data.curves("elapsed_s")]
        panels += [Panel("Time over steps", "step", unit, times)] if times else []
    note = "Thick lines of long runs are means over about 1/20 of the run."
    if data.grids is not None:
        note += (
            " A cross marks the end of a run that did not complete. All runs of a grid with one training seed see the "
            "same samples, noise and timesteps in the same order. Lines of several seeds are means over them, bands "
            "the 95% intervals of these means."
        )
    blocks: list[Plot | Table] = [
        *_plot("loss", "Loss", panels),
        *([Table(_final_losses(data))] if data.grids and panels else []),
    ]
    return Section("Loss and time" if several else "Loss", blocks, note) if blocks else None


def _final_losses(data: Data) -> pd.DataFrame:
    """Mean loss of the last steps, by setting and precision; without completed runs their statuses."""
    assert data.grids is not None
    runs = data.grids.runs.assign(setting=data.settings.replace("", "(all)"))

    def text(group: pd.DataFrame) -> str:
        completed = group[(group["status"] == "completed") & group["loss_mean"].notna()]
        if completed.empty:
            return ", ".join(dict.fromkeys(group["status"]))
        seeds = completed.groupby(SEED)["loss_mean"].mean()
        if len(seeds) == 1:
            return f"{seeds.iloc[0]:.4g}"
        return with_interval(seeds.mean(), half_width(seeds.std(), len(seeds)))

    cells = {key: text(group) for key, group in runs.groupby(["setting", PRECISION], sort=False)}
    precisions = ordered_values(PRECISION, runs[PRECISION])
    rows = [[name, *(cells.get((name, value), "") for value in precisions)] for name in runs["setting"].unique()]
    return _frame(["mean loss of the last steps", *(value_name(PRECISION, value) for value in precisions)], rows)


def _panels(data: Data, title: str, key: str, y: str, **options: bool) -> list[Panel]:
    """A panel with the curves of all runs, or one for each precision of a grid; none without curves."""
    curves = data.curves(key)
    return [
        Panel(f"{title}, {name}" if name else title, "step", y, [c for c in curves if c.panel == name], **options)
        for name in dict.fromkeys(curve.panel for curve in curves)
    ]


def _over_time(data: Data, title: str, key: str, y: str, **options: bool) -> list[Panel]:
    """A panel with the curves of several runs over the time at which their steps were reached."""
    unit, seconds = _time_unit(data.runs)
    curves = [Curve(run.label, run.over_time(run.curve(key))) for run in data.runs]
    curves = [curve._replace(values=curve.values.set_axis(curve.values.index / seconds)) for curve in curves]
    curves = [curve for curve in curves if len(curve.values)]
    return [Panel(f"{title} over time", unit, y, curves, **options)] if curves and len(data.runs) > 1 else []


def _time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    """Title of the time axes and their unit in seconds, chosen for the longest and the shortest run."""
    times = [time for run in runs if (time := run.last("elapsed_s"))]
    typical = math.sqrt(min(times) * max(times)) if times else 0.0
    if typical < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if typical < 3 * 3600 else ("hours", 3600.0)


def _plot(name: str, title: str, panels: Sequence[Panel]) -> list[Plot]:
    return [Plot(name, title, curves_figure(panels))] if panels else []


def scores(data: Data) -> Section | None:
    """PSNR and SSIM of the samples, which runs of one job draw from the same prompts and noise."""
    against = {run.scored_against for run in data.runs} - {None}
    if not against:
        return None
    known = [("PSNR", "psnr", "PSNR, dB"), ("SSIM", "ssim", "SSIM")]
    panels = [panel for draw in (_panels, _over_time) for score in known for panel in draw(data, *score)]
    note = "Against the held-out image of each caption. A good sample can differ from it."
    if against == {"original"}:
        note = "Against samples of the original model: how far the run moved, not how good it is."
    elif len(against) > 1:
        note = "Not comparable: some are against real images, others against samples of the original model."
    return Section("PSNR and SSIM", _plot("scores", "PSNR and SSIM", panels), note) if panels else None


def samples(data: Data) -> Section | None:
    return samples_over_time(data.runs)


def evaluation(data: Data) -> Section | None:
    """The newest card of each run."""
    found = [card for card in data.cards if card is not None]
    if not found:
        return None

    def row(name: str, value: Callable[[Card], str]) -> list[str]:
        return [name, *(value(card) if card else "" for card in data.cards)]

    rows = [
        row("evaluated, UTC", lambda card: card.created[:16].replace("T", " ")),
        row("step", lambda card: UNKNOWN if card.step is None else f"{card.step:,}"),
        row("weights", lambda card: card.weights or UNKNOWN),
        row("samples", lambda card: f"{len(card.seeds)} x {card.num_samples:,}"),
    ]
    for name in dict.fromkeys(name for card in found for name in card.sampling):
        rows.append(row(f"sampling.{name}", lambda card, key=name: setting_value(card.sampling.get(key))))  # type: ignore[misc]
    for name in ordered_names({name: figure for card in found for name, figure in card.figures.items()}):
        rows.append(row(name, lambda card, key=name: _figure(card.figures.get(key))))  # type: ignore[misc]
    note = "The newest evaluation in evaluation/. Values in brackets are the ends of the interval."
    return Section("Evaluation", [Table(_frame(["", *_labels(data)], rows))], note)


def _figure(figure: CardFigure | None) -> str:
    if figure is None:
        return UNKNOWN
    interval = interval_text(figure)
    return value_text(figure) + ("" if interval == "none" else f" ({interval})")


def loss_by_timestep(data: Data) -> Section | None:
    """The last validation of each run by timestep; of one run, several validations."""
    curves = []
    for run in data.runs:
        middles = {key: sum(map(float, found.groups())) / 2 for key in run.metrics if (found := _BIN.fullmatch(key))}
        profiles = run.metrics[list(middles)].rename(columns=middles).sort_index(axis=1).dropna(how="all")
        for step in evenly(list(profiles.index), _MOST_PROFILES if len(data.runs) == 1 else 1) if middles else ():
            name = f"step {step:,}" if len(data.runs) == 1 else run.label
            curves.append(Curve(name, profiles.loc[step].dropna()))
    panels = [Panel("Validation loss", "t, from noise (0) to data (1)", "validation loss", curves)] if curves else []
    note = "Every point is the mean loss in one part of the range of t. Different objectives are not comparable."
    title = "Validation loss by timestep"
    return Section(title, _plot("by-t", title, panels), note) if panels else None


def optimization(data: Data) -> Section | None:
    norm = _panels(data, "Gradient norm before clipping", "grad_norm", "norm", is_log=True, is_smooth=True)
    panels = [*norm, *_panels(data, "Learning rate", "lr", "learning rate")] if data.runs else []
    title = "Gradient norm and learning rate"
    return Section(title, _plot("optimization", title, panels)) if panels else None


def throughput_and_memory(data: Data) -> Section | None:
    """Over the steps of runs; of grids over their axes, with all settings, the fastest first."""
    note = "Without sampling, validation and checkpoints."
    if data.grids is None:
        panels = [
            *_panels(data, "Throughput, all devices", "images_per_second", "images/s"),
            *_panels(data, "MFU, of the bfloat16 peak", "mfu", "%"),
            *_panels(data, "Peak memory per device", "peak_memory_gib", "GiB"),
        ]
        is_cpu = any(run.is_cpu for run in data.runs)
        blocks: list[Plot | Table] = [*_plot("speed", "Throughput and memory", panels)]
    else:
        blocks = [
            *_over_axes(data, "throughput", "Throughput per device", PER_DEVICE, "images/s per device"),
            *_over_axes(data, "memory", "Peak memory per device", MEMORY.column, "GiB"),
            *([Table(_measured_settings(data))] if len(data.grids.cells) else []),
        ]
        is_cpu = set(data.grids.runs["device_type"]) == {"cpu"}
        note += " Each line is one combination of the other settings."
    note += " On a CPU, memory is that of the first process." if is_cpu else ""
    return Section("Throughput and memory", blocks, note) if blocks else None


def _over_axes(data: Data, name: str, title: str, column: str, y: str) -> list[Plot]:
    assert data.grids is not None
    cells = data.grids.cells[data.grids.cells[column].notna()]
    axes = sorted(data.grids.varied, key=lambda axis: axis != BATCH_SIZE)
    if all(cells[axis].nunique() < 2 for axis in axes):
        return []
    return [Plot(name, title, axes_figure(cells, axes, column, y))]


def _measured_settings(data: Data) -> pd.DataFrame:
    assert data.grids is not None
    cells = data.grids.cells.sort_values(THROUGHPUT.column, ascending=False, kind="stable")
    columns: dict[str, Iterable[str]] = {}
    if len(data.grids.sources) > 1:
        columns["grid"] = cells["source"]
    columns |= {axis_name(axis): [value_name(axis, value) for value in cells[axis]] for axis in data.grids.varied}
    columns["devices"] = cells["num_devices"].map("{:g} x ".format) + cells["device"]
    rates = zip(cells[THROUGHPUT.column], cells[f"{THROUGHPUT.column}_half"], strict=True)
    columns["images/s"] = [with_interval(*rate) for rate in rates]
    shown = {"images/s per device": PER_DEVICE, "TFLOP/s per device": "tflops_per_device_mean", "MFU %": MFU.column}
    for name, column in {**shown, "GiB": MEMORY.column}.items():
        columns[name] = cells[column].map(number)
    return pd.DataFrame({**columns, "run": cells["run_name"]})


def without_measurement(data: Data) -> Section | None:
    if data.grids is None:
        return None
    runs = data.grids.runs[data.grids.runs["status"] != "completed"]
    found = runs[["run_name", "grid", "status", "reason"]].replace({"reason": {"": "no reason recorded"}})
    found = found.rename(columns={"run_name": "run"})
    return Section("Runs without a measurement", [Table(found)]) if len(found) else None


def configuration(data: Data) -> Section | None:
    if not data.runs:
        return None
    known = options()
    names = list(dict.fromkeys([*known, *(name for run in data.runs for name in run.options)]))
    every, changed = [], []
    for name in names:
        default = known[name].default if name in known else "unknown option"
        default = list(default) if isinstance(default, tuple) else default  # as config.json stores it
        values = [run.options.get(name, "absent") for run in data.runs]
        every.append([name, *map(setting_value, (*values, default))])
        if any(value not in (default, "absent") for value in values):
            changed.append(every[-1])
    headers = ["option", *_labels(data), "default"]
    note = "As the run completed it: options that were left open have the values that it chose."
    tables = [
        Table(_frame(headers, changed), title="Differs from the default", most_rows=_MOST_OPTIONS),
        Table(_frame(headers, every), summary=f"All {len(every)} options", most_rows=_MOST_OPTIONS),
    ]
    return Section("Configuration", tables, note)


def origin(data: Data) -> Section | None:
    """Hardware and versions of each grid, and the settings that none of its runs varies."""
    if data.grids is None:
        return None
    made_by = []
    for source, runs in data.grids.runs.groupby("source", sort=False):
        devices = (f"{number:g}" for number in runs["num_devices"].dropna())
        texts = [runs["device"], runs["host"], devices, runs["torch_version"], runs["python_version"]]
        made_by.append([source, *map(listed, texts), listed(map(commit_name, runs["git_commit"]))])
    held = [
        [axis_name(axis), listed(value_name(axis, value) for value in data.grids.runs[axis])]
        for axis in data.grids.axes
        if axis not in data.grids.varied
    ]
    headers = ["grid", "device", "host", "devices", "torch", "python", "commit"]
    summary = f"Not varied: {counted(len(held), 'setting')}"
    fixed = Table(_frame(["setting", "value in all runs"], held), summary=summary)
    return Section("Hardware and versions", [Table(_frame(headers, made_by)), fixed])


SECTIONS = (
    *(summary, differences, verdicts, effects, losses, scores, samples, evaluation, loss_by_timestep, optimization),
    *(throughput_and_memory, without_measurement, configuration, origin),
)
