# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The native diffusion transformer (DiT; Peebles and Xie 2023, arXiv:2212.09748), top to bottom.

Notable:
- full attention over the patches of any H and W divisible by the patch size, square or not;
- positions: axial 2D rotary embedding, the paper's fixed sin-cos table, or both;
- conditioning: adaLN-zero with a modulated final layer; adaLN-single (PixArt-alpha; Chen et al. 2023, arXiv
  2310.00426), where all blocks share one modulation; or timestep and label as extra tokens, the paper's "in-context";
- text, from precomputed embeddings with positions: as tokens before the patches, there also with weights of their own
  (joint_block.py), or by cross-attention in every block. Blocks of the text alone may come first. A pooled vector is
  added to the timestep's embedding; padding is masked;
- RMSNorm, LayerNorm or LayerNorm without parameters; SwiGLU or GELU; queries and keys normalized or not;
- the repeated block is an extension point: `Block` is its interface, `DiTBlock` the paper's block;
- the `official` preset has exactly the paper's parameters, under the names of its released checkpoints;
- `init_weights` is a pure function of (seed, parameter name): the same model on every device and mesh. The constructor
  calls it with seed 0, except on the meta device, on which the trainer builds;
- this file is independent of devices, precision and ranks. The embedders of patches, timestep and text cast their
  input to the dtype of their weights.

Shapes: B samples, N tokens, L tokens of text, D width, H heads of size K, C channels, P patch size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torchditan.models.attention import attention
from torchditan.models.initialization import draw_normal, draw_xavier_uniform, fill
from torchditan.models.rms_norm import RMSNorm, at_least_float32
from torchditan.registry import BLOCKS, registered

if TYPE_CHECKING:
    from torchditan.models.spec import Head

NORM_EPS = 1e-6
TIMESTEP_FREQUENCIES = 256
TEXT_MASKS = ("prompt_attention_mask", "prompt_embeds_mask")


@dataclass(frozen=True)
class Size:
    depth: int
    width: int
    num_heads: int


# Mi and Ti are for small images on a CPU; S to XL are the paper's sizes. Attention kernels are fastest at head sizes 64
# and 128. The 1B therefore has 24 heads of 64 and the 7B 20 heads of 128. XL has the paper's heads of 72, which are
# slower.
FLAVORS: dict[str, Size] = {
    "debugmodel": Size(depth=3, width=64, num_heads=4),
    "DiT-Mi": Size(depth=6, width=128, num_heads=4),
    "DiT-Ti": Size(depth=6, width=192, num_heads=3),
    "DiT-S": Size(depth=12, width=384, num_heads=6),
    "DiT-B": Size(depth=12, width=768, num_heads=12),
    "DiT-L": Size(depth=24, width=1024, num_heads=16),
    "DiT-XL": Size(depth=28, width=1152, num_heads=16),
    "DiT-1B": Size(depth=32, width=1536, num_heads=24),
    "DiT-7B": Size(depth=60, width=2560, num_heads=20),
}

# Sizes of the course project that differ: its trained models have heads of 48 and 40.
LLAMA3_FLAVORS: dict[str, Size] = {
    "debugmodel": Size(depth=8, width=256, num_heads=16),
    "DiT-S": Size(depth=12, width=384, num_heads=8),
    "DiT-1B": Size(depth=32, width=1536, num_heads=32),
    "DiT-7B": Size(depth=60, width=2560, num_heads=64),
}


