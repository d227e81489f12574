# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Runs with torch.compile: one graph for the whole run, and the curve of eager code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch._dynamo
from refusals import assert_refused
from torch._dynamo.utils import counters

from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunDistributed, RunScript

TINY = [
    "--model.flavor=debugmodel",
    "--model.overrides=depth=2",
    "--model.patch_size=4",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=16",
    "--training.batch_size=4",
    "--training.steps=6",
    "--optimizer.lr=1e-2",
    "--lr_scheduler.warmup_steps=3",
    "--metrics.log_freq=1",
]
# Validation, samples of the EMA and checkpoints change the weights that the modules hold. Their batches have other
# sizes, and the last ones are smaller.
EVERYTHING = [
    "--validation.freq=2",
    "--validation.num_images=21",
    "--metrics.sample_freq=2",
    "--metrics.sample_batch_size=3",
    "--sampling.num_steps=1",
    "--sampling.max_classes=2",
    "--sampling.images_per_class=2",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=2",
]
NOTHING = ["--validation.freq=0", "--metrics.enable_sampling=false"]
REPLICATE = "--training.data_parallel_replicate_degree"
Train = Callable[..., "Outcome"]


@pytest.fixture
def train(run_script: RunScript, tmp_path: Path) -> Train:
    return lambda name, *flags: run_script("train.py", *job(tmp_path / name, *flags))


def job(run: Path, *flags: str) -> list[str]:
    return [*TINY, *flags, f"--job.dump_folder={run.parent}", f"--metrics.experiment_name={run.name}"]


def compiled(scope: str) -> list[str]:
    return ["--training.compile", "--compile.backend=aot_eager", f"--compile.scope={scope}"]


def curve(run: Path) -> list[float]:
    return [record[key] for record in read_metrics(run) for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("scope", ["block", "model"])
def test_a_run_compiles_one_graph_and_follows_the_curve(scope: str, tmp_path: Path, train: Train) -> None:
    assert train("eager", *NOTHING).code == 0
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        outcome = train("compiled", *EVERYTHING, *compiled(scope))
    assert outcome.code == 0, outcome.err
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert (tmp_path / "compiled" / "samples" / "step_00000004.png").exists()
    assert curve(tmp_path / "compiled") == pytest.approx(curve(tmp_path / "eager"), rel=1e-5)


@pytest.mark.slow
def test_two_ranks_of_ddp_follow_the_curve_of_one_process(
    tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    assert train("eager", *NOTHING).code == 0
    arguments = job(tmp_path / "ddp", *NOTHING, *compiled("model"), f"{REPLICATE}=2")
    result = run_distributed(["tests/trainer/test_training.py", json.dumps([arguments])], 2)
    assert result.returncode == 0, result.stderr
    assert curve(tmp_path / "ddp") == pytest.approx(curve(tmp_path / "eager"), rel=1e-5)


def test_a_model_that_sets_hooks_refuses_to_be_one_graph(tmp_path: Path, run_script: RunScript) -> None:
    pytest.importorskip("diffusers")
    flags = ["--model.name=flux", "--model.flavor=debugmodel", "--dataset.dataset_name=dummy"]
    place = [f"--job.dump_folder={tmp_path}", "--metrics.experiment_name=run"]
    code, _, err = run_script("train.py", *flags, *compiled("model"), "--model.input_channels=16", *place)
    assert code == 2
    assert_refused(err, 'compile.scope = "model"', ["flux", "must be block"])
    assert not (tmp_path / "run").exists()
