# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The page of the speedrun, from invented results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speedrun import entries, leaderboard

pytestmark = pytest.mark.nightly

EARTH, LAPTOP = (entries.load_track(name) for name in ("earth", "laptop"))
BASELINE = entries.load(EARTH, "official_dit")
WINNER = replace(
    BASELINE,
    name="winner",
    title="ours",
    images=19_200,
    settings={"training.global_batch_size": 32},
    compare=("official_dit",),
)
RUNG = replace(BASELINE, name="rung", title="one change", rung=1, base="official_dit")


def results(entry: entries.Entry, distances: dict[int, float], **figures: float) -> dict[int, dict[str, Any]]:
    return {
        seed: {
            "entry": entry.name,
            "seed": seed,
            "images": entry.images,
            "training_flops": 1e12 * entry.images,
            "figures": {
                "fd": fd,
                "kid_held_out": fd / 1000,
                "closer_than_held_out": 0.05,
                "closest_percent": 0.0,
                **figures,
            },
        }
        for seed, fd in distances.items()
    }


def page(found: dict[str, Any], chosen: list[entries.Entry], times: Any = None) -> str:
    named = {entry.name: entry for entry in chosen}
    board = leaderboard.Board(chosen[0].track, named, {**{name: {} for name in named}, **found}, [], times or {})
    return leaderboard.page([board])


def confirmed(**figures: float) -> dict[str, Any]:
    before, after = (60.0, 62.0, 61.0, 60.5, 61.5), (50.0, 51.0, 50.5, 50.2, 50.8)
    return {
        "official_dit": results(BASELINE, {10 + i: fd for i, fd in enumerate(before)}),
        "winner": results(WINNER, {10 + i: fd for i, fd in enumerate(after)}, **figures),
    }


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| [{name}]"))


def test_a_record_is_compared_with_the_baseline_at_the_same_seeds() -> None:
    times = {WINNER.recipe(): {"ratio": 1.1, "baseline_recipe": BASELINE.recipe()}}
    text = page(confirmed(), [BASELINE, WINNER], times)
    assert text.index("[winner]") < text.index("[official_dit]"), "the best comes first"
    # 1 - the geometric mean of 50 / 60, 51 / 62 ...; FLOPs 1 / 5, time 600 / 1500 x 1.1
    assert (
        "| 19,200 | 50.5 ± 0.5 | 50.5 ± 0.5 | 0.05 ± 0.00 | 0.20 | 0.44 | official_dit: **better**, 17.2% lower, "
        in row(text, "winner")
    )
    assert "| 96,000 | 61.0 ± 1.0 | 61.0 ± 1.0 | 0.05 ± 0.00 | 1.00 | 1.00 |  |" in row(text, "official_dit")


def test_noise_distances_to_training_images_alone_and_copies_are_no_record() -> None:
    found = confirmed()
    found["winner"] = results(WINNER, {10: 50.0, 11: 63.0, 12: 61.5, 13: 59.0, 14: 62.0})
    assert "official_dit: not better, " in row(page(found, [BASELINE, WINNER]), "winner")
    disagreeing = row(page(confirmed(kid_held_out=0.2), [BASELINE, WINNER]), "winner")
    assert "not better, 17.2% lower" in disagreeing
    assert "kid_held_out disagrees" in disagreeing
    for winner in (WINNER, replace(WINNER, compare=())):
        assert "not valid" in row(page(confirmed(closest_percent=0.2), [BASELINE, winner]), "winner")


def test_a_failed_rung_stays_in_the_table_and_one_with_missing_seeds_is_incomplete() -> None:
    found = {
        "official_dit": results(BASELINE, {0: 100.0, 1: 101.0, 2: 99.0}),
        "rung": results(RUNG, {0: 100.0, 1: 102.0, 2: 98.0}),
        "better": results(RUNG, {0: 80.0, 1: 81.0, 2: 79.0}),
        "started": results(RUNG, {0: 80.0}),
    }
    better = replace(RUNG, name="better", title="another change", rung=2)
    started = replace(RUNG, name="started", rung=3)
    lines = page(found, [BASELINE, RUNG, better, started]).splitlines()
    assert next(line for line in lines if line.startswith("| 1 |")).endswith("| 1.00 | no |")
    assert next(line for line in lines if line.startswith("| 2 |")).endswith("| 1.00 | **yes** |")
    assert next(line for line in lines if line.startswith("| 3 |")).endswith("| 1.00 | incomplete |")


def test_minutes_are_those_of_the_baseline_by_steps_and_their_ratio_and_have_a_limit() -> None:
    baseline = entries.load(LAPTOP, "scenes")
    slow = replace(baseline, name="slow", settings={**baseline.settings, "optimizer.lr": 1e-3})
    for ratio, minutes in ((0.5, "15.00"), (1.1, "33.00 **too long: not valid**")):
        times = {slow.recipe(): {"ratio": ratio, "baseline_recipe": baseline.recipe()}}
        text = page({}, [baseline, slow], times)
        assert f"| {minutes} | not yet scored by this command |" in row(text, "slow")
    assert "| 30.00 | not yet scored by this command |" in row(text, "scenes")
