# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The planner against real runs on gloo ranks, against arithmetic, and against a GPU if available.

Run as a script under torchrun (`main`), this file trains two real steps of each given cell. For every rank it writes
the bytes of the model state and the highest sum of live storages.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from minimal_parts import ALIGNED, PAIRED
from refusals import assert_refused, refused
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchditan.config.loader import as_flags, load_config
from torchditan.config.options import Config, Model
from torchditan.diffusion.loss_flops import count_loss_flops
from torchditan.diffusion.objectives import build_objective, split
from torchditan.extras.planner import plan as planner
from torchditan.extras.planner import trace as tracing
from torchditan.extras.planner.alternatives import alternatives, is_better
from torchditan.extras.planner.memory import Parameters, Weight, model_parameters, model_state
from torchditan.extras.planner.plan import largest_batch, plan_run
from torchditan.extras.planner.recorder import StepRecorder
from torchditan.extras.planner.trace import StepTrace, trace_blocks
from torchditan.extras.published.resolutions import published_options
from torchditan.models import ModelSpec, build_model_spec, model_spec_of
from torchditan.models.flops import count_model_flops
from torchditan.registry import FAMILIES, registered

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
TINY = ["--dataset.dataset_name=dummy", "--dataset.image_size=16", "--model.input_channels=4"]
TINY += ["--dataset.num_classes=10", "--model.flavor=debugmodel", "--training.batch_size=4"]
FULL = "--activation_checkpoint.mode=full"
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
DDPM = ["--model.preset=official", "--diffusion.objective=ddpm"]
HEAD = f"--diffusion.ingredients={ALIGNED}"
REPA = ["--diffusion.ingredients=repa encoder=efficientnet-lite0 block=2 width=64", "--model.input_channels=3"]
ADALN_SINGLE, IN_CONTEXT = "--model.conditioning=adaln_single", "--model.conditioning=in_context"
MEAN_FLOW = "--diffusion.objective=imf guidance=true"
REPLICATE = "--training.data_parallel_replicate_degree"
CONTEXT = "--training.context_parallel_degree=2"
RESHARD = "--training.reshard_after_forward"
FRACTION = ["--activation_checkpoint.mode=fraction", "--activation_checkpoint.fraction=0.5"]
FLOAT16 = "--training.mixed_precision_param=float16"
LORA = ["--lora.rank=4", "--ema.enable=false"]
MUON = "--optimizer.name=Muon"
DDT, DIT_DH = "--model.name=ddt head_depth=5", "--model.name=ddt head_depth=2 head_width=128 head_heads=4"
INT8 = [*LORA, "--quantize.base=int8"]


def published(model: str, *flags: str, **options: Any) -> list[str]:
    """Flags of a tiny published model on samples so large that their activations count."""
    resolution = "128x128x13" if registered(FAMILIES, model.partition("/")[0]).takes_videos() else "128x128"
    return [*as_flags({**published_options(model, resolution), **options}), *flags]


