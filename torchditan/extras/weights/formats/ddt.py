# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""DDT (Wang et al. 2025, arXiv 2504.05741) and DiT-DH (Zheng et al. 2025, arXiv 2510.11690), as `model.name = "ddt"`.

How DDT differs from the model of extras/methods/ddt.py (read in its public code):
- a layer of modulation has no SiLU inside, so its linear layer is number 0, not 1;
- queries, keys, values and the feed-forward layers have no bias. Ours are zeros;
- its pairs of RoPE alternate between column and row. Ours are first all rows. It places 16 at the last row and column;
- a patch is flattened channels first.

In DiT-DH t = 1 is noise and the model predicts noise - data. Both are reversed in the weights, exactly, as for REPA.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchditan.checkpoint.weights import Weights
from torchditan.extras.weights.formats.dit import reverse_time
from torchditan.extras.weights.formats.layout import (
    LABEL_TABLE,
    Sizes,
    check_position_table,
    check_rope,
    converted,
    num_blocks,
    pad_hidden,
    sample_size_of,
)

_EMA, _RAW = "ema_denoiser.", "denoiser."
"""Prefixes in a training file of DDT."""
_SHIFT_BASE = 4096
"""Number of values per sample at which DiT-DH does not shift timesteps."""
_OPTIONS = {
    "model.preset": "torchditan",
    "model.learn_sigma": False,
    "model.timestep_scale": 1.0,
    "diffusion.objective": "flow_matching",
    "sampling.sampler": "euler",
}


