# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`DiTTransformer2DModel` of diffusers, alone or in a DiTPipeline, and the names that the export shares.

How it differs from the model of models/dit.py (read and measured in diffusers 0.42):
- its timestep frequencies are 10000^(-i / 127), not the paper's 10000^(-i / 128): `model.timestep_frequencies`;
- each block has its own embedders of timestep and label. Our model has one for all blocks, so all must be equal;
- queries, keys and values are apart, and the table of positions is not stored;
- the norm before the MLP adds `norm_eps` (default 1e-5) to the variance. Our model adds 1e-6.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchditan.checkpoint.weights import Weights
from torchditan.errors import ConfigError, option_error
from torchditan.extras.weights.formats.layout import LABEL_TABLE, converted, num_blocks, read_sizes
from torchditan.models.dit import NORM_EPS, sincos_position_table

CLASS_NAME = "DiTTransformer2DModel"
REQUIRED = {
    "norm_type": "ada_norm_zero",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
}
"""Values in config.json of the architecture that our model computes; all are the defaults of the class."""
NOISE_SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
    "scaled_linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
}
"""`diffusion.noise_schedule` -> options of a scheduler."""
PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "x": "sample"}
"""`diffusion.prediction` -> `prediction_type` of a scheduler."""
SCHEDULER_FILE = "scheduler/scheduler_config.json"
EXPORT_FILE = "torchditan.json"
"""What our export adds to a folder: the number of classes, and which weights of which step it has."""

_CLASS_NAMES = (CLASS_NAME, "Transformer2DModel")  # the second is the name before diffusers 0.28
_MAX_ROWS = 512  # of patches; the file may be untrusted, and memory follows from this number
_LEVELS = {
    "num_train_timesteps": 1000,
    "trained_betas": None,
    "rescale_betas_zero_snr": False,
    "use_flow_sigmas": False,
}
"""Options of a scheduler that change the noise levels, each with the only value that our schedules have."""
SCHEDULER_LIKE_OURS = {"clip_sample": False, "thresholding": False, "steps_offset": 0, "set_alpha_to_one": True}
"""Options of a scheduler that change only samples, each with the value that our sampler has."""
_LEADING_BY_DEFAULT = ("DDIMScheduler", "DDPMScheduler", "PNDMScheduler")
"""Schedulers with leading spacing if their file is older than `timestep_spacing`; the others have linspace."""


def names_in_diffusers(depth: int) -> dict[str, list[str]]:
    """Name of each of our weights -> its names in diffusers, except for `pos_embed`, which is not stored there.

    Embedders have an equal copy in every block. `attn.qkv` is the concatenation of its three.
    """
    blocks = [f"transformer_blocks.{i}" for i in range(depth)]
    table = "class_embedder.embedding_table.weight"
    names = {LABEL_TABLE: [f"{block}.norm1.emb.{table}" for block in blocks]}
    layers = {
        "x_embedder.proj": ["pos_embed.proj"],
        "t_embedder.mlp.0": [f"{block}.norm1.emb.timestep_embedder.linear_1" for block in blocks],
        "t_embedder.mlp.2": [f"{block}.norm1.emb.timestep_embedder.linear_2" for block in blocks],
        "final_layer.adaLN_modulation.1": ["proj_out_1"],
        "final_layer.linear": ["proj_out_2"],
    }
    for i, block in enumerate(blocks):
        layers |= {
            f"blocks.{i}.attn.qkv": [f"{block}.attn1.to_{letter}" for letter in "qkv"],
            f"blocks.{i}.attn.proj": [f"{block}.attn1.to_out.0"],
            f"blocks.{i}.mlp.fc1": [f"{block}.ff.net.0.proj"],
            f"blocks.{i}.mlp.fc2": [f"{block}.ff.net.2"],
            f"blocks.{i}.adaLN_modulation.1": [f"{block}.norm1.linear"],
        }
    for ours, theirs in layers.items():
        names |= {f"{ours}.{kind}": [f"{name}.{kind}" for name in theirs] for kind in ("weight", "bias")}
    return names


