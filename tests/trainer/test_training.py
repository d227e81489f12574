# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Whole runs through train.py: one loss curve in every mode, resume, precisions, the non-finite stop, samples.

Run as a script under torchrun (`main`), this file runs several jobs of train.py in sequence on the same ranks, because
starting ranks takes longer than twenty steps.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from minimal_parts import ALIGNED, PAIRED
from refusals import assert_refused
from tiny_runs import KEEP, assert_same_state, job
from zoo import DRAWN, KEPT, VALIDATED

import torchditan
from torchditan.run.reading import read_config, read_metrics, read_status
from torchditan.sampling.validation import BIN_KEYS

if TYPE_CHECKING:
    from zoo import Zoo

    from tests.conftest import RunAlone, RunDistributed, RunScript, Train

DIGITS = [*KEPT, *DRAWN, *VALIDATED]
"""The flags of the run "digits" of zoo.py, the curve that every other mode has to follow."""
FIGURES = ("validation_loss", *BIN_KEYS)
GRID = "samples/step_00000006.png"


def curve(run: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(run)]


def largest_difference(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    assert len(left) == len(right) > 0
    pairs = [(a, b) for row_a, row_b in zip(left, right, strict=True) for a, b in zip(row_a, row_b, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def load(run: Path, weights: str, step: int | None = 6) -> dict[str, torch.Tensor]:
    from torchditan.extras.weights.trained_model import TrainedModel

    return TrainedModel.open(run, step=step, weights=weights, device=torch.device("cpu")).model.state_dict()


def copy_without_step_6(run: Path, copy: Path) -> None:
    """As if killed after step 6: its checkpoint is gone, its metrics are not."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoint/step-00000006")


OFFICIAL = [  # the DiT paper's recipe, with a grid of ancestral samples
    *("--model.preset=official", "--diffusion.objective=ddpm", "--metrics.enable_sampling=true"),
    *("--sampling.sampler=ancestral", "--sampling.spacing=linspace", "--sampling.num_steps=4"),
    *("--sampling.images_per_class=3", "--sampling.max_classes=3"),
]


@pytest.fixture(scope="module")
def official(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As digits, with DDPM and a learned variance."""
    run = tmp_path_factory.mktemp("official") / "run"
    run_alone("train.py", *job(run, *OFFICIAL, *VALIDATED, *KEPT), cwd=run.parent)
    return run


PAIRS = ["--diffusion.ingredients", PAIRED, ALIGNED]


@pytest.fixture(scope="module")
def paired(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As digits, with a loss of pairs and an added term with a head, whose curve is another one."""
    run = tmp_path_factory.mktemp("paired") / "run"
    run_alone("train.py", *job(run, *PAIRS, *VALIDATED), cwd=run.parent)
    return run


NONE, FULL = "--activation_checkpoint.mode=none", "--activation_checkpoint.mode=full"
NTH = "--activation_checkpoint.mode=selective"
OP = "--activation_checkpoint.selective_ac_option=op"
REPLICATE = "--training.data_parallel_replicate_degree"
PAIR = [  # DDP and FSDP; the plain FSDP run is that of zoo.py
    [f"{REPLICATE}=2", "--training.batch_size=2", NTH],
    [f"{REPLICATE}=1", "--training.batch_size=2", FULL, *OFFICIAL, "--metrics.sample_batch_size=2"],
    [f"{REPLICATE}=1", "--training.batch_size=2", NTH, OP, *PAIRS],
]
HSDP = [[f"{REPLICATE}=2", "--training.batch_size=2", NTH, *OFFICIAL]]
MORE = [
    [f"{REPLICATE}=4", "--training.batch_size=2", FULL],
    [f"{REPLICATE}=1", "--training.batch_size=1", NTH, OP],
    [f"{REPLICATE}=2", "--training.batch_size=2", NONE],
    [f"{REPLICATE}=2", "--training.batch_size=2", NONE, *PAIRS],
]


def main(jobs: list[list[str]]) -> None:
    from torchditan.commands import train
    from torchditan.supervision.exit_status import run_job

    for flags in jobs:
        sys.argv[1:] = flags
        if code := run_job(train.main):
            sys.exit(code)


@pytest.mark.parametrize(
    ("world_size", "modes"),
    [(2, PAIR), (4, HSDP), pytest.param(4, MORE, marks=pytest.mark.nightly)],
    ids=["2", "4, HSDP", "4, more"],
)
def test_one_curve_in_every_mode(
    world_size: int,
    modes: list[list[str]],
    zoo: Zoo,
    official: Path,
    paired: Path,
    tmp_path: Path,
    run_distributed: RunDistributed,
) -> None:
    runs = [tmp_path / str(number) for number in range(len(modes))]
    jobs = [job(run, "--checkpoint.save_final", *VALIDATED, *flags) for run, flags in zip(runs, modes, strict=True)]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size)
    assert result.returncode == 0, result.stderr
    assert largest_difference(curve(paired), curve(zoo("digits"))) > 1e-3, "the loss of pairs is another one"
    for run, flags in [*zip(runs, modes, strict=True), *([(zoo("fsdp"), ["fsdp"])] if modes is PAIR else [])]:
        reference = official if OFFICIAL[0] in flags else paired if PAIRED in flags else zoo("digits")
        difference = largest_difference(curve(run), curve(reference))
        print(f"{world_size} {flags}: largest relative difference {difference:.1e}")  # shown by pytest -s
        assert difference < 1e-5, flags
        validated = {key: read_metrics(run)[-1][key] for key in FIGURES}
        assert validated == pytest.approx({key: read_metrics(reference)[-1][key] for key in FIGURES}, rel=1e-5)
        if reference is not paired:
            weights, expected = load(run, "ema"), load(reference, "ema")
            assert all(torch.allclose(weights[name], expected[name], atol=1e-4) for name in expected)
        if reference is official:
            assert_same_grid(run / GRID, official / GRID)


def assert_same_grid(first: Path, second: Path) -> None:
    from PIL import Image, ImageChops

    one, two = (Image.open(path).convert("L") for path in (first, second))
    width, height = one.size
    below_the_title = (0, height // 4, width, height)
    difference = ImageChops.difference(one.crop(below_the_title), two.crop(below_the_title))
    assert difference.getextrema()[1] <= 1


def test_the_official_recipe_resumes_samples_and_exports(
    official: Path, tmp_path: Path, train: Train, run_script: RunScript
) -> None:
    copy_without_step_6(official, tmp_path / "run")
    assert "resumed at step 3" in train("run", *OFFICIAL, *VALIDATED, *KEPT).out
    assert curve(tmp_path / "run") == curve(official)
    assert_same_grid(tmp_path / "run" / GRID, official / GRID)

    sample = torchditan.load("run").sample
    both = sample(classes=[0, 4], samples_per_class=2, seed=3)
    alone = sample(classes=4, samples_per_class=2, seed=3, batch_size=1)
    assert (both[2:].int() - alone.int()).abs().max() <= 1  # the last bits of float32 may round differently
    assert not torch.equal(alone, sample(classes=4, samples_per_class=2, seed=3, spacing="leading"))
    euler, ddim, ancestral = (sample(classes=4, sampler=sampler) for sampler in ("euler", "ddim", "ancestral"))
    assert torch.equal(euler, ddim) and not torch.equal(ddim, ancestral)
    outcome = run_script("torchditan", "generate", "run", "--classes=1", "--sampling.guidance_channels=1")
    assert outcome.code == 0, outcome.err

    assert run_script("torchditan", "export", "run", "weights.safetensors").code == 0
    assert run_script("torchditan", "import", "weights.safetensors", "imported").code == 0
    assert torch.equal(torchditan.load("imported").sample(classes=4, seed=3), sample(classes=4, seed=3))
    flags = ["--training.steps=1", "--model.preset=official", "--diffusion.objective=ddpm", "--diffusion.prediction=v"]
    started = train("v", *flags, "--checkpoint.initial_load_path=weights.safetensors")
    assert "diffusion.prediction is None there and v here" in started.out, started.out + started.err


BLOCK_MODES = [
    [f"{REPLICATE}=2", FULL],
    [f"{REPLICATE}=1", "--training.batch_size=4", NTH, OP],
    [f"{REPLICATE}=1", FULL, "--training.compile", "--compile.backend=aot_eager"],
]


@pytest.mark.slow
def test_one_curve_with_a_modulation_that_all_blocks_share(
    tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    flags = ["--model.conditioning=adaln_single", "--optimizer.lr=3e-3", "--training.steps=10"]
    flags += ["--training.global_batch_size=16"]
    train("alone", *flags)
    runs = [tmp_path / str(number) for number in range(len(BLOCK_MODES))]
    jobs = [job(run, *flags, *mode) for run, mode in zip(runs, BLOCK_MODES, strict=True)]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], 2)
    assert result.returncode == 0, result.stderr
    for run, mode in zip(runs, BLOCK_MODES, strict=True):
        difference = largest_difference(curve(run), curve(tmp_path / "alone"))
        print(f"{mode}: largest relative difference {difference:.1e}")  # shown by pytest -s
        assert difference < 1e-5, mode


def test_rerunning_the_command_continues_bitwise_and_then_changes_nothing(
    zoo: Zoo, tmp_path: Path, train: Train
) -> None:
    run = tmp_path / "run"
    copy_without_step_6(zoo("digits"), run)
    assert "resumed at step 3" in train("run", *DIGITS).out
    assert [record["step"] for record in read_metrics(run)] == list(range(1, 7))
    assert curve(run) == curve(zoo("digits"))
    assert_same_state(run, zoo("digits"), step=6)
    assert read_status(run)["state"] == "completed"
    before = (run / "metrics.jsonl").read_bytes()
    assert "step 6 is already done: nothing is left to train" in train("run", *DIGITS).out
    assert (run / "metrics.jsonl").read_bytes() == before
    train("run", *DRAWN, *VALIDATED, "--checkpoint.save_final", "--training.steps=8")
    names = [path.name for path in (run / "checkpoint").iterdir()]
    assert "step-00000008" in names, "a run that continues from a checkpoint ends with one"


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.deterministic"],
        ["--training.enable_cpu_offload"],
        ["--training.batch_size=2", NTH, "--validation.freq=2", "--metrics.sample_freq=3"],
    ],
    ids=["deterministic", "offload", "other tasks"],
)
def test_what_does_not_change_the_numbers(
    flags: list[str], zoo: Zoo, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation, checkpointing of activations, sampling and validation leave no trace in the curve either."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    train("run", *DRAWN, *VALIDATED, *flags)
    assert largest_difference(curve(tmp_path / "run"), curve(zoo("digits"))) < 1e-5
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == ("--training.deterministic" in flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.mixed_precision_param=bfloat16"],
        ["--float8.enable_float8_linear", "--float8.emulate"],
        pytest.param(
            ["--float8.enable_float8_linear", "--float8.emulate", "--float8.recipe_name=rowwise"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_precision_changes_the_numbers_a_little(flags: list[str], zoo: Zoo, tmp_path: Path, train: Train) -> None:
    if "--float8.enable_float8_linear" in flags:
        pytest.importorskip("torchao")
    train("run", *flags)
    assert 1e-6 < largest_difference(curve(tmp_path / "run"), curve(zoo("digits"))) < 0.1


def test_training_samples_from_the_averaged_weights(tmp_path: Path, train: Train, run_script: RunScript) -> None:
    """The grid drawn while training is the one that `torchditan generate` draws from the checkpoint's EMA."""
    from PIL import Image, ImageChops

    flags = ["--metrics.enable_sampling", "--validation.freq=2", "--sampling.num_steps=4", "--optimizer.lr=1e-2"]
    train("run", *flags, *KEEP, "--ema.warmup=false", "--ema.decay=0.9")
    for weights in ("ema", "raw"):
        flags = ["--seed=0", f"--out={weights}.png", f"--weights={weights}"]
        assert run_script("torchditan", "generate", "run", *flags).code == 0
    drawn, averaged, raw = (
        Image.open(tmp_path / name).convert("L").crop((0, 60, 500, 700))
        for name in (f"run/{GRID}", "ema.png", "raw.png")
    )
    assert ImageChops.difference(drawn, averaged).getextrema()[1] <= 1
    assert ImageChops.difference(drawn, raw).getextrema()[1] > 10


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_without_checkpoints_the_final_weights_are_kept_and_usable(
    weights: str, zoo: Zoo, tmp_path: Path, train: Train, run_script: RunScript
) -> None:
    run, ema = tmp_path / "run", f"--ema.enable={str(weights == 'ema').lower()}"
    flags = [*DRAWN, *VALIDATED, "--checkpoint.save_final=true", ema]
    *_, where, how = train("run", *flags).out.splitlines()
    kept = run / "checkpoint" / "step-00000006.safetensors"
    assert list((run / "checkpoint").iterdir()) == [kept]
    assert where.endswith(str(kept)) and how.endswith(f"torchditan generate {run} --seed 1")
    expected, found = load(zoo("digits"), weights), load(run, weights)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept.stat().st_size < 1.1 * sum(4 * tensor.numel() for tensor in expected.values())
    assert run_script("torchditan", "generate", run, "--sampling.num_steps=1", "--classes=1").code == 0
    assert run_script("torchditan", "export", run, "weights.safetensors").code == 0
    assert (tmp_path / "weights.safetensors").read_bytes() == kept.read_bytes()
    other = "raw" if weights == "ema" else "ema"
    refused = run_script("torchditan", "generate", run, f"--weights={other}")
    assert_refused(refused.err, "--weights", [other, f"must be {weights}"])
    begun = train("other", "--training.steps=1", ema, f"--checkpoint.initial_load_path={kept}")
    assert f"started from the weights of {kept}, step 6 ({weights})" in begun.out


def test_a_finished_run_never_starts_again_over_its_final_weights(
    tmp_path: Path, train: Train, run_script: RunScript
) -> None:
    run, steps = tmp_path / "run", "--training.steps=2"
    train("run", steps, "--checkpoint.save_final=true")
    before = {path: path.read_bytes() for path in [run / "metrics.jsonl", *(run / "checkpoint").rglob("*.*")]}
    for flags in (["--checkpoint.save_final=true"], KEEP, []):
        again = train("run", steps, *flags).out
        assert "step 2 is already done: nothing is left to train" in again
        assert f"torchditan generate {run}" in again.splitlines()[-1]
    for other in (1, 5):
        outcome = run_script("train.py", *job(run, f"--training.steps={other}", *KEEP))
        assert_refused(outcome.err, f"training.steps = {other}", [str(run), "--checkpoint.initial_load_path"])
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_run_directory_holds_what_it_promises(tmp_path: Path, train: Train) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = ["--training.steps=3", "--metrics.enable_tensorboard", *DRAWN, *VALIDATED, "--validation.freq=2"]
    out = train("run", *flags).out
    run = tmp_path / "run"
    assert not (run / "checkpoint").exists()
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["step_00000002.png", "step_00000003.png"]
    assert f"generated and real: {run}/samples/step_00000003.png" in out
    records = read_metrics(run)
    assert [record["images_seen"] for record in records] == [8, 16, 24]
    assert [record.keys() >= {*FIGURES} for record in records] == [False, True, True]
    logged = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    for key in FIGURES:
        scalars = [(event.step, event.value) for event in logged.Scalars(key)]
        assert scalars == [(record["step"], pytest.approx(record[key])) for record in records[1:]]
    assert all(record["mfu"] is None and record["images_per_second"] > 0 for record in records)
    stored = read_config(run)["config"]
    assert stored["model"]["input_channels"] == 1
    assert (stored["dataset"]["image_size"], stored["dataset"]["num_classes"]) == ([8, 8], 10)


@pytest.mark.nightly
def test_compiled_blocks_follow_the_curve_in_every_checkpointing_mode(
    zoo: Zoo, official: Path, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    of_one_rank = {"all": [NONE], "op": [NTH, OP], "official": [NONE, *OFFICIAL]}
    for world_size, modes in ((1, of_one_rank), (2, {"nth": [NTH]})):
        # The same micro-batch everywhere: the graphs of the first job are in inductor's cache for the others.
        flags = ["--training.compile", "--training.batch_size=4"]
        jobs = [job(tmp_path / name, *flags, *mode) for name, mode in modes.items()]
        result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size, timeout=400)
        assert result.returncode == 0, result.stderr
        for name in modes:
            reference = official if name == "official" else zoo("digits")
            assert largest_difference(curve(tmp_path / name), curve(reference)) < 1e-5, name


POISONED = """
import sys
from torchditan.commands import train
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.optim.divergence import DivergenceError, DivergenceGuard
from torchditan.optim.ema import local_tensor
from torchditan.supervision.exit_status import run_job

error, step = FlowMatching.error, DivergenceGuard.step

def poisoned(self, prediction, inputs, batch, randomness):
    found = error(self, prediction, inputs, batch, randomness)
    return found * (float("nan") if 23 in batch["index"] else 1)  # one sample of step 3, on one rank

def checked(self, *arguments):
    weights = [local_tensor(p.detach()) for group in self.optimizer.param_groups for p in group["params"]]
    before = [weight.clone() for weight in weights]
    try:
        step(self, *arguments)
    except DivergenceError:
        print("weights untouched" if all((a == b).all() for a, b in zip(weights, before)) else "WEIGHTS CHANGED")
        raise

FlowMatching.error, DivergenceGuard.step = poisoned, checked
sys.exit(run_job(train.main))
"""


def test_a_nan_on_one_rank_reaches_no_weight_and_stops_the_run_by_step(
    tmp_path: Path, run_distributed: RunDistributed
) -> None:
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED)
    result = run_distributed([script, *job(tmp_path / "run", f"{REPLICATE}=1")], 2)
    assert result.returncode == 1
    assert "WEIGHTS CHANGED" not in result.stdout
    assert "weights untouched" in result.stdout, result.stdout + result.stderr
    status = read_status(tmp_path / "run")
    assert status["state"] == "error"
    assert "step 3: the gradient is not finite" in status["reason"]
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
