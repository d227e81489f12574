# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Scenes of shapes: their captions, pictures and held-out pairs, and training on them without a cache."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused

from torchditan.config.loader import load_config
from torchditan.config.options import Dataset
from torchditan.data_stream.order import OrderedDataset
from torchditan.datasets import build_dataset
from torchditan.datasets.scenes import (
    _GAP,
    AREAS,
    COLOURS,
    INVERSES,
    SHAPES,
    WIDTH,
    Group,
    Object,
    Scene,
    _extents,
    coverage,
)
from torchditan.distributed.process_group import Rank
from torchditan.extras.captions.dataset import open_captions
from torchditan.extras.captions.encode import find_text_encoder
from torchditan.registry import TEXT_ENCODERS

CPU = torch.device("cpu")


def open_scenes(split: str = "train", pixels: int | None = None):  # type: ignore[no-untyped-def]
    size = None if pixels is None else [pixels]
    return build_dataset(Dataset(dataset_name="scenes", image_size=size), split=split)  # type: ignore[arg-type]


def scenes_of(split: str, count: int) -> list[Scene]:
    dataset = open_scenes(split)
    return [Scene.parse(dataset.caption_of(index)) for index in range(count)]


def held_out(count: int) -> list[Scene]:
    draws = np.random.default_rng(0)
    return [Scene.draw(draws, is_held_out=True) for _ in range(count)]


def test_the_samples_of_version_1() -> None:
    """If this fails, raise `VERSION`: runs on other samples must not continue."""
    dataset = open_scenes()
    assert (dataset.fingerprint, len(dataset)) == ("scenes-1", 2**32)
    assert [dataset.caption_of(index) for index in (0, 1, 5)] == [
        "right of a blue square is a red square",
        "a small yellow circle left of an orange triangle",
        "one small orange circle, and right of it one red triangle",
    ]
    means = [dataset[index]["sample"].mean().item() for index in (0, 1, 5)]
    assert means == pytest.approx([-0.6942, -0.6756, -0.4656], abs=1e-3)


def test_a_sample_is_a_function_of_split_and_index() -> None:
    one, again, other = open_scenes(), open_scenes(), open_scenes("validation")
    for index in (0, 7, 2**32 - 1):
        item = one[index]
        assert torch.equal(item["sample"], again[index]["sample"])
        assert item["caption"] == again[index]["caption"] == one.caption_of(index)
        assert not torch.equal(item["sample"], other[index]["sample"])
    small, large = open_scenes(pixels=32)[3], open_scenes(pixels=64)[3]
    assert small["caption"] == large["caption"] and large["sample"].shape == (3, 64, 64)
    reduced = torch.nn.functional.avg_pool2d(large["sample"], 2)
    assert (reduced - small["sample"]).abs().max() < 0.02  # the same picture


def test_a_caption_is_read_back() -> None:
    scenes = [*scenes_of("train", 300), *held_out(100)]
    for scene in scenes:
        found = Scene.parse(scene.caption)
        assert (found.groups, found.relation, found.caption) == (scene.groups, scene.relation, scene.caption)
    green, yellow = Group(1, None, "green", "triangle"), Group(2, "large", "yellow", "circle")
    assert Scene.parse("a green triangle left of two large yellow circles").groups == (green, yellow)
    assert Scene.parse("left of two large yellow circles is a green triangle").groups == (green, yellow)
    below = Scene.parse("two large yellow circles, and below them one green triangle")
    assert (below.groups, below.relation) == ((yellow, green), "above")


def test_another_caption_is_refused() -> None:
    others = ["", "a dog", "an red circle", "two red circle", "four red circles", "a red circle above", "a red circle."]
    others += ["a red circle above a blue square above a red square", "there is two red circles"]
    for caption in others:
        with refused(f'prompts = "{caption}": is not a caption of the dataset scenes'):
            Scene.parse(caption)
    with refused('prompts = "two red circles above two blue squares": has 4 shapes', "3"):
        Scene.parse("two red circles above two blue squares")
    with refused('prompts = "a large red circle above a small red circle": must have two groups that differ'):
        Scene.parse("a large red circle above a small red circle")


def test_held_out_pairs_are_in_neither_split_and_their_parts_are() -> None:
    pairs = set(itertools.product(COLOURS, SHAPES))
    found = {
        split: {(group.colour, group.shape) for scene in scenes_of(split, 500) for group in scene.groups}
        for split in ("train", "validation")
    }
    missing = {("purple", "circle"), ("yellow", "square"), ("blue", "triangle")}
    assert found["train"] == found["validation"] == pairs - missing
    of_held_out = [[group.is_held_out for group in scene.groups] for scene in held_out(200)]
    assert all(sum(flags) == 1 for flags in of_held_out)
    assert [True, False] in of_held_out and [False, True] in of_held_out
    assert not any(scene.is_held_out for scene in scenes_of("train", 100))


def test_everything_occurs() -> None:
    scenes = scenes_of("train", 1000)
    shares = {len(scene.groups): 0 for scene in scenes}
    assert {sum(group.count for group in scene.groups) for scene in scenes} == {1, 2, 3}
    assert {scene.relation for scene in scenes} == {None, *INVERSES} and set(shares) == {1, 2}
    sizes = [group.size for scene in scenes for group in scene.groups]
    assert set(sizes) == {None, *AREAS} and 0.45 < sizes.count(None) / len(sizes) < 0.55
    assert len({scene.wording for scene in scenes if len(scene.groups) == 2}) >= 9


