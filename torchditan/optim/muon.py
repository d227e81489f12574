# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Muon: orthogonalized momentum for the matrices of the blocks, AdamW for all other weights.

Notable:
- queries, keys and values are orthogonalized as three matrices, the two halves of SwiGLU as two;
- a sharded update needs whole matrices. The ranks take turns as owners: each gathers some of the parameters, computes
  their updates, and sends every rank its rows. One rank and many compute the same update, because nothing is summed;
- per step a rank receives P / W elements to orthogonalize and P / S elements of the update, in `ns_dtype`. P is the
  size of all matrices, W the number of ranks, S the number of shards (1 for DDP). No rank repeats another's work;
- the momentum is sharded like its parameter, so that checkpoints load on any number of ranks;
- with CPU offload the update is computed on the accelerator, and moved there and back;
- the update is skipped on the device, as fused AdamW does, so that the host never waits (divergence.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchditan.config.declarations import AtLeast, Below
from torchditan.config.options import Optimizer as OptimizerConfig
from torchditan.optim.ema import local_tensor
from torchditan.optim.optimizers import ParameterGroup, adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic of a Newton-Schulz iteration (Jordan et al. 2024). It maps singular values to about 0.7 to 1.2."""
EPS = 1e-7
"""Smallest norm that a matrix is divided by."""
MAX_OWNED = 2**25
"""Elements that a rank orthogonalizes at once, but at least one parameter: 64 MiB in bfloat16."""


def muon(
    config: OptimizerConfig,
    *,
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.95,
    nesterov: bool = True,
    ns_steps: Annotated[int, AtLeast(1)] = 5,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
) -> list[ParameterGroup]:
    """Muon for the weight matrices of `blocks` and AdamW for the rest: embeddings, text blocks, adaLN, norms, biases.

    Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon) and Liu et al. 2025 (Moonlight, arXiv 2502.16982).

    With `adjust_lr_fn` match_rms_adamw (Moonlight) the updates are as large as AdamW's, so that both parts use learning
    rates and weight decay of AdamW. With original (Jordan et al.) rates of Muon are around 0.02, and `adamw_lr` sets
    that of AdamW. Both follow the schedule.
    """
    options = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_steps": ns_steps,
        "ns_dtype": getattr(torch, config.ns_dtype),
        "adjust_lr_fn": adjust_lr_fn,
    }
    matrices = [
        ParameterGroup(
            Muon,
            {**options, "num_matrices": num_matrices},
            takes=functools.partial(_takes, num_matrices),
            state_bytes=lambda shape: 4 * math.prod(shape),
            update_flops=functools.partial(newton_schulz_flops, num_matrices=num_matrices, steps=ns_steps),
        )
        for num_matrices in (3, 2, 1)
    ]
    lr_scale = 1.0 if config.adamw_lr is None else config.adamw_lr / config.lr
    return [*matrices, *(dataclasses.replace(group, lr_scale=lr_scale) for group in adamw(config))]


def _takes(num_matrices: int, name: str, parameter: torch.Tensor) -> bool:
    return num_matrices_of(name, tuple(parameter.shape)) == num_matrices


def num_matrices_of(name: str, shape: tuple[int, ...]) -> int:
    """Number of matrices of one shape that a parameter fuses along its rows, as `qkv`, `kv` or `w12` of models/dit.py.

    0 if AdamW updates it.
    """
    if not name.startswith(("blocks.", "head_blocks.")) or len(shape) != 2 or "adaLN_modulation" in name:
        return 0
    layer = name.split(".")[-2]
    if layer == "w12":
        return 2
    fused = {"qkv": 3, "kv": 2}.get(layer, 1)
    return fused if shape[0] == fused * shape[1] else 1  # grouped queries, for example, have other shapes


def newton_schulz_flops(shape: tuple[int, ...], *, num_matrices: int, steps: int) -> int:
    """FLOPs of the matrix products of one update: steps (4 m^2 n + 2 m^3) per matrix of sides m <= n."""
    m, n = sorted((shape[0] // num_matrices, shape[1]))
    return num_matrices * steps * (4 * m * m * n + 2 * m**3)


def orthogonalize(matrices: torch.Tensor, *, steps: int) -> torch.Tensor:
    """Newton-Schulz iterations towards U V^T, for matrices U S V^T: (K, m, n) -> (K, m, n), in their dtype.

    X <- a X + (b A + c A A) X with A = X X^T, from X of norm 1. The singular values end near 1, not at 1.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices  # the smaller Gram matrix
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def lr_adjustment(adjust_lr_fn: str, rows: int, columns: int) -> float:
    """Factor of the learning rate for a matrix.

    original: sqrt(max(1, rows / columns)). match_rms_adamw: 0.2 sqrt(max(rows, columns)), which gives the update the
    usual root mean square of AdamW's, 0.2.
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """Muon for matrices, whole or sharded along their rows. On one process it computes what `torch.optim.Muon` does.

    B <- momentum B + (1 - momentum) G, then W <- (1 - lr weight_decay) W - lr adjustment NS(U), where U is B, or with
    Nesterov's momentum (1 - momentum) G + momentum B.

    Args:
        parameters: 2D, or groups of them. DTensors have a mesh (shard) or (replicate, shard) over all ranks.
        lr, weight_decay: as above; the decay is not adjusted.
        momentum, nesterov: as above.
        ns_steps: number of Newton-Schulz iterations.
        ns_dtype: their dtype.
        adjust_lr_fn: see `lr_adjustment`.
        num_matrices: matrices of one shape that each parameter fuses along its rows.
    """

    def __init__(
        self,
        parameters: Any,
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        adjust_lr_fn: str = "match_rms_adamw",
        num_matrices: int = 1,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        # For DivergenceGuard: `step` reads `found_inf` as fused kernels do. Not a key of the groups, which are saved.
        self.defaults["fused"] = True
        self.momentum = momentum
        self.nesterov = nesterov
        self.ns_steps = ns_steps
        self.ns_dtype = ns_dtype
        self.adjust_lr_fn = adjust_lr_fn
        self.num_matrices = num_matrices

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                size = num_ranks(parameters[0]) * max(1, MAX_OWNED // shape.numel())
                for start in range(0, len(parameters), size):
                    self._update(parameters[start : start + size], lr=group["lr"], weight_decay=group["weight_decay"])

    def _update(self, parameters: list[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        """Update parameters of one shape."""
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        is_skipped = None if found_inf is None else found_inf.to(parameters[0].device) > 0
        updates = [self._momentum_update(parameter, is_skipped) for parameter in parameters]
        if lr == 0:  # also in the steps that create the state for a checkpoint, which nothing needs to gather
            return
        owners = Owners(parameters[0], len(parameters))
        whole = owners.gather(updates)  # (owned, rows, columns)
        matrices = whole.unflatten(1, (self.num_matrices, -1)).flatten(0, 1)  # (owned * num_matrices, m, n)
        if len(matrices):
            matrices = orthogonalize(matrices, steps=self.ns_steps)
        directions = owners.scatter(matrices.reshape(whole.shape))
        rate = lr * lr_adjustment(self.adjust_lr_fn, *matrices.shape[1:])
        for parameter, direction in zip(parameters, directions, strict=True):
            weight = local_tensor(parameter)
            updated = (weight * (1 - lr * weight_decay)).sub_(direction.to(weight.device), alpha=rate)
            weight.copy_(updated if is_skipped is None else torch.where(is_skipped, weight, updated))

    def _momentum_update(self, parameter: nn.Parameter, is_skipped: torch.Tensor | None) -> torch.Tensor:
        """Add the gradient to the momentum, and return this rank's rows of the update to orthogonalize."""
        assert parameter.grad is not None
        gradient, state = local_tensor(parameter.grad), self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = local_tensor(state["momentum_buffer"])
        if is_skipped is not None:  # lerp between equal values changes nothing
            gradient = torch.where(is_skipped, buffer, gradient)
        buffer.lerp_(gradient, 1 - self.momentum)
        return (gradient.lerp(buffer, self.momentum) if self.nesterov else buffer).to(self.ns_dtype)