CELLS: dict[int, dict[str, list[str]]] = {
    1: {
        "plain": [],
        "head": [HEAD],
        "REPA": REPA,
        "full": [FULL],
        "op": OP,
        "float32": ["--training.mixed_precision_param=float32"],
        "official, DDPM": DDPM,
        "adaLN-single": [ADALN_SINGLE],
        "in context": [IN_CONTEXT],
        "MeanFlow full": [MEAN_FLOW, FULL],
        "micro-batches": ["--training.global_batch_size=12", FULL],
        "no average": ["--ema.enable=false"],
        "DDT": [DDT],
        "DiT-DH full": [DIT_DH, FULL],
        "Muon": [MUON],
        "flux": published("flux/debugmodel"),
        "flux fraction, float16": published("flux/debugmodel", FLOAT16, *FRACTION),
        "flux op": published("flux/debugmodel", *OP),
        "flux LoRA": published("flux/debugmodel", *LORA),
        "flux LoRA int8 full": published("flux/debugmodel", *INT8, FULL),
        "flux, many blocks": published(
            "flux/debugmodel", *FRACTION, **{"model.overrides": ["num_layers=5", "num_single_layers=6"]}
        ),
        "sd3 LoRA int8": published("sd3/debugmodel", *INT8),
        "flux2 LoRA int8 full": published("flux2/debugmodel", *INT8, FULL),
        "sdxl fraction": published("sdxl/debugmodel", *FRACTION),
        "mochi": published("mochi/debugmodel"),
        "hunyuan_video": published("hunyuan_video/debugmodel", FULL),
        "wan full": published("wan/debugmodel", FULL),
    },
    2: {
        "FSDP": [],
        "FSDP MeanFlow": [MEAN_FLOW],
        "FSDP REPA": REPA,
        "FSDP official, DDPM": [*DDPM, FULL],
        "FSDP Muon": [MUON, FULL],
        "FSDP micro-batches": ["--training.global_batch_size=24"],
        "FSDP never reshards, full": [f"{RESHARD}=never", FULL],
        "FSDP always reshards": [f"{RESHARD}=always"],
        "DDP": [f"{REPLICATE}=2"],
        "DDP full": [f"{REPLICATE}=2", FULL],
        "context": [CONTEXT],
        "context, in context, full": [CONTEXT, IN_CONTEXT, FULL],
        "context, head": [CONTEXT, HEAD],
        "FSDP DDT": [DDT],
        "context, DiT-DH full": [CONTEXT, DIT_DH, FULL],
        "flux": published("flux/debugmodel"),
        "flux LoRA int8 full": published("flux/debugmodel", *INT8, FULL),
        "sd3 DDP full": published("sd3/debugmodel", f"{REPLICATE}=2", FULL),
    },
    4: {
        "FSDP": [],
        "flux, fraction": published("flux/debugmodel", *FRACTION),
        "HSDP": [f"{REPLICATE}=2"],
        "HSDP Muon": [MUON, f"{REPLICATE}=2"],
        "HSDP full, many parameters": [f"{REPLICATE}=2", FULL, "--model.flavor=DiT-Ti", "--training.batch_size=2"],
        "DDP": [f"{REPLICATE}=4", *OP],
        "FSDP context": [CONTEXT, "--training.global_batch_size=16"],
        "HSDP context": [CONTEXT, f"{REPLICATE}=2", FULL],
    },
}


def config_of(*flags: str) -> Config:
    return load_config([*TINY, *flags])


def spec_of(config: Config) -> ModelSpec:
    frames = () if config.dataset.num_frames is None else (config.dataset.num_frames,)
    sample_shape = (config.model.input_channels or 0, *frames, *(config.dataset.image_size or ()))
    spec = model_spec_of(config, sample_shape=sample_shape, num_classes=config.dataset.num_classes or 0)
    return spec.with_heads(build_objective(config.diffusion, spec).heads)


