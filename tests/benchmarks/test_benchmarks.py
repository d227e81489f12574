# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""benchmarks/step_time.py at a tiny size: its comparisons, output files and failures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a folder of scripts, not a package

import optimizer_time
import step_cases
import step_measure
import step_time

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "step_time.py"
CPU = torch.device("cpu")
OURS = step_cases.Case("ours", "debugmodel", "official", "fp32", "eager", "bare")
DIFFUSERS = step_cases.Case("diffusers", "debugmodel", "diffusers", "fp32", "eager", "bare")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


def diffusers_weights(ours: nn.Module, theirs: nn.Module) -> dict[str, torch.Tensor]:
    """Our weights under diffusers' names; it has q, k, v apart, an embedder in every block, and scale after shift."""
    source, target = ours.state_dict(), {}
    blocks = [name.removeprefix("transformer_blocks.") for name in theirs.state_dict()]
    for i in sorted({int(name.split(".")[0]) for name in blocks if name[0].isdigit()}):
        mine, block = f"blocks.{i}.", f"transformer_blocks.{i}."
        for kind in ("weight", "bias"):
            for part, tensor in zip("qkv", source[f"{mine}attn.qkv.{kind}"].chunk(3), strict=True):
                target[f"{block}attn1.to_{part}.{kind}"] = tensor
            target[f"{block}attn1.to_out.0.{kind}"] = source[f"{mine}attn.proj.{kind}"]
            target[f"{block}ff.net.0.proj.{kind}"] = source[f"{mine}mlp.fc1.{kind}"]
            target[f"{block}ff.net.2.{kind}"] = source[f"{mine}mlp.fc2.{kind}"]
            target[f"{block}norm1.linear.{kind}"] = source[f"{mine}adaLN_modulation.1.{kind}"]
            for layer, other in ((0, "linear_1"), (2, "linear_2")):
                name = f"{block}norm1.emb.timestep_embedder.{other}.{kind}"
                target[name] = source[f"t_embedder.mlp.{layer}.{kind}"]
        table = f"{block}norm1.emb.class_embedder.embedding_table.weight"
        target[table] = source["y_embedder.embedding_table.weight"]
    for kind in ("weight", "bias"):
        target[f"pos_embed.proj.{kind}"] = source[f"x_embedder.proj.{kind}"]
        target[f"proj_out_1.{kind}"] = source[f"final_layer.adaLN_modulation.1.{kind}"]
        target[f"proj_out_2.{kind}"] = source[f"final_layer.linear.{kind}"]
    return target


def test_both_models_of_the_comparison_compute_the_same_function() -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    spec = step_cases.build_spec(OURS)
    ours, theirs = spec.build(), step_cases.build_diffusers(spec, CPU).train()
    step_cases.fill_with_normal(ours)
    with torch.no_grad():
        ours.pos_embed.copy_(theirs.pos_embed.pos_embed)
    theirs.load_state_dict(diffusers_weights(ours, theirs))

    batch = step_cases.make_batch(spec, 16, CPU)
    # Their timestep frequencies are spaced a little differently; at t = 0 they do not matter.
    t = torch.zeros(16)
    mine = ours(batch.sample, t, {"class_label": batch.class_label})
    other = theirs(batch.sample, t.long(), batch.class_label, return_dict=False)[0]
    assert mine.shape == other.shape == batch.sample.shape
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    # Nothing of the comparison is random: no label is dropped in training.
    again = theirs(batch.sample, t.long(), batch.class_label, return_dict=False)[0]
    torch.testing.assert_close(again, other, rtol=0, atol=0)


def test_no_weight_and_no_data_is_zero() -> None:
    spec = step_cases.build_spec(OURS)
    model = spec.build()
    step_cases.fill_with_normal(model)
    batch = step_cases.make_batch(spec, 2, CPU)
    tensors = [*model.parameters(), batch.sample, batch.randomness.noise]
    assert all(torch.count_nonzero(tensor) == tensor.numel() for tensor in tensors)


