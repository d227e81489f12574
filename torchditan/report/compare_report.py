# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""compare.html compares one job on different hardware with findings, tables, curves and samples. It works offline.

Notable:
- A value that a run did not measure is labelled as such in its cell; it is never 0.
- Sample grids are embedded. Large ones are scaled down.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from torchditan.report import compare_cells as cells
from torchditan.report import page
from torchditan.report.compare import (
    SAME_CURVE,
    Comparison,
    Run,
    Sampling,
    Standing,
    compare,
    comparison_csv,
)
from torchditan.report.compare_plots import MOST_POINTS, Panel, Points, curves_figure, over_time, time_unit
from torchditan.report.findings import Finding
from torchditan.report.sanity import count

_SPEED_UP = "speed\N{NON-BREAKING HYPHEN}up"
_MOST_LINES = 6
_MOST_PIXELS = 1200  # side of an embedded picture
_SMALL_PIXELS = 300  # of one in a table
_KINDS = {
    "job": "training",
    "path": "a path; contents may be equal",
    "drawing": "sampling",
    "running": "execution",
}


def write_comparison(folders: Sequence[Path], out: Path, labels: Sequence[str] | None = None) -> Path:
    """Compare run directories; write compare.html and compare.csv to `out`, and return the path of the page."""
    page.require("plotly")
    comparison = compare(folders, labels)
    report = out / "compare.html"
    page.write_files(
        {out / "compare.csv": comparison_csv(comparison), report: comparison_html(comparison).encode()}, out
    )
    return report


def comparison_html(comparison: Comparison) -> str:
    """The whole page."""
    names = ", ".join(run.label for run in comparison.runs)
    sections = (
        ("runs", "The runs", _runs_section),
        ("curves", "Loss and time", _curves_section),
        ("equal", "At equal time and at equal steps", _equal_section),
        ("samples", "Samples side by side", _samples_section),
        ("settings", "Settings that differ", _settings_section),
        ("agreement", "Differences of the losses", _agreement_section),
        ("origin", "Hardware and versions", _origin_section),
        ("method", "How the numbers are computed", _method_section),
    )
    cards = (_speed_card, _job_card, _agreement_card, _quality_card)
    findings = "".join(make(comparison) for make in cards)
    return page.document(
        title=f"Compared: {names}",
        heading=f"{count(len(comparison.runs), 'run')} compared: {names}",
        top=_facts(comparison),
        findings=f'<div class="findings">{findings}</div>',
        sections=[(anchor, title, make(comparison)) for anchor, title, make in sections],
    )


def _facts(comparison: Comparison) -> str:
    runs = comparison.runs
    started = sorted(str(run.content["started"])[:10] for run in runs if run.content.get("started"))
    text = f"{'; '.join(dict.fromkeys(run.hardware for run in runs))}. "
    versions = cells.distinct(cells.version(run, "torch") for run in runs)
    text += f"torch {versions}, commit {cells.distinct(map(cells.commit, runs))}"
    text += f", run {' to '.join(dict.fromkeys((started[0], started[-1])))}. " if started else ". "
    return f'<p class="facts">{html.escape(text)}</p>'


def _speed_card(comparison: Comparison) -> str:
    question = "Which is fastest?"
    rates = [(run, run.images_per_second) for run in comparison.runs if run.images_per_second]
    if len(rates) < 2:
        return _card(question, "Unknown.", ["Fewer than two runs logged a second line."], "first")
    rates.sort(key=lambda pair: pair[1], reverse=True)
    (fastest, most), (slowest, least) = rates[0], rates[-1]
    sentences = [
        f"{run.label}: {cells.figure(rate)} images/s on {run.hardware}; {count(run.steps or 0, 'step')} in "
        f"{cells.duration(run.elapsed_s)} in total."
        for run, rate in rates[:_MOST_LINES]
    ]
    if len(rates) > _MOST_LINES:
        sentences.append(f"{len(rates) - _MOST_LINES} more are in the table.")
    answer = f"{fastest.label}: {cells.ratio(most / least)} times as fast as {slowest.label}."
    return _card(question, answer, sentences, "first")


