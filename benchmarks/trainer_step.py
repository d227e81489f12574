# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The trainer's own step, for benchmarks: `step = trainer_step(build_trainer(config))`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from torchditan.config.options import Config
from torchditan.job.prepare import prepare
from torchditan.trainer import Trainer, attention_backend


@dataclass(frozen=True)
class Step:
    """One step of a model, to be repeated."""

    run: Callable[[], None]
    num_parameters: int
    settings: Callable[[], AbstractContextManager[None]] = nullcontext
    """The settings of the process that the step needs. A case that takes turns with it may need others."""
    close: Callable[[], None] = lambda: None


def build_trainer(config: Config) -> Trainer:
    """The trainer of a job before its first step. It joins the process group of this process, or opens one."""
    job = prepare(config)
    assert job is not None
    joining = mock.patch("torchditan.trainer.init_process_group") if dist.is_initialized() else nullcontext()
    with joining:
        return Trainer(job)


def trainer_step(trainer: Trainer) -> Step:
    """Loading, training, logging and agreeing whether to stop: the whole iteration of `Trainer.train`."""
    batches = trainer.open_stream()
    trainer.supervision.start_step = 0
    trainer.logger.timer.restart()

    def run() -> None:
        result = trainer.train_step(batches)
        trainer.tasks.run_periodic_tasks(result, is_first=trainer.progress.step == 1)
        trainer.stop_point.stop_if_asked()

    @contextmanager
    def settings() -> Iterator[None]:
        torch.set_float32_matmul_precision(trainer.config.training.float32_matmul_precision)
        try:
            with attention_backend(trainer.job):
                yield
        finally:
            torch.set_float32_matmul_precision("highest")

    return Step(run, num_parameters(trainer.model), settings, trainer.resources.close)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def fill_with_normal(model: nn.Module) -> None:
    """Set all weights to N(0, 0.02), and norms to 1 plus that, drawn on the device.

    adaLN-zero's initial weights would make most of the first gradients zero, and GPUs multiply zeros faster.
    """
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        local.normal_(mean=1.0 if is_norm else 0.0, std=0.02)
