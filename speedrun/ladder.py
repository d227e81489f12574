# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the results of the speedrun say: which rungs of the ladder stay, and which records beat their baseline.

Two entries are compared seed by seed. The gain of one seed is the logarithm of the ratio of both Fréchet distances,
before / after; a mean gain g is a distance that is lower by 1 - exp(-g).

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
- KID against held-out images has to improve too: a second distance, to images of other places. Copies of training
  images are recognised by their distance to the nearest one (`is_copying`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from entries import LADDER_SEEDS, Entry

from torchditan.errors import ConfigError

Result = dict[str, Any]
"""The JSON of one seed (run.py)."""

TWO_STANDARD_ERRORS = 0.97725
MOST_CLOSER, MOST_CLOSEST = 0.6, 0.03
"""Of `closer_than_held_out` and `closest_percent`. Real images of other places have 0.49 to 0.61 and 0 to 0.02; with 5%
copies among them, the second is 0.05 or more (copy_thresholds.py)."""


def read_results(folder: Path, entry: Entry) -> dict[int, Result]:
    """The results of an entry by seed, without tuning trials.

    Raises:
        ConfigError: a result is of an older version of the entry, or cannot be read.
    """
    results: dict[int, Result] = {}
    for path in sorted((folder / entry.name).glob("seed-*.json")):
        result = read_result(path)
        if result["definition"] != json.loads(json.dumps(entry.definition())):
            raise ConfigError(f"{path} was made with an older version of {entry.name}; delete it and run it again")
        results[result["seed"]] = result
    return results


def read_result(path: Path) -> Result:
    """A file of run.py.

    Raises:
        ConfigError: it is not JSON.
    """
    try:
        result: Result = json.loads(path.read_bytes())
    except ValueError:
        raise ConfigError(f"{path} is not JSON; delete it and run the entry again") from None
    return result


class Pairs(NamedTuple):
    """Two entries at the seeds that both have."""

    seeds: list[int]
    gains: list[float]
    """log(before / after) of the Fréchet distance."""
    kid_gains: list[float]
    """before - after of KID against held-out images, whose estimates can be negative."""

    @property
    def mean(self) -> float:
        return sum(self.gains) / len(self.gains)

    @property
    def kid_agrees(self) -> bool:
        return (sum(self.kid_gains) > 0) == (self.mean > 0)


def pair(before: Mapping[int, Result], after: Mapping[int, Result], seeds: Iterable[int]) -> Pairs:
    """Compare results seed by seed."""
    common = [seed for seed in seeds if seed in before and seed in after]
    figures = [(before[seed]["figures"], after[seed]["figures"]) for seed in common]
    return Pairs(
        common,
        [math.log(b["fd"] / a["fd"]) for b, a in figures],
        [b["kid_held_out"] - a["kid_held_out"] for b, a in figures],
    )


def is_copying(results: Iterable[Result]) -> bool:
    """Whether samples lie nearer to training images than held-out images do, in the mean over the results."""
    figures = [result["figures"] for result in results]

    def mean(name: str) -> float:
        return sum(figure[name] for figure in figures) / len(figures)

    return mean("closer_than_held_out") > MOST_CLOSER or mean("closest_percent") > MOST_CLOSEST


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
    is_copying: bool
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
        return self.pairs.seeds == list(LADDER_SEEDS)

    @property
    def is_kept(self) -> bool:
        if not self.is_complete or self.margin is None:
            return False
        all_gain = min(self.pairs.gains) > 0
        return all_gain and self.pairs.mean > self.margin and self.pairs.kid_agrees and not self.is_copying


def climb(entries: Iterable[Entry], results: Mapping[str, Mapping[int, Result]]) -> list[Rung]:
    """The rungs with results, in their order."""
    rungs: list[Rung] = []
    for entry in sorted((entry for entry in entries if entry.rung is not None), key=lambda entry: entry.rung or 0):
        assert entry.base is not None, "load() refuses a rung without a base"
        own = results[entry.name]
        pairs = pair(results[entry.base], own, LADDER_SEEDS)
        if pairs.seeds:
            copying = is_copying(own[seed] for seed in pairs.seeds)
            spread = pooled([*(rung.pairs.gains for rung in rungs), pairs.gains])
            rungs.append(Rung(entry, pairs, copying, spread))
    return rungs


def lower_bound(gains: Sequence[float]) -> float | None:
    """Of the mean gain, at a confidence of 95%, one-sided (Student); None with one seed."""
    from scipy.special import stdtrit

    spread = pooled([gains])
    if spread is None:
        return None
    return sum(gains) / len(gains) - float(stdtrit(spread.degrees, 0.95)) * spread.std / math.sqrt(len(gains))
