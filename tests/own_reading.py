# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Own reading of DiT, SiT, REPA and LightningDiT: their models and samplers, written from the papers and from the names
of their tensors alone, in plain torch. No code of these projects was used, and none of torchditan.

Sources: DiT, arXiv 2212.09748; SiT, 2401.08740; REPA, 2410.06940; LightningDiT, 2501.01423; RoPE in 2D, 2303.11331.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """The architecture of one file."""

    depth: int = 3
    width: int = 64
    num_heads: int = 4
    patch_size: int = 2
    channels: int = 4
    output_channels: int = 4
    side: int = 8
    num_classes: int = 10
    norm: str = "layernorm without parameters"
    mlp: str = "gelu"
    qk_norm: bool = False
    table: bool = True
    rope: bool = False
    num_projectors: int = 0

    @property
    def num_tokens(self) -> int:
        return (self.side // self.patch_size) ** 2


DIGITS_AS_LATENTS = (
    "--dataset.dataset_name=digits",
    "--autoencoder.name=haar",
    "--autoencoder.downsampling=2",
    "--autoencoder.shift=0",
    "--autoencoder.scale=1",
    "--num_heads=4",
)
"""Flags of an import: these models draw digits, in latents of 4 x 4 x 4."""
DIT = Model(output_channels=8)
SIT = Model(output_channels=8)
REPA = Model(num_projectors=1)
LIGHTNINGDIT = Model(
    patch_size=1, channels=8, output_channels=8, norm="rmsnorm", mlp="swiglu", rope=True, qk_norm=False
)


def random_weights(model: Model, *, seed: int = 0) -> Weights:
    """Weights of a file: random, all different from zero, so that every mistake shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    width, head = model.width, model.width // model.num_heads
    hidden = int(2 / 3 * 4 * width)  # LightningDiT rounds down
    shapes: dict[str, tuple[int, ...]] = {
        "x_embedder.proj": (width, model.channels, model.patch_size, model.patch_size),
        "t_embedder.mlp.0": (width, 256),
        "t_embedder.mlp.2": (width, width),
        "final_layer.linear": (model.patch_size**2 * model.output_channels, width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
    }
    norms: dict[str, int] = {"final_layer.norm_final": width} if model.norm == "rmsnorm" else {}
    for block in (f"blocks.{number}" for number in range(model.depth)):
        shapes |= {
            f"{block}.attn.qkv": (3 * width, width),
            f"{block}.attn.proj": (width, width),
            f"{block}.adaLN_modulation.1": (6 * width, width),
        }
        if model.mlp == "swiglu":
            shapes |= {f"{block}.mlp.w12": (2 * hidden, width), f"{block}.mlp.w3": (width, hidden)}
        else:
            shapes |= {f"{block}.mlp.fc1": (4 * width, width), f"{block}.mlp.fc2": (width, 4 * width)}
        if model.norm == "rmsnorm":
            norms |= {f"{block}.norm1": width, f"{block}.norm2": width}
        if model.qk_norm:
            norms |= {f"{block}.attn.q_norm": head, f"{block}.attn.k_norm": head}
    for number in range(model.num_projectors):
        shapes |= {f"projectors.{number}.0": (32, width), f"projectors.{number}.2": (16, 32)}
    weights: Weights = {}
    for name, shape in shapes.items():
        fan_in = math.prod(shape[1:])
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) / math.sqrt(fan_in)
        weights[f"{name}.bias"] = 0.3 * torch.randn(shape[0], generator=generator)
    for name, size in norms.items():
        weights[f"{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator)
    weights["y_embedder.embedding_table.weight"] = torch.randn(model.num_classes + 1, width, generator=generator)
    if model.table:
        weights["pos_embed"] = sincos_table(model)
    if model.rope:
        angles = rope_angles(model).repeat_interleave(2, dim=1)  # one column for each element of a pair
        weights |= {"feat_rope.freqs_cos": angles.cos(), "feat_rope.freqs_sin": angles.sin()}
    return weights


def sincos_table(model: Model) -> Tensor:
    """(1, N, D): sines, then cosines of the column, then both of the row; position by position."""
    quarter, side = model.width // 4, model.side // model.patch_size
    table = torch.zeros(1, side * side, model.width)
    for row in range(side):
        for column in range(side):
            for i in range(quarter):
                frequency = 1 / 10000 ** (i / quarter)
                values = [f(p * frequency) for p in (column, row) for f in (math.sin, math.cos)]
                table[0, row * side + column, i::quarter] = torch.tensor(values)
    return table


def rope_angles(model: Model) -> Tensor:
    """(N, K / 2): angles of the row in the first half of the pairs of a head, of the column in the second."""
    pairs, side = model.width // model.num_heads // 2, model.side // model.patch_size
    angles = torch.zeros(side * side, pairs)
    for row in range(side):
        for column in range(side):
            for i in range(pairs // 2):
                frequency = 10000 ** (-i / (pairs // 2))
                angles[row * side + column, i] = row * frequency
                angles[row * side + column, pairs // 2 + i] = column * frequency
    return angles


def forward(weights: Weights, model: Model, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The model's output (B, output_channels, H, W).

    Args:
        x: (B, C, H, W).
        t: (B,), the argument of the sinusoids: 0 to 999 for DiT, in [0, 1] for the others.
        y: (B,) int64; `num_classes` is the null class.
    """

    def linear(name: str, value: Tensor) -> Tensor:
        return value @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, value: Tensor) -> Tensor:
        if model.norm == "rmsnorm":
            return value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]
        centred = value - value.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    frequency = torch.exp(-math.log(10000) * torch.arange(128) / 128)
    angle = t[:, None] * frequency
    features = torch.cat([angle.cos(), angle.sin()], dim=1)
    condition = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", features)))
    condition = F.silu(condition + weights["y_embedder.embedding_table.weight"][y])

    tokens = F.conv2d(x, weights["x_embedder.proj.weight"], weights["x_embedder.proj.bias"], stride=model.patch_size)
    tokens = tokens.flatten(2).transpose(1, 2)  # (B, N, D)
    if model.table:
        tokens = tokens + weights["pos_embed"]
    for block in (f"blocks.{number}" for number in range(model.depth)):
        parts = linear(f"{block}.adaLN_modulation.1", condition)[:, None].chunk(6, dim=-1)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = parts
        inner = norm(f"{block}.norm1", tokens) * (1 + scale_1) + shift_1
        inner = linear(f"{block}.attn.proj", attention(weights, model, block, linear(f"{block}.attn.qkv", inner)))
        tokens = tokens + gate_1 * inner
        inner = norm(f"{block}.norm2", tokens) * (1 + scale_2) + shift_2
        if model.mlp == "swiglu":
            first, second = linear(f"{block}.mlp.w12", inner).chunk(2, dim=-1)
            inner = linear(f"{block}.mlp.w3", F.silu(first) * second)
        else:
            inner = linear(f"{block}.mlp.fc2", F.gelu(linear(f"{block}.mlp.fc1", inner), approximate="tanh"))
        tokens = tokens + gate_2 * inner
    shift, scale = linear("final_layer.adaLN_modulation.1", condition)[:, None].chunk(2, dim=-1)
    tokens = linear("final_layer.linear", norm("final_layer.norm_final", tokens) * (1 + scale) + shift)
    side = model.side // model.patch_size
    cells = tokens.view(len(x), side, side, model.patch_size**2, model.output_channels)  # channels fastest
    return F.pixel_shuffle(cells.permute(0, 4, 3, 1, 2).flatten(1, 2), model.patch_size)


