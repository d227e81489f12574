# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Own reading of DDT (arXiv 2504.05741) and DiT-DH (2510.11690), from the papers, the names of their tensors and facts
read in their public code, in plain torch. No code of these projects was used, and none of torchditan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from own_reading import Model, Weights, rope_angles, sincos_table
from torch import Tensor


@dataclass(frozen=True)
class Decoupled:
    """The architecture of one file. DDT has a head of the encoder's width, and DiT-DH patches of one cell."""

    is_ddt: bool
    depth: int = 3
    width: int = 64
    num_heads: int = 4
    head_depth: int = 2
    head_width: int = 64
    head_heads: int = 4
    channels: int = 4
    patch_size: int = 2
    side: int = 8
    num_classes: int = 10

    def size_of(self, block: int) -> tuple[int, int]:
        """Width and number of heads of a block."""
        return (self.width, self.num_heads) if block < self.depth else (self.head_width, self.head_heads)

    def positions(self, *, of_head: bool) -> Model:
        width, num_heads = self.size_of(self.depth if of_head else 0)
        return Model(width=width, num_heads=num_heads, patch_size=self.patch_size, side=self.side)


DDT = Decoupled(is_ddt=True)
DIT_DH = Decoupled(is_ddt=False, head_width=80, head_heads=5, channels=6, patch_size=1, side=4)


