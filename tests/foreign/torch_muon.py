# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""torch's tests of `torch.optim.Muon` on `torchditan.optim.muon.Muon`.

    python tests/foreign/torch_muon.py --source PYTORCH_CHECKOUT

The suite is newer than torch 2.13: it imports coefficients of the Gram iteration, which that torch does not have.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import foreign_suite
import torch.optim._muon

from torchditan.optim.muon import Muon

GRAM = "the Gram form of the Newton-Schulz iteration, which we do not have"
SKIPPED = {
    "TestMuonGramNS::*": GRAM,
    "TestMuonGramConfig::*": GRAM,
    "TestMuonConvergence::test_gram_*": GRAM,
    "TestMuonCudaGraph::*": GRAM,
}


class OurMuon(Muon):
    """Ours with the names and defaults of theirs."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        use_gram_newton_schulz: bool = False,
    ) -> None:
        assert not use_gram_newton_schulz
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            adjust_lr_fn="original",
        )


def replace(module: ModuleType) -> None:
    module.Muon = OurMuon  # type: ignore[attr-defined]


if __name__ == "__main__":
    if not hasattr(torch.optim._muon, "DEFAULT_GRAM_NS_COEFFICIENTS"):
        torch.optim._muon.DEFAULT_GRAM_NS_COEFFICIENTS = ()  # type: ignore[attr-defined]
    sys.exit(foreign_suite.main(__doc__ or "", tests=["test/optim/test_muon.py"], replace=replace, skipped=SKIPPED))
