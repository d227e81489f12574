# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The learning rate as a function of the step, without state: a resume has nothing to restore."""

from __future__ import annotations

import math
from typing import ClassVar

from torchditan.config.options import LRScheduler
from torchditan.errors import option_error
from torchditan.registry import SCHEDULES, create


class Schedule:
    """Linear warmup, then `factor`. Options after its name are further parameters of the constructor.

    Args:
        config: the `[lr_scheduler]` options.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("factor",)

    def __init__(self, config: LRScheduler) -> None:
        self.config = config

    def rate(self, step: int, *, steps: int, peak: float = 1.0) -> float:
        """Learning rate of a step, counted from 1, for a peak after the warmup."""
        warmup, least = self.config.warmup_steps, self.config.min_lr_factor
        if step <= warmup:
            return peak * step / warmup
        factor = self.factor(step, steps=steps)
        if not isinstance(factor, (int, float)) or not 0 <= factor <= 1:
            right = f"its factor at step {step} is {factor}; must be a number between 0 and 1"
            raise option_error("lr_scheduler.schedule", self.config.schedule, right)
        return peak * (least + (1 - least) * factor)

    def factor(self, step: int, *, steps: int) -> float:
        """Learning rate as a fraction between `min_lr_factor` (0) and the peak (1).

        Args:
            step: of the run, counted from 1. It is only asked for after the warmup.
            steps: `training.steps`.
        """
        raise NotImplementedError

    def progress(self, step: int, *, steps: int, start: int | None = None) -> float:
        """Progress of a decay that starts after step `start`, by default after the warmup: from 0 to 1.

        It reaches 1 one step after the run, because a last step with rate 0 learns nothing.
        """
        start = self.config.warmup_steps if start is None else start
        return min(1.0, max(0, step - start) / max(1, steps + 1 - start))


class Constant(Schedule):
    def factor(self, step: int, *, steps: int) -> float:
        return 1.0


class Cosine(Schedule):
    def factor(self, step: int, *, steps: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * self.progress(step, steps=steps)))


class Linear(Schedule):
    def factor(self, step: int, *, steps: int) -> float:
        return 1 - self.progress(step, steps=steps)


class WarmupStableDecay(Schedule):
    """Constant, then a linear decay over the last `decay_ratio` of all steps (Hu et al. 2024, arXiv 2404.06395)."""

    def factor(self, step: int, *, steps: int) -> float:
        start = max(self.config.warmup_steps, round(steps * (1 - self.config.decay_ratio)))
        return 1 - self.progress(step, steps=steps, start=start)


def build_schedule(config: LRScheduler) -> Schedule:
    """The schedule of `lr_scheduler.schedule`, with the options after its name."""
    schedule: Schedule = create(SCHEDULES, "lr_scheduler.schedule", config.schedule, config)
    return schedule
