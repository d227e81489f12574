# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Whole runs with token dropping: one curve, resume across the switch to all tokens, FLOPs, validation, export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchditan
from torchditan.models import token_dropping
from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunDistributed, RunScript

    Train = Callable[..., Outcome]

SMALL = [
    "--model.flavor=debugmodel",
    "--model.patch_size=1",
    "--model.token_dropping=0.75",
    "--model.token_dropping_blocks=1",
    "--training.dense_ratio=0.5",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=16",
    "--validation.freq=0",
    "--metrics.log_freq=1",
    "--metrics.enable_sampling=false",
    "--checkpoint.enable_checkpoint",
]
REPLICATE = "--training.data_parallel_replicate_degree"


def job(run: Path, *flags: str) -> list[str]:
    return [*SMALL, *flags, f"--job.dump_folder={run.parent}", f"--metrics.experiment_name={run.name}"]


@pytest.fixture
def train(run_script: RunScript, tmp_path: Path) -> Train:
    return lambda name, *flags: run_script("train.py", *job(tmp_path / name, *flags))


def curve(run: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(run)]


@pytest.fixture
def middle_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens that leave the middle blocks, of each forward pass in this process."""
    seen: list[int] = []
    forward = token_dropping.SparseDenseFusion.forward

    def recorded(self: Any, dense: torch.Tensor, sparse: torch.Tensor, places: Any) -> torch.Tensor:
        if sparse.device.type != "meta":
            seen.append(sparse.shape[1])
        return forward(self, dense, sparse, places)

    monkeypatch.setattr(token_dropping.SparseDenseFusion, "forward", recorded)
    return seen


def test_training_drops_tokens_until_the_dense_steps_and_validation_and_sampling_drop_none(
    tmp_path: Path, train: Train, middle_tokens: list[int]
) -> None:
    flags = ["--training.steps=4", "--validation.freq=1", "--validation.num_images=4", "--validation.by_timestep=false"]
    sampling = ["--metrics.enable_sampling", "--metrics.sample_freq=1", "--sampling.num_steps=1"]
    outcome = train("run", *flags, *sampling, "--sampling.max_classes=1", "--sampling.images_per_class=1")
    assert outcome.code == 0, outcome.err
    a_step = [64, 64]  # validation and a sample follow each step
    assert middle_tokens == [16, *a_step, 16, *a_step, 64, *a_step, 64, *a_step]
    (warning,) = [line for line in outcome.out.splitlines() if "model.token_dropping" in line]
    assert warning.startswith("warning: ") and "64 tokens" in warning
    records = read_metrics(tmp_path / "run")
    flops = [1e12 * record["tflops_per_device"] / record["images_per_second"] for record in records]
    assert flops[0] == pytest.approx(flops[1]) and flops[2] == pytest.approx(flops[3])
    assert flops[0] < 0.8 * flops[2]


def test_flops_of_a_window_across_the_switch_are_the_mean_of_its_steps(tmp_path: Path, train: Train) -> None:
    assert train("run", "--training.steps=8", "--metrics.log_freq=3").code == 0  # logs 1, 3, 6 and 8; drops until 4
    flops = {
        record["step"]: 1e12 * record["tflops_per_device"] / record["images_per_second"]
        for record in read_metrics(tmp_path / "run")
    }
    assert list(flops) == [1, 3, 6, 8] and flops[3] == pytest.approx(flops[1])
    assert flops[3] < 0.8 * flops[8]
    assert flops[6] == pytest.approx((flops[3] + 2 * flops[8]) / 3)


def load(run: Path, weights: str, step: int | None = None) -> dict[str, torch.Tensor]:
    from torchditan.weights.trained_model import TrainedModel

    return TrainedModel.load(run, step=step, weights=weights, device=torch.device("cpu")).model.state_dict()


@pytest.mark.parametrize("killed_at", [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 4))])
def test_a_killed_run_resumes_to_the_bit_before_at_and_after_the_switch(
    killed_at: int, tmp_path: Path, train: Train
) -> None:
    flags = ["--training.steps=6", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0", "--training.batch_size=8"]
    assert train("run", *flags).code == 0
    run, whole = tmp_path / "run", {weights: load(tmp_path / "run", weights) for weights in ("ema", "raw")}
    expected = curve(run)
    for step in range(killed_at + 1, 7):  # as if killed: later checkpoints are gone, later metrics are not
        (run / "checkpoint" / f"step-{step:08d}").rename(tmp_path / str(step))
    outcome = train("run", *flags)
    assert f"resumed at step {killed_at}" in outcome.out, outcome.err
    assert curve(run) == expected
    for weights, tensors in whole.items():
        found = load(run, weights)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()), weights


def test_other_steps_are_refused_where_they_move_the_switch_into_the_past(tmp_path: Path, train: Train) -> None:
    assert train("run", "--training.steps=4", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0").code == 0
    before = curve(tmp_path / "run")
    refused = train("run", "--training.steps=8")
    assert refused.code == 2 and refused.err.startswith("error: training.steps = 8: "), refused.err
    assert all(text in refused.err for text in ("token dropping ends after step 2", "after 4", "at 4"))
    for step in (3, 4):
        (tmp_path / "run" / "checkpoint" / f"step-{step:08d}").rename(tmp_path / str(step))
    assert train("run", "--training.steps=8").code == 0  # the two steps that are done dropped tokens
    assert curve(tmp_path / "run")[:2] == before[:2]
    refused = train("run", "--training.steps=8", "--training.dense_ratio=0.25")
    assert refused.code == 2 and "training.dense_ratio is 0.5 there and 0.25 here" in refused.err


def test_the_whole_path_export_import_generate_continue(tmp_path: Path, train: Train, run_script: RunScript) -> None:
    assert train("run", "--training.steps=2").code == 0
    run = tmp_path / "run"
    expected = load(run, "ema")
    assert "fusion.mask_token" in expected
    assert run_script("scripts/convert_checkpoint.py", "export", "run", "w.safetensors").code == 0
    assert run_script("scripts/convert_checkpoint.py", "import", "w.safetensors", "imported").code == 0
    options = read_config(tmp_path / "imported")["config"]["model"]
    assert (options["token_dropping"], options["token_dropping_blocks"]) == (0.75, 1)
    found = load(tmp_path / "imported", "ema")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    samples = [torchditan.load(name).sample(classes=4, seed=3) for name in ("run", "imported")]
    assert torch.equal(*samples)
    assert run_script("scripts/generate.py", "run", "--sampling.num_steps=2").code == 0
    outcome = train("continued", "--training.steps=1", "--checkpoint.initial_load_path=w.safetensors")
    assert outcome.code == 0, outcome.err
    plain = ["--model.token_dropping=0", "--model.token_dropping_blocks=2", "--training.dense_ratio=0.1"]
    outcome = train("plain", *plain, "--training.steps=1", "--checkpoint.initial_load_path=w.safetensors")
    assert outcome.code == 2 and "fusion" in outcome.err + outcome.out, outcome.err
    outcome = run_script("scripts/convert_checkpoint.py", "export", "run", "pipeline", "--format=diffusers")
    assert outcome.code == 2 and "token_dropping" in outcome.err, outcome.err


MODES = {
    2: [[f"{REPLICATE}=1"], [f"{REPLICATE}=2", "--training.batch_size=4", "--activation_checkpoint.mode=full"]],
    4: [[f"{REPLICATE}=1"], [f"{REPLICATE}=2"], [f"{REPLICATE}=4", "--training.batch_size=2"]],
}


@pytest.mark.slow
@pytest.mark.parametrize("conditioning", ["adaln", "in_context"])
@pytest.mark.parametrize("world_size", MODES)
def test_one_curve_on_any_number_of_ranks(
    world_size: int, conditioning: str, tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    # In-context blocks have no gates. At 1e-2 they magnify rounding, with dropped tokens or without.
    lr = "1e-2" if conditioning == "adaln" else "1e-3"
    flags = ["--training.steps=10", f"--optimizer.lr={lr}", f"--model.conditioning={conditioning}"]
    assert train("alone", *flags, "--training.batch_size=16").code == 0
    compiled = ["--training.compile", "--compile.backend=aot_eager"]
    modes = [*MODES[world_size], compiled]
    runs = [tmp_path / str(number) for number in range(len(modes))]
    jobs = [job(run, *flags, *mode) for run, mode in zip(runs, modes, strict=True)]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size)
    assert result.returncode == 0, result.stderr
    expected = curve(tmp_path / "alone")
    for run, mode in zip(runs, modes, strict=True):
        pairs = zip(curve(run), expected, strict=True)
        difference = max(abs(a - b) / abs(b) for left, right in pairs for a, b in zip(left, right, strict=True))
        print(f"{conditioning}, {world_size} {mode}: largest relative difference {difference:.1e}")  # pytest -s
        assert difference < 1e-5, mode
