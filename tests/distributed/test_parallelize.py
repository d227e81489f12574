# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One process trains the plain module, in every precision to the same bits as under `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchditan.config.options import Compile, Float8, Model, Optimizer
from torchditan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchditan.distributed.compilation import compile_model
from torchditan.distributed.float8 import convert_to_float8
from torchditan.distributed.parallelize import drop_gathered_weights, parallelize, shard
from torchditan.models import build_model_spec
from torchditan.models.saved_weights import saved_weights
from torchditan.optim.ema import EMA
from torchditan.optim.optimizers import build_optimizer, clip_grad_norm

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
BATCH = 2


def spec_of(**options: Any) -> Any:
    # The official preset has a frozen parameter outside the blocks.
    options = {"flavor": "debugmodel", "preset": "official", "patch_size": 4, **options}
    return build_model_spec(Model(**options), sample_shape=(4, 8, 8), num_classes=10)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def built(
    apply: Any,
    mesh: DeviceMesh,
    *,
    checkpointing: Any = "none",
    compile: Any = None,
    float8: bool = False,
    name: str = "dit",
    **options: Any,
) -> Any:
    spec = spec_of(name=name)
    with torch.device("meta"):
        model = spec.build()
    blocks = spec.blocks(model)
    if float8:
        convert_to_float8(model=model, spec=spec, config=Float8(True, emulate=True), batch_size=BATCH)
    apply_activation_checkpoint(blocks, mode=checkpointing)
    if compile is not None:
        compile_model(model, blocks=blocks, options=Compile(scope=compile, backend="aot_eager"))
        blocks = nn.ModuleList() if compile == "model" else blocks
    options = {"param_dtype": BFLOAT16, "reduce_dtype": FLOAT32, **options}
    apply(model, blocks=blocks, mesh=mesh, **options)
    model.to_empty(device="cpu")
    model.init_weights(0)
    randomise_zeros(model)
    return model


@torch.no_grad()
def randomise_zeros(model: nn.Module) -> None:
    """adaLN-zero starts blocks as the identity, which would hide most gradients."""
    for number, parameter in enumerate(model.parameters()):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.requires_grad:
            local.add_(torch.randn(local.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)


def loss_of(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x_t, target = torch.randn(2, BATCH, 4, 8, 8, generator=generator)
    prediction = model(x_t, torch.rand(BATCH, generator=generator), {"class_label": torch.tensor([1, 7])})
    return (prediction[:, :4].float() - target).square().mean()


def train(model: Any, *, num_micro_batches: int = 1, rank: int = 0, steps: int = 2) -> list[torch.Tensor]:
    """Losses, norms, weights, moments and average after a few steps."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, ema = build_optimizer(model, Optimizer(lr=0.01)), EMA(model, decay=0.9)
    numbers = []
    for step in range(1, steps + 1):
        for micro_batch in range(num_micro_batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro_batch == num_micro_batches - 1)
            loss = loss_of(model, 1000 * rank + 10 * step + micro_batch)
            loss.backward()
            numbers.append(loss.detach())
        numbers.append(clip_grad_norm(parameters, max_norm=1.0))
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    tensors = [*saved_weights(model).values(), *moments, *ema.average.values()]
    assert {tensor.dtype for tensor in tensors} == {FLOAT32}
    return [*numbers, *(tensor.detach() for tensor in map(full, tensors))]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert [i for i, pair in enumerate(zip(left, right, strict=True)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize(
    ("param_dtype", "num_micro_batches", "way"),
    [
        (FLOAT32, 1, {}),
        (FLOAT32, 3, {"checkpointing": "full"}),
        (BFLOAT16, 1, {}),
        (BFLOAT16, 3, {"checkpointing": "full"}),
        (BFLOAT16, 2, {"compile": "block"}),
        (BFLOAT16, 2, {"compile": "model"}),
        (BFLOAT16, 2, {"float8": True}),
        pytest.param(
            BFLOAT16,
            2,
            {"compile": "block", "checkpointing": "full", "name": "ddt head_depth=2 head_width=96"},
            marks=pytest.mark.slow,
        ),
        (BFLOAT16, 2, {"float8": True, "name": "ddt head_depth=2 head_width=96"}),
    ],
    ids=str,
)
def test_one_process_trains_the_plain_model_as_under_fully_shard_to_the_bit(
    param_dtype: torch.dtype, num_micro_batches: int, way: dict[str, Any], mesh: DeviceMesh
) -> None:
    options: dict[str, Any] = {"param_dtype": param_dtype, **way}
    plain, sharded = (built(apply, mesh, **options) for apply in (parallelize, shard))
    assert bool(plain._forward_pre_hooks) == (param_dtype == BFLOAT16) and not isinstance(plain, FSDPModule)
    assert isinstance(sharded, FSDPModule)
    assert_equal(*(train(model, num_micro_batches=num_micro_batches) for model in (plain, sharded)))


def test_writes_to_the_weights_reach_the_next_forward(mesh: DeviceMesh) -> None:
    model, other = built(parallelize, mesh), built(parallelize, mesh)
    ema = EMA(model, decay=0.5)
    train(other, steps=1)
    with torch.no_grad():
        before = loss_of(model, 0)
        for name, weight in saved_weights(model).items():
            weight.copy_(saved_weights(other)[name])
        drop_gathered_weights(model)
        written = loss_of(model, 0)
        assert torch.equal(written, loss_of(other, 0)) and not torch.equal(written, before)
        with ema.swapped_in():  # the average is still that of the first weights
            assert torch.equal(loss_of(model, 0), before)
        assert torch.equal(loss_of(model, 0), written)
    loss_of(model, 0)  # a forward without a backward
    drop_gathered_weights(model)
    assert {parameter.dtype for parameter in model.parameters()} == {FLOAT32}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_two_forwards_may_precede_their_backward_passes(checkpointing: str, mesh: DeviceMesh) -> None:
    def gradients(*, together: bool) -> list[torch.Tensor]:
        model = built(parallelize, mesh, checkpointing=checkpointing, param_dtype=BFLOAT16)
        if together:
            (loss_of(model, 0) + loss_of(model, 1)).backward()
        else:
            loss_of(model, 1).backward()
            loss_of(model, 0).backward()
        return [full(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]

    for left, right in zip(gradients(together=True), gradients(together=False), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-4)
