# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A small autoencoder of this project: convolutions over patches of pixels, trained by torchditan autoencoder.

Notable:
- the first layer folds every patch of pixels into channels, and the last unfolds it, so all compute runs at the
  latents' resolution. At pixel resolution, training on a CPU would be sixteen times slower;
- it is made for diffusion. In training, the latents get noise, a share of their standard deviation, and the decoder
  learns to ignore it. A light penalty keeps the latents near zero;
- it publishes its normalisation, measured on the training images after the last step;
- weights are kept in bfloat16, whatever the compute dtype: the saved weights are the measured ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchditan.autoencoders.autoencoder import Autoencoder, dtype_of
from torchditan.autoencoders.hub import place_of
from torchditan.config import options
from torchditan.config.errors import ConfigError, did_you_mean, option_error
from torchditan.config.loader import TRAIN_CONFIGS
from torchditan.models.initialization import draw_xavier_uniform
from torchditan.run.atomic_files import write_file

FORMAT = "torchditan patch autoencoder"
VERSION = 1
"""Version of config.json; raised when an older reader would misunderstand it."""
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_LARGEST = 1_024
"""Channels, pixels or blocks in a config.json: the network is built before its weights are read."""
NAMED = TRAIN_CONFIGS / "autoencoders"
"""Where an autoencoder is looked up by its bare name."""


@dataclass(frozen=True)
class PatchAutoencoderConfig:
    """Sizes of a `PatchNetwork`; together with the weights they determine its identity."""

    image_channels: int = 3
    latent_channels: int = 8
    patch_size: int = 4
    """Downsampling: pixels per latent position along each side."""
    width: int = 64
    """Channels of the residual blocks."""
    depth: int = 2
    """Residual blocks of the encoder, and the same number of the decoder."""


class ResidualBlock(nn.Module):
    """x + conv(silu(conv(silu(x)))), both 3 x 3; the second starts at zero, so the block starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.conv1(F.silu(x))))


class PatchNetwork(nn.Module):
    """Encoder and decoder for images of any multiple of the patch size, square or not."""

    def __init__(self, config: PatchAutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        width, patch_pixels = config.width, config.image_channels * config.patch_size**2
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(config.patch_size),
            nn.Conv2d(patch_pixels, width, 3, padding=1),
            *(ResidualBlock(width) for _ in range(config.depth)),
            nn.Conv2d(width, config.latent_channels, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(config.latent_channels, width, 3, padding=1),
            *(ResidualBlock(width) for _ in range(config.depth)),
            nn.Conv2d(width, patch_pixels, 3, padding=1),
            nn.PixelShuffle(config.patch_size),
        )

    def encode(self, images: Tensor) -> Tensor:
        """(B, image_channels, H, W) in [-1, 1] -> latents (B, C, H / patch_size, W / patch_size)."""
        return self.encoder(images)

    def decode(self, latents: Tensor) -> Tensor:
        """(B, C, h, w) -> images (B, image_channels, h * patch_size, w * patch_size), about [-1, 1]."""
        return self.decoder(latents)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Xavier for convolutions; zeros for biases and the end of each residual block. Depends on (seed, name)."""
        for name, parameter in self.named_parameters():
            if name.endswith(("bias", "conv2.weight")):
                parameter.zero_()
            else:
                parameter.copy_(draw_xavier_uniform(seed, name, parameter.shape))


def reconstruction_loss(
    network: PatchNetwork, images: Tensor, noise: Tensor, *, latent_noise: float, latent_penalty: float
) -> Tensor:
    """Mean squared error of the reconstruction from noisy latents, plus a penalty on the latents' size.

    With noise at a fixed share of its spread, each channel carries a fixed amount of information, like the posterior
    of a VAE (Kingma and Welling 2014). The penalty corresponds to the part of the KL term that limits the means.

    Args:
        images: (B, image_channels, H, W) in [-1, 1].
        noise: (B, C, h, w) standard normal.
        latent_noise: standard deviation of the noise, as a share of each channel's own over the batch.
        latent_penalty: weight of the latents' mean square.
    """
    latents = network.encode(images).float()
    std = latents.detach().std((0, 2, 3), keepdim=True)  # (1, C, 1, 1)
    decoded = network.decode(latents + latent_noise * std * noise)
    return F.mse_loss(decoded.float(), images) + latent_penalty * latents.square().mean()


