# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metric prompts: real scenes are read back, mistakes in a picture are found, and a run is evaluated with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cards
import numpy as np
import pytest
import tiny_runs
import torch
from refusals import assert_refused, refused
from scipy import ndimage

from torchditan.datasets.scenes import AREAS, COLOURS, Object, Scene, coverage, draw_objects, random_grey
from torchditan.extras.evaluation.card import read_card
from torchditan.extras.evaluation.evaluator import Evaluator
from torchditan.extras.evaluation.metric import Evaluation, Pictures, share
from torchditan.extras.evaluation.scene_prompts import ATTRIBUTES, NO_SHAPE, ScenePrompts, read_objects, score
from torchditan.randomness import generator
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript

PROMPT = "two small red circles above a large blue square"
OBJECTS = [
    Object("red", "circle", AREAS["small"], 8.0, 6.0),
    Object("red", "circle", AREAS["small"], 22.0, 9.0),
    Object("blue", "square", AREAS["large"], 15.0, 22.0),
]
ALL_RIGHT = dict.fromkeys(ATTRIBUTES, 1.0)


def real(number: int, pixels: int = 32) -> tuple[Scene, np.ndarray]:
    draws = generator(0, "test of prompts", number)
    scene = Scene.draw(draws, is_held_out=number % 2 == 1)
    return scene, draw_objects(scene.place(draws), grey=random_grey(draws), pixels=pixels)


def scores_of(objects: list[Object], *, prompt: str = PROMPT, pixels: int = 32) -> dict[str, float]:
    return score(Scene.parse(prompt), read_objects(draw_objects(objects, grey=210.0, pixels=pixels)))


def share_right(change: Callable[[np.ndarray], np.ndarray], *, pixels: int = 32, count: int = 60) -> float:
    pictures = [real(number, pixels) for number in range(count)]
    changed = [
        (scene, change(picture.astype(float)).round().clip(0, 255).astype(np.uint8)) for scene, picture in pictures
    ]
    return float(np.mean([score(scene, read_objects(picture))["all"] for scene, picture in changed]))


@pytest.mark.parametrize("pixels", [32, 64])
def test_real_scenes_are_read_back(pixels: int) -> None:
    """Of 5,000 at each size, all were right (docs/evaluation.md)."""
    assert share_right(lambda picture: picture, pixels=pixels, count=150) == 1


@pytest.mark.parametrize("pixels", [32, 64])
def test_places_and_areas_are_read(pixels: int) -> None:
    found = read_objects(draw_objects(OBJECTS, grey=50.0, pixels=pixels))
    for one, other in zip(sorted(found, key=lambda one: one.y), OBJECTS, strict=True):
        assert (one.colour, one.shape) == (other.colour, other.shape)
        assert (one.x, one.y) == pytest.approx((other.x, other.y), abs=0.15)
        assert one.area == pytest.approx(other.area, rel=0.06)


def test_a_little_noise_and_blur_change_nothing_and_more_of_it_does() -> None:
    noise = np.random.default_rng(0).normal(size=(32, 32, 3))
    assert share_right(lambda picture: picture + 16 * noise) == 1
    assert share_right(lambda picture: ndimage.gaussian_filter(picture, (0.4, 0.4, 0))) == 1
    assert share_right(lambda picture: ndimage.gaussian_filter(picture, (2.0, 2.0, 0))) < 0.1
    uniform = np.random.default_rng(0).uniform(0, 255, (32, 32, 3))
    assert share_right(lambda picture: uniform) == 0
    assert share_right(lambda picture: picture * 0 + 200) == 0
    assert share_right(lambda picture: 255 - picture) < 0.1  # other colours


@pytest.mark.parametrize(
    ("objects", "wrong"),
    [
        (OBJECTS, set()),
        ([replace(OBJECTS[0], colour="orange"), *OBJECTS[1:]], {"colour"}),
        ([replace(OBJECTS[0], shape="triangle"), *OBJECTS[1:]], {"shape"}),
        (OBJECTS[1:], {"count"}),
        ([*OBJECTS, Object("blue", "square", AREAS["large"], 26.0, 26.0)], {"count"}),
        ([*OBJECTS[:2], replace(OBJECTS[2], area=AREAS["small"])], {"size"}),
        ([replace(one, y=32 - one.y) for one in OBJECTS], {"relation"}),
        ([replace(one, colour={"red": "blue", "blue": "red"}[one.colour]) for one in OBJECTS], {"size", "relation"}),
        ([replace(OBJECTS[0], y=29.0, x=28.0), *OBJECTS[1:]], {"relation"}),  # one of two is below
        ([], set(ATTRIBUTES)),
    ],
)
@pytest.mark.parametrize("pixels", [32, 64])
def test_each_mistake_is_found_and_no_other(objects: list[Object], wrong: set[str], pixels: int) -> None:
    expected = {**ALL_RIGHT, **dict.fromkeys(wrong, 0.0), "all": float(not wrong)}
    assert scores_of(objects, pixels=pixels) == expected


