# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metrics dinov2 and clip, over tiny random networks that transformers saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cards
import numpy as np
import pytest
import tiny_pipelines
import tiny_runs
import torch
from pixel_quality import random_images
from refusals import assert_refused
from safetensors.torch import load_file, save_file
from scipy import stats
from zoo import JOBS, Zoo

from torchditan.extras.evaluation import clip_score
from torchditan.extras.evaluation import dinov2 as dinov2_features
from torchditan.extras.evaluation.card import read_card
from torchditan.extras.evaluation.clip_score import ClipScore
from torchditan.extras.evaluation.dinov2 import DINOv2Quality
from torchditan.extras.evaluation.metric import Evaluation, Pictures
from torchditan.run.atomic_files import sha256_of
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDTH = 16
PROMPTS = ["a red square", "a blue square", "a red square", "a blue circle " * 40]


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.Dinov2Config(**SIZES, mlp_ratio=2, image_size=448, patch_size=56)
    return save(transformers.Dinov2Model(config), tmp_path_factory.mktemp("dinov2"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 32}
    text = {**sizes, "vocab_size": 54, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    folder = tmp_path_factory.mktemp("clip")
    tiny_pipelines.clip_tokenizer().save_pretrained(folder)
    return save(transformers.CLIPModel(config), folder)


def save(model: Any, folder: Path) -> Path:
    for parameter in model.parameters():  # transformers draws weights so small that all images look alike
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def evaluation() -> Evaluation:
    return Evaluation([], seed=0)


def with_other_weights(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    save_file({name: 1.5 * tensor for name, tensor in weights.items()}, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("size", [(40, 40), (48, 33), (300, 500)])
def test_images_are_prepared_as_by_transformers(size: tuple[int, int]) -> None:
    """Up to 1 of 255: Pillow rounds after each axis."""
    images = random_images(2, seed=0, size=500)[:, :, : size[0], : size[1]]
    of_clip = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
    whole = {"size": {"height": 224, "width": 224}, "do_center_crop": False, "resample": 3}
    colours = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    of_dinov2 = transformers.CLIPImageProcessorPil(**whole, **colours)
    for found, prepare in (
        (clip_score.preprocess(images, 32), of_clip),
        (dinov2_features.preprocess(images), of_dinov2),
    ):
        expected = prepare(list(images), return_tensors="pt").pixel_values
        assert found.shape == expected.shape and (found - expected).abs().max() < 1.01 / 255 / 0.22


def test_dinov2_gives_transformers_own_cls_token_and_takes_grey(dinov2: Path) -> None:
    extractor = DINOv2Quality(evaluation(), path=str(dinov2)).extractor
    images = random_images(3, seed=0, size=40)
    with torch.no_grad():
        expected = transformers.AutoModel.from_pretrained(dinov2)(dinov2_features.preprocess(images)).pooler_output
    assert expected.std(0).max() > 0.01
    torch.testing.assert_close(extractor(images).pool, expected, atol=1e-6, rtol=1e-6)
    grey = images[:, :1]
    assert torch.equal(extractor(grey).pool, extractor(grey.expand(-1, 3, -1, -1)).pool)


def test_cached_features_are_of_the_same_weights(dinov2: Path, tmp_path: Path) -> None:
    real, features = random_images(8, seed=0), []
    for place in (dinov2, with_other_weights(dinov2, tmp_path / "other")):
        metric = DINOv2Quality(Evaluation([], seed=0, cache_folder=tmp_path / "cache"), path=str(place))
        metric.update(Pictures(real, None, torch.arange(8), "train"))
        features.append(metric.state("train")["pool"])
        assert torch.equal(features[-1], metric.extractor(real).pool)
    assert not torch.equal(*features)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_run_on_grey_digits_is_evaluated_over_dinov2(dinov2: Path, zoo: Zoo, run_script: RunScript) -> None:
    given: list[object] = ["torchditan", "evaluate", zoo("digits"), "--metrics", f"dinov2 path={dinov2}"]
    evaluated = run_script(*given, "--num_samples=40", "--out=card")
    assert evaluated.code == 0, evaluated.err
    card = read_card("card")
    assert card.extractors == {"DINOv2-16": sha256_of(dinov2 / "model.safetensors")} and card.prompts is None
    names = ("FD", "KID", "precision", "recall", "density", "coverage", "copies: closest 1%", "held-out FD")
    assert {f"{name}-DINOv2-16" for name in names} <= card.figures.keys()
    few = run_script(*given, f"--num_samples={WIDTH}")
    assert few.code == 2
    assert_refused(few.err, "--num_samples", [str(WIDTH), str(WIDTH + 1)])


def test_the_clip_score_by_hand_on_one_rank_and_two(clip: Path) -> None:
    """The mean over prompts, of which two pictures share one, with Student's interval."""
    images = random_images(4, seed=0, size=32)
    whole, one, other = (ClipScore(evaluation(), path=str(clip)) for _ in range(3))
    for metric, rows in ((whole, [0, 1, 2, 3]), (one, [3, 1]), (other, [0, 2])):
        prompts = [PROMPTS[row] for row in rows]
        metric.update(Pictures(images[rows], None, torch.tensor(rows), "generated", prompts))
    one.merge(other.state("generated"), "generated")
    found = whole.compute()
    assert one.compute()["CLIP score"].value == pytest.approx(found["CLIP score"].value, rel=1e-6)

    model = transformers.CLIPModel.from_pretrained(clip)
    text = whole.tokenizer(PROMPTS, padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.no_grad():
        of_images = model.get_image_features(clip_score.preprocess(images, 32)).pooler_output
        of_texts = model.get_text_features(**text).pooler_output
    scores = (100 * torch.cosine_similarity(of_images, of_texts).clamp(min=0)).double().numpy()
    assert scores.std() > 1
    means = [(scores[0] + scores[2]) / 2, scores[1], scores[3]]
    half_width = stats.t.ppf(0.975, 2) * stats.sem(means)
    figure = found["CLIP score"]
    assert figure.value == pytest.approx(np.mean(means), rel=1e-5)
    assert figure.interval == pytest.approx((np.mean(means) - half_width, np.mean(means) + half_width), rel=1e-4)
    assert found["prompts of the CLIP score"].startswith("3 different, 1 cut to 77 tokens")


@pytest.mark.parametrize("name", ["captions", "flux lora"])
def test_captions_of_own_photos_are_the_prompts(name: str, clip: Path, zoo: Zoo, run_script: RunScript) -> None:
    given = ["--metrics", f"clip path={clip}", "--num_samples=4", "--sampling.num_steps=1", "--out=card"]
    evaluated = run_script("torchditan", "evaluate", zoo(name), *given)
    assert evaluated.code == 0, evaluated.err
    card = read_card("card")
    assert card.prompts == "training captions" and card.reference is None
    assert card.extractors == {"CLIP": sha256_of(clip / "model.safetensors")}
    figure = card.figures["CLIP score"]
    assert figure.num_images == 4 and figure.low is not None and figure.interval == "sampling only: 95%, one seed"
    assert card.other["prompts of the CLIP score"].startswith("2 different, 0 cut")
    assert ("embedded_guidance" in card.sampling) == (name == "flux lora")
    cards.repeated(Path("card"), run_script)


def test_clip_in_training_draws_held_out_captions_and_goes_together_with_distances(
    clip: Path, dinov2: Path, zoo: Zoo, run_script: RunScript, tmp_path: Path
) -> None:
    run, of_clip = tmp_path / "run", f"clip path={clip}"
    flags = [flag.format(inputs=zoo("captions").parent / "inputs") for flag in JOBS["captions"]]
    flags += ["--dataset.held_out=4", "--training.steps=1", "--evaluation.freq=1", "--evaluation.num_samples=8"]
    trained = run_script("train.py", *tiny_runs.job(run, *tiny_runs.KEEP, *flags), "--evaluation.metrics", of_clip)
    assert trained.code == 0, trained.err
    assert "CLIP score" in read_metrics(run)[-1]
    for metrics, prompts in (
        ([of_clip], "held-out captions"),
        ([of_clip, f"dinov2 path={dinov2}"], "training captions"),
    ):
        evaluated = run_script("torchditan", "evaluate", run, "--metrics", *metrics, "--num_samples=8", "--out=card")
        assert evaluated.code == 0, evaluated.err
        card = read_card("card")
        assert card.prompts == prompts and "CLIP score" in card.figures
        assert ("KID-DINOv2-16" in card.figures) == (len(metrics) == 2)


@pytest.mark.parametrize(
    ("metric", "mentions"),
    [
        ("clip path={dinov2}", ["dinov2", "clip"]),
        ("dinov2 path={clip}", ["clip", "dinov2"]),
        ("dinov2 path=gone", ["config.json"]),
        ("dinov2 path={empty}", ["embeddings.cls_token"]),
        ("dinov2 path={damaged}", ["header"]),
        ("clip path={clip}", ["captions"]),
        ("clip path={mute}", ["tokenizer"]),
    ],
)
def test_a_mistake_is_one_line(
    metric: str, mentions: list[str], clip: Path, dinov2: Path, zoo: Zoo, run_script: RunScript, tmp_path: Path
) -> None:
    empty, damaged, mute = (tmp_path / name for name in ("empty", "damaged", "mute"))
    shutil.copytree(dinov2, empty)
    shutil.copytree(dinov2, damaged)
    (damaged / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")  # not downloaded
    shutil.copytree(clip, mute, ignore=shutil.ignore_patterns("tokenizer*", "vocab*", "merges*"))
    weights = load_file(empty / "model.safetensors")
    del weights["embeddings.cls_token"]
    save_file(weights, empty / "model.safetensors", {"format": "pt"})
    given = metric.format(clip=clip, dinov2=dinov2, empty=empty, damaged=damaged, mute=mute)
    run = zoo("captions" if "mute" in given else "digits")
    outcome = run_script("torchditan", "evaluate", run, "--metrics", given)
    assert outcome.code == 2, outcome.err
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert given in line and all(word in line for word in mentions), line