def convert_ddt(
    source: Weights, *, sample_size: tuple[int, int] | None = None, head_depth: int = 6, patch_size: int = 2
) -> Weights:
    """Convert a DDT.

    Args:
        source: the names of its model, alone or in a training file.
        sample_size: None: 32 x 32, for images of 256 x 256.
        head_depth: number of blocks of the head, which no tensor shows.
        patch_size: which no tensor shows either.
    """
    names = source.shapes
    prefix = next((each for each in (_EMA, _RAW) if any(name.startswith(each) for name in names)), "")
    tensors = {
        name.removeprefix(prefix): tensor for name, tensor in source.tensors().items() if name.startswith(prefix)
    }
    tensors = {name.replace("adaLN_modulation.0.", "adaLN_modulation.1."): value for name, value in tensors.items()}
    depth, (head_dim,) = num_blocks(tensors), tensors["blocks.0.attn.q_norm.weight"].shape
    for embedder in ("s_embedder", "x_embedder"):
        weight = tensors[f"{embedder}.proj.weight"]
        tensors[f"{embedder}.proj.weight"] = weight.unflatten(1, (-1, patch_size, patch_size))
    width, channels, _, _ = tensors["s_embedder.proj.weight"].shape
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        tensors[name] = tensors[name].unflatten(0, (channels, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    for number in range(depth):
        _convert_block(tensors, f"blocks.{number}", head_dim)
    sizes = Sizes(
        depth=depth - head_depth,
        width=width,
        num_heads=width // head_dim,
        patch_size=patch_size,
        channels=channels,
        output_channels=channels,
        num_classes=len(tensors[LABEL_TABLE]) - 1,
    )
    notes = [
        f"{sizes.depth} blocks of the encoder and {head_depth} of the head",
        "time in [0, 1] (model.timestep_scale 1); t = 1 is data, and the model predicts data - noise, as here",
        "queries and keys in our order of RoPE; biases of zero for its layers without",
        "the last step of its sampler is longer than the others; here all are equal",
        *pad_hidden(tensors, range(depth), width),
    ]
    tensors = _name_head(tensors, sizes.depth)
    options = {
        **_OPTIONS,
        "model.name": f"ddt head_depth={head_depth} final_norm=np_layernorm rope_extent=16",
        "model.timestep_frequencies": "ddt",
        "diffusion.timestep_sampling": "logit_normal",
        "sampling.num_steps": 250,
        "sampling.guidance_scale": 2.0,
        "sampling.guidance_interval": [0.3, 1.0],
    }
    return converted(source, tensors, sizes, sample_size or (32, 32), options, notes)


def _convert_block(tensors: dict[str, Tensor], block: str, head_dim: int) -> None:
    """Give a block of DDT our names and our order, in place."""
    order = torch.arange(head_dim).view(-1, 2, 2)[:, [1, 0]].transpose(0, 1).flatten()  # rows, then columns
    qkv = tensors[f"{block}.attn.qkv.weight"].unflatten(0, (3, -1, head_dim)).clone()
    qkv[:2] = qkv[:2, :, order]
    tensors[f"{block}.attn.qkv.weight"] = qkv.flatten(0, 2)
    for norm in ("q_norm", "k_norm"):
        tensors[f"{block}.attn.{norm}.weight"] = tensors[f"{block}.attn.{norm}.weight"][order]
    gate, value, last = (tensors.pop(f"{block}.mlp.{name}.weight") for name in ("w1", "w3", "w2"))
    tensors[f"{block}.mlp.w12.weight"], tensors[f"{block}.mlp.w3.weight"] = torch.cat([gate, value]), last
    for layer in ("attn.qkv", "mlp.w12", "mlp.w3"):
        weight = tensors[f"{block}.{layer}.weight"]
        tensors[f"{block}.{layer}.bias"] = weight.new_zeros(len(weight))


def _name_head(tensors: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Name the blocks after those of the encoder as ours: `head_blocks.0` for `blocks.22`."""

    def name_of(block: re.Match[str]) -> str:
        return f"head_blocks.{int(block[1]) - depth}" if int(block[1]) >= depth else block[0]

    return {re.sub(r"^blocks\.(\d+)", name_of, name): tensor for name, tensor in tensors.items()}


def convert_dit_dh(source: Weights, *, sample_size: tuple[int, int] | None = None) -> Weights:
    """Convert a DiT-DH of RAE. The blocks of the head are those of another width than the first one."""
    tensors = source.tensors()
    rope, head_rope = (
        {name: tensors.pop(name) for name in (f"{part}_feat_rope.freqs_cos", f"{part}_feat_rope.freqs_sin")}
        for part in ("enc", "dec")
    )
    widths = [len(tensors[f"blocks.{number}.attn.proj.bias"]) for number in range(num_blocks(tensors))]
    head_width, channels, patch_size, _ = tensors["x_embedder.proj.weight"].shape
    depth = widths.index(head_width)
    num_patches, head_dim = rope["enc_feat_rope.freqs_cos"].shape
    sizes = Sizes(
        depth=depth,
        width=widths[0],
        num_heads=widths[0] // head_dim,
        patch_size=patch_size,
        channels=channels,
        output_channels=channels,
        num_classes=len(tensors[LABEL_TABLE]) - 1,
    )
    head = replace(sizes, width=head_width, num_heads=head_width // head_rope["dec_feat_rope.freqs_cos"].shape[1])
    size = sample_size_of(sizes, num_patches, sample_size)
    check_rope(rope, sizes, size)
    check_rope(head_rope, head, size)
    check_position_table(tensors["pos_embed"], sizes, size)
    tensors["t_embedder.gaussian"] = tensors.pop("t_embedder.W")
    of_sin, of_cos = tensors["t_embedder.mlp.0.weight"].chunk(2, dim=1)
    tensors["t_embedder.mlp.0.weight"] = torch.cat([of_cos, of_sin], dim=1)
    reverse_time(tensors, frequency=2 * math.pi * tensors["t_embedder.gaussian"].double())
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        tensors[name] = -tensors[name]
    notes = [
        f"{depth} blocks of the encoder and {len(widths) - depth} of the head",
        "time reversed in t_embedder.mlp.0.weight: t = 1 is data here (model.timestep_scale 1)",
        "velocity negated in final_layer.linear: data - noise here",
        *pad_hidden(tensors, range(depth), sizes.width),
        *pad_hidden(tensors, range(depth, len(widths)), head_width),
    ]
    tensors = _name_head(tensors, depth)
    name = f"ddt head_depth={len(widths) - depth} head_width={head_width} head_heads={head.num_heads}"
    options: dict[str, Any] = {
        **_OPTIONS,
        "model.name": name,
        "model.qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "model.position": "rope_sincos",
        "model.timestep_frequencies": "gaussian",
        "diffusion.timestep_sampling": "uniform",
        "diffusion.timestep_shift": math.sqrt(channels * size[0] * size[1] / _SHIFT_BASE),
        # Its 50 steps are the points of the grid.
        "sampling.num_steps": 49,
        "sampling.guidance_scale": 1.0,
    }
    return converted(source, tensors, sizes, size, options, notes)
