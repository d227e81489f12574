# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""NVIDIA's Cosmos image tokenizers, CI8x8 and CI16x16: a pair of TorchScript files.

Notable:
- TorchScript is code, which runs. So only the user may name these files; see `runs_code` in __init__.py;
- a trace computes in one dtype, that of its first parameter. Channels, downsampling and whether there is a variance
  come from encoding one small image;
- `encoder.jit` returns (latent, (mean, logvar)). If the tokenizer is not a VAE (NVIDIA's "AE" formulation), the pair
  contains single zeros, and the latent is used as the mean. If it is a VAE, the latent is a random draw, and the mean
  is used;
- traced constants stay where they are, so what would open on the meta device opens on the CPU;
- no normalisation is published: it is computed from the encoded images.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchditan.config import options
from torchditan.errors import ConfigError, first_line, option_error
from torchditan.extras.autoencoders.autoencoder import Autoencoder, check_image_channels
from torchditan.extras.autoencoders.hub import find_weights, place_of
from torchditan.run.atomic_files import sha256_of

FILES = ("encoder.jit", "decoder.jit")
_SIZE = 64


class CosmosAutoencoder(Autoencoder):
    """A traced encoder and decoder, at any size that is a multiple of the downsampling."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, *, fingerprint: str, device: torch.device) -> None:
        self.name = "cosmos"
        self.path = None
        self.fingerprint = fingerprint
        self.device = device
        self.dtype = next((parameter.dtype for parameter in encoder.parameters()), torch.float32)
        self.image_channels = 3
        self._encoder: Any = encoder
        self._decoder: Any = decoder
        mean, logvar = self.moments(torch.zeros(1, 3, _SIZE, _SIZE))
        _, self.latent_channels, _, _ = mean.shape
        self.downsampling = _SIZE // mean.shape[-1]
        self.has_posterior = logvar is not None

    def drop_decoder(self) -> None:
        self._decoder = None

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        return _mean_and_logvar(self._encoder(images))

    def _decode(self, latents: Tensor) -> Tensor:
        return self._decoder(latents)


def _load(file: Path, *, device: torch.device) -> nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.export cannot read these files
            module: nn.Module = torch.jit.load(str(file), map_location=device)
    except (RuntimeError, ValueError) as error:
        raise _refuse(file, f"is not a complete TorchScript file ({first_line(error)})") from error
    return module.eval()


def _mean_and_logvar(output: Any) -> tuple[Tensor, Tensor | None]:
    """(latent, (mean, logvar)), (latent, ...) or latent -> mean and log-variance, (B, C, h, w) each."""
    if isinstance(output, Tensor):
        return output, None
    latent, *rest = output
    if rest and isinstance(rest[0], tuple) and [getattr(part, "shape", None) for part in rest[0]] == [latent.shape] * 2:
        return rest[0]
    return latent, None


def _fingerprint(folder: Path) -> str:
    hashes = " ".join(sha256_of(folder / file) for file in FILES)
    return f"cosmos-{hashlib.sha256(hashes.encode()).hexdigest()[:16]}"


def _refuse(file: Path, right: str) -> ConfigError:
    return option_error("autoencoder.path", str(file.parent), f"{file.name} {right}")


def open_cosmos(config: options.Autoencoder, *, device: torch.device, image_channels: int | None) -> CosmosAutoencoder:
    """Open the autoencoder in a folder or on the hub. Runs its code.

    Raises:
        ConfigError: a file is not the TorchScript of a continuous image tokenizer, or computes in another dtype.
    """
    check_image_channels(config, 3, image_channels)  # before any download
    place = place_of(
        config, "a folder with encoder.jit and decoder.jit, or a hub name such as nvidia/Cosmos-0.1-Tokenizer-CI8x8"
    )
    folder, device = find_weights(place, files=FILES), torch.device("cpu") if device.type == "meta" else device
    encoder, decoder = (_load(folder / file, device=device) for file in FILES)
    try:
        opened = CosmosAutoencoder(encoder, decoder, fingerprint=_fingerprint(folder), device=device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        right = f"does not encode an image of {_SIZE} x {_SIZE} to a latent of 4 dimensions"
        raise _refuse(folder / FILES[0], f"{right} ({first_line(error)})") from error
    traced = str(opened.dtype).removeprefix("torch.")
    if config.dtype not in (None, traced):
        right = f"{FILES[0]} of {folder} is traced in {traced} and computes only in it; leave it out"
        raise option_error("autoencoder.dtype", config.dtype, right)
    return opened
