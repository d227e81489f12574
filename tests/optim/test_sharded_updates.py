# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Clipping, AdamW and the averages of sharded weights: on local tensors, with the numbers of whole ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchditan.config.options import Optimizer
from torchditan.optim.ema import EMA
from torchditan.optim.meters import UpdateNorm, measuring
from torchditan.optim.optimizers import build_optimizer, clip_grad_norm

SHAPES = [(3, 4), (1, 5), (6,), (4, 2)]
"""On two ranks the second one holds 1 of 3 rows, and nothing of the second parameter."""
STEPS = 3


class Weights(nn.Module):
    """Four parameters, whole or sharded over a mesh."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        for number, shape in enumerate(SHAPES):
            self.register_parameter(f"weight{number}", nn.Parameter(self.shard(draw(number, shape))))

    def shard(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return tensor
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        return distribute_tensor(tensor, self.mesh, placements, src_data_rank=None)

    def give_gradients(self, step: int) -> None:
        for number, parameter in enumerate(self.parameters()):
            parameter.grad = self.shard(draw(100 * step + number, tuple(parameter.shape)))


def draw(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


class Dispatched(TorchDispatchMode):
    """Names of the operations that see a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def train(model: Weights, *, watched: Dispatched | None = None) -> list[torch.Tensor]:
    """Norms, weights, moments and averages after a few steps. `watched` sees all but the first."""
    optimizer = build_optimizer(model, Optimizer(lr=0.1, weight_decay=0.1))
    averages = [EMA(model, decay=0.9), EMA(model, width=0.1)]
    parameters = list(model.parameters())
    meter = UpdateNorm(model)
    norms, read = [], []
    for step in range(1, STEPS + 1):
        model.give_gradients(step)
        if watched is not None and step > 1:
            watched.__enter__()
        norms.append(clip_grad_norm(parameters, max_norm=1.0))
        with measuring([meter]):
            optimizer.step()
        read += [torch.tensor(value) for value in meter.read().values()]
        for ema in averages:
            ema.update(step)
        if watched is not None and step > 1:
            watched.__exit__(None, None, None)
    moments = [optimizer.state[parameter][key] for parameter in parameters for key in ("exp_avg", "exp_avg_sq")]
    assert all(type(moment) is type(parameters[0].data) for moment in moments)  # checkpoints store DTensors
    averaged = [tensor for ema in averages for tensor in ema.average.values()]
    return [*norms, *map(full, (*parameters, *moments, *averaged)), *read]


def test_the_norm_of_the_update_is_that_of_the_change_of_all_weights() -> None:
    model = Weights(None)
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    meter, optimizer = UpdateNorm(model), build_optimizer(model, Optimizer(lr=0.1))
    model.give_gradients(1)
    with measuring([meter]):
        optimizer.step()
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    found = meter.read()
    assert found["update_norm"] == pytest.approx((after - before).norm().item(), rel=1e-6)
    assert found["weight_norm"] == pytest.approx(before.norm().item(), rel=1e-6)


@pytest.fixture
def mesh_of_one() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def test_on_one_process_dtensors_give_the_bits_of_tensors_and_are_never_dispatched(mesh_of_one: DeviceMesh) -> None:
    watched = Dispatched()
    found, expected = train(Weights(mesh_of_one), watched=watched), train(Weights(None))
    assert [torch.equal(left, right) for left, right in zip(found, expected, strict=True)] == [True] * len(expected)
    assert watched.names == []


def test_on_one_process_the_norm_and_the_update_are_torchs(mesh_of_one: DeviceMesh) -> None:
    model = Weights(mesh_of_one)
    plain = [nn.Parameter(full(parameter).clone()) for parameter in model.parameters()]
    config = Optimizer()
    options: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    optimizer = torch.optim.AdamW(plain, lr=0.1, weight_decay=0, fused=True, **options)  # vectors are not decayed
    norms = []
    for step in range(1, STEPS + 1):
        for number, parameter in enumerate(plain):
            parameter.grad = draw(100 * step + number, tuple(parameter.shape))
        norms.append(torch.nn.utils.clip_grad_norm_(plain, 1.0, foreach=True))
        optimizer.step()
    found = train(model)
    expected = [*norms, *plain]
    assert all(torch.equal(left, right) for left, right in zip(found[: len(expected)], expected, strict=True))


def compare_with_one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        expected = train(Weights(None))
        for shape, names in (((2,), ("shard",)), ((2, 1), ("replicate", "shard")), ((1, 2), ("replicate", "shard"))):
            model = Weights(init_device_mesh("cpu", shape, mesh_dim_names=names))
            for left, right in zip(train(model), expected, strict=True):
                torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
            model.give_gradients(1)
            if rank == 0:
                assert model.weight0.grad is not None
                model.weight0.grad.to_local().fill_(math.inf)
            norm = clip_grad_norm(list(model.parameters()), max_norm=0)
            is_replica = names[0] == "replicate" and shape[0] == 2  # real replicas never differ
            assert norm.isinf().item() is (rank == 0 or not is_replica)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("fork_server")
def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    mp.start_processes(compare_with_one_process, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
