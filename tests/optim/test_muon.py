# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Muon: what it computes, on one rank and on several, its runs, its FLOPs and memory, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from refusals import refused
from tiny_runs import KEEP, job
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from torchditan.checkpoint.loading import read_state
from torchditan.config.loader import load_config
from torchditan.config.options import Model, Optimizer
from torchditan.extras.planner.memory import model_parameters, model_state
from torchditan.extras.planner.plan import plan_run
from torchditan.models import build_model_spec
from torchditan.models.flops import count_model_flops
from torchditan.optim.divergence import DivergenceError, DivergenceGuard
from torchditan.optim.muon import Muon, num_matrices_of
from torchditan.optim.optimizers import (
    OptimizerParts,
    build_optimizer,
    clip_grad_norm,
    optimizer_flops,
    optimizer_parts,
)
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, Train

MUON = "--optimizer.name=Muon"
FLOAT32 = "--optimizer.ns_dtype=float32"
PUBLISHED = ["--model.name=flux", "--model.flavor=debugmodel"]
SHAPES = [(12, 8), (8, 8), (8, 20), (12, 8), (12, 8), (6, 10)]
"""Parameters of the tests on several ranks: 4 ranks hold 3, 3, 3, 3 rows, or 2, 2, 2, 0."""


def spec_of(**options: Any) -> Any:
    options = {"flavor": "debugmodel", "patch_size": 2, **options}
    return build_model_spec(Model(**options), sample_shape=(4, 8, 8), num_classes=10)


def small_dit(**options: Any) -> nn.Module:
    model = spec_of(**options).build()
    model.init_weights(0)
    return model  # type: ignore[no-any-return]


def give_gradients(model: nn.Module, step: int = 0) -> None:
    """The same gradients for the same names, whatever the model has been through."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(1000 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def matrices_of(name: str, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The matrices that Muon sees in a parameter, written down once more."""
    if name.endswith(("qkv.weight", "kv.weight", "w12.weight")):
        return list(parameter.detach().chunk(3 if "qkv" in name else 2))
    return [parameter.detach()]


SWIGLU = {"attn.qkv": 3, "attn.proj": 1, "mlp.w12": 2, "mlp.w3": 1}


@pytest.mark.parametrize(
    ("options", "of_muon"),
    [
        ({"preset": "official"}, {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1}),
        (
            {"text": "cross_attention", "text_tokens": 4, "text_width": 16},
            {**SWIGLU, "cross_attn.q": 1, "cross_attn.kv": 2, "cross_attn.proj": 1},
        ),
    ],
    ids=["official", "cross_attention"],
)
def test_it_takes_the_matrices_of_the_blocks_and_adamw_the_rest(
    options: dict[str, Any], of_muon: dict[str, int]
) -> None:
    model = small_dit(**options)
    found = {name: num_matrices_of(name, tuple(weight.shape)) for name, weight in model.named_parameters()}
    expected = {f"blocks.{i}.{layer}.weight": number for i in range(3) for layer, number in of_muon.items()}
    assert {name: number for name, number in found.items() if number} == expected
    optimizer = build_optimizer(model, Optimizer(name="Muon", weight_decay=0.1))
    assert isinstance(optimizer, OptimizerParts)
    *muons, adamw = optimizer.parts
    assert {type(part) for part in muons} == {Muon} and isinstance(adamw, torch.optim.AdamW)
    assert all(group["weight_decay"] == 0.1 for part in muons for group in part.param_groups)
    assert num_matrices_of("blocks.0.attn.qkv.weight", (128, 64)) == 1  # grouped queries


def test_a_model_without_a_list_of_blocks_is_refused() -> None:
    with refused('optimizer.name = "Muon"', "blocks"):
        build_optimizer(torch.nn.Sequential(torch.nn.Linear(4, 4)), Optimizer(name="Muon"))


