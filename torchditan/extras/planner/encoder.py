# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The encoder of a job that encodes at each step (`autoencoder.online`), opened without values."""

from __future__ import annotations

import dataclasses
import functools
import json

import torch

from torchditan.config.options import Autoencoder
from torchditan.errors import ConfigError, first_line, option_error
from torchditan.extras.latents.latent_space import EncodedPixels, open_encoder
from torchditan.extras.planner.trace import without_values
from torchditan.models.frozen import FrozenNetwork


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
    """An open encoder."""

    image_shape: tuple[int, int, int]
    """(C, H, W) of the images."""
    space: EncodedPixels

    @functools.cached_property
    def network(self) -> FrozenNetwork:
        return FrozenNetwork(self.space.autoencoder.networks, self._encode)

    @functools.cached_property
    def flops(self) -> int:
        """Of encoding one image."""
        with without_values(self.space.device):
            return self.network.flops(self.example(1))

    def example(self, batch_size: int) -> torch.Tensor:
        """Images."""
        return torch.empty(batch_size, *self.image_shape, device=self.space.device)

    def _encode(self, images: torch.Tensor) -> torch.Tensor:
        noise = None
        if self.space.draws_posterior:
            noise = torch.empty(len(images), *self.space.sample_shape, device=self.space.device)
        return self.space.prepare({"sample": images}, noise)["sample"]


def encoder_of(config: Autoencoder, *, image_shape: tuple[int, int, int]) -> Encoder:
    """The encoder of `[autoencoder]`; opened once.

    Raises:
        ConfigError: as when a job opens it. A plug-in's may also not open or encode on the meta device.
    """
    return _open(json.dumps(dataclasses.asdict(config)), image_shape)


@functools.lru_cache(maxsize=16)
def _open(section: str, image_shape: tuple[int, int, int]) -> Encoder:
    config = Autoencoder(**json.loads(section))
    try:
        encoder = Encoder(image_shape, open_encoder(config, image_shape=image_shape, device=torch.device("meta")))
        encoder.flops  # noqa: B018  encodes once
    except ConfigError:
        raise
    except Exception as error:
        right = f"cannot be planned, because it does not encode on the meta device ({first_line(error)})"
        raise option_error("autoencoder.name", config.name, right) from error
    return encoder