def random_weights(model: Decoupled) -> Weights:
    """Weights of a file: random, all different from zero, so that every mistake shows in the output."""
    generator = torch.Generator().manual_seed(0)
    width, head_width, is_ddt = model.width, model.head_width, model.is_ddt
    values = model.channels * model.patch_size**2  # of a patch
    patch = (values,) if is_ddt else (model.channels, model.patch_size, model.patch_size)
    modulation = f"adaLN_modulation.{0 if is_ddt else 1}"
    shapes: dict[str, tuple[int, ...]] = {
        "s_embedder.proj": (width, *patch),
        "x_embedder.proj": (head_width, *patch),
        "t_embedder.mlp.0": (width, 256 if is_ddt else 512),
        "t_embedder.mlp.2": (width, width),
        "final_layer.linear": (values, head_width),
        f"final_layer.{modulation}": (2 * head_width, head_width),
    }
    norms: dict[str, int] = {}
    without_bias: set[str] = set()
    if not is_ddt:
        norms["final_layer.norm_final"] = head_width
        shapes["s_projector"] = (head_width, width)
    for number in range(model.depth + model.head_depth):
        block, (size, num_heads) = f"blocks.{number}", model.size_of(number)
        hidden = int(2 * 4 * size / 3)  # both round down
        shapes |= {
            f"{block}.attn.qkv": (3 * size, size),
            f"{block}.attn.proj": (size, size),
            f"{block}.{modulation}": (6 * size, size),
        }
        norms |= {f"{block}.norm1": size, f"{block}.norm2": size}
        if is_ddt:
            shapes |= {f"{block}.mlp.{name}": (hidden, size) for name in ("w1", "w3")}
            shapes[f"{block}.mlp.w2"] = (size, hidden)
            norms |= {f"{block}.attn.{name}": size // num_heads for name in ("q_norm", "k_norm")}
            without_bias |= {f"{block}.{name}" for name in ("attn.qkv", "mlp.w1", "mlp.w2", "mlp.w3")}
        else:
            shapes |= {f"{block}.mlp.w12": (2 * hidden, size), f"{block}.mlp.w3": (size, hidden)}
    weights: Weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))
        if name not in without_bias:
            weights[f"{name}.bias"] = 0.3 * torch.randn(shape[0], generator=generator)
    for name, size in norms.items():
        weights[f"{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator)
    weights["y_embedder.embedding_table.weight"] = torch.randn(model.num_classes + 1, width, generator=generator)
    if not is_ddt:
        weights["t_embedder.W"] = torch.randn(256, generator=generator)
        weights["pos_embed"] = sincos_table(model.positions(of_head=False))
        for part, of_head in (("enc", False), ("dec", True)):
            angles = rope_angles(model.positions(of_head=of_head)).repeat_interleave(2, dim=1)
            weights |= {f"{part}_feat_rope.freqs_cos": angles.cos(), f"{part}_feat_rope.freqs_sin": angles.sin()}
    return weights


def ddt_angles(model: Decoupled) -> Tensor:
    """(N, K / 2): the even pairs of a head turn with the column, the odd ones with the row; the last one is at 16."""
    quarter, side = model.width // model.num_heads // 4, model.side // model.patch_size
    frequency = 10000.0 ** -(torch.arange(quarter) / quarter)  # float32, as its code
    place = torch.linspace(0, 16, side)
    row, column = (each[:, None] * frequency for each in (place.repeat_interleave(side), place.repeat(side)))
    return torch.stack([column, row], dim=2).flatten(1)


def forward(weights: Weights, model: Decoupled, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The model's output (B, C, H, W) in the dtype of the weights.

    Args:
        x: (B, C, H, W).
        t: (B,) in [0, 1]. 1 is data for DDT, and noise for DiT-DH.
        y: (B,) int64; `num_classes` is the null class.
    """
    is_ddt, patch, channels = model.is_ddt, model.patch_size, model.channels
    modulation = f"adaLN_modulation.{0 if is_ddt else 1}"

    def linear(name: str, value: Tensor) -> Tensor:
        result = value @ weights[f"{name}.weight"].flatten(1).T
        return result + weights[f"{name}.bias"] if f"{name}.bias" in weights else result

    def norm(name: str, value: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    def modulated(name: str, c: Tensor, count: int) -> list[Tensor]:
        """`count` parts of the modulation. The SiLU of DiT-DH is part of this layer."""
        return list(linear(f"{name}.{modulation}", c if is_ddt else F.silu(c)).chunk(count, dim=-1))

    def turned(value: Tensor, angles: Tensor) -> Tensor:
        """(B, N, H, K): rotate neighbouring pairs."""
        cos, sin = (f(angles).to(value)[:, None] for f in (torch.cos, torch.sin))
        a, b = value[..., 0::2], value[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    def block(number: int, value: Tensor, c: Tensor, angles: Tensor) -> Tensor:
        name, (_, num_heads) = f"blocks.{number}", model.size_of(number)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulated(name, c, 6)
        inner = norm(f"{name}.norm1", value) * (1 + scale) + shift
        q, k, v = (part.unflatten(-1, (num_heads, -1)) for part in linear(f"{name}.attn.qkv", inner).chunk(3, dim=-1))
        if f"{name}.attn.q_norm.weight" in weights:
            q, k = norm(f"{name}.attn.q_norm", q), norm(f"{name}.attn.k_norm", k)
        q, k = turned(q, angles), turned(k, angles)
        scores = torch.einsum("bnhk,bmhk->bhnm", q, k) / math.sqrt(q.shape[-1])
        mixed = torch.einsum("bhnm,bmhk->bnhk", scores.softmax(-1), v).flatten(2)
        value = value + gate * linear(f"{name}.attn.proj", mixed)
        inner = norm(f"{name}.norm2", value) * (1 + scale_mlp) + shift_mlp
        if is_ddt:
            hidden = F.silu(linear(f"{name}.mlp.w1", inner)) * linear(f"{name}.mlp.w3", inner)
            return value + gate_mlp * linear(f"{name}.mlp.w2", hidden)
        a, b = linear(f"{name}.mlp.w12", inner).chunk(2, dim=-1)
        return value + gate_mlp * linear(f"{name}.mlp.w3", F.silu(a) * b)

    if is_ddt:
        wave = t[:, None] * 10.0 ** -(torch.arange(128).to(t) / 128)
        features = torch.cat([wave.cos(), wave.sin()], dim=1)
        encoder_angles = head_angles = ddt_angles(model)
    else:
        wave = 2 * math.pi * t[:, None] * weights["t_embedder.W"]
        features = torch.cat([wave.sin(), wave.cos()], dim=1)
        encoder_angles, head_angles = (rope_angles(model.positions(of_head=of_head)) for of_head in (False, True))
    time = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", features)))[:, None]  # (B, 1, D)
    c = F.silu(time + weights["y_embedder.embedding_table.weight"][y][:, None])
    patches = F.unfold(x, patch, stride=patch).transpose(1, 2)  # (B, N, C P P), channels first
    s = linear("s_embedder.proj", patches)
    if not is_ddt:
        s = s + weights["pos_embed"]
    for number in range(model.depth):
        s = block(number, s, c, encoder_angles)
    z = F.silu(time + s)
    if not is_ddt:
        z = linear("s_projector", z)
    value = linear("x_embedder.proj", patches)
    for number in range(model.depth, model.depth + model.head_depth):
        value = block(number, value, z, head_angles)
    shift, scale = modulated("final_layer", z, 2)
    if is_ddt:
        centred = value - value.mean(-1, keepdim=True)
        value = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    else:
        value = norm("final_layer.norm_final", value)
    patches = linear("final_layer.linear", value * (1 + scale) + shift)
    if is_ddt:
        return F.fold(patches.transpose(1, 2), x.shape[-2:], patch, stride=patch)
    assert patch == 1
    return patches.transpose(1, 2).unflatten(2, x.shape[-2:]).reshape(-1, channels, *x.shape[-2:])
