# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Autoencoders, by name: pixels -> normalised latents -> pixels. `open_autoencoder` opens any of them.

May import: config, models, run.
"""

from __future__ import annotations

import pkgutil

import torch
from torch import Tensor

from torchditan.autoencoders.autoencoder import Autoencoder
from torchditan.autoencoders.catalogue import PUBLISHED
from torchditan.autoencoders.haar import DOWNSAMPLINGS, HaarAutoencoder
from torchditan.config import options
from torchditan.config.errors import did_you_mean, option_error

__all__ = ["AUTOENCODERS", "Autoencoder", "kind_of", "open_autoencoder"]

AUTOENCODERS = ("haar", "patch", "cosmos", "diffusers", *PUBLISHED)
OPENERS = {
    "patch": "torchditan.autoencoders.patch:open_patch",
    "cosmos": "torchditan.autoencoders.cosmos:open_cosmos",
    "diffusers": "torchditan.autoencoders.published:open_published",
}
"""What opens the autoencoders of each kind that has weights, as `module:function`; imported when one is opened."""
_PLACES = {
    "patch": "a folder that scripts/train_autoencoder.py wrote, or one of train_configs/autoencoders/, earth say",
    "cosmos": "a folder with encoder.jit and decoder.jit, or a hub name, nvidia/Cosmos-0.1-Tokenizer-CI8x8 say",
    "diffusers": "a folder that diffusers saved, or a hub name, stabilityai/sdxl-vae say",
}


def kind_of(name: str) -> str:
    """haar, patch, cosmos or diffusers: what opens the autoencoder of this name."""
    return PUBLISHED[name].kind if name in PUBLISHED else name


def open_autoencoder(
    config: options.Autoencoder, *, device: torch.device, image_channels: int | None = 3
) -> Autoencoder:
    """The autoencoder of `config`, with its weights on `device`, normalising as `config` or its publisher says.

    Args:
        config: section `[autoencoder]`; its name is given. Nothing of it is changed.
        device: where it computes.
        image_channels: of the images it will meet; None: its own, whatever they are (haar: 3).

    Returns:
        An autoencoder whose `shift` and `scale` are None where neither `config` nor its publisher gives them.

    Raises:
        ConfigError: the options name none, ask for what it is not, or its weights do not open.
    """
    assert config.name is not None
    if config.name not in AUTOENCODERS:
        right = f"must be one of {', '.join(AUTOENCODERS)}{did_you_mean(config.name, AUTOENCODERS)}"
        raise option_error("autoencoder.name", config.name, right)
    entry = PUBLISHED.get(config.name)
    if entry is not None:
        _check_downsampling(config, entry.downsampling)  # before anything is fetched
    if entry is not None or config.name == "cosmos":
        _check_image_channels(config, 3, image_channels)
    autoencoder = _open(config, device=device, image_channels=image_channels)
    autoencoder.name = config.name
    _check_image_channels(config, autoencoder.image_channels, image_channels)
    _check_downsampling(config, autoencoder.downsampling)
    _check_identity(config, autoencoder)
    _override_normalization(config, autoencoder)
    return autoencoder


def _open(config: options.Autoencoder, *, device: torch.device, image_channels: int | None) -> Autoencoder:
    assert config.name is not None
    if config.name == "haar":
        return _open_haar(config, device=device, image_channels=image_channels or 3)
    entry = PUBLISHED.get(config.name)
    place = config.path or (None if entry is None else entry.hub_name)
    if place is None:
        raise option_error("autoencoder.path", None, f"must be given: {_PLACES[config.name]}")
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    opener = pkgutil.resolve_name(OPENERS[kind_of(config.name)])
    autoencoder: Autoencoder = opener(place, device=device, dtype=dtype, entry=entry)
    autoencoder.path = place
    return autoencoder


def _open_haar(config: options.Autoencoder, *, device: torch.device, image_channels: int) -> HaarAutoencoder:
    downsampling = 4 if config.downsampling is None else config.downsampling
    if downsampling not in DOWNSAMPLINGS:
        right = f"must be one of {', '.join(map(str, DOWNSAMPLINGS))} for haar"
        raise option_error("autoencoder.downsampling", downsampling, right)
    if config.path is not None:
        raise option_error("autoencoder.path", config.path, "haar has no weights; leave it out")
    if config.dtype not in (None, "float32"):
        raise option_error("autoencoder.dtype", config.dtype, "haar is exact in float32 only; leave it out")
    return HaarAutoencoder(downsampling=downsampling, image_channels=image_channels, device=device)


def _check_image_channels(config: options.Autoencoder, has: int, image_channels: int | None) -> None:
    if image_channels not in (None, has):
        right = f"encodes images of {has} channel(s), and these have {image_channels}"
        raise option_error("autoencoder.name", config.name, right)


def _check_downsampling(config: options.Autoencoder, has: int) -> None:
    if config.downsampling not in (None, has):
        right = f"{config.name} has {has}; leave it out"
        raise option_error("autoencoder.downsampling", config.downsampling, right)


def _check_identity(config: options.Autoencoder, autoencoder: Autoencoder) -> None:
    """It is the one its name promises, and the one the latents come from."""
    option, place = ("name", config.name) if autoencoder.path is None else ("path", autoencoder.path)
    entry = PUBLISHED.get(autoencoder.name)
    has = (autoencoder.latent_channels, autoencoder.downsampling)
    if entry is not None and has != (entry.latent_channels, entry.downsampling):
        right = (
            f"has {has[0]} latent channels at 1/{has[1]}, and {config.name} {entry.latent_channels} at "
            f"1/{entry.downsampling}; open it as --autoencoder.name {entry.kind}"
        )
        raise option_error(f"autoencoder.{option}", place, right)
    if config.fingerprint not in (None, autoencoder.fingerprint):
        right = (
            f"the latents come from {config.fingerprint}, this decoder is {autoencoder.fingerprint}; "
            "give the autoencoder that encoded them"
        )
        raise option_error(f"autoencoder.{option}", place, right)


def _override_normalization(config: options.Autoencoder, autoencoder: Autoencoder) -> None:
    """Normalise by `config.shift` and `config.scale`; of one alone, the other stays as published."""
    if config.shift is None and config.scale is None:
        return
    if config.scale is not None and min(config.scale, default=0.0) <= 0:
        raise option_error("autoencoder.scale", config.scale, "must be greater than 0")
    shift = _per_channel("shift", config.shift, autoencoder.shift, autoencoder)
    scale = _per_channel("scale", config.scale, autoencoder.scale, autoencoder)
    autoencoder.set_normalization(shift=shift, scale=scale)


def _per_channel(
    option: str, given: list[float] | None, published_values: Tensor | None, autoencoder: Autoencoder
) -> Tensor:
    num_channels = autoencoder.latent_channels
    if given is None:
        if published_values is None:
            right = f"must be given with the other of shift and scale: {autoencoder.name} publishes none"
            raise option_error(f"autoencoder.{option}", None, right)
        return published_values
    if len(given) not in (1, num_channels):
        right = f"must be one number, or one for each of the {num_channels} latent channels"
        raise option_error(f"autoencoder.{option}", given, right)
    return torch.tensor(given, dtype=torch.float32).expand(num_channels).clone()
