# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published autoencoders that diffusers opens (AutoencoderKL, AutoencoderDC, and those of FLUX.2 and of videos).

Notable:
- channels, downsampling and normalisation come from the autoencoder's own config.json; FLUX.2's normalisation is in its
  weights. The catalogue supplies missing values, and refuses another autoencoder under a published name;
- weights are read from safetensors only, and every tensor must match: diffusers would fill a gap with random numbers;
- autoencoders whose config sets `force_upcast`, or whose weights are stored in float32 or float16, compute in float32,
  because float16 overflows in these decoders. bfloat16 weights compute in bfloat16. `autoencoder.dtype` overrides this:
  bfloat16 has the range of float32 and costs only precision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchditan.config import options
from torchditan.config.optional_libraries import import_optional
from torchditan.errors import ConfigError, first_line, option_error, shorten
from torchditan.extras.autoencoders.autoencoder import Autoencoder
from torchditan.extras.autoencoders.catalogue import CONFIGS, PUBLISHED, Published
from torchditan.extras.autoencoders.hub import find_weights, place_of
from torchditan.models.frozen import hash_of_weights

FILES = ("config.json", "diffusion_pytorch_model.safetensors")
FOLDED_CLASS = "AutoencoderKLFlux2"
IMAGE_CLASSES = ("AutoencoderKL", "AutoencoderDC", FOLDED_CLASS)
VIDEO_CLASSES = ("AutoencoderKLWan", "AutoencoderKLHunyuanVideo", "AutoencoderKLMochi", "AutoencoderKLQwenImage")
CLASSES = (*IMAGE_CLASSES, *VIDEO_CLASSES)


class DiffusersAutoencoder(Autoencoder):
    """An autoencoder of diffusers, already on `device` and in `dtype`; all except AutoencoderDC have a posterior.

    Video autoencoders take (B, 3, F, H, W) and return (B, C, f, h, w). They treat an image as a video of one frame.
    """

    def __init__(self, model: Any, *, fingerprint: str, dtype: torch.dtype, device: torch.device) -> None:
        config = model.config
        self.name = "diffusers"
        self.path = None
        self.fingerprint = fingerprint
        self.is_video = type(model).__name__ in VIDEO_CLASSES
        self.image_channels = 3 if self.is_video else config["in_channels"]  # Mochi's in_channels differs
        self.latent_channels = config.get("latent_channels") or config["z_dim"]
        if self.is_video:
            self.downsampling = model.spatial_compression_ratio
        else:
            widths = config.get("block_out_channels") or config["encoder_block_out_channels"]
            self.downsampling = 2 ** (len(widths) - 1)
        self.dtype = dtype
        self.device = device
        self.has_posterior = type(model).__name__ != "AutoencoderDC"
        self._model = model.eval()

    def drop_decoder(self) -> None:
        del self._model.decoder

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        is_still = self.is_video and images.dim() == 4
        encoded = self._model.encode(images[:, :, None] if is_still else images)
        if not self.has_posterior:
            return encoded.latent, None
        mean, logvar = encoded.latent_dist.mean, encoded.latent_dist.logvar
        return (mean[:, :, 0], logvar[:, :, 0]) if is_still else (mean, logvar)

    def _decode(self, latents: Tensor) -> Tensor:
        if self.is_video and latents.dim() == 4:
            return self._model.decode(latents[:, :, None]).sample[:, :, 0]
        return self._model.decode(latents).sample


