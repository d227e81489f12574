# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A metric without a network, for the evaluations during the runs of kills.py."""

from __future__ import annotations

from typing import Any

from torchditan.extras.evaluation.metric import MetricOfAllPictures


class Brightness(MetricOfAllPictures):
    """Means of the generated and of the training images."""

    def compute(self) -> dict[str, Any]:
        return {f"brightness_{source}": self.images(source).mean().item() for source in ("generated", "train")}
