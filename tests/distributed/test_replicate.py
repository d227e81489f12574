# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One process and DDP compute what `fully_shard` computes there, to the bit, with fewer copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchditan.checkpoint.run_state import ModelState
from torchditan.config.options import Model, Optimizer
from torchditan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchditan.distributed.parallelize import drop_gathered_weights, parallelize, shard
from torchditan.distributed.replicate import replicate
from torchditan.models import build_model_spec
from torchditan.models.saved_weights import saved_weights
from torchditan.optim.ema import EMA
from torchditan.optim.optimizers import build_optimizer, clip_grad_norm

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
BATCH = 2
DEPTH = 3


def spec_of(**options: Any) -> Any:
    # The official preset has a frozen parameter outside the blocks.
    options = {"flavor": "debugmodel", "preset": "official", "patch_size": 4, **options}
    return build_model_spec(Model(**options), sample_shape=(4, 8, 8), num_classes=10)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def built(apply: Any, mesh: DeviceMesh, *, checkpointing: Any = "none", **options: Any) -> Any:
    spec = spec_of()
    with torch.device("meta"):
        model = spec.build()
    blocks = spec.blocks(model)
    apply_activation_checkpoint(blocks, mode=checkpointing)
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


PRECISIONS = [
    (BFLOAT16, FLOAT32),
    (BFLOAT16, BFLOAT16),
    (FLOAT32, FLOAT32),
    (FLOAT32, BFLOAT16),
    (FLOAT16, FLOAT32),
]


@pytest.mark.parametrize(("num_micro_batches", "checkpointing"), [(1, "none"), (3, "full")])
@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), PRECISIONS, ids=str)
def test_one_process_trains_as_under_fully_shard_to_the_bit(
    param_dtype: torch.dtype, reduce_dtype: torch.dtype, num_micro_batches: int, checkpointing: str, mesh: DeviceMesh
) -> None:
    options: dict[str, Any] = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "checkpointing": checkpointing}
    expected, found = (
        train(built(apply, mesh, **options), num_micro_batches=num_micro_batches) for apply in (shard, replicate)
    )
    assert_equal(found, expected)


def compare_on_two_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for param_dtype, reduce_dtype in PRECISIONS[:4]:
            options: dict[str, Any] = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
            models = [built(apply, mesh, **options) for apply in (shard, replicate)]
            expected, found = (train(model, num_micro_batches=2, rank=rank) for model in models)
            assert_equal(found, expected)
            for left, right in zip(*(saved_weights(model).values() for model in models), strict=True):
                if isinstance(left, nn.Parameter):  # the checkpoints are alike
                    assert isinstance(left, DTensor) and isinstance(right, DTensor)
                    assert (left.device_mesh, left.placements) == (right.device_mesh, right.placements)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("fork_server")
def test_ddp_trains_as_under_fully_shard_to_the_bit(tmp_path: Path) -> None:
    """Two ranks have one order of summation."""
    mp.start_processes(compare_on_two_ranks, args=(str(tmp_path),), nprocs=2, start_method="forkserver")


def test_only_whole_trained_blocks_are_replicated(mesh: DeviceMesh) -> None:
    model = built(parallelize, mesh)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert isinstance(built(parallelize, mesh, cpu_offload=True), FSDPModule)

    def freeze_first(model: Any, *, blocks: nn.ModuleList, **options: Any) -> None:
        blocks[0].requires_grad_(False)
        parallelize(model, blocks=blocks, **options)

    assert isinstance(built(freeze_first, mesh), FSDPModule)