def convert(source: Weights, *, noise_schedule: str | None = None, prediction: str | None = None) -> Weights:
    """Convert a `DiTTransformer2DModel`.

    The scheduler of a pipeline determines noise schedule and prediction; the user states those of a bare transformer.
    """
    content, folder = source.content, source.path
    if content.get("_class_name") not in _CLASS_NAMES:
        raise ConfigError(f"is not a folder of diffusers' {CLASS_NAME}: its class is {content.get('_class_name')}")
    for key, only in REQUIRED.items():
        if content.get(key, only) != only:
            raise ConfigError(f"has {key} = {content[key]!r} in config.json; a {CLASS_NAME} has {only!r}")
    tensors = _rename(source.tensors())
    sizes = read_sizes(tensors, num_heads=content.get("num_attention_heads", 16))
    side = content.get("sample_size", 32)
    rows = side // sizes.patch_size
    if not 1 <= rows <= _MAX_ROWS:
        raise ConfigError(f"has sample_size = {side} in config.json; must be at most {_MAX_ROWS} patches")
    tensors["pos_embed"] = sincos_position_table(sizes.width, rows, rows).unsqueeze(0)
    num_classes = _drop_unused_classes(tensors, sizes.num_classes, folder)
    convention, convention_notes = _convention(
        folder, {"diffusion.noise_schedule": noise_schedule, "diffusion.prediction": prediction}
    )
    autoencoder, autoencoder_notes = _autoencoder(folder)
    norm_eps = float(content.get("norm_eps", 1e-5))
    options = {
        "model.preset": "official",
        "model.learn_sigma": sizes.learns_sigma,
        "model.timestep_frequencies": "diffusers",
        "diffusion.objective": "ddpm",
        **convention,
        "sampling.sampler": "ddim",
        "sampling.guidance_scale": 4.0,
        **autoencoder,
    }
    notes = [
        "timestep frequencies of diffusers (model.timestep_frequencies diffusers)",
        f"{sizes.depth} equal copies of the embedders became one",
        "queries, keys and values joined",
        *([] if norm_eps == NORM_EPS else [f"norm3 adds {NORM_EPS:g} to the variance here, {norm_eps:g} in diffusers"]),
        *convention_notes,
        *autoencoder_notes,
    ]
    return converted(source, tensors, replace(sizes, num_classes=num_classes), (side, side), options, notes)


