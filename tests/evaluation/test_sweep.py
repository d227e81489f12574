# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Points of a sweep, and what its table says about the best one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchditan.config.options import Diffusion, Model, Sampling
from torchditan.diffusion.objectives import build_objective
from torchditan.diffusion.samplers import guided_prediction
from torchditan.evaluation.sweep import (
    Point,
    Result,
    choose_figure,
    grid_points,
    markdown,
    model_evaluations,
    rank,
    read_card,
    table,
)
from torchditan.models import build_model_spec

FIGURE = "FD-EffNetLite0"
POINT = Point("digits", "euler", 10, 2.0, (0.0, 1.0), "ema", 20)


def result(value: float, *, error: float | None = None, **settings: Any) -> Result:
    """A finished point with this value of the figure."""
    ends = {} if error is None else {"low": value - error, "high": value + error, "interval": "sampling only: 95%"}
    figure = {"value": value, "num_images": 2600, "extractor": "EffNetLite0", **ends}
    point = replace(POINT, **settings)
    return Result(point, {"figures": {FIGURE: figure}, "num_samples": 2600, "model_evaluations": 2 * point.num_steps})


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


@pytest.mark.parametrize("num_classes", [10, 0])
@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("interval", [[0.0, 1.0], [0.2, 0.7], [0.5, 0.5]])
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_model_evaluations_are_those_that_sampling_makes(
    sampler: Any, scale: float, interval: list[float], shift: float, num_classes: int
) -> None:
    spec = build_model_spec(Model(flavor="debugmodel"), sample_shape=(1, 8, 8), num_classes=num_classes)
    objective = build_objective(Diffusion(timestep_shift=shift), spec)
    sampling = Sampling(sampler=sampler, num_steps=6, guidance_scale=scale, guidance_interval=interval)
    evaluated = []

    class Model_(torch.nn.Module):
        def forward(self, x: torch.Tensor, t: torch.Tensor, cond: dict[str, torch.Tensor]) -> torch.Tensor:
            evaluated.append(len(x))
            return x

    noise = torch.zeros(3, 1, 8, 8)
    predict = guided_prediction(
        Model_(),
        conditioning=spec.conditioning,
        cond=spec.conditioning.from_batch({"class_label": torch.zeros(3, dtype=torch.int64)}),
        guidance_scale=scale,
        guidance_interval=(interval[0], interval[1]),
    )
    objective.sample(predict, noise, sampling=sampling)
    assert model_evaluations(objective, sampling, is_conditional=num_classes > 0) == sum(evaluated) / len(noise)


def test_a_card_of_other_settings_does_not_finish_a_point(tmp_path: Path) -> None:
    card = {"step": 4, "weights": "ema", "sampling": {**POINT.sampling, "guidance_channels": None}, "figures": {}}
    (tmp_path / "card.json").write_text(json.dumps(card))
    assert read_card(tmp_path, POINT, step=4) == card
    assert read_card(tmp_path, POINT, step=5) is None
    for other in ({"sampler": "heun"}, {"guidance_scale": 2.1}, {"guidance_interval": (0.0, 0.9)}, {"weights": "raw"}):
        assert read_card(tmp_path, replace(POINT, **other), step=4) is None
    for text in ("", "{", "[]", "{}", '{"sampling": 3}'):
        (tmp_path / "card.json").write_text(text)
        assert read_card(tmp_path, POINT, step=4) is None
    assert read_card(tmp_path / "nothing", POINT, step=4) is None


def test_a_point_is_best_only_if_its_interval_overlaps_no_other() -> None:
    apart = [result(12, error=0.4, num_steps=10), result(11, error=0.5, num_steps=50)]
    assert rank(apart, FIGURE).best == [apart[1].point]
    overlapping = [*apart, result(13, error=2.0, num_steps=5)]
    found = rank(overlapping, FIGURE)
    assert [point.num_steps for point in found.best] == [50, 5], "not only the next value counts"
    assert "2 points" in found.sentence and "5 steps, guidance 2, ema, with 10 model evaluations" in found.sentence
    assert rank([result(12), result(11, num_steps=50)], FIGURE).best == []
    assert "--seeds" in rank([result(12), result(11, num_steps=50)], FIGURE).sentence
    assert rank(apart[:1], FIGURE).best == []


def test_of_accuracies_the_highest_is_best() -> None:
    low, high = (
        Result(replace(POINT, num_steps=steps), {"figures": {"accuracy_generated": {"value": v, "low": v, "high": v}}})
        for steps, v in ((10, 0.5), (50, 0.9))
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
    assert choose_figure([Result(POINT, {"figures": {name: {"value": 1.0} for name in names}})]) == chosen


def test_the_table_has_recall_coverage_and_copies_of_the_same_extractor() -> None:
    finished = result(12.34567, error=0.5)
    assert finished.card is not None
    for name, extractor in (("recall", "Inception-2015"), ("recall-EffNetLite0", "EffNetLite0")):
        finished.figures[name] = {"value": 0.61, "extractor": extractor}
    finished.figures["copies: EffNetLite0"] = {"value": 0.012, "extractor": "EffNetLite0"}
    finished.figures[f"held-out {FIGURE}"] = {"value": 4.4, "extractor": "EffNetLite0"}
    results = [finished, Result(replace(POINT, num_steps=20), failure="a | b"), Result(replace(POINT, num_steps=30))]
    header, _, *rows = table(results, FIGURE).splitlines()
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    assert columns[1:] == [
        "sampler", "steps", "model evaluations", "guidance", "weights", FIGURE, "recall-EffNetLite0",
        "copies: EffNetLite0", "N",
    ]  # fmt: skip
    assert "| 12.35 [11.85, 12.85] | 0.610" in rows[0] and "| 2,600 |" in rows[0]
    assert r"| failed: a \| b" in rows[1]
    assert "| not evaluated" in rows[2]
    text = markdown(results, FIGURE, title="Sweep", pictures=["a.png"])
    assert "3 points, 1 failed, 1 missing." in text
    assert f"Held-out images have {FIGURE} 4.4." in text
    assert "Intervals: sampling only: 95%." in text
    assert "(a.png)" in text