def with_extra(
    colour: tuple[int, int, int], strength: float, *, area: float = 20.0, place: tuple[float, float] = (26.0, 26.0)
) -> np.ndarray:
    """`OBJECTS`, which are all right for `PROMPT`, and a circle of another colour."""
    picture = draw_objects(OBJECTS, grey=210.0, pixels=32).astype(float)
    covered = coverage("circle", area, *place, pixels=32)[..., None] * strength
    return (picture + covered * (np.array(colour) - picture)).round().astype(np.uint8)


@pytest.mark.parametrize(
    ("colour", "strength"),
    [
        (COLOURS["green"], 1.0),
        (COLOURS["red"], 0.4),  # of a colour of the prompt, but faint
        ((255, 255, 255), 1.0),  # outside the palette
        ((0, 200, 220), 0.2),
    ],
)
def test_whatever_is_not_background_is_an_object(colour: tuple[int, int, int], strength: float) -> None:
    scores = score(Scene.parse(PROMPT), read_objects(with_extra(colour, strength)))
    assert (scores["all"], scores["count"], scores["colour"]) == (0, 0, 0)
    assert (scores["shape"], scores["size"], scores["relation"]) == (1, 1, 0), "it is a small circle below the square"


def test_an_object_of_another_colour_that_touches_a_right_one_counts() -> None:
    picture = with_extra((0, 200, 220), 1.0, area=60.0, place=(23.2, 22.0))
    assert score(Scene.parse(PROMPT), read_objects(picture))["all"] == 0


def test_the_right_colours_and_shapes_in_wrong_pairs_are_not_all_right() -> None:
    swapped = [Object("red", "square", 60.0, 8.0, 8.0), Object("blue", "circle", 60.0, 24.0, 8.0)]
    found = scores_of(swapped, prompt="a red circle left of a blue square")
    assert found == {**ALL_RIGHT, "all": 0.0, "size": pytest.approx(math.nan, nan_ok=True)}


@pytest.mark.parametrize("relation", ["above", "below", "left of", "right of"])
def test_a_relation_and_its_opposite(relation: str) -> None:
    dx, dy = {"above": (1, 10), "below": (1, -10), "left of": (10, 1), "right of": (-10, 1)}[relation]
    first, second = Object("red", "circle", 60.0, 16.0, 16.0), Object("red", "square", 60.0, 16.0 + dx, 16.0 + dy)
    prompt = f"a red circle {relation} a red square"
    assert scores_of([first, second], prompt=prompt)["relation"] == 1
    opposite = replace(second, x=16.0 - dx, y=16.0 - dy)
    assert scores_of([first, opposite], prompt=prompt)["relation"] == 0


def test_what_a_prompt_leaves_open_has_no_score() -> None:
    found = scores_of(OBJECTS[:2], prompt="two red circles")
    assert math.isnan(found["size"]) and math.isnan(found["relation"]) and found["all"] == 1


def test_an_object_of_another_form_has_no_shape_and_a_speck_is_none() -> None:
    picture = np.full((32, 32, 3), 200, dtype=np.uint8)
    picture[10, 4:28] = picture[4:28, 16] = (225, 35, 35)  # a cross of lines
    picture[28:30, 2:4] = (45, 75, 225)
    assert [(one.colour, one.shape) for one in read_objects(picture)] == [("red", NO_SHAPE)]


def batch(numbers: list[int], prompts: list[str]) -> Pictures:
    images = [torch.from_numpy(real(number)[1]).permute(2, 0, 1) for number in numbers]
    return Pictures(torch.stack(images), None, torch.tensor(numbers), "generated", prompts)


def test_shares_of_seen_and_held_out_prompts_on_one_rank_and_two() -> None:
    """Pictures of even numbers are of seen pairs. Those of 0 and 1 get the prompts of others."""
    prompts = [real(number)[0].caption for number in range(12)]
    prompts[0], prompts[1] = "three large orange squares", "three purple circles"
    alone, one, other = (ScenePrompts(Evaluation(class_names=[], seed=0)) for _ in range(3))
    alone.update(batch(list(range(12)), prompts))
    one.update(batch([4, 5, 6, 7, 8, 9, 10, 11], prompts[4:]))
    other.update(batch([0, 1, 2, 3], prompts[:4]))
    one.merge(other.state("generated"), "generated")
    found = alone.compute()
    assert found == one.compute()
    assert [name for name in found if name.endswith(": all")] == ["prompts seen: all", "prompts held-out: all"]
    for kind in ("seen", "held-out"):
        figure = found[f"prompts {kind}: all"]
        assert figure == share(5, 6) and figure.num_images == 6
    named = sum(Scene.parse(prompt).relation is not None for prompt in prompts[::2])
    assert found["prompts seen: relation"].num_images == named < 6
    one.forget("generated")
    assert not one.state("generated")


