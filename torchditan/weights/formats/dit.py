# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""DiT (Peebles and Xie 2022, arXiv 2212.09748), SiT (Ma et al. 2024, 2401.08740) and REPA (Yu et al. 2024, 2410.06940).

The three have one architecture and almost the same names of tensors, which are ours too. They differ in what the model
predicts and in its time. Names and shapes do not show it, so you must name the format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchditan.models.dit import TIMESTEP_FREQUENCIES
from torchditan.weights.formats import Converted, Given
from torchditan.weights.formats.layout import (
    EMBEDDERS,
    FINAL_LAYER,
    Sizes,
    block_names,
    check_names,
    check_position_table,
    computed,
    drop_variance,
    read_sizes,
    sample_shape,
    shape_of,
    size_options,
)

_IN_BLOCK = tuple(
    f"{layer}.{kind}"
    for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
    for kind in ("weight", "bias")
)


@dataclass(frozen=True)
class _Read:
    """What the three formats have in common."""

    tensors: dict[str, Tensor]
    sizes: Sizes
    shape: tuple[int, int, int]

    def converted(self, options: Mapping[str, Any], notes: list[str]) -> Converted:
        shared = {"model.preset": "official", **size_options(self.sizes)}
        return Converted(self.tensors, {**shared, **options}, self.shape, self.sizes.num_classes, tuple(notes))


def _read(tensors: Mapping[str, Tensor], given: Given, *, format: str) -> _Read:
    check_names(tensors, {*EMBEDDERS, "pos_embed", *block_names(tensors, _IN_BLOCK), *FINAL_LAYER}, format=format)
    sizes = read_sizes(tensors, num_heads=None, given=given)
    _, num_tokens, _ = shape_of(tensors, "pos_embed", 3)
    shape = sample_shape(sizes, num_tokens, given)
    check_position_table(tensors["pos_embed"], sizes, shape)
    return _Read(dict(tensors), sizes, shape)


def convert_dit(tensors: dict[str, Tensor], *, content: Mapping[str, Any], given: Given) -> Converted:
    """Official DiT: the weights stay as they are. The model predicts noise, and the variance if it has the outputs."""
    read = _read(tensors, given, format="DiT")
    learns_sigma = read.sizes.output_channels > read.sizes.channels
    options = {
        "model.learn_sigma": learns_sigma,
        "diffusion.objective": "ddpm",
        "diffusion.prediction": "epsilon",
        "diffusion.noise_schedule": "linear",
        "sampling.sampler": "ancestral",
        "sampling.spacing": "linspace",
        "sampling.num_steps": 250,
        "sampling.guidance_scale": 4.0,
        "sampling.guidance_channels": min(3, read.sizes.channels),
    }
    predicts = "noise and its variance" if learns_sigma else "noise"
    return read.converted(options, [f"weights unchanged: the model predicts {predicts}, time 0 to 999 as in the paper"])


_FLOW_OPTIONS = {
    "model.learn_sigma": False,
    "model.timestep_scale": 1.0,
    "diffusion.objective": "flow_matching",
    "diffusion.timestep_sampling": "uniform",
    # The papers compare samplers at 250 evaluations of the model: 125 of Heun's steps, SiT's sampler of the ODE.
    "sampling.sampler": "heun",
    "sampling.num_steps": 125,
}


def convert_sit(tensors: dict[str, Tensor], *, content: Mapping[str, Any], given: Given) -> Converted:
    """SiT of linear paths and velocity prediction: our path and direction, with t in [0, 1] in its embedding."""
    read = _read(tensors, given, format="SiT")
    notes = ["time in [0, 1] (model.timestep_scale 1); t = 1 is data, and the model predicts data - noise, as here"]
    if drop_variance(read.tensors, read.sizes):
        notes.append("dropped the unused outputs of a variance")
    options = {
        **_FLOW_OPTIONS,
        "sampling.guidance_scale": 4.0,
        "sampling.guidance_channels": min(3, read.sizes.channels),
    }
    return read.converted(options, notes)


def convert_repa(tensors: dict[str, Tensor], *, content: Mapping[str, Any], given: Given) -> Converted:
    """REPA's SiT: t = 1 is noise, and the model predicts noise - data. Both are reversed in the weights, exactly.

    Older files call the blocks after those of the encoder `decoder_blocks`.
    """
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    kept = {
        re.sub(r"^decoder_blocks\.(\d+)", lambda match: f"blocks.{depth + int(match[1])}", name): tensor
        for name, tensor in tensors.items()
        if not name.startswith("projectors.")
    }
    read = _read(kept, given, format="REPA")
    notes = [
        "time reversed in t_embedder.mlp.0.weight: t = 1 is data here (model.timestep_scale 1)",
        "velocity negated in final_layer.linear: data - noise here",
    ]
    if len(kept) < len(tensors):
        notes.append("dropped projectors.*, which training aligned with a vision encoder")
    if drop_variance(read.tensors, read.sizes):
        notes.append("dropped the unused outputs of a variance")
    reverse_time(read.tensors)
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        read.tensors[name] = -read.tensors[name]
    options = {**_FLOW_OPTIONS, "sampling.guidance_scale": 1.8, "sampling.guidance_interval": [0.3, 1.0]}
    return read.converted(options, notes)


def reverse_time(tensors: dict[str, Tensor]) -> None:
    """Make a timestep embedder of unscaled t compute at t what it computed at 1 - t, in place.

    Its first layer reads [cos ft, sin ft] for frequencies f. With the sum formulas, the features of 1 - t are a linear
    function of those of t: cos f(1 - t) = cos f cos ft + sin f sin ft, sin f(1 - t) = sin f cos ft - cos f sin ft.
    """
    name, half = "t_embedder.mlp.0.weight", TIMESTEP_FREQUENCIES // 2
    weight = tensors[name]
    exponent = torch.arange(half, dtype=torch.float32) / half
    f = torch.exp(-math.log(10000.0) * exponent).double()  # rounded as in `timestep_embedding`
    of_cos, of_sin = weight.double().split(half, dim=1)
    reversed_weight = torch.cat([of_cos * f.cos() + of_sin * f.sin(), of_cos * f.sin() - of_sin * f.cos()], dim=1)
    tensors[name] = computed(reversed_weight, weight)