def _job_card(comparison: Comparison) -> str:
    question = "Are they the same job?"
    names: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for setting in comparison.settings:
        names[setting.kind].append(setting.name)
    if job := names["job"]:
        answer = f"No: {count(len(job), 'setting')} of the job {'differs' if len(job) == 1 else 'differ'}."
        text = f"The jobs differ in {cells.shorten(job)}: this compares different jobs."
        return _card(question, answer, [text], "warn")
    sentences = ["All settings that affect training are equal."]
    if names["path"]:
        sentences = [f"Paths differ, and may lead to the same or to other weights: {cells.shorten(names['path'])}."]
    if names["running"]:
        sentences.append(f"Settings of execution differ: {cells.shorten(names['running'])}.")
    return _card(question, "Yes, according to their settings." if names["path"] else "Yes.", sentences)


def _agreement_card(comparison: Comparison) -> str:
    question = "Do they follow the same curve?"
    known = [pair for pair in comparison.curves if pair.difference is not None]
    if not known:
        why = "They have no logged step in common." if comparison.curves else "No two of them are the same job."
        return _card(question, "Unknown.", [why])
    worst = max(known, key=lambda pair: pair.difference or 0.0)
    text = (
        f"The losses of {worst.first.label} and {worst.second.label} differ by up to {cells.relative(worst)}, at step "
        f"{worst.step:,} of the {count(worst.num_steps, 'step')} that both logged."
    )
    parted = [pair.parted_at for pair in known if pair.parted_at is not None]
    if parted:
        verb = "differs" if len(parted) == 1 else "differ"
        answer = f"No: {len(parted)} of {count(len(known), 'pair')} {verb} by more than {SAME_CURVE:g}."
        return _card(question, answer, [text, f"The first such difference is at step {min(parted):,}."], "warn")
    return _card(question, f"Yes, within {cells.relative(worst)}." if worst.difference else "Yes, exactly.", [text])


def _quality_card(comparison: Comparison) -> str:
    question = "Which has the better samples at the same time?"
    if comparison.scored_against == {"original"}:
        return _distance_card(comparison)
    if len(comparison.scored_against) > 1:
        why = "Some scores are against real images, others against samples of the original model."
        return _card(question, "Unknown.", [why])
    samplings = [(run, comparison.at_equal_time(run).sampling) for run in comparison.runs]
    if not any(sampling.is_scored for run in comparison.runs for sampling in run.samplings):
        return _card(question, "Unknown.", [_why_no_scores(comparison)])
    sentences = [
        f"{run.label}: {_no_scores(run)}."
        if sampling is None
        else f"{run.label}: {cells.scores(sampling)}, drawn at step {sampling.step:,}."
        for run, sampling in samplings[:_MOST_LINES]
    ]
    drawing = [setting.name for setting in comparison.settings if setting.kind == "drawing"]
    if drawing:
        sentences.append(f"Settings of sampling differ: {cells.shorten(drawing)}.")
    scores = [(run, sampling.psnr) for run, sampling in samplings if sampling and sampling.psnr is not None]
    if len(scores) < 2:
        return _card(question, "Unknown.", sentences, "warn" if drawing else "")
    best, most = max(scores, key=lambda pair: pair[1])
    lead = most - min(psnr for _, psnr in scores)
    answer = f"{best.label}, by {lead:.2f} dB." if lead >= 0.005 else "They are equal."
    answer = f"After {cells.duration(comparison.equal_time_s)}: {answer}"
    return _card(question, answer, sentences, "warn" if drawing else "")


def _distance_card(comparison: Comparison) -> str:
    """Scores against samples of the original model measure how far a fine-tune moved, not its quality."""
    standings = [(run, comparison.at_equal_step(run).sampling) for run in comparison.runs[:_MOST_LINES]]
    sentences = [
        f"{run.label}: {_no_scores(run)}." if sampling is None else f"{run.label}: {cells.scores(sampling)}."
        for run, sampling in standings
    ]
    sentences.append("A lower score means a larger distance. Neither is better in itself.")
    step = comparison.equal_step
    answer = "The runs have no step in common." if step is None else f"At step {step:,}, in PSNR and SSIM:"
    return _card("How far have the samples moved from the original model's?", answer, sentences)


