# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Cards as text: the printed table of figures, card.md, and a repetition next to its card.

Numbers are rounded to the digits that their intervals support.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchditan.config.errors import option_error, printable
from torchditan.evaluation.card import (
    CARD_FILE,
    Card,
    CardFigure,
    ImageSet,
    Origin,
    arguments_of,
    save_json,
    settings_of,
)
from torchditan.run.atomic_files import write_file

MAX_DIGITS = 6
"""Significant digits of a value whose interval is narrower still."""
DIGITS_WITHOUT_INTERVAL = 4
COMPANIONS = ("recall", "coverage", "copies")
"""Shown directly after a Fréchet distance, which alone does not reveal missing or copied images."""
_HASH_DIGITS = 12


def write_card(folder: Path, card: Card) -> None:
    """Write card.json and card.md to a folder, each atomically; card.json last, so it marks a finished evaluation."""
    write_file(folder / "card.md", markdown(card, folder / CARD_FILE).encode())
    save_json(folder / CARD_FILE, card)


def markdown(card: Card, path: Path) -> str:
    """card.md: what was evaluated, the figures, the settings, and the commands that repeat it."""
    settings = [[name, shown(name, value)] for name, value in settings_of(card).items() if value is not None]
    about = {
        "run": card.run,
        **{f"imported {name}": (card.imported or {}).get(name) for name in ("file", "format")},
        "training hardware": card.training_hardware,
        "training precision": card.training_precision,
        **{f"training {name}": version for name, version in card.training_versions.items()},
        "ranks": card.ranks,
        **{f"seconds {name}": f"{seconds:.1f}" for name, seconds in card.seconds.items()},
        "created": card.created,
    }
    facts = [[name, shown(name, value)] for name, value in about.items() if value is not None]
    return "\n".join(
        [
            f"# {_escape(title(card))}\n",
            table(card),
            "\nRetraining changes figures further: train several seeds to see by how much.",
            "\n## Settings that change figures\n",
            columns(["setting", "value"], settings),
            "\n## More about this evaluation\n",
            columns(["fact", "value"], facts),
            "\n## Repeat it\n",
            "    " + one_line(shlex.join(["torchditan", "evaluate", *arguments_of(card)])),
            f"\n`torchditan evaluate --card {shlex.quote(str(path))}` repeats it and lists what differs.",
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
    labels = dict.fromkeys(figure.interval for figure in card.figures.values() if has_interval(figure))
    notes = [f"\nIntervals: {_escape(label)}." for label in labels if label]
    header = ["figure", "value", f"{confidence(card.figures.values())} interval".strip(), "N", "extractor"]
    return "\n".join([columns(header, rows), *notes])


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


# A repetition


def check_repeatable(path: Path, card: Card, origin: Origin, *, reference: ImageSet | None = None) -> None:
    """Refuse to repeat a card with another run, checkpoint or file of images, or with other reference images.

    A run trained again from the same options and seed may repeat a card; `differences` then lists its `run_id`.

    Args:
        path: the card, for the message.
        card: what it says.
        origin: what would be evaluated now.
        reference: the reference images now; None if they are not known yet.

    Raises:
        ConfigError: one of them differs.
    """
    mistake = _other_origin(card, origin)
    there_images = card.reference or ImageSet(source="train")
    if mistake is None and reference is not None and reference.content != there_images.content:
        there, here = (shown(".content", images.content) for images in (there_images, reference))
        num_images = f"{there_images.num_images} images ({there}), here are {reference.num_images} ({here})"
        mistake = f"is a card of other data: it was compared with {num_images}; must be a card of these images"
    if mistake is not None:
        raise option_error("--card", str(path), mistake)


def _other_origin(card: Card, origin: Origin) -> str | None:
    if card.images is not None or origin.images is not None:
        contents = [images.content if images else None for images in (card.images, origin.images)]
        if contents[0] is None or contents[0] != contents[1]:
            return f"evaluated {_source(card)}, this is {_source(origin)}; must be a card of the same images"
        return None
    is_same_recipe = (card.trajectory_hash, card.training_seed) == (origin.trajectory_hash, origin.training_seed)
    if card.run_id != origin.run_id and not is_same_recipe:
        seeds = f"training seed {card.training_seed} there, {origin.training_seed} here"
        differs = seeds if card.training_seed != origin.training_seed else "its training options differ"
        return f"evaluated another run, {card.run}, and this is {origin.run} ({differs}); must be a card of this run"
    if card.step != origin.step:
        return f"evaluated step {card.step}, and this is step {origin.step}; add --step={card.step}"
    if card.ema_width != origin.ema_width:
        return f"evaluated {_weights(card)}, and this is {_weights(origin)}; must be a card of these weights"
    return None


def _weights(origin: Origin) -> str:
    return "weights of training" if origin.ema_width is None else f"an average of width {origin.ema_width:g}"


def _source(origin: Origin) -> str:
    return f"the images {origin.images.path}" if origin.images else f"the run {origin.run}"


def differences(old: Card, new: Card) -> list[str]:
    """What differs between a card and its repetition: settings, then figures, one line each.

    A figure that differs is compared with the card's interval. Data, extractors and checkpoint come first.
    """
    before, after = settings_of(old), settings_of(new)
    names = dict.fromkeys([*before, *after])
    lines = [
        f"{name}: {shown(name, before.get(name))} in the card, {shown(name, after.get(name))} here"
        for name in names
        if before.get(name) != after.get(name)
    ]
    both = [name for name in old.figures if name in new.figures]
    equal = [name for name in both if _is_equal(old.figures[name], new.figures[name])]
    lines += [_figure_line(name, old.figures[name], new.figures[name]) for name in both if name not in equal]
    if equal and len(equal) == len(both):
        lines.append(f"figures: {_all(len(both))} equal to the bit")
    elif equal:
        lines.append(f"equal to the bit: {', '.join(equal)}")
    lines += [f"{name}: only in the card" for name in old.figures if name not in new.figures]
    lines += [f"{name}: not in the card" for name in new.figures if name not in old.figures]
    return lines


def _all(number: int) -> str:
    return f"all {number} are" if number > 1 else "the only one is"


def _is_equal(old: CardFigure, new: CardFigure) -> bool:
    return (old.value, old.per_seed) == (new.value, new.per_seed)


def _figure_line(name: str, old: CardFigure, new: CardFigure) -> str:
    line = f"{name}: {value_text(old)} in the card, {_as_precise(old, new)} here"
    if old.value is None or new.value is None:
        return line
    line += f" ({new.value - old.value:+.2g})"
    if old.low is None or old.high is None:
        return f"{line}; the card has no interval for it"
    where = "within" if old.low <= new.value <= old.high else "outside"
    return f"{line}, {where} the card's interval {interval_text(old)} ({old.interval})"


def _as_precise(old: CardFigure, new: CardFigure) -> str:
    """The new value with the digits of the old one."""
    return "not finite" if new.value is None else rounded(new.value, half_width(old))
