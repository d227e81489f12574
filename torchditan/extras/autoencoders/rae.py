# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""RAE: the patch tokens of a frozen vision encoder as latents, decoded by a ViT (Zheng et al. 2025, arXiv 2510.11690).

Notable:
- a folder in the format of diffusers' `AutoencoderRAE`: DINOv2 with registers, SigLIP 2 or MAE, the decoder, and
  statistics. With `encoder=PLACE`, another vision model of transformers replaces its encoder;
- the encoder's last LayerNorm has no affine parameters. Its tokens are normalised per channel *and* position:
  (z - mean) / std, where the published std is sqrt(variance + 1e-5). This is part of the weights, so `shift` is 0;
- one folder is one image size: images are resized to the encoder's (224 for 256 px: 16 x 16 patches of 14), and the
  decoder draws patches of 16. 512 px has a decoder of its own, whose positions count cells from 0 to 31. diffusers
  0.42 spreads 0 to 16 over any grid, and divides by std + 1e-5;
- transformers loads the encoder, because the tensors' names in published files are those of its earlier versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchditan.checkpoint.safetensors_files import open_file
from torchditan.config import options
from torchditan.config.optional_libraries import import_optional
from torchditan.errors import ConfigError, first_line, option_error
from torchditan.extras.autoencoders.autoencoder import Autoencoder, check_image_channels
from torchditan.extras.autoencoders.hub import place_of
from torchditan.extras.autoencoders.published import FILES, find_described, refuse
from torchditan.extras.saved_models import open_saved
from torchditan.models.dit import sincos_position_table
from torchditan.models.frozen import hash_of_weights
from torchditan.run.hub import fetch

ENCODER_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json")
_CLASS = "AutoencoderRAE"
_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov2": ("Dinov2WithRegisters", {"image_size": 518}),
    "siglip2": ("SiglipVision", {"image_size": 256}),
    "mae": ("ViTMAE", {"image_size": 224, "mask_ratio": 0.0}),
}
"""`encoder_type` -> classes of transformers, and the sizes that diffusers builds them with."""
_HEAD_WIDTH = 64
"""Width of an attention head of these encoders."""
_STATISTICS = ("encoder_mean", "encoder_std", "_latents_mean", "_latents_std")