def attention(weights: Weights, model: Model, block: str, qkv: Tensor) -> Tensor:
    """Softmax attention of (B, N, 3 D): queries, keys, values; heads are neighbouring columns of each."""
    heads = [
        part.unflatten(-1, (model.num_heads, -1)).transpose(1, 2) for part in qkv.split(model.width, dim=-1)
    ]  # (B, H, N, K)
    if model.qk_norm:
        for number, name in enumerate(("q_norm", "k_norm")):
            value = heads[number]
            value = value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            heads[number] = value * weights[f"{block}.attn.{name}.weight"]
    if model.rope:
        turn = torch.polar(torch.ones(()), rope_angles(model))  # (N, K / 2)
        for number in (0, 1):
            pairs = torch.complex(heads[number][..., 0::2], heads[number][..., 1::2]) * turn
            heads[number] = torch.stack([pairs.real, pairs.imag], dim=-1).flatten(-2)
    q, k, v = heads
    scores = q @ k.transpose(-1, -2) / math.sqrt(model.width // model.num_heads)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def guided(conditional: Tensor, unconditional: Tensor, *, scale: float, channels: int) -> Tensor:
    """Classifier-free guidance of the first channels; the others are the conditional ones."""
    found = conditional.clone()
    found[:, :channels] = (unconditional + scale * (conditional - unconditional))[:, :channels]
    return found


def euler_samples(
    weights: Weights,
    model: Model,
    noise: Tensor,
    y: Tensor,
    *,
    num_steps: int,
    scale: float,
    channels: int,
    shift: float = 1.0,
    guided_from: float = 0.0,
) -> Tensor:
    """Euler's steps of SiT and LightningDiT: dx/dt = v from noise (t = 0) to data (t = 1).

    Args:
        noise: (B, C, H, W).
        scale: of the guidance, for t of at least `guided_from`.
        channels: number of guided channels.
        shift: LightningDiT's, t -> shift t / (1 + (shift - 1) t).
    """
    x, null = noise, torch.full_like(y, model.num_classes)
    times = torch.linspace(0, 1, num_steps + 1)
    times = shift * times / (1 + (shift - 1) * times)
    for t, later in itertools.pairwise(times):
        both = [forward(weights, model, x, t.expand(len(x)), label)[:, : model.channels] for label in (y, null)]
        velocity = guided(both[0], both[1], scale=scale, channels=channels) if t >= guided_from else both[0]
        x = x + (later - t) * velocity
    return x


def repa_samples(
    weights: Weights, model: Model, noise: Tensor, y: Tensor, *, num_steps: int, scale: float, guided_until: float
) -> Tensor:
    """REPA's Euler steps, from noise (t = 1) to data (t = 0), with guidance of all channels up to t = guided_until."""
    x, null = noise, torch.full_like(y, model.num_classes)
    for step in range(num_steps):
        t = 1 - step / num_steps
        both = [forward(weights, model, x, torch.full((len(x),), t), label) for label in (y, null)]
        velocity = guided(both[0], both[1], scale=scale, channels=model.channels) if t <= guided_until else both[0]
        x = x - velocity / num_steps
    return x


def dit_samples(
    weights: Weights, model: Model, noise: Tensor, y: Tensor, step_noise: list[Tensor], *, scale: float
) -> Tensor:
    """DiT's ancestral steps over evenly spaced levels, with learned variance (Nichol and Dhariwal 2021, 2102.09672).

    Args:
        noise: (B, C, H, W).
        step_noise: noise of each step; their number is that of the steps.
        scale: of the guidance of three channels.
    """
    num_steps, null = len(step_noise), torch.full_like(y, model.num_classes)
    kept = [round(i * 999 / (num_steps - 1)) for i in range(num_steps)]
    all_signals = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), dim=0).tolist()
    signal = [all_signals[level] for level in kept]
    before = [1.0, *signal[:-1]]
    beta = [1 - now / earlier for now, earlier in zip(signal, before, strict=True)]
    x = noise
    for step, i in enumerate(reversed(range(num_steps))):
        both = [forward(weights, model, x, torch.full((len(x),), float(kept[i])), label) for label in (y, null)]
        epsilon, fraction = guided(both[0], both[1], scale=scale, channels=3).chunk(2, dim=1)
        clean = (x - math.sqrt(1 - signal[i]) * epsilon) / math.sqrt(signal[i])
        if i == 0:
            return clean
        of_clean = math.sqrt(before[i]) * beta[i] / (1 - signal[i])
        of_x = math.sqrt(1 - beta[i]) * (1 - before[i]) / (1 - signal[i])
        low, high = math.log(beta[i] * (1 - before[i]) / (1 - signal[i])), math.log(beta[i])
        share = (fraction + 1) / 2
        x = of_clean * clean + of_x * x + (0.5 * (share * high + (1 - share) * low)).exp() * step_noise[step]
    raise AssertionError("no steps")