class Census(TorchDispatchMode):
    """The sum of all living storages that operators made, after each operator."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self.storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        for tensor in known:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        self.storages[storage._cdata] = storage

    def total(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:  # a view makes nothing; what gloo copies inside shows as views alone
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor)
        self.peak = max(self.peak, self.total())
        return out


def num_bytes(tensors: Any) -> int:
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def train_two_steps(config: Config, world_size: int) -> dict[str, Any]:
    """What the trainer builds and does in a step; state of this rank, and its peak in later steps."""
    from torchditan.distributed.context_parallel import split_tokens_over_ranks
    from torchditan.distributed.parallel_dims import ParallelDims
    from torchditan.distributed.parallelize import parallelize
    from torchditan.distributed.precision import precision_for
    from torchditan.optim.divergence import DivergenceGuard
    from torchditan.optim.ema import EMA
    from torchditan.optim.optimizers import build_optimizer, clip_grad_norm, optimizer_parts
    from torchditan.randomness import draw

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    training, spec = config.training, spec_of(config)
    dims, context = ParallelDims.resolve(training, world_size=world_size), training.context_parallel_degree
    mesh = dims.build_mesh("cpu")

    with torch.device("meta"):
        model: Any = spec.build()
    if context > 1:
        split_tokens_over_ranks(model, degree=context, timeout_seconds=120)
    parallelize(
        model,
        blocks=spec.blocks(model),
        mesh=mesh,
        activation_checkpoint=config.activation_checkpoint.mode,
        selective_ac_option=config.activation_checkpoint.selective_ac_option,
        checkpoint_fraction=config.activation_checkpoint.fraction,
        param_dtype=dtypes[training.mixed_precision_param],
        reduce_dtype=dtypes[training.mixed_precision_reduce],
        reshard_after_forward=training.reshard_after_forward,
    )
    model.to_empty(device="cpu")
    model.init_weights(0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(model, config.optimizer)
    guard = DivergenceGuard(optimizer)
    objective = build_objective(config.diffusion, spec)
    ema = EMA(model, decay=0.9, only_trained=config.lora.rank > 0) if config.ema.enable else None
    average = ema.average if ema is not None else {}
    batch_size = training.batch_size
    assert isinstance(batch_size, int)
    at_once = batch_size * world_size // context
    num_micro_batches = (training.global_batch_size or at_once) // at_once
    sample = torch.randn(batch_size, *spec.sample_shape)
    batch = {"sample": sample, "index": torch.zeros(batch_size, dtype=torch.int64)}
    for name, (shape, dtype) in spec.conditioning.tensors.items():
        batch[name] = torch.ones(batch_size, *shape, dtype=dtype)
    randomness = draw(0, range(batch_size), spec.sample_shape, objective.numbers)
    dtype = dtypes[precision_for(torch.device("cpu"))]
    networks = {name: target.open(torch.device("cpu"), dtype) for name, target in objective.targets.items()}
    frozen = [weight for network in networks.values() for weight in network.module.state_dict().values()]
    gradients = 0

    def step(number: int) -> None:
        nonlocal gradients
        for micro_batch in range(num_micro_batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro_batch == num_micro_batches - 1)
            targets = {name: network(sample) for name, network in networks.items()}
            losses, _ = split(objective.loss(model, {**batch, **targets}, randomness))
            (losses.sum() / batch_size).backward()
            del losses
        guard.step(number, clip_grad_norm(parameters, max_norm=1.0))
        found = num_bytes(parameter.grad for parameter in parameters if parameter.grad is not None)
        gradients = max(gradients, found)
        optimizer.zero_grad()
        if ema is not None:
            ema.update(number)

    on_device = [sample, *batch.values(), *randomness.values()]
    census = Census(*model.parameters(), *model.buffers(), *average.values(), *on_device, *frozen)
    peaks = []
    with census:
        step(1)
        for number in (2, 3):
            census.peak = 0
            step(number)
            peaks.append(census.peak)
    states = [state for part in optimizer_parts(optimizer) for state in part.state.values()]
    moments = [value for state in states for value in state.values()]
    state = {
        "parameters": num_bytes(model.parameters()),
        "gradients": gradients,
        "optimizer": num_bytes(moments),
        "ema": num_bytes(average.values()),
    }
    return {"state": state, "peak": min(peaks)}  # a thread of gloo may hold a tensor a moment longer


def main(cells: list[list[str]], folder: Path) -> None:
    from torchditan.distributed.process_group import Rank, init_process_group

    rank = Rank.from_environment()
    init_process_group(rank, timeout_seconds=120)
    results = [train_two_steps(config_of(*flags), rank.world_size) for flags in cells]
    rows = [{"cell": number, "rank": rank.rank, **result} for number, result in enumerate(results)]
    (folder / f"{rank.rank}.json").write_text(json.dumps(rows))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "world_size", [pytest.param(n, marks=pytest.mark.slow if n == 2 else pytest.mark.nightly) for n in CELLS]
)
def test_state_is_exact_and_the_peak_within_three_tenths_of_a_percent_of_real_runs(
    world_size: int, tmp_path: Path, run_distributed: Any
) -> None:
    cells = CELLS[world_size]
    result = run_distributed(
        ["tests/extras/planner/test_plan.py", json.dumps(list(cells.values())), tmp_path], world_size
    )
    assert result.returncode == 0, result.stderr
    measured = [row for rank in range(world_size) for row in json.loads((tmp_path / f"{rank}.json").read_text())]
    assert len(measured) == len(cells) * world_size
    configs = [config_of(*flags) for flags in cells.values()]
    plans = [plan_run(config, device="cpu", num_devices=world_size) for config in configs]
    for row in measured:
        name, config, plan = list(cells)[row["cell"]], configs[row["cell"]], plans[row["cell"]]
        num_shards = plan.dims.num_shards
        shard_rank = row["rank"] % num_shards
        state = model_state(
            model_parameters(spec_of(config)),
            num_shards=num_shards,
            shard_rank=shard_rank,
            ema=("trained" if config.lora.rank else "all") if config.ema.enable else "none",
            optimizer=config.optimizer,
        )
        assert row["state"] == state, (name, row["rank"])
        if row["rank"] == 0:  # the fullest
            assert state == plan.state
            print(f"{world_size} {name}: measured {row['peak']:,}, planned {plan.peak.total:,.0f}")  # pytest -s
            tables = 24_000 if config.diffusion.objective == "ddpm" else 0  # of its 1,000 levels, which no plan counts
            assert plan.peak.total == pytest.approx(row["peak"], rel=0.003, abs=tables), (name, plan.peak)


BLOCK = build_model_spec(Model(flavor="DiT-L"), sample_shape=(16, 32, 32), num_classes=1000)


@functools.cache
def block_trace(checkpointing: Any) -> StepTrace:
    return trace_blocks(BLOCK, dtype=torch.bfloat16, checkpointing=checkpointing, kernels="default")[1]


def activations_by_hand(checkpointing: str) -> int:
    """Bytes that a block of the DiT-L keeps for an image in bfloat16 on a GPU: 256 tokens of width 1024, 16 heads."""
    tokens, width, heads, hidden = 256, 1024, 16, 2752
    unit = 2 * tokens * width
    modulation, row_sums = 2 * 6 * width, 4 * heads * tokens
    if checkpointing == "full":
        return unit  # the input
    if checkpointing == "op":  # input; qkv, attention, projection, w3; w12; adaLN; attention's row sums
        return (1 + 3 + 1 + 1 + 1) * unit + 2 * tokens * 2 * hidden + modulation + row_sums
    tensors = 1 + 1 + 1  # input, its norm, modulated
    tensors += 3 + 2 + 1 + 1  # qkv, turned q and k, attention, its projection
    tensors += 1 + 1 + 1 + 1  # the residual stream, its norm, modulated; w3's output
    mlp = 2 * tokens * (2 * hidden + hidden + hidden)  # w12, silu(gate), their product
    inverse_rms = 4 * tokens * (2 + 2 * heads)
    condition = 2 * width + modulation + 2 * 2 * width  # silu(c), the chunks, 1 + scale twice
    return tensors * unit + mlp + inverse_rms + condition + row_sums


@pytest.mark.parametrize("checkpointing", ["none", "full", "op"])
def test_activations_of_a_block_are_those_counted_by_hand(checkpointing: Any) -> None:
    trace = block_trace(checkpointing)
    fixed, per_image = trace.forward.net
    assert per_image == activations_by_hand(checkpointing)
    assert 0 <= fixed <= 64  # the random state that flash attention saves
    assert tuple(trace.backward.net) == (-fixed, -per_image)


def dit_7b(*flags: str) -> Config:
    return load_config(["--job.config_file=dit_7b", *flags])


def of_depth(depth: int, *flags: str) -> Config:
    """Blocks of the 7B."""
    return dit_7b(f"--model.overrides=depth={depth}", *flags)


DDP_OVER_8 = ("--training.data_parallel_replicate_degree=8", "--training.data_parallel_shard_degree=1")


def test_ddp_of_the_7b_does_not_fit_80_gb_and_fsdp_over_8_does() -> None:
    ddp = plan_run(dit_7b(*DDP_OVER_8), device="a100-80gb", num_devices=8)
    fsdp = plan_run(dit_7b(), device="a100-80gb", num_devices=8)
    assert (ddp.mode, ddp.fits) == ("DDP", False)
    assert (fsdp.mode, fsdp.fits) == ("FSDP", True)
    parameters = fsdp.num_parameters
    assert 7.0e9 < parameters < 7.2e9
    assert sum(ddp.state.values()) == pytest.approx(20 * parameters, rel=1e-6)
    assert fsdp.state["optimizer"] / planner.GIB == pytest.approx(8 * parameters / 8 / planner.GIB, rel=1e-4)
    assert largest_batch(dit_7b(*DDP_OVER_8), "a100-80gb", 8) == 0


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    largest = largest_batch(dit_7b(), "a100-80gb", 8)
    assert largest > 100
    fits = [
        plan_run(dit_7b(f"--training.batch_size={batch}"), device="a100-80gb", num_devices=8).fits
        for batch in (largest, largest + 1)
    ]
    assert fits == [True, False]
    even = largest_batch(dit_7b(f"--diffusion.ingredients={PAIRED}"), "a100-80gb", 8)
    assert even % 2 == 0 and 0.99 * largest < even <= largest
    auto = plan_run(dit_7b("--training.batch_size=auto"), device="NVIDIA A100-SXM4-80GB", num_devices=8)
    assert auto.batch_size == largest


def test_one_micro_batch_may_fit_where_several_do_not() -> None:
    job = dit_7b("--training.global_batch_size=256")
    jobs = [job.replace({"training.batch_size": size}) for size in (1, 16, 32)]
    fits = [plan_run(of_size, device="rtx4090", num_devices=8).fits for of_size in jobs]
    assert fits == [False, False, True], "unsharded gradients wait for the last micro-batch"
    assert largest_batch(job, "rtx4090", 8) == 32


def test_the_bound_is_the_flops_of_the_mfu_at_the_peak_or_the_state_at_the_bandwidth() -> None:
    config = config_of()
    plan = plan_run(config, device="h100", num_devices=2)
    assert plan.model.flops_per_image == count_model_flops(spec_of(config)).total
    assert plan.model_flops == 4 * plan.model.flops_per_image  # of 8 images, on each of 2 devices
    assert plan.bound.products == pytest.approx(plan.model_flops / 989e12)
    assert plan.bound.state == pytest.approx(2 * sum(plan.state.values()) / 3350e9)
    assert plan.min_step_time_s == max(plan.bound.products, plan.bound.state) == 8 * plan.min_seconds_per_image
    taught = config_of(HEAD)
    counted = count_loss_flops(taught.diffusion, spec_of(taught)).total
    found = plan_run(taught, device="h100", num_devices=2).model.flops_per_image
    assert found == counted > plan.model.flops_per_image
    offloaded = plan_run(config_of("--training.enable_cpu_offload"), device="h100", num_devices=2)
    assert (offloaded.bound.products, offloaded.bound.state) == (plan.bound.products, 0)


def test_the_peak_of_the_bound_is_that_of_the_precision() -> None:
    def products(*flags: str, device: str = "h100") -> float:
        return float(plan_run(of_depth(2, *flags), device=device, num_devices=8).bound.products)

    assert products("--training.compile=false") == products()
    assert products("--float8.enable_float8_linear") == products() / 2
    assert products("--float8.enable_float8_linear", device="a100-80gb") == products(device="a100-80gb")
    assert products(device="h200") == products() == pytest.approx(products(device="a100-80gb") * 312 / 989)
    float32, high = "--training.mixed_precision_param=float32", "--training.float32_matmul_precision=high"
    assert products(float32) == pytest.approx(products() * 989 / 67)
    assert products(high) == products() == products(float32, high) / 2
    assert products(float32, high, device="mi300x") == products(float32, device="mi300x")


@pytest.mark.parametrize(
    ("device", "flags", "operators"),
    [
        ("h100", [], {"flash"}),  # torch would choose cuDNN's
        ("a100-80gb", ["--training.attention_backend=cudnn"], {"cudnn"}),
        ("h100", ["--training.attention_backend=math"], set()),
        ("h100", ["--training.mixed_precision_param=float32"], {"efficient"}),  # the only one for float32
    ],
)
def test_a_plan_has_the_attention_that_the_run_sets(
    device: str, flags: list[str], operators: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()

    class Recorder(StepRecorder):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._overloadpacket.__name__
            if name.startswith("_scaled_dot_product_") and not name.endswith("_backward"):
                seen.add(name.removeprefix("_scaled_dot_product_").removesuffix("_attention"))
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(tracing, "StepRecorder", Recorder)
    planner._traced_model.cache_clear()
    plan_run(config_of("--model.flavor=debugmodel", *flags), device=device, num_devices=1)
    assert seen == operators


def published_plan(model: str, *flags: str, device: str = "h100", num_devices: int = 1) -> planner.Plan:
    config = config_of(*as_flags(published_options(model, None)), "--training.batch_size=1", *flags)
    return plan_run(config, device=device, num_devices=num_devices)


def test_a_lora_of_sd3_on_int8_fits_an_l4_and_full_fine_tuning_does_not() -> None:
    flags = ["--ema.enable=false", FULL]
    lora = published_plan("sd3/SD3-medium", *flags, "--lora.rank=16", "--quantize.base=int8", device="l4")
    assert lora.num_trained_parameters == 24 * 4 * 16 * (1536 + 1536)
    assert lora.state["gradients"] == 4 * lora.num_trained_parameters
    assert 8 * lora.num_trained_parameters < lora.state["optimizer"] < 8.001 * lora.num_trained_parameters
    linears = [weight for block in lora.model.parameters.blocks for weight in block if weight.itemsize == 1]
    assert sum(weight.local(1, 0) for weight in linears) > 0.9 * lora.num_parameters
    assert lora.fits
    assert lora.peak_memory_gib < 8

    whole = published_plan("sd3/SD3-medium", *flags, device="l4")
    assert whole.num_parameters == whole.num_trained_parameters == 2_028_328_000
    assert sum(whole.state.values()) == 16 * whole.num_parameters + 4 * len(whole.model.parameters.all)
    assert whole.parts["buffers"] == 4 * 1536 * 192**2  # SD3's table of positions
    assert not whole.fits


def test_three_blocks_of_a_row_are_enough() -> None:
    @functools.cache
    def activations(double: int, single: int, *flags: str) -> float:
        sizes = as_flags({"model.overrides": [f"num_layers={double}", f"num_single_layers={single}"]})
        return published_plan("flux/debugmodel", *sizes, *flags).activations

    growth = activations(4, 3) - activations(3, 3)  # the first count that is not traced at its full depth
    assert activations(8, 3) == activations(3, 3) + 5 * growth
    full, half = (
        activations(4, 3, "--activation_checkpoint.mode=fraction", f"--activation_checkpoint.fraction={share}")
        for share in (1, 0.5)
    )
    assert full < half < activations(4, 3)


def test_8_bit_moments_are_torchaos(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    from torchditan.optim.optimizers import build_optimizer

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 20))
    config = config_of("--optimizer.name=AdamW8bit")
    optimizer = build_optimizer(model, config.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    monkeypatch.setattr(torch, "compile", lambda update, **_options: update)
    optimizer.step()
    parts = [value for state in optimizer.state.values() for value in state.values()]
    inner = [part for value in parts for part in _parts(value)]
    weights = [Weight(name, tuple(value.shape), is_trained=True) for name, value in model.named_parameters()]
    state = model_state(Parameters(blocks=[], root=weights), num_shards=1, optimizer=config.optimizer)
    assert num_bytes(inner) == state["optimizer"]


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside a tensor subclass."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [getattr(value, name) for name in names]


def test_what_a_configuration_leaves_open_is_what_the_dataset_says() -> None:
    from torchditan import datasets

    for name in ("digits", "dummy", "earth", "scenes"):
        dataset = datasets.build_dataset(load_config([f"--dataset.dataset_name={name}"]).dataset, split="train")
        assert planner.SAMPLE_SHAPES[name] == (*dataset.sample_shape, len(dataset.class_names))


@pytest.mark.parametrize(("name", "num_parameters"), [("scenes", 2_448_320), ("earth", 1_978_800)])
def test_a_shipped_configuration_is_planned_with_the_model_that_it_trains(name: str, num_parameters: int) -> None:
    """The numbers that training prints. The first reads captions."""
    config = load_config([f"--job.config_file={name}"])
    assert plan_run(config, device="cpu", num_devices=1).num_parameters == num_parameters


@pytest.mark.parametrize(
    ("flags", "device", "about", "mentions"),
    [
        ([], "rtx4091", '--device = "rtx4091"', ["rtx4090?"]),
        (
            ["--dataset.dataset_name=folder", "--dataset.num_classes=none"],
            "h100",
            "dataset.num_classes = none",
            ["must be"],
        ),
        (  # of latents, not the three of pictures
            ["--dataset.dataset_name=imagenet", "--autoencoder.name=sd-vae", "--model.input_channels=none"],
            "h100",
            "model.input_channels = none",
            ["must be given"],
        ),
        (["--autoencoder.online", "--autoencoder.name=haar"], "h100", "autoencoder.scale = none", ["normalisation"]),
        (["--training.data_parallel_shard_degree=3"], "h100", "training.data_parallel_shard_degree = 3", ["4"]),
        (["--training.global_batch_size=20"], "h100", "training.global_batch_size = 20", ["16"]),
    ],
)
def test_mistakes_are_one_line(flags: list[str], device: str | None, about: str, mentions: list[str]) -> None:
    with refused(about, *mentions):
        plan_run(config_of(*flags), device=device, num_devices=4)


def test_an_unknown_device_is_planned_for_memory_alone() -> None:
    known = plan_run(config_of(), device="h100", num_devices=2)
    for device in (None, "cpu"):
        plan = plan_run(config_of(), device=device, num_devices=2)
        assert (plan.fits, plan.bound, plan.min_step_time_s, plan.min_seconds_per_image) == (None, None, None, None)
        assert plan.state == known.state
    assert math.isclose(sum(known.parts.values()) / planner.GIB, known.peak_memory_gib)


def test_offload_keeps_the_state_off_the_device() -> None:
    plan = plan_run(config_of("--training.enable_cpu_offload"), device="h100", num_devices=2)
    assert plan.parts["parameters"] == plan.parts["optimizer"] == plan.parts["ema"] == plan.parts["gradients"] == 0
    assert plan.state["optimizer"] > 0


def test_the_tool_prints_lower_bounds_and_recommends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchditan.extras.planner import __main__ as plan

    arguments = ["quickstart", "--device=h100", "--num_devices=8", "--training.steps=3600000000"]
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    plan.main()
    printed = capsys.readouterr().out
    step, products, state, hours = (
        float(re.search(pattern, printed)[1].replace(",", ""))
        for pattern in (
            r"time of a step: at least (\S+) ms \(a lower bound, not a prediction\)",
            r"(\S+) ms  matrix products: .* TFLOP at the peak, 989 TFLOP/s",
            r"(\S+) ms  model state: .* GiB read and written once, at 3,350 GB/s",
            r"3,600,000,000 steps: at least (\S+) hours",
        )
    )
    assert step == pytest.approx(max(products, state), rel=0.1)  # the parts are printed with three decimals
    assert hours == pytest.approx(1e3 * step, rel=1e-3)
    assert "ms/image there, at least" in printed
    assert "recommended, fits with the lowest bound: --training.data_parallel_replicate_degree" in printed
    assert "so a real step takes longer" in printed
    assert not re.search(r"images/s|MFU|cost", printed)


def test_of_bounds_that_are_close_the_first_recomputes_and_communicates_least() -> None:
    found = alternatives(of_depth(4), "b200", 8, batch_size=8)
    kinds = ("none", "selective op", "selective 2", "full")
    order = [(kind, mode) for kind in kinds for mode in ("DDP", "HSDP", "FSDP")]
    assert [(plan.checkpointing, plan.mode) for _, plan in found] == order
    assert all(plan.batch_size == 8 for plan, _ in found)
    bounds = [plan.min_seconds_per_image for _, plan in found]
    assert min(bounds) > 0.95 * max(bounds)
    small = of_depth(4, "--training.global_batch_size=8", "--training.batch_size=1", "--model.patch_size=4")
    modes = [plan.mode for _, plan in alternatives(small, "b200", 8, batch_size=1)]
    assert modes == [mode for mode in ("FSDP", "HSDP", "DDP") for _ in kinds], "the state of a device decides"


def test_what_fits_comes_first() -> None:
    found = alternatives(of_depth(10), "rtx4090", 8, batch_size=8)
    assert [plan.fits for _, plan in found] == 8 * [True] + 4 * [False]
    assert {plan.mode for _, plan in found[8:]} == {"DDP"}
    ddp, fsdp = (plan_run(of_depth(10, *flags), device="rtx4090", num_devices=8) for flags in (DDP_OVER_8, ()))
    assert is_better(fsdp, ddp) and not is_better(ddp, fsdp) and not is_better(fsdp, fsdp)


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["quickstart"], "", ["required", "--device", "h100", "cpu"]),
        (["quickstart", "--device", "h100", "--price_per_hour", "2"], "--price_per_hour", ["--num_devices"]),
    ],
)
def test_the_tool_reports_mistakes_in_one_line(
    arguments: list[str], about: str, mentions: list[str], run_script: RunScript
) -> None:
    outcome = run_script("torchditan", "plan", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert_refused(outcome.err, about, mentions)


@pytest.mark.gpu
@pytest.mark.slow
def test_planned_memory_is_within_5_percent_of_a_gpu(tmp_path: Path) -> None:
    script, out = REPOSITORY / "benchmarks" / "planner_truth.py", tmp_path / "truth.json"
    command = [sys.executable, str(script), "--device", "cuda", "--out", str(out), "--no_compiled"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    rows = [row for row in json.loads(out.read_text())["rows"] if row["status"] == "ok"]
    assert len(rows) >= 12
    worst = max(rows, key=lambda row: abs(row["memory_error"]))
    assert abs(worst["memory_error"]) <= 0.05, worst


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
