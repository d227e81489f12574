# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Verdicts as text: the section of report.html with its plot, the table of the terminal, and verdicts.csv."""

from __future__ import annotations

import csv
import html
import io
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torchditan.evaluation.card_tables import columns, rounded, significant
from torchditan.report import page
from torchditan.report.findings import AXIS_NAMES, Finding, value_name
from torchditan.report.plots import PALETTE, style
from torchditan.report.sanity import MINUS, count
from torchditan.report.verdicts import (
    BETTER,
    INCONCLUSIVE,
    LEVEL,
    MOST_SEEDS,
    NOT_MEASURED,
    ONE_SEED,
    WORSE,
    Cost,
    Verdict,
)

_MOST_LINES = 6
_MOST_ROWS = 100
_MOST_BARS = 60
_PANELS_PER_ROW = 4
_COLORS = {BETTER: PALETTE[0], WORSE: PALETTE[1], INCONCLUSIVE: PALETTE[7]}
_HEADERS = (
    *("change", "with", "figure", "seeds", "before", "after", "difference", "95% interval", "corrected p", "verdict"),
    *("further seeds", "FLOPs", "time", "memory"),
)
_NUMERIC = frozenset(_HEADERS[3:9]) | frozenset(_HEADERS[10:])
CSV_COLUMNS = (
    *("grid", "axis", "from_value", "to_value", "from_run", "to_run", "figure", "better", "seeds", "missing_seeds"),
    *("before", "after", "difference", "low", "high", "p", "corrected_p", "num_comparisons", "verdict"),
    *("further_seeds", "flops_ratio", "time_ratio", "time_low", "time_high", "memory_ratio"),
)


def verdict_text(verdicts: Sequence[Verdict]) -> str:
    """The verdicts for a terminal: a Markdown table, and a sentence that summarises it."""
    headers, rows = _table(verdicts)
    lines = [columns(headers, rows[:_MOST_ROWS])]
    if len(rows) > _MOST_ROWS:
        lines.append(f"{len(rows) - _MOST_ROWS:,} more are in verdicts.csv.")
    return "\n".join([*lines, f"Verdicts: {summary(verdicts)} {_guarantee(verdicts)}".rstrip()])


def verdict_finding(verdicts: Sequence[Verdict]) -> Finding:
    """The card of the first screen: how many verdicts of each kind, and those that are decided."""
    decided = [pair for pair in zip(verdicts, _names(verdicts), strict=True) if pair[0].is_decided]
    decided.sort(key=lambda pair: pair[0].word)
    sentences = [_sentence(verdict, *names) for verdict, names in decided[:_MOST_LINES]]
    if len(decided) > _MOST_LINES:
        sentences.append(f"{len(decided) - _MOST_LINES} more are in the table of verdicts.")
    return Finding("What improves the model?", summary(verdicts), [*sentences, _guarantee(verdicts) or _NEEDS_SEEDS])


_NEEDS_SEEDS = 'Repeat the grid with other seeds, for example training.seed = [0, 1, 2, 3, 4] under "axes".'


def verdict_section(verdicts: Sequence[Verdict]) -> str:
    """The content of the section: method in short, plot, table."""
    headers, rows = _table(verdicts)
    for row in rows:
        row[:] = [
            cell.replace("-", MINUS) if name in _NUMERIC else cell for name, cell in zip(headers, row, strict=True)
        ]
    text = (
        "<p>Two settings are compared seed by seed. The difference is the mean over the seeds that both have, and its "
        "interval comes from Student's t. A verdict is better or worse only if p, corrected for all comparisons of the "
        f"grid (Holm), is at most {LEVEL:g}. The interval is that of one comparison alone, so it can exclude zero "
        "where the verdict is inconclusive. Further seeds would decide a comparison with a probability of 80% if the "
        "measured difference and spread are the true ones. FLOPs and time per image and peak memory are ratios, after "
        "over before. That of time has a 95% interval over the seeds.</p>"
    )
    text += f"<p>{html.escape(f'{summary(verdicts)} {_guarantee(verdicts)}')}</p>"
    plot = page.plot(verdict_figure(verdicts), "verdicts-plot", "No comparison has a difference.")
    return text + plot + page.table(headers, rows, numeric=_NUMERIC)


