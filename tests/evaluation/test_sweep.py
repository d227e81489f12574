# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Points of a sweep, and what its table says about the best one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cards import card, figure

from torchditan.evaluation.card import save_json
from torchditan.evaluation.sweep import (
    Point,
    Result,
    choose_figure,
    finished_card,
    grid_points,
    held_out_floor,
    markdown,
    rank,
    table,
)

FIGURE = "FD-EffNetLite0"
POINT = Point("digits", "euler", 10, 2.0, (0.0, 1.0), "ema", 20)


def result(value: float, *, error: float | None = None, **settings: Any) -> Result:
    """A finished point with this value of the figure."""
    point = replace(POINT, **settings)
    figures = {FIGURE: figure(value, error)}
    return Result(point, card(figures=figures, model_evaluations=2 * point.num_steps))


def test_each_combination_is_one_point_and_guidance_1_has_no_interval() -> None:
    points = grid_points(
        "digits",
        samplers=["euler", "heun"],
        num_steps=[10, 20, 10],
        guidance_scales=[1.0, 2.0],
        guidance_intervals=[(0.0, 1.0), (0.25, 0.75)],
        weights=["ema", "raw"],
    )
    assert len(points) == 2 * 2 * (1 + 2) * 2
    assert len({point.name for point in points}) == len(points)
    assert {point.guidance_interval for point in points if point.guidance_scale == 1} == {(0.0, 1.0)}
    assert [Point.from_dict(json.loads(json.dumps(point.to_dict()))) for point in points] == points


def test_a_card_of_other_settings_does_not_finish_a_point(tmp_path: Path) -> None:
    finished = card(step=4, weights="ema", sampling={**card().sampling, **POINT.sampling})
    save_json(tmp_path / "card.json", finished)
    assert finished_card(tmp_path, POINT, step=4) == finished
    assert finished_card(tmp_path, POINT, step=5) is None
    for other in ({"sampler": "heun"}, {"guidance_scale": 2.1}, {"guidance_interval": (0.0, 0.9)}, {"weights": "raw"}):
        assert finished_card(tmp_path, replace(POINT, **other), step=4) is None
    assert finished_card(tmp_path, POINT, step=4, metrics=finished.metrics) == finished
    assert finished_card(tmp_path, POINT, step=4, metrics=["effnet"]) is None
    (tmp_path / "card.json").write_text("{")
    assert finished_card(tmp_path, POINT, step=4) is None
    assert finished_card(tmp_path / "nothing", POINT, step=4) is None


def test_a_point_is_best_only_if_its_interval_overlaps_no_other() -> None:
    apart = [result(12, error=0.4, num_steps=10), result(11, error=0.5, num_steps=50)]
    assert rank(apart, FIGURE).best == [apart[1].point]
    overlapping = [*apart, result(13, error=2.0, num_steps=5)]
    found = rank(overlapping, FIGURE)
    assert [point.num_steps for point in found.best] == [50, 5], "not only the next value counts"
    assert (
        "tied with 1 more" in found.sentence and "5 steps, guidance 2, ema, with 10 model evaluations" in found.sentence
    )
    assert rank([result(12), result(11, num_steps=50)], FIGURE).best == []
    assert "--seeds" in rank([result(12), result(11, num_steps=50)], FIGURE).sentence
    assert rank(apart[:1], FIGURE).best == []


def test_the_halves_of_one_seed_make_no_point_best() -> None:
    results = [result(12, error=0.1), result(11, error=0.001, num_steps=50)]
    for one in results:
        label = {"interval": "sampling only: two halves, about 50%", "per_seed": [one.value(FIGURE)]}
        one.figures[FIGURE] = replace(one.figures[FIGURE], **label)
    found = rank(results, FIGURE)
    assert found.best == []
    assert "`--seeds 3`" in found.sentence
    text = markdown(results, FIGURE, title="Sweep")
    assert "| best" not in text
    assert "12 [11.9, 12.1]" in text and "Intervals: sampling only: two halves, about 50%." in text, "still shown"


@pytest.mark.parametrize(
    ("name", "num_images", "is_shown"),
    [
        (FIGURE, 1300, True),
        (FIGURE, 1299, False),
        (FIGURE, 5200, True),
        (FIGURE, 5201, False),
        ("FID", 165, False),
        ("KID-EffNetLite0", 165, True),
    ],
)
def test_the_floor_has_about_as_many_images_as_the_samples(name: str, num_images: int, is_shown: bool) -> None:
    figures = {name: figure(12.0, num_images=2600), f"held-out {name}": figure(73.8, num_images=num_images)}
    results = [Result(POINT, card(figures=figures))]
    assert held_out_floor(results, name) == ((73.8, num_images) if is_shown else None)
    line = f"Held-out images (N = {num_images:,}) have {name} 73.8."
    assert (line in markdown(results, name, title="Sweep")) == is_shown


def test_of_accuracies_the_highest_is_best() -> None:
    low, high = (
        Result(replace(POINT, num_steps=steps), card(figures={"accuracy_generated": figure(value, 0.01)}))
        for steps, value in ((10, 0.5), (50, 0.9))
    )
    assert choose_figure([low, high]) == "accuracy_generated"
    assert rank([low, high], "accuracy_generated").best == [high.point]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["KID", "FD-EffNetLite0", "FID"], "FID"),
        (["held-out FD-EffNetLite0", "KID-EffNetLite0", "FD-EffNetLite0"], "FD-EffNetLite0"),
        (["copies: EffNetLite0", "KID-EffNetLite0"], "KID-EffNetLite0"),
        (["accuracy_held_out_real", "chance", "accuracy_generated"], "accuracy_generated"),
        (["sharpness"], "sharpness"),
        ([], None),
    ],
)
def test_points_are_compared_by_a_frechet_distance_where_there_is_one(names: list[str], chosen: str | None) -> None:
    assert choose_figure([Result(POINT, card(figures={name: figure(1.0) for name in names}))]) == chosen


def test_the_table_has_recall_coverage_and_copies_of_the_same_extractor() -> None:
    finished = result(12.34567, error=0.5)
    finished.figures["recall"] = figure(0.5, extractor="Inception-2015")
    finished.figures["recall-EffNetLite0"] = figure(0.61)
    finished.figures["copies: closest 1%-EffNetLite0"] = figure(0.012)
    finished.figures[f"held-out {FIGURE}"] = figure(4.4)
    results = [finished, Result(replace(POINT, num_steps=20), failure="a | b"), Result(replace(POINT, num_steps=30))]
    header, _, *rows = table(results, FIGURE).splitlines()
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert columns[1:] == [
        "sampler", "steps", "model evaluations", "guidance", "weights", f"{FIGURE} [95%]", "recall-EffNetLite0",
        "copies: closest 1%-EffNetLite0", "N",
    ]  # fmt: skip
    assert "| 12.35 [11.85, 12.85] | 0.610" in rows[0] and "| 2,600 |" in rows[0]
    assert r"| failed: a \| b" in rows[1]
    assert "| not evaluated" in rows[2]
    text = markdown(results, FIGURE, title="Sweep")
    assert "3 points, 1 failed, 1 missing." in text
    assert f"Held-out images (N = 2,600) have {FIGURE} 4.4." in text
    assert "Intervals: sampling only: 95%, 3 seeds." in text
