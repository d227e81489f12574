# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the results of the speedrun say: which rungs of the ladder stay, and which recipes beat a baseline.

Two entries are compared seed by seed. The gain of one seed is the logarithm of the ratio of both Fréchet distances,
before / after, so 0.1 means a distance about 10% lower.

    rung      kept if every seed gains, and mean gain > 2 s / sqrt(n). s is the standard deviation of the gains around
              the mean of their rung, pooled over all rungs: s^2 = sum of squares / sum of (n - 1)
    record    lower bound  m - t(0.95, n - 1) s / sqrt(n)  of one comparison with its own s; above 0: the record is
              better than the baseline at a confidence of 95%, one-sided

Notable:
- Three seeds say little about their own spread, so the ladder pools it over all rungs, kept or not.
- A gain by copying the training images does not count: KID against held-out images must improve too, and samples must
  not be nearer to training images than held-out images are (`is_copying`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entries import Entry

from torchditan.config.errors import ConfigError

Result = dict[str, Any]
"""The JSON of one seed (run.py)."""


def read_results(folder: Path, entry: Entry) -> dict[int, Result]:
    """The results of an entry by seed, without tuning trials.

    Raises:
        ConfigError: a result is of an older definition of the entry, or cannot be read.
    """
    results: dict[int, Result] = {}
    for path in sorted((folder / entry.name).glob("seed-*.json")):
        try:
            result = json.loads(path.read_bytes())
        except ValueError:
            raise ConfigError(f"{path} is not JSON; delete it and run the entry again") from None
        if result["definition"] != json.loads(json.dumps(entry.definition())):
            raise ConfigError(f"{path} is of another definition of {entry.name}; delete it and run the entry again")
        results[result["seed"]] = result
    return results


def gains(
    before: Mapping[int, Result], after: Mapping[int, Result], seeds: Sequence[int], figure: str = "fd"
) -> list[float]:
    """Per seed, log(before / after) of a figure; seeds that both have."""
    return [
        math.log(before[seed]["figures"][figure] / after[seed]["figures"][figure])
        for seed in seeds
        if seed in before and seed in after
    ]


def is_copying(result: Result) -> bool:
    """Whether samples are nearer to training images than held-out images are, by the medians of the distances."""
    return result["figures"]["nearest_distance"] < result["figures"]["held_out_nearest_distance"]


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder, compared with its base."""

    entry: Entry
    gains: list[float]
    """Per seed."""
    kid_gains: list[float]
    """The same of KID against held-out images."""
    has_copies: bool
    pooled_std: float | None = None
    """Of one gain; None before it is pooled."""

    @property
    def mean(self) -> float:
        return sum(self.gains) / len(self.gains)

    @property
    def standard_error(self) -> float | None:
        return None if self.pooled_std is None else self.pooled_std / math.sqrt(len(self.gains))

    @property
    def is_kept(self) -> bool:
        error = self.standard_error
        gains_everywhere = all(gain > 0 for gain in self.gains)
        is_large = error is not None and self.mean > 2 * error
        return gains_everywhere and is_large and sum(self.kid_gains) > 0 and not self.has_copies


def pooled_std(groups: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation within groups, pooled over groups of equal spread; None without two values in any group."""
    degrees = sum(len(group) - 1 for group in groups if len(group) > 1)
    if not degrees:
        return None
    squares = sum((value - sum(group) / len(group)) ** 2 for group in groups for value in group)
    return math.sqrt(squares / degrees)


@dataclass(frozen=True)
class Comparison:
    """A record against a baseline, over confirmation seeds."""

    gains: list[float]
    mean: float
    lower: float | None
    """Of the mean gain, at a confidence of 95%, one-sided; None with one seed."""

    @property
    def is_better(self) -> bool:
        return self.lower is not None and self.lower > 0


def compare(gains: Sequence[float]) -> Comparison:
    """One-sided Student interval of paired gains (at least one)."""
    from scipy.special import stdtrit

    n = len(gains)
    mean = sum(gains) / n
    std = pooled_std([gains])
    lower = None if std is None else mean - float(stdtrit(n - 1, 0.95)) * std / math.sqrt(n)
    return Comparison(list(gains), mean, lower)
