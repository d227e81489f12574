# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Dynamic loss scaling for float16, whose gradients underflow below 6e-8 (Micikevicius et al. 2017, arXiv 1710.03740).

The loss is multiplied before the backward pass and the gradients are divided after it. A gradient that overflows skips
its step and halves the scale. Enough steps without overflow double it. All values stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchditan.optim.ema import local_tensor

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps without overflow before the scale doubles."""
SMALLEST_SCALE = 1.0
"""At this scale, an overflow is not due to float16."""


class LossScaler:
    """The loss scale. It is the same on all ranks because the gradient norm is."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(INITIAL_SCALE, device=device)
        self._good_steps = torch.zeros((), device=device)
        self.num_skipped = torch.zeros((), device=device)
        """Number of steps skipped by overflow since the start or the resume of the run."""

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1 / self.scale)

    def judge(self, grad_norm: torch.Tensor) -> torch.Tensor:
        """Update the scale from the norm () of the unscaled gradients. Returns bool (): float16 caused an overflow."""
        is_finite = torch.isfinite(grad_norm)
        is_overflow = ~is_finite & (self.scale > SMALLEST_SCALE)
        self._good_steps = torch.where(is_finite, self._good_steps + 1, 0.0)
        grows = self._good_steps >= GROWTH_INTERVAL
        self._good_steps = torch.where(grows, 0.0, self._good_steps)
        factor = torch.where(is_finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.scale = (self.scale * factor).clamp_min(SMALLEST_SCALE)
        self.num_skipped = self.num_skipped + is_overflow
        return is_overflow

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.scale.item(), "loss_scale_steps": int(self._good_steps.item())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale.fill_(state_dict["loss_scale"])
        self._good_steps.fill_(state_dict["loss_scale_steps"])