def _why_no_scores(comparison: Comparison) -> str:
    if any(run.draws_own_prompts for run in comparison.runs):
        return (
            f"PSNR and SSIM: {cells.UNKNOWN}. The runs use their own prompts, which have no real images. With "
            "sampling.at_start they are compared with samples of the original model."
        )
    return (
        f"PSNR and SSIM: {cells.UNKNOWN}. They need held-out images with captions; "
        "class labels have no image to compare with."
    )


def _card(question: str, answer: str, sentences: list[str], kind: str = "") -> str:
    return page.card(Finding(question, answer, sentences), f"finding {kind}".strip())


def _runs_section(comparison: Comparison) -> str:
    headers = ["run", "hardware", "world size", "parallel", "global batch", "precision", "steps", "runtime"]
    headers += ["steps/s", "images/s", _SPEED_UP, "s per sample", "peak memory, GiB", "final loss"]
    has_validation = any(run.validation_loss is not None for run in comparison.runs)
    has_pictures = comparison.picture_step is not None
    headers += [*(["validation loss"] if has_validation else []), *(["samples"] if has_pictures else []), "status"]
    rows = []
    for run in comparison.runs:
        ratio = comparison.speed_up(run)
        row = [
            run.label,
            run.hardware,
            cells.text(run.world_size),
            cells.text(run.parallel_mode),
            cells.text(run.global_batch_size),
        ]
        row += [
            cells.text(run.precision),
            cells.steps(run),
            cells.duration(run.elapsed_s),
            cells.figure(run.steps_per_second),
        ]
        row += [
            cells.figure(run.images_per_second),
            cells.UNKNOWN if ratio is None else f"{cells.ratio(ratio)}\N{NO-BREAK SPACE}x",
        ]
        row += [cells.figure(run.seconds_per_image), cells.figure(run.peak_memory_gib), cells.loss(run.loss)]
        row += [cells.loss(run.validation_loss)] if has_validation else []
        row += [_small_picture(run, comparison.picture_at_equal_step(run))] if has_pictures else []
        rows.append([*row, cells.state(run)])
    numeric = {"world size", "global batch", *headers[6:-1]} - {"samples"}
    text = f'<div class="runs">{page.table(headers, rows, numeric=numeric)}</div>'
    reasons = [f"{run.label}: {run.status['reason']}" for run in comparison.runs if run.status.get("reason")]
    text += "".join(f"<p>{html.escape(reason)}</p>" for reason in reasons)
    if any(run.is_cpu for run in comparison.runs):
        text += (
            "<p>On a CPU, memory is the peak resident memory of the first process. All processes share the cores of "
            "the machine.</p>"
        )
    return text


def _small_picture(run: Run, sampling: Sampling | None) -> str:
    path = None if sampling is None else sampling.picture
    uri = None if path is None else _data_uri(path, most_pixels=_SMALL_PIXELS)
    return cells.UNKNOWN if uri is None else page.picture(uri, f"Samples of {run.label}")


def _curves_section(comparison: Comparison) -> str:
    unit, seconds = time_unit(comparison)
    panels = (
        Panel("iterations", "loss", lambda run: list(run.curve("loss"))),
        Panel(unit, "loss", lambda run: over_time(run, run.curve("loss"), seconds)),
        Panel("iterations", unit, lambda run: [(step, time / seconds) for step, time in run.curve("elapsed_s")]),
    )
    text = "<p>The dotted line marks where the runs are compared below: the last time and the last step they share.</p>"
    return text + page.plot(curves_figure(comparison, panels), "curves-plot", "No run has logged a line.")


