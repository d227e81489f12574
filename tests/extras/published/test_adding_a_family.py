# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/extending.md: a family in a package of the user's own works like ours, by `module:Class` and by its name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import tiny_runs
import zoo as zoo_of_runs
from refusals import assert_refused
from test_whole_path import assert_same, opened

from torchditan.registry import installed_plug_ins

if TYPE_CHECKING:
    from tests.conftest import RunScript
    from tests.zoo import Zoo

CODE = """
from torchditan.extras.published.base import PublishedModel
from torchditan.extras.published.flux import Flux

class MyFamily(Flux):
    name = "my_family"
    flavors = {"Mine": Flux.flavors["debugmodel"]}

class WithoutFlavors(PublishedModel):
    name = "mine"
    model_class = pipeline_class = "FluxPipeline"
"""
BY_CLASS, BY_NAME = "my_lab.my_family:MyFamily", "my_family"


@pytest.fixture(autouse=True)
def my_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the Python path, with an entry point."""
    package = tmp_path / "installed/my_lab"
    package.mkdir(parents=True)
    (package / "my_family.py").write_text(CODE)
    (package / "broken.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(package.parent)

    def entry_points(*, group: str) -> Iterator[EntryPoint]:
        return (EntryPoint(BY_NAME, BY_CLASS, each) for each in ["torchditan.architectures"] if each == group)

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    monkeypatch.setattr("torchditan.registry.installed_plug_ins", installed_plug_ins.__wrapped__)  # without its cache


@pytest.mark.parametrize("name", [BY_CLASS, pytest.param(BY_NAME, marks=pytest.mark.slow)])
def test_it_trains_resumes_exports_and_is_planned(name: str, zoo: Zoo, run_script: RunScript, tmp_path: Path) -> None:
    import diffusers

    inputs = zoo("flux lora").parent / "inputs"
    base = [flag.format(inputs=inputs) for flag in zoo_of_runs.JOBS["flux lora"]]
    mine = [f"--model.name={name}", "--model.flavor=Mine", f"--cache.folder={inputs.parent / 'cache'}"]
    int8, full = ["--quantize.base=int8"], ["--lora.rank=0", "--lora.alpha=none", "--training.steps=1"]

    def run(*arguments: object) -> str:
        outcome = run_script(*map(str, arguments))
        assert outcome.code == 0, outcome.err
        return outcome.out

    def train(run_name: str, *flags: str) -> str:
        steps = ["--training.steps=2", "--checkpoint.interval=1"]
        return run("train.py", *tiny_runs.job(tmp_path / run_name, *tiny_runs.KEEP, *base, *mine, *steps, *flags))

    train("lora", *int8)
    weights = opened(tmp_path / "lora").model.state_dict()
    shutil.rmtree(tmp_path / "lora/checkpoint/step-00000002")
    assert "resumed at step 1" in train("lora", *int8)
    assert_same(opened(tmp_path / "lora").model.state_dict(), weights)
    run("torchditan", "export_lora", tmp_path / "lora", tmp_path / "lora.safetensors")
    pipeline = diffusers.FluxPipeline.from_pretrained(inputs / "pipeline")
    pipeline.load_lora_weights(str(tmp_path / "lora.safetensors"))
    assert pipeline.get_active_adapters()
    run("torchditan", "generate", tmp_path / "lora", "--prompts", "a red square", "--sampling.num_steps=1")

    train("full", *full)
    run("torchditan", "export", tmp_path / "full", tmp_path / "folder", "--format=diffusers")
    again = diffusers.FluxPipeline.from_pretrained(tmp_path / "folder").transformer.state_dict()
    trained = opened(tmp_path / "full").model.transformer.state_dict()
    assert_same({each: again[each] for each in trained}, trained)

    sizes = ["--dataset.dataset_name=captions", "--dataset.image_size=64"]
    assert "GiB" in run("torchditan", "plan", "quickstart", *mine[:2], "--lora.rank=2", *int8, *sizes, "--device=l4")
    grid = tmp_path / "mine.toml"
    grid.write_text(f'steps = 4\nwindow = 2\n[axes]\nmodel = ["{name}/Mine", "flux/debugmodel"]\n')
    assert "2 runs" in run("torchditan", "ablate", grid, "--dry-run")


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        ([f"--model.name={BY_NAME}", "--model.flavor=mine"], 'model.flavor = "mine"', ["Mine?"]),
        ([f"--model.name={BY_CLASS}", "--model.flavor=mine"], 'model.flavor = "mine"', ["Mine?"]),
        (["--model.name=my_famly"], 'model.name = "my_famly"', ["my_family?"]),
        (["--model.name=my_lab.broken:Mine"], 'model.name = "my_lab.broken:Mine"', ["no_such_module"]),
        (["--model.name=my_lab.my_family:Mine"], 'model.name = "my_lab.my_family:Mine"', ["Mine"]),
        (["--model.name=my_lab.my_family:Flux"], "model.flavor", ["FLUX.1-dev"]),
        (["--model.name=my_lab.my_family:WithoutFlavors"], "model.name", ["flavors", "PublishedModel"]),
        (
            ["--model.name=pathlib:Path"],
            'model.name = "pathlib:Path"',
            ["torchditan.extras.published.base.PublishedModel"],
        ),
    ],
)
def test_a_mistake_in_it_is_one_line(flags: list[str], about: str, mentions: list[str], run_script: RunScript) -> None:
    outcome = run_script("train.py", "--dataset.dataset_name=dummy", *flags)
    assert outcome.code == 2
    assert_refused(outcome.err, about, mentions)


def test_it_is_suggested_in_grids(run_script: RunScript) -> None:
    outcome = run_script("torchditan", "ablate", "published_models", "--dry-run", "--axes.model", f"{BY_CLASS}/Min")
    assert outcome.code == 2 and f"did you mean {BY_CLASS}/Mine?" in outcome.err
