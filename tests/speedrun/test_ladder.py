# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The statistics of the speedrun against numpy and scipy, and on noise."""

from __future__ import annotations

import math
from typing import Any

import entries
import ladder
import numpy as np
import pytest
from scipy.stats import ttest_rel

ENTRY = entries.Entry("rung", "a change", 640, {}, base="base", rung=1)


def result(fd: float, *, kid: float = 0.1, nearest: float = 9.0) -> dict[str, Any]:
    figures = {"fd": fd, "kid_held_out": kid, "nearest_distance": nearest, "held_out_nearest_distance": 6.0}
    return {"figures": figures}


def test_gains_are_logarithms_of_ratios_at_seeds_that_both_have() -> None:
    before, after = {0: result(100), 1: result(90), 2: result(80)}, {0: result(50), 2: result(80)}
    assert ladder.gains(before, after, (0, 1, 2)) == [pytest.approx(math.log(2)), 0]


def test_the_pooled_spread_is_that_within_the_groups() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.normal(mean, 1, size) for mean, size in ((0, 3), (5, 4), (-2, 2), (9, 1))]
    squares = sum(((group - group.mean()) ** 2).sum() for group in groups)
    assert ladder.pooled_std([list(group) for group in groups]) == pytest.approx(math.sqrt(squares / (2 + 3 + 1)))
    assert ladder.pooled_std([[1.0], [2.0]]) is None


@pytest.mark.parametrize(
    ("gains", "kid_gains", "has_copies", "is_kept"),
    [
        ([0.10, 0.12, 0.11], [0.1, 0.1, 0.1], False, True),
        ([0.10, 0.12, -0.01], [0.1, 0.1, 0.1], False, False),  # one seed loses
        ([0.02, 0.03, 0.02], [0.1, 0.1, 0.1], False, False),  # below 2 x 0.05 / sqrt(3)
        ([0.10, 0.12, 0.11], [-0.1, -0.1, 0.1], False, False),  # farther from held-out images
        ([0.10, 0.12, 0.11], [0.1, 0.1, 0.1], True, False),
    ],
)
def test_a_rung_is_kept_by_all_its_rules(
    gains: list[float], kid_gains: list[float], has_copies: bool, is_kept: bool
) -> None:
    assert ladder.Rung(ENTRY, gains, kid_gains, has_copies, pooled_std=0.05).is_kept == is_kept


def test_pure_noise_is_rarely_kept() -> None:
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(400):
        groups = rng.normal(0, 0.03, (10, 3)).tolist()
        std = ladder.pooled_std(groups)
        kept += sum(ladder.Rung(ENTRY, group, [1.0], False, std).is_kept for group in groups)
    assert kept / 4000 < 0.035  # 2 standard errors, one-sided


def test_the_bound_of_a_record_is_that_of_a_one_sided_t_test() -> None:
    rng = np.random.default_rng(1)
    before, after = rng.normal(4.0, 0.1, 5), rng.normal(3.9, 0.1, 5)
    comparison = ladder.compare(list(before - after))
    expected = ttest_rel(before, after, alternative="greater").confidence_interval(0.95).low
    assert comparison.lower == pytest.approx(expected)
    assert ladder.compare([0.1]).lower is None
    assert not ladder.compare([0.1]).is_better


def test_samples_nearer_to_training_images_than_held_out_images_are_copies() -> None:
    assert ladder.is_copying(result(50, nearest=5.9))
    assert not ladder.is_copying(result(50, nearest=6.0))