class Copies(TorchDispatchMode):
    """Counts copies and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_foreach_copy_", "copy_", "_to_copy"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_copies_in_one_call_and_gradients_in_one_per_block(mesh: DeviceMesh) -> None:
    model = built(replicate, mesh)
    parameters = list(model.parameters())
    with Copies() as copies:
        for micro_batch in range(3):
            model.set_requires_gradient_sync(micro_batch == 2)
            loss_of(model, micro_batch).backward()
    assert copies.counts["_foreach_copy_"] == 1 + DEPTH + 1  # other micro-batches are added
    assert all(parameter.grad is not None for parameter in parameters if parameter.requires_grad)


def test_each_block_frees_its_copies_after_its_backward_pass(mesh: DeviceMesh) -> None:
    model, sizes = built(replicate, mesh), []
    loss = loss_of(model, 0)
    copies = [block.attn.qkv.weight for block in model.blocks]
    assert {copy.dtype for copy in copies} == {BFLOAT16}
    for block in model.blocks:
        block.register_full_backward_hook(lambda *_: sizes.append([c.untyped_storage().size() > 0 for c in copies]))
    loss_of(model, 1).backward()
    assert sizes == [[True, True, True], [True, True, False], [True, False, False]]
    assert all(copy.untyped_storage().size() == 0 for copy in copies)
    loss.backward()  # copies again what the first forward saved
    assert all(copy.untyped_storage().size() == 0 for copy in copies)


class TwoStreams(nn.Module):
    """Blocks of two streams. The last one passes the second stream on, as in Mochi."""

    class Block(nn.Module):
        def __init__(self, is_last: bool):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), None if is_last else nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.tanh(self.first(x + other))
            return x, other if self.second is None else torch.tanh(self.second(other))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(is_last=number == 2) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = other = x.bfloat16()
        for block in self.blocks:
            x, other = block(x, other=other)
        return x.float().mean()


def gradients_of(kind: type[TwoStreams], apply: Any, mesh: DeviceMesh) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    apply(model, blocks=model.blocks, mesh=mesh, param_dtype=BFLOAT16, reduce_dtype=FLOAT32)
    model(torch.ones(2, 8)).backward()
    return [full(parameter.grad).float() for parameter in model.parameters()]


def leave_plain(model: nn.Module, *, param_dtype: torch.dtype, **_: Any) -> None:
    model.to(param_dtype)


def test_a_weight_of_a_block_may_also_be_used_outside(mesh: DeviceMesh) -> None:
    class Shared(TwoStreams):
        def __init__(self) -> None:
            super().__init__()
            self.embed = self.blocks[1].first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.embed(self.embed(x.bfloat16())))

    assert_equal(*(gradients_of(Shared, apply, mesh) for apply in (leave_plain, replicate)))


def test_a_block_may_pass_a_tensor_on_unchanged(mesh: DeviceMesh) -> None:
    assert_equal(*(gradients_of(TwoStreams, apply, mesh) for apply in (shard, replicate)))


def test_one_process_in_float32_is_the_plain_model(mesh: DeviceMesh) -> None:
    model, plain = built(replicate, mesh, param_dtype=FLOAT32), spec_of().build()
    assert not model._forward_pre_hooks and not model._forward_hooks
    plain.load_state_dict(model.state_dict())
    plain.set_requires_gradient_sync = lambda _: None
    assert_equal(train(model), train(plain))


def test_writes_to_the_weights_reach_the_next_forward(mesh: DeviceMesh) -> None:
    model, other = built(replicate, mesh), built(replicate, mesh)
    ema = EMA(model, decay=0.5)
    train(other, steps=1)
    with torch.no_grad():
        before = loss_of(model, 0)
        model.load_state_dict(other.state_dict())
        loaded = loss_of(model, 0)
        assert torch.equal(loaded, loss_of(other, 0)) and not torch.equal(loaded, before)
        with ema.swapped_in():  # the average is still that of the first weights
            assert torch.equal(loss_of(model, 0), before)
        assert torch.equal(loss_of(model, 0), loaded)
        for name, weight in saved_weights(model).items():
            weight.copy_(ema.average[name])
        assert torch.equal(loss_of(model, 0), before)
    loss_of(model, 0)  # a forward without a backward
    drop_gathered_weights(model)
    assert {parameter.dtype for parameter in model.parameters()} == {FLOAT32}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_two_forwards_may_precede_their_backward_passes(checkpointing: str, mesh: DeviceMesh) -> None:
    def gradients(apply: Any, *, together: bool) -> list[torch.Tensor]:
        model = built(apply, mesh, checkpointing=checkpointing)
        losses = [loss_of(model, 0), loss_of(model, 1)]
        with torch.no_grad():
            loss_of(model, 2)
        for loss in [sum(losses)] if together else losses:
            loss.backward()
        return [full(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]

    for together in (True, False):
        assert_equal(gradients(replicate, together=together), gradients(shard, together=together))


def test_one_graph_may_compute_two_forwards_before_their_backward_passes(mesh: DeviceMesh) -> None:
    def gradients(**options: Any) -> list[torch.Tensor]:
        model = built(replicate, mesh, **options)
        for loss in [loss_of(model, 0), loss_of(model, 1)]:
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert_equal(gradients(is_one_graph=True), gradients())


def test_the_state_is_that_of_the_sharded_model(mesh: DeviceMesh) -> None:
    states = [ModelState(built(apply, mesh)).state_dict() for apply in (shard, replicate)]
    assert states[0].keys() == states[1].keys()
    assert_equal([*map(full, states[1].values())], [*map(full, states[0].values())])


def test_a_forward_that_fails_leaves_the_float32_weights(mesh: DeviceMesh) -> None:
    model = built(replicate, mesh)
    with pytest.raises(KeyError):
        model(torch.zeros(BATCH, 4, 8, 8), torch.zeros(BATCH), {})
    assert {parameter.dtype for parameter in model.parameters()} == {FLOAT32}