@pytest.mark.parametrize(("adjust_lr_fn", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_in_bfloat16_it_is_torchs_muon_on_each_matrix(adjust_lr_fn: Any, nesterov: bool) -> None:
    """After three steps from the same weights and gradients, with q, k and v as three parameters of torch's."""
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": adjust_lr_fn}
    name = " ".join(["Muon", *(f"{key}={value}" for key, value in options.items())])
    model = small_dit()
    optimizer = build_optimizer(model, Optimizer(name=name, lr=0.02, weight_decay=0.1))
    reference = {
        name: [nn.Parameter(matrix.clone()) for matrix in matrices_of(name, parameter)]
        for name, parameter in model.named_parameters()
        if num_matrices_of(name, tuple(parameter.shape))
    }
    parameters = [matrix for matrices in reference.values() for matrix in matrices]
    theirs = torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1, **options)
    named = dict(model.named_parameters())
    for step in range(3):
        give_gradients(model, step)
        for name, matrices in reference.items():
            gradient = named[name].grad
            assert gradient is not None
            for matrix, own in zip(matrices, matrices_of(name, gradient), strict=True):
                matrix.grad = own.clone()
        optimizer.step()
        theirs.step()
    for name, matrices in reference.items():
        torch.testing.assert_close(named[name].detach(), torch.cat(matrices).detach(), rtol=0, atol=1e-4)


def test_the_adamw_part_follows_the_schedule_at_its_own_rate() -> None:
    model = small_dit()
    optimizer = build_optimizer(model, Optimizer(name="Muon", lr=0.02, adamw_lr=0.001))
    scales = [group["lr_scale"] for part in optimizer_parts(optimizer) for group in part.param_groups]
    assert scales == [1, 1, 1, 0.05, 0.05]


@pytest.mark.parametrize("bad", [float("nan"), 0.0])
def test_a_step_that_diverges_changes_no_weight_and_no_momentum(bad: float) -> None:
    """`bad` 0: a spike of the loss at finite gradients."""
    model = small_dit()
    optimizer = build_optimizer(model, Optimizer(name="Muon", lr=0.02, weight_decay=0.1))
    guard = DivergenceGuard(optimizer)
    assert guard.is_fused  # the host does not wait for the device
    parameters = list(model.parameters())

    def step(number: int, *, bad: float = 0.0, is_spike: bool = False) -> None:
        give_gradients(model, number)
        for parameter in parameters if bad else ():
            assert parameter.grad is not None
            parameter.grad.view(-1)[0] = bad
        guard.step(number, clip_grad_norm(parameters, max_norm=1.0), torch.tensor(is_spike))

    def state() -> list[torch.Tensor]:
        moments = [value for part in optimizer_parts(optimizer) for s in part.state.values() for value in s.values()]
        return [tensor.detach().clone() for tensor in (*parameters, *moments)]

    with pytest.raises(DivergenceError):  # the first step, which creates the state
        step(1, bad=bad, is_spike=not bad)
    assert not any(tensor.any() for tensor in state()[len(parameters) :])
    step(2)
    before = state()
    with pytest.raises(DivergenceError, match=r"step 3: .*update was skipped"):
        step(3, bad=bad, is_spike=not bad)
    assert all(torch.equal(left, right) for left, right in zip(before, state(), strict=True))
    step(4)
    changed = [not torch.equal(left, right) for left, right in zip(before, state(), strict=True)]
    assert all(changed[: len(parameters)])


def test_the_share_of_its_flops_falls_with_the_batch_and_ranks_divide_them() -> None:
    shares = {16: 0.35, 256: 0.022}  # batch size -> FLOPs of the optimizer over those of forward and backward
    spec = build_model_spec(Model(flavor="DiT-S"), sample_shape=(4, 32, 32), num_classes=1000)
    with torch.device("meta"):
        model = spec.build()
    shapes = [(name, tuple(weight.shape)) for name, weight in model.named_parameters() if weight.requires_grad]
    flops = optimizer_flops(Optimizer(name="Muon"), shapes)
    per_image = count_model_flops(spec).total
    assert {size: flops / (size * per_image) for size in shares} == pytest.approx(shares, rel=0.1)
    assert optimizer_flops(Optimizer(name="AdamW"), shapes) == 0
    busiest = optimizer_flops(Optimizer(name="Muon"), shapes, num_ranks=4)
    assert busiest == pytest.approx(flops / 4, rel=0.01)


def test_a_step_computes_the_flops_that_count() -> None:
    model = small_dit()
    config = Optimizer(name="Muon ns_steps=3")
    optimizer = build_optimizer(model, config)
    give_gradients(model)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    shapes = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    assert counter.get_total_flops() == optimizer_flops(config, shapes)
    with FlopCounterMode(display=False) as counter:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    assert counter.get_total_flops() == 0  # a rate of 0, as in the steps that create the state for a checkpoint


def test_the_planner_counts_its_state_and_its_flops() -> None:
    flags = ["--dataset.dataset_name=dummy", "--dataset.image_size=16", "--model.input_channels=4"]
    flags += ["--dataset.num_classes=10", "--training.batch_size=4", "--model.flavor=debugmodel"]
    config, plain = load_config([*flags, MUON]), load_config(flags)
    spec = build_model_spec(config.model, sample_shape=(4, 16, 16), num_classes=10)
    model = spec.build()
    model.init_weights(0)
    optimizer = build_optimizer(model, config.optimizer)
    give_gradients(model)
    optimizer.step()
    real = sum(v.nbytes for part in optimizer_parts(optimizer) for s in part.state.values() for v in s.values())
    planned = model_state(model_parameters(spec), num_shards=1, optimizer=config.optimizer)["optimizer"]
    assert planned == real

    plans = [plan_run(own, device="h100", num_devices=8) for own in (plain, config)]
    shapes = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    assert [plan.optimizer_flops for plan in plans] == [0, optimizer_flops(config.optimizer, shapes, num_ranks=8)]
    adamw, muon = (plan.bound for plan in plans)
    assert adamw is not None and muon is not None
    assert muon.products - adamw.products == pytest.approx(plans[1].optimizer_flops / 989e12)
    for ns_dtype, flops in (("auto", 989e12), ("float32", 67e12)):
        bound = plan_run(config.replace({"optimizer.ns_dtype": ns_dtype}), device="h100", num_devices=8).bound
        assert bound is not None
        assert bound.products - adamw.products == pytest.approx(plans[1].optimizer_flops / flops)


FLAGS = [MUON, "--optimizer.lr=0.002", "--lr_scheduler.warmup_steps=0", "--lr_scheduler.schedule=constant"]


def curve(run: Path) -> list[float]:
    return [record[key] for record in read_metrics(run) for key in ("loss", "grad_norm")]


def stored(run: Path, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint: weights, average, momentum and moments."""
    return {k: v for k, v in read_state(run / f"checkpoint/step-{step:08d}", "").items() if torch.is_tensor(v)}


def test_it_resumes_to_the_bit_also_from_a_background_save(train: Train, tmp_path: Path) -> None:
    keep = [*KEEP, "--checkpoint.interval=3"]  # the first gradients of the blocks are 0
    train("whole", *FLAGS, "--training.steps=5", *keep)
    keep.append("--checkpoint.async_mode=async")
    train("resumed", *FLAGS, "--training.steps=3", *keep)
    assert "resumed at step 3" in train("resumed", *FLAGS, "--training.steps=5", *keep).out
    assert curve(tmp_path / "resumed") == curve(tmp_path / "whole")
    left, right = stored(tmp_path / "whole", 5), stored(tmp_path / "resumed", 5)
    assert sum("momentum_buffer" in name for name in left) == 3 * 4
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_offload_and_micro_batches_follow_the_curve_and_flops_count(train: Train, tmp_path: Path) -> None:
    flags = [*FLAGS, FLOAT32, "--training.steps=3"]
    train("plain", *flags)
    train("offloaded", *flags, "--training.enable_cpu_offload")
    train("halves", *flags, "--training.batch_size=4")
    assert curve(tmp_path / "offloaded") == curve(tmp_path / "plain")
    assert curve(tmp_path / "halves") == pytest.approx(curve(tmp_path / "plain"), rel=1e-5)
    records = read_metrics(tmp_path / "plain")
    spec = build_model_spec(Model(flavor="debugmodel", patch_size=2), sample_shape=(1, 8, 8), num_classes=10)
    shapes = [(name, tuple(weight.shape)) for name, weight in spec.build().named_parameters()]
    per_image = count_model_flops(spec).total + optimizer_flops(Optimizer(name="Muon"), shapes) / 8
    assert records[-1]["tflops_per_device"] * 1e12 == pytest.approx(records[-1]["images_per_second"] * per_image)


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        (["--optimizer.adamw_lr=0.5"], "optimizer.adamw_lr = 0.5", ["optimizer.name", "Muon"]),
        (["--optimizer.name", "Muon momentum=1"], 'optimizer.name = "Muon momentum=1"', ["momentum must", "below 1"]),
        (["--optimizer.name", "Muon adjust_lr_fn=original"], "optimizer.adamw_lr = none", ["original"]),
        ([MUON, "--optimizer.adamw_lr=0.1", "--optimizer.lr=0"], "optimizer.adamw_lr = 0.1", ["optimizer.lr", "0"]),
        ([MUON, *PUBLISHED, "--lora.rank=4"], 'optimizer.name = "Muon"', ["AdamW", "AdamW8bit", "published model"]),
    ],
)
def test_what_it_cannot_do_is_refused(flags: list[str], about: str, mentions: Sequence[str]) -> None:
    with refused(about, *mentions):
        load_config(flags)


def sharded(weight: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    return nn.Parameter(distribute_tensor(weight, mesh, placements, src_data_rank=None))


def trained(weights: list[torch.Tensor], mesh: DeviceMesh | None, **options: Any) -> list[torch.Tensor]:
    """The weights after three steps with gradients that do not depend on the mesh."""
    parameters = [nn.Parameter(weight.clone()) if mesh is None else sharded(weight, mesh) for weight in weights]
    optimizer = Muon(parameters, lr=0.02, weight_decay=0.1, **options)
    for step in range(3):
        for number, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(100 * step + number)
            gradient = torch.randn(weights[number].shape, generator=generator)
            parameter.grad = gradient if mesh is None else sharded(gradient, mesh).detach()
        optimizer.step()
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in parameters]


def compare_with_one_process(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        weights = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES)]
        names = ("replicate", "shard")
        meshes = [
            init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",)),  # FSDP
            init_device_mesh("cpu", (world_size, 1), mesh_dim_names=names),  # DDP
            init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names),  # HSDP on 4 ranks
        ]
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-4)):
            for num_matrices in (1, 2):
                options = {"ns_dtype": dtype, "num_matrices": num_matrices}
                expected = trained(weights, None, **options)
                for mesh in meshes:
                    found = trained(weights, mesh, **options)
                    for left, right in zip(found, expected, strict=True):
                        torch.testing.assert_close(left, right, rtol=0, atol=tolerance)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_a_sharded_update_is_the_whole_one(tmp_path: Path) -> None:
    """In float32 within 1e-5 on identical gradients; in bfloat16 within one rounding of the largest change, 0.04."""
    mp.start_processes(compare_with_one_process, args=(4, str(tmp_path)), nprocs=4, start_method="forkserver")


REPLICATE = "--training.data_parallel_replicate_degree"
MODES = [[], [f"{REPLICATE}=2"], ["--training.enable_cpu_offload"]]


@pytest.mark.slow
def test_two_ranks_follow_the_curve_of_one(train: Train, run_distributed: RunDistributed, tmp_path: Path) -> None:
    """In float32 within 1e-5. bfloat16 iterations turn rounding of the gradients into 0.4% of an update's elements."""
    limits = {"float32": 1e-5, "bfloat16": 1e-3}
    jobs = []
    for dtype in limits:
        own = [*FLAGS, f"--optimizer.ns_dtype={dtype}", "--training.steps=8"]
        train(f"alone-{dtype}", *own)
        jobs += [job(tmp_path / f"{number}-{dtype}", *own, *mode) for number, mode in enumerate(MODES)]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], 2)
    assert result.returncode == 0, result.stderr
    for dtype, limit in limits.items():
        expected = curve(tmp_path / f"alone-{dtype}")
        for number, mode in enumerate(MODES):
            found = curve(tmp_path / f"{number}-{dtype}")
            pairs = zip(found, expected, strict=True)
            difference = max(abs(left - right) / abs(right) for left, right in pairs)
            print(f"{dtype} {mode}: largest relative difference {difference:.1e}")  # pytest -s
            assert difference < limit, (dtype, mode)