class PatchAutoencoder(Autoencoder):
    """A trained `PatchNetwork` on a device, with weights rounded to bfloat16."""

    name = "patch"
    has_posterior = False

    def __init__(
        self,
        network: PatchNetwork,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        path: str | None = None,
    ) -> None:
        config = network.config
        network.requires_grad_(False).to(torch.bfloat16)
        self.fingerprint = fingerprint_of(network)
        self.dtype = dtype or torch.float32
        self.device = device
        self.network = network.to(device, self.dtype).eval()
        self.path = path
        self.image_channels = config.image_channels
        self.latent_channels = config.latent_channels
        self.downsampling = config.patch_size

    @classmethod
    def open(
        cls, path: str | Path | None, *, device: torch.device, dtype: torch.dtype | None = None
    ) -> PatchAutoencoder:
        """Open the autoencoder in a folder that `save` wrote, or one of train_configs/autoencoders/ by its name.

        Args:
            path: in the form of `autoencoder.path`.
            device: where it computes.
            dtype: compute dtype; float32 by default, which gives the most exact latents.

        Raises:
            ConfigError: it does not exist, or is damaged, of another kind or of a newer version.
        """
        folder = _find_folder(path)
        content = _read_config(folder, option_value=str(path))
        with torch.device("meta"):
            network = PatchNetwork(PatchAutoencoderConfig(**content["architecture"]))
        _load_weights(network, folder / WEIGHTS_FILE, option_value=str(path))
        autoencoder = cls(network, device=device, dtype=dtype, path=str(path))
        if autoencoder.fingerprint != content.get("fingerprint"):
            right = (
                f"{CONFIG_FILE} belongs to {content.get('fingerprint')}, {WEIGHTS_FILE} is {autoencoder.fingerprint}"
            )
            raise option_error("autoencoder.path", str(path), f"{right}; copy or train both again")
        shift, scale = (torch.tensor(content["normalization"][key]) for key in ("shift", "scale"))
        autoencoder.set_normalization(shift=shift, scale=scale)
        return autoencoder

    def save(self, folder: Path, *, training: dict[str, Any]) -> None:
        """Write weights, then config.json, each atomically.

        If a crash leaves new weights with an old config.json, the fingerprint reveals it to the reader.

        Args:
            folder: created if it is missing.
            training: origin and quality of the weights, for information; stored in config.json.
        """
        from safetensors.torch import save

        assert self.shift is not None and self.scale is not None, "set_normalization first"
        tensors = {
            name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in self.network.state_dict().items()
        }
        content = {
            "format": FORMAT,
            "version": VERSION,
            "architecture": dataclasses.asdict(self.network.config),
            "fingerprint": self.fingerprint,
            "normalization": {"shift": self.shift.tolist(), "scale": self.scale.tolist()},
            "training": training,
        }
        write_file(folder / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
        write_file(folder / CONFIG_FILE, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())

    def drop_decoder(self) -> None:
        del self.network.decoder

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.network.encode(images), None

    def _decode(self, latents: Tensor) -> Tensor:
        return self.network.decode(latents)


def fingerprint_of(network: PatchNetwork) -> str:
    """`patch-` and 16 hex digits over the sizes and the bytes of the bfloat16 weights."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(network.config), sort_keys=True).encode())
    for name, tensor in sorted(network.state_dict().items()):
        assert tensor.dtype == torch.bfloat16, (name, tensor.dtype)
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.int16).numpy().astype("<i2").tobytes())
    return f"patch-{digest.hexdigest()[:16]}"


def _find_folder(path: str | Path | None) -> Path:
    names = sorted(file.parent.name for file in NAMED.glob(f"*/{CONFIG_FILE}"))
    known = " or ".join([*names, "a folder that torchditan autoencoder wrote"])
    if path is None:
        raise option_error("autoencoder.path", None, f"must be {known}")
    given = Path(path).expanduser()
    for folder in (given, NAMED / path):
        if (folder / CONFIG_FILE).is_file():
            return folder
    hint = did_you_mean(str(path), names)
    if given.is_dir():
        raise option_error("autoencoder.path", str(path), f"holds no {CONFIG_FILE}; must be {known}{hint}")
    raise option_error("autoencoder.path", str(path), f"no such folder; must be {known}{hint}")


def _read_config(folder: Path, *, option_value: str) -> dict[str, Any]:
    """Read config.json and validate everything except the fingerprint."""

    def wrong(right: str) -> ConfigError:
        return option_error("autoencoder.path", option_value, right)

    try:
        content = json.loads((folder / CONFIG_FILE).read_bytes())
    except OSError as error:
        raise wrong(f"{CONFIG_FILE} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise wrong(f"{CONFIG_FILE} is not JSON; it may be truncated") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise wrong(f"{CONFIG_FILE} does not belong to a {FORMAT}")
    version = content.get("version")
    if version != VERSION:
        right = f"has version {version}, possibly of a newer TorchDiTan; this one reads version {VERSION}"
        raise wrong(f"{CONFIG_FILE} {right}")
    if not _is_architecture(content.get("architecture")):
        keys = ", ".join(field.name for field in dataclasses.fields(PatchAutoencoderConfig))
        raise wrong(f"architecture in {CONFIG_FILE} must be {keys}, each an integer from 1 to {_LARGEST}")
    channels = content["architecture"]["latent_channels"]
    normalization = content.get("normalization")
    if not _is_normalization(normalization, channels):
        raise wrong(f"normalization in {CONFIG_FILE} must be shift and scale, {channels} numbers each")
    return content


def _is_architecture(value: Any) -> bool:
    names = {field.name for field in dataclasses.fields(PatchAutoencoderConfig)}
    is_complete = isinstance(value, dict) and value.keys() == names
    return is_complete and all(type(v) is int and 0 < v <= _LARGEST for v in value.values())


def _is_normalization(value: Any, channels: int) -> bool:
    def are_numbers(values: Any) -> bool:
        return (
            isinstance(values, list)
            and len(values) == channels
            and all(type(v) in (int, float) and abs(v) < 1e30 for v in values)
        )

    return (
        isinstance(value, dict)
        and are_numbers(value.get("shift"))
        and are_numbers(value.get("scale"))
        and min(value["scale"]) > 0
    )


def _load_weights(network: PatchNetwork, file: Path, *, option_value: str) -> None:
    """Load the tensors of a file into a network on the meta device."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(file.read_bytes())
    except OSError as error:
        raise option_error("autoencoder.path", option_value, f"no {file.name}: {error.strerror}") from None
    except SafetensorError:
        right = f"{file.name} is not a safetensors file, or is truncated; copy it again"
        raise option_error("autoencoder.path", option_value, right) from None
    expected = network.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        want = tuple(expected[name].shape) if name in expected else "absent"
        has = tuple(tensors[name].shape) if name in tensors else "absent"
        if want != has:
            right = f"{name} in {file.name} is {has}; according to {CONFIG_FILE} it must be {want}"
            raise option_error("autoencoder.path", option_value, right)
    network.load_state_dict(tensors, assign=True)


def open_patch(config: options.Autoencoder, *, device: torch.device, image_channels: int | None) -> PatchAutoencoder:
    """Open the autoencoder in a folder, or one of train_configs/autoencoders/."""
    place = place_of(
        config, "a folder that torchditan autoencoder wrote, or one of train_configs/autoencoders/, such as earth"
    )
    return PatchAutoencoder.open(place, device=device, dtype=dtype_of(config))
