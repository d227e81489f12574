# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The common interface of all autoencoders: pixels -> normalised latents -> pixels.

Notable:
- normalised latents are (z - shift) x scale, with about zero mean and unit variance. Diffusion models train on them;
- an autoencoder computes in the dtype that its weights need; input and output pixels and latents are float32;
- the fingerprint identifies the weights, so that latents are never decoded by another autoencoder.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn

from torchditan.config import options
from torchditan.errors import option_error


class Autoencoder(abc.ABC):
    """One autoencoder on one device. Subclasses implement `_moments` and `_decode`, without normalisation.

    A function listed in `AUTOENCODERS` of registry.py opens it: `open(config, device=..., image_channels=...)`, with
    the options of `[autoencoder]` and the channels of the images; None uses those of the autoencoder.
    """

    name: str
    """In the form of `autoencoder.name`; `open_autoencoder` sets it, and the path."""
    path: str | None
    """Folder or hub name that opens it again, in the form of `autoencoder.path`; None if it has no weights."""
    fingerprint: str
    """Identity of the weights, such as `diffusers-1f0c9a...`; equal if and only if the weights are equal.
    "" on the meta device."""
    image_channels: int
    latent_channels: int
    downsampling: int
    """Downsampling: pixels per latent position along each side."""
    dtype: torch.dtype
    """Compute dtype of the weights."""
    device: torch.device
    has_posterior: bool
    """Whether the encoder outputs a variance in addition to the mean."""
    shift: Tensor | None = None
    """(C,) float32 on the CPU. None if none is published; then call `set_normalization` first."""
    scale: Tensor | None = None

    def set_normalization(self, *, shift: Tensor, scale: Tensor) -> None:
        """Use this normalisation from now on, (C,) each."""
        assert shift.shape == scale.shape == (self.latent_channels,), (shift.shape, scale.shape)
        self.shift, self.scale = shift.float().cpu(), scale.float().cpu()

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of the latents of images of height x width.

        Raises:
            ConfigError: height or width is not a multiple of the downsampling.
        """
        factor = self.downsampling
        if height % factor or width % factor:
            right = f"must be a multiple of {factor}, the downsampling of {self.name}"
            raise option_error("dataset.image_size", [height, width], right)
        return self.latent_channels, height // factor, width // factor

    @property
    def networks(self) -> nn.ModuleList:
        """What it holds in the memory of its device."""
        return nn.ModuleList(value for value in vars(self).values() if isinstance(value, nn.Module))

    @torch.no_grad()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and log-variance of the latents, before normalisation.

        Args:
            images: (B, image_channels, H, W) in [-1, 1], on any device.

        Returns:
            (B, C, h, w) float32 each, on the autoencoder's device; the second is None without a posterior.
        """
        mean, logvar = self._moments(images.to(self.device, self.dtype, non_blocking=True))
        return mean.float(), None if logvar is None else logvar.float()

    def encode(self, images: Tensor) -> Tensor:
        """Images (B, image_channels, H, W) in [-1, 1] -> normalised latents (B, C, h, w) float32, their mean."""
        assert self.shift is not None and self.scale is not None, "set_normalization first"
        mean, _ = self.moments(images)
        return (mean - _per_channel(self.shift, mean)) * _per_channel(self.scale, mean)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents (B, C, h, w) -> images (B, image_channels, H, W) float32, about [-1, 1], not clamped."""
        assert self.shift is not None and self.scale is not None, "set_normalization first"
        latents = latents.to(self.device, torch.float32)
        raw = latents / _per_channel(self.scale, latents) + _per_channel(self.shift, latents)
        return self._decode(raw.to(self.dtype)).float()

    def drop_decoder(self) -> None:  # noqa: B027  some autoencoders have no weights
        """Free the memory of the decoder, if only encoding is left; `decode` fails afterwards."""

    @abc.abstractmethod
    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Implements `moments` for images in `dtype` on `device`."""

    @abc.abstractmethod
    def _decode(self, latents: Tensor) -> Tensor:
        """Latents before normalisation (B, C, h, w), in `dtype`, -> images (B, image_channels, H, W)."""


def check_image_channels(config: options.Autoencoder, has: int, image_channels: int | None) -> None:
    """Refuse images with another number of channels; None accepts any."""
    if image_channels not in (None, has):
        right = f"encodes images of {has} channel(s), and these have {image_channels}"
        raise option_error("autoencoder.name", config.name, right)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device, like.dtype).view(-1, *[1] * (like.dim() - 2))  # (C, 1, 1), or (C, 1, 1, 1)
