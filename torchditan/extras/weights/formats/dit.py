# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""DiT (Peebles and Xie 2022, arXiv 2212.09748), SiT (Ma et al. 2024, 2401.08740) and REPA (Yu et al. 2024, 2410.06940).

The three have one architecture and almost the same names of tensors, which are ours too. They differ in what the model
predicts and in its time. Names and shapes do not show it, so you must name the format.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from torchditan.checkpoint.weights import Weights
from torchditan.extras.weights.formats.layout import (
    Sizes,
    check_position_table,
    converted,
    drop_variance,
    num_blocks,
    read_sizes,
    sample_size_of,
)
from torchditan.models.dit import TIMESTEP_FREQUENCIES

_FLOW_OPTIONS = {
    "model.preset": "official",
    "model.learn_sigma": False,
    "model.timestep_scale": 1.0,
    "diffusion.objective": "flow_matching",
    "diffusion.timestep_sampling": "uniform",
    # The papers compare samplers at 250 evaluations of the model: 125 of Heun's steps, SiT's sampler of the ODE.
    "sampling.sampler": "heun",
    "sampling.num_steps": 125,
}


def _read(
    tensors: dict[str, Tensor], num_heads: int | None, sample_size: tuple[int, int] | None
) -> tuple[Sizes, tuple[int, int]]:
    """The sizes, and height and width of the input."""
    sizes = read_sizes(tensors, num_heads=num_heads)
    size = sample_size_of(sizes, tensors["pos_embed"].shape[1], sample_size)
    check_position_table(tensors["pos_embed"], sizes, size)
    return sizes, size


def convert_dit(
    source: Weights, *, num_heads: int | None = None, sample_size: tuple[int, int] | None = None
) -> Weights:
    """Official DiT: the weights stay as they are. The model predicts noise, and the variance if it has the outputs."""
    tensors = source.tensors()
    sizes, size = _read(tensors, num_heads, sample_size)
    options = {
        "model.preset": "official",
        "model.learn_sigma": sizes.learns_sigma,
        "diffusion.objective": "ddpm",
        "diffusion.prediction": "epsilon",
        "diffusion.noise_schedule": "linear",
        "sampling.sampler": "ancestral",
        "sampling.spacing": "linspace",
        "sampling.num_steps": 250,
        "sampling.guidance_scale": 4.0,
        "sampling.guidance_channels": min(3, sizes.channels),
    }
    predicts = "noise and its variance" if sizes.learns_sigma else "noise"
    notes = [f"weights unchanged: the model predicts {predicts}, time 0 to 999 as in the paper"]
    return converted(source, tensors, sizes, size, options, notes)


def convert_sit(
    source: Weights, *, num_heads: int | None = None, sample_size: tuple[int, int] | None = None
) -> Weights:
    """SiT of linear paths and velocity prediction: our path and direction, with t in [0, 1] in its embedding."""
    tensors = source.tensors()
    sizes, size = _read(tensors, num_heads, sample_size)
    notes = ["time in [0, 1] (model.timestep_scale 1); t = 1 is data, and the model predicts data - noise, as here"]
    notes += drop_variance(tensors, sizes)
    guidance = {"sampling.guidance_scale": 4.0, "sampling.guidance_channels": min(3, sizes.channels)}
    return converted(source, tensors, sizes, size, {**_FLOW_OPTIONS, **guidance}, notes)


def convert_repa(
    source: Weights, *, num_heads: int | None = None, sample_size: tuple[int, int] | None = None
) -> Weights:
    """REPA's SiT: t = 1 is noise, and the model predicts noise - data. Both are reversed in the weights, exactly.

    Older files call the blocks after those of the encoder `decoder_blocks`.
    """
    depth = num_blocks(source.shapes)
    tensors = {
        re.sub(r"^decoder_blocks\.(\d+)", lambda match: f"blocks.{depth + int(match[1])}", name): tensor
        for name, tensor in source.tensors().items()
        if not name.startswith("projectors.")
    }
    sizes, size = _read(tensors, num_heads, sample_size)
    notes = [
        "time reversed in t_embedder.mlp.0.weight: t = 1 is data here (model.timestep_scale 1)",
        "velocity negated in final_layer.linear: data - noise here",
    ]
    if len(tensors) < len(source.shapes):
        notes.append("dropped projectors.*, which training aligned with a vision encoder")
    notes += drop_variance(tensors, sizes)
    reverse_time(tensors)
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        tensors[name] = -tensors[name]
    guidance = {"sampling.guidance_scale": 1.8, "sampling.guidance_interval": [0.3, 1.0]}
    return converted(source, tensors, sizes, size, {**_FLOW_OPTIONS, **guidance}, notes)


def reverse_time(tensors: dict[str, Tensor], *, frequency: Tensor | None = None) -> None:
    """Make a timestep embedder of unscaled t compute at t what it computed at 1 - t, in place.

    Its first layer reads [cos ft, sin ft] for frequencies f. With the sum formulas, the features of 1 - t are a linear
    function of those of t: cos f(1 - t) = cos f cos ft + sin f sin ft, sin f(1 - t) = sin f cos ft - cos f sin ft.

    Args:
        tensors: under our names.
        frequency: f (F,) float64; None: those of DiT.
    """
    name, half = "t_embedder.mlp.0.weight", TIMESTEP_FREQUENCIES // 2
    weight, f = tensors[name], frequency
    if f is None:
        exponent = torch.arange(half, dtype=torch.float32) / half
        f = torch.exp(-math.log(10000.0) * exponent).double()  # rounded as in `timestep_embedding`
    of_cos, of_sin = weight.double().chunk(2, dim=1)
    reversed_weight = torch.cat([of_cos * f.cos() + of_sin * f.sin(), of_cos * f.sin() - of_sin * f.cos()], dim=1)
    tensors[name] = reversed_weight.to(torch.promote_types(weight.dtype, torch.float32)).contiguous()
