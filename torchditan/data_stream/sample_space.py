# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Interface between the dataset, the samples that the model sees, and their pictures; and its version for pixels.

Pixels pass through unchanged; stored_latents.py has the version for latents.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from torchditan.config.options import Autoencoder as AutoencoderConfig
from torchditan.data_stream.datasets import ImageDataset, StandInDataset
from torchditan.errors import option_error

Batch = dict[str, Tensor]
_PIXELS = AutoencoderConfig()


class SampleSpace:
    """Converts between dataset, model samples and pictures. In this class, the dataset's pixels are the samples.

    Args:
        sample_shape: (C, H, W) of the model's samples.
        config: the completed section `[autoencoder]`; the default is that of pixels.
    """

    draws_posterior: bool = False
    """Whether `prepare` needs noise for the autoencoder's posterior."""
    is_encoding: bool = False
    """Whether `prepare` runs an encoder."""
    missing_decoder: str | None = None
    """Why pictures show latent channels; None if they show images."""
    real_heading: str = "real"
    """Heading of the dataset's samples in a grid."""

    def __init__(self, sample_shape: tuple[int, ...], config: AutoencoderConfig = _PIXELS) -> None:
        self.sample_shape = sample_shape
        self.config = config

    def prepare(self, batch: Batch, posterior: Tensor | None = None) -> Batch:
        """Convert `sample` of a batch on the device to the model's samples."""
        return batch

    def shape_in(self, batch: Batch) -> tuple[int, ...]:
        """Shape of the model's samples in this batch; only aspect-ratio buckets have several."""
        is_there = "sample" in batch and not self.is_encoding
        return tuple(batch["sample"].shape[1:]) if is_there else self.sample_shape

    def to_pixels(self, samples: Tensor) -> Tensor:
        """Samples of the model (..., C, H, W) -> pictures (..., 1 or 3, H', W'), on the CPU."""
        return samples

    def real_to_pixels(self, samples: Tensor) -> Tensor:
        """Samples of the dataset (..., C, H, W) -> pictures."""
        return samples


def pixel_space(config: AutoencoderConfig, dataset: ImageDataset) -> SampleSpace:
    """Use the dataset's pixels as samples. A dataset used in place of another one needs no `[autoencoder]`.

    Raises:
        ConfigError: the section asks for an autoencoder.
    """
    if isinstance(dataset, StandInDataset):
        return SampleSpace(dataset.sample_shape)
    for option, value in dataclasses.asdict(config).items():
        if value not in (None, False):
            right = f"{dataset.name} holds pixels; encode them first, or at each step with --autoencoder.online"
            raise option_error(f"autoencoder.{option}", value, right)
    return SampleSpace(dataset.sample_shape)
