# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Evaluations of one run at several sampling options, as a table, a CSV file and a plot."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchditan.extras.evaluation.card import Card, CardFigure
from torchditan.extras.evaluation.card_tables import columns, interval_notes, ordered_names, value_and_half_width
from torchditan.extras.report.figures import add_legend, encoded, look_of, new_figure, styled
from torchditan.run.atomic_files import write_file

TABLE, PLOT = "table.csv", "plot.png"
_MINOR = re.compile(
    r"sF|IS$|precision|density|held-out |KID to |copies: (?!closer)|accuracy_held_out|chance|prompts .*: (?!all$)"
)
"""Figures that are only in the CSV file."""

Points = Sequence[Mapping[str, str]]
"""The values of each evaluation, by the name of the option."""


def write_table(folder: Path, points: Points, cards: Sequence[Card]) -> str:
    """Write all figures as CSV and the main ones as a plot to a folder. Returns the main ones as a Markdown table."""
    figures = ordered_names({name: figure for card in cards for name, figure in card.figures.items()})
    names = [name for name in figures if not _MINOR.match(name)]
    write_file(folder / TABLE, _csv(points, cards, figures).encode())
    if any(name in card.figures for name in names for card in cards):
        write_file(folder / PLOT, encoded(_plot(points, cards, names), "png"))
    rows = [
        [
            *point.values(),
            f"{card.model_evaluations}",
            *(value_and_half_width(card.figures.get(name)) for name in names),
        ]
        for point, card in zip(points, cards, strict=True)
    ]
    shown = [card.figures[name] for card in cards for name in names if name in card.figures]
    return "\n".join([columns([*points[0], "model evaluations", *names], rows), *interval_notes(shown)])


def _csv(points: Points, cards: Sequence[Card], figures: Sequence[str]) -> str:
    """With all digits, and an empty cell for what was not measured."""
    text = io.StringIO()
    names = [name for name in figures if any(name in card.figures for card in cards)]
    ends = [column for name in names for column in (name, f"{name} low", f"{name} high")]
    writer = csv.DictWriter(text, [*points[0], "model_evaluations", "num_samples", "seeds", *ends], lineterminator="\n")
    writer.writeheader()
    for point, card in zip(points, cards, strict=True):
        row: dict[str, Any] = dict(point)
        row |= {"model_evaluations": card.model_evaluations, "num_samples": card.num_samples, "seeds": len(card.seeds)}
        for name, figure in card.figures.items():
            row |= {name: figure.value, f"{name} low": figure.low, f"{name} high": figure.high}
        writer.writerow(row)
    return text.getvalue()


@styled
def _plot(points: Points, cards: Sequence[Card], names: Sequence[str]) -> Any:
    """A panel per figure over the values of the first option, with a line for each combination of the others."""
    first, *others = points[0]
    values = list(dict.fromkeys(point[first] for point in points))
    lines: dict[str, list[tuple[int, Card]]] = {}
    for point, card in zip(points, cards, strict=True):
        label = ", ".join(f"{name} {point[name]}" for name in others)
        lines.setdefault(label, []).append((values.index(point[first]), card))
    measured = [name for name in names if any(name in card.figures for card in cards)]
    figure, panels = new_figure(len(measured), height=3.0)
    for panel, name in zip(panels, measured, strict=True):
        for number, line in enumerate(lines.values()):
            found = {place: _value_and_ends(card.figures[name]) for place, card in line if name in card.figures}
            if found:
                heights, below, above = zip(*found.values(), strict=True)
                panel.errorbar(list(found), heights, yerr=[below, above], capsize=2.5, **look_of(number))
        panel.set_title(name)
        panel.set_xlabel(first)
        panel.set_xticks(range(len(values)), values)
    add_legend(figure, [(label, look_of(number)) for number, label in enumerate(lines)])
    return figure


def _value_and_ends(figure: CardFigure) -> tuple[float, float, float]:
    """The value, and how far the interval reaches below and above it. NaN is not drawn."""
    value = math.nan if figure.value is None else figure.value
    low, high = figure.low, figure.high
    return value, 0.0 if low is None else max(0.0, value - low), 0.0 if high is None else max(0.0, high - value)
