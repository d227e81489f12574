# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Whole runs with MeanFlow: one curve in every mode, resume, and the way of its weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import zoo as zoo_of_runs
from refusals import assert_refused
from tiny_runs import KEEP, assert_same_state, job

import torchditan
from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from zoo import Zoo

    from tests.conftest import RunDistributed, RunScript, Train

FAST = ["--optimizer.lr=1e-2", "--lr_scheduler.warmup_steps=0"]
GUIDED = ["--diffusion.objective=imf guidance=true", *FAST]
KEPT = [*KEEP, "--checkpoint.interval=2"]
NONE, FULL = "--activation_checkpoint.mode=none", "--activation_checkpoint.mode=full"
NTH, OP = "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"
COMPILED = ["--training.compile", "--compile.backend=aot_eager"]
WHOLE = [*COMPILED, "--compile.scope=model"]
REPLICATE, CONTEXT = "--training.data_parallel_replicate_degree", "--training.context_parallel_degree"
MODES = [
    [f"{REPLICATE}=2", "--training.batch_size=2", FULL],
    [f"{REPLICATE}=1", "--training.batch_size=4", NTH, OP],
    [f"{REPLICATE}=1", "--training.batch_size=2", FULL, *COMPILED],
    [f"{REPLICATE}=2", NONE, *WHOLE],
    [f"{CONTEXT}=2", "--training.batch_size=4"],
]
STEPS = 4
KEYS = ("loss", "grad_norm", "h_du_dt_rms")


def curve(run: Path) -> list[list[float]]:
    return [[record[key] for key in KEYS] for record in read_metrics(run)]


def assert_close(run: Path, reference: Path, *, within: float = 1e-5) -> None:
    found, expected = (torch.tensor(curve(path)) for path in (run, reference))
    assert found.shape == expected.shape
    assert expected[1:].min() > 0
    difference = float(((found - expected).abs() / expected.clamp(min=1e-12)).max())
    print(f"{run.name}: largest relative difference {difference:.1e}")  # shown by pytest -s
    assert difference < within, run.name


def test_one_curve_in_other_modes_of_one_process(tmp_path: Path, train: Train) -> None:
    """In bfloat16 a lost tangent would be an error of the size of the derivative itself."""
    flags = [*GUIDED, f"--training.steps={STEPS}"]
    train("alone", *flags)
    train("halves", *flags, "--training.batch_size=2", FULL)
    assert_close(tmp_path / "halves", tmp_path / "alone")
    train("bfloat16", *flags, "--training.mixed_precision_param=bfloat16", *COMPILED, FULL)
    assert_close(tmp_path / "bfloat16", tmp_path / "alone", within=0.1)
    assert curve(tmp_path / "bfloat16") != curve(tmp_path / "alone")


@pytest.mark.slow
def test_one_curve_on_two_ranks_and_resumed_there(
    tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    steps = f"--training.steps={STEPS}"
    train("alone", *GUIDED, *KEPT, steps)
    shutil.copytree(tmp_path / "alone", tmp_path / "resumed")
    shutil.rmtree(tmp_path / f"resumed/checkpoint/step-{STEPS:08d}")
    names = [str(number) for number in range(len(MODES))]
    own = [*GUIDED, steps]
    jobs = [job(tmp_path / name, *own, *mode) for name, mode in zip(names, MODES, strict=True)]
    jobs.append(job(tmp_path / "resumed", *GUIDED, *KEPT, steps, "--training.batch_size=2"))
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], 2)
    assert result.returncode == 0, result.stderr
    for name in names:
        assert_close(tmp_path / name, tmp_path / "alone")
    assert "resumed at step 2" in result.stdout
    assert_close(tmp_path / "resumed", tmp_path / "alone")


def test_a_killed_run_resumes_to_the_bit(zoo: Zoo, tmp_path: Path, train: Train) -> None:
    run, whole = tmp_path / "run", zoo("one step")
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoint/step-00000006")
    assert "resumed at step 3" in train("run", *zoo_of_runs.KEPT, *zoo_of_runs.JOBS["one step"]).out
    assert curve(run) == curve(whole)
    assert_same_state(run, whole, step=6)


