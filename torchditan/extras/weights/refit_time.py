# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Refit the embedding of t to a scale of 1, for objectives that differentiate it (diffusion/mean_flow.py).

Notable:
- with `model.timestep_scale` 1000 the embedding changes so fast that du/dt is many times u. At scale 1 it is smooth;
- both embedders are functions of one variable. The new one gets hidden units that switch on one after the other between
  t = 0 and t = 1, and its last layer is the ridge regression of the old outputs, in closed form;
- the parts of the old embedding that oscillate faster than the hidden units cannot be fitted. The caller reports how
  much that changes the loss.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from torchditan.checkpoint.weights import Kind, save_weights
from torchditan.diffusion.objectives import validation_objective
from torchditan.distributed.process_group import Rank, init_process_group
from torchditan.errors import ConfigError, option_error
from torchditan.extras.weights.opening import open_model
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.job.prepare import Job, prepare
from torchditan.models.dit import TIMESTEP_FREQUENCIES, DiT, TimestepEmbedder, timestep_embedding
from torchditan.sampling.validation import validation_losses

_NUM_TIMES = 4001
_NUM_FREQUENCIES = 16
_RIDGE = 1e-5


@dataclass(frozen=True)
class Refit:
    """What changed."""

    scale: float
    """The old one."""
    relative_error: float
    """Root mean square of the change of the embedding, divided by that of the embedding's variation over t."""
    loss_before: float | None
    """Validation loss of the run, or None without its data."""
    loss_after: float | None


def refit_time(
    source: Path,
    out: Path,
    *,
    step: int | None = None,
    kind: Kind | None = None,
    with_data: bool = True,
) -> Refit:
    """Write the weights of a run to one file, with an embedding of t of scale 1 in place of its own.

    Args:
        source: an address of `open_weights`.
        out: the file (.safetensors); an existing one is replaced.
        step: of a run's checkpoint; None takes the newest.
        kind: averaged or raw; None takes the averaged ones if the run kept them.
        with_data: measure the validation loss before and after, on the run's data.

    Raises:
        ConfigError: the model is not a DiT of another scale, or its weights or data cannot be read.
    """
    weights = open_model(source, step=step, kind=kind)
    trained = TrainedModel.open(source, step=weights.step, weights=kind, device="cpu")
    model = trained.model
    if not isinstance(model, DiT):
        raise option_error("RUN", str(source), f"is a {trained.config.model.name}; must be a DiT of this project")
    scale = trained.config.model.timestep_scale
    if scale == 1:
        raise option_error("RUN", str(source), "has model.timestep_scale 1 already; nothing to refit")
    job = open_data(trained) if with_data else None
    loss_before = None if job is None else validation_loss(trained, job)
    model.t_embedder, relative_error = fit_embedder(model.t_embedder)
    loss_after = None if job is None else validation_loss(trained, job)
    assert weights.config is not None
    options = {**weights.config, "model": {**weights.config["model"], "timestep_scale": 1.0}}
    refitted = dataclasses.replace(weights, config=options, tensor=model.state_dict().__getitem__)
    save_weights(out, refitted, dtype=torch.float32)
    return Refit(scale, relative_error, loss_before, loss_after)


@torch.no_grad()
def fit_embedder(old: TimestepEmbedder) -> tuple[TimestepEmbedder, float]:
    """An embedder of scale 1 whose outputs for t in [0, 1] are close to those of `old`, and the relative error.

    Hidden unit i is silu(w (z(t) - z(t_i))), where z(t) is the mean of sin(f t) / f over the highest frequencies, close
    to t. A mean over 16 of them keeps its precision in bfloat16.
    """
    t = torch.linspace(0, 1, _NUM_TIMES, dtype=torch.float64)
    target = old.double()(t)  # (T, D)
    old.float()
    new = copy.deepcopy(old)
    new.scale = 1.0
    layer: Any = old.mlp[0]
    hidden, half = layer.out_features, TIMESTEP_FREQUENCIES // 2
    exponent = torch.arange(_NUM_FREQUENCIES, dtype=torch.float64) / (half - (old.frequencies == "diffusers"))
    frequency = torch.exp(-math.log(10000.0) * exponent)

    def position(t: torch.Tensor) -> torch.Tensor:
        return (torch.outer(t, frequency).sin() / frequency).mean(1)

    slope = float(hidden)
    first = torch.zeros(hidden, TIMESTEP_FREQUENCIES, dtype=torch.float64)
    first[:, half : half + _NUM_FREQUENCIES] = slope / (_NUM_FREQUENCIES * frequency)
    starts = torch.linspace(-0.05, 1, hidden, dtype=torch.float64)
    bias = -slope * position(starts)
    features = timestep_embedding(t, scale=1.0, frequencies=old.frequencies)
    units = F.pad(F.silu(features @ first.T + bias), (0, 1), value=1.0)  # (T, hidden + 1)
    gram = units.T @ units
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(hidden + 1, dtype=torch.float64)
    last = torch.linalg.solve(gram, units.T @ target)  # (hidden + 1, D)
    weights = (first, bias, last[:-1].T, last[-1])
    for parameter, value in zip(new.parameters(), weights, strict=True):
        parameter.copy_(value)
    error = (new(t.float()).double() - target).square().mean().sqrt()
    variation = (target - target.mean(0)).square().mean().sqrt()
    return new, float(error / variation)


def open_data(trained: TrainedModel) -> Job:
    """The run's data. Raises ConfigError: it has no held-out images."""
    options = {"validation.freq": 1, "metrics.enable_sampling": False, "training.compile": False}
    job = prepare(trained.config.replace(options))
    if job is None or job.validation_dataset is None:
        raise ConfigError(f"the data of {trained.config.metrics.experiment_name} has no held-out images")
    return job


def validation_loss(trained: TrainedModel, job: Job) -> float:
    """The validation loss of a model on the held-out images of its run, in float32 on the CPU."""
    assert job.validation_dataset is not None
    init_process_group(Rank(0, 0, 1), timeout_seconds=600)
    try:
        losses = validation_losses(
            trained.model,
            objective=validation_objective(trained.config.diffusion, job.spec),
            uniform=None,
            dataset=job.validation_dataset,
            space=job.space,
            num_images=trained.config.validation.num_images,
            batch_size=64,
            corrupt_images=trained.config.dataset.corrupt_images,
            device=trained.device,
        )
    finally:
        torch.distributed.destroy_process_group()
    return losses["validation_loss"]