@dataclass(frozen=True)
class DiTConfig:
    """Sizes and options of one DiT. The defaults are those of the `torchditan` preset."""

    depth: int
    width: int
    num_heads: int
    patch_size: int
    input_channels: int
    image_size: tuple[int, int]
    """Height and width. Only sin-cos positions depend on it."""
    num_classes: int
    """0 for an unconditional model without a label table. Otherwise the table has one more row, the null class."""
    conditioning: str = "adaln"
    """adaln, adaln_single or in_context."""
    norm_type: str = "rmsnorm"
    """rmsnorm, layernorm, or np_layernorm (without parameters), for the blocks and for queries and keys."""
    qk_norm: bool = True
    mlp: str = "swiglu"
    """swiglu or gelu."""
    position: str = "rope"
    """rope, sincos or rope_sincos."""
    rope_theta: float = 10000.0
    rope_extent: float | None = None
    """Position of the last row and of the last column; the first ones are 0. None: one more per patch."""
    block: str = "dit"
    """A name in `registry.BLOCKS`."""
    timestep_scale: float = 1000.0
    """Factor of t in its embedding. The paper's t is in [0, 1000), this project's in [0, 1]."""
    timestep_frequencies: str = "dit"
    """dit, diffusers, ddt or gaussian; see `TimestepEmbedder.features`."""
    scalars: tuple[tuple[str, float], ...] = ()
    """(name, factor) of scalar conditions besides t. Each has an embedder like that of t."""
    learn_sigma: bool = False
    """Predict twice the channels: mean and variance."""
    patch_bottleneck: int = 0
    """Width between the two linear layers of the patch embedding; 0 for one layer."""
    text: str | None = None
    """in_context or joint (tokens before the patches), or cross_attention; None for a model without text."""
    text_positions: bool = True
    """Add sin-cos positions to the text tokens."""
    text_kernel: int = 0
    """Number of words that a depthwise convolution over the text tokens reads, odd; 0 for none."""
    text_blocks: int = 0
    """Number of blocks over the text tokens alone, before the others."""
    text_tokens: int = 0
    text_width: int = 0
    """Number and width of a caption's embeddings."""
    pooled_width: int = 0
    """Width of the caption's pooled embedding; 0 if it has none."""

    @property
    def output_channels(self) -> int:
        return self.input_channels * (2 if self.learn_sigma else 1)

    @property
    def num_patches(self) -> int:
        height, width = self.image_size
        return (height // self.patch_size) * (width // self.patch_size)

    @property
    def text_is_context(self) -> bool:
        """Whether the text tokens come before the patches."""
        return self.text in ("in_context", "joint")

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens before the patches."""
        text = self.text_tokens if self.text_is_context else 0
        return text + (1 + bool(self.num_classes) if self.conditioning == "in_context" else 0)


PRESETS: dict[str, dict[str, str | bool]] = {
    "torchditan": {
        "conditioning": "adaln",
        "norm_type": "rmsnorm",
        "qk_norm": True,
        "mlp": "swiglu",
        "position": "rope",
        "learn_sigma": False,
    },
    "official": {
        "conditioning": "adaln",
        "norm_type": "np_layernorm",
        "qk_norm": False,
        "mlp": "gelu",
        "position": "sincos",
        "learn_sigma": True,
    },
}
PRESETS["llama3_diffusion"] = PRESETS["torchditan"]


def flavor_size(flavor: str, preset: str) -> Size:
    """Depth, width and number of heads. Flavors that the course project lacks have our sizes under any preset."""
    return (LLAMA3_FLAVORS if preset == "llama3_diffusion" else {}).get(flavor, FLAVORS[flavor])


def patchify(x: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Cut images into patches, row by row: (B, C, H, W) -> (B, N, P * P * C), channels last in a patch."""
    batch, channels, height, width = x.shape
    x = x.view(batch, channels, height // patch_size, patch_size, width // patch_size, patch_size)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(x: torch.Tensor, patch_size: int, height: int, width: int) -> torch.Tensor:
    """The inverse of `patchify`: (B, N, P * P * C) -> (B, C, H, W)."""
    rows, columns = height // patch_size, width // patch_size
    x = x.reshape(x.shape[0], rows, columns, patch_size, patch_size, -1)  # (B, H/P, W/P, P, P, C)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], -1, height, width)


def sincos(position: torch.Tensor, width: int) -> torch.Tensor:
    """Fixed positions [sin, cos]: (N,) -> (N, width), in the dtype of `position`. The width is even."""
    half = torch.arange(width // 2, dtype=position.dtype, device=position.device)
    angle = position.outer(10000.0 ** -(half / (width // 2)))
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def sincos_position_table(width: int, rows: int, columns: int) -> torch.Tensor:
    """Fixed 2D positions, (rows * columns, width) float32: [sin, cos] of the column, then of the row."""
    row = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float64).repeat(rows)
    return torch.cat([sincos(position, width // 2) for position in (column, row)], dim=1).float()


def rope_table(config: DiTConfig, height: int, width: int, device: torch.device) -> torch.Tensor:
    """(cos, sin) of the axial rotary embedding, (context + N, 1, K / 2, 2) float32.

    The first half of the angles encodes the patch's row, the second half its column. Context tokens, which come
    first, are not rotated.
    """
    rows, columns = height // config.patch_size, width // config.patch_size
    head_dim = config.width // config.num_heads
    exponent = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device) / (head_dim // 2)
    frequency = config.rope_theta**-exponent  # (K / 4,)
    row, column = (_positions(count, config.rope_extent, device).outer(frequency) for count in (rows, columns))
    angle = torch.cat([row.repeat_interleave(columns, dim=0), column.repeat(rows, 1)], dim=1)  # (N, K / 2)
    angle = F.pad(angle, (0, 0, config.num_context_tokens, 0))
    return torch.stack([angle.cos(), angle.sin()], dim=-1).unsqueeze(1)


def _positions(count: int, extent: float | None, device: torch.device) -> torch.Tensor:
    if extent is None:
        return torch.arange(count, dtype=torch.float32, device=device)
    return torch.linspace(0, extent, count, dtype=torch.float32, device=device)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of the head dimension by the angles of `rope`, in float32 or, for x in it, float64.

    x: (B, N, H, K), rope: (N, 1, K / 2, 2) or, for tokens that differ between samples, (B, N, 1, K / 2, 2); N counts
    context tokens.
    """
    pairs = at_least_float32(x).unflatten(-1, (-1, 2))  # (B, N, H, K / 2, 2)
    if torch.compiler.is_compiling():  # inductor generates no code for complex numbers, and splits kernels at `stack`
        cos, sin = rope.unsqueeze(-1).unbind(-2)  # 2 of (N, 1, K / 2, 1)
        sign = torch.arange(-1, 2, 2, device=x.device)  # not a constant, which would be copied to the device
        pairs = pairs * cos + pairs.flip(-1) * (sin * sign)
    else:  # one kernel instead of six: 5 times faster on a CPU
        pairs = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rope))
    return pairs.flatten(-2).type_as(x)


def timestep_embedding(t: torch.Tensor, *, scale: float = 1000.0, frequencies: str = "dit") -> torch.Tensor:
    """Sinusoidal features [cos, sin] of scale t, (B,) -> (B, 256) float32, or float64 for t in float64.

    The frequencies are 10000^(-i / 128) (dit), 10000^(-i / 127) as in `DiTTransformer2DModel` of diffusers, or
    10^(-i / 128) (ddt), for t in [0, 1].
    """
    half, base = TIMESTEP_FREQUENCIES // 2, 10.0 if frequencies == "ddt" else 10000.0
    exponent = torch.arange(half, dtype=torch.float32, device=t.device) / (half - (frequencies == "diffusers"))
    return waves(at_least_float32(t) * scale, torch.exp(-math.log(base) * exponent))


def waves(t: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """[cos, sin] of the products: (B,) and (F,) -> (B, 2 F), in the dtype of t."""
    angle = t.outer(frequency.type_as(t))
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x * (1 + scale) + shift. x: (B, N, D); shift, scale: (B, 1, D), or (B, N, D) for a condition per token."""
    return x * (1 + scale) + shift


def split_modulation(modulation: torch.Tensor, num_chunks: int) -> tuple[torch.Tensor, ...]:
    """(B, n D) -> n of (B, 1, D), or (B, N, n D) -> n of (B, N, D)."""
    return (modulation.unsqueeze(1) if modulation.dim() == 2 else modulation).chunk(num_chunks, dim=-1)


def build_norm(norm_type: str, dim: int) -> nn.Module:
    if norm_type == "rmsnorm":
        return RMSNorm(dim, eps=NORM_EPS)
    return nn.LayerNorm(dim, eps=NORM_EPS, elementwise_affine=norm_type == "layernorm")


def build_qk_norm(config: DiTConfig) -> nn.Module:
    """The norm of queries or keys, over a head."""
    if not config.qk_norm:
        return nn.Identity()
    head_dim = config.width // config.num_heads
    if config.norm_type == "rmsnorm":
        return RMSNorm(head_dim, eps=NORM_EPS, stays_float32=True)
    return build_norm(config.norm_type, head_dim)


class PatchEmbed(nn.Module):
    """Linear map of patches to tokens. Its weight has the convolution shape of the released checkpoints.

    With a bottleneck it is two linear maps, the first without bias (JiT; Li and He 2025, arXiv 2511.13720).
    """

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.patch_size = config.patch_size
        narrow = config.patch_bottleneck
        self.proj = nn.Conv2d(
            config.input_channels, narrow or config.width, config.patch_size, config.patch_size, bias=not narrow
        )
        self.expand = nn.Linear(narrow, config.width) if narrow else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.proj.weight.permute(0, 2, 3, 1).flatten(1)  # (D, P * P * C)
        return self.expand(F.linear(patchify(x.type_as(weight), self.patch_size), weight, self.proj.bias))  # (B, N, D)


class TimestepEmbedder(nn.Module):
    """Embeds t, or another scalar condition. `scale` is the factor of the number."""

    gaussian: torch.Tensor

    def __init__(self, config: DiTConfig, scale: float):
        super().__init__()
        self.scale, self.frequencies = scale, config.timestep_frequencies
        width, num_features = config.width, TIMESTEP_FREQUENCIES
        if self.frequencies == "gaussian":
            # A buffer, because `fully_shard` would cast a parameter, and angles need float32.
            self.register_buffer("gaussian", torch.empty(TIMESTEP_FREQUENCIES))
            num_features *= 2
        self.mlp = nn.Sequential(nn.Linear(num_features, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.mlp[0].weight  # type: ignore[assignment]
        return self.mlp(self.features(t).type_as(weight))  # (B, D)

    def features(self, t: torch.Tensor) -> torch.Tensor:
        """(B,) -> (B, 256), or (B, 512) of random frequencies (gaussian; Tancik et al. 2020, arXiv 2006.10739)."""
        if self.frequencies == "gaussian":
            return waves(at_least_float32(t) * (2 * math.pi * self.scale), self.gaussian)
        return timestep_embedding(t, scale=self.scale, frequencies=self.frequencies)


class LabelEmbedder(nn.Module):
    """One row per class, and a last row for the null class."""

    def __init__(self, num_classes: int, width: int):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, width)

    def forward(self, class_label: torch.Tensor) -> torch.Tensor:
        return self.embedding_table(class_label)  # (B, D)


class TextEmbedder(nn.Module):
    """Text embeddings -> model width. Normalizes first: the scales of encoders differ by orders of magnitude."""

    def __init__(self, config: DiTConfig, input_width: int):
        super().__init__()
        self.norm = build_norm(config.norm_type, input_width)
        self.proj = nn.Linear(input_width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.norm(x.type_as(self.proj.weight)))  # (B, D), or (B, L, D)


class WordConvolution(nn.Module):
    """Depthwise convolution over the words of a caption."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.width, config.text_kernel))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _ConvolveWords.apply(words, self.weight)
        return output


class _ConvolveWords(torch.autograd.Function):
    """Words (B, L, D) and weight (D, K) -> (B, L, D). On a CPU, torch's gradient of the weight is slow."""

    @staticmethod
    def forward(ctx: Any, words: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(words, weight)
        return _convolve(words, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words, weight = ctx.saved_tensors
        length, kernel = words.shape[1], weight.shape[1]
        padded = F.pad(words, (0, 0, kernel // 2, kernel // 2))
        shifted = (padded[:, start : start + length] for start in range(kernel))
        of_weight = torch.stack([(part * gradient).sum((0, 1)) for part in shifted], dim=1)
        return _convolve(gradient, weight.flip(1)), of_weight


def _convolve(words: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    width, kernel = weight.shape
    images = words.mT.unsqueeze(2)  # (B, D, 1, L): faster than conv1d on a CPU
    return F.conv2d(images, weight[:, None, None], padding=(0, kernel // 2), groups=width).squeeze(2).mT


class Attention(nn.Module):
    def __init__(self, config: DiTConfig):
        super().__init__()
        self.head_dim = config.width // config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.q_norm, self.k_norm = build_qk_norm(config), build_qk_norm(config)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)  # 3 of (B, N, H, K)
        return self.attend(q, k, v, rope, mask)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, N, K)
        return self.proj(self.mix_tokens(q, k, v, mask).transpose(1, 2).flatten(2))

    def mix_tokens(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend, (B, H, N, K). Nowhere else do tokens of `run_blocks` read each other."""
        return attention(q, k, v, mask)


class CrossAttention(nn.Module):
    """Patches attend to text tokens. Neither is rotated, because a word has no position in the image."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.head_dim = config.width // config.num_heads
        self.q = nn.Linear(config.width, config.width)
        self.kv = nn.Linear(config.width, 2 * config.width)
        self.q_norm, self.k_norm = build_qk_norm(config), build_qk_norm(config)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor, text: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q = self.q_norm(self.q(x).unflatten(-1, (-1, self.head_dim)))  # (B, N, H, K)
        k, v = self.kv(text).unflatten(-1, (2, -1, self.head_dim)).unbind(2)  # 2 of (B, L, H, K)
        q, k, v = q.transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)  # (B, H, N or L, K)
        x = attention(q, k, v, mask).transpose(1, 2)  # (B, N, H, K)
        return self.proj(x.flatten(2))


class GELUMLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """w3(silu(w1 x) * w2 x) (Shazeer 2020), with w1 and w2 fused into one matrix.

    The hidden size is 2/3 of GELU's 4 D, which gives both the same number of parameters. It is rounded up to a
    multiple of 64 for the matrix kernels.
    """

    def __init__(self, width: int):
        super().__init__()
        hidden = math.ceil(8 * width // 3 / 64) * 64
        self.w12 = nn.Linear(width, 2 * hidden)
        self.w3 = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


def build_mlp(config: DiTConfig) -> nn.Module:
    return SwiGLU(config.width) if config.mlp == "swiglu" else GELUMLP(config.width)


class ModulationTable(nn.Module):
    """A block's own offset from the modulation that all blocks share (adaLN-single).

    c: (B, num_chunks D), or (B, D), which is added to each chunk, as in the paper's final layer.
    """

    def __init__(self, width: int, num_chunks: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(num_chunks * width))  # flat: FSDP shards the first dimension

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        return (c.unsqueeze(1) + self.table.view(-1, c.shape[-1])).flatten(1)  # (B, num_chunks D)


def adaln_modulation(width: int, num_chunks: int, *, is_shared: bool = False) -> nn.Module:
    if is_shared:
        return ModulationTable(width, num_chunks)
    return nn.Sequential(nn.SiLU(), nn.Linear(width, num_chunks * width))


class Block(nn.Module):
    """The interface of the repeated block. `model.block` names a subclass (docs/extending.md).

    A block has parameters but no buffers, and draws no random numbers. `DiT.init_weights` fills the parameters by name.
    The two tuples list the special parameters of a subclass, by the end of their names.
    """

    zero_weights: tuple[str, ...] = ()
    """Weights that are initialized to 0."""
    residual_weights: tuple[str, ...] = ()
    """The last layers before the residual stream. Without adaLN's gates (conditioning in_context) they start small."""
    conditionings: tuple[str, ...] = ("adaln", "in_context")
    """Values of `model.conditioning` that the block supports."""
    reads_text_jointly: bool = False
    """Whether the block is one of `model.text` joint."""
    mixes_only_in_attention: bool = False
    """Whether tokens read each other only in `Attention.mix_tokens`, which context parallelism requires."""
    reads_condition_per_token: bool = False
    """Whether c may be (B, N, D), as in decoupled heads."""

    def __init__(self, config: DiTConfig):
        super().__init__()

    @classmethod
    def option_mistakes(cls, config: DiTConfig) -> Iterator[tuple[str, str]]:
        """(option of `[model]`, what would be right) for each option that this block does not support."""
        yield from ()

    def forward(
        self,
        x: torch.Tensor,
        c: torch.Tensor | None,
        rope: torch.Tensor | None,
        text: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One block.

        Args:
            x: (B, N, D).
            c: (B, D), or (B, N, D) in a decoupled head; the shared modulation (B, 6 D) with adaln_single; None if the
                condition is in the tokens.
            rope: see `rotate`.
            text: (B, L, D) to cross-attend, or None.
            mask: bool (B, 1, 1, N), or (B, 1, 1, L) with `text`: false for padding tokens. None attends to all tokens.

        Returns:
            (B, N, D).
        """
        raise NotImplementedError


class DiTBlock(Block):
    """Attention and MLP, each with a residual: modulated and gated by the condition (adaLN-zero), or plain.

    With text, a plain residual of cross-attention comes between them, as in PixArt-alpha.
    """

    zero_weights: tuple[str, ...] = ("cross_attn.proj.weight",)
    residual_weights = ("attn.proj.weight", "mlp.fc2.weight", "mlp.w3.weight")
    conditionings = ("adaln", "adaln_single", "in_context")
    mixes_only_in_attention = True
    reads_condition_per_token = True

    def __init__(self, config: DiTConfig):
        super().__init__(config)
        self.norm1 = build_norm(config.norm_type, config.width)
        self.attn = Attention(config)
        if config.text == "cross_attention":
            self.norm_cross = build_norm(config.norm_type, config.width)
            self.cross_attn = CrossAttention(config)
        self.norm2 = build_norm(config.norm_type, config.width)
        self.mlp = build_mlp(config)
        if config.conditioning != "in_context":
            self.adaLN_modulation = adaln_modulation(config.width, 6, is_shared=config.conditioning == "adaln_single")

    def forward(
        self,
        x: torch.Tensor,
        c: torch.Tensor | None,
        rope: torch.Tensor | None,
        text: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        own_mask = mask if text is None else None
        if c is None:
            x = x + self.attn(self.norm1(x), rope, own_mask)
            return x + self.mlp(self.norm2(x))
        chunks = split_modulation(self.adaLN_modulation(c), 6)  # 6 of (B, 1, D) or (B, N, D)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = chunks
        x = x + gate_attn * self.attn(modulate(self.norm1(x), shift_attn, scale_attn), rope, own_mask)
        if text is not None:
            x = x + self.cross_attn(self.norm_cross(x), text, mask)
        return x + gate_mlp * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    def __init__(self, config: DiTConfig):
        super().__init__()
        self.norm_final = build_norm(config.norm_type, config.width)
        self.linear = nn.Linear(config.width, config.patch_size**2 * config.output_channels)
        if config.conditioning != "in_context":
            self.adaLN_modulation = adaln_modulation(config.width, 2, is_shared=config.conditioning == "adaln_single")

    def forward(self, x: torch.Tensor, c: torch.Tensor | None) -> torch.Tensor:
        x = self.norm_final(x)
        if c is not None:
            shift, scale = split_modulation(self.adaLN_modulation(c), 2)
            x = modulate(x, shift, scale)
        return self.linear(x)  # (B, N, P * P * C)


class Embedded(NamedTuple):
    """Inputs of the blocks."""

    x: torch.Tensor
    """Tokens (B, context + N, D)."""
    vector: torch.Tensor
    """The embeddings of t, of the other scalars and of pooled text (B, D)."""
    c: torch.Tensor | None
    """The same with the label (B, D); None if the condition is in the tokens."""
    rope: torch.Tensor | None
    """See `rope_table`."""
    text: torch.Tensor | None
    """(B, L, D) to cross-attend."""
    mask: torch.Tensor | None
    """See `Block.forward`."""


class DiT(nn.Module):
    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        self.x_embedder = PatchEmbed(config)
        self.t_embedder = TimestepEmbedder(config, config.timestep_scale)
        if config.scalars:
            embedders = {name: TimestepEmbedder(config, scale) for name, scale in config.scalars}
            self.scalar_embedders = nn.ModuleDict(embedders)
        if config.num_classes:
            self.y_embedder = LabelEmbedder(config.num_classes, config.width)
        if config.text is not None:
            self.text_embedder = TextEmbedder(config, config.text_width)
            if config.text_kernel:
                self.text_conv = WordConvolution(config)
            of_text = replace(config, conditioning="in_context", text=None)  # no modulation: text has no timestep
            self.text_blocks = nn.ModuleList(DiTBlock(of_text) for _ in range(config.text_blocks))
        if config.pooled_width:
            self.pooled_embedder = TextEmbedder(config, config.pooled_width)
        if "sincos" in config.position:
            # A frozen parameter, as in the released checkpoints; unlike a buffer, FSDP shards and casts it.
            table = torch.empty(1, config.num_patches, config.width)
            self.pos_embed = nn.Parameter(table, requires_grad=False)
        if config.conditioning == "adaln_single":
            self.adaLN_modulation = adaln_modulation(config.width, 6)  # shared by the blocks
        self.block_type: type[Block] = registered(BLOCKS, config.block)
        self.blocks = nn.ModuleList(self.block_type(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config)
        self.heads = nn.ModuleDict()
        self.head_features: dict[str, str] = {}
        self.init_outside_meta()

    @property
    def all_blocks(self) -> nn.ModuleList:
        """The blocks that `run` applies, in this order."""
        return self.blocks

    def add_heads(self, heads: Mapping[str, Head]) -> None:
        """Add heads that only training uses: `features=[name]` then returns the output of the head of this name."""
        self.heads.update({name: head.build() for name, head in heads.items()})
        self.head_features.update({name: head.feature for name, head in heads.items()})
        self.init_outside_meta()

    def read_text(self, cond: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the text tokens (B, L, D) and their mask (B, 1, 1, L) bool, false for padding, if the encoder has one.

        The first token is never masked. Some encoders mask all tokens of the empty caption, which would give 0 / 0.
        """
        if self.config.text is None:
            return None, None
        tokens = self.text_embedder(cond["prompt_embeds"])
        if self.config.text_positions:
            places = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)
            tokens = tokens + sincos(places, self.config.width).type_as(tokens)
        mask = next((cond[name].bool() for name in TEXT_MASKS if name in cond), None)
        if mask is not None:
            mask = torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], dim=1)[:, None, None]
        if self.config.text_kernel:
            words = tokens if mask is None else tokens * mask[:, 0, 0, :, None]  # no word reads padding
            tokens = tokens + self.text_conv(words)
        for block in self.text_blocks:
            tokens = block(tokens, None, None, None, mask)
        return tokens, mask

    def forward(
        self, x_t: torch.Tensor, t: torch.Tensor, cond: Mapping[str, torch.Tensor], features: Collection[str] = ()
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Predict from a noisy sample.

        Args:
            x_t: (B, C, H, W), H and W multiples of the patch size.
            t: (B,) float32 in [0, 1]; 0 is noise and 1 is data, or the time that the objective gives it.
            cond: {"class_label": (B,) int64}, where `num_classes` is the null class; {} without classes. With text,
                `prompt_embeds` (B, L, text_width), `pooled_prompt_embeds` (B, pooled_width) if the model has that
                width, and optionally one of `TEXT_MASKS` (B, L): false for padding. `name` (B,) for each of `scalars`.
            features: names of blocks ("blocks.3") whose output to return, or of heads.

        Returns:
            (B, C, H, W), or (B, 2 C, H, W) with learned sigma. With `features`, a pair of that and
            {name: (B, N, D)}, the patch tokens after each of these blocks, with gradients, or the output of the head.
        """
        sources = {name: self.head_features.get(name, name) for name in features}
        x, c, found = self.run(x_t, self.embed(x_t, t, cond), sources.values())
        prediction = unpatchify(self.predict_patches(x, c), self.config.patch_size, *x_t.shape[-2:])
        if not features:
            return prediction
        found = {name: tokens[:, self.config.num_context_tokens :] for name, tokens in found.items()}
        return prediction, {
            name: self.heads[name](found[source]) if name in self.heads else found[source]
            for name, source in sources.items()
        }

    def embed(self, x_t: torch.Tensor, t: torch.Tensor, cond: Mapping[str, torch.Tensor]) -> Embedded:
        """Embed the arguments of `forward`."""
        config, (height, width) = self.config, x_t.shape[-2:]
        x = self.embed_patches(x_t)  # (B, N, D)
        if "sincos" in config.position:
            x = x + self.pos_embed
        vector: torch.Tensor = self.t_embedder(t)  # (B, D)
        for name, _ in config.scalars:
            vector = vector + self.scalar_embedders[name](cond[name])
        if config.pooled_width:
            vector = vector + self.pooled_embedder(cond["pooled_prompt_embeds"])
        labels = [self.y_embedder(cond["class_label"])] if config.num_classes else []  # (B, D)
        context, c = [], None
        if config.conditioning == "in_context":
            context.append(torch.stack([vector, *labels], dim=1))  # (B, 1 or 2, D)
        else:
            c = sum(labels, start=vector)
        text, mask = self.read_text(cond)
        if text is not None and config.text_is_context:
            context.append(text)
            text = None
            if mask is not None:  # only padding is masked
                mask = F.pad(mask, (config.num_context_tokens - config.text_tokens, x.shape[1]), value=True)
        if context:
            x = torch.cat([*context, x], dim=1)  # (B, context + N, D)
        # Computed in each forward: a few small kernels, and no buffer to fill, cast or move.
        rope = rope_table(config, height, width, x_t.device) if "rope" in config.position else None
        return Embedded(x, vector, c, rope, text, mask)

    def embed_patches(self, x_t: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) -> (B, N, D), without positions."""
        return self.x_embedder(x_t)

    def run(
        self, x_t: torch.Tensor, embedded: Embedded, features: Collection[str]
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """Apply all blocks. Returns the tokens and the condition for `predict_patches`, and the features."""
        x, _, c, rope, text, mask = embedded
        modulation = self.adaLN_modulation(c) if self.config.conditioning == "adaln_single" else c
        x, found = self.run_blocks(self.blocks, x, modulation, rope, text, mask, features)
        return x, c, found

    def run_blocks(
        self,
        blocks: nn.ModuleList,
        x: torch.Tensor,
        c: torch.Tensor | None,
        rope: torch.Tensor | None,
        text: torch.Tensor | None,
        mask: torch.Tensor | None,
        features: Collection[str],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Apply blocks to the tokens x (B, context + N, D). Returns them and the features, of all tokens too."""
        found: dict[str, torch.Tensor] = {}
        for i, block in enumerate(blocks):
            x = block(x, c, rope, text, mask)
            if (name := f"blocks.{i}") in features:
                found[name] = x
        return x, found

    def predict_patches(self, x: torch.Tensor, c: torch.Tensor | None) -> torch.Tensor:
        """Tokens (B, context + N, D) -> patches of the prediction (B, N, P * P * C)."""
        if self.config.num_context_tokens:
            x = x[:, self.config.num_context_tokens :]
        return self.final_layer(x, c)

    def init_outside_meta(self) -> None:
        """Call `init_weights(0)`, unless on the meta device. Every constructor ends with it."""
        if not self.x_embedder.proj.weight.is_meta:
            self.init_weights(0)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer from (seed, its name). The only buffers are Gaussian frequencies.

        As in the paper: Xavier uniform for linear layers (the patch convolution as a linear layer, qkv and w12 as
        fused matrices), N(0, 0.02) for the label table and the timestep MLP, zero biases, and a zero adaLN and final
        layer, so that a block starts as the identity and the prediction as 0. So does cross-attention, whose last layer
        is zero, and the embedder of each scalar. Blocks without a gate (in_context, and those of the text alone) start
        small: N(0, 0.02 / sqrt(2 depth)) in the two projections into the residual stream (GPT-2). The block's class
        lists its special weights.
        """
        for name, buffer in self.named_buffers():
            assert name.endswith(".gaussian"), f"{name} would stay uninitialized"
            fill(buffer, draw_normal(seed, name, buffer.shape, std=1.0))
        zero_weights = self.block_type.zero_weights
        of_blocks = self.block_type.residual_weights if self.config.conditioning == "in_context" else ()
        residual_weights = {"blocks": (of_blocks, self.config.depth)}
        residual_weights["text_blocks"] = (DiTBlock.residual_weights, self.config.text_blocks)
        for name, parameter in self.named_parameters():
            shape, is_of_block = parameter.shape, name.startswith(("blocks.", "head_blocks."))
            small, depth = residual_weights.get(name.partition(".")[0], ((), 0))
            is_zero = name == "final_layer.linear.weight" or (is_of_block and name.endswith(zero_weights))
            is_zero |= name.startswith("scalar_embedders.") and name.endswith("mlp.2.weight")
            if name == "pos_embed":
                rows, columns = (size // self.config.patch_size for size in self.config.image_size)
                fill(parameter, sincos_position_table(self.config.width, rows, columns).unsqueeze(0))
            elif is_zero or name.endswith("bias") or "adaLN_modulation" in name:
                parameter.zero_()
            elif len(shape) == 1:  # the weight of a norm
                parameter.fill_(1.0)
            elif name.startswith(("y_embedder.", "t_embedder.", "scalar_embedders.", "pooled_embedder.")):
                fill(parameter, draw_normal(seed, name, shape, std=0.02))
            elif name == "text_conv.weight":  # the neighbours are as loud as the word
                fill(parameter, draw_normal(seed, name, shape, std=shape[-1] ** -0.5))
            elif name.endswith(small):
                fill(parameter, draw_normal(seed, name, shape, std=0.02 / math.sqrt(2 * depth)))
            else:
                fill(parameter, draw_xavier_uniform(seed, name, shape))