def num_ranks(parameter: torch.Tensor) -> int:
    """Number of ranks over which a parameter is sharded or replicated."""
    return parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1


class Owners:
    """Moves parameters of one shape between the shards of all ranks and the owner of each. Every rank calls it.

    Parameter i belongs to rank i mod W. The owner gathers its rows from the shards of its own replica, and sends the
    result to the shards of all replicas. Rank = replica * S + shard.

    Args:
        parameter: one of them.
        count: their number.
    """

    def __init__(self, parameter: torch.Tensor, count: int) -> None:
        self.num_ranks = num_ranks(parameter)
        self.owned = [range(rank, count, self.num_ranks) for rank in range(self.num_ranks)]
        self.device, self.rank, self.num_shards = parameter.device, 0, 1
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            assert self.num_ranks == dist.get_world_size()
            self.device = torch.device(mesh.device_type)  # of an offloaded parameter too
            self.rank, self.num_shards = mesh.get_rank(), mesh.size(mesh.ndim - 1)
        size, chunk = parameter.shape[0], math.ceil(parameter.shape[0] / self.num_shards)
        starts = [min(size, shard * chunk) for shard in range(self.num_shards + 1)]
        self.rows = [range(*pair) for pair in itertools.pairwise(starts)]
        """Rows of each shard."""
        first = self.rank - self.rank % self.num_shards
        self.replica = range(first, first + self.num_shards)
        """Ranks of this rank's replica."""

    def rows_of(self, rank: int) -> range:
        return self.rows[rank % self.num_shards]

    def gather(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """This rank's rows of every parameter -> the parameters it owns, (owned, rows, columns)."""
        if self.num_ranks == 1:
            return torch.stack(shards).to(self.device)
        own, here = len(self.owned[self.rank]), len(self.rows_of(self.rank))
        sent = [len(self.owned[rank]) * here * (rank in self.replica) for rank in range(self.num_ranks)]
        received = [own * len(self.rows_of(rank)) * (rank in self.replica) for rank in range(self.num_ranks)]
        by_owner = [shards[i] for rank in self.replica for i in self.owned[rank]]
        parts = self._exchange(torch.cat([shards[0][:0], *by_owner]), sent, received)
        columns = shards[0].shape[1]
        whole = [parts[rank].view(own, len(self.rows_of(rank)), columns) for rank in self.replica]
        return torch.cat(whole, dim=1)

    def scatter(self, owned: torch.Tensor) -> list[torch.Tensor]:
        """The inverse: results of the parameters it owns -> this rank's rows of every result."""
        if self.num_ranks == 1:
            return list(owned)
        own, here, columns = len(owned), len(self.rows_of(self.rank)), owned.shape[2]
        sent = [own * len(self.rows_of(rank)) for rank in range(self.num_ranks)]
        received = [len(numbers) * here for numbers in self.owned]
        by_rank = [owned[:, rows.start : rows.stop].flatten(0, 1) for rows in map(self.rows_of, range(self.num_ranks))]
        parts = self._exchange(torch.cat(by_rank), sent, received)
        found = {
            i: shard
            for numbers, part in zip(self.owned, parts, strict=True)
            for i, shard in zip(numbers, part.view(len(numbers), here, columns), strict=True)
        }
        return [found[i] for i in range(len(found))]

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> tuple[torch.Tensor, ...]:
        """Send rows (sum of `sent`, columns) to all ranks, and return those of each rank."""
        output = rows.new_empty(sum(received), rows.shape[1], device=self.device)
        dist.all_to_all_single(output, rows.to(self.device), received, sent)
        return output.split(received)