class RepresentationAutoencoder(Autoencoder):
    """An encoder and a decoder, already on `device` and in `dtype`; statistics are float32.

    Args:
        encoder: gives patch tokens, possibly after CLS and registers.
        decoder: for the same grid of patches.
        encoder_size: pixels along each side of the encoder's input.
        pixels: mean and standard deviation of the encoder's input, (1, 3, 1, 1) of pixels in [0, 1].
        latents: mean and standard deviation of its tokens, (1, C, h, w).
    """

    name = "rae"
    path = None
    image_channels = 3
    has_posterior = False

    def __init__(
        self,
        encoder: nn.Module,
        decoder: Decoder,
        *,
        encoder_size: int,
        pixels: tuple[Tensor, Tensor],
        latents: tuple[Tensor, Tensor],
        fingerprint: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.fingerprint = fingerprint
        self.latent_channels = decoder.channels
        self.downsampling = decoder.patch_size
        self.dtype = dtype
        self.device = device
        self._encoder, self._decoder, self._grid = encoder, decoder, decoder.grid
        self._encoder_size = encoder_size
        self._pixels, self._latents = pixels, latents

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        size = self._grid * self.downsampling
        if (height, width) != (size, size):
            right = f"must be {size}: {self.name} has latents of {self._grid} x {self._grid}"
            raise option_error("dataset.image_size", [height, width], right)
        return super().latent_shape(height, width)

    def drop_decoder(self) -> None:
        del self._decoder

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        pixels, size = images.float() / 2 + 0.5, (self._encoder_size, self._encoder_size)
        if pixels.shape[2:] != size:
            pixels = F.interpolate(pixels, size=size, mode="bicubic", align_corners=False)
        mean, std = self._pixels
        tokens = patch_tokens(self._encoder, ((pixels - mean) / std).to(self.dtype), count=self._grid**2)
        mean, std = self._latents
        return (tokens.float().transpose(1, 2).unflatten(2, (self._grid, -1)) - mean) / std, None  # (B, C, h, w)

    def _decode(self, latents: Tensor) -> Tensor:
        mean, std = self._latents
        tokens = (latents * std + mean).flatten(2).transpose(1, 2)  # (B, N, C)
        mean, std = self._pixels
        pixels: Tensor = self._decoder(tokens.to(self.dtype)).float() * std + mean
        return pixels * 2 - 1


def patch_tokens(encoder: nn.Module, pixels: Tensor, *, count: int) -> Tensor:
    """The last hidden states of the patches, (B, count, C), without CLS and registers, which come first."""
    accepted = inspect.signature(encoder.forward).parameters
    given: dict[str, Any] = {}
    if "interpolate_pos_encoding" in accepted:
        given["interpolate_pos_encoding"] = True
    if "noise" in accepted:  # an MAE sorts its patches by it
        given["noise"] = torch.arange(count, device=pixels.device).expand(len(pixels), -1)
    tokens: Tensor = encoder(pixels, **given).last_hidden_state
    return tokens[:, -count:]


class Decoder(nn.Module):
    """The decoder of an MAE, with diffusers' names of tensors: tokens (B, N, C) -> images (B, 3, H, W).

    Args:
        channels: C of the tokens.
        grid: patches along each side; N is its square.
        patch_size: pixels along each side of a patch.
        width, depth, num_heads, mlp_width: of the blocks.
    """

    decoder_pos_embed: Tensor

    def __init__(
        self, *, channels: int, grid: int, patch_size: int, width: int, depth: int, num_heads: int, mlp_width: int
    ) -> None:
        super().__init__()
        self.channels, self.grid, self.patch_size = channels, grid, patch_size
        self.decoder_embed = nn.Linear(channels, width)
        self.trainable_cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.register_buffer("decoder_pos_embed", torch.zeros(1, 1 + grid**2, width))
        self.decoder_layers = nn.ModuleList(_Block(width, num_heads, mlp_width) for _ in range(depth))
        self.decoder_norm = nn.LayerNorm(width, eps=1e-12)
        self.decoder_pred = nn.Linear(width, 3 * patch_size**2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.cat([self.trainable_cls_token.expand(len(tokens), -1, -1), self.decoder_embed(tokens)], dim=1)
        x = x + self.decoder_pos_embed
        for block in self.decoder_layers:
            x = block(x)
        patches = self.decoder_pred(self.decoder_norm(x[:, 1:]))  # (B, N, rows x columns x 3)
        patches = patches.unflatten(2, (-1, 3)).transpose(2, 3).flatten(2)  # (B, N, 3 x rows x columns)
        return F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, (self.grid, -1)), self.patch_size)


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.layernorm_before = nn.LayerNorm(width, eps=1e-12)
        self.attention: Any = nn.ModuleDict({name: nn.Linear(width, width) for name in ("to_q", "to_k", "to_v")})
        self.attention["to_out"] = nn.ModuleList([nn.Linear(width, width)])
        self.layernorm_after = nn.LayerNorm(width, eps=1e-12)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, mlp_width)})
        self.output = nn.ModuleDict({"dense": nn.Linear(mlp_width, width)})

    def forward(self, x: Tensor) -> Tensor:
        normed = self.layernorm_before(x)
        q, k, v = (
            self.attention[name](normed).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, N, K)
            for name in ("to_q", "to_k", "to_v")
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (B, N, D)
        x = x + self.attention["to_out"][0](mixed)
        return x + self.output["dense"](F.gelu(self.intermediate["dense"](self.layernorm_after(x))))


def position_table(width: int, grid: int) -> Tensor:
    """The decoder's fixed positions, (1, 1 + grid^2, width): those of an MAE, and zeros for the CLS token."""
    return F.pad(sincos_position_table(width, grid, grid), (0, 0, 1, 0))[None]


