# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Cards as text: the printed table of figures, and card.md.

Numbers are rounded to the digits that their intervals support.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchditan.errors import printable
from torchditan.extras.evaluation.card import Card, CardFigure, arguments_of, settings_of

MAX_DIGITS = 6
"""Significant digits of a value whose interval is narrower still."""
DIGITS_WITHOUT_INTERVAL = 4
COMPANIONS = ("recall", "coverage", "copies")
"""Shown directly after a Fréchet distance, which alone does not reveal missing or copied images."""
_HASH_DIGITS = 12


def markdown(card: Card) -> str:
    """card.md: what was evaluated, the figures, the command that repeats it, and all settings."""
    settings = [[name, shown(name, value)] for name, value in settings_of(card).items() if value is not None]
    return "\n".join(
        [
            f"# {_escape(title(card))}\n",
            table(card),
            *(f"\n{_escape(f'{name}: {text}')}" for name, text in card.other.items() if isinstance(text, str)),
            "\nTraining again with another seed changes the figures further.",
            "\n## Repeat it\n",
            "    " + one_line(shlex.join(["torchditan", "evaluate", *arguments_of(card)])),
            "\n## Settings\n",
            columns(["setting", "value"], settings),
            "",
        ]
    )


def title(card: Card) -> str:
    """What was evaluated: `outputs/quickstart, step 600, ema weights, 3 x 2600 samples`."""
    if card.images is not None:
        return one_line(f"{card.images.path}, {card.num_samples} images")
    times = f"{len(card.seeds)} x " if len(card.seeds) > 1 else ""
    return one_line(f"{card.run}, step {card.step}, {card.weights} weights, {times}{card.num_samples} samples")


def table(card: Card) -> str:
    """The figures as a Markdown table, each with its interval, number of images and extractor."""
    rows = []
    for name in ordered_names(card.figures):
        figure = card.figures.get(name)
        if figure is None:
            rows.append([name, "not measured", "", "", ""])
        else:
            rows.append(
                [name, value_text(figure), interval_text(figure), str(figure.num_images), figure.extractor or ""]
            )
    header = ["figure", "value", f"{confidence(card.figures.values())} interval".strip(), "N", "extractor"]
    return "\n".join([columns(header, rows), *interval_notes(card.figures.values())])


def interval_notes(figures: Iterable[CardFigure]) -> list[str]:
    """What the intervals cover, a line for each kind."""
    labels = dict.fromkeys(figure.interval for figure in figures if has_interval(figure))
    return [f"\nIntervals: {_escape(label)}." for label in labels if label]


def ordered_names(figures: Mapping[str, CardFigure]) -> list[str]:
    """Names of figures in their order, but recall, coverage and the copy check follow each Fréchet distance.

    Where one of the three is missing, its name is listed all the same: a distance is never shown without them.
    """
    names: dict[str, None] = {}
    for name, figure in figures.items():
        names[name] = None
        if is_frechet(name):
            for companion in COMPANIONS:
                found = [other for other in figures if _is_companion(companion, other, figures[other], figure)]
                names.update(dict.fromkeys(found or [f"{companion} ({figure.extractor or name})"]))
    return list(names)


def is_frechet(name: str) -> bool:
    """Whether this is a Fréchet distance of samples; that of held-out images is a floor."""
    return name in ("FID", "sFID") or name.startswith("FD-")


def _is_companion(companion: str, name: str, figure: CardFigure, distance: CardFigure) -> bool:
    is_named = name.startswith(companion) and not name[len(companion) :][:1].isalnum()
    return is_named and figure.extractor in (distance.extractor, None)


def has_interval(figure: CardFigure) -> bool:
    return figure.low is not None and figure.high is not None


def confidence(figures: Iterable[CardFigure]) -> str:
    """The confidence of their intervals, for the head of a column: "95%", "50%", "50% or 95%", or "" without one."""
    labels = {figure.interval for figure in figures if has_interval(figure)}
    return " or ".join(sorted({percent for label in labels for percent in re.findall(r"\d+%", label or "")}))


def value_text(figure: CardFigure) -> str:
    """The value with the digits that its interval supports."""
    return "not finite" if figure.value is None else rounded(figure.value, half_width(figure))


def interval_text(figure: CardFigure) -> str:
    if figure.low is None or figure.high is None:
        return figure.interval or "none"
    half = half_width(figure)
    return f"{rounded(figure.low, half)} to {rounded(figure.high, half)}"


def value_and_half_width(figure: CardFigure | None) -> str:
    if figure is None:
        return "not measured"
    half = half_width(figure)
    return value_text(figure) + (f" ± {rounded(half, half)}" if half is not None else "")


def half_width(figure: CardFigure) -> float | None:
    return None if figure.low is None or figure.high is None else (figure.high - figure.low) / 2


def rounded(value: float, half_width: float | None = None) -> str:
    """A number with the digits that its uncertainty supports: 12.3456 with 0.4 is 12.3, and with 0.14 is 12.35.

    The last digit is at the place of the half width's first digit, or of its second where the first is 1. At most six
    significant digits; without a half width four, and all digits of the integer part.
    """
    if half_width is None:
        return significant(value, DIGITS_WITHOUT_INTERVAL)
    decimals = MAX_DIGITS - 1 - _magnitude(value)
    if half_width > 0:
        first = _magnitude(half_width)
        decimals = min(decimals, 1 - first if half_width < 2 * 10**first else -first)
    return _fixed(value, decimals)


def significant(value: float, digits: int) -> str:
    """A number with this many significant digits, and all digits of its integer part."""
    return _fixed(value, max(0, digits - 1 - _magnitude(value)))


def _magnitude(value: float) -> int:
    """Power of ten of the first digit."""
    return 0 if value == 0 else math.floor(math.log10(abs(value)))


def _fixed(value: float, decimals: int) -> str:
    number = round(value, decimals) + 0.0  # -0.0 becomes 0.0
    if -4 <= decimals <= 7 or number == 0:
        return f"{number:.{min(7, max(0, decimals))}f}"
    return f"{number:.{max(0, _magnitude(value) + decimals)}e}"


def shown(name: str, value: Any) -> str:
    """A setting's value: hashes are shortened, lists are joined."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    is_hash = name.endswith((".content", "_hash")) or name.startswith("extractors.")
    return str(value)[:_HASH_DIGITS] if is_hash else str(value)


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _escape(text: str) -> str:
    """One line of Markdown, without HTML and links of its own. A card may be a stranger's."""
    return one_line(text).replace("<", "&lt;").replace("](", "]\\(")


def columns(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, so it also reads well in a terminal."""
    cells = [[_escape(cell).replace("|", "\\|") for cell in row] for row in (heading, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
