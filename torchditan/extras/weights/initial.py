# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Initial weights of a new run: from a checkpoint, an exported file or a published model."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from torchditan.checkpoint.weights import HOW_TO_IMPORT, Weights
from torchditan.config.loader import to_dict
from torchditan.config.options import Config
from torchditan.config.trajectory import differences
from torchditan.distributed.process_group import from_rank_0, raise_on_all_ranks
from torchditan.errors import ConfigError, option_error
from torchditan.extras.published.lora import start_from
from torchditan.extras.published.lora_file import is_lora
from torchditan.extras.weights.opening import open_weights
from torchditan.extras.weights.shared import is_shared
from torchditan.models.saved_weights import OPTIONAL, saved_weights

_OF_PREDICTION = ("objective", "prediction", "noise_schedule")


def load_initial_weights(model: nn.Module, path: str, *, config: Config) -> str:
    """Load weights at any address into a model of any sharding, in place; every rank calls it.

    Args:
        model: its parameters have memory; their values do not matter.
        path: `checkpoint.initial_load_path`.
        config: of this run, to report options that differ from those of the weights.

    Returns:
        A description for the log: `weights of outputs/x, step 100 (ema)`.

    Raises:
        ConfigError: there are no weights, or they do not match this model.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with _on_all_ranks(path):
        opened = open_weights(path) if is_first else None
    weights: Weights = from_rank_0(opened)
    if is_shared(path) and not weights.path.exists():  # downloaded by rank 0 on another machine
        weights = open_weights(path)
    differing = (
        [] if weights.config is None else differences(_model_options(weights.config), _model_options(to_dict(config)))
    )
    with _on_all_ranks(path):  # a rank may be the only one that reads a damaged tensor
        if config.lora.rank:
            notes = start_from(model, weights, config)
        else:
            notes = _fill_all(model, weights, config, differing)
    step = "" if weights.step is None else f", step {weights.step} ({weights.kind})"
    return "; ".join([f"weights of {path}{step}", *notes, *differing])


@contextmanager
def _on_all_ranks(path: str) -> Iterator[None]:
    """Raise the error of any rank on all ranks, with the name of the option."""
    mistake = None
    try:
        yield
    except ConfigError as error:
        right = str(error).removeprefix(f"{Path(path)} ")
        mistake = option_error("checkpoint.initial_load_path", path, right)
    if dist.is_initialized():
        raise_on_all_ranks(mistake)
    elif mistake is not None:
        raise mistake


def identity_of(path: str) -> str | None:
    """What identifies the LoRA at this path by its matrices, whatever their names; None for other weights."""
    try:
        weights = None if is_shared(path) else open_weights(path)
        if weights is None or not is_lora(weights.shapes):
            return None
        tensors = [weights.tensor(name) for name in weights.shapes]
    except ConfigError:  # a run that continues does not need it any more
        return None
    hashes = sorted(sha256(tensor.float().numpy().tobytes()).hexdigest() for tensor in tensors if tensor.ndim > 1)
    return f"lora-{sha256(' '.join(hashes).encode()).hexdigest()[:16]}"


def _fill_all(model: nn.Module, weights: Weights, config: Config, differing: list[str]) -> list[str]:
    """Load all weights of a model. Returns what to say about new ones."""
    if is_lora(weights.shapes):
        raise ConfigError(f"{weights.path} is a LoRA, and this run trains all weights; train a LoRA with --lora.rank")
    _check_convention(weights, config)
    weights.check(model, are_initial=True, differing_options=differing)
    weights.fill(model)
    missing = [name for name in saved_weights(model).keys() - weights.shapes.keys() if name.startswith(OPTIONAL)]
    new = sorted({".".join(name.split(".")[:2]) for name in missing})
    return [f"new {', '.join(new)}"] if new else []


def _check_convention(weights: Weights, config: Config) -> None:
    """Refuse weights whose time or prediction is unknown or another one: names and shapes do not show it.

    Raises:
        ConfigError: neither a configuration nor the user states them, or the embedding of t has another scale.
    """
    if weights.config is None:
        if config.checkpoint.initial_load_convention is None:
            raise ConfigError(
                f"{weights.path} has no TorchDiTan configuration, so its time and its prediction are unknown; give "
                "published weights as --model.path, or add --checkpoint.initial_load_convention torchditan if t = 0 is "
                "noise and t = 1 is data (times 1000 in its embedding) and it predicts the velocity data - noise. "
                "Others differ: SiT and LightningDiT (unscaled time), REPA (t = 1 is noise), DiT and other DDPMs "
                f"(predict noise); {HOW_TO_IMPORT}"
            )
        return
    here = config.model.timestep_scale
    there = weights.config.get("model", {}).get("timestep_scale", here)
    if there != here:
        right = f"set --model.timestep_scale={there:g}"
        if here == 1:
            path = shlex.quote(str(weights.path))
            right = f"refit them first: torchditan refit_time {path} FILE.safetensors"
        raise ConfigError(f"{weights.path} has model.timestep_scale {there:g}, and this run {here:g}; {right}")


def _model_options(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    diffusion = config.get("diffusion", {})
    return {
        "model": config.get("model"),
        "dataset": {"num_classes": config.get("dataset", {}).get("num_classes")},
        "diffusion": {name: diffusion[name] for name in _OF_PREDICTION if name in diffusion},
    }
