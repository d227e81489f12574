# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Compares cards: a repeated evaluation with its card, and the cards of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchditan.config.errors import option_error
from torchditan.evaluation.card import Card, CardFigure, ImageSet, Origin, settings_of
from torchditan.evaluation.card_figures import spread_of
from torchditan.evaluation.card_tables import (
    columns,
    confidence,
    half_width,
    has_interval,
    interval_text,
    ordered_names,
    rounded,
    shown,
    significant,
    title,
    value_text,
)

_OF_A_SEED = ("run_id", "training_seed", "config_hash")
"""Settings that differ between runs of one recipe with different seeds."""


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
    if mistake is None and reference is not None and reference.content != card.reference.content:
        there, here = (shown(".content", images.content) for images in (card.reference, reference))
        num_images = f"{card.reference.num_images} images ({there}), here are {reference.num_images} ({here})"
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


def comparison(cards: Sequence[Card]) -> str:
    """Several cards as Markdown: a table with a column per card, then the spread over training seeds or why not."""
    parts = [card_columns(cards), training_spread(cards)]
    return "\n\n".join(part for part in parts if part) + "\n"


def card_columns(cards: Sequence[Card]) -> str:
    """A table with a column per card: the settings that differ, then all figures with their sampling intervals."""
    settings = [settings_of(card) for card in cards]
    rows = []
    for name in differing_settings(cards):
        rows.append([name, *(shown(name, values.get(name)) for values in settings)])
    figures = {name: figure for card in cards for name, figure in card.figures.items()}
    for name in ordered_names(figures):
        rows.append([name, *(_cell(card.figures.get(name)) for card in cards)])
    confidences = [confidence(card.figures.values()) for card in cards]
    heading = [""]
    heading += [f"{name} (± {of})" if of else name for name, of in zip(headings(cards), confidences, strict=True)]
    labels = {figure.interval: None for card in cards for figure in card.figures.values() if has_interval(figure)}
    return "\n".join([columns(heading, rows), *(f"\nIntervals: {label}." for label in labels)])


def differing_settings(cards: Sequence[Card]) -> list[str]:
    """Names of the settings that are not the same in all cards."""
    settings = [settings_of(card) for card in cards]
    names = dict.fromkeys(name for values in settings for name in values)
    return [name for name in names if any(values.get(name) != settings[0].get(name) for values in settings)]


def headings(cards: Sequence[Card]) -> list[str]:
    """A heading for each card: the run's folder, or what tells equal ones apart."""
    names = [Path(card.run or (card.images and card.images.path) or "").name for card in cards]
    full = [title(card) for card in cards]
    for candidates in (names, full):
        if len(set(candidates)) == len(cards):
            return candidates
    return [f"{number}: {name}" for number, name in enumerate(names, start=1)]


def _cell(figure: CardFigure | None) -> str:
    if figure is None:
        return "not measured"
    half = half_width(figure)
    return value_text(figure) + (f" ± {rounded(half, half)}" if half is not None else "")


def training_spread(cards: Sequence[Card]) -> str:
    """The spread of each figure over training seeds, as Markdown.

    For cards of several seeds that differ in something else too, one line that says what. "" for cards of one seed.
    """
    seeds = [card.training_seed for card in cards]
    if len(set(seeds)) == 1:
        return ""
    if other := [name for name in differing_settings(cards) if name not in _OF_A_SEED]:
        return f"No spread over training seeds: the cards also differ in {', '.join(other)}."
    if len(set(seeds)) < len(cards):
        return "No spread over training seeds: two cards have the same training seed."
    rows = []
    for name in ordered_names(cards[0].figures):
        values = [card.figures[name].value if name in card.figures else None for card in cards]
        rows.append([name, *_spread_cells(values)])
    shown_seeds = ", ".join(map(str, sorted(seed for seed in seeds if seed is not None)))
    heading = f"Training seeds: {len(cards)} ({shown_seeds}). Intervals: training seeds, 95% of the mean, Student t."
    note = "A figure's spread here includes that of sampling; CV is the standard deviation divided by the mean."
    return "\n\n".join([heading, columns(["figure", "mean", "standard deviation", "CV", "95% interval"], rows), note])


def _spread_cells(values: Sequence[float | None]) -> list[str]:
    """Mean, standard deviation, CV and interval of a figure over training seeds."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return ["not measured", "", "", ""]
    if len(set(known)) == 1:  # it does not depend on training, or is at its bound
        return [rounded(known[0]), "0", "", "equal in all cards"]
    mean, std, half = spread_of(known)
    variation = f"{significant(100 * std / mean, 2)}%" if mean > 0 else ""
    interval = f"{rounded(mean - half, half)} to {rounded(mean + half, half)}"
    return [rounded(mean, half), significant(std, 2), variation, interval]