def test_the_interval_of_a_share_is_that_of_wilson() -> None:
    assert share(5, 10).interval == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert share(10, 10).interval == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert share(0, 10).interval == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert [share(count, 3).interval[end] for count, end in ((0, 0), (3, 1))] == [0.0, 1.0]  # type: ignore[index]


def test_prompts_are_of_both_kinds_and_the_first_of_them_do_not_depend_on_their_number() -> None:
    prompts = ScenePrompts.draw_prompts(40)
    assert [Scene.parse(prompt).is_held_out for prompt in prompts] == [False, True] * 20
    assert ScenePrompts.draw_prompts(10) == prompts[:10] and len(set(prompts)) > 35


@pytest.mark.parametrize(
    ("metric", "prompts_of", "mentions"),
    [
        ("prompts", None, "scenes"),
        ("prompts", "captions", "scenes"),
        ("classifier", "scenes", "captions of scenes; use prompts"),
    ],
)
def test_metrics_of_prompts_and_of_classes_refuse_the_samples_of_the_other(
    metric: str, prompts_of: str | None, mentions: str
) -> None:
    given: dict[str, Any] = {"num_samples": 4, "image_size": (32, 32), "class_names": ["a"], "seed": 0}
    given |= {"decode": lambda samples: samples, "device": torch.device("cpu")}
    with refused(f'--metrics = "{metric}"', mentions):
        Evaluator(None, [metric], {}, prompts_of=prompts_of, **given)


def test_a_run_is_evaluated_by_its_prompts(tmp_path: Path, run_script: RunScript) -> None:
    """Train on scenes with workers and an evaluation, evaluate it, repeat the card, draw, and be refused."""
    pytest.importorskip("wordllama")
    run = tmp_path / "run"
    flags = ["--dataset.dataset_name=scenes", "--model.text=cross_attention", "--text_encoder.max_length=24"]
    flags += ["--model.patch_size=8", "--training.steps=2", "--dataset.num_workers=1", "--sampling.num_steps=2"]
    flags += ["--evaluation.freq=2", "--evaluation.metrics=prompts", "--evaluation.num_samples=4"]
    trained = run_script("torchditan", "train", *tiny_runs.job(run, *tiny_runs.KEEP, *flags))
    assert trained.code == 0, trained.err
    assert "prompts held-out: all" in read_metrics(run)[-1]

    evaluated = run_script("torchditan", "evaluate", run, "--metrics", "prompts", "--num_samples=8", "--out=card")
    assert evaluated.code == 0, evaluated.err
    card = read_card("card")
    assert card.reference is None and not {"class_balance", "prompts"} & card.options.keys()
    assert {name for name in card.figures if "seen" in name} <= {f"prompts seen: {name}" for name in ATTRIBUTES}
    assert card.figures["prompts held-out: all"].num_images == 4
    assert "| prompts seen: all" in evaluated.out
    cards.repeated(Path("card"), run_script)

    own = ["--prompts", "a green triangle left of two yellow circles", "a yellow square", "--num_samples=3"]
    of_own = run_script("torchditan", "evaluate", run, *own, "--out=own")  # the metric prompts is the default here
    assert of_own.code == 0, of_own.err
    card = read_card("own")
    assert card.options["prompts"] == own[1:3] and card.metrics == ["prompts"]
    assert card.figures["prompts seen: all"].num_images == 2 and card.figures["prompts held-out: all"].num_images == 1
    cards.repeated(Path("own"), run_script)

    drawn = run_script("torchditan", "generate", run, "--prompts", own[1], "--out=a.png")
    assert drawn.code == 0 and Path("a.png").is_file(), drawn.err
    for more, about in (
        (["--prompts", "a dog"], 'prompts = "a dog"'),
        (["--metrics", "classifier"], '--metrics = "classifier"'),
        (["--reference=a.npz"], '--reference = "a.npz"'),
    ):
        refusal = run_script("torchditan", "evaluate", run, *more)
        assert refusal.code == 2
        assert_refused(refusal.err, about)
