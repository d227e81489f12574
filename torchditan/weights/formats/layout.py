# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reads a DiT's sizes from its tensors, and recognizes other architectures. Shared by the converters."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchditan.config.errors import ConfigError, option_error
from torchditan.models.dit import FLAVORS, TIMESTEP_FREQUENCIES, sincos_position_table
from torchditan.weights.formats import Given

_NUM_SHOWN = 3
_TABLE_TOLERANCE = 5e-3  # a table in bfloat16 is within 4e-3; another order or frequency differs by about 1

EMBEDDERS = (
    "x_embedder.proj.weight",
    "x_embedder.proj.bias",
    "t_embedder.mlp.0.weight",
    "t_embedder.mlp.0.bias",
    "t_embedder.mlp.2.weight",
    "t_embedder.mlp.2.bias",
    "y_embedder.embedding_table.weight",
)
FINAL_LAYER = (
    "final_layer.linear.weight",
    "final_layer.linear.bias",
    "final_layer.adaLN_modulation.1.weight",
    "final_layer.adaLN_modulation.1.bias",
)

_LOOKS = (
    (
        r"transformer_blocks\.0\.attn1\.to_q\.",
        "diffusers",
        "diffusers; give the folder, --format diffusers",
    ),
    (r"projectors\.0\.", "REPA", "REPA; give --format repa"),
    (r"feat_rope\.", "LightningDiT", "LightningDiT; give --format lightningdit"),
    (r"blocks\.0\.mlp\.w12\.", "LightningDiT", "LightningDiT (--format lightningdit), or a model of TorchDiTan"),
    (r"blocks\.0\.cross_attn\.", "", "a DiT with cross-attention to text, which has no converter"),
    (r"blocks\.0\.mlp\.fc1\.", "DiT SiT REPA", "DiT or SiT; give --format dit or --format sit"),
    (r"double_blocks\.0\.", "", "FLUX in its publisher's names; see docs/finetune.md"),
    (r"(model\.diffusion_model\.)?joint_blocks\.0\.", "", "Stable Diffusion 3; see docs/finetune.md"),
    (r"(model\.diffusion_model\.)?input_blocks\.0\.", "", "a U-Net, which has no converter"),
    (r"(first_stage_model\.)?(encoder|decoder)\.", "", "an autoencoder; give it as --autoencoder.path"),
    (r".*lora_", "", "a LoRA, not a model"),
)
"""(start of a name, formats with such names, what a file with it looks like to other formats). The first that fits."""


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


def looks_like(names: Collection[str], *, format: str) -> str:
    """`; it looks like REPA; give --format repa`, or "" if it looks like nothing known, or like `format`."""
    for pattern, formats, text in _LOOKS:
        if any(re.match(pattern, name) for name in names):
            return "" if format in formats.split() else f"; it looks like {text}"
    return ""


def check_names(tensors: Mapping[str, Tensor], expected: Collection[str], *, format: str) -> None:
    """Refuse tensors whose names are not those of the format.

    Raises:
        ConfigError: names are missing or unknown; the message lists some and says what the file looks like.
    """
    missing = sorted(name for name in expected if name not in tensors)
    unknown = [name for name in tensors if name not in expected]
    if missing or unknown:
        parts = [f"lacks {_first(missing)}"] * bool(missing) + [f"has {_first(unknown)}"] * bool(unknown)
        looks = looks_like(tensors, format=format)
        raise ConfigError(f"is not a checkpoint of {format}: it {' and '.join(parts)}{looks}")


def _first(names: list[str]) -> str:
    more = [f"{len(names) - _NUM_SHOWN} more"] if len(names) > _NUM_SHOWN else []
    return ", ".join([*names[:_NUM_SHOWN], *more])


def block_names(tensors: Mapping[str, Tensor], in_block: Collection[str]) -> list[str]:
    """Names of the tensors of all blocks; their number is that of the different indices."""
    return [f"blocks.{number}.{name}" for number in range(max(1, _depth(tensors))) for name in in_block]


def _depth(tensors: Mapping[str, Tensor]) -> int:
    return len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})


def shape_of(tensors: Mapping[str, Tensor], name: str, ndim: int) -> tuple[int, ...]:
    """Shape of a tensor of this number of dimensions, all at least 1.

    Raises:
        ConfigError: it has another one.
    """
    shape = tuple(tensors[name].shape)
    if len(shape) != ndim or 0 in shape:
        raise ConfigError(f"has {name} of shape {list(shape)}; must have {ndim} dimensions of at least 1")
    return shape


def read_sizes(tensors: Mapping[str, Tensor], *, num_heads: int | None, given: Given) -> Sizes:
    """Sizes of a model in DiT's names.

    Args:
        tensors: all names of `EMBEDDERS`, `FINAL_LAYER` and the blocks.
        num_heads: if the tensors show it.
        given: `--num_heads`, otherwise.

    Raises:
        ConfigError: shapes contradict each other, or the number of heads is unknown.
    """
    width, channels, patch_size, other_side = shape_of(tensors, "x_embedder.proj.weight", 4)
    rows, _ = shape_of(tensors, "y_embedder.embedding_table.weight", 2)
    outputs, _ = shape_of(tensors, "final_layer.linear.weight", 2)
    depth = _depth(tensors)
    if patch_size != other_side:
        raise ConfigError(f"has patches of {patch_size} x {other_side}; must be square")
    output_channels, rest = divmod(outputs, patch_size**2)
    if rest or output_channels not in (channels, 2 * channels):
        right = f"must be {patch_size**2 * channels}, or twice as many with a variance"
        raise ConfigError(f"has final_layer.linear.weight with {outputs} rows; {right}")
    shapes = {"final_layer.linear.bias": [outputs], "t_embedder.mlp.0.weight": [width, TIMESTEP_FREQUENCIES]}
    for name, expected in shapes.items():
        if list(tensors[name].shape) != expected:
            raise ConfigError(f"has {name} of shape {list(tensors[name].shape)}; must be {expected}")
    if rows < 2:
        raise ConfigError("has a label table of one row; must have a row per class and one for the null class")
    heads = _num_heads(depth, width, num_heads, given)
    return Sizes(depth, width, heads, patch_size, channels, output_channels, rows - 1)


