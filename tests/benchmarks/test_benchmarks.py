# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""benchmarks/step_time.py and start_time.py at a tiny size: the compared models, the ratios and the failures."""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a folder of scripts, not a package

import step_cases
import step_measure
import step_time
import trainer_step
from step_cases import Case, Group

from torchditan.models.flops import count_model_flops

if TYPE_CHECKING:
    from tests.conftest import RunAlone

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")
OURS = Case("ours", "debugmodel", "fp32")
PLAIN = Case("plain", "debugmodel", "fp32")
SETTINGS = step_measure.Settings(turns=3, steps=1, warmup=1, sampling_steps=1)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are measured here, on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        step_measure,
        "measure_in_processes",
        lambda group, settings, seconds_left: step_measure.measure(group, settings),
    )


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


def test_diffusers_model_computes_the_same_function() -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    spec = step_cases.build_spec(OURS)
    ours, theirs = spec.build(), step_cases.build_diffusers(spec).train()
    trainer_step.fill_with_normal(ours)
    with torch.no_grad():
        ours.pos_embed.copy_(theirs.pos_embed.pos_embed)
    theirs.load_state_dict(diffusers_weights(ours, theirs))

    sample, label = step_cases.random_batch(OURS, 16, CPU)
    # Their timestep frequencies are spaced a little differently; at t = 0 they do not matter.
    t = torch.zeros(16)
    mine = ours(sample, t, {"class_label": label})
    predict = step_cases.predict_of(Case("diffusers", "debugmodel", "fp32"), theirs)
    other = predict(sample, t, label)
    assert mine.shape == other.shape == sample.shape
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    # Nothing of the comparison is random: no label is dropped in training.
    torch.testing.assert_close(predict(sample, t, label), other, rtol=0, atol=0)


def test_the_plain_model_has_our_weights_and_computes_the_same_function() -> None:
    torch.manual_seed(0)
    spec = step_cases.build_spec(OURS)
    ours, plain = spec.build(), step_cases.build_plain(spec)
    trainer_step.fill_with_normal(ours)
    plain.load_state_dict(ours.state_dict())
    sample, label = step_cases.random_batch(OURS, 16, CPU)
    t = torch.rand(16)
    mine = ours(sample, t, {"class_label": label})
    torch.testing.assert_close(plain(sample, t, label), mine, rtol=1e-4, atol=1e-5)


def test_the_plain_model_has_our_parameters_and_flops() -> None:
    spec = step_cases.build_spec(Case("ours", "DiT-S", "fp32"))
    with torch.device("meta"):
        ours, plain = spec.build(), step_cases.build_plain(spec)
        counter = FlopCounterMode(display=False)
        with counter:
            plain(torch.zeros(1, 4, 32, 32), torch.zeros(1), torch.zeros(1, dtype=torch.int64)).sum().backward()
    shapes = [{name: tuple(value.shape) for name, value in model.named_parameters()} for model in (ours, plain)]
    assert shapes[0] == shapes[1]
    assert counter.get_total_flops() == count_model_flops(spec).total


def test_a_quick_run_writes_every_row_and_every_ratio(
    tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("diffusers")
    out = tmp_path / "step_time.json"
    flags = "--flags=--optimizer.name=Muon --optimizer.ns_dtype=float32"
    suites = [*step_time.CPU_SUITES, "options", "sweep"]
    assert step_time.main(["--quick", "--device=cpu", f"--out={out}", flags, *suites]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step_time.json"]

    result = json.loads(out.read_text())
    keys = "benchmark command sampling_steps device device_name cpu_name load_average_before git_commit"
    assert set(keys.split()) < set(result)
    assert result["versions"]["torch"] == metadata.version("torch")  # a wheel of PyPI has no +cu132 there
    measured = [group for group in result["groups"] if group["rows"][0]["status"] == "ok"]
    names = [tuple(row["implementation"] for row in group["rows"]) for group in measured]
    others = ["diffusers", "plain", "diffusers", "plain", "bare loop", "ours"]
    assert names == [("ours", other) for other in others]
    printed = capsys.readouterr().out
    for group in measured:
        for row in group["rows"]:
            assert set(row) == set(step_measure.new_row(OURS, Group("plain", (OURS,), 1)))
            assert len(row["blocks_s"]) == 3
            assert row["images_per_second"] == pytest.approx(row["batch_size"] / row["step_time_s"])
            assert row["mfu"] is None, "the peak of a CPU is not known"
        assert group["comparison"]["target"] is None or group["suite"] == "trainer", "targets are those of DiT-S"
        ratio = group["comparison"]["ratio"]
        assert ratio is None or f"{ratio:.3f} (quartiles" in printed
    missing = [row for group in result["groups"] for row in group["rows"] if row["status"] == "not measured"]
    assert {row["step_time_s"] for row in missing} == {None}
    assert "not measured: needs a GPU" in printed


def test_a_measured_step_ends_its_loader_workers(in_this_process: None) -> None:
    """They ignore SIGTERM, so Python would wait for them at the end of the process forever."""
    case = replace(OURS, flags=("--dataset.num_workers=1",))
    (row,) = step_measure.measure(Group("sweep", (case,), 4), SETTINGS)
    assert row["status"] == "ok"
    assert not multiprocessing.active_children()


def timed(group: Group, *times: list[float]) -> list[dict[str, Any]]:
    rows = [step_measure.new_row(case, group) for case in group.cases]
    for row, seconds in zip(rows, times, strict=True):
        step_measure.add_times(row, seconds, flops=1, peak=None)
    return rows


def test_the_cost_of_objectives_is_relative_to_flow_matching(tmp_path: Path, run_alone: RunAlone) -> None:
    out = tmp_path / "cost.json"
    flags = ["--flavor=debugmodel", "--batch_size=4", "--rounds=2", f"--out={out}"]
    printed = run_alone("benchmarks/objective_cost.py", *flags)
    rows = json.loads(out.read_text())["rows"]
    assert [line.split("  ")[0] for line in printed.splitlines()] == list(rows)
    assert rows["flow_matching"]["flops"] == rows["flow_matching"]["time"] == 1
    assert rows["imf guidance=true"]["flops"] > rows["imf"]["flops"] > rows["imf tangent=data"]["flops"] > 1
