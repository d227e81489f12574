# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Latents as samples, stored or encoded at each step, and their conversion to pictures.

Notable:
- a decoder is opened for one grid and released after it, so it holds no memory between grids;
- a space completes the section `[autoencoder]`, so that a run's config.json contains everything that decoding needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchditan.config.options import Autoencoder as AutoencoderConfig
from torchditan.data_stream.latent_shards import LatentIndex, to_sample
from torchditan.data_stream.sample_space import Batch, SampleSpace, pixel_space
from torchditan.data_stream.stored_latents import StoredLatents
from torchditan.distributed.float32_products import ieee_float32
from torchditan.errors import ConfigError, option_error
from torchditan.extras.autoencoders import Autoencoder, kind_of, name_it, open_autoencoder, runs_code

_DECODE_BATCH_SIZE = 16


class DecodedLatents(StoredLatents):
    """Stored latents, decoded for pictures if the decoder is available.

    Args:
        config, dataset, device: see `StoredLatents`.
        needs_decoder: whether pictures will be requested. A decoder named in `config` must then open. A decoder named
            only by the index may be missing, and is not opened if it runs code: `missing_decoder` gives the reason,
            and pictures show latent channels.
    """

    missing_decoder = None
    real_heading = "real, decoded from its latent"

    def __init__(self, config: AutoencoderConfig, dataset: Any, *, device: torch.device, needs_decoder: bool) -> None:
        _check_kind(config, dataset.index)
        super().__init__(config, dataset, device=device)
        is_named = config.name is not None or config.path is not None
        assert self.config.name is not None
        if runs_code(self.config.name) and not is_named:
            self.missing_decoder, self.real_heading = str(name_it(self.config)), "real"
        elif needs_decoder:
            try:
                open_autoencoder(self.config, device=device, image_channels=dataset.index.image_channels)
            except ConfigError as error:
                if is_named:
                    raise
                self.missing_decoder, self.real_heading = str(error), "real"

    def to_pixels(self, samples: Tensor) -> Tensor:
        return samples if self.missing_decoder else decode_latents(self.config, samples, device=self.device)

    def real_to_pixels(self, samples: Tensor) -> Tensor:
        return self.to_pixels(samples)


class EncodedPixels(SampleSpace):
    """Pixels, encoded on the device at each step (`autoencoder.online`)."""

    is_encoding = True

    def __init__(self, config: AutoencoderConfig, *, image_shape: tuple[int, ...], autoencoder: Autoencoder) -> None:
        latent_shape = autoencoder.latent_shape(image_shape[1], image_shape[2])
        if config.sample_posterior and not autoencoder.has_posterior:
            right = f"{autoencoder.name} has no variance; leave it out"
            raise option_error("autoencoder.sample_posterior", True, right)
        super().__init__(latent_shape, complete_from_autoencoder(config, autoencoder))
        self.autoencoder = autoencoder
        self.device = device = autoencoder.device
        self.draws_posterior = config.sample_posterior
        assert autoencoder.shift is not None and autoencoder.scale is not None  # after `complete_from_autoencoder`
        self.shift, self.scale = autoencoder.shift.to(device), autoencoder.scale.to(device)
        autoencoder.drop_decoder()

    def prepare(self, batch: Batch, posterior: Tensor | None = None) -> Batch:
        with ieee_float32():  # latents do not depend on the precision of the run
            mean, logvar = self.autoencoder.moments(batch["sample"])
        raw = {"latent": mean} if logvar is None else {"latent": mean, "logvar": logvar}
        batch["sample"] = to_sample(raw, shift=self.shift, scale=self.scale, posterior_noise=posterior)
        return batch

    def to_pixels(self, samples: Tensor) -> Tensor:
        return decode_latents(self.config, samples, device=self.device)


def build_sample_space(
    config: AutoencoderConfig, dataset: Any, *, device: torch.device, needs_decoder: bool
) -> SampleSpace:
    """The sample space that `[autoencoder]` and the dataset require; its `config` is the completed section.

    Args:
        config: section `[autoencoder]`.
        dataset: pixels, or latents, which have an `index` (a LatentIndex).
        device: where to encode and decode.
        needs_decoder: whether pictures of latents will be requested.

    Raises:
        ConfigError: the section does not match the dataset, or its autoencoder does not open.
    """
    if dataset.index is not None:
        if config.online:
            right = f"{dataset.name} holds latents, which are encoded already; leave it out"
            raise option_error("autoencoder.online", True, right)
        return DecodedLatents(config, dataset, device=device, needs_decoder=needs_decoder)
    if config.online:
        return open_encoder(config, image_shape=dataset.sample_shape, device=device)
    return pixel_space(config, dataset)