def test_the_weights_go_everywhere(tmp_path: Path, train: Train, run_script: RunScript) -> None:
    train("run", *GUIDED, *KEPT, "--training.steps=4", "--validation.freq=4", "--validation.num_images=9")
    assert read_metrics(tmp_path / "run")[-1]["validation_loss"] > 0
    stored = read_config(tmp_path / "run")["config"]
    assert stored["sampling"]["num_steps"] == stored["model"]["timestep_scale"] == 1
    outcome = run_script("torchditan", "generate", "run", "--classes=1,2", "--sampling.guidance_scale=3")
    assert outcome.code == 0, outcome.err
    model = torchditan.load("run", weights="raw")
    one, two, strong = (
        model.sample(classes=[1, 2], seed=3, **options) for options in ({}, {"num_steps": 2}, {"guidance_scale": 6.0})
    )
    assert not torch.equal(one, two) and not torch.equal(one, strong)
    evaluated = run_script("torchditan", "evaluate", "run", "--metrics=classifier", "--num_samples=20", "--epochs=1")
    assert evaluated.code == 0, evaluated.err
    assert run_script("torchditan", "export", "run", "w.safetensors").code == 0
    assert run_script("torchditan", "import", "w.safetensors", "imported").code == 0
    assert torch.equal(*(torchditan.load(name).sample(classes=[1, 2], seed=3) for name in ("imported", "run")))
    outcome = run_script("torchditan", "generate", "run", "--sampling.sampler=heun")
    assert outcome.code == 2
    assert_refused(outcome.err, 'sampling.sampler = "heun"', ["imf", "euler"])


def test_it_starts_from_flow_matching_and_refuses_another_time_scale(
    zoo: Zoo, tmp_path: Path, train: Train, run_script: RunScript
) -> None:
    train("scale 1", *KEEP, "--training.steps=2", "--model.timestep_scale=1")
    usual = zoo("digits")
    start = [*KEEP, "--training.steps=1", "--optimizer.lr=0", "--checkpoint.initial_load_path"]
    out = train("started", *GUIDED, *start, "scale 1").out
    assert "new scalar_embedders.guidance, " in out and "scalar_embedders.interval" in out
    old, new = torchditan.load("scale 1").model, torchditan.load("started").model
    x_t, t, cond = torch.randn(4, 1, 8, 8), torch.rand(4), {"class_label": torch.tensor([0, 3, 9, 10])}
    zero = torch.zeros(4)
    scalars = {"interval": zero, "guidance": zero, "guidance_start": zero, "guidance_end": zero + 1}
    assert torch.equal(new(x_t, t, {**cond, **scalars}), old(x_t, t, cond))
    started = torchditan.load("started")
    for parameter in started.model.parameters():
        parameter.add_(0.1)  # as if it had trained
    started.restore_original()
    assert torch.equal(started.model(x_t, t, {**cond, **scalars}), old(x_t, t, cond)), "what --original draws"

    flags = job(tmp_path / "refused", *GUIDED, *start, str(usual))
    outcome = run_script("train.py", *flags)
    assert outcome.code == 2
    mentions = ["model.timestep_scale", "1000", "refit_time"]
    assert_refused(outcome.err, f'checkpoint.initial_load_path = "{usual}"', mentions)
    outcome = run_script("torchditan", "refit_time", usual, "w.safetensors")
    assert outcome.code == 0, outcome.err
    assert "refitted from scale 1000 to 1, relative error" in outcome.out
    before, after = map(float, re.findall(r"[0-9.]+(?= before)|[0-9.]+(?= after)", outcome.out))
    assert after == pytest.approx(before, rel=0.01)
    assert "started from the weights of w.safetensors" in train("refitted", *GUIDED, *start, "w.safetensors").out
