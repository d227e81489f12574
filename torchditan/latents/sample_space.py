# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the model is trained on, and how that becomes pictures: one interface for the trainer, and pixels.

With pixels nothing happens; latents are in latent_space.py.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from torchditan.config.errors import option_error
from torchditan.config.options import Autoencoder as AutoencoderConfig
from torchditan.data_stream.datasets import ImageDataset, StandInDataset

Batch = dict[str, Tensor]
_PIXELS = AutoencoderConfig()


class SampleSpace:
    """The samples of a model, between a dataset and its pictures. This one: the dataset's pixels are the samples.

    Args:
        sample_shape: (C, H, W) of what the model sees.
        config: the completed section `[autoencoder]`; the default is that of pixels.
    """

    draws_posterior: bool = False
    """Whether `prepare` needs noise for the autoencoder's posterior."""
    is_encoding: bool = False
    """Whether `prepare` runs an encoder."""
    missing_decoder: str | None = None
    """Why pictures show the channels of latents; None where they are pictures."""
    real_heading: str = "real"
    """What the dataset's own samples are called in a grid."""

    def __init__(self, sample_shape: tuple[int, ...], config: AutoencoderConfig = _PIXELS) -> None:
        self.sample_shape = sample_shape
        self.config = config

    def prepare(self, batch: Batch, posterior: Tensor | None = None) -> Batch:
        """A batch on the device with `sample` as the model sees it."""
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
    """The dataset's pixels as samples; a dataset that takes the place of any other needs no `[autoencoder]`.

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
