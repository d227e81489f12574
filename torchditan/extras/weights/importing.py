# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Creates a run directory from weights: an address of `open_weights`, or a checkpoint of another project.

The run can be sampled and evaluated like one that was trained here and kept only its final weights, but not continued.
The continue.toml of one from another project trains a new run from its weights. A file may be untrusted: its
configuration passes the same checks as a user's, and its tensors must match the model of this configuration.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from torchditan.checkpoint.weights import Kind, Weights, write_model_file
from torchditan.config.loader import from_dict, override, to_dict
from torchditan.config.options import Autoencoder, Config
from torchditan.config.trajectory import trajectory
from torchditan.errors import ConfigError, first_line, option_error
from torchditan.extras.autoencoders.catalogue import PUBLISHED
from torchditan.extras.latents.latent_space import complete_from_autoencoder, open_decoder
from torchditan.extras.weights.formats.foreign_files import read_foreign_weights
from torchditan.extras.weights.formats.layout import LABEL_TABLE
from torchditan.extras.weights.opening import open_model
from torchditan.extras.weights.trained_model import stored_spec, with_flags
from torchditan.registry import FORMATS, check_options, registered, resolve
from torchditan.run import provenance
from torchditan.run.atomic_files import new_folder, write_file
from torchditan.run.directory import to_json
from torchditan.run.reading import read_config

CONTINUE_FILE = "continue.toml"
_PIXEL_CHANNELS = (1, 3)
_CROPPED = ("imagenet", "imagenet_hub", "folder")
_DEFAULT_AUTOENCODER = "sd-vae"
"""Of 4 channels. DiT, SiT and REPA sample the latents from its posterior."""
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a converter raises for other tensors or other JSON than those of its format."""


def import_weights(
    path: Path,
    run: Path,
    *,
    format: str | None = None,
    kind: Kind | None = None,
    given: Mapping[str, Any] = {},
    num_classes: int | None = None,
    flags: Sequence[str] = (),
    overwrite: bool = False,
) -> Weights:
    """Create a run directory from weights.

    Args:
        path: an address of `open_weights`; with `format` a file of weights, a training file or a folder of diffusers.
        run: the directory to create.
        format: a name in `registry.FORMATS` or `module:name`, and options of its own: `mine window=2`.
        kind: which set of a training file; None takes the averaged one.
        given: what the user states because the file does not contain it, by the names in `formats.IMPORT_OPTIONS`.
        num_classes: replace the label table by one for this number of other classes. Each starts as the null class.
        flags: options that replace those of the weights: places on this machine and [sampling]. With `format`, all of
            [dataset], [autoencoder] and [sampling].
        overwrite: replace `run` if it was imported, too; a trained one never.

    Raises:
        ConfigError: the weights cannot be read, have no configuration or do not match it, are not of this format, an
            option is wrong or missing, or `run` exists or cannot be written.
    """
    with new_folder(run, replace=lambda found: overwrite and "imported" in read_config(found)) as new:
        if format is None:
            weights = open_model(path)
            config = with_flags(weights.checked_config(), flags)
            config = config.replace({"ema.enable": weights.kind == "ema"})  # tells the scripts which weights a run has
            with torch.device("meta"):
                weights.check(stored_spec(config).build())
            origin: dict[str, Any] = {}
        else:
            weights = _open_foreign(path, format, kind, given)
            if num_classes is not None:
                weights, flags = _with_new_classes(weights, num_classes), ["--dataset.dataset_name=folder", *flags]
            config = _configure(weights, flags, name=run.resolve().name)
            origin = {"format": format, "converted": weights.notes}
            weights = dataclasses.replace(weights, notes=(*weights.notes, _describe_data(config)))
            write_file(new / CONTINUE_FILE, continue_toml(config, run).encode())
        weights = dataclasses.replace(weights, config=to_dict(config))
        file = new / config.checkpoint.folder / f"step-{weights.step:08d}.safetensors"
        file.parent.mkdir()
        write_model_file(file, weights, dtype=torch.float32)
        content = {
            "run_id": uuid4().hex[:8],
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "config": weights.config,
            "trajectory": trajectory(config),
            "versions": provenance.versions("torch", "torchditan"),
            "git_commit": weights.git_commit,
            "imported": {"file": path.name, "step": weights.step, "weights": weights.kind, **origin},
            "command": sys.argv,
            "class_names": weights.class_names,
        }
        write_file(new / "config.json", to_json(content, indent=2))
    return weights


# Weights of other projects


def _open_foreign(path: Path, format: str, kind: Kind | None, given: Mapping[str, Any]) -> Weights:
    """Read the weights and convert them. The formats that the file has instead are named in the error."""
    convert, own = resolve(FORMATS, "--format", format)
    check_options(convert, "--format", format, num_arguments=1, options=own)
    for name, value in given.items():
        if name not in inspect.signature(convert).parameters:
            raise option_error(f"--{name}", value, f"has no effect with --format {format}; leave it out")
    source = None
    try:
        source = read_foreign_weights(path, kind=kind)
        converted: Weights = convert(source, **given, **own)
        return converted
    except _UNREADABLE as error:
        if isinstance(error, ConfigError) and (source is None or str(error).startswith("--")):
            raise
        why = f"{path} is not a checkpoint of {format} ({first_line(error).removeprefix(f'{path} ')})"
        if isinstance(error, ConfigError) and not str(error).startswith(str(path)):
            why = f"{path} {error}"
        others = [] if source is None else [name for name in FORMATS if _is_of(name, source, given)]
        raise ConfigError(why + "".join(f"; try --format {name}" for name in others)) from None


def _is_of(format: str, source: Weights, given: Mapping[str, Any]) -> bool:
    convert = registered(FORMATS, format)
    try:
        convert(source, **{name: given[name] for name in given.keys() & inspect.signature(convert).parameters.keys()})
    except _UNREADABLE:
        return False
    return True


def _with_new_classes(weights: Weights, num_classes: int) -> Weights:
    """A label table for other classes: each row starts as the null class, which stays the last row."""
    if LABEL_TABLE not in weights.shapes:
        raise option_error("--num_classes", num_classes, "this model has no classes; leave it out")
    tensors, config = weights.tensors(), from_dict(weights.config or {})
    tensors[LABEL_TABLE] = tensors[LABEL_TABLE][-1:].expand(num_classes + 1, -1).clone()
    before = config.dataset.num_classes
    note = f"new label table: {num_classes} classes that start as the null class, in place of {before}"
    config = config.replace({"dataset.num_classes": num_classes})
    return weights.with_tensors(tensors, config=to_dict(config), notes=(*weights.notes, note))


def _configure(weights: Weights, flags: Sequence[str], *, name: str) -> Config:
    """The complete configuration of the run: of the format, of the user's flags and of the autoencoder."""
    config = from_dict(weights.config or {})
    if any(flag.startswith("--autoencoder.") for flag in flags):  # in place of the one of a pipeline
        config = dataclasses.replace(config, autoencoder=Autoencoder())
    num_classes, channels, size = config.dataset.num_classes, config.model.input_channels, config.model.sample_size
    assert num_classes is not None and channels is not None and size is not None
    defaults = {
        "dataset.dataset_name": "imagenet" if num_classes == 1000 else "folder",
        "diffusion.timestep_shift": config.diffusion.timestep_shift or 1.0,
        "ema.enable": weights.kind == "ema",
        "metrics.experiment_name": name,
    }
    config = override(config.replace(defaults), flags, sections=("dataset", "autoencoder", "sampling"))
    if config.dataset.dataset_name in _CROPPED and not any(flag.startswith("--dataset.crop") for flag in flags):
        config = config.replace({"dataset.crop": "adm"})  # all of these projects crop ImageNet like ADM
    is_stored = config.dataset.dataset_name == "latents"
    section = _complete_autoencoder(config.autoencoder, channels, is_stored=is_stored)
    factor = (section.downsampling or 1) if section.online else 1
    image_size = [side * factor for side in size]
    if config.dataset.image_size not in (None, image_size):
        right = f"this model has {image_size}; leave it out"
        raise option_error("dataset.image_size", config.dataset.image_size, right)
    if config.dataset.num_classes != num_classes:
        right = f"this model has {num_classes}; leave it out. --num_classes replaces its label table"
        raise option_error("dataset.num_classes", config.dataset.num_classes, right)
    config = dataclasses.replace(config, autoencoder=section)
    return override(config, {"dataset.image_size": image_size}, sections=("dataset",))


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
    section, entry = dataclasses.replace(section, online=not is_stored), PUBLISHED.get(section.name or "")
    if entry is not None and section.path is None and entry.latent_channels == channels:
        return dataclasses.replace(section, downsampling=entry.downsampling)
    if entry is not None and entry.latent_channels != channels:
        right = f"has {entry.latent_channels} latent channels; must have the {channels} of this model"
        raise option_error("autoencoder.name", section.name, right)
    if section.name == "haar":
        section = dataclasses.replace(section, downsampling=section.downsampling or 4)
    elif section.downsampling is not None:
        return section
    autoencoder = open_decoder(section, channels=channels, device=torch.device("cpu"))
    return complete_from_autoencoder(section, autoencoder)


