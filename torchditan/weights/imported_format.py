# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Creates a run directory from a checkpoint of another project: DiT, SiT, REPA, LightningDiT, diffusers.

The run has a complete configuration, so it can be sampled and evaluated like one that was trained here. Its
continue.toml trains a new run from these weights.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchditan.autoencoders import open_autoencoder
from torchditan.autoencoders.catalogue import PUBLISHED
from torchditan.config.errors import ConfigError, option_error
from torchditan.config.loader import build_config, from_dict, override, to_dict
from torchditan.config.options import Autoencoder, Config
from torchditan.latents.latent_space import complete_from_autoencoder
from torchditan.registry import FORMATS, registered
from torchditan.weights.formats import Converted, Given
from torchditan.weights.formats.foreign_files import ForeignWeights, read_foreign_weights
from torchditan.weights.importing import create_run, refuse_existing, refuse_sources_inside
from torchditan.weights.opening import Kind, Weights

CONTINUE_FILE = "continue.toml"
_LABELS = "y_embedder.embedding_table.weight"
_PIXEL_CHANNELS = (1, 3)
_CROPPED = ("imagenet", "imagenet_hub", "folder")
_DEFAULT_AUTOENCODER = "sd-vae"
"""Of 4 channels. DiT, SiT and REPA sample the latents from its posterior."""


def import_format(
    path: Path,
    run: Path,
    *,
    format: str,
    kind: Kind | None = None,
    given: Given | None = None,
    num_classes: int | None = None,
    flags: Sequence[str] = (),
    overwrite: bool = False,
) -> tuple[Weights, list[str]]:
    """Create a run directory from weights of another project. The arguments are those of `open_foreign`, and:

    Args:
        run: the directory to create.
        overwrite: replace `run` if it was imported, too.

    Returns:
        The weights, and what was converted, one phrase each.

    Raises:
        ConfigError: as `open_foreign`, or `run` exists or cannot be written.
    """
    refuse_existing(run, overwrite=overwrite)
    weights, converted = open_foreign(
        path,
        name=run.resolve().name,
        format=format,
        kind=kind,
        given=given or Given(),
        num_classes=num_classes,
        flags=flags,
    )
    config = from_dict(weights.config or {})
    refuse_sources_inside(run, path, config)
    origin = {"format": format, "converted": converted}
    create_run(run, weights, config, origin=origin, files={CONTINUE_FILE: continue_toml(config, run)})
    return weights, [*converted, _describe_data(config)]


def open_foreign(
    path: Path,
    *,
    name: str,
    format: str,
    kind: Kind | None,
    given: Given,
    num_classes: int | None,
    flags: Sequence[str],
) -> tuple[Weights, tuple[str, ...]]:
    """Open weights of another project, with the configuration with which our model computes the same.

    Args:
        path: a file of weights, a training file, or a folder of diffusers.
        name: of the run in the configuration.
        format: a name in `registry.FORMATS`.
        kind: which set of a training file; None takes the averaged one.
        given: what the user states because the file does not contain it.
        num_classes: replace the label table by one for this number of other classes. Each starts as the null class.
        flags: `--dataset.key value`, `--autoencoder.key value` and `--sampling.key value`.

    Returns:
        The weights, and what was converted, one phrase each.

    Raises:
        ConfigError: the file cannot be read or is not of this format, or an option is wrong or missing.
    """
    _check_given(given, format)
    foreign = read_foreign_weights(path, weights=kind)
    try:
        converted = registered(FORMATS, format)(foreign.tensors, content=foreign.content, given=given)
    except ConfigError as error:
        is_option = str(error).startswith("--")
        raise ConfigError(str(error) if is_option else f"{path} {error}") from None
    if num_classes is not None:
        converted = _with_new_classes(converted, num_classes)
        flags = ["--dataset.dataset_name=folder", *flags]
    _refuse_bad_values(path, converted)
    weights = Weights(
        path=path,
        shapes={name: tuple(tensor.shape) for name, tensor in converted.tensors.items()},
        tensor=converted.tensors.__getitem__,
        config=to_dict(_config_of(converted, foreign, name, flags)),
        step=0,
        images_seen=0,
        kind=foreign.kind,
    )
    return weights, converted.notes


def _refuse_bad_values(path: Path, converted: Converted) -> None:
    for name, tensor in converted.tensors.items():
        if not tensor.isfinite().all():
            raise ConfigError(f"{path} has {name} with values that are not finite; such a model only draws NaN")


def _check_given(given: Given, format: str) -> None:
    for name, value in dataclasses.asdict(given).items():
        is_of_folder = name in ("noise_schedule", "prediction")
        if value is not None and is_of_folder != (format == "diffusers"):
            why = "the folder's config.json has it" if format == "diffusers" else f"{format} has one"
            raise option_error(f"--{name}", value, f"{why}; leave it out")


def _with_new_classes(converted: Converted, num_classes: int) -> Converted:
    """A label table for other classes: each row starts as the null class, which stays the last row."""
    if _LABELS not in converted.tensors:
        raise option_error("--num_classes", num_classes, "this model has no classes; leave it out")
    table: Tensor = converted.tensors[_LABELS][-1:].expand(num_classes + 1, -1).clone()
    note = f"new label table: {num_classes} classes that start as the null class, in place of {converted.num_classes}"
    return dataclasses.replace(
        converted,
        tensors={**converted.tensors, _LABELS: table},
        num_classes=num_classes,
        notes=(*converted.notes, note),
    )


