# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Tests that need a CUDA device: the same curve as on the CPU, MFU, offload, float8, and the late host check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from emulated_gpu import skip_if_emulated

from torchditan.run.reading import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
FLAGS = [
    "--model.flavor=debugmodel",
    "--training.batch_size=16",
    "--training.steps=12",
    "--metrics.log_freq=1",
    "--optimizer.lr=1e-3",
    "--sampling.num_steps=2",
    "--dataset.num_workers=2",
]

pytestmark = pytest.mark.gpu


def train(folder: Path, name: str, *flags: str, hide_gpu: bool = False) -> list[dict]:
    import os

    if hide_gpu:
        skip_if_emulated("it has no curve to compare with a CPU's")
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if hide_gpu else {})}
    command = [sys.executable, str(REPOSITORY / "train.py"), *FLAGS, *flags]
    command += [f"--job.dump_folder={folder}", f"--metrics.experiment_name={name}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return read_metrics(folder / name)


def largest_difference(left: list[dict], right: list[dict], key: str = "loss") -> float:
    assert len(left) == len(right) == 12
    skip_if_emulated("its losses are zero")
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(left, right, strict=True))


def test_a_gpu_follows_the_curve_of_the_cpu_in_float32(tmp_path: Path) -> None:
    exact = "--training.mixed_precision_param=float32"
    on_gpu = train(tmp_path, "gpu", exact)
    on_cpu = train(tmp_path, "cpu", exact, hide_gpu=True)
    assert largest_difference(on_gpu, on_cpu) < 1e-3
    assert on_gpu[-1]["peak_reserved_gib"] > 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.compile"],
        ["--training.enable_cpu_offload"],
        ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
        ["--training.compile", "--activation_checkpoint.mode=full"],
        ["--checkpoint.enable_checkpoint", "--checkpoint.interval=4", "--validation.freq=4"],
    ],
)
def test_options_keep_the_curve_in_bfloat16(flags: list[str], tmp_path: Path) -> None:
    plain = train(tmp_path, "plain")
    assert largest_difference(train(tmp_path, "run", *flags), plain) < 0.02


def test_small_batches_compile_with_checkpointing(tmp_path: Path) -> None:
    flags = ["--dataset.dataset_name=dummy", "--dataset.image_size=32", "--training.batch_size=8"]
    train(tmp_path, "run", *flags, "--training.compile", "--activation_checkpoint.mode=full")


def test_mfu_is_reported_on_a_listed_gpu(tmp_path: Path) -> None:
    import torch

    from torchditan.models.peak_flops import peak_flops

    records = train(tmp_path, "run")
    known = peak_flops(torch.cuda.get_device_name()) is not None
    assert (records[-1]["mfu"] is not None) == known
    assert records[-1]["tflops_per_device"] > 0


def test_float8_trains_where_the_device_has_it(tmp_path: Path) -> None:
    import torch

    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    wide = ("--model.overrides", "depth=1", "width=2560", "num_heads=20", "--optimizer.lr=1e-4")  # else no layer gains
    plain = train(tmp_path, "plain", *wide)
    float8 = train(tmp_path, "float8", *wide, "--float8.enable_float8_linear", "--training.compile")
    assert 1e-6 < largest_difference(float8, plain) < 0.1


@pytest.mark.parametrize("async_mode", ["async", "async_with_pinned_mem"])
def test_saving_beside_the_training_stores_what_saving_in_between_does(async_mode: str, tmp_path: Path) -> None:
    import torch

    from torchditan.checkpoint.loading import read_state

    flags = ["--checkpoint.enable_checkpoint", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"]
    flags += ["--training.deterministic"]
    train(tmp_path, "between", *flags)
    train(tmp_path, "beside", *flags, f"--checkpoint.async_mode={async_mode}")
    for step in range(2, 13, 2):
        there, here = (
            read_state(tmp_path / name / "checkpoint" / f"step-{step:08d}") for name in ("between", "beside")
        )
        assert all(torch.equal(there[name], here[name]) for name in there), step


def test_a_run_on_a_gpu_resumes_to_the_bit(tmp_path: Path) -> None:
    import torch

    from torchditan.checkpoint.loading import read_state

    flags = ["--checkpoint.enable_checkpoint", "--checkpoint.interval=4", "--training.deterministic"]
    train(tmp_path, "whole", *flags)
    train(tmp_path, "cut", *flags, "--training.steps=8")
    assert [record["loss"] for record in train(tmp_path, "cut", *flags)] == [
        record["loss"] for record in read_metrics(tmp_path / "whole")
    ]
    states = [read_state(tmp_path / name / "checkpoint" / "step-00000012") for name in ("whole", "cut")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("base", ["bfloat16", "int8"])
def test_a_lora_follows_the_curve_of_the_cpu(base: str, tmp_path: Path) -> None:
    for module in ("diffusers", "peft"):
        pytest.importorskip(module)
    flags = ["--model.name=flux", "--dataset.dataset_name=dummy", "--dataset.image_size=8", "--model.input_channels=16"]
    flags += ["--dataset.num_classes=0", "--lora.rank=8", f"--quantize.base={base}", "--sampling.guidance_scale=1"]
    on_gpu = train(tmp_path, "gpu", *flags)
    compiled = train(tmp_path, "compiled", *flags, "--training.compile", "--activation_checkpoint.mode=full")
    assert largest_difference(compiled, on_gpu) < 0.02
    on_cpu = train(tmp_path, "cpu", *flags, hide_gpu=True)
    assert largest_difference(on_gpu, on_cpu) < 0.02


def test_float16_with_loss_scaling_follows_bfloat16(tmp_path: Path) -> None:
    half = train(tmp_path, "half", "--training.mixed_precision_param=float16")
    assert 0 < largest_difference(half, train(tmp_path, "plain")) < 0.02
    assert half[-1]["loss_scale"] > 0


def test_one_step_generation_follows_the_curve_of_the_cpu(tmp_path: Path) -> None:
    """In bfloat16, where the derivative of a norm is float32 on a GPU only."""
    flags = ["--diffusion.objective=imf", "--training.mixed_precision_param=bfloat16"]
    assert largest_difference(train(tmp_path, "gpu", *flags), train(tmp_path, "cpu", *flags, hide_gpu=True)) < 0.05
