# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Inception-2015 against torch-fidelity's module with the same random weights, and its checked file of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from references import run_reference

from torchditan.errors import ConfigError
from torchditan.extras.evaluation.inception import FILE_NAME, Inception2015, load_inception, resize_tensorflow_1

TORCH_FIDELITY = """
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

weights, batches = given
torch.save(weights, sys.argv[2])
model = FeatureExtractorInceptionV3(
    "inception", ["2048", "logits_unbiased"], feature_extractor_weights_path=sys.argv[2]
)
spatial = []  # torch-fidelity gives no feature for sFID
model.Mixed_6d.branch1x1.register_forward_hook(lambda module, inputs, output: spatial.append(output[:, :7].clone()))
result = []
with torch.no_grad():
    for images in batches:
        pool, logits = model(images)
        result.append((pool, spatial.pop().permute(0, 2, 3, 1).reshape(len(images), -1), logits))
"""


def random_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights under which activations neither vanish nor explode, so that every layer is seen in the features."""
    torch.manual_seed(seed)
    weights = {}
    for name, tensor in Inception2015().state_dict().items():
        if name.endswith("conv.weight"):
            weights[name] = torch.randn_like(tensor) * (2 / tensor[0].numel()) ** 0.5
        elif name.endswith(("bn.weight", "running_var")):
            weights[name] = torch.rand_like(tensor) + 0.5
        elif tensor.is_floating_point():
            weights[name] = torch.randn_like(tensor) * 0.1
        else:
            weights[name] = tensor
    return weights


def random_images() -> list[torch.Tensor]:
    """Smaller, larger and not square; noise shows every error of the resize."""
    torch.manual_seed(1)
    sizes = [(2, 3, 32, 32), (1, 3, 40, 333), (1, 3, 299, 299)]
    return [torch.randint(0, 256, size, dtype=torch.uint8) for size in sizes]


@pytest.mark.slow
def test_features_equal_those_of_torch_fidelity_with_the_same_weights(tmp_path: Path) -> None:
    given = (random_weights(), random_images())
    features = run_reference("torch_fidelity", TORCH_FIDELITY, given, folder=tmp_path)
    model = Inception2015()
    model.load_state_dict(random_weights())
    for images, expected in zip(random_images(), features, strict=True):
        for ours, theirs in zip(model(images), expected, strict=True):
            assert ours.shape == theirs.shape
            assert theirs.abs().mean() > 0.01, "the weights must let activations through"
            scale = max(theirs.abs().max().item(), 1.0)
            torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-5, rtol=0)


def test_shapes_are_those_of_the_published_metrics() -> None:
    features = Inception2015()(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert [tuple(part.shape) for part in features] == [(2, 2048), (2, 2023), (2, 1008)]
    assert all(part.dtype == torch.float32 for part in features)
    assert features.spatial.min() >= 0


def test_the_number_of_parameters_is_that_of_the_published_file() -> None:
    """95.6 MB: 23,901,408 float32 values with the statistics of the batch norms, and names and shapes around them."""
    values = sum(value.numel() for value in Inception2015().state_dict().values() if value.is_floating_point())
    assert 95_628_359 * 0.99 < values * 4 < 95_628_359


def test_spatial_features_are_in_the_order_of_adm() -> None:
    """ADM flattens (17, 17, 7): the value of channel c at row r, column k is at (17 r + k) 7 + c."""
    model = Inception2015()
    seen: list[torch.Tensor] = []
    model.Mixed_6d.branch1x1.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
    images = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    spatial = model(images).spatial
    for row, column, channel in ((0, 0, 6), (3, 5, 2), (16, 16, 0)):
        assert spatial[0, (17 * row + column) * 7 + channel] == seen[0][0, channel, row, column]


def test_the_resize_is_that_of_tensorflow_1() -> None:
    """By its definition: output i reads position i * input / output, without half-pixel centres."""
    torch.manual_seed(0)
    image = torch.rand(1, 1, 5, 7)
    resized = resize_tensorflow_1(image, 9)
    for i in range(9):
        for j in range(9):
            y, x = i * 5 / 9, j * 7 / 9
            top, left = int(y), int(x)
            bottom, right = min(top + 1, 4), min(left + 1, 6)
            dy, dx = y - top, x - left
            value = (1 - dy) * ((1 - dx) * image[0, 0, top, left] + dx * image[0, 0, top, right]) + dy * (
                (1 - dx) * image[0, 0, bottom, left] + dx * image[0, 0, bottom, right]
            )
            assert resized[0, 0, i, j] == pytest.approx(value.item(), abs=1e-6)


def test_features_stay_float32_whatever_the_job_set() -> None:
    model = Inception2015()
    images = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    expected = model(images)
    seen: list[str] = []
    model.Mixed_7c.register_forward_hook(
        lambda module, inputs, output: seen.append(torch.backends.cuda.matmul.fp32_precision)
    )
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = model(images)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == ["ieee"]
    assert all(torch.equal(a, b) for a, b in zip(features, expected, strict=True))


def test_another_file_is_refused_in_one_line(tmp_path: Path) -> None:
    torch.save(Inception2015().state_dict(), tmp_path / "mine.pth")
    with pytest.raises(
        ConfigError, match=f"mine.pth: not {FILE_NAME}: its SHA-256 is [0-9a-f]{{64}}, must be 6726825d"
    ):
        load_inception(tmp_path / "mine.pth")
    with pytest.raises(ConfigError, match=r"missing\.pth: cannot be read"):
        load_inception(tmp_path / "missing.pth")


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*arguments: object, **options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    with pytest.raises(ConfigError, match=r"download failed \(no route to host\); get the file and pass its path"):
        load_inception()
    assert not (tmp_path / "checkpoints" / FILE_NAME).exists()
