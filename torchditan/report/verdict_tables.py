# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Verdicts as a table for the page and for a terminal, and as verdicts.csv."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence

from torchditan.evaluation.card_tables import columns, rounded, significant
from torchditan.report.labels import TOO_FEW_RUNS, as_utf8, axis_name, change_name, count, value_name
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

_MOST_ROWS = 100
_HEADERS = (
    *("change", "with", "figure", "seeds", "before", "after", "difference", "95% interval", "corrected p", "verdict"),
    *("further seeds", "FLOPs", "time", "memory"),
)
NUMERIC = frozenset(_HEADERS[3:9]) | frozenset(_HEADERS[10:])
_CSV_COLUMNS = (
    *("grid", "axis", "from_value", "to_value", "from_run", "to_run", "figure", "better", "seeds", "missing_seeds"),
    *("before", "after", "difference", "low", "high", "p", "corrected_p", "num_comparisons", "verdict"),
    *("further_seeds", "flops_ratio", "time_ratio", "time_low", "time_high", "memory_ratio"),
)


def verdict_text(verdicts: Sequence[Verdict]) -> str:
    """The verdicts for a terminal: a Markdown table, and a sentence that summarises it."""
    headers, rows = verdict_table(verdicts)
    lines = [columns(headers, rows[:_MOST_ROWS])]
    if len(rows) > _MOST_ROWS:
        lines.append(f"{len(rows) - _MOST_ROWS:,} more are in verdicts.csv.")
    return "\n".join([*lines, f"Verdicts: {summary(verdicts)} {guarantee(verdicts)}".rstrip()])


def summary(verdicts: Sequence[Verdict]) -> str:
    """`2 better, 1 worse, 9 inconclusive, of 12 comparisons.`"""
    counts = Counter(verdict.word for verdict in verdicts)
    if set(counts) <= {ONE_SEED, NOT_MEASURED}:
        return "One seed: no verdict." if counts[ONE_SEED] else "No figure was measured on both sides of a comparison."
    words = (BETTER, WORSE, INCONCLUSIVE, ONE_SEED, NOT_MEASURED)
    parts = [f"{counts[word]:,} {word}" for word in words if counts[word] or word in words[:3]]
    return f"{', '.join(parts)}, of {count(len(verdicts), 'comparison')}."


def guarantee(verdicts: Sequence[Verdict]) -> str:
    """What the correction of p promises, and how many comparisons lack seeds."""
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


def verdict_names(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
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
        change = change_name(*_change(verdict))
        others = [
            f"{axis_name(axis)} {value_name(axis, value)}"
            for (axis, value), found in zip(verdict.others, alike[key], strict=True)
            if len(found) > 1
        ]
        names.append((f"{verdict.source}, {change}" if has_several else change, ", ".join(others)))
    return names


def _change(verdict: Verdict) -> tuple[str, str, str]:
    return verdict.axis, verdict.from_value, verdict.to_value


def verdict_table(verdicts: Sequence[Verdict]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows; the column of other settings only if it has an entry."""
    rows = []
    for verdict, (change, others) in zip(verdicts, verdict_names(verdicts), strict=True):
        cost, precision = verdict.cost, _precision(verdict)
        is_known = bool(verdict.seeds)
        rows.append(
            [
                change,
                others,
                verdict.metric.name,
                _seeds(verdict),
                rounded(verdict.before, precision) if is_known else "",
                rounded(verdict.after, precision) if is_known else "",
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
    if cost.time_interval is None:
        return f"{cost.time:.2f}"
    interval = "95%: {:.2f} to {:.2f}".format(*cost.time_interval) if cost.is_time_known else TOO_FEW_RUNS
    return f"{cost.time:.2f} ({interval})"


def _precision(verdict: Verdict) -> float | None:
    """A difference is shown with one digit more than its interval supports: most are small against the spread."""
    return verdict.half_width / 10 if verdict.half_width and verdict.has_interval else None


def _signed(verdict: Verdict) -> str:
    precision = _precision(verdict)
    text = significant(verdict.difference, 3) if precision is None else rounded(verdict.difference, precision)
    return f"+{text}" if verdict.difference > 0 else text


def _interval(verdict: Verdict) -> str:
    half = verdict.half_width
    if half is None:
        return ""
    if not half:
        return "no spread"
    if not verdict.has_interval:
        return TOO_FEW_RUNS
    return " to ".join(rounded(verdict.difference + sign * half, half / 10) for sign in (-1, 1))


def _further(verdict: Verdict) -> str:
    if verdict.word != INCONCLUSIVE:
        return ""
    if verdict.further_seeds is not None:
        return f"{verdict.further_seeds:,}"
    return f"over {MOST_SEEDS:,}" if verdict.half_width else "no spread"


def verdicts_csv(verdicts: Sequence[Verdict]) -> bytes:
    """verdicts.csv: one row per verdict. Numbers that do not exist are empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for verdict in verdicts:
        half, cost = verdict.half_width, verdict.cost
        low, high = (None, None) if half is None else (verdict.difference - half, verdict.difference + half)
        where = (verdict.source, *_change(verdict), *verdict.runs, verdict.metric.column, verdict.metric.better)
        seeds = (" ".join(verdict.seeds), " ".join(verdict.missing))
        numbers = (verdict.before, verdict.after, verdict.difference, low, high, verdict.p, verdict.corrected)
        counts = (verdict.num_comparisons, verdict.word, verdict.further_seeds)
        ratios = map(_number, (cost.flops, cost.time, *(cost.time_interval or (None, None)), cost.memory))
        writer.writerow((*where, *seeds, *map(_number, numbers), *counts, *ratios))
    return as_utf8(file.getvalue())


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.6g}"