def test_cpu_run_writes_every_row_with_its_preset_and_the_ratio(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    out = tmp_path / "step_time.json"
    arguments = ["--device", "cpu", "--size", "debug", "--variants", "fp32_eager", "--repeats", "2", "--threads", "1"]
    finished = run(*arguments, "--no_memory", "--out", str(out))
    assert finished.returncode == 0, finished.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step_time.json"]

    result = json.loads(out.read_text())
    keys = "benchmark command repeats warmup device device_name threads load_average_before versions git_commit date"
    assert set(keys.split()) < set(result)
    assert set(result["versions"]) == {"python", "torch", "diffusers", "numpy", "cuda"}
    assert (result["device"], result["threads"], result["versions"]["torch"]) == ("cpu", 1, torch.__version__)

    ours, theirs = result["rows"]
    assert set(ours) == set(theirs) == set(step_measure.new_row(OURS, 1))
    assert (ours["implementation"], ours["preset"]) == ("ours", "official")
    assert (theirs["implementation"], theirs["preset"]) == ("diffusers", "diffusers")
    for row in (ours, theirs):
        assert row["status"] == "ok"
        assert len(row["step_times_s"]) == 2
        assert row["images_per_second"] == pytest.approx(row["batch_size"] / row["step_time_s"])
        assert row["mfu"] is None, "the peak of a CPU is not known"
    (ratio,) = result["ratios"]
    assert ratio["ratio"] == pytest.approx(ours["step_time_s"] / theirs["step_time_s"])
    assert ratio["target"] is None, "the targets are those of DiT-S"
    assert f"{ratio['ratio']:.3f}" in finished.stdout


@pytest.mark.slow
def test_trainer_step_runs_in_a_process_of_its_own_and_reports_its_memory() -> None:
    rows = list(
        step_measure.sweep_in_subprocess(
            step_cases.Case("ours", "debugmodel", "torchditan", "bf16", "eager", "trainer", ema=True),
            (2, 10**9, 4),
            repeats=2,
            warmup=1,
            deadline=time.time() + 100,
            device=CPU,
        )
    )
    assert [(row["batch_size"], row["status"]) for row in rows] == [(2, "ok"), (10**9, "oom")]
    if sys.platform == "linux":
        assert 0 < rows[0]["peak_memory_growth_gib"] < rows[0]["peak_memory_gib"]


def sweep(monkeypatch: pytest.MonkeyPatch, error: Exception, **options: Any) -> list[dict[str, Any]]:
    """Rows of a sweep over batches of 1, 2, 4, 8 in which a batch of 4 raises."""

    def step(batch: Any) -> None:
        if len(batch.sample) >= 4:
            raise error

    monkeypatch.setattr(step_measure, "build_step", lambda case, device: (step, 7))
    settings = {"repeats": 3, "warmup": 1, "deadline": time.time() + 60, "device": CPU}
    return list(step_measure.sweep(OURS, (1, 2, 4, 8), **(settings | options)))


def test_sweep_records_running_out_of_memory_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sweep(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    assert [row["status"] for row in rows] == ["ok", "ok", "oom"]
    assert rows[-1]["reason"] == "CUDA out of memory"
    assert rows[-1]["step_time_s"] is None


def test_sweep_records_a_failure_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sweep(monkeypatch, RuntimeError("no such kernel"))
    assert [row["status"] for row in rows] == ["ok", "ok", "error"]
    assert "no such kernel" in rows[-1]["reason"]


def test_sweep_begins_no_row_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = sweep(monkeypatch, RuntimeError(), deadline=time.time() - 1)
    assert row["status"] == "skipped"


def test_ratios_are_those_of_medians_and_take_the_faster_compiled_form_of_diffusers() -> None:
    def row(case: Any, times: list[float]) -> dict[str, Any]:
        row = step_measure.new_row(case, 16)
        step_measure.add_times(row, times, flops_per_image=1, peak=None)
        return row

    cases = step_cases.cpu_cases("DiT-S", against="diffusers", variants=["fp32_eager", "bf16_compiled"])
    assert [case.implementation for case in cases] == ["ours", "diffusers", "ours", "diffusers", "diffusers"]
    times = [[3.0, 9.0, 2.0], [4.0, 4.0, 1.0], [1.0] * 3, [2.0] * 3, [1.6] * 3]
    found = step_time.ratios([row(case, seconds) for case, seconds in zip(cases, times, strict=True)])
    assert [(entry["denominator"], entry["ratio"], entry["target"]) for entry in found] == [
        ("diffusers fp32_eager", 0.75, 0.96),
        ("diffusers fp32_eager", 0.25, 0.42),
        ("diffusers bf16_compiled", 0.625, None),
    ]


def test_mfu_is_a_percentage_of_the_peak() -> None:
    row = step_measure.new_row(OURS, 10)
    step_measure.add_times(row, [2.0], flops_per_image=6e9, peak=1e11)
    assert (row["images_per_second"], row["tflops_per_device"], row["mfu"]) == (5.0, 0.03, pytest.approx(30.0))


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (["--device", "cpu", "--batch_size", "8", "16"], "one size on a CPU"),
        (["--repeats", "0"], "must be at least 1"),
    ],
)
def test_a_mistaken_option_is_refused(arguments: list[str], mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        step_time.main(arguments)
    assert stopped.value.code == 2
    assert mistake in capsys.readouterr().err


@pytest.mark.slow
def test_lora_against_full_writes_all_three_cases(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "lora.json"
    command = [
        sys.executable,
        str(Path(__file__).resolve().parents[2] / "benchmarks/lora_against_full.py"),
        "--steps=3",
        f"--out={out}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    cases = json.loads(out.read_text())["cases"]
    assert list(cases) == ["full", "lora, bfloat16 base", "lora, int8 base"]
    for case in cases.values():
        assert case["step_time_s"] > 0 and case["peak_memory_gib"] > 0
    assert cases["full"]["loss_last"] != cases["lora, int8 base"]["loss_last"]


def test_steps_of_muon_and_adamw_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer_time.main(["--model=debugmodel", "--batch_size", "2", "4", "--repeats=1", "--warmup=1"])
    lines = capsys.readouterr().out.splitlines()
    assert sum("Newton-Schulz adds" in line for line in lines) == 2
    assert sum("x AdamW" in line for line in lines) == 6