class FoldedAutoencoder(DiffusersAutoencoder):
    """The autoencoder of FLUX.2, whose pipelines fold 2 x 2 cells into channels: (B, C, h, w) -> (B, 4C, h / 2, w / 2).

    The four cells of a channel are adjacent, row by row.
    """

    def __init__(self, model: Any, *, fingerprint: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(model, fingerprint=fingerprint, dtype=dtype, device=device)
        self.latent_channels *= 4
        self.downsampling *= 2

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        posterior = self._model.encode(images).latent_dist
        return F.pixel_unshuffle(posterior.mean, 2), F.pixel_unshuffle(posterior.logvar, 2)

    def _decode(self, latents: Tensor) -> Tensor:
        return super()._decode(F.pixel_shuffle(latents, 2))


def read_config(folder: Path, *, classes: Sequence[str] = CLASSES) -> dict[str, Any]:
    """The config.json of an autoencoder of one of these classes of diffusers.

    Raises:
        ConfigError: it is not JSON, or of another class.
    """
    try:
        config = json.loads((folder / FILES[0]).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(folder, f"{FILES[0]} is not JSON ({first_line(error)})") from error
    class_name = config.get("_class_name") if isinstance(config, dict) else None
    if class_name not in classes:
        described = f"describes {class_name or 'a model that is not from diffusers'}; must be {' or '.join(classes)}"
        raise refuse(folder, f"{FILES[0]} {described}")
    return config


def find_described(
    place: str, *, is_meta: bool, classes: Sequence[str], subfolders: Sequence[str] = ("",)
) -> tuple[Path, dict[str, Any]]:
    """The folder with the `FILES` of an autoencoder, and its config.json.

    On the meta device, weights need not be there, and what the catalogue knows is not fetched.
    """
    if is_meta and place in CONFIGS and not Path(place).exists():
        return Path(place), CONFIGS[place]
    folder = find_weights(place, files=FILES[:1] if is_meta else FILES, subfolders=subfolders)
    return folder, read_config(folder, classes=classes)


def _check_layers(config: dict[str, Any], *, num_tensors: int, folder: Path) -> None:
    """Refuse more layers than the file has tensors: diffusers would build them for hours."""
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        if "layers" in key and any(isinstance(count, int) and count > num_tensors for count in counts):
            has = f"has {key} = {shorten(json.dumps(value), most=60)}, and {FILES[1]} has {num_tensors} tensors"
            raise refuse(folder, f"{FILES[0]} {has}")


def _normalization_of(config: dict[str, Any], published: Published | None) -> tuple[Tensor, Tensor] | None:
    """Shift and scale, (C,) or (1,): (z - shift_factor) x scaling_factor, or (z - mean) x scaling_factor / std, as
    diffusers' pipelines do. None if neither the configuration nor the publisher has them."""
    factor, shift = config.get("scaling_factor"), config.get("shift_factor")
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and std is not None:
        mean, std = (torch.tensor(values, dtype=torch.float32).flatten() for values in (mean, std))
        return mean, float(factor or 1.0) / std
    if factor is None and published is not None:
        factor, shift = published.scale, published.shift
    return None if factor is None else (torch.tensor([float(shift or 0.0)]), torch.tensor([float(factor)]))


def _statistics_of(weights: dict[str, Tensor], *, eps: float) -> tuple[Tensor, Tensor]:
    """Shift and scale (C,) float32 of FLUX.2's latents, from its batch normalisation."""
    return weights["bn.running_mean"].float(), (weights["bn.running_var"].float() + eps).rsqrt()


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors, sorted, under the names in current diffusers versions."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(folder / FILES[1])
    except (SafetensorError, OSError, ValueError) as error:
        raise refuse(folder, f"{FILES[1]} is not a complete safetensors file ({first_line(error)})") from error
    return dict(sorted((_name_of_today(name), tensor) for name, tensor in stored.items()))


def _name_of_today(name: str) -> str:
    """Attention layers from 2022, such as those of sd-vae, use other names for the same weights."""
    today = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
    return re.sub(r"(?<=\.)(query|key|value|proj_attn)(?=\.(weight|bias)$)", lambda match: today[match[1]], name)


def _check_weights(weights: dict[str, Tensor], model: Any, *, folder: Path) -> None:
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differing:
        many = f"{len(differing)} tensors are missing, unknown or of other shape, {differing[0]} first"
        raise refuse(folder, f"{FILES[1]} does not match {FILES[0]}: {many}")


def _needed_dtype(weights: dict[str, Tensor], *, force_upcast: bool) -> torch.dtype:
    stored = {weight.dtype for weight in weights.values() if weight.is_floating_point()}
    return torch.bfloat16 if stored == {torch.bfloat16} and not force_upcast else torch.float32


def refuse(folder: Path, right: str) -> ConfigError:
    """The error for a folder that does not hold such an autoencoder; `right` says why."""
    return option_error("autoencoder.path", str(folder), right)


def open_published(
    config: options.Autoencoder, *, device: torch.device, image_channels: int | None
) -> DiffusersAutoencoder:
    """Open the autoencoder in a folder, in the `vae/` of a complete pipeline, or on the hub.

    Raises:
        ConfigError: it is of another class, or weights and config do not match.
    """
    is_meta = device.type == "meta"
    folder, described = find_described(**_place(config), is_meta=is_meta, classes=CLASSES)
    has_weights = (folder / FILES[1]).is_file()
    weights = _read_weights(folder) if has_weights else {}
    if has_weights:
        _check_layers(described, num_tensors=len(weights), folder=folder)
    diffusers = import_optional("diffusers", extra="diffusers")
    kind = getattr(diffusers, described["_class_name"])
    try:
        with torch.device("meta"):
            model = kind.from_config(described)
        normalization = _normalization_of(described, PUBLISHED.get(config.name or ""))
    except Exception as error:  # a wrong value fails anywhere in diffusers
        reader = f"{kind.__name__} of diffusers {diffusers.__version__}"
        raise refuse(folder, f"{FILES[0]} is not accepted by {reader} ({first_line(error)})") from error
    if has_weights:
        _check_weights(weights, model, folder=folder)
    dtype = _needed_dtype(weights, force_upcast=model.config.get("force_upcast", False))
    dtype = dtype if config.dtype is None else getattr(torch, config.dtype)
    if is_meta:
        model.to(dtype)
    else:
        # Copy, because the file is memory-mapped: if someone overwrites it, the process dies of SIGBUS.
        used = {name: weight.to(device, dtype, copy=True) for name, weight in weights.items()}
        model.load_state_dict(used, assign=True)
    opened = DiffusersAutoencoder
    if described["_class_name"] == FOLDED_CLASS:
        opened, eps = FoldedAutoencoder, model.config["batch_norm_eps"]
        normalization = (torch.zeros(1), torch.ones(1)) if is_meta else _statistics_of(weights, eps=eps)
    fingerprint = "" if is_meta else f"diffusers-{hash_of_weights(weights)}"
    autoencoder = opened(model, fingerprint=fingerprint, dtype=dtype, device=device)
    if normalization is not None:
        shift, scale = (values.expand(autoencoder.latent_channels).clone() for values in normalization)
        autoencoder.set_normalization(shift=shift, scale=scale)
    return autoencoder


def find_published(config: options.Autoencoder) -> Path:
    """The folder with the `FILES` of this autoencoder. From the hub, they are downloaded once."""
    return find_weights(**_place(config), files=FILES)


def _place(config: options.Autoencoder) -> dict[str, Any]:
    """Folder or hub name, and the subfolders to look in."""
    place = place_of(config, "a folder that diffusers saved, or a hub name such as stabilityai/sdxl-vae")
    entry = PUBLISHED.get(config.name or "")
    first = "" if entry is None else entry.subfolder
    return {"place": place, "subfolders": list(dict.fromkeys([first, "", "vae"]))}
