# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Context parallelism of the native DiT: the ranks of a group share the tokens of each sample.

Notable:
- the algorithm is that of DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Each rank applies the blocks and
  the final layer to its tokens. Around attention, one all-to-all exchanges some tokens with all heads for all tokens
  with some heads, and a second one returns the result. All else works on each token, or reads what every rank has: the
  modulation, and the text of cross-attention;
- the model knows nothing of it. `split_tokens` replaces three methods on the instance: `DiT.run_blocks`,
  `DiT.predict_patches`, and `Attention.mix_tokens` of each block;
- the ranks of a group compute the loss of the same samples from the same prediction. `exchange` sends the gradients
  back to the ranks that they come from, so that autograd gives the gradient of the sum of the ranks' losses. FSDP
  averages over all ranks, and the sum over a group becomes the gradient of one loss;
- the tokens are padded to a multiple of the degree. Attention does not see the padding;
- without gradients the model is not split: in validation and sampling each rank has samples of its own.

Shapes: B samples, T tokens (context and patches), n = ceil(T / degree) tokens of a rank, D width, H heads of size K.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torchditan.config.options import Config
from torchditan.errors import option_error
from torchditan.models import block_name, sizes_of
from torchditan.models.dit import FLAVORS, Attention, DiT
from torchditan.registry import BLOCKS, FAMILIES, registered

OPTION = "training.context_parallel_degree"


def split_tokens_over_ranks(model: nn.Module, *, degree: int, timeout_seconds: int) -> None:
    """Split the tokens over each `degree` consecutive ranks. All ranks call it, before `parallelize`."""
    group, _ = dist.new_subgroups(degree, timeout=timedelta(seconds=timeout_seconds))
    split_tokens(model, degree=degree, rank=dist.get_rank(group), group_name=group.group_name)


def split_tokens(model: nn.Module, *, degree: int, rank: int, group_name: str | None) -> None:
    """Let a model compute one rank's part of the tokens, in place, while gradients are recorded.

    Args:
        model: a DiT, on any device, not yet compiled or sharded.
        degree: number of ranks in the group. It divides the number of heads.
        rank: of this process in the group.
        group_name: the process group; None sends nothing. The results then have the sizes of a rank's own, but no
            meaning, which is enough for the planner.
    """
    if not isinstance(model, DiT):
        raise option_error(
            OPTION, degree, f"splits the tokens of a DiT, which {type(model).__name__} is not; must be 1"
        )
    tokens = TokenGroup(degree, rank, group_name)
    whole: Any = model  # mypy does not let an instance replace its methods
    whole.run_blocks = partial(tokens.run_blocks, model.run_blocks)
    whole.predict_patches = partial(tokens.predict_patches, model.predict_patches, model)
    for module in model.all_blocks.modules():
        if isinstance(module, Attention):
            heads = module.proj.in_features // module.head_dim
            if heads % degree:  # of a decoupled head; `option_mistakes` checked the others
                raise option_error(
                    OPTION, degree, f"must also divide the {heads} attention heads of the decoupled head"
                )
            attention: Any = module
            attention.mix_tokens = partial(tokens.mix_tokens, module.mix_tokens)