def _equal_section(comparison: Comparison) -> str:
    text = "<h3>At equal time</h3>"
    if comparison.equal_time_s is None:
        text += page.none("No run has logged a line.")
    else:
        limit = cells.duration(comparison.equal_time_s)
        text += f"<p>After {limit}, the largest time that all runs reached. Scores are of the last samples by then.</p>"
        rows = [
            [
                run.label,
                "none" if standing.step is None else f"{standing.step:,}",
                *_standing(run, standing),
                _no_scores(run) if standing.sampling is None else f"{standing.sampling.step:,}",
            ]
            for run, standing in ((run, comparison.at_equal_time(run)) for run in comparison.runs)
        ]
        headers = ["run", "reached step", "loss", "validation loss", "PSNR, dB", "SSIM", "drawn at step"]
        text += page.table(headers, rows, numeric=set(headers[1:]))
    text += "<h3>At equal steps</h3>"
    if comparison.equal_step is None:
        text += page.none(f"The runs have no common step{_what_is_shared(comparison)}.")
    else:
        text += f"<p>At step {comparison.equal_step:,}, the last common step{_what_is_shared(comparison)}.</p>"
        rows = [
            [
                run.label,
                "not reached" if standing.elapsed_s is None else cells.duration(standing.elapsed_s),
                *_standing(run, standing),
            ]
            for run, standing in ((run, comparison.at_equal_step(run)) for run in comparison.runs)
        ]
        headers = ["run", "after", "loss", "validation loss", "PSNR, dB", "SSIM"]
        text += page.table(headers, rows, numeric=set(headers[1:]))
    for key, title in (("psnr", "PSNR in dB"), ("ssim", "SSIM"), ("validation_loss", "validation loss")):
        text += _score_curves(comparison, key, title)
    return text


def _score_curves(comparison: Comparison, key: str, title: str) -> str:
    def by_step(run: Run) -> Points:
        return list(_measured(run, key))

    def by_time(run: Run) -> Points:
        return over_time(run, _measured(run, key), seconds)

    unit, seconds = time_unit(comparison)
    most = max(len(by_step(run)) for run in comparison.runs)
    if most < 2:
        why = "measured at most once; see the tables" if most else cells.UNKNOWN
        return page.none(f"{title.removesuffix(' in dB')} over time: {why}.")
    panels = (Panel("iterations", title, by_step), Panel(unit, title, by_time))
    return page.plot(curves_figure(comparison, panels, mode="lines+markers"), f"{key}-plot", cells.UNKNOWN)


def _what_is_shared(comparison: Comparison) -> str:
    samplings = [sampling for run in comparison.runs for sampling in run.samplings]
    if any(sampling.is_scored for sampling in samplings):
        return " with scored samples"
    return " with samples" if samplings else ""


def _standing(run: Run, standing: Standing) -> list[str]:
    """Loss, validation loss, PSNR and SSIM, or the reason why they are missing."""
    sampling = standing.sampling
    missing = _no_scores(run)
    no_validation = "none by then" if run.validation_loss is not None else cells.UNKNOWN
    return [
        "not logged" if standing.loss is None else cells.loss(standing.loss),
        no_validation if standing.validation_loss is None else cells.loss(standing.validation_loss),
        missing if sampling is None else cells.decimals(sampling.psnr, 2),
        missing if sampling is None else cells.decimals(sampling.ssim, 4),
    ]


def _no_scores(run: Run) -> str:
    return "none by then" if any(sampling.is_scored for sampling in run.samplings) else cells.UNKNOWN


def _measured(run: Run, key: str) -> list[tuple[int, float]]:
    if key == "validation_loss":
        return run.curve(key)
    known = ((sampling.step, getattr(sampling, key)) for sampling in run.samplings)
    return [(step, value) for step, value in known if value is not None]


def _samples_section(comparison: Comparison) -> str:
    if not any(run.pictures for run in comparison.runs):
        return page.none("No run has drawn samples.")
    step, limit = comparison.picture_step, cells.duration(comparison.equal_time_s)
    if step is None:
        text = page.none("The runs have no common step with samples.")
    else:
        text = f"<h3>At step {step:,}</h3>" + _side_by_side(comparison, comparison.picture_at_equal_step)
    if comparison.equal_time_s is None:
        return text
    return text + f"<h3>After {limit}</h3>" + _side_by_side(comparison, comparison.picture_at_equal_time)


def _side_by_side(comparison: Comparison, choose: Callable[[Run], Sampling | None]) -> str:
    figures = []
    for run in comparison.runs:
        sampling = choose(run)
        if sampling is None or sampling.picture is None:
            when, content = "", page.none("No samples by then." if run.pictures else "No samples were drawn.")
        else:
            after = "" if sampling.elapsed_s is None else f", {cells.duration(sampling.elapsed_s)}"
            when = f"step {sampling.step:,}{after}" + (f", {cells.scores(sampling)}" if sampling.is_scored else "")
            uri = _data_uri(sampling.picture)
            name = html.escape(f"Samples of {run.label}, {when}")
            content = page.none("Its picture cannot be read.") if uri is None else f'<img src="{uri}" alt="{name}">'
        caption = f"<figcaption><b>{html.escape(run.label)}</b> {html.escape(when)}</figcaption>"
        figures.append(f"<figure>{caption}{content}</figure>")
    return f'<div class="pictures">{"".join(figures)}</div>'


