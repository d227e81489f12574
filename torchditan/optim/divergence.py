# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Divergence guard: a NaN or a loss spike never changes a weight. It stops the run or rolls it back to a checkpoint.

Notable:
- the device decides, from numbers that are equal on all ranks: the global gradient norm and, to detect spikes, the
  mean loss. The fused optimizer then skips the update. For other optimizers (AdamW8bit) the host reads the decision
  first, which makes it wait for the device in every step;
- with a fused optimizer the host reads the decision of a step after it has enqueued the next one, so that the device
  never idles. Before weights are saved or sampled from, the host waits for it;
- an Apple GPU has one queue, so the host reads the decision of each step at once.
"""

from __future__ import annotations

from typing import Any

import torch

from torchditan.distributed.precision import float64_device

_WINDOW = 100
"""Number of steps that the running mean of the loss covers."""
_SPIKE = 3.0
"""Multiple of the running mean above which a loss is a spike."""
_MIN_STEPS = 20
"""Number of steps in the mean before a loss can count as a spike."""


class DivergenceError(RuntimeError):
    """A gradient was not finite, or the loss spiked. The weights are unchanged.

    Args:
        step: the step that diverged.
        what: the reason, in a few words.
    """

    def __init__(self, step: int, what: str) -> None:
        self.step = step
        self.what = what
        super().__init__(
            f"step {step}: {what}; its update was skipped and changed no weight. A lower optimizer.lr, more "
            "lr_scheduler.warmup_steps or training.mixed_precision_param float32 may help"
        )


class LossSpikes:
    """Detects spikes: a loss above 3 times its running mean, after enough steps.

    The mean is the average of the first steps, then an exponential average over about 100 steps. Spikes do not enter
    it. All values stay on the device.
    """

    def __init__(self, device: torch.device) -> None:
        device = float64_device(device)
        self._mean = torch.zeros((), dtype=torch.float64, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: torch.Tensor) -> torch.Tensor:
        """Whether the loss () of a step, averaged over all ranks, is a spike: bool (). If not, it enters the mean."""
        loss = loss.to(self._mean.device).double()
        spikes = (self._steps >= _MIN_STEPS) & (loss > _SPIKE * self._mean)
        is_usual = ~spikes & loss.isfinite()
        steps = self._steps + is_usual
        mean = self._mean + (loss - self._mean) / steps.clamp(1, _WINDOW)
        self._mean = torch.where(is_usual, mean, self._mean)
        self._steps = steps
        return spikes

    def state_dict(self) -> dict[str, Any]:
        return {"mean_loss": self._mean.item(), "mean_loss_steps": int(self._steps.item())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._mean.fill_(state_dict["mean_loss"])
        self._steps.fill_(state_dict["mean_loss_steps"])


class DivergenceGuard:
    """Skips updates that diverge. With a fused optimizer the host does not wait for the device."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.is_fused = bool(optimizer.defaults.get("fused"))
        self._pending: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None

    def step(
        self,
        step: int,
        grad_norm: torch.Tensor,
        is_spike: torch.Tensor | None = None,
        is_overflow: torch.Tensor | None = None,
    ) -> None:
        """Update the weights, unless the gradient norm () of this step is not finite or `is_spike` () is true.

        If `is_overflow` () is true, the update is skipped without an error.

        Raises:
            DivergenceError: an earlier step diverged (on a CPU or an Apple GPU, this step).
        """
        not_finite = (~torch.isfinite(grad_norm)).float()
        verdict = not_finite if is_spike is None else torch.stack([not_finite, is_spike.to(not_finite)])  # () or (2,)
        found_inf = verdict.max()
        if is_overflow is not None:
            verdict = verdict * ~is_overflow
        if self.is_fused and grad_norm.device.type != "mps":  # torch's fused kernels for MPS ignore found_inf
            setattr(self.optimizer, "found_inf", found_inf)  # noqa: B010  the fused kernels read it; it is not declared
            self.optimizer.step()
        elif not found_inf.item():  # the host waits for the device once per step
            self.optimizer.step()
        previous, self._pending = self._pending, self._copy_to_host(step, verdict)
        if self._pending[2] is None:
            previous = self._pending
        self._raise_if_set(previous)

    def wait(self) -> None:
        """Check the last step before its weights are saved or sampled from."""
        self._raise_if_set(self._pending)

    def forget(self) -> None:
        """Drop the pending check of a step that a rollback discards."""
        self._pending = None

    def _copy_to_host(self, step: int, verdict: torch.Tensor) -> tuple[int, torch.Tensor, torch.cuda.Event | None]:
        if verdict.device.type != "cuda":
            return step, verdict, None
        host = torch.empty_like(verdict, device="cpu", pin_memory=True).copy_(verdict, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return step, host, event

    def _raise_if_set(self, pending: tuple[int, torch.Tensor, torch.cuda.Event | None] | None) -> None:
        if pending is None:
            return
        step, verdict, event = pending
        if event is not None:
            event.synchronize()
        if verdict.any():
            is_spike = verdict.dim() == 1 and not verdict[0]
            raise DivergenceError(step, "the loss jumped" if is_spike else "the gradient is not finite")