@dataclass
class TokenGroup:
    """The ranks that share the tokens of a sample, seen from one of them. Its methods replace those of the model."""

    degree: int
    rank: int
    group_name: str | None
    num_tokens: int = 0
    """T of the current forward."""

    def run_blocks(
        self,
        run_blocks: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]],
        blocks: nn.ModuleList,
        x: torch.Tensor,
        c: torch.Tensor | None,
        rope: torch.Tensor | None,
        text: torch.Tensor | None,
        mask: torch.Tensor | None,
        features: Collection[str],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`DiT.run_blocks`, which returns this rank's tokens (B, n, D), and features of all tokens (B, T, D)."""
        if not torch.is_grad_enabled():
            return run_blocks(blocks, x, c, rope, text, mask, features)
        self.num_tokens = x.shape[1]
        rope = None if rope is None else self.own(rope, dim=0)
        x, found = run_blocks(blocks, self.own(x, dim=1), c, rope, text, mask, features)
        return x, {name: self.gather(tokens) for name, tokens in found.items()}

    def predict_patches(
        self, predict_patches: Callable[..., torch.Tensor], model: DiT, x: torch.Tensor, c: torch.Tensor | None
    ) -> torch.Tensor:
        """`DiT.predict_patches` from this rank's tokens: (B, n, D) -> (B, N, P * P * C)."""
        if not torch.is_grad_enabled():
            return predict_patches(x, c)
        return self.gather(model.final_layer(x, c))[:, model.config.num_context_tokens :]

    def mix_tokens(
        self,
        mix_tokens: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """`Attention.mix_tokens` of this rank's tokens with those of all ranks: (B, H, n, K). The mask has all T."""
        if not torch.is_grad_enabled():
            return mix_tokens(q, k, v, mask)
        # (degree, 3, B, H / degree, n, K): before the exchange dimension 0 counts the heads, and then the tokens.
        x = torch.stack([part.type_as(v).unflatten(1, (self.degree, -1)).movedim(1, 0) for part in (q, k, v)], dim=1)
        x = self.exchange(x).movedim(0, 3).flatten(3, 4)[..., : self.num_tokens, :]
        x = mix_tokens(*x.unbind(), mask)  # (B, H / degree, T, K)
        if padding := self.degree * q.shape[2] - self.num_tokens:
            x = F.pad(x, (0, 0, 0, padding))
        x = self.exchange(x.unflatten(2, (self.degree, -1)).movedim(2, 0))  # (degree, B, H / degree, n, K)
        return x.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)  # laid out as (B, n, H, K)

    def own(self, x: torch.Tensor, *, dim: int) -> torch.Tensor:
        """This rank's part of the tokens in a dimension, T -> n, with zeros for padding."""
        size = -(-x.shape[dim] // self.degree)
        start = min(self.rank * size, x.shape[dim])
        part = x.narrow(dim, start, min(size, x.shape[dim] - start))
        # `pad` copies, without padding too. A view would keep the tokens of all ranks in memory until the backward.
        return F.pad(part, [0, 0] * (x.dim() - 1 - dim) + [0, size - part.shape[dim]])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens of all ranks: (B, n, ...) -> (B, T, ...)."""
        x = self.exchange(x.expand(self.degree, *x.shape))  # (degree, B, n, ...)
        return x.movedim(0, 1).flatten(1, 2)[:, : self.num_tokens]

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """All-to-all: row i of x (degree, ...) goes to rank i, and row j of the result comes from rank j."""
        return _Exchange.apply(x, self.group_name)


class _Exchange(torch.autograd.Function):
    """All-to-all over dimension 0. Its transpose is itself: gradients go back to where the values came from."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str | None) -> torch.Tensor:
        ctx.group_name = group_name
        return _all_to_all(x, group_name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.group_name), None


def _all_to_all(x: torch.Tensor, group_name: str | None) -> torch.Tensor:
    x = x.contiguous()
    if group_name is None:
        return x.clone()
    # torch.compile captures these operators as they are; it would first have to rewrite dist.all_to_all_single.
    sizes = [1] * x.shape[0]
    received = torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, group_name)
    return torch.ops._c10d_functional.wait_tensor(received)


def option_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    """(option, what would be right) for each option that does not work with a degree above 1."""
    model, degree = config.model, config.training.context_parallel_degree
    if model.name in FAMILIES:
        yield OPTION, f"splits the tokens of native models only; must be 1 with {model.name}"
        return
    block = block_name(model)
    if not registered(BLOCKS, block).mixes_only_in_attention:
        yield OPTION, f"the block {block} does not declare mixes_only_in_attention; must be 1"
    if model.flavor in FLAVORS and (heads := sizes_of(model)["num_heads"]) % degree:
        divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        yield OPTION, f"must divide the {heads} attention heads of the model: one of {divisors}"
    right = f"with {OPTION} {degree}"
    if config.dataset.streaming:
        yield "dataset.streaming", f"gives each rank other samples; must be false {right}"
    if config.training.batch_size == "auto":
        yield "training.batch_size", f"must be a number {right}; the planner estimates the largest"
    if config.float8.enable_float8_linear:
        yield "float8.enable_float8_linear", f"must be false {right}"
