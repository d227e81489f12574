# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Features of images at the positions of the model's tokens, from a frozen encoder.

Notable:
- an encoder is a vision model of transformers, by folder or hub name, or `efficientnet-lite0`, whose weights come in a
  pip package;
- a model of transformers gets images of the size, mean and standard deviation of its preprocessor_config.json. CLS and
  register tokens, which come before the patches, are dropped;
- EfficientNet-Lite0 gets 16 pixels per token, so that its map at 1/16 has the model's tokens;
- cached features are float16, one entry for each training sample and its mirror image, by its content;
- other grids are resized to that of the tokens, bilinearly.

Shapes: B images, C features, N = h x w tokens of the diffusion model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchditan.data_stream.datasets import CorruptImageError, ImageDataset, images_of
from torchditan.errors import ConfigError, first_line, option_error
from torchditan.extras.captions.encode import Entries, encode_missing, silence_libraries
from torchditan.extras.saved_models import open_saved
from torchditan.extras.tensor_cache import TensorCache, hash_of
from torchditan.models.frozen import FrozenNetwork, LookUp, Target, hash_of_weights
from torchditan.run.hub import fetch
from torchditan.run.progress import report_progress

OPTION = "diffusion.ingredients"
EFFICIENTNET = "efficientnet-lite0"
_IMAGES_AT_ONCE = 64
_SETTINGS = ("config.json", "preprocessor_config.json")
_UNUSED = "pooler."
"""Start of the names of weights that features do not need, and that transformers draws if the file lacks them."""
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class ImageFeatures(Target):
    """(N, C) of each image.

    Args:
        network: the encoder.
        grid: (h, w), the model's tokens.
        is_cached: see `Target`.
    """

    network: str
    grid: tuple[int, int]
    is_cached: bool = False

    def open(self, device: torch.device, dtype: torch.dtype) -> FrozenNetwork:
        is_meta = device.type == "meta"
        if self.network == EFFICIENTNET:
            encoder = _open_efficientnet(self.grid, is_meta=is_meta)
        else:
            encoder = _open_transformers(self.network, is_meta=is_meta)
        weights = {name: value for name, value in encoder.module.state_dict().items() if not name.startswith(_UNUSED)}
        identity = "" if is_meta else hash_of_weights(weights, *encoder.settings)
        module = encoder.module.to(dtype=dtype).to(device).eval().requires_grad_(False)

        def compute(images: Tensor) -> Tensor:
            images = encoder.prepare(images.float().expand(-1, 3, -1, -1))
            return to_tokens(encoder.encode(module, images.to(dtype)).float(), self.grid)

        return FrozenNetwork(module, compute, identity)

    def fill_cache(
        self,
        dataset: Any,
        *,
        network: FrozenNetwork,
        flips: bool,
        folder: Path,
        rank: Any,
        timeout_seconds: float,
    ) -> LookUp:
        dtype = next(network.module.parameters()).dtype
        cache = TensorCache(folder, hash_of(network.identity, str(self.grid), str(dtype))[:16])
        wanted = dict(_keys(dataset, flips=flips))
        if rank.rank == 0:
            images = f"{len(wanted):,} images{', half of them mirrored' if flips else ''}"
            mib = len(wanted) * math.prod(self.tensor.shape) * self.tensor.dtype.itemsize / 2**20
            print(f"features of {self.network} for {images}: {mib:,.1f} MiB in {cache.folder}", flush=True)

        def encode(images: list[tuple[str, int, bool]]) -> Entries:
            samples = [images_of(dataset[index]).flip([-1] if is_flipped else []) for _, index, is_flipped in images]
            features = network(torch.stack(samples).to(rank.device)).to(self.tensor.dtype)
            return {key: {"features": row} for (key, *_), row in zip(images, features, strict=True)}

        encode_missing(
            cache,
            wanted,
            what="features",
            rank=rank,
            open_encoder=lambda: encode,
            at_once=_IMAGES_AT_ONCE,
            timeout_seconds=timeout_seconds,
        )
        return CachedFeatures(cache)


class Encoder(NamedTuple):
    """A network with its weights on the CPU, or on the meta device."""

    module: Any
    prepare: Callable[[Tensor], Tensor]
    """Images (B, 3, H, W) in [-1, 1] -> input of the network."""
    encode: Callable[[Any, Tensor], Tensor]
    """Network, input -> (B, C, h', w')."""
    settings: tuple[object, ...]
    """What decides the result besides the weights."""


class CachedFeatures:
    """Features by the content of samples (B, C, H, W), from a complete cache."""

    def __init__(self, cache: TensorCache) -> None:
        self.cache = cache

    def __call__(self, samples: Tensor) -> Tensor:
        keys = [key_of(sample) for sample in samples]
        if not all(key in self.cache for key in keys):
            raise ConfigError("an image has changed since its features were cached; start again, to encode it")
        return torch.stack([self.cache[key]["features"] for key in keys])


def key_of(sample: Tensor) -> str:
    """Of the content of a sample."""
    return hash_of(hashlib.sha256(sample.contiguous().numpy().data).hexdigest(), str(tuple(sample.shape)))


