# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Fills in the part of a card that comes from a run directory and from this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchditan.config.loader import from_dict
from torchditan.config.options import Config, Sampling, Training
from torchditan.config.trajectory import VALUES_BEFORE, trajectory
from torchditan.evaluation.card import Data, ImageSet, Origin
from torchditan.models.spec import Unconditional
from torchditan.run import provenance
from torchditan.run.reading import read_config

if TYPE_CHECKING:
    from torchditan.diffusion.objectives import Objective
    from torchditan.evaluation.evaluator import Shown
    from torchditan.models.spec import ModelSpec

_NOT_EVALUATED = (
    *("images_per_class", "max_classes", "prompts", "at_start"),  # of sample grids
    "use_ema",  # of grids during training; a card has `weights`
    "embedded_guidance",  # of models of captions, which scripts/evaluate.py refuses
)


def origin_of_run(
    run: Path,
    config: Config,
    *,
    step: int,
    images_seen: int,
    weights: Literal["ema", "raw"],
    model_parameters: int,
    model_evaluations: int,
) -> Origin:
    """The part of a card that describes a checkpoint of a run.

    Args:
        run: the run directory.
        config: its options, with the `--sampling` and `--autoencoder` flags of this evaluation.
        model_evaluations: see `evaluations_per_sample`.

    Raises:
        ConfigError: `run` is not a run directory.
    """
    content = read_config(run)
    stored = from_dict(content["config"])
    path = config.autoencoder.path
    imported = content.get("imported")
    if not isinstance(imported, dict):
        imported = {}
    is_foreign, ema_width = "format" in imported, imported.get("ema_width")
    return Origin(
        run=str(run),
        run_id=content.get("run_id"),
        step=step,
        images_seen=images_seen,
        weights=weights,
        ema_decay=config.ema.decay if weights == "ema" and not is_foreign and ema_width is None else None,
        ema_width=ema_width,
        training_seed=None if is_foreign else config.training.seed,
        config_hash=_hash(content["config"]),
        trajectory_hash=trajectory_hash(stored),
        training_precision=None if is_foreign else _precision_text(stored.training),
        training_commit=content.get("git_commit"),
        training_versions={} if is_foreign else content.get("versions") or {},
        training_hardware=_hardware_text(content.get("hardware")),
        imported=imported if is_foreign else None,
        data=Data(
            name=config.dataset.dataset_name,
            fingerprint=config.dataset.fingerprint,
            image_size=config.dataset.image_size,
            num_classes=config.dataset.num_classes,
        ),
        model=" ".join([config.model.name, config.model.flavor, *config.model.overrides]),
        model_parameters=model_parameters,
        decoder=config.autoencoder.fingerprint,
        autoencoder_path=path if path != stored.autoencoder.path else None,
        sampling=sampling_settings(config.sampling),
        model_evaluations=model_evaluations,
    )


def image_set(source: Literal["train", "held_out"], shown: Shown | None, *, is_decoded: bool) -> ImageSet | None:
    """The entry of a card about the real images of a source; None if there were none."""
    if shown is None:
        return None
    return ImageSet(source=source, num_images=shown.num_images, content=shown.content, is_decoded=is_decoded)


def sampling_settings(sampling: Sampling) -> dict[str, Any]:
    """The `[sampling]` options that change the samples of an evaluation."""
    return {key: value for key, value in dataclasses.asdict(sampling).items() if key not in _NOT_EVALUATED}


def trajectory_hash(config: Config) -> str:
    """SHA-256 of the options that decide what a run learns, and of its steps, without the training seed.

    An option that was added later changes no hash of a run that behaves as runs did before.
    """
    options = {**trajectory(config), "training.steps": config.training.steps}
    absent = object()
    return _hash(
        {
            name: value
            for name, value in options.items()
            if name != "training.seed" and VALUES_BEFORE.get(name, absent) != value
        }
    )


def _hash(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _hardware_text(hardware: Any) -> str | None:
    if not isinstance(hardware, dict):
        return None  # an imported run does not have it
    return f"{hardware.get('device_count', 1)} x {hardware.get('device_name', hardware.get('device'))}"


def evaluations_per_sample(objective: Objective, spec: ModelSpec, sampling: Sampling) -> int:
    """Forward passes of the model for one sample. A step with guidance counts two, for it doubles the batch.

    If guidance applies to a part of the timesteps only, the sampler runs once without a model to count them.
    """
    passes = objective.num_evaluations(sampling)
    low, high = sorted(map(objective.model_time, sampling.guidance_interval))
    if isinstance(spec.conditioning, Unconditional) or sampling.guidance_scale == 1:
        return passes
    if (low, high) == (0, 1):
        return 2 * passes
    timesteps: list[float] = []

    def predict(x: torch.Tensor, t: float, **_: float) -> torch.Tensor:
        timesteps.append(t)
        return torch.cat([x, x], dim=1) if spec.learn_sigma else x

    noise = torch.zeros(1, *spec.sample_shape)
    objective.sample(predict, noise, sampling=sampling, step_noise=lambda step: noise)
    return len(timesteps) + sum(low <= t <= high for t in timesteps)


def _precision_text(training: Training) -> str:
    products = training.float32_matmul_precision
    return training.mixed_precision_param + ("" if products == "highest" else f", products {products}")


def precision_of(device: torch.device) -> str:
    """Of the model that draws: "float32", where convolutions on a GPU may be in TF32, and products in less."""
    is_tf32 = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    products = torch.get_float32_matmul_precision()
    text = "float32" if products == "highest" else f"float32, products {products}"
    return f"{text}, convolutions in TF32" if is_tf32 else text


def environment_of(device: torch.device) -> dict[str, Any]:
    """The entries of a `Card` about this code, process and machine: commit, versions, precision, device and time."""
    return {
        "precision": precision_of(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "commit": provenance.git_commit(),
        "versions": provenance.versions("torchditan", "torch", "numpy"),
        "device": device.type,
        "device_name": provenance.device_name(str(device)),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
