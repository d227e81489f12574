# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the results of the speedrun say: which rungs of the ladder stay, and which records beat their baseline.

Two entries are compared seed by seed. If a lower score is better, the gain of one seed is the logarithm of the ratio of
both, before / after; a mean gain g is a score that is lower by 1 - exp(-g). Otherwise the gain is the difference.

    rung      kept if every seed gains, and  mean gain > t s / sqrt(n).  s is the standard deviation of a gain around
              the mean of its rung, pooled over this rung and all earlier ones, kept or not; t is Student's quantile for
              its degrees of freedom at the probability of two standard errors of a normal variable, 0.977
    record    lower bound  m - t(0.95, n - 1) s / sqrt(n)  of one comparison with its own s; above 0: the record is
              better than the baseline at a confidence of 95%, one-sided

Notable:
- Three seeds say little about their own spread, so the ladder pools it. Only earlier rungs count: results that come
  later cannot change a decision on which other rungs were built.
- A rung without any effect is kept with a probability of 2.3% at most. Of eight such rungs, one or more are kept with
  17% at most, so records are judged by other seeds.
- A second figure has to improve too, such as the distance to images of other places, or the share of held-out prompts.
  Copies of training images are recognised by their distance to the nearest one (`is_over`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from speedrun.entries import Entry, Track
from torchditan.errors import ConfigError

Result = dict[str, Any]
"""The JSON of one seed (run.py)."""

TWO_STANDARD_ERRORS = 0.97725


def read_results(entry: Entry) -> dict[int, Result]:
    """The results of an entry by seed, without tuning trials."""
    found = [read_result(path, entry) for path in sorted((entry.track.results / entry.name).glob("seed-*.json"))]
    return {result["seed"]: result for result in found}


def read_result(path: Path, entry: Entry) -> Result:
    """A file of run.py.

    Raises:
        ConfigError: it was made with an older version of the entry.
    """
    result: Result = json.loads(path.read_bytes())
    if result["definition"] != json.loads(json.dumps(entry.definition())):
        raise ConfigError(f"{path} was made with an older version of {entry.name}; delete it to make it again")
    return result


class Pairs(NamedTuple):
    """Two entries at the seeds that both have."""

    seeds: list[int]
    gains: list[float]
    """Of the score."""
    second_gains: list[float]
    """Differences of the second figure, positive if it is better; empty without one."""

    @property
    def mean(self) -> float:
        return sum(self.gains) / len(self.gains)

    @property
    def second_agrees(self) -> bool:
        return not self.second_gains or (sum(self.second_gains) > 0) == (self.mean > 0)


def pair(track: Track, before: Mapping[int, Result], after: Mapping[int, Result], seeds: Iterable[int]) -> Pairs:
    """Compare results seed by seed."""
    common = [seed for seed in seeds if seed in before and seed in after]
    figures = [(before[seed]["figures"], after[seed]["figures"]) for seed in common]
    score, second, sign = track.score, track.second, -1 if track.is_lower_better else 1
    return Pairs(
        common,
        [math.log(b[score] / a[score]) if track.is_lower_better else a[score] - b[score] for b, a in figures],
        [sign * (a[second] - b[second]) for b, a in figures] if second else [],
    )


def is_over(track: Track, results: Iterable[Result]) -> bool:
    """Whether the mean of a figure is above its limit, such as the share of samples near to training images."""
    figures = [result["figures"] for result in results]
    return any(sum(each[name] for each in figures) / len(figures) > most for name, most in track.at_most.items())


class Spread(NamedTuple):
    """A standard deviation and its degrees of freedom."""

    std: float
    degrees: int


def pooled(groups: Iterable[Sequence[float]]) -> Spread | None:
    """Spread within groups of equal spread; None if no group has two values."""
    groups = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in groups)
    if not degrees:
        return None
    squares = sum((value - sum(group) / len(group)) ** 2 for group in groups for value in group)
    return Spread(math.sqrt(squares / degrees), degrees)


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder, compared with its base."""

    entry: Entry
    pairs: Pairs
    is_over: bool
    spread: Spread | None
    """Of this rung and all earlier ones."""

    @property
    def margin(self) -> float | None:
        """What the mean gain has to exceed."""
        if self.spread is None:
            return None
        from scipy.special import stdtrit

        quantile = float(stdtrit(self.spread.degrees, TWO_STANDARD_ERRORS))
        return quantile * self.spread.std / math.sqrt(len(self.pairs.seeds))

    @property
    def is_complete(self) -> bool:
        return self.pairs.seeds == self.entry.seeds

    @property
    def is_kept(self) -> bool:
        if not self.is_complete or self.margin is None:
            return False
        all_gain = min(self.pairs.gains) > 0
        return all_gain and self.pairs.mean > self.margin and self.pairs.second_agrees and not self.is_over


def climb(entries: Iterable[Entry], results: Mapping[str, Mapping[int, Result]]) -> list[Rung]:
    """The rungs with results, in their order."""
    rungs: list[Rung] = []
    for entry in sorted((entry for entry in entries if entry.rung is not None), key=lambda entry: entry.rung or 0):
        assert entry.base is not None, "load() refuses a rung without a base"
        own = results[entry.name]
        pairs = pair(entry.track, results[entry.base], own, entry.seeds)
        if pairs.seeds:
            over = is_over(entry.track, (own[seed] for seed in pairs.seeds))
            spread = pooled([*(rung.pairs.gains for rung in rungs), pairs.gains])
            rungs.append(Rung(entry, pairs, over, spread))
    return rungs


def lower_bound(gains: Sequence[float]) -> float | None:
    """Of the mean gain, at a confidence of 95%, one-sided (Student); None with one seed."""
    from scipy.special import stdtrit

    spread = pooled([gains])
    if spread is None:
        return None
    return sum(gains) / len(gains) - float(stdtrit(spread.degrees, 0.95)) * spread.std / math.sqrt(len(gains))
