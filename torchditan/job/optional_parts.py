# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The parts of a job that only some options need. train.py imports them and passes them to `prepare_job`.

The core (trainer, data_stream, diffusion, models, distributed, checkpoint) never imports them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from torchditan.config.options import Config
from torchditan.data_stream.datasets import CaptionSource, ImageDataset

PARTS = {
    "open_captions": "torchditan.finetune.captions.dataset:open_captions",
    "open_latents": "torchditan.latents.latent_space:build_sample_space",
    "tune_batch_size": "torchditan.ablation.autotune:resolve_batch_size",
    "load_initial_weights": "torchditan.weights.initial:load_initial_weights",
    "evaluate_samples": "torchditan.evaluation.during_training:TrainingEvaluation",
}
"""Argument of `prepare_job` -> `module:function`."""


def choose_parts(config: Config, dataset: ImageDataset) -> dict[str, Callable[..., Any]]:
    """Arguments of `prepare_job` for this job. Imports only the parts that the job needs."""
    is_wanted = {
        "open_captions": isinstance(dataset, CaptionSource),
        "open_latents": config.autoencoder.online or dataset.index is not None,
        "tune_batch_size": config.training.batch_size == "auto",
        "load_initial_weights": config.checkpoint.initial_load_path is not None,
        "evaluate_samples": config.evaluation.freq > 0,
    }
    return {name: pkgutil.resolve_name(place) for name, place in PARTS.items() if is_wanted[name]}
