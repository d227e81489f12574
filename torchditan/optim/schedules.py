# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The learning rate as a function of the step, without state: a resume has nothing to restore."""

from __future__ import annotations

import math
from typing import Any

from torchditan.config.options import LRScheduler
from torchditan.registry import SCHEDULES, build, resolve


class Schedule:
    """What follows the linear warmup. Options after its name are further parameters of the constructor.

    Args:
        config: the `[lr_scheduler]` options.
    """

    def __init__(self, config: LRScheduler) -> None:
        self.config = config

    def factor(self, step: int, *, steps: int) -> float:
        """Learning rate as a fraction between `min_lr_factor` (0) and the peak (1).

        Args:
            step: counted from 1, after the warmup.
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


def learning_rate(step: int, *, steps: int, peak: float, config: LRScheduler) -> float:
    """Learning rate of a step.

    Args:
        step: 1 for the first optimizer step.
        steps: steps of the whole run.
        peak: learning rate after warmup.
        config: linear warmup over `warmup_steps`, then the schedule.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    kind: Any
    kind, options = resolve(SCHEDULES, "lr_scheduler.schedule", config.schedule)
    schedule: Schedule = build(kind, "lr_scheduler.schedule", config.schedule, config, **options)
    factor = schedule.factor(step, steps=steps)
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * factor)