def summary(verdicts: Sequence[Verdict]) -> str:
    """`2 better, 1 worse, 9 inconclusive, of 12 comparisons.`"""
    counts = Counter(verdict.word for verdict in verdicts)
    if set(counts) <= {ONE_SEED, NOT_MEASURED}:
        return "One seed: no verdict." if counts[ONE_SEED] else "No figure was measured on both sides of a comparison."
    words = (BETTER, WORSE, INCONCLUSIVE, ONE_SEED, NOT_MEASURED)
    parts = [f"{counts[word]:,} {word}" for word in words if counts[word] or word in words[:3]]
    return f"{', '.join(parts)}, of {count(len(verdicts), 'comparison')}."


def _guarantee(verdicts: Sequence[Verdict]) -> str:
    tested = {verdict.source: verdict.num_comparisons for verdict in verdicts if verdict.is_tested}
    if not tested:
        return ""
    numbers = " and ".join(dict.fromkeys(f"{number:,}" for number in tested.values()))
    plural = "comparison" if set(tested.values()) == {1} else "comparisons"
    num_missing = sum(bool(verdict.missing) for verdict in verdicts)
    warning = f"{count(num_missing, 'comparison')} without some seeds: a run of one side failed or is missing. "
    return (
        f"{warning if num_missing else ''}Corrected for {numbers} {plural} per grid: if no setting has an effect, the "
        f"chance of any better or worse is at most {LEVEL:.0%}."
    )


def _sentence(verdict: Verdict, change: str, others: str) -> str:
    text = f"{change}{f' ({others})' if others else ''}: {verdict.metric.name} {_signed(verdict)}"
    text += f", 95% {_interval(verdict)}, {_seeds(verdict)} seeds: {verdict.word}"
    if verdict.cost.time is not None:
        text += f", at {_time(verdict.cost)} times the time per image"
    return f"{text}.".replace(" -", f" {MINUS}")


