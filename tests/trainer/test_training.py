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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from minimal_parts import ALIGNED, PAIRED
from refusals import assert_refused

import torchditan
from torchditan.run.reading import read_config, read_metrics, read_status
from torchditan.sampling.validation import BIN_KEYS

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunAlone, RunDistributed, RunScript

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = [
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=16",
    "--optimizer.lr=1e-3",
    "--metrics.log_freq=1",
    "--metrics.enable_sampling=false",
]


Train = Callable[..., "Outcome"]


@pytest.fixture
def train(run_script: RunScript, tmp_path: Path) -> Train:
    """`train("run", "--training.steps=9")`: a run of the tiny model in `tmp_path`, in this process."""

    def run(name: str, *flags: str) -> Outcome:
        return run_script("train.py", *job(tmp_path / name, *flags))

    return run


def job(run: Path, *flags: str) -> list[str]:
    return [*TINY, *flags, f"--job.dump_folder={run.parent}", f"--metrics.experiment_name={run.name}"]


def test_the_first_lines_say_how_a_global_batch_is_accumulated(train: Train) -> None:
    outcome = train("run", "--training.steps=1", "--training.batch_size=4", "--checkpoint.enable_checkpoint")
    assert "batch_size 4 x 4 micro-batches x 1 rank = global batch 16\n" in outcome.out, outcome.err
    assert "\n1 steps; Ctrl-C saves and stops\n" in outcome.out
    assert max(map(len, outcome.out.splitlines()[:4])) <= 100
    flags = ["--training.steps=2", "--training.batch_size=6", "--training.global_batch_size=none"]
    outcome = train("run", *flags, "--checkpoint.enable_checkpoint")
    assert "batch_size 4 x 4 micro-batches x 1 rank = global batch 16 (batch_size 6 does not divide" in outcome.out


def test_the_first_lines_name_options_without_effect(train: Train) -> None:
    options = {"training.attention_backend": "cudnn", "training.enable_cpu_offload": "true"}
    options |= {"compile.mode": "max-autotune-no-cudagraphs", "ema.width": "0.05", "ema.decay": "0.5"}
    outcome = train("run", "--training.steps=1", *[f"--{option}={value}" for option, value in options.items()])
    assert outcome.code == 0, outcome.err
    assert "\n1 steps; Ctrl-C stops without saving\n" in outcome.out
    found = {line.split(": ")[0]: line for line in outcome.out.splitlines() if line.startswith("no effect here")}
    expected = {
        "a GPU": 'training.attention_backend = "cudnn", training.enable_cpu_offload = true',
        "training.compile": 'compile.mode = "max-autotune-no-cudagraphs"',
        "ema.width = none": "ema.decay = 0.5",
    }
    assert found == {
        f"no effect here without {need}": f"no effect here without {need}: {expected[need]}" for need in expected
    }


