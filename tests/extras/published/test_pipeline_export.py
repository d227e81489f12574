# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan export --format diffusers`: the stock pipeline opens a full fine-tune and predicts the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from refusals import assert_refused
from safetensors import safe_open
from safetensors.torch import load_file

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import diffusers
import tiny_pipelines
from test_finetune import flags as job_of_captions
from test_finetune import write_balls
from test_whole_path import assert_same, job, opened, random_condition

from torchditan.extras.published.families import family

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunScript

PIPELINES = {
    "flux": tiny_pipelines.flux,
    "sd3": tiny_pipelines.sd3,
    "sdxl": tiny_pipelines.sdxl,
    "wan": tiny_pipelines.wan,
    "wan, from an image": lambda: tiny_pipelines.wan(from_image=True),
}

Export = Callable[..., "Outcome"]


@pytest.fixture
def export(run_script: RunScript, tmp_path: Path) -> Export:
    """`export("run", "out", "--weights=raw")` in `tmp_path`."""
    return lambda *arguments: run_script("torchditan", "export", *arguments, "--format=diffusers")


def fine_tune(run_script: RunScript, run: Path, name: str, pipeline: object, *flags: str) -> Path:
    """Two steps on random latents."""
    outcome = run_script("train.py", *job(name.partition(",")[0], run, f"--model.path={pipeline}", *flags))
    assert outcome.code == 0, outcome.err
    return run


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def flux(kept: Path, run_script: RunScript) -> tuple[Path, Path]:
    """A tiny pipeline and a fine-tune of it, made once: tests only read them."""
    base, run = kept / "base", kept / "run"
    if not run.exists():
        fine_tune(run_script, run, "flux", tiny_pipelines.save(tiny_pipelines.flux(), base))
    return base, run


@pytest.fixture
def flux_alone(kept: Path, run_script: RunScript) -> Path:
    """A run from random weights, made once: tests only read it."""
    run = kept / "alone"
    return run if run.exists() else fine_tune(run_script, run, "flux", "none")