def test_objects_are_apart_inside_and_in_the_relation_of_the_caption() -> None:
    draws = np.random.default_rng(0)
    for scene in [*scenes_of("train", 150), *held_out(50)]:
        objects = scene.place(draws)
        assert len(objects) == sum(group.count for group in scene.groups)
        boxes = [
            (o.x - left, o.y - top, o.x + right, o.y + bottom)
            for o, (left, top, right, bottom) in with_extents(objects)
        ]
        assert all(min(box) >= 1 and max(box) <= WIDTH - 1 for box in boxes)
        for one, other in itertools.combinations(boxes, 2):
            gaps = [other[0] - one[2], one[0] - other[2], other[1] - one[3], one[1] - other[3]]
            assert max(gaps) >= _GAP - 1e-9
        first, second = objects[: scene.groups[0].count], objects[scene.groups[0].count :]
        for one, other in itertools.product(first, second):
            distance = {"above": other.y - one.y, "left of": other.x - one.x}
            distance |= {"below": one.y - other.y, "right of": one.x - other.x}
            assert distance[str(scene.relation)] > 0


def with_extents(objects: list[Object]) -> list[tuple[Object, tuple[float, float, float, float]]]:
    return [(one, _extents(one.shape, one.area)) for one in objects]


@pytest.mark.parametrize("pixels", [32, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_has_the_area_and_the_centroid(shape: str, pixels: int) -> None:
    for area in AREAS.values():
        covered = coverage(shape, area, 12.3, 17.8, pixels=pixels)
        places = (np.arange(pixels) + 0.5) * WIDTH / pixels
        assert covered.sum() * (WIDTH / pixels) ** 2 == pytest.approx(
            area, rel=0.06
        )  # the edge of a square lies on a sample
        assert (covered.sum(0) @ places) / covered.sum() == pytest.approx(12.3, abs=0.1)
        assert (covered.sum(1) @ places) / covered.sum() == pytest.approx(17.8, abs=0.1)
        assert covered.min() >= 0 and covered.max() == 1
    half = coverage(shape, 60.0, 0.0, 16.0, pixels=pixels)  # cut off by the edge of the picture
    assert half.sum() * (WIDTH / pixels) ** 2 == pytest.approx(30, rel=0.05)


def test_the_stream_shuffles_without_a_list_of_all_samples() -> None:
    tracemalloc.start()
    stream = OrderedDataset(
        open_scenes(), seed=0, num_classes=0, horizontal_flip=False, corrupt_images="error", global_batch_size=64
    )
    indices = stream.locate(range(2000))
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()
    assert len(set(indices.tolist())) == 2000 and indices.max() > 2**31


def open_embedded(tmp_path: Path, *flags: str):  # type: ignore[no-untyped-def]
    config = load_config(
        ["--dataset.dataset_name=scenes", "--model.text=cross_attention", f"--cache.folder={tmp_path}", *flags]
    )
    train, held_out = open_scenes(), open_scenes("validation")
    return config, open_captions(config, train, held_out, rank=Rank(0, 0, 1))


def test_captions_are_embedded_when_an_item_is_read(tmp_path: Path) -> None:
    pytest.importorskip("wordllama")
    config, (train, held_out, space) = open_embedded(tmp_path, "--text_encoder.max_length=24")
    encode = find_text_encoder(config, memory=tmp_path).open(CPU)
    source = open_scenes()
    for index in (0, 5):
        expected = encode([source.caption_of(index)])
        item = pickle.loads(pickle.dumps(train))[index]
        assert item.keys() == {"sample", *expected}
        assert torch.equal(item["sample"], source[index]["sample"])
        assert all(torch.equal(item[name], tensor[0]) for name, tensor in expected.items())
    assert all(torch.equal(train.null_tensors[name], tensor[0]) for name, tensor in encode([""]).items())
    assert not list(tmp_path.rglob("*.safetensors"))  # nothing is cached
    assert train.prompts.names == held_out.prompts.names and len(train.prompts.names) == 4
    assert torch.equal(train.prompts.references[1], open_scenes("validation")[1]["sample"])
    assert space.sample_shape == (3, 32, 32)
    _, (longer, *_) = open_embedded(tmp_path)
    assert longer.fingerprint != train.fingerprint == held_out.fingerprint


def test_the_longest_caption_fits_into_the_shipped_configuration(tmp_path: Path) -> None:
    pytest.importorskip("wordllama")
    config = load_config(["--job.config_file=scenes"])
    length = config.text_encoder.max_length
    assert length is not None
    encode = find_text_encoder(config.replace({"text_encoder.max_length": length + 1}), memory=tmp_path).open(CPU)
    longest = "a picture of a small purple circle left of two small purple triangles"  # of all 331,776
    assert Scene.parse(longest).caption == longest
    assert encode([longest])["prompt_attention_mask"].sum() == length
    assert any(Scene.parse(prompt).is_held_out for prompt in config.sampling.prompts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cache.only", "cache.only = true: scenes encodes nothing in advance"),
        ("--autoencoder.name=haar", 'autoencoder.name = "haar": scenes encodes nothing in advance'),
        ("--text_encoder.name=slow", 'text_encoder.name = "slow": scenes encodes nothing in advance'),
        ("--model.text=none", "model.text = none"),
    ],
)
def test_what_needs_an_end_is_refused(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchditan.extras.captions.static_embeddings import StaticEmbeddings

    pytest.importorskip("wordllama")
    monkeypatch.setitem(TEXT_ENCODERS, "slow", type("Slow", (StaticEmbeddings,), {"is_lookup": False}))
    with refused(message):
        open_embedded(tmp_path, flags)
