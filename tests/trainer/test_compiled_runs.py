# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Runs with torch.compile: one graph for the whole run, and the curve of eager code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch._dynamo
from refusals import assert_refused
from tiny_runs import job
from torch._dynamo.utils import counters
from zoo import DRAWN, KEPT, VALIDATED

from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from zoo import Zoo

    from tests.conftest import RunDistributed, RunScript, Train

# Validation, samples of the EMA and checkpoints change the weights that the modules hold. Their batches have other
# sizes, and the last ones are smaller.
EVERYTHING = [*KEPT, *DRAWN, *VALIDATED, "--training.batch_size=4", "--validation.num_images=5"]


def compiled(scope: str) -> list[str]:
    return ["--training.compile", "--compile.backend=aot_eager", f"--compile.scope={scope}"]


def curve(run: Path) -> list[float]:
    return [record[key] for record in read_metrics(run) for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("scope", ["block", "model"])
def test_a_run_compiles_one_graph_and_follows_the_curve(scope: str, zoo: Zoo, tmp_path: Path, train: Train) -> None:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        train("compiled", *EVERYTHING, *compiled(scope))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert (tmp_path / "compiled" / "samples" / "step_00000004.png").exists()
    assert curve(tmp_path / "compiled") == pytest.approx(curve(zoo("digits")), rel=1e-5)


@pytest.mark.slow
def test_two_ranks_of_ddp_follow_the_curve_of_one_process(
    zoo: Zoo, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    flags = [*EVERYTHING, *compiled("model"), "--training.data_parallel_replicate_degree=2"]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps([job(tmp_path / "ddp", *flags)])], 2)
    assert result.returncode == 0, result.stderr
    assert curve(tmp_path / "ddp") == pytest.approx(curve(zoo("digits")), rel=1e-5)


def test_a_model_that_sets_hooks_refuses_to_be_one_graph(tmp_path: Path, run_script: RunScript) -> None:
    pytest.importorskip("diffusers")
    flags = ["--model.name=flux", "--model.flavor=debugmodel", "--dataset.dataset_name=dummy"]
    place = [f"--job.dump_folder={tmp_path}", "--metrics.experiment_name=run"]
    code, _, err = run_script("train.py", *flags, *compiled("model"), "--model.input_channels=16", *place)
    assert code == 2
    assert_refused(err, 'compile.scope = "model"', ["flux", "must be block"])
    assert not (tmp_path / "run").exists()