def predict_as_ours(run: Path, transformer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What a run's model predicts, and what diffusers' transformer does in its place."""
    trained = opened(run)
    cond = trained.spec.conditioning.from_batch({"index": torch.arange(2), **random_condition(trained)})
    x_t, t = torch.randn(2, *trained.sample_shape), torch.tensor([0.25, 0.5])
    with torch.no_grad():
        ours = trained.model(x_t, t, cond)
        trained.model.transformer = transformer.eval().requires_grad_(False)  # which decides how torch multiplies
        return ours, trained.model(x_t, t, cond)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name == "sdxl" else ()) for name in PIPELINES]
)
def test_the_stock_pipeline_opens_the_folder_and_predicts_the_same(
    name: str, run_script: RunScript, export: Export, tmp_path: Path
) -> None:
    base = tiny_pipelines.save(PIPELINES[name](), tmp_path / "base")
    flags = ["--model.flavor=debugmodel-i2v"] if "image" in name else []
    run, cls = fine_tune(run_script, tmp_path / "run", name, base, *flags), family(name.partition(",")[0])
    outcome = export(run, tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    class_name = json.loads((base / "model_index.json").read_text())["_class_name"]
    opens = f'{class_name}.from_pretrained("{tmp_path / "out"}")'
    assert f"in diffusers: {opens}\n" in outcome.out
    pipeline = eval(f"diffusers.{opens}")
    before, after = (folder_of(pipeline_folder) for pipeline_folder in (base, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {name for name, content in before.items() if after[name] != content}
    assert changed <= {f"{cls.subfolder}/{file}" for file in ("config.json", "diffusion_pytorch_model.safetensors")}
    ours, theirs = predict_as_ours(run, getattr(pipeline, cls.subfolder))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)  # memory alignment decides how torch multiplies
    with torch.no_grad():
        untrained = getattr(diffusers.DiffusionPipeline.from_pretrained(base), cls.subfolder)
        assert not torch.allclose(predict_as_ours(run, untrained)[1], ours, atol=1e-3)


def folder_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_averaged_or_raw_weights_of_a_step_in_float32_or_bfloat16(
    flux: tuple[Path, Path], run_script: RunScript, export: Export, tmp_path: Path
) -> None:
    base, run = flux
    file = "transformer/diffusion_pytorch_model.safetensors"
    for number, flags in enumerate([["--weights=raw"], ["--weights=ema"], ["--step=1"], ["--dtype=bfloat16"]]):
        assert export(run, f"out{number}", *flags).code == 0
        assert run_script("torchditan", "export", run, f"file{number}.safetensors", *flags).code == 0
        weights = load_file(tmp_path / f"file{number}.safetensors")
        expected = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
        assert_same(load_file(tmp_path / f"out{number}" / file), expected)
    with safe_open(tmp_path / "out2" / file, framework="pt") as opened_file:
        assert opened_file.metadata() == {"format": "pt", "base": str(base), "step": "1", "weights": "ema"}


@pytest.mark.parametrize("base", ["no pipeline", "transformer alone", "incomplete", "another"])
def test_without_the_other_parts_it_is_the_transformer_alone(
    base: str, run_script: RunScript, export: Export, tmp_path: Path
) -> None:
    saved = tiny_pipelines.save(tiny_pipelines.flux(), tmp_path / "base")
    flags, why = [], "has no model_index.json"
    if base == "no pipeline":
        saved, why = "none", "started from random weights"
    elif base == "transformer alone":
        saved = saved / "transformer"
    elif base == "incomplete":
        shutil.rmtree(saved / "tokenizer_2")
        why = "has no tokenizer_2/"
    else:
        other = tiny_pipelines.save(tiny_pipelines.sd3(), tmp_path / "other")
        flags, why = [f"--text_encoder.path={other}"], "is a StableDiffusion3Pipeline"
    run = fine_tune(run_script, tmp_path / "run", "flux", saved, *flags)
    outcome = export(run, tmp_path / "out")
    assert outcome.code == 0, outcome.err
    call = f'transformer=FluxTransformer2DModel.from_pretrained("{tmp_path / "out"}")'
    assert call in outcome.out and "(the transformer alone: " in outcome.out and why in outcome.out
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "out")
    ours, theirs = predict_as_ours(run, transformer)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    whole = tmp_path / "base"
    if base == "transformer alone":
        assert diffusers.FluxPipeline.from_pretrained(whole, transformer=transformer).transformer is transformer


def test_the_autoencoder_is_the_one_of_the_run(run_script: RunScript, export: Export, tmp_path: Path) -> None:
    base = tiny_pipelines.save(tiny_pipelines.flux(), tmp_path / "base")
    other = tiny_pipelines.save(tiny_pipelines.flux(seed=1), tmp_path / "other") / "vae"
    options = {"training.steps": 1, "autoencoder.path": other, "autoencoder.name": "diffusers"}
    run = tmp_path / "out/run"
    assert (
        run_script(
            "train.py", *job_of_captions("flux", base, write_balls(tmp_path / "balls"), run.parent, **options)
        ).code
        == 0
    )
    assert export(run, "exported").code == 0
    assert folder_of(tmp_path / "exported/vae") == folder_of(other) != folder_of(base / "vae")


def test_the_folder_is_what_a_new_run_fine_tunes(run_script: RunScript, export: Export, tmp_path: Path) -> None:
    base = tiny_pipelines.save(tiny_pipelines.sd3(), tmp_path / "base")
    run = fine_tune(run_script, tmp_path / "run", "sd3", base)
    assert export(run, "out").code == 0
    again = fine_tune(run_script, tmp_path / "again", "sd3", tmp_path / "out", "--optimizer.lr=0", "--training.steps=1")
    assert_same(opened(again).model.state_dict(), opened(run).model.state_dict())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["{run}", "{exists}"], ["exists", "choose another name"]),
        (["{run}", "{exists}/file/new"], ["cannot be written"]),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], parts: list[str], flux_alone: Path, export: Export, tmp_path: Path
) -> None:
    run = flux_alone
    (tmp_path / "exists").mkdir()
    (tmp_path / "exists/file").touch()
    before = sorted([*tmp_path.rglob("*"), *run.rglob("*")])
    outcome = export(*(argument.format(run=run, exists=tmp_path / "exists") for argument in arguments))
    assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome.err
    assert [part for part in parts if part not in outcome.err] == []
    assert sorted([*tmp_path.rglob("*"), *run.rglob("*")]) == before


def test_our_own_models_are_named_with_the_format_that_is_right(
    run_script: RunScript, export: Export, tmp_path: Path
) -> None:
    assert run_script("train.py", *job("dit", tmp_path / "run")).code == 0
    outcome = export(tmp_path / "run", "new")
    assert outcome.code == 2 and '--format = "diffusers"' in outcome.err and "must be torchditan" in outcome.err
    assert not (tmp_path / "new").exists()


def test_a_lora_is_exported_by_its_own_script(run_script: RunScript, export: Export, tmp_path: Path) -> None:
    run = fine_tune(run_script, tmp_path / "run", "flux", "none", "--lora.rank=2")
    before = sorted(tmp_path.rglob("*"))
    for outcome in (run_script("torchditan", "export", run, tmp_path / "file.safetensors"), export(run, "new")):
        assert outcome.code == 2
        assert_refused(outcome.err, f'RUN = "{run}"', ["LoRA", "torchditan export_lora RUN OUT.safetensors"])
        assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_no_folder(
    flux_alone: Path, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchditan.extras.weights.pipeline_export.write_weights", fail)
    outcome = export(flux_alone, tmp_path / "out")
    assert outcome.code == 2 and "No space left on device" in outcome.err
    assert list(tmp_path.iterdir()) == []
