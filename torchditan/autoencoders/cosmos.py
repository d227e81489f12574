# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""NVIDIA's Cosmos image tokenizers, CI8x8 and CI16x16: a pair of TorchScript files, which are parsed but never run.

Notable:
- TorchScript can write files, among other things, so torchscript.py interprets the trace itself;
- the precision of a trace is fixed: a bfloat16 trace fails in float32, and the reverse. A small forward pass probes
  it, and also channels, downsampling, and whether there is a variance;
- `encoder.jit` returns (latent, (mean, logvar)). If the tokenizer is not a VAE (NVIDIA's "AE" formulation), the pair
  contains single zeros, and the latent is used as the mean. If it is a VAE, the latent is a random draw, and the mean
  is used;
- no normalisation is published: it is computed from the encoded images.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchditan.autoencoders.autoencoder import Autoencoder, check_image_channels, dtype_of
from torchditan.autoencoders.hub import find_weights, first_line, place_of
from torchditan.autoencoders.torchscript import NotATrace, Trace
from torchditan.config import options
from torchditan.config.errors import ConfigError, option_error

FILES = ("encoder.jit", "decoder.jit")
_PROBE_SIZE = 64
_IMAGE = f"{_PROBE_SIZE} x {_PROBE_SIZE}"
_CHUNK_BYTES = 1 << 20


class CosmosAutoencoder(Autoencoder):
    """A traced encoder and decoder, at any size that is a multiple of the downsampling."""

    def __init__(
        self,
        encoder: Trace,
        decoder: Trace | None,
        *,
        fingerprint: str,
        latent_channels: int,
        downsampling: int,
        has_posterior: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = "cosmos"
        self.path = None
        self.fingerprint = fingerprint
        self.image_channels = 3
        self.latent_channels = latent_channels
        self.downsampling = downsampling
        self.dtype = dtype
        self.device = device
        self.has_posterior = has_posterior
        self._encoder = encoder
        self._decoder = decoder

    @classmethod
    def open(cls, folder: Path, *, device: torch.device, dtype: torch.dtype | None = None) -> CosmosAutoencoder:
        """Open `encoder.jit` and `decoder.jit` of `folder`; both must exist.

        Args:
            folder: contains the two files.
            device: where they compute.
            dtype: the dtype that they must be traced in, or None.

        Raises:
            ConfigError: a file is not TorchScript or does more than compute, the two are not a pair of an image
                tokenizer, or they are traced in another dtype.
        """
        encoder, decoder = (_load(folder / file, device=device) for file in FILES)
        output, traced = _probe_encoder(encoder, folder=folder, device=device)
        if dtype not in (None, traced):
            right = f"{FILES[0]} of {folder} is traced in {_word(traced)} and computes only in it; leave it out"
            raise option_error("autoencoder.dtype", _word(dtype), right)
        mean, logvar = _mean_and_logvar(output)
        _probe_decoder(decoder, mean.to(traced), folder=folder)
        return cls(
            encoder,
            decoder,
            fingerprint=_fingerprint(folder),
            latent_channels=mean.shape[1],
            downsampling=_PROBE_SIZE // mean.shape[-1],
            has_posterior=logvar is not None,
            dtype=traced,
            device=device,
        )

    def drop_decoder(self) -> None:
        self._decoder = None

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        return _mean_and_logvar(self._encoder(images))

    def _decode(self, latents: Tensor) -> Tensor:
        assert self._decoder is not None, "the decoder was dropped"
        return self._decoder(latents)


def _load(file: Path, *, device: torch.device) -> Trace:
    try:
        return Trace(file, device=device)
    except NotATrace as error:
        raise _refuse(file, f"is not a complete TorchScript file of an image tokenizer ({error})") from error


@torch.no_grad()
def _probe_encoder(encoder: Trace, *, folder: Path, device: torch.device) -> tuple[Any, torch.dtype]:
    """The encoder's output for one small image, and the dtype that it was traced in."""
    stored = [tensor.dtype for tensor in encoder.tensors if tensor.is_floating_point()]
    failure: Exception | None = None
    for dtype in dict.fromkeys([*stored[:1], torch.float32, torch.bfloat16]):
        try:
            output = encoder(torch.zeros(1, 3, _PROBE_SIZE, _PROBE_SIZE, dtype=dtype, device=device))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotATrace) as error:
            failure = failure or error  # the error in the stored dtype is the most helpful
        else:
            _check_output(output, file=folder / FILES[0])
            return output, dtype
    assert failure is not None
    raise _refuse(folder / FILES[0], f"cannot encode an image of {_IMAGE} on {device} ({first_line(failure)})")


@torch.no_grad()
def _probe_decoder(decoder: Trace, latent: Tensor, *, folder: Path) -> None:
    file = folder / FILES[1]
    try:
        images = decoder(latent)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotATrace) as error:
        right = f"does not decode the latents of {FILES[0]}, {_shown(latent)} ({first_line(error)})"
        raise _refuse(file, right) from error
    if not isinstance(images, Tensor) or images.shape != (1, 3, _PROBE_SIZE, _PROBE_SIZE):
        right = f"gives {_shown(images)} for the latents of an image of {_IMAGE}; they are not a pair"
        raise _refuse(file, right)


def _check_output(output: Any, *, file: Path) -> None:
    latent = output[0] if isinstance(output, tuple) and output else output
    is_latent = isinstance(latent, Tensor) and latent.ndim == 4 and latent.is_floating_point()
    if not is_latent or len(set(latent.shape[2:])) != 1 or _PROBE_SIZE % latent.shape[-1]:
        right = f"gives {_shown(latent)} for an image of {_IMAGE}; must be from a continuous image tokenizer (CI)"
        raise _refuse(file, right)


def _mean_and_logvar(output: Any) -> tuple[Tensor, Tensor | None]:
    """(latent, (mean, logvar)), (latent, ...) or latent -> mean and log-variance, (B, C, h, w) each."""
    if isinstance(output, Tensor):
        return output, None
    latent, *rest = output
    if rest and isinstance(rest[0], tuple) and [getattr(part, "shape", None) for part in rest[0]] == [latent.shape] * 2:
        return rest[0]
    return latent, None


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in FILES:
        digest.update(f"{file} {(folder / file).stat().st_size}\n".encode())
        with open(folder / file, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return f"cosmos-{digest.hexdigest()[:16]}"


def _refuse(file: Path, right: str) -> ConfigError:
    return option_error("autoencoder.path", str(file.parent), f"{file.name} {right}")


def _word(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(output: Any) -> str:
    return f"{_word(output.dtype)} {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


def open_cosmos(config: options.Autoencoder, *, device: torch.device, image_channels: int | None) -> CosmosAutoencoder:
    """Open the autoencoder in a folder or on the hub."""
    check_image_channels(config, 3, image_channels)  # before any download
    place = place_of(
        config, "a folder with encoder.jit and decoder.jit, or a hub name such as nvidia/Cosmos-0.1-Tokenizer-CI8x8"
    )
    return CosmosAutoencoder.open(find_weights(place, files=FILES), device=device, dtype=dtype_of(config))
