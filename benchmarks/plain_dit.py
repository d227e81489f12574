# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A DiT as research repositories write it in plain PyTorch: the model, its training step and its sampler.

Written from the paper (Peebles and Xie 2023, arXiv:2212.09748), to compare with.

Notable:
- float32 weights under autocast, DistributedDataParallel over several ranks, torch.compile of the whole model;
- clipping and fused AdamW of torch.optim, and an average of the weights in one foreach call;
- step and sampler take a function `predict`, and serve diffusers' model too;
- parameters have the names of the released checkpoints, so that the model loads our weights.

Shapes: B samples, N tokens, D width, C channels, P patch size. t = 0 is noise and t = 1 is data.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_t (B, C, H, W), t (B,) in [0, 1], label (B,)) -> velocity (B, C, H, W)."""

NUM_FREQUENCIES = 256


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(NUM_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        half = NUM_FREQUENCIES // 2
        frequencies = torch.exp(-math.log(10_000) / half * torch.arange(half, device=t.device))
        angles = 1000 * t[:, None] * frequencies
        return self.mlp(torch.cat([torch.cos(angles), torch.sin(angles)], dim=1))  # (B, D)


class LabelEmbedder(nn.Module):
    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, width)  # the last row is the null class

    def forward(self, label: Tensor) -> Tensor:
        return self.embedding_table(label)


class PatchEmbed(nn.Module):
    def __init__(self, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # (B, N, D)


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 3 of (B, heads, N, D / heads)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def modulation(width: int, num_vectors: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(width, num_vectors * width))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """adaLN-zero: shift, scale and gate of attention and of the MLP come from the condition."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = MLP(width)
        self.adaLN_modulation = modulation(width, 6)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, num_outputs)
        self.adaLN_modulation = modulation(width, 2)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class PlainDiT(nn.Module):
    """Predicts the velocity of square samples. `pos_embed` is the fixed table of positions, here without values."""

    def __init__(
        self,
        *,
        depth: int,
        width: int,
        num_heads: int,
        patch_size: int,
        channels: int,
        image_size: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.x_embedder = PatchEmbed(channels, patch_size, width)
        self.t_embedder = TimestepEmbedder(width)
        self.y_embedder = LabelEmbedder(num_classes, width)
        num_patches = (image_size // patch_size) ** 2
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches, width), requires_grad=False)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.final_layer = FinalLayer(width, patch_size**2 * channels)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        height = x.shape[2] // self.patch_size
        x = self.x_embedder(x) + self.pos_embed  # (B, N, D)
        c = self.t_embedder(t) + self.y_embedder(label)  # (B, D)
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x, c)  # (B, N, P * P * C)
        x = x.unflatten(2, (self.patch_size, self.patch_size, -1)).unflatten(1, (height, -1))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)  # (B, C, H, W)


def training_step(
    predict: Predict,
    parameters: list[nn.Parameter],
    *,
    sample: Tensor,
    label: Tensor,
    null_label: int,
    autocast: bool,
    learning_rate: float = 1e-4,
    label_dropout: float = 0.1,
    max_norm: float = 1.0,
    decay: float = 0.9999,
) -> Callable[[], None]:
    """A step of flow matching: forward, loss, backward, clipping, fused AdamW and the average of the weights.

    Args:
        predict: the model, perhaps compiled and in DistributedDataParallel.
        parameters: of the model. Those without gradients only enter the average.
        sample, label: (B, C, H, W) and (B,), this rank's batch of every step.
        null_label: the label that replaces dropped ones.
        autocast: compute in bfloat16.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0, fused=True)
    average = [parameter.detach().clone() for parameter in parameters]

    def step() -> None:
        noise = torch.randn_like(sample)
        t = torch.sigmoid(torch.randn(len(sample), device=sample.device))
        t_wide = t[:, None, None, None]
        x_t = (1 - t_wide) * noise + t_wide * sample
        is_dropped = torch.rand(len(sample), device=sample.device) < label_dropout
        with torch.autocast(sample.device.type, dtype=torch.bfloat16, enabled=autocast):
            velocity = predict(x_t, t, label.masked_fill(is_dropped, null_label))
        loss = F.mse_loss(velocity.float(), sample - noise)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - decay)

    return step


@torch.no_grad()
def draw(
    predict: Predict,
    noise: Tensor,
    label: Tensor,
    *,
    null_label: int,
    num_steps: int,
    guidance_scale: float,
    autocast: bool,
) -> Tensor:
    """Samples (B, C, H, W) from noise, by Euler's method with classifier-free guidance."""
    x = noise
    labels = torch.cat([label, torch.full_like(label, null_label)])
    for i in range(num_steps):
        t = torch.full((len(labels),), i / num_steps, device=x.device)
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
            velocity = predict(torch.cat([x, x]), t, labels).float()
        conditional, unconditional = velocity.chunk(2)
        x = x + (unconditional + guidance_scale * (conditional - unconditional)) / num_steps
    return x.cpu()
