# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A sweep over sampling settings: its points, their results, and one table.

Notable:
- a point is finished if its folder has a card with exactly its settings, whoever wrote it;
- a point is called best only if its 95% interval overlaps that of no other point; one seed has no such interval.

torchditan sweep evaluates the points; report/ stores and draws the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchditan.config.errors import ConfigError
from torchditan.evaluation.card import Card, CardFigure, read_card
from torchditan.evaluation.card_tables import COMPANIONS, columns, confidence

WHOLE_INTERVAL = (0.0, 1.0)
_FIRST_CHOICES = ("FID", "FD-", "KID", "accuracy_generated", "prompts seen: all")
_HIGHER_IS_BETTER = ("IS", "precision", "recall", "density", "coverage", "accuracy", "prompts")
_NOT_OF_SAMPLES = ("held-out ", "copies", "accuracy_held_out")


@dataclass(frozen=True)
class Point:
    """The settings of one evaluation."""

    run: str
    """Label of the run, unique in the sweep."""
    sampler: str
    num_steps: int
    guidance_scale: float
    guidance_interval: tuple[float, float]
    weights: str
    """"ema" or "raw"."""
    model_evaluations: int = field(default=0, compare=False)
    """Per image; a guided evaluation counts twice."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The `[sampling]` options that the sweep sets, as a card has them."""
        return {
            "sampler": self.sampler,
            "num_steps": self.num_steps,
            "guidance_scale": self.guidance_scale,
            "guidance_interval": list(self.guidance_interval),
        }

    @property
    def flags(self) -> list[str]:
        """The point as options of torchditan evaluate."""
        low, high = self.guidance_interval
        values = {**self.sampling, "guidance_interval": f"{low!r},{high!r}"}
        return [f"--weights={self.weights}", *(f"--sampling.{key}={value}" for key, value in values.items())]

    @property
    def name(self) -> str:
        """Folder name, unique in the sweep."""
        interval = "" if self.guidance_interval == WHOLE_INTERVAL else "_t_{!r}_{!r}".format(*self.guidance_interval)
        guidance = f"guidance_{self.guidance_scale!r}{interval}"
        return f"{self.run}_{self.sampler}_{self.num_steps}_steps_{guidance}_{self.weights}"

    @property
    def guidance(self) -> str:
        """`2`, or `2 for t 0.2 to 0.8`."""
        low, high = self.guidance_interval
        return f"{self.guidance_scale:g}" + ("" if (low, high) == WHOLE_INTERVAL else f" for t {low:g} to {high:g}")

    def __str__(self) -> str:
        return f"{self.run}, {self.sampler}, {self.num_steps} steps, guidance {self.guidance}, {self.weights}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Point:
        low, high = values["guidance_interval"]
        return cls(**{**values, "guidance_interval": (low, high)})


def grid_points(
    run: str,
    *,
    samplers: Sequence[str],
    num_steps: Sequence[int],
    guidance_scales: Sequence[float],
    guidance_intervals: Sequence[tuple[float, float]],
    weights: Sequence[str],
) -> list[Point]:
    """All combinations, each once. Guidance 1 is the same in every interval."""
    product = itertools.product(samplers, num_steps, guidance_scales, guidance_intervals, weights)
    points = [
        Point(run, sampler, steps, scale, WHOLE_INTERVAL if scale == 1 else interval, name)
        for sampler, steps, scale, interval, name in product
    ]
    return list(dict.fromkeys(points))