def _num_heads(depth: int, width: int, found: int | None, given: Given) -> int:
    """The number of heads: of the tensors, of a published size, or given."""
    found = found or _PUBLISHED_SIZES.get((depth, width))
    if given.num_heads is None and found is None:
        right = f"must be given: no published model has {depth} blocks of width {width}"
        raise option_error("--num_heads", None, right)
    heads = given.num_heads or found
    assert heads is not None
    if heads < 1 or width % heads:
        raise option_error("--num_heads", heads, f"must divide the width {width}")
    return heads


_PUBLISHED_SIZES = {(12, 384): 6, (12, 768): 12, (24, 1024): 16, (28, 1152): 16, (24, 1536): 24, (28, 1792): 28}
"""Depth and width -> heads: S, B, L and XL, and LightningDiT's 1p0B and 1p6B (Yao et al. 2025, arXiv 2501.01423)."""


def size_options(sizes: Sizes) -> dict[str, Any]:
    """The options of `[model]` that set these sizes: a flavor, with overrides where no flavor has them."""
    wanted = (sizes.depth, sizes.width, sizes.num_heads)
    count = sizes.depth * sizes.width**2

    def distance(flavor: str) -> float:
        return abs(math.log(FLAVORS[flavor].depth * FLAVORS[flavor].width ** 2 / count))

    flavor = min(FLAVORS, key=distance)
    size = FLAVORS[flavor]
    named = zip(("depth", "width", "num_heads"), wanted, (size.depth, size.width, size.num_heads), strict=True)
    overrides = [f"{name}={value}" for name, value, default in named if value != default]
    return {
        "model.flavor": flavor,
        "model.patch_size": sizes.patch_size,
        **({"model.overrides": overrides} if overrides else {}),
    }


def sample_shape(sizes: Sizes, num_tokens: int | None, given: Given) -> tuple[int, int, int]:
    """(C, H, W) of the model's input, from the number of patches; a given size must have as many.

    Raises:
        ConfigError: the size is unknown, or contradicts the number of patches.
    """
    patch = sizes.patch_size
    if given.sample_size is not None:
        height, width = given.sample_size
        if height % patch or width % patch or num_tokens not in (None, (height // patch) * (width // patch)):
            count = "" if num_tokens is None else f" that give {num_tokens} patches"
            right = f"must be two multiples of {patch}{count}"
            raise option_error("--sample_size", list(given.sample_size), right)
        return sizes.channels, height, width
    side = math.isqrt(num_tokens or 0)
    if num_tokens is None or side**2 != num_tokens:
        why = "the file does not contain it" if num_tokens is None else f"{num_tokens} patches do not form a square"
        raise option_error("--sample_size", None, f"must be given, height and width of the model's input: {why}")
    return sizes.channels, side * patch, side * patch


def check_position_table(table: Tensor, sizes: Sizes, shape: tuple[int, int, int]) -> None:
    """Refuse a table of positions (1, N, D) that is not the paper's, such as a learned one.

    Raises:
        ConfigError: it differs.
    """
    rows, columns = shape[1] // sizes.patch_size, shape[2] // sizes.patch_size
    what = "the sin-cos table of DiT (a learned or another one)"
    if tuple(table.shape) != (1, rows * columns, sizes.width):  # before ours takes as much memory as the file claims
        raise ConfigError(f"has pos_embed that is not {what}; it cannot be imported")
    check_table("pos_embed", table, sincos_position_table(sizes.width, rows, columns).unsqueeze(0), what=what)


def check_table(name: str, table: Tensor, ours: Tensor, *, what: str) -> None:
    """Refuse a stored table that differs from the one that our model computes.

    Raises:
        ConfigError: it differs.
    """
    difference = (table.float() - ours).abs().max().item() if table.shape == ours.shape else math.inf
    if not difference <= _TABLE_TOLERANCE:
        raise ConfigError(f"has {name} that is not {what}; it cannot be imported")


def drop_variance(tensors: dict[str, Tensor], sizes: Sizes) -> bool:
    """Drop the outputs of the variance, in place; return whether there were any. Channels are fastest in a row."""
    if sizes.output_channels == sizes.channels:
        return False
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        rows = tensors[name].unflatten(0, (sizes.patch_size**2, sizes.output_channels))
        tensors[name] = rows[:, : sizes.channels].flatten(0, 1).clone()
    return True


def computed(tensor: Tensor, like: Tensor) -> Tensor:
    """A result in float64, stored as float32 or as the wider type of the original."""
    return tensor.to(torch.promote_types(like.dtype, torch.float32)).contiguous()