def _rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names.

    Raises:
        ConfigError: the embedders of two blocks differ, or a tensor is unknown.
    """
    ours = {}
    for name, theirs in names_in_diffusers(num_blocks(tensors, "transformer_blocks")).items():
        first, *copies = (tensors.pop(their) for their in theirs)
        if ".attn.qkv." in name:
            first = torch.cat([first, *copies])
        elif any(not torch.equal(copy, first) for copy in copies):
            right = "this model has one embedder for all blocks, so they must be equal"
            raise ConfigError(f"has different values in {theirs[0]} and the same weight of another block; {right}")
        ours[name] = first
    if tensors:
        raise ConfigError(f"has {next(iter(tensors))}, which a {CLASS_NAME} does not have")
    return ours


def _drop_unused_classes(ours: dict[str, Tensor], num_rows: int, folder: Path) -> int:
    """Number of classes. Our export states it, because the null class of every DiTPipeline is 1000.

    The rows between the last class and the null class are zeros.
    """
    num_classes, table = _read_json(folder / EXPORT_FILE).get("num_classes", num_rows), ours[LABEL_TABLE]
    if table[num_classes : num_rows if num_classes else None].any():
        return num_rows
    if num_classes:
        ours[LABEL_TABLE] = torch.cat([table[:num_classes], table[num_rows:]])
    else:
        del ours[LABEL_TABLE]
    return int(num_classes)


def _convention(folder: Path, stated: dict[str, str | None]) -> tuple[dict[str, Any], list[str]]:
    """Options for the noise schedule, the prediction and the spacing of a pipeline's scheduler, and notes.

    Raises:
        ConfigError: the scheduler has other noise levels than ours, or there is none and the user states nothing.
    """
    scheduler = _read_json(folder / SCHEDULER_FILE)
    if not scheduler:
        for option, value in stated.items():
            if value is None:
                right = f"must be given: the folder has no {SCHEDULER_FILE}, and weights do not show their prediction"
                raise option_error(f"--{option.removeprefix('diffusion.')}", None, right)
        return stated, []
    for key, only in _LEVELS.items():
        if scheduler.get(key, only) != only:
            raise ConfigError(f"has {key} = {scheduler[key]!r} in {SCHEDULER_FILE}; must be {only!r}")
    class_name = scheduler.get("_class_name")
    spacing = scheduler.get("timestep_spacing", "leading" if class_name in _LEADING_BY_DEFAULT else "linspace")
    schedule = next((name for name, keys in NOISE_SCHEDULES.items() if _has(scheduler, keys)), None)
    theirs = scheduler.get("prediction_type", "epsilon")
    prediction = next((ours for ours, type in PREDICTIONS.items() if type == theirs), None)
    if schedule is None or prediction is None:
        shown = ("beta_schedule", "beta_start", "beta_end", "prediction_type")
        described = ", ".join(f"{key} {scheduler[key]}" for key in shown if key in scheduler) or class_name
        known = "linear (0.0001 to 0.02), scaled_linear (0.00085 to 0.012) and squaredcos_cap_v2"
        raise ConfigError(f"has {described} in {SCHEDULER_FILE}; the schedules here are {known}")
    found = {"diffusion.noise_schedule": schedule, "diffusion.prediction": prediction}
    for option, value in stated.items():
        if value not in (None, found[option]):
            key = option.removeprefix("diffusion.")
            raise option_error(f"--{key}", value, f"{SCHEDULER_FILE} says {found[option]}; leave it out")
    notes = [] if class_name == "DDIMScheduler" else [f"samples with DDIM, not with {class_name}"]
    if spacing == "linspace" and not notes:
        notes.append("samples differ from those of DDIMScheduler, which steps to other levels than it evaluates")
    other = [
        f"{key} = {scheduler[key]}" for key, ours in SCHEDULER_LIKE_OURS.items() if scheduler.get(key, ours) != ours
    ]
    if other:
        notes.append(f"its scheduler also has {' and '.join(other)}, which our sampler does not do")
    return {**found, "sampling.spacing": spacing}, notes


def _has(scheduler: Mapping[str, Any], keys: Mapping[str, Any]) -> bool:
    """Whether a scheduler has these values. The defaults of diffusers' schedulers are those of `linear`."""
    return all(scheduler.get(key, NOISE_SCHEDULES["linear"].get(key)) == value for key, value in keys.items())


def _autoencoder(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Options for the autoencoder of a pipeline, and notes. As in DiTPipeline, `scaling_factor` alone normalises."""
    config = _read_json(folder / "vae/config.json")
    if not config:
        return {}, []
    scale = float(config.get("scaling_factor", 0.18215))
    options = {
        "autoencoder.name": "diffusers",
        "autoencoder.path": str((folder / "vae").absolute()),
        "autoencoder.shift": [0.0],
        "autoencoder.scale": [scale],
        "autoencoder.sample_posterior": True,
    }
    if config.get("_class_name") == "AutoencoderKL" and "block_out_channels" in config:  # the import need not open it
        options["autoencoder.downsampling"] = 2 ** (len(config["block_out_channels"]) - 1)
    return options, [f"decoded by its vae/, with scaling_factor {scale:g}"]


def _read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file; {} if there is none."""
    found: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return found