def open_rae(
    config: options.Autoencoder, *, device: torch.device, image_channels: int | None, encoder: str | None = None
) -> RepresentationAutoencoder:
    """Open the autoencoder in a folder or on the hub.

    Args:
        encoder: folder or hub name of a vision model of transformers, in place of the encoder in the file.

    Raises:
        ConfigError: it is of another class, or weights and config do not match.
    """
    check_image_channels(config, 3, image_channels)  # before any download
    place = place_of(config, "a folder that diffusers saved, or a hub name: nyu-visionx/RAE-dinov2-wReg-base-ViTXL-n08")
    is_meta = device.type == "meta"
    folder, described = find_described(place, is_meta=is_meta, classes=[_CLASS])
    weights = _read_weights(folder / FILES[1]) if (folder / FILES[1]).is_file() else {}  # a plan does without
    of_encoder = {name: weights.pop(name) for name in [*weights] if name.startswith("encoder.")}
    dtype = torch.bfloat16 if {weight.dtype for weight in weights.values()} == {torch.bfloat16} else torch.float32
    dtype = dtype if config.dtype is None else getattr(torch, config.dtype)
    try:
        decoder, statistics = _load_decoder(described, weights, dtype=dtype, folder=folder, is_meta=is_meta)
        if encoder is None:
            vision = _load_encoder(described, of_encoder, dtype=dtype, folder=folder, is_meta=is_meta)
    except ConfigError:
        raise
    except Exception as error:  # a wrong value fails anywhere
        raise refuse(folder, f"{FILES[0]} does not describe an {_CLASS} ({first_line(error)})") from error
    if encoder is not None:
        size = described["encoder_input_size"]
        vision, of_encoder = _open_encoder(encoder, config, decoder, size=size, dtype=dtype, is_meta=is_meta)
    hashed = dict(sorted({**weights, **of_encoder}.items()))
    mean, std, latents_mean, latents_std = (statistics[name].to(device) for name in _STATISTICS)
    autoencoder = RepresentationAutoencoder(
        vision.to(device).eval().requires_grad_(False),
        decoder.to(device).eval().requires_grad_(False),
        encoder_size=described["encoder_input_size"],
        pixels=(mean, std),
        latents=(latents_mean, latents_std),
        fingerprint="" if is_meta else f"rae-{hash_of_weights(hashed)}",
        dtype=dtype,
        device=device,
    )
    ones = torch.ones(decoder.channels)
    autoencoder.set_normalization(shift=0 * ones, scale=described.get("scaling_factor", 1.0) * ones)
    return autoencoder


def _read_weights(file: Path) -> dict[str, Tensor]:
    with open_file(file) as opened:
        return {name: opened.get_tensor(name) for name in sorted(opened.keys())}


def _load_decoder(
    described: dict[str, Any], weights: dict[str, Tensor], *, dtype: torch.dtype, folder: Path, is_meta: bool
) -> tuple[Decoder, dict[str, Tensor]]:
    """The decoder and the statistics, from all tensors that are not the encoder's."""
    size, depth = described["encoder_input_size"], described["decoder_num_hidden_layers"]
    if not is_meta:
        _check_layers(depth, weights, folder=folder)
    with torch.device("meta"):
        decoder = Decoder(
            channels=described["encoder_hidden_size"],
            grid=size // described["encoder_patch_size"],
            patch_size=described["patch_size"],
            width=described["decoder_hidden_size"],
            depth=depth,
            num_heads=described["decoder_num_attention_heads"],
            mlp_width=described["decoder_intermediate_size"],
        )
    if is_meta:
        return decoder.to(dtype), {name: torch.empty(1, device="meta") for name in _STATISTICS}
    shapes = {f"decoder.{name}": tensor.shape for name, tensor in decoder.state_dict().items()}
    found = {"decoder.decoder_pos_embed": position_table(described["decoder_hidden_size"], decoder.grid), **weights}
    statistics = {name: found.pop(name).float() for name in _STATISTICS if name in found}
    differing = {name for name in shapes | found if name not in found or shapes.get(name) != found[name].shape}
    _check_names({*differing, *_STATISTICS} - statistics.keys(), folder=folder)
    # Copy, because the file is memory-mapped: if someone overwrites it, the process dies of SIGBUS.
    used = {name.removeprefix("decoder."): weight.to(dtype, copy=True) for name, weight in found.items()}
    decoder.load_state_dict(used, assign=True)
    for name in _STATISTICS:
        shape = (1, decoder.channels, decoder.grid, decoder.grid) if "latents" in name else (1, 3, 1, 1)
        statistics[name] = statistics[name].expand(shape).clone()
    return decoder, statistics


