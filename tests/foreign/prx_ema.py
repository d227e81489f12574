# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""PRX's tests of its average of weights, on `torchditan.optim.ema.EMA`.

    python tests/foreign/prx_ema.py --source PRX_CHECKOUT

PRX trains with composer and other libraries that its average does not need: names imported from them stand for nothing.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import foreign_suite
from torch import nn

from torchditan.optim.ema import EMA

ABSENT = (
    "composer",
    "diffusers",
    "einops",
    "ftfy",
    "hydra",
    "lpips",
    "omegaconf",
    "torchmetrics",
    "torchvision",
    "transformers",
)
ALGORITHM = "an algorithm of composer: events, intervals and state of its trainer"
SKIPPED = {
    "TestEMAAlgorithm::*": ALGORITHM,
    "TestEMAIntegration::*": ALGORITHM,
    "TestEMAModel::*": "their wrapper of a copied model; ours keeps a dict of averages",
}


def compute_ema(model: nn.Module, averaged: Any, smoothing: float) -> None:
    """One update of their averaged model, by ours."""
    ema = EMA(model, decay=smoothing, warmup=False)
    ema.average = dict(averaged.model.named_parameters())
    ema.update(1)


def replace(module: ModuleType) -> None:
    module.compute_ema = compute_ema  # type: ignore[attr-defined]


if __name__ == "__main__":
    foreign_suite.stand_in_for(ABSENT)
    sys.exit(foreign_suite.main(__doc__ or "", tests=["tests/unit/test_ema.py"], replace=replace, skipped=SKIPPED))
