# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Progress of a training run: the integers that determine its data order, learning rate and randomness."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    """Optimizer steps done."""
    images_seen: int = 0
    """Samples in the batches of these steps, over all ranks."""
    elapsed_s: float = 0.0
    """Seconds spent training, including those before a resume."""
    position: int = 0
    """Position in the training stream: `images_seen` plus the windows that were skipped."""
    rollbacks: int = 0
    """How often the run returned to a checkpoint because it diverged."""

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)
