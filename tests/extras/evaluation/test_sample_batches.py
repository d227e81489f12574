# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""ADM's .npz files, in and out; and the figures of ADM's README where its files are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from torchditan.errors import ConfigError
from torchditan.extras.evaluation import inception
from torchditan.extras.evaluation.distances import (
    FeatureStatistics,
    Gaussian,
    frechet_distance,
    gaussian_of,
    inception_score,
)
from torchditan.extras.evaluation.inception import load_inception
from torchditan.extras.evaluation.neighbours import compare_with_halves
from torchditan.extras.evaluation.sample_batches import (
    check_same_size,
    image_shape,
    read_images,
    read_statistics,
    write_images,
)

ADM = os.environ.get("ADM_BATCHES")
"""Folder of VIRTUAL_imagenet256_labeled.npz and admnet_guided_upsampled_imagenet256.npz."""


def random_images(count: int = 7) -> Tensor:
    return torch.randint(0, 256, (count, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def random_gaussian(dimensions: int, seed: int = 0) -> Gaussian:
    return gaussian_of(torch.randn(50, dimensions, generator=torch.Generator().manual_seed(seed)))


def test_images_are_those_of_numpy_in_and_out(tmp_path: Path) -> None:
    images, path = random_images(), tmp_path / "a.npz"
    write_images(path, images.split(2), shape=(7, 4, 5))
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays.files == ["arr_0"] and arrays["arr_0"].dtype == np.uint8
        assert np.array_equal(arrays["arr_0"], images.permute(0, 2, 3, 1).numpy())
    assert image_shape(path) == (7, 4, 5)
    batches = list(read_images(path, batch_size=3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert torch.equal(torch.cat(batches), images)


def test_a_failure_while_writing_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        write_images(tmp_path / "a.npz", random_images().split(2), shape=(8, 4, 5))
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_adm_is_of_inception_and_may_have_no_statistics(tmp_path: Path) -> None:
    np.savez(tmp_path / "samples.npz", random_images().permute(0, 2, 3, 1).numpy())
    assert read_statistics(tmp_path / "samples.npz", extractor="effnet") == (None, None)
    np.savez(tmp_path / "reference.npz", mu=np.zeros(3, np.float32), sigma=np.eye(3))
    pool, spatial = read_statistics(tmp_path / "reference.npz", extractor="Inception-2015")
    assert pool is not None
    assert spatial is None
    assert pool.mean.dtype == torch.float64
    with pytest.raises(ConfigError, match=r"reference\.npz: its statistics are of Inception-2015"):
        read_statistics(tmp_path / "reference.npz", extractor="effnet")


def test_bad_files_are_refused_in_one_line(tmp_path: Path) -> None:
    text = tmp_path / "text.npz"
    text.write_text("not an archive")
    np.savez(tmp_path / "other.npz", labels=np.arange(3))
    np.savez(tmp_path / "floats.npz", np.zeros((2, 4, 4, 3), np.float32))
    np.savez(tmp_path / "shapes.npz", mu=np.zeros(3), sigma=np.eye(4))
    for name in ("text.npz", "other.npz", "missing.npz"):
        with pytest.raises(ConfigError, match=rf"{name}: not an \.npz file with images in arr_0"):
            image_shape(tmp_path / name)
    with pytest.raises(
        ConfigError, match=r"floats\.npz: arr_0 must be \(N, H, W, 3\) uint8, not \(2, 4, 4, 3\) float32"
    ):
        image_shape(tmp_path / "floats.npz")
    for name in ("text.npz", "shapes.npz", "missing.npz"):
        with pytest.raises(ConfigError, match=rf"{name}: not an \.npz file of images or statistics"):
            read_statistics(tmp_path / name, extractor="Inception-2015")


def test_damaged_images_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, (random_images(1000) % 4).permute(0, 2, 3, 1).numpy())  # compressible
    data = bytearray(path.read_bytes())
    data[500:700] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.npz: not an \.npz file with images"):
        list(read_images(path, batch_size=10))


def test_damaged_statistics_are_refused_in_one_line(tmp_path: Path) -> None:
    """Each byte of a compressed file: the statistics are read unchanged, or refused."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, mu=np.zeros(2), sigma=np.eye(2))
    whole = path.read_bytes()
    refusals: list[str] = []
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            pool, _ = read_statistics(path, extractor="Inception-2015")
        except ConfigError as error:
            refusals.append(str(error))
        else:
            assert pool is None or torch.equal(pool.covariance, torch.eye(2).double())
    assert len(refusals) > len(whole) / 4
    expected = f"{path}: not an .npz file of images or statistics"
    assert all(text.startswith(expected) and "\n" not in text for text in refusals)


def test_another_size_than_the_reference_is_refused_in_one_line() -> None:
    check_same_size((32, 32), (32, 32), name="reference.npz")
    right = r"reference\.npz: images of 64 x 48 pixels, the generated ones are 32 x 32; they must be equal"
    with pytest.raises(ConfigError, match=right):
        check_same_size((32, 32), (64, 48), name="reference.npz")


@pytest.mark.slow
@pytest.mark.skipif(ADM is None, reason="needs ADM's batches (9 GiB): ADM_BATCHES=FOLDER and Inception's weights there")
def test_the_figures_of_the_readme_of_adm() -> None:
    """IS 215.84, FID 3.9426, sFID 6.1404, precision 0.8265, recall 0.5309. ADM's distances are float16."""
    folder = Path(ADM or "")
    reference, samples = folder / "VIRTUAL_imagenet256_labeled.npz", folder / "admnet_guided_upsampled_imagenet256.npz"
    weights = folder / inception.FILE_NAME
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_inception(weights if weights.exists() else None).to(device)

    logits = []
    pool = FeatureStatistics(inception.NUM_POOL_FEATURES)
    spatial = FeatureStatistics(inception.NUM_SPATIAL_FEATURES)
    pools: dict[Path, list[Tensor]] = {reference: [], samples: []}
    for path, kept in pools.items():
        for images in read_images(path, batch_size=64):
            features = model(images.to(device))
            kept.append(features.pool.cpu())
            if path == samples:
                pool.update(features.pool)
                spatial.update(features.spatial)
                logits.append(features.logits)

    real_pool, real_spatial = read_statistics(reference, extractor="Inception-2015")
    assert real_pool is not None
    assert real_spatial is not None
    assert inception_score(torch.cat(logits)) == pytest.approx(215.84, abs=0.05)
    assert frechet_distance(pool.gaussian(), real_pool) == pytest.approx(3.9426, abs=0.005)
    assert frechet_distance(spatial.gaussian(), real_spatial) == pytest.approx(6.1404, abs=0.01)
    found, _ = compare_with_halves(torch.cat(pools[samples]), torch.cat(pools[reference]))
    assert found.precision == pytest.approx(0.8265, abs=0.002)
    assert found.recall == pytest.approx(0.5309, abs=0.002)