def _names(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """(change, other settings) of each verdict: those other settings that vary between the pairs of one change."""
    alike: dict[tuple[str, ...], list[set[str]]] = {}
    for verdict in verdicts:
        values = alike.setdefault((verdict.source, *_change(verdict)), [set() for _ in verdict.others])
        for found, (_, value) in zip(values, verdict.others, strict=True):
            found.add(value)
    has_several = len({verdict.source for verdict in verdicts}) > 1
    names = []
    for verdict in verdicts:
        key = (verdict.source, *_change(verdict))
        start, end = (value_name(verdict.axis, value) for value in (verdict.from_value, verdict.to_value))
        change = f"{AXIS_NAMES.get(verdict.axis, verdict.axis)}: {start} → {end}"
        others = [
            f"{AXIS_NAMES.get(axis, axis)} {value_name(axis, value)}"
            for (axis, value), found in zip(verdict.others, alike[key], strict=True)
            if len(found) > 1
        ]
        names.append((f"{verdict.source}, {change}" if has_several else change, ", ".join(others)))
    return names


def _change(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.axis, verdict.from_value, verdict.to_value


def _table(verdicts: Sequence[Verdict]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows; the column of other settings only if it has an entry."""
    rows = []
    for verdict, (change, others) in zip(verdicts, _names(verdicts), strict=True):
        cost, half = verdict.cost, _precision(verdict)
        is_known = bool(verdict.seeds)
        rows.append(
            [
                change,
                others,
                verdict.metric.name,
                _seeds(verdict),
                rounded(verdict.before, half) if is_known else "",
                rounded(verdict.after, half) if is_known else "",
                _signed(verdict) if is_known else "",
                _interval(verdict),
                "" if verdict.corrected is None else significant(verdict.corrected, 2),
                verdict.word,
                _further(verdict),
                "" if cost.flops is None else f"{cost.flops:.2f}",
                _time(cost),
                "" if cost.memory is None else f"{cost.memory:.2f}",
            ]
        )
    shown = [number for number, header in enumerate(_HEADERS) if header != "with" or any(row[number] for row in rows)]
    return [_HEADERS[number] for number in shown], [[row[number] for number in shown] for row in rows]


def _seeds(verdict: Verdict) -> str:
    """`5`, or `4 of 5` if a run of one side is missing."""
    number = len(verdict.seeds)
    return f"{number} of {number + len(verdict.missing)}" if verdict.missing else str(number)


def _time(cost: Cost) -> str:
    """`1.05 (95%: 0.98 to 1.12)`: the ratio with its interval, because other work on the machine changes it."""
    if cost.time is None:
        return ""
    interval = "" if cost.time_interval is None else " (95%: {:.2f} to {:.2f})".format(*cost.time_interval)
    return f"{cost.time:.2f}{interval}"


def _precision(verdict: Verdict) -> float | None:
    """A difference is shown with one digit more than its interval supports: most are small against the spread."""
    return verdict.half_width / 10 if verdict.half_width else None


def _signed(verdict: Verdict) -> str:
    precision = _precision(verdict)
    text = significant(verdict.difference, 3) if precision is None else rounded(verdict.difference, precision)
    return f"+{text}" if verdict.difference > 0 else text


def _interval(verdict: Verdict) -> str:
    half, precision = verdict.half_width, _precision(verdict)
    if half is None:
        return ""
    if not half:
        return "no spread"
    return " to ".join(rounded(verdict.difference + sign * half, precision) for sign in (-1, 1))


def _further(verdict: Verdict) -> str:
    if verdict.word != INCONCLUSIVE:
        return ""
    if verdict.further_seeds is not None:
        return f"{verdict.further_seeds:,}"
    return f"over {MOST_SEEDS:,}" if verdict.p is not None and verdict.half_width else "no spread"


def verdict_figure(verdicts: Sequence[Verdict]) -> Any | None:
    """Differences with their 95% intervals, a panel per figure, a row per comparison, a colour per verdict."""
    go = import_module("plotly.graph_objects")
    known = [verdict for verdict in verdicts if verdict.seeds]
    if not known:
        return None
    labels = {id(verdict): ", ".join(filter(None, names)) for verdict, names in zip(known, _names(known), strict=True)}
    names = list(dict.fromkeys(labels.values()))[:_MOST_BARS]
    metrics = list(dict.fromkeys(verdict.metric for verdict in known))
    num_columns = min(len(metrics), _PANELS_PER_ROW)
    num_rows = -(-len(metrics) // num_columns)
    figure = import_module("plotly.subplots").make_subplots(
        rows=num_rows,
        cols=num_columns,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=[f"{metric.name}, {metric.better} is better" for metric in metrics],
    )
    for number, metric in enumerate(metrics):
        place = {"row": number // num_columns + 1, "col": number % num_columns + 1}
        for word in (BETTER, WORSE, INCONCLUSIVE, ONE_SEED):
            mine = [verdict for verdict in known if (verdict.metric, verdict.word) == (metric, word)]
            mine = [verdict for verdict in mine if labels[id(verdict)] in names]
            color = _COLORS.get(word, PALETTE[6])
            trace = go.Scatter(
                x=[verdict.difference for verdict in mine],
                y=[names.index(labels[id(verdict)]) for verdict in mine],
                error_x={"array": [verdict.half_width for verdict in mine], "thickness": 2.5, "width": 4},
                mode="markers",
                name=word,
                legendgroup=word,
                showlegend=bool(mine) and not any(trace.name == word and trace.showlegend for trace in figure.data),
                marker={"color": color, "size": 9, "symbol": "circle-open" if word == ONE_SEED else "circle"},
                hovertext=[_hover(verdict, labels[id(verdict)]) for verdict in mine],
                hoverinfo="text",
            )  # fmt: skip
            figure.add_trace(trace, **place)
        figure.add_vline(x=0, line={"color": "#333", "width": 1}, **place)
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "range": [len(names) - 0.4, -0.6]}
    figure.update_yaxes(**ticks, zeroline=False)
    return style(figure, height=130 + num_rows * (60 + 30 * len(names)), top=66, legend_gap=44)


def _hover(verdict: Verdict, label: str) -> str:
    interval = f"<br>95% {_interval(verdict)}" if verdict.half_width is not None else ""
    figure = f"{verdict.metric.name} {_signed(verdict)}{interval}"
    return f"<b>{label}</b><br>{figure}<br>{_seeds(verdict)} seeds: {verdict.word}"


def verdicts_csv(verdicts: Sequence[Verdict]) -> bytes:
    """verdicts.csv: one row per verdict. Numbers that do not exist are empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for verdict in verdicts:
        half, cost = verdict.half_width, verdict.cost
        low, high = (None, None) if half is None else (verdict.difference - half, verdict.difference + half)
        where = (verdict.source, *_change(verdict), *verdict.runs, verdict.metric.column, verdict.metric.better)
        seeds = (" ".join(verdict.seeds), " ".join(verdict.missing))
        numbers = (verdict.before, verdict.after, verdict.difference, low, high, verdict.p, verdict.corrected)
        counts = (verdict.num_comparisons, verdict.word, verdict.further_seeds)
        ratios = map(_number, (cost.flops, cost.time, *(cost.time_interval or (None, None)), cost.memory))
        writer.writerow((*where, *seeds, *map(_number, numbers), *counts, *ratios))
    return file.getvalue().encode()


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.6g}"
