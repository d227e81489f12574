# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""LightningDiT (Yao et al. 2025, arXiv 2501.01423): a DiT with RoPE, RMSNorm, SwiGLU and flow matching.

Its time and velocity are ours, with t in [0, 1] in its embedding. It adds the sin-cos table and rotates queries and
keys, both. Which norms and feed-forward layers a model has shows in its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchditan.config.errors import ConfigError
from torchditan.models.dit import DiTConfig, SwiGLU, rope_table
from torchditan.weights.formats import Converted, Given
from torchditan.weights.formats.layout import (
    EMBEDDERS,
    FINAL_LAYER,
    Sizes,
    block_names,
    check_names,
    check_position_table,
    check_table,
    drop_variance,
    read_sizes,
    sample_shape,
    shape_of,
    size_options,
)

_COS, _SIN = "feat_rope.freqs_cos", "feat_rope.freqs_sin"


def convert(tensors: dict[str, Tensor], *, content: Mapping[str, Any], given: Given) -> Converted:
    """Convert a LightningDiT with RoPE; one without the shift of adaLN is refused."""
    has_table = "pos_embed" in tensors
    norm_type = "rmsnorm" if "final_layer.norm_final.weight" in tensors else "np_layernorm"
    qk_norm = "blocks.0.attn.q_norm.weight" in tensors and norm_type == "rmsnorm"
    mlp = "swiglu" if "blocks.0.mlp.w12.weight" in tensors else "gelu"
    check_names(tensors, _names(tensors, norm_type=norm_type, qk_norm=qk_norm, mlp=mlp), format="LightningDiT")
    width = shape_of(tensors, "x_embedder.proj.weight", 4)[0]
    num_tokens, head_dim = shape_of(tensors, _COS, 2)
    sizes = read_sizes(tensors, num_heads=width // head_dim or None, given=given)
    _check_modulation(tensors, sizes)
    shape = sample_shape(sizes, num_tokens, given)
    _check_rope(tensors, sizes, shape)
    position = "rope_sincos" if has_table else "rope"
    notes = [
        "time in [0, 1] (model.timestep_scale 1); t = 1 is data, and the model predicts data - noise, as here",
        f"{norm_type}, {mlp}, queries and keys {'' if qk_norm else 'not '}normalized, positions {position}",
    ]
    if has_table:
        check_position_table(tensors["pos_embed"], sizes, shape)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in (_COS, _SIN)}
    if mlp == "swiglu" and (padded := _pad_hidden(tensors, sizes)) is not None:
        notes.append(padded)
    if drop_variance(tensors, sizes):
        notes.append("dropped the unused outputs of a variance")
    options = {
        "model.preset": "torchditan",
        **size_options(sizes),
        "model.norm_type": norm_type,
        "model.qk_norm": qk_norm,
        "model.mlp": mlp,
        "model.position": position,
        "model.learn_sigma": False,
        "model.timestep_scale": 1.0,
        "diffusion.objective": "flow_matching",
        "diffusion.timestep_sampling": "logit_normal",
        # The publisher's settings for 800 epochs in VA-VAE latents. Its 250 steps are the points of the grid, and its
        # shift 0.3 moves our way as 1 / 0.3.
        "sampling.sampler": "euler",
        "sampling.num_steps": 249,
        "sampling.timestep_shift": 1 / 0.3,
        "sampling.guidance_scale": 6.7,
        "sampling.guidance_interval": [0.125, 1.0],
        "sampling.guidance_channels": min(3, sizes.channels),
    }
    return Converted(tensors, options, shape, sizes.num_classes, tuple(notes))


def _names(tensors: Mapping[str, Tensor], *, norm_type: str, qk_norm: bool, mlp: str) -> set[str]:
    """Names of a model with these layers."""
    layers = ["attn.qkv", "attn.proj", "adaLN_modulation.1"]
    layers += ["mlp.w12", "mlp.w3"] if mlp == "swiglu" else ["mlp.fc1", "mlp.fc2"]
    in_block = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    has_norms = norm_type == "rmsnorm"
    in_block += ["norm1.weight", "norm2.weight"] * has_norms + ["attn.q_norm.weight", "attn.k_norm.weight"] * qk_norm
    others = ["final_layer.norm_final.weight"] * has_norms + ["pos_embed"] * ("pos_embed" in tensors)
    return {*EMBEDDERS, _COS, _SIN, *block_names(tensors, in_block), *FINAL_LAYER, *others}


def _check_modulation(tensors: Mapping[str, Tensor], sizes: Sizes) -> None:
    rows, _ = shape_of(tensors, "blocks.0.adaLN_modulation.1.weight", 2)
    if rows == 4 * sizes.width:
        raise ConfigError("has adaLN without shift (4 chunks, wo_shift), which our blocks do not compute")


def _check_rope(tensors: Mapping[str, Tensor], sizes: Sizes, shape: tuple[int, int, int]) -> None:
    """Compare the stored tables (N, K), one column for each half of a pair, with those that our model computes."""
    config = DiTConfig(
        depth=sizes.depth,
        width=sizes.width,
        num_heads=sizes.num_heads,
        patch_size=sizes.patch_size,
        input_channels=sizes.channels,
        image_size=shape[1:],
        num_classes=sizes.num_classes,
    )
    table = rope_table(config, *shape[1:], device=torch.device("cpu"))  # (N, 1, K / 2, 2)
    for name, ours in zip((_COS, _SIN), table.squeeze(1).unbind(-1), strict=True):
        ours = ours.repeat_interleave(2, dim=1)
        check_table(name, tensors[name], ours, what="the axial RoPE of LightningDiT (row first, base 10,000)")


def _pad_hidden(tensors: dict[str, Tensor], sizes: Sizes) -> str | None:
    """Pad SwiGLU's hidden size to ours with zeros, in place: silu(0) * 0 = 0, so the output stays the same.

    Returns:
        What was done; None if the sizes agree.

    Raises:
        ConfigError: the hidden size is larger than ours.
    """
    with torch.device("meta"):
        ours = SwiGLU(sizes.width).w3.in_features
    _, hidden = shape_of(tensors, "blocks.0.mlp.w3.weight", 2)
    if hidden > ours:
        raise ConfigError(f"has a SwiGLU of hidden size {hidden}; must be at most {ours} for width {sizes.width}")
    if hidden == ours:
        return None
    for number in range(sizes.depth):
        prefix, more = f"blocks.{number}.mlp", ours - hidden
        shapes = [list(tensors[f"{prefix}.{name}"].shape) for name in ("w12.weight", "w12.bias", "w3.weight")]
        if shapes != [[2 * hidden, sizes.width], [2 * hidden], [sizes.width, hidden]]:
            raise ConfigError(f"has {prefix} of other sizes than block 0")
        halves = tensors[f"{prefix}.w12.weight"].unflatten(0, (2, hidden))  # gate, value
        tensors[f"{prefix}.w12.weight"] = F.pad(halves, (0, 0, 0, more)).flatten(0, 1)
        bias = tensors[f"{prefix}.w12.bias"].unflatten(0, (2, hidden))
        tensors[f"{prefix}.w12.bias"] = F.pad(bias, (0, more)).flatten()
        tensors[f"{prefix}.w3.weight"] = F.pad(tensors[f"{prefix}.w3.weight"], (0, more))
    return f"SwiGLU's hidden size {hidden} padded with zeros to {ours}"
