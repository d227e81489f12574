# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metric `dinov2 path=PLACE`: FD-DINOv2 and the other figures over DINOv2, by weights that the user has.

Notable:
- Stein et al. 2023 (arXiv:2306.04675): the CLS token of DINOv2 ViT-L/14 after the last norm; whole images resized to
  224 x 224, bicubic, with ImageNet's mean and standard deviation;
- only ViT-L/14 without registers gives figures named `FD-DINOv2` and so on. Those of other sizes have their width:
  `FD-DINOv2-768`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchditan.extras.evaluation.extractors import Extractor, Features, full_float32
from torchditan.extras.evaluation.metric import Evaluation
from torchditan.extras.evaluation.quality import Quality
from torchditan.extras.evaluation.saved_networks import normalize, open_network, resize

IMAGE_SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet, for pixels in [0, 1]."""
CLASSES = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}
_PAPERS_WIDTH = 1024
"""Of ViT-L/14."""


class DINOv2Quality(Quality):
    """`FD-DINOv2` and the other figures over a DINOv2 of transformers.

    Args:
        path: its folder or hub name.
    """

    verdicts: ClassVar[Mapping[str, bool]] = {
        "FD-DINOv2": False,
        "KID-DINOv2": False,
        "recall-DINOv2": True,
        "coverage-DINOv2": True,
    }

    def __init__(self, evaluation: Evaluation, *, path: str) -> None:
        self.path = path
        super().__init__(evaluation)

    def open_extractor(self, evaluation: Evaluation) -> Extractor:
        device = torch.device(evaluation.device)
        model, sha256, _ = open_network("dinov2", self.path, classes=CLASSES, device=device)
        return Extractor(
            name=_name_of(model.config),
            sha256=sha256,
            num_features=model.config.hidden_size,
            network=lambda images: Features(cls_tokens(model, images)),
            device=device,
        )


def cls_tokens(model: Any, images: Tensor) -> Tensor:
    """Images (B, 3, H, W) uint8 -> the CLS token after the last norm, (B, D)."""
    with full_float32(images.device):
        features: Tensor = model(pixel_values=preprocess(images)).last_hidden_state[:, 0]
    return features


def preprocess(images: Tensor) -> Tensor:
    """(B, 3, H, W) uint8 -> (B, 3, 224, 224) float32."""
    return normalize(resize(images, (IMAGE_SIZE, IMAGE_SIZE)), mean=MEAN, std=STD)


def _name_of(config: Any) -> str:
    registers = "-registers" if config.model_type != "dinov2" else ""
    width = "" if config.hidden_size == _PAPERS_WIDTH else f"-{config.hidden_size}"
    return f"DINOv2{registers}{width}"