@dataclass(frozen=True)
class Result:
    """A point with its card, or with the reason why it has none; without both, it was not evaluated yet."""

    point: Point
    card: Card | None = None
    failure: str | None = None

    @property
    def status(self) -> str:
        return "finished" if self.card else "failed" if self.failure else "missing"

    @property
    def model_evaluations(self) -> int:
        """Per image."""
        return (self.card.model_evaluations if self.card else None) or self.point.model_evaluations

    @property
    def figures(self) -> dict[str, CardFigure]:
        return self.card.figures if self.card else {}

    def value(self, name: str) -> float | None:
        found = self.figures.get(name)
        return None if found is None else found.value

    def interval(self, name: str) -> tuple[float, float] | None:
        found = self.figures.get(name)
        return None if found is None or found.low is None or found.high is None else (found.low, found.high)

    def interval_of_seeds(self, name: str) -> tuple[float, float] | None:
        """The 95% interval; None if there is only one of two halves, which is too narrow to compare points."""
        found = self.figures.get(name)
        return self.interval(name) if found is not None and "95%" in (found.interval or "") else None


def finished_card(folder: Path, point: Point, *, step: int, metrics: list[str] | None = None) -> Card | None:
    """The card of a finished evaluation of exactly this point; None if the folder has none.

    Args:
        metrics: those that the card must have; None accepts any.
    """
    try:
        card = read_card(folder)
    except ConfigError:
        return None
    sampling = {key: card.sampling.get(key) for key in point.sampling}
    is_of_point = (sampling, card.weights, card.step) == (point.sampling, point.weights, step)
    return card if is_of_point and metrics in (None, card.metrics) else None


def choose_figure(results: Sequence[Result]) -> str | None:
    """The figure to compare points by: FID, else a Fréchet distance, KID, accuracy, or the first one."""
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    names = [name for name in names if not name.startswith(_NOT_OF_SAMPLES)]
    for choice in _FIRST_CHOICES:
        for name in names:
            if name == choice or (choice.endswith(("-", "KID")) and name.startswith(choice)):
                return name
    return names[0] if names else None


def higher_is_better(figure: str) -> bool:
    return figure.startswith(_HIGHER_IS_BETTER)


class Ranking(NamedTuple):
    """What can be said about the best point."""

    best: list[Point]
    """One point, or several that cannot be distinguished; empty where nothing can be said."""
    sentence: str


def rank(results: Sequence[Result], figure: str) -> Ranking:
    """The best point by a figure, and those that are tied with it: their intervals overlap its own."""
    known = [result for result in results if result.value(figure) is not None]
    if len(known) < 2:
        return Ranking([], "")
    sign = -1 if higher_is_better(figure) else 1
    known.sort(key=lambda result: sign * _value(result, figure))
    first = known[0]
    edge = "Highest" if sign < 0 else "Lowest"
    if first.interval_of_seeds(figure) is None:
        return Ranking(
            [], f"{edge} {figure}: {first.point}. Without 95% intervals, this may be chance; `--seeds 3` gives them."
        )
    tied = [result for result in known if _overlap(first, result, figure)]
    if len(tied) == 1:
        return Ranking([first.point], f"Best {figure}: {first.point}. Its interval overlaps that of no other point.")
    cheapest = min(tied, key=lambda result: result.model_evaluations)
    cost = f"The cheapest of them is {cheapest.point}, with {cheapest.model_evaluations:,} model evaluations."
    sentence = f"{edge} {figure}: {first.point}. It is tied with {len(tied) - 1} more: their intervals overlap. {cost}"
    return Ranking([result.point for result in tied], sentence)


def _value(result: Result, figure: str) -> float:
    value = result.value(figure)
    assert value is not None
    return value


def _overlap(first: Result, second: Result, figure: str) -> bool:
    """Whether two intervals overlap. Without an interval, the value itself is compared."""
    (low, high), (other_low, other_high) = (
        result.interval_of_seeds(figure) or (_value(result, figure),) * 2 for result in (first, second)
    )
    return low <= other_high and other_low <= high