def _load_encoder(
    described: dict[str, Any], weights: dict[str, Tensor], *, dtype: torch.dtype, folder: Path, is_meta: bool
) -> nn.Module:
    """The encoder in the file, under the names of any version of transformers."""
    kind, sizes = _ENCODERS[described["encoder_type"]]
    width, depth = described["encoder_hidden_size"], described["encoder_num_hidden_layers"]
    transformers = _transformers()
    settings = getattr(transformers, f"{kind}Config")(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // _HEAD_WIDTH,
        patch_size=described["encoder_patch_size"],
        **sizes,
    )
    model_class = getattr(transformers, f"{kind}Model")
    if is_meta:
        with torch.device("meta"):
            encoder = model_class(settings).to(dtype)
        _remove_affine(encoder)
        return encoder
    _check_layers(depth, weights, folder=folder)
    used = {name.removeprefix("encoder."): weight.to(dtype, copy=True) for name, weight in weights.items()}
    encoder, info = model_class.from_pretrained(
        None, config=settings, state_dict=used, dtype=dtype, output_loading_info=True
    )
    removed = _remove_affine(encoder)
    _check_names(info["unexpected_keys"] | (info["missing_keys"] - removed), folder=folder)
    return encoder


def _open_encoder(
    place: str, config: options.Autoencoder, decoder: Decoder, *, size: int, dtype: torch.dtype, is_meta: bool
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A vision model that transformers saved, and its stored weights."""
    patterns, count = ENCODER_FILES[:1] if is_meta else ENCODER_FILES, decoder.grid**2
    folder = fetch(place, patterns=patterns, what="a vision model", option="autoencoder.name")

    def refuse_encoder(right: str) -> ConfigError:
        return option_error("autoencoder.name", config.name, f"{place} {right}")

    model = open_saved(folder, refuse=refuse_encoder, dtype=dtype, is_meta=is_meta)
    encoder = getattr(model, "vision_model", model).to(dtype)  # of CLIP and its relatives
    try:
        _remove_affine(encoder)
        with torch.no_grad(), torch.device("meta" if is_meta else "cpu"):
            tokens = patch_tokens(encoder, torch.zeros(1, 3, size, size, dtype=dtype), count=count)
    except Exception as error:  # a model of something else fails anywhere
        raise refuse_encoder(f"does not encode an image ({first_line(error)})") from error
    if tokens.shape[1:] != (count, decoder.channels):
        found = " of ".join(map(str, tokens.shape[1:]))
        raise refuse_encoder(f"gives {found} values at {size} px; the decoder reads {count} of {decoder.channels}")
    files = [] if is_meta else sorted(folder.glob(ENCODER_FILES[1]))
    return encoder, {f"encoder.{name}": weight for file in files for name, weight in _read_weights(file).items()}


def _remove_affine(encoder: nn.Module) -> set[str]:
    """Remove the parameters of the last LayerNorm, the outermost one, and return their names."""
    norms = {name: module for name, module in encoder.named_modules() if isinstance(module, nn.LayerNorm)}
    last = min(reversed(norms), key=lambda name: name.count("."))
    norms[last].weight = norms[last].bias = None  # type: ignore[assignment]
    return {f"{last}.weight", f"{last}.bias"}


def _transformers() -> Any:
    transformers = import_optional("transformers", extra="text")
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _check_layers(depth: int, weights: Mapping[str, Tensor], *, folder: Path) -> None:
    """Refuse more layers than the file has tensors, which would be built for hours."""
    if depth > len(weights):
        raise refuse(folder, f"{FILES[0]} has {depth} layers, and {FILES[1]} only {len(weights)} tensors for them")


def _check_names(differing: set[str], *, folder: Path) -> None:
    if differing:
        many = f"{len(differing)} tensors are missing, unknown or of other shape, {min(differing)} first"
        raise refuse(folder, f"{FILES[1]} does not match {FILES[0]}: {many}")