def open_encoder(config: AutoencoderConfig, *, image_shape: tuple[int, ...], device: torch.device) -> EncodedPixels:
    """Open what encodes images of (C, H, W) at each step. On the meta device it opens without weights.

    Raises:
        ConfigError: see `build_sample_space`.
    """
    if config.name is None:
        raise option_error("autoencoder.name", None, "must be given to encode pixels (autoencoder.online)")
    autoencoder = open_autoencoder(config, device=device, image_channels=image_shape[0])
    return EncodedPixels(config, image_shape=image_shape, autoencoder=autoencoder)


def decode_latents(
    config: AutoencoderConfig,
    latents: Tensor,
    *,
    device: torch.device,
    sample_dims: int = 3,
    at_once: int = _DECODE_BATCH_SIZE,
) -> Tensor:
    """Pictures of normalised latents. The autoencoder is opened for this call and released after it.

    Args:
        config: a completed section `[autoencoder]`, as stored by a run.
        latents: (..., C, h, w), or (..., C, f, h, w).
        device: where to decode.
        sample_dims: dimensions of one sample, 3 for images and 4 for videos.
        at_once: batch size, which determines the memory; videos are decoded one by one.

    Returns:
        (..., 1 or 3, [F,] H, W) float32 on the CPU, about [-1, 1].
    """
    autoencoder = open_decoder(config, channels=latents.shape[-sample_dims], device=device)
    return decode_with(autoencoder, latents, sample_dims=sample_dims, at_once=at_once)


def decode_with(
    autoencoder: Autoencoder, latents: Tensor, *, sample_dims: int = 3, at_once: int = _DECODE_BATCH_SIZE
) -> Tensor:
    """`decode_latents` with an open autoencoder, for many batches."""
    leading = latents.shape[:-sample_dims]
    at_once = min(at_once, _DECODE_BATCH_SIZE) if sample_dims == 3 else 1
    chunks = latents.flatten(0, -sample_dims - 1).split(at_once)  # (n, C, h, w) each
    with ieee_float32():
        return torch.cat([autoencoder.decode(chunk).cpu() for chunk in chunks]).unflatten(0, leading)


def complete_from_autoencoder(config: AutoencoderConfig, autoencoder: Autoencoder) -> AutoencoderConfig:
    """Complete the section from its opened autoencoder.

    Raises:
        ConfigError: neither of them has a normalisation.
    """
    if autoencoder.shift is None or autoencoder.scale is None:
        right = (
            f"{autoencoder.name} publishes no normalisation; set shift and scale, "
            "which torchditan encode prints with --preview"
        )
        raise option_error("autoencoder.scale", None, right)
    return replace(
        config,
        name=autoencoder.name,
        path=autoencoder.path,
        downsampling=autoencoder.downsampling,
        shift=autoencoder.shift.tolist(),
        scale=autoencoder.scale.tolist(),
        fingerprint=autoencoder.fingerprint,
    )


def open_decoder(config: AutoencoderConfig, *, channels: int, device: torch.device) -> Autoencoder:
    """Open the autoencoder of a completed section, for latents with `channels` channels.

    Raises:
        ConfigError: its weights are not available, the latents come from other weights, or it has other channels.
    """
    image_channels = None  # use the autoencoder's
    if config.name == "haar":
        assert config.downsampling is not None
        image_channels = channels // config.downsampling**2
    autoencoder = open_autoencoder(config, device=device, image_channels=image_channels)
    if autoencoder.latent_channels != channels:
        right = f"has {autoencoder.latent_channels} latent channels; must have {channels}, as the latents"
        raise option_error("autoencoder.name", config.name, right)
    return autoencoder


def _check_kind(config: AutoencoderConfig, index: LatentIndex) -> None:
    """Refuse a name that cannot be the latents' autoencoder now, because the decoder may open only after training."""
    if config.name is None:
        return
    if kind_of(config.name) != kind_of(index.autoencoder_name):
        right = f"these latents come from {index.autoencoder_name}; leave it out"
        raise option_error("autoencoder.name", config.name, right)
