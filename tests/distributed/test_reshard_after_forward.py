# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""When FSDP frees gathered weights: the all-gathers of a step, and equal results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchditan.distributed.parallelize import parallelize
from torchditan.models.dit import DiT, DiTConfig

CONFIG = DiTConfig(
    depth=4, width=32, num_heads=2, patch_size=2, input_channels=2, image_size=(8, 8), num_classes=3, qk_norm=False
)


def sharded_model(option: Any) -> Any:
    with torch.device("meta"):
        model = DiT(CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    parallelize(model, blocks=model.blocks, mesh=mesh, param_dtype=torch.float32, reshard_after_forward=option)
    model.to_empty(device="cpu")
    model.init_weights(0)
    return model


def predict(model: Any) -> torch.Tensor:
    x_t = torch.linspace(-1, 1, 3 * 2 * 8 * 8).view(3, 2, 8, 8)
    return model(x_t, torch.tensor([0.1, 0.5, 0.9]), {"class_label": torch.tensor([0, 1, 3])})


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Rank 0 of four, whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The process groups of all all-gathers."""
    groups: list[Any] = []
    real = _fsdp_param_group.foreach_all_gather

    def record(parameters: Any, group: Any, *arguments: Any) -> Any:
        groups.append(group)
        return real(parameters, group, *arguments)

    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", record)
    return groups


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("option", "in_backward"), [("always", [4] * 4), ("default", [4] * 3), ("never", [])])
def test_the_backward_pass_gathers_what_the_forward_pass_freed(
    option: Any, in_backward: list[int], gathers: list[Any]
) -> None:
    model = sharded_model(option)
    for _ in range(2):
        gathers.clear()
        prediction = predict(model)
        assert [group.size() for group in gathers] == [4] * 5, "the root and four blocks"
        gathers.clear()
        prediction.square().sum().backward()
        assert [group.size() for group in gathers] == in_backward


def losses_on_two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    losses = {}
    for option in ("default", "always", "never"):
        model = sharded_model(option)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[option] = []
        for _ in range(3):
            loss = (predict(model) - 1 - rank).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[option].append(loss.item())
    assert losses["default"][0] > losses["default"][-1]
    assert losses["default"] == losses["always"] == losses["never"]
    dist.destroy_process_group()


@pytest.mark.usefixtures("fork_server")
def test_losses_are_equal_to_the_bit(tmp_path: Path) -> None:
    mp.start_processes(losses_on_two_ranks, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
