# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""AdamW with 8-bit moments: its size, its updates, skipped steps, and checkpoints of it on one rank and two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("torchao")

from torchditan.checkpoint.manager import CheckpointManager
from torchditan.checkpoint.run_state import ModelState, OptimizerState, RunState
from torchditan.config.options import Config, Optimizer
from torchditan.config.rules import validate
from torchditan.errors import ConfigError
from torchditan.optim.divergence import DivergenceError, DivergenceGuard
from torchditan.optim.optimizers import build_optimizer, clip_grad_norm
from torchditan.run.training_progress import Progress


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, rate: float = 3e-3) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate  # a number, as the trainer sets it
    x = batch_of(step)
    loss = (model(x) - x[:, :8].abs()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def moments_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The moments of every parameter, or of this rank's shard of it, as float32."""
    found = {}
    for i, state in enumerate(optimizer.state.values()):
        for name in ("exp_avg", "exp_avg_sq"):
            local: Any = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
            found[f"{i}.{name}"] = torch.empty(local.shape).copy_(local)
    return found


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """torchao compiles its update, 10 seconds for each shape of parameter."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.slow
def test_it_trains_as_adamw_with_a_quarter_of_its_moments() -> None:
    curves, sizes = [], []
    for name in ("AdamW", "AdamW8bit"):
        config: Any = Optimizer(name=name, lr=3e-3)
        model = small_model()
        optimizer = build_optimizer(model, config)
        curves.append([take_step(model, optimizer, step) for step in range(60)])
        moment: Any = optimizer.state[model[0].weight]["exp_avg"]
        parts = [moment] if name == "AdamW" else [moment.codes, moment.scale]
        sizes.append(sum(part.numel() * part.itemsize for part in parts))
    assert curves[1] != curves[0]
    assert curves[1] == pytest.approx(curves[0], rel=0.03)
    assert curves[1][-1] < 0.5 * curves[1][0]
    assert sizes[1] < 0.26 * sizes[0]


@pytest.mark.usefixtures("uncompiled")
def test_a_nonfinite_gradient_never_reaches_weights_or_moments() -> None:
    model = small_model()
    optimizer = build_optimizer(model, Optimizer(name="AdamW8bit", lr=1e-2))
    guard = DivergenceGuard(optimizer)
    parameters = list(model.parameters())

    def step(number: int, factor: float) -> None:
        model(batch_of(number)).square().mean().mul(factor).backward()
        guard.step(number, clip_grad_norm(parameters, max_norm=1.0))
        optimizer.zero_grad()

    step(1, 1.0)
    weights = [parameter.detach().clone() for parameter in parameters]
    moments = moments_of(optimizer)
    with pytest.raises(DivergenceError, match=r"step 2: .*gradient .*finite; .*update .*skipped"):
        step(2, float("nan"))
    assert all(torch.equal(parameter, before) for parameter, before in zip(parameters, weights, strict=True))
    assert all(torch.equal(value, moments[name]) for name, value in moments_of(optimizer).items())
    optimizer.zero_grad()
    step(3, 1.0)
    assert not torch.equal(parameters[0], weights[0])


def test_its_checkpoints_are_not_written_aside() -> None:
    config = Config().replace({"optimizer.name": "AdamW8bit", "checkpoint.async_mode": "async"})
    with pytest.raises(ConfigError, match=r'checkpoint\.async_mode = "async": .*tensors of AdamW8bit'):
        validate(config)


def run(rank: int, world_size: int, folder: str, *, resume: bool) -> None:
    """Six steps with a checkpoint of the third, or those after it; losses, weights and moments of this rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{world_size}-{resume}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        model: Any = small_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",)))
        config = Config(optimizer=Optimizer(name="AdamW8bit"))
        optimizer = build_optimizer(model, config.optimizer)
        tensors = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}
        state = RunState(Progress(), tensors=tensors)
        checkpoints = CheckpointManager(Path(folder), state, config=config, trajectory={}, timeout_seconds=60)
        assert not resume or checkpoints.load_latest()
        start = state.progress.step
        losses = []
        for step in range(start, 6):
            losses.append(take_step(model, optimizer, step))
            if step == 2:
                state.progress.step = 3
                checkpoints.save()
        weights = [parameter.full_tensor() for parameter in model.parameters()]
        result = {"losses": losses[3 - start :], "weights": weights, "moments": moments_of(optimizer)}
        torch.save(result, f"{folder}/{'again' if resume else 'whole'}-{world_size}-{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_and_resume(rank: int, world_size: int, folder: str) -> None:
    with torch.compiler.set_stance("force_eager"):
        run(rank, world_size, folder, resume=False)
        run(rank, world_size, folder, resume=True)


def check_same_rest(folder: Path, *, rank: int, world_size: int) -> None:
    whole, again = (torch.load(folder / f"{name}-{world_size}-{rank}.pt") for name in ("whole", "again"))
    assert whole["losses"] == again["losses"] and len(again["losses"]) == 3
    assert all(torch.equal(*pair) for pair in zip(whole["weights"], again["weights"], strict=True))
    assert all(torch.equal(moment, again["moments"][name]) for name, moment in whole["moments"].items())


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server", "uncompiled")
def test_two_ranks_resume_to_the_bit_and_one_continues_within_rounding(tmp_path: Path) -> None:
    mp.start_processes(run_and_resume, args=(2, str(tmp_path)), nprocs=2, start_method="forkserver")
    for rank in range(2):
        check_same_rest(tmp_path, rank=rank, world_size=2)
    run(0, 1, str(tmp_path), resume=True)
    alone, again = torch.load(tmp_path / "again-1-0.pt"), torch.load(tmp_path / "again-2-0.pt")
    assert alone["losses"] == pytest.approx(again["losses"], rel=1e-3)
    for left, right in zip(alone["weights"], again["weights"], strict=True):
        assert torch.allclose(left, right, atol=1e-4)
