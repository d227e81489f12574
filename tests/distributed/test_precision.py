# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The precision "auto", of the model and of Muon: bfloat16 where the device multiplies in it, float32 elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchditan.config.loader import load_config
from torchditan.distributed.precision import precision_advice, precision_for
from torchditan.extras.planner.plan import plan_run

if TYPE_CHECKING:
    from tests.conftest import Train

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AUTO = ["--training.mixed_precision_param=auto", "--optimizer.name=Muon", "--optimizer.ns_dtype=auto"]
OLD, NEW = {"architecture": "x86_64", "avx512_bf16": False}, {"architecture": "x86_64", "avx512_bf16": True}


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({"architecture": "x86_64", "amx_bf16": False, "avx512_bf16": False}, "float32"),
        ({"architecture": "x86_64", "amx_bf16": True, "avx512_bf16": False}, "bfloat16"),
        (NEW, "bfloat16"),
        ({"architecture": "aarch64", "bf16": True}, "bfloat16"),
        ({"architecture": "aarch64", "bf16": False}, "float32"),
        ({}, "float32"),
    ],
)
def test_a_cpu_gets_the_precision_that_it_multiplies_in(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any], precision: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert precision_for(CPU) == precision
    assert ("float32" in (precision_advice("bfloat16", CPU) or "")) == (precision == "float32")
    assert precision_advice("float32", CPU) is None


def test_a_gpu_is_asked_without_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_supported, precision in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, is_it=is_supported: is_it)
        assert precision_for(CUDA) == precision
    assert precision_for(torch.device("mps")) == "float32"
    assert precision_advice("bfloat16", CUDA) is None


def stored(run: Path) -> list[str]:
    config = json.loads((run / "config.json").read_text())["config"]
    return [config["training"]["mixed_precision_param"], config["optimizer"]["ns_dtype"]]


def test_a_run_records_its_precision_and_keeps_it_on_another_machine(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*AUTO, "--checkpoint.enable_checkpoint", "--checkpoint.save_final=true"]
    for first, second, precision in ((OLD, NEW, "float32"), (NEW, OLD, "bfloat16")):
        for capabilities, steps in ((first, 2), (second, 4)):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda it=capabilities: it, raising=False)
            outcome = train(precision, *flags, f"--training.steps={steps}")
            assert stored(tmp_path / precision) == [precision, precision]
        assert "resumed at step 2" in outcome.out and f"on cpu, {precision}" in outcome.out
    losses = [(tmp_path / precision / "metrics.jsonl").read_text() for precision in ("float32", "bfloat16")]
    last_losses = [json.loads(text.splitlines()[-1])["loss"] for text in losses]
    assert last_losses[0] != last_losses[1]  # the mode changes the numbers


def test_the_planner_plans_a_gpu_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: OLD, raising=False)
    peaks = {}
    for device in ("h100", "cpu"):
        for precision in ("auto", "bfloat16", "float32"):
            config = load_config(["--job.config_file=quickstart", f"--training.mixed_precision_param={precision}"])
            peaks[device, precision] = plan_run(config, device=device, num_devices=1).peak_memory_gib
    assert peaks["h100", "auto"] == peaks["h100", "bfloat16"] != peaks["h100", "float32"]
    assert peaks["cpu", "auto"] == peaks["cpu", "float32"] != peaks["cpu", "bfloat16"]