def _data_uri(path: Path, *, most_pixels: int = _MOST_PIXELS) -> str | None:
    """A PNG as a data URI, scaled down if large; None if the file is not a complete image."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            picture.load()
            data = path.read_bytes()
            if max(picture.size) > most_pixels:
                picture.thumbnail((most_pixels, most_pixels))
                encoded = io.BytesIO()
                picture.save(encoded, format="PNG", optimize=True)
                data = encoded.getvalue()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # errors of Pillow
        return None
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _settings_section(comparison: Comparison) -> str:
    if not comparison.settings:
        return page.none("The runs differ only in names and folders.")
    rows = [
        [setting.name, _KINDS[setting.kind], *map(cells.setting_value, setting.values)]
        for setting in comparison.settings
    ]
    headers = ["setting", "decides", *(run.label for run in comparison.runs)]
    text = ""
    if not comparison.is_same_job:
        text = (
            "<p>Runs with different training settings are different jobs: do not expect equal losses and samples.</p>"
        )
    return text + page.table(headers, rows)


def _agreement_section(comparison: Comparison) -> str:
    if not comparison.curves:
        return page.none("No two of these runs are the same job.")
    text = (
        "<p>The largest difference between two runs of one job, relative to the loss, over the steps that both logged. "
        f"The curves of one job should agree within {SAME_CURVE:g}. Arithmetic in bfloat16 differs between devices and "
        "splits of the batch. Such differences grow over the steps, and faster with a larger learning rate.</p>"
    )
    rows = [
        [
            pair.first.label,
            pair.second.label,
            f"{pair.num_steps:,}",
            cells.UNKNOWN if pair.difference is None else cells.relative(pair),
            "" if pair.step is None else f"{pair.step:,}",
            "" if pair.difference is None else "nowhere" if pair.parted_at is None else f"{pair.parted_at:,}",
        ]
        for pair in comparison.curves
    ]
    headers = ["run", "and", "common steps", "largest difference", "at step", f"above {SAME_CURVE:g} from step"]
    return text + page.table(headers, rows, numeric=set(headers[2:]))


def _origin_section(comparison: Comparison) -> str:
    rows = [
        [
            run.label,
            cells.text(run.machine.get("device_name")),
            cells.text(run.machine.get("cpu")),
            cells.text(run.machine.get("cpu_count")),
            cells.text(run.machine.get("hostname")),
            cells.version(run, "torch"),
            cells.version(run, "python"),
            cells.commit(run),
            cells.text(run.content.get("started"))[:16].replace("T", " "),
            "yes" if run.was_resumed else "no",
        ]
        for run in comparison.runs
    ]
    headers = ["run", "device", "CPU", "cores", "host", "torch", "python", "commit", "last start, UTC", "resumed"]
    text = page.table(headers, rows, numeric={"cores"})
    if any(run.was_resumed for run in comparison.runs):
        text += "<p>A resumed run lists the hardware of its last start. Its time continues from its checkpoint.</p>"
    return text


def _method_section(comparison: Comparison) -> str:
    return (
        "<p>Runtime is the wall-clock time of the last logged line. It includes sampling, validation and checkpoints, "
        "but not process start-up. Steps/s and images/s are medians over steps, without the first line (warm-up) "
        "and without sampling, validation and checkpoints. The speed-up is that of images/s. Seconds "
        "per sample is the median over all samplings. Peak memory is per device, of the first process.</p>"
        "<p>PSNR and SSIM compare each sample with a held-out image of its caption. A good sample can differ from that "
        "image, so read the scores as a trend. For a run with its own prompts, they compare each sample with the "
        "original model's sample of the same prompt and noise: how far the fine-tune moved. Samples belong to the step "
        "whose weights drew them, and to the time at which that step was logged. Curves of more than "
        f"{MOST_POINTS:,} points are thinned out. compare.csv in the same folder has the numbers.</p>"
    )
