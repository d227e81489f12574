# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What is stable from 0.2.0 on: names that code of others imports, and runs that later versions resume."""

from __future__ import annotations

import pkgutil
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import torchditan.registry
from torchditan.registry import Registry
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"

PYTHON = [  # docs/checkpoints.md, "Python"
    "torchditan:load",
    "torchditan:train",
    "torchditan.config.loader:from_dict",
    "torchditan.config.loader:load_config",
    "torchditan.config.options:Config",
    "torchditan.config.options:Sampling",
    "torchditan.datasets.digits:Digits",
    "torchditan.diffusion.flow_matching:FlowMatching",
    "torchditan.diffusion.samplers:guided_prediction",
    "torchditan.diffusion.timesteps:Timesteps",
    "torchditan.errors:ConfigError",
    "torchditan.extras.planner.plan:plan_run",
    "torchditan.extras.weights.trained_model:TrainedModel",
    "torchditan.job.prepare:prepare",
    "torchditan.models.dit:DiT",
    "torchditan.models.dit:DiTConfig",
    "torchditan.models.dit:FLAVORS",
    "torchditan.models:ClassLabels",
    "torchditan.randomness:draw",
    "torchditan.randomness:normal",
    "torchditan.run.reading:read_config",
    "torchditan.run.reading:read_metrics",
    "torchditan.run.reading:read_status",
    "torchditan.sampling.grid_picture:save_grid",
    "torchditan.trainer:Trainer",
]
EXTENSION_POINTS = [  # docs/extending.md; the groups of entry points are `torchditan.` and these names
    "ARCHITECTURES",
    "AUTOENCODERS",
    "BLOCKS",
    "DATASETS",
    "FAMILIES",
    "FORMATS",
    "INGREDIENTS",
    "LAUNCHERS",
    "METERS",
    "METRICS",
    "OBJECTIVES",
    "OPTIMIZERS",
    "SAMPLERS",
    "SCHEDULES",
    "TEXT_ENCODERS",
]
BASES = [
    "torchditan.data_stream.datasets:ImageDataset",
    "torchditan.data_stream.datasets:SequentialDataset",
    "torchditan.diffusion.objectives:Ingredient",
    "torchditan.diffusion.objectives:Losses",
    "torchditan.diffusion.objectives:Objective",
    "torchditan.diffusion.samplers:Sampler",
    "torchditan.extras.ablation.launch:Launcher",
    "torchditan.extras.autoencoders.autoencoder:Autoencoder",
    "torchditan.extras.captions.encode:TextEncoder",
    "torchditan.extras.evaluation.metric:Metric",
    "torchditan.extras.evaluation.metric:MetricOfAllPictures",
    "torchditan.extras.evaluation.quality:Quality",
    "torchditan.extras.published.base:PublishedModel",
    "torchditan.models.dit:Block",
    "torchditan.models.spec:ModelSpec",
    "torchditan.optim.meters:Meter",
    "torchditan.optim.optimizers:ParameterGroup",
    "torchditan.optim.schedules:Schedule",
]


def test_stable_names_can_be_imported() -> None:
    for name in [*PYTHON, *BASES]:
        assert pkgutil.resolve_name(name) is not None
    registries = [getattr(torchditan.registry, name) for name in EXTENSION_POINTS]
    assert all(isinstance(registry, Registry) for registry in registries)
    assert {registry.base for registry in registries} - {None} <= set(BASES)


def test_a_run_of_0_2_0_resumes(tmp_path: Path, run_script: RunScript) -> None:
    """From step 40 it follows the four steps that 0.2.0 did. A changed default changes nothing."""
    run = tmp_path / "outputs/run"
    shutil.unpack_archive(FIXTURES / "run_0.2.0.zip", run.parent)
    expected = [record["loss"] for record in read_metrics(run)]
    flags = ["--model.flavor=debugmodel", "--model.overrides", "depth=1", "width=16", "num_heads=2"]
    flags += ["--model.patch_size=4", "--model.input_channels=1", "--dataset.dataset_name=digits"]
    flags += ["--dataset.num_workers=0", "--training.mixed_precision_param=float32", "--training.global_batch_size=4"]
    flags += ["--training.steps=44", "--optimizer.lr=1e-2", "--metrics.log_freq=1", "--metrics.enable_sampling=false"]
    flags += ["--validation.freq=0", "--checkpoint.enable_checkpoint", "--metrics.experiment_name=run"]
    outcome = run_script("train.py", *flags)
    assert outcome.code == 0, outcome.err
    assert "resumed at step 40" in outcome.out
    assert [record["loss"] for record in read_metrics(run)] == pytest.approx(expected, rel=1e-4)
