# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Apple GPUs (mps) and AMD GPUs (cuda, with torch.version.hip), without either: see tests/apple_gpu.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from apple_gpu import AppleGpu, apple_gpu
from tiny_runs import KEEP

from torchditan import load
from torchditan.config.options import Float8
from torchditan.diffusion.timesteps import Timesteps
from torchditan.distributed.float8 import check_float8
from torchditan.distributed.precision import precision_for
from torchditan.distributed.process_group import Rank, check_devices
from torchditan.errors import ConfigError
from torchditan.extras.weights.trained_model import _device
from torchditan.optim.divergence import DivergenceError, DivergenceGuard, LossSpikes
from torchditan.optim.optimizers import clip_grad_norm
from torchditan.randomness import draw
from torchditan.run.step_timer import PeakMemory

if TYPE_CHECKING:
    from tests.conftest import RunScript, Train

MPS, CUDA = torch.device("mps"), torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[AppleGpu]:
    if shutil.which("g++") is None:
        pytest.skip("the stand-in for an Apple GPU needs g++")
    with apple_gpu() as found:
        yield found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--training.mixed_precision_param=bfloat16"], "must be float32 or auto"),
        (["--training.mixed_precision_reduce=bfloat16"], "MPS trains in one process"),
        (["--training.attention_backend=flash"], "must be default on MPS"),
        (["--training.deterministic"], "leave it out"),
        (["--training.compile"], "leave it out"),
        (["--float8.enable_float8_linear"], "no float8 products"),
        (["--checkpoint.async_mode=async_with_pinned_mem"], "must be disabled"),
        (["--profiling.enable_memory_snapshot"], "needs CUDA"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mps_refuses_in_one_line_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, run_script: RunScript, flags: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    outcome = run_script("torchditan", "train", "quickstart", *flags)
    assert outcome.code == 2
    lines = outcome.err.splitlines()
    assert len(lines) == 1, lines
    option = flags[0].removeprefix("--").split("=")[0]
    assert option in lines[0]
    assert message in lines[0]


def test_mps_refuses_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    check_devices(Rank(0, 0, 1))
    with pytest.raises(ConfigError, match=r"nproc_per_node.*= 2: .*must be 1"):
        check_devices(Rank(1, 1, 2))


def test_mps_is_used_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert Rank(0, 0, 1).device.type == "cpu"
    with pytest.raises(ConfigError, match="no Apple GPU"):
        _device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Rank(0, 0, 1).device.type == _device(None).type == _device("mps").type == "mps"
    assert precision_for(MPS) == "float32"


def test_a_nan_changes_no_weight_although_the_fused_kernels_of_mps_ignore_found_inf(gpu: AppleGpu) -> None:
    weight = torch.nn.Parameter(torch.ones(3).to(MPS))
    guard = DivergenceGuard(torch.optim.AdamW([weight], fused=True))
    weight.grad = torch.tensor([1.0, float("nan"), 1.0]).to(MPS)
    with pytest.raises(DivergenceError, match="step 1"):
        guard.step(1, clip_grad_norm([weight], max_norm=1.0))
    assert weight.detach().cpu().tolist() == [1, 1, 1]
    weight.grad = torch.ones(3).to(MPS)
    guard.step(2, clip_grad_norm([weight], max_norm=1.0))
    assert weight.detach().cpu().max() < 1


def test_spikes_timesteps_and_random_numbers_need_no_float64_on_mps(gpu: AppleGpu) -> None:
    spikes = LossSpikes(MPS)
    verdicts = [spikes.judge(torch.tensor(loss).to(MPS)).item() for loss in [1.0] * 25 + [9.0]]
    assert verdicts == [False] * 25 + [True]
    cpu = draw(0, range(4), (1, 2, 2))
    there = cpu.to(MPS)
    timesteps = Timesteps("logit_normal")
    assert there.timestep.device.type == "mps"
    assert torch.equal(timesteps(there.timestep).cpu(), timesteps(cpu.timestep))


def test_a_model_loads_draws_and_is_evaluated_on_mps(
    train: Train, run_script: RunScript, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    train("run", *KEEP)
    run = tmp_path / "run"
    classes, steps = [1, 2], 2
    on_cpu = load(run, device="cpu").sample(classes=classes, num_steps=steps)
    gpu: AppleGpu = request.getfixturevalue("gpu")
    model = load(run)
    assert model.device.type == "mps"
    on_gpu = model.sample(classes=classes, num_steps=steps)
    assert gpu.calls["addmm"] > 0  # the stand-in computed it
    assert (on_gpu.int() - on_cpu.int()).abs().max() <= 1
    outcome = run_script("torchditan", "generate", str(run), f"--sampling.num_steps={steps}")
    assert outcome.code == 0, outcome.err
    metric = ["--metrics=classifier", "--num_samples=20", "--epochs=1", f"--sampling.num_steps={steps}"]
    outcome = run_script("torchditan", "evaluate", str(run), *metric)
    assert outcome.code == 0, outcome.err
    assert "accuracy_generated" in outcome.out


def test_memory_of_mps_is_what_the_driver_holds(gpu: AppleGpu) -> None:
    assert PeakMemory(MPS).read() == {
        "peak_memory_gib": 3.0,
        "peak_reserved_gib": None,
        "peak_memory_percent": 25.0,
    }


def amd(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    properties: Any = SimpleNamespace(gcnArchName=f"{architecture}:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # of an MI250X
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct")


def test_float8_needs_an_amd_gpu_that_multiplies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    config = Float8(enable_float8_linear=True)
    amd(monkeypatch, "gfx942")
    check_float8(config, device=CUDA)
    amd(monkeypatch, "gfx90a")
    with pytest.raises(ConfigError, match="AMD Instinct has no float8 products; needs one of gfx942"):
        check_float8(config, device=CUDA)


def test_amd_multiplies_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    amd(monkeypatch, "gfx942")
    assert precision_for(CUDA) == "bfloat16"