def _keys(dataset: ImageDataset, *, flips: bool) -> Iterator[tuple[str, tuple[str, int, bool]]]:
    """The key of each training sample, with (key, index, whether it is mirrored). Unreadable images have none."""
    with report_progress("reading images, to cache their features", total=len(dataset), unit="images") as advance:
        for index in range(len(dataset)):
            with suppress(CorruptImageError):  # `dataset.corrupt_images` decides when it is trained on
                sample = images_of(dataset[index])
                for is_flipped in (False, True)[: 1 + flips]:
                    key = key_of(sample.flip([-1] if is_flipped else []))
                    yield key, (key, index, is_flipped)
            advance(1)


def to_tokens(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, C, h', w') -> (B, h * w, C); another grid is resized bilinearly."""
    if features.shape[2:] != grid:
        features = F.interpolate(features, grid, mode="bilinear", align_corners=False, antialias=True)
    return features.flatten(2).transpose(1, 2)


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    if images.shape[2:] == size:
        return images
    return F.interpolate(images, size, mode="bicubic", align_corners=False, antialias=True)


def _open_efficientnet(grid: tuple[int, int], *, is_meta: bool) -> Encoder:
    from torchditan.extras.evaluation.efficientnet_lite import EfficientNetLite0, load_efficientnet_lite0

    if is_meta:
        with torch.device("meta"):
            network = EfficientNetLite0()
    else:
        network = load_efficientnet_lite0()
    network.keep_sixteenth()
    size = (16 * grid[0], 16 * grid[1])

    def prepare(images: Tensor) -> Tensor:
        images = (resize(images, size) * 127.5 + 0.5) / 128  # as `preprocess` of 8-bit images
        return images.contiguous(memory_format=torch.channels_last)

    return Encoder(network, prepare, EfficientNetLite0.sixteenth, (size,))


def _open_transformers(place: str, *, is_meta: bool) -> Encoder:
    """A vision model with its preprocessing.

    Raises:
        ConfigError: it does not open, lacks weights, or gives no features of patches.
    """
    silence_libraries("transformers")
    patterns = _SETTINGS if is_meta else (*_SETTINGS, *_WEIGHTS)
    folder = fetch(place, patterns=patterns, what="image encoders", option=OPTION)
    if not (folder / _SETTINGS[0]).is_file():
        right = f"must be {EFFICIENTNET}, or a folder or hub name of a vision model of transformers (config.json)"
        raise _refuse(place, right)
    size, mean, std = _read_preprocessing(folder, place)
    network = open_saved(folder, refuse=functools.partial(_refuse, place), is_meta=is_meta)
    network = getattr(network, "vision_model", network)  # of CLIP and SigLIP
    patch_size = getattr(network.config, "patch_size", None)

    @functools.lru_cache
    def constants(on: torch.device) -> tuple[Tensor, Tensor]:
        return tuple(torch.tensor(values, device=on).view(1, 3, 1, 1) for values in (mean, std))  # type: ignore[return-value]

    def prepare(images: Tensor) -> Tensor:
        shift, scale = constants(images.device)
        return (resize(images, (size, size)) * 0.5 + 0.5 - shift) / scale

    def encode(network: Any, images: Tensor) -> Tensor:
        return _on_grid(network(pixel_values=images).last_hidden_state, size, patch_size, place)

    if is_meta:  # a refusal comes before weights are read
        try:
            with torch.no_grad():
                hidden = network(pixel_values=torch.empty(1, 3, size, size, device="meta")).last_hidden_state
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:  # of a model of something else
            raise _refuse(place, f"does not encode an image: {first_line(error)}") from error
        _on_grid(hidden, size, patch_size, place)
    return Encoder(network, prepare, encode, (size, mean, std))


def _read_preprocessing(folder: Path, place: str) -> tuple[int, list[float], list[float]]:
    """Side of the square images that the encoder reads, and mean and standard deviation of its channels."""
    try:
        found = json.loads((folder / _SETTINGS[1]).read_text(encoding="utf-8-sig"))
        sides: Any = found.get("crop_size") or found["size"]
        side = sides if isinstance(sides, int) else int(sides.get("height") or sides["shortest_edge"])
        mean, std = ([float(value) for value in found[name]] for name in ("image_mean", "image_std"))
        if len(mean) != 3 or len(std) != 3 or side < 1 or not all(value > 0 for value in std):
            raise ValueError("not of three channels")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        right = f"has no {_SETTINGS[1]} with size, image_mean and image_std, as transformers saves it"
        raise _refuse(place, right) from None
    return side, mean, std


def _on_grid(hidden: Tensor, size: int, patch_size: Any, place: str) -> Tensor:
    """The last hidden states, (B, T, C) or those of a convolutional network, as (B, C, h', w')."""
    if hidden.dim() == 4:
        return hidden
    num_tokens, side = hidden.shape[1], math.isqrt(hidden.shape[1])
    if isinstance(patch_size, int) and num_tokens >= (size // patch_size) ** 2:
        side = size // patch_size  # what comes before are CLS and register tokens
    elif side**2 != num_tokens:
        raise _refuse(place, f"gives {num_tokens} tokens for {size} x {size} pixels, which are not a grid of patches")
    return hidden[:, num_tokens - side**2 :].transpose(1, 2).unflatten(2, (side, side))


def _refuse(place: str, right: str) -> ConfigError:
    return option_error(OPTION, f"encoder={place}", right)
