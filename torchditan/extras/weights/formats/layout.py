# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What the converters share: a DiT's sizes from the shapes of its tensors, and the result.

A converter checks only what names and shapes do not show, such as a table of positions. `converted` compares all names
and shapes with our model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchditan.checkpoint.weights import Weights
from torchditan.config.loader import build_config, to_dict
from torchditan.errors import ConfigError, option_error
from torchditan.models import model_spec_of
from torchditan.models.dit import FLAVORS, DiTConfig, SwiGLU, rope_table, sincos_position_table

LABEL_TABLE = "y_embedder.embedding_table.weight"
_TABLE_TOLERANCE = 5e-3  # a table in bfloat16 is within 4e-3; another order or frequency differs by about 1
_PUBLISHED_HEADS = {(12, 384): 6, (12, 768): 12, (24, 1024): 16, (28, 1152): 16, (24, 1536): 24, (28, 1792): 28}
"""Depth and width -> heads: S, B, L and XL, and LightningDiT's 1p0B and 1p6B (Yao et al. 2025, arXiv 2501.01423)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a DiT, read from the shapes of its tensors."""

    depth: int
    width: int
    num_heads: int
    patch_size: int
    channels: int
    output_channels: int
    num_classes: int

    @property
    def learns_sigma(self) -> bool:
        return self.output_channels > self.channels


def num_blocks(names: Iterable[str], prefix: str = "blocks") -> int:
    """The number of different indices in `blocks.0.`, `blocks.1.`, ..."""
    return len({match[1] for name in names if (match := re.match(rf"{prefix}\.(\d+)\.", name))})


def read_sizes(tensors: Mapping[str, Tensor], *, num_heads: int | None) -> Sizes:
    """Sizes of a model in DiT's names. `num_heads` is required if depth and width are not those of a published size.

    Raises:
        ConfigError: the number of heads is unknown.
    """
    width, channels, patch_size, _ = tensors["x_embedder.proj.weight"].shape
    depth = num_blocks(tensors)
    num_heads = num_heads or _PUBLISHED_HEADS.get((depth, width))
    if num_heads is None:
        right = f"must be given: no published model has {depth} blocks of width {width}"
        raise option_error("--num_heads", None, right)
    return Sizes(
        depth=depth,
        width=width,
        num_heads=num_heads,
        patch_size=patch_size,
        channels=channels,
        output_channels=len(tensors["final_layer.linear.weight"]) // patch_size**2,
        num_classes=len(tensors[LABEL_TABLE]) - 1,
    )


def sample_size_of(sizes: Sizes, num_patches: int, sample_size: tuple[int, int] | None) -> tuple[int, int]:
    """Height and width of the model's input: those given, or those of a square with this number of patches.

    Raises:
        ConfigError: they do not form a square.
    """
    if sample_size is not None:
        return sample_size
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        right = f"must be given, height and width of the model's input: {num_patches} patches do not form a square"
        raise option_error("--sample_size", None, right)
    return side * sizes.patch_size, side * sizes.patch_size


def check_position_table(table: Tensor, sizes: Sizes, size: tuple[int, int]) -> None:
    """Refuse a table of positions (1, N, D) that is not the paper's, such as a learned one.

    Raises:
        ConfigError: it differs.
    """
    rows, columns = size[0] // sizes.patch_size, size[1] // sizes.patch_size
    ours = torch.empty(0)
    if table.shape == (1, rows * columns, sizes.width):  # before ours takes as much memory as the file claims
        ours = sincos_position_table(sizes.width, rows, columns).unsqueeze(0)
    check_table("pos_embed", table, ours, what="the sin-cos table of DiT (a learned or another one)")


def check_table(name: str, table: Tensor, ours: Tensor, *, what: str) -> None:
    """Refuse a stored table that differs from the one that our model computes.

    Raises:
        ConfigError: it differs.
    """
    if table.shape != ours.shape or not (table.float() - ours).abs().max() <= _TABLE_TOLERANCE:
        raise ConfigError(f"has {name} that is not {what}; it cannot be imported")


