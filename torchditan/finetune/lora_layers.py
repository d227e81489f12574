# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Names of the layers of FLUX and SD3 in their original models, and how rows of diffusers' layers make them up."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_EMBEDDER_PARTS = {"linear_1": "in_layer", "linear_2": "out_layer"}
_QKV = ("to_q", "to_k", "to_v")
_ADDED_QKV = ("add_q_proj", "add_k_proj", "add_v_proj")

_FLUX_DOUBLE = {
    "img_attn.qkv": tuple(f"attn.{name}" for name in _QKV),
    "txt_attn.qkv": tuple(f"attn.{name}" for name in _ADDED_QKV),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
}
_FLUX_SINGLE = {
    "linear1": (*(f"attn.{name}" for name in _QKV), "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
}
_FLUX_REST = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    **{
        f"{original}.{_EMBEDDER_PARTS[linear]}": (f"time_text_embed.{name}.{linear}",)
        for original, name in (
            ("time_in", "timestep_embedder"),
            ("guidance_in", "guidance_embedder"),
            ("vector_in", "text_embedder"),
        )
        for linear in _EMBEDDER_PARTS
    },
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
_SD3_JOINT = {
    "x_block.attn.qkv": tuple(f"attn.{name}" for name in _QKV),
    "x_block.attn2.qkv": tuple(f"attn2.{name}" for name in _QKV),
    "context_block.attn.qkv": tuple(f"attn.{name}" for name in _ADDED_QKV),
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "context_block.attn.proj": ("attn.to_add_out",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
}
_SD3_REST = {
    "x_embedder.proj": ("pos_embed.proj",),
    "context_embedder": ("context_embedder",),
    "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
    "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
    "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}


def _with_prefixes(original: str, ours: str, layers: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {f"{original}.{name}": tuple(f"{ours}.{part}" for part in parts) for name, parts in layers.items()}


ORIGINAL_LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "flux": {
        **_with_prefixes("double_blocks.*", "transformer_blocks.*", _FLUX_DOUBLE),
        **_with_prefixes("single_blocks.*", "single_transformer_blocks.*", _FLUX_SINGLE),
        **_FLUX_REST,
    },
    "sd3": {**_with_prefixes("joint_blocks.*", "transformer_blocks.*", _SD3_JOINT), **_SD3_REST},
}
"""Layer of the original model, * for the number of its block -> diffusers' layers whose rows make it up, in order."""


class OriginalLayer(NamedTuple):
    """Where a layer of diffusers' stands in the original model."""

    name: str
    parts: tuple[str, ...]
    """All layers of diffusers' that make it up, in the order of its rows."""


def original_layer(model_name: str, layer: str) -> OriginalLayer | None:
    """The layer of the original model that has this one of diffusers', None where there is none."""
    number = re.search(r"(?<=blocks\.)\d+", layer)
    template = re.sub(r"(?<=blocks\.)\d+", "*", layer)
    for name, parts in ORIGINAL_LAYERS[model_name].items():
        if template in parts:
            block = number.group() if number else ""
            return OriginalLayer(name.replace("*", block), tuple(part.replace("*", block) for part in parts))
    return None


def rows_of_parts(parts: Sequence[str], unit: int) -> list[int]:
    """Rows of each part of a fused layer; `unit` is the width of the model, of which an MLP has four."""
    return [unit * (4 if part.endswith("proj_mlp") else 1) for part in parts]


def swap_shift_and_scale(layer: str, down: Tensor, up: Tensor) -> Tensor:
    """B with its rows in the order of the other side, where that is another one; its own inverse.

    A modulation before a last projection, which has two chunks and not six, is (scale, shift) in diffusers and (shift,
    scale) in the original models: `norm_out`, and `norm1_context` in the last block of SD3.
    """
    is_swapped = layer.endswith(("norm_out.linear", "norm1_context.linear")) and up.shape[0] == 2 * down.shape[1]
    return torch.cat(up.chunk(2)[::-1]) if is_swapped else up
