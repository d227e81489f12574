# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A full fine-tune from its first step to its resume, for every family: the weights are the same at every stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from torchditan.config.loader import as_flags
from torchditan.extras.published.resolutions import published_options
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.randomness import normal
from torchditan.registry import FAMILIES

pytest.importorskip("diffusers")

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript

OWN = ["--model.flavor=debugmodel", "--model.patch_size=2", "--model.input_channels=1", "--dataset.image_size=8"]
TEXT = ["--model.text=in_context", "--model.text_tokens=4", "--model.text_width=8", "--model.pooled_width=6"]
MODELS = {
    "dit": [*OWN, "--dataset.num_classes=3"],
    "dit, text": [*OWN, "--dataset.num_classes=0", *TEXT],
    **{name: [*as_flags(published_options(f"{name}/debugmodel", None))] for name in FAMILIES},
}

Weights = dict[str, torch.Tensor]


def job(model: str, run: Path, *flags: str) -> list[str]:
    """Two steps of a tiny model on random samples."""
    common = {
        "dataset.dataset_name": "dummy",
        "dataset.num_workers": 0,
        "dataset.dummy_size": 8,
        "training.batch_size": 2,
        "training.steps": 2,
        "training.mixed_precision_param": "float32",
        "optimizer.lr": 1e-2,
        "metrics.enable_sampling": "false",
        "checkpoint.enable_checkpoint": "true",
        "checkpoint.interval": 1,
        "sampling.num_steps": 2,
        "job.dump_folder": run.parent,
        "metrics.experiment_name": run.name,
    }
    return [*(f"--{option}={value}" for option, value in common.items()), *MODELS[model], *flags]


def opened(run: Path) -> TrainedModel:
    return TrainedModel.open(run, device=torch.device("cpu"))


def drawn(trained: TrainedModel) -> torch.Tensor:
    """Samples of a random condition."""
    from torchditan.sampling.drawing import SampleRows

    if trained.num_classes:
        rows = SampleRows.of_classes([0, 1], class_names=["zero", "one"])
    else:
        condition = random_condition(trained)
        zeros = {name: torch.zeros_like(value[0]) for name, value in condition.items()}
        rows = SampleRows(["a", "b"], [0, 1], condition, negative=zeros)
    with torch.no_grad():
        return trained.generate_rows(rows, samples_per_row=1, seed=0, batch_size=2)


def random_condition(trained: TrainedModel) -> Weights:
    found = {}
    for name, (shape, dtype) in trained.spec.conditioning.tensors.items():
        value = normal(0, name, [0, 1], shape)
        found[name] = value if dtype.is_floating_point else torch.ones_like(value, dtype=dtype)
    return found


def assert_same(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    assert [name for name, value in left.items() if not torch.equal(value, right[name])] == []


QUICK = [("dit", False), ("sd3", True)]
SLOW = [pytest.param(model, False, marks=pytest.mark.slow) for model in MODELS if model not in dict(QUICK)]


@pytest.mark.parametrize(("model", "ema"), [*QUICK, *SLOW])
def test_train_save_resume_generate_export_import_continue(
    model: str, ema: bool, run_script: RunScript, tmp_path: Path
) -> None:
    def train(name: str, *flags: str) -> str:
        outcome = run_script("train.py", *job(model, tmp_path / name, f"--ema.enable={ema}".lower(), *flags))
        assert outcome.code == 0, outcome.err
        return outcome.out

    def convert(*arguments: object) -> None:
        outcome = run_script("torchditan", *arguments)
        assert (outcome.code, outcome.err) == (0, "")

    train("run")
    trained = opened(tmp_path / "run")
    weights, samples = trained.model.state_dict(), drawn(trained)
    assert trained.weights == ("ema" if ema else "raw") and samples.abs().sum() > 0

    shutil.rmtree(tmp_path / "run/checkpoint/step-00000002")
    assert "resumed at step 1" in train("run")
    assert_same(opened(tmp_path / "run").model.state_dict(), weights)

    convert("export", tmp_path / "run", tmp_path / "file.safetensors")
    assert_same(load_file(tmp_path / "file.safetensors"), weights)
    convert("import", tmp_path / "file.safetensors", tmp_path / "imported")
    imported = opened(tmp_path / "imported")
    assert_same(imported.model.state_dict(), weights)
    assert torch.equal(drawn(imported), samples)
    convert("export", tmp_path / "imported", tmp_path / "again.safetensors")
    assert_same(load_file(tmp_path / "again.safetensors"), weights)

    if not model.startswith("dit"):
        import diffusers

        convert("export", tmp_path / "run", tmp_path / "folder", "--format=diffusers")
        theirs = diffusers.AutoModel.from_pretrained(str(tmp_path / "folder"))
        assert type(theirs) is type(trained.model.transformer)
        assert_same({f"transformer.{name}": tensor for name, tensor in theirs.state_dict().items()}, weights)
        # Frozen like ours, which decides how torch multiplies.
        trained.model = type(trained.model)(theirs.eval().requires_grad_(False))
        assert torch.equal(drawn(trained), samples)

    line = train("as_it_is", "--training.steps=1", "--optimizer.lr=0", "--checkpoint.initial_load_path=run")
    assert "started from the weights of " in line
    assert_same(opened(tmp_path / "as_it_is").model.state_dict(), weights)
    train("tuned", "--training.steps=1", "--checkpoint.initial_load_path=file.safetensors")
    tuned = opened(tmp_path / "tuned")
    assert not torch.equal(drawn(tuned), samples)
    tuned.restore_original()
    assert_same(tuned.model.state_dict(), weights)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "completed"


@pytest.mark.slow
def test_weights_with_buffers_continue_on_two_ranks(run_distributed: RunDistributed, tmp_path: Path) -> None:
    shards = ["--training.data_parallel_shard_degree=2", "--training.batch_size=1"]
    again = ["--training.steps=1", "--optimizer.lr=0", f"--checkpoint.initial_load_path={tmp_path / 'run'}"]
    jobs = [job("sd3", tmp_path / "run", *shards), job("sd3", tmp_path / "again", *shards, *again)]
    result = run_distributed(
        ["tests/trainer/test_training.py", json.dumps([list(map(str, flags)) for flags in jobs])], 2
    )
    assert result.returncode == 0, result.stderr
    assert_same(opened(tmp_path / "again").model.state_dict(), opened(tmp_path / "run").model.state_dict())


def test_a_lora_without_checkpoints_keeps_its_weights_alone(run_script: RunScript, tmp_path: Path) -> None:
    kept = ["--checkpoint.enable_checkpoint=false", "--checkpoint.save_final"]
    for name, flags in (("all", []), ("alone", kept)):
        assert run_script("train.py", *job("sd3", tmp_path / name, "--lora.rank=2", *flags)).code == 0
        assert run_script("torchditan", "export_lora", tmp_path / name, tmp_path / f"{name}.safetensors").code == 0
    assert [path.suffix for path in (tmp_path / "alone" / "checkpoint").iterdir()] == [".safetensors"]
    assert_same(load_file(tmp_path / "alone.safetensors"), load_file(tmp_path / "all.safetensors"))
    assert_same(opened(tmp_path / "alone").model.state_dict(), opened(tmp_path / "all").model.state_dict())
    again = run_script("train.py", *job("sd3", tmp_path / "alone", "--lora.rank=2", *kept))
    assert again.code == 0 and "already done" in again.out, again.err
