# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The statistics of the speedrun against numpy and scipy, and on noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from speedrun import entries, ladder

pytestmark = pytest.mark.nightly

EARTH = entries.load_track("earth")
BASE = entries.Entry(EARTH, "base", "the base", 640, {})
SPREAD = ladder.Spread(0.05, 1000)


def result(fd: float, *, kid: float = 0.1, closer: float = 0.05, closest: float = 0.0) -> dict[str, Any]:
    figures = {"fd": fd, "kid_held_out": kid, "closer_than_held_out": closer, "closest_percent": closest}
    return {"figures": figures}


def rung(gains: list[float], kid_gains: list[float] | None = None, **changes: Any) -> ladder.Rung:
    pairs = ladder.Pairs(list(range(len(gains))), gains, [0.1] * 3 if kid_gains is None else kid_gains)
    return replace(ladder.Rung(replace(BASE, rung=1), pairs, False, SPREAD), **changes)


def test_the_pooled_spread_is_that_within_the_groups() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.normal(mean, 1, size) for mean, size in ((0, 3), (5, 4), (-2, 2), (9, 1))]
    squares = sum(((group - group.mean()) ** 2).sum() for group in groups)
    assert ladder.pooled([list(group) for group in groups]) == (pytest.approx(math.sqrt(squares / 6)), 2 + 3 + 1)
    assert ladder.pooled([[1.0], [2.0]]) is None


@pytest.mark.parametrize(
    ("found", "is_kept"),
    [
        (rung([0.10, 0.12, 0.11]), True),
        (rung([0.10, 0.12, -0.01]), False),  # one seed loses
        (rung([0.02, 0.03, 0.02]), False),  # below 2 x 0.05 / sqrt(3)
        (rung([0.10, 0.12, 0.11], [-0.1, -0.1, 0.1]), False),  # farther from held-out images
        (rung([0.10, 0.12, 0.11], is_over=True), False),
        (rung([0.10, 0.12]), False),  # a seed is missing
        (rung([0.10, 0.12, 0.11], spread=None), False),
        (rung([0.10, 0.12, 0.11], spread=ladder.Spread(0.05, 2)), False),  # the first rung knows its spread badly
    ],
)
def test_a_rung_is_kept_by_all_its_rules(found: ladder.Rung, is_kept: bool) -> None:
    assert found.is_kept == is_kept


def test_pure_noise_is_rarely_kept_at_any_position_of_the_ladder() -> None:
    rng = np.random.default_rng(0)
    rungs = [replace(BASE, name=f"rung-{i}", base="base", rung=i) for i in range(8)]
    kept = np.zeros(8)
    for _ in range(1000):
        results = {"base": {seed: result(100.0) for seed in range(3)}}
        for entry, gains in zip(rungs, rng.normal(0, 0.03, (8, 3)), strict=True):
            results[entry.name] = {seed: result(100 * math.exp(-gain), kid=0.05) for seed, gain in enumerate(gains)}
        kept += [found.is_kept for found in ladder.climb(rungs, results)]
    assert (kept / 1000 < 0.04).all()  # 0.023 and three standard errors


def test_the_bound_of_a_record_is_that_of_a_one_sided_t_test() -> None:
    rng = np.random.default_rng(1)
    before, after = rng.normal(4.0, 0.1, 5), rng.normal(3.9, 0.1, 5)
    expected = ttest_rel(before, after, alternative="greater").confidence_interval(0.95).low
    assert ladder.lower_bound(list(before - after)) == pytest.approx(expected)
    assert ladder.lower_bound([0.1]) is None


def test_samples_nearer_to_training_images_than_held_out_images_are_copies() -> None:
    assert not ladder.is_over(EARTH, [result(50, closer=0.5, closest=0.01)])
    assert not ladder.is_over(EARTH, [result(50, closer=0.55), result(50, closer=0.62)])  # as real images
    assert ladder.is_over(EARTH, [result(50, closer=0.55), result(50, closer=0.7)])
    assert ladder.is_over(EARTH, [result(50, closest=0.1)])  # a tenth is copied
