# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan export --format diffusers`: the stock pipeline opens a full fine-tune and predicts the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import diffusers
import tiny_pipelines
from test_whole_path import assert_same

from torchditan.checkpoint.weights import Weights
from torchditan.config.loader import build_config, from_dict, to_dict
from torchditan.extras.published.families import family
from torchditan.extras.published.resolutions import published_options
from torchditan.extras.weights.diffusers_export import export_to_diffusers
from torchditan.extras.weights.lora_export import export_lora, lora_pairs
from torchditan.extras.weights.opening import open_model
from torchditan.extras.weights.pipeline_export import merge_lora
from torchditan.extras.weights.trained_model import stored_spec
from torchditan.models import model_spec_of

if TYPE_CHECKING:
    from tests.zoo import Zoo

PIPELINES = {
    "flux/debugmodel": tiny_pipelines.flux,
    "flux2/debugmodel": tiny_pipelines.flux2,
    "sd3/debugmodel": tiny_pipelines.sd3,
    "sdxl/debugmodel": tiny_pipelines.sdxl,
    "z_image/debugmodel": tiny_pipelines.z_image,
    "wan/debugmodel": tiny_pipelines.wan,
    "wan/debugmodel-ti2v": lambda: tiny_pipelines.wan(is_ti2v=True),
    "wan/debugmodel-i2v": lambda: tiny_pipelines.wan(from_image=True),
}


def fine_tuned(name: str, base: Path | None, **options: Any) -> Weights:
    """Weights of a run on a pipeline that differ from those of the pipeline."""
    places = {"model.path": None if base is None else str(base), "training.mixed_precision_param": "float32"}
    config = build_config({**published_options(name, None), **places, **options})
    data = config.dataset
    size = [*([] if data.num_frames is None else [data.num_frames]), *(data.image_size or ())]
    spec = model_spec_of(config, sample_shape=(config.model.input_channels or 0, *size), num_classes=0)
    config = config.replace({"model.sample_size": size})
    model: Any = spec.build().to_empty(device="cpu")
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    return Weights.of(Path("run"), tensors, config=to_dict(config), step=7, images_seen=70, kind="ema")


def assert_same_predictions(weights: Weights, transformer: torch.nn.Module) -> None:
    """Of our model, and of diffusers' transformer in its place."""
    spec = stored_spec(from_dict(weights.config or {}))
    model: Any = spec.build().to_empty(device="cpu")
    model.init_weights(0)
    x_t, t, cond = spec.example_inputs(2)
    x_t, t = torch.randn(x_t.shape), torch.tensor([0.25, 0.5])
    cond = {key: torch.randn(value.shape) if value.is_floating_point() else value for key, value in cond.items()}
    with torch.no_grad():
        untrained = model(x_t, t, cond)
        weights.fill(model)
        ours = model(x_t, t, cond)
        theirs = type(model)(transformer.eval())(x_t, t, cond)
    assert not torch.allclose(untrained, ours, atol=1e-3)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)  # memory alignment decides how torch multiplies


def export(weights: Weights, folder: Path) -> Any:
    return export_to_diffusers(weights, folder, dtype=torch.float32)


def lora_of(weights: Weights) -> Weights:
    """A LoRA of rank 2 and alpha 6 on the base of these weights."""
    config = from_dict(weights.config or {}).replace({"lora.rank": 2, "lora.alpha": 6.0, "quantize.base": "int8"})
    model: Any = stored_spec(config).build().to_empty(device="cpu")
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    found = {name: value for name, value in model.named_parameters() if ".lora_" in name}
    tensors = {name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in found.items()}
    return Weights.of(Path("run"), tensors, config=to_dict(config), step=7, images_seen=70, kind="raw")


@pytest.mark.parametrize("name", ["flux/debugmodel", "sdxl/debugmodel"])
def test_a_merged_lora_is_the_base_with_its_update(name: str, tmp_path: Path) -> None:
    base, cls = tiny_pipelines.save(PIPELINES[name](), tmp_path / "base"), family(name.partition("/")[0])
    weights = lora_of(fine_tuned(name, base))
    merged, lost = merge_lora(weights, tmp_path / "merged", dtype=torch.float32)
    _, more = merge_lora(weights, tmp_path / "rounded", dtype=torch.bfloat16)
    assert lost < 1e-6 < more < 0.1 and merged.left_out is None
    export_lora(weights.tensors(), model_name=cls.name, rank=2, alpha=6.0, path=tmp_path / "lora/lora.safetensors")
    with_lora = eval(f'diffusers.{cls.pipeline_class}.from_pretrained("{base}")')
    with_lora.load_lora_weights(str(tmp_path / "lora"))
    with_lora.fuse_lora()
    with_lora.unload_lora_weights()
    expected = getattr(with_lora, cls.subfolder).state_dict()
    before = load_file(base / f"{cls.subfolder}/diffusion_pytorch_model.safetensors")
    after = getattr(eval(f"diffusers.{merged.how_to_open}"), cls.subfolder).state_dict()
    assert after.keys() == expected.keys()
    for key, value in after.items():
        assert torch.allclose(value, expected[key], atol=1e-6), key
    changed = [key for key, value in after.items() if not torch.equal(value, before[key])]
    assert len(changed) == len(lora_pairs(weights.tensors()))
    with refused('RUN = "run"', "lora.rank"):
        merge_lora(fine_tuned(name, base), tmp_path / "none", dtype=torch.float32)


