# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Decoupled heads: DDT (Wang et al. 2025, arXiv 2504.05741) and DiT-DH (Zheng et al. 2025, RAE, arXiv 2510.11690).

The blocks of a DiT encode the noisy sample to one vector per token, and a head predicts from the sample and them:

    s = encoder(x_t; t + y)
    z = t + s                # DDT:    per token, (B, N, D)
    z = W SiLU(t + s)        # DiT-DH: to the width of the head
    prediction = head(x_t; adaLN(z))

Notable:
- encoder and head have a patch embedding each. A sin-cos table is added in the encoder only; both rotate;
- adaLN begins with a SiLU, so z counts as SiLU(t + s) in DDT. DiT-DH also applies one to t + y, SiLU twice in all;
- `model.flavor` sets the sizes of the encoder, and options after the name those of the head. DDT-XL/2 is `ddt` with
  DiT-XL and `model.overrides = ["depth=22"]`; DiT-DH-XL is `ddt head_depth=2 head_width=2048 head_heads=16`;
- FSDP, compile and checkpointing see one row of blocks, `all_blocks`. Both streams pass `run_blocks`, so that context
  parallelism splits their tokens in the same way;
- initial weights are drawn as in `DiT`. The public codes leave most layers at torch's default, and DDT's also the
  modulations of the blocks, which start at 0 here;
- parameters have the names of the official repositories, in which the blocks of the head continue `blocks`.

Shapes: B samples, N tokens, D width of the encoder, E width of the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchditan.config.declarations import Above, AtLeast
from torchditan.config.options import Model
from torchditan.errors import option_error
from torchditan.models import ModelSpec, build_dit_spec
from torchditan.models.dit import DiT, DiTConfig, Embedded, FinalLayer, PatchEmbed, rope_table
from torchditan.registry import BLOCKS, registered


@dataclass(frozen=True)
class DDTConfig(DiTConfig):
    """Sizes and options: those of the encoder by the names of `DiTConfig`, and those of the head."""

    head_depth: int = 6
    head_width: int = 0
    head_heads: int = 0
    silu_twice: bool = False
    """Apply SiLU to the condition of the encoder, and to z where nothing projects it, before adaLN does."""
    final_norm: str = "rmsnorm"
    """Norm of the final layer, a `norm_type`."""

    @property
    def head(self) -> DiTConfig:
        """Of the head's blocks."""
        return dataclasses.replace(self, width=self.head_width, num_heads=self.head_heads)


class DDT(DiT):
    config: DDTConfig

    def __init__(self, config: DDTConfig):
        super().__init__(config)
        head = config.head
        self.s_embedder = self.x_embedder
        self.x_embedder = PatchEmbed(head)
        is_projected = head.width != config.width
        self.s_projector = nn.Linear(config.width, head.width) if is_projected else nn.Identity()
        self.head_blocks = nn.ModuleList(self.block_type(head) for _ in range(config.head_depth))
        self.final_layer = FinalLayer(dataclasses.replace(head, norm_type=config.final_norm))
        self.init_outside_meta()

    @property
    def all_blocks(self) -> nn.ModuleList:
        return nn.ModuleList([*self.blocks, *self.head_blocks])

    def embed_patches(self, x_t: torch.Tensor) -> torch.Tensor:
        return self.s_embedder(x_t)

    def run(
        self, x_t: torch.Tensor, embedded: Embedded, features: Collection[str]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Encode, and apply the head: its tokens (B, N, E), z (B, N, E), and features of the encoder."""
        config, (height, width) = self.config, x_t.shape[-2:]
        s, vector, c, rope, _, _ = embedded
        assert c is not None
        if config.silu_twice:
            c = F.silu(c)
        s, found = self.run_blocks(self.blocks, s, c, rope, None, None, features)
        z = vector.unsqueeze(1) + s
        if config.silu_twice or config.head_width != config.width:
            z = F.silu(z)
        z = self.s_projector(z)
        if rope is not None:
            rope = rope_table(config.head, height, width, x_t.device)
        x, _ = self.run_blocks(self.head_blocks, self.x_embedder(x_t), z, rope, None, None, ())
        return x, z, found


def build_ddt_spec(
    config: Model,
    *,
    sample_shape: tuple[int, ...],
    num_classes: int,
    scalars: Mapping[str, float] = MappingProxyType({}),
    head_depth: Annotated[int, AtLeast(1)] = 6,
    head_width: Annotated[int | None, AtLeast(1)] = None,
    head_heads: Annotated[int | None, AtLeast(1)] = None,
    silu_twice: Annotated[bool | None, "see below"] = None,
    final_norm: Literal["as_blocks", "rmsnorm", "layernorm", "np_layernorm"] = "as_blocks",
    rope_extent: Annotated[float | None, Above(0)] = None,
) -> ModelSpec:
    """`model.name = "ddt"`.

    Args:
        config, sample_shape, num_classes, scalars: as in `build_dit_spec`.
        head_depth: number of the head's blocks, in addition to those of the flavor.
        head_width: None: the encoder's.
        head_heads: attention heads of the head; None: as many as the encoder has.
        silu_twice: see `DDTConfig`; None: as in the publications, with a head of another width.
        final_norm: norm of the final layer.
        rope_extent: position of the last row and column in RoPE, 16 in the code of DDT; None: one per patch.

    Raises:
        ConfigError: sizes that do not fit together, or an option that a decoupled head does not support.
    """
    spec = build_dit_spec(config, sample_shape=sample_shape, num_classes=num_classes, scalars=scalars)
    encoder: DiTConfig = spec.config
    for option, value, is_right, right in (
        ("text", encoder.text, encoder.text is None, "ddt does not read captions; leave it out"),
        (
            "conditioning",
            encoder.conditioning,
            encoder.conditioning == "adaln",
            "ddt needs a modulation; must be adaln",
        ),
        (
            "block",
            encoder.block,
            registered(BLOCKS, encoder.block).reads_condition_per_token,
            "does not declare reads_condition_per_token, which ddt needs",
        ),
    ):
        if not is_right:
            raise option_error(f"model.{option}", value, right)
    width, heads = head_width or encoder.width, head_heads or encoder.num_heads
    multiple = heads if encoder.position == "sincos" else 4 * heads
    if width % multiple:
        right = f"with {heads} heads, head_width must be a multiple of {multiple}, not {width}"
        raise option_error("model.name", config.name, right)
    ddt = DDTConfig(
        **{**vars(encoder), "rope_extent": rope_extent},
        head_depth=head_depth,
        head_width=width,
        head_heads=heads,
        silu_twice=width != encoder.width if silu_twice is None else silu_twice,
        final_norm=encoder.norm_type if final_norm == "as_blocks" else final_norm,
    )
    return dataclasses.replace(spec, name="ddt", config=ddt, build=lambda: DDT(ddt))
