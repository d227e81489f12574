# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Autoencoders by name: pixels -> normalised latents -> pixels. `open_autoencoder` opens any of them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchditan.config import options
from torchditan.errors import ConfigError, option_error
from torchditan.extras.autoencoders.autoencoder import Autoencoder, check_image_channels
from torchditan.extras.autoencoders.catalogue import PUBLISHED
from torchditan.registry import AUTOENCODERS, build, entry_name, resolve

__all__ = ["Autoencoder", "kind_of", "name_it", "open_autoencoder", "runs_code"]


def kind_of(name: str) -> str:
    """The first name in `AUTOENCODERS` with the same opener: haar, cosmos, diffusers, or a plug-in itself."""
    place = AUTOENCODERS.place(entry_name(name))
    return next((kind for kind, other in AUTOENCODERS.items() if other == place), name)


def runs_code(name: str) -> bool:
    """Whether this autoencoder runs the code of its files, which may do anything.

    It is opened only if the command line or the user's own TOML names it: an index of latents, a shared configuration
    or someone's run that names it gives latents without pictures.
    """
    place = AUTOENCODERS.place(entry_name(name))
    return place is not None and place.endswith("open_cosmos")  # also as module:name


def name_it(config: options.Autoencoder) -> ConfigError:
    """Why an autoencoder that `runs_code` is not opened, and what to do."""
    entry = PUBLISHED.get(config.name or "")
    place = entry.hub_name if entry else "FOLDER"
    right = f"is TorchScript, which runs code, and only you may name it: --autoencoder.path {place}, if you trust it"
    return option_error("autoencoder.name", config.name, right)


def open_autoencoder(
    config: options.Autoencoder, *, device: torch.device, image_channels: int | None = 3
) -> Autoencoder:
    """Open the autoencoder of `config` with its weights on `device`. `config` or its publisher sets the normalisation.

    Args:
        config: section `[autoencoder]` with a name; it is not changed.
        device: where the autoencoder computes. On the meta device it opens without weights, for its sizes.
        image_channels: channels of the images; None uses those of the autoencoder (haar: 3).

    Returns:
        An autoencoder. Its `shift` and `scale` are None if neither `config` nor its publisher provides them.

    Raises:
        ConfigError: the options name no autoencoder or contradict it, or its weights do not open.
    """
    assert config.name is not None
    entry = PUBLISHED.get(config.name)
    if entry is not None:  # before any download
        _check_downsampling(config, entry.downsampling)
        check_image_channels(config, 3, image_channels)
    opener, of_name = resolve(AUTOENCODERS, "autoencoder.name", config.name)
    given = {"device": device, "image_channels": image_channels}
    autoencoder: Autoencoder = build(opener, "autoencoder.name", config.name, config, given=given, **of_name)
    autoencoder.name = config.name
    autoencoder.path = config.path or (None if entry is None else entry.hub_name)
    check_image_channels(config, autoencoder.image_channels, image_channels)
    _check_downsampling(config, autoencoder.downsampling)
    _check_identity(config, autoencoder)
    _override_normalization(config, autoencoder)
    return autoencoder


def _check_downsampling(config: options.Autoencoder, has: int) -> None:
    if config.downsampling not in (None, has):
        right = f"{config.name} has {has}; leave it out"
        raise option_error("autoencoder.downsampling", config.downsampling, right)


def _check_identity(config: options.Autoencoder, autoencoder: Autoencoder) -> None:
    """Check that the autoencoder matches its name, and is the one that the latents come from."""
    option, place = ("name", config.name) if autoencoder.path is None else ("path", autoencoder.path)
    entry = PUBLISHED.get(autoencoder.name)
    has = (autoencoder.latent_channels, autoencoder.downsampling)
    if entry is not None and has != (entry.latent_channels, entry.downsampling):
        right = (
            f"has {has[0]} latent channels at 1/{has[1]}, and {config.name} {entry.latent_channels} at "
            f"1/{entry.downsampling}; open it as --autoencoder.name {kind_of(autoencoder.name)}"
        )
        raise option_error(f"autoencoder.{option}", place, right)
    if autoencoder.fingerprint and config.fingerprint not in (None, autoencoder.fingerprint):
        right = (
            f"the latents come from {config.fingerprint}, this decoder is {autoencoder.fingerprint}; "
            "give the autoencoder that encoded them"
        )
        raise option_error(f"autoencoder.{option}", place, right)


def _override_normalization(config: options.Autoencoder, autoencoder: Autoencoder) -> None:
    """Normalise by `config.shift` and `config.scale`; if only one is given, the other keeps its published value."""
    if config.shift is None and config.scale is None:
        return
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