def folder_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", PIPELINES)
def test_the_stock_pipeline_opens_the_folder_and_predicts_the_same(name: str, tmp_path: Path) -> None:
    base, cls = tiny_pipelines.save(PIPELINES[name](), tmp_path / "base"), family(name.partition("/")[0])
    weights = fine_tuned(name, base)
    exported = export(weights, tmp_path / "out")
    class_name = json.loads((base / "model_index.json").read_text())["_class_name"]
    assert exported.how_to_open == f'{class_name}.from_pretrained("{tmp_path / "out"}")' and exported.left_out is None
    pipeline = eval(f"diffusers.{exported.how_to_open}")
    before, after = (folder_of(pipeline_folder) for pipeline_folder in (base, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {name for name, content in before.items() if after[name] != content}
    assert changed <= {f"{cls.subfolder}/{file}" for file in ("config.json", "diffusion_pytorch_model.safetensors")}
    assert_same_predictions(weights, getattr(pipeline, cls.subfolder))


@pytest.fixture(scope="module")
def base(zoo: Zoo) -> Path:
    """A FLUX pipeline, which tests only read."""
    return zoo("flux lora").parent / "inputs/pipeline"


@pytest.fixture(scope="module")
def flux(base: Path) -> Weights:
    return fine_tuned("flux/debugmodel", base)


def with_options(weights: Weights, **options: Any) -> Weights:
    return replace(weights, config=to_dict(from_dict(weights.config or {}).replace(options)))


def test_the_file_has_its_origin_and_may_be_bfloat16(flux: Weights, base: Path, tmp_path: Path) -> None:
    export_to_diffusers(flux, tmp_path / "out", dtype=torch.bfloat16)
    file = tmp_path / "out/transformer/diffusion_pytorch_model.safetensors"
    expected = {name.removeprefix("transformer."): value.bfloat16() for name, value in flux.tensors().items()}
    assert_same(load_file(file), expected)
    with safe_open(file, framework="pt") as opened_file:
        assert opened_file.metadata() == {"format": "pt", "base": str(base), "step": "7", "weights": "ema"}


@pytest.mark.parametrize("case", ["no pipeline", "transformer alone", "incomplete", "another"])
def test_without_the_other_parts_it_is_the_transformer_alone(
    case: str, flux: Weights, base: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model.path": str(base / "transformer")}
    why = "has no model_index.json"
    if case == "no pipeline":
        options, why = {"model.path": None}, "started from random weights"
    elif case == "incomplete":
        incomplete = shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer_2"))
        options, why = {"model.path": str(incomplete)}, "has no tokenizer_2/"
    elif case == "another":
        (tmp_path / "other").mkdir()
        (tmp_path / "other/model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
        options, why = {"text_encoder.path": str(tmp_path / "other")}, "is a StableDiffusion3Pipeline"
    exported = export(with_options(flux, **options), tmp_path / "out")
    assert exported.left_out is not None and why in exported.left_out
    call = f'transformer=FluxTransformer2DModel.from_pretrained("{tmp_path / "out"}")'
    assert call in exported.how_to_open
    if case == "transformer alone":
        transformer = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "out")
        assert diffusers.FluxPipeline.from_pretrained(base, transformer=transformer).transformer is transformer
        assert_same_predictions(flux, transformer)


def test_the_autoencoder_is_the_one_of_the_run(flux: Weights, base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other/vae"
    tiny_pipelines.vae().save_pretrained(other)
    options = {"autoencoder.path": str(other), "autoencoder.name": "diffusers"}
    export(with_options(flux, **options), tmp_path / "out")
    assert folder_of(tmp_path / "out/vae") == folder_of(other) != folder_of(base / "vae")


def test_only_the_encoders_are_those_of_the_pipeline_that_encodes(flux: Weights, base: Path, tmp_path: Path) -> None:
    """Such as Z-Image-Turbo with the encoders of Z-Image."""
    other = shutil.copytree(base, tmp_path / "other")
    for part in ("scheduler", "text_encoder"):
        (other / part / "mark").touch()
    assert export(with_options(flux, **{"text_encoder.path": str(other)}), tmp_path / "out").left_out is None
    for part, origin in (("scheduler", base), ("text_encoder", other)):
        assert folder_of(tmp_path / "out" / part) == folder_of(origin / part)


@pytest.mark.parametrize(("shift", "is_whole"), [(0.1159, True), (0.0, False)])
def test_a_run_with_its_own_normalization_is_no_whole_pipeline(
    shift: float, is_whole: bool, flux: Weights, base: Path, tmp_path: Path
) -> None:
    """diffusers decodes with the values of the autoencoder's own config.json."""
    options = {"name": "diffusers", "path": str(base), "shift": [shift], "scale": [0.3611]}
    own = with_options(flux, **{f"autoencoder.{name}": value for name, value in options.items()})
    left_out = export(own, tmp_path / "out").left_out
    assert (left_out is None) == is_whole
    assert is_whole or "autoencoder.shift" in left_out


def test_a_folder_that_cannot_be_created_and_a_lora_are_refused(flux: Weights, zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(str(tmp_path), "exists", "another name"):
        export(flux, tmp_path)
    with refused(str(tmp_path / "file/new"), "cannot be written"):
        export(flux, tmp_path / "file/new")
    with refused(f'RUN = "{zoo("flux lora")}"', "LoRA", "torchditan export_lora RUN OUT.safetensors"):
        open_model(zoo("flux lora"))
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