def _config_of(converted: Converted, foreign: ForeignWeights, name: str, flags: Sequence[str]) -> Config:
    """The complete configuration of the run: of the format, of the user's flags and of the autoencoder."""
    channels, height, width = converted.sample_shape
    fixed = {"model.input_channels": channels, "model.sample_size": [height, width]}
    defaults = {
        "dataset.dataset_name": "imagenet" if converted.num_classes == 1000 else "folder",
        "dataset.num_classes": converted.num_classes,
        "diffusion.timestep_shift": 1.0,
        "ema.enable": foreign.kind == "ema",
        "metrics.experiment_name": name,
    }
    options = converted.options
    if any(flag.startswith("--autoencoder.") for flag in flags):  # in place of the one of a pipeline
        options = {name: value for name, value in options.items() if not name.startswith("autoencoder.")}
    config = build_config({**defaults, **options, **fixed})
    config = override(config, flags, sections=("dataset", "autoencoder", "sampling"))
    if config.dataset.dataset_name in _CROPPED and not any(flag.startswith("--dataset.crop") for flag in flags):
        config = config.replace({"dataset.crop": "adm"})  # all of these projects crop ImageNet like ADM
    is_stored = config.dataset.dataset_name == "latents"
    section = _complete_autoencoder(config.autoencoder, channels, is_stored=is_stored)
    config = dataclasses.replace(config, autoencoder=section)
    factor = (section.downsampling or 1) if section.online else 1
    size, given_size = [height * factor, width * factor], config.dataset.image_size
    if given_size is not None and size != given_size * (3 - len(given_size)):
        raise option_error("dataset.image_size", given_size, f"this model has {size}; leave it out")
    if config.dataset.num_classes != converted.num_classes:
        right = f"this model has {converted.num_classes}; leave it out. --num_classes replaces its label table"
        raise option_error("dataset.num_classes", config.dataset.num_classes, right)
    return override(config, {"dataset.image_size": size}, sections=("dataset",))


def _describe_data(config: Config) -> str:
    """Such as `1000 classes, images of 256 x 256, autoencoder sd-vae`."""
    assert config.dataset.image_size is not None
    height, width = config.dataset.image_size
    name = config.autoencoder.name
    autoencoder = "no autoencoder: the model's input is pixels" if name is None else f"autoencoder {name}"
    what = "latents" if config.dataset.dataset_name == "latents" else "images"
    return f"{config.dataset.num_classes} classes, {what} of {height} x {width}, {autoencoder}"


def _complete_autoencoder(section: Autoencoder, channels: int, *, is_stored: bool) -> Autoencoder:
    """The section `[autoencoder]` for latents of this many channels; pixels need none.

    The autoencoder is opened when it is used; here only if its downsampling is unknown, or to complete haar.
    """
    if section.name is None and section.path is None and channels in _PIXEL_CHANNELS:
        return section
    if section.name is None:
        if channels != PUBLISHED[_DEFAULT_AUTOENCODER].latent_channels:
            right = f"must name the autoencoder that encodes images to these {channels} channels (docs/data.md)"
            raise option_error("--autoencoder.name", None, right)
        section = dataclasses.replace(section, name=_DEFAULT_AUTOENCODER, sample_posterior=not is_stored)
    assert section.name is not None
    entry = PUBLISHED.get(section.name)
    section = dataclasses.replace(section, online=not is_stored)
    if entry is not None and section.path is None:
        _check_channels(section, entry.latent_channels, channels)
        return dataclasses.replace(section, downsampling=entry.downsampling)
    if section.downsampling is not None and section.name != "haar":
        return section
    image_channels = None
    if section.name == "haar":
        section = dataclasses.replace(section, downsampling=section.downsampling or 4)
        assert section.downsampling is not None
        image_channels = channels // section.downsampling**2
    autoencoder = open_autoencoder(section, device=torch.device("cpu"), image_channels=image_channels)
    _check_channels(section, autoencoder.latent_channels, channels)
    if autoencoder.shift is None or autoencoder.scale is None:
        right = f"must be given with autoencoder.shift: {section.name} publishes no normalisation"
        raise option_error("autoencoder.scale", None, right)
    return complete_from_autoencoder(section, autoencoder)


def _check_channels(section: Autoencoder, has: int, channels: int) -> None:
    if has != channels:
        right = f"has {has} latent channels; must have the {channels} of this model"
        raise option_error("autoencoder.name", section.name, right)


_CONTINUED = ("model", "autoencoder", "diffusion", "sampling")
_DATASET = ("dataset_name", "root_dir", "image_size", "num_classes", "crop")
_HEAD = """\
# Continues training from imported weights, in a new run: torchditan train THIS_FILE, with the options
# of your images and of the training (docs/checkpoints.md).
"""


def continue_toml(config: Config, run: Path) -> str:
    """A configuration with which train.py continues from the imported run `run`, in a new run: no default values."""
    tree, defaults = to_dict(config), to_dict(Config())
    changed = {
        section: {key: value for key, value in keys.items() if value != defaults[section][key]}
        for section, keys in tree.items()
    }
    if config.dataset.dataset_name == "latents":  # their index has the normalisation
        kept = changed["autoencoder"].keys() - {"shift", "scale"}
        changed["autoencoder"] = {key: changed["autoencoder"][key] for key in sorted(kept)}
    tables = {section: changed[section] for section in _CONTINUED if changed[section]}
    tables["dataset"] = {key: tree["dataset"][key] for key in _DATASET}
    tables["checkpoint"] = {"initial_load_path": str(run.resolve())}
    tables["metrics"] = {"experiment_name": f"{config.metrics.experiment_name}-continued"}
    lines = [_HEAD]
    for section, keys in tables.items():
        # JSON and TOML write numbers, texts, booleans and lists of them in the same way.
        texts = {key: json.dumps(value, ensure_ascii=False) for key, value in keys.items() if value is not None}
        lines += [f"[{section}]", *(f"{key} = {text}" for key, text in texts.items()), ""]
    return "\n".join(lines)
