# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Whole runs with self-alignment: one curve on any number of ranks, resume, and the way of its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import torchditan
from torchditan.checkpoint.loading import read_state
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunDistributed, RunScript

TINY = [
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=8",
    "--optimizer.lr=1e-2",
    "--ema.decay=0.9",
    "--lr_scheduler.warmup_steps=0",
    "--metrics.log_freq=1",
    "--metrics.enable_sampling=false",
    "--validation.freq=0",
]
ALIGNED = "--diffusion.ingredients=self_alignment"
KEEP = ["--checkpoint.enable_checkpoint", "--checkpoint.interval=2"]
NOTHING_KEPT = "--checkpoint.save_final=false"
FULL = "--activation_checkpoint.mode=full"
REPLICATE = "--training.data_parallel_replicate_degree"
MODES = {
    2: [[f"{REPLICATE}=2", "--training.batch_size=2"], [f"{REPLICATE}=1", "--training.batch_size=4", FULL]],
    4: [[f"{REPLICATE}=2", FULL], [f"{REPLICATE}=4"], [f"{REPLICATE}=1", "--training.batch_size=1"]],
}
STEPS = 4

Train = Callable[..., "Outcome"]


@pytest.fixture
def train(run_script: RunScript, tmp_path: Path) -> Train:
    """`train("run", "--training.steps=9")`: a run of the tiny model in `tmp_path`, in this process."""

    def run(name: str, *flags: str) -> Outcome:
        outcome = run_script("train.py", *job(tmp_path / name, *flags))
        assert outcome.code == 0, outcome.err
        return outcome

    return run


def job(run: Path, *flags: str) -> list[str]:
    return [*TINY, *flags, f"--job.dump_folder={run.parent}", f"--metrics.experiment_name={run.name}"]


def curve(run: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(run)]


def assert_close(run: Path, reference: Path) -> None:
    found, expected = (torch.tensor(curve(path)) for path in (run, reference))
    assert found.shape == expected.shape
    difference = float(((found - expected).abs() / expected).max())
    print(f"{run.name}: largest relative difference {difference:.1e}")  # shown by pytest -s
    assert difference < 1e-5, run.name


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_curve_on_any_number_of_ranks_and_resumed_on_another(
    world_size: int, tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    flags = [ALIGNED, *KEEP]
    steps = f"--training.steps={STEPS}"
    train("alone", *flags, steps, "--training.batch_size=8")
    shutil.copytree(tmp_path / "alone", tmp_path / "resumed")
    shutil.rmtree(tmp_path / f"resumed/checkpoint/step-{STEPS:08d}")
    names = [str(number) for number in range(len(MODES[world_size]))]
    own = [ALIGNED, NOTHING_KEPT, steps]
    jobs = [job(tmp_path / name, *own, *mode) for name, mode in zip(names, MODES[world_size], strict=True)]
    jobs.append(job(tmp_path / "resumed", *flags, steps, "--training.batch_size=2"))
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size)
    assert result.returncode == 0, result.stderr
    for name in names:
        assert_close(tmp_path / name, tmp_path / "alone")
    assert "resumed at step 2" in result.stdout
    assert_close(tmp_path / "resumed", tmp_path / "alone")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_run_resumes_to_the_bit(compiled: bool, tmp_path: Path, train: Train) -> None:
    flags = [ALIGNED, *KEEP, FULL]
    flags += ["--training.compile", "--compile.backend=aot_eager"] if compiled else []
    train("whole", *flags, f"--training.steps={STEPS}")
    train("parts", *flags, "--training.steps=3")
    shutil.rmtree(tmp_path / "parts/checkpoint/step-00000003")
    assert "resumed at step 2" in train("parts", *flags, f"--training.steps={STEPS}").out
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert curve(parts) == curve(whole)
    expected, found = (read_state(run / f"checkpoint/step-{STEPS:08d}") for run in (whole, parts))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    first = read_state(whole / "checkpoint/step-00000002")
    for name in ("model.heads.alignment.0.weight", "ema.heads.alignment.4.weight"):
        assert not torch.equal(first[name], expected[name]), name