def check_rope(tables: dict[str, Tensor], sizes: Sizes, size: tuple[int, int]) -> None:
    """Compare the stored tables (N, K), one column for each half of a pair, with those that our model computes."""
    config = DiTConfig(
        depth=sizes.depth,
        width=sizes.width,
        num_heads=sizes.num_heads,
        patch_size=sizes.patch_size,
        input_channels=sizes.channels,
        image_size=size,
        num_classes=sizes.num_classes,
    )
    ours = rope_table(config, *size, device=torch.device("cpu"))  # (N, 1, K / 2, 2)
    for (name, table), part in zip(tables.items(), ours.squeeze(1).unbind(-1), strict=True):
        what = "the axial RoPE of LightningDiT (row first, base 10,000)"
        check_table(name, table, part.repeat_interleave(2, dim=1), what=what)


def pad_hidden(tensors: dict[str, Tensor], numbers: Iterable[int], width: int) -> list[str]:
    """Pad SwiGLU's hidden size to ours with zeros, in place: silu(0) * 0 = 0, so the output stays the same.

    Args:
        tensors: under our names.
        numbers: of blocks of this width.
        width: of the model.

    Returns:
        What was done.

    Raises:
        ConfigError: the hidden size is larger than ours.
    """
    with torch.device("meta"):
        ours = SwiGLU(width).w3.in_features
    prefixes = [f"blocks.{number}.mlp" for number in numbers]
    _, hidden = tensors[f"{prefixes[0]}.w3.weight"].shape
    if hidden > ours:
        raise ConfigError(f"has a SwiGLU of hidden size {hidden}; must be at most {ours} for width {width}")
    if hidden == ours:
        return []
    more = ours - hidden
    for prefix in prefixes:
        halves = tensors[f"{prefix}.w12.weight"].unflatten(0, (2, hidden))  # gate, value
        tensors[f"{prefix}.w12.weight"] = F.pad(halves, (0, 0, 0, more)).flatten(0, 1)
        bias = tensors[f"{prefix}.w12.bias"].unflatten(0, (2, hidden))
        tensors[f"{prefix}.w12.bias"] = F.pad(bias, (0, more)).flatten()
        tensors[f"{prefix}.w3.weight"] = F.pad(tensors[f"{prefix}.w3.weight"], (0, more))
    return [f"SwiGLU's hidden size {hidden} padded with zeros to {ours}"]


def drop_variance(tensors: dict[str, Tensor], sizes: Sizes) -> list[str]:
    """Drop the outputs of the variance, in place. Channels are fastest in a row. Returns what was done."""
    if not sizes.learns_sigma:
        return []
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        rows = tensors[name].unflatten(0, (sizes.patch_size**2, sizes.output_channels))
        tensors[name] = rows[:, : sizes.channels].flatten(0, 1).clone()
    return ["dropped the unused outputs of a variance"]


def converted(
    source: Weights,
    tensors: dict[str, Tensor],
    sizes: Sizes,
    size: tuple[int, int],
    options: Mapping[str, Any],
    notes: Iterable[str],
) -> Weights:
    """The weights under our names, with the configuration of a model with these sizes.

    Args:
        source: as stored.
        tensors: under our names.
        size: height and width of the model's input.
        options: those with which our model computes the same, besides the sizes: `{"model.preset": "official", ...}`.
        notes: what was converted, one phrase each.

    Raises:
        ConfigError: names or shapes are not those of our model.
    """
    config = build_config(
        {
            **size_options(sizes),
            "model.input_channels": sizes.channels,
            "model.sample_size": list(size),
            "dataset.num_classes": sizes.num_classes,
            **options,
        }
    )
    found = source.with_tensors(tensors, config=to_dict(config), notes=tuple(notes))
    spec = model_spec_of(config, sample_shape=(sizes.channels, *size), num_classes=sizes.num_classes)
    with torch.device("meta"):
        found.check(spec.build())
    return found


def size_options(sizes: Sizes) -> dict[str, Any]:
    """The options of `[model]` that set these sizes: a flavor, with overrides where no flavor has them."""
    count = sizes.depth * sizes.width**2

    def distance(flavor: str) -> float:
        return abs(math.log(FLAVORS[flavor].depth * FLAVORS[flavor].width ** 2 / count))

    flavor = min(FLAVORS, key=distance)
    wrong = [name for name in ("depth", "width", "num_heads") if getattr(sizes, name) != getattr(FLAVORS[flavor], name)]
    overrides = [f"{name}={getattr(sizes, name)}" for name in wrong]
    return {"model.flavor": flavor, "model.patch_size": sizes.patch_size, "model.overrides": overrides}
