# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""PRX's tests of its average of weights, on `torchditan.optim.ema.EMA`.

    python tests/foreign/prx_ema.py --source PRX_CHECKOUT

PRX trains with composer and other libraries that its average does not need: names imported from them stand for nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
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


class Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The modules of `ABSENT`, with an empty class for each name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = empty_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def compute_ema(model: nn.Module, averaged: Any, smoothing: float) -> None:
    """One update of their averaged model, by ours."""
    ema = EMA(model, decay=smoothing, warmup=False)
    ema.average = dict(averaged.model.named_parameters())
    ema.update(1)


def replace(module: ModuleType) -> None:
    module.compute_ema = compute_ema  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.meta_path.insert(0, Nothing())
    sys.exit(foreign_suite.main(__doc__ or "", tests=["tests/unit/test_ema.py"], replace=replace, skipped=SKIPPED))