def _describe_data(config: Config) -> str:
    """Such as `1000 classes, images of 256 x 256, autoencoder sd-vae`."""
    name, size = config.autoencoder.name, " x ".join(map(str, config.dataset.image_size or ()))
    autoencoder = "no autoencoder: the model's input is pixels" if name is None else f"autoencoder {name}"
    what = "latents" if config.dataset.dataset_name == "latents" else "images"
    return f"{config.dataset.num_classes} classes, {what} of {size}, {autoencoder}"


_CONTINUED = ("model", "autoencoder", "diffusion", "sampling")
_DATASET = ("dataset_name", "root_dir", "image_size", "num_classes", "crop")
_HEAD = """\
# Continues training from imported weights, in a new run: torchditan train THIS_FILE, with the options
# of your images and of the training (docs/checkpoints.md).
"""


def continue_toml(config: Config, run: Path) -> str:
    """A configuration with which train.py continues from the imported run `run`, in a new run: no default values."""
    tree, defaults = to_dict(config), to_dict(Config())
    tables = {
        section: {key: value for key, value in tree[section].items() if value != defaults[section][key]}
        for section in _CONTINUED
    }
    if config.dataset.dataset_name == "latents":  # their index has the normalisation
        for key in ("shift", "scale"):
            tables["autoencoder"].pop(key, None)
    tables["dataset"] = {key: tree["dataset"][key] for key in _DATASET}
    tables["checkpoint"] = {"initial_load_path": str(run.resolve())}
    tables["metrics"] = {"experiment_name": f"{config.metrics.experiment_name}-continued"}
    lines = [_HEAD]
    for section, keys in tables.items():
        # JSON and TOML write numbers, texts, booleans and lists of them in the same way.
        texts = {key: json.dumps(value, ensure_ascii=False) for key, value in keys.items() if value is not None}
        lines += [f"[{section}]", *(f"{key} = {text}" for key, text in texts.items()), ""]
    return "\n".join(lines)