def test_runs_that_align_and_others_compare_in_validation_and_flops(tmp_path: Path, train: Train) -> None:
    flags = ["--training.steps=1", "--validation.freq=1", "--validation.num_images=8", "--optimizer.lr=0"]
    train("aligned", ALIGNED, *flags)
    train("plain", *flags)
    ((aligned,), (plain,)) = (read_metrics(tmp_path / name) for name in ("aligned", "plain"))
    assert aligned["loss"] == plain["loss"] and aligned["alignment_loss"] > 0.1
    per_image = [record["tflops_per_device"] / record["images_per_second"] for record in (aligned, plain)]
    assert per_image[0] > 1.3 * per_image[1]  # a third of forward and backward, and the head
    validated = [key for key in plain if key.startswith("validation_loss")]
    assert len(validated) > 1 and {key: aligned[key] for key in validated} == {key: plain[key] for key in validated}


def test_it_trains_together_with_the_other_ingredients(tmp_path: Path, train: Train) -> None:
    """Contrastive flow matching needs pairs, and FLOPs are counted with one sample, without its term."""
    flags = ["--training.steps=2", NOTHING_KEPT, "--diffusion.prediction=x", "--diffusion.loss_weighting=min_snr"]
    flags += ["--model.block=value_residual", "--model.conditioning=adaln_single", "--optimizer.name=Muon"]
    train("aligned", ALIGNED, *flags)
    train("contrasted", "--diffusion.ingredients", "self_alignment", "contrastive", *flags)
    aligned, contrasted = (read_metrics(tmp_path / name) for name in ("aligned", "contrasted"))
    assert contrasted[0]["loss"] == aligned[0]["loss"] and contrasted[1]["loss"] != aligned[1]["loss"]
    per_image = [run[0]["tflops_per_device"] / run[0]["images_per_second"] for run in (aligned, contrasted)]
    assert per_image[0] == pytest.approx(per_image[1])


def test_the_weights_go_everywhere_without_the_head(tmp_path: Path, train: Train, run_script: RunScript) -> None:
    averages = ["--ema.post_hoc_widths=0.05,0.1", "--ema.post_hoc_interval=1"]
    train("aligned", ALIGNED, "--training.steps=2", "--checkpoint.enable_checkpoint", *averages)
    train("plain", "--training.steps=1", "--checkpoint.enable_checkpoint")
    assert run_script("scripts/generate.py", "aligned", "--classes=1", "--sampling.num_steps=2").code == 0
    assert run_script("scripts/convert_checkpoint.py", "export", "aligned", "w.safetensors").code == 0
    assert run_script("scripts/convert_checkpoint.py", "import", "w.safetensors", "imported").code == 0
    outcome = run_script("scripts/reconstruct_ema.py", "aligned", "--width=0.075")
    assert outcome.code == 0, outcome.err
    stored = read_state(tmp_path / "aligned/checkpoint/step-00000002", "ema.")
    model = torchditan.load("imported").model
    expected = {name: value for name, value in stored.items() if not name.startswith("ema.heads.")}
    assert {f"ema.{name}" for name in model.state_dict()} == expected.keys() != stored.keys()
    assert all(torch.equal(model.state_dict()[name.removeprefix("ema.")], value) for name, value in expected.items())

    start = ["--training.steps=1", NOTHING_KEPT, "--checkpoint.initial_load_path"]
    for name, source, flags in [
        ("plain from aligned", "aligned", []),
        ("plain from a file", "w.safetensors", []),
        ("aligned from plain", "plain", [ALIGNED]),
        ("aligned from aligned", "imported", [ALIGNED]),
        ("aligned from a file", "w.safetensors", [ALIGNED]),
    ]:
        out = train(name, *flags, *start, source).out
        assert f"started from the weights of {source}, " in out
        assert ("; new heads.alignment\n" in out) == bool(flags), out
