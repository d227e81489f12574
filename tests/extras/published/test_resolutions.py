# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Published models in grids: `model`, `resolution` and `checkpoint_fraction` set the right options."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchditan.config.loader import build_config
from torchditan.config.options import Model, flatten
from torchditan.errors import ConfigError
from torchditan.extras.ablation.grid import load_grid
from torchditan.extras.ablation.ledger import column_type, columns
from torchditan.extras.published.resolutions import latent_channels, published_options, resolution_of, usual_resolution
from torchditan.registry import FAMILIES, registered

GRID = """
steps = 4
window = 2
[axes]
model = ["flux/debugmodel", "wan/debugmodel"]
precision = ["float16", "bfloat16"]
checkpoint_fraction = [0, 0.5]
"""
MODELS = [f"{family}/{flavor}" for family in FAMILIES for flavor in registered(FAMILIES, family).flavors]


def write_grid(folder: Path, text: str) -> str:
    path = folder / "published.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


LATENTS = {
    "flux": (16, 8, None, "flow_matching"),
    "sd3": (16, 8, None, "flow_matching"),
    "sdxl": (4, 8, None, "ddpm"),
    "mochi": (12, 8, 6, "flow_matching"),
    "hunyuan_video": (16, 8, 4, "flow_matching"),
    "wan": (16, 8, 4, "flow_matching"),
    "qwen_image": (16, 8, None, "flow_matching"),
    "flux2": (128, 16, None, "flow_matching"),
}
"""As published: channels, pixels to a cell, frames to a latent one (None: images), objective."""
OTHER_LATENTS = {"debugmodel-ti2v": (48, 16), "Wan2.2-TI2V-5B": (48, 16)}
"""Flavors with other channels and pixels to a cell."""


def test_the_families_have_the_published_numbers() -> None:
    for name, (channels, downsampling, temporal_downsampling, objective) in LATENTS.items():
        family = registered(FAMILIES, name)
        assert family.temporal_downsampling == (temporal_downsampling or 1), name
        assert family.objective == objective, name
        assert family.takes_videos() == (temporal_downsampling is not None), name
        for flavor, sizes in family.flavors.items():
            expected = OTHER_LATENTS.get(flavor, (channels, downsampling))
            assert (latent_channels(Model(name, flavor)), family.downsampling_of(flavor)) == expected, flavor
            assert len(family.patch_size(sizes.config)) == 2 + family.takes_videos(), name


@pytest.mark.parametrize("model", MODELS)
def test_every_published_model_can_be_built_at_its_usual_resolution(model: str) -> None:
    pytest.importorskip("diffusers")
    from torchditan.models import model_spec_of

    config = build_config(published_options(model, None))
    assert resolution_of(config) == usual_resolution(model)
    family, _, flavor = model.partition("/")
    assert (registered(FAMILIES, family).flavors[flavor].resolution is None) == ("debugmodel" in model)
    frames = [] if config.dataset.num_frames is None else [config.dataset.num_frames]
    shape = (config.model.input_channels or 0, *frames, *(config.dataset.image_size or ()))
    spec = model_spec_of(config, sample_shape=shape, num_classes=0)
    assert spec.sample_shape == shape


def test_pixels_and_frames_become_latent_cells() -> None:
    options = published_options("wan/Wan2.1-T2V-1.3B", "480x832x81")
    assert options["dataset.image_size"] == [60, 104]
    assert (options["dataset.num_frames"], options["model.input_channels"]) == (21, 16)
    assert published_options("wan/Wan2.2-TI2V-5B", "704x1280x121")["dataset.image_size"] == [44, 80]
    assert published_options("mochi/Mochi-1", "480x848x37")["dataset.num_frames"] == 7
    flux = published_options("flux/FLUX.1-dev", "512x768")
    assert flux["dataset.image_size"] == [64, 96]
    assert "dataset.num_frames" not in flux
    assert published_options("sdxl/SDXL", None)["diffusion.objective"] == "ddpm"


def test_a_grid_of_models_has_their_options_and_columns(tmp_path: Path) -> None:
    grid = load_grid(write_grid(tmp_path, GRID))
    runs = grid.runs()
    assert len(runs) == len({run.name for run in runs}) == 8
    assert runs[1].name == "flux-debugmodel_64x64_bs16_act0.5_cfalse_dfloat16_p1,1"
    wan = runs[-1]
    assert wan.axes["model"] == "wan/debugmodel"
    assert (wan.axes["resolution"], wan.axes["checkpoint_fraction"]) == ("64x64x5", 0.5)
    values = flatten(wan.config)
    assert (values["model.name"], values["dataset.num_frames"], values["dataset.image_size"]) == ("wan", 2, [8, 8])
    assert (values["activation_checkpoint.mode"], values["activation_checkpoint.fraction"]) == ("fraction", 0.5)
    assert runs[0].config.training.mixed_precision_param == "float16"
    assert grid.columns[-3:] == ["model", "checkpoint_fraction", "resolution"]
    assert set(grid.columns) < set(columns(grid.columns))
    assert [column_type(name) for name in grid.columns[-3:]] == [str, float, str]


def test_impossible_resolutions_are_left_out_with_a_line_unless_they_are_excluded(tmp_path: Path) -> None:
    text = GRID + 'resolution = ["64x64", "64x64x5"]\n'
    left_out = load_grid(write_grid(tmp_path, text))
    assert left_out.left_out is not None and "takes images: must be HEIGHTxWIDTH" in left_out.left_out
    rules = (
        'exclude = [{ model = "flux/debugmodel", resolution = "64x64x5" }, '
        '{ model = "wan/debugmodel", resolution = "64x64" }]\n'
    )
    excluded = load_grid(write_grid(tmp_path, rules + text))
    runs = excluded.runs()
    assert len(runs) == 8 and excluded.left_out is None
    assert [run.axes for run in left_out.runs()] == [run.axes for run in runs]
    assert {(run.axes["model"], run.axes["resolution"]) for run in runs} == {
        ("flux/debugmodel", "64x64"),
        ("wan/debugmodel", "64x64x5"),
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"flux/debugmodel"', '"flux/FLUX.1-def"', "did you mean flux/FLUX.1-dev?"),
        ("[0, 0.5]", "[0]\nresolution = ['512']", 'resolution = "512": must be HEIGHTxWIDTH in pixels'),
        ("[0, 0.5]", "[0]\nresolution = ['60x64']", 'resolution = "60x64": height and width must be multiples of 8'),
        ("[0, 0.5]", "[0]\ndataset.image_size = [[8, 8]]", "axes: dataset.image_size is set by model; use that"),
        ("[0, 0.5]", "[0]\nactivation_checkpoint.mode = ['full']", "is set by checkpoint_fraction; use that"),
        ('model = ["flux/debugmodel", "wan/debugmodel"]', "resolution = ['64x64']", "needs a published model"),
    ],
)
def test_a_mistake_is_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_grid(write_grid(tmp_path, GRID.replace(old, new))).runs()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_frames_must_be_one_and_a_multiple() -> None:
    with pytest.raises(ConfigError, match=r'resolution = "480x832x80": frames .*1 .*multiple .*4'):
        published_options("wan/Wan2.1-T2V-1.3B", "480x832x80")
    with pytest.raises(ConfigError, match=r"videos: .*HEIGHTxWIDTHxFRAMES"):
        published_options("mochi/Mochi-1", "480x848")
