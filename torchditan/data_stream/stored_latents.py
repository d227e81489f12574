# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Stored latents as samples. They move to the device in their on-disk format; dequantising, drawing from the posterior
and normalising happen there."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torchditan.config.options import Autoencoder as AutoencoderConfig
from torchditan.data_stream.latent_shards import LatentIndex, to_sample
from torchditan.data_stream.sample_space import Batch, SampleSpace
from torchditan.errors import option_error


class StoredLatents(SampleSpace):
    """Latents written by torchditan encode. Pictures show latent channels; latent_space.py in extras/ decodes them.

    Args:
        config: section `[autoencoder]`; the index completes name, path, downsampling, shift, scale and fingerprint.
        dataset: latents, which have an `index`.
        device: where to normalise.
    """

    missing_decoder: str | None = "torchditan.extras is not installed"

    def __init__(self, config: AutoencoderConfig, dataset: Any, *, device: torch.device) -> None:
        if config.sample_posterior and not dataset.index.posterior:
            right = "these latents have no variance; encode them with --posterior, or leave it out"
            raise option_error("autoencoder.sample_posterior", True, right)
        super().__init__(dataset.sample_shape, complete_from_index(config, dataset.index))
        self.draws_posterior = dataset.with_logvar = config.sample_posterior
        self.device = device
        self.shift, self.scale = (
            torch.tensor(values, device=device) for values in (self.config.shift, self.config.scale)
        )

    def prepare(self, batch: Batch, posterior: Tensor | None = None) -> Batch:
        if "latent" not in batch:
            return batch
        raw: Batch = {key: batch.pop(key) for key in ("latent", "latent_scale", "logvar") if key in batch}
        batch["sample"] = to_sample(raw, shift=self.shift, scale=self.scale, posterior_noise=posterior)
        return batch


def complete_from_index(config: AutoencoderConfig, index: LatentIndex) -> AutoencoderConfig:
    """Complete the section from the latents. Options that it sets are kept, and must not contradict the latents."""
    if config.fingerprint is not None and config.fingerprint != index.fingerprint:
        right = f"these latents come from {index.fingerprint}; leave it out, or give the latents it belongs to"
        raise option_error("autoencoder.fingerprint", config.fingerprint, right)
    for option in ("shift", "scale"):
        given, stored = getattr(config, option), list(getattr(index, option))
        if given is not None and given != stored:
            right = "these latents are normalised by their index; leave it out, or give it when encoding"
            raise option_error(f"autoencoder.{option}", given, right)
    if config.downsampling not in (None, index.downsampling):
        right = f"these latents have {index.downsampling}; leave it out"
        raise option_error("autoencoder.downsampling", config.downsampling, right)
    is_named = config.name is not None or config.path is not None
    return dataclasses.replace(
        config,
        name=config.name or index.autoencoder_name,
        path=config.path if is_named else index.autoencoder_path,
        downsampling=index.downsampling,
        fingerprint=index.fingerprint,
        shift=list(index.shift),
        scale=list(index.scale),
    )