def markdown(results: Sequence[Result], figure: str | None, *, title: str) -> str:
    """The table as Markdown, with what it says about the best point."""
    ranking = rank(results, figure) if figure else Ranking([], "")
    counts = {status: sum(result.status == status for result in results) for status in ("failed", "missing")}
    notes = [
        f"{len(results)} point{'s' if len(results) > 1 else ''}"
        + "".join(f", {count} {status}" for status, count in counts.items() if count)
        + ". Model evaluations are per image; a guided one counts twice."
    ]
    if figure:
        intervals = kinds_of_interval(results, figure)
        notes += [f"Intervals: {'; '.join(intervals)}."] if intervals else []
        floor = held_out_floor(results, figure)
        if floor is not None:
            notes.append(f"Held-out images (N = {floor.num_images:,}) have {figure} {floor.value:.4g}.")
    paragraphs = [f"# {title}", table(results, figure, best=ranking.best), ranking.sentence, " ".join(notes)]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def kinds_of_interval(results: Sequence[Result], figure: str) -> list[str]:
    """What the intervals of a figure are, as the cards say."""
    return sorted({result.figures[figure].interval or "" for result in results if result.interval(figure)})


class Floor(NamedTuple):
    """A figure of held-out images against training images."""

    value: float
    num_images: int
    """Held-out images."""


def held_out_floor(results: Sequence[Result], figure: str) -> Floor | None:
    """The same figure of held-out images; None if no card has one that can be compared with that of its samples.

    A Fréchet distance rises when there are fewer images, so it needs at least half and at most twice as many held-out
    images as samples. The expected value of KID does not depend on their number.
    """
    for result in results:
        held_out, samples = result.figures.get(f"held-out {figure}"), result.figures.get(figure)
        if held_out is None or samples is None or held_out.value is None:
            continue
        fewer, more = sorted((held_out.num_images, samples.num_images))
        if figure.startswith("KID") or more <= 2 * fewer:
            return Floor(held_out.value, held_out.num_images)
    return None


def table(results: Sequence[Result], figure: str | None, *, best: Sequence[Point] = ()) -> str:
    """A Markdown table with a row for each point.

    Args:
        results: in the order of the rows.
        figure: what the points are compared by; None before the first point is finished.
        best: points to mark, as `rank` gives them.
    """
    further = _further_figures(results, figure) if figure else []
    has_runs = len({result.point.run for result in results}) > 1
    header = ["", *(["run"] if has_runs else []), "sampler", "steps", "model evaluations", "guidance", "weights"]
    percent = confidence(result.figures[figure] for result in results if figure in result.figures)
    header += [f"{figure or 'result'} [{percent}]".removesuffix(" []"), *further, "N"]
    mark = "best" if len(best) == 1 else "tied"
    rows = []
    for result in results:
        point = result.point
        row = [mark if point in best else "", *([point.run] if has_runs else [])]
        row += [point.sampler, str(point.num_steps), f"{result.model_evaluations:,}", point.guidance, point.weights]
        row += [_cell(result, figure), *(_number(result.value(name)) for name in further)]
        row.append(f"{result.card.num_samples:,}" if result.card else "")
        rows.append(row)
    return columns(header, rows)


def _cell(result: Result, figure: str | None) -> str:
    """`12.3 [11.9, 12.7]`, or why there is none."""
    if result.card is None or figure is None:
        return f"failed: {result.failure}" if result.failure else "not evaluated"
    value, interval = result.value(figure), result.interval(figure)
    if value is None:
        return f"no {figure}"
    return f"{value:.4g}" + ("" if interval is None else " [{:.4g}, {:.4g}]".format(*interval))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _further_figures(results: Sequence[Result], figure: str) -> list[str]:
    """Recall, coverage and the copy check of the same extractor, where the cards have them."""
    extractor = next((found.extractor for result in results if (found := result.figures.get(figure))), None)
    names: list[str] = []
    for prefix in COMPANIONS:
        of_prefix = (
            name
            for result in results
            for name, found in result.figures.items()
            if name.startswith(prefix) and found.extractor == extractor
        )
        names += [name for name in [next(of_prefix, None)] if name is not None and name != figure]
    return names