def test_slow_work_of_a_run_is_not_silent(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchditan.run import progress

    monkeypatch.setattr(progress, "QUIET_S", 0.005)
    monkeypatch.setattr(progress, "EVERY_S", 0.005)
    flags = ["--training.steps=1", "--validation.freq=1", "--metrics.enable_sampling", "--sampling.num_steps=4"]
    outcome = train("run", *flags, "--training.compile", "--compile.backend=eager")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    for what in ("compiling in the first step, about a minute", "compiling: ", "validating: ", "drawing 80 samples: "):
        assert any(line.startswith(what) for line in lines), (what, lines)


def curve(run: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(run)]


def largest_difference(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    assert len(left) == len(right) > 0
    pairs = [(a, b) for row_a, row_b in zip(left, right, strict=True) for a, b in zip(row_a, row_b, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


VALIDATION = ["--validation.freq=20", "--validation.num_images=21"]
VALIDATED = ("validation_loss", *BIN_KEYS)


@pytest.fixture(scope="module")
def one_process(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps in one process, the curve that every other mode has to follow. It validates after the last step."""
    run = tmp_path_factory.mktemp("one_process") / "run"
    flags = job(run, "--training.steps=20", "--training.batch_size=16", "--checkpoint.enable_checkpoint", *VALIDATION)
    run_alone("train.py", *flags, cwd=run.parent)
    return run


OFFICIAL = [  # the DiT paper's recipe, with a grid of ancestral samples
    "--model.preset=official",
    "--diffusion.objective=ddpm",
    "--metrics.enable_sampling=true",
    "--sampling.sampler=ancestral",
    "--sampling.spacing=linspace",
    "--sampling.num_steps=4",
    "--sampling.images_per_class=3",
    "--sampling.max_classes=3",
]
GRID = "samples/step_00000020.png"


@pytest.fixture(scope="module")
def official(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps with DDPM and a learned variance."""
    run = tmp_path_factory.mktemp("official") / "run"
    flags = job(run, "--training.steps=20", "--training.batch_size=16", *OFFICIAL, *VALIDATION)
    run_alone("train.py", *flags, cwd=run.parent)
    return run


PAIRS = ["--diffusion.ingredients", PAIRED, ALIGNED]


@pytest.fixture(scope="module")
def paired(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps with a loss of pairs and an added term with a head, whose curve is another one."""
    run = tmp_path_factory.mktemp("paired") / "run"
    flags = job(run, "--training.steps=20", "--training.batch_size=16", *PAIRS, *VALIDATION)
    run_alone("train.py", *flags, cwd=run.parent)
    return run


NONE, FULL = "--activation_checkpoint.mode=none", "--activation_checkpoint.mode=full"
NTH = "--activation_checkpoint.mode=selective"
OP = "--activation_checkpoint.selective_ac_option=op"


REPLICATE = "--training.data_parallel_replicate_degree"
ALONE = [[f"{REPLICATE}=1", "--training.batch_size=4", NTH]]
PAIR = [  # DDP and FSDP
    [f"{REPLICATE}=2", "--training.batch_size=8", NONE],
    [f"{REPLICATE}=1", "--training.batch_size=4", FULL],
    [f"{REPLICATE}=2", "--training.batch_size=2", NTH, OP],
    [f"{REPLICATE}=2", "--training.batch_size=8", NONE, *OFFICIAL],
    [f"{REPLICATE}=1", "--training.batch_size=4", FULL, *OFFICIAL, "--metrics.sample_batch_size=2"],
    [f"{REPLICATE}=1", "--training.batch_size=2", FULL, *PAIRS],
]
HSDP = [
    [f"{REPLICATE}=2", "--training.batch_size=2", NTH],
    [f"{REPLICATE}=2", "--training.batch_size=4", NTH, *OFFICIAL],
]
FOUR = [
    [f"{REPLICATE}=4", "--training.batch_size=4", FULL],
    [f"{REPLICATE}=4", "--training.batch_size=1", NONE],
    [f"{REPLICATE}=1", "--training.batch_size=4", NTH, OP],
    [f"{REPLICATE}=1", "--training.batch_size=2", NONE],
    [f"{REPLICATE}=2", "--training.batch_size=4", NONE],
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
    [(1, ALONE), (2, PAIR), (4, HSDP), pytest.param(4, FOUR, marks=pytest.mark.nightly)],
    ids=["1", "2", "4, HSDP", "4, more"],
)
def test_one_curve_in_every_mode(
    world_size: int,
    modes: list[list[str]],
    one_process: Path,
    official: Path,
    paired: Path,
    tmp_path: Path,
    train: Train,
    run_distributed: RunDistributed,
) -> None:
    runs = [tmp_path / str(number) for number in range(len(modes))]
    jobs = [job(run, "--training.steps=20", *VALIDATION, *flags) for run, flags in zip(runs, modes, strict=True)]
    if world_size == 1:
        (flags,) = modes
        assert train(runs[0].name, "--training.steps=20", *VALIDATION, *flags).code == 0
    else:
        result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size)
        assert result.returncode == 0, result.stderr
    assert largest_difference(curve(paired), curve(one_process)) > 1e-3, "the loss of pairs is another one"
    for run, flags in zip(runs, modes, strict=True):
        reference = official if OFFICIAL[0] in flags else paired if PAIRED in flags else one_process
        difference = largest_difference(curve(run), curve(reference))
        print(f"{world_size} {flags}: largest relative difference {difference:.1e}")  # shown by pytest -s
        assert difference < 1e-5, flags
        validated = {key: read_metrics(run)[-1][key] for key in VALIDATED}
        assert validated == pytest.approx({key: read_metrics(reference)[-1][key] for key in VALIDATED}, rel=1e-5)
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
    flags = [*OFFICIAL, *VALIDATION, "--training.batch_size=16"]
    flags += ["--checkpoint.enable_checkpoint", "--checkpoint.interval=10"]
    assert train("run", "--training.steps=13", *flags).code == 0
    shutil.rmtree(tmp_path / "run/checkpoint/step-00000013")
    assert "resumed at step 10" in train("run", "--training.steps=20", *flags).out
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


BLOCKS = {
    # At the rate of 1e-2 it trains less steadily: rounding grows to 2e-5 of the gradient norm, also in one process that
    # accumulates. At 3e-3 it stays below 1e-6.
    "adaLN-single": ["--model.conditioning=adaln_single", "--optimizer.lr=3e-3"],
    # Without gates a rate of 1e-2 is too high: the loss rises, and rounding grows to 2e-5 of the gradient norm.
    "in context": ["--model.conditioning=in_context", "--optimizer.lr=1e-3"],
}
BLOCK_MODES = [
    [f"{REPLICATE}=2", FULL],
    [f"{REPLICATE}=1", "--training.batch_size=4", NTH, OP],
    [f"{REPLICATE}=1", FULL, "--training.compile", "--compile.backend=aot_eager"],
]


@pytest.mark.parametrize(
    "name",
    [pytest.param("adaLN-single", marks=pytest.mark.slow), pytest.param("in context", marks=pytest.mark.nightly)],
)
def test_one_curve_with_other_blocks(name: str, tmp_path: Path, train: Train, run_distributed: RunDistributed) -> None:
    flags = ["--training.steps=10", "--validation.freq=0", "--optimizer.lr=1e-2", *BLOCKS[name]]
    assert train("alone", *flags, "--training.batch_size=16").code == 0
    runs = [tmp_path / str(number) for number in range(len(BLOCK_MODES))]
    jobs = [job(run, *flags, *mode) for run, mode in zip(runs, BLOCK_MODES, strict=True)]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], 2)
    assert result.returncode == 0, result.stderr
    for run, mode in zip(runs, BLOCK_MODES, strict=True):
        difference = largest_difference(curve(run), curve(tmp_path / "alone"))
        print(f"{name}, {mode}: largest relative difference {difference:.1e}")  # shown by pytest -s
        assert difference < 1e-5, mode


def test_rerunning_the_command_continues_bitwise(one_process: Path, tmp_path: Path, train: Train) -> None:
    flags = ["--training.batch_size=16", "--checkpoint.enable_checkpoint", "--checkpoint.interval=10"]
    assert train("run", "--training.steps=13", *flags).code == 0
    # As if killed after step 13: its checkpoint is gone, its metrics are not.
    checkpoints = tmp_path / "run" / "checkpoint"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000010", "step-00000013"]
    (checkpoints / "step-00000013").rename(tmp_path / "gone")
    result = train("run", "--training.steps=20", *flags)
    assert "resumed at step 10" in result.out
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == list(range(1, 21))
    assert curve(tmp_path / "run") == curve(one_process)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000010", "step-00000020"]
    assert read_status(tmp_path / "run")["state"] == "completed"
    for weights in ("ema", "raw"):
        resumed, uninterrupted = (load(run, weights) for run in (tmp_path / "run", one_process))
        assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted), weights


def load(run: Path, weights: str, step: int | None = 20) -> dict[str, torch.Tensor]:
    from torchditan.extras.weights.trained_model import TrainedModel

    return TrainedModel.open(run, step=step, weights=weights, device=torch.device("cpu")).model.state_dict()


def test_deterministic_mode_trains(one_process: Path, tmp_path: Path, train: Train) -> None:
    result = train("run", "--training.steps=20", "--training.batch_size=16", "--training.deterministic")
    assert result.code == 0, result.err
    assert largest_difference(curve(tmp_path / "run"), curve(one_process)) < 1e-5


def test_deterministic_cublas_is_asked_for_before_anything_can_use_it(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchditan.job.prepare
    from torchditan.errors import ConfigError

    found: list[str | None] = []

    def encode(*_: object, **__: object) -> None:
        found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        raise ConfigError("far enough")

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "as before the test")
    monkeypatch.setattr(torchditan.job.prepare, "pixel_space", encode)
    for flags in ([], ["--training.deterministic"]):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        assert train("run", *flags).code == 2
    assert found == [None, ":4096:8"]


def test_sampling_and_validation_leave_no_trace_in_the_curve(one_process: Path, tmp_path: Path, train: Train) -> None:
    flags = ["--training.steps=20", "--training.batch_size=16", "--metrics.enable_sampling=true"]
    flags += ["--metrics.sample_freq=3", "--validation.freq=4", "--sampling.num_steps=1", "--sampling.max_classes=1"]
    result = train("run", *flags)
    assert result.code == 0, result.err
    assert curve(tmp_path / "run") == curve(one_process)
    assert [record.keys() >= {*VALIDATED} for record in read_metrics(tmp_path / "run")] == 5 * [
        *(False, False, False, True)
    ]


def test_training_samples_from_the_averaged_weights(tmp_path: Path, train: Train, run_script: RunScript) -> None:
    """The grid drawn while training is the one that `torchditan generate` draws from the checkpoint's EMA."""
    from PIL import Image, ImageChops

    flags = ["--training.steps=8", "--training.batch_size=16", "--metrics.enable_sampling=true", "--validation.freq=2"]
    flags += ["--checkpoint.enable_checkpoint", "--optimizer.lr=1e-2", "--ema.warmup=false", "--ema.decay=0.9"]
    assert train("run", *flags, "--sampling.num_steps=4").code == 0
    for weights in ("ema", "raw"):
        flags = ["--seed=0", f"--out={weights}.png", f"--weights={weights}"]
        assert run_script("torchditan", "generate", "run", *flags).code == 0
    drawn, averaged, raw = (
        Image.open(tmp_path / name).convert("L").crop((0, 60, 500, 700))
        for name in ("run/samples/step_00000008.png", "ema.png", "raw.png")
    )
    assert ImageChops.difference(drawn, averaged).getextrema()[1] <= 1
    assert ImageChops.difference(drawn, raw).getextrema()[1] > 10


def test_rerunning_a_finished_run_changes_nothing(tmp_path: Path, train: Train) -> None:
    flags = ["--training.steps=2", "--training.batch_size=16", "--checkpoint.enable_checkpoint"]
    assert train("run", *flags).code == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = train("run", *flags)
    assert again.code == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_without_checkpoints_the_final_weights_are_kept_and_usable(
    weights: str, tmp_path: Path, train: Train, run_script: RunScript
) -> None:
    run, ema = tmp_path / "run", f"--ema.enable={str(weights == 'ema').lower()}"
    flags = ["--training.steps=3", "--training.batch_size=16", ema]
    *_, where, how = train("run", *flags).out.splitlines()
    kept = run / "checkpoint" / "step-00000003.safetensors"
    assert list((run / "checkpoint").iterdir()) == [kept]
    assert where.endswith(str(kept)) and how.endswith(f"torchditan generate {run} --seed 1")
    assert train("all", *flags, "--checkpoint.enable_checkpoint").code == 0
    expected, found = load(tmp_path / "all", weights, step=3), load(run, weights, step=3)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept.stat().st_size < 1.1 * sum(4 * tensor.numel() for tensor in expected.values())
    assert run_script("torchditan", "generate", run, "--sampling.num_steps=1", "--classes=1").code == 0
    assert run_script("torchditan", "export", run, "weights.safetensors").code == 0
    assert (tmp_path / "weights.safetensors").read_bytes() == kept.read_bytes()
    other = "raw" if weights == "ema" else "ema"
    refused = run_script("torchditan", "generate", run, f"--weights={other}")
    assert_refused(refused.err, "--weights", [other, f"must be {weights}"])
    for number, source in enumerate((run, kept)):
        begun = train(str(number), "--training.steps=1", ema, f"--checkpoint.initial_load_path={source}")
        assert begun.code == 0 and f"started from the weights of {source}, step 3 ({weights})" in begun.out


def test_a_finished_run_never_starts_again_over_its_final_weights(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "run"
    assert train("run", "--training.steps=3", "--training.batch_size=16").code == 0
    before = {path: path.read_bytes() for path in [run / "metrics.jsonl", *(run / "checkpoint").rglob("*.*")]}
    for flags in ([], ["--checkpoint.enable_checkpoint"], ["--checkpoint.save_final=false"]):
        again = train("run", "--training.steps=3", "--training.batch_size=16", *flags)
        assert again.code == 0
        assert "step 3 is already done: nothing is left to train" in again.out
        assert "--metrics.experiment_name" in again.out
        assert all(path.read_bytes() == content for path, content in before.items())
        assert f"torchditan generate {run}" in again.out.splitlines()[-1]
    for steps in (2, 5):
        other = train("run", f"--training.steps={steps}", "--training.batch_size=16", "--checkpoint.enable_checkpoint")
        assert_refused(other.err, f"training.steps = {steps}", [str(run), "--checkpoint.initial_load_path"])
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_run_that_continues_from_a_checkpoint_ends_with_one(one_process: Path, tmp_path: Path, train: Train) -> None:
    assert train("run", "--training.steps=3", "--training.batch_size=16", "--checkpoint.enable_checkpoint").code == 0
    assert "resumed at step 3" in train("run", "--training.steps=5", "--training.batch_size=16").out
    assert curve(tmp_path / "run") == curve(one_process)[:5]
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir())
    assert checkpoints == ["step-00000003", "step-00000005"]


def test_a_run_that_keeps_no_weights_says_so_before_and_after(tmp_path: Path, train: Train) -> None:
    result = train("run", "--training.steps=2", "--training.batch_size=16", "--checkpoint.save_final=false")
    assert result.code == 0
    assert not (tmp_path / "run" / "checkpoint").exists()
    lines = result.out.splitlines()
    first_step = next(number for number, line in enumerate(lines) if line.startswith("step"))
    for line in (" ".join(lines[:first_step]), lines[-1]):
        assert "no weights" in line and "checkpoint.save_final" in line and "checkpoint.enable_checkpoint" in line


def test_the_run_directory_holds_what_it_promises(tmp_path: Path, train: Train) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = ["--training.steps=3", "--training.batch_size=16", "--metrics.enable_tensorboard", "--validation.freq=2"]
    flags += ["--metrics.enable_sampling=true", "--sampling.num_steps=2", "--metrics.sample_freq=2"]
    result = train("run", *flags)
    assert result.code == 0, result.err
    run = tmp_path / "run"
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["step_00000002.png", "step_00000003.png"]
    assert f"generated and real: {run}/samples/step_00000003.png" in result.out
    assert list((run / "tensorboard").glob("events.*"))
    records = read_metrics(run)
    assert [record["images_seen"] for record in records] == [16, 32, 48]
    assert [record.keys() >= {*VALIDATED} for record in records] == [False, True, True]
    logged = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    for key in VALIDATED:
        scalars = [(event.step, event.value) for event in logged.Scalars(key)]
        assert scalars == [(record["step"], pytest.approx(record[key])) for record in records[1:]]
    assert all(record["mfu"] is None and record["images_per_second"] > 0 for record in records)
    stored = read_config(run)["config"]
    assert stored["model"]["input_channels"] == 1
    assert stored["dataset"]["image_size"] == [8, 8]
    assert stored["dataset"]["num_classes"] == 10


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
def test_each_precision_changes_the_numbers_a_little(
    flags: list[str], one_process: Path, tmp_path: Path, train: Train
) -> None:
    if "--float8.enable_float8_linear" in flags:
        pytest.importorskip("torchao")
    result = train("run", "--training.steps=20", "--training.batch_size=16", *flags)
    assert result.code == 0, result.err
    assert 1e-6 < largest_difference(curve(tmp_path / "run"), curve(one_process)) < 0.1


def test_cpu_offload_changes_no_number(one_process: Path, tmp_path: Path, train: Train) -> None:
    result = train("run", "--training.steps=20", "--training.batch_size=16", "--training.enable_cpu_offload")
    assert result.code == 0, result.err
    assert largest_difference(curve(tmp_path / "run"), curve(one_process)) < 1e-5


@pytest.mark.nightly
def test_compiled_blocks_follow_the_curve_in_every_checkpointing_mode(
    one_process: Path, official: Path, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    of_one_rank = {"all": [NONE], "op": [NTH, OP], "official": [NONE, *OFFICIAL]}
    for world_size, modes in ((1, of_one_rank), (2, {"nth": [NTH]})):
        # The same micro-batch everywhere: the graphs of the first job are in inductor's cache for the others.
        flags = ["--training.steps=20", "--training.compile", "--training.batch_size=8"]
        jobs = [job(tmp_path / name, *flags, *mode) for name, mode in modes.items()]
        result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size, timeout=400)
        assert result.returncode == 0, result.stderr
        for name in modes:
            reference = official if name == "official" else one_process
            assert largest_difference(curve(tmp_path / name), curve(reference)) < 1e-5, name


POISONED = """
import os, sys
sys.path.insert(0, {repository!r})
sys.argv = ["train.py", *{arguments!r}]
from torchditan.commands import train
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.optim.ema import local_tensor
from torchditan.supervision.supervision import Supervision
from torchditan.trainer import Trainer
from torchditan.supervision.exit_status import run_job

loss = FlowMatching.loss
calls = []

def poisoned(self, model, batch, randomness):
    # A NaN in the loss of the third step, on the last rank alone.
    calls.append(1)
    last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    if batch["sample"].is_meta:  # for MFU
        calls.pop()
    return loss(self, model, batch, randomness) * (float("nan") if last and len(calls) == 3 else 1)

FlowMatching.loss = poisoned
trainers = []
step = Trainer.set_learning_rate

def remember(self, number):
    self.before = {{name: local_tensor(p.detach()).clone() for name, p in self.model.named_parameters()}}
    trainers[:] = [self]
    return step(self, number)

Trainer.set_learning_rate = remember
failed = Supervision.record_failure

def check(self, error):
    model, before = trainers[0].model, trainers[0].before
    same = all((local_tensor(p.detach()) == before[name]).all() for name, p in model.named_parameters())
    print("weights untouched" if same else "WEIGHTS CHANGED", flush=True)
    failed(self, error)

Supervision.record_failure = check
sys.exit(run_job(train.main))
"""


@pytest.mark.parametrize(("world_size", "replicate"), [(2, 1), (2, 2)])
def test_a_nan_on_one_rank_reaches_no_weight_and_stops_the_run_by_step(
    world_size: int, replicate: int, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    arguments = [*TINY, "--training.steps=9", f"--training.batch_size={16 // world_size}"]
    arguments += [f"--training.data_parallel_replicate_degree={replicate}"]
    arguments += [f"--job.dump_folder={tmp_path}", "--metrics.experiment_name=run"]
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED.format(repository=str(REPOSITORY), arguments=arguments))
    result = run_distributed([script], world_size)
    assert result.returncode == 1
    assert "WEIGHTS CHANGED" not in result.stdout
    assert "weights untouched" in result.stdout, result.stdout + result.stderr
    status = read_status(tmp_path / "run")
    assert status["state"] == "error"
    assert "step 3: the gradient is not finite" in status["reason"]
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_command_without_torchrun_leaves_no_process_group_files(one_process: Path) -> None:
    assert [path.name for path in one_process.parent.iterdir()] == ["run"]
    assert json.loads((one_process / "status.json").read_text())["state"] == "completed"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
